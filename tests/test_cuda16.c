/*
 * test_cuda16.c: 16-bit operands on a GPU: values at the ends of their range, choices that the device makes, the
 * same bits each time, weights in a file, errors beside cuBLAS's. test_cuda16_shapes.c has the shapes.
 *
 * Operands lie in device memory, and are moved by the driver's own copies.
 */
#include "cuda/cuda.h"
#include "gpu16.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- products ---- */

typedef struct product {
  esmm_matrix a, b, c; /* in host memory */
  esmm_matrix da, dc;  /* on the device */
  esmm_weights *w;
} product;

static product make_product(int64_t m, int64_t n, int64_t k, esmm_dtype dtype, esmm_dtype dtype_c)
{
  product p = {.a = host_matrix(m, k, dtype), .b = host_matrix(k, n, dtype), .c = host_matrix(m, n, dtype_c)};
  esmm_matrix shape = p.a;
  shape.data = NULL;
  p.da = to_device(&shape);
  shape = p.c;
  shape.data = NULL;
  p.dc = to_device(&shape);
  return p;
}

static void end_product(product *p)
{
  esmm_weights_free(p->w);
  esmm_memory_free(gpu, p->da.data);
  esmm_memory_free(gpu, p->dc.data);
  free(p->a.data);
  free(p->b.data);
  free(p->c.data);
}

/* Waits for the default stream too: of pageable memory the call only says that it has been read, and streams that do
   not wait for the default one could overtake the rest. */
static void put(const esmm_matrix *host, const esmm_matrix *device)
{
  assert_int_equal(calls.to_device((uintptr_t)device->data, host->data, th_matrix_bytes(host)), 0);
  assert_int_equal(calls.stream_synchronize(NULL), 0);
}

static void get(const esmm_matrix *device, const esmm_matrix *host)
{
  assert_int_equal(calls.to_host(host->data, (uintptr_t)device->data, th_matrix_bytes(host)), 0);
}

/* A and B as the host has them now. */
static void send(product *p)
{
  put(&p->a, &p->da);
  esmm_weights_free(p->w);
  p->w = NULL;
  expect_ok(gpu, esmm_prepare(gpu, &p->b, NULL, &p->w));
}

/* C comes back to the host. False: the kernel does not take this product, which the plan may never say. */
static bool multiply(product *p, const char *force, esmm_stats *stats)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  memset(p->c.data, 0xff, th_matrix_bytes(&p->c));
  put(&p->c, &p->dc);
  const esmm_status status = esmm_matmul(gpu, &p->da, p->w, &p->dc, &opts, stats);
  if (status == ESMM_ERR_UNSUPPORTED && force)
    return false;
  if (status != ESMM_OK)
    fail_msg("%s: %s: %s", force ? force : "auto", esmm_status_str(status), esmm_ctx_error(gpu));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  get(&p->dc, &p->c);
  return true;
}

/* ---- values at the ends of the range ---- */

/* A row of A is one of these at three places, zeros elsewhere. Every sum is exact in fp32, or beyond its range. */
typedef struct recipe {
  double terms[3];
} recipe;

/* Beyond fp16, which has Inf for it; the largest; what is rounded down to that, and up to Inf; beyond it and back; the
   smallest; zeros. */
static const recipe RECIPES_F16[] = {
    {{32768, 32768}},  {{-32768, -32768}},       {{65504}},   {{65504, 8}}, {{65504, 16}},
    {{-65504, -16}},   {{60000, 60000, -60000}}, {{0x1p-24}}, {{-0x1p-24}}, {{0x1p-24, 0, 0x1p-23}},
    {{-0.0, 0, -0.0}},
};
static const double FACTORS_F16[] = {1, 0.5, 1024, 0x1p-24, 65504};

/* In range, and beyond bf16 and fp32; the largest; what is rounded down to that, and up to Inf, though fp32 has it; the
   smallest; zeros. */
static const recipe RECIPES_BF16[] = {
    {{0x1p127}},
    {{0x1p127, 0x1p127}},
    {{-0x1p127, -0x1p127}},
    {{0x1.fep127}},
    {{0x1.fep127, 0x1p118}},
    {{0x1.fep127, 0x1p119}},
    {{-0x1.fep127, -0x1p119}},
    {{0x1p-133}},
    {{-0x1p-133}},
    {{0x1p-133, 0, 0x1p-132}},
    {{-0.0, 0, -0.0}},
};
static const double FACTORS_BF16[] = {1, 0.5, 0x1p20, 0x1p-100};

