/* Objects whose pool has a handful of nodes, for each strategy and each policy: many threads write in pieces, read, cut and commit two
 * objects at once. A byte is zero or what belongs to its place, whoever wrote it. Meant for ThreadSanitizer too. */
#include <pthread.h>
#include <stdatomic.h>

#include "_blockio.h"
#include "object_fixture.h"

enum { WRITERS = 3, ROUNDS = 150, ROOM = 60 * NODE_SIZE, PIECE = 5 * NODE_SIZE };

struct stress {
    struct fixture f;
    struct object *object[2];
    _Atomic bool done;
    _Atomic unsigned long again;
};

struct worker {
    struct stress *s;
    unsigned seed;
};

static uint8_t byte_at(uint64_t offset) { return (uint8_t)(offset * 0x9e3779b97f4a7c15u >> 56 | 1); }

static void check_bytes(const uint8_t *bytes, ssize_t n, uint64_t offset)
{
    for (ssize_t i = 0; i < n; i++)
        if (bytes[i] && !CHECK_EQ(bytes[i], byte_at(offset + (uint64_t)i)))
            return;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    uint8_t *bytes = malloc(PIECE);

    for (int round = 0; round < ROUNDS; round++) {
        struct object *o = w->s->object[rand_r(&w->seed) % 2];
        uint64_t offset = rand_r(&w->seed) % ROOM;
        size_t size = 1 + rand_r(&w->seed) % (rand_r(&w->seed) % 3 ? 3000 : PIECE);
        int flags = rand_r(&w->seed) % 3 == 0 ? OBJECT_NOWAIT : rand_r(&w->seed) % 2 ? OBJECT_QUEUE : 0;
        unsigned kind = rand_r(&w->seed) % 16;
        ssize_t rc;

        if (kind < 9) {
            for (size_t i = 0; i < size; i++)
                bytes[i] = byte_at(offset + i);
            rc = object_write(o, bytes, size, offset, flags);
        } else if (kind < 13) {
            rc = object_read(o, bytes, size, offset, flags);
            check_bytes(bytes, rc, offset);
        } else if (kind < 15) {
            rc = object_punch(o, offset, size, flags);
        } else {
            rc = object_truncate(o, offset, flags);
        }
        CHECK(rc >= 0 || (rc == -EAGAIN && flags == OBJECT_NOWAIT));
        atomic_fetch_add(&w->s->again, rc == -EAGAIN);
    }
    free(bytes);
    return NULL;
}

static void *keep_committing(void *arg)
{
    struct stress *s = arg;
    struct object_record record;

    for (unsigned i = 0; !atomic_load(&s->done); i++) {
        struct object *o = s->object[i % 2];
        CHECK_EQ(object_commit(o, i % 4 < 2, &record), 0);
        object_release(o, &record);
        CHECK_EQ(object_write_back(o, 3), 0);
    }
    return NULL;
}

static void run(struct pool_size size)
{
    static const uint8_t second[ID_SIZE] = {0xcd, 1};
    struct stress s = {0};
    struct worker w[WRITERS];
    pthread_t thread[WRITERS], committing;
    struct pool_stats stats;
    uint8_t *bytes = malloc(ROOM + PIECE);

    if (!fixture_open(&s.f, size, 2) || !CHECK_EQ(object_create(&s.object[1], &s.f.env, second), 0))
        return;
    s.f.env.cache_data = true;
    s.f.env.dirty_limit = 6;
    s.object[0] = s.f.o;
    pthread_create(&committing, NULL, keep_committing, &s);
    for (unsigned i = 0; i < WRITERS; i++) {
        w[i] = (struct worker){&s, i + 1};
        pthread_create(&thread[i], NULL, work, &w[i]);
    }
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(thread[i], NULL);
    atomic_store(&s.done, true);
    pthread_join(committing, NULL);
    pool_stats(s.f.env.pool, &stats);
    CHECK_EQ(stats.strategy, fixture_strategy);
    if (fixture_overflow != POOL_OVERFLOW_MALLOC)
        CHECK_EQ(stats.kind[POOL_DATA].misses + stats.kind[POOL_TREE].misses, 0);
    CHECK(stats.high_water <= stats.capacity + 8 * 32);

    fixture_commit(&s.f, true);
    fixture_reopen(&s.f);
    ssize_t n = object_read(s.f.o, bytes, ROOM + PIECE, 0, 0);
    CHECK(n >= 0);
    check_bytes(bytes, n, 0);
    CHECK_EQ(object_verify(s.f.o, NULL, NULL, NULL), 0);
    object_close(s.object[1]);
    fixture_close(&s.f);
    free(bytes);
}

/* {0, 2}: writers never get a node, and commits find two. */
TEST(a_handful_of_nodes)
{
    const struct pool_size sizes[] = {{0, 0}, {0, 2}, {9 * (NODE_SIZE + sizeof(struct node)) + NODE_SIZE, 2}};

    for (fixture_strategy = POOL_POOLING; fixture_strategy < POOL_STRATEGIES; fixture_strategy++)
        for (fixture_overflow = POOL_OVERFLOW_MALLOC; fixture_overflow < POOL_OVERFLOWS; fixture_overflow++)
            for (int i = 0; i < 3; i++)
                run(sizes[i]);
}

