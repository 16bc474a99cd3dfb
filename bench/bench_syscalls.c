/* Work on a directory, timed in C: Python's own cost would hide what is measured. mount.py runs it on each candidate's mount.
 *
 *     bench_syscalls fill FILE MIB
 *     bench_syscalls create-empty DIRECTORY FILES
 *     bench_syscalls random-read FILE direct|buffered CLIENTS OPERATIONS MILLISECONDS PART PARTS
 *     bench_syscalls random-write FILE OPERATIONS
 *     bench_syscalls sequential-write FILE MIB BLOCK
 *     bench_syscalls sequential-read FILE BLOCK
 *     bench_syscalls append FILE OPERATIONS MILLISECONDS
 *     bench_syscalls small-files DIRECTORY FILES MILLISECONDS
 *     bench_syscalls command PROGRAM [ARGUMENT...]
 *
 * Prints a line of JSON for each question: {"name": ..., "ns": ...}, nanoseconds an operation (a MiB, a run). Where MILLISECONDS are
 * given, a loop ends when they have passed, and the mean counts what was done until then: a slow candidate takes no longer. */
#include "measure.h"

#include <pthread.h>
#include <sys/wait.h>

enum { SMALL = 1024, CLIENTS_MAX = 64 };

static void say(const char *name, double ns) { printf("{\"name\": \"%s\", \"ns\": %.1f}\n", name, ns); }

static double deadline_in(const char *milliseconds) { return now_ns() + strtod(milliseconds, NULL) * 1e6; }

static size_t number(const char *text)
{
    char *end;
    size_t n = strtoull(text, &end, 10);

    if (!*text || *end)
        die(text, -EINVAL);
    return n;
}

static int open_or_die(const char *path, int flags) { return (int)must(path, open(path, flags | O_CLOEXEC, 0644)); }

static void write_or_die(int fd, const void *data, size_t size, off_t at)
{
    if (must("pwrite", pwrite(fd, data, size, at)) != (ssize_t)size)
        die("short write", -EIO);
}

static void read_or_die(int fd, void *data, size_t size, off_t at)
{
    if (must("pread", pread(fd, data, size, at)) != (ssize_t)size)
        die("short read", -EIO);
}

static size_t size_of(int fd)
{
    struct stat st;

    must("fstat", fstat(fd, &st));
    return (size_t)st.st_size;
}

/* ---- one large file ---- */

static void write_file(const char *path, size_t size, size_t block, const uint8_t *data)
{
    int fd = open_or_die(path, O_WRONLY | O_CREAT | O_EXCL);

    for (size_t at = 0; at < size; at += block)
        write_or_die(fd, data, block, (off_t)at);
    must("fsync", fsync(fd));
    must("close", close(fd));
}

static void fill(char **v) { write_file(v[0], number(v[1]) * MIB, MIB, noise(MIB)); }

static void sequential_write(char **v)
{
    size_t mib = number(v[1]), block = number(v[2]);
    uint8_t *data = noise(block);
    double start = now_ns();

    write_file(v[0], mib * MIB, block, data);
    say("sequential write", (now_ns() - start) / (double)mib);
}

static void sequential_read(char **v)
{
    size_t block = number(v[1]);
    uint8_t *data = noise(block);
    double start = now_ns();
    int fd = open_or_die(v[0], O_RDONLY);
    size_t size = size_of(fd);

    for (size_t at = 0; at < size; at += block)
        read_or_die(fd, data, block, (off_t)at);
    must("close", close(fd));
    say("sequential read", (now_ns() - start) * MIB / (double)size);
}

/* The numbers first .. first + n - 1 in random order. */
static uint32_t *shuffled(uint32_t first, uint32_t n, uint64_t seed)
{
    uint32_t *order = malloc(n * sizeof *order);

    if (!order)
        die("malloc", -ENOMEM);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t other = (uint32_t)(chance(&seed) % (i + 1));

        order[i] = order[other];
        order[other] = first + i;
    }
    return order;
}

struct client {
    pthread_t thread;
    pthread_barrier_t *start;
    int fd;
    const uint32_t *order;
    size_t first, step, end;            /* its places in `order` */
    const double *deadline;
    size_t done;
};

static void *client_run(void *arg)
{
    struct client *c = arg;
    uint8_t *data = noise(NODE_SIZE);   /* a page of its own, as O_DIRECT wants it */

    pthread_barrier_wait(c->start);     /* all are there; the deadline is set */
    pthread_barrier_wait(c->start);
    for (size_t i = c->first; i < c->end && now_ns() < *c->deadline; i += c->step, c->done++)
        read_or_die(c->fd, data, NODE_SIZE, (off_t)c->order[i] * NODE_SIZE);
    return NULL;
}

static void random_read(char **v)
{
    bool direct = !strcmp(v[1], "direct");
    size_t clients = number(v[2]), operations = number(v[3]), part = number(v[5]), parts = number(v[6]), done = 0;
    int fd = open_or_die(v[0], O_RDONLY | (direct ? O_DIRECT : 0));
    uint32_t nodes = (uint32_t)(size_of(fd) / NODE_SIZE / parts);
    uint32_t *order = shuffled((uint32_t)part * nodes, nodes, (uint64_t)now_ns());
    struct client all[CLIENTS_MAX];
    pthread_barrier_t barrier;
    double start, deadline;

    if (!clients || clients > CLIENTS_MAX)
        die("clients", -EINVAL);
    if (operations > nodes)
        operations = nodes;             /* none twice: it would be in the page cache */
    if (!direct)
        must("posix_fadvise", -posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
    pthread_barrier_init(&barrier, NULL, (unsigned)clients + 1);
    for (size_t i = 0; i < clients; i++) {
        all[i] = (struct client){.start = &barrier, .fd = fd, .order = order, .first = i, .step = clients, .end = operations,
                                 .deadline = &deadline};
        must("pthread_create", -pthread_create(&all[i].thread, NULL, client_run, &all[i]));
    }
    pthread_barrier_wait(&barrier);
    start = now_ns();
    deadline = deadline_in(v[4]);
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < clients; i++) {
        pthread_join(all[i].thread, NULL);
        done += all[i].done;
    }
    say("random read", (now_ns() - start) / (double)done);
    close(fd);
    free(order);
}

