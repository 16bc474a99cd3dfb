/* Folding: what a commit changed goes into the tree, level by level from the leaves up. A changed node yields a change of its
 * parent, so each level is one merge of a sorted list with the old nodes, and all nodes of a level can be sealed together. */
#include "_object_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct fold {
    struct object *o;
    struct commit *c;
    const struct root_plain *old;
    const struct generation *g;
    uint64_t nodes;
    struct changes list[TREE_MAX_HEIGHT + 1];   /* by level: entries of that level that change; at first only the cuts' holes */
    struct cursor cursor;
    uint8_t *sealed;                    /* BATCH pages: the first `ready` are sealed, for the slots before run_used */
    size_t ready;
    struct node *pending[BATCH];        /* filled, not sealed yet */
    struct node bare;                   /* stands in when the pool has none, so that a commit never waits for memory */
    struct tree_node bare_page;
    bool bare_pending;
    size_t pending_at[BATCH];           /* where the list being built holds their entries */
    size_t pendings;
};

static const struct entry hole;

static int retire(struct fold *f, uint64_t slot) { return slots_push(&f->c->retired, slot); }

/* Notes that tree node (level, index) has another content, or none, once the commit has succeeded. */
static int replace(struct commit *c, unsigned level, uint64_t index, struct node *node)
{
    if (c->replaced_count == c->replaced_room) {
        size_t room = c->replaced_room ? c->replaced_room * 2 : BATCH;
        struct replaced *grown = realloc(c->replaced, room * sizeof *grown);
        if (!grown)
            return -ENOMEM;
        c->replaced = grown;
        c->replaced_room = room;
    }
    c->replaced[c->replaced_count++] = (struct replaced){.index = index, .level = level, .node = node};
    return 0;
}

/* All that a node of `level` covers was cut. */
static bool is_cut(const struct fold *f, unsigned level, uint64_t index)
{
    return cuts_hold(&f->g->cuts, index * tree_span(level), (index + 1) * tree_span(level));
}

/* ---- Reading the old tree ---- */

/* Entry of an old tree node: 1 and *entry, 0: there is none, or -errno. */
static int old_entry(struct fold *f, unsigned level, uint64_t index, struct entry *entry)
{
    struct object *o = f->o;
    struct location at;
    int rc = 0;

    while (!rc) {
        pthread_rwlock_rdlock(&o->lock);
        tree_locate(o, level, index, &f->cursor, &at);
        pthread_rwlock_unlock(&o->lock);
        if (at.where != AT_MISSING)
            break;
        rc = tree_load(o, &at, &f->cursor);
    }
    if (rc || at.where == AT_HOLE)
        return rc;
    *entry = at.entry;
    return 1;
}

static int old_node(struct fold *f, unsigned level, uint64_t index, const struct entry *entry, struct tree_node *page)
{
    struct object *o = f->o;

    pthread_rwlock_rdlock(&o->lock);
    const struct node *node = table_find(o, level, index);
    if (node)
        copy_page(page, node->page);
    pthread_rwlock_unlock(&o->lock);
    int rc = node ? 0 : tree_read(o, level, entry, page);
    return rc == -EBADMSG ? object_found_damage(o) : rc;
}

/* ---- Cuts ---- */

static int cut_child(struct fold *f, uint64_t index, const struct entry *entry, bool below_cut)
{
    int rc = 0;

    if (!cuts_find(&f->g->cuts, index))
        return 0;
    if (!delta_find(f->old, index)) {   /* else the delta hid it, and it was retired then */
        f->nodes--;
        rc = retire(f, entry->slot);
    }
    return rc || below_cut ? rc : changes_push(&f->list[0], index, &hole);
}

/* Retires all below tree node (level, index) that was cut, and notes the highest nodes that become holes. */
static int cut_below(struct fold *f, unsigned level, uint64_t index, const struct entry *entry, bool below_cut)
{
    uint64_t span = tree_span(level - 1);
    bool cut = below_cut || is_cut(f, level, index);
    struct tree_node page;
    int rc = 0;

    if (cut)
        rc = retire(f, entry->slot);
    if (cut && !rc)
        rc = replace(f->c, level, index, NULL);
    if (cut && !below_cut && !rc)
        rc = changes_push(&f->list[level], index, &hole);
    if (!rc)
        rc = old_node(f, level, index, entry, &page);
    for (unsigned i = 0; i < TREE_FANOUT && !rc; i++) {
        uint64_t child = index * TREE_FANOUT + i;
        if (page.child[i].slot == 0)
            continue;
        if (level == 1)
            rc = cut_child(f, child, &page.child[i], cut);
        else if (cut || cuts_touch(&f->g->cuts, child * span, (child + 1) * span))
            rc = cut_below(f, level - 1, child, &page.child[i], cut);
    }
    secret_wipe(&page, sizeof page);
    return rc;
}

