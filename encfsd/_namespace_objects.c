/* What groups and mount need of the rows: contents, records of objects, orphans, dropped objects, values of the volume. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "_namespace_internal.h"

enum {
    PAGE_ROWS = 256,    /* rows read at a time, so that fn runs without the mutex */
    SHRINK_PAGES = 256, /* free pages that are worth a transaction: a megabyte */
};

/* ---- contents and snapshots of inodes ---- */

int ns_load_content(struct namespace *ns, struct inode *inode)
{
    if (inode->content != NULL || !id_is_zero(inode->object_id))
        return 0;
    if (inode->attr.size > INLINE_MAX || atomic_load(&ns->torn))
        return -EIO;
    uint8_t *content = calloc(1, INLINE_MAX);
    if (content == NULL)
        return -ENOMEM;
    sqlite3_stmt *stmt = QUERY(ns, SQL_CONTENT_GET, INT(inode->ino));
    int r = statement_next(ns, stmt);
    size_t len = r == 1 ? (size_t)sqlite3_column_bytes(stmt, 0) : 0;
    if (r >= 0)
        r = len == inode->attr.size ? 0 : -EIO;
    if (r == 0 && len > 0)
        memcpy(content, sqlite3_column_blob(stmt, 0), len);
    sqlite3_reset(stmt);
    if (r == 0)
        inode->content = content;
    else
        free(content);
    return r;
}

static int write_data(struct namespace *ns, const struct attr *a, bool with_content, const uint8_t *content)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = RUN(ns, SQL_INODE_DATA, INT(a->size), INT(a->blocks), INT(a->atime), INT(a->mtime), INT(a->ctime), INT(a->ino));
    if (r == 0 && with_content) {
        if (a->size > 0)
            r = RUN(ns, SQL_CONTENT_PUT, INT(a->ino), BLOB(content, a->size));
        else
            r = RUN(ns, SQL_CONTENT_DELETE, INT(a->ino));
    }
    return transaction_end(ns, r);
}

int ns_write_inode(struct namespace *ns, struct inode *inode)
{
    uint8_t content[INLINE_MAX];
    pthread_mutex_lock(&inode->lock);
    if (!id_is_zero(inode->object_id)) {
        pthread_mutex_unlock(&inode->lock);
        return 0;
    }
    struct attr attr = inode->attr;
    bool attr_dirty = inode->attr_dirty, content_dirty = inode->content_dirty;
    if (content_dirty && attr.size > 0)
        memcpy(content, inode->content, attr.size);
    /* Cleared with the snapshot: what is changed from here on is dirty again. */
    inode->attr_dirty = inode->content_dirty = false;
    pthread_mutex_unlock(&inode->lock);
    if (!attr_dirty && !content_dirty)
        return 0;
    int r = write_data(ns, &attr, content_dirty, content);
    if (r < 0) {
        pthread_mutex_lock(&inode->lock);
        inode->attr_dirty |= attr_dirty;
        inode->content_dirty |= content_dirty;
        pthread_mutex_unlock(&inode->lock);
    }
    return r;
}

int ns_write_times(struct namespace *ns, struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    struct attr attr = inode->attr;
    bool dirty = inode->attr_dirty;
    inode->attr_dirty = false;
    pthread_mutex_unlock(&inode->lock);
    int r = dirty ? transaction_begin(ns) : 0;
    if (dirty && r == 0)
        r = transaction_end(ns, RUN(ns, SQL_INODE_TIMES, INT(attr.atime), INT(attr.mtime), INT(attr.ctime), INT(attr.ino)));
    if (r < 0) {
        pthread_mutex_lock(&inode->lock);
        inode->attr_dirty = true;
        pthread_mutex_unlock(&inode->lock);
    }
    return r;
}

uint64_t ns_blocks(uint64_t size, uint64_t nodes)
{
    if (nodes > 0)
        return nodes * (NODE_SIZE / 512);
    return size > 0 ? NODE_SIZE / 512 : 0;
}

static int write_record(struct namespace *ns, uint64_t ino, const uint8_t id[ID_SIZE], const struct object_record *record,
                        const struct object_attr *durable, uint64_t active_epoch, bool first)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = RUN(ns, SQL_OBJECT_PUT, INT(ino), BLOB(id, ID_SIZE), INT(record->epoch), INT(record->counter),
            BLOB(record->salt, SALT_SIZE), INT(active_epoch));
    if (r == 0)
        r = RUN(ns, SQL_INODE_DURABLE, INT(durable->size), INT(ns_blocks(durable->size, durable->nodes)),
                INT(durable->atime), INT(durable->mtime), INT(durable->ctime), INT(ino));
    if (r == 0 && first)
        r = RUN(ns, SQL_CONTENT_DELETE, INT(ino));
    return transaction_end(ns, r);
}

