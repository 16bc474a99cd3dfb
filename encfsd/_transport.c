/* Readers of /dev/fuse; see _transport.h.
 *
 * One reader *leads*: it alone waits for requests, so that a request wakes one thread and none is woken in vain. It answers what needs
 * no waiting itself and goes on leading; for the next request it first spins a little, because a wake-up across CPUs costs several
 * times what the answer does. What may take long it does not do while it leads:
 *
 *   waits for the disk only    another reader is made leader, this one carries the request out
 *   waits for more             the volume parks the request; whichever thread of the volume carries it out writes the reply
 *   pyfuse3 has to answer      it is passed on; while the socket is full, by a thread that may wait for that
 *
 * When requests come faster than the leader answers them, others are woken to help, and read as long as there is something to
 * read. */
#include "_transport_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    DEFAULT_READERS = 8,                /* cold random reads gain up to there */
    MAX_AWAKE = 4,                      /* readers that work at a time without waiting for the disk; no more than there are CPUs */
    BACKLOG = 4,                        /* requests in a row without waiting: then a helper is worth a wake-up */
    LONG_DATA = 64 << 10,               /* bytes */
    SPIN_NS = 50000,
    IDLE_MS = 1000,                     /* without a request; then buffers go back to the kernel */
    SPIN_SCORE_MAX = 8, SPIN_SCORE_MIN = -64,
    DRAIN_POLL_NS = 5000000,
};

static void signal_event(int fd)
{
    uint64_t one = 1;
    ssize_t ignored = write(fd, &one, sizeof one);      /* cannot fail: the counter never gets near its end */
    (void)ignored;
}

/* ---- roles ---- */

/* Waits until there is something for this reader to do. False: the end. */
static bool follow(struct reader *r)
{
    struct transport *t = r->transport;
    bool go;

    pthread_mutex_lock(&t->lock);
    t->awake--;
    t->followers++;
    while (!t->ended && t->leader && t->wanted == 0)
        pthread_cond_wait(&t->role_free, &t->lock);
    t->followers--;
    t->awake++;
    go = !t->ended;
    if (go && !t->leader)
        t->leader = r->leads = true;
    else if (go)
        t->wanted--;
    pthread_mutex_unlock(&t->lock);
    return go;
}

/* This reader will be away, waiting for the disk. False: it leads and nobody is there to take over, so it must not. */
static bool go_away(struct reader *r)
{
    struct transport *t = r->transport;
    bool may;

    pthread_mutex_lock(&t->lock);
    may = !r->leads || t->followers > 0;
    if (may && r->leads) {
        t->leader = r->leads = false;
        pthread_cond_signal(&t->role_free);
    }
    if (may)
        t->awake--;
    pthread_mutex_unlock(&t->lock);
    return may;
}

static void come_back(struct reader *r)
{
    pthread_mutex_lock(&r->transport->lock);
    r->transport->awake++;
    pthread_mutex_unlock(&r->transport->lock);
}

static void call_helper(struct transport *t)
{
    pthread_mutex_lock(&t->lock);
    if (t->followers > t->wanted && t->awake + t->wanted < t->max_awake) {
        t->wanted++;
        pthread_cond_signal(&t->role_free);
    }
    pthread_mutex_unlock(&t->lock);
}

/* The connection is done: everybody goes. */
static void end(struct transport *t)
{
    pthread_mutex_lock(&t->lock);
    t->ended = true;
    pthread_cond_broadcast(&t->role_free);
    pthread_cond_broadcast(&t->unsent_there);
    pthread_mutex_unlock(&t->lock);
    signal_event(t->done_fd);
}

/* ---- waiting for requests ---- */

/* Reads without sleeping for a while, if that has been worth it lately. Yields, so that on a single CPU the program that would send
 * the next request can run. 1: a request is there, 0: none came, -errno. */
static int spin(struct reader *r, struct message *m)
{
    uint64_t until;
    int got = 0;

    if (r->spin_score <= 0) {           /* after a while it gets another try */
        r->spin_score = r->spin_score == SPIN_SCORE_MIN ? 1 : r->spin_score - 1;
        return 0;
    }
    until = monotonic_ns() + SPIN_NS;
    do {
        sched_yield();
        got = message_receive(r->transport, m);
    } while (got == 0 && monotonic_ns() < until);
    if (got > 0 && r->spin_score < SPIN_SCORE_MAX)
        r->spin_score++;
    else if (got == 0)
        r->spin_score /= 2;
    return got;
}

