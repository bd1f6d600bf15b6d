/*
 * convert.h: fp32 <-> bf16 and fp16, scalar, in plain C: round to nearest even, overflow to Inf, NaN stays NaN.
 *
 * Vector kernels use the machine's instructions instead; tests hold both to the same results.
 */
#ifndef ESMM_CONVERT_H
#define ESMM_CONVERT_H

#include "esmm.h"

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

static inline float esmm_load_element(const void *data, esmm_dtype dtype, int64_t index)
{
  if (dtype == ESMM_F32)
    return ((const float *)data)[index];
  uint16_t h = ((const uint16_t *)data)[index];
  return dtype == ESMM_BF16 ? esmm_from_bf16(h) : esmm_from_f16(h);
}

static inline void esmm_store_element(void *data, esmm_dtype dtype, int64_t index, float x)
{
  if (dtype == ESMM_F32)
    ((float *)data)[index] = x;
  else
    ((uint16_t *)data)[index] = dtype == ESMM_BF16 ? esmm_to_bf16(x) : esmm_to_f16(x);
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
