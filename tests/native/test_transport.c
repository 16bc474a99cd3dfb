/* The transport between a fake kernel and a fake libfuse. The fake kernel is a SEQPACKET socket: like /dev/fuse it keeps
 * messages whole. */
#include "_transport.h"

#include <errno.h>
#include <linux/fuse.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, TEN_SECONDS = 10000 };

static struct transport *transport;
static int kernel, session;             /* the ends that the tests hold */

static void start(void)
{
    int pair[2], size = 4 * MIB;

    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    for (int i = 0; i < 2; i++)
        if (setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) < 0)
            setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    kernel = pair[0];
    CHECK_EQ(transport_start(&transport, pair[1], &(struct transport_options){0}, &session), 0);
}

static void stop(void)
{
    transport_stop(transport);
    close(kernel);
}

static bool readable(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, timeout_ms) == 1;
}

/* Receives one message, or fails the test after ten seconds. */
static ssize_t receive(int fd, void *buffer, size_t size)
{
    if (!CHECK(readable(fd, TEN_SECONDS)))
        return -1;
    return recv(fd, buffer, size, MSG_TRUNC);
}

struct init_request {
    struct fuse_in_header header;
    struct fuse_init_in in;
};
struct init_reply {
    struct fuse_out_header header;
    struct fuse_init_out out;
};

static void send_init(uint32_t minor, uint32_t flags)
{
    struct init_request request = {
        .header = {.len = sizeof request, .opcode = FUSE_INIT, .unique = 2},
        .in = {.major = 7, .minor = minor, .max_readahead = 128 << 10, .flags = flags},
    };

    CHECK_EQ(send(kernel, &request, sizeof request, 0), sizeof request);
}

/* What libfuse would say to a kernel of its minor version: a short reply with flags of its own. */
static void answer_init_as_libfuse(int error)
{
    struct init_request request;
    struct init_reply reply = {
        .header = {.len = error != 0 ? 16 : 16 + 24, .error = error, .unique = 2},
        .out = {.major = 7, .minor = 38, .flags = FUSE_ATOMIC_O_TRUNC | FUSE_AUTO_INVAL_DATA, .max_write = 4096},
    };

    CHECK_EQ(receive(session, &request, sizeof request), sizeof request);
    CHECK_EQ(request.header.opcode, FUSE_INIT);
    CHECK_EQ(request.in.minor, 13);
    CHECK_EQ(send(session, &reply, reply.header.len, 0), reply.header.len);
}

TEST(init_asks_for_what_this_file_system_needs)
{
    struct init_reply reply;
    struct transport_init info;
    uint32_t expected = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_DONT_MASK | FUSE_DO_READDIRPLUS | FUSE_ASYNC_DIO |
                        FUSE_WRITEBACK_CACHE | FUSE_PARALLEL_DIROPS | FUSE_POSIX_ACL | FUSE_MAX_PAGES |
                        FUSE_CACHE_SYMLINKS | FUSE_EXPLICIT_INVAL_DATA;

    start();
    send_init(41, 0x7fffffff);
    answer_init_as_libfuse(0);
    CHECK_EQ(receive(kernel, &reply, sizeof reply), sizeof reply);
    CHECK_EQ(reply.header.len, sizeof reply);
    CHECK_EQ(reply.header.error, 0);
    CHECK_EQ(reply.header.unique, 2);
    CHECK_EQ(reply.out.major, 7);
    CHECK_EQ(reply.out.minor, 37);
    CHECK_EQ(reply.out.flags, expected);
    CHECK_EQ(reply.out.flags2, 0);
    CHECK(reply.out.max_write >= TRANSPORT_MAX_READ && reply.out.max_write <= MIB);
    CHECK_EQ(reply.out.max_pages, reply.out.max_write / 4096);
    CHECK_EQ(reply.out.max_readahead, 128 << 10);
    CHECK_EQ(reply.out.time_gran, 1);
    CHECK_EQ(reply.out.max_background, 32);
    transport_init_info(transport, &info);
    CHECK_EQ(info.kernel_minor, 41);
    CHECK_EQ(info.kernel_flags, 0x7fffffff);
    CHECK_EQ(info.reply_flags, expected);
    CHECK_EQ(info.max_write, reply.out.max_write);
    stop();
}

TEST(init_asks_for_nothing_that_the_kernel_does_not_offer)
{
    struct init_reply reply;

    start();
    send_init(37, FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_AUTO_INVAL_DATA | FUSE_ATOMIC_O_TRUNC | FUSE_READDIRPLUS_AUTO);
    answer_init_as_libfuse(0);
    CHECK_EQ(receive(kernel, &reply, sizeof reply), sizeof reply);
    CHECK_EQ(reply.out.flags, FUSE_ASYNC_READ | FUSE_MAX_PAGES);
    stop();
}

TEST(old_kernel_is_refused_and_libfuse_not_bothered)
{
    struct fuse_out_header reply;
    struct transport_init info;

    start();
    send_init(36, 0x7fffffff);
    CHECK_EQ(receive(kernel, &reply, sizeof reply), sizeof reply);
    CHECK_EQ(reply.error, -EPROTO);
    CHECK_EQ(reply.unique, 2);
    CHECK(!readable(session, 0));
    transport_init_info(transport, &info);
    CHECK_EQ(info.kernel_minor, 36);
    CHECK_EQ(info.max_write, 0);
    stop();
}

