/*
 * panels.h: B as panels of 32 or 16 columns, whatever form it was prepared in; gemm.h multiplies them. Included after
 * vec_*.h.
 *
 * A panel is a set of k's and, for each of them, its columns as fp32. Forms that lie so in memory already are read in
 * place: dense panels, blocks whose width is a multiple of 16, N:M lists that 16 columns or more share. The others, and
 * 16-bit ones, are copied to a buffer once for a block of rows of A.
 */
#ifndef ESMM_PANELS_H
#define ESMM_PANELS_H

#include "kept.h"

typedef enum source {
  FROM_PANELS, /* dense, with the k's that are zero in a panel left out (or none) */
  FROM_ROWS,   /* dense, from B's rows, all k's */
  FROM_BLOCKS, /* BSR, a panel lies in one block column */
  FROM_UNION,  /* BSR, a panel has k's that any of its block columns has */
  FROM_LISTS,  /* N:M whose columns share their k's */
  FROM_WIDENED /* BSR or N:M with all k's, zeros filled in */
} source;

/* Where a product of w, skipping B's zeros or not, takes its panels from. */
static source source_of(const esmm_weights *w, bool skip)
{
  if (w->format == ESMM_FORMAT_BSR)
    return !skip ? FROM_WIDENED : w->bsr.block_cols % ESMM_HALF_COLS == 0 ? FROM_BLOCKS : FROM_UNION;
  if (w->format == ESMM_FORMAT_NM)
    return skip && shares_lists(w) ? FROM_LISTS : FROM_WIDENED;
  return skip || (w->panel_data && w->full) ? FROM_PANELS : FROM_ROWS;
}

/* Columns of its panels: 16 where 32 would meet two blocks or lists. */
static int64_t panel_width(const esmm_weights *w, source from)
{
  const bool narrow = (from == FROM_BLOCKS && w->bsr.block_cols % ESMM_PANEL != 0) ||
                      (from == FROM_LISTS && w->nm.group_cols < w->n && w->nm.group_cols % ESMM_PANEL != 0);
  return narrow ? ESMM_HALF_COLS : ESMM_PANEL;
}

/* Every k of every panel is there. */
static bool source_full(const esmm_weights *w, source from)
{
  return from == FROM_ROWS || from == FROM_WIDENED || (from == FROM_PANELS && w->full);
}

/* ------------------------------------------------------------------------------------------------ dense */

/* Panel q at the stretch [k0, k0+kc): fp32 halves, in place or through buffer [2][kc][16]. */
static panel panel_of_b(const esmm_weights *w, int64_t q, int64_t k0, int64_t kc, float *buffer)
{
  const int64_t word0 = k0 / 64, words = esmm_ceil_div(kc, 64);
  panel b = {.step = ESMM_HALF_COLS,
             .bits = w->bits + q * w->words + word0,
             .before = w->before + q * (w->words + 1) + word0,
             .lives = words};
  b.kept = (int64_t)b.before[words] - b.before[0];
  const int64_t all = w->before[q * (w->words + 1) + w->words];
  const int64_t first = (int64_t)w->panel_at[q] + (int64_t)b.before[0] * ESMM_HALF_COLS,
                second = first + all * ESMM_HALF_COLS;
  if (w->dtype == ESMM_F32) {
    b.first = (const float *)w->panel_data + first;
    b.second = (const float *)w->panel_data + second;
    return b;
  }
  widen(w->panel_data, w->dtype, first, b.kept * ESMM_HALF_COLS, buffer);
  widen(w->panel_data, w->dtype, second, b.kept * ESMM_HALF_COLS, buffer + kc * ESMM_HALF_COLS);
  b.first = buffer;
  b.second = buffer + kc * ESMM_HALF_COLS;
  return b;
}

/* 16 columns of a row */
ALWAYS void copy_half(const void *from, esmm_dtype dtype, int64_t at, float *to)
{
  widen(from, dtype, at, ESMM_HALF_COLS, to);
}

