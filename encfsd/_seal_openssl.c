/* AES-256-GCM, AES-256-CTR and HMAC-SHA256 from OpenSSL's libcrypto: the backend that is always there.
 *
 * Setting up an EVP context costs as much as encrypting a node, so each thread keeps one for each direction, and a message
 * only changes its key. */
#include "_seal_backend.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/params.h>

static const uint8_t zero_nonce[12], zero_key[KEY_SIZE];

struct contexts {
    EVP_CIPHER_CTX *encrypt, *decrypt;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t contexts_key;              /* the calling thread's struct contexts */
static bool contexts_key_valid;
static EVP_CIPHER *ctr;                         /* fetched once: a fetch costs more than a batch of keys */
static EVP_MAC_CTX *hmac_sha256;                /* without a key, to be copied: finding the digest takes as long as the rest */

/* OpenSSL's error queue is per thread and shared with whoever else uses the library (Python's ssl): leave nothing in it. */
static int failed(int error)
{
    ERR_clear_error();
    return error;
}

static void contexts_free(void *p)
{
    struct contexts *c = p;

    EVP_CIPHER_CTX_free(c->encrypt);            /* wipes the key schedule; NULL is allowed */
    EVP_CIPHER_CTX_free(c->decrypt);
    free(c);
}

static EVP_MAC_CTX *new_hmac_sha256(void)
{
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, (char *)"SHA256", 0),
        OSSL_PARAM_construct_end(),
    };
    EVP_MAC *mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    EVP_MAC_CTX *c = mac ? EVP_MAC_CTX_new(mac) : NULL;

    EVP_MAC_free(mac);                          /* the context holds it */
    if (c && !EVP_MAC_CTX_set_params(c, params)) {
        EVP_MAC_CTX_free(c);
        return NULL;
    }
    return c;
}

static void set_up_once(void)
{
    contexts_key_valid = pthread_key_create(&contexts_key, contexts_free) == 0;
    ctr = EVP_CIPHER_fetch(NULL, "AES-256-CTR", NULL);
    hmac_sha256 = new_hmac_sha256();
}

/* Returns NULL if memory is short. */
static struct contexts *contexts(void)
{
    pthread_once(&once, set_up_once);
    if (!contexts_key_valid)
        return NULL;
    struct contexts *c = pthread_getspecific(contexts_key);
    if (c)
        return c;

    c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->encrypt = EVP_CIPHER_CTX_new();
    c->decrypt = EVP_CIPHER_CTX_new();
    if (!c->encrypt || !c->decrypt
        || !EVP_EncryptInit_ex2(c->encrypt, EVP_aes_256_gcm(), NULL, NULL, NULL)
        || !EVP_DecryptInit_ex2(c->decrypt, EVP_aes_256_gcm(), NULL, NULL, NULL)
        || pthread_setspecific(contexts_key, c) != 0) {
        contexts_free(c);
        return NULL;
    }
    return c;
}

static int encrypt(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    struct contexts *c = contexts();
    uint8_t rest[EVP_MAX_BLOCK_LENGTH];
    int n;

    if (!c
        || !EVP_EncryptInit_ex2(c->encrypt, NULL, m->key, zero_nonce, NULL)
        || !EVP_EncryptUpdate(c->encrypt, NULL, &n, m->aad, (int)m->aad_size)
        || !EVP_EncryptUpdate(c->encrypt, m->out, &n, m->in, (int)m->size)
        || (size_t)n != m->size
        || !EVP_EncryptFinal_ex(c->encrypt, rest, &n)
        || !EVP_CIPHER_CTX_ctrl(c->encrypt, EVP_CTRL_AEAD_GET_TAG, TAG_SIZE, tag))
        return failed(-EIO);
    return 0;
}

/* The library compares the tag itself, in constant time, and offers no other way. */
static int decrypt(const struct gcm_message *m, const uint8_t tag[TAG_SIZE])
{
    struct contexts *c = contexts();
    uint8_t rest[EVP_MAX_BLOCK_LENGTH];
    int n;

    if (!c
        || !EVP_DecryptInit_ex2(c->decrypt, NULL, m->key, zero_nonce, NULL)
        || !EVP_CIPHER_CTX_ctrl(c->decrypt, EVP_CTRL_AEAD_SET_TAG, TAG_SIZE, (void *)tag)
        || !EVP_DecryptUpdate(c->decrypt, NULL, &n, m->aad, (int)m->aad_size)
        || !EVP_DecryptUpdate(c->decrypt, m->out, &n, m->in, (int)m->size)
        || (size_t)n != m->size)
        return failed(-EIO);
    if (EVP_DecryptFinal_ex(c->decrypt, rest, &n) <= 0)
        return failed(-EBADMSG);
    return 0;
}

static void forget_key(void)
{
    struct contexts *c = contexts();

    if (c && !(EVP_EncryptInit_ex2(c->encrypt, NULL, zero_key, zero_nonce, NULL)
               && EVP_DecryptInit_ex2(c->decrypt, NULL, zero_key, zero_nonce, NULL)))
        failed(0);
}

const struct gcm_backend gcm_openssl = {"openssl", encrypt, decrypt, forget_key};

int openssl_keystream(const uint8_t seed[KEY_SIZE], void *out, size_t size)
{
    static const uint8_t counter[16], zeros[2048];

    pthread_once(&once, set_up_once);
    /* A context of its own, because freeing it is the documented way to wipe the expanded seed. */
    EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
    bool ok = ctr && c && EVP_EncryptInit_ex2(c, ctr, seed, counter, NULL);

    for (uint8_t *p = out; ok && size > 0;) {
        size_t step = size < sizeof zeros ? size : sizeof zeros;
        int n;
        ok = EVP_EncryptUpdate(c, p, &n, zeros, (int)step) && (size_t)n == step;
        p += step;
        size -= step;
    }
    EVP_CIPHER_CTX_free(c);
    return ok ? 0 : failed(-EIO);
}

int openssl_hmac(const uint8_t key[KEY_SIZE], const struct iovec *parts, size_t n, uint8_t mac[32])
{
    pthread_once(&once, set_up_once);
    EVP_MAC_CTX *c = hmac_sha256 ? EVP_MAC_CTX_dup(hmac_sha256) : NULL;
    bool ok = c && EVP_MAC_init(c, key, KEY_SIZE, NULL);

    for (size_t i = 0; ok && i < n; i++)
        ok = EVP_MAC_update(c, parts[i].iov_base, parts[i].iov_len);
    size_t size = 0;
    ok = ok && EVP_MAC_final(c, mac, &size, 32) && size == 32;
    EVP_MAC_CTX_free(c);                        /* wipes the key */
    return ok ? 0 : failed(-EIO);
}
