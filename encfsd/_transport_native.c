/* Requests of the kernel answered here: one row of a table an opcode, with what the request means to the volume and how the answer looks.
 * Layouts: include/uapi/linux/fuse.h. Who may do what the kernel has decided (default_permissions). */
#include "_transport_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

enum {
    NANOSECONDS = 1000000000,
    SYMLINK_ROOM = 4096,
    XATTR_ROOM = 65536,                 /* what a value and a list of names can have at most */
    LISTING_ROOM = 128 << 10,           /* more than the kernel asks for at a time */
    STATX_BASIC_AND_BTIME = 0xfff,      /* STATX_BASIC_STATS | STATX_BTIME */
};

/* The part of a message after its header, taken from the front piece by piece. */
struct body {
    const uint8_t *at;
    size_t left;
};

/* The next `size` bytes, or NULL if there are not as many. */
static const void *take(struct body *body, size_t size)
{
    const uint8_t *at = body->at;

    if (body->left < size)
        return NULL;
    body->at += size;
    body->left -= size;
    return at;
}

/* The next string; its terminating zero stays in the message. */
static const char *take_name(struct body *body, size_t *len)
{
    const uint8_t *end = body->left ? memchr(body->at, '\0', body->left) : NULL;

    if (end == NULL)
        return NULL;
    *len = (size_t)(end - body->at);
    return take(body, *len + 1);
}

static int take_request_name(struct message *m, struct body *body)
{
    m->request.name = take_name(body, &m->request.name_len);
    return m->request.name != NULL ? 0 : -EINVAL;
}

static int take_new_name(struct message *m, struct body *body)
{
    m->request.new_name = take_name(body, &m->request.new_name_len);
    return m->request.new_name != NULL ? 0 : -EINVAL;
}

/* The nearest time that can be stored: 64 bits of nanoseconds end in 1677 and 2262. */
static int64_t time_of(uint64_t seconds, uint32_t nanoseconds)
{
    __int128 ns = (__int128)(int64_t)seconds * NANOSECONDS + nanoseconds;

    return ns < INT64_MIN ? INT64_MIN : ns > INT64_MAX ? INT64_MAX : (int64_t)ns;
}

static void split_time(int64_t ns, uint64_t *seconds, uint32_t *nanoseconds)
{
    int64_t rest = ns % NANOSECONDS, whole = ns / NANOSECONDS;

    if (rest < 0) {
        rest += NANOSECONDS;
        whole--;
    }
    *seconds = (uint64_t)whole;
    *nanoseconds = (uint32_t)rest;
}

static void fill_attr(struct fuse_attr *out, const struct attr *a)
{
    *out = (struct fuse_attr){
        .ino = a->ino, .size = a->size, .blocks = request_st_blocks(a), .mode = a->mode, .nlink = a->nlink, .uid = a->uid, .gid = a->gid,
        .rdev = a->rdev, .blksize = NODE_SIZE,
    };
    split_time(a->atime, &out->atime, &out->atimensec);
    split_time(a->mtime, &out->mtime, &out->mtimensec);
    split_time(a->ctime, &out->ctime, &out->ctimensec);
}

static void fill_entry(struct fuse_entry_out *out, const struct attr *a)
{
    *out = (struct fuse_entry_out){.nodeid = a->ino, .entry_valid = TRANSPORT_CACHE_SECONDS, .attr_valid = TRANSPORT_CACHE_SECONDS};
    fill_attr(&out->attr, a);
}

static void set_caller(struct message *m, uint32_t umask)
{
    const struct fuse_in_header *header = (void *)message_in(m);

    m->request.caller = (struct ns_caller){.uid = header->uid, .gid = header->gid, .umask = umask};
}

/* ---- what requests mean: 0, or a negative errno to answer with ---- */

static int decode_plain(struct message *m, struct body *body)
{
    (void)m, (void)body;
    return 0;
}

static int decode_name(struct message *m, struct body *body) { return take_request_name(m, body); }

