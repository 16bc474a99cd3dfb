/* The commit protocol of a whole volume, explored: programs of a few requests run on a real volume, and every directory that a crash may
 * leave of them (volume_world.h) is mounted. Whatever was acknowledged must be there, every file must be one of its versions and every
 * name before or after (volume_history.h), and the volume must work on.
 *
 * ENCFSD_EXPLORE=long explores all programs of up to two operations thoroughly: every moment, every subset of up to 8 unsynced changes,
 * 12 times three samples of more. Of all programs of three, what the third adds (every crash before it is one of two) less so: every
 * second moment, every subset of up to 4 changes, twice three samples of more. Without it a part is explored. */
#include "check.h"
#include "volume_history.h"

enum { SEEN = 1 << 16, EXHAUSTIVE = 4, EXHAUSTIVE_LONG = 8, VERIFY_EACH = 8 };

static struct {
    bool longer;                        /* ENCFSD_EXPLORE=long */
    bool thorough;                      /* the program being explored */
    struct history start;
    struct crash start_files;
    int start_count;                    /* files of the volume before a program */
    const char *program;
    uint64_t seen[SEEN];                /* hashes of what was judged already: an open table, emptied for each program */
    unsigned seen_count;
    char later[64];                     /* what followed the first crash, if anything */
    unsigned long states, violations;
    const char *meanwhile;              /* what happens while the last operation's mark is on its way; NULL: nothing */
    bool busy;                          /* groups run while the program does */
    bool control;                       /* a negative control: a violation is what it waits for */
} x;

static bool seen_before(uint64_t hash)
{
    uint64_t i = hash % SEEN;

    if (x.seen_count > SEEN / 2) {
        memset(x.seen, 0, sizeof x.seen);
        x.seen_count = 0;
    }
    for (; x.seen[i]; i = (i + 1) % SEEN)
        if (x.seen[i] == hash)
            return true;
    x.seen[i] = hash;
    x.seen_count++;
    return false;
}

static void judge(const struct crash *c, const struct history *h, int note, int event, const char *how)
{
    int count = place.count;

    if (seen_before(c->hash))
        return;
    struct trace *trace = recorder.trace;
    enum blindness blind = recorder.blind;
    recorder.trace = NULL;
    recorder.blind = SEES_ALL;
    crash_show(c);
    x.states++;
    if (!history_judge(h, note, x.states % VERIFY_EACH == 0)) {
        x.violations++;
        if (!x.control)
            fprintf(stderr, "program \"%s\"%s, event %d, %s: %s\n", x.program, x.later, event, how, verdict);
    }
    files_forget(count);
    recorder.trace = trace;
    recorder.blind = blind;
}

/* ---- Answers to what a power loss leaves open ---- */

struct answers {
    uint64_t bits;                      /* for the first 64 questions... */
    uint64_t seed;                      /* ...or, if nonzero, by chance */
    unsigned percent;
    int except;                         /* this one the other way round; -1: none */
};

static bool answer(const void *arg, int k)
{
    const struct answers *a = arg;
    bool well;

    if (a->seed) {
        uint64_t z = (a->seed + (uint64_t)k) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        well = (z ^ z >> 31) % 100 < a->percent;
    } else {
        well = k < 64 && (a->bits >> k & 1);
    }
    return well != (k == a->except);
}

static void lose_power(const struct world *w, const struct history *h, int event, struct answers a, int torn)
{
    static struct crash c;

    crash_power(w, &c, answer, &a, torn);
    judge(&c, h, w->note, event, torn >= 0 ? "power lost, torn" : "power lost");
    if (memcmp(&w->state, &w->state_after, sizeof w->state) == 0)
        return;
    c.state = w->state_after;
    crash_hash(&c);
    judge(&c, h, w->note, event, "power lost after the state record was written");
}

static void power_losses(const struct world *w, const struct history *h, int event)
{
    int n = world_choices(w);
    unsigned chances = x.thorough ? 12 : 2;

    if (n <= (x.thorough ? EXHAUSTIVE_LONG : EXHAUSTIVE)) {
        for (uint64_t bits = 0; bits < 1u << n; bits++)
            lose_power(w, h, event, (struct answers){.bits = bits, .except = -1}, -1);
    } else {
        lose_power(w, h, event, (struct answers){.bits = 0, .except = -1}, -1);
        /* All but one, only one: what depends on a single write shows here. */
        for (unsigned i = 0; i < chances; i++) {
            int one = (int)(random_next() % (uint64_t)n);
            lose_power(w, h, event, (struct answers){.seed = 1, .percent = 100, .except = one}, -1);
            lose_power(w, h, event, (struct answers){.seed = 1, .percent = 0, .except = one}, -1);
            lose_power(w, h, event, (struct answers){.seed = random_next() | 1, .percent = 20 + (unsigned)(random_next() % 70),
                                                     .except = -1}, -1);
        }
    }
    if (n > 0)
        lose_power(w, h, event, (struct answers){.seed = random_next() | 1, .percent = 50, .except = -1},
                   (int)(random_next() % (uint64_t)n));
}

