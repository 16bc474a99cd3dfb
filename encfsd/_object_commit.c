#include "_object_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUND = 32 * BATCH,                 /* nodes that write-back takes off the dirty list at a time */
    SMALL_APPEND = 16,                  /* slots: what a synced append moves the end by, at most */
    AHEAD_MIN = 16, AHEAD_MAX = 64,     /* slots that are written ahead of synced appends */
};

static void object_poison(struct object *o) { atomic_store(&o->poisoned, true); }

/* ---- Sealing dirty nodes ---- */

struct sealer {
    struct object *o;
    struct generation *g;
    struct keyed dirty[ROUND];          /* nodes, ascending by index */
    struct keyed scratch[ROUND];
    size_t n;
    _Atomic int rc;
};

/* Takes up to `most` nodes off the dirty list. */
static size_t take_dirty(struct sealer *s, size_t most)
{
    bool sorted = true;

    pthread_rwlock_wrlock(&s->o->lock);
    for (s->n = 0; s->n < ROUND && s->n < most && s->g->dirty_first; s->n++) {
        struct node *node = s->g->dirty_first;
        s->g->dirty_first = node->list_next;
        if (node->list_next)
            node->list_next->list_prev = NULL;
        else
            s->g->dirty_last = NULL;
        node->state = NODE_SEALING;
        s->dirty[s->n] = (struct keyed){node->index, node};
        sorted = sorted && (s->n == 0 || s->dirty[s->n - 1].index < node->index);
    }
    pthread_rwlock_unlock(&s->o->lock);
    if (!sorted)
        keyed_sort(s->dirty, s->scratch, s->n);
    return s->n;
}

/* Slots for n nodes: each near its old place; those without one next to each other. On error none is taken. */
static int place(struct object *o, struct node *const *node, size_t n, struct entry *entry)
{
    uint64_t near[BATCH];
    struct location at;
    bool old = false;
    size_t placed = 0;
    int rc = 0;

    pthread_rwlock_rdlock(&o->lock);
    for (size_t i = 0; i < n; i++) {
        near[i] = root_locate(o, node[i]->index, NULL, &at) == AT_ENTRY ? at.entry.slot : 0;
        old |= near[i] != 0;
    }
    pthread_rwlock_unlock(&o->lock);
    if (!old)
        return take_slots(o, n, entry);

    pthread_mutex_lock(&o->space);
    for (; placed < n && !rc; placed += !rc)
        rc = alloc_data(o->alloc, near[placed], &entry[placed].slot);
    for (; rc && placed > 0; placed--)
        alloc_undo(o->alloc, entry[placed - 1].slot);
    pthread_mutex_unlock(&o->space);
    for (size_t i = 0; i < n && rc; i++)
        entry[i].slot = 0;
    return rc;
}

/* Writes sealed nodes to their slots, neighbours in one call. */
static int write_sealed(struct object *o, const struct entry *entry, uint8_t *sealed, size_t n)
{
    int rc = 0;

    for (size_t i = 0, run; i < n && !rc; i += run) {
        for (run = 1; i + run < n && entry[i + run].slot == entry[i].slot + run;)
            run++;
        struct iovec iov = {sealed + i * NODE_SIZE, run * NODE_SIZE};
        rc = blockfile_writev(o->file, entry[i].slot, &iov, 1);
    }
    return rc;
}

int seal_to_slots(struct object *o, const void *const *page, size_t n, struct entry *entry)
{
    uint8_t *sealed = sealed_buffer();
    struct seal_job job[BATCH];

    if (!sealed)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        job[i] = (struct seal_job){.plain = page[i], .sealed = sealed + i * NODE_SIZE, .kind = NODE_DATA};
    int rc = seal_nodes(o->id, job, n);
    if (!rc)
        rc = write_sealed(o, entry, sealed, n);
    for (size_t i = 0; i < n && !rc; i++) {
        memcpy(entry[i].key, job[i].key, KEY_SIZE);
        memcpy(entry[i].tag, job[i].tag, TAG_SIZE);
    }
    secret_wipe(job, n * sizeof job[0]);
    return rc;
}

