/*
 * bench_gpu.c: the contestants on a GPU: operands in its memory, its cache emptied, its own clock.
 *
 * Operands are made on the host and copied once. A timed call is put on the default stream as: empty the cache, start
 * the timer, multiply, stop the timer; nothing waits in between, so that while the GPU is busy with the cache the host
 * has launched what follows, and no launch is part of the time. cuBLAS works in the same context and on the same
 * stream. Operands of bf16 or fp16 it gets as they are, B row-major; of fp32, B in the layout that it multiplies
 * faster, found by trying both.
 *
 * Of C, only the rows that are checked are poisoned and copied back.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>

/* Two of these are copied onto each other: 256 MiB of traffic, twice the largest L2 cache there is. */
enum { FLUSH_ROWS = 8192, FLUSH_COLS = 4096 };

/* ---- operands ---- */

static void own(bench_gpu *g, const esmm_matrix *m)
{
  g->owned[g->owned_count++] = *m;
}

static void release(const bench *b, bench_gpu *g, esmm_matrix *m)
{
  for (int i = 0; i < g->owned_count; i++)
    if (g->owned[i].data == m->data) {
      cli_device_free(b->ctx, &g->owned[i]);
      g->owned[i] = g->owned[--g->owned_count];
      break;
    }
  m->data = NULL;
}

static int copy_in(const bench *b, bench_gpu *g, const char *what, const esmm_matrix *from, esmm_order order,
                   esmm_matrix *out)
{
  int status = cli_device_copy(b->ctx, what, from, from->dtype, order, out);
  if (status == CLI_GO)
    own(g, out);
  return status;
}

static int reserve(const bench *b, bench_gpu *g, const char *what, int64_t rows, int64_t cols, esmm_dtype dtype,
                   esmm_matrix *out)
{
  int status = cli_device_alloc(b->ctx, what, rows, cols, dtype, ESMM_ROW_MAJOR, out);
  if (status == CLI_GO)
    own(g, out);
  return status;
}

/* Random dense data, for cuBLAS or, where there is none, for our own dense kernel. The host's is not needed after. */
static int copy_dense(const bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  const bool shared = data->dense_b[0].m.data == data->plain_b[0].m.data;
  int status = copy_in(b, g, "dense A", &data->dense_a[0].m, ESMM_ROW_MAJOR, &g->dense_a);
  if (status == CLI_GO && shared)
    g->dense_b = g->plain_b;
  else if (status == CLI_GO)
    status = copy_in(b, g, "dense B", &data->dense_b[0].m, ESMM_ROW_MAJOR, &g->dense_b);
  io_matrix_free(&data->dense_a[0]);
  io_matrix_free(&data->dense_b[0]);
  return status;
}

static int copy_operands(const bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  const esmm_matrix *a = &data->a[0].m;
  const esmm_dtype dtype_c = (esmm_dtype)b->problem.dtype_c;
  const esmm_dtype wanted = data->library_dtype;
  int status = copy_in(b, g, "A", a, a->order, &g->a);
  if (status == CLI_GO)
    status =
        copy_in(b, g, "B", data->b.m.dtype == wanted ? &data->b.m : &data->plain_b[0].m, ESMM_ROW_MAJOR, &g->plain_b);
  if (status == CLI_GO)
    status = reserve(b, g, "C", data->m, data->n, dtype_c, &g->c);
  if (status != CLI_GO || b->alone)
    return status;
  if (a->dtype == wanted && a->order == ESMM_ROW_MAJOR)
    g->plain_a = g->a;
  else
    status = copy_in(b, g, "A for cuBLAS", a->dtype == wanted ? a : &data->plain_a[0].m, ESMM_ROW_MAJOR, &g->plain_a);
  if (dtype_c == ESMM_F32 || dtype_c == wanted)
    g->plain_c = g->c;
  else if (status == CLI_GO)
    status = reserve(b, g, "C in f32", data->m, data->n, ESMM_F32, &g->plain_c);
  return status == CLI_GO ? copy_dense(b, data) : status;
}

