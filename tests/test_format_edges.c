/*
 * test_format_edges.c: shapes and calls at the edge of what the formats take: no k at all, more blocks than can be
 * counted, blocks wider than the matrix, and products of blocks that fail before they begin.
 */
#include "harness.h"

#include <stdlib.h>
#include <string.h>

/* Nothing in memory bounds the columns of a matrix without rows: no work may be done for each of them. */
static void no_k_and_any_n(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = {.rows = 0, .cols = (int64_t)1 << 49}, out = b;
  int64_t k = 0, col = 0;
  const esmm_format format = {.kind = ESMM_FORMAT_NM};
  assert_int_equal(esmm_format_check(ctx, &b, &format, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  for (int cols = 1; cols <= 32; cols += 31) {
    const esmm_prune_opts prune = {.size = sizeof prune, .format.kind = ESMM_FORMAT_NM, .format.group_cols = cols};
    esmm_prune_report report = {.size = sizeof report};
    assert_int_equal(esmm_prune(ctx, &b, &prune, &report), ESMM_OK);
    assert_true(report.kept == 0 && report.dropped == 0);
    const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_NM, .format.group_cols = cols};
    esmm_weights *w = NULL;
    if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
      fail_msg("prepare: %s", esmm_ctx_error(ctx));
    esmm_weights_info info = {.size = sizeof info};
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
    assert_true(info.rows == 0 && info.cols == b.cols && info.format.group_cols == cols && info.element_density == 0);
    assert_int_equal(esmm_weights_to_dense(ctx, w, &out), ESMM_OK);
    esmm_weights_free(w);
  }
}

/* A shape that no int32 counts the blocks of is refused for itself: row_pointers, which would have to be as long, ends
   before a page that cannot be read. */
static void too_many_lines_of_blocks(void **state)
{
  esmm_ctx *ctx = *state;
  th_arena arena;
  th_arena_create(&arena, 64);
  void *pointers = memset(th_place(&arena, 16), 0, 16);
  esmm_matrix b = th_matrix_alloc(4, 4, ESMM_F32), c = th_matrix_alloc(4, 4, ESMM_F32);
  esmm_weights *square = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &square), ESMM_OK);
  static const int64_t sides[] = {(int64_t)1 << 62, (int64_t)1 << 40, ((int64_t)INT32_MAX + 1) * 4};
  for (int i = 0; i < 3; i++)
    for (int variant = 0; variant < 8; variant++) {
      const bool tall = variant % 2;
      const esmm_bsr blocks = {.size = sizeof blocks,
                               .rows = tall ? sides[i] : 4,
                               .cols = tall ? 4 : sides[i],
                               .block_rows = 4,
                               .block_cols = 4,
                               .index_bits = variant / 2 % 2 ? 64 : 32,
                               .order = variant / 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                               .row_pointers = pointers};
      const esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = ESMM_FORMAT_BSR};
      esmm_weights *w = NULL;
      th_expect("prepare", esmm_prepare_bsr(ctx, &blocks, &opts, &w), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx), "int32",
                "larger blocks");
      assert_null(w);
      th_expect("matmul", esmm_matmul_bsr(ctx, &blocks, square, &c, NULL, NULL), ESMM_ERR_OVERFLOW, esmm_ctx_error(ctx),
                "int32", "");
    }
  esmm_weights_free(square);
  free(b.data);
  free(c.data);
  th_arena_free(&arena);
}

