/* Groups and solo commits when something happens in the middle of them: hooks of the backing I/O do it at the right moment. */
#include <linux/fuse.h>

#include "check.h"
#include "volume_history.h"

static struct history h;
static struct client c;
static bool fired;                      /* the hook has done what it was there for */

static bool setup(void)
{
    char reason[200];

    memset(&c, 0, sizeof c);
    fired = false;
    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0) || !history_volume(&h) || !CHECK_EQ(history_mount(&c), 0))
        return false;
    history_hold(&c);
    return true;
}

/* Unmounts if that is still to be done. */
static void teardown(void)
{
    recorder.interfere = NULL;
    recorder.barrier_done = NULL;
    if (c.volume)
        CHECK_EQ(volume_close(c.volume), 0);
    history_volume_end();
    history_free(NULL);
    pages_free(NULL);
}

static bool mount_again(void)
{
    history_kill(&c);
    recorder.interfere = NULL;
    recorder.barrier_done = NULL;
    bool fine = CHECK_EQ(history_mount(&c), 0);
    if (!fine)
        fprintf(stderr, "%s\n", c.message);
    return fine;
}

static bool is_meta(const uint8_t *id)
{
    static const uint8_t meta[ID_SIZE];

    return id && memcmp(id, meta, ID_SIZE) == 0;
}

static void run(const char *ops)
{
    for (; *ops; ops++)
        CHECK_EQ(history_run(&c, &h, *ops), 0);
}

/* Mounts again after a kill and compares with what was acknowledged. */
static void check_after_kill(void)
{
    struct found_name found[NAMES];
    int at;

    if (mount_again() && !CHECK(history_matches(&c, &h, h.notes - 1, found, &at)))
        fprintf(stderr, "%s\n", verdict);
}

/* ---- fsync and groups ---- */

TEST(fsync_of_a_file_just_loaded_waits_for_the_group_that_creates_it)
{
    struct attr attr;

    if (!setup())
        return;
    int64_t ino = client_create(&c, ROOT_INO, "new");
    CHECK(ino > 0);
    request_forget(c.volume, (uint64_t)ino, 1);
    CHECK_EQ(client_lookup(&c, ROOT_INO, "new", &attr), 0);
    CHECK_EQ(client_fsync(&c, attr.ino), 0);
    if (mount_again())
        CHECK_EQ(client_lookup(&c, ROOT_INO, "new", &attr), 0);
    teardown();
}

static void *fsync_a(void *arg)
{
    *(int *)arg = groups_fsync(c.volume->groups, h.file[0].ino, false);
    return NULL;
}

static pthread_t other;
static int other_result;

/* Another thread fsyncs what the group has frozen, and only then the group's barrier fails. */
static int fail_the_mark(const struct blockio_event *e)
{
    if (e->call != BIO_BARRIER || !is_meta(e->id) || fired)
        return 0;
    fired = true;
    pthread_create(&other, NULL, fsync_a, &other_result);
    usleep(50000);
    return -EIO;
}

TEST(fsync_that_waits_for_a_running_group_hears_that_it_failed)
{
    if (!setup())
        return;
    run("a");
    op_write(&c, &h, 0, 50);
    recorder.interfere = fail_the_mark;
    CHECK_EQ(client_sync(&c), -EIO);
    CHECK(fired);
    pthread_join(other, NULL);
    CHECK_EQ(other_result, -EIO);
    CHECK_EQ(client_write(&c, h.file[0].ino, "x", 1, 0), -EROFS);
    check_after_kill();
    teardown();
}

TEST(forced_groups_do_not_put_off_the_periodic_one)
{
    struct volume_options o;
    struct volume_stats stats = {0};
    struct request r = {.op = REQ_FSYNCDIR, .ino = ROOT_INO};

    if (!setup())
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    o = history_options();
    o.group_interval_ms = 50;
    CHECK_EQ(client_open(&c, &o), 0);
    run("bG");
    for (int i = 0; i < 10000 && stats.objects_committed == 0; i++) {
        CHECK_EQ(client_run(&c, &r), 0);
        volume_stats(c.volume, &stats);
        usleep(1000);
    }
    CHECK(stats.objects_committed > 0);
    teardown();
}

