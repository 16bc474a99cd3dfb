/* transport: not written yet. */
typedef int encfsd_transport_stub;
