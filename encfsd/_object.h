/* One copy-on-write Merkle object: bytes in, committed roots out (docs/design.md, "The Merkle object").
 *
 * Thread-safe. Readers of one object run in parallel; no caller waits for another caller's sealing or disk I/O except on
 * the node it needs itself. Functions block on I/O unless OBJECT_NOWAIT is given; then -EAGAIN means that nothing was
 * changed and that the caller must come again without it, from a thread that may block. */
#ifndef ENCFSD_OBJECT_H
#define ENCFSD_OBJECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "_blockio.h"
#include "_format.h"
#include "_pool.h"
#include "_seal.h"
#include "_workers.h"

/* What all objects of one mounted volume share. Owned by the volume, outlives its objects, constant but for the counters. */
struct object_env {
    struct pool *pool;
    const struct keyring *ring;
    struct blockdir *dir;
    struct workers *workers;            /* NULL: everything on the calling thread */
    uint8_t instance[ID_SIZE];
    uint64_t epoch;                     /* mount epoch that new roots carry */
    bool read_only;
    bool cache_data;                    /* keep clean data nodes in the pool while it has room */
    _Atomic uint64_t dirty_nodes;       /* dirty and in-flight data nodes of all objects */
    _Atomic uint64_t open_objects;      /* each holds one file descriptor */
    _Atomic uint64_t dirty_limit;               /* with OBJECT_NOWAIT a write that would pass it returns -EAGAIN; without, the writer
                                           writes nodes back itself first */
};

struct object;

struct object_attr {
    uint64_t size;                      /* bytes */
    uint64_t nodes;                     /* data nodes that are not holes, dirty ones included: st_blocks = 8 * nodes */
    int64_t atime, mtime, ctime;        /* ns */
};

enum object_flags {
    OBJECT_NOWAIT = 1,
    OBJECT_QUEUE = 2,                   /* the caller holds no lock: a write that finds no free node may wait for one (pool_take) */
    OBJECT_ONCE = 4,                    /* a read of what the caller keeps itself: it is not kept in the pool, too */
};

/* Creates the backing file of a new, empty object and allocates its root slots (written with zeros). Nothing is durable
 * before the first commit. Returns 0 or -errno; on error no file is left behind. */
int object_create(struct object **o, struct object_env *env, const uint8_t id[ID_SIZE]);

/* Opens an object at exactly the root that `record` names: else -EBADMSG (no such authentic root) or -errno. */
int object_open(struct object **o, struct object_env *env, const uint8_t id[ID_SIZE], const struct object_record *record);

/* Recovery after an unclean stop (rules: adopt, then make durable). Considers `record` itself and each authentic root with
 * epoch == active_epoch that is ordered after it and whose whole delta verifies; takes the newest, makes it durable before
 * returning. record NULL: any authentic root whose epoch >= active_epoch (object 0 against the trusted state record).
 * *adopted names the root taken. The next commit's counter exceeds every authenticated one. -EBADMSG if none. */
int object_recover(struct object **o, struct object_env *env, const uint8_t id[ID_SIZE], const struct object_record *record,
                   uint64_t active_epoch, struct object_record *adopted);

/* Releases memory. Dirty nodes are discarded: commit first. */
void object_close(struct object *o);

const uint8_t *object_id(const struct object *o);
void object_attr(struct object *o, struct object_attr *attr);
void object_set_times(struct object *o, int64_t atime, int64_t mtime, int64_t ctime);
bool object_is_dirty(struct object *o);         /* something a commit would write: data, size or times */

/* Reads up to `size` bytes at `offset`; returns the number read (short only at the end of the file) or -errno.
 * -EBADMSG -> -EIO: any node of the range is not authentic; then nothing of `buffer` may be used. */
ssize_t object_read(struct object *o, void *buffer, size_t size, uint64_t offset, int flags);

/* Writes all bytes or none: 0, -EFBIG, -ENOSPC, -ENOMEM, -EIO, -EROFS. Extends the size. Whole nodes of large writes are
 * sealed straight from `buffer` into slots of the current commit; the rest becomes dirty nodes. */
