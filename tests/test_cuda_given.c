/*
 * test_cuda_given.c: products that are given bitmaps of A which another product left on the GPU. Where their strips
 * suit, joint, fused and decode do not scan A: C has the bits that it has without them. Bitmaps may have ones where A
 * is zero.
 *
 * Small integers: every sum is exact, whatever the order.
 */
#include "gpu16.h"

#include <stdlib.h>

/* A pattern of the matrix at `at` as it lies: of a product that adds nothing to it. */
static esmm_pattern *pattern_of(esmm_ctx *ctx, const esmm_matrix *at, int64_t strip_rows)
{
  esmm_matrix x = host_matrix(at->rows, 1, at->dtype), v = host_matrix(1, at->cols, at->dtype), c = *at;
  esmm_weights *w = NULL;
  esmm_pattern *pattern = NULL;
  const float none = 0.0f, once = 1.0f;
  esmm_matrix dx = to_device(&x);
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .alpha = &none, .beta = &once, .c_strip_rows = strip_rows, .c_pattern = &pattern};
  expect_ok(ctx, esmm_prepare(ctx, &v, NULL, &w));
  expect_ok(ctx, esmm_matmul(ctx, &dx, w, &c, &opts, NULL));
  expect_ok(ctx, esmm_ctx_synchronize(ctx));
  esmm_weights_free(w);
  esmm_memory_free(ctx, dx.data);
  free(x.data);
  free(v.data);
  return pattern;
}

/* How A's zeros lie. */
typedef enum zeros {
  COLUMNS, /* each strip of 8 rows has its own dead k's */
  REGIONS, /* and long stretches of them in which nothing is alive */
  NONE,
  ALL
} zeros;

static bool is_alive(zeros kind, int64_t row, int64_t k)
{
  const uint64_t x = (uint64_t)(row / 8 * 7919 + k) * 0x9e3779b97f4a7c15u >> 40;
  switch (kind) {
  case COLUMNS:
    return x % 10 == 0;
  case REGIONS:
    return x % 4 == 0 && (k / 200 + row / 64) % 3 == 1;
  case NONE:
    return true;
  case ALL:
    break;
  }
  return false;
}

typedef struct product {
  esmm_matrix a, b, da, dc;
  esmm_weights *w;
  double *sums;
  uint16_t *got, *want;
  size_t bytes;
} product;

static product make_product(int64_t m, int64_t n, int64_t k, esmm_dtype dtype, esmm_order order, zeros kind)
{
  product p = {.a = host_matrix(m, k, dtype), .b = host_matrix(k, n, dtype), .bytes = (size_t)(m * n) * 2};
  th_rng rng = {(uint64_t)(m * 31 + n * 7 + k + (int)kind)};
  if (order == ESMM_COL_MAJOR) {
    p.a.order = order;
    p.a.ld = m;
  }
  p.sums = calloc((size_t)(m * n), sizeof *p.sums);
  p.got = calloc(1, p.bytes);
  p.want = calloc(1, p.bytes);
  assert_true(p.sums && p.got && p.want);
  for (int64_t i = 0; i < k; i++)
    for (int64_t j = 0; j < n; j++)
      th_set(&p.b, i, j, (double)th_below(&rng, 3) - 1);
  for (int64_t i = 0; i < m; i++)
    for (int64_t l = 0; l < k; l++) {
      const double x = is_alive(kind, i, l) ? (double)th_below(&rng, 3) - 1 : 0;
      th_set(&p.a, i, l, x);
      for (int64_t j = 0; x != 0 && j < n; j++)
        p.sums[i * n + j] += x * th_get(&p.b, l, j);
    }
  const esmm_matrix c = {.rows = m, .cols = n, .ld = n, .dtype = dtype};
  p.da = to_device(&p.a);
  p.dc = to_device(&c);
  expect_ok(gpu, esmm_prepare(gpu, &p.b, NULL, &p.w));
  return p;
}

static void end_product(product *p)
{
  esmm_weights_free(p->w);
  esmm_memory_free(gpu, p->da.data);
  esmm_memory_free(gpu, p->dc.data);
  free(p->a.data);
  free(p->b.data);
  free(p->sums);
  free(p->got);
  free(p->want);
}

/* C of one call to `out`; gated: by A times the same weights; given: whether it is to say that A was not scanned. */
static void multiply_by(product *p, const char *kernel, const esmm_pattern *pattern, bool gated, bool given,
                        uint16_t *out)
{
  esmm_stats stats = {.size = sizeof stats};
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .force = kernel, .a_pattern = pattern, .gate = gated ? p->w : NULL};
  memset(p->got, 0xff, p->bytes);
  esmm_matrix host = {.data = p->got, .rows = p->dc.rows, .cols = p->dc.cols, .ld = p->dc.ld, .dtype = p->dc.dtype};
  expect_ok(gpu, esmm_matrix_copy(gpu, &host, &p->dc));
  expect_ok(gpu, esmm_matmul(gpu, &p->da, p->w, &p->dc, &opts, &stats));
  expect_ok(gpu, esmm_matrix_copy(gpu, &p->dc, &host));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  if ((strstr(stats.reason, "A is not scanned") != NULL) != given)
    fail_msg("%s, strips that %s: %s", kernel, given ? "suit" : "do not suit", stats.reason);
  memcpy(out, p->got, p->bytes);
}

