/*
 * test_epilogue_options.c: what of an epilogue is refused, and what is left as it was then; options of older programs;
 * that C is not read unless asked for, and finished once. test_epilogue.c has what an epilogue computes.
 */
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const esmm_activation ACTIVATIONS[] = {ESMM_ACT_NONE, ESMM_ACT_RELU,      ESMM_ACT_RELU2,
                                              ESMM_ACT_GELU, ESMM_ACT_GELU_TANH, ESMM_ACT_SILU};

static esmm_ctx *ctx;

typedef struct desk {
  esmm_matrix a, b, c, other;
  esmm_weights *w, *narrow;
  esmm_matmul_opts opts;
  esmm_pattern *pattern;
  int32_t counts[40];
} desk;

static void expect(desk *d, esmm_status want, const char *word1, const char *word2)
{
  static const int32_t untouched[40] = {0};
  float *c = d->c.data;
  for (int64_t i = 0; i < d->c.rows * d->c.cols; i++)
    c[i] = 7;
  memset(d->counts, 0, sizeof d->counts);
  d->pattern = (esmm_pattern *)(void *)d;
  d->opts.c_pattern = &d->pattern;
  th_expect(word1, esmm_matmul(ctx, &d->a, d->w, &d->c, &d->opts, NULL), want, esmm_ctx_error(ctx), word1, word2);
  assert_null(d->pattern);
  for (int64_t i = 0; i < d->c.rows * d->c.cols; i++)
    assert_true(c[i] == 7.0f);
  assert_memory_equal(d->counts, untouched, sizeof untouched);
  d->opts = (esmm_matmul_opts){.size = sizeof d->opts};
}

static void bad_options_are_refused(void **state)
{
  (void)state;
  desk d = {.a = th_matrix_alloc(10, 20, ESMM_F32),
            .b = th_matrix_alloc(20, 40, ESMM_F32),
            .c = th_matrix_alloc(10, 40, ESMM_F32),
            .other = th_matrix_alloc(10, 40, ESMM_F32),
            .opts = {.size = sizeof d.opts}};
  th_fill(&d.a, 1, 1, false);
  th_fill(&d.b, 2, 1, false);
  th_fill(&d.other, 3, 1, false);
  esmm_matrix slice = d.b;
  slice.cols = 30;
  slice.ld = 40;
  assert_int_equal(esmm_prepare(ctx, &d.b, NULL, &d.w), ESMM_OK);
  assert_int_equal(esmm_prepare(ctx, &slice, NULL, &d.narrow), ESMM_OK);

  d.opts.activation = (esmm_activation)6;
  expect(&d, ESMM_ERR_ARGUMENT, "opts->activation", "6");
  d.opts.activation = (esmm_activation)-1;
  expect(&d, ESMM_ERR_ARGUMENT, "opts->activation", "-1");
  d.opts.c_strip_rows = -3;
  expect(&d, ESMM_ERR_ARGUMENT, "opts->c_strip_rows", "-3");
  d.opts.gate_bias = d.other.data;
  expect(&d, ESMM_ERR_ARGUMENT, "opts->gate_bias", "opts->gate is NULL");
  d.opts.gate = d.narrow;
  expect(&d, ESMM_ERR_SHAPE, "opts->gate", "20 x 30");
  d.opts.column_nonzeros = (int32_t *)(void *)((char *)d.counts + 2);
  expect(&d, ESMM_ERR_ARGUMENT, "opts->column_nonzeros", "aligned");

  esmm_matrix r = d.other;
  r.rows = 9;
  d.opts.residual = &r;
  expect(&d, ESMM_ERR_SHAPE, "opts->residual", "9 x 40");
  r = d.other;
  r.ld = 39;
  d.opts.residual = &r;
  expect(&d, ESMM_ERR_LD, "opts->residual", "39");
  r = d.other;
  r.dtype = (esmm_dtype)9;
  d.opts.residual = &r;
  expect(&d, ESMM_ERR_DTYPE, "opts->residual", "9");
  r = d.other;
  r.data = NULL;
  d.opts.residual = &r;
  expect(&d, ESMM_ERR_ARGUMENT, "opts->residual", "NULL");
  r = d.c; /* C itself, but turned */
  r.order = ESMM_COL_MAJOR;
  r.ld = 10;
  d.opts.residual = &r;
  expect(&d, ESMM_ERR_OVERLAP, "opts->residual", "c");
  d.opts.gate = d.w;
  d.opts.gate_bias = (const float *)d.c.data + 3;
  expect(&d, ESMM_ERR_OVERLAP, "opts->gate_bias", "c");

  struct {
    const char *name;
    const void *at;
  } shared[] = {{"c", d.c.data},
                {"a", d.a.data},
                {"opts->residual", d.other.data},
                {"opts->bias", d.other.data},
                {"opts->gate_bias", d.other.data}};
  for (int i = 0; i < COUNT(shared); i++) {
    memcpy(&d.opts.column_nonzeros, &shared[i].at, sizeof shared[i].at);
    d.opts.residual = i == 2 ? &d.other : NULL;
    d.opts.bias = i == 3 ? d.other.data : NULL;
    d.opts.gate = i == 4 ? d.w : NULL;
    d.opts.gate_bias = i == 4 ? d.other.data : NULL;
    expect(&d, ESMM_ERR_OVERLAP, "opts->column_nonzeros", shared[i].name);
  }
  d.opts.force = "no_such_kernel";
  d.opts.column_nonzeros = d.counts;
  expect(&d, ESMM_ERR_UNKNOWN_KERNEL, "no_such_kernel", "list");
  d.opts.force = "decode"; /* m is 10: it can; strict it cannot */
  d.opts.strict = 1;
  d.opts.column_nonzeros = d.counts;
  d.opts.gate = d.w;
  expect(&d, ESMM_ERR_UNSUPPORTED, "decode", "strict");

  /* More rows than 31 bits count: nothing of that size need be there. */
  const esmm_matrix tall_a = {.rows = (int64_t)INT32_MAX + 1, .cols = 0}, empty = {.rows = 0, .cols = 0};
  esmm_matrix tall_c = {.rows = tall_a.rows, .cols = 0};
  esmm_weights *none = NULL;
  int32_t count = 5;
  esmm_matmul_opts opts = {.size = sizeof opts, .column_nonzeros = &count};
  assert_int_equal(esmm_prepare(ctx, &empty, NULL, &none), ESMM_OK);
  th_expect("rows", esmm_matmul(ctx, &tall_a, none, &tall_c, &opts, NULL), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx),
            "2147483648", "column_nonzeros");
  assert_int_equal(count, 5);
  esmm_weights_free(none);

  esmm_weights_free(d.w);
  esmm_weights_free(d.narrow);
  free(d.a.data);
  free(d.b.data);
  free(d.c.data);
  free(d.other.data);
}

