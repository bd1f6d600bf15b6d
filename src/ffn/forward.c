/*
 * forward.c: y = act(x W1 + b1) W2 + b2, and what the cache keeps of it.
 *
 * Where nothing before the activation is needed later, the first product's epilogue makes h and its statistics in one
 * pass; the second product then takes the bitmaps and scans nothing.
 */
#include "convert.h"
#include "cpu/epilogue.h"
#include "ffn.h"
#include "threads.h"

#include <stdlib.h>
#include <string.h>

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

/* h = act(gate) * up, or act(up) where there is no gate. */
typedef struct activating {
  esmm_activation activation;
  const esmm_matrix *up, *gate; /* gate may be NULL */
  esmm_matrix *h;
} activating;

static void activate_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const activating *a = arg;
  for (int64_t t = first; t < end; t++)
    for (int64_t f = 0; f < a->h->cols; f += VEC) {
      const int64_t count = esmm_min(VEC, a->h->cols - f);
      const vec x = esmm_read_part(a->up, t, f, count);
      const vec y = a->gate ? vec_mul(esmm_activate_vec(a->activation, esmm_read_part(a->gate, t, f, count)), x)
                            : esmm_activate_vec(a->activation, x);
      esmm_write_part(a->h, t, f, count, y);
    }
}

static void activate(const esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *up, const esmm_matrix *gate,
                     esmm_matrix *h)
{
  activating a = {.activation = ffn->o.activation, .up = up, .gate = gate, .h = h};
  esmm_for(ctx, ctx->threads, h->rows, esmm_at_once(1, h->cols * (int64_t)sizeof(float)), activate_rows, &a);
}

static esmm_status reserve_statistics(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const struct {
    int buffer;
    int64_t count;
    size_t size;
  } wanted[] = {{FFN_COUNTS, ffn->o.d_hidden, sizeof(int32_t)}, {FFN_OPEN, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_ORDER, ffn->o.d_hidden, sizeof(int32_t)},  {FFN_COLUMNS, ffn->o.d_hidden, sizeof(int32_t)},
                {FFN_KEYS, ffn->o.d_hidden, sizeof(uint64_t)},  {FFN_TOKENS, cache->tokens, sizeof(int32_t)}};
  esmm_status status = ESMM_OK;
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted && status == ESMM_OK; i++)
    status = esmm_ffn_reserve(ctx, cache, wanted[i].buffer, 1, wanted[i].count, wanted[i].size);
  return status;
}

/* The product that ends in h itself, with its statistics where they are wanted. */
static esmm_status finish_h(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool statistics, bool gate,
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
  if (statistics)
    opts.column_nonzeros = cache->buffers[FFN_COUNTS].data;
  if (statistics || ffn->o.mode == ESMM_FFN_EXACT) { /* the next product has a use for the bitmaps */
    opts.c_strip_rows = FFN_STRIP;
    opts.c_pattern = &cache->pattern;
  }
  return multiply(ctx, ffn, &in, &up->expand, h, opts);
}

/* `once`: no backward pass will ask what was before the activation. */
static esmm_status make_h(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool statistics, bool once,
                          esmm_matrix *h)
{
  const bool gated = ffn->branches > 1;
  esmm_matrix up, gate;
  esmm_status status = esmm_ffn_matrix(ctx, cache, FFN_H, cache->tokens, ffn->o.d_hidden, ffn->o.dtype, h);
  if (status == ESMM_OK && statistics)
    status = reserve_statistics(ctx, ffn, cache);
  if (status != ESMM_OK)
    return status;
  if (gated ? once && !ffn->o.rank1 : once || ffn_makes_zeros(ffn)) /* a ReLU's derivative follows from h */
    return finish_h(ctx, ffn, cache, statistics, gated, h);
  status = before_activation(ctx, ffn, cache, FFN_UP, &up);
  if (status == ESMM_OK && gated)
    status = before_activation(ctx, ffn, cache, FFN_GATE, &gate);
  if (status == ESMM_OK)
    activate(ctx, ffn, &up, gated ? &gate : NULL, h);
  return status;
}

/* ---- statistics ---- */

