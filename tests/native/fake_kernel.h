/* The transport with its fast path on a real volume, between a fake kernel and a fake pyfuse3. The fake kernel is a SEQPACKET socket:
 * like /dev/fuse it keeps messages whole. */
#ifndef ENCFSD_TEST_FAKE_KERNEL_H
#define ENCFSD_TEST_FAKE_KERNEL_H

#include <dirent.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "_seal.h"
#include "_transport_internal.h"
#include "check.h"
#include "volume_client.h"

enum { MIB = 1 << 20, TEN_SECONDS = 10000, SOCKET_ROOM = 8 * MIB };

/* Open descriptors of this process. */
static inline unsigned descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    unsigned n = 0;

    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

/* A reply that came before one that was waited for. */
struct early {
    struct early *next;
    size_t size;
    uint8_t bytes[];
};

struct kernel {
    struct client client;
    struct volume_options options;
    char path[64];
    struct transport *transport;
    int fd, session;                    /* the kernel's end, pyfuse3's end */
    uint32_t most;                      /* bytes that one message carries: 1 MiB, or less if an ordinary user may have only small sockets */
    uint64_t unique;                    /* of the last request */
    uint32_t uid, gid;                  /* of the next requests */
    struct early *early;
    struct { struct fuse_out_header header; uint8_t data[MIB]; } reply;     /* the last one */
};

static struct kernel kernel;

/* ---- life ---- */

static inline bool volume_begin(void)
{
    struct object_record record;
    char reason[200];

    kernel = (struct kernel){.fd = -1, .unique = 100};
    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return false;
    kernel.client.src_fd = client_directory(kernel.path);
    kernel.options = client_options(kernel.client.src_fd);
    kernel.options.io_threads = 8;
    return CHECK_EQ(volume_create(&kernel.options, 0, 0, &record), 0) && CHECK_EQ(client_open(&kernel.client, &kernel.options), 0);
}

static inline void volume_again(void)
{
    CHECK_EQ(volume_close(kernel.client.volume), 0);
    if (!CHECK_EQ(client_open(&kernel.client, &kernel.options), 0))
        abort();
}

static inline void volume_end(void)
{
    CHECK_EQ(volume_close(kernel.client.volume), 0);
    close(kernel.client.src_fd);
    client_remove(kernel.path);
}

/* The two ends of "/dev/fuse"; ours is kept. */
static inline int device_open(void)
{
    int pair[2], size = SOCKET_ROOM;
    socklen_t len = sizeof size;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        abort();
    for (int i = 0; i < 2; i++)
        if (setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) < 0)
            setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, &len);
    kernel.most = size >= 2 * MIB ? MIB : TRANSPORT_MAX_READ;
    kernel.fd = pair[0];
    return pair[1];
}

static inline void device_close(void)
{
    while (kernel.early != NULL) {
        struct early *early = kernel.early;
        kernel.early = early->next;
        free(early);
    }
    if (kernel.fd >= 0)
        close(kernel.fd);
    kernel.fd = -1;
}

static inline int transport_begin(int device, unsigned readers)
{
    struct transport_options options = {.volume = kernel.client.volume, .fast_path = true, .readers = readers};

    return transport_start(&kernel.transport, device, &options, &kernel.session);
}

static inline void transport_end(void)
{
    transport_stop(kernel.transport);
    device_close();
}

static inline bool begin(void)
{
    return volume_begin() && CHECK_EQ(transport_begin(device_open(), 0), 0);
}

static inline void end_all(void)
{
    transport_end();
    volume_end();
}

/* ---- requests and replies ---- */

static inline bool readable(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, timeout_ms) == 1;
}

/* Sends a request whose body consists of two parts; returns its number. */
static inline uint64_t ask(uint32_t opcode, uint64_t nodeid, const void *in, size_t in_size, const void *more, size_t more_size)
{
    struct fuse_in_header header = {.len = (uint32_t)(sizeof header + in_size + more_size), .opcode = opcode, .unique = kernel.unique += 2,
                                    .nodeid = nodeid, .uid = kernel.uid, .gid = kernel.gid, .pid = 1};
    struct iovec iov[3] = {{&header, sizeof header}, {(void *)(uintptr_t)in, in_size}, {(void *)(uintptr_t)more, more_size}};
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = 3};

    CHECK_EQ(sendmsg(kernel.fd, &message, MSG_NOSIGNAL), header.len);
    return kernel.unique;
}

