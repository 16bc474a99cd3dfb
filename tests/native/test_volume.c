/* The volume through its one door: contents in rows and objects, durability, recovery after the process dies. */
#include <stdint.h>
#include <sys/wait.h>

#include "check.h"
#include "volume_client.h"

static void fill(uint8_t *data, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (uint8_t)(seed >> 24);
    }
}

static bool setup(struct client *c, char path[64])
{
    struct volume_options o;
    struct object_record record;

    c->src_fd = client_directory(path);
    if (!CHECK(c->src_fd >= 0))
        return false;
    o = client_options(c->src_fd);
    if (!CHECK_EQ(volume_create(&o, 0, 0, &record), 0))
        return false;
    if (!CHECK_EQ(client_open(c, &o), 0)) {
        fprintf(stderr, "%s\n", c->message);
        return false;
    }
    return true;
}

static bool reopen(struct client *c)
{
    struct volume_options o = client_options(c->src_fd);

    if (!CHECK_EQ(client_open(c, &o), 0)) {
        fprintf(stderr, "%s\n", c->message);
        return false;
    }
    return true;
}

static void teardown(struct client *c, const char *path)
{
    CHECK_EQ(volume_close(c->volume), 0);
    close(c->src_fd);
    client_remove(path);
}

static const size_t SIZES[] = {0, 1, INLINE_MAX - 1, INLINE_MAX, INLINE_MAX + 1, 4095, 4096, 4097, 56 * 4096, 57 * 4096,
                               74 * 4096 + 5, 3 << 20};
enum { SIZE_COUNT = sizeof SIZES / sizeof *SIZES };

TEST(contents_of_every_size_survive_a_clean_unmount)
{
    struct client c;
    char path[64], name[16];
    uint8_t *data = malloc(4 << 20), *back = malloc(4 << 20);
    struct attr attr;

    if (!setup(&c, path))
        return;
    for (unsigned i = 0; i < SIZE_COUNT; i++) {
        snprintf(name, sizeof name, "f%u", i);
        int64_t ino = client_create(&c, ROOT_INO, name);
        CHECK(ino > 0);
        fill(data, SIZES[i], i);
        CHECK_EQ(client_write(&c, (uint64_t)ino, data, SIZES[i], 0), SIZES[i]);
        CHECK_EQ(client_read(&c, (uint64_t)ino, back, 4 << 20, 0), SIZES[i]);
        CHECK_MEM_EQ(back, data, SIZES[i]);
    }
    CHECK_EQ(volume_close(c.volume), 0);
    if (!reopen(&c))
        return;
    CHECK_EQ(c.found.recovered_objects, 0);
    for (unsigned i = 0; i < SIZE_COUNT; i++) {
        snprintf(name, sizeof name, "f%u", i);
        fill(data, SIZES[i], i);
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(attr.size, SIZES[i]);
        CHECK(SIZES[i] == 0 ? attr.blocks == 0 : attr.blocks > 0);
        CHECK_EQ(client_read(&c, attr.ino, back, 4 << 20, 0), SIZES[i]);
        CHECK_MEM_EQ(back, data, SIZES[i]);
    }
    teardown(&c, path);
    free(data);
    free(back);
}

/* Runs `work` in a child that opens the volume and dies without a word; the page cache survives. */
static void run_and_die(struct client *c, void (*work)(struct client *c))
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        struct volume_options o = client_options(c->src_fd);
        if (client_open(c, &o))
            _exit(1);
        work(c);
        _exit(42);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
}

static void check_or_die(bool holds, int line)
{
    if (!holds) {
        fprintf(stderr, "%s:%d: failed in the child\n", __FILE__, line);
        _exit(1);
    }
}
#define CHILD_CHECK(cond) check_or_die((cond), __LINE__)

static void write_and_fsync(struct client *c)
{
    static uint8_t data[300000];

    for (unsigned i = 0; i < SIZE_COUNT - 1; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%u", i);
        int64_t ino = client_create(c, ROOT_INO, name);
        CHILD_CHECK(ino > 0);
        size_t size = SIZES[i] < sizeof data ? SIZES[i] : sizeof data;
        fill(data, size, 100 + i);
        CHILD_CHECK(client_write(c, (uint64_t)ino, data, size, 0) == (int64_t)size);
        CHILD_CHECK(client_fsync(c, (uint64_t)ino) == 0);
    }
}

