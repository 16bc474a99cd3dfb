/* Extended attributes, and the two of them that are ACLs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

#include "_acl.h"
#include "_namespace_internal.h"

enum {
    XATTR_NAME_BYTES = 255,
    XATTR_VALUE_BYTES = 65536,
    XATTR_LIST_BYTES = 65536,   /* what listxattr(2) can return */
};

static const char access_name[] = "system.posix_acl_access";
static const char default_name[] = "system.posix_acl_default";
static const char capability_name[] = "security.capability";

static const char *const prefixes[] = {"user.", "trusted.", "security."};

static bool is_access_acl(const char *name)
{
    return strcmp(name, access_name) == 0;
}

static bool is_acl(const char *name)
{
    return is_access_acl(name) || strcmp(name, default_name) == 0;
}

static int check_name(const char *name)
{
    if (name[0] == '\0' || strlen(name) > XATTR_NAME_BYTES)
        return -ERANGE;
    if (is_acl(name))
        return 0;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t n = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], n) == 0)
            return name[n] != '\0' ? 0 : -EINVAL;
    }
    return -EOPNOTSUPP;
}

/* Copies a value of at most `size` bytes; *len is its length even if it does not fit (-ERANGE). -ENODATA: no such name. */
static int read_value(struct namespace *ns, uint64_t ino, const char *name, void *buffer, size_t size, size_t *len)
{
    sqlite3_stmt *stmt = QUERY(ns, SQL_XATTR_GET, INT(ino), BLOB(name, strlen(name)));
    int r = statement_next(ns, stmt);
    if (r == 1) {
        *len = (size_t)sqlite3_column_bytes(stmt, 0);
        r = *len <= size ? 0 : -ERANGE;
        if (r == 0 && *len > 0)
            memcpy(buffer, sqlite3_column_blob(stmt, 0), *len);
    } else if (r == 0) {
        r = -ENODATA;
    }
    sqlite3_reset(stmt);
    return r;
}

/* A value in memory that the caller frees; NULL and 0 if there is none. */
static int read_copy(struct namespace *ns, uint64_t ino, const char *name, uint8_t **value, size_t *size)
{
    *value = NULL;
    sqlite3_stmt *stmt = QUERY(ns, SQL_XATTR_GET, INT(ino), BLOB(name, strlen(name)));
    int r = statement_next(ns, stmt);
    if (r == 1) {
        *size = (size_t)sqlite3_column_bytes(stmt, 0);
        *value = malloc(*size + 1);
        r = *value == NULL ? -ENOMEM : 0;
        if (r == 0 && *size > 0)
            memcpy(*value, sqlite3_column_blob(stmt, 0), *size);
    }
    sqlite3_reset(stmt);
    return r;
}

static int put_value(struct namespace *ns, uint64_t ino, const char *name, const void *value, size_t size)
{
    return RUN(ns, SQL_XATTR_PUT, INT(ino), BLOB(name, strlen(name)), BLOB(size == 0 ? "" : value, size));
}

static int delete_value(struct namespace *ns, uint64_t ino, const char *name)
{
    return RUN(ns, SQL_XATTR_DELETE, INT(ino), BLOB(name, strlen(name)));
}

/* ---- inodes without any ---- */

bool xattrs_known_none(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    bool none = inode->no_xattrs;
    pthread_mutex_unlock(&inode->lock);
    return none;
}

static void set_known_none(struct inode *inode, bool none)
{
    pthread_mutex_lock(&inode->lock);
    inode->no_xattrs = none;
    pthread_mutex_unlock(&inode->lock);
}

/* The kernel asks for ACLs and capabilities again and again, mostly of inodes that have none: they cost no mutex and no query. An
 * attribute that is being set meanwhile is not there yet. The mutex is not held. */
static bool asked_in_vain(struct namespace *ns, uint64_t ino)
{
    struct inode *inode = inode_find(ns->inodes, ino);
    if (inode == NULL)
        return false;
    bool none = xattrs_known_none(inode);
    ns_put_inode(ns, inode);
    return none;
}

/* 1 if the inode has any attribute, 0 or -errno. */
static int has_any(struct namespace *ns, uint64_t ino)
{
    sqlite3_stmt *stmt = QUERY(ns, SQL_XATTR_LIST, INT(ino));
    int r = statement_next(ns, stmt);
    sqlite3_reset(stmt);
    return r;
}

/* What a query has proved stays true as long as the mutex is held. */
static void note_none(struct namespace *ns, uint64_t ino)
{
    struct inode *inode = inode_find(ns->inodes, ino);
    if (inode == NULL)
        return;
    set_known_none(inode, true);
    core_put(ns, inode);
}

/* ---- ACLs and capabilities of other operations ---- */

