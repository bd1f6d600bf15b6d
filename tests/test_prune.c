/*
 * test_prune.c: pruning keeps what it says and reports what it dropped.
 *
 * The oracle sorts: it ranks elements or blocks by (score, place) in float64 and drops all but the first.
 */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ranked {
  double score;
  int64_t place;
} ranked;

/* Larger scores first, of equal ones the lower place. */
static int by_rank(const void *x, const void *y)
{
  const ranked *a = x, *b = y;
  if (a->score != b->score)
    return a->score > b->score ? -1 : 1;
  return a->place < b->place ? -1 : a->place > b->place;
}

static double norm_at(const float *norms, int64_t k)
{
  return norms ? fabs((double)norms[k]) : 1.0;
}

/* Of rows k0.. and columns j0..: squares, each times its input's. One element's order is that of its magnitude. */
static double score_of(const esmm_matrix *b, const float *norms, int64_t k0, int64_t rows, int64_t j0, int64_t cols)
{
  double sum = 0;
  bool any = false;
  for (int64_t k = k0; k < k0 + rows && k < b->rows; k++)
    for (int64_t j = j0; j < j0 + cols && j < b->cols; j++) {
      const double x = fabs(th_get(b, k, j)) * norm_at(norms, k);
      sum += x * x;
      any = any || th_get(b, k, j) != 0.0;
    }
  return any ? isnan(sum) ? (double)INFINITY : sum : -1.0; /* zeros last */
}

static void drop(esmm_matrix *b, int64_t k0, int64_t rows, int64_t j0, int64_t cols)
{
  for (int64_t k = k0; k < k0 + rows && k < b->rows; k++)
    for (int64_t j = j0; j < j0 + cols && j < b->cols; j++)
      th_set(b, k, j, 0.0);
}

static void oracle_nm(esmm_matrix *b, int n, int m, int cols, const float *norms)
{
  for (int64_t j0 = 0; j0 < b->cols; j0 += cols)
    for (int64_t k0 = 0; k0 < b->rows; k0 += m) {
      ranked order[32];
      int count = 0;
      for (int64_t k = k0; k < k0 + m && k < b->rows; k++, count++)
        order[count] = (ranked){score_of(b, norms, k, 1, j0, cols), k};
      qsort(order, (size_t)count, sizeof order[0], by_rank);
      for (int i = n; i < count; i++)
        drop(b, order[i].place, 1, j0, cols);
    }
}

static void oracle_blocks(esmm_matrix *b, int rows, int cols, double density, const float *norms)
{
  const int64_t levels = (b->rows + rows - 1) / rows, strips = (b->cols + cols - 1) / cols, all = levels * strips;
  ranked *order = malloc((size_t)(all + 1) * sizeof *order);
  assert_non_null(order);
  for (int64_t i = 0; i < all; i++)
    order[i] = (ranked){score_of(b, norms, i / strips * rows, rows, i % strips * cols, cols), i};
  qsort(order, (size_t)all, sizeof *order, by_rank);
  for (int64_t i = (int64_t)floor(density * (double)all + 0.5); i < all; i++)
    drop(b, order[i].place / strips * rows, rows, order[i].place % strips * cols, cols);
  free(order);
}

/* b was pruned from before: only zeros were made, the report counts them, and it is what the oracle makes. */
static void expect_pruned(const char *what, const esmm_matrix *before, const esmm_matrix *b, const esmm_matrix *oracle,
                          const esmm_prune_report *report)
{
  int64_t kept = 0, dropped = 0;
  double norm = 0, norm_dropped = 0;
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++) {
      const double was = th_get(before, k, j), is = th_get(b, k, j), should = th_get(oracle, k, j);
      if (!(is == should || (isnan(is) && isnan(should))))
        fail_msg("%s: (%lld, %lld) was %g, is %g, should be %g", what, (long long)k, (long long)j, was, is, should);
      norm += was * was;
      if (was == 0.0)
        continue;
      kept += is != 0.0;
      dropped += is == 0.0;
      norm_dropped += is == 0.0 ? was * was : 0.0;
    }
  assert_int_equal(report->kept, kept);
  assert_int_equal(report->dropped, dropped);
  if (!(fabs(report->norm - sqrt(norm)) <= 1e-12 * sqrt(norm)) && !isnan(norm) && !isinf(norm))
    fail_msg("%s: norm is %.17g, should be %.17g", what, report->norm, sqrt(norm));
  if (!(fabs(report->norm_dropped - sqrt(norm_dropped)) <= 1e-12 * sqrt(norm_dropped)))
    fail_msg("%s: norm dropped is %.17g, should be %.17g", what, report->norm_dropped, sqrt(norm_dropped));
}

