/* The slot allocator against a naive model, with memory that runs out at random. */
#include "check.h"

#include <stdlib.h>

/* The module is compiled into the test with an allocator that fails when told to. */
static long fail_in;                            /* > 0: that many allocations from now, one fails */

static bool fails(void) { return fail_in > 0 && --fail_in == 0; }
static void *test_calloc(size_t n, size_t size) { return fails() ? NULL : calloc(n, size); }
static void *test_realloc(void *p, size_t size) { return fails() ? NULL : realloc(p, size); }

#define calloc test_calloc
#define realloc test_realloc
#include "_alloc.c"
#undef calloc
#undef realloc

/* ---- Small, exact cases ---- */

static struct alloc *created(uint64_t end, bool all_known)
{
    struct alloc *a;
    CHECK(alloc_create(&a, end, all_known) == 0);
    return a;
}

static uint64_t data(struct alloc *a, uint64_t near)
{
    uint64_t slot;
    CHECK(alloc_data(a, near, &slot) == 0);
    return slot;
}

static uint64_t run(struct alloc *a, uint64_t n)
{
    uint64_t first;
    CHECK(alloc_run(a, n, &first) == 0);
    return first;
}

TEST(appends_leave_slack)
{
    struct alloc *a = created(ROOT_SLOTS, true);
    uint64_t previous = 0, skipped = 0;

    for (int i = 0; i < 160; i++) {
        uint64_t slot = data(a, previous ? previous + 1 : 0);
        if (previous) {
            CHECK(slot == previous + 1 || slot == previous + 2);
            skipped += slot == previous + 2;
        }
        previous = slot;
    }
    CHECK(skipped == 9);                        /* the tenth lies behind the last slot */
    CHECK(alloc_free_below_end(a) == 10);
    CHECK(alloc_end(a) == ROOT_SLOTS + 170);
    /* An overwrite in the middle finds its slack nearby: slots 20, 37, 54, ... */
    CHECK(data(a, 50) == 54);
    CHECK(data(a, 50) == 37);
    CHECK(alloc_trim(a) == ROOT_SLOTS + 169);
    alloc_destroy(a);
}

TEST(closest_slot_wins)
{
    struct alloc *a = created(ROOT_SLOTS, true);
    uint64_t first = run(a, 2000);

    alloc_trim(a);                              /* no slack at the end */
    alloc_undo(a, first + 100);
    alloc_undo(a, first + 1000);
    CHECK(data(a, first + 100 + NEAR_WINDOW) == first + 100);
    CHECK(data(a, first + 1000 - NEAR_WINDOW) == alloc_end(a) - 1);
    CHECK(data(a, first + 1000 - NEAR_WINDOW + 1) == first + 1000);
    alloc_destroy(a);
}

TEST(sparse_map_fills_holes_first)
{
    struct alloc *a = created(ROOT_SLOTS, true);
    uint64_t first = run(a, 2000);

    alloc_trim(a);
    uint64_t end = alloc_end(a);
    for (uint64_t slot = first; slot < first + 600; slot++)
        alloc_undo(a, slot);
    for (int i = 0; i < 99; i++)
        CHECK(data(a, 0) < first + 600);
    CHECK(alloc_end(a) == end);
    CHECK(data(a, 0) == end);                   /* 501 of 2004 free: no longer more than a quarter */
    alloc_destroy(a);
}

TEST(runs_fit_into_holes)
{
    struct alloc *a = created(ROOT_SLOTS, true);
    uint64_t first = run(a, 500);

    alloc_trim(a);
    uint64_t end = alloc_end(a);
    for (uint64_t slot = first + 60; slot < first + 70; slot++)
        alloc_undo(a, slot);                    /* across a group boundary */
    CHECK(run(a, 11) == end);
    CHECK(run(a, 6) == first + 60);
    CHECK(run(a, 4) == first + 66);
    CHECK(alloc_known(a) && alloc_quarantined(a) == 0);
    alloc_destroy(a);
}

