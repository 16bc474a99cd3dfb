#include "_object_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum {
    GAP_MAX = 2,                        /* slots read for nothing rather than in another call: the allocator's slack */
    SCATTER_MIN = 4,                    /* runs of a batch from which on the kernel gets a hint */
    SCATTER_SPAN = 4,                   /* ... if the batch lies within so many times its own length */
    SCAN_MIN = 8,                       /* nodes of a read from which on it may be one of many that pass through a file once */
};

/* ---- One node ---- */

/* Keeps a clean copy of a node that was just read, if it is still current and there is room. */
static void cache_data(struct object *o, uint64_t index, const struct entry *entry, const uint8_t *page, enum pool_class class)
{
    struct location at;
    struct node *node = pool_take_cached(o->env->pool, POOL_DATA, class);

    if (!node)
        return;
    memcpy(node->page, page, NODE_SIZE);
    node->level = 0;
    node->index = index;
    pthread_rwlock_wrlock(&o->lock);
    bool current = locate(o, index, NULL, &at) == AT_ENTRY && memcmp(&at.entry, entry, sizeof *entry) == 0;
    if (current && table_reserve(o)) {
        table_insert(o, node);
        table_settle(o, node, true);
        node = NULL;
    }
    pthread_rwlock_unlock(&o->lock);
    if (node)
        pool_give(o->env->pool, node);
}

/* Reads one node; `failed` is an entry that could not be opened just now: if it is still the current one, that is an error. */
static int read_again(struct object *o, uint64_t index, uint8_t *page, struct entry *entry, const struct entry *failed)
{
    uint8_t sealed[NODE_SIZE];
    struct entry last = {0};
    struct cursor cursor;
    struct location at;
    int rc = 0;

    cursor_init(&cursor);
    if (failed)
        last = *failed;
    for (;;) {
        pthread_rwlock_rdlock(&o->lock);
        switch (locate(o, index, &cursor, &at)) {
        case AT_NODE:
            memcpy(page, at.node->page, NODE_SIZE);
            break;
        case AT_HOLE:
            memset(page, 0, NODE_SIZE);
            break;
        default:
            break;
        }
        pthread_rwlock_unlock(&o->lock);

        memset(entry, 0, sizeof *entry);
        if (at.where == AT_NODE || at.where == AT_HOLE)
            return 0;
        if (at.where == AT_MISSING) {
            rc = tree_load(o, &at, &cursor);
            if (rc)
                return rc;
            continue;
        }
        if (memcmp(&at.entry, &last, sizeof last) == 0)
            return object_found_damage(o);      /* not reused meanwhile */
        struct open_job job = {.sealed = sealed, .plain = page, .entry = &at.entry, .kind = NODE_DATA};
        rc = blockfile_read(o->file, at.entry.slot, sealed, 1);
        if (!rc)
            rc = open_nodes(o->id, &job, 1);
        if (rc == 0)
            *entry = at.entry;
        if (rc != -EBADMSG)
            return rc;
        last = at.entry;
    }
}

int read_node(struct object *o, uint64_t index, uint8_t *page, struct entry *entry)
{
    return read_again(o, index, page, entry, NULL);
}

/* ---- A range, in batches of nodes that are independent of each other ---- */

struct reader {
    struct object *o;
    uint8_t *buffer;
    uint64_t offset, size;              /* bytes of the object that go to the buffer */
    bool nowait, keep;                  /* keep: nodes that come from the disk stay in the pool */
    enum pool_class class;              /* for keeping them: a scan pushes nothing out */
    _Atomic int rc;                     /* first error of a batch */
};

/* A node that must come from the disk. */
struct want {
    uint64_t index;
    struct entry entry;
};

/* The part of node `index` that the caller wants: *from its first byte in the node, *to where it goes. Returns its length. */
static size_t part_of(const struct reader *r, uint64_t index, size_t *from, uint8_t **to)
{
    uint64_t start = index * NODE_SIZE, end = start + NODE_SIZE;

    if (start < r->offset)
        start = r->offset;
    if (end > r->offset + r->size)
        end = r->offset + r->size;
    *from = start % NODE_SIZE;
    *to = r->buffer + (start - r->offset);
    return end - start;
}

/* Puts a page, or zeros, where the caller wants them. */
static void deliver(const struct reader *r, uint64_t index, const uint8_t *page)
{
    size_t from;
    uint8_t *to;
    size_t length = part_of(r, index, &from, &to);

    if (page)
        memcpy(to, page + from, length);
    else
        memset(to, 0, length);
}

