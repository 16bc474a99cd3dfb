/* The trusted state record: written here at each metadata commit, created and read by encfsd/state.py, which gives the layout. */
#include "_volume_internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { STATE_SLOTS = 2, STATE_SLOT_SIZE = 4096, STATE_CLEAN = 1 };

static_assert(sizeof(struct state_record) == 192, "docs/format-keys.md: state record");

static int read_slot(const struct volume *v, unsigned slot, struct state_record *record)
{
    uint8_t mac[32];

    if (pread(v->state.fd, record, sizeof *record, (off_t)slot * STATE_SLOT_SIZE) != (ssize_t)sizeof *record)
        return -EBADMSG;
    if (keyring_state_mac(v->ring, record, offsetof(struct state_record, mac), mac))
        return -EIO;
    if (secret_compare(mac, record->mac, sizeof mac) ||
        memcmp(record->volume_id, keyring_volume_id(v->ring), ID_SIZE))
        return -EBADMSG;
    return 0;
}

int state_load(struct volume *v)
{
    struct state_record found;
    int rc = -EBADMSG;

    memset(&v->state.record, 0, sizeof v->state.record);
    for (unsigned slot = 0; slot < STATE_SLOTS; slot++) {
        if (read_slot(v, slot, &found) || (rc == 0 && found.sequence < v->state.record.sequence))
            continue;
        v->state.record = found;
        rc = 0;
    }
    return rc;
}

/* Writes `next` as the newest record. */
static int write_next(struct volume *v, struct state_record next)
{
    off_t at;

    next.sequence++;
    if (keyring_state_mac(v->ring, &next, offsetof(struct state_record, mac), next.mac))
        return -EIO;
    at = (off_t)(next.sequence % STATE_SLOTS) * STATE_SLOT_SIZE;   /* never the newest record's */
    if (pwrite(v->state.fd, &next, sizeof next, at) != (ssize_t)sizeof next)
        return errno ? -errno : -EIO;
    if (fdatasync(v->state.fd))
        return -errno;
    v->state.record = next;
    return 0;
}

int state_write(struct volume *v, const struct object_record *record, bool clean)
{
    struct state_record next = v->state.record;

    if (v->state.fd < 0)
        return 0;
    next.flags = clean ? STATE_CLEAN : 0;
    next.epoch = record->epoch;
    next.counter = record->counter;
    memcpy(next.salt, record->salt, SALT_SIZE);
    return write_next(v, next);
}

int state_begin_epoch(struct volume *v, uint64_t epoch)
{
    struct state_record next = v->state.record;

    if (v->state.fd < 0)
        return 0;
    next.flags = 0;
    next.epoch_begun = epoch;
    return write_next(v, next);
}