static void multiply(product *p, const char *kernel, const esmm_pattern *pattern, bool given, uint16_t *out)
{
  multiply_by(p, kernel, pattern, false, given, out);
}

static void check_sums(const product *p, const uint16_t *c, const char *kernel, int64_t strip_rows)
{
  esmm_matrix got = {.rows = p->dc.rows, .cols = p->dc.cols, .ld = p->dc.ld, .dtype = p->dc.dtype};
  memcpy(&got.data, &c, sizeof c);
  for (int64_t i = 0; i < got.rows; i++)
    for (int64_t j = 0; j < got.cols; j++) {
      const double is = th_get(&got, i, j), want = p->sums[i * got.cols + j], off = is > want ? is - want : want - is;
      if (!(off <= (want < 0 ? -want : want) / 128)) /* what C's dtype rounds */
        fail_msg("%s, strips of %d rows: C[%d,%d] is %g, not %g", kernel, (int)strip_rows, (int)i, (int)j, is, want);
    }
}

typedef struct family {
  const char *kernel[2]; /* bf16, fp16 */
  int64_t rows;          /* of its strips */
  int64_t over;          /* with no more rows it scans A all the same */
  int64_t shapes[5][3];  /* m, n, k */
} family;

static const family FAMILIES[] = {
    {{"joint_bf16_sm90a", "joint_f16_sm90a"},
     128,
     0,
     {{300, 264, 1000}, {128, 512, 4096}, {1030, 300, 72}, {100, 40, 2055}, {7, 256, 640}}},
    {{"fused_bf16_sm90a", "fused_f16_sm90a"},
     64,
     64,
     {{150, 264, 1000}, {64, 512, 2048}, {65, 700, 72}, {33, 40, 2055}, {7, 256, 640}}},
    {{"decode_bf16", "decode_f16"},
     16,
     8,
     {{16, 264, 1000}, {1, 512, 4096}, {9, 300, 72}, {5, 40, 2055}, {12, 1000, 9000}}}};
static const int64_t HEIGHTS[] = {8, 16, 32, 64, 128, 24, 256, 4};

static bool suits(const family *f, int64_t m, int64_t height)
{
  const int64_t strips = (m + height - 1) / height;
  if (m <= f->over)
    return false;
  return m <= f->rows ? strips <= 16 : f->rows % height == 0 && f->rows / height <= 4;
}

static void run_family(const family *f)
{
  for (int shape = 0; shape < 5; shape++)
    for (int turn = 0; turn < 4; turn++) {
      const esmm_order order = turn == 1 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
      const esmm_dtype dtype = (shape + turn) % 2 ? ESMM_F16 : ESMM_BF16;
      const int64_t *s = f->shapes[shape];
      const char *kernel = f->kernel[dtype == ESMM_F16];
      product p = make_product(s[0], s[1], s[2], dtype, order, (zeros)turn);
      multiply(&p, kernel, NULL, false, p.want);
      check_sums(&p, p.want, kernel, 0);
      uint16_t *c = malloc(p.bytes);
      assert_non_null(c);
      for (size_t i = 0; i < sizeof HEIGHTS / sizeof *HEIGHTS; i++) {
        esmm_pattern *pattern = pattern_of(gpu, &p.da, HEIGHTS[i]);
        const bool given = suits(f, s[0], HEIGHTS[i]);
        multiply(&p, kernel, pattern, given, c);
        if (memcmp(c, p.want, p.bytes) != 0)
          fail_msg("%s, strips of %d rows, shape %d, zeros %d: other bits than without a pattern", kernel,
                   (int)HEIGHTS[i], shape, turn);
        esmm_pattern_free(pattern);
      }
      free(c);
      end_product(&p);
    }
}

static void joint_reads_bitmaps(void **state)
{
  (void)state;
  run_family(&FAMILIES[0]);
}

static void fused_reads_bitmaps(void **state)
{
  (void)state;
  run_family(&FAMILIES[1]);
}

static void decode_reads_bitmaps(void **state)
{
  (void)state;
  run_family(&FAMILIES[2]);
}

