/* Transaction groups and solo commits. Rules, and what each prevents: docs/design.md, "Groups"; checked by tests/model.
 *
 * One group, in order:
 *   collect   who waits, what was renamed or linked, and for a full group every dirty inode;
 *   commit    each object: freeze, seal, write; then a barrier each, or one syncfs for many;
 *   record    rows get the root of each object's last completed barrier, sizes and times: one SQLite transaction each;
 *   mark      freeze object 0 at a transaction boundary, under the namespace mutex; from here new changes go on;
 *   durable   write and barrier object 0; then waiters go on, slots and dropped objects are freed, the state record follows. */
#include "_volume_internal.h"

#include <errno.h>
#include <linux/fuse.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "_request.h"

enum {
    SYNCFS_ABOVE = 32,          /* objects in a group: from here on one syncfs is cheaper than a barrier each */
    ROWS_AT_A_TIME = 64,        /* rows written before the namespace mutex is let go: bounds how long a request waits */
    SHRINK_STEPS = 8,           /* short transactions of ns_shrink a group */
    PUBLISH_ROUNDS = 3,         /* renames may go on while a group commits what earlier ones published */
};

/* Somebody who waits for a group; lies on the waiter's stack. */
struct waiter {
    struct inode *inode;        /* NULL: metadata only */
    bool everything;            /* a full group */
    bool enter_active;          /* this inode was fsynced before: make the next fsync a solo commit */
    bool done;
    int result;
    struct waiter *next;
};

/* One inode of the running group. */
struct target {
    struct inode *inode;        /* referenced */
    struct object *object;      /* NULL: contents in the row */
    struct object_record record;
    bool enter_active;
    bool published;             /* renamed or linked: this group's mark shows its contents under a new name */
    bool begun;                 /* a commit was begun: end it */
    bool times_only;            /* its object is closed: only the row is written */
    bool named;                 /* this group's mark names `record` exactly; its slot is pinned once for that */
    int result;
};

struct target_list {
    struct target *items;
    size_t count, capacity;
};

/* A dropped object whose file is removed once the mark that dropped it is durable. */
struct dropped {
    uint8_t id[ID_SIZE];
    uint64_t mark;
    struct dropped *next;
};

struct groups {
    struct volume *v;
    unsigned interval_ms;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;      /* guards everything below and the inode fields that _inode.h says; a leaf: nothing is locked under it */
    pthread_cond_t wake;        /* the group thread: something to do */
    pthread_cond_t progress;    /* everybody else: a group or a commit ended */
    bool stopping, hurry, waiting_for_kernel;
    uint64_t full_begun, full_ended;        /* full groups */
    int failed;                 /* sticky: the errno that made the volume read-only */
    int last_result;
    struct waiter *waiters;
    struct inode *dirty;        /* doubly linked; each holds a reference */
    struct inode **published;   /* referenced */
    size_t published_count, published_capacity;
    struct dropped *dropped;
    struct groups_stats stats;
};

/* ---- small helpers ---- */

static void set_failed(struct groups *g, int error, const char *what)
{
    bool first;

    pthread_mutex_lock(&g->mutex);
    first = g->failed == 0;
    if (first)
        g->failed = error;
    g->stats.failures++;
    pthread_mutex_unlock(&g->mutex);
    if (first)
        volume_log(g->v, "%s failed: %s; the volume is read-only from now on, mount it again after mending the cause",
                   what, strerror(-error));
}

int groups_failed(struct groups *g)
{
    int failed;

    pthread_mutex_lock(&g->mutex);
    failed = g->failed;
    pthread_mutex_unlock(&g->mutex);
    return failed;
}

/* Group mutex held. */
static void list_dirty(struct groups *g, struct inode *inode)
{
    if (inode->on_dirty_list)
        return;
    inode->on_dirty_list = true;
    inode->dirty_prev = NULL;
    inode->dirty_next = g->dirty;
    if (g->dirty)
        g->dirty->dirty_prev = inode;
    g->dirty = inode;
}

static void unlist_dirty(struct groups *g, struct inode *inode)
{
    if (inode->dirty_prev)
        inode->dirty_prev->dirty_next = inode->dirty_next;
    else
        g->dirty = inode->dirty_next;
    if (inode->dirty_next)
        inode->dirty_next->dirty_prev = inode->dirty_prev;
    inode->on_dirty_list = false;
}

