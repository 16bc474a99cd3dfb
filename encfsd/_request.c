/* Requests: tried at once, parked if they would have to wait. One table row an operation. */
#include "_request.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_volume_internal.h"

/* Each runs one operation; `nowait` chooses the flags below it. Returns the request's result; -EAGAIN only with `nowait`. */
typedef int64_t run_fn(struct volume *v, struct request *r, bool nowait);

static int ns_flags(bool nowait) { return nowait ? NS_NOWAIT : 0; }
static int file_flags(bool nowait) { return nowait ? FILE_NOWAIT : 0; }

/* For operations that add metadata, with `bytes` of their own. */
static int room(struct volume *v, uint64_t bytes, bool nowait)
{
    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    return space_for_metadata(v, bytes, nowait);
}

/* For operations that only remove or change: allowed on a full store. */
static int writable(struct volume *v, bool nowait)
{
    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    return space_for_removal(v, nowait);
}

static int64_t run_lookup(struct volume *v, struct request *r, bool nowait)
{
    return ns_lookup(v->ns, r->ino, r->name, r->name_len, &r->attr, ns_flags(nowait));
}

static int64_t run_getattr(struct volume *v, struct request *r, bool nowait)
{
    return ns_getattr(v->ns, r->ino, &r->attr, ns_flags(nowait));
}

static int64_t run_setattr(struct volume *v, struct request *r, bool nowait)
{
    const uint32_t others = r->valid & ~(uint32_t)(SET_SIZE | SET_DROP_PRIVILEGES);
    const bool resize = (r->valid & SET_SIZE) != 0;
    const int drop = r->valid & SET_DROP_PRIVILEGES ? FILE_DROP_PRIVILEGES : 0;
    struct attr values = r->attr;
    int64_t rc = writable(v, nowait);

    if (!rc && resize && (others & (SET_MODE | SET_UID | SET_GID)) && nowait)
        rc = -EAGAIN;                           /* a size change that is done must not be undone by coming again */
    if (!rc && resize)
        rc = file_truncate(v, r->ino, values.size, &r->attr, file_flags(nowait) | drop);
    if (!rc && drop && !resize)
        rc = ns_drop_privileges(v->ns, r->ino, false, NULL, ns_flags(nowait));
    if (!rc && others)
        rc = ns_setattr(v->ns, r->ino, &values, others, &r->attr, ns_flags(nowait && !resize)); /* times need no mutex */
    if (!rc && !resize && !others)
        rc = ns_getattr(v->ns, r->ino, &r->attr, ns_flags(nowait));
    if (rc == -EAGAIN)
        r->attr = values;                       /* the input is needed again */
    return rc;
}

static int64_t run_mknod(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, 0, nowait);
    return rc ? rc : ns_mknod(v->ns, r->ino, r->name, r->name_len, r->mode, r->rdev, &r->caller, &r->attr, ns_flags(nowait));
}

static int64_t run_mkdir(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, 0, nowait);
    return rc ? rc : ns_mkdir(v->ns, r->ino, r->name, r->name_len, r->mode, &r->caller, &r->attr, ns_flags(nowait));
}

static int64_t run_tmpfile(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, 0, nowait);
    return rc ? rc : ns_tmpfile(v->ns, r->ino, r->mode, r->flags == 0, &r->caller, &r->attr, ns_flags(nowait));
}

static int64_t run_symlink(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, r->new_name_len, nowait);
    return rc ? rc : ns_symlink(v->ns, r->ino, r->name, r->name_len, r->new_name, r->new_name_len, &r->caller, &r->attr,
                                ns_flags(nowait));
}

static int64_t run_readlink(struct volume *v, struct request *r, bool nowait)
{
    size_t len = 0;
    int rc = ns_readlink(v->ns, r->ino, r->buffer, r->size, &len, ns_flags(nowait));
    return rc ? rc : (int64_t)len;
}

static int64_t run_link(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, 0, nowait);
    return rc ? rc : ns_link(v->ns, r->ino, r->new_parent, r->new_name, r->new_name_len, &r->attr, ns_flags(nowait));
}

static int64_t run_unlink(struct volume *v, struct request *r, bool nowait)
{
    int rc = writable(v, nowait);
    return rc ? rc : ns_unlink(v->ns, r->ino, r->name, r->name_len, ns_flags(nowait));
}

static int64_t run_rmdir(struct volume *v, struct request *r, bool nowait)
{
    int rc = writable(v, nowait);
    return rc ? rc : ns_rmdir(v->ns, r->ino, r->name, r->name_len, ns_flags(nowait));
}

