/* volume: not written yet. */
typedef int encfsd_volume_stub;
