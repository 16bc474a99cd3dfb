/* The node pool. Its source is included rather than linked, so that every call into the system can be made to fail and
 * the audit can be shown pools that are broken on purpose. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

static atomic_long calls_left = -1;     /* > 0: that many calls succeed, 0: all fail, < 0: none fails */
static bool without_membarrier;
static bool watching;                   /* record the last arguments of free and munmap, and whether their pages are wiped */
static void *munmapped, *freed;
static bool freed_was_wiped, slots_were_wiped;

static bool refuse(void)
{
    long left = atomic_load(&calls_left);
    if (left > 0)
        atomic_store(&calls_left, left - 1);
    if (left == 0)
        errno = ENOMEM;
    return left == 0;
}

static bool is_zero(const void *p, size_t n)
{
    const unsigned char *bytes = p;
    return n == 0 || (bytes[0] == 0 && !memcmp(bytes, bytes + 1, n - 1));
}

static void spy_free(void *p, bool page)
{
    if (watching && page) {
        freed = p;
        freed_was_wiped = is_zero(p, 4096);
    }
    free(p);
}

static int spy_munmap(void *p, size_t n, bool slots)
{
    if (watching && slots) {
        munmapped = p;
        slots_were_wiped = is_zero(p, n);
    }
    return munmap(p, n);
}

#define posix_memalign(p, alignment, n) (refuse() ? ENOMEM : posix_memalign(p, alignment, n))
#define calloc(n, size) (refuse() ? NULL : calloc(n, size))
#define mmap(...) (refuse() ? MAP_FAILED : mmap(__VA_ARGS__))
#define mprotect(...) (refuse() ? -1 : mprotect(__VA_ARGS__))
#define madvise(...) (refuse() ? -1 : madvise(__VA_ARGS__))
#define pthread_key_create(...) (refuse() ? ENOMEM : pthread_key_create(__VA_ARGS__))
#define pthread_setspecific(...) (refuse() ? ENOMEM : pthread_setspecific(__VA_ARGS__))
#define syscall(...) (without_membarrier ? -1 : syscall(__VA_ARGS__))
#define free(p) spy_free(p, !strcmp(#p, "node->page"))
#define munmap(p, n) spy_munmap(p, n, !strcmp(#p, "pool->slot"))
#include "_pool.c"
#undef free
#undef munmap
#undef calloc

enum { NODE_COST = NODE_SIZE + sizeof(struct node) };

static int create(struct pool **pool, size_t bytes, size_t reserve, pool_evict_fn *evict)
{
    const struct pool_options options = {.bytes = bytes, .reserve_nodes = reserve, .evict = evict};
    return pool_create(pool, &options, NULL, 0);
}

static struct node *take_one(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct node *node;
    return pool_take(pool, kind, class, false, &node) ? NULL : node;
}

static struct pool *new_pool(size_t capacity, size_t reserve, pool_evict_fn *evict)
{
    struct pool *pool;
    struct pool_stats stats;
    CHECK(create(&pool, footprint(capacity), reserve, evict) == 0);
    pool_stats(pool, &stats);
    CHECK(stats.capacity == (capacity > reserve ? capacity : reserve));
    return pool;
}

static struct pool_stats stats_of(struct pool *pool)
{
    struct pool_stats stats;
    pool_stats(pool, &stats);
    return stats;
}

/* ---- Size ---- */

TEST(budget_covers_slots_and_descriptors)
{
    for (size_t bytes = 0; bytes < 70 * NODE_SIZE; bytes += 256) {
        struct pool *pool;
        CHECK(create(&pool, bytes, 0, NULL) == 0);
        struct pool_stats stats = stats_of(pool);
        CHECK(stats.capacity_bytes <= bytes);
        CHECK(footprint(stats.capacity + 1) > bytes);
        CHECK(pool_audit(pool) == 0 && pool_destroy(pool) == 0);
    }
    CHECK(footprint(1) == 2 * NODE_SIZE);
    CHECK(footprint(57) == 57 * NODE_SIZE + 2 * NODE_SIZE || sizeof(struct node) != 72);
    struct pool *pool;
    CHECK(create(&pool, 0, SIZE_MAX, NULL) == -ENOMEM);
    CHECK(create(&pool, SIZE_MAX, 0, NULL) == -ENOMEM);
    CHECK(pool_destroy(NULL) == 0);
}

