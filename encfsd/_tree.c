#include "_object_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_BUCKETS = 16 };

/* ---- Node table ---- */

/* Neighbours of one level lie in neighbouring buckets. */
static size_t bucket_of(const struct object *o, unsigned level, uint64_t index)
{
    return (size_t)(index + level * 0x9e3779b97f4a7c15u) & (o->buckets - 1);
}

struct node *table_find(struct object *o, unsigned level, uint64_t index)
{
    if (o->buckets == 0)
        return NULL;
    struct node *node = o->bucket[bucket_of(o, level, index)];
    while (node && (node->index != index || node->level != level))
        node = node->hash_next;
    /* Many readers share the line of a hot node: write only what changes. */
    if (node && !atomic_load_explicit(&node->referenced, memory_order_relaxed))
        atomic_store_explicit(&node->referenced, 1, memory_order_relaxed);
    return node;
}

bool table_holds(struct object *o, const struct node *node)
{
    return table_find(o, node->level, node->index) == node;
}

/* Doubles the buckets. Without memory the chains just get longer; only the very first buckets are needed. */
static bool table_grow(struct object *o)
{
    size_t buckets = o->buckets ? o->buckets * 2 : FIRST_BUCKETS;
    struct node **bucket = calloc(buckets, sizeof *bucket), **old = o->bucket;
    size_t old_buckets = o->buckets;

    if (!bucket)
        return o->buckets > 0;
    o->bucket = bucket;
    o->buckets = buckets;
    for (size_t i = 0; i < old_buckets; i++)
        for (struct node *node = old[i], *next; node; node = next) {
            struct node **chain = &bucket[bucket_of(o, node->level, node->index)];
            next = node->hash_next;
            node->hash_next = *chain;
            *chain = node;
        }
    free(old);
    return true;
}

bool table_reserve(struct object *o)
{
    return o->buckets > 0 || table_grow(o);
}

void table_insert(struct object *o, struct node *node)
{
    if (o->in_table >= o->buckets)
        table_grow(o);
    struct node **chain = &o->bucket[bucket_of(o, node->level, node->index)];
    node->hash_next = *chain;
    *chain = node;
    o->in_table++;
    o->data_in_table += node->level == 0;
}

void table_remove(struct object *o, struct node *node)
{
    struct node **link = &o->bucket[bucket_of(o, node->level, node->index)];

    while (*link != node)
        link = &(*link)->hash_next;
    *link = node->hash_next;
    o->in_table--;
    o->data_in_table -= node->level == 0;
    atomic_store(&node->owner, NULL);
}

void table_settle(struct object *o, struct node *node, bool keep)
{
    if (keep && !node->overflow) {
        node->state = NODE_CLEAN;
        atomic_store(&node->owner, o);
    } else {
        table_remove(o, node);
        pool_give(o->env->pool, node);
    }
}

/* ---- Finding ---- */

