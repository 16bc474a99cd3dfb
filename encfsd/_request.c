/* request: not written yet. */
typedef int encfsd_request_stub;