static uint8_t big[MANY_NODES * NODE_SIZE];

/* While the group waits for the barrier of "b", "a" outgrows its row. */
static void outgrow(const uint8_t *id)
{
    if (is_meta(id) || fired)
        return;
    fired = true;
    CHECK_EQ(file_write(c.volume, h.file[0].ino, big, 5000, 100, 0), 0);
}

TEST(a_file_that_outgrows_its_row_during_a_group_is_whole_after_a_crash)
{
    uint8_t back[8000];
    struct attr attr;

    if (!setup())
        return;
    memset(big, 7, sizeof big);
    run("bGa");
    op_write(&c, &h, 0, 100);
    recorder.barrier_done = outgrow;
    CHECK_EQ(client_sync(&c), 0);
    CHECK(fired);
    if (mount_again()) {
        const struct version *v = &h.file[0].version[h.file[0].now];
        CHECK_EQ(client_lookup(&c, ROOT_INO, "a", &attr), 0);
        int64_t n = client_read(&c, attr.ino, back, sizeof back, 0);
        CHECK_EQ(n, attr.size);
        CHECK(n == 100 || n == 5100);
        CHECK_MEM_EQ(back, v->data, 100);
        if (n == 5100)
            CHECK_MEM_EQ(back + 100, big, 5000);
    }
    teardown();
}

/* The first write of the mark meets a full store; meanwhile a file is renamed over "a". */
static int fill_the_store(const struct blockio_event *e)
{
    struct ns_caller caller = {0};
    struct attr attr;

    if (e->call != BIO_WRITE || !is_meta(e->id) || fired)
        return 0;
    fired = true;
    CHECK_EQ(ns_mknod(c.volume->ns, ROOT_INO, "new", 3, S_IFREG | 0644, 0, &caller, &attr, 0), 0);
    CHECK_EQ(file_write(c.volume, attr.ino, big, 9000, 0, 0), 0);
    CHECK_EQ(ns_rename(c.volume->ns, ROOT_INO, "new", 3, ROOT_INO, "a", 1, 0, 0), 0);
    return -ENOSPC;
}

TEST(a_mark_that_is_written_again_on_a_full_store_publishes_whole_files)
{
    static uint8_t back[10000];
    struct attr attr;

    if (!setup())
        return;
    memset(big, 9, sizeof big);
    run("C");
    recorder.interfere = fill_the_store;
    run("A");
    CHECK(fired);
    if (mount_again()) {
        CHECK_EQ(client_lookup(&c, ROOT_INO, "a", &attr), 0);
        if (attr.ino == h.file[0].ino) {        /* the rename came too late for this group */
            CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), 100);
        } else {
            CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), 9000);
            CHECK_MEM_EQ(back, big, 9000);
        }
    }
    teardown();
}

static unsigned barriers;

/* While the group that takes "b" out of the active set is at work, "b" is rewritten and renamed. */
static void rewrite_and_rename(const uint8_t *id)
{
    if (is_meta(id))
        return;
    barriers++;
    if (fired)
        return;
    fired = true;
    barriers = 0;
    CHECK_EQ(file_write(c.volume, h.file[1].ino, big, sizeof big, 0, 0), 0);
    CHECK_EQ(ns_rename(c.volume->ns, ROOT_INO, "b", 1, ROOT_INO, "c", 1, 0, 0), 0);
}

TEST(a_fold_has_its_own_barrier_until_the_object_has_left_the_durable_active_set)
{
    if (!setup())
        return;
    run("bFFFA");
    op_write(&c, &h, 0, 10);
    recorder.barrier_done = rewrite_and_rename;
    CHECK_EQ(client_sync(&c), 0);
    CHECK(fired);
    CHECK_EQ(barriers, 2);
    teardown();
}

enum { ROUNDS = 4 };                    /* the commit after the last one is made with the namespace locked */

