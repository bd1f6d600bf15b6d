/*
 * bench_prepare.c: --prepare: what it takes to make weights: a dense B in the device's memory is pruned to its format
 * and prepared. Both wait until they are done, so that the host's clock measures them. Before each the dense B is put
 * back, which is not timed.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct prepare_times {
  double *prune, *prepare; /* [count] */
  int count;
} prepare_times;

/* One round; that before the first counted one loads what it needs. */
static esmm_status take_round(bench *b, const esmm_matrix *from, esmm_matrix *near, double *prune, double *prepare)
{
  const esmm_prune_opts *format = &b->problem.b.prune;
  esmm_prune_report report = {.size = sizeof report};
  esmm_weights *weights = NULL;
  esmm_status status = esmm_matrix_copy(b->ctx, from, near);
  if (status == ESMM_OK)
    status = esmm_ctx_synchronize(b->ctx);
  const double start = cli_now();
  if (status == ESMM_OK && format->format.kind != ESMM_FORMAT_DENSE)
    status = esmm_prune(b->ctx, near, format, &report);
  if (status == ESMM_OK)
    status = esmm_ctx_synchronize(b->ctx);
  const double pruned = cli_now();
  if (status == ESMM_OK)
    status = esmm_prepare(b->ctx, near, &b->problem.prepare, &weights);
  if (status == ESMM_OK)
    status = esmm_ctx_synchronize(b->ctx);
  *prepare = cli_now() - pruned;
  *prune = format->format.kind != ESMM_FORMAT_DENSE ? pruned - start : NAN;
  esmm_weights_free(weights);
  return status;
}

static void add_row(const bench *b, const bench_data *data, const prepare_times *t, bench_report *report)
{
  static const char *const heads[] = {"B", "format", "prune ms", "prepare ms", "GB/s of B"};
  const double prune = bench_median(t->prune, t->count), prepare = bench_median(t->prepare, t->count);
  const double both = prepare + (isnan(prune) ? 0 : prune);
  const double bytes = (double)data->k * (double)data->n * (double)esmm_dtype_size(data->b.m.dtype);
  const cli_field own[] = {{"runs", NULL, t->count, false},
                           {"ms_prune", NULL, 1e3 * prune, false},
                           {"ms_prepare", NULL, 1e3 * prepare, false}};
  if (!report->table) {
    bench_report_head(b, data, NULL, report);
    report->table = cli_table_new("llrrr", heads);
  }
  cli_table_cell(report->table, CLI_PLAIN, "%lld x %lld", (long long)data->k, (long long)data->n);
  cli_table_cell(report->table, CLI_PLAIN, "%s", b->problem.format ? b->problem.format : "dense");
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e3 * prune, 4));
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e3 * prepare, 4));
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e-9 * bytes / both, 3));
  bench_report_record(b, data, report, "prepare", "prepare", own, sizeof own / sizeof *own);
  report->measured++;
}

int bench_prepare(bench *b, bench_data *data, bench_report *report)
{
  const int runs = (int)b->runs;
  prepare_times t = {.prune = cli_alloc((size_t)runs, sizeof *t.prune),
                     .prepare = cli_alloc((size_t)runs, sizeof *t.prepare)};
  io_matrix dense = {0};
  esmm_matrix from = {0}, near = {0};
  double unused[2];
  int status = bench_dense(b, "B", ESMM_OPERAND_B, b->problem.seed, data->k, data->n, data->b.m.dtype, &dense);
  if (status == CLI_GO)
    status = cli_device_copy(b->ctx, "B", &dense.m, dense.m.dtype, ESMM_ROW_MAJOR, &from);
  if (status == CLI_GO)
    status = cli_device_alloc(b->ctx, "B", data->k, data->n, dense.m.dtype, ESMM_ROW_MAJOR, &near);
  for (int i = -1; i < runs && status == CLI_GO; i++) {
    const esmm_status done =
        take_round(b, &from, &near, i < 0 ? &unused[0] : &t.prune[i], i < 0 ? &unused[1] : &t.prepare[i]);
    status = done == ESMM_OK ? CLI_GO : cli_status(b->ctx, "--prepare", done);
    t.count += i >= 0;
  }
  cli_progress_end(&b->progress);
  if (status == CLI_GO)
    add_row(b, data, &t, report);
  cli_device_free(b->ctx, &near);
  cli_device_free(b->ctx, &from);
  io_matrix_free(&dense);
  free(t.prune);
  free(t.prepare);
  return status;
}
