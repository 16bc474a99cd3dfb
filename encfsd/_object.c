/* object: not written yet. */
typedef int encfsd_object_stub;
