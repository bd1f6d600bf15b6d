/*
 * product.c: a product on a CPU: sample A, choose a kernel, run it. A gated product is two: the gate's branch is
 * finished into scratch, a block of rows at a time, and multiplied into the other by that one's epilogue.
 */
#include "choose/choose.h"
#include "choose/recall.h"
#include "cpu/costs.h"
#include "cpu/cpu.h"
#include "cpu/epilogue.h"
#include "threads.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define GATE_BYTES ((int64_t)16 << 20) /* scratch for the gate's branch, where that is at least GATE_ROWS rows */
#define GATE_ROWS 128
#define LOOK_SHARE 0.02 /* of a product's time, which a look at A may take in each call */

/* The most threads that a product is worth if nothing is skipped. */
static void set_threads(esmm_problem *p)
{
  const double most = sqrt((double)p->m * (double)p->n * (double)p->k / p->ctx->thread_work);
  p->threads = most >= (double)p->ctx->threads ? p->ctx->threads : (int)fmax(1.0, most);
}

/* Nothing can fail from here on: the counts may lose what they held. */
static void begin_counts(const esmm_problem *p)
{
  if (p->nonzeros)
    memset(p->nonzeros, 0, (size_t)p->n * sizeof *p->nonzeros);
}

/* ---- nothing to sum: k or alpha is 0 ---- */

enum { ZERO_ROWS = 64, ZERO_COLS = ESMM_TALLY_COLS };

/* first, end: in ZERO_ROWS rows */
static void finish_zero_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  static const float zeros[ZERO_COLS];
  const esmm_problem *p = arg;
  for (int64_t i = first * ZERO_ROWS; i < esmm_min(end * ZERO_ROWS, p->m); i += ZERO_ROWS)
    for (int64_t j = 0; j < p->n; j += ZERO_COLS)
      esmm_finish(p, i, esmm_min(ZERO_ROWS, p->m - i), j, esmm_min(ZERO_COLS, p->n - j), zeros, 0);
}

static void finish_zeros(const esmm_problem *p)
{
  esmm_problem without = *p;
  without.alpha = 1.0f;
  esmm_for(p->ctx, p->threads, esmm_ceil_div(p->m, ZERO_ROWS), 1, finish_zero_rows, &without);
}

/* The gate's branch is one row then, the same for all. */
esmm_status esmm_cpu_finish(esmm_ctx *ctx, esmm_problem *p, bool want_stats, esmm_stats *s)
{
  (void)want_stats;
  set_threads(p);
  s->threads = p->threads;
  if (p->gate.w) {
    float *row = esmm_scratch(ctx, (size_t)p->n * sizeof *row);
    if (!row)
      return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %lld numbers of the gate's branch", (long long)p->n);
    esmm_problem gate = esmm_gate_problem(p, &p->gate, 1, p->n);
    gate.c.data = row;
    finish_zeros(&gate);
    p->factor = row;
    p->factor_ld = 0;
  }
  begin_counts(p);
  finish_zeros(p);
  return ESMM_OK;
}

/* ---- products ---- */

/* A product with its kernel. */
typedef struct planned {
  esmm_problem *p; /* the plan fills in sample and variant */
  esmm_plan plan;
  esmm_history *history; /* of such calls; NULL where none is kept */
  esmm_sample seen;      /* A's densities, if statistics are wanted */
  int wakes;             /* sleeping threads that it is worth waking */
  char reason[sizeof((esmm_choice *)NULL)->text];
} planned;

enum { ALIKE = 4, UNLOOKED = 15 };

/* Memory of a shape of call: the kernels to choose from and, where A need not be sampled, the choice. */
typedef struct remembered {
  esmm_shortlist list;
  bool outright; /* a look at A would not pay */
  int stands;    /* how many more calls of this class have this plan */
  int alike;     /* how many calls in a row had this class; */
  int unlooked;  /* how many more calls need not sample A */
  esmm_density_class seen;
  int threads, wakes;
  esmm_plan plan;
  esmm_history history;
} remembered;

