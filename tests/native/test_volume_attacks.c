/* Whoever holds the source directory puts back old files, exchanges, cuts and destroys them. What a mount then shows is refused, or right,
 * or, after a crash that the attacker caused, not older than what the last group recorded; never wrong bytes. */
#include "check.h"
#include "volume_history.h"

static struct history h;
static struct client c;
static unsigned long states, refused, unreadable;

static bool setup(void)
{
    char reason[200];

    memset(&c, 0, sizeof c);
    states = refused = unreadable = 0;
    return CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0) && history_volume(&h);
}

static void teardown(const char *what)
{
    printf("%s: %lu states, %lu refused, %lu with unreadable files\n", what, states, refused, unreadable);
    history_volume_end();
    history_free(NULL);
    pages_free(NULL);
}

static void run(const char *ops)
{
    CHECK_EQ(history_mount(&c), 0);
    history_hold(&c);
    for (; *ops; ops++)
        CHECK_EQ(history_run(&c, &h, *ops), 0);
}

/* Piece by piece: what can be read of a damaged file is what one of the allowed versions has there. */
static bool pieces_are_right(uint64_t ino, uint64_t size, const struct history_file *f, int floor, int max)
{
    uint8_t piece[NODE_SIZE];

    for (uint64_t at = 0; at < size; at += sizeof piece) {
        int64_t n = client_read(&c, ino, piece, sizeof piece, at);
        bool right = n == -EIO;
        for (int v = floor; v <= max && !right; v++)
            right = n > 0 && f->version[v].size == size && at + (uint64_t)n <= size &&
                    memcmp(f->version[v].data + at, piece, (size_t)n) == 0;
        if (!right)
            return wrong("wrong bytes at %llu (%lld read)", (unsigned long long)at, (long long)n);
    }
    return true;
}

/* Mounts the directory as it is. The names must be those of now; each file EIO or a version from `floor` on. */
static void judge(const char *what, int number, const int floor[HISTORY_FILES])
{
    const struct names *names = &h.names[h.names_now];
    bool some_unreadable = false;

    states++;
    if (history_mount(&c)) {
        refused++;
        return;
    }
    for (int i = 0; i < NAMES; i++) {
        struct found_name found;
        struct attr attr;
        int f = names->file[i];
        verdict[0] = 0;
        bool fine = look_at(&c, &h, i, &found) && (found.file == f || wrong("%s is file %d, not %d", NAME[i], found.file, f));
        if (fine && f >= 0 && found.size >= 0)
            fine = newest_version(&h.file[f], found.versions, h.file[f].now, 0) >= floor[f] ||
                   wrong("%s: %lld bytes, versions %x, not from %d on", NAME[i], (long long)found.size, found.versions, floor[f]);
        if (fine && f >= 0 && found.size < 0) {
            some_unreadable = true;
            fine = found.size == -EIO && client_lookup(&c, ROOT_INO, NAME[i], &attr) == 0 &&
                   pieces_are_right(attr.ino, attr.size, &h.file[f], floor[f], h.file[f].now);
        }
        if (!CHECK(fine))
            fprintf(stderr, "%s, %d: %s\n", what, number, verdict);
    }
    unreadable += some_unreadable;
    volume_close(c.volume);
    c.volume = NULL;
}

static void current(int floor[HISTORY_FILES])
{
    for (int f = 0; f < h.files; f++)
        floor[f] = h.file[f].now;
}

/* ---- Whole directories ---- */

