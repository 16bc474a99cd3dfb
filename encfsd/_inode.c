/* The inode table: hash chains in shards. Inode numbers are handed out in sequence, so their low bits choose the shard and the
 * next bits the bucket without a hash function. */
#include "_inode.h"

#include <errno.h>
#include <stdlib.h>

enum {
    SHARD_BITS = 6,
    SHARDS = 1 << SHARD_BITS,
    FIRST_BUCKETS = 16,         /* of each shard; doubled when there are CHAIN inodes for each */
    CHAIN = 2,                  /* so that a bucket costs an inode 4 to 8 bytes */
};

struct shard {
    pthread_mutex_t lock;       /* guards everything below, and hash_next, lookups, refs of the inodes in it */
    struct inode **buckets;
    size_t bucket_count;        /* power of two */
    size_t count;
};

struct inode_table {
    struct shard shards[SHARDS];
};

static struct shard *shard_of(struct inode_table *table, uint64_t ino)
{
    return &table->shards[ino & (SHARDS - 1)];
}

static struct inode **bucket_of(struct shard *shard, uint64_t ino)
{
    return &shard->buckets[(ino >> SHARD_BITS) & (shard->bucket_count - 1)];
}

static struct inode *find_locked(struct shard *shard, uint64_t ino)
{
    struct inode *inode = *bucket_of(shard, ino);
    while (inode != NULL && inode->ino != ino)
        inode = inode->hash_next;
    return inode;
}

/* Longer chains are no error, so neither is a failure to grow. */
static void grow(struct shard *shard)
{
    struct shard bigger = {.bucket_count = 2 * shard->bucket_count};
    bigger.buckets = calloc(bigger.bucket_count, sizeof *bigger.buckets);
    if (bigger.buckets == NULL)
        return;
    for (size_t i = 0; i < shard->bucket_count; i++) {
        for (struct inode *inode = shard->buckets[i], *next; inode != NULL; inode = next) {
            next = inode->hash_next;
            struct inode **bucket = bucket_of(&bigger, inode->ino);
            inode->hash_next = *bucket;
            *bucket = inode;
        }
    }
    free(shard->buckets);
    shard->buckets = bigger.buckets;
    shard->bucket_count = bigger.bucket_count;
}

static void free_inode(struct inode *inode)
{
    pthread_mutex_destroy(&inode->lock);
    free(inode->content);
    free(inode->work);
    free(inode);
}

int inode_table_create(struct inode_table **table)
{
    struct inode_table *new = calloc(1, sizeof *new);
    if (new == NULL)
        return -ENOMEM;
    for (int i = 0; i < SHARDS; i++) {
        struct shard *shard = &new->shards[i];
        pthread_mutex_init(&shard->lock, NULL);
        shard->bucket_count = FIRST_BUCKETS;
        shard->buckets = calloc(shard->bucket_count, sizeof *shard->buckets);
        if (shard->buckets == NULL) {
            new->shards[i].bucket_count = 0;
            inode_table_destroy(new);
            return -ENOMEM;
        }
    }
    *table = new;
    return 0;
}

void inode_table_destroy(struct inode_table *table)
{
    for (int i = 0; i < SHARDS; i++) {
        struct shard *shard = &table->shards[i];
        for (size_t j = 0; j < shard->bucket_count; j++) {
            for (struct inode *inode = shard->buckets[j], *next; inode != NULL; inode = next) {
                next = inode->hash_next;
                free_inode(inode);
            }
        }
        free(shard->buckets);
        pthread_mutex_destroy(&shard->lock);
    }
    free(table);
}

size_t inode_table_count(struct inode_table *table)
{
    size_t count = 0;
    for (int i = 0; i < SHARDS; i++) {
        pthread_mutex_lock(&table->shards[i].lock);
        count += table->shards[i].count;
        pthread_mutex_unlock(&table->shards[i].lock);
    }
    return count;
}

struct inode *inode_find(struct inode_table *table, uint64_t ino)
{
    struct shard *shard = shard_of(table, ino);
    pthread_mutex_lock(&shard->lock);
    struct inode *inode = find_locked(shard, ino);
    if (inode != NULL)
        inode->refs++;
    pthread_mutex_unlock(&shard->lock);
    return inode;
}

struct inode *inode_get(struct inode_table *table, uint64_t ino, bool *created)
{
    struct inode *inode = inode_find(table, ino);
    *created = false;
    if (inode != NULL)
        return inode;

    /* Nobody else inserts meanwhile: insertion is under the namespace mutex. */
    inode = calloc(1, sizeof *inode);
    if (inode == NULL)
        return NULL;
    inode->ino = ino;
    inode->refs = 1;
    pthread_mutex_init(&inode->lock, NULL);
    pthread_mutex_lock(&inode->lock);
    struct shard *shard = shard_of(table, ino);
    pthread_mutex_lock(&shard->lock);
    if (shard->count >= CHAIN * shard->bucket_count)
        grow(shard);
    struct inode **bucket = bucket_of(shard, ino);
    inode->hash_next = *bucket;
    *bucket = inode;
    shard->count++;
    pthread_mutex_unlock(&shard->lock);
    *created = true;
    return inode;
}

