/*
 * test_cuda_formats.c: weights of N:M on a GPU: products of every kernel that reads them, B back again, files, and
 * pruning and checking on the device, which do what a CPU does.
 *
 * Sums of small integers are exact, so C is compared byte by byte, with what lies between its lines.
 */
#include "cuda/cuda.h"
#include "gpu16.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct group_format {
  int keep, group, cols;
} group_format;

static const group_format FORMATS[] = {{2, 4, 1},  {2, 4, 5},  {1, 4, 1}, {1, 3, 1},  {1, 2, 16}, {2, 8, 1}, {4, 8, 1},
                                       {5, 13, 1}, {8, 32, 1}, {3, 4, 1}, {4, 16, 4}, {3, 7, 48}, {1, 1, 1}, {4, 4, 1}};

static esmm_format format_of(const group_format *f)
{
  return (esmm_format){.kind = ESMM_FORMAT_NM, .keep = f->keep, .group = f->group, .group_cols = f->cols};
}

/* ---- operands ---- */

/* Small integers that fit f; some groups are not full. */
static void fill_b(esmm_matrix *b, const group_format *f, uint64_t seed)
{
  th_rng rng = {seed};
  for (int64_t k0 = 0; k0 < b->rows; k0 += f->group)
    for (int64_t j0 = 0; j0 < b->cols; j0 += f->cols) {
      const int64_t rows = b->rows - k0 < f->group ? b->rows - k0 : f->group;
      int64_t left = f->keep;
      for (int64_t r = 0; r < rows; r++) {
        const bool keeps = left > 0 && th_below(&rng, rows - r) < left;
        left -= keeps;
        for (int64_t j = j0; j < b->cols && j < j0 + f->cols; j++)
          th_set(b, k0 + r, j, keeps ? (double)(th_below(&rng, 9) - 4) : 0);
      }
    }
}

static esmm_matrix matrix_of(int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order, int64_t padding)
{
  const int64_t length = order == ESMM_ROW_MAJOR ? cols : rows;
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = dtype, .order = order};
  m.ld = padding < 0 ? (length + 7) / 8 * 8 : length + padding;
  m.data = malloc(th_matrix_bytes(&m) + 64);
  assert_non_null(m.data);
  memset(m.data, 0xff, th_matrix_bytes(&m) + 64);
  return m;
}

static void put(const esmm_matrix *host, const esmm_matrix *device)
{
  assert_int_equal(calls.to_device((uintptr_t)device->data, host->data, th_matrix_bytes(host)), 0);
  assert_int_equal(calls.stream_synchronize(NULL), 0);
}

static void get(const esmm_matrix *device, const esmm_matrix *host)
{
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  assert_int_equal(calls.to_host(host->data, (uintptr_t)device->data, th_matrix_bytes(host)), 0);
}

/* The same bytes in device memory, what lies between lines too. */
static esmm_matrix device_twin(const esmm_matrix *host)
{
  esmm_matrix m = *host;
  m.data = NULL;
  m = to_device(&m);
  put(host, &m);
  return m;
}

/* ---- products ---- */

typedef struct epilogue {
  float alpha, beta;
  bool bias;
  esmm_activation activation;
} epilogue;

static const epilogue EPILOGUES[] = {{1, 0, false, ESMM_ACT_NONE},
                                     {0.5f, 2, false, ESMM_ACT_NONE},
                                     {1, 0, true, ESMM_ACT_RELU},
                                     {-1, 1, true, ESMM_ACT_RELU}};

typedef struct product {
  int64_t m, n, k;
  esmm_dtype dtype;
  group_format format;
  esmm_matrix a, b; /* in host memory */
  double *sum;      /* [m][n] */
  float *bias;      /* on the device */
  esmm_weights *w;
} product;