/* ---- Without any node, one thread ---- */

/* Random changes, commits and mounts against a plain byte array. */
TEST(no_nodes_against_the_model)
{
    static uint8_t bytes[PIECE];
    const struct pool_size sizes[] = {{0, 0}, {0, 1}, {4 * (NODE_SIZE + sizeof(struct node)) + NODE_SIZE, 1}};

    for (uint64_t seed = 1; seed <= 27; seed++) {
        struct fixture f;
        struct model m;
        uint64_t state = seed * 77;
        fixture_strategy = (enum pool_strategy)(seed / 3 % POOL_STRATEGIES);
        fixture_overflow = seed % 9 == 0 ? POOL_OVERFLOW_WAIT : POOL_OVERFLOW_EVICT_ONLY;
        if (!fixture_open(&f, sizes[seed % 3], 0))
            return;
        model_open(&m, 400 * NODE_SIZE);
        for (int step = 0; step < 300; step++) {
            uint64_t offset = next_random(&state) % (next_random(&state) % 4 ? ROOM : 390 * NODE_SIZE), kind = next_random(&state) % 16;
            size_t size = 1 + next_random(&state) % (next_random(&state) % 3 ? 3000 : PIECE);
            if (kind < 9) {
                fill(bytes, PIECE, next_random(&state));
                CHECK_EQ(object_write(f.o, bytes, size, offset, 0), 0);
                model_write(&m, bytes, size, offset);
            } else if (kind < 11) {
                CHECK_EQ(object_punch(f.o, offset, size, 0), 0);
                model_punch(&m, offset, size);
            } else if (kind < 12) {
                CHECK_EQ(object_truncate(f.o, offset, 0), 0);
                model_truncate(&m, offset);
            } else if (kind < 13) {
                CHECK_EQ(object_write_back(f.o, 2), 0);
            } else if (kind < 15) {
                fixture_commit(&f, step % 2);
                object_release(f.o, &f.record);
            } else {
                fixture_commit(&f, true);
                fixture_reopen(&f);
            }
            if (step % 20 == 0)
                model_agrees(&m, f.o);
        }
        model_agrees(&m, f.o);
        CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), fixture_commit(&f, true) ? 0 : -1);
        model_close(&m);
        fixture_close(&f);
    }
}

TEST(who_may_not_block_comes_again)
{
    struct fixture f;

    fixture_strategy = POOL_POOLING;
    for (fixture_overflow = POOL_OVERFLOW_WAIT; fixture_overflow < POOL_OVERFLOWS; fixture_overflow++) {
        uint8_t bytes[NODE_SIZE] = {1};
        if (!fixture_open(&f, NOTHING, 0))
            return;
        CHECK_EQ(object_write(f.o, bytes, 10, 5, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_write(f.o, bytes, NODE_SIZE, 0, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_write(f.o, bytes, 10, 5, OBJECT_QUEUE), 0);
        CHECK_EQ(object_read(f.o, bytes, 20, 0, 0), 15);
        CHECK(bytes[5] == 1 && bytes[0] == 0);
        fixture_close(&f);
    }
}

/* ---- What goes wrong where a write is sealed at once ---- */

struct failing {
    long left;                          /* calls that go well; then one fails */
    bool struck;
};

static int fail_one(void *arg, const struct blockio_event *e)
{
    struct failing *f = arg;

    if (e->call != BIO_WRITE && e->call != BIO_READ)
        return 0;
    f->struck |= f->left == 0;
    return f->left-- == 0 ? -EIO : 0;
}

TEST(each_call_fails_in_turn)
{
    struct fixture f;
    struct model m;
    uint8_t bytes[3 * NODE_SIZE];

    fixture_overflow = POOL_OVERFLOW_EVICT_ONLY;
    if (!fixture_open(&f, NOTHING, 0))
        return;
    model_open(&m, 20 * NODE_SIZE);
    fill(bytes, sizeof bytes, 1);
    for (uint64_t at = 100; at < 5 * NODE_SIZE; at += NODE_SIZE) {
        CHECK_EQ(object_write(f.o, bytes, sizeof bytes, at, 0), 0);
        model_write(&m, bytes, sizeof bytes, at);
    }
    fixture_commit(&f, true);
    fill(bytes, sizeof bytes, 2);
    int failures = 0;
    for (long n = 0;; n++) {            /* an end in two nodes, one whole node between them */
        struct failing failing = {.left = n};
        struct blockio_hooks hooks = {.before = fail_one, .arg = &failing};
        blockio_set_hooks(&hooks);
        int rc = object_write(f.o, bytes, sizeof bytes, 700, 0);
        blockio_set_hooks(NULL);
        CHECK_EQ(rc, failing.struck ? -EIO : 0);
        if (rc == 0)
            break;
        failures++;
        model_agrees(&m, f.o);
    }
    CHECK(failures >= 4);               /* two reads, three writes of nodes, neighbours in one call */
    model_write(&m, bytes, sizeof bytes, 700);
    model_agrees(&m, f.o);
    fixture_commit(&f, true);
    fixture_reopen(&f);
    model_agrees(&m, f.o);
    model_close(&m);
    fixture_close(&f);
}