/* For the leader. 1: a request was read, -errno: the end. */
static int wait_for_request(struct reader *r, struct message *m)
{
    struct transport *t = r->transport;
    int got = spin(r, m);

    while (got == 0) {
        struct pollfd p[2] = {{.fd = t->fuse_fd, .events = POLLIN}, {.fd = t->stop_fd, .events = POLLIN}};

        if (poll(p, 2, IDLE_MS) == 0) {
            messages_cool(t);
            poll(p, 2, -1);
        }
        if (p[1].revents != 0)
            return -ECANCELED;
        got = message_receive(t, m);
    }
    return got;
}

/* Reads the next request. A reader without a role reads as long as there is something to read. False: the end. */
static bool next_request(struct reader *r, struct message *m)
{
    int got = 0;

    if (atomic_load_explicit(&r->transport->ended, memory_order_relaxed))
        return false;                   /* else requests that keep coming would keep it from looking */
    while (got == 0) {
        got = message_receive(r->transport, m);
        if (got > 0 && r->leads && ++r->immediate >= BACKLOG)
            call_helper(r->transport);
        if (got == 0 && r->leads) {
            r->immediate = 0;
            got = wait_for_request(r, m);
        } else if (got == 0 && !follow(r)) {
            return false;
        }
    }
    if (got < 0)
        end(r->transport);
    return got > 0;
}

/* ---- carrying out ---- */

static void note_in_flight(struct transport *t, int change)
{
    pthread_mutex_lock(&t->lock);
    t->in_flight += (unsigned)change;
    pthread_mutex_unlock(&t->lock);
}

void message_done(struct message *m)
{
    struct transport *t = m->transport;

    message_give(m);
    note_in_flight(t, -1);
}

/* Sealing or opening that much takes longer than waking somebody; and a large WRITE that may wait for the disk is sealed from the
 * message, without a copy in the pool. */
static bool is_long(const struct message *m)
{
    return m->request.size >= LONG_DATA && (m->opcode == FUSE_WRITE || (m->opcode == FUSE_READ && m->transport->max_awake > 1));
}

/* Returns the message that the reader goes on with: never NULL. */
static struct message *carry_out(struct reader *r, struct message *m)
{
    struct transport *t = r->transport;
    struct message *next;

    if (!is_long(m) && request_try(t->volume, &m->request)) {
        native_reply(m);
        return m;
    }
    if (request_may_wait_for_disk(&m->request) && go_away(r)) {
        bool done = request_try_disk(t->volume, &m->request);

        if (done)
            native_reply(m);
        come_back(r);
        if (done)
            return m;
    }
    next = message_take(t);
    if (next == NULL) {                 /* better slow than not at all */
        bool away = go_away(r);

        request_carry_out(t->volume, &m->request);
        native_reply(m);
        if (away)
            come_back(r);
        return m;
    }
    note_in_flight(t, 1);
    request_park(t->volume, &m->request);
    return next;
}

/* ---- passing on ---- */

static bool any_unsent(struct transport *t)
{
    pthread_mutex_lock(&t->lock);
    bool any = t->sending || t->unsent != NULL;
    pthread_mutex_unlock(&t->lock);
    return any;
}

static void leave_unsent(struct transport *t, struct message *m)
{
    m->next = NULL;
    pthread_mutex_lock(&t->lock);
    if (t->unsent == NULL)
        t->unsent = m;
    else
        t->last_unsent->next = m;
    t->last_unsent = m;
    pthread_cond_signal(&t->unsent_there);
    pthread_mutex_unlock(&t->lock);
}

/* The oldest one, or NULL: none. Lock held. */
static struct message *take_unsent(struct transport *t)
{
    struct message *m = t->unsent;

    if (m != NULL)
        t->unsent = m->next;
    return m;
}

/* For the forwarder. NULL: the end. */
static struct message *await_unsent(struct transport *t)
{
    struct message *m;

