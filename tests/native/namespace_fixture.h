/*
 * A namespace on an object in RAM, the part of the groups that it needs, and a checker of its
 * database. Include it once, after check.h.
 */
#ifndef ENCFSD_NAMESPACE_FIXTURE_H
#define ENCFSD_NAMESPACE_FIXTURE_H

#include <sqlite3.h>
#include <stdarg.h>
#include <sys/stat.h>

#include "_namespace.h"
#include "_namespace_internal.h"
#include "fake_object.h"

struct fixture {
	struct object *object;
	struct inode_table *table;
	struct namespace *ns;
	pthread_mutex_t dirty_mutex; /* guards the list, as groups' mutex does */
	struct inode *dirty; /* list through dirty_next; each holds a reference */
	unsigned published, dropped;
	uint8_t dropped_id[ID_SIZE];
	char message[200];
};

static const struct ns_caller root = {0, 0, 022};
static const struct ns_caller user = {1000, 100, 022};

static void fx_published(void *arg, struct inode *inode)
{
	struct fixture *fx = arg;
	(void)inode;
	fx->published++;
}

static void fx_dirtied(void *arg, struct inode *inode)
{
	struct fixture *fx = arg;
	pthread_mutex_lock(&fx->dirty_mutex);
	if (!inode->on_dirty_list) {
		inode->on_dirty_list = true;
		inode_hold(fx->table, inode);
		inode->dirty_next = fx->dirty;
		fx->dirty = inode;
	}
	pthread_mutex_unlock(&fx->dirty_mutex);
}

static inline struct inode *fx_next_dirty(struct fixture *fx)
{
	pthread_mutex_lock(&fx->dirty_mutex);
	struct inode *inode = fx->dirty;
	if (inode != NULL) {
		fx->dirty = inode->dirty_next;
		inode->on_dirty_list = false;
	}
	pthread_mutex_unlock(&fx->dirty_mutex);
	return inode;
}

static void fx_dropped(void *arg, const uint8_t id[ID_SIZE])
{
	struct fixture *fx = arg;
	fx->dropped++;
	memcpy(fx->dropped_id, id, ID_SIZE);
}

/* A group: writes the rows of all dirty inodes. Returns the first error. */
static inline int fx_group(struct fixture *fx)
{
	int result = 0;
	for (;;) {
		CHECK_EQ(ns_lock(fx->ns, 0), 0);
		struct inode *inode = fx_next_dirty(fx);
		if (inode != NULL) {
			int r = inode->deleted ? 0 : ns_write_inode(fx->ns, inode);
			result = result == 0 ? r : result;
		}
		ns_unlock(fx->ns);
		if (inode == NULL)
			return result;
		ns_put_inode(fx->ns, inode);
	}
}

static inline int fx_open(struct fixture *fx, struct object *object, bool read_only)
{
	struct ns_events events = {fx_published, fx_dirtied, fx_dropped, fx};
	*fx = (struct fixture){.object = object};
	pthread_mutex_init(&fx->dirty_mutex, NULL);
	CHECK_EQ(inode_table_create(&fx->table), 0);
	int r = ns_open(&fx->ns, object, fx->table, &events, read_only, 1 << 20, fx->message,
			sizeof fx->message);
	if (r < 0)
		inode_table_destroy(fx->table);
	return r;
}

/* Forgets everything in core without writing it, as a crash does; keeps the object. */
static inline void fx_crash(struct fixture *fx)
{
	ns_close(fx->ns);
	inode_table_destroy(fx->table);
}

static inline void fx_new(struct fixture *fx)
{
	struct object *object = fake_object_create();
	CHECK_EQ(ns_format(object, 7, 8), 0);
	CHECK_EQ(fx_open(fx, object, false), 0);
}

static inline void fx_reopen(struct fixture *fx)
{
	struct object *object = fx->object;
	CHECK_EQ(fx_group(fx), 0);
	fx_crash(fx);
	CHECK_EQ(fx_open(fx, object, false), 0);
}

/* ---- the database, seen past the namespace ---- */

