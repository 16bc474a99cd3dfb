/* Rename in its three forms: to a free name, over an entry, exchange of two entries. */
#include <errno.h>
#include <stdio.h>

#include "_namespace_internal.h"

/* One of the two names that a rename is about. */
struct side {
    const char *name;
    size_t len;
    struct inode *dir;
    struct attr dir_attr;
    struct entry_row entry;     /* without an inode: the cookie that the name would get */
    struct inode *inode;        /* what the name stands for before the rename; NULL: nothing */
    struct attr attr;
};

static bool is_dir(const struct side *side)
{
    return side->inode != NULL && S_ISDIR(side->attr.mode);
}

/* Finds what the name stands for; no error if that is nothing. */
static int resolve(struct namespace *ns, struct side *side)
{
    int r = entry_find(ns, side->dir_attr.ino, side->name, side->len, &side->entry);
    if (r == -ENOENT)
        return 0;
    if (r == 0)
        r = core_get(ns, side->entry.ino, &side->inode);
    if (r == 0)
        side->attr = core_attr(side->inode);
    return r == -ENOENT ? -EIO : r;
}

/* 1 if `ino` is `dir` or above it. */
static int is_above(struct namespace *ns, uint64_t ino, uint64_t dir)
{
    while (dir != ino) {
        struct inode *inode;
        if (dir == ROOT_INO)
            return 0;
        int r = core_get(ns, dir, &inode);
        if (r < 0)
            return r;
        pthread_mutex_lock(&inode->lock);
        dir = inode->parent;
        pthread_mutex_unlock(&inode->lock);
        core_put(ns, inode);
    }
    return 1;
}

/* A directory must not move below itself. */
static int check_loop(struct namespace *ns, const struct side *from, const struct side *to)
{
    if (!is_dir(from) || from->dir == to->dir)
        return 0;
    int r = is_above(ns, from->attr.ino, to->dir_attr.ino);
    return r == 1 ? -EINVAL : r;
}

static int check_replacement(struct namespace *ns, const struct side *from, const struct side *to)
{
    if (to->inode == NULL)
        return to->entry.cookie != 0 ? 0 : -ENOSPC;
    if (!is_dir(from))
        return is_dir(to) ? -EISDIR : 0;
    return is_dir(to) ? directory_is_empty(ns, to->attr.ino) : -ENOTDIR;
}

/* Links that the directories gain by subdirectories coming and going. */
struct links {
    int64_t from, to;
};

static struct links count_links(const struct side *from, const struct side *to, bool exchange)
{
    struct links links = {0, 0};
    if (is_dir(from)) {
        links.from--;
        links.to++;
    }
    if (is_dir(to)) {
        links.to--;
        links.from += exchange ? 1 : 0;
    }
    if (from->dir == to->dir) {
        links.from += links.to;
        links.to = 0;
    }
    return links;
}

/* What becomes of the link count of an inode that is renamed over. */
static int64_t links_lost(const struct side *to)
{
    return is_dir(to) ? (int64_t)to->attr.nlink : 1;
}

static int write_entries(struct namespace *ns, const struct side *from, const struct side *to, bool exchange)
{
    const struct entry_row *old = &from->entry, *new = &to->entry;
    int r;
    if (to->inode == NULL) {
        struct entry_row entry = {new->parent, new->cookie, old->ino, old->type};
        r = entry_insert(ns, &entry, to->name, to->len);
    } else {
        r = entry_replace(ns, new, old->ino, old->type);
    }
    if (r < 0)
        return r;
    if (exchange)
        return entry_replace(ns, old, new->ino, new->type);
    return entry_delete(ns, old);
}

/* The row of an inode that moves to the directory of `to`. */
static int write_moved(struct namespace *ns, const struct side *from, const struct side *to)
{
    if (!is_dir(from) || from->dir == to->dir)
        return 0;
    return RUN(ns, SQL_INODE_PARENT, INT(to->dir_attr.ino), INT(from->attr.ino));
}

