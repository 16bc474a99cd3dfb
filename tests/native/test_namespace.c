#include <limits.h>
#include <sys/xattr.h>

#include "check.h"
#include "namespace_fixture.h"

/* ---- the hash of names ---- */

TEST(siphash_is_the_published_one)
{
	/* Key 00..0f, messages 00, 00 01, ...: vectors of the reference implementation. */
	static const struct {
		size_t size;
		uint64_t hash;
	} vectors[] = {
		{0, 0x726fdb47dd0e0e31}, {1, 0x74f839c593dc67fd},  {7, 0xab0200f58b01d137},
		{8, 0x93f5f5799a932462}, {15, 0xa129ca6149be45e5},
	};
	uint8_t key[16], message[16];
	for (int i = 0; i < 16; i++)
		key[i] = message[i] = (uint8_t)i;
	for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
		CHECK_EQ(siphash24(key, message, vectors[i].size), vectors[i].hash);
}

/* ---- opening ---- */

TEST(a_new_namespace_has_a_root)
{
	struct fixture fx;
	fx_new(&fx);
	struct attr a = stat_of(&fx, ROOT_INO);
	CHECK_EQ(a.ino, ROOT_INO);
	CHECK_EQ(a.mode, S_IFDIR | 0755);
	CHECK_EQ(a.nlink, 2);
	CHECK_EQ(a.uid, 7);
	CHECK_EQ(a.gid, 8);
	CHECK_EQ(a.size, 4096);
	CHECK_EQ(a.blocks, 8);
	CHECK(a.mtime > 0 && a.mtime == a.btime);
	CHECK_EQ(ns_mark(fx.ns), 0);
	fx_end(&fx);
}

TEST(what_is_no_metadata_is_refused)
{
	struct fixture fx;
	struct object *object = fake_object_create();
	CHECK_EQ(fx_open(&fx, object, true), -EUCLEAN);
	CHECK(strstr(fx.message, "application_id") != NULL);
	memset(object->bytes = malloc(8192), 'x', object->size = object->capacity = 8192);
	CHECK_EQ(fx_open(&fx, object, false), -EIO);
	CHECK(fx.message[0] != '\0');
	fake_object_destroy(object);
}

static void alter(struct object *object, const char *sql)
{
	struct vfs_file *file;
	char name[32], message[200];
	sqlite3 *db;
	vfs_attach(&file, object, name);
	CHECK_EQ(schema_connect(&db, name, false, 0, message, sizeof message), 0);
	CHECK_EQ(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
	schema_close(db);
	vfs_detach(file);
}

TEST(what_a_reader_must_refuse)
{
	static const struct {
		const char *sql;
		int error;
	} cases[] = {
		{"PRAGMA user_version=2", -EPROTONOSUPPORT},
		{"PRAGMA user_version=0", -EUCLEAN},
		{"PRAGMA application_id=1", -EUCLEAN},
		{"DELETE FROM volume WHERE key='hash_key'", -EUCLEAN},
		{"UPDATE volume SET value=x'00' WHERE key='hash_key'", -EUCLEAN},
		{"UPDATE volume SET value=x'000000000000000000' WHERE key='next_ino'", -EUCLEAN},
		{"UPDATE volume SET value=x'0100000000000000' WHERE key='next_ino'", -EUCLEAN},
		{"DELETE FROM inode WHERE ino=1", -EUCLEAN},
		{"DROP TABLE xattr", -EIO},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct fixture fx;
		struct object *object = fake_object_create();
		CHECK_EQ(ns_format(object, 0, 0), 0);
		alter(object, cases[i].sql);
		CHECK_EQ(fx_open(&fx, object, false), cases[i].error);
		CHECK(fx.message[0] != '\0');
		fake_object_destroy(object);
	}
}

TEST(a_second_format_is_refused)
{
	struct object *object = fake_object_create();
	CHECK_EQ(ns_format(object, 0, 0), 0);
	CHECK(ns_format(object, 0, 0) < 0);
	fake_object_destroy(object);
}

TEST(read_only_reads_and_changes_nothing)
{
	struct fixture fx;
	struct attr a, b;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0644, &a);
	forget(&fx, a.ino, 1);
	CHECK_EQ(fx_group(&fx), 0);
	struct object *object = fx.object;
	fx_crash(&fx);
	uint64_t writes = object->writes;
	CHECK_EQ(fx_open(&fx, object, true), 0);
	CHECK_EQ(look(&fx, ROOT_INO, "f", &b), 0);
	CHECK_EQ(b.ino, a.ino);
	CHECK_EQ(make(&fx, ROOT_INO, "g", S_IFREG | 0644, &b), -EROFS);
	CHECK_EQ(make_dir(&fx, ROOT_INO, "g", &b), -EROFS);
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "g", 1, "t", 1, &root, &b, 0), -EROFS);
	CHECK_EQ(link_at(&fx, a.ino, ROOT_INO, "g", &b), -EROFS);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), -EROFS);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "g", 0), -EROFS);
	CHECK_EQ(ns_setattr(fx.ns, a.ino, &a, SET_MODE, &b, 0), -EROFS);
	CHECK_EQ(ns_setattr(fx.ns, a.ino, &a, SET_MTIME, &b, 0), -EROFS);
	CHECK_EQ(ns_setxattr(fx.ns, a.ino, "user.a", "x", 1, 0, true, 0), -EROFS);
	CHECK_EQ(ns_set_value(fx.ns, "v", "x", 1), -EROFS);
	forget(&fx, a.ino, 1);
	CHECK_EQ(object->writes, writes);
	fx_end(&fx);
}

/* ---- create and look up ---- */

TEST(creation_sets_every_attribute)
{
	struct fixture fx;
	struct attr a, b, dir;
	fx_new(&fx);
	int64_t before = time_now();
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "f", 1, S_IFREG | 04666, 0, &user, &a, 0), 0);
	int64_t after = time_now();
	CHECK_EQ(a.ino, 2);
	CHECK_EQ(a.mode, S_IFREG | 04644);
	CHECK_EQ(a.nlink, 1);
	CHECK_EQ(a.uid, 1000);
	CHECK_EQ(a.gid, 100);
	CHECK_EQ(a.size, 0);
	CHECK_EQ(a.blocks, 0);
	CHECK(before <= a.btime && a.btime <= after);
	CHECK(a.atime == a.btime && a.mtime == a.btime && a.ctime == a.btime);
	dir = stat_of(&fx, ROOT_INO);
	CHECK_EQ(dir.mtime, a.btime);
	CHECK_EQ(dir.ctime, a.btime);
	CHECK_EQ(dir.nlink, 2);

	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "dev", 3, S_IFCHR | 0600, 0x103, &root, &b, 0), 0);
	CHECK_EQ(b.rdev, 0x103);
	CHECK_EQ(b.mode, S_IFCHR | 0600);
	forget(&fx, b.ino, 1);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "p", 1, S_IFIFO | 0600, 0, &root, &b, 0), 0);
	forget(&fx, b.ino, 1);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "s", 1, S_IFSOCK | 0600, 0, &root, &b, 0), 0);
	forget(&fx, b.ino, 1);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "x", 1, S_IFDIR | 0600, 0, &root, &b, 0), -EINVAL);

	/* Out of core and back: rows hold the same. */
	forget(&fx, a.ino, 1);
	fx_reopen(&fx);
	CHECK_EQ(look(&fx, ROOT_INO, "f", &b), 0);
	check_attr(b, a);
	forget(&fx, b.ino, 1);
	CHECK_EQ(look(&fx, ROOT_INO, "dev", &b), 0);
	CHECK_EQ(b.rdev, 0x103);
	forget(&fx, b.ino, 1);
	b = stat_of(&fx, ROOT_INO);
	CHECK(b.mtime > dir.mtime);
	fx_end(&fx);
}

TEST(directories_count_their_subdirectories)
{
	struct fixture fx;
	struct attr a, b;
	fx_new(&fx);
	CHECK_EQ(make_dir(&fx, ROOT_INO, "a", &a), 0);
	CHECK_EQ(a.nlink, 2);
	CHECK_EQ(a.mode, S_IFDIR | 0755);
	CHECK_EQ(a.size, 4096);
	CHECK_EQ(a.blocks, 8);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 3);
	CHECK_EQ(make_dir(&fx, a.ino, "b", &b), 0);
	CHECK_EQ(stat_of(&fx, a.ino).nlink, 3);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 3);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "a"), -ENOTEMPTY);
	CHECK_EQ(rmdir_at(&fx, a.ino, "b"), 0);
	CHECK_EQ(stat_of(&fx, a.ino).nlink, 2);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "a"), 0);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 2);
	forget(&fx, a.ino, 1);
	forget(&fx, b.ino, 1);
	fx_end(&fx);
}

