/*
 * matmul.c: the way of a product through the GPU: stage (stage.c), choose (plan.c), launch (launch.c), copy back, count
 * (stats.c). And the same without the product, for explain.
 *
 * A gated product is two: the gate's branch is finished into scratch, in fp32, and multiplied into the other by its
 * epilogue. Or one launch makes both, if a kernel can and that is cheaper.
 */
#include "cuda/product/product.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* strips: room for B's, too. */
static esmm_status get_scratch(run *r, bool strips, size_t work)
{
  const size_t b = strips ? esmm_cuda_strips_bytes(r->p->n, r->p->k) : 0;
  size_t bytes = r->st.bytes;
  const bool fits = esmm_cuda_reserve(&bytes, b, SCRATCH_ALIGN, &r->st.b_at); /* false where b is SIZE_MAX */
  r->st.work_at = bytes;
  if (!fits || work == SIZE_MAX || !esmm_size_add(bytes, work, &bytes))
    return esmm_fail(r->ctx, ESMM_ERR_OVERFLOW, "%lld x %lld x %lld needs more scratch than fits in memory",
                     (long long)r->p->m, (long long)r->p->k, (long long)r->p->n);
  return esmm_cuda_scratch(r->ctx, bytes, r->stream, &r->scratch);
}

/* What the kernels that the decision launches need: workspace, and whether to make B's strips. */
static void add_needs(const run *r, size_t *most, bool *strips)
{
  const decision *d = &r->d;
  for (int i = RUN_DENSE; i <= RUN_SKIP; i++) {
    if (d->run != DEVICE_CHOOSES && (int)d->run != i)
      continue;
    const size_t bytes = d->of[i].kernel ? d->of[i].work : 0;
    *most = bytes > *most ? bytes : *most;
    *strips = *strips || wants_strips(r->p, d->of[i].kernel);
  }
}

static esmm_status get_product_scratch(run *r)
{
  size_t most = 0;
  bool strips = false;
  add_needs(r, &most, &strips);
  return get_scratch(r, strips, most);
}

/* The only kernel that runs, or NULL: the device chooses, or there is nothing to multiply. */
static const esmm_cuda_kernel *alone(const run *r)
{
  const esmm_kernel *kernel = r->d.run != DEVICE_CHOOSES ? r->d.of[r->d.run].kernel : NULL;
  return kernel ? esmm_cuda_about(kernel) : NULL;
}

/* Counts and bitmaps of C are 0: kernels add to them. */
static esmm_status begin_tally(const run *r)
{
  const esmm_problem *p = r->p;
  const esmm_cuda_kernel *about = alone(r);
  const esmm_status status = p->bitmaps ? esmm_cuda_pattern_place(r->ctx, p->bitmaps) : ESMM_OK;
  if (status != ESMM_OK || (about && about->clears && about->clears(p)))
    return status;
  return esmm_cuda_tally_begin(r->ctx, p, r->stream);
}

static esmm_status end_tally(const run *r)
{
  return r->p->bitmaps ? esmm_cuda_pattern_placed(r->ctx, r->p->bitmaps, r->stream) : ESMM_OK;
}

/* ---- the gate's branch ---- */

/* Row-major in fp32, lines at multiples of 16 bytes. */
static int64_t factor_ld(const esmm_problem *p)
{
  return esmm_round_up(p->n, 4);
}

/* Room for `rows` of it, behind staged operands. */
static esmm_status reserve_factor(run *r, int64_t rows)
{
  size_t bytes;
  if (esmm_size_mul((size_t)factor_ld(r->p) * sizeof(float), (size_t)rows, &bytes) &&
      esmm_cuda_reserve(&r->st.bytes, bytes, SCRATCH_ALIGN, &r->st.factor_at))
    return ESMM_OK;
  return esmm_fail(r->ctx, ESMM_ERR_OVERFLOW, "the gate's branch is %lld x %lld: it does not fit in memory",
                   (long long)rows, (long long)r->p->n);
}

/* The branch; place_factor sets its memory and bias. */
static esmm_problem gate_problem(const esmm_problem *p, const esmm_gate *wanted, int64_t rows)
{
  esmm_problem g = esmm_gate_problem(p, wanted, rows, factor_ld(p));
  g.c.data = esmm_cuda_pointer(SCRATCH_ALIGN);
  g.c.place = ESMM_DEVICE;
  g.c.device = p->ctx->ordinal;
  return g;
}

/* Where it lies, once scratch is there: for the branch, and for the product that takes it as its factor. */
static void place_factor(const run *r, esmm_problem *branch, int64_t ld)
{
  branch->a = r->p->a;
  branch->bias = esmm_run_gate_bias(r);
  branch->c.data = esmm_cuda_pointer(r->scratch + r->st.factor_at);
  r->p->factor = branch->c.data;
  r->p->factor_ld = ld;
}

