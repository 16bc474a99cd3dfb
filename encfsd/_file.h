/* Contents of regular files by inode: in the database row up to INLINE_MAX bytes, else in an object of their own.
 * The only place that decides between the two. All functions return 0 or a negative errno (read: a count), are thread-safe and
 * block unless FILE_NOWAIT is given (-EAGAIN: nothing was changed, come again from a thread that may block). */
#ifndef ENCFSD_FILE_H
#define ENCFSD_FILE_H

#include "_namespace.h"
#include "_object.h"

struct volume;

enum file_flags { FILE_NOWAIT = 1 };

ssize_t file_read(struct volume *v, uint64_t ino, void *buffer, size_t size, uint64_t offset, int flags);
/* Reserves space in the backing store before it accepts anything: -ENOSPC here, not later. Sets mtime and ctime. */
int file_write(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags);
/* *out: attributes afterwards. Sets mtime and ctime. */
int file_truncate(struct volume *v, uint64_t ino, uint64_t size, struct attr *out, int flags);
int file_punch(struct volume *v, uint64_t ino, uint64_t offset, uint64_t size, int flags);
int64_t file_seek(struct volume *v, uint64_t ino, uint64_t offset, int whence, int flags);

/* For groups: commits nothing itself; makes inode->object available (opens it by its record). Inode lock not held. */
int file_object(struct volume *v, struct inode *inode, struct object **object);

#endif
