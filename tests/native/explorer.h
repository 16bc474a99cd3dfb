/* The explorer: opens every state that a crash may leave of a recorded run (explorer_disk.h), right after it, or after a process that
 * went on from there was hit by a second one. Each must be exactly one committed state, none older than what was acknowledged, and
 * the object must work on. Include it once.
 *
 * ENCFSD_EXPLORE=long runs more programs; what is explored is the same each time. Of one program is explored
 *
 *                                       thoroughly                          otherwise
 *   subsets of unsynced changes         all of up to 10                     all of up to 6
 *     of more                           prefixes, one, all but one; 100     the same; 10 at random
 *   torn writes                         every sector of up to 10 changes    every sector of roots, one of others
 *   kills                               after every call                    after every fourth
 *   states after which it must work on  every second                        every eighth
 *   second crashes after a power loss   of every 64th state                 of every 512th
 *
 * What follows a crash is never explored thoroughly. */
#ifndef ENCFSD_EXPLORER_H
#define ENCFSD_EXPLORER_H

#include "check.h"
#include "explorer_session.h"

/* ---- The explorer ---- */

enum { SEEN = 1 << 18, MAIN_EPOCH = 2, JUDGE_EPOCH = 9, DEEPEST = 2 };

static struct {
    bool longer;                        /* ENCFSD_EXPLORE=long */
    bool thorough;                      /* the program being explored */
    struct keyring *ring;
    struct pool *pool;
    struct place work, crash;

    /* the program being explored */
    const char *base, *program;
    char later[300];                    /* crashes so far and what followed them */
    uint64_t random;
    uint64_t seen[SEEN];                /* states judged already: an open hash, emptied for each program */
    unsigned seen_count;
    int depth;                          /* crashes before this one */
    bool scan;                          /* sessions learn the free map when they begin */
    bool drop_fence, drop_barriers, drop_names;     /* negative controls: what the recorder does not see */

    unsigned long states, runs, violations;
    bool control;                       /* a negative control: a violation is what it waits for */
} x;

static inline uint64_t random_next(void)
{
    x.random ^= x.random << 13;
    x.random ^= x.random >> 7;
    x.random ^= x.random << 17;
    return x.random;
}

/* A pool without room makes every node come from malloc, and nothing of the tree is cached. */
enum memory { ROOMY, CACHING, TIGHT };