static void fill_by_recipes(product *p, double factor)
{
  const bool f16 = p->a.dtype == ESMM_F16;
  const recipe *recipes = f16 ? RECIPES_F16 : RECIPES_BF16;
  const int64_t count = f16 ? COUNT(RECIPES_F16) : COUNT(RECIPES_BF16), k = p->a.cols;
  memset(p->a.data, 0, th_matrix_bytes(&p->a));
  for (int64_t i = 0; i < p->a.rows; i++)
    for (int64_t t = 0; t < 3; t++) /* 3 different places of k */
      th_set(&p->a, i, (5 * i + t * (k / 3)) % k, recipes[i % count].terms[t]);
  for (int64_t i = 0; i < k; i++)
    for (int64_t j = 0; j < p->b.cols; j++)
      th_set(&p->b, i, j, j % 2 ? -factor : factor);
}

/* What C[i,j] is where every term counts, and where those with a zero in them do not. */
static void sums_of(const product *p, const double *a, const double *b, int64_t i, int64_t j, double *met,
                    double *skipped)
{
  *met = *skipped = 0;
  for (int64_t k = 0; k < p->a.cols; k++) {
    const double x = a[i * p->a.cols + k], y = b[k * p->b.cols + j];
    *met += x * y;
    *skipped += x != 0 && y != 0 ? x * y : 0;
  }
}

static double *zeros(int64_t count)
{
  double *all = calloc((size_t)count, sizeof *all);
  assert_non_null(all);
  return all;
}

static double *doubles_of(const esmm_matrix *m)
{
  double *all = zeros(m->rows * m->cols);
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    all[i] = th_decode(m->data, m->dtype, i);
  return all;
}

static bool same(double x, double y)
{
  return isnan(x) ? isnan(y) : x == y;
}

/* Every kernel gives one of the two sums; one that skips whole k's, where must_skip says so, the second. */
static void expect_sums(product *p, kernels *all, bool must_skip, const char *what)
{
  double *a = doubles_of(&p->a), *b = doubles_of(&p->b);
  const int64_t n = p->c.cols, elements = p->c.rows * n;
  double *met = zeros(elements), *skipped = zeros(elements);
  for (int64_t at = 0; at < elements; at++) {
    sums_of(p, a, b, at / n, at % n, &met[at], &skipped[at]);
    met[at] = th_round(p->c.dtype, met[at]);
    skipped[at] = th_round(p->c.dtype, skipped[at]);
  }
  send(p);
  for (int i = 0; i < all->count; i++) {
    if (!multiply(p, all->force[i], NULL))
      continue;
    all->ran[i]++;
    for (int64_t at = 0; at < elements; at++) {
      const double got = th_decode(p->c.data, p->c.dtype, at);
      if (!same(got, skipped[at]) && (!same(got, met[at]) || (must_skip && skips(all, i) && !is_half(all->name[i]))))
        fail_msg("%s, m %d, C of %s, %s: C[%d,%d] is %.9g, not %.9g", all->name[i], (int)p->c.rows,
                 esmm_dtype_str(p->c.dtype), what, (int)(at / n), (int)(at % n), got, skipped[at]);
    }
  }
  free(a);
  free(b);
  free(met);
  free(skipped);
}

static const int64_t HEIGHTS[] = {16, 130}; /* all kernels, and those that have tiles */
enum { SOME_N = 136, SOME_K = 72 };

static void ends_of_the_range(void **state)
{
  (void)state;
  for (int d = 0; d < 2; d++) {
    const esmm_dtype dtype = DTYPES[d];
    const double *factors = dtype == ESMM_F16 ? FACTORS_F16 : FACTORS_BF16;
    const int count = dtype == ESMM_F16 ? COUNT(FACTORS_F16) : COUNT(FACTORS_BF16);
    kernels all = kernels_of(dtype);
    for (int each = 0; each < 2 * 2 * count; each++) {
      product p = make_product(HEIGHTS[each % 2], SOME_N, SOME_K, dtype, each / 2 % 2 ? ESMM_F32 : dtype);
      char what[48];
      (void)snprintf(what, sizeof what, "B of %g", factors[each / 4]);
      fill_by_recipes(&p, factors[each / 4]);
      expect_sums(&p, &all, false, what);
      end_product(&p);
    }
    expect_all_ran(&all);
  }
}

