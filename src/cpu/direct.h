/*
 * direct.h: small products, and those with few k's. A and B's rows are multiplied where they lie: nothing is packed,
 * listed or padded to whole stretches of k's, which would take longer than the product. Included after vec_*.h.
 *
 *     tile: rows x vectors of C in registers      sums[r][v] += a[r][k] * b[k][v]      for each k
 *
 * The floor is multiply-adds, for few k's the writing of C. Rows go in blocks, and tiles of a block down its rows
 * first: the columns of B that they share stay in the first-level cache. B is read again for every block, and a tile
 * touches a page of it for each k: it has to lie in the second-level cache, which is why larger ones are refused.
 *
 * Nothing is skipped. Sums of 320 k's are added to C, or to the sums of a block where something follows them; a tile
 * that is done with all k's rounds its sums to C's dtype by itself.
 */
#include "operands.h"

#include <stdio.h>

#define DIRECT_BYTES ((int64_t)512 << 10) /* most of B's rows */
#define DIRECT_CACHED ((size_t)128 << 10)
#define DIRECT_CHAIN 320
#define DIRECT_WIDE 4            /* most vectors of a tile */
#define DIRECT_SUMS 4096         /* that are finished together, or those of a tile's rows */
#define DIRECT_ROWS (32 << 10)   /* elements of A in a block, where it is read in place */
#define DIRECT_LONG 1024         /* columns: parts of many longer rows of C are pages apart */
#define DIRECT_WIDENED (8 << 10) /* where it is not */

static bool direct_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->w->rows_bytes > (size_t)DIRECT_BYTES) {
    (void)snprintf(why, why_bytes, "b's rows have %zu KB, direct takes %lld at most", p->w->rows_bytes >> 10,
                   (long long)DIRECT_BYTES >> 10);
    return false;
  }
  return true;
}

static void direct_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                         int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  const double m = (double)p->m, k = (double)p->k, vectors = (double)esmm_ceil_div(p->n, VEC);
  const bool in_place = p->a.dtype == ESMM_F32 && p->a.order == ESMM_ROW_MAJOR;
  units[0] = m * k * vectors * (p->w->dtype == ESMM_F32 ? 1.0 : 1.1); /* B is widened again for each tile */
  /* So small a B is in the second-level cache. From memory, parts of long rows come slowly. */
  units[1] =
      p->w->rows_bytes <= DIRECT_CACHED ? 0.0 : (double)p->w->rows_bytes * (p->n > DIRECT_WIDE * VEC ? 2.5 : 1.0);
  units[2] = in_place ? 0.0 : m * k * (p->a.order == ESMM_ROW_MAJOR ? 1.0 : 8.0);
  units[3] = m * vectors * ((double)esmm_ceil_div(p->k, DIRECT_CHAIN) + (esmm_is_plain(p) ? 0.0 : 1.0));
  units[4] = (double)(p->m / MR) * (double)p->w->rows_bytes;
  units[5] = 1.0;
}

#define DIRECT_TERM_NAMES                                                                                      \
  {                                                                                                            \
    "multiply-adds", "reading of b", "widening of a", "updates of c", "reading of b again", "starting threads" \
  }

