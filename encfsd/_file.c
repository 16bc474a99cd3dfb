/* Contents of regular files: in the row while small, in an object of their own afterwards. */
#include "_volume_internal.h"

#include <errno.h>
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
        volume_log(v, "DAMAGED: inode %llu: %s; find its name with 'find MNT -inum %llu', check all with 'encfsd verify'",
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

/* Opens the object at the recorded root. Inode lock held; blocks. */
static int open_object(struct volume *v, struct inode *inode)
{
    uint64_t active_epoch = active_epoch_of(v, inode->ino);
    struct object_record adopted;
    int rc;

    if (inode->object)
        return 0;
    if (active_epoch && !v->options.read_only)
        return -EIO;
    if (active_epoch)
        rc = object_recover(&inode->object, &v->env, inode->object_id, &inode->record, active_epoch, &adopted);
    else
        rc = object_open(&inode->object, &v->env, inode->object_id, &inode->record);
    if (rc) {
        inode->object = NULL;
        if (rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
            return rc;
        tell_damage(v, inode, rc == -ENOENT ? "its backing file is missing" : "its backing file is damaged or replaced");
        return -EIO;
    }
    if (active_epoch) {
        take_object_attr(inode);
    } else {
        object_pin_root(inode->object, &inode->record);
        inode->pin = inode->record;
        inode->pinned = true;
    }
    return 0;
}

/* Each open object has a descriptor: before there are too many, idle ones are closed, and if all are dirty a group makes them idle. Inode
 * lock held; let go meanwhile, because that takes the namespace mutex and inode locks. */
static void room_for_object(struct volume *v, struct inode *inode)
{
    if (atomic_load(&v->env.open_objects) < v->max_open_objects)
        return;
    pthread_mutex_unlock(&inode->lock);
    file_close_idle_objects(v);
    if (atomic_load(&v->env.open_objects) >= v->max_open_objects && v->groups) {
        groups_reclaim_space(v->groups);
        file_close_idle_objects(v);
    }
    pthread_mutex_lock(&inode->lock);
}

/* The inode and, locked, its contents. On success the inode is referenced and its lock held. */
static int acquire(struct volume *v, uint64_t ino, struct inode **inode, bool need_content, int flags)
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
    else if (need_content && !has_object(*inode) && !(*inode)->content) {
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
            room_for_object(v, *inode);
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

    inode->object_users++;
    pthread_mutex_unlock(&inode->lock);
    return o;
}

static void give_back(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    inode->object_users--;
}

int file_object(struct volume *v, struct inode *inode, struct object **object)
{
    int rc = 0;

    pthread_mutex_lock(&inode->lock);
    if (has_object(inode))
        rc = open_object(v, inode);
    *object = rc ? NULL : inode->object;
    pthread_mutex_unlock(&inode->lock);
    return rc;
}

ssize_t file_read(struct volume *v, uint64_t ino, void *buffer, size_t size, uint64_t offset, int flags)
{
    struct inode *inode;
    ssize_t n = acquire(v, ino, &inode, true, flags);

    if (n)
        return n;
    if (has_object(inode)) {
        struct object *o = lend(inode);
        n = object_read(o, buffer, size, offset, flags & FILE_NOWAIT ? OBJECT_NOWAIT : 0);
        give_back(inode);
        if (n == -EIO && !object_poisoned(o))
            tell_damage(v, inode, "contents that are not authentic were read");
    } else if (offset < inode->attr.size) {
        n = (ssize_t)(size < inode->attr.size - offset ? size : inode->attr.size - offset);
        memcpy(buffer, inode->content + offset, (size_t)n);
    }
    release(v, inode);
    return n;
}

/* Moves the contents of the row into a new object. The row keeps them until the object has a durable record. Inode lock held. */
static int move_to_object(struct volume *v, struct inode *inode)
{
    uint8_t id[ID_SIZE];
    struct object *o;
    int rc;

    room_for_object(v, inode);
    if (has_object(inode))                      /* somebody else was faster */
        return open_object(v, inode);
    rc = random_bytes(id, ID_SIZE);
    if (!rc)
        rc = object_create(&o, &v->env, id);
    if (rc)
        return rc;
    if (inode->attr.size)
        rc = object_write(o, inode->content, inode->attr.size, 0, 0);
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
    told = inode->lost_first < inode->lost_last;
    if (!told || first < inode->lost_first)
        inode->lost_first = first;
    if (!told || last > inode->lost_last)
        inode->lost_last = last;
    inode->lost_error = error;
    inode->pages_stale = true;
    if (!told)
        volume_log(v, "inode %llu: contents could not be stored: %s; fsync fails until they are written again",
                   (unsigned long long)ino, strerror(-error));
    groups_dirtied(v->groups, inode);
    pthread_mutex_unlock(&inode->lock);
    ns_put_inode(v->ns, inode);
    groups_hurry(v->groups);
}

/* Bytes [first, last) are stored, or gone: what is lost of the range is what lies outside of them. Inode lock held. */
static void forget_lost(struct inode *inode, uint64_t first, uint64_t last)
{
    if (first <= inode->lost_first && last > inode->lost_first)
        inode->lost_first = last < inode->lost_last ? last : inode->lost_last;
    else if (first < inode->lost_last && last >= inode->lost_last)
        inode->lost_last = first;
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

static int write_contents(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags)
{
    struct inode *inode;
    int rc = space_reserve(v, size, flags & FILE_NOWAIT);
    if (!rc)
        rc = acquire(v, ino, &inode, true, flags);
    if (rc)
        return rc;
    if (!has_object(inode) && offset + size > INLINE_MAX)
        rc = flags & FILE_NOWAIT ? -EAGAIN : move_to_object(v, inode);
    if (!rc && has_object(inode)) {
        struct object *o = lend(inode);
        rc = object_write(o, buffer, size, offset, flags & FILE_NOWAIT ? OBJECT_NOWAIT : 0);
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

int file_write(struct volume *v, uint64_t ino, const void *buffer, size_t size, uint64_t offset, int flags)
{
    int rc;

    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (size == 0)
        return 0;
    if (offset > OBJECT_MAX_SIZE - size)
        return -EFBIG;
    rc = told_error(write_contents(v, ino, buffer, size, offset, flags));
    if (rc == -ENOSPC || rc == -EIO || rc == -ENOMEM || rc == -EDQUOT || rc == -EFBIG)
        note_lost(v, ino, offset, offset + size, rc);
    if (!rc && atomic_load(&v->env.dirty_nodes) > v->env.dirty_limit / 2)
        groups_hurry(v->groups);
    return rc;
}

static void truncate_inline(struct volume *v, struct inode *inode, uint64_t size)
{
    if (inode->content && size < inode->attr.size)
        memset(inode->content + size, 0, inode->attr.size - size);
    inode->attr.size = size;
    inode->attr.blocks = ns_blocks(size, 0);
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
    rc = acquire(v, ino, &inode, true, flags);
    if (rc)
        return rc;
    if (!has_object(inode) && size > INLINE_MAX)
        rc = flags & FILE_NOWAIT ? -EAGAIN : move_to_object(v, inode);
    if (!rc && has_object(inode)) {
        struct object *o = lend(inode);
        rc = object_truncate(o, size, flags & FILE_NOWAIT ? OBJECT_NOWAIT : 0);
        give_back(inode);
        if (!rc)
            take_object_attr(inode);
    } else if (!rc) {
        if (!inode->content && size) {
            inode->content = calloc(1, INLINE_MAX);
            rc = inode->content ? 0 : -ENOMEM;
        }
        if (!rc)
            truncate_inline(v, inode, size);
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

int file_punch(struct volume *v, uint64_t ino, uint64_t offset, uint64_t size, int flags)
{
    struct inode *inode;
    int rc;

    if (v->options.read_only || groups_failed(v->groups))
        return -EROFS;
    if (size == 0 || offset > OBJECT_MAX_SIZE - size)
        return -EINVAL;
    rc = acquire(v, ino, &inode, true, flags);
    if (rc)
        return rc;
    if (has_object(inode)) {
        struct object *o = lend(inode);
        rc = object_punch(o, offset, size, flags & FILE_NOWAIT ? OBJECT_NOWAIT : 0);
        give_back(inode);
        if (!rc)
            take_object_attr(inode);
    } else if (offset < inode->attr.size && inode->content) {
        uint64_t end = offset + size < inode->attr.size ? offset + size : inode->attr.size;
        memset(inode->content + offset, 0, end - offset);
        set_content_dirty(v, inode);
    }
    if (!rc) {
        touch(inode);
        groups_dirtied(v->groups, inode);
    }
    release(v, inode);
    return rc;
}

int64_t file_seek(struct volume *v, uint64_t ino, uint64_t offset, int whence, int flags)
{
    struct inode *inode;
    int64_t at = acquire(v, ino, &inode, false, flags);

    if (at)
        return at;
    if (has_object(inode) && (flags & FILE_NOWAIT)) {
        at = -EAGAIN;                           /* may have to load tree nodes */
    } else if (has_object(inode)) {
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
    if (inode->object && inode->object_users == 0 && inode->has_record && !object_is_dirty(inode->object) &&
        (!sweep->volume->groups || groups_idle(sweep->volume->groups, inode))) {
        o = inode->object;
        inode->object = NULL;
        inode->pinned = false;
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
