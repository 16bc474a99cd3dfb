/* SipHash-2-4, 64-bit result: a keyed hash of short strings that whoever chooses the strings cannot make collide. */
#ifndef ENCFSD_SIPHASH_H
#define ENCFSD_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

/* Hashes `size` bytes of `data` under a 16-byte key. Never fails. */
uint64_t siphash24(const uint8_t key[16], const void *data, size_t size);

#endif