static product make_product(int64_t m, int64_t n, int64_t k, esmm_dtype dtype, const group_format *f, uint64_t seed,
                            double ratio)
{
  product p = {.m = m, .n = n, .k = k, .dtype = dtype, .format = *f};
  p.a = matrix_of(m, k, dtype, ESMM_ROW_MAJOR, 0);
  p.b = matrix_of(k, n, dtype, seed % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, (int64_t)(seed % 3));
  p.sum = calloc((size_t)(m * n), sizeof *p.sum);
  float *bias = calloc((size_t)n, sizeof *bias);
  double *row = calloc((size_t)n, sizeof *row);
  assert_true(p.sum && bias && row);
  th_fill(&p.a, seed, 0.7, true);
  fill_b(&p.b, f, seed + 1);
  for (int64_t l = 0; l < k; l++) {
    for (int64_t j = 0; j < n; j++)
      row[j] = th_get(&p.b, l, j);
    for (int64_t i = 0; i < m; i++) {
      const double x = th_get(&p.a, i, l);
      for (int64_t j = 0; x != 0 && j < n; j++)
        p.sum[i * n + j] += x * row[j];
    }
  }
  for (int64_t j = 0; j < n; j++)
    bias[j] = (float)(j % 7 - 3);
  void *memory = NULL;
  expect_ok(gpu, esmm_memory_alloc(gpu, (size_t)n * sizeof *bias, &memory));
  assert_int_equal(calls.to_device((uintptr_t)memory, bias, (size_t)n * sizeof *bias), 0);
  p.bias = memory;
  const esmm_prepare_opts opts = {.size = sizeof opts, .format = format_of(f), .max_bytes_ratio = ratio};
  expect_ok(gpu, esmm_prepare(gpu, &p.b, &opts, &p.w));
  free(bias);
  free(row);
  return p;
}

static void end_product(product *p)
{
  esmm_weights_free(p->w);
  esmm_memory_free(gpu, p->bias);
  free(p->a.data);
  free(p->b.data);
  free(p->sum);
}

static double before_at(int64_t i, int64_t j)
{
  return (double)((i + 3 * j) % 9 - 4);
}

static void expect_c(const product *p, const epilogue *e, const esmm_matrix *got, esmm_matrix *want, const char *what)
{
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      double x = (double)e->alpha * p->sum[i * p->n + j];
      x += e->beta != 0 ? (double)e->beta * before_at(i, j) : 0;
      x += e->bias ? (double)(j % 7 - 3) : 0;
      x = e->activation == ESMM_ACT_RELU && !(x > 0) ? 0 : x;
      th_set(want, i, j, x);
      if (!(th_get(got, i, j) == th_get(want, i, j)))
        fail_msg("%s: C[%d,%d] is %.9g, not %.9g", what, (int)i, (int)j, th_get(got, i, j), th_get(want, i, j));
      th_set(want, i, j, th_get(got, i, j)); /* zeros of either sign */
    }
  if (memcmp(got->data, want->data, th_matrix_bytes(got)) != 0)
    fail_msg("%s: what lies between the lines of C was written", what);
}

/* One layout, by the bits of `how`: orders of A and C, lines that are odd, fp32 C. False: the kernel does not take it.
 */
static bool multiply(const product *p, const char *force, unsigned how)
{
  const epilogue *e = &EPILOGUES[how / 16 % (unsigned)COUNT(EPILOGUES)];
  esmm_matrix a = matrix_of(p->m, p->k, p->dtype, how & 1 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, how & 2 ? 1 : -1);
  esmm_matrix c =
      matrix_of(p->m, p->n, how & 8 ? ESMM_F32 : p->dtype, how & 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, how & 2 ? 1 : -1);
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t l = 0; l < p->k; l++)
      th_set(&a, i, l, th_get(&p->a, i, l));
  for (int64_t i = 0; e->beta != 0 && i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++)
      th_set(&c, i, j, before_at(i, j));
  esmm_matrix da = device_twin(&a), dc = device_twin(&c), want = c;
  want.data = malloc(th_matrix_bytes(&c) + 64);
  assert_non_null(want.data);
  memcpy(want.data, c.data, th_matrix_bytes(&c));
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .force = force,
                                 .alpha = &e->alpha,
                                 .beta = &e->beta,
                                 .bias = e->bias ? p->bias : NULL,
                                 .activation = e->activation};
  char what[200];
  (void)snprintf(what, sizeof what, "%s, %s %d:%d of %d columns, %d x %d x %d, layout %u", force ? force : "auto",
                 esmm_dtype_str(p->dtype), p->format.keep, p->format.group, p->format.cols, (int)p->m, (int)p->k,
                 (int)p->n, how);
  const esmm_status status = esmm_matmul(gpu, &da, p->w, &dc, &opts, NULL);
  if (status != ESMM_OK && !(status == ESMM_ERR_UNSUPPORTED && force))
    fail_msg("%s: %s: %s", what, esmm_status_str(status), esmm_ctx_error(gpu));
  if (status == ESMM_OK) {
    get(&dc, &c);
    expect_c(p, e, &c, &want, what);
  }
  esmm_memory_free(gpu, da.data);
  esmm_memory_free(gpu, dc.data);
  free(a.data);
  free(c.data);
  free(want.data);
  return status == ESMM_OK;
}

