/* The node pool: who gets what, eviction, threads, what goes wrong. */
#include "pool_fixture.h"

/* ---- Size ---- */

TEST(budget_covers_slots_and_descriptors)
{
    for (size_t bytes = 0; bytes < 70 * NODE_SIZE; bytes += 256) {
        struct pool *pool;
        CHECK(create(&pool, bytes, 0, NULL) == 0);
        struct pool_stats stats = stats_of(pool);
        CHECK(stats.capacity_bytes <= bytes);
        CHECK(pool_footprint(stats.capacity + 1) > bytes);
        CHECK(pool_audit(pool) == 0 && pool_destroy(pool) == 0);
    }
    CHECK(pool_footprint(1) == 2 * NODE_SIZE);
    CHECK(pool_footprint(57) == 57 * NODE_SIZE + 2 * NODE_SIZE || sizeof(struct node) != 72);
    struct pool *pool;
    CHECK(create(&pool, 0, SIZE_MAX, NULL) == -ENOMEM);
    CHECK(create(&pool, SIZE_MAX, 0, NULL) == -ENOMEM);
    CHECK(pool_destroy(NULL) == 0);
}

/* Every slot usable and in its place. */
TEST_EACH(many_slots)
{
    const size_t capacity = 16484;
    struct pool *pool = new_pool(capacity, 0, NULL);
    struct node **node = malloc(capacity * sizeof *node);
    for (size_t i = 0; i < capacity; i++) {
        CHECK((node[i] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)));
        CHECK((uintptr_t)node[i]->page % (strategy == POOL_MALLOC ? 16 : NODE_SIZE) == 0);
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
TEST_EACH(small_pools)
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
            size_t extra = overflow == POOL_OVERFLOW_MALLOC ? 2 : 0;
            node[43] = take_one(pool, POOL_TREE, POOL_APPLICATION);
            CHECK(extra ? node[43] && node[43]->overflow : !node[43]);
            for (; n < capacity; n++)
                CHECK((node[n] = take_one(pool, POOL_TREE, POOL_COMMIT)) && !node[n]->overflow);
            CHECK(!pool_take_cached(pool, POOL_TREE, POOL_COMMIT));
            node[n] = take_one(pool, POOL_TREE, POOL_COMMIT);
            CHECK(extra ? node[n] && node[n]->overflow : !node[n]);
            node[n + 1] = node[43];

            struct pool_stats stats = stats_of(pool);
            const struct pool_kind_stats *data = &stats.kind[POOL_DATA], *tree = &stats.kind[POOL_TREE];
            CHECK(stats.in_use == capacity && stats.high_water == capacity);
            CHECK(data->takes == capacity - reserve && data->hits == data->takes && data->misses == 0);
            CHECK(tree->takes == reserve + extra && tree->hits == reserve && tree->misses == extra && tree->misses_live == extra);
            CHECK_EQ(stats.refused, 2 - extra);
            CHECK(data->in_use == data->takes && tree->in_use == tree->takes && tree->bytes == (reserve + extra) * NODE_SIZE);
            CHECK(pool_audit(pool) == 0);

            for (size_t i = 0; i < capacity + extra; i++)
                pool_give(pool, node[i]);
            stats = stats_of(pool);
            CHECK(stats.in_use == 0 && stats.high_water == capacity);
            CHECK(data->gives == data->takes && tree->gives == tree->takes && tree->misses == extra);
            CHECK(tree->misses_live == 0 && tree->in_use == 0 && tree->bytes == 0 && tree->high_water == reserve + extra);
            CHECK(pool_audit(pool) == 0 && pool_destroy(pool) == 0);
        }
}

/* What is given back while the reserve is short goes to the reserve, wherever it lies. */
TEST_EACH(reserve_is_refilled_first)
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
TEST_EACH(magazine_yields_to_the_reserve)
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
TEST_EACH(against_model)
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
                if (!node) {
                    CHECK(overflow != POOL_OVERFLOW_MALLOC && slots == capacity);
                    continue;
                }
                CHECK(node->taken && node->kind == kind && !node->owner && !node->pins && !node->referenced);
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

/* ---- Eviction ---- */

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

