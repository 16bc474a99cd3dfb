/* Worker threads. The source is included so that thread creation can be made to fail. No test sleeps: threads meet at
 * barriers and semaphores. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"

static atomic_long creations_left = -1;             /* < 0: no limit */

static bool refuse(void) { return atomic_load(&creations_left) >= 0 && atomic_fetch_sub(&creations_left, 1) <= 0; }

#define pthread_create(...) (refuse() ? EAGAIN : pthread_create(__VA_ARGS__))
#define calloc(n, size) (refuse() ? NULL : calloc(n, size))
#include "_workers.c"
#undef pthread_create
#undef calloc

/* A job that keeps a worker busy until it is let go. */
struct blocker {
    struct job job;
    sem_t running, go;
};

static void blocker_run(struct job *job)
{
    struct blocker *b = (struct blocker *)job;
    sem_post(&b->running);
    sem_wait(&b->go);
}

static void block(struct workers *w, struct blocker *b)
{
    b->job = (struct job){.run = blocker_run, .class = POOL_COMMIT};
    sem_init(&b->running, 0, 0);
    sem_init(&b->go, 0, 0);
    workers_submit(w, &b->job);
    sem_wait(&b->running);
}

/* A job that writes down when it ran. */
struct step {
    struct job job;
    atomic_int *clock;
    int ran;
};

static void step_run(struct job *job)
{
    struct step *s = (struct step *)job;
    s->ran = atomic_fetch_add(s->clock, 1);
}

TEST(jobs_run_in_order_of_class_then_submission)
{
    struct workers *w;
    struct blocker b;
    struct step s[9];
    atomic_int clock = 0;
    CHECK_EQ(workers_create(&w, 1), 0);
    block(w, &b);
    for (int i = 0; i < 9; i++) {                   /* classes 2 1 0 2 1 0 ... */
        s[i] = (struct step){{.run = step_run, .class = (enum pool_class)(2 - i % 3)}, &clock, -1};
        workers_submit(w, &s[i].job);
    }
    sem_post(&b.go);
    workers_destroy(w);                             /* drains */
    for (int i = 0; i < 9; i++)
        CHECK_EQ(s[i].ran, 3 * (2 - i % 3) + i / 3);
}

/* Jobs may resubmit or free themselves, also while the workers are being destroyed. */
struct chain {
    struct job job;
    struct workers *w;
    atomic_int *ran;
    int left;
};

static void chain_run(struct job *job)
{
    struct chain *c = (struct chain *)job;
    atomic_fetch_add(c->ran, 1);
    if (c->left-- > 0)
        workers_submit(c->w, job);
    else
        free(c);
}

TEST(destroy_waits_for_jobs_that_jobs_submit)
{
    for (unsigned threads = 1; threads <= 3; threads++) {
        struct workers *w;
        atomic_int ran = 0;
        CHECK_EQ(workers_create(&w, threads), 0);
        for (int i = 0; i < 10; i++) {
            struct chain *c = malloc(sizeof *c);
            *c = (struct chain){{.run = chain_run, .class = (enum pool_class)(i % 3)}, w, &ran, 99};
            workers_submit(w, &c->job);
        }
        workers_destroy(w);
        CHECK_EQ(atomic_load(&ran), 1000);
    }
}

enum { N = 1000 };

static void count(void *arg, size_t i) { atomic_fetch_add(&((atomic_int *)arg)[i], 1); }

static void check_all_once(const atomic_int *counts, size_t n)
{
    size_t wrong = 0;
    for (size_t i = 0; i < N; i++)
        wrong += atomic_load(&counts[i]) != (i < n);
    CHECK_EQ(wrong, 0);
}

TEST(parallel_runs_each_index_once)
{
    struct workers *w;
    CHECK_EQ(workers_create(&w, 3), 0);
    size_t sizes[] = {0, 1, 2, 3, 4, 5, N};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int with = 0; with < 2; with++) {
            atomic_int counts[N] = {0};
            workers_parallel(with ? w : NULL, count, counts, sizes[k]);
            check_all_once(counts, sizes[k]);
        }
    workers_destroy(w);
    workers_destroy(NULL);
}