static int decode_setattr(struct message *m, struct body *body)
{
    static const struct { uint32_t fattr, set; } fields[] = {
        {FATTR_MODE, SET_MODE}, {FATTR_UID, SET_UID}, {FATTR_GID, SET_GID}, {FATTR_SIZE, SET_SIZE}, {FATTR_ATIME, SET_ATIME},
        {FATTR_MTIME, SET_MTIME}, {FATTR_CTIME, SET_CTIME},
    };
    const struct fuse_setattr_in *in = take(body, sizeof *in);
    struct attr *values = &m->request.attr;

    if (in == NULL)
        return -EINVAL;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (in->valid & fields[i].fattr)
            m->request.valid |= fields[i].set;
    *values = (struct attr){.mode = in->mode, .uid = in->uid, .gid = in->gid, .size = in->size,
                            .ctime = time_of(in->ctime, in->ctimensec)};
    values->atime = in->valid & FATTR_ATIME_NOW ? clock_realtime_ns() : time_of(in->atime, in->atimensec);
    values->mtime = in->valid & FATTR_MTIME_NOW ? clock_realtime_ns() : time_of(in->mtime, in->mtimensec);
    if (m->request.valid == 0)
        m->request.op = REQ_GETATTR;
    if (in->valid & FATTR_SIZE && in->valid & FATTR_KILL_SUIDGID)
        m->request.valid |= SET_DROP_PRIVILEGES;
    if (m->request.valid == SET_CTIME)          /* chown(2) that changes nobody clears set-id bits, too; nothing else looks like it */
        m->request.valid |= SET_DROP_PRIVILEGES;
    return 0;
}

static int decode_mknod(struct message *m, struct body *body)
{
    const struct fuse_mknod_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.mode = in->mode;
    m->request.rdev = in->rdev;
    set_caller(m, in->umask);
    return take_request_name(m, body);
}

static int decode_mkdir(struct message *m, struct body *body)
{
    const struct fuse_mkdir_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.mode = in->mode;
    set_caller(m, in->umask);
    return take_request_name(m, body);
}

/* The kernel holds the directory, so the file cannot exist. */
static int decode_create(struct message *m, struct body *body)
{
    const struct fuse_create_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.mode = S_IFREG | (in->mode & 07777);
    m->request.flags = in->flags & O_EXCL;      /* only for REQ_TMPFILE: no name later */
    set_caller(m, in->umask);
    return take_request_name(m, body);
}

static int decode_symlink(struct message *m, struct body *body)
{
    set_caller(m, 0);
    int error = take_request_name(m, body);
    return error ? error : take_new_name(m, body);
}

static int decode_readlink(struct message *m, struct body *body)
{
    (void)body;
    m->request.buffer = message_data(m);
    m->request.size = SYMLINK_ROOM;
    return 0;
}

static int decode_link(struct message *m, struct body *body)
{
    const struct fuse_link_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.ino = in->oldnodeid;
    m->request.new_parent = m->nodeid;
    return take_new_name(m, body);
}

static int decode_names(struct message *m, struct body *body)
{
    int error = take_request_name(m, body);
    return error ? error : take_new_name(m, body);
}

static int decode_rename(struct message *m, struct body *body)
{
    const struct fuse_rename_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.new_parent = in->newdir;
    return decode_names(m, body);
}

static int decode_rename2(struct message *m, struct body *body)
{
    const struct fuse_rename2_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.new_parent = in->newdir;
    m->request.flags = in->flags;
    return decode_names(m, body);
}

static int decode_read(struct message *m, struct body *body)
{
    const struct fuse_read_in *in = take(body, sizeof *in);

    if (in == NULL || in->size > MAX_DATA)
        return -EINVAL;
    m->request.offset = in->offset;
    m->request.size = in->size;
    m->request.buffer = message_data(m);
    m->request.flags = in->flags & O_DIRECT ? FILE_DIRECT : 0;
    return 0;
}

static int decode_write(struct message *m, struct body *body)
{
    const struct fuse_write_in *in = take(body, sizeof *in);

    if (in == NULL || body->left != in->size)
        return -EINVAL;
    m->request.offset = in->offset;
    m->request.size = in->size;
    m->request.buffer = message_data(m);
    m->request.flags = (in->write_flags & FUSE_WRITE_CACHE ? 0 : FILE_DIRECT) |
                       (in->write_flags & FUSE_WRITE_KILL_SUIDGID ? FILE_DROP_PRIVILEGES : 0);
    return 0;
}

static int decode_fsync(struct message *m, struct body *body)
{
    const struct fuse_fsync_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.flags = in->fsync_flags & 1;
    return 0;
}

static int decode_fallocate(struct message *m, struct body *body)
{
    const struct fuse_fallocate_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.offset = in->offset;
    m->request.size = in->length;
    m->request.flags = in->mode;
    set_caller(m, 0);
    return 0;
}

