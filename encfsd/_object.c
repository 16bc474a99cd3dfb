#include "_object_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Slots: shorter free runs are kept for reuse. A short file keeps an eighth of its length, lest many of them that were overwritten
 * fill the store with what they no longer need. */
enum { PUNCH_SHARE = 8, PUNCH_LEAST = 64, PUNCH_MOST = 256 };

/* ---- Sealed bytes ---- */

static pthread_key_t sealed_key;
static pthread_once_t sealed_once = PTHREAD_ONCE_INIT;

static void sealed_setup(void) { pthread_key_create(&sealed_key, free); }

uint8_t *sealed_buffer(void)
{
    pthread_once(&sealed_once, sealed_setup);
    uint8_t *buffer = pthread_getspecific(sealed_key);
    if (!buffer) {
        buffer = aligned_alloc(NODE_SIZE, BATCH * NODE_SIZE);
        if (buffer && pthread_setspecific(sealed_key, buffer) != 0) {
            free(buffer);
            buffer = NULL;
        }
    }
    return buffer;
}

/* ---- Life of an object in memory ---- */

/* An object without root and allocator. Returns 0 or -errno. */
static int object_new(struct object **out, struct object_env *env, const uint8_t id[ID_SIZE], bool create)
{
    struct object *o = calloc(1, sizeof *o);
    struct root *root = calloc(1, sizeof *root);
    int rc = o && root ? blockfile_open(&o->file, env->dir, id, create) : -ENOMEM;

    if (rc) {
        free(root);
        free(o);
        return rc;
    }
    pthread_rwlockattr_t attr;
    pthread_rwlockattr_init(&attr);
    /* Else a stream of readers keeps every writer out. No thread takes the lock twice. */
    pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&o->lock, &attr);
    pthread_rwlockattr_destroy(&attr);
    pthread_mutex_init(&o->space, NULL);
    pthread_mutex_init(&o->sealing, NULL);

    o->env = env;
    memcpy(o->id, id, ID_SIZE);
    o->root = root;
    o->current = &o->generation[0];
    o->durable_slot = NO_SLOT;
    atomic_fetch_add(&env->open_objects, 1);
    *out = o;
    return 0;
}

static void discard_dirty(struct object *o, struct generation *g)
{
    while (g->dirty_first) {
        struct node *node = g->dirty_first;
        generation_unlink(o, g, node);
        if (table_holds(o, node))
            table_remove(o, node);
        pool_give(o->env->pool, node);
    }
}

void object_close(struct object *o)
{
    if (!o)
        return;
    /* The clock hand may be looking at clean nodes. */
    pthread_rwlock_wrlock(&o->lock);
    for (int i = 0; i < 2; i++)
        discard_dirty(o, &o->generation[i]);
    struct node *left = NULL;
    for (size_t i = 0; i < o->buckets; i++)
        for (struct node *node = o->bucket[i], *next; node; node = next) {
            next = node->hash_next;
            table_remove(o, node);
            node->hash_next = left;
            left = node;
        }
    pthread_rwlock_unlock(&o->lock);
    /* pool_give waits for the clock hand, so nobody looks at the object when the last node is given back. */
    while (left) {
        struct node *node = left;
        left = node->hash_next;
        pool_give(o->env->pool, node);
    }
    for (int i = 0; i < 2; i++) {
        overlay_free(&o->generation[i].overlay);
        cuts_free(&o->generation[i].cuts);
    }
    free(o->bucket);
    alloc_destroy(o->alloc);
    secret_wipe(o->root, sizeof *o->root);
    free(o->root);
    blockfile_close(o->file);
    atomic_fetch_sub(&o->env->open_objects, 1);
    pthread_mutex_destroy(&o->sealing);
    pthread_mutex_destroy(&o->space);
    pthread_rwlock_destroy(&o->lock);
    free(o);
}

