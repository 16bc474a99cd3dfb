/* Messages that the kernel never sends, replies that it refuses, and a system that has no memory, threads or descriptors left. Linked
 * with --wrap for the functions that fail here. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "fake_kernel.h"

/* ---- functions of the system that fail ---- */

enum fault { NO_MAPPING, NO_THREAD, NO_MEMORY, NO_EVENT, NO_PAIR, FAULTS };

static _Atomic int fault = FAULTS;      /* which kind fails; FAULTS: none */
static _Atomic long countdown;          /* how many succeed before */
static _Atomic bool failed, lasting;
static _Atomic int write_error;         /* of long replies to the kernel; 0: none */
static _Atomic int device = -1;         /* where write_error counts */
static _Atomic long mappings;           /* messages that exist */

static bool fails(enum fault kind)
{
    if (atomic_load(&fault) != (int)kind || atomic_fetch_sub(&countdown, 1) > 0)
        return false;
    atomic_store(&failed, true);
    if (!atomic_load(&lasting))
        atomic_store(&fault, FAULTS);
    return true;
}

static void arm(enum fault kind, long nth, bool for_good)
{
    atomic_store(&failed, false);
    atomic_store(&countdown, nth);
    atomic_store(&lasting, for_good);
    atomic_store(&fault, (int)kind);
}

static void disarm(void) { atomic_store(&fault, FAULTS); }

enum { MESSAGE_BYTES = HEADER_ROOM + BUFFER_SIZE };

void *__real_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
void *__real_calloc(size_t n, size_t size);
int __real_eventfd(unsigned value, int flags);
int __real_socketpair(int domain, int type, int protocol, int pair[2]);
ssize_t __real_write(int fd, const void *bytes, size_t size);

void *__wrap_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset);
int __wrap_munmap(void *at, size_t size);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
void *__wrap_calloc(size_t n, size_t size);
int __wrap_eventfd(unsigned value, int flags);
int __wrap_socketpair(int domain, int type, int protocol, int pair[2]);
ssize_t __wrap_write(int fd, const void *bytes, size_t size);