/* Small integers; every other k of A is nothing but zeros, of both signs. */
static void fill_integers(product *p, uint64_t seed)
{
  th_rng rng = {seed};
  for (int64_t i = 0; i < p->a.rows; i++)
    for (int64_t k = 0; k < p->a.cols; k++) {
      const bool alive = k % 2 == 0 && th_below(&rng, 3) == 0;
      th_set(&p->a, i, k, alive ? (double)(1 + th_below(&rng, 4)) : th_below(&rng, 2) ? 0.0 : -0.0);
    }
  for (int64_t k = 0; k < p->b.rows; k++)
    for (int64_t j = 0; j < p->b.cols; j++)
      th_set(&p->b, k, j, (double)(1 + (k + 2 * j) % 4));
}

static void nan_and_inf_pass(void **state)
{
  (void)state;
  for (int d = 0; d < 2; d++) {
    kernels all = kernels_of(DTYPES[d]);
    for (int each = 0; each < 2 * 2; each++) {
      product p = make_product(HEIGHTS[each % 2], SOME_N, SOME_K, DTYPES[d], each / 2 ? ESMM_F32 : DTYPES[d]);
      const int64_t m = p.a.rows;
      fill_integers(&p, 3);
      th_set(&p.a, 0, 6, NAN); /* these meet a B without zeros */
      th_set(&p.a, m / 2, 0, INFINITY);
      th_set(&p.a, m - 1, SOME_K - 1, -INFINITY);
      expect_sums(&p, &all, true, "NaN and Inf in A");
      fill_integers(&p, 4);
      for (int64_t i = 0; i < m; i += 2) { /* these meet zeros in the other rows */
        th_set(&p.a, i, 10, 2);
        th_set(&p.a, i, 40, -3);
      }
      th_set(&p.b, 10, 3, NAN);
      th_set(&p.b, 40, SOME_N - 1, INFINITY);
      th_set(&p.b, 40, 0, -INFINITY);
      expect_sums(&p, &all, false, "NaN and Inf in B");
      end_product(&p);
    }
    expect_all_ran(&all);
  }
}

/* A k that has only zeros of either sign in all of A is never multiplied by who skips; but half_* fills groups of four
   up with zeros, and may. */
static void negative_zeros_are_skipped(void **state)
{
  (void)state;
  for (int d = 0; d < 2; d++) {
    kernels all = kernels_of(DTYPES[d]);
    for (int h = 0; h < 2; h++) {
      product p = make_product(HEIGHTS[h], SOME_N, SOME_K, DTYPES[d], ESMM_F32);
      fill_integers(&p, 5);
      for (int64_t k = 1; k < SOME_K; k += 2)
        for (int64_t j = 0; j < SOME_N; j++)
          th_set(&p.b, k, j, k % 4 == 1 ? NAN : INFINITY);
      expect_sums(&p, &all, true, "NaN where A is zero");
      fill_integers(&p, 6);
      for (int64_t i = 0; i < p.a.rows * p.a.cols; i++)
        th_encode(p.a.data, p.a.dtype, i, -0.0);
      expect_sums(&p, &all, true, "A of zeros");
      for (int i = 0; i < all.count; i++) {
        esmm_stats stats = {.size = sizeof stats};
        if (skips(&all, i) && multiply(&p, all.force[i], &stats) &&
            !(stats.strip_density_a == 0 && stats.joint_density == 0 && stats.flop_useful == 0))
          fail_msg("%s, A of negative zeros: strip density %g, joint density %g", all.name[i], stats.strip_density_a,
                   stats.joint_density);
      }
      end_product(&p);
    }
    expect_all_ran(&all);
  }
}

/* ---- the same bits, whoever runs beside ---- */

