/* pool: not written yet. */
typedef int encfsd_pool_stub;
