/*
 * epilogue.h: the epilogue of every kernel, and the statistics of C:
 *
 *     C = activation(alpha * sum + beta * C + bias) * factor + residual
 *
 * Kernels that can store sums as they are (esmm_is_plain) do so, and call esmm_finish_plain for each finished block of
 * C; the others keep fp32 sums in scratch and call esmm_finish. Threads finish any blocks at the same time: statistics
 * are added up for a block, then to the whole by atomic integer operations, so the order does not matter.
 *
 * Included by kernels after their vec_*.h, so that it is compiled for their instruction set; by others as it is.
 */
#ifndef ESMM_EPILOGUE_H
#define ESMM_EPILOGUE_H

#include "bits.h"
#include "convert.h"
#include "kernel.h"

#ifndef ESMM_VEC_H
#include "cpu/vec_portable.h"
#endif

#include "cpu/activate.h"
#include "cpu/vec_dtype.h"

/* Nothing is done to sums, but for what beta and C's dtype ask for, and C is row-major. */
static inline bool esmm_is_bare(const esmm_problem *p)
{
  return p->c.order == ESMM_ROW_MAJOR && p->alpha == 1.0f && !p->bias && p->activation == ESMM_ACT_NONE && !p->gated &&
         !p->residual.data;
}

/* Sums may be written or added straight into C: fp32, row-major, alpha 1, beta 0 or 1, nothing after the sum. */
static inline bool esmm_is_plain(const esmm_problem *p)
{
  return p->c.dtype == ESMM_F32 && (p->beta == 0.0f || p->beta == 1.0f) && esmm_is_bare(p);
}

/* A sum of all k's may be written straight into C, rounded to its dtype. */
static inline bool esmm_is_rounded(const esmm_problem *p)
{
  return p->beta == 0.0f && esmm_is_bare(p);
}

/* ---- C ---- */

/* count (VEC at most) floats; 0 past them */
static inline vec esmm_load_part(const float *from, int64_t count)
{
  return count == VEC ? vec_load(from) : vec_load_first(from, count);
}

/* count (VEC at most) elements of a row, from (row, col) on */
static inline vec esmm_read_part(const esmm_matrix *m, int64_t row, int64_t col, int64_t count)
{
  const int64_t at = row * m->ld + col;
  if (m->order == ESMM_ROW_MAJOR)
    return esmm_vec_load_first(m->data, m->dtype, at, count);
  float part[VEC] = {0};
  esmm_load_elements(m->data, m->dtype, col * m->ld + row, m->ld, count, part, 1);
  return vec_load(part);
}

static inline void esmm_write_part(esmm_matrix *m, int64_t row, int64_t col, int64_t count, vec x)
{
  const int64_t at = row * m->ld + col;
  if (m->order == ESMM_ROW_MAJOR) {
    esmm_vec_store_first(m->data, m->dtype, at, count, x);
    return;
  }
  float part[VEC];
  vec_store(part, x);
  esmm_store_elements(m->data, m->dtype, col * m->ld + row, m->ld, count, part, 1);
}

/* A problem's epilogue, in locals that stores to C cannot change: the compiler need not read it again after each. */
typedef struct esmm_ending {
  esmm_matrix c, residual;
  const float *bias, *factor;
  int64_t factor_ld;
  vec alpha, beta;
  bool reads_c;
  esmm_activation activation;
} esmm_ending;

/* count (VEC at most) elements. simple: C is row-major, of this dtype and not read, and there is no factor and no
   residual. */
static inline __attribute__((always_inline)) void esmm_finish_part(esmm_ending *e, const bool simple,
                                                                   const esmm_dtype dtype, int64_t row, int64_t col,
                                                                   int64_t count, const float *sum)
{
  vec x = vec_mul(e->alpha, esmm_load_part(sum, count));
  if (!simple && e->reads_c)
    x = vec_add(x, vec_mul(e->beta, esmm_read_part(&e->c, row, col, count)));
  if (e->bias)
    x = vec_add(x, esmm_load_part(e->bias + col, count));
  x = esmm_activate_vec(e->activation, x);
  if (simple) {
    esmm_vec_store_first(e->c.data, dtype, row * e->c.ld + col, count, x);
    return;
  }
  if (e->factor)
    x = vec_mul(x, esmm_load_part(e->factor + row * e->factor_ld + col, count));
  if (e->residual.data)
    x = vec_add(x, esmm_read_part(&e->residual, row, col, count));
  esmm_write_part(&e->c, row, col, count, x);
}

