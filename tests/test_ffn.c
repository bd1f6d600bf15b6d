/*
 * test_ffn.c: the feed-forward layer against float64: every gradient against finite differences and against a dense
 * backward pass, in every layout and dtype; reports, and caches beside each other.
 */
#include "ffn/ffn.h"
#include "ffn_rig.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const esmm_activation activations[] = {ESMM_ACT_RELU2, ESMM_ACT_RELU, ESMM_ACT_GELU, ESMM_ACT_GELU_TANH,
                                              ESMM_ACT_SILU};
#define ACTIVATIONS (sizeof activations / sizeof *activations)

/* Central differences of the float64 loss, of every parameter, against the library's gradients. */
static void compare_with_differences(const char *what, rig *r)
{
  oracle *o = r->o;
  const double step = 1e-5;
  for (int i = 0; i < P_COUNT; i++) {
    if (!o->p[i])
      continue;
    const int64_t cols = oracle_cols(o, i), count = oracle_rows(o, i) * cols;
    double largest = 0;
    for (int64_t e = 0; e < count; e++)
      largest = fmax(largest, fabs(o->d[i][e]));
    for (int64_t e = 0; e < count; e++) {
      const double kept = o->p[i][e];
      o->p[i][e] = kept + step;
      const double above = oracle_loss(o);
      o->p[i][e] = kept - step;
      const double below = oracle_loss(o);
      o->p[i][e] = kept;
      const double want = (above - below) / (2 * step), got = th_get(&r->d[i], e / cols, e % cols);
      if (!(fabs(got - want) <= 2e-5 * largest + 1e-9))
        fail_msg("%s: %s element %lld is %.9g, the difference quotient is %.9g", what, gradient_names[i], (long long)e,
                 got, want);
    }
  }
}

static void gradients_are_difference_quotients(void **state)
{
  (void)state;
  for (size_t a = 0; a < ACTIVATIONS; a++)
    for (int gated = 0; gated < 2; gated++)
      for (int ranks = 0; ranks < 4; ranks++) {
        char what[80];
        snprintf(what, sizeof what, "activation %d, gated %d, ranks %d", (int)activations[a], gated, ranks);
        oracle o = {.tokens = 5,
                    .d_model = 6,
                    .d_hidden = 14,
                    .rank1 = ranks & 1 ? 3 : 0,
                    .rank2 = ranks & 2 ? 4 : 0,
                    .activation = activations[a],
                    .gated = gated};
        rig r;
        oracle_create(&o, 100 * a + 10 * (uint64_t)gated + (uint64_t)ranks, 1);
        const esmm_ffn_opts opts = opts_of(&o);
        rig_create(&r, &o, &opts, plain, 2);
        rig_run(&r);
        oracle_forward(&o);
        oracle_backward(&o);
        check_all(what, &r, 3e-6);
        compare_with_differences(what, &r);
        oracle_forward(&o);
        memset(r.y.data, 0xff, (size_t)(o.tokens * o.d_model) * sizeof(float));
        must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_X], &r.y, NULL, NULL)); /* without a cache: the same y */
        check_matrix(what, "y", &r.y, o.y, 3e-6);
        rig_free(&r);
        oracle_free(&o);
      }
}

/* Ragged sizes, all modes that are exact, few and many features alive: both ways to make dh, with and without the dead
   features. */