void groups_dirtied(struct groups *g, struct inode *inode)
{
    bool reference;

    pthread_mutex_lock(&g->mutex);
    reference = !inode->on_dirty_list;
    list_dirty(g, inode);
    if (reference)
        inode_hold(g->v->inodes, inode);
    pthread_mutex_unlock(&g->mutex);
}

bool groups_idle(struct groups *g, struct inode *inode)
{
    bool idle;

    pthread_mutex_lock(&g->mutex);
    idle = !inode->on_dirty_list && !inode->in_group && !inode->commit_in_flight && !inode->active;
    pthread_mutex_unlock(&g->mutex);
    return idle;
}

/* ---- events of the namespace ---- */

static void on_published(void *arg, struct inode *inode)
{
    struct groups *g = arg;

    pthread_mutex_lock(&g->mutex);
    if (!inode->publish) {
        if (g->published_count == g->published_capacity) {
            size_t capacity = g->published_capacity ? 2 * g->published_capacity : 64;
            struct inode **list = realloc(g->published, capacity * sizeof *list);
            if (list) {
                g->published = list;
                g->published_capacity = capacity;
            }
        }
        if (g->published_count < g->published_capacity) {
            inode->publish = true;
            g->published[g->published_count++] = inode;
            inode_hold(g->v->inodes, inode);
        } else {
            g->hurry = true;            /* no memory for the list: a full group covers it */
        }
    }
    pthread_mutex_unlock(&g->mutex);
}

static void on_dirtied(void *arg, struct inode *inode) { groups_dirtied(arg, inode); }

static void on_dropped(void *arg, const uint8_t id[ID_SIZE])
{
    struct groups *g = arg;
    struct dropped *d = malloc(sizeof *d);

    if (!d)
        return;                         /* the note in the database stays: the next mount removes the file */
    memcpy(d->id, id, ID_SIZE);
    d->mark = UINT64_MAX;               /* known when the next group freezes object 0 */
    pthread_mutex_lock(&g->mutex);
    d->next = g->dropped;
    g->dropped = d;
    pthread_mutex_unlock(&g->mutex);
}

struct ns_events groups_ns_events(struct groups *g)
{
    return (struct ns_events){on_published, on_dirtied, on_dropped, g};
}

/* ---- collect ---- */

static int add_target(struct target_list *list, struct inode *inode, bool enter_active)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        struct target *items = realloc(list->items, capacity * sizeof *items);
        if (!items)
            return -ENOMEM;
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = (struct target){.inode = inode, .enter_active = enter_active};
    return 0;
}

/* Group mutex held. Takes the inode into the group with a reference of its own; one that is a target already is taken again only if
 * `again` (its contents may have changed since they were frozen). 0 or -ENOMEM: then it stays listed. */
static int take_target(struct groups *g, struct target_list *list, struct inode *inode, bool enter_active, bool again)
{
    if (!inode->in_group || again) {
        if (add_target(list, inode, enter_active))
            return -ENOMEM;
        inode->in_group = true;
        inode_hold(g->v->inodes, inode);
    } else if (enter_active) {
        for (size_t i = 0; i < list->count; i++)
            if (list->items[i].inode == inode)
                list->items[i].enter_active = true;
    }
    if (inode->on_dirty_list) {
        unlist_dirty(g, inode);
        inode_unhold(g->v->inodes, inode);
    }
    return 0;
}

static void mark_published(struct target_list *list, const struct inode *inode)
{
    for (size_t i = list->count; i-- > 0; )
        if (list->items[i].inode == inode) {
            list->items[i].published = true;
            return;
        }
}

/* Group mutex held. */
static int take_published(struct groups *g, struct target_list *list, bool again)
{
    int rc = 0;

    while (g->published_count && !rc) {
        struct inode *inode = g->published[g->published_count - 1];
        rc = take_target(g, list, inode, false, again);
        if (!rc) {
            mark_published(list, inode);
            g->published_count--;
            inode->publish = false;
            inode_unhold(g->v->inodes, inode);
        }
    }
    return rc;
}

/* What the group works on: the waiters' inodes, what was renamed or linked (from *published to the end of that part), for a
 * full group every dirty inode. 0 or -ENOMEM. */
static int collect(struct groups *g, struct target_list *list, const struct waiter *waiters, bool full, size_t *first_published,
                   size_t *end_published)
{
    int rc = 0;

    pthread_mutex_lock(&g->mutex);
    for (const struct waiter *w = waiters; w && !rc; w = w->next)
        if (w->inode)
            rc = take_target(g, list, w->inode, w->enter_active, false);
    *first_published = list->count;
    if (!rc)
        rc = take_published(g, list, false);
    *end_published = list->count;
    while (full && g->dirty && !rc)
        rc = take_target(g, list, g->dirty, false, false);
    pthread_mutex_unlock(&g->mutex);
    return rc;
}

