/* Slot allocator of one backing file: a bitmap in memory, never stored (docs/format.md, "Free map"). Pure arithmetic, no
 * I/O; the owner (an object) serialises all calls.
 *
 * States of a slot: used; quarantined (replaced by commit N, still reachable from an older root that recovery may choose);
 * free. On open every slot below `end` counts as used until a scan of the tree has said which are; what is released in
 * this mount is known to be free at once. */
#ifndef ENCFSD_ALLOC_H
#define ENCFSD_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct alloc;

/* end: first slot never handed out (ROOT_SLOTS for a new file). all_known: there is nothing below end but roots, the rest is
 * free. Returns 0 or -ENOMEM. */
int alloc_create(struct alloc **a, uint64_t end, bool all_known);
void alloc_destroy(struct alloc *a);                /* NULL is allowed */

/* One slot for a data node. `near`: slot that the node should lie close to (its old place, or its neighbour's + 1), 0: none.
 * Takes the closest free slot within 256 of `near`; else, if more than a quarter of the slots is free, any of those; else
 * the end. There one slot in 17 is left free as slack, so that later overwrites find a place nearby; an append does not
 * take the slack in front of it. Returns 0 or -ENOMEM. */
int alloc_data(struct alloc *a, uint64_t near, uint64_t *slot);

/* A contiguous run of n >= 1 slots (tree nodes of a commit, or a large sequential write): the next free run that a bounded
 * search finds, else at the end. Returns 0 or -ENOMEM. */
int alloc_run(struct alloc *a, uint64_t n, uint64_t *first);

/* Gives back a slot that no root ever referenced (a node of the current commit that was rewritten or dropped). */
void alloc_undo(struct alloc *a, uint64_t slot);

/* Slot replaced by the commit numbered `commit` (not below earlier ones): quarantined until alloc_release. Retire a slot
 * once, for a commit that will not be taken back. Returns 0, or -ENOMEM: the slot then counts as in use until the next open. */
int alloc_retire(struct alloc *a, uint64_t slot, uint64_t commit);

/* Roots older than `commit` are no longer recoverable: what commits <= `commit` retired becomes free. Deferred while a
 * scan runs. */
void alloc_release(struct alloc *a, uint64_t commit);

/* Scan protocol: begin (from now on releases wait), mark each slot that the pinned root reaches, end: every slot that this
 * open found below the end, that was not marked and that this mount neither handed out, retired nor freed becomes free.
 * So slots of commits that the pinned root does not hold yet are safe. Cancel, or end with -EUCLEAN, frees nothing.
 * begin returns 0 or -ENOMEM; mark and end 0 or -EUCLEAN (a slot out of range, free or marked twice: the tree is damaged).
 * After begin exactly one of end and cancel must follow. */
int alloc_scan_begin(struct alloc *a);
int alloc_scan_mark(struct alloc *a, uint64_t slot);
int alloc_scan_end(struct alloc *a);
void alloc_scan_cancel(struct alloc *a);
bool alloc_known(const struct alloc *a);            /* every slot below the end is accounted for */

uint64_t alloc_end(const struct alloc *a);
uint64_t alloc_free_below_end(const struct alloc *a);
uint64_t alloc_quarantined(const struct alloc *a);

/* Finds a free run of at least `min` slots, `min` of which were freed and not reported since: space to punch. Runs are
 * found in whole groups of 64 slots, by a bounded search; once that found nothing, it starts again (where it stopped) when
 * `min` more slots have come free in whole groups. Returns false if it found none: space may be given back late, never in
 * use. The run stays free: nothing may be allocated before it is punched, so keep the owner's lock until then. */
bool alloc_next_reclaim(struct alloc *a, uint64_t min, uint64_t *first, uint64_t *n);

/* Lowers the end past trailing free slots; returns the new end. Truncate the file only after the next barrier, to the end
 * as it is then. */
uint64_t alloc_trim(struct alloc *a);

#endif
