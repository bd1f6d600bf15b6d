/*
 * vec_avx512.h: what gemm.h, rows.h and decode.h need of AVX-512.
 *
 * Tile 8 x 32: 16 accumulators, two loads of B and eight broadcasts of A for 16 multiply-adds. Larger tiles fit in the
 * 32 registers, but 8 rows is also the shortest strip, and the multiply-add units are the limit already.
 */
#ifndef ESMM_VEC_H
#define ESMM_VEC_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef __m512 vec;
typedef __m512d vec64;     /* half a vector in float64, for the activations */
typedef __m512i vec_index; /* N:M: indices of a vector */
#define VEC 16             /* floats in a vector */
#define MR 8               /* most rows of a tile */
#define AVX(name) _mm512_##name
#define AVX_AND(x, y) _mm512_and_si512(x, y)
#define AVX_REPEAT(x) _mm512_broadcast_i32x4(x) /* 16 bytes, as often as they fit */

#define COST_FMA ESMM_CPU_COST_FMA_AVX512
#define COST_TILE ESMM_CPU_COST_TILE_AVX512

#include "avx.h"

static inline vec vec_all(const float *p)
{
  return _mm512_set1_ps(*p);
}
/* The first count (VEC at most) floats; lanes past them are 0, and no other memory is touched. */
static inline vec vec_load_first(const float *p, int64_t count)
{
  return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1u), p);
}
static inline void vec_store_first(float *p, int64_t count, vec x)
{
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1u), x);
}
/* The sum of all lanes. */
static inline float vec_sum(vec x)
{
  return _mm512_reduce_add_ps(x);
}
/* The sums of the lanes of eight vectors: halves meet, then quarters, pairs and neighbours, two vectors in one. */
static inline void vec_sums(const vec x[8], float out[8])
{
  __m512 half[4], quarter[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(half[i], half[i + 2], 0x88),
                               _mm512_shuffle_f32x4(half[i], half[i + 2], 0xdd));
  /* Blocks of four lanes: of x0, x4, x2, x6, and of x1, x5, x3, x7. */
  const __m512 pair =
      _mm512_add_ps(_mm512_shuffle_ps(quarter[0], quarter[1], 0x44), _mm512_shuffle_ps(quarter[0], quarter[1], 0xee));
  const __m512 sums = _mm512_add_ps(pair, _mm512_shuffle_ps(pair, pair, 0xb1));
  const __m512i places = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 6, 4, 10, 8, 2, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(places, sums)));
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

/* To nearest even; NaN stays NaN. */
static inline void vec_to_bf16(uint16_t *p, vec x)
{
  const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i h = _mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x400000));
  const __m512i odds = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0x1f001d, 0x1b0019, 0x170015, 0x130011, 0xf000d,
                                        0xb0009, 0x70005, 0x30001);
  _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(_mm512_permutexvar_epi16(odds, h)));
}
/* The first count (VEC at most) of VEC 16-bit words; words past them are 0, and no other memory is touched. */
static inline void halves_load_first(uint16_t *words, const uint16_t *p, int64_t count)
{
  _mm256_storeu_si256((__m256i *)words, _mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1u), p));
}
static inline void halves_store_first(uint16_t *p, int64_t count, const uint16_t *words)
{
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1u), _mm256_loadu_si256((const __m256i *)words));
}

static inline void vec_to_f16(uint16_t *p, vec x)
{
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vec64 vec64_low(vec x)
{
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
static inline vec64 vec64_high(vec x)
{
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}
static inline vec vec_from_halves(vec64 low, vec64 high)
{
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
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

/* ---- N:M: indices, and the a's that they name ---- */

#define SELECT_MOST 32 /* the longest group that can be selected from: two vectors */
#define SELECT_ROWS 16 /* most rows of a tile */

/* Words of indices in memory. */
static inline void index_store(int32_t *to, vec_index index)
{
  _mm512_storeu_si512(to, index);
}

/* The same, each plus base. */
static inline vec_index index_load(const int32_t *from, int base)
{
  return _mm512_add_epi32(_mm512_loadu_si512(from), _mm512_set1_epi32(base));
}

/* Lane i: a[index i] of one vector, or of two. Whole vectors are loaded: to broadcast a few floats takes longer. */
static inline vec vec_select(bool two, const float *a, vec_index index)
{
  if (two)
    return _mm512_permutex2var_ps(_mm512_loadu_ps(a), index, _mm512_loadu_ps(a + VEC));
  return _mm512_permutexvar_ps(index, _mm512_loadu_ps(a));
}

#endif
