/*
 * test_bench_check.c: the check of `esmm bench`, on both sides: it calls no right product wrong, and a broken one
 * always.
 *
 * Random small products, by every kernel of this CPU, go through the command's own reference and bound. Then each of
 * them is broken, the way a kernel with a mistake breaks it: a k left out of the whole product, or counted twice, and
 * the largest term of one single element left out.
 *
 *   ESMM_TEST_PRODUCTS=n   how many (default 40)
 */
#include "bench/bench.h"
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_M = 64, MOST_K = 4096, MOST_N = 128 };

typedef struct sample {
  int64_t m, k, n;
  esmm_matrix a, b, c;
  float *wide; /* C as fp32 */
  esmm_ctx *ctx;
  bench_reference reference;
  error_rule rule;
  char text[160];
} sample;

static int64_t any_size(th_rng *rng, int64_t most) /* of every order of magnitude */
{
  return (int64_t)floor(exp(th_unit(rng) * log((double)most + 1)));
}

static void generate(sample *s, th_rng *rng, esmm_operand operand, int *kind, double *density, esmm_matrix *m)
{
  static const esmm_generator_kind kinds[] = {ESMM_GEN_DENSE, ESMM_GEN_RANDOM, ESMM_GEN_BLOCKWISE};
  static const double densities[] = {.01, .1, .3, .5, .9};
  *kind = (int)th_below(rng, operand == ESMM_OPERAND_A ? 3 : 2);
  *density = *kind ? densities[th_below(rng, 5)] : 1;
  const esmm_generator g = {.size = sizeof g,
                            .kind = kinds[*kind],
                            .operand = operand,
                            .seed = th_next(rng),
                            .density = *density,
                            .strip = *kind == 2 ? 1 + th_below(rng, 64) : 0};
  assert_int_equal(esmm_generate(s->ctx, &g, m), ESMM_OK);
  if (th_below(rng, 4) == 0) /* of one sign, so that sums grow and roundings with them */
    for (int64_t i = 0; i < m->rows * m->cols; i++)
      ((float *)m->data)[i] = fabsf(((float *)m->data)[i]);
}

static void make(sample *s, uint64_t seed, esmm_ctx *const contexts[2])
{
  static const esmm_dtype dtypes[] = {ESMM_F32, ESMM_F32, ESMM_F32, ESMM_BF16, ESMM_F16};
  th_rng rng = {seed};
  int kinds[2];
  double density[2];
  *s = (sample){.m = any_size(&rng, MOST_M), .k = any_size(&rng, MOST_K), .n = any_size(&rng, MOST_N)};
  const int threads = (int)th_below(&rng, 2);
  s->ctx = contexts[threads];
  s->a = th_matrix_alloc(s->m, s->k, ESMM_F32);
  s->b = th_matrix_alloc(s->k, s->n, ESMM_F32);
  s->c = th_matrix_alloc(s->m, s->n, dtypes[th_below(&rng, 5)]);
  s->wide = calloc((size_t)(s->m * s->n), sizeof *s->wide);
  assert_non_null(s->wide);
  generate(s, &rng, ESMM_OPERAND_A, &kinds[0], &density[0], &s->a);
  generate(s, &rng, ESMM_OPERAND_B, &kinds[1], &density[1], &s->b);
  s->rule = (error_rule){.dtype_c = s->c.dtype};
  assert_int_equal(bench_reference_make(1 + threads, s->m, s->k, s->n, s->a.data, s->b.data, &s->reference), CLI_GO);
  snprintf(s->text, sizeof s->text, "seed %llu: %lld x %lld x %lld, A %d %g, B %d %g, C %s, %d threads",
           (unsigned long long)seed, (long long)s->m, (long long)s->k, (long long)s->n, kinds[0], density[0], kinds[1],
           density[1], esmm_dtype_str(s->c.dtype), threads + 1);
}

static void sample_free(sample *s)
{
  bench_reference_free(&s->reference);
  free(s->a.data);
  free(s->b.data);
  free(s->c.data);
  free(s->wide);
}

static bool is_right(const sample *s)
{
  return bench_error_find(&s->reference, &s->rule, s->wide, false).share <= 1;
}