int object_create(struct object **out, struct object_env *env, const uint8_t id[ID_SIZE])
{
    struct object *o;

    if (env->read_only)
        return -EROFS;
    int rc = object_new(&o, env, id, true);
    if (rc)
        return rc;
    rc = blockfile_zero_fill(o->file, 0, ROOT_SLOTS);
    if (!rc)
        rc = alloc_create(&o->alloc, ROOT_SLOTS, true);
    if (rc) {
        object_close(o);
        blockdir_remove(env->dir, id);
        return rc;
    }
    o->written_end = o->commit_end = ROOT_SLOTS;
    *out = o;
    return 0;
}

/* ---- Root slots at open ---- */

struct candidates {
    struct root_slot sealed[ROOT_SLOTS];
    struct root_plain plain[ROOT_SLOTS];
    bool authentic[ROOT_SLOTS];
};

/* What open_root cannot know: that the root agrees with its own size. */
static bool root_agrees(const struct root_plain *p)
{
    uint64_t nodes = nodes_for(p->size);
    unsigned height = nodes ? tree_height_for(nodes - 1) : 0;

    return p->nodes <= nodes && p->height <= height
           && (p->delta_count == 0 || p->delta[p->delta_count - 1].index < nodes);
}

static int read_candidates(struct object *o, struct candidates *c)
{
    int rc = blockfile_read(o->file, 0, c->sealed, ROOT_SLOTS);

    for (unsigned i = 0; !rc && i < ROOT_SLOTS; i++) {
        int opened = open_root(o->env->ring, o->id, i, &c->sealed[i], &c->plain[i]);
        if (opened && opened != -EBADMSG && opened != -EPROTO)
            return opened;
        memcpy(o->slot[i].salt, c->sealed[i].salt, SALT_SIZE);
        memcpy(o->slot[i].before, c->sealed[i].salt, SALT_SIZE);
        c->authentic[i] = opened == 0 && root_agrees(&c->plain[i]);
        if (opened == 0) {
            o->slot[i].epoch = c->plain[i].epoch;
            o->slot[i].counter = c->plain[i].counter;
            if (c->plain[i].counter > o->counter)
                o->counter = c->plain[i].counter;
        }
    }
    return rc;
}

static bool is_record(const struct candidates *c, unsigned i, const struct object_record *record)
{
    return c->plain[i].epoch == record->epoch && c->plain[i].counter == record->counter
           && memcmp(c->sealed[i].salt, record->salt, SALT_SIZE) == 0;
}

/* Makes candidate i the durable root. */
static int adopt(struct object *o, const struct candidates *c, unsigned i)
{
    uint64_t length;
    int rc = blockfile_length(o->file, &length);

    if (!rc)
        rc = alloc_create(&o->alloc, c->plain[i].end, false);
    if (rc)
        return rc;
    o->root->plain = c->plain[i];
    memcpy(o->root->salt, c->sealed[i].salt, SALT_SIZE);
    o->durable_slot = (int)i;
    o->entry_durable = true;
    o->size = c->plain[i].size;
    o->atime = c->plain[i].atime;
    o->mtime = c->plain[i].mtime;
    o->ctime = c->plain[i].ctime;
    o->commit_end = c->plain[i].end;
    o->hidden_end = c->plain[i].delta_count ? c->plain[i].end : 0;
    o->written_end = length;
    return 0;
}

/* Opens the file and reads its roots, for recovery as the disk holds them. On error nothing is left. */
static int open_candidates(struct object **o, struct candidates **c, struct object_env *env, const uint8_t id[ID_SIZE],
                           bool recovery)
{
    int rc = object_new(o, env, id, false);

    if (rc)
        return rc;
    *c = calloc(1, sizeof **c);
    rc = *c ? 0 : -ENOMEM;
    /* What lies in the page cache only must be on the disk before anything builds on it; and what only seems to lie on the
     * disk, because a barrier failed, must not be believed. */
    if (!rc && recovery)
        rc = blockfile_settle((*o)->file);
    if (!rc)
        rc = read_candidates(*o, *c);
    if (rc) {
        free(*c);
        object_close(*o);
    }
    return rc;
}

