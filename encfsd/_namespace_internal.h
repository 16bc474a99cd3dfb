/* Shared by the _namespace_*.c files and _xattr.c only. The headings name the file that defines what follows.
 *
 * Everything here is called with the namespace mutex held unless it says otherwise; all functions return 0 or -errno. */
#ifndef ENCFSD_NAMESPACE_INTERNAL_H
#define ENCFSD_NAMESPACE_INTERNAL_H

#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "_namespace.h"
#include "_schema.h"
#include "_siphash.h"
#include "_vfs.h"

enum {
    LINK_MAX = 65000,           /* as ext4 */
    SYMLINK_MAX = 4095,         /* bytes of a link target */
    COOKIE_PROBES = 8,          /* cookies that entries with one hash may take */
    COOKIE_DOT = 1,
    COOKIE_DOTDOT = 2,
    COOKIE_FIRST = 3,
    CLOSING_MAX = 8,
    SEARCHES = 16,              /* results of searches that are kept; power of two */
};

enum statement {
    SQL_BEGIN, SQL_COMMIT, SQL_ROLLBACK,
    SQL_ENTRY_FIND, SQL_ENTRY_INSERT, SQL_ENTRY_DELETE, SQL_ENTRY_REPLACE, SQL_ENTRY_ANY, SQL_ENTRY_LIST, SQL_ENTRY_LOAD,
    SQL_ENTRY_NAME, SQL_ENTRY_OF,
    SQL_INODE_LOAD, SQL_INODE_INSERT, SQL_INODE_DELETE, SQL_INODE_LINKS, SQL_INODE_OWNER,
    SQL_INODE_PARENT, SQL_INODE_DATA, SQL_INODE_TIMES, SQL_INODE_DURABLE, SQL_INODE_COUNT,
    SQL_ORPHAN_PUT, SQL_ORPHAN_DELETE, SQL_ORPHAN_FIRST,
    SQL_CONTENT_GET, SQL_CONTENT_PUT, SQL_CONTENT_DELETE,
    SQL_XATTR_GET, SQL_XATTR_PUT, SQL_XATTR_DELETE, SQL_XATTR_LIST, SQL_XATTR_CLEAR,
    SQL_OBJECT_PUT, SQL_OBJECT_DELETE, SQL_OBJECT_LIST, SQL_OBJECT_LIST_ACTIVE,
    SQL_DROPPED_PUT, SQL_DROPPED_DELETE, SQL_DROPPED_LIST,
    SQL_VALUE_GET, SQL_VALUE_PUT,
    SQL_FREE_PAGES, SQL_SHRINK,
    STATEMENTS,
};

struct entry_row {
    uint64_t parent, cookie, ino;
    uint32_t type;              /* S_IFMT bits of the inode's mode */
};

/* What entry_find found out: the kernel looks a name up before it creates or removes it, and a second search would be a sixth of
 * a create, a fifth of an unlink. True until an entry with one of the cookies changes. */
struct search {
    struct entry_row entry;
    uint64_t base;              /* first of the COOKIE_PROBES cookies that were searched */
    bool found;
    uint8_t len;                /* of the name; 0: nothing is kept here */
    char name[NAME_MAX_BYTES];
};

struct namespace {
    /* set once */
    sqlite3 *db;
    struct vfs_file *file;
    struct inode_table *inodes;
    struct ns_events events;
    bool read_only;
    uint8_t hash_key[HASH_KEY_SIZE];
    uint64_t (*hash)(const uint8_t key[16], const void *data, size_t size);    /* siphash24; tests make names collide */
    sqlite3_stmt *statements[STATEMENTS];

    struct inode *root;         /* a reference, so that it stays in core */

    /* Guards everything below, the connection and its statements; taken before any inode's lock. */
    pthread_mutex_t mutex;
    uint64_t next_ino;
    uint64_t reserved_ino;      /* numbers below it are marked as used in the database */
    int64_t inode_count;        /* rows of `inode`; -1: not counted yet */
    int64_t inode_count_change; /* by the running transaction */
    bool statement_failed;      /* in the running transaction */
    bool rows_together;         /* between ns_rows_begin and ns_rows_end: a transaction that has begun goes on until the latter */
    bool listed_known;          /* the last inode that a listing came to was in core: so will be the next */
    struct search searches[SEARCHES];       /* by base */
    struct object *closing[CLOSING_MAX];    /* of dropped inodes: closed after the mutex is released */
    unsigned closing_count;

    /* written under the mutex, read by anybody */
    atomic_int failed;
    atomic_bool torn;
};

/* ---- _namespace_rows.c: statements ---- */

int statements_prepare(struct namespace *ns);
void statements_finalize(struct namespace *ns);

/* One parameter of a statement; data NULL: an integer, else a blob (or `value` < 0: text) that outlives the statement's run. */
struct bind {
    const void *data;
    int64_t value;
};
#define INT(x) {NULL, (int64_t)(x)}
#define BLOB(data, size) {(data), (int64_t)(size)}
#define TEXT(string) {(string), -1}

/* Binds and runs a statement that returns no row. */
#define BINDS(...) (const struct bind[]){__VA_ARGS__}, sizeof((const struct bind[]){__VA_ARGS__}) / sizeof(struct bind)
#define RUN(ns, id, ...) statement_run((ns), (id), BINDS(__VA_ARGS__))
int statement_run(struct namespace *ns, enum statement id, const struct bind *binds, size_t count);

