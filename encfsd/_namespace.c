/* The namespace as a whole: opening it, its mutex, its transactions, inodes between table and rows, attributes. */
#include "_namespace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "_namespace_internal.h"

/* ---- open and close ---- */

int ns_format(struct object *meta, uint32_t uid, uint32_t gid)
{
    struct vfs_file *file;
    char name[32], message[160];
    sqlite3 *db;

    int r = vfs_register();
    if (r == 0)
        r = vfs_attach(&file, meta, name);
    if (r < 0)
        return r;
    r = schema_connect(&db, name, false, 0, message, sizeof message);
    if (r == 0) {
        r = schema_format(db, uid, gid);
        schema_close(db);
    }
    vfs_detach(file);
    return r;
}

static int load_values(struct namespace *ns)
{
    size_t len;
    int r = ns_get_value(ns, VALUE_HASH_KEY, ns->hash_key, sizeof ns->hash_key, &len);
    if (r == 0 && len != sizeof ns->hash_key)
        r = -EUCLEAN;
    if (r == 0)
        r = ns_get_value(ns, VALUE_NEXT_INO, &ns->next_ino, sizeof ns->next_ino, &len);
    if (r == 0 && (len != sizeof ns->next_ino || ns->next_ino <= ROOT_INO))
        r = -EUCLEAN;
    ns->reserved_ino = ns->next_ino;
    return r == -ENOENT || r == -ERANGE ? -EUCLEAN : r;
}

int ns_open(struct namespace **out, struct object *meta, struct inode_table *inodes, const struct ns_events *events,
            bool read_only, size_t cache_bytes, char *message, size_t message_size)
{
    char name[32];
    int r = vfs_register();
    struct namespace *ns = calloc(1, sizeof *ns);
    if (ns == NULL || r < 0) {
        snprintf(message, message_size, "metadata: out of memory");
        free(ns);
        return -ENOMEM;
    }
    ns->inodes = inodes;
    ns->events = *events;
    ns->read_only = read_only;
    ns->hash = siphash24;
    ns->inode_count = -1;
    pthread_mutex_init(&ns->mutex, NULL);
    message[0] = '\0';

    r = vfs_attach(&ns->file, meta, name);
    if (r == 0)
        r = schema_connect(&ns->db, name, read_only, cache_bytes, message, message_size);
    if (r == 0)
        r = schema_check(ns->db, message, message_size);
    if (r == 0)
        r = statements_prepare(ns);
    if (r == 0)
        r = load_values(ns);
    if (r == 0)
        r = core_get(ns, ROOT_INO, &ns->root);
    r = r == -ENOENT ? -EUCLEAN : r;
    if (r < 0) {
        if (message[0] == '\0')
            snprintf(message, message_size, "metadata: %s", ns->db == NULL ? strerror(-r) : sqlite3_errmsg(ns->db));
        ns_close(ns);
        return r;
    }
    *out = ns;
    return 0;
}

int ns_close(struct namespace *ns)
{
    if (ns->root != NULL)
        ns_put_inode(ns, ns->root);
    statements_finalize(ns);
    int r = schema_close(ns->db);
    if (ns->file != NULL)
        vfs_detach(ns->file);
    pthread_mutex_destroy(&ns->mutex);
    free(ns);
    return r;
}

/* ---- the mutex ---- */

int ns_lock(struct namespace *ns, int flags)
{
    if ((flags & NS_NOWAIT) == 0)
        pthread_mutex_lock(&ns->mutex);
    else if (pthread_mutex_trylock(&ns->mutex) != 0)
        return -EAGAIN;
    return 0;
}

int ns_enter(struct namespace *ns, int flags)
{
    int r = ns_lock(ns, flags);
    if (r == 0 && atomic_load(&ns->torn)) {
        pthread_mutex_unlock(&ns->mutex);
        r = -EIO;
    }
    return r;
}

void ns_leave(struct namespace *ns)
{
    /* Closing frees an object's nodes: not while everybody waits. */
    struct object *closing[CLOSING_MAX];
    unsigned n = ns->closing_count;
    memcpy(closing, ns->closing, n * sizeof *closing);
    ns->closing_count = 0;
    pthread_mutex_unlock(&ns->mutex);
    for (unsigned i = 0; i < n; i++)
        object_close(closing[i]);
}