typedef struct trio {
  th_arena arena;
  esmm_matrix b, before, oracle;
} trio;

/* Many equal magnitudes, so that ties are met, and zeros among them. */
static void make(trio *t, int64_t rows, int64_t cols, esmm_dtype dtype, int variant)
{
  th_arena_create(&t->arena, (size_t)(rows + 8) * (size_t)(cols + 8) * 4);
  th_matrix_place(&t->arena, &t->b, rows, cols, variant % 2 * 3, dtype, (esmm_order)(variant / 2 % 2));
  t->before = th_matrix_alloc(rows, cols, dtype);
  t->oracle = th_matrix_alloc(rows, cols, dtype);
  th_rng rng = {(uint64_t)(rows * 131 + cols * 7 + variant)};
  for (int64_t k = 0; k < rows; k++)
    for (int64_t j = 0; j < cols; j++) {
      const int64_t draw = th_below(&rng, 8);
      const double x = variant % 3 == 0 ? (double)(draw - 4) / 2 : th_unit(&rng) - 0.5;
      th_set(&t->b, k, j, x);
      th_set(&t->before, k, j, x);
      th_set(&t->oracle, k, j, x);
    }
}

static void unmake(trio *t)
{
  assert_true(th_guards_intact(&t->arena));
  th_arena_free(&t->arena);
  free(t->before.data);
  free(t->oracle.data);
}

/* Powers of two, so that products with the test's values tie as well. A few inputs never come. */
static const float *norms_for(int variant)
{
  static float norms[400];
  th_rng rng = {(uint64_t)variant};
  for (int i = 0; i < 400; i++) {
    const int64_t draw = th_below(&rng, 5);
    norms[i] = draw == 0 ? i % 2 ? 0.0f : -0.0f : draw < 3 ? 1.0f : draw == 3 ? 2.0f : 0.5f;
  }
  return variant % 4 < 2 ? NULL : norms;
}

static void nm_keeps_the_largest(void **state)
{
  esmm_ctx *ctx = *state;
  static const int patterns[][2] = {{1, 1}, {2, 4}, {1, 4}, {4, 8}, {8, 16}, {2, 8}, {8, 32}, {3, 7}, {5, 5}};
  static const int widths[] = {1, 4, 32};
  for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++)
    for (int variant = 0; variant < 24; variant++) {
      const int n = patterns[p][0], m = patterns[p][1], width = widths[variant % 3];
      trio t;
      make(&t, variant % 5 == 0 ? m - 1 : 67, 41, (esmm_dtype)(variant % 3), variant);
      const float *norms = norms_for(variant);
      const esmm_prune_opts opts = {.size = sizeof opts,
                                    .format.kind = ESMM_FORMAT_NM,
                                    .format.keep = n,
                                    .format.group = m,
                                    .format.group_cols = width,
                                    .input_norms = norms};
      esmm_prune_report report = {.size = sizeof report};
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK)
        fail_msg("prune: %s", esmm_ctx_error(ctx));
      oracle_nm(&t.oracle, n, m, width, norms);
      expect_pruned("nm", &t.before, &t.b, &t.oracle, &report);
      int64_t k, col;
      assert_int_equal(esmm_format_check(ctx, &t.b, &opts.format, &k, &col), ESMM_OK);
      assert_int_equal(k, -1);
      const esmm_prepare_opts prepared = {.size = sizeof prepared,
                                          .format.kind = ESMM_FORMAT_NM,
                                          .format.keep = n,
                                          .format.group = m,
                                          .format.group_cols = width};
      esmm_weights *w = NULL;
      if (esmm_prepare(ctx, &t.b, &prepared, &w) != ESMM_OK)
        fail_msg("prepare: %s", esmm_ctx_error(ctx));
      esmm_weights_free(w);
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK || report.dropped != 0) /* what fits stays */
        fail_msg("pruned again: %lld more dropped", (long long)report.dropped);
      unmake(&t);
    }
}

