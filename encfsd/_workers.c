/* Worker threads (contract: _workers.h).
 *
 * Two kinds of work: jobs in one FIFO a class, and loops (workers_parallel) whose caller is already running them. An idle
 * worker takes the oldest job of the most urgent class; if there is none, it helps with the oldest loop. A loop lives on its
 * caller's stack and is never queued as jobs: so it needs no memory and never waits for a worker to become free. */
#include "_workers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

struct loop {
    void (*fn)(void *arg, size_t i);
    void *arg;
    size_t n;
    atomic_size_t next;                 /* first index that nobody has claimed; may run past n */
    unsigned helpers;                   /* workers inside; guarded by workers->lock */
    struct loop *later;                 /* workers->loops; guarded by workers->lock */
};

struct workers {
    pthread_mutex_t lock;               /* guards all but the set-once fields */
    pthread_cond_t work;                /* there may be something to do, or `ending` was set */
    pthread_cond_t helped;              /* a loop lost its last helper */
    struct { struct job *first, **end; } queue[POOL_CLASSES];   /* end: where the next job is linked */
    struct loop *loops;                 /* oldest first; those that may have unclaimed indices */
    unsigned idle;                      /* threads waiting for `work` */
    bool ending;

    unsigned threads;                   /* set once */
    pthread_t thread[];
};

/* Claims and runs indices until none is left. Without the lock. */
static void loop_run(struct loop *loop)
{
    size_t i;
    while ((i = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed)) < loop->n)
        loop->fn(loop->arg, i);
}

/* Takes a loop whose indices are all claimed off the list, if it is still there. Needs the lock. */
static void loop_unlink(struct workers *w, struct loop *loop)
{
    struct loop **link = &w->loops;
    while (*link && *link != loop)
        link = &(*link)->later;
    if (*link)
        *link = loop->later;
}

static struct job *next_job(struct workers *w)
{
    for (unsigned class = 0; class < POOL_CLASSES; class++) {
        struct job *job = w->queue[class].first;
        if (job) {
            w->queue[class].first = job->next;
            if (!job->next)
                w->queue[class].end = &w->queue[class].first;
            return job;
        }
    }
    return NULL;
}

static void help(struct workers *w, struct loop *loop)
{
    loop->helpers++;
    pthread_mutex_unlock(&w->lock);
    loop_run(loop);
    pthread_mutex_lock(&w->lock);
    loop_unlink(w, loop);               /* before it is looked at again by anybody who might find it with nothing to do */
    if (--loop->helpers == 0)
        pthread_cond_broadcast(&w->helped);
}

static void *worker(void *arg)
{
    struct workers *w = arg;
    struct job *job;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        if ((job = next_job(w))) {
            pthread_mutex_unlock(&w->lock);
            job->run(job);              /* the job may be gone now */
            pthread_mutex_lock(&w->lock);
        } else if (w->loops) {
            help(w, w->loops);
        } else if (w->ending) {
            break;                      /* a job that still runs elsewhere may submit more: its worker will find it */
        } else {
            w->idle++;
            pthread_cond_wait(&w->work, &w->lock);
            w->idle--;
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

int workers_create(struct workers **out, unsigned threads)
{
    struct workers *w = calloc(1, sizeof *w + threads * sizeof w->thread[0]);
    if (!w)
        return -ENOMEM;
    pthread_mutex_init(&w->lock, NULL);             /* none of the three can fail with default attributes */
    pthread_cond_init(&w->work, NULL);
    pthread_cond_init(&w->helped, NULL);
    for (unsigned class = 0; class < POOL_CLASSES; class++)
        w->queue[class].end = &w->queue[class].first;

    /* Threads inherit the mask, so that there is no moment in which one of them could take a signal. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = 0;
    for (; result == 0 && w->threads < threads; w->threads += result == 0) {
        result = pthread_create(&w->thread[w->threads], NULL, worker, w);
        if (result == 0)
            pthread_setname_np(w->thread[w->threads], "encfsd-io");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result) {
        workers_destroy(w);
        return -EAGAIN;
    }
    *out = w;
    return 0;
}

void workers_destroy(struct workers *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->ending = true;
    pthread_cond_broadcast(&w->work);
    pthread_mutex_unlock(&w->lock);
    for (unsigned i = 0; i < w->threads; i++)
        pthread_join(w->thread[i], NULL);
    pthread_cond_destroy(&w->helped);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

void workers_submit(struct workers *w, struct job *job)
{
    job->next = NULL;
    pthread_mutex_lock(&w->lock);
    *w->queue[job->class].end = job;
    w->queue[job->class].end = &job->next;
    if (w->idle)
        pthread_cond_signal(&w->work);
    pthread_mutex_unlock(&w->lock);
}

void workers_parallel(struct workers *w, void (*fn)(void *arg, size_t i), void *arg, size_t n)
{
    struct loop loop = {.fn = fn, .arg = arg, .n = n};
    if (!w || n < 2) {
        loop_run(&loop);
        return;
    }
    pthread_mutex_lock(&w->lock);
    struct loop **link = &w->loops;
    while (*link)
        link = &(*link)->later;
    *link = &loop;
    if (w->idle >= n - 1)
        for (size_t i = 0; i < n - 1; i++)
            pthread_cond_signal(&w->work);
    else if (w->idle)
        pthread_cond_broadcast(&w->work);
    pthread_mutex_unlock(&w->lock);

    loop_run(&loop);

    pthread_mutex_lock(&w->lock);
    loop_unlink(w, &loop);              /* nobody enters any more */
    while (loop.helpers)
        pthread_cond_wait(&w->helped, &w->lock);
    pthread_mutex_unlock(&w->lock);
}