/* Runs a query that returns text or integers; appends rows, columns separated by '|', to `out`. */
static inline void fx_query(sqlite3 *db, char **out, size_t *len, const char *sql)
{
	sqlite3_stmt *stmt;
	if (!CHECK_EQ(sqlite3_prepare_v2(db, sql, -1, &stmt, NULL), SQLITE_OK))
		return;
	while (sqlite3_step(stmt) == SQLITE_ROW) {
		for (int i = 0; i < sqlite3_column_count(stmt); i++) {
			const char *text = (const char *)sqlite3_column_text(stmt, i);
			size_t n = text == NULL ? 0 : strlen(text);
			*out = realloc(*out, *len + n + 2);
			memcpy(*out + *len, text == NULL ? "" : text, n);
			*len += n;
			(*out)[(*len)++] = i + 1 < sqlite3_column_count(stmt) ? '|' : '\n';
			(*out)[*len] = '\0';
		}
	}
	CHECK_EQ(sqlite3_finalize(stmt), SQLITE_OK);
}

/* Text of the given queries (ended by NULL) on what the object holds now; the caller frees it. */
static inline char *fx_sql(struct object *object, const char *const *queries)
{
	struct vfs_file *file;
	char name[32], message[200];
	sqlite3 *db;
	char *out = calloc(1, 1);
	size_t len = 0;
	CHECK_EQ(vfs_attach(&file, object, name), 0);
	if (CHECK_EQ(schema_connect(&db, name, true, 1 << 20, message, sizeof message), 0)) {
		for (; *queries != NULL; queries++)
			fx_query(db, &out, &len, *queries);
		schema_close(db);
	}
	vfs_detach(file);
	return out;
}

/* Everything that the database holds, but for the reserve of inode numbers. */
static inline char *fx_dump(struct object *object)
{
	static const char *const queries[] = {
		"SELECT * FROM inode ORDER BY ino",
		"SELECT parent,cookie,hex(name),ino,type FROM dirent ORDER BY parent,cookie",
		"SELECT ino,hex(name),hex(value) FROM xattr ORDER BY ino,name",
		"SELECT ino,hex(data) FROM content ORDER BY ino",
		"SELECT ino,hex(id),epoch,counter,hex(salt),active_epoch FROM object ORDER BY ino",
		"SELECT ino FROM orphan ORDER BY ino",
		"SELECT hex(id) FROM dropped ORDER BY id",
		NULL,
	};
	return fx_sql(object, queries);
}

/* Counts what contradicts itself; each line names the rule. */
static inline void fx_check_database(struct object *object)
{
	static const char *const queries[] = {
		"SELECT 'integrity',* FROM pragma_integrity_check WHERE integrity_check<>'ok'",
		"SELECT 'dangling entry',parent,ino FROM dirent d"
		" WHERE NOT EXISTS (SELECT 1 FROM inode i WHERE i.ino=d.ino AND i.mode&61440=d.type)",
		"SELECT 'entry in no directory',parent FROM dirent d"
		" WHERE NOT EXISTS (SELECT 1 FROM inode i WHERE i.ino=d.parent AND i.mode&61440=16384"
		"  AND ino NOT IN orphan)",
		"SELECT 'links of file',ino,nlink FROM inode i WHERE mode&61440<>16384"
		" AND ino NOT IN orphan AND nlink<>(SELECT count(*) FROM dirent d WHERE d.ino=i.ino)",
		"SELECT 'links of directory',ino,nlink FROM inode i WHERE mode&61440=16384 AND ino NOT IN orphan"
		" AND nlink<>2+(SELECT count(*) FROM dirent d WHERE d.parent=i.ino AND d.type=16384)",
		"SELECT 'parent',ino,parent FROM inode i WHERE mode&61440=16384 AND ino<>1 AND"
		" (SELECT count(*) FROM dirent d WHERE d.ino=i.ino AND d.parent=i.parent)<>(ino NOT IN orphan)",
		"SELECT 'orphan with a name',ino FROM dirent WHERE ino IN orphan",
		"SELECT 'orphan without a row',ino FROM orphan WHERE ino NOT IN (SELECT ino FROM inode)",
		"SELECT 'parent of a file',ino FROM inode WHERE mode&61440<>16384 AND parent<>0",
		"SELECT 'cookie',parent,cookie FROM dirent WHERE cookie<3",
		"SELECT 'name twice',parent,name FROM dirent GROUP BY parent,name HAVING count(*)>1",
		"SELECT 'xattr',ino FROM xattr WHERE ino NOT IN (SELECT ino FROM inode)",
		"SELECT 'content',ino FROM content WHERE ino NOT IN (SELECT ino FROM inode)",
		"SELECT 'object',ino FROM object WHERE ino NOT IN (SELECT ino FROM inode)",
		"SELECT 'dropped',hex(id) FROM dropped WHERE id IN (SELECT id FROM object)",
		"SELECT 'root',* FROM inode WHERE ino=1 AND parent<>1",
		NULL,
	};
	char *found = fx_sql(object, queries);
	if (!CHECK(found[0] == '\0'))
		fprintf(stderr, "%s", found);
	free(found);
}

