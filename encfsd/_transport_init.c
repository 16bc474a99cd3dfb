/* INIT is negotiated here, not by libfuse: libfuse is told a protocol version from before splice(2), which a socket cannot do
 * reliably, and whatever it answers is replaced by what this file system wants and the kernel offers. */
#include "_transport_internal.h"

#include <errno.h>

enum { LIBFUSE_MINOR = 13 };            /* the last one without splice(2); every message after INIT looks the same */

/* What the kernel is asked for, as far as it offers it. Not among them, on purpose:
 * ATOMIC_O_TRUNC (with unanswered opens the kernel would tell nobody of it; so it sends SETATTR), AUTO_INVAL_DATA (nobody else changes
 * files), HANDLE_KILLPRIV (the kernel clears set-id bits itself), locks (local ones do). */
static const uint64_t wanted_flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_DONT_MASK | FUSE_DO_READDIRPLUS |
                                     FUSE_ASYNC_DIO | FUSE_WRITEBACK_CACHE | FUSE_PARALLEL_DIROPS | FUSE_POSIX_ACL |
                                     FUSE_MAX_PAGES | FUSE_CACHE_SYMLINKS | FUSE_EXPLICIT_INVAL_DATA;
/* What pyfuse3 cannot do: it is not told who may keep set-id bits, and has no plain READDIR. */
static const uint64_t native_flags = FUSE_HANDLE_KILLPRIV_V2 | FUSE_READDIRPLUS_AUTO | FUSE_NO_OPEN_SUPPORT;

bool init_request(struct transport *t, uint8_t *message, size_t size)
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

bool init_reply(struct transport *t, uint8_t *message, size_t *size)
{
    struct fuse_out_header *header = (void *)message;
    struct fuse_init_out *out = (void *)(header + 1);
    bool awaited;

    pthread_mutex_lock(&t->lock);
    awaited = header->unique != 0 && header->unique == t->init_unique && header->error == 0;
    if (awaited) {
        t->init_unique = 0;
        t->init.reply_flags = t->init.kernel_flags & (wanted_flags | (t->fast_path ? native_flags : 0));
        t->init.max_write = t->fast_path ? MAX_DATA : t->max_data;
        if (t->init.max_readahead > MAX_DATA)
            t->init.max_readahead = MAX_DATA;
        *out = (struct fuse_init_out){
            .major = FUSE_KERNEL_VERSION,
            .minor = MIN_MINOR,
            .max_readahead = t->init.max_readahead,
            .flags = (uint32_t)t->init.reply_flags,
            .max_background = MAX_BACKGROUND,
            .congestion_threshold = MAX_BACKGROUND * 3 / 4,
            .max_write = t->init.max_write,
            .time_gran = 1,
            .max_pages = (uint16_t)(t->init.max_write / 4096),
        };
        *size = header->len = sizeof *header + sizeof *out;
    }
    pthread_mutex_unlock(&t->lock);
    return awaited;
}
