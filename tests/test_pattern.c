/*
 * test_pattern.c: bitmaps and prepared weights' densities against an element-by-element loop, and skip statistics
 * against a naive count and against the closed forms that independent operands must follow.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend.h"
#include "convert.h"
#include "esmm_tools.h"
#include "internal.h"

static const esmm_dtype dtypes[] = {ESMM_F32, ESMM_BF16, ESMM_F16};
static const esmm_order orders[] = {ESMM_ROW_MAJOR, ESMM_COL_MAJOR};

static uint64_t state;

static uint64_t next(void)
{
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static esmm_ctx *make_ctx(int threads, const esmm_allocator *allocator)
{
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {.size = sizeof opts, .threads = threads, .allocator = allocator, .no_tuning_cache = 1};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  return ctx;
}

static void assert_error(esmm_ctx *ctx, const char *names)
{
  if (!strstr(esmm_ctx_error(ctx), names))
    fail_msg("error text \"%s\" does not have \"%s\"", esmm_ctx_error(ctx), names);
}

/* Bits of values that are easily taken for zero, or zeros easily taken for values. */
static uint32_t odd_bits(esmm_dtype dtype, int which)
{
  static const uint32_t f32[] = {0x80000000u, 0x00000001u, 0x80000001u, 0x7f800000u,
                                 0xff800000u, 0x7fc00000u, 0x3f800000u};
  static const uint32_t bf16[] = {0x8000u, 0x0001u, 0x8001u, 0x7f80u, 0xff80u, 0x7fc0u, 0x3f80u};
  static const uint32_t f16[] = {0x8000u, 0x0001u, 0x8001u, 0x7c00u, 0xfc00u, 0x7e00u, 0x3c00u};
  switch (dtype) {
  case ESMM_F32:
    return f32[which];
  case ESMM_BF16:
    return bf16[which];
  case ESMM_F16:
    return f16[which];
  }
  return 0;
}

static void put_bits(const esmm_matrix *m, int64_t index, uint32_t bits)
{
  switch (m->dtype) {
  case ESMM_F32:
    ((uint32_t *)m->data)[index] = bits;
    break;
  case ESMM_BF16:
  case ESMM_F16:
    ((uint16_t *)m->data)[index] = (uint16_t)bits;
    break;
  }
}

/* A matrix with no byte to spare at its end; gaps between rows are NaN, so that reading them shows. */
static esmm_matrix make_matrix(int64_t rows, int64_t cols, int64_t pad, esmm_dtype dtype, esmm_order order)
{
  int64_t inner = order == ESMM_ROW_MAJOR ? cols : rows, outer = order == ESMM_ROW_MAJOR ? rows : cols;
  esmm_matrix m = {.rows = rows, .cols = cols, .ld = inner + pad, .dtype = dtype, .order = order};
  int64_t elements = outer > 0 ? m.ld * (outer - 1) + inner : 0;
  m.data = malloc((size_t)elements * esmm_dtype_size(dtype));
  assert_true(m.data || elements == 0);
  for (int64_t i = 0; i < elements; i++)
    put_bits(&m, i, odd_bits(dtype, 5));
  return m;
}

/* Zeros of both signs, and now and then a nonzero of any sort. */
static void fill_sparse(esmm_matrix *m, unsigned percent)
{
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t c = 0; c < m->cols; c++) {
      uint64_t x = next();
      uint32_t bits = x % 100 < percent ? odd_bits(m->dtype, 1 + (int)(x >> 32 & 0xffff) % 6)
                      : x >> 63         ? odd_bits(m->dtype, 0)
                                        : 0;
      put_bits(m, esmm_matrix_index(m, r, c), bits);
    }
}

/* [outer][k]: 1 where an element compares unequal to zero, as the language has it */
static unsigned char *nonzero_map(const esmm_matrix *m, int is_b)
{
  int64_t outer = is_b ? m->cols : m->rows, k = is_b ? m->rows : m->cols;
  unsigned char *map = malloc((size_t)(outer * k) + 1);
  assert_non_null(map);
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < k; i++)
      map[o * k + i] = (is_b ? esmm_matrix_get(m, i, o) : esmm_matrix_get(m, o, i)) != 0;
  return map;
}

