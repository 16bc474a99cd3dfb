/* Directory entries: look up, create, link, remove. */
#include <errno.h>
#include <string.h>

#include "_namespace_internal.h"

enum { INO_BATCH = 1024 };  /* inode numbers that one transaction marks as used */

static int lookup(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint64_t *ino)
{
    struct entry_row entry;
    struct inode *dir;
    int r;
    /* Names that only the export of a mount over NFS asks for. */
    if (len == 1 && name[0] == '.') {
        *ino = parent;
        return 0;
    }
    if (len == 2 && name[0] == '.' && name[1] == '.') {
        r = core_get(ns, parent, &dir);
        if (r < 0)
            return r;
        pthread_mutex_lock(&dir->lock);
        *ino = dir->parent;
        pthread_mutex_unlock(&dir->lock);
        core_put(ns, dir);
        return *ino != 0 ? 0 : -ENOTDIR;
    }
    r = name_check(name, len);
    if (r == 0)
        r = entry_find(ns, parent, name, len, &entry);
    if (r == 0)
        *ino = entry.ino;
    return r;
}

int ns_lookup(struct namespace *ns, uint64_t parent, const char *name, size_t len, struct attr *out, int flags)
{
    struct inode *inode;
    uint64_t ino;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = lookup(ns, parent, name, len, &ino);
    if (r == 0)
        r = core_get(ns, ino, &inode);
    if (r == 0) {
        *out = core_attr(inode);
        inode_looked_up(ns->inodes, inode, 1);
        core_put(ns, inode);
    }
    ns_leave(ns);
    return r;
}

int directory_get(struct namespace *ns, uint64_t ino, struct inode **dir, struct attr *attr)
{
    int r = core_get(ns, ino, dir);
    if (r < 0)
        return r;
    *attr = core_attr(*dir);
    if (!S_ISDIR(attr->mode))
        r = -ENOTDIR;
    else if (attr->nlink == 0)
        r = -ENOENT;
    if (r < 0)
        core_put(ns, *dir);
    return r;
}

/* 0 and a cookie for a name that does not exist yet. */
static int find_free_name(struct namespace *ns, uint64_t parent, const char *name, size_t len, struct entry_row *entry)
{
    int r = entry_find(ns, parent, name, len, entry);
    if (r == 0)
        return -EEXIST;
    if (r == -ENOENT)
        return entry->cookie != 0 ? 0 : -ENOSPC;
    return r;
}

int inode_links(struct namespace *ns, uint64_t ino, uint64_t left, int64_t now)
{
    return left > 0 ? RUN(ns, SQL_INODE_LINKS, INT(left), INT(now), INT(ino)) : RUN(ns, SQL_ORPHAN_PUT, INT(ino));
}

int directory_links(struct namespace *ns, const struct attr *dir, int64_t links, int64_t now)
{
    return links == 0 ? 0 : inode_links(ns, dir->ino, (uint64_t)(dir->nlink + links), now);
}

/* ---- create ---- */

struct creation {
    const char *name;           /* NULL: none (ns_tmpfile) */
    size_t len;
    uint32_t mode, rdev;
    const char *target;         /* of a symbolic link */
    size_t target_len;
    bool linkable;              /* without a name, but may get one */
    const struct ns_caller *caller;
};

/* The transaction. `reserve`: mark another batch of inode numbers as used. */
static int write_creation(struct namespace *ns, const struct creation *c, const struct attr *dir, const struct attr *a,
                          struct entry_row *entry, const struct inheritance *inherited, uint64_t reserve)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    ns->inode_count_change++;
    if (reserve != 0)
        r = RUN(ns, SQL_VALUE_PUT, TEXT(VALUE_NEXT_INO), BLOB(&reserve, sizeof reserve));
    if (r == 0)
        r = RUN(ns, SQL_INODE_INSERT, INT(a->ino), INT(a->mode), INT(c->name == NULL ? 1 : a->nlink), INT(a->uid), INT(a->gid),
                INT(a->rdev), INT(a->size), INT(a->blocks), INT(a->atime), INT(a->mtime), INT(a->ctime), INT(a->btime),
                INT(S_ISDIR(a->mode) ? dir->ino : 0));
    if (r == 0 && S_ISLNK(a->mode))
        r = RUN(ns, SQL_CONTENT_PUT, INT(a->ino), BLOB(c->target, c->target_len));
    if (r == 0)
        r = inheritance_store(ns, a->ino, inherited);
    if (r == 0)
        r = c->name == NULL ? inode_links(ns, a->ino, 0, a->ctime) : entry_insert(ns, entry, c->name, c->len);
    if (r == 0)
        r = directory_links(ns, dir, S_ISDIR(a->mode) ? 1 : 0, a->ctime);
    return transaction_end(ns, r);
}

