/*
 * backward.c: gradients. With dpre the gradient before the activation, and prime for transposed:
 *
 *     dt   = dy restore'                      [T, d_out]    (dy itself with full rank)
 *     dh   = dt contract'                     [T, features] only where dpre will need it
 *     dpre = dh * act'(.)                     and for a gate: dh * act(gate), dh * up * act'(gate)
 *     dcontract = h' dt,  dexpand = in' dpre  sums over tokens
 *     ds   = dpre expand'                     sum over features
 *     dreduce = x' ds,    dx = ds reduce'     (dx = ds with full rank)
 *
 * Skipping. h and dpre are A in all their products (h' and dpre' as column-major views, dexpand as its transpose, dpre'
 * in), so that the joint and row kernels skip their zeros. dh has no zeros to skip, but most of it is not needed.
 * Features that are dead for all tokens are left out everywhere (compaction: weights' rows are gathered, gradients'
 * rows scattered), and where few elements are alive each is a separate dot product (masked.h).
 *
 * dh as contract dt', stored transposed: the prepared operand is then dt, which is small, and the weights are read as
 * they lie.
 */
#include "ffn.h"

typedef struct pass {
  esmm_ctx *ctx;
  const esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  esmm_ffn_grads g;
  esmm_matrix dy, dt;
  esmm_matrix h; /* [tokens, features] */
  esmm_matrix dpre[FFN_BRANCHES];
  int64_t tokens, features; /* features worked on: all, or the alive ones */
  int64_t count;            /* of them alive: the others are zero, and pad to a round number */
  const int32_t *order;     /* which they are; NULL: all */
  const int32_t *places;    /* the other way round */
  esmm_dtype between;       /* of gradients between products */
} pass;

/* The caller's gradient matrices, checked. */
typedef struct outputs {
  esmm_matrix x, reduce[FFN_BRANCHES], expand[FFN_BRANCHES], contract, restore;
} outputs;

/* ---- checks ---- */

typedef struct wanted {
  const char *name;
  const esmm_matrix *given;
  bool allowed;
  int64_t rows, cols;
  esmm_matrix *out;
} wanted;

static esmm_status check_apart(esmm_ctx *ctx, const wanted *w, size_t count, const esmm_ffn *ffn, const esmm_matrix *dy,
                               const esmm_matrix *x)
{
  const ffn_params *p = &ffn->params;
  const esmm_matrix *read[] = {dy,
                               x,
                               &p->in[FFN_UP].reduce.matrix,
                               &p->in[FFN_UP].expand.matrix,
                               &p->in[FFN_GATE].reduce.matrix,
                               &p->in[FFN_GATE].expand.matrix,
                               &p->contract.matrix,
                               &p->restore.matrix};
  for (size_t i = 0; i < count; i++) {
    for (size_t j = 0; j < sizeof read / sizeof *read && w[i].given; j++)
      if (esmm_overlap(w[i].out, read[j]))
        return esmm_fail(ctx, ESMM_ERR_OVERLAP, "%s (%p) shares memory with x, dy or the weights", w[i].name,
                         w[i].out->data);
    for (size_t j = 0; j < i && w[i].given; j++)
      if (w[j].given && esmm_overlap(w[i].out, w[j].out))
        return esmm_fail(ctx, ESMM_ERR_OVERLAP, "%s (%p) shares memory with %s", w[i].name, w[i].out->data, w[j].name);
  }
  return ESMM_OK;
}

/* It lies where matrices do. */
static esmm_matrix vector(const pass *p, float *data, int64_t n)
{
  const bool on_device = p->cache->on_device;
  return (esmm_matrix){.data = data,
                       .rows = 1,
                       .cols = n,
                       .place = on_device ? ESMM_DEVICE : ESMM_HOST,
                       .device = on_device ? p->cache->ordinal : 0};
}

