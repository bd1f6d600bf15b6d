/*
 * bench_measure.c: the contestants of one problem, checked and timed in one process.
 *
 * Rules that make the numbers comparable
 * - Every contestant is checked first, into a C full of NaN, and ours are checked again after the last round: they must
 *   then give the same bits, if they promise to. A wrong result has no speed.
 * - Contestants take turns, round after round, each round starting with another one: a machine that slows down or
 *   speeds up meanwhile does so for all.
 * - Calls of a few microseconds are timed several together, theirs and ours alike.
 * - Each turn: a pause (another library's worker threads spin for some milliseconds before they sleep, and would take
 *   our processor time), a warm-up, then the timed calls.
 * - Dense libraries run on the same data and on random dense data; the fastest of all is the baseline.
 * - Peers, libraries for sparse weights, take part in all of this and are no baseline.
 * - Our time is the whole call: plan, extraction, multiplication. Statistics, which cost a little, are taken in
 *   separate calls.
 * - A GPU's calls are timed by its own clock (bench_gpu.c), and there is no pause: it would slow its clock down.
 * - auto learns from its calls. It is checked and timed once it has learnt; on a GPU a call that knows nothing yet is
 *   timed apart.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_ROUNDS = 10, MOST_GPU_ROUNDS = 24, ENOUGH_CALLS = 50, PEER_CALLS = 3 };
enum { LEARNING_CALLS = 64, LEAST_LEARNING = 16, EACH_COPY = 24, ROUNDS_CALLS = 1100 };

static const double enough_seconds = 0.2; /* of measurements for each contestant */
static const double warm_seconds = 2e-3;  /* calls shorter than this are repeated until a core has woken up */
static const double batch_seconds = 2e-5; /* calls shorter than this are timed together: a clock takes part of one */
static const double slow_seconds = 0.5;   /* calls longer than this need no warm-up after the first round */
static const double learning_seconds = 2; /* for auto's first calls, if there are LEAST_LEARNING by then; */
static const double rounds_seconds = 0.2; /* or until each copy of B has had ROUNDS_CALLS: all rounds of trials */
static const double slow_on_gpu = 20e-3;  /* the same on a GPU, which others kept busy */

const char *bench_outcome_str(bench_outcome outcome)
{
  static const char *const names[] = {"ok", "wrong", "unsupported", "not_checked"};
  return names[outcome];
}

static int compare_doubles(const void *x, const void *y)
{
  double a = *(const double *)x, b = *(const double *)y;
  return (a > b) - (a < b);
}