static double term(const sample *s, int64_t i, int64_t j, int64_t p)
{
  return (double)((const float *)s->a.data)[i * s->k + p] * (double)((const float *)s->b.data)[p * s->n + j];
}

/* Every kernel's product is right; the last one, the plan's choice, stays in s->wide. Returns the largest share. */
static double check_right(sample *s)
{
  double worst = 0;
  for (int i = 0; i <= esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info, .name = "auto", .available = 1};
    if (i < esmm_kernel_count())
      assert_int_equal(esmm_kernel_get(s->ctx, i, &info), ESMM_OK);
    if (!info.available)
      continue;
    const esmm_prepare_opts prepare = th_prepare_opts_for(s->ctx, i < esmm_kernel_count() ? info.name : NULL);
    const esmm_matmul_opts opts = {.size = sizeof opts, .force = info.name};
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare(s->ctx, &s->b, &prepare, &w), ESMM_OK);
    const esmm_status status = esmm_matmul(s->ctx, &s->a, w, &s->c, &opts, NULL);
    esmm_weights_free(w);
    if (status == ESMM_ERR_UNSUPPORTED)
      continue;
    assert_int_equal(status, ESMM_OK);
    for (int64_t e = 0; e < s->m * s->n; e++)
      s->wide[e] = (float)th_decode(s->c.data, s->c.dtype, e);
    const bench_error error = bench_error_find(&s->reference, &s->rule, s->wide, false);
    if (!(error.share <= 1))
      fail_msg("%s: %s: C[%lld,%lld] is %.9g, not %.9g, allowed %.3g", s->text, info.name, (long long)error.row,
               (long long)error.col, error.got, error.want, error.allowed);
    worst = fmax(worst, s->c.dtype == ESMM_F32 ? error.share : 0);
  }
  return worst;
}

/* s->wide with `factor` times the terms of one k added: -1 leaves it out, 1 counts it twice. */
static bool survives_k(sample *s, int64_t p, double factor)
{
  float *right = s->wide;
  s->wide = calloc((size_t)(s->m * s->n), sizeof *s->wide);
  assert_non_null(s->wide);
  for (int64_t i = 0; i < s->m; i++)
    for (int64_t j = 0; j < s->n; j++)
      s->wide[i * s->n + j] = (float)((double)right[i * s->n + j] + factor * term(s, i, j, p));
  const bool survived = is_right(s);
  free(s->wide);
  s->wide = right;
  return survived;
}

/* A k that some element has a term at that is no smaller than its average one; -1 where C is all zeros. */
static int64_t k_that_matters(const sample *s, th_rng *rng)
{
  const int64_t start = th_below(rng, s->k);
  for (int64_t step = 0; step < s->k; step++) {
    const int64_t p = (start + step) % s->k;
    for (int64_t e = 0; e < s->m * s->n; e++) {
      const double average = s->reference.magnitudes[e] / (double)s->reference.terms[e / s->n];
      if (s->reference.magnitudes[e] > 0 && fabs(term(s, e / s->n, e % s->n, p)) >= average)
        return p;
    }
  }
  return -1;
}

/* The largest term of one element that has any. */
static bool survives_element(sample *s, th_rng *rng)
{
  const int64_t count = s->m * s->n, start = th_below(rng, count);
  int64_t e = start;
  while (s->reference.magnitudes[e] == 0)
    e = (e + 1) % count;
  double largest = 0;
  for (int64_t p = 0; p < s->k; p++)
    if (fabs(term(s, e / s->n, e % s->n, p)) > fabs(largest))
      largest = term(s, e / s->n, e % s->n, p);
  const float right = s->wide[e];
  s->wide[e] = (float)((double)right - largest);
  const bool survived = is_right(s);
  s->wide[e] = right;
  return survived;
}