static int decode_lseek(struct message *m, struct body *body)
{
    const struct fuse_lseek_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.offset = in->offset;
    m->request.flags = in->whence;
    return 0;
}

static int decode_copy(struct message *m, struct body *body)
{
    const struct fuse_copy_file_range_in *in = take(body, sizeof *in);

    if (in == NULL || in->flags != 0)
        return -EINVAL;
    m->request.offset = in->off_in;
    m->request.new_parent = in->nodeid_out;
    m->request.new_offset = in->off_out;
    m->request.size = in->len;
    set_caller(m, 0);
    return 0;
}

static int decode_getxattr(struct message *m, struct body *body)
{
    const struct fuse_getxattr_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->asked = in->size;
    m->request.buffer = message_reply_data(m);
    m->request.size = in->size < XATTR_ROOM ? in->size : XATTR_ROOM;
    return take_request_name(m, body);
}

/* The whole list, because some callers may see only a part of it. */
static int decode_listxattr(struct message *m, struct body *body)
{
    const struct fuse_getxattr_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->asked = in->size;
    m->request.buffer = message_reply_data(m);
    m->request.size = XATTR_ROOM;
    set_caller(m, 0);
    return 0;
}

/* ---- listings: entries go straight into the reply ---- */

static void *reserve(struct message *m, size_t size, size_t name_len)
{
    size_t whole = FUSE_DIRENT_ALIGN(size + name_len);
    uint8_t *at = message_data(m) + m->used;

    if (m->room - m->used < whole)
        return NULL;
    memset(at + size + name_len, 0, whole - size - name_len);
    m->used += whole;
    return at;
}

static void fill_dirent(struct fuse_dirent *out, const struct ns_dirent *entry)
{
    *out = (struct fuse_dirent){.ino = entry->attr.ino, .off = entry->cookie, .namelen = entry->name_len,
                                .type = (entry->attr.mode & S_IFMT) >> 12};
    memcpy(out->name, entry->name, entry->name_len);
}

static bool emit_plain(void *arg, const struct ns_dirent *entry)
{
    struct fuse_dirent *out = reserve(arg, FUSE_NAME_OFFSET, entry->name_len);

    if (out == NULL)
        return false;
    fill_dirent(out, entry);
    return true;
}

static bool is_dot(const struct ns_dirent *entry)
{
    return entry->name[0] == '.' && (entry->name_len == 1 || (entry->name_len == 2 && entry->name[1] == '.'));
}

/* The kernel takes no reference to "." and "..", which have no node here. */
static bool emit_plus(void *arg, const struct ns_dirent *entry)
{
    struct fuse_direntplus *out = reserve(arg, FUSE_NAME_OFFSET_DIRENTPLUS, entry->name_len);

    if (out == NULL)
        return false;
    if (is_dot(entry)) {
        out->entry_out = (struct fuse_entry_out){.attr.ino = entry->attr.ino};
        fill_attr(&out->entry_out.attr, &entry->attr);
    } else {
        fill_entry(&out->entry_out, &entry->attr);
    }
    fill_dirent(&out->dirent, entry);
    return true;
}

static int decode_listing(struct message *m, struct body *body, ns_emit_fn *emit, uint32_t flags)
{
    const struct fuse_read_in *in = take(body, sizeof *in);

    if (in == NULL)
        return -EINVAL;
    m->request.offset = in->offset;
    m->request.flags = flags;
    m->request.emit = emit;
    m->request.emit_arg = m;
    m->room = in->size < LISTING_ROOM ? in->size : LISTING_ROOM;
    return 0;
}

static int decode_readdir(struct message *m, struct body *body) { return decode_listing(m, body, emit_plain, NS_PLAIN); }

static int decode_readdirplus(struct message *m, struct body *body) { return decode_listing(m, body, emit_plus, 0); }

/* ---- answers: fill in the data of a reply, return its size or a negative errno ---- */

static int64_t encode_nothing(struct message *m, void *reply)
{
    (void)m, (void)reply;
    return 0;
}

static int64_t encode_bytes(struct message *m, void *reply)
{
    (void)reply;                        /* that is where they are */
    return m->request.result;
}

static int64_t encode_entry(struct message *m, void *reply)
{
    fill_entry(reply, &m->request.attr);
    return sizeof(struct fuse_entry_out);
}

