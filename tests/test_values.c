/*
 * test_values.c: what the table of test_kernels.c leaves out: Inf and NaN, strict products, extremes of fp16 and bf16,
 * patterns that leave terms out, and sizes too large for an oracle.
 *
 * All run over every kernel this machine has. A kernel may refuse a product; each test says how many must not.
 */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct kernels {
  int count;
  const char *name[66]; /* "auto" is the last */
  unsigned flags[66];
} kernels;

static kernels available(void)
{
  kernels all = {0};
  esmm_ctx *ctx = th_ctx(1);
  for (int i = 0; i < esmm_kernel_count() && all.count < 65; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    if (info.available && (!th_on_gpu() || info.formats & 1u << ESMM_FORMAT_DENSE)) { /* else: test_cuda_formats.c */
      all.name[all.count] = info.name;
      all.flags[all.count++] = info.flags;
    }
  }
  all.name[all.count++] = "auto";
  esmm_ctx_free(ctx);
  return all;
}

static const char *forced(const kernels *all, int i)
{
  return i == all->count - 1 ? NULL : all->name[i];
}

/* One product: A [m,k], B [k,n], C [m,n], with integers that keep every sum exact. */
typedef struct setting {
  esmm_ctx *ctx;
  esmm_matrix a, b, c;
  esmm_weights *w;
} setting;

static setting make(int64_t m, int64_t n, int64_t k, double density, esmm_dtype dtype)
{
  setting s = {.ctx = th_ctx(2)};
  s.a = th_matrix_alloc(m, k, dtype);
  s.b = th_matrix_alloc(k, n, dtype);
  s.c = th_matrix_alloc(m, n, ESMM_F32);
  th_fill(&s.a, 1, density, true);
  for (int64_t i = 0; i < k; i++) /* B without a zero */
    for (int64_t j = 0; j < n; j++)
      th_set(&s.b, i, j, (double)(1 + (i + 2 * j) % 4));
  return s;
}

static void prepare(setting *s, esmm_use use, int strict)
{
  esmm_weights_free(s->w);
  esmm_prepare_opts opts = {.size = sizeof opts, .use = use, .strict = strict};
  assert_int_equal(esmm_prepare(s->ctx, &s->b, &opts, &s->w), ESMM_OK);
}

static void end(setting *s)
{
  esmm_weights_free(s->w);
  free(s->a.data);
  free(s->b.data);
  free(s->c.data);
  esmm_ctx_free(s->ctx);
}

/* Kernels that read no dense B get one of their format. */
static esmm_status multiply(setting *s, const char *force, int strict)
{
  esmm_matmul_opts opts = {.size = sizeof opts, .force = force, .strict = strict};
  for (int64_t i = 0; i < s->c.rows * s->c.cols; i++)
    ((float *)s->c.data)[i] = -7777;
  const esmm_prepare_opts other = th_prepare_opts_for(s->ctx, force);
  if (other.format.kind == ESMM_FORMAT_DENSE)
    return esmm_matmul(s->ctx, &s->a, s->w, &s->c, &opts, NULL);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(s->ctx, &s->b, &other, &w), ESMM_OK);
  const esmm_status status = esmm_matmul(s->ctx, &s->a, w, &s->c, &opts, NULL);
  esmm_weights_free(w);
  return status;
}

/* The product as IEEE has it, a term at a time. */
static double ieee(const setting *s, int64_t i, int64_t j, int64_t without_k)
{
  double sum = 0;
  for (int64_t p = 0; p < s->a.cols; p++)
    if (p != without_k)
      sum += th_get(&s->a, i, p) * th_get(&s->b, p, j);
  return sum;
}

static bool same(double x, double y)
{
  return isnan(x) ? isnan(y) : x == y;
}

static const int64_t HEIGHTS[] = {1, 5, 16, 40};
enum { HEIGHT_COUNT = 4, N = 37, NARROW = 9, K = 150, SPECIAL_K = 77, SPECIAL_J = 35 };