TEST(names_are_checked)
{
	struct fixture fx;
	struct attr a;
	char name[NAME_MAX_BYTES + 2];
	fx_new(&fx);
	memset(name, 0xff, sizeof name);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, name, 256, S_IFREG, 0, &root, &a, 0), -ENAMETOOLONG);
	CHECK_EQ(ns_lookup(fx.ns, ROOT_INO, name, 256, &a, 0), -ENAMETOOLONG);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, name, 255, S_IFREG, 0, &root, &a, 0), 0);
	CHECK_EQ(ns_lookup(fx.ns, ROOT_INO, name, 255, &a, 0), 0);
	CHECK_EQ(ns_lookup(fx.ns, ROOT_INO, name, 254, &a, 0), -ENOENT);
	forget(&fx, a.ino, 2);
	CHECK_EQ(make(&fx, ROOT_INO, "", S_IFREG, &a), -EINVAL);
	CHECK_EQ(make(&fx, ROOT_INO, ".", S_IFREG, &a), -EINVAL);
	CHECK_EQ(make(&fx, ROOT_INO, "..", S_IFREG, &a), -EINVAL);
	CHECK_EQ(make(&fx, ROOT_INO, "a/b", S_IFREG, &a), -EINVAL);
	CHECK_EQ(ns_mknod(fx.ns, ROOT_INO, "a\0b", 3, S_IFREG, 0, &root, &a, 0), -EINVAL);
	CHECK_EQ(make(&fx, ROOT_INO, "...", S_IFREG | 0600, &a), 0);
	forget(&fx, a.ino, 1);
	fx_end(&fx);
}

TEST(errors_of_lookup_and_create)
{
	struct fixture fx;
	struct attr a, f;
	fx_new(&fx);
	CHECK_EQ(make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f), 0);
	CHECK_EQ(look(&fx, ROOT_INO, "g", &a), -ENOENT);
	CHECK_EQ(make(&fx, ROOT_INO, "f", S_IFREG | 0600, &a), -EEXIST);
	CHECK_EQ(make_dir(&fx, ROOT_INO, "f", &a), -EEXIST);
	CHECK_EQ(make(&fx, f.ino, "x", S_IFREG | 0600, &a), -ENOTDIR);
	CHECK_EQ(make(&fx, 999, "x", S_IFREG | 0600, &a), -ENOENT);
	CHECK_EQ(ns_getattr(fx.ns, 999, &a, 0), -ENOENT);
	forget(&fx, f.ino, 1);
	forget(&fx, 12345, 1); /* unknown: ignored */
	fx_end(&fx);
}

TEST(dot_names_are_found)
{
	struct fixture fx;
	struct attr d, a;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	CHECK_EQ(look(&fx, d.ino, ".", &a), 0);
	CHECK_EQ(a.ino, d.ino);
	CHECK_EQ(look(&fx, d.ino, "..", &a), 0);
	CHECK_EQ(a.ino, ROOT_INO);
	CHECK_EQ(look(&fx, ROOT_INO, "..", &a), 0);
	CHECK_EQ(a.ino, ROOT_INO);
	forget(&fx, ROOT_INO, 2);
	forget(&fx, d.ino, 2);
	fx_end(&fx);
}

TEST(setgid_directories_pass_their_group_on)
{
	struct fixture fx;
	struct attr d, a;
	struct attr values = {.mode = S_ISGID | 0770, .gid = 55};
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	CHECK_EQ(ns_setattr(fx.ns, d.ino, &values, SET_MODE | SET_GID, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFDIR | S_ISGID | 0770);
	CHECK_EQ(ns_mknod(fx.ns, d.ino, "f", 1, S_IFREG | 0666, 0, &user, &a, 0), 0);
	CHECK_EQ(a.gid, 55);
	CHECK_EQ(a.uid, 1000);
	CHECK_EQ(a.mode, S_IFREG | 0644);
	forget(&fx, a.ino, 1);
	CHECK_EQ(ns_mkdir(fx.ns, d.ino, "e", 1, 0777, &user, &a, 0), 0);
	CHECK_EQ(a.gid, 55);
	CHECK_EQ(a.mode, S_IFDIR | S_ISGID | 0755);
	forget(&fx, a.ino, 1);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

TEST(symlinks)
{
	struct fixture fx;
	struct attr a, f;
	char target[4097], buffer[4096];
	size_t len;
	fx_new(&fx);
	memset(target, 't', sizeof target);
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "l", 1, target, 4096, &user, &a, 0), -ENAMETOOLONG);
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "l", 1, target, 0, &user, &a, 0), -ENOENT);
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "l", 1, "a\0b", 3, &user, &a, 0), -EINVAL);
	CHECK_EQ(ns_symlink(fx.ns, ROOT_INO, "l", 1, target, 4095, &user, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFLNK | 0777);
	CHECK_EQ(a.size, 4095);
	CHECK_EQ(a.uid, 1000);
	CHECK_EQ(ns_readlink(fx.ns, a.ino, buffer, sizeof buffer, &len, 0), 0);
	CHECK_EQ(len, 4095);
	CHECK_MEM_EQ(buffer, target, 4095);
	forget(&fx, a.ino, 1);
	CHECK_EQ(make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f), 0);
	CHECK_EQ(ns_readlink(fx.ns, f.ino, buffer, sizeof buffer, &len, 0), -EINVAL);
	forget(&fx, f.ino, 1);
	CHECK_EQ(fx_rows(&fx, "content"), 1);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "l"), 0);
	CHECK_EQ(fx_rows(&fx, "content"), 0);
	fx_end(&fx);
}

TEST(inode_numbers_are_never_used_again)
{
	struct fixture fx;
	struct attr a;
	uint64_t last = ROOT_INO;
	fx_new(&fx);
	for (int i = 0; i < 3000; i++) {
		if (i % 500 == 499) {
			struct object *object = fx.object;
			CHECK_EQ(fx_group(&fx), 0);
			fx_crash(&fx);
			CHECK_EQ(fx_open(&fx, object, false), 0);
		}
		CHECK_EQ(make(&fx, ROOT_INO, "f", S_IFREG | 0600, &a), 0);
		CHECK(a.ino > last);
		last = a.ino;
		CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
		forget(&fx, a.ino, 1);
	}
	/* Batches: a thousand numbers may be skipped at each opening, not more. */
	CHECK(last < 3000 + 8 * 1024);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	fx_end(&fx);
}

/* ---- link and unlink ---- */

TEST(links_share_an_inode)
{
	struct fixture fx;
	struct attr f, a, d;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(fx.published, 0);
	CHECK_EQ(link_at(&fx, f.ino, d.ino, "g", &a), 0);
	CHECK_EQ(fx.published, 1);
	CHECK_EQ(a.ino, f.ino);
	CHECK_EQ(a.nlink, 2);
	CHECK(a.ctime > f.ctime);
	CHECK_EQ(a.mtime, f.mtime);
	CHECK_EQ(stat_of(&fx, d.ino).mtime, a.ctime);
	CHECK_EQ(link_at(&fx, f.ino, d.ino, "g", &a), -EEXIST);
	CHECK_EQ(link_at(&fx, d.ino, d.ino, "h", &a), -EPERM);
	CHECK_EQ(link_at(&fx, f.ino, f.ino, "h", &a), -ENOTDIR);

	int64_t ctime = stat_of(&fx, f.ino).ctime;
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	a = stat_of(&fx, f.ino);
	CHECK_EQ(a.nlink, 1);
	CHECK(a.ctime > ctime);
	CHECK_EQ(stat_of(&fx, ROOT_INO).ctime, a.ctime);
	CHECK_EQ(look(&fx, d.ino, "g", &a), 0);
	CHECK_EQ(a.ino, f.ino);
	forget(&fx, f.ino, 3);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

TEST(link_count_has_a_limit)
{
	struct fixture fx;
	struct attr f, d, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	make_dir(&fx, ROOT_INO, "d", &d);
	forget(&fx, f.ino, 1);
	forget(&fx, d.ino, 1);
	struct object *object = fx.object;
	CHECK_EQ(fx_group(&fx), 0);
	fx_crash(&fx);
	alter(object, "UPDATE inode SET nlink=64999 WHERE ino IN (2,3)");
	CHECK_EQ(fx_open(&fx, object, false), 0);
	CHECK_EQ(link_at(&fx, f.ino, ROOT_INO, "g", &a), 0);
	CHECK_EQ(a.nlink, 65000);
	CHECK_EQ(link_at(&fx, f.ino, ROOT_INO, "h", &a), -EMLINK);
	CHECK_EQ(make_dir(&fx, d.ino, "e", &a), 0);
	forget(&fx, a.ino, 1);
	CHECK_EQ(make_dir(&fx, d.ino, "g", &a), -EMLINK);
	CHECK_EQ(make_dir(&fx, ROOT_INO, "x", &a), 0);
	forget(&fx, a.ino, 1);
	CHECK_EQ(move(&fx, ROOT_INO, "x", d.ino, "x", 0), -EMLINK);
	CHECK_EQ(move(&fx, ROOT_INO, "x", d.ino, "e", 0), 0); /* one comes, one goes */
	forget(&fx, f.ino, 1);
	CHECK_EQ(fx_group(&fx), 0);
	fx_crash(&fx);
	fake_object_destroy(object);
}

TEST(an_unlinked_inode_lives_until_forgotten)
{
	struct fixture fx;
	struct attr f, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.x", "1", 1, 0, true, 0), 0);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), -ENOENT);
	CHECK_EQ(look(&fx, ROOT_INO, "f", &a), -ENOENT);
	a = stat_of(&fx, f.ino);
	CHECK_EQ(a.nlink, 0);
	CHECK_EQ(link_at(&fx, f.ino, ROOT_INO, "g", &a), -ENOENT);
	struct attr values = {.mode = 0640};
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &values, SET_MODE, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 0640);
	CHECK_EQ(fx_rows(&fx, "inode"), 2);
	forget(&fx, f.ino, 1);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	CHECK_EQ(fx_rows(&fx, "xattr"), 0);
	CHECK_EQ(ns_getattr(fx.ns, f.ino, &a, 0), -ENOENT);
	CHECK_EQ(fx.dropped, 0);
	fx_end(&fx);
}

