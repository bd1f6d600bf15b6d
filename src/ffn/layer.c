/*
 * layer.c: the layer as callers hold it: options, weights, caches, and which belongs to which.
 *
 * A layer lists its caches, and a cache names its layer. The one freed first clears its entry in the other: a cache can
 * be freed after its layer, and is never taken for one of a layer that happens to lie at the same address.
 */
#include "ffn.h"

#include <stddef.h>
#include <stdio.h>
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
  esmm_ffn_opts o = {.size = sizeof o};
  esmm_status status = esmm_begin_handle(ctx, "ffn", out);
  if (status == ESMM_OK && !opts)
    status = esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts is NULL");
  if (status == ESMM_OK)
    status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK)
    status = check_opts(ctx, &o);
  if (status != ESMM_OK)
    return status;
  if (!ctx->backend->layer)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "feed-forward layers do not run here, and this is a %s context",
                     esmm_ctx_kind(ctx));
  esmm_ffn *ffn = esmm_mem_alloc(&ctx->allocator, sizeof *ffn);
  if (!ffn)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a layer");
  memset(ffn, 0, sizeof *ffn);
  ffn->allocator = ctx->allocator;
  ffn->backend = ctx->backend;
  ffn->ordinal = ctx->ordinal;
  ffn->o = o;
  ffn->d_in = o.rank1 ? o.rank1 : o.d_model;
  ffn->d_out = o.rank2 ? o.rank2 : o.d_model;
  ffn->branches = o.gated ? FFN_BRANCHES : 1;
  *out = ffn;
  return ESMM_OK;
}

/* ---- weights ---- */

/* `kept` has some of them, too: those stay. */
static void free_params(const esmm_ffn *ffn, ffn_params *p, const ffn_params *kept)
{
  const ffn_passes *passes = ffn->backend->layer;
  const struct {
    ffn_factor *mine;
    const ffn_factor *kept;
  } factors[] = {{&p->in[FFN_UP].reduce, &kept->in[FFN_UP].reduce},
                 {&p->in[FFN_UP].expand, &kept->in[FFN_UP].expand},
                 {&p->in[FFN_GATE].reduce, &kept->in[FFN_GATE].reduce},
                 {&p->in[FFN_GATE].expand, &kept->in[FFN_GATE].expand},
                 {&p->contract, &kept->contract},
                 {&p->restore, &kept->restore}};
  const struct {
    float *mine;
    const float *kept;
    int64_t n;
  } biases[] = {{p->in[FFN_UP].bias, kept->in[FFN_UP].bias, ffn->o.d_hidden},
                {p->in[FFN_GATE].bias, kept->in[FFN_GATE].bias, ffn->o.d_hidden},
                {p->b2, kept->b2, ffn->o.d_model}};
  for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
    if (factors[i].mine->prepared != factors[i].kept->prepared)
      esmm_weights_free(factors[i].mine->prepared);
  for (size_t i = 0; i < sizeof biases / sizeof *biases; i++)
    if (biases[i].mine != biases[i].kept)
      passes->release(&ffn->allocator, ffn->ordinal, biases[i].mine, (size_t)biases[i].n * sizeof(float));
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
  if (ctx->backend->memory && m->place != ESMM_DEVICE)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "%s lies in host memory; a layer on %s reads and writes the device's: copy it there "
                     "(esmm_memory_alloc, esmm_matrix_copy)",
                     what, esmm_ctx_kind(ctx));
  return ESMM_OK;
}

esmm_status esmm_ffn_check_device(esmm_ctx *ctx, const esmm_ffn *ffn)
{
  if (ctx->backend == ffn->backend && ctx->ordinal == ffn->ordinal)
    return ESMM_OK;
  char where[32];
  if (ffn->backend->numbered)
    (void)snprintf(where, sizeof where, "%s:%d", ffn->backend->name, ffn->ordinal);
  else
    (void)snprintf(where, sizeof where, "the %s", ffn->backend->kind);
  return esmm_fail(ctx, ESMM_ERR_DEVICE, "the layer is for %s, and this is a %s context", where, esmm_ctx_kind(ctx));
}

/* One of the caller's matrices and vectors, and where they go. */
typedef struct given_factor {
  const char *name;
  const esmm_matrix *given;
  bool wanted;
  int64_t rows, cols;
  size_t at; /* of its ffn_factor in ffn_params */
} given_factor;

typedef struct given_bias {
  const char *name;
  const float *given;
  bool wanted;
  int64_t n;
  size_t at; /* of its pointer in ffn_params */
} given_bias;

enum { FACTORS = 6, BIASES = 3 };

static ffn_factor *factor_at(ffn_params *p, size_t at)
{
  return (ffn_factor *)(void *)((char *)p + at);
}