void *__wrap_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset)
{
    if (size == MESSAGE_BYTES && fails(NO_MAPPING)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *p = __real_mmap64(at, size, prot, flags, fd, offset);
    if (size == MESSAGE_BYTES && p != MAP_FAILED)
        atomic_fetch_add(&mappings, 1);
    return p;
}

int __wrap_munmap(void *at, size_t size)
{
    if (size == MESSAGE_BYTES)
        atomic_fetch_sub(&mappings, 1);
    return __real_munmap(at, size);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    return fails(NO_THREAD) ? EAGAIN : __real_pthread_create(thread, attr, run, arg);
}

void *__wrap_calloc(size_t n, size_t size) { return fails(NO_MEMORY) ? NULL : __real_calloc(n, size); }

int __wrap_eventfd(unsigned value, int flags)
{
    if (!fails(NO_EVENT))
        return __real_eventfd(value, flags);
    errno = EMFILE;
    return -1;
}

int __wrap_socketpair(int domain, int type, int protocol, int pair[2])
{
    if (!fails(NO_PAIR))
        return __real_socketpair(domain, type, protocol, pair);
    errno = EMFILE;
    return -1;
}

/* Errors of up to a header are let through: what is refused is the data. */
ssize_t __wrap_write(int fd, const void *bytes, size_t size)
{
    int error = atomic_load(&write_error);

    if (error == 0 || fd != atomic_load(&device) || size <= sizeof(struct fuse_out_header))
        return __real_write(fd, bytes, size);
    errno = error;
    return -1;
}

static void check_serves(void)
{
    struct fuse_getattr_in in = {0};

    CHECK_EQ(CALL(FUSE_GETATTR, ROOT_INO, in), sizeof(struct fuse_attr_out));
}

/* ---- start without this or that ---- */

TEST(start_survives_whatever_fails)
{
    if (!volume_begin())
        return;
    for (int kind = 0; kind < FAULTS; kind++) {
        unsigned tried = 0;
        for (bool again = true; again; tried++) {
            int end = device_open();
            const unsigned before = descriptors();
            arm(kind, tried, false);
            int error = transport_begin(end, 3);
            again = atomic_load(&failed);
            disarm();
            if (again) {
                CHECK(error == (kind == NO_THREAD ? -EAGAIN : kind == NO_EVENT || kind == NO_PAIR ? -EMFILE : -ENOMEM));
                CHECK_EQ(descriptors(), before - 1);    /* the device is closed */
                device_close();
            } else if (CHECK_EQ(error, 0)) {
                check_serves();
                check_quiet();
                transport_end();
            }
            CHECK_EQ(atomic_load(&mappings), 0);
        }
        CHECK(tried > 1);
    }
    volume_end();
}

/* ---- messages without memory ---- */

/* No further message can be had: each request is answered all the same, only later. */
TEST(requests_are_answered_without_memory_for_messages)
{
    enum { FSYNCS = 20 };
    struct fuse_fsync_in in = {0};
    uint64_t unique[FSYNCS];

    for (unsigned readers = 1; readers <= 4; readers += 3) {
        if (!volume_begin() || !CHECK_EQ(transport_begin(device_open(), readers), 0))
            return;
        uint64_t ino = kernel_create(ROOT_INO, "f");
        arm(NO_MAPPING, 0, true);
        for (int round = 0; round < 5; round++) {
            CHECK_EQ(kernel_write(ino, "abc", 3, (uint64_t)round * 3), 3);
            for (int i = 0; i < FSYNCS; i++)
                unique[i] = CALL(FUSE_FSYNC, ino, in) == 0 ? 0 : 1;
            for (int i = 0; i < FSYNCS; i++)
                CHECK_EQ(unique[i], 0);
            for (int i = 0; i < FSYNCS; i++)
                unique[i] = ask(FUSE_FSYNC, ino, &in, sizeof in, NULL, 0);
            for (int i = 0; i < FSYNCS; i++)
                CHECK_EQ(await_reply(unique[i]), 0);
            check_serves();
        }
        CHECK(atomic_load(&failed));
        disarm();
        check_quiet();
        transport_end();
        volume_end();
        CHECK_EQ(atomic_load(&mappings), 0);
    }
}

/* ---- replies that the kernel refuses ---- */

static void settle(size_t known)
{
    check_serves();
    CHECK_EQ(client_sync(&kernel.client), 0);
    for (int i = 0; i < 1000 && inodes_in_core() != known; i++)
        usleep(1000);
    CHECK_EQ(inodes_in_core(), known);
}

/* What the reply would have given to the kernel is taken back. ENOENT: the kernel has given the request up and needs no answer. */
static void refuse_with(int error)
{
    struct fuse_create_in create = {.flags = O_RDWR | O_CREAT, .mode = S_IFREG | 0644};
    struct fuse_mknod_in mknod = {.mode = S_IFREG | 0644};
    struct fuse_mkdir_in mkdir = {.mode = 0755};
    struct fuse_read_in listing = {.size = 8192};
    struct fuse_link_in link;
    const char names[] = "sym\0target";
    const bool answered = error != ENOENT;

    if (!begin())
        return;
    uint64_t known = kernel_create(ROOT_INO, "known");
    CHECK_EQ(client_create(&kernel.client, ROOT_INO, "unknown") > 0, true);
    kernel_forget(((struct request){.ino = known}).ino, 0);
    client_lookup(&kernel.client, ROOT_INO, "unknown", NULL);
    struct attr unknown;
    client_lookup(&kernel.client, ROOT_INO, "unknown", &unknown);
    request_forget(kernel.client.volume, unknown.ino, 3);
    settle(2);
    link.oldnodeid = known;
    atomic_store(&device, transport_fuse_fd(kernel.transport));
    for (int i = 0; i < 9; i++) {
        uint64_t unique = 0;

        atomic_store(&write_error, error);
        switch (i) {
        case 0: unique = ask(FUSE_LOOKUP, ROOT_INO, "unknown", 8, NULL, 0); break;
        case 1: unique = ask(FUSE_CREATE, ROOT_INO, &create, sizeof create, "created", 8); break;
        case 2: unique = ask(FUSE_MKNOD, ROOT_INO, &mknod, sizeof mknod, "node", 5); break;
        case 3: unique = ask(FUSE_MKDIR, ROOT_INO, &mkdir, sizeof mkdir, "dir", 4); break;
        case 4: unique = ask(FUSE_SYMLINK, ROOT_INO, names, sizeof names, NULL, 0); break;
        case 5: unique = ask(FUSE_LINK, ROOT_INO, &link, sizeof link, "linked", 7); break;
        case 6: unique = ask(FUSE_TMPFILE, ROOT_INO, &create, sizeof create, "/", 2); break;
        case 7: unique = ask(FUSE_READDIRPLUS, ROOT_INO, &listing, sizeof listing, NULL, 0); break;
        case 8: unique = ask(FUSE_LOOKUP, ROOT_INO, "absent", 7, NULL, 0); break;
        }
        if (answered)
            CHECK_EQ(await_reply(unique), -EIO);
        for (int k = 0; k < TEN_SECONDS; k++) {     /* until it is counted: then nothing of it is left to do */
            struct transport_opcode stats[TRANSPORT_OPCODES];
            static const uint8_t opcodes[] = {FUSE_LOOKUP, FUSE_CREATE, FUSE_MKNOD, FUSE_MKDIR, FUSE_SYMLINK, FUSE_LINK, FUSE_TMPFILE,
                                              FUSE_READDIRPLUS, FUSE_LOOKUP};
            transport_stats(kernel.transport, stats);
            if (stats[opcodes[i]].native >= (i == 8 ? 2 : i == 1 ? 2 : 1))
                break;
            usleep(1000);
        }
        atomic_store(&write_error, 0);
        settle(2);                      /* the root and "known" */
    }
    CHECK_EQ(kernel_lookup(ROOT_INO, "linked"), sizeof(struct fuse_entry_out));
    kernel_forget(known, 2);
    settle(1);
    check_quiet();
    end_all();
}

TEST(refused_replies_take_lookups_back) { refuse_with(EINVAL); }
TEST(replies_to_requests_given_up_take_lookups_back) { refuse_with(ENOENT); }

TEST(refused_data_becomes_an_error)
{
    if (!begin())
        return;
    uint64_t ino = kernel_create(ROOT_INO, "f");
    CHECK_EQ(kernel_write(ino, "abc", 3, 0), 3);
    atomic_store(&device, transport_fuse_fd(kernel.transport));
    atomic_store(&write_error, EINVAL);
    CHECK_EQ(kernel_read(ino, 10, 0), -EIO);
    struct fuse_getattr_in in = {0};
    CHECK_EQ(CALL(FUSE_GETATTR, ino, in), -EIO);
    atomic_store(&write_error, 0);
    check_quiet();
    end_all();
}

/* ---- messages that are wrong ---- */

/* One request of an opcode that is as it should be: the numbers in it mean nothing, but its names end. */
static const struct form { uint32_t opcode; size_t fixed, least; unsigned names; } forms[] = {
    {FUSE_LOOKUP, 0, 0, 1}, {FUSE_GETATTR, sizeof(struct fuse_getattr_in), 0, 0},
    {FUSE_SETATTR, sizeof(struct fuse_setattr_in), sizeof(struct fuse_setattr_in), 0}, {FUSE_READLINK, 0, 0, 0}, {FUSE_SYMLINK, 0, 0, 2},
    {FUSE_MKNOD, sizeof(struct fuse_mknod_in), sizeof(struct fuse_mknod_in), 1},
    {FUSE_MKDIR, sizeof(struct fuse_mkdir_in), sizeof(struct fuse_mkdir_in), 1}, {FUSE_UNLINK, 0, 0, 1}, {FUSE_RMDIR, 0, 0, 1},
    {FUSE_RENAME, sizeof(struct fuse_rename_in), sizeof(struct fuse_rename_in), 2},
    {FUSE_RENAME2, sizeof(struct fuse_rename2_in), sizeof(struct fuse_rename2_in), 2},
    {FUSE_LINK, sizeof(struct fuse_link_in), sizeof(struct fuse_link_in), 1},
    {FUSE_READ, sizeof(struct fuse_read_in), sizeof(struct fuse_read_in), 0},
    {FUSE_WRITE, sizeof(struct fuse_write_in), sizeof(struct fuse_write_in), 0}, {FUSE_STATFS, 0, 0, 0},
    {FUSE_FSYNC, sizeof(struct fuse_fsync_in), sizeof(struct fuse_fsync_in), 0},
    {FUSE_FSYNCDIR, sizeof(struct fuse_fsync_in), sizeof(struct fuse_fsync_in), 0},
    {FUSE_GETXATTR, sizeof(struct fuse_getxattr_in), sizeof(struct fuse_getxattr_in), 1},
    {FUSE_LISTXATTR, sizeof(struct fuse_getxattr_in), sizeof(struct fuse_getxattr_in), 0},
    {FUSE_READDIR, sizeof(struct fuse_read_in), sizeof(struct fuse_read_in), 0},
    {FUSE_READDIRPLUS, sizeof(struct fuse_read_in), sizeof(struct fuse_read_in), 0},
    {FUSE_CREATE, sizeof(struct fuse_create_in), sizeof(struct fuse_create_in), 1},
    {FUSE_TMPFILE, sizeof(struct fuse_create_in), sizeof(struct fuse_create_in), 1},
    {FUSE_FALLOCATE, sizeof(struct fuse_fallocate_in), sizeof(struct fuse_fallocate_in), 0},
    {FUSE_LSEEK, sizeof(struct fuse_lseek_in), sizeof(struct fuse_lseek_in), 0},
    {FUSE_COPY_FILE_RANGE, sizeof(struct fuse_copy_file_range_in), sizeof(struct fuse_copy_file_range_in), 0},
    {FUSE_OPCODE_COPY_FILE_RANGE_64, sizeof(struct fuse_copy_file_range_in), sizeof(struct fuse_copy_file_range_in), 0},
    {FUSE_OPCODE_STATX, sizeof(struct fuse_abi_statx_in), 0, 0},
    {FUSE_OPEN, sizeof(struct fuse_open_in), 0, 0}, {FUSE_OPENDIR, sizeof(struct fuse_open_in), 0, 0},
    {FUSE_FLUSH, sizeof(struct fuse_flush_in), 0, 0}, {FUSE_RELEASE, sizeof(struct fuse_release_in), 0, 0},
    {FUSE_RELEASEDIR, sizeof(struct fuse_release_in), 0, 0}, {FUSE_INTERRUPT, sizeof(struct fuse_interrupt_in), 0, 0},
};

/* A message that lacks anything is answered with EINVAL, whatever was in the same memory before it. */
TEST(truncated_messages_are_refused_at_every_length)
{
    uint8_t body[256] = {0}, *stale = pattern(4000, 0);

    if (!begin())
        return;
    uint64_t file = kernel_create(ROOT_INO, "a");
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const struct form *f = &forms[i];
        size_t whole = f->fixed;

        memset(body, 0, sizeof body);
        for (unsigned n = 0; n < f->names; n++) {
            memcpy(body + whole, "nam", 4);
            whole += 4;
        }
        for (size_t size = 0; size < whole; size++) {
            struct fuse_write_in in = {.size = 4000, .offset = 0};
            CHECK_EQ(call(FUSE_WRITE, file, &in, sizeof in, stale, 4000), sizeof(struct fuse_write_out));
            int64_t result = call(f->opcode, file, body, size, NULL, 0);
            if (size < f->least || f->names > 0) {
                if (!CHECK_EQ(result, -EINVAL))
                    fprintf(stderr, "opcode %u, %zu bytes\n", f->opcode, size);
            } else {
                CHECK(result != INT64_MIN);
            }
        }
    }
    check_quiet();
    kernel_forget(file, 1);
    settle(1);
    end_all();
    free(stale);
}