static esmm_status check_outputs(const pass *p, outputs *out)
{
  const esmm_ffn_opts *o = &p->ffn->o;
  const esmm_ffn_grads *g = &p->g;
  const bool low1 = o->rank1 > 0, low2 = o->rank2 > 0, gated = p->ffn->branches > 1;
  const int64_t outer = low1 ? o->rank1 : o->d_hidden;
  const esmm_matrix b1 = vector(p, g->b1, o->d_hidden), b_gate = vector(p, g->b_gate, o->d_hidden),
                    b2 = vector(p, g->b2, o->d_model);
  esmm_matrix checked[3];
  const wanted w[] = {
      {"grads->x", g->x, true, p->tokens, o->d_model, &out->x},
      {"grads->w1", g->w1, true, o->d_model, outer, low1 ? &out->reduce[FFN_UP] : &out->expand[FFN_UP]},
      {"grads->w1_v", g->w1_v, low1, o->rank1, o->d_hidden, &out->expand[FFN_UP]},
      {"grads->gate", g->gate, gated, o->d_model, outer, low1 ? &out->reduce[FFN_GATE] : &out->expand[FFN_GATE]},
      {"grads->gate_v", g->gate_v, gated && low1, o->rank1, o->d_hidden, &out->expand[FFN_GATE]},
      {"grads->w2", g->w2, true, o->d_hidden, p->ffn->d_out, &out->contract},
      {"grads->w2_v", g->w2_v, low2, o->rank2, o->d_model, &out->restore},
      {"grads->b1", g->b1 ? &b1 : NULL, true, 1, o->d_hidden, &checked[0]},
      {"grads->b_gate", g->b_gate ? &b_gate : NULL, gated, 1, o->d_hidden, &checked[1]},
      {"grads->b2", g->b2 ? &b2 : NULL, true, 1, o->d_model, &checked[2]},
  };
  const size_t count = sizeof w / sizeof *w;
  for (size_t i = 0; i < count; i++) {
    if (!w[i].given)
      continue;
    if (!w[i].allowed)
      return esmm_fail(p->ctx, ESMM_ERR_ARGUMENT, "%s is given, but this layer's options have no such parameter",
                       w[i].name);
    const esmm_status status = esmm_ffn_check_shape(p->ctx, w[i].name, w[i].given, w[i].rows, w[i].cols, w[i].out);
    if (status != ESMM_OK)
      return status;
  }
  return check_apart(p->ctx, w, count, p->ffn, &p->dy, &p->cache->x);
}

static esmm_status check_cache(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_ffn_cache *cache)
{
  if (!ffn || !cache)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", ffn ? "cache" : "ffn");
  const esmm_status status = esmm_ffn_check_device(ctx, ffn);
  if (status != ESMM_OK)
    return status;
  if (cache->ffn != ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the cache belongs to %s: make one for this layer",
                     cache->ffn ? "another layer" : "a layer that was freed");
  if (cache->generation == 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the cache holds no forward pass: run esmm_ffn_forward with it first");
  if (cache->generation != ffn->generation)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                     "the cache holds a forward pass of weights that were replaced since: run it again");
  return ESMM_OK;
}

/* ---- products ---- */

static ffn_b ffn_b_of(ffn_b first, int branch)
{
  return (ffn_b)((int)first + branch);
}

/* c = a b + plus (NULL: nothing; may be c itself), with b prepared for this product alone. */
static esmm_status multiply(const pass *p, const esmm_matrix *a, ffn_b which, const esmm_matrix *b, esmm_matrix *c,
                            const esmm_matrix *plus)
{
  static const float one = 1.0f;
  const ffn_passes *passes = p->cache->passes;
  const bool strict = p->ffn->o.mode == ESMM_FFN_DENSE;
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .beta = plus == c ? &one : NULL, .residual = plus == c ? NULL : plus, .strict = strict};
  esmm_weights *w = NULL;
  esmm_status status = passes->take_b(p->ctx, p->cache, which, b, a->dtype, strict, &w);
  if (status == ESMM_OK)
    status = esmm_matmul(p->ctx, a, w, c, &opts, NULL);
  passes->put_back(p->cache, which, w);
  return status;
}

/* An operand that goes sparse in the 2:4 modes. */
typedef struct operand {
  ffn_axis axis;
  ffn_operand which;
  ffn_drop drop;
  const esmm_matrix *m;
} operand;

