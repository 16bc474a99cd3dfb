/*
 * Every call of object 0 that an operation makes is made to fail, once and from then on. Then the
 * operation says so, nothing of it has happened, in core or in the database, and the namespace is
 * read-only; or, if even the old pages could not be written back, it gives nothing out any more.
 */
#include "check.h"
#include "namespace_fixture.h"

/* The tree that each operation starts from. */
enum { INO_D = 2, INO_E, INO_F, INO_G, INO_H, INO_LINK, INO_TMPFILE };

static void make_tree(struct fixture *fx)
{
	struct attr a;
	uint64_t expected = INO_D;
	struct object_record record = {.epoch = 1, .counter = 2};
	struct object_attr durable = {.size = 10, .nodes = 1};
	struct inode *inode;
	char name[32];

	fx_new(fx);
	CHECK_EQ(make_dir(fx, ROOT_INO, "d", &a), 0);
	CHECK_EQ(a.ino, expected++);
	CHECK_EQ(make_dir(fx, INO_D, "e", &a), 0);
	CHECK_EQ(a.ino, expected++);
	static const char *const files[] = {"f", "g", "h"};
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(make(fx, INO_D, files[i], S_IFREG | 0644, &a), 0);
		CHECK_EQ(a.ino, expected++);
	}
	CHECK_EQ(ns_symlink(fx->ns, INO_D, "l", 1, "target", 6, &root, &a, 0), 0);
	CHECK_EQ(a.ino, expected++);
	CHECK_EQ(ns_tmpfile(fx->ns, INO_D, 0600, true, &root, &a, 0), 0);
	CHECK_EQ(a.ino, expected);
	CHECK_EQ(link_at(fx, INO_H, ROOT_INO, "h2", &a), 0);
	CHECK_EQ(ns_setxattr(fx->ns, INO_G, "user.a", "value", 5, 0, true, 0), 0);
	struct attr set_id = {.mode = 06755};
	CHECK_EQ(ns_setattr(fx->ns, INO_H, &set_id, SET_MODE, &a, 0), 0);
	CHECK_EQ(ns_setxattr(fx->ns, INO_H, "security.capability", "value", 5, 0, true, 0), 0);
	/* Enough that the operations touch pages of several levels. */
	for (int i = 0; i < 120; i++) {
		snprintf(name, sizeof name, "some longer name %d", i);
		CHECK_EQ(make(fx, i % 2 == 0 ? ROOT_INO : INO_D, name, S_IFREG, &a), 0);
		forget(fx, a.ino, 1);
	}
	ns_get_inode(fx->ns, INO_G, &inode, 0);
	memset(inode->object_id, 9, ID_SIZE);
	ns_lock(fx->ns, 0);
	CHECK_EQ(ns_write_record(fx->ns, inode, &record, &durable, 1), 0);
	ns_unlock(fx->ns);
	ns_put_inode(fx->ns, inode);
	CHECK_EQ(fx_group(fx), 0);
}

static int op_create(struct fixture *fx)
{
	struct attr a;
	return make(fx, INO_D, "new", S_IFREG | 0644, &a);
}

static int op_mkdir(struct fixture *fx)
{
	struct attr a;
	return make_dir(fx, INO_D, "new", &a);
}

static int op_symlink(struct fixture *fx)
{
	struct attr a;
	return ns_symlink(fx->ns, INO_D, "new", 3, "t", 1, &root, &a, 0);
}

static int op_link(struct fixture *fx)
{
	struct attr a;
	return link_at(fx, INO_F, ROOT_INO, "new", &a);
}

static int op_tmpfile(struct fixture *fx)
{
	struct attr a;
	return ns_tmpfile(fx->ns, INO_D, 0600, true, &root, &a, 0);
}

/* It was loaded from its row, as never happens to one that may get a name. */
static int op_link_tmpfile(struct fixture *fx)
{
	struct attr a;
	struct inode *inode = inode_find(fx->table, INO_TMPFILE);
	inode->linkable = true;
	int r = link_at(fx, INO_TMPFILE, ROOT_INO, "new", &a);
	CHECK_EQ(inode->linkable, r < 0);
	CHECK_EQ(inode->deleted, r < 0);
	ns_put_inode(fx->ns, inode);
	return r;
}

static int op_drop_privileges(struct fixture *fx)
{
	return ns_drop_privileges(fx->ns, INO_H, false, NULL, 0);
}