TEST(a_reference_keeps_an_unlinked_inode_too)
{
	struct fixture fx;
	struct attr f;
	struct inode *inode;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_get_inode(fx.ns, f.ino, &inode, 0), 0);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	forget(&fx, f.ino, 1);
	CHECK(inode->deleted);
	CHECK_EQ(fx_rows(&fx, "inode"), 2);
	ns_put_inode(fx.ns, inode);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	fx_end(&fx);
}

TEST(a_removed_directory_is_an_empty_one)
{
	struct fixture fx;
	struct attr d, a;
	struct ns_dirent entries[4];
	size_t count;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "d"), -EISDIR);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "d"), 0);
	CHECK_EQ(stat_of(&fx, d.ino).nlink, 0);
	CHECK_EQ(make(&fx, d.ino, "f", S_IFREG | 0600, &a), -ENOENT);
	CHECK_EQ(make_dir(&fx, d.ino, "f", &a), -ENOENT);
	CHECK_EQ(look(&fx, d.ino, "f", &a), -ENOENT);
	CHECK_EQ(fx_list(&fx, d.ino, 0, entries, 4, &count), 0);
	CHECK_EQ(count, 0);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &a);
	CHECK_EQ(move(&fx, ROOT_INO, "f", d.ino, "f", 0), -ENOENT);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "f"), -ENOTDIR);
	forget(&fx, a.ino, 1);
	forget(&fx, d.ino, 1);
	CHECK_EQ(fx_rows(&fx, "inode"), 2);
	fx_end(&fx);
}

/* ---- rename ---- */

TEST(rename_moves_a_name)
{
	struct fixture fx;
	struct attr f, d, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	make_dir(&fx, ROOT_INO, "d", &d);
	CHECK_EQ(move(&fx, ROOT_INO, "f", d.ino, "g", 0), 0);
	CHECK_EQ(fx.published, 1);
	CHECK_EQ(look(&fx, ROOT_INO, "f", &a), -ENOENT);
	CHECK_EQ(look(&fx, d.ino, "g", &a), 0);
	CHECK_EQ(a.ino, f.ino);
	CHECK(a.ctime > f.ctime);
	CHECK_EQ(a.mtime, f.mtime);
	CHECK_EQ(stat_of(&fx, ROOT_INO).mtime, a.ctime);
	CHECK_EQ(stat_of(&fx, d.ino).mtime, a.ctime);
	CHECK_EQ(stat_of(&fx, d.ino).ctime, a.ctime);
	CHECK_EQ(move(&fx, ROOT_INO, "f", d.ino, "g", 0), -ENOENT);
	CHECK_EQ(move(&fx, d.ino, "g", d.ino, "g", 0), 0);
	CHECK_EQ(move(&fx, d.ino, "g", ROOT_INO, "g", 4), -EINVAL);
	CHECK_EQ(move(&fx, d.ino, "g", ROOT_INO, "g", RENAME_NOREPLACE | RENAME_EXCHANGE), -EINVAL);
	forget(&fx, f.ino, 2);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

TEST(rename_replaces)
{
	struct fixture fx;
	struct attr f, g, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	make(&fx, ROOT_INO, "g", S_IFREG | 0600, &g);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "g", RENAME_NOREPLACE), -EEXIST);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "g", 0), 0);
	CHECK_EQ(look(&fx, ROOT_INO, "g", &a), 0);
	CHECK_EQ(a.ino, f.ino);
	CHECK_EQ(stat_of(&fx, g.ino).nlink, 0);
	CHECK_EQ(stat_of(&fx, g.ino).ctime, a.ctime);
	forget(&fx, g.ino, 1);
	CHECK_EQ(fx_rows(&fx, "inode"), 2);

	/* Two links to one inode: nothing happens, both stay. */
	CHECK_EQ(link_at(&fx, f.ino, ROOT_INO, "h", &a), 0);
	CHECK_EQ(move(&fx, ROOT_INO, "g", ROOT_INO, "h", 0), 0);
	CHECK_EQ(look(&fx, ROOT_INO, "g", &a), 0);
	CHECK_EQ(look(&fx, ROOT_INO, "h", &a), 0);
	CHECK_EQ(a.nlink, 2);

	/* One of two links replaced. */
	make(&fx, ROOT_INO, "k", S_IFREG | 0600, &g);
	CHECK_EQ(move(&fx, ROOT_INO, "k", ROOT_INO, "h", 0), 0);
	CHECK_EQ(stat_of(&fx, f.ino).nlink, 1);
	forget(&fx, f.ino, 5);
	forget(&fx, g.ino, 1);
	fx_end(&fx);
}

TEST(rename_of_directories)
{
	struct fixture fx;
	struct attr a, b, c, f, x;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "a", &a);
	make_dir(&fx, a.ino, "b", &b);
	make_dir(&fx, b.ino, "c", &c);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(move(&fx, ROOT_INO, "a", c.ino, "x", 0), -EINVAL);
	CHECK_EQ(move(&fx, ROOT_INO, "a", a.ino, "x", 0), -EINVAL);
	CHECK_EQ(move(&fx, a.ino, "b", ROOT_INO, "a", 0), -ENOTEMPTY);
	CHECK_EQ(move(&fx, ROOT_INO, "a", ROOT_INO, "f", 0), -ENOTDIR);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "a", 0), -EISDIR);

	CHECK_EQ(move(&fx, b.ino, "c", ROOT_INO, "c", 0), 0);
	CHECK_EQ(fx.published, 0); /* directories hold no data */
	CHECK_EQ(stat_of(&fx, b.ino).nlink, 2);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 4);
	CHECK_EQ(look(&fx, c.ino, "..", &x), 0);
	CHECK_EQ(x.ino, ROOT_INO);
	forget(&fx, ROOT_INO, 1);

	/* Over an empty directory, in another parent. */
	CHECK_EQ(move(&fx, ROOT_INO, "c", a.ino, "b", 0), 0);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 3);
	CHECK_EQ(stat_of(&fx, a.ino).nlink, 3);
	CHECK_EQ(stat_of(&fx, b.ino).nlink, 0);
	forget(&fx, b.ino, 1);
	/* And in the same. */
	make_dir(&fx, ROOT_INO, "b", &b);
	CHECK_EQ(move(&fx, ROOT_INO, "a", ROOT_INO, "b", 0), 0);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 3);
	forget(&fx, a.ino, 1);
	forget(&fx, b.ino, 1);
	forget(&fx, c.ino, 1);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(rename_exchanges)
{
	struct fixture fx;
	struct attr d, e, f, g, x;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	make_dir(&fx, d.ino, "e", &e);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	make(&fx, ROOT_INO, "g", S_IFREG | 0600, &g);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "none", RENAME_EXCHANGE), -ENOENT);
	CHECK_EQ(move(&fx, ROOT_INO, "f", ROOT_INO, "g", RENAME_EXCHANGE), 0);
	CHECK_EQ(fx.published, 2);
	look(&fx, ROOT_INO, "f", &x);
	CHECK_EQ(x.ino, g.ino);
	look(&fx, ROOT_INO, "g", &x);
	CHECK_EQ(x.ino, f.ino);
	/* A directory against a file of another directory. */
	CHECK_EQ(move(&fx, d.ino, "e", ROOT_INO, "f", RENAME_EXCHANGE), 0);
	CHECK_EQ(stat_of(&fx, d.ino).nlink, 2);
	CHECK_EQ(stat_of(&fx, ROOT_INO).nlink, 4);
	CHECK_EQ(look(&fx, e.ino, "..", &x), 0);
	CHECK_EQ(x.ino, ROOT_INO);
	/* Against one's own ancestor, in both orders. */
	CHECK_EQ(move(&fx, ROOT_INO, "f", d.ino, "e", RENAME_EXCHANGE), 0);
	CHECK_EQ(move(&fx, d.ino, "e", ROOT_INO, "d", RENAME_EXCHANGE), -EINVAL);
	CHECK_EQ(move(&fx, ROOT_INO, "d", d.ino, "e", RENAME_EXCHANGE), -EINVAL);
	forget(&fx, ROOT_INO, 1);
	forget(&fx, f.ino, 2);
	forget(&fx, g.ino, 2);
	forget(&fx, e.ino, 1);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

/* ---- attributes ---- */

TEST(setattr_changes_what_it_is_told)
{
	struct fixture fx;
	struct attr f, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	uint64_t mark = ns_mark(fx.ns);
	struct attr v = {.mode = 07777, .uid = 1, .gid = 2, .atime = -5, .mtime = 6, .ctime = 7};
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, 0, &a, 0), 0);
	check_attr(a, f);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_SIZE, &a, 0), -EINVAL);

	/* Times alone: in core at once, in the row with the next group. */
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_ATIME, &a, 0), 0);
	CHECK_EQ(a.atime, -5);
	CHECK_EQ(a.mtime, f.mtime);
	CHECK(a.ctime > f.ctime);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_MTIME | SET_CTIME, &a, 0), 0);
	CHECK_EQ(a.atime, -5);
	CHECK_EQ(a.mtime, 6);
	CHECK_EQ(a.ctime, 7);
	CHECK_EQ(ns_mark(fx.ns), mark);
	CHECK_EQ(fx_group(&fx), 0);
	CHECK(ns_mark(fx.ns) > mark);
	mark = ns_mark(fx.ns);

	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFREG | 07777);
	CHECK_EQ(a.mtime, 6);
	CHECK(a.ctime > 7);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);

	/* What it is already: that is ctime alone. */
	struct attr same = {.mode = 07777, .uid = a.uid, .gid = a.gid}, before = a;
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &same, SET_MODE | SET_UID | SET_GID, &a, 0), 0);
	CHECK(a.ctime > before.ctime);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	before.ctime = a.ctime;
	check_attr(a, before);
	CHECK_EQ(fx_group(&fx), 0);
	forget(&fx, f.ino, 1);
	fx_reopen(&fx);
	struct attr b = stat_of(&fx, f.ino);
	check_attr(b, a);
	fx_end(&fx);
}

