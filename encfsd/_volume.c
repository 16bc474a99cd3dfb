/* The life of a mounted volume: create, open with recovery, close, verify. Order of opening is order of dependence; closing goes back. */
#include "_volume_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "_geometry.h"
#include "_vfs.h"

enum {
    METADATA_CACHE_BYTES = 64 << 20,        /* SQLite's page cache */
    DESCRIPTORS_KEPT = 64,                  /* for everything that is not an object's backing file */
};

static const uint8_t META_ID[ID_SIZE];      /* object 0: all zero */

static int fail(char *message, size_t size, int rc, const char *format, ...) __attribute__((format(printf, 4, 5)));

static int fail(char *message, size_t size, int rc, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, size, format, arguments);
    va_end(arguments);
    return rc;
}

static uint64_t descriptor_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < 4 * DESCRIPTORS_KEPT)
        return DESCRIPTORS_KEPT;
    return limit.rlim_cur == RLIM_INFINITY ? 1 << 20 : limit.rlim_cur - 2 * DESCRIPTORS_KEPT;
}

/* Where the list must not be exceeded, dirty nodes take at most half of what writers may have: so groups come before they run out. */
static void limit_dirty(struct volume *v)
{
    uint64_t limit = v->options.dirty_limit_bytes / NODE_SIZE;
    struct pool_stats stats;

    pool_stats(v->pool, &stats);
    uint64_t half = (stats.capacity - POOL_RESERVE_NODES) / 2;
    if (stats.overflow != POOL_OVERFLOW_MALLOC && limit > half)
        limit = half;
    atomic_store(&v->env.dirty_limit, limit);
}

static int open_pool(struct volume *v, char *message, size_t size)
{
    const struct volume_options *o = &v->options;
    char reason[LOG_LINE_SIZE];
    struct pool_options options = {
        .bytes = o->free_list_bytes, .max_bytes = o->free_list_max_bytes, .reserve_nodes = POOL_RESERVE_NODES,
        .strategy = o->free_list_strategy, .overflow = o->free_list_overflow, .prefault = o->free_list_prefault,
        .hugepages = o->free_list_hugepages, .lock = o->free_list_lock, .evict = object_evict,
        .progress = o->free_list_progress, .progress_arg = o->free_list_progress_arg,
    };
    int rc = pool_create(&v->pool, &options, reason, sizeof reason);

    if (rc == -EPERM)
        return fail(message, size, rc, "the free list of %llu bytes cannot be locked: raise the limit of locked memory "
                    "(ulimit -l, LimitMEMLOCK=)", (unsigned long long)o->free_list_bytes);
    if (rc)
        return fail(message, size, rc, "the free list of %llu bytes cannot be allocated: %s",
                    (unsigned long long)o->free_list_bytes, strerror(-rc));
    if (reason[0])
        volume_log(v, VOLUME_INFO, "free list: %s", reason);
    return 0;
}

/* Everything below objects. On error volume_free cleans up. */
static int open_base(struct volume *v, const struct volume_options *options, char *message, size_t size)
{
    int rc;

    v->options = *options;
    secret_wipe(v->options.p, sizeof v->options.p);
    v->completions.event_fd = -1;
    v->notify_fd = -1;
    v->state.fd = -1;
    pthread_mutex_init(&v->log.mutex, NULL);
    pthread_mutex_init(&v->space.mutex, NULL);
    pthread_mutex_init(&v->completions.mutex, NULL);
    for (int i = 0; i < OPENING_LOCKS; i++)
        pthread_mutex_init(&v->opening[i], NULL);
    v->max_open_objects = descriptor_limit();
    rc = blockdir_open(&v->dir, options->src_fd, options->read_only);
    if (rc)
        return fail(message, size, rc, "the source directory cannot be opened: %s", strerror(-rc));
    rc = keyring_create(&v->ring, options->volume_id, options->p);
    if (rc)
        return fail(message, size, rc, rc == -EPERM ? "memory for keys cannot be locked: raise the limit of locked memory "
                    "(ulimit -l, LimitMEMLOCK=)" : "the keys cannot be set up: %s", strerror(-rc));
    rc = open_pool(v, message, size);
    if (rc)
        return rc;
    rc = workers_create(&v->io, options->io_threads);
    if (!rc)
        rc = workers_create(&v->barrier, options->barrier_threads);
    v->completions.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!rc && v->completions.event_fd < 0)
        rc = -errno;
    if (!rc && options->state_fd >= 0) {
        v->state.fd = dup(options->state_fd);
        rc = v->state.fd < 0 ? -errno : state_load(v);
    }
    if (rc)
        return fail(message, size, rc, "the volume cannot be started: %s", strerror(-rc));
    v->env.pool = v->pool;
    v->env.ring = v->ring;
    v->env.dir = v->dir;
    v->env.workers = v->io;
    v->env.read_only = options->read_only;
    v->env.cache_data = options->free_list_bytes > 0;
    limit_dirty(v);
    rc = random_bytes(v->env.instance, ID_SIZE);
    return rc ? fail(message, size, rc, "the kernel gives no random bytes") : 0;
}