/* ---- products ---- */

/* No sum to make (k or alpha is 0): only the epilogue. The gate's branch is one row then, the same for all. */
static esmm_status finish_only(run *r, const esmm_gate *wanted, esmm_stats *s)
{
  esmm_problem *p = r->p;
  const bool gated = wanted->w && p->m > 0;
  esmm_problem branch = gate_problem(p, wanted, 1);
  esmm_status status = esmm_run_stage(r, false, wanted->bias);
  if (status == ESMM_OK && gated)
    status = reserve_factor(r, 1);
  if (status == ESMM_OK)
    status = get_scratch(r, false, 0);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, START);
  if (status == ESMM_OK)
    status = esmm_run_upload(r, true, &s->staged_bytes);
  p->alpha = branch.alpha = 1.0f; /* times a sum that is 0 */
  if (status == ESMM_OK && gated) {
    place_factor(r, &branch, 0);
    status = esmm_cuda_finish(r->ctx, &branch, NULL, r->stream);
  }
  if (status == ESMM_OK)
    status = begin_tally(r);
  if (status == ESMM_OK)
    status = esmm_cuda_finish(r->ctx, p, NULL, r->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_tally(r->ctx, p, (esmm_selector){0}, r->stream);
  if (status == ESMM_OK)
    status = end_tally(r);
  if (status == ESMM_OK)
    status = esmm_run_copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, END);
  return status == ESMM_OK && r->timed ? esmm_run_seconds_between(r, START, END, &s->seconds_total) : status;
}

/* A kernel that reports nothing leaves these zeros. */
static esmm_status clear_report(const run *r)
{
  return r->timed ? esmm_cuda_zero(r->ctx, note_at(r, offsetof(notes, report)), sizeof(esmm_choice_device), r->stream)
                  : ESMM_OK;
}

/* From the launch to the end, once operands are there. */
static esmm_status finish_product(run *r, const char *force, esmm_stats *s)
{
  esmm_status status = begin_tally(r);
  if (status == ESMM_OK)
    status = esmm_run_launch(r);
  if (status == ESMM_OK)
    status = end_tally(r);
  if (status == ESMM_OK)
    status = esmm_run_copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, END);
  return status == ESMM_OK && r->timed ? esmm_run_stats(r, force, s) : status;
}

/* What is decided, from its scratch on. */
static esmm_status multiply_decided(run *r, const char *force, esmm_stats *s)
{
  if (r->timed)
    r->stats[0] = r->stats[1] = *s;
  esmm_status status = get_product_scratch(r);
  if (status == ESMM_OK)
    status = clear_report(r);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, START);
  if (status == ESMM_OK)
    status = esmm_run_upload(r, true, &s->staged_bytes);
  r->p->gate.bias = esmm_run_gate_bias(r);
  return status == ESMM_OK ? finish_product(r, force, s) : status;
}

static esmm_status multiply(run *r, const char *force, esmm_stats *s)
{
  esmm_status status = esmm_run_stage(r, true, NULL);
  if (status == ESMM_OK)
    status = esmm_run_choose(r, force, true);
  return status == ESMM_OK ? multiply_decided(r, force, s) : status;
}

/* Chooses for both branches, and whether one launch makes both. Both have A as it is staged. */
static esmm_status choose_gated(run *r, run *gate, const esmm_gate *wanted, const char *force, bool counts)
{
  gate->p->a = r->p->a;
  esmm_status status = esmm_run_choose(r, force, counts);
  if (status == ESMM_OK)
    status = esmm_run_choose(gate, force, counts);
  if (status != ESMM_OK)
    return status;
  esmm_gate branch = *wanted;
  if (r->st.gate_bias_staged)
    branch.bias = esmm_cuda_pointer(SCRATCH_ALIGN);
  if (esmm_run_choose_whole(r, gate, &branch, force))
    r->p->gate = branch;
  return ESMM_OK;
}

/* One launch makes both; the gate's entry still gets A's densities: from that launch, where it reports. */
static esmm_status multiply_whole(run *r, run *gate, const char *force, esmm_stats *s)
{
  const bool reports = esmm_cuda_about(r->d.of[r->d.run].kernel)->reports && gate->report && gate->reports_itself;
  r->gate_report_at = reports ? gate->report_at : 0;
  const esmm_status status = multiply_decided(r, force, s);
  if (reports && status == ESMM_OK)
    esmm_run_expect_report(gate);
  if (reports)
    return status;
  gate->p->a = r->p->a;
  gate->scratch = r->scratch;
  esmm_run_let_sample(gate);
  return status == ESMM_OK ? esmm_run_report_ahead(gate) : status;
}