int capability_find(struct namespace *ns, struct inode *inode)
{
    size_t len;
    if (xattrs_known_none(inode))
        return 0;
    int r = has_any(ns, inode->ino);
    if (r == 0)
        set_known_none(inode, true);
    if (r != 1)
        return r;
    r = read_value(ns, inode->ino, capability_name, NULL, 0, &len);
    if (r == -ENODATA)
        return 0;
    return r == 0 || r == -ERANGE ? 1 : r;
}

int capability_delete(struct namespace *ns, uint64_t ino)
{
    return delete_value(ns, ino, capability_name);
}

int acl_follow_mode(struct namespace *ns, uint64_t ino, uint32_t mode)
{
    uint8_t *acl;
    size_t size;
    int r = read_copy(ns, ino, access_name, &acl, &size);
    if (r == 0 && acl != NULL) {
        acl_set_mode(acl, size, mode);
        r = put_value(ns, ino, access_name, acl, size);
        free(acl);
    }
    return r;
}

int inheritance_find(struct namespace *ns, struct inode *parent, uint32_t mode, uint32_t umask, struct inheritance *inherited)
{
    *inherited = (struct inheritance){.mode = mode & 07777};
    if (S_ISLNK(mode))
        return 0;   /* links have no permissions of their own */
    if (!parent->no_default_acl && !xattrs_known_none(parent)) {
        int r = read_copy(ns, parent->ino, default_name, &inherited->default_acl, &inherited->size);
        if (r < 0)
            return r;
    }
    if (inherited->default_acl == NULL) {
        parent->no_default_acl = true;
        inherited->mode &= ~(umask & 0777);
        return 0;
    }
    inherited->access_acl = malloc(inherited->size);
    if (inherited->access_acl == NULL) {
        inheritance_free(inherited);
        return -ENOMEM;
    }
    memcpy(inherited->access_acl, inherited->default_acl, inherited->size);
    inherited->mode = acl_inherit(inherited->access_acl, inherited->size, inherited->mode);
    if (acl_is_mode(inherited->access_acl, inherited->size)) {
        free(inherited->access_acl);
        inherited->access_acl = NULL;
    }
    if (!S_ISDIR(mode)) {
        free(inherited->default_acl);
        inherited->default_acl = NULL;
    }
    return 0;
}

int inheritance_store(struct namespace *ns, uint64_t ino, const struct inheritance *inherited)
{
    int r = 0;
    if (inherited->access_acl != NULL)
        r = put_value(ns, ino, access_name, inherited->access_acl, inherited->size);
    if (r == 0 && inherited->default_acl != NULL)
        r = put_value(ns, ino, default_name, inherited->default_acl, inherited->size);
    return r;
}

void inheritance_free(struct inheritance *inherited)
{
    free(inherited->access_acl);
    free(inherited->default_acl);
    inherited->access_acl = inherited->default_acl = NULL;
}

/* Bytes of the list of all names of an inode, or a negative errno. */
static int64_t list_size(struct namespace *ns, uint64_t ino)
{
    sqlite3_stmt *stmt = QUERY(ns, SQL_XATTR_LIST, INT(ino));
    int64_t size = 0;
    int r;
    while ((r = statement_next(ns, stmt)) == 1)
        size += sqlite3_column_bytes(stmt, 0) + 1;
    sqlite3_reset(stmt);
    return r < 0 ? r : size;
}

/* ---- set and remove ---- */

/* What one call does to an inode. */
struct change {
    const char *name;
    const void *value;          /* NULL: the attribute goes */
    size_t size;
    uint32_t mode;              /* of the inode afterwards */
};

static int write_change(struct namespace *ns, const struct attr *attr, const struct change *c, int64_t now)
{
    int r = transaction_begin(ns);
    if (r < 0)
        return r;
    if (c->value != NULL)
        r = put_value(ns, attr->ino, c->name, c->value, c->size);
    else
        r = delete_value(ns, attr->ino, c->name);
    if (r == 0)
        r = RUN(ns, SQL_INODE_OWNER, INT(c->mode), INT(attr->uid), INT(attr->gid), INT(now), INT(attr->ino));
    return transaction_end(ns, r);
}

static int apply_change(struct namespace *ns, struct inode *inode, const struct attr *attr, const struct change *c)
{
    int64_t now = time_now();
    if (c->value != NULL)
        set_known_none(inode, false);
    int r = write_change(ns, attr, c, now);
    if (r < 0)
        return r;
    pthread_mutex_lock(&inode->lock);
    inode->attr.mode = c->mode;
    pthread_mutex_unlock(&inode->lock);
    inode->no_default_acl = false;
    core_changed(ns, inode, 0, CORE_ROW, now);
    return 0;
}

