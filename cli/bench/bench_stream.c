/*
 * bench_stream.c: calls in a row, as a program makes them: the cost of one (--calls), and the loss of a plan that
 * decides by earlier calls when A changes (--switch). All calls take the same weights, and the cache is not emptied.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the cost of a call ---- */

/* On a GPU a call may wait for the report of a call some calls before it: so few short calls wait for none. */
enum { CALLS = 20000, BATCHES = 20000, BATCH = 256, BATCH_GPU = 8 };

static const double call_seconds = 2;      /* at most, on a CPU, where a call is the product itself */
static const double call_seconds_gpu = 10; /* so that a slow product ends too */
static const double least_seconds = 0.2;   /* on a CPU: 20000 short calls would all fall into one disturbance */
static const double batch_seconds = 0.02;  /* on a CPU */

typedef struct call_time {
  double ns[BATCHES]; /* of a call, the mean of a batch */
  int batches, batch, calls;
} call_time;

/* The GPU is idle when a batch starts, and the batch does not wait for it. */
static esmm_status time_batch(bench *b, bench_data *data, const bench_contestant *c, call_time *time)
{
  esmm_status status = esmm_ctx_synchronize(b->ctx);
  const double start = cli_now();
  for (int i = 0; i < time->batch && status == ESMM_OK; i++)
    status = bench_call(b, data, c, 0, NULL);
  time->ns[time->batches++] = 1e9 * (cli_now() - start) / time->batch;
  time->calls += time->batch;
  return status;
}

static esmm_status time_calls(bench *b, bench_data *data, const bench_contestant *c, call_time *time)
{
  const double began = cli_now(), most = b->gpu ? call_seconds_gpu : call_seconds, least = b->gpu ? 0 : least_seconds;
  *time = (call_time){.batch = 1};
  esmm_status status = time_batch(b, data, c, time); /* warms up, and says how many make a batch */
  const double calls = b->gpu ? BATCH_GPU : batch_seconds / (1e-9 * time->ns[0] + 1e-9);
  *time = (call_time){.batch = calls < 1 ? 1 : calls > BATCH ? BATCH : (int)calls};
  double spent = 0;
  while (status == ESMM_OK && time->batches < BATCHES &&
         (time->batches == 0 || (spent < most && (spent < least || time->calls < CALLS)))) {
    status = time_batch(b, data, c, time);
    spent = cli_now() - began;
  }
  return status == ESMM_OK ? esmm_ctx_synchronize(b->ctx) : status;
}

static void add_call_time(const bench *b, const bench_data *data, const bench_contestant *c, call_time *time,
                          bench_report *report)
{
  const double median = bench_median(time->ns, time->batches); /* which sorts them */
  const double p99 = time->ns[(int)ceil(0.99 * time->batches) - 1];
  const cli_field own[] = {{"host_ns", NULL, median, false},          {"host_ns_p99", NULL, p99, false},
                           {"host_ns_min", NULL, time->ns[0], false}, {"calls", NULL, time->calls, false},
                           {"batch", NULL, time->batch, false},       {"reason", c->stats.reason, 0, false}};
  cli_table_cell(report->table, CLI_PLAIN, "%s%s", c->force[0] ? "" : "auto: ", c->stats.kernel);
  cli_table_cell(report->table, CLI_PLAIN, "%.0f", median);
  cli_table_cell(report->table, CLI_PLAIN, "%.0f", p99);
  cli_table_cell(report->table, CLI_PLAIN, "%.0f", time->ns[0]);
  cli_table_cell(report->table, CLI_PLAIN, "%d", time->calls);
  bench_report_record(b, data, report, c->stats.kernel, c->force, own, sizeof own / sizeof *own);
  report->measured++;
}