/* Kernels that read N:M weights of a dtype; the last is the plan. */
static int names_of(esmm_dtype dtype, const char *names[8])
{
  int count = 0;
  char part[8];
  (void)snprintf(part, sizeof part, "_%s", esmm_dtype_str(dtype));
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (info.available && info.formats & 1u << ESMM_FORMAT_NM && strstr(info.name, part) && count < 7)
      names[count++] = info.name;
  }
  assert_true(count > 0);
  names[count++] = NULL;
  return count;
}

/* Products in `layouts` layouts each, with a dense copy and without; ran: of each name of both dtypes. With a long k
   cuBLAS, which may read the copy, adds parts that it has rounded: those sums are not exact. */
enum { LONG = 2100 };

static void check_sizes(int64_t m, int64_t n, int64_t k, const group_format *f, uint64_t turn, int layouts,
                        int64_t ran[2][8])
{
  for (int d = 0; d < 2; d++) {
    const char *names[8];
    const int count = names_of(DTYPES[d], names);
    product p = make_product(m, n, k, DTYPES[d], f, 100 + turn, turn % 2 && k <= LONG ? 0 : 1.5);
    for (int i = 0; i < count; i++)
      for (int l = 0; l < layouts; l++)
        ran[d][i] += multiply(&p, names[i], (unsigned)((turn * 7 + (uint64_t)l * 13) % 64));
    end_product(&p);
  }
}

/* few: products of few rows were among them, so that kernels for those have run, too. */
static void expect_all_names_ran(int64_t ran[2][8], bool few)
{
  for (int d = 0; d < 2; d++) {
    const char *names[8];
    const int count = names_of(DTYPES[d], names);
    for (int i = 0; i < count; i++)
      if (ran[d][i] == 0 && (few || !names[i] || !is_decode(names[i])))
        fail_msg("%s ran none of these products", names[i] ? names[i] : "auto");
  }
}

/* The smallest thing that can be wrong: one tile, one block of k's, nothing ragged. */
static void one_tile(void **state)
{
  (void)state;
  static const int64_t rows[] = {16, 32, 64, 128, 256};
  int64_t ran[2][8] = {{0}};
  for (int i = 0; i < COUNT(rows); i++)
    for (int64_t k = 64; k <= 256; k *= 2)
      check_sizes(rows[i], 128, k, &FORMATS[0], 0, 1, ran);
  expect_all_names_ran(ran, true);
}

/* 2:4 in shapes that no tile fits. */
static void ragged_shapes(void **state)
{
  (void)state;
  static const int64_t ms[] = {1, 3, 16, 17, 33, 65, 128, 129, 300}, ns[] = {1, 8, 129, 255, 520},
                       ks[] = {1, 6, 63, 64, 130, 1000};
  int64_t ran[2][8] = {{0}};
  uint64_t turn = 0;
  for (int i = 0; i < COUNT(ms); i++)
    for (int j = 0; j < COUNT(ns); j++)
      for (int l = 0; l < COUNT(ks); l++, turn++)
        check_sizes(ms[i], ns[j], ks[l], &FORMATS[0], turn, 1, ran);
  expect_all_names_ran(ran, true);
}

/* Enough tiles of 256 rows for all of a GPU: pairs of blocks do those. Nothing ragged first. */
static void tall_tiles(void **state)
{
  (void)state;
  int64_t ran[2][8] = {{0}};
  for (int64_t k = 64; k <= 1024; k *= 16)
    check_sizes(2048, 2048, k, &FORMATS[0], 0, 1, ran);
  expect_all_names_ran(ran, false);
}

/* The same in several rounds, with an odd number of column tiles, over the edges; then parts of k; then few rows of an
   A that comes to shared memory in parts. */
