/*
 * test_generate.c: the generators give the zeros they promise, the same ones everywhere.
 *
 * Statistical bounds are 4.5 sigma of the distribution that the header describes; seeds are fixed, so a pass stays a
 * pass.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "convert.h"
#include "esmm_tools.h"
#include "internal.h"

static const esmm_dtype dtypes[] = {ESMM_F32, ESMM_BF16, ESMM_F16};
static const esmm_order orders[] = {ESMM_ROW_MAJOR, ESMM_COL_MAJOR};

static esmm_ctx *make_ctx(int threads, const esmm_allocator *allocator)
{
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {.size = sizeof opts, .threads = threads, .allocator = allocator, .no_tuning_cache = 1};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  return ctx;
}

static size_t matrix_bytes(const esmm_matrix *m)
{
  int64_t inner = m->order == ESMM_ROW_MAJOR ? m->cols : m->rows,
          outer = m->order == ESMM_ROW_MAJOR ? m->rows : m->cols;
  return outer > 0 ? (size_t)(m->ld * (outer - 1) + inner) * esmm_dtype_size(m->dtype) : 0;
}

/* Filled with 0xa5, so that an element left out, or a gap written to, shows. No byte to spare at the end. */
static esmm_matrix make_matrix(int64_t rows, int64_t cols, int64_t pad, esmm_dtype dtype, esmm_order order)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .ld = (order == ESMM_ROW_MAJOR ? cols : rows) + pad};
  m.dtype = dtype;
  m.order = order;
  size_t bytes = matrix_bytes(&m);
  m.data = malloc(bytes);
  assert_true(m.data || bytes == 0);
  memset(m.data, 0xa5, bytes);
  return m;
}

static esmm_matrix generate(esmm_ctx *ctx, const esmm_generator *g, int64_t rows, int64_t cols)
{
  esmm_matrix m = make_matrix(rows, cols, 0, ESMM_F32, ESMM_ROW_MAJOR);
  if (esmm_generate(ctx, g, &m) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(ctx));
  return m;
}

static int64_t count_nonzero(const esmm_matrix *m)
{
  int64_t count = 0;
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++)
      count += esmm_matrix_get(m, r, c) != 0;
  return count;
}

static double strip_density(esmm_ctx *ctx, const esmm_matrix *m, int64_t strip)
{
  esmm_pattern *p = NULL;
  assert_int_equal(esmm_pattern_extract(ctx, m, strip, &p), ESMM_OK);
  esmm_pattern_info info = {.size = sizeof info};
  assert_int_equal(esmm_pattern_get_info(ctx, p, &info), ESMM_OK);
  const double density = info.density;
  esmm_pattern_free(p);
  return density;
}

/* `count` successes in `trials` of probability p */
static void assert_binomial(double count, double trials, double p)
{
  double sigma = sqrt(trials * p * (1 - p));
  if (!(fabs(count - trials * p) <= 4.5 * sigma + 1e-9))
    fail_msg("%g of %g, expected %g, sigma %g", count, trials, trials * p, sigma);
}

/* One of each kind, for tests that hold for all. */
static esmm_generator example(int kind, esmm_operand operand)
{
  return (esmm_generator){.size = sizeof(esmm_generator),
                          .kind = (esmm_generator_kind)kind,
                          .operand = operand,
                          .seed = 77,
                          .density = 0.3,
                          .strip = 6,
                          .pattern = "11010010",
                          .dead = 0.25};
}

static bool has_b(int kind)
{
  return kind != ESMM_GEN_ACTIVATIONS;
}

/* ---- each kind ---- */

static void dense_has_no_zeros_and_is_uniform(void **unused)
{
  (void)unused;
  esmm_ctx *ctx = make_ctx(2, NULL);
  const esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_DENSE, .seed = 3, .density = NAN}; /* not read here */
  esmm_matrix m = generate(ctx, &g, 1000, 1000);
  const float *x = m.data;
  double sum = 0, squares = 0, neighbours = 0, n = 1e6;
  int64_t quarters[4] = {0};
  for (int64_t i = 0; i < 1000000; i++) {
    assert_true(x[i] != 0 && x[i] >= -1 && x[i] <= 1);
    sum += x[i];
    squares += (double)x[i] * x[i];
    neighbours += i > 0 ? (double)x[i] * x[i - 1] : 0;
    quarters[(int)fmin(3, (x[i] + 1) * 2)]++;
  }
  assert_true(fabs(sum) < 4.5 * sqrt(n / 3));
  assert_true(fabs(squares - n / 3) < 4.5 * sqrt(n * 4 / 45));
  assert_true(fabs(neighbours) < 4.5 * sqrt(n / 9));
  for (int i = 0; i < 4; i++)
    assert_binomial((double)quarters[i], n, 0.25);
  free(m.data);
  esmm_ctx_free(ctx);
}

