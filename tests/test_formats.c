/*
 * test_formats.c: B as blocks and as N:M: what goes in comes out bit by bit, the layout is the one that docs/formats.md
 * draws, and what is damaged or does not fit is refused with the place named.
 *
 * The yardsticks (which blocks are alive, which groups fit, where an index lies) are computed here from the dense
 * matrix and from the documented layout, never with the library's own helpers.
 */
#include "bsr_arrays.h"
#include "harness.h"

#include "internal.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_zero(const esmm_matrix *m, int64_t row, int64_t col)
{
  return th_get(m, row, col) == 0.0;
}

/* The bits of an element; those of +0 for either zero. */
static uint32_t bits_at(const esmm_matrix *m, int64_t row, int64_t col)
{
  uint32_t bits = 0;
  memcpy(&bits, (const char *)m->data + (size_t)th_index(m, row, col) * th_element_bytes(m->dtype),
         th_element_bytes(m->dtype));
  return is_zero(m, row, col) ? 0 : bits;
}

static void expect_same_matrix(const char *what, const esmm_matrix *x, const esmm_matrix *y)
{
  for (int64_t i = 0; i < x->rows; i++)
    for (int64_t j = 0; j < x->cols; j++)
      if (bits_at(x, i, j) != bits_at(y, i, j))
        fail_msg("%s: (%lld, %lld) is %08x, should be %08x", what, (long long)i, (long long)j, bits_at(y, i, j),
                 bits_at(x, i, j));
}

/* Through to_dense, in both orders, padded; out lies before a page that cannot be read. */
static void expect_back(esmm_ctx *ctx, const char *what, const esmm_weights *w, const esmm_matrix *b)
{
  th_arena arena;
  th_arena_create(&arena, (size_t)(b->rows + 5) * (size_t)(b->cols + 5) * 4 + 64);
  for (int order = 0; order < 2; order++) {
    esmm_matrix out;
    th_matrix_place(&arena, &out, b->rows, b->cols, 3 * order, b->dtype, (esmm_order)order);
    if (esmm_weights_to_dense(ctx, w, &out) != ESMM_OK)
      fail_msg("%s: to dense: %s", what, esmm_ctx_error(ctx));
    expect_same_matrix(what, b, &out);
    assert_true(th_guards_intact(&arena));
  }
  th_arena_free(&arena);
}

static esmm_weights *prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts)
{
  esmm_weights *w = NULL;
  if (esmm_prepare(ctx, b, opts, &w) != ESMM_OK)
    fail_msg("prepare: %s", esmm_ctx_error(ctx));
  return w;
}

static esmm_weights_info info_of(const esmm_weights *w)
{
  esmm_weights_info info = {.size = sizeof info};
  assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
  return info;
}

/* Values that use every bit, with a NaN, an Inf and a -0.0 among them. */
static void fill(esmm_matrix *m, uint64_t seed, double density)
{
  th_rng rng = {seed};
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      const double x = th_unit(&rng) - 0.5;
      th_set(m, i, j, th_unit(&rng) < density ? (x == 0.0 ? 1.0 : x) : 0.0);
    }
  if (m->rows > 2 && m->cols > 1) {
    th_set(m, 0, 0, (double)INFINITY);
    th_set(m, m->rows - 1, m->cols - 1, (double)NAN);
    th_set(m, 1, 1, -0.0);
  }
}

/* ---- BSR from dense ---- */

static void drop_blocks(esmm_matrix *b, int rows, int cols, uint64_t seed, double density)
{
  th_rng rng = {seed};
  for (int64_t i = 0; i < b->rows; i += rows)
    for (int64_t j = 0; j < b->cols; j += cols)
      if (th_unit(&rng) >= density)
        for (int64_t r = i; r < i + rows && r < b->rows; r++)
          for (int64_t c = j; c < j + cols && c < b->cols; c++)
            th_set(b, r, c, (r + c) % 7 == 0 ? -0.0 : 0.0); /* -0.0 does not keep a block alive */
}

static int64_t count_alive(const esmm_matrix *b, int rows, int cols, int64_t *all)
{
  int64_t alive = 0;
  *all = 0;
  for (int64_t i = 0; i * rows < b->rows; i++)
    for (int64_t j = 0; j * cols < b->cols; j++, (*all)++)
      alive += block_alive(b, i, j, rows, cols);
  return alive;
}

