/* One object against a plain byte array: sizes at the edges of delta and tree, holes, commits in flight, failures, damage. */
#include <pthread.h>
#include <stdatomic.h>

#include "object_fixture.h"

enum { TEST_NODES = 5330 };             /* two levels and one node */

static uint8_t scratch[TEST_NODES * NODE_SIZE + 1];

/* ---- Sizes ---- */

static void check_size(uint64_t size, struct pool_size pool, size_t step)
{
    struct fixture f;
    struct model m;

    if (!fixture_open(&f, pool, 0))
        return;
    model_open(&m, (TEST_NODES + 1) * NODE_SIZE);
    fill(scratch, size, size + step);
    for (uint64_t at = 0; at < size; at += step) {
        uint64_t n = size - at < step ? size - at : step;
        CHECK_EQ(object_write(f.o, scratch + at, n, at, 0), 0);
        model_write(&m, scratch + at, n, at);
    }
    model_agrees(&m, f.o);
    struct object_attr attr;
    object_attr(f.o, &attr);
    CHECK_EQ(attr.nodes, nodes_for(size));
    fixture_commit(&f, true);
    model_agrees(&m, f.o);
    object_durable_attr(f.o, &attr);
    CHECK_EQ(attr.nodes, nodes_for(size));
    CHECK_EQ(attr.size, size);
    CHECK(!object_is_dirty(f.o));

    if (fixture_reopen(&f)) {
        model_agrees(&m, f.o);
        CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
        CHECK_EQ(object_scan(f.o), 0);
        /* One byte in the middle, then one more behind the end. */
        uint8_t byte = 0x5a;
        CHECK_EQ(object_write(f.o, &byte, 1, size / 2, 0), 0);
        model_write(&m, &byte, 1, size / 2);
        fixture_commit(&f, false);
        CHECK_EQ(object_write(f.o, &byte, 1, m.size, 0), 0);
        model_write(&m, &byte, 1, m.size);
        fixture_commit(&f, true);
        if (fixture_reopen(&f)) {
            model_agrees(&m, f.o);
            object_durable_attr(f.o, &attr);
            CHECK_EQ(attr.nodes, model_nodes(&m));
            CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
        }
    }
    model_close(&m);
    fixture_close(&f);
}

TEST(sizes_at_the_edges)
{
    static const uint64_t sizes[] = {
        0, 1, 4095, 4096, 4097,
        (DELTA_MAX - 1) * 4096, DELTA_MAX * 4096, (DELTA_MAX + 1) * 4096,
        72 * 4096, 73 * 4096, 74 * 4096 - 1, 74 * 4096,
        5328ul * 4096, 5329ul * 4096, 5330ul * 4096,
    };

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_size(sizes[i], ROOMY, 4096);
        check_size(sizes[i], ROOMY, 1 << 20);
        check_size(sizes[i], NOTHING, 128 << 10);
        if (sizes[i] < 100 * 4096) {
            check_size(sizes[i], ROOMY, 1000);
            check_size(sizes[i], HANDFUL, 4096 + 1);
        }
    }
}

/* ---- Holes ---- */

TEST(a_sparse_object_beyond_one_tebibyte_costs_nothing)
{
    const uint64_t far = (uint64_t)3 << 40, size = far + 3 * NODE_SIZE;
    uint8_t page[NODE_SIZE], back[NODE_SIZE], zero[NODE_SIZE] = {0};
    struct object_attr attr;
    struct fixture f;

    if (!fixture_open(&f, HANDFUL, 0))
        return;
    fill(page, sizeof page, 1);
    CHECK_EQ(object_write(f.o, page, sizeof page, 0, 0), 0);
    CHECK_EQ(object_write(f.o, page, sizeof page, far, 0), 0);
    CHECK_EQ(object_truncate(f.o, size, 0), 0);
    fixture_commit(&f, true);
    for (int i = 0; i < 100; i++)       /* so that a fold is due */
        CHECK_EQ(object_write(f.o, page, sizeof page, far / 200 * (uint64_t)i + NODE_SIZE - 5, 0), 0);
    fixture_commit(&f, true);
    object_durable_attr(f.o, &attr);
    CHECK_EQ(attr.size, size);
    CHECK_EQ(attr.nodes, 1 + 1 + 1 + 99 * 2);
    CHECK(fixture_slots(&f) < 1000);
    CHECK_EQ(object_seek(f.o, 0, SEEK_DATA), 0);
    CHECK_EQ(object_seek(f.o, 3 * NODE_SIZE, SEEK_DATA), (far / 200 + NODE_SIZE - 5) / NODE_SIZE * NODE_SIZE);
    CHECK_EQ(object_seek(f.o, far / 200 * 99 + 3 * NODE_SIZE, SEEK_DATA), far);
    CHECK_EQ(object_seek(f.o, far, SEEK_HOLE), far + NODE_SIZE);
    CHECK_EQ(object_seek(f.o, far + NODE_SIZE, SEEK_DATA), -ENXIO);
    CHECK_EQ(object_seek(f.o, size, SEEK_HOLE), -ENXIO);
    CHECK_EQ(object_read(f.o, back, sizeof back, far / 2 + (1 << 20), 0), NODE_SIZE);
    CHECK_MEM_EQ(back, zero, sizeof back);
    if (fixture_reopen(&f)) {
        CHECK_EQ(object_read(f.o, back, sizeof back, far, 0), NODE_SIZE);
        CHECK_MEM_EQ(back, page, sizeof back);
        CHECK_EQ(object_truncate(f.o, 5, 0), 0);
        fixture_commit(&f, true);
        object_durable_attr(f.o, &attr);
        CHECK_EQ(attr.nodes, 1);
        CHECK_EQ(object_truncate(f.o, size, 0), 0);
        CHECK_EQ(object_seek(f.o, NODE_SIZE, SEEK_DATA), -ENXIO);
        fixture_commit(&f, true);
        CHECK_EQ(object_scan(f.o), 0);
    }
    CHECK_EQ(object_write(f.o, page, 1, OBJECT_MAX_SIZE - 1, 0), 0);
    CHECK_EQ(object_write(f.o, page, 1, OBJECT_MAX_SIZE, 0), -EFBIG);
    CHECK_EQ(object_write(f.o, page, 2, OBJECT_MAX_SIZE - 1, 0), -EFBIG);
    CHECK_EQ(object_truncate(f.o, (uint64_t)OBJECT_MAX_SIZE + 1, 0), -EFBIG);
    fixture_commit(&f, true);
    if (fixture_reopen(&f))
        CHECK_EQ(object_read(f.o, back, 10, OBJECT_MAX_SIZE - 1, 0), 1);
    fixture_close(&f);
}

