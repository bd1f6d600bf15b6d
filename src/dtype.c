/* dtype.c: what callers may ask of a dtype. */
#include "dtype.h"

size_t esmm_dtype_size(esmm_dtype dtype)
{
  return esmm_dtype_bytes(dtype);
}

const char *esmm_dtype_str(esmm_dtype dtype)
{
#define ESMM_CASE(enumerator, name, bytes, magnitude) \
  case enumerator:                                    \
    return name;
  switch (dtype) {
    ESMM_DTYPES(ESMM_CASE)
  }
#undef ESMM_CASE
  return "unknown";
}
