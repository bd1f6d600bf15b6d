/*
 * test_cuda_packed.c: a product whose C is packed on the GPU (c_packed), and the one that takes it as its A. What it
 * packs, on its way or by a launch behind it, is the same; joint then gives what it gives by a scan. Sums of small
 * integers are exact, whatever the order; of others the two ways to pack give the same bits.
 */
#include "gpu16.h"

#include <math.h>

static const char *joint_of(esmm_dtype dtype)
{
  return dtype == ESMM_F16 ? "joint_f16_sm90a" : "joint_bf16_sm90a";
}

static const char *dense_of(esmm_dtype dtype)
{
  return dtype == ESMM_F16 ? "dense_f16_sm90a" : "dense_bf16_sm90a";
}

/* The pattern of a matrix as it lies, with its values where packed is 2: of a product that adds nothing to it. */
static esmm_pattern *pattern_of(const esmm_matrix *at, int64_t strip_rows, int packed)
{
  esmm_matrix x = host_matrix(at->rows, 1, at->dtype), v = host_matrix(1, at->cols, at->dtype), c = *at;
  esmm_weights *w = NULL;
  esmm_pattern *pattern = NULL;
  const float none = 0.0f, once = 1.0f;
  esmm_matrix dx = to_device(&x);
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = &none,
                                 .beta = &once,
                                 .c_strip_rows = strip_rows,
                                 .c_pattern = &pattern,
                                 .c_packed = packed};
  expect_ok(gpu, esmm_prepare(gpu, &v, NULL, &w));
  expect_ok(gpu, esmm_matmul(gpu, &dx, w, &c, &opts, NULL));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  esmm_weights_free(w);
  esmm_memory_free(gpu, dx.data);
  free(x.data);
  free(v.data);
  return pattern;
}

/* How alive k's lie in strips of 128 rows. */
typedef enum zeros { SOME, FEW, RUNS, NONE, ALL } zeros;

static bool is_alive(zeros kind, int64_t row, int64_t k)
{
  const uint64_t x = (uint64_t)(row / 128 * 7919 + k) * 0x9e3779b97f4a7c15u >> 40;
  switch (kind) {
  case SOME:
    return x % 2 == 0;
  case FEW:
    return x % 11 == 0;
  case RUNS: /* segments that are full, some that are empty, some with a single k */
    return k / 256 % 3 == 0 || (k / 256 % 3 == 1 && k % 256 == 255);
  case NONE:
    return true;
  case ALL:
    break;
  }
  return false;
}

/* C = A w by joint, to `out`. pattern NULL: a scan. */
static void multiply(const esmm_matrix *a, const esmm_weights *w, const esmm_pattern *pattern, bool packed,
                     esmm_matrix *c, uint16_t *out)
{
  const size_t bytes = (size_t)(c->rows * c->cols) * 2;
  esmm_stats stats = {.size = sizeof stats};
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = joint_of(a->dtype), .a_pattern = pattern};
  esmm_matrix host = {.data = out, .rows = c->rows, .cols = c->cols, .ld = c->ld, .dtype = c->dtype};
  memset(out, 0xff, bytes);
  expect_ok(gpu, esmm_matrix_copy(gpu, &host, c));
  expect_ok(gpu, esmm_matmul(gpu, a, w, c, &opts, &stats));
  expect_ok(gpu, esmm_matrix_copy(gpu, c, &host));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  if ((strstr(stats.reason, "A comes packed") != NULL) != packed)
    fail_msg("%s: %s", packed ? "a packed A" : "an A that is not packed", stats.reason);
}

/* The places where two results differ, NaN being NaN. */
static void expect_same(const uint16_t *got, const uint16_t *want, int64_t rows, int64_t cols, const char *what)
{
  for (int64_t i = 0; i < rows * cols; i++)
    if (got[i] != want[i] && !((got[i] & 0x7fff) > 0x7c00 && (want[i] & 0x7fff) > 0x7c00))
      fail_msg("%s: C[%d,%d] is 0x%04x, not 0x%04x", what, (int)(i / cols), (int)(i % cols), got[i], want[i]);
}

