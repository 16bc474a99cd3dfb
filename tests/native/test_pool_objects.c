/* Objects whose pool has a handful of nodes, for each strategy and each policy: many threads write in pieces, read, cut and commit two
 * objects at once. A byte is zero or what belongs to its place, whoever wrote it. Meant for ThreadSanitizer too. */
#include <pthread.h>

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
