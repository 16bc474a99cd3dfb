/* Two threads and two buffers between /dev/fuse and the socket pair; see _transport.h.
 *
 *   kernel --read--> [requests thread] --send--> pair --> libfuse, pyfuse3
 *   kernel <--write-- [replies thread] <--recv-- pair <-- libfuse, pyfuse3
 *
 * INIT is negotiated here, not by libfuse: libfuse is told a protocol version from before splice(2), which a socket cannot do
 * reliably, and whatever it answers is replaced by what this file system wants and the kernel offers.
 *
 * The replies thread never writes anything but replies, and a reply never blocks in the kernel. So a full socket pair cannot
 * deadlock: pyfuse3 may wait for the replies thread, the requests thread for pyfuse3, and the kernel for the requests thread. */
#include "_transport.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    HEADER_ROOM = 4096,                 /* of a message beside its data: request headers, names */
    MAX_DATA = 1 << 20,                 /* largest WRITE: 256 pages */
    BUFFER_SIZE = MAX_DATA + HEADER_ROOM,
    SKB_OVERHEAD = 64,                  /* the kernel wants a message to be a little smaller than the send buffer */
    SOCKET_BUFFER = 8 << 20,            /* a few of the largest messages */
    MIN_MINOR = 37,                     /* Linux 6.1 */
    LIBFUSE_MINOR = 13,                 /* the last one without splice(2); every message after INIT looks the same */
    MAX_BACKGROUND = 64,
    RETRY_NS = 1000000,
};

/* What the kernel is asked for, as far as it offers it. Not among them, on purpose:
 * ATOMIC_O_TRUNC (pyfuse3's open is not told; the kernel sends SETATTR instead), READDIRPLUS_AUTO (pyfuse3 has no plain READDIR),
 * AUTO_INVAL_DATA (nobody else changes files), HANDLE_KILLPRIV (the kernel clears set-id bits itself), locks (local ones do). */
static const uint64_t wanted_flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_DONT_MASK | FUSE_DO_READDIRPLUS |
                                     FUSE_ASYNC_DIO | FUSE_WRITEBACK_CACHE | FUSE_PARALLEL_DIROPS | FUSE_POSIX_ACL |
                                     FUSE_MAX_PAGES | FUSE_CACHE_SYMLINKS | FUSE_EXPLICIT_INVAL_DATA;

struct transport {
    /* set once */
    int fuse_fd;                        /* non-blocking */
    int pair;                           /* our end */
    int session_fd;                     /* pyfuse3's end */
    int done_fd, stop_fd;               /* eventfds */
    uint32_t max_data;                  /* bytes that fit into one message beside HEADER_ROOM */
    pthread_t requests, replies;
    uint8_t *request_buffer, *reply_buffer; /* BUFFER_SIZE each; used by their thread only */
    /* guarded by `lock` */
    pthread_mutex_t lock;
    uint64_t init_unique;               /* of the INIT that waits for libfuse's answer; 0: none */
    struct transport_init init;
};

static void signal_event(int fd)
{
    uint64_t one = 1;
    ssize_t ignored = write(fd, &one, sizeof one);      /* cannot fail: the counter never gets near its end */
    (void)ignored;
}

/* Returns 0 or -errno. A reply to a request that the kernel has given up meanwhile is no error. */
static int write_reply(struct transport *t, const void *reply, size_t size)
{
    while (write(t->fuse_fd, reply, size) < 0) {
        if (errno == ENOENT)
            return 0;
        if (errno != EINTR)
            return -errno;
    }
    return 0;
}

static int reply_error(struct transport *t, uint64_t unique, int error)
{
    struct fuse_out_header reply = {.len = sizeof reply, .error = error, .unique = unique};

    return write_reply(t, &reply, sizeof reply);
}

/* ---- INIT ---- */

