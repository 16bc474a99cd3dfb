/* groups: not written yet. */
typedef int encfsd_groups_stub;
