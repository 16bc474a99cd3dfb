/* Sealing: the same bytes from each backend, fresh keys, and nothing opens that was changed.
 *
 * The expected values come from a straightforward implementation of AES-GCM and HKDF that shares no code with libcrypto. */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <openssl/crypto.h>
#include <openssl/err.h>

/* The module is compiled into the test with system calls that fail, and random numbers that are known, when told to. */
static int random_fails_in;                     /* > 0: the call with this number fails */
static bool random_is_known;                    /* 0x80, 0x81, ... */
static bool mmap_fails, mlock_fails;
static int failing_advice = -1;

static ssize_t test_getrandom(void *p, size_t size, unsigned flags)
{
    if (random_fails_in > 0 && --random_fails_in == 0) {
        errno = ENOSYS;
        return -1;
    }
    if (!random_is_known)
        return getrandom(p, size, flags);
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)p)[i] = (uint8_t)(0x80 + i);
    return (ssize_t)size;
}

static void *test_mmap(void *p, size_t size, int protection, int flags, int fd, off_t offset)
{
    return mmap_fails ? MAP_FAILED : mmap(p, size, protection, flags, fd, offset);
}

static int test_mlock(const void *p, size_t size) { return mlock_fails ? -1 : mlock(p, size); }

static int test_madvise(void *p, size_t size, int advice)
{
    return advice == failing_advice ? -1 : madvise(p, size, advice);
}

#define getrandom test_getrandom
#define mmap test_mmap
#define mlock test_mlock
#define madvise test_madvise
#include "_seal.c"
#undef getrandom
#undef mmap
#undef mlock
#undef madvise

static const uint8_t object_id[ID_SIZE] = {0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17,
                                           0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f};
