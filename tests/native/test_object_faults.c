/* Every call of the backing file fails in turn, once or from then on: the operation says so, nothing acknowledged is lost, and what
 * was not committed is either still there or, after a failed barrier, refused until the object is opened anew. */
#include "explorer.h"

struct run {
    struct session s;
    const struct base *base;
    const char *program;
    bool lasting;
    int error;                          /* of the call that is to fail */
    long nth;
};

static void complain(const struct run *r, const char *at, const char *what)
{
    fprintf(stderr, "base %s, program \"%s\", call %ld fails%s with %d, at \"%s\": %s\n", r->base->name, r->program, r->nth,
            r->lasting ? " for good" : "", r->error, at, what);
    CHECK(!"a failed call was not survived");
    x.violations++;
}

static void arm(const struct run *r)
{
    fault.armed = true;
    fault.lasting = r->lasting;
    fault.countdown = r->nth;
    fault.error = r->error;
    fault.struck = 0;
}

/* The object refuses everything. */
static bool is_dead(struct object *o)
{
    uint8_t byte = 0;
    struct object_record record;

    return object_read(o, &byte, 1, 0, 0) == -EIO && object_write(o, &byte, 1, 0, 0) == -EIO && object_truncate(o, 0, 0) == -EIO
           && object_punch(o, 0, 1, 0) == -EIO && object_write_back(o, 1) == -EIO && object_commit(o, true, &record) == -EIO
           && object_barrier(o) == -EIO && object_scan(o) == -EIO;
}

/* The disk works again; the next mount finds a committed state. */
static bool mount_again(struct run *r, const char *at)
{
    struct metadata metadata = r->s.metadata;
    int acknowledged = r->s.acknowledged;

    session_end(&r->s);
    if (!metadata.known)
        return false;                   /* nobody knows of the object */
    if (!session_mount(&r->s, &x.work, &metadata, x.work.env.epoch + 1)) {
        complain(r, at, r->s.error ? "it cannot be opened again" : "it opens as what was never committed");
        return false;
    }
    session_use(&r->s);
    if (acknowledged >= 0 && !descends(r->s.durable, acknowledged))
        complain(r, at, "it opens as something older than what was acknowledged");
    return true;
}

static const struct base *running;

/* The object is being recovered: whatever was adrift is now found on the disk, or not. */
static void settle(void)
{
    struct world *w = malloc(sizeof *w);
    struct image *image = malloc(sizeof *image);

    *w = running->world;
    for (int i = 0; i < recording->count; i++)
        world_step(w, &recording->event[i]);
    world_make_durable(w);
    *image = w->durable;
    trace_add(recording, (struct event){.kind = BARRIER});
    trace_add(recording, (struct event){.kind = LOST});
    for (int i = 0; i < w->changes; i++) {
        struct event e = *w->change[i];
        e.failed = false;
        if (random_next() % 2) {
            image_apply(image, &e);
            trace_add(recording, e);
        }
    }
    trace_add(recording, (struct event){.kind = BARRIER});
    screen_forget(&x.work.screen);
    screen_show(&x.work.screen, image);
    free(image);
    free(w);
}

/* A step failed. True if the program may go on, with the same step. */
static bool survive(struct run *r, const char *at, int rc)
{
    struct session *s = &r->s;
    bool barrier = false;

    if (fault.struck == 0 || (rc != r->error && rc != -EIO))
        complain(r, at, "an error that nobody made");
    fault.armed = false;
    for (int i = 0; i < recording->count; i++)
        barrier |= recording->event[i].kind == FAILED_BARRIER;
    if (barrier && !object_poisoned(s->o))
        complain(r, at, "a failed barrier was forgotten");
    if (object_poisoned(s->o)) {
        if (!is_dead(s->o))
            complain(r, at, "it is used after a failed barrier");
        return mount_again(r, at);
    }
    const char *wrong = compare(s->o, s->bytes, s->size, false);
    if (wrong)
        complain(r, at, wrong);
    if (strchr("SGg", *at) && !object_is_dirty(s->o))
        complain(r, at, "it is clean after a failed commit");
    return true;
}

