/* schema: not written yet. */
typedef int encfsd_schema_stub;
