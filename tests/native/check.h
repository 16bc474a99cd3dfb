/*
 * A test program in one header: include it once, write TEST(name) { ... }, nothing else. main() is
 * here; it runs the tests in the order they are written (or those named in argv) and exits with 0
 * if all passed.
 *
 * A failed check is reported and counted; the test goes on, because leaving it from any depth and
 * any thread would need longjmp. Checks are expressions: `if (!CHECK(p != NULL)) return;`.
 */
#ifndef ENCFSD_CHECK_H
#define ENCFSD_CHECK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct check_test {
	const char *name;
	void (*run)(void);
	struct check_test *next;
};

static struct check_test *check_first;
static struct check_test **check_last = &check_first;
static atomic_uint check_failures; /* of the running test; any of its threads may count */

#define TEST(test_name)                                                                            \
	static void test_name(void);                                                               \
	__attribute__((constructor)) static void check_register_##test_name(void)                  \
	{                                                                                          \
		static struct check_test test = {#test_name, test_name, NULL};                     \
		*check_last = &test;                                                               \
		check_last = &test.next;                                                           \
	}                                                                                          \
	static void test_name(void)

/* True if `cond` holds. */
#define CHECK(cond) check_true((cond), #cond, __FILE__, __LINE__)

/* True if two integers of up to 64 bits are equal; the actual value comes first. */
#define CHECK_EQ(actual, expected)                                                                 \
	check_equal((long long)(actual), (long long)(expected), #actual, #expected, __FILE__,      \
		    __LINE__)

/* True if `size` bytes are equal. */
#define CHECK_MEM_EQ(actual, expected, size)                                                       \
	check_memory((actual), (expected), (size), #actual, #expected, __FILE__, __LINE__)

static inline bool check_true(bool holds, const char *text, const char *file, int line)
{
	if (!holds) {
		atomic_fetch_add(&check_failures, 1);
		fprintf(stderr, "%s:%d: %s does not hold\n", file, line, text);
	}
	return holds;
}

static inline bool check_equal(long long actual, long long expected, const char *actual_text,
			       const char *expected_text, const char *file, int line)
{
	if (actual != expected) {
		atomic_fetch_add(&check_failures, 1);
		fprintf(stderr, "%s:%d: %s is %lld (0x%llx), not %s = %lld (0x%llx)\n", file, line,
			actual_text, actual, (unsigned long long)actual, expected_text, expected,
			(unsigned long long)expected);
	}
	return actual == expected;
}

static inline bool check_memory(const void *actual, const void *expected, size_t size,
				const char *actual_text, const char *expected_text,
				const char *file, int line)
{
	const unsigned char *a = actual;
	const unsigned char *e = expected;

	if (memcmp(a, e, size) == 0) /* a sanitizer makes the loop a hundred times slower */
		return true;
	for (size_t i = 0; i < size; i++) {
		if (a[i] != e[i]) {
			atomic_fetch_add(&check_failures, 1);
			fprintf(stderr, "%s:%d: %s[%zu] is 0x%02x, but %s[%zu] is 0x%02x\n", file,
				line, actual_text, i, a[i], expected_text, i, e[i]);
			return false;
		}
	}
	return true;
}

static inline bool check_wanted(const char *name, int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], name) == 0)
			return true;
	return argc == 1;
}

int main(int argc, char **argv)
{
	unsigned passed = 0;
	unsigned failed = 0;

	for (struct check_test *test = check_first; test != NULL; test = test->next) {
		if (!check_wanted(test->name, argc, argv))
			continue;
		atomic_store(&check_failures, 0);
		test->run();
		if (atomic_load(&check_failures) == 0) {
			passed++;
		} else {
			failed++;
			fprintf(stderr, "FAILED %s\n", test->name);
		}
	}
	printf("%u passed, %u failed\n", passed, failed);
	/* A name that matches nothing must not look like success. */
	return failed == 0 && passed > 0 ? 0 : 1;
}

#endif
