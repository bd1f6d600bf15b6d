/*
 * operands.h: A and B as fp32, whatever they are stored as. Included after vec_*.h by the kernels' shared headers.
 */
#ifndef ESMM_OPERANDS_H
#define ESMM_OPERANDS_H

#include "bits.h"
#include "cpu/cpu.h"
#include "cpu/epilogue.h"

#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

/* Parts of a thread's scratch start on pages of their own, so that threads never share a cache line. */
ALWAYS size_t align_up(size_t bytes)
{
  return (bytes + 4095) / 4096 * 4096;
}

/* rows [r0, r0+rows) x k's [k0, k0+kc) of A as fp32 row-major: in place where it is so already, else through buffer. */
ALWAYS const float *rows_of_a(const esmm_matrix *a, int64_t r0, int64_t rows, int64_t k0, int64_t kc, float *buffer,
                              int64_t *ld)
{
  if (a->dtype == ESMM_F32 && a->order == ESMM_ROW_MAJOR) {
    *ld = a->ld;
    return (const float *)a->data + r0 * a->ld + k0;
  }
  *ld = kc;
  if (a->order == ESMM_COL_MAJOR) {
    for (int64_t k = 0; k < kc; k++)
      for (int64_t r = 0; r < rows; r++)
        buffer[r * kc + k] = esmm_matrix_get(a, r0 + r, k0 + k);
    return buffer;
  }
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t *from = (const uint16_t *)a->data + (r0 + r) * a->ld + k0;
    float *to = buffer + r * kc;
    int64_t k = 0;
    if (a->dtype == ESMM_BF16)
      for (; k + VEC <= kc; k += VEC)
        vec_store(to + k, vec_from_bf16(from + k));
    else
      for (; k + VEC <= kc; k += VEC)
        vec_store(to + k, vec_from_f16(from + k));
    for (; k < kc; k++)
      to[k] = a->dtype == ESMM_BF16 ? esmm_from_bf16(from[k]) : esmm_from_f16(from[k]);
  }
  return buffer;
}

/* count (a multiple of VEC) elements of bf16 or fp16 data from element `at` on */
ALWAYS void widen(const void *from, esmm_dtype dtype, int64_t at, int64_t count, float *to)
{
  const uint16_t *h = (const uint16_t *)from + at;
  if (dtype == ESMM_BF16)
    for (int64_t i = 0; i < count; i += VEC)
      vec_store(to + i, vec_from_bf16(h + i));
  else
    for (int64_t i = 0; i < count; i += VEC)
      vec_store(to + i, vec_from_f16(h + i));
}

#endif
