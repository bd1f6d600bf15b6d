/*
 * test_empty.c: matrices without rows or columns, whose data may be NULL, through every function that takes one. What
 * goes wrong here is memcpy of NULL or arithmetic on it: undefined, and seen by the sanitizer's build alone.
 */
#include "esmm_ffn.h"
#include "esmm_tools.h"
#include "harness.h"
#include "scratch.h"

#include <stdlib.h>
#include <string.h>

enum { LD = 7 };

/* NULL where there are no elements; ld larger than needed, so that rows would be apart. */
static esmm_matrix make(int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = dtype, .order = order, .ld = LD};
  if (rows > 0 && cols > 0) {
    m.data = calloc((size_t)(LD * LD), sizeof(float));
    assert_non_null(m.data);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++)
        th_set(&m, i, j, (double)(1 + i + j));
  }
  return m;
}

static void must(esmm_ctx *ctx, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", esmm_status_str(status), esmm_ctx_error(ctx));
}

static void patterns(esmm_ctx *ctx, const esmm_matrix *a, const esmm_matrix *b)
{
  esmm_pattern *rows = NULL, *columns = NULL, *coarser = NULL, *reordered = NULL;
  esmm_skip_stats stats = {.size = sizeof stats};
  int64_t order[LD];
  must(ctx, esmm_pattern_extract(ctx, a, 1, &rows));
  must(ctx, esmm_pattern_extract_b(ctx, b, 2, &columns));
  must(ctx, esmm_pattern_coarsen(ctx, rows, 4, &coarser));
  must(ctx, esmm_pattern_reorder(ctx, rows, 2, order, &reordered));
  must(ctx, esmm_pattern_skip_stats(ctx, coarser, columns, &stats));
  esmm_pattern_info info = {.size = sizeof info};
  must(ctx, esmm_pattern_get_info(ctx, rows, &info));
  assert_true(info.k == a->cols && info.strips == a->rows);
  esmm_pattern_free(rows);
  esmm_pattern_free(columns);
  esmm_pattern_free(coarser);
  esmm_pattern_free(reordered);
}

static void copies(esmm_ctx *ctx, const esmm_matrix *m)
{
  for (int i = 0; i < 6; i++) {
    esmm_matrix to = make(m->rows, m->cols, (esmm_dtype)(i % 3), (esmm_order)(i / 3));
    must(ctx, esmm_matrix_copy(ctx, m, &to));
    const esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_RANDOM, .density = 0.5, .seed = 1};
    must(ctx, esmm_generate(ctx, &g, &to));
    const esmm_prune_opts blocks = {.size = sizeof blocks, .format = {.kind = ESMM_FORMAT_BSR}, .density = 0.5},
                          groups = {.size = sizeof groups, .format = {.kind = ESMM_FORMAT_NM, .keep = 2, .group = 4}};
    esmm_prune_report report = {.size = sizeof report};
    must(ctx, esmm_prune(ctx, &to, &blocks, &report));
    must(ctx, esmm_prune(ctx, &to, &groups, &report));
    const esmm_prune_opts top = {.size = sizeof top, .top = 3, .soft = 1},
                          whole = {.size = sizeof whole, .density = 0.5, .scope = ESMM_PRUNE_MATRIX, .soft = 1};
    must(ctx, esmm_prune(ctx, &to, &top, &report));
    must(ctx, esmm_prune(ctx, &to, &whole, &report));
    int64_t k, col;
    must(ctx, esmm_format_check(ctx, &to, &(esmm_format){.kind = ESMM_FORMAT_NM, .keep = 2, .group = 4}, &k, &col));
    free(to.data);
  }
}

