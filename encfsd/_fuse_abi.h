/* The kernel's FUSE protocol, and what linux/fuse.h lacks where it is older than Linux 6.6 (Debian 12 has protocol 7.38). Source:
 * include/uapi/linux/fuse.h of Linux 6.18. */
#ifndef ENCFSD_FUSE_ABI_H
#define ENCFSD_FUSE_ABI_H

#include <linux/fuse.h>

enum { FUSE_OPCODE_STATX = 52, FUSE_OPCODE_COPY_FILE_RANGE_64 = 53 };

struct fuse_abi_statx_in {
    uint32_t getattr_flags, reserved;
    uint64_t fh;
    uint32_t sx_flags, sx_mask;
};

struct fuse_abi_sx_time {
    int64_t tv_sec;
    uint32_t tv_nsec;
    int32_t reserved;
};

struct fuse_abi_statx {
    uint32_t mask, blksize;
    uint64_t attributes;
    uint32_t nlink, uid, gid;
    uint16_t mode, spare0;
    uint64_t ino, size, blocks, attributes_mask;
    struct fuse_abi_sx_time atime, btime, ctime, mtime;
    uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
    uint64_t spare2[14];
};

struct fuse_abi_statx_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec, flags;
    uint64_t spare[2];
    struct fuse_abi_statx stat;
};

struct fuse_abi_copy_file_range_out {
    uint64_t bytes_copied;
};

_Static_assert(sizeof(struct fuse_abi_statx_in) == 24 && sizeof(struct fuse_abi_statx) == 256 &&
               sizeof(struct fuse_abi_statx_out) == 288, "layout of the kernel");

#endif