static float **bias_at(ffn_params *p, size_t at)
{
  return (float **)(void *)((char *)p + at);
}

#define IN(branch, field) (offsetof(ffn_params, in) + (branch) * sizeof(ffn_branch) + offsetof(ffn_branch, field))

/* With full rank the outer matrix is the one that meets h, and there is no inner one. */
static void list_params(const esmm_ffn *ffn, const esmm_ffn_weights *w, given_factor *factors, given_bias *biases)
{
  const esmm_ffn_opts *o = &ffn->o;
  const bool low1 = o->rank1 > 0, low2 = o->rank2 > 0, gated = ffn->branches > 1;
  const int64_t outer = low1 ? o->rank1 : o->d_hidden;
  const given_factor all[FACTORS] = {
      {"weights->w1", w->w1, true, o->d_model, outer, low1 ? IN(FFN_UP, reduce) : IN(FFN_UP, expand)},
      {"weights->w1_v", w->w1_v, low1, o->rank1, o->d_hidden, IN(FFN_UP, expand)},
      {"weights->gate", w->gate, gated, o->d_model, outer, low1 ? IN(FFN_GATE, reduce) : IN(FFN_GATE, expand)},
      {"weights->gate_v", w->gate_v, gated && low1, o->rank1, o->d_hidden, IN(FFN_GATE, expand)},
      {"weights->w2", w->w2, true, o->d_hidden, ffn->d_out, offsetof(ffn_params, contract)},
      {"weights->w2_v", w->w2_v, low2, o->rank2, o->d_model, offsetof(ffn_params, restore)}};
  const given_bias vectors[BIASES] = {{"weights->b1", w->b1, true, o->d_hidden, IN(FFN_UP, bias)},
                                      {"weights->b_gate", w->b_gate, gated, o->d_hidden, IN(FFN_GATE, bias)},
                                      {"weights->b2", w->b2, true, o->d_model, offsetof(ffn_params, b2)}};
  memcpy(factors, all, sizeof all);
  memcpy(biases, vectors, sizeof vectors);
}

static esmm_status check_params(esmm_ctx *ctx, const given_factor *factors, const given_bias *biases, ffn_params *p)
{
  for (int i = 0; i < FACTORS; i++) {
    const given_factor *f = &factors[i];
    if (!f->wanted && f->given)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is given, but this layer's options have no such matrix", f->name);
    const esmm_status status =
        f->wanted ? esmm_ffn_check_shape(ctx, f->name, f->given, f->rows, f->cols, &factor_at(p, f->at)->matrix)
                  : ESMM_OK;
    if (status != ESMM_OK)
      return status;
  }
  for (int i = 0; i < BIASES; i++)
    if (!biases[i].wanted && biases[i].given)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is given, but this layer's options have no gate", biases[i].name);
  return ESMM_OK;
}

/* Copies of checked matrices. The layer's existing memory may be used again. */
static esmm_status take_params(esmm_ctx *ctx, esmm_ffn *ffn, const given_factor *factors, const given_bias *biases,
                               const esmm_prepare_opts *prepare, bool given, ffn_params *p)
{
  const ffn_passes *passes = ffn->backend->layer;
  esmm_status status = ESMM_OK;
  for (int i = 0; i < FACTORS && status == ESMM_OK; i++) {
    ffn_factor *f = factor_at(p, factors[i].at);
    if (factors[i].wanted)
      status = passes->prepare(ctx, &f->matrix, prepare, given, factor_at(&ffn->params, factors[i].at)->prepared,
                               &f->prepared);
  }
  for (int i = 0; i < BIASES && status == ESMM_OK; i++) {
    float **bias = bias_at(p, biases[i].at), *old = *bias_at(&ffn->params, biases[i].at);
    if (!biases[i].given)
      continue;
    void *memory = passes->keeps ? old : NULL;
    if (!memory)
      status = passes->alloc(ctx, (size_t)biases[i].n * sizeof(float), &memory);
    *bias = memory;
    if (status == ESMM_OK)
      status = passes->copy_bias(ctx, biases[i].given, biases[i].n, *bias);
  }
  return status;
}

