/* acl: not written yet. */
typedef int encfsd_acl_stub;