/* One product with everything that can come after it. */
static void multiply(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, int64_t n, const char *force)
{
  const int64_t m = a->rows;
  for (int i = 0; i < 12; i++) {
    esmm_matrix c = make(m, n, (esmm_dtype)(i % 3), (esmm_order)(i / 3 % 2));
    const esmm_matrix residual = make(m, n, (esmm_dtype)(i % 3), (esmm_order)(i / 3 % 2));
    float bias[LD] = {1, 2, 3};
    const float beta = (float)(i / 6);
    int32_t counts[LD];
    esmm_pattern *pattern = NULL, *of_a = NULL;
    must(ctx, esmm_pattern_extract(ctx, a, 2, &of_a));
    esmm_stats stats = {.size = sizeof stats};
    const bool more = i % 2;
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .beta = &beta,
                                   .bias = more ? bias : NULL,
                                   .activation = more ? ESMM_ACT_GELU : ESMM_ACT_NONE,
                                   .residual = more ? &residual : NULL,
                                   .column_nonzeros = n > 0 ? counts : NULL,
                                   .c_pattern = &pattern,
                                   .c_strip_rows = 2,
                                   .a_pattern = of_a,
                                   .force = force};
    const esmm_status status = esmm_matmul(ctx, a, w, &c, &opts, &stats);
    if (!(force && status == ESMM_ERR_UNSUPPORTED))
      must(ctx, status);
    esmm_verdict verdicts[4];
    int count = 4;
    must(ctx, force ? ESMM_OK : esmm_explain(ctx, a, w, &c, NULL, verdicts, sizeof *verdicts, &count));
    esmm_pattern_free(pattern);
    esmm_pattern_free(of_a);
    free(residual.data);
    free(c.data);
  }
}

static void weights(esmm_ctx *ctx, const esmm_matrix *a, const esmm_matrix *b, const char *path)
{
  static const esmm_prepare_opts forms[] = {
      {.size = sizeof *forms},
      {.size = sizeof *forms, .use = ESMM_USE_DECODE},
      {.size = sizeof *forms, .use = ESMM_USE_LARGE_M},
      {.size = sizeof *forms, .strict = 1},
      {.size = sizeof *forms,
       .format = {.kind = ESMM_FORMAT_BSR, .block_rows = 2, .block_cols = 2},
       .max_bytes_ratio = 100},
      {.size = sizeof *forms, .format = {.kind = ESMM_FORMAT_BSR}, .max_bytes_ratio = 1e6},
      {.size = sizeof *forms, .format = {.kind = ESMM_FORMAT_NM, .keep = 4, .group = 4}, .max_bytes_ratio = 100},
      {.size = sizeof *forms,
       .format = {.kind = ESMM_FORMAT_NM, .keep = 4, .group = 4, .group_cols = 4},
       .max_bytes_ratio = 100}};
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    esmm_weights *w = NULL, *again = NULL;
    must(ctx, esmm_prepare(ctx, b, &forms[i], &w));
    if (b->dtype == ESMM_F32 && b->order == ESMM_ROW_MAJOR) { /* files take time */
      must(ctx, esmm_weights_save(ctx, w, path));
      must(ctx, esmm_weights_load(ctx, path, &again));
    }
    const esmm_weights *either = again ? again : w;
    for (int j = 0; j < 6; j++) {
      esmm_matrix out = make(b->rows, b->cols, (esmm_dtype)(j % 3), (esmm_order)(j / 3));
      if (out.dtype == b->dtype && out.order == ESMM_ROW_MAJOR)
        must(ctx, esmm_weights_to_dense(ctx, either, &out));
      else /* or it is refused, by a rule or another */
        (void)esmm_weights_to_dense(ctx, w, &out);
      for (int64_t r = 0; out.dtype == b->dtype && out.order == ESMM_ROW_MAJOR && out.data && r < out.rows; r++)
        for (int64_t c = 0; c < out.cols; c++)
          assert_true(th_get(&out, r, c) == th_get(b, r, c));
      free(out.data);
    }
    multiply(ctx, a, either, b->cols, NULL);
    for (int j = 0; j < esmm_kernel_count(); j++) {
      esmm_kernel_info info = {.size = sizeof info};
      must(ctx, esmm_kernel_get(ctx, j, &info));
      if (info.available)
        multiply(ctx, a, w, b->cols, info.name);
    }
    esmm_weights_free(again);
    esmm_weights_free(w);
  }
}

