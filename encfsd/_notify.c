/* Notifications to the kernel. */
#include <errno.h>
#include <linux/fuse.h>
#include <stdatomic.h>
#include <unistd.h>

#include "_volume_internal.h"

int notify_inode(struct volume *v, uint64_t ino, int64_t offset)
{
    struct {
        struct fuse_out_header header;
        struct fuse_notify_inval_inode_out inval;
    } message = {
        .header = {.len = sizeof message, .error = FUSE_NOTIFY_INVAL_INODE, .unique = 0},
        .inval = {.ino = ino, .off = offset, .len = 0},         /* 0: to the end */
    };
    int fd = atomic_load(&v->notify_fd);

    if (fd >= 0 && write(fd, &message, sizeof message) < 0 && errno != ENOENT)
        return -errno;
    return 0;
}