/*
 * A kernel that skips most of its work is worth fewer threads, and still fewer that have to be woken. seconds: the
 * model's prediction for the kernel of that index, on all threads.
 */
static int worth_threads(const esmm_problem *p, int index, double seconds, int *wakes)
{
  const double work = (seconds - p->ctx->cost[index][ESMM_COST_TERMS - 1]) * (double)p->ctx->threads;
  const double most = sqrt(fmax(0.0, work / (p->ctx->thread_work * ESMM_CPU_COST_TERM)));
  const double awake = work / p->ctx->wake_seconds;
  *wakes = awake >= (double)p->threads ? p->threads : (int)fmax(0.0, awake - 1.0);
  return most >= (double)p->threads ? p->threads : most < 1.0 ? 1 : (int)most;
}

/* Leaves p->sample full where A need not be sampled. */
static void judge(esmm_problem *p, remembered *kept)
{
  memset(kept, 0, sizeof *kept);
  esmm_plan_shortlist(p, NULL, &kept->list);
  kept->outright = kept->list.count > 0 && esmm_plan_outright(p, &kept->list, esmm_sample_seconds(&p->a));
}

/* Fills p->sample as the plan needs it. */
static esmm_status explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen)
{
  remembered kept;
  if (!force)
    judge(p, &kept);
  const bool looked = force || !kept.outright;
  if (looked)
    esmm_sample_a(p->ctx, &p->a, p->w, &p->sample);
  return esmm_plan_sampled(ctx, p, force, looked, choices, chosen);
}

/* Looked for once for each shape of call; NULL where that is not remembered. */
static remembered *recall_shape(esmm_problem *p)
{
  _Static_assert(sizeof(remembered) <= ESMM_SHAPE_BYTES, "raise ESMM_SHAPE_BYTES");
  remembered *kept = esmm_recall_shape(p, true);
  if (kept)
    return kept;
  kept = esmm_recall_add_shape(p);
  if (kept)
    judge(p, kept);
  return kept;
}

/* Forced, or none can run. */
static __attribute__((noinline)) esmm_status plan_forced(esmm_ctx *ctx, esmm_problem *p, const char *force,
                                                         bool wants_reason, planned *out)
{
  esmm_shortlist list;
  out->plan = (esmm_plan){.kernel = NULL};
  esmm_plan_shortlist(p, force, &list);
  if (list.count == 0 || wants_reason) {
    esmm_choice choices[ESMM_MAX_KERNELS];
    int chosen;
    const esmm_status status = explain(ctx, p, force, choices, &chosen);
    if (status != ESMM_OK)
      return status;
    memcpy(out->reason, choices[chosen].text, sizeof out->reason);
  } else {
    esmm_sample_a(ctx, &p->a, p->w, &p->sample);
  }
  for (int i = 0; i < list.count; i++) {
    int64_t variant;
    const double seconds = esmm_plan_seconds(p, list.index[i], NULL, &variant);
    if (!out->plan.kernel || seconds < out->plan.seconds)
      out->plan = (esmm_plan){
          .kernel = esmm_registry_at(list.index[i]), .index = list.index[i], .variant = variant, .seconds = seconds};
  }
  p->variant = out->plan.variant;
  p->threads = worth_threads(p, out->plan.index, out->plan.seconds, &out->wakes);
  return ESMM_OK;
}

/* A is not sampled in every call if sampling takes part of the time, the plan skips nothing, and A has been alike: new
   zeros are found some calls later, and lost ones do no harm. */
static void note_look(const esmm_problem *p, remembered *kept, esmm_density_class seen)
{
  kept->alike = esmm_same_densities(seen, kept->seen) ? kept->alike + 1 : 0;
  if (kept->alike < ALIKE || kept->plan.kernel->flags & ESMM_KERNEL_SKIPS ||
      esmm_sample_seconds(&p->a) < LOOK_SHARE * kept->plan.seconds)
    return;
  kept->alike = ALIKE;
  kept->unlooked = UNLOOKED;
}

