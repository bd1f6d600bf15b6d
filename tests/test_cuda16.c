/*
 * test_cuda16.c: operands of 16 bits on a GPU: values at the ends of their range, shapes and lines that no tile fits,
 * zeros in both operands, choices that the device makes, weights in a file, errors beside cuBLAS's.
 *
 * Each test runs both dtypes and every kernel of the GPU that takes them, the plan's own choice last. Operands lie in
 * device memory, and are moved by the driver's own copies.
 */
#include "gpu.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const esmm_dtype DTYPES[] = {ESMM_BF16, ESMM_F16};

/* ---- kernels ---- */

/* Those of this GPU for operands of one dtype; the last is the plan. */
typedef struct kernels {
  int count;
  const char *force[65]; /* NULL: the plan */
  const char *name[65];
  unsigned flags[65];
  int64_t ran[65];
} kernels;

static kernels kernels_of(esmm_dtype dtype)
{
  kernels all = {0};
  char part[8];
  (void)snprintf(part, sizeof part, "_%s", esmm_dtype_str(dtype));
  for (int i = 0; i < esmm_kernel_count() && all.count < 64; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (!info.available || !strstr(info.name, part))
      continue;
    all.flags[all.count] = info.flags;
    all.force[all.count] = all.name[all.count] = info.name;
    all.count++;
  }
  assert_true(all.count > 0);
  all.name[all.count++] = "auto";
  return all;
}

static bool skips(const kernels *all, int i)
{
  return all->flags[i] & ESMM_KERNEL_SKIPS;
}

static void expect_all_ran(const kernels *all)
{
  for (int i = 0; i < all->count; i++)
    if (all->ran[i] == 0)
      fail_msg("%s ran none of these products", all->name[i]);
}

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

