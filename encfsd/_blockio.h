/* Backing I/O: one file of 4 KiB slots per object, below one source directory. Everything blocks.
 *
 * Paths are resolved with openat2(RESOLVE_BENEATH|NO_SYMLINKS|NO_XDEV), O_NOFOLLOW|O_NONBLOCK|O_CLOEXEC; only regular files
 * with one link are accepted; files are created O_EXCL, mode 0600, never truncated at open. All calls can be recorded and
 * made to fail by tests (struct blockio_hooks). */
#ifndef ENCFSD_BLOCKIO_H
#define ENCFSD_BLOCKIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "_format.h"

struct blockdir;            /* the source directory */
struct blockfile;           /* one backing file */

/* Opens directory `src_fd` (duplicated; the caller keeps its own). read_only: nothing is ever written below it, each call
 * that would returns -EROFS. Returns 0, -ENOTDIR, -ENOMEM or -errno. The directory must outlive its files. */
int blockdir_open(struct blockdir **dir, int src_fd, bool read_only);
void blockdir_close(struct blockdir *dir);
int blockdir_fd(const struct blockdir *dir);

/* syncfs(2) of the file system that holds the directory: makes data and directory entries of all files durable. */
int blockdir_syncfs(struct blockdir *dir);

/* Free and total space: *available and *total in bytes, as unprivileged users may use it. Returns 0 or -errno. */
int blockdir_space(struct blockdir *dir, uint64_t *available, uint64_t *total);

/* Backing file of an object: "meta" for the all-zero id (object 0), else "objects/xx/<30 hex digits>".
 * create: O_EXCL; makes "objects" and "objects/xx" (0700) as needed. Returns 0 or -errno: -EEXIST, -ENOENT, -ELOOP,
 * -EMLINK (more than one link), -EUCLEAN (not a regular file)... */
int blockfile_open(struct blockfile **file, struct blockdir *dir, const uint8_t id[ID_SIZE], bool create);

/* Makes the directory entry of a newly created file durable: fsync of its directory, and of the parents unless this mount
 * already made them durable. Returns 0 or -errno. */
int blockfile_sync_entry(struct blockfile *file);

/* Closes. The caller must have synced what it needs. */
void blockfile_close(struct blockfile *file);

/* Removes the backing file of an object. -ENOENT is success. */
int blockdir_remove(struct blockdir *dir, const uint8_t id[ID_SIZE]);

/* Says whether the directory "objects" can be used: 0, -ENOENT if there is none, which is right until the first object is created, or
 * another -errno. Blocks on the disk. */
int blockdir_check_objects(const struct blockdir *dir);

/* Calls fn for each backing file below "objects" with its id and its path relative to the source directory. Whatever has no
 * place there (names that are no object id, files where a directory should be) is passed with id NULL; such a name is an
 * attacker's choice. Stops and returns fn's result if it is not 0. Returns 0 or -errno. */
int blockdir_list(struct blockdir *dir, int (*fn)(void *arg, const uint8_t *id, const char *name), void *arg);

/* Reads n whole slots from `slot` on. Retries short reads. Slots past the end of the file read as zeros.
 * Returns 0 or -errno. */
int blockfile_read(struct blockfile *file, uint64_t slot, void *buffer, size_t n);
/* The same from the page cache only: -EAGAIN if the disk would have to be waited for, or if the file system cannot tell. */
int blockfile_read_nowait(struct blockfile *file, uint64_t slot, void *buffer, size_t n);

/* Writes whole slots from `slot` on; iov lengths are multiples of NODE_SIZE. Retries short writes. Returns 0 or -errno;
 * after an error any subset may have been written. */
int blockfile_writev(struct blockfile *file, uint64_t slot, const struct iovec *iov, int count);

/* The barrier: fdatasync. After an error the caller must not assume anything of what it wrote since the last success. */
int blockfile_barrier(struct blockfile *file);

/* For recovery: makes durable what the page cache holds of the file, then drops it, so that what is read next comes from the disk.
 * After a failed barrier the cache holds clean pages that the disk never got; a barrier alone would let them pass. Writes nothing
 * that was not written before. 0 or -errno. */
int blockfile_settle(struct blockfile *file);

int blockfile_truncate(struct blockfile *file, uint64_t slots);             /* new length in slots */
int blockfile_punch(struct blockfile *file, uint64_t slot, uint64_t n);     /* gives space back; -EOPNOTSUPP is success */
int blockfile_zero_fill(struct blockfile *file, uint64_t slot, uint64_t n); /* writes zeros: overwriting them later needs no journal */
int blockfile_length(struct blockfile *file, uint64_t *slots);              /* whole slots in the file */

/* Hint: [slot, slot+n) will be read soon. Never fails, does not block. */
void blockfile_will_need(struct blockfile *file, uint64_t slot, uint64_t n);

/* Test hooks; NULL members are passed through. `before` runs before each state-changing or reading call, and its nonzero
 * result (a negative errno) replaces the call; `done` is told of each success. Set only while no I/O runs. */
enum blockio_call { BIO_OPEN, BIO_CREATE, BIO_READ, BIO_WRITE, BIO_BARRIER, BIO_TRUNCATE, BIO_PUNCH, BIO_ZERO, BIO_REMOVE,
                    BIO_SYNC_ENTRY, BIO_SYNCFS };
struct blockio_event {
    enum blockio_call call;
    const uint8_t *id;              /* ID_SIZE bytes, or NULL for the directory */
    uint64_t slot, n;               /* slots; truncate: slot = new length */
    const struct iovec *iov;        /* BIO_WRITE: the bytes */
    int iov_count;
};
struct blockio_hooks {
    int (*before)(void *arg, const struct blockio_event *event);
    void (*done)(void *arg, const struct blockio_event *event);
    void *arg;
};
void blockio_set_hooks(const struct blockio_hooks *hooks);   /* NULL: none */

#endif