/* By the meaning of the words: a bit is set where some element of the strip is not zero. */
static void check_bitmaps(esmm_ctx *ctx, const esmm_matrix *m, const unsigned char *map, const esmm_pattern *p,
                          int64_t strip, int is_b)
{
  int64_t outer = is_b ? m->cols : m->rows, k = is_b ? m->rows : m->cols, set = 0;
  int64_t strips = outer / strip + (outer % strip != 0), words = k / 64 + (k % 64 != 0);
  esmm_pattern_info info = {.size = sizeof info};
  assert_int_equal(esmm_pattern_get_info(ctx, p, &info), ESMM_OK);
  assert_int_equal(info.strips, strips);
  assert_int_equal(info.rows, outer);
  assert_int_equal(info.k, k);
  assert_int_equal(info.strip_rows, strip);
  assert_int_equal(info.words, words);
  uint64_t *all = malloc((size_t)(strips * words + 1) * sizeof *all);
  assert_non_null(all);
  assert_int_equal(esmm_pattern_bits(ctx, p, 0, strips, all), ESMM_OK);
  for (int64_t s = 0; s < strips; s++) {
    const uint64_t *bits = all + s * words;
    int64_t end = (s + 1) * strip < outer ? (s + 1) * strip : outer;
    for (int64_t i = 0; i < words * 64; i++) {
      unsigned expected = 0;
      for (int64_t o = s * strip; i < k && !expected && o < end; o++)
        expected = map[o * k + i];
      if ((bits[i / 64] >> (i % 64) & 1) != expected)
        fail_msg("%s %lld x %lld %s order %d ld %lld strip of %lld: strip %lld k %lld should be %u", is_b ? "b" : "a",
                 (long long)m->rows, (long long)m->cols, esmm_dtype_str(m->dtype), (int)m->order, (long long)m->ld,
                 (long long)strip, (long long)s, (long long)i, expected);
      set += expected;
    }
  }
  double expected = strips * k > 0 ? (double)set / (double)(strips * k) : 0;
  assert_true(fabs(info.density - expected) < 1e-12);
  free(all);
}

static void extraction_matches_element_loop(void **unused)
{
  (void)unused;
  static const int64_t shapes[][2] = {{0, 0},    {0, 5},    {5, 0},     {1, 1},    {1, 64},     {7, 63},  {8, 65},
                                      {33, 130}, {64, 127}, {31, 1024}, {5, 1100}, {130, 2053}, {1100, 9}};
  static const int64_t strips[] = {1, 2, 3, 6, 8, 16, 32, 128, 5000};
  static const int64_t pads[] = {0, 3};
  state = 1;
  for (int threads = 1; threads <= 2; threads++) {
    esmm_ctx *ctx = make_ctx(threads, NULL);
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
      for (int dtype = 0; dtype < 3; dtype++)
        for (int order = 0; order < 2; order++)
          for (int pad = 0; pad < 2; pad++) {
            esmm_matrix m = make_matrix(shapes[s][0], shapes[s][1], pads[pad], dtypes[dtype], orders[order]);
            fill_sparse(&m, shapes[s][0] > 40 ? 2 : 12);
            for (int is_b = 0; is_b < 2; is_b++) {
              unsigned char *map = nonzero_map(&m, is_b);
              for (size_t h = 0; h < sizeof strips / sizeof strips[0]; h++) {
                esmm_pattern *p = NULL;
                esmm_status status = is_b ? esmm_pattern_extract_b(ctx, &m, strips[h], &p)
                                          : esmm_pattern_extract(ctx, &m, strips[h], &p);
                assert_int_equal(status, ESMM_OK);
                check_bitmaps(ctx, &m, map, p, strips[h], is_b);
                esmm_pattern_free(p);
              }
              free(map);
            }
            free(m.data);
          }
    esmm_ctx_free(ctx);
  }
}

/* Prepares b, from here or from the device's memory, and compares its densities with what was counted. */
static void check_densities(esmm_ctx *ctx, const esmm_matrix *b, double elements, double strips)
{
  esmm_weights *w = NULL;
  esmm_weights_info info = {.size = sizeof info};
  const esmm_prepare_opts opts = {.size = sizeof opts, .max_bytes_ratio = 8};
  assert_int_equal(esmm_prepare(ctx, b, &opts, &w), ESMM_OK);
  assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
  if (!(fabs(info.element_density - elements) < 1e-12) || !(fabs(info.strip_density - strips) < 1e-12))
    fail_msg("b %lld x %lld %s order %d ld %lld on %s: densities %.9g and %.9g, not %.9g and %.9g", (long long)b->rows,
             (long long)b->cols, esmm_dtype_str(b->dtype), (int)b->order, (long long)b->ld,
             b->place == ESMM_DEVICE ? "the device" : "the host", info.element_density, info.strip_density, elements,
             strips);
  esmm_weights_free(w);
}

/* The same matrix on the device, gaps and all: its memory is copied as one line. */
static void check_densities_on_device(esmm_ctx *ctx, const esmm_matrix *b, double elements, double strips)
{
  const int64_t outer = b->order == ESMM_ROW_MAJOR ? b->rows : b->cols;
  const int64_t inner = b->order == ESMM_ROW_MAJOR ? b->cols : b->rows;
  esmm_matrix line = {.data = b->data, .rows = 1, .cols = b->ld * (outer - 1) + inner, .dtype = b->dtype}, there = line;
  there.place = ESMM_DEVICE;
  there.device = ctx->ordinal;
  const size_t bytes = (size_t)line.cols * esmm_dtype_size(b->dtype);
  assert_int_equal(esmm_memory_alloc(ctx, bytes, &there.data), ESMM_OK);
  assert_int_equal(esmm_matrix_copy(ctx, &line, &there), ESMM_OK);
  esmm_matrix copy = *b;
  copy.data = there.data;
  copy.place = there.place;
  copy.device = there.device;
  check_densities(ctx, &copy, elements, strips);
  esmm_memory_free(ctx, there.data);
}

