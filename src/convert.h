/*
 * convert.h: fp32 <-> bf16 and fp16, scalar, in plain C: round to nearest even, overflow to Inf, NaN stays NaN.
 *
 * Vector kernels use the machine's instructions instead; tests hold both to the same results.
 */
#ifndef ESMM_CONVERT_H
#define ESMM_CONVERT_H

#include "dtype.h"

#include <string.h>

static inline uint32_t esmm_f32_bits(float x)
{
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static inline float esmm_bits_f32(uint32_t u)
{
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static inline float esmm_from_bf16(uint16_t h)
{
  return esmm_bits_f32((uint32_t)h << 16);
}

static inline uint16_t esmm_to_bf16(float x)
{
  uint32_t u = esmm_f32_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN, whatever the low bits were */
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float esmm_from_f16(uint16_t h)
{
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu;
  if (body >= 0x7c00u) /* Inf, NaN */
    return esmm_bits_f32(sign | 0x7f800000u | (body & 0x3ffu) << 13);
  if (body >= 0x400u) /* normal: rebias the exponent from 15 to 127 */
    return esmm_bits_f32(sign | ((body << 13) + (112u << 23)));
  float magnitude = (float)body * 0x1p-24f; /* subnormal or zero: exact */
  return sign ? -magnitude : magnitude;
}

static inline uint16_t esmm_to_f16(float x)
{
  uint32_t u = esmm_f32_bits(x), sign = (u >> 16) & 0x8000u, body = u & 0x7fffffffu;
  if (body > 0x7f800000u)
    return (uint16_t)(sign | 0x7e00u | (body >> 13 & 0x3ffu));
  if (body >= 0x477ff000u) /* 65520 and up round to Inf */
    return (uint16_t)(sign | 0x7c00u);
  if (body < 0x38800000u) { /* below 2^-14: subnormal; adding 0.5 makes the FPU round at the right bit */
    float shifted = esmm_bits_f32(body) + 0.5f;
    return (uint16_t)(sign | (esmm_f32_bits(shifted) - 0x3f000000u));
  }
  body -= 112u << 23;
  return (uint16_t)(sign | ((body + 0xfffu + ((body >> 13) & 1u)) >> 13));
}

/* An unknown dtype has no elements: it loads as 0, and nothing is stored. Public functions have refused it. */

static inline float esmm_load_element(const void *data, esmm_dtype dtype, int64_t index)
{
  switch (dtype) {
  case ESMM_F32:
    return ((const float *)data)[index];
  case ESMM_BF16:
    return esmm_from_bf16(((const uint16_t *)data)[index]);
  case ESMM_F16:
    return esmm_from_f16(((const uint16_t *)data)[index]);
  }
  return 0.0f;
}

static inline void esmm_store_element(void *data, esmm_dtype dtype, int64_t index, float x)
{
  switch (dtype) {
  case ESMM_F32:
    ((float *)data)[index] = x;
    break;
  case ESMM_BF16:
    ((uint16_t *)data)[index] = esmm_to_bf16(x);
    break;
  case ESMM_F16:
    ((uint16_t *)data)[index] = esmm_to_f16(x);
    break;
  }
}

/* The same for `count` elements from `at` on, `step` apart, and floats that lie `stride` apart. Loops want these: the
   compiler does not take a switch out of them. */

static inline void esmm_load_elements(const void *data, esmm_dtype dtype, int64_t at, int64_t step, int64_t count,
                                      float *to, int64_t stride)
{
  switch (dtype) {
  case ESMM_F32:
    for (int64_t i = 0; i < count; i++)
      to[i * stride] = esmm_load_element(data, ESMM_F32, at + i * step);
    break;
  case ESMM_BF16:
    for (int64_t i = 0; i < count; i++)
      to[i * stride] = esmm_load_element(data, ESMM_BF16, at + i * step);
    break;
  case ESMM_F16:
    for (int64_t i = 0; i < count; i++)
      to[i * stride] = esmm_load_element(data, ESMM_F16, at + i * step);
    break;
  }
}

static inline void esmm_store_elements(void *data, esmm_dtype dtype, int64_t at, int64_t step, int64_t count,
                                       const float *from, int64_t stride)
{
  switch (dtype) {
  case ESMM_F32:
    for (int64_t i = 0; i < count; i++)
      esmm_store_element(data, ESMM_F32, at + i * step, from[i * stride]);
    break;
  case ESMM_BF16:
    for (int64_t i = 0; i < count; i++)
      esmm_store_element(data, ESMM_BF16, at + i * step, from[i * stride]);
    break;
  case ESMM_F16:
    for (int64_t i = 0; i < count; i++)
      esmm_store_element(data, ESMM_F16, at + i * step, from[i * stride]);
    break;
  }
}

/* One line of a copy that converts: from elements `step` apart to elements that lie together. */
static inline void esmm_convert_elements(const void *from, esmm_dtype dtype, int64_t at, int64_t step, int64_t count,
                                         void *to, esmm_dtype to_dtype, int64_t to_at)
{
  enum { PART = 64 };
  float part[PART];
  for (int64_t i = 0; i < count; i += PART) {
    const int64_t n = count - i < PART ? count - i : PART;
    esmm_load_elements(from, dtype, at + i * step, step, n, part, 1);
    esmm_store_elements(to, to_dtype, to_at + i, 1, n, part, 1);
  }
}

static inline int64_t esmm_matrix_index(const esmm_matrix *m, int64_t row, int64_t col)
{
  return m->order == ESMM_ROW_MAJOR ? row * m->ld + col : col * m->ld + row;
}

static inline float esmm_matrix_get(const esmm_matrix *m, int64_t row, int64_t col)
{
  return esmm_load_element(m->data, m->dtype, esmm_matrix_index(m, row, col));
}

static inline void esmm_matrix_set(esmm_matrix *m, int64_t row, int64_t col, float x)
{
  esmm_store_element(m->data, m->dtype, esmm_matrix_index(m, row, col), x);
}

#endif
