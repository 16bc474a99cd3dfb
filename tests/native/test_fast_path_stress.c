/* Several programs at once through the fast path, while groups run all the time: what each wrote is what it reads, each request has one
 * reply, and when the kernel has forgotten everything only the root is known. Meant for ThreadSanitizer. */
#include <linux/falloc.h>
#include <pthread.h>
#include <semaphore.h>

#include "fake_kernel.h"

enum { CLIENTS = 4, ROUNDS = 4000, SHARED = 3, REGION = 64 << 10, NAMES = 5, PRIVATE_MAX = 12000, PIECE = 20000 };

/* A file of one client alone. */
struct private {
    uint64_t ino;                       /* 0: there is none of that name */
    size_t size;
    uint8_t bytes[PRIVATE_MAX];
};

static struct program {
    unsigned id, seed;
    pthread_t thread;
    uint64_t sequence;
    _Atomic uint64_t awaited;
    sem_t answered;
    struct { struct fuse_out_header header; uint8_t data[MIB]; } reply;
    uint8_t region[SHARED][REGION];     /* of each shared file: its own part */
    struct private private[NAMES];
    uint8_t buffer[PIECE];
} programs[CLIENTS];

static uint64_t shared[SHARED];
static _Atomic bool routing;
static _Atomic unsigned long requests, replies;

/* Hands replies to whom they are for. */
static void *route(void *arg)
{
    static struct { struct fuse_out_header header; uint8_t data[MIB]; } reply;

    while (atomic_load(&routing)) {
        if (!readable(kernel.fd, 20))
            continue;
        ssize_t size = recv(kernel.fd, &reply, sizeof reply, MSG_TRUNC);
        struct program *p = &programs[(reply.header.unique >> 1) % CLIENTS];

        if (!CHECK(size >= 16) || !CHECK_EQ(reply.header.len, size) || !CHECK_EQ(reply.header.unique, p->awaited))
            break;
        memcpy(&p->reply, &reply, (size_t)size);
        p->awaited = 0;                 /* a second reply would not be expected */
        atomic_fetch_add(&replies, 1);
        sem_post(&p->answered);
    }
    return arg;
}

static void tell(struct program *p, uint32_t opcode, uint64_t ino, const void *in, size_t in_size, const void *more, size_t more_size)
{
    struct fuse_in_header header = {.len = (uint32_t)(sizeof header + in_size + more_size), .opcode = opcode, .nodeid = ino,
                                    .unique = (++p->sequence * CLIENTS + p->id) << 1};
    struct iovec iov[3] = {{&header, sizeof header}, {(void *)(uintptr_t)in, in_size}, {(void *)(uintptr_t)more, more_size}};
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = 3};

    p->awaited = header.unique;
    CHECK_EQ(sendmsg(kernel.fd, &message, MSG_NOSIGNAL), header.len);
}

static int64_t run(struct program *p, uint32_t opcode, uint64_t ino, const void *in, size_t in_size, const void *more, size_t more_size)
{
    tell(p, opcode, ino, in, in_size, more, more_size);
    while (sem_wait(&p->answered) != 0)
        ;
    atomic_fetch_add(&requests, 1);
    return p->reply.header.error != 0 ? p->reply.header.error : (int64_t)p->reply.header.len - 16;
}

#define RUN(p, opcode, ino, in) run(p, opcode, ino, &(in), sizeof(in), NULL, 0)

static unsigned below(struct program *p, unsigned n) { return (unsigned)rand_r(&p->seed) % n; }

static void forget(struct program *p, uint64_t ino)
{
    struct fuse_forget_in one = {.nlookup = 1};
    struct { struct fuse_batch_forget_in in; struct fuse_forget_one one; } batch = {{.count = 1}, {ino, 1}};

    if (below(p, 2))
        tell(p, FUSE_FORGET, ino, &one, sizeof one, NULL, 0);
    else
        tell(p, FUSE_BATCH_FORGET, 0, &batch, sizeof batch, NULL, 0);
}

static void fill(struct program *p, size_t size)
{
    uint8_t first = (uint8_t)below(p, 256);

    for (size_t i = 0; i < size; i++)
        p->buffer[i] = (uint8_t)(first + i * 7 + i / 256);
}

static void write_to(struct program *p, uint64_t ino, size_t size, uint64_t offset)
{
    struct fuse_write_in in = {.offset = offset, .size = (uint32_t)size, .write_flags = below(p, 2) ? FUSE_WRITE_CACHE : 0};

    CHECK_EQ(run(p, FUSE_WRITE, ino, &in, sizeof in, p->buffer, size), sizeof(struct fuse_write_out));
    CHECK_EQ(((struct fuse_write_out *)p->reply.data)->size, size);
}