static void large_products(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{2000, 1900, 200}, {2100, 2100, 65}, {700, 900, 1100}, {16, 1024, 5000},
                                     {100, 300, 3000},  {256, 128, 2000}, {16, 6500, 3200}};
  int64_t ran[2][8] = {{0}};
  for (int i = 0; i < COUNT(sizes); i++)
    check_sizes(sizes[i][0], sizes[i][1], sizes[i][2], &FORMATS[0], (uint64_t)i * 3, 1, ran);
  expect_all_names_ran(ran, true);
}

/* Every layout and epilogue of one product of each kind of low tile, and of tall ones six. */
static void every_layout(void **state)
{
  (void)state;
  static const int64_t ms[] = {9, 40, 100, 200};
  int64_t ran[2][8] = {{0}};
  for (int i = 0; i < COUNT(ms); i++)
    check_sizes(ms[i], 168, 136, &FORMATS[0], 0, 64, ran);
  check_sizes(1500, 1900, 72, &FORMATS[0], 0, 6, ran);
  expect_all_names_ran(ran, true);
}

static void every_format(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{5, 70, 200}, {130, 257, 129}, {300, 64, 61}};
  int64_t ran[2][8] = {{0}};
  for (int f = 0; f < COUNT(FORMATS); f++)
    for (int i = 0; i < COUNT(sizes); i++)
      check_sizes(sizes[i][0], sizes[i][1], sizes[i][2], &FORMATS[f], (uint64_t)(f * 5 + i), 3, ran);
  expect_all_names_ran(ran, true);
}

/* The same bits in every run: parts along k are added in a fixed order. */
static void the_same_bits(void **state)
{
  (void)state;
  static const int64_t ms[] = {1, 16, 100, 600};
  for (int i = 0; i < 2 * COUNT(ms); i++) {
    const esmm_dtype dtype = DTYPES[i % 2];
    product p = make_product(ms[i / 2], 384, 4096, dtype, &FORMATS[0], 7, 0.6);
    for (int64_t r = 0; r < p.m; r++)
      for (int64_t l = 0; l < p.k; l++)
        th_set(&p.a, r, l, sin((double)(r * p.k + l)));
    esmm_matrix da = device_twin(&p.a), c = matrix_of(p.m, p.n, ESMM_F32, ESMM_ROW_MAJOR, 0), first = c;
    esmm_matrix dc = device_twin(&c);
    first.data = malloc(th_matrix_bytes(&c));
    assert_non_null(first.data);
    for (int run = 0; run < 5; run++) {
      expect_ok(gpu, esmm_matmul(gpu, &da, p.w, &dc, NULL, NULL));
      get(&dc, &c);
      if (run == 0)
        memcpy(first.data, c.data, th_matrix_bytes(&c));
      assert_memory_equal(first.data, c.data, th_matrix_bytes(&c));
    }
    esmm_memory_free(gpu, da.data);
    esmm_memory_free(gpu, dc.data);
    free(c.data);
    free(first.data);
    end_product(&p);
  }
}

/* ---- weights ---- */

static esmm_matrix dense_of(esmm_ctx *ctx, const esmm_weights *w, int64_t k, int64_t n, esmm_dtype dtype)
{
  esmm_matrix out = host_matrix(k, n, dtype);
  expect_ok(ctx, esmm_weights_to_dense(ctx, w, &out));
  return out;
}