static void random_has_the_density_asked_for(void **unused)
{
  (void)unused;
  enum { M = 700, K = 900 };
  static const double densities[] = {0, 1e-4, 0.05, 0.1, 0.5, 0.9, 1};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t i = 0; i < sizeof densities / sizeof densities[0]; i++)
    for (int operand = 0; operand < 2; operand++) {
      const double d = densities[i];
      const esmm_generator g = {
          .size = sizeof g, .kind = ESMM_GEN_RANDOM, .operand = (esmm_operand)operand, .seed = i, .density = d};
      esmm_matrix m = generate(ctx, &g, M, K);
      assert_binomial((double)count_nonzero(&m), (double)M * K, d);
      /* Unstructured: counts of rows and of columns vary as independent draws do (chi-squared over all of them). */
      if (d > 0.01 && d < 1) {
        double rows = 0, cols = 0;
        for (int64_t r = 0; r < M; r++) {
          esmm_matrix row = {.data = (float *)m.data + r * K, .rows = 1, .cols = K, .ld = K};
          rows += pow((double)count_nonzero(&row) - K * d, 2) / (K * d * (1 - d));
        }
        for (int64_t c = 0; c < K; c++) {
          esmm_matrix column = {.data = (float *)m.data + c, .rows = M, .cols = 1, .ld = K};
          cols += pow((double)count_nonzero(&column) - M * d, 2) / (M * d * (1 - d));
        }
        assert_true(fabs(rows - M) < 5 * sqrt(2.0 * M));
        assert_true(fabs(cols - K) < 5 * sqrt(2.0 * K));
      }
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

static void blockwise_strips_are_all_or_nothing(void **unused)
{
  (void)unused;
  enum { OUTER = 1003, K = 517 };
  static const int64_t strips[] = {0, 1, 6, 32, 100, 5000};
  static const double densities[] = {0, 0.125, 0.5, 1};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t s = 0; s < sizeof strips / sizeof strips[0]; s++)
    for (size_t i = 0; i < sizeof densities / sizeof densities[0]; i++)
      for (int operand = 0; operand < 2; operand++) {
        const esmm_generator g = {.size = sizeof g,
                                  .kind = ESMM_GEN_BLOCKWISE,
                                  .operand = (esmm_operand)operand,
                                  .seed = s,
                                  .density = densities[i],
                                  .strip = strips[s]};
        esmm_matrix m = operand ? generate(ctx, &g, K, OUTER) : generate(ctx, &g, OUTER, K);
        int64_t strip = strips[s] ? strips[s] : 32, alive = 0, all = 0;
        for (int64_t first = 0; first < OUTER; first += strip)
          for (int64_t k = 0; k < K; k++, all++) {
            int64_t count = 0, height = strip < OUTER - first ? strip : OUTER - first;
            for (int64_t o = first; o < first + height; o++)
              count += (operand ? esmm_matrix_get(&m, k, o) : esmm_matrix_get(&m, o, k)) != 0;
            assert_true(count == 0 || count == height);
            alive += count != 0;
          }
        assert_binomial((double)alive, (double)all, densities[i]);
        free(m.data);
      }
  esmm_ctx_free(ctx);
}