static void put(const esmm_matrix *host, const esmm_matrix *device)
{
  assert_int_equal(calls.to_device((uintptr_t)device->data, host->data, th_matrix_bytes(host)), 0);
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

static const recipe RECIPES_F16[] = {
    {{32768, 32768}},         /* Inf in fp16, 65536 in fp32 */
    {{-32768, -32768}},       /* -Inf */
    {{65504}},                /* the largest */
    {{65504, 8}},             /* rounds down to it, */
    {{65504, 16}},            /* and this one up */
    {{-65504, -16}},          /* */
    {{60000, 60000, -60000}}, /* beyond it and back */
    {{0x1p-24}},              /* the smallest */
    {{-0x1p-24}},             /* */
    {{0x1p-24, 0, 0x1p-23}},  /* */
    {{-0.0, -0.0, -0.0}},     /* zeros all */
};
static const double FACTORS_F16[] = {1, 0.5, 1024, 0x1p-24, 65504};

static const recipe RECIPES_BF16[] = {
    {{0x1p127}},               /* in range, */
    {{0x1p127, 0x1p127}},      /* and not, in fp32 neither */
    {{-0x1p127, -0x1p127}},    /* */
    {{0x1.fep127}},            /* the largest */
    {{0x1.fep127, 0x1p118}},   /* rounds down to it, */
    {{0x1.fep127, 0x1p119}},   /* and this one up: Inf, but not in fp32 */
    {{-0x1.fep127, -0x1p119}}, /* */
    {{0x1p-133}},              /* the smallest */
    {{-0x1p-133}},             /* */
    {{0x1p-133, 0, 0x1p-132}}, /* */
    {{-0.0, -0.0, -0.0}},      /* zeros all */
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

static double *doubles_of(const esmm_matrix *m)
{
  double *all = calloc((size_t)(m->rows * m->cols), sizeof *all);
  assert_non_null(all);
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    all[i] = th_decode(m->data, m->dtype, i);
  return all;
}

static bool same(double x, double y)
{
  return isnan(x) ? isnan(y) : x == y;
}

/* Every kernel gives one of the two sums; one that skips, where must_skip says so, the second. */
static void expect_sums(product *p, kernels *all, bool must_skip, const char *what)
{
  double *a = doubles_of(&p->a), *b = doubles_of(&p->b);
  const int64_t n = p->c.cols, elements = p->c.rows * n;
  double *met = calloc((size_t)elements, sizeof *met), *skipped = calloc((size_t)elements, sizeof *skipped);
  assert_true(met && skipped);
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
      if (!same(got, skipped[at]) && (!same(got, met[at]) || (must_skip && skips(all, i))))
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

/* A k that has only zeros of either sign in all of A is never multiplied by who skips. */
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

/* ---- ragged shapes: sums of small integers, which are exact ---- */

enum { TALL = 128, ROOM = 8 << 20 }; /* rows of a strip and columns of a tile; bytes of the largest matrix here */

/* Values, and their sums, of one shape. */
typedef struct shape {
  int64_t m, n, k;
  int8_t *a, *b;
  int32_t *sum;
} shape;

typedef enum zeros {
  NO_ZEROS,
  ZEROS_OF_A,    /* some strips of A are empty, some full */
  ZEROS_OF_BOTH, /* half the k's of a strip of A, and of a tile of B */
  ZERO_KINDS
} zeros;

static double strip_density(zeros kind, int64_t strip)
{
  static const double of_a[] = {0.3, 0, 1};
  return kind == NO_ZEROS ? 1 : kind == ZEROS_OF_A ? of_a[strip % 3] : 0.5;
}

/* Is k alive in that strip? The same for all its lines. */
static bool alive(uint64_t seed, int64_t strip, int64_t k, double density)
{
  th_rng rng = {seed + (uint64_t)(strip * 100003 + k) * 0x9e3779b97f4a7c15u};
  return th_unit(&rng) < density;
}

static shape make_shape(int64_t m, int64_t n, int64_t k, zeros kind, uint64_t seed)
{
  shape s = {m, n, k, calloc((size_t)(m * k), 1), calloc((size_t)(k * n), 1), calloc((size_t)(m * n), 4)};
  assert_true(s.a && s.b && s.sum);
  th_rng rng = {seed};
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++)
      if (alive(seed, i / TALL, p, strip_density(kind, i / TALL)))
        s.a[i * k + p] = (int8_t)(th_below(&rng, 9) - 4);
  for (int64_t p = 0; p < k; p++)
    for (int64_t j = 0; j < n; j++)
      if (kind != ZEROS_OF_BOTH || alive(seed + 1, j / TALL, p, 0.5))
        s.b[p * n + j] = (int8_t)(th_below(&rng, 9) - 4);
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++) {
      const int32_t x = s.a[i * k + p];
      for (int64_t j = 0; x && j < n; j++)
        s.sum[i * n + j] += x * s.b[p * n + j];
    }
  return s;
}

static void end_shape(shape *s)
{
  free(s->a);
  free(s->b);
  free(s->sum);
}

/* How operands lie in memory. */
typedef struct layout {
  esmm_order a, b, c;
  bool odd;   /* lines are not a multiple of 16 bytes apart, */
  bool moved; /* and the first does not begin at one */
  esmm_dtype dtype_c;
  int epilogue;
} layout;

static th_device_arena device_a, device_c, device_bias;
static unsigned char *room_a, *room_c, *room_want, *room_before;

/* A matrix in a room, NaN in every byte. */
static esmm_matrix lay_out(unsigned char *room, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order,
                           const layout *l)
{
  const int64_t length = order == ESMM_ROW_MAJOR ? cols : rows;
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = dtype, .order = order};
  m.ld = l->odd ? length + 1 : (length + 7) / 8 * 8 + 8;
  m.data = room + (l->moved ? esmm_dtype_size(dtype) : 0);
  assert_true(th_matrix_bytes(&m) + 256 <= ROOM);
  memset(m.data, 0xff, th_matrix_bytes(&m));
  return m;
}

static esmm_matrix on_device(const esmm_matrix *host, th_device_arena *arena)
{
  esmm_matrix m = *host;
  m.place = ESMM_DEVICE;
  m.device = ordinal;
  m.data = th_device_put(arena, host->data, th_matrix_bytes(host));
  return m;
}

/* Small integers as bits; some zeros are negative. */
static void encode(const int8_t *values, esmm_matrix *m)
{
  uint16_t code[9], *to = m->data;
  for (int v = -4; v <= 4; v++)
    th_encode(code, m->dtype, v + 4, v);
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      const int v = values[i * m->cols + j];
      to[th_index(m, i, j)] = v == 0 && (i + j) % 3 == 0 ? 0x8000 : code[v + 4];
    }
}

