/* On-disk structures of one Merkle object. The specification is docs/format.md; sizes are asserted here.
 * All integers are little-endian; every supported host is little-endian, which is asserted below. */
#ifndef ENCFSD_FORMAT_H
#define ENCFSD_FORMAT_H

#include <assert.h>
#include <stdint.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

enum {
    NODE_SIZE = 4096,       /* bytes: one slot of a backing file, one data node, one tree node */
    ROOT_SLOTS = 4,         /* slots 0..3 of every backing file hold roots (decision 0001) */
    TREE_FANOUT = 73,       /* entries of a tree node: 73 * 56 = 4088, 8 reserved bytes */
    TREE_MAX_HEIGHT = 9,    /* 73^9 > 2^51 data nodes, the largest index of a 2^63-byte object */
    DELTA_MAX = 56,         /* entries that a root can carry outside the tree */
    KEY_SIZE = 32,
    TAG_SIZE = 16,
    ID_SIZE = 16,           /* object id, volume id, instance id */
    SALT_SIZE = 32,         /* R: names a root */
    ROOT_PLAIN_SIZE = 4040,
    FORMAT_VERSION = 1,
};

#define OBJECT_MAX_SIZE INT64_MAX               /* bytes */
#define ROOT_MAGIC "ENCFSD\x01\x00"             /* 6 letters, format version u16: 8 bytes */

/* Where a child lies, the key it was sealed with, its tag. All zero: a hole (slot 0 never holds a node). */
struct entry {
    uint64_t slot;
    uint8_t key[KEY_SIZE];
    uint8_t tag[TAG_SIZE];
};
static_assert(sizeof(struct entry) == 56, "docs/format.md: entry");

struct tree_node {
    struct entry child[TREE_FANOUT];
    uint8_t reserved[8];                        /* zero, else the node is refused */
};
static_assert(sizeof(struct tree_node) == NODE_SIZE, "docs/format.md: tree node");

/* A data node that the tree does not hold yet; entry.slot == 0: the node became a hole. */
struct delta_entry {
    uint64_t index;
    struct entry entry;
};
static_assert(sizeof(struct delta_entry) == 64, "docs/format.md: delta entry");

/* The plaintext of a root. `size`, the times and `nodes` are the object's attributes at this commit. */
struct root_plain {
    uint64_t epoch;                             /* mount epoch; roots are ordered by (epoch, counter) */
    uint64_t counter;                           /* of this object; exceeds every authenticated one seen */
    uint8_t instance[ID_SIZE];                  /* random for each mount: tells two writers apart */
    uint8_t previous[SALT_SIZE];                /* R of the root this one was built on; zero for the first */
    uint64_t size;                              /* bytes */
    int64_t atime, mtime, ctime;                /* ns since 1970, any sign */
    uint64_t end;                               /* first slot that the allocator never handed out */
    uint64_t nodes;                             /* data nodes that are not holes */
    uint8_t height;                             /* 0: no tree, `top` is zero */
    uint8_t reserved0;
    uint16_t delta_count;                       /* at most DELTA_MAX, ascending by index, no index twice */
    uint32_t reserved1;
    struct entry top;                           /* the tree node of level `height` */
    uint8_t reserved2[272];
    struct delta_entry delta[DELTA_MAX];
    uint8_t reserved3[8];
};
static_assert(sizeof(struct root_plain) == ROOT_PLAIN_SIZE, "docs/format.md: root plaintext");

/* A root slot as it lies in the backing file. Key: F(KO, "root", salt); nonce zero;
 * AAD: magic 8 | volume id 16 | object id 16 | slot index u64 | salt 32 (80 bytes). */
struct root_slot {
    uint8_t magic[8];
    uint8_t salt[SALT_SIZE];
    uint8_t tag[TAG_SIZE];
    uint8_t ciphertext[ROOT_PLAIN_SIZE];
};
static_assert(sizeof(struct root_slot) == NODE_SIZE, "docs/format.md: root slot");

/* AAD of a node. Its key is used for this one message, so its place is authenticated by the entry that holds the key. */
enum node_kind { NODE_DATA = 1, NODE_TREE = 2 };
struct node_aad {
    uint16_t version;                           /* FORMAT_VERSION */
    uint8_t kind;                               /* enum node_kind */
    uint8_t level;                              /* 0 for data, 1.. for tree nodes */
    uint8_t object_id[ID_SIZE];
};
static_assert(sizeof(struct node_aad) == 20, "docs/format.md: node AAD");

/* Names one exact root of one object; lies in object rows and in the trusted state record. */
struct object_record {
    uint64_t epoch, counter;
    uint8_t salt[SALT_SIZE];
};

#endif