TEST(an_older_directory_is_refused_while_the_state_record_is_there)
{
    static struct crash older[3], now;
    struct volume_options o;

    if (!setup())
        return;
    crash_take(&older[0]);
    run("FFK");
    crash_take(&older[1]);
    run("CGRAK");
    crash_take(&older[2]);
    run("bTK");
    crash_take(&now);
    for (int i = 0; i < 3; i++) {
        struct crash c2 = older[i];
        c2.state = now.state;
        crash_show(&c2);
        CHECK_EQ(history_mount(&c), -ESTALE);
        CHECK(c.found.older || c.found.forked);
        /* Another machine knows nothing: it is an old volume, and whole. */
        o = history_options();
        o.have_state = false;
        o.read_only = true;
        o.state_fd = -1;
        if (CHECK_EQ(client_open(&c, &o), 0)) {
            int stop = 0;
            verdict[0] = 0;
            CHECK_EQ(volume_verify(c.volume, no_progress, on_damage, NULL, &stop), 0);
            CHECK_EQ(volume_close(c.volume), 0);
        }
    }
    crash_show(&now);
    CHECK_EQ(history_mount(&c), 0);
    CHECK_EQ(volume_close(c.volume), 0);
    teardown("older directories");
}

/* The same past, two futures: what this machine wrote, and what another one wrote from a copy. */
TEST(a_directory_that_went_on_elsewhere_is_refused)
{
    static struct crash before, here, elsewhere;

    if (!setup())
        return;
    run("FK");
    crash_take(&before);
    run("FFK");
    crash_take(&here);
    crash_show(&before);                /* with the state record of then: the other machine */
    struct history ours = h;
    run("aFFFFAK");
    crash_take(&elsewhere);
    h = ours;
    elsewhere.state = here.state;
    crash_show(&elsewhere);
    CHECK_EQ(history_mount(&c), -ESTALE);
    teardown("forks");
}

/* ---- Single files, after a clean unmount ---- */

TEST(single_older_files_are_refused_or_unreadable)
{
    static struct crash past[3], now, mixed;
    int floor[HISTORY_FILES];

    if (!setup())
        return;
    crash_take(&past[0]);
    run("FFK");
    crash_take(&past[1]);
    run("CGAbOAK");
    crash_take(&past[2]);
    run("bFTFAK");
    crash_take(&now);
    current(floor);
    for (int i = 0; i < 3; i++)
        for (int file = 0; file < place.count; file++) {
            if (!past[i].exists[file])
                continue;
            mixed = now;
            mixed.image[file] = past[i].image[file];
            crash_show(&mixed);
            judge("older file", i * 100 + file, floor);
        }
    CHECK(refused >= 2 && unreadable >= 2);
    teardown("single older files");
}

TEST(exchanged_deleted_cut_and_destroyed_files_never_show_wrong_bytes)
{
    static struct crash now, bad;
    int floor[HISTORY_FILES], objects[FILES], count = 0;

    if (!setup())
        return;
    run("CGFbOFGFAK");
    crash_take(&now);
    current(floor);
    for (int i = 1; i < place.count; i++)
        if (now.exists[i])
            objects[count++] = i;
    CHECK_EQ(count, 2);

    bad = now;                          /* exchanged */
    bad.image[objects[0]] = now.image[objects[1]];
    bad.image[objects[1]] = now.image[objects[0]];
    crash_show(&bad);
    judge("exchanged", 0, floor);
    CHECK_EQ(unreadable, 1);

    for (int k = 0; k < count; k++) {
        int file = objects[k];
        bad = now;                      /* deleted */
        bad.exists[file] = false;
        crash_show(&bad);
        judge("deleted", file, floor);
        for (uint64_t length = 0; length < now.image[file].length; length += 1 + length / 8) {
            bad = now;                  /* cut */
            bad.image[file].length = length;
            crash_show(&bad);
            judge("cut", (int)length, floor);
        }
        for (uint64_t slot = 0; slot < now.image[file].length; slot += 1 + slot / 8) {
            struct page *page = page_new();
            bad = now;                  /* destroyed: a bit of a slot, or all of it */
            if (!now.image[file].slot[slot])
                continue;
            memcpy(page->bytes, now.image[file].slot[slot]->bytes, NODE_SIZE);
            page->bytes[random_next() % NODE_SIZE] ^= (uint8_t)(1 << random_next() % 8);
            bad.image[file].slot[slot] = page;
            crash_show(&bad);
            judge("a bit", (int)slot, floor);
            bad.image[file].slot[slot] = NULL;
            crash_show(&bad);
            judge("a slot", (int)slot, floor);
            for (uint64_t other = 4; other < now.image[file].length; other += 1 + other / 4) {
                bad.image[file].slot[slot] = now.image[file].slot[other];
                if (slot > 4)
                    break;
                crash_show(&bad);
                judge("another slot", (int)slot, floor);
            }
        }
    }
    CHECK(unreadable > 10);

    unsigned long before = refused;     /* object 0 */
    for (uint64_t slot = 0; slot < now.image[0].length; slot++) {
        bad = now;
        bad.image[0].slot[slot] = NULL;
        crash_show(&bad);
        states++;
        if (history_mount(&c)) {
            refused++;
            continue;
        }
        /* A page that the mount did not need: whoever needs it gets an error, and nobody wrong names. */
        for (int i = 0; i < NAMES; i++) {
            struct found_name found;
            int f = h.names[h.names_now].file[i];
            if (!look_at(&c, &h, i, &found))
                continue;
            CHECK_EQ(found.file, f);
            if (f >= 0 && found.size >= 0)
                CHECK_EQ(newest_version(&h.file[f], found.versions, h.file[f].now, 0), h.file[f].now);
        }
        volume_close(c.volume);
        c.volume = NULL;
    }
    CHECK(refused > before);
    bad = now;
    for (uint64_t slot = 0; slot < ROOT_SLOTS; slot++)
        bad.image[0].slot[slot] = NULL;
    crash_show(&bad);
    CHECK(history_mount(&c) != 0);
    bad = now;
    bad.exists[0] = false;
    crash_show(&bad);
    CHECK(history_mount(&c) != 0);
    teardown("exchanged, cut and destroyed files");
}

