/*
 * test_ffn_modes.c: the modes that keep two of every four values, against the float64 pass with the values that they
 * say they keep: which axis, which columns, what the report says, what is random and what is not.
 */
#include "ffn_rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Two largest of each four, ties to the lower place, in the columns that go sparse: a second opinion. */
typedef struct keeper {
  const oracle *o;
  int64_t columns; /* how many go sparse */
  int64_t *sparse; /* which, by index */
  esmm_ffn_drop drops[6];
} keeper;

static void keep_two(double *values[4], esmm_ffn_drop *drop)
{
  double kept[4] = {0};
  for (int i = 0; i < 4; i++) {
    if (!values[i])
      continue;
    int ahead = 0;
    for (int j = 0; j < 4; j++)
      ahead += values[j] && (fabs(*values[j]) > fabs(*values[i]) || (fabs(*values[j]) == fabs(*values[i]) && j < i));
    kept[i] = ahead < 2 ? *values[i] : 0;
    drop->dropped += *values[i] != 0 && ahead >= 2;
    drop->norm_dropped += ahead >= 2 ? *values[i] * *values[i] : 0;
  }
  for (int i = 0; i < 4; i++)
    if (values[i])
      *values[i] = kept[i];
}

static void keep(void *user, double *m, bool along_tokens, int operand)
{
  keeper *k = user;
  const int64_t tokens = k->o->tokens, features = k->o->d_hidden;
  esmm_ffn_drop drop = {0};
  for (int64_t i = 0; i < tokens * features; i++) {
    drop.norm += m[i] * m[i];
    drop.kept += m[i] != 0;
  }
  bool *goes = calloc((size_t)features + 4, sizeof *goes);
  assert_non_null(goes);
  for (int64_t i = 0; i < k->columns; i++)
    goes[k->sparse[i]] = true;
  for (int64_t f = 0; f < features; f += along_tokens ? 1 : 4)
    for (int64_t t = 0; t < tokens; t += along_tokens ? 4 : 1) {
      double *values[4];
      for (int64_t i = 0; i < 4; i++) {
        const int64_t token = along_tokens ? t + i : t, feature = along_tokens ? f : f + i;
        values[i] = token < tokens && goes[feature] ? &m[token * features + feature] : NULL;
      }
      keep_two(values, &drop);
    }
  free(goes);
  drop.kept -= drop.dropped;
  drop.norm = sqrt(drop.norm);
  drop.norm_dropped = sqrt(drop.norm_dropped);
  k->drops[operand] = drop;
}

/* The sparsest `count` columns of h, ties to the lower index, by index. */
static void rank_columns(keeper *k, int64_t count)
{
  const oracle *o = k->o;
  bool *taken = calloc((size_t)o->d_hidden, sizeof *taken);
  assert_non_null(taken);
  for (int64_t i = 0; i < count; i++) {
    int64_t best = -1, fewest = INT64_MAX;
    for (int64_t f = 0; f < o->d_hidden; f++) {
      int64_t nonzeros = 0;
      for (int64_t t = 0; t < o->tokens; t++)
        nonzeros += o->h[t * o->d_hidden + f] != 0;
      if (!taken[f] && nonzeros < fewest) {
        fewest = nonzeros;
        best = f;
      }
    }
    taken[best] = true;
  }
  k->columns = 0;
  for (int64_t f = 0; f < o->d_hidden; f++)
    if (taken[f])
      k->sparse[k->columns++] = f;
  free(taken);
}

static void check_drop(const char *what, const char *name, const esmm_ffn_drop *got, const esmm_ffn_drop *want)
{
  if (got->kept != want->kept || got->dropped != want->dropped)
    fail_msg("%s: %s kept %lld and dropped %lld, must be %lld and %lld", what, name, (long long)got->kept,
             (long long)got->dropped, (long long)want->kept, (long long)want->dropped);
  if (!(fabs(got->norm - want->norm) <= 1e-9 * want->norm) ||
      !(fabs(got->norm_dropped - want->norm_dropped) <= 1e-9 * want->norm))
    fail_msg("%s: %s norm %.9g, dropped %.9g, must be %.9g and %.9g", what, name, got->norm, got->norm_dropped,
             want->norm, want->norm_dropped);
}

