/*
 * layer.c: the layer as callers hold it: options, weights, caches, and which belongs to which.
 *
 * A layer lists its caches, and a cache names its layer: whoever goes first tells the other, so that a cache can be
 * freed after its layer, and cannot be taken for one of a layer that happens to lie at the same address.
 */
#include "ffn.h"

#include <math.h>
#include <string.h>

/* ---- options ---- */

static esmm_status check_opts(esmm_ctx *ctx, esmm_ffn_opts *o)
{
  const struct {
    const char *name;
    int64_t value, least;
  } sizes[] = {
      {"d_model", o->d_model, 1}, {"d_hidden", o->d_hidden, 1}, {"rank1", o->rank1, 0}, {"rank2", o->rank2, 0}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (sizes[i].value < sizes[i].least || sizes[i].value > INT32_MAX)
      return esmm_fail(ctx, ESMM_ERR_SHAPE, "opts->%s is %lld; it must be %lld to %d", sizes[i].name,
                       (long long)sizes[i].value, (long long)sizes[i].least, INT32_MAX);
  if (o->activation < ESMM_ACT_NONE || o->activation > ESMM_ACT_SILU)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->activation is %d, which is no esmm_activation", (int)o->activation);
  if (esmm_dtype_size(o->dtype) == 0)
    return esmm_fail(ctx, ESMM_ERR_DTYPE, "opts->dtype is %d, which is no esmm_dtype", (int)o->dtype);
  if (o->mode < ESMM_FFN_EXACT || o->mode > ESMM_FFN_DENSE)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->mode is %d, which is no esmm_ffn_mode", (int)o->mode);
  if (o->sparsifier < ESMM_SPARSIFY_TOP_N || o->sparsifier > ESMM_SPARSIFY_MVUE)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->sparsifier is %d, which is no esmm_sparsifier", (int)o->sparsifier);
  if (!(o->sparse_share >= 0.0 && o->sparse_share <= 1.0))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                     "opts->sparse_share is %g; it must be greater than 0 and at most 1, or 0 for %g", o->sparse_share,
                     FFN_SHARE);
  if (o->activation == ESMM_ACT_NONE)
    o->activation = ESMM_ACT_RELU2;
  if (o->sparse_share == 0.0)
    o->sparse_share = FFN_SHARE;
  return ESMM_OK;
}

esmm_status esmm_ffn_create(esmm_ctx *ctx, const esmm_ffn_opts *opts, esmm_ffn **out)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!out || !opts)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", out ? "opts" : "ffn");
  *out = NULL;
  esmm_ffn_opts o = {.size = sizeof o};
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK)
    status = check_opts(ctx, &o);
  if (status != ESMM_OK)
    return status;
  if (!ctx->backend->layer)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "feed-forward layers run on the CPU, and this is a %s context",
                     esmm_ctx_kind(ctx));
  esmm_ffn *ffn = esmm_mem_alloc(&ctx->allocator, sizeof *ffn);
  if (!ffn)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a layer");
  memset(ffn, 0, sizeof *ffn);
  ffn->allocator = ctx->allocator;
  ffn->o = o;
  ffn->d_in = o.rank1 ? o.rank1 : o.d_model;
  ffn->d_out = o.rank2 ? o.rank2 : o.d_model;
  ffn->branches = o.gated ? FFN_BRANCHES : 1;
  *out = ffn;
  return ESMM_OK;
}

/* ---- weights ---- */

static void free_params(const esmm_ffn *ffn, ffn_params *p)
{
  for (int i = 0; i < FFN_BRANCHES; i++) {
    esmm_weights_free(p->in[i].reduce.prepared);
    esmm_weights_free(p->in[i].expand.prepared);
    esmm_mem_free(&ffn->allocator, p->in[i].bias, (size_t)ffn->o.d_hidden * sizeof(float));
  }
  esmm_weights_free(p->contract.prepared);
  esmm_weights_free(p->restore.prepared);
  esmm_mem_free(&ffn->allocator, p->b2, (size_t)ffn->o.d_model * sizeof(float));
}

esmm_status esmm_ffn_check_shape(esmm_ctx *ctx, const char *what, const esmm_matrix *m, int64_t rows, int64_t cols,
                                 esmm_matrix *out)
{
  const esmm_status status = esmm_check_matrix(ctx, what, m, out);
  if (status != ESMM_OK)
    return status;
  if (m->rows != rows || m->cols != cols)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "%s is %lld x %lld; this layer's is %lld x %lld", what, (long long)m->rows,
                     (long long)m->cols, (long long)rows, (long long)cols);
  return ESMM_OK;
}