typedef struct epilogue {
  float alpha, beta;
  bool bias;
  esmm_activation activation;
} epilogue;

static const epilogue EPILOGUES[] = {{1, 0, false, ESMM_ACT_NONE},
                                     {0.5f, 2, false, ESMM_ACT_NONE},
                                     {1, 0, true, ESMM_ACT_RELU},
                                     {-1, 1, true, ESMM_ACT_RELU}};

static float bias_at(int64_t j)
{
  return (float)(j % 7 - 3);
}

/* C before the product, and after it. */
static void expected(const shape *s, const epilogue *e, esmm_matrix *before, esmm_matrix *want)
{
  for (int64_t i = 0; e->beta != 0 && i < s->m; i++) /* else C stays NaN, and must not be read */
    for (int64_t j = 0; j < s->n; j++)
      th_set(before, i, j, (double)((i + 3 * j) % 9 - 4));
  memcpy(want->data, before->data, th_matrix_bytes(before));
  for (int64_t i = 0; i < s->m; i++)
    for (int64_t j = 0; j < s->n; j++) {
      double x = (double)e->alpha * s->sum[i * s->n + j];
      if (e->beta != 0)
        x += (double)e->beta * (double)((i + 3 * j) % 9 - 4);
      if (e->bias)
        x += (double)bias_at(j);
      th_set(want, i, j, e->activation == ESMM_ACT_RELU && !(x > 0) ? 0 : x);
    }
}

/* got and want differ in a byte: that is right only for zeros of either sign. */
static void find_difference(esmm_matrix *got, const esmm_matrix *want, const char *what)
{
  for (int64_t i = 0; i < got->rows; i++)
    for (int64_t j = 0; j < got->cols; j++) {
      const double x = th_get(got, i, j), y = th_get(want, i, j);
      if (!(x == y))
        fail_msg("%s: C[%d,%d] is %.9g, not %.9g", what, (int)i, (int)j, x, y);
      th_set(got, i, j, y);
    }
  if (memcmp(got->data, want->data, th_matrix_bytes(got)) != 0)
    fail_msg("%s: what lies between the lines of C was written", what);
}

static void check_ragged(const shape *s, const layout *l, esmm_dtype dtype, const esmm_weights *w, kernels *all)
{
  const epilogue *e = &EPILOGUES[l->epilogue];
  esmm_matrix a = lay_out(room_a, s->m, s->k, dtype, l->a, l), c = lay_out(room_c, s->m, s->n, l->dtype_c, l->c, l);
  esmm_matrix before = lay_out(room_before, s->m, s->n, l->dtype_c, l->c, l), want = before;
  want.data = room_want;
  encode(s->a, &a);
  expected(s, e, &before, &want);
  const esmm_matrix da = on_device(&a, &device_a);
  for (int i = 0; i < all->count; i++) {
    char what[240];
    (void)snprintf(what, sizeof what,
                   "%s, %d x %d x %d, A of order %d, C of order %d and %s, odd %d, moved %d, epilogue %d", all->name[i],
                   (int)s->m, (int)s->k, (int)s->n, (int)l->a, (int)l->c, esmm_dtype_str(l->dtype_c), l->odd, l->moved,
                   l->epilogue);
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .force = all->force[i],
                                   .alpha = e->alpha == 1 ? NULL : &e->alpha,
                                   .beta = e->beta == 0 ? NULL : &e->beta,
                                   .bias = e->bias ? (const float *)((char *)device_bias.base + device_bias.at) : NULL,
                                   .activation = e->activation};
    esmm_matrix dc = on_device(&before, &device_c);
    const esmm_status status = esmm_matmul(gpu, &da, w, &dc, &opts, NULL);
    if (status == ESMM_ERR_UNSUPPORTED && all->force[i])
      continue;
    if (status != ESMM_OK)
      fail_msg("%s: %s: %s", what, esmm_status_str(status), esmm_ctx_error(gpu));
    all->ran[i]++;
    if (!th_device_get(&device_c, c.data))
      fail_msg("%s: memory around C was written", what);
    if (memcmp(c.data, want.data, th_matrix_bytes(&c)) != 0)
      find_difference(&c, &want, what);
  }
}

