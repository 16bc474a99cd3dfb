/* What the drivers share: a clock, threads, an environment for objects, and how a sample is printed. A driver prints one line of
 * JSON a sample; core.py pairs the two sides of each round and computes medians. Whatever fails ends the driver. */
#ifndef ENCFSD_BENCH_MEASURE_H
#define ENCFSD_BENCH_MEASURE_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "_object.h"

enum { MIB = 1 << 20 };

static const uint8_t bench_id[ID_SIZE] = {0xbe, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- Errors ---- */

static inline void die(const char *what, long rc)
{
    fprintf(stderr, "%s: %s\n", what, strerror((int)(rc < 0 ? -rc : errno)));
    exit(1);
}

/* Ends the driver if a call returned a negative errno, or -1 and errno. */
static inline long must(const char *what, long rc)
{
    if (rc < 0)
        die(what, rc == -1 ? 0 : rc);
    return rc;
}

/* ---- Time and chance ---- */

static inline double now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* xorshift64*: the same sequence for both sides of a round. */
static inline uint64_t chance(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dULL;
}

/* ---- Samples ---- */

/* `side`: "encfsd" or what it is compared with. `unit`: "MiB/s", "us", ... */
static inline void sample(const char *question, const char *side, int round, const char *unit, double value)
{
    printf("{\"question\": \"%s\", \"side\": \"%s\", \"round\": %d, \"unit\": \"%s\", \"value\": %.4f}\n", question, side, round,
           unit, value);
    fflush(stdout);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Mean and 99th percentile of the times of single operations, in ns. */
static inline void latencies(const char *question, const char *side, int round, double *ns, size_t n)
{
    char tail[100];
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += ns[i];
    qsort(ns, n, sizeof *ns, compare_doubles);
    snprintf(tail, sizeof tail, "%s, p99", question);
    sample(question, side, round, "us", sum / (double)n / 1e3);
    sample(tail, side, round, "us", ns[n * 99 / 100] / 1e3);
}

/* ---- Threads ---- */

/* Runs fn(arg, i) for i in 0..n-1 on as many threads as CPUs: the caller and `helpers`, which are one fewer. Their number counts for
 * both sides alike, above all on a machine that others use too. */
struct spent { double wall, cpu; };     /* ns; cpu: of all threads of the process */

static inline struct spent spent_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (struct spent){now_ns(), (double)t.tv_sec * 1e9 + (double)t.tv_nsec};
}

static inline struct spent spent_since(struct spent start)
{
    struct spent now = spent_now();

    return (struct spent){now.wall - start.wall, now.cpu - start.cpu};
}

static inline struct workers *make_helpers(void)
{
    struct workers *helpers = NULL;

    if (get_nprocs() > 1)
        must("workers_create", workers_create(&helpers, (unsigned)get_nprocs() - 1));
    return helpers;
}

/* ---- Memory and files ---- */

/* Memory that does not compress and lies in small pages, as an application's does. */
static inline uint8_t *noise(size_t size)
{
    uint8_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t seed = 42;

    if (p == MAP_FAILED)
        die("mmap", -ENOMEM);
    for (size_t i = 0; i < size / sizeof seed; i++)
        ((uint64_t *)(void *)p)[i] = chance(&seed);
    return p;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static inline void remove_tree(const char *path) { nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* ---- Objects ---- */

struct bench {
    struct object_env env;
    char directory[200];
    int fd;                             /* of the directory, for files beside the objects */
};

/* An environment as a mount with a free list of `pool_bytes` has it, in a new directory below `base`. Its workers help the driver
 * too, so that there are never more threads than CPUs. */
static inline void bench_open(struct bench *b, const char *base, size_t pool_bytes)
{
    static const uint8_t volume[ID_SIZE] = {7}, key[KEY_SIZE] = {42};
    char reason[200];
    struct keyring *ring;

    memset(b, 0, sizeof *b);
    must("seal_setup", seal_setup(SEAL_AUTO, reason, sizeof reason));
    fprintf(stderr, "sealing: %s\n", reason);
    snprintf(b->directory, sizeof b->directory, "%.150s/encfsd-bench-XXXXXX", base);
    if (!mkdtemp(b->directory))
        die(base, 0);
    b->fd = (int)must(b->directory, open(b->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    b->env.epoch = 1;
    b->env.dirty_limit = pool_bytes / 2 / NODE_SIZE;
    must("blockdir_open", blockdir_open(&b->env.dir, b->fd, false));
    must("pool_create", pool_create(&b->env.pool, &(struct pool_options){.bytes = pool_bytes, .reserve_nodes = 64,
                                                                         .evict = object_evict}, reason, sizeof reason));
    must("keyring_create", keyring_create(&ring, volume, key));
    b->env.ring = ring;
    b->env.workers = make_helpers();
    must("random_bytes", random_bytes(b->env.instance, ID_SIZE));
}

static inline void bench_close(struct bench *b)
{
    workers_destroy(b->env.workers);
    pool_destroy(b->env.pool);
    keyring_destroy((struct keyring *)b->env.ring);
    blockdir_close(b->env.dir);
    close(b->fd);
    remove_tree(b->directory);
}

/* Commits, and lets older roots go, as a group does. */
static inline void commit(struct object *o, bool solo)
{
    struct object_record record;

    must("object_commit", object_commit(o, solo, &record));
    if (!solo)
        object_release(o, &record);
}

#endif