static void densities_match_element_loop(void **unused)
{
  (void)unused;
  static const int64_t shapes[][2] = {{1, 1}, {5, 33}, {67, 129}, {9000, 3}, {3, 9000}, {300, 256}};
  state = 4;
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int dtype = 0; dtype < 3; dtype++)
      for (int order = 0; order < 2; order++)
        for (int pad = 0; pad <= 3; pad += 3) {
          esmm_matrix b = make_matrix(shapes[s][0], shapes[s][1], pad, dtypes[dtype], orders[order]);
          fill_sparse(&b, 20);
          unsigned char *map = nonzero_map(&b, 1);
          int64_t set = 0, strip_set = 0, strips = (b.cols + ESMM_PANEL - 1) / ESMM_PANEL;
          for (int64_t i = 0; i < b.rows * b.cols; i++)
            set += map[i];
          for (int64_t i = 0; i < strips * b.rows; i++) {
            int64_t from = i / b.rows * ESMM_PANEL, any = 0;
            for (int64_t j = from; j < b.cols && j < from + ESMM_PANEL; j++)
              any |= map[j * b.rows + i % b.rows];
            strip_set += any;
          }
          const double elements = (double)set / (double)(b.rows * b.cols);
          const double in_strips = (double)strip_set / (double)(b.rows * strips);
          check_densities(ctx, &b, elements, in_strips);
          if (ctx->backend->memory)
            check_densities_on_device(ctx, &b, elements, in_strips);
          free(map);
          free(b.data);
        }
  esmm_ctx_free(ctx);
}

/* One odd value at a time, at every place: each must be seen (or, for -0.0, not seen), and nothing else. */
static void every_place_is_looked_at(void **unused)
{
  (void)unused;
  enum { ROWS = 11, K = 70, STRIP = 4 };
  esmm_ctx *ctx = make_ctx(1, NULL);
  for (int dtype = 0; dtype < 3; dtype++)
    for (int order = 0; order < 2; order++) {
      esmm_matrix m = make_matrix(ROWS, K, 1, dtypes[dtype], orders[order]);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < K; c++)
          put_bits(&m, esmm_matrix_index(&m, r, c), 0);
      for (int which = 0; which < 7; which++)
        for (int r = 0; r < ROWS; r++)
          for (int c = 0; c < K; c++) {
            esmm_pattern *p = NULL;
            put_bits(&m, esmm_matrix_index(&m, r, c), odd_bits(dtypes[dtype], which));
            assert_int_equal(esmm_pattern_extract(ctx, &m, STRIP, &p), ESMM_OK);
            for (int s = 0; s < 3; s++)
              for (int w = 0; w < 2; w++) {
                uint64_t expected = which > 0 && s == r / STRIP && w == c / 64 ? (uint64_t)1 << c % 64 : 0;
                assert_int_equal(p->bits[(s)*p->words + w], expected);
              }
            esmm_pattern_free(p);
            put_bits(&m, esmm_matrix_index(&m, r, c), 0);
          }
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

static void coarsening_equals_direct_extraction(void **unused)
{
  (void)unused;
  static const int64_t steps[][2] = {{1, 1}, {1, 7}, {2, 4}, {3, 12}, {8, 32}, {8, 128}, {6, 6000}};
  static const int64_t shapes[][2] = {{101, 333}, {64, 64}, {5, 65}, {0, 10}, {10, 0}};
  state = 2;
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
    esmm_matrix m = make_matrix(shapes[s][0], shapes[s][1], 0, ESMM_F32, ESMM_ROW_MAJOR);
    fill_sparse(&m, 5);
    unsigned char *map = nonzero_map(&m, 0);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
      esmm_pattern *fine = NULL, *coarse = NULL;
      assert_int_equal(esmm_pattern_extract(ctx, &m, steps[i][0], &fine), ESMM_OK);
      assert_int_equal(esmm_pattern_coarsen(ctx, fine, steps[i][1], &coarse), ESMM_OK);
      check_bitmaps(ctx, &m, map, coarse, steps[i][1], 0);
      esmm_pattern_free(fine);
      esmm_pattern_free(coarse);
    }
    free(map);
    free(m.data);
  }
  esmm_ctx_free(ctx);
}