/* A shape in some of its 32 layouts; epilogues and B's order take turns. */
static void check_shape(const shape *s, int layouts, uint64_t turn, kernels all[2])
{
  for (int d = 0; d < 2; d++) {
    const esmm_order order_b = turn % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    esmm_matrix b = lay_out(room_a, s->k, s->n, DTYPES[d], order_b, &(layout){.odd = turn % 3 == 0});
    esmm_weights *w = NULL;
    encode(s->b, &b);
    expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
    for (int i = 0; i < layouts; i++) {
      const int bits = layouts == 32 ? i : (int)((turn + (uint64_t)i * 13) % 32);
      const layout l = {.a = bits & 1 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                        .odd = bits & 2,
                        .c = bits & 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                        .dtype_c = bits & 8 ? ESMM_F32 : DTYPES[d],
                        .moved = bits & 16,
                        .epilogue = (int)((turn + (uint64_t)i + (uint64_t)i / 4) % (uint64_t)COUNT(EPILOGUES))};
      check_ragged(s, &l, DTYPES[d], w, &all[d]);
    }
    esmm_weights_free(w);
  }
}

static void *room(void)
{
  void *p = aligned_alloc(256, ROOM);
  assert_non_null(p);
  return p;
}

static void open_rooms(void)
{
  float bias[2048];
  for (int64_t j = 0; j < 2048; j++)
    bias[j] = bias_at(j);
  room_a = room();
  room_c = room();
  room_want = room();
  room_before = room();
  th_device_arena_create(&device_a, gpu, ROOM);
  th_device_arena_create(&device_c, gpu, ROOM);
  th_device_arena_create(&device_bias, gpu, sizeof bias);
  (void)th_device_put(&device_bias, bias, sizeof bias);
}

static void close_rooms(void)
{
  th_device_arena_free(&device_a);
  th_device_arena_free(&device_c);
  th_device_arena_free(&device_bias);
  free(room_a);
  free(room_c);
  free(room_want);
  free(room_before);
}

static const int64_t RAGGED_N[] = {8, 129, 255, 257, 513}, RAGGED_K[] = {8, 63, 65, 1000};

static void check_heights(const int64_t *heights, int count, kernels all[2])
{
  uint64_t turn = 0;
  open_rooms();
  for (int i = 0; i < count; i++)
    for (int j = 0; j < COUNT(RAGGED_N); j++)
      for (int p = 0; p < COUNT(RAGGED_K); p++, turn++) {
        shape s = make_shape(heights[i], RAGGED_N[j], RAGGED_K[p], (zeros)(turn % ZERO_KINDS), 100 + turn);
        check_shape(&s, 16, turn, all);
        end_shape(&s);
      }
  close_rooms();
}

static bool is_decode(const char *name)
{
  return strncmp(name, "decode", 6) == 0;
}

static void ragged_shapes(void **state)
{
  (void)state;
  static const int64_t heights[] = {17, 127, 128, 129, 257};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  check_heights(heights, COUNT(heights), all);
  for (int d = 0; d < 2; d++)
    for (int i = 0; i < all[d].count; i++)
      if ((all[d].ran[i] == 0) != is_decode(all[d].name[i]))
        fail_msg("%s ran %d of these products", all[d].name[i], (int)all[d].ran[i]);
}

