#include <sys/xattr.h>

#include "_acl.h"
#include "check.h"
#include "namespace_fixture.h"

#define ACCESS "system.posix_acl_access"
#define DEFAULT "system.posix_acl_default"

enum { USER_OBJ = 1, USER = 2, GROUP_OBJ = 4, GROUP = 8, MASK = 16, OTHER = 32 };

struct acl {
	uint8_t bytes[4 + 8 * 600];
	size_t size;
};

/* Builds an ACL from (tag, permissions, id) triples ended by tag 0. */
static struct acl acl(const uint32_t *triples)
{
	struct acl a = {.bytes = {2}, .size = 4};
	for (; triples[0] != 0; triples += 3) {
		uint16_t tag = (uint16_t)triples[0], perm = (uint16_t)triples[1];
		memcpy(a.bytes + a.size, &tag, 2);
		memcpy(a.bytes + a.size + 2, &perm, 2);
		memcpy(a.bytes + a.size + 4, &triples[2], 4);
		a.size += 8;
	}
	return a;
}
#define ACL(...) acl((const uint32_t[]){__VA_ARGS__, 0})
#define NONE UINT32_MAX

static int set(struct fixture *fx, uint64_t ino, const char *name, const struct acl *a)
{
	return ns_setxattr(fx->ns, ino, name, a->bytes, a->size, 0, true, 0);
}

/* The stored value is exactly this ACL. */
static void check_acl(struct fixture *fx, uint64_t ino, const char *name, struct acl expected)
{
	struct acl got;
	CHECK_EQ(ns_getxattr(fx->ns, ino, name, got.bytes, sizeof got.bytes, &got.size, 0), 0);
	if (CHECK_EQ(got.size, expected.size))
		CHECK_MEM_EQ(got.bytes, expected.bytes, got.size);
}

static void check_no_acl(struct fixture *fx, uint64_t ino, const char *name)
{
	size_t len;
	CHECK_EQ(ns_getxattr(fx->ns, ino, name, NULL, 0, &len, 0), -ENODATA);
}

/* ---- attributes in general ---- */

TEST(set_get_list_remove)
{
	struct fixture fx;
	struct attr f, a;
	char buffer[64];
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, buffer, sizeof buffer, &len, 0), 0);
	CHECK_EQ(len, 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", buffer, sizeof buffer, &len, 0), -ENODATA);
	CHECK_EQ(ns_removexattr(fx.ns, f.ino, "user.a", 0), -ENODATA);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "12345", 5, 0, true, 0), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.b", "", 0, 0, true, 0), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "trusted.t", "x\0y", 3, 0, true, 0), 0);
	a = stat_of(&fx, f.ino);
	CHECK(a.ctime > f.ctime);
	CHECK_EQ(a.mtime, f.mtime);
	CHECK_EQ(a.mode, f.mode);

	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), 0);
	CHECK_EQ(len, 5);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", buffer, 4, &len, 0), -ERANGE);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", buffer, 5, &len, 0), 0);
	CHECK_MEM_EQ(buffer, "12345", 5);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.b", buffer, 5, &len, 0), 0);
	CHECK_EQ(len, 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "trusted.t", buffer, 5, &len, 0), 0);
	CHECK_EQ(len, 3);
	CHECK_MEM_EQ(buffer, "x\0y", 3);

	CHECK_EQ(ns_listxattr(fx.ns, f.ino, NULL, 0, &len, 0), 0);
	CHECK_EQ(len, 24);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, buffer, 23, &len, 0), -ERANGE);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, buffer, 24, &len, 0), 0);
	CHECK_MEM_EQ(buffer, "trusted.t\0user.a\0user.b\0", 24);

	CHECK_EQ(ns_removexattr(fx.ns, f.ino, "user.a", 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), -ENODATA);
	forget(&fx, f.ino, 1);
	fx_reopen(&fx);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, buffer, sizeof buffer, &len, 0), 0);
	CHECK_MEM_EQ(buffer, "trusted.t\0user.b\0", 17);
	fx_end(&fx);
}