static void close_object_of(void *arg, struct inode *inode)
{
    struct volume *v = arg;

    if (inode->object)
        object_close(inode->object);
    inode->object = NULL;
    ns_put_inode(v->ns, inode);
}

/* Frees whatever is there, in the reverse order of opening. */
static void volume_free(struct volume *v)
{
    if (v->io)
        workers_destroy(v->io);             /* no request is running when a volume is freed; this ends the threads */
    if (v->barrier)
        workers_destroy(v->barrier);
    if (v->ns) {
        inode_for_each(v->inodes, close_object_of, v);
        ns_close(v->ns);
    }
    if (v->inodes)
        inode_table_destroy(v->inodes);
    groups_destroy(v->groups);
    if (v->meta)
        object_close(v->meta);
    if (v->pool)
        pool_destroy(v->pool);
    keyring_destroy(v->ring);
    if (v->dir)
        blockdir_close(v->dir);
    if (v->completions.event_fd >= 0)
        close(v->completions.event_fd);
    if (v->state.fd >= 0)
        close(v->state.fd);
    free(v->active_rows);
    pthread_mutex_destroy(&v->log.mutex);
    pthread_mutex_destroy(&v->space.mutex);
    pthread_mutex_destroy(&v->completions.mutex);
    for (int i = 0; i < OPENING_LOCKS; i++)
        pthread_mutex_destroy(&v->opening[i]);
    free(v);
}

int volume_create(const struct volume_options *options, uint32_t root_uid, uint32_t root_gid, struct object_record *record)
{
    char message[128];
    struct volume *v = calloc(1, sizeof *v);
    int rc;

    if (!v)
        return -ENOMEM;
    rc = open_base(v, options, message, sizeof message);
    v->env.epoch = 1;
    if (!rc)
        rc = object_create(&v->meta, &v->env, META_ID);
    if (!rc)
        rc = ns_format(v->meta, root_uid, root_gid);
    if (!rc)
        rc = object_commit(v->meta, true, record);
    if (!rc)
        rc = space_restore_ballast(v);
    if (rc && v->meta) {
        object_close(v->meta);
        v->meta = NULL;
        blockdir_remove(v->dir, META_ID);
    }
    volume_free(v);
    return rc;
}

/* ---- opening ---- */

/* The root of object 0 whose salt is `salt`: its record, and the salt of the root that it was built on. */
static int find_root(struct volume *v, const uint8_t salt[SALT_SIZE], struct object_record *record, uint8_t previous[SALT_SIZE])
{
    struct root_slot slots[ROOT_SLOTS];
    struct root_plain plain;
    struct blockfile *file;
    int rc = blockfile_open(&file, v->dir, META_ID, false);

    if (rc)
        return rc;
    rc = blockfile_read(file, 0, slots, ROOT_SLOTS);
    blockfile_close(file);
    for (uint64_t i = 0; i < ROOT_SLOTS && !rc; i++) {
        if (memcmp(slots[i].salt, salt, SALT_SIZE) || open_root(v->ring, META_ID, i, &slots[i], &plain))
            continue;
        *record = (struct object_record){.epoch = plain.epoch, .counter = plain.counter};
        memcpy(record->salt, salt, SALT_SIZE);
        memcpy(previous, plain.previous, SALT_SIZE);
        return 0;
    }
    return rc ? rc : -EBADMSG;
}