/* The layout that kernels rely on, block by block. */
static void expect_bsr_layout(const esmm_weights *w, const esmm_matrix *b)
{
  const esmm_bsr_form *f = &w->bsr;
  const size_t size = th_element_bytes(b->dtype);
  int64_t block = 0;
  for (int64_t s = 0; s * f->block_cols < b->cols; s++) {
    assert_int_equal(f->start[s], block);
    for (int64_t level = 0; level * f->block_rows < b->rows; level++) {
      if (!block_alive(b, level, s, f->block_rows, f->block_cols))
        continue;
      assert_int_equal(f->at[block], level);
      for (int64_t r = 0; r < f->block_rows; r++)
        for (int64_t c = 0; c < f->block_cols; c++) {
          uint32_t got = 0;
          memcpy(&got, (char *)f->values + (size_t)((block * f->block_rows + r) * f->block_cols + c) * size, size);
          const int64_t row = level * f->block_rows + r, col = s * f->block_cols + c;
          if (row >= b->rows || col >= b->cols)
            assert_int_equal(got, 0);
          else if (!is_zero(b, row, col))
            assert_int_equal(got, bits_at(b, row, col));
        }
      block++;
    }
  }
  assert_int_equal(f->start[f->strips], block);
  assert_int_equal(f->blocks, block);
}

/* Bitmaps and densities are those of a dense B of the same elements. */
static void expect_same_zeros(esmm_ctx *ctx, const esmm_weights *w, const esmm_matrix *b)
{
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = ESMM_USE_DECODE, .max_bytes_ratio = 1e9};
  esmm_weights *dense = prepare(ctx, b, &opts);
  assert_int_equal(w->panels, dense->panels);
  assert_memory_equal(w->bits, dense->bits, (size_t)(w->panels * w->words) * sizeof *w->bits);
  assert_memory_equal(w->alive, dense->alive, (size_t)(w->n > 0 ? w->k : 0) * sizeof *w->alive);
  assert_true(w->element_density == dense->element_density && w->strip_density == dense->strip_density);
  assert_int_equal(w->full, dense->full);
  esmm_weights_free(dense);
}

static void bsr_round_trips(void **state)
{
  esmm_ctx *ctx = *state;
  static const int64_t shapes[][2] = {{0, 0}, {0, 5}, {7, 0}, {1, 1}, {64, 32}, {63, 33}, {130, 97}, {257, 70}};
  static const int blocks[][2] = {{1, 1}, {16, 16}, {32, 32}, {7, 20}, {256, 3}, {2, 256}};
  static const double densities[] = {0.0, 0.3, 1.0};
  th_arena arena;
  th_arena_create(&arena, 300 * 110 * 4);
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (size_t t = 0; t < sizeof blocks / sizeof blocks[0]; t++)
      for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
        const size_t variant = s + t + (size_t)dtype;
        esmm_matrix b;
        th_matrix_place(&arena, &b, shapes[s][0], shapes[s][1], variant % 2 ? 5 : 0, (esmm_dtype)dtype,
                        (esmm_order)(variant / 2 % 2));
        fill(&b, s * 100 + t, 0.8);
        drop_blocks(&b, blocks[t][0], blocks[t][1], t, densities[variant % 3]);
        const esmm_prepare_opts opts = {.size = sizeof opts,
                                        .format.kind = ESMM_FORMAT_BSR,
                                        .format.block_rows = blocks[t][0],
                                        .format.block_cols = blocks[t][1],
                                        .max_bytes_ratio = 1e9};
        esmm_weights *w = prepare(ctx, &b, &opts);
        expect_bsr_layout(w, &b);
        expect_same_zeros(ctx, w, &b);
        expect_back(ctx, "bsr", w, &b);
        int64_t all;
        const int64_t alive = count_alive(&b, blocks[t][0], blocks[t][1], &all);
        const esmm_weights_info info = info_of(w);
        assert_int_equal(info.format.kind, ESMM_FORMAT_BSR);
        assert_int_equal(info.format.block_rows, blocks[t][0]);
        assert_int_equal(info.format.block_cols, blocks[t][1]);
        assert_int_equal(info.blocks, alive);
        assert_true(info.block_density == (all ? (double)alive / (double)all : 0.0));
        assert_true(info.format.keep == 0 && info.format.group == 0 && info.format.group_cols == 0);
        esmm_weights_free(w);
      }
  th_arena_free(&arena);
}

/* ---- BSR from arrays ---- */

/* Every kind of arrays to every format and back; the form is the one that the dense matrix gives. */
static void bsr_from_arrays(void **state)
{
  esmm_ctx *ctx = *state;
  static const int blocks[][2] = {{1, 1}, {32, 32}, {5, 16}, {16, 7}};
  static const esmm_prepare_opts targets[] = {
      {.size = sizeof(esmm_prepare_opts),
       .max_bytes_ratio = 1e9,
       .format = {.kind = ESMM_FORMAT_BSR}}, /* their own blocks */
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_BSR, .block_rows = 16, .block_cols = 32}},
      {.size = sizeof(esmm_prepare_opts)},
      {.size = sizeof(esmm_prepare_opts), .use = ESMM_USE_LARGE_M},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_NM, .keep = 4, .group = 4}},
  };
  int tried = 0;
  for (size_t t = 0; t < sizeof blocks / sizeof blocks[0]; t++)
    for (int variant = 0; variant < 12; variant++) {
      esmm_matrix b = th_matrix_alloc(77, 50, (esmm_dtype)(variant % 3));
      fill(&b, t + 1, 0.9);
      drop_blocks(&b, blocks[t][0], blocks[t][1], t, 0.4);
      arrays a = make_arrays(&b, blocks[t][0], blocks[t][1], variant % 2 ? 64 : 32, (esmm_order)(variant / 2 % 2),
                             variant / 4 % 2);
      for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++) {
        esmm_weights *w = NULL;
        if (esmm_prepare_bsr(ctx, &a.b, &targets[i], &w) != ESMM_OK)
          fail_msg("prepare_bsr: %s", esmm_ctx_error(ctx));
        assert_int_equal(info_of(w).format.kind, targets[i].format.kind);
        if (targets[i].format.kind == ESMM_FORMAT_BSR) {
          expect_bsr_layout(w, &b);
          expect_same_zeros(ctx, w, &b);
        }
        if (i == 0)
          assert_int_equal(info_of(w).format.block_rows, blocks[t][0]);
        expect_back(ctx, "arrays", w, &b);
        esmm_weights_free(w);
        tried++;
      }
      free_arrays(&a);
      free(b.data);
    }
  assert_int_equal(tried, 4 * 12 * 5);
}

