/* Every call of the backing store fails in turn, once or from then on, while programs run on a volume: who waits is told, nothing that
 * was acknowledged is lost, a metadata commit that failed makes the volume read-only, and it mounts again and works.
 *
 * ENCFSD_EXPLORE=long lets every call fail; without it a part. */
#include <sys/mount.h>

#include "check.h"
#include "volume_history.h"

static struct {
    bool thorough;
    struct history start;
    struct crash start_files;
    int start_count;
    unsigned long runs, states, struck, told;
} x;

static bool faults_begin(void)
{
    const char *mode = getenv("ENCFSD_EXPLORE");
    char reason[200];

    memset(&x, 0, sizeof x);
    x.thorough = mode && strcmp(mode, "long") == 0;
    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0) || !history_volume(&x.start))
        return false;
    crash_take(&x.start_files);
    x.start_count = place.count;
    return true;
}

static void faults_end(const char *what)
{
    printf("%s: %lu runs, %lu with a failure, %lu operations told of it, %lu states\n", what, x.runs, x.struck, x.told, x.states);
    history_volume_end();
    pages_free(NULL);
    history_free(NULL);
}

static void arm(long countdown, int error, bool lasting)
{
    pthread_mutex_lock(&recorder.mutex);        /* the periodic group may be at work */
    recorder.countdown = countdown;
    recorder.error = error;
    recorder.lasting = lasting;
    recorder.struck = 0;
    recorder.armed = true;
    pthread_mutex_unlock(&recorder.mutex);
}

/* Whether any call failed since arm(). */
static bool disarm(void)
{
    pthread_mutex_lock(&recorder.mutex);
    recorder.armed = false;
    bool struck = recorder.struck > 0;
    pthread_mutex_unlock(&recorder.mutex);
    return struck;
}

/* What a failed barrier did not write is lost with the power; or all or some of it is there. */
static bool by_chance(const void *percent, int k)
{
    (void)k;
    return random_next() % 100 < *(const unsigned *)percent;
}

static void judge(const struct history *h, const char *program, long call, const char *how)
{
    int count = place.count;

    recorder.trace = NULL;
    x.states++;
    if (!CHECK(history_judge(h, h->notes - 1, false)))
        fprintf(stderr, "program \"%s\", call %ld fails with %s%s (kind %d), %s: %s\n", program, call, strerror(-recorder.error),
                recorder.lasting ? " for good" : "", recorder.struck_call, how, verdict);
    files_forget(count);
}

/* The live volume after a failure: once it is read-only it stays so, and nothing wrong is read. */
static void check_live(struct client *c, const struct history *h, const char *program, long call)
{
    struct volume_stats stats;

    volume_stats(c->volume, &stats);
    if (stats.failed)
        CHECK_EQ(client_write(c, h->file[0].ino, "x", 1, 0), -EROFS);
    /* A file is as it was written, or refused, since nobody knows what the disk holds of it. */
    for (int i = 0; i < NAMES; i++) {
        struct found_name found;
        if (!CHECK(look_at(c, h, i, &found)) || !CHECK(found.file < 0 || found.size == -EIO || found.versions))
            fprintf(stderr, "program \"%s\", call %ld, live, %s: %s\n", program, call, NAME[i], verdict);
    }
}

/* Runs the program with a failure; 0 calls were left to fail: false. */
static bool run_with_failure(const char *program, long call, int error, bool lasting)
{
    static struct trace trace;
    static struct world w;
    static struct crash crash;
    static struct history h;
    static const unsigned percent[] = {0, 50, 100};
    struct client c = {0};
    struct version_data *versions = version_data;
    struct page *pages = all_pages;

    h = x.start;
    crash_show(&x.start_files);
    trace.count = 0;
    recorder.trace = &trace;
    recorder_note(0);
    if (!CHECK_EQ(history_mount(&c), 0))
        return false;
    history_hold(&c);
    x.runs++;
    arm(call, error, lasting);
    for (const char *op = program; *op && c.volume; op++) {
        if (strchr("GFOTRU", *op) && history_name_of(&h, h.focus) < 0)
            continue;
        x.told += history_run(&c, &h, *op) < 0;
    }
    bool struck = disarm();
    x.struck += struck;
    if (c.volume) {
        check_live(&c, &h, program, call);
        history_run(&c, &h, 'A');               /* whatever it says: if 0, all of it must be there */
        history_kill(&c);
    }
    world_after(&w, &x.start_files, &trace);
    for (int i = 0; i < trace.count; i++)
        world_step(&w, i);
    crash_killed(&w, &crash);
    crash_show(&crash);
    judge(&h, program, call, "killed");
    for (size_t i = 0; i < sizeof percent / sizeof *percent; i++) {
        crash_power(&w, &crash, by_chance, &percent[i], -1);
        crash_show(&crash);
        judge(&h, program, call, "power lost");
    }
    files_forget(x.start_count);
    pages_free(pages);
    history_free(versions);
    return struck;
}

