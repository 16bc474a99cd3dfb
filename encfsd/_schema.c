/* Connection settings and tables of the metadata database. */
#include "_schema.h"

#include <errno.h>
#include <openssl/rand.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "_format.h"
#include "_inode.h"

/* auto_vacuum (decision 0006) and page_size count only while the database is empty; they are part of the format. */
static const char format_pragmas[] =
    "PRAGMA page_size=4096;"
    "PRAGMA encoding='UTF-8';"
    "PRAGMA auto_vacuum=INCREMENTAL;";

static const char schema[] =
    "CREATE TABLE volume("
    " key TEXT PRIMARY KEY NOT NULL,"
    " value BLOB NOT NULL"
    ") STRICT, WITHOUT ROWID;"

    "CREATE TABLE inode("
    " ino INTEGER PRIMARY KEY NOT NULL,"
    " mode INTEGER NOT NULL,"
    " nlink INTEGER NOT NULL,"
    " uid INTEGER NOT NULL,"
    " gid INTEGER NOT NULL,"
    " rdev INTEGER NOT NULL,"
    " size INTEGER NOT NULL,"
    " blocks INTEGER NOT NULL,"
    " atime INTEGER NOT NULL,"
    " mtime INTEGER NOT NULL,"
    " ctime INTEGER NOT NULL,"
    " btime INTEGER NOT NULL,"
    " parent INTEGER NOT NULL"
    ") STRICT;"
    /* Deleted while in use. A list of its own, so that a mount finds them without reading every inode; instead of the link
     * count 0 in the inode's row, so that an unlink changes one page less. */
    "CREATE TABLE orphan("
    " ino INTEGER PRIMARY KEY NOT NULL"
    ") STRICT;"

    "CREATE TABLE dirent("
    " parent INTEGER NOT NULL,"
    " cookie INTEGER NOT NULL,"
    " name BLOB NOT NULL,"
    " ino INTEGER NOT NULL,"
    " type INTEGER NOT NULL,"
    " PRIMARY KEY(parent, cookie)"
    ") STRICT, WITHOUT ROWID;"

    "CREATE TABLE xattr("
    " ino INTEGER NOT NULL,"
    " name BLOB NOT NULL,"
    " value BLOB NOT NULL,"
    " PRIMARY KEY(ino, name)"
    ") STRICT, WITHOUT ROWID;"

    "CREATE TABLE content("
    " ino INTEGER PRIMARY KEY NOT NULL,"
    " data BLOB NOT NULL"
    ") STRICT;"

    "CREATE TABLE object("
    " ino INTEGER PRIMARY KEY NOT NULL,"
    " id BLOB NOT NULL,"
    " epoch INTEGER NOT NULL,"
    " counter INTEGER NOT NULL,"
    " salt BLOB NOT NULL,"
    " active_epoch INTEGER NOT NULL"
    ") STRICT;"
    "CREATE INDEX object_active ON object(ino) WHERE active_epoch<>0;"

    "CREATE TABLE dropped("
    " id BLOB PRIMARY KEY NOT NULL"
    ") STRICT, WITHOUT ROWID;";

int schema_errno(int result)
{
    switch (result & 0xff) {
    case SQLITE_OK:
    case SQLITE_ROW:
    case SQLITE_DONE:
        return 0;
    case SQLITE_NOMEM:
        return -ENOMEM;
    case SQLITE_FULL:
        return -ENOSPC;
    case SQLITE_TOOBIG:
        return -E2BIG;
    case SQLITE_READONLY:
        return -EROFS;
    case SQLITE_IOERR:
        return result == SQLITE_IOERR_NOMEM ? -ENOMEM : -EIO;
    default:
        /* A damaged or foreign database, or a fault of ours: nothing that a caller could act on. */
        return -EIO;
    }
}

__attribute__((format(printf, 3, 4))) static void say(char *message, size_t size, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, size, format, args);
    va_end(args);
}

/* Reads one integer or text value as text. */
static int read_pragma(sqlite3 *db, const char *name, char *value, size_t size)
{
    char sql[64];
    sqlite3_stmt *stmt;
    snprintf(sql, sizeof sql, "PRAGMA %s", name);
    int rc = sqlite3_prepare_v2(db, sql, -1, &stmt, NULL);
    if (rc != SQLITE_OK)
        return schema_errno(rc);
    rc = sqlite3_step(stmt);
    const unsigned char *text = rc == SQLITE_ROW ? sqlite3_column_text(stmt, 0) : NULL;
    snprintf(value, size, "%s", text == NULL ? "" : (const char *)text);
    sqlite3_finalize(stmt);
    return schema_errno(rc);
}

static const struct setting {
    const char *name, *value, *read_back;
} settings[] = {
    {"locking_mode", "EXCLUSIVE", "exclusive"},
    {"journal_mode", "TRUNCATE", "truncate"}, /* undoes a transaction in this process (_vfs.c); crashes are object 0's business */
    {"synchronous", "FULL", "2"},           /* one xSync at the end of each transaction: the mark */
    {"temp_store", "MEMORY", "2"},          /* plaintext never reaches a temporary file */
    {"cache_spill", "OFF", "0"},            /* pages of an unfinished transaction never reach object 0 */
    {"secure_delete", "OFF", "0"},          /* pages are encrypted, and old versions live on in free slots anyway */
    {"cell_size_check", "ON", "1"},
};

