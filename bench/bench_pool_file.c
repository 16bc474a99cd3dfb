/* One large file read and written at random, 4 KiB at a time, with a free list that holds a small part of it: nearly every request
 * takes a node and has another one evicted or written back.
 *
 *     bench_pool_file STRATEGY DIRECTORY MIB LIST_MIB ROUND
 *
 * One process a cell, because what malloc's heap has become stays with a process. Requests go to the object layer directly:
 * the way through the kernel costs a hundred times what a node costs, and would hide it. */
#include "measure.h"

enum {
    REQUEST = MIB,                      /* bytes of a request that fills the file */
    BATCH = 64,                         /* nodes that a thread does in one go */
    REQUESTS = 1 << 16,                 /* of each question */
    GROUP = 1 << 13,                    /* writes until a commit, as a group would come */
};

struct run {
    struct bench b;
    struct object *o;
    uint8_t *memory;                    /* REQUEST bytes to write */
    uint32_t *order;                    /* REQUESTS nodes by chance */
    size_t first;                       /* of `order`, for the next batches */
};

static void fill(struct run *r, size_t size)
{
    must("object_create", object_create(&r->o, &r->b.env, bench_id));
    for (size_t at = 0; at < size; at += REQUEST)
        must("object_write", object_write(r->o, r->memory, REQUEST, at, 0));
    commit(r->o, false);
}

static void read_batch(void *arg, size_t i)
{
    struct run *r = arg;
    uint8_t page[NODE_SIZE];

    for (size_t k = r->first + i * BATCH; k < r->first + (i + 1) * BATCH; k++)
        must("object_read", object_read(r->o, page, NODE_SIZE, (uint64_t)r->order[k] * NODE_SIZE, 0));
}

static void write_batch(void *arg, size_t i)
{
    struct run *r = arg;

    for (size_t k = r->first + i * BATCH; k < r->first + (i + 1) * BATCH; k++)
        must("object_write", object_write(r->o, r->memory + k % (REQUEST / NODE_SIZE) * NODE_SIZE, NODE_SIZE,
                                          (uint64_t)r->order[k] * NODE_SIZE, 0));
}

static void mixed_batch(void *arg, size_t i)
{
    (i % 2 ? write_batch : read_batch)(arg, i);
}

static void measure(struct run *r, const char *question, const char *side, int round, void (*batch)(void *, size_t))
{
    char name[100];
    struct spent start = spent_now();

    for (r->first = 0; r->first < REQUESTS; r->first += GROUP) {
        workers_parallel(r->b.env.workers, batch, r, GROUP / BATCH);
        if (batch != read_batch)
            commit(r->o, false);
    }
    struct spent spent = spent_since(start);
    sample(question, side, round, "us", spent.wall / REQUESTS / 1e3);
    snprintf(name, sizeof name, "%s, CPU time", question);
    sample(name, side, round, "us", spent.cpu / REQUESTS / 1e3);
}

static void use_strategy(struct bench *b, const char *name, size_t bytes)
{
    static const char *const names[POOL_STRATEGIES] = {"pooling", "pooling-cow", "malloc"};
    struct pool_options options = {.bytes = bytes, .reserve_nodes = 64, .evict = object_evict};
    char reason[200];

    while (options.strategy < POOL_STRATEGIES && strcmp(names[options.strategy], name))
        options.strategy++;
    pool_destroy(b->env.pool);
    must(name, pool_create(&b->env.pool, &options, reason, sizeof reason));
    if (*reason)
        fprintf(stderr, "%s\n", reason);
}

int main(int argc, char **argv)
{
    struct run r = {.memory = noise(REQUEST), .order = calloc(REQUESTS, sizeof *r.order)};
    uint64_t seed = 42;
    struct pool_stats stats;

    if (argc != 6)
        return fprintf(stderr, "bench_pool_file STRATEGY DIRECTORY MIB LIST_MIB ROUND\n"), 2;
    size_t size = (size_t)atoi(argv[3]) * MIB, list = (size_t)atoi(argv[4]) * MIB;
    int round = atoi(argv[5]);
    if (!r.order)
        die("memory", -ENOMEM);
    for (size_t i = 0; i < REQUESTS; i++)
        r.order[i] = (uint32_t)(chance(&seed) % (size / NODE_SIZE));
    bench_open(&r.b, argv[2], list);
    use_strategy(&r.b, argv[1], list);
    fill(&r, size);
    measure(&r, "random read", argv[1], round, read_batch);
    measure(&r, "random write", argv[1], round, write_batch);
    measure(&r, "random read and write", argv[1], round, mixed_batch);
    pool_stats(r.b.env.pool, &stats);
    sample("misses", argv[1], round, "", (double)(stats.kind[POOL_DATA].misses + stats.kind[POOL_TREE].misses));
    object_close(r.o);
    bench_close(&r.b);
    free(r.order);
    munmap(r.memory, REQUEST);
    return 0;
}
