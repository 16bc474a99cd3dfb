/* Backing I/O: files of 4 KiB slots below one source directory, which an attacker may rearrange at any time. */
#include "_blockio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { SHARDS = 256 };                          /* directories objects/00 .. objects/ff: the first byte of the id */

#define SLOT_MAX (OBJECT_MAX_SIZE / NODE_SIZE)  /* slots that a file can have */

enum { WRITE_BACK_STEP = (1 << 20) / NODE_SIZE };       /* slots written to a file between two calls for its write-back */

struct blockdir {
    int fd;
    bool read_only;
    bool in_memory;                     /* on tmpfs, which cannot say whether a read would wait, but does not */
    /* Directory entries that this mount has made durable. They start as unknown: a directory that is found may come from
     * a process that died before its fsync. Set only, so a lost race costs one fsync more. */
    atomic_bool objects_durable, shard_durable[SHARDS];
};

struct blockfile {
    int fd;
    struct blockdir *dir;
    uint8_t id[ID_SIZE];
    atomic_uint written;                /* slots, modulo a power of two */
};

/* ---- Hooks ---- */

static struct blockio_hooks hooks;              /* set while no I/O runs */

void blockio_set_hooks(const struct blockio_hooks *h) { hooks = h ? *h : (struct blockio_hooks){0}; }

static int before(const struct blockio_event *event) { return hooks.before ? hooks.before(hooks.arg, event) : 0; }

/* Reports a success and passes the result through. */
static int done(const struct blockio_event *event, int result)
{
    if (result == 0 && hooks.done)
        hooks.done(hooks.arg, event);
    return result;
}

/* ---- Names ---- */

struct name {
    char path[sizeof "objects/xx/" + 30];       /* relative to the source directory */
    char shard[sizeof "objects/xx"];            /* empty for object 0 */
};

static bool is_object_0(const uint8_t id[ID_SIZE])
{
    static const uint8_t zero[ID_SIZE];
    return memcmp(id, zero, ID_SIZE) == 0;
}

static struct name name_of(const uint8_t id[ID_SIZE])
{
    struct name n = {.path = "meta"};

    if (!is_object_0(id)) {
        snprintf(n.shard, sizeof n.shard, "objects/%02x", id[0]);
        int length = snprintf(n.path, sizeof n.path, "%s/", n.shard);
        for (int i = 1; i < ID_SIZE; i++)
            length += snprintf(n.path + length, sizeof n.path - (size_t)length, "%02x", id[i]);
    }
    return n;
}

/* The last component. */
static const char *base_of(const struct name *n) { return n->shard[0] ? n->path + sizeof "objects/xx/" - 1 : n->path; }

/* Decodes lower-case hexadecimal of exactly `bytes` bytes. */
static bool parse_hex(const char *text, uint8_t *out, size_t bytes)
{
    static const char digits[] = "0123456789abcdef";

    if (strlen(text) != 2 * bytes)
        return false;
    for (size_t i = 0; i < 2 * bytes; i++) {
        const char *digit = strchr(digits, text[i]);
        out[i / 2] = (uint8_t)(out[i / 2] << 4 | (digit ? digit - digits : 0));
        if (!digit)
            return false;
    }
    return true;
}

/* ---- Opening ---- */

/* Never leaves the directory, never follows a link, never blocks on a planted FIFO. Returns a descriptor or -errno. */
static int open_beneath(int dir_fd, const char *path, uint64_t flags, uint64_t mode)
{
    const struct open_how how = {
        .flags = flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
        .mode = mode,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV,
    };
    long fd;

    do
        fd = syscall(SYS_openat2, dir_fd, path, &how, sizeof how);
    while (fd < 0 && errno == EINTR);
    return fd < 0 ? -errno : (int)fd;
}

static int open_directory(int dir_fd, const char *path) { return open_beneath(dir_fd, path, O_RDONLY | O_DIRECTORY, 0); }

/* Refuses all but regular files with one name. Returns 0 or -errno. */
static int check_file(int fd)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return -EUCLEAN;
    if (st.st_nlink > 1)
        return -EMLINK;
    return st.st_nlink == 0 ? -ENOENT : 0;
}