TEST(what_fsync_acknowledged_is_there_after_the_process_died)
{
    struct client c;
    char path[64], name[16];
    static uint8_t data[300000], back[300000];
    struct attr attr;

    if (!setup(&c, path))
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, write_and_fsync);
    if (!reopen(&c))
        return;
    for (unsigned i = 0; i < SIZE_COUNT - 1; i++) {
        size_t size = SIZES[i] < sizeof data ? SIZES[i] : sizeof data;
        snprintf(name, sizeof name, "s%u", i);
        fill(data, size, 100 + i);
        CHECK_EQ(client_lookup(&c, ROOT_INO, name, &attr), 0);
        CHECK_EQ(attr.size, size);
        CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), size);
        CHECK_MEM_EQ(back, data, size);
    }
    teardown(&c, path);
}

enum { APPENDS = 130, APPEND_SIZE = 3000 };

/* Like a database's log: more appends than a delta holds, each one synced. */
static void synced_appends(struct client *c)
{
    uint8_t data[APPEND_SIZE];
    int64_t ino = client_create(c, ROOT_INO, "log");

    CHILD_CHECK(ino > 0);
    for (unsigned i = 0; i < APPENDS; i++) {
        fill(data, sizeof data, i);
        CHILD_CHECK(client_write(c, (uint64_t)ino, data, sizeof data, i * sizeof data) == APPEND_SIZE);
        CHILD_CHECK(client_fsync(c, (uint64_t)ino) == 0);
    }
}

TEST(solo_commits_are_recovered)
{
    struct client c;
    char path[64];
    uint8_t data[APPEND_SIZE], back[APPEND_SIZE];
    struct attr attr;

    if (!setup(&c, path))
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, synced_appends);
    if (!reopen(&c))
        return;
    CHECK_EQ(c.found.recovered_objects, 1);
    CHECK_EQ(client_lookup(&c, ROOT_INO, "log", &attr), 0);
    CHECK_EQ(attr.size, APPENDS * APPEND_SIZE);
    for (unsigned i = 0; i < APPENDS; i++) {
        fill(data, sizeof data, i);
        CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, i * sizeof back), sizeof back);
        CHECK_MEM_EQ(back, data, sizeof data);
    }
    teardown(&c, path);
}

static void replace_by_rename(struct client *c)
{
    static uint8_t data[20000];

    for (unsigned i = 0; i < 10; i++) {
        int64_t ino = client_create(c, ROOT_INO, "new");
        CHILD_CHECK(ino > 0);
        fill(data, sizeof data, i);
        CHILD_CHECK(client_write(c, (uint64_t)ino, data, sizeof data, 0) == sizeof data);
        CHILD_CHECK(client_rename(c, "new", "config") == 0);
    }
    /* A forced group for something else: the renames are durable with it, and so must be what they publish. */
    int64_t other = client_create(c, ROOT_INO, "other");
    CHILD_CHECK(other > 0);
    CHILD_CHECK(client_fsync(c, (uint64_t)other) == 0);
}

TEST(a_durable_rename_has_its_contents)
{
    struct client c;
    char path[64];
    static uint8_t data[20000], back[20000];
    struct attr attr;

    if (!setup(&c, path))
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, replace_by_rename);
    if (!reopen(&c))
        return;
    CHECK_EQ(client_lookup(&c, ROOT_INO, "config", &attr), 0);
    CHECK_EQ(attr.size, sizeof data);
    fill(data, sizeof data, 9);
    CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
    CHECK_MEM_EQ(back, data, sizeof data);
    CHECK_EQ(client_lookup(&c, ROOT_INO, "new", NULL), -ENOENT);
    teardown(&c, path);
}

static unsigned count_objects(const char *path)
{
    char command[128], out[32] = "";
    FILE *p;

    snprintf(command, sizeof command, "find '%s'/objects -type f 2>/dev/null | wc -l", path);
    p = popen(command, "r");
    if (!p || !fgets(out, sizeof out, p))
        abort();
    pclose(p);
    return (unsigned)atoi(out);
}

