/* What pyfuse3 answers: requests go to it over a socket pair, replies come back and on to the kernel.
 *
 *   kernel --read--> [readers] --send--> pair --> libfuse, pyfuse3
 *                       `--> [forwarder] --send--> pair, while that is full
 *   kernel <--write-- [replies thread] <--recv-- pair <-- libfuse, pyfuse3
 *
 * The replies thread never writes anything but replies, and a reply never blocks in the kernel. With the fast path no reader waits
 * for pyfuse3, which may wait for the volume, which may wait for WRITEs. So a full socket pair cannot deadlock: pyfuse3 may wait for
 * the replies thread, and the forwarder for pyfuse3. */
#include "_transport_internal.h"

#include <errno.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum {
    SKB_OVERHEAD = 64,                  /* the kernel wants a message to be a little smaller than the send buffer */
    SOCKET_BUFFER = 8 << 20,            /* a few of the largest messages */
    RETRY_NS = 1000000,
};

/* Makes a socket's send buffer as large as we may; returns the number of data bytes that fit into one message. */
static int size_send_buffer(int fd)
{
    int size = SOCKET_BUFFER;
    socklen_t len = sizeof size;

    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) < 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, &len) < 0)
        return -errno;
    size -= HEADER_ROOM + SKB_OVERHEAD;
    if (size < TRANSPORT_MAX_READ)
        return -ENOBUFS;
    return size < MAX_DATA ? size & ~(TRANSPORT_MAX_READ - 1) : MAX_DATA;
}

int session_open(struct transport *t)
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    t->pair = pair[0];
    t->session_fd = pair[1];
    for (int i = 0; i < 2; i++) {
        int room = size_send_buffer(pair[i]);

        if (room < 0)
            return room;
        t->max_data = (uint32_t)room;
    }
    return 0;
}

enum forwarding session_forward(struct transport *t, struct message *m, bool wait)
{
    const void *request = message_in(m);

    /* A message needs contiguous kernel memory; on a fragmented machine it may take a moment. */
    while (send(t->pair, request, m->size, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)) < 0) {
        switch (errno) {
        case EINTR:
            break;
        case ENOBUFS: case ENOMEM: case EAGAIN:
            if (!wait)
                return FORWARD_WOULD_WAIT;
            nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
            break;
        case EMSGSIZE:                  /* longer than this user's socket buffer */
            reply_error(t, m->unique, -E2BIG);
            count_forwarded_reply(t, m->unique, true);
            return FORWARDED;
        default:
            return FORWARD_CLOSED;
        }
    }
    return FORWARDED;
}

void *session_replies(void *arg)
{
    struct transport *t = arg;
    uint8_t *reply = message_data(t->reply_message);

    prctl(PR_SET_NAME, "encfsd-replies");
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);       /* the kernel may need us in order to free memory; fails without privilege */
    for (;;) {
        ssize_t received = recv(t->pair, reply, BUFFER_SIZE, MSG_TRUNC);
        const struct fuse_out_header *header = (void *)reply;
        size_t size = (size_t)received;
        int result;

        if (received < 0 && errno == EINTR)
            continue;
        if (received <= 0)
            return NULL;
        if (size < sizeof *header || header->unique == 0)
            continue;                   /* a notification may block, so it must not come this way: see transport_fuse_fd */
        if (size > BUFFER_SIZE) {
            reply_error(t, header->unique, -EIO);
            continue;
        }
        if (!init_reply(t, reply, &size))
            count_forwarded_reply(t, header->unique, header->error < 0);
        result = reply_write(t, reply, size);
        /* A refused reply must not leave its request, and whoever waits for it, hanging. */
        if (result < 0 && result != -ENOENT && result != -ENODEV && result != -ECONNABORTED)
            reply_error(t, header->unique, -EIO);
    }
}
