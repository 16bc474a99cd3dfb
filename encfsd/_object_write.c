/* How the current generation changes. Every change is an `update`: prepared without the lock (sealing, reading what is written in
 * part), then applied under it in one step that cannot fail half way. */
#include "_object_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- Dirty lists ---- */

void generation_append(struct object *o, struct generation *g, struct node *node)
{
    node->state = NODE_DIRTY;
    node->commit = g->tag;
    node->list_next = NULL;
    node->list_prev = g->dirty_last;
    if (g->dirty_last)
        g->dirty_last->list_next = node;
    else
        g->dirty_first = node;
    g->dirty_last = node;
    g->dirty++;
    atomic_fetch_add(&o->env->dirty_nodes, 1);
}

void generation_unlink(struct object *o, struct generation *g, struct node *node)
{
    if (node->list_prev)
        node->list_prev->list_next = node->list_next;
    else
        g->dirty_first = node->list_next;
    if (node->list_next)
        node->list_next->list_prev = node->list_prev;
    else
        g->dirty_last = node->list_prev;
    g->dirty--;
    atomic_fetch_sub(&o->env->dirty_nodes, 1);
}

void supersede(struct object *o, struct node *node)
{
    bool current = node->commit == o->current->tag;

    table_remove(o, node);
    if (node->state == NODE_CLEAN) {
        pool_give(o->env->pool, node);
    } else if (current && node->state == NODE_DIRTY) {
        generation_unlink(o, o->current, node);
        pool_give(o->env->pool, node);
    } else if (current) {
        node->state = NODE_DROPPED;
    }
    /* else: the commit in flight still needs it */
}

/* ---- Updates ---- */

/* Bytes [from, to) of one node. As a rule they change a node in memory; if the pool has none to give, what they make of the old
 * content is sealed and written without the lock, and linked if nothing else has changed the object meanwhile. */
struct patch {
    uint64_t index;
    size_t from, to;
    const uint8_t *source;              /* NULL: zeros */
    struct node *spare;                 /* takes the new content if the node is not in memory or must not change; NULL: there was
                                           none, then the new content is sealed at once */
    struct entry sealed;                /* of it, in a slot of its own; slot 0: not sealed yet */
    uint64_t sealed_for;                /* object.updates that it was made for */
    struct location at;                 /* of the old content, as patch_needs found it under this hold of the lock */
    struct cursor cursor;
    bool loaded;                        /* page holds what entry names */
    struct entry entry;
    uint8_t page[NODE_SIZE];
};

struct update {
    struct patch *patch;                /* two of them, on the caller's stack */
    int patches;
    uint64_t cut_first, cut_last;       /* nodes that become holes */
    uint64_t direct_index;              /* nodes that were sealed already */
    struct entry *direct;
    size_t directs;
    uint64_t fresh_index;               /* whole nodes in memory */
    struct node **fresh;
    size_t freshes;
    uint64_t size;                      /* of the object, if it is to */
    bool grow, set;                     /* ... reach at least that, become exactly that */
    uint64_t expected;                  /* size that the update was made for, */
    bool expects;                       /* ... if it matters: else -ESTALE */
    struct slots replaced;              /* out: slots that no root reaches any more */
};

/* An estimate, without I/O, of whether node `index` was a hole: what must be loaded first counts as data. */
static bool is_new(struct object *o, uint64_t index)
{
    struct location at;

    if (is_dense(o) && index < o->root->plain.nodes)
        return false;
    return locate(o, index, NULL, &at) == AT_HOLE;
}

/* Without memory for the list the slot is lost until the next scan. */
static void replaced_push(struct update *u, uint64_t slot)
{
    if (slot)
        slots_push(&u->replaced, slot);
}

static void drop_index(struct object *o, struct update *u, uint64_t index, uint64_t committed)
{
    struct node *node = table_find(o, 0, index);
    uint64_t slot = overlay_drop(&o->current->overlay, index);
    bool was_new = index >= committed && (node || slot);

    if (node)
        supersede(o, node);
    replaced_push(u, slot);
    o->current->grown -= was_new;
}