/* Puts the new inode into core before its rows exist, so that no memory is needed once they do. */
static int create_in(struct namespace *ns, struct inode *dir, const struct attr *dir_attr, const struct creation *c,
                     struct entry_row *entry, const struct inheritance *inherited, struct attr *out)
{
    int64_t now = time_now();
    bool is_dir = S_ISDIR(c->mode), created;
    struct attr attr = {
        .ino = ns->next_ino,
        .mode = (c->mode & S_IFMT) | inherited->mode,
        .nlink = c->name == NULL ? 0 : is_dir ? 2 : 1,
        .uid = c->caller->uid,
        .gid = c->caller->gid,
        .rdev = c->rdev,
        .size = is_dir ? DIRECTORY_SIZE : c->target_len,
        .blocks = is_dir ? DIRECTORY_SIZE / 512 : 0,
        .atime = now,
        .mtime = now,
        .ctime = now,
        .btime = now,
    };
    if ((dir_attr->mode & S_ISGID) != 0) {
        attr.gid = dir_attr->gid;
        if (is_dir)
            attr.mode |= S_ISGID;
    }
    uint64_t reserve = ns->next_ino == ns->reserved_ino ? ns->reserved_ino + INO_BATCH : 0;
    entry->ino = attr.ino;
    entry->type = attr.mode & S_IFMT;

    struct inode *inode = inode_get(ns->inodes, attr.ino, &created);
    if (inode == NULL)
        return -ENOMEM;
    inode->attr = attr;
    inode->parent = is_dir ? dir_attr->ino : 0;
    inode->no_default_acl = inherited->default_acl == NULL;
    inode->no_xattrs = inherited->access_acl == NULL && inherited->default_acl == NULL;
    inode->linkable = c->linkable;
    pthread_mutex_unlock(&inode->lock);

    int r = write_creation(ns, c, dir_attr, &attr, entry, inherited, reserve);
    if (r == 0) {
        ns->next_ino++;
        if (reserve != 0)
            ns->reserved_ino = reserve;
        inode_looked_up(ns->inodes, inode, 1);
        core_changed(ns, inode, 0, CORE_ROW, now);
        if (c->name != NULL)
            core_changed(ns, dir, is_dir ? 1 : 0, CORE_ENTRIES, now);
        *out = attr;
    } else {
        /* Deleted without rows: what is left of it goes with its last reference. */
        core_changed(ns, inode, -(int64_t)attr.nlink, CORE_ROW, now);
    }
    core_put(ns, inode);
    return r;
}

static int create(struct namespace *ns, uint64_t parent, const struct creation *c, struct attr *out, int flags)
{
    struct inode *dir;
    struct attr dir_attr;
    struct entry_row entry;
    struct inheritance inherited;

    int r = c->name == NULL ? 0 : name_check(c->name, c->len);
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = directory_get(ns, parent, &dir, &dir_attr);
    if (r == 0) {
        r = c->name == NULL ? 0 : find_free_name(ns, parent, c->name, c->len, &entry);
        if (r == 0 && S_ISDIR(c->mode) && dir_attr.nlink >= LINK_MAX)
            r = -EMLINK;
        if (r == 0)
            r = inheritance_find(ns, dir, c->mode, c->caller->umask, &inherited);
        if (r == 0) {
            r = create_in(ns, dir, &dir_attr, c, &entry, &inherited, out);
            inheritance_free(&inherited);
        }
        core_put(ns, dir);
    }
    ns_leave(ns);
    return r;
}