TEST(create_and_replace)
{
	struct fixture fx;
	struct attr f;
	char value;
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "1", 1, XATTR_REPLACE, true, 0), -ENODATA);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "1", 1, XATTR_CREATE, true, 0), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "2", 1, XATTR_CREATE, true, 0), -EEXIST);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", &value, 1, &len, 0), 0);
	CHECK_EQ(value, '1');
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "3", 1, XATTR_REPLACE, true, 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", &value, 1, &len, 0), 0);
	CHECK_EQ(value, '3');
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "4", 1, 4, true, 0), -EINVAL);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "4", 1, XATTR_CREATE | XATTR_REPLACE, true, 0),
		 -EINVAL);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(limits)
{
	struct fixture fx;
	struct attr f;
	char name[257];
	static uint8_t value[65537], got[65536];
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	memset(name, 'n', sizeof name);
	memcpy(name, "user.", 5);
	name[256] = '\0';
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, name, "", 0, 0, true, 0), -ERANGE);
	name[255] = '\0';
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, name, "", 0, 0, true, 0), 0);
	for (size_t i = 0; i < sizeof value; i++)
		value[i] = (uint8_t)(i * 7 >> 3);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", value, 65537, 0, true, 0), -E2BIG);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", value, 65536, 0, true, 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", got, sizeof got, &len, 0), 0);
	CHECK_EQ(len, 65536);
	CHECK_MEM_EQ(got, value, 65536);
	static const char *const refused[] = {"foo", "user", "system.foo", "system.posix_acl",
					      "posix_acl_access", "User.a"};
	for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
		CHECK_EQ(ns_setxattr(fx.ns, f.ino, refused[i], "", 0, 0, true, 0), -EOPNOTSUPP);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.", "", 0, 0, true, 0), -EINVAL);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "", "", 0, 0, true, 0), -ERANGE);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(a_list_that_could_not_be_returned_does_not_grow)
{
	struct fixture fx;
	struct attr f;
	char name[256];
	static char list[65536];
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	for (int i = 0; i < 256; i++) { /* 256 bytes each, with the NUL */
		snprintf(name, sizeof name, "user.%0250d", i);
		CHECK_EQ(ns_setxattr(fx.ns, f.ino, name, "v", 1, 0, true, 0), 0);
	}
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "v", 1, 0, true, 0), -ENOSPC);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, name, "new", 3, 0, true, 0), 0);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, list, sizeof list, &len, 0), 0);
	CHECK_EQ(len, 65536);
	CHECK_EQ(ns_removexattr(fx.ns, f.ino, name, 0), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "v", 1, 0, true, 0), 0);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

/* ---- inodes without any ---- */

/* What the two questions answer while somebody else holds the mutex. */
static void check_locked(struct fixture *fx, uint64_t ino, int get, int list)
{
	size_t len = 1;
	ns_lock(fx->ns, 0);
	CHECK_EQ(ns_getxattr(fx->ns, ino, "security.capability", NULL, 0, &len, NS_NOWAIT), get);
	len = 1;
	CHECK_EQ(ns_listxattr(fx->ns, ino, NULL, 0, &len, NS_NOWAIT), list);
	CHECK_EQ(len, 0);
	ns_unlock(fx->ns);
}

TEST(none_is_remembered)
{
	struct fixture fx;
	struct attr f;
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	check_locked(&fx, f.ino, -ENODATA, 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "foo", NULL, 0, &len, 0), -EOPNOTSUPP);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "1", 1, 0, true, 0), 0);
	check_locked(&fx, f.ino, -EAGAIN, -EAGAIN);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.b", NULL, 0, &len, 0), -ENODATA);
	check_locked(&fx, f.ino, -EAGAIN, -EAGAIN);
	CHECK_EQ(ns_removexattr(fx.ns, f.ino, "user.a", 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), -ENODATA);
	check_locked(&fx, f.ino, -ENODATA, 0);
	forget(&fx, f.ino, 1);

	fx_reopen(&fx);
	look(&fx, ROOT_INO, "f", &f);
	check_locked(&fx, f.ino, -EAGAIN, -EAGAIN);
	CHECK_EQ(ns_listxattr(fx.ns, f.ino, NULL, 0, &len, 0), 0);
	check_locked(&fx, f.ino, -ENODATA, 0);
	forget(&fx, f.ino, 1);
	/* Nobody knows this one: nothing is remembered. */
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), -ENODATA);
	CHECK_EQ(inode_table_count(fx.table), 1);
	fx_end(&fx);
}

