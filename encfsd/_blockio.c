/* blockio: not written yet. */
typedef int encfsd_blockio_stub;