/* A value of about one, as bits. */
static uint16_t draw(esmm_dtype dtype, uint64_t random, bool positive)
{
  const unsigned fraction = dtype == ESMM_BF16 ? 7 : 10, bias = dtype == ESMM_BF16 ? 124 : 12;
  const unsigned sign = positive ? 0 : (unsigned)random & 1, exponent = bias + ((unsigned)(random >> 1) & 3);
  return (uint16_t)(sign << 15 | exponent << fraction | ((unsigned)(random >> 8) & ((1u << fraction) - 1)));
}

enum { STRIP128 = 128 }; /* rows of a strip of A, columns of a tile of B */

typedef struct filling {
  double density; /* of strips, or tiles; those that are alive have no zeros */
  int64_t rows;   /* A: from this row on all is zero */
  bool positive;
} filling;

static void fill(esmm_matrix *m, esmm_operand operand, uint64_t seed, const filling *f)
{
  uint16_t *to = m->data;
  th_rng rng = {seed};
  const int64_t strips = ((operand == ESMM_OPERAND_A ? m->rows : m->cols) + STRIP128 - 1) / STRIP128;
  const int64_t k = operand == ESMM_OPERAND_A ? m->cols : m->rows;
  bool *there = calloc((size_t)(strips * k), sizeof *there);
  assert_non_null(there);
  for (int64_t s = 0; s < strips * k; s++)
    there[s] = th_unit(&rng) < f->density;
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      const bool mine =
          operand == ESMM_OPERAND_A ? i < f->rows && there[i / STRIP128 * k + j] : there[j / STRIP128 * k + i];
      const uint64_t random = th_next(&rng);
      to[i * m->cols + j] = mine ? draw(m->dtype, random, f->positive) : 0;
    }
  free(there);
}

/* Rows of C in float64, with their sums of magnitudes. */
enum { CHECKED_ROWS = 6 };
typedef struct oracle {
  int64_t row[CHECKED_ROWS], n;
  double *sum, *magnitude; /* [CHECKED_ROWS][n] */
} oracle;

static oracle make_oracle(const product *p)
{
  const int64_t m = p->a.rows, n = p->b.cols, rows[CHECKED_ROWS] = {0, 1, m / 3, m / 2, m - 2, m - 1};
  oracle o = {.n = n, .sum = zeros(CHECKED_ROWS * n), .magnitude = zeros(CHECKED_ROWS * n)};
  double *line = zeros(n);
  memcpy(o.row, rows, sizeof rows);
  for (int64_t k = 0; k < p->b.rows; k++) {
    for (int64_t j = 0; j < n; j++)
      line[j] = th_decode(p->b.data, p->b.dtype, k * n + j);
    for (int64_t r = 0; r < CHECKED_ROWS; r++) {
      const double x = th_get(&p->a, rows[r], k);
      for (int64_t j = 0; x != 0 && j < n; j++) {
        o.sum[r * n + j] += x * line[j];
        o.magnitude[r * n + j] += fabs(x * line[j]);
      }
    }
  }
  free(line);
  return o;
}

static void end_oracle(oracle *o)
{
  free(o->sum);
  free(o->magnitude);
}

/* The largest error of those rows. Fails where an element is off by more than sums in fp32 can be. */
static double largest_error(const product *p, const oracle *o, const char *what)
{
  double worst = 0;
  for (int64_t at = 0; at < CHECKED_ROWS * o->n; at++) {
    const int64_t i = o->row[at / o->n], j = at % o->n;
    const double got = th_get(&p->c, i, j), want = o->sum[at], error = fabs(got - want);
    const double in_sum = (double)(p->b.rows + 20) * th_roundoff(ESMM_F32) * o->magnitude[at];
    if (!(error <= in_sum + th_roundoff(p->c.dtype) * (fabs(want) + in_sum)))
      fail_msg("%s: C[%d,%d] is %.9g, not %.9g", what, (int)i, (int)j, got, want);
    worst = fmax(worst, error);
  }
  return worst;
}

static void *copy_of(const esmm_matrix *m)
{
  void *copy = malloc(th_matrix_bytes(m));
  assert_non_null(copy);
  memcpy(copy, m->data, th_matrix_bytes(m));
  return copy;
}