/* ---- Lists ---- */

/* Puts the list `over` on top of *list; takes the memory of both. */
static int merge(struct changes *list, struct changes *over)
{
    struct changes merged = {0};
    size_t i = 0, k = 0;
    int rc = 0;

    if (list->count == 0) {
        changes_free(list);
        *list = *over;
        *over = (struct changes){0};
        return 0;
    }
    while (!rc && (i < list->count || k < over->count)) {
        bool upper = i == list->count || (k < over->count && over->at[k].index <= list->at[i].index);
        const struct delta_entry *e = upper ? &over->at[k] : &list->at[i];
        i += !upper || (i < list->count && list->at[i].index == e->index);
        k += upper;
        rc = changes_push(&merged, e->index, &e->entry);
    }
    changes_free(list);
    changes_free(over);
    *list = merged;
    return rc;
}

/* All data nodes that are to be in the tree and are not: the commit's, and those of the last root's delta that it left alone. */
static int collect_data(struct fold *f)
{
    struct changes data = {0};
    int rc = changes_reserve(&data, f->old->delta_count + f->g->overlay.live);

    for (unsigned i = 0; i < f->old->delta_count && !rc; i++) {
        const struct delta_entry *e = &f->old->delta[i];
        if (!overlay_get(&f->g->overlay, e->index) && !cuts_find(&f->g->cuts, e->index)) {
            rc = changes_push(&data, e->index, &e->entry);
        } else if (e->entry.slot) {
            f->nodes--;
            rc = retire(f, e->entry.slot);
        }
    }
    for (size_t i = 0; i < f->g->overlay.list.count && !rc; i++) {
        const struct delta_entry *e = &f->g->overlay.list.at[i];
        if (e->entry.slot) {
            f->nodes++;
            rc = changes_push(&data, e->index, &e->entry);
        }
    }
    if (!rc) {
        changes_sort(&data);
        rc = merge(&f->list[0], &data);
    }
    changes_free(&data);
    return rc;
}

/* The height that the new tree needs: enough for what is put into it, no more than the size can fill. */
static unsigned new_height(const struct fold *f)
{
    uint64_t nodes = nodes_for(f->c->root.plain.size);
    unsigned most = nodes ? tree_height_for(nodes - 1) : 0, height = f->old->height;
    size_t last = f->list[0].count;

    while (last > 0 && f->list[0].at[last - 1].entry.slot == 0)
        last--;
    if (last > 0 && tree_height_for(f->list[0].at[last - 1].index) > height)
        height = tree_height_for(f->list[0].at[last - 1].index);
    return height < most ? height : most;
}

/* How many tree nodes the lists can touch, at most: distinct ancestors, at the levels above each list. */
static uint64_t count_touched(const struct fold *f, unsigned height)
{
    uint64_t touched = 0;

    for (unsigned level = 0; level < height; level++)
        for (size_t i = 0; i < f->list[level].count; i++) {
            uint64_t here = f->list[level].at[i].index, before = i ? f->list[level].at[i - 1].index : 0;
            for (unsigned l = level + 1; l <= height; l++) {
                here /= TREE_FANOUT;
                before /= TREE_FANOUT;
                if (i && here == before)
                    break;
                touched++;
            }
        }
    return touched;
}

/* ---- Building ---- */

/* Writes what is sealed: the slots just before `next`. */
static int flush_writes(struct fold *f, uint64_t next)
{
    struct iovec iov = {f->sealed, f->ready * NODE_SIZE};
    uint64_t slot = next - f->ready;
    size_t ready = f->ready;

    f->ready = 0;
    return ready ? blockfile_writev(f->o->file, slot, &iov, 1) : 0;
}

static void give_node(struct fold *f, struct node *node)
{
    if (node != &f->bare)
        pool_give(f->o->env->pool, node);
}