static void no_blocks_at_all(void **state)
{
  esmm_ctx *ctx = *state;
  const int32_t zeros[4] = {0};
  for (int rows = 0; rows <= 3; rows += 3) {
    const esmm_bsr b = {.size = sizeof b,
                        .rows = rows,
                        .cols = 8,
                        .block_rows = 1,
                        .block_cols = 8,
                        .index_bits = 32,
                        .row_pointers = zeros};
    const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_BSR};
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare_bsr(ctx, &b, &opts, &w), ESMM_OK);
    esmm_matrix dense = th_matrix_alloc(rows, 8, ESMM_F32);
    expect_back(ctx, "empty", w, &dense);
    assert_int_equal(info_of(w).blocks, 0);
    free(dense.data);
    esmm_weights_free(w);
  }
}

/* 40 x 24 in blocks of 16 x 8: three block rows of three. */
static void expect_damage(esmm_ctx *ctx, const char *what, int bits, void (*change)(arrays *a), esmm_status status,
                          const char *word1, const char *word2)
{
  esmm_matrix b = th_matrix_alloc(40, 24, ESMM_F32);
  fill(&b, 3, 1.0);
  for (int order = 0; order < 2; order++) {
    arrays a = make_arrays(&b, 16, 8, bits, (esmm_order)order, true);
    esmm_weights *w = (esmm_weights *)(void *)&w; /* any value: a failed prepare leaves NULL */
    esmm_matrix c = th_matrix_alloc(40, 24, ESMM_F32);
    assert_int_equal(a.b.blocks, 9);
    change(&a);
    th_expect(what, esmm_prepare_bsr(ctx, &a.b, NULL, &w), status, esmm_ctx_error(ctx), word1, word2);
    assert_null(w);
    esmm_weights *square = NULL;
    esmm_matrix other = th_matrix_alloc(24, 24, ESMM_F32);
    assert_int_equal(esmm_prepare(ctx, &other, NULL, &square), ESMM_OK);
    th_expect(what, esmm_matmul_bsr(ctx, &a.b, square, &c, NULL, NULL), status, esmm_ctx_error(ctx), word1, word2);
    esmm_weights_free(square);
    free(other.data);
    free(c.data);
    free_arrays(&a);
  }
  free(b.data);
}