/* Runs again and again: the same bits, and the right ones. False: the kernel does not take it. first: free it. */
static bool repeat(product *p, const oracle *o, const char *force, const char *what, void **first)
{
  enum { CALLS = 5 };
  *first = NULL;
  for (int i = 0; i < CALLS; i++) {
    if (!multiply(p, force, NULL))
      return false;
    if (!*first) {
      (void)largest_error(p, o, what);
      *first = copy_of(&p->c);
    }
    if (memcmp(*first, p->c.data, th_matrix_bytes(&p->c)) != 0)
      fail_msg("%s: call %d gave other bits", what, i + 1);
  }
  return true;
}

/* Parts along k, or blocks that meet: every kernel gives the same bits each time. */
static void every_kernel_repeats(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{16, 4096, 4096}, {130, 1024, 4096}, {512, 4096, 4096}};
  for (int d = 0; d < 2; d++) {
    kernels all = kernels_of(DTYPES[d]);
    for (int each = 0; each < 2 * COUNT(sizes); each++) {
      const int64_t m = sizes[each / 2][0];
      product p = make_product(m, sizes[each / 2][1], sizes[each / 2][2], DTYPES[d], ESMM_F32);
      fill(&p.a, ESMM_OPERAND_A, 11, &(filling){.density = each % 2 ? 0.4 : 1, .rows = m});
      fill(&p.b, ESMM_OPERAND_B, 12, &(filling){.density = each % 2 ? 0.5 : 1});
      send(&p);
      oracle o = make_oracle(&p);
      for (int i = 0; i < all.count; i++) {
        char what[96];
        void *first = NULL;
        (void)snprintf(what, sizeof what, "%s, m %d, %s", all.name[i], (int)m, each % 2 ? "zeros" : "no zeros");
        all.ran[i] += repeat(&p, &o, all.force[i], what, &first);
        free(first);
      }
      end_oracle(&o);
      end_product(&p);
    }
    expect_all_ran(&all);
  }
}

/* What A may be where its zeros decide. */
static const filling FILLINGS[] = {{.density = 1, .rows = INT64_MAX},
                                   {.density = 0.1, .rows = INT64_MAX},
                                   {.density = 0, .rows = INT64_MAX},
                                   {.density = 1, .rows = 300}};
static const char *const FILLING_NAMES[] = {"no zeros", "strips of 10 %", "zeros only", "300 rows"};
enum { FILLING_COUNT = sizeof FILLINGS / sizeof *FILLINGS };

/* One B, and A's of all kinds, with what the plan's kernels make of them. */
typedef struct decided {
  product p;
  esmm_matrix a[FILLING_COUNT], da[FILLING_COUNT];
  void *want[FILLING_COUNT];
  char kernel[FILLING_COUNT][32];
} decided;

static void decide(decided *x, int which, const char *what)
{
  esmm_stats stats = {.size = sizeof stats};
  x->p.a = x->a[which];
  x->p.da = x->da[which];
  put(&x->p.a, &x->p.da);
  oracle o = make_oracle(&x->p);
  (void)repeat(&x->p, &o, NULL, what, &x->want[which]);
  end_oracle(&o);
  assert_true(multiply(&x->p, NULL, &stats)); /* statistics change nothing */
  if (memcmp(x->want[which], x->p.c.data, th_matrix_bytes(&x->p.c)) != 0)
    fail_msg("%s: with statistics other bits", what);
  (void)snprintf(x->kernel[which], sizeof x->kernel[which], "%s", stats.kernel);
  print_message("# %s: %s, strip density %.3f, %s\n", what, stats.kernel, stats.strip_density_a, stats.reason);
}