/* What went in comes out, with a dense copy and without, and from files that either device wrote. */
static void weights_come_back(void **state)
{
  (void)state;
  static const int64_t shapes[][2] = {{1, 1}, {64, 128}, {130, 300}, {257, 5}, {1000, 129}, {200, 264}};
  char path[64];
  (void)snprintf(path, sizeof path, "/tmp/esmm_cuda_nm_%ld", (long)getpid());
  for (int f = 0; f < COUNT(FORMATS); f++)
    for (int i = 0; i < 2 * COUNT(shapes); i++) {
      const int64_t k = shapes[i / 2][0], n = shapes[i / 2][1];
      const esmm_dtype dtype = DTYPES[(f + i) % 2];
      esmm_matrix b = matrix_of(k, n, dtype, i % 3 ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR, i % 2);
      fill_b(&b, &FORMATS[f], (uint64_t)(f * 10 + i));
      const esmm_prepare_opts opts = {
          .size = sizeof opts, .format = format_of(&FORMATS[f]), .max_bytes_ratio = i % 2 ? 100 : 1.5};
      esmm_weights *w = NULL, *loaded[2] = {NULL, NULL}, *host = NULL;
      expect_ok(gpu, esmm_prepare(gpu, &b, &opts, &w));
      esmm_weights_info info = {.size = sizeof info};
      assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
      int64_t nonzero = 0;
      for (int64_t r = 0; r < k; r++)
        for (int64_t j = 0; j < n; j++)
          nonzero += th_get(&b, r, j) != 0;
      assert_true(fabs(info.element_density - (double)nonzero / (double)(k * n)) < 1e-9);
      expect_ok(gpu, esmm_weights_save(gpu, w, path));
      expect_ok(cpu, esmm_weights_load(cpu, path, &loaded[0]));
      const esmm_prepare_opts plain = {.size = sizeof plain, .format = opts.format, .max_bytes_ratio = 1e6};
      expect_ok(cpu, esmm_prepare(cpu, &b, &plain, &host));
      esmm_weights_info other = {.size = sizeof other};
      assert_int_equal(esmm_weights_get_info(host, &other), ESMM_OK);
      assert_true(fabs(info.strip_density - other.strip_density) < 1e-9);
      expect_ok(cpu, esmm_weights_save(cpu, host, path));
      expect_ok(gpu, esmm_weights_load(gpu, path, &loaded[1]));
      for (int which = 0; which < 3; which++) {
        esmm_ctx *ctx = which == 1 ? cpu : gpu;
        esmm_matrix out = dense_of(ctx, which == 0 ? w : loaded[which - 1], k, n, dtype);
        for (int64_t r = 0; r < k; r++)
          for (int64_t j = 0; j < n; j++)
            if (!(th_get(&out, r, j) == th_get(&b, r, j)))
              fail_msg("%d:%d of %d columns, %d x %d, way %d: B[%d,%d] is %g, not %g", FORMATS[f].keep,
                       FORMATS[f].group, FORMATS[f].cols, (int)k, (int)n, which, (int)r, (int)j, th_get(&out, r, j),
                       th_get(&b, r, j));
        free(out.data);
      }
      esmm_weights_free(w);
      esmm_weights_free(host);
      esmm_weights_free(loaded[0]);
      esmm_weights_free(loaded[1]);
      free(b.data);
    }
  assert_int_equal(unlink(path), 0);
}

/* Bit k of strip or tile `at`, of so many columns, is set where B has a nonzero there, or where all are kept. */
static void expect_bits(const esmm_matrix *b, bool strict, CUdeviceptr bits, int64_t cols)
{
  const int64_t words = (b->rows + 31) / 32, count = (b->cols + cols - 1) / cols;
  uint32_t *got = malloc((size_t)(words * count) * sizeof *got);
  assert_non_null(got);
  assert_int_equal(calls.to_host(got, bits, (size_t)(words * count) * sizeof *got), 0);
  for (int64_t at = 0; at < count; at++)
    for (int64_t k = 0; k < 32 * words; k++) {
      bool alive = k < b->rows && strict;
      for (int64_t j = at * cols; k < b->rows && !alive && j < b->cols && j < (at + 1) * cols; j++)
        alive = th_get(b, k, j) != 0;
      if ((got[at * words + k / 32] >> (k % 32) & 1) != alive)
        fail_msg("%d x %d, strict %d: the bit of k %d in strip %d of %d columns is not %d", (int)b->rows, (int)b->cols,
                 strict, (int)k, (int)at, (int)cols, alive);
    }
  free(got);
}

