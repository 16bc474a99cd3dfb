/* Two bits after the leading one choose among the four buckets of a power of two; the first four buckets are exact. */
#include "_latency.h"

#include <time.h>

uint64_t monotonic_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

unsigned latency_bucket(uint64_t ns)
{
    if (ns < 4)
        return (unsigned)ns;
    unsigned exponent = 63 - (unsigned)__builtin_clzll(ns);
    unsigned bucket = 4 * (exponent - 1) + (unsigned)(ns >> (exponent - 2) & 3);
    return bucket < LATENCY_BUCKETS ? bucket : LATENCY_BUCKETS - 1;
}

uint64_t latency_bucket_ns(unsigned bucket)
{
    return bucket < 4 ? bucket : (uint64_t)(4 + bucket % 4) << (bucket / 4 - 1);
}
