/* What the files of the transport share. Nobody else includes this.
 *
 * _transport.c          life: threads, start and stop, the reader's loop
 * _transport_message.c  memory of messages; reading them from /dev/fuse, writing replies: all that another channel (FUSE over
 *                       io_uring) would do differently
 * _transport_native.c   requests of the kernel to requests of the volume, and answers back
 * _transport_session.c  what goes to pyfuse3 and comes back
 * _transport_init.c     INIT
 * _transport_stats.c    counters
 */
#ifndef ENCFSD_TRANSPORT_INTERNAL_H
#define ENCFSD_TRANSPORT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "_fuse_abi.h"
#include "_request.h"
#include "_transport.h"

enum {
    HEADER_ROOM = 4096,                 /* of a message beside its data: request headers, names */
    MAX_DATA = 1 << 20,                 /* largest WRITE: 256 pages */
    BUFFER_SIZE = MAX_DATA + HEADER_ROOM, /* what a read of /dev/fuse must have room for */
    MIN_MINOR = 37,                     /* Linux 6.1 */
    MAX_READERS = 32,
    MAX_BACKGROUND = 32,                /* requests that the kernel has under way on its own account: read-ahead, write-back. Each WRITE
                                           has a message: more of them than threads fill memory that has to be had from the kernel */
    IN_FLIGHT = 4096,                   /* forwarded requests whose latency is measured */
};

/* One request of the kernel on its way through, with memory of its own: a message is a mapping whose first page holds this struct and
 * ends with the headers of the request, so that the data of a WRITE begins at the second page. */
struct message {
    struct request request;             /* first: the volume gives back a pointer to it */
    struct transport *transport;
    struct message *next;               /* in the list of spare ones */
    uint64_t received_ns;               /* CLOCK_MONOTONIC */
    /* copied out of the request's header, because a reply may be written over it */
    uint64_t unique, nodeid;
    uint32_t opcode;
    bool warm;                          /* more than its first pages are in memory */
    size_t size;                        /* bytes of the request, header included */
    size_t room, used;                  /* bytes that a reply may have after its header; of a listing: has so far */
    uint32_t asked;                     /* GETXATTR, LISTXATTR: bytes that the caller has room for, 0: asks for the size */
};

enum { DATA_HEADERS = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) };
_Static_assert(sizeof(struct message) + DATA_HEADERS <= HEADER_ROOM, "a page holds both");

static inline uint8_t *message_in(struct message *m) { return (uint8_t *)m + HEADER_ROOM - DATA_HEADERS; }
/* Where the data of a WRITE lies and that of a READ goes. A reply's header comes right before its data. */
static inline uint8_t *message_data(struct message *m) { return (uint8_t *)m + HEADER_ROOM; }
/* The same for replies to requests that have a name, which must stay where it is meanwhile. */
static inline uint8_t *message_reply_data(struct message *m) { return (uint8_t *)m + 2 * HEADER_ROOM; }
enum { REPLY_ROOM = MAX_DATA - HEADER_ROOM };

struct reader {
    struct transport *transport;
    pthread_t thread;
    struct message *first;              /* what it begins with */
    bool leads;                         /* it waits for requests; its own, changed under the transport's lock */
    unsigned immediate;                 /* requests in a row that it needed not wait for */
    int spin_score;                     /* > 0: spinning has paid off lately */
};

struct transport {
    /* set once */
    struct volume *volume;
    bool fast_path;
    int fuse_fd;                        /* non-blocking */
    int pair;                           /* our end of the socket pair */
    int session_fd;                     /* pyfuse3's end */
    int done_fd, stop_fd;               /* eventfds */
    uint32_t max_data;                  /* bytes that fit into one message to pyfuse3 beside HEADER_ROOM */
    unsigned reader_count, max_awake;
    struct reader reader[MAX_READERS];
    pthread_t replies, forwarder;
    bool replies_run, forwarder_runs;
    struct message *reply_message;      /* used by the replies thread only */

    pthread_mutex_t lock;               /* guards all from here to init; a leaf */
    pthread_cond_t role_free;           /* followers wait for something to do */
    bool leader;                        /* somebody leads, or has been chosen to */
    _Atomic bool ended;                 /* the connection is done, or transport_stop was called; read without the lock, too */
    unsigned followers;                 /* waiting for role_free */
    unsigned wanted;                    /* of them, to be woken in order to help */
    unsigned awake;                     /* readers that neither follow nor wait for the disk */
    unsigned in_flight;                 /* messages that the volume has */
    struct message *spare;
    unsigned spares;
    struct message *unsent, *last_unsent;       /* for pyfuse3, whose socket was full; oldest first */
    bool sending;                       /* the forwarder has one in hand */
    pthread_cond_t unsent_there;        /* the forwarder waits for them */
    uint64_t init_unique;               /* of the INIT that waits for libfuse's answer; 0: none */
    struct transport_init init;

    /* lock-free */
    _Atomic uint64_t forwarded_unique[IN_FLIGHT], forwarded_ns[IN_FLIGHT];
    _Atomic uint32_t forwarded_opcode[IN_FLIGHT];
    struct transport_counters *counters;
};

/* ---- _transport_message.c ---- */

/* A spare message or a new one; NULL: out of memory. Any thread. */
struct message *message_take(struct transport *t);
/* Takes it back; wiped of what it held if it goes back to the system. */
void message_give(struct message *m);
/* Gives the memory of spare messages back but for their first pages: nothing has been asked for a while. */
void messages_cool(struct transport *t);
void messages_free(struct transport *t);

/* Reads one request without waiting. 1: there is one, 0: none is there, -errno: the connection has ended. */
int message_receive(struct transport *t, struct message *m);

/* Writes `size` bytes that begin with a header. Never waits. Returns 0 or -errno; -ENOENT: the kernel has given the request up. */
int reply_write(struct transport *t, const void *reply, size_t size);
/* Answers with `error` (<= 0) and no data. */
int reply_error(struct transport *t, uint64_t unique, int error);

/* ---- _transport.c ---- */

/* A parked request is answered: its message goes back. */
void message_done(struct message *m);

/* ---- _transport_native.c ---- */

enum native { NATIVE_READY, NATIVE_ANSWERED, NATIVE_FOREIGN };
/* Fills in m->request. READY: start it. ANSWERED: nothing is left to do. FOREIGN: it is for pyfuse3. */
enum native native_decode(struct message *m);
/* Replies with the result of m->request and counts it. Never waits. */
void native_reply(struct message *m);

/* ---- _transport_session.c ---- */

int session_open(struct transport *t);
enum forwarding { FORWARDED, FORWARD_WOULD_WAIT, FORWARD_CLOSED };
/* Passes a request on. `wait`: while the socket is full. CLOSED: pyfuse3's end is. */
enum forwarding session_forward(struct transport *t, struct message *m, bool wait);
void *session_replies(void *transport);

/* ---- _transport_init.c ---- */

/* Returns false if the request was answered here. */
bool init_request(struct transport *t, uint8_t *message, size_t size);
/* True if `unique` is the INIT that waits for an answer: then the reply at `message` is replaced by ours, and *size set. */
bool init_reply(struct transport *t, uint8_t *message, size_t *size);

/* ---- _transport_stats.c ---- */

int counters_create(struct transport *t);
void count_native(struct message *m, bool failed);
void count_forwarded(struct message *m);
void count_forwarded_reply(struct transport *t, uint64_t unique, bool failed);

#endif