/* Returns false if the request was answered here. */
static bool patch_init_request(struct transport *t, uint8_t *message, size_t size)
{
    struct fuse_in_header *header = (void *)message;
    struct fuse_init_in *in = (void *)(header + 1);
    bool usable;

    if (size < sizeof *header + offsetof(struct fuse_init_in, flags2)) {
        reply_error(t, header->unique, -EPROTO);
        return false;
    }
    usable = in->major == FUSE_KERNEL_VERSION && in->minor >= MIN_MINOR;
    pthread_mutex_lock(&t->lock);
    t->init = (struct transport_init){.kernel_major = in->major, .kernel_minor = in->minor,
                                      .max_readahead = in->max_readahead, .kernel_flags = in->flags};
    if (size >= sizeof *header + sizeof *in && in->flags & FUSE_INIT_EXT)
        t->init.kernel_flags |= (uint64_t)in->flags2 << 32;
    t->init_unique = usable ? header->unique : 0;
    pthread_mutex_unlock(&t->lock);
    if (!usable) {
        reply_error(t, header->unique, -EPROTO);
        return false;
    }
    in->minor = LIBFUSE_MINOR;
    return true;
}

/* Replaces libfuse's successful answer to INIT by ours; returns its size. */
static size_t patch_init_reply(struct transport *t, uint8_t *message)
{
    struct fuse_out_header *header = (void *)message;
    struct fuse_init_out *out = (void *)(header + 1);

    header->len = sizeof *header + sizeof *out;
    pthread_mutex_lock(&t->lock);
    t->init_unique = 0;
    t->init.reply_flags = t->init.kernel_flags & wanted_flags;
    t->init.max_write = t->max_data;
    if (t->init.max_readahead > MAX_DATA)
        t->init.max_readahead = MAX_DATA;
    *out = (struct fuse_init_out){
        .major = FUSE_KERNEL_VERSION,
        .minor = MIN_MINOR,
        .max_readahead = t->init.max_readahead,
        .flags = (uint32_t)t->init.reply_flags,
        .max_background = MAX_BACKGROUND,
        .congestion_threshold = MAX_BACKGROUND * 3 / 4,
        .max_write = t->max_data,
        .time_gran = 1,
        .max_pages = (uint16_t)(t->max_data / 4096),
    };
    pthread_mutex_unlock(&t->lock);
    return header->len;
}

static bool is_init_reply(struct transport *t, uint64_t unique)
{
    bool is;

    pthread_mutex_lock(&t->lock);
    is = unique != 0 && unique == t->init_unique;
    pthread_mutex_unlock(&t->lock);
    return is;
}

/* ---- kernel -> pyfuse3 ---- */

/* Returns the size of a request, or 0 when the connection has ended or transport_stop wants us to. */
static size_t read_request(struct transport *t)
{
    for (;;) {
        ssize_t size = read(t->fuse_fd, t->request_buffer, BUFFER_SIZE);

        if (size >= (ssize_t)sizeof(struct fuse_in_header))
            return (size_t)size;
        if (size >= 0)
            return 0;
        if (errno == EAGAIN) {
            struct pollfd p[2] = {{.fd = t->fuse_fd, .events = POLLIN}, {.fd = t->stop_fd, .events = POLLIN}};

            poll(p, 2, -1);
            if (p[1].revents != 0)
                return 0;
        } else if (errno != EINTR && errno != ENOENT) { /* ENOENT: the request was interrupted before we had it */
            return 0;                   /* ENODEV: unmounted; ECONNABORTED: aborted */
        }
    }
}

static bool forward(struct transport *t, size_t size)
{
    /* A message needs contiguous kernel memory; on a fragmented machine it may take a moment. */
    while (send(t->pair, t->request_buffer, size, MSG_NOSIGNAL) < 0) {
        if (errno == ENOBUFS || errno == ENOMEM)
            nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
        else if (errno != EINTR)
            return false;
    }
    return true;
}

static void *pass_requests(void *arg)
{
    struct transport *t = arg;
    size_t size;

    prctl(PR_SET_NAME, "encfsd-requests");
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);       /* the kernel may need us in order to free memory; fails without privilege */
    while ((size = read_request(t)) > 0) {
        struct fuse_in_header *header = (void *)t->request_buffer;

        if (header->opcode == FUSE_INTERRUPT) {
            /* pyfuse3 cannot interrupt a handler. The first answer that finds its request still running makes the kernel
             * stop asking. */
            reply_error(t, header->unique, -ENOSYS);
            continue;
        }
        if (header->opcode == FUSE_INIT && !patch_init_request(t, t->request_buffer, size))
            continue;
        if (!forward(t, size))
            break;
    }
    signal_event(t->done_fd);
    return NULL;
}