static esmm_weights *weights_of(int64_t k, int64_t n, esmm_dtype dtype, th_rng *rng)
{
  esmm_matrix b = host_matrix(k, n, dtype);
  esmm_weights *w = NULL;
  for (int64_t i = 0; i < k; i++)
    for (int64_t j = 0; j < n; j++)
      th_set(&b, i, j, (double)th_below(rng, 3) - 1);
  expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
  free(b.data);
  return w;
}

/* Packed by a launch of its own: any shape. */
static void joint_reads_what_a_launch_packs(void **state)
{
  (void)state;
  static const int64_t shapes[][3] = {{128, 256, 256},    {300, 264, 1000}, {1030, 300, 72},   {100, 40, 2055},
                                      {7, 256, 640},      {129, 800, 4096}, {513, 2048, 3000}, {150, 520, 17000},
                                      {4096, 1024, 2048}, {140, 264, 40000}};
  for (int s = 0; s < COUNT(shapes); s++)
    for (int kind = SOME; kind <= ALL; kind++) {
      const esmm_dtype dtype = DTYPES[(s + kind) % 2];
      const int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
      th_rng rng = {(uint64_t)(m * 31 + n * 7 + k + kind)};
      esmm_matrix a = host_matrix(m, k, dtype);
      const esmm_matrix shape = {.rows = m, .cols = n, .ld = n, .dtype = dtype};
      for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++)
          th_set(&a, i, l, is_alive((zeros)kind, i, l) ? (double)th_below(&rng, 3) - 1 : l % 5 == 0 ? -0.0 : 0.0);
      esmm_matrix da = to_device(&a), dc = to_device(&shape);
      esmm_weights *w = weights_of(k, n, dtype, &rng);
      uint16_t *want = malloc((size_t)(m * n) * 2), *got = malloc((size_t)(m * n) * 2);
      assert_true(want && got);
      char what[80];
      (void)snprintf(what, sizeof what, "%d x %d x %d, zeros %d", (int)m, (int)k, (int)n, kind);
      multiply(&da, w, NULL, false, &dc, want);
      esmm_pattern *packed = pattern_of(&da, 128, 2), *bits = pattern_of(&da, 128, 1), *low = pattern_of(&da, 64, 2);
      multiply(&da, w, packed, true, &dc, got);
      expect_same(got, want, m, n, what);
      multiply(&da, w, bits, false, &dc, got); /* nobody made it on the way */
      multiply(&da, w, low, false, &dc, got);  /* nor in strips of another height */
      esmm_pattern_free(packed);
      esmm_pattern_free(bits);
      esmm_pattern_free(low);
      esmm_weights_free(w);
      esmm_memory_free(gpu, da.data);
      esmm_memory_free(gpu, dc.data);
      free(a.data);
      free(want);
      free(got);
    }
}

/* What h = activation(alpha (x w1) + b1) is made of: which features are alive in which strips x[.,0] and w1[0,.] say.
 */
typedef enum values { INTEGERS, REALS, ODD } values; /* ODD: some Inf, so that there are NaN, and -0 */

typedef struct layer {
  int64_t m, k, h, n;
  esmm_dtype dtype;
  esmm_matrix x, h_at, y;
  esmm_weights *w1, *w2;
  esmm_matrix bias;
} layer;

