/*
 * An object in RAM: the functions of _object.h that the VFS uses, for tests that want millions of
 * operations or one failing call. Include it once, instead of linking the real ones.
 */
#ifndef ENCFSD_FAKE_OBJECT_H
#define ENCFSD_FAKE_OBJECT_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_object.h"

struct object {
	uint8_t *bytes;
	size_t size, capacity;
	uint64_t reads, writes, truncates;
	/* The call after this many others fails with `error`; `for_good`: so do all after it. -1: none. */
	int64_t fail_after;
	int error;
	bool for_good, fail_reads, fail_writes;
	unsigned failures;
	unsigned *closed; /* counts object_close; NULL: not counted */
};

static inline struct object *fake_object_create(void)
{
	struct object *o = calloc(1, sizeof *o);
	if (o == NULL)
		abort();
	o->fail_after = -1;
	return o;
}

static inline void fake_object_destroy(struct object *o)
{
	free(o->bytes);
	free(o);
}

static inline int fake_object_fails(struct object *o)
{
	if (o->fail_after < 0 || o->fail_after-- > 0)
		return 0;
	if (o->for_good)
		o->fail_after = 0;
	o->failures++;
	return o->error;
}

ssize_t object_read(struct object *o, void *buffer, size_t size, uint64_t offset, int flags)
{
	(void)flags;
	o->reads++;
	int r = o->fail_reads ? fake_object_fails(o) : 0;
	if (r < 0)
		return r;
	if (offset >= o->size)
		return 0;
	if (size > o->size - offset)
		size = o->size - offset;
	memcpy(buffer, o->bytes + offset, size);
	return (ssize_t)size;
}

static inline void fake_object_resize(struct object *o, size_t size)
{
	if (size > o->capacity) {
		o->capacity = 2 * size;
		o->bytes = realloc(o->bytes, o->capacity);
		if (o->bytes == NULL)
			abort();
	}
	if (size > o->size)
		memset(o->bytes + o->size, 0, size - o->size);
	o->size = size;
}

int object_write(struct object *o, const void *buffer, size_t size, uint64_t offset, int flags)
{
	(void)flags;
	o->writes++;
	int r = o->fail_writes ? fake_object_fails(o) : 0;
	if (r < 0)
		return r;
	if (offset + size > o->size)
		fake_object_resize(o, offset + size);
	memcpy(o->bytes + offset, buffer, size);
	return 0;
}

int object_truncate(struct object *o, uint64_t size, int flags)
{
	(void)flags;
	o->truncates++;
	int r = o->fail_writes ? fake_object_fails(o) : 0;
	if (r < 0)
		return r;
	fake_object_resize(o, size);
	return 0;
}

void object_attr(struct object *o, struct object_attr *attr)
{
	*attr = (struct object_attr){.size = o->size};
}

void object_close(struct object *o)
{
	if (o->closed != NULL)
		++*o->closed;
	fake_object_destroy(o);
}

#endif