/* Serves nodes [first, last) from memory and notes the others. Returns their number or -errno. */
static int collect(struct reader *r, uint64_t first, uint64_t last, struct want *want)
{
    struct object *o = r->o;
    struct cursor cursor;
    struct location at;
    int wanted = 0, rc;

    cursor_init(&cursor);
    while (first < last) {
        pthread_rwlock_rdlock(&o->lock);
        for (; first < last; first++) {
            enum where where = locate(o, first, &cursor, &at);
            if (where == AT_MISSING)
                break;
            if (where == AT_ENTRY)
                want[wanted++] = (struct want){first, at.entry};
            else
                deliver(r, first, where == AT_NODE ? at.node->page : NULL);
        }
        pthread_rwlock_unlock(&o->lock);
        if (r->nowait && first < last)
            return -EAGAIN;
        if (first < last && (rc = tree_load(o, &at, &cursor)))
            return rc;
    }
    return wanted;
}

/* Number of wanted nodes from `want` on that one read covers; *slots: its length, at most BATCH. */
static int run_length(const struct want *want, int n, size_t *slots)
{
    uint64_t first = want[0].entry.slot, last = first;
    int i = 1;

    for (; i < n; i++) {
        uint64_t slot = want[i].entry.slot;
        if (slot <= last || slot - last > GAP_MAX + 1 || slot - first >= BATCH)
            break;
        last = slot;
    }
    *slots = last - first + 1;
    return i;
}

/* Tells the kernel about a batch that takes many reads close to each other. */
static void announce(struct object *o, const struct want *want, int n)
{
    uint64_t low = UINT64_MAX, high = 0;
    int runs = 0;
    size_t slots;

    for (int i = 0; i < n; runs++)
        i += run_length(want + i, n - i, &slots);
    if (runs < SCATTER_MIN)
        return;
    for (int i = 0; i < n; i++) {
        low = want[i].entry.slot < low ? want[i].entry.slot : low;
        high = want[i].entry.slot > high ? want[i].entry.slot : high;
    }
    if (high - low < (uint64_t)n * SCATTER_SPAN)
        blockfile_will_need(o->file, low, high - low + 1);
}

/* Reads, opens and delivers one run of wanted nodes. */
static int fetch_run(struct reader *r, const struct want *want, int n, size_t slots)
{
    struct object *o = r->o;
    uint8_t edge[2][NODE_SIZE];         /* the first and the last node of a request may be wanted in part */
    uint8_t *sealed = sealed_buffer(), *to;
    struct open_job job[BATCH];
    struct entry entry;
    size_t from;
    int edges = 0;
    int rc = -ENOMEM;

    if (sealed && r->nowait)
        rc = blockfile_read_nowait(o->file, want[0].entry.slot, sealed, slots);
    else if (sealed)
        rc = blockfile_read(o->file, want[0].entry.slot, sealed, slots);
    if (rc)
        return rc;
    for (int i = 0; i < n; i++) {
        bool whole = part_of(r, want[i].index, &from, &to) == NODE_SIZE;
        job[i] = (struct open_job){.sealed = sealed + (want[i].entry.slot - want[0].entry.slot) * NODE_SIZE,
                                   .plain = whole ? to : edge[edges++], .entry = &want[i].entry, .kind = NODE_DATA};
    }
    rc = open_nodes(o->id, job, (size_t)n);
    if (rc && rc != -EBADMSG)
        return rc;
    for (int i = 0; i < n; i++) {
        uint8_t *page = job[i].plain;
        bool whole = part_of(r, want[i].index, &from, &to) == NODE_SIZE;
        if (job[i].result) {
            rc = read_again(o, want[i].index, page, &entry, &want[i].entry);
            if (rc)
                return rc;
        } else if (r->keep) {
            cache_data(o, want[i].index, &want[i].entry, page, r->class);
        }
        if (!whole)
            deliver(r, want[i].index, page);
    }
    return 0;
}

static void read_batch(void *arg, size_t i)
{
    struct reader *r = arg;
    struct want want[BATCH];
    uint64_t first = r->offset / NODE_SIZE + i * BATCH, last = nodes_for(r->offset + r->size);
    size_t slots;
    int expected = 0;

    if (last > first + BATCH)
        last = first + BATCH;
    int rc = collect(r, first, last, want);
    int wanted = rc;
    if (wanted > 0 && !r->nowait)
        announce(r->o, want, wanted);
    for (int done = 0; rc >= 0 && done < wanted;) {
        int n = run_length(want + done, wanted - done, &slots);
        rc = fetch_run(r, want + done, n, slots);
        done += n;
    }
    if (rc < 0)
        atomic_compare_exchange_strong(&r->rc, &expected, rc);
}

ssize_t object_read(struct object *o, void *buffer, size_t size, uint64_t offset, int flags)
{
    struct reader r = {.o = o, .buffer = buffer, .offset = offset, .nowait = flags & OBJECT_NOWAIT,
                       .keep = o->env->cache_data && !(flags & OBJECT_ONCE)};

    if (object_poisoned(o))
        return -EIO;
    pthread_rwlock_rdlock(&o->lock);
    uint64_t end = o->size;
    pthread_rwlock_unlock(&o->lock);
    if (offset >= end || size == 0)
        return 0;
    r.size = size < end - offset ? size : end - offset;
    r.class = r.size < SCAN_MIN * NODE_SIZE ? POOL_APPLICATION : POOL_BACKGROUND;

    size_t batches = (nodes_for(offset + r.size) - offset / NODE_SIZE + BATCH - 1) / BATCH;
    if (batches == 1 || r.nowait)
        for (size_t i = 0; i < batches && !r.rc; i++)
            read_batch(&r, i);
    else
        workers_parallel(o->env->workers, read_batch, &r, batches);
    return r.rc ? r.rc : (ssize_t)r.size;
}