TEST(names_that_do_not_end_are_refused)
{
    uint8_t *names = malloc(BUFFER_SIZE);

    memset(names, 'x', BUFFER_SIZE);
    if (!begin())
        return;
    const size_t sizes[] = {1, 255, 256, 4096, 8192, kernel.most};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        for (size_t s = 0; forms[i].names > 0 && s < sizeof sizes / sizeof *sizes; s++) {
            uint8_t fixed[128] = {0};

            CHECK_EQ(call(forms[i].opcode, ROOT_INO, fixed, forms[i].fixed, names, sizes[s]), -EINVAL);
            if (sizes[s] > 65536) {     /* and those that end too late */
                names[sizes[s] - 1] = 0;
                CHECK(call(forms[i].opcode, ROOT_INO, fixed, forms[i].fixed, names, sizes[s]) < 0 || forms[i].opcode == FUSE_TMPFILE);
                names[sizes[s] - 1] = 'x';
            }
        }
    check_quiet();
    end_all();
    free(names);
}

TEST(counts_that_lie)
{
    struct { struct fuse_batch_forget_in in; struct fuse_forget_one one[2]; } forget = {.in = {.count = UINT32_MAX}};
    struct fuse_write_in write = {.size = 5};
    struct fuse_read_in read = {.size = UINT32_MAX};
    struct fuse_forget_in one = {.nlookup = UINT64_MAX};

    if (!begin())
        return;
    uint64_t a = kernel_create(ROOT_INO, "a"), b = kernel_create(ROOT_INO, "b");
    CHECK_EQ(call(FUSE_WRITE, a, &write, sizeof write, "abcd", 4), -EINVAL);
    CHECK_EQ(call(FUSE_WRITE, a, &write, sizeof write, "abcdef", 6), -EINVAL);
    write.size = UINT32_MAX;
    CHECK_EQ(call(FUSE_WRITE, a, &write, sizeof write, "abcdef", 6), -EINVAL);
    CHECK_EQ(kernel_read(a, 10, 0), 0);
    CHECK_EQ(CALL(FUSE_READ, a, read), -EINVAL);
    CHECK(CALL(FUSE_READDIRPLUS, a, read) == -ENOTDIR);
    forget.one[0] = (struct fuse_forget_one){.nodeid = a, .nlookup = 1};
    forget.one[1] = (struct fuse_forget_one){.nodeid = 0, .nlookup = 1};
    ask(FUSE_BATCH_FORGET, 0, &forget, sizeof forget - 1, NULL, 0);     /* one whole, one cut off */
    settle(2);
    for (size_t size = 0; size < sizeof forget.in; size++)
        ask(FUSE_BATCH_FORGET, 0, &forget, size, NULL, 0);
    for (size_t size = 0; size < sizeof one; size++)
        ask(FUSE_FORGET, b, &one, size, NULL, 0);
    settle(2);
    ask(FUSE_FORGET, b, &one, sizeof one, NULL, 0);     /* more than there are */
    settle(1);
    check_quiet();
    end_all();
}

