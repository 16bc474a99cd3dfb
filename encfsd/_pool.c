/* The free list (contract: _pool.h; reasons and figures: docs/decisions/0003-node-pool.md).
 *
 *      thread A        thread B
 *     magazine 0..32  magazine 0..32     LIFO; one thread's own, others must stop it first
 *          \  16 nodes  /
 *         the free list                  `lock`; nodes given back, and behind them the slots never used yet
 *               |  up to 16 victims
 *          clock hand                    `hand_lock`; walks the descriptors, offers nodes to evict()
 *
 * Whatever becomes free outside a magazine goes to the free list, and every take that finds its magazine empty is served
 * from there: so the reserve is enforced in one place. Lock order: hand_lock, lock; both are held only while evict(), which runs
 * under hand_lock, gives other nodes back. */
#include "_pool.h"
#include "_pool_checks.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MAGAZINE = 32,                      /* most nodes a thread keeps for itself */
    BATCH = MAGAZINE / 2,               /* nodes moved at once between a magazine and the free list */
    STRETCH = 256,                      /* descriptors that one eviction looks at: bounds what a take can cost */
    CHUNK_NODES = 1 << 14,              /* slots committed at once: 64 MiB */
    CACHE_LINE = 64,
};
/* Slow paths stay out of line: they would make pool_take and pool_give save registers that these do not need. */
#define SLOW_PATH __attribute__((noinline, cold))

static_assert(CHUNK_NODES * sizeof(struct node) % 65536 == 0, "a chunk of descriptors is whole pages of any size");

/* ---- Structures ---- */

/* What a thread did since its tally was last folded into the pool's totals. */
struct tally {
    uint64_t takes[POOL_KINDS], gives[POOL_KINDS], misses[POOL_KINDS];
    int64_t overflow[POOL_KINDS];       /* overflow nodes taken - given */
    int64_t peak[POOL_KINDS];           /* largest takes - gives */
    int64_t slots, slots_peak;          /* the same for slots of the arena, all kinds */
};

/* A thread enters its magazine, or holds pool->lock, before it touches it. Others hold pool->lock and stop it. */
struct magazine {
    alignas(CACHE_LINE) atomic_bool entered;    /* written by the thread */
    atomic_bool stopped;                /* written under pool->lock */
    _Atomic unsigned count;             /* of `node`; atomic because a raid looks at it before it stops the magazine */
    struct tally tally;
    struct pool *pool;                  /* set once */
    struct magazine *next;              /* pool->magazines; guarded by pool->lock */
    struct node *node[MAGAZINE];        /* a stack: the warmest node is taken first */
};

struct pool {
    /* Set once. */
    size_t capacity, reserve;
    size_t evict_batch;                 /* victims that one eviction looks for */
    pool_evict_fn *evict;
    struct node *node;                  /* capacity descriptors */
    uint8_t *slot;                      /* capacity slots; slot i belongs to node[i] */
    pthread_key_t key;                  /* the thread's own magazine */
    bool expedited;                     /* membarrier(2) works: entering a magazine needs no fence */

    /* Read by every take and give, seldom written. */
    alignas(CACHE_LINE) atomic_bool reserve_short;  /* shared_free() < reserve; written under lock */
    struct node *_Atomic at_hand;       /* being offered to evict(); written under hand_lock */

    alignas(CACHE_LINE) pthread_mutex_t lock;       /* guards what follows, up to hand_lock */
    struct node *list;                  /* the free list */
    size_t listed;                      /* its length */
    size_t used;                        /* slots from here on were never taken: free, descriptors not set up */
    struct magazine *magazines;
    struct tally common;                /* of threads that could not get a magazine */
    struct {
        uint64_t takes, gives, misses, evictions;
        int64_t overflow, high_water;
    } total[POOL_KINDS];                /* without what the tallies hold */
    int64_t slots, slots_high_water;    /* signed: an eviction may be counted before its take is folded in */

    alignas(CACHE_LINE) pthread_mutex_t hand_lock;  /* guards hand; one thread at a time evicts */
    size_t hand;
};

