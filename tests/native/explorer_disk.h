/* A disk that may lose power, for one backing file: what hooks of _blockio.h saw is kept as a list of events, from which every content
 * that a crash may leave can be made again.
 *
 * A change (write, zero-fill, punch, truncate) is durable once a barrier followed it; until then it is on the disk or not, each
 * slot for itself, and one of them may be torn between two sectors. A write that failed may have happened all the same. What a failed
 * barrier left behind is clean in the page cache, so that no later barrier writes it: it is adrift. The name of a new file is durable once its directory was
 * synced. A process that dies loses nothing: its changes stay in the page cache, as unsynced as they were. */
#ifndef ENCFSD_EXPLORER_DISK_H
#define ENCFSD_EXPLORER_DISK_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_blockio.h"
#include "check.h"

enum { SLOTS = 1024, EVENTS = 4096, SECTOR = 512, SECTORS = NODE_SIZE / SECTOR };

/* ---- Contents ---- */

/* Written once, then shared by all images that hold it. */
struct page {
    struct page *next;                  /* of all pages, to free them */
    uint64_t id;                        /* unique */
    uint8_t bytes[NODE_SIZE];
};

static struct page *all_pages;

static inline struct page *page_new(void)
{
    static uint64_t ids;
    struct page *page = malloc(sizeof *page);

    page->id = ++ids;
    page->next = all_pages;
    return all_pages = page;
}

/* Frees the pages made since `mark` (a value of all_pages). */
static inline void pages_free(struct page *mark)
{
    while (all_pages != mark) {
        struct page *page = all_pages;
        all_pages = page->next;
        free(page);
    }
}

/* Content of a backing file. */
struct image {
    bool exists;
    uint64_t length;                    /* slots */
    const struct page *slot[SLOTS];     /* NULL: zeros */
};

/* ---- Events ---- */

/* What the metadata says about the object. */
struct metadata {
    bool known;
    bool is_object_0;                   /* no record: the newest root of active_epoch or later counts */
    struct object_record record;
    uint64_t active_epoch;              /* 0: not active */
};

enum event_kind {
    WRITTEN, ZEROED, PUNCHED, CUT,      /* changes; a write of many slots is one event a slot */
    CREATED, REMOVED, NAMED,            /* the file; its name became durable */
    BARRIER, FAILED_BARRIER,
    LOST,                               /* what was adrift and is still in the list: the disk never got it */
    METADATA,                           /* a metadata commit became durable */
    ACKNOWLEDGED,                       /* the caller was told that commit `commit` is durable */
    OPENED,                             /* a new process took commit `commit`: nothing else counts any more */
};

struct event {
    enum event_kind kind;
    uint64_t slot, n;
    const struct page *page;            /* WRITTEN */
    bool failed;                        /* WRITTEN: or not, for the call failed */
    struct metadata metadata;
    int commit;
};

struct trace {
    struct event event[EVENTS];
    int count;
};

static inline bool is_change(const struct event *e) { return e->kind <= CUT; }

static inline void trace_add(struct trace *t, struct event event)
{
    if (CHECK(t->count < EVENTS))
        t->event[t->count++] = event;
}

static inline void image_apply(struct image *image, const struct event *e)
{
    uint64_t end = e->slot + e->n;

    switch (e->kind) {
    case WRITTEN:
        image->slot[e->slot] = e->page;
        break;
    case ZEROED:
    case PUNCHED:
        for (uint64_t i = e->slot; i < end; i++)
            image->slot[i] = NULL;
        break;
    default:                            /* CUT */
        for (uint64_t i = e->slot; i < image->length; i++)
            image->slot[i] = NULL;
        image->length = e->slot;
        return;
    }
    if (e->kind != PUNCHED && image->length < end)
        image->length = end;
}

/* ---- A file that shows images ---- */

#define UNKNOWN UINT64_MAX

/* Only what differs from what it shows is written. */
struct screen {
    char path[160];
    int fd;                             /* -1: there is no file */
    uint64_t length;                    /* slots */
    uint64_t shown[SLOTS];              /* id of the page, 0: zeros, or UNKNOWN */
};

/* Others wrote to the file: nothing is known of its content. */
static inline void screen_forget(struct screen *s)
{
    s->length = SLOTS;
    for (int i = 0; i < SLOTS; i++)
        s->shown[i] = UNKNOWN;
}

/* The object itself changed the file. */
static inline void screen_watch(struct screen *s, const struct blockio_event *e)
{
    uint64_t end = e->slot + e->n;

    if (e->call == BIO_TRUNCATE)
        s->length = e->slot;
    if (e->call != BIO_WRITE && e->call != BIO_ZERO && e->call != BIO_PUNCH)
        return;
    for (uint64_t i = s->length; i < e->slot; i++)
        s->shown[i] = 0;
    for (uint64_t i = e->slot; i < end; i++)
        s->shown[i] = UNKNOWN;
    if (e->call != BIO_PUNCH && s->length < end)
        s->length = end;
}

/* ---- Recording ---- */

static struct trace *recording;         /* NULL: nothing is recorded */
static struct screen *watched;          /* NULL, or whose file changes while nothing is recorded */

/* Makes calls fail: the one that comes after `countdown` others, or all from then on. */
static struct {
    bool armed, lasting;
    long countdown;
    int error;
    long struck;                        /* calls that failed */
} fault;

/* If set: called instead of recording the barrier of an object that is being recovered, whose pages are dropped from the cache. */
static void (*on_settle)(void);
static bool recovering;

