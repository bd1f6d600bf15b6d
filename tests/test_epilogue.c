/*
 * test_epilogue.c: bias, activation, gate and residual in every mix, in every dtype and order of C, at ragged shapes,
 * by every kernel and by the plan's own choice; and the statistics of C that come with them. On a CPU, or on the GPU
 * that ESMM_TEST_DEVICE names: there with operands in host memory and in the GPU's.
 *
 * The oracle is a loop in float64 that follows the order of operations in esmm.h, with a bound on the error of each
 * step. The statistics must be exactly those of a pass over C as it was stored.
 *
 *   ESMM_TEST_CASES=n   at most n / 10 mixes (sanitizer builds), since every kernel runs each of them
 */
#include "bounded.h"
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

enum { MOST_M = 131, MOST_N = 200, MOST_K = 260 };

static const esmm_activation ACTIVATIONS[] = {ESMM_ACT_NONE, ESMM_ACT_RELU,      ESMM_ACT_RELU2,
                                              ESMM_ACT_GELU, ESMM_ACT_GELU_TANH, ESMM_ACT_SILU};

/* ---- a mix ---- */

typedef enum residual_kind { NO_RESIDUAL, OTHER_RESIDUAL, C_ITSELF } residual_kind;

typedef struct mix {
  int64_t m, n, k;
  esmm_activation activation;
  bool bias, gate;
  residual_kind residual;
  esmm_dtype dtype_c, dtype_a, dtype_b, dtype_r;
  bool placed; /* operands lie in the GPU's memory */
  esmm_order order_c, order_a, order_r;
  float alpha, beta;
  int threads;                        /* 0 or 1: which context */
  int64_t c_strip_rows, a_strip_rows; /* 0: 8, and no pattern of A */
  bool count, bitmaps;
  uint64_t seed;
} mix;

static void describe(const mix *x, const char *kernel, const char *weights, char *out, size_t room)
{
  static const char *const acts[] = {"none", "relu", "relu2", "gelu", "gelu_tanh", "silu"};
  static const char *const residuals[] = {"none", "other", "C"};
  (void)snprintf(out, room,
                 "%s, %s weights of %s, %lld x %lld x %lld, %s%s%s, residual %s %s %s, C %s %s, A %s %s, alpha %g, "
                 "beta %g, context %d, strips %lld of C, %lld of A%s%s%s, seed %llu",
                 kernel, weights, esmm_dtype_str(x->dtype_b), (long long)x->m, (long long)x->n, (long long)x->k,
                 acts[x->activation], x->bias ? ", bias" : "", x->gate ? ", gate" : "", residuals[x->residual],
                 esmm_dtype_str(x->dtype_r), x->order_r ? "columns" : "rows", esmm_dtype_str(x->dtype_c),
                 x->order_c ? "columns" : "rows", esmm_dtype_str(x->dtype_a), x->order_a ? "columns" : "rows",
                 (double)x->alpha, (double)x->beta, x->threads, (long long)x->c_strip_rows, (long long)x->a_strip_rows,
                 x->count ? ", counted" : "", x->bitmaps ? ", bitmaps" : "", x->placed ? ", on the GPU" : "",
                 (unsigned long long)x->seed);
}

/* How B is prepared: the kernels of a format want theirs. */
typedef struct preparation {
  const char *name;
  esmm_prepare_opts opts;
} preparation;

/* Blocks at the edge of a small matrix are more than it has: room enough. */
#define PREPARE(...)                                                       \
  {                                                                        \
    .size = sizeof(esmm_prepare_opts), .max_bytes_ratio = 1e6, __VA_ARGS__ \
  }
static const preparation PREPARATIONS[] = {
    {"dense", PREPARE(.format.kind = ESMM_FORMAT_DENSE)},
    {"bsr 8x16", PREPARE(.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 8, .format.block_cols = 16)},
    {"bsr 32x32", PREPARE(.format.kind = ESMM_FORMAT_BSR)},
    {"nm 2:4", PREPARE(.format.kind = ESMM_FORMAT_NM)},
};

static esmm_ctx *contexts[2]; /* of one and of two threads */
static th_arena arena_a, arena_c, arena_r, arena_counts, arena_bias, arena_gate_bias;
static th_device_arena device_arenas[6]; /* the same on a GPU */
static char now[900];
static int64_t runs, refused;
static int64_t runs_of[256]; /* by kernel */

typedef struct product {
  double *sum, *magnitude; /* [m, n] */
} product;

/* One mix, ready to run. */
typedef struct setting {
  const mix *x;
  esmm_matrix a, c, r;
  esmm_matrix b, g; /* rows */
  float *bias, *gate_bias;
  int32_t *counts;
  esmm_pattern *a_pattern;
  unsigned char *before; /* C's bytes */
  size_t c_bytes;
  product of_b, of_g;
  number *want; /* [m, n] */
} setting;

static void fill(esmm_matrix *m, th_rng *rng, double density, double scale)
{
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++)
      th_set(m, i, j, th_unit(rng) < density ? scale * (2 * th_unit(rng) - 1) : 0.0);
}

/* B with two nonzeros of four k's at most, and whole 8 x 16 blocks of zeros: it fits every format. */
static void fill_b(esmm_matrix *b, th_rng *rng)
{
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++) {
      th_rng block = {(uint64_t)(k / 8 * 1000 + j / 16 + 7)};
      const bool alive = th_next(&block) % 4 != 0 && (k % 4 == (j + k / 4) % 4 || k % 4 == (j + 1) % 4);
      const double value = 2 * th_unit(rng) - 1;
      th_set(b, k, j, alive ? value : 0.0);
    }
}

