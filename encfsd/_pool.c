/* Take and give (contract: _pool.h; the picture: _pool_internal.h; reasons and figures: docs/decisions/0003-node-pool.md). */
#include "_pool_internal.h"

#include <assert.h>
#include <errno.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- Stopping magazines ---- */

void pool_stop_all(struct pool *pool)
{
    for (struct magazine *m = pool->magazines; m; m = m->next)
        atomic_store(&m->stopped, true);
    if (pool->expedited)
        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);    /* cannot fail once registered */
    for (struct magazine *m = pool->magazines; m; m = m->next)
        while (atomic_load(&m->entered))
            sched_yield();
}

void pool_resume_all(struct pool *pool)
{
    for (struct magazine *m = pool->magazines; m; m = m->next)
        atomic_store_explicit(&m->stopped, false, memory_order_release);
}

/* ---- Counting ---- */

static inline void tally_take(struct tally *t, unsigned kind, bool overflow)
{
    int64_t held = (int64_t)(++t->takes[kind] - t->gives[kind]);
    if (held > t->peak[kind])
        t->peak[kind] = held;
    if (overflow) {
        t->misses[kind]++;
        t->overflow[kind]++;
    } else if (++t->slots > t->slots_peak) {
        t->slots_peak = t->slots;
    }
}

static inline void tally_give(struct tally *t, unsigned kind, bool overflow)
{
    t->gives[kind]++;
    if (overflow)
        t->overflow[kind]--;
    else
        t->slots--;
}

int64_t pool_in_use(const struct pool *pool, unsigned kind)
{
    return (int64_t)(pool->total[kind].takes - pool->total[kind].gives - pool->total[kind].evictions);
}

void pool_fold(struct pool *pool, struct tally *t)
{
    for (unsigned kind = 0; kind < POOL_KINDS; kind++) {
        int64_t peak = pool_in_use(pool, kind) + t->peak[kind];
        if (peak > pool->total[kind].high_water)
            pool->total[kind].high_water = peak;
        pool->total[kind].takes += t->takes[kind];
        pool->total[kind].gives += t->gives[kind];
        pool->total[kind].misses += t->misses[kind];
        pool->total[kind].overflow += t->overflow[kind];
    }
    if (pool->slots + t->slots_peak > pool->slots_high_water)
        pool->slots_high_water = pool->slots + t->slots_peak;
    pool->slots += t->slots;
    *t = (struct tally){0};
}

void pool_fold_all(struct pool *pool)
{
    pool_fold(pool, &pool->common);
    for (struct magazine *m = pool->magazines; m; m = m->next)
        pool_fold(pool, &m->tally);
}

static struct tally *tally_of(struct pool *pool, struct magazine *m) { return m ? &m->tally : &pool->common; }

/* ---- The free list; all of this under pool->lock ---- */

void pool_note(struct pool *pool)
{
    bool congested = shared_free(pool) < pool->reserve || pool->waiting;
    if (congested != atomic_load_explicit(&pool->congested, memory_order_relaxed))
        atomic_store_explicit(&pool->congested, congested, memory_order_relaxed);
    if (pool->waiting && shared_free(pool) > pool->reserve)
        pool_wake_next(pool);
}

void pool_put(struct pool *pool, struct node *node)
{
    if (number_of(pool, node) >= pool->capacity) {
        node->retired = true;
        pool->retired++;
        return;
    }
    struct node **list = node->stale ? &pool->stale : &pool->wiped;
    node->pool_next = *list;
    *list = node;
    pool->listed++;
}

/* Needs shared_free() > 0. */
static struct node *list_pop(struct pool *pool)
{
    struct node **list = pool->stale ? &pool->stale : &pool->wiped, *node = *list;
    if (node) {
        *list = node->pool_next;
        pool->listed--;
        return node;
    }
    node = &pool->node[pool->used];
    if (pool->slot) {
        node->page = pool->slot + pool->used * NODE_SIZE;
        slot_access(node);
        slot_close(node);
    }
    pool->used++;
    return node;
}

void pool_spill(struct pool *pool, struct magazine *m, unsigned n)
{
    unsigned rest = magazine_count(m) - n;
    for (unsigned i = 0; i < n; i++)
        pool_put(pool, m->node[i]);
    memmove(m->node, m->node + n, rest * sizeof m->node[0]);
    magazine_resize(m, rest);
}

/* ---- Threads ---- */

/* The magazine of this thread in the pool that it used last. Initial-exec: a load instead of a call. */
static _Thread_local struct {
    uint64_t pool_id;
    struct magazine *magazine;
} last_used __attribute__((tls_model("initial-exec")));

