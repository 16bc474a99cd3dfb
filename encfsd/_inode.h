/* The in-core inode table: the authority on an inode while it is known (docs/concurrency.md, "Inodes").
 *
 * An inode enters the table at its first lookup or use and leaves it when its lookup count and its references are zero and
 * nothing of it is dirty. Database row and root are snapshots of it. The table is sharded by inode number. */
#ifndef ENCFSD_INODE_H
#define ENCFSD_INODE_H

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_format.h"
#include "_object.h"

enum {
    ROOT_INO = 1,
    NAME_MAX_BYTES = 255,
    INLINE_MAX = 2048,              /* bytes of contents that live in the database row of a file */
    DIRECTORY_SIZE = 4096,          /* st_size of every directory: what its entries take lies in the database */
};

struct attr {
    uint64_t ino, size, blocks;     /* blocks: 512 bytes each; never 0 for a file with contents */
    uint32_t mode, nlink, uid, gid, rdev;
    int64_t atime, mtime, ctime, btime; /* ns since 1970, any sign */
};

/* What only a file needs that is being worked on: there is one while its object is open, and as long as something of it is lost. */
struct inode_work {
    /* guarded by the inode's lock */
    uint32_t object_users;          /* operations that use `object` right now: it must not be closed */
    int lost_error;                 /* what fsync says as long as something is lost (negative errno) */
    uint64_t lost_first, lost_last; /* bytes [first, last) of which a WRITE failed and that nobody has written since; equal: none */
    /* guarded by the groups' mutex */
    uint64_t active_mark;           /* mark after which the membership in the active set is durable */
    uint32_t solo_since_group;      /* solo commits begun since the last group captured this inode */
    /* only the group thread changes these while the object is open */
    bool pinned;                    /* the object's root `pin` is named exactly by the durable or a submitted mark */
    struct object_record pin;
};

struct inode {
    /* set once */
    uint64_t ino;
    /* guarded by the shard's lock */
    struct inode *hash_next;
    uint64_t lookups;               /* what the kernel holds; rises before the reply leaves */
    uint32_t refs;                  /* operations and background work that use the struct right now */
    /* guarded by `lock` (order: namespace mutex, then one inode lock, then the object's) */
    uint32_t writers;               /* handles open for writing: the kernel may hold dirty pages */
    pthread_mutex_t lock;
    struct attr attr;               /* live values; for an object-backed file size/blocks/times come from here too */
    uint64_t parent;                /* directories: ino of "..", else 0 */
    uint8_t *content;               /* NULL or attr.size bytes (capacity INLINE_MAX): contents held in the row */
    struct object *object;          /* NULL: contents in the row, or object not opened yet */
    struct inode_work *work;        /* NULL: not needed. Whoever may use the object may read the pointer without the lock. */
    uint8_t object_id[ID_SIZE];     /* all zero: the file has no object */
    struct object_record record;    /* as in the newest database row */
    uint64_t meta_mark;             /* number of the last transaction that changed mode, owner, links, xattrs or created it */
    /* guarded by the groups' mutex (_groups.c) */
    struct inode *dirty_prev, *dirty_next; /* list of inodes with dirty data or attributes */
    bool on_dirty_list : 1;
    bool publish : 1;               /* renamed or linked since the last mark: its data must be in the next group */
    bool active : 1;                /* in the newest database's active set */
    bool commit_in_flight : 1;      /* a commit of the object runs: one at a time */
    bool in_group : 1;              /* a target of the running group */
    /* guarded by the namespace mutex */
    bool no_default_acl;            /* a directory known to have none */
    bool no_xattrs;                 /* known to have none, ACLs included; changed under both locks */
    /* guarded by `lock` again: small ones last, and those under one mutex apart from others */
    bool content_dirty : 1;         /* content newer than the row */
    bool attr_dirty : 1;            /* size, blocks or times newer than the row (lazily written by groups) */
    bool deleted : 1;               /* nlink 0: the row goes when lookups and refs are gone */
    bool linkable : 1;              /* deleted, but may still get its first name (ns_tmpfile) */
    bool has_record : 1;            /* the row holds a record of the object */
    bool pages_stale : 1;           /* the kernel's pages show what could not be stored: the next group has them dropped */
    bool damage_told : 1;           /* the log has a line about damaged contents: one is enough */
    bool lost_whole : 1;            /* something is lost, and there was no memory to note which bytes */
};

enum { INODE_BYTES = 300 };         /* that each known inode may take, all in all: 8 for malloc, up to 8 for its bucket, and the struct */
static_assert((sizeof(struct inode) + 8 + 15) / 16 * 16 + 8 <= INODE_BYTES, "what a looked-up inode costs");

struct inode_table;

int inode_table_create(struct inode_table **table);
void inode_table_destroy(struct inode_table *table);    /* all inodes must be droppable; leaks are reported by the return of inode_table_count */
size_t inode_table_count(struct inode_table *table);

/* Finds an inode and takes a reference; NULL if it is not in core. */
struct inode *inode_find(struct inode_table *table, uint64_t ino);

/* Finds or inserts; the namespace mutex is held. Takes a reference. NULL: out of memory. A *created inode is zero but for ino
 * and comes with its lock held: the caller fills it and unlocks, so that whoever finds it meanwhile waits for that. */
struct inode *inode_get(struct inode_table *table, uint64_t ino, bool *created);

/* Adds to the kernel's lookup count; call before the reply leaves. */
void inode_looked_up(struct inode_table *table, struct inode *inode, uint64_t n);

/* Sees to it that inode->work is there. The inode's lock is held. 0 or -ENOMEM. */
int inode_need_work(struct inode *inode);
/* Frees inode->work if nothing is lost: the object has just been closed, with nobody using it. The inode's lock is held. */
void inode_end_work(struct inode *inode);
/* What fsync has to say of WRITEs that failed and have not been repeated: 0 or a negative errno. The inode's lock is held. */
int inode_lost(const struct inode *inode);

/* A further reference to an inode that the caller knows to be referenced; never the last to go: its drop decides nothing. */
void inode_hold(struct inode_table *table, struct inode *inode);
void inode_unhold(struct inode_table *table, struct inode *inode);

/* Drops a reference. Returns true if the inode may now be dropped: lookups == 0 and refs == 0 (the caller then decides, under
 * the namespace mutex, whether to reclaim a deleted one and removes it with inode_remove_if_unused). */
bool inode_put(struct inode_table *table, struct inode *inode);

/* Does the kernel know it: has somebody it open, or a name cached? The answer may be old when it is there. */
bool inode_is_known(struct inode_table *table, struct inode *inode);

/* FORGET. Returns true as inode_put does. Unknown inode numbers are ignored. */
bool inode_forget(struct inode_table *table, uint64_t ino, uint64_t n);

/* Removes and frees the inode if lookups and refs are 0 and attr_dirty and content_dirty are not set (what is dirty of a
 * deleted inode counts for nothing); returns whether it did. Namespace mutex held. Closes nothing: *object receives its open
 * object (or NULL) for the caller to close outside the locks. Whoever puts an inode on a list holds a reference, so one on
 * the dirty list or with a commit in flight is never removed. */
bool inode_remove_if_unused(struct inode_table *table, uint64_t ino, struct object **object);

/* Calls fn, without locks, for every inode in core. Each call hands a reference over: fn gives it back with ns_put_inode.
 * 0 or -ENOMEM, then not all were visited. */
int inode_for_each(struct inode_table *table, void (*fn)(void *arg, struct inode *inode), void *arg);

#endif