TEST(truncating_and_growing_shows_no_old_bytes)
{
    static const uint64_t sizes[] = {200 * 4096, 100, 200 * 4096, 73 * 4096 + 1, 5000, 74 * 4096, 4096, 0, 100 * 4096, 1};
    struct fixture f;
    struct model m;

    for (int commits = 0; commits < 3; commits++) {     /* never, each time, each time with a reopen */
        if (!fixture_open(&f, ROOMY, 0))
            return;
        model_open(&m, 300 * NODE_SIZE);
        fill(scratch, 200 * NODE_SIZE, 9);
        CHECK_EQ(object_write(f.o, scratch, 200 * NODE_SIZE, 0, 0), 0);
        model_write(&m, scratch, 200 * NODE_SIZE, 0);
        fixture_commit(&f, true);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            struct object_attr attr;
            CHECK_EQ(object_truncate(f.o, sizes[i], 0), 0);
            model_truncate(&m, sizes[i]);
            model_agrees(&m, f.o);
            if (commits > 0)
                fixture_commit(&f, true);
            if (commits > 1 && !fixture_reopen(&f))
                break;
            model_agrees(&m, f.o);
            object_durable_attr(f.o, &attr);
            if (commits > 0)
                CHECK_EQ(attr.nodes, model_nodes(&m));
        }
        model_close(&m);
        fixture_close(&f);
    }
}

/* Seeks from each of the first `nodes` nodes, which are all there are. */
static void seeks_agree(const struct model *m, struct object *o, uint64_t nodes)
{
    for (uint64_t i = 0; i < nodes; i++) {
        uint64_t data = i, gap = i;
        while (data < nodes && !m->present[data])
            data++;
        while (gap < nodes && m->present[gap])
            gap++;
        CHECK_EQ(object_seek(o, i * 4096, SEEK_DATA), data == nodes ? -ENXIO : (int64_t)data * 4096);
        CHECK_EQ(object_seek(o, i * 4096, SEEK_HOLE), gap == nodes ? (int64_t)m->size : (int64_t)gap * 4096);
    }
}

TEST(seeking_through_layers)
{
    enum { NODES = 3 * TREE_FANOUT + 5 };
    struct fixture f;
    struct model m;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    model_open(&m, (NODES + 20) * NODE_SIZE);
    fill(scratch, NODES * NODE_SIZE, 4);
    CHECK_EQ(object_write(f.o, scratch, NODES * NODE_SIZE, 0, 0), 0);
    model_write(&m, scratch, NODES * NODE_SIZE, 0);
    fixture_commit(&f, true);
    seeks_agree(&m, f.o, NODES);        /* a tree without holes, */
    CHECK_EQ(object_write(f.o, scratch, 9, 5 * NODE_SIZE, 0), 0);
    model_write(&m, scratch, 9, 5 * NODE_SIZE);
    seeks_agree(&m, f.o, NODES);        /* ... over it something dirty, */
    const uint64_t at[] = {0, 70, TREE_FANOUT, 2 * TREE_FANOUT - 1, NODES - 2};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        CHECK_EQ(object_punch(f.o, at[i] * NODE_SIZE, 2 * NODE_SIZE, 0), 0);
        model_punch(&m, at[i] * NODE_SIZE, 2 * NODE_SIZE);
        seeks_agree(&m, f.o, NODES);    /* ... cuts, */
    }
    CHECK_EQ(object_write(f.o, scratch, NODE_SIZE, 71 * NODE_SIZE, 0), 0);
    model_write(&m, scratch, NODE_SIZE, 71 * NODE_SIZE);
    CHECK_EQ(object_commit_begin(f.o), 0);
    seeks_agree(&m, f.o, NODES);        /* ... a commit in flight, */
    CHECK_EQ(object_commit_write(f.o, false), 0);
    struct object_record record;
    CHECK_EQ(object_commit_end(f.o, object_barrier(f.o), false, &record), 0);
    seeks_agree(&m, f.o, NODES);        /* ... holes of the delta, */
    CHECK_EQ(object_punch(f.o, 100 * NODE_SIZE, TREE_FANOUT * NODE_SIZE, 0), 0);
    model_punch(&m, 100 * NODE_SIZE, TREE_FANOUT * NODE_SIZE);
    fixture_commit(&f, true);
    seeks_agree(&m, f.o, NODES);        /* ... and holes of the tree */
    CHECK_EQ(object_truncate(f.o, 2 * NODE_SIZE, 0), 0);
    CHECK_EQ(object_truncate(f.o, NODES * NODE_SIZE, 0), 0);
    model_truncate(&m, 2 * NODE_SIZE);
    model_truncate(&m, NODES * NODE_SIZE);
    seeks_agree(&m, f.o, NODES);
    model_close(&m);
    fixture_close(&f);
}

TEST(punching_and_seeking)
{
    struct fixture f;
    struct model m;
    struct object_attr attr;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    model_open(&m, 200 * NODE_SIZE);
    fill(scratch, 150 * NODE_SIZE, 3);
    CHECK_EQ(object_write(f.o, scratch, 150 * NODE_SIZE - 7, 0, 0), 0);
    model_write(&m, scratch, 150 * NODE_SIZE - 7, 0);
    for (int round = 0; round < 2; round++) {
        const uint64_t at[][2] = {{10, 20}, {4096, 4096}, {5 * 4096 - 1, 4096 + 2}, {20 * 4096 + 5, 80 * 4096}, {149 * 4096, 9999},
                                  {149 * 4096 + 1, 9}, {1000 * 4096, 5}, {0, 0}};
        for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
            CHECK_EQ(object_punch(f.o, at[i][0], at[i][1], 0), 0);
            model_punch(&m, at[i][0], at[i][1]);
            model_agrees(&m, f.o);
            if (round)
                fixture_commit(&f, true);
        }
        fixture_commit(&f, true);
        model_agrees(&m, f.o);
        object_durable_attr(f.o, &attr);
        CHECK_EQ(attr.nodes, model_nodes(&m));
        seeks_agree(&m, f.o, 150);
        CHECK_EQ(object_write(f.o, scratch, 40 * 4096, 60 * 4096, 0), 0);
        model_write(&m, scratch, 40 * 4096, 60 * 4096);
    }
    model_close(&m);
    fixture_close(&f);
}

/* ---- Random operations ---- */

struct random_run {
    uint64_t seed;
    struct pool_size pool;
    unsigned threads;
    bool cache_data;
    uint64_t nodes;
    int steps;
};

static uint64_t random_length(uint64_t *state, uint64_t most)
{
    uint64_t length = next_random(state) % 4 == 0 ? next_random(state) % most : next_random(state) % 20000;

    if (next_random(state) % 3 == 0)
        length -= length % NODE_SIZE;
    return length < most ? length : most;
}

static void change(struct fixture *f, struct model *m, uint64_t *state)
{
    uint64_t most = m->room / 2, offset = next_random(state) % most, length = random_length(state, most);

    if (next_random(state) % 3 == 0)
        offset -= offset % NODE_SIZE;
    switch (next_random(state) % 8) {
    case 0:
        CHECK_EQ(object_truncate(f->o, offset, 0), 0);
        model_truncate(m, offset);
        break;
    case 1:
        CHECK_EQ(object_punch(f->o, offset, length, 0), 0);
        model_punch(m, offset, length);
        break;
    case 2:
        CHECK_EQ(object_write_back(f->o, next_random(state) % 50), 0);
        break;
    default:
        fill(scratch, length, next_random(state));
        CHECK_EQ(object_write(f->o, scratch, length, offset, 0), 0);
        model_write(m, scratch, length, offset);
    }
}