/* Elements at + first .. at + end - 1 to the same places of `to` */
ALWAYS void copy_part(const void *from, esmm_dtype dtype, int64_t at, int64_t first, int64_t end, float *to)
{
  if (end - first == ESMM_HALF_COLS) {
    copy_half(from, dtype, at + first, to + first);
    return;
  }
  esmm_load_elements(from, dtype, at + first, 1, end - first, to + first, 1);
}

/* A panel with every k, in the buffer. */
static panel full_panel(const float *buffer, int64_t kc)
{
  return (panel){.first = buffer, .second = buffer + kc * ESMM_HALF_COLS, .step = ESMM_HALF_COLS, .kept = kc};
}

/* The same from B's rows, with every k: for dense products of weights that have no full panels. */
static panel panel_of_rows(const esmm_weights *w, int64_t q, int64_t k0, int64_t kc, float *buffer)
{
  const int64_t j0 = q * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, w->rows_ld - j0);
  for (int64_t k = 0; k < kc; k++)
    for (int half = 0; half < 2; half++) {
      float *to = buffer + half * kc * ESMM_HALF_COLS + k * ESMM_HALF_COLS;
      const int64_t at = (k0 + k) * w->rows_ld + j0 + half * ESMM_HALF_COLS;
      if (half * ESMM_HALF_COLS >= cols)
        memset(to, 0, ESMM_HALF_COLS * sizeof *to);
      else
        copy_half(w->rows, w->dtype, at, to);
    }
  return full_panel(buffer, kc);
}

/* ------------------------------------------------------------------------------------------------ BSR */

/* Columns j0..j0+width-1, which lie in one block column: in place, its rows are block_cols apart. */
static panel panel_of_blocks(const esmm_weights *w, int64_t j0, int64_t width, int64_t k0, int64_t kc,
                             const panel_room *room)
{
  const esmm_bsr_form *form = &w->bsr;
  panel b = {.first = room->values, .second = room->values, .step = form->block_cols};
  const int64_t at = find_blocks(form, j0, k0, kc, room, &b);
  if (b.kept == 0)
    return b;
  if (w->dtype == ESMM_F32 && room->in_place) {
    b.first = (const float *)form->values + at;
    b.second = b.first + ESMM_HALF_COLS;
    return b;
  }
  for (int64_t half = 0; half < width / ESMM_HALF_COLS; half++)
    for (int64_t i = 0; i < b.kept; i++)
      copy_half(form->values, w->dtype, at + i * form->block_cols + half * ESMM_HALF_COLS,
                room->values + (half * kc + i) * ESMM_HALF_COLS);
  b.first = room->values;
  b.second = room->values + kc * ESMM_HALF_COLS;
  b.step = ESMM_HALF_COLS;
  return b;
}

/*
 * Block column s's part of columns j0.. of a panel, into its buffer: row k goes to k's place among the bits, or to
 * place k where bits is NULL.
 */
static void scatter_blocks(const esmm_weights *w, int64_t s, int64_t j0, int64_t k0, int64_t kc, const uint64_t *bits,
                           const uint32_t *before, float *buffer)
{
  const esmm_bsr_form *form = &w->bsr;
  const int64_t col0 = s * form->block_cols, left = esmm_max(j0, col0);
  const int64_t right = esmm_min(j0 + ESMM_PANEL, esmm_min(w->n, col0 + form->block_cols));
  int64_t first, end;
  blocks_of_stretch(form, s, k0, kc, &first, &end);
  for (int64_t i = first; i < end; i++) {
    int64_t from, to;
    if (!clip_block(form, i, k0, kc, &from, &to))
      continue;
    for (int64_t k = from; k < to; k++) {
      const uint64_t below = bits ? bits[k / 64] & (((uint64_t)1 << (k % 64)) - 1) : 0;
      const int64_t place = bits ? (int64_t)before[k / 64] + __builtin_popcountll(below) : k;
      const int64_t row = i * form->block_rows + (k0 + k - (int64_t)form->at[i] * form->block_rows);
      const int64_t at = row * form->block_cols - col0 + j0;
      float *half = buffer + place * ESMM_HALF_COLS;
      copy_part(form->values, w->dtype, at, left - j0, esmm_min(right - j0, ESMM_HALF_COLS), half);
      copy_part(form->values, w->dtype, at, esmm_max(left - j0, ESMM_HALF_COLS), right - j0,
                half + (kc - 1) * ESMM_HALF_COLS);
    }
  }
}