static void free_candidates(struct candidates *c)
{
    secret_wipe(c, sizeof *c);
    free(c);
}

int object_open(struct object **out, struct object_env *env, const uint8_t id[ID_SIZE], const struct object_record *record)
{
    struct candidates *c;
    struct object *o;
    int rc = open_candidates(&o, &c, env, id, false);

    if (rc)
        return rc;
    rc = -EBADMSG;
    for (unsigned i = 0; i < ROOT_SLOTS && rc == -EBADMSG; i++)
        if (c->authentic[i] && is_record(c, i, record))
            rc = adopt(o, c, i);
    free_candidates(c);
    if (rc)
        object_close(o);
    else
        *out = o;
    return rc;
}

/* ---- Recovery ---- */

/* Reads every data node that the delta names: only then did the commit reach the disk as a whole. 0, -EBADMSG, or -errno. */
static int verify_delta(struct object *o, const struct root_plain *p)
{
    uint8_t sealed[NODE_SIZE], plain[NODE_SIZE];
    int rc = 0;

    for (unsigned i = 0; i < p->delta_count && !rc; i++) {
        const struct entry *e = &p->delta[i].entry;
        struct open_job job = {.sealed = sealed, .plain = plain, .entry = e, .kind = NODE_DATA};
        if (e->slot == 0)
            continue;
        rc = blockfile_read(o->file, e->slot, sealed, 1);
        if (!rc)
            rc = open_nodes(o->id, &job, 1);
    }
    secret_wipe(plain, sizeof plain);
    return rc;
}

static bool may_adopt(const struct candidates *c, unsigned i, const struct object_record *record, uint64_t active_epoch)
{
    const struct root_plain *p = &c->plain[i];

    if (!c->authentic[i])
        return false;
    if (!record)
        return p->epoch >= active_epoch;
    return is_record(c, i, record)
           || (p->epoch == active_epoch && root_order(p->epoch, p->counter, record->epoch, record->counter) > 0);
}

/* Takes the newest candidate that may be adopted and whose delta is whole. 0, -EBADMSG if there is none, or -errno. */
static int adopt_newest(struct object *o, struct candidates *c, const struct object_record *record, uint64_t active_epoch)
{
    for (;;) {
        int best = NO_SLOT, rc;
        for (unsigned i = 0; i < ROOT_SLOTS; i++)
            if (may_adopt(c, i, record, active_epoch)
                && (best == NO_SLOT
                    || root_order(c->plain[i].epoch, c->plain[i].counter, c->plain[best].epoch, c->plain[best].counter) > 0))
                best = (int)i;
        if (best == NO_SLOT)
            return -EBADMSG;
        /* The recorded root had its barrier: if its delta does not verify, reading says so where it is damaged. */
        rc = record && is_record(c, (unsigned)best, record) ? 0 : verify_delta(o, &c->plain[best]);
        if (rc == 0)
            return adopt(o, c, (unsigned)best);
        if (rc != -EBADMSG)
            return rc;
        c->authentic[best] = false;
    }
}

int object_recover(struct object **out, struct object_env *env, const uint8_t id[ID_SIZE], const struct object_record *record,
                   uint64_t active_epoch, struct object_record *adopted)
{
    struct candidates *c;
    struct object *o;
    int rc = open_candidates(&o, &c, env, id, true);

    if (rc)
        return rc;
    rc = adopt_newest(o, c, record, active_epoch);
    free_candidates(c);
    if (rc) {
        object_close(o);
        return rc;
    }
    object_record(o, adopted);
    *out = o;
    return 0;
}

/* ---- Attributes ---- */

const uint8_t *object_id(const struct object *o) { return o->id; }