/* x = alpha A B + beta C + bias at one element, with its error. */
static number branch(const setting *s, const product *b, const float *bias, double beta, int64_t i, int64_t j)
{
  const double alpha = (double)s->x->alpha, sum = alpha != 0 ? b->sum[i * s->x->n + j] : 0;
  const double magnitude = alpha != 0 ? b->magnitude[i * s->x->n + j] : 0;
  const double old = beta != 0 ? beta * th_get(&s->c, i, j) : 0, add = bias ? (double)bias[j] : 0;
  const double size = fabs(alpha) * magnitude + fabs(old) + fabs(add);
  const double more = th_on_gpu() ? 20 : 0; /* a tensor core's products are off by a few units */
  return (number){alpha * sum + old + add, ((double)s->x->k + 6 + more) * UNIT * size + 0x1p-149};
}

static void *room(int64_t count, size_t size)
{
  void *p = malloc((size_t)(count + 1) * size);
  assert_non_null(p);
  return p;
}

static double *as_doubles(const esmm_matrix *m)
{
  double *out = room(m->rows * m->cols, sizeof *out);
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++)
      out[i * m->cols + j] = th_get(m, i, j);
  return out;
}

static product multiply(const esmm_matrix *a, const esmm_matrix *b)
{
  double *x = as_doubles(a), *y = as_doubles(b);
  const product p = {room(a->rows * b->cols, sizeof(double)), room(a->rows * b->cols, sizeof(double))};
  th_oracle(a->rows, b->cols, a->cols, x, y, p.sum, p.magnitude);
  free(x);
  free(y);
  return p;
}

static void make_want(setting *s)
{
  const mix *x = s->x;
  s->of_b = multiply(&s->a, &s->b);
  s->of_g = multiply(&s->a, &s->g);
  s->want = room(x->m * x->n, sizeof *s->want);
  for (int64_t i = 0; i < x->m; i++)
    for (int64_t j = 0; j < x->n; j++) {
      number y = branch(s, &s->of_b, s->bias, (double)x->beta, i, j);
      if (x->gate)
        y = times(activated(x->activation, branch(s, &s->of_g, s->gate_bias, 0, i, j)), y);
      else
        y = activated(x->activation, y);
      if (x->residual != NO_RESIDUAL)
        y = plus(y, th_get(&s->r, i, j));
      s->want[i * x->n + j] = y;
    }
}

static void set_up(setting *s, const mix *x)
{
  th_rng rng = {x->seed};
  *s = (setting){.x = x};
  th_matrix_place(&arena_a, &s->a, x->m, x->k, (int64_t)(x->seed % 3), x->dtype_a, x->order_a);
  th_matrix_place(&arena_c, &s->c, x->m, x->n, (int64_t)(x->seed % 4), x->dtype_c, x->order_c);
  th_matrix_place(&arena_r, &s->r, x->m, x->n, (int64_t)(x->seed % 2), x->dtype_r, x->order_r);
  s->b = th_matrix_alloc(x->k, x->n, x->dtype_b);
  s->g = th_matrix_alloc(x->k, x->n, x->dtype_b);
  fill(&s->a, &rng, 0.4, 1.5);
  fill(&s->c, &rng, 0.9, 2);
  fill(&s->r, &rng, 0.5, 2);
  fill_b(&s->b, &rng);
  fill_b(&s->g, &rng);
  if (x->residual == C_ITSELF)
    s->r = s->c;
  if (x->bias) {
    s->bias = th_place(&arena_bias, (size_t)x->n * sizeof(float));
    s->gate_bias = x->gate ? th_place(&arena_gate_bias, (size_t)x->n * sizeof(float)) : NULL;
    for (int64_t j = 0; j < x->n; j++) {
      s->bias[j] = (float)(2 * th_unit(&rng) - 1);
      if (x->gate)
        s->gate_bias[j] = (float)(2 * th_unit(&rng) - 1);
    }
  }
  s->counts = x->count ? th_place(&arena_counts, (size_t)x->n * sizeof(int32_t)) : NULL;
  if (x->a_strip_rows)
    assert_int_equal(esmm_pattern_extract(contexts[0], &s->a, x->a_strip_rows, &s->a_pattern), ESMM_OK);
  s->c_bytes = th_matrix_bytes(&s->c);
  s->before = room((int64_t)s->c_bytes, 1);
  if (s->c_bytes)
    memcpy(s->before, s->c.data, s->c_bytes);
  make_want(s);
}

static void tear_down(setting *s)
{
  esmm_pattern_free(s->a_pattern);
  free(s->b.data);
  free(s->g.data);
  free(s->before);
  free(s->want);
  free(s->of_b.sum);
  free(s->of_b.magnitude);
  free(s->of_g.sum);
  free(s->of_g.magnitude);
}

/* What storing may add to a number near 0: at least half the smallest subnormal. */
static double least(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return 0x1p-149;
  case ESMM_BF16:
    return 0x1p-134;
  case ESMM_F16:
    return 0x1p-25;
  }
  return 0;
}

static void check_values(const setting *s)
{
  const esmm_dtype dtype = s->c.dtype;
  const double smallest = least(dtype);
  for (int64_t i = 0; i < s->x->m; i++)
    for (int64_t j = 0; j < s->x->n; j++) {
      const number want = s->want[i * s->x->n + j];
      const double got = th_get(&s->c, i, j),
                   bound = want.error + th_roundoff(dtype) * (fabs(want.is) + want.error) + smallest;
      if (fabs(want.is) + bound < th_largest(dtype) && !(fabs(got - want.is) <= bound))
        fail_msg("%s: C[%lld,%lld] is %.9g, not %.9g +- %.2g", now, (long long)i, (long long)j, got, want.is, bound);
    }
}