/* Opens are not answered and so have no handle: neither has this one. */
static int64_t encode_created(struct message *m, void *reply)
{
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } *out = reply;

    fill_entry(&out->entry, &m->request.attr);
    out->open = (struct fuse_open_out){.open_flags = FOPEN_KEEP_CACHE};
    return sizeof *out;
}

static int64_t encode_attr(struct message *m, void *reply)
{
    struct fuse_attr_out *out = reply;

    *out = (struct fuse_attr_out){.attr_valid = TRANSPORT_CACHE_SECONDS};
    fill_attr(&out->attr, &m->request.attr);
    return sizeof *out;
}

static void fill_sx_time(struct fuse_abi_sx_time *out, int64_t ns)
{
    uint64_t seconds;

    *out = (struct fuse_abi_sx_time){0};
    split_time(ns, &seconds, &out->tv_nsec);
    out->tv_sec = (int64_t)seconds;
}

static int64_t encode_statx(struct message *m, void *reply)
{
    const struct attr *a = &m->request.attr;
    struct fuse_abi_statx_out *out = reply;

    *out = (struct fuse_abi_statx_out){.attr_valid = TRANSPORT_CACHE_SECONDS};
    out->stat = (struct fuse_abi_statx){
        .mask = STATX_BASIC_AND_BTIME, .blksize = NODE_SIZE, .nlink = a->nlink, .uid = a->uid, .gid = a->gid,
        .mode = (uint16_t)a->mode, .ino = a->ino, .size = a->size, .blocks = request_st_blocks(a),
        .rdev_major = major(a->rdev), .rdev_minor = minor(a->rdev),
    };
    fill_sx_time(&out->stat.atime, a->atime);
    fill_sx_time(&out->stat.btime, a->btime);
    fill_sx_time(&out->stat.ctime, a->ctime);
    fill_sx_time(&out->stat.mtime, a->mtime);
    return sizeof *out;
}

static int64_t encode_written(struct message *m, void *reply)
{
    *(struct fuse_write_out *)reply = (struct fuse_write_out){.size = (uint32_t)m->request.result};
    return sizeof(struct fuse_write_out);
}

static int64_t encode_copied_64(struct message *m, void *reply)
{
    *(struct fuse_abi_copy_file_range_out *)reply = (struct fuse_abi_copy_file_range_out){(uint64_t)m->request.result};
    return sizeof(struct fuse_abi_copy_file_range_out);
}

static int64_t encode_seek(struct message *m, void *reply)
{
    *(struct fuse_lseek_out *)reply = (struct fuse_lseek_out){.offset = (uint64_t)m->request.result};
    return sizeof(struct fuse_lseek_out);
}

static int64_t encode_listing(struct message *m, void *reply)
{
    (void)reply;
    return (int64_t)m->used;
}

static int64_t encode_statfs(struct message *m, void *reply)
{
    const struct request *r = &m->request;

    *(struct fuse_statfs_out *)reply = (struct fuse_statfs_out){.st = {
        .bsize = NODE_SIZE, .frsize = NODE_SIZE, .blocks = r->statfs_blocks, .bfree = r->statfs_free, .bavail = r->statfs_free,
        .files = r->statfs_inodes, .ffree = r->statfs_free, .namelen = NAME_MAX_BYTES,
    }};
    return sizeof(struct fuse_statfs_out);
}

static int64_t encode_xattr_size(struct message *m, void *reply)
{
    *(struct fuse_getxattr_out *)reply = (struct fuse_getxattr_out){.size = (uint32_t)m->request.result};
    return sizeof(struct fuse_getxattr_out);
}

static int64_t encode_getxattr(struct message *m, void *reply)
{
    return m->asked == 0 ? encode_xattr_size(m, reply) : m->request.result;
}

static int64_t encode_listxattr(struct message *m, void *reply)
{
    if (m->asked == 0)
        return encode_xattr_size(m, reply);
    return m->request.result <= m->asked ? m->request.result : -ERANGE;
}

/* ---- the table ---- */

/* Has the volume raised the lookup count of what the reply names? */
enum gives { GIVES_NOTHING, GIVES_ENTRY, GIVES_LISTING };