static int open_meta(struct volume *v, struct volume_found *found, char *message, size_t size)
{
    const struct volume_options *o = &v->options;
    uint8_t previous[SALT_SIZE];
    int rc;

    if (o->accept_root) {
        rc = find_root(v, o->accept_salt, &found->root, previous);
        if (!rc)
            rc = object_open(&v->meta, &v->env, META_ID, &found->root);
        if (!rc && !o->read_only)
            rc = object_barrier(v->meta);       /* adopt, then make durable */
        return rc ? fail(message, size, rc, "the accepted root is not in the source directory, or it is damaged") : 0;
    }
    rc = object_recover(&v->meta, &v->env, META_ID, NULL, 0, &found->root);
    if (rc)
        return fail(message, size, rc, "object 0 (the file \"meta\") has no intact root: %s", strerror(-rc));
    return 0;
}

/* ---- freshness: roots that this volume is known to descend from ---- */

enum { ANCESTORS_KEPT = 512 };                  /* two a mount at most: 16 KiB */
static const char ANCESTORS[] = "ancestors";    /* value of object 0: salts, newest first */

struct ancestors {
    uint8_t salt[ANCESTORS_KEPT][SALT_SIZE];
    size_t count;
};

static int load_ancestors(struct volume *v, struct ancestors *a)
{
    size_t len = 0;
    int rc = ns_get_value(v->ns, ANCESTORS, a->salt, sizeof a->salt, &len);

    a->count = rc ? 0 : len / SALT_SIZE;
    return rc == -ENOENT ? 0 : rc;
}

static bool descends_from(const struct ancestors *a, const uint8_t salt[SALT_SIZE])
{
    for (size_t i = 0; i < a->count; i++)
        if (memcmp(a->salt[i], salt, SALT_SIZE) == 0)
            return true;
    return false;
}

/* Each mount notes the root that it starts from, and the one that the machine remembered: so another machine that
 * remembers either knows that it has not been forked away from. */
static void add_ancestor(struct ancestors *a, const uint8_t salt[SALT_SIZE])
{
    if (descends_from(a, salt))
        return;
    if (a->count == ANCESTORS_KEPT)
        a->count--;
    memmove(a->salt[1], a->salt[0], a->count * SALT_SIZE);
    memcpy(a->salt[0], salt, SALT_SIZE);
    a->count++;
}

static int note_ancestors(struct volume *v, const struct volume_found *found)
{
    struct ancestors *a = calloc(1, sizeof *a);
    int rc = a ? load_ancestors(v, a) : -ENOMEM;

    if (!rc) {
        if (v->options.have_state)
            add_ancestor(a, v->options.state.salt);
        add_ancestor(a, found->root.salt);
        rc = ns_set_value(v->ns, ANCESTORS, a->salt, a->count * SALT_SIZE);
    }
    free(a);
    return rc;
}

/* The root found must be the remembered one or descend from it. */
static int check_freshness(struct volume *v, struct volume_found *found, char *message, size_t size)
{
    const struct object_record *state = &v->options.state;
    int order = root_order(found->root.epoch, found->root.counter, state->epoch, state->counter), rc = 0;
    struct object_record record;
    uint8_t previous[SALT_SIZE];
    struct ancestors *a;

    if (!v->options.have_state || v->options.accept_root || memcmp(found->root.salt, state->salt, SALT_SIZE) == 0)
        return 0;
    found->older = order < 0;
    found->forked = order == 0;
    if (order > 0) {
        a = calloc(1, sizeof *a);
        rc = a ? load_ancestors(v, a) : -ENOMEM;
        if (!rc)
            rc = find_root(v, found->root.salt, &record, previous);
        if (!rc)
            found->forked = memcmp(previous, state->salt, SALT_SIZE) != 0 && !descends_from(a, state->salt);
        free(a);
    }
    if (rc)
        return fail(message, size, rc, "the freshness of the volume cannot be checked: %s", strerror(-rc));
    if (found->older || found->forked)
        return fail(message, size, -ESTALE, found->older ? "the volume is older than what this machine remembers"
                    : "the volume does not descend from what this machine remembers");
    return 0;
}