/* Number of rows of a table. */
static inline long fx_rows(struct fixture *fx, const char *table)
{
	char sql[64];
	snprintf(sql, sizeof sql, "SELECT count(*) FROM %s", table);
	const char *const queries[] = {sql, NULL};
	char *text = fx_sql(fx->object, queries);
	long n = atol(text);
	free(text);
	return n;
}

/* Ends a test: the kernel has forgotten everything, so nothing may be left in core. */
static inline void fx_end(struct fixture *fx)
{
	bool torn;
	if (ns_failed(fx->ns, &torn) == 0)
		CHECK_EQ(fx_group(fx), 0);
	fx_check_database(fx->object);
	CHECK_EQ(ns_close(fx->ns), 0);
	CHECK_EQ(inode_table_count(fx->table), 0);
	inode_table_destroy(fx->table);
	fake_object_destroy(fx->object);
}

/* Field by field: the struct has padding. */
static inline void check_attr(struct attr actual, struct attr expected)
{
	CHECK_EQ(actual.ino, expected.ino);
	CHECK_EQ(actual.mode, expected.mode);
	CHECK_EQ(actual.nlink, expected.nlink);
	CHECK_EQ(actual.uid, expected.uid);
	CHECK_EQ(actual.gid, expected.gid);
	CHECK_EQ(actual.rdev, expected.rdev);
	CHECK_EQ(actual.size, expected.size);
	CHECK_EQ(actual.blocks, expected.blocks);
	CHECK_EQ(actual.atime, expected.atime);
	CHECK_EQ(actual.mtime, expected.mtime);
	CHECK_EQ(actual.ctime, expected.ctime);
	CHECK_EQ(actual.btime, expected.btime);
}

/* ---- operations by C string ---- */

static inline int look(struct fixture *fx, uint64_t parent, const char *name, struct attr *out)
{
	return ns_lookup(fx->ns, parent, name, strlen(name), out, 0);
}

static inline int make(struct fixture *fx, uint64_t parent, const char *name, uint32_t mode,
		       struct attr *out)
{
	return ns_mknod(fx->ns, parent, name, strlen(name), mode, 0, &root, out, 0);
}

static inline int make_dir(struct fixture *fx, uint64_t parent, const char *name, struct attr *out)
{
	return ns_mkdir(fx->ns, parent, name, strlen(name), 0755, &root, out, 0);
}

static inline int unlink_at(struct fixture *fx, uint64_t parent, const char *name)
{
	return ns_unlink(fx->ns, parent, name, strlen(name), 0);
}

static inline int rmdir_at(struct fixture *fx, uint64_t parent, const char *name)
{
	return ns_rmdir(fx->ns, parent, name, strlen(name), 0);
}

static inline int link_at(struct fixture *fx, uint64_t ino, uint64_t parent, const char *name,
			  struct attr *out)
{
	return ns_link(fx->ns, ino, parent, name, strlen(name), out, 0);
}

static inline int move(struct fixture *fx, uint64_t parent, const char *name, uint64_t new_parent,
		       const char *new_name, uint32_t rename_flags)
{
	return ns_rename(fx->ns, parent, name, strlen(name), new_parent, new_name, strlen(new_name),
			 rename_flags, 0);
}

static inline struct attr stat_of(struct fixture *fx, uint64_t ino)
{
	struct attr attr = {0};
	CHECK_EQ(ns_getattr(fx->ns, ino, &attr, 0), 0);
	return attr;
}

static inline void forget(struct fixture *fx, uint64_t ino, uint64_t n)
{
	CHECK_EQ(ns_forget(fx->ns, ino, n), 0);
}

/* What fx_list fills. */
struct fx_entries {
	struct ns_dirent *entries;
	size_t count, max;
};

static inline bool fx_emit(void *arg, const struct ns_dirent *entry)
{
	struct fx_entries *array = arg;
	if (array->count == array->max)
		return false;
	array->entries[array->count++] = *entry;
	return true;
}

/* At most `max` entries in an array. */
static inline int fx_list(struct fixture *fx, uint64_t ino, uint64_t cookie, struct ns_dirent *entries,
			  size_t max, size_t *count)
{
	struct fx_entries array = {.entries = entries, .max = max};
	int r = ns_readdir(fx->ns, ino, cookie, fx_emit, &array, count, 0);
	CHECK_EQ(*count, array.count);
	return r;
}

#endif
