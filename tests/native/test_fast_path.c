/* What the fast path answers, opcode by opcode; what it passes on; what it counts. */
#include <linux/falloc.h>
#include <sys/xattr.h>

#include "fake_kernel.h"

/* ---- what replies must say ---- */

static const uint64_t BILLION = 1000000000;

/* Seconds rounded down, so that nanoseconds are never negative. */
static uint64_t seconds_of(int64_t ns) { return (uint64_t)((ns - (int64_t)((uint64_t)(ns % 1000000000 + 1000000000) % BILLION)) / 1000000000); }
static uint32_t rest_of(int64_t ns) { return (uint32_t)((uint64_t)(ns % 1000000000 + 1000000000) % BILLION); }

/* As the volume sees an inode that is in core. */
static struct attr attr_of(uint64_t ino)
{
    struct request r = {.op = REQ_GETATTR, .ino = ino};

    CHECK_EQ(client_run(&kernel.client, &r), 0);
    return r.attr;
}

static struct fuse_attr expected_attr(uint64_t ino)
{
    struct attr a = attr_of(ino);

    return (struct fuse_attr){
        .ino = ino, .size = a.size, .blocks = S_ISREG(a.mode) && a.blocks == 0 ? 1 : a.blocks, .atime = seconds_of(a.atime),
        .mtime = seconds_of(a.mtime), .ctime = seconds_of(a.ctime), .atimensec = rest_of(a.atime), .mtimensec = rest_of(a.mtime),
        .ctimensec = rest_of(a.ctime), .mode = a.mode, .nlink = a.nlink, .uid = a.uid, .gid = a.gid, .rdev = a.rdev, .blksize = 4096,
    };
}

static struct fuse_entry_out expected_entry(uint64_t ino)
{
    return (struct fuse_entry_out){.nodeid = ino, .entry_valid = 3600, .attr_valid = 3600, .attr = expected_attr(ino)};
}

/* The last reply is an entry, and nothing else; returns its inode. */
static uint64_t check_entry(int64_t size)
{
    struct fuse_entry_out *got = (void *)kernel.reply.data, expected;

    if (!CHECK_EQ(size, sizeof *got) || !CHECK(got->nodeid > ROOT_INO))
        return 0;
    expected = expected_entry(got->nodeid);
    CHECK_MEM_EQ(got, &expected, sizeof expected);
    return got->nodeid;
}

static void check_attr(int64_t size, uint64_t ino)
{
    struct fuse_attr_out expected = {.attr_valid = 3600, .attr = expected_attr(ino)};

    CHECK_EQ(size, sizeof expected);
    CHECK_MEM_EQ(kernel.reply.data, &expected, sizeof expected);
}

/* All lookups are given back and nothing is dirty: only the root is left. */
static void check_only_root_is_known(void)
{
    check_quiet();
    CHECK_EQ(client_sync(&kernel.client), 0);
    for (int i = 0; i < 1000 && inodes_in_core() > 1; i++)      /* a group lets go of inodes a little later than it wakes who waits */
        usleep(1000);
    CHECK_EQ(inodes_in_core(), 1);
}

/* ---- names and attributes ---- */

TEST(lookup_and_getattr_agree_to_the_byte)
{
    struct fuse_getattr_in in = {.getattr_flags = FUSE_GETATTR_FH, .fh = 77};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "file");
    CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, "file")), ino);
    check_attr(CALL(FUSE_GETATTR, ino, in), ino);
    check_attr(CALL(FUSE_GETATTR, ROOT_INO, in), ROOT_INO);
    CHECK_EQ(CALL(FUSE_GETATTR, 999999, in), -ENOENT);
    kernel_forget(ino, 2);
    check_only_root_is_known();
    end_all();
}

TEST(an_absent_name_is_told_as_an_entry_to_remember)
{
    struct fuse_entry_out expected = {.entry_valid = 3600};
    struct transport_opcode stats[TRANSPORT_OPCODES];
    char longest[300];

    if (!begin())
        return;
    CHECK_EQ(kernel_lookup(ROOT_INO, "nothing"), sizeof expected);
    CHECK_MEM_EQ(kernel.reply.data, &expected, sizeof expected);
    memset(longest, 'n', sizeof longest);
    longest[256] = 0;
    CHECK_EQ(kernel_lookup(ROOT_INO, longest), -ENAMETOOLONG);
    longest[255] = 0;
    CHECK_EQ(kernel_lookup(ROOT_INO, longest), sizeof expected);
    check_quiet();
    transport_end();
    if (CHECK_EQ(transport_begin(device_open(), 2), 0)) {
        CHECK_EQ(kernel_lookup(ROOT_INO, "nothing"), sizeof expected);
        CHECK_EQ(kernel_lookup(987654, "no directory"), sizeof expected);       /* cannot happen: the kernel knows the directory */
        check_quiet();
        transport_stats(kernel.transport, stats);
        CHECK_EQ(stats[FUSE_LOOKUP].native, 2);
        CHECK_EQ(stats[FUSE_LOOKUP].failed, 0);
        transport_end();
    }
    volume_end();
}

TEST(create_gives_an_entry_and_no_handle)
{
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = S_IFREG | 0777, .umask = 027};
    struct { struct fuse_entry_out entry; struct fuse_open_out open; } expected;
    const size_t size = sizeof expected;

    if (!begin())
        return;
    kernel.uid = 1000, kernel.gid = 1001;
    CHECK_EQ(CALL_NAME(FUSE_CREATE, ROOT_INO, in, "new"), size);
    uint64_t ino = ((struct fuse_entry_out *)kernel.reply.data)->nodeid;
    memset(&expected, 0, size);
    expected.entry = expected_entry(ino);
    expected.open.open_flags = FOPEN_KEEP_CACHE;
    CHECK_MEM_EQ(kernel.reply.data, &expected, size);
    CHECK_EQ(expected.entry.attr.mode, S_IFREG | 0750);
    CHECK_EQ(expected.entry.attr.uid, 1000);
    CHECK_EQ(expected.entry.attr.gid, 1001);
    CHECK_EQ(expected.entry.attr.nlink, 1);
    CHECK_EQ(CALL_NAME(FUSE_CREATE, ROOT_INO, in, "new"), -EEXIST);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
}

