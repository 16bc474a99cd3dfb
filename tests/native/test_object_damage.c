/* Damage of a backing file, by accident or malice: each byte flipped, slots swapped, zeroed, or put back from earlier versions, the
 * file cut short. What opens is refused or right: never wrong bytes, never older than what the metadata recorded. */
#include "explorer.h"

/* All contents that the file had at a barrier, and the metadata at the end. */
struct past {
    struct world world;                 /* at the end, all durable */
    struct image version[64];
    int versions;
    int oldest;                         /* commit that the metadata recorded */
};

/* Opens what x.crash shows, as metadata that names a root exactly does and as those of an active object do. */
static void judge_damage(const struct past *p, const char *how, uint64_t a, uint64_t b)
{
    const char *wrong = NULL;
    struct session s;

    x.states++;
    if (!session_mount(&s, &x.crash, &p->world.metadata, JUDGE_EPOCH)) {
        if (s.error != -EBADMSG)
            wrong = "fails to open with an unexpected error, or opens as what was never committed";
    } else {
        /* Of an active object roots after the record may be hidden by damage: metadata know no better (docs/format.md). */
        if (p->world.metadata.active_epoch ? !descends(s.durable, p->oldest) : s.durable != p->oldest)
            wrong = "opens as something older than what is recorded";
        if (!wrong)
            wrong = compare(s.o, history[s.durable].bytes, history[s.durable].size, true);
        object_close(s.o);
    }
    x.violations += wrong != NULL;
    if (wrong && !x.control) {
        fprintf(stderr, "program \"%s\", %s %llu, %llu: %s\n", x.program, how, (unsigned long long)a, (unsigned long long)b, wrong);
        CHECK(!"damage was not refused");
    }
}

static void show(const struct image *image) { screen_show(&x.crash.screen, image); }

/* Runs a program and keeps its past. active: it stays active after a solo commit, else its last root is named exactly. */
static struct past *live(int which, const char *program)
{
    struct past *p = calloc(1, sizeof *p);
    struct trace *t = calloc(1, sizeof *t);
    struct session s;

    x.program = program;
    screen_show(&x.work.screen, &bases[which].world.durable);
    x.work.env.epoch = MAIN_EPOCH;
    recording = t;
    if (CHECK(session_mount(&s, &x.work, &bases[which].world.metadata, MAIN_EPOCH))) {
        session_use(&s);
        CHECK_EQ(run(&s, program), 0);
        session_end(&s);
    }
    recording = NULL;
    screen_forget(&x.work.screen);
    p->world = bases[which].world;
    p->version[p->versions++] = p->world.durable;
    for (int i = 0; i < t->count; i++) {
        world_step(&p->world, &t->event[i]);
        if (t->event[i].kind == BARRIER && CHECK(p->versions < 64))
            p->version[p->versions++] = p->world.durable;
    }
    world_make_durable(&p->world);
    free(t);
    p->oldest = history_find(&p->world.metadata.record);
    return p;
}

static void flip(const struct past *p, uint64_t offset, uint8_t bits, const char *how)
{
    uint64_t slot = offset / NODE_SIZE;
    struct image image = p->world.durable;
    struct page *mark = all_pages, *page = page_new();

    if (image.slot[slot])
        memcpy(page->bytes, image.slot[slot]->bytes, NODE_SIZE);
    else
        memset(page->bytes, 0, NODE_SIZE);
    page->bytes[offset % NODE_SIZE] ^= bits;
    image.slot[slot] = page;
    show(&image);
    judge_damage(p, how, offset, bits);
    pages_free(mark);
}

/* Every byte, or one in so many. */
static void flip_bytes(const struct past *p, uint64_t step)
{
    for (uint64_t at = 0; at < p->world.durable.length * NODE_SIZE && !enough(); at += x.thorough ? 1 : step)
        flip(p, at, (uint8_t)(1u << at % 8), "flipped byte, bits");
}

static void move_slots(const struct past *p, unsigned every)
{
    const struct image *now = &p->world.durable;
    unsigned n = 0;

    for (uint64_t a = 0; a < now->length; a++) {
        struct image image = *now;
        image.slot[a] = NULL;
        show(&image);
        judge_damage(p, "zeroed slot", a, 0);
        image = *now;
        image.length = a;
        show(&image);
        judge_damage(p, "file cut to slot", a, 0);
        for (uint64_t b = 0; b < now->length && !enough(); b++) {
            if (!x.thorough && n++ % every)
                continue;
            image = *now;
            image.slot[a] = now->slot[b];
            show(&image);
            judge_damage(p, "copied slots (to, from)", a, b);
            image.slot[b] = now->slot[a];
            show(&image);
            judge_damage(p, "swapped slots", a, b);
        }
    }
}

/* Each slot, and each set of roots, put back from each earlier version; and each whole version. */
static void replay(const struct past *p)
{
    for (int v = 0; v < p->versions && !enough(); v++) {
        struct image image = p->version[v];
        show(&image);
        judge_damage(p, "whole version", (uint64_t)v, 0);
        for (unsigned roots = 1; roots < 1u << ROOT_SLOTS; roots++) {
            image = p->world.durable;
            for (unsigned i = 0; i < ROOT_SLOTS; i++)
                if (roots >> i & 1)
                    image.slot[i] = p->version[v].slot[i];
            show(&image);
            judge_damage(p, "roots of version (version, set)", (uint64_t)v, roots);
        }
        for (uint64_t a = 0; a < p->version[v].length && a < p->world.durable.length; a++) {
            image = p->world.durable;
            if (image.slot[a] == p->version[v].slot[a])
                continue;
            image.slot[a] = p->version[v].slot[a];
            show(&image);
            judge_damage(p, "slot of an earlier version (slot, version)", a, (uint64_t)v);
        }
    }
}

static void damage(int which, const char *program, uint64_t step, unsigned every)
{
    struct past *p = live(which, program);

    flip_bytes(p, step);
    move_slots(p, every);
    replay(p);
    free(p);
}

TEST(damage_of_a_small_object_is_refused)
{
    if (explorer_begin(ROOMY)) {
        make_bases();
        damage(SMALL, "oGMqGM", 1, 1);          /* named exactly */
        damage(SMALL, "SoSqSpSqS", 3, 1);       /* active, with all four root slots in use */
        explorer_end("damage of a small object");
    }
}

TEST(damage_of_a_tree_is_refused)
{
    if (explorer_begin(ROOMY)) {
        make_bases();
        damage(TOMBS, "oGMqGM", 211, 37);
        damage(FOLDED, "SoSfSpSuS", 211, 37);
        damage(FOLDED, "fGMtGM", 211, 37);
        explorer_end("damage of a tree");
    }
}

TEST(metadata_that_forget_are_seen)
{
    if (explorer_begin(ROOMY)) {
        x.control = true;
        make_bases();
        struct past *p = live(SMALL, "oGMoGM");
        p->world.metadata = bases[SMALL].world.metadata;        /* then an old version opens */
        replay(p);
        free(p);
        explorer_end("old metadata");
    }
}