static ffn_sparsify sparsify_of(const pass *p, const operand *o)
{
  return (ffn_sparsify){
      .axis = o->axis, .drop = o->drop, .seed = ffn_seed(p->ffn, p->cache, o->which), .places = p->places};
}

/* The product of an operand that goes sparse, c = m b or m' b + plus, where the device has one for it. */
static esmm_status multiply_sparse(const pass *p, const operand *o, ffn_b which, const esmm_matrix *b, esmm_matrix *c,
                                   const esmm_matrix *plus, bool *done)
{
  const ffn_passes *passes = p->cache->passes;
  if (!ffn_is_lossy(p->ffn) || !passes->multiply_sparse)
    return ESMM_OK;
  const ffn_sparsify how = sparsify_of(p, o);
  const ffn_sparse_product product = {.how = &how, .m = o->m, .b = b, .which = which, .plus = plus, .c = c};
  return passes->multiply_sparse(p->ctx, p->cache, &product, done);
}

/* The 2:4 modes multiply a sparser copy of m. */
static esmm_status sparsified(const pass *p, const operand *o, esmm_matrix *out)
{
  *out = *o->m;
  if (!ffn_is_lossy(p->ffn))
    return ESMM_OK;
  const ffn_sparsify how = sparsify_of(p, o);
  const esmm_status status = esmm_ffn_matrix(p->ctx, p->cache, FFN_SPARSE, o->m->rows, o->m->cols, o->m->dtype, out);
  return status == ESMM_OK ? p->cache->passes->sparsify(p->ctx, p->cache, &how, o->m, out) : status;
}

/* The gradient of rows that belong to features: out [d_hidden, d] (+)= m' b, m [tokens, features], b [tokens, d]. */
static esmm_status gradient_of_rows(const pass *p, const operand *o, ffn_b which, const esmm_matrix *b,
                                    esmm_matrix *out)
{
  const bool add = p->g.accumulate != 0;
  esmm_matrix m;
  bool done = false;
  esmm_status status = multiply_sparse(p, o, which, b, out, add ? out : NULL, &done);
  if (status == ESMM_OK && !done)
    status = sparsified(p, o, &m);
  if (status != ESMM_OK || done)
    return status;
  const esmm_matrix turned = ffn_transposed(m);
  if (!p->order)
    return multiply(p, &turned, which, b, out, add ? out : NULL);
  const ffn_passes *passes = p->cache->passes;
  const bool by_rows = !passes->alike || out->order == ESMM_ROW_MAJOR;
  const esmm_dtype dtype = passes->alike && !add ? out->dtype : ESMM_F32;
  esmm_matrix compact;
  status = esmm_ffn_matrix(p->ctx, p->cache, FFN_GRADIENT, by_rows ? p->features : out->cols,
                           by_rows ? out->cols : p->features, dtype, &compact);
  if (!by_rows)
    compact = ffn_transposed(compact);
  if (status == ESMM_OK)
    status = multiply(p, &turned, which, b, &compact, NULL);
  return status == ESMM_OK ? passes->scatter_rows(p->ctx, &compact, p->places, out, add) : status;
}

/* ---- which features ---- */

static esmm_status choose_features(pass *p)
{
  const int64_t all = p->ffn->o.d_hidden;
  p->features = p->count = all;
  p->h = esmm_ffn_view(p->cache, FFN_H, p->tokens, all, p->ffn->o.dtype);
  if (!p->cache->looked)
    return ESMM_OK;
  const ffn_passes *passes = p->cache->passes;
  esmm_status status = passes->settle(p->ctx, p->ffn, p->cache);
  const int64_t features = esmm_round_up(p->cache->alive, passes->step);
  if (status != ESMM_OK || (double)features > FFN_COMPACT * (double)all)
    return status;
  esmm_matrix compact;
  status = esmm_ffn_matrix(p->ctx, p->cache, FFN_COMPACT_H, p->tokens, features, p->h.dtype, &compact);
  if (status != ESMM_OK)
    return status;
  p->features = features;
  p->count = p->cache->alive;
  p->order = ffn_numbers(p->cache, FFN_ORDER);
  p->places = ffn_numbers(p->cache, FFN_PLACES);
  status = passes->gather_columns(p->ctx, &p->h, p->order, p->count, &compact);
  p->h = compact;
  return status;
}

