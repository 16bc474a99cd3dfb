/* What a program did to a volume through its door, and what of it a mount must find later: a history of names, versions of each file's
 * contents, and at each moment the oldest and the newest of them that may be there. */
#ifndef ENCFSD_VOLUME_HISTORY_H
#define ENCFSD_VOLUME_HISTORY_H

#include <stdarg.h>
#include <sys/mman.h>

#include "volume_client.h"
#include "volume_world.h"

enum {
    NAMES = 6, HISTORY_FILES = 6, STATES = 24, VERSIONS = 30, HISTORY_NOTES = 64,
    CONTENT_MAX = 640 << 10,
    MANY_NODES = 58,            /* more than a delta holds: the commit folds */
};
static const char *const NAME[NAMES] = {"a", "b", "n0", "n1", "n2", "n3"};

struct version {
    size_t size;
    uint8_t *data;
    int gone;                           /* from this note on it must not be seen any more; 0: it may */
};

/* What may be found if all ends now. */
struct bounds {
    int names_floor, names_max;         /* states of the names */
    int floor[HISTORY_FILES], max[HISTORY_FILES];       /* versions of contents */
};

struct history {
    struct names {
        int file[NAMES];                /* -1: no such name */
        int published[HISTORY_FILES];   /* a file that was renamed must have at least this version with these names */
        int gone;
    } names[STATES];
    int names_count, names_now;
    struct history_file {
        struct version version[VERSIONS];
        int count, now;
        uint64_t ino;
        int touched;                    /* the last state of the names that this file brought about */
    } file[HISTORY_FILES];
    int files;
    struct bounds note[HISTORY_NOTES];
    int notes;
    int focus;                          /* the file that operations work on */
};

/* Version data of all histories since history_free. */
static struct version_data {
    struct version_data *next;
    uint8_t bytes[];
} *version_data;

static inline uint8_t *version_new(size_t size)
{
    struct version_data *d = calloc(1, sizeof *d + size);

    d->next = version_data;
    version_data = d;
    return d->bytes;
}

static inline void history_free(struct version_data *mark)
{
    while (version_data != mark) {
        struct version_data *d = version_data;
        version_data = d->next;
        free(d);
    }
}

/* Writes down the bounds as they are from now on, in the history and in the trace. */
static inline void history_note(struct history *h, struct bounds b)
{
    if (!CHECK(h->notes < HISTORY_NOTES))
        abort();
    h->note[h->notes] = b;
    recorder_note((uint64_t)h->notes++);
}

static inline struct bounds history_bounds(const struct history *h) { return h->note[h->notes - 1]; }

static inline void history_begin(struct history *h)
{
    struct bounds b = history_bounds(h);

    b.names_max = h->names_count - 1;
    for (int f = 0; f < h->files; f++)
        b.max[f] = h->file[f].count - 1;
    history_note(h, b);
}

/* A new state of the names, a copy of the present one. It counts once the operation succeeded. */
static inline struct names *history_names(struct history *h)
{
    if (!CHECK(h->names_count < STATES))
        abort();
    h->names[h->names_count] = h->names[h->names_now];
    h->names[h->names_count].gone = 0;
    return &h->names[h->names_count++];
}

/* A new version of a file: the present contents, cut or extended with zeros. */
static inline struct version *history_version(struct history *h, int file, size_t size)
{
    struct history_file *f = &h->file[file];
    const struct version *old = &f->version[f->now];

    if (!CHECK(f->count < VERSIONS && size <= CONTENT_MAX))
        abort();
    struct version *new = &f->version[f->count++];
    *new = (struct version){.size = size, .data = version_new(size)};
    memcpy(new->data, old->data, old->size < size ? old->size : size);
    return new;
}

static inline int history_name_of(const struct history *h, int file)
{
    for (int i = 0; i < NAMES; i++)
        if (h->names[h->names_now].file[i] == file)
            return i;
    return -1;
}

static inline void history_acknowledge(struct history *h, int file)
{
    struct bounds b = history_bounds(h);

    for (int f = 0; f < h->files; f++)
        if (f == file || file < 0)
            b.floor[f] = h->file[f].now;
    if (file < 0)
        b.names_floor = h->names_now;
    else if (b.names_floor < h->file[file].touched)
        b.names_floor = h->file[file].touched;
    history_note(h, b);
}

static inline void history_acknowledge_names(struct history *h)
{
    struct bounds b = history_bounds(h);

    b.names_floor = h->names_now;
    history_note(h, b);
}

