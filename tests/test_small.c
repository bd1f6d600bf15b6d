/*
 * test_small.c: small and narrow products, whose ways through the library are their own: every n of 1 to 17 with every
 * k of 1 to 70, dtypes, orders, gaps between rows and all that may follow a sum, drawn anew for each; the plan that is
 * remembered outright, while what it depends on changes from call to call; a form of B that files do not hold.
 *
 * Elements are small integers, so that every sum is exact: C has to be, too. Buffers end at an inaccessible page.
 */
#include "harness.h"
#include "scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_M = 33, MOST_K = 70, MOST_N = 17, ROOM = 1 << 16, MOST_NAMES = 8 };

/* ---- kernels ---- */

/* auto, and all kernels that are for such products. */
static int names_of(esmm_ctx *ctx, const char *names[MOST_NAMES])
{
  int count = 0;
  names[count++] = NULL;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    if (info.available && (strncmp(info.name, "dots", 4) == 0 || strncmp(info.name, "direct", 6) == 0))
      names[count++] = info.name;
  }
  assert_true(count >= 3 && count <= MOST_NAMES);
  return count;
}

/* ---- one product, in memory of its own ---- */

typedef struct product {
  esmm_matrix a, b, gate, c, residual;
  float bias[MOST_N], gate_bias[MOST_N], alpha, beta;
  int32_t counts[MOST_N];
  esmm_matmul_opts opts;
  bool counted;
  double want[MOST_M * MOST_N];
} product;

static th_arena arenas[5];

static void draw_matrix(th_rng *rng, th_arena *arena, esmm_matrix *m, int64_t rows, int64_t cols, double density)
{
  th_matrix_place(arena, m, rows, cols, th_below(rng, 2) * th_below(rng, 5), (esmm_dtype)th_below(rng, 3),
                  th_below(rng, 3) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++)
      th_set(m, i, j, th_unit(rng) < density ? (double)(th_below(rng, 7) - 3) : 0.0);
}

static double dot(const product *p, const esmm_matrix *b, int64_t i, int64_t j)
{
  double sum = 0;
  for (int64_t k = 0; k < b->rows; k++)
    sum += th_get(&p->a, i, k) * th_get(b, k, j);
  return sum;
}

/* What C must hold: read before the product, which changes it. */
static void expect_c(product *p)
{
  const esmm_matmul_opts *o = &p->opts;
  for (int64_t i = 0; i < p->c.rows; i++)
    for (int64_t j = 0; j < p->c.cols; j++) {
      double x = p->alpha * dot(p, &p->b, i, j) + (o->bias ? p->bias[j] : 0);
      x += p->beta != 0 ? p->beta * th_get(&p->c, i, j) : 0;
      const bool relu = o->activation == ESMM_ACT_RELU;
      if (o->gate) {
        const double y = p->alpha * dot(p, &p->gate, i, j) + (o->gate_bias ? p->gate_bias[j] : 0);
        x *= relu && y < 0 ? 0 : y;
      } else if (relu && x < 0) {
        x = 0;
      }
      x += o->residual ? th_get(&p->residual, i, j) : 0;
      p->want[i * p->c.cols + j] = th_round(p->c.dtype, x);
    }
}

static void draw_product(th_rng *rng, product *p, int64_t m, int64_t k, int64_t n)
{
  static const double densities[] = {1, 0.5, 0.1, 0};
  memset(p, 0, sizeof *p);
  draw_matrix(rng, &arenas[0], &p->a, m, k, densities[th_below(rng, 4)]);
  draw_matrix(rng, &arenas[1], &p->b, k, n, densities[th_below(rng, 2)]);
  draw_matrix(rng, &arenas[2], &p->gate, k, n, 1);
  draw_matrix(rng, &arenas[3], &p->c, m, n, 1);
  draw_matrix(rng, &arenas[4], &p->residual, m, n, 1);
  const bool plain = th_below(rng, 2);
  p->alpha = plain || th_below(rng, 2) ? 1.0f : 2.0f;
  p->beta = (float)th_below(rng, 2) * (plain || th_below(rng, 2) ? 1.0f : -2.0f);
  for (int64_t j = 0; j < n; j++) {
    p->bias[j] = (float)(j % 5 - 2);
    p->gate_bias[j] = (float)(j % 3 - 1);
  }
  p->opts = (esmm_matmul_opts){.size = sizeof p->opts, .alpha = &p->alpha, .beta = &p->beta};
  p->opts.strict = th_below(rng, 4) == 0;
  p->counted = th_below(rng, 3) == 0;
  if (p->counted)
    p->opts.column_nonzeros = p->counts;
  if (!plain) {
    p->opts.bias = th_below(rng, 2) ? p->bias : NULL;
    p->opts.activation = th_below(rng, 2) ? ESMM_ACT_RELU : ESMM_ACT_NONE;
    p->opts.residual = th_below(rng, 3) ? NULL : &p->residual;
  }
}

