/*
 * vec_avx2.h: what gemm.h, rows.h and decode.h need of AVX2 with FMA.
 *
 * Tile 6 x 16: 12 accumulators, two loads of B and six broadcasts of A for 12 multiply-adds. Two units with a latency
 * of four cycles need at least eight independent sums; 4 x 16 has just these and stays at 88 % of the peak.
 */
#ifndef ESMM_VEC_H
#define ESMM_VEC_H

#include "block_avx.h"

#include <immintrin.h>
#include <stdint.h>

typedef __m256 vec;
#define VEC 8 /* floats in a vector */
#define MR 6  /* most rows of a tile */

static inline vec vec_zero(void)
{
  return _mm256_setzero_ps();
}
static inline vec vec_load(const float *p)
{
  return _mm256_loadu_ps(p);
}
static inline vec vec_all(const float *p)
{
  return _mm256_broadcast_ss(p);
}
static inline void vec_store(float *p, vec x)
{
  _mm256_storeu_ps(p, x);
}
static inline vec vec_add(vec x, vec y)
{
  return _mm256_add_ps(x, y);
}
static inline vec vec_mul(vec x, vec y)
{
  return _mm256_mul_ps(x, y);
}
static inline vec vec_fma(vec x, vec y, vec sum)
{
  return _mm256_fmadd_ps(x, y, sum);
}
/* Keeps the compiler from folding the load of B into every multiply-add that uses it. */
#define VEC_KEEP(x) __asm__("" : "+x"(x))

static inline vec vec_from_bf16(const uint16_t *p)
{
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

static inline vec vec_from_f16(const uint16_t *p)
{
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* Bit i: word i of 64 is not zero, its top bit apart (a float that is not +0 or -0). */
static inline uint64_t nonzero_bits(const uint32_t *words)
{
  uint64_t bits = 0;
  for (int i = 0; i < 8; i++) {
    const __m256i x = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(words + 8 * i)), 1);
    const __m256i zero = _mm256_cmpeq_epi32(x, _mm256_setzero_si256());
    bits |= (uint64_t)(0xff & ~_mm256_movemask_ps(_mm256_castsi256_ps(zero))) << (8 * i);
  }
  return bits;
}

/* Appends base + step * i for every set bit i of bits; up to 4 entries past the end may be overwritten. */
static inline uint32_t *append_offsets(uint32_t *list, uint64_t bits, uint32_t base, uint32_t step, int at_least)
{
  (void)at_least;
  const int count = __builtin_popcountll(bits);
  for (int i = 0; i < count; i += 4)
    for (int j = 0; j < 4; j++) {
      list[i + j] = base + step * (uint32_t)_tzcnt_u64(bits);
      bits = _blsr_u64(bits);
    }
  return list + count;
}
#define APPEND_GROUP 64

/*
 * The nonzeros of x[0..count): values, and base + step * i as offsets. Returns how many; one entry past the end of
 * either list may be overwritten.
 */
static inline int64_t list_nonzeros(const float *x, int64_t count, uint32_t base, uint32_t step, float *values,
                                    uint32_t *offsets)
{
  const __m256 zero = _mm256_setzero_ps();
  int64_t n = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), zero, _CMP_NEQ_UQ));
    for (; mask; mask &= mask - 1, n++) {
      const unsigned bit = (unsigned)__builtin_ctz(mask);
      values[n] = x[i + bit];
      offsets[n] = base + step * ((uint32_t)i + bit);
    }
  }
  for (; i < count; i++) {
    values[n] = x[i];
    offsets[n] = base + step * (uint32_t)i;
    n += x[i] != 0.0f;
  }
  return n;
}

static inline uint64_t extract_bits(uint64_t bits, uint64_t mask)
{
  return _pext_u64(bits, mask);
}

#endif
