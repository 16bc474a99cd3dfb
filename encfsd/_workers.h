/* A fixed set of threads for work that may block: sealing in parallel, reads that miss, write-back.
 * Jobs are intrusive and owned by the submitter; they run in FIFO order per class, POOL_COMMIT class first. */
#ifndef ENCFSD_WORKERS_H
#define ENCFSD_WORKERS_H

#include <stddef.h>

#include "_pool.h"

struct workers;
struct job {
    void (*run)(struct job *job);       /* called once on a worker; may free or resubmit the job */
    struct job *next;                   /* owned by the queue while submitted */
    enum pool_class class;
};

/* threads >= 1, all signals blocked in them, named "encfsd-io". Returns 0, -ENOMEM or -EAGAIN. */
int workers_create(struct workers **w, unsigned threads);
/* Waits for all submitted jobs, then ends the threads. */
void workers_destroy(struct workers *w);
/* Never blocks, never fails. */
void workers_submit(struct workers *w, struct job *job);
/* Runs fn(arg, i) for i in 0..n-1 on the caller and on idle workers; returns when all are done. Never deadlocks when all
 * workers are busy (the caller then does everything). w may be NULL: the caller runs them all. */
void workers_parallel(struct workers *w, void (*fn)(void *arg, size_t i), void *arg, size_t n);

#endif
