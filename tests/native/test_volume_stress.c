/* Many threads do everything at once to a few files while groups run every few milliseconds, with a small pool and few descriptors, so that
 * objects are closed and opened all the time; at the end the volume is closed while the last requests are just ending.
 * A byte of a file is either zero or what belongs to its family of files and its place, whoever wrote or copied it and whenever. Meant for
 * ThreadSanitizer. */
#include <linux/falloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/xattr.h>

#include "_volume_internal.h"
#include "check.h"
#include "volume_client.h"

enum { THREADS = 4, NAMES = 12, SIZE_MAX_STRESS = 300000, PIECE = 40000, SHARED = 64,
       FAMILIES = 3, PERIOD = 3 * NODE_SIZE,    /* copies go between files of a family, by multiples of the period */
       LAST = 32 };                             /* requests that are in flight when everybody else is done */

static struct volume *volume;
static _Atomic bool done;
static int rounds;                      /* of each thread */
static _Atomic unsigned long operations, refused;

/* Inodes that somebody has seen lately: threads work on each other's, deleted and forgotten ones too. */
static _Atomic uint64_t seen[SHARED];

struct waiting {
    struct request request;             /* first, so that it is found again from its completion */
    sem_t answered;
};

static void *answer(void *unused)
{
    struct pollfd p = {request_completion_fd(volume), POLLIN, 0};

    while (!atomic_load(&done)) {
        struct request *r;
        poll(&p, 1, 20);
        while ((r = request_next_completed(volume)))
            sem_post(&((struct waiting *)r)->answered);
    }
    return unused;
}

static void post(struct request *r) { sem_post(&((struct waiting *)r)->answered); }

/* By turns as pyfuse3's side does it and as the transport does. */
static int64_t run(struct waiting *w, unsigned turn)
{
    struct request *r = &w->request;

    r->completed = turn & 1 ? post : NULL;
    if (!request_try(volume, r)) {
        if (!((turn & 2) && request_may_wait_for_disk(r) && request_try_disk(volume, r))) {
            request_park(volume, r);
            while (sem_wait(&w->answered))
                ;
        }
    }
    atomic_fetch_add(&operations, 1);
    return r->result;
}

static uint8_t byte_at(uint64_t ino, uint64_t offset)
{
    uint64_t z = ((ino % FAMILIES + 1) * 0x9e3779b97f4a7c15u) ^ (offset % PERIOD * 0xbf58476d1ce4e5b9u);
    return (uint8_t)((z >> 29) | 1);
}

static void check_bytes(uint64_t ino, const uint8_t *data, int64_t n, uint64_t offset)
{
    for (int64_t i = 0; i < n; i++)
        if (data[i] && data[i] != byte_at(ino, offset + (uint64_t)i)) {
            CHECK_EQ(data[i], byte_at(ino, offset + (uint64_t)i));
            return;
        }
}

/* The errors that a busy neighbour explains. */
static void check_result(enum request_op op, int64_t rc)
{
    if (rc >= 0)
        return;
    atomic_fetch_add(&refused, 1);
    if (rc != -ENOENT && rc != -EEXIST && rc != -EISDIR && rc != -ENOTDIR && rc != -ENXIO && rc != -ENODATA)
        fprintf(stderr, "operation %d: %s\n", op, strerror((int)-rc));
    CHECK(rc == -ENOENT || rc == -EEXIST || rc == -EISDIR || rc == -ENOTDIR || rc == -ENXIO || rc == -ENODATA);
}