/* ---- files that all use: each program has its part of them ---- */

static void use_shared(struct program *p)
{
    const unsigned f = below(p, SHARED), g = below(p, SHARED);
    const uint64_t base = (uint64_t)p->id * REGION;
    const size_t size = 1 + below(p, PIECE), at = below(p, REGION - PIECE), to = below(p, REGION - PIECE);

    switch (below(p, 12)) {
    case 0: case 1: case 2: {
        fill(p, size);
        write_to(p, shared[f], size, base + at);
        memcpy(p->region[f] + at, p->buffer, size);
        break;
    }
    case 3: case 4: case 5: {
        struct fuse_read_in in = {.offset = base + at, .size = (uint32_t)size};
        CHECK_EQ(RUN(p, FUSE_READ, shared[f], in), size);
        CHECK_MEM_EQ(p->reply.data, p->region[f] + at, size);
        break;
    }
    case 6: {
        struct fuse_fallocate_in in = {.offset = base + at, .length = size, .mode = FALLOC_FL_KEEP_SIZE |
                                       (below(p, 2) ? FALLOC_FL_PUNCH_HOLE : FALLOC_FL_ZERO_RANGE)};
        CHECK_EQ(RUN(p, FUSE_FALLOCATE, shared[f], in), 0);
        memset(p->region[f] + at, 0, size);
        break;
    }
    case 7: {
        struct fuse_copy_file_range_in in = {.off_in = base + at, .nodeid_out = shared[g], .off_out = base + to, .len = size};
        const bool overlap = f == g && at < to + size && to < at + size;
        int64_t n = RUN(p, below(p, 2) ? FUSE_COPY_FILE_RANGE : FUSE_OPCODE_COPY_FILE_RANGE_64, shared[f], in);
        CHECK_EQ(n, overlap ? -EINVAL : 8);
        if (!overlap) {
            CHECK_EQ(*(uint32_t *)p->reply.data, size);
            memcpy(p->region[g] + to, p->region[f] + at, size);
        }
        break;
    }
    case 8: {
        struct fuse_fsync_in in = {.fsync_flags = below(p, 2)};
        CHECK_EQ(RUN(p, FUSE_FSYNC, shared[f], in), 0);
        break;
    }
    case 9: {
        struct fuse_lseek_in in = {.offset = base + at, .whence = below(p, 2) ? SEEK_DATA : SEEK_HOLE};
        int64_t n = RUN(p, FUSE_LSEEK, shared[f], in);
        CHECK(n == -ENXIO || (n == 8 && ((struct fuse_lseek_out *)p->reply.data)->offset >= in.offset));
        break;
    }
    case 10: {
        struct fuse_setattr_in in = {.valid = FATTR_MTIME | FATTR_MODE, .mtime = 5, .mode = S_IFREG | 0600};
        CHECK_EQ(RUN(p, FUSE_SETATTR, shared[f], in), sizeof(struct fuse_attr_out));
        break;
    }
    default: {
        struct fuse_getattr_in in = {0};
        CHECK_EQ(RUN(p, FUSE_GETATTR, shared[f], in), sizeof(struct fuse_attr_out));
        CHECK_EQ(((struct fuse_attr_out *)p->reply.data)->attr.size, CLIENTS * REGION);
    }
    }
}

/* ---- names ---- */

static size_t name_of(char name[8], unsigned id, unsigned n) { return (size_t)snprintf(name, 8, "p%u-%u", id, n) + 1; }

static void read_private(struct program *p, const struct private *file)
{
    struct fuse_read_in in = {.size = PRIVATE_MAX};

    CHECK_EQ(RUN(p, FUSE_READ, file->ino, in), file->size);
    CHECK_MEM_EQ(p->reply.data, file->bytes, file->size);
}

/* Unlinked while it is open: it is there until it is forgotten. */
static void let_go(struct program *p, struct private *file)
{
    read_private(p, file);
    forget(p, file->ino);
    file->ino = 0;
}

static void create(struct program *p, unsigned n)
{
    struct fuse_create_in in = {.flags = O_RDWR, .mode = S_IFREG | 0644};
    struct private *file = &p->private[n];
    char name[8];
    size_t len = name_of(name, p->id, n);
    int64_t size = run(p, FUSE_CREATE, ROOT_INO, &in, sizeof in, name, len);

    if (file->ino != 0) {
        CHECK_EQ(size, -EEXIST);
    } else if (CHECK_EQ(size, sizeof(struct fuse_entry_out) + sizeof(struct fuse_open_out))) {
        file->ino = ((struct fuse_entry_out *)p->reply.data)->nodeid;
        file->size = 0;
    }
}

