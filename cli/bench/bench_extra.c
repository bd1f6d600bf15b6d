/*
 * bench_extra.c: what a tiled kernel would skip, beside theory; and the speed of extraction beside memcpy's.
 *
 * The closed forms are exact for generated operands, which are independent of each other: the generator gives the
 * probability that a k is alive for a strip, a joint k has the product of both, and a stretch is skipped when all its
 * k's are dead. Short last strips and stretches count as short.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- skip statistics ---- */

/* The strips of one operand: `count` of height `height`, but for a last one of `last`. */
typedef struct strips {
  int64_t count, height, last;
} strips;

static strips strips_of(int64_t rows, int64_t height)
{
  int64_t count = (rows + height - 1) / height;
  return (strips){count, height, rows - (count - 1) * height};
}

/* The probability that k is alive in a strip of `rows` rows; NAN where the generator has no closed form. */
static double alive(const cli_source *source, int64_t rows, int64_t k)
{
  if (source->path)
    return NAN;
  const esmm_generator *g = &source->generator;
  switch (g->kind) {
  case ESMM_GEN_DENSE:
    return 1;
  case ESMM_GEN_RANDOM:
    return 1 - pow(1 - g->density, (double)rows);
  case ESMM_GEN_BLOCKWISE:
    return g->density;
  case ESMM_GEN_PATTERN:
    return g->pattern[k % 8] == '1';
  case ESMM_GEN_ACTIVATIONS:
    break;
  }
  return NAN;
}

static double expected_for(const cli_problem *p, int64_t rows_a, int64_t rows_b, int64_t stretch)
{
  double skipped = 0, dead = 1;
  int64_t stretches = 0;
  for (int64_t k = 0; k < p->k; k++) {
    dead *= 1 - alive(&p->a, rows_a, k) * alive(&p->b, rows_b, k);
    if ((k + 1) % stretch == 0 || k + 1 == p->k) {
      skipped += dead;
      dead = 1;
      stretches++;
    }
  }
  return skipped / (double)stretches;
}

static double expected_skip(const cli_problem *p, strips a, strips b, int64_t stretch)
{
  double sum = 0;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) {
      double weight = (double)(i ? 1 : a.count - 1) * (double)(j ? 1 : b.count - 1);
      if (weight > 0)
        sum += weight * expected_for(p, i ? a.last : a.height, j ? b.last : b.height, stretch);
    }
  return sum / ((double)a.count * (double)b.count);
}

static void add_skip_row(const bench *b, bench_report *report, const char *level, int64_t stretch, double measured,
                         double expected)
{
  cli_table *t = report->skip_table;
  if (b->sweep_count)
    cli_table_cell(t, CLI_PLAIN, "%s", cli_percent(b->problem.density_now));
  cli_table_cell(t, CLI_PLAIN, "%s", level);
  cli_table_cell(t, CLI_PLAIN, "%lld", (long long)stretch);
  cli_table_cell(t, CLI_PLAIN, "%.5f", measured);
  cli_table_cell(t, CLI_PLAIN, isnan(expected) ? "-" : "%.5f", expected);
  cli_table_cell(t, CLI_PLAIN, isnan(expected) ? "-" : "%+.5f", measured - expected);
}

int bench_skip_stats(const bench *b, const bench_data *data, bench_report *report)
{
  static const char *const heads[] = {"density", "level", "k's", "skipped", "closed form", "difference"};
  const cli_problem *p = &b->problem;
  esmm_pattern *pattern_a = NULL, *pattern_b = NULL;
  esmm_skip_stats stats = {.size = sizeof stats, .block_k = 64, .warp_k = 8};
  esmm_status status = esmm_pattern_extract(b->ctx, &data->a[0].m, p->strip, &pattern_a);
  if (status == ESMM_OK)
    status = esmm_pattern_extract_b(b->ctx, &data->b.m, p->strip, &pattern_b);
  if (status == ESMM_OK)
    status = esmm_pattern_skip_stats(b->ctx, pattern_a, pattern_b, &stats);
  esmm_pattern_free(pattern_a);
  esmm_pattern_free(pattern_b);
  if (status != ESMM_OK)
    return cli_status(b->ctx, "--skip-stats", status);

  if (!report->skip_table)
    report->skip_table = b->sweep_count ? cli_table_new("rlrrrr", heads) : cli_table_new("lrrrr", heads + 1);
  strips a = strips_of(data->m, p->strip), columns = strips_of(data->n, p->strip);
  cli_table_rule(report->skip_table);
  add_skip_row(b, report, "block", stats.block_k, stats.block_skipped, expected_skip(p, a, columns, stats.block_k));
  add_skip_row(b, report, "warp", stats.warp_k, stats.warp_skipped, expected_skip(p, a, columns, stats.warp_k));
  add_skip_row(b, report, "dot", 1, stats.dot_skipped, expected_skip(p, a, columns, 1));
  return CLI_GO;
}

