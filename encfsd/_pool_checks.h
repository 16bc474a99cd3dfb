/* Part of _pool.c. In a checked build (-O0 or a sanitizer) a free slot is filled, and made known to ASan and Valgrind as
 * inaccessible, so that whoever uses a node after giving it back, or expects something of a fresh one, is caught. TSan sees
 * the filling as a write. Elsewhere all of this is empty. */
#ifndef ENCFSD_POOL_CHECKS_H
#define ENCFSD_POOL_CHECKS_H

#include <assert.h>
#include <string.h>

#include "_pool.h"

#ifndef POOL_UNCHECKED                 /* a test that looks at what lies in free slots */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define POOL_CHECKED 1
#endif
#endif
#if !defined(POOL_CHECKED) && (defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__))
#define POOL_CHECKED 1
#endif
#endif

#ifdef POOL_CHECKED
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>   /* its macros do nothing without ASan */
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)0)
#endif
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_NOACCESS(p, n) ((void)0)
#define VALGRIND_MAKE_MEM_UNDEFINED(p, n) ((void)0)
#define VALGRIND_MAKE_MEM_DEFINED(p, n) ((void)0)
#endif

enum { FILL_FREE = 0xdf, FILL_TAKEN = 0xa5 };

static inline void slot_close(const struct node *node)
{
    memset(node->page, FILL_FREE, NODE_SIZE);
    ASAN_POISON_MEMORY_REGION(node->page, NODE_SIZE);
    VALGRIND_MAKE_MEM_NOACCESS(node->page, NODE_SIZE);
}

static inline void slot_access(const struct node *node)
{
    ASAN_UNPOISON_MEMORY_REGION(node->page, NODE_SIZE);
    VALGRIND_MAKE_MEM_DEFINED(node->page, NODE_SIZE);
}

static inline bool slot_untouched(const struct node *node)
{
    const uint8_t *page = node->page;
    slot_access(node);
    bool same = page[0] == FILL_FREE && !memcmp(page, page + 1, NODE_SIZE - 1);
    ASAN_POISON_MEMORY_REGION(node->page, NODE_SIZE);
    VALGRIND_MAKE_MEM_NOACCESS(node->page, NODE_SIZE);
    return same;
}

static inline void slot_open(const struct node *node)
{
    assert(slot_untouched(node) && "somebody wrote to a node after giving it back");
    slot_access(node);
    memset(node->page, FILL_TAKEN, NODE_SIZE);
    VALGRIND_MAKE_MEM_UNDEFINED(node->page, NODE_SIZE);
}
#else
static inline void slot_close(const struct node *node) { (void)node; }
static inline void slot_access(const struct node *node) { (void)node; }
static inline bool slot_untouched(const struct node *node) { (void)node; return true; }
static inline void slot_open(const struct node *node) { (void)node; }
#endif

#endif