static void exact_and_dense_are_the_dense_pass(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_model, d_hidden, rank1, rank2;
    double dead, shift; /* features without life; what is added to every other bias */
  } cases[] = {
      {1, 1, 1, 0, 0, 0, 0},        {33, 17, 70, 0, 0, 0, 0},    {40, 40, 200, 0, 0, 0.7, 0},
      {40, 40, 200, 0, 0, 0.7, -4}, {64, 24, 130, 0, 0, 0, -4},  {37, 29, 90, 5, 0, 0.5, 0},
      {37, 29, 90, 0, 7, 0.5, -3},  {37, 29, 90, 5, 7, 0.3, -1}, {9, 20, 64, 0, 0, 1, 0},
      {130, 65, 300, 0, 0, 0.2, 1}, {0, 8, 16, 0, 0, 0, 0},
  };
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 8; kind++) {
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = cases[c].d_model,
                  .d_hidden = cases[c].d_hidden,
                  .rank1 = cases[c].rank1,
                  .rank2 = cases[c].rank2,
                  .activation = kind & 2 ? ESMM_ACT_RELU : ESMM_ACT_RELU2,
                  .gated = kind & 1};
      char what[80];
      snprintf(what, sizeof what, "case %zu, kind %d", c, kind);
      oracle_create(&o, c + 17, 1);
      for (int64_t f = 0; f < o.d_hidden; f++)
        o.p[o.gated ? P_B_GATE : P_B1][f] += cases[c].shift;
      kill_features(&o, cases[c].dead, c);
      esmm_ffn_opts opts = opts_of(&o);
      opts.mode = kind & 4 ? ESMM_FFN_DENSE : ESMM_FFN_EXACT;
      rig r;
      rig_create(&r, &o, &opts, plain, 2);
      rig_run(&r);
      oracle_forward(&o);
      oracle_backward(&o);
      check_all(what, &r, 1e-5);
      assert_int_equal(r.report.dw2.dropped, 0);
      assert_int_equal(r.report.sparse_columns, 0);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* Any dtype, order and leading dimension of what the caller owns; any dtype of the cache. */
