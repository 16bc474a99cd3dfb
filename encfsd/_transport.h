/* Owns /dev/fuse: answers requests natively (the fast path) and passes the others to pyfuse3, which sits on one end of a SEQPACKET
 * socket pair that libfuse gets as /dev/fd/N. Negotiates INIT itself. Without the fast path everything but INIT and INTERRUPT
 * goes to pyfuse3. */
#ifndef ENCFSD_TRANSPORT_H
#define ENCFSD_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "_latency.h"

struct volume;
struct transport;

enum {
    /* Bytes; the mount option max_read without the fast path. A READ's reply is sent by libfuse then, which does not try again: so it
     * must fit into the send buffer that any user may have, and into little contiguous kernel memory. */
    TRANSPORT_MAX_READ = 128 << 10,
    /* The same with the fast path. */
    TRANSPORT_MAX_READ_NATIVE = 1 << 20,
    /* Seconds for which the kernel may keep entries and attributes. Nobody else changes the volume, so what it knows stays true; finite
     * only because there must be one. */
    TRANSPORT_CACHE_SECONDS = 3600,
    TRANSPORT_OPCODES = 64,             /* opcodes of FUSE are smaller; what is not counts as 0 */
};

struct transport_init {                 /* what INIT negotiated, for the log and `stats` */
    uint32_t kernel_major, kernel_minor, max_write, max_readahead;
    uint64_t kernel_flags, reply_flags;
};

/* One opcode. */
struct transport_opcode {
    uint64_t native, forwarded;         /* requests answered */
    uint64_t failed;                    /* of both: answered with an error */
    uint64_t total_ns;                  /* from reading a request to writing its reply */
    uint64_t latency[LATENCY_BUCKETS];
};

struct transport_options {
    struct volume *volume;              /* stays open longer than the transport; may be NULL without the fast path */
    bool fast_path;
    unsigned readers;                   /* threads that read /dev/fuse; 0: as many as suit the machine */
};

/* Takes ownership of fuse_fd (an open, mounted /dev/fuse). Starts the threads. *session_fd: the end for pyfuse3, owned by the
 * transport; pass a duplicate as /dev/fd/N, because libfuse closes what it gets. Returns 0 or -errno; on error fuse_fd is
 * closed. */
int transport_start(struct transport **t, int fuse_fd, const struct transport_options *options, int *session_fd);

/* eventfd that becomes readable when the kernel has ended the connection (unmounted or aborted). */
int transport_done_fd(struct transport *t);

/* Writes a notification (INVAL_INODE, INVAL_ENTRY) straight to the kernel; may block until this daemon answers WRITEs. */
int transport_fuse_fd(struct transport *t);

void transport_init_info(struct transport *t, struct transport_init *init);

/* Copies the counters of all opcodes, without a lock: each is right, they need not belong to the same instant. */
void transport_stats(struct transport *t, struct transport_opcode stats[TRANSPORT_OPCODES]);

/* Ends the threads, waits for requests that are being carried out, and closes all descriptors. The connection must be done or is
 * aborted by this. */
void transport_stop(struct transport *t);

#endif
