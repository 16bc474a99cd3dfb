/*
 * Random operations, compared with a model that is a plain table of names and inodes: results,
 * attributes, listings that go on while entries come and go; reopened and crashed in between.
 */
#include "check.h"
#include "namespace_fixture.h"

enum { NODES = 4000, ENTRIES = 64, NAMES = 12, STEPS = 30000 };

/* Index 0 is unused, 1 is the root. */
struct model_node {
	uint64_t ino, lookups;
	uint32_t type;
	int nlink;
	int parent; /* of directories */
	bool linkable; /* made without a name, and has never had one */
};

struct model_entry {
	int dir, node; /* node 0: free */
	int name;
};

static struct model_node nodes[NODES];
static struct model_entry entries[ENTRIES];
static int node_count;
static uint64_t seed;
static bool collide;

static unsigned random_below(unsigned n)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (unsigned)(seed >> 11) % n;
}

static const char *name_of(int name)
{
	static const char *const names[NAMES] = {
		"a", "b", "c", "d", "e", "f", "\x80\xff", "name with spaces", "\n", "..c", "-",
		"a much longer name that fills some more of the page than the other names do",
	};
	return names[name];
}

static struct model_entry *find_entry(int dir, int name)
{
	for (int i = 0; i < ENTRIES; i++)
		if (entries[i].node != 0 && entries[i].dir == dir && entries[i].name == name)
			return &entries[i];
	return NULL;
}

static struct model_entry *free_entry(void)
{
	for (int i = 0; i < ENTRIES; i++)
		if (entries[i].node == 0)
			return &entries[i];
	return NULL;
}

static bool is_empty(int dir)
{
	for (int i = 0; i < ENTRIES; i++)
		if (entries[i].node != 0 && entries[i].dir == dir)
			return false;
	return true;
}

static bool is_dir(int node)
{
	return nodes[node].type == S_IFDIR;
}

/* A directory that still has a name. */
static int some_directory(void)
{
	for (int tries = 0; tries < 20; tries++) {
		struct model_entry *e = &entries[random_below(ENTRIES)];
		if (e->node != 0 && is_dir(e->node))
			return e->node;
	}
	return 1;
}

static bool is_above(int node, int dir)
{
	for (; dir != node; dir = nodes[dir].parent)
		if (dir == 1)
			return false;
	return true;
}

static void lose_link(int node)
{
	nodes[node].nlink -= is_dir(node) ? nodes[node].nlink : 1;
}

static void check_node(struct fixture *fx, int node, const struct attr *a)
{
	(void)fx;
	CHECK_EQ(a->ino, nodes[node].ino);
	CHECK_EQ(a->mode & S_IFMT, nodes[node].type);
	CHECK_EQ(a->nlink, nodes[node].nlink);
}

/* ---- operations ---- */

static void do_create(struct fixture *fx)
{
	static const uint32_t types[] = {S_IFREG, S_IFDIR, S_IFDIR, S_IFLNK, S_IFIFO};
	int dir = some_directory(), name = (int)random_below(NAMES), r;
	uint32_t type = types[random_below(5)];
	struct model_entry *e = free_entry();
	struct attr a;
	if (e == NULL || node_count == NODES)
		return;
	uint64_t parent = nodes[dir].ino;
	if (type == S_IFDIR)
		r = make_dir(fx, parent, name_of(name), &a);
	else if (type == S_IFLNK)
		r = ns_symlink(fx->ns, parent, name_of(name), strlen(name_of(name)), "t", 1, &root, &a, 0);
	else
		r = make(fx, parent, name_of(name), type | 0644, &a);
	if (find_entry(dir, name) != NULL) {
		CHECK_EQ(r, -EEXIST);
		return;
	}
	if (!CHECK_EQ(r, 0))
		return;
	for (int i = 1; i < node_count; i++)
		CHECK(nodes[i].ino != a.ino);
	int node = node_count++;
	nodes[node] = (struct model_node){a.ino, 1, type, type == S_IFDIR ? 2 : 1, dir, false};
	*e = (struct model_entry){dir, node, name};
	if (type == S_IFDIR)
		nodes[dir].nlink++;
	check_node(fx, node, &a);
}

