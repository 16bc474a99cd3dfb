/* What the namespace is compared with: the least SQL that the same operations need, on the same tables, in a database that has no
 * file. So it shows how much of an operation is SQLite's, whatever the machine is doing at the time. */
#ifndef ENCFSD_BENCH_BARE_SQLITE_H
#define ENCFSD_BENCH_BARE_SQLITE_H

#include <sys/stat.h>

#include "_inode.h"
#include "_schema.h"
#include "_vfs.h"
#include "measure.h"

enum bare_statement { BARE_BEGIN, BARE_COMMIT, BARE_FIND, BARE_INODE, BARE_ENTRY, BARE_DELETE, BARE_ORPHAN, BARE_STATEMENTS };

struct bare {
    sqlite3 *db;
    sqlite3_stmt *statement[BARE_STATEMENTS];
};

static inline void bare_open(struct bare *b)
{
    static const char *const sql[BARE_STATEMENTS] = {
        "BEGIN",
        "COMMIT",
        "SELECT ino,name FROM dirent WHERE parent=? AND cookie=?",
        "INSERT INTO inode VALUES(?,33188,1,0,0,0,0,0,?2,?2,?2,?2,0)",
        "INSERT INTO dirent VALUES(?,?,?,?,32768)",
        "DELETE FROM dirent WHERE parent=? AND cookie=?",
        "INSERT INTO orphan VALUES(?)",
    };

    must("vfs_register", vfs_register());       /* before SQLite is used, for its settings of the process */
    if (sqlite3_open_v2(":memory:", &b->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
        die("sqlite3_open", -ENOMEM);
    must("schema_format", schema_format(b->db, 0, 0));
    for (int i = 0; i < BARE_STATEMENTS; i++)
        if (sqlite3_prepare_v3(b->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &b->statement[i], NULL) != SQLITE_OK)
            die(sqlite3_errmsg(b->db), -EIO);
}

static inline void bare_close(struct bare *b)
{
    for (int i = 0; i < BARE_STATEMENTS; i++)
        sqlite3_finalize(b->statement[i]);
    sqlite3_close(b->db);
}

static inline void bare_run(struct bare *b, enum bare_statement which, int expected)
{
    if (sqlite3_step(b->statement[which]) != expected)
        die(sqlite3_errmsg(b->db), -EIO);
    sqlite3_reset(b->statement[which]);
}

static inline void bare_int(struct bare *b, enum bare_statement which, int parameter, int64_t value)
{
    sqlite3_bind_int64(b->statement[which], parameter, value);
}

/* Spread over the range of cookies as a hash is. */
static inline int64_t bare_cookie(uint32_t i) { return (int64_t)((i + 1) * 0x9e3779b97f4a7c15ULL >> 2); }

static inline void bare_find(struct bare *b, uint32_t i, bool there)
{
    bare_int(b, BARE_FIND, 1, ROOT_INO);
    bare_int(b, BARE_FIND, 2, bare_cookie(i));
    bare_run(b, BARE_FIND, there ? SQLITE_ROW : SQLITE_DONE);
}

static inline void bare_create(struct bare *b, int64_t ino, uint32_t i, const char *name, size_t len)
{
    bare_find(b, i, false);
    bare_run(b, BARE_BEGIN, SQLITE_DONE);
    bare_int(b, BARE_INODE, 1, ino);
    bare_int(b, BARE_INODE, 2, (int64_t)now_ns());
    bare_run(b, BARE_INODE, SQLITE_DONE);
    bare_int(b, BARE_ENTRY, 1, ROOT_INO);
    bare_int(b, BARE_ENTRY, 2, bare_cookie(i));
    sqlite3_bind_blob(b->statement[BARE_ENTRY], 3, name, (int)len, SQLITE_STATIC);
    bare_int(b, BARE_ENTRY, 4, ino);
    bare_run(b, BARE_ENTRY, SQLITE_DONE);
    bare_run(b, BARE_COMMIT, SQLITE_DONE);
}

static inline void bare_unlink(struct bare *b, int64_t ino, uint32_t i)
{
    bare_find(b, i, true);
    bare_run(b, BARE_BEGIN, SQLITE_DONE);
    bare_int(b, BARE_DELETE, 1, ROOT_INO);
    bare_int(b, BARE_DELETE, 2, bare_cookie(i));
    bare_run(b, BARE_DELETE, SQLITE_DONE);
    bare_int(b, BARE_ORPHAN, 1, ino);
    bare_run(b, BARE_ORPHAN, SQLITE_DONE);
    bare_run(b, BARE_COMMIT, SQLITE_DONE);
}

#endif