/* Drops what memory and the current overlay hold of [first, last), by the shorter way, and cuts what lies below them. */
static void apply_cut(struct object *o, struct update *u)
{
    struct changes *list = &o->current->overlay.list;
    uint64_t first = u->cut_first, last = u->cut_last, committed = committed_nodes(o);

    if (last > nodes_for(o->size))
        last = nodes_for(o->size);      /* what lies past it was cut before */
    if (first >= last)
        return;
    if (last - first <= o->data_in_table + list->count) {
        for (uint64_t i = first; i < last; i++)
            drop_index(o, u, i, committed);
    } else {
        for (size_t b = 0; b < o->buckets; b++)
            for (struct node *node = o->bucket[b], *next; node; node = next) {
                next = node->hash_next;
                if (node->level == 0 && node->index >= first && node->index < last)
                    drop_index(o, u, node->index, committed);
            }
        for (size_t i = 0; i < list->count; i++)
            if (list->at[i].entry.slot && list->at[i].index >= first && list->at[i].index < last)
                drop_index(o, u, list->at[i].index, committed);
    }
    if (first < committed)              /* nothing older lies past its end: then the cut goes on for ever, and covers whole nodes */
        cuts_add(&o->current->cuts, first, last < committed ? last : UINT64_MAX);
}

/* A patch of zeros past the end of the object changes nothing. */
static bool is_idle(const struct object *o, const struct patch *p)
{
    return !p->source && p->index * NODE_SIZE + p->from >= o->size;
}

/* True if the node may change where it is: it waits for the current commit, and nobody seals it. */
static bool is_writable(const struct object *o, const struct node *node)
{
    return node->state == NODE_CLEAN || (node->state == NODE_DIRTY && node->commit == o->current->tag);
}

/* True if the patch makes content that no node in memory can take. */
static bool needs_spare(const struct object *o, const struct patch *p)
{
    if (is_idle(o, p) || (p->at.where == AT_HOLE && !p->source))
        return false;
    return p->at.where != AT_NODE || !is_writable(o, p->at.node);
}

static void patch_bytes(const struct patch *p, uint8_t *page)
{
    if (p->source)
        memcpy(page + p->from, p->source, p->to - p->from);
    else
        memset(page + p->from, 0, p->to - p->from);
}

/* Links a node that was sealed. */
static void apply_sealed(struct object *o, struct update *u, uint64_t index, const struct entry *entry, uint64_t committed)
{
    struct node *node = o->data_in_table ? table_find(o, 0, index) : NULL;
    bool fresh = !node && (index < committed || overlay_get(&o->current->overlay, index) ? is_new(o, index) : true);

    if (node)
        supersede(o, node);
    replaced_push(u, overlay_put(&o->current->overlay, index, entry));
    o->current->grown += fresh;
}

static void apply_patch(struct object *o, struct update *u, struct patch *p, uint64_t committed)
{
    struct node *node = p->at.node;
    enum where where = p->at.where;

    if (is_idle(o, p) || (where == AT_HOLE && !p->source))
        return;
    if (!p->spare && needs_spare(o, p)) {
        apply_sealed(o, u, p->index, &p->sealed, committed);
        p->sealed.slot = 0;
        return;
    }
    if (where == AT_NODE && is_writable(o, node)) {
        if (node->state == NODE_CLEAN) {
            atomic_store(&node->owner, NULL);
            generation_append(o, o->current, node);
        }
    } else {
        node = p->spare;
        p->spare = NULL;
        if (where == AT_HOLE)
            memset(node->page, 0, NODE_SIZE);
        else
            memcpy(node->page, where == AT_NODE ? p->at.node->page : p->page, NODE_SIZE);
        if (where == AT_NODE)
            supersede(o, p->at.node);
        node->level = 0;
        node->index = p->index;
        generation_append(o, o->current, node);
        table_insert(o, node);
        o->current->grown += where == AT_HOLE;
    }
    patch_bytes(p, node->page);
}

static void apply(struct object *o, struct update *u)
{
    uint64_t committed = committed_nodes(o);

    o->updates++;
    apply_cut(o, u);
    for (size_t i = 0; i < u->directs; i++)
        apply_sealed(o, u, u->direct_index + i, &u->direct[i], committed);
    for (size_t i = 0; i < u->freshes; i++) {
        struct node *node = u->fresh[i], *old = table_find(o, 0, u->fresh_index + i);

        if (old)
            supersede(o, old);
        else
            o->current->grown += is_new(o, u->fresh_index + i);
        node->level = 0;
        node->index = u->fresh_index + i;
        generation_append(o, o->current, node);
        table_insert(o, node);
        u->fresh[i] = NULL;
    }
    for (int i = 0; i < u->patches; i++)
        apply_patch(o, u, &u->patch[i], committed);
    if (u->set || (u->grow && u->size > o->size)) {
        o->current->attr_dirty |= o->size != u->size;
        o->size = u->size;
    }
}