static esmm_status take_factor(esmm_ctx *ctx, const char *what, const esmm_matrix *given, bool wanted, int64_t rows,
                               int64_t cols, const esmm_prepare_opts *prepare, ffn_factor *factor)
{
  if (!wanted)
    return !given
               ? ESMM_OK
               : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is given, but this layer's options have no such matrix", what);
  const esmm_status status = esmm_ffn_check_shape(ctx, what, given, rows, cols, &factor->matrix);
  return status == ESMM_OK ? esmm_prepare(ctx, &factor->matrix, prepare, &factor->prepared) : status;
}

static esmm_status take_bias(esmm_ctx *ctx, const esmm_ffn *ffn, const char *what, const float *given, bool wanted,
                             int64_t n, float **bias)
{
  if (!given)
    return ESMM_OK;
  if (!wanted)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is given, but this layer's options have no gate", what);
  *bias = esmm_mem_alloc(&ffn->allocator, (size_t)n * sizeof **bias);
  if (!*bias)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %s", what);
  memcpy(*bias, given, (size_t)n * sizeof **bias);
  return ESMM_OK;
}

static esmm_status take_params(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_ffn_weights *w,
                               const esmm_prepare_opts *prepare, ffn_params *p)
{
  const esmm_ffn_opts *o = &ffn->o;
  const bool low1 = o->rank1 > 0, low2 = o->rank2 > 0, gated = ffn->branches > 1;
  const struct {
    const char *outer_name, *inner_name, *bias_name;
    const esmm_matrix *outer, *inner;
    const float *bias;
    bool wanted;
  } in[FFN_BRANCHES] = {{"weights->w1", "weights->w1_v", "weights->b1", w->w1, w->w1_v, w->b1, true},
                        {"weights->gate", "weights->gate_v", "weights->b_gate", w->gate, w->gate_v, w->b_gate, gated}};
  esmm_status status = ESMM_OK;
  for (int i = 0; i < FFN_BRANCHES && status == ESMM_OK; i++) {
    ffn_branch *b = &p->in[i];
    status = take_factor(ctx, in[i].outer_name, in[i].outer, in[i].wanted, o->d_model, low1 ? o->rank1 : o->d_hidden,
                         prepare, low1 ? &b->reduce : &b->expand);
    if (status == ESMM_OK) /* with full rank the one matrix is there already, and this one must not be */
      status = take_factor(ctx, in[i].inner_name, in[i].inner, in[i].wanted && low1, o->rank1, o->d_hidden, prepare,
                           &b->expand);
    if (status == ESMM_OK)
      status = take_bias(ctx, ffn, in[i].bias_name, in[i].bias, in[i].wanted, o->d_hidden, &b->bias);
  }
  if (status == ESMM_OK)
    status = take_factor(ctx, "weights->w2", w->w2, true, o->d_hidden, ffn->d_out, prepare, &p->contract);
  if (status == ESMM_OK)
    status = take_factor(ctx, "weights->w2_v", w->w2_v, low2, o->rank2, o->d_model, prepare, &p->restore);
  if (status == ESMM_OK)
    status = take_bias(ctx, ffn, "weights->b2", w->b2, true, o->d_model, &p->b2);
  return status;
}

esmm_status esmm_ffn_set_weights(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_ffn_weights *weights,
                                 const esmm_prepare_opts *prepare)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!ffn || !weights)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", ffn ? "weights" : "ffn");
  if (!ctx->backend->layer)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "the layer is for the CPU, and this is a %s context", esmm_ctx_kind(ctx));
  esmm_ffn_weights w = {.size = sizeof w};
  esmm_prepare_opts o = {.size = sizeof o};
  esmm_status status = esmm_take_opts(ctx, "weights", weights, sizeof w, &w);
  if (status == ESMM_OK)
    status = esmm_take_opts(ctx, "prepare", prepare, sizeof o, &o);
  if (status != ESMM_OK)
    return status;
  const bool dense = ffn->o.mode == ESMM_FFN_DENSE;
  if (dense && (o.format.kind == ESMM_FORMAT_BSR || o.format.kind == ESMM_FORMAT_NM))
    return esmm_fail(
        ctx, ESMM_ERR_UNSUPPORTED,
        "prepare->format.kind is %s, but this layer's mode is dense, which multiplies zeros too: take dense "
        "weights, or another mode",
        esmm_format_str(o.format.kind));
  o.strict = dense; /* its products run from panels too, zeros and all */
  ffn_params params = {0};
  status = take_params(ctx, ffn, &w, &o, &params);
  if (status != ESMM_OK) { /* the layer keeps the weights it had */
    free_params(ffn, &params);
    return status;
  }
  free_params(ffn, &ffn->params);
  ffn->params = params;
  ffn->generation++;
  return ESMM_OK;
}

