/* seal: not written yet. */
typedef int encfsd_seal_stub;