static void pattern_repeats_along_k(void **unused)
{
  (void)unused;
  static const char *const patterns[] = {"11110000", "00000000", "11111111", "10000001"};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (int i = 0; i < 4; i++)
    for (int operand = 0; operand < 2; operand++) {
      const esmm_generator g = {
          .size = sizeof g, .kind = ESMM_GEN_PATTERN, .operand = (esmm_operand)operand, .pattern = patterns[i]};
      esmm_matrix m = generate(ctx, &g, 101, 203);
      for (int64_t r = 0; r < 101; r++)
        for (int64_t c = 0; c < 203; c++)
          assert_int_equal(esmm_matrix_get(&m, r, c) != 0, patterns[i][(operand ? r : c) % 8] == '1');
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

static void integers_keep_the_zeros_and_nothing_else(void **unused)
{
  (void)unused;
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (int kind = 0; kind < 5; kind++) {
    esmm_generator g = example(kind, ESMM_OPERAND_A);
    esmm_matrix real = generate(ctx, &g, 300, 200);
    g.integers = 1;
    esmm_matrix whole = generate(ctx, &g, 300, 200);
    int64_t seen[9] = {0};
    for (int64_t i = 0; i < 300 * 200; i++) {
      float x = ((float *)whole.data)[i];
      assert_int_equal(x != 0, ((float *)real.data)[i] != 0);
      assert_true(fabsf(x) <= 4 && x == (float)(int)x);
      seen[(int)x + 4]++;
    }
    for (int v = kind == ESMM_GEN_ACTIVATIONS ? 1 : -4; v <= 4; v++)
      assert_true(v == 0 || seen[v + 4] > 100);
    free(real.data);
    free(whole.data);
  }
  esmm_ctx_free(ctx);
}

/* ---- the same matrix everywhere ---- */

static void layout_dtype_and_threads_do_not_matter(void **unused)
{
  (void)unused;
  static const int64_t shapes[][2] = {{0, 0}, {0, 7}, {7, 0}, {1, 1}, {1, 200}, {200, 1}, {63, 65}, {130, 191}};
  esmm_ctx *one = make_ctx(1, NULL), *two = make_ctx(2, NULL);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int kind = 0; kind < 5; kind++)
      for (int operand = 0; operand <= has_b(kind); operand++) {
        const esmm_generator g = example(kind, (esmm_operand)operand);
        const int64_t rows = shapes[s][0], cols = shapes[s][1];
        esmm_matrix reference = generate(one, &g, rows, cols);
        for (int variant = 0; variant < 12; variant++) {
          const esmm_dtype dtype = dtypes[variant % 3];
          esmm_matrix m = make_matrix(rows, cols, variant / 3 % 2 * 5, dtype, orders[variant / 6]);
          assert_int_equal(esmm_generate(two, &g, &m), ESMM_OK);
          for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
              float expected = esmm_matrix_get(&reference, r, c), rounded;
              uint32_t room;
              esmm_store_element(&room, dtype, 0, expected);
              rounded = esmm_load_element(&room, dtype, 0);
              assert_true(esmm_matrix_get(&m, r, c) == rounded);
              assert_int_equal(rounded != 0, expected != 0);
            }
          /* gaps between rows keep their 0xa5 */
          int64_t inner = m.order == ESMM_ROW_MAJOR ? cols : rows, outer = m.order == ESMM_ROW_MAJOR ? rows : cols;
          size_t element = esmm_dtype_size(dtype);
          for (int64_t o = 0; inner > 0 && o + 1 < outer; o++)
            for (size_t i = (size_t)(o * m.ld + inner) * element; i < (size_t)((o + 1) * m.ld) * element; i++)
              assert_int_equal(((unsigned char *)m.data)[i], 0xa5);
          free(m.data);
        }
        free(reference.data);
      }
  esmm_ctx_free(one);
  esmm_ctx_free(two);
}

static void seeds_and_operands_give_other_matrices(void **unused)
{
  (void)unused;
  enum { N = 128 };
  esmm_ctx *ctx = make_ctx(1, NULL);
  for (int kind = 0; kind < 5; kind++) {
    esmm_generator g = example(kind, ESMM_OPERAND_A);
    esmm_matrix first = generate(ctx, &g, N, N), again = generate(ctx, &g, N, N);
    assert_memory_equal(first.data, again.data, N * N * sizeof(float));
    g.seed++;
    esmm_matrix other = generate(ctx, &g, N, N);
    assert_memory_not_equal(first.data, other.data, N * N * sizeof(float));
    free(again.data);
    free(other.data);
    if (has_b(kind)) {
      g.seed--;
      g.operand = ESMM_OPERAND_B;
      esmm_matrix b = generate(ctx, &g, N, N);
      int64_t same = 0;
      for (int64_t r = 0; r < N; r++)
        for (int64_t c = 0; c < N; c++)
          same += esmm_matrix_get(&first, r, c) != 0 && esmm_matrix_get(&first, r, c) == esmm_matrix_get(&b, c, r);
      assert_true(same < 10);
      free(b.data);
    }
    free(first.data);
  }
  esmm_ctx_free(ctx);
}