/* An Inf or NaN in A meets a B without zeros: every kernel has to pass it on, to its row alone. */
static void special_values_of_a_reach_c(void **state)
{
  (void)state;
  const double specials[] = {NAN, INFINITY, -INFINITY};
  static const int64_t places[][2] = {{0, 0}, {39, K - 1}, {20, SPECIAL_K}, {13, 64}}; /* row of 40, k */
  kernels all = available();
  int ran[66] = {0};
  double *want = calloc(40 * N, sizeof *want);
  assert_non_null(want);
  for (int h = 0; h < 2 * HEIGHT_COUNT; h++)
    for (int each = 0; each < 3 * 3 * 4; each++) {
      esmm_dtype dtype = (esmm_dtype)(each % 3);
      double special = specials[each / 3 % 3];
      int64_t m = HEIGHTS[h / 2], n = h % 2 ? NARROW : N, row = places[each / 9][0] * m / 40, k = places[each / 9][1];
      setting s = make(m, n, K, 0.3, dtype);
      th_set(&s.a, row, k, special);
      prepare(&s, ESMM_USE_ANY, 0);
      for (int64_t r = 0; r < m; r++)
        for (int64_t j = 0; j < n; j++)
          want[r * n + j] = ieee(&s, r, j, -1);
      for (int i = 0; i < all.count; i++) {
        if (multiply(&s, forced(&all, i), 0) != ESMM_OK)
          continue;
        ran[i]++;
        for (int64_t at = 0; at < m * n; at++)
          if (!same(th_decode(s.c.data, ESMM_F32, at), want[at]))
            fail_msg("%s, %s, m=%d, A[%d,%d]=%g: C[%d,%d] is %g, not %g", all.name[i], esmm_dtype_str(dtype), (int)m,
                     (int)row, (int)k, special, (int)(at / n), (int)(at % n), th_decode(s.c.data, ESMM_F32, at),
                     want[at]);
      }
      end(&s);
    }
  free(want);
  for (int i = 0; i < all.count; i++)
    if (ran[i] == 0)
      fail_msg("%s ran none of these", all.name[i]);
}

/*
 * NaN and Inf in B where A has zeros. Skipped, the term contributes nothing; met, it is what IEEE says. Both are
 * allowed without strict, anything else is not; with strict only the second.
 */
static void special_values_of_b(void **state)
{
  (void)state;
  const double specials[] = {NAN, INFINITY};
  kernels all = available();
  for (int h = 0; h < HEIGHT_COUNT; h++)
    for (int v = 0; v < 2; v++)
      for (int strict = 0; strict < 2; strict++) {
        int strict_ran = 0;
        setting s = make(HEIGHTS[h], N, K, 0.2, ESMM_F32);
        for (int64_t i = 0; i < s.a.rows; i++)
          th_set(&s.a, i, SPECIAL_K, i % 3 == 1 ? 2 : 0);
        th_set(&s.b, SPECIAL_K, SPECIAL_J, specials[v]);
        prepare(&s, ESMM_USE_ANY, strict);
        for (int i = 0; i < all.count; i++) {
          esmm_status status = multiply(&s, forced(&all, i), strict);
          if (strict && (all.flags[i] & ESMM_KERNEL_SKIPS) && status != ESMM_ERR_UNSUPPORTED)
            fail_msg("%s skips, but ran a strict product", all.name[i]);
          if (i == all.count - 1)
            assert_int_equal(status, ESMM_OK);
          if (status != ESMM_OK)
            continue;
          strict_ran += strict;
          for (int64_t r = 0; r < s.c.rows; r++)
            for (int64_t j = 0; j < N; j++) {
              double got = th_get(&s.c, r, j), met = ieee(&s, r, j, -1), skipped = ieee(&s, r, j, SPECIAL_K);
              bool may_skip = !strict && th_get(&s.a, r, SPECIAL_K) == 0;
              if (!same(got, met) && !(may_skip && same(got, skipped)))
                fail_msg("%s, m=%d, B[%d,%d]=%g, strict %d: C[%d,%d] is %g; %g is right%s", all.name[i],
                         (int)HEIGHTS[h], SPECIAL_K, SPECIAL_J, specials[v], strict, (int)r, (int)j, got, met,
                         may_skip ? ", or the sum without it" : "");
            }
        }
        if (strict && strict_ran < 2)
          fail_msg("m=%d: a strict product found no kernel but auto's", (int)HEIGHTS[h]);
        end(&s);
      }
}