/* ---- behind h ---- */

static esmm_status output_side(pass *p, outputs *out)
{
  const ffn_params *params = &p->ffn->params;
  const bool add = p->g.accumulate != 0;
  esmm_status status = ESMM_OK;
  p->dt = p->dy;
  if (p->g.b2)
    status = p->cache->passes->column_sums(p->ctx, p->cache, &p->dy, NULL, p->dy.cols, p->dy.cols, p->g.b2, add);
  if (status == ESMM_OK && p->ffn->o.rank2) {
    const esmm_matrix restore = ffn_transposed(params->restore.matrix);
    const esmm_matrix t = ffn_transposed(esmm_ffn_view(p->cache, FFN_T, p->tokens, p->ffn->d_out, p->ffn->o.dtype));
    if (p->g.w2_v)
      status = multiply(p, &t, FFN_B_DY, &p->dy, &out->restore, add ? &out->restore : NULL);
    if (status == ESMM_OK)
      status = esmm_ffn_matrix(p->ctx, p->cache, FFN_DT, p->tokens, p->ffn->d_out, p->between, &p->dt);
    if (status == ESMM_OK)
      status = multiply(p, &p->dy, FFN_B_RESTORE, &restore, &p->dt, NULL);
  }
  if (!p->g.w2 || status != ESMM_OK)
    return status;
  const operand h = {FFN_ALONG_TOKENS, FFN_OPERAND_DW2, FFN_DROP_DW2, &p->h};
  return gradient_of_rows(p, &h, FFN_B_CONTRACT, &p->dt, &out->contract);
}

/* ---- h ---- */

/* Rows of weights [d_hidden, .] that belong to the features worked on, gathered along the lines they lie in where the
   device can multiply with either order. */
static esmm_status gather_weights(const pass *p, const esmm_matrix *weights, esmm_matrix *rows)
{
  const ffn_passes *passes = p->cache->passes;
  if (!passes->turned || weights->order == ESMM_ROW_MAJOR) {
    const esmm_status status =
        esmm_ffn_matrix(p->ctx, p->cache, FFN_WEIGHTS, p->features, weights->cols, weights->dtype, rows);
    return status == ESMM_OK ? passes->gather_rows(p->ctx, weights, p->order, p->count, rows) : status;
  }
  const esmm_matrix lines = ffn_transposed(*weights);
  esmm_status status = esmm_ffn_matrix(p->ctx, p->cache, FFN_WEIGHTS, lines.rows, p->features, lines.dtype, rows);
  if (status == ESMM_OK)
    status = passes->gather_columns(p->ctx, &lines, p->order, p->count, rows);
  *rows = ffn_transposed(*rows);
  return status;
}

static esmm_status dense_dh(const pass *p, esmm_matrix *dh)
{
  esmm_matrix rows = p->ffn->params.contract.matrix, turned = ffn_transposed(*dh);
  const esmm_matrix dt = ffn_transposed(p->dt);
  const esmm_status status = p->order ? gather_weights(p, &p->ffn->params.contract.matrix, &rows) : ESMM_OK;
  return status == ESMM_OK ? multiply(p, &rows, FFN_B_DT, &dt, &turned, NULL) : status;
}