int bench_calls(bench *b, bench_data *data, bench_report *report)
{
  static const char *const heads[] = {"kernel", "ns a call, median", "99 % of batches", "least", "calls"};
  call_time *time = cli_alloc(1, sizeof *time);
  int status = CLI_GO;
  bench_report_head(b, data, NULL, report);
  report->table = cli_table_new("lrrrr", heads);
  for (int i = 0; i < b->kernel_count && status == CLI_GO; i++) {
    bench_contestant c = {.force = b->kernels[i], .stats = {.size = sizeof c.stats}};
    status = bench_settle(b, data, &c);
    esmm_status done = status == CLI_GO ? bench_call(b, data, &c, 0, &c.stats) : ESMM_OK;
    if (status == CLI_GO && done == ESMM_OK)
      done = time_calls(b, data, &c, time);
    if (done == ESMM_ERR_UNSUPPORTED)
      fprintf(report->remarks, "%s\n", esmm_ctx_error(b->ctx));
    else if (done != ESMM_OK)
      status = bench_call_failed(b, &c, done);
    else if (status == CLI_GO)
      add_call_time(b, data, &c, time, report);
  }
  free(time);
  return status;
}

/* ---- an A that changes ---- */

enum { DENSE, SPARSE, SIDES };
enum { SWITCHES = 8, MOST_ROUNDS = 5, TRIALS = 3 };

/* An A, and the same for the dense libraries. */
typedef struct side {
  esmm_matrix a, plain_a;
} side;

typedef struct streams {
  side sides[SIDES];
  io_matrix dense, plain;         /* the host's */
  esmm_matrix near_a, near_plain; /* the GPU's, or data NULL */
  bench_contestant *candidates;   /* kernels, then libraries */
  int count, kernels;
  int best[SIDES], library; /* the fastest; of the libraries on the dense A, else of all */
  esmm_timer *timer;
} streams;

static int make_sides(bench *b, bench_data *data, streams *s)
{
  const esmm_dtype dtype = (esmm_dtype)b->problem.dtype_a;
  bench_gpu *g = &data->gpu;
  if (data->density_a == 1)
    return cli_usage("--switch: A has no zeros, so there is nothing to switch to: give --density-a");
  s->sides[SPARSE] = b->gpu ? (side){g->a, g->plain_a} : (side){data->a[0].m, data->plain_a[0].m};
  int status = bench_dense(b, "dense A", ESMM_OPERAND_A, 3000, data->m, data->k, dtype, &s->dense);
  if (status == CLI_GO && !b->gpu) {
    status = bench_plain(b->ctx, "dense A in f32", &s->dense.m, false, &s->plain);
    s->sides[DENSE] = (side){s->dense.m, s->plain.m};
  }
  if (status == CLI_GO && b->gpu) {
    status = cli_device_copy(b->ctx, "dense A", &s->dense.m, dtype, ESMM_ROW_MAJOR, &s->near_a);
    s->sides[DENSE] = (side){s->near_a, s->near_a};
  }
  if (status == CLI_GO && b->gpu && dtype != data->library_dtype) {
    status =
        cli_device_copy(b->ctx, "dense A for cuBLAS", &s->dense.m, data->library_dtype, ESMM_ROW_MAJOR, &s->near_plain);
    s->sides[DENSE].plain_a = s->near_plain;
  }
  return status;
}

/* auto is compared with the candidates, and is none. */
static void add_candidates(const bench *b, const bench_data *data, streams *s)
{
  const int routines = bench_routines(b, data);
  s->candidates = cli_alloc((size_t)(b->kernel_count + routines * b->library_count), sizeof *s->candidates);
  for (int i = 0; i < b->kernel_count; i++)
    if (b->kernels[i][0]) {
      bench_contestant *c = &s->candidates[s->count++];
      c->force = b->kernels[i];
      snprintf(c->name, sizeof c->name, "%s", c->force);
    }
  s->kernels = s->count;
  for (int i = 0; i < b->library_count * routines; i++) {
    bench_contestant *c = &s->candidates[s->count++];
    c->library = &b->libraries[i / routines];
    c->vector = i % routines;
    snprintf(c->name, sizeof c->name, "%s_%s", c->library->name, c->vector ? "gemv" : "gemm");
  }
}

static void turn_to(const bench *b, bench_data *data, const side *to)
{
  if (b->gpu) {
    data->gpu.a = to->a;
    data->gpu.plain_a = to->plain_a;
  } else {
    data->a[0].m = to->a;
    data->plain_a[0].m = to->plain_a;
  }
}

