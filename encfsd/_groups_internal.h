/* The inside of groups, shared by _groups.c (lists, who waits, life), _groups_run.c (one group) and _groups_commit.c (its objects). */
#ifndef ENCFSD_GROUPS_INTERNAL_H
#define ENCFSD_GROUPS_INTERNAL_H

#include "_volume_internal.h"

enum {
    SYNCFS_ABOVE = 32,          /* objects in a group: from here on one syncfs is cheaper than a barrier each */
    ROWS_AT_A_TIME = 64,        /* rows written in a transaction and before the namespace mutex is let go: bounds how long a request waits */
    SHRINK_STEPS = 8,           /* short transactions of ns_shrink a group */
    PUBLISH_ROUNDS = 3,         /* renames may go on while a group commits what earlier ones published */
};

/* Somebody who waits for a group; lies on the waiter's stack. */
struct waiter {
    struct inode *inode;        /* NULL: metadata only */
    bool everything;            /* a full group */
    bool enter_active;          /* this inode was fsynced before: make the next fsync a solo commit */
    bool done;
    int result;
    struct waiter *next;
};

/* One inode of the running group. */
struct target {
    struct inode *inode;        /* referenced */
    struct object *object;      /* NULL: contents in the row */
    struct object_record record;
    bool enter_active;
    bool published;             /* renamed or linked: this group's mark shows its contents under a new name */
    bool begun;                 /* a commit was begun: end it */
    bool times_only;            /* its object is closed: only the row is written */
    bool for_descriptor;        /* committed though it may be deleted: only then can its object be closed */
    bool named;                 /* this group's mark names `record` exactly; its slot is pinned once for that */
    bool superseded;            /* a later target of this group is the same inode, with a newer root */
    int result;
};

struct target_list {
    struct target *items;
    size_t count, capacity;
};

/* A dropped object whose file is removed once the mark that dropped it is durable. */
struct dropped {
    uint8_t id[ID_SIZE];
    uint64_t mark;
    struct dropped *next;
};

struct groups {
    struct volume *v;
    unsigned interval_ms;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;      /* guards everything below and the inode fields that _inode.h says; only shard locks (references) are taken under it */
    pthread_cond_t wake;        /* the group thread: something to do */
    pthread_cond_t progress;    /* everybody else: a group or a commit ended */
    bool stopping, hurry;
    unsigned pulling;           /* threads that wait for the kernel's pages */
    bool waiting_for_kernel;    /* the running group pulls pages in; what others pull in no group waits for */
    uint64_t full_begun, full_ended;        /* full groups */
    int failed;                 /* sticky: the errno that made the volume read-only */
    int last_result;
    struct waiter *waiters;
    struct inode *dirty;        /* doubly linked; each holds a reference */
    struct inode **published;   /* referenced */
    size_t published_count, published_capacity;
    struct dropped *dropped;
    struct groups_stats stats;
};

/* ---- _groups.c ---- */

/* The volume becomes read-only: keeps the first reason and logs it. Group mutex not held. */
void groups_set_failed(struct groups *g, int error, const char *what);
/* No name of it is left, so that nothing can find it after a crash. The inode's lock is not held. */
bool groups_is_deleted(struct inode *inode);
/* Group mutex held; the reference that the list holds is the caller's business. */
void groups_list_dirty(struct groups *g, struct inode *inode);
void groups_unlist_dirty(struct groups *g, struct inode *inode);

/* ---- _groups_run.c ---- */

/* One group: waiters are told its result. full: every dirty inode; last: nothing stays in the active set. */
void groups_run(struct groups *g, struct waiter *waiters, bool full, bool last);

/* ---- _groups_commit.c ---- */

/* For a group: has the kernel hand over its dirty pages of a file, if it may have any or `without_writers`, and drop all of them. Blocks
 * until other threads have answered its WRITEs. */
void groups_pull_pages(struct groups *g, struct inode *inode, bool without_writers);
/* Whether the kernel's pages show what could not be stored; answered once. */
bool groups_take_stale(struct inode *inode);
/* One commit of an object at a time: waits until it is this thread's turn; then ends the turn. */
void groups_own_commit(struct groups *g, struct inode *inode);
void groups_disown_commit(struct groups *g, struct inode *inode, int result);
/* Freezes times and contents together: 0, 1 (nothing to commit) or -errno. */
int groups_begin_commit(struct inode *inode, struct object *o);
/* Commits each target and waits for the barriers; results are in the targets. recorded: metadata name these objects already. */
void groups_commit_objects(struct groups *g, struct target *targets, size_t count, bool recorded);
/* 0, or the error of a target whose new name must not become durable without its contents. */
int groups_check_published(struct groups *g, struct target *targets, size_t count);

#endif