/* Ends the sealing of n nodes: into the overlay of their generation, or, on error, back to its dirty list. */
static int publish(struct object *o, struct generation *g, struct node *const *node, size_t n, const struct entry *entry, int rc)
{
    uint64_t undo[BATCH];
    size_t undos = 0;

    pthread_rwlock_wrlock(&o->lock);
    if (!rc)
        rc = overlay_reserve(&g->overlay, n);
    for (size_t i = 0; i < n; i++) {
        bool dropped = node[i]->state == NODE_DROPPED;
        uint64_t slot = rc || dropped ? entry[i].slot : overlay_put(&g->overlay, node[i]->index, &entry[i]);

        if (slot)
            undo[undos++] = slot;
        g->dirty--;
        atomic_fetch_sub(&o->env->dirty_nodes, 1);
        if (rc && !dropped)
            generation_append(o, g, node[i]);
        else if (!dropped && table_holds(o, node[i]))
            table_settle(o, node[i], o->env->cache_data);
        else
            pool_give(o->env->pool, node[i]);
    }
    pthread_rwlock_unlock(&o->lock);
    undo_slots(o, undo, undos);
    return rc;
}

static void seal_batch(void *arg, size_t i)
{
    struct sealer *s = arg;
    const struct keyed *dirty = s->dirty + i * BATCH;
    size_t n = s->n - i * BATCH < BATCH ? s->n - i * BATCH : BATCH;
    struct node *node[BATCH];
    const void *page[BATCH];
    struct entry entry[BATCH];
    int expected = 0;

    for (size_t k = 0; k < n; k++) {
        node[k] = dirty[k].item;
        page[k] = node[k]->page;
    }
    int rc = place(s->o, node, n, entry);
    if (!rc)
        rc = seal_to_slots(s->o, page, n, entry);
    rc = publish(s->o, s->g, node, n, entry, rc);
    secret_wipe(entry, sizeof entry);
    if (rc)
        atomic_compare_exchange_strong(&s->rc, &expected, rc);
}

/* Seals at most about `most` dirty nodes of a generation into new slots. `sealing` held, or the generation flies. */
static int seal_dirty(struct object *o, struct generation *g, size_t most)
{
    struct sealer s;                    /* large: only what is used gets set */
    size_t taken;

    s.o = o;
    s.g = g;
    s.rc = 0;
    while (!s.rc && most > 0 && (taken = take_dirty(&s, most)) > 0) {
        if (taken <= BATCH)
            seal_batch(&s, 0);
        else
            workers_parallel(o->env->workers, seal_batch, &s, (taken + BATCH - 1) / BATCH);
        most -= taken;
    }
    return s.rc;
}

int object_write_back(struct object *o, size_t max_nodes)
{
    if (object_poisoned(o))
        return -EIO;
    pthread_mutex_lock(&o->sealing);
    pthread_rwlock_rdlock(&o->lock);
    struct generation *g = o->current;
    pthread_rwlock_unlock(&o->lock);
    int rc = seal_dirty(o, g, max_nodes);
    pthread_mutex_unlock(&o->sealing);
    return rc;
}

/* ---- Begin ---- */

/* A root slot that neither the durable root nor a pinned one lies in: the one written longest ago. */
static int free_root_slot(const struct object *o)
{
    int best = NO_SLOT;

    for (int i = 0; i < ROOT_SLOTS; i++)
        if (i != o->durable_slot && o->slot[i].pins == 0
            && (best == NO_SLOT
                || root_order(o->slot[i].epoch, o->slot[i].counter, o->slot[best].epoch, o->slot[best].counter) < 0))
            best = i;
    return best;
}

/* Freezes the current generation and describes it in the commit's root. lock held exclusively. */
static void take_off(struct object *o, struct commit *c)
{
    struct generation *g = o->current;
    struct root_plain *p = &c->root.plain;

    o->flying = g;
    o->current = g == &o->generation[0] ? &o->generation[1] : &o->generation[0];
    o->current->tag = g->tag + 1;
    o->commit = c;
    g->size = o->size;

    p->epoch = o->env->epoch;
    p->counter = ++o->counter;
    memcpy(p->instance, o->env->instance, ID_SIZE);
    memcpy(p->previous, o->root->salt, SALT_SIZE);
    p->size = o->size;
    p->atime = o->atime;
    p->mtime = o->mtime;
    p->ctime = o->ctime;
}

/* Puts the flying generation under the current one: what the current one has is newer. 0, or -ENOMEM and nothing has changed.
 * lock held exclusively. */