static layer make_layer(int64_t m, int64_t k, int64_t h, int64_t n, esmm_dtype dtype, zeros kind, values of,
                        bool activates)
{
  layer l = {.m = m, .k = k, .h = h, .n = n, .dtype = dtype};
  th_rng rng = {(uint64_t)(m + 7 * h + kind)};
  esmm_matrix x = host_matrix(m, k, dtype), w1 = host_matrix(k, h, dtype), bias = host_matrix(1, h, ESMM_F32);
  const esmm_matrix h_shape = {.rows = m, .cols = h, .ld = h, .dtype = dtype},
                    y_shape = {.rows = m, .cols = n, .ld = n, .dtype = dtype};
  /* A strip has a one in one of the first 8 columns of x; w1 says there whether it is alive: 0, or far below it. Where
     nothing is cut off at 0 a dead feature is dead in all strips. */
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < k; j++)
      th_set(&x, i, j,
             j < 8         ? (i / 128 % 8 == j ? 1.0 : 0.0)
             : of == REALS ? (double)th_below(&rng, 1000) / 500 - 1
                           : (double)th_below(&rng, 3) - 1);
  if (of == ODD)
    for (int64_t i = 0; i < m; i += 97)
      th_set(&x, i, 8 + i % (k - 8), (double)INFINITY);
  for (int64_t j = 0; j < k; j++)
    for (int64_t f = 0; f < h; f++)
      th_set(&w1, j, f,
             !activates && (j < 8 || !is_alive(kind, 0, f)) ? 0.0
             : j < 8                                        ? (is_alive(kind, j * 128, f) ? 0.0 : -120.0)
             : of == REALS                                  ? (double)th_below(&rng, 1000) / 5000 - .1
                           : (double)th_below(&rng, 8) / 7 - (double)(th_below(&rng, 8) / 7));
  for (int64_t f = 0; f < h; f++)
    th_set(&bias, 0, f, (double)(f % 3) - 1);
  l.x = to_device(&x);
  l.h_at = to_device(&h_shape);
  l.y = to_device(&y_shape);
  l.bias = to_device(&bias);
  expect_ok(gpu, esmm_prepare(gpu, &w1, NULL, &l.w1));
  l.w2 = weights_of(h, n, dtype, &rng);
  free(x.data);
  free(w1.data);
  free(bias.data);
  return l;
}

static void end_layer(layer *l)
{
  esmm_weights_free(l->w1);
  esmm_weights_free(l->w2);
  esmm_memory_free(gpu, l->x.data);
  esmm_memory_free(gpu, l->h_at.data);
  esmm_memory_free(gpu, l->y.data);
  esmm_memory_free(gpu, l->bias.data);
}

/* h with its pattern, and h on the host. */
static esmm_pattern *make_h(layer *l, esmm_activation activation, int packed, uint16_t *out)
{
  esmm_pattern *pattern = NULL;
  const float minus = -1.0f, one = 1.0f;
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = activation == ESMM_ACT_NONE ? &minus : &one, /* of 0: -0 */
                                 .bias = activation == ESMM_ACT_NONE ? NULL : l->bias.data,
                                 .activation = activation,
                                 .force = dense_of(l->dtype),
                                 .c_strip_rows = 128,
                                 .c_pattern = &pattern,
                                 .c_packed = packed};
  esmm_matrix host = {.data = out, .rows = l->m, .cols = l->h, .ld = l->h, .dtype = l->dtype};
  memset(out, 0xff, (size_t)(l->m * l->h) * 2);
  expect_ok(gpu, esmm_matrix_copy(gpu, &host, &l->h_at));
  expect_ok(gpu, esmm_matmul(gpu, &l->x, l->w1, &l->h_at, &opts, NULL));
  expect_ok(gpu, esmm_matrix_copy(gpu, &l->h_at, &host));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  return pattern;
}

static void expect_same_bits(const esmm_pattern *x, const esmm_pattern *y)
{
  esmm_pattern_info info = {.size = sizeof info};
  expect_ok(gpu, esmm_pattern_get_info(gpu, x, &info));
  const size_t bytes = (size_t)(info.strips * info.words) * sizeof(uint64_t);
  uint64_t *of_x = malloc(bytes), *of_y = malloc(bytes);
  assert_true(of_x && of_y);
  expect_ok(gpu, esmm_pattern_bits(gpu, x, 0, info.strips, of_x));
  expect_ok(gpu, esmm_pattern_bits(gpu, y, 0, info.strips, of_y));
  assert_memory_equal(of_x, of_y, bytes);
  free(of_x);
  free(of_y);
}

