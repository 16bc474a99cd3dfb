/* The commit protocol of one object, explored: programs of a few operations run on a real object, and every state that a crash may
 * leave of them must be right (explorer.h). ENCFSD_EXPLORE=long: all programs of up to two operations thoroughly, all of three less so
 * (an hour of CPU time otherwise, nearly all of it for second crashes); chosen programs in all memories, each ninth thoroughly. */
#include "explorer.h"

/* ---- Programs ---- */

static void explore_program(int which, const char *program, bool scan, bool kills)
{
    struct trace *t = malloc(sizeof *t);
    const struct world *start = &bases[which].world;
    struct page *mark = all_pages;
    int length = commits;
    struct session s;

    x.base = bases[which].name;
    x.program = program;
    x.scan = scan;
    x.random = 88172645463325252u;
    memset(x.seen, 0, sizeof x.seen);
    x.seen_count = 0;
    t->count = 0;
    if (!screen_show(&x.work.screen, &start->durable))
        return;
    recording = t;
    x.work.env.epoch = MAIN_EPOCH;
    bool fine = which == NEW ? session_new(&s, &x.work) : session_mount(&s, &x.work, &start->metadata, MAIN_EPOCH);
    if (CHECK(fine)) {
        if (which == NEW)
            s.durable = -1;
        else
            session_use(&s);
        if (scan)
            CHECK_EQ(object_scan(s.o), 0);
        if (!CHECK_EQ(run(&s, program), 0))
            fprintf(stderr, "base %s, program \"%s\" fails\n", x.base, program);
        const char *wrong = compare(s.o, s.bytes, s.size, false);
        if (wrong)
            violation(wrong, "while it runs");
        land_mark(&s);
        session_end(&s);
        recording = NULL;
        screen_forget(&x.work.screen);
        explore(start, t);
        if (kills)
            explore_kills(start, t);
    }
    recording = NULL;
    history_cut(length);
    pages_free(mark);
    free(t);
}

static void explore_closed(int which, const char *program, bool active, bool scan, bool kills)
{
    char closed[40];

    snprintf(closed, sizeof closed, active ? "S%sS" : "%sGM", program);
    explore_program(which, closed, scan, kills);
}

/* All programs of `length` letters; `every`: only each so-many-th, and for every base and both states if it has no common divisor with
 * them. */
static void explore_all(int length, unsigned every)
{
    static const char letters[] = "apotuhfSG";
    enum { LETTERS = sizeof letters - 1 };
    unsigned long programs = 1, number = 0;

    for (int i = 0; i < length; i++)
        programs *= LETTERS;
    for (unsigned long p = 0; p < programs; p++)
        for (int which = 0; which < BASES; which++)
            for (int active = 0; active < 2; active++, number++) {
                char program[16] = "";
                if (number % every || enough())
                    continue;
                uint64_t dice = mix(1, number) >> 32;
                for (unsigned long i = 0, rest = p; i < (unsigned long)length; i++, rest /= LETTERS)
                    program[i] = letters[rest % LETTERS];
                explore_closed(which, program, active, dice % 2, x.thorough || dice / 2 % 4 == 0);
            }
}

TEST(every_crash_state_of_short_programs_is_a_committed_one)
{
    if (explorer_begin(ROOMY)) {
        make_bases();
        explore_all(0, 1);
        explore_all(1, 1);
        explore_all(2, x.longer ? 1 : 7);
        x.thorough = false;
        explore_all(3, x.longer ? 1 : 197);
        explorer_end("short programs");
    }
}

static void explore_chosen(enum memory memory, unsigned part)
{
    static const char *const programs[] = {
        "SoSoSoSoSoSoS", "oGoGoGoGoGM", "SoSGoSoSGoSM", "SaSaSaSaSaSaS", "FSFS", "fGMfGMfGMoS", "SfStSfStS", "wGoqwGM",
        "FGMtGMFGM", "ogogfgoghgtgoGM",
        "SobqSoboBqaSbtBoSbhBfS", "fbtfBhGobBaGM", "SfboBoSqbfBtuS", "XSTSaSXSTSoSpS", "XGMtGMoGM", "SoSoSRSoSqS", "oRfSRtSaS",
    };

    if (explorer_begin(memory)) {
        make_bases();
        for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++)
            for (int which = 0; which < BASES; which++)
                if (!enough() && (x.longer || (i + (size_t)which) % 3 == part)) {
                    x.thorough = x.longer && (i + (size_t)which) % 9 == part;
                    explore_program(which, programs[i], which % 2, x.thorough || (i + (size_t)which) % 5 == 0);
                }
        explorer_end("chosen programs");
    }
}

TEST(every_crash_state_of_chosen_programs_is_a_committed_one) { explore_chosen(ROOMY, 0); }

TEST(with_data_in_the_cache_too) { explore_chosen(CACHING, 1); }

TEST(without_room_for_any_node_too) { explore_chosen(TIGHT, 2); }

/* What nobody thought of. */
TEST(every_crash_state_of_random_programs_is_a_committed_one)
{
    static const char letters[] = "aapoqqeetuhfwbBSSSSGGR";
    enum { LENGTH = 24 };

    if (explorer_begin(ROOMY)) {
        make_bases();
        x.thorough = false;                     /* more programs find more than more of each */
        for (uint64_t seed = 1; seed <= (x.longer ? 400 : 40) && !enough(); seed++) {
            char program[LENGTH + 3] = "";
            uint64_t random = seed * 0x9e3779b97f4a7c15u;
            for (int i = 0; i < LENGTH; i++) {
                random = mix(random, (uint64_t)i);
                program[i] = letters[(random >> 32) % (sizeof letters - 1)];
            }
            strcat(program, "GM");
            explore_program((int)(seed % BASES), program, random & 1, seed % 8 == 0);
        }
        explorer_end("random programs");
    }
}

/* ---- Negative controls: a broken rule must be seen ---- */

static void control(int which, const char *program, bool scan, const char *what)
{
    x.control = true;
    make_bases();
    explore_program(which, program, scan, true);
    broken = (struct broken){0};
    explorer_end(what);
}

TEST(a_commit_without_barrier_is_seen)
{
    if (explorer_begin(ROOMY)) {
        x.drop_barriers = true;
        control(SMALL, "SoS", false, "no barrier");
    }
}

TEST(a_new_file_without_name_is_seen)
{
    if (explorer_begin(ROOMY)) {
        x.drop_names = true;
        control(NEW, "aGM", false, "no sync of the directory");
    }
}

TEST(adopting_without_a_fence_is_seen)
{
    if (explorer_begin(ROOMY)) {
        x.drop_fence = true;
        control(SMALL, "SoS", false, "no fence");
    }
}

TEST(an_early_release_is_seen)
{
    if (explorer_begin(ROOMY)) {
        broken.release_early = true;
        control(SMALL, "oGMoGow", true, "released before the mark");
    }
}

TEST(a_root_that_is_not_pinned_is_seen)
{
    if (explorer_begin(ROOMY)) {
        broken.no_pins = true;
        control(SMALL, "ogogogogog", false, "not pinned");
    }
}

TEST(a_solo_fold_with_one_barrier_is_seen)
{
    if (explorer_begin(ROOMY)) {
        broken.unfenced_folds = true;
        control(SMALL, "SfS", false, "tree and root under one barrier");
    }
}