static int64_t run_rename(struct volume *v, struct request *r, bool nowait)
{
    int rc = writable(v, nowait);
    return rc ? rc : ns_rename(v->ns, r->ino, r->name, r->name_len, r->new_parent, r->new_name, r->new_name_len, r->flags,
                               ns_flags(nowait));
}

/* Entries for a caller that wants them in one array. */
struct entry_array {
    struct ns_dirent *entries;
    size_t count, size;
};

static bool append_entry(void *arg, const struct ns_dirent *entry)
{
    struct entry_array *array = arg;

    if (array->count == array->size)
        return false;
    array->entries[array->count++] = *entry;
    return true;
}

static int64_t run_readdir(struct volume *v, struct request *r, bool nowait)
{
    struct entry_array array = {.entries = r->buffer, .size = r->size};
    size_t count = 0;
    int flags = ns_flags(nowait) | (int)(r->flags & NS_PLAIN);
    int rc = ns_readdir(v->ns, r->ino, r->offset, r->emit ? r->emit : append_entry, r->emit ? r->emit_arg : &array, &count, flags);
    return rc ? rc : (int64_t)count;
}

static int64_t run_setxattr(struct volume *v, struct request *r, bool nowait)
{
    int rc = room(v, r->size, nowait);
    /* `valid` nonzero: the caller may keep setgid on an ACL change (it is in the file's group or has CAP_FSETID). */
    return rc ? rc : ns_setxattr(v->ns, r->ino, r->name, r->buffer, r->size, (int)r->flags, r->valid != 0, ns_flags(nowait));
}

static int64_t run_getxattr(struct volume *v, struct request *r, bool nowait)
{
    size_t len = 0;
    int rc = ns_getxattr(v->ns, r->ino, r->name, r->buffer, r->size, &len, ns_flags(nowait));
    return rc ? rc : (int64_t)len;
}

/* Names of trusted. are for those with CAP_SYS_ADMIN; of callers only their user is known here. */
static size_t without_trusted(char *names, size_t size)
{
    static const char hidden[] = "trusted.";
    size_t kept = 0;

    for (size_t at = 0; at < size;) {
        size_t len = strnlen(names + at, size - at) + 1;

        if (strncmp(names + at, hidden, sizeof hidden - 1) != 0) {
            memmove(names + kept, names + at, len);
            kept += len;
        }
        at += len;
    }
    return kept;
}

static int64_t run_listxattr(struct volume *v, struct request *r, bool nowait)
{
    size_t len = 0;
    int rc = ns_listxattr(v->ns, r->ino, r->buffer, r->size, &len, ns_flags(nowait));

    if (rc)
        return rc;
    return (int64_t)(r->caller.uid ? without_trusted(r->buffer, len) : len);
}

static int64_t run_removexattr(struct volume *v, struct request *r, bool nowait)
{
    int rc = writable(v, nowait);
    return rc ? rc : ns_removexattr(v->ns, r->ino, r->name, ns_flags(nowait));
}

static int64_t run_read(struct volume *v, struct request *r, bool nowait)
{
    int64_t got = file_read(v, r->ino, r->buffer, r->size, r->offset, (int)r->flags | file_flags(nowait));
    if (got > 0)
        atomic_fetch_add_explicit(&v->bytes_read, (uint64_t)got, memory_order_relaxed);
    return got;
}

static int64_t write_with(struct volume *v, struct request *r, int flags)
{
    int rc = file_write(v, r->ino, r->buffer, r->size, r->offset, (int)r->flags | flags);
    if (!rc)
        atomic_fetch_add_explicit(&v->bytes_written, r->size, memory_order_relaxed);
    return rc ? rc : (int64_t)r->size;
}

static int64_t run_write(struct volume *v, struct request *r, bool nowait) { return write_with(v, r, file_flags(nowait)); }

static int64_t run_fsync(struct volume *v, struct request *r, bool nowait)
{
    (void)nowait;
    return v->options.read_only ? 0 : groups_fsync(v->groups, r->ino, r->flags & 1);
}

static int64_t run_fsyncdir(struct volume *v, struct request *r, bool nowait)
{
    (void)nowait;
    return v->options.read_only ? 0 : groups_fsyncdir(v->groups, r->ino);
}

