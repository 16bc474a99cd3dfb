/* Private to _seal*.c: what a crypto backend provides. The rules that make AEAD safe to use (fresh keys, publishing only
 * authentic plaintext) lie above it in _seal.c, once for all backends. */
#ifndef ENCFSD_SEAL_BACKEND_H
#define ENCFSD_SEAL_BACKEND_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "_format.h"

/* One AES-256-GCM message with a nonce of 12 zero bytes. No pointer needs alignment; `in` and `out` do not overlap. */
struct gcm_message {
    const uint8_t *key;                 /* KEY_SIZE bytes, used for this one message */
    const void *aad;
    size_t aad_size;                    /* bytes */
    const void *in;
    void *out;
    size_t size;                        /* bytes of in and of out */
};

/* Thread-safe: each thread has its own contexts, made at its first call and freed when it ends. */
struct gcm_backend {
    const char *name;
    /* Returns 0 or -EIO (library or memory failed: out and tag are then undefined). */
    int (*encrypt)(const struct gcm_message *m, uint8_t tag[TAG_SIZE]);
    /* Returns 0; -EBADMSG: not authentic; -EIO as above. `out` may hold plaintext in every case: the caller wipes it. */
    int (*decrypt)(const struct gcm_message *m, const uint8_t tag[TAG_SIZE]);
    /* Overwrites what the calling thread's contexts keep of the last key. */
    void (*forget_key)(void);
};

extern const struct gcm_backend gcm_openssl;
extern const struct gcm_backend gcm_ipsecmb;

/* Whether the ipsec-mb backend may be called at all: built in, the run-time library exactly the one that was compiled
 * against, the processor has AES instructions. Returns NULL, or why not (static text). */
const char *gcm_ipsecmb_unusable(void);

/* AES-256-CTR keystream of `seed`, counter from zero; `size` bytes. Keeps no copy of the seed. Returns 0 or -EIO. */
int openssl_keystream(const uint8_t seed[KEY_SIZE], void *out, size_t size);

/* HMAC-SHA256 over the concatenated parts. Returns 0 or -EIO. */
int openssl_hmac(const uint8_t key[KEY_SIZE], const struct iovec *parts, size_t n, uint8_t mac[32]);

#endif