TEST(chown_takes_privileges)
{
	static const struct {
		uint32_t before, after;
	} modes[] = {
		{S_IFREG | 06755, S_IFREG | 0755},
		{S_IFREG | 06745, S_IFREG | 02745}, /* setgid without group execute is none */
		{S_IFREG | 01700, S_IFREG | 01700},
	};
	struct fixture fx;
	struct attr f, a;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		struct attr v = {.mode = modes[i].before, .uid = 9, .gid = 10};
		ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0);
		CHECK_EQ(a.mode, modes[i].before);
		CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, i == 0 ? SET_UID : SET_GID, &a, 0), 0);
		CHECK_EQ(a.mode, modes[i].after);
	}
	CHECK_EQ(a.uid, 9);
	CHECK_EQ(a.gid, 10);
	forget(&fx, f.ino, 1);

	make_dir(&fx, ROOT_INO, "d", &f);
	struct attr v = {.mode = 06755, .uid = 9};
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_UID, &a, 0), 0);
	CHECK_EQ(a.mode, S_IFDIR | 06755);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

TEST(chown_takes_file_capabilities)
{
	struct fixture fx;
	struct attr f, a, v = {.uid = 9};
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0700, &f);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "security.capability", "cap", 3, 0, true, 0), 0);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_UID, &a, 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "security.capability", NULL, 0, &len, 0), -ENODATA);
	/* Also if the owner stays. */
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "security.capability", "cap", 3, 0, true, 0), 0);
	CHECK_EQ(ns_setattr(fx.ns, f.ino, &v, SET_UID, &a, 0), 0);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "security.capability", NULL, 0, &len, 0), -ENODATA);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

/* What a write by somebody without privileges leaves of a file's. */
TEST(writes_take_privileges)
{
	static const struct {
		uint32_t before, after;
	} modes[] = {
		{S_IFREG | 06755, S_IFREG | 0755},
		{S_IFREG | 02710, S_IFREG | 0710},
		{S_IFREG | 06745, S_IFREG | 02745}, /* setgid without group execute is none */
		{S_IFREG | 01700, S_IFREG | 01700},
	};
	struct fixture fx;
	struct attr f, a;
	size_t len;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		struct attr v = {.mode = modes[i].before};
		ns_setattr(fx.ns, f.ino, &v, SET_MODE, &f, 0);
		uint64_t mark = ns_mark(fx.ns);
		CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, true, NULL, 0), 0);
		CHECK_EQ(stat_of(&fx, f.ino).mode, modes[i].before);
		CHECK_EQ(ns_mark(fx.ns), mark);
		CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, 0), 0);
		a = stat_of(&fx, f.ino);
		bool changed = modes[i].before != modes[i].after;
		CHECK_EQ(a.mode, modes[i].after);
		CHECK_EQ(a.mtime, f.mtime);
		CHECK(changed ? a.ctime > f.ctime : a.ctime == f.ctime);
		CHECK_EQ(ns_mark(fx.ns), mark + changed);
	}
	struct attr v = {.mode = 04700};
	bool dropped;
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &f, 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "security.capability", "cap", 3, 0, true, 0), 0);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "user.x", "x", 1, 0, true, 0), 0);
	uint64_t mark = ns_mark(fx.ns);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, true, NULL, 0), 0);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 04700);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "security.capability", NULL, 0, &len, 0), -ENODATA);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "user.x", NULL, 0, &len, 0), 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, true, NULL, 0), 0);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	CHECK_EQ(ns_setxattr(fx.ns, f.ino, "security.capability", "cap", 3, 0, true, 0), 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, &dropped, 0), 0);
	CHECK(dropped);
	CHECK_EQ(ns_mark(fx.ns), mark + 3); /* mode and capability in one */
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 0700);
	CHECK_EQ(ns_getxattr(fx.ns, f.ino, "security.capability", NULL, 0, &len, 0), -ENODATA);
	forget(&fx, f.ino, 1);

	make_dir(&fx, ROOT_INO, "d", &f);
	v.mode = 06755;
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, &dropped, 0), 0);
	CHECK(!dropped);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFDIR | 06755);
	forget(&fx, f.ino, 1);
	CHECK_EQ(ns_drop_privileges(fx.ns, 77, false, NULL, 0), -ENOENT);
	fx_end(&fx);
}

TEST(nothing_to_drop_takes_no_mutex)
{
	struct fixture fx;
	struct attr f, a, v = {.mode = 04700};
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0700, &f);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, NS_NOWAIT), 0);
	ns_unlock(fx.ns);
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, true, NULL, NS_NOWAIT), 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, NS_NOWAIT), -EAGAIN);
	ns_unlock(fx.ns);
	CHECK_EQ(stat_of(&fx, f.ino).mode, S_IFREG | 04700);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, 0), 0);
	forget(&fx, f.ino, 1);

	/* Loaded from its row: the first call asks the database, the others know. */
	fx_reopen(&fx);
	look(&fx, ROOT_INO, "f", &f);
	CHECK_EQ(f.mode, S_IFREG | 0700);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, NS_NOWAIT), -EAGAIN);
	ns_unlock(fx.ns);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, 0), 0);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_drop_privileges(fx.ns, f.ino, false, NULL, NS_NOWAIT), 0);
	ns_unlock(fx.ns);
	forget(&fx, f.ino, 1);
	fx_end(&fx);
}

/* ---- files without a name ---- */

static int make_tmpfile(struct fixture *fx, uint64_t parent, bool linkable, struct attr *out)
{
	return ns_tmpfile(fx->ns, parent, 0640, linkable, &user, out, 0);
}

TEST(a_tmpfile_goes_with_its_last_use)
{
	struct fixture fx;
	struct attr t, a, before;
	fx_new(&fx);
	before = stat_of(&fx, ROOT_INO);
	CHECK_EQ(make_tmpfile(&fx, ROOT_INO, false, &t), 0);
	CHECK_EQ(t.mode, S_IFREG | 0640);
	CHECK_EQ(t.nlink, 0);
	CHECK_EQ(t.uid, 1000);
	CHECK_EQ(t.gid, 100);
	CHECK_EQ(t.size, 0);
	check_attr(stat_of(&fx, t.ino), t);
	check_attr(stat_of(&fx, ROOT_INO), before);
	CHECK_EQ(fx_rows(&fx, "orphan"), 1);
	CHECK_EQ(fx_rows(&fx, "dirent"), 0);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), -ENOENT); /* O_EXCL */
	CHECK_EQ(fx.published, 0);
	struct attr v = {.mode = 0600};
	CHECK_EQ(ns_setattr(fx.ns, t.ino, &v, SET_MODE, &a, 0), 0);
	CHECK_EQ(a.nlink, 0);
	forget(&fx, t.ino, 1);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	CHECK_EQ(fx_rows(&fx, "orphan"), 0);

	CHECK_EQ(make_tmpfile(&fx, ROOT_INO, true, &t), 0);
	forget(&fx, t.ino, 1);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), -ENOENT);

	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &a);
	CHECK_EQ(make_tmpfile(&fx, a.ino, true, &t), -ENOTDIR);
	CHECK_EQ(make_tmpfile(&fx, 77, true, &t), -ENOENT);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_tmpfile(fx.ns, ROOT_INO, 0600, true, &user, &t, NS_NOWAIT), -EAGAIN);
	ns_unlock(fx.ns);
	forget(&fx, a.ino, 1);
	fx_end(&fx);
}

TEST(a_tmpfile_goes_with_a_crash)
{
	struct fixture fx;
	struct attr t;
	fx_new(&fx);
	CHECK_EQ(make_tmpfile(&fx, ROOT_INO, true, &t), 0);
	struct object *object = fx.object;
	fx_crash(&fx);
	CHECK_EQ(fx_open(&fx, object, false), 0);
	CHECK_EQ(fx_rows(&fx, "inode"), 2);
	CHECK_EQ(ns_reclaim_orphans(fx.ns), 0);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	CHECK_EQ(fx_rows(&fx, "orphan"), 0);
	fx_end(&fx);
}

TEST(a_tmpfile_inherits_from_its_directory)
{
	struct fixture fx;
	struct attr d, t, a, v = {.mode = 02755, .gid = 55};
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	ns_setattr(fx.ns, d.ino, &v, SET_MODE | SET_GID, &d, 0);
	CHECK_EQ(ns_tmpfile(fx.ns, d.ino, 0666, true, &user, &t, 0), 0);
	CHECK_EQ(t.gid, 55);
	CHECK_EQ(t.mode, S_IFREG | 0644);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "d"), 0);
	CHECK_EQ(make_tmpfile(&fx, d.ino, true, &a), -ENOENT);
	CHECK_EQ(link_at(&fx, t.ino, d.ino, "f", &a), -ENOENT);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), 0);
	forget(&fx, t.ino, 2);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

