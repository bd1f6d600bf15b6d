/*
 * bench_prepare.c: --prepare: the time to make weights: a dense B in the device's memory is pruned to its format and
 * prepared. Both wait until they are done, so the host's clock measures them. The dense B is put back before each,
 * untimed. Preparing also allocates the weights' memory: allocation alone is measured beside it, once they are freed.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct prepare_times {
  double *prune, *prepare, *memory; /* [count] */
  int count;
} prepare_times;

/* Seconds of a round. */
typedef struct round_times {
  double prune, prepare, memory;
} round_times;

/* Memory of the device as large as the weights', there and back; not filled. */
static esmm_status take_memory(esmm_ctx *ctx, size_t bytes, double *seconds)
{
  void *memory = NULL;
  const double start = cli_now();
  const esmm_status status = esmm_memory_alloc(ctx, bytes, &memory);
  *seconds = cli_now() - start;
  esmm_memory_free(ctx, memory);
  return status;
}

/* One round; that before the first counted one loads what it needs. */
static esmm_status take_round(bench *b, const esmm_matrix *from, esmm_matrix *near, round_times *t)
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
  t->prepare = cli_now() - pruned;
  t->prune = format->format.kind != ESMM_FORMAT_DENSE ? pruned - start : NAN;
  esmm_weights_info info = {.size = sizeof info};
  if (status == ESMM_OK)
    status = esmm_weights_get_info(weights, &info);
  esmm_weights_free(weights);
  return status == ESMM_OK ? take_memory(b->ctx, info.bytes, &t->memory) : status;
}

static void add_row(const bench *b, const bench_data *data, const prepare_times *t, bench_report *report)
{
  static const char *const heads[] = {"B", "format", "prune ms", "prepare ms", "its memory", "GB/s of B"};
  const double prune = bench_median(t->prune, t->count), prepare = bench_median(t->prepare, t->count),
               memory = bench_median(t->memory, t->count);
  const double both = prepare + (isnan(prune) ? 0 : prune);
  const double bytes = (double)data->k * (double)data->n * (double)esmm_dtype_size(data->b.m.dtype);
  const cli_field own[] = {{"runs", NULL, t->count, false},
                           {"ms_prune", NULL, 1e3 * prune, false},
                           {"ms_prepare", NULL, 1e3 * prepare, false},
                           {"ms_memory", NULL, 1e3 * memory, false}};
  if (!report->table) {
    bench_report_head(b, data, NULL, report);
    report->table = cli_table_new("llrrrr", heads);
  }
  cli_table_cell(report->table, CLI_PLAIN, "%lld x %lld", (long long)data->k, (long long)data->n);
  cli_table_cell(report->table, CLI_PLAIN, "%s", b->problem.format ? b->problem.format : "dense");
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e3 * prune, 4));
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e3 * prepare, 4));
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e3 * memory, 4));
  cli_table_cell(report->table, CLI_PLAIN, "%s", cli_number(1e-9 * bytes / both, 3));
  bench_report_record(b, data, report, "prepare", "prepare", own, sizeof own / sizeof *own);
  report->measured++;
}

int bench_prepare(bench *b, bench_data *data, bench_report *report)
{
  const int runs = (int)b->runs;
  prepare_times t = {.prune = cli_alloc((size_t)runs, sizeof *t.prune),
                     .prepare = cli_alloc((size_t)runs, sizeof *t.prepare),
                     .memory = cli_alloc((size_t)runs, sizeof *t.memory)};
  io_matrix dense = {0};
  esmm_matrix from = {0}, near = {0};
  round_times times = {0};
  int status = bench_dense(b, "B", ESMM_OPERAND_B, b->problem.seed, data->k, data->n, data->b.m.dtype, &dense);
  if (status == CLI_GO)
    status = cli_device_copy(b->ctx, "B", &dense.m, dense.m.dtype, ESMM_ROW_MAJOR, &from);
  if (status == CLI_GO)
    status = cli_device_alloc(b->ctx, "B", data->k, data->n, dense.m.dtype, ESMM_ROW_MAJOR, &near);
  for (int i = -1; i < runs && status == CLI_GO; i++) {
    const esmm_status done = take_round(b, &from, &near, &times);
    if (i >= 0) {
      t.prune[i] = times.prune;
      t.prepare[i] = times.prepare;
      t.memory[i] = times.memory;
    }
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
  free(t.memory);
  return status;
}