static inline __attribute__((always_inline)) void esmm_finish_simple(esmm_ending *e, const esmm_dtype dtype,
                                                                     int64_t row0, int64_t rows, int64_t col0,
                                                                     int64_t cols, const float *sums, int64_t ld)
{
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    for (; j + VEC <= cols; j += VEC)
      esmm_finish_part(e, true, dtype, row0 + i, col0 + j, VEC, sums + i * ld + j);
    if (j < cols)
      esmm_finish_part(e, true, dtype, row0 + i, col0 + j, cols - j, sums + i * ld + j);
  }
}

/* sums: [rows,cols] row-major with leading dimension ld, for C from (row0, col0) on. */
static inline void esmm_finish_sums(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols,
                                    const float *sums, int64_t ld)
{
  esmm_ending e = {.c = p->c,
                   .residual = p->residual,
                   .bias = p->bias,
                   .factor = p->factor,
                   .factor_ld = p->factor_ld,
                   .alpha = vec_all(&p->alpha),
                   .beta = vec_all(&p->beta),
                   .reads_c = p->beta != 0.0f,
                   .activation = p->activation};
  const bool by_rows = e.c.order == ESMM_ROW_MAJOR;
  if (by_rows && ld == cols && e.c.ld == cols && !e.bias && !e.factor && !e.residual.data) {
    cols *= rows; /* short rows without a gap between them are one long row */
    rows = 1;
  }
  if (by_rows && !e.reads_c && !e.factor && !e.residual.data) {
    switch (e.c.dtype) {
    case ESMM_F32:
      esmm_finish_simple(&e, ESMM_F32, row0, rows, col0, cols, sums, ld);
      break;
    case ESMM_BF16:
      esmm_finish_simple(&e, ESMM_BF16, row0, rows, col0, cols, sums, ld);
      break;
    case ESMM_F16:
      esmm_finish_simple(&e, ESMM_F16, row0, rows, col0, cols, sums, ld);
      break;
    }
    return;
  }
  const int64_t whole = by_rows ? cols - cols % VEC : 0; /* columns, along the rows of a row-major C */
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < whole; j += VEC)
      esmm_finish_part(&e, false, e.c.dtype, row0 + i, col0 + j, VEC, sums + i * ld + j);
  for (int64_t j = whole; j < cols; j += VEC) /* down a few columns at a time of the other, and of the last ones */
    for (int64_t i = 0; i < rows; i++)
      esmm_finish_part(&e, false, e.c.dtype, row0 + i, col0 + j, esmm_min(VEC, cols - j), sums + i * ld + j);
}

/* ---- statistics of C ---- */

enum {
  ESMM_TALLY_COLS = 1024, /* columns tallied together: their counts and the rows they come from stay in the L1 cache */
  ESMM_TALLY_ROWS = 8,    /* rows at a time */
  ESMM_TALLY_SHORT = 256  /* columns of a short row */
};

/* The columns of C from a multiple of 64 on; those before and after the block's own stay 0. */
typedef struct esmm_tally {
  uint32_t ors[ESMM_TALLY_COLS];    /* the elements' words, ORed: of one strip */
  uint32_t counts[ESMM_TALLY_COLS]; /* nonzeros */
} esmm_tally;

/* rows x cols of C from (row, col) on, into the tally's columns from `at` on */
static inline void esmm_tally_block(const esmm_matrix *c, int64_t row, int64_t rows, int64_t col, int64_t cols,
                                    int64_t at, esmm_tally *t)
{
  uint32_t *restrict ors = t->ors + at, *restrict counts = t->counts + at;
  const uint32_t magnitude = esmm_dtype_magnitude(c->dtype);
  if (c->order == ESMM_COL_MAJOR) {
    for (int64_t j = 0; j < cols; j++) {
      const size_t start = (size_t)((col + j) * c->ld + row) * esmm_dtype_size(c->dtype);
      const uint32_t nonzeros = (uint32_t)esmm_count_nonzero((const char *)c->data + start, c->dtype, rows);
      ors[j] |= nonzeros;
      counts[j] += nonzeros;
    }
    return;
  }
  for (int64_t i = 0; i < rows; i++) {
    const int64_t start = (row + i) * c->ld + col;
    const esmm_word32 *words = (const esmm_word32 *)c->data + start;
    const esmm_word16 *halves = (const esmm_word16 *)c->data + start;
    switch (c->dtype) {
    case ESMM_F32:
      for (int64_t j = 0; j < cols; j++) {
        ors[j] |= words[j];
        counts[j] += (words[j] & magnitude) != 0;
      }
      break;
    case ESMM_BF16:
    case ESMM_F16:
      for (int64_t j = 0; j < cols; j++) {
        ors[j] |= halves[j] & magnitude;
        counts[j] += (halves[j] & magnitude) != 0;
      }
      break;
    }
  }
}