/* Split and sparse with integers: the products are exactly those of the values that magnitude keeps, and the report
   says exactly what was dropped. */
static void two_of_four_drops_only_what_it_says(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_hidden, rank1, rank2;
    double share; /* 0: sparse */
    double dead;
  } cases[] = {
      {32, 40, 0, 0, 0, 0},      {33, 41, 0, 0, 0, 0},     {35, 42, 0, 0, 0.5, 0}, {34, 43, 0, 0, 0.95, 0},
      {37, 90, 0, 0, 0.75, 0.6}, {30, 60, 3, 4, 0.6, 0.4}, {30, 60, 0, 0, 1.0, 0}, {3, 7, 0, 0, 0, 0},
      {40, 80, 0, 0, 0, 0.5},    {21, 50, 0, 0, 0.01, 0},
  };
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int gated = 0; gated < 2; gated++) {
      char what[80];
      snprintf(what, sizeof what, "case %zu, gated %d", c, gated);
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = 9,
                  .d_hidden = cases[c].d_hidden,
                  .rank1 = cases[c].rank1,
                  .rank2 = cases[c].rank2,
                  .activation = ESMM_ACT_RELU,
                  .gated = gated};
      oracle_create(&o, c, 1);
      make_integers(&o, c + 50, 0.3);
      kill_features(&o, cases[c].dead, c + 9);
      esmm_ffn_opts opts = opts_of(&o);
      opts.mode = cases[c].share > 0 ? ESMM_FFN_SPLIT : ESMM_FFN_SPARSE;
      opts.sparse_share = cases[c].share;
      rig r;
      rig_create(&r, &o, &opts, plain, 2);
      rig_run(&r);
      keeper k = {.o = &o, .sparse = malloc((size_t)o.d_hidden * sizeof(int64_t))};
      assert_non_null(k.sparse);
      oracle_forward(&o); /* h does not hang on what is kept of it */
      rank_columns(&k, cases[c].share > 0 ? (int64_t)floor(cases[c].share * (double)o.d_hidden + 0.5) : o.d_hidden);
      o.keep = keep;
      o.user = &k;
      oracle_forward(&o);
      oracle_backward(&o);
      check_all(what, &r, 0);
      assert_int_equal(r.report.sparse_columns, k.columns);
      assert_true(r.report.sparse_share == (double)k.columns / (double)o.d_hidden);
      check_drop(what, "y", &r.report.y, &k.drops[KEEP_Y]);
      check_drop(what, "dW1", &r.report.dw1, &k.drops[KEEP_DW1]);
      check_drop(what, "dW2", &r.report.dw2, &k.drops[KEEP_DW2]);
      if (gated) {
        const esmm_ffn_drop *up = &k.drops[KEEP_DX], *gate = &k.drops[KEEP_DX_GATE];
        const esmm_ffn_drop both = {up->kept + gate->kept, up->dropped + gate->dropped, hypot(up->norm, gate->norm),
                                    hypot(up->norm_dropped, gate->norm_dropped)};
        check_drop(what, "dx", &r.report.dx, &both);
        check_drop(what, "dWg", &r.report.dgate, &k.drops[KEEP_DGATE]);
      } else {
        check_drop(what, "dx", &r.report.dx, &k.drops[KEEP_DX]);
      }
      if (c == 0)
        assert_true(r.report.y.dropped > 0 && r.report.dx.dropped > 0 && r.report.dw1.dropped > 0 &&
                    r.report.dw2.dropped > 0);
      free(k.sparse);
      rig_free(&r);
      oracle_free(&o);
    }
}

/*
 * A layer that shows its operands: with W1 = 1 and W2 = 1 (unit matrices), x = h, y is what the forward product was
 * given, dx what dx was; with T = d_model and dy = 1, dW2 is what dW2 was given, turned.
 */
typedef struct window {
  oracle o;
  rig r;
} window;

enum { SIZE = 24 };