static void change(struct program *p, struct private *file)
{
    size_t at = below(p, PRIVATE_MAX / 2), size = 1 + below(p, below(p, 2) ? 500 : PRIVATE_MAX / 2);

    if (file->ino == 0)
        return;
    if (below(p, 3) == 0) {
        struct fuse_setattr_in in = {.valid = FATTR_SIZE, .size = at};
        CHECK_EQ(RUN(p, FUSE_SETATTR, file->ino, in), sizeof(struct fuse_attr_out));
        CHECK_EQ(((struct fuse_attr_out *)p->reply.data)->attr.size, at);
        if (at > file->size)
            memset(file->bytes + file->size, 0, at - file->size);
        file->size = at;
        return;
    }
    fill(p, size);
    write_to(p, file->ino, size, at);
    if (at > file->size)
        memset(file->bytes + file->size, 0, at - file->size);
    memcpy(file->bytes + at, p->buffer, size);
    if (at + size > file->size)
        file->size = at + size;
}

static void rename_private(struct program *p, unsigned from, unsigned to)
{
    struct fuse_rename_in in = {.newdir = ROOT_INO};
    char names[16];
    size_t len = name_of(names, p->id, from);

    len += name_of(names + len, p->id, to);
    CHECK_EQ(run(p, FUSE_RENAME, ROOT_INO, &in, sizeof in, names, len), p->private[from].ino != 0 ? 0 : -ENOENT);
    if (from == to || p->private[from].ino == 0)
        return;
    if (p->private[to].ino != 0)
        let_go(p, &p->private[to]);
    p->private[to] = p->private[from];
    p->private[from].ino = 0;
}

/* Any program's name: only of its own it is known whether it is there. */
static void look_up(struct program *p, unsigned id, unsigned n)
{
    char name[8];
    size_t len = name_of(name, id, n);
    struct fuse_entry_out *entry = (void *)p->reply.data;

    if (!CHECK_EQ(run(p, FUSE_LOOKUP, ROOT_INO, name, len, NULL, 0), sizeof *entry))
        return;
    if (id == p->id)
        CHECK_EQ(entry->nodeid, p->private[n].ino);
    if (id == p->id && entry->nodeid != 0)
        CHECK_EQ(entry->attr.size, p->private[n].size);
    if (entry->nodeid != 0)
        forget(p, entry->nodeid);
}

/* The whole directory: each of its own names once. */
static void list(struct program *p)
{
    struct fuse_read_in in = {.size = below(p, 2) ? 4096 : 1000};
    unsigned seen[NAMES] = {0}, id, n;
    int64_t size;

    while ((size = RUN(p, FUSE_READDIRPLUS, ROOT_INO, in)) > 0)
        for (int64_t at = 0; at < size;) {
            const struct fuse_direntplus *entry = (void *)(p->reply.data + at);
            char name[300] = "";

            memcpy(name, entry->dirent.name, entry->dirent.namelen);
            if (sscanf(name, "p%u-%u", &id, &n) == 2 && id == p->id && CHECK(n < NAMES)) {
                CHECK_EQ(entry->entry_out.nodeid, p->private[n].ino);
                seen[n]++;
            }
            if (entry->entry_out.nodeid != 0)
                forget(p, entry->entry_out.nodeid);
            in.offset = entry->dirent.off;
            at += (int64_t)FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET_DIRENTPLUS + entry->dirent.namelen);
        }
    CHECK_EQ(size, 0);
    for (n = 0; n < NAMES; n++)
        CHECK_EQ(seen[n], p->private[n].ino != 0);
}

static void use_names(struct program *p)
{
    unsigned n = below(p, NAMES);
    struct private *file = &p->private[n];
    char name[8];

    switch (below(p, 10)) {
    case 0: case 1: create(p, n); break;
    case 2: case 3: case 4: change(p, file); break;
    case 5: if (file->ino != 0) read_private(p, file); break;
    case 6: rename_private(p, n, below(p, NAMES)); break;
    case 7: look_up(p, below(p, CLIENTS), n); break;
    case 8: list(p); break;
    default: {
        size_t len = name_of(name, p->id, n);
        CHECK_EQ(run(p, FUSE_UNLINK, ROOT_INO, name, len, NULL, 0), file->ino != 0 ? 0 : -ENOENT);
        if (file->ino != 0)
            let_go(p, file);
    }
    }
}