TEST(nodes_directories_and_links)
{
    struct fuse_mknod_in device = {.mode = S_IFCHR | 0640, .rdev = 0x105, .umask = 022};
    struct fuse_mknod_in fifo = {.mode = S_IFIFO | 0666, .umask = 022}, file = {.mode = S_IFREG | 0666, .umask = 022};
    struct fuse_mkdir_in directory = {.mode = 01777, .umask = 022};
    struct fuse_link_in link;
    const char symlink[] = "link\0target of the link";

    if (!begin())
        return;
    uint64_t dev = check_entry(CALL_NAME(FUSE_MKNOD, ROOT_INO, device, "dev"));
    CHECK_EQ(attr_of(dev).mode, S_IFCHR | 0640);
    CHECK_EQ(attr_of(dev).rdev, 0x105);
    uint64_t pipe = check_entry(CALL_NAME(FUSE_MKNOD, ROOT_INO, fifo, "fifo"));
    CHECK_EQ(attr_of(pipe).mode, S_IFIFO | 0644);
    uint64_t dir = check_entry(CALL_NAME(FUSE_MKDIR, ROOT_INO, directory, "dir"));
    CHECK_EQ(attr_of(dir).mode, S_IFDIR | 01755);
    CHECK_EQ(attr_of(ROOT_INO).nlink, 3);
    uint64_t plain = check_entry(CALL_NAME(FUSE_MKNOD, dir, file, "plain"));
    uint64_t sym = check_entry(call(FUSE_SYMLINK, dir, symlink, sizeof symlink, NULL, 0));
    CHECK_EQ(attr_of(sym).size, strlen("target of the link"));
    CHECK_EQ(call(FUSE_READLINK, sym, NULL, 0, NULL, 0), strlen("target of the link"));
    CHECK_MEM_EQ(kernel.reply.data, "target of the link", strlen("target of the link"));
    CHECK_EQ(call(FUSE_READLINK, plain, NULL, 0, NULL, 0), -EINVAL);
    link.oldnodeid = plain;
    CHECK_EQ(check_entry(CALL_NAME(FUSE_LINK, ROOT_INO, link, "second")), plain);
    CHECK_EQ(attr_of(plain).nlink, 2);
    CHECK_EQ(CALL_NAME(FUSE_LINK, ROOT_INO, link, "second"), -EEXIST);
    CHECK_EQ(call(FUSE_RMDIR, ROOT_INO, "dir", 4, NULL, 0), -ENOTEMPTY);
    CHECK_EQ(call(FUSE_UNLINK, ROOT_INO, "dir", 4, NULL, 0), -EISDIR);
    CHECK_EQ(call(FUSE_UNLINK, dir, "plain", 6, NULL, 0), 0);
    CHECK_EQ(call(FUSE_UNLINK, dir, "plain", 6, NULL, 0), -ENOENT);
    CHECK_EQ(call(FUSE_UNLINK, dir, "link", 5, NULL, 0), 0);
    CHECK_EQ(call(FUSE_RMDIR, ROOT_INO, "dir", 4, NULL, 0), 0);
    CHECK_EQ(call(FUSE_RMDIR, ROOT_INO, "fifo", 5, NULL, 0), -ENOTDIR);
    CHECK_EQ(attr_of(plain).nlink, 1);
    kernel_forget(dev, 1);
    kernel_forget(pipe, 1);
    kernel_forget(dir, 1);
    kernel_forget(sym, 1);
    kernel_forget(plain, 2);
    check_only_root_is_known();
    end_all();
}

static int64_t call_names(uint32_t opcode, uint64_t nodeid, const void *in, size_t in_size, const char *names, size_t names_size)
{
    return call(opcode, nodeid, in, in_size, names, names_size);
}

TEST(rename_in_both_forms)
{
    struct fuse_rename_in in = {.newdir = ROOT_INO};
    struct fuse_rename2_in in2 = {.newdir = ROOT_INO};
    const char ab[] = "a\0b", bc[] = "b\0c";

    if (!begin())
        return;
    uint64_t a = kernel_create(ROOT_INO, "a"), c = kernel_create(ROOT_INO, "c");
    CHECK_EQ(call_names(FUSE_RENAME, ROOT_INO, &in, sizeof in, ab, sizeof ab), 0);
    CHECK_EQ(call_names(FUSE_RENAME, ROOT_INO, &in, sizeof in, ab, sizeof ab), -ENOENT);
    CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, "b")), a);
    in2.flags = 1;                      /* RENAME_NOREPLACE */
    CHECK_EQ(call_names(FUSE_RENAME2, ROOT_INO, &in2, sizeof in2, bc, sizeof bc), -EEXIST);
    in2.flags = 2;                      /* RENAME_EXCHANGE */
    CHECK_EQ(call_names(FUSE_RENAME2, ROOT_INO, &in2, sizeof in2, bc, sizeof bc), 0);
    CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, "c")), a);
    CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, "b")), c);
    in2.flags = 4;                      /* RENAME_WHITEOUT */
    CHECK_EQ(call_names(FUSE_RENAME2, ROOT_INO, &in2, sizeof in2, bc, sizeof bc), -EINVAL);
    in2.flags = 0;
    CHECK_EQ(call_names(FUSE_RENAME2, ROOT_INO, &in2, sizeof in2, bc, sizeof bc), 0);
    CHECK_EQ(attr_of(a).nlink, 0);
    kernel_forget(a, 3 - 1);
    kernel_forget(a, 1);
    kernel_forget(c, 2);
    check_only_root_is_known();
    end_all();
}

