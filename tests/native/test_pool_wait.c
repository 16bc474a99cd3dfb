/* The queue of the overflow policy `wait`. Whoever waits here waits for another thread of the test, and never for a time. */
#include "pool_fixture.h"

static struct pool_queue_stats queue_of(struct pool *pool, enum pool_class class)
{
    struct pool_queue_stats stats[POOL_CLASSES];
    pool_queue_stats(pool, stats);
    return stats[class];
}

struct client {
    struct pool *pool;
    enum pool_class class;
    pthread_t thread;
    int rc;
    struct node *node;
    atomic_int *turn;                   /* counts who got a node */
    int mine;
};

static void *wait_for_a_node(void *arg)
{
    struct client *c = arg;
    c->rc = pool_take(c->pool, POOL_DATA, c->class, true, &c->node);
    c->mine = c->turn ? atomic_fetch_add(c->turn, 1) : 0;
    return NULL;
}

/* Starts a client and returns when it is in the queue. */
static void enqueue_client(struct client *c)
{
    uint64_t depth = queue_of(c->pool, c->class).depth;
    pthread_create(&c->thread, NULL, wait_for_a_node, c);
    while (queue_of(c->pool, c->class).depth == depth)
        sched_yield();
}

static struct pool *new_queueing_pool(size_t capacity, size_t reserve, pool_evict_fn *evict)
{
    overflow = POOL_OVERFLOW_WAIT;
    return new_pool(capacity, reserve, evict);
}

static void take_all(struct pool *pool, struct node **node, size_t n)
{
    for (size_t i = 0; i < n; i++)
        CHECK((node[i] = pool_take_cached(pool, POOL_DATA, POOL_APPLICATION)) != NULL);
}

static void finish(struct pool *pool)
{
    CHECK_EQ(pool_audit(pool), 0);
    CHECK_EQ(pool_destroy(pool), 0);
}

TEST(buckets)
{
    for (unsigned b = 0; b + 1 < LATENCY_BUCKETS; b++) {
        CHECK_EQ(latency_bucket(latency_bucket_ns(b)), b);
        CHECK_EQ(latency_bucket(latency_bucket_ns(b + 1) - 1), b);
    }
    CHECK_EQ(latency_bucket_ns(0), 0);
    CHECK_EQ(latency_bucket_ns(7), 7);
    CHECK_EQ(latency_bucket_ns(9), 10);
    CHECK_EQ(latency_bucket_ns(12), 16);
    CHECK_EQ(latency_bucket(UINT64_MAX), LATENCY_BUCKETS - 1);
}

/* ---- Each strategy ---- */

#define EACH_STRATEGY(name)                                                                                                       \
    static void each_##name(void);                                                                                                \
    TEST(name)                                                                                                                    \
    {                                                                                                                             \
        for (strategy = POOL_POOLING; strategy < POOL_STRATEGIES; strategy++)                                                     \
            each_##name();                                                                                                        \
    }                                                                                                                             \
    static void each_##name(void)

EACH_STRATEGY(what_is_given_back_goes_to_who_waits)
{
    struct pool *pool = new_queueing_pool(3, 1, NULL);
    struct node *node[2];
    take_all(pool, node, 2);
    struct client c = {.pool = pool, .class = POOL_APPLICATION};
    enqueue_client(&c);
    CHECK_EQ(queue_of(pool, POOL_APPLICATION).depth, 1);
    pool_give(pool, node[0]);
    pthread_join(c.thread, NULL);
    CHECK(c.rc == 0 && c.node && !c.node->overflow);
    struct pool_queue_stats q = queue_of(pool, POOL_APPLICATION);
    uint64_t sum = 0;
    for (unsigned b = 0; b < LATENCY_BUCKETS; b++)
        sum += q.wait[b];
    CHECK(q.depth == 0 && q.high_water == 1 && q.waits == 1 && q.expired == 0 && q.total_ns > 0 && sum == 1);
    CHECK_EQ(queue_of(pool, POOL_COMMIT).waits + queue_of(pool, POOL_BACKGROUND).waits, 0);
    pool_give(pool, node[1]);
    pool_give(pool, c.node);
    finish(pool);
}

