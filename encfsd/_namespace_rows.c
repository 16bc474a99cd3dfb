/* The statements of the namespace, and the rows that they read and write. */
#include <errno.h>
#include <string.h>

#include "_namespace_internal.h"

#define INODE_COLUMNS "mode,nlink,uid,gid,rdev,size,blocks,atime,mtime,ctime,btime,inode.parent,id,epoch,counter,salt"

static const char *const sql[STATEMENTS] = {
    [SQL_BEGIN] = "BEGIN",
    [SQL_COMMIT] = "COMMIT",
    [SQL_ROLLBACK] = "ROLLBACK",

    [SQL_ENTRY_FIND] = "SELECT cookie,name,ino,type FROM dirent WHERE parent=? AND cookie BETWEEN ? AND ? ORDER BY cookie",
    [SQL_ENTRY_INSERT] = "INSERT INTO dirent(parent,cookie,name,ino,type) VALUES(?,?,?,?,?)",
    [SQL_ENTRY_DELETE] = "DELETE FROM dirent WHERE parent=? AND cookie=?",
    [SQL_ENTRY_REPLACE] = "UPDATE dirent SET ino=?,type=? WHERE parent=? AND cookie=?",
    [SQL_ENTRY_ANY] = "SELECT 1 FROM dirent WHERE parent=? LIMIT 1",
    [SQL_ENTRY_LIST] = "SELECT cookie,name,ino,type FROM dirent WHERE parent=? AND cookie>? ORDER BY cookie",
    /* An inode with a name is no orphan. LEFT: an entry without an inode is an error, not left out. */
    [SQL_ENTRY_LOAD] =
        "SELECT cookie,name,dirent.ino,type," INODE_COLUMNS ",NULL FROM dirent LEFT JOIN inode ON inode.ino=dirent.ino"
        " LEFT JOIN object ON object.ino=dirent.ino WHERE dirent.parent=? AND cookie>? ORDER BY cookie",
    [SQL_ENTRY_NAME] = "SELECT name FROM dirent WHERE parent=? AND ino=?",
    [SQL_ENTRY_OF] = "SELECT parent,name FROM dirent WHERE ino=?",

    [SQL_INODE_LOAD] =
        "SELECT " INODE_COLUMNS ",orphan.ino FROM inode LEFT JOIN object USING(ino) LEFT JOIN orphan USING(ino) WHERE ino=?",
    [SQL_INODE_INSERT] =
        "INSERT INTO inode(ino,mode,nlink,uid,gid,rdev,size,blocks,atime,mtime,ctime,btime,parent)"
        " VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?)",
    [SQL_INODE_DELETE] = "DELETE FROM inode WHERE ino=?",
    [SQL_INODE_LINKS] = "UPDATE inode SET nlink=?,ctime=? WHERE ino=?",
    [SQL_INODE_OWNER] = "UPDATE inode SET mode=?,uid=?,gid=?,ctime=? WHERE ino=?",
    [SQL_INODE_PARENT] = "UPDATE inode SET parent=? WHERE ino=?",
    [SQL_INODE_DATA] = "UPDATE inode SET size=?,blocks=?,atime=?,mtime=?,ctime=? WHERE ino=?",
    /* A chmod may have written a later ctime than the root carries. */
    [SQL_INODE_DURABLE] = "UPDATE inode SET size=?,blocks=?,atime=?,mtime=?,ctime=max(ctime,?) WHERE ino=?",
    [SQL_INODE_TIMES] = "UPDATE inode SET atime=?,mtime=?,ctime=? WHERE ino=?",
    [SQL_INODE_COUNT] = "SELECT count(*) FROM inode",

    [SQL_ORPHAN_PUT] = "INSERT INTO orphan(ino) VALUES(?)",
    [SQL_ORPHAN_DELETE] = "DELETE FROM orphan WHERE ino=?",
    [SQL_ORPHAN_FIRST] = "SELECT ino,mode,id FROM orphan JOIN inode USING(ino) LEFT JOIN object USING(ino) LIMIT 1",

    [SQL_CONTENT_GET] = "SELECT data FROM content WHERE ino=?",
    [SQL_CONTENT_PUT] = "INSERT OR REPLACE INTO content(ino,data) VALUES(?,?)",
    [SQL_CONTENT_DELETE] = "DELETE FROM content WHERE ino=?",

    [SQL_XATTR_GET] = "SELECT value FROM xattr WHERE ino=? AND name=?",
    [SQL_XATTR_PUT] = "INSERT OR REPLACE INTO xattr(ino,name,value) VALUES(?,?,?)",
    [SQL_XATTR_DELETE] = "DELETE FROM xattr WHERE ino=? AND name=?",
    [SQL_XATTR_LIST] = "SELECT name FROM xattr WHERE ino=? ORDER BY name",
    [SQL_XATTR_CLEAR] = "DELETE FROM xattr WHERE ino=?",

    [SQL_OBJECT_PUT] = "INSERT OR REPLACE INTO object(ino,id,epoch,counter,salt,active_epoch) VALUES(?,?,?,?,?,?)",
    [SQL_OBJECT_DELETE] = "DELETE FROM object WHERE ino=?",
    [SQL_OBJECT_LIST] =
        "SELECT object.ino,id,epoch,counter,salt,active_epoch,orphan.ino FROM object LEFT JOIN orphan USING(ino)"
        " WHERE object.ino>? ORDER BY object.ino",
    [SQL_OBJECT_LIST_ACTIVE] =
        "SELECT object.ino,id,epoch,counter,salt,active_epoch,orphan.ino FROM object LEFT JOIN orphan USING(ino)"
        " WHERE active_epoch<>0 AND object.ino>? ORDER BY object.ino",

    [SQL_DROPPED_PUT] = "INSERT INTO dropped(id) VALUES(?)",
    [SQL_DROPPED_DELETE] = "DELETE FROM dropped WHERE id=?",
    [SQL_DROPPED_LIST] = "SELECT id FROM dropped WHERE id>? ORDER BY id",

    [SQL_VALUE_GET] = "SELECT value FROM volume WHERE key=?",
    [SQL_VALUE_PUT] = "INSERT OR REPLACE INTO volume(key,value) VALUES(?,?)",

    [SQL_FREE_PAGES] = "SELECT freelist_count,page_count FROM pragma_freelist_count,pragma_page_count",
    [SQL_SHRINK] = "PRAGMA incremental_vacuum(64)",
};