void inode_looked_up(struct inode_table *table, struct inode *inode, uint64_t n)
{
    struct shard *shard = shard_of(table, inode->ino);
    pthread_mutex_lock(&shard->lock);
    inode->lookups += n;
    pthread_mutex_unlock(&shard->lock);
}

static bool unused(const struct inode *inode)
{
    return inode->lookups == 0 && inode->refs == 0;
}

int inode_need_work(struct inode *inode)
{
    if (inode->work == NULL)
        inode->work = calloc(1, sizeof *inode->work);
    return inode->work != NULL ? 0 : -ENOMEM;
}

void inode_end_work(struct inode *inode)
{
    inode->work->pinned = false;
    if (inode->work->lost_first < inode->work->lost_last)
        return;
    free(inode->work);
    inode->work = NULL;
}

int inode_lost(const struct inode *inode)
{
    if (inode->work != NULL && inode->work->lost_first < inode->work->lost_last)
        return inode->work->lost_error;
    return inode->lost_whole ? -ENOMEM : 0;
}

void inode_hold(struct inode_table *table, struct inode *inode)
{
    struct shard *shard = shard_of(table, inode->ino);
    pthread_mutex_lock(&shard->lock);
    inode->refs++;
    pthread_mutex_unlock(&shard->lock);
}

void inode_unhold(struct inode_table *table, struct inode *inode)
{
    struct shard *shard = shard_of(table, inode->ino);
    pthread_mutex_lock(&shard->lock);
    inode->refs--;
    pthread_mutex_unlock(&shard->lock);
}

bool inode_put(struct inode_table *table, struct inode *inode)
{
    struct shard *shard = shard_of(table, inode->ino);
    pthread_mutex_lock(&shard->lock);
    inode->refs--;
    bool droppable = unused(inode);
    pthread_mutex_unlock(&shard->lock);
    return droppable;
}

bool inode_is_known(struct inode_table *table, struct inode *inode)
{
    struct shard *shard = shard_of(table, inode->ino);
    pthread_mutex_lock(&shard->lock);
    bool known = inode->lookups > 0;
    pthread_mutex_unlock(&shard->lock);
    return known;
}

bool inode_forget(struct inode_table *table, uint64_t ino, uint64_t n)
{
    struct shard *shard = shard_of(table, ino);
    bool droppable = false;
    pthread_mutex_lock(&shard->lock);
    struct inode *inode = find_locked(shard, ino);
    if (inode != NULL) {
        /* More than the kernel holds would wrap to "for ever". */
        inode->lookups -= n < inode->lookups ? n : inode->lookups;
        droppable = unused(inode);
    }
    pthread_mutex_unlock(&shard->lock);
    return droppable;
}

bool inode_remove_if_unused(struct inode_table *table, uint64_t ino, struct object **object)
{
    struct shard *shard = shard_of(table, ino);
    struct inode *inode;
    *object = NULL;
    pthread_mutex_lock(&shard->lock);
    struct inode **link = bucket_of(shard, ino);
    while (*link != NULL && (*link)->ino != ino)
        link = &(*link)->hash_next;
    inode = *link;
    /* Without references nobody holds the inode's lock or waits for it: its fields may be read here. */
    if (inode == NULL || !unused(inode) ||
        (!inode->deleted && (inode->attr_dirty || inode->content_dirty))) {
        pthread_mutex_unlock(&shard->lock);
        return false;
    }
    *link = inode->hash_next;
    shard->count--;
    pthread_mutex_unlock(&shard->lock);
    *object = inode->object;
    free_inode(inode);
    return true;
}

int inode_for_each(struct inode_table *table, void (*fn)(void *arg, struct inode *inode), void *arg)
{
    for (int i = 0; i < SHARDS; i++) {
        struct shard *shard = &table->shards[i];
        /* References first, so that fn runs without the lock and the table may change meanwhile. */
        pthread_mutex_lock(&shard->lock);
        size_t n = 0;
        struct inode **inodes = shard->count == 0 ? NULL : malloc(shard->count * sizeof *inodes);
        if (inodes == NULL && shard->count != 0) {
            pthread_mutex_unlock(&shard->lock);
            return -ENOMEM;
        }
        if (inodes != NULL) {
            for (size_t j = 0; j < shard->bucket_count; j++) {
                for (struct inode *inode = shard->buckets[j]; inode != NULL; inode = inode->hash_next) {
                    inode->refs++;
                    inodes[n++] = inode;
                }
            }
        }
        pthread_mutex_unlock(&shard->lock);
        for (size_t j = 0; j < n; j++)
            fn(arg, inodes[j]);
        free(inodes);
    }
    return 0;
}