static void random_run(const struct random_run *r)
{
    uint64_t state = r->seed * 77 + 1;
    struct model now, durable;
    struct object_attr attr;
    struct fixture f;
    unsigned failures = atomic_load(&check_failures);

    if (!fixture_open(&f, r->pool, r->threads))
        return;
    f.env.cache_data = r->cache_data;
    f.env.dirty_limit = 100;
    model_open(&now, r->nodes * NODE_SIZE);
    model_open(&durable, r->nodes * NODE_SIZE);
    fixture_commit(&f, true);
    for (int step = 0; step < r->steps && atomic_load(&check_failures) == failures; step++) {
        uint64_t what = next_random(&state) % 20;
        uint64_t at = next_random(&state) % now.room, n = random_length(&state, now.room - at);
        if (what == 0) {
            /* A commit, with changes while it is in flight. */
            int rc = object_commit_begin(f.o);
            if (rc == 1)
                continue;
            CHECK_EQ(rc, 0);
            model_copy(&durable, &now);
            for (uint64_t i = next_random(&state) % 4; i > 0; i--)
                change(&f, &now, &state);
            CHECK_EQ(object_commit_write(f.o, next_random(&state) % 2), 0);
            for (uint64_t i = next_random(&state) % 4; i > 0; i--)
                change(&f, &now, &state);
            CHECK_EQ(object_commit_end(f.o, object_barrier(f.o), false, &f.record), 0);
            object_durable_attr(f.o, &attr);
            CHECK_EQ(attr.nodes, model_nodes(&durable));
            if (next_random(&state) % 2)
                object_release(f.o, &f.record);
        } else if (what == 1) {
            fixture_commit(&f, next_random(&state) % 2);
            model_copy(&durable, &now);
            object_durable_attr(f.o, &attr);
            CHECK_EQ(attr.nodes, model_nodes(&durable));
        } else if (what == 2 && next_random(&state) % 2) {
            model_copy(&now, &durable);
            if (!fixture_reopen(&f))
                break;
            model_agrees(&now, f.o);
            if (next_random(&state) % 2)
                CHECK_EQ(object_scan(f.o), 0);
        } else if (what < 8) {
            int64_t got = object_read(f.o, scratch, n, at, 0), due = at < now.size ? (int64_t)(now.size - at) : 0;
            if (CHECK_EQ(got, due < (int64_t)n ? due : (int64_t)n))
                CHECK_MEM_EQ(scratch, now.bytes + at, got);
        } else {
            change(&f, &now, &state);
        }
    }
    model_agrees(&now, f.o);
    fixture_commit(&f, true);
    CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
    if (fixture_reopen(&f)) {
        model_agrees(&now, f.o);
        CHECK_EQ(object_scan(f.o), 0);
    }
    model_close(&now);
    model_close(&durable);
    fixture_close(&f);
    if (atomic_load(&check_failures) != failures)
        fprintf(stderr, "seed %llu\n", (unsigned long long)r->seed);
}

TEST(random_operations)
{
    for (uint64_t seed = 1; seed <= 8; seed++)
        random_run(&(struct random_run){seed, seed % 3 == 0 ? NOTHING : seed % 3 == 1 ? ROOMY : HANDFUL, seed % 4 == 3 ? 2 : 0,
                                        seed % 2, seed % 5 == 0 ? 2000 : 300, 400});
}

/* ---- Commits in flight ---- */

static void write_nodes(struct object *o, struct model *m, uint64_t first, uint64_t n, uint64_t seed)
{
    fill(scratch, n * NODE_SIZE, seed);
    CHECK_EQ(object_write(o, scratch, n * NODE_SIZE, first * NODE_SIZE, 0), 0);
    if (m)
        model_write(m, scratch, n * NODE_SIZE, first * NODE_SIZE);
}

TEST(a_commit_holds_what_was_there_when_it_began)
{
    struct model begun, now;
    struct fixture f;

    for (int many = 0; many < 2; many++) {
        uint64_t n = many ? 100 : 3;    /* a fold, a delta */
        if (!fixture_open(&f, ROOMY, 0))
            return;
        model_open(&begun, 400 * NODE_SIZE);
        model_open(&now, 400 * NODE_SIZE);
        write_nodes(f.o, &now, 0, n, 1);
        CHECK_EQ(object_write(f.o, "early", 5, 5000, 0), 0);
        model_write(&now, (const uint8_t *)"early", 5, 5000);
        CHECK_EQ(object_commit_begin(f.o), 0);
        model_copy(&begun, &now);
        CHECK_EQ(object_commit_begin(f.o), -EBUSY);
        /* In place of dirty nodes that the commit needs, of written ones, and beyond the end. */
        CHECK_EQ(object_write(f.o, "late", 4, 5001, 0), 0);
        model_write(&now, (const uint8_t *)"late", 4, 5001);
        write_nodes(f.o, &now, 2, n + 10, 2);
        CHECK_EQ(object_truncate(f.o, 2 * NODE_SIZE + 10, 0), 0);
        model_truncate(&now, 2 * NODE_SIZE + 10);
        CHECK_EQ(object_write_back(f.o, 100), 0);
        model_agrees(&now, f.o);
        CHECK_EQ(object_commit_write(f.o, true), 0);
        model_agrees(&now, f.o);
        CHECK_EQ(object_punch(f.o, 0, 4096, 0), 0);
        model_punch(&now, 0, 4096);
        CHECK_EQ(object_commit_end(f.o, object_barrier(f.o), false, &f.record), 0);
        model_agrees(&now, f.o);
        CHECK(object_is_dirty(f.o));

        struct object_record first = f.record;
        fixture_commit(&f, true);
        model_agrees(&now, f.o);
        CHECK(f.record.counter > first.counter);
        if (fixture_reopen(&f))
            model_agrees(&now, f.o);
        f.record = first;               /* nothing was released: it is whole */
        if (fixture_reopen(&f)) {
            model_agrees(&begun, f.o);
            CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
        }
        model_close(&begun);
        model_close(&now);
        fixture_close(&f);
    }
}

TEST(nothing_to_commit)
{
    struct object_record again;
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    CHECK(object_is_dirty(f.o));
    fixture_commit(&f, true);
    CHECK_EQ(f.record.counter, 1);
    CHECK_EQ(f.record.epoch, 1);
    CHECK(!object_is_dirty(f.o));
    CHECK_EQ(object_commit_begin(f.o), 1);
    CHECK_EQ(object_commit(f.o, true, &again), 0);
    CHECK_MEM_EQ(&again, &f.record, sizeof again);
    object_set_times(f.o, 0, 0, 0);
    CHECK(!object_is_dirty(f.o));
    object_set_times(f.o, -1, INT64_MAX, INT64_MIN);
    CHECK(object_is_dirty(f.o));
    fixture_commit(&f, true);
    if (fixture_reopen(&f)) {
        struct object_attr attr;
        object_attr(f.o, &attr);
        CHECK_EQ(attr.atime, -1);
        CHECK_EQ(attr.mtime, INT64_MAX);
        CHECK_EQ(attr.ctime, INT64_MIN);
    }
    fixture_close(&f);
}

