/*
 * test_recall.c: what a context remembers, on a CPU: which kernels can run a shape of call is found out once, with all
 * that it depends on as its key, and gives the same results as planning anew; the public functions, their defaults and
 * errors. test_cuda_recall.c has the densities, which a GPU alone uses.
 */
#include "choose/recall.h"
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { M = 33, K = 130, N = 70, ROOM = 4096 };

static esmm_ctx *make_ctx(int remember)
{
  char error[256] = "";
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = "cpu",
                              .threads = 1,
                              .no_tuning_cache = 1,
                              .remember = remember,
                              .error = error,
                              .error_size = sizeof error};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    fail_msg("%s", error);
  return ctx;
}

typedef struct rig {
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
} rig;

static void start(rig *x)
{
  *x = (rig){.ctx = make_ctx(1), .a = th_matrix_alloc(M, K, ESMM_F32), .b = th_matrix_alloc(K, N, ESMM_F32)};
  x->c = th_matrix_alloc(M, N, ESMM_F32);
  th_fill(&x->a, 1, 0.4, true);
  th_fill(&x->b, 2, 0.5, true);
  assert_int_equal(esmm_prepare(x->ctx, &x->b, NULL, &x->w), ESMM_OK);
}

static void stop(rig *x)
{
  esmm_weights_free(x->w);
  esmm_ctx_free(x->ctx);
  free(x->a.data);
  free(x->b.data);
  free(x->c.data);
}

static int64_t made(const rig *x)
{
  return esmm_recall_shapes_made(x->ctx);
}

static void run(rig *x, const esmm_matrix *a, const esmm_matrix *c, const esmm_matmul_opts *opts)
{
  esmm_matrix to = *c;
  if (esmm_matmul(x->ctx, a, x->w, &to, opts, NULL) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(x->ctx));
}

/* ---- shapes of calls ---- */

static void second_call_asks_no_kernel(void **state)
{
  (void)state;
  rig x;
  start(&x);
  run(&x, &x.a, &x.c, NULL);
  assert_int_equal(made(&x), 1);
  for (int i = 0; i < 5; i++)
    run(&x, &x.a, &x.c, NULL);
  assert_int_equal(made(&x), 1);
  esmm_weights *first = x.w;
  assert_int_equal(esmm_prepare(x.ctx, &x.b, NULL, &x.w), ESMM_OK); /* the same B, but other weights */
  run(&x, &x.a, &x.c, NULL);
  assert_int_equal(made(&x), 2);
  esmm_weights_free(first);
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  run(&x, &x.a, &x.c, NULL);
  assert_int_equal(made(&x), 3);
  stop(&x);
}