void pool_magazine_retire(void *arg)
{
    struct magazine *m = arg;
    struct pool *pool = m->pool;
    last_used.pool_id = 0;
    pthread_mutex_lock(&pool->lock);
    pool_fold(pool, &m->tally);
    pool_spill(pool, m, magazine_count(m));
    pool_note(pool);
    struct magazine **link = &pool->magazines;
    while (*link != m)
        link = &(*link)->next;
    *link = m->next;
    pthread_mutex_unlock(&pool->lock);
    free(m);
}

/* NULL if there is no memory for one; the thread then goes by the free list, and tries again next time. */
static struct magazine *magazine_create(struct pool *pool)
{
    struct magazine *m;
    if (posix_memalign((void **)&m, CACHE_LINE, sizeof *m))
        return NULL;
    memset(m, 0, sizeof *m);
    m->pool = pool;
    if (pthread_setspecific(pool->key, m)) {
        free(m);
        return NULL;
    }
    pthread_mutex_lock(&pool->lock);
    m->next = pool->magazines;
    pool->magazines = m;
    pthread_mutex_unlock(&pool->lock);
    return m;
}

SLOW_PATH
static struct magazine *magazine_find(struct pool *pool)
{
    struct magazine *m = pthread_getspecific(pool->key);
    if (!m)
        m = magazine_create(pool);
    if (m) {
        last_used.pool_id = pool->id;
        last_used.magazine = m;
    }
    return m;
}

static inline struct magazine *magazine_of(struct pool *pool)
{
    return last_used.pool_id == pool->id ? last_used.magazine : magazine_find(pool);
}

/* ---- The fast paths: no call in them, so that no register need be saved ---- */

static inline struct node *magazine_take(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct magazine *m = last_used.magazine;
    struct node *node = NULL;
    if (last_used.pool_id != pool->id || !enter(pool, m))
        return NULL;
    if (magazine_count(m) && (class == POOL_COMMIT || !atomic_load_explicit(&pool->congested, memory_order_relaxed))) {
        node = magazine_pop(m);
        tally_take(&m->tally, kind, false);
    }
    leave(m);
    return node;
}

/* The node is released. False: there is no room in the magazine, or others come first, or the slot is to go. */
static inline bool magazine_give(struct pool *pool, struct node *node)
{
    struct magazine *m = last_used.magazine;
    if (last_used.pool_id != pool->id || !enter(pool, m))
        return false;
    bool room = magazine_count(m) < MAGAZINE && !atomic_load_explicit(&pool->congested, memory_order_relaxed)
        && node < atomic_load_explicit(&pool->end, memory_order_relaxed);
    if (room) {
        magazine_push(m, node);
        tally_give(&m->tally, node->kind, false);
    }
    leave(m);
    return room;
}

/* Makes a free node a taken one, but for its page. */
static inline void set_up(struct node *node, enum pool_kind kind)
{
    assert(!is_taken(node));
    set_taken(node, true);
    node->stale = true;
    node->kind = (uint8_t)kind;
    atomic_store_explicit(&node->referenced, 0, memory_order_relaxed);
    atomic_store_explicit(&node->pins, 0, memory_order_relaxed);
}

/* ---- Take ---- */

enum share pool_take_shared(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class,
                            const struct waiter *self, struct node **node)
{
    enum share share = SHARE_NONE;
    pthread_mutex_lock(&pool->lock);
    if (pool_is_behind(pool, class, self)) {
        share = SHARE_BEHIND;
    } else if (shared_free(pool) > (class == POOL_COMMIT ? 0 : pool->reserve)) {
        tally_take(tally_of(pool, m), kind, false);
        pool_fold(pool, tally_of(pool, m));
        *node = list_pop(pool);
        while (m && !pool->waiting && magazine_count(m) < MAGAZINE_BATCH - 1 && shared_free(pool) > pool->reserve)
            magazine_push(m, list_pop(pool));
        pool_note(pool);
        share = SHARE_GOT;
    }
    pthread_mutex_unlock(&pool->lock);
    return share;
}

/* Free slots that somebody is wiping or sorting will be back in microseconds. */
static bool await_transit(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    bool any = pool->in_transit > 0;
    pthread_mutex_unlock(&pool->lock);
    if (any)
        sched_yield();
    return any;
}

bool pool_make_room(struct pool *pool) { return pool_evict_some(pool) || pool_raid(pool) || await_transit(pool); }

/* A node of the list, not prepared. */
static struct node *take(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct magazine *m = magazine_of(pool);
    struct node *node = magazine_take(pool, kind, class);
    while (!node && pool_take_shared(pool, m, kind, class, NULL, &node) == SHARE_NONE && class != POOL_BACKGROUND
           && pool_make_room(pool)) {
    }
    return node;
}

