/*
 * test_cuda_ffn.c: the feed-forward layer on a GPU against float64 and against the CPU's layer: every mode, dtype and
 * layout, in shapes that no tile fits; reports; steps that allocate nothing; steps in a graph.
 */
#include "ffn_rig.h"
#include "gpu.h"

#include <math.h>

/* The layer of a rig again, on the GPU, with copies of its matrices. */
typedef struct twin {
  const rig *r;
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  esmm_matrix p[P_COUNT], d[P_COUNT], y, dy;
  esmm_ffn_weights weights;
  esmm_ffn_grads grads;
  esmm_ffn_report report;
} twin;

static const esmm_matrix *or_null(const esmm_matrix *m)
{
  return m->data ? m : NULL;
}

static esmm_matrix *or_none(esmm_matrix *m)
{
  return m->data ? m : NULL;
}

static void twin_create(twin *t, const rig *r, const esmm_ffn_opts *opts)
{
  memset(t, 0, sizeof *t);
  t->r = r;
  must(gpu, esmm_ffn_create(gpu, opts, &t->ffn));
  must(gpu, esmm_ffn_cache_create(gpu, t->ffn, &t->cache));
  for (int i = 0; i < P_COUNT; i++)
    if (r->p[i].data) {
      t->p[i] = to_device(&r->p[i]);
      t->d[i] = to_device(&r->d[i]);
    }
  t->y = to_device(&r->y);
  t->dy = to_device(&r->dy);
  t->weights = (esmm_ffn_weights){.size = sizeof t->weights,
                                  .w1 = or_null(&t->p[P_W1]),
                                  .w1_v = or_null(&t->p[P_W1_V]),
                                  .gate = or_null(&t->p[P_GATE]),
                                  .gate_v = or_null(&t->p[P_GATE_V]),
                                  .w2 = or_null(&t->p[P_W2]),
                                  .w2_v = or_null(&t->p[P_W2_V]),
                                  .b1 = t->p[P_B1].data,
                                  .b_gate = t->p[P_B_GATE].data,
                                  .b2 = t->p[P_B2].data};
  t->grads = (esmm_ffn_grads){.size = sizeof t->grads,
                              .x = or_none(&t->d[P_X]),
                              .w1 = or_none(&t->d[P_W1]),
                              .w1_v = or_none(&t->d[P_W1_V]),
                              .gate = or_none(&t->d[P_GATE]),
                              .gate_v = or_none(&t->d[P_GATE_V]),
                              .w2 = or_none(&t->d[P_W2]),
                              .w2_v = or_none(&t->d[P_W2_V]),
                              .b1 = t->d[P_B1].data,
                              .b_gate = t->d[P_B_GATE].data,
                              .b2 = t->d[P_B2].data};
  t->report.size = sizeof t->report;
  must(gpu, esmm_ffn_set_weights(gpu, t->ffn, &t->weights, NULL));
}

static void twin_step(twin *t)
{
  must(gpu, esmm_ffn_forward(gpu, t->ffn, &t->p[P_X], &t->y, t->cache, NULL));
  must(gpu, esmm_ffn_backward(gpu, t->ffn, t->cache, &t->dy, &t->grads, NULL));
}

static void twin_run(twin *t)
{
  must(gpu, esmm_ffn_forward(gpu, t->ffn, &t->p[P_X], &t->y, t->cache, NULL));
  must(gpu, esmm_ffn_backward(gpu, t->ffn, t->cache, &t->dy, &t->grads, &t->report));
}

static void twin_free(twin *t)
{
  esmm_ffn_cache_free(t->cache);
  esmm_ffn_free(t->ffn);
  for (int i = 0; i < P_COUNT; i++) {
    esmm_memory_free(gpu, t->p[i].data);
    esmm_memory_free(gpu, t->d[i].data);
  }
  esmm_memory_free(gpu, t->y.data);
  esmm_memory_free(gpu, t->dy.data);
}

static esmm_matrix host_copy(const esmm_matrix *device)
{
  const layout l = {device->dtype, device->order, 0};
  esmm_matrix m = make_matrix(device->rows, device->cols, l);
  must(gpu, esmm_matrix_copy(gpu, device, &m));
  return m;
}

static void check_one(const char *what, const char *name, const esmm_matrix *device, const double *want, double share)
{
  esmm_matrix m = host_copy(device);
  check_matrix(what, name, &m, want, share);
  free(m.data);
}