EACH_STRATEGY(classes_in_order_and_each_class_fairly)
{
    struct pool *pool = new_queueing_pool(5, 1, NULL);
    struct node *node[4];
    atomic_int turn = 0;
    take_all(pool, node, 4);
    struct client c[4] = {{.class = POOL_BACKGROUND}, {.class = POOL_APPLICATION}, {.class = POOL_APPLICATION},
                          {.class = POOL_APPLICATION}};
    for (int i = 0; i < 4; i++) {
        c[i].pool = pool;
        c[i].turn = &turn;
        enqueue_client(&c[i]);
    }
    CHECK_EQ(queue_of(pool, POOL_APPLICATION).high_water, 3);
    CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
    for (int given = 0; given < 4; given++) {
        pool_give(pool, node[given]);
        if (given < 3)                  /* nobody overtakes them, but who comes before the last one's class */
            CHECK(!pool_take_cached(pool, POOL_DATA, POOL_APPLICATION));
        while (atomic_load(&turn) == given)
            sched_yield();
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(c[i].thread, NULL);
        CHECK(c[i].rc == 0);
        CHECK_EQ(c[i].mine, i ? i - 1 : 3);
        pool_give(pool, c[i].node);
    }
    finish(pool);
}

/* Commits take the reserve past everybody who waits, and never wait themselves. */
EACH_STRATEGY(commits_do_not_wait)
{
    struct pool *pool = new_queueing_pool(4, 2, NULL);
    struct node *node[2], *commit[2], *none;
    take_all(pool, node, 2);
    struct client c = {.pool = pool, .class = POOL_APPLICATION};
    enqueue_client(&c);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pool_take(pool, POOL_TREE, POOL_COMMIT, true, &commit[i]), 0);
    CHECK_EQ(pool_take(pool, POOL_TREE, POOL_COMMIT, true, &none), -EAGAIN);
    pool_give(pool, commit[0]);                         /* refills the reserve: the client goes on waiting */
    pool_give(pool, commit[1]);
    CHECK_EQ(queue_of(pool, POOL_APPLICATION).depth, 1);
    pool_give(pool, node[0]);
    pthread_join(c.thread, NULL);
    CHECK_EQ(c.rc, 0);
    pool_give(pool, c.node);
    pool_give(pool, node[1]);
    finish(pool);
}

EACH_STRATEGY(waiting_in_vain)
{
    struct pool *pool = new_queueing_pool(3, 1, NULL);
    struct node *node[2], *none;
    take_all(pool, node, 2);
    wait_ms = 3;
    CHECK_EQ(pool_take(pool, POOL_DATA, POOL_APPLICATION, true, &none), -EAGAIN);
    CHECK_EQ(pool_take(pool, POOL_DATA, POOL_BACKGROUND, true, &none), -EAGAIN);
    wait_ms = 10000;
    CHECK(queue_of(pool, POOL_APPLICATION).expired == 1 && queue_of(pool, POOL_BACKGROUND).expired == 1);
    CHECK_EQ(pool_take(pool, POOL_DATA, POOL_APPLICATION, false, &none), -EAGAIN);
    CHECK(none == NULL && queue_of(pool, POOL_APPLICATION).waits == 1);
    CHECK_EQ(stats_of(pool).refused, 3);
    pool_give(pool, node[0]);
    pool_give(pool, node[1]);
    finish(pool);

    pool = new_queueing_pool(2, 2, NULL);               /* commits may have all there is: no use waiting */
    CHECK_EQ(pool_take(pool, POOL_DATA, POOL_APPLICATION, true, &none), -EAGAIN);
    CHECK_EQ(queue_of(pool, POOL_APPLICATION).waits, 0);
    finish(pool);
}

/* Nobody tells the pool that a node can be evicted: whoever is first in the queue finds out. */
EACH_STRATEGY(what_becomes_evictable_goes_to_who_waits)
{
    struct pool *pool = new_queueing_pool(2, 0, owner_evict);
    struct object *o = new_owner();
    struct node *node[2];
    take_all(pool, node, 2);
    struct client c = {.pool = pool, .class = POOL_APPLICATION};
    enqueue_client(&c);
    CHECK(owner_cache(o, node[0]));
    pthread_join(c.thread, NULL);
    CHECK(c.rc == 0 && c.node == node[0]);
    pool_give(pool, c.node);
    pool_give(pool, node[1]);
    owner_free(pool, o);
    finish(pool);
}

/* Growing serves the queue. */
EACH_STRATEGY(growing_serves_who_waits)
{
    const struct pool_options options = {.bytes = pool_footprint(1), .max_bytes = pool_footprint(9), .strategy = strategy,
                                         .overflow = POOL_OVERFLOW_WAIT};
    struct pool *pool;
    struct node *node;
    CHECK_EQ(pool_create(&pool, &options, NULL, 0), 0);
    take_all(pool, &node, 1);
    struct client c = {.pool = pool, .class = POOL_BACKGROUND};
    enqueue_client(&c);
    CHECK_EQ(pool_resize(pool, pool_footprint(2)), 0);
    pthread_join(c.thread, NULL);
    CHECK_EQ(c.rc, 0);
    pool_give(pool, c.node);
    pool_give(pool, node);
    finish(pool);
}