static struct node *overflow_take(struct pool *pool, enum pool_kind kind)
{
    void *page;
    struct node *node;
    /* Not by pages: glibc would take two for each. */
    if (posix_memalign(&page, CACHE_LINE, NODE_SIZE + sizeof *node))
        return NULL;
    node = (struct node *)((uint8_t *)page + NODE_SIZE);
    memset(node, 0, sizeof *node);
    node->page = page;
    node->overflow = true;
    slot_close(node);
    struct magazine *m = magazine_of(pool);
    pthread_mutex_lock(&pool->lock);
    struct tally *tally = tally_of(pool, m);
    tally_take(tally, kind, true);
    pool_fold(pool, tally);
    pthread_mutex_unlock(&pool->lock);
    set_up(node, kind);
    slot_open(node);
    return node;
}

/* The list has no node for the caller: the policy decides. Not prepared, but for one from malloc. */
static int take_beyond(struct pool *pool, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **node)
{
    if (pool->overflow == POOL_OVERFLOW_MALLOC)
        return (*node = overflow_take(pool, kind)) ? 0 : -ENOMEM;
    if (pool->overflow == POOL_OVERFLOW_WAIT && may_wait && class != POOL_COMMIT)
        *node = pool_wait(pool, magazine_of(pool), kind, class);
    if (!*node)
        atomic_fetch_add_explicit(&pool->refused, 1, memory_order_relaxed);
    return *node ? 0 : -EAGAIN;
}

/* ---- Give ---- */

SLOW_PATH
static void overflow_give(struct pool *pool, struct node *node)
{
    struct magazine *m = magazine_of(pool);
    pthread_mutex_lock(&pool->lock);
    struct tally *tally = tally_of(pool, m);
    tally_give(tally, node->kind, true);
    pool_fold(pool, tally);
    pthread_mutex_unlock(&pool->lock);
    page_free(node);
}

/* Of a node that is released already. */
SLOW_PATH
static void give_slot(struct pool *pool, struct node *node)
{
    struct magazine *m = magazine_of(pool);
    if (magazine_give(pool, node))
        return;
    arena_prepare_retiring(pool, node);
    pthread_mutex_lock(&pool->lock);
    tally_give(tally_of(pool, m), node->kind, false);
    pool_fold(pool, tally_of(pool, m));
    if (m && magazine_count(m) >= MAGAZINE)
        pool_spill(pool, m, MAGAZINE_BATCH);
    pool_put(pool, node);
    pool_note(pool);
    pthread_mutex_unlock(&pool->lock);
}

static bool is_offered(const struct pool *pool, const struct node *node)
{
    return atomic_load_explicit(&node->owner, memory_order_relaxed) || atomic_load(&pool->at_hand) == node;
}

/* Nodes that the fast path is not for. */
SLOW_PATH
static void give_slow(struct pool *pool, struct node *node)
{
    if (node->overflow) {
        overflow_give(pool, node);
        return;
    }
    if (is_offered(pool, node))
        pool_withdraw_slow(pool, node);
    node_release(pool, node);
    give_slot(pool, node);
}

/* ---- The doors ---- */

/* Makes a free node a taken one. False: there was no memory for its page (POOL_MALLOC), and it has been given back. */
static bool prepare(struct pool *pool, struct node *node, enum pool_kind kind)
{
    set_up(node, kind);
    if (pool->slot) {
        slot_open(node);
        return true;
    }
    node->page = calloc(1, NODE_SIZE);
    if (node->page)
        return true;
    give_slow(pool, node);
    return false;
}

SLOW_PATH
static struct node *take_cached_slow(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct node *node = take(pool, kind, class);
    return node && prepare(pool, node, kind) ? node : NULL;
}

SLOW_PATH
static int take_slow(struct pool *pool, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **out)
{
    struct node *node = take(pool, kind, class);
    int rc = node ? 0 : take_beyond(pool, kind, class, may_wait, &node);
    if (!rc && !node->overflow && !prepare(pool, node, kind)) {
        node = NULL;
        rc = -ENOMEM;
    }
    *out = node;
    return rc;
}

struct node *pool_take_cached(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct node *node = pool->slot ? magazine_take(pool, kind, class) : NULL;
    if (!node)
        return take_cached_slow(pool, kind, class);
    set_up(node, kind);
    slot_open(node);
    return node;
}

int pool_take(struct pool *pool, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **out)
{
    struct node *node = pool->slot ? magazine_take(pool, kind, class) : NULL;
    if (!node)
        return take_slow(pool, kind, class, may_wait, out);
    set_up(node, kind);
    slot_open(node);
    *out = node;
    return 0;
}

void pool_give(struct pool *pool, struct node *node)
{
    assert(is_taken(node) && "given twice, or evicted");
    if (node->overflow || !pool->slot || is_offered(pool, node)) {
        give_slow(pool, node);
        return;
    }
    set_taken(node, false);
    slot_close(node);
    if (!magazine_give(pool, node))
        give_slot(pool, node);
}
