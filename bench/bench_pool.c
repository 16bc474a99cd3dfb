/* What a node costs: take and give by each strategy of the pool, and by what it competes with.
 *
 *      bench_pool STRATEGY SHAPE AGE THREADS ROUND
 *
 * One process a cell, because what malloc was tuned to, and how its heap has become fragmented, stays with a process. STRATEGY:
 *
 *   pooling, pooling-cow, malloc        the pool's own
 *   malloc-tuned                        the pool's malloc with glibc's trim and mmap thresholds raised
 *   glibc, glibc-tuned                  malloc and free of a node, nothing counted, nothing zeroed or wiped
 *   mapping                             mmap and munmap of each node
 *   file-list                           a free list of up to 48 nodes a file, calloc and free beyond
 *   wipe                                no strategy: what overwriting a page costs
 *
 * SHAPE: single (take, give) or burst (256 takes, 256 gives). AGE: warm, or fragmented (thousands of nodes came and went before, in an
 * order by chance, and a third of them stayed). Whoever takes a node writes a cache line of it.
 *
 * What the driver itself costs is measured in the same run, in turn with the strategy: calls of the same shape that do nothing. */
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "measure.h"

enum {
    BURST = 256,
    PIECES = 8,                         /* measured in turn with as many of empty calls */
    PIECE = 5 * BURST,                  /* pairs of each thread */
    TIMED = 40 * BURST,                 /* takes of each thread, timed one by one for the percentile */
    AGED = 4096,                        /* nodes of each thread that make it fragmented */
    FILE_NODES = 48,
    MAX_THREADS = 64,
};

struct strategy {
    const char *name;
    void *(*take)(void);
    void (*give)(void *handle);
    void *(*page)(void *handle);
};

/* ---- The pool ---- */

static struct pool *pool;

static void *pool_one(void)
{
    struct node *node;

    must("pool_take", pool_take(pool, POOL_DATA, POOL_APPLICATION, false, &node));
    return node;
}

static void pool_back(void *node) { pool_give(pool, node); }
static void *pool_page(void *node) { return ((struct node *)node)->page; }

/* ---- What it competes with ---- */

enum { NODE_BYTES = NODE_SIZE + sizeof(struct node) };

static void *found(void *p)
{
    if (!p || p == MAP_FAILED)
        die("no memory", -ENOMEM);
    return p;
}

static void *glibc_one(void) { return found(malloc(NODE_BYTES)); }
static void glibc_back(void *p) { free(p); }
static void *itself(void *p) { return p; }

