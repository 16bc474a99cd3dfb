/* Who reads requests while others wait for the disk, for pyfuse3 or for barriers; and that the transport ends whatever goes on. */
#include <linux/sockios.h>
#include <pthread.h>
#include <sys/ioctl.h>

#include "_blockio.h"
#include "fake_kernel.h"

/* Files of an object, and small: a burst of answers must fit into the socket that stands for /dev/fuse, an ordinary user's too. */
enum { READERS = 4, FILES = READERS + 4, FILE_SIZE = 3000 };

/* ---- a gate in the backing store ---- */

static struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum blockio_call call;             /* what is stopped at it */
    bool closed;
    unsigned waiting;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static int at_gate(void *arg, const struct blockio_event *event)
{
    (void)arg;
    static const uint8_t meta[ID_SIZE];

    if (event->id == NULL || memcmp(event->id, meta, ID_SIZE) == 0)     /* names and attributes are always there */
        return 0;
    pthread_mutex_lock(&gate.lock);
    if (event->call == gate.call && gate.closed) {
        gate.waiting++;
        pthread_cond_broadcast(&gate.changed);
        while (gate.closed)
            pthread_cond_wait(&gate.changed, &gate.lock);
        gate.waiting--;
    }
    pthread_mutex_unlock(&gate.lock);
    return 0;
}

static void gate_close(enum blockio_call call)
{
    static const struct blockio_hooks hooks = {.before = at_gate};

    blockio_set_hooks(&hooks);
    gate.call = call;
    gate.closed = true;
}

static void gate_open(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.closed = false;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

/* Until n threads wait at the gate. */
static bool await_waiting(unsigned n)
{
    struct timespec until;
    int error = 0;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += TEN_SECONDS / 1000;
    pthread_mutex_lock(&gate.lock);
    while (gate.waiting < n && error == 0)
        error = pthread_cond_timedwait(&gate.changed, &gate.lock, &until);
    bool there = gate.waiting >= n;
    pthread_mutex_unlock(&gate.lock);
    return CHECK(there);
}

/* ---- a volume whose files are not in memory ---- */

static uint64_t cold[FILES], other;
static uint8_t *contents;

static bool begin_cold(void)
{
    if (!volume_begin())
        return false;
    contents = pattern(FILE_SIZE, 8);
    for (int i = 0; i < FILES; i++) {
        char name[16];
        snprintf(name, sizeof name, "cold%d", i);
        cold[i] = (uint64_t)client_create(&kernel.client, ROOT_INO, name);
        CHECK_EQ(client_write(&kernel.client, cold[i], contents, FILE_SIZE, 0), FILE_SIZE);
    }
    other = (uint64_t)client_create(&kernel.client, ROOT_INO, "other");
    CHECK_EQ(client_sync(&kernel.client), 0);
    volume_again();
    CHECK_EQ(client_lookup(&kernel.client, ROOT_INO, "other", NULL), 0);
    for (int i = 0; i < FILES; i++) {   /* known, but not read */
        char name[16];
        snprintf(name, sizeof name, "cold%d", i);
        CHECK_EQ(client_lookup(&kernel.client, ROOT_INO, name, NULL), 0);
    }
    return true;
}

static void end_cold(void)
{
    blockio_set_hooks(NULL);
    volume_end();
    free(contents);
}

static uint64_t ask_cold(int i)
{
    struct fuse_read_in in = {.size = FILE_SIZE};

    return ask(FUSE_READ, cold[i], &in, sizeof in, NULL, 0);
}

static void check_cold(uint64_t unique)
{
    CHECK_EQ(await_reply(unique), FILE_SIZE);
    CHECK_MEM_EQ(kernel.reply.data, contents, FILE_SIZE);
}

static void check_answers(void)
{
    struct fuse_getattr_in in = {0};

    CHECK_EQ(CALL(FUSE_GETATTR, ROOT_INO, in), sizeof(struct fuse_attr_out));
    CHECK_EQ(kernel_lookup(ROOT_INO, "other"), sizeof(struct fuse_entry_out));
    kernel_forget(other, 1);
}

/* ---- roles ---- */

/* Waits until a reader leads and no more than `n` messages are in the volume: the FORGET of check_answers() has no reply. */
static void check_leads_with_in_flight(unsigned n)
{
    struct transport *t = kernel.transport;
    bool settled = false;

    for (int i = 0; i < TEN_SECONDS && !settled; i++) {
        pthread_mutex_lock(&t->lock);
        settled = t->leader && t->in_flight == n;
        pthread_mutex_unlock(&t->lock);
        if (!settled)
            usleep(1000);
    }
    CHECK(settled);
}

/* With one reader after the other waiting for the disk, and then I/O workers too, others are still answered. */
TEST(somebody_leads_however_many_wait_for_the_disk)
{
    for (unsigned readers = 1; readers <= READERS; readers++) {
        uint64_t unique[FILES];

        if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), readers), 0))
            return;
        check_answers();
        gate_close(BIO_OPEN);
        for (unsigned k = 0; k < readers + 3; k++) {
            unique[k] = ask_cold((int)k);
            if (!await_waiting(k + 1))
                break;
            check_answers();
        }
        check_leads_with_in_flight(4);      /* the last reader stays: what follows is parked */
        gate_open();
        for (unsigned k = 0; k < readers + 3; k++)
            check_cold(unique[k]);
        check_answers();
        check_quiet();
        transport_end();
        end_cold();
    }
}