static void clear_panel(float *buffer, int64_t kept, int64_t kc)
{
  memset(buffer, 0, (size_t)(kept * ESMM_HALF_COLS) * sizeof *buffer);
  memset(buffer + kc * ESMM_HALF_COLS, 0, (size_t)(kept * ESMM_HALF_COLS) * sizeof *buffer);
}

/* 32 columns over several block columns, with the k's that any of them has. */
static panel panel_of_union(const esmm_weights *w, int64_t j0, int64_t k0, int64_t kc, const panel_room *room)
{
  const esmm_bsr_form *form = &w->bsr;
  const int64_t last = (esmm_min(w->n, j0 + ESMM_PANEL) - 1) / form->block_cols;
  panel b = {.first = room->values, .second = room->values + kc * ESMM_HALF_COLS, .step = ESMM_HALF_COLS};
  memset(room->bits, 0, (size_t)esmm_ceil_div(kc, 64) * sizeof *room->bits);
  for (int64_t s = j0 / form->block_cols; s <= last; s++) {
    int64_t first, end, from, to;
    blocks_of_stretch(form, s, k0, kc, &first, &end);
    for (int64_t i = first; i < end; i++)
      if (clip_block(form, i, k0, kc, &from, &to))
        set_range(room->bits, from, to);
  }
  count_bits(room, kc, &b);
  clear_panel(room->values, b.kept, kc);
  for (int64_t s = j0 / form->block_cols; s <= last; s++)
    scatter_blocks(w, s, j0, k0, kc, room->bits, room->before, room->values);
  return b;
}

/* ------------------------------------------------------------------------------------------------ N:M */

/* Columns j0..j0+width-1, which share a list: its k's, and halves in place. */
static panel panel_of_lists(const esmm_weights *w, int64_t j0, int64_t width, int64_t k0, int64_t kc,
                            const panel_room *room)
{
  const esmm_nm_form *form = &w->nm;
  panel b = {.step = ESMM_HALF_COLS};
  const int64_t start = find_listed(form, j0, k0, kc, room, &b);
  const int64_t q = j0 / ESMM_HALF_COLS, here = (q * form->slots + start) * ESMM_HALF_COLS;
  const bool two = width > ESMM_HALF_COLS && q + 1 < form->panels; /* else the second half is not read */
  const int64_t next = two ? here + form->slots * ESMM_HALF_COLS : here;
  if (w->dtype == ESMM_F32) {
    b.first = (const float *)form->values + here;
    b.second = (const float *)form->values + next;
    return b;
  }
  widen(form->values, w->dtype, here, b.kept * ESMM_HALF_COLS, room->values);
  if (two)
    widen(form->values, w->dtype, next, b.kept * ESMM_HALF_COLS, room->values + kc * ESMM_HALF_COLS);
  b.first = room->values;
  b.second = two ? room->values + kc * ESMM_HALF_COLS : room->values;
  return b;
}

/* The indices of a slot in 16 columns that choose for themselves. */
ALWAYS void own_indices(const esmm_nm_form *form, const unsigned char *from, unsigned char index[ESMM_HALF_COLS])
{
  const unsigned mask = (1u << form->bits) - 1;
  for (int part = 0; part < 2; part++, from += form->bits) { /* 8 indices are whole bytes, at most 40 bits */
    uint64_t word = 0;
    for (int i = form->bits - 1; i >= 0; i--)
      word = word << 8 | from[i];
    for (int i = 0; i < 8; i++, word >>= form->bits)
      index[8 * part + i] = (unsigned char)(word & mask);
  }
}

/* The lists that 16 columns from j0 on have, several columns each. */
typedef struct shared_lists {
  int count, end[ESMM_HALF_COLS]; /* list i is that of the columns before end[i], from end[i - 1] on */
  const unsigned char *list[ESMM_HALF_COLS];
} shared_lists;

