/* Walks over all that the last durable root reaches, while commits go on: to learn which slots are in use, to find damage. */
#include "_object_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct walk {
    struct object *o;
    struct root_plain root;             /* as of the beginning */
    /* Called for each tree node; page NULL: it is damaged. 0 goes on below it. */
    int (*tree_node)(struct walk *w, unsigned level, uint64_t index, const struct entry *entry, const struct tree_node *page);
    uint8_t page[BATCH][NODE_SIZE];     /* opened data nodes of a verification */
    void (*progress)(void *arg, uint64_t nodes);
    void (*damaged)(void *arg, uint64_t index, uint64_t count);
    void *arg;
    bool found_damage;
};

static int walk_below(struct walk *w, unsigned level, uint64_t index, const struct entry *entry)
{
    struct tree_node page;
    int rc = tree_read(w->o, level, entry, &page);

    if (rc && rc != -EBADMSG)
        return rc;
    bool damaged = rc != 0;
    rc = w->tree_node(w, level, index, entry, damaged ? NULL : &page);
    for (unsigned i = 0; i < TREE_FANOUT && level > 1 && !damaged && !rc; i++)
        if (page.child[i].slot)
            rc = walk_below(w, level - 1, index * TREE_FANOUT + i, &page.child[i]);
    return rc;
}

/* ---- Scan ---- */

static int mark(struct walk *w, unsigned level, uint64_t index, const struct entry *entry, const struct tree_node *page)
{
    struct object *o = w->o;

    if (!page)
        return -EIO;
    pthread_mutex_lock(&o->space);
    int rc = alloc_scan_mark(o->alloc, entry->slot);
    for (unsigned i = 0; i < TREE_FANOUT && level == 1 && !rc; i++)
        if (page->child[i].slot && !delta_find(&w->root, index * TREE_FANOUT + i))
            rc = alloc_scan_mark(o->alloc, page->child[i].slot);
    pthread_mutex_unlock(&o->space);
    return rc;
}

/* Root and allocator as they are at one moment. *known: there is nothing to learn. */
static int scan_begin(struct walk *w, bool *known)
{
    struct object *o = w->o;
    int rc = 0;

    pthread_mutex_lock(&o->space);
    *known = alloc_known(o->alloc);
    if (!*known)
        rc = o->scanning ? -EBUSY : alloc_scan_begin(o->alloc);
    o->scanning |= !*known && !rc;
    pthread_rwlock_rdlock(&o->lock);
    w->root = o->root->plain;
    pthread_rwlock_unlock(&o->lock);
    pthread_mutex_unlock(&o->space);
    return rc;
}

static int scan_all(struct walk *w)
{
    struct object *o = w->o;
    int rc = 0;

    pthread_mutex_lock(&o->space);
    for (unsigned i = 0; i < w->root.delta_count && !rc; i++)
        if (w->root.delta[i].entry.slot)
            rc = alloc_scan_mark(o->alloc, w->root.delta[i].entry.slot);
    pthread_mutex_unlock(&o->space);
    return rc || !w->root.height ? rc : walk_below(w, w->root.height, 0, &w->root.top);
}

static int scan_end(struct object *o, int rc)
{
    pthread_mutex_lock(&o->space);
    if (rc)
        alloc_scan_cancel(o->alloc);
    else
        rc = alloc_scan_end(o->alloc);
    o->scanning = false;
    pthread_mutex_unlock(&o->space);
    return rc;
}

static void free_walk(struct walk *w)
{
    secret_wipe(w, sizeof *w);
    free(w);
}

int object_scan(struct object *o)
{
    struct walk *w = malloc(sizeof *w);
    bool known;

    if (!w)
        return -ENOMEM;
    w->o = o;
    w->tree_node = mark;
    int rc = object_poisoned(o) ? -EIO : scan_begin(w, &known);
    if (rc == 0 && !known)
        rc = scan_end(o, scan_all(w));  /* nothing that the root reaches is reused before the end */
    free_walk(w);
    return rc;
}

/* ---- Verify ---- */