/* The same for large WRITEs; each is sealed by the reader that read it, and stops where it is written. */
TEST(somebody_leads_while_others_write)
{
    enum { SIZE = 64 << 10 };
    uint8_t *data = pattern(SIZE, 9);

    for (unsigned readers = 1; readers <= READERS; readers++) {
        struct fuse_write_in in = {.size = SIZE};
        uint64_t unique[FILES];

        if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), readers), 0))
            return;
        for (int i = 0; i < FILES; i++)
            check_cold(ask_cold(i));            /* what is not open yet is parked */
        gate_close(BIO_WRITE);
        for (unsigned k = 0; k < readers + 3; k++) {
            unique[k] = ask(FUSE_WRITE, cold[k], &in, sizeof in, data, SIZE);
            if (!await_waiting(k + 1))
                break;
            check_answers();
        }
        check_leads_with_in_flight(4);
        gate_open();
        for (unsigned k = 0; k < readers + 3; k++)
            CHECK_EQ(await_reply(unique[k]), sizeof(struct fuse_write_out));
        for (unsigned k = 0; k < readers + 3; k++) {
            CHECK_EQ(kernel_read(cold[k], SIZE, 0), SIZE);
            CHECK_MEM_EQ(kernel.reply.data, data, SIZE);
        }
        check_quiet();
        transport_end();
        end_cold();
    }
    free(data);
}

/* Requests that are there before anybody leads. */
TEST(somebody_leads_from_the_start)
{
    for (int round = 0; round < 20; round++) {
        uint64_t unique[READERS];

        if (!begin_cold())
            return;
        gate_close(BIO_OPEN);
        int device = device_open();
        for (int i = 0; i < READERS; i++)
            unique[i] = ask_cold(i);
        if (!CHECK_EQ(transport_begin(device, READERS), 0))
            return;
        await_waiting(READERS);
        check_answers();
        gate_open();
        for (int i = 0; i < READERS; i++)
            check_cold(unique[i]);
        check_quiet();
        transport_end();
        end_cold();
    }
}

/* Roles while many come, go away and come back. When all is quiet one reader leads and the others follow. */
TEST(roles_are_in_order_after_bursts)
{
    enum { ROUNDS = 200, BURST = 64 };

    if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), READERS), 0))
        return;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t unique[BURST];

        for (int i = 0; i < BURST; i++)
            unique[i] = ask_cold(i % FILES);
        for (int i = 0; i < BURST; i++)
            check_cold(unique[i]);
        bool settled = false;
        for (int i = 0; i < TEN_SECONDS && !settled; i++) {
            struct transport *t = kernel.transport;

            pthread_mutex_lock(&t->lock);
            settled = t->leader && t->followers == READERS - 1 && t->awake == 1 && t->wanted <= t->followers && t->in_flight == 0;
            pthread_mutex_unlock(&t->lock);
            if (!settled)
                usleep(1000);
        }
        if (!CHECK(settled))
            break;
    }
    check_quiet();
    transport_end();
    end_cold();
}

/* ---- pyfuse3 that does not read ---- */

enum { FORWARDED_SIZE = 60000, MANY = 400 };

/* Sends more requests for pyfuse3 than its socket takes. */
static void fill_session(void)
{
    uint8_t *body = pattern(FORWARDED_SIZE, 1);
    int room = 0, used = 0;
    socklen_t len = sizeof room;

    getsockopt(kernel.transport->pair, SOL_SOCKET, SO_SNDBUF, &room, &len);
    for (int i = 0; i < MANY; i++)
        ask(FUSE_SETXATTR, ROOT_INO, body, FORWARDED_SIZE, NULL, 0);
    for (int i = 0; i < TEN_SECONDS && used + FORWARDED_SIZE < room; i++) {
        ioctl(kernel.transport->pair, SIOCOUTQ, &used);
        usleep(1000);
    }
    CHECK(used + FORWARDED_SIZE >= room);
    free(body);
}