/* More than one chunk, every slot usable and in its place. */
TEST(chunks)
{
    const size_t capacity = CHUNK_NODES + 100;
    struct pool *pool = new_pool(capacity, 0, NULL);
    struct node **node = malloc(capacity * sizeof *node);
    for (size_t i = 0; i < capacity; i++) {
        CHECK((node[i] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)));
        CHECK((uintptr_t)node[i]->page % NODE_SIZE == 0);
        *(size_t *)node[i]->page = i;
    }
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
    for (size_t i = 0; i < capacity; i++) {
        CHECK(*(size_t *)node[i]->page == i);
        pool_give(pool, node[i]);
    }
    CHECK(pool_audit(pool) == 0 && stats_of(pool).high_water == capacity);
    CHECK(pool_destroy(pool) == 0);
    free(node);
}

/* The whole arena is marked dd (do not dump) in smaps. */
TEST(no_core_dump)
{
    struct pool *pool = new_pool(8, 0, NULL);
    const void *wanted[] = {pool->node, pool->slot};
    for (int i = 0; i < 2; i++) {
        FILE *smaps = fopen("/proc/self/smaps", "r");
        char line[512];
        unsigned long from, to;
        bool inside = false, marked = false;
        CHECK(smaps);
        while (fgets(line, sizeof line, smaps)) {
            if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && !strstr(line, ": "))
                inside = from <= (uintptr_t)wanted[i] && (uintptr_t)wanted[i] < to;
            if (inside && !strncmp(line, "VmFlags:", 8))
                marked = strstr(line, " dd") != NULL;
        }
        fclose(smaps);
        CHECK(marked);
    }
    CHECK(pool_destroy(pool) == 0);
}

/* ---- Who gets what ---- */

/* Every capacity and reserve up to 40, so beyond one magazine: hits, misses and NULLs where they belong. */
TEST(small_pools)
{
    for (size_t capacity = 0; capacity <= 40; capacity++)
        for (size_t reserve = 0; reserve <= capacity; reserve += reserve < 4 ? 1 : 9) {
            struct pool *pool = new_pool(capacity, reserve, NULL);
            struct node *node[44];
            size_t n = 0;
            for (; n < capacity - reserve; n++)
                CHECK((node[n] = pool_take_cached(pool, POOL_DATA, n % 2 ? POOL_APPLICATION : POOL_BACKGROUND)));
            CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
            CHECK(!pool_take_cached(pool, POOL_DATA, POOL_BACKGROUND));
            CHECK((node[43] = take_one(pool, POOL_TREE, POOL_APPLICATION)) && node[43]->overflow);
            for (; n < capacity; n++)
                CHECK((node[n] = take_one(pool, POOL_TREE, POOL_COMMIT)) && !node[n]->overflow);
            CHECK(!pool_take_cached(pool, POOL_TREE, POOL_COMMIT));
            CHECK((node[n] = take_one(pool, POOL_TREE, POOL_COMMIT)) && node[n]->overflow);
            node[n + 1] = node[43];

            struct pool_stats stats = stats_of(pool);
            const struct pool_kind_stats *data = &stats.kind[POOL_DATA], *tree = &stats.kind[POOL_TREE];
            CHECK(stats.in_use == capacity && stats.high_water == capacity);
            CHECK(data->takes == capacity - reserve && data->hits == data->takes && data->misses == 0);
            CHECK(tree->takes == reserve + 2 && tree->hits == reserve && tree->misses == 2 && tree->misses_live == 2);
            CHECK(data->in_use == data->takes && tree->in_use == tree->takes && tree->bytes == (reserve + 2) * NODE_SIZE);
            CHECK(pool_audit(pool) == 0);

            for (size_t i = 0; i < capacity + 2; i++)
                pool_give(pool, node[i]);
            stats = stats_of(pool);
            CHECK(stats.in_use == 0 && stats.high_water == capacity);
            CHECK(data->gives == data->takes && tree->gives == tree->takes && tree->misses == 2);
            CHECK(tree->misses_live == 0 && tree->in_use == 0 && tree->bytes == 0 && tree->high_water == reserve + 2);
            CHECK(pool_audit(pool) == 0 && pool_destroy(pool) == 0);
        }
}