static int prepare(bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  const esmm_prepare_opts opts = b->problem.prepare, dense = {.size = sizeof dense, .use = opts.use};
  const bool plain = data->b.m.dtype == g->plain_b.dtype && data->b.m.order == ESMM_ROW_MAJOR;
  esmm_matrix near = g->plain_b;
  int status = plain ? CLI_GO : cli_device_copy(b->ctx, "B", &data->b.m, data->b.m.dtype, data->b.m.order, &near);
  if (status != CLI_GO)
    return status;
  /* Twice where it is measured: the first call also loads what it needs. */
  esmm_status done = ESMM_OK;
  for (int i = b->alone ? 1 : 0; i < 2 && done == ESMM_OK; i++) {
    esmm_weights_free(data->weights[0]);
    double start = cli_now();
    done = esmm_prepare(b->ctx, &near, &opts, &data->weights[0]);
    data->seconds_prepare = cli_now() - start;
  }
  if (done == ESMM_OK && b->library_count == 0 && !b->alone)
    done = esmm_prepare(b->ctx, &g->dense_b, &dense, &data->dense_weights[0]);
  if (done == ESMM_OK) {
    data->info = (esmm_weights_info){.size = sizeof data->info};
    done = esmm_weights_get_info(data->weights[0], &data->info);
  }
  if (done != ESMM_OK)
    status = cli_status(b->ctx, "prepare", done);
  if (!plain)
    cli_device_free(b->ctx, &near);
  return status;
}

static int make_clock(const bench *b, bench_gpu *g)
{
  int status = reserve(b, g, "the buffer that empties the cache", FLUSH_ROWS, FLUSH_COLS, ESMM_F32, &g->flush[0]);
  if (status == CLI_GO)
    status = reserve(b, g, "the buffer that empties the cache", FLUSH_ROWS, FLUSH_COLS, ESMM_F32, &g->flush[1]);
  for (int i = 0; i < BENCH_TIMERS && status == CLI_GO; i++) {
    esmm_status made = esmm_timer_create(b->ctx, &g->timers[i]);
    if (made != ESMM_OK)
      status = cli_status(b->ctx, "timer", made);
  }
  return status;
}

/* The median of a few calls. */
static esmm_status try_layout(bench *b, bench_data *data, double *seconds)
{
  enum { CALLS = 3 };
  double times[CALLS];
  const bench_contestant c = {.library = &b->libraries[0]};
  esmm_status status = bench_gpu_time(b, data, &c, times, 1); /* warms up */
  if (status == ESMM_OK)
    status = bench_gpu_time(b, data, &c, times, CALLS);
  if (status == ESMM_OK)
    *seconds = bench_median(times, CALLS);
  return status;
}

static int layout_failed(const bench *b, esmm_status status)
{
  return status == ESMM_ERR_DRIVER_CALL ? cli_failed("cuBLAS: %s", b->cublas.error)
                                        : cli_status(b->ctx, "cuBLAS", status);
}

static int choose_layout(bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  esmm_matrix rows = g->plain_b, columns;
  double by_rows, by_columns;
  const bool shared = g->dense_b.data == g->plain_b.data;
  esmm_status done = try_layout(b, data, &by_rows);
  if (done != ESMM_OK)
    return layout_failed(b, done);
  int status = copy_in(b, g, "B in columns", &rows, ESMM_COL_MAJOR, &columns);
  if (status != CLI_GO)
    return status;
  g->plain_b = columns;
  g->transposed = true;
  done = try_layout(b, data, &by_columns);
  if (done != ESMM_OK)
    return layout_failed(b, done);
  if (by_rows <= by_columns) {
    g->plain_b = rows;
    g->transposed = false;
    release(b, g, &columns);
    return CLI_GO;
  }
  esmm_matrix dense = g->dense_b;
  if (shared)
    g->dense_b = g->plain_b;
  else
    status = copy_in(b, g, "dense B in columns", &dense, ESMM_COL_MAJOR, &g->dense_b);
  release(b, g, &rows);
  if (status == CLI_GO && !shared)
    release(b, g, &dense);
  return status;
}

int bench_gpu_make(bench *b, bench_data *data)
{
  int status = copy_operands(b, data);
  if (status == CLI_GO)
    status = prepare(b, data);
  if (status == CLI_GO && !b->alone)
    status = make_clock(b, &data->gpu);
  if (status == CLI_GO && b->library_count > 0 && data->library_dtype == ESMM_F32)
    status = choose_layout(b, data);
  return status;
}

int bench_gpu_next(const bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  const bool apart = g->plain_a.data && g->plain_a.data != g->a.data;
  esmm_status status = esmm_matrix_copy(b->ctx, &data->a[0].m, &g->a);
  if (status == ESMM_OK && apart)
    status = esmm_matrix_copy(b->ctx, &g->a, &g->plain_a);
  return status == ESMM_OK ? CLI_GO : cli_status(b->ctx, "A", status);
}

void bench_gpu_free(const bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  for (int i = 0; i < BENCH_TIMERS; i++)
    esmm_timer_free(g->timers[i]);
  for (int i = 0; i < g->owned_count; i++)
    cli_device_free(b->ctx, &g->owned[i]);
  *g = (bench_gpu){0};
}