/* Written by hand: ties go to the lower index, and norms change the choice. */
static void the_choice_is_pinned(void **state)
{
  esmm_ctx *ctx = *state;
  float b[8] = {-1, 2, 1, 2, 3, 3, -3, 3};
  esmm_matrix m = {.data = b, .rows = 8, .cols = 1};
  esmm_prune_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_NM};
  esmm_prune_report report = {.size = sizeof report};
  assert_int_equal(esmm_prune(ctx, &m, &opts, &report), ESMM_OK);
  const float kept[8] = {0, 2, 0, 2, 3, 3, 0, 0};
  assert_memory_equal(b, kept, sizeof b);
  assert_int_equal(report.kept, 4);
  assert_int_equal(report.dropped, 4);
  assert_true(fabs(report.norm - sqrt(46)) < 1e-12 && fabs(report.norm_dropped - sqrt(20)) < 1e-12);

  float again[4] = {1, 2, 3, 4};
  const float norms[4] = {9, 1, 1, -0.0f};
  m = (esmm_matrix){.data = again, .rows = 4, .cols = 1};
  opts.input_norms = norms;
  assert_int_equal(esmm_prune(ctx, &m, &opts, NULL), ESMM_OK);
  const float weighted[4] = {1, 0, 3, 0};
  assert_memory_equal(again, weighted, sizeof again);

  float odd[4] = {1e30f, (float)NAN, (float)INFINITY, 5};
  m.data = odd;
  opts.input_norms = NULL;
  assert_int_equal(esmm_prune(ctx, &m, &opts, NULL), ESMM_OK);
  assert_true(odd[0] == 0 && isnan(odd[1]) && isinf(odd[2]) && odd[3] == 0);

  float blocks[4] = {1, 2, 2, 1}; /* 2 x 2 in single blocks: of the equal ones the upper row, then the left column */
  m = (esmm_matrix){.data = blocks, .rows = 2, .cols = 2};
  opts = (esmm_prune_opts){.size = sizeof opts,
                           .format.kind = ESMM_FORMAT_BSR,
                           .format.block_rows = 1,
                           .format.block_cols = 1,
                           .density = 0.75};
  assert_int_equal(esmm_prune(ctx, &m, &opts, NULL), ESMM_OK);
  const float three[4] = {1, 2, 2, 0};
  assert_memory_equal(blocks, three, sizeof blocks);
  opts.density = 0.25;
  assert_int_equal(esmm_prune(ctx, &m, &opts, NULL), ESMM_OK);
  const float one[4] = {0, 2, 0, 0};
  assert_memory_equal(blocks, one, sizeof blocks);

  float edge[3] = {1, 1.5f, 3}; /* 1 x 2 blocks, of which the last is cut to one element: 3 * 3 against 1 + 1.5 * 1.5 */
  m = (esmm_matrix){.data = edge, .rows = 1, .cols = 3};
  opts.format.block_cols = 2;
  opts.density = 0.5;
  assert_int_equal(esmm_prune(ctx, &m, &opts, NULL), ESMM_OK);
  const float last[3] = {0, 0, 3};
  assert_memory_equal(edge, last, sizeof edge);
}