static void damaged_arrays_are_refused(void **state)
{
  esmm_ctx *ctx = *state;
  for (index_bits = 32; index_bits <= 64; index_bits += 32) {
#define X(name, status, word1, word2, change) \
  expect_damage(ctx, #name, index_bits, damage_##name, status, word1, word2);
    DAMAGES(X)
#undef X
  }
}

/* A CPU has no memory of its own; and A's blocks are the host's everywhere. */
static void device_arrays_are_for_gpus(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(40, 24, ESMM_F32);
  fill(&b, 3, 1.0);
  arrays a = make_arrays(&b, 16, 8, 32, ESMM_ROW_MAJOR, true);
  a.b.place = ESMM_DEVICE;
  esmm_weights *w = NULL;
  th_expect("place", esmm_prepare_bsr(ctx, &a.b, NULL, &w), ESMM_ERR_DEVICE, esmm_ctx_error(ctx), "b->place", "CPU");
  assert_null(w);
  a.b.size = offsetof(esmm_bsr, place); /* a program that knows of no place */
  assert_int_equal(esmm_prepare_bsr(ctx, &a.b, NULL, &w), ESMM_OK);
  esmm_weights_free(w);
  free_arrays(&a);
  free(b.data);
}

/* More block rows than int32 counts, though there is not a single block. */
static void shapes_beyond_int32(void **state)
{
  esmm_ctx *ctx = *state;
  const int64_t pointers[2] = {0, 0};
  const esmm_bsr tall = {.size = sizeof tall,
                         .rows = (int64_t)INT32_MAX + 1,
                         .cols = 1,
                         .block_rows = 1,
                         .block_cols = 1,
                         .index_bits = 64,
                         .order = ESMM_COL_MAJOR,
                         .row_pointers = pointers};
  esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_BSR};
  esmm_weights *w = NULL;
  th_expect("tall", esmm_prepare_bsr(ctx, &tall, &opts, &w), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx), "int32", "larger");
  float first = 0; /* no more is looked at */
  const esmm_matrix wide = {.data = &first, .rows = 1, .cols = (int64_t)INT32_MAX + 10};
  opts.format.block_cols = 1;
  th_expect("wide", esmm_prepare(ctx, &wide, &opts, &w), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx), "int32", "larger");
  assert_null(w);
  const esmm_matrix high = {.rows = (int64_t)INT32_MAX + 10, .cols = 0};
  opts.format.block_rows = 1;
  th_expect("high", esmm_prepare(ctx, &high, &opts, &w), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx), "int32", "larger");
  enum { STRIPS = 1 << 15 }; /* of 256 columns, with as many rows as there may be: more than 2^63 bytes */
  int64_t *none = calloc(STRIPS + 1, sizeof *none);
  const esmm_bsr large = {.size = sizeof large,
                          .rows = (int64_t)INT32_MAX * 256,
                          .cols = STRIPS * 256,
                          .block_rows = 256,
                          .block_cols = 256,
                          .index_bits = 64,
                          .order = ESMM_COL_MAJOR,
                          .row_pointers = none};
  assert_non_null(none);
  th_expect("dense copy", esmm_prepare_bsr(ctx, &large, NULL, &w), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx), "dense copy",
            "");
  assert_null(w);
  free(none);
}

/* ---- N:M ---- */

static int bits_of(int m)
{
  return m > 16 ? 5 : m > 8 ? 4 : m > 4 ? 3 : m > 2 ? 2 : m > 1 ? 1 : 0;
}

/* At most n of every m k's alive in each strip of cols columns; a few groups have fewer. */
static void fit_nm(esmm_matrix *b, int n, int m, int64_t cols, uint64_t seed)
{
  th_rng rng = {seed};
  for (int64_t j0 = 0; j0 < b->cols; j0 += cols)
    for (int64_t k0 = 0; k0 < b->rows; k0 += m) {
      bool keep[32] = {false};
      const int64_t count = th_below(&rng, 4) == 0 ? th_below(&rng, n + 1) : n;
      for (int64_t i = 0; i < count; i++)
        keep[th_below(&rng, m)] = true;
      for (int64_t k = k0; k < k0 + m && k < b->rows; k++)
        for (int64_t j = j0; j < j0 + cols && j < b->cols; j++)
          if (!keep[k - k0])
            th_set(b, k, j, (k + j) % 5 == 0 ? -0.0 : 0.0);
    }
}

static unsigned field_at(const unsigned char *bytes, int64_t first_bit, int bits)
{
  unsigned value = 0;
  for (int i = 0; i < bits; i++)
    value |= (unsigned)(bytes[(first_bit + i) / 8] >> ((first_bit + i) % 8) & 1) << i;
  return value;
}

/* Rebuilds B from values and index alone, as docs/formats.md says where they lie. */
static void expect_nm_layout(const esmm_weights *w, const esmm_matrix *b, int n, int m, int cols)
{
  const esmm_nm_form *f = &w->nm;
  const int bits = bits_of(m);
  const int64_t short_group = b->rows % m, slots = b->rows / m * n + (short_group < n ? short_group : n);
  const size_t size = th_element_bytes(b->dtype);
  const int64_t list_bytes = (slots * bits + 63) / 64 * 8;
  assert_int_equal(f->bits, bits);
  assert_int_equal(f->slots, slots);
  for (int64_t j = 0; j < (b->cols + 15) / 16 * 16; j++) {
    unsigned char *seen = calloc((size_t)b->rows + 1, 1);
    int64_t before = -1;
    for (int64_t s = 0; s < slots; s++) {
      unsigned position = 0;
      if (cols == 1)
        position = field_at(f->index + (j / 16 * slots + s) * 2 * bits, j % 16 * bits, bits);
      else if (j < b->cols)
        position = field_at(f->index + j / cols * list_bytes, s * bits, bits);
      const int64_t k = s / n * m + position;
      uint32_t value = 0;
      memcpy(&value, (char *)f->values + (size_t)((j / 16 * slots + s) * 16 + j % 16) * size, size);
      if (j >= b->cols) {
        assert_int_equal(value, 0);
        if (cols > 1)
          continue;
      }
      assert_true(k > before && k < b->rows && (int)position < m);
      before = k;
      if (j < b->cols) {
        seen[k] = 1;
        if (!is_zero(b, k, j))
          assert_int_equal(value, bits_at(b, k, j));
      }
    }
    for (int64_t k = 0; j < b->cols && k < b->rows; k++)
      assert_true(seen[k] || is_zero(b, k, j));
    free(seen);
  }
}