static int op_unlink(struct fixture *fx)
{
	return unlink_at(fx, INO_D, "f");
}

static int op_unlink_one_of_two(struct fixture *fx)
{
	return unlink_at(fx, ROOT_INO, "h2");
}

static int op_rmdir(struct fixture *fx)
{
	return rmdir_at(fx, INO_D, "e");
}

static int op_rename(struct fixture *fx)
{
	return move(fx, INO_D, "f", ROOT_INO, "new", 0);
}

static int op_rename_over(struct fixture *fx)
{
	return move(fx, INO_D, "f", INO_D, "g", 0);
}

static int op_rename_directory(struct fixture *fx)
{
	return move(fx, INO_D, "e", ROOT_INO, "e", 0);
}

static int op_exchange(struct fixture *fx)
{
	return move(fx, INO_D, "e", ROOT_INO, "h2", RENAME_EXCHANGE);
}

static int op_chmod(struct fixture *fx)
{
	struct attr v = {.mode = 0600, .uid = 5}, out;
	return ns_setattr(fx->ns, INO_F, &v, SET_MODE | SET_UID, &out, 0);
}

static int op_setxattr(struct fixture *fx)
{
	static char value[20000];
	return ns_setxattr(fx->ns, INO_G, "user.b", value, sizeof value, 0, true, 0);
}

static int op_removexattr(struct fixture *fx)
{
	return ns_removexattr(fx->ns, INO_G, "user.a", 0);
}

static int op_write_inode(struct fixture *fx)
{
	struct inode *inode;
	int r = ns_get_inode(fx->ns, INO_F, &inode, 0);
	if (r < 0)
		return r;
	pthread_mutex_lock(&inode->lock);
	inode->content = inode->content != NULL ? inode->content : calloc(1, INLINE_MAX);
	inode->attr.size = 2000;
	inode->content_dirty = true;
	pthread_mutex_unlock(&inode->lock);
	ns_lock(fx->ns, 0);
	r = ns_write_inode(fx->ns, inode);
	ns_unlock(fx->ns);
	if (r < 0)
		CHECK(inode->content_dirty);
	/* Not what is compared: as it was before. */
	inode->attr.size = r < 0 ? 0 : inode->attr.size;
	inode->content_dirty = false;
	ns_put_inode(fx->ns, inode);
	return r;
}

static int op_write_record(struct fixture *fx)
{
	struct object_record record = {.epoch = 7, .counter = 8};
	struct object_attr durable = {.size = 5000, .nodes = 2};
	struct inode *inode;
	int r = ns_get_inode(fx->ns, INO_G, &inode, 0);
	if (r < 0)
		return r;
	ns_lock(fx->ns, 0);
	r = ns_write_record(fx->ns, inode, &record, &durable, 0);
	ns_unlock(fx->ns);
	CHECK_EQ(inode->record.epoch, r < 0 ? 1 : 7);
	ns_put_inode(fx->ns, inode);
	return r;
}

static int op_set_value(struct fixture *fx)
{
	return ns_set_value(fx->ns, "new", "value", 5);
}

static const struct operation {
	const char *name;
	int (*run)(struct fixture *fx);
} operations[] = {
	{"create", op_create},
	{"mkdir", op_mkdir},
	{"symlink", op_symlink},
	{"link", op_link},
	{"tmpfile", op_tmpfile},
	{"link of a tmpfile", op_link_tmpfile},
	{"drop privileges", op_drop_privileges},
	{"unlink", op_unlink},
	{"unlink one of two", op_unlink_one_of_two},
	{"rmdir", op_rmdir},
	{"rename", op_rename},
	{"rename over", op_rename_over},
	{"rename directory", op_rename_directory},
	{"exchange", op_exchange},
	{"chmod", op_chmod},
	{"setxattr", op_setxattr},
	{"removexattr", op_removexattr},
	{"write inode", op_write_inode},
	{"write record", op_write_record},
	{"set value", op_set_value},
};

static struct object *copy_of(const struct object *object)
{
	struct object *copy = fake_object_create();
	fake_object_resize(copy, object->size);
	memcpy(copy->bytes, object->bytes, object->size);
	return copy;
}

enum { WATCHED = 9 };

struct snapshot {
	struct attr attr[WATCHED];
	uint64_t mark;
};