double bench_median(double *values, int count)
{
  if (count == 0)
    return NAN;
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

/* ---- contestants ---- */

static bench_contestant *add(bench_result *result)
{
  bench_contestant *c = &result->contestants[result->count++];
  *c = (bench_contestant){.rel_err = NAN,
                          .median = NAN,
                          .p95 = NAN,
                          .fastest = NAN,
                          .extract = NAN,
                          .plan = NAN,
                          .first = NAN,
                          .joules = NAN,
                          .watts = NAN};
  return c;
}

/* "cublas_sgemm", "cublas_gemm_bf16_on_random", "onednn_matmul_bf16" */
static void name_baseline(const bench_data *data, bench_contestant *c)
{
  if (c->library->onednn) {
    snprintf(c->name, sizeof c->name, "onednn_matmul_%s%s", esmm_dtype_str(data->onednn.dtype),
             c->dense_data ? "_on_random" : "");
    return;
  }
  const bool wide = data->library_dtype == ESMM_F32;
  snprintf(c->name, sizeof c->name, "%s_%s%s%s%s%s%s", c->library->name, wide ? "s" : "", c->vector ? "gemv" : "gemm",
           wide ? "" : "_", wide ? "" : esmm_dtype_str(data->library_dtype), c->dense_data ? "_on_random" : "",
           c->passes ? "_and_pass" : "");
}

int bench_routines(const bench *b, const bench_data *data)
{
  return data->m == 1 || (data->n == 1 && !b->gpu) ? 2 : 1;
}

static void add_contestants(const bench *b, const bench_data *data, bench_result *result)
{
  int routines = bench_routines(b, data);
  int most = b->kernel_count + 2 * routines * (b->library_count ? b->library_count : 1);
  const int passes = bench_finish_can_pass(b) ? b->library_count : 0;
  result->contestants = cli_alloc((size_t)(most + passes + data->peer_count), sizeof *result->contestants);
  for (int i = 0; i < b->kernel_count; i++)
    add(result)->force = b->kernels[i];
  result->ours = result->count;
  for (int dense = 0; dense < 2; dense++) {
    for (int i = 0; i < b->library_count; i++)
      for (int vector = 0; vector < (b->libraries[i].onednn ? 1 : routines); vector++) {
        bench_contestant *c = add(result);
        c->library = &b->libraries[i];
        c->vector = vector;
        c->dense_data = dense;
        c->is_baseline = true;
        name_baseline(data, c);
        if (c->library->onednn && data->onednn.reason[0]) {
          c->outcome = BENCH_UNSUPPORTED;
          snprintf(c->reason, sizeof c->reason, "oneDNN is left out: %s", data->onednn.reason);
        }
      }
    if (b->library_count == 0) { /* no library: our own dense kernel has to serve */
      bench_contestant *c = add(result);
      c->force = "dense";
      c->dense_data = dense;
      c->is_baseline = true;
    }
  }
  result->peers = result->count;
  for (int i = 0; i < passes; i++) {
    bench_contestant *c = add(result);
    c->library = &b->libraries[i];
    c->is_baseline = c->passes = true;
    name_baseline(data, c);
  }
  for (int i = 0; i < data->peer_count; i++) {
    bench_contestant *c = add(result);
    c->peer = data->peers[i];
    c->force = "";
    c->is_baseline = true;
    snprintf(c->name, sizeof c->name, "%s", bench_peer_name(c->peer));
    snprintf(c->reason, sizeof c->reason, "%s", bench_peer_reason(c->peer));
    c->outcome = c->reason[0] ? BENCH_UNSUPPORTED : BENCH_OK;
  }
}

esmm_status bench_call(bench *b, bench_data *data, const bench_contestant *c, int turn, esmm_stats *stats)
{
  if (b->gpu)
    return bench_gpu_call(b, data, c, stats);
  int variant = turn % data->variants, copy = turn % data->copies;
  if (c->library && c->library->onednn)
    return bench_onednn_call(b, data, c, variant, copy) ? ESMM_OK : ESMM_ERR_DRIVER_CALL;
  if (c->library) {
    const float *x = (c->dense_data ? data->dense_a : data->plain_a)[variant].m.data;
    const float *const y[] = {b->epilogue.gate ? data->finish.plain_gate[copy].m.data : NULL,
                              (c->dense_data ? data->dense_b : data->plain_b)[copy].m.data};
    for (int i = b->epilogue.gate ? 0 : 1; i < 2; i++) /* that with B last */
      if (c->vector)
        blas_sgemv(c->library, data->m, data->k, data->n, x, y[i], data->plain_c.m.data);
      else
        blas_sgemm(c->library, data->m, data->k, data->n, x, y[i], data->plain_c.m.data);
    return ESMM_OK;
  }
  esmm_matmul_opts opts = {
      .size = sizeof opts, .force = c->force[0] ? c->force : NULL, .a_pattern = bench_given(data, c, variant)};
  const esmm_matrix *a = &(c->dense_data ? data->dense_a : data->a)[variant].m;
  esmm_status status = ESMM_OK;
  if (b->epilogue.any && !c->is_baseline)
    bench_finish_opts(b, data, turn, &opts);
  if (b->epilogue.gate && c->is_baseline)
    status = esmm_matmul(b->ctx, a, data->finish.gate_weights[copy], &data->c.m, &opts, NULL);
  if (status == ESMM_OK)
    status =
        esmm_matmul(b->ctx, a, (c->dense_data ? data->dense_weights : data->weights)[copy], &data->c.m, &opts, stats);
  return status;
}

int bench_call_failed(const bench *b, const bench_contestant *c, esmm_status status)
{
  const char *name = c->name[0] ? c->name : c->force[0] ? c->force : "auto";
  if (c->library && b->gpu && status == ESMM_ERR_DRIVER_CALL)
    return cli_failed("%s: %s", name, b->cublas.error);
  if (c->library && c->library->onednn)
    return cli_failed("%s: oneDNN failed", name);
  if (c->peer)
    return cli_failed("%s: %s", name, bench_peer_reason(c->peer));
  return cli_status(b->ctx, name, status);
}

/* ---- learning ---- */

static bool learns(const bench_contestant *c)
{
  return !c->library && !c->peer && !c->force[0];
}

/* Calls until the plan stands. */
static esmm_status settle_on_cpu(bench *b, bench_data *data, const bench_contestant *c)
{
  const double start = cli_now();
  esmm_status status = ESMM_OK;
  /* Weights that are new are looked up, and A is looked at, in each of their first calls. */
  const int least = data->copies * EACH_COPY > LEARNING_CALLS ? data->copies * EACH_COPY : LEARNING_CALLS;
  for (int i = 0; i < ROUNDS_CALLS * data->copies && status == ESMM_OK; i++) {
    const double spent = cli_now() - start;
    if ((i >= LEAST_LEARNING && spent > learning_seconds) || (i >= least && spent > rounds_seconds))
      break;
    status = bench_call(b, data, c, i, NULL);
  }
  return status;
}

int bench_settle(bench *b, bench_data *data, const bench_contestant *c)
{
  if (!learns(c))
    return CLI_GO;
  const esmm_status status = b->gpu ? bench_gpu_settle(b, data, c) : settle_on_cpu(b, data, c);
  /* The check says what cannot run. */
  return status == ESMM_OK || status == ESMM_ERR_UNSUPPORTED ? CLI_GO : bench_call_failed(b, c, status);
}

static int settle_all(bench *b, bench_data *data, const bench_result *result)
{
  int status = CLI_GO;
  for (int i = 0; i < result->ours && status == CLI_GO; i++)
    status = bench_settle(b, data, &result->contestants[i]);
  return status;
}

/* ---- checks ---- */

/* A library of a CPU multiplies in fp32 throughout, but for oneDNN. */
static bool in_fp32(const bench_data *data, const bench_contestant *c)
{
  return c->library && !(c->library->onednn && data->onednn.narrow);
}

static esmm_status poison(const bench *b, bench_data *data, const bench_contestant *c, const bench_reference *reference)
{
  if (b->gpu)
    return bench_gpu_poison(b, data, c, reference);
  io_matrix *out = in_fp32(data, c) ? &data->plain_c : &data->c;
  memset(out->memory, 0xff, out->bytes); /* NaN in every dtype */
  return ESMM_OK;
}

/* How c makes its sums. */
static error_rule rule_of(const bench *b, const bench_data *data, const bench_contestant *c)
{
  const cli_problem *p = &b->problem;
  const bool other = c->library || c->peer;
  const bool wide = b->gpu ? other && data->library_dtype == ESMM_F32 : in_fp32(data, c);
  return (error_rule){.dtype_c = wide ? ESMM_F32 : (esmm_dtype)p->dtype_c,
                      .gpu = b->gpu,
                      .halves = !wide && p->dtype_a != ESMM_F32 && p->dtype_a == p->dtype_b,
                      .parts = other || strncmp(c->stats.kernel, "cublas", strlen("cublas")) == 0};
}

static esmm_status find_error(const bench *b, bench_data *data, const bench_contestant *c,
                              const bench_reference *reference, bench_error *error, uint64_t *bits)
{
  const error_rule rule = rule_of(b, data, c);
  bench_reference wanted = *reference;
  wanted.finished = wanted.finished && !c->is_baseline;
  if (b->gpu)
    return bench_gpu_error(b, data, c, &wanted, &rule, error, bits);
  esmm_status status = ESMM_OK;
  const bool wide = in_fp32(data, c), rounded = !wide && data->c.m.dtype != ESMM_F32;
  if (rounded)
    status = esmm_matrix_copy(b->ctx, &data->c.m, &data->plain_c.m);
  if (status == ESMM_OK) {
    const float *values = (wide || rounded ? &data->plain_c : &data->c)->m.data;
    *error = bench_error_find(&wanted, &rule, values, false);
    *bits = bench_bits(&wanted, values, false);
  }
  return status;
}

/* Runs once into poisoned memory. On the random dense data, and with a pass behind it, there is nothing to compare: the
   same routine was checked. */
static int check(bench *b, bench_data *data, const bench_reference *reference, bench_contestant *c)
{
  const bool compared = !b->no_check && !c->dense_data && !c->passes;
  if ((c->peer || c->library) && c->outcome == BENCH_UNSUPPORTED)
    return CLI_GO;
  esmm_status status = compared ? poison(b, data, c, reference) : ESMM_OK;
  if (status != ESMM_OK)
    return cli_status(b->ctx, "C", status);
  char before[sizeof c->name];
  memcpy(before, c->name, sizeof before);
  const int64_t strip_rows = c->stats.strip_rows;
  const int threads = c->stats.threads;
  c->stats = (esmm_stats){.size = sizeof c->stats};
  status = bench_call(b, data, c, 0, c->library || c->peer ? NULL : &c->stats);
  if (status != ESMM_OK && c->peer) {
    c->outcome = BENCH_UNSUPPORTED;
    snprintf(c->reason, sizeof c->reason, "%s", bench_peer_reason(c->peer));
    return CLI_GO;
  }
  if (status == ESMM_ERR_DRIVER_CALL && c->library && c->vector) { /* the other routine multiplies one row too */
    c->outcome = BENCH_UNSUPPORTED;
    snprintf(c->reason, sizeof c->reason, "%.60s is left out: %.180s", c->name, b->cublas.error);
    return CLI_GO;
  }
  if (status == ESMM_ERR_UNSUPPORTED) {
    c->outcome = BENCH_UNSUPPORTED;
    snprintf(c->reason, sizeof c->reason, "%s", esmm_ctx_error(b->ctx));
    snprintf(c->name, sizeof c->name, "%s", c->force[0] ? c->force : "auto");
    return CLI_GO;
  }
  if (status != ESMM_OK)
    return bench_call_failed(b, c, status);
  if (!c->library && !c->peer) {
    snprintf(c->name, sizeof c->name, "%s%s", c->stats.kernel, c->dense_data ? "_on_random" : "");
    snprintf(c->reason, sizeof c->reason, "%s", c->stats.reason);
  }
  if (!compared) {
    c->outcome = b->no_check ? BENCH_NOT_CHECKED : BENCH_OK;
    return CLI_GO;
  }
  bench_error error;
  uint64_t bits;
  status = find_error(b, data, c, reference, &error, &bits);
  if (status != ESMM_OK)
    return cli_status(b->ctx, c->name, status);
  bool right = true;
  int compared_all = c->is_baseline ? CLI_GO : bench_finish_check(b, data, &right, c->reason, sizeof c->reason);
  if (compared_all != CLI_GO)
    return compared_all;
  if (!right)
    c->outcome = BENCH_WRONG;
  /* Another kernel may add in another order, and so may one that was chosen for another A of the same class. */
  if (strcmp(before, c->name) != 0 || c->stats.strip_rows != strip_rows || c->stats.threads != threads)
    c->checks = 0;
  c->varies = c->varies || (c->checks > 0 && bits != c->bits);
  c->bits = bits;
  c->checks++;
  if (isnan(c->rel_err) || error.share > c->error.share) /* the worst of the checks */
    c->error = error;
  if (!(error.relative <= c->rel_err)) /* NAN before the first */
    c->rel_err = error.relative;
  return CLI_GO;
}

static const bench_contestant *same_on_this_data(const bench_result *result, const bench_contestant *c)
{
  for (int i = result->ours; i < result->peers; i++) {
    const bench_contestant *other = &result->contestants[i];
    if (!c->peer && !other->dense_data && other->library == c->library && other->vector == c->vector)
      return other;
  }
  return c;
}

/* A library whose result is wrong (a broken build) is no baseline. It may add in any order. */
static void judge_baselines(const bench *b, const bench_data *data, bench_result *result)
{
  for (int i = result->ours; i < result->count && !b->no_check; i++) {
    bench_contestant *c = &result->contestants[i];
    const bench_contestant *checked = same_on_this_data(result, c);
    const error_rule rule = rule_of(b, data, checked);
    const double limit = fmax(1, error_any_depth((double)data->k) / error_depth(&rule, (double)data->k));
    if (c->outcome != BENCH_UNSUPPORTED && !(checked->error.share <= limit)) {
      c->outcome = BENCH_WRONG;
      snprintf(c->reason, sizeof c->reason, "relative error %.3g: left out as a baseline", checked->rel_err);
    }
  }
}

static bool promises_bits(const esmm_ctx *ctx, const char *kernel)
{
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) == ESMM_OK && strcmp(info.name, kernel) == 0)
      return info.flags & ESMM_KERNEL_DETERMINISTIC;
  }
  return false;
}

