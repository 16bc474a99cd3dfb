/* Every namespace operation: one C function, one SQLite transaction, under one mutex (docs/design.md, "Metadata").
 *
 * The database lies in object 0 through the VFS in _vfs.c; it is opened here and nowhere else. Each operation that changes
 * something ends with COMMIT; its xSync numbers the change (a "mark"). All functions return 0 or a negative errno and are
 * thread-safe. NS_NOWAIT: -EAGAIN instead of waiting for the mutex; nothing was done then.
 *
 * Permission checks are the kernel's (default_permissions); here are the rules that belong to the file system: setgid
 * directories, ACL inheritance, time stamps, link counts, emptiness, name and link limits. */
#ifndef ENCFSD_NAMESPACE_H
#define ENCFSD_NAMESPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_inode.h"

struct namespace;

enum ns_flags {
    NS_NOWAIT = 1,
    NS_PLAIN = 2,                       /* ns_readdir: of the attributes only ino and the type in mode, and no lookup counts */
};

struct ns_caller {
    uint32_t uid, gid, umask;
};

/* Told of what an operation did, under no inode lock and under the namespace mutex (`dirtied` also without it: setting times needs
 * none), before the operation returns; implemented by _groups.c. The namespace itself knows nothing of groups. A member may be NULL.
 * Who keeps an inode takes a reference. */
struct ns_events {
    void (*published)(void *arg, struct inode *inode);      /* a regular file: renamed, or linked to a new name */
    void (*dirtied)(void *arg, struct inode *inode);        /* attr_dirty or content_dirty was set */
    void (*object_dropped)(void *arg, const uint8_t id[ID_SIZE]); /* row gone; remove the file once that is durable */
    void *arg;
};

/* Formats an empty object 0 with the schema and the root directory (mode 0755, owner uid/gid). Then commits nothing: the
 * caller commits object 0. */
int ns_format(struct object *meta, uint32_t uid, uint32_t gid);

/* Opens the database on object 0. `message` receives a line for the log on failure. cache_bytes: SQLite page cache. */
int ns_open(struct namespace **ns, struct object *meta, struct inode_table *inodes, const struct ns_events *events,
            bool read_only, size_t cache_bytes, char *message, size_t message_size);
/* Finalises statements and closes the connection. No operation may be running. */
int ns_close(struct namespace *ns);

/* ---- operations. Those that return an entry raise the lookup count of it by one. ---- */
int ns_lookup(struct namespace *ns, uint64_t parent, const char *name, size_t len, struct attr *out, int flags);
int ns_getattr(struct namespace *ns, uint64_t ino, struct attr *out, int flags);

enum ns_set {
    SET_MODE = 1, SET_UID = 2, SET_GID = 4, SET_ATIME = 8, SET_MTIME = 16, SET_CTIME = 32, SET_SIZE = 64,
    SET_DROP_PRIVILEGES = 128,          /* with SET_SIZE, by somebody who may not keep them: see ns_drop_privileges */
};
/* Changes attributes (not SET_SIZE: that is file_truncate). Without SET_CTIME the change time becomes now. chown clears
 * setuid/setgid of non-directories as Linux does; chmod keeps the access ACL's mask in step. Only-times changes are
 * recorded in core and written by the next group. */
int ns_setattr(struct namespace *ns, uint64_t ino, const struct attr *values, uint32_t valid, struct attr *out, int flags);

/* What a write or truncation by somebody without CAP_FSETID does to a regular file: setuid goes, setgid too if the group may
 * execute, and security.capability. `capability_only`: the caller has CAP_FSETID, only the last goes. Cheap if there is nothing to
 * drop: then no mutex is taken, once that is known of the inode. *dropped (may be NULL): whether something was, so that whoever
 * keeps a copy of the mode has an old one. */
int ns_drop_privileges(struct namespace *ns, uint64_t ino, bool capability_only, bool *dropped, int flags);

/* A regular file without a name, as open(O_TMPFILE) makes it: nlink 0, lookup count 1. ns_link may give it a first name if `linkable`
 * (not O_EXCL); unless it does, the file goes with its last use. `parent` decides on inheritance. */
