/* namespace: not written yet. */
typedef int encfsd_namespace_stub;