int statements_prepare(struct namespace *ns)
{
    for (int i = 0; i < STATEMENTS; i++) {
        int rc = sqlite3_prepare_v3(ns->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &ns->statements[i], NULL);
        if (rc != SQLITE_OK)
            return schema_errno(rc);
    }
    return 0;
}

void statements_finalize(struct namespace *ns)
{
    for (int i = 0; i < STATEMENTS; i++)
        sqlite3_finalize(ns->statements[i]);
}

sqlite3_stmt *statement_query(struct namespace *ns, enum statement id, const struct bind *binds, size_t count)
{
    sqlite3_stmt *stmt = ns->statements[id];
    for (size_t i = 0; i < count; i++) {
        const struct bind *b = &binds[i];
        /* These fail only for a wrong index or a blob beyond a gigabyte. */
        if (b->data == NULL)
            sqlite3_bind_int64(stmt, (int)i + 1, b->value);
        else if (b->value < 0)
            sqlite3_bind_text(stmt, (int)i + 1, b->data, -1, SQLITE_STATIC);
        else
            sqlite3_bind_blob(stmt, (int)i + 1, b->data, (int)b->value, SQLITE_STATIC);
    }
    return stmt;
}

int statement_next(struct namespace *ns, sqlite3_stmt *stmt)
{
    int rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW)
        return 1;
    if (rc != SQLITE_DONE)
        ns->statement_failed = true;
    return schema_errno(rc);
}

int statement_run(struct namespace *ns, enum statement id, const struct bind *binds, size_t count)
{
    sqlite3_stmt *stmt = statement_query(ns, id, binds, count);
    int r = statement_next(ns, stmt);
    sqlite3_reset(stmt);
    return r;
}

int name_check(const char *name, size_t len)
{
    if (len > NAME_MAX_BYTES)
        return -ENAMETOOLONG;
    if (len == 0 || memchr(name, '/', len) != NULL || memchr(name, '\0', len) != NULL)
        return -EINVAL;
    if (name[0] == '.' && (len == 1 || (len == 2 && name[1] == '.')))
        return -EINVAL;
    return 0;
}

/* The first cookie of the names with this name's hash: never one of the reserved, and room for all probes above it. */
static uint64_t cookie_base(const struct namespace *ns, const char *name, size_t len)
{
    uint64_t room = (uint64_t)INT64_MAX - COOKIE_FIRST - COOKIE_PROBES;
    return COOKIE_FIRST + ns->hash(ns->hash_key, name, len) % room;
}

