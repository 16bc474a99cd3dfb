#include <sqlite3.h>

#include "_schema.h"
#include "_vfs.h"
#include "check.h"
#include "fake_object.h"

struct connection {
	struct object *object;
	struct vfs_file *file;
	sqlite3 *db;
	char name[32];
};

static struct connection connect_fake(void)
{
	struct connection c = {.object = fake_object_create()};
	char message[200] = "";
	CHECK_EQ(vfs_register(), 0);
	CHECK_EQ(vfs_attach(&c.file, c.object, c.name), 0);
	CHECK_EQ(schema_connect(&c.db, c.name, false, 1 << 20, message, sizeof message), 0);
	CHECK_EQ(message[0], 0);
	return c;
}

static void disconnect(struct connection *c)
{
	CHECK_EQ(schema_close(c->db), 0);
	vfs_detach(c->file);
	fake_object_destroy(c->object);
}

static int run(struct connection *c, const char *sql)
{
	return sqlite3_exec(c->db, sql, NULL, NULL, NULL);
}

TEST(each_commit_is_one_mark)
{
	struct connection c = connect_fake();
	CHECK_EQ(vfs_marks(c.file), 0);
	CHECK_EQ(run(&c, "CREATE TABLE t(a INTEGER PRIMARY KEY, b BLOB)"), SQLITE_OK);
	CHECK_EQ(vfs_marks(c.file), 1);
	for (int i = 0; i < 100; i++)
		CHECK_EQ(run(&c, "BEGIN; INSERT INTO t(b) VALUES(randomblob(9000));"
				 "INSERT INTO t(b) VALUES(randomblob(9000)); COMMIT"),
			 SQLITE_OK);
	CHECK_EQ(vfs_marks(c.file), 101);
	CHECK_EQ(run(&c, "DELETE FROM t"), SQLITE_OK);
	CHECK_EQ(vfs_marks(c.file), 102);
	disconnect(&c);
}

TEST(what_changes_nothing_makes_no_mark)
{
	struct connection c = connect_fake();
	run(&c, "CREATE TABLE t(a)");
	uint64_t marks = vfs_marks(c.file), writes = c.object->writes;
	CHECK_EQ(run(&c, "SELECT * FROM t"), SQLITE_OK);
	CHECK_EQ(run(&c, "BEGIN; COMMIT"), SQLITE_OK);
	CHECK_EQ(run(&c, "BEGIN; INSERT INTO t VALUES(1); ROLLBACK"), SQLITE_OK);
	CHECK_EQ(vfs_marks(c.file), marks);
	CHECK_EQ(c.object->writes, writes);
	disconnect(&c);
}

TEST(pages_reach_the_object_only_at_commit)
{
	struct connection c = connect_fake();
	run(&c, "CREATE TABLE t(a)");
	uint64_t writes = c.object->writes;
	CHECK_EQ(run(&c, "BEGIN"), SQLITE_OK);
	/* Eight times the page cache. */
	for (int i = 0; i < 2000; i++)
		run(&c, "INSERT INTO t VALUES(randomblob(4000))");
	CHECK_EQ(c.object->writes, writes);
	CHECK_EQ(run(&c, "COMMIT"), SQLITE_OK);
	CHECK(c.object->writes > writes + 2000);
	CHECK_EQ(vfs_marks(c.file), 2);
	disconnect(&c);
}

TEST(no_other_file_can_be_opened)
{
	struct connection c = connect_fake();
	sqlite3 *other;
	run(&c, "CREATE TABLE t(a)");
	CHECK_EQ(sqlite3_open_v2("meta-nobody", &other, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE,
				 "encfsd") & 0xff, SQLITE_CANTOPEN);
	sqlite3_close(other);
	CHECK(run(&c, "ATTACH '/tmp/encfsd-test' AS other") != SQLITE_OK);
	CHECK(run(&c, "ATTACH ':memory:' AS other") != SQLITE_OK);
	CHECK(run(&c, "VACUUM") != SQLITE_OK);
	CHECK(run(&c, "VACUUM INTO '/tmp/encfsd-test'") != SQLITE_OK);
	/* A journal of any kind is memory; a write-ahead log is refused. */
	CHECK_EQ(run(&c, "PRAGMA journal_mode=DELETE"), SQLITE_OK);
	CHECK_EQ(run(&c, "INSERT INTO t VALUES(1)"), SQLITE_OK);
	CHECK_EQ(run(&c, "PRAGMA journal_mode=WAL; INSERT INTO t VALUES(2)") & 0xff, SQLITE_CANTOPEN);
	disconnect(&c);
}

