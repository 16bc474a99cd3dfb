/* What tests of objects share: an environment in a directory of its own, and a plain byte array that does the same as an object.
 * Include it once. */
#ifndef ENCFSD_OBJECT_FIXTURE_H
#define ENCFSD_OBJECT_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_geometry.h"
#include "_object.h"
#include "check.h"

static const uint8_t object_name[ID_SIZE] = {0xab, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct fixture {
    struct object_env env;
    struct object *o;
    struct object_record record;        /* of the last commit */
    char directory[64], file[160];      /* the source directory, the object's backing file */
};

struct pool_size {
    size_t bytes, reserve;
};
/* Of the pools that fixture_open makes. */
static enum pool_strategy fixture_strategy;
static enum pool_overflow fixture_overflow;
static const struct pool_size ROOMY = {64 << 20, 64}, HANDFUL = {0, 8}, NOTHING = {0, 0};

/* An environment with one new object, in epoch 1. */
static inline bool fixture_open(struct fixture *f, struct pool_size pool, unsigned threads)
{
    static const uint8_t volume[ID_SIZE] = {7}, key[KEY_SIZE] = {42};
    static bool ready;
    const struct pool_options options = {.bytes = pool.bytes, .reserve_nodes = pool.reserve, .strategy = fixture_strategy,
                                         .overflow = fixture_overflow, .evict = object_evict};
    char reason[200];
    struct keyring *ring;

    if (!ready && !CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return false;
    ready = true;
    *f = (struct fixture){.env = {.epoch = 1, .dirty_limit = 4096}};
    /* In memory where there is such a place: these tests are about content, and barriers of a busy disk take long. */
    snprintf(f->directory, sizeof f->directory, "%s/encfsd-object-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!CHECK(mkdtemp(f->directory) != NULL))
        return false;
    snprintf(f->file, sizeof f->file, "%s/objects/ab/0102030405060708090a0b0c0d0e0f", f->directory);
    int fd = open(f->directory, O_RDONLY | O_DIRECTORY);
    bool fine = CHECK_EQ(blockdir_open(&f->env.dir, fd, false), 0)
                && CHECK_EQ(pool_create(&f->env.pool, &options, NULL, 0), 0)
                && CHECK_EQ(keyring_create(&ring, volume, key), 0)
                && (threads == 0 || CHECK_EQ(workers_create(&f->env.workers, threads), 0))
                && CHECK_EQ(random_bytes(f->env.instance, ID_SIZE), 0);
    close(fd);
    f->env.ring = ring;
    return fine && CHECK_EQ(object_create(&f->o, &f->env, object_name), 0);
}

static inline int fixture_remove_file(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* Closes all; each node must have come back. */
static inline void fixture_close(struct fixture *f)
{
    object_close(f->o);
    CHECK_EQ(f->env.dirty_nodes, 0);
    CHECK_EQ(f->env.open_objects, 0);
    if (f->env.workers)
        workers_destroy(f->env.workers);
    CHECK_EQ(pool_audit(f->env.pool), 0);
    CHECK_EQ(pool_destroy(f->env.pool), 0);
    keyring_destroy((struct keyring *)f->env.ring);
    blockdir_close(f->env.dir);
    nftw(f->directory, fixture_remove_file, 16, FTW_DEPTH | FTW_PHYS);
}

static inline bool fixture_commit(struct fixture *f, bool solo)
{
    return CHECK_EQ(object_commit(f->o, solo, &f->record), 0);
}

/* Opens the last committed root in a new mount. What was dirty is lost. */
static inline bool fixture_reopen(struct fixture *f)
{
    object_close(f->o);
    f->o = NULL;
    f->env.epoch++;
    return CHECK_EQ(object_open(&f->o, &f->env, object_name, &f->record), 0);
}

static inline uint64_t fixture_slots(const struct fixture *f)
{
    struct stat st;

    return CHECK_EQ(stat(f->file, &st), 0) ? (uint64_t)st.st_size / NODE_SIZE : 0;
}

/* Turns over bits of one byte of the backing file. */
static inline void fixture_flip(const struct fixture *f, uint64_t offset, uint8_t bits)
{
    uint8_t byte;
    int fd = open(f->file, O_RDWR);

    CHECK_EQ(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= bits;
    CHECK_EQ(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

/* ---- The model ---- */

struct model {
    uint8_t *bytes;                     /* zero from size on */
    uint8_t *present;                   /* by node: it is no hole */
    uint64_t size, room;                /* bytes; room is a multiple of NODE_SIZE */
};

static inline void model_open(struct model *m, uint64_t room)
{
    *m = (struct model){calloc(1, room), calloc(1, room / NODE_SIZE), 0, room};
}

static inline void model_close(struct model *m)
{
    free(m->bytes);
    free(m->present);
}

static inline void model_copy(struct model *to, const struct model *from)
{
    memcpy(to->bytes, from->bytes, from->room);
    memcpy(to->present, from->present, from->room / NODE_SIZE);
    to->size = from->size;
}

static inline void model_write(struct model *m, const uint8_t *bytes, uint64_t size, uint64_t offset)
{
    if (size == 0)
        return;
    memcpy(m->bytes + offset, bytes, size);
    for (uint64_t i = offset / NODE_SIZE; i < nodes_for(offset + size); i++)
        m->present[i] = 1;
    if (offset + size > m->size)
        m->size = offset + size;
}

static inline void model_zero(struct model *m, uint64_t from, uint64_t to)
{
    memset(m->bytes + from, 0, to - from);
    for (uint64_t i = nodes_for(from); i < to / NODE_SIZE; i++)
        m->present[i] = 0;
}

static inline void model_truncate(struct model *m, uint64_t size)
{
    if (size < m->size)
        model_zero(m, size, nodes_for(m->size) * NODE_SIZE);
    m->size = size;
}

static inline void model_punch(struct model *m, uint64_t offset, uint64_t size)
{
    uint64_t end = offset + size >= m->size ? nodes_for(m->size) * NODE_SIZE : offset + size;

    if (offset < end)
        model_zero(m, offset, end);
}

static inline uint64_t model_nodes(const struct model *m)
{
    uint64_t n = 0;

    for (uint64_t i = 0; i < m->room / NODE_SIZE; i++)
        n += m->present[i];
    return n;
}

/* The whole object says what the model says. */
static inline bool model_agrees(const struct model *m, struct object *o)
{
    struct object_attr attr;
    uint8_t *bytes = malloc(m->size + 1);

    object_attr(o, &attr);
    bool fine = CHECK_EQ(attr.size, m->size) && CHECK_EQ(object_read(o, bytes, m->size + 1, 0, 0), m->size)
                && CHECK_MEM_EQ(bytes, m->bytes, m->size);
    free(bytes);
    return fine;
}

/* ---- Bytes ---- */

static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Bytes that differ from node to node and from seed to seed. */
static inline void fill(uint8_t *bytes, size_t size, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;

    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = next_random(&state);
        memcpy(bytes + i, &word, size - i < 8 ? size - i : 8);
    }
}

#endif
