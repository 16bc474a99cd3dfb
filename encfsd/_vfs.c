/* The SQLite VFS over one object. SQLite sees a file on a disk with 4 KiB sectors. Journals live in memory and end with the process;
 * temporary files and locks do not exist here, and opening anything but a journal and an attached object fails, so that SQLite can never
 * write plaintext elsewhere. */
#include "_vfs.h"

#include <errno.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    ATTACH_NAME_SIZE = 32,
    JOURNAL_FIRST = 64 << 10,   /* bytes: an operation journals a few pages */
    JOURNAL_KEPT = 1 << 20,     /* a transaction that needed more is rare */
};

struct vfs_file {
    struct object *object;      /* set once */
    char name[ATTACH_NAME_SIZE];
    struct vfs_file *next;      /* guarded by `attached_lock` */
    /* written under the connection's mutex, read by anybody */
    _Atomic uint64_t marks;
    atomic_int error;
    atomic_uint failed_writes;  /* since the last mark */
};

/* Guards the list of attached objects and its counter. */
static pthread_mutex_t attached_lock = PTHREAD_MUTEX_INITIALIZER;
static struct vfs_file *attached;
static unsigned attached_count;

/* What SQLite allocates for an open file. */
struct open_file {
    sqlite3_file base;
    struct vfs_file *file;
};

static struct vfs_file *file_of(sqlite3_file *base)
{
    return ((struct open_file *)base)->file;
}

/* Remembers the errno that SQLite's codes cannot carry. */
static void note_error(struct vfs_file *file, int error)
{
    int none = 0;
    atomic_compare_exchange_strong(&file->error, &none, error);
}

static int failed_write(struct vfs_file *file, int error, int code)
{
    note_error(file, error);
    atomic_fetch_add(&file->failed_writes, 1);
    return error == -ENOSPC ? SQLITE_FULL : error == -ENOMEM ? SQLITE_IOERR_NOMEM : code;
}

static int x_close(sqlite3_file *base)
{
    (void)base;
    return SQLITE_OK;
}

static int x_read(sqlite3_file *base, void *buffer, int size, sqlite3_int64 offset)
{
    struct vfs_file *file = file_of(base);
    ssize_t n = object_read(file->object, buffer, (size_t)size, (uint64_t)offset, 0);
    if (n < 0) {
        note_error(file, (int)n);
        return n == -ENOMEM ? SQLITE_IOERR_NOMEM : SQLITE_IOERR_READ;
    }
    if (n < size) {
        /* SQLite requires zeros behind the end. */
        memset((char *)buffer + n, 0, (size_t)(size - n));
        return SQLITE_IOERR_SHORT_READ;
    }
    return SQLITE_OK;
}

static int x_write(sqlite3_file *base, const void *buffer, int size, sqlite3_int64 offset)
{
    struct vfs_file *file = file_of(base);
    int r = object_write(file->object, buffer, (size_t)size, (uint64_t)offset, 0);
    return r < 0 ? failed_write(file, r, SQLITE_IOERR_WRITE) : SQLITE_OK;
}

static int x_truncate(sqlite3_file *base, sqlite3_int64 size)
{
    struct vfs_file *file = file_of(base);
    int r = object_truncate(file->object, (uint64_t)size, 0);
    return r < 0 ? failed_write(file, r, SQLITE_IOERR_TRUNCATE) : SQLITE_OK;
}

static int x_sync(sqlite3_file *base, int flags)
{
    struct vfs_file *file = file_of(base);
    (void)flags;
    /* After a failed write this is the end of the rollback, which syncs too: the old pages are back. */
    unsigned one = 1;
    if (atomic_load(&file->failed_writes) == 0)
        atomic_fetch_add(&file->marks, 1);
    else
        atomic_compare_exchange_strong(&file->failed_writes, &one, 0);
    return SQLITE_OK;
}

static int x_file_size(sqlite3_file *base, sqlite3_int64 *size)
{
    struct object_attr attr;
    object_attr(file_of(base)->object, &attr);
    *size = (sqlite3_int64)attr.size;
    return SQLITE_OK;
}

/* Object 0 has one user, the mounted daemon; the volume's lock keeps others out. */
static int x_lock(sqlite3_file *base, int level)
{
    (void)base;
    (void)level;
    return SQLITE_OK;
}

static int x_check_reserved_lock(sqlite3_file *base, int *reserved)
{
    (void)base;
    *reserved = 0;
    return SQLITE_OK;
}