/* What is given back while the reserve is short goes to the reserve, wherever it lies. */
TEST(reserve_is_refilled_first)
{
    struct pool *pool = new_pool(10, 4, NULL);
    struct node *app[6], *commit[4];
    for (int i = 0; i < 6; i++)
        CHECK((app[i] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)));
    for (int i = 0; i < 4; i++)
        CHECK((commit[i] = pool_take_cached(pool, POOL_DATA, POOL_COMMIT)));
    for (int i = 0; i < 4; i++) {
        pool_give(pool, app[i]);
        CHECK_EQ(shared_free(pool), i + 1);
        CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
    }
    pool_give(pool, app[4]);
    CHECK((app[4] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)));
    for (int i = 0; i < 4; i++)
        CHECK((app[i] = pool_take_cached(pool, POOL_DATA, POOL_COMMIT)));
    for (int i = 0; i < 4; i++)
        pool_give(pool, commit[i]);
    for (int i = 0; i < 6; i++)
        pool_give(pool, app[i]);
    CHECK(pool_audit(pool) == 0 && pool_destroy(pool) == 0);
}

struct four { struct pool *pool; struct node *node[4]; };

static void *commit_takes_four(void *arg)
{
    struct four *four = arg;
    for (int i = 0; i < 4; i++)
        four->node[i] = pool_take_cached(four->pool, POOL_TREE, POOL_COMMIT);
    return NULL;
}

/* Nodes that lie in a magazine when another thread's commit drains the reserve count as the reserve from then on. */
TEST(magazine_yields_to_the_reserve)
{
    struct four four = {.pool = new_pool(10, 4, NULL)};
    struct node *app[2];
    pthread_t thread;
    CHECK((app[0] = pool_take_cached(four.pool, POOL_DATA, POOL_APPLICATION)) != NULL);
    CHECK_EQ(magazine_count(four.pool->magazines), 5);
    pthread_create(&thread, NULL, commit_takes_four, &four);
    pthread_join(thread, NULL);
    CHECK_EQ(magazine_count(four.pool->magazines), 5);
    CHECK((app[1] = pool_take_cached(four.pool, POOL_DATA, POOL_APPLICATION)) != NULL);     /* the fifth */
    CHECK(!pool_take_cached(four.pool, POOL_DATA, POOL_APPLICATION));
    CHECK_EQ(shared_free(four.pool), 4);
    for (int i = 0; i < 4; i++)
        pool_give(four.pool, four.node[i]);
    pool_give(four.pool, app[0]);
    pool_give(four.pool, app[1]);
    CHECK_EQ(pool_audit(four.pool), 0);
    CHECK_EQ(pool_destroy(four.pool), 0);
}

/* Random takes and gives of one thread against a plain model: contents stay, no slot is handed out twice, counters and
 * high-water marks are exact. */