TEST_EACH(eviction_prefers_leaves_and_spares_what_is_used)
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
TEST_EACH(eviction_finds_the_clean_among_the_dirty)
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
TEST_EACH(eviction_serves_the_reserve_first)
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
TEST_EACH(magazine_of_an_idle_thread)
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
TEST_EACH(raids_of_a_busy_magazine)
{
    for (int mode = 0; mode < 2; mode++) {
        without_membarrier = mode;
        struct busy busy = {.pool = new_pool(16, 0, NULL)};
        pthread_t thread;
        pthread_create(&thread, NULL, keep_busy, &busy);
        uint64_t takes = 0;
        for (int round = 0; round < 600; round++) {
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

enum { STRESS_THREADS = 4, STRESS_STEPS = 4000 };

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
            struct node *node;
            if (pool_take(s->pool, dice % POOL_KINDS, class, step % 64 == 0, &node))
                continue;
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

TEST_EACH(threads_that_share_a_pool)
{
    wait_ms = 1;                        /* they wait for each other while they hold nodes */
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
    wait_ms = 10000;
    without_membarrier = false;
}

/* ---- What goes wrong ---- */

/* Every call into the system fails in turn. */
TEST_EACH(creation_fails_cleanly)
{
    for (int extras = 0; extras < 2; extras++) {
        bool lock = extras && strategy != POOL_MALLOC;
        /* Two pieces to fault in, and less than the 8 MiB that an ordinary user may lock. */
        const struct pool_options options = {.bytes = pool_footprint(1500), .reserve_nodes = 2, .strategy = strategy,
                                             .overflow = overflow, .prefault = extras, .lock = lock};
        struct pool *pool = NULL;
        char reason[200];
        long n = 0;
        for (int result = -1; result; n++) {
            if (!CHECK(n < 1000))               /* it fails without us */
                return;
            atomic_store(&calls_left, n);
            result = pool_create(&pool, &options, reason, sizeof reason);
            atomic_store(&calls_left, -1);
            CHECK(result == 0 || ((result == -ENOMEM || result == -EAGAIN || (result == -EPERM && lock)) && pool == NULL));
        }
        CHECK(n > 6);
        CHECK_EQ(pool_audit(pool), 0);
        CHECK_EQ(pool_destroy(pool), 0);
    }
}

/* Without memory for a magazine a thread is served all the same; without memory for overflow nodes, not beyond the slots. */
TEST_EACH(no_memory_while_in_use)
{
    for (long n = 0; n < 2 && strategy != POOL_MALLOC; n++) {       /* the magazine's memory, the thread's pointer to it */
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

/* With strategy malloc the page of each take may be refused. */
TEST(no_memory_for_a_page)
{
    strategy = POOL_MALLOC;
    struct pool *pool = new_pool(4, 0, NULL);
    pool_give(pool, take_one(pool, POOL_DATA, POOL_COMMIT));
    atomic_store(&calls_left, 0);
    CHECK(take_one(pool, POOL_DATA, POOL_COMMIT) == NULL);
    CHECK(pool_take_cached(pool, POOL_DATA, POOL_COMMIT) == NULL);
    atomic_store(&calls_left, -1);
    CHECK_EQ(stats_of(pool).kind[POOL_DATA].in_use, 0);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
    strategy = POOL_POOLING;
}

/* Plaintext does not outlive a node from malloc. */
TEST(overflow_nodes_are_wiped)
{
    struct pool *pool = new_pool(2, 0, NULL);
    struct node *node[3];
    for (int i = 0; i < 3; i++) {
        node[i] = take_one(pool, POOL_DATA, POOL_COMMIT);
        memset(node[i]->page, 's', NODE_SIZE);
    }
    CHECK(node[2]->overflow);
    const void *page = node[2]->page, *slots = pool->slot_space;
    watching = true;
    for (int i = 0; i < 3; i++)
        pool_give(pool, node[i]);
    CHECK(freed == page && freed_was_wiped);
    CHECK_EQ(pool_destroy(pool), 0);
    watching = false;
    CHECK(munmapped == slots);
}

TEST_EACH(audit_notices)
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

    m->node[0]->retired = true;                         /* out of use, below the end */
    CHECK_EQ(pool_audit(pool), -EUCLEAN);
    m->node[0]->retired = false;

#ifdef POOL_CHECKED
    if (pool->slot) {
        slot_access(m->node[0]);                        /* written to after it was given back */
        *(char *)m->node[0]->page = 0;
        CHECK_EQ(pool_audit(pool), -EUCLEAN);
        slot_access(m->node[0]);
        slot_close(m->node[0]);
    }
#endif

    CHECK_EQ(pool_audit(pool), 0);
    pool_give(pool, node);
    pool_give(pool, other);
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}