static int x_file_control(sqlite3_file *base, int op, void *arg)
{
    (void)base;
    (void)op;
    (void)arg;
    return SQLITE_NOTFOUND;
}

static int x_sector_size(sqlite3_file *base)
{
    (void)base;
    return NODE_SIZE;
}

static int x_device_characteristics(sqlite3_file *base)
{
    (void)base;
    /* The last two are about the journal, whose order of writes no crash can show: SQLite counts its records by its size. */
    return SQLITE_IOCAP_ATOMIC4K | SQLITE_IOCAP_POWERSAFE_OVERWRITE | SQLITE_IOCAP_UNDELETABLE_WHEN_OPEN | SQLITE_IOCAP_SAFE_APPEND |
           SQLITE_IOCAP_SEQUENTIAL;
}

/* Version 1: no shared memory (WAL) and no mapped pages. */
static const sqlite3_io_methods methods = {
    .iVersion = 1,
    .xClose = x_close,
    .xRead = x_read,
    .xWrite = x_write,
    .xTruncate = x_truncate,
    .xSync = x_sync,
    .xFileSize = x_file_size,
    .xLock = x_lock,
    .xUnlock = x_lock,
    .xCheckReservedLock = x_check_reserved_lock,
    .xFileControl = x_file_control,
    .xSectorSize = x_sector_size,
    .xDeviceCharacteristics = x_device_characteristics,
};

/* ---- journals ---- */

/* The old pages of the running transaction, one after the other in memory that is kept for the next one. SQLite's own journal in
 * memory is a list of 1 KiB chunks, each allocated and freed: an eighth of a create. */
struct journal {
    sqlite3_file base;
    uint8_t *bytes;
    size_t size, room;
};

static struct journal *journal_of(sqlite3_file *base)
{
    return (struct journal *)base;
}

static int journal_close(sqlite3_file *base)
{
    free(journal_of(base)->bytes);
    return SQLITE_OK;
}

static int journal_read(sqlite3_file *base, void *buffer, int size, sqlite3_int64 offset)
{
    const struct journal *j = journal_of(base);
    size_t from = (size_t)offset, there = from < j->size ? j->size - from : 0;
    size_t n = there < (size_t)size ? there : (size_t)size;
    if (n > 0)
        memcpy(buffer, j->bytes + from, n);
    memset((uint8_t *)buffer + n, 0, (size_t)size - n);
    return n < (size_t)size ? SQLITE_IOERR_SHORT_READ : SQLITE_OK;
}

static int journal_write(sqlite3_file *base, const void *buffer, int size, sqlite3_int64 offset)
{
    struct journal *j = journal_of(base);
    size_t from = (size_t)offset, end = from + (size_t)size;
    if (end > j->room) {
        size_t room = j->room > 0 ? j->room : JOURNAL_FIRST;
        while (room < end)
            room *= 2;
        uint8_t *bytes = realloc(j->bytes, room);
        if (bytes == NULL)
            return SQLITE_IOERR_NOMEM;
        j->bytes = bytes;
        j->room = room;
    }
    if (from > j->size)
        memset(j->bytes + j->size, 0, from - j->size);
    memcpy(j->bytes + from, buffer, (size_t)size);
    if (end > j->size)
        j->size = end;
    return SQLITE_OK;
}

static int journal_truncate(sqlite3_file *base, sqlite3_int64 size)
{
    struct journal *j = journal_of(base);
    if ((size_t)size < j->size)
        j->size = (size_t)size;
    if (j->size == 0 && j->room > JOURNAL_KEPT) {
        free(j->bytes);
        j->bytes = NULL;
        j->room = 0;
    }
    return SQLITE_OK;
}

static int journal_sync(sqlite3_file *base, int flags)
{
    (void)base;
    (void)flags;
    return SQLITE_OK;
}

static int journal_size(sqlite3_file *base, sqlite3_int64 *size)
{
    *size = (sqlite3_int64)journal_of(base)->size;
    return SQLITE_OK;
}

static const sqlite3_io_methods journal_methods = {
    .iVersion = 1,
    .xClose = journal_close,
    .xRead = journal_read,
    .xWrite = journal_write,
    .xTruncate = journal_truncate,
    .xSync = journal_sync,
    .xFileSize = journal_size,
    .xLock = x_lock,
    .xUnlock = x_lock,
    .xCheckReservedLock = x_check_reserved_lock,
    .xFileControl = x_file_control,
    .xSectorSize = x_sector_size,
    .xDeviceCharacteristics = x_device_characteristics,
};

/* ---- the file system ---- */