int ns_write_record(struct namespace *ns, struct inode *inode, const struct object_record *record,
                    const struct object_attr *durable, uint64_t active_epoch)
{
    uint8_t id[ID_SIZE];
    struct object_record copy = *record;
    pthread_mutex_lock(&inode->lock);
    bool first = !inode->has_record;
    memcpy(id, inode->object_id, ID_SIZE);
    pthread_mutex_unlock(&inode->lock);

    int r = write_record(ns, inode->ino, id, &copy, durable, active_epoch, first);
    if (r == 0) {
        pthread_mutex_lock(&inode->lock);
        inode->record = copy;
        inode->has_record = true;
        pthread_mutex_unlock(&inode->lock);
    }
    return r;
}

static int shrink_once(struct namespace *ns)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    /* Each step moves or drops one page. */
    sqlite3_stmt *stmt = statement_query(ns, SQL_SHRINK, NULL, 0);
    while ((r = statement_next(ns, stmt)) == 1)
        ;
    sqlite3_reset(stmt);
    return transaction_end(ns, r);
}

int ns_shrink(struct namespace *ns)
{
    if (atomic_load(&ns->torn))
        return -EIO;
    sqlite3_stmt *stmt = statement_query(ns, SQL_FREE_PAGES, NULL, 0);
    int r = statement_next(ns, stmt);
    int64_t free_pages = r == 1 ? sqlite3_column_int64(stmt, 0) : 0;
    int64_t pages = r == 1 ? sqlite3_column_int64(stmt, 1) : 0;
    sqlite3_reset(stmt);
    if (r < 0)
        return r;
    if (free_pages < SHRINK_PAGES || free_pages < pages / 4)
        return 0;
    r = shrink_once(ns);
    return r < 0 ? r : 1;
}

/* ---- rows at mount ---- */

static void read_object_row(sqlite3_stmt *stmt, struct ns_object_row *row)
{
    row->ino = (uint64_t)sqlite3_column_int64(stmt, 0);
    memcpy(row->id, sqlite3_column_blob(stmt, 1), ID_SIZE);
    row->record.epoch = (uint64_t)sqlite3_column_int64(stmt, 2);
    row->record.counter = (uint64_t)sqlite3_column_int64(stmt, 3);
    memcpy(row->record.salt, sqlite3_column_blob(stmt, 4), SALT_SIZE);
    row->active_epoch = (uint64_t)sqlite3_column_int64(stmt, 5);
    row->orphan = sqlite3_column_type(stmt, 6) != SQLITE_NULL;
}

static int read_object_rows(struct namespace *ns, enum statement list, uint64_t after, struct ns_object_row *rows,
                            size_t *count)
{
    *count = 0;
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    sqlite3_stmt *stmt = QUERY(ns, list, INT(after));
    while (*count < PAGE_ROWS && (r = statement_next(ns, stmt)) == 1) {
        if (sqlite3_column_bytes(stmt, 1) != ID_SIZE || sqlite3_column_bytes(stmt, 4) != SALT_SIZE) {
            r = -EUCLEAN;
            break;
        }
        read_object_row(stmt, &rows[(*count)++]);
    }
    sqlite3_reset(stmt);
    ns_leave(ns);
    return r < 0 ? r : 0;
}

static int each_object(struct namespace *ns, enum statement list, int (*fn)(void *arg, const struct ns_object_row *row),
                       void *arg)
{
    struct ns_object_row *rows = malloc(PAGE_ROWS * sizeof *rows);
    if (rows == NULL)
        return -ENOMEM;
    size_t count = PAGE_ROWS;
    uint64_t after = 0;
    int r = 0;
    while (r == 0 && count == PAGE_ROWS) {
        r = read_object_rows(ns, list, after, rows, &count);
        for (size_t i = 0; r == 0 && i < count; i++) {
            after = rows[i].ino;
            r = fn(arg, &rows[i]);
        }
    }
    free(rows);
    return r;
}

int ns_each_active(struct namespace *ns, int (*fn)(void *arg, const struct ns_object_row *row), void *arg)
{
    return each_object(ns, SQL_OBJECT_LIST_ACTIVE, fn, arg);
}