TEST(a_detached_object_is_gone)
{
	struct object *a = fake_object_create(), *b = fake_object_create();
	struct vfs_file *fa, *fb;
	char name_a[32], name_b[32], message[200];
	sqlite3 *db;
	vfs_register();
	CHECK_EQ(vfs_attach(&fa, a, name_a), 0);
	CHECK_EQ(vfs_attach(&fb, b, name_b), 0);
	CHECK(strcmp(name_a, name_b) != 0);
	vfs_detach(fa);
	CHECK_EQ(sqlite3_open_v2(name_a, &db, SQLITE_OPEN_READWRITE, "encfsd") & 0xff,
		 SQLITE_CANTOPEN);
	sqlite3_close(db);
	CHECK_EQ(schema_connect(&db, name_b, false, 0, message, sizeof message), 0);
	CHECK_EQ(sqlite3_exec(db, "CREATE TABLE t(a)", NULL, NULL, NULL), SQLITE_OK);
	sqlite3_close(db);
	vfs_detach(fb);
	CHECK(b->size > 0);
	CHECK_EQ(a->size, 0);
	fake_object_destroy(a);
	fake_object_destroy(b);
}

/* Opens the database with cold caches and lets the call of one kind fail. */
static int failing_insert(struct connection *c, bool reads, int after, int error, bool for_good)
{
	char message[200];
	schema_close(c->db);
	CHECK_EQ(schema_connect(&c->db, c->name, false, 1 << 20, message, sizeof message), 0);
	c->object->fail_reads = reads;
	c->object->fail_writes = !reads;
	c->object->for_good = for_good;
	c->object->error = error;
	c->object->fail_after = after;
	int rc = run(c, "BEGIN; UPDATE t SET a=a+1; INSERT INTO t VALUES(1,randomblob(20000)); COMMIT");
	if (sqlite3_get_autocommit(c->db) == 0)
		run(c, "ROLLBACK");
	c->object->fail_after = -1;
	return rc;
}

TEST(errors_keep_their_meaning)
{
	static const struct {
		bool reads;
		int error, code;
	} cases[] = {
		{true, -EIO, SQLITE_IOERR},    {true, -ENOMEM, SQLITE_NOMEM},
		{false, -EIO, SQLITE_IOERR},   {false, -ENOSPC, SQLITE_FULL},
		{false, -EROFS, SQLITE_IOERR},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct connection c = connect_fake();
		run(&c, "CREATE TABLE t(a, b); INSERT INTO t VALUES(1, NULL)");
		CHECK_EQ(vfs_error(c.file), 0);
		int rc = failing_insert(&c, cases[i].reads, 0, cases[i].error, false);
		CHECK_EQ(rc & 0xff, cases[i].code);
		CHECK_EQ(vfs_error(c.file), cases[i].error);
		CHECK_EQ(c.object->failures, 1);
		disconnect(&c);
	}
	CHECK_EQ(schema_errno(SQLITE_OK), 0);
	CHECK_EQ(schema_errno(SQLITE_DONE), 0);
	CHECK_EQ(schema_errno(SQLITE_ROW), 0);
	CHECK_EQ(schema_errno(SQLITE_NOMEM), -ENOMEM);
	CHECK_EQ(schema_errno(SQLITE_IOERR_NOMEM), -ENOMEM);
	CHECK_EQ(schema_errno(SQLITE_IOERR_WRITE), -EIO);
	CHECK_EQ(schema_errno(SQLITE_FULL), -ENOSPC);
	CHECK_EQ(schema_errno(SQLITE_READONLY), -EROFS);
	CHECK_EQ(schema_errno(SQLITE_CONSTRAINT_PRIMARYKEY), -EIO);
	CHECK_EQ(schema_errno(SQLITE_CORRUPT), -EIO);
}

/* Either the object holds the old pages again after a failed commit, or vfs_torn says that it may not. */
TEST(a_failed_commit_is_undone_or_torn)
{
	bool seen_undone = false, seen_torn = false;
	for (int for_good = 0; for_good < 2; for_good++) {
		for (int after = 0; after < 50; after++) {
			struct connection c = connect_fake();
			run(&c, "CREATE TABLE t(a, b); INSERT INTO t VALUES(1, randomblob(3000))");
			size_t size = c.object->size;
			uint8_t *before = malloc(size);
			memcpy(before, c.object->bytes, size);
			uint64_t marks = vfs_marks(c.file);
			int rc = failing_insert(&c, false, after, -EIO, for_good);
			if (c.object->failures == 0) {
				CHECK_EQ(rc, SQLITE_OK);
				CHECK_EQ(vfs_marks(c.file), marks + 1);
				CHECK(!vfs_torn(c.file));
				after = 50;
			} else {
				CHECK_EQ(rc, SQLITE_IOERR_WRITE);
				CHECK_EQ(vfs_marks(c.file), marks);
				if (vfs_torn(c.file)) {
					seen_torn = true;
				} else {
					seen_undone = true;
					CHECK_EQ(c.object->size, size);
					CHECK_MEM_EQ(c.object->bytes, before, size);
				}
			}
			free(before);
			disconnect(&c);
		}
	}
	CHECK(seen_undone);
	CHECK(seen_torn);
}
