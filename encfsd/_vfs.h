/* SQLite VFS whose only file is object 0; journals are memory. xSync marks a commit point (a number), it makes nothing durable: groups do. */
#ifndef ENCFSD_VFS_H
#define ENCFSD_VFS_H

#include <stdbool.h>
#include <stdint.h>

#include "_object.h"

/* Registers the VFS "encfsd" once for the process; never the default. 0 or -ENOMEM. */
int vfs_register(void);

/* Attaches an object under a name ("meta-<n>") that sqlite3_open_v2(..., "encfsd") then accepts; every other name, and every
 * kind of file but journals, is refused with SQLITE_CANTOPEN. Returns 0 and the name in `name`. */
struct vfs_file;
int vfs_attach(struct vfs_file **file, struct object *meta, char name[32]);
void vfs_detach(struct vfs_file *file);

/* Number of transactions committed so far: SQLite ends each, and nothing else that succeeds, with one xSync. */
uint64_t vfs_marks(const struct vfs_file *file);

/* The first I/O error that SQLite met on the object since attach (negative errno), or 0. */
int vfs_error(const struct vfs_file *file);

/* Whether the object may hold half of a transaction. Between two marks SQLite writes only to commit, and if that fails, to
 * put the old pages back: so a second failing write means that they may not be back. */
bool vfs_torn(const struct vfs_file *file);

#endif