static void *work(void *arg)
{
    unsigned seed = (unsigned)(uintptr_t)arg;
    uint8_t *data = malloc(PIECE);
    struct waiting w = {0};
    struct request *r = &w.request;
    struct ns_dirent *entries = malloc(16 * sizeof *entries);

    sem_init(&w.answered, 0, 0);
    for (int round = 0; round < rounds; round++) {
        char name[8], other[8], value[40] = "v";
        uint64_t ino = atomic_load(&seen[rand_r(&seed) % SHARED]);
        uint64_t offset = rand_r(&seed) % 3 ? rand_r(&seed) % 3000 : rand_r(&seed) % SIZE_MAX_STRESS;
        size_t size = 1 + rand_r(&seed) % (rand_r(&seed) % 4 ? 5000 : PIECE);
        unsigned kind = rand_r(&seed) % 100;

        snprintf(name, sizeof name, "f%u", rand_r(&seed) % NAMES);
        snprintf(other, sizeof other, "f%u", rand_r(&seed) % NAMES);
        if (ino == 0)
            kind %= 13;
        *r = (struct request){.ino = ROOT_INO, .name = name, .name_len = strlen(name)};
        if (kind < 6) {
            r->op = REQ_MKNOD;
            r->mode = S_IFREG | 0644;
        } else if (kind < 12) {
            r->op = REQ_LOOKUP;
        } else if (kind < 13) {
            *r = (struct request){.op = REQ_TMPFILE, .ino = ROOT_INO, .mode = S_IFREG | 0600};
        } else if (kind < 16) {
            r->op = REQ_UNLINK;
        } else if (kind < 22) {
            r->op = REQ_RENAME;
            r->new_parent = ROOT_INO;
            r->new_name = other;
            r->new_name_len = strlen(other);
        } else if (kind < 24) {
            *r = (struct request){.op = REQ_LINK, .ino = ino, .new_parent = ROOT_INO, .new_name = other, .new_name_len = strlen(other)};
        } else if (kind < 28) {
            static const uint32_t MODES[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE,
                                             FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE};
            *r = (struct request){.op = REQ_FALLOCATE, .ino = ino, .flags = MODES[kind % 4], .offset = offset, .size = size};
        } else if (kind < 32) {
            uint64_t other_ino = atomic_load(&seen[rand_r(&seed) % SHARED]), shift = rand_r(&seed) % 3 * PERIOD;
            if (other_ino % FAMILIES != ino % FAMILIES || other_ino == 0 || (other_ino == ino && shift < size))
                continue;
            *r = (struct request){.op = REQ_COPY, .ino = ino, .offset = offset, .new_parent = other_ino, .new_offset = offset + shift,
                                  .size = size};
        } else if (kind < 47) {
            for (size_t i = 0; i < size; i++)
                data[i] = byte_at(ino, offset + i);
            *r = (struct request){.op = REQ_WRITE, .ino = ino, .buffer = data, .size = size, .offset = offset};
        } else if (kind < 60) {
            *r = (struct request){.op = REQ_READ, .ino = ino, .buffer = data, .size = size, .offset = offset};
        } else if (kind < 66) {
            *r = (struct request){.op = REQ_SETATTR, .ino = ino, .valid = SET_SIZE, .attr = {.size = offset}};
        } else if (kind < 68) {
            *r = (struct request){.op = REQ_SETATTR, .ino = ino, .valid = SET_MODE | SET_MTIME, .attr = {.mode = 0600, .mtime = round}};
        } else if (kind < 80) {
            *r = (struct request){.op = REQ_FSYNC, .ino = ino, .flags = kind & 1};
        } else if (kind < 82) {
            *r = (struct request){.op = kind & 1 ? REQ_FSYNCDIR : REQ_SYNC_ALL, .ino = ROOT_INO};
        } else if (kind < 85) {
            *r = (struct request){.op = REQ_PUNCH, .ino = ino, .offset = offset, .size = size};
        } else if (kind < 87) {
            *r = (struct request){.op = REQ_SEEK, .ino = ino, .offset = offset, .flags = kind & 1 ? SEEK_DATA : SEEK_HOLE};
        } else if (kind < 89) {
            *r = (struct request){.op = REQ_SETXATTR, .ino = ino, .name = "user.x", .name_len = 6, .buffer = value, .size = sizeof value};
        } else if (kind < 91) {
            *r = (struct request){.op = REQ_READDIR, .ino = ROOT_INO, .buffer = entries, .size = 16};
        } else if (kind < 93) {
            *r = (struct request){.op = REQ_STATFS};
        } else if (kind < 96) {
            struct volume_stats stats;
            request_note_writer(volume, ino, 1);
            volume_stats(volume, &stats);
            request_note_writer(volume, ino, -1);
            continue;
        } else {
            request_forget(volume, ino, 1);
            continue;
        }
        enum request_op op = r->op;
        int64_t rc = run(&w, rand_r(&seed));
        check_result(op, rc);
        for (unsigned i = 0; op == REQ_WRITE && kind < 35 && i < 6; i++) {      /* a log: its fsyncs become solo commits */
            struct request write = *r;
            *r = (struct request){.op = REQ_FSYNC, .ino = ino};
            check_result(REQ_FSYNC, run(&w, rand_r(&seed)));
            *r = write;
            check_result(REQ_WRITE, run(&w, rand_r(&seed)));
        }
        if (rc >= 0 && (op == REQ_MKNOD || op == REQ_LOOKUP || op == REQ_TMPFILE)) {
            uint64_t old = atomic_exchange(&seen[rand_r(&seed) % SHARED], r->attr.ino);
            if (old)
                request_forget(volume, old, 1);
        }
        if (op == REQ_READ && rc > 0)
            check_bytes(ino, data, rc, offset);
        for (int64_t i = 0; op == REQ_READDIR && i < rc; i++)
            if (entries[i].attr.ino != ROOT_INO)
                request_forget(volume, entries[i].attr.ino, 1);
    }
    sem_destroy(&w.answered);
    free(entries);
    free(data);
    return NULL;
}

static _Atomic int in_flight;

static void last_answered(struct request *r)
{
    check_result(r->op, r->result);
    free(r);
    atomic_fetch_sub(&in_flight, 1);
}