static const char *const PROGRAMS[] = {"FFFA", "CGFF", "CGRDA", "FFOF", "CUTA", "aGFK"};

TEST(every_call_fails_in_turn)
{
    static const int ERRORS[] = {-EIO, -ENOSPC};
    long step = 1, call;

    if (!faults_begin())
        return;
    if (!x.thorough)
        step = 3;
    for (size_t i = 0; i < sizeof PROGRAMS / sizeof *PROGRAMS; i++)
        for (int kind = 0; kind < 4; kind++)
            for (call = (long)(kind + i) % step; run_with_failure(PROGRAMS[i], call, ERRORS[kind & 1], kind & 2); call += step)
                ;
    CHECK(x.struck > 100 && x.told > 50);
    faults_end("calls that fail");
}

/* Recovery after a kill meets the failure: the mount may be refused, but the next one finds everything. */
TEST(every_call_of_a_mount_fails_in_turn)
{
    static struct trace trace;
    static struct world w;
    static struct crash crash;
    static struct history h;
    struct client c = {0};
    unsigned long refused = 0;

    if (!faults_begin())
        return;
    h = x.start;
    recorder.trace = &trace;
    recorder_note(0);
    CHECK_EQ(history_mount(&c), 0);
    history_hold(&c);
    for (const char *op = "FFFCGA" "bFFCG"; *op; op++)
        CHECK_EQ(history_run(&c, &h, *op), 0);
    history_kill(&c);
    recorder.trace = NULL;
    world_after(&w, &x.start_files, &trace);
    for (int i = 0; i < trace.count; i++)
        world_step(&w, i);
    crash_killed(&w, &crash);
    for (int kind = 0; kind < 4; kind++)
        for (long call = 0, struck = 1; struck; call++) {
            crash_show(&crash);
            arm(call, kind & 1 ? -ENOSPC : -EIO, kind & 2);
            refused += history_mount(&c) != 0;
            struck = disarm();
            if (c.volume)
                history_kill(&c);
            x.runs++;
            judge(&h, "(mount)", call, "killed");
        }
    CHECK(refused > 10);
    faults_end("mounts that fail");
}

static int fail_syncfs(const struct blockio_event *e) { return e->call == BIO_SYNCFS ? -EIO : 0; }

/* It does not say which object lost its data. */
TEST(a_failed_syncfs_makes_the_volume_read_only)
{
    static uint8_t data[5000];
    struct client c = {0};

    if (!faults_begin() || !CHECK_EQ(history_mount(&c), 0))
        return;
    for (int i = 0; i < 40; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%d", i);
        int64_t ino = client_create(&c, ROOT_INO, name);
        CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), sizeof data);
    }
    recorder.interfere = fail_syncfs;
    CHECK_EQ(client_sync(&c), -EIO);
    recorder.interfere = NULL;
    CHECK_EQ(client_sync(&c), -EIO);
    CHECK_EQ(client_create(&c, ROOT_INO, "late"), -EROFS);
    CHECK_EQ(client_read(&c, x.start.file[1].ino, data, 1, 0), 1);
    history_kill(&c);
    judge(&x.start, "(syncfs)", 0, "killed");
    faults_end("syncfs");
}

