/* fallocate, copy_file_range and the privileges that writes take, against a plain model of files. */
#include <dirent.h>
#include <linux/falloc.h>
#include <stdatomic.h>
#include <sys/xattr.h>

#include "_blockio.h"
#include "_volume_internal.h"
#include "check.h"
#include "volume_client.h"

enum { FILES = 3, LARGEST = 400000, ROUNDS = 3000 };

static struct client c;
static char path[64];

static struct model {
    uint64_t ino, size;
    uint8_t data[LARGEST];
} file[FILES];

static bool mount(uint64_t free_list_bytes)
{
    struct volume_options o = client_options(c.src_fd);

    o.free_list_bytes = free_list_bytes;
    if (CHECK_EQ(client_open(&c, &o), 0))
        return true;
    fprintf(stderr, "%s\n", c.message);
    return false;
}

static bool setup(void)
{
    struct volume_options o;
    struct object_record record;
    char reason[200];

    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return false;
    c.src_fd = client_directory(path);
    o = client_options(c.src_fd);
    if (!CHECK_EQ(volume_create(&o, 0, 0, &record), 0) || !mount(4 << 20))
        return false;
    memset(file, 0, sizeof file);
    for (int i = 0; i < FILES; i++) {
        char name[2] = {(char)('a' + i), 0};
        file[i].ino = (uint64_t)client_create(&c, ROOT_INO, name);
    }
    return true;
}

static void look_up(void)
{
    for (int i = 0; i < FILES; i++) {
        char name[2] = {(char)('a' + i), 0};
        struct attr attr;
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(attr.ino, file[i].ino);
        CHECK_EQ(attr.size, file[i].size);
    }
}

static void teardown(void)
{
    CHECK_EQ(volume_close(c.volume), 0);
    close(c.src_fd);
    client_remove(path);
}

static int64_t fallocate_file(struct model *f, uint32_t mode, uint64_t offset, uint64_t size)
{
    struct request r = {.op = REQ_FALLOCATE, .ino = f->ino, .flags = mode, .offset = offset, .size = size};
    return client_run(&c, &r);
}

static int64_t copy_file(struct model *from, uint64_t offset, struct model *to, uint64_t new_offset, uint64_t size)
{
    struct request r = {.op = REQ_COPY, .ino = from->ino, .offset = offset, .new_parent = to->ino, .new_offset = new_offset, .size = size};
    return client_run(&c, &r);
}

static int64_t seek(struct model *f, uint64_t offset, int whence)
{
    struct request r = {.op = REQ_SEEK, .ino = f->ino, .offset = offset, .flags = (uint32_t)whence};
    return client_run(&c, &r);
}

static uint64_t size_of(struct model *f)
{
    struct request r = {.op = REQ_GETATTR, .ino = f->ino};
    CHECK_EQ(client_run(&c, &r), 0);
    return r.attr.size;
}

static uint32_t mode_of(struct model *f)
{
    struct request r = {.op = REQ_GETATTR, .ino = f->ino};
    CHECK_EQ(client_run(&c, &r), 0);
    return r.attr.mode & 07777;
}

static bool compare(struct model *f)
{
    static uint8_t back[LARGEST + 1];

    return CHECK_EQ(size_of(f), f->size) && CHECK_EQ(client_read(&c, f->ino, back, sizeof back, 0), f->size) &&
           CHECK_MEM_EQ(back, f->data, f->size);
}

static void grow(struct model *f, uint64_t size)
{
    if (size > f->size)
        f->size = size;
}

static void model_fallocate(struct model *f, uint32_t mode, uint64_t offset, uint64_t size)
{
    uint64_t end = offset + size;

    if (!(mode & FALLOC_FL_KEEP_SIZE))
        grow(f, end);
    if ((mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) && offset < f->size)
        memset(f->data + offset, 0, (end < f->size ? end : f->size) - offset);
}

static int64_t model_copy(struct model *from, uint64_t offset, struct model *to, uint64_t new_offset, uint64_t size)
{
    if (offset >= from->size)
        return 0;
    if (size > from->size - offset)
        size = from->size - offset;
    if (from == to && offset < new_offset + size && new_offset < offset + size)
        return -EINVAL;
    memcpy(to->data + new_offset, from->data + offset, size);
    if (size)
        grow(to, new_offset + size);
    return (int64_t)size;
}

