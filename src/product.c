/* product.c: esmm_matmul and esmm_explain: the checks of a product's arguments; the context's backend does the rest. */
#include "backend.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define C_STRIP_ROWS 8 /* c_strip_rows, unless given */

/* ---- checks ---- */

/* A row of n elements of four bytes beside C, to be compared with matrices: only its address is looked at. */
static esmm_matrix vector_of(const void *data, int64_t n, const esmm_matrix *c)
{
  esmm_matrix vector = {.rows = 1, .cols = n, .ld = n, .place = c->place};
  memcpy(&vector.data, &data, sizeof vector.data);
  return vector;
}

/* No operand that is read may overlap one that is written. */
static esmm_status check_apart(esmm_ctx *ctx, const char *written, const esmm_matrix *to, const char *read,
                               const esmm_matrix *from)
{
  if (!from->data || !esmm_overlap(from, to))
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_OVERLAP, "%s (%p) shares memory with %s (%p)", written, to->data, read, from->data);
}

static esmm_status check_residual(esmm_ctx *ctx, const esmm_matmul_opts *o, esmm_problem *p)
{
  if (!o->residual)
    return ESMM_OK;
  esmm_matrix *r = &p->residual;
  const esmm_matrix *c = &p->c;
  const esmm_status status = esmm_check_matrix(ctx, "opts->residual", o->residual, r);
  if (status != ESMM_OK)
    return status;
  if (r->rows != c->rows || r->cols != c->cols)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "opts->residual is %lld x %lld, c is %lld x %lld", (long long)r->rows,
                     (long long)r->cols, (long long)c->rows, (long long)c->cols);
  if (r->data == c->data && r->ld == c->ld && r->dtype == c->dtype && r->order == c->order && r->place == c->place)
    return ESMM_OK;
  return check_apart(ctx, "c", c, "opts->residual", r);
}

static esmm_status check_gate(esmm_ctx *ctx, const esmm_matmul_opts *o, const esmm_problem *p)
{
  const esmm_weights *gate = o->gate;
  if (!gate)
    return !o->gate_bias ? ESMM_OK
                         : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->gate_bias is set, but opts->gate is NULL");
  const esmm_status status = esmm_check_weights(ctx, "opts->gate", gate);
  if (status != ESMM_OK)
    return status;
  if (gate->k != p->k || gate->n != p->n)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "opts->gate is %lld x %lld, the weights are %lld x %lld", (long long)gate->k,
                     (long long)gate->n, (long long)p->k, (long long)p->n);
  const esmm_matrix bias = vector_of(o->gate_bias, p->n, &p->c);
  return check_apart(ctx, "c", &p->c, "opts->gate_bias", &bias);
}