/* True if the root still reaches the node by this entry. If not, its slot may have been reused since. */
static bool is_reached(struct walk *w, unsigned level, uint64_t index, const struct entry *entry)
{
    struct object *o = w->o;
    struct cursor cursor;
    struct location at;
    int rc = 0;

    cursor_init(&cursor);
    for (;;) {
        pthread_rwlock_rdlock(&o->lock);
        enum where where = level ? tree_locate(o, level, index, &cursor, &at) : root_locate(o, index, &cursor, &at);
        pthread_rwlock_unlock(&o->lock);
        if (where == AT_ENTRY)
            return memcmp(&at.entry, entry, sizeof *entry) == 0;
        if (where != AT_MISSING)
            return false;
        rc = tree_load(o, &at, &cursor);
        if (rc)
            return true;                /* cannot be said: damage is near anyway */
    }
}

static void report(struct walk *w, unsigned level, uint64_t index, const struct entry *entry)
{
    if (!is_reached(w, level, index, entry))
        return;
    uint64_t first = index * tree_span(level), lost = nodes_for(w->root.size) - first;
    w->found_damage = true;
    if (w->damaged)
        w->damaged(w->arg, first, lost < tree_span(level) ? lost : tree_span(level));
}

/* Opens n data nodes, at most BATCH. */
static int verify_data(struct walk *w, const struct delta_entry *const *node, size_t n)
{
    struct open_job job[BATCH];
    uint8_t *sealed = sealed_buffer();
    int rc = sealed ? 0 : -ENOMEM;

    for (size_t i = 0, run; i < n && !rc; i += run) {
        for (run = 1; i + run < n && node[i + run]->entry.slot == node[i]->entry.slot + run;)
            run++;
        rc = blockfile_read(w->o->file, node[i]->entry.slot, sealed + i * NODE_SIZE, run);
    }
    for (size_t i = 0; i < n && !rc; i++)
        job[i] = (struct open_job){.sealed = sealed + i * NODE_SIZE, .plain = w->page[i], .entry = &node[i]->entry,
                                   .kind = NODE_DATA};
    if (!rc)
        rc = open_nodes(w->o->id, job, n);
    if (rc && rc != -EBADMSG)
        return rc;
    for (size_t i = 0; i < n; i++)
        if (job[i].result)
            report(w, 0, node[i]->index, &node[i]->entry);
    if (w->progress)
        w->progress(w->arg, n);
    return 0;
}

static int verify_tree_node(struct walk *w, unsigned level, uint64_t index, const struct entry *entry,
                            const struct tree_node *page)
{
    struct delta_entry child[TREE_FANOUT];
    const struct delta_entry *node[TREE_FANOUT];
    size_t n = 0;

    if (!page) {
        report(w, level, index, entry);
        return 0;
    }
    for (unsigned i = 0; i < TREE_FANOUT && level == 1; i++) {
        child[i] = (struct delta_entry){index * TREE_FANOUT + i, page->child[i]};
        if (child[i].entry.slot && !delta_find(&w->root, child[i].index))
            node[n++] = &child[i];
    }
    int rc = 0;
    for (size_t done = 0; done < n && !rc; done += BATCH)
        rc = verify_data(w, node + done, n - done < BATCH ? n - done : BATCH);
    secret_wipe(child, sizeof child);
    return rc;
}

int object_verify(struct object *o, void (*progress)(void *arg, uint64_t nodes),
                  void (*damaged)(void *arg, uint64_t index, uint64_t count), void *arg)
{
    struct walk *w = malloc(sizeof *w);
    const struct delta_entry *node[DELTA_MAX];
    size_t n = 0;
    int rc = 0;

    if (!w)
        return -ENOMEM;
    w->o = o;
    w->tree_node = verify_tree_node;
    w->progress = progress;
    w->damaged = damaged;
    w->arg = arg;
    w->found_damage = false;
    pthread_rwlock_rdlock(&o->lock);
    w->root = o->root->plain;
    pthread_rwlock_unlock(&o->lock);

    if (w->root.height)
        rc = walk_below(w, w->root.height, 0, &w->root.top);
    for (unsigned i = 0; i < w->root.delta_count; i++)
        if (w->root.delta[i].entry.slot)
            node[n++] = &w->root.delta[i];
    if (n && !rc)
        rc = verify_data(w, node, n);
    bool found = w->found_damage;
    free_walk(w);
    return rc ? rc : found ? -EBADMSG : 0;
}