/* One k of chain u. */
ALWAYS void direct_step(const int rows, const int vectors, const int u, const esmm_dtype dtype, const float *a,
                        int64_t lda, const void *b, int64_t at, vec x[MR][DIRECT_WIDE][4])
{
  vec y[DIRECT_WIDE];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    y[v] = esmm_vec_load(b, dtype, at + v * VEC);
    VEC_KEEP(y[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const vec z = vec_all(a + r * lda);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      x[r][v][u] = vec_fma(z, y[v], x[r][v][u]);
  }
}

/* Tiles one below the other: c [count * rows, cols] (+)= a [count * rows, kc] x b [kc, cols]. */
typedef struct direct_tiles {
  const float *a;
  int64_t lda;
  const void *b;
  int64_t at, ldb; /* the first element in B's rows */
  int64_t kc;
  void *c;
  int64_t to, ldc; /* the first element in c */
  esmm_dtype of_c; /* f32 where sums are added */
  int64_t cols;    /* the last vector of a tile may be cut */
  int64_t count;
  bool add;
} direct_tiles;

ALWAYS void direct_round_to(const esmm_dtype dtype, const float *sums, int64_t ld, int rows, int64_t cols, void *c,
                            int64_t to, int64_t ldc)
{
  for (int r = 0; r < rows; r++, to += ldc, sums += ld)
    for (int64_t j = 0; j < cols; j += VEC)
      esmm_vec_store_first(c, dtype, to + j, esmm_min(VEC, cols - j), vec_load(sums + j));
}

/* sums [rows, ld], of which cols are stored in C from element `to` on, in its dtype */
static __attribute__((noinline)) void direct_round(const float *sums, int64_t ld, int rows, const direct_tiles *t,
                                                   int64_t to)
{
  switch (t->of_c) {
  case ESMM_F32:
    break; /* is stored by the tile */
  case ESMM_BF16:
    direct_round_to(ESMM_BF16, sums, ld, rows, t->cols, t->c, to, t->ldc);
    break;
  case ESMM_F16:
    direct_round_to(ESMM_F16, sums, ld, rows, t->cols, t->c, to, t->ldc);
    break;
  }
}

/* One tile. Low and narrow ones have several chains, so that they need not wait for their own sums. */
ALWAYS void direct_tile(const int rows, const int vectors, const esmm_dtype dtype, const direct_tiles *restrict t,
                        const float *a, int64_t to)
{
  const int chains = rows * vectors >= 8 ? 1 : rows * vectors >= 4 ? 2 : 4;
  vec x[MR][DIRECT_WIDE][4];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int u = 0; u < chains; u++)
        x[r][v][u] = vec_zero();
  int64_t k = 0, at = t->at;
  for (; k + chains <= t->kc; k += chains)
#pragma GCC unroll 4
    for (int u = 0; u < chains; u++, at += t->ldb)
      direct_step(rows, vectors, u, dtype, a + k + u, t->lda, t->b, at, x);
  for (; k < t->kc; k++, at += t->ldb)
    direct_step(rows, vectors, 0, dtype, a + k, t->lda, t->b, at, x);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int u = 1; u < chains; u++)
        x[r][v][0] = vec_add(x[r][v][0], x[r][v][u]);
  if (t->of_c != ESMM_F32) {
    _Alignas(64) float sums[MR * DIRECT_WIDE * VEC];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++)
        vec_store(sums + (r * vectors + v) * VEC, x[r][v][0]);
    direct_round(sums, vectors * VEC, rows, t, to);
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float *c = (float *)t->c + to + r * t->ldc + v * VEC;
      const int64_t count = v + 1 < vectors ? VEC : t->cols - v * VEC;
      const vec sum = t->add ? vec_add(x[r][v][0], esmm_load_part(c, count)) : x[r][v][0];
      esmm_vec_store_first(c, ESMM_F32, 0, count, sum);
    }
}

typedef void direct_function(const direct_tiles *restrict t);

#define DIRECT(name, rows, vectors, dtype)                                                       \
  static __attribute__((noinline)) void name(const direct_tiles *restrict t)                     \
  {                                                                                              \
    for (int64_t i = 0; i < t->count; i++)                                                       \
      direct_tile(rows, vectors, dtype, t, t->a + i * (rows)*t->lda, t->to + i * (rows)*t->ldc); \
  }

/* By rows, MR, 4, 2 and 1, and by vectors: 4 (for one row or two alone), 2 and 1. */
enum { DIRECT_HEIGHTS = 4, DIRECT_WIDTHS = 3 };
static const int direct_rows[DIRECT_HEIGHTS] = {MR, 4, 2, 1}, direct_widest[DIRECT_HEIGHTS] = {1, 1, 0, 0};
typedef direct_function *direct_set[DIRECT_HEIGHTS][DIRECT_WIDTHS];