struct row_list {
    struct ns_object_row *rows;
    size_t count, capacity;
};

static int collect_row(void *arg, const struct ns_object_row *row)
{
    struct row_list *list = arg;

    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 256;
        struct ns_object_row *rows = realloc(list->rows, capacity * sizeof *rows);
        if (!rows)
            return -ENOMEM;
        list->rows = rows;
        list->capacity = capacity;
    }
    list->rows[list->count++] = *row;
    return 0;
}

/* Writes down which root of an active object counts from now on. */
static int adopt(struct volume *v, const struct ns_object_row *row, struct volume_found *found)
{
    struct object_record adopted;
    struct object_attr attr;
    struct inode *inode;
    int rc = ns_get_inode(v->ns, row->ino, &inode, 0);

    if (rc)
        return rc;
    pthread_mutex_lock(&inode->lock);
    rc = inode_need_work(inode);
    if (!rc)
        rc = object_recover(&inode->object, &v->env, row->id, &row->record, row->active_epoch, &adopted);
    if (rc)
        inode->object = NULL;
    pthread_mutex_unlock(&inode->lock);
    if (rc) {
        ns_put_inode(v->ns, inode);
        if (rc == -ENOMEM || rc == -EMFILE || rc == -ENFILE)
            return rc;
        /* Its row stays as it is: so it opens again, with all that was acknowledged, when its file can be read again. */
        volume_log(v, VOLUME_ERROR, "inode %llu: its object cannot be recovered: %s; reading it will fail until it can, at a later mount",
                   (unsigned long long)row->ino, strerror(-rc));
        v->active_rows[v->active_row_count++] = (struct active_row){row->ino, row->active_epoch};
        return 0;
    }
    object_durable_attr(inode->object, &attr);
    volume_log(v, VOLUME_INFO, "inode %llu: recovered at epoch %llu, counter %llu (recorded: %llu, %llu)", (unsigned long long)row->ino,
               (unsigned long long)adopted.epoch, (unsigned long long)adopted.counter,
               (unsigned long long)row->record.epoch, (unsigned long long)row->record.counter);
    ns_lock(v->ns, 0);
    pthread_mutex_lock(&inode->lock);
    inode->attr.size = attr.size;
    inode->attr.blocks = ns_blocks(attr.size, attr.nodes);
    inode->attr.mtime = attr.mtime;
    inode->attr.ctime = attr.ctime;
    object_pin_root(inode->object, &adopted);
    inode->work->pin = adopted;
    inode->work->pinned = true;
    pthread_mutex_unlock(&inode->lock);
    rc = ns_write_record(v->ns, inode, &adopted, &attr, 0);
    ns_unlock(v->ns);
    ns_put_inode(v->ns, inode);
    found->recovered_objects++;
    return rc;
}

static int recover_objects(struct volume *v, struct volume_found *found)
{
    struct row_list active = {0};
    int rc = ns_each_active(v->ns, collect_row, &active);

    if (!rc) {
        v->active_rows = calloc(active.count + 1, sizeof *v->active_rows);
        if (!v->active_rows)
            rc = -ENOMEM;
    }
    if (v->options.read_only) {
        for (size_t i = 0; i < active.count && !rc; i++)
            v->active_rows[v->active_row_count++] = (struct active_row){active.rows[i].ino, active.rows[i].active_epoch};
    } else {
        for (size_t i = 0; i < active.count && !rc; i++)
            rc = adopt(v, &active.rows[i], found);
    }
    free(active.rows);
    return rc;
}

static int miss(void *arg, const struct ns_object_row *row)
{
    (void)arg;
    (void)row;
    return -ENOENT;
}