static int x_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *base, int flags, int *out_flags)
{
    (void)vfs;
    struct vfs_file *found = NULL;
    base->pMethods = NULL;
    /* Of a transaction, or of one statement of it. */
    if ((flags & (SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_SUBJOURNAL)) != 0) {
        *(struct journal *)base = (struct journal){.base.pMethods = &journal_methods};
        if (out_flags != NULL)
            *out_flags = flags;
        return SQLITE_OK;
    }
    if (name != NULL && (flags & SQLITE_OPEN_MAIN_DB) != 0) {
        pthread_mutex_lock(&attached_lock);
        for (found = attached; found != NULL && strcmp(found->name, name) != 0; found = found->next)
            ;
        pthread_mutex_unlock(&attached_lock);
    }
    if (found == NULL)
        return SQLITE_CANTOPEN;
    base->pMethods = &methods;
    ((struct open_file *)base)->file = found;
    if (out_flags != NULL)
        *out_flags = flags;
    return SQLITE_OK;
}

/* Of a journal: it went when it was closed. */
static int x_delete(sqlite3_vfs *vfs, const char *name, int sync_dir)
{
    (void)vfs;
    (void)name;
    (void)sync_dir;
    return SQLITE_OK;
}

/* No file outlives its use: above all there is no hot journal. */
static int x_access(sqlite3_vfs *vfs, const char *name, int flags, int *result)
{
    (void)vfs;
    (void)name;
    (void)flags;
    *result = 0;
    return SQLITE_OK;
}

static int x_full_pathname(sqlite3_vfs *vfs, const char *name, int size, char *out)
{
    (void)vfs;
    return snprintf(out, (size_t)size, "%s", name) < size ? SQLITE_OK : SQLITE_CANTOPEN;
}

/* SQLite seeds rowid choice and the like with it; nothing of ours depends on it. */
static int x_randomness(sqlite3_vfs *vfs, int size, char *out)
{
    sqlite3_vfs *system = vfs->pAppData;
    return system->xRandomness(system, size, out);
}

static int x_sleep(sqlite3_vfs *vfs, int microseconds)
{
    sqlite3_vfs *system = vfs->pAppData;
    return system->xSleep(system, microseconds);
}

static int x_current_time(sqlite3_vfs *vfs, double *julian_day)
{
    sqlite3_vfs *system = vfs->pAppData;
    return system->xCurrentTime(system, julian_day);
}

static sqlite3_vfs vfs = {
    .iVersion = 1,
    .szOsFile = sizeof(struct journal),     /* the larger of the two kinds of files */
    .mxPathname = ATTACH_NAME_SIZE,
    .zName = "encfsd",
    .xOpen = x_open,
    .xDelete = x_delete,
    .xAccess = x_access,
    .xFullPathname = x_full_pathname,
    .xRandomness = x_randomness,
    .xSleep = x_sleep,
    .xCurrentTime = x_current_time,
};

_Static_assert(sizeof(struct journal) >= sizeof(struct open_file), "szOsFile");

static int registration;

static void register_once(void)
{
    /* Its statistics take a global lock for each of some hundred allocations a transaction; fails, which does not matter, if
     * somebody in this process has used SQLite already. */
    sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
    if (sqlite3_initialize() == SQLITE_OK)
        vfs.pAppData = sqlite3_vfs_find(NULL);
    registration = vfs.pAppData == NULL || sqlite3_vfs_register(&vfs, 0) != SQLITE_OK ? -ENOMEM : 0;
}

int vfs_register(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_once);
    return registration;
}

int vfs_attach(struct vfs_file **file, struct object *meta, char name[32])
{
    struct vfs_file *new = calloc(1, sizeof *new);
    if (new == NULL)
        return -ENOMEM;
    new->object = meta;
    pthread_mutex_lock(&attached_lock);
    snprintf(new->name, sizeof new->name, "meta-%u", attached_count++);
    new->next = attached;
    attached = new;
    pthread_mutex_unlock(&attached_lock);
    memcpy(name, new->name, sizeof new->name);
    *file = new;
    return 0;
}

void vfs_detach(struct vfs_file *file)
{
    pthread_mutex_lock(&attached_lock);
    struct vfs_file **link = &attached;
    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
    pthread_mutex_unlock(&attached_lock);
    free(file);
}

uint64_t vfs_marks(const struct vfs_file *file)
{
    return atomic_load(&file->marks);
}

int vfs_error(const struct vfs_file *file)
{
    return atomic_load(&file->error);
}

bool vfs_torn(const struct vfs_file *file)
{
    return atomic_load(&file->failed_writes) > 1;
}