/* order holds each row once, and p is what strips of rows in that order have. */
static void check_order(const esmm_pattern *rows, const int64_t *order, const esmm_pattern *p, int64_t strip_rows)
{
  const int64_t count = rows->strips, k = rows->k, words = (k + 63) / 64;
  int *seen = calloc((size_t)count + 1, sizeof *seen);
  uint64_t *any = calloc((size_t)words + 1, sizeof *any);
  assert_non_null(seen);
  assert_non_null(any);
  assert_int_equal(p->strip_rows, strip_rows);
  assert_int_equal(p->strips, (count + strip_rows - 1) / strip_rows);
  for (int64_t i = 0; i < count; i++) {
    assert_true(order[i] >= 0 && order[i] < count);
    assert_int_equal(seen[order[i]]++, 0);
    for (int64_t w = 0; w < words; w++)
      any[w] |= rows->bits[(order[i]) * rows->words + w];
    if ((i + 1) % strip_rows == 0 || i + 1 == count) {
      assert_memory_equal(any, p->bits + i / strip_rows * p->words, (size_t)words * sizeof *any);
      memset(any, 0, (size_t)words * sizeof *any);
    }
  }
  free(seen);
  free(any);
}

static void reordering_is_an_order_and_never_worse(void **unused)
{
  (void)unused;
  static const int64_t shapes[][2] = {{101, 333}, {300, 1500}, {64, 64}, {5, 65}, {1, 1}, {0, 10}, {10, 0}};
  static const int64_t heights[] = {1, 7, 32, 6000};
  static const unsigned percents[] = {0, 2, 30, 100};
  state = 9;
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (size_t d = 0; d < sizeof percents / sizeof percents[0]; d++) {
      esmm_matrix m = make_matrix(shapes[s][0], shapes[s][1], 0, ESMM_BF16, ESMM_ROW_MAJOR);
      fill_sparse(&m, percents[d]);
      esmm_pattern *rows = NULL;
      assert_int_equal(esmm_pattern_extract(ctx, &m, 1, &rows), ESMM_OK);
      int64_t *order = calloc(2 * (size_t)shapes[s][0] + 1, sizeof *order), *again = order + shapes[s][0];
      assert_non_null(order);
      for (size_t h = 0; h < sizeof heights / sizeof heights[0]; h++) {
        esmm_pattern *before = NULL, *after = NULL;
        assert_int_equal(esmm_pattern_coarsen(ctx, rows, heights[h], &before), ESMM_OK);
        assert_int_equal(esmm_pattern_reorder(ctx, rows, heights[h], order, &after), ESMM_OK);
        check_order(rows, order, after, heights[h]);
        assert_true(esmm_pattern_density(after) <= esmm_pattern_density(before));
        assert_int_equal(esmm_pattern_reorder(ctx, rows, heights[h], again, NULL), ESMM_OK);
        assert_memory_equal(order, again, (size_t)shapes[s][0] * sizeof *order);
        esmm_pattern_free(before);
        esmm_pattern_free(after);
      }
      free(order);
      esmm_pattern_free(rows);
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

/* Rows of several kinds, dealt out like cards: each kind has its own k's, and fills a strip when they are sorted. */
static void reordering_finds_kinds_of_rows(void **unused)
{
  (void)unused;
  enum { KINDS = 8, STRIP = 16, ROWS = KINDS * STRIP, K = 2000 };
  state = 10;
  esmm_ctx *ctx = make_ctx(1, NULL);
  esmm_matrix m = make_matrix(ROWS, K, 0, ESMM_F32, ESMM_ROW_MAJOR);
  bool owns[KINDS][K];
  double alive = 0;
  for (int kind = 0; kind < KINDS; kind++)
    for (int64_t k = 0; k < K; k++) {
      owns[kind][k] = next() % 4 == 0;
      alive += owns[kind][k];
    }
  for (int64_t r = 0; r < ROWS; r++)
    for (int64_t k = 0; k < K; k++) /* one of a kind's rows has all of its k's, the others nearly all */
      ((float *)m.data)[r * K + k] = owns[r % KINDS][k] && (r < KINDS || next() % 8) ? 1.0f : 0.0f;
  esmm_pattern *rows = NULL, *before = NULL, *after = NULL;
  int64_t order[ROWS];
  assert_int_equal(esmm_pattern_extract(ctx, &m, 1, &rows), ESMM_OK);
  assert_int_equal(esmm_pattern_coarsen(ctx, rows, STRIP, &before), ESMM_OK);
  assert_int_equal(esmm_pattern_reorder(ctx, rows, STRIP, order, &after), ESMM_OK);
  assert_true(esmm_pattern_density(before) > 0.85); /* 1 - (3 / 4)^8 */
  assert_true(esmm_pattern_density(after) < 1.25 * alive / (KINDS * K));
  esmm_pattern_free(rows);
  esmm_pattern_free(before);
  esmm_pattern_free(after);
  free(m.data);
  esmm_ctx_free(ctx);
}

/* Equal rows stay together also where the line between two of the kinds says nothing about the others, and where the
   sampled k's are those of some kinds only. */
static void reordering_keeps_equal_rows_together(void **unused)
{
  (void)unused;
  enum { KINDS = 8, STRIP = 128, ROWS = KINDS * STRIP, MOST_K = 4096 };
  static const int64_t lengths[] = {64, 640, MOST_K};
  esmm_ctx *ctx = make_ctx(2, NULL);
  for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
    for (int contiguous = 0; contiguous < 2; contiguous++) {
      const int64_t length = lengths[l];
      esmm_matrix m = make_matrix(ROWS, length, 0, ESMM_BF16, ESMM_ROW_MAJOR);
      for (int64_t r = 0; r < ROWS; r++) {
        const int64_t kind = r * 389 % ROWS / STRIP; /* 389 is odd: each row of the sorted order once */
        for (int64_t k = 0; k < length; k++) {
          const int64_t owner = contiguous ? k * KINDS / length : k % KINDS;
          ((uint16_t *)m.data)[r * length + k] = owner == kind ? 0x3f80 : 0;
        }
      }
      esmm_pattern *rows = NULL, *after = NULL;
      int64_t order[ROWS];
      assert_int_equal(esmm_pattern_extract(ctx, &m, 1, &rows), ESMM_OK);
      assert_int_equal(esmm_pattern_reorder(ctx, rows, STRIP, order, &after), ESMM_OK);
      check_order(rows, order, after, STRIP);
      assert_true(esmm_pattern_density(after) == 1.0 / KINDS);
      esmm_pattern_free(rows);
      esmm_pattern_free(after);
      free(m.data);
    }
  esmm_ctx_free(ctx);
}

static double naive_skipped(const esmm_pattern *a, const esmm_pattern *b, int64_t step)
{
  int64_t skipped = 0, all = 0;
  for (int64_t i = 0; i < a->strips; i++)
    for (int64_t j = 0; j < b->strips; j++)
      for (int64_t from = 0; from < a->k; from += step, all++) {
        uint64_t any = 0;
        for (int64_t k = from; k < from + step && k < a->k; k++)
          any |= (a->bits[(i)*a->words + k / 64] & b->bits[(j)*b->words + k / 64]) >> (k % 64) & 1;
        skipped += !any;
      }
  return (double)skipped / (double)all;
}

static void skip_statistics_match_naive_count(void **unused)
{
  (void)unused;
  static const int64_t steps[] = {1, 2, 3, 4, 7, 8, 16, 32, 48, 63, 64, 65, 100, 128, 192, 1000000007};
  static const int64_t depths[] = {1, 8, 63, 64, 65, 200, 449};
  state = 3;
  for (int threads = 1; threads <= 2; threads++) {
    esmm_ctx *ctx = make_ctx(threads, NULL);
    for (size_t d = 0; d < sizeof depths / sizeof depths[0]; d++) {
      esmm_matrix a = make_matrix(29, depths[d], 0, ESMM_F32, ESMM_ROW_MAJOR);
      esmm_matrix b = make_matrix(depths[d], 23, 0, ESMM_F16, ESMM_ROW_MAJOR);
      fill_sparse(&a, 7);
      fill_sparse(&b, 7);
      esmm_pattern *pa = NULL, *pb = NULL;
      assert_int_equal(esmm_pattern_extract(ctx, &a, 4, &pa), ESMM_OK);
      assert_int_equal(esmm_pattern_extract_b(ctx, &b, 3, &pb), ESMM_OK);
      for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        int64_t warp = steps[(i + d) % (sizeof steps / sizeof steps[0])];
        esmm_skip_stats stats = {.size = sizeof stats, .block_k = steps[i], .warp_k = warp};
        assert_int_equal(esmm_pattern_skip_stats(ctx, pa, pb, &stats), ESMM_OK);
        assert_true(fabs(stats.block_skipped - naive_skipped(pa, pb, steps[i])) < 1e-12);
        assert_true(fabs(stats.warp_skipped - naive_skipped(pa, pb, warp)) < 1e-12);
        assert_true(fabs(stats.dot_skipped - naive_skipped(pa, pb, 1)) < 1e-12);
        assert_true(fabs(stats.joint_density + stats.dot_skipped - 1) < 1e-12);
      }
      esmm_skip_stats defaults = {.size = sizeof defaults};
      assert_int_equal(esmm_pattern_skip_stats(ctx, pa, pb, &defaults), ESMM_OK);
      assert_true(fabs(defaults.block_skipped - naive_skipped(pa, pb, 64)) < 1e-12);
      assert_true(fabs(defaults.warp_skipped - naive_skipped(pa, pb, 8)) < 1e-12);
      esmm_pattern_free(pa);
      esmm_pattern_free(pb);
      free(a.data);
      free(b.data);
    }
    esmm_ctx_free(ctx);
  }
}

/*
 * How far the mean over all pairs of `strips` A strips and `strips` B strips may stray from q = (1 - d^2)^step. Pairs
 * that share a strip are not independent, so the variance is that of a two-sample U-statistic: given one strip with c
 * of step bits set the other misses it with probability (1 - d)^c, whose variance over c ~ Binomial(step, d) is
 * `shared`.
 */
static double skip_sigma(double d, int64_t step, double strips, double stretches)
{
  double q = pow(1 - d * d, (double)step);
  double shared = pow(1 - d + d * (1 - d) * (1 - d), (double)step) - q * q;
  double variance = 2 * shared / strips + (q * (1 - q) - 2 * shared) / (strips * strips);
  return sqrt(fmax(variance, 0) / stretches);
}

static void skip_statistics_follow_closed_forms(void **unused)
{
  (void)unused;
  enum { SIZE = 2048, K = 4096, STRIP = 32 };
  static const double densities[] = {0.05, 0.125, 0.25, 0.5, 0.75, 1};
  esmm_ctx *ctx = make_ctx(2, NULL);
  esmm_matrix a = {.data = malloc((size_t)SIZE * K * 2), .rows = SIZE, .cols = K, .dtype = ESMM_BF16};
  esmm_matrix b = {.data = malloc((size_t)SIZE * K * 2), .rows = K, .cols = SIZE, .dtype = ESMM_BF16};
  assert_true(a.data && b.data);
  double squares = 0;
  int terms = 0;
  for (size_t i = 0; i < sizeof densities / sizeof densities[0]; i++)
    for (uint64_t seed = 0; seed < 2; seed++) {
      const double d = densities[i];
      esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_BLOCKWISE, .seed = seed, .density = d};
      esmm_pattern *pa = NULL, *pb = NULL;
      assert_int_equal(esmm_generate(ctx, &g, &a), ESMM_OK);
      g.operand = ESMM_OPERAND_B; /* the same seed: operands must be independent all the same */
      assert_int_equal(esmm_generate(ctx, &g, &b), ESMM_OK);
      assert_int_equal(esmm_pattern_extract(ctx, &a, STRIP, &pa), ESMM_OK);
      assert_int_equal(esmm_pattern_extract_b(ctx, &b, STRIP, &pb), ESMM_OK);
      esmm_skip_stats stats = {.size = sizeof stats, .block_k = 64, .warp_k = 8};
      assert_int_equal(esmm_pattern_skip_stats(ctx, pa, pb, &stats), ESMM_OK);
      const double measured[] = {stats.dot_skipped, stats.warp_skipped, stats.block_skipped};
      static const int64_t steps[] = {1, 8, 64};
      for (int s = 0; s < 3; s++) {
        double expected = pow(1 - d * d, (double)steps[s]);
        double sigma = skip_sigma(d, steps[s], (double)(SIZE / STRIP), (double)K / (double)steps[s]);
        double error = measured[s] - expected;
        if (!(fabs(error) <= 4.5 * sigma + 1e-12))
          fail_msg("density %g, stretches of %d: skipped %.9g, expected %.9g, sigma %.3g", d, (int)steps[s],
                   measured[s], expected, sigma);
        if (expected * (double)K / (double)steps[s] * 1024 > 20) { /* enough events for sigma to mean something */
          squares += error / sigma * (error / sigma);
          terms++;
        }
      }
      assert_true(fabs(stats.joint_density - (1 - stats.dot_skipped)) < 1e-12);
      esmm_pattern_free(pa);
      esmm_pattern_free(pb);
    }
  /* A bound that everything passes would prove nothing: deviations must be of sigma's own size. */
  assert_true(terms > 15);
  double rms = sqrt(squares / terms);
  if (!(rms > 0.5 && rms < 1.6))
    fail_msg("deviations are %.2f sigma on average over %d cases", rms, terms);
  free(a.data);
  free(b.data);
  esmm_ctx_free(ctx);
}

