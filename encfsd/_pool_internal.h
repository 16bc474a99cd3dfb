/* The inside of the pool, shared by the files that implement _pool.h (docs/pool.md):
 *
 *   _pool.c            take, give: magazines and the free list
 *   _pool_evict.c      the clock hand; emptying magazines
 *   _pool_wait.c       the queue of the policy `wait`, and its counters
 *   _pool_arena.c      memory: address space, prefault, huge pages, lock; wiping and returning slots
 *   _pool_life.c       create, destroy, resize; the thread that wipes
 *   _pool_stats.c      counters, audit
 *
 *      thread A        thread B
 *     magazine 0..32  magazine 0..32     LIFO; one thread's own, others must stop it first
 *          \  16 nodes  /
 *         the free list                  `lock`; stale nodes first, then wiped ones, then slots never used yet
 *               |  up to 16 victims
 *          clock hand                    `hand_lock`; walks the descriptors, offers nodes to evict()
 *
 * Whatever becomes free outside a magazine goes to the free list, and every take that finds its magazine empty is served
 * from there: so the reserve and the queue are enforced in one place.
 *
 * Lock order: resize_lock, hand_lock, lock. hand_lock is held while evict() gives other nodes back. None of them is held during a
 * system call that may take long, but for one membarrier. */
#ifndef ENCFSD_POOL_INTERNAL_H
#define ENCFSD_POOL_INTERNAL_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "_pool.h"
#include "_pool_checks.h"

enum {
    MAGAZINE = 32,                      /* most nodes a thread keeps for itself */
    MAGAZINE_BATCH = MAGAZINE / 2,      /* nodes moved at once between a magazine and the free list */
    STRETCH = 256,                      /* descriptors that one eviction looks at: bounds what a take can cost */
    GROUP = 256,                        /* nodes that are wiped, or looked at under the lock, at a time */
    CACHE_LINE = 64,
};
/* Slow paths stay out of line: they would make pool_take and pool_give save registers that these do not need. */
#define SLOW_PATH __attribute__((noinline, cold))

/* What a thread did since its tally was last folded into the pool's totals. */
struct tally {
    uint64_t takes[POOL_KINDS], gives[POOL_KINDS], misses[POOL_KINDS];
    int64_t overflow[POOL_KINDS];       /* overflow nodes taken - given */
    int64_t peak[POOL_KINDS];           /* largest takes - gives */
    int64_t slots, slots_peak;          /* the same for slots of the list, all kinds */
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

/* Lies on the waiting thread's stack. */
struct waiter {
    pthread_cond_t wake;
    struct waiter *next;
};

struct queue {
    struct waiter *first, **end;        /* guarded by pool->lock, as is writing the counters; these are read without it */
    _Atomic uint64_t depth, high_water, waits, expired, total_ns;
    _Atomic uint64_t wait[LATENCY_BUCKETS];
};

struct pool {
    /* Set once. */
    uint64_t id;                        /* of all pools that this process ever had */
    size_t max_capacity, reserve;
    enum pool_strategy strategy;
    enum pool_overflow overflow;
    bool prefault, hugepages, locked;
    pool_evict_fn *evict;
    pool_progress_fn *progress;
    void *progress_arg;
    struct node *node;                  /* max_capacity descriptors, `committed` of them usable */
    uint8_t *slot;                      /* as many slots; slot i belongs to node[i]; NULL with POOL_MALLOC */
    void *slot_space;                   /* what was mapped for them */
    size_t slot_space_bytes;
    pthread_key_t key;                  /* ends the thread's magazine with the thread */
    bool expedited;                     /* membarrier(2) works: entering a magazine needs no fence */

    /* Read by every take and give, seldom written. */
    alignas(CACHE_LINE) atomic_bool congested;      /* the reserve is short, or somebody waits; written under lock */
    struct node *_Atomic end;           /* node + capacity; written under lock */
    struct node *_Atomic at_hand;       /* being offered to evict(); written under hand_lock */

    alignas(CACHE_LINE) pthread_mutex_t lock;       /* guards what follows, up to hand_lock */
    size_t capacity;                    /* slots with a lower number are in use or free, others are retired as they become free */
    struct node *stale, *wiped;         /* the free list */
    size_t listed;                      /* its length */
    size_t used;                        /* slots from here on were never taken: free, descriptors not set up */
    size_t retired;                     /* slots from `capacity` on that are in no list, with node->retired set */
    size_t in_transit;                  /* free, but in nobody's list, because they are being wiped or sorted */
    struct magazine *magazines;
    struct tally common;                /* of threads that could not get a magazine */
    struct {
        uint64_t takes, gives, misses, evictions;
        int64_t overflow, high_water;
    } total[POOL_KINDS];                /* without what the tallies hold */
    int64_t slots, slots_high_water;    /* signed: an eviction may be counted before its take is folded in */
    uint64_t slots_wiped;
    size_t waiting;                     /* in all queues */
    struct queue queue[POOL_CLASSES];

