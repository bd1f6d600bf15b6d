/*
 * forward.c: y = act(x W1 + b1) W2 + b2, and what the cache keeps of it.
 *
 * Where nothing before the activation is needed later, the first product's epilogue makes h and its statistics in one
 * pass; the second product then takes the bitmaps and scans nothing.
 */
#include "ffn.h"

/* ---- products ---- */

static esmm_status multiply(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *a, const ffn_factor *b,
                            esmm_matrix *c, esmm_matmul_opts opts)
{
  opts.size = sizeof opts;
  opts.strict = ffn->o.mode == ESMM_FFN_DENSE;
  return esmm_matmul(ctx, a, b->prepared, c, &opts, NULL);
}

/* x, or with rank1 x times the branch's first factor: what its second one multiplies. */
static esmm_status input_of(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, int branch, esmm_matrix *in)
{
  *in = cache->x;
  if (!ffn->o.rank1)
    return ESMM_OK;
  const esmm_status status = esmm_ffn_matrix(ctx, cache, branch == FFN_UP ? FFN_IN_UP : FFN_IN_GATE, cache->tokens,
                                             ffn->d_in, ffn->o.dtype, in);
  return status == ESMM_OK ? multiply(ctx, ffn, &cache->x, &ffn->params.in[branch].reduce, in, (esmm_matmul_opts){0})
                           : status;
}

/* x W + b of one branch, before the activation. */
static esmm_status before_activation(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, int branch,
                                     esmm_matrix *pre)
{
  esmm_matrix in;
  esmm_status status = input_of(ctx, ffn, cache, branch, &in);
  if (status == ESMM_OK)
    status = esmm_ffn_matrix(ctx, cache, branch == FFN_UP ? FFN_PRE_UP : FFN_PRE_GATE, cache->tokens, ffn->o.d_hidden,
                             ffn->o.dtype, pre);
  const ffn_branch *b = &ffn->params.in[branch];
  return status == ESMM_OK ? multiply(ctx, ffn, &in, &b->expand, pre, (esmm_matmul_opts){.bias = b->bias}) : status;
}

/* ---- h ---- */

static esmm_status reserve_statistics(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const struct {
    int buffer;
    int64_t count;
    size_t size;
  } wanted[] = {{FFN_COUNTS, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_OPEN, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_ORDER, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_COLUMNS, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_TOKENS, cache->tokens, sizeof(int32_t)}};
  esmm_status status = ESMM_OK;
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted && status == ESMM_OK; i++)
    status = esmm_ffn_reserve(ctx, cache, wanted[i].buffer, 1, wanted[i].count, wanted[i].size);
  return status;
}

/* The product that ends in h itself, with its statistics where they are wanted. */
static esmm_status finish_h(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool counts, bool gate,
                            esmm_matrix *h)
{
  const ffn_branch *up = &ffn->params.in[FFN_UP], *gated_by = &ffn->params.in[FFN_GATE];
  esmm_matmul_opts opts = {.bias = up->bias, .activation = ffn->o.activation};
  esmm_matrix in;
  const esmm_status status = input_of(ctx, ffn, cache, FFN_UP, &in);
  if (status != ESMM_OK)
    return status;
  if (gate) {
    opts.gate = gated_by->expand.prepared;
    opts.gate_bias = gated_by->bias;
  }
  if (counts)
    opts.column_nonzeros = cache->buffers[FFN_COUNTS].data;
  /* Where the next product has a use for the bitmaps. */
  if (cache->passes->patterns && (counts || ffn->o.mode == ESMM_FFN_EXACT)) {
    opts.c_strip_rows = FFN_STRIP;
    opts.c_pattern = &cache->pattern;
  }
  return multiply(ctx, ffn, &in, &up->expand, h, opts);
}

/* `once`: no backward pass will ask what was before the activation. *counted: columns were counted on the way. */
static esmm_status make_h(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool counts, bool once,
                          bool *counted, esmm_matrix *h)
{
  const bool gated = ffn->branches > 1;
  esmm_matrix up, gate;
  esmm_status status = esmm_ffn_matrix(ctx, cache, FFN_H, cache->tokens, ffn->o.d_hidden, ffn->o.dtype, h);
  if (status != ESMM_OK)
    return status;
  *counted = gated ? once && !ffn->o.rank1 : once || ffn_makes_zeros(ffn); /* a ReLU's derivative follows from h */
  if (*counted)
    return finish_h(ctx, ffn, cache, counts, gated, h);
  status = before_activation(ctx, ffn, cache, FFN_UP, &up);
  if (status == ESMM_OK && gated)
    status = before_activation(ctx, ffn, cache, FFN_GATE, &gate);
  return status == ESMM_OK ? cache->passes->activate(ctx, ffn, &up, gated ? &gate : NULL, h) : status;
}