/* Floors as if all that was done were acknowledged. */
static inline struct bounds history_now(const struct history *h)
{
    struct bounds b = {.names_floor = h->names_now};

    for (int f = 0; f < h->files; f++)
        b.floor[f] = h->file[f].now;
    return b;
}

static inline struct bounds raised(struct bounds b, struct bounds to)
{
    b.names_floor = to.names_floor;
    memcpy(b.floor, to.floor, sizeof b.floor);
    return b;
}

/* ---- Operations ---- */

static inline int64_t op_write(struct client *c, struct history *h, uint64_t offset, size_t size)
{
    struct history_file *f = &h->file[h->focus];
    size_t old = f->version[f->now].size, end = offset + size;
    struct version *v = history_version(h, h->focus, end > old ? end : old);

    for (size_t i = 0; i < size; i++)
        v->data[offset + i] = (uint8_t)(random_state = random_state * 6364136223846793005u + 1442695040888963407u, random_state >> 56);
    history_begin(h);
    int64_t rc = client_write(c, f->ino, v->data + offset, size, offset);
    if (rc == (int64_t)size)
        f->now = f->count - 1;
    return rc < 0 ? rc : 0;
}

static inline int64_t op_create(struct client *c, struct history *h)
{
    int name = 0;

    while (name < NAMES && h->names[h->names_now].file[name] >= 0)
        name++;
    if (!CHECK(name < NAMES && h->files < HISTORY_FILES))
        abort();
    int file = h->files++;
    struct names *n = history_names(h);
    n->file[name] = file;
    h->file[file] = (struct history_file){.version = {{.data = version_new(0)}}, .count = 1, .touched = h->names_count - 1};
    history_begin(h);
    int64_t ino = client_create(c, ROOT_INO, NAME[name]);
    if (ino < 0)
        return ino;
    h->names_now = h->names_count - 1;
    h->file[file].ino = (uint64_t)ino;
    h->focus = file;
    return op_write(c, h, 0, 100);
}

static inline int64_t op_rename(struct client *c, struct history *h)
{
    int from = history_name_of(h, h->focus), to = from == 0 ? 1 : 0;

    if (from < 0)
        return 0;
    struct names *n = history_names(h);
    n->file[to] = h->focus;
    n->file[from] = -1;
    n->published[h->focus] = h->file[h->focus].now;
    history_begin(h);
    int64_t rc = client_rename(c, NAME[from], NAME[to]);
    if (rc == 0) {
        h->names_now = h->names_count - 1;
        h->file[h->focus].touched = h->names_now;
    }
    return rc;
}

static inline int64_t op_unlink(struct client *c, struct history *h)
{
    int name = history_name_of(h, h->focus);

    if (name < 0)
        return 0;
    history_names(h)->file[name] = -1;
    history_begin(h);
    int64_t rc = client_unlink(c, ROOT_INO, NAME[name]);
    if (rc == 0)
        h->names_now = h->names_count - 1;
    return rc;
}

static inline int64_t op_truncate(struct client *c, struct history *h)
{
    struct history_file *f = &h->file[h->focus];
    size_t size = f->version[f->now].size / 2;

    history_version(h, h->focus, size);
    history_begin(h);
    int64_t rc = client_truncate(c, f->ino, size);
    if (rc == 0)
        f->now = f->count - 1;
    return rc;
}

/* One letter is one operation. */
static inline int64_t history_run(struct client *c, struct history *h, char op)
{
    const struct history_file *f = &h->file[h->focus];
    size_t size = f->version[f->now].size;
    struct request r = {0};
    struct bounds b;
    int64_t rc = 0;

    switch (op) {
    case 'a': h->focus = 0; return 0;                                   /* the small file */
    case 'b': h->focus = 1; return 0;                                   /* the one with an object */
    case 'C': return op_create(c, h);                                   /* a new file and a small write */
    case 'G': return op_write(c, h, size, 5000);                        /* append: beyond what a row holds */
    case 'O': return op_write(c, h, 0, MANY_NODES * NODE_SIZE);         /* overwrite many nodes */
    case 'W': return op_write(c, h, 0, 3000);                           /* overwrite the beginning */
    case 'T': return op_truncate(c, h);
    case 'R': return op_rename(c, h);                                   /* over another name */
    case 'U': return op_unlink(c, h);
    case 'X':                                                           /* unlink what nobody has open: its object goes */
        rc = op_unlink(c, h);
        request_forget(c->volume, f->ino, UINT32_MAX);
        return rc;
    case 'F':                                                           /* append and fsync */
        rc = op_write(c, h, size, 700);
        if (!rc)
            rc = client_fsync(c, f->ino);
        if (!rc)
            history_acknowledge(h, h->focus);
        return rc;
    case 'D':
        r = (struct request){.op = REQ_FSYNCDIR, .ino = ROOT_INO};
        rc = client_run(c, &r);
        if (!rc)
            history_acknowledge_names(h);
        return rc;
    case 'A':                                                           /* a full group: what was there when it was asked for */
        b = history_now(h);
        rc = client_sync(c);
        if (!rc)
            history_note(h, raised(history_bounds(h), b));
        return rc;
    case 'K':                                                           /* clean unmount; nothing may follow */
        rc = volume_close(c->volume);
        c->volume = NULL;
        if (!rc)
            history_acknowledge(h, -1);
        return rc;
    default:
        abort();
    }
}