/* `calls` calls back to back, each by the contestant of its A: that of `first`, and after every `every` the other. */
static esmm_status stream(bench *b, bench_data *data, const streams *s, const bench_contestant *const by[SIDES],
                          int first, int64_t calls, int64_t every, double *seconds)
{
  esmm_status status = esmm_timer_start(s->timer);
  for (int64_t i = 0; i < calls && status == ESMM_OK; i++) {
    const int at = (int)((first + i / every) % SIDES);
    turn_to(b, data, &s->sides[at]);
    status = bench_call(b, data, by[at], 0, NULL);
  }
  if (status == ESMM_OK)
    status = esmm_timer_stop(s->timer);
  if (status == ESMM_OK)
    status = esmm_timer_seconds(s->timer, seconds);
  turn_to(b, data, &s->sides[SPARSE]);
  return status;
}

/* The fastest of a few short streams on one A; INFINITY where it cannot run. */
static int try_candidate(bench *b, bench_data *data, const streams *s, const bench_contestant *c, int at,
                         double *seconds)
{
  const bench_contestant *const by[SIDES] = {c, c};
  const int64_t calls = b->gpu ? 20 : 3;
  *seconds = INFINITY;
  for (int i = 0; i < TRIALS; i++) {
    double now = INFINITY;
    const esmm_status status = stream(b, data, s, by, at, calls, calls, &now);
    const bool fits = status != ESMM_ERR_UNSUPPORTED && status != ESMM_ERR_MEMORY && status != ESMM_ERR_DEVICE_MEMORY;
    if (!fits || (status == ESMM_ERR_DRIVER_CALL && c->vector))
      return CLI_GO;
    if (status != ESMM_OK)
      return bench_call_failed(b, c, status);
    *seconds = fmin(*seconds, now);
  }
  return CLI_GO;
}

static int find_best(bench *b, bench_data *data, streams *s)
{
  s->library = -1;
  for (int at = 0; at < SIDES; at++) {
    double best = INFINITY, best_library = INFINITY;
    s->best[at] = -1;
    for (int i = 0; i < s->count; i++) {
      double seconds;
      const int status = try_candidate(b, data, s, &s->candidates[i], at, &seconds);
      if (status != CLI_GO)
        return status;
      if (seconds < best) {
        best = seconds;
        s->best[at] = i;
      }
      if (at == DENSE && i >= s->kernels && seconds < best_library) {
        best_library = seconds;
        s->library = i;
      }
    }
    if (s->best[at] < 0)
      return cli_failed("--switch: none of the kernels asked for can run this product");
  }
  if (s->library < 0)
    s->library = s->best[DENSE];
  return CLI_GO;
}

/* Timed in turns. */
enum { AUTO_SWITCHING, BEST_SWITCHING, AUTO_DENSE, LIBRARY_DENSE, STREAMS };

static int take_turns(bench *b, bench_data *data, const streams *s, int rounds, double seconds[STREAMS][MOST_ROUNDS])
{
  const bench_contestant own = {.force = ""};
  const bench_contestant *const by[STREAMS][SIDES] = {
      [AUTO_SWITCHING] = {&own, &own},
      [BEST_SWITCHING] = {&s->candidates[s->best[DENSE]], &s->candidates[s->best[SPARSE]]},
      [AUTO_DENSE] = {&own, &own},
      [LIBRARY_DENSE] = {&s->candidates[s->library], &s->candidates[s->library]}};
  const int64_t calls = SWITCHES * b->switch_every;
  for (int round = 0; round < rounds; round++)
    for (int i = 0; i < STREAMS; i++) {
      const int which = (round + i) % STREAMS;
      const bool switching = which == AUTO_SWITCHING || which == BEST_SWITCHING;
      esmm_status status = esmm_forget(b->ctx); /* every stream starts by knowing nothing */
      if (status == ESMM_OK)
        status =
            stream(b, data, s, by[which], DENSE, calls, switching ? b->switch_every : calls, &seconds[which][round]);
      if (status != ESMM_OK)
        return bench_call_failed(b, by[which][DENSE], status);
      cli_progress_update(&b->progress, round * STREAMS + i, rounds * STREAMS);
    }
  return CLI_GO;
}