static inline void record_write(const struct blockio_event *e, bool failed)
{
    uint64_t slot = e->slot;

    for (int i = 0; i < e->iov_count; i++)
        for (size_t at = 0; at < e->iov[i].iov_len; at += NODE_SIZE) {
            struct page *page = page_new();
            memcpy(page->bytes, (const uint8_t *)e->iov[i].iov_base + at, NODE_SIZE);
            trace_add(recording, (struct event){.kind = WRITTEN, .slot = slot++, .n = 1, .page = page, .failed = failed});
        }
}

static inline int disk_before(void *arg, const struct blockio_event *e)
{
    (void)arg;
    if (!fault.armed || (fault.countdown > 0 && fault.countdown--))
        return 0;
    if (!fault.lasting)
        fault.armed = false;
    fault.struck++;
    /* For want of space a page is refused before it is changed: some of many slots may be written, a single one is not. */
    if (recording && e->call == BIO_WRITE && !(fault.error == -ENOSPC && e->n == 1))
        record_write(e, true);
    if (recording && (e->call == BIO_BARRIER || e->call == BIO_SYNCFS))
        trace_add(recording, (struct event){.kind = FAILED_BARRIER});
    return fault.error;
}

static inline void disk_done(void *arg, const struct blockio_event *e)
{
    (void)arg;
    if (!CHECK(e->slot + e->n <= SLOTS))
        return;
    if (!recording) {
        if (watched)
            screen_watch(watched, e);
        return;
    }
    switch (e->call) {
    case BIO_CREATE:
        trace_add(recording, (struct event){.kind = CREATED});
        break;
    case BIO_WRITE:
        record_write(e, false);
        break;
    case BIO_ZERO:
        trace_add(recording, (struct event){.kind = ZEROED, .slot = e->slot, .n = e->n});
        break;
    case BIO_PUNCH:
        trace_add(recording, (struct event){.kind = PUNCHED, .slot = e->slot, .n = e->n});
        break;
    case BIO_TRUNCATE:
        trace_add(recording, (struct event){.kind = CUT, .slot = e->slot});
        break;
    case BIO_BARRIER:
        if (recovering && on_settle)
            on_settle();
        else
            trace_add(recording, (struct event){.kind = BARRIER});
        break;
    case BIO_SYNC_ENTRY:
        trace_add(recording, (struct event){.kind = NAMED});
        break;
    case BIO_SYNCFS:
        trace_add(recording, (struct event){.kind = BARRIER});
        trace_add(recording, (struct event){.kind = NAMED});
        break;
    case BIO_OPEN:
    case BIO_READ:
        break;
    case BIO_REMOVE:
        trace_add(recording, (struct event){.kind = REMOVED});
        break;
    }
}

static inline void disk_hooks(void)
{
    static const struct blockio_hooks hooks = {.before = disk_before, .done = disk_done};

    blockio_set_hooks(&hooks);
}

/* ---- The state of a disk at one moment ---- */

struct world {
    struct image durable;
    const struct event *change[EVENTS]; /* not synced, in order */
    bool adrift[EVENTS];                /* ... nor ever by a barrier */
    int changes;
    bool name_durable;
    struct metadata metadata;
    int floor;                          /* the newest commit that must not be lost; -1: none */
};

static inline void world_new(struct world *w)
{
    memset(w, 0, sizeof *w);
    w->floor = -1;
}

static inline bool is_overwritten(const struct world *w, int i)
{
    for (int k = i + 1; k < w->changes; k++)
        if (!w->adrift[k] && (w->change[k]->kind == CUT ? w->change[k]->slot <= w->change[i]->slot
                                                        : w->change[k]->slot <= w->change[i]->slot
                                                              && w->change[i]->slot < w->change[k]->slot + w->change[k]->n))
            return true;
    return false;
}

static inline void world_make_durable(struct world *w)
{
    int left = 0;

    for (int i = 0; i < w->changes; i++) {
        const struct event *e = w->change[i];
        if (!w->adrift[i] || e->kind != WRITTEN)
            image_apply(&w->durable, e);
        else if (!is_overwritten(w, i)) {
            w->change[left] = e;
            w->adrift[left++] = true;
        }
    }
    w->changes = left;
}

static inline void world_change(struct world *w, const struct event *e)
{
    w->adrift[w->changes] = e->failed;
    w->change[w->changes++] = e;
}

/* What the page cache holds. */
static inline void world_cached(const struct world *w, struct image *image)
{
    *image = w->durable;
    for (int i = 0; i < w->changes; i++)
        if (!w->change[i]->failed)
            image_apply(image, w->change[i]);
}

/* ---- Showing ---- */

static inline bool screen_show(struct screen *s, const struct image *image)
{
    static const uint8_t zeros[NODE_SIZE];

    if (!image->exists) {
        if (s->fd >= 0)
            close(s->fd);
        s->fd = -1;
        return unlink(s->path) == 0 || CHECK_EQ(errno, ENOENT);
    }
    if (s->fd < 0) {
        s->fd = open(s->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (!CHECK(s->fd >= 0))
            return false;
        screen_forget(s);
    }
    bool fine = ftruncate(s->fd, (off_t)(image->length * NODE_SIZE)) == 0;
    for (uint64_t i = s->length; i < image->length; i++)
        s->shown[i] = 0;
    for (uint64_t i = 0; i < image->length && fine; i++) {
        uint64_t id = image->slot[i] ? image->slot[i]->id : 0;
        if (s->shown[i] != id)
            fine = pwrite(s->fd, id ? image->slot[i]->bytes : zeros, NODE_SIZE, (off_t)(i * NODE_SIZE)) == NODE_SIZE;
        s->shown[i] = id;
    }
    s->length = image->length;
    return CHECK(fine);
}

static inline void screen_close(struct screen *s)
{
    if (s->fd >= 0)
        close(s->fd);
}

#endif