/* Of the dense libraries that are right. */
static double worst_dense_share(const bench_result *result)
{
  double worst = 0;
  for (int i = result->ours; i < result->peers; i++) {
    const bench_contestant *c = &result->contestants[i];
    if (c->outcome == BENCH_OK && !c->dense_data)
      worst = fmax(worst, c->error.share);
  }
  return worst;
}

/*
 * The bound comes from the terms alone. Some data exceeds even that in every sum in order (all elements alike, so that
 * every rounding points the same way): then the worst library's error is the measure, never the fastest's.
 */
static void judge_ours(const bench *b, bench_result *result)
{
  const bool compares = b->library_count > 0 && b->problem.dtype_c == ESMM_F32;
  const double limit = compares ? fmax(1, 2 * worst_dense_share(result)) : 1;
  for (int i = 0; i < result->ours && !b->no_check; i++) {
    bench_contestant *c = &result->contestants[i];
    const bench_error *e = &c->error;
    if (c->outcome == BENCH_OK && !(e->share <= limit)) {
      c->outcome = BENCH_WRONG;
      snprintf(c->reason, sizeof c->reason, "C[%lld,%lld] is %.9g, not %.9g: at most %.3g off is allowed",
               (long long)e->row, (long long)e->col, e->got, e->want, limit * e->allowed);
    } else if (c->outcome == BENCH_OK && c->varies && promises_bits(b->ctx, c->stats.kernel)) {
      c->outcome = BENCH_WRONG;
      snprintf(c->reason, sizeof c->reason, "two calls on the same data gave different bits");
    }
  }
}

