/* What a namespace operation costs in C, without FUSE, each its own transaction on the real object 0.
 *
 *     bench_namespace operations DIRECTORY FILES ROUNDS
 *     bench_namespace many DIRECTORY FILES
 *
 * operations: create, lookup, getattr and unlink of FILES names in random order, inodes in core or not, in rounds.
 * many: a volume with FILES files in directories of a thousand: size of the database, resident memory, time to open. */
#include "measure.h"

#include "_namespace.h"
#include "_request.h"
#include "bare_sqlite.h"

enum {
    CACHE_BYTES = 64 << 20,             /* of SQLite, as on a mount */
    PER_DIRECTORY = 1000,
    CHUNK = 64,                         /* operations that are timed together */
    COMMIT_EVERY = 64,                  /* chunks */
};

static const uint8_t meta_id[ID_SIZE];
static const struct ns_caller root = {.umask = 022};

/* ---- operations ---- */

struct names {
    struct bench b;
    struct object *meta;
    struct inode_table *table;
    struct namespace *ns;
    uint32_t *order;
    uint64_t *ino;
    uint32_t n;
    struct bare bare;                   /* holds the same files, numbered in the order of their creation from bare_ino on */
    int64_t bare_ino;
    int64_t *bare_number;
    bool writing;                       /* the question changes something: a group now and then, as on a mount */
};

static size_t name_of(uint32_t i, char name[32]) { return (size_t)snprintf(name, 32, "file-%08u.dat", i); }

static void create_one(struct names *s, uint32_t i)
{
    char name[32];
    struct attr attr;
    size_t len = name_of(i, name);

    must("create", ns_mknod(s->ns, ROOT_INO, name, len, S_IFREG | 0644, 0, &root, &attr, 0));
    s->ino[i] = attr.ino;
}

static void lookup_one(struct names *s, uint32_t i)
{
    char name[32];
    struct attr attr;
    size_t len = name_of(i, name);

    must("lookup", ns_lookup(s->ns, ROOT_INO, name, len, &attr, 0));
}

static void getattr_one(struct names *s, uint32_t i)
{
    struct attr attr;

    must("getattr", ns_getattr(s->ns, s->ino[i], &attr, 0));
}

static void unlink_one(struct names *s, uint32_t i)
{
    char name[32];
    size_t len = name_of(i, name);

    must("unlink", ns_unlink(s->ns, ROOT_INO, name, len, 0));
}

static void bare_create_one(struct names *s, uint32_t i)
{
    char name[32];
    size_t len = name_of(i, name);

    s->bare_number[i] = ++s->bare_ino;
    bare_create(&s->bare, s->bare_number[i], i, name, len);
}

static void bare_lookup_one(struct names *s, uint32_t i)
{
    char name[32];

    name_of(i, name);
    bare_find(&s->bare, i, true);
}

static void bare_unlink_one(struct names *s, uint32_t i)
{
    char name[32];

    name_of(i, name);
    bare_unlink(&s->bare, s->bare_number[i], i);
}

static void forget_all(struct names *s, uint64_t lookups)
{
    for (uint32_t i = 0; i < s->n; i++)
        ns_forget(s->ns, s->ino[i], lookups);
}

/* What an operation takes: the median of groups of CHUNK operations, which is hardly ever interrupted by others on the machine;
 * beside it the mean of all, in wall and in CPU time. Commits between them are not counted: on a mount they are other threads'.
 * Returns the median in us. */
static double measure(struct names *s, const char *name, const char *side, void (*one)(struct names *, uint32_t), int round)
{
    size_t chunks = s->n / CHUNK, k = 0;
    double *ns = calloc(chunks, sizeof *ns), median;
    struct spent sum = {0};
    char other[100];

    if (!ns)
        die("memory", -ENOMEM);
    for (uint32_t i = 0; k < chunks; k++) {
        struct spent start = spent_now();
        for (uint32_t last = i + CHUNK; i < last; i++)
            one(s, s->order[i]);
        struct spent part = spent_since(start);
        ns[k] = part.wall / CHUNK;
        sum.wall += part.wall;
        sum.cpu += part.cpu;
        if (s->writing && (k + 1) % COMMIT_EVERY == 0)
            commit(s->meta, false);
    }
    qsort(ns, chunks, sizeof *ns, compare_doubles);
    median = ns[chunks / 2] / 1e3;
    snprintf(other, sizeof other, "%s, mean", name);
    sample(other, side, round, "us", sum.wall / s->n / 1e3);
    snprintf(other, sizeof other, "%s, CPU time", name);
    sample(other, side, round, "us", sum.cpu / s->n / 1e3);
    free(ns);
    return median;
}

static void question(struct names *s, const char *name, void (*one)(struct names *, uint32_t),
                     void (*bare)(struct names *, uint32_t), int round)
{
    char beside[100];
    double us = measure(s, name, "encfsd", one, round);

    sample(name, "encfsd", round, "us", us);
    if (!bare)
        return;
    snprintf(beside, sizeof beside, "%s, beside bare SQLite", name);
    sample(beside, "encfsd", round, "us", us);
    s->writing = false;
    sample(beside, "SQLite", round, "us", measure(s, name, "SQLite", bare, round));
}

/* A clock that does nothing but what all questions share: making the name. */
static void nothing_one(struct names *s, uint32_t i)
{
    char name[32];
    struct timespec t;

    s->ino[i] ^= name_of(i, name) & 0;
    clock_gettime(CLOCK_REALTIME, &t);
}