TEST(a_state_record_that_cannot_be_written_makes_the_volume_read_only)
{
    struct client c = {0};
    struct history *h = &x.start;

    if (!faults_begin() || !CHECK_EQ(history_mount(&c), 0))
        return;
    history_hold(&c);
    int good = c.volume->state.fd, bad = open("/dev/full", O_WRONLY | O_CLOEXEC);
    c.volume->state.fd = bad;
    h->focus = 1;
    CHECK_EQ(history_run(&c, h, 'A'), 0);       /* nothing to do, but a record to write */
    /* The record follows the group: wait for another one, which cannot succeed. */
    op_write(&c, h, 0, 10);
    CHECK(client_sync(&c) < 0);
    CHECK_EQ(client_create(&c, ROOT_INO, "late"), -EROFS);
    CHECK(volume_close(c.volume) < 0);
    c.volume = NULL;
    close(good);
    judge(h, "(state)", 0, "unmounted");
    faults_end("state record");
}

/* ---- A full store ---- */

enum { STORE = 40 << 20, PIECE = 1 << 20 };

static void foreign_use(const char *path)
{
    static uint8_t data[1 << 16];
    char name[96];

    snprintf(name, sizeof name, "%s/foreign", path);
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    while (write(fd, data, sizeof data) > 0 || write(fd, data, 4096) > 0)
        ;
    close(fd);
}

TEST(a_full_store_refuses_writes_and_lets_files_be_deleted)
{
    static uint8_t data[PIECE], back[PIECE];
    struct volume_options o;
    struct object_record record;
    struct client c = {0};
    struct attr attr;
    struct request statfs = {.op = REQ_STATFS};
    char path[64], name[16], reason[200], foreign[96];
    int files = 0, stop = 0;
    int64_t ino = 0, last = 0, rc = 0;

    CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0);
    close(client_directory(path));
    snprintf(name, sizeof name, "size=%d", STORE);
    if (mount("tmpfs", path, "tmpfs", 0, name)) {
        printf("skipped: no right to mount a small tmpfs\n");
        client_remove(path);
        return;
    }
    c.src_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    o = client_options(c.src_fd);
    if (!CHECK_EQ(volume_create(&o, 0, 0, &record), 0) || !CHECK_EQ(client_open(&c, &o), 0))
        return;
    for (; files < STORE / PIECE && rc >= 0; files++) {
        snprintf(name, sizeof name, "f%d", files);
        ino = client_create(&c, ROOT_INO, name);
        memset(data, files + 1, sizeof data);
        rc = ino < 0 ? ino : client_write(&c, (uint64_t)ino, data, sizeof data, 0);
        last = ino > 0 ? ino : last;
    }
    CHECK_EQ(rc, -ENOSPC);
    files--;
    CHECK(files > 10);                          /* the last of them has no contents */
    CHECK_EQ(client_sync(&c), 0);               /* what was accepted can be written */
    foreign_use(path);
    struct request disk = {.op = REQ_WRITE, .ino = (uint64_t)last, .buffer = data, .size = sizeof data};
    CHECK(request_may_wait_for_disk(&disk) && !request_try_disk(c.volume, &disk));      /* room would have to be waited for */
    CHECK_EQ(client_write(&c, (uint64_t)last, data, sizeof data, 0), -ENOSPC);
    CHECK_EQ(client_run(&c, &statfs), 0);
    uint64_t before = statfs.statfs_free;

    for (int i = 0; i < files; i += 2) {
        snprintf(name, sizeof name, "f%d", i);
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(client_unlink(&c, ROOT_INO, name), 0);
        request_forget(c.volume, attr.ino, 2);
    }
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(client_run(&c, &statfs), 0);
    CHECK(statfs.statfs_free > before + (uint64_t)files / 2 * PIECE / NODE_SIZE / 2);
    ino = client_create(&c, ROOT_INO, "new");
    CHECK(ino > 0);
    CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(volume_close(c.volume), 0);

    snprintf(foreign, sizeof foreign, "%s/foreign", path);
    unlink(foreign);
    o.read_only = true;
    CHECK_EQ(client_open(&c, &o), 0);
    for (int i = 1; i < files; i += 2) {
        snprintf(name, sizeof name, "f%d", i);
        memset(data, i + 1, sizeof data);
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
        CHECK_MEM_EQ(back, data, sizeof back);
    }
    CHECK_EQ(volume_verify(c.volume, no_progress, on_damage, NULL, &stop), 0);
    CHECK_EQ(volume_close(c.volume), 0);
    close(c.src_fd);
    CHECK_EQ(umount2(path, MNT_DETACH), 0);
    client_remove(path);
}
