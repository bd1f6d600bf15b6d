/*
 * vec_avx512.h: what gemm.h, rows.h and decode.h need of AVX-512.
 *
 * Tile 8 x 32: 16 accumulators, two loads of B and eight broadcasts of A for 16 multiply-adds. Larger tiles fit in the
 * 32 registers, but 8 rows is also the shortest strip, and the multiply-add units are the limit already.
 */
#ifndef ESMM_VEC_H
#define ESMM_VEC_H

#include "block_avx.h"

#include <immintrin.h>
#include <stdint.h>

typedef __m512 vec;
#define VEC 16 /* floats in a vector */
#define MR 8   /* most rows of a tile */

static inline vec vec_zero(void)
{
  return _mm512_setzero_ps();
}
static inline vec vec_load(const float *p)
{
  return _mm512_loadu_ps(p);
}
static inline vec vec_all(const float *p)
{
  return _mm512_set1_ps(*p);
}
static inline void vec_store(float *p, vec x)
{
  _mm512_storeu_ps(p, x);
}
static inline vec vec_add(vec x, vec y)
{
  return _mm512_add_ps(x, y);
}
static inline vec vec_mul(vec x, vec y)
{
  return _mm512_mul_ps(x, y);
}
static inline vec vec_fma(vec x, vec y, vec sum)
{
  return _mm512_fmadd_ps(x, y, sum);
}
/* Keeps the compiler from folding the load of B into every multiply-add that uses it. */
#define VEC_KEEP(x) __asm__("" : "+v"(x))

static inline vec vec_from_bf16(const uint16_t *p)
{
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline vec vec_from_f16(const uint16_t *p)
{
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* Bit i: word i of 64 is not zero, its top bit apart (a float that is not +0 or -0). */
static inline uint64_t nonzero_bits(const uint32_t *words)
{
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  uint64_t bits = 0;
  for (int i = 0; i < 4; i++)
    bits |= (uint64_t)_mm512_test_epi32_mask(_mm512_loadu_si512(words + 16 * i), magnitude) << (16 * i);
  return bits;
}

/* Appends base + step * i for every set bit i of bits; up to 16 entries past the end may be overwritten. */
static inline uint32_t *append_offsets(uint32_t *list, uint64_t bits, uint32_t base, uint32_t step, int at_least)
{
  const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i steps = _mm512_mullo_epi32(iota, _mm512_set1_epi32((int)step));
  __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)base), steps);
  const __m512i hop = _mm512_set1_epi32((int)(16 * step));
  for (int i = 0; i < at_least || bits; i++) {
    const __mmask16 mask = (__mmask16)bits;
    /* Compressing in a register and storing it whole: compressing stores are slow on some CPUs. */
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi32(mask, at));
    list += __builtin_popcount(mask);
    at = _mm512_add_epi32(at, hop);
    bits >>= 16;
  }
  return list;
}
#define APPEND_GROUP 16 /* bits that append_offsets takes at a time */

/*
 * The nonzeros of x[0..count): values, and base + step * i as offsets. Returns how many; up to 16 entries past the end
 * of either list may be overwritten.
 */
static inline int64_t list_nonzeros(const float *x, int64_t count, uint32_t base, uint32_t step, float *values,
                                    uint32_t *offsets)
{
  const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)base), _mm512_mullo_epi32(iota, _mm512_set1_epi32((int)step)));
  const __m512i hop = _mm512_set1_epi32((int)(16 * step)), magnitude = _mm512_set1_epi32(0x7fffffff);
  int64_t n = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 there = count - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (count - i)) - 1u);
    const __m512 y = _mm512_maskz_loadu_ps(there, x + i);
    const __mmask16 mask = _mm512_test_epi32_mask(_mm512_castps_si512(y), magnitude);
    _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(mask, y));
    _mm512_storeu_si512(offsets + n, _mm512_maskz_compress_epi32(mask, at));
    n += __builtin_popcount(mask);
    at = _mm512_add_epi32(at, hop);
  }
  return n;
}

static inline uint64_t extract_bits(uint64_t bits, uint64_t mask)
{
  return _pext_u64(bits, mask);
}

#endif