static int check_all(bench *b, bench_data *data, const bench_reference *reference, bench_result *result)
{
  int status = CLI_GO;
  for (int i = 0; i < result->count && status == CLI_GO; i++)
    status = check(b, data, reference, &result->contestants[i]);
  if (status != CLI_GO)
    return status;
  judge_baselines(b, data, result);
  judge_ours(b, result);
  return CLI_GO;
}

/* ---- timing ---- */

static bool runs(const bench_contestant *c)
{
  return c->outcome == BENCH_OK || c->outcome == BENCH_NOT_CHECKED;
}

/* How many calls a round: enough in all, but not minutes of a slow kernel. */
static int plan_calls(bench *b, bench_data *data, bench_contestant *c, int rounds)
{
  double start = cli_now();
  esmm_status status = b->gpu ? bench_gpu_time(b, data, c, &c->estimate, 1) : bench_call(b, data, c, 1, NULL);
  if (!b->gpu)
    c->estimate = cli_now() - start;
  if (status != ESMM_OK)
    return bench_call_failed(b, c, status);
  double calls = ceil(enough_seconds / (c->estimate > 1e-7 ? c->estimate : 1e-7));
  if (calls > ENOUGH_CALLS)
    calls = ENOUGH_CALLS;
  if (calls < (double)b->runs)
    calls = (double)b->runs;
  if (c->peer && c->estimate > slow_on_gpu && calls > PEER_CALLS)
    calls = PEER_CALLS;
  c->calls = (int)calls;
  c->per_round = (int)ceil(calls / rounds);
  c->batch = 1;
  c->seconds = cli_alloc((size_t)c->per_round * (size_t)rounds, sizeof *c->seconds);
  return CLI_GO;
}