static bool is_nonzero(const esmm_matrix *c, int64_t i, int64_t j)
{
  const double x = th_get(c, i, j);
  return x != 0 || isnan(x);
}

/* The counts are those of a pass of our own; the pattern is esmm_pattern_extract's, whose bits are that pass's too. */
static void check_statistics(const esmm_matrix *c, const int32_t *counts, const esmm_pattern *got, int64_t strip_rows)
{
  for (int64_t j = 0; counts && j < c->cols; j++) {
    int64_t want = 0;
    for (int64_t i = 0; i < c->rows; i++)
      want += is_nonzero(c, i, j);
    if (counts[j] != want)
      fail_msg("%s: column %lld has %lld nonzeros, counted %lld", now, (long long)j, (long long)want,
               (long long)counts[j]);
  }
  if (!got)
    return;
  esmm_pattern *want = NULL;
  assert_int_equal(esmm_pattern_extract(contexts[0], c, strip_rows, &want), ESMM_OK);
  const esmm_pattern_info is = th_pattern(contexts[0], got), should = th_pattern(contexts[0], want);
  if (is.strips != should.strips || is.k != c->cols || is.strip_rows != strip_rows || is.density != should.density)
    fail_msg("%s: the pattern has %lld strips of %lld rows, density %g, not %lld of %lld, %g", now,
             (long long)is.strips, (long long)is.strip_rows, is.density, (long long)should.strips,
             (long long)strip_rows, should.density);
  uint64_t *bits = th_pattern_bits(contexts[0], got), *want_bits = th_pattern_bits(contexts[0], want);
  for (int64_t i = 0; i < is.strips * is.words; i++)
    if (bits[i] != want_bits[i])
      fail_msg("%s: strip %lld of the pattern is not that of C", now, (long long)(i / is.words));
  for (int64_t i = 0; i < c->rows; i++)
    for (int64_t j = 0; j < c->cols; j++)
      if (is_nonzero(c, i, j) && !(bits[i / strip_rows * is.words + j / 64] >> (j % 64) & 1))
        fail_msg("%s: C[%lld,%lld] is not zero, its bit is", now, (long long)i, (long long)j);
  free(bits);
  free(want_bits);
  esmm_pattern_free(want);
}

static esmm_matmul_opts options(setting *s, const esmm_weights *gate, esmm_pattern **pattern)
{
  const mix *x = s->x;
  return (esmm_matmul_opts){.size = sizeof(esmm_matmul_opts),
                            .alpha = &x->alpha,
                            .beta = &x->beta,
                            .bias = s->bias,
                            .activation = x->activation,
                            .a_pattern = s->a_pattern,
                            .residual = x->residual != NO_RESIDUAL ? &s->r : NULL,
                            .gate = gate,
                            .gate_bias = gate ? s->gate_bias : NULL,
                            .column_nonzeros = s->counts,
                            .c_strip_rows = x->c_strip_rows,
                            .c_pattern = x->bitmaps ? pattern : NULL};
}

/* A copy in the GPU's memory, between guard words. */
static esmm_matrix put_matrix(th_device_arena *arena, const esmm_matrix *host)
{
  esmm_matrix m = *host;
  m.data = th_device_put(arena, host->data, th_matrix_bytes(host));
  m.place = ESMM_DEVICE;
  m.device = th_gpu_ordinal();
  return m;
}

/* The same call with every operand in the GPU's memory; C and the counts come back. */
static esmm_status run_placed(setting *s, const esmm_weights *w, esmm_matmul_opts *opts, esmm_stats *stats)
{
  const mix *x = s->x;
  const size_t row = (size_t)x->n * sizeof(float);
  th_device_arena *arenas = device_arenas;
  const esmm_matrix a = put_matrix(&arenas[0], &s->a);
  esmm_matrix c = put_matrix(&arenas[1], &s->c);
  const esmm_matrix r = x->residual == C_ITSELF ? c : put_matrix(&arenas[2], &s->r);
  opts->residual = opts->residual ? &r : NULL;
  opts->bias = opts->bias ? th_device_put(&arenas[3], s->bias, row) : NULL;
  opts->gate_bias = opts->gate_bias ? th_device_put(&arenas[4], s->gate_bias, row) : NULL;
  opts->column_nonzeros = opts->column_nonzeros ? th_device_put(&arenas[5], s->counts, row) : NULL;
  const esmm_status status = esmm_matmul(contexts[x->threads], &a, w, &c, opts, stats);
  assert_int_equal(esmm_ctx_synchronize(contexts[x->threads]), ESMM_OK);
  if (!th_device_get(&arenas[1], s->c.data) || (s->counts && !th_device_get(&arenas[5], s->counts)))
    fail_msg("%s: wrote beside C or the counts", now);
  return status;
}

