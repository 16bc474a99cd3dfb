/* Who waits for what: lists of dirty and published inodes, fsync, solo commits, the group thread. One group is _groups_run.c. */
#include "_groups_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* ---- small helpers ---- */

void groups_set_failed(struct groups *g, int error, const char *what)
{
    bool first;

    pthread_mutex_lock(&g->mutex);
    first = g->failed == 0;
    if (first)
        g->failed = error;
    g->stats.failures++;
    pthread_mutex_unlock(&g->mutex);
    if (first)
        volume_log(g->v, VOLUME_ERROR, "%s failed: %s; the volume is read-only from now on, mount it again after mending the cause",
                   what, strerror(-error));
}

int groups_failed(struct groups *g)
{
    int failed;

    pthread_mutex_lock(&g->mutex);
    failed = g->failed;
    pthread_mutex_unlock(&g->mutex);
    return failed;
}

bool groups_is_deleted(struct inode *inode)
{
    bool deleted;

    pthread_mutex_lock(&inode->lock);
    deleted = inode->deleted;
    pthread_mutex_unlock(&inode->lock);
    return deleted;
}

/* Group mutex held. */
void groups_list_dirty(struct groups *g, struct inode *inode)
{
    if (inode->on_dirty_list)
        return;
    inode->on_dirty_list = true;
    inode->dirty_prev = NULL;
    inode->dirty_next = g->dirty;
    if (g->dirty)
        g->dirty->dirty_prev = inode;
    g->dirty = inode;
}

void groups_unlist_dirty(struct groups *g, struct inode *inode)
{
    if (inode->dirty_prev)
        inode->dirty_prev->dirty_next = inode->dirty_next;
    else
        g->dirty = inode->dirty_next;
    if (inode->dirty_next)
        inode->dirty_next->dirty_prev = inode->dirty_prev;
    inode->on_dirty_list = false;
}

void groups_dirtied(struct groups *g, struct inode *inode)
{
    bool reference;

    pthread_mutex_lock(&g->mutex);
    reference = !inode->on_dirty_list;
    groups_list_dirty(g, inode);
    if (reference)
        inode_hold(g->v->inodes, inode);
    pthread_mutex_unlock(&g->mutex);
}

bool groups_idle(struct groups *g, struct inode *inode)
{
    bool idle;

    pthread_mutex_lock(&g->mutex);
    idle = !inode->on_dirty_list && !inode->in_group && !inode->commit_in_flight && !inode->active;
    pthread_mutex_unlock(&g->mutex);
    return idle;
}

/* ---- events of the namespace ---- */

static void on_published(void *arg, struct inode *inode)
{
    struct groups *g = arg;

    pthread_mutex_lock(&g->mutex);
    if (!inode->publish) {
        if (g->published_count == g->published_capacity) {
            size_t capacity = g->published_capacity ? 2 * g->published_capacity : 64;
            struct inode **list = realloc(g->published, capacity * sizeof *list);
            if (list) {
                g->published = list;
                g->published_capacity = capacity;
            }
        }
        if (g->published_count < g->published_capacity) {
            inode->publish = true;
            g->published[g->published_count++] = inode;
            inode_hold(g->v->inodes, inode);
        } else {
            g->hurry = true;            /* no memory for the list: a full group covers it */
        }
    }
    pthread_mutex_unlock(&g->mutex);
}

static void on_dirtied(void *arg, struct inode *inode) { groups_dirtied(arg, inode); }

static void on_dropped(void *arg, const uint8_t id[ID_SIZE])
{
    struct groups *g = arg;
    struct dropped *d = malloc(sizeof *d);

    if (!d)
        return;                         /* the note in the database stays: the next mount removes the file */
    memcpy(d->id, id, ID_SIZE);
    d->mark = UINT64_MAX;               /* known when the next group freezes object 0 */
    pthread_mutex_lock(&g->mutex);
    d->next = g->dropped;
    g->dropped = d;
    pthread_mutex_unlock(&g->mutex);
}

struct ns_events groups_ns_events(struct groups *g)
{
    return (struct ns_events){on_published, on_dirtied, on_dropped, g};
}

