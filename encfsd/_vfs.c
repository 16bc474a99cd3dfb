/* The SQLite VFS over one object. SQLite sees a file on a disk with 4 KiB sectors; journal, temporary files and locks do not
 * exist here, and opening anything but an attached object fails, so that SQLite can never write plaintext elsewhere. */
#include "_vfs.h"

#include <errno.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ATTACH_NAME_SIZE = 32 };

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
    return SQLITE_IOCAP_ATOMIC4K | SQLITE_IOCAP_POWERSAFE_OVERWRITE | SQLITE_IOCAP_UNDELETABLE_WHEN_OPEN;
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

static int x_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *base, int flags, int *out_flags)
{
    (void)vfs;
    struct vfs_file *found = NULL;
    base->pMethods = NULL;
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

static int x_delete(sqlite3_vfs *vfs, const char *name, int sync_dir)
{
    (void)vfs;
    (void)name;
    (void)sync_dir;
    return SQLITE_IOERR_DELETE_NOENT;
}

/* No other file exists: above all no hot journal. */
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
    .szOsFile = sizeof(struct open_file),
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