static uint64_t hash_bits(const esmm_matrix *m)
{
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    hash = (hash ^ ((uint32_t *)m->data)[i]) * 0x100000001b3u;
  return hash;
}

/* What was once drawn from a seed is drawn for ever, on every machine and by every compiler: results quote seeds. */
static void known_seeds_give_known_bits(void **unused)
{
  (void)unused;
  static const uint64_t known[5][2] = {{0xbde615e34ae5d6f3u, 0xd0f99419a70f94d5u},
                                       {0x7709b99dc786032bu, 0x667c27f069b823fbu},
                                       {0x208e7e1470bce5e7u, 0x2c3488c51e3bb2f7u},
                                       {0x35fab78fdcae444du, 0xfc84883a39831eb5u},
                                       {0xdbf201b16bdc0b0cu, 0}};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (int kind = 0; kind < 5; kind++)
    for (int operand = 0; operand <= has_b(kind); operand++) {
      const esmm_generator g = example(kind, (esmm_operand)operand);
      esmm_matrix m = generate(ctx, &g, 300, 257);
      if (hash_bits(&m) != known[kind][operand])
        fail_msg("kind %d operand %d: 0x%016llxu", kind, operand, (unsigned long long)hash_bits(&m));
      free(m.data);
    }
  const esmm_generator early = {.size = sizeof early,
                                .kind = ESMM_GEN_ACTIVATIONS,
                                .seed = 77,
                                .density = 0.005,
                                .dead = 0.9,
                                .activation = ESMM_ACT_RELU};
  esmm_matrix m = generate(ctx, &early, 2048, 1024);
  if (hash_bits(&m) != 0x51683f2f4ce25930u)
    fail_msg("early activations: 0x%016llxu", (unsigned long long)hash_bits(&m));
  free(m.data);
  esmm_ctx_free(ctx);
}

/* ---- activations ---- */

typedef struct layer {
  const char *name;
  double density, dead;
  double strip[4]; /* at 8, 16, 32, 128 rows */
} layer;

/* Measured on a trained net; independent zeros would be far denser (layer 4 at 8 rows: 0.75). */
static const layer layers[] = {
    {"layer 0", 0.43, 0, {0.80, 0.86, 0.91, 0.95}},       {"layer 1", 0.005, 0.90, {0.009, 0.012, 0.015, 0.023}},
    {"layer 2", 0.026, 0.69, {0.057, 0.077, 0.10, 0.15}}, {"layer 3", 0.11, 0.15, {0.29, 0.40, 0.52, 0.68}},
    {"layer 4", 0.16, 0, {0.47, 0.65, 0.82, 0.98}},       {"layers 5 and 6", 0.19, 0, {0.56, 0.74, 0.89, 0.99}},
    {"layer 7", 0.26, 0, {0.70, 0.86, 0.95, 1.0}},
};