/* Lets go of deleted inodes first: nobody can name them after a crash, and those that nobody has open any more are dropped here,
 * so that this very group frees their objects. The list keeps its order; *first and *end are moved along. */
static void release_deleted(struct groups *g, struct target_list *list, size_t *first, size_t *end)
{
    size_t kept = 0, new_first = 0, new_end = 0;

    for (size_t i = 0; i < list->count; i++) {
        struct inode *inode = list->items[i].inode;
        bool deleted;

        pthread_mutex_lock(&inode->lock);
        deleted = inode->deleted;
        pthread_mutex_unlock(&inode->lock);
        if (deleted) {
            pthread_mutex_lock(&g->mutex);
            inode->in_group = false;
            pthread_mutex_unlock(&g->mutex);
            ns_put_inode(g->v->ns, inode);
            continue;
        }
        new_first += i < *first;
        new_end += i < *end;
        list->items[kept++] = list->items[i];
    }
    list->count = kept;
    *first = new_first;
    *end = new_end;
}

/* ---- commit ---- */

/* Pulls the kernel's dirty pages of a file in, so that a rename never becomes durable before the contents it publishes. The
 * kernel sends WRITEs that other threads of this process answer, so no lock is held here. */
static void pull_kernel_pages(struct groups *g, struct inode *inode, bool without_writers)
{
    struct {
        struct fuse_out_header header;
        struct fuse_notify_inval_inode_out inval;
    } message = {
        .header = {.len = sizeof message, .error = FUSE_NOTIFY_INVAL_INODE, .unique = 0},
        .inval = {.ino = inode->ino, .off = 0, .len = 0},
    };
    int fd = atomic_load(&g->v->notify_fd);
    uint32_t writers;

    pthread_mutex_lock(&inode->lock);
    writers = inode->writers;
    pthread_mutex_unlock(&inode->lock);
    if (fd < 0 || (writers == 0 && !without_writers))
        return;
    pthread_mutex_lock(&g->mutex);
    g->waiting_for_kernel = true;
    pthread_cond_broadcast(&g->progress);       /* WRITEs that wait for space: what the kernel waits for may be one of them */
    pthread_mutex_unlock(&g->mutex);
    if (write(fd, &message, sizeof message) < 0 && errno != ENOENT)
        volume_log(g->v, "inode %llu: the kernel did not hand over its dirty pages: %s",
                   (unsigned long long)inode->ino, strerror(errno));
    pthread_mutex_lock(&g->mutex);
    g->waiting_for_kernel = false;
    pthread_mutex_unlock(&g->mutex);
}

static bool take_pages_stale(struct inode *inode)
{
    bool stale;

    pthread_mutex_lock(&inode->lock);
    stale = inode->pages_stale;
    inode->pages_stale = false;
    pthread_mutex_unlock(&inode->lock);
    return stale;
}

/* One commit of an object at a time. */
static void own_commit(struct groups *g, struct inode *inode)
{
    pthread_mutex_lock(&g->mutex);
    while (inode->commit_in_flight)
        pthread_cond_wait(&g->progress, &g->mutex);
    inode->commit_in_flight = true;
    pthread_mutex_unlock(&g->mutex);
}

/* A failed commit leaves its times dirty, too. */
static void disown_commit(struct groups *g, struct inode *inode, int result)
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
static int begin_commit(struct inode *inode, struct object *o)
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
    bool active, deleted, barrier_failed = false;
    int rc;

    pthread_mutex_lock(&inode->lock);
    deleted = inode->deleted;
    pthread_mutex_unlock(&inode->lock);
    if (deleted)                        /* nobody can name it after a crash */
        return;
    t->times_only = !t->enter_active && is_closed(batch->g, inode);
    if (t->times_only)                  /* a group that opened each of these would need a descriptor for each */
        return;
    rc = file_object(batch->g->v, inode, &t->object);
    if (rc || !t->object) {
        t->result = rc;
        return;
    }
    own_commit(batch->g, inode);
    pthread_mutex_lock(&batch->g->mutex);
    active = inode->active;
    pthread_mutex_unlock(&batch->g->mutex);
    rc = begin_commit(inode, t->object);
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
        disown_commit(batch->g, inode, rc);
}

