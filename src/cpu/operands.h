/*
 * operands.h: A and B as fp32, whatever they are stored as. Included after vec_*.h by the kernels' shared headers.
 */
#ifndef ESMM_OPERANDS_H
#define ESMM_OPERANDS_H

#include "bits.h"
#include "cpu/cpu.h"
#include "cpu/epilogue.h"
#include "threads.h"

#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

/* Each part of a thread's scratch starts on a new page, so that threads never share a cache line. */
ALWAYS size_t align_up(size_t bytes)
{
  return (bytes + 4095) / 4096 * 4096;
}

/* Sets a part of a scratch aside, behind the *bytes that are taken. Returns where it begins. */
ALWAYS size_t set_aside(size_t *bytes, int64_t count, size_t element)
{
  const size_t at = *bytes;
  *bytes = align_up(at + (size_t)count * element);
  return at;
}

/* The clock, where seconds are wanted. */
ALWAYS double now_if_timed(const esmm_problem *p)
{
  return p->timed ? esmm_now() : 0.0;
}

/* count (a multiple of VEC) elements from element `at` on, as fp32; the dtype is asked for once */
ALWAYS void widen(const void *from, esmm_dtype dtype, int64_t at, int64_t count, float *to)
{
  switch (dtype) {
  case ESMM_F32:
    memcpy(to, (const float *)from + at, (size_t)count * sizeof *to);
    break;
  case ESMM_BF16:
    for (int64_t i = 0; i < count; i += VEC)
      vec_store(to + i, vec_from_bf16((const uint16_t *)from + at + i));
    break;
  case ESMM_F16:
    for (int64_t i = 0; i < count; i += VEC)
      vec_store(to + i, vec_from_f16((const uint16_t *)from + at + i));
    break;
  }
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
      esmm_load_elements(a->data, a->dtype, (k0 + k) * a->ld + r0, 1, rows, buffer + k, kc);
    return buffer;
  }
  const int64_t lines = a->ld == kc ? 1 : rows, length = a->ld == kc ? rows * kc : kc; /* rows side by side are one */
  for (int64_t r = 0; r < lines; r++) {
    const int64_t at = (r0 + r) * a->ld + k0, whole = length - length % VEC;
    float *to = buffer + r * kc;
    widen(a->data, a->dtype, at, whole, to);
    if (length > whole)
      vec_store_first(to + whole, length - whole, esmm_vec_load_first(a->data, a->dtype, at + whole, length - whole));
  }
  return buffer;
}

#endif