/* Holds the tree's inodes in core from here on. */
static struct snapshot look_at_all(struct fixture *fx)
{
	struct snapshot s;
	for (uint64_t ino = 1; ino < WATCHED; ino++) {
		struct inode *inode;
		CHECK_EQ(ns_get_inode(fx->ns, ino, &inode, 0), 0);
		s.attr[ino] = inode->attr;
	}
	s.mark = ns_mark(fx->ns);
	return s;
}

static void let_go_of_all(struct fixture *fx)
{
	for (uint64_t ino = 1; ino < WATCHED; ino++) {
		struct inode *inode = inode_find(fx->table, ino);
		if (CHECK(inode != NULL)) {
			ns_put_inode(fx->ns, inode);
			ns_put_inode(fx->ns, inode);
		}
	}
}

/* After a failure. */
static void check_failed(struct fixture *fx, const struct snapshot *before, const char *dump, int result, bool torn)
{
	struct attr a;
	CHECK(result == -EIO || result == -ENOSPC || result == -ENOMEM);
	CHECK_EQ(ns_mark(fx->ns), before->mark);
	/* In core: as before, whatever became of the database. */
	for (uint64_t ino = 1; ino < WATCHED; ino++)
		check_attr(stat_of(fx, ino), before->attr[ino]);
	CHECK_EQ(make(fx, ROOT_INO, "later", S_IFREG, &a), torn ? -EIO : -EROFS);
	CHECK_EQ(unlink_at(fx, INO_D, "g"), torn ? -EIO : -EROFS);
	struct attr v = {0};
	CHECK_EQ(ns_setattr(fx->ns, INO_F, &v, SET_MTIME, &a, 0), torn ? -EIO : -EROFS);
	if (torn) {
		CHECK_EQ(look(fx, INO_D, "f", &a), -EIO);
		return;
	}
	CHECK_EQ(look(fx, INO_D, "f", &a), 0);
	check_attr(a, before->attr[INO_F]);
	forget(fx, INO_F, 1);
	CHECK_EQ(look(fx, INO_D, "new", &a), -ENOENT);
	CHECK_EQ(look(fx, ROOT_INO, "new", &a), -ENOENT);
	fx_check_database(fx->object);
	char *now = fx_dump(fx->object);
	CHECK(strcmp(now, dump) == 0);
	free(now);
}

struct fault {
	bool reads, for_good, cold;
	int error;
};

/* Returns whether the fault was met. */
static bool run_with_fault(const struct operation *op, const struct object *tree, const char *dump,
			   const struct fault *fault, int after, bool *seen_torn)
{
	struct fixture fx;
	bool torn;
	if (!CHECK_EQ(fx_open(&fx, copy_of(tree), false), 0))
		return false;
	struct snapshot before = look_at_all(&fx);
	if (fault->cold)
		sqlite3_db_release_memory(fx.ns->db);
	fx.object->fail_reads = fault->reads;
	fx.object->fail_writes = !fault->reads;
	fx.object->for_good = fault->for_good;
	fx.object->error = fault->error;
	fx.object->fail_after = after;
	int result = op->run(&fx);
	fx.object->fail_after = -1;
	bool met = fx.object->failures > 0;
	int failed = ns_failed(fx.ns, &torn);
	if (!met) {
		CHECK_EQ(result, 0);
		CHECK_EQ(failed, 0);
		CHECK_EQ(ns_mark(fx.ns), before.mark + 1);
	} else {
		*seen_torn |= torn;
		CHECK_EQ(result, fault->error);
		/* A read that fails before the transaction harms nobody. */
		if (failed != 0)
			check_failed(&fx, &before, dump, result, torn);
		else
			CHECK(fault->reads);
		if (!fault->reads)
			CHECK_EQ(failed, fault->error);
	}
	let_go_of_all(&fx);
	struct object *object = fx.object;
	if (!torn)
		fx_check_database(object);
	fx_crash(&fx);
	fake_object_destroy(object);
	return met;
}