esmm_status esmm_ffn_set_weights(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_ffn_weights *weights,
                                 const esmm_prepare_opts *prepare)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!ffn || !weights)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", ffn ? "weights" : "ffn");
  esmm_ffn_weights w = {.size = sizeof w};
  esmm_prepare_opts o = {.size = sizeof o};
  esmm_status status = esmm_ffn_check_device(ctx, ffn);
  if (status == ESMM_OK)
    status = esmm_take_opts(ctx, "weights", weights, sizeof w, &w);
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
  given_factor factors[FACTORS];
  given_bias biases[BIASES];
  list_params(ffn, &w, factors, biases);
  status = check_params(ctx, factors, biases, &params);
  if (status != ESMM_OK)
    return status; /* the layer keeps the weights it had */
  status = take_params(ctx, ffn, factors, biases, &o, prepare != NULL, &params);
  if (status != ESMM_OK) {
    free_params(ffn, &params, &ffn->params);
    if (ffn->backend->layer->keeps)
      ffn->generation = 0; /* some of its weights are the new ones already */
    return status;
  }
  free_params(ffn, &ffn->params, &params);
  ffn->params = params;
  ffn->in_place = prepare == NULL;
  ffn->generation = ++ffn->weights_set;
  if (ffn->own && ffn->backend->layer->renew && ffn->in_place)
    status = ffn->backend->layer->renew(ctx, ffn, ffn->own);
  if (status != ESMM_OK)
    ffn->generation = 0;
  return status;
}

void esmm_ffn_free(esmm_ffn *ffn)
{
  if (!ffn)
    return;
  esmm_ffn_cache_free(ffn->own);
  for (esmm_ffn_cache *cache = ffn->caches; cache; cache = cache->next)
    cache->ffn = NULL;
  free_params(ffn, &ffn->params, &(ffn_params){0});
  const esmm_allocator allocator = ffn->allocator;
  esmm_mem_free(&allocator, ffn, sizeof *ffn);
}

/* ---- caches ---- */

esmm_status esmm_ffn_cache_create(esmm_ctx *ctx, esmm_ffn *ffn, esmm_ffn_cache **out)
{
  esmm_status status = esmm_begin_handle(ctx, "cache", out);
  if (status == ESMM_OK)
    status = ffn ? esmm_ffn_check_device(ctx, ffn) : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "ffn is NULL");
  if (status != ESMM_OK)
    return status;
  esmm_ffn_cache *cache = esmm_mem_alloc(&ctx->allocator, sizeof *cache);
  if (!cache)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a cache");
  memset(cache, 0, sizeof *cache);
  cache->allocator = ctx->allocator;
  cache->passes = ffn->backend->layer;
  cache->ordinal = ffn->ordinal;
  cache->on_device = ffn->backend->memory;
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
  if (cache->passes->forget)
    cache->passes->forget(cache); /* first: the device is there as long as some of its memory is */
  for (int i = 0; i < FFN_BUFFERS; i++)
    cache->passes->release(&allocator, cache->ordinal, cache->buffers[i].data, cache->buffers[i].bytes);
  for (int i = 0; i < FFN_BS; i++)
    esmm_weights_free(cache->b[i]);
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
  esmm_status status = cache->passes->may_alloc ? cache->passes->may_alloc(ctx) : ESMM_OK;
  if (status != ESMM_OK)
    return status;
  cache->passes->release(&cache->allocator, cache->ordinal, b->data, b->bytes); /* the caller fills it anew */
  *b = (ffn_buffer){0};
  if (buffer == FFN_TOKENS)
    cache->shuffled = 0;
  if (buffer == FFN_TURNED)
    cache->turned = 0;
  status = cache->passes->alloc(ctx, bytes, &b->data);
  b->bytes = status == ESMM_OK ? bytes : 0;
  return status;
}

esmm_matrix esmm_ffn_view(const esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols, esmm_dtype dtype)
{
  return (esmm_matrix){.data = cache->buffers[buffer].data,
                       .rows = rows,
                       .cols = cols,
                       .ld = cols,
                       .dtype = dtype,
                       .place = cache->on_device ? ESMM_DEVICE : ESMM_HOST,
                       .device = cache->on_device ? cache->ordinal : 0};
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

esmm_status esmm_ffn_fill_report(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool forward,
                                 esmm_ffn_report *report)
{
  const esmm_status status = cache->passes->report(ctx, ffn, cache);
  if (status != ESMM_OK)
    return status;
  const double elements = (double)cache->tokens * (double)ffn->o.d_hidden;
  esmm_ffn_report all = {.size = report->size,
                         .tokens = cache->tokens,
                         .alive_columns = cache->alive_columns,
                         .sparse_columns = cache->sparse,
                         .sparse_share = (double)cache->sparse / (double)ffn->o.d_hidden,
                         .strip_rows = FFN_STRIP,
                         .element_density = elements > 0 ? (double)cache->nonzeros / elements : 0.0,
                         .strip_density = cache->strip_density,
                         .y = cache->drops[FFN_DROP_Y]};
  if (!forward) {
    all.dx = cache->drops[FFN_DROP_DX];
    all.dw1 = cache->drops[FFN_DROP_DW1];
    all.dgate = cache->drops[FFN_DROP_DGATE];
    all.dw2 = cache->drops[FFN_DROP_DW2];
  }
  memcpy(report, &all, report->size);
  return ESMM_OK;
}
