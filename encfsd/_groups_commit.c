/* Commits of objects, alone or in a group. One of an object at a time. */
#include "_groups_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

/* Has the kernel hand over its dirty pages from `offset` on and drop all pages from there. It sends WRITEs that other threads of this
 * process answer, so no lock is held here. */
static void pull(struct groups *g, struct inode *inode, uint64_t offset)
{
    int rc;

    pthread_mutex_lock(&g->mutex);
    g->pulling++;                               /* before the descriptor is read: who takes it away looks at this afterwards */
    pthread_mutex_unlock(&g->mutex);
    rc = notify_inode(g->v, inode->ino, (int64_t)offset);
    pthread_mutex_lock(&g->mutex);
    g->pulling--;
    pthread_mutex_unlock(&g->mutex);
    if (rc < 0)
        volume_log(g->v, VOLUME_WARNING, "inode %llu: the kernel did not hand over its dirty pages: %s",
                   (unsigned long long)inode->ino, strerror(-rc));
}

/* The kernel may hold dirty pages that this process has not seen. */
static bool may_be_written(struct groups *g, struct inode *inode)
{
    uint32_t writers;

    pthread_mutex_lock(&inode->lock);
    writers = inode->writers;
    pthread_mutex_unlock(&inode->lock);
    return writers > 0 || atomic_load(&g->v->writers_unknown);
}

/* So that a rename never becomes durable before the contents it publishes. */
void groups_pull_pages(struct groups *g, struct inode *inode, bool without_writers)
{
    if (atomic_load(&g->v->notify_fd) < 0 || (!without_writers && !may_be_written(g, inode)))
        return;
    pthread_mutex_lock(&g->mutex);
    g->waiting_for_kernel = true;
    pthread_cond_broadcast(&g->progress);       /* WRITEs that wait for space: what the kernel waits for may be one of them */
    pthread_mutex_unlock(&g->mutex);
    pull(g, inode, 0);
    pthread_mutex_lock(&g->mutex);
    g->waiting_for_kernel = false;
    pthread_mutex_unlock(&g->mutex);
}

bool groups_pulls_pages(struct groups *g)
{
    pthread_mutex_lock(&g->mutex);
    bool pulls = g->pulling > 0;
    pthread_mutex_unlock(&g->mutex);
    return pulls;
}

/* No group waits for this one, so that a WRITE that it waits for may wait for a group. */
void groups_pull_from(struct groups *g, struct inode *inode, uint64_t offset)
{
    if (atomic_load(&g->v->notify_fd) >= 0 && may_be_written(g, inode))
        pull(g, inode, offset);
}

bool groups_take_stale(struct inode *inode)
{
    bool stale;

    pthread_mutex_lock(&inode->lock);
    stale = inode->pages_stale;
    inode->pages_stale = false;
    pthread_mutex_unlock(&inode->lock);
    return stale;
}

/* One commit of an object at a time. */
void groups_own_commit(struct groups *g, struct inode *inode)
{
    pthread_mutex_lock(&g->mutex);
    while (inode->commit_in_flight)
        pthread_cond_wait(&g->progress, &g->mutex);
    inode->commit_in_flight = true;
    pthread_mutex_unlock(&g->mutex);
}

/* A failed commit leaves its times dirty, too. */
void groups_disown_commit(struct groups *g, struct inode *inode, int result)
{
    if (result < 0) {
        pthread_mutex_lock(&inode->lock);
        inode->attr_dirty = true;
        pthread_mutex_unlock(&inode->lock);
    }
    pthread_mutex_lock(&g->mutex);
    inode->commit_in_flight = false;
    pthread_cond_broadcast(&g->progress);
    pthread_mutex_unlock(&g->mutex);
}

/* Freezes times and contents together. 0, 1 (nothing to commit) or -errno. */
int groups_begin_commit(struct inode *inode, struct object *o)
{
    int rc;

    pthread_mutex_lock(&inode->lock);
    object_set_times(o, inode->attr.atime, inode->attr.mtime, inode->attr.ctime);
    rc = object_commit_begin(o);
    if (rc >= 0)
        inode->attr_dirty = false;
    pthread_mutex_unlock(&inode->lock);
    return rc;
}

struct commit_batch {
    struct groups *g;
    struct target *targets;
    bool shared_barrier;
    bool recorded;              /* rows of this group were written: what they take out of the active set is still in the durable one */
};

/* The object is recorded and closed, so that nothing of the file but its times can have changed. */
static bool is_closed(struct groups *g, struct inode *inode)
{
    bool closed;

    pthread_mutex_lock(&inode->lock);
    closed = inode->has_record && !inode->object;
    pthread_mutex_lock(&g->mutex);
    closed &= !inode->active;
    pthread_mutex_unlock(&g->mutex);
    pthread_mutex_unlock(&inode->lock);
    return closed;
}

static void commit_target(void *arg, size_t i)
{
    struct commit_batch *batch = arg;
    struct target *t = &batch->targets[i];
    struct inode *inode = t->inode;
    bool active, barrier_failed = false;
    int rc;

    if (groups_is_deleted(inode) && !t->for_descriptor)
        return;
    t->times_only = !t->enter_active && is_closed(batch->g, inode);
    if (t->times_only)                  /* a group that opened each of these would need a descriptor for each */
        return;
    rc = file_object(batch->g->v, inode, &t->object);
    if (rc || !t->object) {
        t->result = rc;
        return;
    }
    groups_own_commit(batch->g, inode);
    pthread_mutex_lock(&batch->g->mutex);
    active = inode->active;
    pthread_mutex_unlock(&batch->g->mutex);
    rc = groups_begin_commit(inode, t->object);
    if (rc == 1) {
        object_record(t->object, &t->record);
        rc = 0;
    } else if (rc == 0) {
        t->begun = true;
        /* Recovery may choose this root by itself only while the object is active. */
        rc = object_commit_write(t->object, active || batch->recorded);
        if (!rc && !batch->shared_barrier) {
            rc = object_barrier(t->object);
            barrier_failed = rc != 0;
        }
        if (rc || !batch->shared_barrier) {
            rc = object_commit_end(t->object, rc, barrier_failed, &t->record);
            t->begun = false;
        }
    }
    t->result = rc;
    if (!t->begun)
        groups_disown_commit(batch->g, inode, rc);
}

void groups_commit_objects(struct groups *g, struct target *targets, size_t count, bool recorded)
{
    struct commit_batch batch = {g, targets, count > SYNCFS_ABOVE, recorded};
    int rc;

    workers_parallel(g->v->barrier, commit_target, &batch, count);
    if (!batch.shared_barrier)
        return;
    rc = blockdir_syncfs(g->v->dir);
    if (rc)                             /* it does not say which object lost its data */
        groups_set_failed(g, rc, "syncfs of the source directory");
    for (size_t i = 0; i < count; i++) {
        struct target *t = &targets[i];
        if (!t->begun)
            continue;
        t->result = object_commit_end(t->object, rc, rc != 0, &t->record);
        t->begun = false;
        groups_disown_commit(g, t->inode, t->result);
    }
}

/* A name must not become durable before the contents that it shows, or a replaced file would be lost with nothing in its place. So if
 * they cannot be written, neither is the mark. 0 or -errno. */
int groups_check_published(struct groups *g, struct target *targets, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct target *t = &targets[i];
        if (!t->published || !t->object)        /* one that cannot be opened has not been written to, either */
            continue;
        if (t->result == -ENOSPC && space_spend_ballast(g->v))
            groups_commit_objects(g, t, 1, true);
        if (t->result)
            return t->result;
    }
    return 0;
}