/* ---- extraction ---- */

/* Every bit against the definition. */
static bool pattern_is_right(esmm_ctx *ctx, const esmm_pattern *pattern, const float *a, int64_t m, int64_t k)
{
  const esmm_pattern_info info = cli_pattern(ctx, pattern);
  const int64_t height = info.strip_rows;
  unsigned char *any = cli_alloc((size_t)k, 1);
  uint64_t *bits = cli_alloc((size_t)info.words + 1, sizeof *bits);
  bool right = info.strips == (m + height - 1) / height;
  for (int64_t strip = 0; right && strip * height < m; strip++) {
    right = esmm_pattern_bits(ctx, pattern, strip, 1, bits) == ESMM_OK;
    memset(any, 0, (size_t)k);
    for (int64_t row = strip * height; row < m && row < (strip + 1) * height; row++)
      for (int64_t j = 0; j < k; j++)
        any[j] |= (unsigned char)(a[row * k + j] != 0);
    for (int64_t j = 0; j < k; j++)
      right = right && (bits[j / 64] >> (j % 64) & 1) == any[j];
  }
  free(bits);
  free(any);
  return right;
}

typedef struct extraction {
  io_matrix *a; /* [copies], read in turn */
  int copies;
  io_matrix to; /* memcpy's target */
} extraction;

static int make_extraction(const bench *b, const bench_data *data, extraction *e)
{
  const esmm_matrix *a = &data->a[0].m;
  int status = cli_matrix_alloc("--extraction", a->rows, a->cols, a->dtype, &e->to);
  e->copies = status == CLI_GO ? bench_copies(e->to.bytes) : 0;
  e->a = cli_alloc((size_t)e->copies, sizeof *e->a);
  for (int i = 0; i < e->copies && status == CLI_GO; i++)
    status = cli_matrix_convert(b->ctx, "--extraction", a, a->dtype, &e->a[i]);
  return status;
}

static void free_extraction(extraction *e)
{
  for (int i = 0; i < e->copies; i++)
    io_matrix_free(&e->a[i]);
  io_matrix_free(&e->to);
  free(e->a);
}

static void add_extraction_row(bench_report *report, const char *what, double seconds, double bytes, double copy)
{
  cli_table *t = report->extraction_table;
  cli_table_cell(t, CLI_PLAIN, "%s", what);
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * seconds, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e-9 * bytes / seconds, 3));
  cli_table_cell(t, CLI_PLAIN, "%.2f x", copy / seconds);
}

int bench_extraction(const bench *b, const bench_data *data, bench_report *report)
{
  enum { HEIGHTS = 4 };
  static const int64_t heights[HEIGHTS] = {1, 8, 16, 32};
  static const char *const heads[] = {"what", "ms", "GB/s of A", "memcpy's speed"};
  extraction e = {0};
  int status = make_extraction(b, data, &e), calls = b->runs < 20 ? 20 : (int)b->runs;
  double *seconds[HEIGHTS + 1];
  for (int i = 0; i <= HEIGHTS; i++)
    seconds[i] = cli_alloc((size_t)calls, sizeof **seconds);

  int turn = 0;
  for (int round = -1; round < calls && status == CLI_GO; round++) /* round -1 warms up and checks */
    for (int i = 0; i <= HEIGHTS && status == CLI_GO; i++) {
      const io_matrix *a = &e.a[turn++ % e.copies];
      esmm_pattern *pattern = NULL;
      esmm_status extracted = ESMM_OK;
      double start = cli_now();
      if (i == HEIGHTS)
        extracted = esmm_matrix_copy(b->ctx, &a->m, &e.to.m); /* memcpy, by the same threads */
      else
        extracted = esmm_pattern_extract(b->ctx, &a->m, heights[i], &pattern);
      if (round >= 0)
        seconds[i][round] = cli_now() - start;
      if (extracted != ESMM_OK)
        status = cli_status(b->ctx, "--extraction", extracted);
      else if (round < 0 && pattern && !pattern_is_right(b->ctx, pattern, data->plain_a[0].m.data, data->m, data->k))
        status = cli_failed("--extraction: the bitmaps of strips of %d rows are WRONG", (int)heights[i]);
      esmm_pattern_free(pattern);
    }
  if (status == CLI_GO) {
    double bytes = (double)e.to.bytes, copy = bench_median(seconds[HEIGHTS], calls);
    report->extraction_table = cli_table_new("lrrr", heads);
    add_extraction_row(report, "memcpy of A", copy, bytes, copy);
    for (int i = 0; i < HEIGHTS; i++) {
      char what[48];
      snprintf(what, sizeof what, "strips of %d row%s", (int)heights[i], heights[i] == 1 ? "" : "s");
      add_extraction_row(report, what, bench_median(seconds[i], calls), bytes, copy);
    }
  }
  for (int i = 0; i <= HEIGHTS; i++)
    free(seconds[i]);
  free_extraction(&e);
  return status;
}