static void create_without_sync(struct client *c)
{
    static uint8_t data[10000];

    for (unsigned i = 0; i < 5; i++) {
        char name[16];
        snprintf(name, sizeof name, "lost%u", i);
        int64_t ino = client_create(c, ROOT_INO, name);
        CHILD_CHECK(client_write(c, (uint64_t)ino, data, sizeof data, 0) == sizeof data);
    }
}

TEST(deleted_and_never_named_objects_leave_no_files)
{
    struct client c;
    char path[64];
    static uint8_t data[10000];

    if (!setup(&c, path))
        return;
    for (unsigned i = 0; i < 5; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%u", i);
        int64_t ino = client_create(&c, ROOT_INO, name);
        CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), sizeof data);
        if (i == 4)
            CHECK_EQ(client_unlink(&c, ROOT_INO, name), 0);     /* before its first group */
        request_forget(c.volume, (uint64_t)ino, 1);
    }
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(count_objects(path), 4);
    CHECK_EQ(client_unlink(&c, ROOT_INO, "f0"), 0);
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(count_objects(path), 3);
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, create_without_sync);
    CHECK_EQ(count_objects(path), 8);
    if (!reopen(&c))
        return;
    CHECK_EQ(count_objects(path), 3);
    CHECK_EQ(c.found.orphans, 5);
    teardown(&c, path);
}

static void open_unlinked(struct client *c)
{
    static uint8_t data[10000];
    int64_t ino = client_create(c, ROOT_INO, "temporary");

    CHILD_CHECK(client_write(c, (uint64_t)ino, data, sizeof data, 0) == sizeof data);
    CHILD_CHECK(client_sync(c) == 0);
    CHILD_CHECK(client_unlink(c, ROOT_INO, "temporary") == 0);
    CHILD_CHECK(client_read(c, (uint64_t)ino, data, sizeof data, 0) == sizeof data);
    CHILD_CHECK(client_sync(c) == 0);
}

TEST(orphans_are_reclaimed_at_the_next_mount)
{
    struct client c;
    char path[64];

    if (!setup(&c, path))
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, open_unlinked);
    CHECK_EQ(count_objects(path), 1);
    if (!reopen(&c))
        return;
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(count_objects(path), 0);
    teardown(&c, path);
}

static void on_progress(void *arg, uint64_t nodes, uint64_t total)
{
    (void)total;
    *(uint64_t *)arg += nodes;
}

static void on_damaged(void *arg, const char *path, uint64_t offset, uint64_t bytes)
{
    (void)arg, (void)path, (void)offset, (void)bytes;
}

TEST(a_read_only_mount_writes_nothing_and_verifies)
{
    struct client c;
    struct volume_options o;
    char path[64], command[160];
    struct attr attr;
    static uint8_t back[10000];
    uint64_t nodes = 0;
    int stop = 0;

    if (!setup(&c, path))
        return;
    CHECK_EQ(volume_close(c.volume), 0);
    run_and_die(&c, synced_appends);
    snprintf(command, sizeof command, "cp -a '%s' '%s.copy'", path, path);
    CHECK_EQ(system(command), 0);
    o = client_options(c.src_fd);
    o.read_only = true;
    CHECK_EQ(client_open(&c, &o), 0);
    CHECK_EQ(client_lookup(&c, ROOT_INO, "log", &attr), 0);
    CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
    CHECK_EQ(client_create(&c, ROOT_INO, "x"), -EROFS);
    CHECK_EQ(client_write(&c, attr.ino, back, 10, 0), -EROFS);
    CHECK_EQ(client_fsync(&c, attr.ino), 0);
    CHECK_EQ(volume_verify(c.volume, on_progress, on_damaged, &nodes, &stop), 0);
    CHECK(nodes > APPENDS * APPEND_SIZE / NODE_SIZE);
    CHECK_EQ(volume_close(c.volume), 0);
    snprintf(command, sizeof command, "diff -r '%s' '%s.copy'", path, path);
    CHECK_EQ(system(command), 0);
    snprintf(command, sizeof command, "%s.copy", path);
    client_remove(command);
    close(c.src_fd);
    client_remove(path);
}