int object_write(struct object *o, const void *buffer, size_t size, uint64_t offset, int flags);

int object_truncate(struct object *o, uint64_t size, int flags);                      /* both ways; growth is a hole */
int object_extend(struct object *o, uint64_t size, int flags);  /* by a hole up to `size`; nothing if it is that long already */
int object_punch(struct object *o, uint64_t offset, uint64_t size, int flags);        /* zeroes; size unchanged; whole nodes become holes */
/* SEEK_DATA / SEEK_HOLE as lseek(2): offset or -ENXIO. */
int64_t object_seek(struct object *o, uint64_t offset, int whence);

/* Seals dirty data nodes into slots of the current commit, at most about `max_nodes`; they become clean. 0 or -errno. */
int object_write_back(struct object *o, size_t max_nodes);

/* A commit, in steps, so that many objects can share one barrier and object 0 can be frozen at a mark. At most one commit of
 * an object is in flight; the caller serialises commits of one object, other calls go on meanwhile.
 *   begin: freezes what is dirty now (no I/O, short). -EAGAIN: every root slot is pinned, wait for a mark. 1: nothing to commit.
 *          -EBUSY: one is in flight. -ENOMEM.
 *   write: seals and writes data, tree if the delta overflows, root. solo: the root must be recoverable by itself, so a fold
 *          makes tree and data durable before the root is written. On error the caller must call end with that error.
 *   end:   after the caller's barrier (object_barrier or blockdir_syncfs). result: 0 or the error of write or barrier.
 *          0: *record names the new last durable root. An error of write (-ENOSPC, -ENOMEM) leaves everything dirty, slots returned;
 *          a failed barrier poisons the object: every later call returns -EIO until it is opened anew. So does any error after
 *          write has succeeded: the root may be on the disk, so its slots must not be used again. */
int object_commit_begin(struct object *o);
int object_commit_write(struct object *o, bool solo);
int object_barrier(struct object *o);               /* fdatasync; for a new object its directory entry too */
int object_commit_end(struct object *o, int result, bool barrier_failed, struct object_record *record);
/* begin + write + barrier + end. 0 (also if nothing was dirty: *record is then the last durable root) or -errno. */
int object_commit(struct object *o, bool solo, struct object_record *record);

/* The last durable root (the recorded one after open), and the attributes it carries (`nodes` exact). */
void object_record(struct object *o, struct object_record *record);
void object_durable_attr(struct object *o, struct object_attr *attr);

/* A submitted metadata commit names this root exactly: its slot must not be overwritten until unpinned. */
void object_pin_root(struct object *o, const struct object_record *record);
void object_unpin_root(struct object *o, const struct object_record *record);

/* Roots older than `record` can no longer be chosen by recovery: slots that they alone reach become free; large free runs
 * are punched, a free tail is cut. */
void object_release(struct object *o, const struct object_record *record);

/* Learns the free map by walking the tree from the last durable root (until then only slots freed in this mount are reused).
 * Idempotent; blocks; other calls go on. 0 or -errno. */
int object_scan(struct object *o);

/* Reads and authenticates every node that the last durable root reaches. progress may be NULL; it gets nodes done since the last call.
 * damaged is called for each bad data node index (or the first index below a bad tree node) with the number of data nodes
 * lost. Returns 0, or -EBADMSG if something was damaged, or -errno. */
int object_verify(struct object *o, void (*progress)(void *arg, uint64_t nodes),
                  void (*damaged)(void *arg, uint64_t index, uint64_t count), void *arg);

/* The pool's eviction callback (pool_evict_fn). */
bool object_evict(struct node *node);

/* True after a failed barrier. */
bool object_poisoned(struct object *o);

/* True after a node that the object needs was found not to be authentic, for which a read returned -EIO: its file was changed, cut, or
 * is older than the root. An error of the disk does not count. */
bool object_damaged(struct object *o);

/* For object 0: reads the root slots' salts (not secret) and returns true if one is neither zero nor known to this
 * object: another writer. */
int object_foreign_root(struct object *o, bool *foreign);

#endif