static void nm_round_trips(void **state)
{
  esmm_ctx *ctx = *state;
  static const int widths[] = {1, 2, 5, 16, 20, 64};
  int tried = 0;
  th_arena arena;
  th_arena_create(&arena, 110 * 50 * 4);
  for (int m = 1; m <= 32; m++)
    for (int n = 1; n <= m; n += m > 8 ? 5 : m > 4 ? 2 : 1)
      for (int variant = 0; variant < 6; variant++) {
        const int64_t k = variant == 0 ? 0 : variant == 1 ? m - 1 : variant == 2 ? m : variant == 3 ? 3 * m + 1 : 100;
        const int64_t cols = (n * 7 + variant * 11) % 45 + 1;
        const int width = widths[(n + m + variant) % 6];
        esmm_matrix b;
        th_matrix_place(&arena, &b, k, cols, variant % 2 * 3, (esmm_dtype)((n + variant) % 3),
                        (esmm_order)(variant / 2 % 2));
        fill(&b, (uint64_t)(n * 100 + m), 0.95);
        fit_nm(&b, n, m, width, (uint64_t)variant);
        const esmm_prepare_opts opts = {.size = sizeof opts,
                                        .format.kind = ESMM_FORMAT_NM,
                                        .format.keep = n,
                                        .format.group = m,
                                        .format.group_cols = width == 1 && variant % 2 ? 0 : width};
        esmm_weights *w = prepare(ctx, &b, &opts);
        expect_nm_layout(w, &b, n, m, width);
        expect_same_zeros(ctx, w, &b);
        expect_back(ctx, "nm", w, &b);
        const esmm_weights_info info = info_of(w);
        assert_int_equal(info.format.kind, ESMM_FORMAT_NM);
        assert_true(info.format.keep == n && info.format.group == m && info.format.group_cols == width);
        assert_true(info.blocks == 0 && info.block_density == 0.0 && info.format.block_rows == 0);
        esmm_weights_free(w);
        tried++;
      }
  th_arena_free(&arena);
  assert_true(tried > 500);
}

/* 2:4: one 32-bit word for every vector of 16 values, column c's position in bits 2c and 2c + 1. */
static void nm_2_4_is_pinned(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(4, 2, ESMM_F32);
  th_set(&b, 1, 0, 10); /* column 0: k 1 and 3 */
  th_set(&b, 3, 0, 30);
  th_set(&b, 2, 1, 20); /* column 1: k 2 alone; k 0 fills up */
  const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_NM};
  esmm_weights *w = prepare(ctx, &b, &opts);
  const unsigned char first[] = {1 | 0 << 2, 0, 0, 0}, second[] = {3 | 2 << 2 | 1 << 4 | 1 << 6, 0x55, 0x55, 0x55};
  assert_memory_equal(w->nm.index, first, 4);
  assert_memory_equal(w->nm.index + 4, second, 4); /* columns past n: k 0 and 1, like columns of zeros */
  const float *values = w->nm.values;
  assert_true(values[0] == 10 && values[1] == 0 && values[16] == 30 && values[17] == 20);
  for (int i = 2; i < 16; i++)
    assert_true(values[i] == 0 && values[16 + i] == 0);
  esmm_weights_free(w);
  free(b.data);
}

static esmm_status check_nm(esmm_ctx *ctx, const esmm_matrix *b, int keep, int group, int64_t *k, int64_t *col)
{
  const esmm_format format = {.kind = ESMM_FORMAT_NM, .keep = keep, .group = group};
  return esmm_format_check(ctx, b, &format, k, col);
}