static void do_lookup(struct fixture *fx)
{
	int dir = some_directory(), name = (int)random_below(NAMES);
	struct model_entry *e = find_entry(dir, name);
	struct attr a;
	int r = look(fx, nodes[dir].ino, name_of(name), &a);
	if (e == NULL) {
		CHECK_EQ(r, -ENOENT);
	} else if (CHECK_EQ(r, 0)) {
		nodes[e->node].lookups++;
		check_node(fx, e->node, &a);
	}
}

static void do_link(struct fixture *fx)
{
	struct model_entry *from = &entries[random_below(ENTRIES)], *e = free_entry();
	int dir = some_directory(), name = (int)random_below(NAMES);
	struct attr a;
	if (from->node == 0 || e == NULL)
		return;
	int node = from->node;
	int r = link_at(fx, nodes[node].ino, nodes[dir].ino, name_of(name), &a);
	if (is_dir(node)) {
		CHECK_EQ(r, -EPERM);
	} else if (find_entry(dir, name) != NULL) {
		CHECK_EQ(r, -EEXIST);
	} else if (CHECK_EQ(r, 0)) {
		*e = (struct model_entry){dir, node, name};
		nodes[node].nlink++;
		nodes[node].lookups++;
		check_node(fx, node, &a);
	}
}

static void do_tmpfile(struct fixture *fx)
{
	int dir = some_directory();
	bool linkable = random_below(4) != 0;
	struct attr a;
	if (node_count == NODES || !CHECK_EQ(ns_tmpfile(fx->ns, nodes[dir].ino, 0600, linkable, &root, &a, 0), 0))
		return;
	nodes[node_count] = (struct model_node){a.ino, 1, S_IFREG, 0, dir, linkable};
	check_node(fx, node_count++, &a);
}

/* Of a file without a name, made so or deleted. */
static void do_link_nameless(struct fixture *fx)
{
	struct model_entry *e = free_entry();
	int node = node_count - 1, dir = some_directory(), name = (int)random_below(NAMES);
	struct attr a;
	while (node > 1 && (nodes[node].type != S_IFREG || nodes[node].nlink != 0 || nodes[node].lookups == 0 ||
			    random_below(2) == 0))
		node--;
	if (node == 1 || e == NULL)
		return;
	int r = link_at(fx, nodes[node].ino, nodes[dir].ino, name_of(name), &a);
	if (!nodes[node].linkable) {
		CHECK_EQ(r, -ENOENT);
	} else if (find_entry(dir, name) != NULL) {
		CHECK_EQ(r, -EEXIST);
	} else if (CHECK_EQ(r, 0)) {
		*e = (struct model_entry){dir, node, name};
		nodes[node].nlink = 1;
		nodes[node].lookups++;
		nodes[node].linkable = false;
		check_node(fx, node, &a);
	}
}

static void do_remove(struct fixture *fx)
{
	int dir = some_directory(), name = (int)random_below(NAMES);
	bool as_dir = random_below(2) == 0;
	struct model_entry *e = find_entry(dir, name);
	int r = as_dir ? rmdir_at(fx, nodes[dir].ino, name_of(name))
		       : unlink_at(fx, nodes[dir].ino, name_of(name));
	if (e == NULL) {
		CHECK_EQ(r, -ENOENT);
	} else if (is_dir(e->node) != as_dir) {
		CHECK_EQ(r, as_dir ? -ENOTDIR : -EISDIR);
	} else if (as_dir && !is_empty(e->node)) {
		CHECK_EQ(r, -ENOTEMPTY);
	} else if (CHECK_EQ(r, 0)) {
		lose_link(e->node);
		if (as_dir)
			nodes[dir].nlink--;
		e->node = 0;
	}
}

static int expected_rename(const struct model_entry *from, const struct model_entry *to, int from_dir, int to_dir, uint32_t how)
{
	if (from == NULL || (how == RENAME_EXCHANGE && to == NULL))
		return -ENOENT;
	if (how == RENAME_NOREPLACE && to != NULL)
		return -EEXIST;
	if (to != NULL && from->node == to->node)
		return 0;
	if (is_dir(from->node) && from_dir != to_dir && is_above(from->node, to_dir))
		return -EINVAL;
	if (how == RENAME_EXCHANGE)
		return is_dir(to->node) && from_dir != to_dir && is_above(to->node, from_dir) ? -EINVAL : 0;
	if (to == NULL)
		return 0;
	if (!is_dir(from->node))
		return is_dir(to->node) ? -EISDIR : 0;
	if (!is_dir(to->node))
		return -ENOTDIR;
	return is_empty(to->node) ? 0 : -ENOTEMPTY;
}