static void pause_for_others(const bench *b)
{
  const struct timespec pause = {.tv_nsec = 40 * 1000 * 1000};
  if (b->threads > 1 && !b->gpu)
    nanosleep(&pause, NULL);
}

static esmm_status time_on_cpu(bench *b, bench_data *data, bench_contestant *c, int *turn)
{
  esmm_status status = ESMM_OK;
  if (c->count == 0 || c->estimate < slow_seconds) {
    const double start = cli_now();
    const bool fast = c->estimate < slow_seconds;
    double now = start;
    int calls = 0;
    do { /* at first every copy of B once: a first call plans */
      status = bench_call(b, data, c, (*turn)++, NULL);
      calls++;
      now = cli_now();
    } while (status == ESMM_OK && (now - start < warm_seconds || (fast && c->count == 0 && calls < data->copies)));
    if (c->count == 0)
      c->batch = (int)fmax(1, batch_seconds * calls / (now - start));
  }
  for (int i = 0; i < c->per_round && status == ESMM_OK; i++) {
    double start = cli_now();
    for (int j = 0; j < c->batch && status == ESMM_OK; j++)
      status = bench_call(b, data, c, (*turn)++, NULL);
    c->seconds[c->count++] = (cli_now() - start) / c->batch;
  }
  return status;
}