/* Whatever a kernel may look at makes another call of it. */
static void what_kernels_look_at_is_kept_apart(void **state)
{
  (void)state;
  rig x;
  start(&x);
  float *room = calloc(2 * ROOM, sizeof *room), bias[N] = {0}, one = 1.0f, half = 0.5f;
  int32_t counts[N];
  assert_non_null(room);
  esmm_matrix wide_a = th_matrix_alloc(K, K, ESMM_F32), wide_c = th_matrix_alloc(N, N, ESMM_F32);
  esmm_matrix residual = {.data = room + ROOM, .rows = M, .cols = N}, by_column = residual, small = residual;
  by_column.order = ESMM_COL_MAJOR;
  small.dtype = ESMM_BF16;
  struct {
    const char *what;
    esmm_matrix a, c;
    esmm_matmul_opts opts;
  } calls[] = {{"plain", x.a, x.c, {.alpha = &half}},
               {"m", x.a, x.c, {0}},
               {"ld of a", x.a, x.c, {0}},
               {"ld of c", x.a, x.c, {0}},
               {"alignment of a", x.a, x.c, {0}},
               {"alignment of c", x.a, x.c, {0}},
               {"dtype of a", x.a, x.c, {0}},
               {"dtype of c", x.a, x.c, {0}},
               {"order of a", x.a, x.c, {0}},
               {"order of c", x.a, x.c, {0}},
               {"beta", x.a, x.c, {.beta = &one}},
               {"bias", x.a, x.c, {.bias = bias}},
               {"activation", x.a, x.c, {.activation = ESMM_ACT_RELU}},
               {"residual", x.a, x.c, {.residual = &residual}},
               {"order of the residual", x.a, x.c, {.residual = &by_column}},
               {"dtype of the residual", x.a, x.c, {.residual = &small}},
               {"counts", x.a, x.c, {.column_nonzeros = counts}},
               {"strict", x.a, x.c, {.strict = 1}}};
  enum { COUNT = sizeof calls / sizeof *calls };
  calls[1].a.rows = calls[1].c.rows = M - 1;
  calls[2].a.rows = calls[2].c.rows = M - 1; /* as in the call before, so that its longer lines fit */
  calls[2].a.ld = K + 1;
  calls[3].c.rows = calls[3].a.rows = M - 1;
  calls[3].c.ld = N + 1;
  calls[4].a.rows = calls[4].c.rows = M - 1;
  calls[4].a.data = (float *)x.a.data + 1;
  calls[5].a.rows = calls[5].c.rows = M - 1;
  calls[5].c.data = (float *)x.c.data + 1;
  calls[6].a.dtype = ESMM_BF16;
  calls[7].c.dtype = ESMM_F16;
  calls[8].a.order = calls[9].c.order = ESMM_COL_MAJOR;
  calls[8].a.data = wide_a.data; /* with room for as many columns as there are rows: the ld is the same */
  calls[9].c.data = wide_c.data;
  calls[8].a.ld = K;
  calls[9].c.ld = N;
  calls[6].a.ld = K;
  calls[7].c.ld = N;
  for (int i = 0; i < COUNT; i++) {
    calls[i].opts.size = sizeof calls[i].opts;
    run(&x, &calls[i].a, &calls[i].c, &calls[i].opts);
    if (made(&x) != i + 1)
      fail_msg("%s: %lld shapes after %d calls", calls[i].what, (long long)made(&x), i + 1);
  }
  for (int i = 0; i < COUNT; i++)
    run(&x, &calls[i].a, &calls[i].c, &calls[i].opts);
  assert_int_equal(made(&x), COUNT);
  free(wide_a.data);
  free(wide_c.data);
  free(room);
  stop(&x);
}

/* Remembered or not, with statistics or without: the same kernel, and so the same bits. */
static void remembered_plans_are_the_same(void **state)
{
  (void)state;
  static const int64_t shapes[][3] = {{1, 200, 300}, {7, 128, 64}, {16, 300, 100}, {64, 257, 200}, {200, 64, 400}};
  static const double densities[] = {1, 0.3, 0.05};
  esmm_ctx *ctx = make_ctx(1), *plain = make_ctx(-1);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const int64_t m = shapes[i][0], k = shapes[i][1], n = shapes[i][2];
    esmm_matrix a = th_matrix_alloc(m, k, ESMM_F32), b = th_matrix_alloc(k, n, ESMM_F32),
                c = th_matrix_alloc(m, n, ESMM_F32), want = th_matrix_alloc(m, n, ESMM_F32);
    esmm_weights *w = NULL;
    th_fill(&b, 3, 0.6, false);
    assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
    for (int j = 0; j < 9; j++) {
      esmm_stats stats = {.size = sizeof stats};
      const esmm_matmul_opts opts = {.size = sizeof opts, .strict = j / 3 == 2};
      th_fill(&a, 4 + (uint64_t)j, densities[j % 3], false);
      assert_int_equal(esmm_matmul(plain, &a, w, &want, &opts, NULL), ESMM_OK);
      assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, NULL), ESMM_OK);
      assert_memory_equal(c.data, want.data, th_matrix_bytes(&c));
      assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &stats), ESMM_OK);
      assert_memory_equal(c.data, want.data, th_matrix_bytes(&c));
      assert_true(stats.kernel[0] && stats.reason[0]);
    }
    esmm_weights_free(w);
    free(a.data);
    free(b.data);
    free(c.data);
    free(want.data);
  }
  assert_int_equal(esmm_recall_shapes_made(plain), 0);
  esmm_ctx_free(ctx);
  esmm_ctx_free(plain);
}