/* What setting an ACL means beyond storing it. */
static int plan_acl(const struct attr *attr, struct change *c, bool keep_setgid)
{
    size_t entries;
    int r = acl_check(c->value, c->size, &entries);
    if (r < 0)
        return r;
    if (S_ISLNK(attr->mode))
        return -EOPNOTSUPP;
    if (entries == 0)
        c->value = NULL;
    if (!is_access_acl(c->name))
        return S_ISDIR(attr->mode) || c->value == NULL ? 0 : -EACCES;
    if (c->value == NULL)
        return 0;
    c->mode = acl_to_mode(c->value, c->size, attr->mode);
    if (!keep_setgid)
        c->mode &= ~(uint32_t)S_ISGID;
    if (acl_is_mode(c->value, c->size))
        c->value = NULL;
    return 0;
}

/* XATTR_CREATE, XATTR_REPLACE, and room for a new name in the list. */
static int may_set(struct namespace *ns, uint64_t ino, const char *name, int xattr_flags)
{
    size_t len;
    int r = read_value(ns, ino, name, NULL, 0, &len);
    if (r == 0 || r == -ERANGE)
        return xattr_flags == XATTR_CREATE ? -EEXIST : 0;
    if (r != -ENODATA || xattr_flags == XATTR_REPLACE)
        return r;
    int64_t listed = list_size(ns, ino);
    if (listed < 0)
        return (int)listed;
    return listed + (int64_t)strlen(name) + 1 > XATTR_LIST_BYTES ? -ENOSPC : 0;
}

static int set(struct namespace *ns, struct inode *inode, struct change *c, int xattr_flags, bool keep_setgid)
{
    struct attr attr = core_attr(inode);
    c->mode = attr.mode;
    int r = is_acl(c->name) ? plan_acl(&attr, c, keep_setgid) : 0;
    if (r == 0)
        r = may_set(ns, attr.ino, c->name, xattr_flags);
    return r < 0 ? r : apply_change(ns, inode, &attr, c);
}

int ns_setxattr(struct namespace *ns, uint64_t ino, const char *name, const void *value, size_t size, int xattr_flags,
                bool caller_in_group_or_capable, int flags)
{
    struct change c = {.name = name, .value = size == 0 ? "" : value, .size = size};
    struct inode *inode;
    int r = check_name(name);
    if (r == 0 && xattr_flags != 0 && xattr_flags != XATTR_CREATE && xattr_flags != XATTR_REPLACE)
        r = -EINVAL;
    if (r == 0 && size > XATTR_VALUE_BYTES)
        r = -E2BIG;
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, &inode);
    if (r == 0) {
        r = set(ns, inode, &c, xattr_flags, caller_in_group_or_capable);
        core_put(ns, inode);
    }
    ns_leave(ns);
    return r;
}

static int remove_attribute(struct namespace *ns, struct inode *inode, const char *name)
{
    struct attr attr = core_attr(inode);
    struct change c = {.name = name, .mode = attr.mode};
    size_t len;
    int r = read_value(ns, attr.ino, name, NULL, 0, &len);
    if (r == -ENODATA && is_acl(name))
        return 0;   /* "have no ACL" is reached already */
    return r == 0 || r == -ERANGE ? apply_change(ns, inode, &attr, &c) : r;
}

int ns_removexattr(struct namespace *ns, uint64_t ino, const char *name, int flags)
{
    struct inode *inode;
    int r = check_name(name);
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = core_get(ns, ino, &inode);
    if (r == 0) {
        r = remove_attribute(ns, inode, name);
        core_put(ns, inode);
    }
    ns_leave(ns);
    return r;
}

/* ---- get and list ---- */

int ns_getxattr(struct namespace *ns, uint64_t ino, const char *name, void *buffer, size_t size, size_t *len, int flags)
{
    int r = check_name(name);
    if (r == 0 && asked_in_vain(ns, ino))
        r = -ENODATA;
    if (r == 0)
        r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    r = has_any(ns, ino);
    if (r == 0)
        note_none(ns, ino);
    if (r >= 0)
        r = r == 0 ? -ENODATA : read_value(ns, ino, name, buffer, size, len);
    if (r == -ERANGE && size == 0)
        r = 0;
    ns_leave(ns);
    return r;
}

int ns_listxattr(struct namespace *ns, uint64_t ino, char *buffer, size_t size, size_t *len, int flags)
{
    *len = 0;
    if (asked_in_vain(ns, ino))
        return 0;
    int r = ns_enter(ns, flags);
    if (r < 0)
        return r;
    sqlite3_stmt *stmt = QUERY(ns, SQL_XATTR_LIST, INT(ino));
    while ((r = statement_next(ns, stmt)) == 1) {
        size_t n = (size_t)sqlite3_column_bytes(stmt, 0);
        if (*len + n + 1 <= size) {
            memcpy(buffer + *len, sqlite3_column_blob(stmt, 0), n);
            buffer[*len + n] = '\0';
        }
        *len += n + 1;
    }
    sqlite3_reset(stmt);
    if (r == 0 && *len == 0)
        note_none(ns, ino);
    ns_leave(ns);
    if (r == 0 && size != 0 && *len > size)
        r = -ERANGE;
    return r;
}