/* ---- Mounting ---- */

/* What the control plane does with the state record: the newest authentic one counts. */
static inline bool newest_state(struct state_record *newest)
{
    struct state_slots s = state_now();
    struct keyring *ring;
    uint8_t mac[32];
    bool found = false;

    if (keyring_create(&ring, CLIENT_VID, CLIENT_P))
        abort();
    for (int i = 0; i < 2; i++)
        if (keyring_state_mac(ring, &s.slot[i], offsetof(struct state_record, mac), mac) == 0 &&
            memcmp(mac, s.slot[i].mac, sizeof mac) == 0 && (!found || s.slot[i].sequence > newest->sequence)) {
            *newest = s.slot[i];
            found = true;
        }
    keyring_destroy(ring);
    return found;
}

static inline struct volume_options history_options(void)
{
    struct volume_options o = client_options(place.fd);
    struct state_record state = {0};

    o.state_fd = place.state_fd;
    o.io_threads = o.barrier_threads = 1;
    o.free_list_bytes = 1 << 20;
    o.have_state = newest_state(&state);
    if (o.have_state) {
        o.state_clean = state.flags & 1;
        o.state = (struct object_record){.epoch = state.epoch, .counter = state.counter};
        memcpy(o.state.salt, state.salt, SALT_SIZE);
    }
    return o;
}

static inline int history_mount(struct client *c)
{
    struct volume_options o = history_options();

    recorder_opening(true);
    int rc = client_open(c, &o);
    recorder_opening(false);
    return rc;
}

/* The process dies: nothing that the volume does from now on reaches the disk. */
static inline void history_kill(struct client *c)
{
    struct state_slots s;

    pthread_mutex_lock(&recorder.mutex);
    recorder.dead = true;
    s = state_now();
    pthread_mutex_unlock(&recorder.mutex);
    if (c->volume)
        volume_close(c->volume);
    c->volume = NULL;
    for (int i = 0; i < 2; i++)
        if (pwrite(place.state_fd, &s.slot[i], sizeof s.slot[i], (off_t)i * STATE_SLOT) < 0)
            abort();
    recorder.dead = false;
}

/* The first record, as `encfsd create` writes it. */
static inline void first_state(const struct object_record *root)
{
    struct state_record r = {.magic_version = {'E', 'N', 'C', 'S', 'T', 'A', 1, 0}, .sequence = 1, .epoch = root->epoch,
                             .counter = root->counter};
    struct keyring *ring;

    memcpy(r.volume_id, CLIENT_VID, ID_SIZE);
    memcpy(r.salt, root->salt, SALT_SIZE);
    if (keyring_create(&ring, CLIENT_VID, CLIENT_P) || keyring_state_mac(ring, &r, offsetof(struct state_record, mac), r.mac) ||
        ftruncate(place.state_fd, 2 * STATE_SLOT) || pwrite(place.state_fd, &r, sizeof r, STATE_SLOT) != sizeof r)
        abort();
    keyring_destroy(ring);
}

