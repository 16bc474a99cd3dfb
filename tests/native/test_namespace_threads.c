/*
 * Threads that create, look up, read, rename, unlink and forget a few names of one directory, while
 * another one runs groups. Whoever holds a lookup must always find its inode; in the end nothing is
 * left over, in core or in the database.
 */
#include <pthread.h>

#include "check.h"
#include "namespace_fixture.h"

enum { THREADS = 4, ROUNDS = 4000, NAMES = 6, HELD = 16 };

struct shared {
	struct fixture fx;
	_Atomic bool stop;
	_Atomic unsigned created, unlinked, found;
};

struct worker {
	struct shared *shared;
	uint64_t seed;
	uint64_t held[HELD]; /* one lookup each; 0: free */
};

static unsigned random_below(struct worker *w, unsigned n)
{
	w->seed ^= w->seed << 13;
	w->seed ^= w->seed >> 7;
	w->seed ^= w->seed << 17;
	return (unsigned)(w->seed >> 11) % n;
}

/* Keeps the lookup that an operation gave, and gives back the one in its place. */
static void hold(struct worker *w, uint64_t ino)
{
	uint64_t *place = &w->held[random_below(w, HELD)];
	if (*place != 0)
		forget(&w->shared->fx, *place, 1);
	*place = ino;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	struct fixture *fx = &w->shared->fx;
	for (int i = 0; i < ROUNDS; i++) {
		char name[2] = {(char)('a' + random_below(w, NAMES)), 0};
		char other[2] = {(char)('a' + random_below(w, NAMES)), 0};
		struct attr a, v = {.mtime = i};
		uint64_t ino = w->held[random_below(w, HELD)];
		struct ns_dirent e[NAMES + 2];
		size_t count;
		switch (random_below(w, 10)) {
		case 0:
		case 1:
			if (make(fx, ROOT_INO, name, S_IFREG | 0600, &a) == 0) {
				hold(w, a.ino);
				w->shared->created++;
			}
			break;
		case 2:
			if (unlink_at(fx, ROOT_INO, name) == 0)
				w->shared->unlinked++;
			break;
		case 3:
			if (look(fx, ROOT_INO, name, &a) == 0) {
				hold(w, a.ino);
				w->shared->found++;
			}
			break;
		case 4:
			move(fx, ROOT_INO, name, ROOT_INO, other, 0);
			break;
		case 5:
			if (ino != 0)
				CHECK_EQ(ns_setattr(fx->ns, ino, &v, SET_MTIME, &a, 0), 0);
			break;
		case 6:
			CHECK_EQ(fx_list(fx, ROOT_INO, 0, e, NAMES + 2, &count), 0);
			for (size_t j = 2; j < count; j++)
				hold(w, e[j].attr.ino);
			break;
		case 7:
			if (ns_tmpfile(fx->ns, ROOT_INO, 0600, true, &root, &a, 0) == 0)
				hold(w, a.ino);
			break;
		case 8:
			if (ino != 0 && link_at(fx, ino, ROOT_INO, name, &a) == 0)
				hold(w, a.ino);
			break;
		default:
			if (ino != 0) {
				a = stat_of(fx, ino);
				CHECK_EQ(a.ino, ino);
				CHECK(a.nlink <= NAMES);
			}
		}
	}
	for (int i = 0; i < HELD; i++)
		if (w->held[i] != 0)
			forget(fx, w->held[i], 1);
	return NULL;
}

static void give_back(void *arg, struct inode *inode)
{
	ns_put_inode(((struct fixture *)arg)->ns, inode);
}

static void *run_groups(void *arg)
{
	struct shared *shared = arg;
	while (!shared->stop) {
		CHECK_EQ(fx_group(&shared->fx), 0);
		CHECK_EQ(inode_for_each(shared->fx.table, give_back, &shared->fx), 0);
	}
	return NULL;
}

/* Inodes among these entries. */
static long distinct(const struct ns_dirent *e, size_t count)
{
	long n = 0;
	for (size_t i = 0; i < count; i++) {
		size_t j = 0;
		while (e[j].attr.ino != e[i].attr.ino)
			j++;
		n += j == i;
	}
	return n;
}

TEST(operations_race_with_forgets_and_groups)
{
	static struct shared shared;
	static struct worker workers[THREADS];
	pthread_t threads[THREADS], groups;
	fx_new(&shared.fx);
	pthread_create(&groups, NULL, run_groups, &shared);
	for (int i = 0; i < THREADS; i++) {
		workers[i] = (struct worker){.shared = &shared, .seed = 0x9e3779b97f4a7c15 * (uint64_t)(i + 1)};
		pthread_create(&threads[i], NULL, work, &workers[i]);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	shared.stop = true;
	pthread_join(groups, NULL);
	CHECK(shared.created > 100);
	CHECK(shared.unlinked > 100);
	CHECK(shared.found > 100);

	struct ns_dirent e[NAMES + 2];
	size_t count;
	CHECK_EQ(fx_list(&shared.fx, ROOT_INO, 0, e, NAMES + 2, &count), 0);
	for (size_t i = 2; i < count; i++)
		forget(&shared.fx, e[i].attr.ino, 1);
	CHECK_EQ(fx_group(&shared.fx), 0);
	CHECK_EQ(fx_rows(&shared.fx, "inode"), distinct(e + 2, count - 2) + 1);
	CHECK_EQ(fx_rows(&shared.fx, "orphan"), 0);
	fx_end(&shared.fx);
}

/* ---- attributes that come and go ---- */

struct asked {
	struct fixture fx;
	uint64_t ino;
	_Atomic bool stop;
};

/* Proves again and again that there is none. */
static void *ask(void *arg)
{
	struct asked *asked = arg;
	size_t len;
	while (!asked->stop) {
		int r = ns_getxattr(asked->fx.ns, asked->ino, "user.b", NULL, 0, &len, 0);
		CHECK_EQ(r, -ENODATA);
		CHECK_EQ(ns_listxattr(asked->fx.ns, asked->ino, NULL, 0, &len, 0), 0);
		CHECK(len == 0 || len == sizeof "user.a");
		CHECK_EQ(ns_drop_privileges(asked->fx.ns, asked->ino, false, NULL, 0), 0);
	}
	return NULL;
}

TEST(what_was_set_is_found_whoever_asks_meanwhile)
{
	static struct asked asked;
	pthread_t threads[2];
	struct attr a;
	size_t len;
	fx_new(&asked.fx);
	make(&asked.fx, ROOT_INO, "f", S_IFREG | 0600, &a);
	asked.ino = a.ino;
	for (int i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, ask, &asked);
	for (int i = 0; i < ROUNDS; i++) {
		CHECK_EQ(ns_setxattr(asked.fx.ns, a.ino, "user.a", "1", 1, 0, true, 0), 0);
		CHECK_EQ(ns_getxattr(asked.fx.ns, a.ino, "user.a", NULL, 0, &len, 0), 0);
		CHECK_EQ(ns_removexattr(asked.fx.ns, a.ino, "user.a", 0), 0);
		CHECK_EQ(ns_getxattr(asked.fx.ns, a.ino, "user.a", NULL, 0, &len, 0), -ENODATA);
	}
	asked.stop = true;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	forget(&asked.fx, a.ino, 1);
	fx_end(&asked.fx);
}