TEST(what_is_inherited_is_not_none)
{
	struct fixture fx;
	struct attr f, t, d;
	fx_new(&fx);
	struct acl a = ACL(USER_OBJ, 7, NONE, USER, 7, 5, GROUP_OBJ, 7, NONE, MASK, 6, NONE, OTHER, 5, NONE);
	struct acl plain = ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 0, NONE);
	check_no_acl(&fx, ROOT_INO, DEFAULT);
	check_locked(&fx, ROOT_INO, -ENODATA, 0);
	CHECK_EQ(set(&fx, ROOT_INO, DEFAULT, &a), 0);
	check_locked(&fx, ROOT_INO, -EAGAIN, -EAGAIN);
	make(&fx, ROOT_INO, "f", S_IFREG | 0666, &f);
	check_locked(&fx, f.ino, -EAGAIN, -EAGAIN);
	CHECK_EQ(ns_tmpfile(fx.ns, ROOT_INO, 0664, true, &user, &t, 0), 0);
	CHECK_EQ(t.mode, S_IFREG | 0664);
	check_acl(&fx, t.ino, ACCESS,
		  ACL(USER_OBJ, 6, NONE, USER, 7, 5, GROUP_OBJ, 7, NONE, MASK, 6, NONE, OTHER, 4, NONE));
	forget(&fx, f.ino, 1);
	forget(&fx, t.ino, 1);
	CHECK_EQ(fx_rows(&fx, "xattr"), 2); /* of the root and "f" */
	CHECK_EQ(set(&fx, ROOT_INO, DEFAULT, &plain), 0);
	make(&fx, ROOT_INO, "g", S_IFREG | 0666, &f);
	check_locked(&fx, f.ino, -ENODATA, 0);
	make_dir(&fx, ROOT_INO, "d", &d);
	check_locked(&fx, d.ino, -EAGAIN, -EAGAIN);
	forget(&fx, f.ino, 1);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

TEST(a_set_that_failed_leaves_none)
{
	struct fixture fx;
	struct attr f;
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	fx.object->fail_writes = true;
	fx.object->error = -EIO;
	fx.object->fail_after = 0;
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.a", "1", 1, 0, true, 0), -EIO);
	fx.object->fail_after = -1;
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.a", NULL, 0, &len, 0), -ENODATA);
	forget(&fx, f.ino, 1);
	struct object *object = fx.object;
	fx_crash(&fx);
	fake_object_destroy(object);
}

TEST(dropping_privileges_keeps_the_acl)
{
	struct fixture fx;
	struct attr f, v = {.mode = 06775}, out;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	struct acl a = ACL(USER_OBJ, 7, NONE, USER, 7, 5, GROUP_OBJ, 5, NONE, MASK, 7, NONE, OTHER, 5, NONE);
	CHECK_EQ(set(&fx, f.ino, ACCESS, &a), 0);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_MODE, &out, 0), 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, 0), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0775);
	check_acl(&fx, f.ino, ACCESS, a);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

/* ---- ACLs as bytes ---- */