static shared_lists lists_of(const esmm_nm_form *form, int64_t j0)
{
  shared_lists lists = {0};
  for (int64_t c = 0, end; c < ESMM_HALF_COLS; c = end) {
    const int64_t strip = esmm_min((j0 + c) / form->group_cols, form->strips - 1); /* columns past the last: any */
    end = esmm_min(ESMM_HALF_COLS, (strip + 1) * form->group_cols - j0);
    if (end <= c)
      end = ESMM_HALF_COLS;
    lists.list[lists.count] = form->index + (size_t)strip * form->list_bytes;
    lists.end[lists.count++] = (int)end;
  }
  return lists;
}

/* 16 columns from j0 on, into [kc][16] zeros: each value goes to the row that its index names. */
static void scatter_slots(const esmm_weights *w, int64_t j0, int64_t k0, int64_t kc, float *half)
{
  const esmm_nm_form *form = &w->nm;
  const bool own = form->group_cols == 1;
  const shared_lists lists = own ? (shared_lists){0} : lists_of(form, j0);
  int64_t first, end;
  slots_of_stretch(form, k0, k0 + kc, &first, &end);
  slot_walk at = walk_from(form, first, k0);
  for (int64_t slot = first; slot < end; slot++, walk_on(form, &at)) {
    const int64_t vector = j0 / ESMM_HALF_COLS * form->slots + slot;
    const bool whole = at.base >= 0 && at.base + form->group <= kc; /* else the stretch cuts the group */
    float values[ESMM_HALF_COLS];
    copy_half(form->values, w->dtype, vector * ESMM_HALF_COLS, values);
    if (own) {
      unsigned char index[ESMM_HALF_COLS];
      own_indices(form, form->index + (size_t)(vector * 2 * form->bits), index);
      for (int c = 0; c < ESMM_HALF_COLS; c++)
        if (whole || (at.base + index[c] >= 0 && at.base + index[c] < kc))
          half[(at.base + index[c]) * ESMM_HALF_COLS + c] = values[c];
      continue;
    }
    for (int i = 0, c = 0; i < lists.count; i++) {
      const int64_t k = at.base + (int64_t)esmm_nm_field(lists.list[i], slot, form->bits);
      if (whole || (k >= 0 && k < kc))
        for (; c < lists.end[i]; c++)
          half[k * ESMM_HALF_COLS + c] = values[c];
      c = lists.end[i];
    }
  }
}

/* Columns j0..j0+31 with every k of the stretch, zeros filled in. */
static panel panel_widened(const esmm_weights *w, int64_t j0, int64_t k0, int64_t kc, float *buffer)
{
  clear_panel(buffer, kc, kc);
  if (w->format == ESMM_FORMAT_BSR)
    for (int64_t s = j0 / w->bsr.block_cols; s * w->bsr.block_cols < esmm_min(w->n, j0 + ESMM_PANEL); s++)
      scatter_blocks(w, s, j0, k0, kc, NULL, NULL, buffer);
  else
    for (int64_t half = 0; half < 2 && j0 + half * ESMM_HALF_COLS < w->n; half++)
      scatter_slots(w, j0 + half * ESMM_HALF_COLS, k0, kc, buffer + half * kc * ESMM_HALF_COLS);
  return full_panel(buffer, kc);
}

/* Panel q, of `width` columns, at the stretch [k0, k0+kc). */
static panel make_panel(const esmm_weights *w, source from, int64_t q, int64_t width, int64_t k0, int64_t kc,
                        const panel_room *room)
{
  switch (from) {
  case FROM_PANELS:
    return panel_of_b(w, q, k0, kc, room->values);
  case FROM_ROWS:
    return panel_of_rows(w, q, k0, kc, room->values);
  case FROM_BLOCKS:
    return panel_of_blocks(w, q * width, width, k0, kc, room);
  case FROM_UNION:
    return panel_of_union(w, q * width, k0, kc, room);
  case FROM_LISTS:
    return panel_of_lists(w, q * width, width, k0, kc, room);
  case FROM_WIDENED:
    break;
  }
  return panel_widened(w, q * width, k0, kc, room->values);
}

#endif