static const uint8_t volume_id[ID_SIZE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static const struct gcm_backend *const all_backends[] = {&gcm_openssl, &gcm_ipsecmb};

/* The backends that can be used on this machine. */
static size_t backends(void) { return gcm_ipsecmb_unusable() ? 1 : 2; }

static bool is_zero(const void *p, size_t size) { return all_zero(p, size); }

static void from_hex(const char *hex, uint8_t *out, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        unsigned byte;
        CHECK_EQ(sscanf(hex + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
}

static struct keyring *a_ring(void)
{
    struct keyring *ring = NULL;
    uint8_t p[KEY_SIZE];

    for (uint8_t i = 0; i < KEY_SIZE; i++)
        p[i] = 0x40 + i;
    CHECK_EQ(keyring_create(&ring, volume_id, p), 0);
    return ring;
}

/* ---- Choosing the backend ---- */

TEST(setup_chooses)
{
    char reason[200];
    bool usable = backends() == 2;

    CHECK_EQ(seal_setup(SEAL_OPENSSL, reason, sizeof reason), 0);
    CHECK(strcmp(seal_backend_name(), "openssl") == 0 && strncmp(reason, "openssl: ", 9) == 0);
    CHECK_EQ(seal_setup(SEAL_IPSEC_MB, reason, sizeof reason), usable ? 0 : -ENOTSUP);
    CHECK(strcmp(seal_backend_name(), usable ? "ipsec-mb" : "openssl") == 0 && strncmp(reason, "ipsec-mb", 8) == 0);
    CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0);
    CHECK(strcmp(seal_backend_name(), usable ? "ipsec-mb" : "openssl") == 0);
    CHECK(strstr(reason, seal_backend_name()) != NULL);
    backend = &gcm_openssl;
}

/* Backends that are wrong in one way each. */
static int encrypt_right(const struct gcm_message *m, uint8_t tag[TAG_SIZE]) { return gcm_openssl.encrypt(m, tag); }
static int decrypt_right(const struct gcm_message *m, const uint8_t tag[TAG_SIZE]) { return gcm_openssl.decrypt(m, tag); }
static void forget_nothing(void) {}

static int encrypt_nothing(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    (void)m, (void)tag;
    return 0;
}

static int encrypt_without_aad(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    struct gcm_message other = *m;
    other.aad_size--;
    return gcm_openssl.encrypt(&other, tag);
}

static int encrypt_aligned_only(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    return (uintptr_t)m->in % 2 ? encrypt_nothing(m, tag) : gcm_openssl.encrypt(m, tag);
}

/* Gives plaintext whatever the tag is, as a library does that leaves comparing to its caller. */
static int decrypt_unchecked(const struct gcm_message *m, const uint8_t tag[TAG_SIZE])
{
    int result = gcm_openssl.decrypt(m, tag);
    return result == -EBADMSG ? 0 : result;
}

static int decrypt_checking_half(const struct gcm_message *m, const uint8_t tag[TAG_SIZE])
{
    uint8_t right[TAG_SIZE], out[NODE_SIZE];
    const struct gcm_message again = {m->key, m->aad, m->aad_size, m->out, out, m->size};

    if (gcm_openssl.decrypt(m, tag) == 0)
        return 0;
    return gcm_openssl.encrypt(&again, right) == 0 && memcmp(right, tag, 8) == 0 ? 0 : -EBADMSG;
}

static int encrypt_crashing(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    (void)m, (void)tag;
    raise(SIGKILL);
    return 0;
}

TEST(wrong_backends_are_found_out)
{
    static const struct gcm_backend wrong[] = {
        {"idle", encrypt_nothing, decrypt_right, forget_nothing},
        {"without AAD", encrypt_without_aad, decrypt_right, forget_nothing},
        {"aligned only", encrypt_aligned_only, decrypt_right, forget_nothing},
        {"unchecked", encrypt_right, decrypt_unchecked, forget_nothing},
        {"half checked", encrypt_right, decrypt_checking_half, forget_nothing},
        {"crashing", encrypt_crashing, decrypt_right, forget_nothing},
    };
    static const struct gcm_backend right = {"right", encrypt_right, decrypt_right, forget_nothing};

    CHECK(known_answers_are_right_in_child(&right));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (!CHECK(!known_answers_are_right_in_child(&wrong[i])))
            fprintf(stderr, "backend: %s\n", wrong[i].name);
}

/* ---- Nodes ---- */

enum { NODES = 130 };                           /* more than two batches of keys */

struct batch {
    uint8_t plain[NODES][NODE_SIZE], sealed[NODES][NODE_SIZE], opened[NODES][NODE_SIZE];
    struct seal_job seal[NODES];
    struct entry entry[NODES];
    struct open_job open[NODES];
};

static struct batch *new_batch(void)
{
    struct batch *b = malloc(sizeof *b);

    for (size_t i = 0; i < NODES; i++) {
        for (size_t k = 0; k < NODE_SIZE; k++)
            b->plain[i][k] = (uint8_t)(i * 31 + k * 7 + k / 256);
        b->seal[i] = (struct seal_job){.plain = b->plain[i], .sealed = b->sealed[i], .kind = NODE_DATA};
        b->open[i] = (struct open_job){.sealed = b->sealed[i], .plain = b->opened[i], .entry = &b->entry[i],
                                       .kind = NODE_DATA};
        memset(b->sealed[i], 0xcc, NODE_SIZE);
        memset(b->opened[i], 0xcc, NODE_SIZE);
    }
    return b;
}

static void take_entries(struct batch *b)
{
    for (size_t i = 0; i < NODES; i++) {
        b->entry[i].slot = 99;
        memcpy(b->entry[i].key, b->seal[i].key, KEY_SIZE);
        memcpy(b->entry[i].tag, b->seal[i].tag, TAG_SIZE);
    }
}

/* What one backend seals, each opens. */
TEST(nodes_round_trip_across_backends)
{
    static const size_t counts[] = {0, 1, 2, 63, 64, 65, NODES};

    for (size_t from = 0; from < backends(); from++)
        for (size_t to = 0; to < backends(); to++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                struct batch *b = new_batch();
                backend = all_backends[from];
                CHECK_EQ(seal_nodes(object_id, b->seal, counts[c]), 0);
                take_entries(b);
                backend = all_backends[to];
                CHECK_EQ(open_nodes(object_id, b->open, counts[c]), 0);
                CHECK_MEM_EQ(b->opened, b->plain, counts[c] * NODE_SIZE);
                for (size_t i = 0; i < counts[c]; i++)
                    CHECK_EQ(b->open[i].result, 0);
                free(b);
            }
    backend = &gcm_openssl;
}

/* Byte for byte, given the seed: keys are the key stream, and the backends agree on every byte. */
TEST(known_seed_gives_known_nodes)
{
    struct batch *b[2] = {new_batch(), new_batch()};
    uint8_t seed[KEY_SIZE], stream[64 * KEY_SIZE];

    for (uint8_t i = 0; i < KEY_SIZE; i++)
        seed[i] = 0x80 + i;
    CHECK_EQ(openssl_keystream(seed, stream, sizeof stream), 0);
    random_is_known = true;
    for (size_t i = 0; i < backends(); i++) {
        backend = all_backends[i];
        CHECK_EQ(seal_nodes(object_id, b[i]->seal, 64), 0);
        for (size_t k = 0; k < 64; k++)
            CHECK_MEM_EQ(b[i]->seal[k].key, stream + k * KEY_SIZE, KEY_SIZE);
    }
    random_is_known = false;
    backend = &gcm_openssl;
    if (backends() == 2) {
        CHECK_MEM_EQ(b[1]->sealed, b[0]->sealed, 64 * NODE_SIZE);
        for (size_t k = 0; k < 64; k++)
            CHECK_MEM_EQ(b[1]->seal[k].tag, b[0]->seal[k].tag, TAG_SIZE);
    }
    free(b[0]);
    free(b[1]);
}

static int by_bytes(const void *a, const void *b) { return memcmp(a, b, KEY_SIZE); }

static bool all_differ(uint8_t (*keys)[KEY_SIZE], size_t n)
{
    qsort(keys, n, KEY_SIZE, by_bytes);
    for (size_t i = 1; i < n; i++)
        if (memcmp(keys[i - 1], keys[i], KEY_SIZE) == 0)
            return false;
    return true;
}

/* Also when the same nodes are sealed again, as after a failed write. */
TEST(no_key_is_used_twice)
{
    enum { ROUNDS = 8 };
    static uint8_t keys[ROUNDS * NODES][KEY_SIZE];
    struct batch *b = new_batch();

    for (int round = 0; round < ROUNDS; round++) {
        CHECK_EQ(seal_nodes(object_id, b->seal, NODES), 0);
        for (size_t i = 0; i < NODES; i++)
            memcpy(keys[round * NODES + (int)i], b->seal[i].key, KEY_SIZE);
    }
    CHECK(all_differ(keys, ROUNDS * NODES));
    free(b);
}

/* A child and its parent must not draw the same keys either. */
TEST(no_key_is_shared_over_a_fork)
{
    static uint8_t keys[2][KEY_SIZE];
    struct batch *b = new_batch();
    int ends[2];

    CHECK_EQ(seal_nodes(object_id, b->seal, 1), 0);
    CHECK_EQ(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        bool sent = seal_nodes(object_id, b->seal, 1) == 0 && write(ends[1], b->seal[0].key, KEY_SIZE) == KEY_SIZE;
        _exit(sent ? 0 : 1);
    }
    CHECK_EQ(seal_nodes(object_id, b->seal, 1), 0);
    memcpy(keys[0], b->seal[0].key, KEY_SIZE);
    CHECK_EQ(read(ends[0], keys[1], KEY_SIZE), KEY_SIZE);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK(all_differ(keys, 2));
    close(ends[0]);
    close(ends[1]);
    free(b);
}

/* Turns one bit over and expects node 1, and it alone, to be refused and its plaintext to stay hidden. */
static void refused_with(struct batch *b, void *target, uint8_t bit)
{
    uint8_t *byte = target;

    *byte ^= bit;
    memset(b->opened, 0xcc, 3 * NODE_SIZE);
    CHECK_EQ(open_nodes(object_id, b->open, 3), -EBADMSG);
    *byte ^= bit;
    CHECK_EQ(b->open[0].result, 0);
    CHECK_EQ(b->open[1].result, -EBADMSG);
    CHECK_EQ(b->open[2].result, 0);
    CHECK(is_zero(b->opened[1], NODE_SIZE));
    CHECK_MEM_EQ(b->opened[0], b->plain[0], NODE_SIZE);
    CHECK_MEM_EQ(b->opened[2], b->plain[2], NODE_SIZE);
}

TEST(changed_nodes_are_refused)
{
    for (size_t i = 0; i < backends(); i++) {
        struct batch *b = new_batch();
        backend = all_backends[i];
        CHECK_EQ(seal_nodes(object_id, b->seal, 3), 0);
        take_entries(b);
        for (size_t k = 0; k < NODE_SIZE; k += 13)
            refused_with(b, &b->sealed[1][k], (uint8_t)(1 << k % 8));
        refused_with(b, &b->sealed[1][NODE_SIZE - 1], 0x80);
        for (size_t k = 0; k < TAG_SIZE; k++)
            refused_with(b, &b->entry[1].tag[k], (uint8_t)(1 << k % 8));
        for (size_t k = 0; k < KEY_SIZE; k++)
            refused_with(b, &b->entry[1].key[k], (uint8_t)(1 << k % 8));
        refused_with(b, &b->open[1].kind, NODE_DATA ^ NODE_TREE);
        refused_with(b, &b->open[1].level, 1);
        uint8_t other[ID_SIZE];
        memcpy(other, object_id, ID_SIZE);
        other[15] ^= 1;
        CHECK_EQ(open_nodes(other, b->open, 3), -EBADMSG);
        CHECK(is_zero(b->opened, 3 * NODE_SIZE));
        CHECK_EQ(open_nodes(object_id, b->open, 3), 0);
        free(b);
    }
    backend = &gcm_openssl;
}

/* Two nodes of one object that change places are found out: each entry holds its own key. */
TEST(swapped_nodes_are_refused)
{
    struct batch *b = new_batch();

    CHECK_EQ(seal_nodes(object_id, b->seal, 2), 0);
    take_entries(b);
    b->open[0].sealed = b->sealed[1];
    b->open[1].sealed = b->sealed[0];
    CHECK_EQ(open_nodes(object_id, b->open, 2), -EBADMSG);
    CHECK(is_zero(b->opened, 2 * NODE_SIZE));
    free(b);
}

static int encrypts_left;

static int encrypt_failing(const struct gcm_message *m, uint8_t tag[TAG_SIZE])
{
    return encrypts_left-- > 0 ? gcm_openssl.encrypt(m, tag) : -EIO;
}

static bool nothing_usable(const struct batch *b, size_t n)
{
    bool wiped = is_zero(b->sealed, n * NODE_SIZE);

    for (size_t i = 0; i < n; i++)
        wiped = wiped && is_zero(b->seal[i].key, KEY_SIZE) && is_zero(b->seal[i].tag, TAG_SIZE);
    return wiped;
}

TEST(failures_leave_nothing_usable)
{
    static const struct gcm_backend failing = {"failing", encrypt_failing, decrypt_right, forget_nothing};
    struct batch *b = new_batch();

    for (int draw = 1; draw <= 3; draw++) {
        random_fails_in = draw;
        memset(b->sealed, 0xcc, sizeof b->sealed);
        CHECK_EQ(seal_nodes(object_id, b->seal, NODES), -EIO);
        CHECK(nothing_usable(b, NODES));
    }
    backend = &failing;
    for (encrypts_left = 0; encrypts_left < NODES;) {
        int n = encrypts_left;
        memset(b->sealed, 0xcc, sizeof b->sealed);
        CHECK_EQ(seal_nodes(object_id, b->seal, NODES), -EIO);
        CHECK(nothing_usable(b, NODES));
        encrypts_left = n + 43;
    }
    backend = &gcm_openssl;
    free(b);
}

/* ---- Keys ---- */

TEST(derived_keys_are_known)
{
    struct keyring *ring = a_ring();
    uint8_t expected[KEY_SIZE], out[KEY_SIZE], context[20] = {0};

    CHECK_MEM_EQ(keyring_volume_id(ring), volume_id, ID_SIZE);
    from_hex("a49ac5f9f9e87ce63471354052862245297f83399132ce19593ec99fc7ec2fe1", expected, KEY_SIZE);
    CHECK_EQ(keyring_derive(ring, "header", NULL, 0, out), 0);
    CHECK_MEM_EQ(out, expected, KEY_SIZE);
    memcpy(context + 4, object_id, ID_SIZE);
    from_hex("20b3cde530d8a2c3edcc9775f667e9067d3a139687bcba7c20e4d26c82509ae2", expected, KEY_SIZE);
    CHECK_EQ(keyring_derive(ring, "object", context, sizeof context, out), 0);
    CHECK_MEM_EQ(out, expected, KEY_SIZE);
    from_hex("85250c6f78e81f7f920e747b5fff7f03286d88623df4ad120816b3452b059314", expected, KEY_SIZE);
    CHECK_EQ(keyring_state_mac(ring, "record", 6, out), 0);
    CHECK_MEM_EQ(out, expected, KEY_SIZE);
    keyring_destroy(ring);
    keyring_destroy(NULL);
}

TEST(keyring_needs_protected_memory)
{
    static const int advice[] = {MADV_DONTDUMP, MADV_WIPEONFORK};
    const uint8_t p[KEY_SIZE] = {1};
    struct keyring *ring;

    mmap_fails = true;
    CHECK_EQ(keyring_create(&ring, volume_id, p), -ENOMEM);
    mmap_fails = false;
    mlock_fails = true;
    CHECK_EQ(keyring_create(&ring, volume_id, p), -EPERM);
    mlock_fails = false;
    for (int i = 0; i < 2; i++) {
        failing_advice = advice[i];
        CHECK_EQ(keyring_create(&ring, volume_id, p), -EPERM);
    }
    failing_advice = -1;
}

/* The kernel's own word for it: "dd" is not dumped, "wf" is wiped on fork, "lo" is locked. */
TEST(keyring_memory_is_protected)
{
    struct keyring *ring = a_ring();
    FILE *smaps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;

    while (fgets(line, sizeof line, smaps)) {
        unsigned long first, end;
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            inside = (uintptr_t)ring >= first && (uintptr_t)ring < end;
        if (inside && strncmp(line, "VmFlags:", 8) == 0)
            break;
    }
    fclose(smaps);
    CHECK(strstr(line, " dd") && strstr(line, " wf"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* these make mlock do nothing */
    CHECK(strstr(line, " lo") != NULL);
#endif

    pid_t child = fork();
    if (child == 0)
        _exit(is_zero(ring, sizeof *ring) ? 0 : 1);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_MEM_EQ(keyring_volume_id(ring), volume_id, ID_SIZE);
    keyring_destroy(ring);
}

TEST(comparing_and_wiping)
{
    uint8_t a[33] = {0}, b[33] = {0};

    CHECK_EQ(secret_compare(a, b, sizeof a), 0);
    for (size_t i = 0; i < sizeof a; i++)
        for (int bit = 0; bit < 8; bit++) {
            a[i] = (uint8_t)(1 << bit);
            CHECK(secret_compare(a, b, sizeof a) != 0);
            a[i] = 0;
        }
    memset(a, 7, sizeof a);
    secret_wipe(a, sizeof a - 1);
    CHECK(is_zero(a, sizeof a - 1) && a[32] == 7);
    CHECK_EQ(random_bytes(a, sizeof a), 0);
    CHECK(!is_zero(a, sizeof a));
    random_fails_in = 1;
    CHECK_EQ(random_bytes(a, sizeof a), -EIO);
}

/* ---- Roots ---- */

static struct root_plain a_root(void)
{
    struct root_plain p = {.epoch = 3, .counter = 9, .size = 12345, .atime = -1, .mtime = 2, .ctime = 3, .end = 10,
                           .nodes = 4};

    for (uint8_t i = 0; i < ID_SIZE; i++)
        p.instance[i] = 0x30 + i;
    memset(p.previous, 7, SALT_SIZE);
    return p;
}

TEST(roots_are_known)
{
    struct keyring *ring = a_ring();
    struct root_plain plain = a_root(), opened;
    struct root_slot slot;
    uint8_t expected[16];

    for (size_t i = 0; i < backends(); i++) {
        backend = all_backends[i];
        random_is_known = true;
        CHECK_EQ(seal_root(ring, object_id, 2, &plain, &slot), 0);
        random_is_known = false;
        CHECK_MEM_EQ(slot.magic, "ENCFSD\x01\x00", 8);
        CHECK_EQ(slot.salt[0], 0x80);
        CHECK_EQ(slot.salt[31], 0x9f);
        from_hex("dd5dc5ff67d2d567f9258316fb273367", expected, 16);
        CHECK_MEM_EQ(slot.tag, expected, 16);
        from_hex("31705973c9d77d3702be81410feb6ae9", expected, 16);
        CHECK_MEM_EQ(slot.ciphertext, expected, 16);
        CHECK_EQ(open_root(ring, object_id, 2, &slot, &opened), 0);
        CHECK_MEM_EQ(&opened, &plain, sizeof plain);
    }
    backend = &gcm_openssl;
    keyring_destroy(ring);
}

static void root_is_refused(const struct keyring *ring, const uint8_t *id, uint64_t index, const struct root_slot *slot,
                            int error)
{
    struct root_plain opened;

    memset(&opened, 0xcc, sizeof opened);
    CHECK_EQ(open_root(ring, id, index, slot, &opened), error);
    CHECK(is_zero(&opened, sizeof opened));
}

TEST(changed_roots_are_refused)
{
    struct keyring *ring = a_ring(), *other_volume = NULL, *other_key = NULL;
    struct root_plain plain = a_root();
    struct root_slot slot;
    uint8_t other_id[ID_SIZE] = {1}, p[KEY_SIZE];

    memcpy(p, ring->p, KEY_SIZE);
    CHECK_EQ(keyring_create(&other_volume, other_id, p), 0);
    p[0] ^= 1;
    CHECK_EQ(keyring_create(&other_key, volume_id, p), 0);
    CHECK_EQ(seal_root(ring, object_id, 2, &plain, &slot), 0);
    root_is_refused(ring, object_id, 1, &slot, -EBADMSG);
    root_is_refused(ring, other_id, 2, &slot, -EBADMSG);
    root_is_refused(other_volume, object_id, 2, &slot, -EBADMSG);
    root_is_refused(other_key, object_id, 2, &slot, -EBADMSG);
    for (size_t i = 0; i < sizeof slot; i += i < 100 ? 1 : 37) {
        ((uint8_t *)&slot)[i] ^= 0x10;
        root_is_refused(ring, object_id, 2, &slot, i == 6 || i == 7 ? -EPROTO : -EBADMSG);
        ((uint8_t *)&slot)[i] ^= 0x10;
    }
    CHECK_EQ(open_root(ring, object_id, 2, &slot, &plain), 0);
    memset(&slot, 0, sizeof slot);
    root_is_refused(ring, object_id, 2, &slot, -EBADMSG); /* never written */
    keyring_destroy(ring);
    keyring_destroy(other_volume);
    keyring_destroy(other_key);
}

/* Each way in which an authentic root may be nonsense. */
static void full_delta(struct root_plain *p)
{
    p->delta_count = DELTA_MAX;
    for (size_t i = 0; i < DELTA_MAX; i++)
        p->delta[i] = (struct delta_entry){.index = 2 * i + 1, .entry = {.slot = 4 + i % 6, .key = {1}}};
}
static void nothing(struct root_plain *p) { (void)p; }
static void reserved0(struct root_plain *p) { p->reserved0 = 1; }
static void reserved1(struct root_plain *p) { p->reserved1 = 1; }
static void reserved2_first(struct root_plain *p) { p->reserved2[0] = 1; }
static void reserved2_last(struct root_plain *p) { p->reserved2[271] = 1; }
static void reserved3(struct root_plain *p) { p->reserved3[7] = 1; }
static void huge_size(struct root_plain *p) { p->size = (uint64_t)INT64_MAX + 1; }
static void largest_size(struct root_plain *p) { p->size = INT64_MAX; }
static void end_in_roots(struct root_plain *p) { p->end = ROOT_SLOTS - 1; }
static void huge_end(struct root_plain *p) { p->end = INT64_MAX / NODE_SIZE + 1; }
static void height_without_top(struct root_plain *p) { p->height = 1; }
static void top_without_height(struct root_plain *p) { p->top.slot = 5; }
static void zero_top_with_key(struct root_plain *p) { p->top.key[31] = 1; }
static void a_tree(struct root_plain *p) { p->height = TREE_MAX_HEIGHT, p->top.slot = 9, p->top.tag[0] = 1; }
static void too_high(struct root_plain *p) { a_tree(p), p->height = TREE_MAX_HEIGHT + 1; }
static void top_at_end(struct root_plain *p) { a_tree(p), p->top.slot = 10; }
static void top_in_roots(struct root_plain *p) { a_tree(p), p->top.slot = 3; }
static void too_many(struct root_plain *p) { full_delta(p), p->delta_count = DELTA_MAX + 1; }
static void far_too_many(struct root_plain *p) { p->delta_count = UINT16_MAX; }
static void index_twice(struct root_plain *p) { full_delta(p), p->delta[55].index = p->delta[54].index; }
static void unordered(struct root_plain *p) { full_delta(p), p->delta[1].index = 0; }
static void delta_at_end(struct root_plain *p) { full_delta(p), p->delta[55].entry.slot = 10; }
static void delta_in_roots(struct root_plain *p) { full_delta(p), p->delta[0].entry.slot = 1; }
static void a_hole(struct root_plain *p) { full_delta(p), p->delta[7].entry = (struct entry){0}; }
static void hole_with_key(struct root_plain *p) { a_hole(p), p->delta[7].entry.key[0] = 1; }
static void hole_with_tag(struct root_plain *p) { a_hole(p), p->delta[7].entry.tag[15] = 1; }
static void uncounted(struct root_plain *p) { full_delta(p), p->delta_count--; }

TEST(authentic_nonsense_is_refused)
{
    static const struct {
        void (*change)(struct root_plain *p);
        int result;
    } cases[] = {
        {nothing, 0}, {full_delta, 0}, {a_tree, 0}, {a_hole, 0}, {largest_size, 0},
        {reserved0, -EPROTO}, {reserved1, -EPROTO}, {reserved2_first, -EPROTO}, {reserved2_last, -EPROTO},
        {reserved3, -EPROTO}, {huge_size, -EPROTO}, {end_in_roots, -EPROTO}, {huge_end, -EPROTO},
        {height_without_top, -EPROTO}, {top_without_height, -EPROTO}, {zero_top_with_key, -EPROTO},
        {too_high, -EPROTO}, {top_at_end, -EPROTO}, {top_in_roots, -EPROTO}, {too_many, -EPROTO},
        {far_too_many, -EPROTO}, {index_twice, -EPROTO}, {unordered, -EPROTO}, {delta_at_end, -EPROTO},
        {delta_in_roots, -EPROTO}, {hole_with_key, -EPROTO}, {hole_with_tag, -EPROTO}, {uncounted, -EPROTO},
    };
    struct keyring *ring = a_ring();

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct root_plain plain = a_root(), opened;
        struct root_slot slot;
        cases[i].change(&plain);
        /* Sealed by hand, because seal_root refuses it too. */
        uint8_t key[KEY_SIZE];
        memcpy(slot.magic, ROOT_MAGIC, sizeof slot.magic);
        CHECK_EQ(random_bytes(slot.salt, SALT_SIZE), 0);
        CHECK_EQ(root_key(ring, object_id, slot.salt, key), 0);
        const struct root_aad aad = root_aad(ring, object_id, 0, &slot);
        const struct gcm_message m = {key, &aad, sizeof aad, &plain, slot.ciphertext, ROOT_PLAIN_SIZE};
        CHECK_EQ(gcm_openssl.encrypt(&m, slot.tag), 0);

        if (!CHECK_EQ(open_root(ring, object_id, 0, &slot, &opened), cases[i].result))
            fprintf(stderr, "case %zu\n", i);
        if (cases[i].result)
            root_is_refused(ring, object_id, 0, &slot, -EPROTO);
        else
            CHECK_MEM_EQ(&opened, &plain, sizeof plain);
        CHECK_EQ(seal_root(ring, object_id, 0, &plain, &slot), cases[i].result ? -EINVAL : 0);
    }
    keyring_destroy(ring);
}

TEST(root_failures_leave_nothing)
{
    struct keyring *ring = a_ring();
    struct root_plain plain = a_root();
    struct root_slot slot;

    memset(&slot, 0xcc, sizeof slot);
    random_fails_in = 1;
    CHECK_EQ(seal_root(ring, object_id, 0, &plain, &slot), -EIO);
    CHECK(is_zero(&slot, sizeof slot));
    keyring_destroy(ring);
}

/* ---- Threads ---- */

enum { THREADS = 4, THREAD_ROUNDS = 20 };

struct worker {
    const struct keyring *ring;
    uint8_t keys[THREAD_ROUNDS * 8][KEY_SIZE];
};

static void *work(void *arg)
{
    struct worker *w = arg;
    struct batch *b = new_batch();

    for (int round = 0; round < THREAD_ROUNDS; round++) {
        struct root_plain plain = a_root(), opened;
        struct root_slot slot;
        CHECK_EQ(seal_nodes(object_id, b->seal, 8), 0);
        take_entries(b);
        for (int i = 0; i < 8; i++)
            memcpy(w->keys[round * 8 + i], b->seal[i].key, KEY_SIZE);
        CHECK_EQ(open_nodes(object_id, b->open, 8), 0);
        CHECK_MEM_EQ(b->opened, b->plain, 8 * NODE_SIZE);
        b->sealed[0][round] ^= 1;
        CHECK_EQ(open_nodes(object_id, b->open, 8), -EBADMSG);
        CHECK_EQ(seal_root(w->ring, object_id, 1, &plain, &slot), 0);
        CHECK_EQ(open_root(w->ring, object_id, 1, &slot, &opened), 0);
        CHECK_MEM_EQ(&opened, &plain, sizeof plain);
    }
    free(b);
    return NULL;
}

TEST(threads_do_not_meet)
{
    static struct worker workers[THREADS];
    static uint8_t keys[THREADS * THREAD_ROUNDS * 8][KEY_SIZE];
    struct keyring *ring = a_ring();

    for (size_t i = 0; i < backends(); i++) {
        pthread_t threads[THREADS];
        backend = all_backends[i];
        for (int t = 0; t < THREADS; t++) {
            workers[t].ring = ring;
            CHECK_EQ(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
        }
        for (int t = 0; t < THREADS; t++) {
            CHECK_EQ(pthread_join(threads[t], NULL), 0);
            memcpy(keys[t * THREAD_ROUNDS * 8], workers[t].keys, sizeof workers[t].keys);
        }
        CHECK(all_differ(keys, THREADS * THREAD_ROUNDS * 8));
    }
    backend = &gcm_openssl;
    keyring_destroy(ring);
}

/* ---- Memory that runs out inside OpenSSL ---- */

static _Thread_local int openssl_fails_in;      /* > 0: the allocation with this number and all later ones fail */

static bool openssl_fails(void)
{
    if (openssl_fails_in > 1)
        openssl_fails_in--;
    return openssl_fails_in == 1;
}

static void *openssl_malloc(size_t size, const char *file, int line)
{
    (void)file, (void)line;
    return openssl_fails() ? NULL : malloc(size);
}

static void *openssl_realloc(void *p, size_t size, const char *file, int line)
{
    (void)file, (void)line;
    return openssl_fails() ? NULL : realloc(p, size);
}

static void openssl_free(void *p, const char *file, int line)
{
    (void)file, (void)line;
    free(p);
}

/* Before OpenSSL allocates anything, or it refuses. */
__attribute__((constructor)) static void watch_openssl(void)
{
    CRYPTO_set_mem_functions(openssl_malloc, openssl_realloc, openssl_free);
}

struct starving {
    const struct keyring *ring;
    int fails_in;
    bool all_went_well;
};

/* On a thread of its own, which has no contexts yet. */
static void *starve(void *arg)
{
    struct starving *s = arg;
    struct batch *b = new_batch();
    struct root_plain plain = a_root(), opened;
    struct root_slot slot = {0};

    openssl_fails_in = s->fails_in + 1;
    int sealed = seal_nodes(object_id, b->seal, 2);
    int root = seal_root(s->ring, object_id, 0, &plain, &slot);
    CHECK_EQ(ERR_peek_error(), 0);
    openssl_fails_in = 0;
    CHECK(sealed == 0 || (sealed == -EIO && nothing_usable(b, 2)));
    CHECK(root == 0 || (root == -EIO && is_zero(&slot, sizeof slot)));
    s->all_went_well = sealed == 0 && root == 0;
    if (sealed == 0) {
        take_entries(b);
        CHECK_EQ(open_nodes(object_id, b->open, 2), 0);
    }
    if (root == 0)
        CHECK_EQ(open_root(s->ring, object_id, 0, &slot, &opened), 0);
    free(b);
    return NULL;
}

TEST(openssl_without_memory)
{
    struct keyring *ring = a_ring();
    struct starving s = {.ring = ring};
    int failures = 0;

    for (s.fails_in = 1; !s.all_went_well && failures < 1000; s.fails_in++, failures++) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, starve, &s), 0);
        CHECK_EQ(pthread_join(thread, NULL), 0);
    }
    CHECK(failures > 5 && failures < 1000);
    keyring_destroy(ring);
}
