/* What tests of the pool share. Its sources are included rather than linked, so that every call into the system can be made to fail
 * and the inside can be looked at, and broken on purpose. Include it once. */
#ifndef ENCFSD_POOL_FIXTURE_H
#define ENCFSD_POOL_FIXTURE_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "check.h"

static atomic_long calls_left = -1;     /* > 0: that many calls of the main thread succeed, 0: all fail, < 0: none fails */
static bool without_membarrier;
static int refused_advice = -1;         /* this madvise(2) fails with EINVAL */
static int lock_error;                  /* mlock2 fails with it */
static bool watching;                   /* record the last arguments of free and munmap, and whether their pages are wiped */
static void *munmapped, *freed;
static bool freed_was_wiped;

static bool refuse(void)
{
    long left = getpid() == gettid() ? atomic_load(&calls_left) : -1;
    if (left > 0)
        atomic_store(&calls_left, left - 1);
    if (left == 0)
        errno = ENOMEM;
    return left == 0;
}

static inline bool is_zero(const void *p, size_t n)
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
    if (watching && slots)
        munmapped = p;
    return munmap(p, n);
}

static int spy_madvise(void *p, size_t n, int advice)
{
    if (advice == refused_advice)
        errno = EINVAL;
    return advice == refused_advice || refuse() ? -1 : madvise(p, n, advice);
}

static int spy_mlock2(void *p, size_t n, unsigned flags)
{
    if (lock_error)
        errno = lock_error;
    return lock_error || refuse() ? -1 : mlock2(p, n, flags);
}

#define posix_memalign(p, alignment, n) (refuse() ? ENOMEM : posix_memalign(p, alignment, n))
#define calloc(n, size) (refuse() ? NULL : calloc(n, size))
#define mmap(...) (refuse() ? MAP_FAILED : mmap(__VA_ARGS__))
#define mprotect(...) (refuse() ? -1 : mprotect(__VA_ARGS__))
#define madvise(p, n, advice) spy_madvise(p, n, advice)
#define mlock2(p, n, flags) spy_mlock2(p, n, flags)
#define pthread_create(...) (refuse() ? EAGAIN : pthread_create(__VA_ARGS__))
#define pthread_key_create(...) (refuse() ? ENOMEM : pthread_key_create(__VA_ARGS__))
#define pthread_setspecific(...) (refuse() ? ENOMEM : pthread_setspecific(__VA_ARGS__))
#define syscall(...) (without_membarrier ? -1 : syscall(__VA_ARGS__))
#define free(p) spy_free(p, !strcmp(#p, "node->page"))
#define munmap(p, n) spy_munmap(p, n, !strcmp(#p, "pool->slot_space"))
#include "_pool.h"
static uint64_t wait_ms = 10000;        /* how long a test may wait in the queue: no test is about that time */
#define POOL_WAIT_MS wait_ms
#include "_pool.c"
#include "_pool_arena.c"
#include "_pool_evict.c"
#include "_pool_life.c"
#include "_pool_stats.c"
#include "_pool_wait.c"
#undef free
#undef munmap
#undef calloc
#undef madvise
#undef pthread_create

/* The pools that follow are of this kind. */
static enum pool_strategy strategy;
static enum pool_overflow overflow;

/* A test that is run for each strategy and each policy. */
#define TEST_EACH(name)                                                                                                           \
    static void each_##name(void);                                                                                                \
    TEST(name)                                                                                                                    \
    {                                                                                                                             \
        for (int kind = 0; kind < POOL_STRATEGIES * POOL_OVERFLOWS; kind++) {                                                     \
            strategy = (enum pool_strategy)(kind % POOL_STRATEGIES);                                                              \
            overflow = (enum pool_overflow)(kind / POOL_STRATEGIES);                                                              \
            unsigned before = atomic_load(&check_failures);                                                                       \
            each_##name();                                                                                                        \
            if (atomic_load(&check_failures) != before)                                                                           \
                fprintf(stderr, "... with strategy %d, overflow %d\n", strategy, overflow);                                       \
        }                                                                                                                         \
        strategy = POOL_POOLING;                                                                                                  \
        overflow = POOL_OVERFLOW_MALLOC;                                                                                          \
    }                                                                                                                             \
    static void each_##name(void)

static inline int create(struct pool **pool, size_t bytes, size_t reserve, pool_evict_fn *evict)
{
    const struct pool_options options = {.bytes = bytes, .reserve_nodes = reserve, .strategy = strategy, .overflow = overflow,
                                         .evict = evict};
    return pool_create(pool, &options, NULL, 0);
}

/* NULL: none, and the reason is the one that the policy knows. */
static inline struct node *take_one(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct node *node;
    int rc = pool_take(pool, kind, class, false, &node);
    CHECK((rc == 0) == (node != NULL));
    CHECK(rc == 0 || rc == (pool->overflow == POOL_OVERFLOW_MALLOC ? -ENOMEM : -EAGAIN) || calls_left == 0);
    return node;
}

static inline struct pool_stats stats_of(struct pool *pool)
{
    struct pool_stats stats;
    pool_stats(pool, &stats);
    return stats;
}

static inline struct pool *new_pool(size_t capacity, size_t reserve, pool_evict_fn *evict)
{
    struct pool *pool;
    CHECK(create(&pool, pool_footprint(capacity), reserve, evict) == 0);
    CHECK(stats_of(pool).capacity == (capacity > reserve ? capacity : reserve));
    return pool;
}

/* ---- Eviction: an owner in miniature ---- */

struct object {
    pthread_mutex_t lock;               /* guards cached */
    struct node *cached[8];
};

static inline struct object *new_owner(void)
{
    struct object *o = malloc(sizeof *o);
    memset(o, 0, sizeof *o);
    pthread_mutex_init(&o->lock, NULL);
    return o;
}

/* False if there is no room; then the caller still has the node. */
static inline bool owner_cache(struct object *o, struct node *node)
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

static inline struct node *owner_uncache(struct object *o, unsigned i)
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

static inline void owner_free(struct pool *pool, struct object *o)
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

static inline bool owner_evict(struct node *node)
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

#endif