/* The remembered plan, while it stands for calls of this class. */
static bool plan_stands(esmm_problem *p, remembered *kept, esmm_density_class seen, planned *out)
{
  if (kept->stands == 0)
    return false;
  if (p->ctx->turn > 0 || !esmm_same_densities(seen, kept->seen)) {
    if (kept->stands != INT_MAX)
      esmm_choose_return(out->history, kept->stands);
    kept->stands = 0;
    return false;
  }
  kept->stands -= kept->stands != INT_MAX;
  out->plan = kept->plan;
  p->threads = kept->threads;
  p->variant = kept->plan.variant;
  out->wakes = kept->wakes;
  return true;
}

/* By what is remembered. A is sampled, or its densities are full. */
static void plan_by(esmm_problem *p, remembered *kept, planned *out)
{
  const bool keeps = kept->outright || p->ctx->learns;
  const esmm_density_class seen = kept->outright || !keeps ? (esmm_density_class){0, 0} : esmm_choose_class(p, true);
  if (!kept->outright && kept->stands > 0 && keeps)
    note_look(p, kept, seen);
  if (!plan_stands(p, kept, seen, out)) {
    if (kept->outright)
      esmm_sample_fill(&p->sample, 1.0);
    esmm_choose(p, &kept->list, !kept->outright, out->history, &out->plan);
    p->threads = worth_threads(p, out->plan.index, out->plan.predicted, &out->wakes);
    if (keeps && out->history) {
      kept->plan = out->plan;
      kept->plan.timed = false;
      kept->seen = seen;
      kept->threads = p->threads;
      kept->wakes = out->wakes;
      kept->stands = esmm_choose_stands(p, &out->plan, out->history);
    }
  }
  p->variant = out->plan.variant;
}

/* The flag asks for the reason and A's densities; it does not change the choice. */
static esmm_status plan(esmm_ctx *ctx, esmm_problem *p, const char *force, bool wants_reason, planned *out)
{
  out->p = p;
  out->history = NULL;
  out->reason[0] = '\0';
  remembered own, *kept = force ? NULL : recall_shape(p);
  if (kept)
    out->history = &kept->history;
  else if (!force)
    judge(p, kept = &own);
  if (wants_reason)
    esmm_sample_a(p->ctx, &p->a, p->w, &out->seen);
  if (!kept || kept->list.count == 0)
    return plan_forced(ctx, p, force, wants_reason, out);
  if (kept->outright && kept->stands > 0 && kept->plan.kernel->flags & ESMM_KERNEL_SKIPS)
    esmm_sample_fill(&p->sample, 1.0);
  if (kept->unlooked > 0 && !wants_reason && plan_stands(p, kept, kept->seen, out)) {
    kept->unlooked--;
    return ESMM_OK;
  }
  kept->unlooked = 0;
  if (!kept->outright && wants_reason)
    p->sample = out->seen;
  else if (!kept->outright && kept->list.sees_a)
    esmm_sample_a(p->ctx, &p->a, p->w, &p->sample);
  plan_by(p, kept, out);
  if (wants_reason)
    esmm_choose_text(&out->plan, out->reason, sizeof out->reason);
  return ESMM_OK;
}

static void note_plan(const planned *x, esmm_stats *s)
{
  memcpy(s->reason, x->reason, sizeof s->reason);
  (void)snprintf(s->kernel, sizeof s->kernel, "%s", x->plan.kernel->name);
  s->threads = x->p->threads;
  s->strip_rows = x->plan.kernel->variant_strips ? x->p->variant : 0;
  s->density_a = x->seen.element;
  for (int i = 0; i < ESMM_CPU_HEIGHTS; i++)
    if (s->strip_rows == (int64_t)1 << i)
      s->strip_density_a = x->seen.strip[i];
}

static esmm_status no_scratch(esmm_ctx *ctx, size_t bytes, const planned *x)
{
  return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of scratch for %s", bytes, x->plan.kernel->name);
}

/* With a clock, if the plan learns from its time. */
static esmm_status run_kernel(esmm_ctx *ctx, const planned *x, const esmm_problem *p, void *scratch, esmm_stats *s,
                              double *seconds)
{
  const double start = x->plan.timed ? esmm_now() : 0.0;
  ctx->wakes = x->wakes;
  const esmm_status status = x->plan.kernel->run(x->plan.kernel, ctx, p, scratch, s);
  ctx->wakes = INT_MAX;
  if (x->plan.timed)
    *seconds += esmm_now() - start;
  return status;
}

