/* The pool's memory: that plaintext goes, that memory comes and goes back to the kernel, that the size changes. Nothing is filled or
 * poisoned here, so that what lies in free slots can be looked at. */
#define POOL_UNCHECKED
#include "pool_fixture.h"

static bool is_resident(const void *page)
{
    unsigned char vec = 0;
    CHECK_EQ(mincore((void *)((uintptr_t)page / NODE_SIZE * NODE_SIZE), NODE_SIZE, &vec), 0);
    return vec & 1;
}

/* A flag of the mapping in smaps, "dd" for instance. */
static bool has_flag(const void *address, const char *flag)
{
    FILE *smaps = fopen("/proc/self/smaps", "r");
    char line[512];
    unsigned long from, to;
    bool inside = false, marked = false;
    while (CHECK(smaps) && fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && !strstr(line, ": "))
            inside = from <= (uintptr_t)address && (uintptr_t)address < to;
        if (inside && !strncmp(line, "VmFlags:", 8))
            marked = strstr(line, flag) != NULL;
    }
    fclose(smaps);
    return marked;
}

/* ---- Plaintext ---- */

enum { MANY = 600 };

static struct node *secret(struct pool *pool)
{
    struct node *node = take_one(pool, POOL_DATA, POOL_COMMIT);
    memset(node->page, 's', NODE_SIZE);
    return node;
}

static void *give_from_another_thread(void *arg)
{
    struct pool *pool = arg;
    struct node *node[40];
    for (int i = 0; i < 40; i++)
        node[i] = secret(pool);
    for (int i = 0; i < 40; i++)
        pool_give(pool, node[i]);
    return NULL;
}

/* After one round of the pool's thread no slot that was free when it began holds plaintext: not in the list, not in a magazine. */
TEST_EACH(plaintext_is_wiped)
{
    struct pool *pool = new_pool(MANY + 100, 0, NULL);
    struct node *node[MANY];
    pthread_t thread;
    pthread_create(&thread, NULL, give_from_another_thread, pool);
    pthread_join(thread, NULL);
    for (int i = 0; i < MANY; i++)
        node[i] = secret(pool);
    for (int i = 0; i < MANY; i++)
        if (i % 100)
            pool_give(pool, node[i]);
    pool_tidy(pool);
    for (size_t i = 0; i < pool->used; i++) {
        const struct node *slot = &pool->node[i];
        if (is_taken(slot))
            CHECK(*(char *)slot->page == 's');
        else
            CHECK(strategy == POOL_MALLOC ? slot->page == NULL : is_zero(slot->page, NODE_SIZE));
    }
    CHECK(strategy == POOL_MALLOC || stats_of(pool).wiped > 0);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_tidy(pool), 0);
    for (int i = 0; i < MANY; i += 100) {
        CHECK(*(char *)node[i]->page == 's');
        pool_give(pool, node[i]);
    }
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

TEST(the_pool_has_a_thread_that_wipes)
{
    struct pool *pool = new_pool(10, 0, NULL);
    pool_give(pool, secret(pool));
    while (stats_of(pool).wiped == 0)
        usleep(1000);
    for (size_t i = 0; i < pool->used; i++)
        CHECK(is_zero(pool->node[i].page, NODE_SIZE));
    CHECK_EQ(pool_destroy(pool), 0);
}

/* ---- Copy-on-write ---- */