/* Makes objects/xx and what is above it. Each step goes through a descriptor, for mkdirat follows links on its way. */
static int make_shard(struct blockdir *dir, const struct name *name)
{
    if (mkdirat(dir->fd, "objects", 0700) != 0 && errno != EEXIST)
        return -errno;
    int objects = open_directory(dir->fd, "objects");
    if (objects < 0)
        return objects;
    int error = 0;
    if (mkdirat(objects, name->shard + sizeof "objects/" - 1, 0700) != 0 && errno != EEXIST)
        error = -errno;
    close(objects);
    return error;
}

static int create_file(struct blockdir *dir, const struct name *name)
{
    int fd = open_beneath(dir->fd, name->path, O_RDWR | O_CREAT | O_EXCL, 0600);

    if (fd == -ENOENT && name->shard[0]) {
        int error = make_shard(dir, name);
        if (error)
            return error;
        fd = open_beneath(dir->fd, name->path, O_RDWR | O_CREAT | O_EXCL, 0600);
    }
    return fd;
}

static int open_file(struct blockdir *dir, const struct name *name)
{
    int fd;

    if (dir->read_only) {
        /* Not even an access time is written, where the kernel lets us choose: only the owner may. */
        fd = open_beneath(dir->fd, name->path, O_RDONLY | O_NOATIME, 0);
        if (fd == -EPERM)
            fd = open_beneath(dir->fd, name->path, O_RDONLY, 0);
    } else {
        fd = open_beneath(dir->fd, name->path, O_RDWR, 0);
    }
    /* Directories and sockets are refused by open itself, with errors of their own. */
    return fd == -EISDIR || fd == -ENXIO ? -EUCLEAN : fd;
}

int blockfile_open(struct blockfile **file, struct blockdir *dir, const uint8_t id[ID_SIZE], bool create)
{
    const struct blockio_event event = {.call = create ? BIO_CREATE : BIO_OPEN, .id = id};
    const struct name name = name_of(id);

    if (create && dir->read_only)
        return -EROFS;
    int error = before(&event);
    if (error)
        return error;
    struct blockfile *f = malloc(sizeof *f);
    if (!f)
        return -ENOMEM;
    int fd = create ? create_file(dir, &name) : open_file(dir, &name);
    error = fd < 0 ? fd : check_file(fd);
    if (error) {
        if (fd >= 0)
            close(fd);
        free(f);
        return error;
    }
    *f = (struct blockfile){.fd = fd, .dir = dir};
    memcpy(f->id, id, ID_SIZE);
    *file = f;
    return done(&event, 0);
}

void blockfile_close(struct blockfile *file)
{
    if (!file)
        return;
    close(file->fd);
    free(file);
}

/* ---- The directory ---- */