/* Refuses a source directory that has lost the contents of all files, e.g. because "objects" lies on a disk that is not mounted: new
 * files would go to another place, and the old ones be taken for damaged. */
static int check_objects(struct volume *v, char *message, size_t size)
{
    int rc = blockdir_check_objects(v->dir);

    if (rc == -ENOENT)
        rc = ns_each_object(v->ns, miss, NULL);
    return rc ? fail(message, size, rc, "the directory \"objects\", which holds the contents of files: %s", strerror(-rc)) : 0;
}

/* ---- backing files that no row names: left by a crash between creating a file and the group that would have named it ---- */

struct id_list {
    uint8_t (*ids)[ID_SIZE];
    size_t count, capacity;
};

static int add_id(struct id_list *list, const uint8_t id[ID_SIZE])
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 256;
        void *ids = realloc(list->ids, capacity * ID_SIZE);
        if (!ids)
            return -ENOMEM;
        list->ids = ids;
        list->capacity = capacity;
    }
    memcpy(list->ids[list->count++], id, ID_SIZE);
    return 0;
}

static int add_row_id(void *arg, const struct ns_object_row *row) { return add_id(arg, row->id); }
static int add_dropped_id(void *arg, const uint8_t id[ID_SIZE]) { return add_id(arg, id); }
static int compare_ids(const void *a, const void *b) { return memcmp(a, b, ID_SIZE); }

struct file_check {
    struct id_list known, orphans;
};

/* An empty list has no array, and bsearch wants one. */
static bool is_known(const struct id_list *list, const uint8_t *id)
{
    return list->count > 0 && bsearch(id, list->ids, list->count, ID_SIZE, compare_ids) != NULL;
}

static int note_orphan(void *arg, const uint8_t *id, const char *name)
{
    struct file_check *check = arg;

    (void)name;
    if (!id || is_known(&check->known, id))
        return 0;
    return add_id(&check->orphans, id);
}

static int find_orphan_files(struct volume *v, struct id_list *orphans)
{
    struct file_check check = {0};
    int rc = ns_each_object(v->ns, add_row_id, &check.known);

    if (!rc)
        rc = ns_each_dropped(v->ns, add_dropped_id, &check.known);
    if (!rc) {
        if (check.known.count)
            qsort(check.known.ids, check.known.count, ID_SIZE, compare_ids);
        rc = blockdir_list(v->dir, note_orphan, &check);
    }
    free(check.known.ids);
    *orphans = check.orphans;
    return rc;
}

static int note_dropped(void *arg, const uint8_t id[ID_SIZE])
{
    struct ns_events *events = arg;

    events->object_dropped(events->arg, id);
    return 0;
}

/* Exceeds every epoch that the volume has seen and that this machine has begun. */
static uint64_t next_epoch(const struct volume *v, const struct volume_found *found)
{
    const uint64_t seen[] = {found->root.epoch, v->options.state.epoch, v->state.record.epoch, v->state.record.epoch_begun};
    uint64_t highest = 0;

    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
        if (seen[i] > highest)
            highest = seen[i];
    return highest + 1;
}

/* Everything that makes the mount's own epoch durable before any other root of it, and cleans up after the last one. */
static int begin_epoch(struct volume *v, struct volume_found *found, bool clean, char *message, size_t size)
{
    struct ns_events events = groups_ns_events(v->groups);
    struct id_list orphan_files = {0};
    int rc;

    v->env.epoch = next_epoch(v, found);
    rc = state_begin_epoch(v, v->env.epoch);
    if (!rc)
        rc = space_restore_ballast(v);
    if (rc) {                                   /* a full store can be mounted: files must be deleted somehow */
        volume_log(v, VOLUME_WARNING, "the file \"ballast\" in the source directory cannot be made: %s; without it nothing new can be created",
                   strerror(-rc));
        rc = 0;
    }
    if (!rc)
        rc = note_ancestors(v, found);          /* a transaction, so that there is something to commit */
    if (!rc)
        rc = recover_objects(v, found);
    if (!rc)
        rc = ns_each_dropped(v->ns, note_dropped, &events);
    if (!rc)
        rc = ns_reclaim_orphans(v->ns);
    if (!rc && !clean)
        rc = find_orphan_files(v, &orphan_files);
    if (!rc)
        rc = groups_run_once(v->groups);
    for (size_t i = 0; i < orphan_files.count && !rc; i++)
        blockdir_remove(v->dir, orphan_files.ids[i]);
    found->orphans = orphan_files.count;
    free(orphan_files.ids);
    if (!rc)
        rc = groups_start(v->groups);
    return rc ? fail(message, size, rc, "recovery failed: %s", strerror(-rc)) : 0;
}