static int64_t run_sync_all(struct volume *v, struct request *r, bool nowait)
{
    (void)r, (void)nowait;
    return v->options.read_only ? 0 : groups_sync_all(v->groups);
}

static int64_t run_punch(struct volume *v, struct request *r, bool nowait)
{
    return file_punch(v, r->ino, r->offset, r->size, file_flags(nowait));
}

static int64_t run_seek(struct volume *v, struct request *r, bool nowait)
{
    return file_seek(v, r->ino, r->offset, (int)r->flags, file_flags(nowait));
}

/* What tells the kernel of a privileged caller for WRITE it does not tell for these: only the superuser keeps set-id bits. */
static int drop_flags(const struct request *r) { return FILE_DIRECT | (r->caller.uid ? FILE_DROP_PRIVILEGES : 0); }

static int64_t run_fallocate(struct volume *v, struct request *r, bool nowait)
{
    return file_fallocate(v, r->ino, r->flags, r->offset, r->size, drop_flags(r) | file_flags(nowait));
}

static int64_t run_copy(struct volume *v, struct request *r, bool nowait)
{
    return file_copy(v, r->ino, r->offset, r->new_parent, r->new_offset, r->size, drop_flags(r) | file_flags(nowait));
}

static int64_t run_statfs(struct volume *v, struct request *r, bool nowait)
{
    struct ns_counts counts = {0};
    uint64_t available, free_bytes, total;
    int rc = ns_statfs(v->ns, &counts, ns_flags(nowait));

    if (!rc)
        rc = space_available(v, &free_bytes, nowait);
    if (!rc)
        rc = blockdir_space(v->dir, &available, &total);
    if (rc)
        return rc;
    r->statfs_blocks = total / NODE_SIZE;
    r->statfs_free = free_bytes / NODE_SIZE;
    r->statfs_inodes = counts.inodes + r->statfs_free;  /* they have no place of their own: one may follow in each free block */
    return 0;
}

/* What an operation waits for, if it cannot be done at once. */
enum waits {
    DISK_READS,                                 /* the disk, or a lock that is held over reads of it: nothing else ever */
    ROOM,                                       /* room in the store or in memory, which may take a group */
    BARRIERS,                                   /* barriers, groups, WRITEs of this process: by its nature, never tried by the caller */
};

static const struct operation {
    run_fn *run;
    enum waits waits;
} OPERATIONS[REQ_OP_COUNT] = {
    [REQ_LOOKUP] = {run_lookup, DISK_READS},
    [REQ_GETATTR] = {run_getattr, DISK_READS},
    [REQ_SETATTR] = {run_setattr, ROOM},
    [REQ_MKNOD] = {run_mknod, ROOM},
    [REQ_MKDIR] = {run_mkdir, ROOM},
    [REQ_SYMLINK] = {run_symlink, ROOM},
    [REQ_READLINK] = {run_readlink, DISK_READS},
    [REQ_LINK] = {run_link, ROOM},
    [REQ_UNLINK] = {run_unlink, ROOM},
    [REQ_RMDIR] = {run_rmdir, ROOM},
    [REQ_RENAME] = {run_rename, ROOM},
    [REQ_READDIR] = {run_readdir, DISK_READS},
    [REQ_SETXATTR] = {run_setxattr, ROOM},
    [REQ_GETXATTR] = {run_getxattr, DISK_READS},
    [REQ_LISTXATTR] = {run_listxattr, DISK_READS},
    [REQ_REMOVEXATTR] = {run_removexattr, ROOM},
    [REQ_READ] = {run_read, DISK_READS},
    [REQ_WRITE] = {run_write, ROOM},
    [REQ_FSYNC] = {run_fsync, BARRIERS},
    [REQ_FSYNCDIR] = {run_fsyncdir, BARRIERS},
    [REQ_SYNC_ALL] = {run_sync_all, BARRIERS},
    [REQ_PUNCH] = {run_punch, ROOM},
    [REQ_SEEK] = {run_seek, BARRIERS},
    [REQ_STATFS] = {run_statfs, DISK_READS},
    [REQ_FALLOCATE] = {run_fallocate, ROOM},
    [REQ_COPY] = {run_copy, ROOM},
    [REQ_TMPFILE] = {run_tmpfile, ROOM},
};