/* Two contexts, each on a stream of its own, at once, over all A's again and again. */
static void run_beside(decided *x, const char *what)
{
  enum { CALLS = 4 * FILLING_COUNT };
  esmm_ctx *both[2] = {gpu, th_ctx_on(device_name, 1)};
  memcpy(both[1]->cost, gpu->cost, sizeof gpu->cost);
  void *streams[2] = {new_stream(), new_stream()};
  esmm_matrix c[CALLS], shape = x->p.c;
  shape.data = NULL;
  for (int i = 0; i < CALLS; i++)
    c[i] = to_device(&shape);
  for (int i = 0; i < CALLS; i++) {
    expect_ok(both[i % 2],
              th_matmul_on(both[i % 2], streams[i % 2], &x->da[i / 2 % FILLING_COUNT], x->p.w, &c[i], NULL));
  }
  for (int i = 0; i < 2; i++)
    assert_int_equal(calls.stream_synchronize(streams[i]), 0);
  for (int i = 0; i < CALLS; i++) {
    const int which = i / 2 % FILLING_COUNT;
    get(&c[i], &x->p.c);
    if (memcmp(x->want[which], x->p.c.data, th_matrix_bytes(&x->p.c)) != 0)
      fail_msg("%s, %s, %s: context %d gave other bits beside another", what, FILLING_NAMES[which], x->kernel[which],
               i % 2);
    esmm_memory_free(gpu, c[i].data);
  }
  for (int i = 0; i < 2; i++)
    assert_int_equal(calls.stream_destroy(streams[i]), 0);
  esmm_ctx_free(both[1]);
}

/* One graph, whose A changes between its runs: the device chooses anew each time. */
static void run_as_graph(decided *x, const char *what)
{
  void *stream = new_stream(), *graph = NULL, *exec = NULL;
  esmm_matrix *dc = &x->p.dc, *da = &x->da[0];
  expect_ok(gpu, th_matmul_on(gpu, stream, da, x->p.w, dc, NULL));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  assert_int_equal(calls.begin_capture(stream, 0), 0);
  const esmm_status status = th_matmul_on(gpu, stream, da, x->p.w, dc, NULL);
  const int ended = calls.end_capture(stream, &graph);
  if (status != ESMM_OK || ended != 0 || !graph)
    fail_msg("%s: captured with %s (%s), cuStreamEndCapture %d", what, esmm_status_str(status), esmm_ctx_error(gpu),
             ended);
  assert_int_equal(calls.instantiate(&exec, graph, 0), 0);
  for (int i = 0; i < 2 * FILLING_COUNT; i++) {
    const int which = i % FILLING_COUNT;
    put(&x->a[which], da);
    memset(x->p.c.data, 0xff, th_matrix_bytes(&x->p.c));
    put(&x->p.c, dc);
    assert_int_equal(calls.launch(exec, stream), 0);
    assert_int_equal(calls.stream_synchronize(stream), 0);
    get(dc, &x->p.c);
    x->p.a = x->a[which];
    oracle o = make_oracle(&x->p);
    (void)largest_error(&x->p, &o, what);
    end_oracle(&o);
    if (memcmp(x->want[which], x->p.c.data, th_matrix_bytes(&x->p.c)) != 0)
      fail_msg("%s, %s, %s: the graph gave other bits", what, FILLING_NAMES[which], x->kernel[which]);
  }
  put(&x->a[0], da);
  assert_int_equal(calls.exec_destroy(exec), 0);
  assert_int_equal(calls.graph_destroy(graph), 0);
  assert_int_equal(calls.stream_destroy(stream), 0);
}

/* ---- costs that leave the choice to A ---- */

static int index_of(const char *kernel)
{
  int i = 0;
  while (i < esmm_registry_count() && strcmp(esmm_registry_at(i)->name, kernel) != 0)
    i++;
  return i < esmm_registry_count() ? i : -1;
}

/*
 * Gives the plan's context costs by which joint_*_sm90a and its partner are level where half of A's strips are alive,
 * and far cheaper than all others: then it is always the device that chooses between those two. False: this GPU has no
 * such pair.
 */
static bool let_a_decide(const product *p, const char **dense, const char **joint)
{
  const bool bf16 = p->a.dtype == ESMM_BF16;
  *dense = bf16 ? "dense_bf16_sm90a" : "dense_f16_sm90a";
  *joint = bf16 ? "joint_bf16_sm90a" : "joint_f16_sm90a";
  const int of_dense = index_of(*dense), of_joint = index_of(*joint);
  if (of_joint < 0 || !esmm_kernel_available(gpu, esmm_registry_at(of_joint), NULL, 0))
    return false;
  esmm_problem problem = {
      .ctx = gpu, .m = p->c.rows, .n = p->c.cols, .k = p->a.cols, .a = p->da, .c = p->dc, .w = p->w, .alpha = 1};
  for (int i = 0; i < ESMM_SAMPLE_HEIGHTS; i++) {
    problem.sample.strip[i] = 0.5;
    problem.sample.joint[i] = 0.5 * esmm_cuda_of(p->w)->tile_density;
  }
  for (int kernel = 0; kernel < esmm_registry_count(); kernel++)
    for (int i = 0; i < ESMM_COST_TERMS; i++) /* so slow that asking costs nothing */
      gpu->cost[kernel][i] *= kernel == of_joint ? 1e3 : kernel == of_dense ? 0 : 1e7;
  gpu->cost[of_joint][ESMM_COST_TERMS - 1] = 0; /* what skipping costs in any case */
  int64_t variant;
  gpu->cost[of_dense][ESMM_COST_TERMS - 1] = esmm_plan_seconds(&problem, of_joint, NULL, &variant);
  return true;
}