    alignas(CACHE_LINE) pthread_mutex_t hand_lock;  /* guards hand; one thread at a time evicts */
    size_t hand;

    _Atomic uint64_t refused;
    pthread_mutex_t resize_lock;        /* guards committed; one thread at a time resizes */
    size_t committed;                   /* slots and descriptors that are usable memory */

    pthread_mutex_t wiper_lock;         /* guards ending */
    pthread_cond_t wiper_wake;
    bool ending;
    pthread_t wiper;
};

/* ---- Magazines ---- */

/* Entering is one side of a Dekker lock: "write `entered`, then read `stopped`" here, the mirror image in pool_stop_all(). A fence
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

/* ---- The free list; all of this under pool->lock ---- */

static inline size_t number_of(const struct pool *pool, const struct node *node) { return (size_t)(node - pool->node); }

/* Slots that a take could have now. */
static inline size_t shared_free(const struct pool *pool)
{
    return pool->listed + (pool->capacity > pool->used ? pool->capacity - pool->used : 0);
}

static inline bool is_taken(const struct node *node) { return atomic_load_explicit(&node->taken, memory_order_relaxed); }
static inline void set_taken(struct node *node, bool taken) { atomic_store_explicit(&node->taken, taken, memory_order_relaxed); }

static inline void page_free(struct node *node)
{
    slot_access(node);
    explicit_bzero(node->page, NODE_SIZE);
    free(node->page);
}

/* A taken node becomes a free one. */
static inline void node_release(const struct pool *pool, struct node *node)
{
    set_taken(node, false);
    if (pool->slot) {
        slot_close(node);
    } else if (node->page) {
        page_free(node);
        node->page = NULL;
        node->stale = false;
    }
}

/* ---- _pool.c ---- */

void pool_stop_all(struct pool *pool);          /* stops all magazines; needs pool->lock until pool_resume_all() */
void pool_resume_all(struct pool *pool);
void pool_fold(struct pool *pool, struct tally *tally);     /* into the totals; needs pool->lock */
void pool_fold_all(struct pool *pool);          /* needs pool->lock, and all magazines stopped */
int64_t pool_in_use(const struct pool *pool, unsigned kind);    /* as of the last fold; needs pool->lock */
/* Puts a free node where it belongs: into the list, or, from `capacity` on, out of use. Needs pool->lock; then pool_note(). */
void pool_put(struct pool *pool, struct node *node);
/* After the free list or the queue has changed: updates `congested`, wakes whoever is next. Needs pool->lock. */
void pool_note(struct pool *pool);
void pool_spill(struct pool *pool, struct magazine *m, unsigned n);    /* the n coldest nodes, to the list; m entered or stopped */
void pool_magazine_retire(void *magazine);      /* the thread ends */

enum share { SHARE_GOT, SHARE_NONE, SHARE_BEHIND };
/* One node from the free list, if the class may have it; and a few more for the magazine, as far as they are no part of the
 * reserve. SHARE_BEHIND: there may be some, but others wait for them. self: the caller's place in the queue, or NULL. */
enum share pool_take_shared(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class,
                            const struct waiter *self, struct node **node);
/* Makes slots free that are not; true: try again. */
bool pool_make_room(struct pool *pool);

/* ---- _pool_evict.c ---- */

size_t pool_evict_some(struct pool *pool);      /* a few nodes, into the free list; returns how many */
size_t pool_evict_retiring(struct pool *pool);  /* all that can go of what lies above `capacity` */
size_t pool_raid(struct pool *pool);            /* empties all magazines into the free list; returns how many nodes */
/* Nobody will look at the node any more when this returns. */
void pool_withdraw_slow(struct pool *pool, struct node *node);

/* ---- _pool_wait.c ---- */

/* True if others come first. Needs pool->lock. */
bool pool_is_behind(const struct pool *pool, enum pool_class class, const struct waiter *self);
/* Wakes the first of the most urgent queue. Needs pool->lock. */
void pool_wake_next(struct pool *pool);
/* Waits in the queue. NULL: in vain. */
struct node *pool_wait(struct pool *pool, struct magazine *m, enum pool_kind kind, enum pool_class class);

/* ---- _pool_arena.c ---- */

size_t pool_nodes_in(size_t bytes);             /* as many as fit */
bool arena_cow_works(void);                     /* tries it */
const char *arena_hugepages_refused(void);      /* NULL, or why not */
int arena_create(struct pool *pool);            /* address space for max_capacity nodes. 0 or -ENOMEM */
int arena_commit(struct pool *pool, size_t capacity);   /* usable memory from `committed` up to capacity. 0, -ENOMEM, -EPERM */
void arena_destroy(struct pool *pool);          /* wipes what is stale */
void arena_wipe(const struct pool *pool, struct node **node, size_t n);     /* sorts them, as a side effect */
void arena_return(const struct pool *pool, size_t first, size_t n);     /* the memory of n free slots goes to the kernel: zeros */
/* Before a free node may be put out of use: if it lies above the end, its memory goes to the kernel. */
void arena_prepare_retiring(const struct pool *pool, struct node *node);

#endif
