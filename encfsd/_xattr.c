/* xattr: not written yet. */
typedef int encfsd_xattr_stub;
