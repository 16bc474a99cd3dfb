/* Backing I/O on real file systems: what is refused, what is read back, what hooks see. */
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* The module is compiled into the test with system calls that are interrupted or stop half-way when told to. */
static int trouble;                             /* > 0: every second call is interrupted, the others do a part */
static int barriers, barrier_error;             /* calls of fdatasync; the errno that they give, or 0 */

static ssize_t test_pread(int fd, void *p, size_t size, off_t offset)
{
    if (trouble && ++trouble % 2) {
        errno = EINTR;
        return -1;
    }
    return pread(fd, p, trouble && size > 1000 ? 1000 : size, offset);
}

static ssize_t test_pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    if (trouble && ++trouble % 2) {
        errno = EINTR;
        return -1;
    }
    return trouble && iov[0].iov_len > 1000 ? pwrite(fd, iov[0].iov_base, 1000, offset) : pwritev(fd, iov, count, offset);
}

static int test_fdatasync(int fd)
{
    barriers++;
    errno = barrier_error;
    return barrier_error ? -1 : fdatasync(fd);
}

static int write_backs;                         /* calls of sync_file_range, which all fail */

static int test_sync_file_range(int fd, off_t offset, off_t size, unsigned flags)
{
    write_backs++;
    CHECK_EQ(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDWR);
    CHECK(offset == 0 && size == 0 && flags == SYNC_FILE_RANGE_WRITE);  /* all of the file; without waiting for it */
    errno = EIO;
    return -1;
}

#define pread test_pread
#define pwritev test_pwritev
#define fdatasync test_fdatasync
#define sync_file_range test_sync_file_range
#include "_blockio.c"
#undef pread
#undef pwritev
#undef fdatasync
#undef sync_file_range

#define HEX30 "0203040506070809000a0b0c0d0e0f"

static const uint8_t meta_id[ID_SIZE];
static const uint8_t file_id[ID_SIZE] = {0xab, 2, 3, 4, 5, 6, 7, 8, 9, 0, 10, 11, 12, 13, 14, 15};

/* ---- A directory for each test ---- */

struct place {
    char path[64];
    int fd;
    struct blockdir *dir;
};

/* In `parent`, opened for writing. */
static struct place place_in(const char *parent)
{
    struct place p;