TEST(a_linkable_tmpfile_gets_one_first_name)
{
	struct fixture fx;
	struct attr t, a;
	struct inode *inode;
	fx_new(&fx);
	CHECK_EQ(make_tmpfile(&fx, ROOT_INO, true, &t), 0);
	/* Contents from before, that a group let go of because the file had no name. */
	CHECK_EQ(ns_get_inode(fx.ns, t.ino, &inode, 0), 0);
	inode->content = calloc(1, INLINE_MAX);
	memcpy(inode->content, "early", 5);
	inode->attr.size = 5;
	inode->content_dirty = inode->attr_dirty = true;
	CHECK(inode->deleted);
	fx_dirtied(&fx, inode);
	ns_put_inode(fx.ns, inode);
	CHECK_EQ(fx_group(&fx), 0);
	CHECK_EQ(fx_rows(&fx, "content"), 0);

	make(&fx, ROOT_INO, "taken", S_IFREG | 0600, &a);
	forget(&fx, a.ino, 1);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "taken", &a), -EEXIST);
	CHECK_EQ(stat_of(&fx, t.ino).nlink, 0);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), 0);
	CHECK_EQ(a.ino, t.ino);
	CHECK_EQ(a.nlink, 1);
	CHECK(a.ctime > t.ctime);
	CHECK_EQ(fx.published, 1);
	CHECK_EQ(fx_rows(&fx, "orphan"), 0);
	forget(&fx, t.ino, 2);
	fx_reopen(&fx); /* writes it: it is dirty again */

	CHECK_EQ(look(&fx, ROOT_INO, "f", &a), 0);
	CHECK_EQ(a.nlink, 1);
	CHECK_EQ(a.size, 5);
	CHECK_EQ(fx_rows(&fx, "content"), 1);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "g", &a), 0);
	CHECK_EQ(a.nlink, 2);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	forget(&fx, t.ino, 2);
	fx_end(&fx);
}

TEST(a_first_name_is_given_once)
{
	struct fixture fx;
	struct attr t, a;
	fx_new(&fx);
	CHECK_EQ(make_tmpfile(&fx, ROOT_INO, true, &t), 0);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), 0);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	CHECK_EQ(stat_of(&fx, t.ino).nlink, 0);
	CHECK_EQ(link_at(&fx, t.ino, ROOT_INO, "f", &a), -ENOENT);
	CHECK_EQ(fx_rows(&fx, "orphan"), 1);
	forget(&fx, t.ino, 2);
	CHECK_EQ(fx_group(&fx), 0);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	fx_end(&fx);
}

/* ---- listing ---- */

/* In core or not, with an object or without: a listing loads what a lookup would. */
TEST(a_listing_loads_inodes)
{
	struct fixture fx;
	struct attr a, expected[4] = {{0}};
	struct ns_dirent e[6];
	size_t count;
	char name[2] = "0";
	struct object_record record = {.epoch = 3, .counter = 4, .salt = {5}};
	struct object_attr durable = {.size = 9999, .nodes = 3, .ctime = INT64_MAX};
	struct inode *inode;
	fx_new(&fx);
	for (int i = 0; i < 4; i++) {
		name[0] = (char)('0' + i);
		make(&fx, ROOT_INO, name, S_IFREG | (unsigned)i << 6, &a);
		if (i % 2 != 0)
			continue;
		ns_get_inode(fx.ns, a.ino, &inode, 0);
		memset(inode->object_id, 9 + i, ID_SIZE);
		ns_lock(fx.ns, 0);
		CHECK_EQ(ns_write_record(fx.ns, inode, &record, &durable, 0), 0);
		ns_unlock(fx.ns);
		ns_put_inode(fx.ns, inode);
	}
	fx_reopen(&fx);
	for (unsigned round = 0; round < 3; round++) {
		/* Nothing is in core; every other file is; all are. */
		for (unsigned i = round == 0 ? 4 : 0; i < 4; i += 3 - round) {
			name[0] = (char)('0' + i);
			CHECK_EQ(look(&fx, ROOT_INO, name, &expected[i]), 0);
		}
		CHECK_EQ(fx_list(&fx, ROOT_INO, 0, e, 6, &count), 0);
		if (!CHECK_EQ(count, 6))
			return;
		for (size_t k = 2; k < 6; k++) {
			int i = e[k].name[0] - '0';
			if (round == 0)
				expected[i] = e[k].attr;
			check_attr(e[k].attr, expected[i]);
			CHECK_EQ(e[k].attr.mode, S_IFREG | (unsigned)i << 6);
			CHECK_EQ(e[k].attr.size, i % 2 == 0 ? 9999 : 0);
			inode = inode_find(fx.table, e[k].attr.ino);
			CHECK_EQ(inode->has_record, i % 2 == 0);
			CHECK_EQ(inode->object_id[15], i % 2 == 0 ? 9 + i : 0);
			CHECK_EQ(inode->record.counter, i % 2 == 0 ? 4 : 0);
			CHECK_EQ(inode->record.salt[0], i % 2 == 0 ? 5 : 0);
			CHECK_EQ(inode->lookups, round == 2 || (round == 1 && i % 2 == 0) ? 2 : 1);
			inode_put(fx.table, inode);
			if (round != 2)
				forget(&fx, e[k].attr.ino, 2);
		}
		if (round == 1)
			fx.ns->listed_known = false;
	}
	for (size_t k = 2; k < 6; k++)
		forget(&fx, e[k].attr.ino, 2);
	fx_end(&fx);
}

TEST(an_entry_without_an_inode_is_an_error)
{
	static const char *const damages[] = {
		"DELETE FROM inode WHERE mode&7=4",
		"INSERT INTO object SELECT ino,x'00',1,1,zeroblob(32),0 FROM inode WHERE mode&7=4",
		"INSERT INTO object SELECT ino,zeroblob(16),1,1,x'00',0 FROM inode WHERE mode&7=4",
	};
	for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
		for (int known = 0; known < 2; known++) {
			struct fixture fx;
			struct attr a, b;
			struct ns_dirent e[4];
			size_t count;
			fx_new(&fx);
			make_dir(&fx, ROOT_INO, "d", &a);
			make(&fx, a.ino, "f", S_IFREG | 0604, &b);
			CHECK_EQ(fx_group(&fx), 0);
			struct object *object = fx.object;
			fx_crash(&fx);
			alter(object, damages[i]);
			CHECK_EQ(fx_open(&fx, object, false), 0);
			fx.ns->listed_known = known != 0;
			CHECK_EQ(fx_list(&fx, a.ino, 0, e, 4, &count), 0);
			CHECK_EQ(count, 2); /* the dots */
			CHECK_EQ(fx_list(&fx, a.ino, COOKIE_DOTDOT, e, 4, &count), -EIO);
			CHECK_EQ(count, 0);
			fx_crash(&fx);
			fake_object_destroy(object);
		}
	}
}

struct picky {
	struct ns_dirent entry; /* the last one that was offered */
	size_t offered, room;
};

static bool take_while_room(void *arg, const struct ns_dirent *entry)
{
	struct picky *p = arg;
	p->entry = *entry;
	return p->offered++ < p->room;
}

TEST(what_is_not_taken_is_not_known)
{
	struct fixture fx;
	struct attr a, root_attr;
	size_t count;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &a);
	make(&fx, ROOT_INO, "g", S_IFREG | 0600, &a);
	fx_reopen(&fx);
	root_attr = stat_of(&fx, ROOT_INO);
	struct picky p = {.room = 0};
	CHECK_EQ(ns_readdir(fx.ns, ROOT_INO, 0, take_while_room, &p, &count, 0), 0);
	CHECK_EQ(count, 0);
	CHECK_EQ(p.offered, 1);
	CHECK_EQ(p.entry.cookie, COOKIE_DOT);
	check_attr(p.entry.attr, root_attr);
	p = (struct picky){.room = 2};
	CHECK_EQ(ns_readdir(fx.ns, ROOT_INO, 0, take_while_room, &p, &count, 0), 0);
	CHECK_EQ(count, 2);
	CHECK_EQ(p.offered, 3);
	CHECK_EQ(inode_table_count(fx.table), 1); /* the third was offered, not taken */
	uint64_t refused = p.entry.attr.ino;
	p = (struct picky){.room = 1};
	CHECK_EQ(ns_readdir(fx.ns, ROOT_INO, COOKIE_DOTDOT, take_while_room, &p, &count, 0), 0);
	CHECK_EQ(count, 1);
	CHECK_EQ(inode_table_count(fx.table), 2);
	forget(&fx, refused, 1);
	CHECK_EQ(inode_table_count(fx.table), 1);
	fx_end(&fx);
}