static void activations_have_the_measured_strip_densities(void **unused)
{
  (void)unused;
  static const int64_t widths[] = {3072, 1024}, heights[] = {8, 16, 32, 128};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++)
    for (int w = 0; w < 2; w++) {
      const esmm_generator g = {.size = sizeof g,
                                .kind = ESMM_GEN_ACTIVATIONS,
                                .seed = 1,
                                .density = layers[l].density,
                                .dead = layers[l].dead};
      esmm_matrix m = generate(ctx, &g, 2048, widths[w]);
      double density = strip_density(ctx, &m, 1);
      if (!(fabs(density / g.density - 1) <= 0.05))
        fail_msg("%s: element density %g, asked for %g", layers[l].name, density, g.density);
      for (int h = 0; h < 4; h++) {
        double got = strip_density(ctx, &m, heights[h]), want = layers[l].strip[h];
        if (!(fabs(got - want) <= fmin(0.05, 0.2 * want))) /* 0.05 alone would say nothing about layer 1 */
          fail_msg("%s: strip density at %d rows is %g, measured %g", layers[l].name, (int)heights[h], got, want);
      }
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

static int compare(const void *a, const void *b)
{
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void activations_look_like_a_trained_net(void **unused)
{
  (void)unused;
  enum { M = 2048, K = 1000, DEAD = 150 };
  esmm_ctx *ctx = make_ctx(2, NULL);
  esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_ACTIVATIONS, .seed = 4, .density = 0.11, .dead = 0.15};
  esmm_matrix m = generate(ctx, &g, M, K);
  const float *x = m.data;
  double activity[K] = {0}, token[M] = {0};
  int64_t active = 0, followed = 0;
  for (int64_t t = 0; t < M; t++)
    for (int64_t f = 0; f < K; f++)
      if (x[t * K + f] != 0) {
        assert_true(x[t * K + f] > 0 && isfinite(x[t * K + f]));
        activity[f] += 1.0 / M;
        token[t] += 1.0 / K;
        active += t + 1 < M;
        followed += t + 1 < M && x[(t + 1) * K + f] != 0;
      }
  /* dead features: as many as asked for, not all in one place */
  int64_t dead = 0, dead_in_first_half = 0;
  for (int f = 0; f < K; f++) {
    dead += activity[f] == 0;
    dead_in_first_half += f < K / 2 && activity[f] == 0;
  }
  assert_true(dead >= DEAD && dead <= DEAD + 30); /* a seldom active one may be silent by chance */
  assert_true(dead_in_first_half > 45 && dead_in_first_half < 115);
  /* features of very different activity */
  qsort(activity, K, sizeof activity[0], compare);
  double low = activity[dead + (K - dead) / 10], high = activity[K - 1 - (K - dead) / 10];
  assert_true(high > 10 * low);
  /* neighbouring rows resemble each other beyond what their features' activities explain */
  double by_activity = 0;
  for (int f = 0; f < K; f++)
    by_activity += activity[f] * activity[f];
  by_activity /= 0.11 * K;
  assert_true((double)followed / (double)active > by_activity + 0.15);
  /* some tokens excite more features than others: more than independent features would (sigma below 0.01) */
  double mean = 0, variance = 0;
  for (int t = 0; t < M; t++)
    mean += token[t] / M;
  for (int t = 0; t < M; t++)
    variance += (token[t] - mean) * (token[t] - mean) / M;
  assert_true(sqrt(variance) > 0.02 && sqrt(variance) < 0.05);
  free(m.data);
  esmm_ctx_free(ctx);
}

static void squared_activations_are_squares(void **unused)
{
  (void)unused;
  enum { N = 500 };
  esmm_ctx *ctx = make_ctx(2, NULL);
  esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_ACTIVATIONS, .density = 0.2, .activation = ESMM_ACT_RELU};
  esmm_matrix relu = generate(ctx, &g, N, N);
  g.activation = ESMM_ACT_RELU2;
  esmm_matrix relu2 = generate(ctx, &g, N, N);
  g.activation = ESMM_ACT_NONE; /* the default is ReLU2 */
  esmm_matrix other = generate(ctx, &g, N, N);
  assert_memory_equal(relu2.data, other.data, N * N * sizeof(float));
  for (int64_t i = 0; i < N * N; i++) {
    float x = ((float *)relu.data)[i], y = ((float *)relu2.data)[i];
    assert_true(x == 0 ? y == 0 : y == fmaxf(x * x, 0x1p-24f));
  }
  free(relu.data);
  free(relu2.data);
  free(other.data);
  esmm_ctx_free(ctx);
}

