/*
 * vec_dtype.h: VEC elements of any dtype as fp32, and back. Included after vec_*.h.
 *
 * Where the dtype is a constant the switch folds away; loops that cannot afford it for each vector are compiled once
 * for each dtype.
 */
#ifndef ESMM_VEC_DTYPE_H
#define ESMM_VEC_DTYPE_H

#include "dtype.h"

static inline __attribute__((always_inline)) vec esmm_vec_load(const void *data, const esmm_dtype dtype, int64_t at)
{
  switch (dtype) {
  case ESMM_F32:
    return vec_load((const float *)data + at);
  case ESMM_BF16:
    return vec_from_bf16((const uint16_t *)data + at);
  case ESMM_F16:
    return vec_from_f16((const uint16_t *)data + at);
  }
  return vec_zero(); /* an unknown dtype, which public functions have refused */
}

static inline __attribute__((always_inline)) void esmm_vec_store(void *data, const esmm_dtype dtype, int64_t at, vec x)
{
  switch (dtype) {
  case ESMM_F32:
    vec_store((float *)data + at, x);
    break;
  case ESMM_BF16:
    vec_to_bf16((uint16_t *)data + at, x);
    break;
  case ESMM_F16:
    vec_to_f16((uint16_t *)data + at, x);
    break;
  }
}

/* The first count (VEC at most) elements; lanes past them are 0, and no other memory is touched. */
static inline __attribute__((always_inline)) vec esmm_vec_load_first(const void *data, const esmm_dtype dtype,
                                                                     int64_t at, int64_t count)
{
  if (count == VEC)
    return esmm_vec_load(data, dtype, at);
  if (dtype == ESMM_F32)
    return vec_load_first((const float *)data + at, count);
  uint16_t part[VEC];
  halves_load_first(part, (const uint16_t *)data + at, count);
  return esmm_vec_load(part, dtype, 0);
}

static inline __attribute__((always_inline)) void esmm_vec_store_first(void *data, const esmm_dtype dtype, int64_t at,
                                                                       int64_t count, vec x)
{
  if (count == VEC) {
    esmm_vec_store(data, dtype, at, x);
  } else if (dtype == ESMM_F32) {
    vec_store_first((float *)data + at, count, x);
  } else {
    uint16_t part[VEC] = {0};
    esmm_vec_store(part, dtype, 0, x);
    halves_store_first((uint16_t *)data + at, count, part);
  }
}

#endif