TEST(a_plain_listing_reads_entries_only)
{
	struct fixture fx;
	struct attr d, a;
	size_t count;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	make(&fx, d.ino, "f", S_IFIFO | 0600, &a);
	fx_reopen(&fx);
	look(&fx, ROOT_INO, "d", &d);
	static const uint64_t cookies[] = {0, COOKIE_DOT, COOKIE_DOTDOT};
	const struct attr expected[] = {
		{.ino = d.ino, .mode = S_IFDIR}, {.ino = ROOT_INO, .mode = S_IFDIR}, {.ino = a.ino, .mode = S_IFIFO}};
	static const char *const names[] = {".", "..", "f"};
	struct picky all = {.room = 9};
	CHECK_EQ(ns_readdir(fx.ns, d.ino, 0, take_while_room, &all, &count, NS_PLAIN), 0);
	CHECK_EQ(count, 3);
	for (int i = 0; i < 3; i++) {
		struct picky p = {.room = 0};
		CHECK_EQ(ns_readdir(fx.ns, d.ino, cookies[i], take_while_room, &p, &count, NS_PLAIN), 0);
		CHECK_EQ(count, 0);
		CHECK(strcmp(p.entry.name, names[i]) == 0);
		check_attr(p.entry.attr, expected[i]);
	}
	CHECK_EQ(inode_table_count(fx.table), 2);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

static void forget_entries(struct fixture *fx, const struct ns_dirent *entries, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (entries[i].cookie > COOKIE_DOTDOT)
			forget(fx, entries[i].attr.ino, 1);
}

TEST(readdir_starts_with_the_dots)
{
	struct fixture fx;
	struct attr d, f;
	struct ns_dirent e[4];
	size_t count;
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "d", &d);
	make(&fx, d.ino, "f", S_IFREG | 0600, &f);
	CHECK_EQ(fx_list(&fx, d.ino, 0, e, 4, &count), 0);
	CHECK_EQ(count, 3);
	CHECK(strcmp(e[0].name, ".") == 0 && e[0].cookie == 1 && e[0].attr.ino == d.ino);
	CHECK(strcmp(e[1].name, "..") == 0 && e[1].cookie == 2 && e[1].attr.ino == ROOT_INO);
	CHECK(strcmp(e[2].name, "f") == 0 && e[2].name_len == 1);
	check_attr(e[2].attr, f);
	forget(&fx, f.ino, 1);
	for (uint64_t cookie = 0; cookie < 3; cookie++) {
		struct ns_dirent one;
		CHECK_EQ(fx_list(&fx, d.ino, cookie, &one, 1, &count), 0);
		CHECK_EQ(count, 1);
		CHECK(strcmp(one.name, e[cookie].name) == 0);
		CHECK_EQ(one.cookie, e[cookie].cookie);
		forget_entries(&fx, &one, 1);
	}
	CHECK_EQ(fx_list(&fx, d.ino, e[2].cookie, e, 4, &count), 0);
	CHECK_EQ(count, 0);
	CHECK_EQ(fx_list(&fx, d.ino, UINT64_MAX, e, 4, &count), 0);
	CHECK_EQ(count, 0);
	CHECK_EQ(fx_list(&fx, f.ino, 0, e, 4, &count), -ENOTDIR);
	forget(&fx, f.ino, 1);
	forget(&fx, d.ino, 1);
	fx_end(&fx);
}

enum { MANY = 2000 };

/* Lists everything in steps of `step`; seen[i] counts how often "n<i>" came. Calls change(fx, round) between the steps. */
static void list_all(struct fixture *fx, uint64_t dir, size_t step, unsigned *seen,
		     void (*change)(struct fixture *fx, uint64_t dir, unsigned round))
{
	struct ns_dirent e[64];
	uint64_t cookie = 0;
	size_t count = 1;
	for (unsigned round = 0; count > 0; round++) {
		CHECK_EQ(fx_list(fx, dir, cookie, e, step, &count), 0);
		for (size_t i = 0; i < count; i++) {
			CHECK(e[i].cookie > cookie);
			cookie = e[i].cookie;
			if (e[i].name[0] == 'n')
				seen[atoi(e[i].name + 1)]++;
		}
		forget_entries(fx, e, count);
		if (change != NULL)
			change(fx, dir, round);
	}
}

static void come_and_go(struct fixture *fx, uint64_t dir, unsigned round)
{
	char name[16];
	struct attr a;
	for (unsigned i = 0; i < 5; i++) {
		/* Every third number goes, others come; renamed ones do both. */
		snprintf(name, sizeof name, "n%u", (round * 5 + i) * 3 % MANY / 3 * 3);
		unlink_at(fx, dir, name);
		snprintf(name, sizeof name, "x%u", round * 5 + i);
		if (make(fx, dir, name, S_IFREG | 0600, &a) == 0)
			forget(fx, a.ino, 1);
		move(fx, dir, name, dir, "y", 0);
	}
}

static uint64_t fill(struct fixture *fx)
{
	char name[16];
	struct attr d, a;
	make_dir(fx, ROOT_INO, "d", &d);
	for (int i = 0; i < MANY; i++) {
		int len = snprintf(name, sizeof name, "n%d", i);
		CHECK_EQ(ns_mknod(fx->ns, d.ino, name, (size_t)len, S_IFREG, 0, &root, &a, 0), 0);
		forget(fx, a.ino, 1);
	}
	return d.ino;
}

TEST(readdir_is_right_while_entries_come_and_go)
{
	static unsigned seen[MANY];
	struct fixture fx;
	fx_new(&fx);
	uint64_t dir = fill(&fx);
	memset(seen, 0, sizeof seen);
	list_all(&fx, dir, 64, seen, NULL);
	for (int i = 0; i < MANY; i++)
		CHECK_EQ(seen[i], 1);
	memset(seen, 0, sizeof seen);
	list_all(&fx, dir, 7, seen, come_and_go);
	for (int i = 0; i < MANY; i++) {
		if (i % 3 != 0)
			CHECK_EQ(seen[i], 1);
		else
			CHECK(seen[i] <= 1);
	}
	forget(&fx, dir, 1);
	fx_end(&fx);
}

TEST(cookies_are_stable_over_reopening)
{
	struct fixture fx;
	struct ns_dirent a[64], b[64];
	size_t count_a, count_b;
	fx_new(&fx);
	uint64_t dir = fill(&fx);
	CHECK_EQ(fx_list(&fx, dir, 0, a, 64, &count_a), 0);
	forget_entries(&fx, a, count_a);
	uint64_t middle = a[31].cookie;
	forget(&fx, dir, 1);
	fx_reopen(&fx);
	CHECK_EQ(fx_list(&fx, dir, middle, b, 32, &count_b), 0);
	CHECK_EQ(count_b, 32);
	for (int i = 0; i < 32; i++) {
		CHECK_EQ(b[i].cookie, a[32 + i].cookie);
		CHECK(strcmp(b[i].name, a[32 + i].name) == 0);
	}
	forget_entries(&fx, b, count_b);
	fx_end(&fx);
}

static uint64_t same_hash(const uint8_t key[16], const void *data, size_t size)
{
	(void)key;
	(void)data;
	(void)size;
	return UINT64_MAX; /* also the largest base */
}

static uint64_t smallest_hash(const uint8_t key[16], const void *data, size_t size)
{
	(void)key;
	(void)data;
	(void)size;
	return 0;
}

TEST(names_with_one_hash_take_eight_cookies)
{
	for (int round = 0; round < 2; round++) {
		struct fixture fx;
		struct attr a;
		struct ns_dirent e[12];
		uint64_t inos[9], cookie5;
		char name[2] = "0";
		size_t count;
		fx_new(&fx);
		fx.ns->hash = round == 0 ? same_hash : smallest_hash;
		for (int i = 0; i < 8; i++) {
			name[0] = (char)('0' + i);
			CHECK_EQ(make(&fx, ROOT_INO, name, S_IFREG | 0600, &a), 0);
			inos[i] = a.ino;
			forget(&fx, a.ino, 1);
		}
		CHECK_EQ(make(&fx, ROOT_INO, "8", S_IFREG | 0600, &a), -ENOSPC);
		CHECK_EQ(move(&fx, ROOT_INO, "0", ROOT_INO, "8", 0), -ENOSPC);
		CHECK_EQ(make(&fx, ROOT_INO, "7", S_IFREG | 0600, &a), -EEXIST);
		CHECK_EQ(fx_list(&fx, ROOT_INO, 0, e, 12, &count), 0);
		CHECK_EQ(count, 10);
		CHECK(e[2].cookie >= COOKIE_FIRST && e[9].cookie == e[2].cookie + 7);
		CHECK(e[9].cookie <= INT64_MAX);
		forget_entries(&fx, e, count);
		cookie5 = e[2 + 5].cookie;

		/* Holes are found past and filled; the others keep their cookies. */
		CHECK_EQ(unlink_at(&fx, ROOT_INO, "2"), 0);
		for (int i = 0; i < 8; i++) {
			name[0] = (char)('0' + i);
			int r = look(&fx, ROOT_INO, name, &a);
			CHECK_EQ(r, i == 2 ? -ENOENT : 0);
			if (r == 0) {
				CHECK_EQ(a.ino, inos[i]);
				forget(&fx, a.ino, 1);
			}
		}
		CHECK_EQ(make(&fx, ROOT_INO, "8", S_IFREG | 0600, &a), 0);
		forget(&fx, a.ino, 1);
		CHECK_EQ(fx_list(&fx, ROOT_INO, cookie5 - 1, e, 1, &count), 0);
		CHECK(strcmp(e[0].name, "5") == 0);
		forget_entries(&fx, e, count);
		CHECK_EQ(look(&fx, ROOT_INO, "8", &a), 0);
		forget(&fx, a.ino, 1);
		fx_end(&fx);
	}
}

