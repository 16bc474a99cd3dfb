/* workers: not written yet. */
typedef int encfsd_workers_stub;