    pthread_mutex_lock(&t->lock);
    t->sending = false;
    while (!t->ended && t->unsent == NULL)
        pthread_cond_wait(&t->unsent_there, &t->lock);
    m = t->ended ? NULL : take_unsent(t);
    t->sending = m != NULL;
    pthread_mutex_unlock(&t->lock);
    return m;
}

static void *forward_unsent(void *arg)
{
    struct transport *t = arg;
    struct message *m;

    prctl(PR_SET_NAME, "encfsd-forward");
    while ((m = await_unsent(t)) != NULL) {
        if (session_forward(t, m, true) == FORWARD_CLOSED)
            end(t);
        message_give(m);
    }
    return NULL;
}

/* Who answers requests natively must not wait for pyfuse3. Returns the message to go on with, or NULL when pyfuse3 is gone. */
static struct message *forward(struct reader *r, struct message *m)
{
    struct transport *t = r->transport;
    struct message *next;

    if (m->opcode != FUSE_INIT)
        count_forwarded(m);
    enum forwarding done = any_unsent(t) ? FORWARD_WOULD_WAIT : session_forward(t, m, false);
    if (done == FORWARD_WOULD_WAIT && t->fast_path && (next = message_take(t)) != NULL) {
        leave_unsent(t, m);
        return next;
    }
    if (done == FORWARD_WOULD_WAIT)     /* pyfuse3 answers everything; or better slow than not at all */
        done = session_forward(t, m, true);
    if (done == FORWARDED)
        return m;
    message_give(m);
    return NULL;
}

/* Returns the message to go on with, or NULL when pyfuse3 is gone. */
static struct message *serve(struct reader *r, struct message *m)
{
    struct transport *t = r->transport;

    if (m->opcode == FUSE_INTERRUPT) {
        /* Nothing is interrupted in here, and pyfuse3 cannot. The first answer that finds its request still running makes the kernel
         * stop asking. */
        reply_error(t, m->unique, -ENOSYS);
        count_native(m, false);
        return m;
    }
    if (m->opcode == FUSE_INIT && !init_request(t, message_in(m), m->size))
        return m;
    if (t->fast_path) {
        switch (native_decode(m)) {
        case NATIVE_READY: return carry_out(r, m);
        case NATIVE_ANSWERED: return m;
        case NATIVE_FOREIGN: break;
        }
    }
    return forward(r, m);
}

static void *read_requests(void *arg)
{
    struct reader *r = arg;
    struct message *m = r->first;

    prctl(PR_SET_NAME, "encfsd-fuse");
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);       /* the kernel may need us in order to free memory; fails without privilege */
    while (m != NULL && next_request(r, m))
        m = serve(r, m);
    if (m == NULL)
        end(r->transport);
    else
        message_give(m);
    return NULL;
}