TEST(paths)
{
	struct fixture fx;
	struct attr a, b, f, l;
	char buffer[64];
	fx_new(&fx);
	make_dir(&fx, ROOT_INO, "a", &a);
	make_dir(&fx, a.ino, "bb", &b);
	make(&fx, b.ino, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_path(fx.ns, f.ino, buffer, sizeof buffer), 0);
	CHECK(strcmp(buffer, "/a/bb/f") == 0);
	CHECK_EQ(ns_path(fx.ns, b.ino, buffer, sizeof buffer), 0);
	CHECK(strcmp(buffer, "/a/bb") == 0);
	CHECK_EQ(ns_path(fx.ns, ROOT_INO, buffer, sizeof buffer), 0);
	CHECK(strcmp(buffer, "/") == 0);
	CHECK_EQ(ns_path(fx.ns, f.ino, buffer, 8), 0);
	CHECK_EQ(ns_path(fx.ns, f.ino, buffer, 7), -ERANGE);
	CHECK_EQ(link_at(&fx, f.ino, ROOT_INO, "l", &l), 0);
	CHECK_EQ(unlink_at(&fx, b.ino, "f"), 0);
	CHECK_EQ(ns_path(fx.ns, f.ino, buffer, sizeof buffer), 0);
	CHECK(strcmp(buffer, "/l") == 0);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "l"), 0);
	CHECK_EQ(ns_path(fx.ns, f.ino, buffer, sizeof buffer), -ENOENT);
	forget(&fx, f.ino, 2);
	forget(&fx, b.ino, 1);
	forget(&fx, a.ino, 1);
	fx_end(&fx);
}

TEST(statfs_counts_inodes)
{
	struct fixture fx;
	struct attr a;
	struct ns_counts counts;
	fx_new(&fx);
	make(&fx, ROOT_INO, "a", S_IFREG | 0600, &a);
	forget(&fx, a.ino, 1);
	CHECK_EQ(ns_statfs(fx.ns, &counts, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(ns_statfs(fx.ns, &counts, 0), 0);
	CHECK_EQ(counts.inodes, 2);
	make_dir(&fx, ROOT_INO, "b", &a);
	CHECK_EQ(ns_statfs(fx.ns, &counts, 0), 0);
	CHECK_EQ(counts.inodes, 3);
	CHECK_EQ(rmdir_at(&fx, ROOT_INO, "b"), 0);
	forget(&fx, a.ino, 1);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "a"), 0);
	CHECK_EQ(ns_statfs(fx.ns, &counts, 0), 0);
	CHECK_EQ(counts.inodes, 1);
	fx_end(&fx);
}