/* The strip that has this row of the whole C: sets its bits of the tally's columns, which start at word `word`. */
static inline void esmm_tally_bits(esmm_pattern *bitmaps, int64_t row, int64_t word, int64_t words, esmm_tally *t)
{
  uint64_t *bits = bitmaps->bits + row / bitmaps->strip_rows * bitmaps->words + word;
  for (int64_t i = 0; i < words; i++) {
    const uint64_t set = nonzero_bits(t->ors + i * 64);
    if (set)
      __atomic_fetch_or(bits + i, set, __ATOMIC_RELAXED);
  }
  memset(t->ors, 0, (size_t)words * 64 * sizeof *t->ors);
}

/* Rows from `row` on, of `left`, to be tallied together: of one strip. */
static inline int64_t esmm_tally_step(const esmm_problem *p, int64_t row, int64_t left)
{
  const int64_t rows = esmm_min(left, ESMM_TALLY_ROWS);
  if (!p->bitmaps)
    return rows;
  const int64_t height = p->bitmaps->strip_rows;
  return esmm_min(rows, height - (p->row0 + row) % height);
}

/* A block of C: finishes it where sums are given, and notes its statistics while it is in the cache. */
static inline void esmm_finish_tallied(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols,
                                       const float *sums, int64_t ld)
{
  esmm_tally t;
  int64_t width;
  for (int64_t j = 0; j < cols; j += width) {
    const int64_t col = col0 + j, at = col % 64;
    width = esmm_min(ESMM_TALLY_COLS - at, cols - j);
    const int64_t words = esmm_ceil_div(at + width, 64);
    memset(t.ors, 0, (size_t)words * 64 * sizeof *t.ors);
    memset(t.counts, 0, (size_t)words * 64 * sizeof *t.counts);
    int64_t step;
    for (int64_t i = 0; i < rows; i += step) {
      step = esmm_tally_step(p, row0 + i, rows - i);
      /* Long rows one at a time: those of sums and of C are often pages apart and push one another out of the cache. */
      const int64_t lines = p->c.order == ESMM_ROW_MAJOR && width > ESMM_TALLY_SHORT ? 1 : step;
      for (int64_t r = i; r < i + step; r += lines) {
        if (sums)
          esmm_finish_sums(p, row0 + r, lines, col, width, sums + r * ld + j, ld);
        esmm_tally_block(&p->c, row0 + r, lines, col, width, at, &t);
      }
      if (p->bitmaps)
        esmm_tally_bits(p->bitmaps, p->row0 + row0 + i, col / 64, words, &t);
    }
    for (int64_t x = 0; x < width && p->nonzeros; x++)
      if (t.counts[at + x])
        __atomic_fetch_add(p->nonzeros + col + x, (int32_t)t.counts[at + x], __ATOMIC_RELAXED);
  }
}

/* ---- what kernels call ---- */

/* sums: [rows,cols] row-major with leading dimension ld, for C from (row0, col0) on. */
static inline void esmm_finish(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols,
                               const float *sums, int64_t ld)
{
  if (p->nonzeros || p->bitmaps)
    esmm_finish_tallied(p, row0, rows, col0, cols, sums, ld);
  else
    esmm_finish_sums(p, row0, rows, col0, cols, sums, ld);
}

/* A block of C that was stored as it is, because esmm_is_plain said so: once, when its last sum is there. */
static inline void esmm_finish_plain(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols)
{
  if (p->nonzeros || p->bitmaps)
    esmm_finish_tallied(p, row0, rows, col0, cols, NULL, 0);
}

#endif