int ns_mknod(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint32_t mode, uint32_t rdev,
             const struct ns_caller *caller, struct attr *out, int flags)
{
    if (!S_ISREG(mode) && !S_ISFIFO(mode) && !S_ISSOCK(mode) && !S_ISBLK(mode) && !S_ISCHR(mode))
        return -EINVAL;
    struct creation c = {.name = name, .len = len, .mode = mode, .rdev = rdev, .caller = caller};
    return create(ns, parent, &c, out, flags);
}

int ns_tmpfile(struct namespace *ns, uint64_t parent, uint32_t mode, bool linkable, const struct ns_caller *caller,
               struct attr *out, int flags)
{
    struct creation c = {.mode = S_IFREG | (mode & 07777), .linkable = linkable, .caller = caller};
    return create(ns, parent, &c, out, flags);
}

int ns_mkdir(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint32_t mode,
             const struct ns_caller *caller, struct attr *out, int flags)
{
    struct creation c = {.name = name, .len = len, .mode = S_IFDIR | (mode & 07777), .caller = caller};
    return create(ns, parent, &c, out, flags);
}

int ns_symlink(struct namespace *ns, uint64_t parent, const char *name, size_t len, const char *target, size_t target_len,
               const struct ns_caller *caller, struct attr *out, int flags)
{
    if (target_len == 0)
        return -ENOENT;
    if (target_len > SYMLINK_MAX)
        return -ENAMETOOLONG;
    if (memchr(target, '\0', target_len) != NULL)
        return -EINVAL;
    struct creation c = {
        .name = name, .len = len, .mode = S_IFLNK | 0777, .target = target, .target_len = target_len, .caller = caller,
    };
    return create(ns, parent, &c, out, flags);
}

static int read_target(struct namespace *ns, uint64_t ino, char *buffer, size_t size, size_t *len)
{
    sqlite3_stmt *stmt = QUERY(ns, SQL_CONTENT_GET, INT(ino));
    int r = statement_next(ns, stmt);
    if (r == 1) {
        *len = (size_t)sqlite3_column_bytes(stmt, 0);
        r = *len == 0 || *len > size ? -EIO : 0;
        if (r == 0)
            memcpy(buffer, sqlite3_column_blob(stmt, 0), *len);
    } else if (r == 0) {
        r = -EIO;
    }
    sqlite3_reset(stmt);
    return r;
}

int ns_readlink(struct namespace *ns, uint64_t ino, char *buffer, size_t size, size_t *len, int flags)
{
    struct inode *inode;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, &inode);
    if (r == 0) {
        r = S_ISLNK(core_attr(inode).mode) ? read_target(ns, ino, buffer, size, len) : -EINVAL;
        core_put(ns, inode);
    }
    ns_leave(ns);
    return r;
}

/* ---- link ---- */

static int write_link(struct namespace *ns, const struct attr *attr, const struct entry_row *entry, const char *name,
                      size_t len, int64_t now)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = entry_insert(ns, entry, name, len);
    if (r == 0 && attr->nlink == 0)
        r = RUN(ns, SQL_ORPHAN_DELETE, INT(attr->ino));
    if (r == 0)
        r = inode_links(ns, attr->ino, attr->nlink + 1, now);
    return transaction_end(ns, r);
}

static bool is_linkable(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    bool linkable = inode->linkable;
    pthread_mutex_unlock(&inode->lock);
    return linkable;
}

/* From now on it is a file like any other. Groups let go of what is dirty of a file without a name: it counts again. */
static void first_name(struct namespace *ns, struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    inode->linkable = false;
    pthread_mutex_unlock(&inode->lock);
    if (ns->events.dirtied != NULL)
        ns->events.dirtied(ns->events.arg, inode);
}