/* y and every gradient against the oracle's. */
static void check_twin(const char *what, const twin *t, double share)
{
  const oracle *o = t->r->o;
  check_one(what, "y on the GPU", &t->y, o->y, share);
  for (int i = 0; i < P_COUNT; i++)
    if (o->p[i])
      check_one(what, gradient_names[i], &t->d[i], o->d[i], share);
}

/* What the library is given, the oracle computes with. */
static void round_parameters(oracle *o, esmm_dtype dtype)
{
  for (int i = 0; i < P_COUNT; i++)
    for (int64_t e = 0; o->p[i] && e < oracle_rows(o, i) * oracle_cols(o, i); e++)
      o->p[i][e] = i >= P_B1 ? (double)(float)o->p[i][e] : th_round(dtype, o->p[i][e]);
  for (int64_t e = 0; e < o->tokens * o->d_model; e++)
    o->dy[e] = th_round(dtype, o->dy[e]);
}

static double share_of(esmm_dtype dtype)
{
  return dtype == ESMM_F32 ? 1e-5 : dtype == ESMM_BF16 ? 4e-2 : 6e-3;
}

static const esmm_dtype all_dtypes[] = {ESMM_F32, ESMM_BF16, ESMM_F16};

/* ---- against float64 ---- */

static void exact_and_dense_are_the_dense_pass(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_model, d_hidden, rank1, rank2;
    double dead;
  } cases[] = {
      {1, 1, 1, 0, 0, 0},          {33, 17, 70, 0, 0, 0},     {40, 40, 200, 0, 0, 0.7},   {37, 29, 90, 5, 0, 0.5},
      {37, 29, 90, 0, 7, 0.5},     {37, 29, 90, 5, 7, 0.3},   {9, 20, 64, 0, 0, 1},       {130, 65, 300, 0, 0, 0.2},
      {0, 8, 16, 0, 0, 0},         {16, 128, 256, 0, 0, 0.5}, {256, 128, 512, 0, 0, 0.8}, {129, 384, 640, 0, 0, 0.9},
      {200, 256, 384, 64, 128, 0},
  };
  static const esmm_activation activations[] = {ESMM_ACT_RELU2, ESMM_ACT_RELU, ESMM_ACT_SILU, ESMM_ACT_GELU,
                                                ESMM_ACT_GELU_TANH};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 20; kind++)
      for (size_t d = 0; d < 3; d++) {
        oracle o = {.tokens = cases[c].tokens,
                    .d_model = cases[c].d_model,
                    .d_hidden = cases[c].d_hidden,
                    .rank1 = cases[c].rank1,
                    .rank2 = cases[c].rank2,
                    .activation = activations[kind / 4],
                    .gated = kind & 1};
        if (kind / 4 >= 2 && c % 3 != 1) /* smooth ones in every third shape */
          continue;
        if (o.tokens == 1 && d > 0) /* one sum that may come out near 0 is no measure of rounding */
          continue;
        if (o.rank1 > 32 && all_dtypes[d] == ESMM_F16) /* sums of sums leave its range */
          continue;
        char what[80];
        (void)snprintf(what, sizeof what, "case %zu, kind %d, dtype %d", c, kind, (int)all_dtypes[d]);
        oracle_create(&o, c + 17, 1);
        kill_features(&o, cases[c].dead, c);
        round_parameters(&o, all_dtypes[d]);
        esmm_ffn_opts opts = opts_of(&o);
        opts.mode = kind & 2 ? ESMM_FFN_DENSE : ESMM_FFN_EXACT;
        opts.dtype = all_dtypes[d];
        rig r;
        twin t;
        rig_create(&r, &o, &opts, (layout){all_dtypes[d], ESMM_ROW_MAJOR, 0}, 2);
        twin_create(&t, &r, &opts);
        oracle_forward(&o);
        oracle_backward(&o);
        /* A 16-bit x u puts values near 0 on the other side of ReLU's kink, where its derivative jumps: a gradient
           then lacks a feature, or has one more. */
        const bool jumps = o.activation == ESMM_ACT_RELU && o.rank1 && all_dtypes[d] != ESMM_F32;
        for (int step = 0; step < 2; step++) { /* the second finds what the first has left */
          twin_run(&t);
          if (jumps)
            check_one(what, "y on the GPU", &t.y, o.y, share_of(all_dtypes[d]));
          else
            check_twin(what, &t, share_of(all_dtypes[d]));
        }
        assert_int_equal(t.report.dw2.dropped, 0);
        assert_int_equal(t.report.sparse_columns, 0);
        must(gpu, esmm_ffn_forward(gpu, t.ffn, &t.p[P_X], &t.y, NULL, NULL)); /* without a cache: the same y */
        check_one(what, "y without a cache", &t.y, o.y, share_of(all_dtypes[d]));
        twin_free(&t);
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
  } cases[] = {{{ESMM_F32, ESMM_COL_MAJOR, 0}, ESMM_F32, 1e-5},   {{ESMM_F32, ESMM_ROW_MAJOR, 5}, ESMM_F32, 1e-5},
               {{ESMM_F32, ESMM_ROW_MAJOR, 0}, ESMM_BF16, 4e-2},  {{ESMM_BF16, ESMM_ROW_MAJOR, 0}, ESMM_F32, 2e-2},
               {{ESMM_F16, ESMM_COL_MAJOR, 2}, ESMM_F16, 6e-3},   {{ESMM_BF16, ESMM_COL_MAJOR, 0}, ESMM_BF16, 4e-2},
               {{ESMM_BF16, ESMM_ROW_MAJOR, 8}, ESMM_BF16, 4e-2}, {{ESMM_BF16, ESMM_COL_MAJOR, 0}, ESMM_F32, 2e-2}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 8; kind++) {
      oracle o = {.tokens = 30,
                  .d_model = kind & 2 ? 19 : 128,
                  .d_hidden = kind & 2 ? 75 : 256,
                  .rank1 = kind & 4 ? 6 : 0,
                  .rank2 = kind & 4 ? 9 : 0,
                  .activation = ESMM_ACT_RELU2,
                  .gated = kind & 1};
      char what[80];
      (void)snprintf(what, sizeof what, "layout %zu, kind %d", c, kind);
      oracle_create(&o, c + 170, 1);
      round_parameters(&o, cases[c].l.dtype);
      esmm_ffn_opts opts = opts_of(&o);
      opts.dtype = cases[c].hidden;
      rig r;
      twin t;
      rig_create(&r, &o, &opts, cases[c].l, 2);
      twin_create(&t, &r, &opts);
      oracle_forward(&o);
      oracle_backward(&o);
      twin_run(&t);
      check_twin(what, &t, cases[c].share);
      twin_free(&t);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* Weights that change: a step with others, and gradients that are added. */
static void weights_change_and_gradients_add_up(void **state)
{
  (void)state;
  for (int gated = 0; gated < 2; gated++) {
    oracle o = {.tokens = 70, .d_model = 128, .d_hidden = 256, .activation = ESMM_ACT_RELU2, .gated = gated};
    oracle_create(&o, 3, 1);
    round_parameters(&o, ESMM_BF16);
    esmm_ffn_opts opts = opts_of(&o);
    opts.dtype = ESMM_BF16;
    rig r;
    twin t;
    rig_create(&r, &o, &opts, (layout){ESMM_BF16, ESMM_ROW_MAJOR, 0}, 2);
    twin_create(&t, &r, &opts);
    twin_step(&t);
    for (int i = P_W1; i < P_B1; i++)
      if (o.p[i]) {
        for (int64_t e = 0; e < oracle_rows(&o, i) * oracle_cols(&o, i); e++) {
          o.p[i][e] = -o.p[i][e];
          th_set(&r.p[i], e / oracle_cols(&o, i), e % oracle_cols(&o, i), o.p[i][e]);
        }
        must(gpu, esmm_matrix_copy(gpu, &r.p[i], &t.p[i]));
      }
    must(gpu, esmm_ffn_set_weights(gpu, t.ffn, &t.weights, NULL));
    assert_int_equal(esmm_ffn_backward(gpu, t.ffn, t.cache, &t.dy, &t.grads, NULL), ESMM_ERR_ARGUMENT);
    oracle_forward(&o);
    oracle_backward(&o);
    twin_step(&t);
    check_twin("other weights", &t, share_of(ESMM_BF16));
    t.grads.accumulate = 1;
    must(gpu, esmm_ffn_backward(gpu, t.ffn, t.cache, &t.dy, &t.grads, NULL));
    for (int i = P_W1; i < P_COUNT; i++)
      for (int64_t e = 0; o.p[i] && e < oracle_rows(&o, i) * oracle_cols(&o, i); e++)
        o.d[i][e] *= 2;
    check_twin("twice", &t, share_of(ESMM_BF16));
    twin_free(&t);
    rig_free(&r);
    oracle_free(&o);
  }
}

/* ---- against the CPU's layer ---- */

static void same_drop(const char *what, const char *name, const esmm_ffn_drop *got, const esmm_ffn_drop *want)
{
  if (got->kept != want->kept || got->dropped != want->dropped ||
      !(fabs(got->norm - want->norm) <= 1e-6 * want->norm) ||
      !(fabs(got->norm_dropped - want->norm_dropped) <= 1e-6 * want->norm))
    fail_msg("%s: %s kept %lld, dropped %lld, norms %.9g and %.9g; the CPU's %lld, %lld, %.9g and %.9g", what, name,
             (long long)got->kept, (long long)got->dropped, got->norm, got->norm_dropped, (long long)want->kept,
             (long long)want->dropped, want->norm, want->norm_dropped);
}

static void same_matrix(const char *what, const char *name, const esmm_matrix *device, const esmm_matrix *want,
                        double share)
{
  esmm_matrix got = host_copy(device);
  double largest = 0;
  for (int64_t i = 0; i < want->rows; i++)
    for (int64_t j = 0; j < want->cols; j++)
      if (isfinite(th_get(want, i, j)))
        largest = fmax(largest, fabs(th_get(want, i, j)));
  for (int64_t i = 0; i < want->rows; i++)
    for (int64_t j = 0; j < want->cols; j++)
      if (th_get(&got, i, j) != th_get(want, i, j) && /* infinities are the same or wrong */
          !(isfinite(th_get(&got, i, j)) && fabs(th_get(&got, i, j) - th_get(want, i, j)) <= share * largest))
        fail_msg("%s: %s [%lld, %lld] is %.9g, the CPU's %.9g", what, name, (long long)i, (long long)j,
                 th_get(&got, i, j), th_get(want, i, j));
  free(got.data);
}

/* Integers, whose products are exact: the same values are dropped, by the same draws, and the report says the same. */
static void two_of_four_is_the_cpus(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_hidden, rank1, rank2;
    double share; /* 0: sparse */
    double dead;
  } cases[] = {{32, 40, 0, 0, 0, 0},    {33, 41, 0, 0, 0, 0},       {35, 42, 0, 0, 0.5, 0},
               {34, 43, 0, 0, 0.95, 0}, {37, 90, 0, 0, 0.75, 0.6},  {30, 60, 3, 4, 0.6, 0.4},
               {30, 60, 0, 0, 1.0, 0},  {3, 7, 0, 0, 0, 0},         {40, 80, 0, 0, 0, 0.5},
               {21, 50, 0, 0, 0.01, 0}, {70, 1500, 0, 0, 0.8, 0.3}, {5, 33001, 0, 0, 0.9, 0.2}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 24; kind++) {
      const bool gated = kind & 1;
      const esmm_dtype dtype = kind & 4 && !gated && !cases[c].rank1 ? ESMM_BF16 : ESMM_F32;
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = 9,
                  .d_hidden = cases[c].d_hidden,
                  .rank1 = cases[c].rank1,
                  .rank2 = cases[c].rank2,
                  .activation = ESMM_ACT_RELU,
                  .gated = gated};
      char what[80];
      (void)snprintf(what, sizeof what, "case %zu, kind %d", c, kind);
      oracle_create(&o, c, 1);
      make_integers(&o, c + 50, 0.3);
      kill_features(&o, cases[c].dead, c + 9);
      esmm_ffn_opts opts = opts_of(&o);
      opts.mode = cases[c].share > 0 ? ESMM_FFN_SPLIT : ESMM_FFN_SPARSE;
      opts.sparse_share = cases[c].share;
      opts.permute_tokens = kind >> 1 & 1;
      opts.sparsifier = (esmm_sparsifier)(kind / 8);
      opts.seed = 11;
      opts.dtype = dtype;
      rig r;
      twin t;
      rig_create(&r, &o, &opts, (layout){dtype, ESMM_ROW_MAJOR, 0}, 2);
      twin_create(&t, &r, &opts);
      rig_run(&r);
      twin_run(&t);
      const double share = dtype == ESMM_BF16 ? 1e-2 : 1e-5;
      same_matrix(what, "y", &t.y, &r.y, share);
      for (int i = 0; i < P_COUNT; i++)
        if (o.p[i])
          same_matrix(what, gradient_names[i], &t.d[i], &r.d[i], share);
      assert_int_equal(t.report.sparse_columns, r.report.sparse_columns);
      assert_int_equal(t.report.alive_columns, r.report.alive_columns);
      assert_true(t.report.element_density == r.report.element_density);
      assert_true(fabs(t.report.strip_density - r.report.strip_density) < 1e-12);
      if (dtype == ESMM_F32 || opts.sparsifier == ESMM_SPARSIFY_TOP_N) { /* else bf16 rounds what was divided */
        same_drop(what, "y", &t.report.y, &r.report.y);
        same_drop(what, "dx", &t.report.dx, &r.report.dx);
        same_drop(what, "dW1", &t.report.dw1, &r.report.dw1);
        same_drop(what, "dWg", &t.report.dgate, &r.report.dgate);
        same_drop(what, "dW2", &t.report.dw2, &r.report.dw2);
      }
      twin_free(&t);
      rig_free(&r);
      oracle_free(&o);
    }
}

