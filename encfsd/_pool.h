/* The free list: memory for nodes, preallocated at mount (docs/design.md, "Node pool").
 *
 * Address space for the largest list is reserved once; chunks of it are committed at mount. Slots (4 KiB each) lie apart
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
 * taken, and guards them with the owner's lock, except `referenced` and `pins`, which are atomic. */
struct node {
    void *page;                         /* NODE_SIZE bytes, aligned to NODE_SIZE; set once (pool) or per take (malloc) */
    struct node *pool_next;             /* free list / magazine link */
    uint8_t kind;                       /* enum pool_kind of the current take */
    bool overflow;                      /* came from malloc: must not stay cached once clean */
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

/* Called by the clock hand, without pool locks, for a taken node whose owner is set, that is not pinned or referenced.
 * Returns true if the owner gave it up: then it was unlinked from every structure of the owner and the pool takes the
 * slot back itself (the callback must not call pool_give on it). Must not block: trylock the owner or return false. */
typedef bool pool_evict_fn(struct node *node);

/* Creates a pool whose slots AND descriptors together take at most `bytes` (0: only the built-in reserve).
 * reserve_nodes: slots that only POOL_COMMIT may take, also allocated when bytes is 0.
 * Returns 0 and *pool, or -ENOMEM; on error nothing is left behind. Memory is MADV_DONTDUMP. */
int pool_create(struct pool **pool, size_t bytes, size_t reserve_nodes, pool_evict_fn *evict);

/* Frees everything. All nodes must have been given back (checked: returns the number of leaked nodes, 0 is right). */
size_t pool_destroy(struct pool *pool);

/* Takes a node: page content undefined, pins 0, owner NULL. Never blocks; tries: magazine, free list, eviction, malloc.
 * Returns NULL only if malloc fails (or if the class may not use what is left and malloc fails). */
struct node *pool_take(struct pool *pool, enum pool_kind kind, enum pool_class class);

/* Like pool_take, but never from malloc: NULL if no slot is free and nothing can be evicted. For caching clean nodes. */
struct node *pool_take_cached(struct pool *pool, enum pool_kind kind, enum pool_class class);

/* Gives a node back. The caller must have unlinked it. Overflow nodes are wiped and freed. */
void pool_give(struct pool *pool, struct node *node);

struct pool_kind_stats {
    uint64_t takes, gives, hits;        /* hits: takes served without malloc */
    uint64_t misses;                    /* malloc fallbacks, total */
    uint64_t misses_live;               /* malloc fallbacks not given back yet */
    uint64_t evictions, in_use, high_water, bytes;
};
struct pool_stats {
    uint64_t capacity;                  /* slots, reserve included */
    uint64_t capacity_bytes;            /* slots and descriptors */
    uint64_t in_use, high_water;        /* slots of the arena */
    struct pool_kind_stats kind[POOL_KINDS];
};
void pool_stats(struct pool *pool, struct pool_stats *stats);

/* Walks every slot and accounts for it: free (list or magazine) or taken, none twice. Returns 0 or -EUCLEAN.
 * Only while no other thread uses the pool. */
int pool_audit(struct pool *pool);

#endif