/* During each commit of "b" it is rewritten and renamed. */
static void rename_again(const uint8_t *id)
{
    const char *from = barriers % 2 == 0 ? "b" : "c", *to = barriers % 2 == 0 ? "c" : "b";

    if (is_meta(id) || barriers == ROUNDS)
        return;
    barriers++;
    memset(big, (int)barriers, sizeof big);
    CHECK_EQ(file_write(c.volume, h.file[1].ino, big, sizeof big, 0, 0), 0);
    CHECK_EQ(ns_rename(c.volume->ns, ROOT_INO, from, 1, ROOT_INO, to, 1, 0, 0), 0);
}

TEST(a_file_that_is_renamed_in_each_round_of_a_group_does_not_use_up_its_roots)
{
    uint8_t back[sizeof big];
    struct attr attr;

    if (!setup())
        return;
    run("bGA");
    for (int group = 0; group < 3; group++) {
        barriers = 0;
        op_write(&c, &h, 1, 10);
        recorder.barrier_done = rename_again;
        CHECK_EQ(client_sync(&c), 0);
        CHECK_EQ(barriers, ROUNDS);
    }
    CHECK_EQ(groups_failed(c.volume->groups), 0);
    if (mount_again() && CHECK_EQ(client_lookup(&c, ROOT_INO, "b", &attr), 0)) {
        CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
        CHECK_MEM_EQ(back, big, sizeof back);
    }
    teardown();
}

/* ---- waiting ---- */

static _Atomic bool go_on, held;

/* Holds the group where it looks for a foreign root. */
static int hold_the_group(const struct blockio_event *e)
{
    if (e->call != BIO_READ || !is_meta(e->id) || e->slot != 0 || fired)
        return 0;
    fired = true;
    atomic_store(&held, true);
    while (!atomic_load(&go_on))
        usleep(1000);
    return 0;
}

static void *reclaim(void *arg)
{
    groups_reclaim_space(c.volume->groups);
    return arg;
}

static void *sync_all(void *arg)
{
    CHECK_EQ(groups_sync_all(c.volume->groups), 0);
    return arg;
}

/* The kernel's answer may need the very WRITE that waits for space. */
TEST(who_waits_for_space_goes_on_when_a_group_waits_for_the_kernel)
{
    int ends[2];
    char buffer[4096] = {0};
    pthread_t group, writer;
    struct timespec limit;

    if (!setup() || !CHECK_EQ(pipe2(ends, O_NONBLOCK), 0))
        return;
    while (write(ends[1], buffer, sizeof buffer) > 0 || write(ends[1], buffer, 1) > 0)
        ;
    CHECK_EQ(fcntl(ends[1], F_SETFL, 0), 0);            /* full, and from now on who writes waits: a kernel that is busy */
    volume_set_notify_fd(c.volume, ends[1]);
    request_note_writer(c.volume, h.file[1].ino, 1);
    CHECK_EQ(client_rename(&c, "b", "c"), 0);
    recorder.interfere = hold_the_group;
    pthread_create(&group, NULL, sync_all, NULL);
    while (!atomic_load(&held))
        usleep(1000);
    pthread_create(&writer, NULL, reclaim, NULL);
    usleep(50000);
    atomic_store(&go_on, true);
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 20;
    bool joined = CHECK_EQ(pthread_timedjoin_np(writer, NULL, &limit), 0);
    while (read(ends[0], buffer, sizeof buffer) > 0)
        ;
    pthread_join(group, NULL);
    if (!joined)
        pthread_join(writer, NULL);
    volume_set_notify_fd(c.volume, -1);
    close(ends[0]);
    close(ends[1]);
    teardown();
}

/* What the kernel would have been told since the last call: how many messages, and the last of them. */
static int notified(int fd, struct fuse_notify_inval_inode_out *last)
{
    struct {
        struct fuse_out_header header;
        struct fuse_notify_inval_inode_out inval;
    } message;
    int n = 0;

    for (; read(fd, &message, sizeof message) == sizeof message; n++) {
        CHECK_EQ(message.header.error, FUSE_NOTIFY_INVAL_INODE);
        *last = message.inval;
    }
    return n;
}