/* ---- Running ---- */

/* The state of the directory after the first `count` events of a trace that began with `base`. */
static void world_at(struct world *w, const struct crash *base, const struct trace *t, int count)
{
    world_after(w, base, t);
    for (int i = 0; i < count; i++)
        world_step(w, i);
}

/* Every crash of the trace from event `first` on, the last one first: there most is promised. */
static void explore(const struct crash *base, const struct trace *t, int first, const struct history *h, unsigned every)
{
    static struct world w;
    static struct crash c;

    for (int count = t->count; count > first; count--) {
        if (t->event[count - 1].kind == NOTED && count != t->count)
            continue;                   /* the same as the event before it, with other promises: judged with these */
        if (every > 1 && count != t->count && random_next() % every)
            continue;
        world_at(&w, base, t, count);
        crash_killed(&w, &c);
        judge(&c, h, w.note, count, "killed");
        power_losses(&w, h, count);
    }
}

/* After a crash: mount, serve, go on, crash again. `t` holds what is not synced yet of before. */
static void crash_again(const struct crash *base, struct trace *t, const struct crash *left, const struct history *before, int note,
                        unsigned every)
{
    static const char *const LATER[] = {"", "F", "bF", "aF", "A", "bFFF", "CD", "bOF"};
    static struct history h;
    struct found_name found[NAMES];
    struct client c = {0};
    struct version_data *versions = version_data;
    struct page *pages = all_pages;
    int files = place.count, first = t->count, at;
    const char *op = LATER[random_next() % (sizeof LATER / sizeof *LATER)];

    snprintf(x.later, sizeof x.later, ", crash, \"%s\"", op);
    h = *before;
    crash_show(left);
    recorder.trace = t;
    recorder_note((uint64_t)note);
    if (history_mount(&c) || !history_matches(&c, &h, note, found, &at)) {
        x.violations++;
        if (!x.control)
            fprintf(stderr, "program \"%s\"%s: %s %s\n", x.program, x.later, c.message, verdict);
    } else {
        history_serve(&h, note, found, at);
        if (h.names[at].file[0] < 0 || h.names[at].file[1] < 0)
            op = "CF";                  /* one of the two that the others work on is gone */
        for (; *op; op++) {
            if (*op == 'a' || *op == 'b')
                h.focus = h.names[at].file[*op - 'a'];
            else if (history_name_of(&h, h.focus) >= 0 || *op == 'C')
                CHECK_EQ(history_run(&c, &h, *op), 0);
        }
    }
    history_kill(&c);
    recorder.trace = NULL;
    explore(base, t, first, &h, every);
    files_forget(files);
    pages_free(pages);
    history_free(versions);
    x.later[0] = 0;
}

/* Picks a few crashes of the trace and goes on from them. */
static void explore_twice(const struct crash *base, const struct trace *t, const struct history *h, unsigned times, unsigned every)
{
    static struct trace longer;
    static struct world w;
    static struct crash c;

    for (unsigned i = 0; i < times; i++) {
        int count = 1 + (int)(random_next() % (uint64_t)t->count);
        world_at(&w, base, t, count);
        if (i % 3) {                    /* killed: what was not synced still is not */
            crash_killed(&w, &c);
            memcpy(longer.event, t->event, (size_t)count * sizeof *t->event);
            longer.count = count;
            crash_again(base, &longer, &c, h, w.note, every);
        } else {
            struct answers a = {.seed = random_next() | 1, .percent = 60, .except = -1};
            struct page *pages = all_pages;
            crash_power(&w, &c, answer, &a, -1);
            longer.count = 0;
            crash_again(&c, &longer, &c, h, w.note, every);
            pages_free(pages);
        }
    }
}

static _Atomic bool enough;

/* Barriers that take their time: more happens between a commit and its mark. */
static int dawdle(const struct blockio_event *e)
{
    static _Thread_local unsigned seed = 1;

    if (e->call == BIO_BARRIER)
        usleep(rand_r(&seed) % 1500);
    return 0;
}

/* Groups, full and forced in turn, and somebody else's fsyncs, that meet whatever the program is doing. */
static void *run_groups(void *volume)
{
    struct volume *v = volume;

    while (!atomic_load(&enough)) {
        groups_sync_all(v->groups);
        groups_sync_metadata(v->groups);
        groups_fsync(v->groups, x.start.file[1].ino, false);
        groups_fsync(v->groups, x.start.file[1].ino, false);
    }
    return NULL;
}

