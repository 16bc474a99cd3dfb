/* Slots become free that are not: the clock hand, and magazines of other threads. */
#include "_pool_internal.h"

#include <assert.h>
#include <sched.h>

enum reclaim { BUSY, LATER, OURS };

/* Asks the owner for a node, if it has one and, unless `force`, the node was not used lately. OURS: it gave the node up. LATER:
 * another try may succeed. */
static enum reclaim reclaim(struct pool *pool, struct node *node, unsigned top_level, bool force)
{
    if (!atomic_load_explicit(&node->owner, memory_order_relaxed) ||
        atomic_load_explicit(&node->pins, memory_order_relaxed))
        return BUSY;
    if (!force && atomic_load_explicit(&node->referenced, memory_order_relaxed)) {
        atomic_store_explicit(&node->referenced, 0, memory_order_relaxed);
        return LATER;
    }
    /* Announce first, then look at the owner again; pool_give clears the owner first, then looks at the announcement. All four
     * are sequentially consistent, so one of the two sees the other. */
    atomic_store(&pool->at_hand, node);
    bool ours = atomic_load(&node->owner) && node->level <= top_level && pool->evict(node);
    if (ours)
        atomic_store_explicit(&node->owner, NULL, memory_order_relaxed);
    atomic_store(&pool->at_hand, NULL);
    return ours ? OURS : LATER;
}

void pool_withdraw_slow(struct pool *pool, struct node *node)
{
    atomic_store(&node->owner, NULL);
    while (atomic_load(&pool->at_hand) == node)
        sched_yield();
}

/* Walks `count` descriptors from `start`, chains up at most `most` victims of level <= top_level; leaves the hand where it stopped.
 * *again: something may be had in a second sweep. Needs hand_lock. */
static size_t sweep(struct pool *pool, size_t used, size_t start, size_t count, unsigned top_level, size_t most,
                    struct node **chain, bool *again)
{
    size_t victims = 0;
    for (pool->hand = start; count-- && victims < most; pool->hand = (pool->hand + 1) % used) {
        struct node *node = &pool->node[pool->hand];
        enum reclaim result = reclaim(pool, node, top_level, false);
        *again |= result == LATER;
        if (result == OURS) {
            node->pool_next = *chain;
            *chain = node;
            victims++;
        }
    }
    return victims;
}

/* Victims become free. */
static void collect(struct pool *pool, struct node *chain)
{
    for (struct node *node = chain, *next; node; node = next) {
        assert(is_taken(node));
        next = node->pool_next;
        node_release(pool, node);
        arena_prepare_retiring(pool, node);
    }
    pthread_mutex_lock(&pool->lock);
    for (struct node *node = chain, *next; node; node = next) {
        next = node->pool_next;
        pool->total[node->kind].evictions++;
        pool->slots--;
        pool_put(pool, node);
    }
    pool_note(pool);
    pthread_mutex_unlock(&pool->lock);
}

/* The first sweep takes data and leaves only, which are needed less than their ancestors, and that were not used since the hand
 * last passed; the second, over the same stretch, takes any. */
size_t pool_evict_some(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    size_t used = pool->used, capacity = pool->capacity;
    pthread_mutex_unlock(&pool->lock);
    if (!pool->evict || !used)
        return 0;

    /* A victim a take keeps a small cache full; a large one is emptied in batches, which costs less. */
    size_t most = 1 + capacity / 64 < MAGAZINE_BATCH ? 1 + capacity / 64 : MAGAZINE_BATCH;
    struct node *chain = NULL;
    pthread_mutex_lock(&pool->hand_lock);
    size_t start = pool->hand % used, stretch = used < STRETCH ? used : STRETCH;
    bool again = false;
    size_t victims = sweep(pool, used, start, stretch, 1, most, &chain, &again);
    if (!victims && again)
        victims = sweep(pool, used, start, stretch, UINT8_MAX, most, &chain, &again);
    pthread_mutex_unlock(&pool->hand_lock);
    collect(pool, chain);
    return victims;
}

size_t pool_evict_retiring(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    size_t used = pool->used, first = pool->capacity;
    pthread_mutex_unlock(&pool->lock);
    size_t victims = 0;

    for (size_t group; pool->evict && first < used; first = group) {
        struct node *chain = NULL;
        group = used - first < GROUP ? used : first + GROUP;
        pthread_mutex_lock(&pool->hand_lock);
        for (size_t i = first; i < group; i++) {
            struct node *node = &pool->node[i];
            if (reclaim(pool, node, UINT8_MAX, true) == OURS) {
                node->pool_next = chain;
                chain = node;
                victims++;
            }
        }
        pthread_mutex_unlock(&pool->hand_lock);
        collect(pool, chain);
    }
    return victims;
}

size_t pool_raid(struct pool *pool)
{
    size_t seen = 0, moved = 0;
    pthread_mutex_lock(&pool->lock);
    for (struct magazine *m = pool->magazines; m; m = m->next)
        seen += magazine_count(m);
    if (seen) {
        pool_stop_all(pool);
        for (struct magazine *m = pool->magazines; m; m = m->next) {
            moved += magazine_count(m);
            pool_spill(pool, m, magazine_count(m));
        }
        pool_resume_all(pool);
        pool_note(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return moved;
}
