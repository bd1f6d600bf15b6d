/*
 * matmul.c: the way of a product through the GPU: stage (stage.c), choose (plan.c), launch (launch.c), copy back, count
 * (stats.c). And the same without the product, for explain.
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

/* For the kernels that the decision launches. */
static esmm_status get_product_scratch(run *r)
{
  const decision *d = &r->d;
  const bool both = d->run == DEVICE_CHOOSES;
  size_t most = 0;
  bool strips = false;
  for (int i = RUN_DENSE; i <= RUN_SKIP; i++) {
    if (!both && (int)d->run != i)
      continue;
    const size_t bytes = d->of[i].kernel ? d->of[i].work : 0;
    most = bytes > most ? bytes : most;
    strips = strips || wants_strips(r->p, d->of[i].kernel);
  }
  return get_scratch(r, strips, most);
}

/* No sum to make (k or alpha is 0): only the epilogue. */
static esmm_status finish_only(run *r, esmm_stats *s)
{
  esmm_problem *p = r->p;
  esmm_status status = esmm_run_stage(r->ctx, p, false, &r->st);
  if (status == ESMM_OK)
    status = get_scratch(r, false, 0);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, START);
  if (status == ESMM_OK)
    status = esmm_run_upload(r->ctx, &r->st, p->beta != 0.0f, r->scratch, p, r->stream, &s->staged_bytes);
  p->alpha = 1.0f; /* times a sum that is 0 */
  if (status == ESMM_OK)
    status = esmm_cuda_finish(r->ctx, p, r->stream);
  if (status == ESMM_OK)
    status = esmm_run_copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, END);
  return status == ESMM_OK && r->timed ? esmm_run_seconds_between(r, START, END, &s->seconds_total) : status;
}

static esmm_status multiply(run *r, const char *force, esmm_stats *s)
{
  esmm_problem *p = r->p;
  esmm_status status = esmm_run_stage(r->ctx, p, true, &r->st);
  if (status == ESMM_OK)
    status = esmm_run_choose(r, force, true);
  if (status != ESMM_OK)
    return status;
  if (r->timed)
    r->stats[0] = r->stats[1] = *s;
  status = get_product_scratch(r);
  if (status == ESMM_OK && r->timed) /* who has nothing to report leaves this */
    status = esmm_cuda_zero(r->ctx, note_at(r, offsetof(notes, report)), sizeof(esmm_choice_device), r->stream);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, START);
  if (status == ESMM_OK)
    status = esmm_run_upload(r->ctx, &r->st, p->beta != 0.0f, r->scratch, p, r->stream, &s->staged_bytes);
  if (status == ESMM_OK)
    status = esmm_run_launch(r);
  if (status == ESMM_OK)
    status = esmm_run_copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, END);
  return status == ESMM_OK && r->timed ? esmm_run_stats(r, force, s) : status;
}

/* What would wait cannot be part of a graph: said before anything is captured. */
static esmm_status check_capture(esmm_ctx *ctx, const esmm_problem *p, bool want_stats)
{
  if (!esmm_cuda_capturing(ctx))
    return ESMM_OK;
  if (want_stats)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "stats wait for the GPU, so they cannot be taken while the stream is captured");
  if (p->a.place == ESMM_HOST || p->c.place == ESMM_HOST)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "%s lies in host memory: while the stream is captured, operands must be on the GPU",
                     p->a.place == ESMM_HOST ? "a" : "c");
  return ESMM_OK;
}

esmm_status esmm_cuda_check_epilogue(esmm_ctx *ctx, const esmm_matmul_opts *o)
{
  const char *activation = NULL;
  switch (o->activation) {
  case ESMM_ACT_NONE:
  case ESMM_ACT_RELU:
  case ESMM_ACT_RELU2:
    break;
  case ESMM_ACT_GELU:
    activation = "opts->activation is GELU";
    break;
  case ESMM_ACT_GELU_TANH:
    activation = "opts->activation is GELU_TANH";
    break;
  case ESMM_ACT_SILU:
    activation = "opts->activation is SILU";
    break;
  }
  const char *what = o->residual          ? "opts->residual is set"
                     : o->gate            ? "opts->gate is set"
                     : o->column_nonzeros ? "opts->column_nonzeros is set"
                     : o->c_pattern       ? "opts->c_pattern is set"
                                          : activation;
  if (!what)
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                   "%s, which only a CPU has so far: do that step on C yourself, or make this product "
                   "in a CPU context",
                   what);
}