static void empty_patterns_are_defined(void **unused)
{
  (void)unused;
  esmm_ctx *ctx = make_ctx(1, NULL);
  esmm_pattern *p = NULL, *q = NULL;
  const esmm_matrix no_k = {.rows = 10, .cols = 0}, no_rows = {.rows = 0, .cols = 10};
  assert_int_equal(esmm_pattern_extract(ctx, &no_k, 4, &p), ESMM_OK);
  assert_int_equal(p->strips, 3);
  uint64_t guard = 0x5a;
  assert_int_equal(esmm_pattern_bits(ctx, p, 0, 3, &guard), ESMM_OK);
  assert_int_equal(guard, 0x5a); /* no k, no words */
  assert_true(esmm_pattern_density(p) == 0);
  esmm_skip_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, p, &stats), ESMM_OK);
  assert_true(stats.dot_skipped == 1 && stats.warp_skipped == 1 && stats.block_skipped == 1 &&
              stats.joint_density == 0);
  esmm_pattern_free(p);
  assert_int_equal(esmm_pattern_extract(ctx, &no_rows, 4, &q), ESMM_OK);
  assert_int_equal(q->strips, 0);
  assert_int_equal(q->k, 10);
  assert_int_equal(esmm_pattern_bits(ctx, q, 0, 0, &guard), ESMM_OK);
  assert_int_equal(esmm_pattern_bits(ctx, q, 0, 1, &guard), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "0 and 1, but the pattern has 0 strips");
  assert_true(esmm_pattern_density(q) == 0);
  esmm_pattern_free(q);
  const esmm_matrix endless = {.rows = INT64_MAX, .cols = 0};
  assert_int_equal(esmm_pattern_extract(ctx, &endless, 1, &p), ESMM_OK);
  assert_int_equal(esmm_pattern_coarsen(ctx, p, 2, &q), ESMM_OK);
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, q, &stats), ESMM_OK);
  esmm_pattern_free(p);
  esmm_pattern_free(q);
  esmm_ctx_free(ctx);
}

