/* Looking at the pool: counters, and an audit that accounts for every slot. */
#include "_pool_internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

/* Needs pool->lock. */
static size_t draining(const struct pool *pool)
{
    return (pool->used > pool->capacity ? pool->used - pool->capacity : 0) - pool->retired;
}

void pool_stats(struct pool *pool, struct pool_stats *stats)
{
    pthread_mutex_lock(&pool->lock);
    pool_stop_all(pool);
    pool_fold_all(pool);
    pool_resume_all(pool);
    *stats = (struct pool_stats){
        .capacity = pool->capacity,
        .capacity_bytes = pool_footprint(pool->capacity),
        .max_bytes = pool_footprint(pool->max_capacity),
        .draining = draining(pool),
        .in_use = (uint64_t)pool->slots,
        .high_water = (uint64_t)pool->slots_high_water,
        .refused = atomic_load_explicit(&pool->refused, memory_order_relaxed),
        .wiped = pool->slots_wiped,
        .strategy = pool->strategy,
        .overflow = pool->overflow,
    };
    for (unsigned kind = 0; kind < POOL_KINDS; kind++) {
        uint64_t in_use = (uint64_t)pool_in_use(pool, kind);
        stats->kind[kind] = (struct pool_kind_stats){
            .takes = pool->total[kind].takes,
            .gives = pool->total[kind].gives,
            .hits = pool->total[kind].takes - pool->total[kind].misses,
            .misses = pool->total[kind].misses,
            .misses_live = (uint64_t)pool->total[kind].overflow,
            .evictions = pool->total[kind].evictions,
            .in_use = in_use,
            .high_water = (uint64_t)pool->total[kind].high_water,
            .bytes = in_use * NODE_SIZE,
        };
    }
    pthread_mutex_unlock(&pool->lock);
}

/* ---- Audit; under pool->lock, all magazines stopped ---- */

/* Checks a free node, and marks it in `seen`. */
static bool audit_free(const struct pool *pool, const struct node *node, bool *seen)
{
    if (node < pool->node || node >= pool->node + pool->used || node >= pool->node + pool->capacity)
        return false;
    size_t i = number_of(pool, node);
    const void *page = pool->slot ? pool->slot + i * NODE_SIZE : NULL;
    if (seen[i] || is_taken(node) || node->overflow || node->owner || node->retired || node->page != page)
        return false;
    seen[i] = true;
    return !pool->slot || slot_untouched(node);
}

static bool audit_list(const struct pool *pool, const struct node *first, bool stale, bool *seen, size_t *length)
{
    bool sound = true;
    for (const struct node *node = first; sound && node; node = node->pool_next, ++*length)
        sound = node->stale == stale && audit_free(pool, node, seen);       /* a loop in the list is a node seen twice */
    return sound;
}

/* Each slot is free or taken or retired: one of the three, and retired only above the end. */
static bool audit_slots(const struct pool *pool, const bool *seen)
{
    size_t taken = 0, retired = 0;
    for (size_t i = 0; i < pool->used; i++) {
        const struct node *node = &pool->node[i];
        if (seen[i] + is_taken(node) + node->retired != 1 || (node->retired && i < pool->capacity))
            return false;
        taken += is_taken(node);
        retired += node->retired;
    }
    return (int64_t)taken == pool->slots && retired == pool->retired && pool->used <= pool->max_capacity;
}

/* With pool->lock, at a moment when no free slot is being wiped. */
static void lock_at_rest(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    while (pool->in_transit) {
        pthread_mutex_unlock(&pool->lock);
        sched_yield();
        pthread_mutex_lock(&pool->lock);
    }
}

int pool_audit(struct pool *pool)
{
    bool *seen = calloc(pool->max_capacity + 1, sizeof *seen);
    if (!seen)
        return -ENOMEM;
    lock_at_rest(pool);
    pool_stop_all(pool);
    pool_fold_all(pool);
    size_t listed = 0;
    bool sound = audit_list(pool, pool->stale, true, seen, &listed) && audit_list(pool, pool->wiped, false, seen, &listed);
    sound = sound && listed == pool->listed;
    for (struct magazine *m = pool->magazines; m; m = m->next)
        for (unsigned i = 0; sound && i < magazine_count(m); i++)
            sound = audit_free(pool, m->node[i], seen);
    sound = sound && audit_slots(pool, seen);
    pool_resume_all(pool);
    pthread_mutex_unlock(&pool->lock);
    free(seen);
    return sound ? 0 : -EUCLEAN;
}