/* Blocks wider than B are padding, which max_bytes_ratio does not count; what it counts of blocks is their index. */
static void blocks_wider_than_b(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(64, 64, ESMM_F32);
  th_fill(&b, 1, 1.0, true);
  for (int side = 128; side <= 256; side += 128) {
    const esmm_prepare_opts opts = {.size = sizeof opts,
                                    .format.kind = ESMM_FORMAT_BSR,
                                    .format.block_rows = side,
                                    .format.block_cols = side,
                                    .max_bytes_ratio = 1};
    esmm_weights *w = NULL;
    if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
      fail_msg("blocks of %d: %s", side, esmm_ctx_error(ctx));
    esmm_weights_free(w);
  }
  free(b.data);
  b = th_matrix_alloc(512, 512, ESMM_BF16);
  th_fill(&b, 1, 1.0, false);
  const esmm_prepare_opts single = {
      .size = sizeof single, .format.kind = ESMM_FORMAT_BSR, .format.block_rows = 1, .format.block_cols = 1};
  esmm_weights *w = NULL;
  th_expect("single elements", esmm_prepare(ctx, &b, &single, &w), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx),
            "3.00 times", "larger blocks");
  assert_null(w);
  free(b.data);
}

/* ---- products of blocks that are refused ---- */

enum { M = 6, N = 10, K = 8, BLOCK = 2 };

/* A [M, K] of 2 x 2 blocks, one in each block row, in a buffer that everything may be laid into. */
typedef struct fixture {
  int32_t buffer[256];
  esmm_bsr a;
  esmm_matrix b, c;
  esmm_weights *w;
} fixture;

enum { POINTERS = 0, INDICES = 8, VALUES = 16, AFTER = 64 }; /* places in the buffer, of four bytes each */

static void make_fixture(esmm_ctx *ctx, fixture *f)
{
  memset(f, 0, sizeof *f);
  for (int i = 0; i < M / BLOCK; i++) {
    f->buffer[POINTERS + i + 1] = i + 1;
    f->buffer[INDICES + i] = i;
  }
  for (int i = 0; i < M / BLOCK * BLOCK * BLOCK; i++) {
    const float value = (float)(i + 1);
    memcpy(f->buffer + VALUES + i, &value, sizeof value);
  }
  f->a = (esmm_bsr){.size = sizeof f->a,
                    .rows = M,
                    .cols = K,
                    .block_rows = BLOCK,
                    .block_cols = BLOCK,
                    .index_bits = 32,
                    .blocks = M / BLOCK,
                    .row_pointers = f->buffer + POINTERS,
                    .column_indices = f->buffer + INDICES,
                    .values = f->buffer + VALUES};
  f->b = th_matrix_alloc(K, N, ESMM_F32);
  f->c = th_matrix_alloc(M, N, ESMM_F32);
  th_fill(&f->b, 1, 1.0, true);
  assert_int_equal(esmm_prepare(ctx, &f->b, NULL, &f->w), ESMM_OK);
}

static void free_fixture(fixture *f)
{
  esmm_weights_free(f->w);
  free(f->b.data);
  free(f->c.data);
}

/* Whichever check it is that fails: no pattern is left that somebody would free or read. */
static void no_pattern_after_a_failure(void **state)
{
  esmm_ctx *ctx = *state;
  fixture f;
  make_fixture(ctx, &f);
  esmm_pattern *const any = (esmm_pattern *)(void *)&f, *pattern = any;
  esmm_matmul_opts opts = {.size = sizeof opts, .c_pattern = &pattern};
  const esmm_bsr good = f.a;
  f.a.block_rows = 0;
  assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, &f.c, &opts, NULL), ESMM_ERR_ARGUMENT);
  assert_null(pattern);
  f.a = good;

  pattern = any;
  assert_int_equal(esmm_matmul_bsr(ctx, NULL, f.w, &f.c, &opts, NULL), ESMM_ERR_ARGUMENT);
  assert_null(pattern);

  pattern = any;
  assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, NULL, &opts, NULL), ESMM_ERR_ARGUMENT);
  assert_null(pattern);

  pattern = any;
  opts.a_pattern = any;
  assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, &f.c, &opts, NULL), ESMM_ERR_ARGUMENT);
  assert_null(pattern);
  opts.a_pattern = NULL;

  pattern = any;
  esmm_matrix inside = {.data = f.buffer + VALUES, .rows = M, .cols = N};
  assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, &inside, &opts, NULL), ESMM_ERR_OVERLAP);
  assert_null(pattern);

  assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, &f.c, &opts, NULL), ESMM_OK);
  assert_int_equal(th_pattern(ctx, pattern).k, N);
  esmm_pattern_free(pattern);
  free_fixture(&f);
}