/* Both products have the same scratch, one after the other. gate: the branch's run; its marks are there. */
static esmm_status multiply_gated(run *r, run *gate, const esmm_gate *wanted, const char *force, esmm_stats *s)
{
  size_t most = 0;
  bool strips = false;
  esmm_stats of_gate = *s;
  esmm_status status = esmm_run_stage(r, true, wanted->bias);
  if (status == ESMM_OK)
    status = choose_gated(r, gate, wanted, force, true);
  if (status == ESMM_OK && r->d.whole)
    return multiply_whole(r, gate, force, s);
  if (status == ESMM_OK)
    status = reserve_factor(r, r->p->m);
  if (status != ESMM_OK)
    return status;
  s->flop_dense = of_gate.flop_dense = s->flop_dense / 2.0; /* each has a half */
  of_gate.strip_density_b = wanted->w->strip_density;
  r->stats[0] = r->stats[1] = *s;
  gate->stats[0] = gate->stats[1] = of_gate;
  add_needs(r, &most, &strips);
  add_needs(gate, &most, &strips);
  status = get_scratch(r, strips, most);
  if (status != ESMM_OK)
    return status;
  gate->st = r->st;
  gate->st.c_staged = false; /* its C is the factor */
  gate->scratch = r->scratch;
  status = clear_report(gate);
  if (status == ESMM_OK)
    status = esmm_run_mark(gate, START);
  if (status == ESMM_OK)
    status = esmm_run_upload(r, true, &s->staged_bytes);
  if (status != ESMM_OK)
    return status;
  place_factor(r, gate->p, factor_ld(r->p));
  status = finish_product(gate, force, &of_gate);
  if (status == ESMM_OK)
    status = clear_report(r);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, START);
  if (status == ESMM_OK)
    status = finish_product(r, force, s);
  s->seconds_plan += of_gate.seconds_plan;
  s->seconds_extract += of_gate.seconds_extract;
  s->seconds_multiply += of_gate.seconds_multiply;
  s->seconds_total += of_gate.seconds_total;
  s->flop_useful += of_gate.flop_useful;
  s->flop_dense *= 2.0;
  return status;
}

/* What waits cannot be part of a graph: refused before anything is captured. */
static esmm_status check_capture(esmm_ctx *ctx, const esmm_problem *p, bool want_stats)
{
  if (!esmm_cuda_capturing(ctx))
    return ESMM_OK;
  if (want_stats)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "stats wait for the GPU, so they cannot be taken while the stream is captured");
  if (p->bitmaps)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "opts->c_pattern is new memory, which cannot be had while the stream is captured");
  const bool residual = p->residual.data && p->residual.place == ESMM_HOST;
  if (p->a.place == ESMM_HOST || p->c.place == ESMM_HOST || residual)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "%s lies in host memory: while the stream is captured, operands must be on the GPU",
                     p->a.place == ESMM_HOST   ? "a"
                     : p->c.place == ESMM_HOST ? "c"
                                               : "opts->residual");
  return ESMM_OK;
}

esmm_status esmm_cuda_multiply(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s)
{
  const esmm_gate wanted = p->gate;
  run r = {.ctx = ctx, .p = p, .stream = ctx->stream, .timed = want_stats};
  esmm_problem branch = gate_problem(p, &wanted, p->m);
  run gate = {.ctx = ctx, .p = &branch, .stream = ctx->stream, .timed = want_stats, .branch = true};
  esmm_status status = esmm_cuda_begin(ctx, r.stream);
  p->gate.w = NULL; /* until one launch is decided on */
  if (status != ESMM_OK)
    return status;
  status = check_capture(ctx, p, want_stats);
  if (status == ESMM_OK)
    status = esmm_run_make_marks(&r);
  if (status == ESMM_OK && wanted.w)
    status = esmm_run_make_marks(&gate);
  if (status == ESMM_OK)
    status = wanted.w ? multiply_gated(&r, &gate, &wanted, force, s) : multiply(&r, force, s);
  status = esmm_cuda_end(ctx, r.stream, status);
  esmm_run_free_marks(&r);
  esmm_run_free_marks(&gate);
  return status;
}

esmm_status esmm_cuda_multiply_nothing(esmm_ctx *ctx, esmm_problem *p, bool want_stats, esmm_stats *s)
{
  const esmm_gate wanted = p->gate;
  run r = {.ctx = ctx, .p = p, .stream = ctx->stream, .timed = want_stats};
  esmm_status status = esmm_cuda_begin(ctx, r.stream);
  p->gate.w = NULL;
  if (status != ESMM_OK)
    return status;
  status = check_capture(ctx, p, want_stats);
  if (status == ESMM_OK)
    status = esmm_run_make_marks(&r);
  if (status == ESMM_OK)
    status = finish_only(&r, &wanted, s);
  status = esmm_cuda_end(ctx, r.stream, status);
  esmm_run_free_marks(&r);
  return status;
}