TEST(what_is_no_acl_is_refused)
{
	size_t entries;
	struct acl good = ACL(USER_OBJ, 7, NONE, USER, 6, 5, USER, 0, 3, GROUP_OBJ, 5, NONE, GROUP, 4, 9,
			      MASK, 7, NONE, OTHER, 1, NONE);
	CHECK_EQ(acl_check(good.bytes, good.size, &entries), 0);
	CHECK_EQ(entries, 7);
	struct acl minimal = ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE);
	CHECK_EQ(acl_check(minimal.bytes, minimal.size, &entries), 0);
	struct acl masked = ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, MASK, 5, NONE, OTHER, 1, NONE);
	CHECK_EQ(acl_check(masked.bytes, masked.size, &entries), 0);
	CHECK_EQ(acl_check(good.bytes, 4, &entries), 0); /* no entry: no ACL */
	CHECK_EQ(entries, 0);

	struct acl bad[] = {
		ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE),                          /* one missing */
		ACL(USER_OBJ, 7, NONE, OTHER, 5, NONE),
		ACL(GROUP_OBJ, 7, NONE, OTHER, 5, NONE),
		ACL(GROUP_OBJ, 5, NONE, USER_OBJ, 7, NONE, OTHER, 1, NONE),          /* order */
		ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE, MASK, 5, NONE),
		ACL(USER_OBJ, 7, NONE, USER, 6, 5, GROUP_OBJ, 5, NONE, OTHER, 1, NONE), /* no mask */
		ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, GROUP, 5, 5, OTHER, 1, NONE),
		ACL(USER_OBJ, 7, NONE, USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE), /* twice */
		ACL(USER_OBJ, 7, NONE, USER, 6, 5, USER, 6, 4, USER, 7, 5, GROUP_OBJ, 5, NONE, MASK, 7,
		    NONE, OTHER, 1, NONE),
		ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, MASK, 7, NONE, MASK, 7, NONE, OTHER, 1, NONE),
		ACL(USER_OBJ, 8, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE),          /* permissions */
		ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE, 64, 1, NONE), /* tags */
		ACL(3, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 1, NONE),
		ACL(USER_OBJ, 7, NONE, USER, 6, NONE, GROUP_OBJ, 5, NONE, MASK, 7, NONE, OTHER, 1, NONE),
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		CHECK_EQ(acl_check(bad[i].bytes, bad[i].size, &entries), -EINVAL);
	CHECK_EQ(acl_check(good.bytes, good.size - 1, &entries), -EINVAL);
	CHECK_EQ(acl_check(good.bytes, 3, &entries), -EINVAL);
	good.bytes[0] = 1;
	CHECK_EQ(acl_check(good.bytes, good.size, &entries), -EINVAL);
	struct acl many = {.bytes = {2}, .size = 4 + 8 * 513};
	CHECK_EQ(acl_check(many.bytes, many.size, &entries), -ENOSPC);
}

/* ---- ACLs on inodes ---- */

TEST(an_access_acl_sets_the_mode)
{
	struct fixture fx;
	struct attr f;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	struct acl a = ACL(USER_OBJ, 6, NONE, USER, 7, 5, GROUP_OBJ, 4, NONE, MASK, 5, NONE, OTHER, 1,
			   NONE);
	CHECK_EQ(set(&fx, f.ino, ACCESS, &a), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0651); /* group bits show the mask */
	check_acl(&fx, f.ino, ACCESS, a);

	/* chmod moves the mask, not the owning group. */
	struct attr v = {.mode = 0746}, out;
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_MODE, &out, 0), 0);
	CHECK_EQ(out.mode, S_IFREG | 0746);
	check_acl(&fx, f.ino, ACCESS,
		  ACL(USER_OBJ, 7, NONE, USER, 7, 5, GROUP_OBJ, 4, NONE, MASK, 4, NONE, OTHER, 6, NONE));

	/* What mode bits can say is not stored. */
	struct acl plain = ACL(USER_OBJ, 6, NONE, GROUP_OBJ, 4, NONE, OTHER, 0, NONE);
	CHECK_EQ(set(&fx, f.ino, ACCESS, &plain), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0640);
	check_no_acl(&fx, f.ino, ACCESS);

	/* Removed: the mode stays. Not there: no error. */
	CHECK_EQ(set(&fx, f.ino, ACCESS, &a), 0);
	CHECK_EQ(ns_removexattr(fx.ns, f.ino, ACCESS, 0), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0651);
	check_no_acl(&fx, f.ino, ACCESS);
	CHECK_EQ(ns_removexattr(fx.ns, f.ino, ACCESS, 0), 0);
	/* An empty one removes, too. */
	CHECK_EQ(set(&fx, f.ino, ACCESS, &a), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, ACCESS, a.bytes, 4, 0, true, 0), 0);
	check_no_acl(&fx, f.ino, ACCESS);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, ACCESS, "junk", 4, 0, true, 0), -EINVAL);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, ACCESS, "", 0, 0, true, 0), -EINVAL);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(setgid_goes_for_those_outside_the_group)
{
	struct fixture fx;
	struct attr f, v = {.mode = 02755}, out;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0755, &f);
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &out, 0);
	struct acl plain = ACL(USER_OBJ, 6, NONE, GROUP_OBJ, 5, NONE, OTHER, 0, NONE);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, ACCESS, plain.bytes, plain.size, 0, true, 0), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 02650);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, ACCESS, plain.bytes, plain.size, 0, false, 0), 0);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0650);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(default_acls_belong_to_directories)
{
	struct fixture fx;
	struct attr f, l;
	fx_new(&fx);
	struct acl a = ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 0, NONE);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(set(&fx, f.ino, DEFAULT, &a), -EACCES);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, DEFAULT, a.bytes, 4, 0, true, 0), 0);
	ns_symlink(fx.ns, ROOT_INO, "l", 1, "f", 1, &root, &l, 0);
	CHECK_EQ(set(&fx, l.ino, ACCESS, &a), -EOPNOTSUPP);
	CHECK_EQ(set(&fx, ROOT_INO, DEFAULT, &a), 0);
	CHECK_EQ(stat_of(&fx, ROOT_INO).mode, S_IFDIR | 0755);
	check_acl(&fx, ROOT_INO, DEFAULT, a); /* stored even if mode bits could say it */
	CHECK_EQ(ns_removexattr(fx.ns, ROOT_INO, DEFAULT, 0), 0);
	check_no_acl(&fx, ROOT_INO, DEFAULT);
	forget(&fx, f.ino, 1);
	forget(&fx, l.ino, 1);
	fx_end(&fx);
}