/* A program that knows only the options before `residual` still works; what lies behind is not looked at. */
static void older_programs_still_work(void **state)
{
  (void)state;
  esmm_matrix a = th_matrix_alloc(4, 4, ESMM_F32), b = th_matrix_alloc(4, 4, ESMM_F32),
              c = th_matrix_alloc(4, 4, ESMM_F32);
  th_fill(&a, 1, 1, true);
  th_fill(&b, 2, 1, true);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  esmm_matmul_opts opts;
  memset(&opts, 0xff, sizeof opts);
  memset(&opts, 0, offsetof(esmm_matmul_opts, residual));
  opts.size = offsetof(esmm_matmul_opts, residual);
  assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, NULL), ESMM_OK);
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
}

/* beta = 0 and no residual never read C; NaN and Inf go where IEEE takes them. */
static void c_is_not_read_unless_asked(void **state)
{
  (void)state;
  esmm_matrix a = th_matrix_alloc(20, 30, ESMM_F32), b = th_matrix_alloc(30, 40, ESMM_F32);
  th_fill(&a, 1, 1, false);
  th_fill(&b, 2, 1, false);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  for (int f = 0; f < COUNT(ACTIVATIONS); f++)
    for (int dtype = 0; dtype < 3; dtype++) {
      esmm_matrix c = th_matrix_alloc(20, 40, (esmm_dtype)dtype);
      memset(c.data, 0xff, (size_t)20 * 40 * esmm_dtype_size(c.dtype)); /* NaN */
      const esmm_matmul_opts opts = {.size = sizeof opts, .activation = ACTIVATIONS[f], .gate = w};
      assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, NULL), ESMM_OK);
      for (int64_t i = 0; i < 20; i++)
        for (int64_t j = 0; j < 40; j++)
          if (isnan(th_get(&c, i, j)))
            fail_msg("activation %d, %s: C[%lld,%lld] was read", (int)ACTIVATIONS[f], esmm_dtype_str(c.dtype),
                     (long long)i, (long long)j);
      free(c.data);
    }
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
}