static esmm_status time_on_gpu(bench *b, bench_data *data, bench_contestant *c)
{
  enum { WARM = 1 };
  double warm[WARM];
  esmm_status status = ESMM_OK;
  if (c->estimate < slow_on_gpu)
    status = bench_gpu_time(b, data, c, warm, WARM);
  if (status == ESMM_OK)
    status = bench_gpu_time(b, data, c, c->seconds + c->count, c->per_round);
  if (status == ESMM_OK)
    c->count += c->per_round;
  return status;
}

static int take_turn(bench *b, bench_data *data, bench_contestant *c, int *turn, double *extract, double *plan)
{
  pause_for_others(b);
  esmm_status status = b->gpu ? time_on_gpu(b, data, c) : time_on_cpu(b, data, c, turn);
  if (!c->library && !c->peer && status == ESMM_OK && (c->estimate < slow_seconds || c->count == c->per_round)) {
    esmm_stats stats = {.size = sizeof stats};
    status = b->gpu ? bench_gpu_flush(b, data) : ESMM_OK;
    if (status == ESMM_OK)
      status = bench_call(b, data, c, (*turn)++, &stats);
    *extract = stats.seconds_extract;
    *plan = stats.seconds_plan;
  }
  return status == ESMM_OK ? CLI_GO : bench_call_failed(b, c, status);
}

static void summarise(bench_contestant *c, double *extract, double *plan, int rounds)
{
  if (c->count == 0)
    return;
  c->median = bench_median(c->seconds, c->count);
  c->fastest = c->seconds[0];
  c->p95 = c->seconds[(int)ceil(0.95 * c->count) - 1];
  int seen = 0;
  for (int i = 0; i < rounds; i++)
    if (!isnan(extract[i])) {
      extract[seen] = extract[i];
      plan[seen++] = plan[i];
    }
  c->extract = bench_median(extract, seen);
  c->plan = bench_median(plan, seen);
}

/* A GPU's clock goes down and up with its power: there, turns are short, so that all contestants see the same. */
static int count_rounds(const bench *b)
{
  const int64_t wanted = b->gpu ? 3 * b->runs : b->runs, most = b->gpu ? MOST_GPU_ROUNDS : MOST_ROUNDS;
  return (int)(wanted < most ? wanted : most);
}

static int time_all(bench *b, bench_data *data, bench_result *result)
{
  int rounds = count_rounds(b), count = result->count, status = CLI_GO;
  int *turns = cli_alloc((size_t)count, sizeof *turns);
  double *extract = cli_alloc((size_t)count * (size_t)rounds, sizeof *extract);
  double *plan = cli_alloc((size_t)count * (size_t)rounds, sizeof *plan);
  for (int i = 0; i < count * rounds; i++)
    extract[i] = plan[i] = NAN;
  for (int i = 0; i < count && status == CLI_GO; i++) {
    pause_for_others(b);
    if (runs(&result->contestants[i]))
      status = plan_calls(b, data, &result->contestants[i], rounds);
  }
  int before = b->done;
  for (int round = 0; round < rounds && status == CLI_GO; round++)
    for (int i = 0; i < count && status == CLI_GO; i++) {
      int at = (round + i) % count;
      bench_contestant *c = &result->contestants[at];
      if (runs(c) && c->count < c->calls)
        status = take_turn(b, data, c, &turns[at], &extract[at * rounds + round], &plan[at * rounds + round]);
      b->done = before + (round * count + i) * 100 / (rounds * count);
      cli_progress_update(&b->progress, b->done, b->total);
    }
  for (int i = 0; i < count && status == CLI_GO; i++)
    summarise(&result->contestants[i], extract + i * rounds, plan + i * rounds, rounds);
  free(turns);
  free(extract);
  free(plan);
  return status;
}