/* ---- calls ---- */

static bool multiply(cublas_library *cublas, const bench_data *data, const bench_contestant *c, const void *y, void *to)
{
  const bench_gpu *g = &data->gpu;
  const int64_t m = data->m, k = data->k, n = data->n;
  const void *x = (c->dense_data ? g->dense_a : g->plain_a).data;
  const esmm_dtype dtype = data->library_dtype, dtype_c = g->plain_c.dtype;
  switch (dtype) {
  case ESMM_F32:
    return c->vector ? cublas_sgemv(cublas, k, n, x, y, g->transposed, to)
                     : cublas_sgemm(cublas, m, k, n, x, y, g->transposed, to);
  case ESMM_BF16:
  case ESMM_F16:
    return c->vector ? cublas_gemv16(cublas, k, n, dtype, x, y, g->transposed, dtype_c, to)
                     : cublas_gemm16(cublas, m, k, n, dtype, x, y, g->transposed, dtype_c, to);
  }
  return false; /* there is no routine for an unknown dtype */
}

/* With a gate two products, that with B last. */
static bool call_cublas(cublas_library *cublas, const bench_data *data, const bench_contestant *c)
{
  const bench_gpu *g = &data->gpu;
  if (g->plain_gate.data && !multiply(cublas, data, c, g->plain_gate.data, g->gate_c.data))
    return false;
  return multiply(cublas, data, c, (c->dense_data ? g->dense_b : g->plain_b).data, g->plain_c.data);
}

esmm_status bench_gpu_call(bench *b, bench_data *data, const bench_contestant *c, esmm_stats *stats)
{
  bench_gpu *g = &data->gpu;
  if (c->library && !call_cublas(&b->cublas, data, c))
    return ESMM_ERR_DRIVER_CALL;
  if (c->library)
    return c->passes ? bench_finish_pass(b, data) : ESMM_OK;
  if (c->peer)
    return bench_peer_call(c->peer);
  esmm_matmul_opts opts = {
      .size = sizeof opts, .force = c->force[0] ? c->force : NULL, .a_pattern = bench_given(data, c, 0)};
  const esmm_matrix *a = c->dense_data ? &g->dense_a : &g->a;
  if (b->epilogue.any && !c->is_baseline)
    bench_finish_opts(b, data, 0, &opts);
  if (b->epilogue.gate && c->is_baseline) {
    const esmm_status status = esmm_matmul(b->ctx, a, data->finish.gate_weights[0], &g->c, &opts, NULL);
    if (status != ESMM_OK)
      return status;
  }
  return esmm_matmul(b->ctx, a, (c->dense_data ? data->dense_weights : data->weights)[0], &g->c, &opts, stats);
}

esmm_status bench_gpu_flush(const bench *b, bench_data *data)
{
  return esmm_matrix_copy(b->ctx, &data->gpu.flush[0], &data->gpu.flush[1]);
}

static esmm_status timed_call(bench *b, bench_data *data, const bench_contestant *c, esmm_timer *timer)
{
  esmm_status status = bench_gpu_flush(b, data);
  if (status == ESMM_OK)
    status = esmm_timer_start(timer);
  if (status == ESMM_OK)
    status = bench_gpu_call(b, data, c, NULL);
  if (status == ESMM_OK)
    status = esmm_timer_stop(timer);
  return status;
}

esmm_status bench_gpu_time(bench *b, bench_data *data, const bench_contestant *c, double *seconds, int count)
{
  esmm_timer *const *timers = data->gpu.timers;
  esmm_status status = ESMM_OK;
  for (int first = 0; first < count && status == ESMM_OK; first += BENCH_TIMERS) {
    int batch = count - first < BENCH_TIMERS ? count - first : BENCH_TIMERS;
    for (int i = 0; i < batch && status == ESMM_OK; i++)
      status = timed_call(b, data, c, timers[i]);
    for (int i = 0; i < batch && status == ESMM_OK; i++)
      status = esmm_timer_seconds(timers[i], &seconds[first + i]);
    bench_finish_release(data);
  }
  return status;
}

/* ---- learning ---- */

/*
 * A call decides by the report of a call some calls before it, and the first calls have none. The state after that is
 * measured: after a few reports, and as many calls as it takes to use them. Slow calls are waited for one by one, and
 * fewer of them must do.
 */
enum { SETTLE_CALLS = 64, SETTLE_FEWEST = 32, SETTLE_SLOW = 6, SETTLE_BATCH = 16, SETTLE_REPORTS = 3 };