/* A zero of B meets an Inf of A: strict products may refuse weights that left zeros out, but not skip silently. */
static void strict_meets_zeros_of_b(void **state)
{
  (void)state;
  kernels all = available();
  for (int use = 0; use < 3; use++)
    for (int kept = 0; kept < 2; kept++) {
      setting s = make(12, N, K, 0.5, ESMM_F32);
      th_set(&s.a, 4, SPECIAL_K, INFINITY);
      for (int64_t j = 0; j < N; j++)
        th_set(&s.b, SPECIAL_K, j, 0);
      prepare(&s, (esmm_use)use, kept);
      for (int i = 0; i < all.count; i++) {
        esmm_status status = multiply(&s, forced(&all, i), 1);
        if (status == ESMM_ERR_UNSUPPORTED && !(kept && i == all.count - 1))
          continue;
        if (status != ESMM_OK)
          fail_msg("%s, use %d: %s: %s", all.name[i], use, esmm_status_str(status), esmm_ctx_error(s.ctx));
        for (int64_t r = 0; r < s.c.rows; r++)
          for (int64_t j = 0; j < N; j++)
            if (!same(th_get(&s.c, r, j), ieee(&s, r, j, -1)))
              fail_msg("%s, use %d, weights %sstrict: C[%d,%d] is %g", all.name[i], use, kept ? "" : "not ", (int)r,
                       (int)j, th_get(&s.c, r, j));
      }
      end(&s);
    }
}

static void alpha_zero_reads_neither(void **state)
{
  (void)state;
  const float zero = 0, half = 0.5f;
  setting s = make(9, N, K, 1, ESMM_F32);
  for (int64_t i = 0; i < s.a.rows * s.a.cols; i++)
    ((float *)s.a.data)[i] = NAN;
  th_set(&s.b, 3, 3, NAN);
  prepare(&s, ESMM_USE_ANY, 0);
  th_fill(&s.c, 5, 1, true);
  esmm_matrix before = th_matrix_alloc(9, N, ESMM_F32);
  memcpy(before.data, s.c.data, 9 * N * sizeof(float));
  esmm_matmul_opts opts = {.size = sizeof opts, .alpha = &zero, .beta = &half, .activation = ESMM_ACT_RELU};
  assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL), ESMM_OK);
  for (int64_t i = 0; i < 9; i++)
    for (int64_t j = 0; j < N; j++)
      assert_true(th_get(&s.c, i, j) == fmax(0, 0.5 * th_get(&before, i, j)));
  free(before.data);
  end(&s);
}

/* What does not fit becomes Inf; what is subnormal in fp16 or bf16 is not zero, but for AVX-512 BF16 and AMX, whose
   instruction takes it for one. */
static void extremes_of_half_precision(void **state)
{
  (void)state;
  kernels all = available();
  for (int d = 1; d < 3; d++) {
    setting s = make(6, N, 40, 0, (esmm_dtype)d);
    const double large = d == 1 ? 0x1.fep127 : 65504, tiny = d == 1 ? 0x1p-133 : 0x1p-24;
    free(s.c.data);
    s.c = th_matrix_alloc(6, N, (esmm_dtype)d);
    for (int64_t j = 0; j < N; j++)
      th_set(&s.b, 7, j, j % 2 ? 2 : -1);
    th_set(&s.a, 0, 7, large);
    th_set(&s.a, 1, 7, -large);
    th_set(&s.a, 2, 7, tiny);
    th_set(&s.a, 3, 7, -tiny);
    prepare(&s, ESMM_USE_ANY, 0);
    for (int i = 0; i < all.count; i++) {
      esmm_matmul_opts opts = {.size = sizeof opts, .force = forced(&all, i)};
      memset(s.c.data, 0xff, (size_t)(6 * N) * 2);
      esmm_stats stats = {.size = sizeof stats};
      if (esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, &stats) != ESMM_OK)
        continue;
      const bool flushes = strstr(stats.kernel, "_avx512bf16") || strstr(stats.kernel, "_amx");
      for (int64_t r = 0; r < 6; r++)
        for (int64_t j = 0; j < N; j++) {
          const double a = th_get(&s.a, r, 7), got = th_get(&s.c, r, j);
          const double want = th_round((esmm_dtype)d, flushes && fabs(a) < 0x1p-126 ? 0 : a * (j % 2 ? 2 : -1));
          if (!same(got, want) && !(got == 0 && want == 0))
            fail_msg("%s, %s: C[%d,%d] is %g, not %g", all.name[i], esmm_dtype_str((esmm_dtype)d), (int)r, (int)j, got,
                     want);
        }
    }
    end(&s);
  }
}