static void commit_objects(struct groups *g, struct target *targets, size_t count, bool recorded)
{
    struct commit_batch batch = {g, targets, count > SYNCFS_ABOVE, recorded};
    int rc;

    workers_parallel(g->v->barrier, commit_target, &batch, count);
    if (!batch.shared_barrier)
        return;
    rc = blockdir_syncfs(g->v->dir);
    if (rc)                             /* it does not say which object lost its data */
        set_failed(g, rc, "syncfs of the source directory");
    for (size_t i = 0; i < count; i++) {
        struct target *t = &targets[i];
        if (!t->begun)
            continue;
        t->result = object_commit_end(t->object, rc, rc != 0, &t->record);
        t->begun = false;
        disown_commit(g, t->inode, t->result);
    }
}

/* A name must not become durable before the contents that it shows, or a replaced file would be lost with nothing in its place. So if
 * they cannot be written, neither is the mark. 0 or -errno. */
static int check_published(struct groups *g, struct target *targets, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct target *t = &targets[i];
        if (!t->published || !t->object)        /* one that cannot be opened has not been written to, either */
            continue;
        if (t->result == -ENOSPC && space_spend_ballast(g->v))
            commit_objects(g, t, 1, true);
        if (t->result)
            return t->result;
    }
    return 0;
}

/* ---- record ---- */

/* The contents are not in the row any more. */
static bool has_moved(struct inode *inode)
{
    bool moved;

    pthread_mutex_lock(&inode->lock);
    moved = inode->object != NULL;
    pthread_mutex_unlock(&inode->lock);
    return moved;
}

/* Decides about the active set, writes rows, pins what the coming mark names exactly. Namespace mutex held. */
static int record_target(struct groups *g, struct target *t, bool last)
{
    struct inode *inode = t->inode;
    struct object_attr durable;
    bool stay, deleted;
    int rc;

    pthread_mutex_lock(&inode->lock);
    deleted = inode->deleted;
    pthread_mutex_unlock(&inode->lock);
    if (deleted)
        return 0;
    if (t->times_only)
        return ns_write_times(g->v->ns, inode);
    if (!t->object) {
        rc = ns_write_inode(g->v->ns, inode);
        if (rc || !has_moved(inode))
            return rc;
        /* It has outgrown its row since the group looked at it; rare enough to wait for its barrier here. */
        commit_objects(g, t, 1, true);
        if (t->result)
            return t->published ? t->result : 0;
    }

    pthread_mutex_lock(&g->mutex);
    stay = !last && (t->enter_active || (inode->active && (inode->solo_since_group || inode->commit_in_flight)));
    inode->solo_since_group = 0;
    if (stay && !inode->active)
        inode->active_mark = UINT64_MAX;        /* durable when this group is */
    inode->active = stay;                       /* from here on no solo commit starts if it leaves the set */
    pthread_mutex_unlock(&g->mutex);

    object_durable_attr(t->object, &durable);
    rc = ns_write_record(g->v->ns, inode, &t->record, &durable, stay ? g->v->env.epoch : 0);
    if (!rc && !stay) {
        t->named = true;
        object_pin_root(t->object, &t->record);
    }
    return rc;
}

static int record_targets(struct groups *g, struct target *targets, size_t count, bool last, bool let_go)
{
    int rc = 0;

    for (size_t i = 0; i < count && !rc; i++) {
        if (targets[i].result)
            continue;                   /* its old root stays recorded; it is still dirty */
        rc = record_target(g, &targets[i], last);
        if (let_go && i % ROWS_AT_A_TIME == ROWS_AT_A_TIME - 1) {
            ns_unlock(g->v->ns);
            ns_lock(g->v->ns, 0);
        }
    }
    return rc;
}

/* ---- mark and durable ---- */

static int commit_metadata(struct groups *g, struct object_record *record)
{
    struct object *meta = g->v->meta;
    bool barrier_failed = false;
    int rc = object_commit_write(meta, true);

    if (!rc) {
        rc = object_barrier(meta);
        barrier_failed = rc != 0;
    }
    return object_commit_end(meta, rc, barrier_failed, record);
}

/* A commit has counted exactly what was estimated while it was written. */
static void refresh_blocks(struct target *t)
{
    struct object_attr a;

    pthread_mutex_lock(&t->inode->lock);
    object_attr(t->object, &a);
    t->inode->attr.blocks = ns_blocks(t->inode->attr.size, a.nodes);
    pthread_mutex_unlock(&t->inode->lock);
}