void ns_unlock(struct namespace *ns)
{
    ns_leave(ns);
}

uint64_t ns_mark(struct namespace *ns)
{
    return vfs_marks(ns->file);
}

int ns_failed(struct namespace *ns, bool *torn)
{
    *torn = atomic_load(&ns->torn);
    return atomic_load(&ns->failed);
}

/* ---- transactions ---- */

int transaction_begin(struct namespace *ns)
{
    if (ns->read_only || atomic_load(&ns->failed) != 0)
        return -EROFS;
    if (ns->rows_together && sqlite3_get_autocommit(ns->db) == 0)
        return 0;
    ns->statement_failed = false;
    ns->inode_count_change = 0;
    int r = statement_run(ns, SQL_BEGIN, NULL, 0);
    if (r < 0)
        atomic_store(&ns->failed, r);
    return r;
}

int transaction_end(struct namespace *ns, int result)
{
    if (ns->rows_together)
        return result;
    if (result == 0)
        result = statement_run(ns, SQL_COMMIT, NULL, 0);
    if (result == 0) {
        if (ns->inode_count >= 0)
            ns->inode_count += ns->inode_count_change;
        return 0;
    }
    bool failed = ns->statement_failed;
    if (sqlite3_get_autocommit(ns->db) == 0)
        statement_run(ns, SQL_ROLLBACK, NULL, 0);
    if (failed) {
        atomic_store(&ns->failed, result);
        atomic_store(&ns->torn, vfs_torn(ns->file) || sqlite3_get_autocommit(ns->db) == 0);
    }
    return result;
}

void ns_rows_begin(struct namespace *ns) { ns->rows_together = true; }

int ns_rows_end(struct namespace *ns, int result)
{
    ns->rows_together = false;
    return sqlite3_get_autocommit(ns->db) == 0 ? transaction_end(ns, result) : result;
}

int64_t time_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- inodes between table and rows ---- */

static uint64_t column_u64(sqlite3_stmt *row, int column)
{
    return (uint64_t)sqlite3_column_int64(row, column);
}

static uint32_t column_u32(sqlite3_stmt *row, int column)
{
    return (uint32_t)sqlite3_column_int64(row, column);
}

static void read_inode(sqlite3_stmt *row, int first, struct inode *inode)
{
    inode->attr = (struct attr){
        .ino = inode->ino,
        .mode = column_u32(row, first),
        .nlink = column_u32(row, first + 1),
        .uid = column_u32(row, first + 2),
        .gid = column_u32(row, first + 3),
        .rdev = column_u32(row, first + 4),
        .size = column_u64(row, first + 5),
        .blocks = column_u64(row, first + 6),
        .atime = sqlite3_column_int64(row, first + 7),
        .mtime = sqlite3_column_int64(row, first + 8),
        .ctime = sqlite3_column_int64(row, first + 9),
        .btime = sqlite3_column_int64(row, first + 10),
    };
    inode->parent = column_u64(row, first + 11);
    inode->deleted = sqlite3_column_type(row, first + 16) != SQLITE_NULL;
    if (inode->deleted)
        inode->attr.nlink = 0;
    inode->has_record = sqlite3_column_type(row, first + 12) != SQLITE_NULL;
    if (inode->has_record) {
        memcpy(inode->object_id, sqlite3_column_blob(row, first + 12), ID_SIZE);
        inode->record.epoch = column_u64(row, first + 13);
        inode->record.counter = column_u64(row, first + 14);
        memcpy(inode->record.salt, sqlite3_column_blob(row, first + 15), SALT_SIZE);
    }
}

int core_insert(struct namespace *ns, uint64_t ino, sqlite3_stmt *row, int first, struct inode **out)
{
    if (sqlite3_column_type(row, first) == SQLITE_NULL)
        return -ENOENT;
    bool created, has_record = sqlite3_column_type(row, first + 12) != SQLITE_NULL;
    if (has_record &&
        (sqlite3_column_bytes(row, first + 12) != ID_SIZE || sqlite3_column_bytes(row, first + 15) != SALT_SIZE))
        return -EIO;
    *out = inode_get(ns->inodes, ino, &created);
    if (*out == NULL)
        return -ENOMEM;
    read_inode(row, first, *out);
    pthread_mutex_unlock(&(*out)->lock);
    return 0;
}