/* Bytes without sense, in messages of the right length as well as any other. Whatever is passed on gets an error. */
static _Atomic bool refusing;

static void *refuse_as_pyfuse3(void *arg)
{
    uint8_t *got = malloc(2 * MIB);

    while (atomic_load(&refusing)) {
        struct fuse_out_header reply = {.len = sizeof reply, .error = -ENOTSUP};
        if (!readable(kernel.session, 20))
            continue;
        if (recv(kernel.session, got, 2 * MIB, MSG_TRUNC) < 40)
            break;
        reply.unique = ((struct fuse_in_header *)got)->unique;
        send(kernel.session, &reply, sizeof reply, MSG_NOSIGNAL);
    }
    free(got);
    return arg;
}

TEST(garbage_is_answered)
{
    enum { ROUNDS = 6000 };
    static const uint64_t offsets[] = {0, 1, 4096, 1 << 20, INT64_MAX, UINT64_MAX};
    pthread_t pyfuse3;
    unsigned seed = 1;
    uint64_t inos[8];

    if (!begin())
        return;
    for (int i = 0; i < 8; i++) {
        char name[3] = {'g', (char)('0' + i), 0};
        inos[i] = kernel_create(ROOT_INO, name);
    }
    atomic_store(&refusing, true);
    pthread_create(&pyfuse3, NULL, refuse_as_pyfuse3, NULL);
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t opcode = (uint32_t)rand_r(&seed) % 70;
        uint8_t body[300];
        size_t size = (size_t)rand_r(&seed) % 4 ? 8 * ((size_t)rand_r(&seed) % 16) : (size_t)rand_r(&seed) % sizeof body;
        uint64_t ino = rand_r(&seed) % 3 ? inos[rand_r(&seed) % 8] : (uint64_t)rand_r(&seed) % 12;

        for (size_t i = 0; i < sizeof body; i++)
            body[i] = (uint8_t)(rand_r(&seed) % 3 ? 0 : rand_r(&seed) % 5 ? rand_r(&seed) % 8 : rand_r(&seed));
        if (rand_r(&seed) % 2)
            memcpy(body + 8 * (rand_r(&seed) % 4), &offsets[rand_r(&seed) % 6], 8);
        if (opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET) {
            ask(opcode, ino, body, size, NULL, 0);
            continue;
        }
        if (opcode == FUSE_INIT || opcode == FUSE_FALLOCATE || opcode == FUSE_OPCODE_COPY_FILE_RANGE_64)
            size = size % 32;           /* what lasts: one long copy of zeros after the other */
        CHECK(call(opcode, ino, body, size, NULL, 0) != INT64_MIN);
    }
    CHECK(kernel.early == NULL);
    atomic_store(&refusing, false);
    pthread_join(pyfuse3, NULL);
    end_all();
    CHECK_EQ(atomic_load(&mappings), 0);
}

TEST(a_message_without_a_header_ends_the_connection)
{
    if (!begin())
        return;
    CHECK_EQ(send(kernel.fd, "short", 5, 0), 5);
    CHECK(readable(transport_done_fd(kernel.transport), TEN_SECONDS));
    end_all();
}

/* Replies of pyfuse3 without sense: none reaches the kernel that it would not have sent for. */
TEST(replies_too_short_or_too_long)
{
    static uint8_t bytes[2 * MIB];
    struct fuse_out_header *header = (void *)bytes;

    if (!begin())
        return;
    CHECK_EQ(send(kernel.session, bytes, 5, 0), 5);
    *header = (struct fuse_out_header){.len = BUFFER_SIZE + 1, .unique = 12};
    if (send(kernel.session, bytes, header->len, 0) < 0)
        CHECK(errno == EMSGSIZE && kernel.most < MIB);      /* an ordinary user's socket refuses it by itself */
    else
        CHECK_EQ(await_reply(12), -EIO);
    check_quiet();
    end_all();
}