static void decide_all(decided *x, const char *what)
{
  for (int i = 0; i < FILLING_COUNT; i++) {
    char of_a[200];
    (void)snprintf(of_a, sizeof of_a, "%s, A %s", what, FILLING_NAMES[i]);
    decide(x, i, of_a);
  }
  run_beside(x, what);
  run_as_graph(x, what);
}

static void forget(decided *x)
{
  for (int i = 0; i < FILLING_COUNT; i++) {
    free(x->want[i]);
    x->want[i] = NULL;
  }
}

/* As the plan has it, and where it cannot know. */
static void check_choices(const int64_t *size, esmm_dtype dtype, double density_b)
{
  decided x = {.p = make_product(size[0], size[1], size[2], dtype, density_b < 1 ? ESMM_F32 : dtype)};
  const product mine = x.p;
  char what[120];
  (void)snprintf(what, sizeof what, "%s %d x %d x %d, B %g", esmm_dtype_str(dtype), (int)size[0], (int)size[2],
                 (int)size[1], density_b);
  fill(&x.p.b, ESMM_OPERAND_B, 21, &(filling){.density = density_b});
  for (int i = 0; i < FILLING_COUNT; i++) {
    x.a[i] = i > 0 ? host_matrix(size[0], size[2], dtype) : mine.a;
    x.da[i] = i > 0 ? to_device(&x.a[i]) : mine.da;
    fill(&x.a[i], ESMM_OPERAND_A, 22 + (uint64_t)i, &FILLINGS[i]);
  }
  send(&x.p);
  decide_all(&x, what);
  forget(&x);
  const char *dense, *joint;
  double cost[ESMM_MAX_KERNELS][ESMM_COST_TERMS];
  memcpy(cost, gpu->cost, sizeof cost);
  if (let_a_decide(&x.p, &dense, &joint)) {
    decide_all(&x, what);
    if (strcmp(x.kernel[0], dense) != 0 || strcmp(x.kernel[1], joint) != 0 || strcmp(x.kernel[2], joint) != 0)
      fail_msg("%s: %s ran without zeros, %s on strips of 10 %%, %s on zeros", what, x.kernel[0], x.kernel[1],
               x.kernel[2]);
    memcpy(gpu->cost, cost, sizeof cost);
    forget(&x);
  }
  for (int i = 1; i < FILLING_COUNT; i++) {
    free(x.a[i].data);
    esmm_memory_free(gpu, x.da[i].data);
  }
  x.p.a = mine.a;
  x.p.da = mine.da;
  end_product(&x.p);
}

static void choices_of_the_device(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{1024, 1024, 2048}, {1024, 2048, 1024}, {512, 4096, 4096}, {4096, 4096, 4096}};
  for (int d = 0; d < 2; d++)
    for (int i = 0; i < 2 * COUNT(sizes); i++)
      check_choices(sizes[i / 2], DTYPES[d], i % 2 ? 0.5 : 1);
}

/* ---- weights in a file ---- */

