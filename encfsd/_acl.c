/* POSIX 1003.1e ACLs (draft 17, withdrawn, but what Linux does). */
#include "_acl.h"

#include <errno.h>
#include <string.h>

enum {
    ACL_VERSION = 2,
    TAG_USER_OBJ = 0x01,
    TAG_USER = 0x02,
    TAG_GROUP_OBJ = 0x04,
    TAG_GROUP = 0x08,
    TAG_MASK = 0x10,
    TAG_OTHER = 0x20,
    HEADER_SIZE = 4,
    MAX_ENTRIES = 512,          /* about one block, as on ext4; keeps the search for doubles short */
};

struct entry {
    uint16_t tag, perm;
    uint32_t id;
};

static size_t entry_count(size_t size)
{
    return (size - HEADER_SIZE) / sizeof(struct entry);
}

/* Through memcpy: the bytes come from wherever a request left them. */
static struct entry get(const void *acl, size_t i)
{
    struct entry e;
    memcpy(&e, (const uint8_t *)acl + HEADER_SIZE + i * sizeof e, sizeof e);
    return e;
}

static void set_perm(void *acl, size_t i, uint32_t perm)
{
    struct entry e = get(acl, i);
    e.perm = (uint16_t)perm;
    memcpy((uint8_t *)acl + HEADER_SIZE + i * sizeof e, &e, sizeof e);
}

/* Index of the first entry with a tag, or `count`. */
static size_t find(const void *acl, size_t count, uint16_t tag)
{
    size_t i = 0;
    while (i < count && get(acl, i).tag != tag)
        i++;
    return i;
}

static bool known_tag(uint16_t tag)
{
    return tag != 0 && tag <= TAG_OTHER && (tag & (tag - 1)) == 0;
}

static bool is_named(uint16_t tag)
{
    return tag == TAG_USER || tag == TAG_GROUP;
}

/* Whether entry i repeats one before it. Tags are in order, so equal ones are neighbours; ids need not be. */
static bool repeats(const void *acl, size_t i)
{
    struct entry e = get(acl, i);
    if (!is_named(e.tag))
        return i > 0 && get(acl, i - 1).tag == e.tag;
    for (size_t j = i; j > 0; j--) {
        struct entry before = get(acl, j - 1);
        if (before.tag != e.tag)
            break;
        if (before.id == e.id)
            return true;
    }
    return false;
}

int acl_check(const void *acl, size_t size, size_t *entries)
{
    uint32_t version;
    if (size < HEADER_SIZE || (size - HEADER_SIZE) % sizeof(struct entry) != 0)
        return -EINVAL;
    memcpy(&version, acl, sizeof version);
    if (version != ACL_VERSION)
        return -EINVAL;

    size_t count = *entries = entry_count(size);
    if (count > MAX_ENTRIES)
        return -ENOSPC;
    uint16_t seen = 0, last = 0;
    for (size_t i = 0; i < count; i++) {
        struct entry e = get(acl, i);
        /* The tags' values ascend in the order that entries must have. */
        if (!known_tag(e.tag) || e.tag < last || e.perm > 7 || repeats(acl, i))
            return -EINVAL;
        if (is_named(e.tag) && e.id == UINT32_MAX)
            return -EINVAL;
        seen |= e.tag;
        last = e.tag;
    }
    uint16_t required = TAG_USER_OBJ | TAG_GROUP_OBJ | TAG_OTHER;
    if ((seen & (TAG_USER | TAG_GROUP)) != 0)
        required |= TAG_MASK;
    return count == 0 || (seen & required) == required ? 0 : -EINVAL;
}

bool acl_is_mode(const void *acl, size_t size)
{
    return entry_count(size) == 3 && find(acl, 3, TAG_MASK) == 3;
}

/* The entry that the group bits of the mode stand for. */
static size_t group_class(const void *acl, size_t count)
{
    size_t mask = find(acl, count, TAG_MASK);
    return mask < count ? mask : find(acl, count, TAG_GROUP_OBJ);
}

uint32_t acl_to_mode(const void *acl, size_t size, uint32_t mode)
{
    size_t count = entry_count(size);
    uint32_t owner = get(acl, find(acl, count, TAG_USER_OBJ)).perm;
    uint32_t group = get(acl, group_class(acl, count)).perm;
    uint32_t other = get(acl, find(acl, count, TAG_OTHER)).perm;
    return (mode & ~(uint32_t)0777) | owner << 6 | group << 3 | other;
}

void acl_set_mode(void *acl, size_t size, uint32_t mode)
{
    size_t count = entry_count(size);
    set_perm(acl, find(acl, count, TAG_USER_OBJ), mode >> 6 & 7);
    set_perm(acl, group_class(acl, count), mode >> 3 & 7);
    set_perm(acl, find(acl, count, TAG_OTHER), mode & 7);
}

uint32_t acl_inherit(void *acl, size_t size, uint32_t mode)
{
    mode &= acl_to_mode(acl, size, ~(uint32_t)0777);
    acl_set_mode(acl, size, mode);
    return mode;
}