/* What fills up a list of three k's, or a last step, is zeros in both operands: an Inf of B would make NaN of them. */
static void nothing_is_made_of_padding(void **state)
{
  (void)state;
  kernels all = available();
  for (int d = 0; d < 3; d++) {
    setting s = make(40, N, K, 0, (esmm_dtype)d);
    for (int64_t r = 0; r < s.a.rows; r++)
      for (int64_t k = 0; k < 3; k++)
        th_set(&s.a, r, 70 * k, 1);
    for (int64_t j = 0; j < N; j++)
      th_set(&s.b, 0, j, INFINITY);
    prepare(&s, ESMM_USE_ANY, 0);
    for (int i = 0; i < all.count; i++) {
      if (th_prepare_opts_for(s.ctx, forced(&all, i)).format.kind != ESMM_FORMAT_DENSE || /* they drop elements of B */
          multiply(&s, forced(&all, i), 0) != ESMM_OK)
        continue;
      for (int64_t r = 0; r < s.c.rows; r++)
        for (int64_t j = 0; j < N; j++)
          if (th_get(&s.c, r, j) != INFINITY)
            fail_msg("%s, %s: C[%d,%d] is %g, not Inf", all.name[i], esmm_dtype_str((esmm_dtype)d), (int)r, (int)j,
                     th_get(&s.c, r, j));
    }
    end(&s);
  }
}

/* The largest numbers of fp32: splitting them into parts must not round one up to Inf. */
static void extremes_of_single_precision(void **state)
{
  (void)state;
  const double large = (double)0x1.fffffep127f;
  kernels all = available();
  setting s = make(40, N, 70, 0, ESMM_F32);
  for (int64_t k = 0; k < s.b.rows; k++)
    for (int64_t j = 0; j < N; j++)
      th_set(&s.b, k, j, k == 7 && j == 5 ? large : 0.5 * (double)(j % 3 - 1));
  th_set(&s.a, 1, 9, large);
  th_set(&s.a, 2, 9, -large);
  th_set(&s.a, 33, 7, 0.25);
  prepare(&s, ESMM_USE_ANY, 0);
  for (int i = 0; i < all.count; i++) {
    if (multiply(&s, forced(&all, i), 0) != ESMM_OK)
      continue;
    for (int64_t r = 0; r < s.c.rows; r++)
      for (int64_t j = 0; j < N; j++) {
        double want = ieee(&s, r, j, -1), got = th_get(&s.c, r, j);
        if (!(fabs(got - want) <= 0x1p-21 * fabs(want)))
          fail_msg("%s: C[%d,%d] is %g, not %g", all.name[i], (int)r, (int)j, got, want);
      }
  }
  end(&s);
}

/* A pattern without some k that A has: that term may be dropped for a row of C or not, nothing else may change. */
static void pattern_may_drop_terms(void **state)
{
  (void)state;
  kernels all = available();
  for (int h = 0; h < HEIGHT_COUNT; h++)
    for (int64_t rows = 1; rows <= 32; rows *= 2) {
      setting s = make(HEIGHTS[h], N, K, 0.4, ESMM_F32);
      for (int64_t i = 0; i < s.a.rows; i++)
        th_set(&s.a, i, SPECIAL_K, 0);
      esmm_pattern *pattern = NULL;
      assert_int_equal(esmm_pattern_extract(s.ctx, &s.a, rows, &pattern), ESMM_OK);
      for (int64_t i = 0; i < s.a.rows; i++)
        th_set(&s.a, i, SPECIAL_K, 3);
      prepare(&s, ESMM_USE_ANY, 0);
      for (int i = 0; i < all.count; i++) {
        esmm_matmul_opts opts = {.size = sizeof opts, .force = forced(&all, i), .a_pattern = pattern};
        if (esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL) != ESMM_OK)
          continue;
        for (int64_t r = 0; r < s.c.rows; r++)
          for (int64_t j = 0; j < N; j++) {
            double got = th_get(&s.c, r, j);
            if (got != ieee(&s, r, j, -1) && got != ieee(&s, r, j, SPECIAL_K))
              fail_msg("%s, m=%d, pattern of %d rows: C[%d,%d] is %g", all.name[i], (int)HEIGHTS[h], (int)rows, (int)r,
                       (int)j, got);
          }
      }
      esmm_pattern_free(pattern);
      end(&s);
    }
}

