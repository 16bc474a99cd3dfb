/* inode: not written yet. */
typedef int encfsd_inode_stub;