int core_get(struct namespace *ns, uint64_t ino, struct inode **out)
{
    *out = inode_find(ns->inodes, ino);
    if (*out != NULL)
        return 0;
    sqlite3_stmt *stmt = QUERY(ns, SQL_INODE_LOAD, INT(ino));
    int r = statement_next(ns, stmt);
    if (r >= 0)
        r = r == 1 ? core_insert(ns, ino, stmt, 0, out) : -ENOENT;
    sqlite3_reset(stmt);
    return r;
}

/* Removes an inode whose last use may be over, and its rows if it was deleted. Only here, under the mutex, is that decided:
 * whoever found it again meanwhile keeps it. */
static void drop_unused(struct namespace *ns, uint64_t ino)
{
    struct inode *inode = inode_find(ns->inodes, ino);
    if (inode == NULL)
        return;
    uint8_t id[ID_SIZE];
    pthread_mutex_lock(&inode->lock);
    bool deleted = inode->deleted;
    uint32_t mode = inode->attr.mode;
    memcpy(id, inode->object_id, ID_SIZE);
    pthread_mutex_unlock(&inode->lock);

    struct object *object;
    if (!inode_put(ns->inodes, inode) || !inode_remove_if_unused(ns->inodes, ino, &object))
        return;
    if (object != NULL) {
        if (ns->closing_count < CLOSING_MAX)
            ns->closing[ns->closing_count++] = object;
        else
            object_close(object);
    }
    /* If this fails the row stays an orphan, and the next mount reclaims it. */
    if (!deleted || transaction_begin(ns) < 0)
        return;
    int r = transaction_end(ns, inode_rows_delete(ns, ino, mode, id));
    if (r == 0 && !id_is_zero(id) && ns->events.object_dropped != NULL)
        ns->events.object_dropped(ns->events.arg, id);
}

void core_put(struct namespace *ns, struct inode *inode)
{
    uint64_t ino = inode->ino;
    if (inode_put(ns->inodes, inode))
        drop_unused(ns, ino);
}

int ns_get_inode(struct namespace *ns, uint64_t ino, struct inode **inode, int flags)
{
    *inode = inode_find(ns->inodes, ino);
    if (*inode != NULL)
        return 0;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, inode);
    ns_leave(ns);
    return r;
}

/* Even a torn database has to let go of inodes. */
static void drop_unused_unlocked(struct namespace *ns, uint64_t ino)
{
    ns_lock(ns, 0);
    drop_unused(ns, ino);
    ns_leave(ns);
}

void ns_put_inode(struct namespace *ns, struct inode *inode)
{
    uint64_t ino = inode->ino;
    if (inode_put(ns->inodes, inode))
        drop_unused_unlocked(ns, ino);
}

int ns_forget(struct namespace *ns, uint64_t ino, uint64_t n)
{
    if (inode_forget(ns->inodes, ino, n))
        drop_unused_unlocked(ns, ino);
    return 0;
}

int ns_forget_nowait(struct namespace *ns, uint64_t ino, uint64_t n)
{
    if (!inode_forget(ns->inodes, ino, n))
        return 0;
    if (ns_lock(ns, NS_NOWAIT) < 0)
        return -EAGAIN;
    drop_unused(ns, ino);
    ns_leave(ns);
    return 0;
}

struct attr core_attr(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    struct attr attr = inode->attr;
    pthread_mutex_unlock(&inode->lock);
    return attr;
}

void core_changed(struct namespace *ns, struct inode *inode, int64_t links, int what, int64_t now)
{
    bool dirty = what != CORE_ROW;
    pthread_mutex_lock(&inode->lock);
    inode->attr.nlink = (uint32_t)(inode->attr.nlink + links);
    inode->attr.ctime = now;
    if ((what & CORE_ENTRIES) != 0)
        inode->attr.mtime = now;
    if (dirty)
        inode->attr_dirty = true;
    inode->deleted = inode->attr.nlink == 0;
    inode->meta_mark = vfs_marks(ns->file);
    pthread_mutex_unlock(&inode->lock);
    if (dirty && ns->events.dirtied != NULL)
        ns->events.dirtied(ns->events.arg, inode);
}

