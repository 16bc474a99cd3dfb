/* Transaction groups and solo commits. Rules, and what each prevents: docs/design.md, "Groups"; checked by tests/model.
 *
 * One group, in order:
 *   collect   who waits, what was renamed or linked, and for a full group every dirty inode;
 *   commit    each object: freeze, seal, write; then a barrier each, or one syncfs for many;
 *   record    rows get the root of each object's last completed barrier, sizes and times: a SQLite transaction for some at a time;
 *   mark      freeze object 0 at a transaction boundary, under the namespace mutex; from here new changes go on;
 *   durable   write and barrier object 0; then waiters go on, slots and dropped objects are freed, the state record follows. */
#include "_groups_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

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
        groups_unlist_dirty(g, inode);
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
 * so that this very group frees their objects. The others go to *open, or stay if their descriptors are wanted for other files. The list
 * keeps its order; *first and *end are moved along. */
static void release_deleted(struct groups *g, struct target_list *list, size_t *first, size_t *end, struct target_list *open)
{
    const bool descriptors_are_short = atomic_load(&g->v->env.open_objects) >= g->v->max_open_objects;
    size_t kept = 0, new_first = 0, new_end = 0;

    for (size_t i = 0; i < list->count; i++) {
        struct inode *inode = list->items[i].inode;

        list->items[i].for_descriptor = descriptors_are_short && inode_is_known(g->v->inodes, inode);
        if (groups_is_deleted(inode) && !list->items[i].for_descriptor) {
            pthread_mutex_lock(&g->mutex);
            inode->in_group = false;
            pthread_mutex_unlock(&g->mutex);
            if (!inode_is_known(g->v->inodes, inode) || add_target(open, inode, false))
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

/* No group commits a deleted file, but while somebody has it open its dirty nodes must not stay in memory for that. */
static void write_back_deleted(struct groups *g, struct target_list *open)
{
    for (size_t i = 0; i < open->count; i++) {
        file_write_back(open->items[i].inode);
        ns_put_inode(g->v->ns, open->items[i].inode);
    }
    free(open->items);
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

/* A file that is published again during a group is committed again in it. Its row has just been overwritten, so the coming mark cannot
 * name the root of before: were that left pinned, the root slots would run out. */
static void supersede_targets(struct target *targets, size_t count, const struct inode *inode)
{
    for (size_t i = 0; i < count; i++) {
        struct target *t = &targets[i];

        if (t->inode != inode || !t->object || t->result)
            continue;
        if (t->named)
            object_unpin_root(t->object, &t->record);
        t->named = false;
        t->superseded = true;
    }
}

/* Decides about the active set, writes rows, pins what the coming mark names exactly. Namespace mutex held. */
static int record_target(struct groups *g, struct target *t, bool last)
{
    struct inode *inode = t->inode;
    struct object_attr durable;
    bool stay;
    int rc;

    if (groups_is_deleted(inode) && !t->for_descriptor)
        return 0;
    if (t->times_only)
        return ns_write_times(g->v->ns, inode);
    if (!t->object) {
        rc = ns_write_inode(g->v->ns, inode);
        if (rc || !has_moved(inode))
            return rc;
        /* It has outgrown its row since the group looked at it; rare enough to wait for its barrier here. */
        groups_commit_objects(g, t, 1, true);
        rc = groups_check_published(g, t, 1);
        if (rc || t->result)
            return rc;
    }

    pthread_mutex_lock(&g->mutex);
    stay = !last && (t->enter_active || (inode->active && (inode->work->solo_since_group || inode->commit_in_flight)));
    inode->work->solo_since_group = 0;
    if (stay && !inode->active)
        inode->work->active_mark = UINT64_MAX;  /* durable when this group is */
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

/* Those from number `done` on; the others have been recorded in earlier rounds of this group. An error is final. */
static int record_targets(struct groups *g, struct target_list *list, size_t done, bool last, bool let_go)
{
    int rc = 0;

    for (size_t i = done; i < list->count && !rc; ) {
        size_t end = list->count - i < ROWS_AT_A_TIME ? list->count : i + ROWS_AT_A_TIME;

        ns_rows_begin(g->v->ns);
        for (; i < end && !rc; i++) {
            struct target *t = &list->items[i];

            if (t->result)
                continue;               /* its old root stays recorded; it is still dirty */
            rc = record_target(g, t, last);
            if (!rc && t->object && !t->result)
                supersede_targets(list->items, done, t->inode);
        }
        rc = ns_rows_end(g->v->ns, rc);
        if (let_go) {
            ns_unlock(g->v->ns);
            ns_lock(g->v->ns, 0);
        }
    }
    if (rc)
        groups_set_failed(g, rc, "recording what was committed");
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
        if (!t->object || t->result || t->superseded)
            continue;
        /* Only the group thread changes pins of an open object while a volume is mounted. */
        if (inode->work->pinned)
            object_unpin_root(t->object, &inode->work->pin);
        inode->work->pinned = t->named;
        inode->work->pin = t->record;
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
        if (durable && inode->active && inode->work->active_mark == UINT64_MAX)
            inode->work->active_mark = mark;
        if (!deleted && (dirty || inode->active || t->result) && !inode->on_dirty_list) {
            groups_list_dirty(g, inode);
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
        rc = groups_check_published(g, list->items + done, list->count - done);
        ns_lock(v->ns, 0);
        if (!rc)
            rc = record_targets(g, list, done, last, true);
        done = list->count;
        pthread_mutex_lock(&g->mutex);
        if (!rc)
            rc = take_published(g, list, true);
        pthread_mutex_unlock(&g->mutex);
        if (rc || done == list->count)
            break;
        if (round >= PUBLISH_ROUNDS) {
            /* Renames do not stop: take the last of them with the namespace locked, without asking the kernel. */
            groups_commit_objects(g, list->items + done, list->count - done, true);
            rc = groups_check_published(g, list->items + done, list->count - done);
            if (!rc)
                rc = record_targets(g, list, done, last, false);
            break;
        }
        ns_unlock(v->ns);
        for (size_t i = done; i < list->count; i++)
            groups_pull_pages(g, list->items[i].inode, false);
        groups_commit_objects(g, list->items + done, list->count - done, true);
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
        groups_set_failed(g, rc, "the check that nobody else writes to the source directory");
        return rc;
    }
    for (size_t i = first_published; i < end_published; i++)
        groups_pull_pages(g, list->items[i].inode, false);
    for (size_t i = 0; i < list->count; i++)
        if (groups_take_stale(list->items[i].inode))
            groups_pull_pages(g, list->items[i].inode, true);
    groups_commit_objects(g, list->items, list->count, false);
    rc = groups_failed(g);
    if (rc)
        return rc;
    rc = ns_failed(v->ns, &torn);
    if (rc) {
        groups_set_failed(g, rc, torn ? "a transaction, and undoing it," : "a transaction");
        return rc;
    }
    rc = freeze_metadata(g, list, 0, last, mark);
    if (rc == 1) {
        object_record(v->meta, record);
        return 0;
    }
    if (!rc)
        rc = commit_metadata(g, record);
    if (rc == -ENOSPC && !groups_failed(g) && !object_poisoned(v->meta) && space_spend_ballast(v)) {
        /* What the attempt wrote has been given back, and the ballast makes room for one more. There are more transactions by now:
         * they are frozen with the rest, at a boundary again, and with the contents that they publish. */
        rc = freeze_metadata(g, list, list->count, last, mark);
        if (!rc)
            rc = commit_metadata(g, record);
    }
    if (rc)
        groups_set_failed(g, rc, "the commit of the metadata");
    return rc;
}

void groups_run(struct groups *g, struct waiter *waiters, bool full, bool last)
{
    struct target_list list = {0}, deleted = {0};
    struct object_record record;
    size_t first_published = 0, end_published = 0;
    uint64_t mark = 0;
    int rc = groups_failed(g), memory = 0;
    /* Before collecting: what gets dirty meanwhile counts for the next one. */
    uint64_t owed = full ? atomic_load(&g->v->space.metadata) : 0;

    if (!rc) {
        memory = collect(g, &list, waiters, full, &first_published, &end_published);
        release_deleted(g, &list, &first_published, &end_published, &deleted);
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
    write_back_deleted(g, &deleted);
    if (!rc) {
        rc = state_write(g->v, &record, false);
        if (rc)
            groups_set_failed(g, rc, "writing the trusted state record");
    }
    if (!rc && !last)
        space_restore_ballast(g->v);
}