TEST(pinned_roots_are_not_overwritten)
{
    struct object_record record[4];
    struct fixture f;
    uint8_t byte = 0;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(object_write(f.o, &byte, 1, (uint64_t)i, 0), 0);
        CHECK_EQ(object_commit(f.o, true, &record[i]), 0);
        object_pin_root(f.o, &record[i]);
    }
    CHECK_EQ(object_write(f.o, &byte, 1, 3, 0), 0);
    CHECK_EQ(object_commit(f.o, true, &record[3]), 0);
    CHECK_EQ(object_write(f.o, &byte, 1, 4, 0), 0);
    CHECK_EQ(object_commit(f.o, true, &f.record), -EAGAIN);     /* three pinned, one durable */
    object_pin_root(f.o, &record[1]);
    object_unpin_root(f.o, &record[1]);
    CHECK_EQ(object_commit(f.o, true, &f.record), -EAGAIN);     /* pins count */
    object_unpin_root(f.o, &record[1]);
    fixture_commit(&f, true);
    struct object_record newest = f.record;
    for (int i = 0; i < 4; i++) {
        f.record = record[i];
        object_close(f.o);
        f.o = NULL;
        CHECK_EQ(object_open(&f.o, &f.env, object_name, &f.record), i == 1 ? -EBADMSG : 0);
        if (f.o) {
            struct object_attr attr;
            object_attr(f.o, &attr);
            CHECK_EQ(attr.size, i + 1);
        }
    }
    f.record = newest;
    fixture_reopen(&f);
    fixture_close(&f);
}

/* ---- Failing I/O ---- */

struct failing {
    enum blockio_call call;
    atomic_int after;                   /* this many succeed */
    int error;
    bool once;
    atomic_int failures;
};

static int fail(void *arg, const struct blockio_event *event)
{
    struct failing *f = arg;

    if (event->call != f->call || atomic_fetch_sub(&f->after, 1) > 0 || (f->once && f->failures))
        return 0;
    f->failures++;
    return f->error;
}

TEST(a_commit_without_space_leaves_everything_dirty)
{
    for (int after = 0; after < 200; after++)
        for (int once = 0; once < 2; once++) {
            struct failing failing = {.call = BIO_WRITE, .after = after, .error = -ENOSPC, .once = once};
            struct blockio_hooks hooks = {.before = fail, .arg = &failing};
            struct model durable, now;
            struct fixture f;

            if (!fixture_open(&f, ROOMY, 0))
                return;
            model_open(&durable, 200 * NODE_SIZE);
            model_open(&now, 200 * NODE_SIZE);
            write_nodes(f.o, &now, 0, 100, 1);
            fixture_commit(&f, true);
            model_copy(&durable, &now);
            for (uint64_t i = 0; i < 70; i++)
                write_nodes(f.o, &now, i * 37 % 150, 1, i);
            CHECK_EQ(object_truncate(f.o, 149 * NODE_SIZE + 9, 0), 0);
            model_truncate(&now, 149 * NODE_SIZE + 9);
            CHECK_EQ(object_commit_begin(f.o), 0);
            write_nodes(f.o, &now, 30, 3, 99);
            CHECK_EQ(object_punch(f.o, 50 * NODE_SIZE, 3 * NODE_SIZE, 0), 0);
            model_punch(&now, 50 * NODE_SIZE, 3 * NODE_SIZE);
            blockio_set_hooks(&hooks);
            int rc = object_commit_write(f.o, true);
            blockio_set_hooks(NULL);
            CHECK_EQ(rc, failing.failures ? -ENOSPC : 0);
            if (!rc)
                rc = object_barrier(f.o);
            CHECK_EQ(object_commit_end(f.o, rc, false, &f.record), rc);
            bool done = rc == 0;
            CHECK(!object_poisoned(f.o));
            model_agrees(&now, f.o);
            if (rc) {
                struct object_record record;
                object_record(f.o, &record);
                CHECK_MEM_EQ(&record, &f.record, sizeof record);
            }
            bool foreign;
            CHECK_EQ(object_foreign_root(f.o, &foreign), 0);
            CHECK(!foreign);
            fixture_commit(&f, true);
            model_agrees(&now, f.o);
            CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
            struct object_attr attr;
            object_durable_attr(f.o, &attr);
            CHECK_EQ(attr.nodes, model_nodes(&now));
            if (fixture_reopen(&f)) {
                model_agrees(&now, f.o);
                CHECK_EQ(object_scan(f.o), 0);
            }
            model_close(&durable);
            model_close(&now);
            fixture_close(&f);
            if (done)
                return;
        }
    CHECK(!"a commit of so few nodes takes fewer writes");
}

TEST(a_failed_barrier_poisons)
{
    struct failing failing = {.call = BIO_BARRIER, .error = -EIO, .once = true};
    struct blockio_hooks hooks = {.before = fail, .arg = &failing};
    uint8_t byte = 1;
    struct fixture f;

    for (int nodes = 1; nodes < 200; nodes += 150) {    /* the barrier after the root; the one before it */
        if (!fixture_open(&f, ROOMY, 0))
            return;
        fixture_commit(&f, true);
        struct object_record before = f.record;
        write_nodes(f.o, NULL, 0, (uint64_t)nodes, 1);
        failing.failures = 0;
        blockio_set_hooks(&hooks);
        CHECK_EQ(object_commit(f.o, true, &f.record), -EIO);
        blockio_set_hooks(NULL);
        CHECK_EQ(failing.failures, 1);
        CHECK(object_poisoned(f.o));
        CHECK_EQ(object_read(f.o, &byte, 1, 0, 0), -EIO);
        CHECK_EQ(object_write(f.o, &byte, 1, 0, 0), -EIO);
        CHECK_EQ(object_truncate(f.o, 1, 0), -EIO);
        CHECK_EQ(object_punch(f.o, 0, 1, 0), -EIO);
        CHECK_EQ(object_seek(f.o, 0, SEEK_DATA), -EIO);
        CHECK_EQ(object_write_back(f.o, 1), -EIO);
        CHECK_EQ(object_commit(f.o, true, &f.record), -EIO);
        CHECK_EQ(object_scan(f.o), -EIO);
        f.record = before;
        if (fixture_reopen(&f))
            CHECK(!object_poisoned(f.o));
        fixture_close(&f);
    }
}