/* What happens between the capture of the last operation's mark and its barrier: the running program, for a hook. */
static struct {
    const char *ops;                    /* NULL: nothing (any more) */
    struct client *client;
    struct history *history;
} meanwhile;

/* The group waits in here, and whoever waits for the group; so requests are made without the queue of completions. */
static int do_meanwhile(const struct blockio_event *e)
{
    static const uint8_t meta[ID_SIZE];
    struct history *h = meanwhile.history;
    struct volume *v;
    const char *ops = meanwhile.ops;

    if (!ops || e->call != BIO_BARRIER || memcmp(e->id, meta, ID_SIZE) != 0)
        return 0;
    meanwhile.ops = NULL;
    v = meanwhile.client->volume;
    v->env.dirty_limit = 1;             /* what is written goes to the disk at once, not only when a group takes it */
    for (; *ops; ops++) {
        const struct history_file *f = &h->file[h->focus];
        if (*ops == 'X') {              /* the newest file is unlinked and forgotten */
            f = &h->file[h->files - 1];
            int name = history_name_of(h, h->files - 1);
            history_names(h)->file[name] = -1;
            history_begin(h);
            CHECK_EQ(ns_unlink(v->ns, ROOT_INO, NAME[name], strlen(NAME[name]), 0), 0);
            request_forget(v, f->ino, UINT32_MAX);
            h->names_now = h->names_count - 1;
        } else {                        /* overwritten */
            struct version *new = history_version(h, h->focus, f->version[f->now].size);
            size_t size = *ops == 'O' ? MANY_NODES * NODE_SIZE : 3000;
            for (size_t i = 0; i < size; i++)
                new->data[i] = (uint8_t)(i * 7 + (size_t)f->count);
            history_begin(h);
            CHECK_EQ(file_write(v, f->ino, new->data, size, 0, 0), 0);
            h->file[h->focus].now = f->count - 1;
        }
    }
    return 0;
}

static int events_so_far(void)
{
    pthread_mutex_lock(&recorder.mutex);
    int count = recorder.trace->count;
    pthread_mutex_unlock(&recorder.mutex);
    return count;
}

/* Runs the program on the volume that all begin with, then explores what may be left of it by crashes after its first `known`
 * operations. */
static void explore_program(const char *program, int known, unsigned every_first, unsigned twice, unsigned every)
{
    static struct trace trace;
    static struct history h;
    struct client c = {0};
    struct version_data *versions = version_data;
    struct page *pages = all_pages;
    int first = 1;

    h = x.start;
    x.program = program;
    memset(x.seen, 0, sizeof x.seen);
    x.seen_count = 0;
    crash_show(&x.start_files);
    trace.count = 0;
    recorder.trace = &trace;
    recorder_note(0);
    if (!CHECK_EQ(history_mount(&c), 0)) {
        fprintf(stderr, "%s\n", c.message);
        return;
    }
    history_hold(&c);
    pthread_t groups;
    atomic_store(&enough, false);
    recorder.interfere = x.busy ? dawdle : x.meanwhile ? do_meanwhile : NULL;
    if (x.busy)
        c.volume->env.dirty_limit = 1;
    if (x.busy)
        pthread_create(&groups, NULL, run_groups, c.volume);
    for (const char *op = program; *op; op++) {
        if (known && op == program + known)
            first = events_so_far();
        if (x.busy)
            usleep(random_next() % 1500);
        if (x.meanwhile && !op[1]) {
            meanwhile.client = &c;
            meanwhile.history = &h;
            meanwhile.ops = x.meanwhile;
        }
        if (!CHECK_EQ(history_run(&c, &h, *op), 0))
            fprintf(stderr, "program \"%s\"\n", program);
    }
    atomic_store(&enough, true);
    if (x.busy)
        pthread_join(groups, NULL);
    recorder.interfere = NULL;
    if (!CHECK(!x.meanwhile || !meanwhile.ops))
        fprintf(stderr, "program \"%s\": no mark\n", program);
    meanwhile.ops = NULL;
    if (c.volume)
        history_kill(&c);
    recorder.trace = NULL;
    explore(&x.start_files, &trace, first, &h, every_first);
    if (twice)
        explore_twice(&x.start_files, &trace, &h, twice, every);
    files_forget(x.start_count);
    pages_free(pages);
    history_free(versions);
}

static bool explorer_begin(void)
{
    const char *mode = getenv("ENCFSD_EXPLORE");
    char reason[200];

    memset(&x, 0, sizeof x);
    x.longer = x.thorough = mode && strcmp(mode, "long") == 0;
    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0) || !history_volume(&x.start))
        return false;
    crash_take(&x.start_files);
    x.start_count = place.count;
    return true;
}