TEST(setattr_sets_what_it_names_and_nothing_else)
{
    struct fuse_setattr_in in = {.valid = FATTR_MODE | FATTR_UID | FATTR_GID | FATTR_FH | FATTR_LOCKOWNER, .mode = S_IFREG | 0604,
                                 .uid = 5, .gid = 6, .size = 99, .atime = 1, .mtime = 2};
    int64_t before;

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    check_attr(CALL(FUSE_SETATTR, ino, in), ino);
    CHECK_EQ(attr_of(ino).mode, S_IFREG | 0604);
    CHECK_EQ(attr_of(ino).uid, 5);
    CHECK_EQ(attr_of(ino).gid, 6);
    CHECK_EQ(attr_of(ino).size, 0);
    CHECK(attr_of(ino).mtime > 1600000000 * (int64_t)BILLION);
    in = (struct fuse_setattr_in){.valid = FATTR_SIZE | FATTR_MTIME | FATTR_CTIME, .size = 5000, .mtime = 10, .mtimensec = 20,
                                  .ctime = 30, .ctimensec = 40};
    check_attr(CALL(FUSE_SETATTR, ino, in), ino);
    CHECK_EQ(attr_of(ino).size, 5000);
    CHECK_EQ(attr_of(ino).mtime, 10000000020);
    CHECK_EQ(attr_of(ino).ctime, 30000000040);
    before = clock_realtime_ns();
    in = (struct fuse_setattr_in){.valid = FATTR_ATIME | FATTR_ATIME_NOW | FATTR_MTIME | FATTR_MTIME_NOW, .atime = 1, .mtime = 1};
    check_attr(CALL(FUSE_SETATTR, ino, in), ino);
    CHECK(attr_of(ino).atime >= before && attr_of(ino).atime <= clock_realtime_ns());
    CHECK(attr_of(ino).mtime >= before && attr_of(ino).mtime <= clock_realtime_ns());
    struct attr unchanged = attr_of(ino), after;
    in = (struct fuse_setattr_in){.valid = FATTR_FH, .size = 1, .mode = 1};
    check_attr(CALL(FUSE_SETATTR, ino, in), ino);
    after = attr_of(ino);
    CHECK_MEM_EQ(&after, &unchanged, sizeof after);
    in = (struct fuse_setattr_in){.valid = FATTR_SIZE, .size = 0};
    check_attr(CALL(FUSE_SETATTR, ino, in), ino);
    CHECK_EQ(((struct fuse_attr_out *)kernel.reply.data)->attr.blocks, 1);      /* 0 would mean "all hole" to some */
    in.size = UINT64_MAX;
    CHECK_EQ(CALL(FUSE_SETATTR, ino, in), -EFBIG);
    in.size = 0;
    CHECK_EQ(CALL(FUSE_SETATTR, ROOT_INO, in), -EISDIR);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
}

TEST(truncation_takes_privileges_if_the_kernel_says_so)
{
    struct fuse_setattr_in mode = {.valid = FATTR_MODE, .mode = S_IFREG | 06755}, size = {.valid = FATTR_SIZE, .size = 10};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK(CALL(FUSE_SETATTR, ino, mode) > 0);
    check_attr(CALL(FUSE_SETATTR, ino, size), ino);
    CHECK_EQ(attr_of(ino).mode, S_IFREG | 06755);
    size.valid |= FATTR_KILL_SUIDGID;
    check_attr(CALL(FUSE_SETATTR, ino, size), ino);
    CHECK_EQ(attr_of(ino).mode, S_IFREG | 0755);
    kernel_forget(ino, 1);
    end_all();
}

TEST(times_of_any_sign_and_size)
{
    static const struct { int64_t seconds; uint32_t ns; int64_t stored; } times[] = {
        {0, 0, 0}, {-1, 999999999, -1}, {-1, 0, -1000000000}, {-2, 1, -1999999999}, {1, 1, 1000000001},
        {9223372036, 854775807, INT64_MAX}, {9223372036, 854775808, INT64_MAX}, {9223372037, 0, INT64_MAX},
        {INT64_MAX, 999999999, INT64_MAX}, {INT64_MAX / 2, 0, INT64_MAX},
        {-9223372037, 145224192, INT64_MIN}, {-9223372037, 145224193, INT64_MIN + 1}, {-9223372037, 999999999, -9223372036000000001},
        {-9223372037, 145224191, INT64_MIN}, {-9223372038, 999999999, INT64_MIN}, {INT64_MIN, 0, INT64_MIN},
    };
    struct fuse_abi_statx_in statx = {.sx_mask = 0xfff};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        struct fuse_setattr_in in = {.valid = FATTR_ATIME | FATTR_MTIME | FATTR_CTIME, .atime = (uint64_t)times[i].seconds,
            .mtime = (uint64_t)times[i].seconds, .ctime = (uint64_t)times[i].seconds, .atimensec = times[i].ns, .mtimensec = times[i].ns,
            .ctimensec = times[i].ns};
        const struct fuse_attr *attr = &((struct fuse_attr_out *)kernel.reply.data)->attr;
        const struct fuse_abi_statx *stat = &((struct fuse_abi_statx_out *)kernel.reply.data)->stat;

        CHECK_EQ(CALL(FUSE_SETATTR, ino, in), sizeof(struct fuse_attr_out));
        CHECK_EQ(attr_of(ino).atime, times[i].stored);
        CHECK_EQ(attr_of(ino).mtime, times[i].stored);
        CHECK_EQ(attr_of(ino).ctime, times[i].stored);
        CHECK(attr->atimensec < 1000000000);
        CHECK((__int128)(int64_t)attr->atime * 1000000000 + attr->atimensec == times[i].stored);
        CHECK((__int128)(int64_t)attr->mtime * 1000000000 + attr->mtimensec == times[i].stored);
        CHECK((__int128)(int64_t)attr->ctime * 1000000000 + attr->ctimensec == times[i].stored);
        CHECK_EQ(CALL(FUSE_OPCODE_STATX, ino, statx), sizeof(struct fuse_abi_statx_out));
        CHECK((__int128)stat->mtime.tv_sec * 1000000000 + stat->mtime.tv_nsec == times[i].stored);
    }
    kernel_forget(ino, 1);
    end_all();
}

TEST(statx_tells_the_time_of_birth)
{
    struct fuse_abi_statx_in in = {.sx_mask = 0xfff};
    struct fuse_mknod_in device = {.mode = S_IFBLK | 0600, .rdev = (0x12 << 8) | 0x34};
    struct fuse_abi_statx_out expected = {.attr_valid = 3600};

    if (!begin())
        return;
    uint64_t ino = check_entry(CALL_NAME(FUSE_MKNOD, ROOT_INO, device, "dev"));
    struct attr a = attr_of(ino);
    expected.stat = (struct fuse_abi_statx){
        .mask = 0xfff, .blksize = 4096, .nlink = 1, .uid = a.uid, .gid = a.gid, .mode = (uint16_t)a.mode, .ino = ino, .size = a.size,
        .blocks = a.blocks, .rdev_major = 0x12, .rdev_minor = 0x34,
        .atime = {(int64_t)seconds_of(a.atime), rest_of(a.atime), 0}, .btime = {(int64_t)seconds_of(a.btime), rest_of(a.btime), 0},
        .ctime = {(int64_t)seconds_of(a.ctime), rest_of(a.ctime), 0}, .mtime = {(int64_t)seconds_of(a.mtime), rest_of(a.mtime), 0},
    };
    CHECK(a.btime > 1600000000 * (int64_t)BILLION);
    CHECK_EQ(CALL(FUSE_OPCODE_STATX, ino, in), 288);
    CHECK_MEM_EQ(kernel.reply.data, &expected, sizeof expected);
    CHECK_EQ(CALL(FUSE_OPCODE_STATX, 99999, in), -ENOENT);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
}

