/*
 * avx.h: what vec_avx2.h and vec_avx512.h share but for the vectors' length. Both include it after they have defined a
 * vector and the name of its intrinsics: AVX(add_ps).
 */
#include "cpu/costs.h"

#define COST_PACK ESMM_CPU_COST_PACK_AVX
#define COST_WIDEN ESMM_CPU_COST_WIDEN_AVX
#define COST_WORD ESMM_CPU_COST_WORD_AVX

static inline vec vec_zero(void)
{
  return AVX(setzero_ps)();
}
static inline vec vec_load(const float *p)
{
  return AVX(loadu_ps)(p);
}
static inline void vec_store(float *p, vec x)
{
  AVX(storeu_ps)(p, x);
}
static inline vec vec_add(vec x, vec y)
{
  return AVX(add_ps)(x, y);
}
static inline vec vec_mul(vec x, vec y)
{
  return AVX(mul_ps)(x, y);
}
static inline vec vec_fma(vec x, vec y, vec sum)
{
  return AVX(fmadd_ps)(x, y, sum);
}

/* NaN stays NaN: of two operands, one of which is, these instructions take the second. */
static inline vec vec_at_least(vec x, float least)
{
  return AVX(max_ps)(AVX(set1_ps)(least), x);
}
static inline vec vec_at_most(vec x, float most)
{
  return AVX(min_ps)(AVX(set1_ps)(most), x);
}
static inline vec vec_abs(vec x)
{
  return AVX(andnot_ps)(AVX(set1_ps)(-0.0f), x);
}

static inline vec64 vec64_all(double x)
{
  return AVX(set1_pd)(x);
}
static inline vec64 vec64_fma(vec64 x, vec64 y, vec64 sum)
{
  return AVX(fmadd_pd)(x, y, sum);
}

/* N:M: how VEC indices of some bits each become as many words. */
typedef struct index_plan {
  vec_index bytes, shift, mask;
  bool two_bits; /* a word has them all */
} index_plan;

static inline index_plan index_plan_of(int bits)
{
  unsigned char bytes[4 * VEC];
  uint32_t shift[VEC];
  for (int i = 0; i < VEC; i++) {
    for (int j = 0; j < 4; j++)
      bytes[4 * i + j] = (unsigned char)(i * bits / 8 + j);
    shift[i] = (uint32_t)(bits == 2 ? 2 * i : i * bits % 8);
  }
  index_plan plan = {.mask = AVX(set1_epi32)((1 << bits) - 1), .two_bits = bits == 2};
  memcpy(&plan.bytes, bytes, sizeof plan.bytes);
  memcpy(&plan.shift, shift, sizeof plan.shift);
  return plan;
}

/* The indices that lie from p on, each plus base; up to 16 bytes are read. */
static inline vec_index index_unpack(const index_plan *plan, const unsigned char *p, int base)
{
  vec_index words;
  if (plan->two_bits) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    words = AVX(set1_epi32)(word);
  } else {
    words = AVX(shuffle_epi8)(AVX_REPEAT(_mm_loadu_si128((const __m128i *)p)), plan->bytes);
  }
  const vec_index index = AVX_AND(AVX(srlv_epi32)(words, plan->shift), plan->mask);
  return AVX(add_epi32)(index, AVX(set1_epi32)(base));
}

/* 8 k's of up to 8 rows, turned: out[i] holds the rows at k = i. Rows that are not there repeat the last. */
#define BLOCK 8
typedef __m256 block_column;
static inline void block_store(float *p, block_column x)
{
  _mm256_storeu_ps(p, x);
}

static inline __attribute__((always_inline)) void block_load(const float *src, int64_t ld, int64_t rows,
                                                             block_column out[BLOCK])
{
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++)
    r[i] = _mm256_loadu_ps(src + (i < rows ? i : rows - 1) * ld);
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    out[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}