TEST(against_model)
{
    unsigned seed = 1;
    for (size_t capacity = 3; capacity < 140; capacity += 17) {
        struct pool *pool = new_pool(capacity, 2, NULL);
        struct { struct node *node; unsigned stamp; bool overflow; } live[160];
        size_t n = 0, slots = 0, slots_high = 0, in_use[2] = {0}, high[2] = {0}, takes[2] = {0}, misses[2] = {0};
        for (unsigned step = 1; step < 4000; step++) {
            bool grow = (step / 500) % 2 == 0;
            if (n < 160 && (rand_r(&seed) % 4 != 0) == grow) {
                unsigned kind = rand_r(&seed) % 2;
                struct node *node = take_one(pool, kind, POOL_COMMIT);
                CHECK(node && node->taken && node->kind == kind && !node->owner && !node->pins && !node->referenced);
                CHECK(node->overflow == (slots == capacity));
                for (size_t i = 0; i < n; i++)
                    CHECK(live[i].node != node && live[i].node->page != node->page);
                memset(node->page, (int)step, NODE_SIZE);
                node->referenced = 1;
                node->pins = 3;
                live[n].node = node;
                live[n].overflow = node->overflow;
                live[n++].stamp = step;
                takes[kind]++;
                in_use[kind]++;
                misses[kind] += node->overflow;
                slots += !node->overflow;
                slots_high = slots > slots_high ? slots : slots_high;
                high[kind] = in_use[kind] > high[kind] ? in_use[kind] : high[kind];
            } else if (n) {
                size_t i = rand_r(&seed) % n;
                const unsigned char *page = live[i].node->page;
                CHECK(page[0] == (live[i].stamp & 255) && !memcmp(page, page + 1, NODE_SIZE - 1));
                in_use[live[i].node->kind]--;
                slots -= !live[i].node->overflow;
                pool_give(pool, live[i].node);
                live[i] = live[--n];
            }
            if (step % 97 == 0) {
                struct pool_stats stats = stats_of(pool);
                CHECK(stats.in_use == slots && stats.high_water == slots_high);
                for (unsigned kind = 0; kind < 2; kind++) {
                    CHECK(stats.kind[kind].takes == takes[kind] && stats.kind[kind].misses == misses[kind]);
                    CHECK(stats.kind[kind].in_use == in_use[kind] && stats.kind[kind].high_water == high[kind]);
                    CHECK(stats.kind[kind].gives == takes[kind] - in_use[kind]);
                }
                CHECK(pool_audit(pool) == 0);
            }
        }
        CHECK_EQ(pool_destroy(pool), n);        /* what was not given back is counted as leaked */
        for (size_t i = 0; i < n; i++)
            if (live[i].overflow)
                free(live[i].node->page);
    }
}

/* ---- Eviction: an owner in miniature ---- */

struct object {
    pthread_mutex_t lock;               /* guards cached */
    struct node *cached[8];
};

static struct object *new_owner(void)
{
    struct object *o = malloc(sizeof *o);
    memset(o, 0, sizeof *o);
    pthread_mutex_init(&o->lock, NULL);
    return o;
}

/* False if there is no room; then the caller still has the node. */
static bool owner_cache(struct object *o, struct node *node)
{
    bool done = false;
    pthread_mutex_lock(&o->lock);
    for (unsigned i = 0; !done && i < 8; i++)
        if (!o->cached[i]) {
            o->cached[i] = node;
            node->index = i;
            node->owner = o;
            done = true;
        }
    pthread_mutex_unlock(&o->lock);
    return done;
}

static struct node *owner_uncache(struct object *o, unsigned i)
{
    pthread_mutex_lock(&o->lock);
    struct node *node = o->cached[i];
    if (node) {
        o->cached[i] = NULL;
        node->owner = NULL;
    }
    pthread_mutex_unlock(&o->lock);
    return node;
}

static void owner_free(struct pool *pool, struct object *o)
{
    for (unsigned i = 0; i < 8; i++) {
        struct node *node = owner_uncache(o, i);
        if (node)
            pool_give(pool, node);
    }
    pthread_mutex_destroy(&o->lock);
    memset(o, 0xee, sizeof *o);
    free(o);
}

static bool owner_evict(struct node *node)
{
    struct object *o = node->owner;
    if (!o || pthread_mutex_trylock(&o->lock))
        return false;
    bool ours = node->owner && !node->pins;
    if (ours) {
        CHECK(o->cached[node->index] == node);
        o->cached[node->index] = NULL;
    }
    pthread_mutex_unlock(&o->lock);
    return ours;
}