/* Dense weights of any dtype, kept strictly or not: the densities and bitmaps that they should have, and B again. */
static void dense_weights_come_back(void **state)
{
  (void)state;
  for (int i = 0; i < 24; i++) {
    const esmm_dtype dtype = (esmm_dtype)(i % 3);
    esmm_matrix b = matrix_of(65 + 37 * (i % 5), i % 2 ? 200 : 261, dtype, i % 4 < 2 ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR,
                              i % 8 < 4 ? 0 : 3);
    th_fill(&b, (uint64_t)i, 0.02, true);
    esmm_matrix db = device_twin(&b);
    const esmm_prepare_opts opts = {.size = sizeof opts, .strict = i / 6 % 2};
    esmm_weights *w[2] = {NULL, NULL};
    esmm_weights_info info[2] = {{.size = sizeof *info}, {.size = sizeof *info}};
    expect_ok(cpu, esmm_prepare(cpu, &b, &opts, &w[0]));
    expect_ok(gpu, esmm_prepare(gpu, &db, &opts, &w[1]));
    for (int which = 0; which < 2; which++)
      assert_int_equal(esmm_weights_get_info(w[which], &info[which]), ESMM_OK);
    assert_true(fabs(info[0].element_density - info[1].element_density) < 1e-12);
    assert_true(opts.strict || fabs(info[0].strip_density - info[1].strip_density) < 1e-12);
    expect_bits(&b, opts.strict, esmm_cuda_of(w[1])->strips.bits, ESMM_STRIP);
    if (dtype != ESMM_F32)
      expect_bits(&b, opts.strict, esmm_cuda_of(w[1])->tiles, ESMM_TILE);
    esmm_matrix out = dense_of(gpu, w[1], b.rows, b.cols, dtype);
    for (int64_t r = 0; r < b.rows; r++)
      for (int64_t j = 0; j < b.cols; j++)
        assert_true(th_get(&out, r, j) == th_get(&b, r, j));
    free(out.data);
    esmm_weights_free(w[0]);
    esmm_weights_free(w[1]);
    esmm_memory_free(gpu, db.data);
    free(b.data);
  }
}

/* ---- checking and pruning ---- */

/* A few elements too many: the device finds the place that a CPU finds, and says it in the same words. */
static void misfits_are_named(void **state)
{
  (void)state;
  for (int f = 0; f < COUNT(FORMATS); f++)
    for (int i = 0; i < 12; i++) {
      if (FORMATS[f].keep == FORMATS[f].group)
        continue; /* everything fits */
      const esmm_dtype dtype = (esmm_dtype)(i % 3);
      esmm_matrix b = matrix_of(150 + i, 70 + 3 * i, dtype, i % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, i % 5);
      const esmm_format format = format_of(&FORMATS[f]);
      th_rng rng = {(uint64_t)(f * 100 + i)};
      fill_b(&b, &FORMATS[f], (uint64_t)(f * 10 + i));
      for (int j = 0; j < i; j++) /* the first is none */
        for (int64_t r = 0, k0 = th_below(&rng, b.rows), col = th_below(&rng, b.cols); r <= FORMATS[f].keep; r++)
          th_set(&b, (k0 + r) % b.rows, col, 3);
      esmm_matrix db = device_twin(&b);
      int64_t k[2], col[2];
      expect_ok(cpu, esmm_format_check(cpu, &b, &format, &k[0], &col[0]));
      expect_ok(gpu, esmm_format_check(gpu, &db, &format, &k[1], &col[1]));
      if (k[0] != k[1] || col[0] != col[1])
        fail_msg("%d:%d of %d columns: k %d, column %d, not %d, %d", FORMATS[f].keep, FORMATS[f].group, FORMATS[f].cols,
                 (int)k[1], (int)col[1], (int)k[0], (int)col[0]);
      if (k[0] >= 0 && dtype != ESMM_F32) {
        const esmm_prepare_opts opts = {.size = sizeof opts, .format = format, .max_bytes_ratio = 1e6};
        esmm_weights *w = NULL;
        assert_int_equal(esmm_prepare(cpu, &b, &opts, &w), ESMM_ERR_ARGUMENT);
        assert_int_equal(esmm_prepare(gpu, &db, &opts, &w), ESMM_ERR_ARGUMENT);
        assert_null(w);
        assert_string_equal(esmm_ctx_error(gpu), esmm_ctx_error(cpu));
      }
      esmm_memory_free(gpu, db.data);
      free(b.data);
    }
}

/* Ties, zeros of either sign, Inf and NaN among them. */
static void fill_to_prune(esmm_matrix *b, uint64_t seed)
{
  th_rng rng = {seed};
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++) {
      const int64_t kind = th_below(&rng, 40);
      const double x = kind < 20 ? (double)(th_below(&rng, 7) - 3) : 2 * th_unit(&rng) - 1;
      th_set(b, k, j, kind == 20 ? -0.0 : kind == 21 ? (double)INFINITY : kind == 22 ? (double)NAN : x);
    }
}