static void blocks_keep_the_largest(void **state)
{
  esmm_ctx *ctx = *state;
  static const int sizes[][2] = {{1, 1}, {16, 16}, {32, 8}, {7, 20}, {256, 256}, {4, 7}}; /* of the last one a corner */
  static const double densities[] = {0.0, 0.5, 0.125, 1.0, 0.31};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
    for (int variant = 0; variant < 20; variant++) {
      const double density = densities[variant % 5];
      trio t;
      make(&t, 93, 50, (esmm_dtype)(variant % 3), variant);
      const float *norms = norms_for(variant);
      const esmm_prune_opts opts = {.size = sizeof opts,
                                    .format.kind = ESMM_FORMAT_BSR,
                                    .format.block_rows = sizes[s][0],
                                    .format.block_cols = sizes[s][1],
                                    .density = density,
                                    .input_norms = norms};
      esmm_prune_report report = {.size = sizeof report};
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK)
        fail_msg("prune: %s", esmm_ctx_error(ctx));
      oracle_blocks(&t.oracle, sizes[s][0], sizes[s][1], density, norms);
      expect_pruned("blocks", &t.before, &t.b, &t.oracle, &report);
      unmake(&t);
    }
}

/* ---- top-N ---- */

typedef struct top_case {
  int64_t top;
  double density;
  esmm_prune_scope scope;
} top_case;

static const top_case TOPS[] = {{1, 0, ESMM_PRUNE_COLUMN},    {7, 0, ESMM_PRUNE_COLUMN},   {500, 0, ESMM_PRUNE_COLUMN},
                                {0, 0.3, ESMM_PRUNE_COLUMN},  {0, 1.0, ESMM_PRUNE_COLUMN}, {0, 1e-9, ESMM_PRUNE_COLUMN},
                                {1, 0, ESMM_PRUNE_MATRIX},    {900, 0, ESMM_PRUNE_MATRIX}, {0, 0.5, ESMM_PRUNE_MATRIX},
                                {99999, 0, ESMM_PRUNE_MATRIX}};

static int64_t kept_of(const top_case *c, int64_t count)
{
  const int64_t keep = c->top > 0 ? c->top : (int64_t)floor(c->density * (double)count + 0.5);
  return keep < count ? keep : count;
}

/* Elements of columns j0 to j1, best first. Larger |b| times norm, then the lower k, then the lower column. */
static ranked *ranking(const esmm_matrix *b, const float *norms, int64_t j0, int64_t j1)
{
  ranked *order = malloc((size_t)(b->rows * (j1 - j0) + 1) * sizeof *order);
  assert_non_null(order);
  int64_t count = 0;
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = j0; j < j1; j++) {
      const double x = fabs(th_get(b, k, j)), score = x * norm_at(norms, k);
      order[count++] = (ranked){x == 0 ? -1.0 : isnan(score) ? (double)INFINITY : score, k * b->cols + j};
    }
  qsort(order, (size_t)count, sizeof *order, by_rank);
  return order;
}

/* What is left of element i of b before the factor: shrunk by the score `less`, whatever rounding does. */
static double left_of(const esmm_matrix *b, const float *norms, int64_t i, double less)
{
  const double x = th_get(b, i / b->cols, i % b->cols);
  if (less <= 0)
    return x;
  const double left = fabs(x) - less / norm_at(norms, i / b->cols);
  return left > 0 ? copysign(left, x) : 0;
}

/* Sets out[k * n + j] for `count` elements in the order of their ranks, of which `keep` stay; adds to *fit and *own. */
static void oracle_soft(const esmm_matrix *b, const float *norms, const ranked *order, int64_t count, int64_t keep,
                        double *out, double *fit, double *own)
{
  const bool finite = count == 0 || !isinf(order[0].score);
  const double less = keep < count && finite ? order[keep].score : 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = order[i].place;
    out[at] = i < keep ? left_of(b, norms, at, less) : 0;
    *fit += finite ? th_get(b, at / b->cols, at % b->cols) * out[at] : 0;
    *own += finite ? out[at] * out[at] : 0;
  }
}