static void learn(esmm_ctx *ctx, const planned *x, double seconds)
{
  if (x->plan.timed)
    esmm_choose_learn(ctx, &x->plan, x->history, seconds);
}

static esmm_status run_planned(esmm_ctx *ctx, esmm_problem *p, const char *force, bool wants_reason, esmm_stats *s)
{
  planned x;
  const double start = wants_reason ? esmm_now() : 0.0;
  const esmm_status status = plan(ctx, p, force, wants_reason, &x);
  if (status != ESMM_OK)
    return status;
  const size_t bytes = esmm_kernel_workspace(x.plan.kernel, p);
  void *scratch = bytes == SIZE_MAX ? NULL : esmm_scratch(ctx, bytes);
  if (!scratch)
    return no_scratch(ctx, bytes, &x);
  begin_counts(p);
  if (wants_reason) {
    s->seconds_plan = esmm_now() - start;
    note_plan(&x, s);
  }
  double seconds = 0.0;
  const esmm_status ran = run_kernel(ctx, &x, p, scratch, s, &seconds);
  learn(ctx, &x, seconds);
  if (!wants_reason)
    return ran;
  s->seconds_total = esmm_now() - start;
  s->seconds_multiply = s->seconds_total - s->seconds_plan - s->seconds_extract;
  return ran;
}

/* ---- gated products ---- */

static esmm_matrix matrix_rows(const esmm_matrix *m, int64_t row0, int64_t rows)
{
  esmm_matrix part = *m;
  part.data = (char *)m->data + (size_t)esmm_matrix_index(m, row0, 0) * esmm_dtype_size(m->dtype);
  part.rows = rows;
  return part;
}

/*
 * Rows [row0, row0 + rows) as a product. *view takes their part of A's pattern: row0 begins a strip of it,
 * or all these rows are in one (see part_rows).
 */
static esmm_problem problem_rows(const esmm_problem *p, int64_t row0, int64_t rows, esmm_pattern *view)
{
  esmm_problem part = *p;
  part.m = rows;
  part.row0 = row0;
  part.a = matrix_rows(&p->a, row0, rows);
  if (p->residual.data)
    part.residual = matrix_rows(&p->residual, row0, rows);
  if (p->pattern) {
    *view = *p->pattern;
    view->bits += row0 / view->strip_rows * view->words;
    view->rows = rows;
    view->strips = esmm_ceil_div(rows, view->strip_rows);
    part.pattern = view;
  }
  return part;
}

/* How many rows to do together from row0 on: as many as there is room for, but no part of a strip of A's pattern beside
   another strip. */
static int64_t part_rows(const esmm_problem *p, int64_t row0, int64_t room)
{
  const int64_t strip = p->pattern ? p->pattern->strip_rows : 1, left = p->m - row0, used = row0 % strip;
  if (left <= room && used == 0)
    return left;
  if (strip <= room)
    return esmm_min(room - room % strip, left);
  return esmm_min(esmm_min(room, strip - used), left);
}

/* Most scratch that any part needs in either kernel; SIZE_MAX on overflow. */
static size_t parts_workspace(const planned *x, const planned *gate, int64_t room)
{
  size_t most = 0;
  for (int64_t row0 = 0, rows; row0 < x->p->m; row0 += rows) {
    esmm_pattern view;
    rows = part_rows(x->p, row0, room);
    const esmm_problem part = problem_rows(x->p, row0, rows, &view);
    const esmm_problem gate_part = problem_rows(gate->p, row0, rows, &view);
    const size_t one = esmm_kernel_workspace(x->plan.kernel, &part),
                 other = esmm_kernel_workspace(gate->plan.kernel, &gate_part);
    most = one > most ? one : most;
    most = other > most ? other : most;
  }
  return most;
}

