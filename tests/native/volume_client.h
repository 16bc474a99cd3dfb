/* A synchronous client of one volume for C tests: makes requests through the one door and waits for parked ones. */
#ifndef ENCFSD_TEST_VOLUME_CLIENT_H
#define ENCFSD_TEST_VOLUME_CLIENT_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_request.h"
#include "_volume.h"

static const uint8_t CLIENT_VID[ID_SIZE] = "volume-id-16byte";
static const uint8_t CLIENT_P[KEY_SIZE] = "a pseudo-random key of 32 bytes";

struct client {
    struct volume *volume;
    struct volume_found found;
    char message[256];
    int src_fd;
};

static inline struct volume_options client_options(int src_fd)
{
    struct volume_options o = {
        .src_fd = src_fd, .state_fd = -1, .io_threads = 2, .barrier_threads = 2, .group_interval_ms = 60000,
        .free_list_bytes = 4 << 20, .dirty_limit_bytes = 1 << 20,
    };
    memcpy(o.volume_id, CLIENT_VID, ID_SIZE);
    memcpy(o.p, CLIENT_P, KEY_SIZE);
    return o;
}

/* A fresh directory below the test's own temporary one; the name in `path`. */
static inline int client_directory(char path[64])
{
    const char *base = getenv("ENCFSD_TEST_DIR");       /* a tmpfs keeps these tests fast */

    snprintf(path, 64, "%.40s/encfsd-test-XXXXXX", base ? base : "/dev/shm");
    return mkdtemp(path) ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
}

static inline void client_remove(const char *path)
{
    char command[256];

    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command))
        fprintf(stderr, "cannot remove %s\n", path);
}

static inline int client_open(struct client *c, const struct volume_options *o)
{
    c->message[0] = 0;
    return volume_open(&c->volume, o, &c->found, c->message, sizeof c->message);
}

static inline int64_t client_run(struct client *c, struct request *r)
{
    struct pollfd p = {request_completion_fd(c->volume), POLLIN, 0};

    if (request_start(c->volume, r) == REQUEST_PARKED) {
        poll(&p, 1, -1);
        if (request_next_completed(c->volume) != r)
            abort();
    }
    return r->result;
}

static inline struct request client_named(enum request_op op, uint64_t parent, const char *name)
{
    return (struct request){.op = op, .ino = parent, .name = name, .name_len = strlen(name)};
}

static inline int64_t client_lookup(struct client *c, uint64_t parent, const char *name, struct attr *attr)
{
    struct request r = client_named(REQ_LOOKUP, parent, name);
    int64_t rc = client_run(c, &r);

    if (attr)
        *attr = r.attr;
    return rc;
}

/* Creates a regular file; its inode number or a negative errno. */
static inline int64_t client_create(struct client *c, uint64_t parent, const char *name)
{
    struct request r = client_named(REQ_MKNOD, parent, name);
    int64_t rc;

    r.mode = S_IFREG | 0644;
    rc = client_run(c, &r);
    return rc ? rc : (int64_t)r.attr.ino;
}

static inline int64_t client_write(struct client *c, uint64_t ino, const void *data, size_t size, uint64_t offset)
{
    struct request r = {.op = REQ_WRITE, .ino = ino, .buffer = (void *)(uintptr_t)data, .size = size, .offset = offset};

    return client_run(c, &r);
}

static inline int64_t client_read(struct client *c, uint64_t ino, void *data, size_t size, uint64_t offset)
{
    struct request r = {.op = REQ_READ, .ino = ino, .buffer = data, .size = size, .offset = offset};

    return client_run(c, &r);
}

static inline int64_t client_fsync(struct client *c, uint64_t ino)
{
    struct request r = {.op = REQ_FSYNC, .ino = ino};

    return client_run(c, &r);
}

static inline int64_t client_sync(struct client *c)
{
    struct request r = {.op = REQ_SYNC_ALL};

    return client_run(c, &r);
}

static inline int64_t client_unlink(struct client *c, uint64_t parent, const char *name)
{
    struct request r = client_named(REQ_UNLINK, parent, name);

    return client_run(c, &r);
}

static inline int64_t client_rename(struct client *c, const char *name, const char *new_name)
{
    struct request r = client_named(REQ_RENAME, ROOT_INO, name);

    r.new_parent = ROOT_INO;
    r.new_name = new_name;
    r.new_name_len = strlen(new_name);
    return client_run(c, &r);
}

static inline int64_t client_truncate(struct client *c, uint64_t ino, uint64_t size)
{
    struct request r = {.op = REQ_SETATTR, .ino = ino, .valid = SET_SIZE, .attr = {.size = size}};

    return client_run(c, &r);
}

#endif