int blockdir_open(struct blockdir **dir, int src_fd, bool read_only)
{
    struct statfs fs;
    struct stat st;

    if (fstat(src_fd, &st) != 0)
        return -errno;
    if (!S_ISDIR(st.st_mode))
        return -ENOTDIR;
    struct blockdir *d = calloc(1, sizeof *d);
    if (!d)
        return -ENOMEM;
    d->read_only = read_only;
    d->in_memory = fstatfs(src_fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
    d->fd = fcntl(src_fd, F_DUPFD_CLOEXEC, 0);
    if (d->fd < 0) {
        int error = -errno;
        free(d);
        return error;
    }
    *dir = d;
    return 0;
}

void blockdir_close(struct blockdir *dir)
{
    if (!dir)
        return;
    close(dir->fd);
    free(dir);
}

int blockdir_fd(const struct blockdir *dir) { return dir->fd; }

int blockdir_syncfs(struct blockdir *dir)
{
    const struct blockio_event event = {.call = BIO_SYNCFS};

    if (dir->read_only)
        return -EROFS;
    int error = before(&event);
    if (error)
        return error;
    return done(&event, syncfs(dir->fd) == 0 ? 0 : -errno);
}

int blockdir_space(struct blockdir *dir, uint64_t *available, uint64_t *total)
{
    struct statvfs st;

    if (fstatvfs(dir->fd, &st) != 0)
        return -errno;
    uint64_t for_root_only = st.f_bfree - st.f_bavail;
    *available = (uint64_t)st.f_bavail * st.f_frsize;
    *total = (st.f_blocks - for_root_only) * st.f_frsize;
    return 0;
}

/* Opens the directory that holds the object's file. Returns a descriptor or -errno. */
static int open_parent(struct blockdir *dir, const struct name *name)
{
    return open_directory(dir->fd, name->shard[0] ? name->shard : ".");
}

int blockdir_remove(struct blockdir *dir, const uint8_t id[ID_SIZE])
{
    const struct blockio_event event = {.call = BIO_REMOVE, .id = id};
    const struct name name = name_of(id);

    if (dir->read_only)
        return -EROFS;
    int error = before(&event);
    if (error)
        return error;
    int parent = open_parent(dir, &name);
    if (parent < 0)
        return parent == -ENOENT ? done(&event, 0) : parent;
    error = unlinkat(parent, base_of(&name), 0) == 0 || errno == ENOENT ? 0 : -errno;
    close(parent);
    return done(&event, error);
}

/* fsync of a directory, given by path. */
static int sync_directory(struct blockdir *dir, const char *path)
{
    int fd = open_directory(dir->fd, path);

    if (fd < 0)
        return fd;
    int error = fsync(fd) == 0 ? 0 : -errno;
    close(fd);
    return error;
}

static int sync_entry(struct blockdir *dir, const uint8_t id[ID_SIZE])
{
    const struct name name = name_of(id);
    int error = sync_directory(dir, name.shard[0] ? name.shard : ".");

    if (error || !name.shard[0])
        return error;
    if (!atomic_load(&dir->shard_durable[id[0]])) {
        error = sync_directory(dir, "objects");
        if (error)
            return error;
        atomic_store(&dir->shard_durable[id[0]], true);
    }
    if (!atomic_load(&dir->objects_durable)) {
        error = sync_directory(dir, ".");
        if (error)
            return error;
        atomic_store(&dir->objects_durable, true);
    }
    return 0;
}

int blockfile_sync_entry(struct blockfile *file)
{
    const struct blockio_event event = {.call = BIO_SYNC_ENTRY, .id = file->id};

    if (file->dir->read_only)
        return -EROFS;
    int error = before(&event);
    return error ? error : done(&event, sync_entry(file->dir, file->id));
}

int blockdir_check_objects(const struct blockdir *dir)
{
    int fd = open_directory(dir->fd, "objects");

    if (fd < 0)
        return fd;
    close(fd);
    return 0;
}

typedef int list_fn(void *arg, const uint8_t *id, const char *name);

/* Opens directory `path` for reading its entries. Returns 0 and *stream, or -errno. */
static int open_listing(int dir_fd, const char *path, DIR **stream)
{
    int fd = open_directory(dir_fd, path);

    if (fd < 0)
        return fd;
    *stream = fdopendir(fd);
    if (!*stream) {
        int error = -errno;
        close(fd);
        return error;
    }
    return 0;
}

/* The next entry but "." and "..". Returns 0 with *name NULL at the end, or -errno. */
static int next_entry(DIR *stream, const char **name)
{
    struct dirent *entry;

    do {
        errno = 0;
        entry = readdir(stream);
        if (!entry && errno)
            return -errno;
    } while (entry && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0));
    *name = entry ? entry->d_name : NULL;
    return 0;
}

static int list_shard(DIR *shard, uint8_t first_byte, list_fn *fn, void *arg)
{
    const char *name;
    int result = next_entry(shard, &name);

    while (result == 0 && name) {
        uint8_t id[ID_SIZE] = {first_byte};
        char path[sizeof "objects/xx/" + NAME_MAX];
        snprintf(path, sizeof path, "objects/%02x/%s", first_byte, name);
        bool is_id = parse_hex(name, id + 1, ID_SIZE - 1) && !is_object_0(id);
        result = fn(arg, is_id ? id : NULL, path);
        if (result == 0)
            result = next_entry(shard, &name);
    }
    return result;
}

/* One entry of "objects": a shard, or something that does not belong there. */
static int list_entry(DIR *objects, const char *name, list_fn *fn, void *arg)
{
    char path[sizeof "objects/" + NAME_MAX];
    uint8_t first_byte = 0;
    DIR *shard;
    int error = parse_hex(name, &first_byte, 1) ? open_listing(dirfd(objects), name, &shard) : -ENOTDIR;

    if (error == -ENOTDIR || error == -ELOOP) {
        snprintf(path, sizeof path, "objects/%s", name);
        return fn(arg, NULL, path);
    }
    if (error)
        return error;
    int result = list_shard(shard, first_byte, fn, arg);
    closedir(shard);
    return result;
}

