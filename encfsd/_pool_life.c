/* A pool's life: create, resize, destroy; and the thread that wipes what was given back. */
#include "_pool_internal.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- Wiping ---- */

/* Takes up to GROUP stale nodes out of the list. Needs pool->lock. */
static size_t pick_stale(struct pool *pool, struct node **node, size_t most)
{
    size_t n = 0;
    while (n < GROUP && n < most && pool->stale) {
        node[n] = pool->stale;
        pool->stale = node[n++]->pool_next;
    }
    pool->listed -= n;
    pool->in_transit += n;
    return n;
}

static size_t wipe_group(struct pool *pool, size_t most)
{
    struct node *node[GROUP];
    pthread_mutex_lock(&pool->lock);
    size_t n = pick_stale(pool, node, most);
    pthread_mutex_unlock(&pool->lock);
    if (!n)
        return 0;
    arena_wipe(pool, node, n);
    for (size_t i = 0; i < n; i++)
        arena_prepare_retiring(pool, node[i]);
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < n; i++)
        pool_put(pool, node[i]);
    pool->in_transit -= n;
    pool->slots_wiped += n;
    pool_note(pool);
    pthread_mutex_unlock(&pool->lock);
    return n;
}

size_t pool_tidy(struct pool *pool)
{
    size_t wiped = 0, n;
    pool_evict_retiring(pool);
    pool_raid(pool);
    pthread_mutex_lock(&pool->lock);
    size_t most = pool->listed;         /* what is given back meanwhile is for the next time */
    pthread_mutex_unlock(&pool->lock);
    while ((n = wipe_group(pool, most - wiped)))
        wiped += n;
    return wiped;
}

static void *wiper(void *arg)
{
    struct pool *pool = arg;
    pthread_mutex_lock(&pool->wiper_lock);
    while (!pool->ending) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_sec += POOL_WIPE_MS / 1000;
        if (pthread_cond_timedwait(&pool->wiper_wake, &pool->wiper_lock, &t) == ETIMEDOUT) {
            pthread_mutex_unlock(&pool->wiper_lock);
            pool_tidy(pool);
            pthread_mutex_lock(&pool->wiper_lock);
        }
    }
    pthread_mutex_unlock(&pool->wiper_lock);
    return NULL;
}

static int wiper_start(struct pool *pool)
{
    sigset_t all, before;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->wiper_lock, NULL);
    pthread_cond_init(&pool->wiper_wake, &attr);
    pthread_condattr_destroy(&attr);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&pool->wiper, NULL, wiper, pool) ? -EAGAIN : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc)
        pthread_setname_np(pool->wiper, "encfsd-wipe");
    return rc;
}

static void wiper_stop(struct pool *pool)
{
    pthread_mutex_lock(&pool->wiper_lock);
    pool->ending = true;
    pthread_cond_signal(&pool->wiper_wake);
    pthread_mutex_unlock(&pool->wiper_lock);
    pthread_join(pool->wiper, NULL);
}

/* ---- Create ---- */

struct reason {
    char *text;
    size_t size;
};