static int merge_back(struct object *o, struct slots *undo)
{
    struct generation *g = o->flying, *current = o->current;

    if (overlay_reserve(&current->overlay, g->overlay.live) || cuts_reserve(&current->cuts, g->cuts.count))
        return -ENOMEM;
    for (size_t i = 0; i < g->overlay.list.count; i++) {
        const struct delta_entry *e = &g->overlay.list.at[i];
        if (!e->entry.slot)
            continue;
        if (overlay_get(&current->overlay, e->index) || cuts_find(&current->cuts, e->index))
            slots_push(undo, e->entry.slot);
        else
            overlay_put(&current->overlay, e->index, &e->entry);
    }
    for (size_t i = 0; i < g->cuts.count; i++)
        cuts_add(&current->cuts, g->cuts.at[i].first, g->cuts.at[i].last);
    while (g->dirty_first) {
        struct node *node = g->dirty_first;
        generation_unlink(o, g, node);
        if (table_holds(o, node))
            generation_append(o, current, node);
        else
            pool_give(o->env->pool, node);
    }
    current->grown += g->grown;
    current->attr_dirty |= g->attr_dirty;
    overlay_free(&g->overlay);
    g->cuts.count = 0;
    g->grown = 0;
    g->attr_dirty = false;
    o->flying = NULL;
    return 0;
}

int object_commit_begin(struct object *o)
{
    if (object_poisoned(o))
        return -EIO;
    if (o->env->read_only)
        return -EROFS;
    struct commit *c = calloc(1, sizeof *c);
    struct slots undo = {0};
    if (!c)
        return -ENOMEM;

    pthread_rwlock_wrlock(&o->lock);
    int rc = o->commit ? -EBUSY : 0;
    if (!rc && o->flying)
        rc = merge_back(o, &undo);      /* the last commit failed, and there was no memory for it then */
    if (!rc && !generation_is_dirty(o->current) && o->durable_slot != NO_SLOT)
        rc = 1;
    if (!rc && (c->slot = free_root_slot(o)) == NO_SLOT)
        rc = -EAGAIN;
    if (!rc)
        take_off(o, c);
    pthread_rwlock_unlock(&o->lock);
    undo_slots(o, undo.at, undo.count);
    slots_free(&undo);
    if (rc)
        free(c);
    return rc;
}

/* ---- The delta ---- */

struct delta {
    struct object *o;
    struct commit *c;
    struct changes merged;
    uint64_t nodes;
    bool full;                          /* it cannot say what has changed: fold */
};

/* The delta is about to hide this entry of the tree. */
static int delta_hide(struct delta *d, const struct entry *old)
{
    if (old->slot >= d->c->hidden_end)
        d->c->hidden_end = old->slot + 1;
    d->nodes--;
    return slots_push(&d->c->retired, old->slot);
}

static int delta_add(struct delta *d, uint64_t index, const struct entry *entry)
{
    d->full |= d->merged.count == DELTA_MAX || index >= nodes_for(d->c->root.plain.size);
    return d->full ? 0 : changes_push(&d->merged, index, entry);
}

/* What the last root's delta holds and this commit did not change stays. */
static int delta_keep(struct delta *d)
{
    const struct generation *g = d->o->flying;
    const struct root_plain *old = &d->o->root->plain;
    int rc = 0;

    for (unsigned i = 0; i < old->delta_count && !rc; i++) {
        const struct delta_entry *e = &old->delta[i];
        if (!overlay_get(&g->overlay, e->index) && !cuts_find(&g->cuts, e->index)) {
            rc = delta_add(d, e->index, &e->entry);
        } else if (e->entry.slot) {
            d->nodes--;
            rc = slots_push(&d->c->retired, e->entry.slot);
        }
    }
    return rc;
}

/* A node that the tree holds and that was cut becomes a hole by an entry without slot. */
static int delta_cut(struct delta *d, const struct range *cut, struct cursor *cursor)
{
    static const struct entry hole;
    struct object *o = d->o;
    struct entry entry;
    int rc;

    for (uint64_t i = cut->first; (rc = tree_next(o, &i, cut->last, cursor, &entry)) > 0 && !d->full; i++) {
        if (!delta_find(&o->root->plain, i))        /* else it is hidden already */
            rc = delta_hide(d, &entry);
        if (rc >= 0 && !overlay_get(&o->flying->overlay, i))
            rc = delta_add(d, i, &hole);
        if (rc < 0)
            break;
    }
    return rc < 0 ? rc : 0;
}

/* What this commit wrote. */
static int delta_write(struct delta *d, const struct delta_entry *e, struct cursor *cursor)
{
    struct object *o = d->o;
    uint64_t i = e->index;
    struct entry old;
    int rc = 0;

    if (!delta_find(&o->root->plain, i) && !cuts_find(&o->flying->cuts, i))
        rc = tree_next(o, &i, i + 1, cursor, &old);
    if (rc > 0)
        rc = delta_hide(d, &old);
    d->nodes++;
    return rc < 0 ? rc : delta_add(d, e->index, &e->entry);
}