int blockdir_list(struct blockdir *dir, list_fn *fn, void *arg)
{
    const char *name;
    DIR *objects;
    int result = open_listing(dir->fd, "objects", &objects);

    if (result)
        return result == -ENOENT ? 0 : result;  /* no object was created yet */
    result = next_entry(objects, &name);
    while (result == 0 && name) {
        result = list_entry(objects, name, fn, arg);
        if (result == 0)
            result = next_entry(objects, &name);
    }
    closedir(objects);
    return result;
}

/* ---- Slots ---- */

static bool in_range(uint64_t slot, uint64_t n) { return slot <= SLOT_MAX && n <= SLOT_MAX - slot; }

static off_t offset_of(uint64_t slot) { return (off_t)(slot * NODE_SIZE); }

static int read_all(int fd, char *p, size_t size, off_t offset)
{
    while (size > 0) {
        ssize_t n = pread(fd, p, size, offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0) {
            memset(p, 0, size);                 /* past the end of the file */
            return 0;
        }
        p += n;
        size -= (size_t)n;
        offset += n;
    }
    return 0;
}

int blockfile_read(struct blockfile *file, uint64_t slot, void *buffer, size_t n)
{
    const struct blockio_event event = {.call = BIO_READ, .id = file->id, .slot = slot, .n = n};

    if (!in_range(slot, n))
        return -EINVAL;
    int error = before(&event);
    return error ? error : done(&event, read_all(file->fd, buffer, n * NODE_SIZE, offset_of(slot)));
}

/* What the page cache has, as far as the file system can say without waiting; a part counts for nothing. */
static int read_cached(struct blockfile *file, void *buffer, size_t size, off_t offset)
{
    struct iovec whole = {.iov_base = buffer, .iov_len = size};
    ssize_t n = preadv2(file->fd, &whole, 1, offset, file->dir->in_memory ? 0 : RWF_NOWAIT);

    if (n < 0 && errno != EAGAIN && errno != EOPNOTSUPP && errno != EINTR)
        return -errno;
    return n == (ssize_t)size ? 0 : -EAGAIN;
}

int blockfile_read_nowait(struct blockfile *file, uint64_t slot, void *buffer, size_t n)
{
    const struct blockio_event event = {.call = BIO_READ, .id = file->id, .slot = slot, .n = n};

    if (!in_range(slot, n))
        return -EINVAL;
    int error = before(&event);
    return error ? error : done(&event, read_cached(file, buffer, n * NODE_SIZE, offset_of(slot)));
}

