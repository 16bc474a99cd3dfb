/* A source directory that may lose power: what the hooks of _blockio.h saw of all backing files is kept as a list of events, from which
 * every directory that a crash may leave can be made again.
 *
 * A change of a file (write, zero-fill, punch, truncate) is durable once a barrier of that file began after it and ended well; until
 * then it is on the disk or not, each slot for itself, and one may be torn between two sectors. The name of a new file is durable once
 * its entry was synced; a removed name may come back until then. A process that dies loses nothing of this: its changes stay in the
 * page cache, as unsynced as they were. The trusted state record is other storage: each event remembers its two slots. */
#ifndef ENCFSD_VOLUME_WORLD_H
#define ENCFSD_VOLUME_WORLD_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_blockio.h"
#include "_seal.h"
#include "_volume_internal.h"
#include "check.h"

enum { FILES = 48, SLOTS = 768, EVENTS = 4096, PENDING = 1024, SECTOR = 512, STATE_SLOT = 4096 };

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
    uint64_t length;                    /* slots */
    const struct page *slot[SLOTS];     /* NULL: zeros */
};

/* The two slots of the state record file. */
struct state_slots {
    struct state_record slot[2];
};

enum event_kind {
    WRITTEN, ZEROED, PUNCHED, CUT,      /* changes; a write of many slots is one event a slot */
    CREATED, NAMED, REMOVED,            /* a file, the durability of its name, its removal */
    BARRIER, ALL_SYNCED,
    NOTED,                              /* the test made note number n: what was begun, what was acknowledged */
};

struct event {
    enum event_kind kind;
    int file;
    uint64_t slot, n;
    int since;                          /* BARRIER, ALL_SYNCED, NAMED: events from this one on are not covered */
    const struct page *page;            /* WRITTEN */
    struct state_slots state;           /* when it happened */
};

struct trace {
    struct event event[EVENTS];
    int count;
};

static inline bool is_change(const struct event *e) { return e->kind <= CUT; }

/* ---- The files of the directory, by number ---- */

static struct {
    uint8_t id[FILES][ID_SIZE];
    int count;
    char path[64];                      /* of the directory */
    int fd, state_fd;
} place;

static inline int file_of(const uint8_t id[ID_SIZE])
{
    for (int i = 0; i < place.count; i++)
        if (memcmp(place.id[i], id, ID_SIZE) == 0)
            return i;
    if (!CHECK(place.count < FILES))
        abort();
    memcpy(place.id[place.count], id, ID_SIZE);
    return place.count++;
}

static inline void file_path(int file, char path[160])
{
    static const uint8_t meta[ID_SIZE];
    const uint8_t *id = place.id[file];
    int n;

    if (memcmp(id, meta, ID_SIZE) == 0) {
        snprintf(path, 160, "%s/meta", place.path);
        return;
    }
    n = snprintf(path, 160, "%s/objects/%02x/", place.path, id[0]);
    for (int i = 1; i < ID_SIZE; i++)
        n += snprintf(path + n, (size_t)(160 - n), "%02x", id[i]);
}

static inline struct state_slots state_now(void)
{
    struct state_slots s = {0};

    for (int i = 0; i < 2; i++)
        if (pread(place.state_fd, &s.slot[i], sizeof s.slot[i], (off_t)i * STATE_SLOT) < 0)
            abort();
    return s;
}

/* ---- Recording ---- */

/* Ways in which the recorder may not see what happens: negative controls. */
enum blindness { SEES_ALL, BLIND_META_BARRIER, BLIND_OBJECT_BARRIER, BLIND_NAMES, BLIND_RECOVERY };

static struct {
    pthread_mutex_t mutex;              /* guards everything here: hooks run on all threads of the volume */
    struct trace *trace;                /* NULL: nothing is recorded */
    enum blindness blind;
    bool opening;                       /* a mount is recovering */
    bool dead;                          /* the process is dead: no call reaches the disk any more */
    /* faults */
    bool armed, lasting;
    long countdown, calls, struck;      /* the call that comes after `countdown` others fails, or all from then on */
    int error;
    enum blockio_call struck_call;
    /* NULL, or called outside the mutex: before each call, with its result as the call's if not 0; after each barrier */
    int (*_Atomic interfere)(const struct blockio_event *e);
    void (*_Atomic barrier_done)(const uint8_t *id);
} recorder = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local int barrier_since;