/*
 * The same with tokens enough for the sparse tensor cores, in 16 bits, in shapes that fit no tile, and with B and C
 * lying either way. What is before a gate or between two factors is rounded on a GPU and not on a CPU, so there only
 * what hangs on h is compared.
 */
static void packed_two_of_four_is_the_cpus(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_model, d_hidden, rank1, rank2;
    double share; /* 0: sparse */
    double dead;
  } cases[] = {{256, 64, 256, 0, 0, 0, 0},    {257, 72, 260, 0, 0, 0, 0},      {300, 72, 321, 0, 0, 0, 0.2},
               {304, 9, 129, 0, 0, 0.95, 0},  {512, 136, 512, 0, 0, 0.95, 0},  {300, 72, 1000, 0, 0, 0.95, 0.5},
               {264, 40, 324, 0, 0, 0.75, 0}, {1000, 264, 520, 0, 0, 0.9, 0},  {776, 320, 776, 0, 0, 0, 0.3},
               {280, 72, 256, 16, 24, 0, 0},  {280, 72, 256, 16, 24, 0.6, 0.4}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 48; kind++) {
      if (((size_t)__builtin_popcount((unsigned)kind) + c) % 2) /* half of them in one shape, the others in the next */
        continue;
      const bool gated = kind & 1, exact = !gated && !cases[c].rank1;
      const esmm_dtype dtype = kind & 4 ? ESMM_F16 : ESMM_BF16;
      const double share = dtype == ESMM_BF16 ? 1e-2 : 3e-3;
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = cases[c].d_model,
                  .d_hidden = cases[c].d_hidden,
                  .rank1 = cases[c].rank1,
                  .rank2 = cases[c].rank2,
                  .activation = ESMM_ACT_RELU,
                  .gated = gated};
      char what[80];
      (void)snprintf(what, sizeof what, "packed case %zu, kind %d", c, kind);
      oracle_create(&o, c, 1);
      make_integers(&o, c + 50, cases[c].rank1 ? 0.8 : 0.3);
      kill_features(&o, cases[c].dead, c + 9);
      esmm_ffn_opts opts = opts_of(&o);
      opts.mode = cases[c].share > 0 ? ESMM_FFN_SPLIT : ESMM_FFN_SPARSE;
      opts.sparse_share = cases[c].share;
      opts.permute_tokens = kind >> 1 & 1;
      opts.sparsifier = (esmm_sparsifier)(kind / 16);
      opts.seed = 11;
      opts.dtype = dtype;
      rig r;
      twin t;
      rig_create(&r, &o, &opts, (layout){dtype, kind & 8 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, 0}, 2);
      twin_create(&t, &r, &opts);
      rig_run(&r);
      twin_run(&t);
      same_matrix(what, "y", &t.y, &r.y, cases[c].rank2 ? 3 * share : share);
      for (int i = 0; i < P_COUNT; i++)
        if (o.p[i] && (exact || i == P_W2))
          same_matrix(what, gradient_names[i], &t.d[i], &r.d[i], cases[c].rank2 ? 3 * share : share);
      if (opts.sparsifier == ESMM_SPARSIFY_TOP_N) {
        same_drop(what, "y", &t.report.y, &r.report.y);
        same_drop(what, "dW2", &t.report.dw2, &r.report.dw2);
        if (exact) {
          same_drop(what, "dx", &t.report.dx, &r.report.dx);
          same_drop(what, "dW1", &t.report.dw1, &r.report.dw1);
        }
      }
      r.grads.accumulate = t.grads.accumulate = 1;
      must(r.ctx, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, NULL));
      must(gpu, esmm_ffn_backward(gpu, t.ffn, t.cache, &t.dy, &t.grads, NULL));
      for (int i = P_W1; i < P_COUNT && exact; i++)
        if (o.p[i])
          same_matrix(what, gradient_names[i], &t.d[i], &r.d[i], share);
      twin_free(&t);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* ---- MVUE ---- */

