/* AES-256-GCM from intel-ipsec-mb, three times as fast as OpenSSL on processors with VAES, with traps:
 * - It checks no tag, and on a parameter error it does nothing and says so only in an errno that all threads of the process
 *   share. So the tag buffer is poisoned before each call, and the tag that comes out decides.
 * - Its key structure grew under the same SONAME: the run-time version must equal the compiled one, and the structure is
 *   allocated larger than declared, so that a library that lies about its version cannot write past it. */
#include "_seal_backend.h"
#include "_seal.h"

#ifdef HAVE_IPSEC_MB

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <intel-ipsec-mb.h>

enum { KEY_SLACK = 4096 };                      /* bytes allocated beyond the declared key structure */

static const uint8_t zero_nonce[12];

struct manager {
    IMB_MGR *mb;                                /* one a thread: managers are not thread-safe */
    struct gcm_key_data *key;                   /* expanded key of the last message, sizeof + KEY_SLACK bytes */
    struct gcm_context_data context;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t manager_key;               /* the calling thread's struct manager */
static bool manager_key_valid;

static void manager_free(void *p)
{
    struct manager *m = p;

    if (m->key)
        secret_wipe(m->key, sizeof *m->key + KEY_SLACK);
    free(m->key);
    if (m->mb)
        free_mb_mgr(m->mb);
    secret_wipe(m, sizeof *m);
    free(m);
}

static void set_up_once(void)
{
    manager_key_valid = pthread_key_create(&manager_key, manager_free) == 0;
}

/* Returns NULL if memory is short. */
static struct manager *manager(void)
{
    pthread_once(&once, set_up_once);
    if (!manager_key_valid)
        return NULL;
    struct manager *m = pthread_getspecific(manager_key);
    if (m)
        return m;

    m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->key = aligned_alloc(64, (sizeof *m->key + KEY_SLACK + 63) / 64 * 64);
    m->mb = alloc_mb_mgr(0);
    if (!m->key || !m->mb) {
        manager_free(m);
        return NULL;
    }
    init_mb_mgr_auto(m->mb, NULL);
    if (pthread_setspecific(manager_key, m) != 0) {
        manager_free(m);
        return NULL;
    }
    return m;
}

static int encrypt(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    struct manager *t = manager();
    uint8_t poison[TAG_SIZE];

    if (!t)
        return -EIO;
    memset(poison, 0xa5, sizeof poison);
    memcpy(tag, poison, sizeof poison);
    IMB_AES256_GCM_PRE(t->mb, m->key, t->key);
    IMB_AES256_GCM_ENC(t->mb, t->key, &t->context, m->out, m->in, m->size, zero_nonce, m->aad, m->aad_size, tag, TAG_SIZE);
    /* A real tag equals the poison once in 2^128. */
    return memcmp(tag, poison, sizeof poison) == 0 ? -EIO : 0;
}

static int decrypt(const struct gcm_message *m, const uint8_t tag[TAG_SIZE])
{
    struct manager *t = manager();
    uint8_t computed[TAG_SIZE];

    if (!t)
        return -EIO;
    for (size_t i = 0; i < TAG_SIZE; i++)
        computed[i] = (uint8_t)~tag[i];         /* a call that does nothing must not pass */
    IMB_AES256_GCM_PRE(t->mb, m->key, t->key);
    IMB_AES256_GCM_DEC(t->mb, t->key, &t->context, m->out, m->in, m->size, zero_nonce, m->aad, m->aad_size, computed, TAG_SIZE);
    int result = secret_compare(computed, tag, TAG_SIZE) == 0 ? 0 : -EBADMSG;
    /* The right tag of a forged message is what a forger wants to know. */
    secret_wipe(computed, sizeof computed);
    return result;
}

static void forget_key(void)
{
    struct manager *t = manager();

    if (t) {
        secret_wipe(t->key, sizeof *t->key);
        secret_wipe(&t->context, sizeof t->context);
    }
}

const char *gcm_ipsecmb_unusable(void)
{
    if (imb_get_version() != IMB_VERSION_NUM)
        return "the library's version is not the one compiled against";
    struct manager *m = manager();
    if (!m)
        return "not enough memory";
    if (!(m->mb->features & IMB_FEATURE_AESNI) || !m->mb->gcm256_enc)
        return "the processor has no AES instructions";
    return NULL;
}

#else

#include <errno.h>

static int encrypt(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    (void)m, (void)tag;
    return -EIO;
}

static int decrypt(const struct gcm_message *m, const uint8_t tag[TAG_SIZE])
{
    (void)m, (void)tag;
    return -EIO;
}

static void forget_key(void) {}

const char *gcm_ipsecmb_unusable(void) { return "not built in"; }

#endif

const struct gcm_backend gcm_ipsecmb = {"ipsec-mb", encrypt, decrypt, forget_key};