/* Both branches of a gated product in one launch: the same list for both. */
static void gated_decode_reads_bitmaps(void **state)
{
  (void)state;
  for (int turn = 0; turn < 4; turn++)
    for (int shape = 0; shape < 5; shape++) {
      const int64_t *s = FAMILIES[2].shapes[shape];
      const esmm_dtype dtype = (shape + turn) % 2 ? ESMM_F16 : ESMM_BF16;
      const char *kernel = FAMILIES[2].kernel[dtype == ESMM_F16];
      product p = make_product(s[0], s[1], s[2], dtype, turn == 1 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, (zeros)turn);
      for (int64_t i = 0; i < s[0] * s[1]; i++)
        p.sums[i] *= p.sums[i];
      uint16_t *c = malloc(p.bytes);
      assert_non_null(c);
      multiply_by(&p, kernel, NULL, true, false, p.want);
      check_sums(&p, p.want, kernel, 0);
      esmm_pattern *pattern = pattern_of(gpu, &p.da, 8);
      multiply_by(&p, kernel, pattern, true, suits(&FAMILIES[2], s[0], 8), c);
      assert_memory_equal(c, p.want, p.bytes);
      esmm_pattern_free(pattern);
      free(c);
      end_product(&p);
    }
}

/* Bitmaps of a matrix that has more nonzeros, and of A after some of them have become zeros. */
static void more_ones_than_nonzeros(void **state)
{
  (void)state;
  for (size_t f = 0; f < sizeof FAMILIES / sizeof *FAMILIES; f++)
    for (int full = 0; full < 2; full++) {
      const int64_t *s = FAMILIES[f].shapes[0];
      const char *kernel = FAMILIES[f].kernel[0];
      product p = make_product(s[0], s[1], s[2], ESMM_BF16, ESMM_ROW_MAJOR, REGIONS);
      product more = make_product(s[0], 1, s[2], ESMM_BF16, ESMM_ROW_MAJOR, full ? NONE : COLUMNS);
      for (int64_t i = 0; i < s[0]; i++) /* whatever p has, and what COLUMNS adds */
        for (int64_t l = 0; l < s[2]; l++)
          if (th_get(&p.a, i, l) != 0 || full)
            th_set(&more.a, i, l, 1);
      expect_ok(gpu, esmm_matrix_copy(gpu, &more.a, &more.da));
      esmm_pattern *pattern = pattern_of(gpu, &more.da, 32);
      multiply(&p, kernel, pattern, true, p.want);
      check_sums(&p, p.want, kernel, 32);
      esmm_pattern_free(pattern);
      end_product(&more);
      end_product(&p);
    }
}

/* BSR weights at few rows: cells whose k's are dead in A are left out. */
static void decode_of_blocks_leaves_cells_out(void **state)
{
  (void)state;
  for (int64_t block = 32; block <= 128; block *= 2) {
    product p = make_product(16, 264, 1000, ESMM_BF16, ESMM_ROW_MAJOR, REGIONS);
    const esmm_prepare_opts opts = {
        .size = sizeof opts, .format = {.kind = ESMM_FORMAT_BSR, .block_rows = (int)block, .block_cols = (int)block}};
    esmm_weights_free(p.w);
    p.w = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &p.b, &opts, &p.w));
    for (size_t i = 0; i < sizeof HEIGHTS / sizeof *HEIGHTS; i++) {
      esmm_pattern *pattern = pattern_of(gpu, &p.da, HEIGHTS[i]);
      multiply(&p, "decode_bsr_bf16", pattern, false, p.want);
      check_sums(&p, p.want, "decode_bsr_bf16", HEIGHTS[i]);
      esmm_pattern_free(pattern);
    }
    end_product(&p);
  }
}

/* Of another shape, and of another context: the first is refused, the second tells densities alone. */
static void patterns_that_are_not_read(void **state)
{
  (void)state;
  product p = make_product(300, 264, 1000, ESMM_BF16, ESMM_ROW_MAJOR, COLUMNS);
  product q = make_product(300, 264, 1001, ESMM_BF16, ESMM_ROW_MAJOR, COLUMNS);
  esmm_pattern *other = pattern_of(gpu, &q.da, 128);
  const esmm_matmul_opts wrong = {.size = sizeof wrong, .force = "joint_bf16_sm90a", .a_pattern = other};
  assert_int_equal(esmm_matmul(gpu, &p.da, p.w, &p.dc, &wrong, NULL), ESMM_ERR_SHAPE);
  esmm_pattern_free(other);
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts of_gpu = {.size = sizeof of_gpu, .device = "cuda"};
  assert_int_equal(esmm_ctx_create(&ctx, &of_gpu), ESMM_OK);
  other = pattern_of(ctx, &p.da, 128);
  multiply(&p, "joint_bf16_sm90a", other, false, p.want);
  check_sums(&p, p.want, "joint_bf16_sm90a", 128);
  esmm_pattern_free(other);
  esmm_ctx_free(ctx);
  end_product(&p);
  end_product(&q);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(joint_reads_bitmaps),        cmocka_unit_test(fused_reads_bitmaps),
      cmocka_unit_test(decode_reads_bitmaps),       cmocka_unit_test(gated_decode_reads_bitmaps),
      cmocka_unit_test(more_ones_than_nonzeros),    cmocka_unit_test(decode_of_blocks_leaves_cells_out),
      cmocka_unit_test(patterns_that_are_not_read),
  };
  int status = 0;
  if (!use_gpu("cuda given", &status))
    return status;
  status = cmocka_run_group_tests_name("cuda given", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
