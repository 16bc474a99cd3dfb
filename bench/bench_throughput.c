/* The core's throughput beside the least that the same work can cost: sealing the same bytes from cold memory with the same
 * backend, and pread or pwrite of them, with as many threads as CPUs.
 *
 *     bench_throughput DIRECTORY MIB ROUNDS
 *
 * The limit seals as many nodes at a time as stay in the cache; it keeps keys and tags in an array and has no tree, no roots,
 * no allocator, no locks. Each round does the same for both sides, in turn first and second. */
#include "measure.h"

enum {
    REQUEST = MIB,                      /* bytes of a sequential request: the largest that the kernel sends */
    BATCH = 64,                         /* nodes that the limit seals at a time */
    RANDOM_SHARE = 4,                   /* one node in so many is touched by the random questions */
};

struct run {
    struct bench b;
    uint8_t *memory;                    /* `size` bytes: source of writes, target of reads */
    size_t size, nodes;
    struct object *o;
    int fd;                             /* the limit's file */
    struct entry *entry;                /* the limit's keys and tags; slot i holds node i */
    uint32_t *order;                    /* nodes in random order */
};

static struct spent parallel(struct run *r, void (*fn)(void *, size_t), size_t n)
{
    struct spent start = spent_now();

    workers_parallel(r->b.env.workers, fn, r, n);
    return spent_since(start);
}

/* ---- The limit ---- */

static uint8_t *scratch(void)
{
    static _Thread_local uint8_t buffer[BATCH * NODE_SIZE] __attribute__((aligned(NODE_SIZE)));

    return buffer;
}

/* Seals the nodes that index(i) names for i in [first, first + n) into the scratch buffer. */
static void limit_seal(struct run *r, const uint32_t *index, size_t first, size_t n)
{
    struct seal_job job[BATCH];

    for (size_t i = 0; i < n; i++) {
        size_t node = index ? index[first + i] : first + i;
        job[i] = (struct seal_job){.plain = r->memory + node * NODE_SIZE, .sealed = scratch() + i * NODE_SIZE, .kind = NODE_DATA};
    }
    must("seal_nodes", seal_nodes(bench_id, job, n));
    for (size_t i = 0; i < n; i++) {
        struct entry *e = &r->entry[index ? index[first + i] : first + i];
        memcpy(e->key, job[i].key, KEY_SIZE);
        memcpy(e->tag, job[i].tag, TAG_SIZE);
    }
}

static void limit_write_run(void *arg, size_t i)
{
    struct run *r = arg;

    limit_seal(r, NULL, i * BATCH, BATCH);
    must("pwrite", pwrite(r->fd, scratch(), BATCH * NODE_SIZE, (off_t)(i * BATCH * NODE_SIZE)));
}

static void limit_read_run(void *arg, size_t i)
{
    struct run *r = arg;
    struct open_job job[BATCH];

    must("pread", pread(r->fd, scratch(), BATCH * NODE_SIZE, (off_t)(i * BATCH * NODE_SIZE)));
    for (size_t k = 0; k < BATCH; k++)
        job[k] = (struct open_job){.sealed = scratch() + k * NODE_SIZE, .plain = r->memory + (i * BATCH + k) * NODE_SIZE,
                                   .entry = &r->entry[i * BATCH + k], .kind = NODE_DATA};
    must("open_nodes", open_nodes(bench_id, job, BATCH));
}

static void limit_write_random(void *arg, size_t i)
{
    struct run *r = arg;

    limit_seal(r, r->order, i * BATCH, BATCH);
    for (size_t k = 0; k < BATCH; k++)
        must("pwrite", pwrite(r->fd, scratch() + k * NODE_SIZE, NODE_SIZE, (off_t)r->order[i * BATCH + k] * NODE_SIZE));
}

static void limit_read_random(void *arg, size_t i)
{
    struct run *r = arg;

    for (size_t k = i * BATCH; k < (i + 1) * BATCH; k++) {
        size_t node = r->order[k];
        struct open_job job = {.sealed = scratch(), .plain = r->memory + node * NODE_SIZE, .entry = &r->entry[node],
                               .kind = NODE_DATA};
        must("pread", pread(r->fd, scratch(), NODE_SIZE, (off_t)(node * NODE_SIZE)));
        must("open_nodes", open_nodes(bench_id, &job, 1));
    }
}

/* ---- The core ---- */

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