/* C [m, n] of ones [m, k] times ones, which are in w, with C added twice: as beta * C, and as a residual in place. */
static void expect_finished_once(esmm_ctx *of, const char *force, esmm_dtype dtype, const esmm_weights *w, int64_t m,
                                 int64_t k, int64_t n)
{
  enum { MOST_N = 100 };
  const float alpha = 0.5f, beta = 1.0f;
  int32_t counts[MOST_N];
  esmm_matrix a = th_matrix_alloc(m, k, dtype), c = th_matrix_alloc(m, n, ESMM_F32);
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .alpha = &alpha, .beta = &beta, .residual = &c, .column_nonzeros = counts, .force = force};
  for (int64_t i = 0; i < m * k; i++)
    th_encode(a.data, dtype, i, 1);
  for (int64_t i = 0; i < m * n; i++)
    ((float *)c.data)[i] = 1000;
  assert_true(n <= MOST_N);
  const esmm_status status = esmm_matmul(of, &a, w, &c, &opts, NULL);
  for (int64_t i = 0; status == ESMM_OK && i < m * n; i++) {
    const double want = 0.5 * (double)k + 2000, got = (double)((float *)c.data)[i];
    if (got != want || counts[i % n] != m)
      fail_msg("%s, %s, %d x %d x %d: C[%d] is %g, not %g, %d nonzeros in its column", force, esmm_dtype_str(dtype),
               (int)m, (int)k, (int)n, (int)i, got, want, (int)counts[i % n]);
  }
  if (status != ESMM_OK && status != ESMM_ERR_UNSUPPORTED)
    fail_msg("%s: %s", force, esmm_ctx_error(of));
  free(a.data);
  free(c.data);
}

/* Kernels go through long sums in stretches of k: what comes after a sum comes after the last of them. */
static void c_is_finished_once(void **state)
{
  (void)state;
  static const int64_t ks[] = {2048, 4097, 8200}, ns[] = {15, 32, 100};
  esmm_ctx *one = th_ctx(1);
  for (int kernel = 0; kernel < esmm_kernel_count(); kernel++)
    for (int at = 0; at < COUNT(ks) * COUNT(ns) * 2; at++) {
      const int64_t k = ks[at / 2 % COUNT(ks)], n = ns[at / 2 / COUNT(ks)];
      const esmm_dtype dtype = at % 2 ? ESMM_BF16 : ESMM_F32;
      esmm_kernel_info info = {.size = sizeof info};
      esmm_weights *w = NULL;
      assert_int_equal(esmm_kernel_get(ctx, kernel, &info), ESMM_OK);
      if (!info.available)
        break;
      esmm_matrix b = th_matrix_alloc(k, n, dtype);
      for (int64_t i = 0; i < k * n; i++)
        th_encode(b.data, dtype, i, 1);
      const esmm_prepare_opts prepare = th_prepare_opts_for(ctx, info.name);
      const esmm_status prepared = esmm_prepare(ctx, &b, &prepare, &w);
      if (prepared == ESMM_OK) {
        expect_finished_once(one, info.name, dtype, w, 64, k, n);
        expect_finished_once(ctx, info.name, dtype, w, 3, k, n);
      } else if (prepared != ESMM_ERR_UNSUPPORTED) { /* a GPU keeps blocks and N:M of 16 bits alone */
        fail_msg("%s: %s", info.name, esmm_ctx_error(ctx));
      }
      esmm_weights_free(w);
      free(b.data);
    }
  esmm_ctx_free(one);
}

static int make_ctx(void **state)
{
  (void)state;
  ctx = th_ctx(2);
  return 0;
}

static int free_ctx(void **state)
{
  (void)state;
  esmm_ctx_free(ctx);
  return 0;
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bad_options_are_refused),
      cmocka_unit_test(older_programs_still_work),
      cmocka_unit_test(c_is_not_read_unless_asked),
      cmocka_unit_test(c_is_finished_once),
  };
  return cmocka_run_group_tests_name("epilogue options", tests, make_ctx, free_ctx);
}