TEST(reclaim_reports_once)
{
    struct alloc *a = created(ROOT_SLOTS, true);
    uint64_t first = run(a, 1000), at, n;

    CHECK(first == 4);
    for (uint64_t slot = 64; slot < 64 + 256; slot++)
        CHECK(alloc_retire(a, slot, 7) == 0);
    CHECK(alloc_quarantined(a) == 256);
    alloc_release(a, 6);
    CHECK(!alloc_next_reclaim(a, 256, &at, &n));
    alloc_release(a, 7);
    CHECK(alloc_quarantined(a) == 0);
    CHECK(!alloc_next_reclaim(a, 257, &at, &n));
    CHECK(alloc_next_reclaim(a, 256, &at, &n) && at == 64 && n == 256);
    CHECK(!alloc_next_reclaim(a, 1, &at, &n));
    CHECK(run(a, 200) == 64);
    for (uint64_t slot = 64; slot < 264; slot++)
        alloc_undo(a, slot);
    CHECK(!alloc_next_reclaim(a, 256, &at, &n)); /* of this run only 200 were freed since */
    for (uint64_t slot = 384; slot < 448; slot++)
        alloc_undo(a, slot);                    /* another group is not enough to search again */
    CHECK(!alloc_next_reclaim(a, 200, &at, &n));
    for (uint64_t slot = 512; slot < 704; slot++)
        alloc_undo(a, slot);
    CHECK(alloc_next_reclaim(a, 200, &at, &n) && at == 64 && n == 256);
    alloc_destroy(a);
}

TEST(neighbours_of_two_commits_wait_apart)
{
    struct alloc *a = created(ROOT_SLOTS, true);

    run(a, 10);
    for (uint64_t slot = 4; slot < 8; slot++)
        CHECK_EQ(alloc_retire(a, slot, slot / 6), 0);
    CHECK_EQ(alloc_quarantined(a), 4);
    alloc_release(a, 0);
    CHECK_EQ(alloc_quarantined(a), 2);
    alloc_release(a, 1);
    CHECK_EQ(alloc_quarantined(a), 0);
    alloc_destroy(a);
}

TEST(scan_of_a_file_that_was_cut_short)
{
    struct alloc *a = created(1000, false);

    for (uint64_t slot = 100; slot < 1000; slot++)
        CHECK_EQ(alloc_retire(a, slot, 1), 0);
    alloc_release(a, 1);
    CHECK_EQ(alloc_trim(a), 100);
    CHECK_EQ(alloc_scan_begin(a), 0);
    CHECK_EQ(run(a, 50), 100);                  /* grows again during the scan */
    CHECK_EQ(alloc_scan_mark(a, 100), -EUCLEAN);
    alloc_scan_cancel(a);
    CHECK_EQ(alloc_scan_begin(a), 0);
    CHECK_EQ(alloc_scan_mark(a, 99), 0);
    CHECK_EQ(alloc_scan_end(a), 0);
    CHECK_EQ(alloc_free_below_end(a), 100 - ROOT_SLOTS - 1 + 3); /* and the slack of the run */
    alloc_destroy(a);
}

TEST(scan_frees_only_what_is_lost)
{
    struct alloc *a = created(200, false);

    CHECK(!alloc_known(a) && alloc_free_below_end(a) == 0);
    CHECK(alloc_retire(a, 10, 1) == 0);         /* waits through the scan */
    CHECK(alloc_retire(a, 11, 1) == 0);
    alloc_release(a, 1);                        /* 10 and 11 are free, and taken again before the scan */
    CHECK(data(a, 10) == 10 && data(a, 11) == 11);
    CHECK(alloc_retire(a, 12, 2) == 0);
    CHECK(alloc_scan_begin(a) == 0);
    CHECK(data(a, 0) == 200);
    CHECK(alloc_scan_mark(a, 12) == 0);
    CHECK(alloc_scan_mark(a, 199) == 0);
    alloc_release(a, 2);
    CHECK(alloc_quarantined(a) == 1);           /* deferred */
    CHECK(alloc_scan_end(a) == 0);
    CHECK(alloc_known(a) && alloc_quarantined(a) == 0);
    /* Below 200: 4 roots, 10 and 11 taken, 199 marked; 12 came free with the deferred release. */
    CHECK(alloc_free_below_end(a) == 200 - 4 - 3);
    alloc_destroy(a);
}