TEST(a_write_that_fails_changes_nothing)
{
    struct failing failing = {.call = BIO_WRITE, .error = -ENOSPC};
    struct blockio_hooks hooks = {.before = fail, .arg = &failing};
    struct fixture f;
    struct model m;

    if (!fixture_open(&f, ROOMY, 2))
        return;
    model_open(&m, 400 * NODE_SIZE);
    write_nodes(f.o, &m, 0, 20, 1);
    blockio_set_hooks(&hooks);
    fill(scratch, 300 * NODE_SIZE, 2);
    CHECK_EQ(object_write(f.o, scratch, 300 * NODE_SIZE - 5, 3, 0), -ENOSPC);
    blockio_set_hooks(NULL);
    model_agrees(&m, f.o);
    fixture_commit(&f, true);
    object_release(f.o, &f.record);
    CHECK_EQ(object_write(f.o, scratch, 300 * NODE_SIZE - 5, 3, 0), 0);
    model_write(&m, scratch, 300 * NODE_SIZE - 5, 3);
    model_agrees(&m, f.o);
    CHECK(fixture_slots(&f) < 400);     /* the slots of the failed write were used again */
    model_close(&m);
    fixture_close(&f);
}

static struct pool_kind_stats pooled_data(struct fixture *f)
{
    struct pool_stats stats;

    pool_stats(f->env.pool, &stats);
    return stats.kind[POOL_DATA];
}

TEST(what_the_caller_keeps_is_not_kept_in_the_pool)
{
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    f.env.cache_data = true;
    fill(scratch, 100 * NODE_SIZE, 5);
    CHECK_EQ(object_write(f.o, scratch, 100 * NODE_SIZE, 0, 0), 0);
    fixture_commit(&f, true);
    if (fixture_reopen(&f)) {
        uint8_t back[20 * NODE_SIZE];
        uint64_t before = pooled_data(&f).in_use;

        CHECK_EQ(object_read(f.o, back, 20 * NODE_SIZE - 2, 1, OBJECT_ONCE), 20 * NODE_SIZE - 2);
        CHECK_MEM_EQ(back, scratch + 1, 20 * NODE_SIZE - 2);
        CHECK_EQ(pooled_data(&f).in_use, before);
        CHECK_EQ(object_read(f.o, back, 20 * NODE_SIZE - 2, 1, 0), 20 * NODE_SIZE - 2);
        CHECK_EQ(pooled_data(&f).in_use, before + 20);
        CHECK_EQ(object_read(f.o, back, 20 * NODE_SIZE, 0, OBJECT_ONCE | OBJECT_NOWAIT), 20 * NODE_SIZE);
        CHECK_MEM_EQ(back, scratch, 20 * NODE_SIZE);
        CHECK_EQ(pooled_data(&f).in_use, before + 20);
    }
    fixture_close(&f);
}

TEST(a_scan_pushes_nothing_out_of_the_pool)
{
    static const struct pool_size small = {256 << 10, 8};
    uint8_t back[40 * NODE_SIZE];
    struct fixture f;

    if (!fixture_open(&f, small, 0))
        return;
    f.env.cache_data = true;
    fill(scratch, 100 * NODE_SIZE, 6);
    CHECK_EQ(object_write(f.o, scratch, 100 * NODE_SIZE, 0, 0), 0);
    fixture_commit(&f, true);
    if (fixture_reopen(&f)) {
        for (uint64_t i = 0; i < 100; i++)
            CHECK_EQ(object_read(f.o, back, NODE_SIZE, i * NODE_SIZE, 0), NODE_SIZE);
        uint64_t before = pooled_data(&f).evictions, kept = pooled_data(&f).in_use;

        CHECK(before > 0);              /* the pool is full */
        for (uint64_t i = 0; i < 60; i += 20) {
            CHECK_EQ(object_read(f.o, back, sizeof back, i * NODE_SIZE, 0), sizeof back);
            CHECK_MEM_EQ(back, scratch + i * NODE_SIZE, sizeof back);
        }
        CHECK_EQ(pooled_data(&f).evictions, before);
        CHECK_EQ(pooled_data(&f).in_use, kept);
    }
    fixture_close(&f);
}