/* b in both memories, pruned in both: the same bits, what lies between lines too, and the same report. */
static void expect_pruned_alike(const char *what, int i, esmm_matrix *b, const esmm_prune_opts *opts)
{
  esmm_matrix db = device_twin(b), back = *b;
  esmm_prune_report reports[2] = {{.size = sizeof *reports}, {.size = sizeof *reports}};
  expect_ok(cpu, esmm_prune(cpu, b, opts, &reports[0]));
  expect_ok(gpu, esmm_prune(gpu, &db, opts, &reports[1]));
  back.data = malloc(th_matrix_bytes(b));
  assert_non_null(back.data);
  get(&db, &back);
  if (memcmp(back.data, b->data, th_matrix_bytes(b)) != 0)
    fail_msg("%s, case %d, %s %d x %d: other elements than on a CPU", what, i, esmm_dtype_str(b->dtype), (int)b->rows,
             (int)b->cols);
  assert_int_equal(reports[0].kept, reports[1].kept);
  assert_int_equal(reports[0].dropped, reports[1].dropped);
  for (int which = 0; which < 2; which++) {
    const double x = which ? reports[0].norm_dropped : reports[0].norm,
                 y = which ? reports[1].norm_dropped : reports[1].norm;
    assert_true(isnan(x) ? isnan(y) : x == y || fabs(x - y) <= 1e-12 * x);
  }
  esmm_memory_free(gpu, db.data);
  free(back.data);
}

/* The same choices as a CPU's, bit for bit. */
static void pruned_as_on_a_cpu(void **state)
{
  (void)state;
  for (int f = 0; f < COUNT(FORMATS); f++)
    for (int i = 0; i < 12; i++) {
      const esmm_dtype dtype = (esmm_dtype)(i % 3);
      esmm_matrix b = matrix_of(131 + 7 * i, 90 + i, dtype, i % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, i % 5);
      if (i % 6 == 1 || i % 6 == 2) { /* whole vectors, and rows that begin at multiples of 16 bytes */
        free(b.data);
        b = matrix_of(130 + i, 1000, dtype, ESMM_ROW_MAJOR, 8 * (i % 2));
      }
      float norms[300];
      fill_to_prune(&b, (uint64_t)(f * 100 + i));
      for (int k = 0; k < 300; k++)
        norms[k] = k % 15 == 0 ? -0.0f : (float)(k % 5) * 0.37f + (float)(k % 3);
      const esmm_prune_opts opts = {
          .size = sizeof opts, .format = format_of(&FORMATS[f]), .input_norms = i / 3 % 2 ? norms : NULL};
      expect_pruned_alike("N:M", 100 * f + i, &b, &opts);
      free(b.data);
    }
}

/* Of all that may differ: dtype, order, lines that are odd, norms, ties, Inf and NaN (or none), soft or not. */
static esmm_matrix to_prune(int64_t rows, int64_t cols, int i, float norms[1200])
{
  esmm_matrix b = matrix_of(rows, cols, (esmm_dtype)(i % 3), i / 3 % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, i % 5);
  th_rng rng = {(uint64_t)(rows * 7 + i)};
  fill_to_prune(&b, (uint64_t)(rows * 13 + cols + i));
  for (int k = 0; k < 1200; k++)
    norms[k] = k % 11 == 0 ? -0.0f : (float)(k % 5) * 0.37f + (float)(k % 3);
  for (int64_t k = 0; i % 4 != 0 && k < rows; k++) /* else nothing of a matrix with Inf would shrink */
    for (int64_t j = 0; j < cols; j++)
      if (!isfinite(th_get(&b, k, j)))
        th_set(&b, k, j, th_unit(&rng));
  return b;
}