TEST(scan_notices_damage)
{
    static const uint64_t bad[] = {0, ROOT_SLOTS - 1, 100, UINT64_MAX, 50, 60};

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct alloc *a = created(100, false);
        CHECK(alloc_retire(a, 60, 1) == 0);
        alloc_release(a, 1);
        CHECK(alloc_scan_begin(a) == 0);
        CHECK(alloc_scan_mark(a, 50) == 0);
        CHECK(alloc_scan_mark(a, bad[i]) == -EUCLEAN); /* out of range, twice, free */
        CHECK(alloc_scan_end(a) == -EUCLEAN);
        CHECK(!alloc_known(a) && alloc_free_below_end(a) == 1);
        CHECK(alloc_scan_begin(a) == 0);        /* and may be tried again */
        alloc_scan_cancel(a);
        alloc_destroy(a);
    }
}

TEST(no_memory)
{
    struct alloc *a;
    uint64_t slot;

    for (fail_in = 1; fail_in <= 2;) {
        long n = fail_in;
        CHECK(alloc_create(&a, ROOT_SLOTS, true) == -ENOMEM);
        fail_in = n + 1;
    }
    fail_in = 0;
    CHECK(alloc_create(&a, UINT64_MAX, false) == -ENOMEM);
    a = created(ROOT_SLOTS, true);
    run(a, 50);
    fail_in = 1;
    CHECK(alloc_run(a, 50, &slot) == -ENOMEM && alloc_end(a) == ROOT_SLOTS + 53);
    fail_in = 1;
    CHECK(alloc_retire(a, 4, 1) == -ENOMEM && alloc_quarantined(a) == 0);
    fail_in = 1;
    CHECK(alloc_scan_begin(a) == -ENOMEM);
    CHECK(alloc_run(a, UINT64_MAX, &slot) == -ENOMEM);
    alloc_destroy(a);
    alloc_destroy(NULL);
}

/* ---- Random histories ---- */

enum { SLOTS = 3000 };
enum state { BEYOND, ROOT, IN_USE, OLD, LOST, WAITS, FREE }; /* OLD, LOST: from before the open, reachable or not */

struct model {
    enum state state[SLOTS];
    uint64_t commit[SLOTS];                     /* of slots that wait */
    bool fresh[SLOTS];
    uint64_t end, next_commit;
    bool scanning, deferred;
    uint64_t deferred_commit;
};

static uint64_t random_state = 1;

static uint64_t below(uint64_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % n;
}

static uint64_t count(const struct model *m, enum state state)
{
    uint64_t n = 0;
    for (uint64_t slot = 0; slot < m->end; slot++)
        n += m->state[slot] == state;
    return n;
}

/* A random slot in one of two states, or 0. */
static uint64_t pick(const struct model *m, enum state a, enum state b)
{
    for (int i = 0; i < 40; i++) {
        uint64_t slot = below(m->end);
        if (m->state[slot] == a || m->state[slot] == b)
            return slot;
    }
    return 0;
}

static void model_take(struct model *m, const struct alloc *a, uint64_t first, uint64_t n)
{
    for (uint64_t slot = first; slot < first + n; slot++) {
        CHECK(slot < SLOTS);
        CHECK(slot >= m->end || m->state[slot] == FREE);
        m->state[slot] = IN_USE;
        m->fresh[slot] = false;
    }
    for (uint64_t slot = m->end; slot < alloc_end(a); slot++)
        if (m->state[slot] != IN_USE)
            m->state[slot] = FREE;              /* slack */
    if (alloc_end(a) > m->end)
        m->end = alloc_end(a);
}

