/* Messages: their memory, and the way between them and /dev/fuse. */
#include "_transport_internal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    MESSAGE_SIZE = HEADER_ROOM + BUFFER_SIZE,
    KEEP_WARM = 32,                     /* spare messages whose memory stays (1 MiB each at most); of others only the first pages */
    WARM_BYTES = 16 << 10,
    MAX_SPARES = MAX_BACKGROUND + MAX_READERS,
};

static struct message *message_map(struct transport *t)
{
    struct message *m = mmap(NULL, MESSAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (m == MAP_FAILED)
        return NULL;
    madvise(m, MESSAGE_SIZE, MADV_DONTDUMP);    /* plaintext passes through */
    m->transport = t;
    return m;
}

/* Anonymous memory that goes back to the kernel is zeroed before anybody else gets it. */
static void message_unmap(struct message *m) { munmap(m, MESSAGE_SIZE); }

struct message *message_take(struct transport *t)
{
    struct message *m;

    pthread_mutex_lock(&t->lock);
    m = t->spare;
    if (m != NULL) {
        t->spare = m->next;
        t->spares--;
    }
    pthread_mutex_unlock(&t->lock);
    return m != NULL ? m : message_map(t);
}

/* Gives memory beyond the first pages back. */
static void cool(struct message *m)
{
    if (m->warm)
        madvise((uint8_t *)m + WARM_BYTES, MESSAGE_SIZE - WARM_BYTES, MADV_DONTNEED);
    m->warm = false;
}

void messages_cool(struct transport *t)
{
    struct message *first, **last = &first;

    pthread_mutex_lock(&t->lock);
    first = t->spare;
    t->spare = NULL;
    unsigned count = t->spares;
    t->spares = 0;
    pthread_mutex_unlock(&t->lock);
    for (; *last != NULL; last = &(*last)->next)
        cool(*last);
    pthread_mutex_lock(&t->lock);
    *last = t->spare;
    t->spare = first;
    t->spares += count;
    pthread_mutex_unlock(&t->lock);
}

void message_give(struct message *m)
{
    struct transport *t = m->transport;
    unsigned spares;

    pthread_mutex_lock(&t->lock);
    spares = t->spares;
    pthread_mutex_unlock(&t->lock);
    if (spares >= MAX_SPARES) {
        message_unmap(m);
        return;
    }
    m->warm |= m->size > WARM_BYTES || m->used > WARM_BYTES;
    m->size = m->used = 0;
    if (spares >= KEEP_WARM)
        cool(m);
    pthread_mutex_lock(&t->lock);
    m->next = t->spare;
    t->spare = m;
    t->spares++;
    pthread_mutex_unlock(&t->lock);
}

void messages_free(struct transport *t)
{
    while (t->spare != NULL) {
        struct message *m = t->spare;

        t->spare = m->next;
        message_unmap(m);
    }
    t->spares = 0;
}

int message_receive(struct transport *t, struct message *m)
{
    const struct fuse_in_header *header = (void *)message_in(m);
    ssize_t size;

    do
        size = read(t->fuse_fd, message_in(m), BUFFER_SIZE);
    while (size < 0 && (errno == EINTR || errno == ENOENT));    /* ENOENT: the request was interrupted before we had it */
    if (size < 0)
        return errno == EAGAIN ? 0 : -errno;    /* ENODEV: unmounted; ECONNABORTED: aborted */
    if (size < (ssize_t)sizeof *header)
        return -EPROTO;
    m->received_ns = monotonic_ns();
    m->unique = header->unique;
    m->nodeid = header->nodeid;
    m->opcode = header->opcode;
    m->size = (size_t)size;
    m->used = 0;
    return 1;
}

int reply_write(struct transport *t, const void *reply, size_t size)
{
    while (write(t->fuse_fd, reply, size) < 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

int reply_error(struct transport *t, uint64_t unique, int error)
{
    struct fuse_out_header reply = {.len = sizeof reply, .error = error, .unique = unique};

    return reply_write(t, &reply, sizeof reply);
}
