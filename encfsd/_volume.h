/* A mounted volume: everything of the data plane, opened and closed as one (docs/design.md, "Volume").
 * The lifecycle functions block (Python calls them off the event loop); requests go through _request.h. */
#ifndef ENCFSD_VOLUME_H
#define ENCFSD_VOLUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_format.h"
#include "_pool.h"

struct volume;

struct volume_options {
    int src_fd;                         /* directory; the volume duplicates it */
    int state_fd;                       /* open state record file (two slots of 4096 bytes, docs/format-keys.md), or -1 with read_only */
    uint8_t volume_id[ID_SIZE];
    uint8_t p[KEY_SIZE];                /* the volume's pseudo-random key; copied into locked memory, wipe it afterwards */
    bool read_only;                     /* writes nothing at all, not even an epoch */
    uint64_t free_list_bytes;           /* 0: only the reserve */
    uint64_t free_list_max_bytes;       /* and what follows: struct pool_options */
    enum pool_strategy free_list_strategy;
    enum pool_overflow free_list_overflow;
    bool free_list_prefault, free_list_hugepages, free_list_lock;
    pool_progress_fn *free_list_progress;       /* called by the thread in volume_open or volume_resize_free_list */
    void *free_list_progress_arg;
    uint32_t io_threads, barrier_threads; /* 8 and 4 */
    uint32_t group_interval_ms;         /* 5000 */
    uint64_t dirty_limit_bytes;
    bool have_state;                    /* the state record's contents, already authenticated by the caller: */
    bool state_clean;
    struct object_record state;         /* of object 0 */
    bool accept_root;                   /* open object 0 at exactly this root instead (--accept-root) */
    uint8_t accept_salt[SALT_SIZE];
};

/* What was found when object 0 was opened; for messages and for the freshness decision. */
struct volume_found {
    struct object_record root;          /* the root taken (or the newest authentic one if refused) */
    bool older, forked;                 /* against the state record */
    uint64_t recovered_objects;         /* active objects adopted after an unclean stop */
    uint64_t orphans;                   /* deleted files reclaimed */
};

/* Creates object 0 in an empty source directory and makes it durable. root_uid/gid own the root directory.
 * Returns 0 or -errno; *record names the first root (for the state record). */
int volume_create(const struct volume_options *options, uint32_t root_uid, uint32_t root_gid, struct object_record *record);

/* Opens, recovers (unless read_only), starts all threads. On error nothing is left running; `message` says in one line what
 * and where. -ESTALE: older or forked against the state record (found says which, names are in found->root).
 * -EBADMSG: damaged. -EUSERS: foreign writer. */
int volume_open(struct volume **v, const struct volume_options *options, struct volume_found *found,
                char *message, size_t message_size);

/* Last group, clean state record, threads ended, memory wiped and freed. Returns the result of the last group. */
int volume_close(struct volume *v);

struct volume_stats {
    struct pool_stats pool;
    uint64_t dirty_bytes, inodes_in_core, groups, solo_commits, durable_mark, objects_committed, parked, requests;
    uint64_t bytes_read, bytes_written; /* of contents, by READ and WRITE requests */
    uint64_t damaged_reads;             /* reads that met contents which are not authentic, or missing */
    bool read_only, failed;
};
void volume_stats(struct volume *v, struct volume_stats *stats);

/* Changes the size of the free list while the volume is used: pool_resize. */
int volume_resize_free_list(struct volume *v, uint64_t bytes);
enum { POOL_RESERVE_NODES = 512 };      /* 2 MiB that only commits may use: the smallest list */
/* Who waits for the free list, by class: pool_queue_stats. Takes no lock. */
void volume_queue_stats(struct volume *v, struct pool_queue_stats stats[POOL_CLASSES]);

/* Verify: reads and authenticates everything of a volume opened read_only. Calls are made from the calling thread.
 * progress: nodes done since the last call, total estimate. damaged: path (NUL-terminated), first bad byte, bytes lost.
 * Returns 0 sound, -EBADMSG damaged, other -errno. *stop nonzero from another thread: -ECANCELED soon. */
int volume_verify(struct volume *v, void (*progress)(void *arg, uint64_t nodes, uint64_t total),
                  void (*damaged)(void *arg, const char *path, uint64_t offset, uint64_t bytes), void *arg,
                  const volatile int *stop);

/* Named values in object 0 for the control plane (header generation and digest). Each set is one transaction and durable on return. */
int volume_get_value(struct volume *v, const char *key, void *value, size_t size, size_t *len);
int volume_set_value(struct volume *v, const char *key, const void *value, size_t len);

/* How much a log line matters: what is as it should be; what may need a look; contents that are lost or that cannot be reached. */
enum volume_severity { VOLUME_INFO, VOLUME_WARNING, VOLUME_ERROR };

/* Log lines of the data plane, oldest first: copies one NUL-terminated line of at most size - 1 bytes and its severity, returns false if
 * there is none. Never names. */
bool volume_next_log_line(struct volume *v, enum volume_severity *severity, char *line, size_t size);

/* Nanoseconds of CLOCK_REALTIME. */
int64_t clock_realtime_ns(void);

#endif