/* Makes the commit a delta over the last root's tree. 0, 1: the tree must change, or -errno. */
static int build_delta(struct object *o, struct commit *c)
{
    const struct generation *g = o->flying;
    const struct root_plain *old = &o->root->plain;
    struct root_plain *p = &c->root.plain;
    struct delta d = {.o = o, .c = c, .nodes = old->nodes};
    struct cursor cursor;

    if (g->overlay.live > DELTA_MAX || old->height > (p->size ? tree_height_for(nodes_for(p->size) - 1) : 0))
        return 1;
    cursor_init(&cursor);
    c->hidden_end = o->hidden_end;
    int rc = delta_keep(&d);
    for (size_t i = 0; i < g->cuts.count && !rc && !d.full; i++)
        rc = delta_cut(&d, &g->cuts.at[i], &cursor);
    for (size_t i = 0; i < g->overlay.list.count && !rc && !d.full; i++)
        if (g->overlay.list.at[i].entry.slot)
            rc = delta_write(&d, &g->overlay.list.at[i], &cursor);
    if (!rc && !d.full) {
        changes_sort(&d.merged);
        for (size_t i = 0; i < d.merged.count; i++)
            p->delta[i] = d.merged.at[i];
        p->delta_count = (uint16_t)d.merged.count;
        p->nodes = d.nodes;
        p->height = old->height;
        p->top = old->top;
    } else {
        c->retired.count = 0;
        c->hidden_end = 0;              /* a fold leaves nothing hidden */
    }
    changes_free(&d.merged);
    return rc ? rc : d.full;
}

/* ---- Write ---- */

/* Writes zeros ahead of an object that grows by synced appends: overwriting written extents needs no journal of the file system
 * below, which halves the barrier. */
static void write_ahead(struct object *o)
{
    pthread_mutex_lock(&o->space);
    uint64_t end = alloc_end(o->alloc);
    if (end > o->commit_end)
        o->appends = end - o->commit_end <= SMALL_APPEND ? o->appends + 1 : 0;
    o->commit_end = end;
    if (o->written_end < end)
        o->written_end = end;
    if (o->appends >= 2 && o->written_end < end + SMALL_APPEND / 2) {
        uint64_t ahead = o->appends < AHEAD_MAX / AHEAD_MIN ? o->appends * AHEAD_MIN : AHEAD_MAX;
        if (blockfile_zero_fill(o->file, o->written_end, end + ahead - o->written_end) == 0)
            o->written_end = end + ahead;
    }
    pthread_mutex_unlock(&o->space);
}

static int write_root(struct object *o, struct commit *c)
{
    struct root_slot sealed;
    struct iovec iov = {&sealed, sizeof sealed};

    pthread_mutex_lock(&o->space);
    c->root.plain.end = alloc_end(o->alloc);
    pthread_mutex_unlock(&o->space);
    if (c->root.plain.end < c->hidden_end)
        c->root.plain.end = c->hidden_end;
    int rc = seal_root(o->env->ring, o->id, (uint64_t)c->slot, &c->root.plain, &sealed);
    if (rc)
        return rc;
    memcpy(c->root.salt, sealed.salt, SALT_SIZE);

    pthread_rwlock_wrlock(&o->lock);
    memcpy(o->slot[c->slot].before, o->slot[c->slot].salt, SALT_SIZE);
    memcpy(o->slot[c->slot].salt, sealed.salt, SALT_SIZE);
    pthread_rwlock_unlock(&o->lock);
    rc = blockfile_writev(o->file, (uint64_t)c->slot, &iov, 1);
    if (rc == -ENOSPC || rc == -ENOMEM) {
        /* A page that could not be had was not written: the old content is still there. */
        pthread_rwlock_wrlock(&o->lock);
        memcpy(o->slot[c->slot].salt, o->slot[c->slot].before, SALT_SIZE);
        pthread_rwlock_unlock(&o->lock);
    } else {
        c->root_written = true;
    }
    return rc;
}

int object_commit_write(struct object *o, bool solo)
{
    struct commit *c = o->commit;

    if (object_poisoned(o))
        return -EIO;
    /* Write-backs that began before the commit still fill its overlay. */
    pthread_mutex_lock(&o->sealing);
    pthread_mutex_unlock(&o->sealing);
    int rc = seal_dirty(o, o->flying, SIZE_MAX);
    if (!rc)
        rc = build_delta(o, c);
    if (rc == 1) {
        rc = tree_fold(o, c);
        if (!rc && solo) {
            rc = blockfile_barrier(o->file);
            if (rc)
                object_poison(o);
        }
    }
    if (rc)
        return rc;
    write_ahead(o);
    return write_root(o, c);
}