/* One kernel on one mix. Returns whether it could run. */
static bool run_one(setting *s, const esmm_weights *w, const esmm_weights *gate, const char *kernel)
{
  const mix *x = s->x;
  esmm_pattern *pattern = (esmm_pattern *)(void *)&pattern; /* must not be left so */
  esmm_matmul_opts opts = options(s, x->gate ? gate : NULL, &pattern);
  opts.force = kernel;
  if (s->c_bytes)
    memcpy(s->c.data, s->before, s->c_bytes);
  for (int64_t j = 0; s->counts && j < x->n; j++)
    s->counts[j] = -77;
  esmm_stats stats = {.size = sizeof stats};
  const esmm_status status =
      x->placed ? run_placed(s, w, &opts, &stats) : esmm_matmul(contexts[x->threads], &s->a, w, &s->c, &opts, &stats);
  if (status == ESMM_ERR_UNSUPPORTED) {
    for (int64_t j = 0; s->counts && j < x->n; j++)
      assert_int_equal(s->counts[j], -77);
    if (x->bitmaps)
      assert_null(pattern);
    if (s->c_bytes)
      assert_memory_equal(s->c.data, s->before, s->c_bytes);
    return false;
  }
  if (status != ESMM_OK)
    fail_msg("%s: %s", now, esmm_ctx_error(contexts[x->threads]));
  check_values(s);
  check_statistics(&s->c, s->counts, x->bitmaps ? pattern : NULL, x->c_strip_rows ? x->c_strip_rows : 8);
  if (!th_guards_intact(&arena_c) || (x->count && !th_guards_intact(&arena_counts)))
    fail_msg("%s: wrote beside C or the counts", now);
  if (x->bitmaps)
    esmm_pattern_free(pattern);
  if (stats.flop_dense != (x->gate ? 4.0 : 2.0) * (double)(x->m * x->n * x->k) ||
      !(stats.flop_useful <= stats.flop_dense && stats.joint_density <= 1.0))
    fail_msg("%s: %g useful FLOP of %g, joint density %g", now, stats.flop_useful, stats.flop_dense,
             stats.joint_density);
  return true;
}

/* By every kernel that is available, with B in the first so many of PREPARATIONS; only: a kernel whose name begins so,
   and the plan's choice, or NULL. */
static void run_mix_of(const mix *x, int preparations, const char *only)
{
  setting s;
  set_up(&s, x);
  for (int f = 0; f < preparations; f++) {
    esmm_weights *w = NULL, *gate = NULL;
    /* The gate need not be of the other's format. */
    const esmm_prepare_opts *gate_opts = &PREPARATIONS[x->seed % 2 ? f : 0].opts;
    const esmm_status prepared = esmm_prepare(contexts[0], &s.b, &PREPARATIONS[f].opts, &w);
    if (prepared == ESMM_ERR_UNSUPPORTED && th_on_gpu() && f > 0)
      continue; /* a format that it does not have */
    if (prepared != ESMM_OK || esmm_prepare(contexts[0], &s.g, gate_opts, &gate) != ESMM_OK)
      fail_msg("%s: %s", PREPARATIONS[f].name, esmm_ctx_error(contexts[0]));
    for (int i = -1; i < esmm_kernel_count(); i++) {
      esmm_kernel_info info = {.size = sizeof info, .name = "auto"};
      if (i >= 0)
        assert_int_equal(esmm_kernel_get(contexts[0], i, &info), ESMM_OK);
      if (i >= 0 && (!info.available || (only && strncmp(info.name, only, strlen(only)) != 0)))
        continue;
      describe(x, info.name, PREPARATIONS[f].name, now, sizeof now);
      const bool ran = run_one(&s, w, gate, info.name);
      if (i < 0 && !ran)
        fail_msg("%s: %s", now, esmm_ctx_error(contexts[x->threads]));
      runs += ran;
      refused += !ran;
      runs_of[i + 1] += ran;
    }
    esmm_weights_free(w);
    esmm_weights_free(gate);
  }
  tear_down(&s);
}

static void run_mix(const mix *x)
{
  run_mix_of(x, COUNT(PREPARATIONS), NULL);
}

/* ---- the table ---- */

static const int64_t SHAPES[][3] = {
    {1, 1, 1},     {1, 200, 64},  {2, 33, 7},    {7, 64, 65},  {8, 65, 130},  {13, 31, 3},
    {16, 16, 16},  {17, 97, 260}, {33, 130, 33}, {64, 63, 64}, {65, 129, 20}, {131, 47, 12},
    {9, 200, 100}, {40, 8, 0},    {0, 9, 4},     {5, 0, 4},    {3, 70, 129},  {131, 1, 40},
};

static void every_mix(void **state)
{
  (void)state;
  const int mixes = COUNT(ACTIVATIONS) * 2 * 3 * 2 * 3 * 2;
  const int most = (int)(th_env_int("ESMM_TEST_CASES", 10 * mixes) / 10) + 1;
  /* Two turns of each; odd, so that all levels come up. A GPU has many kernels, and a call waits for it: there every
     fifth, which no level's number divides. */
  const int stride = most < mixes ? mixes / most * 2 + 1 : th_on_gpu() ? 5 : 1;
  static const float alphas[] = {1, 0.5f, 1, -2, 1, 0}, betas[] = {0, 1, 0, 0.5f, 0};
  static const int64_t strips[] = {0, 1, 3, 8, 16, 5, 32, 64, 200};
  for (int i = 0; i < mixes; i += stride)
    for (int turn = 0; turn < 2; turn++) {
      th_rng rng = {(uint64_t)(i * 2 + turn) * 77 + 5};
      int rest = i;
      mix x = {.seed = th_next(&rng) % 100000 + 1};
      x.activation = ACTIVATIONS[rest % COUNT(ACTIVATIONS)];
      rest /= COUNT(ACTIVATIONS);
      x.bias = rest % 2;
      rest /= 2;
      x.residual = (residual_kind)(rest % 3);
      rest /= 3;
      x.gate = rest % 2;
      rest /= 2;
      x.dtype_c = (esmm_dtype)(rest % 3);
      x.order_c = (esmm_order)(rest / 3);
      /* Shapes in turn, so that every mix of two of the above meets several; the rest as it falls. */
      const int64_t *shape = SHAPES[(i * 5 + i / 18 + turn * 7) % COUNT(SHAPES)];
      x.m = shape[0];
      x.n = shape[1];
      x.k = shape[2];
      x.dtype_a = (esmm_dtype)th_below(&rng, 3);
      x.dtype_b = th_on_gpu() && i % 4 != 0 ? x.dtype_a : ESMM_F32; /* a GPU's 16-bit kernels want both alike */
      x.placed = th_on_gpu() && i % 2;
      x.order_a = (esmm_order)th_below(&rng, 2);
      x.dtype_r = x.residual == C_ITSELF ? x.dtype_c : (esmm_dtype)th_below(&rng, 3);
      x.order_r = x.residual == C_ITSELF ? x.order_c : (esmm_order)th_below(&rng, 2);
      x.alpha = alphas[th_below(&rng, COUNT(alphas))];
      x.beta = betas[th_below(&rng, COUNT(betas))];
      x.threads = (int)th_below(&rng, 2);
      x.c_strip_rows = strips[th_below(&rng, COUNT(strips))];
      x.a_strip_rows = strips[th_below(&rng, COUNT(strips))];
      x.count = th_below(&rng, 4) != 0;
      x.bitmaps = th_below(&rng, 4) != 0;
      run_mix(&x);
    }
  print_message("# %lld products, %lld that a kernel cannot do\n", (long long)runs, (long long)refused);
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(contexts[0], i, &info), ESMM_OK);
    if (stride == 1 && info.available && runs_of[i + 1] < 4) /* a few mixes need not suit every kernel */
      fail_msg("%s ran %lld of the products", info.name, (long long)runs_of[i + 1]);
  }
}

