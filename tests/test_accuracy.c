/*
 * test_accuracy.c: rounding errors of long sums. Skipping must not cost accuracy: on every product a kernel's largest
 * error against float64 may be twice that of the dense kernel for the same instruction set, not more. On a GPU
 * (ESMM_TEST_DEVICE=cuda) the measure is one fp32 chain in the order of k, on the host. It is not cuBLAS: at sizes as
 * small as these that splits k over the GPU, and is several times better than any sum in order. The benchmark compares
 * with cuBLAS, and its record does so at sizes that fill the GPU.
 *
 * How a kernel splits its sums depends on the data (full strips run straight through, others over lists), and shows
 * only where k is far longer than any of those parts: hence k of thousands, and A's that take each way. Positive data
 * makes partial sums grow with k, mixed signs keep them small; both have errors of their own. Values of very different
 * size are where a product in parts of a few bits each would lose some.
 */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_N = 256, STRIP = 32 };

typedef enum zeros {
  EVERY_8TH_STRIP, /* those are dense, the others empty */
  EVERY_3RD_STRIP,
  BLOCKWISE, /* each (strip, k) alive with probability `density` */
  SCATTERED, /* each element */
} zeros;

static const struct {
  zeros kind;
  double density;
} KINDS[] = {
    {EVERY_8TH_STRIP, 1}, {EVERY_3RD_STRIP, 1}, {BLOCKWISE, 0.125}, {BLOCKWISE, 0.25},
    {BLOCKWISE, 0.5},     {BLOCKWISE, 0.75},    {SCATTERED, 0.1},   {BLOCKWISE, 1},
};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

typedef enum values { MIXED_SIGNS, POSITIVE, WIDE, VALUES } values;
static const char *const VALUE_NAMES[] = {"mixed signs", "positive", "of very different size"};

static double draw(th_rng *rng, values which)
{
  const double x = th_unit(rng);
  if (which == WIDE)
    return ldexp(2 * x - 1, (int)th_below(rng, 25) - 12);
  return which == POSITIVE ? x + 0x1p-10 : 2 * x - 1;
}

static void fill_a(esmm_matrix *a, int kind, values which)
{
  th_rng rng = {1000 + (uint64_t)kind};
  const double density = KINDS[kind].density;
  for (int64_t row0 = 0; row0 < a->rows; row0 += STRIP) {
    const int64_t strip = row0 / STRIP, rows = a->rows - row0 < STRIP ? a->rows - row0 : STRIP;
    for (int64_t k = 0; k < a->cols; k++) {
      const bool strip_alive = KINDS[kind].kind == EVERY_8TH_STRIP   ? strip % 8 == 0
                               : KINDS[kind].kind == EVERY_3RD_STRIP ? strip % 3 == 0
                               : KINDS[kind].kind == BLOCKWISE       ? th_unit(&rng) < density
                                                                     : true;
      for (int64_t r = 0; r < rows; r++) {
        const bool alive = strip_alive && (KINDS[kind].kind != SCATTERED || th_unit(&rng) < density);
        th_set(a, row0 + r, k, alive ? draw(&rng, which) : 0);
      }
    }
  }
}

/* Columns from `full` on lose every third k, so that their panels are shorter than k. */
static void fill_b(esmm_matrix *b, int64_t full, values which)
{
  th_rng rng = {77};
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++)
      th_set(b, k, j, j < full || k % 3 != 1 ? draw(&rng, which) : 0);
}

static double *as_doubles(const esmm_matrix *m)
{
  double *all = calloc((size_t)(m->rows * m->cols), sizeof *all);
  assert_non_null(all);
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    all[i] = th_decode(m->data, m->dtype, i);
  return all;
}

static double largest_error(const float *c, int64_t count, const double *want)
{
  double worst = 0;
  for (int64_t i = 0; i < count; i++) {
    const double error = fabs((double)c[i] - want[i]);
    worst = error <= worst ? worst : error; /* NaN counts as worst */
  }
  return worst;
}