/* Seals the pending nodes; their entries in `out` become complete, and they wait in the commit's list to be cached. */
static int seal_pending(struct fold *f, unsigned level, struct changes *out)
{
    struct seal_job job[BATCH];
    size_t n = f->pendings;
    int rc = 0;

    for (size_t i = 0; i < n; i++)
        job[i] = (struct seal_job){.plain = f->pending[i]->page, .sealed = f->sealed + (f->ready + i) * NODE_SIZE,
                                   .kind = NODE_TREE, .level = (uint8_t)level};
    if (n)
        rc = seal_nodes(f->o->id, job, n);
    f->ready += rc ? 0 : n;
    f->pendings = 0;
    f->bare_pending = false;
    for (size_t i = 0; i < n; i++) {
        struct node *node = f->pending[i];
        struct entry *entry = &out->at[f->pending_at[i]].entry;
        memcpy(entry->key, job[i].key, KEY_SIZE);
        memcpy(entry->tag, job[i].tag, TAG_SIZE);
        bool keep = !rc && !node->overflow;
        if (!rc)
            rc = replace(f->c, level, node->index, keep ? node : NULL);
        if (rc || !keep)
            give_node(f, node);
    }
    secret_wipe(job, n * sizeof job[0]);
    return rc;
}

/* Takes over a filled node: gives it its slot and its place in `out`. */
static int finish_node(struct fold *f, unsigned level, struct node *node, struct changes *out)
{
    struct commit *c = f->c;
    struct entry entry = {.slot = c->run_used};
    int rc = changes_push(out, node->index, &entry);

    if (rc) {
        give_node(f, node);
        return rc;
    }
    c->run_used++;
    f->bare_pending |= node == &f->bare;
    f->pending_at[f->pendings] = out->count - 1;
    f->pending[f->pendings++] = node;
    if (f->ready + f->pendings == BATCH) {
        rc = seal_pending(f, level, out);
        if (!rc)
            rc = flush_writes(f, c->run_used);
    }
    return rc;
}

static bool is_empty(const struct tree_node *page)
{
    for (unsigned i = 0; i < TREE_FANOUT; i++)
        if (page->child[i].slot)
            return false;
    return true;
}

/* Fills `page` with the old content of tree node (level, index), which the new one replaces. */
static int start_node(struct fold *f, unsigned level, uint64_t index, struct tree_node *page)
{
    struct entry entry;
    int rc = 0;

    if (level <= f->old->height && !is_cut(f, level, index))
        rc = old_entry(f, level, index, &entry);
    if (rc <= 0) {
        memset(page, 0, sizeof *page);
        return rc;
    }
    rc = old_node(f, level, index, &entry, page);
    if (!rc)
        rc = retire(f, entry.slot);
    return rc ? rc : replace(f->c, level, index, NULL);
}

/* A leaf's child is replaced: its data node is retired, unless the delta or the cuts saw to that. */
static int replace_data(struct fold *f, uint64_t index, const struct entry *old)
{
    if (old->slot == 0 || delta_find(f->old, index) || cuts_find(&f->g->cuts, index))
        return 0;
    f->nodes--;
    return retire(f, old->slot);
}

/* A node to build in. One that stands in is sealed before it is used again. */
static int take_node(struct fold *f, unsigned level, struct changes *out, struct node **node)
{
    if (pool_take(f->o->env->pool, POOL_TREE, POOL_COMMIT, false, node) == 0)
        return 0;
    *node = &f->bare;
    return f->bare_pending ? seal_pending(f, level, out) : 0;
}

/* Makes tree node (level, index) from its old content and n changes of its children. */
static int build_node(struct fold *f, unsigned level, uint64_t index, const struct delta_entry *change, size_t n,
                      struct changes *out)
{
    struct node *node;

    int rc = take_node(f, level, out, &node);
    if (rc)
        return rc;
    struct tree_node *page = node->page;
    rc = start_node(f, level, index, page);
    node->level = (uint8_t)level;
    node->index = index;
    for (size_t i = 0; i < n && !rc; i++) {
        struct entry *child = &page->child[change[i].index % TREE_FANOUT];
        if (level == 1)
            rc = replace_data(f, change[i].index, child);
        *child = change[i].entry;
    }
    if (!rc && !is_empty(page))
        return finish_node(f, level, node, out);
    give_node(f, node);
    return rc ? rc : changes_push(out, index, &hole);
}