/* The plain product, whose sums go straight into C, is counted like any other: also where a thread's block is large. */
static void plain_products_are_counted(void **state)
{
  (void)state;
  const mix shapes[] = {{.m = 300, .n = 1100, .k = 40}, {.m = 130, .n = 70, .k = 700}, {.m = 15, .n = 3000, .k = 9}};
  for (int i = 0; i < COUNT(shapes); i++)
    for (int beta = 0; beta < 2; beta++) {
      mix x = shapes[i];
      x.alpha = 1;
      x.beta = (float)beta;
      x.threads = 1;
      x.count = x.bitmaps = true;
      x.c_strip_rows = i == 1 ? 7 : 0;
      x.seed = 4 + (uint64_t)i;
      th_arena *arenas[] = {&arena_a, &arena_c, &arena_r};
      for (int j = 0; j < COUNT(arenas); j++) {
        th_arena_free(arenas[j]);
        th_arena_create(arenas[j], (size_t)4 << 20);
      }
      run_mix(&x);
    }
}

/*
 * What a GPU's kernels for 16 bits do with whole tiles of C, tiles over its edge, parts of split tiles: statistics that
 * the kernel takes in its own launch, at strips that it can and cannot.
 */
static void tiles_of_a_gpu_are_counted(void **state)
{
  (void)state;
  if (!th_on_gpu())
    skip();
  static const int64_t shapes[][3] = {
      {300, 512, 200}, {257, 520, 64}, {128, 256, 4100}, {130, 1000, 1100}, {700, 384, 72}};
  static const int64_t strips[] = {128, 8, 24, 16, 100, 1000, 64};
  static const esmm_activation activations[] = {ESMM_ACT_RELU2, ESMM_ACT_NONE, ESMM_ACT_RELU, ESMM_ACT_GELU,
                                                ESMM_ACT_RELU2};
  th_arena *arenas[] = {&arena_a, &arena_c, &arena_r};
  for (int j = 0; j < COUNT(arenas); j++) {
    th_arena_free(arenas[j]);
    th_arena_create(arenas[j], (size_t)8 << 20);
  }
  for (int i = 0; i < 36; i++) {
    const int64_t *shape = shapes[i % COUNT(shapes)];
    mix x = {.m = shape[0], .n = shape[1], .k = shape[2], .alpha = 1, .count = i % 6 != 5, .bitmaps = i % 5 != 4};
    x.activation = activations[i / 5 % COUNT(activations)];
    x.bias = i % 3 != 0;
    x.gate = i % 11 == 10;
    x.residual = i % 9 == 7 ? OTHER_RESIDUAL : i % 9 == 8 ? C_ITSELF : NO_RESIDUAL;
    x.dtype_a = x.dtype_b = i % 2 ? ESMM_F16 : ESMM_BF16;
    x.dtype_c = i % 4 == 3 ? ESMM_F32 : i % 8 == 2 ? ESMM_F16 : x.dtype_a;
    x.order_c = i % 13 == 12 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    x.dtype_r = x.dtype_c;
    x.order_r = x.order_c;
    x.beta = i % 10 == 6 ? 0.5f : 0.0f;
    x.c_strip_rows = strips[i % COUNT(strips)];
    x.placed = i % 3 != 1;
    x.seed =
        12 * (uint64_t)(i + 1) + (i % 7 == 3); /* a multiple of 12: C and A have no padding, and lines of 16 bytes */
    run_mix_of(&x, i % 4 == 0 ? COUNT(PREPARATIONS) : 1, NULL);
  }
}

/*
 * What Hopper's dense kernel does in its own launch behind the sums, in registers or, where C is odd, one by one: a
 * gate (both branches are one launch), every activation, a residual, biases, statistics. Shapes: tiles over every edge,
 * pairs of blocks that share A (up to 128 rows) or B, tiles split along k, several tiles a block. The skipping kernel
 * does it through shared memory, for one branch; decode, for few rows, makes both: in blocks alone or in clusters.
 */