TEST(blocks_are_exact_after_a_group)
{
    struct client c;
    char path[64];
    static uint8_t data[57 * NODE_SIZE];
    struct request punch = {.op = REQ_PUNCH, .offset = 0, .size = 50 * NODE_SIZE};
    struct request getattr = {.op = REQ_GETATTR};

    if (!setup(&c, path))
        return;
    punch.ino = getattr.ino = (uint64_t)client_create(&c, ROOT_INO, "f");
    fill(data, sizeof data, 1);
    CHECK_EQ(client_write(&c, punch.ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(client_run(&c, &getattr), 0);
    CHECK_EQ(getattr.attr.blocks, 57 * 8);
    CHECK_EQ(client_run(&c, &punch), 0);
    CHECK_EQ(client_sync(&c), 0);
    CHECK_EQ(client_run(&c, &getattr), 0);
    CHECK_EQ(getattr.attr.blocks, 7 * 8);
    teardown(&c, path);
}

/* A ballast that somebody planted is replaced and never followed; one that cannot be replaced does not keep the volume shut. */
TEST(a_planted_ballast_is_replaced)
{
    struct client c;
    char path[64], command[200], line[300];
    enum volume_severity severity;
    struct stat st;

    if (!setup(&c, path))
        return;
    const char *plant[] = {"ln -s ../victim", "mkfifo", "touch other && ln other"};
    for (unsigned i = 0; i < sizeof plant / sizeof *plant; i++) {
        CHECK_EQ(volume_close(c.volume), 0);
        snprintf(command, sizeof command, "cd '%s' && rm ballast && %s ballast", path, plant[i]);
        CHECK_EQ(system(command), 0);
        if (!reopen(&c))
            return;
        CHECK_EQ(fstatat(c.src_fd, "ballast", &st, AT_SYMLINK_NOFOLLOW), 0);
        CHECK(S_ISREG(st.st_mode) && st.st_nlink == 1 && st.st_size == 4 << 20);
        CHECK(client_create(&c, ROOT_INO, plant[i][0] == 'm' ? "a" : i ? "b" : "c") > 0);
    }
    CHECK_EQ(volume_close(c.volume), 0);
    snprintf(command, sizeof command, "cd '%s' && rm ballast && mkdir ballast", path);
    CHECK_EQ(system(command), 0);
    if (!reopen(&c))
        return;
    CHECK(volume_next_log_line(c.volume, &severity, line, sizeof line));
    CHECK_EQ(severity, VOLUME_WARNING);
    CHECK(strstr(line, "\"ballast\""));
    CHECK_EQ(client_lookup(&c, ROOT_INO, "a", NULL), 0);
    CHECK(client_create(&c, ROOT_INO, "d") < 0);
    teardown(&c, path);
}

/* What a failed WRITE leaves is an error of every fsync until the bytes are written again or cut off. */
TEST(a_failed_write_is_not_forgotten)
{
    struct client c;
    char path[64], command[200], line[300];
    enum volume_severity severity;
    static uint8_t data[20000];

    if (!setup(&c, path))
        return;
    int64_t ino = client_create(&c, ROOT_INO, "f");
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), 0);
    snprintf(command, sizeof command, "cd '%s' && rm -rf objects && touch objects", path);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), -EIO);
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), -EIO);
    CHECK(volume_next_log_line(c.volume, &severity, line, sizeof line));
    CHECK_EQ(severity, VOLUME_ERROR);
    CHECK(strstr(line, "contents could not be stored"));
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), -EIO);
    snprintf(command, sizeof command, "cd '%s' && rm objects", path);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), -EIO);
    CHECK_EQ(client_write(&c, (uint64_t)ino, data, 15000, 0), 15000);
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), -EIO);            /* 5,000 bytes are still missing */
    CHECK_EQ(client_write(&c, (uint64_t)ino, data, 5000, 15000), 5000);
    CHECK_EQ(client_fsync(&c, (uint64_t)ino), 0);
    teardown(&c, path);
}

