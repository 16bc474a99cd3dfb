/* One object as a mounted volume uses it, with metadata that is a struct: groups, marks, solo commits, pins and releases follow the
 * rules of _groups.c. Beside the object a plain byte array does the same; each commit keeps a copy of it. */
#ifndef ENCFSD_EXPLORER_SESSION_H
#define ENCFSD_EXPLORER_SESSION_H

#include "_object.h"
#include "explorer_disk.h"

enum { ROOM = 400 * NODE_SIZE, COMMITS = 128 };     /* bytes that an object may have; commits of all sessions that live */

static const uint8_t object_name[ID_SIZE] = {0xab, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* > 0: who allocates now is the test. Volatile, for the compiler believes that malloc does not look at it. */
static volatile int own_memory;

/* ---- What was committed ---- */

struct commit_point {
    struct object_record record;        /* known once the commit ended */
    int parent;                         /* the commit that it was built on, or -1 */
    uint64_t size;
    uint8_t *bytes;
};

static struct commit_point history[COMMITS];
static int commits;

static inline void history_cut(int length)
{
    while (commits > length)
        free(history[--commits].bytes);
}

static inline int history_find(const struct object_record *record)
{
    for (int i = commits; i-- > 0;)
        if (memcmp(history[i].record.salt, record->salt, SALT_SIZE) == 0)
            return i;
    return -1;
}

/* True if `commit` is `ancestor` or was built on it. */
static inline bool descends(int commit, int ancestor)
{
    while (commit > ancestor)
        commit = history[commit].parent;
    return commit == ancestor;
}

/* ---- A place for sessions ---- */

struct place {
    struct object_env env;
    char directory[64];
    struct screen screen;               /* the object's backing file */
};

static inline bool place_open(struct place *p, struct pool *pool, const struct keyring *ring, bool cache_data)
{
    char path[96];

    *p = (struct place){.env = {.pool = pool, .ring = ring, .epoch = 1, .dirty_limit = 4096, .cache_data = cache_data}};
    snprintf(p->directory, sizeof p->directory, "/dev/shm/encfsd-explorer-XXXXXX");
    if (!mkdtemp(p->directory)) {
        snprintf(p->directory, sizeof p->directory, "/tmp/encfsd-explorer-XXXXXX");
        if (!CHECK(mkdtemp(p->directory) != NULL))
            return false;
    }
    snprintf(path, sizeof path, "%s/objects", p->directory);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/objects/ab", p->directory);
    mkdir(path, 0700);
    snprintf(p->screen.path, sizeof p->screen.path, "%s/0102030405060708090a0b0c0d0e0f", path);
    p->screen.fd = -1;
    int fd = open(p->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool fine = CHECK_EQ(blockdir_open(&p->env.dir, fd, false), 0);
    close(fd);
    return fine;
}

static inline void place_close(struct place *p)
{
    char path[96];

    CHECK_EQ(p->env.open_objects, 0);
    CHECK_EQ(p->env.dirty_nodes, 0);
    blockdir_close(p->env.dir);
    screen_close(&p->screen);
    unlink(p->screen.path);
    snprintf(path, sizeof path, "%s/objects/ab", p->directory);
    rmdir(path);
    snprintf(path, sizeof path, "%s/objects", p->directory);
    rmdir(path);
    CHECK_EQ(rmdir(p->directory), 0);
}

/* ---- A session ---- */

/* Rules that a negative control breaks. */
static struct broken {
    bool release_early;                 /* before the mark is durable */
    bool no_pins;
    bool unfenced_folds;                /* solo commits whose tree has no barrier of its own */
} broken;

/* The commit in flight. */
struct flight {
    bool begun, written;
    int point, event;                   /* its commit point; where its events begin */
};

struct session {
    struct place *place;
    struct object *o;
    uint8_t *bytes;                     /* ROOM; zero from size on */
    uint64_t size;
    int durable;                        /* commit of the last durable root, or -1 */
    int acknowledged;                   /* the newest that the caller may rely on, or -1 */

    struct metadata metadata;           /* as the last durable mark has it */
    struct flight flight;
    bool active;
    bool solo_since_group;
    struct {
        bool submitted, named;          /* named: exactly, so its root is pinned */
        struct metadata metadata;
        int commit;
    } mark;
    bool pinned;
    struct object_record pin;

    int error;                          /* of the last step that failed */
};

static inline void note(struct event e)
{
    if (recording)
        trace_add(recording, e);
}

static inline void acknowledge(struct session *s, int commit)
{
    note((struct event){.kind = ACKNOWLEDGED, .commit = commit});
    if (s->acknowledged < 0 || descends(commit, s->acknowledged))
        s->acknowledged = commit;
}

static inline bool session_new(struct session *s, struct place *place)
{
    own_memory++;
    *s = (struct session){.place = place, .durable = -1, .acknowledged = -1, .bytes = calloc(1, ROOM)};
    own_memory--;
    s->error = object_create(&s->o, &place->env, object_name);
    return s->error == 0;
}

/* A new mount, in a later epoch: takes what recovery gives, and then says so in the metadata. On failure s->error says why; it is 0 if
 * the object opened as something that was never committed. */
static inline bool session_mount(struct session *s, struct place *place, const struct metadata *metadata, uint64_t epoch)
{
    struct object_record adopted = metadata->record;

    *s = (struct session){.place = place, .durable = -1, .acknowledged = -1, .metadata = *metadata};
    place->env.epoch = epoch;
    recovering = true;
    s->error = metadata->active_epoch
                   ? object_recover(&s->o, &place->env, object_name, metadata->is_object_0 ? NULL : &metadata->record,
                                    metadata->active_epoch, &adopted)
                   : object_open(&s->o, &place->env, object_name, &metadata->record);
    recovering = false;
    if (s->error)
        return false;
    s->durable = history_find(&adopted);
    if (s->durable < 0) {
        object_close(s->o);
        return false;
    }
    history[s->durable].record = adopted;
    s->acknowledged = s->durable;
    note((struct event){.kind = OPENED, .commit = s->durable});
    if (metadata->is_object_0) {
        s->active = true;
        return true;
    }
    if (!broken.no_pins) {
        object_pin_root(s->o, &adopted);
        s->pin = adopted;
        s->pinned = true;
    }
    s->metadata = (struct metadata){.known = true, .record = adopted};
    note((struct event){.kind = METADATA, .metadata = s->metadata});
    return true;
}

/* Call after session_mount before anything is changed. */
static inline void session_use(struct session *s)
{
    s->bytes = calloc(1, ROOM);
    s->size = history[s->durable].size;
    memcpy(s->bytes, history[s->durable].bytes, s->size);
}

/* The process ends, cleanly or not: nothing more is written. */
static inline void session_end(struct session *s)
{
    object_close(s->o);
    free(s->bytes);
    s->o = NULL;
    s->bytes = NULL;
}

/* ---- Commits ---- */

static inline void snapshot(struct session *s)
{
    if (!CHECK(commits < COMMITS))
        return;
    own_memory++;
    history[commits] = (struct commit_point){.parent = s->durable, .size = s->size, .bytes = malloc(s->size ? s->size : 1)};
    memcpy(history[commits++].bytes, s->bytes, s->size);
    own_memory--;
}

static inline int commit_begin(struct session *s, struct flight *f)
{
    int rc = object_commit_begin(s->o);

    *f = (struct flight){.begun = rc == 0, .point = commits, .event = recording ? recording->count : 0};
    if (rc == 0)
        snapshot(s);
    return rc == 1 ? 0 : rc;
}

/* 0 and s->durable, or -errno: then the object says whether anything is lost. */
static inline int commit_end(struct session *s, struct flight *f, int rc)
{
    struct object_record record;
    bool barrier_failed = false;

    if (!f->begun)
        return rc;
    if (!rc) {
        rc = object_barrier(s->o);
        barrier_failed = rc != 0;
    }
    rc = object_commit_end(s->o, rc, barrier_failed, &record);
    f->begun = false;
    if (!rc) {
        history[f->point].record = record;
        s->durable = f->point;
    }
    /* Of a root that was written in vain nobody tells the salt, and yet recovery may find it. */
    for (int i = f->event; rc && recording && i < recording->count; i++)
        if (recording->event[i].kind == WRITTEN && recording->event[i].slot < ROOT_SLOTS)
            memcpy(history[f->point].record.salt, recording->event[i].page->bytes + 8, SALT_SIZE);
    return rc;
}

/* On error the commit has ended. */
static inline int commit_write(struct session *s, struct flight *f, bool solo)
{
    if (!f->begun || f->written)
        return 0;
    f->written = true;
    int rc = object_commit_write(s->o, solo && !broken.unfenced_folds);
    return rc ? commit_end(s, f, rc) : 0;
}

/* All of a commit that is not done yet. */
static inline int commit(struct session *s, bool solo)
{
    int rc = s->flight.begun ? 0 : commit_begin(s, &s->flight);

    if (!rc)
        rc = commit_write(s, &s->flight, solo);
    return rc ? rc : commit_end(s, &s->flight, 0);
}

static inline bool is_pin(const struct session *s, const struct object_record *record)
{
    return s->pinned && memcmp(s->pin.salt, record->salt, SALT_SIZE) == 0;
}

/* The submitted mark becomes durable. */
static inline void land_mark(struct session *s)
{
    if (!s->mark.submitted)
        return;
    s->mark.submitted = false;
    s->metadata = s->mark.metadata;
    note((struct event){.kind = METADATA, .metadata = s->metadata});
    acknowledge(s, s->mark.commit);
    if (s->pinned && !(s->mark.named && is_pin(s, &s->metadata.record)))
        object_unpin_root(s->o, &s->pin);
    s->pinned = s->mark.named;
    s->pin = s->metadata.record;
    object_release(s->o, &s->metadata.record);
}

static inline int solo(struct session *s);

/* A group up to the submission of its mark. enter: into the active set, for solo commits to come. */
static inline int group(struct session *s, bool enter)
{
    if (s->metadata.is_object_0)
        return solo(s);
    land_mark(s);
    int rc = commit(s, s->active);
    if (rc)
        return rc;
    bool stay = enter || (s->active && s->solo_since_group);
    s->solo_since_group = false;
    s->mark.metadata = (struct metadata){.known = true, .record = history[s->durable].record,
                                          .active_epoch = stay ? s->place->env.epoch : 0};
    s->mark.commit = s->durable;
    s->mark.named = !stay;
    s->mark.submitted = true;
    if (!stay && !is_pin(s, &s->mark.metadata.record))
        object_pin_root(s->o, &s->mark.metadata.record);
    s->active = s->active && stay;      /* who enters is active when the mark is durable */
    if (broken.release_early)
        object_release(s->o, &s->mark.metadata.record);
    return 0;
}

static inline int solo(struct session *s)
{
    if (!s->active) {
        int rc = group(s, true);
        if (rc)
            return rc;
        land_mark(s);
        s->active = true;
        return 0;
    }
    s->solo_since_group = true;
    int rc = commit(s, true);
    if (rc)
        return rc;
    acknowledge(s, s->durable);
    object_release(s->o, &history[s->durable].record);
    return 0;
}

/* A group after which the object is clean and not active, and was idle; it is closed, and opened again in the same mount. */
static inline int reopen(struct session *s)
{
    for (int i = 0; i < 2; i++) {       /* the first may leave it active */
        int rc = group(s, false);
        if (rc)
            return rc;
        land_mark(s);
    }
    if (s->metadata.is_object_0)
        return 0;
    object_close(s->o);
    s->pinned = false;
    int rc = object_open(&s->o, &s->place->env, object_name, &s->metadata.record);
    if (rc) {
        s->o = NULL;
        return rc;
    }
    object_pin_root(s->o, &s->metadata.record);
    s->pin = s->metadata.record;
    s->pinned = true;
    return 0;
}

/* ---- Changes ---- */

static inline int write_both(struct session *s, uint64_t offset, uint64_t size)
{
    static uint32_t stamp;
    static uint8_t buffer[300 * NODE_SIZE];

    if (!CHECK(offset + size <= ROOM && size <= sizeof buffer))
        return -EFBIG;
    for (uint64_t i = 0; i < size; i += NODE_SIZE) {
        uint64_t n = size - i < NODE_SIZE ? size - i : NODE_SIZE;
        stamp++;
        memset(buffer + i, (int)(stamp % 251 + 1), n);
        memcpy(buffer + i, &stamp, n < sizeof stamp ? n : sizeof stamp);
    }
    int rc = object_write(s->o, buffer, size, offset, 0);
    if (!rc) {
        memcpy(s->bytes + offset, buffer, size);
        if (s->size < offset + size)
            s->size = offset + size;
    }
    return rc;
}

static inline int truncate_both(struct session *s, uint64_t size)
{
    int rc = object_truncate(s->o, size, 0);

    if (!rc) {
        if (size < s->size)
            memset(s->bytes + size, 0, s->size - size);
        s->size = size;
    }
    return rc;
}

static inline int punch_both(struct session *s, uint64_t offset, uint64_t size)
{
    int rc = object_punch(s->o, offset, size, 0);

    if (!rc)
        memset(s->bytes + offset, 0, size);     /* zero past the end anyway */
    return rc;
}

/* What the object holds now is what it should. NULL, or what is wrong. Damage that is refused is right if `refusing`. */
static inline const char *compare(struct object *o, const uint8_t *bytes, uint64_t size, bool refusing)
{
    static uint8_t buffer[ROOM];
    struct object_attr attr;

    object_attr(o, &attr);
    if (attr.size != size)
        return "has another size";
    ssize_t n = object_read(o, buffer, ROOM, 0, 0);
    if (n < 0 && refusing) {
        for (uint64_t at = 0; at < size; at += NODE_SIZE) {
            n = object_read(o, buffer, NODE_SIZE, at, 0);
            if (n < 0 ? n != -EIO : memcmp(buffer, bytes + at, (size_t)n) != 0)
                return n < 0 ? "fails to read with an unexpected error" : "gives wrong bytes beside damage";
        }
        return NULL;
    }
    if (n < 0)
        return "cannot be read";
    if ((uint64_t)n != size)
        return "reads short";
    return memcmp(buffer, bytes, size) == 0 ? NULL : "gives wrong bytes";
}

/* ---- Programs ---- */

/* One letter, one step:
 *   a append a node      p append 1000 bytes       o overwrite node 1      q overwrite 100 bytes of node 1
 *   e overwrite the last node
 *   t truncate to half   u truncate up, 3 nodes    h punch a little over one node
 *   f write 57 nodes: more than a delta holds      F write 9 nodes, at once, then node by node up to 60
 *   X write 300 nodes    T truncate to 1000 bytes
 *   w write back         S solo commit             G group commit; its mark becomes durable two steps later
 *   M the mark becomes durable     g group commit whose mark fails
 *   R close when idle, open again
 *   b B the next S, G or g begins here; writes here: what comes between belongs to the commit after it */
static inline int step(struct session *s, char letter)
{
    uint64_t nodes = (s->size + NODE_SIZE - 1) / NODE_SIZE;
    int rc = 0;

    switch (letter) {
    case 'a': return write_both(s, nodes * NODE_SIZE, NODE_SIZE);
    case 'p': return write_both(s, s->size, 1000);
    case 'o': return write_both(s, NODE_SIZE, NODE_SIZE);
    case 'q': return write_both(s, NODE_SIZE + 1000, 100);
    case 'e': return write_both(s, nodes > 0 ? (nodes - 1) * NODE_SIZE : 0, NODE_SIZE);
    case 't': return truncate_both(s, s->size / 2 + 17);
    case 'u': return truncate_both(s, s->size + 3 * NODE_SIZE + 5);
    case 'h': return punch_both(s, 100, 2 * NODE_SIZE);
    case 'f': return write_both(s, NODE_SIZE, 57 * NODE_SIZE);
    case 'F':
        rc = write_both(s, 2 * NODE_SIZE, 9 * NODE_SIZE);
        for (uint64_t i = 11; i < 62 && !rc; i++)
            rc = write_both(s, i * NODE_SIZE, NODE_SIZE);
        return rc;
    case 'X': return write_both(s, NODE_SIZE, 300 * NODE_SIZE);
    case 'T': return truncate_both(s, 1000);
    case 'b': return s->flight.begun ? 0 : commit_begin(s, &s->flight);
    case 'B': return commit_write(s, &s->flight, s->active);
    case 'w': return object_write_back(s->o, 64);
    case 'S': return solo(s);
    case 'G': return group(s, false);
    case 'g': land_mark(s); return commit(s, s->active);
    case 'R': return reopen(s);
    case 'M': land_mark(s); return 0;
    default: CHECK(!"no such step"); return -EINVAL;
    }
}

/* Runs until a step fails. Returns its error (negative errno) or 0. */
static inline int run(struct session *s, const char *program)
{
    int age = 0;

    for (; *program; program++) {
        age = s->mark.submitted ? age + 1 : 0;
        if (age > 2)
            land_mark(s);
        int rc = step(s, *program);
        if (rc)
            return s->error = rc;
    }
    return 0;
}

#endif