static void oracle_top(const esmm_matrix *b, const float *norms, const top_case *c, double *out, double *fit,
                       double *own)
{
  const bool whole = c->scope == ESMM_PRUNE_MATRIX;
  for (int64_t j = 0; j < (whole ? 1 : b->cols); j++) {
    const int64_t count = whole ? b->rows * b->cols : b->rows;
    ranked *order = ranking(b, norms, whole ? 0 : j, whole ? b->cols : j + 1);
    oracle_soft(b, norms, order, count, kept_of(c, count), out, fit, own);
    free(order);
  }
}

static esmm_prune_opts top_opts(const top_case *c, const float *norms, int soft)
{
  return (esmm_prune_opts){.size = sizeof(esmm_prune_opts),
                           .density = c->density,
                           .top = c->top,
                           .scope = c->scope,
                           .input_norms = norms,
                           .soft = soft};
}

static void top_keeps_the_largest(void **state)
{
  esmm_ctx *ctx = *state;
  for (size_t c = 0; c < sizeof TOPS / sizeof TOPS[0]; c++)
    for (int variant = 0; variant < 24; variant++) {
      trio t;
      make(&t, variant % 5 == 0 ? 5 : 267, 41, (esmm_dtype)(variant % 3), variant);
      const float *norms = norms_for(variant);
      const esmm_prune_opts opts = top_opts(&TOPS[c], norms, 0);
      const bool whole = opts.scope == ESMM_PRUNE_MATRIX;
      esmm_prune_report report = {.size = sizeof report};
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK)
        fail_msg("prune: %s", esmm_ctx_error(ctx));
      for (int64_t j = 0; j < (whole ? 1 : t.b.cols); j++) {
        const int64_t count = whole ? t.b.rows * t.b.cols : t.b.rows;
        ranked *order = ranking(&t.before, norms, whole ? 0 : j, whole ? t.b.cols : j + 1);
        for (int64_t i = kept_of(&TOPS[c], count); i < count; i++)
          drop(&t.oracle, order[i].place / t.b.cols, 1, order[i].place % t.b.cols, 1);
        free(order);
      }
      expect_pruned("top", &t.before, &t.b, &t.oracle, &report);
      unmake(&t);
    }
}

/* ---- the soft threshold ---- */

static void expect_soft(const char *what, const trio *t, const double *out, double fit, double own,
                        const esmm_prune_report *report)
{
  static const double steps[] = {0x1p-23, 0x1p-7, 0x1p-10}; /* of F32, BF16, F16: more than rounding takes */
  const double factor = own > 0 ? (double)(float)(fit / own) : 1, step = steps[t->b.dtype];
  double difference = 0;
  int64_t kept = 0, dropped = 0;
  assert_true(factor >= 1);
  for (int64_t k = 0; k < t->b.rows; k++)
    for (int64_t j = 0; j < t->b.cols; j++) {
      const double was = th_get(&t->before, k, j), is = th_get(&t->b, k, j), should = factor * out[k * t->b.cols + j];
      if (!(fabs(is - should) <= step * fabs(should) + 1e-7 * (t->b.dtype == ESMM_F16)))
        fail_msg("%s: (%lld, %lld) was %g, is %.9g, should be %.9g", what, (long long)k, (long long)j, was, is, should);
      difference += (was - is) * (was - is);
      kept += was != 0 && is != 0;
      dropped += was != 0 && is == 0;
    }
  assert_int_equal(report->kept, kept);
  assert_int_equal(report->dropped, dropped);
  if (!(fabs(report->norm_dropped - sqrt(difference)) <= 1e-12 * sqrt(difference)))
    fail_msg("%s: norm dropped is %.17g, should be %.17g", what, report->norm_dropped, sqrt(difference));
}

static void soft_top_shrinks(void **state)
{
  esmm_ctx *ctx = *state;
  for (size_t c = 0; c < sizeof TOPS / sizeof TOPS[0]; c++)
    for (int variant = 0; variant < 24; variant++) {
      trio t;
      make(&t, variant % 5 == 0 ? 5 : 267, 41, (esmm_dtype)(variant % 3), variant);
      const float *norms = norms_for(variant);
      const esmm_prune_opts opts = top_opts(&TOPS[c], norms, 1);
      esmm_prune_report report = {.size = sizeof report};
      double *out = calloc((size_t)(t.b.rows * t.b.cols), sizeof *out), fit = 0, own = 0;
      assert_non_null(out);
      oracle_top(&t.before, norms, &TOPS[c], out, &fit, &own);
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK)
        fail_msg("prune: %s", esmm_ctx_error(ctx));
      expect_soft("soft top", &t, out, fit, own, &report);
      free(out);
      unmake(&t);
    }
}

