/*
 * bench_check.c: is the product right?
 *
 * Small problems are checked whole. Of large ones, rows spread over all of C are, each with every column: a kernel's
 * tiles and strips are all crossed by some row. The sums are made in float64, where products of fp32 are exact, from
 * the same fp32 values the libraries get; nothing of the library under test takes part.
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

static void reference_row(int64_t k, int64_t n, const float *a, const float *b, double *restrict sum)
{
  for (int64_t j = 0; j < n; j++)
    sum[j] = 0;
  for (int64_t p = 0; p < k; p++) {
    const double x = a[p];
    const float *row = b + p * n;
    if (x != 0)
      for (int64_t j = 0; j < n; j++)
        sum[j] += x * (double)row[j];
  }
}

int bench_reference_make(const bench *b, const bench_data *data, bench_reference *reference)
{
  /* multiply-adds: some tenths of a second */
  const double budget = (double)(1 << 27) * (b->threads > 2 ? b->threads : 2);
  double per_row = (double)data->n * (double)data->k;
  int64_t rows = per_row > 0 && per_row * (double)data->m > budget ? (int64_t)(budget / per_row) : data->m;
  if (rows < FEWEST_ROWS)
    rows = FEWEST_ROWS;
  if (rows > data->m)
    rows = data->m;
  *reference = (bench_reference){.row_count = rows, .n = data->n};
  reference->rows = cli_alloc((size_t)rows, sizeof *reference->rows);
  size_t values;
  if (__builtin_mul_overflow((size_t)rows, (size_t)data->n, &values))
    return cli_failed("the reference is too large");
  reference->values = cli_alloc(values, sizeof *reference->values);
  for (int64_t i = 0; i < rows; i++)
    reference->rows[i] = rows == data->m ? i : sampled_row(data->m, rows, i);

  const float *x = data->plain_a[0].m.data, *y = data->plain_b[0].m.data;
  const int threads = b->threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < rows; i++)
    reference_row(data->k, data->n, x + reference->rows[i] * data->k, y, reference->values + i * data->n);
  bool finite = true;
  for (size_t i = 0; i < values; i++) {
    finite = finite && isfinite(reference->values[i]);
    reference->largest = fmax(reference->largest, fabs(reference->values[i]));
  }
  (void)threads; /* a build without OpenMP does not use it */
  return finite && reference->largest <= FLT_MAX
             ? CLI_GO
             : cli_failed("the data holds NaN or Inf, or its products overflow: nothing to check against "
                          "(--no-check measures all the same)");
}

void bench_reference_free(bench_reference *reference)
{
  free(reference->rows);
  free(reference->values);
  *reference = (bench_reference){0};
}

double bench_error(const bench_reference *reference, const float *c, bool only_checked)
{
  double worst = 0;
  for (int64_t i = 0; i < reference->row_count; i++) {
    const float *got = c + (only_checked ? i : reference->rows[i]) * reference->n;
    const double *want = reference->values + i * reference->n;
    for (int64_t j = 0; j < reference->n; j++) {
      double error = fabs((double)got[j] - want[j]);
      if (!(error <= worst)) /* so that NaN counts too */
        worst = isnan(error) ? INFINITY : error;
    }
  }
  if (worst == 0)
    return 0;
  return reference->largest > 0 ? worst / reference->largest : INFINITY;
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

double bench_error_bound(int64_t k)
{
  return FLT_EPSILON * (4 + sqrt((double)k));
}

double bench_rounding(esmm_dtype dtype)
{
  return dtype == ESMM_F32 ? 0 : cli_unit_roundoff(dtype);
}
