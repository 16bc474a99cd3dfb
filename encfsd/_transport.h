/* Owns /dev/fuse under pyfuse3: passes requests to one end of a SEQPACKET socket pair, whose other end libfuse gets as
 * /dev/fd/N, and replies back; patches INIT both ways on the way. (The native fast path will answer hot requests here.) */
#ifndef ENCFSD_TRANSPORT_H
#define ENCFSD_TRANSPORT_H

#include <stdint.h>

enum {
    /* Bytes; the mount option max_read. A READ's reply is sent by libfuse, which does not try again: so it must fit into the
     * send buffer that any user may have, and into little contiguous kernel memory. */
    TRANSPORT_MAX_READ = 128 << 10,
};

struct transport;

struct transport_init {                 /* what INIT negotiated, for the log and `stats` */
    uint32_t kernel_major, kernel_minor, max_write, max_readahead;
    uint64_t kernel_flags, reply_flags;
};

/* Takes ownership of fuse_fd (an open, mounted /dev/fuse). Starts the two relay threads. *session_fd: the end for pyfuse3, owned
 * by the transport; pass a duplicate as /dev/fd/N, because libfuse closes what it gets. Returns 0 or -errno; on error fuse_fd is
 * closed. */
int transport_start(struct transport **t, int fuse_fd, int *session_fd);

/* eventfd that becomes readable when the kernel has ended the connection (unmounted or aborted). */
int transport_done_fd(struct transport *t);

/* Writes a notification (INVAL_INODE, INVAL_ENTRY) straight to the kernel; may block until this daemon answers WRITEs. */
int transport_fuse_fd(struct transport *t);

void transport_init_info(struct transport *t, struct transport_init *info);

/* Ends the threads and closes all descriptors. The connection must be done or is aborted by this. */
void transport_stop(struct transport *t);

#endif