/* ---- Magazines ---- */

/* Entering is one side of a Dekker lock: "write `entered`, then read `stopped`" here, the mirror image in stop_all(). A fence
 * between the two would cost more than all the rest of a take; the stopping side, which is rare, pays for both with
 * membarrier(2). Returns false if there is no magazine or it is stopped: then go by the free list. */
static inline bool enter(const struct pool *pool, struct magazine *m)
{
    if (!m)
        return false;
    if (pool->expedited) {
        atomic_store_explicit(&m->entered, true, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
    } else {
        atomic_store(&m->entered, true);
    }
    if (!atomic_load(&m->stopped))
        return true;
    atomic_store_explicit(&m->entered, false, memory_order_release);
    return false;
}

static inline void leave(struct magazine *m) { atomic_store_explicit(&m->entered, false, memory_order_release); }

/* Stops all magazines and waits until nobody is inside one. Needs pool->lock, as does every access until resume_all(). */
static void stop_all(struct pool *pool)
{
    for (struct magazine *m = pool->magazines; m; m = m->next)
        atomic_store(&m->stopped, true);
    if (pool->expedited)
        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);    /* cannot fail once registered */
    for (struct magazine *m = pool->magazines; m; m = m->next)
        while (atomic_load(&m->entered))
            sched_yield();
}

static void resume_all(struct pool *pool)
{
    for (struct magazine *m = pool->magazines; m; m = m->next)
        atomic_store_explicit(&m->stopped, false, memory_order_release);
}

static inline unsigned magazine_count(const struct magazine *m)
{
    return atomic_load_explicit(&m->count, memory_order_relaxed);
}

static inline void magazine_resize(struct magazine *m, unsigned count)
{
    atomic_store_explicit(&m->count, count, memory_order_relaxed);
}

static inline void magazine_push(struct magazine *m, struct node *node)
{
    unsigned count = magazine_count(m);
    m->node[count] = node;
    magazine_resize(m, count + 1);
}

static inline struct node *magazine_pop(struct magazine *m)
{
    unsigned count = magazine_count(m) - 1;
    magazine_resize(m, count);
    return m->node[count];
}

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

static int64_t total_in_use(const struct pool *pool, unsigned kind)
{
    return (int64_t)(pool->total[kind].takes - pool->total[kind].gives - pool->total[kind].evictions);
}