/* Writes all of iov, a window of vectors at a time, whatever the kernel takes of each. */
static int write_all(int fd, const struct iovec *iov, int count, off_t offset)
{
    enum { WINDOW = 64 };
    size_t skip = 0;                            /* bytes of iov[0] that are written */

    while (count > 0) {
        struct iovec window[WINDOW];
        int used = count < WINDOW ? count : WINDOW;
        memcpy(window, iov, (size_t)used * sizeof *iov);
        window[0].iov_base = (char *)window[0].iov_base + skip;
        window[0].iov_len -= skip;

        ssize_t n = pwritev(fd, window, used, offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        offset += n;
        for (skip += (size_t)n; count > 0 && skip >= iov->iov_len; iov++, count--)
            skip -= iov->iov_len;
    }
    return 0;
}

static int write_event(struct blockfile *file, enum blockio_call call, uint64_t slot, uint64_t n,
                       const struct iovec *iov, int count)
{
    const struct blockio_event event = {
        .call = call, .id = file->id, .slot = slot, .n = n,
        .iov = call == BIO_WRITE ? iov : NULL, .iov_count = call == BIO_WRITE ? count : 0,
    };

    if (file->dir->read_only)
        return -EROFS;
    if (!in_range(slot, n))
        return -EFBIG;
    int error = before(&event);
    return error ? error : done(&event, write_all(file->fd, iov, count, offset_of(slot)));
}

/* Counts n slots as written, and has the kernel begin to write back what is dirty whenever a step is full: so the disk works while
 * the next nodes are sealed, and the barrier, which is never far, finds little left to do. Slots are not written twice before it, so
 * nothing goes to the disk twice. A hint: what fails here stays dirty, and its error is the barrier's to report. */
static void write_back_early(struct blockfile *file, unsigned n)
{
    unsigned before = atomic_fetch_add_explicit(&file->written, n, memory_order_relaxed);

    if (!file->dir->in_memory && (before + n) / WRITE_BACK_STEP != before / WRITE_BACK_STEP)
        (void)sync_file_range(file->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
}

int blockfile_writev(struct blockfile *file, uint64_t slot, const struct iovec *iov, int count)
{
    size_t size = 0;

    for (int i = 0; i < count; i++) {
        if (iov[i].iov_len % NODE_SIZE != 0)
            return -EINVAL;
        size += iov[i].iov_len;
    }
    int error = write_event(file, BIO_WRITE, slot, size / NODE_SIZE, iov, count);
    if (!error)
        write_back_early(file, (unsigned)(size / NODE_SIZE));
    return error;
}

int blockfile_zero_fill(struct blockfile *file, uint64_t slot, uint64_t n)
{
    enum { STEP = 64 };                         /* slots a call, all from the same page of zeros */
    static const uint8_t zeros[NODE_SIZE];
    struct iovec iov[STEP];

    for (int i = 0; i < STEP; i++)
        iov[i] = (struct iovec){(void *)zeros, NODE_SIZE};
    while (n > 0) {
        uint64_t step = n < STEP ? n : STEP;
        int error = write_event(file, BIO_ZERO, slot, step, iov, (int)step);
        if (error)
            return error;
        slot += step;
        n -= step;
    }
    return 0;
}

int blockfile_barrier(struct blockfile *file)
{
    const struct blockio_event event = {.call = BIO_BARRIER, .id = file->id};

    if (file->dir->read_only)
        return -EROFS;
    int error = before(&event);
    if (error)
        return error;
    /* Not repeated, whatever the error is: the kernel reports a failed write-back once, and the second call would lie. */
    return done(&event, fdatasync(file->fd) == 0 ? 0 : -errno);
}

int blockfile_settle(struct blockfile *file)
{
    const struct blockio_event event = {.call = BIO_BARRIER, .id = file->id};
    int error = before(&event);

    if (error)
        return error;
    error = fdatasync(file->fd) == 0 ? 0 : -errno;
    if (!error)
        error = -posix_fadvise(file->fd, 0, 0, POSIX_FADV_DONTNEED);
    return done(&event, error);
}

int blockfile_truncate(struct blockfile *file, uint64_t slots)
{
    const struct blockio_event event = {.call = BIO_TRUNCATE, .id = file->id, .slot = slots};

    if (file->dir->read_only)
        return -EROFS;
    if (!in_range(slots, 0))
        return -EFBIG;
    int error = before(&event);
    if (error)
        return error;
    int result;
    do
        result = ftruncate(file->fd, offset_of(slots));
    while (result != 0 && errno == EINTR);
    return done(&event, result == 0 ? 0 : -errno);
}

int blockfile_punch(struct blockfile *file, uint64_t slot, uint64_t n)
{
    const struct blockio_event event = {.call = BIO_PUNCH, .id = file->id, .slot = slot, .n = n};

    if (file->dir->read_only)
        return -EROFS;
    if (n == 0 || !in_range(slot, n))
        return -EINVAL;
    int error = before(&event);
    if (error)
        return error;
    int result;
    do
        result = fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(slot), offset_of(n));
    while (result != 0 && errno == EINTR);
    return done(&event, result == 0 || errno == EOPNOTSUPP ? 0 : -errno);
}

int blockfile_length(struct blockfile *file, uint64_t *slots)
{
    struct stat st;

    if (fstat(file->fd, &st) != 0)
        return -errno;
    *slots = (uint64_t)st.st_size / NODE_SIZE;
    return 0;
}

void blockfile_will_need(struct blockfile *file, uint64_t slot, uint64_t n)
{
    if (n > 0 && in_range(slot, n))
        posix_fadvise(file->fd, offset_of(slot), offset_of(n), POSIX_FADV_WILLNEED);
}