static int apply_settings(sqlite3 *db, char *message, size_t message_size)
{
    char sql[64], value[32];
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const struct setting *s = &settings[i];
        snprintf(sql, sizeof sql, "PRAGMA %s=%s", s->name, s->value);
        int rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
        int r = rc != SQLITE_OK ? schema_errno(rc) : read_pragma(db, s->name, value, sizeof value);
        if (r < 0) {
            say(message, message_size, "metadata: %s: %s", sql, sqlite3_errmsg(db));
            return r;
        }
        if (strcmp(value, s->read_back) != 0) {
            say(message, message_size, "metadata: SQLite answered %s to %s", value, sql);
            return -EPROTO;
        }
    }
    return 0;
}

int schema_connect(sqlite3 **db, const char *name, bool read_only, size_t cache_bytes, char *message, size_t message_size)
{
    int flags = read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    /* NOMUTEX: the namespace's mutex serialises every use of the connection. */
    int rc = sqlite3_open_v2(name, db, flags | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, "encfsd");
    if (rc != SQLITE_OK) {
        say(message, message_size, "metadata: %s", *db == NULL ? "out of memory" : sqlite3_errmsg(*db));
        schema_close(*db);
        *db = NULL;
        return schema_errno(rc);
    }
    sqlite3_db_config(*db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(*db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    sqlite3_db_config(*db, SQLITE_DBCONFIG_DQS_DML, 0, NULL);
    sqlite3_db_config(*db, SQLITE_DBCONFIG_DQS_DDL, 0, NULL);
    sqlite3_db_config(*db, SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0, NULL);
    /* No ATTACH, and so no VACUUM, which attaches a temporary database. */
    sqlite3_limit(*db, SQLITE_LIMIT_ATTACHED, 0);

    char sql[64];
    snprintf(sql, sizeof sql, "PRAGMA cache_size=-%zu", cache_bytes / 1024);
    rc = sqlite3_exec(*db, sql, NULL, NULL, NULL);
    int r = schema_errno(rc);
    if (r < 0)
        say(message, message_size, "metadata: %s", sqlite3_errmsg(*db));
    else
        r = apply_settings(*db, message, message_size);
    if (r < 0) {
        schema_close(*db);
        *db = NULL;
    }
    return r;
}

int schema_close(sqlite3 *db)
{
    return schema_errno(sqlite3_close(db));
}

static int put_value(sqlite3 *db, const char *key, const void *value, size_t size)
{
    sqlite3_stmt *stmt;
    int rc = sqlite3_prepare_v2(db, "INSERT INTO volume VALUES(?,?)", -1, &stmt, NULL);
    if (rc != SQLITE_OK)
        return rc;
    sqlite3_bind_text(stmt, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_blob(stmt, 2, value, (int)size, SQLITE_STATIC);
    sqlite3_step(stmt);
    return sqlite3_finalize(stmt);
}

static int put_root_directory(sqlite3 *db, uint32_t uid, uint32_t gid)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    int64_t now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    char *sql = sqlite3_mprintf(
        "INSERT INTO inode VALUES(%d,%d,2,%u,%u,0,%d,%d,%lld,%lld,%lld,%lld,%d)", ROOT_INO, S_IFDIR | 0755, uid, gid,
        DIRECTORY_SIZE, DIRECTORY_SIZE / 512, (long long)now, (long long)now, (long long)now, (long long)now, ROOT_INO);
    if (sql == NULL)
        return SQLITE_NOMEM;
    int rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
    sqlite3_free(sql);
    return rc;
}

int schema_format(sqlite3 *db, uint32_t uid, uint32_t gid)
{
    uint8_t hash_key[HASH_KEY_SIZE];
    uint64_t next_ino = ROOT_INO + 1;
    char sql[96];

    if (RAND_bytes(hash_key, sizeof hash_key) != 1)
        return -EIO;
    snprintf(sql, sizeof sql, "BEGIN; PRAGMA application_id=%d; PRAGMA user_version=%d;", SCHEMA_APPLICATION_ID,
             SCHEMA_VERSION);
    int rc = sqlite3_exec(db, format_pragmas, NULL, NULL, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(db, schema, NULL, NULL, NULL);
    if (rc == SQLITE_OK)
        rc = put_value(db, VALUE_HASH_KEY, hash_key, sizeof hash_key);
    if (rc == SQLITE_OK)
        rc = put_value(db, VALUE_NEXT_INO, &next_ino, sizeof next_ino);
    if (rc == SQLITE_OK)
        rc = put_root_directory(db, uid, gid);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
    if (rc != SQLITE_OK && sqlite3_get_autocommit(db) == 0)
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    return schema_errno(rc);
}

int schema_check(sqlite3 *db, char *message, size_t message_size)
{
    static const struct {
        const char *name;
        int value;
    } required[] = {
        {"application_id", SCHEMA_APPLICATION_ID},
        {"user_version", SCHEMA_VERSION},
        {"page_size", NODE_SIZE},
        {"auto_vacuum", 2},
    };
    char value[32];
    for (size_t i = 0; i < sizeof required / sizeof *required; i++) {
        int r = read_pragma(db, required[i].name, value, sizeof value);
        if (r < 0) {
            say(message, message_size, "metadata: %s", sqlite3_errmsg(db));
            return r;
        }
        if (atoi(value) != required[i].value) {
            say(message, message_size, "metadata: %s is %s, this version knows %d", required[i].name, value,
                required[i].value);
            bool newer = i == 1 && atoi(value) > SCHEMA_VERSION;
            return newer ? -EPROTONOSUPPORT : -EUCLEAN;
        }
    }
    return 0;
}
