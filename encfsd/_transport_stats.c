/* Counters by opcode. Each is an atomic of its own that threads add to without order: sums are right, sets of them need not be of
 * the same instant. */
#include "_transport_internal.h"

#include <errno.h>
#include <stdlib.h>

struct transport_counters {
    struct {
        _Atomic uint64_t native, forwarded, failed, total_ns, latency[LATENCY_BUCKETS];
    } opcode[TRANSPORT_OPCODES];
};

int counters_create(struct transport *t)
{
    t->counters = calloc(1, sizeof *t->counters);
    return t->counters != NULL ? 0 : -ENOMEM;
}

static void add(_Atomic uint64_t *counter, uint64_t n) { atomic_fetch_add_explicit(counter, n, memory_order_relaxed); }

static uint64_t get(const _Atomic uint64_t *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

static unsigned index_of(uint32_t opcode) { return opcode < TRANSPORT_OPCODES ? opcode : 0; }

static void count_latency(struct transport *t, uint32_t opcode, uint64_t since_ns, bool failed)
{
    uint64_t ns = monotonic_ns() - since_ns;

    add(&t->counters->opcode[index_of(opcode)].total_ns, ns);
    add(&t->counters->opcode[index_of(opcode)].latency[latency_bucket(ns)], 1);
    if (failed)
        add(&t->counters->opcode[index_of(opcode)].failed, 1);
}

void count_native(struct message *m, bool failed)
{
    add(&m->transport->counters->opcode[index_of(m->opcode)].native, 1);
    count_latency(m->transport, m->opcode, m->received_ns, failed);
}

/* Uniques of the kernel are even and consecutive. Of two requests in one slot only the later one's latency is measured. */
static size_t slot_of(uint64_t unique) { return (unique >> 1) % IN_FLIGHT; }

void count_forwarded(struct message *m)
{
    struct transport *t = m->transport;
    size_t slot = slot_of(m->unique);

    add(&t->counters->opcode[index_of(m->opcode)].forwarded, 1);
    atomic_store_explicit(&t->forwarded_opcode[slot], m->opcode, memory_order_relaxed);
    atomic_store_explicit(&t->forwarded_ns[slot], m->received_ns, memory_order_relaxed);
    atomic_store_explicit(&t->forwarded_unique[slot], m->unique, memory_order_release);
}

void count_forwarded_reply(struct transport *t, uint64_t unique, bool failed)
{
    size_t slot = slot_of(unique);

    if (atomic_load_explicit(&t->forwarded_unique[slot], memory_order_acquire) != unique)
        return;
    count_latency(t, atomic_load_explicit(&t->forwarded_opcode[slot], memory_order_relaxed),
                  atomic_load_explicit(&t->forwarded_ns[slot], memory_order_relaxed), failed);
}

void transport_stats(struct transport *t, struct transport_opcode stats[TRANSPORT_OPCODES])
{
    for (int i = 0; i < TRANSPORT_OPCODES; i++) {
        stats[i].native = get(&t->counters->opcode[i].native);
        stats[i].forwarded = get(&t->counters->opcode[i].forwarded);
        stats[i].failed = get(&t->counters->opcode[i].failed);
        stats[i].total_ns = get(&t->counters->opcode[i].total_ns);
        for (int b = 0; b < LATENCY_BUCKETS; b++)
            stats[i].latency[b] = get(&t->counters->opcode[i].latency[b]);
    }
}