static void layouts_and_dtypes(void **state)
{
  (void)state;
  static const struct {
    layout l;
    esmm_dtype hidden;
    double share;
  } cases[] = {
      {{ESMM_F32, ESMM_COL_MAJOR, 0}, ESMM_F32, 1e-5}, {{ESMM_F32, ESMM_ROW_MAJOR, 5}, ESMM_F32, 1e-5},
      {{ESMM_F32, ESMM_COL_MAJOR, 3}, ESMM_F32, 1e-5}, {{ESMM_F32, ESMM_ROW_MAJOR, 0}, ESMM_BF16, 2e-2},
      {{ESMM_F32, ESMM_ROW_MAJOR, 1}, ESMM_F16, 3e-3}, {{ESMM_BF16, ESMM_ROW_MAJOR, 0}, ESMM_F32, 2e-2},
      {{ESMM_F16, ESMM_COL_MAJOR, 2}, ESMM_F32, 3e-3}, {{ESMM_BF16, ESMM_COL_MAJOR, 0}, ESMM_BF16, 3e-2},
  };
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 12; kind++) {
      oracle o = {.tokens = 30,
                  .d_model = 19,
                  .d_hidden = 75,
                  .rank1 = kind >= 8 ? 6 : 0,
                  .rank2 = kind >= 8 ? 9 : 0,
                  .activation = kind & 2 ? ESMM_ACT_SILU : ESMM_ACT_RELU2,
                  .gated = kind & 1};
      char what[80];
      snprintf(what, sizeof what, "layout %zu, kind %d", c, kind);
      oracle_create(&o, c + 170, 1);
      if (kind & 4)
        kill_features(&o, 0.8, c);
      for (int i = 0; i < P_COUNT; i++) /* what the library is given, the oracle computes with */
        for (int64_t e = 0; o.p[i] && e < oracle_rows(&o, i) * oracle_cols(&o, i); e++)
          o.p[i][e] = i >= P_B1 ? o.p[i][e] : th_round(cases[c].l.dtype, o.p[i][e]);
      for (int64_t e = 0; e < o.tokens * o.d_model; e++)
        o.dy[e] = th_round(cases[c].l.dtype, o.dy[e]);
      esmm_ffn_opts opts = opts_of(&o);
      opts.dtype = cases[c].hidden;
      rig r;
      rig_create(&r, &o, &opts, cases[c].l, 2);
      rig_run(&r);
      oracle_forward(&o);
      oracle_backward(&o);
      check_all(what, &r, cases[c].share);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* Integers whose sums are exact: skipping changes no bit, whatever the threads. */
static void exact_is_lossless(void **state)
{
  (void)state;
  for (int threads = 1; threads <= 3; threads++)
    for (int gated = 0; gated < 2; gated++) {
      oracle o = {.tokens = 50, .d_model = 12, .d_hidden = 90, .activation = ESMM_ACT_RELU2, .gated = gated};
      oracle_create(&o, 5, 1);
      make_integers(&o, 6, 0.4);
      kill_features(&o, 0.4, 8);
      const esmm_ffn_opts opts = opts_of(&o);
      rig r;
      rig_create(&r, &o, &opts, plain, threads);
      rig_run(&r);
      oracle_forward(&o);
      oracle_backward(&o);
      check_all("integers", &r, 0);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* Tokens of zeros (padding) behind gates that the bias opens: h is zero, and what flows back to b1 is not. */
static void open_gates_before_zeros(void **state)
{
  (void)state;
  oracle o = {.tokens = 12, .d_model = 7, .d_hidden = 40, .activation = ESMM_ACT_RELU2, .gated = true};
  oracle_create(&o, 6, 1);
  for (int64_t i = 0; i < o.tokens * o.d_model; i++)
    o.p[P_X][i] = 0;
  for (int64_t f = 0; f < o.d_hidden; f++) {
    o.p[P_B1][f] = 0;
    o.p[P_B_GATE][f] = f % 8 ? -1 : 1;
  }
  const esmm_ffn_opts opts = opts_of(&o);
  rig r;
  rig_create(&r, &o, &opts, plain, 2);
  rig_run(&r);
  oracle_forward(&o);
  oracle_backward(&o);
  assert_int_equal(r.report.alive_columns, 0);
  assert_true(o.d[P_B1][0] != 0);
  check_all("open gates", &r, 1e-5);
  rig_free(&r);
  oracle_free(&o);
}

static void report_tells_densities(void **state)
{
  (void)state;
  static const esmm_ffn_mode modes[] = {ESMM_FFN_EXACT, ESMM_FFN_DENSE, ESMM_FFN_SPLIT};
  for (int i = 0; i < 3; i++) {
    oracle o = {.tokens = 37, .d_model = 10, .d_hidden = 53, .activation = ESMM_ACT_RELU};
    oracle_create(&o, 4, 1);
    kill_features(&o, 0.3, 5);
    esmm_ffn_opts opts = opts_of(&o);
    opts.mode = modes[i];
    rig r;
    rig_create(&r, &o, &opts, plain, 2);
    oracle_forward(&o);
    int64_t nonzeros = 0, alive = 0, bits = 0;
    for (int64_t f = 0; f < o.d_hidden; f++) {
      bool column = false;
      for (int64_t t = 0; t < o.tokens; t += 8) {
        bool strip = false;
        for (int64_t x = t; x < o.tokens && x < t + 8; x++) {
          nonzeros += o.h[x * o.d_hidden + f] != 0;
          strip = strip || o.h[x * o.d_hidden + f] != 0;
        }
        bits += strip;
        column = column || strip;
      }
      alive += column;
    }
    esmm_ffn_report report = {.size = sizeof report};
    must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_X], &r.y, NULL, &report));
    for (int pass = 0; pass < 2; pass++) {
      assert_int_equal(report.tokens, o.tokens);
      assert_int_equal(report.alive_columns, alive);
      assert_int_equal(report.strip_rows, 8);
      assert_true(fabs(report.element_density - (double)nonzeros / (double)(o.tokens * o.d_hidden)) < 1e-12);
      assert_true(fabs(report.strip_density - (double)bits / (double)(5 * o.d_hidden)) < 1e-12);
      rig_run(&r);
      report = r.report;
    }
    rig_free(&r);
    oracle_free(&o);
  }
}

