/* Sealing, above the crypto backends: fresh keys, known answers, roots, and the keys of an open volume. */
#include "_seal.h"
#include "_seal_backend.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

/* Set by seal_setup before there are threads, constant afterwards. */
static const struct gcm_backend *backend = &gcm_openssl;

/* ---- Randomness and secret memory ---- */

int random_bytes(void *out, size_t size)
{
    for (uint8_t *p = out; size > 0;) {
        ssize_t n = getrandom(p, size, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -EIO;
        p += n;
        size -= (size_t)n;
    }
    return 0;
}

int secret_compare(const void *a, const void *b, size_t size)
{
    const volatile uint8_t *x = a, *y = b;      /* volatile: no early exit may be invented */
    uint8_t difference = 0;

    for (size_t i = 0; i < size; i++)
        difference |= x[i] ^ y[i];
    return difference;
}

void secret_wipe(void *p, size_t size) { explicit_bzero(p, size); }

/* ---- Nodes ---- */

/* Fills in the jobs' keys: per chunk one seed from the kernel, expanded, wiped. No random state outlives the call, so
 * neither a fork nor a restored snapshot of the machine can repeat a key. */
static int draw_keys(struct seal_job *jobs, size_t n)
{
    enum { CHUNK = 64 };
    uint8_t seed[KEY_SIZE], keys[CHUNK][KEY_SIZE];
    int error = 0;

    for (size_t done = 0; !error && done < n; done += CHUNK) {
        size_t count = n - done < CHUNK ? n - done : CHUNK;
        error = random_bytes(seed, sizeof seed);
        if (!error)
            error = openssl_keystream(seed, keys, count * KEY_SIZE);
        for (size_t i = 0; !error && i < count; i++)
            memcpy(jobs[done + i].key, keys[i], KEY_SIZE);
    }
    secret_wipe(seed, sizeof seed);
    secret_wipe(keys, sizeof keys);
    return error;
}

static struct node_aad node_aad(const uint8_t object_id[ID_SIZE], uint8_t kind, uint8_t level)
{
    struct node_aad aad = {.version = FORMAT_VERSION, .kind = kind, .level = level};

    memcpy(aad.object_id, object_id, ID_SIZE);
    return aad;
}

int seal_nodes(const uint8_t object_id[ID_SIZE], struct seal_job *jobs, size_t n)
{
    int error = draw_keys(jobs, n);

    for (size_t i = 0; !error && i < n; i++) {
        struct seal_job *job = &jobs[i];
        const struct node_aad aad = node_aad(object_id, job->kind, job->level);
        const struct gcm_message m = {job->key, &aad, sizeof aad, job->plain, job->sealed, NODE_SIZE};
        error = backend->encrypt(&m, job->tag);
    }
    for (size_t i = 0; error && i < n; i++) {
        memset(jobs[i].sealed, 0, NODE_SIZE);
        memset(jobs[i].tag, 0, TAG_SIZE);
        secret_wipe(jobs[i].key, KEY_SIZE);
    }
    return error;
}

int open_nodes(const uint8_t object_id[ID_SIZE], struct open_job *jobs, size_t n)
{
    /* Nobody but this thread ever sees plaintext that turns out not to be authentic. */
    uint8_t scratch[NODE_SIZE];
    int first_error = 0;

    for (size_t i = 0; i < n; i++) {
        struct open_job *job = &jobs[i];
        const struct node_aad aad = node_aad(object_id, job->kind, job->level);
        const struct gcm_message m = {job->entry->key, &aad, sizeof aad, job->sealed, scratch, NODE_SIZE};
        job->result = backend->decrypt(&m, job->entry->tag);
        if (job->result == 0)
            memcpy(job->plain, scratch, NODE_SIZE);
        else
            memset(job->plain, 0, NODE_SIZE);
        if (first_error == 0)
            first_error = job->result;
    }
    secret_wipe(scratch, sizeof scratch);
    return first_error;
}

/* ---- Keys of an open volume ---- */

struct keyring {
    uint8_t volume_id[ID_SIZE];
    uint8_t p[KEY_SIZE];                        /* P: every other key is derived from it */
};

int keyring_create(struct keyring **ring, const uint8_t volume_id[ID_SIZE], const uint8_t p[KEY_SIZE])
{
    /* Pages of its own, because the advice works on pages. */
    struct keyring *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (r == MAP_FAILED)
        return -ENOMEM;
    if (mlock(r, sizeof *r) != 0
        || madvise(r, sizeof *r, MADV_DONTDUMP) != 0
        || madvise(r, sizeof *r, MADV_WIPEONFORK) != 0) {
        munmap(r, sizeof *r);
        return -EPERM;
    }
    memcpy(r->volume_id, volume_id, ID_SIZE);
    memcpy(r->p, p, KEY_SIZE);
    *ring = r;
    return 0;
}

void keyring_destroy(struct keyring *ring)
{
    if (!ring)
        return;
    secret_wipe(ring, sizeof *ring);
    munmap(ring, sizeof *ring);
}

const uint8_t *keyring_volume_id(const struct keyring *ring) { return ring->volume_id; }

/* F(key, label, context): HKDF-Expand with one block of output, which is a single HMAC. */
static int derive(const uint8_t key[KEY_SIZE], const char *label, const void *context, size_t context_size,
                  uint8_t out[KEY_SIZE])
{
    static const char prefix[] = "encfsd/v1/";
    static const uint8_t block_number = 1;
    const struct iovec info[] = {
        {(void *)prefix, sizeof prefix - 1},
        {(void *)label, strlen(label) + 1},     /* with the 0x00 that ends the label */
        {(void *)context, context_size},
        {(void *)&block_number, 1},
    };
    return openssl_hmac(key, info, sizeof info / sizeof *info, out);
}

int keyring_derive(const struct keyring *ring, const char *label, const void *context, size_t context_size,
                   uint8_t out[KEY_SIZE])
{
    return derive(ring->p, label, context, context_size, out);
}

int keyring_state_mac(const struct keyring *ring, const void *data, size_t size, uint8_t mac[32])
{
    const struct iovec all = {(void *)data, size};
    uint8_t key[KEY_SIZE];
    int error = derive(ring->p, "freshness", ring->volume_id, ID_SIZE, key);

    if (!error)
        error = openssl_hmac(key, &all, 1, mac);
    secret_wipe(key, sizeof key);
    return error;
}

/* ---- Roots ---- */

struct root_aad {
    uint8_t magic[8];
    uint8_t volume_id[ID_SIZE];
    uint8_t object_id[ID_SIZE];
    uint64_t slot_index;
    uint8_t salt[SALT_SIZE];
};
static_assert(sizeof(struct root_aad) == 80, "docs/format.md: root AAD");

static struct root_aad root_aad(const struct keyring *ring, const uint8_t object_id[ID_SIZE], uint64_t slot_index,
                                const struct root_slot *slot)
{
    struct root_aad aad = {.slot_index = slot_index};

    memcpy(aad.magic, slot->magic, sizeof aad.magic);
    memcpy(aad.volume_id, ring->volume_id, ID_SIZE);
    memcpy(aad.object_id, object_id, ID_SIZE);
    memcpy(aad.salt, slot->salt, SALT_SIZE);
    return aad;
}

/* KR = F(KO, "root", R), KO = F(P, "object", key epoch || object id). */
static int root_key(const struct keyring *ring, const uint8_t object_id[ID_SIZE], const uint8_t salt[SALT_SIZE],
                    uint8_t key[KEY_SIZE])
{
    struct {
        uint32_t key_epoch;                     /* 0 until volume keys can be rotated */
        uint8_t object_id[ID_SIZE];
    } context = {0};
    static_assert(sizeof context == 20, "docs/format.md: object key context");
    uint8_t object_key[KEY_SIZE];

    memcpy(context.object_id, object_id, ID_SIZE);
    int error = derive(ring->p, "object", &context, sizeof context, object_key);
    if (!error)
        error = derive(object_key, "root", salt, SALT_SIZE, key);
    secret_wipe(object_key, sizeof object_key);
    return error;
}

static bool all_zero(const void *p, size_t size)
{
    const uint8_t *bytes = p;

    for (size_t i = 0; i < size; i++)
        if (bytes[i])
            return false;
    return true;
}

/* A hole is all zero; anything else lies in a slot that the allocator handed out. */
static bool entry_is_valid(const struct entry *e, uint64_t end)
{
    if (e->slot == 0)
        return all_zero(e, sizeof *e);
    return e->slot >= ROOT_SLOTS && e->slot < end;
}

/* What can be said of a root without reading anything else. The object layer checks indices against the size. */
static bool root_is_valid(const struct root_plain *p)
{
    if (p->reserved0 || p->reserved1 || !all_zero(p->reserved2, sizeof p->reserved2)
        || !all_zero(p->reserved3, sizeof p->reserved3))
        return false;
    if (p->size > OBJECT_MAX_SIZE || p->end < ROOT_SLOTS || p->end > OBJECT_MAX_SIZE / NODE_SIZE)
        return false;
    if (p->height > TREE_MAX_HEIGHT || (p->height == 0) != (p->top.slot == 0) || !entry_is_valid(&p->top, p->end))
        return false;
    if (p->delta_count > DELTA_MAX)
        return false;
    for (size_t i = 0; i < p->delta_count; i++) {
        if (i > 0 && p->delta[i].index <= p->delta[i - 1].index)
            return false;
        if (!entry_is_valid(&p->delta[i].entry, p->end))
            return false;
    }
    return all_zero(&p->delta[p->delta_count], (DELTA_MAX - p->delta_count) * sizeof p->delta[0]);
}

int seal_root(const struct keyring *ring, const uint8_t object_id[ID_SIZE], uint64_t slot_index,
              const struct root_plain *plain, struct root_slot *out)
{
    uint8_t key[KEY_SIZE];

    if (!root_is_valid(plain))
        return -EINVAL;
    memcpy(out->magic, ROOT_MAGIC, sizeof out->magic);
    int error = random_bytes(out->salt, SALT_SIZE);
    if (!error)
        error = root_key(ring, object_id, out->salt, key);
    if (!error) {
        const struct root_aad aad = root_aad(ring, object_id, slot_index, out);
        const struct gcm_message m = {key, &aad, sizeof aad, plain, out->ciphertext, ROOT_PLAIN_SIZE};
        error = backend->encrypt(&m, out->tag);
        backend->forget_key();
    }
    secret_wipe(key, sizeof key);
    if (error)
        memset(out, 0, sizeof *out);
    return error;
}

int open_root(const struct keyring *ring, const uint8_t object_id[ID_SIZE], uint64_t slot_index,
              const struct root_slot *slot, struct root_plain *plain)
{
    enum { LETTERS = 6 };                       /* of the magic; the format version follows */
    struct root_plain scratch;
    uint8_t key[KEY_SIZE];

    memset(plain, 0, sizeof *plain);
    if (memcmp(slot->magic, ROOT_MAGIC, LETTERS) != 0)
        return -EBADMSG;
    if (memcmp(slot->magic, ROOT_MAGIC, sizeof slot->magic) != 0)
        return -EPROTO;
    int error = root_key(ring, object_id, slot->salt, key);
    if (!error) {
        const struct root_aad aad = root_aad(ring, object_id, slot_index, slot);
        const struct gcm_message m = {key, &aad, sizeof aad, slot->ciphertext, &scratch, ROOT_PLAIN_SIZE};
        error = backend->decrypt(&m, slot->tag);
        backend->forget_key();
    }
    if (!error && !root_is_valid(&scratch))
        error = -EPROTO;
    if (!error)
        *plain = scratch;
    secret_wipe(&scratch, sizeof scratch);
    secret_wipe(key, sizeof key);
    return error;
}

/* ---- Known answers ---- */

enum { MISALIGN = 8 };                          /* buffers are tried at each offset below this */

struct sample {
    uint8_t key[KEY_SIZE + MISALIGN], aad[80 + MISALIGN], plain[NODE_SIZE + MISALIGN];
    uint8_t sealed[NODE_SIZE + MISALIGN], expected[NODE_SIZE], opened[NODE_SIZE + MISALIGN];
    uint8_t tag[TAG_SIZE + MISALIGN], expected_tag[TAG_SIZE];
};

/* Whether `b` refuses the message `m` with `tag` once the bit `bit` of the byte at `target` is turned over. */
static bool refuses(const struct gcm_backend *b, const struct gcm_message *m, const uint8_t *tag, uint8_t *target, int bit)
{
    *target ^= (uint8_t)(1 << bit);
    int result = b->decrypt(m, tag);
    *target ^= (uint8_t)(1 << bit);
    return result == -EBADMSG;
}

/* Seals and opens one message at offset `at` of each buffer; compares with OpenSSL; damages each part in turn. */
static bool sample_is_right(const struct gcm_backend *b, struct sample *s, size_t at, size_t aad_size, size_t size)
{
    uint8_t *key = s->key + at, *aad = s->aad + at, *plain = s->plain + at;
    uint8_t *sealed = s->sealed + at, *opened = s->opened + at, *tag = s->tag + at;

    for (size_t i = 0; i < KEY_SIZE; i++)
        key[i] = (uint8_t)i;
    for (size_t i = 0; i < aad_size; i++)
        aad[i] = (uint8_t)(0xa0 + i);
    for (size_t i = 0; i < size; i++)
        plain[i] = (uint8_t)(i * 7 + i / 256);

    const struct gcm_message reference = {key, aad, aad_size, plain, s->expected, size};
    const struct gcm_message seal = {key, aad, aad_size, plain, sealed, size};
    const struct gcm_message open = {key, aad, aad_size, sealed, opened, size};
    if (gcm_openssl.encrypt(&reference, s->expected_tag) != 0 || b->encrypt(&seal, tag) != 0
        || memcmp(sealed, s->expected, size) != 0 || memcmp(tag, s->expected_tag, TAG_SIZE) != 0)
        return false;
    if (b->decrypt(&open, tag) != 0 || memcmp(opened, plain, size) != 0)
        return false;
    for (int bit = 0; bit < 8; bit++) {
        for (size_t i = 0; i < TAG_SIZE; i++)
            if (!refuses(b, &open, tag, &tag[i], bit))
                return false;
        if (!refuses(b, &open, tag, &aad[0], bit) || !refuses(b, &open, tag, &aad[aad_size - 1], bit)
            || !refuses(b, &open, tag, &sealed[0], bit) || !refuses(b, &open, tag, &sealed[size - 1], bit)
            || !refuses(b, &open, tag, &key[KEY_SIZE - 1], bit))
            return false;
    }
    return true;
}

/* The first and last bytes and the tag of the aligned node-sized sample, computed once by an implementation of the
 * standard that shares no code with either library. */
static bool vector_is_right(const struct sample *s)
{
    static const uint8_t first[16] = {0x0e, 0xbb, 0xbb, 0xcb, 0xa9, 0x0f, 0xa9, 0x8c,
                                      0x30, 0x97, 0xef, 0x78, 0x4c, 0x77, 0xf3, 0xf0};
    static const uint8_t last[16] = {0xbe, 0x6a, 0x35, 0x51, 0x68, 0xef, 0x1d, 0x4c,
                                     0x49, 0x1f, 0x17, 0x94, 0x11, 0x3d, 0xb9, 0x67};
    static const uint8_t tag[TAG_SIZE] = {0x2e, 0x4d, 0xe9, 0x4c, 0x52, 0xba, 0xd4, 0xb2,
                                          0x31, 0xdd, 0xc1, 0x41, 0xec, 0xeb, 0xdd, 0xa7};

    return memcmp(s->sealed, first, 16) == 0 && memcmp(s->sealed + NODE_SIZE - 16, last, 16) == 0
        && memcmp(s->tag, tag, TAG_SIZE) == 0;
}

static bool known_answers_are_right(const struct gcm_backend *b)
{
    struct sample s;

    if (!sample_is_right(b, &s, 0, sizeof(struct node_aad), NODE_SIZE) || !vector_is_right(&s))
        return false;
    for (size_t at = 1; at < MISALIGN; at++)
        if (!sample_is_right(b, &s, at, sizeof(struct node_aad), NODE_SIZE))
            return false;
    return sample_is_right(b, &s, 0, sizeof(struct root_aad), ROOT_PLAIN_SIZE);
}

/* The key stream and F(), which come from OpenSSL whatever the backend is. */
static bool derivation_is_right(void)
{
    static const uint8_t stream[32] = {0xf3, 0x47, 0x44, 0xeb, 0xcd, 0x33, 0x7f, 0x20, 0x9c, 0x19, 0xe3,
                                       0xac, 0x13, 0xd8, 0x2d, 0xec, 0x55, 0x9e, 0xfd, 0xe8, 0x82, 0xf9,
                                       0x44, 0x03, 0x6c, 0xa9, 0x18, 0xde, 0x8b, 0x47, 0xb2, 0xf7};
    static const uint8_t derived[KEY_SIZE] = {0xa4, 0x9a, 0xc5, 0xf9, 0xf9, 0xe8, 0x7c, 0xe6, 0x34, 0x71, 0x35,
                                              0x40, 0x52, 0x86, 0x22, 0x45, 0x29, 0x7f, 0x83, 0x39, 0x91, 0x32,
                                              0xce, 0x19, 0x59, 0x3e, 0xc9, 0x9f, 0xc7, 0xec, 0x2f, 0xe1};
    uint8_t seed[KEY_SIZE], key[KEY_SIZE], out[KEY_SIZE];

    for (uint8_t i = 0; i < KEY_SIZE; i++) {
        seed[i] = 0x20 + i;
        key[i] = 0x40 + i;
    }
    return openssl_keystream(seed, out, sizeof out) == 0 && memcmp(out, stream, sizeof stream) == 0
        && derive(key, "header", NULL, 0, out) == 0 && memcmp(out, derived, sizeof derived) == 0;
}

/* In a child, because a library that is not what it seems may crash or hang instead of answering wrong. */
static bool known_answers_are_right_in_child(const struct gcm_backend *b)
{
    enum { SECONDS = 10 };
    pid_t child = fork();

    if (child == 0) {
        sigset_t alarm_only;
        sigemptyset(&alarm_only);
        sigaddset(&alarm_only, SIGALRM);
        signal(SIGALRM, SIG_DFL);
        sigprocmask(SIG_UNBLOCK, &alarm_only, NULL);
        alarm(SECONDS);
        _exit(known_answers_are_right(b) ? 0 : 1);
    }
    int status = -1;
    pid_t waited;
    do
        waited = child < 0 ? -1 : waitpid(child, &status, 0);
    while (waited < 0 && child > 0 && errno == EINTR);
    return waited > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int seal_setup(enum seal_backend wanted, char *reason, size_t reason_size)
{
    backend = &gcm_openssl;
    if (!known_answers_are_right(&gcm_openssl) || !derivation_is_right()) {
        snprintf(reason, reason_size, "openssl: wrong answers to known questions");
        return -EBADMSG;
    }
    if (wanted == SEAL_OPENSSL) {
        snprintf(reason, reason_size, "openssl: as asked for");
        return 0;
    }

    int error = 0;
    const char *why = gcm_ipsecmb_unusable();
    if (why) {
        error = -ENOTSUP;
    } else if (!known_answers_are_right_in_child(&gcm_ipsecmb)) {
        why = "wrong answers to known questions, a crash or no answer";
        error = -EBADMSG;
    } else {
        backend = &gcm_ipsecmb;
        snprintf(reason, reason_size, "ipsec-mb: version and known answers are right");
        return 0;
    }
    if (wanted == SEAL_AUTO) {
        snprintf(reason, reason_size, "openssl: ipsec-mb cannot be used (%s)", why);
        return 0;
    }
    snprintf(reason, reason_size, "ipsec-mb cannot be used (%s)", why);
    return error;
}

const char *seal_backend_name(void) { return backend->name; }