static esmm_status make_dpre(pass *p)
{
  const esmm_ffn *ffn = p->ffn;
  const ffn_passes *passes = p->cache->passes;
  esmm_status status = ESMM_OK;
  for (int i = 0; i < ffn->branches && status == ESMM_OK; i++)
    status = esmm_ffn_matrix(p->ctx, p->cache, i == FFN_UP ? FFN_DPRE_UP : FFN_DPRE_GATE, p->tokens, p->features,
                             p->between, &p->dpre[i]);
  if (status != ESMM_OK)
    return status;
  bool done = false;
  if (ffn->o.mode != ESMM_FFN_DENSE && ffn_makes_zeros(ffn) && passes->masked)
    status = passes->masked(p->ctx, ffn, p->cache, &p->dt, &p->h, p->order, &p->dpre[FFN_UP], &done);
  if (status == ESMM_OK && !done)
    status = dense_dh(p, &p->dpre[FFN_UP]);
  if (status != ESMM_OK)
    return status;
  const bool gated = ffn->branches > 1, from_result = !gated && ffn_makes_zeros(ffn);
  const esmm_matrix up = esmm_ffn_view(p->cache, FFN_PRE_UP, p->tokens, ffn->o.d_hidden, ffn->o.dtype);
  const esmm_matrix gate = esmm_ffn_view(p->cache, FFN_PRE_GATE, p->tokens, ffn->o.d_hidden, ffn->o.dtype);
  const ffn_derivative job = {.h = &p->h,
                              .up = from_result ? NULL : &up,
                              .gate = gated ? &gate : NULL,
                              .order = p->order,
                              .count = p->count,
                              .dpre = &p->dpre[FFN_UP],
                              .dpre_gate = gated ? &p->dpre[FFN_GATE] : NULL};
  return passes->derive(p->ctx, ffn, p->cache, &job);
}

/* ---- before h ---- */

/* ds, or with full rank dx, = dpre expand' + plus: the weights' rows of the features worked on. */
static esmm_status through_expand(pass *p, int branch, esmm_matrix *ds, const esmm_matrix *plus)
{
  const esmm_matrix expand = ffn_transposed(p->ffn->params.in[branch].expand.matrix);
  const operand dpre = {FFN_ALONG_FEATURES, branch == FFN_UP ? FFN_OPERAND_DX : FFN_OPERAND_DX_GATE, FFN_DROP_DX,
                        &p->dpre[branch]};
  esmm_matrix rows = expand, m;
  bool done = false;
  const ffn_b b = ffn_b_of(p->order ? FFN_B_SOME : FFN_B_EXPAND, branch);
  const bool as_it_is = !p->order && (expand.order == ESMM_ROW_MAJOR || p->cache->passes->turned);
  esmm_status status = as_it_is ? multiply_sparse(p, &dpre, b, &expand, ds, plus, &done) : ESMM_OK;
  if (status != ESMM_OK || done)
    return status;
  status = sparsified(p, &dpre, &m);
  if (status == ESMM_OK && !as_it_is)
    status = gather_weights(p, &expand, &rows);
  return status == ESMM_OK ? multiply(p, &m, b, &rows, ds, plus) : status;
}

static esmm_status expand_gradient(pass *p, int branch, esmm_matrix *out)
{
  const bool up = branch == FFN_UP;
  const esmm_matrix in =
      p->ffn->o.rank1 ? esmm_ffn_view(p->cache, up ? FFN_IN_UP : FFN_IN_GATE, p->tokens, p->ffn->d_in, p->ffn->o.dtype)
                      : p->cache->x;
  const operand dpre = {FFN_ALONG_TOKENS, up ? FFN_OPERAND_DW1 : FFN_OPERAND_DGATE, up ? FFN_DROP_DW1 : FFN_DROP_DGATE,
                        &p->dpre[branch]};
  esmm_matrix turned = ffn_transposed(*out);
  return gradient_of_rows(p, &dpre, ffn_b_of(FFN_B_IN, branch), &in, &turned);
}

/* With rank1: ds of the branch, dreduce = x' ds, dx = ds reduce' + plus. */
static esmm_status through_reduce(pass *p, int branch, esmm_matrix *d_reduce, esmm_matrix *dx, const esmm_matrix *plus)
{
  const esmm_matrix x = ffn_transposed(p->cache->x);
  const esmm_matrix reduce = ffn_transposed(p->ffn->params.in[branch].reduce.matrix);
  esmm_matrix ds;
  esmm_status status = esmm_ffn_matrix(p->ctx, p->cache, FFN_DS, p->tokens, p->ffn->d_in, p->between, &ds);
  if (status == ESMM_OK)
    status = through_expand(p, branch, &ds, NULL);
  if (status == ESMM_OK && d_reduce)
    status = multiply(p, &x, ffn_b_of(FFN_B_DS, branch), &ds, d_reduce, p->g.accumulate ? d_reduce : NULL);
  if (status == ESMM_OK && dx)
    status = multiply(p, &ds, ffn_b_of(FFN_B_REDUCE, branch), &reduce, dx, plus);
  return status;
}

