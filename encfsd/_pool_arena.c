/* The pool's memory. Slots and descriptors are two ranges of address space, reserved once for the largest list. */
#include "_pool_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>

#ifndef MADV_POPULATE_WRITE             /* Debian 12's headers are older than the kernels this runs on */
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24         /* as MADV_DONTNEED, in locked memory too */
#endif

enum {
    HUGE_PAGE = 2 << 20,
    PIECE = 4 << 20,                    /* bytes that a thread faults in at a time */
    FAULT_THREADS = 16,                 /* at most */
};

/* ---- Sizes ---- */

static size_t whole_pages(size_t bytes) { return (bytes + NODE_SIZE - 1) / NODE_SIZE * NODE_SIZE; }

size_t pool_footprint(size_t nodes) { return nodes * NODE_SIZE + whole_pages(nodes * sizeof(struct node)); }

size_t pool_nodes_in(size_t bytes)
{
    size_t nodes = bytes / (NODE_SIZE + sizeof(struct node));
    return nodes && pool_footprint(nodes) > bytes ? nodes - 1 : nodes;      /* the descriptors' last page is not full */
}

/* ---- What the kernel can do ---- */

bool arena_cow_works(void)
{
    volatile uint8_t *page = mmap(NULL, NODE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return false;
    page[0] = 1;
    bool works = madvise((void *)page, NODE_SIZE, MADV_DONTNEED_LOCKED) == 0 && page[0] == 0;
    munmap((void *)page, NODE_SIZE);
    return works;
}

const char *arena_hugepages_refused(void)
{
    char mode[64] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (!file)
        return "this kernel has no transparent huge pages";
    bool read = fgets(mode, sizeof mode, file) != NULL;
    fclose(file);
    return read && strstr(mode, "[never]") ? "they are switched off in /sys/kernel/mm/transparent_hugepage/enabled" : NULL;
}

/* ---- Address space and memory ---- */

/* Address space without memory behind it. */
static void *reserve_space(size_t bytes)
{
    void *space = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return space == MAP_FAILED ? NULL : space;
}

int arena_create(struct pool *pool)
{
    if (!pool->max_capacity)
        return 0;
    if (!(pool->node = reserve_space(whole_pages(pool->max_capacity * sizeof(struct node)))))
        return -ENOMEM;
    if (pool->strategy == POOL_MALLOC)
        return 0;
    pool->slot_space_bytes = pool->max_capacity * NODE_SIZE + HUGE_PAGE;
    if (!(pool->slot_space = reserve_space(pool->slot_space_bytes)))
        return -ENOMEM;
    pool->slot = (uint8_t *)(((uintptr_t)pool->slot_space + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    return 0;
}

struct range {
    uint8_t *first;
    size_t bytes;
};

/* Descriptors or slots with numbers first..last - 1, rounded outwards to pages. */
static struct range range_of(void *base, size_t size, size_t first, size_t last)
{
    size_t from = first * size / NODE_SIZE * NODE_SIZE;
    return (struct range){(uint8_t *)base + from, whole_pages(last * size) - from};
}

/* Usable memory that no core dump shows. Under strict overcommit it is refused here, not when it is touched. */
static int make_usable(struct range r)
{
    return mprotect(r.first, r.bytes, PROT_READ | PROT_WRITE) || madvise(r.first, r.bytes, MADV_DONTDUMP) ? -ENOMEM : 0;
}

/* Accounts for the whole range at once, but locks pages only as they come: so it can fail by the limit alone. */
static int lock_range(struct range r)
{
    if (mlock2(r.first, r.bytes, MLOCK_ONFAULT) == 0)
        return 0;
    return errno == EPERM || errno == ENOMEM ? -EPERM : -ENOMEM;
}

/* ---- Prefault ---- */

struct fault_in {
    struct range range[2];              /* descriptors, slots */
    atomic_size_t next, done;           /* bytes of both, one after the other: claimed, in memory */
    atomic_bool failed;
};

/* Also in use by others perhaps: so what is touched must not change, nor may their changes be lost. */
static void touch(struct range r)
{
    for (size_t at = 0; at < r.bytes; at += NODE_SIZE)
        atomic_fetch_or_explicit((_Atomic uint8_t *)(r.first + at), 0, memory_order_relaxed);
}

static bool fault_in_piece(struct range r)
{
    while (madvise(r.first, r.bytes, MADV_POPULATE_WRITE)) {
        if (errno == EINVAL)            /* before Linux 5.14 */
            return touch(r), true;
        if (errno != EINTR && errno != EAGAIN)
            return false;
    }
    return true;
}

static bool next_piece(struct fault_in *f, struct range *piece)
{
    size_t at = atomic_fetch_add(&f->next, PIECE);
    for (int i = 0; i < 2; i++) {
        size_t room = (f->range[i].bytes + PIECE - 1) / PIECE * PIECE;      /* no piece lies in both */
        if (at < room) {
            *piece = (struct range){f->range[i].first + at, f->range[i].bytes - at < PIECE ? f->range[i].bytes - at : PIECE};
            return true;
        }
        at -= room;
    }
    return false;
}

static bool fault_in_one(struct fault_in *f)
{
    struct range piece;
    if (atomic_load(&f->failed) || !next_piece(f, &piece))
        return false;
    if (!fault_in_piece(piece))
        atomic_store(&f->failed, true);
    atomic_fetch_add(&f->done, piece.bytes);
    return true;
}

static void *fault_in_all(void *arg)
{
    while (fault_in_one(arg))
        ;
    return NULL;
}

/* On all CPUs: zeroing is bound by memory bandwidth, which one CPU does not reach. */
static int fault_in(const struct pool *pool, struct range descriptors, struct range slots)
{
    struct fault_in f = {.range = {descriptors, slots}};
    pthread_t thread[FAULT_THREADS];
    int wanted = get_nprocs() - 1 < FAULT_THREADS ? get_nprocs() - 1 : FAULT_THREADS, threads = 0;
    size_t total = descriptors.bytes + slots.bytes;

    while (threads < wanted && pthread_create(&thread[threads], NULL, fault_in_all, &f) == 0)
        threads++;
    while (fault_in_one(&f))
        if (pool->progress)
            pool->progress(pool->progress_arg, atomic_load(&f.done), total);
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    if (atomic_load(&f.failed))
        return -ENOMEM;
    if (pool->progress)
        pool->progress(pool->progress_arg, total, total);
    return 0;
}

int arena_commit(struct pool *pool, size_t capacity)
{
    if (capacity <= pool->committed)
        return 0;
    struct range descriptors = range_of(pool->node, sizeof(struct node), pool->committed, capacity), slots = {0};
    int rc = make_usable(descriptors);
    if (pool->slot) {
        slots = range_of(pool->slot, NODE_SIZE, pool->committed, capacity);
        rc = rc ? rc : make_usable(slots);
        if (!rc && pool->hugepages)
            madvise(slots.first, slots.bytes, MADV_HUGEPAGE);       /* asked before: arena_hugepages_refused */
    }
    if (!rc && pool->locked)
        rc = lock_range(descriptors);
    if (!rc && pool->locked)
        rc = lock_range(slots);
    if (!rc && pool->prefault && pool->slot)
        rc = fault_in(pool, descriptors, slots);
    if (!rc)
        pool->committed = capacity;
    return rc;
}

/* ---- Wiping ---- */

void arena_return(const struct pool *pool, size_t first, size_t n)
{
    if (!pool->slot || !madvise(pool->slot + first * NODE_SIZE, n * NODE_SIZE, MADV_DONTNEED_LOCKED))
        return;
    for (size_t i = first; i < first + n; i++) {
        slot_access(&pool->node[i]);
        explicit_bzero(pool->node[i].page, NODE_SIZE);
    }
}

void arena_prepare_retiring(const struct pool *pool, struct node *node)
{
    if (!pool->slot || node < atomic_load_explicit(&pool->end, memory_order_relaxed))
        return;
    slot_access(node);
    arena_return(pool, number_of(pool, node), 1);
    node->stale = false;
    slot_close(node);
}

static int by_address(const void *a, const void *b)
{
    const struct node *x = *(struct node *const *)a, *y = *(struct node *const *)b;
    return (x > y) - (x < y);
}

void arena_wipe(const struct pool *pool, struct node **node, size_t n)
{
    for (size_t i = 0; i < n; i++)
        slot_access(node[i]);
    if (pool->strategy == POOL_POOLING_COW) {
        qsort(node, n, sizeof(struct node *), by_address);
        for (size_t i = 0, run; i < n; i += run) {
            for (run = 1; i + run < n && node[i + run] == node[i] + run;)
                run++;
            arena_return(pool, number_of(pool, node[i]), run);
        }
    } else {
        for (size_t i = 0; i < n; i++)
            explicit_bzero(node[i]->page, NODE_SIZE);
    }
    for (size_t i = 0; i < n; i++) {
        node[i]->stale = false;
        slot_close(node[i]);
    }
}

void arena_destroy(struct pool *pool)
{
    for (size_t i = 0; i < pool->used; i++) {
        struct node *node = &pool->node[i];
        if (!node->page)
            continue;
        slot_access(node);
        if (node->stale)
            explicit_bzero(node->page, NODE_SIZE);
        if (!pool->slot)
            free(node->page);           /* a leaked one */
    }
    if (pool->slot_space)
        munmap(pool->slot_space, pool->slot_space_bytes);
    if (pool->node)
        munmap(pool->node, whole_pages(pool->max_capacity * sizeof(struct node)));
}