/* Gradients that are not wanted are not touched, those that are do not hang on the others; accumulate adds. */
static void wanted_gradients_only(void **state)
{
  (void)state;
  for (int kind = 0; kind < 4; kind++) {
    oracle o = {.tokens = 20,
                .d_model = 11,
                .d_hidden = 60,
                .rank1 = kind & 1 ? 4 : 0,
                .rank2 = kind & 1 ? 5 : 0,
                .activation = ESMM_ACT_RELU2,
                .gated = true};
    oracle_create(&o, 40, 1);
    kill_features(&o, kind & 2 ? 0.6 : 0, 2);
    const esmm_ffn_opts opts = opts_of(&o);
    rig r;
    rig_create(&r, &o, &opts, plain, 2);
    must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_X], &r.y, r.cache, NULL));
    oracle_forward(&o);
    oracle_backward(&o);
    for (int i = 0; i < P_COUNT; i++) {
      if (!o.p[i])
        continue;
      for (int j = 0; j < P_COUNT; j++)
        if (o.p[j])
          memset(r.d[j].data, 0xff, (size_t)(r.d[j].rows * r.d[j].cols) * sizeof(float));
      esmm_ffn_grads g = {.size = sizeof g};
      esmm_matrix **matrices[] = {&g.x, &g.w1, &g.w1_v, &g.gate, &g.gate_v, &g.w2, &g.w2_v};
      float **biases[] = {&g.b1, &g.b_gate, &g.b2};
      if (i < P_B1)
        *matrices[i] = &r.d[i];
      else
        *biases[i - P_B1] = r.d[i].data;
      must(r.ctx, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL));
      check_matrix("alone", gradient_names[i], &r.d[i], o.d[i], 1e-5);
      for (int j = 0; j < P_COUNT; j++)
        for (int64_t e = 0; j != i && e < r.d[j].rows * r.d[j].cols; e++)
          assert_true(isnan(th_decode(r.d[j].data, ESMM_F32, e)));
      if (i == P_X)
        continue;
      g.accumulate = 1;
      must(r.ctx, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL));
      for (int64_t e = 0; e < oracle_rows(&o, i) * oracle_cols(&o, i); e++)
        o.d[i][e] *= 2;
      check_matrix("twice", gradient_names[i], &r.d[i], o.d[i], 1e-5);
    }
    rig_free(&r);
    oracle_free(&o);
  }
}

/* Two caches of one layer do not know of each other; backward in any order. */
static void caches_are_apart(void **state)
{
  (void)state;
  oracle a = {.tokens = 21, .d_model = 11, .d_hidden = 60, .activation = ESMM_ACT_RELU2}, b = a;
  b.tokens = 9;
  oracle_create(&a, 1, 1);
  oracle_create(&b, 2, 1);
  for (int i = P_W1; i < P_COUNT; i++) /* the same weights, other tokens */
    if (a.p[i])
      memcpy(b.p[i], a.p[i], (size_t)(oracle_rows(&a, i) * oracle_cols(&a, i)) * sizeof(double));
  const esmm_ffn_opts opts = opts_of(&a);
  rig r, s;
  rig_create(&r, &a, &opts, plain, 2);
  rig_create(&s, &b, &opts, plain, 2);
  esmm_ffn_cache *second = NULL;
  must(r.ctx, esmm_ffn_cache_create(r.ctx, r.ffn, &second));
  must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_X], &r.y, r.cache, NULL));
  must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &s.p[P_X], &s.y, second, NULL));
  must(r.ctx, esmm_ffn_forward(r.ctx, r.ffn, &s.p[P_X], &s.y, NULL, NULL));
  must(r.ctx, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, NULL));
  must(r.ctx, esmm_ffn_backward(r.ctx, r.ffn, second, &s.dy, &s.grads, NULL));
  oracle_forward(&a);
  oracle_backward(&a);
  oracle_forward(&b);
  oracle_backward(&b);
  check_all("first", &r, 1e-5);
  check_all("second", &s, 1e-5);
  esmm_ffn_cache_free(second);
  rig_free(&r);
  rig_free(&s);
  oracle_free(&a);
  oracle_free(&b);
}

