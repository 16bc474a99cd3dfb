/* POSIX ACLs in the form in which the kernel passes them through system.posix_acl_*: pure functions on bytes.
 *
 * A header of 4 bytes (version 2), then entries of 8: tag u16, permissions u16, id u32; little-endian. */
#ifndef ENCFSD_ACL_H
#define ENCFSD_ACL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Refuses with -EINVAL what is not an ACL: wrong version or length, entries out of order, twice or missing, named entries
 * without a mask, unknown permissions; with -ENOSPC more than 512 entries. *entries receives their number; 0 means "no ACL", which is valid. */
int acl_check(const void *acl, size_t size, size_t *entries);

/* Whether a valid ACL says no more than mode bits do: it has neither mask nor named entries. */
bool acl_is_mode(const void *acl, size_t size);

/* `mode` with the nine permission bits that a valid access ACL implies (group bits: the mask if there is one). */
uint32_t acl_to_mode(const void *acl, size_t size, uint32_t mode);

/* chmod: puts the permission bits of `mode` into owner, mask (or else owning group) and others of a valid access ACL. */
void acl_set_mode(void *acl, size_t size, uint32_t mode);

/* create: `acl` is a copy of the directory's default ACL and becomes the access ACL of an inode that was asked for with
 * `mode`. Both keep only the permissions that both have; returns the mode. */
uint32_t acl_inherit(void *acl, size_t size, uint32_t mode);

#endif