static void core_write_random(void *arg, size_t i)
{
    struct run *r = arg;

    for (size_t k = i * BATCH; k < (i + 1) * BATCH; k++) {
        size_t at = (size_t)r->order[k] * NODE_SIZE;
        must("object_write", object_write(r->o, r->memory + at, NODE_SIZE, at, 0));
    }
}

static void core_read_random(void *arg, size_t i)
{
    struct run *r = arg;

    for (size_t k = i * BATCH; k < (i + 1) * BATCH; k++) {
        size_t at = (size_t)r->order[k] * NODE_SIZE;
        must("object_read", object_read(r->o, r->memory + at, NODE_SIZE, at, 0));
    }
}

static struct spent core_write_all(struct run *r, void (*fn)(void *, size_t), size_t n)
{
    struct spent start = spent_now();

    workers_parallel(r->b.env.workers, fn, r, n);
    commit(r->o, false);
    return spent_since(start);
}

/* ---- Rounds ---- */

static void shuffle(struct run *r, int round)
{
    uint64_t seed = 1000 + (uint64_t)round;

    for (size_t i = 0; i < r->nodes; i++)
        r->order[i] = (uint32_t)i;
    for (size_t i = r->nodes - 1; i > 0; i--) {
        size_t k = chance(&seed) % (i + 1);
        uint32_t t = r->order[i];
        r->order[i] = r->order[k];
        r->order[k] = t;
    }
}

/* Wall time as throughput; and CPU time, which others on the machine disturb less. */
static void report(const char *question, const char *side, int round, size_t nodes, struct spent spent)
{
    char name[100];

    sample(question, side, round, "MiB/s", (double)nodes * NODE_SIZE / MIB / (spent.wall / 1e9));
    snprintf(name, sizeof name, "%s, CPU time", question);
    sample(name, side, round, "us", spent.cpu / (double)nodes / 1e3);
}

static void limit_round(struct run *r, int round)
{
    size_t batches = r->nodes / BATCH, random = r->nodes / RANDOM_SHARE;

    must("ftruncate", ftruncate(r->fd, 0));
    report("sequential write", "limit", round, r->nodes, parallel(r, limit_write_run, batches));
    report("sequential read", "limit", round, r->nodes, parallel(r, limit_read_run, batches));
    struct spent spent = parallel(r, limit_write_random, random / BATCH);
    report("first random write", "limit", round, random, spent);
    report("random write", "limit", round, random, spent);
    report("random read", "limit", round, random, parallel(r, limit_read_random, random / BATCH));
}

static void core_round(struct run *r, int round)
{
    size_t requests = r->size / REQUEST, random = r->nodes / RANDOM_SHARE;

    must("object_create", object_create(&r->o, &r->b.env, bench_id));
    report("sequential write", "encfsd", round, r->nodes, core_write_all(r, core_write, requests));
    report("sequential read", "encfsd", round, r->nodes, parallel(r, core_read, requests));
    /* The first overwrite of a file grows it, the next ones find what the first one freed: the limit's file does not grow. */
    report("first random write", "encfsd", round, random, core_write_all(r, core_write_random, random / BATCH));
    report("random write", "encfsd", round, random, core_write_all(r, core_write_random, random / BATCH));
    report("random read", "encfsd", round, random, parallel(r, core_read_random, random / BATCH));
    object_close(r->o);
    must("blockdir_remove", blockdir_remove(r->b.env.dir, bench_id));
}

int main(int argc, char **argv)
{
    struct run r = {0};

    if (argc != 4)
        die("bench_throughput DIRECTORY MIB ROUNDS", -EINVAL);
    r.size = (size_t)atoi(argv[2]) * MIB;
    r.nodes = r.size / NODE_SIZE;
    r.memory = noise(r.size);
    r.entry = calloc(r.nodes, sizeof *r.entry);
    r.order = calloc(r.nodes, sizeof *r.order);
    if (!r.entry || !r.order)
        die("memory", -ENOMEM);
    bench_open(&r.b, argv[1], r.size);
    r.fd = (int)must("limit", openat(r.b.fd, "limit", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    for (int round = 0, rounds = atoi(argv[3]); round < rounds; round++) {
        shuffle(&r, round);
        if (round % 2 == 0)
            limit_round(&r, round);
        core_round(&r, round);
        if (round % 2)
            limit_round(&r, round);
    }
    close(r.fd);
    bench_close(&r.b);
    free(r.entry);
    free(r.order);
    return 0;
}
