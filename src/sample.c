/*
 * sample.c: what the plan knows of A before it chooses: densities at several strip heights, from a few blocks of 32
 * rows by 64 k's spread over the matrix. Reading them costs a percent or so of a product that is worth planning.
 */
#include "convert.h"
#include "kernel.h"

#include <string.h>

#define GROUP 32 /* rows of a sampled block: the tallest strip */

/* 64 flags of 0 or 1, one a byte, to a word: the multiplication gathers eight bytes' low bits into the top byte. */
static uint64_t gather_bits(const unsigned char *flags)
{
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) {
    uint64_t eight;
    memcpy(&eight, flags + 8 * i, sizeof eight);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    eight = __builtin_bswap64(eight);
#endif
    word |= (eight * 0x0102040810204080u >> 56) << (8 * i);
  }
  return word;
}

/* Bits of one row's nonzeros at k0..k0+63. */
static uint64_t row_word(const esmm_matrix *a, int64_t row, int64_t k0)
{
  unsigned char flags[64] = {0};
  const int64_t count = esmm_min(64, a->cols - k0);
  if (a->dtype == ESMM_F32 && a->order == ESMM_ROW_MAJOR) {
    const float *x = (const float *)a->data + row * a->ld + k0;
    for (int64_t i = 0; i < count; i++)
      flags[i] = x[i] != 0.0f;
  } else {
    for (int64_t i = 0; i < count; i++)
      flags[i] = esmm_matrix_get(a, row, k0 + i) != 0.0f;
  }
  return gather_bits(flags);
}

/* Share of panels that need k, summed over the set bits of word. */
static double joint_weight(uint64_t word, const float *alive)
{
  double sum = 0.0;
  for (; word; word &= word - 1)
    sum += (double)alive[__builtin_ctzll(word)];
  return sum;
}

void esmm_sample_a(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  const int64_t strips = esmm_ceil_div(a->rows, GROUP), words = esmm_ceil_div(a->cols, 64);
  const int64_t groups = strips == 1 ? 1 : esmm_max(2, esmm_min(8, strips / 8));
  const int64_t spread = strips == 1 ? esmm_min(words, 64) : esmm_max(esmm_min(words, 2), esmm_min(8, words / 4));
  double set[ESMM_SAMPLE_HEIGHTS] = {0}, joint[ESMM_SAMPLE_HEIGHTS] = {0}, bits[ESMM_SAMPLE_HEIGHTS] = {0};
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = (2 * g + 1) * strips / (2 * groups) * GROUP, rows = esmm_min(GROUP, a->rows - row0);
    for (int64_t s = 0; s < spread; s++) {
      /* Each group looks at other k's: g / groups shifts it within the stretch that s stands for. */
      const int64_t word = (s * groups + g) * words / (spread * groups), k0 = 64 * word;
      const double width = (double)esmm_min(64, a->cols - k0);
      uint64_t level[GROUP] = {0};
      for (int64_t r = 0; r < rows; r++)
        level[r] = row_word(a, row0 + r, k0);
      int64_t height = rows;
      for (int h = 0; h < ESMM_SAMPLE_HEIGHTS; h++) {
        for (int64_t r = 0; r < height; r++) {
          set[h] += (double)__builtin_popcountll(level[r]);
          joint[h] += w->full ? (double)__builtin_popcountll(level[r]) : joint_weight(level[r], w->alive + k0);
          bits[h] += width;
        }
        const int64_t next = esmm_ceil_div(height, 2);
        for (int64_t r = 0; r < next; r++)
          level[r] = level[2 * r] | (2 * r + 1 < height ? level[2 * r + 1] : 0);
        height = next;
      }
    }
  }
  for (int h = 0; h < ESMM_SAMPLE_HEIGHTS; h++) {
    sample->strip[h] = bits[h] > 0 ? set[h] / bits[h] : 0.0;
    sample->joint[h] = bits[h] > 0 ? joint[h] / bits[h] : 0.0;
  }
  sample->element = sample->strip[0];
}