/* With the fsync that makes it durable: a write-back cache only puts the work off. */
static void random_write(char **v)
{
    int fd = open_or_die(v[0], O_RDWR);
    size_t operations = number(v[1]);
    uint32_t nodes = (uint32_t)(size_of(fd) / NODE_SIZE);
    uint32_t *order = shuffled(0, nodes, (uint64_t)now_ns());
    uint8_t *data = noise(NODE_SIZE);
    double start = now_ns();

    for (size_t i = 0; i < operations; i++)
        write_or_die(fd, data, NODE_SIZE, (off_t)order[i % nodes] * NODE_SIZE);
    must("fsync", fsync(fd));
    say("random write", (now_ns() - start) / (double)operations);
    close(fd);
    free(order);
}

static void append(char **v)
{
    int fd = open_or_die(v[0], O_WRONLY | O_CREAT | O_EXCL | O_APPEND);
    size_t operations = number(v[1]), done = 0;
    uint8_t *data = noise(NODE_SIZE);
    double start = now_ns(), deadline = deadline_in(v[2]);

    for (; done < operations && now_ns() < deadline; done++) {
        if (must("write", write(fd, data, NODE_SIZE)) != NODE_SIZE)
            die("short write", -EIO);
        must("fdatasync", fdatasync(fd));
    }
    say("append", (now_ns() - start) / (double)done);
    close(fd);
}

/* ---- many files ---- */

static int directory;                   /* where the names lie */

static void name_of(size_t i, char name[32]) { snprintf(name, 32, "file-%08zu.dat", i); }

static void open_directory(const char *path)
{
    must(path, mkdir(path, 0755));
    directory = open_or_die(path, O_RDONLY | O_DIRECTORY);
}

static void create_one(const char *name, void *data)
{
    int fd = (int)must(name, openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));

    write_or_die(fd, data, SMALL, 0);
    must(name, close(fd));
}

static void stat_one(const char *name, void *data)
{
    struct stat st;

    (void)data;
    must(name, fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW));
}

static void read_one(const char *name, void *data)
{
    int fd = (int)must(name, openat(directory, name, O_RDONLY | O_CLOEXEC));

    read_or_die(fd, data, SMALL, 0);
    must(name, close(fd));
}

static void unlink_one(const char *name, void *data)
{
    (void)data;
    must(name, unlinkat(directory, name, 0));
}

/* Does `step` to n files or until the deadline; returns to how many. */
static size_t each(const char *what, void (*step)(const char *, void *), size_t n, double deadline)
{
    static uint8_t data[SMALL];
    char name[32];
    size_t i = 0;
    double start = now_ns();

    for (; i < n && now_ns() < deadline; i++) {
        name_of(i, name);
        step(name, data);
    }
    say(what, (now_ns() - start) / (double)i);
    return i;
}

/* Makes the kernel forget what is clean: names and inodes ("2"), or contents too ("3"). Only root may; mount.py says so. */
static void drop(const char *what)
{
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);

    must("syncfs", syncfs(directory));
    if (fd < 0)
        return;
    must("drop_caches", write(fd, what, 1));
    close(fd);
}

static void small_files(char **v)
{
    size_t n;

    open_directory(v[0]);
    n = each("create", create_one, number(v[1]), deadline_in(v[2]));
    drop("2");
    n = each("stat", stat_one, n, deadline_in(v[2]));
    n = each("open+read+close", read_one, n, deadline_in(v[2]));
    drop("3");
    n = each("cold open+read+close", read_one, n, deadline_in(v[2]));
    each("unlink", unlink_one, n, deadline_in(v[2]));
}

static void create_empty(char **v)
{
    char name[32];

    open_directory(v[0]);
    for (size_t i = 0, n = number(v[1]); i < n; i++) {
        name_of(i, name);
        must(name, mknodat(directory, name, S_IFREG | 0644, 0));
    }
    must("syncfs", syncfs(directory));
}

/* ---- another program ---- */

static void command(char **v)
{
    double start = now_ns();
    pid_t child = (pid_t)must("fork", fork());
    int status;

    if (!child) {
        int null = open_or_die("/dev/null", O_WRONLY);

        dup2(null, STDOUT_FILENO);
        execvp(v[0], v);
        die(v[0], 0);
    }
    must("waitpid", waitpid(child, &status, 0));
    if (status)
        die(v[0], -EIO);
    say("command", now_ns() - start);
}

static const struct {
    const char *name;
    void (*run)(char **arguments);
    int arguments;                      /* at least */
} questions[] = {
    {"fill", fill, 2},
    {"create-empty", create_empty, 2},
    {"random-read", random_read, 7},
    {"random-write", random_write, 2},
    {"sequential-write", sequential_write, 3},
    {"sequential-read", sequential_read, 2},
    {"append", append, 3},
    {"small-files", small_files, 3},
    {"command", command, 1},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < sizeof questions / sizeof *questions; i++)
        if (!strcmp(argv[1], questions[i].name) && argc - 2 >= questions[i].arguments) {
            questions[i].run(argv + 2);
            return 0;
        }
    fprintf(stderr, "usage: see the head of bench_syscalls.c\n");
    return 2;
}