static bool is_of(const struct search *s, uint64_t parent, uint64_t base, const char *name, size_t len)
{
    return s->entry.parent == parent && s->base == base && s->len == len && memcmp(s->name, name, len) == 0;
}

/* What is kept of this cookie is not true any more. */
static void forget_searches(struct namespace *ns, const struct entry_row *changed)
{
    for (size_t i = 0; i < SEARCHES; i++) {
        struct search *s = &ns->searches[i];
        if (s->entry.parent == changed->parent && changed->cookie - s->base < COOKIE_PROBES)
            s->len = 0;
    }
}

/* Reads the entries with the cookies that the name may have: 0, -ENOENT or another error. */
static int search(struct namespace *ns, uint64_t parent, uint64_t base, const char *name, size_t len, struct entry_row *entry)
{
    uint64_t end = base + COOKIE_PROBES, candidate = base;
    sqlite3_stmt *stmt = QUERY(ns, SQL_ENTRY_FIND, INT(parent), INT(base), INT(end - 1));
    int r;
    entry->parent = parent;
    while ((r = statement_next(ns, stmt)) == 1) {
        entry->cookie = (uint64_t)sqlite3_column_int64(stmt, 0);
        /* Rows come in ascending order: the first gap is free. */
        if (entry->cookie == candidate)
            candidate++;
        if ((size_t)sqlite3_column_bytes(stmt, 1) == len && memcmp(sqlite3_column_blob(stmt, 1), name, len) == 0) {
            entry->ino = (uint64_t)sqlite3_column_int64(stmt, 2);
            entry->type = (uint32_t)sqlite3_column_int64(stmt, 3);
            break;
        }
    }
    sqlite3_reset(stmt);
    if (r != 0)
        return r == 1 ? 0 : r;
    entry->cookie = candidate < end ? candidate : 0;
    return -ENOENT;
}

int entry_find(struct namespace *ns, uint64_t parent, const char *name, size_t len, struct entry_row *entry)
{
    uint64_t base = cookie_base(ns, name, len);
    struct search *s = &ns->searches[base % SEARCHES];
    if (!is_of(s, parent, base, name, len)) {
        s->len = 0;
        int r = search(ns, parent, base, name, len, entry);
        if (r != 0 && r != -ENOENT)
            return r;
        s->entry = *entry;
        s->base = base;
        s->found = r == 0;
        s->len = (uint8_t)len;
        memcpy(s->name, name, len);
    }
    *entry = s->entry;
    return s->found ? 0 : -ENOENT;
}

int entry_insert(struct namespace *ns, const struct entry_row *entry, const char *name, size_t len)
{
    forget_searches(ns, entry);
    return RUN(ns, SQL_ENTRY_INSERT, INT(entry->parent), INT(entry->cookie), BLOB(name, len), INT(entry->ino),
               INT(entry->type));
}

int entry_replace(struct namespace *ns, const struct entry_row *entry, uint64_t ino, uint32_t type)
{
    forget_searches(ns, entry);
    return RUN(ns, SQL_ENTRY_REPLACE, INT(ino), INT(type), INT(entry->parent), INT(entry->cookie));
}

int entry_delete(struct namespace *ns, const struct entry_row *entry)
{
    forget_searches(ns, entry);
    return RUN(ns, SQL_ENTRY_DELETE, INT(entry->parent), INT(entry->cookie));
}

bool id_is_zero(const uint8_t id[ID_SIZE])
{
    static const uint8_t zero[ID_SIZE];
    return memcmp(id, zero, ID_SIZE) == 0;
}

int inode_rows_delete(struct namespace *ns, uint64_t ino, uint32_t mode, const uint8_t object_id[ID_SIZE])
{
    int r = RUN(ns, SQL_INODE_DELETE, INT(ino));
    if (r == 0)
        r = RUN(ns, SQL_ORPHAN_DELETE, INT(ino));
    if (r == 0)
        r = RUN(ns, SQL_XATTR_CLEAR, INT(ino));
    if (r == 0 && (S_ISREG(mode) || S_ISLNK(mode)))
        r = RUN(ns, SQL_CONTENT_DELETE, INT(ino));
    if (r == 0 && !id_is_zero(object_id)) {
        r = RUN(ns, SQL_OBJECT_DELETE, INT(ino));
        if (r == 0)
            r = RUN(ns, SQL_DROPPED_PUT, BLOB(object_id, ID_SIZE));
    }
    ns->inode_count_change--;
    return r;
}