void object_attr(struct object *o, struct object_attr *attr)
{
    pthread_rwlock_rdlock(&o->lock);
    int64_t nodes = (int64_t)o->root->plain.nodes + o->current->grown + (o->flying ? o->flying->grown : 0);
    uint64_t most = nodes_for(o->size);
    attr->size = o->size;
    attr->nodes = nodes < 0 ? 0 : (uint64_t)nodes > most ? most : (uint64_t)nodes;
    attr->atime = o->atime;
    attr->mtime = o->mtime;
    attr->ctime = o->ctime;
    pthread_rwlock_unlock(&o->lock);
}

void object_durable_attr(struct object *o, struct object_attr *attr)
{
    pthread_rwlock_rdlock(&o->lock);
    const struct root_plain *p = &o->root->plain;
    *attr = (struct object_attr){.size = p->size, .nodes = p->nodes, .atime = p->atime, .mtime = p->mtime, .ctime = p->ctime};
    pthread_rwlock_unlock(&o->lock);
}

void object_set_times(struct object *o, int64_t atime, int64_t mtime, int64_t ctime)
{
    pthread_rwlock_wrlock(&o->lock);
    if (o->atime != atime || o->mtime != mtime || o->ctime != ctime)
        o->current->attr_dirty = true;
    o->atime = atime;
    o->mtime = mtime;
    o->ctime = ctime;
    pthread_rwlock_unlock(&o->lock);
}

bool generation_is_dirty(const struct generation *g)
{
    return g->dirty || g->overlay.live || g->cuts.count || g->attr_dirty;
}

bool object_is_dirty(struct object *o)
{
    pthread_rwlock_rdlock(&o->lock);
    bool dirty = o->durable_slot == NO_SLOT || o->flying || generation_is_dirty(o->current);
    pthread_rwlock_unlock(&o->lock);
    return dirty;
}

bool is_dense(const struct object *o)
{
    return o->root->plain.nodes == nodes_for(o->root->plain.size) && !o->current->cuts.count
           && !(o->flying && o->flying->cuts.count);
}

uint64_t committed_nodes(const struct object *o)
{
    uint64_t nodes = nodes_for(o->root->plain.size);
    uint64_t flying = o->flying ? nodes_for(o->flying->size) : 0;

    return nodes > flying ? nodes : flying;
}

bool object_poisoned(struct object *o) { return atomic_load(&o->poisoned); }

bool object_damaged(struct object *o) { return atomic_load(&o->damaged); }

int object_found_damage(struct object *o)
{
    atomic_store(&o->damaged, true);
    return -EIO;
}

/* ---- Roots in use ---- */

void object_record(struct object *o, struct object_record *record)
{
    pthread_rwlock_rdlock(&o->lock);
    record->epoch = o->root->plain.epoch;
    record->counter = o->root->plain.counter;
    memcpy(record->salt, o->root->salt, SALT_SIZE);
    pthread_rwlock_unlock(&o->lock);
}

static void change_pins(struct object *o, const struct object_record *record, unsigned change)
{
    pthread_rwlock_wrlock(&o->lock);
    for (unsigned i = 0; i < ROOT_SLOTS; i++)
        if (o->slot[i].epoch == record->epoch && o->slot[i].counter == record->counter
            && memcmp(o->slot[i].salt, record->salt, SALT_SIZE) == 0)
            o->slot[i].pins += change;
    pthread_rwlock_unlock(&o->lock);
}

void object_pin_root(struct object *o, const struct object_record *record) { change_pins(o, record, 1); }

void object_unpin_root(struct object *o, const struct object_record *record) { change_pins(o, record, (unsigned)-1); }

/* True if a salt read from the disk is none that this object wrote or saw. */
static bool has_unknown_salt(struct object *o, const struct root_slot sealed[ROOT_SLOTS])
{
    static const uint8_t zero[SALT_SIZE];
    bool unknown = false;

    pthread_rwlock_rdlock(&o->lock);
    for (unsigned i = 0; i < ROOT_SLOTS; i++)
        unknown |= memcmp(sealed[i].salt, zero, SALT_SIZE) != 0 && memcmp(sealed[i].salt, o->slot[i].salt, SALT_SIZE) != 0
                   && memcmp(sealed[i].salt, o->slot[i].before, SALT_SIZE) != 0;
    pthread_rwlock_unlock(&o->lock);
    return unknown;
}

