#include <pthread.h>

#include "_inode.h"
#include "check.h"
#include "fake_object.h"

static struct inode *insert(struct inode_table *table, uint64_t ino)
{
	bool created = false;
	struct inode *inode = inode_get(table, ino, &created);
	if (CHECK(created)) {
		CHECK_EQ(pthread_mutex_trylock(&inode->lock), EBUSY);
		pthread_mutex_unlock(&inode->lock);
	}
	return inode;
}

TEST(get_finds_what_it_inserted)
{
	struct inode_table *table;
	struct object *object;
	bool created = true;
	CHECK_EQ(inode_table_create(&table), 0);
	CHECK(inode_find(table, 5) == NULL);
	struct inode *inode = insert(table, 5);
	CHECK_EQ(inode->ino, 5);
	CHECK_EQ(inode->refs, 1);
	CHECK(inode_get(table, 5, &created) == inode);
	CHECK(!created);
	CHECK(inode_find(table, 5) == inode);
	CHECK_EQ(inode->refs, 3);
	CHECK_EQ(inode_table_count(table), 1);
	CHECK(!inode_put(table, inode));
	CHECK(!inode_put(table, inode));
	CHECK(!inode_remove_if_unused(table, 5, &object));
	CHECK(inode_put(table, inode));
	CHECK(inode_remove_if_unused(table, 5, &object));
	CHECK(!inode_remove_if_unused(table, 5, &object));
	CHECK_EQ(inode_table_count(table), 0);
	inode_table_destroy(table);
}

TEST(lookups_keep_an_inode)
{
	struct inode_table *table;
	struct object *object;
	inode_table_create(&table);
	struct inode *inode = insert(table, 7);
	inode_looked_up(table, inode, 3);
	CHECK(!inode_put(table, inode));
	CHECK(!inode_remove_if_unused(table, 7, &object));
	CHECK(!inode_forget(table, 7, 2));
	CHECK(!inode_remove_if_unused(table, 7, &object));
	CHECK(inode_forget(table, 7, 1));
	CHECK(inode_forget(table, 7, 1000)); /* more than there are: still none */
	CHECK_EQ(inode->lookups, 0);
	CHECK(inode_remove_if_unused(table, 7, &object));
	CHECK(!inode_forget(table, 7, 1));
	inode_table_destroy(table);
}

TEST(dirty_inodes_stay_unless_deleted)
{
	struct inode_table *table;
	struct object *object;
	inode_table_create(&table);
	struct inode *inode = insert(table, 9);
	inode_put(table, inode);
	inode->attr_dirty = true;
	CHECK(!inode_remove_if_unused(table, 9, &object));
	inode->attr_dirty = false;
	inode->content_dirty = true;
	CHECK(!inode_remove_if_unused(table, 9, &object));
	inode->deleted = true;
	CHECK(inode_remove_if_unused(table, 9, &object));
	inode_table_destroy(table);
}

TEST(removal_hands_the_object_over)
{
	struct inode_table *table;
	struct object *object = NULL, *open = fake_object_create();
	inode_table_create(&table);
	struct inode *inode = insert(table, 11);
	inode->object = open;
	inode->content = malloc(INLINE_MAX); /* freed with the inode: the leak check sees it */
	inode_put(table, inode);
	CHECK(inode_remove_if_unused(table, 11, &object));
	CHECK(object == open);
	fake_object_destroy(open);
	inode_table_destroy(table);
}

struct seen {
	struct inode_table *table;
	unsigned count;
	uint64_t sum;
};

static void see(void *arg, struct inode *inode)
{
	struct seen *seen = arg;
	seen->count++;
	seen->sum += inode->ino;
	inode_put(seen->table, inode);
}

TEST(for_each_visits_all_of_many)
{
	enum { N = 20000 };
	struct seen seen = {0};
	inode_table_create(&seen.table);
	for (uint64_t ino = 1; ino <= N; ino++)
		inode_put(seen.table, insert(seen.table, ino));
	CHECK_EQ(inode_table_count(seen.table), N);
	for (uint64_t ino = 1; ino <= N; ino++) {
		struct inode *inode = inode_find(seen.table, ino);
		if (CHECK(inode != NULL)) {
			CHECK_EQ(inode->ino, ino);
			inode_put(seen.table, inode);
		}
	}
	CHECK_EQ(inode_for_each(seen.table, see, &seen), 0);
	CHECK_EQ(seen.count, N);
	CHECK_EQ(seen.sum, (uint64_t)N * (N + 1) / 2);
	inode_table_destroy(seen.table); /* what is left is freed */
}

/* Two sides of the kernel at once: threads look up and forget the same few inodes while others find them; the mutex stands
 * for the namespace's. */
struct race {
	struct inode_table *table;
	pthread_mutex_t mutex;
	_Atomic uint64_t filled, dropped;
};

enum { RACE_INODES = 8, RACE_ROUNDS = 20000 };

static void drop(struct race *race, uint64_t ino)
{
	struct object *object;
	pthread_mutex_lock(&race->mutex);
	if (inode_remove_if_unused(race->table, ino, &object))
		race->dropped++;
	pthread_mutex_unlock(&race->mutex);
}

static void *look_up_and_forget(void *arg)
{
	struct race *race = arg;
	for (uint64_t i = 0; i < RACE_ROUNDS; i++) {
		uint64_t ino = 1 + i % RACE_INODES;
		bool created;
		pthread_mutex_lock(&race->mutex);
		struct inode *inode = inode_get(race->table, ino, &created);
		if (created) {
			inode->attr.mode = (uint32_t)(1000 + ino);
			pthread_mutex_unlock(&inode->lock);
			race->filled++;
		}
		inode_looked_up(race->table, inode, 1);
		pthread_mutex_unlock(&race->mutex);
		if (inode_put(race->table, inode))
			drop(race, ino);
		if (inode_forget(race->table, ino, 1))
			drop(race, ino);
	}
	return NULL;
}

static void *find(void *arg)
{
	struct race *race = arg;
	for (uint64_t i = 0; i < RACE_ROUNDS; i++) {
		uint64_t ino = 1 + i % RACE_INODES;
		struct inode *inode = inode_find(race->table, ino);
		if (inode == NULL)
			continue;
		pthread_mutex_lock(&inode->lock);
		CHECK_EQ(inode->attr.mode, 1000 + ino); /* never half filled */
		pthread_mutex_unlock(&inode->lock);
		if (inode_put(race->table, inode))
			drop(race, ino);
	}
	return NULL;
}

TEST(lookups_forgets_and_finds_race)
{
	struct race race = {.mutex = PTHREAD_MUTEX_INITIALIZER};
	pthread_t threads[4];
	inode_table_create(&race.table);
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, i < 3 ? look_up_and_forget : find, &race);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	CHECK_EQ(inode_table_count(race.table), 0);
	CHECK_EQ(race.dropped, race.filled);
	inode_table_destroy(race.table);
}