/* C t = A (B t) with small integers: exact, and no oracle of m n k steps is needed. */
static void check_large(int64_t m, int64_t n, int64_t k, esmm_generator_kind kind, double density, esmm_dtype dtype_b)
{
  kernels all = available();
  setting s = {.ctx = th_ctx(2)};
  s.a = th_matrix_alloc(m, k, ESMM_F32);
  s.b = th_matrix_alloc(k, n, dtype_b);
  s.c = th_matrix_alloc(m, n, ESMM_F32);
  esmm_generator g = {.size = sizeof g, .kind = kind, .seed = 11, .density = density, .integers = 1};
  assert_int_equal(esmm_generate(s.ctx, &g, &s.a), ESMM_OK);
  g = (esmm_generator){.size = sizeof g,
                       .kind = kind == ESMM_GEN_BLOCKWISE ? kind : ESMM_GEN_DENSE,
                       .operand = ESMM_OPERAND_B,
                       .seed = 12,
                       .density = density,
                       .integers = 1};
  assert_int_equal(esmm_generate(s.ctx, &g, &s.b), ESMM_OK);
  prepare(&s, ESMM_USE_ANY, 0);
  double *t = calloc((size_t)n, sizeof *t), *bt = calloc((size_t)k, sizeof *bt);
  double *want = calloc((size_t)m, sizeof *want);
  assert_true(t && bt && want);
  th_rng rng = {13};
  for (int64_t j = 0; j < n; j++)
    t[j] = (double)(th_below(&rng, 2001) - 1000);
  for (int64_t p = 0; p < k; p++)
    for (int64_t j = 0; j < n; j++)
      bt[p] += th_get(&s.b, p, j) * t[j];
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++)
      want[i] += th_get(&s.a, i, p) * bt[p];
  for (int i = 0; i < all.count; i++) {
    if (multiply(&s, forced(&all, i), 0) != ESMM_OK)
      continue;
    for (int64_t r = 0; r < m; r++) {
      double got = 0;
      for (int64_t j = 0; j < n; j++)
        got += th_get(&s.c, r, j) * t[j];
      if (!(got == want[r]))
        fail_msg("%s at %d x %d x %d, density %g, B %s: row %d of C t is %.17g, A (B t) is %.17g", all.name[i], (int)m,
                 (int)k, (int)n, density, esmm_dtype_str(dtype_b), (int)r, got, want[r]);
    }
  }
  free(t);
  free(bt);
  free(want);
  end(&s);
}

static void large_products(void **state)
{
  (void)state;
  int64_t by = th_env_int("ESMM_TEST_CASES", 0) ? 4 : 1; /* sanitizer builds: a quarter of each side */
  check_large(1001 / by, 997 / by, 1013 / by, ESMM_GEN_BLOCKWISE, 0.3, ESMM_F32);
  check_large(997 / by, 1003 / by, 1100 / by, ESMM_GEN_RANDOM, 0.1, ESMM_F32);
  check_large(1009 / by, 513 / by, 2050 / by, ESMM_GEN_DENSE, 1, ESMM_BF16);
}

static void large_decode(void **state)
{
  (void)state;
  int64_t by = th_env_int("ESMM_TEST_CASES", 0) ? 4 : 1;
  static const int64_t heights[] = {1, 4, 5, 16};
  for (int h = 0; h < 4; h++)
    for (int d = 0; d < 3; d++)
      check_large(heights[h], 2051 / by, 3001 / by, ESMM_GEN_RANDOM, 0.2, (esmm_dtype)d);
}