int object_foreign_root(struct object *o, bool *foreign)
{
    struct root_slot *sealed = malloc(ROOT_SLOTS * sizeof *sealed);
    int rc = sealed ? 0 : -ENOMEM;

    /* A second look: commits of our own may have passed between reading and comparing. */
    *foreign = true;
    for (int look = 0; look < 2 && !rc && *foreign; look++) {
        rc = blockfile_read(o->file, 0, sealed, ROOT_SLOTS);
        *foreign = !rc && has_unknown_salt(o, sealed);
    }
    free(sealed);
    return rc;
}

/* ---- Space ---- */

void undo_slots(struct object *o, const uint64_t *slot, size_t n)
{
    if (n == 0)
        return;
    pthread_mutex_lock(&o->space);
    for (size_t i = 0; i < n; i++)
        alloc_undo(o->alloc, slot[i]);
    pthread_mutex_unlock(&o->space);
}

int take_slots(struct object *o, size_t n, struct entry *entry)
{
    size_t taken = 0;
    uint64_t run;
    int rc = 0;

    pthread_mutex_lock(&o->space);
    uint64_t end = alloc_end(o->alloc);
    if (n > 1 && alloc_free_below_end(o->alloc) <= end / 2) {
        rc = alloc_run(o->alloc, n, &run);
        /* The slack behind it: a later overwrite that fills a hole of the file would wait for the journal of the file system below.
         * A failure costs time then, nothing else. */
        if (!rc && run == end)
            blockfile_zero_fill(o->file, run + n, alloc_end(o->alloc) - run - n);
        for (; taken < n && !rc; taken++)
            entry[taken].slot = run + taken;
    } else {
        for (; taken < n && !rc; taken += !rc)
            rc = alloc_data(o->alloc, 0, &entry[taken].slot);
        for (; rc && taken > 0; taken--)
            alloc_undo(o->alloc, entry[taken - 1].slot);
    }
    pthread_mutex_unlock(&o->space);
    for (size_t i = 0; i < n && rc; i++)
        entry[i].slot = 0;
    return rc;
}

void object_release(struct object *o, const struct object_record *record)
{
    struct object_record durable;
    uint64_t first, n, end;

    object_record(o, &durable);
    /* Slots are retired under counters of this mount; what an older root reaches was not retired by it. */
    if (o->env->read_only || object_poisoned(o) || record->epoch != o->env->epoch || durable.epoch != o->env->epoch)
        return;
    pthread_mutex_lock(&o->space);
    alloc_release(o->alloc, record->counter < durable.counter ? record->counter : durable.counter);
    end = alloc_end(o->alloc);
    if (alloc_trim(o->alloc) < end)
        o->trimmed = true;
    end = alloc_end(o->alloc);
    uint64_t least = end / PUNCH_SHARE < PUNCH_LEAST ? PUNCH_LEAST : end / PUNCH_SHARE < PUNCH_MOST ? end / PUNCH_SHARE : PUNCH_MOST;
    while (alloc_next_reclaim(o->alloc, least, &first, &n))
        blockfile_punch(o->file, first, n);         /* a failure costs space, nothing else */
    pthread_mutex_unlock(&o->space);
}

/* ---- Eviction ---- */

bool object_evict(struct node *node)
{
    struct object *o = atomic_load(&node->owner);

    if (!o || pthread_rwlock_trywrlock(&o->lock) != 0)
        return false;
    bool mine = atomic_load(&node->owner) == o && atomic_load(&node->pins) == 0;
    if (mine)
        table_remove(o, node);
    pthread_rwlock_unlock(&o->lock);
    return mine;
}