TEST(new_inodes_inherit)
{
	struct fixture fx;
	struct attr a;
	fx_new(&fx);
	struct acl d = ACL(USER_OBJ, 7, NONE, USER, 7, 5, GROUP_OBJ, 7, NONE, MASK, 6, NONE, OTHER, 5, NONE);
	/* First without one, so that "there is none" is known and must be forgotten. */
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "u", 1, S_IFREG | 0666, 0, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 0644);
	check_no_acl(&fx, a.ino, ACCESS);
	forget(&fx, a.ino, 1);
	CHECK_EQ(set(&fx, ROOT_INO, DEFAULT, &d), 0);

	/* The umask (022) counts for nothing; mode 0664 and ACL are cut down to what both allow. */
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "f", 1, S_IFREG | 0664, 0, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 0664);
	check_acl(&fx, a.ino, ACCESS,
		  ACL(USER_OBJ, 6, NONE, USER, 7, 5, GROUP_OBJ, 7, NONE, MASK, 6, NONE, OTHER, 4, NONE));
	check_no_acl(&fx, a.ino, DEFAULT);
	forget(&fx, a.ino, 1);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "g", 1, S_IFREG | 04711, 0, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 04701);
	check_acl(&fx, a.ino, ACCESS,
		  ACL(USER_OBJ, 7, NONE, USER, 7, 5, GROUP_OBJ, 7, NONE, MASK, 0, NONE, OTHER, 1, NONE));
	forget(&fx, a.ino, 1);

	/* Directories hand the default on. */
	CHECK_EQ(ns_mkdir(fx.ns, ROOT_INO, "d", 1, 0777, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFDIR | 0765);
	check_acl(&fx, a.ino, ACCESS, d);
	check_acl(&fx, a.ino, DEFAULT, d);
	forget(&fx, a.ino, 1);

	/* Links have none. */
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "l", 1, "f", 1, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFLNK | 0777);
	check_no_acl(&fx, a.ino, ACCESS);
	forget(&fx, a.ino, 1);

	/* A default ACL that says no more than a mode: only the mode is inherited. */
	struct acl plain = ACL(USER_OBJ, 7, NONE, GROUP_OBJ, 5, NONE, OTHER, 0, NONE);
	CHECK_EQ(set(&fx, ROOT_INO, DEFAULT, &plain), 0);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "p", 1, S_IFREG | 0666, 0, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 0640);
	check_no_acl(&fx, a.ino, ACCESS);
	forget(&fx, a.ino, 1);
	CHECK_EQ(ns_mkdir(fx.ns, ROOT_INO, "e", 1, 0777, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFDIR | 0750);
	check_no_acl(&fx, a.ino, ACCESS);
	check_acl(&fx, a.ino, DEFAULT, plain);
	forget(&fx, a.ino, 1);
	fx_end(&fx);
}