static struct timespec time_after(unsigned ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

static bool is_past(const struct timespec *t)
{
    struct timespec now = time_after(0);

    return now.tv_sec > t->tv_sec || (now.tv_sec == t->tv_sec && now.tv_nsec >= t->tv_nsec);
}

static void *group_thread(void *arg)
{
    struct groups *g = arg;
    struct timespec next_full = time_after(g->interval_ms);     /* forced groups, however many, do not put it off */

    prctl(PR_SET_NAME, "encfsd-group");
    pthread_mutex_lock(&g->mutex);
    while (!g->stopping) {
        struct waiter *waiters;
        bool full = false;

        while (!g->stopping && !g->waiters && !g->hurry && !full)
            full = pthread_cond_timedwait(&g->wake, &g->mutex, &next_full) == ETIMEDOUT;
        if (g->stopping)
            break;
        full |= g->hurry || is_past(&next_full);
        g->hurry = false;
        waiters = g->waiters;
        g->waiters = NULL;
        for (struct waiter *w = waiters; w; w = w->next)
            full |= w->everything;
        g->full_begun += full;
        pthread_mutex_unlock(&g->mutex);
        groups_run(g, waiters, full, false);
        if (full)
            next_full = time_after(g->interval_ms);
        pthread_mutex_lock(&g->mutex);
        g->full_ended = g->full_begun;
        pthread_cond_broadcast(&g->progress);
    }
    pthread_mutex_unlock(&g->mutex);
    return NULL;
}

/* ---- callers ---- */

static int wait_for_group(struct groups *g, struct inode *inode, bool everything, bool enter_active)
{
    struct waiter w = {.inode = inode, .everything = everything, .enter_active = enter_active};

    pthread_mutex_lock(&g->mutex);
    if (g->stopping) {
        pthread_mutex_unlock(&g->mutex);
        return -ESHUTDOWN;
    }
    w.next = g->waiters;
    g->waiters = &w;
    pthread_cond_signal(&g->wake);
    while (!w.done)
        pthread_cond_wait(&g->progress, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
    return w.result;
}

int groups_sync_metadata(struct groups *g) { return wait_for_group(g, NULL, false, false); }

int groups_fsyncdir(struct groups *g, uint64_t ino)
{
    struct inode *inode;
    int rc = ns_get_inode(g->v->ns, ino, &inode, 0);

    if (rc)
        return rc;
    rc = wait_for_group(g, inode, false, false);
    ns_put_inode(g->v->ns, inode);
    return rc;
}

int groups_sync_all(struct groups *g) { return wait_for_group(g, NULL, true, false); }

void groups_reclaim_space(struct groups *g)
{
    uint64_t next;

    pthread_mutex_lock(&g->mutex);
    next = g->full_begun + 1;           /* one that runs already may have looked at the dirty list before us */
    g->hurry = true;
    pthread_cond_signal(&g->wake);
    while (g->full_ended < next && !g->waiting_for_kernel && !g->failed && !g->stopping)
        pthread_cond_wait(&g->progress, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

void groups_hurry(struct groups *g)
{
    pthread_mutex_lock(&g->mutex);
    g->hurry = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->mutex);
}

/* A commit of an object in the durable active set: one barrier, no group. -EAGAIN: it is not (any more) in that set. */
static int solo_commit(struct groups *g, struct inode *inode, struct object *o)
{
    struct object_record record;
    int rc;

    pthread_mutex_lock(&g->mutex);
    while (inode->commit_in_flight)
        pthread_cond_wait(&g->progress, &g->mutex);
    if (!inode->active || inode->work->active_mark > g->stats.durable_mark) {
        pthread_mutex_unlock(&g->mutex);
        return -EAGAIN;
    }
    inode->commit_in_flight = true;
    inode->work->solo_since_group++;
    g->stats.solo_commits++;
    pthread_mutex_unlock(&g->mutex);

    rc = groups_begin_commit(inode, o);
    if (rc == 0) {
        bool barrier_failed = false;
        rc = object_commit_write(o, true);
        if (!rc) {
            rc = object_barrier(o);
            barrier_failed = rc != 0;
        }
        rc = object_commit_end(o, rc, barrier_failed, &record);
        if (!rc)
            object_release(o, &record);
    }
    groups_disown_commit(g, inode, rc);
    return rc == 1 ? 0 : rc;
}

/* An inode that was loaded from its row does not say which transaction wrote that: it may be the last one so far. */
static void learn_mark(struct volume *v, struct inode *inode)
{
    bool known;

    pthread_mutex_lock(&inode->lock);
    known = inode->meta_mark != 0;
    pthread_mutex_unlock(&inode->lock);
    if (known)
        return;
    ns_lock(v->ns, 0);
    pthread_mutex_lock(&inode->lock);
    if (inode->meta_mark == 0)
        inode->meta_mark = ns_mark(v->ns);
    pthread_mutex_unlock(&inode->lock);
    ns_unlock(v->ns);
}

/* Nothing that an fsync of this kind asks for waits for a commit to begin. Inode lock held. */
static bool is_clean(const struct inode *inode, bool datasync)
{
    if (inode->deleted)                 /* nothing can find it after a crash */
        return true;
    if (inode->content_dirty || (inode->object && (!inode->has_record || object_is_dirty(inode->object))))
        return false;
    return datasync || !inode->attr_dirty;
}

int groups_fsync(struct groups *g, uint64_t ino, bool datasync)
{
    struct volume *v = g->v;
    struct inode *inode;
    struct object *o = NULL;
    bool established, again, clean, running;
    int rc = ns_get_inode(v->ns, ino, &inode, 0), lost = 0;

    if (rc)
        return rc;
    learn_mark(v, inode);
    do {
        pthread_mutex_lock(&inode->lock);
        if (inode->object && !o) {
            o = inode->object;
            inode->work->object_users++;
        }
        again = inode->has_record;
        clean = is_clean(inode, datasync);
        lost = inode_lost(inode);
        pthread_mutex_lock(&g->mutex);
        established = inode->meta_mark <= g->stats.durable_mark;
        running = inode->commit_in_flight || inode->in_group;
        pthread_mutex_unlock(&inode->lock);
        rc = g->failed ? -EIO : 0;
        /* What a running commit froze is not dirty any more and not durable yet; and it is dirty again if that fails. */
        running &= !rc && clean && established;
        if (running)
            pthread_cond_wait(&g->progress, &g->mutex);
        pthread_mutex_unlock(&g->mutex);
    } while (running);
    if (!rc && !(clean && established)) {
        rc = o && established && again ? solo_commit(g, inode, o) : -EAGAIN;
        if (rc == -EAGAIN)
            rc = wait_for_group(g, inode, false, o && again);
    }
    if (o) {
        pthread_mutex_lock(&inode->lock);
        inode->work->object_users--;
        pthread_mutex_unlock(&inode->lock);
    }
    ns_put_inode(v->ns, inode);
    return rc ? rc : lost;
}

/* ---- life ---- */

int groups_create(struct groups **out, struct volume *v, unsigned interval_ms)
{
    struct groups *g = calloc(1, sizeof *g);
    pthread_condattr_t monotonic;

    if (!g)
        return -ENOMEM;
    g->v = v;
    g->interval_ms = interval_ms;
    pthread_mutex_init(&g->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->wake, &monotonic);
    pthread_cond_init(&g->progress, NULL);
    pthread_condattr_destroy(&monotonic);
    *out = g;
    return 0;
}

int groups_start(struct groups *g)
{
    int rc = -pthread_create(&g->thread, NULL, group_thread, g);

    g->started = rc == 0;
    return rc;
}

int groups_run_once(struct groups *g)
{
    groups_run(g, NULL, true, false);
    return g->failed ? g->failed : g->last_result;
}

int groups_stop(struct groups *g)
{
    struct waiter *late;

    pthread_mutex_lock(&g->mutex);
    g->stopping = true;
    pthread_cond_signal(&g->wake);
    pthread_cond_broadcast(&g->progress);
    pthread_mutex_unlock(&g->mutex);
    if (g->started)
        pthread_join(g->thread, NULL);
    pthread_mutex_lock(&g->mutex);
    late = g->waiters;
    g->waiters = NULL;
    pthread_mutex_unlock(&g->mutex);
    /* Twice: the first full group leaves nothing dirty; the second makes "dropped" notes and the empty active set durable. */
    groups_run(g, late, true, true);
    groups_run(g, NULL, true, true);
    return g->failed ? g->failed : g->last_result;
}

void groups_destroy(struct groups *g)
{
    struct dropped *d, *next;

    if (!g)
        return;
    for (d = g->dropped; d; d = next) {
        next = d->next;
        free(d);
    }
    free(g->published);
    pthread_cond_destroy(&g->wake);
    pthread_cond_destroy(&g->progress);
    pthread_mutex_destroy(&g->mutex);
    free(g);
}

void groups_stats(struct groups *g, struct groups_stats *stats)
{
    pthread_mutex_lock(&g->mutex);
    *stats = g->stats;
    pthread_mutex_unlock(&g->mutex);
}