static const double slow_call = 2e-3; /* seconds */

/* The cache is emptied before each, as in measured calls: the plan must learn from such calls. */
static esmm_status call_and_wait(bench *b, bench_data *data, const bench_contestant *c, int count)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; i < count && status == ESMM_OK; i++) {
    status = bench_gpu_flush(b, data);
    if (status == ESMM_OK)
      status = bench_gpu_call(b, data, c, NULL);
  }
  return status == ESMM_OK ? esmm_ctx_synchronize(b->ctx) : status;
}

esmm_status bench_gpu_settle(bench *b, bench_data *data, const bench_contestant *c)
{
  esmm_recollection known = {.size = sizeof known};
  esmm_status status = esmm_forget(b->ctx);
  if (status == ESMM_OK)
    status = call_and_wait(b, data, c, 1); /* also loads what it needs */
  const double start = cli_now();
  if (status == ESMM_OK)
    status = call_and_wait(b, data, c, 1);
  const bool slow = cli_now() - start > slow_call;
  const int most = slow ? SETTLE_SLOW : SETTLE_CALLS;
  for (int calls = 2; calls < most && status == ESMM_OK;) {
    status = esmm_recall(b->ctx, data->weights[0], data->m, &known);
    if (status == ESMM_OK && known.known && (slow || (calls >= SETTLE_FEWEST && known.reports >= SETTLE_REPORTS)))
      break;
    const int batch = slow ? 1 : most - calls < SETTLE_BATCH ? most - calls : SETTLE_BATCH;
    if (status == ESMM_OK)
      status = call_and_wait(b, data, c, batch);
    calls += batch;
  }
  return status;
}

esmm_status bench_gpu_first(bench *b, bench_data *data, const bench_contestant *c, double *seconds)
{
  enum { CALLS = 5 };
  double times[CALLS];
  esmm_status status = ESMM_OK;
  for (int i = 0; i < CALLS && status == ESMM_OK; i++) {
    status = esmm_forget(b->ctx);
    if (status == ESMM_OK)
      status = bench_gpu_time(b, data, c, &times[i], 1);
  }
  if (status == ESMM_OK)
    *seconds = bench_median(times, CALLS);
  return status;
}

/* ---- results ---- */

/* Rows are copied one by one, or all together where all are checked. */
static esmm_matrix result_rows(const bench_data *data, const bench_contestant *c, int64_t row, int64_t count)
{
  esmm_matrix m = c->peer ? *bench_peer_result(c->peer) : c->library ? data->gpu.plain_c : data->gpu.c;
  m.data = (char *)m.data + (size_t)(row * m.ld) * esmm_dtype_size(m.dtype);
  m.rows = count;
  return m;
}

static esmm_matrix host_rows(float *values, int64_t rows, int64_t cols)
{
  return (esmm_matrix){.data = values, .rows = rows, .cols = cols, .ld = cols, .dtype = ESMM_F32};
}

esmm_status bench_gpu_poison(const bench *b, bench_data *data, const bench_contestant *c,
                             const bench_reference *reference)
{
  const int64_t n = reference->n, count = reference->row_count, together = count == data->m ? count : 1;
  float *nans = cli_alloc((size_t)together, (size_t)n * sizeof *nans);
  for (int64_t i = 0; i < together * n; i++)
    nans[i] = NAN;
  const esmm_matrix from = host_rows(nans, together, n);
  esmm_status status = ESMM_OK;
  for (int64_t i = 0; i < count && status == ESMM_OK; i += together) {
    esmm_matrix to = result_rows(data, c, reference->rows[i], together);
    status = esmm_matrix_copy(b->ctx, &from, &to);
  }
  free(nans);
  return status;
}

esmm_status bench_gpu_error(const bench *b, bench_data *data, const bench_contestant *c,
                            const bench_reference *reference, const error_rule *rule, bench_error *error,
                            uint64_t *bits)
{
  const int64_t n = reference->n, count = reference->row_count, together = count == data->m ? count : 1;
  float *values = cli_alloc((size_t)count, (size_t)n * sizeof *values);
  esmm_status status = ESMM_OK;
  for (int64_t i = 0; i < count && status == ESMM_OK; i += together) {
    const esmm_matrix from = result_rows(data, c, reference->rows[i], together);
    esmm_matrix to = host_rows(values + i * n, together, n);
    status = esmm_matrix_copy(b->ctx, &from, &to);
  }
  if (status == ESMM_OK) {
    *error = bench_error_find(reference, rule, values, true);
    *bits = bench_bits(reference, values, true);
  }
  free(values);
  return status;
}
