/*
 * nm_groups.h: A by the groups of N:M weights, for the kernels that select from them: in fp32 (nm.h) and as bf16
 * (k_nm_bf16_avx512bf16.c). A tile has the groups that are not zero in all of its rows. Included after blocks.h, where
 * an element of packed A is a group_word, and SELECT_ROWS are the most rows of a tile.
 */

/* The binary logarithm of the rows of the next tile, of `left`: 15 rows are 8 + 4 + 2 + 1. */
ALWAYS int next_rows(int64_t left)
{
  int level = 0;
  while (2 << level <= esmm_min(left, SELECT_ROWS))
    level++;
  return level;
}

/* Packs the groups of m k's of a tile that have a nonzero, and lists them: `set` of them in `span` words of a row. bits
   has a word to spare. */
static inline int64_t pack_groups(const group_word *a, int64_t ld, int64_t rows, const uint64_t *bits, int64_t kc,
                                  int64_t m, int64_t set, int64_t span, group_word *to, uint32_t *list)
{
  int64_t count = 0, base = 0; /* where in its set the next group goes */
  for (int64_t k = 0, group = 0; k < kc; k += m, group++) {
    const int64_t length = esmm_min(m, kc - k);
    if (!any_bit(bits, k, length))
      continue;
    list[count++] = (uint32_t)group;
    for (int64_t r = 0; r < rows; r++) {
      const group_word *from = a + r * ld + k;
      group_word *at = to + r * span + base;
      if (length == 4)
        memcpy(at, from, 4 * sizeof *at);
      else
        for (int64_t i = 0; i < length; i++)
          at[i] = from[i];
    }
    base += m;
    if (base >= set * m) {
      base = 0;
      to += rows * span;
    }
  }
  return count;
}

/* The tiles of a block of rows at one stretch. */
typedef struct group_stretch {
  int64_t row0, rows, k0, kc;
  int64_t *counts;
  uint32_t *lists;
  group_word *tiles;
} group_stretch;

/* Values of a column in the groups of a list: all of a group's, but for a short one at the end. */
ALWAYS int64_t listed_slots(int64_t each, int64_t all, const uint32_t *list, int64_t count)
{
  return count == 0 ? 0 : (count - 1) * each + esmm_min(each, all - list[count - 1] * each);
}
