/* No memory for what belongs to a file that is worked on: the operation fails, and a loss is remembered all the same. */
#include "_volume_internal.h"
#include "check.h"
#include "volume_client.h"

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

static _Atomic bool no_memory;

void *__wrap_calloc(size_t count, size_t size)
{
    return no_memory && size == sizeof(struct inode_work) ? NULL : __real_calloc(count, size);
}

TEST(without_memory_a_loss_counts_for_the_whole_file)
{
    static uint8_t data[10000], back[10000];
    struct client c = {0};
    struct volume_options o;
    struct object_record record;
    struct attr attr;
    char path[64], reason[200];

    if (!CHECK_EQ(seal_setup(SEAL_AUTO, reason, sizeof reason), 0))
        return;
    c.src_fd = client_directory(path);
    o = client_options(c.src_fd);
    if (!CHECK_EQ(volume_create(&o, 0, 0, &record), 0) || !CHECK_EQ(client_open(&c, &o), 0))
        return;
    memset(data, 5, sizeof data);
    uint64_t ino = (uint64_t)client_create(&c, ROOT_INO, "f");
    CHECK_EQ(client_write(&c, ino, data, 100, 0), 100);
    no_memory = true;
    CHECK_EQ(client_write(&c, ino, data, sizeof data, 0), -ENOMEM);
    CHECK_EQ(client_read(&c, ino, back, sizeof back, 0), 100);          /* nothing half done */
    CHECK_EQ(client_fsync(&c, ino), -ENOMEM);
    no_memory = false;
    CHECK_EQ(client_write(&c, ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(client_fsync(&c, ino), -ENOMEM);                           /* nobody knows whether that was all */
    CHECK_EQ(client_truncate(&c, ino, 0), 0);
    CHECK_EQ(client_write(&c, ino, data, sizeof data, 0), sizeof data);
    CHECK_EQ(client_fsync(&c, ino), 0);

    CHECK_EQ(volume_close(c.volume), 0);
    if (!CHECK_EQ(client_open(&c, &o), 0))
        return;
    CHECK_EQ(client_lookup(&c, ROOT_INO, "f", &attr), 0);
    no_memory = true;
    CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), -ENOMEM);
    no_memory = false;
    CHECK_EQ(client_read(&c, attr.ino, back, sizeof back, 0), sizeof back);
    CHECK_MEM_EQ(back, data, sizeof back);
    CHECK_EQ(volume_close(c.volume), 0);
    close(c.src_fd);
    client_remove(path);
}