/* A volume with the small file "a" and "b", which has an object, cleanly unmounted; `h` begins there. */
static inline bool history_volume(struct history *h)
{
    struct volume_options o;
    struct object_record root;
    struct client c = {0};
    static const uint8_t meta[ID_SIZE];

    memset(&place, 0, sizeof place);
    memset(h, 0, sizeof *h);
    place.fd = client_directory(place.path);
    place.state_fd = (int)memfd_create("state", MFD_CLOEXEC);
    if (!CHECK(place.fd >= 0 && place.state_fd >= 0))
        return false;
    file_of(meta);
    recorder_hooks();
    o = client_options(place.fd);
    if (!CHECK_EQ(volume_create(&o, 0, 0, &root), 0))
        return false;
    first_state(&root);
    if (!CHECK_EQ(history_mount(&c), 0)) {
        fprintf(stderr, "%s\n", c.message);
        return false;
    }
    h->names_count = h->notes = 1;
    for (int i = 0; i < NAMES; i++)
        h->names[0].file[i] = -1;
    bool fine = CHECK_EQ(history_run(&c, h, 'C'), 0) && CHECK_EQ(history_run(&c, h, 'C'), 0) && CHECK_EQ(history_run(&c, h, 'G'), 0) &&
                CHECK_EQ(history_run(&c, h, 'G'), 0) && CHECK_EQ(history_run(&c, h, 'K'), 0);
    struct bounds b = history_bounds(h);
    h->note[0] = b;
    h->notes = 1;
    return fine;
}

static inline void history_volume_end(void)
{
    blockio_set_hooks(NULL);
    close(place.fd);
    close(place.state_fd);
    client_remove(place.path);
}

/* ---- Judging ---- */

/* What was wrong with the volume that was found, for messages; empty if nothing. */
static char verdict[400];

static inline bool wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline bool wrong(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(verdict, sizeof verdict, format, arguments);
    va_end(arguments);
    return false;
}

struct found_name {
    int file;                           /* -1: no such name, -2: a file that never was */
    int64_t size;                       /* read; or a negative errno */
    uint32_t versions;                  /* bit v: these are the contents of version v */
};

static inline bool look_at(struct client *c, const struct history *h, int name, struct found_name *found)
{
    static uint8_t buffer[CONTENT_MAX + 1];
    struct attr attr;
    int64_t rc = client_lookup(c, ROOT_INO, NAME[name], &attr);

    *found = (struct found_name){.file = -1};
    if (rc == -ENOENT)
        return true;
    if (rc)
        return wrong("looking up %s: %s", NAME[name], strerror((int)-rc));
    found->file = -2;
    for (int f = 0; f < h->files; f++)
        if (h->file[f].ino == attr.ino)
            found->file = f;
    if (found->file < 0)
        return wrong("%s is inode %llu, which never was", NAME[name], (unsigned long long)attr.ino);
    found->size = client_read(c, attr.ino, buffer, sizeof buffer, 0);
    if (found->size < 0)
        return true;
    if ((uint64_t)found->size != attr.size)
        return wrong("%s: %lld bytes read of %llu", NAME[name], (long long)found->size, (unsigned long long)attr.size);
    const struct history_file *f = &h->file[found->file];
    for (int v = 0; v < f->count; v++)
        if (f->version[v].size == (size_t)found->size && memcmp(f->version[v].data, buffer, f->version[v].size) == 0)
            found->versions |= 1u << v;
    return true;
}

static inline bool still_possible(int gone, int note) { return gone == 0 || gone > note; }

/* The newest of the versions found that may be seen, -1 if there is none. */
static inline int newest_version(const struct history_file *f, uint32_t versions, int max, int note)
{
    for (int v = max; v >= 0; v--)
        if (versions >> v & 1 && still_possible(f->version[v].gone, note))
            return v;
    return -1;
}

/* Whether what was found is state `at` of the names with contents that are not too old, as promised in a note. */
static inline bool matches(const struct history *h, int note, int at, const struct found_name found[NAMES])
{
    const struct names *n = &h->names[at];
    const struct bounds *b = &h->note[note];

    for (int i = 0; i < NAMES; i++) {
        int f = n->file[i];
        if (f != found[i].file)
            return wrong("%s is file %d, not %d (names %d of %d to %d)", NAME[i], found[i].file, f, at, b->names_floor, b->names_max);
        if (f < 0)
            continue;
        if (found[i].size < 0)
            return wrong("%s cannot be read: %s", NAME[i], strerror((int)-found[i].size));
        int floor = b->floor[f] > n->published[f] ? b->floor[f] : n->published[f];
        int v = newest_version(&h->file[f], found[i].versions, b->max[f], note);
        if (v < floor)
            return wrong("%s (file %d): %lld bytes, version %d (of %x), not in %d to %d", NAME[i], f, (long long)found[i].size, v,
                         found[i].versions, floor, b->max[f]);
    }
    return true;
}

