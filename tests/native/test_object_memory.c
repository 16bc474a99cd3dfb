/* Every allocation of the object layer fails in turn, once or from then on: the operation says so, changes nothing, leaks nothing (the
 * address sanitizer looks), and succeeds when there is memory again. Linked with --wrap for the functions of malloc. */
#include "explorer.h"

static bool armed, lasting;
static long countdown, refused;

static bool refuse(void)
{
    if (!armed || own_memory || countdown-- > 0)
        return false;
    armed = lasting;
    countdown = 0;
    refused++;
    return true;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **p, size_t alignment, size_t size);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **p, size_t alignment, size_t size);

void *__wrap_malloc(size_t size) { return refuse() ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t n, size_t size) { return refuse() ? NULL : __real_calloc(n, size); }
void *__wrap_realloc(void *p, size_t size) { return refuse() ? NULL : __real_realloc(p, size); }
void *__wrap_aligned_alloc(size_t alignment, size_t size) { return refuse() ? NULL : __real_aligned_alloc(alignment, size); }
int __wrap_posix_memalign(void **p, size_t alignment, size_t size)
{
    return refuse() ? ENOMEM : __real_posix_memalign(p, alignment, size);
}

/* What is to be read again later; `nth` and `at` say where memory ran out. */
static void expect(struct session *s, const char *program, long nth, char at)
{
    const char *wrong = object_poisoned(s->o) ? "refuses everything" : compare(s->o, s->bytes, s->size, false);

    if (wrong) {
        fprintf(stderr, "program \"%s\", allocation %ld fails%s, at '%c': the object %s\n", program, nth, lasting ? " for good" : "",
                at, wrong);
        CHECK(!"memory that ran out was not survived");
        x.violations++;
    }
}

/* True if an allocation failed: a later one may be next. */
static bool run_without_memory(const struct base *base, const char *program, long nth, bool for_good)
{
    const struct metadata *metadata = &base->world.metadata;
    struct session s;
    int rc;

    screen_show(&x.work.screen, &base->world.durable);
    x.work.env.epoch = MAIN_EPOCH;
    refused = 0;
    countdown = nth;
    lasting = for_good;
    armed = true;
    bool open = metadata->known ? session_mount(&s, &x.work, metadata, MAIN_EPOCH) : session_new(&s, &x.work);
    if (!open) {
        armed = false;
        CHECK_EQ(s.error, -ENOMEM);
        if (!metadata->known)
            free(s.bytes);
        if (!CHECK(metadata->known ? session_mount(&s, &x.work, metadata, MAIN_EPOCH) : session_new(&s, &x.work)))
            return true;
    }
    own_memory++;
    if (metadata->known)
        session_use(&s);
    own_memory--;
    for (const char *at = program; *at && !enough();) {
        rc = step(&s, *at);
        if (rc == 0) {
            at++;
            continue;
        }
        bool fine = CHECK_EQ(rc, -ENOMEM) && CHECK(refused > 0) && !(for_good && strchr("SGg", *at) && step(&s, *at) != -ENOMEM);
        armed = false;
        if (!fine)
            x.violations++;
        expect(&s, program, nth, *at);
    }
    armed = false;
    if (!enough()) {
        expect(&s, program, nth, '.');
        CHECK_EQ(step(&s, 'S'), 0);
        struct metadata exact = {.known = true, .record = history[s.durable].record};
        session_end(&s);
        if (CHECK(session_mount(&s, &x.work, &exact, MAIN_EPOCH + 1))) {
            CHECK(compare(s.o, history[s.durable].bytes, history[s.durable].size, false) == NULL);
            /* A slot that went missing while there was no memory must not be one that is used. */
            CHECK_EQ(object_scan(s.o), 0);
            CHECK_EQ(object_verify(s.o, NULL, NULL, NULL), 0);
        }
    }
    session_end(&s);
    screen_forget(&x.work.screen);
    x.runs++;
    return refused > 0;
}

static void fail_each_allocation(enum memory memory)
{
    static const char *const programs[] = {"aGMoqSpS", "SoSfSoStS", "FwGMtGMoS", "SuShSaqS", "SobqBaSfbtBhS", "fbooBwGM"};

    if (explorer_begin(memory)) {
        make_bases();
        for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++)
            for (int which = 0; which < BASES; which++)
                for (int for_good = 0; for_good < 2; for_good++)
                    for (long nth = 0; !enough(); nth++) {
                        int length = commits;
                        bool more = run_without_memory(&bases[which], programs[i], nth, for_good);
                        history_cut(length);
                        if (!more)
                            break;
                    }
        explorer_end("failing allocations");
    }
}

TEST(every_allocation_fails_in_turn) { fail_each_allocation(CACHING); }

TEST(every_allocation_and_every_node_fails_in_turn) { fail_each_allocation(TIGHT); }