const struct delta_entry *delta_find(const struct root_plain *root, uint64_t index)
{
    unsigned low = 0, high = root->delta_count;

    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (root->delta[middle].index < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low < root->delta_count && root->delta[low].index == index ? &root->delta[low] : NULL;
}

static enum where found_hole(struct location *at, uint64_t end)
{
    at->hole_end = end;
    return at->where = AT_HOLE;
}

static enum where found_entry(struct location *at, const struct entry *entry)
{
    at->entry = *entry;
    return at->where = AT_ENTRY;
}

/* Content of a tree node, from the cursor or the node table; NULL: neither has it. */
static const struct tree_node *page_of(struct object *o, unsigned level, uint64_t index, const struct cursor *cursor)
{
    if (cursor && cursor->level == level && cursor->index == index && cursor->version == o->tree_version)
        return &cursor->node;
    const struct node *node = table_find(o, level, index);
    return node ? node->page : NULL;
}

/* Climbs from the wanted node to the nearest ancestor in memory; its child towards the wanted node is the answer if it is the
 * wanted one or a hole, else what must be loaded next. */
enum where tree_locate(struct object *o, unsigned level, uint64_t index, const struct cursor *cursor, struct location *at)
{
    const struct root_plain *root = &o->root->plain;
    const struct entry *entry = &root->top;
    unsigned height = root->height, l;
    uint64_t i = index;

    at->version = o->tree_version;
    if (height < level || height == 0 || index >= tree_span(height - level))
        return found_hole(at, UINT64_MAX);
    for (l = level; l < height; l++) {
        uint64_t parent = i / TREE_FANOUT;
        const struct tree_node *page = page_of(o, l + 1, parent, cursor);

        if (page) {
            entry = &page->child[i % TREE_FANOUT];
            break;
        }
        i = parent;
    }
    if (entry->slot == 0)
        return found_hole(at, (i + 1) * tree_span(l - level));
    if (l == level)
        return found_entry(at, entry);
    at->level = l;
    at->index = i;
    at->entry = *entry;
    return at->where = AT_MISSING;
}

uint64_t tree_run_end(struct object *o, uint64_t index, const struct cursor *cursor)
{
    const struct tree_node *leaf = page_of(o, 1, index / TREE_FANOUT, cursor);

    if (leaf)
        do
            if (leaf->child[index % TREE_FANOUT].slot == 0)
                break;
        while (++index % TREE_FANOUT);
    return index;
}

enum where root_locate(struct object *o, uint64_t index, const struct cursor *cursor, struct location *at)
{
    const struct delta_entry *d = delta_find(&o->root->plain, index);

    if (!d)
        return tree_locate(o, 0, index, cursor, at);
    return d->entry.slot ? found_entry(at, &d->entry) : found_hole(at, index + 1);
}

enum where locate(struct object *o, uint64_t index, const struct cursor *cursor, struct location *at)
{
    struct generation *generation[] = {o->current, o->flying};

    at->node = o->data_in_table ? table_find(o, 0, index) : NULL;
    if (at->node)
        return at->where = AT_NODE;
    for (int i = 0; i < 2; i++) {
        struct generation *g = generation[i];
        const struct entry *e = g ? overlay_get(&g->overlay, index) : NULL;
        if (e)
            return found_entry(at, e);
        const struct range *cut = g && g->cuts.count ? cuts_find(&g->cuts, index) : NULL;
        if (cut)
            return found_hole(at, cut->last);
    }
    return root_locate(o, index, cursor, at);
}

/* ---- Loading ---- */

/* docs/format.md, 2.1 and 2.2: an authentic node may still be one that a faulty writer sealed. */
static bool is_wellformed(const struct tree_node *node, uint64_t end)
{
    static const struct tree_node zero;

    for (unsigned i = 0; i < TREE_FANOUT; i++) {
        const struct entry *e = &node->child[i];
        bool valid = e->slot == 0 ? memcmp(e, &zero.child[0], sizeof *e) == 0 : e->slot >= ROOT_SLOTS && e->slot < end;
        if (!valid)
            return false;
    }
    return memcmp(node->reserved, zero.reserved, sizeof zero.reserved) == 0;
}

int tree_read(struct object *o, unsigned level, const struct entry *entry, struct tree_node *node)
{
    uint8_t sealed[NODE_SIZE];
    struct open_job job = {.sealed = sealed, .plain = node, .entry = entry, .kind = NODE_TREE, .level = (uint8_t)level};
    int rc = blockfile_read(o->file, entry->slot, sealed, 1);

    if (!rc)
        rc = open_nodes(o->id, &job, 1);
    if (rc)
        return rc;
    pthread_rwlock_rdlock(&o->lock);
    uint64_t end = o->root->plain.end;
    pthread_rwlock_unlock(&o->lock);
    return is_wellformed(node, end) ? 0 : -EBADMSG;
}

int tree_load(struct object *o, const struct location *at, struct cursor *cursor)
{
    int rc = tree_read(o, at->level, &at->entry, &cursor->node);

    cursor->level = rc ? 0 : at->level;
    cursor->index = at->index;
    cursor->version = at->version;
    if (rc == -EBADMSG) {
        /* Slots of the old tree may be reused as soon as it was exchanged. */
        pthread_rwlock_rdlock(&o->lock);
        bool exchanged = o->tree_version != at->version;
        pthread_rwlock_unlock(&o->lock);
        return exchanged ? 0 : object_found_damage(o);
    }
    if (rc)
        return rc;

    struct node *node = pool_take_cached(o->env->pool, POOL_TREE, POOL_APPLICATION);
    if (!node)
        return 0;
    memcpy(node->page, &cursor->node, NODE_SIZE);
    node->level = (uint8_t)at->level;
    node->index = at->index;
    pthread_rwlock_wrlock(&o->lock);
    if (o->tree_version == at->version && table_reserve(o) && !table_find(o, node->level, node->index)) {
        table_insert(o, node);
        table_settle(o, node, true);
        node = NULL;
    }
    pthread_rwlock_unlock(&o->lock);
    if (node)
        pool_give(o->env->pool, node);
    return 0;
}

int tree_next(struct object *o, uint64_t *index, uint64_t last, struct cursor *cursor, struct entry *entry)
{
    struct location at;
    int rc = 0;

    while (!rc && *index < last) {
        pthread_rwlock_rdlock(&o->lock);
        while (*index < last && tree_locate(o, 0, *index, cursor, &at) == AT_HOLE)
            *index = at.hole_end;
        pthread_rwlock_unlock(&o->lock);
        if (*index >= last)
            return 0;
        if (at.where == AT_ENTRY) {
            *entry = at.entry;
            return 1;
        }
        rc = tree_load(o, &at, cursor);
    }
    return rc;
}