/* dh element by element, in every instruction set that is here: each needed element, and zeros elsewhere. */
static void masked_products_agree(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(2);
  static const int64_t sizes[][3] = {{1, 1, 1}, {3, 31, 40}, {130, 33, 300}, {5, 0, 7}, {7, 1024, 270}};
  static void (*const all[])(const esmm_ctx *, const ffn_masked *) = {
    esmm_ffn_masked_portable,
#if !defined(ESMM_PORTABLE)
    esmm_ffn_masked_avx2,
    esmm_ffn_masked_avx512,
#endif
  };
  const unsigned needs[] = {0, ESMM_CPU_AVX2, ESMM_CPU_AVX512};
  for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
    const int64_t tokens = sizes[c][0], d = sizes[c][1], features = sizes[c][2];
    ffn_masked job = {.dt = make_matrix(tokens, d, plain),
                      .w = make_matrix(2 * features, d, plain),
                      .alive = make_matrix(tokens, features, plain),
                      .out = make_matrix(tokens, features, plain)};
    int32_t *rows = malloc((size_t)features * sizeof *rows);
    assert_non_null(rows);
    th_fill(&job.dt, 1, 1, true);
    th_fill(&job.w, 2, 1, true);
    th_fill(&job.alive, 3, 0.4, true);
    for (int64_t i = 0; i < features; i++)
      rows[i] = (int32_t)(2 * i);
    job.w_rows = rows;
    for (size_t v = 0; v < sizeof all / sizeof *all; v++) {
      if ((esmm_cpu_detect() & needs[v]) != needs[v])
        continue;
      memset(job.out.data, 0xff, (size_t)(tokens * features) * sizeof(float));
      all[v](ctx, &job);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t f = 0; f < features; f++) {
          double want = 0;
          for (int64_t k = 0; k < d && th_get(&job.alive, t, f) > 0; k++)
            want += th_get(&job.dt, t, k) * th_get(&job.w, 2 * f, k);
          if (th_get(&job.out, t, f) != want)
            fail_msg("size %zu, variant %zu: [%lld, %lld] is %g, must be %g", c, v, (long long)t, (long long)f,
                     th_get(&job.out, t, f), want);
        }
    }
    free(rows);
    free(job.dt.data);
    free(job.w.data);
    free(job.alive.data);
    free(job.out.data);
  }
  esmm_ctx_free(ctx);
}

/* One layer, a context and a cache each: two threads at once get what one gets. */
typedef struct worker {
  rig *r;
  esmm_ctx *ctx;
  esmm_ffn_cache *cache;
  esmm_matrix y, d_w1;
  esmm_status status;
} worker;

static void *work(void *user)
{
  worker *w = user;
  const esmm_ffn_grads g = {.size = sizeof g, .w1 = &w->d_w1};
  for (int i = 0; i < 20 && w->status == ESMM_OK; i++) {
    w->status = esmm_ffn_forward(w->ctx, w->r->ffn, &w->r->p[P_X], &w->y, w->cache, NULL);
    if (w->status == ESMM_OK)
      w->status = esmm_ffn_backward(w->ctx, w->r->ffn, w->cache, &w->r->dy, &g, NULL);
  }
  return NULL;
}

static void threads_share_a_layer(void **state)
{
  (void)state;
  oracle o = {.tokens = 21, .d_model = 11, .d_hidden = 60, .activation = ESMM_ACT_RELU2, .gated = true};
  oracle_create(&o, 1, 1);
  kill_features(&o, 0.5, 3);
  const esmm_ffn_opts opts = opts_of(&o);
  rig r;
  rig_create(&r, &o, &opts, plain, 1);
  worker workers[2];
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    workers[i] =
        (worker){.r = &r, .ctx = th_ctx(1), .y = make_matrix(21, 11, plain), .d_w1 = make_matrix(11, 60, plain)};
    must(r.ctx, esmm_ffn_cache_create(workers[i].ctx, r.ffn, &workers[i].cache));
  }
  for (int i = 0; i < 2; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  for (int i = 0; i < 2; i++)
    assert_int_equal(pthread_join(threads[i], NULL), 0);
  oracle_forward(&o);
  oracle_backward(&o);
  for (int i = 0; i < 2; i++) {
    must(workers[i].ctx, workers[i].status);
    check_matrix("shared", "y", &workers[i].y, o.y, 1e-5);
    check_matrix("shared", "dW1", &workers[i].d_w1, o.d[P_W1], 1e-5);
    esmm_ffn_cache_free(workers[i].cache);
    esmm_ctx_free(workers[i].ctx);
    free(workers[i].y.data);
    free(workers[i].d_w1.data);
  }
  rig_free(&r);
  oracle_free(&o);
}