/* ---- attributes ---- */

int ns_getattr(struct namespace *ns, uint64_t ino, struct attr *out, int flags)
{
    struct inode *inode;
    int r = ns_get_inode(ns, ino, &inode, flags);
    if (r < 0)
        return r;
    *out = core_attr(inode);
    ns_put_inode(ns, inode);
    return 0;
}

/* A change of owner takes these from everything but directories; setgid without group execute is no privilege. */
static uint32_t without_privileges(uint32_t mode)
{
    if ((mode & (S_ISGID | S_IXGRP)) == (S_ISGID | S_IXGRP))
        mode &= ~(uint32_t)S_ISGID;
    return mode & ~(uint32_t)S_ISUID;
}

/* The part of a setattr that is a transaction: `new` holds mode, uid, gid and ctime to be. */
static int write_owner(struct namespace *ns, struct inode *inode, const struct attr *new, uint32_t valid)
{
    bool no_xattrs = xattrs_known_none(inode);
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = RUN(ns, SQL_INODE_OWNER, INT(new->mode), INT(new->uid), INT(new->gid), INT(new->ctime), INT(new->ino));
    if (r == 0 && (valid & SET_MODE) != 0 && !no_xattrs)
        r = acl_follow_mode(ns, new->ino, new->mode);
    if (r == 0 && (valid & (SET_UID | SET_GID)) != 0 && !S_ISDIR(new->mode) && !no_xattrs)
        r = capability_delete(ns, new->ino);
    return transaction_end(ns, r);
}

/* Times are only noted, for a group to write: no mutex is needed. */
static void set_times(struct namespace *ns, struct inode *inode, const struct attr *values, uint32_t valid, int64_t now)
{
    pthread_mutex_lock(&inode->lock);
    if ((valid & SET_ATIME) != 0)
        inode->attr.atime = values->atime;
    if ((valid & SET_MTIME) != 0)
        inode->attr.mtime = values->mtime;
    inode->attr.ctime = now;
    inode->attr_dirty = true;
    pthread_mutex_unlock(&inode->lock);
    if (ns->events.dirtied != NULL)
        ns->events.dirtied(ns->events.arg, inode);
}

/* Nothing but ctime would change: a program that unpacks an archive sets what most files have already. An access ACL is in step with the
 * mode as it is, but a capability goes with every chown, also to the same owner. */
static bool owner_stays(struct inode *inode, const struct attr *old, const struct attr *new, uint32_t valid)
{
    bool may_take_capability = (valid & (SET_UID | SET_GID)) != 0 && !S_ISDIR(new->mode) && !xattrs_known_none(inode);

    return new->mode == old->mode && new->uid == old->uid && new->gid == old->gid && !may_take_capability;
}

/* Mode, owner and group: a transaction, so the namespace mutex is held. */
static int set_owner(struct namespace *ns, struct inode *inode, const struct attr *values, uint32_t valid, int64_t now)
{
    struct attr old = core_attr(inode), new = old;

    if ((valid & SET_MODE) != 0)
        new.mode = (new.mode & S_IFMT) | (values->mode & 07777);
    else if (!S_ISDIR(new.mode))
        new.mode = without_privileges(new.mode);
    if ((valid & SET_UID) != 0)
        new.uid = values->uid;
    if ((valid & SET_GID) != 0)
        new.gid = values->gid;
    if (owner_stays(inode, &old, &new, valid)) {
        set_times(ns, inode, values, 0, now);
        return 0;
    }
    new.ctime = now;
    int r = write_owner(ns, inode, &new, valid);
    if (r < 0)
        return r;
    /* Size and times may have moved on meanwhile: only what was asked for is changed. */
    pthread_mutex_lock(&inode->lock);
    inode->attr.mode = new.mode;
    inode->attr.uid = new.uid;
    inode->attr.gid = new.gid;
    inode->attr.ctime = new.ctime;
    inode->meta_mark = vfs_marks(ns->file);
    pthread_mutex_unlock(&inode->lock);
    return 0;
}

