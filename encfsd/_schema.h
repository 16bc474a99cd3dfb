/* The metadata schema (docs/format-metadata.md) and the one way to open a connection to it. */
#ifndef ENCFSD_SCHEMA_H
#define ENCFSD_SCHEMA_H

#include <sqlite3.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SCHEMA_VERSION = 1,                 /* PRAGMA user_version */
    SCHEMA_APPLICATION_ID = 0x454e4346, /* "ENCF" */
    HASH_KEY_SIZE = 16,
};

/* Names in the table `volume`. */
#define VALUE_HASH_KEY "hash_key"       /* HASH_KEY_SIZE random bytes: key of the directory cookies */
#define VALUE_NEXT_INO "next_ino"       /* u64: inode numbers from here on were never used */

/* Opens the attached object `name` with every setting that the design rests on, read back and checked.
 * Returns 0 and a connection for schema_close, or -errno, *db NULL and one line in `message`. */
int schema_connect(sqlite3 **db, const char *name, bool read_only, size_t cache_bytes, char *message, size_t message_size);
int schema_close(sqlite3 *db);  /* 0 or -errno; NULL is allowed */

/* Makes tables, the volume's values and the root directory in an empty database: one transaction. 0 or -errno. */
int schema_format(sqlite3 *db, uint32_t uid, uint32_t gid);

/* Refuses what this version does not know: -EPROTONOSUPPORT (newer schema), -EUCLEAN (no metadata of encfsd). */
int schema_check(sqlite3 *db, char *message, size_t message_size);

/* The one place that turns an SQLite result into 0 or a negative errno. */
int schema_errno(int result);

#endif