/* dx of a gated layer is the sum of two products. -4099 + 4097 is -2; with either rounded to 16 bits before, it is not.
 */
static void dx_is_rounded_once(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(1);
  for (int i = 0; i < 12; i++) {
    const esmm_dtype dtype = i % 3 == 0 ? ESMM_BF16 : i % 3 == 1 ? ESMM_F16 : ESMM_F32;
    const bool low = i / 3 % 2, dense = i / 6;
    float w1[] = {1, -4099.0f / 4097.0f}, gate[] = {1, 1}, v[] = {1}, w2[] = {1, 0}, x[] = {4097, 0}, dy[] = {1, 0};
    float y[2];
    const esmm_matrix m_w1 = {.data = w1, .rows = 2, .cols = 1}, m_gate = {.data = gate, .rows = 2, .cols = 1},
                      m_v = {.data = v, .rows = 1, .cols = 1}, m_w2 = {.data = w2, .rows = 1, .cols = 2},
                      m_x = {.data = x, .rows = 1, .cols = 2}, m_dy = {.data = dy, .rows = 1, .cols = 2};
    esmm_matrix m_y = {.data = y, .rows = 1, .cols = 2}, dx = th_matrix_alloc(1, 2, dtype);
    const esmm_ffn_opts opts = {.size = sizeof opts,
                                .d_model = 2,
                                .d_hidden = 1,
                                .rank1 = low,
                                .activation = ESMM_ACT_RELU,
                                .gated = 1,
                                .mode = dense ? ESMM_FFN_DENSE : ESMM_FFN_EXACT};
    const esmm_ffn_weights weights = {.size = sizeof weights,
                                      .w1 = &m_w1,
                                      .w1_v = low ? &m_v : NULL,
                                      .gate = &m_gate,
                                      .gate_v = low ? &m_v : NULL,
                                      .w2 = &m_w2};
    const esmm_ffn_grads grads = {.size = sizeof grads, .x = &dx};
    esmm_ffn *ffn = NULL;
    esmm_ffn_cache *cache = NULL;
    must(ctx, esmm_ffn_create(ctx, &opts, &ffn));
    must(ctx, esmm_ffn_set_weights(ctx, ffn, &weights, NULL));
    must(ctx, esmm_ffn_cache_create(ctx, ffn, &cache));
    must(ctx, esmm_ffn_forward(ctx, ffn, &m_x, &m_y, cache, NULL));
    must(ctx, esmm_ffn_backward(ctx, ffn, cache, &m_dy, &grads, NULL));
    if (!(fabs(th_get(&dx, 0, 1) + 2) <= 1e-3) || th_get(&dx, 0, 0) != th_round(dtype, 8194))
      fail_msg("%s, %s rank, %s: dx is %g, %g", esmm_dtype_str(dtype), low ? "low" : "full", dense ? "dense" : "exact",
               th_get(&dx, 0, 0), th_get(&dx, 0, 1));
    esmm_ffn_cache_free(cache);
    esmm_ffn_free(ffn);
    free(dx.data);
  }
  esmm_ctx_free(ctx);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gradients_are_difference_quotients),
      cmocka_unit_test(exact_and_dense_are_the_dense_pass),
      cmocka_unit_test(layouts_and_dtypes),
      cmocka_unit_test(exact_is_lossless),
      cmocka_unit_test(open_gates_before_zeros),
      cmocka_unit_test(report_tells_densities),
      cmocka_unit_test(wanted_gradients_only),
      cmocka_unit_test(caches_are_apart),
      cmocka_unit_test(masked_products_agree),
      cmocka_unit_test(threads_share_a_layer),
      cmocka_unit_test(dx_is_rounded_once),
  };
  return cmocka_run_group_tests_name("ffn", tests, NULL, NULL);
}