/* On a GPU, and where a library multiplies: its sums are one chain each, as those of any BLAS. */
static bool by_chain(const char *kernel)
{
  return th_on_gpu() || strncmp(kernel, "onednn", 6) == 0;
}

/* "joint_f32_avx2" is measured by dense_f32_avx2; what names no instruction set, by the portable one. */
static void baseline_of(const char *kernel, char *name, size_t bytes)
{
  const char *set = strrchr(kernel, '_');
  if (by_chain(kernel))
    snprintf(name, bytes, "one chain");
  else
    snprintf(name, bytes, "dense_f32%s", set ? set : "_portable");
}

static double error_of(esmm_ctx *ctx, const char *force, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                       const double *want, esmm_stats *stats)
{
  esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  memset(c->data, 0xff, (size_t)(c->rows * c->cols) * sizeof(float));
  const esmm_status status = esmm_matmul(ctx, a, w, c, &opts, stats);
  if (status == ESMM_ERR_UNSUPPORTED && force)
    return -1;
  if (status != ESMM_OK)
    fail_msg("%s: %s", force ? force : "auto", esmm_ctx_error(ctx));
  return largest_error(c->data, c->rows * c->cols, want);
}

static int wrong; /* products of this test whose error is too large; all are told before it fails */

/* Runs every kernel on one product; returns how many that skip ran. chain: the error of one chain. */
static int compare(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, const double *want, double chain,
                   const char *what)
{
  struct {
    char name[48];
    double error;
  } baseline[8];
  int skipping = 0, baselines = 0;
  double largest = 0;
  esmm_weights_info of_b = {.size = sizeof of_b};
  assert_int_equal(esmm_weights_get_info(w, &of_b), ESMM_OK);
  esmm_matrix c = th_matrix_alloc(a->rows, of_b.cols, ESMM_F32);
  for (int64_t i = 0; i < a->rows * of_b.cols; i++)
    largest = fmax(largest, fabs(want[i]));
  for (int i = 0; i <= esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info, .name = NULL};
    if (i < esmm_kernel_count())
      assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    if (info.name &&
        (!info.available || (info.flags & ESMM_KERNEL_REFERENCE) || !(info.formats & 1u << ESMM_FORMAT_DENSE)))
      continue; /* reference kernels sum in float64; these weights are dense */
    esmm_stats stats = {.size = sizeof stats};
    const double error = error_of(ctx, info.name, a, w, &c, want, &stats);
    if (error == -1)
      continue;
    skipping += info.name && (info.flags & ESMM_KERNEL_SKIPS);
    char name[48];
    baseline_of(stats.kernel, name, sizeof name);
    int known = 0;
    while (known < baselines && strcmp(baseline[known].name, name) != 0)
      known++;
    if (known == baselines) {
      assert_true(++baselines <= 8);
      memcpy(baseline[known].name, name, sizeof name);
      baseline[known].error = by_chain(stats.kernel) ? chain : error_of(ctx, name, a, w, &c, want, &stats);
      assert_true(baseline[known].error >= 0);
    }
    const double dense = baseline[known].error;
    /* A product of three TF32 ones is itself off by a unit or two: it shows where few terms make up a sum. */
    const double floor = (th_on_gpu() ? 0x1p-21 : 0x1p-23) * largest;
    if (!(error <= fmax(2 * dense, floor)) && wrong++ < 20)
      print_error("%s, %s: largest error %.3g, that of %s is %.3g\n", what, info.name ? info.name : "auto", error, name,
                  dense);
  }
  free(c.data);
  return skipping;
}

