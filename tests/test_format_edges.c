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
  assert_int_equal(esmm_nm_check(ctx, &b, 2, 4, &k, &col), ESMM_OK);
  assert_true(k == -1 && col == -1);
  for (int cols = 1; cols <= 32; cols += 31) {
    const esmm_prune_opts prune = {.size = sizeof prune, .format = ESMM_FORMAT_NM, .nm_cols = cols};
    esmm_prune_report report = {.size = sizeof report};
    assert_int_equal(esmm_prune(ctx, &b, &prune, &report), ESMM_OK);
    assert_true(report.kept == 0 && report.dropped == 0);
    const esmm_prepare_opts opts = {.size = sizeof opts, .format = ESMM_FORMAT_NM, .nm_cols = cols};
    esmm_weights *w = NULL;
    if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
      fail_msg("prepare: %s", esmm_ctx_error(ctx));
    esmm_weights_info info = {.size = sizeof info};
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
    assert_true(info.rows == 0 && info.cols == b.cols && info.nm_cols == cols && info.element_density == 0);
    assert_int_equal(esmm_weights_to_dense(ctx, w, &out), ESMM_OK);
    esmm_weights_free(w);
  }
}

static int set_up(void **state)
{
  th_clean_environment();
  *state = th_ctx_on("cpu", 2);
  return 0;
}

static int tear_down(void **state)
{
  esmm_ctx_free(*state);
  return 0;
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(no_k_and_any_n),
  };
  return cmocka_run_group_tests_name("format_edges", tests, set_up, tear_down);
}