static void extreme_densities_of_activations(void **unused)
{
  (void)unused;
  static const double cases[][2] = {{0, 0}, {0, 1}, {1, 0}, {0.1, 0.9}, {0.5, 0.5}, {0.001, 0}, {0.98, 0}, {1e-12, 0}};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const double d = cases[i][0];
    const esmm_generator g = {
        .size = sizeof g, .kind = ESMM_GEN_ACTIVATIONS, .density = d, .dead = cases[i][1], .seed = i};
    esmm_matrix m = generate(ctx, &g, 512, 1000);
    double got = (double)count_nonzero(&m) / (512 * 1000);
    if (!(fabs(got - d) <= (d + cases[i][1] == 1 || d == 0 ? 0 : 0.12 * d + 1e-5)))
      fail_msg("density %g, dead %g: got %g", d, cases[i][1], got);
    free(m.data);
  }
  /* Few features: at least one is alive, and the mean over seeds is still what was asked for. */
  double sum = 0;
  for (uint64_t seed = 0; seed < 400; seed++) {
    const esmm_generator g = {
        .size = sizeof g, .kind = ESMM_GEN_ACTIVATIONS, .density = 0.1, .dead = 0.9, .seed = seed};
    esmm_matrix m = generate(ctx, &g, 50, 3);
    sum += (double)count_nonzero(&m) / 150 / 400;
    free(m.data);
  }
  assert_true(fabs(sum - 0.1) < 0.02);
  esmm_ctx_free(ctx);
}

static void presets_set_density_and_dead(void **unused)
{
  (void)unused;
  static const struct {
    const char *name;
    double density, dead;
  } presets[] = {{"early", 0.005, 0.90}, {"middle", 0.11, 0.15}, {"late", 0.16, 0}};
  esmm_ctx *ctx = make_ctx(1, NULL);
  for (int i = 0; i < 3; i++) {
    esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_ACTIVATIONS, .seed = 9, .density = -1, .dead = -1};
    assert_int_equal(esmm_generator_preset(ctx, presets[i].name, &g), ESMM_OK);
    assert_true(g.density == presets[i].density && g.dead == presets[i].dead);
    assert_true(g.kind == ESMM_GEN_ACTIVATIONS && g.seed == 9 && g.size == sizeof g);
  }
  esmm_generator g = {.size = sizeof g, .density = 0.5};
  assert_int_equal(esmm_generator_preset(ctx, "latest", &g), ESMM_ERR_ARGUMENT);
  assert_non_null(strstr(esmm_ctx_error(ctx), "latest"));
  assert_true(g.density == 0.5);
  assert_int_equal(esmm_generator_preset(ctx, NULL, &g), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_generator_preset(ctx, "late", NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_generator_preset(NULL, "late", &g), ESMM_ERR_ARGUMENT);
  g.size = 4;
  assert_int_equal(esmm_generator_preset(ctx, "late", &g), ESMM_ERR_ARGUMENT);
  esmm_ctx_free(ctx);
}

/* ---- errors ---- */

static void refuse(esmm_ctx *ctx, const esmm_generator *g, const char *names)
{
  esmm_matrix m = make_matrix(4, 4, 0, ESMM_F32, ESMM_ROW_MAJOR);
  assert_int_equal(esmm_generate(ctx, g, &m), ESMM_ERR_ARGUMENT);
  if (!strstr(esmm_ctx_error(ctx), names))
    fail_msg("error text \"%s\" does not have \"%s\"", esmm_ctx_error(ctx), names);
  for (size_t i = 0; i < matrix_bytes(&m); i++)
    assert_int_equal(((unsigned char *)m.data)[i], 0xa5);
  free(m.data);
}