static void gates_curves_and_residuals_of_tiles(void **state)
{
  (void)state;
  if (!th_on_gpu())
    skip();
  static const int64_t shapes[][3] = {{300, 512, 136},  {64, 1024, 1100}, {129, 392, 72},  {17, 136, 200},
                                      {128, 128, 2100}, {257, 520, 64},   {65, 250, 40},   {40, 2048, 1030},
                                      {1, 1000, 1100},  {16, 264, 2055},  {5, 2048, 130},  {9, 61, 700},
                                      {8, 136, 3000},   {2, 4100, 96},    {13, 520, 1030}, {1, 7, 9}};
  enum { CASES = 96, MANY = 5120 };
  th_arena *arenas[] = {&arena_a, &arena_c, &arena_r};
  for (int j = 0; j < COUNT(arenas); j++) {
    th_arena_free(arenas[j]);
    th_arena_create(arenas[j], (size_t)8 << 20);
  }
  for (int i = 0; i < CASES; i++) {
    const int64_t *shape = shapes[i % COUNT(shapes)];
    mix x = {.m = shape[0], .n = shape[1], .k = shape[2], .alpha = i % 5 == 4 ? 0.5f : 1.0f};
    if (i % 24 == 8) { /* more tiles than blocks */
      x.n = MANY;
      x.k = 40;
    }
    x.gate = i % 3 != 2;
    x.activation = ACTIVATIONS[(i + i / 6) % COUNT(ACTIVATIONS)];
    x.bias = i % 4 != 1;
    x.residual = i % 5 == 1 ? OTHER_RESIDUAL : i % 5 == 3 ? C_ITSELF : NO_RESIDUAL;
    x.dtype_a = x.dtype_b = i % 2 ? ESMM_F16 : ESMM_BF16;
    x.order_a = i % 7 == 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    x.dtype_c = i % 12 == 10 ? ESMM_F32 : i % 8 == 3 ? ESMM_BF16 : x.dtype_a;
    x.order_c = i % 16 == 13 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    x.dtype_r = x.residual == C_ITSELF ? x.dtype_c : i % 15 == 11 ? ESMM_F32 : i % 2 ? ESMM_BF16 : ESMM_F16;
    x.order_r = x.residual == C_ITSELF ? x.order_c : i % 20 == 16 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    x.beta = i % 14 == 12 ? 0.5f : 0.0f;
    x.count = i % 4 == 0 || i % 4 == 3;
    x.bitmaps = i % 4 == 0 || i % 4 == 2;
    x.c_strip_rows = i % 3 == 0 ? 128 : i % 3 == 1 ? 8 : 24;
    x.placed = true;
    x.seed = 12 * (uint64_t)(i + 1) + (i % 6 == 5 ? 1 + (uint64_t)(i / 6 % 3) : 0); /* else lines of 16 bytes */
    run_mix_of(&x, 1, x.dtype_a == ESMM_BF16 ? "dense_bf16_sm90a" : "dense_f16_sm90a");
    if (x.m <= 16)
      run_mix_of(&x, 1, x.dtype_a == ESMM_BF16 ? "decode_bf16" : "decode_f16");
    if (!x.gate)
      run_mix_of(&x, 1, x.dtype_a == ESMM_BF16 ? "joint_bf16_sm90a" : "joint_f16_sm90a");
  }
}

/* ---- gated products in blocks of rows ---- */

static void gated_in_blocks_of_rows(void **state)
{
  (void)state;
  enum { M = 200, N = 33000, K = 3, LATE = 192 }; /* so wide that the gate's branch has room for 128 rows */
  static const int64_t a_strips[] = {0, 1, 7, 96, 130, 1000};
  esmm_matrix a = th_matrix_alloc(M, K, ESMM_F32), b = th_matrix_alloc(K, N, ESMM_F32),
              g = th_matrix_alloc(K, N, ESMM_F32), c = th_matrix_alloc(M, N, ESMM_F32);
  int32_t *counts = room(N, sizeof *counts);
  th_fill(&a, 1, 0.4, true);
  for (int64_t i = 0; i < M; i++) /* a bit that only the strips of the last rows have */
    th_set(&a, i, 2, i < LATE ? 0 : 3);
  th_fill(&b, 2, 0.6, true);
  th_fill(&g, 3, 0.6, true);
  float *want = room((int64_t)M * N, sizeof *want); /* small integers: exact */
  const float *x = a.data, *y = b.data, *z = g.data;
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      float up = 0, open = 0;
      for (int64_t k = 0; k < K; k++) {
        up += x[i * K + k] * y[k * N + j];
        open += x[i * K + k] * z[k * N + j];
      }
      want[i * N + j] = open > 0 ? open * up : 0;
    }
  for (int f = 0; f < 2; f++) {
    esmm_weights *w = NULL, *gate = NULL;
    const esmm_status prepared = esmm_prepare(contexts[1], &b, &PREPARATIONS[f].opts, &w);
    if (prepared == ESMM_ERR_UNSUPPORTED && th_on_gpu() && f > 0)
      continue;
    assert_int_equal(prepared, ESMM_OK);
    assert_int_equal(esmm_prepare(contexts[1], &g, &PREPARATIONS[f].opts, &gate), ESMM_OK);
    for (int i = 0; i < esmm_kernel_count(); i++)
      for (int strip = 0; strip < (th_on_gpu() ? 2 : COUNT(a_strips)); strip++) { /* a GPU has no blocks of rows */
        esmm_kernel_info info = {.size = sizeof info};
        assert_int_equal(esmm_kernel_get(contexts[1], i, &info), ESMM_OK);
        if (!info.available)
          continue;
        esmm_pattern *of_a = NULL, *of_c = NULL;
        if (a_strips[strip])
          assert_int_equal(esmm_pattern_extract(contexts[1], &a, a_strips[strip], &of_a), ESMM_OK);
        const esmm_matmul_opts opts = {.size = sizeof opts,
                                       .force = info.name,
                                       .a_pattern = of_a,
                                       .activation = ESMM_ACT_RELU,
                                       .gate = gate,
                                       .column_nonzeros = counts,
                                       .c_strip_rows = 9,
                                       .c_pattern = &of_c};
        (void)snprintf(now, sizeof now, "%s, %s, strips of %lld rows", info.name, PREPARATIONS[f].name,
                       (long long)a_strips[strip]);
        memset(c.data, 0xff, (size_t)M * N * sizeof(float));
        esmm_stats stats = {.size = sizeof stats};
        const esmm_status status = esmm_matmul(contexts[1], &a, w, &c, &opts, &stats);
        if (status == ESMM_OK) {
          const float *out = c.data;
          for (int64_t at = 0; at < (int64_t)M * N; at++)
            if (out[at] != want[at])
              fail_msg("%s: C[%lld,%lld] is %g, not %g", now, (long long)(at / N), (long long)(at % N), (double)out[at],
                       (double)want[at]);
          if (strip == 0) /* blocks that end within a strip of C */
            check_statistics(&c, counts, of_c, 9);
          assert_true(stats.joint_density > 0 && stats.joint_density <= 1);
          assert_true(fabs(stats.skipped_share - (1 - stats.flop_useful / stats.flop_dense)) < 1e-12);
        } else {
          assert_int_equal(status, ESMM_ERR_UNSUPPORTED);
          assert_null(of_c);
        }
        esmm_pattern_free(of_a);
        esmm_pattern_free(of_c);
      }
    esmm_weights_free(w);
    esmm_weights_free(gate);
  }
  free(a.data);
  free(b.data);
  free(g.data);
  free(c.data);
  free(counts);
  free(want);
}