/* Builds all nodes of `level` whose children changed: list[level - 1] becomes list[level]. */
static int build_level(struct fold *f, unsigned level)
{
    const struct changes *in = &f->list[level - 1];
    struct changes out = {0};
    int rc = 0;

    for (size_t i = 0, n; i < in->count && !rc; i += n) {
        uint64_t index = in->at[i].index / TREE_FANOUT;
        for (n = 1; i + n < in->count && in->at[i + n].index / TREE_FANOUT == index;)
            n++;
        rc = build_node(f, level, index, &in->at[i], n, &out);
    }
    if (!rc)
        rc = seal_pending(f, level, &out);
    if (!rc)
        rc = merge(&f->list[level], &out);
    changes_free(&out);
    return rc;
}

/* The tree became lower: the nodes above its new top go. */
static int lower(struct fold *f, unsigned height)
{
    struct entry entry = {0};
    int rc = 0;

    for (unsigned level = height + 1; level <= f->old->height && rc >= 0; level++) {
        if (is_cut(f, level, 0) || (rc = old_entry(f, level, 0, &entry)) <= 0)
            continue;
        rc = retire(f, entry.slot);
        if (!rc)
            rc = replace(f->c, level, 0, NULL);
    }
    return rc < 0 ? rc : 0;
}

/* The new top: built, or an old node below which nothing changed, or a hole. */
static int find_top(struct fold *f, unsigned height, struct entry *top)
{
    const struct changes *list = &f->list[height];
    int rc = 0;

    *top = hole;
    if (height && list->count && list->at[0].index == 0)
        *top = list->at[0].entry;
    else if (height)
        rc = old_entry(f, height, 0, top);
    return rc < 0 ? rc : 0;
}

/* Space for all tree nodes of the commit, in one run. */
static int take_run(struct fold *f, unsigned height)
{
    struct commit *c = f->c;
    uint64_t n = count_touched(f, height);
    int rc = 0;

    if (n == 0)
        return 0;
    pthread_mutex_lock(&f->o->space);
    rc = alloc_run(f->o->alloc, n, &c->run_first);
    pthread_mutex_unlock(&f->o->space);
    if (!rc) {
        c->run_used = c->run_first;
        c->run_end = c->run_first + n;
    }
    return rc;
}

static int fold(struct fold *f)
{
    struct root_plain *p = &f->c->root.plain;
    unsigned old_height = f->old->height;
    int rc = 0;

    if (old_height && f->g->cuts.count)
        rc = cut_below(f, old_height, 0, &f->old->top, false);
    if (!rc)
        rc = collect_data(f);
    if (rc)
        return rc;
    unsigned height = new_height(f);
    if (height > old_height && old_height && f->list[old_height].count == 0)
        rc = changes_push(&f->list[old_height], 0, &f->old->top);     /* the old top becomes a child */
    if (!rc)
        rc = take_run(f, height);
    for (unsigned level = 1; level <= height && !rc; level++)
        rc = build_level(f, level);
    if (!rc)
        rc = flush_writes(f, f->c->run_used);
    if (!rc && height < old_height)
        rc = lower(f, height);
    if (!rc)
        rc = find_top(f, height, &p->top);
    if (rc)
        return rc;
    p->height = p->top.slot ? (uint8_t)height : 0;
    p->nodes = f->nodes;
    p->delta_count = 0;
    return 0;
}

int tree_fold(struct object *o, struct commit *c)
{
    struct fold *f = malloc(sizeof *f);

    if (!f)
        return -ENOMEM;
    memset(f->list, 0, sizeof f->list);
    f->o = o;
    f->c = c;
    f->old = &o->root->plain;
    f->g = o->flying;
    f->nodes = f->old->nodes;
    f->ready = f->pendings = 0;
    f->bare = (struct node){.page = &f->bare_page, .overflow = true};
    f->bare_pending = false;
    f->sealed = sealed_buffer();
    cursor_init(&f->cursor);
    int rc = f->sealed ? fold(f) : -ENOMEM;
    for (size_t i = 0; i < f->pendings; i++)
        give_node(f, f->pending[i]);
    for (unsigned level = 0; level <= TREE_MAX_HEIGHT; level++)
        changes_free(&f->list[level]);
    secret_wipe(&f->cursor, sizeof f->cursor);
    secret_wipe(&f->bare_page, sizeof f->bare_page);
    free(f);
    return rc;
}
