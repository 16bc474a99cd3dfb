/* What Python may call, in plain C declarations for cffi: no directives but "#define NAME ...". The contracts stand in the
 * headers named here; "...;" in a struct leaves out what Python has no use for. */

/* 1 if this build can seal with intel-ipsec-mb, else 0. */
#define ENCFSD_HAVE_IPSEC_MB ...

/* ---- _latency.h ---- */

#define LATENCY_BUCKETS ...

uint64_t latency_bucket_ns(unsigned bucket);

/* ---- _inode.h, _namespace.h ---- */

#define INLINE_MAX ...
#define NAME_MAX_BYTES ...

struct attr {
    uint64_t ino, size, blocks;
    uint32_t mode, nlink, uid, gid, rdev;
    int64_t atime, mtime, ctime, btime;
};

struct ns_caller {
    uint32_t uid, gid, umask;
};

enum ns_set { SET_MODE, SET_UID, SET_GID, SET_ATIME, SET_MTIME, SET_CTIME, SET_SIZE, ... };

struct ns_dirent {
    uint64_t cookie;
    struct attr attr;
    uint16_t name_len;
    char name[...];
};

/* ---- _object.h, _format.h, _pool.h ---- */

#define NODE_SIZE ...

struct object_record {
    uint64_t epoch, counter;
    uint8_t salt[32];
};

struct pool_kind_stats {
    uint64_t takes, gives, hits, misses, misses_live, evictions, in_use, high_water, bytes;
};
struct pool_stats {
    uint64_t capacity, capacity_bytes, max_bytes, draining, in_use, high_water, refused, wiped;
    uint32_t strategy, overflow;
    struct pool_kind_stats kind[2];
};
struct pool_queue_stats {
    uint64_t depth, high_water, waits, expired, total_ns;
    uint64_t wait[...];
};
enum pool_strategy { POOL_POOLING, POOL_POOLING_COW, POOL_MALLOC, ... };
enum pool_overflow { POOL_OVERFLOW_MALLOC, POOL_OVERFLOW_WAIT, POOL_OVERFLOW_EVICT_ONLY, ... };
typedef void pool_progress_fn(void *arg, uint64_t done, uint64_t total);

/* ---- _seal.h ---- */

enum seal_backend { SEAL_AUTO, SEAL_OPENSSL, SEAL_IPSEC_MB, ... };

int seal_setup(enum seal_backend wanted, char *reason, size_t reason_size);
const char *seal_backend_name(void);

/* ---- _volume.h ---- */

struct volume;

struct volume_options {
    int src_fd;
    int state_fd;
    uint8_t volume_id[16];
    uint8_t p[32];
    bool read_only;
    uint64_t free_list_bytes, free_list_max_bytes;
    enum pool_strategy free_list_strategy;
    enum pool_overflow free_list_overflow;
    bool free_list_prefault, free_list_hugepages, free_list_lock;
    pool_progress_fn *free_list_progress;
    void *free_list_progress_arg;
    uint32_t io_threads, barrier_threads;
    uint32_t group_interval_ms;
    uint64_t dirty_limit_bytes;
    bool have_state;
    bool state_clean;
    struct object_record state;
    bool accept_root;
    uint8_t accept_salt[32];
    ...;
};

struct volume_found {
    struct object_record root;
    bool older, forked;
    uint64_t recovered_objects;
    uint64_t orphans;
    ...;
};

struct volume_stats {
    struct pool_stats pool;
    uint64_t dirty_bytes, inodes_in_core, groups, solo_commits, durable_mark, objects_committed, parked, requests;
    uint64_t bytes_read, bytes_written, damaged_reads;
    bool read_only, failed;
    ...;
};

int volume_create(const struct volume_options *options, uint32_t root_uid, uint32_t root_gid, struct object_record *record);
int volume_open(struct volume **v, const struct volume_options *options, struct volume_found *found,
                char *message, size_t message_size);
int volume_close(struct volume *v);
void volume_stats(struct volume *v, struct volume_stats *stats);
#define POOL_RESERVE_NODES ...
size_t pool_footprint(size_t nodes);
int volume_resize_free_list(struct volume *v, uint64_t bytes);
void volume_queue_stats(struct volume *v, struct pool_queue_stats stats[3]);
int volume_verify(struct volume *v, void (*progress)(void *arg, uint64_t nodes, uint64_t total),
                  void (*damaged)(void *arg, const char *path, uint64_t offset, uint64_t bytes), void *arg,
                  const volatile int *stop);
int volume_get_value(struct volume *v, const char *key, void *value, size_t size, size_t *len);
int volume_set_value(struct volume *v, const char *key, const void *value, size_t len);
enum volume_severity { VOLUME_INFO, VOLUME_WARNING, VOLUME_ERROR, ... };
bool volume_next_log_line(struct volume *v, enum volume_severity *severity, char *line, size_t size);

/* ---- _request.h ---- */

enum request_op {
    REQ_LOOKUP, REQ_GETATTR, REQ_SETATTR, REQ_MKNOD, REQ_MKDIR, REQ_SYMLINK, REQ_READLINK, REQ_LINK, REQ_UNLINK,
    REQ_RMDIR, REQ_RENAME, REQ_READDIR, REQ_SETXATTR, REQ_GETXATTR, REQ_LISTXATTR, REQ_REMOVEXATTR, REQ_READ, REQ_WRITE,
    REQ_FSYNC, REQ_FSYNCDIR, REQ_SYNC_ALL, REQ_PUNCH, REQ_STATFS, REQ_FALLOCATE, REQ_COPY, REQ_TMPFILE, ...
};