/* Requests nobody waits for, as the kernel's write-back sends them. */
static void send_last(void)
{
    static uint8_t data[PERIOD];

    for (unsigned i = 0; i < LAST; i++) {
        static const enum request_op OPS[] = {REQ_WRITE, REQ_FSYNC, REQ_READ, REQ_SETATTR};
        uint64_t ino = atomic_load(&seen[i % SHARED]);
        struct request *r = calloc(1, sizeof *r);
        static uint8_t back[LAST][PERIOD];
        *r = (struct request){.op = OPS[i % 4], .ino = ino, .size = PERIOD, .completed = last_answered, .valid = SET_MTIME};
        r->buffer = r->op == REQ_WRITE ? data : back[i];        /* zeros are always right */
        atomic_fetch_add(&in_flight, 1);
        if (request_start(volume, r) == REQUEST_DONE)
            last_answered(r);
        request_forget(volume, ino, 1);
    }
    while (atomic_load(&in_flight))
        sched_yield();
}

static void on_progress(void *arg, uint64_t nodes, uint64_t total) { (void)arg, (void)nodes, (void)total; }

static void on_damaged(void *arg, const char *path, uint64_t offset, uint64_t bytes)
{
    (void)arg;
    fprintf(stderr, "damaged: %s at %llu, %llu bytes\n", path, (unsigned long long)offset, (unsigned long long)bytes);
}

/* extra: nodes that the pool has besides the reserve that is for commits. */
static void everything(size_t extra, enum pool_strategy strategy, enum pool_overflow overflow)
{
    struct client c = {0};
    struct volume_options o;
    struct object_record record;
    struct volume_stats stats;
    pthread_t threads[THREADS], answering;
    char path[64], reason[200];
    uint8_t *back = malloc(SIZE_MAX_STRESS + PIECE);
    int stop = 0;

    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return;
    c.src_fd = client_directory(path);
    o = client_options(c.src_fd);
    o.group_interval_ms = 10;
    o.free_list_bytes = (512 + extra) * (NODE_SIZE + sizeof(struct node)) + NODE_SIZE;
    o.free_list_strategy = strategy;
    o.free_list_overflow = overflow;
    o.dirty_limit_bytes = 256 << 10;
    if (!CHECK_EQ(volume_create(&o, 0, 0, &record), 0) || !CHECK_EQ(client_open(&c, &o), 0))
        return;
    volume = c.volume;
    volume->max_open_objects = 4;
    atomic_store(&done, false);
    for (int i = 0; i < SHARED; i++)
        atomic_store(&seen[i], 0);
    pthread_create(&answering, NULL, answer, NULL);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&done, true);
    pthread_join(answering, NULL);
    send_last();
    volume_stats(volume, &stats);
    CHECK(!stats.failed);
    CHECK(stats.groups > 3 && (rounds < 3000 || stats.solo_commits > 0));
    CHECK_EQ(stats.pool.overflow, overflow);
    if (overflow != POOL_OVERFLOW_MALLOC)
        CHECK_EQ(stats.pool.kind[POOL_DATA].misses + stats.pool.kind[POOL_TREE].misses, 0);
    printf("%lu operations, %lu refused, %llu groups, %llu solo commits, %llu inodes in core\n", operations, refused,
           (unsigned long long)stats.groups, (unsigned long long)stats.solo_commits, (unsigned long long)stats.inodes_in_core);
    CHECK_EQ(volume_close(volume), 0);

    o.read_only = true;
    if (CHECK_EQ(client_open(&c, &o), 0)) {
        for (int i = 0; i < NAMES; i++) {
            struct attr attr;
            char name[8];
            snprintf(name, sizeof name, "f%d", i);
            if (client_lookup(&c, ROOT_INO, name, &attr))
                continue;
            int64_t n = client_read(&c, attr.ino, back, SIZE_MAX_STRESS + PIECE, 0);
            CHECK_EQ(n, attr.size);
            check_bytes(attr.ino, back, n, 0);
        }
        CHECK_EQ(volume_verify(c.volume, on_progress, on_damaged, NULL, &stop), 0);
        CHECK_EQ(volume_close(c.volume), 0);
    }
    close(c.src_fd);
    client_remove(path);
    free(back);
}

TEST(everything_at_once)
{
    rounds = 3000;
    everything(0, POOL_POOLING, POOL_OVERFLOW_MALLOC);
}

/* Each strategy and each policy, with a handful of nodes; writers never get one, or sometimes. */
TEST(a_handful_of_nodes)
{
    rounds = 250;
    for (int kind = 0; kind < POOL_STRATEGIES * POOL_OVERFLOWS; kind++)
        for (size_t extra = 0; extra <= 6; extra += 6)
            everything(extra, (enum pool_strategy)(kind % POOL_STRATEGIES), (enum pool_overflow)(kind / POOL_STRATEGIES));
}