TEST(pages_are_pulled_in_for_names_and_seeks_if_there_may_be_any)
{
    struct fuse_notify_inval_inode_out last;
    int ends[2];

    if (!setup() || !CHECK_EQ(pipe2(ends, O_NONBLOCK), 0))
        return;
    run("b");
    struct request seek = {.op = REQ_SEEK, .ino = h.file[1].ino, .offset = 5, .flags = SEEK_DATA};
    CHECK_EQ(client_run(&c, &seek), 5);                         /* nobody to tell */
    volume_set_notify_fd(c.volume, ends[1]);
    CHECK_EQ(client_run(&c, &seek), 5);
    CHECK_EQ(client_rename(&c, "b", "c"), 0);
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(notified(ends[0], &last), 0);                      /* nobody writes */
    request_note_writer(c.volume, h.file[1].ino, 1);
    CHECK_EQ(client_run(&c, &seek), 5);
    CHECK_EQ(notified(ends[0], &last), 1);
    CHECK_EQ(last.ino, h.file[1].ino);
    CHECK_EQ(last.off, 5);
    CHECK_EQ(last.len, 0);
    request_note_writer(c.volume, h.file[1].ino, -1);
    CHECK_EQ(client_run(&c, &seek), 5);
    CHECK_EQ(notified(ends[0], &last), 0);
    request_writers_unknown(c.volume);
    CHECK_EQ(client_run(&c, &seek), 5);
    CHECK_EQ(notified(ends[0], &last), 1);
    CHECK_EQ(client_rename(&c, "c", "b"), 0);
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(notified(ends[0], &last), 1);
    CHECK_EQ(last.off, 0);
    seek.flags = SEEK_SET;
    CHECK_EQ(client_run(&c, &seek), -EINVAL);
    seek.flags = SEEK_HOLE;
    seek.offset = UINT64_MAX;
    CHECK_EQ(client_run(&c, &seek), -ENXIO);
    volume_set_notify_fd(c.volume, -1);
    close(ends[0]);
    close(ends[1]);
    teardown();
}

TEST(many_new_files_do_not_use_up_the_descriptors)
{
    static uint8_t data[5000], back[5000];
    struct attr attr;
    char name[8];

    if (!setup())
        return;
    c.volume->max_open_objects = 8;
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "m%d", i);
        memset(data, i + 1, sizeof data);
        int64_t ino = client_create(&c, ROOT_INO, name);
        CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), sizeof data);
        CHECK(atomic_load(&c.volume->env.open_objects) <= 10);
    }
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "m%d", i);
        memset(data, i + 1, sizeof data);
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
        CHECK_MEM_EQ(back, data, sizeof data);
        CHECK(atomic_load(&c.volume->env.open_objects) <= 10);
    }
    teardown();
}

TEST(deleted_files_that_stay_open_do_not_use_up_the_descriptors)
{
    enum { FILES = 30 };
    static uint8_t data[5000], back[5000];
    uint64_t ino[FILES];
    char name[8];

    if (!setup())
        return;
    c.volume->max_open_objects = 8;
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "d%d", i);
        ino[i] = (uint64_t)client_create(&c, ROOT_INO, name);
        memset(data, i + 1, sizeof data);
        if (i % 2)
            CHECK_EQ(client_write(&c, ino[i], data, sizeof data, 0), sizeof data);
        if (i % 3)
            CHECK_EQ(client_unlink(&c, ROOT_INO, name), 0);
        CHECK_EQ(client_write(&c, ino[i], data, sizeof data, 0), sizeof data);
        CHECK(atomic_load(&c.volume->env.open_objects) <= 10);
    }
    for (int i = 0; i < FILES; i++) {
        memset(data, i + 1, sizeof data);
        data[100] = 0xee;
        CHECK_EQ(client_write(&c, ino[i], "\xee", 1, 100), 1);
        CHECK_EQ(client_read(&c, ino[i], back, sizeof back, 0), sizeof back);
        CHECK_MEM_EQ(back, data, sizeof data);
        CHECK(atomic_load(&c.volume->env.open_objects) <= 10);
    }
    teardown();
}