static void window_create(window *w, esmm_ffn_mode mode, esmm_sparsifier sparsifier, int permute, uint64_t seed)
{
  w->o = (oracle){.tokens = SIZE, .d_model = SIZE, .d_hidden = SIZE, .activation = ESMM_ACT_RELU};
  oracle_create(&w->o, 3, 1);
  for (int64_t i = 0; i < SIZE; i++)
    for (int64_t j = 0; j < SIZE; j++) {
      w->o.p[P_W1][i * SIZE + j] = w->o.p[P_W2][i * SIZE + j] = w->o.dy[i * SIZE + j] = i == j;
      w->o.p[P_X][i * SIZE + j] = fabs(w->o.p[P_X][i * SIZE + j]);
    }
  memset(w->o.p[P_B1], 0, SIZE * sizeof(double));
  memset(w->o.p[P_B2], 0, SIZE * sizeof(double));
  esmm_ffn_opts opts = opts_of(&w->o);
  opts.mode = mode;
  opts.sparsifier = sparsifier;
  opts.permute_tokens = permute;
  opts.seed = seed;
  rig_create(&w->r, &w->o, &opts, plain, 2);
  rig_run(&w->r);
}

static void window_free(window *w)
{
  rig_free(&w->r);
  oracle_free(&w->o);
}

/* Groups of four neighbours along the rows (or columns) of m that have more than two nonzeros. */
static int crowded(const esmm_matrix *m, bool along_columns)
{
  int count = 0;
  for (int64_t i = 0; i < SIZE; i++)
    for (int64_t j = 0; j < SIZE; j += 4) {
      int nonzeros = 0;
      for (int64_t x = 0; x < 4; x++)
        nonzeros += (along_columns ? th_get(m, i, j + x) : th_get(m, j + x, i)) != 0;
      count += nonzeros > 2;
    }
  return count;
}

static void groups_lie_along_the_summed_axis(void **state)
{
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    window w;
    window_create(&w, ESMM_FFN_SPARSE, (esmm_sparsifier)kind, 0, 1);
    assert_int_equal(crowded(&w.r.y, true), 0);       /* h in y: four features of a token */
    assert_true(crowded(&w.r.y, false) > 0);          /* and not four tokens of a feature */
    assert_int_equal(crowded(&w.r.d[P_W2], true), 0); /* h in dW2, turned: four tokens of a feature */
    assert_true(crowded(&w.r.d[P_W2], false) > 0);
    window_free(&w);
  }
  window exact;
  window_create(&exact, ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 0, 1);
  assert_int_equal(crowded(&exact.r.y, true), SIZE * SIZE / 4);
  window_free(&exact);
}

static void soft_threshold_is_scaled_to_fit(void **state)
{
  (void)state;
  window w;
  window_create(&w, ESMM_FFN_SPARSE, ESMM_SPARSIFY_SOFT, 0, 1);
  double fit = 0, own = 0, difference = 0, shrunk[SIZE * SIZE];
  for (int64_t i = 0; i < SIZE * SIZE; i++) {
    const double *group = &w.o.p[P_X][i / 4 * 4], x = w.o.p[P_X][i];
    double sorted[4];
    memcpy(sorted, group, sizeof sorted);
    for (int a = 0; a < 4; a++)
      for (int b = 0; b < 3; b++)
        if (sorted[b] < sorted[b + 1]) {
          const double moved = sorted[b];
          sorted[b] = sorted[b + 1];
          sorted[b + 1] = moved;
        }
    shrunk[i] = x > sorted[2] ? x - sorted[2] : 0;
    fit += x * shrunk[i];
    own += shrunk[i] * shrunk[i];
  }
  for (int64_t i = 0; i < SIZE * SIZE; i++) {
    const double want = fit / own * shrunk[i], got = th_get(&w.r.y, i / SIZE, i % SIZE);
    assert_true(fabs(got - want) <= 1e-6);
    difference += (w.o.p[P_X][i] - got) * (w.o.p[P_X][i] - got);
  }
  assert_true(fit / own > 1.0);
  assert_true(fabs(w.r.report.y.norm_dropped - sqrt(difference)) < 1e-6);
  window_free(&w);
}

