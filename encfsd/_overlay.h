/* What changed since a commit, by index of data node: entries that were written but that no root holds yet, and ranges that were
 * cut (truncated or punched). An entry lies over a cut. No locks: the object's lock guards them. */
#ifndef ENCFSD_OVERLAY_H
#define ENCFSD_OVERLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_format.h"

/* A list of slots, or of anything else that fits 64 bits. All zero: empty. */
struct slots {
    uint64_t *at;
    size_t count, room;
};
int slots_push(struct slots *s, uint64_t slot);         /* 0 or -ENOMEM */
void slots_free(struct slots *s);

/* Something that has an index. */
struct keyed {
    uint64_t index;
    void *item;
};
/* Ascending by index; equal ones stay in order. `scratch` has room for n, too. */
void keyed_sort(struct keyed *at, struct keyed *scratch, size_t n);

/* A list of entries with their indices. All zero: empty. */
struct changes {
    struct delta_entry *at;
    size_t count, room;
};
int changes_reserve(struct changes *c, size_t n);        /* room for n more; 0 or -ENOMEM */
int changes_push(struct changes *c, uint64_t index, const struct entry *entry);    /* 0 or -ENOMEM */
void changes_sort(struct changes *c);                   /* ascending by index */
void changes_free(struct changes *c);                   /* wipes: entries hold keys */

/* Entries in the order in which they were first put, so that what a sequential writer wrote needs no sorting, and a hash of their
 * positions. A dropped entry stays in its place with slot 0. All zero: empty. */
struct overlay {
    struct changes list;
    size_t live;                        /* entries of the list whose slot is not 0 */
    uint32_t *hash;                     /* position + 1, 0: free; linear probing */
    size_t hash_size;                   /* power of two, at least twice list.room */
};
int overlay_reserve(struct overlay *v, size_t n);       /* n puts cannot fail now; 0 or -ENOMEM */
const struct entry *overlay_get(const struct overlay *v, uint64_t index);              /* NULL: none */
uint64_t overlay_put(struct overlay *v, uint64_t index, const struct entry *entry);    /* the slot replaced, or 0 */
uint64_t overlay_drop(struct overlay *v, uint64_t index);                              /* the slot dropped, or 0 */
void overlay_free(struct overlay *v);

/* Disjoint ranges of indices, ascending, that do not touch. All zero: empty. */
struct range {
    uint64_t first, last;               /* [first, last) */
};
struct cuts {
    struct range *at;
    size_t count, room;
};
int cuts_reserve(struct cuts *c, size_t n);             /* n adds cannot fail now; 0 or -ENOMEM */
void cuts_add(struct cuts *c, uint64_t first, uint64_t last);
const struct range *cuts_find(const struct cuts *c, uint64_t index);                   /* the range that holds index, or NULL */
uint64_t cuts_next(const struct cuts *c, uint64_t index);       /* first index >= `index` that is cut; UINT64_MAX: none */
bool cuts_hold(const struct cuts *c, uint64_t first, uint64_t last);                   /* all of [first, last) is cut */
bool cuts_touch(const struct cuts *c, uint64_t first, uint64_t last);                  /* some of [first, last) is cut */
void cuts_free(struct cuts *c);

#endif