esmm_status esmm_cuda_multiply(esmm_ctx *ctx, esmm_problem *p, const esmm_matmul_opts *o, const char *force,
                               bool want_stats, esmm_stats *s)
{
  (void)o; /* what it has beside p was refused */
  run r = {.ctx = ctx, .p = p, .stream = ctx->stream, .timed = want_stats};
  esmm_status status = esmm_cuda_begin(ctx, r.stream);
  if (status != ESMM_OK)
    return status;
  status = check_capture(ctx, p, want_stats);
  if (status == ESMM_OK)
    status = esmm_run_make_marks(&r);
  if (status == ESMM_OK)
    status = p->k == 0 || p->alpha == 0.0f ? finish_only(&r, s) : multiply(&r, force, s);
  status = esmm_cuda_end(ctx, r.stream, status);
  esmm_run_free_marks(&r);
  return status;
}

/* ---- explaining: this waits ---- */

/* A's densities at strips of 32 rows and, where B has tiles, of 128, into p->sample. */
static esmm_status sample_heights(run *r)
{
  const CUdeviceptr at = note_at(r, offsetof(notes, choice));
  const bool tiles = esmm_cuda_b(r->p)->tiles != 0;
  esmm_status status = ESMM_OK;
  for (int tall = 0; status == ESMM_OK && tall <= tiles; tall++) {
    esmm_choice_device seen = {0};
    status = esmm_run_sample(r->ctx, r->p, &r->d, tall, at, r->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(r->ctx, &seen, at, sizeof seen, r->stream);
    r->p->sample.element = (double)seen.element;
    r->p->sample.strip[tall ? 7 : 5] = (double)seen.strip;
    r->p->sample.joint[tall ? 7 : 5] = (double)seen.joint;
  }
  return status;
}

/* Chooses as a product would, and lets the device choose where it would. Between begin and end. */
static esmm_status look(run *r, const char *force, esmm_choice_device *choice)
{
  size_t moved = 0;
  esmm_status status = esmm_cuda_refuse_capture(r->ctx, "esmm_explain");
  if (status == ESMM_OK)
    status = esmm_run_stage(r->ctx, r->p, true, &r->st);
  if (status == ESMM_OK)
    status = esmm_run_choose(r, force, false);
  if (status == ESMM_OK)
    status = get_product_scratch(r);
  if (status == ESMM_OK)
    status = esmm_run_upload(r->ctx, &r->st, false, r->scratch, r->p, r->stream, &moved);
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
  run r = {.ctx = ctx, .p = p, .stream = ctx->stream};
  esmm_choice_device choice = {0};
  esmm_status status = esmm_cuda_begin(ctx, r.stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_end(ctx, r.stream, look(&r, force, &choice));
  if (status == ESMM_OK)
    status = esmm_plan_sampled(ctx, p, force, choices, chosen);
  if (status != ESMM_OK)
    return status;
  const which one = r.d.run != DEVICE_CHOOSES ? r.d.run : choice.chosen ? RUN_SKIP : RUN_DENSE;
  const candidate *c = &r.d.of[one];
  if (*chosen != c->index) /* the host named its candidates before it knew A */
    (void)snprintf(choices[*chosen].text, sizeof choices[*chosen].text,
                   r.d.memory == MEMORY_KNOWN
                       ? "cheaper for this A, but not for what is remembered"
                       : "cheaper for this A, but not among the kernels that the GPU could choose from");
  *chosen = c->index;
  esmm_run_reason(&r, force, one, &choice, choices[c->index].text, sizeof choices[c->index].text);
  return ESMM_OK;
}
