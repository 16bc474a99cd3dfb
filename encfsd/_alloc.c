/* alloc: not written yet. */
typedef int encfsd_alloc_stub;
