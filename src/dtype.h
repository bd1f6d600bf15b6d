/*
 * dtype.h: the types of elements, a row each. What else depends on the dtype is a switch with a case for every
 * enumerator and no default: when a row is added, -Wswitch names each place that has to know it. No place may read
 * "neither of these" as the last type there is.
 */
#ifndef ESMM_DTYPE_H
#define ESMM_DTYPE_H

#include "esmm.h"

#include <stdbool.h>

/* X(enumerator, name, bytes, magnitude): magnitude is an element's bits less its sign, which +0 and -0 have not set. */
#define ESMM_DTYPES(X)               \
  X(ESMM_F32, "f32", 4, 0x7fffffffu) \
  X(ESMM_BF16, "bf16", 2, 0x7fffu)   \
  X(ESMM_F16, "f16", 2, 0x7fffu)

/* Sets of dtypes, as a kernel's descriptor has them. */
#define ESMM_DTYPE_BIT(dtype) (1u << (dtype))
#define ESMM_DTYPE_OR_BIT(dtype, name, bytes, magnitude) | ESMM_DTYPE_BIT(dtype)
#define ESMM_DTYPES_ALL (0u ESMM_DTYPES(ESMM_DTYPE_OR_BIT))

/* esmm_dtype_size where the compiler may know the dtype; 0 for an unknown one */
static inline size_t esmm_dtype_bytes(esmm_dtype dtype)
{
#define ESMM_CASE(enumerator, name, bytes, magnitude) \
  case enumerator:                                    \
    return bytes;
  switch (dtype) {
    ESMM_DTYPES(ESMM_CASE)
  }
#undef ESMM_CASE
  return 0;
}

/* 0 for an unknown dtype: no bit of it says that an element is not zero */
static inline uint32_t esmm_dtype_magnitude(esmm_dtype dtype)
{
#define ESMM_CASE(enumerator, name, bytes, magnitude) \
  case enumerator:                                    \
    return magnitude;
  switch (dtype) {
    ESMM_DTYPES(ESMM_CASE)
  }
#undef ESMM_CASE
  return 0;
}

static inline bool esmm_dtype_is_16bit(esmm_dtype dtype)
{
  return esmm_dtype_bytes(dtype) == 2;
}

#endif
