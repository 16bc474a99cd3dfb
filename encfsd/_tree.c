/* tree: not written yet. */
typedef int encfsd_tree_stub;
