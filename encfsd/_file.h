/* Contents of regular files by inode: in the database row up to INLINE_MAX bytes, else in an object of their own.
 * The only place that decides between the two. All functions return 0 or a negative errno (read: a count), are thread-safe and
 * block unless FILE_NOWAIT or FILE_DISK_ONLY is given (-EAGAIN: nothing was changed, come again from a thread that may block). */
#ifndef ENCFSD_FILE_H
#define ENCFSD_FILE_H

#include "_namespace.h"
#include "_object.h"

struct volume;

enum { FILE_COPY_MAX = 64 << 20 };  /* bytes */

enum file_flags {
    FILE_NOWAIT = 1,
    FILE_DIRECT = 2,                    /* not by way of the kernel's cache. read: what is read stays in the pool instead; write, fallocate,
                                           copy: security.capability goes, and who asked hears of errors */
    FILE_DROP_PRIVILEGES = 4,           /* write, truncate, fallocate, copy: by somebody who may not keep set-id bits (ns_drop_privileges) */
    FILE_DISK_ONLY = 8,                 /* write: blocks while data go to the disk or come from it, for nothing else (room, a group, a node) */
};

ssize_t file_read(struct volume *v, uint64_t ino, void *buffer, size_t size, uint64_t offset, int flags);
/* Reserves space in the backing store before it accepts anything: -ENOSPC here, not later. Sets mtime and ctime. */
int file_write(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags);
/* *out: attributes afterwards. Sets mtime and ctime. */
int file_truncate(struct volume *v, uint64_t ino, uint64_t size, struct attr *out, int flags);
int file_punch(struct volume *v, uint64_t ino, uint64_t offset, uint64_t size, int flags);
/* fallocate(2): mode 0, FALLOC_FL_KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE with or without KEEP_SIZE; others -EOPNOTSUPP.
 * Allocation writes nothing: it checks that there is room now (-ENOSPC) and sets the size; a copy-on-write store cannot promise more. */
int file_fallocate(struct volume *v, uint64_t ino, uint32_t mode, uint64_t offset, uint64_t size, int flags);
/* copy_file_range(2): as many bytes as there are, holes stay holes; at most what one request should take (FILE_COPY_MAX). -EINVAL if
 * the ranges of one file overlap. Blocks. Returns bytes copied. */
int64_t file_copy(struct volume *v, uint64_t from, uint64_t from_offset, uint64_t to, uint64_t to_offset, uint64_t size, int flags);
/* Where data or a hole begins. The kernel's dirty pages are pulled in first, so it blocks on this process's own WRITEs. */
int64_t file_seek(struct volume *v, uint64_t ino, uint64_t offset, int whence, int flags);

/* For groups: commits nothing itself; makes inode->object available (opens it by its record). Inode lock not held. */
int file_object(struct volume *v, struct inode *inode, struct object **object);

/* Writes back the dirty nodes of a file that no group commits, because it is deleted: they become clean. Blocks. What fails stays dirty. */
void file_write_back(struct inode *inode);

#endif
