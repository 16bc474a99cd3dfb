#include "_overlay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "_seal.h"

enum {
    FIRST_ROOM = 64,            /* entries of a list that begins to grow */
    CLUSTER = 16,               /* neighbouring indices share a cache line of the hash */
};

/* Grows an array to hold `needed` items, by doubling. Returns 0 or -ENOMEM. */
static int grow(void **at, size_t *room, size_t needed, size_t item)
{
    if (needed <= *room)
        return 0;
    size_t wanted = *room ? *room : FIRST_ROOM;
    while (wanted < needed)
        wanted *= 2;
    void *grown = realloc(*at, wanted * item);
    if (!grown)
        return -ENOMEM;
    *at = grown;
    *room = wanted;
    return 0;
}

/* ---- Slots ---- */

int slots_push(struct slots *s, uint64_t slot)
{
    void *at = s->at;
    int rc = grow(&at, &s->room, s->count + 1, sizeof *s->at);

    s->at = at;
    if (!rc)
        s->at[s->count++] = slot;
    return rc;
}

void slots_free(struct slots *s)
{
    free(s->at);
    *s = (struct slots){0};
}

/* ---- Order ---- */

/* Digit by digit from the lowest: a few steps an item, none of which the processor has to guess, and no call. */
void keyed_sort(struct keyed *at, struct keyed *scratch, size_t n)
{
    enum { DIGIT = 8, VALUES = 1 << DIGIT };
    struct keyed *from = at, *to = scratch;
    uint64_t differ = 0;

    for (size_t i = 1; i < n; i++)
        differ |= at[i].index ^ at[0].index;
    for (unsigned shift = 0; shift < 64 && differ >> shift; shift += DIGIT) {
        uint32_t first[VALUES] = {0}, next = 0;
        if ((differ >> shift) % VALUES == 0)
            continue;
        for (size_t i = 0; i < n; i++)
            first[(from[i].index >> shift) % VALUES]++;
        for (unsigned value = 0; value < VALUES; value++) {
            uint32_t count = first[value];
            first[value] = next;
            next += count;
        }
        for (size_t i = 0; i < n; i++)
            to[first[(from[i].index >> shift) % VALUES]++] = from[i];
        struct keyed *sorted = to;
        to = from;
        from = sorted;
    }
    if (from != at)
        memcpy(at, from, n * sizeof *at);
}

/* ---- Changes ---- */

int changes_reserve(struct changes *c, size_t n)
{
    void *at = c->at;
    int rc = grow(&at, &c->room, c->count + n, sizeof *c->at);

    c->at = at;
    return rc;
}

int changes_push(struct changes *c, uint64_t index, const struct entry *entry)
{
    int rc = changes_reserve(c, 1);

    if (!rc)
        c->at[c->count++] = (struct delta_entry){.index = index, .entry = *entry};
    return rc;
}

static int by_index(const void *a, const void *b)
{
    const struct delta_entry *x = a, *y = b;

    return x->index < y->index ? -1 : x->index > y->index;
}

/* Moves the entries to a new array in order. Returns false if there is no memory for it. */
static bool sort_by_keys(struct changes *c)
{
    struct keyed *keyed = malloc(2 * c->count * sizeof *keyed);
    struct delta_entry *sorted = keyed ? malloc(c->room * sizeof *sorted) : NULL;

    for (size_t i = 0; sorted && i < c->count; i++)
        keyed[i] = (struct keyed){c->at[i].index, &c->at[i]};
    if (sorted) {
        keyed_sort(keyed, keyed + c->count, c->count);
        for (size_t i = 0; i < c->count; i++)
            sorted[i] = *(struct delta_entry *)keyed[i].item;
        secret_wipe(c->at, c->count * sizeof *c->at);
        free(c->at);
        c->at = sorted;
    }
    free(keyed);
    return sorted;
}

void changes_sort(struct changes *c)
{
    for (size_t i = 1; i < c->count; i++)
        if (c->at[i].index < c->at[i - 1].index) {
            if (c->count <= FIRST_ROOM || !sort_by_keys(c))
                qsort(c->at, c->count, sizeof *c->at, by_index);
            return;
        }
}

void changes_free(struct changes *c)
{
    if (c->at)
        secret_wipe(c->at, c->count * sizeof *c->at);
    free(c->at);
    *c = (struct changes){0};
}

/* ---- Overlay ---- */