static void model_free(struct model *m, uint64_t slot)
{
    m->state[slot] = FREE;
    m->fresh[slot] = true;
}

static void model_release(struct model *m, uint64_t commit)
{
    if (m->scanning) {
        m->deferred_commit = m->deferred && m->deferred_commit > commit ? m->deferred_commit : commit;
        m->deferred = true;
        return;
    }
    for (uint64_t slot = 0; slot < m->end; slot++)
        if (m->state[slot] == WAITS && m->commit[slot] <= commit)
            model_free(m, slot);
}

static void model_scan_over(struct model *m)
{
    m->scanning = false;
    if (m->deferred)
        model_release(m, m->deferred_commit);
    m->deferred = false;
}

static uint64_t distance(uint64_t a, uint64_t b) { return a < b ? b - a : a - b; }

static void step_data(struct model *m, struct alloc *a)
{
    uint64_t near = below(4) ? below(m->end) : 0, slot, closest = UINT64_MAX;
    uint64_t tail = a->tail;

    for (uint64_t s = 0; s < m->end; s++)
        if (m->state[s] == FREE && s + NEAR_WINDOW >= near && s < near + NEAR_WINDOW && distance(s, near) < closest)
            closest = distance(s, near);
    int error = alloc_data(a, near, &slot);
    if (error) {
        CHECK(error == -ENOMEM);
        return;
    }
    if (near && near < tail && closest != UINT64_MAX)
        CHECK(distance(slot, near) == closest);
    model_take(m, a, slot, 1);
}

static void step_run(struct model *m, struct alloc *a)
{
    uint64_t n = 1 + below(below(3) ? 8 : 150), first, longest = 0, length = 0, old_end = m->end;

    for (uint64_t s = 0; s < m->end; s++) {
        length = m->state[s] == FREE ? length + 1 : 0;
        longest = length > longest ? length : longest;
    }
    int error = alloc_run(a, n, &first);
    if (error) {
        CHECK(error == -ENOMEM);
        return;
    }
    CHECK((first < old_end) == (longest >= n)); /* so small a map is searched completely */
    model_take(m, a, first, n);
}

static void step_retire(struct model *m, struct alloc *a)
{
    uint64_t slot = pick(m, IN_USE, OLD);

    if (!slot)
        return;
    m->next_commit += below(4) == 0;
    if (alloc_retire(a, slot, m->next_commit) == 0) {
        m->state[slot] = WAITS;
        m->commit[slot] = m->next_commit;
    }
}

static void step_scan(struct model *m, struct alloc *a)
{
    if (!m->scanning) {
        m->scanning = alloc_scan_begin(a) == 0;
        return;
    }
    if (below(3) == 0) {
        alloc_scan_cancel(a);
    } else {
        for (uint64_t slot = 0; slot < m->end; slot++)
            if (m->state[slot] == OLD)
                CHECK(alloc_scan_mark(a, slot) == 0);
        CHECK(alloc_scan_end(a) == 0 && alloc_known(a));
        for (uint64_t slot = 0; slot < m->end; slot++) {
            if (m->state[slot] == LOST)
                model_free(m, slot);
            if (m->state[slot] == OLD)
                m->state[slot] = IN_USE;
        }
    }
    model_scan_over(m);
}

/* Whether the whole group is free, and some of it fresh. */
static bool group_is_reclaimable(const struct model *m, uint64_t group)
{
    bool whole = true, fresh = false;

    for (uint64_t slot = group * BITS; slot < (group + 1) * BITS; slot++) {
        whole = whole && m->state[slot] == FREE;
        fresh = fresh || m->fresh[slot];
    }
    return whole && fresh;
}