TEST(each_failing_call_of_each_operation)
{
	static const struct fault faults[] = {
		{.error = -EIO},
		{.error = -ENOSPC},
		{.error = -EIO, .for_good = true},
		{.error = -EIO, .reads = true, .cold = true},
		{.error = -ENOMEM, .reads = true, .cold = true},
	};
	struct fixture fx;
	unsigned met = 0;
	bool seen_torn = false;
	make_tree(&fx);
	struct object *tree = fx.object;
	char *dump = fx_dump(tree);
	for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
		for (size_t j = 0; j < sizeof faults / sizeof *faults; j++) {
			int after = 0;
			while (run_with_fault(&operations[i], tree, dump, &faults[j], after, &seen_torn))
				after++;
			/* Each writes at least one page. */
			if (!faults[j].reads && !CHECK(after > 0))
				fprintf(stderr, "%s met no fault %zu\n", operations[i].name, j);
			met += (unsigned)after;
		}
	}
	CHECK(met > 200);
	CHECK(seen_torn);
	free(dump);
	fx_crash(&fx);
	fake_object_destroy(tree);
}

TEST(shrinking_fails_as_a_whole)
{
	static char value[INLINE_MAX];
	struct fixture fx;
	struct attr a;
	char name[16];
	fx_new(&fx);
	for (int i = 0; i < 1200; i++) {
		snprintf(name, sizeof name, "%d", i % 600);
		if (i >= 600) {
			CHECK_EQ(unlink_at(&fx, ROOT_INO, name), 0);
			continue;
		}
		make(&fx, ROOT_INO, name, S_IFREG, &a);
		ns_setxattr(fx.ns, a.ino, "user.x", value, sizeof value, 0, true, 0);
		forget(&fx, a.ino, 1);
	}
	CHECK_EQ(fx_group(&fx), 0);
	struct object *full = copy_of(fx.object);
	char *dump = fx_dump(full);
	fx_crash(&fx);
	fake_object_destroy(fx.object);
	bool met = true, truncated = false;
	for (int after = 0; met; after += 3) {
		CHECK_EQ(fx_open(&fx, copy_of(full), false), 0);
		struct object *object = fx.object;
		object->fail_writes = true;
		object->error = -EIO;
		object->fail_after = after;
		ns_lock(fx.ns, 0);
		int r = ns_shrink(fx.ns);
		ns_unlock(fx.ns);
		object->fail_after = -1;
		met = object->failures > 0;
		truncated |= object->truncates > 0;
		bool torn;
		CHECK_EQ(r, met ? -EIO : 1);
		CHECK_EQ(ns_failed(fx.ns, &torn), met ? -EIO : 0);
		CHECK(!torn);
		CHECK(met ? object->size == full->size : object->size < full->size);
		fx_crash(&fx);
		fx_check_database(object);
		char *now = fx_dump(object);
		CHECK(strcmp(now, dump) == 0);
		free(now);
		fake_object_destroy(object);
	}
	CHECK(truncated);
	free(dump);
	fake_object_destroy(full);
}

TEST(a_failed_reclaim_leaves_an_orphan_for_the_next_mount)
{
	struct fixture fx;
	make_tree(&fx);
	CHECK_EQ(unlink_at(&fx, INO_D, "g"), 0);
	fx.object->fail_writes = true;
	fx.object->error = -EIO;
	fx.object->fail_after = 0;
	forget(&fx, INO_G, 1);
	bool torn;
	CHECK_EQ(ns_failed(fx.ns, &torn), -EIO);
	CHECK(!torn);
	CHECK_EQ(fx.dropped, 0);
	CHECK(inode_find(fx.table, INO_G) == NULL);
	struct object *object = fx.object;
	fx_crash(&fx);
	CHECK_EQ(fx_open(&fx, object, false), 0);
	CHECK_EQ(ns_reclaim_orphans(fx.ns), 0);
	CHECK_EQ(fx.dropped, 1);
	CHECK_EQ(fx.dropped_id[0], 9);
	fx_end(&fx);
}

TEST(opening_fails_cleanly_at_each_read)
{
	struct fixture fx;
	make_tree(&fx);
	struct object *object = fx.object;
	fx_crash(&fx);
	int after = 0, r;
	do {
		object->fail_reads = true;
		object->error = -EIO;
		object->failures = 0;
		object->fail_after = after++;
		r = fx_open(&fx, object, false);
		object->fail_after = -1;
		if (object->failures > 0) {
			CHECK_EQ(r, -EIO);
			CHECK(fx.message[0] != '\0');
		}
	} while (r < 0);
	CHECK(after > 3);
	CHECK_EQ(object->failures, 0);
	fx_crash(&fx);
	fake_object_destroy(object);
}