TEST(memory_of_free_slots_goes_to_the_kernel_or_stays)
{
    for (int mode = 0; mode < 3; mode++) {
        strategy = mode ? POOL_POOLING_COW : POOL_POOLING;
        struct pool *pool = new_pool(MANY, 0, NULL);
        struct node *node[MANY];
        for (int i = 0; i < MANY; i++)
            node[i] = secret(pool);
        for (int i = 0; i < MANY; i++)
            pool_give(pool, node[(i * 7) % MANY]);
        refused_advice = mode == 2 ? MADV_DONTNEED_LOCKED : -1;     /* the kernel changes its mind: then they are overwritten */
        CHECK_EQ(pool_tidy(pool), MANY);
        refused_advice = -1;
        for (int i = 0; i < MANY; i++) {
            CHECK_EQ(is_resident(node[i]->page), mode != 1);
            CHECK(is_zero(node[i]->page, NODE_SIZE));
        }
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
    strategy = POOL_POOLING;
}

TEST(copy_on_write_degrades)
{
    struct pool_options options = {.bytes = 1 << 20, .strategy = POOL_POOLING_COW};
    struct pool *pool;
    char reason[200];
    CHECK_EQ(pool_create(&pool, &options, reason, sizeof reason), 0);
    CHECK_EQ(stats_of(pool).strategy, POOL_POOLING_COW);
    CHECK_EQ(reason[0], 0);
    CHECK_EQ(pool_destroy(pool), 0);
    refused_advice = MADV_DONTNEED_LOCKED;
    CHECK_EQ(pool_create(&pool, &options, reason, sizeof reason), 0);
    refused_advice = -1;
    CHECK_EQ(stats_of(pool).strategy, POOL_POOLING);
    CHECK(strstr(reason, "pooling-cow is not possible") != NULL);
    CHECK_EQ(pool_destroy(pool), 0);
    options = (struct pool_options){.strategy = POOL_STRATEGIES};
    CHECK_EQ(pool_create(&pool, &options, NULL, 0), -EINVAL);
    options = (struct pool_options){.overflow = POOL_OVERFLOWS};
    CHECK_EQ(pool_create(&pool, &options, NULL, 0), -EINVAL);
}

/* ---- Prefault, huge pages, lock ---- */

struct seen { uint64_t done, total; int calls; };

static void progress(void *arg, uint64_t done, uint64_t total)
{
    struct seen *seen = arg;
    CHECK(done <= total && done > 0);
    *seen = (struct seen){done, total, seen->calls + 1};
}

TEST(prefault)
{
    for (int mode = 0; mode < 4; mode++) {
        struct seen seen = {0};
        struct pool_options options = {.bytes = 20 << 20, .max_bytes = 30 << 20, .prefault = true, .progress = progress,
                                       .progress_arg = &seen, .strategy = mode & 1 ? POOL_POOLING_COW : POOL_POOLING};
        struct pool *pool;
        refused_advice = mode & 2 ? MADV_POPULATE_WRITE : -1;
        CHECK_EQ(pool_create(&pool, &options, NULL, 0), 0);
        CHECK(seen.done == seen.total && seen.calls > 1 && seen.total >= stats_of(pool).capacity_bytes);
        for (size_t i = 0; i < pool->capacity; i += 101)
            CHECK(is_resident(pool->slot + i * NODE_SIZE) && is_resident(&pool->node[i / 64 * 64]));
        seen = (struct seen){0};
        size_t before = pool->capacity;
        CHECK_EQ(pool_resize(pool, 30 << 20), 0);
        refused_advice = -1;
        CHECK(seen.done == seen.total && seen.total > 0);
        for (size_t i = before; i < pool->capacity; i += 101)
            CHECK(is_resident(pool->slot + i * NODE_SIZE));
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
    struct pool_options options = {.bytes = 1 << 20, .prefault = true, .hugepages = true, .strategy = POOL_MALLOC};
    struct pool *pool;
    char reason[200];
    CHECK_EQ(pool_create(&pool, &options, reason, sizeof reason), 0);
    CHECK(strstr(reason, "no arena") != NULL);
    CHECK_EQ(pool_destroy(pool), 0);
}

TEST(huge_pages)
{
    struct pool_options options = {.bytes = 8 << 20, .hugepages = true};
    struct pool *pool;
    char reason[200];
    CHECK_EQ(pool_create(&pool, &options, reason, sizeof reason), 0);
    CHECK_EQ((uintptr_t)pool->slot % HUGE_PAGE, 0);
    CHECK_EQ(has_flag(pool->slot, " hg"), reason[0] == 0);
    CHECK_EQ(pool_destroy(pool), 0);
    FILE *nothing = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    CHECK_EQ(nothing != NULL || reason[0], true);
    if (nothing)
        fclose(nothing);
}

TEST(lock)
{
    struct pool_options options = {.bytes = 1 << 20, .max_bytes = 2 << 20, .lock = true};
    struct pool *pool = NULL;
    const int error[] = {EPERM, ENOMEM, EAGAIN}, told[] = {-EPERM, -EPERM, -ENOMEM};
    for (int i = 0; i < 3; i++) {
        lock_error = error[i];
        CHECK_EQ(pool_create(&pool, &options, NULL, 0), told[i]);
        CHECK(pool == NULL);
    }
    lock_error = 0;
    options.strategy = POOL_MALLOC;
    CHECK_EQ(pool_create(&pool, &options, NULL, 0), -EINVAL);
    for (options.strategy = POOL_POOLING; options.strategy <= POOL_POOLING_COW; options.strategy++) {
        CHECK_EQ(pool_create(&pool, &options, NULL, 0), 0);
        CHECK(has_flag(pool->slot, " lo") && has_flag(pool->node, " lo"));
        struct node *node = secret(pool);
        const void *page = node->page;
        pool_give(pool, node);
        CHECK_EQ(pool_tidy(pool), 1);
        CHECK_EQ(is_resident(page), options.strategy == POOL_POOLING);
        lock_error = ENOMEM;
        CHECK_EQ(pool_resize(pool, 2 << 20), -EPERM);
        lock_error = 0;
        CHECK_EQ(stats_of(pool).capacity, pool_nodes_in(1 << 20));
        CHECK_EQ(pool_resize(pool, 2 << 20), 0);
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
}

/* ---- Resize ---- */

static int resize(struct pool *pool, size_t capacity) { return pool_resize(pool, pool_footprint(capacity)); }

static struct pool *growable(size_t capacity, size_t most, size_t reserve, pool_evict_fn *evict)
{
    const struct pool_options options = {.bytes = pool_footprint(capacity), .max_bytes = pool_footprint(most),
                                         .reserve_nodes = reserve, .strategy = strategy, .overflow = overflow, .evict = evict};
    struct pool *pool = NULL;
    CHECK_EQ(pool_create(&pool, &options, NULL, 0), 0);
    return pool;
}

TEST_EACH(grows_at_once_and_shrinks_by_draining)
{
    struct pool *pool = growable(100, 1000, 10, NULL);
    struct node *node[1000];
    size_t n = 0;
    CHECK_EQ(resize(pool, 1001), -ERANGE);
    CHECK_EQ(resize(pool, 9), -EINVAL);
    for (; n < 100; n++)
        CHECK((node[n] = pool_take_cached(pool, POOL_DATA, POOL_COMMIT)) != NULL);
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_COMMIT));
    CHECK_EQ(resize(pool, 500), 0);
    for (; n < 500; n++)
        CHECK((node[n] = pool_take_cached(pool, POOL_DATA, POOL_COMMIT)) != NULL);
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_COMMIT));
    for (size_t i = 0; i < n; i++)
        memset(node[i]->page, (int)i, NODE_SIZE);

    CHECK_EQ(resize(pool, 50), 0);
    struct pool_stats stats = stats_of(pool);
    CHECK(stats.capacity == 50 && stats.draining == 450 && stats.in_use == 500 && stats.max_bytes == pool_footprint(1000));
    CHECK_EQ(pool_audit(pool), 0);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *page = node[i]->page;
        CHECK(page[0] == (i & 255) && !memcmp(page, page + 1, NODE_SIZE - 1));
    }
    size_t draining = 450;
    for (size_t i = 0; i < n; i += 2) {
        draining -= number_of(pool, node[i]) >= 50;
        pool_give(pool, node[i]);
        if (i % 50 == 0) {
            CHECK_EQ(stats_of(pool).draining, draining);
            CHECK_EQ(pool_audit(pool), 0);
        }
    }
    CHECK_EQ(resize(pool, 300), 0);                     /* while it drains */
    CHECK_EQ(pool_audit(pool), 0);
    for (size_t i = 1; i < n; i += 2)
        pool_give(pool, node[i]);
    stats = stats_of(pool);
    CHECK(stats.draining == 0 && stats.in_use == 0 && stats.capacity == 300);
    for (n = 0; n < 300; n++)
        CHECK((node[n] = pool_take_cached(pool, POOL_DATA, POOL_COMMIT)) != NULL);
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_COMMIT));
    CHECK_EQ(pool_audit(pool), 0);
    while (n)
        pool_give(pool, node[--n]);
    CHECK_EQ(resize(pool, 1000), 0);
    CHECK_EQ(resize(pool, 10), 0);                      /* nothing is taken: nothing has to drain */
    CHECK_EQ(stats_of(pool).draining, 0);
    CHECK_EQ(shared_free(pool), 10);
    for (size_t i = 10; i < pool->used; i++)
        CHECK(!pool->slot || !is_resident(pool->node[i].page));
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