#define REQUEST_DONE ...
#define REQUEST_PARKED ...

struct request {
    uint16_t op;
    uint64_t ino;
    const char *name;
    size_t name_len;
    uint64_t new_parent;
    const char *new_name;
    size_t new_name_len;
    uint32_t mode, rdev, flags;
    uint32_t valid;
    uint64_t offset;
    void *buffer;
    size_t size;
    struct ns_caller caller;
    struct attr attr;
    int64_t result;
    uint64_t statfs_blocks, statfs_free;
    uint64_t statfs_inodes;
    uint64_t ticket;
    ...;
};

int request_start(struct volume *v, struct request *request);
int request_completion_fd(struct volume *v);
struct request *request_next_completed(struct volume *v);
uint64_t request_st_blocks(const struct attr *attr);
void request_forget(struct volume *v, uint64_t ino, uint64_t lookups);
void request_writers_unknown(struct volume *v);
void request_note_writer(struct volume *v, uint64_t ino, int change);
void volume_set_notify_fd(struct volume *v, int fuse_fd);

/* ---- _transport.h ---- */

#define TRANSPORT_MAX_READ ...
#define TRANSPORT_MAX_READ_NATIVE ...
#define TRANSPORT_CACHE_SECONDS ...
#define TRANSPORT_OPCODES ...

struct transport;

struct transport_init {
    uint32_t kernel_major, kernel_minor, max_write, max_readahead;
    uint64_t kernel_flags, reply_flags;
};

struct transport_opcode {
    uint64_t native, forwarded, failed, total_ns;
    uint64_t latency[...];
};

struct transport_options {
    struct volume *volume;
    bool fast_path;
    unsigned readers;
};

int transport_start(struct transport **t, int fuse_fd, const struct transport_options *options, int *session_fd);
void transport_stats(struct transport *t, struct transport_opcode *stats);
int transport_done_fd(struct transport *t);
int transport_fuse_fd(struct transport *t);
void transport_init_info(struct transport *t, struct transport_init *init);
void transport_stop(struct transport *t);

/* ---- One object and what it rests on, for merkle.py: _object.h, _blockio.h, _pool.h, _workers.h, _seal.h ---- */

struct keyring;
int keyring_create(struct keyring **ring, const uint8_t volume_id[16], const uint8_t p[32]);
void keyring_destroy(struct keyring *ring);

struct pool;
struct node;
typedef bool pool_evict_fn(struct node *node);
struct pool_options {
    size_t bytes, reserve_nodes;
    pool_evict_fn *evict;
    ...;
};
int pool_create(struct pool **pool, const struct pool_options *options, char *reason, size_t reason_size);
size_t pool_destroy(struct pool *pool);
void pool_stats(struct pool *pool, struct pool_stats *stats);
int pool_audit(struct pool *pool);

struct blockdir;
int blockdir_open(struct blockdir **dir, int src_fd, bool read_only);
void blockdir_close(struct blockdir *dir);

struct workers;
int workers_create(struct workers **w, unsigned threads);
void workers_destroy(struct workers *w);

struct object_env {
    struct pool *pool;
    const struct keyring *ring;
    struct blockdir *dir;
    struct workers *workers;
    uint8_t instance[16];
    uint64_t epoch;
    bool read_only;
    bool cache_data;
    uint64_t dirty_limit;
    ...;
};

struct object_attr {
    uint64_t size, nodes;
    int64_t atime, mtime, ctime;
};

struct object;
int object_create(struct object **o, struct object_env *env, const uint8_t id[16]);
int object_open(struct object **o, struct object_env *env, const uint8_t id[16], const struct object_record *record);
int object_recover(struct object **o, struct object_env *env, const uint8_t id[16], const struct object_record *record,
                   uint64_t active_epoch, struct object_record *adopted);
void object_close(struct object *o);
void object_attr(struct object *o, struct object_attr *attr);
void object_set_times(struct object *o, int64_t atime, int64_t mtime, int64_t ctime);
bool object_is_dirty(struct object *o);
ssize_t object_read(struct object *o, void *buffer, size_t size, uint64_t offset, int flags);
int object_write(struct object *o, const void *buffer, size_t size, uint64_t offset, int flags);
int object_truncate(struct object *o, uint64_t size, int flags);
int object_punch(struct object *o, uint64_t offset, uint64_t size, int flags);
int64_t object_seek(struct object *o, uint64_t offset, int whence);
int object_write_back(struct object *o, size_t max_nodes);
int object_commit(struct object *o, bool solo, struct object_record *record);
void object_record(struct object *o, struct object_record *record);
void object_release(struct object *o, const struct object_record *record);
int object_scan(struct object *o);
int object_verify(struct object *o, void (*progress)(void *arg, uint64_t nodes),
                  void (*damaged)(void *arg, uint64_t index, uint64_t count), void *arg);
bool object_evict(struct node *node);
extern "Python" void merkle_damaged(void *arg, uint64_t index, uint64_t count);