TEST(statfs)
{
    if (!begin())
        return;
    CHECK_EQ(call(FUSE_STATFS, ROOT_INO, NULL, 0, NULL, 0), sizeof(struct fuse_statfs_out));
    struct fuse_kstatfs got = ((struct fuse_statfs_out *)kernel.reply.data)->st;
    CHECK_EQ(got.bsize, 4096);
    CHECK_EQ(got.frsize, 4096);
    CHECK_EQ(got.namelen, 255);
    CHECK(got.blocks > 0 && got.bfree <= got.blocks);
    CHECK_EQ(got.bavail, got.bfree);
    CHECK_EQ(got.ffree, got.bfree);
    CHECK_EQ(got.files - got.ffree, 1);
    for (size_t i = 0; i < sizeof got.spare / sizeof *got.spare; i++)
        CHECK_EQ(got.spare[i], 0);
    CHECK_EQ(got.padding, 0);
    end_all();
}

TEST(what_needs_no_volume)
{
    struct fuse_open_in open = {.flags = O_RDWR};
    struct fuse_flush_in flush = {0};
    struct fuse_release_in release = {0};
    struct fuse_interrupt_in interrupt = {.unique = 4};
    struct fuse_open_out opened = {0};

    if (!begin())
        return;
    CHECK_EQ(CALL(FUSE_OPEN, ROOT_INO, open), -ENOSYS);
    CHECK_EQ(CALL(FUSE_FLUSH, ROOT_INO, flush), -ENOSYS);
    CHECK_EQ(CALL(FUSE_OPENDIR, ROOT_INO, open), sizeof opened);
    CHECK_MEM_EQ(kernel.reply.data, &opened, sizeof opened);
    CHECK_EQ(CALL(FUSE_RELEASE, ROOT_INO, release), 0);
    CHECK_EQ(CALL(FUSE_RELEASEDIR, ROOT_INO, release), 0);
    CHECK_EQ(CALL(FUSE_INTERRUPT, 0, interrupt), -ENOSYS);
    check_quiet();
    end_all();
}

/* ---- contents ---- */

TEST(read_and_write_any_size_and_place)
{
    uint8_t *model = calloc(1, 4 * MIB), *data = pattern(MIB, 3);
    size_t size = 0;

    if (!begin())
        return;
    const size_t most = kernel.most;
    const struct { size_t size; uint64_t offset; } pieces[] = {
        {1, 0}, {2047, 1}, {1, 2048}, {4096, 4096}, {most, 0}, {most, most - 7}, {5, 3 * most}, {0, 5},
    };
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_read(ino, 4096, 0), 0);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        CHECK_EQ(kernel_write(ino, data, pieces[i].size, pieces[i].offset), pieces[i].size);
        memcpy(model + pieces[i].offset, data, pieces[i].size);
        if (pieces[i].size > 0 && pieces[i].offset + pieces[i].size > size)
            size = pieces[i].offset + pieces[i].size;
        for (size_t at = 0; at < size; at += most) {
            size_t expected = size - at < most ? size - at : most;
            CHECK_EQ(kernel_read(ino, (uint32_t)most, at), expected);
            CHECK_MEM_EQ(kernel.reply.data, model + at, expected);
        }
        CHECK_EQ(kernel_read(ino, 100, size), 0);
        CHECK_EQ(kernel_read(ino, 0, 0), 0);
    }
    CHECK_EQ(attr_of(ino).size, size);
    CHECK_EQ(kernel_read(ino, MIB + 1, 0), -EINVAL);
    CHECK_EQ(kernel_read(ROOT_INO, 10, 0), -EISDIR);
    CHECK_EQ(kernel_write(ino, data, 10, UINT64_MAX - 3), -EFBIG);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
    free(model);
    free(data);
}

static uint64_t data_nodes_in_pool(void)
{
    struct volume_stats stats;

    volume_stats(kernel.client.volume, &stats);
    return stats.pool.kind[POOL_DATA].in_use;
}

TEST(what_is_read_around_the_kernels_cache_stays_in_the_pool)
{
    enum { NODES = 40 };
    struct fuse_read_in direct = {.size = NODES * NODE_SIZE, .flags = O_DIRECT};
    uint8_t *data = pattern(NODES * NODE_SIZE, 5);

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_write(ino, data, NODES * NODE_SIZE, 0), NODES * NODE_SIZE);
    CHECK_EQ(client_sync(&kernel.client), 0);
    uint64_t before = data_nodes_in_pool();
    CHECK_EQ(kernel_read(ino, NODES * NODE_SIZE, 0), NODES * NODE_SIZE);
    CHECK_EQ(data_nodes_in_pool(), before);
    for (int again = 0; again < 2; again++) {
        CHECK_EQ(CALL(FUSE_READ, ino, direct), NODES * NODE_SIZE);
        CHECK_MEM_EQ(kernel.reply.data, data, NODES * NODE_SIZE);
        CHECK_EQ(data_nodes_in_pool(), before + NODES);
    }
    kernel_forget(ino, 1);
    end_all();
    free(data);
}

TEST(write_takes_privileges_if_the_kernel_says_so)
{
    struct fuse_setattr_in mode = {.valid = FATTR_MODE, .mode = S_IFREG | 06755};
    struct fuse_write_in in = {.size = 3, .write_flags = FUSE_WRITE_CACHE};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK(CALL(FUSE_SETATTR, ino, mode) > 0);
    CHECK_EQ(call(FUSE_WRITE, ino, &in, sizeof in, "abc", 3), sizeof(struct fuse_write_out));
    CHECK_EQ(attr_of(ino).mode, S_IFREG | 06755);
    in.write_flags = FUSE_WRITE_KILL_SUIDGID;
    CHECK_EQ(call(FUSE_WRITE, ino, &in, sizeof in, "abc", 3), sizeof(struct fuse_write_out));
    CHECK_EQ(attr_of(ino).mode, S_IFREG | 0755);
    kernel_forget(ino, 1);
    end_all();
}