static int write_rename(struct namespace *ns, const struct side *from, const struct side *to, bool exchange,
                        struct links links, int64_t now)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    r = write_entries(ns, from, to, exchange);
    if (r == 0)
        r = write_moved(ns, from, to);
    if (r == 0 && exchange)
        r = write_moved(ns, to, from);
    else if (r == 0 && to->inode != NULL)
        r = inode_links(ns, to->attr.ino, (uint64_t)(to->attr.nlink - links_lost(to)), now);
    if (r == 0)
        r = directory_links(ns, &from->dir_attr, links.from, now);
    if (r == 0 && from->dir != to->dir)
        r = directory_links(ns, &to->dir_attr, links.to, now);
    return transaction_end(ns, r);
}

static void moved(struct namespace *ns, const struct side *from, const struct side *to, int64_t now)
{
    core_changed(ns, from->inode, 0, 0, now);
    if (is_dir(from)) {
        pthread_mutex_lock(&from->inode->lock);
        from->inode->parent = to->dir_attr.ino;
        pthread_mutex_unlock(&from->inode->lock);
    }
    if (S_ISREG(from->attr.mode) && ns->events.published != NULL)
        ns->events.published(ns->events.arg, from->inode);
}

static int rename_sides(struct namespace *ns, struct side *from, struct side *to, uint32_t rename_flags)
{
    bool exchange = rename_flags == RENAME_EXCHANGE;
    if (from->inode == NULL || (exchange && to->inode == NULL))
        return -ENOENT;
    if (rename_flags == RENAME_NOREPLACE && to->inode != NULL)
        return -EEXIST;
    if (from->inode == to->inode)
        return 0;   /* two links to one inode: POSIX wants both to stay */
    int r = check_loop(ns, from, to);
    if (r == 0)
        r = exchange ? check_loop(ns, to, from) : check_replacement(ns, from, to);
    if (r < 0)
        return r;
    struct links links = count_links(from, to, exchange);
    if ((links.to > 0 && to->dir_attr.nlink >= LINK_MAX) || (links.from > 0 && from->dir_attr.nlink >= LINK_MAX))
        return -EMLINK;

    int64_t now = time_now();
    r = write_rename(ns, from, to, exchange, links, now);
    if (r < 0)
        return r;
    moved(ns, from, to, now);
    if (exchange)
        moved(ns, to, from, now);
    else if (to->inode != NULL)
        core_changed(ns, to->inode, -links_lost(to), CORE_ROW, now);
    core_changed(ns, from->dir, links.from, CORE_ENTRIES, now);
    if (from->dir != to->dir)
        core_changed(ns, to->dir, links.to, CORE_ENTRIES, now);
    return 0;
}

static int rename_in(struct namespace *ns, struct side *from, struct side *to, uint32_t rename_flags)
{
    int r = resolve(ns, from);
    if (r == 0)
        r = resolve(ns, to);
    if (r == 0)
        r = rename_sides(ns, from, to, rename_flags);
    if (from->inode != NULL)
        core_put(ns, from->inode);
    if (to->inode != NULL)
        core_put(ns, to->inode);
    return r;
}

int ns_rename(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint64_t new_parent,
              const char *new_name, size_t new_len, uint32_t rename_flags, int flags)
{
    struct side from = {.name = name, .len = len}, to = {.name = new_name, .len = new_len};
    if (rename_flags != 0 && rename_flags != RENAME_NOREPLACE && rename_flags != RENAME_EXCHANGE)
        return -EINVAL;
    int r = name_check(name, len);
    if (r == 0)
        r = name_check(new_name, new_len);
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = directory_get(ns, parent, &from.dir, &from.dir_attr);
    if (r == 0) {
        r = directory_get(ns, new_parent, &to.dir, &to.dir_attr);
        if (r == 0) {
            r = rename_in(ns, &from, &to, rename_flags);
            core_put(ns, to.dir);
        }
        core_put(ns, from.dir);
    }
    ns_leave(ns);
    return r;
}