int object_barrier(struct object *o)
{
    if (object_poisoned(o))
        return -EIO;
    pthread_rwlock_rdlock(&o->lock);
    bool entry_durable = o->entry_durable;
    pthread_rwlock_unlock(&o->lock);
    int rc = blockfile_barrier(o->file);
    return rc || entry_durable ? rc : blockfile_sync_entry(o->file);
}

/* ---- End ---- */

/* Exchanges the root. space held. */
static void land(struct object *o, struct commit *c)
{
    pthread_rwlock_wrlock(&o->lock);
    struct overlay written = o->flying->overlay;
    const struct root_plain *old = &o->root->plain, *new = &c->root.plain;

    if (new->height != old->height || memcmp(&new->top, &old->top, sizeof new->top) != 0)
        o->tree_version++;
    *o->root = c->root;
    o->durable_slot = c->slot;
    o->slot[c->slot].epoch = new->epoch;
    o->slot[c->slot].counter = new->counter;
    o->entry_durable = true;
    o->flying->overlay = (struct overlay){0};
    o->flying->cuts.count = 0;
    o->flying->grown = 0;
    o->flying->attr_dirty = false;
    o->flying = NULL;
    o->commit = NULL;
    for (size_t i = 0; i < c->replaced_count; i++) {
        const struct replaced *r = &c->replaced[i];
        struct node *cached = table_find(o, r->level, r->index);
        if (cached) {
            table_remove(o, cached);
            pool_give(o->env->pool, cached);
        }
        if (r->node && table_reserve(o)) {
            table_insert(o, r->node);
            table_settle(o, r->node, true);
        } else if (r->node) {
            pool_give(o->env->pool, r->node);
        }
    }
    pthread_rwlock_unlock(&o->lock);
    overlay_free(&written);
}

static void commit_succeeded(struct object *o, struct commit *c)
{
    o->hidden_end = c->hidden_end;
    pthread_mutex_lock(&o->space);
    land(o, c);
    /* Without memory for the quarantine a slot is lost until the next scan. */
    for (size_t i = 0; i < c->retired.count; i++)
        alloc_retire(o->alloc, c->retired.at[i], c->root.plain.counter);
    for (uint64_t slot = c->run_used; slot < c->run_end; slot++)
        alloc_undo(o->alloc, slot);
    if (o->trimmed && blockfile_truncate(o->file, alloc_end(o->alloc)) == 0) {
        o->trimmed = false;
        o->written_end = alloc_end(o->alloc);
    }
    pthread_mutex_unlock(&o->space);
}

static void commit_failed(struct object *o, struct commit *c)
{
    struct slots undo = {0};

    pthread_mutex_lock(&o->sealing);
    pthread_mutex_unlock(&o->sealing);
    for (size_t i = 0; i < c->replaced_count; i++)
        if (c->replaced[i].node)
            pool_give(o->env->pool, c->replaced[i].node);
    pthread_mutex_lock(&o->space);
    for (uint64_t slot = c->run_first; slot < c->run_end; slot++)
        alloc_undo(o->alloc, slot);
    pthread_mutex_unlock(&o->space);
    pthread_rwlock_wrlock(&o->lock);
    o->commit = NULL;
    merge_back(o, &undo);               /* without memory it goes on flying, and the next commit begins with this */
    pthread_rwlock_unlock(&o->lock);
    undo_slots(o, undo.at, undo.count);
    slots_free(&undo);
}

int object_commit_end(struct object *o, int result, bool barrier_failed, struct object_record *record)
{
    struct commit *c = o->commit;

    /* A root that may or may not be on the disk must not see its slots reused, nor be forgotten. */
    if (barrier_failed || (result && c->root_written))
        object_poison(o);
    if (object_poisoned(o) && !result)
        result = -EIO;
    if (!result)
        commit_succeeded(o, c);
    else
        commit_failed(o, c);
    slots_free(&c->retired);
    free(c->replaced);
    secret_wipe(c, sizeof *c);
    free(c);
    if (!result)
        object_record(o, record);
    return result;
}

int object_commit(struct object *o, bool solo, struct object_record *record)
{
    int rc = object_commit_begin(o), barrier = 0;

    if (rc == 1) {
        object_record(o, record);
        return 0;
    }
    if (rc)
        return rc;
    rc = object_commit_write(o, solo);
    if (!rc)
        rc = barrier = object_barrier(o);
    return object_commit_end(o, rc, barrier != 0, record);
}
