/* What the files of the volume layer share: _volume.c (life), _file.c (contents), _groups.c (durability), _space.c (reservation),
 * _state.c (trusted record), _log.c, _request.c (the door). Nobody else includes this. */
#ifndef ENCFSD_VOLUME_INTERNAL_H
#define ENCFSD_VOLUME_INTERNAL_H

#include <pthread.h>

#include "_file.h"
#include "_groups.h"
#include "_namespace.h"
#include "_object.h"
#include "_volume.h"
#include "_workers.h"

enum { LOG_LINES = 64, LOG_LINE_SIZE = 256, OPENING_LOCKS = 61 };

/* Log lines wait here until the control plane fetches them; the oldest are dropped when it does not. */
struct log_queue {
    pthread_mutex_t mutex;                      /* guards all of it */
    char line[LOG_LINES][LOG_LINE_SIZE];
    enum volume_severity severity[LOG_LINES];   /* of each line */
    unsigned first, count;
};

/* Space in the backing store that may still be promised (docs/decisions/0009-space-reservation.md). */
struct space {
    pthread_mutex_t mutex;                      /* guards all of it */
    uint64_t available;                         /* bytes, at the last look */
    uint64_t promised;                          /* bytes accepted since then */
    bool ballast;                               /* the ballast file exists with all its blocks */
    _Atomic uint64_t metadata;                  /* not under the mutex: bytes that operations since the last full group may need */
};

/* The trusted record as it lies in the state directory (encfsd/state.py, docs/format-keys.md). */
struct state_record {
    uint8_t magic_version[8];
    uint64_t flags;                             /* bit 0: clean */
    uint8_t volume_id[ID_SIZE];
    uint64_t sequence;
    uint64_t epoch, counter;                    /* of object 0's root */
    uint64_t header_generation;
    uint8_t salt[SALT_SIZE];
    uint8_t header_digest[32];
    uint64_t epoch_begun;                       /* highest mount epoch that this machine has begun */
    uint8_t reserved[24];
    uint8_t mac[32];
};

/* Only the group thread writes, and before it starts and after it ended whoever opens and closes the volume. */
struct state_file {
    int fd;                                     /* -1: none */
    struct state_record record;                 /* the newest, as written */
};

struct completion_queue {
    pthread_mutex_t mutex;                      /* guards head, tail */
    struct request *head, *tail;
    int event_fd;                               /* readable while the queue is not empty */
};

/* Active rows that were not brought to an end at mount. Read-only: recovery is done at open, in memory, and nothing is written.
 * Else: recovery failed, and the object must not be opened at its recorded root, which is older than what fsync promised. */
struct active_row {
    uint64_t ino, active_epoch;
};

struct volume {
    /* set once at open */
    struct volume_options options;              /* without the key */
    struct blockdir *dir;
    struct keyring *ring;
    struct pool *pool;
    struct workers *io, *barrier;
    struct object_env env;
    struct object *meta;                        /* object 0 */
    struct inode_table *inodes;
    struct namespace *ns;
    struct groups *groups;                      /* NULL if read_only */
    uint64_t max_open_objects;
    struct active_row *active_rows;
    size_t active_row_count;
    _Atomic int notify_fd;                      /* /dev/fuse, -1 before the mount */
    _Atomic bool writers_unknown;               /* any file may have dirty pages in the kernel, whatever inode->writers says */
    _Atomic uint64_t requests, parked, damaged_reads, bytes_read, bytes_written;
    struct log_queue log;
    struct space space;
    struct state_file state;
    struct completion_queue completions;
    pthread_mutex_t opening[OPENING_LOCKS];     /* of the inodes with that remainder: opening and creating their objects (_file.c) */
};

/* _log.c: printf-like; never pass a name, a path or a key. */
void volume_log(struct volume *v, enum volume_severity severity, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* _space.c */
/* Promises room for `bytes` of new contents, or -ENOSPC. Looks at the backing store when the last look is used up. A full store gets
 * one chance to take slots back: that waits for a full group, or returns -EAGAIN with `nowait`. No lock may be held. */
int space_reserve(struct volume *v, uint64_t bytes, bool nowait);
/* The same for an operation that adds metadata, with `bytes` of its own. -ENOSPC too while the ballast is spent and cannot be
 * restored. */
int space_for_metadata(struct volume *v, uint64_t bytes, bool nowait);
/* Before an operation that removes or changes metadata: it is allowed on a full store, but the commit of all such operations since
 * the last group must fit into the ballast. Waits for a full group if they come near it, or returns -EAGAIN with `nowait`; else 0. */
int space_for_removal(struct volume *v, bool nowait);
/* Contents that space_reserve has promised room for will go into a row, where they need more. */
void space_owe_row(struct volume *v);
/* Creates or restores the ballast; returns 0 or -errno (-ENOSPC: the store is full). */
int space_restore_ballast(struct volume *v);
/* Gives the ballast up so that a commit of object 0 can be written. Returns whether there was one. */
bool space_spend_ballast(struct volume *v);
/* What may be promised now, 0 if that cannot be found out. 0, or -EAGAIN with `nowait` while the ballast is written. */
int space_available(struct volume *v, uint64_t *available, bool nowait);

/* _state.c */
/* Reads the newest authentic slot as the template for later writes. 0, or -EBADMSG if neither slot is authentic. */
int state_load(struct volume *v);
/* Makes durable that a mount epoch is begun, before its first root is written: the root stays what it was, clean goes. */
int state_begin_epoch(struct volume *v, uint64_t epoch);
/* Makes the record durable in the slot that does not hold the newest. 0 or -errno. */
int state_write(struct volume *v, const struct object_record *record, bool clean);

/* _notify.c */
enum { NOTIFY_ATTRIBUTES = -1 };
/* Has the kernel forget what it knows of an inode: its attributes, and its pages from byte `offset` on, unless that is
 * NOTIFY_ATTRIBUTES. Before it drops dirty pages it sends WRITEs, which other threads of this process must answer: with pages no lock may
 * be held, and the call waits for them; without, it waits for nothing. 0, also if the kernel does not know the inode or nothing is
 * mounted, or -errno. */
int notify_inode(struct volume *v, uint64_t ino, int64_t offset);

/* _file.c: closes objects of clean, unused inodes when too many are open. */
void file_close_idle_objects(struct volume *v);

#endif