typedef struct counting {
  const esmm_matrix *m;
  bool above;
  int32_t *counts;
} counting;

enum { WIDTH = 512 };

/* first, end: in stretches of WIDTH columns */
static void count_stretches(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const counting *x = arg;
  const esmm_matrix *m = x->m;
  for (int64_t from = first * WIDTH; from < esmm_min(end * WIDTH, m->cols); from += WIDTH) {
    const int64_t width = esmm_min(WIDTH, m->cols - from);
    int32_t *counts = x->counts + from;
    memset(counts, 0, (size_t)width * sizeof *counts);
    for (int64_t t = 0; t < m->rows; t++) {
      float line[WIDTH];
      esmm_load_elements(m->data, m->dtype, t * m->ld + from, 1, width, line, 1);
      for (int64_t f = 0; f < width; f++)
        counts[f] += x->above ? !(line[f] <= 0.0f) : line[f] != 0.0f;
    }
  }
}

/* counts[f]: elements of column f of m that are not zero, or, with `above`, that are not zero or less. */
static void count_columns(const esmm_ctx *ctx, const esmm_matrix *m, bool above, int32_t *counts)
{
  counting x = {.m = m, .above = above, .counts = counts};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(m->cols, WIDTH), esmm_at_once(m->rows, WIDTH * (int64_t)sizeof(float)),
           count_stretches, &x);
}

static int by_key(const void *x, const void *y)
{
  const uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
  return a < b ? -1 : a > b;
}

static int by_number(const void *x, const void *y)
{
  const int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
  return a < b ? -1 : a > b;
}

/* FFN_ORDER and FFN_COLUMNS from the counts. */
static void rank_columns(const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  const int64_t features = ffn->o.d_hidden;
  const int32_t *counts = ffn_numbers(cache, FFN_COUNTS);
  const int32_t *open = ffn->branches > 1 && ffn_makes_zeros(ffn) && !once ? ffn_numbers(cache, FFN_OPEN) : counts;
  uint64_t *keys = cache->buffers[FFN_KEYS].data;
  int32_t *order = cache->buffers[FFN_ORDER].data, *columns = cache->buffers[FFN_COLUMNS].data;
  cache->nonzeros = cache->alive_columns = cache->alive = 0;
  for (int64_t f = 0; f < features; f++) {
    keys[f] = (uint64_t)(uint32_t)counts[f] << 32 | (uint64_t)f;
    cache->nonzeros += counts[f];
    cache->alive_columns += counts[f] > 0;
  }
  qsort(keys, (size_t)features, sizeof *keys, by_key);
  for (int64_t i = 0; i < features; i++) {
    const int32_t f = (int32_t)(keys[i] & INT32_MAX);
    if (open[f] > 0 || !ffn_makes_zeros(ffn))
      order[cache->alive++] = f;
  }
  cache->sparse = ffn->o.mode == ESMM_FFN_SPARSE  ? features
                  : ffn->o.mode == ESMM_FFN_SPLIT ? (int64_t)(ffn->o.sparse_share * (double)features + 0.5)
                                                  : 0;
  for (int64_t i = 0; i < cache->sparse; i++)
    columns[i] = (int32_t)(keys[i] & INT32_MAX);
  qsort(columns, (size_t)cache->sparse, sizeof *columns, by_number);
}

/* The fixed order of tokens for groups of four: the same for the same seed and number of tokens. */
static void shuffle_tokens(uint64_t seed, int64_t tokens, int32_t *order)
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