/* After the mark is durable: older roots and slots are free, dropped objects go. */
static void after_durable(struct groups *g, struct target_list *list, const struct object_record *meta_record)
{
    struct dropped *d, *next;

    for (size_t i = 0; i < list->count; i++) {
        struct target *t = &list->items[i];
        struct inode *inode = t->inode;
        if (!t->object || t->result)
            continue;
        /* Only the group thread changes pins of an open object while a volume is mounted. */
        if (inode->pinned)
            object_unpin_root(t->object, &inode->pin);
        inode->pinned = t->named;
        inode->pin = t->record;
        object_release(t->object, &t->record);
        refresh_blocks(t);
    }
    object_release(g->v->meta, meta_record);

    pthread_mutex_lock(&g->mutex);
    d = g->dropped;
    g->dropped = NULL;
    for (struct dropped **p = &d; *p; ) {       /* those dropped after the freeze wait for the next group */
        if ((*p)->mark <= g->stats.durable_mark) {
            p = &(*p)->next;
        } else {
            struct dropped *later = *p;
            *p = later->next;
            later->next = g->dropped;
            g->dropped = later;
        }
    }
    pthread_mutex_unlock(&g->mutex);
    for (; d; d = next) {
        next = d->next;
        if (blockdir_remove(g->v->dir, d->id) == 0)
            ns_forget_dropped(g->v->ns, d->id);
        free(d);
    }
}

/* Lets go of the targets; what is still dirty, active or failed is listed again. */
static void let_targets_go(struct groups *g, struct target_list *list, uint64_t mark, bool durable)
{
    for (size_t i = 0; i < list->count; i++) {
        struct target *t = &list->items[i];
        struct inode *inode = t->inode;
        bool dirty, deleted;

        pthread_mutex_lock(&inode->lock);
        deleted = inode->deleted;
        dirty = inode->content_dirty || inode->attr_dirty || (inode->object && object_is_dirty(inode->object)) ||
                (inode->object && !inode->has_record);
        pthread_mutex_unlock(&inode->lock);
        pthread_mutex_lock(&g->mutex);
        inode->in_group = false;
        if (durable && inode->active && inode->active_mark == UINT64_MAX)
            inode->active_mark = mark;
        if (!deleted && (dirty || inode->active || t->result) && !inode->on_dirty_list) {
            list_dirty(g, inode);
            inode_hold(g->v->inodes, inode);
        }
        pthread_mutex_unlock(&g->mutex);
        ns_put_inode(g->v->ns, inode);
    }
}

/* ---- the group thread ---- */

/* Writes the rows of the targets from number `done` on and of what is published meanwhile; then freezes object 0. 0, 1: there is no
 * transaction since the last group, or -errno. */
static int freeze_metadata(struct groups *g, struct target_list *list, size_t done, bool last, uint64_t *mark)
{
    struct volume *v = g->v;
    bool torn;
    int rc = 0;

    for (unsigned round = 0; ; round++) {
        rc = check_published(g, list->items + done, list->count - done);
        ns_lock(v->ns, 0);
        if (!rc)
            rc = record_targets(g, list->items + done, list->count - done, last, true);
        done = list->count;
        pthread_mutex_lock(&g->mutex);
        if (!rc)
            rc = take_published(g, list, true);
        pthread_mutex_unlock(&g->mutex);
        if (rc || done == list->count)
            break;
        if (round >= PUBLISH_ROUNDS) {
            /* Renames do not stop: take the last of them with the namespace locked, without asking the kernel. */
            commit_objects(g, list->items + done, list->count - done, true);
            rc = check_published(g, list->items + done, list->count - done);
            if (!rc)
                rc = record_targets(g, list->items + done, list->count - done, last, false);
            break;
        }
        ns_unlock(v->ns);
        for (size_t i = done; i < list->count; i++)
            pull_kernel_pages(g, list->items[i].inode, false);
        commit_objects(g, list->items + done, list->count - done, true);
    }
    /* Pages that deletions left are given back a few at a time; whatever goes wrong there, ns_failed tells. */
    for (unsigned step = 0; step < SHRINK_STEPS && !rc && ns_shrink(v->ns) == 1; step++)
        ;
    /* Still under the namespace mutex: everything up to `mark` and nothing after it is frozen. */
    *mark = ns_mark(v->ns);
    if (!rc)
        rc = ns_failed(v->ns, &torn);
    if (!rc)
        rc = object_commit_begin(v->meta);
    pthread_mutex_lock(&g->mutex);
    for (struct dropped *d = g->dropped; d; d = d->next)
        if (d->mark == UINT64_MAX)
            d->mark = *mark;
    pthread_mutex_unlock(&g->mutex);
    ns_unlock(v->ns);
    return rc;
}