TEST(fsync_of_a_directory_makes_its_own_times_durable)
{
    struct request make = client_named(REQ_MKDIR, ROOT_INO, "dir"), sync = {.op = REQ_FSYNCDIR};
    struct attr attr;

    if (!setup())
        return;
    make.mode = S_IFDIR | 0755;
    CHECK_EQ(client_run(&c, &make), 0);
    CHECK_EQ(client_sync(&c), 0);
    struct request times = {.op = REQ_SETATTR, .ino = make.attr.ino, .valid = SET_MTIME | SET_CTIME, .attr = {.mtime = 77, .ctime = 88}};
    CHECK_EQ(client_run(&c, &times), 0);
    sync.ino = make.attr.ino;
    CHECK_EQ(client_run(&c, &sync), 0);
    if (mount_again()) {
        CHECK_EQ(client_lookup(&c, ROOT_INO, "dir", &attr), 0);
        CHECK(attr.mtime == 77 && attr.ctime == 88);
    }
    teardown();
}

/* ---- errors ---- */

static int fail_object_barriers(const struct blockio_event *e)
{
    return e->call == BIO_BARRIER && !is_meta(e->id) ? -EIO : 0;
}

TEST(unmounting_says_that_a_file_could_not_be_written)
{
    if (!setup())
        return;
    run("bG");
    recorder.interfere = fail_object_barriers;
    CHECK_EQ(volume_close(c.volume), -EIO);
    c.volume = NULL;
    check_after_kill();
    teardown();
}

TEST(a_rename_whose_contents_cannot_be_written_does_not_become_durable)
{
    if (!setup())
        return;
    run("CGR");
    recorder.interfere = fail_object_barriers;
    CHECK_EQ(history_run(&c, &h, 'D'), -EIO);
    CHECK_EQ(client_create(&c, ROOT_INO, "late"), -EROFS);
    check_after_kill();
    teardown();
}

static int fail_reading_objects(const struct blockio_event *e)
{
    return e->call == BIO_READ && !is_meta(e->id) ? -EIO : 0;
}

/* Its recorded root is older than what fsync promised, so it must not be opened there, even if it can be read again. */
TEST(an_object_that_cannot_be_read_at_recovery_is_refused_and_comes_back_whole)
{
    struct found_name found[NAMES];
    uint8_t byte;
    int at;

    if (!setup())
        return;
    run("bFFFF");
    history_kill(&c);
    recorder.interfere = fail_reading_objects;
    if (!CHECK_EQ(history_mount(&c), 0))
        fprintf(stderr, "%s\n", c.message);
    recorder.interfere = NULL;
    if (c.volume) {
        CHECK_EQ(client_read(&c, h.file[1].ino, &byte, 1, 0), -EIO);
        CHECK_EQ(client_write(&c, h.file[1].ino, &byte, 1, 0), -EIO);
        CHECK_EQ(client_read(&c, h.file[0].ino, &byte, 1, 0), 1);
        CHECK_EQ(volume_close(c.volume), 0);
    }
    if (CHECK_EQ(history_mount(&c), 0) && !CHECK(history_matches(&c, &h, h.notes - 1, found, &at)))
        fprintf(stderr, "%s\n", verdict);
    teardown();
}

/* "b" is deleted while the group waits for its barrier. */
static void unlink_b(const uint8_t *id)
{
    if (is_meta(id) || fired)
        return;
    fired = true;
    CHECK_EQ(ns_unlink(c.volume->ns, ROOT_INO, "b", 1, 0), 0);
}

TEST(a_deleted_file_that_was_open_to_the_end_is_no_damage)
{
    struct volume_options o;
    int stop = 0;

    if (!setup())
        return;
    run("bOAO");
    recorder.barrier_done = unlink_b;
    CHECK_EQ(client_sync(&c), 0);
    CHECK(fired);
    /* Written back at once, and where its recorded root has its nodes: no group will ever name another one. */
    c.volume->env.dirty_limit = 1;
    for (uint64_t i = 0; i < MANY_NODES; i++)
        CHECK_EQ(client_write(&c, h.file[1].ino, big, 1, i * NODE_SIZE), 1);
    CHECK_EQ(volume_close(c.volume), 0);
    o = history_options();
    o.read_only = true;
    verdict[0] = 0;
    if (CHECK_EQ(client_open(&c, &o), 0) && !CHECK_EQ(volume_verify(c.volume, no_progress, on_damage, NULL, &stop), 0))
        fprintf(stderr, "%s\n", verdict);
    teardown();
}