static void bad_arguments_are_named(void **unused)
{
  (void)unused;
  esmm_ctx *ctx = make_ctx(1, NULL);
  float data[100] = {1};
  const esmm_matrix m = {.data = data, .rows = 10, .cols = 10};
  const esmm_matrix wide = {.data = data, .rows = 5, .cols = 20},
                    bad_ld = {.data = data, .rows = 2, .cols = 9, .ld = 8};
  esmm_pattern *p = NULL, *q = NULL, *untouched = NULL;
  assert_int_equal(esmm_pattern_extract(NULL, &m, 4, &p), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract(ctx, NULL, 4, &p), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract(ctx, &m, 4, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract(ctx, &m, 0, &p), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "strip_rows is 0");
  assert_int_equal(esmm_pattern_extract(ctx, &m, -7, &p), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "strip_rows is -7");
  assert_int_equal(esmm_pattern_extract(ctx, &bad_ld, 4, &p), ESMM_ERR_LD);
  assert_int_equal(esmm_pattern_extract_b(NULL, &m, 4, &p), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract_b(ctx, NULL, 4, &p), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract_b(ctx, &m, 4, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_extract_b(ctx, &m, -1, &p), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "strip_cols is -1");
  assert_int_equal(esmm_pattern_extract_b(ctx, &bad_ld, 4, &p), ESMM_ERR_LD);
  assert_error(ctx, "b");
  assert_null(p);

  assert_int_equal(esmm_pattern_extract(ctx, &m, 4, &p), ESMM_OK);
  assert_int_equal(esmm_pattern_extract(ctx, &wide, 4, &q), ESMM_OK);
  assert_int_equal(esmm_pattern_coarsen(NULL, p, 8, &untouched), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_coarsen(ctx, NULL, 8, &untouched), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_coarsen(ctx, p, 8, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_coarsen(ctx, p, 6, &untouched), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "strip_rows is 6, must be a multiple of the pattern's 4");
  assert_int_equal(esmm_pattern_coarsen(ctx, p, 0, &untouched), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_coarsen(ctx, p, -4, &untouched), ESMM_ERR_ARGUMENT);
  int64_t order[10];
  assert_int_equal(esmm_pattern_reorder(NULL, p, 4, order, &untouched), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_reorder(ctx, NULL, 4, order, &untouched), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_reorder(ctx, p, 4, NULL, &untouched), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "order is NULL");
  assert_int_equal(esmm_pattern_reorder(ctx, p, 4, order, &untouched), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "rows has strips of 4 rows, must be a pattern of single rows");
  esmm_pattern *single = NULL;
  assert_int_equal(esmm_pattern_extract(ctx, &m, 1, &single), ESMM_OK);
  assert_int_equal(esmm_pattern_reorder(ctx, single, 0, order, &untouched), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "strip_rows is 0");
  esmm_pattern_free(single);
  assert_null(untouched);

  esmm_skip_stats stats = {.size = sizeof stats, .dot_skipped = -1};
  assert_int_equal(esmm_pattern_skip_stats(NULL, p, p, &stats), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_skip_stats(ctx, NULL, p, &stats), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, NULL, &stats), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, p, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, q, &stats), ESMM_ERR_SHAPE);
  assert_error(ctx, "k = 20");
  stats.block_k = -3;
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, p, &stats), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "block_k is -3");
  stats.block_k = 0;
  stats.warp_k = -5;
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, p, &stats), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "warp_k is -5");
  stats = (esmm_skip_stats){.size = 3, .dot_skipped = -1};
  assert_int_equal(esmm_pattern_skip_stats(ctx, p, p, &stats), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "size is 3");
  assert_true(stats.dot_skipped == -1);

  uint64_t bits[4] = {1, 2, 3, 4};
  static const int64_t outside[][2] = {{-1, 1}, {3, 1}, {0, 4}, {0, -1}, {4, 0}, {1, INT64_MAX}, {INT64_MAX, 1}};
  for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
    assert_int_equal(esmm_pattern_bits(ctx, p, outside[i][0], outside[i][1], bits), ESMM_ERR_ARGUMENT);
    assert_error(ctx, "but the pattern has 3 strips");
  }
  assert_true(bits[0] == 1 && bits[3] == 4);
  assert_int_equal(esmm_pattern_bits(ctx, p, 3, 0, bits), ESMM_OK); /* none, at the end */
  assert_int_equal(esmm_pattern_bits(ctx, p, 0, 1, NULL), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "bits is NULL");
  assert_int_equal(esmm_pattern_bits(ctx, NULL, 0, 1, bits), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "pattern is NULL");
  assert_int_equal(esmm_pattern_bits(NULL, p, 0, 1, bits), ESMM_ERR_ARGUMENT);
  esmm_pattern_info info = {.size = sizeof info + 8};
  assert_int_equal(esmm_pattern_get_info(ctx, p, &info), ESMM_ERR_ARGUMENT);
  assert_error(ctx, "info->size is");
  assert_int_equal(esmm_pattern_get_info(ctx, p, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_get_info(NULL, p, &info), ESMM_ERR_ARGUMENT);
  info = (esmm_pattern_info){.size = offsetof(esmm_pattern_info, words), .words = -7};
  assert_int_equal(esmm_pattern_get_info(ctx, p, &info), ESMM_OK); /* an older program's */
  assert_true(info.strips == 3 && info.words == -7);
  esmm_pattern_free(NULL);
  esmm_pattern_free(p);
  esmm_pattern_free(q);
  esmm_ctx_free(ctx);
}