static const struct opcode {
    int (*decode)(struct message *m, struct body *body);
    int64_t (*encode)(struct message *m, void *reply);
    uint16_t op;                        /* enum request_op */
    uint8_t gives;                      /* enum gives */
    bool keeps_name;                    /* the reply is longer than a few headers and must not overwrite the request's name */
} opcodes[TRANSPORT_OPCODES] = {
    [FUSE_LOOKUP] = {decode_name, encode_entry, REQ_LOOKUP, GIVES_ENTRY, false},
    [FUSE_GETATTR] = {decode_plain, encode_attr, REQ_GETATTR, GIVES_NOTHING, false},
    [FUSE_SETATTR] = {decode_setattr, encode_attr, REQ_SETATTR, GIVES_NOTHING, false},
    [FUSE_READLINK] = {decode_readlink, encode_bytes, REQ_READLINK, GIVES_NOTHING, false},
    [FUSE_SYMLINK] = {decode_symlink, encode_entry, REQ_SYMLINK, GIVES_ENTRY, false},
    [FUSE_MKNOD] = {decode_mknod, encode_entry, REQ_MKNOD, GIVES_ENTRY, false},
    [FUSE_MKDIR] = {decode_mkdir, encode_entry, REQ_MKDIR, GIVES_ENTRY, false},
    [FUSE_UNLINK] = {decode_name, encode_nothing, REQ_UNLINK, GIVES_NOTHING, false},
    [FUSE_RMDIR] = {decode_name, encode_nothing, REQ_RMDIR, GIVES_NOTHING, false},
    [FUSE_RENAME] = {decode_rename, encode_nothing, REQ_RENAME, GIVES_NOTHING, false},
    [FUSE_RENAME2] = {decode_rename2, encode_nothing, REQ_RENAME, GIVES_NOTHING, false},
    [FUSE_LINK] = {decode_link, encode_entry, REQ_LINK, GIVES_ENTRY, false},
    [FUSE_READ] = {decode_read, encode_bytes, REQ_READ, GIVES_NOTHING, false},
    [FUSE_WRITE] = {decode_write, encode_written, REQ_WRITE, GIVES_NOTHING, false},
    [FUSE_STATFS] = {decode_plain, encode_statfs, REQ_STATFS, GIVES_NOTHING, false},
    [FUSE_FSYNC] = {decode_fsync, encode_nothing, REQ_FSYNC, GIVES_NOTHING, false},
    [FUSE_FSYNCDIR] = {decode_fsync, encode_nothing, REQ_FSYNCDIR, GIVES_NOTHING, false},
    [FUSE_GETXATTR] = {decode_getxattr, encode_getxattr, REQ_GETXATTR, GIVES_NOTHING, true},
    [FUSE_LISTXATTR] = {decode_listxattr, encode_listxattr, REQ_LISTXATTR, GIVES_NOTHING, true},
    [FUSE_READDIR] = {decode_readdir, encode_listing, REQ_READDIR, GIVES_NOTHING, false},
    [FUSE_READDIRPLUS] = {decode_readdirplus, encode_listing, REQ_READDIR, GIVES_LISTING, false},
    [FUSE_CREATE] = {decode_create, encode_created, REQ_MKNOD, GIVES_ENTRY, false},
    [FUSE_TMPFILE] = {decode_create, encode_created, REQ_TMPFILE, GIVES_ENTRY, false},
    [FUSE_FALLOCATE] = {decode_fallocate, encode_nothing, REQ_FALLOCATE, GIVES_NOTHING, false},
    [FUSE_LSEEK] = {decode_lseek, encode_seek, REQ_SEEK, GIVES_NOTHING, false},
    [FUSE_COPY_FILE_RANGE] = {decode_copy, encode_written, REQ_COPY, GIVES_NOTHING, false},
    [FUSE_OPCODE_COPY_FILE_RANGE_64] = {decode_copy, encode_copied_64, REQ_COPY, GIVES_NOTHING, false},
    [FUSE_OPCODE_STATX] = {decode_plain, encode_statx, REQ_GETATTR, GIVES_NOTHING, false},
};

/* ---- requests that the volume needs not know ---- */

static void forget_many(struct message *m, struct body *body)
{
    const struct fuse_batch_forget_in *in = take(body, sizeof *in);

    for (uint32_t i = 0; in != NULL && i < in->count; i++) {
        const struct fuse_forget_one *one = take(body, sizeof *one);

        if (one == NULL)
            return;
        request_forget(m->transport->volume, one->nodeid, one->nlookup);
    }
}