static void choose_baseline(bench_result *result)
{
  result->best = -1;
  for (int i = result->ours; i < result->peers; i++) {
    const bench_contestant *c = &result->contestants[i];
    if (runs(c) && (result->best < 0 || c->median < result->contestants[result->best].median))
      result->best = i;
  }
  if (result->best >= 0)
    result->baseline_err = same_on_this_data(result, &result->contestants[result->best])->rel_err;
}

/* The cost of a call before auto has learnt; then it learns again. */
static int time_first_calls(bench *b, bench_data *data, bench_result *result)
{
  int status = CLI_GO;
  for (int i = 0; i < result->ours && status == CLI_GO; i++) {
    bench_contestant *c = &result->contestants[i];
    if (!b->gpu || !runs(c) || !learns(c))
      continue;
    const esmm_status done = bench_gpu_first(b, data, c, &c->first);
    status = done == ESMM_OK ? bench_settle(b, data, c) : bench_call_failed(b, c, done);
  }
  return status;
}

/* Once more where auto took another kernel than before: it is one kernel that must give the same bits. */
static int check_again(bench *b, bench_data *data, const bench_reference *reference, bench_result *result)
{
  int status = CLI_GO;
  for (int i = 0; i < result->ours && status == CLI_GO; i++) {
    bench_contestant *c = &result->contestants[i];
    if (!runs(c))
      continue;
    status = check(b, data, reference, c);
    if (status == CLI_GO && c->checks == 1)
      status = check(b, data, reference, c);
  }
  if (status == CLI_GO)
    judge_ours(b, result);
  for (int i = 0; i < result->ours; i++) {
    bench_contestant *c = &result->contestants[i];
    if (c->outcome == BENCH_WRONG)
      c->median = c->p95 = c->fastest = c->extract = c->plan = c->first = c->joules = c->watts = NAN;
  }
  return status;
}

int bench_measure(bench *b, bench_data *data, bench_result *result)
{
  bench_reference reference = {0};
  *result = (bench_result){.best = -1, .baseline_err = NAN};
  bench_peers_make(b, data);
  add_contestants(b, data, result);
  int status = CLI_GO;
  if (!b->no_check)
    status = bench_reference_make(b->threads, data->m, data->k, data->n, data->plain_a[0].m.data,
                                  data->plain_b[0].m.data, &reference);
  if (status == CLI_GO && !b->no_check && b->epilogue.any)
    status = bench_finish_reference(b, data, &reference);
  result->checked_rows = reference.row_count;
  if (status == CLI_GO)
    status = settle_all(b, data, result);
  if (status == CLI_GO)
    status = check_all(b, data, &reference, result);
  if (status == CLI_GO)
    status = time_all(b, data, result);
  if (status == CLI_GO)
    status = time_first_calls(b, data, result);
  if (status == CLI_GO) {
    choose_baseline(result);
    status = bench_energy(b, data, result);
  }
  if (status == CLI_GO)
    status = check_again(b, data, &reference, result);
  bench_reference_free(&reference);
  bench_peers_free(b, data);
  return status;
}

int bench_once(bench *b, bench_data *data)
{
  int ran = 0;
  for (int i = 0; i < b->kernel_count; i++) {
    const bench_contestant c = {.force = b->kernels[i]};
    esmm_status status = bench_call(b, data, &c, 0, NULL);
    if (status == ESMM_ERR_UNSUPPORTED)
      cli_note("%s", esmm_ctx_error(b->ctx));
    else if (status != ESMM_OK)
      return bench_call_failed(b, &c, status);
    ran += status == ESMM_OK;
  }
  esmm_status status = esmm_ctx_synchronize(b->ctx);
  if (status != ESMM_OK)
    return cli_status(b->ctx, "--once", status);
  return ran ? CLI_GO : cli_failed("none of the kernels asked for can run this product");
}

void bench_result_free(bench_result *result)
{
  for (int i = 0; i < result->count; i++)
    free(result->contestants[i].seconds);
  free(result->contestants);
  *result = (bench_result){0};
}
