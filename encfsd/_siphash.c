/* SipHash-2-4 after the paper of Aumasson and Bernstein. OpenSSL has it too, but one EVP_MAC call costs more than the
 * whole lookup of a name that it would be part of. */
#include "_siphash.h"

#include <string.h>

struct state {
    uint64_t a, b, c, d;
};

static uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static void round_once(struct state *s)
{
    s->a += s->b;
    s->c += s->d;
    s->b = rotate(s->b, 13) ^ s->a;
    s->d = rotate(s->d, 16) ^ s->c;
    s->a = rotate(s->a, 32);
    s->c += s->b;
    s->a += s->d;
    s->b = rotate(s->b, 17) ^ s->c;
    s->d = rotate(s->d, 21) ^ s->a;
    s->c = rotate(s->c, 32);
}

static void compress(struct state *s, uint64_t word)
{
    s->d ^= word;
    round_once(s);
    round_once(s);
    s->a ^= word;
}

uint64_t siphash24(const uint8_t key[16], const void *data, size_t size)
{
    const uint8_t *p = data;
    uint64_t k0, k1, word;

    memcpy(&k0, key, 8);
    memcpy(&k1, key + 8, 8);
    struct state s = {
        k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d,
        k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573,
    };
    for (size_t i = 0; i + 8 <= size; i += 8) {
        memcpy(&word, p + i, 8);
        compress(&s, word);
    }
    word = 0;
    if (size % 8 != 0)
        memcpy(&word, p + size - size % 8, size % 8);
    compress(&s, word | (uint64_t)size << 56);
    s.c ^= 0xff;
    for (int i = 0; i < 4; i++)
        round_once(&s);
    return s.a ^ s.b ^ s.c ^ s.d;
}