    snprintf(p.path, sizeof p.path, "%s/test_blockio.XXXXXX", parent);
    CHECK(mkdtemp(p.path) != NULL);
    p.fd = open(p.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_EQ(blockdir_open(&p.dir, p.fd, false), 0);
    return p;
}

static struct place place(void) { return place_in("/tmp"); }

static void remove_tree(int fd)
{
    DIR *stream = fdopendir(fd);
    struct dirent *entry;

    while ((entry = readdir(stream)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && unlinkat(fd, entry->d_name, 0) != 0) {
            int child = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
            remove_tree(child);
            CHECK_EQ(unlinkat(fd, entry->d_name, AT_REMOVEDIR), 0);
        }
    closedir(stream);
}

static void leave(struct place *p)
{
    blockdir_close(p->dir);
    remove_tree(p->fd);
    CHECK_EQ(rmdir(p->path), 0);
}

static struct blockfile *created(struct place *p, const uint8_t *id)
{
    struct blockfile *f = NULL;
    CHECK_EQ(blockfile_open(&f, p->dir, id, true), 0);
    return f;
}

static int open_error(struct place *p, const uint8_t *id, bool create)
{
    struct blockfile *f = NULL;
    int error = blockfile_open(&f, p->dir, id, create);

    if (!error)
        blockfile_close(f);
    return error;
}

static void fill(uint8_t *p, size_t n, uint8_t first)
{
    for (size_t i = 0; i < n; i++)
        memset(p + i * NODE_SIZE, (int)(first + i), NODE_SIZE);
}

static int write_slots(struct blockfile *f, uint64_t slot, uint8_t first, size_t n)
{
    uint8_t *p = malloc(n * NODE_SIZE);

    fill(p, n, first);
    const struct iovec iov = {p, n * NODE_SIZE};
    int error = blockfile_writev(f, slot, &iov, 1);
    free(p);
    return error;
}

/* True if each of n slots is filled with `first`, `first` + step, ... */
static bool slots_are(struct blockfile *f, uint64_t slot, uint8_t first, uint8_t step, size_t n)
{
    uint8_t *p = malloc(n * NODE_SIZE);
    bool right = CHECK_EQ(blockfile_read(f, slot, p, n), 0);

    for (size_t i = 0; right && i < n * NODE_SIZE; i++)
        right = p[i] == (uint8_t)(first + i / NODE_SIZE * step);
    free(p);
    return right;
}

/* ---- Names and modes ---- */

TEST(files_lie_where_the_format_says)
{
    struct place p = place();
    struct stat st;

    umask(0);
    blockfile_close(created(&p, meta_id));
    blockfile_close(created(&p, file_id));
    CHECK_EQ(fstatat(p.fd, "meta", &st, 0), 0);
    CHECK_EQ(st.st_mode, S_IFREG | 0600);
    CHECK_EQ(fstatat(p.fd, "objects", &st, 0), 0);
    CHECK_EQ(st.st_mode, S_IFDIR | 0700);
    CHECK_EQ(fstatat(p.fd, "objects/ab", &st, 0), 0);
    CHECK_EQ(st.st_mode, S_IFDIR | 0700);
    CHECK_EQ(fstatat(p.fd, "objects/ab/" HEX30, &st, 0), 0);
    CHECK_EQ(st.st_mode, S_IFREG | 0600);
    CHECK_EQ(open_error(&p, meta_id, false), 0);
    CHECK_EQ(open_error(&p, file_id, false), 0);
    CHECK_EQ(open_error(&p, meta_id, true), -EEXIST);
    CHECK_EQ(open_error(&p, file_id, true), -EEXIST);
    leave(&p);
}

TEST(descriptors_are_not_inherited)
{
    struct place p = place();
    int highest = fcntl(p.fd, F_DUPFD, 0);      /* the next descriptor will be above the directory's */

    close(highest);
    struct blockfile *f = created(&p, file_id);
    CHECK_EQ(fcntl(blockdir_fd(p.dir), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK_EQ(fcntl(highest, F_GETFD), FD_CLOEXEC); /* the file took its place */
    blockfile_close(f);
    leave(&p);
}

TEST(removal)
{
    struct place p = place();
    struct stat st;

    CHECK_EQ(blockdir_remove(p.dir, file_id), 0); /* not even the directory exists */
    CHECK_EQ(open_error(&p, file_id, false), -ENOENT);
    blockfile_close(created(&p, file_id));
    CHECK_EQ(blockdir_remove(p.dir, file_id), 0);
    CHECK_EQ(fstatat(p.fd, "objects/ab/" HEX30, &st, 0), -1);
    CHECK_EQ(blockdir_remove(p.dir, file_id), 0);
    CHECK_EQ(open_error(&p, file_id, false), -ENOENT);
    leave(&p);
}

/* ---- What an attacker may have planted ---- */

TEST(planted_symlinks_are_refused)
{
    struct place p = place();
    int fd = openat(p.fd, "victim", O_CREAT | O_WRONLY, 0600);

    CHECK_EQ(write(fd, "precious", 8), 8);
    close(fd);
    CHECK_EQ(symlinkat("victim", p.fd, "meta"), 0);
    CHECK_EQ(open_error(&p, meta_id, false), -ELOOP);
    CHECK_EQ(open_error(&p, meta_id, true), -EEXIST);
    struct stat st;
    CHECK_EQ(fstatat(p.fd, "victim", &st, 0), 0);
    CHECK_EQ(st.st_size, 8);
    leave(&p);
}

/* A link in the middle of the path leads outside or elsewhere inside: neither is followed, not by mkdir either. */
TEST(symlinked_directories_are_refused)
{
    static const char *const targets[] = {"/tmp", "elsewhere"};

    for (int i = 0; i < 2; i++) {
        struct place p = place();
        struct stat st;
        CHECK_EQ(mkdirat(p.fd, "elsewhere", 0700), 0);
        CHECK_EQ(symlinkat(targets[i], p.fd, "objects"), 0);
        CHECK(open_error(&p, file_id, true) < 0);
        CHECK(open_error(&p, file_id, false) < 0);
        CHECK_EQ(fstatat(p.fd, "elsewhere/ab", &st, 0), -1);
        CHECK_EQ(blockdir_remove(p.dir, file_id), -ELOOP);

        CHECK_EQ(unlinkat(p.fd, "objects", 0), 0);
        CHECK_EQ(mkdirat(p.fd, "objects", 0700), 0);
        CHECK_EQ(symlinkat(i ? "../elsewhere" : "/tmp", p.fd, "objects/ab"), 0);
        CHECK_EQ(open_error(&p, file_id, true), -ELOOP);
        CHECK_EQ(open_error(&p, file_id, false), -ELOOP);
        leave(&p);
    }
}

/* An open without O_NONBLOCK would wait for the other end for ever: the alarm ends the test then. */
TEST(planted_fifos_are_refused)
{
    struct place p = place();

    alarm(20);
    CHECK_EQ(mkfifoat(p.fd, "meta", 0600), 0);
    CHECK_EQ(open_error(&p, meta_id, false), -EUCLEAN);
    CHECK_EQ(open_error(&p, meta_id, true), -EEXIST);
    struct blockdir *read_only;
    CHECK_EQ(blockdir_open(&read_only, p.fd, true), 0);
    struct blockfile *f;
    CHECK_EQ(blockfile_open(&f, read_only, meta_id, false), -EUCLEAN);
    blockdir_close(read_only);
    alarm(0);
    leave(&p);
}

TEST(planted_hard_links_are_refused)
{
    struct place p = place();

    blockfile_close(created(&p, file_id));
    CHECK_EQ(linkat(p.fd, "objects/ab/" HEX30, p.fd, "second", 0), 0);
    CHECK_EQ(open_error(&p, file_id, false), -EMLINK);
    CHECK_EQ(unlinkat(p.fd, "second", 0), 0);
    CHECK_EQ(open_error(&p, file_id, false), 0);
    leave(&p);
}

TEST(planted_directories_and_sockets_are_refused)
{
    struct place p = place();
    struct blockdir *read_only;
    struct blockfile *f;

    CHECK_EQ(mkdirat(p.fd, "meta", 0700), 0);
    CHECK_EQ(blockdir_open(&read_only, p.fd, true), 0);
    CHECK_EQ(open_error(&p, meta_id, false), -EUCLEAN);
    CHECK_EQ(blockfile_open(&f, read_only, meta_id, false), -EUCLEAN);
    CHECK(blockdir_remove(p.dir, meta_id) < 0);
    CHECK_EQ(unlinkat(p.fd, "meta", AT_REMOVEDIR), 0);

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/meta", p.path);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK_EQ(bind(s, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(open_error(&p, meta_id, false), -EUCLEAN);
    CHECK_EQ(blockfile_open(&f, read_only, meta_id, false), -EUCLEAN);
    close(s);
    blockdir_close(read_only);
    leave(&p);
}

/* Something mounted over "objects" is not part of the volume. */
TEST(mounts_are_refused)
{
    struct place p = place();
    char path[100];

    blockfile_close(created(&p, file_id));
    pid_t child = fork();
    if (child == 0) {
        snprintf(path, sizeof path, "%s/objects", p.path);
        if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0
            || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount(path, path, NULL, MS_BIND, NULL) != 0)
            _exit(77);
        struct blockdir *dir;                   /* opened anew: the old descriptor belongs to the old mounts */
        struct blockfile *f;
        _exit(blockdir_open(&dir, open(p.path, O_RDONLY | O_DIRECTORY), false) == 0
              && blockfile_open(&f, dir, file_id, false) == -EXDEV ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        fprintf(stderr, "mounts_are_refused: not tried, mounting is not permitted here\n");
    else
        CHECK_EQ(WEXITSTATUS(status), 0);
    leave(&p);
}

TEST(only_a_directory_can_be_opened)
{
    struct blockdir *dir;
    int fd = open("/dev/null", O_RDONLY);

    CHECK_EQ(blockdir_open(&dir, fd, false), -ENOTDIR);
    CHECK_EQ(blockdir_open(&dir, -1, false), -EBADF);
    close(fd);
}

/* ---- Reading and writing ---- */

TEST(what_was_written_is_read)
{
    struct place p = place();
    struct blockfile *f = created(&p, file_id);
    uint64_t slots;

    CHECK_EQ(write_slots(f, 4, 10, 5), 0);
    CHECK(slots_are(f, 4, 10, 1, 5));
    CHECK(slots_are(f, 0, 0, 0, 4));            /* never written */
    CHECK(slots_are(f, 9, 0, 0, 3));            /* past the end */
    CHECK(slots_are(f, 100, 0, 0, 1));
    CHECK_EQ(blockfile_length(f, &slots), 0);
    CHECK_EQ(slots, 9);
    CHECK_EQ(blockfile_barrier(f), 0);
    CHECK_EQ(blockfile_sync_entry(f), 0);
    CHECK_EQ(blockdir_syncfs(p.dir), 0);
    blockfile_close(f);

    CHECK_EQ(blockfile_open(&f, p.dir, file_id, false), 0);
    CHECK(slots_are(f, 4, 10, 1, 5));
    blockfile_will_need(f, 0, 9);
    blockfile_will_need(f, UINT64_MAX, 9);      /* a hint cannot fail */
    blockfile_close(f);
    leave(&p);
}

/* A read across the end of the file, also when an attacker cut it in the middle of a slot. */
TEST(what_is_missing_reads_as_zeros)
{
    struct place p = place();
    struct blockfile *f = created(&p, meta_id);
    uint8_t buffer[3 * NODE_SIZE];
    uint64_t slots;

    CHECK_EQ(write_slots(f, 0, 0x77, 2), 0);
    int fd = openat(p.fd, "meta", O_WRONLY);
    CHECK_EQ(ftruncate(fd, NODE_SIZE + 100), 0);
    close(fd);
    memset(buffer, 0xee, sizeof buffer);
    CHECK_EQ(blockfile_read(f, 0, buffer, 3), 0);
    CHECK_EQ(buffer[NODE_SIZE - 1], 0x77);
    CHECK_EQ(buffer[NODE_SIZE + 99], 0x78);
    for (size_t i = NODE_SIZE + 100; i < sizeof buffer; i++)
        if (!CHECK_EQ(buffer[i], 0))
            break;
    CHECK_EQ(blockfile_length(f, &slots), 0);
    CHECK_EQ(slots, 1);
    blockfile_close(f);
    leave(&p);
}

/* More vectors than the kernel takes in one call, some of them empty. */
TEST(long_vectors)
{
    enum { N = 3000 };
    struct place p = place();
    struct blockfile *f = created(&p, file_id);
    static uint8_t page[256][NODE_SIZE];
    static struct iovec iov[N];
    int slots = 0;

    for (int i = 0; i < 256; i++)
        memset(page[i], i, NODE_SIZE);
    for (int i = 0; i < N; i++)
        iov[i] = (struct iovec){page[slots % 256], i % 7 == 3 ? 0 : (size_t)NODE_SIZE}, slots += i % 7 != 3;
    CHECK_EQ(blockfile_writev(f, 8, iov, N), 0);
    CHECK(slots_are(f, 8, 0, 1, (size_t)slots));
    CHECK(slots_are(f, 8 + (uint64_t)slots, 0, 0, 1));
    CHECK_EQ(blockfile_writev(f, 8, iov, 0), 0);
    iov[1].iov_len = 100;
    CHECK_EQ(blockfile_writev(f, 8, iov, 3), -EINVAL);
    blockfile_close(f);
    leave(&p);
}

TEST(slots_out_of_range)
{
    struct place p = place();
    struct blockfile *f = created(&p, file_id);
    uint8_t buffer[NODE_SIZE];
    const uint64_t limit = OBJECT_MAX_SIZE / NODE_SIZE;

    CHECK_EQ(blockfile_read(f, limit, buffer, 1), -EINVAL);
    CHECK_EQ(blockfile_read(f, UINT64_MAX, buffer, 1), -EINVAL);
    CHECK_EQ(write_slots(f, limit, 1, 1), -EFBIG);
    CHECK_EQ(blockfile_truncate(f, limit + 1), -EFBIG);
    CHECK_EQ(blockfile_punch(f, 1, limit), -EINVAL);
    CHECK_EQ(blockfile_punch(f, 1, 0), -EINVAL);
    blockfile_close(f);
    leave(&p);
}

/* The kernel writes up to the limit, then refuses the rest. */
TEST(errors_after_a_part_arrive)
{
    struct place p = place();
    struct blockfile *f = created(&p, file_id);
    struct rlimit old, limit;

    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = (struct rlimit){10 * NODE_SIZE, old.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQ(write_slots(f, 0, 1, 12), -EFBIG);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK(slots_are(f, 0, 1, 1, 10));
    CHECK(slots_are(f, 10, 0, 0, 2));
    blockfile_close(f);
    leave(&p);
}

TEST(interrupted_and_short_calls_go_on)
{
    struct place p = place();
    struct blockfile *f = created(&p, file_id);
    uint8_t page[3][NODE_SIZE];
    const struct iovec iov[] = {{page[0], NODE_SIZE}, {page[1], 0}, {page[1], 2 * NODE_SIZE}};

    fill(page[0], 3, 0x30);
    trouble = 1;
    CHECK_EQ(blockfile_writev(f, 5, iov, 3), 0);
    CHECK(slots_are(f, 5, 0x30, 1, 3));
    CHECK(slots_are(f, 7, 0x32, 0x100 - 0x32, 2)); /* the last one and zeros behind the end */
    CHECK_EQ(blockfile_zero_fill(f, 6, 1), 0);
    trouble = 0;
    CHECK(slots_are(f, 5, 0x30, 0, 1));
    CHECK(slots_are(f, 6, 0, 0, 1));
    CHECK(slots_are(f, 7, 0x32, 0, 1));
    blockfile_close(f);
    leave(&p);
}

TEST(failed_barriers_are_not_repeated)
{
    static const int errors[] = {EIO, ENOSPC, EINTR};
    struct place p = place();
    struct blockfile *f = created(&p, file_id);

    for (int i = 0; i < 3; i++) {
        barriers = 0;
        barrier_error = errors[i];
        CHECK_EQ(blockfile_barrier(f), -errors[i]);
        CHECK_EQ(barriers, 1);
    }
    barrier_error = 0;
    CHECK_EQ(blockfile_barrier(f), 0);
    blockfile_close(f);
    leave(&p);
}

/* Write-back is asked for each MiB, whatever the sizes of the writes, but not where there is no disk. What it answers is no error
 * of a write. */
TEST(write_back_begins_early)
{
    static uint8_t nodes[100 * NODE_SIZE];
    struct iovec iov = {nodes, sizeof nodes};
    struct place p = place_in("/dev/shm");
    struct blockfile *file;

    CHECK_EQ(blockfile_open(&file, p.dir, file_id, true), 0);
    for (int in_memory = 0; in_memory < 2; in_memory++) {
        p.dir->in_memory = in_memory;
        write_backs = 0;
        file->written = 0;
        for (unsigned i = 0; i < 256; i++) {
            CHECK_EQ(blockfile_writev(file, i * 100, &iov, 1), 0);
            CHECK_EQ(write_backs, in_memory ? 0 : (int)((i + 1) * 100 / 256));
        }
    }
    blockfile_close(file);
    leave(&p);
}

static void punch_truncate_zero(const char *parent)
{
    struct place p = place_in(parent);
    struct blockfile *f = created(&p, meta_id);
    struct stat before, after;
    uint64_t slots;

    CHECK_EQ(write_slots(f, 0, 1, 200), 0);
    CHECK_EQ(blockfile_barrier(f), 0);
    CHECK_EQ(fstatat(p.fd, "meta", &before, 0), 0);
    CHECK_EQ(blockfile_punch(f, 64, 64), 0);
    CHECK_EQ(fstatat(p.fd, "meta", &after, 0), 0);
    CHECK_EQ(before.st_blocks - after.st_blocks, 64 * NODE_SIZE / 512);
    CHECK_EQ(after.st_size, before.st_size);
    CHECK(slots_are(f, 0, 1, 1, 64));
    CHECK(slots_are(f, 64, 0, 0, 64));
    CHECK(slots_are(f, 128, 129, 1, 72));

    CHECK_EQ(blockfile_zero_fill(f, 190, 100), 0);
    CHECK(slots_are(f, 189, 190, 0, 1));
    CHECK(slots_are(f, 190, 0, 0, 100));
    CHECK_EQ(blockfile_length(f, &slots), 0);
    CHECK_EQ(slots, 290);
    CHECK_EQ(blockfile_truncate(f, 10), 0);
    CHECK_EQ(blockfile_length(f, &slots), 0);
    CHECK_EQ(slots, 10);
    CHECK(slots_are(f, 0, 1, 1, 10));
    CHECK(slots_are(f, 10, 0, 0, 1));
    blockfile_close(f);
    leave(&p);
}

TEST(punch_truncate_zero_on_disk) { punch_truncate_zero("/tmp"); }
TEST(punch_truncate_zero_on_tmpfs) { punch_truncate_zero("/dev/shm"); }

TEST(space)
{
    struct place p = place();
    uint64_t available, total;

    CHECK_EQ(blockdir_space(p.dir, &available, &total), 0);
    CHECK(available > 0 && available <= total && total % 512 == 0);
    leave(&p);
}

/* ---- Read-only ---- */

TEST(read_only_writes_nothing)
{
    struct place p = place();
    struct blockdir *dir;
    struct blockfile *f = created(&p, file_id);
    uint8_t buffer[NODE_SIZE];

    CHECK_EQ(write_slots(f, 0, 5, 1), 0);
    blockfile_close(f);
    CHECK_EQ(blockdir_open(&dir, p.fd, true), 0);
    CHECK_EQ(blockfile_open(&f, dir, meta_id, true), -EROFS);
    CHECK_EQ(blockfile_open(&f, dir, file_id, false), 0);
    struct stat st, later;
    static const struct timespec old[2] = {{1, 0}, {2, 0}}; /* an access time that any read would renew */
    CHECK_EQ(utimensat(p.fd, "objects/ab/" HEX30, old, 0), 0);
    CHECK_EQ(fstatat(p.fd, "objects/ab/" HEX30, &st, 0), 0);
    CHECK_EQ(blockfile_read(f, 0, buffer, 1), 0);
    CHECK_EQ(buffer[0], 5);
    CHECK_EQ(fstatat(p.fd, "objects/ab/" HEX30, &later, 0), 0);
    CHECK_EQ(later.st_atim.tv_sec, 1);
    CHECK_EQ(write_slots(f, 0, 1, 1), -EROFS);
    CHECK_EQ(blockfile_barrier(f), -EROFS);
    CHECK_EQ(blockfile_truncate(f, 0), -EROFS);
    CHECK_EQ(blockfile_punch(f, 0, 1), -EROFS);
    CHECK_EQ(blockfile_zero_fill(f, 0, 1), -EROFS);
    CHECK_EQ(blockfile_sync_entry(f), -EROFS);
    CHECK_EQ(blockdir_remove(dir, file_id), -EROFS);
    CHECK_EQ(blockdir_syncfs(dir), -EROFS);
    CHECK(slots_are(f, 0, 5, 0, 1));
    blockfile_close(f);
    blockdir_close(dir);
    leave(&p);
}

/* ---- Listing ---- */

struct listing {
    int ids, strangers, stop_after;
    uint8_t id[ID_SIZE];
    char names[1000];
};

static int note(void *arg, const uint8_t *id, const char *name)
{
    struct listing *l = arg;

    if (id) {
        l->ids++;
        memcpy(l->id, id, ID_SIZE);
    } else {
        l->strangers++;
        strcat(strcat(l->names, name), " ");
    }
    return l->ids + l->strangers == l->stop_after ? 77 : 0;
}

static void touch(struct place *p, const char *name) { close(openat(p->fd, name, O_CREAT | O_WRONLY, 0600)); }

TEST(listing)
{
    struct place p = place();
    struct listing l = {0};

    CHECK_EQ(blockdir_list(p.dir, note, &l), 0);
    CHECK_EQ(l.ids + l.strangers, 0);
    blockfile_close(created(&p, meta_id));
    blockfile_close(created(&p, file_id));
    CHECK_EQ(blockdir_list(p.dir, note, &l), 0);
    CHECK_EQ(l.ids, 1);
    CHECK_EQ(l.strangers, 0);
    CHECK_MEM_EQ(l.id, file_id, ID_SIZE);

    touch(&p, "objects/loose");
    touch(&p, "objects/cd");                    /* a file in place of a directory */
    touch(&p, "objects/ab/short");
    touch(&p, "objects/ab/0203040506070809000A0b0c0d0e0f"); /* upper case names nothing */
    CHECK_EQ(mkdirat(p.fd, "objects/00", 0700), 0);
    touch(&p, "objects/00/000000000000000000000000000000"); /* object 0 is "meta" */
    CHECK_EQ(symlinkat("ab", p.fd, "objects/ef"), 0);
    memset(&l, 0, sizeof l);
    CHECK_EQ(blockdir_list(p.dir, note, &l), 0);
    CHECK_EQ(l.ids, 1);
    CHECK_EQ(l.strangers, 6);
    CHECK(strstr(l.names, "objects/loose ") && strstr(l.names, "objects/cd ") && strstr(l.names, "objects/ab/short "));
    CHECK(strstr(l.names, "objects/ef ") && strstr(l.names, "objects/00/0000") && strstr(l.names, "000A0b"));

    memset(&l, 0, sizeof l);
    l.stop_after = 3;
    CHECK_EQ(blockdir_list(p.dir, note, &l), 77);
    CHECK_EQ(l.ids + l.strangers, 3);
    leave(&p);
}

/* ---- Hooks ---- */

struct record {
    enum blockio_call calls[40];
    int count, fail_at;                         /* the call with this number fails with -ENOSPC */
    int attempts;
    uint64_t slot, n;
    uint8_t byte;
};

static int note_attempt(void *arg, const struct blockio_event *event)
{
    struct record *r = arg;
    (void)event;
    return ++r->attempts == r->fail_at ? -ENOSPC : 0;
}

static void note_success(void *arg, const struct blockio_event *event)
{
    struct record *r = arg;

    r->calls[r->count++] = event->call;
    r->slot = event->slot;
    r->n = event->n;
    if (event->iov)
        r->byte = *(uint8_t *)event->iov[0].iov_base;
}

/* Each kind of call once; returns the first error. */
static int all_calls(struct place *p, struct record *r)
{
    struct blockfile *f = NULL;
    uint8_t buffer[NODE_SIZE];
    int error = blockfile_open(&f, p->dir, file_id, true);

    if (!error && (error = write_slots(f, 6, 0x42, 3)) == 0 && r->fail_at == 0) {
        CHECK_EQ(r->slot, 6);
        CHECK_EQ(r->n, 3);
        CHECK_EQ(r->byte, 0x42);
    }
    if (!error)
        error = blockfile_barrier(f);
    if (!error)
        error = blockfile_sync_entry(f);
    if (!error)
        error = blockfile_read(f, 6, buffer, 1);
    if (!error)
        error = blockfile_zero_fill(f, 9, 2);
    if (!error)
        error = blockfile_punch(f, 6, 1);
    if (!error)
        error = blockfile_truncate(f, 8);
    blockfile_close(f);
    f = NULL;
    if (!error)
        error = blockfile_open(&f, p->dir, file_id, false);
    blockfile_close(f);
    if (!error)
        error = blockdir_syncfs(p->dir);
    if (!error)
        error = blockdir_remove(p->dir, file_id);
    return error;
}

TEST(hooks_see_and_fail_every_call)
{
    static const enum blockio_call expected[] = {BIO_CREATE, BIO_WRITE, BIO_BARRIER, BIO_SYNC_ENTRY, BIO_READ, BIO_ZERO,
                                                 BIO_PUNCH, BIO_TRUNCATE, BIO_OPEN, BIO_SYNCFS, BIO_REMOVE};
    enum { CALLS = sizeof expected / sizeof *expected };

    for (int fail_at = 0; fail_at <= CALLS; fail_at++) {
        struct place p = place();
        struct record r = {.fail_at = fail_at};
        const struct blockio_hooks hooks = {note_attempt, note_success, &r};
        blockio_set_hooks(&hooks);
        CHECK_EQ(all_calls(&p, &r), fail_at ? -ENOSPC : 0);
        blockio_set_hooks(NULL);
        CHECK_EQ(r.count, fail_at ? fail_at - 1 : CALLS);
        for (int i = 0; i < r.count; i++)
            CHECK_EQ(r.calls[i], expected[i]);
        leave(&p);
    }
}

/* A call that a hook replaced did not happen. */
TEST(replaced_calls_do_nothing)
{
    struct place p = place();
    struct blockfile *f = created(&p, meta_id);
    struct record r = {.fail_at = 1};
    const struct blockio_hooks hooks = {note_attempt, note_success, &r};
    uint64_t slots = 1;

    blockio_set_hooks(&hooks);
    CHECK_EQ(write_slots(f, 0, 1, 1), -ENOSPC);
    CHECK_EQ(blockfile_length(f, &slots), 0);
    CHECK_EQ(slots, 0);
    r.attempts = 0;
    CHECK_EQ(blockdir_remove(p.dir, meta_id), -ENOSPC);
    r.attempts = 0;
    CHECK_EQ(open_error(&p, file_id, true), -ENOSPC);
    CHECK_EQ(faccessat(p.fd, "objects", F_OK, 0), -1);
    blockio_set_hooks(NULL);
    CHECK_EQ(faccessat(p.fd, "meta", F_OK, 0), 0);
    blockfile_close(f);
    leave(&p);
}
