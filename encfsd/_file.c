/* Contents of regular files: in the row while small, in an object of their own afterwards. */
#include "_volume_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint8_t NO_ID[ID_SIZE];

static bool has_object(const struct inode *inode) { return memcmp(inode->object_id, NO_ID, ID_SIZE) != 0; }

/* Inode lock held. */
static void take_object_attr(struct inode *inode)
{
    struct object_attr a;

    object_attr(inode->object, &a);
    inode->attr.size = a.size;
    inode->attr.blocks = ns_blocks(a.size, a.nodes);
}

static void touch(struct inode *inode)
{
    inode->attr.mtime = inode->attr.ctime = clock_realtime_ns();
    inode->attr_dirty = true;
}

/* What somebody who runs an authenticated file system wants to hear of: counted each time, logged once for each inode. Inode lock held. */
static void tell_damage(struct volume *v, struct inode *inode, const char *what)
{
    atomic_fetch_add(&v->damaged_reads, 1);
    if (!inode->damage_told)
        volume_log(v, VOLUME_ERROR, "DAMAGED: inode %llu: %s; find its name with 'find MNT -inum %llu', check all with 'encfsd verify'",
                   (unsigned long long)inode->ino, what, (unsigned long long)inode->ino);
    inode->damage_told = true;
}

/* The epoch in which the object became active, if that was before this mount and it has not been recovered; else 0. */
static uint64_t active_epoch_of(const struct volume *v, uint64_t ino)
{
    for (size_t i = 0; i < v->active_row_count; i++)
        if (v->active_rows[i].ino == ino)
            return v->active_rows[i].active_epoch;
    return 0;
}

/* Opening and creating wait for the disk, which must not be done under an inode's lock: whoever only wants its attributes would wait,
 * too, even while holding the namespace mutex. So it is done under one of these. Comes before inode locks. */
static pthread_mutex_t *opening_lock(struct volume *v, const struct inode *inode) { return &v->opening[inode->ino % OPENING_LOCKS]; }

/* Inode lock held; let go until the opening lock is held, too. */
static void begin_opening(struct volume *v, struct inode *inode)
{
    pthread_mutex_unlock(&inode->lock);
    pthread_mutex_lock(opening_lock(v, inode));
    pthread_mutex_lock(&inode->lock);
}

static void end_opening(struct volume *v, struct inode *inode) { pthread_mutex_unlock(opening_lock(v, inode)); }