static void add_reason(struct reason *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add_reason(struct reason *r, const char *format, ...)
{
    size_t length = r->size ? strlen(r->text) : 0;
    va_list arguments;

    if (!r->size)
        return;
    if (length && length + 2 < r->size)
        length += (size_t)snprintf(r->text + length, r->size - length, "; ");
    va_start(arguments, format);
    vsnprintf(r->text + length, r->size - length, format, arguments);
    va_end(arguments);
}

/* What was asked for, less what this kernel cannot do. */
static void settle_on(struct pool *pool, const struct pool_options *options, struct reason *r)
{
    bool arena = options->strategy != POOL_MALLOC;
    const char *refused = arena && options->hugepages ? arena_hugepages_refused() : NULL;

    pool->strategy = options->strategy;
    pool->prefault = options->prefault && arena;
    pool->hugepages = options->hugepages && arena && !refused;
    if (options->strategy == POOL_POOLING_COW && !arena_cow_works()) {
        pool->strategy = POOL_POOLING;
        add_reason(r, "pooling-cow is not possible: the kernel does not take pages back (MADV_DONTNEED_LOCKED); pooling is used");
    }
    if (refused)
        add_reason(r, "no huge pages: %s", refused);
    if (!arena && (options->prefault || options->hugepages))
        add_reason(r, "the strategy malloc has no arena to prefault or to put into huge pages");
}

static struct pool *pool_new(const struct pool_options *options, size_t capacity, size_t max_capacity, struct reason *r)
{
    static _Atomic uint64_t ids;
    struct pool *pool;

    if (posix_memalign((void **)&pool, CACHE_LINE, sizeof *pool))
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->id = atomic_fetch_add(&ids, 1) + 1;
    pool->capacity = capacity;
    pool->max_capacity = max_capacity;
    pool->reserve = options->reserve_nodes;
    pool->overflow = options->overflow;
    pool->locked = options->lock;
    pool->evict = options->evict;
    pool->progress = options->progress;
    pool->progress_arg = options->progress_arg;
    settle_on(pool, options, r);
    for (unsigned class = 0; class < POOL_CLASSES; class++)
        pool->queue[class].end = &pool->queue[class].first;
    pool->expedited = !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
    pthread_mutex_init(&pool->lock, NULL);          /* cannot fail with default attributes */
    pthread_mutex_init(&pool->hand_lock, NULL);
    pthread_mutex_init(&pool->resize_lock, NULL);
    return pool;
}

static void pool_free(struct pool *pool)
{
    arena_destroy(pool);
    pthread_mutex_destroy(&pool->resize_lock);
    pthread_mutex_destroy(&pool->hand_lock);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

int pool_create(struct pool **out, const struct pool_options *options, char *reason, size_t reason_size)
{
    struct reason r = {reason, reason ? reason_size : 0};
    size_t capacity = pool_nodes_in(options->bytes), max_capacity = pool_nodes_in(options->max_bytes);

    if (r.size)
        reason[0] = 0;
    if (options->strategy >= POOL_STRATEGIES || options->overflow >= POOL_OVERFLOWS
        || (options->lock && options->strategy == POOL_MALLOC))
        return -EINVAL;
    if (capacity < options->reserve_nodes)
        capacity = options->reserve_nodes;
    if (max_capacity < capacity)
        max_capacity = capacity;
    if (max_capacity > SIZE_MAX / (2 * NODE_SIZE))
        return -ENOMEM;
    struct pool *pool = pool_new(options, capacity, max_capacity, &r);
    if (!pool)
        return -ENOMEM;
    int rc = arena_create(pool);
    if (!rc)
        rc = arena_commit(pool, capacity);
    if (!rc && pthread_key_create(&pool->key, pool_magazine_retire))
        rc = -ENOMEM;
    if (!rc) {
        atomic_store(&pool->end, pool->node + capacity);
        rc = wiper_start(pool);
        if (rc)
            pthread_key_delete(pool->key);
    }
    if (rc)
        pool_free(pool);
    else
        *out = pool;
    return rc;
}

size_t pool_destroy(struct pool *pool)
{
    if (!pool)
        return 0;
    wiper_stop(pool);
    pthread_mutex_destroy(&pool->wiper_lock);
    pthread_cond_destroy(&pool->wiper_wake);
    pthread_key_delete(pool->key);
    pool_fold_all(pool);
    size_t leaked = 0;
    for (unsigned kind = 0; kind < POOL_KINDS; kind++)
        leaked += (size_t)pool_in_use(pool, kind);
    for (struct magazine *m = pool->magazines, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    pool_free(pool);
    return leaked;
}

/* ---- Resize; all of this under resize_lock ---- */

/* Needs pool->lock. */
static void set_capacity(struct pool *pool, size_t capacity)
{
    pool->capacity = capacity;
    atomic_store_explicit(&pool->end, pool->node + capacity, memory_order_relaxed);
}

/* Slots that were retired come back a group at a time, those that were never used all at once. */
static void grow(struct pool *pool, size_t capacity)
{
    while (pool->capacity < capacity) {
        pthread_mutex_lock(&pool->lock);
        size_t first = pool->capacity, last = first + GROUP;
        if (first >= pool->used || last > capacity)
            last = capacity;
        set_capacity(pool, last);
        for (size_t i = first; i < last && i < pool->used; i++) {
            struct node *node = &pool->node[i];
            if (!node->retired)
                continue;               /* still taken, or being given back */
            pool->retired--;
            node->retired = false;
            if (pool->slot)
                slot_close(node);
            pool_put(pool, node);
        }
        pool_note(pool);
        pthread_mutex_unlock(&pool->lock);
    }
}

/* Lowers the end while nobody is in a magazine, so that nothing from above it lies in one afterwards. Returns all free nodes. */
static struct node *take_list(struct pool *pool, size_t capacity)
{
    pthread_mutex_lock(&pool->lock);
    pool_stop_all(pool);
    for (struct magazine *m = pool->magazines; m; m = m->next)
        pool_spill(pool, m, magazine_count(m));
    set_capacity(pool, capacity);
    pool_resume_all(pool);
    struct node *chain = pool->stale, **end = &chain;
    while (*end)                        /* the shorter list as a rule: it is wiped every second */
        end = &(*end)->pool_next;
    *end = pool->wiped;
    pool->stale = pool->wiped = NULL;
    pool->in_transit += pool->listed;
    pool->listed = 0;
    pool_note(pool);
    pthread_mutex_unlock(&pool->lock);
    return chain;
}

static void sort_back(struct pool *pool, struct node *chain)
{
    while (chain) {
        pthread_mutex_lock(&pool->lock);
        for (int n = 0; chain && n < GROUP; n++) {
            struct node *next = chain->pool_next;
            pool_put(pool, chain);
            pool->in_transit--;
            chain = next;
        }
        pool_note(pool);
        pthread_mutex_unlock(&pool->lock);
    }
}

/* Gives the memory of retired slots back, runs of neighbours at once. */
static void return_retired(struct pool *pool)
{
    size_t used, i = pool->capacity, run = 0;
    do {
        pthread_mutex_lock(&pool->lock);
        used = pool->used;
        for (run = 0; i < used && !pool->node[i].retired && run < GROUP; run++)
            i++;                        /* still taken, or being given back */
        for (run = 0; i + run < used && run < GROUP && pool->node[i + run].retired;)
            pool->node[i + run++].stale = false;
        pthread_mutex_unlock(&pool->lock);
        if (run)
            arena_return(pool, i, run);
        i += run;
    } while (i < used);
}

static void shrink(struct pool *pool, size_t capacity)
{
    sort_back(pool, take_list(pool, capacity));
    return_retired(pool);
    pool_evict_retiring(pool);
}

int pool_resize(struct pool *pool, size_t bytes)
{
    size_t capacity = pool_nodes_in(bytes);
    int rc = 0;

    if (capacity < pool->reserve)
        return -EINVAL;
    if (capacity > pool->max_capacity)
        return -ERANGE;
    pthread_mutex_lock(&pool->resize_lock);
    if (capacity > pool->capacity) {
        rc = arena_commit(pool, capacity);
        if (!rc)
            grow(pool, capacity);
    } else if (capacity < pool->capacity) {
        shrink(pool, capacity);
    }
    pthread_mutex_unlock(&pool->resize_lock);
    return rc;
}
