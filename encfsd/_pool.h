/* The free list: memory for nodes, preallocated at mount (docs/pool.md; reasons: docs/decisions/0003-node-pool.md).
 *
 * Address space for the largest list is reserved once; as much of it as the list has now is usable memory. Slots (4 KiB each)
 * lie apart from their descriptors (struct node). When no slot is free, clean nodes are evicted; when none can be evicted, the
 * overflow policy decides. All functions are thread-safe; none blocks on I/O, and only pool_take waits, if it is allowed to, and
 * only for a bounded time. */
#ifndef ENCFSD_POOL_H
#define ENCFSD_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_format.h"
#include "_latency.h"

enum pool_kind { POOL_DATA, POOL_TREE, POOL_KINDS };

/* Who asks, most urgent first. Commits may use the reserve and never wait, because only a commit makes dirty nodes clean;
 * background work takes only what is free and nobody else waits for: it evicts nothing. The workers order their jobs by it, too. */
enum pool_class { POOL_COMMIT, POOL_APPLICATION, POOL_BACKGROUND, POOL_CLASSES };

/* How pages come and go. All strategies count, limit, evict and audit alike. */
enum pool_strategy {
    POOL_POOLING,                       /* slots of the arena; free ones are overwritten with zeros in the background */
    POOL_POOLING_COW,                   /* slots of the arena; free ones become copy-on-write zero pages in batches, in the
                                           background: that wipes them and gives their memory back to the kernel */
    POOL_MALLOC,                        /* calloc at take, wipe and free at give; no arena of slots */
    POOL_STRATEGIES
};

/* What happens when no slot is free and nothing can be evicted. */
enum pool_overflow {
    POOL_OVERFLOW_MALLOC,               /* a node from malloc: counted as a miss */
    POOL_OVERFLOW_WAIT,                 /* wait in a queue, the most urgent class first, in each class the oldest first */
    POOL_OVERFLOW_EVICT_ONLY,           /* none: the list is never exceeded, the caller does without a node */
    POOL_OVERFLOWS
};

struct object;

/* Descriptor of one slot. The pool owns the fields above the line; the object layer owns those below while the node is
 * taken, and guards them with the owner's lock, except the atomic ones.
 *
 * Offering a node for eviction = setting `owner`, with a plain (sequentially consistent) assignment, after everything else
 * is set; `level` must not change while it is set. Withdrawing = setting it to NULL under the owner's lock. */
struct node {
    void *page;                         /* NODE_SIZE bytes; a slot's is aligned to NODE_SIZE, others to 16 bytes */
    struct node *pool_next;             /* free list link */
    uint8_t kind;                       /* enum pool_kind of the current take */
    bool overflow;                      /* came from malloc beyond the list: must not stay cached once clean, nor get an owner */
    _Atomic bool taken;
    bool stale;                         /* the page may hold what a taker wrote */
    /* ---- owned by the taker ---- */
    _Atomic uint32_t pins;              /* > 0: must not be evicted (I/O or a kernel reply reads it) */
    struct object *_Atomic owner;       /* NULL while the node must not be offered for eviction */
    uint64_t index;                     /* index within its level */
    uint8_t level;                      /* 0 data, 1.. tree */
    uint8_t state;                      /* enum node_state of _object.c */
    _Atomic uint8_t referenced;         /* clock bit: set on use, cleared by the hand */
    bool retired;                       /* the pool's, here because there is room: pool_resize took the slot out of use */
    uint32_t commit;                    /* tag of the commit it was dirtied for */
    struct node *hash_next;             /* chain of the owner's node table */
    struct node *list_prev, *list_next; /* the owner's dirty or in-flight list */
};

struct pool;

/* Called by the clock hand for a node whose owner was set and that was neither pinned nor referenced a moment ago.
 * The callback reads node->owner (NULL by now: return false), trylocks that owner or returns false, checks under its lock
 * that node->owner is still set and pins still 0, unlinks the node from every structure of the owner, unlocks, touches
 * nothing of the owner any more and returns true; the pool then takes the slot back itself. It must not block, nor take
 * nodes, nor give this one. The owner cannot vanish under the callback: pool_give of the node waits for its end, so
 * whoever gives back all its nodes before freeing itself is safe. */
typedef bool pool_evict_fn(struct node *node);

/* Called by the thread that creates or resizes the pool, every few MiB and at the end: bytes of `total` that are in memory. */
typedef void pool_progress_fn(void *arg, uint64_t done, uint64_t total);

struct pool_options {
    size_t bytes;                       /* slots AND descriptors take at most this, but never less than the reserve takes */
    size_t max_bytes;                   /* address space reserved for pool_resize; less than `bytes`: as much as `bytes` */
    size_t reserve_nodes;               /* the last that many free slots go to POOL_COMMIT alone */
    enum pool_strategy strategy;
    enum pool_overflow overflow;
    bool prefault;                      /* have all memory in place before the call returns; as many threads as CPUs see to it */
    bool hugepages;                     /* ask the kernel for transparent huge pages */
    bool lock;                          /* keep slots and descriptors out of swap; what malloc adds is not covered */
    pool_evict_fn *evict;               /* NULL: nothing is ever evicted */
    pool_progress_fn *progress;         /* of prefaulting; may be NULL */
    void *progress_arg;
};