TEST(fsync_makes_durable_what_it_names)
{
    struct fuse_fsync_in in = {0};
    struct volume_stats before, after;

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_write(ino, "abc", 3, 0), 3);
    volume_stats(kernel.client.volume, &before);
    CHECK_EQ(CALL(FUSE_FSYNC, ino, in), 0);
    volume_stats(kernel.client.volume, &after);
    CHECK(after.groups + after.solo_commits > before.groups + before.solo_commits);
    in.fsync_flags = FUSE_FSYNC_FDATASYNC;
    CHECK_EQ(CALL(FUSE_FSYNC, ino, in), 0);
    CHECK_EQ(CALL(FUSE_FSYNCDIR, ROOT_INO, in), 0);
    CHECK_EQ(CALL(FUSE_FSYNC, 99999, in), -ENOENT);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
}

TEST(fallocate_in_all_its_modes)
{
    struct fuse_fallocate_in in = {.offset = 0, .length = 10000};
    uint8_t *data = pattern(10000, 9), zeros[4096] = {0};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_write(ino, data, 10000, 0), 10000);
    in.length = 20000;
    in.mode = FALLOC_FL_KEEP_SIZE;
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), 0);
    CHECK_EQ(attr_of(ino).size, 10000);
    in.mode = 0;
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), 0);
    CHECK_EQ(attr_of(ino).size, 20000);
    in = (struct fuse_fallocate_in){.offset = 4096, .length = 4096, .mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE};
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), 0);
    memset(data + 4096, 0, 4096);
    CHECK_EQ(kernel_read(ino, 10000, 0), 10000);
    CHECK_MEM_EQ(kernel.reply.data, data, 10000);
    in = (struct fuse_fallocate_in){.offset = 9000, .length = 21000, .mode = FALLOC_FL_ZERO_RANGE};
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), 0);
    CHECK_EQ(attr_of(ino).size, 30000);
    CHECK_EQ(kernel_read(ino, 4096, 9000), 4096);
    CHECK_MEM_EQ(kernel.reply.data, zeros, 4096);
    in.mode = FALLOC_FL_COLLAPSE_RANGE;
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), -EOPNOTSUPP);
    in = (struct fuse_fallocate_in){.length = 0};
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), -EINVAL);
    in = (struct fuse_fallocate_in){.offset = INT64_MAX, .length = INT64_MAX};
    CHECK_EQ(CALL(FUSE_FALLOCATE, ino, in), -EFBIG);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
    free(data);
}

static int64_t seek(uint64_t ino, uint64_t offset, uint32_t whence)
{
    struct fuse_lseek_in in = {.offset = offset, .whence = whence};
    int64_t result = CALL(FUSE_LSEEK, ino, in);

    if (result < 0)
        return result;
    CHECK_EQ(result, sizeof(struct fuse_lseek_out));
    return (int64_t)((struct fuse_lseek_out *)kernel.reply.data)->offset;
}

TEST(lseek_finds_data_and_holes)
{
    uint8_t *data = pattern(8192, 1);

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_write(ino, data, 8192, 1 << 20), 8192);
    CHECK_EQ(seek(ino, 0, SEEK_HOLE), 0);
    CHECK_EQ(seek(ino, 0, SEEK_DATA), 1 << 20);
    CHECK_EQ(seek(ino, (1 << 20) + 5, SEEK_DATA), (1 << 20) + 5);
    CHECK_EQ(seek(ino, (1 << 20) + 5, SEEK_HOLE), (1 << 20) + 8192);
    CHECK_EQ(seek(ino, (1 << 20) + 8192, SEEK_DATA), -ENXIO);
    CHECK_EQ(seek(ino, 0, SEEK_SET), -EINVAL);
    CHECK_EQ(seek(ROOT_INO, 0, SEEK_DATA), -EISDIR);
    kernel_forget(ino, 1);
    check_only_root_is_known();
    end_all();
    free(data);
}

static int64_t copy(uint32_t opcode, const struct fuse_copy_file_range_in *in, uint64_t from)
{
    int64_t result = call(opcode, from, in, sizeof *in, NULL, 0);

    if (result < 0)
        return result;
    CHECK_EQ(result, 8);                /* both forms: 32 bits and padding, or 64 bits */
    uint64_t bytes;
    memcpy(&bytes, kernel.reply.data, sizeof bytes);
    return (int64_t)bytes;
}

TEST(copy_file_range_in_both_forms)
{
    uint8_t *data = pattern(100000, 4);

    if (!begin())
        return;
    uint64_t from = kernel_create(ROOT_INO, "from"), to = kernel_create(ROOT_INO, "to");
    CHECK_EQ(kernel_write(from, data, 100000, 0), 100000);
    struct fuse_copy_file_range_in in = {.off_in = 10, .nodeid_out = to, .off_out = 5000, .len = 50000};
    CHECK_EQ(copy(FUSE_COPY_FILE_RANGE, &in, from), 50000);
    CHECK_EQ(kernel_read(to, MIB, 5000), 50000);
    CHECK_MEM_EQ(kernel.reply.data, data + 10, 50000);
    in = (struct fuse_copy_file_range_in){.off_in = 90000, .nodeid_out = to, .len = UINT64_MAX};
    CHECK_EQ(copy(FUSE_OPCODE_COPY_FILE_RANGE_64, &in, from), 10000);
    CHECK_EQ(kernel_read(to, 10000, 0), 10000);
    CHECK_MEM_EQ(kernel.reply.data, data + 90000, 10000);
    in.off_in = 100000;
    CHECK_EQ(copy(FUSE_OPCODE_COPY_FILE_RANGE_64, &in, from), 0);
    in = (struct fuse_copy_file_range_in){.nodeid_out = from, .off_out = 50, .len = 100};
    CHECK_EQ(copy(FUSE_COPY_FILE_RANGE, &in, from), -EINVAL);
    in = (struct fuse_copy_file_range_in){.nodeid_out = to, .len = 10, .flags = 1};
    CHECK_EQ(copy(FUSE_COPY_FILE_RANGE, &in, from), -EINVAL);
    in = (struct fuse_copy_file_range_in){.nodeid_out = 99999, .len = 10};
    CHECK_EQ(copy(FUSE_COPY_FILE_RANGE, &in, from), -ENOENT);
    kernel_forget(from, 1);
    kernel_forget(to, 1);
    check_only_root_is_known();
    end_all();
    free(data);
}

