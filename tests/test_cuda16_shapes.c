/*
 * test_cuda16_shapes.c: 16-bit operands on a GPU, in shapes that no tile fits and lines that no TMA takes,
 * with zeros in both. Sums of small integers are exact, so C is compared byte by byte, with what lies between its lines
 * and around it.
 */
#include "gpu16.h"

#include <math.h>
#include <stdlib.h>

/* ---- ragged shapes: sums of small integers, which are exact ---- */

enum { STRIP128 = 128, ROOM = 20 << 20 }; /* rows of a strip and columns of a tile; bytes of the largest matrix here */

/* Values, and their sums, of one shape. */
typedef struct shape {
  int64_t m, n, k;
  int16_t *a, *b;
  int32_t *sum;
} shape;

typedef enum zeros {
  NO_ZEROS,
  ZEROS_OF_A,    /* some strips of A are empty, some full */
  ZEROS_OF_BOTH, /* half the k's of a strip of A, and of a tile of B */
  ALL_OF_A,      /* A has nothing else */
  ALL_BUT_ONE,   /* one k is alive */
  BLOCKS_OF_B,   /* B has no more than a part of its blocks of 32 x 32 */
  FEW_OF_A,      /* A has a few nonzeros, anywhere; in some rows many, in some k's none */
  ZERO_KINDS
} zeros;

static double strip_density(zeros kind, int64_t strip)
{
  static const double of_a[] = {0.3, 0, 1};
  return kind == NO_ZEROS || kind == BLOCKS_OF_B ? 1
         : kind == ZEROS_OF_A                    ? of_a[strip % 3]
         : kind == ZEROS_OF_BOTH                 ? 0.5
                                                 : 0;
}

/* Is k alive in that strip? The same for all its lines. */
static bool alive(uint64_t seed, int64_t strip, int64_t k, double density)
{
  th_rng rng = {seed + (uint64_t)(strip * 100003 + k) * 0x9e3779b97f4a7c15u};
  return th_unit(&rng) < density;
}

/* Has A a nonzero there, where they lie anywhere? Some 16 rows are full, and a stretch of k's is dead but for those. */
static bool few(uint64_t seed, int64_t i, int64_t k)
{
  const double density = i / 16 % 37 == 5 ? 1 : k / 700 % 4 == 2 ? 0 : i / 8 % 5 == 1 ? 0.05 : 0.01;
  return alive(seed, i, k, density);
}

/* Does B have that element? Of its blocks a third, and none in some columns. */
static bool in_b(zeros kind, uint64_t seed, int64_t k, int64_t j)
{
  if (kind == BLOCKS_OF_B)
    return j / 96 % 4 != 3 && alive(seed + 1, j / 32, k / 32, 0.35);
  return kind != ZEROS_OF_BOTH || alive(seed + 1, j / STRIP128, k, 0.5);
}

static shape make_shape(int64_t m, int64_t n, int64_t k, zeros kind, uint64_t seed)
{
  shape s = {m,
             n,
             k,
             calloc((size_t)(m * k), sizeof(int16_t)),
             calloc((size_t)(k * n), sizeof(int16_t)),
             calloc((size_t)(m * n), sizeof(int32_t))};
  assert_true(s.a && s.b && s.sum);
  th_rng rng = {seed};
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++)
      if (kind == FEW_OF_A ? few(seed, i, p)
                           : alive(seed, i / STRIP128, p, strip_density(kind, i / STRIP128)) ||
                                 (kind == ALL_BUT_ONE && p == (int64_t)seed % k))
        s.a[i * k + p] = (int16_t)(th_below(&rng, 9) - 4);
  for (int64_t p = 0; p < k; p++)
    for (int64_t j = 0; j < n; j++)
      if (in_b(kind, seed, p, j))
        s.b[p * n + j] = (int16_t)(th_below(&rng, 9) - 4);
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
static void encode(const int16_t *values, esmm_matrix *m)
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
                                     {0.5f, 1, true, ESMM_ACT_RELU2},
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
      if (e->activation != ESMM_ACT_NONE && !(x > 0))
        x = 0;
      th_set(want, i, j, e->activation == ESMM_ACT_RELU2 ? x * x : x);
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

/* cuBLAS may split a long k, and then adds parts that it has rounded to a 16-bit C: those sums are not exact. The
   plan's choice may be cuBLAS. */