static void mvue_is_right_on_average(void **state)
{
  (void)state;
  enum { PASSES = 4000 };
  window w;
  window_create(&w, ESMM_FFN_SPARSE, ESMM_SPARSIFY_MVUE, 0, 7);
  double sum[SIZE * SIZE] = {0}, squares[SIZE * SIZE] = {0}, spread = 0, least = 0;
  for (int pass = 0; pass < PASSES; pass++) {
    must(w.r.ctx, esmm_ffn_forward(w.r.ctx, w.r.ffn, &w.r.p[P_X], &w.r.y, w.r.cache, NULL));
    for (int64_t i = 0; i < SIZE * SIZE; i++) {
      const double y = th_get(&w.r.y, i / SIZE, i % SIZE);
      sum[i] += y;
      squares[i] += y * y;
    }
  }
  for (int64_t i = 0; i < SIZE * SIZE; i++) {
    const double x = w.o.p[P_X][i], mean = sum[i] / PASSES;
    const double variance = fmax(0, squares[i] / PASSES - mean * mean);
    if (!(fabs(mean - x) <= 5 * sqrt(variance / PASSES) + 1e-6))
      fail_msg("element %lld is %g on average of %d, must be %g", (long long)i, mean, PASSES, x);
    spread += variance;
  }
  for (int64_t i = 0; i < SIZE * SIZE; i += 4) { /* least variance: p follows |x|, at most 1, sum 2 */
    const double *x = &w.o.p[P_X][i];
    double all = 0, most = 0;
    for (int a = 0; a < 4; a++) {
      all += x[a];
      most = fmax(most, x[a]);
    }
    for (int a = 0; a < 4; a++) {
      const double p = 2 * most <= all ? 2 * x[a] / all : x[a] == most ? 1 : x[a] / (all - most);
      least += x[a] * x[a] * (1 / p - 1);
    }
  }
  if (!(fabs(spread - least) < 0.02 * least))
    fail_msg("the variances add up to %g, the least is %g", spread, least);
  window_free(&w);
}

static void seeds_decide_what_is_drawn(void **state)
{
  (void)state;
  window a, b, c;
  window_create(&a, ESMM_FFN_SPARSE, ESMM_SPARSIFY_MVUE, 1, 7);
  window_create(&b, ESMM_FFN_SPARSE, ESMM_SPARSIFY_MVUE, 1, 7);
  window_create(&c, ESMM_FFN_SPARSE, ESMM_SPARSIFY_MVUE, 1, 8);
  const size_t bytes = SIZE * SIZE * sizeof(float);
  assert_memory_equal(a.r.y.data, b.r.y.data, bytes);
  assert_memory_equal(a.r.d[P_W2].data, b.r.d[P_W2].data, bytes);
  assert_memory_equal(a.r.d[P_X].data, b.r.d[P_X].data, bytes);
  assert_memory_not_equal(a.r.y.data, c.r.y.data, bytes);
  assert_memory_not_equal(a.r.d[P_W2].data, c.r.d[P_W2].data, bytes);
  rig_run(&a.r); /* the next pass draws anew */
  assert_memory_not_equal(a.r.y.data, b.r.y.data, bytes);
  esmm_ffn_cache *const first = b.r.cache; /* and so does the first pass of another cache */
  must(b.r.ctx, esmm_ffn_cache_create(b.r.ctx, b.r.ffn, &b.r.cache));
  memcpy(c.r.y.data, b.r.y.data, bytes);
  rig_run(&b.r);
  assert_memory_not_equal(b.r.y.data, c.r.y.data, bytes);
  esmm_ffn_cache_free(first);
  window_free(&a);
  window_free(&b);
  window_free(&c);
}

/* Shuffled tokens: the forward pass is what it was, gradients keep as many values from other groups, and the report
   still says what was dropped. */