/* ---- the next product takes the pattern ---- */

static void a_pattern_saves_the_next_scan(void **state)
{
  (void)state;
  esmm_matrix a = th_matrix_alloc(70, 90, ESMM_F32), b1 = th_matrix_alloc(90, 150, ESMM_F32),
              b2 = th_matrix_alloc(150, 50, ESMM_F32), h = th_matrix_alloc(70, 150, ESMM_BF16),
              with = th_matrix_alloc(70, 50, ESMM_F32), without = th_matrix_alloc(70, 50, ESMM_F32);
  th_fill(&a, 1, 0.5, false);
  th_fill(&b1, 2, 1, false);
  th_fill(&b2, 3, 0.5, false);
  float bias[150];
  for (int j = 0; j < 150; j++)
    bias[j] = j % 3 ? -9.0f : 0.5f; /* most of h is zero for good */
  esmm_weights *w1 = NULL, *w2 = NULL;
  esmm_pattern *pattern = NULL;
  assert_int_equal(esmm_prepare(contexts[1], &b1, NULL, &w1), ESMM_OK);
  assert_int_equal(esmm_prepare(contexts[1], &b2, NULL, &w2), ESMM_OK);
  const esmm_matmul_opts first = {
      .size = sizeof first, .bias = bias, .activation = ESMM_ACT_RELU2, .c_pattern = &pattern};
  assert_int_equal(esmm_matmul(contexts[1], &a, w1, &h, &first, NULL), ESMM_OK);
  assert_true(th_pattern(contexts[1], pattern).density < 0.5);
  esmm_matmul_opts second = {.size = sizeof second, .force = "joint", .a_pattern = pattern};
  esmm_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_matmul(contexts[1], &h, w2, &with, &second, &stats), ESMM_OK);
  assert_true(stats.joint_density < 0.5);
  second.a_pattern = NULL;
  assert_int_equal(esmm_matmul(contexts[1], &h, w2, &without, &second, NULL), ESMM_OK);
  for (int64_t i = 0; i < 70; i++)
    for (int64_t j = 0; j < 50; j++)
      if (!(fabs(th_get(&with, i, j) - th_get(&without, i, j)) <= 1e-4))
        fail_msg("C[%lld,%lld] is %g with the pattern, %g without", (long long)i, (long long)j, th_get(&with, i, j),
                 th_get(&without, i, j));
  esmm_pattern_free(pattern);
  esmm_weights_free(w1);
  esmm_weights_free(w2);
  esmm_matrix *all[] = {&a, &b1, &b2, &h, &with, &without};
  for (int i = 0; i < COUNT(all); i++)
    free(all[i]->data);
}

/* ---- the activations alone: C = act(1 * bias), by each instruction set ---- */

/* bias through every kernel: a product with k = 1 whose A is zero, so that the sum is zero. Rows: 1. False: it cannot
   run: it wants other dtypes. */
static bool through(const char *kernel, esmm_activation activation, esmm_matrix *a, const esmm_weights *w,
                    const float *x, esmm_matrix *c)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = kernel, .bias = x, .activation = activation};
  const esmm_status status = esmm_matmul(contexts[0], a, w, c, &opts, NULL);
  if (status == ESMM_ERR_UNSUPPORTED && (th_on_gpu() || strstr(kernel, "_bf16_")))
    return false;
  if (status != ESMM_OK)
    fail_msg("%s: %s", kernel, esmm_ctx_error(contexts[0]));
  return true;
}