static struct node *cache_one(struct pool *pool, struct object *o, unsigned level)
{
    struct node *node = pool_take_cached(pool, level ? POOL_TREE : POOL_DATA, POOL_APPLICATION);
    CHECK(node);
    node->level = (uint8_t)level;
    CHECK(owner_cache(o, node));
    return node;
}

static bool is_cached(const struct object *o, const struct node *node)
{
    for (unsigned i = 0; i < 8; i++)
        if (o->cached[i] == node)
            return true;
    return false;
}

TEST(eviction_prefers_leaves_and_spares_what_is_used)
{
    struct pool *pool = new_pool(5, 0, owner_evict);
    struct object *o = new_owner();
    struct node *top = cache_one(pool, o, 2), *pinned = cache_one(pool, o, 1), *used = cache_one(pool, o, 1);
    struct node *leaf = cache_one(pool, o, 1), *data = cache_one(pool, o, 0);
    pinned->pins = 1;
    used->referenced = 1;

    struct node *taken[5];
    for (int i = 0; i < 2; i++)                     /* in whichever order the hand meets them */
        CHECK((taken[i] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)) == leaf || taken[i] == data);
    CHECK(is_cached(o, top) && is_cached(o, used) && !is_cached(o, leaf) && !is_cached(o, data));
    CHECK((taken[2] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)) == used);    /* its bit was cleared */
    CHECK((taken[3] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)) == top);     /* only now */
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
    pinned->pins = 0;

    pthread_mutex_lock(&o->lock);                   /* the owner is busy */
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
    pthread_mutex_unlock(&o->lock);
    CHECK((taken[4] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)) == pinned);

    struct pool_stats stats = stats_of(pool);
    CHECK_EQ(stats.kind[POOL_TREE].evictions, 4);
    CHECK_EQ(stats.kind[POOL_DATA].evictions, 1);
    CHECK_EQ(stats.kind[POOL_TREE].takes, 4);
    CHECK_EQ(stats.kind[POOL_TREE].in_use, 0);
    CHECK_EQ(stats.kind[POOL_DATA].in_use, 5);
    CHECK_EQ(stats.kind[POOL_DATA].misses, 0);
    for (int i = 0; i < 5; i++) {
        CHECK(taken[i]->owner == NULL);
        pool_give(pool, taken[i]);
    }
    owner_free(pool, o);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

/* A referenced node survives while others can go, also in a pool larger than one stretch of the hand. */
TEST(eviction_finds_the_clean_among_the_dirty)
{
    const size_t capacity = 3 * STRETCH;
    struct pool *pool = new_pool(capacity, 0, owner_evict);
    struct object *o = new_owner();
    struct node **dirty = malloc(capacity * sizeof *dirty);
    for (size_t i = 0; i < capacity - 1; i++)
        dirty[i] = take_one(pool, POOL_DATA, POOL_APPLICATION);
    struct node *clean = cache_one(pool, o, 0);
    struct node *found = NULL;
    for (int i = 0; i < 4 && !found; i++)           /* each try looks at one stretch and moves on */
        found = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION);
    CHECK(found == clean);
    pool_give(pool, found);
    for (size_t i = 0; i < capacity - 1; i++)
        pool_give(pool, dirty[i]);
    free(dirty);
    owner_free(pool, o);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

/* What an application evicts while the reserve is short refills the reserve first. */
TEST(eviction_serves_the_reserve_first)
{
    struct pool *pool = new_pool(6, 2, owner_evict);
    struct object *o = new_owner();
    for (int i = 0; i < 4; i++)
        cache_one(pool, o, 0);
    struct node *commit[2] = {take_one(pool, POOL_TREE, POOL_COMMIT), take_one(pool, POOL_TREE, POOL_COMMIT)};
    struct node *app = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION);     /* evicts three: two are the reserve's */
    CHECK(app != NULL);
    CHECK_EQ(stats_of(pool).kind[POOL_DATA].evictions, 3);
    CHECK_EQ(shared_free(pool), 2);
    pool_give(pool, app);
    pool_give(pool, commit[0]);
    pool_give(pool, commit[1]);
    owner_free(pool, o);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