void esmm_ffn_free(esmm_ffn *ffn)
{
  if (!ffn)
    return;
  esmm_ffn_cache_free(ffn->own);
  for (esmm_ffn_cache *cache = ffn->caches; cache; cache = cache->next)
    cache->ffn = NULL;
  free_params(ffn, &ffn->params);
  const esmm_allocator allocator = ffn->allocator;
  esmm_mem_free(&allocator, ffn, sizeof *ffn);
}

/* ---- caches ---- */

esmm_status esmm_ffn_cache_create(esmm_ctx *ctx, esmm_ffn *ffn, esmm_ffn_cache **out)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!out || !ffn)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", out ? "ffn" : "cache");
  *out = NULL;
  esmm_ffn_cache *cache = esmm_mem_alloc(&ctx->allocator, sizeof *cache);
  if (!cache)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a cache");
  memset(cache, 0, sizeof *cache);
  cache->allocator = ctx->allocator;
  cache->ffn = ffn;
  cache->number = ffn->caches_made++;
  cache->next = ffn->caches;
  if (cache->next)
    cache->next->previous = cache;
  ffn->caches = cache;
  *out = cache;
  return ESMM_OK;
}

void esmm_ffn_cache_free(esmm_ffn_cache *cache)
{
  if (!cache)
    return;
  if (cache->ffn) {
    if (cache->previous)
      cache->previous->next = cache->next;
    else
      cache->ffn->caches = cache->next;
    if (cache->next)
      cache->next->previous = cache->previous;
  }
  const esmm_allocator allocator = cache->allocator;
  for (int i = 0; i < FFN_BUFFERS; i++)
    esmm_mem_free(&allocator, cache->buffers[i].data, cache->buffers[i].bytes);
  esmm_pattern_free(cache->pattern);
  esmm_mem_free(&allocator, cache, sizeof *cache);
}

esmm_status esmm_ffn_reserve(esmm_ctx *ctx, esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols,
                             size_t element)
{
  ffn_buffer *b = &cache->buffers[buffer];
  size_t elements, bytes;
  if (!esmm_size_mul((size_t)rows, (size_t)cols, &elements) || !esmm_size_mul(elements, element, &bytes) ||
      bytes > (size_t)INT64_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "%lld x %lld values of the layer would not fit in memory", (long long)rows,
                     (long long)cols);
  if (b->data && bytes <= b->bytes)
    return ESMM_OK;
  esmm_mem_free(&cache->allocator, b->data, b->bytes); /* what it held is made anew by who asks for room */
  b->data = esmm_mem_alloc(&cache->allocator, bytes);
  b->bytes = b->data ? bytes : 0;
  return b->data ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of the layer's cache", bytes);
}

esmm_matrix esmm_ffn_view(const esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols, esmm_dtype dtype)
{
  return (esmm_matrix){.data = cache->buffers[buffer].data, .rows = rows, .cols = cols, .ld = cols, .dtype = dtype};
}

esmm_status esmm_ffn_matrix(esmm_ctx *ctx, esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols,
                            esmm_dtype dtype, esmm_matrix *out)
{
  const esmm_status status = esmm_ffn_reserve(ctx, cache, buffer, rows, cols, esmm_dtype_size(dtype));
  *out = esmm_ffn_view(cache, buffer, rows, cols, dtype);
  return status;
}

/* ---- reports ---- */

esmm_status esmm_ffn_check_report(esmm_ctx *ctx, const esmm_ffn_report *report)
{
  if (report && !esmm_struct_size(report->size, sizeof *report))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "report->size is %zu; set it to sizeof *report, %zu in this version",
                     report->size, sizeof *report);
  return ESMM_OK;
}

void esmm_ffn_fill_report(const esmm_ffn *ffn, const esmm_ffn_cache *cache, esmm_ffn_report *all,
                          esmm_ffn_report *report)
{
  const double elements = (double)cache->tokens * (double)ffn->o.d_hidden;
  all->size = report->size;
  all->tokens = cache->tokens;
  all->alive_columns = cache->alive_columns;
  all->sparse_columns = cache->sparse;
  all->sparse_share = (double)cache->sparse / (double)ffn->o.d_hidden;
  all->strip_rows = FFN_STRIP;
  all->element_density = elements > 0 ? (double)cache->nonzeros / elements : 0.0;
  all->strip_density = esmm_pattern_density(cache->pattern);
  all->y = cache->drop_y;
  memcpy(report, all, report->size);
}