/* Under the namespace mutex if owner or mode change. */
static int set_attributes(struct namespace *ns, struct inode *inode, const struct attr *values, uint32_t valid)
{
    bool owner = (valid & (SET_MODE | SET_UID | SET_GID)) != 0;
    int64_t now = (valid & SET_CTIME) != 0 ? values->ctime : time_now();
    int r = ns->read_only || atomic_load(&ns->failed) != 0 ? -EROFS : 0;

    if (atomic_load(&ns->torn))
        r = -EIO;
    if (r == 0 && owner)
        r = set_owner(ns, inode, values, valid, now);
    if (r == 0 && ((valid & (SET_ATIME | SET_MTIME)) != 0 || !owner))
        set_times(ns, inode, values, valid, now);
    return r;
}

int ns_setattr(struct namespace *ns, uint64_t ino, const struct attr *values, uint32_t valid, struct attr *out, int flags)
{
    bool owner = (valid & (SET_MODE | SET_UID | SET_GID)) != 0;
    struct inode *inode;
    int r;

    if ((valid & SET_SIZE) != 0)
        return -EINVAL;
    r = ns_get_inode(ns, ino, &inode, flags);
    if (r < 0)
        return r;
    bool entered = owner && (r = ns_enter(ns, flags)) == 0;
    if (r == 0 && valid != 0)
        r = set_attributes(ns, inode, values, valid);
    if (r == 0)
        *out = core_attr(inode);
    if (entered)
        ns_leave(ns);
    ns_put_inode(ns, inode);
    return r;
}

/* The mode without what a write takes. */
static uint32_t mode_after_write(uint32_t mode, bool capability_only)
{
    return capability_only ? mode : without_privileges(mode);
}

/* Mode and attributes change under the mutex only, so that what is found here stays true until it is written. 1: something was dropped,
 * 0: there was nothing, or -errno. */
static int drop_privileges(struct namespace *ns, struct inode *inode, bool capability_only)
{
    struct attr attr = core_attr(inode);
    uint32_t mode = mode_after_write(attr.mode, capability_only);
    int capability = capability_find(ns, inode);
    if (capability < 0 || (capability == 0 && mode == attr.mode))
        return capability;

    int64_t now = time_now();
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = RUN(ns, SQL_INODE_OWNER, INT(mode), INT(attr.uid), INT(attr.gid), INT(now), INT(attr.ino));
    if (r == 0 && capability != 0)
        r = capability_delete(ns, attr.ino);
    r = transaction_end(ns, r);
    if (r < 0)
        return r;
    pthread_mutex_lock(&inode->lock);
    inode->attr.mode = mode;
    pthread_mutex_unlock(&inode->lock);
    core_changed(ns, inode, 0, CORE_ROW, now);
    return 1;
}

int ns_drop_privileges(struct namespace *ns, uint64_t ino, bool capability_only, bool *dropped, int flags)
{
    struct inode *inode;
    bool something = false;
    int r = ns_get_inode(ns, ino, &inode, flags);
    if (r < 0)
        return r;
    pthread_mutex_lock(&inode->lock);
    uint32_t mode = inode->attr.mode;
    bool nothing = !S_ISREG(mode) || (inode->no_xattrs && mode_after_write(mode, capability_only) == mode);
    pthread_mutex_unlock(&inode->lock);
    if (!nothing)
        r = ns_enter(ns, flags);
    if (!nothing && r == 0) {
        r = drop_privileges(ns, inode, capability_only);
        ns_leave(ns);
        something = r > 0;
    }
    ns_put_inode(ns, inode);
    if (dropped != NULL)
        *dropped = something;
    return r < 0 ? r : 0;
}

int ns_statfs(struct namespace *ns, struct ns_counts *counts, int flags)
{
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    if (ns->inode_count < 0 && (flags & NS_NOWAIT) != 0) {
        r = -EAGAIN;
    } else if (ns->inode_count < 0) {
        /* The first call reads the whole table (0.1 s for a million inodes); from then on the number is kept. */
        sqlite3_stmt *stmt = statement_query(ns, SQL_INODE_COUNT, NULL, 0);
        r = statement_next(ns, stmt);
        if (r == 1)
            ns->inode_count = sqlite3_column_int64(stmt, 0);
        r = r < 0 ? r : 0;
        sqlite3_reset(stmt);
    }
    counts->inodes = (uint64_t)ns->inode_count;
    ns_leave(ns);
    return r;
}