/* ---- Threads ---- */

struct idler {
    struct pool *pool;
    pthread_barrier_t warm, leave;
};

static void *idle_with_a_full_magazine(void *arg)
{
    struct idler *idler = arg;
    pool_give(idler->pool, take_one(idler->pool, POOL_DATA, POOL_APPLICATION));
    pthread_barrier_wait(&idler->warm);
    pthread_barrier_wait(&idler->leave);
    return NULL;
}

/* An idle thread's magazine is not lost to the others, neither while it lives nor when it ends. */
TEST(magazine_of_an_idle_thread)
{
    for (int mode = 0; mode < 4; mode++) {
        without_membarrier = mode & 2;
        struct idler idler = {.pool = new_pool(16, 0, NULL)};
        pthread_barrier_init(&idler.warm, NULL, 2);
        pthread_barrier_init(&idler.leave, NULL, 2);
        pthread_t thread;
        pthread_create(&thread, NULL, idle_with_a_full_magazine, &idler);
        pthread_barrier_wait(&idler.warm);
        CHECK_EQ(idler.pool->expedited, !without_membarrier);
        CHECK_EQ(magazine_count(idler.pool->magazines), 16);
        if (mode & 1) {
            pthread_barrier_wait(&idler.leave);
            pthread_join(thread, NULL);
            CHECK(idler.pool->magazines == NULL);
            CHECK_EQ(shared_free(idler.pool), 16);
        }
        struct node *node[16];
        for (int i = 0; i < 16; i++)
            CHECK((node[i] = pool_take_cached(idler.pool, POOL_DATA, POOL_APPLICATION)) != NULL);
        CHECK(!pool_take_cached(idler.pool, POOL_DATA, POOL_APPLICATION));
        for (int i = 0; i < 16; i++)
            pool_give(idler.pool, node[i]);
        if (!(mode & 1)) {
            pthread_barrier_wait(&idler.leave);
            pthread_join(thread, NULL);
        }
        CHECK_EQ(pool_audit(idler.pool), 0);
        CHECK_EQ(stats_of(idler.pool).kind[POOL_DATA].takes, 17);
        CHECK_EQ(pool_destroy(idler.pool), 0);
        pthread_barrier_destroy(&idler.warm);
        pthread_barrier_destroy(&idler.leave);
    }
    without_membarrier = false;
}

struct busy {
    struct pool *pool;
    atomic_bool stop;
    uint64_t takes;
};

static void *keep_busy(void *arg)
{
    struct busy *busy = arg;
    while (!atomic_load(&busy->stop)) {
        struct node *node[3];
        for (int i = 0; i < 3; i++)
            if ((node[i] = pool_take_cached(busy->pool, POOL_DATA, POOL_APPLICATION)))
                *(struct node **)node[i]->page = node[i];
        for (int i = 0; i < 3; i++)
            if (node[i]) {
                CHECK(*(struct node **)node[i]->page == node[i]);
                pool_give(busy->pool, node[i]);
                busy->takes++;
            }
    }
    return NULL;
}

/* A thread that is always inside its magazine, while another one raids it and counts. */
TEST(raids_of_a_busy_magazine)
{
    for (int mode = 0; mode < 2; mode++) {
        without_membarrier = mode;
        struct busy busy = {.pool = new_pool(16, 0, NULL)};
        pthread_t thread;
        pthread_create(&thread, NULL, keep_busy, &busy);
        uint64_t takes = 0;
        for (int round = 0; round < 3000; round++) {
            struct node *node[17];
            int n = 0;
            while ((node[n] = pool_take_cached(busy.pool, POOL_TREE, POOL_APPLICATION)))
                *(struct node **)node[n]->page = node[n], n++;
            CHECK(n >= 13 - 3 && n <= 16);          /* all but what the other has, and what is between two lists just now */
            takes += (uint64_t)n;
            while (n--) {
                CHECK(*(struct node **)node[n]->page == node[n]);
                pool_give(busy.pool, node[n]);
            }
            stats_of(busy.pool);
        }
        atomic_store(&busy.stop, true);
        pthread_join(thread, NULL);
        struct pool_stats stats = stats_of(busy.pool);
        CHECK_EQ(stats.kind[POOL_TREE].takes, takes);
        CHECK_EQ(stats.kind[POOL_DATA].takes, busy.takes);
        CHECK_EQ(stats.in_use, 0);
        CHECK_EQ(pool_audit(busy.pool), 0);
        CHECK_EQ(pool_destroy(busy.pool), 0);
    }
    without_membarrier = false;
}