static void token_permutation(void **state)
{
  (void)state;
  window plainly, shuffled, other;
  window_create(&plainly, ESMM_FFN_SPARSE, ESMM_SPARSIFY_TOP_N, 0, 7);
  window_create(&shuffled, ESMM_FFN_SPARSE, ESMM_SPARSIFY_TOP_N, 1, 7);
  window_create(&other, ESMM_FFN_SPARSE, ESMM_SPARSIFY_TOP_N, 1, 9);
  const size_t bytes = SIZE * SIZE * sizeof(float);
  assert_memory_equal(plainly.r.y.data, shuffled.r.y.data, bytes);
  assert_memory_equal(plainly.r.d[P_X].data, shuffled.r.d[P_X].data, bytes);
  assert_memory_not_equal(plainly.r.d[P_W2].data, shuffled.r.d[P_W2].data, bytes);
  assert_memory_not_equal(other.r.d[P_W2].data, shuffled.r.d[P_W2].data, bytes);
  double dropped = 0;
  for (int64_t f = 0; f < SIZE; f++) {
    int kept = 0;
    for (int64_t t = 0; t < SIZE; t++) {
      const double x = shuffled.o.p[P_X][t * SIZE + f], got = th_get(&shuffled.r.d[P_W2], f, t);
      assert_true(got == 0 || got == x);
      kept += got != 0;
      dropped += got == 0 ? x * x : 0;
    }
    assert_int_equal(kept, SIZE / 2);
  }
  assert_true(fabs(shuffled.r.report.dw2.norm_dropped - sqrt(dropped)) < 1e-9 * dropped);
  window_free(&plainly);
  window_free(&shuffled);
  window_free(&other);
}

static void two_of_four_keeps_nan(void **state)
{
  (void)state;
  for (int kind = 0; kind < 3; kind++) {
    window w;
    window_create(&w, ESMM_FFN_SPARSE, (esmm_sparsifier)kind, 0, 1);
    th_set(&w.r.p[P_X], 0, 3, NAN);
    th_set(&w.r.p[P_X], 1, 6, INFINITY);
    must(w.r.ctx, esmm_ffn_forward(w.r.ctx, w.r.ffn, &w.r.p[P_X], &w.r.y, w.r.cache, NULL));
    assert_true(isnan(th_get(&w.r.y, 0, 3)));
    assert_true(!isfinite(th_get(&w.r.y, 1, 6)));
    for (int64_t i = 2; i < SIZE; i++) /* other tokens do not see them */
      for (int64_t j = 0; j < SIZE; j++)
        assert_true(isfinite(th_get(&w.r.y, i, j)));
    window_free(&w);
  }
}

/* A dead feature whose weight is Inf: dense mode multiplies it, as IEEE says; exact mode may skip it. */
static void dense_mode_meets_zeros_with_inf(void **state)
{
  (void)state;
  for (int dense = 0; dense < 2; dense++) {
    window w;
    window_create(&w, dense ? ESMM_FFN_DENSE : ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 0, 1);
    for (int64_t i = 0; i < SIZE; i++)
      th_set(&w.r.p[P_X], i, 5, -1);
    th_set(&w.r.p[P_W2], 5, 7, INFINITY);
    must(w.r.ctx, esmm_ffn_set_weights(w.r.ctx, w.r.ffn, &w.r.weights, NULL));
    must(w.r.ctx, esmm_ffn_forward(w.r.ctx, w.r.ffn, &w.r.p[P_X], &w.r.y, w.r.cache, NULL));
    for (int64_t i = 0; i < SIZE; i++) {
      assert_true(isnan(th_get(&w.r.y, i, 7)) || (!dense && isfinite(th_get(&w.r.y, i, 7))));
      assert_true(isfinite(th_get(&w.r.y, i, 8)));
    }
    window_free(&w);
  }
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_of_four_drops_only_what_it_says),
      cmocka_unit_test(groups_lie_along_the_summed_axis),
      cmocka_unit_test(soft_threshold_is_scaled_to_fit),
      cmocka_unit_test(mvue_is_right_on_average),
      cmocka_unit_test(seeds_decide_what_is_drawn),
      cmocka_unit_test(token_permutation),
      cmocka_unit_test(two_of_four_keeps_nan),
      cmocka_unit_test(dense_mode_meets_zeros_with_inf),
  };
  return cmocka_run_group_tests_name("ffn_modes", tests, NULL, NULL);
}