/* esmm_matrix_copy is the public way through the library's conversions. */
static void conversions_round_to_nearest_even(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(1);
  enum { ALL = 65536 };
  esmm_matrix half = th_matrix_alloc(1, ALL, ESMM_F16), wide = th_matrix_alloc(1, ALL, ESMM_F32);
  for (int d = 1; d < 3; d++) {
    half.dtype = (esmm_dtype)d;
    for (int i = 0; i < ALL; i++)
      ((uint16_t *)half.data)[i] = (uint16_t)i;
    assert_int_equal(esmm_matrix_copy(ctx, &half, &wide), ESMM_OK);
    for (int i = 0; i < ALL; i++)
      if (!same(th_get(&wide, 0, i), th_decode(half.data, half.dtype, i)))
        fail_msg("%s bits %04x became %g", esmm_dtype_str(half.dtype), (unsigned)i, th_get(&wide, 0, i));
    /* Back: each value itself, its midpoint with the next one, and one fp32 step to either side of that. */
    for (int step = 0; step < 4; step++) {
      for (int i = 0; i < ALL; i++) {
        double here = th_decode(half.data, half.dtype, i), next = th_decode(half.data, half.dtype, (i + 1) % ALL);
        float x = (float)here;
        if (step > 0 && isfinite(here) && isfinite(next) && (i + 1) % 32768 != 0)
          x = (float)((here + next) / 2);
        if (step > 1)
          x = nextafterf(x, step == 2 ? INFINITY : -INFINITY);
        ((float *)wide.data)[i] = x;
      }
      esmm_matrix back = th_matrix_alloc(1, ALL, half.dtype);
      assert_int_equal(esmm_matrix_copy(ctx, &wide, &back), ESMM_OK);
      for (int i = 0; i < ALL; i++) {
        double x = th_get(&wide, 0, i), want = th_round(half.dtype, x), got = th_get(&back, 0, i);
        if (!same(got, want) || (!isnan(want) && signbit(got) != signbit(want)))
          fail_msg("%.9g became %s %g, not %g", x, esmm_dtype_str(half.dtype), got, want);
      }
      free(back.data);
    }
  }
  free(half.data);
  free(wide.data);
  esmm_ctx_free(ctx);
}

static void copy_changes_order(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(2);
  th_arena from_arena, to_arena;
  th_arena_create(&from_arena, 1 << 16);
  th_arena_create(&to_arena, 1 << 16);
  for (int orders = 0; orders < 4; orders++) {
    esmm_matrix from, to;
    th_matrix_place(&from_arena, &from, 13, 7, 3, ESMM_F32, (esmm_order)(orders & 1));
    th_matrix_place(&to_arena, &to, 13, 7, 1, ESMM_F16, (esmm_order)(orders >> 1));
    th_fill(&from, 3, 0.5, true);
    assert_int_equal(esmm_matrix_copy(ctx, &from, &to), ESMM_OK);
    for (int64_t i = 0; i < 13; i++)
      for (int64_t j = 0; j < 7; j++)
        assert_true(th_get(&from, i, j) == th_get(&to, i, j));
    int64_t lines = to.order == ESMM_ROW_MAJOR ? 13 : 7, length = to.order == ESMM_ROW_MAJOR ? 7 : 13;
    for (int64_t line = 0; line + 1 < lines; line++)
      assert_true(isnan(th_decode(to.data, to.dtype, line * to.ld + length))); /* padding keeps its poison */
    assert_true(th_guards_intact(&to_arena));
  }
  th_arena_free(&from_arena);
  th_arena_free(&to_arena);
  esmm_ctx_free(ctx);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(special_values_of_a_reach_c),
      cmocka_unit_test(special_values_of_b),
      cmocka_unit_test(strict_meets_zeros_of_b),
      cmocka_unit_test(alpha_zero_reads_neither),
      cmocka_unit_test(extremes_of_half_precision),
      cmocka_unit_test(nothing_is_made_of_padding),
      cmocka_unit_test(extremes_of_single_precision),
      cmocka_unit_test(pattern_may_drop_terms),
      cmocka_unit_test(large_products),
      cmocka_unit_test(large_decode),
      cmocka_unit_test(conversions_round_to_nearest_even),
      cmocka_unit_test(copy_changes_order),
  };
  return cmocka_run_group_tests_name("values", tests, NULL, NULL);
}