enum { STRESS_THREADS = 4, STRESS_STEPS = 20000 };

struct stress {
    struct pool *pool;
    struct object *shared;
    unsigned seed;
    uint64_t overflows;
};

/* Takes, caches, uncaches and gives at random, in an owner of its own that it frees now and then, and in one that all
 * threads share. A node's page holds its own address while it is taken. */
static void *stress(void *arg)
{
    struct stress *s = arg;
    struct object *own = new_owner();
    for (unsigned step = 0; step < STRESS_STEPS; step++) {
        struct object *o = rand_r(&s->seed) % 2 ? own : s->shared;
        unsigned dice = rand_r(&s->seed) % 16;
        if (dice == 0) {
            owner_free(s->pool, own);
            own = new_owner();
        } else if (dice < 10) {
            enum pool_class class = (enum pool_class)(rand_r(&s->seed) % POOL_CLASSES);
            struct node *node = take_one(s->pool, dice % POOL_KINDS, class);
            node->level = (uint8_t)(dice % 3);
            *(struct node **)node->page = node;
            s->overflows += node->overflow;
            if (node->overflow || !owner_cache(o, node))
                pool_give(s->pool, node);
        } else {
            struct node *node = owner_uncache(o, rand_r(&s->seed) % 8);
            if (node) {
                CHECK(*(struct node **)node->page == node);
                pool_give(s->pool, node);
            }
        }
        if (step % 4096 == 0)
            stats_of(s->pool);          /* stops everybody's magazine */
    }
    owner_free(s->pool, own);
    return NULL;
}

