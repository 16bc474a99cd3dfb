/* Listing directories, and the way back from an inode to a path. */
#include <errno.h>
#include <string.h>

#include "_namespace_internal.h"

/* A listing in progress. */
struct listing {
    ns_emit_fn *emit;
    void *arg;
    bool plain;                 /* NS_PLAIN */
    bool joined;                /* rows have the inodes, too: in vain for those in core */
    size_t count;               /* entries taken */
    struct ns_dirent entry;     /* the one that is offered */
};

/* Offers the entry: 1 if it was taken, else 0. */
static int offer(struct listing *l)
{
    if (!l->emit(l->arg, &l->entry))
        return 0;
    l->count++;
    return 1;
}

static void set_plain(struct ns_dirent *entry, uint64_t ino, uint32_t type)
{
    entry->attr = (struct attr){.ino = ino, .mode = type};
}

/* These functions return 1 to go on, 0 if the receiver has no room, or -errno. */

static int offer_dot(struct namespace *ns, struct listing *l, uint64_t ino, const char *name, uint64_t cookie)
{
    l->entry.cookie = cookie;
    l->entry.name_len = (uint16_t)strlen(name);
    strcpy(l->entry.name, name);
    if (l->plain) {
        set_plain(&l->entry, ino, S_IFDIR);
    } else {
        struct inode *inode;
        int r = core_get(ns, ino, &inode);
        if (r < 0)
            return r;
        l->entry.attr = core_attr(inode);
        core_put(ns, inode);
    }
    return offer(l);
}

/* The inode that an entry names, from the row itself if that has it: a query for each is a third of a first listing. */
static int get_inode(struct namespace *ns, const struct listing *l, sqlite3_stmt *stmt, uint64_t ino, struct inode **inode)
{
    *inode = inode_find(ns->inodes, ino);
    ns->listed_known = *inode != NULL;
    if (*inode != NULL)
        return 0;
    return l->joined ? core_insert(ns, ino, stmt, 4, inode) : core_get(ns, ino, inode);
}

static int offer_entry(struct namespace *ns, struct listing *l, sqlite3_stmt *stmt)
{
    struct inode *inode;
    uint64_t ino = (uint64_t)sqlite3_column_int64(stmt, 2);
    int len = sqlite3_column_bytes(stmt, 1);
    if (len <= 0 || len > NAME_MAX_BYTES)
        return -EIO;
    l->entry.cookie = (uint64_t)sqlite3_column_int64(stmt, 0);
    l->entry.name_len = (uint16_t)len;
    memcpy(l->entry.name, sqlite3_column_blob(stmt, 1), (size_t)len);
    l->entry.name[len] = '\0';
    if (l->plain) {
        set_plain(&l->entry, ino, (uint32_t)sqlite3_column_int64(stmt, 3));
        return offer(l);
    }
    int r = get_inode(ns, l, stmt, ino, &inode);
    if (r < 0)
        return r == -ENOENT ? -EIO : r;
    l->entry.attr = core_attr(inode);
    r = offer(l);
    if (r == 1)
        inode_looked_up(ns->inodes, inode, 1);
    core_put(ns, inode);
    return r;
}

/* Cookies are keyed hashes of names and unique in their directory: where a listing goes on does not depend on what came or
 * went in between. */
static int list(struct namespace *ns, struct listing *l, const struct attr *dir, uint64_t parent, uint64_t cookie)
{
    int r = 1;
    if (dir->nlink == 0 || cookie > INT64_MAX)
        return 0;
    if (cookie < COOKIE_DOT)
        r = offer_dot(ns, l, dir->ino, ".", COOKIE_DOT);
    if (r == 1 && cookie < COOKIE_DOTDOT)
        r = offer_dot(ns, l, parent, "..", COOKIE_DOTDOT);
    if (r != 1)
        return r;
    l->joined = !l->plain && !ns->listed_known;
    sqlite3_stmt *stmt = QUERY(ns, l->joined ? SQL_ENTRY_LOAD : SQL_ENTRY_LIST, INT(dir->ino), INT(cookie));
    while (r == 1 && (r = statement_next(ns, stmt)) == 1)
        r = offer_entry(ns, l, stmt);
    sqlite3_reset(stmt);
    return r;
}

int ns_readdir(struct namespace *ns, uint64_t ino, uint64_t cookie, ns_emit_fn *emit, void *arg, size_t *count, int flags)
{
    struct listing l;
    struct inode *dir;
    l.emit = emit;
    l.arg = arg;
    l.plain = (flags & NS_PLAIN) != 0;
    l.count = *count = 0;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, &dir);
    if (r == 0) {
        struct attr attr = core_attr(dir);
        pthread_mutex_lock(&dir->lock);
        uint64_t parent = dir->parent;
        pthread_mutex_unlock(&dir->lock);
        r = S_ISDIR(attr.mode) ? list(ns, &l, &attr, parent, cookie) : -ENOTDIR;
        core_put(ns, dir);
    }
    ns_leave(ns);
    *count = l.count;
    /* An error behind some entries shows when the caller comes for the rest. */
    return l.count > 0 ? 0 : r;
}

/* Puts "/name" of one link to `ino` in front of *start and replaces ino by the directory it lies in. */
static int prepend_name(struct namespace *ns, uint64_t *ino, char *buffer, size_t *start)
{
    struct inode *inode;
    int r = core_get(ns, *ino, &inode);
    if (r < 0)
        return r;
    pthread_mutex_lock(&inode->lock);
    uint64_t parent = inode->parent;
    pthread_mutex_unlock(&inode->lock);
    core_put(ns, inode);

    /* Only directories know their parent; for anything else this reads all entries: a report can wait for that. */
    bool known = parent != 0;
    sqlite3_stmt *stmt = known ? QUERY(ns, SQL_ENTRY_NAME, INT(parent), INT(*ino)) : QUERY(ns, SQL_ENTRY_OF, INT(*ino));
    r = statement_next(ns, stmt);
    if (r == 1) {
        int column = known ? 0 : 1;
        size_t len = (size_t)sqlite3_column_bytes(stmt, column);
        if (len + 1 > *start) {
            r = -ERANGE;
        } else {
            *start -= len + 1;
            buffer[*start] = '/';
            memcpy(buffer + *start + 1, sqlite3_column_blob(stmt, column), len);
            *ino = known ? parent : (uint64_t)sqlite3_column_int64(stmt, 0);
            r = 0;
        }
    } else if (r == 0) {
        r = -ENOENT;
    }
    sqlite3_reset(stmt);
    return r;
}

int ns_path(struct namespace *ns, uint64_t ino, char *buffer, size_t size)
{
    if (size < 2)
        return -ERANGE;
    int r = ns_enter(ns, 0);
    if (r < 0)
        return r;
    size_t start = size - 1;
    buffer[start] = '\0';
    while (r == 0 && ino != ROOT_INO)
        r = prepend_name(ns, &ino, buffer, &start);
    ns_leave(ns);
    if (r == 0 && start == size - 1)
        buffer[--start] = '/';
    memmove(buffer, buffer + start, size - start);
    return r;
}