static void forget(struct message *m, struct body *body)
{
    const struct fuse_forget_in *in = take(body, sizeof *in);

    if (in != NULL)
        request_forget(m->transport->volume, m->nodeid, in->nlookup);
}

static void answer(struct message *m, int error)
{
    reply_error(m->transport, m->unique, error);
    count_native(m, error < 0);
}

static void answer_opendir(struct message *m)
{
    struct {
        struct fuse_out_header header;
        struct fuse_open_out open;
    } reply = {.header = {.len = sizeof reply, .unique = m->unique}};

    reply_write(m->transport, &reply, sizeof reply);
    count_native(m, false);
}

/* Returns false if the volume or pyfuse3 has to answer. */
static bool answered_without_volume(struct message *m, struct body *body)
{
    switch (m->opcode) {
    case FUSE_FORGET:
        forget(m, body);
        count_native(m, false);
        return true;
    case FUSE_BATCH_FORGET:
        forget_many(m, body);
        count_native(m, false);
        return true;
    case FUSE_OPEN:                     /* the kernel then opens files without us, */
    case FUSE_FLUSH:                    /* and writes back before close() all the same */
        answer(m, -ENOSYS);
        return true;
    case FUSE_OPENDIR:
        answer_opendir(m);
        return true;
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        answer(m, 0);
        return true;
    default:
        return false;
    }
}

static void completed(struct request *request)
{
    struct message *m = (struct message *)request;

    native_reply(m);
    message_done(m);
}

enum native native_decode(struct message *m)
{
    struct body body = {.at = message_in(m) + sizeof(struct fuse_in_header), .left = m->size - sizeof(struct fuse_in_header)};
    const struct opcode *opcode = m->opcode < TRANSPORT_OPCODES ? &opcodes[m->opcode] : &opcodes[0];

    if (answered_without_volume(m, &body))
        return NATIVE_ANSWERED;
    if (opcode->decode == NULL)
        return NATIVE_FOREIGN;
    m->request = (struct request){.op = opcode->op, .ino = m->nodeid, .completed = completed};
    int error = opcode->decode(m, &body);
    if (error == 0)
        return NATIVE_READY;
    answer(m, error);
    return NATIVE_ANSWERED;
}

/* ---- replies ---- */

/* The kernel has not got what counts as given to it. */
static void take_back(struct message *m, const struct opcode *opcode)
{
    struct volume *v = m->transport->volume;

    if (opcode->gives == GIVES_ENTRY)
        request_forget(v, m->request.attr.ino, 1);
    for (size_t at = 0; opcode->gives == GIVES_LISTING && at < m->used;) {
        const struct fuse_direntplus *entry = (void *)(message_data(m) + at);

        if (entry->entry_out.nodeid != 0)
            request_forget(v, entry->entry_out.nodeid, 1);
        at += FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET_DIRENTPLUS + entry->dirent.namelen);
    }
}

/* The kernel remembers that a name does not exist, if it is told so as an entry without a node. */
static int64_t encode_absence(void *reply)
{
    *(struct fuse_entry_out *)reply = (struct fuse_entry_out){.entry_valid = TRANSPORT_CACHE_SECONDS};
    return sizeof(struct fuse_entry_out);
}

void native_reply(struct message *m)
{
    const struct opcode *opcode = &opcodes[m->opcode];
    struct transport *t = m->transport;
    uint8_t *data = opcode->keeps_name ? message_reply_data(m) : message_data(m);
    struct fuse_out_header *header = (void *)(data - sizeof *header);
    bool absent = m->opcode == FUSE_LOOKUP && m->request.result == -ENOENT;
    int64_t size = m->request.result;
    int error = 0;

    if (absent)
        size = encode_absence(data);
    else if (size >= 0)
        size = opcode->encode(m, data);
    if (size < 0)
        error = (int)size;
    m->used = size < 0 ? 0 : (size_t)size;
    *header = (struct fuse_out_header){.len = (uint32_t)(sizeof *header + m->used), .error = error, .unique = m->unique};
    int result = reply_write(t, header, header->len);
    /* A refused reply must not leave its request, and whoever waits for it, hanging. */
    if (result < 0 && error == 0 && !absent)
        take_back(m, opcode);
    if (result < 0 && result != -ENOENT && result != -ENODEV && result != -ECONNABORTED)
        reply_error(t, m->unique, -EIO);
    count_native(m, error < 0 && !absent);
}