/* Binds a query; then statement_next gives 1 for a row, 0 at the end, or -errno; end it with sqlite3_reset. */
#define QUERY(ns, id, ...) statement_query((ns), (id), BINDS(__VA_ARGS__))
sqlite3_stmt *statement_query(struct namespace *ns, enum statement id, const struct bind *binds, size_t count);
int statement_next(struct namespace *ns, sqlite3_stmt *stmt);

/* ---- _namespace_rows.c: rows ---- */

/* Finds a name; not in a transaction that has changed entries. -ENOENT: there is none; then entry->cookie is the one that it
 * would get, or 0 if COOKIE_PROBES other names have taken all of them. */
int entry_find(struct namespace *ns, uint64_t parent, const char *name, size_t len, struct entry_row *entry);
/* In a transaction; no other code changes entries. */
int entry_insert(struct namespace *ns, const struct entry_row *entry, const char *name, size_t len);
int entry_replace(struct namespace *ns, const struct entry_row *entry, uint64_t ino, uint32_t type);
int entry_delete(struct namespace *ns, const struct entry_row *entry);

/* 0, -EINVAL or -ENAMETOOLONG. No lock. */
int name_check(const char *name, size_t len);

/* Deletes everything of an inode but its directory entries; object_id all zero: it has none. In a transaction. */
int inode_rows_delete(struct namespace *ns, uint64_t ino, uint32_t mode, const uint8_t object_id[ID_SIZE]);

bool id_is_zero(const uint8_t id[ID_SIZE]);

/* ---- _namespace.c ---- */

/* The mutex is not held. Takes and releases it; enter fails with -EAGAIN (NS_NOWAIT) and, if the database is torn, -EIO. */
int ns_enter(struct namespace *ns, int flags);
void ns_leave(struct namespace *ns);

/* One transaction: begin; changes; end with the result of the changes. end commits if that is 0, else rolls back, and
 * returns what became of it. After a failure that a statement caused the namespace is read-only. */
int transaction_begin(struct namespace *ns);
int transaction_end(struct namespace *ns, int result);

/* The inode from the table or its row, with a reference: give it back with core_put. -ENOENT. */
int core_get(struct namespace *ns, uint64_t ino, struct inode **inode);
/* The same for an inode that is not in core. `row` stands on a row that has the columns of SQL_INODE_LOAD from number `first`
 * on; all NULL: -ENOENT. */
int core_insert(struct namespace *ns, uint64_t ino, sqlite3_stmt *row, int first, struct inode **inode);
void core_put(struct namespace *ns, struct inode *inode);

/* A copy of the live attributes, taken under the inode's lock. */
struct attr core_attr(struct inode *inode);

/* After a commit: what it changed of an inode in core. The link count changes by `links`, and at 0 the inode is deleted for
 * good; ctime becomes `now`, and mtime too for CORE_ENTRIES. The row has the new ctime with CORE_ROW; else the times are
 * dirty and a group writes them: a row more in each transaction for times alone costs a create a fifth (decision 0005). */
enum core_change { CORE_ROW = 1, CORE_ENTRIES = 2 };
void core_changed(struct namespace *ns, struct inode *inode, int64_t links, int what, int64_t now);

int64_t time_now(void);     /* ns since 1970 */

/* ---- _namespace_entries.c ---- */

/* A directory that entries can be made in or taken from, with a reference, and its attributes. -ENOTDIR, or -ENOENT if it
 * is deleted. */
int directory_get(struct namespace *ns, uint64_t ino, struct inode **dir, struct attr *attr);
int directory_is_empty(struct namespace *ns, uint64_t ino);     /* 0 or -ENOTEMPTY */
/* An inode has `left` links now; without any it becomes an orphan. In a transaction. */
int inode_links(struct namespace *ns, uint64_t ino, uint64_t left, int64_t now);
/* The row of a directory that gained or lost `links` links by subdirectories. In a transaction. */
int directory_links(struct namespace *ns, const struct attr *dir, int64_t links, int64_t now);

/* ---- _xattr.c ---- */

/* Whether the inode is known to have no extended attributes at all. Without the mutex it may get one at any moment. */
bool xattrs_known_none(struct inode *inode);
/* Keeps the access ACL of an inode, if it has one, in step with new mode bits. In a transaction. */
int acl_follow_mode(struct namespace *ns, uint64_t ino, uint32_t mode);
/* 1 if a file has security.capability, 0 or -errno. Then without it; in a transaction. */
int capability_find(struct namespace *ns, struct inode *inode);
int capability_delete(struct namespace *ns, uint64_t ino);

/* What a new inode inherits. */
struct inheritance {
    uint32_t mode;              /* permission bits reduced by the default ACL, or by the umask */
    uint8_t *access_acl;        /* NULL: none. Both are freed by inheritance_free. */
    uint8_t *default_acl;       /* NULL: the directory has none; same size */
    size_t size;                /* bytes */
};
int inheritance_find(struct namespace *ns, struct inode *parent, uint32_t mode, uint32_t umask, struct inheritance *inherited);
int inheritance_store(struct namespace *ns, uint64_t ino, const struct inheritance *inherited); /* in a transaction */
void inheritance_free(struct inheritance *inherited);

#endif