static void nm_misfits_are_named(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(11, 40, ESMM_BF16);
  int64_t k = 0, col = 0;
  assert_int_equal(check_nm(ctx, &b, 2, 4, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  for (int i = 8; i < 11; i++) /* the short last group, of column 7 */
    th_set(&b, i, 7, i);
  for (int i = 4; i < 7; i++) /* an earlier one, of a later column */
    th_set(&b, i, 33, i);
  esmm_weights *w = (esmm_weights *)(void *)&w;
  esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_NM};
  th_expect("2:4", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "k 4 to 7 of column 33",
            "3 nonzero");
  assert_null(w);
  assert_int_equal(check_nm(ctx, &b, 2, 4, &k, &col), ESMM_OK);
  assert_true(k == 4 && col == 33);
  assert_int_equal(check_nm(ctx, &b, 3, 4, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  th_set(&b, 5, 33, 0);
  th_set(&b, 6, 33, -0.0);
  assert_int_equal(check_nm(ctx, &b, 2, 4, &k, &col), ESMM_OK);
  assert_true(k == 8 && col == 7);
  th_expect("short group", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
            "k 8 to 10 of column 7", "");
  th_set(&b, 9, 7, 0);
  th_set(&b, 0, 20, (double)NAN); /* NaN is no zero: with k 1 and 2 of its neighbour one too many for both */
  th_set(&b, 1, 21, 1);
  th_set(&b, 2, 21, 1);
  assert_int_equal(check_nm(ctx, &b, 2, 4, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  opts.format.group_cols = 4;
  th_expect("shared", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
            "k 0 to 3 of columns from 20", "3 nonzero");
  assert_int_equal(esmm_format_check(ctx, &b, &opts.format, &k, &col), ESMM_OK); /* 0:0 is 2:4 here, too */
  assert_true(k == 0 && col == 20);
  opts.format.group_cols = 3; /* columns 18..20 and 21..23 */
  assert_int_equal(esmm_format_check(ctx, &b, &opts.format, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  assert_int_equal(esmm_prepare(ctx, &b, &opts, &w), ESMM_OK);
  expect_back(ctx, "shared", w, &b);
  esmm_weights_free(w);
  free(b.data);
}

/* ---- products ---- */

/* Small integers: every sum is exact, whatever the order. */
static void expect_product(esmm_ctx *ctx, const esmm_weights *w, const esmm_matrix *b, int64_t m, const char *force)
{
  esmm_matrix a = th_matrix_alloc(m, b->rows, ESMM_F32), c = th_matrix_alloc(m, b->cols, ESMM_F32);
  th_fill(&a, 5, 0.5, true);
  memset(c.data, 0xff, (size_t)(m * b->cols) * 4);
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  if (esmm_matmul(ctx, &a, w, &c, &opts, NULL) != ESMM_OK)
    fail_msg("%s: %s", force, esmm_ctx_error(ctx));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < b->cols; j++) {
      double sum = 0;
      for (int64_t k = 0; k < b->rows; k++)
        sum += th_get(&a, i, k) * th_get(b, k, j);
      if (!(th_get(&c, i, j) == sum))
        fail_msg("%s, %s: C(%lld, %lld) is %g, should be %g", esmm_format_str(w->format), force, (long long)i,
                 (long long)j, th_get(&c, i, j), sum);
    }
  free(a.data);
  free(c.data);
}

static void every_format_multiplies(void **state)
{
  esmm_ctx *ctx = *state;
  static const esmm_prepare_opts targets[] = {
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_BSR}},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_BSR, .block_rows = 5, .block_cols = 9}},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_NM}},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_NM, .keep = 3, .group = 7}},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_NM, .keep = 8, .group = 32, .group_cols = 32}},
      {.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_NM, .keep = 2, .group = 4, .group_cols = 5}},
  };
  for (size_t t = 0; t < sizeof targets / sizeof targets[0]; t++)
    for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
      esmm_matrix b = th_matrix_alloc(99, 45, (esmm_dtype)dtype);
      th_fill(&b, t + 1, 0.9, true);
      if (targets[t].format.kind == ESMM_FORMAT_NM)
        fit_nm(&b, targets[t].format.keep ? targets[t].format.keep : 2,
               targets[t].format.group ? targets[t].format.group : 4,
               targets[t].format.group_cols ? targets[t].format.group_cols : 1, t);
      else
        drop_blocks(&b, 32, 32, t, 0.5);
      esmm_weights *w = prepare(ctx, &b, &targets[t]);
      for (int64_t m = 1; m <= 35; m += 17) {
        expect_product(ctx, w, &b, m, "auto");
        expect_product(ctx, w, &b, m, "ref");
      }
      esmm_weights_free(w);
      free(b.data);
    }
}

static void strict_needs_dense(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(8, 8, ESMM_F32), a = th_matrix_alloc(2, 8, ESMM_F32),
              c = th_matrix_alloc(2, 8, ESMM_F32);
  esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_BSR, .strict = 1};
  esmm_weights *w = NULL;
  th_expect("prepare", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "strict", "bsr");
  opts.strict = 0;
  w = prepare(ctx, &b, &opts);
  const esmm_matmul_opts strict = {.size = sizeof strict, .strict = 1};
  th_expect("matmul", esmm_matmul(ctx, &a, w, &c, &strict, NULL), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "strict",
            "bsr weights dropped their zeros");
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
}

