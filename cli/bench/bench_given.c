/*
 * bench_given.c: --given ROWS: our products get A's bitmaps, as a product whose C is A would leave them. A CPU need not
 * look for its zeros then, and a GPU's plan knows how dense A is. Making them is not timed.
 */
#include "bench.h"

#include <stdlib.h>

/* On a GPU a pattern that a product has left there: here of one that leaves A as it is. */
static int hand_over(const bench *b, esmm_matrix a, esmm_pattern **pattern)
{
  static const float zero = 0.0f, one = 1.0f;
  io_matrix row = {0}, column = {0};
  esmm_matrix near_column = {0};
  esmm_weights *weights = NULL;
  int status = cli_matrix_alloc("a row of zeros", 1, a.cols, a.dtype, &row);
  if (status == CLI_GO)
    status = cli_matrix_alloc("a column of zeros", a.rows, 1, a.dtype, &column);
  if (status == CLI_GO)
    status = cli_device_copy(b->ctx, "a column of zeros", &column.m, a.dtype, ESMM_ROW_MAJOR, &near_column);
  if (status == CLI_GO) {
    const esmm_matmul_opts opts = {
        .size = sizeof opts, .alpha = &zero, .beta = &one, .c_strip_rows = b->given_rows, .c_pattern = pattern};
    esmm_status made = esmm_prepare(b->ctx, &row.m, NULL, &weights);
    if (made == ESMM_OK)
      made = esmm_matmul(b->ctx, &near_column, weights, &a, &opts, NULL);
    status = made == ESMM_OK ? CLI_GO : cli_status(b->ctx, "A's bitmaps", made);
  }
  esmm_weights_free(weights);
  cli_device_free(b->ctx, &near_column);
  io_matrix_free(&column);
  io_matrix_free(&row);
  return status;
}

int bench_given_make(const bench *b, bench_data *data)
{
  bench_given_free(data);
  if (!b->given_rows)
    return CLI_GO;
  data->given_count = b->gpu ? 1 : data->variants;
  data->given = cli_alloc((size_t)data->given_count, sizeof(esmm_pattern *));
  int status = CLI_GO;
  for (int i = 0; i < data->given_count && status == CLI_GO; i++) {
    if (b->gpu) {
      status = hand_over(b, data->gpu.a, &data->given[i]);
    } else {
      const esmm_status made = esmm_pattern_extract(b->ctx, &data->a[i].m, b->given_rows, &data->given[i]);
      status = made == ESMM_OK ? CLI_GO : cli_status(b->ctx, "A's bitmaps", made);
    }
  }
  return status;
}

const esmm_pattern *bench_given(const bench_data *data, const bench_contestant *c, int variant)
{
  return data->given && !c->is_baseline && !c->dense_data ? data->given[variant] : NULL;
}

void bench_given_free(bench_data *data)
{
  for (int i = 0; i < data->given_count; i++)
    esmm_pattern_free(data->given[i]);
  free(data->given);
  data->given = NULL;
  data->given_count = 0;
}