static esmm_status check_statistics(esmm_ctx *ctx, const esmm_matmul_opts *o, const esmm_problem *p)
{
  if (o->c_strip_rows < 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->c_strip_rows is %lld; it must be positive, or 0 for %d",
                     (long long)o->c_strip_rows, C_STRIP_ROWS);
  if (o->reserved != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->reserved, once c_packed, is %d; it must be 0", o->reserved);
  if (!o->column_nonzeros)
    return ESMM_OK;
  if (p->m > INT32_MAX)
    return esmm_fail(
        ctx, ESMM_ERR_OVERFLOW,
        "c has %lld rows, more than opts->column_nonzeros can count in 31 bits: multiply fewer rows at once",
        (long long)p->m);
  const esmm_matrix counts = vector_of(o->column_nonzeros, p->n, &p->c);
  if ((uintptr_t)counts.data % sizeof(int32_t) != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->column_nonzeros is %p, not aligned to its 4-byte elements",
                     counts.data);
  const esmm_matrix bias = vector_of(o->bias, p->n, &p->c), gate_bias = vector_of(o->gate_bias, p->n, &p->c);
  const struct {
    const char *name;
    const esmm_matrix *matrix;
  } others[] = {{"c", &p->c},
                {"a", &p->a},
                {"opts->residual", &p->residual},
                {"opts->bias", &bias},
                {"opts->gate_bias", &gate_bias}};
  esmm_status status = ESMM_OK;
  for (size_t i = 0; status == ESMM_OK && i < sizeof others / sizeof *others; i++)
    status = check_apart(ctx, "opts->column_nonzeros", &counts, others[i].name, others[i].matrix);
  return status;
}

static esmm_status check_epilogue(esmm_ctx *ctx, const esmm_matmul_opts *o, esmm_problem *p)
{
  const esmm_matrix bias = vector_of(o->bias, p->n, &p->c);
  if ((int)o->activation < ESMM_ACT_NONE || (int)o->activation > ESMM_ACT_SILU)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->activation is %d, which is no esmm_activation", (int)o->activation);
  esmm_status status = check_apart(ctx, "c", &p->c, "opts->bias", &bias);
  if (status == ESMM_OK)
    status = ctx->backend->check_epilogue ? ctx->backend->check_epilogue(ctx, o) : ESMM_OK;
  if (status == ESMM_OK)
    status = check_residual(ctx, o, p);
  if (status == ESMM_OK)
    status = check_gate(ctx, o, p);
  return status == ESMM_OK ? check_statistics(ctx, o, p) : status;
}

/* The product with the weights; where there is a gate its branch is still to be made. o: the caller's, with defaults.
 */
static esmm_status make_problem(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, const esmm_matrix *c,
                                const esmm_matmul_opts *o, esmm_problem *p)
{
  memset(p, 0, sizeof *p);
  p->ctx = ctx;
  esmm_status status = esmm_check_matrix(ctx, "a", a, &p->a);
  if (status == ESMM_OK)
    status = esmm_check_weights(ctx, "weights", w);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "c", c, &p->c);
  if (status != ESMM_OK)
    return status;
  if (a->cols != w->k)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "a is %lld x %lld, but the weights are %lld x %lld: k does not agree",
                     (long long)a->rows, (long long)a->cols, (long long)w->k, (long long)w->n);
  if (c->rows != a->rows || c->cols != w->n)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "c is %lld x %lld; a times the weights is %lld x %lld", (long long)c->rows,
                     (long long)c->cols, (long long)a->rows, (long long)w->n);
  if (o->a_pattern && (o->a_pattern->rows != a->rows || o->a_pattern->k != a->cols))
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "opts->a_pattern is of a %lld x %lld matrix, a is %lld x %lld",
                     (long long)o->a_pattern->rows, (long long)o->a_pattern->k, (long long)a->rows, (long long)a->cols);
  status = o->a_pattern ? esmm_check_pattern(ctx, "opts->a_pattern", o->a_pattern) : ESMM_OK;
  if (status != ESMM_OK)
    return status;
  p->m = a->rows;
  p->n = w->n;
  p->k = w->k;
  p->w = w;
  status = check_apart(ctx, "c", &p->c, "a", &p->a);
  if (status == ESMM_OK)
    status = check_epilogue(ctx, o, p);
  if (status != ESMM_OK)
    return status;
  p->alpha = o->alpha ? *o->alpha : 1.0f;
  p->beta = o->beta ? *o->beta : 0.0f;
  p->bias = o->bias;
  p->activation = o->gate ? ESMM_ACT_NONE : o->activation;
  p->gated = o->gate != NULL;
  p->gate = (esmm_gate){o->gate, o->gate_bias, o->activation};
  p->nonzeros = o->column_nonzeros;
  p->strict = o->strict != 0;
  p->pattern = p->strict ? NULL : o->a_pattern;
  return ESMM_OK;
}

esmm_problem esmm_gate_problem(const esmm_problem *p, const esmm_gate *gate, int64_t m, int64_t ld)
{
  esmm_problem g = *p;
  g.w = gate->w;
  g.gate.w = NULL;
  g.m = m;
  g.c = (esmm_matrix){.rows = m, .cols = p->n, .ld = ld};
  g.beta = 0.0f;
  g.bias = gate->bias;
  g.activation = gate->activation;
  g.gated = false;
  g.factor = NULL;
  g.residual.data = NULL;
  g.nonzeros = NULL;
  g.bitmaps = NULL;
  return g;
}

static const char *forced(const esmm_ctx *ctx, const esmm_matmul_opts *o)
{
  const char *force = o->force ? o->force : ctx->force;
  return !*force || strcmp(force, "auto") == 0 ? NULL : force;
}

static esmm_status unknown_kernel(esmm_ctx *ctx, const char *force)
{
  return esmm_fail(ctx, ESMM_ERR_UNKNOWN_KERNEL, "force is '%.60s', which is no kernel; `esmm list` names them", force);
}

/* ---- the interface ---- */

static int64_t strip_rows_of(const esmm_matmul_opts *o)
{
  return o->c_strip_rows ? o->c_strip_rows : C_STRIP_ROWS;
}

/* Empty bitmaps for C. */
static esmm_status make_bitmaps(esmm_ctx *ctx, const esmm_matmul_opts *o, esmm_problem *p)
{
  const int64_t height = strip_rows_of(o);
  if (ctx->backend->pattern_bits)
    return esmm_pattern_shell(ctx, p->m, p->n, height, &p->bitmaps);
  const esmm_status status = esmm_pattern_alloc(ctx, p->m, p->n, height, &p->bitmaps);
  if (status == ESMM_OK)
    memset(p->bitmaps->bits, 0, (size_t)(p->bitmaps->strips * p->bitmaps->words) * sizeof *p->bitmaps->bits);
  return status;
}