/* No byte that is not zero lies in what is said to be a hole. */
static void check_holes(struct model *f, uint64_t offset)
{
    int64_t data = seek(f, offset, SEEK_DATA), hole = seek(f, offset, SEEK_HOLE);

    if (offset >= f->size) {
        CHECK_EQ(data, -ENXIO);
        CHECK_EQ(hole, -ENXIO);
        return;
    }
    CHECK(data == -ENXIO || (data >= (int64_t)offset && data < (int64_t)f->size));
    CHECK(hole >= (int64_t)offset && hole <= (int64_t)f->size);
    for (uint64_t i = offset, end = data < 0 ? f->size : (uint64_t)data; i < end; i++)
        if (!CHECK_EQ(f->data[i], 0))
            return;
}

static uint64_t random_offset(unsigned *seed)
{
    switch (rand_r(seed) % 4) {
    case 0: return rand_r(seed) % 3000;
    case 1: return rand_r(seed) % 30 * 4096;
    default: return rand_r(seed) % (LARGEST / 2);
    }
}

static uint64_t random_size(unsigned *seed)
{
    switch (rand_r(seed) % 4) {
    case 0: return 1 + rand_r(seed) % 100;
    case 1: return (1 + rand_r(seed) % 20) * 4096;
    default: return 1 + rand_r(seed) % (LARGEST / 2);
    }
}

TEST(random_operations_do_what_a_plain_file_does)
{
    static const uint32_t MODES[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE,
                                     FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE};
    unsigned seed = 1;

    if (!setup())
        return;
    for (int round = 0; round < ROUNDS && check_failures == 0; round++) {
        struct model *f = &file[rand_r(&seed) % FILES], *g = &file[rand_r(&seed) % FILES];
        uint64_t offset = random_offset(&seed), size = random_size(&seed), to = random_offset(&seed);
        uint32_t mode = MODES[rand_r(&seed) % 5];

        switch (rand_r(&seed) % 12) {
        case 0: case 1:
            size = size > 20000 ? 20000 : size;
            for (uint64_t i = 0; i < size; i++)
                f->data[offset + i] = (uint8_t)(rand_r(&seed) | 1);
            grow(f, offset + size);
            CHECK_EQ(client_write(&c, f->ino, f->data + offset, size, offset), size);
            break;
        case 2:
            offset = rand_r(&seed) % 2 ? offset : offset % 3000;
            CHECK_EQ(client_truncate(&c, f->ino, offset), 0);
            if (offset < f->size)
                memset(f->data + offset, 0, f->size - offset);
            f->size = offset;
            break;
        case 3: case 4: case 5:
            model_fallocate(f, mode, offset, size);
            CHECK_EQ(fallocate_file(f, mode, offset, size), 0);
            break;
        case 6: case 7: case 8:
            CHECK_EQ(copy_file(f, offset, g, to, size), model_copy(f, offset, g, to, size));
            break;
        case 9:
            check_holes(f, offset);
            break;
        case 10:
            CHECK_EQ(client_fsync(&c, f->ino), 0);
            break;
        default:
            if (round % 16 == 0) {
                CHECK_EQ(volume_close(c.volume), 0);
                if (!mount(round % 32 ? 0 : 4 << 20))
                    return;
                look_up();
            }
        }
        compare(f);
        compare(g);
    }
    teardown();
}

TEST(holes_stay_holes_when_copied)
{
    enum { DATA = 4 << 20 };

    if (!setup())
        return;
    CHECK_EQ(client_write(&c, file[0].ino, "x", 1, 0), 1);
    CHECK_EQ(client_write(&c, file[0].ino, "y", 1, DATA), 1);
    CHECK_EQ(client_truncate(&c, file[0].ino, 2 * DATA), 0);
    CHECK_EQ(client_truncate(&c, file[1].ino, 10), 0);
    CHECK_EQ(copy_file(&file[0], 0, &file[1], 0, UINT32_MAX), 2 * DATA);
    CHECK_EQ(size_of(&file[1]), 2 * DATA);
    CHECK_EQ(seek(&file[1], 0, SEEK_HOLE), NODE_SIZE);
    CHECK_EQ(seek(&file[1], NODE_SIZE, SEEK_DATA), DATA);
    CHECK_EQ(seek(&file[1], DATA, SEEK_HOLE), DATA + NODE_SIZE);
    CHECK_EQ(seek(&file[1], DATA + NODE_SIZE, SEEK_DATA), -ENXIO);
    /* over data that was there */
    CHECK_EQ(copy_file(&file[0], NODE_SIZE, &file[1], DATA, NODE_SIZE), NODE_SIZE);
    CHECK_EQ(seek(&file[1], NODE_SIZE, SEEK_DATA), -ENXIO);
    teardown();
}