static size_t home_of(const struct overlay *v, uint64_t index)
{
    uint64_t mixed = index / CLUSTER * 0x9e3779b97f4a7c15u >> 32;

    return (size_t)(mixed * CLUSTER + index % CLUSTER) & (v->hash_size - 1);
}

/* Where the hash names `index`, or the free place where it would. */
static uint32_t *place_of(const struct overlay *v, uint64_t index)
{
    size_t i = home_of(v, index);

    while (v->hash[i] && v->list.at[v->hash[i] - 1].index != index)
        i = (i + 1) & (v->hash_size - 1);
    return &v->hash[i];
}

int overlay_reserve(struct overlay *v, size_t n)
{
    int rc = changes_reserve(&v->list, n);

    if (rc || v->hash_size >= 2 * v->list.room)
        return rc;
    if (v->list.room > UINT32_MAX / 2)
        return -ENOMEM;
    uint32_t *hash = calloc(2 * v->list.room, sizeof *hash);
    if (!hash)
        return -ENOMEM;
    free(v->hash);
    v->hash = hash;
    v->hash_size = 2 * v->list.room;
    for (size_t i = 0; i < v->list.count; i++)
        *place_of(v, v->list.at[i].index) = (uint32_t)(i + 1);
    return 0;
}

const struct entry *overlay_get(const struct overlay *v, uint64_t index)
{
    if (v->live == 0)
        return NULL;
    uint32_t position = *place_of(v, index);
    const struct entry *e = position ? &v->list.at[position - 1].entry : NULL;

    return e && e->slot ? e : NULL;
}

uint64_t overlay_put(struct overlay *v, uint64_t index, const struct entry *entry)
{
    uint32_t *place = place_of(v, index);
    uint64_t old = 0;

    if (*place) {
        struct entry *e = &v->list.at[*place - 1].entry;
        old = e->slot;
        *e = *entry;
    } else {
        v->list.at[v->list.count++] = (struct delta_entry){.index = index, .entry = *entry};
        *place = (uint32_t)v->list.count;
    }
    v->live += old == 0;
    return old;
}

uint64_t overlay_drop(struct overlay *v, uint64_t index)
{
    uint32_t position = v->live ? *place_of(v, index) : 0;
    uint64_t old = 0;

    if (position) {
        struct entry *e = &v->list.at[position - 1].entry;
        old = e->slot;
        *e = (struct entry){0};
        v->live -= old != 0;
    }
    return old;
}

void overlay_free(struct overlay *v)
{
    changes_free(&v->list);
    free(v->hash);
    *v = (struct overlay){0};
}

/* ---- Cuts ---- */

int cuts_reserve(struct cuts *c, size_t n)
{
    void *at = c->at;
    int rc = grow(&at, &c->room, c->count + n, sizeof *c->at);

    c->at = at;
    return rc;
}

/* Number of ranges that end before `index` (those that end exactly there included if `touching` is false). */
static size_t ranges_before(const struct cuts *c, uint64_t index, bool touching)
{
    size_t low = 0, high = c->count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (touching ? c->at[middle].last < index : c->at[middle].last <= index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void cuts_add(struct cuts *c, uint64_t first, uint64_t last)
{
    size_t from = ranges_before(c, first, true), to = from;

    for (; to < c->count && c->at[to].first <= last; to++) {
        if (c->at[to].first < first)
            first = c->at[to].first;
        if (c->at[to].last > last)
            last = c->at[to].last;
    }
    memmove(&c->at[from + 1], &c->at[to], (c->count - to) * sizeof *c->at);
    c->at[from] = (struct range){first, last};
    c->count = c->count - (to - from) + 1;
}

const struct range *cuts_find(const struct cuts *c, uint64_t index)
{
    size_t i = ranges_before(c, index, false);

    return i < c->count && c->at[i].first <= index ? &c->at[i] : NULL;
}

uint64_t cuts_next(const struct cuts *c, uint64_t index)
{
    size_t i = ranges_before(c, index, false);

    if (i == c->count)
        return UINT64_MAX;
    return c->at[i].first > index ? c->at[i].first : index;
}

bool cuts_hold(const struct cuts *c, uint64_t first, uint64_t last)
{
    const struct range *r = cuts_find(c, first);

    return r && r->last >= last;
}

bool cuts_touch(const struct cuts *c, uint64_t first, uint64_t last)
{
    size_t i = ranges_before(c, first, false);

    return i < c->count && c->at[i].first < last;
}

void cuts_free(struct cuts *c)
{
    free(c->at);
    *c = (struct cuts){0};
}