/* What follows from the counts. */
static void rank(const esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  if (!once && ffn->branches > 1 && ffn_makes_zeros(ffn)) {
    const esmm_matrix gate = esmm_ffn_view(cache, FFN_PRE_GATE, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
    count_columns(ctx, &gate, true, cache->buffers[FFN_OPEN].data);
  }
  rank_columns(ffn, cache, once);
  if (ffn->o.permute_tokens && !once)
    shuffle_tokens(ffn->o.seed, cache->tokens, cache->buffers[FFN_TOKENS].data);
}

/* Of an h that the product before did not count. */
static esmm_status count(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const esmm_matrix h = esmm_ffn_view(cache, FFN_H, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
  const esmm_status status = esmm_pattern_extract(ctx, &h, FFN_STRIP, &cache->pattern);
  if (status == ESMM_OK)
    count_columns(ctx, &h, false, cache->buffers[FFN_COUNTS].data);
  return status;
}

esmm_status esmm_ffn_take_statistics(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  if (cache->pattern)
    return ESMM_OK;
  esmm_status status = reserve_statistics(ctx, ffn, cache);
  if (status == ESMM_OK)
    status = count(ctx, ffn, cache);
  if (status == ESMM_OK)
    rank(ctx, ffn, cache, false);
  return status;
}

/* ---- y ---- */

static esmm_status make_y(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *h,
                          esmm_matrix *y)
{
  const ffn_params *p = &ffn->params;
  esmm_matrix operand = *h, t = *y;
  esmm_matmul_opts opts = {.a_pattern = cache->pattern};
  esmm_status status = ESMM_OK;
  cache->drop_y = (esmm_ffn_drop){0};
  if (ffn_is_lossy(ffn)) {
    status = esmm_ffn_matrix(ctx, cache, FFN_SPARSE, h->rows, h->cols, h->dtype, &operand);
    const ffn_sparsify how = {.axis = FFN_ALONG_FEATURES, .seed = ffn_seed(ffn, cache, FFN_OPERAND_Y)};
    if (status == ESMM_OK)
      status = esmm_ffn_sparsify_matrix(ctx, cache, &how, h, &operand, &cache->drop_y);
    opts.a_pattern = NULL; /* there are fewer nonzeros now */
  }
  if (ffn->o.rank2 && status == ESMM_OK)
    status = esmm_ffn_matrix(ctx, cache, FFN_T, h->rows, ffn->d_out, ffn->o.dtype, &t);
  if (status != ESMM_OK)
    return status;
  opts.bias = ffn->o.rank2 ? NULL : p->b2;
  status = multiply(ctx, ffn, &operand, &p->contract, &t, opts);
  if (status == ESMM_OK && ffn->o.rank2)
    status = multiply(ctx, ffn, &t, &p->restore, y, (esmm_matmul_opts){.bias = p->b2});
  return status;
}

static esmm_status check_forward(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *x, const esmm_matrix *y,
                                 const esmm_ffn_cache *cache, esmm_matrix *x_out, esmm_matrix *y_out)
{
  if (!ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "ffn is NULL");
  if (!ctx->backend->layer)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "the layer is for the CPU, and this is a %s context", esmm_ctx_kind(ctx));
  if (ffn->generation == 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the layer has no weights yet: call esmm_ffn_set_weights");
  if (cache && cache->ffn != ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "the cache belongs to %s: make one for this layer",
                     cache->ffn ? "another layer" : "a layer that was freed");
  if (!x)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "x is NULL");
  esmm_status status = esmm_ffn_check_shape(ctx, "x", x, x->rows, ffn->o.d_model, x_out);
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
  const bool once = !cache, statistics = report || ffn_is_lossy(ffn) || (ffn->o.mode == ESMM_FFN_EXACT && !once);
  if (once && !ffn->own) {
    status = esmm_ffn_cache_create(ctx, ffn, &ffn->own);
    if (status != ESMM_OK)
      return status;
  }
  if (once)
    cache = ffn->own;
  cache->generation = 0; /* until this pass is done the cache holds none */
  cache->tokens = x->rows;
  cache->x = from;
  cache->passes++;
  esmm_pattern_free(cache->pattern);
  cache->pattern = NULL;
  status = make_h(ctx, ffn, cache, statistics, once, &h);
  if (status == ESMM_OK && statistics && !cache->pattern)
    status = count(ctx, ffn, cache);
  if (status == ESMM_OK && statistics)
    rank(ctx, ffn, cache, once);
  if (status == ESMM_OK)
    status = make_y(ctx, ffn, cache, &h, &to);
  if (status != ESMM_OK)
    return status;
  cache->generation = ffn->generation;
  esmm_ffn_report all = {0};
  if (report)
    esmm_ffn_fill_report(ffn, cache, &all, report);
  return ESMM_OK;
}