TEST(threads_that_share_a_pool)
{
    for (int mode = 0; mode < 4; mode++) {          /* 12 slots are too few even for one thread, 36 seldom for all */
        without_membarrier = mode & 2;
        struct pool *pool = new_pool(mode & 1 ? 36 : 12, 3, owner_evict);
        struct object *shared = new_owner();
        struct stress s[STRESS_THREADS];
        pthread_t thread[STRESS_THREADS];
        uint64_t overflows = 0;
        for (unsigned i = 0; i < STRESS_THREADS; i++) {
            s[i] = (struct stress){pool, shared, 17 * i + 1, 0};
            pthread_create(&thread[i], NULL, stress, &s[i]);
        }
        for (unsigned i = 0; i < STRESS_THREADS; i++) {
            pthread_join(thread[i], NULL);
            overflows += s[i].overflows;
        }
        owner_free(pool, shared);
        struct pool_stats stats = stats_of(pool);
        CHECK_EQ(stats.in_use, 0);
        CHECK(stats.high_water <= stats.capacity + STRESS_THREADS * MAGAZINE && stats.high_water > 0);
        CHECK(mode & 1 || (stats.kind[0].evictions > 0 && stats.kind[1].evictions > 0));
        CHECK_EQ(stats.kind[0].misses + stats.kind[1].misses, overflows);
        for (unsigned kind = 0; kind < POOL_KINDS; kind++) {
            CHECK_EQ(stats.kind[kind].takes, stats.kind[kind].gives + stats.kind[kind].evictions);
            CHECK_EQ(stats.kind[kind].misses_live, 0);
        }
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
    without_membarrier = false;
}

/* ---- What goes wrong ---- */

/* Every call into the system fails in turn. */
TEST(creation_fails_cleanly)
{
    const size_t bytes = footprint(CHUNK_NODES + 5);
    struct pool *pool = NULL;
    long n = 0;
    for (int result = -ENOMEM; result; n++) {
        atomic_store(&calls_left, n);
        result = create(&pool, bytes, 2, NULL);
        atomic_store(&calls_left, -1);
        CHECK(result == 0 || (result == -ENOMEM && pool == NULL));
    }
    CHECK_EQ(n - 1, 1 + 2 + 8 + 1);     /* struct, two reservations, four commitments of two calls, the key */
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

/* Without memory for a magazine a thread is served all the same; without memory for overflow nodes, not beyond the slots. */
TEST(no_memory_while_in_use)
{
    for (long n = 0; n < 2; n++) {      /* the magazine's memory, the thread's pointer to it */
        struct pool *pool = new_pool(4, 1, NULL);
        struct node *node[4];
        for (int i = 0; i < 4; i++) {
            atomic_store(&calls_left, n);
            CHECK((node[i] = take_one(pool, POOL_DATA, POOL_COMMIT)) != NULL);
        }
        atomic_store(&calls_left, 0);
        CHECK(take_one(pool, POOL_DATA, POOL_COMMIT) == NULL);
        for (int i = 0; i < 4; i++) {
            atomic_store(&calls_left, n);
            pool_give(pool, node[i]);
        }
        CHECK(pool->magazines == NULL);
        atomic_store(&calls_left, 0);
        CHECK_EQ(pool_audit(pool), -ENOMEM);
        atomic_store(&calls_left, -1);
        struct pool_stats stats = stats_of(pool);
        CHECK_EQ(stats.kind[POOL_DATA].takes, 4);
        CHECK_EQ(stats.kind[POOL_DATA].misses, 0);
        CHECK_EQ(stats.high_water, 4);
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
}

/* Plaintext does not outlive an overflow node, nor slots the pool. */
TEST(secrets_are_wiped)
{
    struct pool *pool = new_pool(2, 0, NULL);
    struct node *node[3];
    for (int i = 0; i < 3; i++) {
        node[i] = take_one(pool, POOL_DATA, POOL_COMMIT);
        memset(node[i]->page, 's', NODE_SIZE);
    }
    CHECK(node[2]->overflow);
    const void *page = node[2]->page, *slots = pool->slot;
    watching = true;
    for (int i = 0; i < 3; i++)
        pool_give(pool, node[i]);
    CHECK(freed == page && freed_was_wiped);
    CHECK_EQ(pool_destroy(pool), 0);
    watching = false;
    CHECK(munmapped == slots && slots_were_wiped);
}

TEST(audit_notices)
{
    struct pool *pool = new_pool(8, 0, NULL);
    struct node *node = take_one(pool, POOL_DATA, POOL_COMMIT), *other = take_one(pool, POOL_DATA, POOL_COMMIT);
    struct magazine *m = pool->magazines;
    CHECK_EQ(pool_audit(pool), 0);

    node->taken = false;                                /* in no list, not taken: lost */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    node->taken = true;

    m->node[magazine_count(m)] = node;                  /* in a list and taken */
    magazine_resize(m, magazine_count(m) + 1);
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    m->node[magazine_count(m) - 1] = m->node[0];        /* in a list twice */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    magazine_resize(m, magazine_count(m) - 1);

    pool->slots++;                                      /* the counter disagrees */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    pool->slots--;

    m->node[0]->owner = (struct object *)pool;          /* a free node offered for eviction */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    m->node[0]->owner = NULL;

    pool->listed++;                                     /* the free list is shorter than it says */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    pool->listed--;

#ifdef POOL_CHECKED
    slot_access(m->node[0]);                            /* written to after it was given back */
    *(char *)m->node[0]->page = 0;
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    slot_access(m->node[0]);
    slot_close(m->node[0]);
#endif

    CHECK_EQ(pool_audit(pool), 0);
    pool_give(pool, node);
    pool_give(pool, other);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}
