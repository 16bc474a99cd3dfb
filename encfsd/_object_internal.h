/* The inside of an object, shared by the files that implement _object.h:
 *
 *   _object.c          create, open, recover, close; root slots; attributes; space
 *   _object_read.c     read, seek
 *   _object_write.c    write, truncate, punch: how the current generation changes
 *   _object_commit.c   write-back, the steps of a commit, the delta
 *   _object_walk.c     scan, verify: walks over all that a root reaches
 *   _tree.c            the node table; finding and loading tree nodes
 *   _tree_fold.c       folding changes into the tree
 *
 * Where the content of data node i is, newest first:
 *
 *   node table     dirty nodes, nodes being sealed, clean nodes (cached)
 *   current        overlay (written, in no root), then cuts        the generation that takes changes
 *   flying         overlay, then cuts                              the generation of the commit in flight, if any
 *   root           its delta, then its tree                        the last durable root
 *
 * A commit moves `current` to `flying` when it begins. The tree changes only in commit_end, by one assignment of `root`; so all
 * who read it meanwhile see one whole tree, and `tree_version` tells them when it was exchanged.
 *
 * Locks, in the order in which they are taken:
 *   sealing   held by a write-back while it seals; a commit takes it once, after begin, to wait for write-backs of its generation.
 *   space     guards the allocator and what says how the file ends; held while free space is punched, cut or zero-filled, so that
 *             no slot handed out meanwhile is destroyed.
 *   lock      guards everything else; held for memory work only, never while sealing or on disk I/O. */
#ifndef ENCFSD_OBJECT_INTERNAL_H
#define ENCFSD_OBJECT_INTERNAL_H

#include <pthread.h>
#include <string.h>

#include "_alloc.h"
#include "_geometry.h"
#include "_object.h"
#include "_overlay.h"

enum {
    BATCH = 64,                         /* nodes sealed, opened, written or read at a time: their sealed bytes stay in the cache */
    DIRECT_MIN = 8,                     /* whole nodes of one write that are sealed from the caller's buffer */
    NO_SLOT = -1,
};

enum node_state {
    NODE_CLEAN,                         /* in the table, also on disk; may be evicted if it has an owner */
    NODE_DIRTY,                         /* in a generation's dirty list */
    NODE_SEALING,                       /* taken off the list by who seals it; content must not change */
    NODE_DROPPED,                       /* was NODE_SEALING and was replaced in its own generation: its slot is of no use */
};

/* What one commit makes durable. */
struct generation {
    uint32_t tag;                       /* nodes dirtied for this generation carry it in node->commit */
    struct overlay overlay;
    struct cuts cuts;
    struct node *dirty_first, *dirty_last;
    size_t dirty;                       /* nodes of the list, and those taken off it that are being sealed */
    int64_t grown;                      /* estimate: data nodes that were holes before */
    bool attr_dirty;                    /* size or times changed */
    uint64_t size;                      /* set when it starts to fly */
};

/* A root in memory. */
struct root {
    struct root_plain plain;
    uint8_t salt[SALT_SIZE];
};

/* A tree node that the fold wrote or dropped. */
struct replaced {
    uint64_t index;
    unsigned level;
    struct node *node;                  /* its new content, to be cached; NULL: none */
};

/* The commit in flight. Only the committing thread touches it. */
struct commit {
    struct root root;                   /* what will be the last durable root */
    int slot;                           /* root slot it goes to */
    bool root_written;                  /* it may have reached the disk */
    uint64_t hidden_end;                /* object.hidden_end once it has landed */
    struct slots retired;               /* slots that it does not reach, but its predecessor does */
    uint64_t run_first, run_used, run_end;      /* slots for tree nodes: used [first, used), left [used, end) */
    struct replaced *replaced;
    size_t replaced_count, replaced_room;
};

struct object {
    /* set once */
    struct object_env *env;
    struct blockfile *file;
    uint8_t id[ID_SIZE];

    /* Past every slot of a tree entry that the delta hides. Such a slot is retired, may be freed, even cut off the file; but as
     * long as the tree names it, a root's `end` must lie past it. Only the committing thread touches this. */
    uint64_t hidden_end;

    _Atomic bool poisoned;
    _Atomic bool damaged;               /* a node that is in use was not authentic */
    pthread_mutex_t sealing;

    pthread_mutex_t space;              /* guards: */
    struct alloc *alloc;
    uint64_t written_end;               /* first slot at or past alloc_end that may be a hole of the file */
    uint64_t commit_end;                /* alloc_end at the last commit */
    unsigned appends;                   /* commits in a row that moved the end a little */
    bool trimmed;                       /* the end was lowered: cut the file after the next barrier */
    bool scanning;                      /* object_scan is at work */

    pthread_rwlock_t lock;              /* guards: */
    struct node **bucket;               /* the node table: chains by (level, index) */
    size_t buckets, in_table, data_in_table;
    struct generation generation[2];
    struct generation *current, *flying;        /* flying: NULL, or of the commit in flight, or of one that failed
                                                   and that the next one takes up again */
    struct root *root;                  /* the last durable root; all zero before the first commit */
    uint64_t updates;                   /* counts changes of contents */
    uint64_t tree_version;              /* counts exchanges of the tree */
    struct commit *commit;              /* NULL if none is in flight */
    uint64_t size;
    int64_t atime, mtime, ctime;
    uint64_t counter;                   /* highest that was authenticated or used */
    int durable_slot;                   /* root slot of `root`, or NO_SLOT */
    bool entry_durable;                 /* the directory entry of the backing file is known to be durable */
    struct {
        uint64_t epoch, counter;        /* of what was last written there; zero if unknown */
        uint8_t salt[SALT_SIZE];
        uint8_t before[SALT_SIZE];      /* what may still be there if the last write failed */
        unsigned pins;
    } slot[ROOT_SLOTS];
};