static void place(struct model_entry *e, int node)
{
	e->node = node;
	if (is_dir(node)) {
		nodes[nodes[node].parent].nlink--;
		nodes[node].parent = e->dir;
		nodes[e->dir].nlink++;
	}
}

static void do_rename(struct fixture *fx)
{
	static const uint32_t hows[] = {0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_EXCHANGE};
	int from_dir = some_directory(), to_dir = some_directory();
	int from_name = (int)random_below(NAMES), to_name = (int)random_below(NAMES);
	uint32_t how = hows[random_below(6)];
	struct model_entry *from = find_entry(from_dir, from_name), *to = find_entry(to_dir, to_name);
	int expected = expected_rename(from, to, from_dir, to_dir, how);
	int r = move(fx, nodes[from_dir].ino, name_of(from_name), nodes[to_dir].ino, name_of(to_name), how);
	CHECK_EQ(r, expected);
	if (expected < 0 || (to != NULL && from->node == to->node))
		return;
	int moved = from->node;
	if (how == RENAME_EXCHANGE) {
		int other = to->node;
		place(to, moved);
		place(from, other);
		return;
	}
	if (to != NULL) {
		lose_link(to->node);
		if (is_dir(to->node))
			nodes[to_dir].nlink--;
		place(to, moved);
		from->node = 0;
	} else {
		from->dir = to_dir;
		from->name = to_name;
		place(from, moved);
	}
}

static void do_forget(struct fixture *fx)
{
	int node = 2 + (int)random_below((unsigned)node_count);
	struct attr a;
	if (node >= node_count || nodes[node].lookups == 0)
		return;
	uint64_t n = 1 + random_below((unsigned)nodes[node].lookups);
	nodes[node].lookups -= n;
	forget(fx, nodes[node].ino, n);
	bool gone = nodes[node].nlink == 0 && nodes[node].lookups == 0;
	if (gone)
		CHECK_EQ(fx_group(fx), 0); /* it may be dirty, then the next group lets it go */
	int r = ns_getattr(fx->ns, nodes[node].ino, &a, 0);
	if (gone)
		CHECK_EQ(r, -ENOENT);
	else if (CHECK_EQ(r, 0))
		check_node(fx, node, &a);
}

static void do_getattr(struct fixture *fx)
{
	int node = 1 + (int)random_below((unsigned)node_count - 1);
	struct attr a;
	if (nodes[node].nlink == 0 && nodes[node].lookups == 0)
		return;
	if (CHECK_EQ(ns_getattr(fx->ns, nodes[node].ino, &a, 0), 0))
		check_node(fx, node, &a);
}

/* A listing in progress, continued by one entry at a time between other operations. */
static struct {
	bool running;
	int dir;
	uint64_t cookie;
	unsigned there[NAMES]; /* node that had the name throughout; 0: not throughout */
	unsigned seen[NAMES];
} listing;

static void start_listing(int dir)
{
	memset(&listing, 0, sizeof listing);
	listing.running = true;
	listing.dir = dir;
	for (int i = 0; i < ENTRIES; i++)
		if (entries[i].node != 0 && entries[i].dir == dir)
			listing.there[entries[i].name] = (unsigned)entries[i].node;
}

/* After each operation: what is gone was not there throughout. */
static void watch_listing(void)
{
	for (int name = 0; listing.running && name < NAMES; name++) {
		struct model_entry *e = find_entry(listing.dir, name);
		if (e == NULL)
			listing.there[name] = 0;
	}
}

