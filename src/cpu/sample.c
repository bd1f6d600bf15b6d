/*
 * sample.c: what the plan knows of A before it chooses: densities at several strip heights, from a few blocks of 32
 * rows by 64 k's spread over the matrix. Reading them costs a percent or so of a product that is worth planning.
 */
#include "bits.h"
#include "convert.h"
#include "cpu/cpu.h"

#define GROUP 32 /* rows of a sampled block: the tallest strip */

/* About what a look at 64 k's of a row takes, and what is done with a block of them then. */
#define ROW_SECONDS 2.5e-8
#define PLACE_SECONDS 4e-7

/* Bits of one row's nonzeros at k0..k0+63. */
static uint64_t row_word(const esmm_matrix *a, int64_t row, int64_t k0)
{
  unsigned char flags[64] = {0};
  const int64_t count = esmm_min(64, a->cols - k0);
  if (a->order == ESMM_ROW_MAJOR) {
    const size_t start = (size_t)(row * a->ld + k0) * esmm_dtype_bytes(a->dtype);
    esmm_flag_nonzero((const char *)a->data + start, a->dtype, count, flags);
  } else {
    for (int64_t i = 0; i < count; i++)
      flags[i] = esmm_nonzero_at(a->data, a->dtype, esmm_matrix_index(a, row, k0 + i));
  }
  return esmm_gather_bits(flags);
}

/* Share of panels that need k, summed over the set bits of word. */
static double joint_weight(uint64_t word, const float *alive)
{
  double sum = 0.0;
  for (; word; word &= word - 1)
    sum += (double)alive[__builtin_ctzll(word)];
  return sum;
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

/* How many strips are looked at, and in how many places each. */
static void extent(const esmm_matrix *a, int64_t *groups, int64_t *spread)
{
  const int64_t strips = esmm_ceil_div(a->rows, GROUP), words = esmm_ceil_div(a->cols, 64);
  *groups = esmm_min(strips, esmm_max(4, esmm_min(12, strips / 4)));
  *spread = strips == 1 ? esmm_min(words, 64) : esmm_max(esmm_min(words, 2), esmm_min(5, words / 4));
}

double esmm_sample_seconds(const esmm_matrix *a)
{
  int64_t groups, spread;
  extent(a, &groups, &spread);
  const double places = (double)(groups * spread);
  return places * (PLACE_SECONDS + ROW_SECONDS * (double)esmm_min(GROUP, a->rows));
}

void esmm_sample_a(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  const int64_t strips = esmm_ceil_div(a->rows, GROUP), words = esmm_ceil_div(a->cols, 64);
  int64_t groups, spread;
  extent(a, &groups, &spread);
  double set[ESMM_CPU_HEIGHTS] = {0}, joint[ESMM_CPU_HEIGHTS] = {0}, bits[ESMM_CPU_HEIGHTS] = {0};
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row0 = place(g, groups, strips, (uint64_t)g) * GROUP, rows = esmm_min(GROUP, a->rows - row0);
    for (int64_t s = 0; s < spread; s++) {
      const int64_t k0 = 64 * place(s, spread, words, (uint64_t)(100 + g * spread + s));
      const double width = (double)esmm_min(64, a->cols - k0);
      uint64_t level[GROUP] = {0};
      for (int64_t r = 0; r < rows; r++)
        level[r] = row_word(a, row0 + r, k0);
      int64_t height = rows;
      for (int h = 0; h < ESMM_CPU_HEIGHTS; h++) {
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
  for (int h = 0; h < ESMM_CPU_HEIGHTS; h++) {
    sample->strip[h] = bits[h] > 0 ? set[h] / bits[h] : 0.0;
    sample->joint[h] = bits[h] > 0 ? joint[h] / bits[h] : 0.0;
  }
  sample->element = sample->strip[0];
}
