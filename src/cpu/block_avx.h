/* block_avx.h: turning blocks of A while packing, for vec_avx2.h and vec_avx512.h. */
#ifndef ESMM_BLOCK_H
#define ESMM_BLOCK_H

#include <immintrin.h>
#include <stdint.h>

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

#endif
