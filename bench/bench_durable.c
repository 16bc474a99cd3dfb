/* What durability costs on a real disk, beside a raw file on the same file system.
 *
 *     bench_durable DIRECTORY MIB OPERATIONS ROUNDS
 *
 * Synced append and random overwrite: 4 KiB and a barrier, one operation after the other; raw is pwrite and fdatasync. Raw and
 * encfsd take turns every few operations, because a shared disk changes its mind within a second.
 *
 * Then one object of MIB is read in sequence with cold caches: as written, after random overwrites of as many nodes as a quarter of
 * it, and aged: after as many as it has, twice. Between reads the page cache is dropped (needs root; else the file's pages are). */
#include "measure.h"

enum { TURN = 25, REQUEST = MIB, COMMIT_EVERY = 256 };

struct run {
    struct bench b;
    uint8_t *memory;
    size_t size, nodes, operations;
    struct object *o;
    int fd;
};

static uint64_t raw_size, core_size;    /* bytes appended so far */

/* ---- One operation ---- */

static void raw_append(struct run *r, size_t node)
{
    must("pwrite", pwrite(r->fd, r->memory + node * NODE_SIZE, NODE_SIZE, (off_t)raw_size));
    must("fdatasync", fdatasync(r->fd));
    raw_size += NODE_SIZE;
}

static void core_append(struct run *r, size_t node)
{
    must("object_write", object_write(r->o, r->memory + node * NODE_SIZE, NODE_SIZE, core_size, 0));
    commit(r->o, true);
    core_size += NODE_SIZE;
}

static void raw_overwrite(struct run *r, size_t node)
{
    must("pwrite", pwrite(r->fd, r->memory + node * NODE_SIZE, NODE_SIZE, (off_t)(node * NODE_SIZE)));
    must("fdatasync", fdatasync(r->fd));
}

static void core_overwrite(struct run *r, size_t node)
{
    must("object_write", object_write(r->o, r->memory + node * NODE_SIZE, NODE_SIZE, node * NODE_SIZE, 0));
    commit(r->o, true);
}

/* ---- Turns ---- */

static void release(struct object *o)
{
    struct object_record record;

    object_record(o, &record);
    object_release(o, &record);
}

static void turn(struct run *r, void (*operation)(struct run *, size_t), uint64_t *seed, double *ns)
{
    for (int i = 0; i < TURN; i++) {
        size_t node = chance(seed) % r->nodes;
        double start = now_ns();
        operation(r, node);
        ns[i] = now_ns() - start;
    }
}

static void compare(struct run *r, const char *question, void (*raw)(struct run *, size_t),
                    void (*core)(struct run *, size_t), int round)
{
    double *raw_ns = calloc(r->operations, sizeof *raw_ns), *core_ns = calloc(r->operations, sizeof *core_ns);
    uint64_t raw_seed = 7 + (uint64_t)round, core_seed = raw_seed;

    if (!raw_ns || !core_ns)
        die("memory", -ENOMEM);
    for (size_t done = 0; done + TURN <= r->operations; done += TURN) {
        bool first = done / TURN % 2 == 0;
        if (first)
            turn(r, raw, &raw_seed, raw_ns + done);
        turn(r, core, &core_seed, core_ns + done);
        if (!first)
            turn(r, raw, &raw_seed, raw_ns + done);
    }
    release(r->o);                      /* as the group does that comes every few seconds */
    latencies(question, "raw", round, raw_ns, r->operations / TURN * TURN);
    latencies(question, "encfsd", round, core_ns, r->operations / TURN * TURN);
    free(raw_ns);
    free(core_ns);
}

/* ---- Files ---- */

static void core_write(void *arg, size_t i)
{
    struct run *r = arg;

    must("object_write", object_write(r->o, r->memory + i * REQUEST, REQUEST, i * REQUEST, 0));
}

static void core_read(void *arg, size_t i)
{
    struct run *r = arg;

    must("object_read", object_read(r->o, r->memory + i * REQUEST, REQUEST, i * REQUEST, 0));
}

