/*
 * sample.h: the look at A of sample.c, for one instruction set. Included after vec_*.h.
 *
 * A bitmap word of a row is a few instructions; which share of B's panels needs its k's is counted by bit planes: the
 * share of k, in 255ths, has a bit in each of eight words, and popcounts add them up.
 */
#ifndef ESMM_CPU_SAMPLE_H
#define ESMM_CPU_SAMPLE_H

#include "bits.h"
#include "convert.h"
#include "cpu/cpu.h"

#define GROUP ESMM_SAMPLE_ROWS
#define PLANES 8

/* Bits of one row's nonzeros at k0..k0+63. */
static uint64_t row_word(const esmm_matrix *a, int64_t row, int64_t k0)
{
  const int64_t count = esmm_min(64, a->cols - k0), step = a->order == ESMM_ROW_MAJOR ? 1 : a->ld;
  const int64_t at = esmm_matrix_index(a, row, k0);
  uint32_t words[64];
  if (a->dtype == ESMM_F32 && step == 1 && count == 64) {
    memcpy(words, (const float *)a->data + at, sizeof words);
    return nonzero_bits(words);
  }
  const uint32_t magnitude = esmm_dtype_magnitude(a->dtype);
  const esmm_word16 *halves = (const esmm_word16 *)a->data + at;
  if (a->dtype != ESMM_F32 && step == 1 && count == 64) {
    for (int i = 0; i < 64; i++)
      words[i] = halves[i] & magnitude;
    return nonzero_bits(words);
  }
  memset(words, 0, sizeof words);
  for (int64_t i = 0; i < count; i++)
    words[i] = esmm_bits_at(a->data, a->dtype, at + i * step) & magnitude;
  return nonzero_bits(words);
}

/* The shares of panels that need each of count k's, as bit planes. */
static void weigh(const float *alive, int64_t count, uint64_t planes[PLANES])
{
  uint32_t shares[64] = {0}, words[64];
  for (int64_t i = 0; i < count; i++)
    shares[i] = (uint32_t)(int32_t)(alive[i] * 255.0f + 0.5f);
  for (int p = 0; p < PLANES; p++) {
    for (int i = 0; i < 64; i++)
      words[i] = shares[i] & 1u << p;
    planes[p] = nonzero_bits(words);
  }
}

/* Share of panels that need k, summed over the set bits of word. */
static double joint_weight(uint64_t word, const uint64_t planes[PLANES])
{
  int sum = 0;
  for (int p = 0; p < PLANES; p++)
    sum += __builtin_popcountll(word & planes[p]) << p;
  return (double)sum / 255.0;
}

/*
 * Where in its stretch, part i of `parts` of `total`, a sample lies: anywhere, but always the same. A regular grid
 * would be fooled by A's that repeat, such as sequences padded to a power of two.
 */
static int64_t place(int64_t i, int64_t parts, int64_t total, uint64_t salt)
{
  const int64_t from = i * total / parts, to = (i + 1) * total / parts;
  const uint64_t hash = (salt + 1) * 0x9e3779b97f4a7c15u;
  return from + (int64_t)((hash >> 32) % (uint64_t)esmm_max(1, to - from));
}

static void sample_a(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  const int64_t strips = esmm_ceil_div(a->rows, GROUP), words = esmm_ceil_div(a->cols, 64);
  int64_t groups, spread;
  esmm_sample_extent(a, &groups, &spread);
  double set[ESMM_CPU_HEIGHTS] = {0}, joint[ESMM_CPU_HEIGHTS] = {0}, bits[ESMM_CPU_HEIGHTS] = {0};
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = place(g, groups, strips, (uint64_t)g) * GROUP, rows = esmm_min(GROUP, a->rows - row0);
    for (int64_t s = 0; s < spread; s++) {
      const int64_t k0 = 64 * place(s, spread, words, (uint64_t)(100 + g * spread + s));
      const double width = (double)esmm_min(64, a->cols - k0);
      uint64_t level[GROUP] = {0}, planes[PLANES];
      if (!w->full)
        weigh(w->alive + k0, esmm_min(64, a->cols - k0), planes);
      for (int64_t r = 0; r < rows; r++)
        level[r] = row_word(a, row0 + r, k0);
      int64_t height = rows;
      for (int h = 0; h < ESMM_CPU_HEIGHTS; h++) {
        for (int64_t r = 0; r < height; r++) {
          set[h] += (double)__builtin_popcountll(level[r]);
          joint[h] += w->full ? (double)__builtin_popcountll(level[r]) : joint_weight(level[r], planes);
          bits[h] += width;
        }
        const int64_t next = esmm_ceil_div(height, 2);
        for (int64_t r = 0; r < next; r++)
          level[r] = level[2 * r] | (2 * r + 1 < height ? level[2 * r + 1] : 0);
        height = next;
      }
    }
  }
  for (int h = 0; h < ESMM_CPU_HEIGHTS; h++) {
    sample->strip[h] = bits[h] > 0 ? set[h] / bits[h] : 0.0;
    sample->joint[h] = bits[h] > 0 ? joint[h] / bits[h] : 0.0;
  }
  sample->element = sample->strip[0];
}

#endif