/* Packed by the product that makes it. Few k's, so that no tile is split; as many tiles as take 256 columns each. */
static void dense_packs_on_the_way(void **state)
{
  (void)state;
  static const struct {
    int64_t m, k, h, n;
    esmm_activation activation;
    values of;
  } table[] = {{1100, 192, 4096, 300, ESMM_ACT_RELU, INTEGERS},
               {4096, 128, 1280, 264, ESMM_ACT_RELU2, REALS},
               {2000, 200, 3072, 512, ESMM_ACT_RELU, ODD},
               {1152, 320, 4096, 128, ESMM_ACT_NONE, INTEGERS},
               {300, 136, 16640, 256, ESMM_ACT_RELU, INTEGERS}};
  for (int s = 0; s < COUNT(table); s++)
    for (int kind = SOME; kind <= ALL; kind++) {
      const esmm_dtype dtype = DTYPES[(s + kind) % 2];
      layer l = make_layer(table[s].m, table[s].k, table[s].h, table[s].n, dtype, (zeros)kind, table[s].of,
                           table[s].activation != ESMM_ACT_NONE);
      const size_t h_bytes = (size_t)(l.m * l.h) * 2, y_bytes = (size_t)(l.m * l.n) * 2;
      uint16_t *h = malloc(h_bytes), *h_want = malloc(h_bytes), *got = malloc(y_bytes), *want = malloc(y_bytes);
      assert_true(h && h_want && got && want);
      char what[80];
      (void)snprintf(what, sizeof what, "layer %d, zeros %d", s, kind);
      esmm_pattern *plain = make_h(&l, table[s].activation, 0, h_want);
      esmm_pattern *packed = make_h(&l, table[s].activation, 1, h);
      assert_memory_equal(h, h_want, h_bytes);
      expect_same_bits(packed, plain);
      multiply(&l.h_at, l.w2, packed, true, &l.y, got);
      esmm_pattern *behind = pattern_of(&l.h_at, 128, 2);
      multiply(&l.h_at, l.w2, behind, true, &l.y, want);
      expect_same(got, want, l.m, l.n, what);
      multiply(&l.h_at, l.w2, packed, true, &l.y, want); /* again */
      expect_same(got, want, l.m, l.n, what);
      if (table[s].of != REALS) {
        multiply(&l.h_at, l.w2, NULL, false, &l.y, want);
        expect_same(got, want, l.m, l.n, what);
      }
      esmm_pattern_free(plain);
      esmm_pattern_free(packed);
      esmm_pattern_free(behind);
      free(h);
      free(h_want);
      free(got);
      free(want);
      end_layer(&l);
    }
}

/* Of another context its values are not read; a value that c_packed has not is refused. */
static void what_is_not_read(void **state)
{
  (void)state;
  esmm_ctx *other = NULL, *first = gpu;
  const esmm_ctx_opts of_gpu = {.size = sizeof of_gpu, .device = "cuda"};
  esmm_matrix a = host_matrix(300, 512, ESMM_BF16);
  for (int64_t i = 0; i < 300; i++)
    for (int64_t k = 0; k < 512; k += 3)
      th_set(&a, i, k, 1);
  const esmm_matrix shape = {.rows = 300, .cols = 256, .ld = 256, .dtype = ESMM_BF16};
  th_rng rng = {3};
  esmm_weights *w = weights_of(512, 256, ESMM_BF16, &rng);
  esmm_matrix da = to_device(&a), dc = to_device(&shape);
  assert_int_equal(esmm_ctx_create(&other, &of_gpu), ESMM_OK);
  gpu = other;
  esmm_pattern *pattern = pattern_of(&da, 128, 2);
  gpu = first;
  uint16_t *want = malloc(300 * 256 * 2), *got = malloc(300 * 256 * 2);
  assert_true(want && got);
  multiply(&da, w, NULL, false, &dc, want);
  multiply(&da, w, pattern, false, &dc, got);
  expect_same(got, want, 300, 256, "a pattern of another context");
  const esmm_matmul_opts wrong = {.size = sizeof wrong, .c_packed = 3};
  assert_int_equal(esmm_matmul(gpu, &da, w, &dc, &wrong, NULL), ESMM_ERR_ARGUMENT);
  esmm_pattern_free(pattern);
  esmm_ctx_free(other);
  esmm_weights_free(w);
  esmm_memory_free(gpu, da.data);
  esmm_memory_free(gpu, dc.data);
  free(a.data);
  free(want);
  free(got);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(joint_reads_what_a_launch_packs),
                                     cmocka_unit_test(dense_packs_on_the_way), cmocka_unit_test(what_is_not_read)};
  int status = 0;
  if (!use_gpu("cuda packed", &status))
    return status;
  status = cmocka_run_group_tests_name("cuda packed", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