/* ---- Seek ---- */

/* True if a generation newer than layer `layer` (0 current, 1 flying, 2 root) cut the node. lock held. */
static bool is_cut_above(struct object *o, int layer, uint64_t index)
{
    return (layer > 0 && cuts_find(&o->current->cuts, index)) || (layer > 1 && o->flying && cuts_find(&o->flying->cuts, index));
}

static uint64_t next_of(struct object *o, int layer, const struct delta_entry *list, size_t n, uint64_t from, uint64_t next)
{
    for (size_t i = 0; i < n; i++)
        if (list[i].entry.slot && list[i].index >= from && list[i].index < next && !is_cut_above(o, layer, list[i].index))
            next = list[i].index;
    return next;
}

/* First index >= from where the layers above the tree proper have data. lock held. */
static uint64_t next_in_layers(struct object *o, uint64_t from)
{
    const struct changes *current = &o->current->overlay.list;
    uint64_t next = next_of(o, 0, current->at, current->count, from, UINT64_MAX);

    if (o->flying)
        next = next_of(o, 1, o->flying->overlay.list.at, o->flying->overlay.list.count, from, next);
    next = next_of(o, 2, o->root->plain.delta, o->root->plain.delta_count, from, next);
    for (size_t i = 0; o->data_in_table && i < o->buckets; i++)
        for (const struct node *node = o->bucket[i]; node; node = node->hash_next)
            if (node->level == 0 && node->index >= from && node->index < next)
                next = node->index;
    return next;
}

/* First index >= from where a layer above the tree proper may make a hole of what the tree holds. lock held. */
static uint64_t next_hole_in_layers(struct object *o, uint64_t from)
{
    const struct root_plain *root = &o->root->plain;
    uint64_t next = cuts_next(&o->current->cuts, from), flying = o->flying ? cuts_next(&o->flying->cuts, from) : UINT64_MAX;

    if (flying < next)
        next = flying;
    for (unsigned i = 0; i < root->delta_count; i++)
        if (root->delta[i].entry.slot == 0 && root->delta[i].index >= from && root->delta[i].index < next)
            next = root->delta[i].index;
    return next;
}

/* `index` is data: how far on is there certainly no hole? At least to the next node. lock held. */
static uint64_t data_run_end(struct object *o, uint64_t index, const struct cursor *cursor)
{
    if (is_dense(o) && index < o->root->plain.nodes)
        return o->root->plain.nodes;
    uint64_t end = tree_run_end(o, index, cursor);
    if (end <= index + 1)
        return index + 1;
    uint64_t hole = next_hole_in_layers(o, index + 1);
    return hole < end ? hole : end;
}

/* Moves *index to the first node >= it that is data (or a hole), at most to `last`. 0 or -errno. */
static int seek_node(struct object *o, uint64_t *index, uint64_t last, bool data)
{
    struct cursor cursor;
    struct location at;
    int rc = 0;

    cursor_init(&cursor);
    while (!rc) {
        pthread_rwlock_rdlock(&o->lock);
        uint64_t layers = data ? next_in_layers(o, *index) : 0;
        at.where = AT_HOLE;
        while (*index < last) {
            enum where where = locate(o, *index, &cursor, &at);
            if (where == AT_MISSING || (where == AT_HOLE) != data)
                break;
            if (!data)
                *index = data_run_end(o, *index, &cursor);
            else
                *index = at.hole_end < layers ? at.hole_end : layers;
        }
        pthread_rwlock_unlock(&o->lock);
        if (*index >= last) {
            *index = last;
            return 0;
        }
        if (at.where != AT_MISSING)
            return 0;
        rc = tree_load(o, &at, &cursor);
    }
    return rc;
}

int64_t object_seek(struct object *o, uint64_t offset, int whence)
{
    if (object_poisoned(o))
        return -EIO;
    pthread_rwlock_rdlock(&o->lock);
    uint64_t size = o->size, index = offset / NODE_SIZE;
    pthread_rwlock_unlock(&o->lock);

    if (whence != SEEK_DATA && whence != SEEK_HOLE)
        return -EINVAL;
    if (offset >= size)
        return -ENXIO;
    int rc = seek_node(o, &index, nodes_for(size), whence == SEEK_DATA);
    if (rc)
        return rc;
    uint64_t found = index > offset / NODE_SIZE ? index * NODE_SIZE : offset;
    if (found >= size)
        return whence == SEEK_DATA ? -ENXIO : (int64_t)size;
    return (int64_t)found;
}