/* True if something must be loaded before the patch can be applied: what p->at misses, or the data node. lock held. */
static bool patch_needs(struct object *o, struct patch *p)
{
    if (is_idle(o, p))
        return false;
    enum where where = locate(o, p->index, &p->cursor, &p->at);
    if (p->sealed.slot && p->sealed_for == o->updates)
        return false;
    switch (where) {
    case AT_MISSING:
        return true;
    case AT_ENTRY:
        return !p->loaded || memcmp(&p->entry, &p->at.entry, sizeof p->entry) != 0;
    default:
        return false;
    }
}

/* Whatever is found, the patch is looked at again under the lock. */
static int patch_load(struct object *o, struct patch *p)
{
    if (p->at.where == AT_MISSING)
        return tree_load(o, &p->at, &p->cursor);
    int rc = read_node(o, p->index, p->page, &p->entry);
    p->loaded = !rc && p->entry.slot;
    return rc;
}

/* Seals n nodes, at most BATCH, into new slots. On error, what entry[].slot names must be given back. */
static int seal_run(struct object *o, const uint8_t *buffer, size_t n, struct entry *entry)
{
    const void *page[BATCH];
    int rc = take_slots(o, n, entry);

    for (size_t i = 0; i < n; i++)
        page[i] = buffer + i * NODE_SIZE;
    return rc ? rc : seal_to_slots(o, page, n, entry);
}

/* A node for new content. -EAGAIN or -ENOMEM: there is none, and with OBJECT_NOWAIT the caller comes again; else it does without.
 * An object that is short of nodes seals its own dirty ones first; only then, and only if the caller holds none, it waits. */
static int take_data(struct object *o, bool holds_none, int flags, struct node **node)
{
    int rc = pool_take(o->env->pool, POOL_DATA, POOL_APPLICATION, false, node);

    if (!rc || (flags & OBJECT_NOWAIT))
        return rc ? -EAGAIN : 0;
    object_write_back(o, BATCH);        /* what fails here stays dirty and fails again in a commit */
    return pool_take(o->env->pool, POOL_DATA, POOL_APPLICATION, holds_none && (flags & OBJECT_QUEUE), node);
}

/* -EAGAIN with OBJECT_NOWAIT, else 0: patches without a spare are sealed at once. */
static int take_spares(struct object *o, struct update *u, int flags)
{
    for (int i = 0; i < u->patches; i++) {
        int rc = take_data(o, i == 0 && u->freshes == 0, flags, &u->patch[i].spare);
        if (rc)
            return flags & OBJECT_NOWAIT ? rc : 0;
    }
    return 0;
}

/* True if the patch must be sealed before it can be applied: then its page holds what it is made of. lock held. */
static bool patch_must_be_sealed(struct object *o, struct patch *p)
{
    if (p->spare || !needs_spare(o, p) || (p->sealed.slot && p->sealed_for == o->updates))
        return false;
    if (p->at.where == AT_HOLE)
        memset(p->page, 0, NODE_SIZE);
    else if (p->at.where == AT_NODE)
        memcpy(p->page, p->at.node->page, NODE_SIZE);
    p->sealed_for = o->updates;
    return true;
}

static void patch_unseal(struct object *o, struct patch *p)
{
    if (p->sealed.slot)
        undo_slots(o, &p->sealed.slot, 1);
    p->sealed.slot = 0;
}

/* Seals what the patch makes of its page. */
static int patch_seal(struct object *o, struct patch *p)
{
    patch_unseal(o, p);
    p->loaded = false;                  /* the page will hold the new content */
    patch_bytes(p, p->page);
    int rc = seal_run(o, p->page, 1, &p->sealed);
    if (rc)
        patch_unseal(o, p);
    return rc;
}

/* Brings an update about, all of it or nothing. Takes what it needs of u->fresh (entries become NULL). 0 or -errno. */
static int object_update(struct object *o, struct update *u, int flags)
{
    int rc = take_spares(o, u, flags);

    while (!rc) {
        struct patch *needy = NULL, *unsealed = NULL;

        pthread_rwlock_wrlock(&o->lock);
        if (u->expects && o->size != u->expected)
            rc = -ESTALE;
        for (int i = 0; i < u->patches && !rc && !needy; i++)
            if (patch_needs(o, &u->patch[i]))
                needy = &u->patch[i];
        for (int i = 0; i < u->patches && !rc && !needy && !unsealed; i++)
            if (patch_must_be_sealed(o, &u->patch[i]))
                unsealed = &u->patch[i];
        if (!rc && !needy && !unsealed) {
            if (!table_reserve(o) || overlay_reserve(&o->current->overlay, u->directs + (size_t)u->patches)
                || cuts_reserve(&o->current->cuts, 1))
                rc = -ENOMEM;
            else
                apply(o, u);
        }
        pthread_rwlock_unlock(&o->lock);
        if (rc || (!needy && !unsealed))
            break;
        if (flags & OBJECT_NOWAIT)
            rc = -EAGAIN;
        else
            rc = needy ? patch_load(o, needy) : patch_seal(o, unsealed);
    }
    for (int i = 0; i < u->patches; i++) {
        if (u->patch[i].spare)
            pool_give(o->env->pool, u->patch[i].spare);
        patch_unseal(o, &u->patch[i]);
    }
    undo_slots(o, u->replaced.at, u->replaced.count);
    slots_free(&u->replaced);
    return rc;
}

