/* vfs: not written yet. */
typedef int encfsd_vfs_stub;