static inline bool explorer_begin(enum memory memory)
{
    static const uint8_t volume[ID_SIZE] = {7}, key[KEY_SIZE] = {42};
    static bool ready;
    const char *mode = getenv("ENCFSD_EXPLORE");
    const struct pool_options list = {.bytes = memory == TIGHT ? 0 : 2 << 20, .reserve_nodes = 8, .evict = object_evict};
    char reason[200];

    if (!ready && !CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return false;
    ready = true;
    memset(&x, 0, sizeof x);
    x.longer = x.thorough = mode && strcmp(mode, "long") == 0;
    disk_hooks();
    if (!CHECK_EQ(pool_create(&x.pool, &list, NULL, 0), 0) || !CHECK_EQ(keyring_create(&x.ring, volume, key), 0))
        return false;
    watched = &x.crash.screen;
    return place_open(&x.work, x.pool, x.ring, memory == CACHING) && place_open(&x.crash, x.pool, x.ring, memory == CACHING);
}

static inline void explorer_end(const char *what)
{
    printf("%s: %lu crash states of %lu runs, %lu violations\n", what, x.states, x.runs, x.violations);
    if (x.control)
        CHECK(x.violations > 0);        /* an explorer that finds nothing here finds nothing anywhere */
    place_close(&x.work);
    place_close(&x.crash);
    CHECK_EQ(pool_destroy(x.pool), 0);
    keyring_destroy(x.ring);
    history_cut(0);
    pages_free(NULL);
    blockio_set_hooks(NULL);
}

/* One violation, with the shortest history, says more than all that follow from it. */
static inline bool enough(void) { return x.violations > 0; }

static inline void violation(const char *what, const char *state)
{
    x.violations++;
    if (x.control)
        return;
    fprintf(stderr, "base %s, program \"%s\"%s%s: %s: %s\n", x.base, x.program, x.scan ? ", free map known" : "", x.later, state,
            what);
    CHECK(!"a crash state is wrong");
}

static inline void explore(const struct world *start, const struct trace *t);

/* What follows a crash is too much to be explored in every detail. */
static inline bool thorough(void) { return x.thorough && x.depth == 0; }

/* ---- One state ---- */

/* The object works on: another write, a commit, all there after the next opening. */
static inline const char *works(struct session *s)
{
    const char *wrong = NULL;
    int length = commits;

    session_use(s);
    if (step(s, 'q') || step(s, 'a') || step(s, 'S'))
        wrong = "opens, but cannot be written and committed";
    else if (step(s, 'p') || step(s, 'S'))
        wrong = "opens, but cannot be committed twice";
    struct metadata exact = {.known = true, .record = history[s->durable].record};
    session_end(s);
    if (!wrong && !session_mount(s, &x.crash, &exact, JUDGE_EPOCH + 1)) {
        wrong = "does not open after recovery and a commit";
    } else if (!wrong) {
        wrong = compare(s->o, history[s->durable].bytes, history[s->durable].size, false);
        object_close(s->o);
    }
    history_cut(length);
    return wrong;
}

/* Opens the state that x.crash shows. NULL, or what is wrong with it. */
static inline const char *judge(const struct world *w, bool use)
{
    const char *wrong = NULL;
    struct session s;

    if (!session_mount(&s, &x.crash, &w->metadata, JUDGE_EPOCH))
        return s.error ? "does not open" : "opens as something that was never committed";
    if (w->floor >= 0 && !descends(s.durable, w->floor))
        wrong = "opens as something older than what was acknowledged, or beside it";
    if (!wrong)
        wrong = compare(s.o, history[s.durable].bytes, history[s.durable].size, false);
    if (!wrong && use && object_verify(s.o, NULL, NULL, NULL))
        wrong = "does not verify";
    if (!wrong && use)
        return works(&s);
    object_close(s.o);
    return wrong;
}

static inline uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* True if a state with the same content and the same demands was seen before. */
static inline bool seen_before(const struct world *w, const struct image *image, uint64_t torn)
{
    uint64_t hash = mix(mix(image->exists, image->length), torn);

    for (uint64_t i = 0; i < image->length; i++)
        hash = mix(hash, image->slot[i] ? image->slot[i]->id : 0);
    hash = mix(mix(hash, (uint64_t)w->floor), w->metadata.record.counter << 8 | w->metadata.active_epoch << 1 | w->metadata.is_object_0);
    hash |= 1;                          /* 0: free */
    size_t at = hash % SEEN;
    for (; x.seen[at]; at = (at + 1) % SEEN)
        if (x.seen[at] == hash)
            return true;
    if (x.seen_count < SEEN / 2) {
        x.seen[at] = hash;
        x.seen_count++;
    }
    return false;
}

static inline void go_on(const struct world *start, const char *how);
static inline void explore_kills(const struct world *start, const struct trace *t);

static inline void try(const struct world *w, const struct image *image, uint64_t torn, const char *state)
{
    if (enough() || seen_before(w, image, torn) || !screen_show(&x.crash.screen, image))
        return;
    x.states++;
    bool use = random_next() % (thorough() ? 2 : 8) == 0;
    const char *wrong = judge(w, use);
    if (wrong)
        violation(wrong, state);
    else if (!torn && x.depth == 0 && !x.control && random_next() % (x.thorough ? 64 : 512) == 0) {
        struct world *later = malloc(sizeof *later);
        world_new(later);
        later->durable = *image;
        later->name_durable = true;
        later->metadata = w->metadata;
        later->floor = w->floor;
        go_on(later, "power loss");
        free(later);
    }
}

/* ---- All states of one moment ---- */

/* The unsynced changes that reached the disk. */
struct choice {
    bool on_disk[EVENTS];
    const char *name;
};

/* torn: this change only up to sector `sectors`; -1: none. */
static inline void try_choice(const struct world *w, const struct choice *c, int torn, int sectors)
{
    struct image *image = malloc(sizeof *image);
    struct page *mark = all_pages;
    char state[120];
    uint64_t tear = 0;

    *image = w->durable;
    image->exists = true;
    for (int i = 0; i < w->changes; i++) {
        if (i == torn) {
            const struct page *old = image->slot[w->change[i]->slot];
            struct page *page = page_new();
            if (old)
                memcpy(page->bytes, old->bytes, NODE_SIZE);
            else
                memset(page->bytes, 0, NODE_SIZE);
            memcpy(page->bytes, w->change[i]->page->bytes, (size_t)sectors * SECTOR);
            /* Named by what it is made of: the same tear is seen before. */
            page->id = tear = mix(mix(w->change[i]->page->id, old ? old->id : 0), (uint64_t)sectors);
            image_apply(image, w->change[i]);
            image->slot[w->change[i]->slot] = page;
        } else if (c->on_disk[i]) {
            image_apply(image, w->change[i]);
        }
    }
    if (torn >= 0)
        snprintf(state, sizeof state, "%s of %d changes, slot %llu torn after sector %d", c->name, w->changes,
                 (unsigned long long)w->change[torn]->slot, sectors);
    else
        snprintf(state, sizeof state, "%s of %d changes", c->name, w->changes);
    try(w, image, tear, state);
    pages_free(mark);
    free(image);
}

static inline void choose(struct choice *c, const struct world *w, bool on_disk, const char *name)
{
    c->name = name;
    for (int i = 0; i < w->changes; i++)
        c->on_disk[i] = on_disk;
}

static inline void explore_subsets(const struct world *w, struct choice *c)
{
    int n = w->changes;

    if (n <= (thorough() ? 10 : 6)) {
        c->name = "a subset";
        for (unsigned mask = 0; mask < 1u << n; mask++) {
            for (int i = 0; i < n; i++)
                c->on_disk[i] = mask >> i & 1;
            try_choice(w, c, -1, 0);
        }
        return;
    }
    choose(c, w, false, "a beginning");
    for (int i = 0; i < n; i++) {
        try_choice(w, c, -1, 0);
        c->on_disk[i] = true;
    }
    try_choice(w, c, -1, 0);
    for (int i = 0; i < n; i++) {
        choose(c, w, true, "all but one");
        c->on_disk[i] = false;
        try_choice(w, c, -1, 0);
        choose(c, w, false, "only one");
        c->on_disk[i] = true;
        try_choice(w, c, -1, 0);
    }
    for (int r = 0; r < (thorough() ? 100 : 10); r++) {
        choose(c, w, true, "a random subset");
        bool roots = random_next() % 2, dense = random_next() % 2;
        for (int i = 0; i < n; i++) {
            bool root = w->change[i]->slot < ROOT_SLOTS;
            c->on_disk[i] = (root && roots) || (random_next() % 8 < (dense ? 7 : 3));
        }
        try_choice(w, c, -1, 0);
    }
}

static inline void explore_torn(const struct world *w, struct choice *c)
{
    for (int i = 0; i < w->changes; i++) {
        if (w->change[i]->kind != WRITTEN)
            continue;
        bool all = (thorough() && w->changes <= 10) || w->change[i]->slot < ROOT_SLOTS;
        int first = all ? 1 : 1 + (int)(random_next() % (SECTORS - 1)), last = all ? SECTORS - 1 : first;
        if (!all && w->changes > 20 && random_next() % 8)
            continue;
        for (int sectors = first; sectors <= last; sectors++) {
            choose(c, w, true, "all");
            try_choice(w, c, i, sectors);
            if (all) {
                choose(c, w, false, "none");
                try_choice(w, c, i, sectors);
            }
        }
    }
}

/* Power fails now, or while the barrier that comes next is at work. */
static inline void explore_moment(const struct world *w)
{
    if (!w->metadata.known)             /* nobody knows of the object yet */
        return;
    struct choice *c = malloc(sizeof *c);
    explore_subsets(w, c);
    explore_torn(w, c);
    if (!w->name_durable) {
        struct image *missing = calloc(1, sizeof *missing);
        try(w, missing, 0, "the file has no name");
        free(missing);
    }
    free(c);
}

/* ---- A run ---- */

static inline void world_step(struct world *w, const struct event *e)
{
    int left;

    switch (e->kind) {
    case CREATED:
        w->durable.exists = true;
        break;
    case REMOVED:                       /* by object_create that failed: nobody knows of it */
        w->durable = (struct image){0};
        w->changes = 0;
        break;
    case NAMED:
        w->name_durable = true;
        break;
    case BARRIER:
        world_make_durable(w);
        break;
    case METADATA:
        w->metadata = e->metadata;
        break;
    case ACKNOWLEDGED:
        if (w->floor < 0 || descends(e->commit, w->floor))
            w->floor = e->commit;
        break;
    case OPENED:
        w->floor = e->commit;
        break;
    case FAILED_BARRIER:
        memset(w->adrift, true, (size_t)w->changes);
        break;
    case LOST:
        left = 0;
        for (int i = 0; i < w->changes; i++)
            if (!w->adrift[i])
                w->change[left++] = w->change[i];
        memset(w->adrift, false, (size_t)left);
        w->changes = left;
        break;
    default:
        world_change(w, e);
    }
}

/* What the recorder of a negative control does not see. */
static inline bool is_dropped(const struct trace *t, int i)
{
    const struct event *e = &t->event[i];

    if (e->kind == NAMED)
        return x.drop_names;
    if (e->kind != BARRIER)
        return false;
    return x.drop_barriers || (x.drop_fence && i + 1 < t->count && t->event[i + 1].kind == OPENED);
}

/* Changes add states, all others remove some or ask for more: it is enough to look just before the latter. */
static inline void explore(const struct world *start, const struct trace *t)
{
    struct world *w = malloc(sizeof *w);
    bool looked = false;

    *w = *start;
    x.runs++;
    for (int i = 0; i < t->count && !enough(); i++) {
        if (is_dropped(t, i))
            continue;
        if (!is_change(&t->event[i]) && !looked)
            explore_moment(w);
        looked = t->event[i].kind == BARRIER && w->changes == 0;
        world_step(w, &t->event[i]);
    }
    explore_moment(w);
    free(w);
}

/* A process finds what the crash left in `start`, goes on, and is hit by a power loss. */
static inline void go_on(const struct world *start, const char *how)
{
    static const char *const programs[] = {"oS", "aGM", "fS", "SqS", "tGMoS", "hSaS", "fGMfGM", "uSpS"};
    const char *program = programs[random_next() % (sizeof programs / sizeof programs[0])];
    struct trace *t = malloc(sizeof *t);
    struct image *cached = malloc(sizeof *cached);
    struct page *mark = all_pages;
    int length = commits;
    bool scan = random_next() % 2;
    size_t told = strlen(x.later);
    struct session s;

    snprintf(x.later + told, sizeof x.later - told, ", then %s, then \"%s\"%s", how, program, scan ? " with the free map" : "");
    x.depth++;
    t->count = 0;
    world_cached(start, cached);
    if (screen_show(&x.work.screen, cached)) {
        recording = t;
        bool mounted = session_mount(&s, &x.work, &start->metadata, MAIN_EPOCH + (uint64_t)x.depth);
        if (!mounted) {
            violation(s.error ? "does not open" : "opens as something that was never committed", "the page cache");
        } else {
            session_use(&s);
            int rc = scan ? object_scan(s.o) : 0;
            if (rc || run(&s, program))
                violation("cannot be used", "the page cache");
            land_mark(&s);
            session_end(&s);
        }
        recording = NULL;
        screen_forget(&x.work.screen);
        if (mounted) {
            explore(start, t);
            if (x.depth < DEEPEST && random_next() % 32 == 0)
                explore_kills(start, t);
        }
    }
    history_cut(length);
    pages_free(mark);
    free(cached);
    free(t);
    x.depth--;
    x.later[told] = 0;
}

/* The process dies after each call of the run that is not one of many alike. */
static inline void explore_kills(const struct world *start, const struct trace *t)
{
    struct world *w = malloc(sizeof *w);
    char how[80];
    int candidates = 0;

    *w = *start;
    for (int i = 0; i < t->count && !enough(); i++) {
        bool within = i > 0 && t->event[i].kind == WRITTEN && t->event[i].slot >= ROOT_SLOTS && t->event[i - 1].kind == WRITTEN;
        if (w->metadata.known && !within && (thorough() || x.control || ++candidates % 4 == 0)) {
            snprintf(how, sizeof how, "kill -9 after event %d of %d", i, t->count);
            go_on(w, how);
        }
        if (!is_dropped(t, i))
            world_step(w, &t->event[i]);
    }
    free(w);
}

/* ---- Bases ---- */

struct base {
    const char *name;
    struct world world;
};

enum { NEW, SMALL, TOMBS, FOLDED, OBJECT_0, BASES };

static struct base bases[BASES];

/* new: nothing. small: three nodes and a bit, in the delta. tombs: a tree of height 2, its delta almost full. folded: a tree of
 * height 2, its delta empty. object 0: small, but no metadata know its root. */
static inline void make_base(int which)
{
    static const char *const names[] = {"new", "small", "tombs", "folded", "object 0"};
    struct base *b = &bases[which];
    struct trace *t = malloc(sizeof *t);
    struct session s;
    struct image none = {0};

    b->name = names[which];
    world_new(&b->world);
    if (which == OBJECT_0) {
        b->world = bases[SMALL].world;
        b->world.metadata.is_object_0 = true;
        b->world.metadata.active_epoch = 1;
    }
    if (which == NEW || which == OBJECT_0) {
        free(t);
        return;
    }
    t->count = 0;
    screen_show(&x.work.screen, &none);
    x.work.env.epoch = 1;
    recording = t;
    CHECK(session_new(&s, &x.work));
    CHECK_EQ(run(&s, which == SMALL ? "aaapGM" : "aaa"), 0);
    if (which != SMALL) {
        CHECK_EQ(write_both(&s, 70 * NODE_SIZE, 62 * NODE_SIZE), 0);
        CHECK_EQ(run(&s, "GM"), 0);
        CHECK_EQ(which == TOMBS ? punch_both(&s, 76 * NODE_SIZE, 52 * NODE_SIZE) : truncate_both(&s, 74 * NODE_SIZE + 1000), 0);
        CHECK_EQ(run(&s, "GM"), 0);
    }
    session_end(&s);
    recording = NULL;
    for (int i = 0; i < t->count; i++)
        world_step(&b->world, &t->event[i]);
    world_make_durable(&b->world);
    b->world.name_durable = true;
    screen_forget(&x.work.screen);
    free(t);
}

static inline void make_bases(void)
{
    for (int i = 0; i < BASES; i++)
        make_base(i);
}

#endif