/* An allocator that counts, and fails when `left` reaches 0. */
typedef struct budget {
  int left;
  size_t held;
} budget;

static void *budget_alloc(void *user, size_t bytes, size_t align)
{
  budget *b = user;
  if (b->left-- <= 0)
    return NULL;
  void *ptr = aligned_alloc(align, (bytes + align - 1) / align * align);
  b->held += ptr ? bytes : 0;
  return ptr;
}

static void budget_free(void *user, void *ptr, size_t bytes)
{
  budget *b = user;
  b->held -= ptr ? bytes : 0;
  free(ptr);
}

static void failed_allocations_leave_nothing_behind(void **unused)
{
  (void)unused;
  budget b = {.left = 1000};
  const esmm_allocator allocator = {budget_alloc, budget_free, &b};
  esmm_ctx *ctx = make_ctx(1, &allocator);
  const size_t before = b.held;
  float data[64] = {1};
  const esmm_matrix m = {.data = data, .rows = 8, .cols = 8};
  esmm_pattern *p = NULL, *q = NULL;
  for (int allowed = 0; allowed < 2; allowed++) {
    b.left = allowed;
    assert_int_equal(esmm_pattern_extract(ctx, &m, 2, &p), ESMM_ERR_MEMORY);
    b.left = allowed;
    assert_int_equal(esmm_pattern_extract_b(ctx, &m, 2, &p), ESMM_ERR_MEMORY);
    assert_null(p);
    assert_int_equal(b.held, before);
  }
  b.left = 2;
  assert_int_equal(esmm_pattern_extract(ctx, &m, 2, &p), ESMM_OK);
  const size_t with_p = b.held;
  for (int allowed = 0; allowed < 2; allowed++) {
    b.left = allowed;
    assert_int_equal(esmm_pattern_coarsen(ctx, p, 4, &q), ESMM_ERR_MEMORY);
    assert_null(q);
    assert_int_equal(b.held, with_p);
  }
  esmm_pattern_free(p);
  b.left = 2;
  assert_int_equal(esmm_pattern_extract(ctx, &m, 1, &p), ESMM_OK);
  const size_t with_rows = b.held;
  int64_t order[8];
  for (int allowed = 0; allowed < 3; allowed++) { /* the pattern and its bitmaps, then notes on the rows */
    b.left = allowed;
    assert_int_equal(esmm_pattern_reorder(ctx, p, 4, order, &q), ESMM_ERR_MEMORY);
    assert_null(q);
    assert_int_equal(b.held, with_rows);
  }
  esmm_pattern_free(p);
  assert_int_equal(b.held, before);
  esmm_ctx_free(ctx);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(extraction_matches_element_loop),
      cmocka_unit_test(densities_match_element_loop),
      cmocka_unit_test(every_place_is_looked_at),
      cmocka_unit_test(coarsening_equals_direct_extraction),
      cmocka_unit_test(reordering_is_an_order_and_never_worse),
      cmocka_unit_test(reordering_finds_kinds_of_rows),
      cmocka_unit_test(reordering_keeps_equal_rows_together),
      cmocka_unit_test(skip_statistics_match_naive_count),
      cmocka_unit_test(skip_statistics_follow_closed_forms),
      cmocka_unit_test(empty_patterns_are_defined),
      cmocka_unit_test(bad_arguments_are_named),
      cmocka_unit_test(failed_allocations_leave_nothing_behind),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
