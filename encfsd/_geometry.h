/* Pure arithmetic of the tree: which node holds which index. No state, no I/O. */
#ifndef ENCFSD_GEOMETRY_H
#define ENCFSD_GEOMETRY_H

#include "_format.h"

/* Number of data nodes below a full tree node of `level` (1..TREE_MAX_HEIGHT); level 0: one. */
static inline uint64_t tree_span(unsigned level)
{
    uint64_t span = 1;
    while (level--)
        span *= TREE_FANOUT;
    return span;
}

/* Lowest height whose tree can hold data node `index`. */
static inline unsigned tree_height_for(uint64_t index)
{
    unsigned height = 1;
    while (index /= TREE_FANOUT)
        height++;
    return height;
}

/* Index, within `level`, of the ancestor of data node `index`. */
static inline uint64_t tree_ancestor(uint64_t index, unsigned level) { return index / tree_span(level); }

/* Number of nodes that `size` bytes take. */
static inline uint64_t nodes_for(uint64_t size) { return size / NODE_SIZE + (size % NODE_SIZE != 0); }

/* Orders two roots of one object: <0, 0, >0. */
static inline int root_order(uint64_t epoch_a, uint64_t counter_a, uint64_t epoch_b, uint64_t counter_b)
{
    if (epoch_a != epoch_b)
        return epoch_a < epoch_b ? -1 : 1;
    return counter_a < counter_b ? -1 : counter_a > counter_b;
}

#endif