static void check_c(const product *p, const char *what, const esmm_pattern *pattern, esmm_ctx *ctx)
{
  uint64_t *bits = pattern ? th_pattern_bits(ctx, pattern) : NULL;
  const esmm_pattern_info info = pattern ? th_pattern(ctx, pattern) : (esmm_pattern_info){0};
  for (int64_t j = 0; j < p->c.cols; j++) {
    int nonzeros = 0;
    bool alive = false; /* is there a nonzero in this strip? */
    for (int64_t i = 0; i < p->c.rows; i++) {
      const double got = th_get(&p->c, i, j), want = p->want[i * p->c.cols + j];
      nonzeros += want != 0;
      if (!(got == want))
        fail_msg("%s: C[%d,%d] is %g, not %g", what, (int)i, (int)j, got, want);
      alive = alive || want != 0;
      if (bits && (i + 1 == p->c.rows || (i + 1) % info.strip_rows == 0)) { /* the last row of a strip */
        assert_int_equal(bits[i / info.strip_rows * info.words + j / 64] >> (j % 64) & 1, alive);
        alive = false;
      }
    }
    if (p->counted && p->counts[j] != nonzeros)
      fail_msg("%s: %d nonzeros in column %d, not %d", what, (int)p->counts[j], (int)j, nonzeros);
  }
  free(bits);
  for (int i = 0; i < 5; i++)
    assert_true(th_guards_intact(&arenas[i]));
}

static void check_product(esmm_ctx *ctx, th_rng *rng, int64_t m, int64_t k, int64_t n, const char *force)
{
  static char what[160];
  product p;
  esmm_weights *w = NULL, *gate = NULL;
  esmm_pattern *pattern = NULL;
  esmm_stats stats = {.size = sizeof stats};
  draw_product(rng, &p, m, k, n);
  const esmm_prepare_opts prepare = {.size = sizeof prepare, .strict = p.opts.strict};
  p.opts.force = force;
  snprintf(what, sizeof what, "%s, %d x %d x %d, A %s%s, B %s, C %s%s, alpha %g, beta %g%s%s%s%s",
           force ? force : "auto", (int)m, (int)k, (int)n, esmm_dtype_str(p.a.dtype), p.a.order ? " by columns" : "",
           esmm_dtype_str(p.b.dtype), esmm_dtype_str(p.c.dtype), p.c.order ? " by columns" : "", (double)p.alpha,
           (double)p.beta, p.opts.bias ? ", bias" : "", p.opts.activation ? ", relu" : "",
           p.opts.residual ? ", residual" : "", p.opts.strict ? ", strict" : "");
  th_on_crash(what);
  assert_int_equal(esmm_prepare(ctx, &p.b, &prepare, &w), ESMM_OK);
  if (th_below(rng, 6) == 0) {
    assert_int_equal(esmm_prepare(ctx, &p.gate, &prepare, &gate), ESMM_OK);
    p.opts.gate = gate;
    p.opts.gate_bias = th_below(rng, 2) ? p.gate_bias : NULL;
  }
  if (th_below(rng, 3) == 0)
    p.opts.c_pattern = &pattern;
  expect_c(&p);
  const esmm_status status = esmm_matmul(ctx, &p.a, w, &p.c, &p.opts, th_below(rng, 2) ? &stats : NULL);
  if (force && strncmp(force, "dots", 4) == 0 && n > 15)
    th_expect(what, status, ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "turned columns", "15");
  else if (status != ESMM_OK)
    fail_msg("%s: %s", what, esmm_ctx_error(ctx));
  else
    check_c(&p, what, pattern, ctx);
  esmm_pattern_free(pattern);
  esmm_weights_free(w);
  esmm_weights_free(gate);
}

static void check_shapes(int threads, uint64_t seed)
{
  static const int64_t rows[] = {1, 2, 3, 7, 16, 33};
  esmm_ctx *ctx = th_ctx(threads);
  const char *names[MOST_NAMES];
  const int count = names_of(ctx, names);
  th_rng rng = {seed};
  int turn = 0;
  for (int i = 0; i < 5; i++)
    th_arena_create(&arenas[i], ROOM);
  for (int64_t n = 1; n <= MOST_N; n++)
    for (int64_t k = 1; k <= MOST_K; k++)
      for (size_t i = 0; i < sizeof rows / sizeof *rows; i++, turn++)
        check_product(ctx, &rng, rows[i], k, n, names[turn % count]);
  for (int i = 0; i < 5; i++)
    th_arena_free(&arenas[i]);
  esmm_ctx_free(ctx);
}