/* C and the counts may lie in none of the three arrays; next to them is fine. */
static void results_in_the_arrays(void **state)
{
  esmm_ctx *ctx = *state;
  static const struct {
    int last; /* element of the array */
    const char *name;
  } arrays[] = {
      {POINTERS + M / BLOCK, "a->row_pointers"},
      {INDICES + M / BLOCK - 1, "a->column_indices"},
      {VALUES + M / BLOCK * BLOCK * BLOCK - 1, "a->values"},
  };
  fixture f, before;
  make_fixture(ctx, &f);
  /* Apart from each other, so that only one of them is met. */
  f.a.column_indices = memcpy(f.buffer + INDICES + AFTER, f.buffer + INDICES, 8 * sizeof f.buffer[0]);
  f.a.values = memcpy(f.buffer + VALUES + 2 * AFTER, f.buffer + VALUES, 16 * sizeof f.buffer[0]);
  for (int i = 0; i < 3; i++) {
    int32_t *last = f.buffer + arrays[i].last + i * AFTER;
    before = f;
    esmm_matrix c = {.data = last, .rows = M, .cols = N, .dtype = ESMM_BF16};
    th_expect("c", esmm_matmul_bsr(ctx, &f.a, f.w, &c, NULL, NULL), ESMM_ERR_OVERLAP, esmm_ctx_error(ctx), "c (",
              arrays[i].name);
    const esmm_matmul_opts counts = {.size = sizeof counts, .column_nonzeros = last};
    th_expect("counts", esmm_matmul_bsr(ctx, &f.a, f.w, &f.c, &counts, NULL), ESMM_ERR_OVERLAP, esmm_ctx_error(ctx),
              "opts->column_nonzeros (", arrays[i].name);
    assert_memory_equal(before.buffer, f.buffer, sizeof f.buffer);
    const esmm_matmul_opts behind = {.size = sizeof behind, .column_nonzeros = last + 1};
    assert_int_equal(esmm_matmul_bsr(ctx, &f.a, f.w, &f.c, &behind, NULL), ESMM_OK);
  }
  free_fixture(&f);
}

/* What cannot be checked is refused, with the field as the caller wrote it. */
static void format_check_refuses(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_matrix b = th_matrix_alloc(8, 8, ESMM_F32);
  int64_t k = 0, col = 0;
  th_expect("format", esmm_format_check(ctx, &b, NULL, &k, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
            "format is NULL", "");
  esmm_format format = {.kind = ESMM_FORMAT_BSR};
  th_expect("bsr", esmm_format_check(ctx, &b, &format, &k, &col), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx),
            "format->kind is bsr", "only nm");
  format.kind = ESMM_FORMAT_DENSE;
  th_expect("dense", esmm_format_check(ctx, &b, &format, &k, &col), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(ctx),
            "format->kind is dense", "only nm");
  format.kind = (esmm_format_kind)5;
  th_expect("kind", esmm_format_check(ctx, &b, &format, &k, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
            "format->kind is 5", "");
  format = (esmm_format){.kind = ESMM_FORMAT_NM, .reserved = {0, 3}};
  th_expect("reserved", esmm_format_check(ctx, &b, &format, &k, &col), ESMM_ERR_ARGUMENT, esmm_ctx_error(ctx),
            "format->reserved[1] is 3", "");
  assert_true(k == -1 && col == -1);
  free(b.data);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(no_k_and_any_n),        cmocka_unit_test(too_many_lines_of_blocks),
      cmocka_unit_test(blocks_wider_than_b),   cmocka_unit_test(no_pattern_after_a_failure),
      cmocka_unit_test(results_in_the_arrays), cmocka_unit_test(format_check_refuses),
  };
  return cmocka_run_group_tests_name("format_edges", tests, th_cpu_set_up, th_cpu_tear_down);
}