/* True if the fault struck: a later call may be next. */
static bool run_with_fault(struct run *r, struct trace *t)
{
    const struct metadata *metadata = &r->base->world.metadata;
    bool lost = false;
    int rc;

    t->count = 0;
    recording = t;
    running = r->base;
    screen_show(&x.work.screen, &r->base->world.durable);
    x.work.env.epoch = MAIN_EPOCH;
    arm(r);
    bool open = metadata->known ? session_mount(&r->s, &x.work, metadata, MAIN_EPOCH) : session_new(&r->s, &x.work);
    if (!open) {
        fault.armed = false;
        if (r->s.error != r->error)
            complain(r, "open", "an error that nobody made");
        if (!metadata->known) {         /* the next one has another name; what could not be removed is in nobody's way */
            free(r->s.bytes);
            screen_forget(&x.work.screen);
            screen_show(&x.work.screen, &r->base->world.durable);
            trace_add(t, (struct event){.kind = REMOVED});
        }
        open = metadata->known ? session_mount(&r->s, &x.work, metadata, MAIN_EPOCH + 1) : session_new(&r->s, &x.work);
    }
    if (!open) {
        complain(r, "open", "it cannot be opened afterwards");
        recording = NULL;
        return true;
    }
    if (metadata->known)
        session_use(&r->s);
    for (const char *at = r->program; *at && !lost;) {
        rc = step(&r->s, *at);
        if (rc == 0)
            at++;
        else if (!survive(r, at, rc))
            lost = true;
    }
    bool struck = fault.struck > 0;
    fault.armed = false;
    if (!lost) {
        rc = step(&r->s, 'S');
        const char *wrong = rc ? "it cannot be committed in the end" : compare(r->s.o, r->s.bytes, r->s.size, false);
        if (wrong)
            complain(r, "end", wrong);
        else if (mount_again(r, "end") && (wrong = compare(r->s.o, history[r->s.durable].bytes, r->s.size, false)))
            complain(r, "end", wrong);
        if (r->s.o)
            session_end(&r->s);
    }
    recording = NULL;
    screen_forget(&x.work.screen);
    return struck;
}

static void fail_each_call(int which, const char *program)
{
    static const int errors[] = {-EIO, -ENOSPC};
    struct trace *t = malloc(sizeof *t);

    for (int lasting = 0; lasting < 2; lasting++)
        for (size_t e = 0; e < 2; e++)
            for (long nth = 0; nth >= 0 && !enough(); nth++) {
                struct run r = {.base = &bases[which], .program = program, .lasting = lasting, .error = errors[e], .nth = nth};
                int length = commits;
                struct page *mark = all_pages;
                x.random = 88172645463325252u + (uint64_t)nth;
                bool more = run_with_fault(&r, t);
                x.base = r.base->name;
                x.program = program;
                if (!enough() && (x.thorough || nth % 4 == 0)) {
                    snprintf(x.later, sizeof x.later, ", call %ld fails%s with %d", nth, lasting ? " for good" : "", r.error);
                    memset(x.seen, 0, sizeof x.seen);
                    x.seen_count = 0;
                    x.depth = 1;
                    explore(&bases[which].world, t);
                    x.depth = 0;
                }
                history_cut(length);
                pages_free(mark);
                if (!more)
                    nth = -2;
            }
    free(t);
}

TEST(every_call_fails_in_turn)
{
    static const char *const programs[] = {"aGMoqSpS", "SoSfSoS", "fwGMtGMoS", "SuShSaS", "ogoGMoS", "SobqBaSfbtBhS", "fbooBwGM"};

    if (explorer_begin(ROOMY)) {
        make_bases();
        on_settle = settle;
        for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++)
            for (int which = 0; which < BASES; which++)
                if (x.thorough || which == NEW || (i + (size_t)which) % 3 == 0)
                    fail_each_call(which, programs[i]);
        on_settle = NULL;
        explorer_end("failing calls");
    }
}

TEST(adopting_what_only_the_page_cache_holds_is_seen)
{
    if (explorer_begin(ROOMY)) {
        x.control = true;
        make_bases();
        fail_each_call(SMALL, "SoS");   /* recovery keeps the cache, as if a failed barrier left nothing behind */
        explorer_end("clean pages after a failed barrier");
    }
}