static void soft_nm_shrinks(void **state)
{
  esmm_ctx *ctx = *state;
  static const int patterns[][2] = {{2, 4}, {1, 4}, {4, 8}, {3, 7}, {8, 32}, {5, 5}};
  for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++)
    for (int variant = 0; variant < 24; variant++) {
      const int n = patterns[p][0], m = patterns[p][1];
      trio t;
      make(&t, variant % 5 == 0 ? m - 1 : 267, 41, (esmm_dtype)(variant % 3), variant);
      const float *norms = norms_for(variant);
      double *out = calloc((size_t)(t.b.rows * t.b.cols), sizeof *out), fit = 0, own = 0;
      assert_non_null(out);
      for (int64_t j = 0; j < t.b.cols; j++)
        for (int64_t k0 = 0; k0 < t.b.rows; k0 += m) {
          ranked order[32];
          int count = 0;
          for (int64_t k = k0; k < k0 + m && k < t.b.rows; k++, count++) {
            const double x = fabs(th_get(&t.before, k, j));
            order[count] = (ranked){x == 0 ? -1.0 : x * norm_at(norms, k), k * t.b.cols + j};
          }
          qsort(order, (size_t)count, sizeof order[0], by_rank);
          oracle_soft(&t.before, norms, order, count, n < count ? n : count, out, &fit, &own);
        }
      const esmm_prune_opts opts = {.size = sizeof opts,
                                    .format = {.kind = ESMM_FORMAT_NM, .keep = n, .group = m},
                                    .input_norms = norms,
                                    .soft = 1};
      esmm_prune_report report = {.size = sizeof report};
      if (esmm_prune(ctx, &t.b, &opts, &report) != ESMM_OK)
        fail_msg("prune: %s", esmm_ctx_error(ctx));
      expect_soft("soft nm", &t, out, fit, own, &report);
      int64_t k, col;
      assert_int_equal(esmm_format_check(ctx, &t.b, &opts.format, &k, &col), ESMM_OK);
      assert_int_equal(k, -1);
      free(out);
      unmake(&t);
    }
}

/* By hand. Of 4, 3, 2, 1 two stay less 2, so 2 and 1; times (4 * 2 + 3 * 1) / (2 * 2 + 1 * 1). */
static void top_and_soft_are_pinned(void **state)
{
  esmm_ctx *ctx = *state;
  float b[4] = {4, -3, 2, 1};
  esmm_matrix m = {.data = b, .rows = 4, .cols = 1};
  const esmm_prune_opts nm = {.size = sizeof nm, .format.kind = ESMM_FORMAT_NM, .soft = 1};
  const float shrunk[4] = {2.2f * 2, -2.2f, 0, 0};
  esmm_prune_report report = {.size = sizeof report};
  assert_int_equal(esmm_prune(ctx, &m, &nm, &report), ESMM_OK);
  assert_memory_equal(b, shrunk, sizeof b);
  assert_true(report.kept == 2 && report.dropped == 2 && report.norm_dropped < report.norm);
  assert_int_equal(esmm_prune(ctx, &m, &nm, &report), ESMM_OK); /* what fits stays as it is */
  assert_memory_equal(b, shrunk, sizeof b);
  assert_true(report.dropped == 0 && report.norm_dropped == 0);

  float ties[6] = {1, -2, 2, 2, 2, 1}; /* 3 x 2: of the equal ones the upper, then the left */
  m = (esmm_matrix){.data = ties, .rows = 3, .cols = 2};
  const esmm_prune_opts whole = {.size = sizeof whole, .top = 2, .scope = ESMM_PRUNE_MATRIX};
  const float first[6] = {0, -2, 2, 0, 0, 0};
  assert_int_equal(esmm_prune(ctx, &m, &whole, NULL), ESMM_OK);
  assert_memory_equal(ties, first, sizeof ties);

  float columns[6] = {1, -2, 2, 2, 2, 1};
  m.data = columns;
  const esmm_prune_opts one = {.size = sizeof one, .top = 1};
  const float each[6] = {0, -2, 2, 0, 0, 0};
  assert_int_equal(esmm_prune(ctx, &m, &one, NULL), ESMM_OK);
  assert_memory_equal(columns, each, sizeof columns);

  float odd[8] = {1, (float)INFINITY, 3, (float)NAN, 4, 3, 2, 1}; /* the first group does not shrink */
  m = (esmm_matrix){.data = odd, .rows = 8, .cols = 1};
  assert_int_equal(esmm_prune(ctx, &m, &nm, NULL), ESMM_OK);
  assert_true(odd[0] == 0 && isinf(odd[1]) && odd[2] == 0 && isnan(odd[3]));
  assert_true(odd[4] == 2.2f * 2 && odd[5] == 2.2f && odd[6] == 0 && odd[7] == 0);
}