TEST(what_cannot_be_done_is_refused)
{
    if (!setup())
        return;
    CHECK_EQ(client_write(&c, file[0].ino, "0123456789", 10, 0), 10);
    CHECK_EQ(fallocate_file(&file[0], FALLOC_FL_COLLAPSE_RANGE, 0, 4096), -EOPNOTSUPP);
    CHECK_EQ(fallocate_file(&file[0], FALLOC_FL_PUNCH_HOLE, 0, 4096), -EOPNOTSUPP);
    CHECK_EQ(fallocate_file(&file[0], 0, 0, 0), -EINVAL);
    CHECK_EQ(fallocate_file(&file[0], 0, INT64_MAX, 1), -EFBIG);
    CHECK_EQ(fallocate_file(&file[0], 0, 0, UINT64_MAX), -EFBIG);
    CHECK_EQ(fallocate_file(&file[0], 0, 0, 1ull << 55), -ENOSPC);
    CHECK_EQ(fallocate_file(&file[0], FALLOC_FL_KEEP_SIZE, 0, 1ull << 55), -ENOSPC);
    CHECK_EQ(fallocate_file(&file[0], FALLOC_FL_ZERO_RANGE, 0, 1ull << 55), -ENOSPC);
    CHECK_EQ(fallocate_file(&file[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 5, 1ull << 55), 0);
    CHECK_EQ(size_of(&file[0]), 10);
    CHECK_EQ(client_fsync(&c, file[0].ino), 0);         /* who asked heard of it: nothing is lost */
    CHECK_EQ(copy_file(&file[0], 0, &file[0], 9, 10), -EINVAL);
    CHECK_EQ(copy_file(&file[0], 0, &file[0], 10, 10), 10);
    CHECK_EQ(copy_file(&file[0], 30, &file[1], 0, 10), 0);
    CHECK_EQ(copy_file(&file[0], 0, &file[1], INT64_MAX - 5, 10), -EFBIG);
    CHECK_EQ(copy_file(&file[0], 0, &(struct model){.ino = ROOT_INO}, 0, 10), -EISDIR);
    CHECK_EQ(copy_file(&(struct model){.ino = ROOT_INO}, 0, &file[0], 0, 10), -EISDIR);
    CHECK_EQ(file_copy(c.volume, file[0].ino, 0, file[1].ino, 0, 10, FILE_NOWAIT), -EAGAIN);
    /* A file without holes has its room. */
    CHECK_EQ(fallocate_file(&file[0], 0, 0, 20), 0);
    teardown();
}

static _Atomic unsigned reads_left;      /* reads spread over the volume's threads */

static int fail_reads(void *arg, const struct blockio_event *e)
{
    static const uint8_t meta[ID_SIZE];

    (void)arg;
    if (e->call != BIO_READ || memcmp(e->id, meta, ID_SIZE) == 0)
        return 0;
    for (unsigned left = reads_left; left > 0; )
        if (atomic_compare_exchange_weak(&reads_left, &left, left - 1))
            return 0;
    return -EIO;
}

TEST(a_copy_that_fails_says_how_far_it_got)
{
    enum { SIZE = 4 << 20 };
    static const struct blockio_hooks failing = {.before = fail_reads};
    uint8_t *data = malloc(SIZE), *back = malloc(SIZE);
    bool partial = false;
    int64_t n = 0;

    if (!setup())
        return;
    for (size_t i = 0; i < SIZE; i++)
        data[i] = (uint8_t)(i * 7 + (i >> 12) + 1);
    CHECK_EQ(client_write(&c, file[0].ino, data, SIZE, 0), SIZE);
    for (unsigned allowed = 0; n != SIZE && allowed < 10000 && check_failures == 0; allowed += 1 + allowed / 2) {
        CHECK_EQ(volume_close(c.volume), 0);
        if (!mount(0))
            break;
        file[0].size = SIZE;
        look_up();
        CHECK_EQ(client_truncate(&c, file[1].ino, 0), 0);
        reads_left = allowed;
        blockio_set_hooks(&failing);
        n = copy_file(&file[0], 0, &file[1], 0, SIZE);
        blockio_set_hooks(NULL);
        CHECK(n == -EIO || (n > 0 && n <= SIZE));
        partial |= n > 0 && n < SIZE;
        file[1].size = n > 0 ? (uint64_t)n : 0;
        CHECK_EQ(client_read(&c, file[1].ino, back, SIZE, 0), file[1].size);
        CHECK_MEM_EQ(back, data, file[1].size);
    }
    CHECK_EQ(n, SIZE);
    CHECK(partial);
    free(data);
    free(back);
    teardown();
}

static void give_privileges(struct model *f)
{
    struct request mode = {.op = REQ_SETATTR, .ino = f->ino, .valid = SET_MODE, .attr = {.mode = 06755}};
    struct request capability = {.op = REQ_SETXATTR, .ino = f->ino, .name = "security.capability", .name_len = 19, .buffer = "cap",
                                 .size = 3};

    CHECK_EQ(client_run(&c, &mode), 0);
    CHECK_EQ(client_run(&c, &capability), 0);
}

/* -1: all is there, 0: the capability is gone, 1: all is gone. */
static void check_privileges(struct model *f, int gone)
{
    struct request r = {.op = REQ_GETXATTR, .ino = f->ino, .name = "security.capability", .name_len = 19};

    CHECK_EQ(mode_of(f), gone > 0 ? 0755 : 06755);
    CHECK_EQ(client_run(&c, &r), gone < 0 ? 3 : -ENODATA);
}

static int64_t write_as(struct model *f, int flags)
{
    struct request r = {.op = REQ_WRITE, .ino = f->ino, .buffer = "x", .size = 1, .flags = (uint32_t)flags};
    return client_run(&c, &r);
}

TEST(changes_take_privileges)
{
    struct request cut = {.op = REQ_SETATTR, .valid = SET_SIZE};
    struct request allocate = {.op = REQ_FALLOCATE, .size = 1};
    struct request copy = {.op = REQ_COPY, .size = 1};

    if (!setup())
        return;
    struct model *f = &file[0];
    CHECK_EQ(client_write(&c, file[1].ino, "x", 1, 0), 1);
    give_privileges(f);
    CHECK_EQ(write_as(f, 0), 1);
    check_privileges(f, -1);
    CHECK_EQ(write_as(f, FILE_DIRECT), 1);
    check_privileges(f, 0);
    give_privileges(f);
    CHECK_EQ(write_as(f, FILE_DIRECT | FILE_DROP_PRIVILEGES), 1);
    check_privileges(f, 1);

    cut.ino = allocate.ino = copy.new_parent = f->ino;
    copy.ino = file[1].ino;
    give_privileges(f);
    CHECK_EQ(client_run(&c, &cut), 0);
    check_privileges(f, 0);
    give_privileges(f);
    cut.valid |= SET_DROP_PRIVILEGES;
    CHECK_EQ(client_run(&c, &cut), 0);
    CHECK_EQ(cut.attr.mode & 07777, 0755);
    check_privileges(f, 1);
    for (uint32_t uid = 0; uid < 2; uid++) {
        allocate.caller.uid = copy.caller.uid = uid;
        give_privileges(f);
        CHECK_EQ(client_run(&c, &allocate), 0);
        check_privileges(f, (int)uid);
        give_privileges(f);
        CHECK_EQ(client_run(&c, &copy), 1);
        check_privileges(f, (int)uid);
    }
    /* The mutex is taken: whoever must not wait comes again, and nothing was done. */
    give_privileges(f);
    ns_lock(c.volume->ns, 0);
    CHECK_EQ(file_write(c.volume, f->ino, "y", 1, 0, FILE_DIRECT | FILE_DROP_PRIVILEGES | FILE_NOWAIT), -EAGAIN);
    ns_unlock(c.volume->ns);
    check_privileges(f, -1);
    CHECK_EQ(write_as(f, FILE_DIRECT | FILE_DROP_PRIVILEGES), 1);
    check_privileges(f, 1);
    /* Once it is known that there is nothing to take: no mutex. */
    CHECK_EQ(write_as(f, FILE_DIRECT | FILE_DROP_PRIVILEGES), 1);
    ns_lock(c.volume->ns, 0);
    CHECK_EQ(file_write(c.volume, f->ino, "y", 1, 0, FILE_DIRECT | FILE_DROP_PRIVILEGES | FILE_NOWAIT), 0);
    ns_unlock(c.volume->ns);
    teardown();
}

TEST(a_file_without_a_name_is_written_before_it_gets_one)
{
    struct request make = {.op = REQ_TMPFILE, .ino = ROOT_INO, .mode = S_IFREG | 0600};
    struct request link = {.op = REQ_LINK, .new_parent = ROOT_INO, .new_name = "named", .new_name_len = 5};
    static uint8_t data[30000], back[30000];
    struct attr attr;

    if (!setup())
        return;
    memset(data, 3, sizeof data);
    CHECK_EQ(client_run(&c, &make), 0);
    CHECK_EQ(make.attr.nlink, 0);
    CHECK_EQ(client_write(&c, make.attr.ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(client_fsync(&c, make.attr.ino), 0);
    CHECK_EQ(client_sync(&c), 0);
    link.ino = make.attr.ino;
    CHECK_EQ(client_run(&c, &link), 0);
    CHECK_EQ(volume_close(c.volume), 0);
    if (!mount(4 << 20))
        return;
    CHECK_EQ(client_lookup(&c, ROOT_INO, "named", &attr), 0);
    CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
    CHECK_MEM_EQ(back, data, sizeof back);
    make.flags = 1;
    CHECK_EQ(client_run(&c, &make), 0);
    link.ino = make.attr.ino;
    CHECK_EQ(client_run(&c, &link), -ENOENT);
    teardown();
}

TEST(a_file_that_is_only_known_takes_no_memory_but_its_inode)
{
    struct inode *inode;
    struct attr attr;

    if (!setup())
        return;
    CHECK_EQ(client_write(&c, file[0].ino, file[0].data, 10000, 0), 10000);
    CHECK_EQ(volume_close(c.volume), 0);
    if (!mount(4 << 20))
        return;
    CHECK_EQ(client_lookup(&c, ROOT_INO, "a", &attr), 0);
    CHECK_EQ(ns_get_inode(c.volume->ns, attr.ino, &inode, 0), 0);
    CHECK(!inode->work && !inode->object && !inode->content);
    CHECK_EQ(client_write(&c, attr.ino, "x", 1, 0), 1);
    CHECK(inode->work && inode->object);
    c.volume->max_open_objects = 0;
    file_close_idle_objects(c.volume);
    CHECK(inode->work && inode->object);                /* dirty */
    CHECK_EQ(client_sync(&c), 0);
    file_close_idle_objects(c.volume);
    CHECK(!inode->work && !inode->object && !inode->content);
    ns_put_inode(c.volume->ns, inode);
    teardown();
}

TEST(forgetting_a_deleted_file_does_not_wait)
{
    struct volume_stats stats;

    if (!setup())
        return;
    CHECK_EQ(client_write(&c, file[0].ino, file[0].data, 10000, 0), 10000);
    CHECK_EQ(client_unlink(&c, ROOT_INO, "a"), 0);
    CHECK_EQ(client_sync(&c), 0);
    volume_stats(c.volume, &stats);
    uint64_t known = stats.inodes_in_core;
    ns_lock(c.volume->ns, 0);
    request_forget(c.volume, file[0].ino, 1);
    ns_unlock(c.volume->ns);
    for (int i = 0; i < 10000 && stats.inodes_in_core == known; i++) {
        usleep(1000);
        volume_stats(c.volume, &stats);
    }
    CHECK_EQ(stats.inodes_in_core, known - 1);
    struct request r = {.op = REQ_GETATTR, .ino = file[0].ino};
    CHECK_EQ(client_run(&c, &r), -ENOENT);
    teardown();
}

static uint64_t stored_bytes(void)
{
    uint64_t bytes = 0;
    DIR *dir = opendir(path);
    struct stat st;

    for (const struct dirent *entry; (entry = readdir(dir)) != NULL; )
        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode))
            bytes += (uint64_t)st.st_blocks * 512;
    closedir(dir);
    return bytes;
}

TEST(a_deleted_file_that_is_written_on_and_on_leaves_memory_and_store_to_others)
{
    enum { NODES = LARGEST / NODE_SIZE, REWRITES = 20 };
    uint64_t empty;

    if (!setup())
        return;
    CHECK_EQ(client_unlink(&c, ROOT_INO, "a"), 0);
    CHECK_EQ(client_sync(&c), 0);
    empty = stored_bytes();
    for (int round = 0; round < REWRITES; round++) {
        for (uint64_t i = 0; i < NODES; i++) {
            uint64_t at = i * 37 % NODES * NODE_SIZE;
            memset(file[0].data + at, round + (int)i, NODE_SIZE);
            CHECK_EQ(client_write(&c, file[0].ino, file[0].data + at, NODE_SIZE, at), NODE_SIZE);
        }
        CHECK(atomic_load(&c.volume->env.dirty_nodes) > 0);
        CHECK_EQ(client_sync(&c), 0);
        for (int i = 0; i < 10000 && atomic_load(&c.volume->env.dirty_nodes) > 0; i++)
            usleep(1000);
        CHECK_EQ(atomic_load(&c.volume->env.dirty_nodes), 0);
    }
    CHECK(stored_bytes() - empty <= 3 * (uint64_t)LARGEST);
    for (uint64_t i = 0; i < NODES; i++) {
        uint8_t back[NODE_SIZE];
        CHECK_EQ(client_read(&c, file[0].ino, back, NODE_SIZE, i * NODE_SIZE), NODE_SIZE);
        CHECK_MEM_EQ(back, file[0].data + i * NODE_SIZE, NODE_SIZE);
    }
    teardown();
}
