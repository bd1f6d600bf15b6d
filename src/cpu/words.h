/*
 * words.h: bf16 as 16-bit words, for the kernels that multiply it as it is (pairs.h, tiles.h, meet.h): A's rows, the
 * bitmaps of its strips, and words turned; B's panels. Included after vec_avx512.h.
 */
#ifndef ESMM_WORDS_H
#define ESMM_WORDS_H

#include "blocks.h"

#define HALF_BYTES ((int64_t)(ESMM_HALF_COLS * sizeof(uint16_t))) /* of a k in half a panel */

/* Rows of A as bf16 words: where they lie, or copied to a buffer if A is column-major. */
static inline const uint16_t *words_of_a(const esmm_matrix *a, int64_t r0, int64_t rows, int64_t k0, int64_t kc,
                                         uint16_t *buffer, int64_t *ld)
{
  if (a->order == ESMM_ROW_MAJOR) {
    *ld = a->ld;
    return (const uint16_t *)a->data + r0 * a->ld + k0;
  }
  *ld = kc;
  for (int64_t k = 0; k < kc; k++)
    esmm_copy_elements(buffer + k, kc, (const uint16_t *)a->data + (k0 + k) * a->ld + r0, 1, rows, a->dtype);
  return buffer;
}

ALWAYS __m512i load_words(const uint16_t *from, int64_t count) /* 32 at most; zeros past them */
{
  return count >= 32 ? _mm512_loadu_si512(from)
                     : _mm512_maskz_loadu_epi16((__mmask32)(((uint64_t)1 << count) - 1), from);
}

/* bits [ceil(kc / 64)] of a strip, whose words from row0 and k0 on are a */
static inline void find_bits(const esmm_problem *p, const uint16_t *a, int64_t ld, int64_t row0, int64_t rows,
                             int64_t k0, int64_t kc, uint64_t *bits)
{
  if (p->pattern) {
    bits_from_pattern(p->pattern, row0, rows, k0, kc, bits);
    return;
  }
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  memset(bits, 0, (size_t)esmm_ceil_div(kc, 64) * sizeof *bits);
  for (int64_t k = 0; k < kc; k += 32) {
    __m512i ors = load_words(a + k, kc - k);
    for (int64_t r = 1; r < rows; r++)
      ors = _mm512_or_si512(ors, load_words(a + r * ld + k, kc - k));
    bits[k / 64] |= (uint64_t)_mm512_test_epi16_mask(ors, magnitude) << (k % 64);
  }
}

/* The halves of panel q of B at k0: [kept][16]. */
static inline void panel_halves(const esmm_weights *w, int64_t q, int64_t k0, const char *half[2])
{
  const uint32_t *before = w->before + q * (w->words + 1);
  half[0] = (const char *)w->panel_data + (int64_t)w->panel_at[q] * (int64_t)sizeof(uint16_t) +
            (int64_t)before[k0 / 64] * HALF_BYTES;
  half[1] = half[0] + (int64_t)before[w->words] * HALF_BYTES;
}

/* 16 rows of 32 k's, turned: x[i] becomes the rows at k = 2 i and 2 i + 1. */
ALWAYS void turn_pairs(__m512i x[16])
{
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) { /* x[4 i + j]: rows 4 i .. 4 i + 3 at pairs j, j + 4, j + 8, j + 12 */
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    y[j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
    y[4 + j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    y[8 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
    x[4 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0x88);
    x[12 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0xdd);
  }
}

#endif