static void explorer_end(const char *what)
{
    printf("%s: %lu states, %lu violations\n", what, x.states, x.violations);
    history_volume_end();
    pages_free(NULL);
    history_free(NULL);
}

/* ---- Tests ---- */

static const char OPERATIONS[] = "CGFOTRUDA";

static const char *const PROGRAMS[] = {
    "FFF", "FFFK", "CGFF", "CFRD", "CGRD", "CGRA", "CRF", "aFRD", "FOFF", "FFTF", "FFRF", "UD", "FFUA", "CUA", "FFXA", "CGFXD",
    "CGUFA", "OK", "TDA", "CGK",
    "aGFF", "OFRA",
};

TEST(every_crash_of_chosen_programs)
{
    if (!explorer_begin())
        return;
    for (size_t i = 0; i < sizeof PROGRAMS / sizeof *PROGRAMS; i++)
        explore_program(PROGRAMS[i], 0, x.longer ? 1 : 2, x.longer ? 4 : 3, x.longer ? 2 : 6);
    CHECK_EQ(x.violations, 0);
    explorer_end("chosen programs");
}

TEST(every_crash_of_other_programs)
{
    unsigned n = sizeof OPERATIONS - 1;

    if (!explorer_begin())
        return;
    for (unsigned i = 0; i < n * n && x.longer; i++)
        explore_program((char[]){OPERATIONS[i / n], OPERATIONS[i % n], 0}, 0, 1, 1, 2);
    x.thorough = false;
    for (unsigned i = 0; i < n * n * n; i++) {
        char program[] = {OPERATIONS[i / n / n], OPERATIONS[i / n % n], OPERATIONS[i % n], 0};
        if (x.longer || i % 79 == 7)
            explore_program(program, x.longer ? 2 : 0, 2, i % 79 == 7, 8);
    }
    CHECK_EQ(x.violations, 0);
    explorer_end("other programs");
}

/* A mark on its way: neither slots nor files that the durable one needs may be used for what comes now. */
TEST(every_crash_of_what_happens_while_a_mark_is_on_its_way)
{
    static const char *const PAIRS[][2] = {
        {"bWA", "W"}, {"bWWA", "WW"}, {"bGA", "W"}, {"bOA", "O"}, {"bOAOA", "WO"}, {"bFFFWA", "W"},
        {"bFFFAWA", "WW"}, {"CGAbWA", "X"}, {"CGFFAbWA", "X"}, {"CGRA", "W"}, {"CGAWA", "X"},
    };

    if (!explorer_begin())
        return;
    for (size_t i = 0; i < sizeof PAIRS / sizeof *PAIRS; i++) {
        x.meanwhile = PAIRS[i][1];
        explore_program(PAIRS[i][0], 0, x.longer ? 1 : 3, x.longer ? 3 : 0, 3);
    }
    CHECK_EQ(x.violations, 0);
    explorer_end("marks on their way");
}

TEST(every_crash_while_groups_run)
{
    static const char *const BUSY[] = {
        "bFFFFFF", "bFOFFOF", "CGFFRbFF", "bWWWWWWWWWWWWWWWW", "CGFXCGFXCGFXbF", "bWFWFWFWFWF",
    };

    if (!explorer_begin())
        return;
    x.busy = true;
    x.thorough = false;                 /* other timings find more than more of each */
    for (unsigned times = x.longer ? 8 : 1; times > 0; times--)
        for (size_t i = 0; i < sizeof BUSY / sizeof *BUSY; i++)
            explore_program(BUSY[i], 0, 5, 1, 8);
    CHECK_EQ(x.violations, 0);
    explorer_end("programs with groups at the same time");
}

/* Does the explorer see it if the disk does not do what it was told? */
static void blind(enum blindness blindness, const char *program, const char *what)
{
    if (!explorer_begin())
        return;
    x.control = true;
    recorder.blind = blindness;
    explore_program(program, 0, 1, blindness == BLIND_RECOVERY ? 4 : 0, 2);
    recorder.blind = SEES_ALL;
    CHECK(x.violations > 0);
    explorer_end(what);
}

TEST(control_metadata_barriers_that_do_nothing) { blind(BLIND_META_BARRIER, "CF", "control, no barrier of the metadata"); }
TEST(control_object_barriers_that_do_nothing) { blind(BLIND_OBJECT_BARRIER, "FF", "control, no barrier of objects"); }
TEST(control_names_that_are_not_synced) { blind(BLIND_NAMES, "CGF", "control, no sync of names"); }
TEST(control_recovery_without_barriers) { blind(BLIND_RECOVERY, "FFF", "control, no barrier in recovery"); }