#define DIRECT_SET(suffix, dtype)                                                              \
  DIRECT(most_2_##suffix, MR, 2, dtype)                                                        \
  DIRECT(most_1_##suffix, MR, 1, dtype)                                                        \
  DIRECT(four_2_##suffix, 4, 2, dtype)                                                         \
  DIRECT(four_1_##suffix, 4, 1, dtype)                                                         \
  DIRECT(two_4_##suffix, 2, 4, dtype)                                                          \
  DIRECT(two_2_##suffix, 2, 2, dtype)                                                          \
  DIRECT(two_1_##suffix, 2, 1, dtype)                                                          \
  DIRECT(one_4_##suffix, 1, 4, dtype)                                                          \
  DIRECT(one_2_##suffix, 1, 2, dtype)                                                          \
  DIRECT(one_1_##suffix, 1, 1, dtype)                                                          \
  static const direct_set direct_##suffix = {{NULL, most_2_##suffix, most_1_##suffix},         \
                                             {NULL, four_2_##suffix, four_1_##suffix},         \
                                             {two_4_##suffix, two_2_##suffix, two_1_##suffix}, \
                                             {one_4_##suffix, one_2_##suffix, one_1_##suffix}};
DIRECT_SET(f32, ESMM_F32)
DIRECT_SET(bf16, ESMM_BF16)
DIRECT_SET(f16, ESMM_F16)

static const direct_set *direct_of(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return &direct_f32;
  case ESMM_BF16:
    return &direct_bf16;
  case ESMM_F16:
    return &direct_f16;
  }
  return NULL; /* weights of an unknown dtype are not prepared */
}

/* A thread's part of C, and its scratch: sums where something follows them, rows of A as fp32 where they are not. */
typedef struct direct_part {
  bool by_rows;       /* parts are rows of C, else columns */
  bool stored;        /* by the tiles, in C; else sums are kept, and finished */
  int64_t rows, cols; /* of a part; the last ones may have less, or nothing */
  int64_t lines, ld;  /* rows of a block; of sums */
  size_t at_rows, bytes;
} direct_part;

static direct_part direct_lay_out(const esmm_problem *p)
{
  direct_part x = {.rows = p->m, .cols = p->n};
  x.by_rows = p->m >= 2 * MR * p->threads || esmm_ceil_div(p->n, 64) < p->threads;
  x.stored = esmm_is_plain(p) || (p->k <= DIRECT_CHAIN && esmm_is_rounded(p));
  if (x.by_rows)
    x.rows = esmm_round_up(esmm_ceil_div(p->m, p->threads), MR);
  else if (p->threads > 1)
    x.cols = esmm_round_up(esmm_ceil_div(p->n, p->threads), 64);
  const bool in_place = p->a.dtype == ESMM_F32 && p->a.order == ESMM_ROW_MAJOR;
  const int64_t k = esmm_min(DIRECT_CHAIN, p->k);
  x.lines = (in_place ? DIRECT_ROWS : DIRECT_WIDENED) / k;
  if (x.cols > DIRECT_LONG)
    x.lines = MR;
  if (!x.stored) {
    x.ld = x.cols == p->n ? x.cols : esmm_round_up(x.cols, VEC); /* whole rows: as C's, without a gap */
    x.lines = esmm_min(x.lines, DIRECT_SUMS / x.ld);
  }
  x.lines = esmm_max(1, esmm_min(x.lines, esmm_round_up(x.rows, MR)) / MR) * MR;
  x.at_rows = (size_t)esmm_round_up(x.lines * x.ld, VEC) * sizeof(float);
  x.bytes = x.at_rows;
  if (!in_place)
    x.bytes += (size_t)(x.lines * k) * sizeof(float);
  if (p->threads > 1)
    x.bytes = align_up(x.bytes);
  return x;
}

static size_t direct_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return direct_lay_out(p).bytes * (size_t)p->threads;
}

/* Rows of a block, columns [col0, col0 + cols): sums of all k's, added to c, or in its place. */
static void direct_sums(const esmm_problem *p, const direct_set *set, int64_t row0, int64_t rows, int64_t col0,
                        int64_t cols, float *buffer, direct_tiles t)
{
  const esmm_weights *w = p->w;
  const int64_t first = t.to;
  t.b = w->rows;
  t.ldb = w->rows_ld;
  for (int64_t k0 = 0; k0 < p->k; k0 += DIRECT_CHAIN, t.add = true) {
    t.kc = esmm_min(DIRECT_CHAIN, p->k - k0);
    const float *a = rows_of_a(&p->a, row0, rows, k0, t.kc, buffer, &t.lda);
    for (int64_t r = 0, height = 0; r < rows; r += t.count * direct_rows[height], height++) {
      t.a = a + r * t.lda;
      t.count = (rows - r) / direct_rows[height];
      int width = direct_widest[height];
      for (int64_t j = 0, step; t.count > 0 && j < cols; j += step) {
        while (cols - j <= ((4 >> width) - 1) * VEC) /* its last vector would be nothing but padding */
          width++;
        step = (4 >> width) * VEC;
        t.cols = esmm_min(step, cols - j);
        t.at = k0 * t.ldb + col0 + j;
        t.to = first + r * t.ldc + j;
        (*set)[height][width](&t);
      }
    }
  }
}

static void direct_block(const esmm_problem *p, const direct_part *x, int64_t row0, int64_t col0, char *scratch)
{
  const direct_set *set = direct_of(p->w->dtype);
  const int64_t end = esmm_min(p->m, row0 + x->rows), cols = esmm_min(x->cols, p->n - col0);
  float *sums = (float *)(void *)scratch, *buffer = (float *)(void *)(scratch + x->at_rows);
  if (row0 >= end || cols <= 0)
    return;
  for (int64_t r = row0; r < end; r += x->lines) {
    const int64_t rows = esmm_min(x->lines, end - r);
    if (x->stored) {
      direct_sums(
          p, set, r, rows, col0, cols, buffer,
          (direct_tiles){
              .c = p->c.data, .to = r * p->c.ld + col0, .ldc = p->c.ld, .of_c = p->c.dtype, .add = p->beta == 1.0f});
      continue;
    }
    direct_sums(p, set, r, rows, col0, cols, buffer, (direct_tiles){.c = sums, .ldc = x->ld, .of_c = ESMM_F32});
    esmm_finish(p, r, rows, col0, cols, sums, x->ld);
  }
  if (x->stored)
    esmm_finish_plain(p, row0, end - row0, col0, cols);
}

typedef struct direct_job {
  const esmm_problem *p;
  const direct_part *part;
  char *scratch;
} direct_job;

static void direct_piece(void *arg, int64_t first, int64_t end, int worker)
{
  const direct_job *x = arg;
  const direct_part *part = x->part;
  for (int64_t i = first; i < end; i++)
    direct_block(x->p, part, part->by_rows ? i * part->rows : 0, part->by_rows ? 0 : i * part->cols,
                 x->scratch + (size_t)worker * part->bytes);
}

static esmm_status direct_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                              esmm_stats *stats)
{
  (void)self;
  const direct_part part = direct_lay_out(p);
  direct_job x = {.p = p, .part = &part, .scratch = scratch};
  esmm_for(ctx, p->threads, p->threads, 1, direct_piece, &x);
  stats->flop_useful = 2.0 * (double)p->m * (double)p->n * (double)p->k;
  stats->joint_density = 1.0;
  return ESMM_OK;
}
