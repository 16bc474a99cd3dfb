/* The overflow policy `wait`: a queue a class. A slot that becomes free goes to the first of the most urgent queue: takes of the
 * same or a less urgent class find pool_is_behind() true and leave it alone, and whoever puts a slot into the list wakes him. The
 * first also tries to evict now and then, because nobody tells the pool that a node became evictable. */
#include "_pool_internal.h"

#include <time.h>

enum { TRY_MS = 2 };                    /* how often the first tries to evict */

/* ---- Counters: written under pool->lock, read without ---- */

static void add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

void pool_queue_stats(struct pool *pool, struct pool_queue_stats stats[POOL_CLASSES])
{
    for (unsigned class = 0; class < POOL_CLASSES; class++) {
        const struct queue *q = &pool->queue[class];
        stats[class] = (struct pool_queue_stats){
            .depth = atomic_load_explicit(&q->depth, memory_order_relaxed),
            .high_water = atomic_load_explicit(&q->high_water, memory_order_relaxed),
            .waits = atomic_load_explicit(&q->waits, memory_order_relaxed),
            .expired = atomic_load_explicit(&q->expired, memory_order_relaxed),
            .total_ns = atomic_load_explicit(&q->total_ns, memory_order_relaxed),
        };
        for (unsigned i = 0; i < LATENCY_BUCKETS; i++)
            stats[class].wait[i] = atomic_load_explicit(&q->wait[i], memory_order_relaxed);
    }
}

/* ---- The queue; all of this under pool->lock ---- */

bool pool_is_behind(const struct pool *pool, enum pool_class class, const struct waiter *self)
{
    if (!pool->waiting || class == POOL_COMMIT)
        return false;
    for (unsigned c = 0; c < class; c++)
        if (pool->queue[c].first)
            return true;
    return pool->queue[class].first && pool->queue[class].first != self;
}

void pool_wake_next(struct pool *pool)
{
    for (unsigned c = 0; c < POOL_CLASSES; c++)
        if (pool->queue[c].first) {
            pthread_cond_signal(&pool->queue[c].first->wake);
            return;
        }
}

static void enqueue(struct pool *pool, struct queue *q, struct waiter *self)
{
    self->next = NULL;
    *q->end = self;
    q->end = &self->next;
    pool->waiting++;
    add(&q->depth, 1);
    if (q->depth > q->high_water)
        add(&q->high_water, 1);
    pool_note(pool);
}

static void dequeue(struct pool *pool, struct queue *q, struct waiter *self)
{
    struct waiter **link = &q->first;
    while (*link != self)
        link = &(*link)->next;
    *link = self->next;
    if (!self->next)
        q->end = link;
    pool->waiting--;
    add(&q->depth, (uint64_t)-1);
    pool_note(pool);
    pool_wake_next(pool);               /* even if nothing is free: now it is his turn to try */
}

static void count_wait(struct queue *q, uint64_t ns, bool in_vain)
{
    add(&q->waits, 1);
    add(&q->expired, in_vain);
    add(&q->total_ns, ns);
    add(&q->wait[latency_bucket(ns)], 1);
}

static void sleep_until(struct pool *pool, struct waiter *self, uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    pthread_cond_timedwait(&self->wake, &pool->lock, &t);
}

/* Sleeps until there may be something for this waiter to do. */
static void await_turn(struct pool *pool, enum pool_class class, struct waiter *self, uint64_t deadline)
{
    pthread_mutex_lock(&pool->lock);
    bool behind = pool_is_behind(pool, class, self);
    if (behind || shared_free(pool) <= pool->reserve) {
        uint64_t soon = monotonic_ns() + TRY_MS * 1000000ull;
        sleep_until(pool, self, behind || soon > deadline ? deadline : soon);
    }
    pthread_mutex_unlock(&pool->lock);
}

struct node *pool_wait(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class)
{
    struct queue *q = &pool->queue[class];
    struct waiter self;
    struct node *node = NULL;
    uint64_t start = monotonic_ns(), deadline = start + POOL_WAIT_MS * 1000000ull;
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&self.wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_lock(&pool->lock);
    bool hopeless = pool->capacity <= pool->reserve;    /* all there is belongs to commits */
    if (!hopeless)
        enqueue(pool, q, &self);
    pthread_mutex_unlock(&pool->lock);

    while (!hopeless) {
        enum share share = pool_take_shared(pool, m, kind, class, &self, &node);
        if (share == SHARE_GOT || monotonic_ns() >= deadline)
            break;
        if (share == SHARE_BEHIND || !pool_make_room(pool))
            await_turn(pool, class, &self, deadline);
    }

    pthread_mutex_lock(&pool->lock);
    if (!hopeless) {
        dequeue(pool, q, &self);
        count_wait(q, monotonic_ns() - start, !node);
    }
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_destroy(&self.wake);
    return node;
}