/* More than 32 bits count, a hole: a copy is as long as one request should take. */
TEST(copy_of_a_huge_hole_is_partial)
{
    struct fuse_setattr_in size = {.valid = FATTR_SIZE, .size = (uint64_t)1 << 33};

    if (!begin())
        return;
    uint64_t from = kernel_create(ROOT_INO, "from"), to = kernel_create(ROOT_INO, "to");
    CHECK(CALL(FUSE_SETATTR, from, size) > 0);
    struct fuse_copy_file_range_in in = {.nodeid_out = to, .len = (uint64_t)1 << 33};
    CHECK_EQ(copy(FUSE_COPY_FILE_RANGE, &in, from), FILE_COPY_MAX);
    CHECK_EQ(copy(FUSE_OPCODE_COPY_FILE_RANGE_64, &in, from), FILE_COPY_MAX);
    CHECK_EQ(attr_of(to).size, FILE_COPY_MAX);
    end_all();
}

TEST(tmpfile_gets_a_name_by_link)
{
    struct fuse_create_in in = {.flags = O_RDWR, .mode = S_IFREG | 0666, .umask = 022};
    struct fuse_link_in link;

    if (!begin())
        return;
    const int64_t size = sizeof(struct fuse_entry_out) + sizeof(struct fuse_open_out);
    CHECK_EQ(CALL_NAME(FUSE_TMPFILE, ROOT_INO, in, "/"), size);
    uint64_t ino = ((struct fuse_entry_out *)kernel.reply.data)->nodeid;
    struct fuse_entry_out expected = expected_entry(ino);
    CHECK_MEM_EQ(kernel.reply.data, &expected, sizeof expected);
    CHECK_EQ(expected.attr.nlink, 0);
    CHECK_EQ(expected.attr.mode, S_IFREG | 0644);
    CHECK_EQ(kernel_write(ino, "abc", 3, 0), 3);
    link.oldnodeid = ino;
    CHECK_EQ(check_entry(CALL_NAME(FUSE_LINK, ROOT_INO, link, "named")), ino);
    CHECK_EQ(attr_of(ino).nlink, 1);
    kernel_forget(ino, 2);
    in.flags |= O_EXCL;
    CHECK_EQ(CALL_NAME(FUSE_TMPFILE, ROOT_INO, in, "/"), size);
    uint64_t hidden = ((struct fuse_entry_out *)kernel.reply.data)->nodeid;
    link.oldnodeid = hidden;
    CHECK_EQ(CALL_NAME(FUSE_LINK, ROOT_INO, link, "no"), -ENOENT);
    kernel_forget(hidden, 1);
    check_only_root_is_known();
    CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, "named")), ino);
    CHECK_EQ(kernel_read(ino, 10, 0), 3);
    end_all();
}

/* ---- extended attributes ---- */

static int64_t get(uint64_t ino, const char *name, uint32_t size)
{
    struct fuse_getxattr_in in = {.size = size};

    return CALL_NAME(FUSE_GETXATTR, ino, in, name);
}

static int64_t list(uint64_t ino, uint32_t size)
{
    struct fuse_getxattr_in in = {.size = size};

    return CALL(FUSE_LISTXATTR, ino, in);
}

static uint32_t told_size(void)
{
    CHECK_EQ(((struct fuse_getxattr_out *)kernel.reply.data)->padding, 0);
    return ((struct fuse_getxattr_out *)kernel.reply.data)->size;
}

static void set(uint64_t ino, const char *name, const void *value, size_t size)
{
    struct request r = client_named(REQ_SETXATTR, ino, name);

    r.buffer = (void *)(uintptr_t)value;
    r.size = size;
    CHECK_EQ(client_run(&kernel.client, &r), 0);
}

TEST(getxattr_by_size)
{
    uint8_t *large = pattern(65536, 2);

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(get(ino, "user.x", 0), -ENODATA);
    CHECK_EQ(get(ino, "user.x", 100), -ENODATA);
    CHECK_EQ(get(ino, "security.capability", 20), -ENODATA);
    set(ino, "user.x", "12345", 5);
    CHECK_EQ(get(ino, "user.x", 0), sizeof(struct fuse_getxattr_out));
    CHECK_EQ(told_size(), 5);
    CHECK_EQ(get(ino, "user.x", 5), 5);
    CHECK_MEM_EQ(kernel.reply.data, "12345", 5);
    CHECK_EQ(get(ino, "user.x", 4), -ERANGE);
    CHECK_EQ(get(ino, "user.x", 70000), 5);
    CHECK_EQ(get(ino, "user.x", UINT32_MAX), 5);
    set(ino, "user.large", large, 65536);
    CHECK_EQ(get(ino, "user.large", 0), sizeof(struct fuse_getxattr_out));
    CHECK_EQ(told_size(), 65536);
    CHECK_EQ(get(ino, "user.large", 65535), -ERANGE);
    CHECK_EQ(get(ino, "user.large", 65536), 65536);
    CHECK_MEM_EQ(kernel.reply.data, large, 65536);
    set(ino, "user.empty", "", 0);
    CHECK_EQ(get(ino, "user.empty", 10), 0);
    kernel_forget(ino, 1);
    end_all();
    free(large);
}

TEST(listxattr_hides_trusted_names_from_users)
{
    const char all[] = "trusted.t\0user.a\0user.b", users[] = "user.a\0user.b";
    char names[64];

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(list(ino, 0), sizeof(struct fuse_getxattr_out));
    CHECK_EQ(told_size(), 0);
    CHECK_EQ(list(ino, 10), 0);
    set(ino, "trusted.t", "1", 1);
    set(ino, "user.a", "1", 1);
    set(ino, "user.b", "1", 1);
    CHECK_EQ(list(ino, 0), sizeof(struct fuse_getxattr_out));
    CHECK_EQ(told_size(), sizeof all);
    CHECK_EQ(list(ino, sizeof all), sizeof all);
    memcpy(names, kernel.reply.data, sizeof all);       /* in any order */
    CHECK(memmem(names, sizeof all, "trusted.t", 10) && memmem(names, sizeof all, "user.a", 7) && memmem(names, sizeof all, "user.b", 7));
    CHECK_EQ(list(ino, sizeof all - 1), -ERANGE);
    kernel.uid = 1000;
    CHECK_EQ(list(ino, 0), sizeof(struct fuse_getxattr_out));
    CHECK_EQ(told_size(), sizeof users);
    CHECK_EQ(list(ino, sizeof users), sizeof users);
    memcpy(names, kernel.reply.data, sizeof users);
    CHECK(memmem(names, sizeof users, "user.a", 7) && memmem(names, sizeof users, "user.b", 7));
    CHECK_EQ(list(ino, sizeof users - 1), -ERANGE);
    kernel_forget(ino, 1);
    end_all();
}