/* Receives the next reply, whichever it is; false if none comes. */
static inline bool next_reply(int timeout_ms)
{
    struct fuse_out_header *header = &kernel.reply.header;

    if (!readable(kernel.fd, timeout_ms))
        return false;
    ssize_t size = recv(kernel.fd, &kernel.reply, sizeof kernel.reply, MSG_TRUNC);
    if (!CHECK(size >= (ssize_t)sizeof *header))
        return false;
    CHECK_EQ(header->len, size);
    CHECK(header->error <= 0 && header->error > -4096);
    CHECK(header->error == 0 || header->len == sizeof *header);
    return true;
}

static inline int64_t reply_result(void)
{
    const struct fuse_out_header *header = &kernel.reply.header;

    return header->error != 0 ? header->error : (int64_t)(header->len - sizeof *header);
}

/* Waits for the reply to one request: its error or the size of its data. */
static inline int64_t await_reply(uint64_t unique)
{
    for (struct early **at = &kernel.early; *at != NULL; at = &(*at)->next) {
        struct early *early = *at;
        if (((struct fuse_out_header *)early->bytes)->unique != unique)
            continue;
        memcpy(&kernel.reply, early->bytes, early->size);
        *at = early->next;
        free(early);
        return reply_result();
    }
    for (;;) {
        if (!CHECK(next_reply(TEN_SECONDS)))
            return INT64_MIN;
        if (kernel.reply.header.unique == unique)
            return reply_result();
        struct early *early = malloc(sizeof *early + kernel.reply.header.len);
        *early = (struct early){.next = kernel.early, .size = kernel.reply.header.len};
        memcpy(early->bytes, &kernel.reply, early->size);
        kernel.early = early;
    }
}

static inline int64_t call(uint32_t opcode, uint64_t nodeid, const void *in, size_t in_size, const void *more, size_t more_size)
{
    return await_reply(ask(opcode, nodeid, in, in_size, more, more_size));
}

#define CALL(opcode, nodeid, in) call(opcode, nodeid, &(in), sizeof(in), NULL, 0)
/* With a name after it. */
#define CALL_NAME(opcode, nodeid, in, name) call(opcode, nodeid, &(in), sizeof(in), name, strlen(name) + 1)

/* Nothing is left unread: every reply was the only one. */
static inline void check_quiet(void)
{
    struct fuse_getattr_in in = {0};

    CHECK_EQ(CALL(FUSE_GETATTR, ROOT_INO, in), sizeof(struct fuse_attr_out));
    CHECK(kernel.early == NULL);
    CHECK(!readable(kernel.fd, 0));
    CHECK(!readable(kernel.session, 0));
}

/* ---- operations that many tests need ---- */

static inline int64_t kernel_lookup(uint64_t parent, const char *name)
{
    return call(FUSE_LOOKUP, parent, name, strlen(name) + 1, NULL, 0);
}

static inline void kernel_forget(uint64_t ino, uint64_t n)
{
    struct fuse_forget_in in = {.nlookup = n};

    ask(FUSE_FORGET, ino, &in, sizeof in, NULL, 0);
}

/* Creates a regular file; its inode number, with one lookup. */
static inline uint64_t kernel_create(uint64_t parent, const char *name)
{
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = S_IFREG | 0644, .umask = 022};
    int64_t size = CALL_NAME(FUSE_CREATE, parent, in, name);

    if (!CHECK_EQ(size, sizeof(struct fuse_entry_out) + sizeof(struct fuse_open_out)))
        return 0;
    return ((struct fuse_entry_out *)kernel.reply.data)->nodeid;
}

/* The number of bytes that the reply says were written, or an error. */
static inline int64_t kernel_write(uint64_t ino, const void *data, size_t size, uint64_t offset)
{
    struct fuse_write_in in = {.size = (uint32_t)size, .offset = offset};
    int64_t result = call(FUSE_WRITE, ino, &in, sizeof in, data, size);

    if (result < 0)
        return result;
    CHECK_EQ(result, sizeof(struct fuse_write_out));
    CHECK_EQ(((struct fuse_write_out *)kernel.reply.data)->padding, 0);
    return ((struct fuse_write_out *)kernel.reply.data)->size;
}

/* Bytes read are in kernel.reply.data. */
static inline int64_t kernel_read(uint64_t ino, size_t size, uint64_t offset)
{
    struct fuse_read_in in = {.size = (uint32_t)size, .offset = offset};

    return CALL(FUSE_READ, ino, in);
}

static inline uint8_t *pattern(size_t size, unsigned seed)
{
    uint8_t *bytes = malloc(size + 1);

    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 31 + i / 251 + seed + 1);
    return bytes;
}

static inline size_t inodes_in_core(void)
{
    struct volume_stats stats;

    volume_stats(kernel.client.volume, &stats);
    return stats.inodes_in_core;
}

#endif