/* No block is stored: there are no indices and no values, and no rows either where there are no block rows. */
static void no_blocks(void **state)
{
  esmm_ctx *ctx = *state;
  const int32_t pointers[LD] = {0};
  for (int i = 0; i < 48; i++) {
    const int64_t m = i & 1 ? 3 : 0, k = i & 2 ? 4 : 0, n = i & 4 ? 5 : 0;
    const esmm_dtype dtype = (esmm_dtype)(i / 16);
    const esmm_order order = i & 8 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    const esmm_bsr a = {.size = sizeof a,
                        .rows = m,
                        .cols = k,
                        .block_rows = 2,
                        .block_cols = 2,
                        .index_bits = 32,
                        .dtype = dtype,
                        .order = order,
                        .row_pointers = pointers};
    esmm_bsr b = a;
    b.rows = k;
    b.cols = n;
    for (int j = 0; j < 3; j++) {
      const esmm_prepare_opts opts = {.size = sizeof opts,
                                      .format = {.kind = (esmm_format_kind)j,
                                                 .block_rows = j == 1 ? 2 : 0,
                                                 .block_cols = j == 1 ? 2 : 0,
                                                 .keep = j == 2 ? 2 : 0,
                                                 .group = j == 2 ? 4 : 0},
                                      .max_bytes_ratio = 1e6};
      esmm_weights *w = NULL;
      esmm_matrix c = make(m, n, dtype, order), out = make(k, n, dtype, ESMM_ROW_MAJOR);
      must(ctx, esmm_prepare_bsr(ctx, &b, &opts, &w));
      must(ctx, esmm_weights_to_dense(ctx, w, &out));
      must(ctx, esmm_matmul_bsr(ctx, &a, w, &c, NULL, NULL));
      for (int64_t r = 0; r < m; r++)
        for (int64_t col = 0; col < n; col++)
          assert_true(th_get(&c, r, col) == 0);
      esmm_weights_free(w);
      free(c.data);
      free(out.data);
    }
  }
}

static void nothing_at_all(void **state)
{
  esmm_ctx *ctx = *state;
  for (int i = 0; i < 8; i++) { /* 7: none of them is empty, so that the test itself is one */
    const int64_t m = i & 1 ? 3 : 0, k = i & 2 ? 4 : 0, n = i & 4 ? 5 : 0;
    for (int j = 0; j < 6; j++) {
      const esmm_matrix a = make(m, k, (esmm_dtype)(j % 3), (esmm_order)(j / 3)),
                        b = make(k, n, (esmm_dtype)(j % 3), (esmm_order)(j / 3));
      copies(ctx, &a);
      patterns(ctx, &a, &b);
      weights(ctx, &a, &b, in_dir("w.esmm"));
      free(a.data);
      free(b.data);
    }
  }
}