int volume_open(struct volume **out, const struct volume_options *options, struct volume_found *found,
                char *message, size_t message_size)
{
    struct volume *v = calloc(1, sizeof *v);
    struct ns_events events = {0};
    bool clean;
    int rc;

    *found = (struct volume_found){0};
    if (!v)
        return fail(message, message_size, -ENOMEM, "out of memory");
    rc = open_base(v, options, message, message_size);
    if (!rc)
        rc = open_meta(v, found, message, message_size);
    if (!rc && (rc = inode_table_create(&v->inodes)))
        fail(message, message_size, rc, "out of memory");
    if (!rc && !options->read_only) {
        rc = groups_create(&v->groups, v, options->group_interval_ms);
        if (rc)
            fail(message, message_size, rc, "out of memory");
        else
            events = groups_ns_events(v->groups);
    }
    if (!rc)
        rc = ns_open(&v->ns, v->meta, v->inodes, &events, options->read_only, METADATA_CACHE_BYTES, message, message_size);
    if (!rc)
        rc = check_freshness(v, found, message, message_size);
    if (!rc)
        rc = check_objects(v, message, message_size);
    if (!rc) {
        clean = options->have_state && options->state_clean &&
                memcmp(options->state.salt, found->root.salt, SALT_SIZE) == 0;
        if (options->read_only) {
            rc = recover_objects(v, found);
            if (rc)
                fail(message, message_size, rc, "the active set cannot be read: %s", strerror(-rc));
        } else {
            rc = begin_epoch(v, found, clean, message, message_size);
        }
    }
    if (rc && v->meta && object_damaged(v->meta))
        rc = fail(message, message_size, -EBADMSG, "object 0 (the file \"meta\") is not authentic: it was changed, cut or replaced by an older one");
    if (rc) {
        volume_free(v);
        return rc;
    }
    *out = v;
    return 0;
}

int volume_close(struct volume *v)
{
    struct object_record record;
    int rc = 0;

    if (v->groups) {
        rc = groups_stop(v->groups);
        if (!rc) {
            object_record(v->meta, &record);
            rc = state_write(v, &record, true);
        }
    }
    volume_free(v);
    return rc;
}

/* ---- stats, values ---- */

int volume_resize_free_list(struct volume *v, uint64_t bytes)
{
    int rc = pool_resize(v->pool, bytes);

    if (!rc)
        limit_dirty(v);
    return rc;
}

void volume_queue_stats(struct volume *v, struct pool_queue_stats stats[POOL_CLASSES]) { pool_queue_stats(v->pool, stats); }

void volume_stats(struct volume *v, struct volume_stats *stats)
{
    struct groups_stats groups = {0};

    *stats = (struct volume_stats){0};
    pool_stats(v->pool, &stats->pool);
    if (v->groups) {
        groups_stats(v->groups, &groups);
        stats->failed = groups_failed(v->groups) != 0;
    }
    stats->dirty_bytes = v->env.dirty_nodes * NODE_SIZE;
    stats->inodes_in_core = inode_table_count(v->inodes);
    stats->groups = groups.groups;
    stats->solo_commits = groups.solo_commits;
    stats->durable_mark = groups.durable_mark;
    stats->objects_committed = groups.objects_committed;
    stats->parked = v->parked;
    stats->damaged_reads = v->damaged_reads;
    stats->requests = v->requests;
    stats->bytes_read = v->bytes_read;
    stats->bytes_written = v->bytes_written;
    stats->read_only = v->options.read_only || stats->failed;
}