static void ragged_shapes_of_few_rows(void **state)
{
  (void)state;
  static const int64_t heights[] = {1, 2, 7, 8, 9, 16};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  check_heights(heights, COUNT(heights), all);
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* Tiles of B that lack half the k's, strips of A that do: kernels that skip look at both. */
static void zeros_of_both_operands(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{401, 1064, 1000}, {1030, 640, 2072}, {16, 1500, 1032}};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  open_rooms();
  for (int i = 0; i < COUNT(sizes); i++)
    for (int kind = ZEROS_OF_A; kind < ZERO_KINDS; kind++) {
      shape s = make_shape(sizes[i][0], sizes[i][1], sizes[i][2], (zeros)kind, 900 + (uint64_t)i);
      check_shape(&s, 4, (uint64_t)(i * 5 + kind), all);
      end_shape(&s);
    }
  close_rooms();
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* ---- the same bits, whoever runs beside ---- */

/* A value of about one, as bits. */
static uint16_t draw(esmm_dtype dtype, uint64_t random, bool positive)
{
  const unsigned fraction = dtype == ESMM_BF16 ? 7 : 10, bias = dtype == ESMM_BF16 ? 124 : 12;
  const unsigned sign = positive ? 0 : (unsigned)random & 1, exponent = bias + ((unsigned)(random >> 1) & 3);
  return (uint16_t)(sign << 15 | exponent << fraction | ((unsigned)(random >> 8) & ((1u << fraction) - 1)));
}

/* Zeros by strips of 128 rows (A) or columns (B); rows from `full` on have none of the others. */
typedef struct filling {
  double density;
  int64_t rows; /* A: from this row on all is zero */
  bool positive;
} filling;

static void fill(esmm_matrix *m, esmm_operand operand, uint64_t seed, const filling *f)
{
  uint16_t *to = m->data;
  th_rng rng = {seed};
  const int64_t strips = ((operand == ESMM_OPERAND_A ? m->rows : m->cols) + TALL - 1) / TALL;
  const int64_t k = operand == ESMM_OPERAND_A ? m->cols : m->rows;
  bool *there = calloc((size_t)(strips * k), sizeof *there);
  assert_non_null(there);
  for (int64_t s = 0; s < strips * k; s++)
    there[s] = th_unit(&rng) < f->density;
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      const bool mine = operand == ESMM_OPERAND_A ? i < f->rows && there[i / TALL * k + j] : there[j / TALL * k + i];
      const uint64_t random = th_next(&rng);
      to[i * m->cols + j] = mine ? draw(m->dtype, random, f->positive) : 0;
    }
  free(there);
}

/* The largest error of row i of C. Fails where an element is off by more than sums in fp32 can be. */
static double row_error(const product *p, int64_t i, const char *what)
{
  const int64_t n = p->b.cols, k = p->b.rows;
  double *sum = calloc((size_t)n, sizeof *sum), *magnitude = calloc((size_t)n, sizeof *magnitude), worst = 0;
  assert_true(sum && magnitude);
  for (int64_t q = 0; q < k; q++) {
    const double x = th_get(&p->a, i, q);
    for (int64_t j = 0; x != 0 && j < n; j++) {
      const double term = x * th_decode(p->b.data, p->b.dtype, q * n + j);
      sum[j] += term;
      magnitude[j] += fabs(term);
    }
  }
  for (int64_t j = 0; j < n; j++) {
    const double got = th_get(&p->c, i, j), error = fabs(got - sum[j]);
    const double in_sum = (double)(k + 20) * th_roundoff(ESMM_F32) * magnitude[j];
    if (!(error <= in_sum + th_roundoff(p->c.dtype) * (fabs(sum[j]) + in_sum)))
      fail_msg("%s: C[%d,%d] is %.9g, not %.9g", what, (int)i, (int)j, got, sum[j]);
    worst = fmax(worst, error);
  }
  free(sum);
  free(magnitude);
  return worst;
}