static esmm_status input_side(pass *p, outputs *out)
{
  const bool low = p->ffn->o.rank1 > 0;
  const struct {
    bool outer, inner;
    float *bias;
  } want[FFN_BRANCHES] = {{p->g.w1, p->g.w1_v, p->g.b1}, {p->g.gate, p->g.gate_v, p->g.b_gate}};
  esmm_matrix *dx = p->g.x ? &out->x : NULL, *sum = dx, wide;
  bool any = dx;
  for (int i = 0; i < FFN_BRANCHES; i++)
    any = any || want[i].outer || want[i].inner || want[i].bias;
  esmm_status status = any ? make_dpre(p) : ESMM_OK;
  if (status == ESMM_OK && dx && p->ffn->branches > 1 && dx->dtype != ESMM_F32) { /* two products, one rounding */
    status = esmm_ffn_matrix(p->ctx, p->cache, FFN_DX, p->tokens, p->ffn->o.d_model, ESMM_F32, &wide);
    sum = &wide;
  }
  for (int i = 0; any && i < p->ffn->branches && status == ESMM_OK; i++) {
    if (want[i].bias)
      status = p->cache->passes->column_sums(p->ctx, p->cache, &p->dpre[i], p->order, p->count, p->ffn->o.d_hidden,
                                             want[i].bias, p->g.accumulate != 0);
    if (status == ESMM_OK && (low ? want[i].inner : want[i].outer))
      status = expand_gradient(p, i, &out->expand[i]);
    if (status != ESMM_OK)
      break;
    const bool last = i + 1 == p->ffn->branches;
    const esmm_matrix *plus = i == FFN_UP ? NULL : sum;
    if (low && (want[i].outer || dx))
      status = through_reduce(p, i, want[i].outer ? &out->reduce[i] : NULL, last ? dx : sum, plus);
    else if (!low && dx)
      status = through_expand(p, i, last ? dx : sum, plus);
  }
  return status;
}

esmm_status esmm_ffn_backward(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *dy,
                              const esmm_ffn_grads *grads, esmm_ffn_report *report)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_status status = check_cache(ctx, ffn, cache);
  if (status == ESMM_OK && !grads)
    status = esmm_fail(ctx, ESMM_ERR_ARGUMENT, "grads is NULL");
  if (status != ESMM_OK)
    return status;
  pass p = {.ctx = ctx,
            .ffn = ffn,
            .cache = cache,
            .tokens = cache->tokens,
            .between = cache->passes->wide ? ESMM_F32 : ffn->o.dtype};
  outputs out = {0};
  status = esmm_take_opts(ctx, "grads", grads, sizeof p.g, &p.g);
  if (status == ESMM_OK)
    status = esmm_ffn_check_shape(ctx, "dy", dy, p.tokens, ffn->o.d_model, &p.dy);
  if (status == ESMM_OK)
    status = check_outputs(&p, &out);
  if (status == ESMM_OK)
    status = esmm_ffn_check_report(ctx, report);
  if (status == ESMM_OK && cache->passes->admit)
    status = cache->passes->admit(ctx, cache, p.tokens);
  if (status == ESMM_OK && (ffn_is_lossy(ffn) || cache->looked || report))
    status = esmm_ffn_take_statistics(ctx, ffn, cache);
  if (status == ESMM_OK && ffn_is_lossy(ffn))
    status = cache->passes->forget_drops(ctx, cache, false);
  if (status == ESMM_OK)
    status = choose_features(&p);
  if (status == ESMM_OK)
    status = output_side(&p, &out);
  if (status == ESMM_OK)
    status = input_side(&p, &out);
  return status == ESMM_OK && report ? esmm_ffn_fill_report(ctx, ffn, cache, false, report) : status;
}
