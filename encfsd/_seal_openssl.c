/* seal_openssl: not written yet. */
typedef int encfsd_seal_openssl_stub;