TEST(who_may_not_block_is_told_so)
{
    struct fixture f;
    uint8_t page[2 * NODE_SIZE] = {0}, back[NODE_SIZE];

    if (!fixture_open(&f, ROOMY, 0))
        return;
    CHECK_EQ(object_write(f.o, page, 100, 10, OBJECT_NOWAIT), 0);
    fill(scratch, 100 * NODE_SIZE, 4);
    CHECK_EQ(object_write(f.o, scratch, 100 * NODE_SIZE, NODE_SIZE, OBJECT_NOWAIT), 0);
    CHECK_EQ(f.env.dirty_nodes, 101);
    CHECK_EQ(object_read(f.o, back, NODE_SIZE, 3 * NODE_SIZE, OBJECT_NOWAIT), NODE_SIZE);
    CHECK_MEM_EQ(back, scratch + 2 * NODE_SIZE, NODE_SIZE);
    fixture_commit(&f, true);
    CHECK_EQ(f.env.dirty_nodes, 0);
    if (fixture_reopen(&f)) {
        CHECK_EQ(object_read(f.o, back, 1, 0, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_write(f.o, page, 1, 0, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_truncate(f.o, 10, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_punch(f.o, 10, 10, OBJECT_NOWAIT), -EAGAIN);
        CHECK(!object_is_dirty(f.o));
        CHECK_EQ(object_write(f.o, page, 2 * NODE_SIZE, 0, OBJECT_NOWAIT), 0);
        f.env.dirty_limit = 2;
        CHECK_EQ(object_write(f.o, page, NODE_SIZE, 7 * NODE_SIZE, OBJECT_NOWAIT), -EAGAIN);
        CHECK_EQ(object_write(f.o, page, NODE_SIZE, 7 * NODE_SIZE, 0), 0);
        CHECK_EQ(f.env.dirty_nodes, 1);     /* the others were written back first */
    }
    f.env.read_only = true;
    CHECK_EQ(object_write(f.o, page, 1, 0, 0), -EROFS);
    CHECK_EQ(object_truncate(f.o, 1, 0), -EROFS);
    CHECK_EQ(object_punch(f.o, 1, 1, 0), -EROFS);
    CHECK_EQ(object_commit(f.o, true, &f.record), -EROFS);
    fixture_close(&f);
}

/* ---- Recovery ---- */

static int recover(struct fixture *f, const struct object_record *record, uint64_t active_epoch)
{
    struct object_record adopted;

    object_close(f->o);
    f->o = NULL;
    int rc = object_recover(&f->o, &f->env, object_name, record, active_epoch, &adopted);
    if (!rc)
        f->record = adopted;
    return rc;
}

static uint64_t size_of(const struct fixture *f)
{
    struct object_attr attr = {0};

    if (f->o)
        object_attr(f->o, &attr);
    return attr.size;
}

TEST(recovery_takes_the_newest_whole_root_of_the_active_epoch)
{
    struct object_record record[3];
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    CHECK_EQ(recover(&f, NULL, 0), -EBADMSG);           /* never committed */
    CHECK_EQ(object_create(&f.o, &f.env, object_name), -EEXIST);
    CHECK_EQ(blockdir_remove(f.env.dir, object_name), 0);
    if (!CHECK_EQ(object_create(&f.o, &f.env, object_name), 0))
        return;
    for (int i = 0; i < 3; i++) {       /* roots in slots 0, 1, 2; data in slots 4, 5, 6 */
        write_nodes(f.o, NULL, (uint64_t)i, 1, 7);
        CHECK_EQ(object_commit(f.o, true, &record[i]), 0);
        CHECK_EQ(record[i].counter, i + 1);
    }
    CHECK_EQ(recover(&f, &record[0], 1), 0);
    CHECK_EQ(size_of(&f), 3 * NODE_SIZE);
    CHECK_MEM_EQ(&f.record, &record[2], sizeof f.record);
    CHECK_EQ(recover(&f, &record[0], 2), 0);            /* nothing of epoch 2: the recorded one */
    CHECK_EQ(size_of(&f), NODE_SIZE);
    CHECK_EQ(recover(&f, NULL, 1), 0);
    CHECK_EQ(size_of(&f), 3 * NODE_SIZE);
    CHECK_EQ(recover(&f, NULL, 2), -EBADMSG);

    fixture_flip(&f, 6 * NODE_SIZE + 17, 1);            /* the newest delta is not whole */
    CHECK_EQ(recover(&f, &record[0], 1), 0);
    CHECK_EQ(size_of(&f), 2 * NODE_SIZE);
    CHECK_EQ(recover(&f, &record[2], 1), 0);            /* the recorded root is taken whatever reading it says */
    CHECK_EQ(size_of(&f), 3 * NODE_SIZE);
    CHECK_EQ(recover(&f, &record[0], 1), 0);

    /* The next counter exceeds that of the rejected root. */
    f.env.epoch = 2;
    write_nodes(f.o, NULL, 9, 1, 8);
    fixture_commit(&f, true);
    CHECK_EQ(f.record.counter, 4);
    CHECK_EQ(f.record.epoch, 2);
    CHECK_EQ(recover(&f, &record[1], 1), 0);
    CHECK_EQ(size_of(&f), 2 * NODE_SIZE);

    struct object_record forged = record[1];
    forged.salt[3] ^= 1;
    object_close(f.o);
    f.o = NULL;
    CHECK_EQ(object_open(&f.o, &f.env, object_name, &forged), -EBADMSG);
    fixture_close(&f);
}

static int refuse_before_barrier(void *arg, const struct blockio_event *event)
{
    int *barriers = arg;

    *barriers += event->call == BIO_BARRIER;
    return 0;
}

TEST(an_adopted_root_is_made_durable_first)
{
    int barriers = 0;
    struct blockio_hooks hooks = {.before = refuse_before_barrier, .arg = &barriers};
    struct failing failing = {.call = BIO_BARRIER, .error = -EIO};
    struct blockio_hooks failing_hooks = {.before = fail, .arg = &failing};
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    write_nodes(f.o, NULL, 0, 5, 1);
    fixture_commit(&f, true);
    blockio_set_hooks(&hooks);
    CHECK_EQ(recover(&f, &f.record, 1), 0);
    CHECK_EQ(barriers, 1);
    blockio_set_hooks(&failing_hooks);
    CHECK_EQ(recover(&f, &f.record, 1), -EIO);
    blockio_set_hooks(NULL);
    CHECK_EQ(recover(&f, &f.record, 1), 0);
    fixture_close(&f);
}

/* ---- Damage ---- */

struct damage {
    uint64_t index, count;              /* of the last report */
    int reports;
    uint64_t progress;
};

static void note_damage(void *arg, uint64_t index, uint64_t count)
{
    struct damage *d = arg;

    d->index = index;
    d->count = count;
    d->reports++;
}

static void note_progress(void *arg, uint64_t nodes) { ((struct damage *)arg)->progress += nodes; }

TEST(verify_names_what_is_damaged)
{
    enum { NODES = 150 };
    int lost[NODES + 1] = {0};          /* by number of nodes that one slot takes with it */
    uint8_t page[NODE_SIZE];
    struct fixture f;

    if (!fixture_open(&f, NOTHING, 0))
        return;
    write_nodes(f.o, NULL, 0, NODES, 1);
    fixture_commit(&f, true);
    for (uint64_t slot = ROOT_SLOTS; slot < fixture_slots(&f); slot++) {
        struct damage d = {0};
        fixture_flip(&f, slot * NODE_SIZE + slot, 0x80);
        int rc = object_verify(f.o, note_progress, note_damage, &d);
        CHECK_EQ(rc, d.reports ? -EBADMSG : 0);
        CHECK(d.reports <= 1);
        lost[d.count]++;
        CHECK_EQ(d.progress, d.count > 1 ? NODES - d.count : NODES);
        if (d.reports) {
            uint64_t last = d.index + d.count - 1;
            CHECK_EQ(object_read(f.o, page, 1, d.index * NODE_SIZE, 0), -EIO);
            CHECK_EQ(object_read(f.o, page, NODE_SIZE, last * NODE_SIZE, 0), -EIO);
            CHECK_EQ(object_read(f.o, scratch, NODES * NODE_SIZE, 0, 0), -EIO);
            if (d.index > 0)
                CHECK_EQ(object_read(f.o, page, 1, d.index * NODE_SIZE - 1, 0), 1);
            if (last + 1 < NODES)
                CHECK_EQ(object_read(f.o, page, 1, (last + 1) * NODE_SIZE, 0), 1);
        }
        fixture_flip(&f, slot * NODE_SIZE + slot, 0x80);
    }
    CHECK_EQ(lost[1], NODES);
    CHECK_EQ(lost[73], 2);
    CHECK_EQ(lost[NODES - 2 * 73], 1);
    CHECK_EQ(lost[NODES], 1);
    CHECK_EQ(object_verify(f.o, NULL, NULL, NULL), 0);
    fixture_close(&f);
}

/* Opens the object (or recovers it) and reads it: what comes back is right, or nothing does. */
static void check_flipped(struct fixture *f, const struct model *m, int how)
{
    struct object_record adopted;
    struct object *o = NULL;
    int rc = how ? object_recover(&o, &f->env, object_name, how == 1 ? &f->record : NULL, 1, &adopted)
                 : object_open(&o, &f->env, object_name, &f->record);

    if (rc) {
        CHECK(rc == -EBADMSG || rc == -EIO);
        return;
    }
    /* With the record the root cannot be older; without one, it is the caller who compares. */
    if (how < 2 || adopted.counter == f->record.counter) {
        struct object_attr attr;
        object_attr(o, &attr);
        CHECK_EQ(attr.size, m->size);
        for (uint64_t i = 0; i < nodes_for(m->size); i++) {
            uint8_t page[NODE_SIZE];
            int64_t got = object_read(o, page, NODE_SIZE, i * NODE_SIZE, 0);
            if (got < 0)
                CHECK_EQ(got, -EIO);
            else
                CHECK_MEM_EQ(page, m->bytes + i * NODE_SIZE, got);
        }
    }
    object_close(o);
}

/* What one tag covers is sampled; one thread needs fewer samples where each costs ten times as much. */
#ifdef __SANITIZE_THREAD__
enum { SAMPLED = 997 };
#else
enum { SAMPLED = 61 };
#endif

TEST(every_byte_turned_over_is_refused_or_harmless)
{
    struct fixture f;
    struct model m;
    unsigned refused = 0;

    if (!fixture_open(&f, HANDFUL, 0))
        return;
    model_open(&m, 100 * NODE_SIZE);
    /* A tree of two leaves, of which few nodes are no holes, and a delta. */
    for (uint64_t i = 0; i < DELTA_MAX + 1; i++)
        write_nodes(f.o, &m, i, 1, i);
    fixture_commit(&f, true);
    CHECK_EQ(object_punch(f.o, NODE_SIZE, 55 * NODE_SIZE, 0), 0);
    model_punch(&m, NODE_SIZE, 55 * NODE_SIZE);
    fixture_commit(&f, true);
    object_release(f.o, &f.record);
    write_nodes(f.o, &m, 1, 1, 5);
    CHECK_EQ(object_write(f.o, "end", 3, 80 * NODE_SIZE, 0), 0);
    model_write(&m, (const uint8_t *)"end", 3, 80 * NODE_SIZE);
    fixture_commit(&f, true);
    object_close(f.o);
    f.o = NULL;
    uint64_t slots = fixture_slots(&f);
    for (uint64_t at = 0; at < slots * NODE_SIZE; at++) {
        if (at % NODE_SIZE > 80 && at % SAMPLED)        /* all of a root's head */
            continue;
        fixture_flip(&f, at, (uint8_t)(1u << at % 8));
        struct object *o = NULL;
        refused += object_open(&o, &f.env, object_name, &f.record) != 0;
        object_close(o);
        check_flipped(&f, &m, (int)(at % 3));
        fixture_flip(&f, at, (uint8_t)(1u << at % 8));
    }
    CHECK(refused > 80 && refused < 200);       /* one root slot matters */
    check_flipped(&f, &m, 0);
    model_close(&m);
    fixture_close(&f);
}

TEST(a_root_of_another_writer_is_noticed)
{
    struct fixture f;
    bool foreign = true;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    CHECK_EQ(object_foreign_root(f.o, &foreign), 0);
    CHECK(!foreign);
    for (uint64_t i = 0; i < 6; i++) {
        write_nodes(f.o, NULL, i, 1, i);
        fixture_commit(&f, true);
        CHECK_EQ(object_foreign_root(f.o, &foreign), 0);
        CHECK(!foreign);
    }
    struct object *other;
    if (CHECK_EQ(object_open(&other, &f.env, object_name, &f.record), 0)) {
        struct object_record record;
        CHECK_EQ(object_foreign_root(other, &foreign), 0);
        CHECK(!foreign);
        CHECK_EQ(object_truncate(other, 0, 0), 0);
        CHECK_EQ(object_commit(other, true, &record), 0);
        CHECK_EQ(object_foreign_root(f.o, &foreign), 0);
        CHECK(foreign);
        object_close(other);
    }
    fixture_close(&f);
}

/* ---- Space ---- */

TEST(overwriting_for_ever_takes_bounded_space)
{
    uint64_t state = 5, most = 0;
    struct fixture f;
    struct model m;

    for (int direct = 0; direct < 3; direct++) {
        if (!fixture_open(&f, ROOMY, 0))
            return;
        model_open(&m, 600 * NODE_SIZE);
        write_nodes(f.o, &m, 0, 600, 1);
        fixture_commit(&f, false);
        object_release(f.o, &f.record);
        for (int round = 0; round < 60; round++) {
            if (direct == 1)
                write_nodes(f.o, &m, 0, 600, next_random(&state));
            else if (direct == 2)
                write_nodes(f.o, &m, next_random(&state) % 500, 100, next_random(&state));
            for (int i = 0; direct != 1 && i < 100; i++)
                write_nodes(f.o, &m, next_random(&state) % 600, 1, next_random(&state));
            fixture_commit(&f, false);
            object_release(f.o, &f.record);
            most = fixture_slots(&f) > most ? fixture_slots(&f) : most;
        }
        CHECK(most < 3 * 640);
        model_agrees(&m, f.o);
        /* Another mount: first nothing is known, then all. */
        if (fixture_reopen(&f)) {
            CHECK_EQ(object_scan(f.o), 0);
            CHECK_EQ(object_scan(f.o), 0);
            for (int round = 0; round < 10; round++) {
                write_nodes(f.o, &m, 0, 600, next_random(&state));
                fixture_commit(&f, false);
                object_release(f.o, &f.record);
            }
            CHECK(fixture_slots(&f) < 3 * 640);
            model_agrees(&m, f.o);
        }
        /* Cut short: a free tail is given back at the next commits. */
        CHECK_EQ(object_truncate(f.o, NODE_SIZE, 0), 0);
        model_truncate(&m, NODE_SIZE);
        for (uint64_t i = 0; i < 4; i++) {
            write_nodes(f.o, &m, 0, 1, i);
            fixture_commit(&f, true);
            object_release(f.o, &f.record);
        }
        model_agrees(&m, f.o);
        model_close(&m);
        fixture_close(&f);
    }
}

TEST(a_released_tail_is_cut_off)
{
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    write_nodes(f.o, NULL, 0, 1, 1);
    fixture_commit(&f, true);
    write_nodes(f.o, NULL, 0, 600, 2);
    fixture_commit(&f, true);
    CHECK(fixture_slots(&f) > 600);
    CHECK_EQ(object_truncate(f.o, 0, 0), 0);
    fixture_commit(&f, true);
    object_release(f.o, &f.record);
    CHECK(fixture_slots(&f) > 600);     /* not before a barrier */
    object_set_times(f.o, 1, 1, 1);
    fixture_commit(&f, true);
    CHECK_EQ(fixture_slots(&f), ROOT_SLOTS);
    if (fixture_reopen(&f)) {
        write_nodes(f.o, NULL, 0, 2, 3);
        fixture_commit(&f, true);
        CHECK(fixture_slots(&f) < ROOT_SLOTS + 4);
    }
    fixture_close(&f);
}

TEST(synced_appends_find_written_slots_ahead)
{
    uint64_t before = 0;
    int grew = 0;
    struct fixture f;

    if (!fixture_open(&f, ROOMY, 0))
        return;
    for (uint64_t i = 0; i < 200; i++) {
        write_nodes(f.o, NULL, i, 1, i);
        fixture_commit(&f, true);
        grew += fixture_slots(&f) != before;
        before = fixture_slots(&f);
    }
    CHECK(grew < 20);
    CHECK(before < 400);
    fixture_close(&f);
}

/* ---- Threads ---- */

enum { SHARED_NODES = 300, READERS = 3 };

struct shared {
    struct fixture f;
    atomic_bool stop;
    atomic_ulong reads;
};

/* Each node holds one number, which grows; all of one write hold the same. */
static void *read_shared(void *arg)
{
    struct shared *s = arg;
    uint64_t *words = malloc(SHARED_NODES * NODE_SIZE), seen[SHARED_NODES] = {0}, state = (uint64_t)&state | 1;

    while (!atomic_load(&s->stop)) {
        uint64_t first = next_random(&state) % SHARED_NODES, n = next_random(&state) % (SHARED_NODES - first) + 1;
        if (!CHECK_EQ(object_read(s->f.o, words, n * NODE_SIZE, first * NODE_SIZE, 0), n * NODE_SIZE))
            break;
        bool fine = true;
        for (uint64_t i = 0; i < n && fine; i++) {
            const uint64_t *word = words + i * (NODE_SIZE / 8);
            fine = CHECK(word[0] >= seen[first + i]) && CHECK_MEM_EQ(word, word + 1, NODE_SIZE - 8);
            seen[first + i] = word[0];
        }
        if (!fine)
            break;
        atomic_fetch_add(&s->reads, 1);
    }
    free(words);
    return NULL;
}

static void *commit_shared(void *arg)
{
    struct shared *s = arg;

    while (!atomic_load(&s->stop)) {
        if (!CHECK_EQ(object_commit(s->f.o, false, &s->f.record), 0))
            break;
        object_release(s->f.o, &s->f.record);
    }
    return NULL;
}

TEST(readers_see_whole_nodes_while_commits_go_on)
{
    for (int cache = 0; cache < 3; cache++) {
        struct shared s;
        pthread_t reader[READERS], committer;
        uint64_t *words = malloc(SHARED_NODES * NODE_SIZE), state = 3;

        atomic_init(&s.stop, false);
        atomic_init(&s.reads, 0);
        if (!fixture_open(&s.f, cache == 2 ? (struct pool_size){1 << 20, 8} : cache ? ROOMY : NOTHING, 2))
            return;
        s.f.env.cache_data = cache;
        s.f.env.dirty_limit = 64;
        memset(words, 0, SHARED_NODES * NODE_SIZE);
        CHECK_EQ(object_write(s.f.o, words, SHARED_NODES * NODE_SIZE, 0, 0), 0);
        for (int i = 0; i < READERS; i++)
            pthread_create(&reader[i], NULL, read_shared, &s);
        pthread_create(&committer, NULL, commit_shared, &s);
        for (uint64_t number = 1; number < 1500 || atomic_load(&s.reads) < 500; number++) {
            uint64_t first = next_random(&state) % SHARED_NODES, n = next_random(&state) % 3 ? 1 : SHARED_NODES - first;
            if (atomic_load(&check_failures))
                break;
            for (uint64_t i = 0; i < n * NODE_SIZE / 8; i++)
                words[i] = number;
            CHECK_EQ(object_write(s.f.o, words, n * NODE_SIZE, first * NODE_SIZE, 0), 0);
        }
        atomic_store(&s.stop, true);
        for (int i = 0; i < READERS; i++)
            pthread_join(reader[i], NULL);
        pthread_join(committer, NULL);
        fixture_commit(&s.f, true);
        CHECK_EQ(object_verify(s.f.o, NULL, NULL, NULL), 0);
        CHECK(fixture_slots(&s.f) < 20 * SHARED_NODES);
        free(words);
        fixture_close(&s.f);
    }
}

enum { WRITERS = 2, WRITER_NODES = 200 };

struct writer {
    struct shared *s;
    uint64_t first;                     /* node; its part is WRITER_NODES long */
    struct model m;
    uint64_t seed;
};

/* Changes its own part of the object, and reads it back now and then. */
static void *write_part(void *arg)
{
    struct writer *w = arg;
    uint64_t state = w->seed, base = w->first * NODE_SIZE;
    uint8_t *bytes = malloc(w->m.room);

    for (int step = 0; step < 600; step++) {
        uint64_t at = next_random(&state) % w->m.room, n = random_length(&state, w->m.room - at);
        switch (next_random(&state) % 8) {
        case 0:
            CHECK_EQ(object_punch(w->s->f.o, base + at, n, 0), 0);
            model_zero(&w->m, at, at + n);
            break;
        case 1:
            CHECK_EQ(object_write_back(w->s->f.o, 20), 0);
            break;
        case 2:
            if (!CHECK_EQ(object_read(w->s->f.o, bytes, n, base + at, 0), n) || !CHECK_MEM_EQ(bytes, w->m.bytes + at, n))
                step = 600;
            break;
        default:
            fill(bytes, n, next_random(&state));
            CHECK_EQ(object_write(w->s->f.o, bytes, n, base + at, 0), 0);
            model_write(&w->m, bytes, n, at);
        }
    }
    free(bytes);
    return NULL;
}

TEST(writers_of_one_object_do_not_disturb_each_other)
{
    for (int pool = 0; pool < 2; pool++) {
        struct shared s;
        struct writer w[WRITERS];
        pthread_t writer[WRITERS], committer;
        struct object_attr attr;
        uint64_t nodes = 0;

        atomic_init(&s.stop, false);
        if (!fixture_open(&s.f, pool ? (struct pool_size){1 << 20, 8} : NOTHING, 2))
            return;
        s.f.env.cache_data = pool;
        s.f.env.dirty_limit = 50;
        CHECK_EQ(object_truncate(s.f.o, WRITERS * WRITER_NODES * NODE_SIZE, 0), 0);
        pthread_create(&committer, NULL, commit_shared, &s);
        for (int i = 0; i < WRITERS; i++) {
            w[i] = (struct writer){.s = &s, .first = (uint64_t)i * WRITER_NODES, .seed = (uint64_t)i + 1};
            model_open(&w[i].m, WRITER_NODES * NODE_SIZE);
            pthread_create(&writer[i], NULL, write_part, &w[i]);
        }
        for (int i = 0; i < WRITERS; i++)
            pthread_join(writer[i], NULL);
        atomic_store(&s.stop, true);
        pthread_join(committer, NULL);
        fixture_commit(&s.f, true);
        if (fixture_reopen(&s.f)) {
            CHECK_EQ(object_verify(s.f.o, NULL, NULL, NULL), 0);
            CHECK_EQ(object_scan(s.f.o), 0);
            for (int i = 0; i < WRITERS; i++) {
                CHECK_EQ(object_read(s.f.o, scratch, w[i].m.room, w[i].first * NODE_SIZE, 0), w[i].m.room);
                CHECK_MEM_EQ(scratch, w[i].m.bytes, w[i].m.room);
                nodes += model_nodes(&w[i].m);
            }
            object_attr(s.f.o, &attr);
            CHECK_EQ(attr.nodes, nodes);
        }
        for (int i = 0; i < WRITERS; i++)
            model_close(&w[i].m);
        fixture_close(&s.f);
    }
}
