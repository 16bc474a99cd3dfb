/* What Python may call, in plain C declarations for cffi: no directives but "#define NAME ...". */

/* 1 if this build can seal with intel-ipsec-mb, else 0. */
#define ENCFSD_HAVE_IPSEC_MB ...