static inline void recorder_add(struct event event)
{
    if (!recorder.trace)
        return;
    if (!CHECK(recorder.trace->count < EVENTS))
        abort();
    event.state = state_now();
    recorder.trace->event[recorder.trace->count++] = event;
}

static inline int recorder_before(void *arg, const struct blockio_event *e)
{
    int rc = 0;

    (void)arg;
    pthread_mutex_lock(&recorder.mutex);
    recorder.calls++;
    barrier_since = recorder.trace ? recorder.trace->count : 0;
    if (recorder.dead) {
        rc = -EIO;
    } else if (recorder.armed && recorder.countdown-- <= 0) {
        recorder.armed = recorder.lasting;
        recorder.struck++;
        recorder.struck_call = e->call;
        rc = recorder.error;
    }
    pthread_mutex_unlock(&recorder.mutex);
    int (*interfere)(const struct blockio_event *e) = recorder.interfere;
    return rc || !interfere ? rc : interfere(e);
}

static inline void recorder_write(const struct blockio_event *e, int file)
{
    uint64_t slot = e->slot;

    for (int i = 0; i < e->iov_count; i++)
        for (size_t at = 0; at < e->iov[i].iov_len; at += NODE_SIZE) {
            struct page *page = page_new();
            memcpy(page->bytes, (const uint8_t *)e->iov[i].iov_base + at, NODE_SIZE);
            recorder_add((struct event){.kind = WRITTEN, .file = file, .slot = slot++, .n = 1, .page = page});
        }
}

static inline void recorder_done(void *arg, const struct blockio_event *e)
{
    static const uint8_t meta[ID_SIZE];
    bool blind_barrier;

    (void)arg;
    if (e->call == BIO_READ || e->call == BIO_OPEN)
        return;
    pthread_mutex_lock(&recorder.mutex);
    int file = e->id ? file_of(e->id) : -1;
    if (!CHECK(e->slot + e->n <= SLOTS))
        abort();
    blind_barrier = e->id && recorder.blind == (memcmp(e->id, meta, ID_SIZE) == 0 ? BLIND_META_BARRIER : BLIND_OBJECT_BARRIER);
    blind_barrier |= recorder.blind == BLIND_RECOVERY && recorder.opening;
    switch (e->call) {
    case BIO_CREATE: recorder_add((struct event){.kind = CREATED, .file = file}); break;
    case BIO_WRITE: if (recorder.trace) recorder_write(e, file); break;
    case BIO_ZERO: recorder_add((struct event){.kind = ZEROED, .file = file, .slot = e->slot, .n = e->n}); break;
    case BIO_PUNCH: recorder_add((struct event){.kind = PUNCHED, .file = file, .slot = e->slot, .n = e->n}); break;
    case BIO_TRUNCATE: recorder_add((struct event){.kind = CUT, .file = file, .slot = e->slot}); break;
    case BIO_BARRIER:
        if (!blind_barrier)
            recorder_add((struct event){.kind = BARRIER, .file = file, .since = barrier_since});
        break;
    case BIO_SYNC_ENTRY:
        if (recorder.blind != BLIND_NAMES)
            recorder_add((struct event){.kind = NAMED, .file = file, .since = barrier_since});
        break;
    case BIO_SYNCFS: recorder_add((struct event){.kind = ALL_SYNCED, .since = barrier_since}); break;
    case BIO_REMOVE: recorder_add((struct event){.kind = REMOVED, .file = file}); break;
    default: break;
    }
    pthread_mutex_unlock(&recorder.mutex);
    void (*barrier_done)(const uint8_t *id) = recorder.barrier_done;
    if (e->call == BIO_BARRIER && barrier_done)
        barrier_done(e->id);
}

static inline void recorder_note(uint64_t number)
{
    pthread_mutex_lock(&recorder.mutex);
    recorder_add((struct event){.kind = NOTED, .n = number});
    pthread_mutex_unlock(&recorder.mutex);
}

static inline void recorder_opening(bool opening)
{
    pthread_mutex_lock(&recorder.mutex);
    recorder.opening = opening;
    pthread_mutex_unlock(&recorder.mutex);
}