static double median_ratio(const double *over, const double *under, int count)
{
  double ratios[MOST_ROUNDS];
  for (int i = 0; i < count; i++)
    ratios[i] = over[i] / under[i];
  return bench_median(ratios, count);
}

static void add_stream(cli_table *t, const char *a, const char *by, double ms, double ratio)
{
  cli_table_cell(t, CLI_PLAIN, "%s", a);
  cli_table_cell(t, CLI_PLAIN, "%s", by);
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(ms, 4));
  cli_table_cell(t, CLI_PLAIN, isnan(ratio) ? "-" : "%.3f", ratio);
}

static void report_switch(const bench *b, const bench_data *data, const streams *s, int rounds,
                          double seconds[STREAMS][MOST_ROUNDS], bench_report *report)
{
  static const char *const heads[] = {"A", "kernel", "ms a call", "auto over it"};
  const char *dense = s->candidates[s->best[DENSE]].name, *sparse = s->candidates[s->best[SPARSE]].name;
  const char *library = s->candidates[s->library].name;
  const double calls = (double)(SWITCHES * b->switch_every);
  const double switch_ratio = median_ratio(seconds[AUTO_SWITCHING], seconds[BEST_SWITCHING], rounds);
  const double dense_ratio = median_ratio(seconds[AUTO_DENSE], seconds[LIBRARY_DENSE], rounds);
  double ms[STREAMS];
  for (int i = 0; i < STREAMS; i++)
    ms[i] = 1e3 * bench_median(seconds[i], rounds) / calls;
  const cli_field own[] = {{"switch_every", NULL, (double)b->switch_every, false},
                           {"calls", NULL, calls, false},
                           {"runs", NULL, rounds, false},
                           {"switch_ratio", NULL, switch_ratio, false},
                           {"dense_ratio", NULL, dense_ratio, false},
                           {"best_dense", dense, 0, false},
                           {"best_sparse", sparse, 0, false},
                           {"baseline", library, 0, false},
                           {"ms_auto", NULL, ms[AUTO_SWITCHING], false},
                           {"ms_best", NULL, ms[BEST_SWITCHING], false},
                           {"ms_auto_dense", NULL, ms[AUTO_DENSE], false},
                           {"ms_baseline_dense", NULL, ms[LIBRARY_DENSE], false}};
  char both[160];
  snprintf(both, sizeof both, "%s, %s", dense, sparse);
  cli_table *t = report->table = cli_table_new("llrr", heads);
  add_stream(t, "switching", "auto", ms[AUTO_SWITCHING], NAN);
  add_stream(t, "switching", both, ms[BEST_SWITCHING], switch_ratio);
  add_stream(t, "dense", "auto", ms[AUTO_DENSE], NAN);
  add_stream(t, "dense", library, ms[LIBRARY_DENSE], dense_ratio);
  fprintf(report->remarks, "%.0f calls; A is dense for %lld of them, then as asked for, and so on.\n", calls,
          (long long)b->switch_every);
  bench_report_record(b, data, report, "auto", "", own, sizeof own / sizeof *own);
  report->measured++;
}

int bench_switch(bench *b, bench_data *data, bench_report *report)
{
  streams s = {0};
  double seconds[STREAMS][MOST_ROUNDS];
  const int rounds = b->runs < MOST_ROUNDS ? (int)b->runs : MOST_ROUNDS;
  int status = make_sides(b, data, &s);
  const esmm_status made = status == CLI_GO ? esmm_timer_create(b->ctx, &s.timer) : ESMM_OK;
  if (made != ESMM_OK)
    status = cli_status(b->ctx, "timer", made);
  add_candidates(b, data, &s);
  if (status == CLI_GO)
    status = find_best(b, data, &s);
  if (status == CLI_GO)
    status = take_turns(b, data, &s, rounds, seconds);
  if (status == CLI_GO) {
    cli_progress_end(&b->progress);
    bench_report_head(b, data, NULL, report);
    report_switch(b, data, &s, rounds, seconds, report);
  }
  esmm_timer_free(s.timer);
  free(s.candidates);
  cli_device_free(b->ctx, &s.near_a);
  cli_device_free(b->ctx, &s.near_plain);
  io_matrix_free(&s.plain);
  io_matrix_free(&s.dense);
  return status;
}