TEST(parallel_needs_no_free_worker)
{
    struct workers *w;
    struct blocker b[2];
    atomic_int counts[N] = {0};
    CHECK_EQ(workers_create(&w, 2), 0);
    block(w, &b[0]);
    block(w, &b[1]);
    workers_parallel(w, count, counts, N);          /* would hang if it waited for them */
    check_all_once(counts, N);
    sem_post(&b[0].go);
    sem_post(&b[1].go);
    workers_destroy(w);
}

/* Four indices that wait for each other need four threads: the caller and three workers. */
static void meet(void *arg, size_t i)
{
    (void)i;
    pthread_barrier_wait(arg);
}

TEST(parallel_uses_idle_workers)
{
    struct workers *w;
    pthread_barrier_t barrier;
    CHECK_EQ(workers_create(&w, 3), 0);
    pthread_barrier_init(&barrier, NULL, 4);
    for (int i = 0; i < 50; i++)
        workers_parallel(w, meet, &barrier, 4);
    workers_destroy(w);
    pthread_barrier_destroy(&barrier);
}

/* Loops of several threads and of jobs at once, each on its own counters. */
struct nest {
    struct job job;
    struct workers *w;
    atomic_int counts[N];
};

static void nest_run(struct job *job)
{
    struct nest *nest = (struct nest *)job;
    for (size_t i = 0; i < N; i += 50)
        workers_parallel(nest->w, count, nest->counts + i, 50);
}

static void *nest_thread(void *arg)
{
    nest_run(arg);
    return NULL;
}

TEST(loops_inside_jobs_and_beside_each_other)
{
    for (int round = 0; round < 20; round++) {
        static struct nest nest[6];
        struct workers *w;
        pthread_t thread[3];
        CHECK_EQ(workers_create(&w, 2), 0);
        for (int i = 0; i < 6; i++) {
            memset(&nest[i], 0, sizeof nest[i]);
            nest[i].job = (struct job){.run = nest_run, .class = POOL_APPLICATION};
            nest[i].w = w;
        }
        for (int i = 0; i < 3; i++) {
            pthread_create(&thread[i], NULL, nest_thread, &nest[i]);
            workers_submit(w, &nest[3 + i].job);
        }
        for (int i = 0; i < 3; i++)
            pthread_join(thread[i], NULL);
        workers_destroy(w);
        for (int i = 0; i < 6; i++)
            check_all_once(nest[i].counts, N);
    }
}

struct look {
    struct job job;
    sigset_t mask;
    char name[16];
};

static void look_run(struct job *job)
{
    struct look *look = (struct look *)job;
    pthread_sigmask(SIG_SETMASK, NULL, &look->mask);
    pthread_getname_np(pthread_self(), look->name, sizeof look->name);
}

TEST(threads_are_named_and_take_no_signals)
{
    struct workers *w;
    struct look look = {.job = {.run = look_run, .class = POOL_BACKGROUND}};
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK_EQ(workers_create(&w, 1), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    workers_submit(w, &look.job);
    workers_destroy(w);
    CHECK(!strcmp(look.name, "encfsd-io"));
    int wanted[] = {SIGTERM, SIGINT, SIGCHLD, SIGHUP, SIGUSR1, SIGPIPE};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        CHECK_EQ(sigismember(&look.mask, wanted[i]), 1);
        CHECK_EQ(sigismember(&after, wanted[i]), sigismember(&before, wanted[i]));
    }
}

TEST(creation_fails_cleanly)
{
    struct workers *w = NULL;
    for (long n = 0; n < 4; n++) {                  /* the struct, then each of three threads */
        atomic_store(&creations_left, n);
        CHECK_EQ(workers_create(&w, 3), n ? -EAGAIN : -ENOMEM);
        CHECK(w == NULL);
    }
    atomic_store(&creations_left, -1);
    CHECK_EQ(workers_create(&w, 3), 0);
    workers_destroy(w);
}