int ns_each_object(struct namespace *ns, int (*fn)(void *arg, const struct ns_object_row *row), void *arg)
{
    return each_object(ns, SQL_OBJECT_LIST, fn, arg);
}

/* 1 and an orphan, 0 if there is none. */
static int first_orphan(struct namespace *ns, uint64_t *ino, uint32_t *mode, uint8_t id[ID_SIZE])
{
    sqlite3_stmt *stmt = statement_query(ns, SQL_ORPHAN_FIRST, NULL, 0);
    int r = statement_next(ns, stmt);
    if (r == 1) {
        *ino = (uint64_t)sqlite3_column_int64(stmt, 0);
        *mode = (uint32_t)sqlite3_column_int64(stmt, 1);
        memset(id, 0, ID_SIZE);
        if (sqlite3_column_bytes(stmt, 2) == ID_SIZE)
            memcpy(id, sqlite3_column_blob(stmt, 2), ID_SIZE);
    }
    sqlite3_reset(stmt);
    return r;
}

int ns_reclaim_orphans(struct namespace *ns)
{
    uint64_t ino;
    uint32_t mode;
    uint8_t id[ID_SIZE];
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    while ((r = first_orphan(ns, &ino, &mode, id)) == 1) {
        r = transaction_begin(ns);
        if (r == 0)
            r = transaction_end(ns, inode_rows_delete(ns, ino, mode, id));
        if (r < 0)
            break;
        if (!id_is_zero(id) && ns->events.object_dropped != NULL)
            ns->events.object_dropped(ns->events.arg, id);
    }
    ns_leave(ns);
    return r;
}

static int read_dropped(struct namespace *ns, const uint8_t *after, size_t after_size, uint8_t (*ids)[ID_SIZE],
                        size_t *count)
{
    *count = 0;
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    sqlite3_stmt *stmt = QUERY(ns, SQL_DROPPED_LIST, BLOB(after, after_size));
    while (*count < PAGE_ROWS && (r = statement_next(ns, stmt)) == 1) {
        if (sqlite3_column_bytes(stmt, 0) != ID_SIZE) {
            r = -EUCLEAN;
            break;
        }
        memcpy(ids[(*count)++], sqlite3_column_blob(stmt, 0), ID_SIZE);
    }
    sqlite3_reset(stmt);
    ns_leave(ns);
    return r < 0 ? r : 0;
}

int ns_each_dropped(struct namespace *ns, int (*fn)(void *arg, const uint8_t id[ID_SIZE]), void *arg)
{
    uint8_t ids[PAGE_ROWS][ID_SIZE], after[ID_SIZE] = {0};
    size_t after_size = 0, count = PAGE_ROWS;   /* the empty blob sorts before every id */
    int r = 0;
    while (r == 0 && count == PAGE_ROWS) {
        r = read_dropped(ns, after, after_size, ids, &count);
        for (size_t i = 0; r == 0 && i < count; i++)
            r = fn(arg, ids[i]);
        if (count > 0)
            memcpy(after, ids[count - 1], ID_SIZE);
        after_size = ID_SIZE;
    }
    return r;
}

int ns_forget_dropped(struct namespace *ns, const uint8_t id[ID_SIZE])
{
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    r = transaction_begin(ns);
    if (r == 0)
        r = transaction_end(ns, RUN(ns, SQL_DROPPED_DELETE, BLOB(id, ID_SIZE)));
    ns_leave(ns);
    return r;
}

/* ---- values ---- */

int ns_get_value(struct namespace *ns, const char *key, void *value, size_t size, size_t *len)
{
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    sqlite3_stmt *stmt = QUERY(ns, SQL_VALUE_GET, TEXT(key));
    r = statement_next(ns, stmt);
    if (r == 1) {
        *len = (size_t)sqlite3_column_bytes(stmt, 0);
        r = *len <= size ? 0 : -ERANGE;
        if (r == 0 && *len > 0)
            memcpy(value, sqlite3_column_blob(stmt, 0), *len);
    } else if (r == 0) {
        r = -ENOENT;
    }
    sqlite3_reset(stmt);
    ns_leave(ns);
    return r;
}

int ns_set_value(struct namespace *ns, const char *key, const void *value, size_t len)
{
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    r = transaction_begin(ns);
    if (r == 0)
        r = transaction_end(ns, RUN(ns, SQL_VALUE_PUT, TEXT(key), BLOB(value, len)));
    ns_leave(ns);
    return r;
}
