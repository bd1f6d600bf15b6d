/*
 * test_sample.c: the plan looks at a few blocks of A only; an A whose density repeats must not hide from them.
 *
 * Strips of 32 rows, or stretches of 64 k's, are dense or nearly empty with a period: padded batches, heads of an
 * attention layer. A sample on a regular grid would see one kind alone. Seen through the statistics of a product.
 */
#include "harness.h"

#include <math.h>
#include <stdlib.h>

enum { STRIP = 32, STRETCH = 64, N = 64 };

typedef struct periodic {
  bool rows;             /* strips of rows repeat; else stretches of k */
  int64_t period, phase; /* those whose number has this remainder are the odd ones */
  bool odd_is_dense;
} periodic;

static double fill(esmm_matrix *a, periodic p)
{
  th_rng rng = {5};
  int64_t nonzero = 0;
  float *x = a->data;
  for (int64_t i = 0; i < a->rows; i++)
    for (int64_t k = 0; k < a->cols; k++) {
      const bool odd = (p.rows ? i / STRIP : k / STRETCH) % p.period == p.phase;
      const bool alive = odd == p.odd_is_dense || th_unit(&rng) < 0.05;
      x[i * a->cols + k] = alive ? 1.0f : 0.0f;
      nonzero += alive;
    }
  return (double)nonzero / (double)(a->rows * a->cols);
}

static int off; /* samples of this test that are off, all told before it fails */

static void check_sample(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *a, esmm_matrix *c, periodic p, double most)
{
  const double density = fill(a, p);
  esmm_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_matmul(ctx, a, w, c, NULL, &stats), ESMM_OK);
  if (!(fabs(stats.density_a - density) <= most)) {
    off++;
    print_error("%d x %d, %s %d of every %d %s: density %.3f, the sample says %.3f\n", (int)a->rows, (int)a->cols,
                p.rows ? "strip" : "stretch of k", (int)p.phase, (int)p.period, p.odd_is_dense ? "dense" : "sparse",
                density, stats.density_a);
  }
}

static void check_periods(int64_t m, int64_t k, bool rows, double most)
{
  off = 0;
  esmm_ctx *ctx = th_ctx(2);
  esmm_matrix a = th_matrix_alloc(m, k, ESMM_F32), b = th_matrix_alloc(k, N, ESMM_F32),
              c = th_matrix_alloc(m, N, ESMM_F32);
  th_fill(&b, 2, 1, true);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  for (int64_t period = 2; period <= 16; period *= 2)
    for (int64_t phase = 0; phase < period; phase++)
      for (int dense = 0; dense < 2; dense++)
        check_sample(ctx, w, &a, &c, (periodic){rows, period, phase, dense != 0}, most);
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
  esmm_ctx_free(ctx);
  if (off)
    fail_msg("%d samples are off by more than %g", off, most);
}

static void rows_that_repeat(void **state)
{
  (void)state;
  check_periods(1024, 256, true, 0.25);
}

static void rows_of_tall_matrices_that_repeat(void **state)
{
  (void)state;
  check_periods(4096, 128, true, 0.25);
}

static void columns_that_repeat(void **state)
{
  (void)state;
  check_periods(512, 1024, false, 0.25);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_that_repeat),
      cmocka_unit_test(rows_of_tall_matrices_that_repeat),
      cmocka_unit_test(columns_that_repeat),
  };
  return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