static void finish_waiters(struct groups *g, struct waiter *waiters, const struct target_list *list, int result)
{
    pthread_mutex_lock(&g->mutex);
    g->last_result = result;
    for (size_t i = 0; !g->last_result && i < list->count; i++)
        if (list->items[i].object)      /* one that could not even be opened is damaged, and nothing was written to it */
            g->last_result = list->items[i].result;
    for (struct waiter *w = waiters, *next; w; w = next) {
        next = w->next;                 /* w is gone once its owner sees `done` */
        w->result = result;
        for (size_t i = 0; !w->result && i < list->count; i++)
            if (w->everything || list->items[i].inode == w->inode)
                w->result = list->items[i].result;
        w->done = true;
    }
    pthread_cond_broadcast(&g->progress);
    pthread_mutex_unlock(&g->mutex);
}

/* Everything of a group up to its durable mark. */
static int make_durable(struct groups *g, struct target_list *list, size_t first_published, size_t end_published, bool last,
                        struct object_record *record, uint64_t *mark)
{
    struct volume *v = g->v;
    bool foreign = false, torn;
    int rc = object_foreign_root(v->meta, &foreign);

    if (!rc && foreign)
        rc = -EUSERS;
    if (rc) {
        set_failed(g, rc, "the check that nobody else writes to the source directory");
        return rc;
    }
    for (size_t i = first_published; i < end_published; i++)
        pull_kernel_pages(g, list->items[i].inode, false);
    for (size_t i = 0; i < list->count; i++)
        if (take_pages_stale(list->items[i].inode))
            pull_kernel_pages(g, list->items[i].inode, true);
    commit_objects(g, list->items, list->count, false);
    rc = groups_failed(g);
    if (rc)
        return rc;
    rc = ns_failed(v->ns, &torn);
    if (rc) {
        set_failed(g, rc, torn ? "a transaction, and undoing it," : "a transaction");
        return rc;
    }
    rc = freeze_metadata(g, list, 0, last, mark);
    if (rc == 1) {
        object_record(v->meta, record);
        return 0;
    }
    if (!rc)
        rc = commit_metadata(g, record);
    if (rc == -ENOSPC && !object_poisoned(v->meta) && space_spend_ballast(v)) {
        /* What the attempt wrote has been given back, and the ballast makes room for one more. There are more transactions by now:
         * they are frozen with the rest, at a boundary again, and with the contents that they publish. */
        rc = freeze_metadata(g, list, list->count, last, mark);
        if (!rc)
            rc = commit_metadata(g, record);
    }
    if (rc)
        set_failed(g, rc, "the commit of the metadata");
    return rc;
}

static void run_group(struct groups *g, struct waiter *waiters, bool full, bool last)
{
    struct target_list list = {0};
    struct object_record record;
    size_t first_published = 0, end_published = 0;
    uint64_t mark = 0;
    int rc = groups_failed(g), memory = 0;
    /* Before collecting: what gets dirty meanwhile counts for the next one. */
    uint64_t owed = full ? atomic_load(&g->v->space.metadata) : 0;

    if (!rc) {
        memory = collect(g, &list, waiters, full, &first_published, &end_published);
        release_deleted(g, &list, &first_published, &end_published);
        rc = make_durable(g, &list, first_published, end_published, last, &record, &mark);
    }
    if (!rc) {
        pthread_mutex_lock(&g->mutex);
        g->stats.durable_mark = mark;
        g->stats.groups++;
        g->stats.objects_committed += list.count;
        pthread_mutex_unlock(&g->mutex);
        after_durable(g, &list, &record);
        if (!memory)
            atomic_fetch_sub(&g->v->space.metadata, owed);
    }
    /* Memberships count before anybody is woken: a woken fsync must find its object active. */
    let_targets_go(g, &list, mark, rc == 0);
    finish_waiters(g, waiters, &list, rc ? rc : memory);
    free(list.items);
    if (!rc) {
        rc = state_write(g->v, &record, false);
        if (rc)
            set_failed(g, rc, "writing the trusted state record");
    }
    if (!rc && !last)
        space_restore_ballast(g->v);
}

