/* Durability: transaction groups, solo commits, the active set, the trusted state record (docs/design.md, "Groups").
 *
 * A *mark* is the number of a committed SQLite transaction. A group makes object 0 durable up to a mark. One group at a time,
 * on the group's own thread; solo commits of established files run beside it on the barrier threads. */
#ifndef ENCFSD_GROUPS_H
#define ENCFSD_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "_inode.h"

struct volume;
struct groups;

/* interval_ms: at most this long until dirty data is durable (5000). No thread yet: events of the namespace are taken from now on,
 * groups run by groups_run_once. 0 or -ENOMEM. */
int groups_create(struct groups **g, struct volume *v, unsigned interval_ms);
void groups_destroy(struct groups *g);                  /* after groups_stop, or if never started; NULL is allowed */

/* One full group on the calling thread: recovery, before groups_start. 0 or -errno. */
int groups_run_once(struct groups *g);

/* Starts the group thread. 0 or -errno. */
int groups_start(struct groups *g);

/* Ends the thread after last full groups with an empty active set (clean). Returns their result. */
int groups_stop(struct groups *g);

/* fsync/fdatasync of one inode: returns when it is durable (0) or the error. Blocks: call from a barrier thread. */
int groups_fsync(struct groups *g, uint64_t ino, bool datasync);

/* fsyncdir and everything else that needs all metadata so far: waits for a group that covers the current mark. */
int groups_sync_metadata(struct groups *g);
/* The same, and the times of this directory that no transaction has written yet. */
int groups_fsyncdir(struct groups *g, uint64_t ino);

/* A full group (all dirty objects) and wait for it: unmount, low space, dirty limit. */
int groups_sync_all(struct groups *g);

/* The store is full: a full group, so that replaced slots become free. Does nothing while a group waits for the kernel's dirty
 * pages, because the caller may be the very WRITE that it waits for. */
void groups_reclaim_space(struct groups *g);

/* Has the kernel hand over the dirty pages of a file from byte `offset` on, if it may have any, and drop all pages from there. Blocks
 * until this process has answered the kernel's WRITEs, which may take a full group: from a barrier thread that holds no lock. */
void groups_pull_from(struct groups *g, struct inode *inode, uint64_t offset);

/* True if nothing of the inode waits for a group and its row names its newest root: its object may be closed. */
bool groups_idle(struct groups *g, struct inode *inode);

/* Asks for a full group soon, without waiting (dirty data above its soft limit). */
void groups_hurry(struct groups *g);

/* True while somebody waits for the kernel to hand over dirty pages. */
bool groups_pulls_pages(struct groups *g);

/* Sticky state: 0, or the errno that made the volume read-only. */
int groups_failed(struct groups *g);

/* The inode has dirty data or attributes (its flags say which): the next full group takes it. No lock order: leaf mutex. */
void groups_dirtied(struct groups *g, struct inode *inode);

/* Events of the namespace (see ns_events). */
struct ns_events groups_ns_events(struct groups *g);

struct groups_stats { uint64_t groups, solo_commits, marks, durable_mark, objects_committed, failures; };
void groups_stats(struct groups *g, struct groups_stats *stats);

#endif