static void threads_make_no_difference(void **state)
{
  (void)state;
  static const esmm_prune_opts all[] = {
      {.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM},
      {.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .soft = 1},
      {.size = sizeof(esmm_prune_opts), .top = 50, .soft = 1},
      {.size = sizeof(esmm_prune_opts), .density = 0.4, .scope = ESMM_PRUNE_MATRIX, .soft = 1},
  };
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    esmm_prune_report first = {0};
    esmm_matrix pruned = th_matrix_alloc(528, 200, ESMM_F32);
    for (int threads = 1; threads <= 4; threads++) {
      esmm_ctx *ctx = th_ctx_on("cpu", threads);
      esmm_matrix b = th_matrix_alloc(528, 200, ESMM_F32);
      th_fill(&b, 9, 1.0, false);
      esmm_prune_report report = {.size = sizeof report};
      assert_int_equal(esmm_prune(ctx, &b, &all[i], &report), ESMM_OK);
      if (threads == 1) {
        first = report;
        memcpy(pruned.data, b.data, th_matrix_bytes(&b));
      }
      assert_memory_equal(&first, &report, sizeof report);
      assert_memory_equal(pruned.data, b.data, th_matrix_bytes(&b));
      free(b.data);
      esmm_ctx_free(ctx);
    }
    free(pruned.data);
  }
}

static void empty_matrices(void **state)
{
  esmm_ctx *ctx = *state;
  for (int format = ESMM_FORMAT_DENSE; format <= ESMM_FORMAT_NM; format++)
    for (int side = 0; side < 6; side++) {
      esmm_matrix b = {.rows = side % 3 == 1 ? 5 : 0, .cols = side % 3 == 2 ? 5 : 0};
      const esmm_prune_opts opts = {.size = sizeof opts,
                                    .format.kind = (esmm_format_kind)format,
                                    .density = 0.5,
                                    .soft = side >= 3 && format != ESMM_FORMAT_BSR};
      esmm_prune_report report = {.size = sizeof report, .kept = 7, .norm = 7};
      assert_int_equal(esmm_prune(ctx, &b, &opts, &report), ESMM_OK);
      assert_true(report.kept == 0 && report.dropped == 0 && report.norm == 0 && report.norm_dropped == 0);
    }
}