/* Compares a mounted volume with what may be there according to a note: 0 or a verdict. *at: the state of the names. */
static inline bool history_matches(struct client *c, const struct history *h, int note, struct found_name found[NAMES], int *at)
{
    wrong("no state of the names from %d to %d is possible", h->note[note].names_floor, h->note[note].names_max);
    for (int i = 0; i < NAMES; i++)
        if (!look_at(c, h, i, &found[i]))
            return false;
    for (*at = h->note[note].names_max; *at >= h->note[note].names_floor; (*at)--)
        if (still_possible(h->names[*at].gone, note) && matches(h, note, *at, found))
            return true;
    return false;
}

/* The history goes on from what was found: nothing else may be seen from now on, neither older nor what was lost. */
static inline void history_serve(struct history *h, int note, const struct found_name found[NAMES], int at)
{
    struct bounds b = h->note[note];
    int now = h->notes;                 /* the note that says so */

    for (int i = 0; i < h->names_count; i++)
        if (i != at && !h->names[i].gone)
            h->names[i].gone = now;
    h->names_now = b.names_floor = b.names_max = at;
    for (int f = 0; f < h->files; f++)
        h->file[f].touched = at;
    for (int i = 0; i < NAMES; i++) {
        int f = h->names[at].file[i];
        if (f < 0)
            continue;
        struct history_file *file = &h->file[f];
        file->now = b.floor[f] = b.max[f] = newest_version(file, found[i].versions, h->note[note].max[f], note);
        for (int v = 0; v < file->count; v++)
            if (v != file->now && !file->version[v].gone)
                file->version[v].gone = now;
    }
    history_note(h, b);
}

static inline void no_progress(void *arg, uint64_t nodes, uint64_t total) { (void)arg, (void)nodes, (void)total; }

static inline void on_damage(void *arg, const char *path, uint64_t offset, uint64_t bytes)
{
    (void)arg;
    wrong("damaged: %s at %llu, %llu bytes", path, (unsigned long long)offset, (unsigned long long)bytes);
}

/* The volume works on: a file can be made, written, synced; it is there after a clean unmount, and, if asked, all is sound. */
static inline bool works_on(struct client *c, bool verify)
{
    static uint8_t data[3000] = "probe", back[sizeof data + 1];
    struct volume_options o;
    struct attr attr;
    int stop = 0;
    int64_t ino = client_create(c, ROOT_INO, "probe"), rc;

    if (ino < 0)
        return wrong("creating a file: %s", strerror((int)-ino));
    rc = client_write(c, (uint64_t)ino, data, sizeof data, 0);
    if (rc != sizeof data)
        return wrong("writing a file: %s", strerror((int)-rc));
    rc = client_fsync(c, (uint64_t)ino);
    if (rc)
        return wrong("fsync of a file: %s", strerror((int)-rc));
    rc = volume_close(c->volume);
    c->volume = NULL;
    if (rc)
        return wrong("unmounting: %s", strerror((int)-rc));
    if (!verify)
        return true;
    o = history_options();
    if (!o.state_clean)
        return wrong("the state record does not say that the volume was unmounted");
    o.read_only = true;
    o.state_fd = -1;
    if (client_open(c, &o))
        return wrong("mounting again: %.300s", c->message);
    bool fine = (client_lookup(c, ROOT_INO, "probe", &attr) == 0 && client_read(c, attr.ino, back, sizeof back, 0) == sizeof data &&
                 memcmp(back, data, sizeof data) == 0) || wrong("the new file is not there");
    rc = volume_verify(c->volume, no_progress, on_damage, NULL, &stop);
    if (rc && fine)
        fine = verdict[0] ? false : wrong("verifying: %s", strerror((int)-rc));
    volume_close(c->volume);
    c->volume = NULL;
    return fine;
}

/* Mounts whatever the directory holds now and judges it. */
static inline bool history_judge(const struct history *h, int note, bool verify)
{
    struct found_name found[NAMES];
    struct client c = {0};
    int at;

    if (history_mount(&c))
        return wrong("it does not mount: %.300s", c.message);
    bool fine = history_matches(&c, h, note, found, &at) && works_on(&c, verify);
    if (c.volume)
        volume_close(c.volume);
    return fine;
}

/* The kernel knows all files, as it does while they are open. */
static inline void history_hold(struct client *c)
{
    for (int i = 0; i < NAMES; i++)
        client_lookup(c, ROOT_INO, NAME[i], NULL);
}

/* Removes the files that came after the first `count`. */
static inline void files_forget(int count)
{
    char path[160];

    for (; place.count > count; place.count--) {
        file_path(place.count - 1, path);
        unlink(path);
        memset(place.id[place.count - 1], 0xff, ID_SIZE);
    }
}

#endif