/* More shapes than entries: what was used longest ago is dropped. */
static void full_table_drops_the_oldest(void **state)
{
  (void)state;
  enum { SHAPES = ESMM_RECALL_ENTRIES + 44 };
  esmm_ctx *ctx = make_ctx(1);
  esmm_matrix a = th_matrix_alloc(SHAPES, 8, ESMM_F32), b = th_matrix_alloc(8, 8, ESMM_F32),
              c = th_matrix_alloc(SHAPES, 8, ESMM_F32);
  rig x = {.ctx = ctx};
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &x.w), ESMM_OK);
  for (int m = 1; m <= SHAPES; m++) {
    a.rows = c.rows = m;
    run(&x, &a, &c, NULL);
    a.rows = c.rows = 1; /* used again and again, it stays */
    run(&x, &a, &c, NULL);
  }
  assert_int_equal(made(&x), SHAPES);
  for (int m = SHAPES; m > SHAPES - ESMM_RECALL_ENTRIES + 1; m--) {
    a.rows = c.rows = m;
    run(&x, &a, &c, NULL);
  }
  assert_int_equal(made(&x), SHAPES);
  a.rows = c.rows = 2;
  run(&x, &a, &c, NULL);
  assert_int_equal(made(&x), SHAPES + 1);
  esmm_weights_free(x.w);
  esmm_ctx_free(ctx);
  free(a.data);
  free(b.data);
  free(c.data);
}

/* ---- densities ---- */

static void rows_have_classes(void **state)
{
  (void)state;
  static const int64_t last[] = {1, 2, 4, 8, 16, 32, 64};
  for (int i = 0; i < 7; i++) {
    assert_int_equal(esmm_row_class(last[i]), i);
    assert_int_equal(esmm_row_class(last[i] + 1), i + 1);
  }
  assert_int_equal(esmm_row_class(INT64_MAX), 7);
}

static void densities_are_kept(void **state)
{
  (void)state;
  rig x;
  start(&x);
  esmm_recollection out = {.size = sizeof out, .known = 7};
  const esmm_recollection in = {
      .size = sizeof in, .density_a = 0.25, .strip_density_a = 0.5, .joint_density = 0.125, .strip_rows = 32};
  assert_int_equal(esmm_recall(x.ctx, x.w, M, &out), ESMM_OK);
  assert_true(out.known == 0 && out.strip_density_a == 0 && out.calls == 0 && out.size == sizeof out);
  assert_int_equal(esmm_expect(x.ctx, x.w, M, &in), ESMM_OK);
  run(&x, &x.a, &x.c, NULL);
  assert_int_equal(esmm_recall(x.ctx, x.w, 64, &out), ESMM_OK); /* 33 to 64 rows are one class */
  assert_true(out.known == 1 && out.density_a == 0.25 && out.strip_density_a == 0.5 && out.joint_density == 0.125);
  assert_true(out.strip_rows == 32 && out.reports == 0);
  assert_int_equal(esmm_recall(x.ctx, x.w, 65, &out), ESMM_OK);
  assert_int_equal(out.known, 0);
  const esmm_recollection strips = {.size = sizeof strips, .strip_density_a = 0.5};
  esmm_weights_info info = {.size = sizeof info};
  assert_int_equal(esmm_weights_get_info(x.w, &info), ESMM_OK);
  assert_int_equal(esmm_expect(x.ctx, x.w, 1, &strips), ESMM_OK);
  assert_int_equal(esmm_recall(x.ctx, x.w, 1, &out), ESMM_OK);
  assert_true(out.known && out.joint_density == 0.5 * info.strip_density);
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  assert_int_equal(esmm_recall(x.ctx, x.w, M, &out), ESMM_OK);
  assert_int_equal(out.known, 0);
  stop(&x);
}

