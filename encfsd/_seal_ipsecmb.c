/* seal_ipsecmb: not written yet. */
typedef int encfsd_seal_ipsecmb_stub;
