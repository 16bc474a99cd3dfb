/* Clock and histogram of latencies: four buckets for each power of two of nanoseconds. */
#ifndef ENCFSD_LATENCY_H
#define ENCFSD_LATENCY_H

#include <stdint.h>

enum { LATENCY_BUCKETS = 128 };         /* of a histogram; bucket b counts from latency_bucket_ns(b) up to, but not including, that of b + 1 */

/* CLOCK_MONOTONIC. */
uint64_t monotonic_ns(void);

/* The bucket that a latency falls into; the last one takes all that is longer. */
unsigned latency_bucket(uint64_t ns);
/* Lower bound of a bucket, in ns. */
uint64_t latency_bucket_ns(unsigned bucket);

#endif