static void wrong_arguments(void **state)
{
  (void)state;
  rig x;
  start(&x);
  esmm_recollection good = {.size = sizeof good}, bad = good;
  const struct {
    const char *name, *value;
    esmm_recollection in;
  } wrong[] = {{"density_a", "1.5", {.density_a = 1.5}},
               {"strip_density_a", "-0.1", {.strip_density_a = -0.1}},
               {"joint_density", "nan", {.joint_density = NAN}},
               {"strip_density_a", "0.125", {.density_a = 0.5, .strip_density_a = 0.125}},
               {"density_a", "1.25", {.density_a = 1.25, .strip_density_a = 1}},
               {"joint_density", "0.75", {.strip_density_a = 0.5, .joint_density = 0.75}},
               {"strip_rows", "-3", {.strip_rows = -3}},
               {"strip_rows", "64", {.strip_rows = 64}}};
  assert_int_equal(esmm_recall(NULL, x.w, 1, &good), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_expect(NULL, x.w, 1, &good), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_forget(NULL), ESMM_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    bad = wrong[i].in;
    bad.size = sizeof bad;
    th_expect(wrong[i].name, esmm_expect(x.ctx, x.w, 1, &bad), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), wrong[i].name,
              wrong[i].value);
  }
  bad = (esmm_recollection){.size = 3};
  th_expect("size", esmm_recall(x.ctx, x.w, 1, &bad), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), "out->size", "3");
  th_expect("size", esmm_expect(x.ctx, x.w, 1, &bad), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), "in->size", "3");
  th_expect("out", esmm_recall(x.ctx, x.w, 1, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), "out", "NULL");
  th_expect("in", esmm_expect(x.ctx, x.w, 1, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), "in", "NULL");
  th_expect("weights", esmm_recall(x.ctx, NULL, 1, &good), ESMM_ERR_ARGUMENT, esmm_ctx_error(x.ctx), "weights", "NULL");
  th_expect("m", esmm_recall(x.ctx, x.w, 0, &good), ESMM_ERR_SHAPE, esmm_ctx_error(x.ctx), "m is", "0");
  th_expect("m", esmm_expect(x.ctx, x.w, -2, &good), ESMM_ERR_SHAPE, esmm_ctx_error(x.ctx), "m is", "-2");
  assert_int_equal(esmm_recall(x.ctx, x.w, 1, &good), ESMM_OK);
  assert_int_equal(good.known, 0);
  stop(&x);
}

static void who_remembers(void **state)
{
  (void)state;
  static const struct {
    int asked;
    const char *env;
    int remembers; /* -1: refused, naming the value */
    const char *value;
  } ways[] = {{0, NULL, 1, ""}, {0, "", 1, ""},     {0, "1", 1, ""},      {0, "0", 0, ""},       {1, "0", 1, ""},
              {-1, "1", 0, ""}, {2, NULL, -1, "2"}, {-2, NULL, -1, "-2"}, {0, "yes", -1, "yes"}, {0, "01", -1, "01"}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    char error[256] = "";
    esmm_ctx *ctx = NULL;
    const esmm_ctx_opts opts = {
        .size = sizeof opts, .device = "cpu", .remember = ways[i].asked, .error = error, .error_size = sizeof error};
    if (ways[i].env)
      setenv("ESMM_REMEMBER", ways[i].env, 1);
    const esmm_status status = esmm_ctx_create(&ctx, &opts);
    unsetenv("ESMM_REMEMBER");
    if (ways[i].remembers < 0) {
      th_expect("remember", status, ESMM_ERR_ARGUMENT, error, ways[i].env ? "ESMM_REMEMBER" : "remember",
                ways[i].value);
      continue;
    }
    assert_int_equal(status, ESMM_OK);
    assert_int_equal(ctx->recall != NULL, ways[i].remembers);
    esmm_ctx_free(ctx);
  }
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {cmocka_unit_test(second_call_asks_no_kernel),
                                     cmocka_unit_test(what_kernels_look_at_is_kept_apart),
                                     cmocka_unit_test(remembered_plans_are_the_same),
                                     cmocka_unit_test(full_table_drops_the_oldest),
                                     cmocka_unit_test(rows_have_classes),
                                     cmocka_unit_test(densities_are_kept),
                                     cmocka_unit_test(wrong_arguments),
                                     cmocka_unit_test(who_remembers)};
  return cmocka_run_group_tests_name("recall", tests, NULL, NULL);
}