static void bad_generators_are_named(void **unused)
{
  (void)unused;
  esmm_ctx *ctx = make_ctx(1, NULL);
  static const int with_density[] = {ESMM_GEN_RANDOM, ESMM_GEN_BLOCKWISE, ESMM_GEN_ACTIVATIONS};
  for (int i = 0; i < 3; i++) {
    esmm_generator g = example(with_density[i], ESMM_OPERAND_A);
    g.density = -0.25;
    refuse(ctx, &g, "density is -0.25");
    g.density = 1.5;
    refuse(ctx, &g, "density is 1.5");
    g.density = NAN;
    refuse(ctx, &g, "density is ");
    g.density = INFINITY;
    refuse(ctx, &g, "density is inf");
  }
  esmm_generator g = example(ESMM_GEN_ACTIVATIONS, ESMM_OPERAND_A);
  g.dead = -1;
  refuse(ctx, &g, "dead is -1");
  g.dead = NAN;
  refuse(ctx, &g, "dead is ");
  g.dead = 0.75; /* leaves 0.25 for a density of 0.3 */
  refuse(ctx, &g, "density is 0.3, more than a dead share of 0.75");
  g = example(ESMM_GEN_ACTIVATIONS, ESMM_OPERAND_B);
  refuse(ctx, &g, "operand A only");
  g = example(ESMM_GEN_ACTIVATIONS, ESMM_OPERAND_A);
  g.activation = (esmm_activation)7;
  refuse(ctx, &g, "activation is 7");

  static const char *const patterns[] = {"", "1111000", "111100001", "1111000x", "1111 000"};
  g = example(ESMM_GEN_PATTERN, ESMM_OPERAND_A);
  for (int i = 0; i < 5; i++) {
    char names[32] = "pattern is \"";
    g.pattern = patterns[i];
    refuse(ctx, &g, strcat(strcat(names, patterns[i]), "\""));
  }
  g.pattern = NULL;
  refuse(ctx, &g, "pattern is NULL");

  g = example(ESMM_GEN_BLOCKWISE, ESMM_OPERAND_A);
  g.strip = -2;
  refuse(ctx, &g, "strip is -2");
  g = example(9, ESMM_OPERAND_A);
  refuse(ctx, &g, "kind is 9");
  g = example(ESMM_GEN_DENSE, (esmm_operand)5);
  refuse(ctx, &g, "operand is 5");
  g = example(ESMM_GEN_DENSE, ESMM_OPERAND_A);
  g.size = 0;
  refuse(ctx, &g, "size is 0");
  g.size = sizeof g + 8;
  refuse(ctx, &g, "size is");
  refuse(ctx, NULL, "generator is NULL");

  /* an older caller's shorter struct: what it does not have is the default */
  g = example(ESMM_GEN_RANDOM, ESMM_OPERAND_A);
  esmm_matrix m = make_matrix(4, 4, 0, ESMM_F32, ESMM_ROW_MAJOR);
  g.size = offsetof(esmm_generator, strip);
  assert_int_equal(esmm_generate(ctx, &g, &m), ESMM_OK);
  assert_int_equal(esmm_generate(NULL, &g, &m), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_generate(ctx, &g, NULL), ESMM_ERR_ARGUMENT);
  m.ld = 3;
  assert_int_equal(esmm_generate(ctx, &g, &m), ESMM_ERR_LD);
  free(m.data);
  esmm_ctx_free(ctx);
}

static void *no_memory(void *user, size_t bytes, size_t align)
{
  return *(int *)user ? NULL : aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void plain_free(void *user, void *ptr, size_t bytes)
{
  (void)user;
  (void)bytes;
  free(ptr);
}

static void a_failed_allocation_leaves_the_matrix_alone(void **unused)
{
  (void)unused;
  int failing = 0;
  const esmm_allocator allocator = {no_memory, plain_free, &failing};
  esmm_ctx *ctx = make_ctx(1, &allocator);
  const esmm_generator g = example(ESMM_GEN_ACTIVATIONS, ESMM_OPERAND_A);
  esmm_matrix m = make_matrix(4, 4, 0, ESMM_F32, ESMM_ROW_MAJOR);
  failing = 1;
  assert_int_equal(esmm_generate(ctx, &g, &m), ESMM_ERR_MEMORY);
  for (size_t i = 0; i < matrix_bytes(&m); i++)
    assert_int_equal(((unsigned char *)m.data)[i], 0xa5);
  failing = 0;
  assert_int_equal(esmm_generate(ctx, &g, &m), ESMM_OK);
  free(m.data);
  esmm_ctx_free(ctx);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(dense_has_no_zeros_and_is_uniform),
      cmocka_unit_test(random_has_the_density_asked_for),
      cmocka_unit_test(blockwise_strips_are_all_or_nothing),
      cmocka_unit_test(pattern_repeats_along_k),
      cmocka_unit_test(integers_keep_the_zeros_and_nothing_else),
      cmocka_unit_test(layout_dtype_and_threads_do_not_matter),
      cmocka_unit_test(seeds_and_operands_give_other_matrices),
      cmocka_unit_test(known_seeds_give_known_bits),
      cmocka_unit_test(activations_have_the_measured_strip_densities),
      cmocka_unit_test(activations_look_like_a_trained_net),
      cmocka_unit_test(squared_activations_are_squares),
      cmocka_unit_test(extreme_densities_of_activations),
      cmocka_unit_test(presets_set_density_and_dead),
      cmocka_unit_test(bad_generators_are_named),
      cmocka_unit_test(a_failed_allocation_leaves_the_matrix_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