static void *mapping_one(void)
{
    return found(mmap(NULL, NODE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

static void mapping_back(void *p) { munmap(p, NODE_BYTES); }

/* Each thread works on a file of its own, as the original did under the file's lock. */
static _Thread_local struct {
    void *node[FILE_NODES];
    int count;
} file;

static void *file_one(void) { return file.count ? file.node[--file.count] : found(calloc(1, NODE_BYTES)); }

static void file_back(void *p)
{
    if (file.count < FILE_NODES)
        file.node[file.count++] = p;
    else
        free(p);
}

/* The same shape as pool_one and pool_back, down to the call of another file's function: a call that is not inlined. */
static struct node nothing = {.page = (uint8_t[NODE_SIZE]){0}};

__attribute__((noinline))
static int empty_take(struct pool *p, enum pool_kind kind, enum pool_class class, bool may_wait, struct node **node)
{
    __asm__ volatile("" : : "r"(p), "r"(kind), "r"(class), "r"(may_wait) : "memory");
    *node = &nothing;
    return 0;
}

__attribute__((noinline))
static void empty_give(struct pool *p, struct node *node) { __asm__ volatile("" : : "r"(p), "r"(node) : "memory"); }

static void *empty_one(void)
{
    struct node *node;

    must("empty_take", empty_take(pool, POOL_DATA, POOL_APPLICATION, false, &node));
    return node;
}

static void empty_back(void *node) { empty_give(pool, node); }

static const struct strategy driver = {"driver", empty_one, empty_back, pool_page};
static const struct strategy strategies[] = {
    {"pooling", pool_one, pool_back, pool_page},
    {"pooling-cow", pool_one, pool_back, pool_page},
    {"malloc", pool_one, pool_back, pool_page},
    {"malloc-tuned", pool_one, pool_back, pool_page},
    {"glibc", glibc_one, glibc_back, itself},
    {"glibc-tuned", glibc_one, glibc_back, itself},
    {"mapping", mapping_one, mapping_back, itself},
    {"file-list", file_one, file_back, itself},
};

/* ---- One thread ---- */

struct runner {
    pthread_t thread;
    bool fragmented;
    int burst;                          /* nodes held at once */
    double cpu_ns, driver_ns;           /* of a pair; of it, the driver's own */
    float *timed;                       /* TIMED wall times of a take and a first write, ns */
    uint64_t seed;
};

static const struct strategy *strategy;
static pthread_barrier_t start;

static double cpu_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *take_and_write(const struct strategy *s)
{
    void *handle = s->take();

    memset(s->page(handle), 1, 64);
    return handle;
}

static void turn(const struct strategy *s, void **held, int n)
{
    for (int i = 0; i < n; i++)
        held[i] = take_and_write(s);
    for (int i = 0; i < n; i++)
        s->give(held[i]);
}

/* CPU time of a pair, ns. */
static double piece(const struct strategy *s, void **held, int n)
{
    double before = cpu_now();

    for (int i = 0; i < PIECE / n; i++)
        turn(s, held, n);
    return (cpu_now() - before) / PIECE;
}

static void timed_turn(void **held, int n, float *ns)
{
    for (int i = 0; i < n; i++) {
        double t = now_ns();
        held[i] = take_and_write(strategy);
        ns[i] = (float)(now_ns() - t);
    }
    for (int i = 0; i < n; i++)
        strategy->give(held[i]);
}

/* Leaves a third of many nodes taken; returns how many are in `aged`. */
static size_t age(struct runner *r, void **aged)
{
    for (size_t i = 0; i < AGED; i++) {
        aged[i] = strategy->take();
        memset(strategy->page(aged[i]), 1, NODE_SIZE);
    }
    for (size_t left = AGED; left > AGED / 3; left--) {
        size_t i = chance(&r->seed) % left;
        strategy->give(aged[i]);
        aged[i] = aged[left - 1];
    }
    return AGED / 3;
}

static void *run(void *arg)
{
    struct runner *r = arg;
    void *held[BURST], **aged = found(calloc(AGED, sizeof *aged));
    size_t n = r->fragmented ? age(r, aged) : 0;

    piece(strategy, held, r->burst);
    pthread_barrier_wait(&start);
    for (int i = 0; i < PIECES; i++) {
        r->cpu_ns += piece(strategy, held, r->burst) / PIECES;
        r->driver_ns += piece(&driver, held, r->burst) / PIECES;
    }
    for (int i = 0; i < TIMED / r->burst; i++)
        timed_turn(held, r->burst, r->timed + (size_t)i * (size_t)r->burst);
    pthread_barrier_wait(&start);       /* before the resident memory is read */
    pthread_barrier_wait(&start);
    while (n)
        strategy->give(aged[--n]);
    while (file.count)
        free(file.node[--file.count]);
    free(aged);
    return NULL;
}

/* ---- The process ---- */

static long resident_kib(void)
{
    long pages = 0, resident = 0;
    FILE *statm = fopen("/proc/self/statm", "re");

    if (!statm || fscanf(statm, "%ld %ld", &pages, &resident) != 2)
        die("/proc/self/statm", 0);
    fclose(statm);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static void set_up(const char *name, int threads)
{
    struct pool_options options = {.bytes = ((size_t)threads * (AGED + BURST) + 1024) * NODE_BYTES};
    char reason[200];

    if (strstr(name, "-tuned")) {
        mallopt(M_TRIM_THRESHOLD, 1 << 30);
        mallopt(M_MMAP_THRESHOLD, 1 << 30);
        mallopt(M_TOP_PAD, 16 << 20);
    }
    for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++)
        if (strcmp(strategies[i].name, name) == 0)
            strategy = &strategies[i];
    if (!strategy)
        die(name, -EINVAL);
    options.strategy = strcmp(name, "pooling") == 0 ? POOL_POOLING : strcmp(name, "pooling-cow") == 0 ? POOL_POOLING_COW : POOL_MALLOC;
    if (strategy->take == pool_one)
        must("pool_create", pool_create(&pool, &options, reason, sizeof reason));
}

static void wipe(int round)
{
    enum { PAGES = 1 << 14 };           /* 64 MiB: not in any cache */
    uint8_t *page = noise((size_t)PAGES * NODE_SIZE);
    double before = cpu_now();

    for (int i = 0; i < PAGES; i++)
        explicit_bzero(page, NODE_SIZE);
    sample("wiping a page", "hot", round, "ns", (cpu_now() - before) / PAGES);
    before = cpu_now();
    for (size_t i = 0; i < PAGES; i++)
        explicit_bzero(page + i * NODE_SIZE, NODE_SIZE);
    sample("wiping a page", "cold", round, "ns", (cpu_now() - before) / PAGES);
    munmap(page, (size_t)PAGES * NODE_SIZE);
}

int main(int argc, char **argv)
{
    static struct runner runner[MAX_THREADS];

    if (argc == 3 && strcmp(argv[1], "wipe") == 0)
        return wipe(atoi(argv[2])), 0;
    if (argc != 6 || atoi(argv[4]) < 1 || atoi(argv[4]) > MAX_THREADS)
        return fprintf(stderr, "bench_pool STRATEGY single|burst warm|fragmented THREADS ROUND\n"), 2;
    int threads = atoi(argv[4]), round = atoi(argv[5]), burst = strcmp(argv[2], "burst") == 0 ? BURST : 1;
    char question[100], more[140];
    double cpu = 0, own = 0;

    set_up(argv[1], threads);
    size_t timed = (size_t)TIMED * (size_t)threads;
    float *all = found(calloc(timed, sizeof *all));
    memset(all, 1, timed * sizeof *all);
    long resident = resident_kib();
    pthread_barrier_init(&start, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) {
        runner[i] = (struct runner){.fragmented = strcmp(argv[3], "fragmented") == 0, .burst = burst,
                                    .timed = all + (size_t)i * TIMED, .seed = (uint64_t)(i + 1)};
        if (pthread_create(&runner[i].thread, NULL, run, &runner[i]))
            die("pthread_create", 0);
    }
    pthread_barrier_wait(&start);
    pthread_barrier_wait(&start);
    resident = resident_kib() - resident;
    pthread_barrier_wait(&start);
    for (int i = 0; i < threads; i++) {
        pthread_join(runner[i].thread, NULL);
        cpu += runner[i].cpu_ns / threads;
        own += runner[i].driver_ns / threads;
    }
    qsort(all, timed, sizeof *all, compare_floats);
    snprintf(question, sizeof question, "%s, %s, %d", argv[2], argv[3], threads);
    sample(question, argv[1], round, "ns", cpu);
    snprintf(more, sizeof more, "%s, driver", question);
    sample(more, argv[1], round, "ns", own);
    snprintf(more, sizeof more, "%s, p99.9", question);
    sample(more, argv[1], round, "ns", (double)all[timed * 999 / 1000]);
    snprintf(more, sizeof more, "%s, resident", question);
    sample(more, argv[1], round, "KiB", (double)resident);
    free(all);
    return pool_destroy(pool) != 0;
}