static void do_list(struct fixture *fx)
{
	struct ns_dirent e;
	size_t count;
	if (!listing.running) {
		start_listing(some_directory());
		return;
	}
	if (nodes[listing.dir].nlink == 0) {
		listing.running = false;
		return;
	}
	CHECK_EQ(fx_list(fx, nodes[listing.dir].ino, listing.cookie, &e, 1, &count), 0);
	if (count == 0) {
		for (int name = 0; name < NAMES; name++) {
			CHECK(listing.seen[name] <= 1);
			if (listing.there[name] != 0)
				CHECK_EQ(listing.seen[name], 1);
		}
		listing.running = false;
		return;
	}
	CHECK(e.cookie > listing.cookie);
	listing.cookie = e.cookie;
	if (e.cookie <= COOKIE_DOTDOT)
		return;
	for (int name = 0; name < NAMES; name++) {
		if (strcmp(name_of(name), e.name) != 0)
			continue;
		struct model_entry *entry = find_entry(listing.dir, name);
		if (CHECK(entry != NULL)) {
			nodes[entry->node].lookups++;
			check_node(fx, entry->node, &e.attr);
		}
		listing.seen[name]++;
		return;
	}
	CHECK(!"a name that was never made");
}

static void check_all(struct fixture *fx)
{
	struct attr a;
	for (int i = 0; i < ENTRIES; i++) {
		struct model_entry *e = &entries[i];
		if (e->node == 0)
			continue;
		if (CHECK_EQ(look(fx, nodes[e->dir].ino, name_of(e->name), &a), 0)) {
			nodes[e->node].lookups++;
			check_node(fx, e->node, &a);
		}
	}
	fx_check_database(fx->object);
}

/* Seven of the names have one hash, five the other. */
static uint64_t coarse_hash(const uint8_t key[16], const void *data, size_t size)
{
	(void)key;
	(void)size;
	return (uint64_t)(*(const uint8_t *)data & 1) << 8;
}

/* After that the kernel knows nothing; after an unclean stop there are orphans. */
static void restart(struct fixture *fx, bool clean)
{
	long orphans = 0;
	listing.running = false;
	for (int node = 2; node < node_count; node++) {
		if (clean && nodes[node].lookups > 0)
			forget(fx, nodes[node].ino, nodes[node].lookups);
		orphans += !clean && nodes[node].nlink == 0 && nodes[node].lookups > 0;
		nodes[node].lookups = 0;
	}
	struct object *object = fx->object;
	CHECK_EQ(fx_group(fx), 0);
	if (clean)
		CHECK_EQ(inode_table_count(fx->table), 1);
	long rows = fx_rows(fx, "inode");
	fx_crash(fx);
	CHECK_EQ(fx_open(fx, object, false), 0);
	if (collide)
		fx->ns->hash = coarse_hash;
	CHECK_EQ(ns_reclaim_orphans(fx->ns), 0);
	CHECK_EQ(fx_rows(fx, "inode"), rows - orphans);
	check_all(fx);
}

static void run_model(uint64_t first_seed)
{
	struct fixture fx;
	seed = first_seed;
	memset(entries, 0, sizeof entries);
	memset(nodes, 0, sizeof nodes);
	listing.running = false;
	nodes[1] = (struct model_node){ROOT_INO, 0, S_IFDIR, 2, 1, false};
	node_count = 2;
	fx_new(&fx);
	if (collide)
		fx.ns->hash = coarse_hash;
	for (int step = 0; step < STEPS; step++) {
		switch (random_below(18)) {
		case 0: case 1: case 2: do_create(&fx); break;
		case 3: do_link(&fx); break;
		case 4: case 5: do_remove(&fx); break;
		case 6: case 7: case 8: do_rename(&fx); break;
		case 9: do_lookup(&fx); break;
		case 10: case 11: do_forget(&fx); break;
		case 12: do_getattr(&fx); break;
		case 16: do_tmpfile(&fx); break;
		case 17: do_link_nameless(&fx); break;
		default: do_list(&fx); break;
		}
		watch_listing();
		if (random_below(STEPS / 6) == 0)
			restart(&fx, random_below(2) == 0);
		if (atomic_load(&check_failures) != 0) {
			fprintf(stderr, "seed %llu, step %d\n", (unsigned long long)first_seed, step);
			break;
		}
	}
	check_all(&fx);
	restart(&fx, true);
	for (int node = 2; node < node_count; node++)
		forget(&fx, nodes[node].ino, nodes[node].lookups);
	fx_end(&fx);
}

TEST(random_operations_agree_with_a_model)
{
	collide = false;
	for (uint64_t s = 1; s <= 3; s++)
		run_model(s * 0x9e3779b97f4a7c15);
}

TEST(so_they_do_when_names_collide)
{
	collide = true;
	for (uint64_t s = 4; s <= 5; s++)
		run_model(s * 0x9e3779b97f4a7c15);
}
