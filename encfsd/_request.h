/* The one door for requests (docs/design.md, "Done, errno or parked"). A request is answered at once by the calling thread if
 * that needs no waiting; else it is parked: an I/O or barrier thread answers it and puts it on the completion queue, whose
 * eventfd wakes whoever drains it. The caller owns struct request and its buffers and keeps both until then. */
#ifndef ENCFSD_REQUEST_H
#define ENCFSD_REQUEST_H

#include "_file.h"
#include "_namespace.h"
#include "_volume.h"
#include "_workers.h"

enum request_op {
    REQ_LOOKUP = 1, REQ_GETATTR, REQ_SETATTR, REQ_MKNOD, REQ_MKDIR, REQ_SYMLINK, REQ_READLINK, REQ_LINK, REQ_UNLINK,
    REQ_RMDIR, REQ_RENAME, REQ_READDIR, REQ_SETXATTR, REQ_GETXATTR, REQ_LISTXATTR, REQ_REMOVEXATTR, REQ_READ, REQ_WRITE,
    REQ_FSYNC, REQ_FSYNCDIR, REQ_SYNC_ALL, REQ_PUNCH, REQ_SEEK, REQ_STATFS, REQ_FALLOCATE, REQ_COPY, REQ_TMPFILE,
    REQ_OP_COUNT
};

struct request {
    /* in: set by the caller, unused members zero */
    uint16_t op;                        /* enum request_op */
    uint64_t ino;                       /* inode, or parent directory of `name` */
    const char *name; size_t name_len;  /* NUL-terminated for xattrs, else it need not be */
    uint64_t new_parent;                /* rename, link: directory of new_name; copy: inode of the destination */
    const char *new_name; size_t new_name_len;      /* rename, link: new name; symlink: target */
    uint32_t mode, rdev, flags;         /* mknod/mkdir mode; rename or xattr flags; fsync: 1 = datasync; seek: whence; read, write: enum
                                           file_flags but FILE_NOWAIT, FILE_DISK_ONLY; fallocate: FALLOC_FL_*; readdir: NS_PLAIN */
    uint32_t valid;                     /* setattr: enum ns_set; may include SET_SIZE. setxattr: nonzero if the caller may keep setgid */
    uint64_t offset, new_offset;        /* read, write, seek, punch, fallocate, copy: of the source, and of the destination; readdir:
                                           cookie in `offset` */
    void *buffer; size_t size;          /* read, write, xattr value, readlink; readdir: struct ns_dirent[size]; fallocate, copy: only
                                           the size */
    ns_emit_fn *emit; void *emit_arg;   /* readdir: receives the entries instead of `buffer` */
    /* NULL: a parked request comes out of request_next_completed. Else this is called instead, on the thread that carried it out;
     * it must not block, and may free the request. */
    void (*completed)(struct request *request);
    struct ns_caller caller;
    struct attr attr;                   /* in for setattr; out for everything that returns attributes */
    /* out */
    int64_t result;                     /* >= 0: success (read, write, copy, getxattr, listxattr, readlink: bytes; readdir: entries;
                                           seek: offset), < 0: negative errno */
    uint64_t statfs_blocks, statfs_free;    /* blocks of NODE_SIZE; as many inodes are free */
    uint64_t statfs_inodes;                 /* used and free */
    uint64_t ticket;                    /* copied through for the caller: which task waits */
    /* private to _request.c */
    struct job job;
    struct volume *volume;
    struct request *completed_next;
};

enum { REQUEST_DONE = 0, REQUEST_PARKED = 1 };

/* Starts a request. REQUEST_DONE: request->result is set. REQUEST_PARKED: it will come out of request_next_completed. */
int request_start(struct volume *v, struct request *request);

/* The parts of request_start, for the transport's threads. First request_try: true if it could be answered without waiting. If not,
 * request_try_disk, from a thread that may wait for the disk, if request_may_wait_for_disk: then the disk, or a lock that is held over
 * reads of it, may be all that it waits for; true if it was, and the request is answered. What is left waits for a barrier, a group or
 * room: either request_carry_out, which answers it on this thread, however long that takes, or request_park. */
bool request_try(struct volume *v, struct request *request);
bool request_may_wait_for_disk(const struct request *request);
bool request_try_disk(struct volume *v, struct request *request);
void request_carry_out(struct volume *v, struct request *request);
void request_park(struct volume *v, struct request *request);

/* eventfd, readable while there are completions. Owned by the volume. */
int request_completion_fd(struct volume *v);
/* Resets the eventfd when the queue gets empty. NULL: none. Never blocks. */
struct request *request_next_completed(struct volume *v);

/* What st_blocks says of an inode with these attributes, in units of 512 bytes. */
uint64_t request_st_blocks(const struct attr *attr);

/* FORGET never waits: if the inode cannot be dropped right now an I/O thread does it. */
void request_forget(struct volume *v, uint64_t ino, uint64_t lookups);

/* A handle of the file was opened (+1) or released (-1) for writing: while there is one the kernel may hold dirty pages that this
 * process has not seen. Never blocks on I/O, because an open inode is in core. */
void request_note_writer(struct volume *v, uint64_t ino, int change);

/* From now on nobody tells who opens files (OPEN is not answered): any file may have dirty pages in the kernel. */
void request_writers_unknown(struct volume *v);

/* File descriptor of /dev/fuse for INVAL_INODE notifications (groups pull dirty pages of renamed files in through it).
 * -1 until a mount exists. */
void volume_set_notify_fd(struct volume *v, int fuse_fd);

/* True while somebody waits for the kernel to hand over dirty pages: the WRITEs must be answered until that is over. */
bool volume_pulls_pages(struct volume *v);

#endif