static void sums_of(int64_t m, int64_t n, int64_t k)
{
  wrong = 0;
  esmm_ctx *ctx = th_ctx(2);
  esmm_matrix a = th_matrix_alloc(m, k, ESMM_F32), b = th_matrix_alloc(k, n, ESMM_F32);
  double *want = calloc((size_t)(m * n), sizeof *want), *magnitude = calloc((size_t)(m * n), sizeof *magnitude);
  float *chain = calloc((size_t)(m * n), sizeof *chain);
  assert_true(want && magnitude && chain && n <= MOST_N);
  for (int which = 0; which < (th_on_gpu() ? VALUES : WIDE); which++)
    for (int64_t full = 0; full <= n; full += n / 2) {
      if (k > 8192 && full != n / 2)
        continue; /* some panels of each kind are enough where products are long */
      fill_b(&b, full, (values)which);
      esmm_weights *w = NULL;
      assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
      double *b_doubles = as_doubles(&b);
      for (int kind = 0; kind < KIND_COUNT; kind++) {
        static const char *const names[] = {"every 8th strip", "every 3rd strip", "blockwise", "random"};
        char what[160];
        snprintf(what, sizeof what, "m %d, k %d, A %s %g, B of %d full columns, %s", (int)m, (int)k,
                 names[KINDS[kind].kind], KINDS[kind].density, (int)full, VALUE_NAMES[which]);
        fill_a(&a, kind, (values)which);
        double *a_doubles = as_doubles(&a);
        th_oracle(m, n, k, a_doubles, b_doubles, want, magnitude);
        th_chain(m, n, k, a_doubles, b_doubles, chain);
        const double of_chain = largest_error(chain, m * n, want);
        free(a_doubles);
        if (compare(ctx, &a, w, want, of_chain, what) == 0)
          fail_msg("%s: no kernel that skips ran", what);
      }
      free(b_doubles);
      esmm_weights_free(w);
    }
  free(want);
  free(magnitude);
  free(chain);
  free(a.data);
  free(b.data);
  esmm_ctx_free(ctx);
  if (wrong)
    fail_msg("m %d, k %d: %d products are off by more than twice the dense kernel's error", (int)m, (int)k, wrong);
}

static bool brief(void) /* sanitizer builds: fewer rows, as long a k */
{
  return th_env_int("ESMM_TEST_CASES", 0) != 0;
}

static int64_t columns(void)
{
  return th_on_gpu() ? MOST_N : 64;
}

static void sums_of_4096_terms(void **state)
{
  (void)state;
  sums_of(brief() ? 96 : th_on_gpu() ? 256 : 1024, columns(), 4096);
}

static void longer_sums(void **state)
{
  (void)state;
  sums_of(brief() ? 96 : 256, columns(), th_on_gpu() ? 16384 : 8192);
}

static void sums_of_few_rows(void **state)
{
  (void)state;
  sums_of(1, 64, 8192);
  sums_of(16, 64, 8192);
}

/* Sums of small integers stay below 2^24: no kernel may round any of them, however it splits its factors. */
static void integers_are_exact(void **state)
{
  (void)state;
  enum { M = 70, N = 100, K = 16384 };
  esmm_ctx *ctx = th_ctx(2);
  esmm_matrix a = th_matrix_alloc(M, K, ESMM_F32), b = th_matrix_alloc(K, N, ESMM_F32);
  esmm_matrix c = th_matrix_alloc(M, N, ESMM_F32);
  double *want = calloc(M * N, sizeof *want), *magnitude = calloc(M * N, sizeof *magnitude);
  assert_true(want && magnitude);
  th_fill(&a, 5, 0.7, true);
  th_fill(&b, 6, 0.9, true);
  double *a_doubles = as_doubles(&a), *b_doubles = as_doubles(&b);
  th_oracle(M, N, K, a_doubles, b_doubles, want, magnitude);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    esmm_stats stats = {.size = sizeof stats};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    const bool reads = info.available && (info.formats & 1u << ESMM_FORMAT_DENSE);
    const double error = reads ? error_of(ctx, info.name, &a, w, &c, want, &stats) : -1;
    if (!(error <= 0))
      fail_msg("%s: sums of integers are off by %g", info.name, error);
  }
  esmm_weights_free(w);
  free(a_doubles);
  free(b_doubles);
  free(want);
  free(magnitude);
  free(a.data);
  free(b.data);
  free(c.data);
  esmm_ctx_free(ctx);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sums_of_4096_terms),
      cmocka_unit_test(longer_sums),
      cmocka_unit_test(sums_of_few_rows),
      cmocka_unit_test(integers_are_exact),
  };
  return cmocka_run_group_tests_name("accuracy", tests, NULL, NULL);
}
