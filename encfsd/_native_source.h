/* Pasted by cffi on top of the extension's generated C: the headers behind _native_cdef.h. */
#include "_object.h"
#include "_request.h"
#include "_seal.h"
#include "_transport.h"

#ifdef HAVE_IPSEC_MB
#define ENCFSD_HAVE_IPSEC_MB 1
#else
#define ENCFSD_HAVE_IPSEC_MB 0
#endif