static void raw_read(void *arg, size_t i)
{
    struct run *r = arg;

    must("pread", pread(r->fd, r->memory + i * REQUEST, REQUEST, (off_t)(i * REQUEST)));
}

static void fill(struct run *r)
{
    must("object_create", object_create(&r->o, &r->b.env, bench_id));
    workers_parallel(r->b.env.workers, core_write, r, r->size / REQUEST);
    commit(r->o, false);
    must("ftruncate", ftruncate(r->fd, 0));
    for (size_t at = 0; at < r->size; at += REQUEST)
        must("pwrite", pwrite(r->fd, r->memory + at, REQUEST, (off_t)at));
    must("fdatasync", fdatasync(r->fd));
}

static void empty(struct run *r)
{
    object_close(r->o);
    must("blockdir_remove", blockdir_remove(r->b.env.dir, bench_id));
}

static void age(struct run *r, size_t overwrites, uint64_t seed)
{
    for (size_t i = 0; i < overwrites; i++) {
        size_t node = chance(&seed) % r->nodes;
        must("object_write", object_write(r->o, r->memory + node * NODE_SIZE, NODE_SIZE, node * NODE_SIZE, 0));
        if (i % COMMIT_EVERY == COMMIT_EVERY - 1)
            commit(r->o, false);
    }
    commit(r->o, false);
}

/* ---- Cold reads ---- */

static void drop_caches(struct run *r)
{
    char path[300];
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);

    sync();
    if (fd >= 0) {
        must("drop_caches", write(fd, "1\n", 2));
        close(fd);
    }
    posix_fadvise(r->fd, 0, 0, POSIX_FADV_DONTNEED);
    snprintf(path, sizeof path, "%s/objects/be/0102030405060708090a0b0c0d0e0f", r->b.directory);
    fd = (int)must(path, open(path, O_RDONLY | O_CLOEXEC));
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static void read_cold(struct run *r, const char *question, const char *side, int round, void (*read_one)(void *, size_t))
{
    drop_caches(r);
    double start = now_ns();
    workers_parallel(r->b.env.workers, read_one, r, r->size / REQUEST);
    sample(question, side, round, "MiB/s", (double)r->size / MIB / ((now_ns() - start) / 1e9));
}

static void read_as_it_ages(struct run *r, int round)
{
    read_cold(r, "cold sequential read", "raw", round, raw_read);
    read_cold(r, "cold sequential read", "encfsd", round, core_read);
    age(r, r->nodes / 4, 100 + (uint64_t)round);
    read_cold(r, "cold sequential read, a quarter overwritten", "encfsd", round, core_read);
    age(r, 2 * r->nodes, 200 + (uint64_t)round);
    read_cold(r, "cold sequential read, aged", "encfsd", round, core_read);
    read_cold(r, "cold sequential read, aged", "raw", round, raw_read);
}

int main(int argc, char **argv)
{
    struct run r = {0};
    int rounds;

    if (argc != 5)
        die("bench_durable DIRECTORY MIB OPERATIONS ROUNDS", -EINVAL);
    r.size = (size_t)atoi(argv[2]) * MIB;
    r.nodes = r.size / NODE_SIZE;
    r.operations = (size_t)atoi(argv[3]);
    rounds = atoi(argv[4]);
    r.memory = noise(r.size);
    bench_open(&r.b, argv[1], 64 * MIB);

    r.fd = (int)must("raw", openat(r.b.fd, "appended", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    must("object_create", object_create(&r.o, &r.b.env, bench_id));
    for (int round = 0; round < rounds; round++)
        compare(&r, "synced append", raw_append, core_append, round);
    empty(&r);
    close(r.fd);

    r.fd = (int)must("raw", openat(r.b.fd, "overwritten", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    fill(&r);
    for (int round = 0; round < rounds; round++)
        compare(&r, "random overwrite and commit", raw_overwrite, core_overwrite, round);
    empty(&r);

    for (int round = 0; round < rounds; round++) {
        fill(&r);
        read_as_it_ages(&r, round);
        empty(&r);
    }
    close(r.fd);
    bench_close(&r.b);
    return 0;
}
