/* Slot allocator of one backing file: three bits a slot, in groups of 64.
 *
 *      0   ROOT_SLOTS                          open_end                    end
 *      |roots|  unknown or known, by bit `known`  |  known: this mount's  |  never handed out
 *
 * A slot below `open_end` that is not known belongs to the past: in use, or lost until a scan of the tree tells. A known
 * slot is free if its bit `free` says so; else it is in use, or waits in the quarantine. Only unknown slots learn from a
 * scan, so a scan can never free what this mount has handed out. */
#include "_alloc.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "_format.h"

enum {
    BITS = 64,
    NEAR_WINDOW = 256,          /* slots on either side of `near`: a home run of 1 MiB must stay readable in sequence */
    SLACK_EVERY = 16,           /* after so many slots taken at the end one is skipped, for overwrites nearby */
    RUN_SEARCH = 1024,          /* groups and runs that one search for a run looks at: microseconds, in a huge file too */
    RECLAIM_SEARCH = 65536,     /* groups (16 GiB) that one search for space to punch looks at */
    SPARSE_SHARE = 4,           /* more than 1/4 of the slots free: fill holes instead of extending the file */
};

#define SLOT_MAX (OBJECT_MAX_SIZE / NODE_SIZE)

struct group {
    uint64_t free;
    uint64_t fresh;             /* free, and not yet reported by alloc_next_reclaim */
    uint64_t known;
};

struct retired {
    uint64_t slot, n, commit;   /* n slots from `slot` on: what was written in sequence is retired in sequence */
};

struct alloc {
    uint64_t end, open_end;
    struct group *group;        /* `groups` of them cover every slot below the end, so giving back cannot fail */
    uint64_t groups;
    uint64_t free_slots;
    uint64_t reclaimable;       /* groups that are free as a whole, some of it fresh; */
    uint64_t newly_reclaimable; /* groups that became so since alloc_next_reclaim found nothing */
    uint64_t tail;              /* where the last extension ended: from here to `end` lies its slack */
    uint64_t since_slack;       /* slots taken at the end since one was skipped */
    uint64_t run_cursor;        /* group where the next search for a run starts */
    uint64_t barren_n;          /* searches for runs of so many slots were in vain; UINT64_MAX: nothing is known */
    uint64_t barren_left;       /* ... with so many slots of the map still to be looked through */
    uint64_t hole_cursor;       /* slot where the next search for a single hole starts */
    uint64_t reclaim_cursor;    /* group where alloc_next_reclaim goes on */

    struct retired *quarantine; /* a queue in ascending order of commits: [first_retired, last_retired) of `room` */
    size_t first_retired, last_retired, room;
    uint64_t quarantined;       /* slots in it */

    uint64_t *marked;           /* while a scan runs: slots it was told of; else NULL */
    uint64_t mark_end;          /* first slot that a mark must not name */
    bool damaged;               /* a mark was refused: the scan must not free anything */
    bool release_waits;         /* a release came during the scan, */
    uint64_t release_commit;    /* up to this commit */
};

/* ---- Bits ---- */

static uint64_t bit(uint64_t slot) { return (uint64_t)1 << slot % BITS; }

static struct group *group_of(const struct alloc *a, uint64_t slot) { return &a->group[slot / BITS]; }

static bool is_free(const struct alloc *a, uint64_t slot) { return group_of(a, slot)->free & bit(slot); }

static bool is_reclaimable(const struct group *g) { return g->free == UINT64_MAX && g->fresh; }

/* Marks the slots `bits` of a group, none of them free, as free and known. */
static void free_bits(struct alloc *a, struct group *g, uint64_t bits, bool fresh)
{
    assert(!(g->free & bits));
    bool before = is_reclaimable(g);
    g->free |= bits;
    g->known |= bits;
    g->fresh |= fresh ? bits : 0;
    if (fresh)
        a->barren_n = UINT64_MAX;
    if (!before && is_reclaimable(g)) {
        a->reclaimable++;
        a->newly_reclaimable++;
    }
    a->free_slots += (uint64_t)__builtin_popcountll(bits);
}

static void set_free(struct alloc *a, uint64_t slot, bool fresh)
{
    assert(slot >= ROOT_SLOTS && slot < a->end);
    free_bits(a, group_of(a, slot), bit(slot), fresh);
}

static void clear_free(struct alloc *a, uint64_t slot)
{
    struct group *g = group_of(a, slot);

    a->reclaimable -= is_reclaimable(g);        /* and not again: it is no longer free as a whole */
    g->free &= ~bit(slot);
    g->fresh &= ~bit(slot);
    a->free_slots--;
}

