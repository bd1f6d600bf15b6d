/* turns.c: esmm_tune_weights: a product's kernels in turns, each timed as calls always are. */
#include "backend.h"
#include "choose/choose.h"
#include "esmm_tools.h"

#include <string.h>

enum { WARM = 18, TURNS = 64, BATCH = 16, AHEAD = 2 };

static esmm_status check(esmm_ctx *ctx, const esmm_matrix *a, const esmm_matrix *c, const esmm_matmul_opts *o)
{
  const char *force = o->force ? o->force : ctx->force;
  if (!ctx->learns)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "this context does not learn: it was made with deterministic = 1, or remember = -1, or the "
                     "environment says so");
  if (*force && strcmp(force, "auto") != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "force names %.40s: there is nothing to choose from", force);
  if (o->beta && *o->beta != 0.0f)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->beta is %g: the product is made many times, and c must not add up",
                     (double)*o->beta);
  if (o->column_nonzeros || o->c_pattern)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->%s: leave statistics of c out, the product is made many times",
                     o->column_nonzeros ? "column_nonzeros" : "c_pattern");
  if (o->residual && c && c->data && o->residual->data == c->data)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                     "opts->residual is c: the product is made many times, and c must not add up");
  const bool host = (a && a->place == ESMM_HOST) || (c && c->place == ESMM_HOST);
  if (ctx->backend->memory && (o->gate || o->strict || host))
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s: such products are not timed on a %s",
                     o->gate     ? "opts->gate is set"
                     : o->strict ? "opts->strict is set"
                                 : "a or c lies in host memory",
                     ctx->backend->kind);
  return ESMM_OK;
}

static esmm_status calls(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                         const esmm_matmul_opts *o, int first, int count)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; i < count && status == ESMM_OK; i++) {
    ctx->turn = first > 0 ? first + i : 0;
    status = esmm_matmul(ctx, a, w, c, o, NULL);
  }
  ctx->turn = 0;
  return status;
}

/* A GPU's call is timed behind others: each batch begins with untimed ones. */
static esmm_status batch(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                         const esmm_matmul_opts *o, int first)
{
  esmm_status status = calls(ctx, a, w, c, o, 0, AHEAD);
  if (status == ESMM_OK)
    status = calls(ctx, a, w, c, o, first, BATCH);
  return status == ESMM_OK ? ctx->backend->synchronize(ctx) : status;
}

/* The first calls measure A's density, and load what they need. */
esmm_status esmm_tune_weights(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                              const esmm_matmul_opts *opts)
{
  esmm_matmul_opts o = {.size = sizeof o};
  int kernels = 0;
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK && o.c_pattern)
    *o.c_pattern = NULL;
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (status == ESMM_OK)
    status = check(ctx, a, c, &o);
  if (status == ESMM_OK) /* the other arguments, and whether the stream is captured: before anything is launched */
    status = esmm_explain(ctx, a, weights, c, &o, NULL, 0, &kernels);
  if (status == ESMM_OK && kernels == 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "there is nothing to multiply: c is empty, or k or alpha is 0");
  if (status == ESMM_OK)
    status = calls(ctx, a, weights, c, &o, 0, WARM);
  if (status == ESMM_OK)
    status = ctx->backend->synchronize(ctx);
  for (int first = 1; first <= TURNS && status == ESMM_OK; first += BATCH)
    status = batch(ctx, a, weights, c, &o, first);
  return status == ESMM_OK ? calls(ctx, a, weights, c, &o, 0, 1) : status; /* takes the last times */
}