static void count_metadata(void *arg, const char *path, uint64_t offset, uint64_t bytes)
{
    (void)offset, (void)bytes;
    *(int *)arg += strcmp(path, "(metadata)") == 0;
}

static void no_progress(void *arg, uint64_t nodes, uint64_t total) { (void)arg, (void)nodes, (void)total; }

/* Each slot of object 0 in turn. A volume whose metadata are damaged is called that, whoever comes upon it first; never a fault of the disk. */
TEST(damaged_metadata_are_called_damaged)
{
    enum { FILES = 2000 };
    struct client c;
    char path[64], name[256];
    uint8_t slot[NODE_SIZE], zero[NODE_SIZE] = {0};
    int refused = 0, found = 0, meta;

    if (!setup(&c, path))
        return;
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "%0250d", i);           /* long, so that there are more nodes than a root names itself */
        CHECK(client_create(&c, ROOT_INO, name) > 0);
        if (i % 100 == 0)
            CHECK_EQ(client_sync(&c), 0);
    }
    CHECK_EQ(volume_close(c.volume), 0);
    meta = openat(c.src_fd, "meta", O_RDWR | O_CLOEXEC);
    if (!CHECK(meta >= 0))
        return;
    for (off_t at = ROOT_SLOTS * NODE_SIZE; pread(meta, slot, NODE_SIZE, at) == NODE_SIZE; at += NODE_SIZE) {
        struct volume_options o = client_options(c.src_fd);
        int rc, listed = 0, stop = 0;

        o.read_only = true;
        CHECK_EQ(pwrite(meta, zero, NODE_SIZE, at), NODE_SIZE);
        rc = client_open(&c, &o);
        if (rc) {
            CHECK_EQ(rc, -EBADMSG);
            CHECK(strstr(c.message, "\"meta\"") != NULL);
            refused++;
        } else {
            rc = volume_verify(c.volume, no_progress, count_metadata, &listed, &stop);
            CHECK(rc == 0 || rc == -EBADMSG);
            CHECK_EQ(rc == -EBADMSG, listed > 0);
            found += rc != 0;
            CHECK_EQ(volume_close(c.volume), 0);
        }
        CHECK_EQ(pwrite(meta, slot, NODE_SIZE, at), NODE_SIZE);
    }
    CHECK(refused > 0 && found > 0);
    close(meta);
    if (reopen(&c))
        teardown(&c, path);
}

/* Without the directory "objects" a volume with contents there stays shut, however it is opened; one that has none needs it not. */
TEST(a_missing_directory_of_objects_is_refused)
{
    static uint8_t data[20000];
    struct client c;
    char path[64], command[200];

    if (!setup(&c, path))
        return;
    CHECK_EQ(faccessat(c.src_fd, "objects", F_OK, 0), -1);
    CHECK(client_create(&c, ROOT_INO, "empty") > 0);
    CHECK_EQ(volume_close(c.volume), 0);
    if (!reopen(&c))
        return;
    int64_t ino = client_create(&c, ROOT_INO, "f");
    CHECK_EQ(client_write(&c, (uint64_t)ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(volume_close(c.volume), 0);
    CHECK_EQ(renameat(c.src_fd, "objects", c.src_fd, "elsewhere"), 0);
    for (int plant = 0; plant < 3; plant++) {
        const int expected[] = {-ENOENT, -ENOTDIR, -ENOTDIR};
        const char *plants[] = {"true", "touch objects", "ln -s elsewhere objects"};
        snprintf(command, sizeof command, "cd '%s' && rm -f objects && %s", path, plants[plant]);
        CHECK_EQ(system(command), 0);
        for (int read_only = 0; read_only < 2; read_only++) {
            struct volume_options o = client_options(c.src_fd);
            o.read_only = read_only;
            CHECK_EQ(client_open(&c, &o), expected[plant]);
            CHECK(strstr(c.message, "the directory \"objects\""));
        }
    }
    snprintf(command, sizeof command, "cd '%s' && rm objects && mv elsewhere objects", path);
    CHECK_EQ(system(command), 0);
    if (!reopen(&c))
        return;
    teardown(&c, path);
}