/* ---- After a crash: rules of the active set ---- */

/* Solo commits since the last group may be undone by who makes the machine crash, nothing else. */
TEST(after_a_crash_an_older_file_is_not_older_than_the_last_group)
{
    static struct trace trace;
    static struct world w;
    static struct crash start, now, mixed;
    int floor[HISTORY_FILES], count;

    if (!setup())
        return;
    crash_take(&start);
    recorder.trace = &trace;
    run("bFFF");
    int grouped = h.file[1].now;
    CHECK_EQ(history_run(&c, &h, 'A'), 0);      /* a group that keeps "b" in the active set, for it was committed alone */
    int recorded = h.file[1].now;
    CHECK_EQ(grouped, recorded);
    for (const char *op = "FFOF"; *op; op++)
        CHECK_EQ(history_run(&c, &h, *op), 0);
    history_kill(&c);
    recorder.trace = NULL;
    world_after(&w, &start, &trace);
    for (int i = 0; i < trace.count; i++)
        world_step(&w, i);
    crash_killed(&w, &now);
    current(floor);
    floor[1] = recorded;
    for (count = 1; count <= trace.count; count++) {
        static struct crash then;
        if (!is_change(&trace.event[count - 1]) || trace.event[count - 1].file != 1)
            continue;
        world_after(&w, &start, &trace);
        for (int i = 0; i < count; i++)
            world_step(&w, i);
        crash_killed(&w, &then);
        mixed = now;
        mixed.image[1] = then.image[1];
        crash_show(&mixed);
        judge("an older file after a crash", count, floor);
        /* Only its roots are old, all else is new: and the other way round. */
        mixed = now;
        memcpy(mixed.image[1].slot, then.image[1].slot, ROOT_SLOTS * sizeof *then.image[1].slot);
        crash_show(&mixed);
        judge("old roots after a crash", count, floor);
        mixed.image[1] = then.image[1];
        memcpy(mixed.image[1].slot, now.image[1].slot, ROOT_SLOTS * sizeof *then.image[1].slot);
        crash_show(&mixed);
        judge("old nodes after a crash", count, floor);
        /* The metadata of then: refused, unless the state record does not know better. */
        mixed = now;
        mixed.image[0] = then.image[0];
        crash_show(&mixed);
        judge("older metadata after a crash", count, floor);
    }
    CHECK(states > 40 && refused > 5 && unreadable > 5);
    teardown("older files after a crash");
}
