/* Space in the backing store: promised before a WRITE is acknowledged, and a ballast file so that metadata can always be committed
 * once more (deleting files must work on a full store). Reasons: docs/decisions/0009-space-reservation.md. */
#include "_volume_internal.h"

#include "_groups.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    BALLAST_BYTES = 4 << 20,            /* more than one worst-case commit of object 0 */
    MARGIN_BYTES = 16 << 20,            /* below this each promise looks at the store again */
    EXTRA_SHARE = 8,                    /* data / 8 covers slack that is written with zeros (1/16) and tree nodes (1/73, twice in a commit) */
    OPERATION_BYTES = 4 * NODE_SIZE,    /* of object 0 that one operation dirties as a rule: a row, an entry, their tree nodes */
    IN_ROW_BYTES = 2 * NODE_SIZE,       /* that a row with contents needs: a page and a tree node */
};

static const char BALLAST[] = "ballast";

/* Bytes that commits may need for what is only in memory. Too large a figure costs a group that would not have been needed, too small a
 * one costs the volume. */
static uint64_t owed(struct volume *v)
{
    uint64_t dirty = atomic_load(&v->env.dirty_nodes) * NODE_SIZE;

    return dirty + dirty / EXTRA_SHARE + atomic_load(&v->space.metadata);
}

/* Bytes that may be promised: what the store has, less what is owed, less what commits may use when there is no ballast. Mutex held. */
static int look(struct volume *v)
{
    uint64_t available, total, kept = owed(v) + (v->space.ballast ? 0 : BALLAST_BYTES);
    int rc = blockdir_space(v->dir, &available, &total);

    if (rc)
        return rc;
    v->space.available = available > kept ? available - kept : 0;
    v->space.promised = 0;
    return 0;
}

static int promise(struct volume *v, uint64_t bytes)
{
    struct space *s = &v->space;
    uint64_t need = bytes + bytes / EXTRA_SHARE + 2 * NODE_SIZE;
    int rc = 0;

    pthread_mutex_lock(&s->mutex);
    if (s->promised + need + MARGIN_BYTES > s->available)
        rc = look(v);
    if (!rc && s->promised + need > s->available)
        rc = -ENOSPC;
    if (!rc)
        s->promised += need;
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

int space_reserve(struct volume *v, uint64_t bytes, bool nowait)
{
    int rc = promise(v, bytes);

    if (rc != -ENOSPC)
        return rc;
    if (nowait)
        return -EAGAIN;
    groups_reclaim_space(v->groups);
    return promise(v, bytes);
}

int space_available(struct volume *v, uint64_t *available, bool nowait)
{
    if (!nowait)
        pthread_mutex_lock(&v->space.mutex);
    else if (pthread_mutex_trylock(&v->space.mutex))
        return -EAGAIN;
    *available = look(v) ? 0 : v->space.available;
    pthread_mutex_unlock(&v->space.mutex);
    return 0;
}

static int promise_metadata(struct volume *v, uint64_t bytes)
{
    int rc = space_restore_ballast(v);

    return rc ? rc : promise(v, bytes);
}

int space_for_metadata(struct volume *v, uint64_t bytes, bool nowait)
{
    struct space *s = &v->space;
    bool ballast;
    int rc;

    bytes += OPERATION_BYTES;
    pthread_mutex_lock(&s->mutex);
    ballast = s->ballast;
    pthread_mutex_unlock(&s->mutex);
    rc = ballast || !nowait ? promise_metadata(v, bytes) : -EAGAIN;
    if (rc == -ENOSPC) {
        if (nowait)
            return -EAGAIN;
        groups_reclaim_space(v->groups);
        rc = promise_metadata(v, bytes);
    }
    if (!rc)
        atomic_fetch_add(&s->metadata, bytes);
    return rc;
}

void space_owe_row(struct volume *v)
{
    atomic_fetch_add(&v->space.metadata, IN_ROW_BYTES);
}

int space_for_removal(struct volume *v, bool nowait)
{
    struct space *s = &v->space;
    bool tight = false;

    if (atomic_load(&s->metadata) > BALLAST_BYTES / 2) {
        pthread_mutex_lock(&s->mutex);
        if (s->promised + MARGIN_BYTES > s->available)
            look(v);
        tight = s->available < MARGIN_BYTES;
        pthread_mutex_unlock(&s->mutex);
    }
    if (tight && nowait)
        return -EAGAIN;
    if (tight)
        groups_reclaim_space(v->groups);
    atomic_fetch_add(&s->metadata, OPERATION_BYTES);
    return 0;
}

/* Writes every block: a file that is only allocated would need journal space when it is most scarce. */
static int fill(int fd)
{
    static const char zeros[64 << 10];

    for (off_t at = 0; at < BALLAST_BYTES; ) {
        ssize_t n = pwrite(fd, zeros, sizeof zeros, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        at += n;
    }
    return fsync(fd) ? -errno : 0;
}

/* Opens the ballast of an earlier mount, or a new one if there is room for it. *whole: nothing is left to do. */
static int open_ballast(struct volume *v, bool *whole)
{
    const int flags = O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int dir = blockdir_fd(v->dir), fd = openat(dir, BALLAST, flags), rc;
    struct stat st;

    *whole = false;
    if (fd < 0 && errno != ENOENT && errno != ELOOP && errno != ENXIO && errno != EISDIR)
        return -errno;
    if (fd < 0 ? errno != ENOENT : fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_nlink != 1) {
        /* Planted by somebody else: never written to. It holds no information, so it goes and is made anew. */
        if (fd >= 0)
            close(fd);
        fd = -1;
        if (unlinkat(dir, BALLAST, 0))
            return -errno;
    }
    *whole = fd >= 0 && st.st_size >= BALLAST_BYTES && st.st_blocks * 512 >= BALLAST_BYTES;
    if (*whole)
        return fd;
    rc = look(v);
    if (!rc && v->space.available < BALLAST_BYTES)
        rc = -ENOSPC;                   /* beside its own bytes: do not try again and again to fill a store that is full */
    if (!rc && fd < 0) {
        fd = openat(dir, BALLAST, flags | O_CREAT | O_EXCL, 0600);
        rc = fd < 0 ? -errno : 0;
    }
    if (rc && fd >= 0)
        close(fd);
    return rc ? rc : fd;
}

int space_restore_ballast(struct volume *v)
{
    struct space *s = &v->space;
    bool whole;
    int fd, rc = 0;

    pthread_mutex_lock(&s->mutex);
    if (!s->ballast) {
        fd = open_ballast(v, &whole);
        rc = fd < 0 ? fd : whole ? 0 : fill(fd);
        if (fd >= 0) {
            close(fd);
            if (rc)                     /* a partial ballast would only take away what others need */
                unlinkat(blockdir_fd(v->dir), BALLAST, 0);
        }
        s->ballast = rc == 0;
    }
    pthread_mutex_unlock(&s->mutex);
    return rc;
}

bool space_spend_ballast(struct volume *v)
{
    struct space *s = &v->space;
    bool had;

    pthread_mutex_lock(&s->mutex);
    had = s->ballast;
    if (had)
        unlinkat(blockdir_fd(v->dir), BALLAST, 0);
    s->ballast = false;
    pthread_mutex_unlock(&s->mutex);
    return had;
}