/* ---- start and stop ---- */

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void transport_free(struct transport *t)
{
    close_if_open(t->fuse_fd);
    close_if_open(t->pair);
    close_if_open(t->session_fd);
    close_if_open(t->done_fd);
    close_if_open(t->stop_fd);
    messages_free(t);
    free(t->counters);
    pthread_cond_destroy(&t->role_free);
    pthread_cond_destroy(&t->unsent_there);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static unsigned usable_cpus(void)
{
    cpu_set_t cpus;

    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (unsigned)CPU_COUNT(&cpus) : 1;
}

static int open_everything(struct transport *t)
{
    int flags = fcntl(t->fuse_fd, F_GETFL);
    int result;

    if (flags < 0 || fcntl(t->fuse_fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return -errno;
    result = session_open(t);
    if (result < 0)
        return result;
    t->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->done_fd < 0 || t->stop_fd < 0)
        return -errno;
    return counters_create(t);
}

/* Messages that readers begin with are taken here, where there is somebody to tell that there is no memory. */
static int take_first_messages(struct transport *t)
{
    t->reply_message = message_take(t);
    if (t->reply_message == NULL)
        return -ENOMEM;
    for (unsigned i = 0; i < t->reader_count; i++) {
        t->reader[i] = (struct reader){.transport = t, .first = message_take(t), .spin_score = 1};
        if (t->reader[i].first == NULL) {
            while (i-- > 0)
                message_give(t->reader[i].first);
            message_give(t->reply_message);
            return -ENOMEM;
        }
    }
    return 0;
}

/* Ends the first n readers and the other threads that run. */
static void stop_threads(struct transport *t, unsigned n)
{
    struct message *m;

    signal_event(t->stop_fd);
    end(t);
    shutdown(t->pair, SHUT_RDWR);       /* wakes a thread that sends or receives */
    for (unsigned i = 0; i < n; i++)
        pthread_join(t->reader[i].thread, NULL);
    for (unsigned i = n; i < t->reader_count; i++)
        message_give(t->reader[i].first);
    if (t->replies_run)
        pthread_join(t->replies, NULL);
    if (t->forwarder_runs)
        pthread_join(t->forwarder, NULL);
    while ((m = take_unsent(t)) != NULL)
        message_give(m);
    message_give(t->reply_message);
}

/* Signals are the event loop's: the threads block them all. */
static int start_threads(struct transport *t)
{
    sigset_t all, before;
    unsigned started = 0;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    error = pthread_create(&t->replies, NULL, session_replies, t);
    t->replies_run = error == 0;
    if (error == 0 && t->fast_path) {
        error = pthread_create(&t->forwarder, NULL, forward_unsent, t);
        t->forwarder_runs = error == 0;
    }
    t->awake = t->reader_count;
    t->leader = t->reader[0].leads = true;      /* from the start, or all might go away before anybody follows */
    for (; error == 0 && started < t->reader_count; started += error == 0)
        error = pthread_create(&t->reader[started].thread, NULL, read_requests, &t->reader[started]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        stop_threads(t, started);
    return -error;
}

int transport_start(struct transport **transport, int fuse_fd, const struct transport_options *options, int *session_fd)
{
    struct transport *t = calloc(1, sizeof *t);
    int result;

    if (t == NULL) {
        close(fuse_fd);
        return -ENOMEM;
    }
    if (options->fast_path)
        request_writers_unknown(options->volume);
    t->volume = options->volume;
    t->fast_path = options->fast_path;
    t->reader_count = !t->fast_path ? 1 : options->readers != 0 ? options->readers : DEFAULT_READERS;
    if (t->reader_count > MAX_READERS)
        t->reader_count = MAX_READERS;
    t->max_awake = usable_cpus() < MAX_AWAKE ? usable_cpus() : MAX_AWAKE;
    t->fuse_fd = fuse_fd;
    t->pair = t->session_fd = t->done_fd = t->stop_fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->role_free, NULL);
    pthread_cond_init(&t->unsent_there, NULL);
    result = open_everything(t);
    if (result == 0)
        result = take_first_messages(t);
    if (result == 0)
        result = start_threads(t);
    if (result < 0) {
        transport_free(t);
        return result;
    }
    *session_fd = t->session_fd;
    *transport = t;
    return 0;
}

int transport_done_fd(struct transport *t) { return t->done_fd; }

int transport_fuse_fd(struct transport *t) { return t->fuse_fd; }

void transport_init_info(struct transport *t, struct transport_init *init)
{
    pthread_mutex_lock(&t->lock);
    *init = t->init;
    pthread_mutex_unlock(&t->lock);
}

/* A request in flight may wait for the kernel, which waits for an answer to a WRITE: as there are no readers any more, it gets an
 * error. */
static void refuse_requests(struct transport *t)
{
    struct message *m = t->reply_message;

    while (message_receive(t, m) > 0)
        if (m->opcode != FUSE_FORGET && m->opcode != FUSE_BATCH_FORGET)
            reply_error(t, m->unique, -EIO);
}

static bool in_flight(struct transport *t)
{
    pthread_mutex_lock(&t->lock);
    bool any = t->in_flight > 0;
    pthread_mutex_unlock(&t->lock);
    return any || (t->volume != NULL && volume_pulls_pages(t->volume));
}

void transport_stop(struct transport *t)
{
    stop_threads(t, t->reader_count);
    t->reply_message = message_take(t);
    while (in_flight(t)) {
        if (t->reply_message != NULL)
            refuse_requests(t);
        nanosleep(&(struct timespec){.tv_nsec = DRAIN_POLL_NS}, NULL);
    }
    if (t->reply_message != NULL)
        message_give(t->reply_message);
    transport_free(t);                  /* closing /dev/fuse aborts a connection that is still there */
}