static void every_small_shape(void **state)
{
  (void)state;
  check_shapes(1, 1);
}

/* A small product takes one thread of its own accord: a large one shows that parts of C meet without a seam. */
static void parts_of_threads_meet(void **state)
{
  (void)state;
  static const int64_t shapes[][3] = {{1001, 97, 15},  {513, 321, 4},   {3, 700, 150}, {17, 330, 131},
                                      {700, 9, 131},   {700, 9, 50},    {700, 9, 7},   {5, 1300, 64},
                                      {13, 2500, 100}, {33, 2500, 120}, {1, 3001, 40}, {1001, 1, 1}};
  esmm_ctx *one = th_ctx(1), *three = th_ctx(3);
  const char *names[MOST_NAMES];
  const int count = names_of(one, names);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    esmm_matrix a = th_matrix_alloc(shapes[i][0], shapes[i][1], ESMM_F32),
                b = th_matrix_alloc(shapes[i][1], shapes[i][2], ESMM_BF16);
    esmm_matrix c = th_matrix_alloc(a.rows, b.cols, ESMM_F32), want = th_matrix_alloc(a.rows, b.cols, ESMM_F32);
    th_fill(&a, 1, 0.7, true);
    th_fill(&b, 2, 1, true);
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare(one, &b, NULL, &w), ESMM_OK);
    for (int j = 0; j < 3 * count; j++) {
      const float alpha = j % 3 == 1 ? 2.0f : 1.0f, beta = j % 3 == 2 ? 0.0f : 1.0f;
      const esmm_matmul_opts opts = {.size = sizeof opts, .force = names[j / 3], .alpha = &alpha, .beta = &beta},
                             ref = {.size = sizeof ref, .force = "ref", .alpha = &alpha, .beta = &beta};
      memset(c.data, 0, th_matrix_bytes(&c));
      memset(want.data, 0, th_matrix_bytes(&want));
      assert_int_equal(esmm_matmul(one, &a, w, &want, &ref, NULL), ESMM_OK);
      const esmm_status status = esmm_matmul(three, &a, w, &c, &opts, NULL);
      if (status != ESMM_ERR_UNSUPPORTED)
        assert_memory_equal(c.data, want.data, th_matrix_bytes(&c));
    }
    esmm_weights_free(w);
    free(a.data);
    free(b.data);
    free(c.data);
    free(want.data);
  }
  esmm_ctx_free(one);
  esmm_ctx_free(three);
}

/* ---- what is remembered ---- */

static esmm_ctx *ctx_of(int remember)
{
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .device = "cpu", .threads = 1, .no_tuning_cache = 1, .remember = remember};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  return ctx;
}

/* Calls in which all that a plan depends on changes, in any order: remembered, planned anew and with statistics, they
   give the same bits. */
