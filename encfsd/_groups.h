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

/* interval_ms: at most this long until dirty data is durable (5000). The group thread starts; nothing is written yet. */
int groups_start(struct groups **g, struct volume *v, unsigned interval_ms);

/* Ends the thread after a last full group with an empty active set (clean). Returns that group's result. */
int groups_stop(struct groups *g);

/* fsync/fdatasync of one inode: returns when it is durable (0) or the error. Blocks: call from a barrier thread. */
int groups_fsync(struct groups *g, uint64_t ino, bool datasync);

/* fsyncdir and everything else that needs all metadata so far: waits for a group that covers the current mark. */
int groups_sync_metadata(struct groups *g);

/* A full group (all dirty objects) and wait for it: unmount, low space, dirty limit. */
int groups_sync_all(struct groups *g);

/* Asks for a full group soon, without waiting (dirty data above its soft limit). */
void groups_hurry(struct groups *g);

/* Sticky state: 0, or the errno that made the volume read-only. */
int groups_failed(struct groups *g);

/* Events of the namespace (see ns_events). */
struct ns_events groups_ns_events(struct groups *g);

struct groups_stats { uint64_t groups, solo_commits, marks, durable_mark, objects_committed, failures; };
void groups_stats(struct groups *g, struct groups_stats *stats);

#endif