/* ---- pyfuse3 -> kernel ---- */

static void *pass_replies(void *arg)
{
    struct transport *t = arg;

    prctl(PR_SET_NAME, "encfsd-replies");
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    for (;;) {
        ssize_t received = recv(t->pair, t->reply_buffer, BUFFER_SIZE, MSG_TRUNC);
        struct fuse_out_header *header = (void *)t->reply_buffer;
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
        if (header->error == 0 && is_init_reply(t, header->unique))
            size = patch_init_reply(t, t->reply_buffer);
        result = write_reply(t, t->reply_buffer, size);
        /* A refused reply must not leave its request, and whoever waits for it, hanging. */
        if (result < 0 && result != -ENODEV && result != -ECONNABORTED)
            reply_error(t, header->unique, -EIO);
    }
}

/* ---- start and stop ---- */

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

static int open_pair(struct transport *t)
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

static uint8_t *allocate_buffer(void)
{
    uint8_t *buffer = mmap(NULL, BUFFER_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (buffer == MAP_FAILED)
        return NULL;
    madvise(buffer, BUFFER_SIZE, MADV_DONTDUMP);        /* plaintext passes through */
    return buffer;
}

static void free_buffer(uint8_t *buffer)
{
    if (buffer != NULL) {
        explicit_bzero(buffer, BUFFER_SIZE);
        munmap(buffer, BUFFER_SIZE);
    }
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void transport_free(struct transport *t)
{
    close_if_open(t->fuse_fd);
    close_if_open(t->pair);
    close_if_open(t->session_fd);
    close_if_open(t->done_fd);
    close_if_open(t->stop_fd);
    free_buffer(t->request_buffer);
    free_buffer(t->reply_buffer);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static int open_everything(struct transport *t)
{
    int flags = fcntl(t->fuse_fd, F_GETFL);
    int result;

    if (flags < 0 || fcntl(t->fuse_fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return -errno;
    result = open_pair(t);
    if (result < 0)
        return result;
    t->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->done_fd < 0 || t->stop_fd < 0)
        return -errno;
    t->request_buffer = allocate_buffer();
    t->reply_buffer = allocate_buffer();
    return t->request_buffer != NULL && t->reply_buffer != NULL ? 0 : -ENOMEM;
}

/* Signals are the event loop's: the threads block them all. */
static int start_threads(struct transport *t)
{
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    error = pthread_create(&t->replies, NULL, pass_replies, t);
    if (error == 0) {
        error = pthread_create(&t->requests, NULL, pass_requests, t);
        if (error != 0) {
            shutdown(t->pair, SHUT_RDWR);
            pthread_join(t->replies, NULL);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

int transport_start(struct transport **transport, int fuse_fd, int *session_fd)
{
    struct transport *t = calloc(1, sizeof *t);
    int result;

    if (t == NULL) {
        close(fuse_fd);
        return -ENOMEM;
    }
    t->fuse_fd = fuse_fd;
    t->pair = t->session_fd = t->done_fd = t->stop_fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    result = open_everything(t);
    if (result == 0)
        result = start_threads(t);
    if (result < 0) {
        transport_free(t);
        return result;
    }
    *session_fd = t->session_fd;
    *transport = t;
    return 0;
}

int transport_done_fd(struct transport *t)
{
    return t->done_fd;
}

int transport_fuse_fd(struct transport *t)
{
    return t->fuse_fd;
}

void transport_init_info(struct transport *t, struct transport_init *init)
{
    pthread_mutex_lock(&t->lock);
    *init = t->init;
    pthread_mutex_unlock(&t->lock);
}

void transport_stop(struct transport *t)
{
    signal_event(t->stop_fd);
    shutdown(t->pair, SHUT_RDWR);       /* wakes a thread that sends or receives */
    pthread_join(t->requests, NULL);
    pthread_join(t->replies, NULL);
    transport_free(t);                  /* closing /dev/fuse aborts a connection that is still there */
}