TEST(error_of_init_reaches_the_kernel)
{
    struct fuse_out_header reply;

    start();
    send_init(41, 0);
    answer_init_as_libfuse(-EPROTO);
    CHECK_EQ(receive(kernel, &reply, MIB), sizeof reply);
    CHECK_EQ(reply.error, -EPROTO);
    stop();
}

static uint8_t *pattern(size_t size, unsigned seed)
{
    uint8_t *bytes = malloc(size);

    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 31 + i / 251 + seed);
    return bytes;
}

TEST(messages_pass_unchanged_both_ways)
{
    size_t write_size = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) + MIB;
    size_t read_size = sizeof(struct fuse_out_header) + TRANSPORT_MAX_READ;
    uint8_t *request = pattern(write_size, 1), *reply = pattern(read_size, 2), *got = malloc(2 * MIB);
    struct fuse_in_header *in = (void *)request;
    struct fuse_out_header *out = (void *)reply;
    socklen_t len = sizeof(int);
    int buffer = 0;

    start();
    getsockopt(session, SOL_SOCKET, SO_SNDBUF, &buffer, &len);
    if (buffer < 2 * MIB)               /* without privilege the largest WRITE is smaller */
        write_size = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) + TRANSPORT_MAX_READ;
    in->opcode = FUSE_WRITE;
    in->len = (uint32_t)write_size;
    CHECK_EQ(send(kernel, request, write_size, 0), write_size);
    CHECK_EQ(receive(session, got, 2 * MIB), write_size);
    CHECK_MEM_EQ(got, request, write_size);
    *out = (struct fuse_out_header){.len = (uint32_t)read_size, .unique = 4};
    CHECK_EQ(send(session, reply, read_size, 0), read_size);
    CHECK_EQ(receive(kernel, got, 2 * MIB), read_size);
    CHECK_MEM_EQ(got, reply, read_size);
    stop();
    free(request);
    free(reply);
    free(got);
}

TEST(interrupt_is_answered_and_not_passed_on)
{
    struct { struct fuse_in_header header; struct fuse_interrupt_in in; } interrupt = {
        .header = {.len = sizeof interrupt, .opcode = FUSE_INTERRUPT, .unique = 7}, .in = {.unique = 6}};
    struct fuse_out_header reply;

    start();
    CHECK_EQ(send(kernel, &interrupt, sizeof interrupt, 0), sizeof interrupt);
    CHECK_EQ(receive(kernel, &reply, sizeof reply), sizeof reply);
    CHECK_EQ(reply.unique, 7);
    CHECK_EQ(reply.error, -ENOSYS);
    CHECK(!readable(session, 0));
    stop();
}

TEST(notifications_do_not_pass_through_the_pair)
{
    struct fuse_out_header notification = {.len = sizeof notification, .error = FUSE_NOTIFY_INVAL_INODE};
    struct fuse_out_header reply = {.len = sizeof reply, .unique = 8}, got;

    start();
    CHECK_EQ(send(session, &notification, sizeof notification, 0), sizeof notification);
    CHECK_EQ(send(session, &reply, sizeof reply, 0), sizeof reply);
    CHECK_EQ(receive(kernel, &got, sizeof got), sizeof got);
    CHECK_EQ(got.unique, 8);
    stop();
}

TEST(reply_that_the_kernel_refuses_becomes_eio)
{
    size_t size = sizeof(struct fuse_out_header) + TRANSPORT_MAX_READ;
    struct fuse_out_header *reply = calloc(1, size), got;
    int small = 4096;

    start();
    setsockopt(transport_fuse_fd(transport), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);     /* now write() fails: EMSGSIZE */
    *reply = (struct fuse_out_header){.len = (uint32_t)size, .unique = 10};
    CHECK_EQ(send(session, reply, size, 0), size);
    CHECK_EQ(receive(kernel, &got, sizeof got), sizeof got);
    CHECK_EQ(got.unique, 10);
    CHECK_EQ(got.error, -EIO);
    stop();
    free(reply);
}

TEST(done_when_the_kernel_ends_the_connection)
{
    start();
    CHECK(!readable(transport_done_fd(transport), 0));
    close(kernel);
    CHECK(readable(transport_done_fd(transport), TEN_SECONDS));
    transport_stop(transport);
}

TEST(stop_closes_the_device_of_a_live_connection)
{
    char byte;

    start();
    transport_stop(transport);
    CHECK_EQ(recv(kernel, &byte, 1, 0), 0);
    close(kernel);
}

/* Nobody reads the pair, so in the end the requests thread waits in send(). */
TEST(stop_while_pyfuse3_does_not_read)
{
    size_t size = 128 << 10;
    uint8_t *request = calloc(1, size);
    struct pollfd p = {.events = POLLOUT};

    start();
    p.fd = kernel;
    while (poll(&p, 1, 200) == 1)
        if (!CHECK_EQ(send(kernel, request, size, 0), size))
            break;
    transport_stop(transport);
    close(kernel);
    free(request);
}

TEST(start_closes_the_descriptor_when_it_fails)
{
    struct transport *t = NULL;
    int fd;

    CHECK_EQ(transport_start(&t, -1, &(struct transport_options){0}, &fd), -EBADF);
    CHECK(t == NULL);
}
