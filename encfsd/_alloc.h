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

/* end: first slot never handed out (ROOT_SLOTS for a new file). all_known: there is nothing below end but roots.
 * Returns 0 or -ENOMEM. */
int alloc_create(struct alloc **a, uint64_t end, bool all_known);
void alloc_destroy(struct alloc *a);

/* One slot for a data node. `near`: slot that the node should lie close to (its old place, or its neighbour's + 1), 0: none.
 * Prefers a free slot within NEAR_WINDOW of `near`, then the end, where one slot in 17 is skipped as slack for later
 * overwrites nearby. Returns 0 or -ENOMEM. */
int alloc_data(struct alloc *a, uint64_t near, uint64_t *slot);

/* A contiguous run of n slots (tree nodes of a commit, or a large sequential overwrite): first fit, else at the end. */
int alloc_run(struct alloc *a, uint64_t n, uint64_t *first);

/* Gives back a slot that no root ever referenced (a node of the current commit that was rewritten or dropped). */
void alloc_undo(struct alloc *a, uint64_t slot);

/* Slot replaced by the commit numbered `commit` (ascending): quarantined until alloc_release. Returns 0 or -ENOMEM. */
int alloc_retire(struct alloc *a, uint64_t slot, uint64_t commit);

/* Roots older than `commit` are no longer recoverable: what commits <= `commit` retired becomes free. Deferred while a
 * scan runs. */
void alloc_release(struct alloc *a, uint64_t commit);

/* Scan protocol: begin (snapshot: from now on nothing is released), mark each slot the pinned root reaches, end: every
 * slot below the end as of begin that was neither marked, nor handed out since, nor quarantined becomes free.
 * Returns 0 or -ENOMEM / -EUCLEAN (slot out of range or marked twice: the tree is damaged). */
int alloc_scan_begin(struct alloc *a);
int alloc_scan_mark(struct alloc *a, uint64_t slot);
int alloc_scan_end(struct alloc *a);
void alloc_scan_cancel(struct alloc *a);
bool alloc_known(const struct alloc *a);            /* every slot below the end is accounted for */

uint64_t alloc_end(const struct alloc *a);
uint64_t alloc_free_below_end(const struct alloc *a);
uint64_t alloc_quarantined(const struct alloc *a);

/* Finds free runs of at least `min` slots that were freed and not reported since: space to punch. Returns false if none. */
bool alloc_next_reclaim(struct alloc *a, uint64_t min, uint64_t *first, uint64_t *n);

/* Lowers the end past trailing free slots; returns the new end. Truncate the file only after the next barrier. */
uint64_t alloc_trim(struct alloc *a);

#endif
