/* Listing directories, and the way back from an inode to a path. */
#include <errno.h>
#include <string.h>

#include "_namespace_internal.h"

static int add_dot(struct namespace *ns, uint64_t ino, const char *name, uint64_t cookie, struct ns_dirent *entry)
{
    struct inode *inode;
    int r = core_get(ns, ino, &inode);
    if (r < 0)
        return r;
    entry->cookie = cookie;
    entry->attr = core_attr(inode);
    entry->name_len = (uint16_t)strlen(name);
    strcpy(entry->name, name);
    core_put(ns, inode);
    return 0;
}

static int add_entry(struct namespace *ns, sqlite3_stmt *stmt, struct ns_dirent *entry)
{
    struct inode *inode;
    int len = sqlite3_column_bytes(stmt, 1);
    if (len <= 0 || len > NAME_MAX_BYTES)
        return -EIO;
    int r = core_get(ns, (uint64_t)sqlite3_column_int64(stmt, 2), &inode);
    if (r < 0)
        return r == -ENOENT ? -EIO : r;
    entry->cookie = (uint64_t)sqlite3_column_int64(stmt, 0);
    entry->attr = core_attr(inode);
    entry->name_len = (uint16_t)len;
    memcpy(entry->name, sqlite3_column_blob(stmt, 1), (size_t)len);
    entry->name[len] = '\0';
    inode_looked_up(ns->inodes, inode, 1);
    core_put(ns, inode);
    return 0;
}

/* Cookies are keyed hashes of names and unique in their directory: where a listing goes on does not depend on what came or
 * went in between. */
static int list(struct namespace *ns, const struct attr *dir, uint64_t parent, uint64_t cookie, struct ns_dirent *entries,
                size_t max, size_t *count)
{
    int r = 0;
    if (dir->nlink == 0 || cookie > INT64_MAX)
        return 0;
    if (cookie < COOKIE_DOT && *count < max) {
        r = add_dot(ns, dir->ino, ".", COOKIE_DOT, &entries[*count]);
        *count += r == 0;
    }
    if (r == 0 && cookie < COOKIE_DOTDOT && *count < max) {
        r = add_dot(ns, parent, "..", COOKIE_DOTDOT, &entries[*count]);
        *count += r == 0;
    }
    if (r < 0 || *count == max)
        return r;
    sqlite3_stmt *stmt = QUERY(ns, SQL_ENTRY_LIST, INT(dir->ino), INT(cookie));
    while (*count < max && (r = statement_next(ns, stmt)) == 1) {
        r = add_entry(ns, stmt, &entries[*count]);
        if (r < 0)
            break;
        ++*count;
    }
    sqlite3_reset(stmt);
    return r;
}

int ns_readdir(struct namespace *ns, uint64_t ino, uint64_t cookie, struct ns_dirent *entries, size_t max, size_t *count,
               int flags)
{
    struct inode *dir;
    *count = 0;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, &dir);
    if (r == 0) {
        struct attr attr = core_attr(dir);
        pthread_mutex_lock(&dir->lock);
        uint64_t parent = dir->parent;
        pthread_mutex_unlock(&dir->lock);
        r = S_ISDIR(attr.mode) ? list(ns, &attr, parent, cookie, entries, max, count) : -ENOTDIR;
        core_put(ns, dir);
    }
    ns_leave(ns);
    /* An error behind some entries shows when the caller comes for the rest. */
    return *count > 0 ? 0 : r;
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
