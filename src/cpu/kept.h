/*
 * kept.h: which k's a panel of B keeps, and the blocks or lists they come from. panels.h and pairs.h share it.
 * Included after vec_*.h.
 */
#ifndef ESMM_KEPT_H
#define ESMM_KEPT_H

#include "operands.h"

typedef struct panel {
  const float *first, *second; /* columns 0..15 and 16..31 of the first k that is kept */
  int64_t step;                /* floats from one kept k to the next */
  int64_t kept;
  const uint64_t *bits;   /* [words]: the k's that are kept */
  const uint32_t *before; /* [words + 1]: how many before word w, counted from before[0] on */
  const uint32_t *live;   /* which words have a bit, `lives` of them; NULL: take all */
  int64_t lives;
} panel;

/* Where a thread makes panels of a stretch of kc k's. */
typedef struct panel_room {
  bool in_place;           /* blocks are read where they lie: their rows need not follow each other */
  float *values;           /* [2][kc][16] */
  uint64_t *bits;          /* [kc / 64] */
  uint32_t *before, *live; /* [kc / 64 + 1] each */
} panel_room;

ALWAYS void set_range(uint64_t *bits, int64_t from, int64_t to)
{
  for (int64_t at = from; at < to; at = (at / 64 + 1) * 64) {
    const int64_t count = esmm_min(to, (at / 64 + 1) * 64) - at;
    bits[at / 64] |= (count == 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1) << (at % 64);
  }
}

/* before, live and kept from the bits of a panel that is made in room. */
static inline void count_bits(const panel_room *room, int64_t kc, panel *b)
{
  const int64_t words = esmm_ceil_div(kc, 64);
  uint32_t kept = 0;
  b->lives = 0;
  for (int64_t i = 0; i < words; i++) {
    room->before[i] = kept;
    room->live[b->lives] = (uint32_t)i;
    b->lives += room->bits[i] != 0;
    kept += (uint32_t)__builtin_popcountll(room->bits[i]);
  }
  room->before[words] = kept;
  b->bits = room->bits;
  b->before = room->before;
  b->live = room->live;
  b->kept = kept;
}

/* Block i of `form` clipped to the stretch: k's from..to, counted from k0; false where it lies outside. */
ALWAYS bool clip_block(const esmm_bsr_form *form, int64_t i, int64_t k0, int64_t kc, int64_t *from, int64_t *to)
{
  const int64_t k = (int64_t)form->at[i] * form->block_rows - k0;
  *from = esmm_max(0, k);
  *to = esmm_min(kc, k + form->block_rows);
  return *from < *to;
}

/* Blocks first..end-1 of block column s are those that touch the stretch. */
static inline void blocks_of_stretch(const esmm_bsr_form *form, int64_t s, int64_t k0, int64_t kc, int64_t *first,
                                     int64_t *end)
{
  int64_t low = form->start[s], high = form->start[s + 1];
  while (low < high && (form->at[low] + (int64_t)1) * form->block_rows <= k0)
    low++;
  *first = low;
  while (low < high && (int64_t)form->at[low] * form->block_rows < k0 + kc)
    low++;
  *end = low;
}

/*
 * The k's in a stretch of the panel of columns from j0 on, which lies in one block column: blocks lie one after
 * another, so rows of the panel are block_cols elements apart. Fills in bits, and b but for its values: returns the
 * place of the first among the form's values.
 */
static inline int64_t find_blocks(const esmm_bsr_form *form, int64_t j0, int64_t k0, int64_t kc, const panel_room *room,
                                  panel *b)
{
  const int64_t size = (int64_t)form->block_rows * form->block_cols;
  int64_t first, end, from = 0, to;
  blocks_of_stretch(form, j0 / form->block_cols, k0, kc, &first, &end);
  memset(room->bits, 0, (size_t)esmm_ceil_div(kc, 64) * sizeof *room->bits);
  for (int64_t i = end - 1; i >= first; i--) /* ends with the first block's `from` */
    if (clip_block(form, i, k0, kc, &from, &to))
      set_range(room->bits, from, to);
  count_bits(room, kc, b);
  if (b->kept == 0)
    return 0;
  const int64_t skipped = k0 + from - (int64_t)form->at[first] * form->block_rows;
  return first * size + skipped * form->block_cols + j0 % form->block_cols;
}

/* The first slot whose k may be k0 or more, and the one past the last that may be below k1. */
ALWAYS void slots_of_stretch(const esmm_nm_form *form, int64_t k0, int64_t k1, int64_t *first, int64_t *end)
{
  *first = k0 / form->group * form->keep;
  *end = esmm_min(form->slots, esmm_ceil_div(k1, form->group) * form->keep);
}

/* Where slots of a group stand, from slot to slot without a division. */
typedef struct slot_walk {
  int64_t base; /* the group's first k, less k0 */
  int in_group;
} slot_walk;

ALWAYS slot_walk walk_from(const esmm_nm_form *form, int64_t slot, int64_t k0) /* a group's first slot */
{
  return (slot_walk){.base = slot / form->keep * form->group - k0};
}

ALWAYS void walk_on(const esmm_nm_form *form, slot_walk *at)
{
  if (++at->in_group == form->keep) {
    at->in_group = 0;
    at->base += form->group;
  }
}

/*
 * The same of N:M weights, of columns from j0 on that share a list: the slot of the first k. Slots have ascending k's,
 * so those of the stretch follow each other.
 */
static inline int64_t find_listed(const esmm_nm_form *form, int64_t j0, int64_t k0, int64_t kc, const panel_room *room,
                                  panel *b)
{
  int64_t first, end;
  slots_of_stretch(form, k0, k0 + kc, &first, &end);
  memset(room->bits, 0, (size_t)esmm_ceil_div(kc, 64) * sizeof *room->bits);
  const unsigned char *list = form->index + (size_t)(j0 / form->group_cols) * form->list_bytes;
  int64_t start = end;
  slot_walk at = walk_from(form, first, k0);
  for (int64_t slot = first; slot < end; slot++, walk_on(form, &at)) {
    const int64_t k = at.base + (int64_t)esmm_nm_field(list, slot, form->bits);
    if (k >= 0 && k < kc) {
      room->bits[k / 64] |= (uint64_t)1 << (k % 64);
      start = esmm_min(start, slot);
    }
  }
  count_bits(room, kc, b);
  return start;
}

ALWAYS bool shares_lists(const esmm_weights *w)
{
  return w->nm.group_cols > 1 && (w->nm.group_cols >= w->n || w->nm.group_cols % ESMM_HALF_COLS == 0);
}

/* Share of a form's blocks that are there. */
static inline double bsr_density(const esmm_weights *w)
{
  return (double)w->bsr.blocks / ((double)w->bsr.strips * (double)w->bsr.levels);
}

#endif