static void right_and_broken(void **state)
{
  const int64_t products = th_env_int("ESMM_TEST_PRODUCTS", 40);
  esmm_ctx *contexts[2] = {th_ctx_on("cpu", 1), th_ctx_on("cpu", 2)};
  int64_t broken = 0, caught = 0, empty = 0;
  double worst = 0;
  (void)state;
  for (int64_t i = 0; i < products; i++) {
    sample s;
    th_rng rng = {(uint64_t)i};
    make(&s, (uint64_t)i + 1, contexts);
    worst = fmax(worst, check_right(&s));
    const int64_t p = k_that_matters(&s, &rng);
    empty += p < 0;
    if (p >= 0 && s.c.dtype == ESMM_F32) { /* the rounding to 16 bits may hide one term of thousands */
      const bool survived[] = {survives_k(&s, p, -1), survives_k(&s, p, 1), survives_element(&s, &rng)};
      for (int j = 0; j < 3; j++) {
        broken++;
        caught += !survived[j];
        if (survived[j])
          fail_msg("%s: %s was not seen (k %lld)", s.text,
                   j == 0   ? "a k left out"
                   : j == 1 ? "a k counted twice"
                            : "an element's largest term left out",
                   (long long)p);
      }
    }
    s.wide[0] = NAN;
    assert_false(is_right(&s));
    sample_free(&s);
  }
  print_message("# %lld products, %lld of them all zeros; the largest error was %.2g of its bound; %lld of %lld broken "
                "results were seen\n",
                (long long)products, (long long)empty, worst, (long long)caught, (long long)broken);
  assert_true(broken > products && caught == broken);
  esmm_ctx_free(contexts[0]);
  esmm_ctx_free(contexts[1]);
}

/* Equal elements: every rounding of a chain points the same way, the most that a sum in order can be off by. */
static void equal_elements(void **state)
{
  static const int64_t depths[] = {100, 320, 640, 768, 1000, 4096, 20000};
  esmm_ctx *ctx = th_ctx_on("cpu", 1);
  double worst = 0;
  (void)state;
  for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
    sample s = {.ctx = ctx};
    s.m = 9, s.k = depths[i], s.n = 40;
    s.a = th_matrix_alloc(s.m, s.k, ESMM_F32);
    s.b = th_matrix_alloc(s.k, s.n, ESMM_F32);
    s.c = th_matrix_alloc(s.m, s.n, ESMM_F32);
    s.rule = (error_rule){.dtype_c = ESMM_F32};
    s.wide = calloc((size_t)(s.m * s.n), sizeof *s.wide);
    assert_non_null(s.wide);
    for (int64_t e = 0; e < s.m * s.k; e++)
      ((float *)s.a.data)[e] = 1.0f + 0.07f * (float)(e / s.k);
    for (int64_t e = 0; e < s.k * s.n; e++)
      ((float *)s.b.data)[e] = 0.1f + 0.01f * (float)(e % s.n);
    assert_int_equal(bench_reference_make(1, s.m, s.k, s.n, s.a.data, s.b.data, &s.reference), CLI_GO);
    snprintf(s.text, sizeof s.text, "equal elements, k %lld", (long long)s.k);
    worst = fmax(worst, check_right(&s));
    sample_free(&s);
  }
  print_message("# the largest error was %.2g of its bound\n", worst);
  esmm_ctx_free(ctx);
}

/* What has no bound of its own is right only where it is exact, and Inf where C's dtype ends. */
static void edges(void **state)
{
  const error_rule wide = {.dtype_c = ESMM_F32}, half = {.dtype_c = ESMM_F16};
  (void)state;
  assert_true(error_share(&wide, 0, 0, 0) == 0);
  assert_true(error_share(&wide, 1e-30, 0, 0) > 1);
  assert_true(error_share(&wide, (double)NAN, 1, 1) > 1);
  assert_true(error_share(&wide, (double)INFINITY, 1e30, 1e20) > 1);
  assert_true(error_share(&half, (double)INFINITY, 65519, 32) <= 1);
  assert_true(error_share(&half, (double)-INFINITY, 65519, 32) > 1);
  /* One rounding to 16 bits for most, one for each part where parts are rounded. */
  error_rule parts = half;
  parts.parts = true;
  const double once = error_when_stored(&half, error_of_sum(&half, error_depth(&half, 64), 10), 1);
  const double more = error_when_stored(&parts, error_of_sum(&parts, error_depth(&parts, 64), 10), 1);
  assert_true(once > 0x1p-11 && once < 0x1.2p-11 && more > once + 0x1p-11 * 19);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(right_and_broken), cmocka_unit_test(equal_elements),
                                     cmocka_unit_test(edges)};
  th_clean_environment();
  return cmocka_run_group_tests(tests, NULL, NULL);
}