int ns_tmpfile(struct namespace *ns, uint64_t parent, uint32_t mode, bool linkable, const struct ns_caller *caller,
               struct attr *out, int flags);

/* Regular files, fifos, sockets, devices. `mode` includes the type; umask is applied unless the parent has a default ACL. */
int ns_mknod(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint32_t mode, uint32_t rdev,
             const struct ns_caller *caller, struct attr *out, int flags);
int ns_mkdir(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint32_t mode,
             const struct ns_caller *caller, struct attr *out, int flags);
int ns_symlink(struct namespace *ns, uint64_t parent, const char *name, size_t len, const char *target, size_t target_len,
               const struct ns_caller *caller, struct attr *out, int flags);
int ns_readlink(struct namespace *ns, uint64_t ino, char *buffer, size_t size, size_t *len, int flags); /* size >= 4096 */
int ns_link(struct namespace *ns, uint64_t ino, uint64_t parent, const char *name, size_t len, struct attr *out, int flags);
int ns_unlink(struct namespace *ns, uint64_t parent, const char *name, size_t len, int flags);
int ns_rmdir(struct namespace *ns, uint64_t parent, const char *name, size_t len, int flags);
/* rename_flags: 0, RENAME_NOREPLACE or RENAME_EXCHANGE; others -EINVAL. */
int ns_rename(struct namespace *ns, uint64_t parent, const char *name, size_t len, uint64_t new_parent,
              const char *new_name, size_t new_len, uint32_t rename_flags, int flags);
int ns_forget(struct namespace *ns, uint64_t ino, uint64_t n);
/* Never waits. -EAGAIN: counted, but the inode may be unused now and is to be dropped: ns_forget(ns, ino, 0) does that. */
int ns_forget_nowait(struct namespace *ns, uint64_t ino, uint64_t n);

struct ns_dirent {
    uint64_t cookie;                    /* pass to the next call to continue after this entry */
    struct attr attr;                   /* lookup count raised by one, but for "." and ".." */
    uint16_t name_len;
    char name[NAME_MAX_BYTES + 1];
};
/* Receives one entry, under the namespace mutex: it must not block nor call the namespace. Returns false if it has no room for it:
 * then the entry counts as not reported and the listing ends. */
typedef bool ns_emit_fn(void *arg, const struct ns_dirent *entry);
/* Entries after `cookie` (0: from the start, with "." and ".." first, cookies 1 and 2); *count says how many were taken. Right while
 * entries come and go: an entry that exists throughout is reported exactly once. An error behind some entries shows when the
 * caller comes for the rest; -EAGAIN comes before the first. */
int ns_readdir(struct namespace *ns, uint64_t ino, uint64_t cookie, ns_emit_fn *emit, void *arg, size_t *count, int flags);

/* Extended attributes (user., trusted., security., system.posix_acl_*). xattr_flags: 0, XATTR_CREATE, XATTR_REPLACE.
 * Limits as on ext4: name 255 bytes, value 64 KiB, all names together 64 KiB (-ERANGE, -E2BIG, -ENOSPC). size 0 on get/list: only
 * *len is returned. */
int ns_setxattr(struct namespace *ns, uint64_t ino, const char *name, const void *value, size_t size, int xattr_flags,
                bool caller_in_group_or_capable, int flags);
int ns_getxattr(struct namespace *ns, uint64_t ino, const char *name, void *buffer, size_t size, size_t *len, int flags);
int ns_listxattr(struct namespace *ns, uint64_t ino, char *buffer, size_t size, size_t *len, int flags);
int ns_removexattr(struct namespace *ns, uint64_t ino, const char *name, int flags);

struct ns_counts { uint64_t inodes; };
int ns_statfs(struct namespace *ns, struct ns_counts *counts, int flags);     /* the first call counts: not with NS_NOWAIT */

/* Why the namespace became read-only by itself (negative errno), or 0. It does when a transaction fails that the operation did
 * not give up itself: the changes that follow return -EROFS. *torn: SQLite could not even put the pages back; then nothing of
 * object 0 since the last mark may be committed and every operation that needs the database returns -EIO. Any thread. */
int ns_failed(struct namespace *ns, bool *torn);