/* With W1 and W2 the unit matrix and x above zero, y is what the product of h was given: on average it is x. */
static void check_average(int64_t tokens, esmm_dtype dtype, int passes)
{
  enum { SIZE = 24 };
  const int64_t count = tokens * SIZE;
  const double rounding = dtype == ESMM_F32 ? 0 : 0x1p-8;
  oracle o = {.tokens = tokens, .d_model = SIZE, .d_hidden = SIZE, .activation = ESMM_ACT_RELU};
  oracle_create(&o, 3, 1);
  for (int64_t i = 0; i < SIZE * SIZE; i++)
    o.p[P_W1][i] = o.p[P_W2][i] = i / SIZE == i % SIZE;
  for (int64_t i = 0; i < count; i++)
    o.p[P_X][i] = fabs(o.p[P_X][i]);
  memset(o.p[P_B1], 0, SIZE * sizeof(double));
  memset(o.p[P_B2], 0, SIZE * sizeof(double));
  round_parameters(&o, dtype);
  esmm_ffn_opts opts = opts_of(&o);
  opts.mode = ESMM_FFN_SPARSE;
  opts.sparsifier = ESMM_SPARSIFY_MVUE;
  opts.dtype = dtype;
  rig r;
  twin t;
  rig_create(&r, &o, &opts, (layout){dtype, ESMM_ROW_MAJOR, 0}, 2);
  twin_create(&t, &r, &opts);
  double *sum = calloc((size_t)count, sizeof *sum), *squares = calloc((size_t)count, sizeof *squares);
  assert_true(sum && squares);
  for (int pass = 0; pass < passes; pass++) {
    must(gpu, esmm_ffn_forward(gpu, t.ffn, &t.p[P_X], &t.y, t.cache, NULL));
    must(gpu, esmm_matrix_copy(gpu, &t.y, &r.y));
    for (int64_t i = 0; i < count; i++) {
      const double y = th_get(&r.y, i / SIZE, i % SIZE);
      sum[i] += y;
      squares[i] += y * y;
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const double x = o.p[P_X][i], mean = sum[i] / passes;
    const double variance = fmax(0, squares[i] / passes - mean * mean);
    /* One that is dropped once in hundreds of passes may be there in all of them, and a small one, which half the sum
       of its group stands for, in none: no variance is seen. */
    double group = 0;
    for (int64_t j = i / 4 * 4; j < i / 4 * 4 + 4; j++)
      group += o.p[P_X][j];
    if (!(fabs(mean - x) <= 5 * sqrt(variance / passes) + (14 * fabs(x) + 2 * group) / passes + rounding * fabs(x)))
      fail_msg("element %lld is %g on average of %d, must be %g", (long long)i, mean, passes, x);
  }
  free(sum);
  free(squares);
  twin_free(&t);
  rig_free(&r);
  oracle_free(&o);
}

static void mvue_is_right_on_average(void **state)
{
  (void)state;
  check_average(24, ESMM_F32, 2000);
  check_average(264, ESMM_BF16, 1000); /* packed */
}

/* ---- graphs ---- */

/* A step that has run can be captured; what it gives when the graph runs is what it gave before. */
static void a_step_can_be_captured(void **state)
{
  (void)state;
  static const esmm_ffn_mode modes[] = {ESMM_FFN_EXACT, ESMM_FFN_DENSE, ESMM_FFN_SPARSE, ESMM_FFN_SPLIT};
  for (int kind = 0; kind < 24; kind++) {
    oracle o = {.tokens = kind < 16 ? 100 : 300, /* which 2:4 modes pack */
                .d_model = kind & 8 ? 100 : 128,
                .d_hidden = kind & 8 ? 200 : 256,
                .activation = ESMM_ACT_RELU2,
                .gated = kind >> 2 & 1};
    oracle_create(&o, 9, 1);
    kill_features(&o, 0.7, 4);
    round_parameters(&o, ESMM_BF16);
    esmm_ffn_opts opts = opts_of(&o);
    opts.mode = modes[kind & 3];
    opts.dtype = ESMM_BF16;
    opts.permute_tokens = 1;
    rig r;
    twin t;
    void *graph = NULL, *exec = NULL, *stream = new_stream();
    char what[40];
    (void)snprintf(what, sizeof what, "kind %d", kind);
    rig_create(&r, &o, &opts, (layout){ESMM_BF16, ESMM_ROW_MAJOR, 0}, 2);
    must(gpu, esmm_ctx_set_stream(gpu, stream));
    twin_create(&t, &r, &opts);
    twin_step(&t);
    twin_step(&t);
    esmm_matrix before[P_COUNT + 1] = {host_copy(&t.y)};
    for (int i = 0; i < P_COUNT; i++)
      if (o.p[i])
        before[i + 1] = host_copy(&t.d[i]);
    assert_int_equal(calls.begin_capture(stream, 0), 0);
    must(gpu, esmm_ffn_set_weights(gpu, t.ffn, &t.weights, NULL));
    twin_step(&t);
    assert_int_equal(calls.end_capture(stream, &graph), 0);
    assert_int_equal(calls.instantiate(&exec, graph, 0), 0);
    for (int i = 0; i < P_COUNT; i++) /* NaN again */
      if (o.p[i])
        must(gpu, esmm_matrix_copy(gpu, &r.d[i], &t.d[i]));
    must(gpu, esmm_matrix_copy(gpu, &r.y, &t.y));
    assert_int_equal(calls.launch(exec, stream), 0);
    assert_int_equal(calls.stream_synchronize(stream), 0);
    same_matrix(what, "y", &t.y, &before[0], 1e-2);
    for (int i = 0; i < P_COUNT; i++)
      if (o.p[i])
        same_matrix(what, gradient_names[i], &t.d[i], &before[i + 1], 1e-2);
    for (int i = 0; i <= P_COUNT; i++)
      free(before[i].data);
    (void)calls.exec_destroy(exec);
    (void)calls.graph_destroy(graph);
    must(gpu, esmm_ctx_set_stream(gpu, NULL));
    twin_free(&t);
    rig_free(&r);
    oracle_free(&o);
    assert_int_equal(calls.stream_destroy(stream), 0);
  }
}

/* ---- errors ---- */

static void host_memory_and_other_devices_are_refused(void **state)
{
  (void)state;
  oracle o = {.tokens = 5, .d_model = 6, .d_hidden = 7, .activation = ESMM_ACT_RELU};
  oracle_create(&o, 1, 1);
  const esmm_ffn_opts opts = opts_of(&o);
  rig r;
  twin t;
  rig_create(&r, &o, &opts, plain, 1);
  twin_create(&t, &r, &opts);
  th_expect("ffn", esmm_ffn_forward(gpu, t.ffn, &r.p[P_X], &t.y, NULL, NULL), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(gpu),
            "x lies in host memory", "esmm_matrix_copy");
  th_expect("ffn", esmm_ffn_set_weights(gpu, t.ffn, &r.weights, NULL), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(gpu),
            "weights->w1", "host memory");
  th_expect("ffn", esmm_ffn_forward(r.ctx, t.ffn, &r.p[P_X], &r.y, NULL, NULL), ESMM_ERR_DEVICE, esmm_ctx_error(r.ctx),
            "cuda:", "CPU");
  th_expect("ffn", esmm_ffn_forward(gpu, r.ffn, &t.p[P_X], &t.y, NULL, NULL), ESMM_ERR_DEVICE, esmm_ctx_error(gpu),
            "the CPU", "cuda:");
  twin_step(&t); /* it has the weights it had */
  twin_free(&t);
  rig_free(&r);
  oracle_free(&o);
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda_ffn", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(exact_and_dense_are_the_dense_pass),
      cmocka_unit_test(layouts_and_dtypes),
      cmocka_unit_test(weights_change_and_gradients_add_up),
      cmocka_unit_test(two_of_four_is_the_cpus),
      cmocka_unit_test(packed_two_of_four_is_the_cpus),
      cmocka_unit_test(mvue_is_right_on_average),
      cmocka_unit_test(a_step_can_be_captured),
      cmocka_unit_test(host_memory_and_other_devices_are_refused),
  };
  status = cmocka_run_group_tests_name("cuda_ffn", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