TEST(nowait_does_nothing_while_the_mutex_is_held)
{
	struct fixture fx;
	struct attr a, f;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	CHECK_EQ(ns_lock(fx.ns, 0), 0);
	CHECK_EQ(ns_lock(fx.ns, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(ns_lookup(fx.ns, ROOT_INO, "f", 1, &a, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(ns_unlink(fx.ns, ROOT_INO, "f", 1, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(ns_getattr(fx.ns, 77, &a, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(ns_getattr(fx.ns, f.ino, &a, NS_NOWAIT), 0); /* in core: needs no mutex */
	size_t count = 1;
	struct picky p = {.room = 9};
	CHECK_EQ(ns_readdir(fx.ns, ROOT_INO, 0, take_while_room, &p, &count, NS_NOWAIT), -EAGAIN);
	CHECK_EQ(count, 0);
	CHECK_EQ(p.offered, 0);
	ns_unlock(fx.ns);
	CHECK_EQ(ns_lookup(fx.ns, ROOT_INO, "f", 1, &a, NS_NOWAIT), 0);
	forget(&fx, f.ino, 2);
	fx_end(&fx);
}

/* ---- what groups and mount use ---- */

TEST(contents_in_rows)
{
	struct fixture fx;
	struct attr f;
	struct inode *inode;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	ns_get_inode(fx.ns, f.ino, &inode, 0);
	ns_lock(fx.ns, 0);
	pthread_mutex_lock(&inode->lock);
	CHECK_EQ(ns_load_content(fx.ns, inode), 0);
	CHECK(inode->content != NULL);
	memcpy(inode->content, "hello", 5);
	inode->attr.size = 5;
	inode->attr.blocks = 8;
	inode->attr.mtime = 77;
	inode->attr_dirty = inode->content_dirty = true;
	pthread_mutex_unlock(&inode->lock);
	uint64_t mark = ns_mark(fx.ns);
	CHECK_EQ(ns_write_inode(fx.ns, inode), 0);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	CHECK(!inode->attr_dirty && !inode->content_dirty);
	CHECK_EQ(ns_write_inode(fx.ns, inode), 0); /* nothing to write */
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	ns_unlock(fx.ns);
	ns_put_inode(fx.ns, inode);
	forget(&fx, f.ino, 1);
	fx_reopen(&fx);

	CHECK_EQ(ns_get_inode(fx.ns, f.ino, &inode, 0), 0);
	CHECK(inode->content == NULL);
	CHECK_EQ(inode->attr.size, 5);
	CHECK_EQ(inode->attr.blocks, 8);
	CHECK_EQ(inode->attr.mtime, 77);
	ns_lock(fx.ns, 0);
	pthread_mutex_lock(&inode->lock);
	CHECK_EQ(ns_load_content(fx.ns, inode), 0);
	CHECK_MEM_EQ(inode->content, "hello\0", 6);
	inode->attr.size = 0;
	inode->content_dirty = true;
	pthread_mutex_unlock(&inode->lock);
	CHECK_EQ(ns_write_inode(fx.ns, inode), 0);
	ns_unlock(fx.ns);
	CHECK_EQ(fx_rows(&fx, "content"), 0);
	ns_put_inode(fx.ns, inode);
	fx_end(&fx);
}

static void set_mtime(struct inode *inode, int64_t mtime)
{
	pthread_mutex_lock(&inode->lock);
	inode->attr.mtime = mtime;
	inode->attr_dirty = true;
	pthread_mutex_unlock(&inode->lock);
}

TEST(rows_written_together_are_one_transaction_and_all_or_none)
{
	struct fixture fx;
	struct attr f, g;
	struct inode *first, *second;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	make(&fx, ROOT_INO, "g", S_IFREG | 0600, &g);
	ns_get_inode(fx.ns, f.ino, &first, 0);
	ns_get_inode(fx.ns, g.ino, &second, 0);
	ns_lock(fx.ns, 0);
	uint64_t mark = ns_mark(fx.ns);
	ns_rows_begin(fx.ns);
	CHECK_EQ(ns_rows_end(fx.ns, 0), 0); /* nothing to write */
	CHECK_EQ(ns_mark(fx.ns), mark);
	set_mtime(first, 77);
	set_mtime(second, 78);
	ns_rows_begin(fx.ns);
	CHECK_EQ(ns_write_inode(fx.ns, first), 0);
	CHECK_EQ(ns_write_times(fx.ns, second), 0);
	CHECK_EQ(ns_mark(fx.ns), mark);
	CHECK_EQ(ns_rows_end(fx.ns, 0), 0);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	set_mtime(first, 87);
	set_mtime(second, 88);
	ns_rows_begin(fx.ns);
	CHECK_EQ(ns_write_inode(fx.ns, first), 0);
	CHECK_EQ(ns_write_times(fx.ns, second), 0);
	CHECK_EQ(ns_rows_end(fx.ns, -EIO), -EIO);
	CHECK_EQ(ns_mark(fx.ns), mark + 1);
	ns_unlock(fx.ns);
	ns_put_inode(fx.ns, first);
	ns_put_inode(fx.ns, second);
	forget(&fx, f.ino, 1);
	forget(&fx, g.ino, 1);
	fx_reopen(&fx);
	CHECK_EQ(ns_getattr(fx.ns, f.ino, &f, 0), 0);
	CHECK_EQ(ns_getattr(fx.ns, g.ino, &g, 0), 0);
	CHECK(f.mtime == 77 && g.mtime == 78);
	fx_end(&fx);
}

static int count_objects(void *arg, const struct ns_object_row *row)
{
	struct ns_object_row *last = arg;
	*last = *row;
	return 0;
}

static int count_ids(void *arg, const uint8_t id[ID_SIZE])
{
	unsigned *count = arg;
	(void)id;
	++*count;
	return 0;
}

TEST(records_of_objects)
{
	struct fixture fx;
	struct attr f;
	struct inode *inode;
	struct object_record record = {.epoch = 3, .counter = UINT64_MAX};
	struct object_attr durable = {.size = 9000, .nodes = 3, .atime = 1, .mtime = -2};
	struct ns_object_row row = {0};
	unsigned ids = 0, closed = 0;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	ns_get_inode(fx.ns, f.ino, &inode, 0);
	ns_lock(fx.ns, 0);
	pthread_mutex_lock(&inode->lock);
	ns_load_content(fx.ns, inode);
	inode->attr.size = 3;
	inode->content_dirty = true;
	pthread_mutex_unlock(&inode->lock);
	CHECK_EQ(ns_write_inode(fx.ns, inode), 0);
	memset(inode->object_id, 0xab, ID_SIZE);
	memset(record.salt, 0xcd, SALT_SIZE);
	CHECK_EQ(ns_write_record(fx.ns, inode, &record, &durable, 9), 0);
	ns_unlock(fx.ns);
	CHECK(inode->has_record);
	CHECK_MEM_EQ(&inode->record, &record, sizeof record);
	CHECK_EQ(fx_rows(&fx, "content"), 0); /* the contents moved to the object */
	ns_put_inode(fx.ns, inode);
	forget(&fx, f.ino, 1);
	fx_reopen(&fx);

	CHECK_EQ(ns_each_active(fx.ns, count_objects, &row), 0);
	CHECK_EQ(row.ino, f.ino);
	CHECK_EQ(row.active_epoch, 9);
	CHECK(!row.orphan);
	CHECK_MEM_EQ(&row.record, &record, sizeof record);
	CHECK_EQ(ns_get_inode(fx.ns, f.ino, &inode, 0), 0);
	CHECK(inode->has_record);
	CHECK_MEM_EQ(&inode->record, &record, sizeof record);
	CHECK_MEM_EQ(inode->object_id, row.id, ID_SIZE);
	CHECK_EQ(inode->attr.size, 9000);
	CHECK_EQ(inode->attr.blocks, 24);
	CHECK_EQ(inode->attr.atime, 1);
	CHECK_EQ(inode->attr.mtime, -2);
	CHECK_EQ(inode->attr.ctime, f.ctime); /* the row had a later one */
	record.counter = 1;
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_write_record(fx.ns, inode, &record, &durable, 0), 0);
	ns_unlock(fx.ns);
	row.ino = 0;
	CHECK_EQ(ns_each_active(fx.ns, count_objects, &row), 0);
	CHECK_EQ(row.ino, 0);
	CHECK_EQ(ns_each_object(fx.ns, count_objects, &row), 0);
	CHECK_EQ(row.ino, f.ino);
	CHECK_EQ(row.record.counter, 1);

	/* The last use closes the object and notes its id, which the event tells. */
	inode->object = fake_object_create();
	inode->object->closed = &closed;
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	CHECK_EQ(fx.dropped, 0);
	CHECK_EQ(ns_each_object(fx.ns, count_objects, &row), 0);
	CHECK(row.orphan);
	ns_put_inode(fx.ns, inode);
	CHECK_EQ(closed, 1);
	CHECK_EQ(fx.dropped, 1);
	CHECK_MEM_EQ(fx.dropped_id, row.id, ID_SIZE);
	CHECK_EQ(fx_rows(&fx, "object"), 0);
	CHECK_EQ(ns_each_dropped(fx.ns, count_ids, &ids), 0);
	CHECK_EQ(ids, 1);
	CHECK_EQ(ns_forget_dropped(fx.ns, row.id), 0);
	CHECK_EQ(fx_rows(&fx, "dropped"), 0);
	fx_end(&fx);
}

TEST(blocks_are_never_none_for_contents)
{
	CHECK_EQ(ns_blocks(0, 0), 0);
	CHECK_EQ(ns_blocks(1, 0), 8);
	CHECK_EQ(ns_blocks(1, 1), 8);
	CHECK_EQ(ns_blocks(1 << 20, 3), 24);
}

TEST(an_object_without_a_row_is_dropped_too)
{
	struct fixture fx;
	struct attr f;
	struct inode *inode;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	ns_get_inode(fx.ns, f.ino, &inode, 0);
	memset(inode->object_id, 0x77, ID_SIZE);
	ns_put_inode(fx.ns, inode);
	CHECK_EQ(unlink_at(&fx, ROOT_INO, "f"), 0);
	forget(&fx, f.ino, 1);
	CHECK_EQ(fx.dropped, 1);
	CHECK_EQ(fx.dropped_id[3], 0x77);
	CHECK_EQ(fx_rows(&fx, "dropped"), 1);
	fx_end(&fx);
}

TEST(iteration_goes_over_pages)
{
	enum { N = 700 };
	struct fixture fx;
	struct attr a;
	struct inode *inode;
	struct object_record record = {.epoch = 1};
	struct object_attr durable = {0};
	unsigned ids = 0;
	char name[16];
	fx_new(&fx);
	for (int i = 0; i < N; i++) {
		snprintf(name, sizeof name, "%d", i);
		make(&fx, ROOT_INO, name, S_IFREG | 0600, &a);
		ns_get_inode(fx.ns, a.ino, &inode, 0);
		memcpy(inode->object_id, name, 4);
		inode->object_id[15] = 1;
		ns_lock(fx.ns, 0);
		CHECK_EQ(ns_write_record(fx.ns, inode, &record, &durable, 1), 0);
		ns_unlock(fx.ns);
		ns_put_inode(fx.ns, inode);
		unlink_at(&fx, ROOT_INO, name);
	}
	struct object *object = fx.object;
	CHECK_EQ(fx_group(&fx), 0);
	fx_crash(&fx); /* all of them are orphans now */
	CHECK_EQ(fx_open(&fx, object, false), 0);
	CHECK_EQ(fx_rows(&fx, "object"), N);
	CHECK_EQ(ns_reclaim_orphans(fx.ns), 0);
	CHECK_EQ(fx.dropped, N);
	CHECK_EQ(fx_rows(&fx, "inode"), 1);
	CHECK_EQ(fx_rows(&fx, "object"), 0);
	CHECK_EQ(ns_each_dropped(fx.ns, count_ids, &ids), 0);
	CHECK_EQ(ids, N);
	fx_end(&fx);
}

TEST(values_of_the_volume)
{
	struct fixture fx;
	char value[8];
	size_t len;
	fx_new(&fx);
	CHECK_EQ(ns_get_value(fx.ns, "x", value, sizeof value, &len), -ENOENT);
	CHECK_EQ(ns_set_value(fx.ns, "x", "12345678", 8), 0);
	CHECK_EQ(ns_set_value(fx.ns, "y", "", 0), 0);
	fx_reopen(&fx);
	CHECK_EQ(ns_get_value(fx.ns, "x", value, sizeof value, &len), 0);
	CHECK_EQ(len, 8);
	CHECK_MEM_EQ(value, "12345678", 8);
	CHECK_EQ(ns_get_value(fx.ns, "x", value, 7, &len), -ERANGE);
	CHECK_EQ(ns_get_value(fx.ns, "y", value, sizeof value, &len), 0);
	CHECK_EQ(len, 0);
	fx_end(&fx);
}

TEST(deleting_gives_the_space_of_the_database_back)
{
	enum { N = 1000 };
	static char value[INLINE_MAX];
	struct fixture fx;
	struct attr a;
	char name[16];
	fx_new(&fx);
	ns_lock(fx.ns, 0);
	CHECK_EQ(ns_shrink(fx.ns), 0);
	ns_unlock(fx.ns);
	for (int i = 0; i < N; i++) {
		snprintf(name, sizeof name, "%d", i);
		make(&fx, ROOT_INO, name, S_IFREG | 0600, &a);
		CHECK_EQ(ns_setxattr(fx.ns, a.ino, "user.x", value, sizeof value, 0, true, 0), 0);
		forget(&fx, a.ino, 1);
	}
	size_t full = fx.object->size;
	CHECK(full > N * sizeof value);
	for (int i = 0; i < N; i++) {
		snprintf(name, sizeof name, "%d", i);
		if (i % 10 != 0)
			CHECK_EQ(unlink_at(&fx, ROOT_INO, name), 0);
	}
	CHECK_EQ(fx.object->size, full);
	int calls = 0, r;
	ns_lock(fx.ns, 0);
	while ((r = ns_shrink(fx.ns)) == 1)
		calls++;
	ns_unlock(fx.ns);
	CHECK_EQ(r, 0);
	CHECK(calls > 4);
	CHECK(fx.object->size < full / 2);
	fx_reopen(&fx);
	for (int i = 0; i < N; i++) {
		snprintf(name, sizeof name, "%d", i);
		r = look(&fx, ROOT_INO, name, &a);
		CHECK_EQ(r, i % 10 == 0 ? 0 : -ENOENT);
		if (r == 0)
			forget(&fx, a.ino, 1);
	}
	fx_end(&fx);
}

TEST(marks_of_inodes_follow_their_changes)
{
	struct fixture fx;
	struct attr f, a, v = {.mode = 0644};
	struct inode *inode;
	fx_new(&fx);
	make(&fx, ROOT_INO, "f", S_IFREG | 0600, &f);
	ns_get_inode(fx.ns, f.ino, &inode, 0);
	CHECK_EQ(inode->meta_mark, ns_mark(fx.ns));
	uint64_t mark = inode->meta_mark;
	ns_setattr(fx.ns, f.ino, &v, SET_MTIME, &a, 0);
	CHECK_EQ(inode->meta_mark, mark);
	ns_setattr(fx.ns, f.ino, &v, SET_MODE, &a, 0);
	CHECK_EQ(inode->meta_mark, ++mark);
	ns_setxattr(fx.ns, f.ino, "user.a", "", 0, 0, true, 0);
	CHECK_EQ(inode->meta_mark, ++mark);
	move(&fx, ROOT_INO, "f", ROOT_INO, "g", 0);
	CHECK_EQ(inode->meta_mark, ++mark);
	link_at(&fx, f.ino, ROOT_INO, "h", &a);
	CHECK_EQ(inode->meta_mark, ++mark);
	unlink_at(&fx, ROOT_INO, "h");
	CHECK_EQ(inode->meta_mark, ++mark);
	CHECK_EQ(ns_mark(fx.ns), mark);
	CHECK_EQ(fx.ns->root->meta_mark, mark); /* fsync of the directory waits for its entries */
	ns_put_inode(fx.ns, inode);
	forget(&fx, f.ino, 2);
	fx_end(&fx);
}