static void changing_calls_are_right(void **state)
{
  (void)state;
  enum { M = 9, K = 70, N = 11, CALLS = 3000, CELLS = (M + 1) * (K + 4) };
  static const int64_t columns[] = {1, 7, 11, 16, 40};
  static float x[CELLS], got[CELLS], want[CELLS], start[CELLS];
  static float bias[64];
  esmm_ctx *ctx = ctx_of(1), *anew = ctx_of(-1);
  th_rng rng = {7};
  esmm_weights *w[5];
  for (int i = 0; i < 5; i++) {
    esmm_matrix b = th_matrix_alloc(K, columns[i], ESMM_F32);
    th_fill(&b, (uint64_t)i, 0.8, false);
    assert_int_equal(esmm_prepare(ctx, &b, NULL, &w[i]), ESMM_OK);
    free(b.data);
  }
  for (int i = 0; i < CELLS; i++)
    start[i] = (float)th_unit(&rng);
  for (int i = 0; i < 64; i++)
    bias[i] = (float)th_unit(&rng) - 0.5f;
  for (int call = 0; call < CALLS; call++) {
    static const float scales[] = {1, 0, 0.5f, -1};
    const int which = (int)th_below(&rng, 5);
    const float alpha = scales[th_below(&rng, 4)], beta = scales[th_below(&rng, 4)];
    const int64_t m = 1 + th_below(&rng, M), n = columns[which];
    esmm_matrix a = {.rows = m, .cols = K, .dtype = (esmm_dtype)th_below(&rng, 3)}, c = {.rows = m, .cols = n};
    a.order = th_below(&rng, 4) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
    c.order = th_below(&rng, 4) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
    c.dtype = th_below(&rng, 3) ? ESMM_F32 : ESMM_BF16;
    a.ld = a.order == ESMM_ROW_MAJOR ? K + th_below(&rng, 3) : 0;
    c.ld = c.order == ESMM_ROW_MAJOR ? n + th_below(&rng, 3) : 0;
    a.data = (char *)x + esmm_dtype_size(a.dtype) * (size_t)th_below(&rng, 3);
    for (int64_t i = 0; i < m; i++)
      for (int64_t k = 0; k < K; k++)
        th_set(&a, i, k, th_below(&rng, 2) ? th_unit(&rng) - 0.5 : 0);
    esmm_matmul_opts opts = {.size = sizeof opts, .strict = th_below(&rng, 4) == 0};
    opts.alpha = th_below(&rng, 2) ? &alpha : NULL;
    opts.beta = th_below(&rng, 2) ? &beta : NULL;
    opts.bias = th_below(&rng, 3) ? NULL : bias;
    opts.activation = th_below(&rng, 3) ? ESMM_ACT_NONE : ESMM_ACT_RELU;
    esmm_stats stats = {.size = sizeof stats};
    for (int way = 0; way < 3; way++) { /* anew; remembered; with statistics */
      memcpy(way ? got : want, start, sizeof got);
      c.data = way ? got : want;
      assert_int_equal(esmm_matmul(way ? ctx : anew, &a, w[which], &c, &opts, way == 2 ? &stats : NULL), ESMM_OK);
      if (way && memcmp((const char *)got, (const char *)want, sizeof got) != 0)
        fail_msg("call %d, way %d: other bits than planned anew (%s)", call, way, stats.kernel);
    }
  }
  for (int i = 0; i < 5; i++)
    esmm_weights_free(w[i]);
  esmm_ctx_free(ctx);
  esmm_ctx_free(anew);
}

/* ---- files ---- */

static void loaded_weights_have_all_forms(void **state)
{
  (void)state;
  static const esmm_use uses[] = {ESMM_USE_ANY, ESMM_USE_DECODE, ESMM_USE_LARGE_M};
  esmm_ctx *ctx = th_ctx(1);
  const char *path = in_dir("weights");
  for (int i = 0; i < 9; i++) {
    const int64_t k = i % 2 ? 70 : 129, n = i < 6 ? 1 + 7 * (i % 3) : 16;
    esmm_matrix a = th_matrix_alloc(5, k, ESMM_F32), b = th_matrix_alloc(k, n, (esmm_dtype)(i % 3));
    esmm_matrix c = th_matrix_alloc(5, n, ESMM_F32), want = th_matrix_alloc(5, n, ESMM_F32);
    const esmm_prepare_opts prepare = {.size = sizeof prepare, .use = uses[i / 3]};
    const esmm_matmul_opts opts = {.size = sizeof opts, .force = n < 16 ? "dots" : NULL};
    esmm_weights *w = NULL, *loaded = NULL;
    th_fill(&a, 1, 1, false);
    th_fill(&b, 2, 0.3, false);
    assert_int_equal(esmm_prepare(ctx, &b, &prepare, &w), ESMM_OK);
    assert_int_equal(esmm_weights_save(ctx, w, path), ESMM_OK);
    assert_int_equal(esmm_weights_load(ctx, path, &loaded), ESMM_OK);
    assert_int_equal(esmm_matmul(ctx, &a, w, &want, &opts, NULL), ESMM_OK);
    assert_int_equal(esmm_matmul(ctx, &a, loaded, &c, &opts, NULL), ESMM_OK);
    assert_memory_equal(c.data, want.data, th_matrix_bytes(&c));
    esmm_weights_info info = {.size = sizeof info}, info_loaded = info;
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
    assert_int_equal(esmm_weights_get_info(loaded, &info_loaded), ESMM_OK);
    assert_int_equal(info.bytes, info_loaded.bytes);
    esmm_weights_free(w);
    esmm_weights_free(loaded);
    free(a.data);
    free(b.data);
    free(c.data);
    free(want.data);
  }
  esmm_ctx_free(ctx);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_small_shape), cmocka_unit_test(parts_of_threads_meet),
                                     cmocka_unit_test(changing_calls_are_right),
                                     cmocka_unit_test(loaded_weights_have_all_forms)};
  return cmocka_run_group_tests_name("small", tests, make_dir, remove_dir);
}
