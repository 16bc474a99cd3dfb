/* Sealing: AES-256-GCM with one fresh random key a message, zero nonce (docs/format.md, "Sealing").
 * Two backends that produce the same bytes: OpenSSL's libcrypto, and intel-ipsec-mb where it is safe to use.
 * seal_nodes() takes no key: it draws one and returns it, so that a key cannot be used twice. Thread-safe after seal_setup. */
#ifndef ENCFSD_SEAL_H
#define ENCFSD_SEAL_H

#include <stddef.h>
#include <stdint.h>

#include "_format.h"

enum seal_backend { SEAL_AUTO, SEAL_OPENSSL, SEAL_IPSEC_MB };

/* Runs the known answers of the wanted backend (ipsec-mb's in a forked child, against OpenSSL) and selects it for the process.
 * SEAL_AUTO falls back to OpenSSL. `reason` receives one line that says what was chosen and why, for the log.
 * Returns 0; -ENOTSUP if the wanted backend cannot be used; -EBADMSG if a known answer is wrong. Call once, before threads. */
int seal_setup(enum seal_backend wanted, char *reason, size_t reason_size);

/* Which backend is in use: "openssl" or "ipsec-mb". */
const char *seal_backend_name(void);

struct seal_job {
    const void *plain;                  /* NODE_SIZE bytes, any alignment, must not change during the call */
    void *sealed;                       /* NODE_SIZE bytes; may not overlap plain */
    uint8_t kind, level;                /* enum node_kind; tree level */
    uint8_t key[KEY_SIZE], tag[TAG_SIZE]; /* out: into the parent's entry */
};

/* Seals n nodes of one object, each with a fresh key (batch keys: AES-256-CTR keystream of a getrandom seed drawn after
 * the call began; seed wiped). Returns 0 or -EIO (random source or library failed: outputs wiped, nothing usable). */
int seal_nodes(const uint8_t object_id[ID_SIZE], struct seal_job *jobs, size_t n);

struct open_job {
    const void *sealed;                 /* NODE_SIZE bytes in private memory, not mmap of the backing file */
    void *plain;                        /* NODE_SIZE bytes; written once, when the node is known to be authentic, else zeroed */
    const struct entry *entry;          /* key and tag */
    uint8_t kind, level;
    int result;                         /* out: 0, -EBADMSG (not authentic) or -EIO (library failed) */
};

/* Opens n nodes of one object, all of them even if one fails. Returns 0 if all are authentic, else the first result that
 * is not 0. */
int open_nodes(const uint8_t object_id[ID_SIZE], struct open_job *jobs, size_t n);

/* Long-lived keys of an open volume: in locked, MADV_DONTDUMP|MADV_WIPEONFORK memory behind this handle. */
struct keyring;

/* P: the volume's pseudo-random key (docs/format.md). Copies and leaves wiping the arguments to the caller.
 * Returns 0, -ENOMEM, or -EPERM if the memory cannot be locked (RLIMIT_MEMLOCK). */
int keyring_create(struct keyring **ring, const uint8_t volume_id[ID_SIZE], const uint8_t p[KEY_SIZE]);
void keyring_destroy(struct keyring *ring);                     /* wipes; NULL is allowed */
const uint8_t *keyring_volume_id(const struct keyring *ring);

/* F(key, label, context) of docs/format.md: HKDF-Expand-SHA256, 32 bytes out. Returns 0 or -EIO. */
int keyring_derive(const struct keyring *ring, const char *label, const void *context, size_t context_size,
                   uint8_t out[KEY_SIZE]);

/* HMAC-SHA256 with F(P, "freshness", VID): authenticates the trusted state record. Returns 0 or -EIO. */
int keyring_state_mac(const struct keyring *ring, const void *data, size_t size, uint8_t mac[32]);

/* Seals a root: draws R, derives KR, fills all 4096 bytes of *out. Returns 0; -EINVAL if open_root would refuse *plain
 * (delta entries past delta_count are zero too); -EIO. *out is zero unless 0 is returned, but untouched by -EINVAL. */
int seal_root(const struct keyring *ring, const uint8_t object_id[ID_SIZE], uint64_t slot_index,
              const struct root_plain *plain, struct root_slot *out);

/* Opens a root slot that was read from slot `slot_index`. Returns 0; -EBADMSG if it is no root or not authentic; -EPROTO if
 * its format version is unknown, or if it is authentic but a field is refused (reserved bytes, counts, order, slots outside
 * the file); -EIO. *plain is zero unless 0 is returned. */
int open_root(const struct keyring *ring, const uint8_t object_id[ID_SIZE], uint64_t slot_index,
              const struct root_slot *slot, struct root_plain *plain);

/* Fills `out` with random bytes from the kernel. Returns 0 or -EIO. */
int random_bytes(void *out, size_t size);

/* Compares in constant time: 0 if equal. */
int secret_compare(const void *a, const void *b, size_t size);

/* Zeroes memory in a way the compiler keeps. */
void secret_wipe(void *p, size_t size);

#endif