/* ---- statistics ---- */

void esmm_ffn_shuffle_tokens(uint64_t seed, int64_t tokens, int32_t *order)
{
  uint64_t state = seed ^ 0x746f6b656e73u;
  for (int64_t i = 0; i < tokens; i++)
    order[i] = (int32_t)i;
  for (int64_t i = tokens - 1; i > 0; i--) {
    const int64_t j = (int64_t)(ffn_random(&state) % (uint64_t)(i + 1));
    const int32_t swapped = order[i];
    order[i] = order[j];
    order[j] = swapped;
  }
}

int64_t esmm_ffn_sparse_columns(const esmm_ffn *ffn)
{
  const int64_t features = ffn->o.d_hidden;
  return ffn->o.mode == ESMM_FFN_SPARSE  ? features
         : ffn->o.mode == ESMM_FFN_SPLIT ? (int64_t)(ffn->o.sparse_share * (double)features + 0.5)
                                         : 0;
}

/* What follows from the counts. */
static esmm_status rank(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  cache->counted = true;
  cache->sparse = esmm_ffn_sparse_columns(ffn);
  return cache->passes->rank(ctx, ffn, cache, once);
}

esmm_status esmm_ffn_take_statistics(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  if (cache->counted)
    return ESMM_OK;
  esmm_status status = reserve_statistics(ctx, ffn, cache);
  if (status == ESMM_OK)
    status = cache->passes->count(ctx, ffn, cache);
  return status == ESMM_OK ? rank(ctx, ffn, cache, false) : status;
}

/* ---- y ---- */

/* h W2, or its first factor, where h goes sparse before. */
static esmm_status contract_sparse(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *h,
                                   const float *bias, esmm_matrix *t)
{
  const ffn_passes *passes = cache->passes;
  const ffn_factor *b = &ffn->params.contract;
  const ffn_sparsify how = {
      .axis = FFN_ALONG_FEATURES, .drop = FFN_DROP_Y, .seed = ffn_seed(ffn, cache, FFN_OPERAND_Y)};
  const ffn_sparse_product product = {.how = &how, .m = h, .prepared = b->prepared, .bias = bias, .c = t};
  esmm_matrix operand;
  bool done = false;
  esmm_status status = passes->forget_drops(ctx, cache, true);
  if (status == ESMM_OK && passes->multiply_sparse)
    status = passes->multiply_sparse(ctx, cache, &product, &done);
  if (status != ESMM_OK || done)
    return status;
  status = esmm_ffn_matrix(ctx, cache, FFN_SPARSE, h->rows, h->cols, h->dtype, &operand);
  if (status == ESMM_OK)
    status = passes->sparsify(ctx, cache, &how, h, &operand);
  return status == ESMM_OK ? multiply(ctx, ffn, &operand, b, t, (esmm_matmul_opts){.bias = bias}) : status;
}

static esmm_status make_y(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *h,
                          esmm_matrix *y)
{
  const ffn_params *p = &ffn->params;
  const float *bias = ffn->o.rank2 ? NULL : p->b2;
  esmm_matrix t = *y;
  esmm_status status = ESMM_OK;
  if (ffn->o.rank2)
    status = esmm_ffn_matrix(ctx, cache, FFN_T, h->rows, ffn->d_out, ffn->o.dtype, &t);
  if (status != ESMM_OK)
    return status;
  if (ffn_is_lossy(ffn)) /* which has fewer nonzeros than the pattern says */
    status = contract_sparse(ctx, ffn, cache, h, bias, &t);
  else
    status = multiply(ctx, ffn, h, &p->contract, &t, (esmm_matmul_opts){.bias = bias, .a_pattern = cache->pattern});
  if (status == ESMM_OK && ffn->o.rank2)
    status = multiply(ctx, ffn, &t, &p->restore, y, (esmm_matmul_opts){.bias = p->b2});
  return status;
}

/* ---- few tokens ---- */

/*
 * A ReLU gate says which features of W1 and W2 are needed, so it is computed first. Where the kernels can do that, and
 * the caller wants y alone.
 */