static void activations_by(esmm_dtype dtype)
{
  enum { N = 1 << 16 };
  esmm_matrix a = th_matrix_alloc(1, 1, dtype), b = th_matrix_alloc(1, N, dtype), c = th_matrix_alloc(1, N, ESMM_F32);
  float *x = room(N, sizeof *x);
  memset(a.data, 0, esmm_dtype_size(dtype));
  memset(b.data, 0, N * esmm_dtype_size(dtype));
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(contexts[0], &b, NULL, &w), ESMM_OK);
  for (int i = 0; i < N; i++) { /* floats of every size and sign, subnormals and the largest too; then the middle */
    uint32_t bits = (uint32_t)i << 16 | ((uint32_t)i * 40503u & 0xffffu);
    memcpy(&x[i], &bits, sizeof bits);
    if (isnan(x[i]) || i % 3 == 0)
      x[i] = (float)(i - N / 2) * (30.0f / N) + (float)(i % 7) * 1e-4f;
  }
  x[5] = INFINITY;
  x[6] = -INFINITY;
  x[7] = NAN;
  x[8] = -0.0f;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(contexts[0], i, &info), ESMM_OK);
    if (!info.available || (!th_on_gpu() && strncmp(info.name, "dense", 5) != 0 && strcmp(info.name, "ref") != 0))
      continue;
    for (int f = 0; f < COUNT(ACTIVATIONS); f++) {
      const esmm_activation activation = ACTIVATIONS[f];
      if (!through(info.name, activation, &a, w, x, &c))
        break;
      const float *y = c.data;
      assert_true(y[5] == INFINITY && isnan(y[7]) && y[8] == 0);
      assert_true(y[6] == (activation == ESMM_ACT_NONE ? -INFINITY : 0));
      double worst = 0;
      for (int j = 9; j < N; j++) {
        if (isinf(x[j]))
          continue;
        const double want = activate(activation, (double)x[j]);
        if (fabs(want) > 3.4e38)
          continue;
        const double ulp = fabs(want) < 0x1p-126 ? 0x1p-149 : ldexp(1, ilogb(want) - 23);
        const double off = fabs((double)y[j] - want) / ulp;
        worst = off > worst || isnan(off) ? off : worst;
      }
      if (!(worst <= 0.51)) /* documented */
        fail_msg("%s: activation %d is off by %g ulp", info.name, (int)activation, worst);
    }
  }
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
  free(x);
}

static void activations_are_exact(void **state)
{
  (void)state;
  activations_by(ESMM_F32);
  if (th_on_gpu())
    activations_by(ESMM_BF16);
}

/* Rounded away in C's dtype is zero, in C, in the counts and in the bitmaps; -0 is zero, NaN and Inf are not. */
static void statistics_are_of_c_as_stored(void **state)
{
  (void)state;
  enum { N = 9 };
  const float bias[N] = {1e-9f, -1e-9f, 0.0f, -0.0f, NAN, INFINITY, -INFINITY, 1e30f, 3e-8f};
  static const int32_t want[3][N] = {
      {2, 2, 0, 0, 2, 2, 2, 2, 2}, /* fp32 */
      {2, 2, 0, 0, 2, 2, 2, 2, 2}, /* bf16: the same range */
      {0, 0, 0, 0, 2, 2, 2, 2, 2}, /* fp16: 2^-25 and less is zero, 1e30 is Inf; 3e-8 is just above */
  };
  esmm_matrix a = th_matrix_alloc(2, 3, ESMM_F32), b = th_matrix_alloc(3, N, ESMM_F32);
  memset(a.data, 0, 6 * sizeof(float));
  th_fill(&b, 1, 1, false);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(contexts[0], &b, NULL, &w), ESMM_OK);
  for (int dtype = 0; dtype < 3; dtype++)
    for (int order = 0; order < 2; order++) {
      esmm_matrix c = th_matrix_alloc(2, N, (esmm_dtype)dtype);
      c.order = (esmm_order)order;
      c.ld = 0;
      int32_t counts[N];
      esmm_pattern *pattern = NULL;
      const esmm_matmul_opts opts = {
          .size = sizeof opts, .bias = bias, .column_nonzeros = counts, .c_strip_rows = 2, .c_pattern = &pattern};
      assert_int_equal(esmm_matmul(contexts[0], &a, w, &c, &opts, NULL), ESMM_OK);
      uint64_t bits = 0;
      assert_int_equal(esmm_pattern_bits(contexts[0], pattern, 0, 1, &bits), ESMM_OK);
      for (int j = 0; j < N; j++) {
        assert_int_equal(counts[j], want[dtype][j]);
        assert_int_equal(bits >> j & 1, want[dtype][j] != 0);
      }
      esmm_pattern_free(pattern);
      free(c.data);
    }
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
}

static int make_all(void **state)
{
  (void)state;
  th_arena_create(&arena_a, (size_t)MOST_M * (MOST_K + 4) * 8);
  th_arena_create(&arena_c, (size_t)MOST_M * (MOST_N + 4) * 8);
  th_arena_create(&arena_r, (size_t)MOST_M * (MOST_N + 4) * 8);
  th_arena_create(&arena_counts, 65536);
  th_arena_create(&arena_bias, 65536);
  th_arena_create(&arena_gate_bias, 65536);
  contexts[0] = th_ctx(1);
  contexts[1] = th_ctx(2);
  for (int i = 0; th_on_gpu() && i < COUNT(device_arenas); i++)
    th_device_arena_create(&device_arenas[i], contexts[0], (size_t)8 << 20);
  th_on_crash(now);
  return 0;
}

static int free_all(void **state)
{
  (void)state;
  th_arena *all[] = {&arena_a, &arena_c, &arena_r, &arena_counts, &arena_bias, &arena_gate_bias};
  for (int i = 0; i < COUNT(all); i++)
    th_arena_free(all[i]);
  for (int i = 0; th_on_gpu() && i < COUNT(device_arenas); i++)
    th_device_arena_free(&device_arenas[i]);
  esmm_ctx_free(contexts[0]);
  esmm_ctx_free(contexts[1]);
  return 0;
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_mix),
      cmocka_unit_test(plain_products_are_counted),
      cmocka_unit_test(tiles_of_a_gpu_are_counted),
      cmocka_unit_test(gates_curves_and_residuals_of_tiles),
      cmocka_unit_test(gated_in_blocks_of_rows),
      cmocka_unit_test(a_pattern_saves_the_next_scan),
      cmocka_unit_test(activations_are_exact),
      cmocka_unit_test(statistics_are_of_c_as_stored),
  };
  return cmocka_run_group_tests_name("epilogue", tests, make_all, free_all);
}