/* Moves a tally into the totals. Needs pool->lock. */
static void fold(struct pool *pool, struct tally *t)
{
    for (unsigned kind = 0; kind < POOL_KINDS; kind++) {
        int64_t peak = total_in_use(pool, kind) + t->peak[kind];
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

/* ---- The free list; all of this under pool->lock ---- */

static size_t shared_free(const struct pool *pool) { return pool->listed + (pool->capacity - pool->used); }

static void note_reserve(struct pool *pool)
{
    bool is_short = shared_free(pool) < pool->reserve;
    if (is_short != atomic_load_explicit(&pool->reserve_short, memory_order_relaxed))
        atomic_store_explicit(&pool->reserve_short, is_short, memory_order_relaxed);
}

static void list_push(struct pool *pool, struct node *node)
{
    node->pool_next = pool->list;
    pool->list = node;
    pool->listed++;
}

static struct node *list_pop(struct pool *pool)
{
    struct node *node = pool->list;
    if (node) {
        pool->list = node->pool_next;
        pool->listed--;
        return node;
    }
    node = &pool->node[pool->used];
    node->page = pool->slot + pool->used * NODE_SIZE;
    slot_access(node);
    slot_close(node);
    pool->used++;
    return node;
}

/* Moves the n coldest nodes of a magazine, entered or stopped, to the free list. */
static void spill(struct pool *pool, struct magazine *m, unsigned n)
{
    unsigned rest = magazine_count(m) - n;
    for (unsigned i = 0; i < n; i++)
        list_push(pool, m->node[i]);
    memmove(m->node, m->node + n, rest * sizeof m->node[0]);
    magazine_resize(m, rest);
}

/* ---- Threads ---- */

static struct tally *tally_of(struct pool *pool, struct magazine *m) { return m ? &m->tally : &pool->common; }

/* The thread ends (pthread key destructor). */
static void magazine_retire(void *arg)
{
    struct magazine *m = arg;
    struct pool *pool = m->pool;
    pthread_mutex_lock(&pool->lock);
    fold(pool, &m->tally);
    spill(pool, m, magazine_count(m));
    note_reserve(pool);
    struct magazine **link = &pool->magazines;
    while (*link != m)
        link = &(*link)->next;
    *link = m->next;
    pthread_mutex_unlock(&pool->lock);
    free(m);
}

/* NULL if there is no memory for one; the thread then goes by the free list, and tries again next time. */
SLOW_PATH
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

static inline struct magazine *magazine_of(struct pool *pool)
{
    struct magazine *m = pthread_getspecific(pool->key);
    return m ? m : magazine_create(pool);
}

/* ---- Eviction ---- */

enum reclaim { BUSY, LATER, OURS };

/* Asks the owner for a node, if it has one and the node was not used lately. OURS: it gave the node up. LATER: another try
 * may succeed. */
static enum reclaim reclaim(struct pool *pool, struct node *node, unsigned top_level)
{
    if (!atomic_load_explicit(&node->owner, memory_order_relaxed) ||
        atomic_load_explicit(&node->pins, memory_order_relaxed))
        return BUSY;
    if (atomic_load_explicit(&node->referenced, memory_order_relaxed)) {
        atomic_store_explicit(&node->referenced, 0, memory_order_relaxed);
        return LATER;
    }
    /* Announce first, then look at the owner again; withdraw() clears the owner first, then looks at the announcement. All four
     * are sequentially consistent, so one of the two sees the other. */
    atomic_store(&pool->at_hand, node);
    bool ours = atomic_load(&node->owner) && node->level <= top_level && pool->evict(node);
    if (ours)
        atomic_store_explicit(&node->owner, NULL, memory_order_relaxed);
    atomic_store(&pool->at_hand, NULL);
    return ours ? OURS : LATER;
}

/* Nobody will look at the node any more when this returns. */
static inline void withdraw(struct pool *pool, struct node *node)
{
    if (atomic_load_explicit(&node->owner, memory_order_relaxed))
        atomic_store(&node->owner, NULL);
    while (atomic_load(&pool->at_hand) == node)
        sched_yield();
}

/* Walks `count` descriptors from `start`, chains up victims of level <= top_level; leaves the hand where it stopped.
 * *again: something may be had in a second sweep. Needs hand_lock. */
static size_t sweep(struct pool *pool, size_t used, size_t start, size_t count, unsigned top_level, struct node **chain,
                    bool *again)
{
    size_t victims = 0;
    for (pool->hand = start; count-- && victims < pool->evict_batch; pool->hand = (pool->hand + 1) % used) {
        struct node *node = &pool->node[pool->hand];
        enum reclaim result = reclaim(pool, node, top_level);
        *again |= result == LATER;
        if (result == OURS) {
            node->pool_next = *chain;
            *chain = node;
            victims++;
        }
    }
    return victims;
}

/* Evicts a few nodes into the free list; returns how many. The first sweep takes data and leaves only, which are needed less
 * than their ancestors, and that were not used since the hand last passed; the second, over the same stretch, takes any. */
static size_t evict_some(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    size_t used = pool->used;
    pthread_mutex_unlock(&pool->lock);
    if (!pool->evict || !used)
        return 0;

    struct node *chain = NULL;
    pthread_mutex_lock(&pool->hand_lock);
    size_t start = pool->hand, stretch = used < STRETCH ? used : STRETCH;
    bool again = false;
    size_t victims = sweep(pool, used, start, stretch, 1, &chain, &again);
    if (!victims && again)
        victims = sweep(pool, used, start, stretch, UINT8_MAX, &chain, &again);
    pthread_mutex_unlock(&pool->hand_lock);
    if (!victims)
        return 0;

    for (struct node *node = chain; node; node = node->pool_next) {
        assert(node->taken);
        node->taken = false;
        slot_close(node);
    }
    pthread_mutex_lock(&pool->lock);
    for (struct node *node = chain, *next; node; node = next) {
        next = node->pool_next;
        pool->total[node->kind].evictions++;
        pool->slots--;
        list_push(pool, node);
    }
    note_reserve(pool);
    pthread_mutex_unlock(&pool->lock);
    return victims;
}

/* Moves what lies in all magazines to the free list, so that an idle thread's nodes are not lost to the others. */
static size_t raid(struct pool *pool)
{
    size_t seen = 0, moved = 0;
    pthread_mutex_lock(&pool->lock);
    for (struct magazine *m = pool->magazines; m; m = m->next)
        seen += magazine_count(m);
    if (seen) {
        stop_all(pool);
        for (struct magazine *m = pool->magazines; m; m = m->next) {
            moved += magazine_count(m);
            spill(pool, m, magazine_count(m));
        }
        resume_all(pool);
        note_reserve(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return moved;
}

/* ---- Take and give ---- */

static inline struct node *prepare(struct node *node, enum pool_kind kind)
{
    assert(!node->taken);
    node->taken = true;
    node->kind = (uint8_t)kind;
    atomic_store_explicit(&node->referenced, 0, memory_order_relaxed);
    atomic_store_explicit(&node->pins, 0, memory_order_relaxed);
    slot_open(node);
    return node;
}

/* One node from the free list, if the class may have it, and a few more for the magazine, as far as they are no part of the
 * reserve. */
static struct node *take_shared(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class)
{
    struct node *node = NULL;
    pthread_mutex_lock(&pool->lock);
    if (shared_free(pool) > (class == POOL_COMMIT ? 0 : pool->reserve)) {
        tally_take(tally_of(pool, m), kind, false);
        fold(pool, tally_of(pool, m));
        node = list_pop(pool);
        while (m && magazine_count(m) < BATCH - 1 && shared_free(pool) > pool->reserve)
            magazine_push(m, list_pop(pool));
        note_reserve(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return node;
}

SLOW_PATH
static struct node *take_slow(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class)
{
    struct node *node;
    do
        node = take_shared(pool, m, kind, class);
    while (!node && (evict_some(pool) || raid(pool)));
    return node ? prepare(node, kind) : NULL;
}

static inline struct node *take(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    struct magazine *m = magazine_of(pool);
    if (enter(pool, m)) {
        if (magazine_count(m) && (class == POOL_COMMIT || !atomic_load_explicit(&pool->reserve_short, memory_order_relaxed))) {
            struct node *node = magazine_pop(m);
            tally_take(&m->tally, kind, false);
            leave(m);
            return prepare(node, kind);
        }
        leave(m);
    }
    return take_slow(pool, m, kind, class);
}

SLOW_PATH
static struct node *overflow_take(struct pool *pool, enum pool_kind kind)
{
    void *page;
    struct node *node;
    if (posix_memalign(&page, NODE_SIZE, NODE_SIZE + sizeof *node))
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
    fold(pool, tally);
    pthread_mutex_unlock(&pool->lock);
    return prepare(node, kind);
}

SLOW_PATH
static void overflow_give(struct pool *pool, struct node *node)
{
    struct magazine *m = magazine_of(pool);
    pthread_mutex_lock(&pool->lock);
    struct tally *tally = tally_of(pool, m);
    tally_give(tally, node->kind, true);
    fold(pool, tally);
    pthread_mutex_unlock(&pool->lock);
    explicit_bzero(node->page, NODE_SIZE);
    free(node->page);
}

struct node *pool_take_cached(struct pool *pool, enum pool_kind kind, enum pool_class class)
{
    return take(pool, kind, class);
}

int pool_take(struct pool *pool, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **node)
{
    (void)may_wait;
    *node = take(pool, kind, class);
    if (!*node)
        *node = overflow_take(pool, kind);
    return *node ? 0 : -ENOMEM;
}

/* There is no room in the magazine, or the reserve comes first. */
SLOW_PATH
static void give_shared(struct pool *pool, struct magazine *m, struct node *node)
{
    pthread_mutex_lock(&pool->lock);
    tally_give(tally_of(pool, m), node->kind, false);
    fold(pool, tally_of(pool, m));
    if (m && magazine_count(m) >= MAGAZINE)
        spill(pool, m, BATCH);
    list_push(pool, node);
    note_reserve(pool);
    pthread_mutex_unlock(&pool->lock);
}

void pool_give(struct pool *pool, struct node *node)
{
    assert(node->taken && "given twice, or evicted");
    if (node->overflow) {
        overflow_give(pool, node);
        return;
    }
    withdraw(pool, node);
    node->taken = false;
    slot_close(node);
    struct magazine *m = magazine_of(pool);
    if (enter(pool, m)) {
        if (magazine_count(m) < MAGAZINE && !atomic_load_explicit(&pool->reserve_short, memory_order_relaxed)) {
            magazine_push(m, node);
            tally_give(&m->tally, node->kind, false);
            leave(m);
            return;
        }
        leave(m);
    }
    give_shared(pool, m, node);
}

/* ---- Life ---- */

static size_t descriptor_bytes(size_t nodes)
{
    return (nodes * sizeof(struct node) + NODE_SIZE - 1) / NODE_SIZE * NODE_SIZE;
}

static size_t footprint(size_t nodes) { return nodes * NODE_SIZE + descriptor_bytes(nodes); }

/* Address space without memory behind it. */
static void *reserve_space(size_t bytes)
{
    void *space = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return space == MAP_FAILED ? NULL : space;
}

/* Makes [offset, offset + bytes) of a reserved range usable memory that no core dump shows. */
static int commit_space(uint8_t *space, size_t offset, size_t bytes)
{
    if (mprotect(space + offset, bytes, PROT_READ | PROT_WRITE) || madvise(space + offset, bytes, MADV_DONTDUMP))
        return -ENOMEM;
    return 0;
}

static int arena_create(struct pool *pool)
{
    if (!(pool->node = reserve_space(descriptor_bytes(pool->capacity))) ||
        !(pool->slot = reserve_space(pool->capacity * NODE_SIZE)))
        return -ENOMEM;
    for (size_t first = 0; first < pool->capacity; first += CHUNK_NODES) {
        size_t n = pool->capacity - first < CHUNK_NODES ? pool->capacity - first : CHUNK_NODES;
        if (commit_space((uint8_t *)pool->node, first * sizeof(struct node), descriptor_bytes(n)) ||
            commit_space(pool->slot, first * NODE_SIZE, n * NODE_SIZE))
            return -ENOMEM;
    }
    return 0;
}

static void arena_destroy(struct pool *pool)
{
    for (size_t i = 0; i < pool->used; i++) {
        slot_access(&pool->node[i]);
        explicit_bzero(pool->node[i].page, NODE_SIZE);
    }
    if (pool->slot)
        munmap(pool->slot, pool->capacity * NODE_SIZE);
    if (pool->node)
        munmap(pool->node, descriptor_bytes(pool->capacity));
}

int pool_create(struct pool **out, const struct pool_options *options, char *reason, size_t reason_size)
{
    size_t bytes = options->bytes, reserve_nodes = options->reserve_nodes;
    pool_evict_fn *evict = options->evict;
    if (reason && reason_size)
        reason[0] = 0;
    size_t capacity = bytes / (NODE_SIZE + sizeof(struct node));
    if (capacity && footprint(capacity) > bytes)    /* the descriptors' last page is not full */
        capacity--;
    if (capacity < reserve_nodes)
        capacity = reserve_nodes;
    if (capacity > SIZE_MAX / (2 * NODE_SIZE))
        return -ENOMEM;

    struct pool *pool;
    if (posix_memalign((void **)&pool, CACHE_LINE, sizeof *pool))
        return -ENOMEM;
    memset(pool, 0, sizeof *pool);
    pool->capacity = capacity;
    pool->reserve = reserve_nodes;
    pool->evict = evict;
    /* A victim a take keeps a small cache full; a large one is emptied in batches, which costs less. */
    pool->evict_batch = 1 + capacity / 64 < BATCH ? 1 + capacity / 64 : BATCH;
    pool->expedited = !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
    pthread_mutex_init(&pool->lock, NULL);          /* cannot fail with default attributes */
    pthread_mutex_init(&pool->hand_lock, NULL);
    if ((capacity && arena_create(pool)) || pthread_key_create(&pool->key, magazine_retire)) {
        arena_destroy(pool);
        free(pool);
        return -ENOMEM;
    }
    *out = pool;
    return 0;
}

/* Needs pool->lock, and all magazines stopped. */
static void fold_all(struct pool *pool)
{
    fold(pool, &pool->common);
    for (struct magazine *m = pool->magazines; m; m = m->next)
        fold(pool, &m->tally);
}

size_t pool_destroy(struct pool *pool)
{
    if (!pool)
        return 0;
    pthread_key_delete(pool->key);
    fold_all(pool);
    size_t leaked = 0;
    for (unsigned kind = 0; kind < POOL_KINDS; kind++)
        leaked += (size_t)total_in_use(pool, kind);
    for (struct magazine *m = pool->magazines, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    arena_destroy(pool);
    pthread_mutex_destroy(&pool->hand_lock);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
    return leaked;
}

/* ---- Looking at it ---- */

void pool_stats(struct pool *pool, struct pool_stats *stats)
{
    pthread_mutex_lock(&pool->lock);
    stop_all(pool);
    fold_all(pool);
    resume_all(pool);
    *stats = (struct pool_stats){
        .capacity = pool->capacity,
        .capacity_bytes = footprint(pool->capacity),
        .in_use = (uint64_t)pool->slots,
        .high_water = (uint64_t)pool->slots_high_water,
    };
    for (unsigned kind = 0; kind < POOL_KINDS; kind++) {
        uint64_t in_use = (uint64_t)total_in_use(pool, kind);
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

/* Checks a free node, and marks it in `seen`. */
static bool audit_free(const struct pool *pool, const struct node *node, bool *seen)
{
    if (node < pool->node || node >= pool->node + pool->used)
        return false;
    size_t i = (size_t)(node - pool->node);
    if (seen[i] || node->taken || node->overflow || node->owner || node->page != pool->slot + i * NODE_SIZE)
        return false;
    seen[i] = true;
    return slot_untouched(node);
}

int pool_audit(struct pool *pool)
{
    bool *seen = calloc(pool->capacity + 1, sizeof *seen);
    if (!seen)
        return -ENOMEM;
    pthread_mutex_lock(&pool->lock);
    stop_all(pool);
    fold_all(pool);
    bool sound = pool->used <= pool->capacity;
    size_t listed = 0;
    for (struct node *node = pool->list; sound && node; node = node->pool_next, listed++)
        sound = audit_free(pool, node, seen);       /* a loop in the list is a node seen twice */
    sound = sound && listed == pool->listed;
    for (struct magazine *m = pool->magazines; m; m = m->next)
        for (unsigned i = 0; sound && i < magazine_count(m); i++)
            sound = audit_free(pool, m->node[i], seen);
    int64_t taken = 0;
    for (size_t i = 0; sound && i < pool->used; i++) {
        sound = seen[i] != pool->node[i].taken;     /* free or taken, not both, not neither */
        taken += pool->node[i].taken;
    }
    sound = sound && taken == pool->slots;
    resume_all(pool);
    pthread_mutex_unlock(&pool->lock);
    free(seen);
    return sound ? 0 : -EUCLEAN;
}

int pool_resize(struct pool *pool, size_t bytes)
{
    return bytes == footprint(pool->capacity) ? 0 : -ERANGE;
}

void pool_queue_stats(struct pool *pool, struct pool_queue_stats stats[POOL_CLASSES])
{
    (void)pool;
    memset(stats, 0, POOL_CLASSES * sizeof *stats);
}

uint64_t pool_bucket_ns(unsigned bucket)
{
    return bucket < 4 ? bucket : (uint64_t)(4 + bucket % 4) << (bucket / 4 - 1);
}