static int link_in(struct namespace *ns, struct inode *dir, const struct attr *dir_attr, struct inode *inode,
                   const char *name, size_t len, struct attr *out)
{
    struct attr attr = core_attr(inode);
    struct entry_row entry;
    if (S_ISDIR(attr.mode))
        return -EPERM;
    if (attr.nlink == 0 && !is_linkable(inode))
        return -ENOENT;
    if (attr.nlink >= LINK_MAX)
        return -EMLINK;
    int r = find_free_name(ns, dir_attr->ino, name, len, &entry);
    if (r < 0)
        return r;
    entry.ino = attr.ino;
    entry.type = attr.mode & S_IFMT;
    int64_t now = time_now();
    r = write_link(ns, &attr, &entry, name, len, now);
    if (r < 0)
        return r;
    core_changed(ns, inode, 1, CORE_ROW, now);
    core_changed(ns, dir, 0, CORE_ENTRIES, now);
    inode_looked_up(ns->inodes, inode, 1);
    *out = core_attr(inode);
    if (attr.nlink == 0)
        first_name(ns, inode);
    if (S_ISREG(attr.mode) && ns->events.published != NULL)
        ns->events.published(ns->events.arg, inode);
    return 0;
}

int ns_link(struct namespace *ns, uint64_t ino, uint64_t parent, const char *name, size_t len, struct attr *out, int flags)
{
    struct inode *dir, *inode;
    struct attr dir_attr;
    int r = name_check(name, len);
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = directory_get(ns, parent, &dir, &dir_attr);
    if (r == 0) {
        r = core_get(ns, ino, &inode);
        if (r == 0) {
            r = link_in(ns, dir, &dir_attr, inode, name, len, out);
            core_put(ns, inode);
        }
        core_put(ns, dir);
    }
    ns_leave(ns);
    return r;
}

/* ---- remove ---- */

int directory_is_empty(struct namespace *ns, uint64_t ino)
{
    sqlite3_stmt *stmt = QUERY(ns, SQL_ENTRY_ANY, INT(ino));
    int r = statement_next(ns, stmt);
    sqlite3_reset(stmt);
    return r == 1 ? -ENOTEMPTY : r;
}

static int write_removal(struct namespace *ns, const struct attr *dir, const struct entry_row *entry, uint32_t nlink,
                         int64_t now)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = entry_delete(ns, entry);
    if (r == 0)
        r = inode_links(ns, entry->ino, nlink, now);
    if (r == 0)
        r = directory_links(ns, dir, entry->type == S_IFDIR ? -1 : 0, now);
    return transaction_end(ns, r);
}

static int remove_from(struct namespace *ns, struct inode *dir, const struct attr *dir_attr, const struct entry_row *entry)
{
    struct inode *inode;
    int r = core_get(ns, entry->ino, &inode);
    if (r < 0)
        return r == -ENOENT ? -EIO : r;
    bool is_dir = entry->type == S_IFDIR;
    int64_t now = time_now();
    uint32_t nlink = core_attr(inode).nlink;
    uint32_t left = is_dir ? 0 : nlink - 1;
    r = write_removal(ns, dir_attr, entry, left, now);
    if (r == 0) {
        core_changed(ns, inode, (int64_t)left - nlink, CORE_ROW, now);
        core_changed(ns, dir, is_dir ? -1 : 0, CORE_ENTRIES, now);
    }
    core_put(ns, inode);
    return r;
}

static int remove_entry(struct namespace *ns, uint64_t parent, const char *name, size_t len, bool is_dir, int flags)
{
    struct inode *dir;
    struct attr dir_attr;
    struct entry_row entry;
    int r = name_check(name, len);
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = directory_get(ns, parent, &dir, &dir_attr);
    if (r == 0) {
        r = entry_find(ns, parent, name, len, &entry);
        if (r == 0 && (entry.type == S_IFDIR) != is_dir)
            r = is_dir ? -ENOTDIR : -EISDIR;
        if (r == 0 && is_dir)
            r = directory_is_empty(ns, entry.ino);
        if (r == 0)
            r = remove_from(ns, dir, &dir_attr, &entry);
        core_put(ns, dir);
    }
    ns_leave(ns);
    return r;
}

int ns_unlink(struct namespace *ns, uint64_t parent, const char *name, size_t len, int flags)
{
    return remove_entry(ns, parent, name, len, false, flags);
}

int ns_rmdir(struct namespace *ns, uint64_t parent, const char *name, size_t len, int flags)
{
    return remove_entry(ns, parent, name, len, true, flags);
}