/* ---- explaining: this waits ---- */

/* A's densities at strips of 32 rows and, where B has tiles, of 128, into p->sample, and what they say of strips of 8.
 */
static esmm_status sample_heights(run *r)
{
  const CUdeviceptr at = note_at(r, offsetof(notes, choice));
  const bool tiles = esmm_cuda_b(r->p)->tiles != 0;
  esmm_status status = ESMM_OK;
  for (int strip128 = 0; status == ESMM_OK && strip128 <= tiles; strip128++) {
    esmm_choice_device seen = {0};
    status = esmm_run_sample(r->ctx, r->p, &r->d, strip128, at, r->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(r->ctx, &seen, at, sizeof seen, r->stream);
    r->p->sample.element = (double)seen.element;
    r->p->sample.overflow = seen.counted ? (double)seen.overflow : 1.0;
    r->p->sample.strip[strip128 ? 7 : 5] = (double)seen.strip;
    r->p->sample.joint[strip128 ? 7 : 5] = (double)seen.joint;
    r->p->sample.strip[STRIP8_LEVEL] =
        esmm_run_strip8_density((double)seen.element, (double)seen.strip, strip_rows(strip128), 1 << STRIP8_LEVEL);
    r->p->sample.joint[STRIP8_LEVEL] = r->p->sample.strip[STRIP8_LEVEL];
  }
  return status;
}

/* Chooses as a product would, and lets the device choose where it would. Between begin and end. gate: the run of the
   branch, where one is wanted. */
static esmm_status look(run *r, run *gate, const esmm_gate *wanted, const char *force, esmm_choice_device *choice)
{
  size_t moved = 0;
  esmm_status status = esmm_cuda_refuse_capture(r->ctx, "esmm_explain");
  if (status == ESMM_OK)
    status = esmm_run_stage(r, true, wanted->bias);
  if (status == ESMM_OK)
    status = wanted->w ? choose_gated(r, gate, wanted, force, false) : esmm_run_choose(r, force, false);
  if (status == ESMM_OK)
    status = get_product_scratch(r);
  if (status == ESMM_OK)
    status = esmm_run_upload(r, false, &moved);
  if (status == ESMM_OK)
    status = sample_heights(r);
  const CUdeviceptr at = note_at(r, offsetof(notes, report));
  if (status == ESMM_OK)
    status = esmm_cuda_zero(r->ctx, at, sizeof *choice, r->stream);
  if (status == ESMM_OK)
    status = esmm_run_look(r, at);
  return status == ESMM_OK ? esmm_cuda_to_host(r->ctx, choice, at, sizeof *choice, r->stream) : status;
}

esmm_status esmm_cuda_explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen)
{
  const esmm_gate wanted = p->gate;
  run r = {.ctx = ctx, .p = p, .stream = ctx->stream};
  esmm_problem branch = gate_problem(p, &wanted, p->m);
  run gate = {.ctx = ctx, .p = &branch, .stream = ctx->stream};
  esmm_choice_device choice = {0};
  esmm_status status = esmm_cuda_begin(ctx, r.stream);
  if (status != ESMM_OK)
    return status;
  p->gate.w = NULL;
  status = esmm_cuda_end(ctx, r.stream, look(&r, &gate, &wanted, force, &choice));
  p->gate.w = NULL; /* the seconds of all kernels are of the branch with the weights */
  if (r.d.memory == MEMORY_KNOWN && r.seen)
    esmm_run_note_class(&r);
  if (status == ESMM_OK)
    status = esmm_plan_sampled(ctx, p, force, true, choices, chosen);
  if (status != ESMM_OK)
    return status;
  const which one = r.d.run != DEVICE_CHOOSES ? r.d.run : choice.chosen ? RUN_SKIP : RUN_DENSE;
  const candidate *c = &r.d.of[one];
  if (*chosen != c->index) /* the host named its candidates before it knew A */
    (void)snprintf(choices[*chosen].text, sizeof choices[*chosen].text,
                   r.d.whole                    ? "cheaper for one product, but another kernel makes both in one launch"
                   : r.d.memory == MEMORY_KNOWN ? "cheaper for this A, but not at the remembered density"
                                                : "cheaper for this A, but not a candidate for the GPU's choice");
  *chosen = c->index;
  esmm_run_reason(&r, force, one, &choice, choices[c->index].text, sizeof choices[c->index].text);
  return ESMM_OK;
}