static inline void recorder_hooks(void)
{
    static const struct blockio_hooks hooks = {.before = recorder_before, .done = recorder_done};

    blockio_set_hooks(&hooks);
}

/* ---- The state of the directory at one moment ---- */

struct file_state {
    bool exists, named, removed;        /* in the cache; its name is durable; it was removed, which may not be durable */
    struct image durable;
    int pending[PENDING];               /* numbers of events not synced, in order */
    int pending_count;
};

struct world {
    struct file_state file[FILES];
    const struct trace *trace;          /* where `pending` points to */
    struct state_slots state, state_after;      /* the state record; and as it is at the next event: both are possible */
    int note;                           /* the last note */
};

static inline void image_apply(struct image *image, const struct event *e, const struct page *page)
{
    uint64_t end = e->slot + e->n;

    switch (e->kind) {
    case WRITTEN:
        image->slot[e->slot] = page;
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

static inline void file_synced(const struct world *w, struct file_state *f, int since)
{
    int kept = 0;

    for (int i = 0; i < f->pending_count; i++) {
        const struct event *e = &w->trace->event[f->pending[i]];
        if (f->pending[i] < since)
            image_apply(&f->durable, e, e->page);
        else
            f->pending[kept++] = f->pending[i];
    }
    f->pending_count = kept;
}

/* Makes event number `at` of the world's trace happen. */
static inline void world_step(struct world *w, int at)
{
    const struct event *e = &w->trace->event[at];
    struct file_state *f = &w->file[e->file < 0 ? 0 : e->file];

    if (is_change(e)) {
        if (!CHECK(f->pending_count < PENDING))
            abort();
        f->pending[f->pending_count++] = at;
    }
    switch (e->kind) {
    case CREATED: f->exists = true; f->named = f->removed = false; break;
    case NAMED: f->named = true; break;
    case REMOVED: f->removed = f->exists; break;
    case BARRIER: file_synced(w, f, e->since); break;
    case ALL_SYNCED:
        for (int i = 0; i < FILES; i++) {
            file_synced(w, &w->file[i], e->since);
            w->file[i].named = w->file[i].exists;
            if (w->file[i].removed)
                w->file[i].exists = w->file[i].named = w->file[i].removed = false;
        }
        break;
    case NOTED: w->note = (int)e->n; break;
    default: break;
    }
    w->state = e->state;
    w->state_after = at + 1 < w->trace->count ? w->trace->event[at + 1].state : e->state;
}

/* ---- Crash states ---- */

/* A directory as a crash leaves it. */
struct crash {
    bool exists[FILES];
    struct image image[FILES];
    struct state_slots state;
    uint64_t hash;
};

static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline void hash_add(uint64_t *hash, uint64_t value) { *hash = (*hash ^ value) * 1099511628211u + (value >> 29); }

static inline void crash_hash(struct crash *c)
{
    c->hash = 14695981039346656037u;
    for (int i = 0; i < place.count; i++)
        if (c->exists[i]) {
            hash_add(&c->hash, (uint64_t)i + 1);
            hash_add(&c->hash, c->image[i].length);
            for (uint64_t s = 0; s < c->image[i].length; s++)
                hash_add(&c->hash, c->image[i].slot[s] ? c->image[i].slot[s]->id : 0);
        }
    hash_add(&c->hash, c->state.slot[0].sequence);
    hash_add(&c->hash, c->state.slot[1].sequence);
}

/* The process died: everything is in the page cache. */
static inline void crash_killed(const struct world *w, struct crash *c)
{
    for (int i = 0; i < place.count; i++) {
        const struct file_state *f = &w->file[i];
        c->exists[i] = f->exists && !f->removed;
        if (!c->exists[i])
            continue;
        c->image[i] = f->durable;
        for (int k = 0; k < f->pending_count; k++)
            image_apply(&c->image[i], &w->trace->event[f->pending[k]], w->trace->event[f->pending[k]].page);
    }
    c->state = w->state;
    crash_hash(c);
}

/* How many yes-or-no questions a power loss leaves open. */
static inline int world_choices(const struct world *w)
{
    int n = 0;

    for (int i = 0; i < place.count; i++)
        n += w->file[i].exists ? w->file[i].pending_count + (!w->file[i].named || w->file[i].removed) : 0;
    return n;
}

/* Half of the new page, the rest of the old one, at a sector boundary. */
static inline const struct page *torn_page(const struct image *image, const struct event *e)
{
    static const uint8_t zeros[NODE_SIZE];
    struct page *torn = page_new();
    const uint8_t *old = image->slot[e->slot] ? image->slot[e->slot]->bytes : zeros;
    size_t cut = SECTOR * (1 + random_next() % (NODE_SIZE / SECTOR - 1));
    bool head = random_next() & 1;

    memcpy(torn->bytes, head ? e->page->bytes : old, cut);
    memcpy(torn->bytes + cut, (head ? old : e->page->bytes) + cut, NODE_SIZE - cut);
    return torn;
}

/* Power is lost; answer(arg, k) says whether the k-th open question went well. `torn`: which of the writes that did not reach the disk
 * did so in part, -1 none. */
static inline void crash_power(const struct world *w, struct crash *c, bool (*answer)(const void *arg, int k), const void *arg, int torn)
{
    int question = 0;

    for (int i = 0; i < place.count; i++) {
        const struct file_state *f = &w->file[i];
        c->exists[i] = f->exists;
        if (!f->exists)
            continue;
        if (!f->named || f->removed) {
            bool well = answer(arg, question++);
            c->exists[i] = f->removed ? !well : well;
        }
        c->image[i] = f->durable;
        for (int k = 0; k < f->pending_count; k++, question++) {
            const struct event *e = &w->trace->event[f->pending[k]];
            if (answer(arg, question))
                image_apply(&c->image[i], e, e->page);
            else if (question == torn && e->kind == WRITTEN)
                image_apply(&c->image[i], e, torn_page(&c->image[i], e));
        }
    }
    c->state = w->state;
    crash_hash(c);
}

/* Makes the directory look like `c`: the next process finds it so. */
static inline void crash_show(const struct crash *c)
{
    static const uint8_t zeros[NODE_SIZE];
    char path[160];

    for (int i = 0; i < place.count; i++) {
        file_path(i, path);
        if (!c->exists[i]) {
            unlink(path);
            continue;
        }
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 && errno == ENOENT) {
            char shard[160];
            snprintf(shard, sizeof shard, "%s/objects", place.path);
            mkdir(shard, 0700);
            memcpy(shard, path, sizeof shard);
            *strrchr(shard, '/') = 0;
            mkdir(shard, 0700);
            fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        }
        if (fd < 0 || ftruncate(fd, (off_t)(c->image[i].length * NODE_SIZE)))
            abort();
        for (uint64_t s = 0; s < c->image[i].length; s++)
            if (pwrite(fd, c->image[i].slot[s] ? c->image[i].slot[s]->bytes : zeros, NODE_SIZE, (off_t)(s * NODE_SIZE)) != NODE_SIZE)
                abort();
        close(fd);
    }
    for (int i = 0; i < 2; i++)
        if (pwrite(place.state_fd, &c->state.slot[i], sizeof c->state.slot[i], (off_t)i * STATE_SLOT) < 0)
            abort();
}

/* The world that begins where a crash ended: nothing is in flight. */
static inline void world_after(struct world *w, const struct crash *c, const struct trace *trace)
{
    memset(w, 0, sizeof *w);
    for (int i = 0; i < place.count; i++) {
        w->file[i].exists = w->file[i].named = c->exists[i];
        w->file[i].durable = c->image[i];
    }
    w->state = w->state_after = c->state;
    w->trace = trace;
}

/* Takes the files as they are now, all durable. */
static inline void crash_take(struct crash *c)
{
    char path[160];
    struct stat st;

    memset(c, 0, sizeof *c);
    for (int i = 0; i < place.count; i++) {
        file_path(i, path);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        c->exists[i] = fd >= 0;
        if (fd < 0)
            continue;
        if (fstat(fd, &st) || !CHECK(st.st_size / NODE_SIZE <= SLOTS))
            abort();
        c->image[i].length = (uint64_t)st.st_size / NODE_SIZE;
        for (uint64_t s = 0; s < c->image[i].length; s++) {
            struct page *page = page_new();
            if (pread(fd, page->bytes, NODE_SIZE, (off_t)(s * NODE_SIZE)) != NODE_SIZE)
                abort();
            c->image[i].slot[s] = page;
        }
        close(fd);
    }
    c->state = state_now();
    crash_hash(c);
}

#endif