/* Copies a node. Both pages are cold as a rule. The string instruction that a copy becomes waits for one line after another; told before, the
 * processor fetches them side by side. */
static inline void copy_page(void *to, const void *from)
{
    enum { LINE = 64 };

    for (size_t i = 0; i < NODE_SIZE; i += LINE) {
        __builtin_prefetch((const uint8_t *)from + i);
        __builtin_prefetch((uint8_t *)to + i, 1);
    }
    memcpy(to, from, NODE_SIZE);
}

/* ---- _object.c ---- */

/* Notes that a node in use is not authentic; returns the error that whoever reads gets for it. */
int object_found_damage(struct object *o);

/* Sealed bytes of up to BATCH nodes, one buffer a thread, reused. For use within one function. NULL: no memory. */
uint8_t *sealed_buffer(void);
/* Gives back slots that no root ever reached. Takes `space`. */
void undo_slots(struct object *o, const uint64_t *slot, size_t n);
/* Slots for n nodes that have no old place: a run, unless half of the file is holes (then a run would only make it longer).
 * Fills entry[].slot; on error all are 0 and none is taken. Takes `space`. */
int take_slots(struct object *o, size_t n, struct entry *entry);
bool generation_is_dirty(const struct generation *g);
/* The durable root has no holes, and nothing was cut since. lock held. */
bool is_dense(const struct object *o);
/* First index at and past which neither the durable root nor the commit in flight holds anything. lock held. */
uint64_t committed_nodes(const struct object *o);

/* ---- _tree.c ---- */

struct node *table_find(struct object *o, unsigned level, uint64_t index);     /* lock held, shared is enough */
bool table_reserve(struct object *o);                                           /* lock held exclusively, as for the next ones */
void table_insert(struct object *o, struct node *node);                        /* after table_reserve said true once */
void table_remove(struct object *o, struct node *node);
bool table_holds(struct object *o, const struct node *node);
/* Offers a node that is in the table to eviction, or takes it out and gives it back if it may not be cached. */
void table_settle(struct object *o, struct node *node, bool keep);

/* A private copy of the tree node that was loaded last: with it lookups go on even if nothing can be cached. */
struct cursor {
    uint64_t version;                   /* tree_version it is valid for; set by cursor_init */
    unsigned level;                     /* 0: empty */
    uint64_t index;
    struct tree_node node;
};
static inline void cursor_init(struct cursor *c) { c->level = 0; }

enum where {
    AT_NODE,                            /* in memory: `node` */
    AT_ENTRY,                           /* on disk: `entry` */
    AT_HOLE,                            /* nowhere, nor anything before index hole_end (same level) */
    AT_MISSING,                         /* unknown until tree node (level, index), whose entry is `entry`, is loaded */
};
struct location {
    enum where where;
    struct node *node;
    struct entry entry;
    uint64_t hole_end;
    unsigned level;
    uint64_t index;
    uint64_t version;
};

/* Finds data node `index`: newest content (locate), or that of the durable root (root_locate); or the entry of any node in the
 * tree proper (tree_locate). lock held, shared is enough; no I/O. */
enum where locate(struct object *o, uint64_t index, const struct cursor *cursor, struct location *at);
enum where root_locate(struct object *o, uint64_t index, const struct cursor *cursor, struct location *at);
enum where tree_locate(struct object *o, unsigned level, uint64_t index, const struct cursor *cursor, struct location *at);

/* Loads the tree node that `at` misses into the cursor, and into the table if there is room. lock not held. Returns 0 (also if
 * the tree was exchanged meanwhile: look again), -EIO, -ENOMEM... */
int tree_load(struct object *o, const struct location *at, struct cursor *cursor);

/* Reads and opens one tree node. 0, -EBADMSG, or -errno. */
int tree_read(struct object *o, unsigned level, const struct entry *entry, struct tree_node *node);

/* First node >= *index and < last that the tree proper holds: 1 and *index, *entry; 0: none; or -errno. lock not held. */
int tree_next(struct object *o, uint64_t *index, uint64_t last, struct cursor *cursor, struct entry *entry);

/* First index >= `index` that the leaf over `index` shows as a hole, or that lies past that leaf; `index` if the leaf is not in
 * memory. lock held, shared is enough. */
uint64_t tree_run_end(struct object *o, uint64_t index, const struct cursor *cursor);

const struct delta_entry *delta_find(const struct root_plain *root, uint64_t index);

/* ---- _object_read.c ---- */

/* Reads data node `index` whole into `page`; *entry is what was read, all zero if it came from memory or is a hole.
 * 0, -EIO, -ENOMEM... */
int read_node(struct object *o, uint64_t index, uint8_t *page, struct entry *entry);

/* ---- _object_write.c ---- */

void generation_append(struct object *o, struct generation *g, struct node *node);
void generation_unlink(struct object *o, struct generation *g, struct node *node);
/* Takes a data node out of the table because newer content replaces it; frees it if nobody seals it. */
void supersede(struct object *o, struct node *node);

/* ---- _object_commit.c ---- */

/* Seals n data nodes, at most BATCH, and writes them to the slots of their entries, whose keys and tags it fills. 0 or -errno. */
int seal_to_slots(struct object *o, const void *const *page, size_t n, struct entry *entry);

/* ---- _tree_fold.c ---- */

/* Puts `changes` (ascending; slot 0: becomes a hole) over the cuts of the flying generation into the tree; fills height, top,
 * nodes, delta of the commit's root. Data node slots of old entries are added to commit->retired. lock not held. 0 or -errno. */
int tree_fold(struct object *o, struct commit *c);

#endif
