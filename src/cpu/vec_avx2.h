/*
 * vec_avx2.h: what gemm.h, rows.h and decode.h need of AVX2 with FMA.
 *
 * Tile 6 x 16: 12 accumulators, two loads of B and six broadcasts of A for 12 multiply-adds. Two units with a latency
 * of four cycles need at least eight independent sums; 4 x 16 has just these and stays at 88 % of the peak.
 */
#ifndef ESMM_VEC_H
#define ESMM_VEC_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef __m256 vec;
typedef __m256d vec64;     /* half a vector in float64, for the activations */
typedef __m256i vec_index; /* N:M: indices of a vector */
#define VEC 8              /* floats in a vector */
#define MR 6               /* most rows of a tile */
#define AVX(name) _mm256_##name
#define AVX_AND(x, y) _mm256_and_si256(x, y)
#define AVX_REPEAT(x) _mm256_broadcastsi128_si256(x) /* 16 bytes, as often as they fit */

#define COST_FMA ESMM_CPU_COST_FMA_AVX2
#define COST_TILE ESMM_CPU_COST_TILE

#include "avx.h"

static inline vec vec_all(const float *p)
{
  return _mm256_broadcast_ss(p);
}
/* The first count (VEC at most) floats; lanes past them are 0, and no other memory is touched. */
static inline __m256i vec_first_mask(int64_t count)
{
  const __m256i iota = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), iota);
}
static inline vec vec_load_first(const float *p, int64_t count)
{
  return _mm256_maskload_ps(p, vec_first_mask(count));
}
static inline void vec_store_first(float *p, int64_t count, vec x)
{
  _mm256_maskstore_ps(p, vec_first_mask(count), x);
}
/* The sum of all lanes. */
static inline float vec_sum(vec x)
{
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
/* The sums of the lanes of eight vectors. */
static inline void vec_sums(const vec x[8], float out[8])
{
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  _mm256_storeu_ps(out,
                   _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
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

/* To nearest even; NaN stays NaN. */
static inline void vec_to_bf16(uint16_t *p, vec x)
{
  const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256i h = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, _mm256_castps_si256(nan)), 16);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(both));
}

static inline void vec_to_f16(uint16_t *p, vec x)
{
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* The first count (VEC at most) of VEC 16-bit words; words past them are 0, and no other memory is touched. */
static inline void halves_load_first(uint16_t *words, const uint16_t *p, int64_t count)
{
  for (int64_t i = 0; i < VEC; i++)
    words[i] = i < count ? p[i] : 0;
}
static inline void halves_store_first(uint16_t *p, int64_t count, const uint16_t *words)
{
  for (int64_t i = 0; i < count; i++)
    p[i] = words[i];
}

static inline vec64 vec64_low(vec x)
{
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
static inline vec64 vec64_high(vec x)
{
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}
static inline vec vec_from_halves(vec64 low, vec64 high)
{
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
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

/* ---- N:M: indices, and the a's that they name ---- */

#define SELECT_MOST 16 /* the longest group that can be selected from: two vectors */
#define SELECT_ROWS 8  /* most rows of a tile */

/* Words of indices in memory. */
static inline void index_store(int32_t *to, vec_index index)
{
  _mm256_storeu_si256((__m256i *)(void *)to, index);
}

/* The same, each plus base. */
static inline vec_index index_load(const int32_t *from, int base)
{
  return _mm256_add_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from), _mm256_set1_epi32(base));
}

/* Lane i: a[index i] of one vector, or of two. Whole vectors are loaded: to broadcast a few floats takes longer. */
static inline vec vec_select(bool two, const float *a, vec_index index)
{
  const vec low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(a), index);
  if (!two)
    return low;
  const vec high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(a + VEC), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

#endif