static void queue_completed(struct volume *v, struct request *r)
{
    struct completion_queue *q = &v->completions;
    bool wake;

    r->completed_next = NULL;
    pthread_mutex_lock(&q->mutex);
    wake = q->head == NULL;
    if (wake)
        q->head = r;
    else
        q->tail->completed_next = r;
    q->tail = r;
    if (wake) {
        uint64_t one = 1;
        while (write(q->event_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_unlock(&q->mutex);
}

static void run_parked(struct job *job)
{
    struct request *r = (struct request *)((char *)job - offsetof(struct request, job));
    struct volume *v = r->volume;

    request_carry_out(v, r);
    if (r->completed)
        r->completed(r);
    else
        queue_completed(v, r);
}

bool request_try(struct volume *v, struct request *r)
{
    atomic_fetch_add_explicit(&v->requests, 1, memory_order_relaxed);
    if (r->op == 0 || r->op >= REQ_OP_COUNT) {
        r->result = -ENOSYS;
        return true;
    }
    if (OPERATIONS[r->op].waits == BARRIERS)
        return false;
    r->result = OPERATIONS[r->op].run(v, r, true);
    return r->result != -EAGAIN;
}

bool request_may_wait_for_disk(const struct request *r) { return OPERATIONS[r->op].waits == DISK_READS || r->op == REQ_WRITE; }

bool request_try_disk(struct volume *v, struct request *r)
{
    if (r->op == REQ_WRITE)
        r->result = write_with(v, r, FILE_DISK_ONLY);
    else
        request_carry_out(v, r);
    return r->result != -EAGAIN;
}

void request_carry_out(struct volume *v, struct request *r) { r->result = OPERATIONS[r->op].run(v, r, false); }

void request_park(struct volume *v, struct request *r)
{
    atomic_fetch_add_explicit(&v->parked, 1, memory_order_relaxed);
    r->volume = v;
    r->job = (struct job){.run = run_parked, .class = POOL_APPLICATION};
    workers_submit(OPERATIONS[r->op].waits == BARRIERS ? v->barrier : v->io, &r->job);
}

int request_start(struct volume *v, struct request *r)
{
    if (request_try(v, r))
        return REQUEST_DONE;
    request_park(v, r);
    return REQUEST_PARKED;
}

int request_completion_fd(struct volume *v) { return v->completions.event_fd; }

struct request *request_next_completed(struct volume *v)
{
    struct completion_queue *q = &v->completions;
    struct request *r;

    pthread_mutex_lock(&q->mutex);
    r = q->head;
    if (r)
        q->head = r->completed_next;
    if (!q->head) {
        uint64_t ignored;
        if (read(q->event_fd, &ignored, sizeof ignored) < 0) {
            /* EAGAIN: it was not set */
        }
    }
    pthread_mutex_unlock(&q->mutex);
    return r;
}

/* While a file is being written the kernel knows its size, but blocks only from here. Programs that preserve holes take 0 for "all
 * hole", so it must not be said of an empty file either. */
uint64_t request_st_blocks(const struct attr *attr)
{
    return attr->blocks != 0 || !S_ISREG(attr->mode) ? attr->blocks : 1;
}

struct drop {
    struct job job;
    struct volume *volume;
    uint64_t ino;
};

static void run_drop(struct job *job)
{
    struct drop *drop = (struct drop *)((char *)job - offsetof(struct drop, job));

    ns_forget(drop->volume->ns, drop->ino, 0);
    free(drop);
}

void request_forget(struct volume *v, uint64_t ino, uint64_t lookups)
{
    struct drop *drop;

    if (ns_forget_nowait(v->ns, ino, lookups) == 0)
        return;
    drop = malloc(sizeof *drop);
    if (!drop) {
        ns_forget(v->ns, ino, 0);               /* rather late than never: its object would keep its room */
        return;
    }
    *drop = (struct drop){.job = {.run = run_drop, .class = POOL_BACKGROUND}, .volume = v, .ino = ino};
    workers_submit(v->io, &drop->job);
}

void request_note_writer(struct volume *v, uint64_t ino, int change)
{
    struct inode *inode;

    if (ns_get_inode(v->ns, ino, &inode, 0))
        return;
    pthread_mutex_lock(&inode->lock);
    inode->writers += (uint32_t)change;
    pthread_mutex_unlock(&inode->lock);
    ns_put_inode(v->ns, inode);
}

void request_writers_unknown(struct volume *v) { atomic_store(&v->writers_unknown, true); }

bool volume_pulls_pages(struct volume *v) { return v->groups && groups_pulls_pages(v->groups); }

void volume_set_notify_fd(struct volume *v, int fuse_fd) { atomic_store(&v->notify_fd, fuse_fd); }