static void step_reclaim(struct model *m, struct alloc *a)
{
    uint64_t min = 1 + below(200), first, n, groups = 0;

    for (uint64_t g = 0; g < m->end / BITS; g++)
        groups += group_is_reclaimable(m, g);
    CHECK_EQ(a->reclaimable, groups);
    a->newly_reclaimable = SLOTS;               /* however little came free: search now */
    while (alloc_next_reclaim(a, min, &first, &n)) {
        uint64_t fresh = 0;
        CHECK(n >= min && first % BITS == 0 && n % BITS == 0 && first + n <= m->end);
        for (uint64_t slot = first; slot < first + n; slot++) {
            CHECK(m->state[slot] == FREE);
            fresh += m->fresh[slot];
            m->fresh[slot] = false;
        }
        CHECK(fresh >= min);
    }
    /* Nothing was overlooked. */
    uint64_t fresh = 0;
    for (uint64_t g = 0; g < m->end / BITS; g++) {
        bool whole = true;
        for (uint64_t slot = g * BITS; slot < (g + 1) * BITS; slot++)
            whole = whole && m->state[slot] == FREE;
        for (uint64_t slot = g * BITS; whole && slot < (g + 1) * BITS; slot++)
            fresh += m->fresh[slot];
        CHECK(fresh < min);
        fresh = whole ? fresh : 0;
    }
}

static void step_trim(struct model *m, struct alloc *a)
{
    uint64_t end = alloc_trim(a);

    CHECK(end <= m->end && end >= ROOT_SLOTS && (end == ROOT_SLOTS || m->state[end - 1] != FREE));
    for (uint64_t slot = end; slot < m->end; slot++) {
        CHECK(m->state[slot] == FREE);
        m->state[slot] = BEYOND;
        m->fresh[slot] = false;
    }
    m->end = end;
}

static void step(struct model *m, struct alloc *a)
{
    uint64_t slot;

    fail_in = below(20) == 0 ? 1 : 0;
    switch (below(20)) {
    case 0:
        step_scan(m, a);
        break;
    case 1:
        step_reclaim(m, a);
        break;
    case 2:
        step_trim(m, a);
        break;
    case 3: {
        uint64_t commit = m->next_commit - below(3);
        alloc_release(a, commit);
        model_release(m, commit);
        break;
    }
    case 4:                                     /* a stretch, so that whole groups come free */
        if (below(4))
            break;
        alloc_release(a, m->next_commit);
        model_release(m, m->next_commit);
        slot = below(m->end);
        for (uint64_t stop = slot + below(300); slot < stop && slot < m->end; slot++)
            if (m->state[slot] == IN_USE) {
                alloc_undo(a, slot);
                model_free(m, slot);
            }
        break;
    case 5: case 6: case 7:
        slot = pick(m, IN_USE, IN_USE);
        if (slot && m->end + 200 > SLOTS / 2) { /* keeps the file from outgrowing the model */
            alloc_undo(a, slot);
            model_free(m, slot);
        }
        break;
    case 8: case 9:
        if (m->end + 200 < SLOTS)
            step_run(m, a);
        break;
    case 10: case 11: case 12: case 13:
        step_retire(m, a);
        break;
    default:
        if (m->end + 200 < SLOTS)
            step_data(m, a);
    }
    fail_in = 0;
    CHECK(alloc_end(a) == m->end);
    CHECK(alloc_free_below_end(a) == count(m, FREE));
    CHECK(alloc_quarantined(a) == count(m, WAITS));
    if (alloc_known(a))
        CHECK(count(m, OLD) + count(m, LOST) == 0);
}

TEST(random_histories)
{
    for (int history = 0; history < 60 && check_failures == 0; history++) {
        static struct model m;
        memset(&m, 0, sizeof m);
        bool fresh_file = below(3) == 0;
        m.end = fresh_file ? ROOT_SLOTS : ROOT_SLOTS + below(1000);
        m.next_commit = 10;
        for (uint64_t slot = 0; slot < m.end; slot++)
            m.state[slot] = slot < ROOT_SLOTS ? ROOT : below(3) ? OLD : LOST;
        struct alloc *a = created(m.end, fresh_file);
        for (int i = 0; i < 1500 && check_failures == 0; i++)
            step(&m, a);
        alloc_destroy(a);
    }
}