static void add_patch(struct update *u, uint64_t offset, size_t length, const uint8_t *source)
{
    struct patch *p = &u->patch[u->patches++];

    p->index = offset / NODE_SIZE;
    p->from = offset % NODE_SIZE;
    p->to = p->from + length;
    p->source = source;
    p->loaded = false;
    p->spare = NULL;
    p->sealed = (struct entry){0};
    cursor_init(&p->cursor);
}

/* ---- Sealing from the caller's buffer ---- */

struct direct {
    struct object *o;
    const uint8_t *buffer;
    struct entry *entry;
    size_t n;
    _Atomic int rc;
};

static void direct_batch(void *arg, size_t i)
{
    struct direct *d = arg;
    size_t first = i * BATCH, n = d->n - first < BATCH ? d->n - first : BATCH;
    int expected = 0, rc = seal_run(d->o, d->buffer + first * NODE_SIZE, n, d->entry + first);

    if (rc)
        atomic_compare_exchange_strong(&d->rc, &expected, rc);
}

/* Seals n whole nodes into new slots. 0 and their entries, or -errno. */
static int seal_direct(struct object *o, const uint8_t *buffer, size_t n, struct entry *entry)
{
    struct direct d = {.o = o, .buffer = buffer, .entry = entry, .n = n};
    size_t batches = (n + BATCH - 1) / BATCH;

    if (batches == 1)
        direct_batch(&d, 0);
    else
        workers_parallel(o->env->workers, direct_batch, &d, batches);
    return d.rc;
}

/* ---- Write ---- */

/* Keeps dirty memory bounded: whoever would pass the limit writes nodes back itself. */
static int throttle(struct object *o, size_t nodes, int flags)
{
    struct object_env *env = o->env;
    uint64_t dirty = atomic_load_explicit(&env->dirty_nodes, memory_order_relaxed);

    if (nodes == 0 || dirty + nodes <= env->dirty_limit)
        return 0;
    if (flags & OBJECT_NOWAIT)
        return -EAGAIN;
    return object_write_back(o, nodes > BATCH ? nodes : BATCH);
}

/* Copies n whole nodes into memory. 0, -EAGAIN or -ENOMEM: there are not enough, and none is kept. */
static int copy_fresh(struct object *o, const uint8_t *buffer, size_t n, int flags, struct node **fresh)
{
    size_t taken = 0;
    int rc = 0;

    for (; taken < n && !rc; taken += !rc) {
        rc = take_data(o, taken == 0, flags, &fresh[taken]);
        if (!rc)
            copy_page(fresh[taken]->page, buffer + taken * NODE_SIZE);
    }
    while (rc && taken > 0) {
        pool_give(o->env->pool, fresh[--taken]);
        fresh[taken] = NULL;
    }
    return rc;
}

/* Seals n whole nodes at `buffer`, then makes them and the patches part of the object. */
static int write_direct(struct object *o, struct update *u, const uint8_t *buffer, uint64_t index, size_t n, int flags)
{
    struct entry *entry = calloc(n, sizeof *entry);

    if (!entry)
        return -ENOMEM;
    u->direct = entry;
    u->direct_index = index;
    u->directs = n;
    int rc = seal_direct(o, buffer, n, entry);
    if (!rc)
        rc = object_update(o, u, flags);
    for (size_t i = 0; i < n && rc; i++)
        if (entry[i].slot)
            undo_slots(o, &entry[i].slot, 1);
    secret_wipe(entry, n * sizeof *entry);
    free(entry);
    return rc;
}