/* ---- listings ---- */

enum { LISTED = 300 };

static void listed_name(char name[256], int i)
{
    size_t len = 1 + (size_t)i * 7 % 255;

    snprintf(name, 256, "%d-", i);
    if (strlen(name) < len)
        memset(name + strlen(name), 'n', len - strlen(name));
    name[len < 4 ? strlen(name) : len] = 0;
}

/* Reads the whole directory with replies of up to `room` bytes; *known: lookups that it gave. */
static void check_listing(uint32_t opcode, uint32_t room, const uint64_t inos[LISTED], unsigned *known)
{
    const size_t head = opcode == FUSE_READDIRPLUS ? FUSE_NAME_OFFSET_DIRENTPLUS : FUSE_NAME_OFFSET;
    unsigned seen[LISTED] = {0}, dots = 0, replies = 0;
    uint64_t cookie = 0;

    for (;; replies++) {
        struct fuse_read_in in = {.offset = cookie, .size = room};
        int64_t size = CALL(opcode, ROOT_INO, in);
        if (size == 0)
            break;
        if (!CHECK(size > 0 && size <= room && size % 8 == 0))
            return;
        struct { uint8_t data[MIB]; } *page = malloc(sizeof *page);
        memcpy(page, kernel.reply.data, (size_t)size);
        for (int64_t at = 0; at < size;) {
            struct fuse_dirent *dirent = (void *)(page->data + at + head - FUSE_NAME_OFFSET);
            struct fuse_entry_out *entry = (void *)(page->data + at), expected;
            int64_t whole = (int64_t)FUSE_DIRENT_ALIGN(head + dirent->namelen);
            char name[256];

            if (!CHECK(at + whole <= size) || !CHECK(dirent->namelen > 0 && dirent->namelen <= 255))
                break;
            for (int64_t i = (int64_t)head + dirent->namelen; i < whole; i++)
                CHECK_EQ(page->data[at + i], 0);        /* no bytes of others behind names */
            cookie = dirent->off;
            if (dirent->name[0] == '.') {
                dots++;
                CHECK_EQ(dirent->ino, ROOT_INO);
                CHECK_EQ(dirent->type, DT_DIR);
                CHECK_EQ(dirent->off, dots);
                if (opcode == FUSE_READDIRPLUS)
                    CHECK_EQ(entry->nodeid, 0);
            } else {
                int i = atoi(dirent->name);
                if (!CHECK(i >= 0 && i < LISTED))
                    break;
                listed_name(name, i);
                seen[i]++;
                CHECK_EQ(dirent->namelen, strlen(name));
                CHECK_MEM_EQ(dirent->name, name, dirent->namelen);
                CHECK_EQ(dirent->ino, inos[i]);
                CHECK_EQ(dirent->type, DT_REG);
                CHECK(dirent->off > 2);
                if (opcode == FUSE_READDIRPLUS) {
                    expected = expected_entry(inos[i]);
                    CHECK_MEM_EQ(entry, &expected, sizeof expected);
                    ++*known;
                    kernel_forget(inos[i], 1);
                }
            }
            at += whole;
        }
        free(page);
    }
    CHECK_EQ(dots, 2);
    for (int i = 0; i < LISTED; i++)
        CHECK_EQ(seen[i], 1);
    CHECK(replies >= 1 && (room > 4096 || replies > 1));
}

TEST(listings_are_whole_aligned_and_count_lookups)
{
    uint64_t inos[LISTED];
    struct fuse_mknod_in in = {.mode = S_IFREG | 0644};
    char name[256];
    unsigned known = 0;

    if (!begin())
        return;
    for (int i = 0; i < LISTED; i++) {
        listed_name(name, i);
        inos[i] = check_entry(CALL_NAME(FUSE_MKNOD, ROOT_INO, in, name));
    }
    for (uint32_t room = 512; room <= MIB; room *= 2) {
        check_listing(FUSE_READDIR, room, inos, &known);
        check_listing(FUSE_READDIRPLUS, room, inos, &known);
    }
    CHECK_EQ(known, 12 * LISTED);
    struct fuse_read_in past = {.offset = INT64_MAX, .size = 4096}, small = {.size = 8};
    CHECK_EQ(CALL(FUSE_READDIRPLUS, ROOT_INO, past), 0);
    CHECK_EQ(CALL(FUSE_READDIRPLUS, ROOT_INO, small), 0);
    CHECK_EQ(CALL(FUSE_READDIRPLUS, inos[0], small), -ENOTDIR);
    for (int i = 0; i < LISTED; i++)
        kernel_forget(inos[i], 1);
    check_only_root_is_known();
    end_all();
}

TEST(batch_forget_counts_each)
{
    struct { struct fuse_batch_forget_in in; struct fuse_forget_one one[3]; } forget = {.in = {.count = 3}};

    if (!begin())
        return;
    for (int i = 0; i < 3; i++) {
        char name[2] = {(char)('a' + i), 0};
        forget.one[i].nodeid = kernel_create(ROOT_INO, name);
        forget.one[i].nlookup = (uint64_t)i + 1;
        for (int n = 0; n < i; n++)
            CHECK_EQ(check_entry(kernel_lookup(ROOT_INO, name)), forget.one[i].nodeid);
    }
    CHECK_EQ(client_sync(&kernel.client), 0);
    CHECK_EQ(inodes_in_core(), 4);
    ask(FUSE_BATCH_FORGET, 0, &forget, sizeof forget, NULL, 0);
    check_only_root_is_known();
    end_all();
}

/* ---- what pyfuse3 answers ---- */