static void round_of(struct names *s, int round)
{
    s->writing = true;
    question(s, "create", create_one, bare_create_one, round);
    s->writing = false;
    question(s, "lookup", lookup_one, bare_lookup_one, round);
    question(s, "getattr", getattr_one, NULL, round);
    question(s, "nothing", nothing_one, NULL, round);
    forget_all(s, 2);
    question(s, "lookup of an inode not in core", lookup_one, NULL, round);
    s->writing = true;
    question(s, "unlink", unlink_one, bare_unlink_one, round);
    forget_all(s, 1);
    commit(s->meta, false);
}

static int operations(const char *base, uint32_t files, int rounds)
{
    struct names s = {.n = files / CHUNK * CHUNK};
    struct ns_events events = {0};
    char message[200];
    uint64_t seed = 5;

    bench_open(&s.b, base, 64 * MIB);
    s.order = calloc(files, sizeof *s.order);
    s.ino = calloc(files, sizeof *s.ino);
    s.bare_number = calloc(files, sizeof *s.bare_number);
    if (!s.order || !s.ino || !s.bare_number)
        die("memory", -ENOMEM);
    s.bare_ino = ROOT_INO;
    bare_open(&s.bare);
    must("object_create", object_create(&s.meta, &s.b.env, meta_id));
    must("ns_format", ns_format(s.meta, 0, 0));
    commit(s.meta, false);
    must("inode_table_create", inode_table_create(&s.table));
    must("ns_open", ns_open(&s.ns, s.meta, s.table, &events, false, CACHE_BYTES, message, sizeof message));
    for (uint32_t i = 0; i < s.n; i++)
        s.order[i] = i;
    for (int round = 0; round < rounds; round++) {
        for (uint32_t i = s.n - 1; i > 0; i--) {
            uint32_t k = (uint32_t)(chance(&seed) % (i + 1)), t = s.order[i];
            s.order[i] = s.order[k];
            s.order[k] = t;
        }
        round_of(&s, round);
    }
    bare_close(&s.bare);
    ns_close(s.ns);
    inode_table_destroy(s.table);
    object_close(s.meta);
    bench_close(&s.b);
    free(s.order);
    free(s.ino);
    free(s.bare_number);
    return 0;
}

/* ---- many ---- */

static double resident_mib(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (!f || fscanf(f, "%*d %ld", &pages) != 1)
        die("/proc/self/statm", -EIO);
    fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / MIB;
}

static void run(struct volume *v, struct request *r)
{
    if (request_start(v, r) == REQUEST_PARKED)
        while (!request_next_completed(v))
            usleep(10);
    must("request", (long)r->result);
}

static uint64_t make(struct volume *v, uint64_t parent, uint16_t op, const char *kind, uint32_t i)
{
    char name[32];
    struct request r = {.op = op, .ino = parent, .name = name, .mode = op == REQ_MKDIR ? 0755 : S_IFREG | 0644};

    r.name_len = (size_t)snprintf(name, sizeof name, "%s-%06u", kind, i);
    run(v, &r);
    return r.attr.ino;
}

static void populate(struct volume *v, uint32_t files)
{
    struct request sync = {.op = REQ_SYNC_ALL};
    uint64_t directory = 0;

    for (uint32_t i = 0; i < files; i++) {
        if (i % PER_DIRECTORY == 0)
            directory = make(v, ROOT_INO, REQ_MKDIR, "directory", i / PER_DIRECTORY);
        request_forget(v, make(v, directory, REQ_MKNOD, "file", i), 1);
    }
    run(v, &sync);
}

static struct volume *open_volume(const struct volume_options *options)
{
    struct volume_found found;
    struct volume *v;
    char message[200];
    int rc = volume_open(&v, options, &found, message, sizeof message);

    if (rc)
        die(message, rc);
    return v;
}

static int many(const char *base, uint32_t files)
{
    struct bench b;
    struct object_record record;
    struct stat st;

    bench_open(&b, base, MIB);
    struct volume_options options = {
        .src_fd = b.fd, .state_fd = -1, .io_threads = 8, .barrier_threads = 4, .group_interval_ms = 5000, .free_list_bytes = 64 * MIB,
        .dirty_limit_bytes = 64 * MIB, .volume_id = "volume-id-16byte", .p = "a pseudo-random key of 32 bytes",
    };
    must("volume_create", volume_create(&options, 0, 0, &record));
    double before = resident_mib();
    struct volume *v = open_volume(&options);
    double opened = resident_mib();
    populate(v, files);
    sample("resident memory of an empty volume", "encfsd", 0, "MiB", opened - before);
    sample("resident memory, all files created", "encfsd", 0, "MiB", resident_mib() - before);
    must("volume_close", volume_close(v));

    must("meta", fstatat(b.fd, "meta", &st, 0));
    sample("size of object 0", "encfsd", 0, "bytes a file", (double)st.st_blocks * 512 / files);
    for (int round = 0; round < 5; round++) {
        double start = now_ns();
        v = open_volume(&options);
        sample("opening the volume", "encfsd", round, "ms", (now_ns() - start) / 1e6);
        must("volume_close", volume_close(v));
    }
    bench_close(&b);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "operations") == 0)
        return operations(argv[2], (uint32_t)atoi(argv[3]), atoi(argv[4]));
    if (argc == 4 && strcmp(argv[1], "many") == 0)
        return many(argv[2], (uint32_t)atoi(argv[3]));
    die("bench_namespace operations DIRECTORY FILES ROUNDS | many DIRECTORY FILES", -EINVAL);
}