/* Runs a product that was checked, with a kernel where there is anything to multiply. */
static esmm_status run(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s)
{
  const bool empty = p->m == 0 || p->n == 0, nothing = p->k == 0 || p->alpha == 0.0f;
  esmm_status status = ESMM_OK;
  if (!empty && !nothing) {
    status = ctx->backend->multiply(ctx, p, force, want_stats, s);
    s->skipped_share = 1.0 - s->flop_useful / s->flop_dense;
    return status;
  }
  (void)snprintf(s->kernel, sizeof s->kernel, "none");
  if (empty) {
    (void)snprintf(s->reason, sizeof s->reason, "c is empty");
    if (!p->nonzeros || p->n == 0)
      return ESMM_OK;
    if (p->c.place == ESMM_DEVICE)
      return ctx->backend->finish(ctx, p, want_stats, s);
    memset(p->nonzeros, 0, (size_t)p->n * sizeof *p->nonzeros);
    return ESMM_OK;
  }
  (void)snprintf(s->reason, sizeof s->reason, "%s is 0: only the epilogue", p->k == 0 ? "k" : "alpha");
  s->skipped_share = 1.0;
  return ctx->backend->finish(ctx, p, want_stats, s);
}

esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                        const esmm_matmul_opts *opts, esmm_stats *stats)
{
  esmm_problem p;
  esmm_matmul_opts o = {.size = sizeof o};
  esmm_stats s = {.size = sizeof s};
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK && o.c_pattern)
    *o.c_pattern = NULL;
  if (status != ESMM_OK || !ctx)
    return ESMM_ERR_ARGUMENT;
  if (stats && !esmm_struct_size(stats->size, sizeof s))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "stats->size is %zu; set it to sizeof *stats, %zu in this version",
                     stats->size, sizeof s);
  status = make_problem(ctx, a, weights, c, &o, &p);
  if (status != ESMM_OK)
    return status;
  const char *force = forced(ctx, &o);
  s.threads = ctx->backend->threads;
  s.strip_cols = ESMM_PANEL;
  s.strip_density_b = weights->strip_density;
  s.weights_bytes = weights->bytes;
  s.flop_dense = (o.gate ? 4.0 : 2.0) * (double)p.m * (double)p.n * (double)p.k;
  if (force && !esmm_force_known(force))
    return unknown_kernel(ctx, force);
  if (o.c_pattern)
    status = make_bitmaps(ctx, &o, &p);
  if (status == ESMM_OK)
    status = run(ctx, &p, force, stats != NULL, &s);
  if (status != ESMM_OK) {
    esmm_pattern_free(p.bitmaps);
    return status;
  }
  if (o.c_pattern) {
    if (p.bitmaps->bits)
      esmm_pattern_count(p.bitmaps);
    *o.c_pattern = p.bitmaps;
  }
  if (stats) {
    s.size = stats->size;
    memcpy(stats, &s, stats->size);
  }
  return ESMM_OK;
}

static int verdict_order(const esmm_verdict *x, const esmm_verdict *y)
{
  if (x->can_run != y->can_run)
    return y->can_run - x->can_run;
  if (x->competes != y->competes)
    return y->competes - x->competes;
  return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
}

esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, const esmm_matrix *c,
                         const esmm_matmul_opts *opts, esmm_verdict *verdicts, size_t verdict_size, int *count)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!count)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "count is NULL");
  if (*count < 0 || (*count > 0 && !verdicts))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "count is %d with verdicts %s", *count, verdicts ? "set" : "NULL");
  esmm_problem p;
  esmm_matmul_opts o = {.size = sizeof o};
  esmm_choice choices[ESMM_MAX_KERNELS];
  esmm_verdict all[ESMM_MAX_KERNELS];
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK)
    status = make_problem(ctx, a, weights, c, &o, &p);
  if (status != ESMM_OK)
    return status;
  const char *force = forced(ctx, &o);
  const int total = esmm_registry_count();
  if (*count > 0 && !esmm_struct_size(verdict_size, sizeof *verdicts))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "verdict_size is %zu; pass sizeof *verdicts, %zu in this version",
                     verdict_size, sizeof *verdicts);
  if (force && !esmm_force_known(force))
    return unknown_kernel(ctx, force);
  if (p.m == 0 || p.n == 0 || p.k == 0 || p.alpha == 0.0f) {
    *count = 0;
    return ESMM_OK;
  }
  int chosen;
  esmm_pattern wanted = {.rows = p.m, .k = p.n, .strip_rows = strip_rows_of(&o)}; /* kernels may ask if there is one */
  p.bitmaps = o.c_pattern ? &wanted : NULL;
  status = ctx->backend->explain(ctx, &p, force, choices, &chosen);
  if (status != ESMM_OK)
    return status;
  for (int i = 0; i < total; i++) {
    esmm_verdict v = {.kernel = choices[i].kernel->name,
                      .flags = choices[i].kernel->flags,
                      .can_run = choices[i].can_run,
                      .competes = choices[i].can_run && choices[i].competes,
                      .chosen = i == chosen,
                      .seconds = choices[i].seconds};
    (void)snprintf(v.text, sizeof v.text, "%s", choices[i].text);
    int at = i;
    for (; at > 0 && verdict_order(&v, &all[at - 1]) < 0; at--)
      all[at] = all[at - 1];
    all[at] = v;
  }
  for (int i = 0; i < total && i < *count; i++)
    memcpy((char *)verdicts + (size_t)i * verdict_size, &all[i], verdict_size);
  *count = total;
  return ESMM_OK;
}