/* Writes n whole nodes at `buffer`, and the patches of the update. */
static int write_nodes(struct object *o, struct update *u, const uint8_t *buffer, uint64_t index, size_t n, int flags)
{
    bool direct = n >= DIRECT_MIN && !(flags & OBJECT_NOWAIT);
    int rc = throttle(o, (size_t)u->patches + (direct ? 0 : n), flags);
    struct node *few[DIRECT_MIN] = {0}, **fresh = few;

    if (rc)
        return rc;
    if (direct)
        return write_direct(o, u, buffer, index, n, flags);
    if (n > DIRECT_MIN && !(fresh = calloc(n, sizeof(struct node *))))
        return -ENOMEM;
    rc = copy_fresh(o, buffer, n, flags, fresh);
    if (!rc) {
        u->fresh = fresh;
        u->fresh_index = index;
        u->freshes = n;
        rc = object_update(o, u, flags);
    } else if (!(flags & OBJECT_NOWAIT)) {
        rc = write_direct(o, u, buffer, index, n, flags);
    }
    for (size_t i = 0; i < n; i++)
        if (fresh[i])
            pool_give(o->env->pool, fresh[i]);
    if (fresh != few)
        free(fresh);
    return rc;
}

static int may_change(struct object *o)
{
    if (object_poisoned(o))
        return -EIO;
    return o->env->read_only ? -EROFS : 0;
}

int object_write(struct object *o, const void *buffer, size_t size, uint64_t offset, int flags)
{
    const uint8_t *bytes = buffer;
    int rc = may_change(o);

    if (rc || size == 0)
        return rc;
    if (offset > OBJECT_MAX_SIZE || size > OBJECT_MAX_SIZE - offset)
        return -EFBIG;

    uint64_t end = offset + size, first = nodes_for(offset), last = end / NODE_SIZE;
    struct patch patch[2];
    struct update u = {.patch = patch, .grow = true, .size = end};
    if (offset % NODE_SIZE)
        add_patch(&u, offset, (end < first * NODE_SIZE ? end : first * NODE_SIZE) - offset, bytes);
    if (end % NODE_SIZE && last >= first)
        add_patch(&u, last * NODE_SIZE, end % NODE_SIZE, bytes + (last * NODE_SIZE - offset));
    if (last <= first)
        return write_nodes(o, &u, NULL, first, 0, flags);
    return write_nodes(o, &u, bytes + (first * NODE_SIZE - offset), first, last - first, flags);
}

/* ---- Truncate, punch ---- */

int object_truncate(struct object *o, uint64_t size, int flags)
{
    int rc = may_change(o);

    if (rc)
        return rc;
    if (size > OBJECT_MAX_SIZE)
        return -EFBIG;
    struct patch patch[2];
    struct update u = {.patch = patch, .set = true, .size = size, .cut_first = nodes_for(size), .cut_last = UINT64_MAX};
    if (size % NODE_SIZE)
        add_patch(&u, size, NODE_SIZE - size % NODE_SIZE, NULL);
    rc = throttle(o, (size_t)u.patches, flags);
    return rc ? rc : object_update(o, &u, flags);
}

int object_extend(struct object *o, uint64_t size, int flags)
{
    struct update u = {.grow = true, .size = size};
    int rc = may_change(o);

    if (rc)
        return rc;
    return size > OBJECT_MAX_SIZE ? -EFBIG : object_update(o, &u, flags);
}

/* Zeroes [offset, end) of an object of `size` bytes: nodes that lie in it become holes, the last one also if only bytes past the
 * end of the object remain of it. */
static int punch(struct object *o, uint64_t offset, uint64_t end, uint64_t size, int flags)
{
    struct patch patch[2];
    struct update u = {.patch = patch, .expects = true, .expected = size};

    if (end >= size)
        end = nodes_for(size) * NODE_SIZE;
    if (offset >= end)
        return 0;
    u.cut_first = nodes_for(offset);
    u.cut_last = end / NODE_SIZE;
    if (offset % NODE_SIZE) {
        uint64_t stop = u.cut_first * NODE_SIZE;
        add_patch(&u, offset, (end < stop ? end : stop) - offset, NULL);
    }
    if (end % NODE_SIZE && u.cut_last >= u.cut_first)
        add_patch(&u, u.cut_last * NODE_SIZE, end % NODE_SIZE, NULL);
    int rc = throttle(o, (size_t)u.patches, flags);
    return rc ? rc : object_update(o, &u, flags);
}

int object_punch(struct object *o, uint64_t offset, uint64_t size, int flags)
{
    struct object_attr attr;
    int rc = may_change(o);

    if (rc)
        return rc;
    if (offset > OBJECT_MAX_SIZE || size > OBJECT_MAX_SIZE - offset)
        return -EFBIG;
    do {
        object_attr(o, &attr);
        rc = punch(o, offset, offset + size, attr.size, flags);
    } while (rc == -ESTALE);            /* it grew or shrank meanwhile */
    return rc;
}