static void *work(void *arg)
{
    struct program *p = arg;

    for (int round = 0; round < ROUNDS; round++)
        if (below(p, 2))
            use_shared(p);
        else
            use_names(p);
    return NULL;
}

/* ---- afterwards ---- */

static void check_contents(void)
{
    uint8_t *back = malloc(MIB);
    struct attr attr;

    for (int f = 0; f < SHARED; f++) {
        const char name[] = {'s', (char)('0' + f), 0};
        CHECK_EQ(client_lookup(&kernel.client, ROOT_INO, name, &attr), 0);
        CHECK_EQ(attr.size, CLIENTS * REGION);
        CHECK_EQ(client_read(&kernel.client, attr.ino, back, MIB, 0), CLIENTS * REGION);
        for (unsigned i = 0; i < CLIENTS; i++)
            CHECK_MEM_EQ(back + i * REGION, programs[i].region[f], REGION);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        for (unsigned n = 0; n < NAMES; n++) {
            const struct private *file = &programs[i].private[n];
            char name[8];
            name_of(name, i, n);
            CHECK_EQ(client_lookup(&kernel.client, ROOT_INO, name, &attr), file->ino != 0 ? 0 : -ENOENT);
            if (file->ino == 0)
                continue;
            CHECK_EQ(attr.ino, file->ino);
            CHECK_EQ(client_read(&kernel.client, attr.ino, back, MIB, 0), file->size);
            CHECK_MEM_EQ(back, file->bytes, file->size);
        }
    free(back);
}

static void begin_programs(void)
{
    struct fuse_setattr_in size = {.valid = FATTR_SIZE, .size = CLIENTS * REGION};

    for (int f = 0; f < SHARED; f++) {
        const char name[] = {'s', (char)('0' + f), 0};
        shared[f] = kernel_create(ROOT_INO, name);
        CHECK_EQ(CALL(FUSE_SETATTR, shared[f], size), sizeof(struct fuse_attr_out));
    }
    memset(programs, 0, sizeof programs);
    for (unsigned i = 0; i < CLIENTS; i++) {
        programs[i].id = i;
        programs[i].seed = i + 1;
        programs[i].sequence = 1000;
        sem_init(&programs[i].answered, 0, 0);
    }
}

TEST(everything_at_once)
{
    struct transport_opcode stats[TRANSPORT_OPCODES];
    uint64_t counted = 0, before = 0;
    pthread_t router;

    if (!volume_begin())
        return;
    CHECK_EQ(volume_close(kernel.client.volume), 0);
    kernel.options.group_interval_ms = 20;
    kernel.options.free_list_bytes = kernel.options.dirty_limit_bytes = 512 << 10;
    if (!CHECK_EQ(client_open(&kernel.client, &kernel.options), 0) || !CHECK_EQ(transport_begin(device_open(), 0), 0))
        return;
    begin_programs();
    before = 2 * SHARED;
    atomic_store(&routing, true);
    pthread_create(&router, NULL, route, NULL);
    for (int i = 0; i < CLIENTS; i++)
        pthread_create(&programs[i].thread, NULL, work, &programs[i]);
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(programs[i].thread, NULL);
    atomic_store(&routing, false);
    pthread_join(router, NULL);
    CHECK_EQ(atomic_load(&requests), atomic_load(&replies));

    for (int i = 0; i < CLIENTS; i++)
        for (int n = 0; n < NAMES; n++)
            if (programs[i].private[n].ino != 0)
                kernel_forget(programs[i].private[n].ino, 1);
    for (int f = 0; f < SHARED; f++)
        kernel_forget(shared[f], 1);
    kernel.unique += 1000000;
    check_quiet();
    for (int i = 0; i < TEN_SECONDS && inodes_in_core() > 1; i++)
        usleep(1000);
    CHECK_EQ(inodes_in_core(), 1);
    transport_stats(kernel.transport, stats);
    for (int i = 0; i < TRANSPORT_OPCODES; i++) {
        uint64_t sum = 0;
        for (int b = 0; b < LATENCY_BUCKETS; b++)
            sum += stats[i].latency[b];
        CHECK_EQ(sum, stats[i].native);
        CHECK_EQ(stats[i].forwarded, 0);
        counted += i == FUSE_FORGET || i == FUSE_BATCH_FORGET ? 0 : stats[i].native;
    }
    CHECK(counted >= atomic_load(&requests) + before);
    transport_end();
    volume_again();
    check_contents();
    volume_end();
    for (int i = 0; i < CLIENTS; i++)
        sem_destroy(&programs[i].answered);
    printf("%lu requests\n", atomic_load(&requests));
}