/* ---- for _file.c and _groups.c: the same mutex and connection ---- */
int ns_lock(struct namespace *ns, int flags);       /* NS_NOWAIT: -EAGAIN */
void ns_unlock(struct namespace *ns);
uint64_t ns_mark(struct namespace *ns);             /* number of the last committed transaction; namespace mutex held */

/* Finds the inode, in core or from its row; takes a reference (inode_put through ns_put_inode). -ENOENT, -EIO... */
int ns_get_inode(struct namespace *ns, uint64_t ino, struct inode **inode, int flags);
/* Drops the reference and reclaims the inode if it was the last use of a deleted one. May wait for the namespace mutex, which
 * the caller must not hold, nor any inode lock. */
void ns_put_inode(struct namespace *ns, struct inode *inode);

/* Reads the in-row contents into inode->content if it has none yet and the file has no object. The namespace mutex and then
 * the inode's lock are held. */
int ns_load_content(struct namespace *ns, struct inode *inode);

/* What ns_write_... write between the two becomes one transaction: rows of neighbours share pages, and each page is written once. The
 * namespace mutex is held throughout. If `result`, that of the writes, is not 0, nothing has been written, though inodes may seem clean:
 * the caller must not go on with this volume. Returns what became of the transaction: 0 or -errno. */
void ns_rows_begin(struct namespace *ns);
int ns_rows_end(struct namespace *ns, int result);

/* One transaction each, unless between the two above; namespace mutex held, the inode's lock not: */
/* attr_dirty/content_dirty -> row; clears them. Nothing if the file has an object: size and times are those of its root then. */
int ns_write_inode(struct namespace *ns, struct inode *inode);
/* Only the times of an inode, for a file whose object is closed: nothing else of it can have changed. Clears attr_dirty. */
int ns_write_times(struct namespace *ns, struct inode *inode);
/* The row gets the object's id and record, and the size, blocks and times that this root carries (`durable`; live attributes may be
 * newer); in-row contents are removed. active_epoch 0: not in the active set. attr_dirty stays as it is. */
int ns_write_record(struct namespace *ns, struct inode *inode, const struct object_record *record,
                    const struct object_attr *durable, uint64_t active_epoch);

/* Gives free pages at the end of the database back to object 0 if they are many (a megabyte and a quarter of it): one short
 * transaction, so call it again while it returns 1. Namespace mutex held. 1: there is more to give, 0, or -errno. */
int ns_shrink(struct namespace *ns);

/* st_blocks of `size` bytes in `nodes` data nodes: never 0 for a file with contents, because programs that preserve holes take that for
 * one hole, also while the kernel still holds the data. */
uint64_t ns_blocks(uint64_t size, uint64_t nodes);

/* Iterates rows at mount, before serving. No lock is held while fn runs, so it may call everything here; it sees each row that
 * is there throughout once. Stops at fn's first result that is not 0 and returns it. */
struct ns_object_row { uint64_t ino; uint8_t id[ID_SIZE]; struct object_record record; uint64_t active_epoch; bool orphan; };
int ns_each_active(struct namespace *ns, int (*fn)(void *arg, const struct ns_object_row *row), void *arg);
int ns_each_object(struct namespace *ns, int (*fn)(void *arg, const struct ns_object_row *row), void *arg);
int ns_reclaim_orphans(struct namespace *ns);       /* deletes rows of orphans; object_dropped events tell which objects */
int ns_each_dropped(struct namespace *ns, int (*fn)(void *arg, const uint8_t id[ID_SIZE]), void *arg);
int ns_forget_dropped(struct namespace *ns, const uint8_t id[ID_SIZE]);  /* the file is gone; removes the note */

/* Small named values of the volume row: "header_generation", "header_digest", ... Returns -ENOENT if absent, -ERANGE if
 * longer than `size`. Like all functions from here on they take the mutex themselves. */
int ns_get_value(struct namespace *ns, const char *key, void *value, size_t size, size_t *len);
int ns_set_value(struct namespace *ns, const char *key, const void *value, size_t len);

/* Writes the path of an inode (one of its links) for verify's report: NUL-terminated, "/a/b". */
int ns_path(struct namespace *ns, uint64_t ino, char *buffer, size_t size);

#endif