static void bad_options(void **state)
{
  esmm_ctx *ctx = *state;
  static const float negative[4] = {1, 1, -1, 1}, infinite[4] = {1, (float)INFINITY, 1, 1}, nan[4] = {(float)NAN};
  static const struct {
    esmm_prune_opts opts;
    const char *word1, *word2;
  } bad[] = {
      {{.size = sizeof(esmm_prune_opts)}, "dense", "BSR"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = (esmm_format_kind)5}, "format", "5"},
      {{.size = sizeof(esmm_prune_opts) + 8, .format.kind = ESMM_FORMAT_NM}, "size", ""},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .format.keep = 3, .format.group = 2},
       "3:2",
       ""},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_BSR, .format.block_rows = 300},
       "block_rows",
       "300"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .format.reserved = {0, 9}}, "reserved[1]", "9"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_BSR, .density = 1.5}, "density", "1.5"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_BSR, .density = -0.1}, "density", "-0.1"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_BSR, .density = (double)NAN}, "density", "nan"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .input_norms = negative},
       "input_norms[2]",
       "-1"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .input_norms = infinite},
       "input_norms[1]",
       "inf"},
      {{.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .input_norms = nan}, "input_norms[0]", "nan"},
  };
  static const struct {
    esmm_prune_opts opts;
    esmm_status status;
    const char *word1, *word2;
  } more[] = {
      {{.top = -1}, ESMM_ERR_ARGUMENT, "opts->top", "-1"},
      {{.top = 3, .format.kind = ESMM_FORMAT_NM}, ESMM_ERR_ARGUMENT, "opts->top", "NM"},
      {{.top = 3, .density = 0.5}, ESMM_ERR_ARGUMENT, "opts->top", "opts->density"},
      {{.density = 1.5}, ESMM_ERR_ARGUMENT, "opts->density", "1.5"},
      {{.density = -0.5}, ESMM_ERR_ARGUMENT, "opts->density", "-0.5"},
      {{.top = 1, .scope = (esmm_prune_scope)2}, ESMM_ERR_ARGUMENT, "opts->scope", "2"},
      {{.scope = ESMM_PRUNE_MATRIX, .format.kind = ESMM_FORMAT_NM}, ESMM_ERR_ARGUMENT, "opts->scope", "NM"},
      {{.top = 1, .soft = 2}, ESMM_ERR_ARGUMENT, "opts->soft", "2"},
      {{.density = 0.5, .soft = 1, .format.kind = ESMM_FORMAT_BSR}, ESMM_ERR_UNSUPPORTED, "opts->soft", "BSR"},
      {{.soft = 1, .format = {.kind = ESMM_FORMAT_NM, .group_cols = 4}}, ESMM_ERR_UNSUPPORTED, "soft", "group_cols"},
  };
  float data[16];
  for (int i = 0; i < 16; i++)
    data[i] = (float)i;
  esmm_matrix b = {.data = data, .rows = 4, .cols = 4};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    th_expect(bad[i].word1, esmm_prune(ctx, &b, &bad[i].opts, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
              bad[i].word1, bad[i].word2);
  for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
    esmm_prune_opts opts = more[i].opts;
    opts.size = sizeof opts;
    th_expect(more[i].word1, esmm_prune(ctx, &b, &opts, NULL), more[i].status, esmm_ctx_error(ctx), more[i].word1,
              more[i].word2);
  }
  const esmm_prune_opts good = {.size = sizeof good, .format.kind = ESMM_FORMAT_NM};
  esmm_prune_report unsized = {0};
  th_expect("report", esmm_prune(ctx, &b, &good, &unsized), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "report->size",
            "0");
  th_expect("b", esmm_prune(ctx, NULL, &good, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "b is NULL", "");
  assert_int_equal(esmm_prune(NULL, &b, &good, NULL), ESMM_ERR_ARGUMENT);
  for (int i = 0; i < 16; i++)
    assert_true(data[i] == (float)i);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nm_keeps_the_largest),    cmocka_unit_test(the_choice_is_pinned),
      cmocka_unit_test(blocks_keep_the_largest), cmocka_unit_test(threads_make_no_difference),
      cmocka_unit_test(empty_matrices),          cmocka_unit_test(bad_options),
      cmocka_unit_test(top_keeps_the_largest),   cmocka_unit_test(soft_top_shrinks),
      cmocka_unit_test(soft_nm_shrinks),         cmocka_unit_test(top_and_soft_are_pinned),
  };
  return cmocka_run_group_tests_name("prune", tests, th_cpu_set_up, th_cpu_tear_down);
}