/* Creates a pool. Memory is MADV_DONTDUMP. `reason` (may be NULL) becomes "" or one line about each thing asked for that this
 * kernel cannot do, so that the pool does without: huge pages; POOL_POOLING_COW, which becomes POOL_POOLING (really tried, each
 * time); prefault and huge pages with POOL_MALLOC. Starts one thread ("encfsd-wipe").
 * Returns 0 and *pool; on error nothing is left behind:
 *   -ENOMEM  not that much address space or memory
 *   -EPERM   `lock` meets RLIMIT_MEMLOCK (and the process has no CAP_IPC_LOCK)
 *   -EINVAL  `lock` with POOL_MALLOC, or an unknown strategy or policy
 *   -EAGAIN  no thread can be started */
int pool_create(struct pool **pool, const struct pool_options *options, char *reason, size_t reason_size);

/* Wipes and frees everything; NULL is allowed. All nodes must have been given back (checked: returns the number of leaked
 * nodes, 0 is right). No other thread may be using the pool, nor be ending after having used it. */
size_t pool_destroy(struct pool *pool);

/* Changes the size while the pool is used. Growing takes effect when the call returns (prefaulted, locked, as at creation).
 * Shrinking takes effect at once for free slots and for nodes that can be evicted; other nodes above the new end stay valid, and
 * their slots go as they are given back, at the latest a second after they could be evicted: pool_stats.draining counts them. The
 * memory goes back to the kernel. May take long (prefault); blocks other callers of pool_resize, nobody else for more than
 * about 0.1 ms. On error the pool has its old size:
 *   -EINVAL  less than the reserve takes
 *   -ERANGE  more than pool_options.max_bytes
 *   -ENOMEM, -EPERM  as for pool_create */
int pool_resize(struct pool *pool, size_t bytes);

/* Bytes that slots and descriptors of so many nodes take: of the reserve, the least that pool_resize accepts. */
size_t pool_footprint(size_t nodes);

/* Takes a node: page content undefined, pins and referenced 0, owner NULL. Never waits for I/O; tries: magazine, free list,
 * eviction, other threads' magazines, and then what the overflow policy says. may_wait matters with POOL_OVERFLOW_WAIT alone, and
 * not to POOL_COMMIT, which never waits: the caller may sleep in the queue, at most POOL_WAIT_MS; it should then hold no lock
 * that whoever makes nodes clean could need, nor nodes of another take. Returns
 *   0        and *node
 *   -EAGAIN  no slot, and the policy forbids malloc: the caller tries later, or does without a node
 *   -ENOMEM  malloc failed
 * On error *node is NULL. */
int pool_take(struct pool *pool, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **node);
enum { POOL_WAIT_MS = 200 };

/* For caching clean nodes: never waits, never exceeds the list. NULL if no slot is free and nothing can be evicted (for the background:
 * if none is free), or others of the same or a more urgent class wait for one. */
struct node *pool_take_cached(struct pool *pool, enum pool_kind kind, enum pool_class class);

/* Gives a node back. The caller must have unlinked it; it may hold the owner's lock. Nodes from malloc are wiped and freed here.
 * A slot of the arena is wiped within about POOL_WIPE_MS + the time that wiping takes, unless it is taken again before. */
void pool_give(struct pool *pool, struct node *node);
enum { POOL_WIPE_MS = 1000 };

/* What the pool's own thread does every POOL_WIPE_MS: wipes every slot that is free when the call begins, those in magazines of
 * all threads too, and evicts from the part that is being drained. Returns the number of slots wiped. */
size_t pool_tidy(struct pool *pool);

/* takes = gives + evictions + in_use, hits = takes - misses. Exact while nobody takes or gives; meanwhile each thread may be
 * one operation ahead, and high-water marks may be one magazine (32) a thread too low. */
struct pool_kind_stats {
    uint64_t takes, gives, hits;        /* hits: takes served without exceeding the list */
    uint64_t misses;                    /* malloc fallbacks, total */
    uint64_t misses_live;               /* malloc fallbacks not given back yet */
    uint64_t evictions;
    uint64_t in_use, high_water;        /* nodes taken, overflow included */
    uint64_t bytes;                     /* in_use * NODE_SIZE */
};
struct pool_stats {
    uint64_t capacity;                  /* slots, reserve included; after pool_resize the new number */
    uint64_t capacity_bytes;            /* slots and descriptors */
    uint64_t max_bytes;                 /* most that pool_resize accepts */
    uint64_t draining;                  /* slots above capacity that are still taken */
    uint64_t in_use, high_water;        /* slots, all kinds, draining ones included */
    uint64_t refused;                   /* takes that ended with -EAGAIN */
    uint64_t wiped;                     /* slots wiped in the background, total */
    uint32_t strategy, overflow;        /* enum pool_strategy, the one in effect; enum pool_overflow */
    struct pool_kind_stats kind[POOL_KINDS];
};
void pool_stats(struct pool *pool, struct pool_stats *stats);

/* The queue of one class (POOL_COMMIT's stays empty). A wait is counted when it ends. */
struct pool_queue_stats {
    uint64_t depth, high_water;         /* waiting now; most at once */
    uint64_t waits, expired;            /* waits that have ended; of them: without a node */
    uint64_t total_ns;
    uint64_t wait[LATENCY_BUCKETS];     /* histogram of how long they waited (_latency.h) */
};
/* Without any lock: each figure is right, they need not belong to the same instant. */
void pool_queue_stats(struct pool *pool, struct pool_queue_stats stats[POOL_CLASSES]);

/* Walks every slot and accounts for it: free (list or magazine), taken, or retired by pool_resize, none twice, as many as the
 * counters say. Returns 0, -EUCLEAN, or -ENOMEM (no memory for the walk). Only while no other thread uses the pool. */
int pool_audit(struct pool *pool);

#endif