/* Opening lock and inode lock held; the latter is let go meanwhile. Nobody else changes id and record of an inode whose object is closed. */
static int open_recorded(struct volume *v, struct inode *inode)
{
    uint64_t active_epoch = active_epoch_of(v, inode->ino);
    struct object_record adopted, record = inode->record;
    struct object *o;
    int rc;

    if (active_epoch && !v->options.read_only)
        return -EIO;
    rc = inode_need_work(inode);
    if (rc)
        return rc;
    pthread_mutex_unlock(&inode->lock);
    if (active_epoch)
        rc = object_recover(&o, &v->env, inode->object_id, &record, active_epoch, &adopted);
    else
        rc = object_open(&o, &v->env, inode->object_id, &record);
    pthread_mutex_lock(&inode->lock);
    if (rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
        return rc;
    if (rc) {
        tell_damage(v, inode, rc == -ENOENT ? "its backing file is missing" : "its backing file is damaged or replaced");
        return -EIO;
    }
    inode->object = o;
    if (active_epoch) {
        take_object_attr(inode);
    } else {
        object_pin_root(o, &record);
        inode->work->pin = record;
        inode->work->pinned = true;
    }
    return 0;
}

/* Opens the object at the recorded root. Inode lock held; let go meanwhile. Blocks. */
static int open_object(struct volume *v, struct inode *inode)
{
    int rc = 0;

    begin_opening(v, inode);
    if (!inode->object)
        rc = open_recorded(v, inode);
    end_opening(v, inode);
    return rc;
}

/* What an operation wants of a file. */
enum want {
    LAYOUT,                                     /* where its contents lie */
    CONTENTS,                                   /* to read them */
    CHANGE,                                     /* to change them */
};

/* Each open object has a descriptor: before there are too many, idle ones are closed, and if all are dirty a group makes them idle. Who
 * only reads does not wait for that: an object opened for it is idle as soon as it has been used, so that there are too many by as many
 * as there are threads at most. Inode lock held; let go meanwhile, because closing takes the namespace mutex and inode locks. */
static void room_for_object(struct volume *v, struct inode *inode, enum want want)
{
    if (atomic_load(&v->env.open_objects) < v->max_open_objects)
        return;
    pthread_mutex_unlock(&inode->lock);
    file_close_idle_objects(v);
    if (want == CHANGE && atomic_load(&v->env.open_objects) >= v->max_open_objects) {
        groups_reclaim_space(v->groups);
        file_close_idle_objects(v);
    }
    pthread_mutex_lock(&inode->lock);
}

/* The inode and, locked, its contents. On success the inode is referenced and its lock held. */
static int acquire(struct volume *v, uint64_t ino, struct inode **inode, enum want want, int flags)
{
    int ns_flags = flags & FILE_NOWAIT ? NS_NOWAIT : 0;
    int rc = ns_get_inode(v->ns, ino, inode, ns_flags);

    if (rc)
        return rc;
    pthread_mutex_lock(&(*inode)->lock);
    if (S_ISDIR((*inode)->attr.mode))
        rc = -EISDIR;
    else if (!S_ISREG((*inode)->attr.mode))
        rc = -EINVAL;
    else if (want != LAYOUT && !has_object(*inode) && !(*inode)->content) {
        /* The row is read under the namespace mutex, which comes before inode locks. */
        pthread_mutex_unlock(&(*inode)->lock);
        rc = ns_lock(v->ns, ns_flags);
        pthread_mutex_lock(&(*inode)->lock);
        if (!rc) {
            if (!has_object(*inode) && !(*inode)->content)
                rc = ns_load_content(v->ns, *inode);
            ns_unlock(v->ns);
        }
    }
    if (!rc && has_object(*inode) && !(*inode)->object) {
        if (!(flags & FILE_NOWAIT))
            room_for_object(v, *inode, want);
        rc = flags & FILE_NOWAIT ? -EAGAIN : open_object(v, *inode);
    }
    if (rc) {
        pthread_mutex_unlock(&(*inode)->lock);
        ns_put_inode(v->ns, *inode);
    }
    return rc;
}

static void release(struct volume *v, struct inode *inode)
{
    pthread_mutex_unlock(&inode->lock);
    ns_put_inode(v->ns, inode);
}

/* Lends the open object to the caller, without the inode lock. */
static struct object *lend(struct inode *inode)
{
    struct object *o = inode->object;

    inode->work->object_users++;
    pthread_mutex_unlock(&inode->lock);
    return o;
}

static void give_back(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    inode->work->object_users--;
}

void file_write_back(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    if (inode->object) {
        object_write_back(lend(inode), SIZE_MAX);
        give_back(inode);
    }
    pthread_mutex_unlock(&inode->lock);
}

int file_object(struct volume *v, struct inode *inode, struct object **object)
{
    int rc = 0;

    pthread_mutex_lock(&inode->lock);
    if (has_object(inode) && !inode->object)
        rc = open_object(v, inode);
    *object = rc ? NULL : inode->object;
    pthread_mutex_unlock(&inode->lock);
    return rc;
}

/* What an application may be told: an errno that only the backing directory explains would mislead it. */
static int told_error(int error)
{
    switch (error) {
    case 0: case -EAGAIN: case -ENOSPC: case -EDQUOT: case -EFBIG: case -ENOMEM: case -EROFS: case -EISDIR: case -EINVAL: case -ENOENT:
        return error;
    default:
        return -EIO;
    }
}

ssize_t file_read(struct volume *v, uint64_t ino, void *buffer, size_t size, uint64_t offset, int flags)
{
    struct inode *inode;
    ssize_t n = acquire(v, ino, &inode, CONTENTS, flags);

    if (n)
        return told_error((int)n);
    if (has_object(inode)) {
        struct object *o = lend(inode);
        /* Once, if the kernel's page cache keeps it. */
        n = object_read(o, buffer, size, offset, (flags & FILE_DIRECT ? 0 : OBJECT_ONCE) | (flags & FILE_NOWAIT ? OBJECT_NOWAIT : 0));
        give_back(inode);
        if (n == -EIO && !object_poisoned(o))
            tell_damage(v, inode, "contents that are not authentic were read");
    } else if (offset < inode->attr.size) {
        n = (ssize_t)(size < inode->attr.size - offset ? size : inode->attr.size - offset);
        memcpy(buffer, inode->content + offset, (size_t)n);
    }
    release(v, inode);
    return n < 0 ? told_error((int)n) : n;
}

/* Opening lock held, inode lock not. An object under a fresh id, without contents. */
static int create_object(struct volume *v, uint8_t id[ID_SIZE], struct object **o)
{
    int rc = random_bytes(id, ID_SIZE);
    return rc ? rc : object_create(o, &v->env, id);
}

/* Copies the contents of the row. Inode lock held: so it does not wait, unless there is no room for dirty nodes. */
static int fill_object(struct object *o, const struct inode *inode)
{
    int rc = inode->attr.size ? object_write(o, inode->content, inode->attr.size, 0, OBJECT_NOWAIT) : 0;
    return rc == -EAGAIN ? object_write(o, inode->content, inode->attr.size, 0, 0) : rc;
}

/* Opening lock and inode lock held; the latter is let go meanwhile. */
static int leave_row(struct volume *v, struct inode *inode)
{
    uint8_t id[ID_SIZE];
    struct object *o;
    int rc = inode_need_work(inode);

    if (rc)
        return rc;
    pthread_mutex_unlock(&inode->lock);
    rc = create_object(v, id, &o);
    pthread_mutex_lock(&inode->lock);
    if (rc)
        return rc;
    rc = fill_object(o, inode);
    if (rc) {
        object_close(o);
        blockdir_remove(v->dir, id);
        return rc;
    }
    memcpy(inode->object_id, id, ID_SIZE);
    inode->object = o;
    inode->has_record = false;
    free(inode->content);
    inode->content = NULL;
    inode->content_dirty = false;
    return 0;
}

/* Moves the contents of the row into a new object. The row keeps them until the object has a durable record. Inode lock held; let go
 * meanwhile. */
static int move_to_object(struct volume *v, struct inode *inode)
{
    int rc = 0;

    room_for_object(v, inode, CHANGE);
    begin_opening(v, inode);
    if (!has_object(inode))                     /* else somebody was faster */
        rc = leave_row(v, inode);
    else if (!inode->object)
        rc = open_recorded(v, inode);
    end_opening(v, inode);
    return rc;
}

/* The next full group will write the contents into the row; until then they need room. */
static void set_content_dirty(struct volume *v, struct inode *inode)
{
    if (!inode->content_dirty)
        space_owe_row(v);
    inode->content_dirty = true;
}

static int write_inline(struct volume *v, struct inode *inode, const void *buffer, size_t size, uint64_t offset)
{
    if (!inode->content) {
        inode->content = calloc(1, INLINE_MAX);
        if (!inode->content)
            return -ENOMEM;
    }
    memcpy(inode->content + offset, buffer, size);
    if (offset + size > inode->attr.size)
        inode->attr.size = offset + size;
    inode->attr.blocks = ns_blocks(inode->attr.size, 0);
    set_content_dirty(v, inode);
    return 0;
}

/* Inode lock held. */
static void add_lost(struct inode *inode, uint64_t first, uint64_t last, int error)
{
    struct inode_work *work;
    bool none;

    if (inode_need_work(inode)) {
        inode->lost_whole = true;
        return;
    }
    work = inode->work;
    none = work->lost_first >= work->lost_last;
    if (none || first < work->lost_first)
        work->lost_first = first;
    if (none || last > work->lost_last)
        work->lost_last = last;
    work->lost_error = error;
}

/* A WRITE of the kernel's that fails leaves pages in its cache that look written: one fsync reports that, the next would not, and reads
 * show what is not stored until the pages go. So the range is remembered until it is written or cut off, fsync goes on failing
 * meanwhile, and the next group has the pages dropped. */
static void note_lost(struct volume *v, uint64_t ino, uint64_t first, uint64_t last, int error)
{
    struct inode *inode;
    bool told;

    if (ns_get_inode(v->ns, ino, &inode, 0))
        return;
    pthread_mutex_lock(&inode->lock);
    told = inode_lost(inode) != 0;
    add_lost(inode, first, last, error);
    inode->pages_stale = true;
    if (!told)
        volume_log(v, VOLUME_ERROR, "inode %llu: contents could not be stored: %s; fsync fails until they are written again",
                   (unsigned long long)ino, strerror(-error));
    groups_dirtied(v->groups, inode);
    pthread_mutex_unlock(&inode->lock);
    ns_put_inode(v->ns, inode);
    groups_hurry(v->groups);
}

/* Bytes [first, last) are stored, or gone: what is lost of the range is what lies outside of them. Inode lock held. */
static void forget_lost(struct inode *inode, uint64_t first, uint64_t last)
{
    struct inode_work *work = inode->work;

    if (first == 0 && last == UINT64_MAX)
        inode->lost_whole = false;
    if (!work)
        return;
    if (first <= work->lost_first && last > work->lost_first)
        work->lost_first = last < work->lost_last ? last : work->lost_last;
    else if (first < work->lost_last && last >= work->lost_last)
        work->lost_last = first;
}

static bool is_loss(int rc) { return rc == -ENOSPC || rc == -EIO || rc == -ENOMEM || rc == -EDQUOT || rc == -EFBIG; }

static int write_contents(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags)
{
    const int object_flags = flags & FILE_NOWAIT ? OBJECT_NOWAIT : flags & FILE_DISK_ONLY ? 0 : OBJECT_QUEUE;
    const bool nowait = flags & (FILE_NOWAIT | FILE_DISK_ONLY);
    struct inode *inode;
    int rc = space_reserve(v, size, nowait);
    if (!rc)
        rc = acquire(v, ino, &inode, CHANGE, nowait ? FILE_NOWAIT : 0);
    if (rc)
        return rc;
    if (!has_object(inode) && offset + size > INLINE_MAX)
        rc = nowait ? -EAGAIN : move_to_object(v, inode);
    if (!rc && has_object(inode)) {
        struct object *o = lend(inode);
        rc = object_write(o, buffer, size, offset, object_flags);
        give_back(inode);
        if (!rc)
            take_object_attr(inode);
    } else if (!rc) {
        rc = write_inline(v, inode, buffer, size, offset);
    }
    if (!rc) {
        touch(inode);
        forget_lost(inode, offset, offset + size);
        groups_dirtied(v->groups, inode);
    }
    release(v, inode);
    return rc;
}

/* What a change of contents takes from a file, before it: so that nobody sees the new contents with the old privileges. Coming again
 * after it costs nothing. The kernel leaves that to us, but goes by the mode that it knows: so it must ask again before the change is
 * answered, or a program that somebody else has written to would still run with the owner's rights. */
static int drop_privileges(struct volume *v, uint64_t ino, int flags)
{
    bool dropped;
    int rc;

    if (!(flags & (FILE_DIRECT | FILE_DROP_PRIVILEGES)))
        return 0;
    rc = ns_drop_privileges(v->ns, ino, !(flags & FILE_DROP_PRIVILEGES), &dropped,
                            flags & (FILE_NOWAIT | FILE_DISK_ONLY) ? NS_NOWAIT : 0);
    if (!rc && dropped)
        rc = notify_inode(v, ino, NOTIFY_ATTRIBUTES);
    return rc;
}

int file_write(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags)
{
    int rc;

    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (size == 0)
        return 0;
    if (offset > OBJECT_MAX_SIZE - size)
        return -EFBIG;
    rc = drop_privileges(v, ino, flags);
    if (!rc)
        rc = write_contents(v, ino, buffer, size, offset, flags);
    rc = told_error(rc);
    if (!(flags & FILE_DIRECT) && is_loss(rc))
        note_lost(v, ino, offset, offset + size, rc);
    if (!rc && atomic_load(&v->env.dirty_nodes) > v->env.dirty_limit / 2)
        groups_hurry(v->groups);
    return rc;
}

/* Inode lock held. 0 or -ENOMEM. */
static int resize_inline(struct volume *v, struct inode *inode, uint64_t size)
{
    if (!inode->content && size) {
        inode->content = calloc(1, INLINE_MAX);
        if (!inode->content)
            return -ENOMEM;
    }
    if (inode->content && size < inode->attr.size)
        memset(inode->content + size, 0, inode->attr.size - size);
    inode->attr.size = size;
    inode->attr.blocks = ns_blocks(size, 0);
    set_content_dirty(v, inode);
    return 0;
}

/* Inode lock held. */
static void punch_inline(struct volume *v, struct inode *inode, uint64_t offset, uint64_t end)
{
    if (offset >= inode->attr.size || !inode->content)
        return;
    memset(inode->content + offset, 0, (end < inode->attr.size ? end : inode->attr.size) - offset);
    set_content_dirty(v, inode);
}

int file_truncate(struct volume *v, uint64_t ino, uint64_t size, struct attr *out, int flags)
{
    struct inode *inode;
    int rc;

    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (size > OBJECT_MAX_SIZE)
        return -EFBIG;
    rc = drop_privileges(v, ino, flags | FILE_DIRECT);
    if (!rc)
        rc = acquire(v, ino, &inode, CHANGE, flags);
    if (rc)
        return rc;
    if (!has_object(inode) && size > INLINE_MAX)
        rc = flags & FILE_NOWAIT ? -EAGAIN : move_to_object(v, inode);
    if (!rc && has_object(inode)) {
        struct object *o = lend(inode);
        rc = object_truncate(o, size, flags & FILE_NOWAIT ? OBJECT_NOWAIT : OBJECT_QUEUE);
        give_back(inode);
        if (!rc)
            take_object_attr(inode);
    } else if (!rc) {
        rc = resize_inline(v, inode, size);
    }
    if (!rc) {
        touch(inode);
        forget_lost(inode, size, UINT64_MAX);
        *out = inode->attr;
        groups_dirtied(v->groups, inode);
    }
    release(v, inode);
    return rc;
}

/* Makes [offset, end) zeros, and the file at least `size` long. Not in one step for who reads meanwhile. */
static int zero_range(struct volume *v, uint64_t ino, uint64_t offset, uint64_t end, uint64_t size, int flags)
{
    const int object_flags = flags & FILE_NOWAIT ? OBJECT_NOWAIT : OBJECT_QUEUE;
    struct inode *inode;
    int rc = acquire(v, ino, &inode, CHANGE, flags);
    bool punched = false;

    if (rc)
        return rc;
    if (!has_object(inode) && size > INLINE_MAX)
        rc = flags & FILE_NOWAIT ? -EAGAIN : move_to_object(v, inode);
    if (!rc && has_object(inode)) {
        struct object *o = lend(inode);
        if (offset < end)
            rc = object_punch(o, offset, end - offset, object_flags);
        punched = !rc;
        if (!rc && size)
            rc = object_extend(o, size, object_flags);
        give_back(inode);
        take_object_attr(inode);
    } else if (!rc) {
        if (size > inode->attr.size)
            rc = resize_inline(v, inode, size);
        if (!rc)
            punch_inline(v, inode, offset, end);
    }
    if (!rc || punched) {               /* groups must know of a change, even if what was to follow it failed */
        touch(inode);
        forget_lost(inode, offset, end);
        groups_dirtied(v->groups, inode);
    }
    release(v, inode);
    return rc;
}

int file_punch(struct volume *v, uint64_t ino, uint64_t offset, uint64_t size, int flags)
{
    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (size == 0 || offset > OBJECT_MAX_SIZE - size)
        return -EINVAL;
    return told_error(zero_range(v, ino, offset, offset + size, 0, flags));
}

/* Bytes of [offset, end) that may have no room yet. A file without holes has it for all that it contains. */
static int missing_room(struct volume *v, uint64_t ino, uint64_t offset, uint64_t end, int flags, uint64_t *bytes)
{
    struct inode *inode;
    int rc = acquire(v, ino, &inode, LAYOUT, flags);

    if (rc)
        return rc;
    bool whole = !has_object(inode) || inode->attr.blocks >= (inode->attr.size + NODE_SIZE - 1) / NODE_SIZE * (NODE_SIZE / 512);
    uint64_t from = whole && inode->attr.size > offset ? inode->attr.size : offset;
    *bytes = end > from ? end - from : 0;
    release(v, inode);
    return 0;
}

static int allocate(struct volume *v, uint64_t ino, uint32_t mode, uint64_t offset, uint64_t size, int flags)
{
    const bool zero = mode & FALLOC_FL_ZERO_RANGE, punch = mode & FALLOC_FL_PUNCH_HOLE, keep = mode & FALLOC_FL_KEEP_SIZE;
    uint64_t end = offset + size, bytes = 0;
    int rc = drop_privileges(v, ino, flags);

    if (!rc && !punch)
        rc = missing_room(v, ino, offset, end, flags, &bytes);
    if (!rc && bytes)
        rc = space_reserve(v, bytes, flags & FILE_NOWAIT);
    if (!rc && zero && !keep && (flags & FILE_NOWAIT))
        rc = -EAGAIN;                           /* two steps */
    return rc ? rc : zero_range(v, ino, offset, zero || punch ? end : offset, keep ? 0 : end, flags);
}

int file_fallocate(struct volume *v, uint64_t ino, uint32_t mode, uint64_t offset, uint64_t size, int flags)
{
    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    switch (mode) {
    case 0: case FALLOC_FL_KEEP_SIZE: case FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE:
    case FALLOC_FL_ZERO_RANGE: case FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE:
        break;
    default:
        return -EOPNOTSUPP;
    }
    if (size == 0)
        return -EINVAL;
    if (size > OBJECT_MAX_SIZE || offset > OBJECT_MAX_SIZE - size)
        return -EFBIG;
    return told_error(allocate(v, ino, mode, offset, size, flags));
}

/* Where data or a hole begins in what has been written so far. */
static int64_t seek_contents(struct volume *v, uint64_t ino, uint64_t offset, int whence)
{
    struct inode *inode;
    int64_t at = acquire(v, ino, &inode, LAYOUT, 0);

    if (at)
        return at;
    if (has_object(inode)) {
        struct object *o = lend(inode);
        at = object_seek(o, offset, whence);
        give_back(inode);
    } else if (offset >= inode->attr.size) {
        at = -ENXIO;
    } else {
        at = whence == SEEK_HOLE ? (int64_t)inode->attr.size : (int64_t)offset;
    }
    release(v, inode);
    return at;
}

int64_t file_seek(struct volume *v, uint64_t ino, uint64_t offset, int whence, int flags)
{
    struct inode *inode;
    int rc;

    if (whence != SEEK_DATA && whence != SEEK_HOLE)
        return -EINVAL;
    if (offset > OBJECT_MAX_SIZE)
        return -ENXIO;
    if (flags & FILE_NOWAIT)
        return -EAGAIN;
    if (v->groups) {                            /* else nothing was ever written */
        rc = ns_get_inode(v->ns, ino, &inode, 0);
        if (rc)
            return rc;
        groups_pull_from(v->groups, inode, offset);
        ns_put_inode(v->ns, inode);
    }
    return seek_contents(v, ino, offset, whence);
}

/* ---- copy_file_range: piece by piece, so that never more than one inode is locked ---- */

enum { COPY_PIECE = 1 << 20 };                  /* bytes in memory */

struct copy {
    struct volume *v;
    uint64_t from, from_offset, to, to_offset;
    uint8_t *buffer;                            /* COPY_PIECE bytes, or as many as are to be copied */
};

static int size_of(struct volume *v, uint64_t ino, uint64_t *size)
{
    struct inode *inode;
    int rc = acquire(v, ino, &inode, LAYOUT, 0);

    if (rc)
        return rc;
    *size = inode->attr.size;
    release(v, inode);
    return 0;
}

/* Copies data or a hole at `done`, at most `size` bytes. Returns how many, 0 at the end of the source, or -errno. */
static int64_t copy_piece(struct copy *c, uint64_t done, uint64_t size)
{
    uint64_t from = c->from_offset + done, to = c->to_offset + done, end;
    int64_t data = seek_contents(c->v, c->from, from, SEEK_DATA), rc = 0;

    if (data == -ENXIO) {                       /* a hole up to the end, or the end */
        rc = size_of(c->v, c->from, &end);
        if (rc || end <= from)
            return rc;
        data = (int64_t)end;
    } else if (data < 0) {
        return data;
    }
    if ((uint64_t)data > from) {
        if ((uint64_t)data - from < size)
            size = (uint64_t)data - from;
        rc = zero_range(c->v, c->to, to, to + size, to + size, 0);
        return rc ? rc : (int64_t)size;
    }
    int64_t hole = seek_contents(c->v, c->from, from, SEEK_HOLE);
    if (hole > (int64_t)from && (uint64_t)hole - from < size)
        size = (uint64_t)hole - from;
    int64_t n = file_read(c->v, c->from, c->buffer, size < COPY_PIECE ? size : COPY_PIECE, from, 0);
    if (n > 0)
        rc = write_contents(c->v, c->to, c->buffer, (size_t)n, to, 0);
    return rc ? rc : n;
}

static int64_t copy(struct copy *c, uint64_t size)
{
    uint64_t done = 0;
    int64_t n = 1;

    while (done < size && n > 0) {
        n = copy_piece(c, done, size - done);
        if (n > 0)
            done += (uint64_t)n;
    }
    return done ? (int64_t)done : n < 0 ? told_error((int)n) : 0;
}

int64_t file_copy(struct volume *v, uint64_t from, uint64_t from_offset, uint64_t to, uint64_t to_offset, uint64_t size, int flags)
{
    struct copy c = {.v = v, .from = from, .from_offset = from_offset, .to = to, .to_offset = to_offset};
    uint64_t source, target;
    int64_t n;

    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (flags & FILE_NOWAIT)
        return -EAGAIN;
    n = size_of(v, from, &source);
    if (!n)
        n = size_of(v, to, &target);            /* a file at all? */
    if (n || from_offset >= source)
        return n;
    if (size > source - from_offset)
        size = source - from_offset;
    if (from == to && from_offset < to_offset + size && to_offset < from_offset + size)
        return -EINVAL;
    if (size > FILE_COPY_MAX)
        size = FILE_COPY_MAX;
    if (to_offset > OBJECT_MAX_SIZE - size)
        return -EFBIG;
    c.buffer = malloc(size < COPY_PIECE ? size : COPY_PIECE);
    if (!c.buffer)
        return -ENOMEM;
    n = drop_privileges(v, to, flags);
    if (!n)
        n = copy(&c, size);
    free(c.buffer);
    return n;
}

struct sweep {
    struct volume *volume;
    uint64_t target;
};

static void close_if_idle(void *arg, struct inode *inode)
{
    struct sweep *sweep = arg;
    struct object *o = NULL;

    if (atomic_load(&sweep->volume->env.open_objects) <= sweep->target || pthread_mutex_trylock(&inode->lock)) {
        ns_put_inode(sweep->volume->ns, inode);
        return;
    }
    bool recorded = inode->object && inode->has_record && !object_is_dirty(inode->object);
    if (inode->object && !recorded && inode->deleted && sweep->volume->groups)
        groups_dirtied(sweep->volume->groups, inode);           /* the next full group commits it for its descriptor's sake */
    if (recorded && inode->work->object_users == 0 &&
        (!sweep->volume->groups || groups_idle(sweep->volume->groups, inode))) {
        o = inode->object;
        inode->object = NULL;
        inode_end_work(inode);
    }
    pthread_mutex_unlock(&inode->lock);
    if (o)
        object_close(o);
    ns_put_inode(sweep->volume->ns, inode);
}

void file_close_idle_objects(struct volume *v)
{
    struct sweep sweep = {v, v->max_open_objects - v->max_open_objects / 4};

    inode_for_each(v->inodes, close_if_idle, &sweep);
}