static bool rounds_parts(const shape *s, const layout *l, const char *name)
{
  enum { LONG = 2100 };
  return s->k > LONG && l->dtype_c != ESMM_F32 && (strcmp(name, "auto") == 0 || strncmp(name, "cublas", 6) == 0);
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
    if (rounds_parts(s, l, all->name[i]))
      continue;
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

/* A shape in `layouts` of 32 layouts; epilogues and B's order take turns. format NULL: B is dense. */
static void check_shape(const shape *s, const esmm_format *format, int layouts, uint64_t turn, kernels all[2])
{
  esmm_prepare_opts prepare = {.size = sizeof prepare};
  if (format)
    prepare.format = *format;
  for (int d = 0; d < 2; d++) {
    const esmm_order order_b = turn % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    esmm_matrix b = lay_out(room_a, s->k, s->n, DTYPES[d], order_b, &(layout){.odd = turn % 3 == 0});
    esmm_weights *w = NULL;
    encode(s->b, &b);
    expect_ok(gpu, esmm_prepare(gpu, &b, &prepare, &w));
    for (int i = 0; i < layouts; i++) {
      const int bits = (int)((turn + (uint64_t)i * 13) % 32); /* each once */
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

/* Sizes of each side, all with all. */
typedef struct sides {
  int64_t m[8], n[8], k[8]; /* up to a 0 */
  int layouts;              /* of each shape */
  const esmm_format *formats;
  int format_count; /* shapes take turns; 0: dense */
} sides;

static void check_sides(const sides *of, kernels all[2])
{
  uint64_t turn = 0;
  open_rooms();
  for (int i = 0; i < 8 && of->m[i]; i++)
    for (int j = 0; j < 8 && of->n[j]; j++)
      for (int p = 0; p < 8 && of->k[p]; p++, turn++) {
        const esmm_format *format = of->format_count ? &of->formats[turn % (uint64_t)of->format_count] : NULL;
        const zeros kind = turn % 3 && format ? BLOCKS_OF_B : (zeros)((turn + (uint64_t)i) % ZERO_KINDS);
        shape s = make_shape(of->m[i], of->n[j], of->k[p], kind, 100 + turn); /* each height has all kinds */
        check_shape(&s, format, of->layouts, turn, all);
        end_shape(&s);
      }
  close_rooms();
}

static void ragged_shapes(void **state)
{
  (void)state;
  static const sides ragged = {{17, 127, 128, 129, 257}, {8, 129, 255, 257, 513}, {8, 63, 65, 1000}, 16, NULL, 0};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  check_sides(&ragged, all);
  for (int d = 0; d < 2; d++)
    for (int i = 0; i < all[d].count; i++)
      if ((all[d].ran[i] == 0) != is_decode(all[d].name[i]))
        fail_msg("%s ran %d of these products", all[d].name[i], (int)all[d].ran[i]);
}

static void ragged_shapes_of_few_rows(void **state)
{
  (void)state;
  static const sides ragged = {{1, 2, 7, 8, 9, 16}, {8, 129, 255, 257, 513}, {8, 63, 65, 1000}, 16, NULL, 0};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  check_sides(&ragged, all);
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* Around 64 rows, 256 columns and 256 k's, which some kernels have as their tiles; k's that blocks share. */
static void around_the_edges_of_tiles(void **state)
{
  (void)state;
  static const sides edges = {
      {1, 63, 64, 65, 200}, {1, 255, 256, 257, 1000}, {1, 63, 64, 255, 256, 257, 3000}, 4, NULL, 0};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  check_sides(&edges, all);
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* Tiles of B that lack half the k's, strips of A that do: kernels that skip look at both. */
static void zeros_of_both_operands(void **state)
{
  (void)state;
  /* The last has more strips than a GPU has multiprocessors. */
  static const int64_t sizes[][3] = {{401, 1064, 1000}, {1030, 640, 2072}, {16, 1500, 1032}, {25700, 24, 120}};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  open_rooms();
  for (int i = 0; i < COUNT(sizes); i++)
    for (int kind = ZEROS_OF_A; kind <= ZEROS_OF_BOTH; kind++) {
      shape s = make_shape(sizes[i][0], sizes[i][1], sizes[i][2], (zeros)kind, 900 + (uint64_t)i);
      check_shape(&s, NULL, 4, (uint64_t)(i * 5 + kind), all);
      end_shape(&s);
    }
  close_rooms();
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* More tiles than fit on a GPU at once: blocks go from whole tiles to ones at the edge, and to parts of split ones. */
static void tiles_of_several_rounds(void **state)
{
  (void)state;
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  open_rooms();
  static const int64_t ks[] = {520, 512, 96}; /* fused has room for 512 that are alive */
  for (int i = 0; i < COUNT(ks); i++)
    for (int kind = ZEROS_OF_A; kind <= (i ? ZEROS_OF_A : ZEROS_OF_BOTH); kind++) {
      shape s = make_shape(4300, 1992, ks[i], (zeros)kind, 950 + (uint64_t)kind);
      check_shape(&s, NULL, 1, 0, all); /* the first layout: row-major, lines of 16 bytes, C of A's dtype */
      end_shape(&s);
    }
  close_rooms();
}

/* What a pass of the test's own over C says, and the pattern that is extracted of it. got: NULL for none. */
static void check_notes(const esmm_matrix *c, const esmm_matrix *counts, const esmm_pattern *got, int64_t strip_rows,
                        const char *what)
{
  esmm_matrix host = host_matrix(c->rows, c->cols, c->dtype), counted = host_matrix(1, c->cols, ESMM_F32);
  int32_t *found = counted.data;
  expect_ok(gpu, esmm_matrix_copy(gpu, c, &host));
  expect_ok(gpu, esmm_matrix_copy(gpu, counts, &counted));
  for (int64_t j = 0; j < c->cols; j++) {
    int32_t nonzeros = 0;
    for (int64_t i = 0; i < c->rows; i++)
      nonzeros += th_get(&host, i, j) != 0.0;
    if (found[j] != nonzeros)
      fail_msg("%s, strips of %d: column %d has %d nonzeros, not %d", what, (int)strip_rows, (int)j, (int)found[j],
               (int)nonzeros);
  }
  if (got) {
    esmm_pattern *want = NULL;
    expect_ok(gpu, esmm_pattern_extract(cpu, &host, strip_rows, &want));
    uint64_t *is = th_pattern_bits(gpu, got), *should = th_pattern_bits(cpu, want);
    const esmm_pattern_info info = th_pattern(cpu, want);
    for (int64_t i = 0; i < info.strips * info.words; i++)
      if (is[i] != should[i])
        fail_msg("%s: bits of strip %d of %d rows are not C's", what, (int)(i / info.words), (int)strip_rows);
    free(is);
    free(should);
    esmm_pattern_free(want);
  }
  free(host.data);
  free(counted.data);
}

/* C of dense, by that kernel, with what is noted of it where counts are wanted. */
static void multiply_lent(const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c, const char *kernel,
                          const esmm_matrix *bias, esmm_matrix *counts)
{
  esmm_pattern *pattern = NULL;
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .force = kernel,
                                 .bias = bias->data,
                                 .activation = ESMM_ACT_RELU,
                                 .column_nonzeros = counts ? counts->data : NULL,
                                 .c_strip_rows = STRIP128,
                                 .c_pattern = counts ? &pattern : NULL};
  expect_ok(gpu, esmm_matmul(gpu, a, w, c, &opts, NULL));
  if (counts)
    check_notes(c, counts, pattern, STRIP128, kernel);
  esmm_pattern_free(pattern);
}

/* Tiles of which others have begun with stages: of 132 multiprocessors 40 have none that are left, and take parts of 46
   pairs', some of which two of them share. Sums are of small integers, so another kernel has the same bits. */
static void stages_that_are_lent(void **state)
{
  (void)state;
  enum { M = 3996, N = 1792, K = 3400, WHOLE = M * N };
  for (int i = 0; i < 2 * COUNT(DTYPES); i++) {
    const esmm_dtype dtype = DTYPES[i / 2], dtype_c = i % 2 ? ESMM_F32 : dtype;
    const char *kernel = dtype == ESMM_BF16 ? "dense_bf16_sm90a" : "dense_f16_sm90a";
    const char *other = dtype == ESMM_BF16 ? "dense_bf16_mma" : "dense_f16_mma";
    esmm_matrix a = host_matrix(M, K, dtype), b = host_matrix(K, N, dtype), bias = host_matrix(1, N, ESMM_F32);
    th_rng rng = {(uint64_t)i + 300};
    for (int64_t r = 0; r < M; r++)
      for (int64_t j = 0; j < K; j++)
        th_set(&a, r, j, (double)th_below(&rng, 3) - 1);
    for (int64_t r = 0; r < K; r++)
      for (int64_t j = 0; j < N; j++)
        th_set(&b, r, j, (double)th_below(&rng, 3) - 1);
    for (int64_t j = 0; j < N; j++)
      th_set(&bias, 0, j, j % 3 == 0 ? -1e6 : j % 3 == 1 ? -100 : 0);
    const esmm_matrix like = {.rows = M, .cols = N, .ld = N, .dtype = dtype_c};
    esmm_matrix da = to_device(&a), want = to_device(&like), got = to_device(&like), counts = device_matrix(1, N);
    esmm_matrix dbias = to_device(&bias), x = host_matrix(M, N, dtype_c), y = host_matrix(M, N, dtype_c);
    esmm_weights *w = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
    multiply_lent(&da, w, &want, other, &dbias, NULL);
    expect_ok(gpu, esmm_matrix_copy(gpu, &want, &y));
    for (int noted = 0; noted < 3; noted++) { /* 1: counts and bitmaps; 2: as 0, when all that was used */
      memset(x.data, 0xff, WHOLE * esmm_dtype_size(dtype_c));
      expect_ok(gpu, esmm_matrix_copy(gpu, &x, &got));
      multiply_lent(&da, w, &got, kernel, &dbias, noted == 1 ? &counts : NULL);
      expect_ok(gpu, esmm_matrix_copy(gpu, &got, &x));
      if (memcmp(x.data, y.data, WHOLE * esmm_dtype_size(dtype_c)) != 0)
        fail_msg("%s, C in %s, %d: C differs from that of %s", kernel, esmm_dtype_str(dtype_c), noted, other);
    }
    esmm_weights_free(w);
    const esmm_matrix device[] = {da, want, got, counts, dbias}, host[] = {a, b, bias, x, y};
    for (int j = 0; j < COUNT(device); j++)
      esmm_memory_free(gpu, device[j].data);
    for (int j = 0; j < COUNT(host); j++)
      free(host[j].data);
  }
}

/* A few nonzeros anywhere: lists of k's that go on from chunk to chunk, chunks without any, blocks that go through
   several units with chunks that do not fill the ring evenly. */
static void few_nonzeros_anywhere(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{37, 64, 255},    {512, 200, 1537}, {513, 65, 6 * 256},   {777, 136, 5 * 256 + 8},
                                     {129, 120, 7001}, {1100, 72, 3333}, {4300, 1000, 8 * 256}};
  kernels all[2] = {kernels_of(ESMM_BF16), kernels_of(ESMM_F16)};
  open_rooms();
  for (int i = 0; i < COUNT(sizes); i++) {
    shape s = make_shape(sizes[i][0], sizes[i][1], sizes[i][2], FEW_OF_A, 1200 + (uint64_t)i);
    check_shape(&s, NULL, i + 1 < COUNT(sizes) ? 3 : 1, i + 1 < COUNT(sizes) ? (uint64_t)(i * 3) : 0, all);
    end_shape(&s);
  }
  close_rooms();
}

/* ---- B as blocks ---- */

#define BLOCK(rows, cols)                                               \
  {                                                                     \
    .kind = ESMM_FORMAT_BSR, .block_rows = (rows), .block_cols = (cols) \
  }
static const esmm_format BLOCKS[] = {BLOCK(32, 32),  BLOCK(64, 64), BLOCK(128, 128), BLOCK(64, 128), BLOCK(128, 64),
                                     BLOCK(16, 256), BLOCK(1, 1),   BLOCK(33, 7),    BLOCK(256, 32)};

static void blocks_of_b(void **state)
{
  (void)state;
  static const sides ragged = {
      {17, 64, 127, 129, 300}, {8, 129, 257, 513, 1000}, {8, 63, 65, 129, 1000}, 8, BLOCKS, COUNT(BLOCKS)};
  kernels all[2] = {kernels_of_format(ESMM_BF16, ESMM_FORMAT_BSR), kernels_of_format(ESMM_F16, ESMM_FORMAT_BSR)};
  check_sides(&ragged, all);
  for (int d = 0; d < 2; d++)
    for (int i = 0; i < all[d].count; i++)
      if ((all[d].ran[i] == 0) != is_decode(all[d].name[i]))
        fail_msg("%s ran %d of these products", all[d].name[i], (int)all[d].ran[i]);
}

static void blocks_of_b_for_few_rows(void **state)
{
  (void)state;
  static const sides ragged = {{1, 2, 7, 8, 9, 16}, {8, 129, 257, 1000}, {8, 63, 1000, 4100}, 8, BLOCKS, COUNT(BLOCKS)};
  kernels all[2] = {kernels_of_format(ESMM_BF16, ESMM_FORMAT_BSR), kernels_of_format(ESMM_F16, ESMM_FORMAT_BSR)};
  check_sides(&ragged, all);
  expect_all_ran(&all[0]);
  expect_all_ran(&all[1]);
}

/* More tiles than fit on a GPU at once, and lists that are cut because there are too few. */
static void blocks_of_many_tiles(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{4300, 1992, 520}, {300, 512, 4096}, {130, 256, 8192}, {2500, 3000, 1024}};
  kernels all[2] = {kernels_of_format(ESMM_BF16, ESMM_FORMAT_BSR), kernels_of_format(ESMM_F16, ESMM_FORMAT_BSR)};
  open_rooms();
  for (int i = 0; i < COUNT(sizes); i++)
    for (int f = 0; f < 3; f++) {
      shape s = make_shape(sizes[i][0], sizes[i][1], sizes[i][2], BLOCKS_OF_B, 970 + (uint64_t)i);
      check_shape(&s, &BLOCKS[f], 1, 0, all);
      end_shape(&s);
    }
  close_rooms();
}

/* A block of the GPU makes several tiles with notes of each, which are taken while it multiplies the next: short tiles,
   and ones that go several times through all the memory that it has for operands. Whole tiles, whose nonzeros are
   counted in registers where they lie in one strip, follow tiles over an edge of C, which are read back, and those over
   the other edge, which are stored another way. */
static void notes_of_several_rounds(void **state)
{
  (void)state;
  static const int64_t sizes[][3] = {{1500, 8192, 64}, {1100, 8192, 1000}, {3000, 4096, 192}, {293, 33032, 72}};
  static const int64_t strips[] = {128, 64, 8, 136, 384, 0}; /* 0: nonzeros of columns alone */
  for (int i = 0; i < COUNT(sizes) * COUNT(DTYPES); i++) {
    const int64_t *size = sizes[i / COUNT(DTYPES)];
    const esmm_dtype dtype = DTYPES[i % COUNT(DTYPES)];
    esmm_matrix a = host_matrix(size[0], size[2], dtype), b = host_matrix(size[2], size[1], dtype);
    esmm_matrix bias = host_matrix(1, size[1], ESMM_F32);
    th_rng rng = {(uint64_t)i + 70};
    for (int64_t r = 0; r < a.rows; r++)
      for (int64_t j = 0; j < a.cols; j++)
        th_set(&a, r, j, (double)th_below(&rng, 3) - 1);
    for (int64_t r = 0; r < b.rows; r++)
      for (int64_t j = 0; j < b.cols; j++)
        th_set(&b, r, j, (double)th_below(&rng, 3) - 1);
    for (int64_t j = 0; j < bias.cols; j++) /* columns with no, few and many nonzeros */
      th_set(&bias, 0, j, j % 3 == 0 ? -1e6 : j % 3 == 1 ? -2.5 * sqrt((double)size[2]) : 0);
    const esmm_matrix like = {.rows = size[0], .cols = size[1], .ld = size[1], .dtype = dtype};
    esmm_matrix da = to_device(&a), dc = to_device(&like), counts = device_matrix(1, size[1]), dbias = to_device(&bias);
    esmm_weights *w = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
    for (int j = 0; j < 2 * COUNT(strips); j++) {
      const bool gated = j % 2;
      esmm_pattern *pattern = NULL;
      esmm_stats stats = {.size = sizeof stats};
      const esmm_matmul_opts opts = {.size = sizeof opts,
                                     .force = dtype == ESMM_BF16 ? "dense_bf16_sm90a" : "dense_f16_sm90a",
                                     .activation = ESMM_ACT_RELU2,
                                     .bias = gated ? NULL : dbias.data,
                                     .gate = gated ? w : NULL,
                                     .gate_bias = gated ? dbias.data : NULL,
                                     .column_nonzeros = counts.data,
                                     .c_strip_rows = strips[j / 2],
                                     .c_pattern = strips[j / 2] ? &pattern : NULL};
      expect_ok(gpu, esmm_matmul(gpu, &da, w, &dc, &opts, &stats));
      check_notes(&dc, &counts, pattern, strips[j / 2], gated ? "gated" : "not gated");
      esmm_pattern_free(pattern);
    }
    esmm_weights_free(w);
    const esmm_matrix device[] = {da, dc, counts, dbias}, host[] = {a, b, bias};
    for (int j = 0; j < COUNT(device); j++)
      esmm_memory_free(gpu, device[j].data);
    for (int j = 0; j < COUNT(host); j++)
      free(host[j].data);
  }
}

/* What is not zero of whole tiles: NaN and what is too small for a normal number, but no zero of either sign. */
static void odd_values_are_noted(void **state)
{
  (void)state;
  static const double values[] = {0, NAN, INFINITY, -INFINITY, 1e-7, -1e-7, 1e-30, -1e-30, 1e-39, -1e-39, 3, -3};
  static const esmm_activation activations[] = {ESMM_ACT_NONE, ESMM_ACT_RELU, ESMM_ACT_RELU2, ESMM_ACT_SILU};
  static const int64_t strips[] = {128, 8};
  enum { M = 256, N = 512, K = 16 };
  for (int i = 0; i < COUNT(DTYPES) * COUNT(activations) * COUNT(strips); i++) {
    const esmm_dtype dtype = DTYPES[i % COUNT(DTYPES)];
    const int64_t strip = strips[i / COUNT(DTYPES) % COUNT(strips)];
    esmm_matrix a = host_matrix(M, K, dtype), b = host_matrix(K, N, dtype), bias = host_matrix(1, N, ESMM_F32);
    th_fill(&a, 1, 0, false);
    th_fill(&b, 2, 0, false);
    for (int64_t j = 0; j < N; j++)
      th_set(&bias, 0, j, values[j % COUNT(values)]);
    const esmm_matrix like = {.rows = M, .cols = N, .ld = N, .dtype = dtype};
    esmm_matrix da = to_device(&a), dc = to_device(&like), counts = device_matrix(1, N), dbias = to_device(&bias);
    esmm_weights *w = NULL;
    esmm_pattern *pattern = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .force = dtype == ESMM_BF16 ? "dense_bf16_sm90a" : "dense_f16_sm90a",
                                   .activation = activations[i / COUNT(DTYPES) / COUNT(strips)],
                                   .bias = dbias.data,
                                   .column_nonzeros = counts.data,
                                   .c_strip_rows = strip,
                                   .c_pattern = &pattern};
    expect_ok(gpu, esmm_matmul(gpu, &da, w, &dc, &opts, NULL));
    check_notes(&dc, &counts, pattern, strip, "odd values");
    esmm_matrix c = host_matrix(M, N, dtype);
    expect_ok(gpu, esmm_matrix_copy(gpu, &dc, &c));
    for (int64_t j = 0; j < N; j++) /* a NaN stays where it is */
      if ((isnan(th_get(&c, M - 1, j)) != 0) != (isnan(values[j % COUNT(values)]) != 0))
        fail_msg("column %d of %g is %g", (int)j, values[j % COUNT(values)], th_get(&c, M - 1, j));
    esmm_pattern_free(pattern);
    esmm_weights_free(w);
    const esmm_matrix device[] = {da, dc, counts, dbias}, host[] = {a, b, bias, c};
    for (int j = 0; j < COUNT(device); j++)
      esmm_memory_free(gpu, device[j].data);
    for (int j = 0; j < COUNT(host); j++)
      free(host[j].data);
  }
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda16 shapes", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(notes_of_several_rounds),   cmocka_unit_test(ragged_shapes),
      cmocka_unit_test(ragged_shapes_of_few_rows), cmocka_unit_test(around_the_edges_of_tiles),
      cmocka_unit_test(zeros_of_both_operands),    cmocka_unit_test(tiles_of_several_rounds),
      cmocka_unit_test(few_nonzeros_anywhere),     cmocka_unit_test(blocks_of_b),
      cmocka_unit_test(blocks_of_b_for_few_rows),  cmocka_unit_test(blocks_of_many_tiles),
      cmocka_unit_test(odd_values_are_noted),      cmocka_unit_test(stages_that_are_lent),
  };
  status = cmocka_run_group_tests_name("cuda16 shapes", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