static esmm_status decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                          esmm_matrix *y, bool *done)
{
  const ffn_branch *branch = &ffn->params.in[FFN_GATE];
  const esmm_ffn_opts *o = &ffn->o;
  *done = false;
  if (!cache->passes->decode || ffn->branches == 1 || !ffn_makes_zeros(ffn) || o->mode != ESMM_FFN_EXACT || o->rank1 ||
      o->rank2 || !ffn->in_place || ctx->force[0] || x->rows == 0 || x->rows > FFN_DECODE_TOKENS)
    return ESMM_OK;
  esmm_matrix gate = {0}, h = {0};
  esmm_status status = cache->passes->can_decode(ctx, ffn, cache, x, &gate);
  if (status != ESMM_OK || !gate.data)
    return status;
  *done = true;
  status = multiply(ctx, ffn, x, &branch->expand, &gate,
                    (esmm_matmul_opts){.bias = branch->bias, .activation = ESMM_ACT_RELU});
  if (status == ESMM_OK)
    status = cache->passes->decode(ctx, ffn, cache, x, &gate, &h, y);
  return status == ESMM_OK && h.data
             ? multiply(ctx, ffn, &h, &ffn->params.contract, y, (esmm_matmul_opts){.bias = ffn->params.b2})
             : status;
}

static esmm_status check_forward(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *x, const esmm_matrix *y,
                                 const esmm_ffn_cache *cache, esmm_matrix *x_out, esmm_matrix *y_out)
{
  if (!ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "ffn is NULL");
  esmm_status status = esmm_ffn_check_device(ctx, ffn);
  if (status != ESMM_OK)
    return status;
  if (ffn->generation == 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the layer has no weights yet: call esmm_ffn_set_weights");
  if (cache && cache->ffn != ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the cache belongs to %s: make one for this layer",
                     cache->ffn ? "another layer" : "a layer that was freed");
  if (!x)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "x is NULL");
  status = esmm_ffn_check_shape(ctx, "x", x, x->rows, ffn->o.d_model, x_out);
  if (status == ESMM_OK)
    status = esmm_ffn_check_shape(ctx, "y", y, x->rows, ffn->o.d_model, y_out);
  if (status != ESMM_OK)
    return status;
  if (x->rows > INT32_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "x has %lld rows; a layer takes %d tokens at most", (long long)x->rows,
                     INT32_MAX);
  if (esmm_overlap(x_out, y_out))
    return esmm_fail(ctx, ESMM_ERR_OVERLAP, "y (%p) shares memory with x (%p)", y->data, x->data);
  return ESMM_OK;
}

esmm_status esmm_ffn_forward(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_matrix *x, esmm_matrix *y, esmm_ffn_cache *cache,
                             esmm_ffn_report *report)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_matrix from, to, h;
  esmm_status status = check_forward(ctx, ffn, x, y, cache, &from, &to);
  if (status == ESMM_OK)
    status = esmm_ffn_check_report(ctx, report);
  if (status != ESMM_OK)
    return status;
  const bool once = !cache;
  bool compacts = ffn_compacts(ffn) && !once, counted = false;
  if (once && !ffn->own) {
    status = esmm_ffn_cache_create(ctx, ffn, &ffn->own);
    if (status != ESMM_OK)
      return status;
  }
  if (once)
    cache = ffn->own;
  if (once && !report) {
    bool done = false;
    status = decode(ctx, ffn, cache, &from, &to, &done);
    if (status != ESMM_OK || done)
      return status;
  }
  status = cache->passes->admit ? cache->passes->admit(ctx, cache, x->rows) : ESMM_OK;
  if (status == ESMM_OK && compacts && cache->passes->looks)
    status = cache->passes->looks(ctx, ffn, cache, &compacts);
  if (status != ESMM_OK)
    return status;
  const bool statistics = report || ffn_is_lossy(ffn) || compacts;
  const bool counts = compacts || ffn->o.mode == ESMM_FFN_SPLIT || (statistics && ctx->backend->layer->patterns);
  cache->generation = 0; /* until this pass is done the cache holds none */
  cache->tokens = x->rows;
  cache->x = from;
  cache->runs++;
  esmm_pattern_free(cache->pattern);
  cache->pattern = NULL;
  cache->counted = false;
  cache->looked = compacts;
  if (statistics)
    status = reserve_statistics(ctx, ffn, cache);
  if (status == ESMM_OK)
    status = make_h(ctx, ffn, cache, counts, once, &counted, &h);
  if (status == ESMM_OK && counts && !counted)
    status = cache->passes->count(ctx, ffn, cache);
  if (status == ESMM_OK && statistics)
    status = rank(ctx, ffn, cache, once);
  if (status == ESMM_OK)
    status = make_y(ctx, ffn, cache, &h, &to);
  if (status != ESMM_OK) {
    cache->runs--; /* the next one draws the same numbers as if there had been no failure */
    return status;
  }
  cache->generation = ffn->generation;
  return report ? esmm_ffn_fill_report(ctx, ffn, cache, true, report) : ESMM_OK;
}