TEST(native_requests_go_on_while_pyfuse3_does_not_read)
{
    struct { struct fuse_in_header header; uint8_t body[FORWARDED_SIZE]; } *request = malloc(sizeof *request);
    uint8_t *body = pattern(FORWARDED_SIZE, 1);
    struct transport_opcode stats[TRANSPORT_OPCODES];

    if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), READERS), 0))
        return;
    fill_session();
    check_answers();
    for (int i = 0; i < FILES; i++)
        check_cold(ask_cold(i));
    for (int i = 0; i < MANY; i++) {    /* now it wakes up */
        if (!CHECK(readable(kernel.session, TEN_SECONDS)))
            break;
        CHECK_EQ(recv(kernel.session, request, sizeof *request, MSG_TRUNC), sizeof *request);
        CHECK_MEM_EQ(request->body, body, FORWARDED_SIZE);
        struct fuse_out_header reply = {.len = sizeof reply, .error = -ENOTSUP, .unique = request->header.unique};
        CHECK_EQ(send(kernel.session, &reply, sizeof reply, 0), sizeof reply);
        CHECK_EQ(await_reply(reply.unique), -ENOTSUP);
    }
    check_answers();
    check_quiet();
    transport_stats(kernel.transport, stats);
    CHECK_EQ(stats[FUSE_SETXATTR].forwarded, MANY);
    CHECK_EQ(stats[FUSE_SETXATTR].failed, MANY);
    transport_end();
    end_cold();
    free(request);
    free(body);
}

/* ---- the end ---- */

TEST(stop_with_blocked_forwards)
{
    if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), READERS), 0))
        return;
    fill_session();
    transport_end();
    end_cold();
}

static void *open_gate_later(void *arg)
{
    usleep(50000);
    gate_open();
    return arg;
}

static void stop_during(enum blockio_call call, bool connection_ends)
{
    struct fuse_fsync_in fsync = {0};
    pthread_t opener;

    if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), READERS), 0))
        return;
    if (call == BIO_BARRIER)
        CHECK_EQ(kernel_write(cold[0], "new", 3, 0), 3);
    gate_close(call);
    if (call == BIO_BARRIER)
        for (int i = 0; i < 8; i++)     /* more than there are barrier threads */
            ask(FUSE_FSYNC, cold[0], &fsync, sizeof fsync, NULL, 0);
    else
        for (int i = 0; i < FILES; i++)
            ask_cold(i);
    await_waiting(1);
    if (connection_ends) {
        device_close();
        CHECK(readable(transport_done_fd(kernel.transport), TEN_SECONDS));
    }
    pthread_create(&opener, NULL, open_gate_later, NULL);
    transport_end();
    pthread_join(opener, NULL);
    end_cold();
}

TEST(stop_waits_for_reads) { stop_during(BIO_OPEN, false); }
TEST(stop_waits_for_reads_of_a_connection_that_ended) { stop_during(BIO_OPEN, true); }
TEST(stop_waits_for_fsyncs) { stop_during(BIO_BARRIER, false); }
TEST(stop_waits_for_fsyncs_of_a_connection_that_ended) { stop_during(BIO_BARRIER, true); }

/* Requests that come as fast as they are answered must not keep the readers. */
static void *ask_without_end(void *arg)
{
    struct { struct fuse_in_header header; struct fuse_getattr_in in; } request = {
        .header = {.len = sizeof request, .opcode = FUSE_GETATTR, .unique = 1000, .nodeid = ROOT_INO}};
    struct { struct fuse_out_header header; struct fuse_attr_out out; } reply;

    while (send(kernel.fd, &request, sizeof request, MSG_NOSIGNAL) > 0 && recv(kernel.fd, &reply, sizeof reply, 0) > 0)
        request.header.unique += 2;
    return arg;
}

TEST(stop_while_requests_keep_coming)
{
    enum { CLIENTS = 3 };
    pthread_t client[CLIENTS];

    if (!begin_cold() || !CHECK_EQ(transport_begin(device_open(), READERS), 0))
        return;
    for (int i = 0; i < CLIENTS; i++)
        pthread_create(&client[i], NULL, ask_without_end, NULL);
    usleep(20000);
    transport_stop(kernel.transport);
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(client[i], NULL);
    device_close();
    end_cold();
}

TEST(many_lives)
{
    if (!begin_cold())
        return;
    for (int i = 0; i < FILES; i++)     /* opens their objects */
        CHECK_EQ(client_read(&kernel.client, cold[i], contents, FILE_SIZE, 0), FILE_SIZE);
    unsigned before = descriptors();
    for (unsigned i = 0; i < 100; i++) {
        if (!CHECK_EQ(transport_begin(device_open(), i % 9), 0))
            return;
        if (i % 3 != 0) {
            check_answers();
            check_cold(ask_cold((int)i % FILES));
        }
        if (i % 4 == 0)
            ask_cold(0);                /* its answer may find nobody */
        if (i % 5 == 0)
            device_close();
        transport_end();
        CHECK_EQ(descriptors(), before);
    }
    end_cold();
}