/* Clean nodes above the new end go when the pool shrinks, or, if their owner is busy then, in the next round of its thread. */
TEST_EACH(shrinking_evicts)
{
    struct pool *pool = growable(20, 20, 0, owner_evict);
    struct object *o = new_owner(), *busy = new_owner();
    for (int i = 0; i < 16; i++) {
        struct node *node = pool_take_cached(pool, POOL_TREE, POOL_APPLICATION);
        node->level = 3;
        node->referenced = 1;
        CHECK(owner_cache(i % 2 ? o : busy, node));
    }
    pthread_mutex_lock(&busy->lock);
    CHECK_EQ(resize(pool, 2), 0);
    pthread_mutex_unlock(&busy->lock);
    CHECK_EQ(stats_of(pool).draining, 7);
    CHECK_EQ(pool_audit(pool), 0);
    pool_tidy(pool);
    CHECK_EQ(stats_of(pool).draining, 0);
    CHECK_EQ(stats_of(pool).kind[POOL_TREE].evictions, 14);
    owner_free(pool, o);
    owner_free(pool, busy);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

enum { RESIZE_THREADS = 3, RESIZES = 60 };

struct churn {
    struct pool *pool;
    atomic_bool *stop;
    unsigned seed;
};

static void *churn(void *arg)
{
    struct churn *c = arg;
    struct object *o = new_owner();
    struct node *held[60];
    size_t n = 0;
    while (!atomic_load(c->stop)) {
        struct node *node = NULL;
        if (n < 60 && rand_r(&c->seed) % 2 && pool_take(c->pool, POOL_DATA, rand_r(&c->seed) % POOL_CLASSES, false, &node) == 0) {
            *(struct node **)node->page = node;
            if (node->overflow || rand_r(&c->seed) % 2 || !owner_cache(o, node))
                held[n++] = node;
        } else if (n) {
            node = held[--n];
            CHECK(*(struct node **)node->page == node);
            pool_give(c->pool, node);
        }
    }
    while (n)
        pool_give(c->pool, held[--n]);
    owner_free(c->pool, o);
    return NULL;
}

TEST_EACH(resizing_while_it_is_used)
{
    struct pool *pool = growable(100, 700, 5, owner_evict);
    struct churn c[RESIZE_THREADS];
    pthread_t thread[RESIZE_THREADS];
    atomic_bool stop = false;
    unsigned seed = 7;
    for (unsigned i = 0; i < RESIZE_THREADS; i++) {
        c[i] = (struct churn){pool, &stop, i + 1};
        pthread_create(&thread[i], NULL, churn, &c[i]);
    }
    for (int i = 0; i < RESIZES; i++) {
        CHECK_EQ(resize(pool, 5 + rand_r(&seed) % 696), 0);
        if (i % 8 == 0)
            pool_tidy(pool);
        sched_yield();
    }
    atomic_store(&stop, true);
    for (unsigned i = 0; i < RESIZE_THREADS; i++)
        pthread_join(thread[i], NULL);
    CHECK_EQ(stats_of(pool).in_use, 0);
    CHECK_EQ(stats_of(pool).draining, 0);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}