static double rows_error(const product *p, const char *what)
{
  const int64_t m = p->a.rows, rows[] = {0, 1, m / 3, m / 2, m - 2, m - 1};
  double worst = 0;
  for (int r = 0; r < COUNT(rows); r++)
    worst = fmax(worst, row_error(p, rows[r] < 0 ? 0 : rows[r], what));
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
static bool repeat(product *p, const char *force, const char *what, void **first)
{
  enum { CALLS = 5 };
  *first = NULL;
  for (int i = 0; i < CALLS; i++) {
    if (!multiply(p, force, NULL))
      return false;
    if (!*first) {
      (void)rows_error(p, what);
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
      for (int i = 0; i < all.count; i++) {
        char what[96];
        void *first = NULL;
        (void)snprintf(what, sizeof what, "%s, m %d, %s", all.name[i], (int)m, each % 2 ? "zeros" : "no zeros");
        all.ran[i] += repeat(&p, all.force[i], what, &first);
        free(first);
      }
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
  (void)repeat(&x->p, NULL, what, &x->want[which]);
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
  void *streams[2] = {new_stream(), new_stream()};
  esmm_matrix c[CALLS], shape = x->p.c;
  shape.data = NULL;
  for (int i = 0; i < CALLS; i++)
    c[i] = to_device(&shape);
  for (int i = 0; i < CALLS; i++) {
    const esmm_matmul_opts opts = {.size = sizeof opts, .stream = streams[i % 2]};
    expect_ok(both[i % 2], esmm_matmul(both[i % 2], &x->da[i / 2 % FILLING_COUNT], x->p.w, &c[i], &opts, NULL));
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
  const esmm_matmul_opts opts = {.size = sizeof opts, .stream = stream};
  esmm_matrix *dc = &x->p.dc, *da = &x->da[0];
  expect_ok(gpu, esmm_matmul(gpu, da, x->p.w, dc, &opts, NULL));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  assert_int_equal(calls.begin_capture(stream, 0), 0);
  const esmm_status status = esmm_matmul(gpu, da, x->p.w, dc, &opts, NULL);
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
    if (memcmp(x->want[which], x->p.c.data, th_matrix_bytes(&x->p.c)) != 0)
      fail_msg("%s, %s, %s: the graph gave other bits", what, FILLING_NAMES[which], x->kernel[which]);
  }
  put(&x->a[0], da);
  assert_int_equal(calls.exec_destroy(exec), 0);
  assert_int_equal(calls.graph_destroy(graph), 0);
  assert_int_equal(calls.stream_destroy(stream), 0);
}

static bool kernel_skips(const char *name)
{
  return strncmp(name, "joint", 5) == 0 || is_decode(name);
}

static void check_choices(const int64_t *size, esmm_dtype dtype, double density_b)
{
  decided x = {.p = make_product(size[0], size[1], size[2], dtype, density_b < 1 ? ESMM_F32 : dtype)};
  char what[160];
  x.a[0] = x.p.a;
  x.da[0] = x.p.da;
  fill(&x.p.b, ESMM_OPERAND_B, 21, &(filling){.density = density_b});
  send(&x.p);
  for (int i = 0; i < FILLING_COUNT; i++) {
    if (i > 0) {
      x.a[i] = host_matrix(size[0], size[2], dtype);
      x.da[i] = to_device(&x.a[i]);
    }
    fill(&x.a[i], ESMM_OPERAND_A, 22 + (uint64_t)i, &FILLINGS[i]);
    (void)snprintf(what, sizeof what, "%s %d x %d x %d, B %g, A %s", esmm_dtype_str(dtype), (int)size[0], (int)size[2],
                   (int)size[1], density_b, FILLING_NAMES[i]);
    decide(&x, i, what);
  }
  (void)snprintf(what, sizeof what, "%s %d x %d x %d, B %g", esmm_dtype_str(dtype), (int)size[0], (int)size[2],
                 (int)size[1], density_b);
  /* Where the product is large there is no doubt. */
  if (size[0] >= 4096 && !(kernel_skips(x.kernel[1]) && kernel_skips(x.kernel[2])))
    fail_msg("%s: %s ran on strips of 10 %%, %s on zeros", what, x.kernel[1], x.kernel[2]);
  run_beside(&x, what);
  run_as_graph(&x, what);
  x.p.a = x.a[0];
  x.p.da = x.da[0];
  for (int i = 0; i < FILLING_COUNT; i++) {
    free(x.want[i]);
    if (i > 0) {
      free(x.a[i].data);
      esmm_memory_free(gpu, x.da[i].data);
    }
  }
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
      const double measure = rows_error(&p, all.name[cublas]);
      for (int i = 0; i < all.count; i++) {
        if (!multiply(&p, all.force[i], NULL))
          continue;
        const double error = rows_error(&p, all.name[i]);
        print_message("# %-18s %s, %s zeros: largest error %.3g, %.2f times cuBLAS's\n", all.name[i], of, zeros_of_a,
                      error, error / measure);
        if (!(error <= 2 * measure))
          fail_msg("%s, %s, %s zeros: largest error %.3g, that of cuBLAS is %.3g", all.name[i], of, zeros_of_a, error,
                   measure);
        compared++;
      }
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
      cmocka_unit_test(negative_zeros_are_skipped), cmocka_unit_test(ragged_shapes),
      cmocka_unit_test(ragged_shapes_of_few_rows),  cmocka_unit_test(zeros_of_both_operands),
      cmocka_unit_test(every_kernel_repeats),       cmocka_unit_test(choices_of_the_device),
      cmocka_unit_test(weights_from_a_file),        cmocka_unit_test(errors_beside_cublas),
  };
  status = cmocka_run_group_tests_name("cuda16", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