static struct timespec time_after(unsigned ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

static bool is_past(const struct timespec *t)
{
    struct timespec now = time_after(0);

    return now.tv_sec > t->tv_sec || (now.tv_sec == t->tv_sec && now.tv_nsec >= t->tv_nsec);
}

static void *group_thread(void *arg)
{
    struct groups *g = arg;
    struct timespec next_full = time_after(g->interval_ms);     /* forced groups, however many, do not put it off */

    prctl(PR_SET_NAME, "encfsd-group");
    pthread_mutex_lock(&g->mutex);
    while (!g->stopping) {
        struct waiter *waiters;
        bool full = false;

        while (!g->stopping && !g->waiters && !g->hurry && !full)
            full = pthread_cond_timedwait(&g->wake, &g->mutex, &next_full) == ETIMEDOUT;
        if (g->stopping)
            break;
        full |= g->hurry || is_past(&next_full);
        g->hurry = false;
        waiters = g->waiters;
        g->waiters = NULL;
        for (struct waiter *w = waiters; w; w = w->next)
            full |= w->everything;
        g->full_begun += full;
        pthread_mutex_unlock(&g->mutex);
        run_group(g, waiters, full, false);
        if (full)
            next_full = time_after(g->interval_ms);
        pthread_mutex_lock(&g->mutex);
        g->full_ended = g->full_begun;
        pthread_cond_broadcast(&g->progress);
    }
    pthread_mutex_unlock(&g->mutex);
    return NULL;
}

/* ---- callers ---- */

static int wait_for_group(struct groups *g, struct inode *inode, bool everything, bool enter_active)
{
    struct waiter w = {.inode = inode, .everything = everything, .enter_active = enter_active};

    pthread_mutex_lock(&g->mutex);
    if (g->stopping) {
        pthread_mutex_unlock(&g->mutex);
        return -ESHUTDOWN;
    }
    w.next = g->waiters;
    g->waiters = &w;
    pthread_cond_signal(&g->wake);
    while (!w.done)
        pthread_cond_wait(&g->progress, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
    return w.result;
}

int groups_sync_metadata(struct groups *g) { return wait_for_group(g, NULL, false, false); }
int groups_sync_all(struct groups *g) { return wait_for_group(g, NULL, true, false); }

void groups_reclaim_space(struct groups *g)
{
    uint64_t next;

    pthread_mutex_lock(&g->mutex);
    next = g->full_begun + 1;           /* one that runs already may have looked at the dirty list before us */
    g->hurry = true;
    pthread_cond_signal(&g->wake);
    while (g->full_ended < next && !g->waiting_for_kernel && !g->failed && !g->stopping)
        pthread_cond_wait(&g->progress, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

void groups_hurry(struct groups *g)
{
    pthread_mutex_lock(&g->mutex);
    g->hurry = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->mutex);
}

/* A commit of an object in the durable active set: one barrier, no group. -EAGAIN: it is not (any more) in that set. */
static int solo_commit(struct groups *g, struct inode *inode, struct object *o)
{
    struct object_record record;
    int rc;

    pthread_mutex_lock(&g->mutex);
    while (inode->commit_in_flight)
        pthread_cond_wait(&g->progress, &g->mutex);
    if (!inode->active || inode->active_mark > g->stats.durable_mark) {
        pthread_mutex_unlock(&g->mutex);
        return -EAGAIN;
    }
    inode->commit_in_flight = true;
    inode->solo_since_group++;
    g->stats.solo_commits++;
    pthread_mutex_unlock(&g->mutex);

    rc = begin_commit(inode, o);
    if (rc == 0) {
        bool barrier_failed = false;
        rc = object_commit_write(o, true);
        if (!rc) {
            rc = object_barrier(o);
            barrier_failed = rc != 0;
        }
        rc = object_commit_end(o, rc, barrier_failed, &record);
        if (!rc)
            object_release(o, &record);
    }
    disown_commit(g, inode, rc);
    return rc == 1 ? 0 : rc;
}

/* An inode that was loaded from its row does not say which transaction wrote that: it may be the last one so far. */
static void learn_mark(struct volume *v, struct inode *inode)
{
    bool known;

    pthread_mutex_lock(&inode->lock);
    known = inode->meta_mark != 0;
    pthread_mutex_unlock(&inode->lock);
    if (known)
        return;
    ns_lock(v->ns, 0);
    pthread_mutex_lock(&inode->lock);
    if (inode->meta_mark == 0)
        inode->meta_mark = ns_mark(v->ns);
    pthread_mutex_unlock(&inode->lock);
    ns_unlock(v->ns);
}

/* Nothing that an fsync of this kind asks for waits for a commit to begin. Inode lock held. */
static bool is_clean(const struct inode *inode, bool datasync)
{
    if (inode->deleted)                 /* nothing can find it after a crash */
        return true;
    if (inode->content_dirty || (inode->object && (!inode->has_record || object_is_dirty(inode->object))))
        return false;
    return datasync || !inode->attr_dirty;
}

int groups_fsync(struct groups *g, uint64_t ino, bool datasync)
{
    struct volume *v = g->v;
    struct inode *inode;
    struct object *o = NULL;
    bool established, again, clean, running;
    int rc = ns_get_inode(v->ns, ino, &inode, 0), lost = 0;

    if (rc)
        return rc;
    learn_mark(v, inode);
    do {
        pthread_mutex_lock(&inode->lock);
        if (inode->object && !o) {
            o = inode->object;
            inode->object_users++;
        }
        again = inode->has_record;
        clean = is_clean(inode, datasync);
        lost = inode->lost_first < inode->lost_last ? inode->lost_error : 0;
        pthread_mutex_lock(&g->mutex);
        established = inode->meta_mark <= g->stats.durable_mark;
        running = inode->commit_in_flight || inode->in_group;
        pthread_mutex_unlock(&inode->lock);
        rc = g->failed ? -EIO : 0;
        /* What a running commit froze is not dirty any more and not durable yet; and it is dirty again if that fails. */
        running &= !rc && clean && established;
        if (running)
            pthread_cond_wait(&g->progress, &g->mutex);
        pthread_mutex_unlock(&g->mutex);
    } while (running);
    if (!rc && !(clean && established)) {
        rc = o && established && again ? solo_commit(g, inode, o) : -EAGAIN;
        if (rc == -EAGAIN)
            rc = wait_for_group(g, inode, false, o && again);
    }
    if (o) {
        pthread_mutex_lock(&inode->lock);
        inode->object_users--;
        pthread_mutex_unlock(&inode->lock);
    }
    ns_put_inode(v->ns, inode);
    return rc ? rc : lost;
}

/* ---- life ---- */

int groups_create(struct groups **out, struct volume *v, unsigned interval_ms)
{
    struct groups *g = calloc(1, sizeof *g);
    pthread_condattr_t monotonic;

    if (!g)
        return -ENOMEM;
    g->v = v;
    g->interval_ms = interval_ms;
    pthread_mutex_init(&g->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->wake, &monotonic);
    pthread_cond_init(&g->progress, NULL);
    pthread_condattr_destroy(&monotonic);
    *out = g;
    return 0;
}

int groups_start(struct groups *g)
{
    int rc = -pthread_create(&g->thread, NULL, group_thread, g);

    g->started = rc == 0;
    return rc;
}

int groups_run_once(struct groups *g)
{
    run_group(g, NULL, true, false);
    return g->failed ? g->failed : g->last_result;
}

int groups_stop(struct groups *g)
{
    struct waiter *late;

    pthread_mutex_lock(&g->mutex);
    g->stopping = true;
    pthread_cond_signal(&g->wake);
    pthread_cond_broadcast(&g->progress);
    pthread_mutex_unlock(&g->mutex);
    if (g->started)
        pthread_join(g->thread, NULL);
    pthread_mutex_lock(&g->mutex);
    late = g->waiters;
    g->waiters = NULL;
    pthread_mutex_unlock(&g->mutex);
    /* Twice: the first full group leaves nothing dirty; the second makes "dropped" notes and the empty active set durable. */
    run_group(g, late, true, true);
    run_group(g, NULL, true, true);
    return g->failed ? g->failed : g->last_result;
}

void groups_destroy(struct groups *g)
{
    struct dropped *d, *next;

    if (!g)
        return;
    for (d = g->dropped; d; d = next) {
        next = d->next;
        free(d);
    }
    free(g->published);
    pthread_cond_destroy(&g->wake);
    pthread_cond_destroy(&g->progress);
    pthread_mutex_destroy(&g->mutex);
    free(g);
}

void groups_stats(struct groups *g, struct groups_stats *stats)
{
    pthread_mutex_lock(&g->mutex);
    *stats = g->stats;
    pthread_mutex_unlock(&g->mutex);
}