static void weights_from_a_file(void **state)
{
  (void)state;
  static const int64_t heights[] = {9, 200};
  char path[] = "/tmp/esmm-cuda16-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  for (int d = 0; d < 2; d++) {
    kernels all = kernels_of(DTYPES[d]);
    for (int each = 0; each < 2 * 2; each++) {
      product p = make_product(heights[each % 2], 333, 520, DTYPES[d], DTYPES[d]);
      fill(&p.a, ESMM_OPERAND_A, 31, &(filling){.density = 0.5, .rows = 200});
      fill(&p.b, ESMM_OPERAND_B, 32, &(filling){.density = each / 2 ? 0.5 : 1});
      send(&p);
      esmm_weights *made = p.w, *loaded = NULL;
      expect_ok(gpu, esmm_weights_save(gpu, made, path));
      expect_ok(gpu, esmm_weights_load(gpu, path, &loaded));
      esmm_weights_info of_made = {.size = sizeof of_made}, of_loaded = of_made;
      assert_int_equal(esmm_weights_get_info(made, &of_made), ESMM_OK);
      assert_int_equal(esmm_weights_get_info(loaded, &of_loaded), ESMM_OK);
      assert_true(of_made.dtype == of_loaded.dtype && of_made.bytes == of_loaded.bytes);
      assert_true(of_made.element_density == of_loaded.element_density);
      assert_true(of_made.strip_density == of_loaded.strip_density);
      for (int i = 0; i < all.count; i++) {
        p.w = made;
        if (!multiply(&p, all.force[i], NULL))
          continue;
        void *first = copy_of(&p.c);
        p.w = loaded;
        assert_true(multiply(&p, all.force[i], NULL));
        if (memcmp(first, p.c.data, th_matrix_bytes(&p.c)) != 0)
          fail_msg("%s, m %d: loaded weights give other bits", all.name[i], (int)p.a.rows);
        free(first);
        all.ran[i]++;
      }
      esmm_weights_free(made);
      p.w = loaded;
      end_product(&p);
    }
    expect_all_ran(&all);
  }
  unlink(path);
}

/* ---- errors ---- */

/*
 * Sums in tensor cores cut off what does not fit, cuBLAS's as ours: at a size that fills the GPU, where cuBLAS does not
 * split k either, no kernel may be off by more than twice as much.
 */
static void errors_beside_cublas(void **state)
{
  (void)state;
  enum { SIZE = 2048, LONG = 4096 };
  int compared = 0;
  for (int d = 0; d < 2; d++) {
    kernels all = kernels_of(DTYPES[d]);
    int cublas = 0;
    while (cublas < all.count && strncmp(all.name[cublas], "cublas", 6) != 0)
      cublas++;
    for (int each = 0; cublas < all.count && each < 2 * 2; each++) {
      product p = make_product(SIZE, SIZE, LONG, DTYPES[d], ESMM_F32);
      fill(&p.a, ESMM_OPERAND_A, 41, &(filling){.density = each / 2 ? 0.5 : 1, .rows = SIZE, .positive = each % 2});
      fill(&p.b, ESMM_OPERAND_B, 42, &(filling){.density = 1, .positive = each % 2});
      send(&p);
      const char *of = each % 2 ? "positive" : "mixed signs", *zeros_of_a = each / 2 ? "half" : "no";
      if (!multiply(&p, all.force[cublas], NULL))
        fail_msg("%s does not take a plain product", all.name[cublas]);
      oracle o = make_oracle(&p);
      const double measure = largest_error(&p, &o, all.name[cublas]);
      for (int i = 0; i < all.count; i++) {
        if (!multiply(&p, all.force[i], NULL))
          continue;
        const double error = largest_error(&p, &o, all.name[i]);
        print_message("# %-18s %s, %s zeros: largest error %.3g, %.2f times cuBLAS's\n", all.name[i], of, zeros_of_a,
                      error, error / measure);
        if (!(error <= 2 * measure))
          fail_msg("%s, %s, %s zeros: largest error %.3g, that of cuBLAS is %.3g", all.name[i], of, zeros_of_a, error,
                   measure);
        compared++;
      }
      end_oracle(&o);
      end_product(&p);
    }
  }
  if (compared == 0)
    skip(); /* no cuBLAS here */
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda16", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ends_of_the_range),          cmocka_unit_test(nan_and_inf_pass),
      cmocka_unit_test(negative_zeros_are_skipped), cmocka_unit_test(every_kernel_repeats),
      cmocka_unit_test(choices_of_the_device),      cmocka_unit_test(weights_from_a_file),
      cmocka_unit_test(errors_beside_cublas),
  };
  status = cmocka_run_group_tests_name("cuda16", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