/* First slot of [from, to) whose free bit is `wanted`; `to` if there is none. */
static uint64_t next_slot(const struct alloc *a, uint64_t from, uint64_t to, bool wanted)
{
    while (from < to) {
        uint64_t bits = group_of(a, from)->free;
        bits = (wanted ? bits : ~bits) >> from % BITS;
        if (bits) {
            from += (uint64_t)__builtin_ctzll(bits);
            return from < to ? from : to;
        }
        from += BITS - from % BITS;
    }
    return to;
}

/* Last free slot of [from, to); UINT64_MAX if there is none. */
static uint64_t previous_free(const struct alloc *a, uint64_t from, uint64_t to)
{
    while (from < to) {
        uint64_t last = to - 1;
        uint64_t bits = group_of(a, last)->free << (BITS - 1 - last % BITS);
        if (bits) {
            last -= (uint64_t)__builtin_clzll(bits);
            return last >= from ? last : UINT64_MAX;
        }
        to = last - last % BITS;
    }
    return UINT64_MAX;
}

/* ---- Creation ---- */

/* Makes the groups cover every slot below `end`. Returns 0 or -ENOMEM. */
static int cover(struct alloc *a, uint64_t end)
{
    uint64_t needed = (end + BITS - 1) / BITS;

    if (needed <= a->groups)
        return 0;
    uint64_t groups = a->groups * 2 > needed ? a->groups * 2 : needed;
    if (groups > SIZE_MAX / sizeof *a->group)
        return -ENOMEM;
    struct group *grown = realloc(a->group, groups * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    memset(grown + a->groups, 0, (groups - a->groups) * sizeof *grown);
    a->group = grown;
    a->groups = groups;
    return 0;
}

int alloc_create(struct alloc **out, uint64_t end, bool all_known)
{
    assert(end >= ROOT_SLOTS);
    if (end > SLOT_MAX)
        return -ENOMEM;
    uint64_t groups = (end + BITS - 1) / BITS;
    struct alloc *a = calloc(1, sizeof *a);
    /* calloc: untouched pages of a large map cost nothing before a scan. */
    struct group *group = a ? calloc(groups, sizeof *group) : NULL;

    if (!group) {
        free(a);
        return -ENOMEM;
    }
    a->group = group;
    a->groups = groups;
    a->end = a->tail = end;
    a->open_end = all_known ? ROOT_SLOTS : end;
    a->barren_n = UINT64_MAX;
    for (uint64_t slot = ROOT_SLOTS; all_known && slot < end; slot++)
        set_free(a, slot, false);
    *out = a;
    return 0;
}

void alloc_destroy(struct alloc *a)
{
    if (!a)
        return;
    free(a->group);
    free(a->quarantine);
    free(a->marked);
    free(a);
}

/* ---- Handing out ---- */

/* Hands out [*first, *first + n) at the end, then skips what slack has become due. */
static int take_at_end(struct alloc *a, uint64_t n, uint64_t *first)
{
    if (n > SLOT_MAX - a->end)
        return -ENOMEM;
    uint64_t slack = (a->since_slack + n) / SLACK_EVERY;
    if (slack > SLOT_MAX - a->end - n)
        slack = 0;
    int error = cover(a, a->end + n + slack);
    if (error)
        return error;

    *first = a->end;
    a->tail = a->end + n;
    a->end = a->tail + slack;
    a->since_slack = (a->since_slack + n) % SLACK_EVERY;
    for (uint64_t slot = a->tail; slot < a->end; slot++)
        set_free(a, slot, false);               /* holds zeros at most: not worth punching by itself */
    if (slack >= a->barren_n)
        a->barren_n = UINT64_MAX;
    return 0;
}

/* The free slot closest to `near`, the next one before the previous one. Returns false if none is in the window. */
static bool take_near(struct alloc *a, uint64_t near, uint64_t *slot)
{
    /* A file that grows in sequence wants its next slot where the last slack begins: leave that for overwrites. */
    if (near >= a->tail || near >= a->end || a->free_slots == 0)
        return false;
    uint64_t low = near > NEAR_WINDOW ? near - NEAR_WINDOW : 0;
    uint64_t high = a->end - near > NEAR_WINDOW ? near + NEAR_WINDOW : a->end;
    uint64_t after = next_slot(a, near, high, true);
    uint64_t before = previous_free(a, low, near);

    if (after == high && before == UINT64_MAX)
        return false;
    *slot = before == UINT64_MAX || (after < high && after - near <= near - before) ? after : before;
    clear_free(a, *slot);
    return true;
}

/* Any hole, once so much is free that a longer file would be a waste. */
static bool take_hole(struct alloc *a, uint64_t *slot)
{
    if (a->free_slots <= a->end / SPARSE_SHARE)
        return false;
    uint64_t start = a->hole_cursor < a->end ? a->hole_cursor : 0;
    *slot = next_slot(a, start, a->end, true);
    if (*slot == a->end)
        *slot = next_slot(a, 0, a->end, true);
    a->hole_cursor = *slot + 1;
    clear_free(a, *slot);
    return true;
}

int alloc_data(struct alloc *a, uint64_t near, uint64_t *slot)
{
    if ((near && take_near(a, near, slot)) || take_hole(a, slot))
        return 0;
    return take_at_end(a, 1, slot);
}

/* `slots` more were looked through for a run of barren_n. */
static void pass_barren(struct alloc *a, uint64_t slots)
{
    a->barren_left -= slots < a->barren_left ? slots : a->barren_left;
}

/* Next fit: looks through a bounded stretch of the map from where the last search ended; not at all once the whole map was
 * looked through in vain and nothing but short slack was freed since, as while a file grows. */
static bool find_run(struct alloc *a, uint64_t n, uint64_t *first)
{
    if (a->free_slots < n || (n >= a->barren_n && a->barren_left == 0))
        return false;
    uint64_t at = a->run_cursor * BITS;
    uint64_t left = a->end;                     /* slots until the map was gone through once */
    if (at >= a->end)
        at = 0;
    if (n != a->barren_n) {
        a->barren_n = n;
        a->barren_left = a->end;
    }

    for (uint64_t looked = 0; left > 0 && looked < RUN_SEARCH;) {
        uint64_t run = next_slot(a, at, a->end, true);
        uint64_t run_end = run;
        if (run < a->end)
            run_end = next_slot(a, run, n < a->end - run ? run + n : a->end, false);
        if (run_end - run >= n) {
            *first = run;
            a->run_cursor = run / BITS;
            pass_barren(a, run - at);
            a->barren_left += run % BITS;       /* the next search begins there: looks at them twice */
            return true;
        }
        looked += 1 + (run_end - at) / BITS;
        left -= run_end - at < left ? run_end - at : left;
        pass_barren(a, run_end - at);
        at = run_end < a->end ? run_end : 0;
    }
    a->run_cursor = at / BITS;
    if (a->barren_left > 0)
        a->barren_left += at % BITS;
    return false;
}

int alloc_run(struct alloc *a, uint64_t n, uint64_t *first)
{
    assert(n > 0);
    if (!find_run(a, n, first))
        return take_at_end(a, n, first);
    for (uint64_t slot = *first; slot < *first + n; slot++)
        clear_free(a, slot);
    return 0;
}

/* ---- Taking back ---- */

void alloc_undo(struct alloc *a, uint64_t slot) { set_free(a, slot, true); }

/* Makes room for one more in the queue, first by moving it to the front. Returns 0 or -ENOMEM. */
static int quarantine_room(struct alloc *a)
{
    size_t count = a->last_retired - a->first_retired;

    if (a->last_retired < a->room)
        return 0;
    if (a->first_retired > count) {
        memcpy(a->quarantine, a->quarantine + a->first_retired, count * sizeof *a->quarantine);
        a->first_retired = 0;
        a->last_retired = count;
        return 0;
    }
    size_t room = a->room ? a->room * 2 : 16;
    struct retired *grown = realloc(a->quarantine, room * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    a->quarantine = grown;
    a->room = room;
    return 0;
}

int alloc_retire(struct alloc *a, uint64_t slot, uint64_t commit)
{
    bool empty = a->first_retired == a->last_retired;
    struct retired *last = empty ? NULL : &a->quarantine[a->last_retired - 1];

    assert(slot >= ROOT_SLOTS && slot < a->end && !is_free(a, slot));
    assert(empty || commit >= last->commit);
    if (!empty && last->commit == commit && last->slot + last->n == slot) {
        last->n++;
    } else {
        int error = quarantine_room(a);
        if (error)
            return error;
        a->quarantine[a->last_retired++] = (struct retired){slot, 1, commit};
    }
    a->quarantined++;
    group_of(a, slot)->known |= bit(slot);
    return 0;
}

void alloc_release(struct alloc *a, uint64_t commit)
{
    if (a->marked) {
        if (!a->release_waits || commit > a->release_commit)
            a->release_commit = commit;
        a->release_waits = true;
        return;
    }
    for (; a->first_retired < a->last_retired; a->first_retired++) {
        const struct retired *r = &a->quarantine[a->first_retired];
        if (r->commit > commit)
            break;
        for (uint64_t slot = r->slot; slot < r->slot + r->n; slot++)
            set_free(a, slot, true);
        a->quarantined -= r->n;
    }
}

/* ---- The scan ---- */

int alloc_scan_begin(struct alloc *a)
{
    assert(!a->marked);
    a->marked = calloc((a->end + BITS - 1) / BITS, sizeof *a->marked);
    if (!a->marked)
        return -ENOMEM;
    a->mark_end = a->end;
    a->damaged = false;
    return 0;
}

int alloc_scan_mark(struct alloc *a, uint64_t slot)
{
    assert(a->marked);
    bool valid = slot >= ROOT_SLOTS && slot < a->mark_end && slot < a->end && !is_free(a, slot)
        && !(a->marked[slot / BITS] & bit(slot));
    if (!valid) {
        a->damaged = true;
        return -EUCLEAN;
    }
    a->marked[slot / BITS] |= bit(slot);
    return 0;
}

void alloc_scan_cancel(struct alloc *a)
{
    free(a->marked);
    a->marked = NULL;
    if (a->release_waits) {
        a->release_waits = false;
        alloc_release(a, a->release_commit);
    }
}

int alloc_scan_end(struct alloc *a)
{
    bool damaged = a->damaged;

    assert(a->marked);
    if (!damaged) {
        /* What was cut off since the mount began is known, so the marks cover all that is not. */
        uint64_t limit = a->open_end < a->mark_end ? a->open_end : a->mark_end;
        for (uint64_t at = 0; at < limit; at += BITS) {
            uint64_t lost = ~group_of(a, at)->known & ~a->marked[at / BITS];
            if (at == 0)
                lost &= UINT64_MAX << ROOT_SLOTS;
            if (limit - at < BITS)
                lost &= bit(limit) - 1;
            free_bits(a, group_of(a, at), lost, true);
        }
        a->open_end = ROOT_SLOTS;
    }
    alloc_scan_cancel(a);
    return damaged ? -EUCLEAN : 0;
}

bool alloc_known(const struct alloc *a) { return a->open_end == ROOT_SLOTS; }

/* ---- Numbers, and space to give back ---- */

uint64_t alloc_end(const struct alloc *a) { return a->end; }
uint64_t alloc_free_below_end(const struct alloc *a) { return a->free_slots; }
uint64_t alloc_quarantined(const struct alloc *a) { return a->quarantined; }

/* In whole groups: a fragmented map is passed over fast, and aligned holes suit the file system below. */
bool alloc_next_reclaim(struct alloc *a, uint64_t min, uint64_t *first, uint64_t *n)
{
    uint64_t groups = a->end / BITS, left = groups < RECLAIM_SEARCH ? groups : RECLAIM_SEARCH, at = a->reclaim_cursor;

    /* Asked with each commit, so it must cost nothing as a rule: a search has to be earned by `min` more slots. */
    if (a->reclaimable * BITS < min || a->newly_reclaimable * BITS < min)
        return false;
    while (left > 0) {
        if (at >= groups)
            at = 0;
        uint64_t run_end = at, fresh = 0;
        for (; run_end < groups && a->group[run_end].free == UINT64_MAX; run_end++)
            fresh += (uint64_t)__builtin_popcountll(a->group[run_end].fresh);
        /* Most of a run may have been reported before: it is worth another call once enough was used and freed again. */
        if (fresh > 0 && fresh >= min) {
            for (uint64_t g = at; g < run_end; g++) {
                a->reclaimable -= is_reclaimable(&a->group[g]);
                a->group[g].fresh = 0;
            }
            a->reclaim_cursor = run_end;
            *first = at * BITS;
            *n = (run_end - at) * BITS;
            return true;
        }
        uint64_t passed = run_end - at + 1;     /* the group that ended the run begins none */
        left -= passed < left ? passed : left;
        at += passed;
    }
    a->reclaim_cursor = at;
    a->newly_reclaimable = 0;
    return false;
}

uint64_t alloc_trim(struct alloc *a)
{
    while (a->end > ROOT_SLOTS && is_free(a, a->end - 1)) {
        clear_free(a, a->end - 1);
        a->end--;
    }
    return a->end;
}