/* A layer that is given no tokens: forward and backward. */
static void no_tokens(void **state)
{
  esmm_ctx *ctx = *state;
  for (int i = 0; i < 24; i++) {
    const bool gated = i & 1, low = i & 2;
    static const esmm_ffn_mode modes[] = {ESMM_FFN_EXACT, ESMM_FFN_DENSE, ESMM_FFN_SPARSE};
    const esmm_dtype dtype = i / 12 ? ESMM_BF16 : ESMM_F32;
    const esmm_matrix w1 = make(4, low ? 2 : 6, dtype, ESMM_ROW_MAJOR), v1 = make(2, 6, dtype, ESMM_ROW_MAJOR),
                      w2 = make(6, low ? 2 : 4, dtype, ESMM_ROW_MAJOR), v2 = make(2, 4, dtype, ESMM_ROW_MAJOR);
    const esmm_matrix x = {.cols = 4, .dtype = dtype}, dy = x;
    esmm_matrix y = x, dx = x, d_w1 = make(4, low ? 2 : 6, dtype, ESMM_ROW_MAJOR);
    const esmm_ffn_opts opts = {.size = sizeof opts,
                                .d_model = 4,
                                .d_hidden = 6,
                                .rank1 = low ? 2 : 0,
                                .rank2 = low ? 2 : 0,
                                .gated = gated,
                                .dtype = dtype,
                                .mode = modes[i / 4 % 3]};
    const esmm_ffn_weights params = {.size = sizeof params,
                                     .w1 = &w1,
                                     .w1_v = low ? &v1 : NULL,
                                     .gate = gated ? &w1 : NULL,
                                     .gate_v = gated && low ? &v1 : NULL,
                                     .w2 = &w2,
                                     .w2_v = low ? &v2 : NULL};
    const esmm_ffn_grads grads = {.size = sizeof grads, .x = &dx, .w1 = &d_w1};
    esmm_ffn_report report = {.size = sizeof report};
    esmm_ffn *ffn = NULL;
    esmm_ffn_cache *cache = NULL;
    must(ctx, esmm_ffn_create(ctx, &opts, &ffn));
    must(ctx, esmm_ffn_set_weights(ctx, ffn, &params, NULL));
    must(ctx, esmm_ffn_forward(ctx, ffn, &x, &y, NULL, NULL));
    must(ctx, esmm_ffn_cache_create(ctx, ffn, &cache));
    must(ctx, esmm_ffn_forward(ctx, ffn, &x, &y, cache, &report));
    must(ctx, esmm_ffn_backward(ctx, ffn, cache, &dy, &grads, &report));
    for (int64_t e = 0; e < d_w1.rows; e++)
      assert_true(th_get(&d_w1, e, 0) == 0); /* a sum of nothing */
    esmm_ffn_cache_free(cache);
    esmm_ffn_free(ffn);
    free(w1.data);
    free(v1.data);
    free(w2.data);
    free(v2.data);
    free(d_w1.data);
  }
}

/* One side is nothing, the other any number: nothing is allocated by it. */
static void the_other_side_is_free(void **state)
{
  esmm_ctx *ctx = *state;
  const int64_t many = (int64_t)1 << 31;
  for (int i = 0; i < 9; i++) {
    const esmm_matrix b = {.rows = i % 3 == 2 ? many : 0, .cols = i % 3 == 2 ? 0 : i % 3 ? 2 * many : 2 * many + 7};
    const esmm_prepare_opts opts = {
        .size = sizeof opts, .format.kind = (esmm_format_kind)(i / 3), .format.keep = 2, .format.group = 4};
    esmm_weights_info info = {.size = sizeof info};
    esmm_weights *w = NULL, *loaded = NULL;
    must(ctx, esmm_prepare(ctx, &b, &opts, &w));
    must(ctx, esmm_weights_get_info(w, &info));
    if (info.bytes > 4096)
      fail_msg("%lld x %lld, format %d: %zu bytes", (long long)b.rows, (long long)b.cols, i / 3, info.bytes);
    const char *path = in_dir("sides.esmm");
    must(ctx, esmm_weights_save(ctx, w, path));
    if (b.rows == 0) { /* the other one's rows are looked at one by one */
      must(ctx, esmm_weights_load(ctx, path, &loaded));
      must(ctx, esmm_weights_get_info(loaded, &info));
      assert_true(info.bytes <= 4096 && info.rows == b.rows && info.cols == b.cols);
    }
    esmm_weights_free(loaded);
    esmm_weights_free(w);
  }
}

static int set_up(void **state)
{
  return make_dir(state) == 0 ? th_cpu_set_up(state) : -1;
}

static int tear_down(void **state)
{
  return th_cpu_tear_down(state) == 0 ? remove_dir(state) : -1;
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_at_all), cmocka_unit_test(no_blocks),
                                     cmocka_unit_test(no_tokens), cmocka_unit_test(the_other_side_is_free)};
  return cmocka_run_group_tests_name("empty", tests, set_up, tear_down);
}
