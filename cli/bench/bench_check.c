/*
 * bench_check.c: is the product right?
 *
 * Small problems are checked whole. Of large ones, rows spread over all of C are, each with every column: a kernel's
 * tiles and strips are all crossed by some row. The sums are made in float64, where products of fp32 are exact, from
 * the same fp32 values the libraries get; no code of the library under test takes part. error_bound.h has the error
 * that each element may have.
 */
#include "bench.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FEWEST_ROWS = 16 };

/* One row in each of `count` equal stretches, at a place that moves, so that no multiple of a tile is missed. */
static int64_t sampled_row(int64_t m, int64_t count, int64_t i)
{
  int64_t first = (int64_t)((double)m * (double)i / (double)count);
  int64_t next = (int64_t)((double)m * (double)(i + 1) / (double)count);
  if (i == 0)
    return 0;
  if (i == count - 1)
    return m - 1;
  uint64_t mixed = ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
  return first + (int64_t)((mixed >> 33) % (uint64_t)(next > first ? next - first : 1));
}

/* The sums, the sums of magnitudes, and how many terms may differ from zero: A's nonzeros. */
static int64_t reference_row(int64_t k, int64_t n, const float *a, const float *b, double *restrict sum,
                             double *restrict magnitude)
{
  int64_t terms = 0;
  for (int64_t j = 0; j < n; j++)
    sum[j] = magnitude[j] = 0;
  for (int64_t p = 0; p < k; p++) {
    const double x = a[p];
    const float *row = b + p * n;
    if (x == 0)
      continue;
    terms++;
    for (int64_t j = 0; j < n; j++) {
      const double term = x * (double)row[j];
      sum[j] += term;
      magnitude[j] += fabs(term);
    }
  }
  return terms;
}

typedef struct reference_job {
  const bench_reference *to;
  int64_t k;
  const float *a, *b;
} reference_job;

static void make_row(void *arg, int64_t i)
{
  const reference_job *j = arg;
  const bench_reference *r = j->to;
  r->terms[i] =
      reference_row(j->k, r->n, j->a + r->rows[i] * j->k, j->b, r->values + i * r->n, r->magnitudes + i * r->n);
}

int bench_reference_make(int threads, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
                         bench_reference *reference)
{
  /* multiply-adds: some tenths of a second */
  const double budget = (double)(1 << 27) * (threads > 2 ? threads : 2);
  double per_row = (double)n * (double)k;
  int64_t rows = per_row > 0 && per_row * (double)m > budget ? (int64_t)(budget / per_row) : m;
  if (rows < FEWEST_ROWS)
    rows = FEWEST_ROWS;
  if (rows > m)
    rows = m;
  *reference = (bench_reference){.row_count = rows, .n = n};
  reference->rows = cli_alloc((size_t)rows, sizeof *reference->rows);
  reference->terms = cli_alloc((size_t)rows, sizeof *reference->terms);
  size_t values;
  if (__builtin_mul_overflow((size_t)rows, (size_t)n, &values))
    return cli_failed("the reference is too large");
  reference->values = cli_alloc(values, sizeof *reference->values);
  reference->magnitudes = cli_alloc(values, sizeof *reference->magnitudes);
  for (int64_t i = 0; i < rows; i++)
    reference->rows[i] = rows == m ? i : sampled_row(m, rows, i);

  reference_job job = {.to = reference, .k = k, .a = a, .b = b};
  cli_parallel(threads, rows, make_row, &job);
  bool finite = true;
  for (size_t i = 0; i < values; i++) {
    finite = finite && isfinite(reference->magnitudes[i]);
    reference->largest = fmax(reference->largest, fabs(reference->values[i]));
  }
  return finite && reference->largest <= FLT_MAX
             ? CLI_GO
             : cli_failed("the data holds NaN or Inf, or its products overflow: nothing to check against "
                          "(--no-check measures all the same)");
}

void bench_reference_free(bench_reference *reference)
{
  free(reference->rows);
  free(reference->terms);
  free(reference->values);
  free(reference->magnitudes);
  free(reference->gate_values);
  free(reference->gate_magnitudes);
  *reference = (bench_reference){0};
}

bench_error bench_error_find(const bench_reference *reference, const error_rule *rule, const float *c,
                             bool only_checked)
{
  bench_error worst = {0};
  double largest = 0, scale = 0;
  for (int64_t i = 0; i < reference->row_count; i++) {
    const float *got = c + (only_checked ? i : reference->rows[i]) * reference->n;
    const double *want = reference->values + i * reference->n, *magnitude = reference->magnitudes + i * reference->n;
    const double depth = error_depth(rule, (double)reference->terms[i]);
    for (int64_t j = 0; j < reference->n; j++) {
      double exact = want[j], off = 0;
      if (reference->finished)
        exact = bench_finish_exact(reference, rule, i, j, &off);
      else
        off = error_of_sum(rule, depth, magnitude[j]);
      const double error = fabs((double)got[j] - exact);
      const double allowed = error_when_stored(rule, off, exact);
      const double share = error_share(rule, (double)got[j], exact, allowed);
      scale = fmax(scale, fabs(exact));
      if (share > worst.share)
        worst = (bench_error){
            .share = share, .row = reference->rows[i], .col = j, .got = got[j], .want = exact, .allowed = allowed};
      if (!(error <= largest)) /* so that NaN counts too */
        largest = isnan(error) ? INFINITY : error;
    }
  }
  worst.relative = largest == 0 ? 0 : scale > 0 ? largest / scale : INFINITY;
  return worst;
}

uint64_t bench_bits(const bench_reference *reference, const float *c, bool only_checked)
{
  uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a, a word at a time */
  for (int64_t i = 0; i < reference->row_count; i++) {
    const float *got = c + (only_checked ? i : reference->rows[i]) * reference->n;
    for (int64_t j = 0; j < reference->n; j++) {
      uint32_t word;
      memcpy(&word, &got[j], sizeof word);
      hash = (hash ^ word) * 0x100000001b3u;
    }
  }
  return hash;
}