static bool is_native(uint32_t opcode)
{
    static const uint8_t native[] = {
        FUSE_LOOKUP, FUSE_FORGET, FUSE_GETATTR, FUSE_SETATTR, FUSE_READLINK, FUSE_SYMLINK, FUSE_MKNOD, FUSE_MKDIR, FUSE_UNLINK, FUSE_RMDIR,
        FUSE_RENAME, FUSE_LINK, FUSE_OPEN, FUSE_READ, FUSE_WRITE, FUSE_STATFS, FUSE_RELEASE, FUSE_FSYNC, FUSE_GETXATTR, FUSE_LISTXATTR,
        FUSE_FLUSH, FUSE_OPENDIR, FUSE_READDIR, FUSE_RELEASEDIR, FUSE_FSYNCDIR, FUSE_CREATE, FUSE_INTERRUPT, FUSE_BATCH_FORGET,
        FUSE_FALLOCATE, FUSE_READDIRPLUS, FUSE_RENAME2, FUSE_LSEEK, FUSE_COPY_FILE_RANGE, FUSE_TMPFILE, FUSE_OPCODE_STATX,
        FUSE_OPCODE_COPY_FILE_RANGE_64,
    };

    return opcode < TRANSPORT_OPCODES && memchr(native, (int)opcode, sizeof native) != NULL;
}

TEST(all_other_opcodes_pass_unchanged_and_so_do_their_answers)
{
    static const uint32_t beyond[] = {64, 65, 100, 4096, 0x7fffffff, UINT32_MAX};
    uint8_t *body = pattern(70000, 5), *got = malloc(MIB);
    struct transport_opcode stats[TRANSPORT_OPCODES];
    unsigned passed = 0;

    if (!begin())
        return;
    for (uint32_t i = 0; i < TRANSPORT_OPCODES + sizeof beyond / sizeof *beyond; i++) {
        uint32_t opcode = i < TRANSPORT_OPCODES ? i : beyond[i - TRANSPORT_OPCODES];
        const size_t size = i == FUSE_SETXATTR ? 66000 : 10 * i;
        const bool fails = i % 3 == 0;
        struct { struct fuse_out_header header; uint8_t data[5000]; } reply = {.header.unique = kernel.unique + 2};

        if (is_native(opcode) || opcode == FUSE_INIT)
            continue;
        uint64_t unique = ask(opcode, 1000 + i, body, size, NULL, 0);
        if (!CHECK(readable(kernel.session, TEN_SECONDS)))
            continue;
        CHECK_EQ(recv(kernel.session, got, MIB, MSG_TRUNC), sizeof(struct fuse_in_header) + size);
        const struct fuse_in_header *header = (void *)got;
        CHECK_EQ(header->len, sizeof *header + size);
        CHECK_EQ(header->opcode, opcode);
        CHECK_EQ(header->unique, unique);
        CHECK_EQ(header->nodeid, 1000 + i);
        CHECK_MEM_EQ(got + sizeof *header, body, size);
        memcpy(reply.data, body + i, sizeof reply.data);
        reply.header.error = fails ? -EPERM : 0;
        reply.header.len = (uint32_t)(sizeof reply.header + (fails ? 0 : sizeof reply.data));
        CHECK_EQ(send(kernel.session, &reply, reply.header.len, 0), reply.header.len);
        CHECK_EQ(await_reply(unique), fails ? -EPERM : (int64_t)sizeof reply.data);
        if (!fails)
            CHECK_MEM_EQ(kernel.reply.data, body + i, sizeof reply.data);
        passed++;
        transport_stats(kernel.transport, stats);
        if (opcode != 0 && opcode < TRANSPORT_OPCODES) {
            CHECK_EQ(stats[opcode].forwarded, 1);
            CHECK_EQ(stats[opcode].failed, fails);
            CHECK_EQ(stats[opcode].native, 0);
        }
    }
    CHECK_EQ(stats[0].forwarded, 1 + sizeof beyond / sizeof *beyond);
    CHECK(passed > 30);
    check_quiet();
    end_all();
    free(body);
    free(got);
}

/* ---- counters ---- */

TEST(buckets_are_in_order_and_four_a_power_of_two)
{
    CHECK_EQ(latency_bucket_ns(0), 0);
    CHECK_EQ(latency_bucket_ns(3), 3);
    for (unsigned b = 1; b < LATENCY_BUCKETS; b++)
        CHECK(latency_bucket_ns(b) > latency_bucket_ns(b - 1));
    for (unsigned b = 4; b + 4 < LATENCY_BUCKETS; b++)
        CHECK_EQ(latency_bucket_ns(b + 4), 2 * latency_bucket_ns(b));
}

TEST(counters_add_up)
{
    enum { TIMES = 50 };
    struct transport_opcode stats[TRANSPORT_OPCODES];
    struct fuse_getattr_in in = {0};

    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    for (int i = 0; i < TIMES; i++) {
        CALL(FUSE_GETATTR, i % 5 ? ino : 99999, in);
        kernel_write(ino, "abc", 3, 0);
        kernel_read(ino, 3, 0);
        get(ino, "user.none", 10);
    }
    kernel_forget(ino, 1);
    check_quiet();
    for (int i = 0; i < TEN_SECONDS; i++) {    /* a reply leaves before it is counted, and several threads count */
        uint64_t counted = 0;

        transport_stats(kernel.transport, stats);
        for (int opcode = 0; opcode < TRANSPORT_OPCODES; opcode++)
            counted += stats[opcode].native;
        if (counted == 4 * TIMES + 3)           /* CREATE, FORGET, and the GETATTR of check_quiet */
            break;
        usleep(1000);
    }
    CHECK_EQ(stats[FUSE_GETATTR].native, TIMES + 1);
    CHECK_EQ(stats[FUSE_GETATTR].failed, TIMES / 5);
    CHECK_EQ(stats[FUSE_WRITE].native, TIMES);
    CHECK_EQ(stats[FUSE_READ].native, TIMES);
    CHECK_EQ(stats[FUSE_GETXATTR].native, TIMES);
    CHECK_EQ(stats[FUSE_GETXATTR].failed, TIMES);
    CHECK_EQ(stats[FUSE_CREATE].native, 1);
    CHECK_EQ(stats[FUSE_FORGET].native, 1);
    for (int i = 0; i < TRANSPORT_OPCODES; i++) {
        uint64_t sum = 0;
        unsigned __int128 least = 0, most = 0;

        for (unsigned b = 0; b < LATENCY_BUCKETS; b++) {
            sum += stats[i].latency[b];
            least += (unsigned __int128)stats[i].latency[b] * latency_bucket_ns(b);
            most += (unsigned __int128)stats[i].latency[b] * (b + 1 < LATENCY_BUCKETS ? latency_bucket_ns(b + 1) : UINT64_MAX);
        }
        CHECK_EQ(sum, stats[i].native + stats[i].forwarded);
        CHECK(least <= stats[i].total_ns && (sum == 0 ? stats[i].total_ns == 0 : stats[i].total_ns < most));
    }
    end_all();
}