static void top_as_on_a_cpu(void **state)
{
  (void)state;
  static const int64_t sizes[][2] = {{1, 1}, {1, 70}, {70, 1}, {129, 33}, {300, 96}, {1100, 131}};
  static const struct {
    int64_t top;
    double density;
    esmm_prune_scope scope;
  } tops[] = {{1, 0, ESMM_PRUNE_COLUMN},    {40, 0, ESMM_PRUNE_COLUMN},   {0, 0.4, ESMM_PRUNE_COLUMN},
              {0, 1e-9, ESMM_PRUNE_COLUMN}, {9999, 0, ESMM_PRUNE_COLUMN}, {1, 0, ESMM_PRUNE_MATRIX},
              {777, 0, ESMM_PRUNE_MATRIX},  {0, 0.6, ESMM_PRUNE_MATRIX},  {0, 1e-9, ESMM_PRUNE_MATRIX},
              {0, 1, ESMM_PRUNE_MATRIX}};
  for (int s = 0; s < COUNT(sizes); s++)
    for (int t = 0; t < COUNT(tops); t++)
      for (int i = 0; i < 24; i++) {
        float norms[1200];
        esmm_matrix b = to_prune(sizes[s][0], sizes[s][1], i, norms);
        const esmm_prune_opts opts = {.size = sizeof opts,
                                      .top = tops[t].top,
                                      .density = tops[t].density,
                                      .scope = tops[t].scope,
                                      .input_norms = i / 6 % 2 ? norms : NULL,
                                      .soft = i / 12 % 2};
        expect_pruned_alike("top", 100 * t + i, &b, &opts);
        free(b.data);
      }
}

static void soft_nm_as_on_a_cpu(void **state)
{
  (void)state;
  static const int64_t sizes[][2] = {{1, 1}, {3, 40}, {131, 90}, {520, 264}};
  for (int f = 0; f < COUNT(FORMATS); f++)
    for (int s = 0; FORMATS[f].cols == 1 && s < COUNT(sizes); s++)
      for (int i = 0; i < 12; i++) {
        float norms[1200];
        esmm_matrix b = to_prune(sizes[s][0], sizes[s][1], i, norms);
        const esmm_prune_opts opts = {
            .size = sizeof opts, .format = format_of(&FORMATS[f]), .input_norms = i / 6 % 2 ? norms : NULL, .soft = 1};
        expect_pruned_alike("soft N:M", 100 * f + i, &b, &opts);
        free(b.data);
      }
}

/* Prunes, prepares and multiplies without B ever being in host memory. */
static void pruned_on_the_device_and_multiplied(void **state)
{
  (void)state;
  enum { M = 40, N = 200, K = 300 };
  for (int d = 0; d < 2; d++) {
    esmm_matrix b = host_matrix(K, N, DTYPES[d]), a = host_matrix(M, K, DTYPES[d]), c = host_matrix(M, N, ESMM_F32);
    th_fill(&b, 3, 1, true);
    th_fill(&a, 4, 1, true);
    esmm_matrix db = device_twin(&b), da = device_twin(&a), dc = device_twin(&c);
    const esmm_prune_opts prune = {.size = sizeof prune, .format.kind = ESMM_FORMAT_NM};
    const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_NM};
    esmm_weights *w = NULL;
    expect_ok(gpu, esmm_prune(gpu, &db, &prune, NULL));
    expect_ok(cpu, esmm_prune(cpu, &b, &prune, NULL));
    expect_ok(gpu, esmm_prepare(gpu, &db, &opts, &w));
    expect_ok(gpu, esmm_matmul(gpu, &da, w, &dc, NULL, NULL));
    get(&dc, &c);
    for (int i = 0; i < M; i++)
      for (int j = 0; j < N; j++) {
        double sum = 0;
        for (int k = 0; k < K; k++)
          sum += th_get(&a, i, k) * th_get(&b, k, j);
        assert_true(th_get(&c, i, j) == sum);
      }
    esmm_weights_free(w);
    esmm_memory_free(gpu, da.data);
    esmm_memory_free(gpu, db.data);
    esmm_memory_free(gpu, dc.data);
    free(a.data);
    free(b.data);
    free(c.data);
  }
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda formats", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(weights_come_back),  cmocka_unit_test(dense_weights_come_back),
      cmocka_unit_test(one_tile),           cmocka_unit_test(tall_tiles),
      cmocka_unit_test(ragged_shapes),      cmocka_unit_test(large_products),
      cmocka_unit_test(every_layout),       cmocka_unit_test(every_format),
      cmocka_unit_test(the_same_bits),      cmocka_unit_test(misfits_are_named),
      cmocka_unit_test(pruned_as_on_a_cpu), cmocka_unit_test(pruned_on_the_device_and_multiplied),
      cmocka_unit_test(top_as_on_a_cpu),    cmocka_unit_test(soft_nm_as_on_a_cpu),
  };
  status = cmocka_run_group_tests_name("cuda formats", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