static void blocks_times_blocks(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix a = th_matrix_alloc(61, 90, ESMM_F32), b = th_matrix_alloc(90, 50, ESMM_F32),
              c = th_matrix_alloc(61, 50, ESMM_F32), d = th_matrix_alloc(61, 50, ESMM_F32);
  float bias[50];
  for (int i = 0; i < 50; i++)
    bias[i] = (float)(i % 9 - 4);
  th_fill(&a, 1, 0.8, true);
  th_fill(&b, 2, 0.8, true);
  drop_blocks(&a, 8, 16, 3, 0.4);
  drop_blocks(&b, 32, 32, 4, 0.5);
  for (int variant = 0; variant < 4; variant++) {
    const esmm_prepare_opts opts = {.size = sizeof opts,
                                    .format.kind = variant % 2 ? ESMM_FORMAT_BSR : ESMM_FORMAT_DENSE};
    esmm_weights *w = prepare(ctx, &b, &opts);
    arrays blocks = make_arrays(&a, 8, 16, variant % 2 ? 64 : 32, (esmm_order)(variant / 2), true);
    const esmm_matmul_opts with = {.size = sizeof with, .bias = bias, .activation = ESMM_ACT_RELU};
    esmm_stats stats = {.size = sizeof stats};
    memset(c.data, 0xff, 61 * 50 * 4);
    if (esmm_matmul_bsr(ctx, &blocks.b, w, &c, &with, &stats) != ESMM_OK)
      fail_msg("matmul_bsr: %s", esmm_ctx_error(ctx));
    assert_int_equal(esmm_matmul(ctx, &a, w, &d, &with, NULL), ESMM_OK);
    assert_memory_equal(c.data, d.data, 61 * 50 * 4);
    assert_true(stats.flop_dense == 2.0 * 61 * 90 * 50);

    esmm_pattern *pattern = NULL;
    assert_int_equal(esmm_pattern_extract(ctx, &a, 1, &pattern), ESMM_OK);
    const esmm_matmul_opts twice = {.size = sizeof twice, .a_pattern = pattern};
    th_expect("pattern", esmm_matmul_bsr(ctx, &blocks.b, w, &c, &twice, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
              "a_pattern", "");
    esmm_pattern_free(pattern);
    esmm_matrix inside = {.data = blocks.values, .rows = 61, .cols = 50};
    th_expect("overlap", esmm_matmul_bsr(ctx, &blocks.b, w, &inside, NULL, NULL), ESMM_ERR_OVERLAP, esmm_ctx_error(ctx),
              "values", "");
    free_arrays(&blocks);
    esmm_weights_free(w);
  }
  free(a.data);
  free(b.data);
  free(c.data);
  free(d.data);
}

/* ---- options and bytes ---- */

static void options_are_checked(void **state)
{
  esmm_ctx *ctx = *state;
  static const struct {
    esmm_prepare_opts opts;
    const char *word1, *word2;
  } bad[] = {
      {{.format.kind = (esmm_format_kind)3}, "format", "3"},
      {{.format.kind = (esmm_format_kind)-1}, "format", "-1"},
      {{.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 257}, "block_rows", "257"},
      {{.format.kind = ESMM_FORMAT_BSR, .format.block_cols = -1}, "block_cols", "-1"},
      {{.format.kind = ESMM_FORMAT_NM, .format.keep = 2}, "2:0", "32"},
      {{.format.kind = ESMM_FORMAT_NM, .format.group = 4}, "0:4", ""},
      {{.format.kind = ESMM_FORMAT_NM, .format.keep = 5, .format.group = 4}, "5:4", ""},
      {{.format.kind = ESMM_FORMAT_NM, .format.keep = 1, .format.group = 33}, "1:33", ""},
      {{.format.kind = ESMM_FORMAT_NM, .format.keep = -1, .format.group = 4}, "-1:4", ""},
      {{.format.kind = ESMM_FORMAT_NM, .format.group_cols = -2}, "group_cols", "-2"},
      {{.format.reserved = {7, 0}}, "opts->format.reserved[0]", "7"},
      {{.format.kind = ESMM_FORMAT_NM, .format.reserved = {0, -1}}, "opts->format.reserved[1]", "-1"},
  };
  esmm_matrix b = th_matrix_alloc(8, 8, ESMM_F32);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    esmm_prepare_opts opts = bad[i].opts;
    esmm_weights *w = (esmm_weights *)(void *)&w;
    opts.size = sizeof opts;
    th_expect(bad[i].word1, esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), bad[i].word1,
              bad[i].word2);
    assert_null(w);
  }
  /* A program that was built when there were no formats. */
  esmm_prepare_opts old = {
      .size = offsetof(esmm_prepare_opts, format), .format.kind = (esmm_format_kind)77, .format.block_rows = -9};
  esmm_weights *w = prepare(ctx, &b, &old);
  assert_int_equal(info_of(w).format.kind, ESMM_FORMAT_DENSE);
  struct {
    esmm_weights_info info;
    char guard[16];
  } shorter;
  memset(&shorter, 0x5a, sizeof shorter);
  shorter.info.size = offsetof(esmm_weights_info, format);
  assert_int_equal(esmm_weights_get_info(w, &shorter.info), ESMM_OK);
  assert_int_equal(shorter.info.blocks, 0x5a5a5a5a5a5a5a5a);

  esmm_matrix out = th_matrix_alloc(8, 9, ESMM_F32);
  th_expect("shape", esmm_weights_to_dense(ctx, w, &out), ESMM_ERR_SHAPE, esmm_ctx_error(ctx), "8 x 9", "8 x 8");
  th_expect("weights", esmm_weights_to_dense(ctx, NULL, &out), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "weights", "");
  th_expect("out", esmm_weights_to_dense(ctx, w, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "out", "");
  assert_int_equal(esmm_weights_to_dense(NULL, w, &out), ESMM_ERR_ARGUMENT);
  int64_t k, col;
  th_expect("k", check_nm(ctx, &b, 2, 4, NULL, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "k is NULL", "");
  th_expect("col", check_nm(ctx, &b, 2, 4, &k, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "col", "");
  th_expect("n", check_nm(ctx, &b, 3, 2, &k, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "3:2", "");
  th_expect("b", check_nm(ctx, NULL, 1, 2, &k, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "b is NULL", "");
  assert_int_equal(check_nm(NULL, &b, 1, 2, &k, &col), ESMM_ERR_ARGUMENT);
  esmm_weights *none = NULL;
  assert_int_equal(esmm_prepare_bsr(NULL, NULL, NULL, &none), ESMM_ERR_ARGUMENT);
  th_expect("NULL", esmm_prepare_bsr(ctx, NULL, NULL, &none), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "b is NULL", "");
  th_expect("NULL", esmm_prepare_bsr(ctx, NULL, NULL, NULL), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx), "weights", "");
  assert_int_equal(esmm_matmul_bsr(NULL, NULL, w, &out, NULL, NULL), ESMM_ERR_ARGUMENT);
  assert_string_equal(esmm_format_str(ESMM_FORMAT_DENSE), "dense");
  assert_string_equal(esmm_format_str(ESMM_FORMAT_BSR), "bsr");
  assert_string_equal(esmm_format_str(ESMM_FORMAT_NM), "nm");
  assert_string_equal(esmm_format_str((esmm_format_kind)9), "unknown");
  esmm_weights_free(w);
  free(out.data);
  free(b.data);
}

/* What the formats promise, of all that is held: values, index, bitmaps. */
static void bytes_are_few(void **state)
{
  esmm_ctx *ctx = *state;
  static const struct {
    esmm_dtype dtype;
    int n, m, cols;
    double most; /* of the dense matrix's own bytes */
  } limits[] = {
      {ESMM_F32, 2, 4, 1, 0.54},  {ESMM_BF16, 2, 4, 1, 0.575}, {ESMM_F16, 1, 4, 1, 0.30},
      {ESMM_F32, 8, 32, 1, 0.30}, {ESMM_F32, 2, 4, 32, 0.51},  {ESMM_BF16, 4, 8, 16, 0.52},
  };
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
    esmm_matrix b = th_matrix_alloc(1024, 1024, limits[i].dtype);
    th_fill(&b, 1, 1.0, false);
    fit_nm(&b, limits[i].n, limits[i].m, limits[i].cols, i);
    const esmm_prepare_opts opts = {.size = sizeof opts,
                                    .format.kind = ESMM_FORMAT_NM,
                                    .format.keep = limits[i].n,
                                    .format.group = limits[i].m,
                                    .format.group_cols = limits[i].cols,
                                    .max_bytes_ratio = 0.7};
    esmm_weights *w = prepare(ctx, &b, &opts);
    const double share = (double)info_of(w).bytes / (1024.0 * 1024.0 * (double)th_element_bytes(limits[i].dtype));
    print_message("# %d:%d %s, %d columns together: %.4f of dense\n", limits[i].n, limits[i].m,
                  esmm_dtype_str(limits[i].dtype), limits[i].cols, share);
    assert_true(share <= limits[i].most);
    esmm_weights_free(w);
    free(b.data);
  }
  esmm_matrix b = th_matrix_alloc(1024, 1024, ESMM_F32);
  th_fill(&b, 1, 1.0, false);
  drop_blocks(&b, 32, 32, 7, 0.125);
  esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_BSR};
  esmm_weights *w = prepare(ctx, &b, &opts);
  const double held = (double)info_of(w).bytes / (1024.0 * 1024.0 * 4);
  assert_true(held <= info_of(w).block_density + 0.01);
  esmm_weights_free(w);
  opts.format.block_rows = opts.format.block_cols =
      1; /* a full matrix in single elements: each has an index as large as itself */
  th_fill(&b, 1, 1.0, false);
  opts.max_bytes_ratio = 1.5;
  th_expect("ratio", esmm_prepare(ctx, &b, &opts, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx), "max_bytes_ratio",
            "larger blocks");
  free(b.data);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bsr_round_trips),
      cmocka_unit_test(bsr_from_arrays),
      cmocka_unit_test(no_blocks_at_all),
      cmocka_unit_test(damaged_arrays_are_refused),
      cmocka_unit_test(device_arrays_are_for_gpus),
      cmocka_unit_test(shapes_beyond_int32),
      cmocka_unit_test(nm_round_trips),
      cmocka_unit_test(nm_2_4_is_pinned),
      cmocka_unit_test(nm_misfits_are_named),
      cmocka_unit_test(every_format_multiplies),
      cmocka_unit_test(strict_needs_dense),
      cmocka_unit_test(blocks_times_blocks),
      cmocka_unit_test(options_are_checked),
      cmocka_unit_test(bytes_are_few),
  };
  return cmocka_run_group_tests_name("formats", tests, th_cpu_set_up, th_cpu_tear_down);
}
