/* The free list: memory for nodes, preallocated at mount (docs/design.md, "Node pool").
 *
 * Address space for the list is reserved once and committed in chunks, all at mount today. Slots (4 KiB each) lie apart
 * from their descriptors (struct node). When no slot is free, clean nodes are evicted; when none can be evicted, the node
 * comes from malloc and counts as a miss. All functions are thread-safe; none blocks on I/O. */
#ifndef ENCFSD_POOL_H
#define ENCFSD_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_format.h"

enum pool_kind { POOL_DATA, POOL_TREE, POOL_KINDS };

/* Who asks: commits may use the reserve, so that a commit never waits for memory that only a commit can free. */
enum pool_class { POOL_COMMIT, POOL_APPLICATION, POOL_BACKGROUND, POOL_CLASSES };

struct object;

/* Descriptor of one slot. The pool owns the fields above the line; the object layer owns those below while the node is
 * taken, and guards them with the owner's lock, except the atomic ones.
 *
 * Offering a node for eviction = setting `owner`, with a plain (sequentially consistent) assignment, after everything else
 * is set; `level` must not change while it is set. Withdrawing = setting it to NULL under the owner's lock. */
struct node {
    void *page;                         /* NODE_SIZE bytes, aligned to NODE_SIZE; set once (pool) or per take (malloc) */
    struct node *pool_next;             /* free list link */
    uint8_t kind;                       /* enum pool_kind of the current take */
    bool overflow;                      /* came from malloc: must not stay cached once clean, nor get an owner */
    bool taken;
    /* ---- owned by the taker ---- */
    _Atomic uint8_t referenced;         /* clock bit: set on use, cleared by the hand */
    _Atomic uint32_t pins;              /* > 0: must not be evicted (I/O or a kernel reply reads it) */
    struct object *_Atomic owner;       /* NULL while the node must not be offered for eviction */
    uint64_t index;                     /* index within its level */
    uint8_t level;                      /* 0 data, 1.. tree */
    uint8_t state;                      /* enum node_state of _object.c */
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

/* Creates a pool whose slots AND descriptors together take at most `bytes`, but never less than the reserve takes
 * (0: only the reserve). reserve_nodes: the last that many free slots go to POOL_COMMIT alone. evict NULL: nothing is ever
 * evicted. Memory is MADV_DONTDUMP. Returns 0 and *pool, or -ENOMEM; on error nothing is left behind. */
int pool_create(struct pool **pool, size_t bytes, size_t reserve_nodes, pool_evict_fn *evict);

/* Wipes and frees everything; NULL is allowed. All nodes must have been given back (checked: returns the number of leaked
 * nodes, 0 is right). No other thread may be using the pool, nor be ending after having used it. */
size_t pool_destroy(struct pool *pool);

/* Takes a node: page content undefined, pins and referenced 0, owner NULL. Never waits for I/O or for a free slot; tries:
 * magazine, free list, eviction, other threads' magazines, malloc. Returns NULL only if malloc fails. */
struct node *pool_take(struct pool *pool, enum pool_kind kind, enum pool_class class);

/* Like pool_take, but never from malloc: NULL if no slot is free and nothing can be evicted. For caching clean nodes. */
struct node *pool_take_cached(struct pool *pool, enum pool_kind kind, enum pool_class class);

/* Gives a node back. The caller must have unlinked it; it may hold the owner's lock. Overflow nodes are wiped and freed; the
 * plaintext in a slot stays until the slot is taken again or the pool destroyed (docs/decisions/0003-node-pool.md). */
void pool_give(struct pool *pool, struct node *node);

/* takes = gives + evictions + in_use, hits = takes - misses. Exact while nobody takes or gives; meanwhile each thread may be
 * one operation ahead, and high-water marks may be one magazine (32) a thread too low. */
struct pool_kind_stats {
    uint64_t takes, gives, hits;        /* hits: takes served without malloc */
    uint64_t misses;                    /* malloc fallbacks, total */
    uint64_t misses_live;               /* malloc fallbacks not given back yet */
    uint64_t evictions;
    uint64_t in_use, high_water;        /* nodes taken, overflow included */
    uint64_t bytes;                     /* in_use * NODE_SIZE */
};
struct pool_stats {
    uint64_t capacity;                  /* slots, reserve included */
    uint64_t capacity_bytes;            /* slots and descriptors */
    uint64_t in_use, high_water;        /* slots of the arena, all kinds */
    struct pool_kind_stats kind[POOL_KINDS];
};
void pool_stats(struct pool *pool, struct pool_stats *stats);

/* Walks every slot and accounts for it: free (list or magazine) or taken, none twice, as many as the counters say.
 * Returns 0, -EUCLEAN, or -ENOMEM (no memory for the walk). Only while no other thread uses the pool. */
int pool_audit(struct pool *pool);

#endif