int volume_get_value(struct volume *v, const char *key, void *value, size_t size, size_t *len)
{
    return ns_get_value(v->ns, key, value, size, len);
}

int volume_set_value(struct volume *v, const char *key, const void *value, size_t len)
{
    int rc;

    if (v->options.read_only)
        return -EROFS;
    rc = ns_set_value(v->ns, key, value, len);
    return rc ? rc : groups_sync_metadata(v->groups);
}

/* ---- verify ---- */

struct verify {
    struct volume *v;
    void (*progress)(void *arg, uint64_t nodes, uint64_t total);
    void (*damaged)(void *arg, const char *path, uint64_t offset, uint64_t bytes);
    void *arg;
    uint64_t total, ino;
    bool found_damage;
};

static void on_progress(void *arg, uint64_t nodes)
{
    struct verify *verify = arg;
    verify->progress(verify->arg, nodes, verify->total);
}

static void report(struct verify *verify, uint64_t offset, uint64_t bytes)
{
    char path[4096];

    if (verify->ino == 0)
        snprintf(path, sizeof path, "(metadata)");
    else if (ns_path(verify->v->ns, verify->ino, path, sizeof path))
        snprintf(path, sizeof path, "(inode %llu)", (unsigned long long)verify->ino);
    verify->found_damage = true;
    verify->damaged(verify->arg, path, offset, bytes);
}

static void on_damaged(void *arg, uint64_t index, uint64_t count)
{
    report(arg, index * NODE_SIZE, count * NODE_SIZE);
}

static int open_row(struct verify *verify, const struct ns_object_row *row, struct object **o)
{
    struct object_record adopted;

    if (row->active_epoch)
        return object_recover(o, &verify->v->env, row->id, &row->record, row->active_epoch, &adopted);
    return object_open(o, &verify->v->env, row->id, &row->record);
}

/* Deleted files that somebody had open to the end are waiting to be reclaimed: their slots may have been used for something else. */
static int collect_live_row(void *arg, const struct ns_object_row *row) { return row->orphan ? 0 : collect_row(arg, row); }

static int verify_object(struct verify *verify, struct object *o)
{
    int rc = object_verify(o, on_progress, on_damaged, verify);

    return rc == -EBADMSG ? 0 : rc;             /* reported; go on with the next object */
}

int volume_verify(struct volume *v, void (*progress)(void *arg, uint64_t nodes, uint64_t total),
                  void (*damaged)(void *arg, const char *path, uint64_t offset, uint64_t bytes), void *arg,
                  const volatile int *stop)
{
    struct verify verify = {.v = v, .progress = progress, .damaged = damaged, .arg = arg};
    struct row_list list = {0};
    struct object_attr attr;
    struct object *o;
    int rc = ns_each_object(v->ns, collect_live_row, &list);

    object_attr(v->meta, &attr);
    verify.total = attr.nodes;
    for (size_t i = 0; i < list.count && !rc; i++) {        /* for the time that is left: a root tells how many nodes there are */
        if (open_row(&verify, &list.rows[i], &o))
            continue;
        object_attr(o, &attr);
        verify.total += attr.nodes;
        object_close(o);
        if (*stop)
            rc = -ECANCELED;
    }
    if (!rc)
        rc = verify_object(&verify, v->meta);
    for (size_t i = 0; i < list.count && !rc; i++) {
        verify.ino = list.rows[i].ino;
        if (open_row(&verify, &list.rows[i], &o)) {
            report(&verify, 0, UINT64_MAX);                 /* the whole file */
            continue;
        }
        rc = verify_object(&verify, o);
        object_close(o);
        if (!rc && *stop)
            rc = -ECANCELED;
    }
    free(list.rows);
    if (rc && object_damaged(v->meta)) {                    /* the rest cannot be found */
        verify.ino = 0;
        report(&verify, 0, UINT64_MAX);
        rc = 0;
    }
    if (rc)
        return rc;
    return verify.found_damage ? -EBADMSG : 0;
}