/* Runs both products for rows [row0, row0 + rows); branch has room for the gate's. noted: the plan's numbers of x.
   Adds to s: FLOP and seconds of both, densities of x times rows; and to seconds what the gate's took, and x. */
static esmm_status run_part(esmm_ctx *ctx, const planned *x, const planned *gate, int64_t row0, int64_t rows,
                            float *branch, void *scratch, const esmm_stats *noted, esmm_stats *s, double seconds[2])
{
  esmm_pattern view;
  esmm_stats own = *noted, others = *noted;
  esmm_problem part = problem_rows(gate->p, row0, rows, &view);
  part.c.data = branch;
  part.c.rows = rows;
  esmm_status status = run_kernel(ctx, gate, &part, scratch, &others, &seconds[0]);
  if (status != ESMM_OK)
    return status;
  part = problem_rows(x->p, row0, rows, &view);
  part.c = matrix_rows(&x->p->c, row0, rows);
  part.factor = branch;
  part.factor_ld = x->p->n;
  status = run_kernel(ctx, x, &part, scratch, &own, &seconds[1]);
  s->density_a += (double)rows * own.density_a;
  s->strip_density_a += (double)rows * own.strip_density_a;
  s->joint_density += (double)rows * own.joint_density;
  s->seconds_extract += own.seconds_extract + others.seconds_extract;
  s->flop_useful += own.flop_useful + others.flop_useful;
  return status;
}

static esmm_status run_gated(esmm_ctx *ctx, esmm_problem *p, const char *force, bool wants_reason, esmm_stats *s)
{
  planned x, gate;
  esmm_problem branch = esmm_gate_problem(p, &p->gate, p->m, p->n);
  const double start = esmm_now();
  esmm_status status = plan(ctx, p, force, wants_reason, &x);
  if (status == ESMM_OK)
    status = plan(ctx, &branch, force, wants_reason, &gate);
  if (status != ESMM_OK)
    return status;
  const int64_t room = esmm_min(p->m, esmm_max(GATE_ROWS, GATE_BYTES / (int64_t)sizeof(float) / p->n));
  size_t bytes, total = parts_workspace(&x, &gate, room);
  if (!esmm_size_mul((size_t)room * sizeof(float), (size_t)p->n, &bytes) || !esmm_size_add(bytes, 63, &bytes) ||
      !esmm_size_add(total, bytes - bytes % 64, &total))
    total = SIZE_MAX;
  char *scratch = total == SIZE_MAX ? NULL : esmm_scratch(ctx, total);
  if (!scratch)
    return no_scratch(ctx, total, &x);
  s->seconds_plan = esmm_now() - start;
  esmm_stats noted = {0};
  if (wants_reason)
    note_plan(&x, &noted);
  memcpy(s->kernel, noted.kernel, sizeof s->kernel);
  memcpy(s->reason, noted.reason, sizeof s->reason);
  s->strip_rows = noted.strip_rows;
  s->threads = (int)esmm_max(x.p->threads, gate.p->threads);
  begin_counts(p);
  double seconds[2] = {0.0};
  for (int64_t row0 = 0, rows; status == ESMM_OK && row0 < p->m; row0 += rows) {
    rows = part_rows(p, row0, room);
    status = run_part(ctx, &x, &gate, row0, rows, (float *)(void *)scratch, scratch + (bytes - bytes % 64), &noted, s,
                      seconds);
  }
  learn(ctx, &gate, seconds[0]);
  learn(ctx, &x, seconds[1]);
  s->density_a /= (double)p->m;
  s->strip_density_a /= (double)p->m;
  s->joint_density /= (double)p->m;
  s->seconds_total = esmm_now() - start;
  s->seconds_multiply = s->seconds_total - s->seconds_plan - s->seconds_extract;
  return status;
}

/* ---- from the outside ---- */

esmm_status esmm_cpu_explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen)
{
  set_threads(p);
  return explain(ctx, p, force, choices, chosen);
}

esmm_status esmm_cpu_multiply(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s)
{
  set_threads(p);
  p->timed = want_stats;
  return p->gate.w ? run_gated(ctx, p, force, want_stats, s) : run_planned(ctx, p, force, want_stats, s);
}
