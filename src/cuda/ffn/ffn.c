/*
 * ffn.c: a layer's passes on a GPU (ffn/passes.h): launches of ffn.cu on the context's stream. Only the report waits,
 * and a shape's first pass, which allocates.
 *
 * Products read weights and activations as they lie (ops/borrow.c). Gradients between products are of the layer's
 * dtype, which is what the tensor cores multiply; sums of biases and of the report are float64.
 */
#include "cuda/ffn/ffn.h"

#include "cuda/cuda.h"
#include "cuda/ffn/ffn_decode.h"
#include "cuda/ffn/params.h"
#include "cuda/ffn/sparse.h"
#include "cuda/ops/borrow.h"
#include "ffn/ffn.h"

#include <math.h>

#define LOOK_EVERY 8    /* passes, where few features were dead */
#define MOST_ROWS 65535 /* blocks along y */

_Static_assert(ESMM_FFN_DROPS == FFN_DROPS, "the notes have a record for each drop");

ESMM_FATBIN(ffn);

/* One launch, between begin and end. */
static esmm_status launch(esmm_ctx *ctx, const esmm_cuda_function *function, esmm_launch how, const void *params)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, esmm_cuda_launch(ctx, function, &how, ctx->stream, params))
                           : status;
}

static esmm_status zero(esmm_ctx *ctx, uint64_t at, size_t bytes)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, esmm_cuda_zero(ctx, at, bytes, ctx->stream)) : status;
}

/* ---- memory ---- */

static esmm_status alloc(esmm_ctx *ctx, size_t bytes, void **memory)
{
  CUdeviceptr at = 0;
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_end(ctx, ctx->stream, esmm_cuda_alloc(ctx, bytes, &at));
  *memory = esmm_cuda_pointer(at);
  return status;
}

/* A graph has the addresses of what its passes use: passes of another size would give that memory away. */
static esmm_status admit(esmm_ctx *ctx, esmm_ffn_cache *cache, int64_t tokens)
{
  if (cache->in_graph && tokens != cache->graph_tokens)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "the cache belongs to a graph that was captured with %lld tokens, and this pass has %lld: make "
                     "another cache",
                     (long long)cache->graph_tokens, (long long)tokens);
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream); /* which asks whether the stream is captured */
  if (status != ESMM_OK)
    return status;
  if (esmm_cuda_capturing(ctx)) {
    cache->in_graph = true;
    cache->graph_tokens = tokens;
  }
  return esmm_cuda_end(ctx, ctx->stream, ESMM_OK);
}

static esmm_status may_alloc(esmm_ctx *ctx)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  return esmm_cuda_end(ctx, ctx->stream,
                       esmm_cuda_refuse_capture(ctx, "a layer's pass that needs more memory than those before"));
}

static void release(const esmm_allocator *allocator, int ordinal, void *memory, size_t bytes)
{
  (void)allocator;
  (void)bytes;
  if (memory)
    esmm_cuda_free_at(ordinal, esmm_ffn_address(memory));
}

static esmm_matrix vector(const esmm_ctx *ctx, const float *data, int64_t n)
{
  return (esmm_matrix){.data = esmm_cuda_pointer(esmm_ffn_address(data)),
                       .rows = 1,
                       .cols = n,
                       .ld = n,
                       .place = ESMM_DEVICE,
                       .device = ctx->ordinal};
}

static esmm_status copy_bias(esmm_ctx *ctx, const float *from, int64_t n, float *to)
{
  const esmm_matrix src = vector(ctx, from, n);
  esmm_matrix dst = vector(ctx, to, n);
  return esmm_cuda_matrix_copy(ctx, &src, &dst);
}

/* ---- B of products ---- */

/* With the caller's options B is prepared, which waits. A B that lies transposed is copied: products skip zeros only
   with B's rows, and A may be of another dtype. */
static esmm_status prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, bool given,
                           esmm_weights *old, esmm_weights **out)
{
  return given ? esmm_prepare(ctx, b, opts, out) : esmm_cuda_borrow(ctx, b, ESMM_F32, old, out);
}

static esmm_status take_b(esmm_ctx *ctx, esmm_ffn_cache *cache, ffn_b which, const esmm_matrix *b, esmm_dtype a,
                          bool strict, esmm_weights **out)
{
  (void)strict; /* all zeros are multiplied, but where the product finds them in A */
  esmm_weights *old = cache->b[which];
  const esmm_status status = esmm_cuda_borrow(ctx, b, a, old, &cache->b[which]);
  *out = cache->b[which];
  if (*out != old)
    esmm_weights_free(old);
  return status;
}

static void put_back(esmm_ffn_cache *cache, ffn_b which, esmm_weights *w)
{
  (void)cache;
  (void)which;
  (void)w; /* the cache keeps it */
}

/* ---- elementwise ---- */

static esmm_status activate(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *up, const esmm_matrix *gate,
                            esmm_matrix *h)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_activate", 0};
  const esmm_ffn_activate_params params = {.up = esmm_ffn_address(up->data),
                                           .gate = gate ? esmm_ffn_address(gate->data) : 0,
                                           .h = esmm_ffn_address(h->data),
                                           .count = h->rows * h->cols,
                                           .dtype = (int32_t)h->dtype,
                                           .activation = (int32_t)ffn->o.activation};
  if (params.count == 0)
    return ESMM_OK;
  const int64_t pieces = esmm_ceil_div(params.count, 8 * ESMM_FFN_THREADS);
  return launch(ctx, &function, (esmm_launch){.grid_x = esmm_cuda_blocks_for(ctx, pieces), .threads = ESMM_FFN_THREADS},
                &params);
}

static esmm_status derive(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const ffn_derivative *job)
{
  static const esmm_cuda_function of_relu = {&fatbin_ffn, "esmm_ffn_derive", 0},
                                  smooth = {&fatbin_ffn, "esmm_ffn_derive_smooth", 0};
  const esmm_cuda_function *function = ffn_makes_zeros(ffn) ? &of_relu : &smooth;
  (void)cache;
  const esmm_ffn_derive_params params = {.d = esmm_ffn_address(job->dpre->data),
                                         .d_gate = job->dpre_gate ? esmm_ffn_address(job->dpre_gate->data) : 0,
                                         .h = job->up ? 0 : esmm_ffn_address(job->h->data),
                                         .up = job->up ? esmm_ffn_address(job->up->data) : 0,
                                         .gate = job->gate ? esmm_ffn_address(job->gate->data) : 0,
                                         .order = esmm_ffn_address(job->order),
                                         .count = job->count,
                                         .rows = job->dpre->rows,
                                         .cols = job->dpre->cols,
                                         .all = ffn->o.d_hidden,
                                         .dtype = (int32_t)job->dpre->dtype,
                                         .activation = (int32_t)ffn->o.activation};
  if (params.rows == 0 || params.cols == 0)
    return ESMM_OK;
  const int64_t pieces = esmm_ceil_div(params.rows * params.cols, 8 * ESMM_FFN_THREADS);
  esmm_launch how = {.grid_x = esmm_cuda_blocks_for(ctx, pieces), .threads = ESMM_FFN_THREADS};
  if (job->order && job->up) {
    how.grid_x = esmm_cuda_blocks_for(ctx, esmm_ceil_div(params.cols, ESMM_FFN_THREADS));
    how.grid_y = (unsigned)esmm_min(params.rows, MOST_ROWS);
  }
  return launch(ctx, function, how, &params);
}

/* ---- sums ---- */

/* Sums of m's columns, or how many of each are above zero. Between begin and end. */
static esmm_status sum(esmm_ctx *ctx, const esmm_ffn_sum_params *params)
{
  static const esmm_cuda_function part = {&fatbin_ffn, "esmm_ffn_sum", 0}, end = {&fatbin_ffn, "esmm_ffn_sum_end", 0};
  const int64_t cols = esmm_ceil_div(params->m.cols, ESMM_FFN_SUM_COLS);
  esmm_status status = ESMM_OK;
  if (params->chunks > 0)
    status = esmm_cuda_launch(
        ctx, &part,
        &(esmm_launch){.grid_x = (unsigned)cols, .grid_y = (unsigned)params->chunks, .threads = ESMM_FFN_THREADS},
        ctx->stream, params);
  return status == ESMM_OK ? esmm_cuda_launch_blocks(ctx, &end, cols, ESMM_FFN_THREADS, ctx->stream, params) : status;
}

/* out: fp32, or with `open` int32. */
static esmm_status sum_columns(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *m, esmm_ffn_sum_params params)
{
  params.m = esmm_cuda_matrix(m);
  params.chunks = esmm_ceil_div(m->rows, ESMM_FFN_SUM_ROWS);
  if (m->cols == 0)
    return ESMM_OK;
  if (params.chunks > MOST_ROWS)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%lld tokens are more than a layer on a GPU sums at once, %lld",
                     (long long)m->rows, (long long)MOST_ROWS * ESMM_FFN_SUM_ROWS);
  esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_PARTIAL, params.chunks, m->cols, sizeof(double));
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  params.partial = esmm_ffn_buffer(cache, FFN_PARTIAL);
  return esmm_cuda_end(ctx, ctx->stream, sum(ctx, &params));
}

static esmm_status column_sums(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *m, const int32_t *order,
                               int64_t count, int64_t n, float *out, bool add)
{
  esmm_status status = ESMM_OK;
  if (order && !add) /* columns that are not there */
    status = zero(ctx, esmm_ffn_address(out), (size_t)n * sizeof *out);
  const esmm_ffn_sum_params params = {
      .out = esmm_ffn_address(out), .order = esmm_ffn_address(order), .count = count, .add = add};
  return status == ESMM_OK ? sum_columns(ctx, cache, m, params) : status;
}

/* ---- lines and elements by an index ---- */

/* src and dst are row-major. */
static esmm_status pick(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *index, int64_t count, bool elements,
                        const esmm_matrix *dst, bool add)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_pick", 0};
  const esmm_ffn_pick_params params = {.src = esmm_cuda_matrix(src),
                                       .dst = esmm_cuda_matrix(dst),
                                       .index = esmm_ffn_address(index),
                                       .count = count,
                                       .elements = elements,
                                       .add = add};
  if (dst->rows == 0 || dst->cols == 0)
    return ESMM_OK;
  const bool alike = !add && src->dtype == dst->dtype;
  const int64_t rows = alike && elements ? esmm_ceil_div(dst->rows, ESMM_FFN_PICK_ROWS) : dst->rows;
  const int64_t each = alike && !elements ? 16 / (int64_t)esmm_dtype_size(dst->dtype) : 1;
  const esmm_launch how = {.grid_x = esmm_cuda_blocks_for(ctx, esmm_ceil_div(dst->cols, each * ESMM_FFN_THREADS)),
                           .grid_y = (unsigned)esmm_min(rows, MOST_ROWS),
                           .threads = ESMM_FFN_THREADS};
  return launch(ctx, &function, how, &params);
}

static esmm_status gather_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                               esmm_matrix *dst)
{
  return pick(ctx, src, order, count, false, dst, false);
}

static esmm_status gather_columns(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                  esmm_matrix *dst)
{
  return pick(ctx, src, order, count, true, dst, false);
}

/* Rows of a col-major matrix are elements of its lines. */
static esmm_status scatter_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *places, esmm_matrix *dst,
                                bool add)
{
  if (dst->order == ESMM_ROW_MAJOR)
    return pick(ctx, src, places, dst->rows, false, dst, add);
  const esmm_matrix from = ffn_transposed(*src), to = ffn_transposed(*dst);
  return pick(ctx, &from, places, dst->rows, true, &to, add);
}

/* ---- statistics ---- */

/* Only split mode ranks by h's nonzeros: the product counts alive features, or they are those with an open gate. */
static esmm_status count(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  if (ffn->o.mode != ESMM_FFN_SPLIT)
    return ESMM_OK;
  const esmm_matrix h = esmm_ffn_view(cache, FFN_H, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
  const esmm_problem counted = {
      .ctx = ctx, .m = h.rows, .n = h.cols, .c = h, .nonzeros = cache->buffers[FFN_COUNTS].data};
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_tally_begin(ctx, &counted, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_tally(ctx, &counted, (esmm_selector){0}, ctx->stream);
  return esmm_cuda_end(ctx, ctx->stream, status);
}

esmm_status esmm_ffn_cuda_reserve_zeros(esmm_ctx *ctx, esmm_ffn_cache *cache, int which, size_t bytes, size_t zeros)
{
  if (cache->buffers[which].data && cache->buffers[which].bytes >= bytes)
    return ESMM_OK;
  esmm_status status = esmm_ffn_reserve(ctx, cache, which, 1, (int64_t)bytes, 1);
  if (status != ESMM_OK)
    return status;
  status = zero(ctx, esmm_ffn_buffer(cache, which), zeros);
  if (status != ESMM_OK) {
    esmm_cuda_free_at(cache->ordinal, esmm_ffn_buffer(cache, which));
    cache->buffers[which] = (ffn_buffer){0};
  }
  return status;
}

/* Notes are there, and 0 at first. */
static esmm_status reserve_notes(esmm_ctx *ctx, esmm_ffn_cache *cache)
{
  return esmm_ffn_cuda_reserve_zeros(ctx, cache, FFN_NOTES, sizeof(esmm_ffn_notes), sizeof(esmm_ffn_notes));
}

/* The order is made on the host: once for a number of tokens. */
static esmm_status shuffle(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const size_t bytes = (size_t)cache->tokens * sizeof(int32_t);
  if (cache->shuffled == cache->tokens || cache->tokens == 0)
    return ESMM_OK;
  int32_t *order = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!order)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the order of %lld tokens", (long long)cache->tokens);
  esmm_ffn_shuffle_tokens(ffn->o.seed, cache->tokens, order);
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream,
                           esmm_cuda_to_device(ctx, esmm_ffn_buffer(cache, FFN_TOKENS), order, bytes, ctx->stream));
  esmm_mem_free(&ctx->allocator, order, bytes);
  if (status == ESMM_OK)
    cache->shuffled = cache->tokens;
  return status;
}

/* Only where some columns go sparse and others not. */
static bool is_split(const esmm_ffn *ffn)
{
  return ffn->o.mode == ESMM_FFN_SPLIT;
}

/* What a cache keeps beside its buffers: how many features were alive, as the device reports. */
typedef struct kept {
  esmm_allocator allocator;
  uint64_t *mailbox; /* pinned: pass << 32 | alive; 0: no report yet */
  CUdeviceptr mailbox_at;
  CUevent ranked; /* behind the last launch that reports */
  uint32_t pass;  /* of that launch, */
  bool expected;  /* and its report is to be read */
  bool whole;     /* a pass has worked on all features: there is room for one in a graph */
  bool many_dead; /* in the last pass that was looked at before this one */
  int passes;     /* that were not looked at since */
} kept;

static void forget(esmm_ffn_cache *cache)
{
  kept *k = cache->device;
  if (!k)
    return;
  const esmm_allocator allocator = k->allocator;
  esmm_cuda_event_free_at(cache->ordinal, k->ranked);
  esmm_cuda_unpin_at(cache->ordinal, k->mailbox);
  esmm_mem_free(&allocator, k, sizeof *k);
  cache->device = NULL;
}

/* Between begin and end. */
static esmm_status make_kept(esmm_ctx *ctx, esmm_ffn_cache *cache)
{
  if (cache->device)
    return ESMM_OK;
  kept *k = esmm_mem_alloc(&ctx->allocator, sizeof *k);
  if (!k)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a layer's cache");
  *k = (kept){.allocator = ctx->allocator};
  cache->device = k;
  void *host = NULL;
  esmm_status status = esmm_cuda_event_create(ctx, &k->ranked);
  if (status == ESMM_OK && !esmm_cuda_pin(sizeof *k->mailbox, &host, &k->mailbox_at))
    status = esmm_fail(ctx, ESMM_ERR_MEMORY, "no pinned memory for a layer's cache");
  k->mailbox = host;
  if (status == ESMM_OK)
    *k->mailbox = 0;
  else
    forget(cache);
  return status;
}

/* Between begin and end. Captured steps do not report the count: the host cannot read it. */
static esmm_status launch_rank(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool order)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_rank", 0};
  const bool reports = order && !esmm_cuda_capturing(ctx);
  esmm_ffn_rank_params params = {.counts = esmm_ffn_buffer(cache, FFN_COUNTS),
                                 .open = esmm_ffn_buffer(cache, ffn->branches > 1 ? FFN_OPEN : FFN_COUNTS),
                                 .features = ffn->o.d_hidden,
                                 .sparse = cache->sparse,
                                 .pass = (uint32_t)cache->runs};
  esmm_status status = reports ? make_kept(ctx, cache) : ESMM_OK;
  if (status != ESMM_OK)
    return status;
  kept *k = cache->device;
  if (k)
    k->expected = false;
  if (is_split(ffn)) {
    params.columns = esmm_ffn_buffer(cache, FFN_COLUMNS);
    params.others = esmm_ffn_buffer(cache, FFN_OTHERS);
  }
  if (order) {
    params.order = esmm_ffn_buffer(cache, FFN_ORDER);
    params.places = esmm_ffn_buffer(cache, FFN_PLACES);
  }
  if (reports)
    params.mailbox = k->mailbox_at;
  status = esmm_cuda_launch(ctx, &function, &(esmm_launch){.threads = ESMM_FFN_RANK_THREADS}, ctx->stream, &params);
  if (status == ESMM_OK && reports)
    status = esmm_cuda_event_record(ctx, k->ranked, ctx->stream);
  if (status == ESMM_OK && reports) {
    k->pass = params.pass;
    k->expected = true;
  }
  return status;
}

static esmm_status rank(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  const bool order = cache->looked;
  esmm_status status = reserve_notes(ctx, cache);
  if (status == ESMM_OK && ffn->o.permute_tokens && !once)
    status = shuffle(ctx, ffn, cache);
  if (status == ESMM_OK && is_split(ffn))
    status = esmm_ffn_reserve(ctx, cache, FFN_OTHERS, 1, ffn->o.d_hidden, sizeof(int32_t));
  if (status == ESMM_OK && order)
    status = esmm_ffn_reserve(ctx, cache, FFN_PLACES, 1, ffn->o.d_hidden, sizeof(int32_t));
  if (status == ESMM_OK && order && ffn->branches > 1) {
    const esmm_matrix gate = esmm_ffn_view(cache, FFN_PRE_GATE, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
    status = sum_columns(
        ctx, cache, &gate,
        (esmm_ffn_sum_params){.out = esmm_ffn_buffer(cache, FFN_OPEN), .count = ffn->o.d_hidden, .open = 1});
  }
  if (status != ESMM_OK || (!order && !is_split(ffn)))
    return status;
  status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, launch_rank(ctx, ffn, cache, order)) : status;
}

/* Between begin and end: waits for the last report. Without one, all are alive. */
static esmm_status read_mailbox(esmm_ctx *ctx, const esmm_ffn *ffn, kept *k, int64_t *alive)
{
  const esmm_status status = esmm_cuda_event_wait(ctx, k->ranked);
  if (status != ESMM_OK)
    return status;
  const uint64_t word = *(const volatile uint64_t *)k->mailbox;
  const int64_t count = (int64_t)(word & UINT32_MAX);
  *alive = (uint32_t)(word >> 32) == k->pass && count <= ffn->o.d_hidden ? count : ffn->o.d_hidden;
  return ESMM_OK;
}

/* Between begin and end. */
static esmm_status find_alive(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  kept *k = cache->device;
  if (esmm_cuda_capturing(ctx) || !k || !k->expected)
    return ESMM_OK;
  const bool first = !k->whole;
  k->whole = true;
  return first || !k->many_dead ? ESMM_OK : read_mailbox(ctx, ffn, k, &cache->alive);
}

/* Every LOOK_EVERY-th pass, or each where the last one had many dead features. What the next pass does depends on what
   this one has found, not on when that is known. Passes of a graph do not report. */
static esmm_status looks(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool *out)
{
  kept *k = cache->device;
  int64_t alive = 0;
  *out = !cache->in_graph; /* that one's memory is for all features */
  if (!*out || !k)
    return ESMM_OK;
  if (k->expected) {
    esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_end(ctx, ctx->stream, read_mailbox(ctx, ffn, k, &alive));
    if (status != ESMM_OK)
      return status;
    k->many_dead = (double)alive <= FFN_COMPACT * (double)ffn->o.d_hidden;
    k->expected = false;
    k->passes = 0;
  }
  *out = k->many_dead || ++k->passes >= LOOK_EVERY;
  return ESMM_OK;
}

/*
 * The number of alive features decides how large products are, so the host waits for it; it comes before y: the GPU
 * makes all of y meanwhile. The host does not wait in a cache's first pass, where the last report had few dead
 * features, nor in a graph: all count as alive then.
 */
static esmm_status settle(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  cache->alive = ffn->o.d_hidden;
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, find_alive(ctx, ffn, cache)) : status;
}

/* ---- 2:4 ---- */

static esmm_status forget_drops(esmm_ctx *ctx, esmm_ffn_cache *cache, bool forward)
{
  const esmm_status status = reserve_notes(ctx, cache);
  const size_t each = sizeof(esmm_ffn_record), at = forward ? FFN_DROP_Y * each : FFN_DROP_DX * each;
  _Static_assert(FFN_DROP_Y == 0 && FFN_DROP_DX == 1, "y's comes first");
  return status == ESMM_OK
             ? zero(ctx, esmm_ffn_buffer(cache, FFN_NOTES) + at, forward ? each : (FFN_DROPS - FFN_DROP_DX) * each)
             : status;
}

/* ---- the report: waits ---- */

static esmm_ffn_drop drop_of(const esmm_ffn_record *r)
{
  return (esmm_ffn_drop){.kept = (int64_t)r->kept,
                         .dropped = (int64_t)r->dropped,
                         .norm = sqrt(r->norm),
                         .norm_dropped = sqrt(r->difference)};
}

/* Between begin and end. */
static esmm_status read_notes(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, esmm_ffn_notes *notes)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_densities", 0};
  const uint64_t at = esmm_ffn_buffer(cache, FFN_NOTES);
  const esmm_ffn_densities_params params = {.h = esmm_ffn_buffer(cache, FFN_H),
                                            .notes = at,
                                            .tokens = cache->tokens,
                                            .features = ffn->o.d_hidden,
                                            .strip_rows = FFN_STRIP,
                                            .dtype = (int32_t)ffn->o.dtype};
  esmm_status status = esmm_cuda_refuse_capture(ctx, "a layer's report");
  if (status == ESMM_OK)
    status = esmm_cuda_zero(ctx, at + offsetof(esmm_ffn_notes, strips), 3 * sizeof(uint64_t), ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_launch_blocks(ctx, &function,
                                     esmm_cuda_blocks_for(ctx, esmm_ceil_div(params.features, ESMM_FFN_THREADS)),
                                     ESMM_FFN_THREADS, ctx->stream, &params);
  return status == ESMM_OK ? esmm_cuda_to_host(ctx, notes, at, sizeof *notes, ctx->stream) : status;
}

static esmm_status report(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  esmm_ffn_notes notes = {0};
  esmm_status status = reserve_notes(ctx, cache);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, read_notes(ctx, ffn, cache, &notes));
  if (status != ESMM_OK)
    return status;
  const double strips = (double)esmm_ceil_div(cache->tokens, FFN_STRIP) * (double)ffn->o.d_hidden;
  cache->alive_columns = (int64_t)notes.alive_columns;
  cache->nonzeros = (int64_t)notes.nonzeros;
  cache->strip_density = strips > 0.0 ? (double)notes.strips / strips : 0.0;
  for (int i = 0; i < FFN_DROPS; i++)
    cache->drops[i] = drop_of(&notes.drops[i]);
  return ESMM_OK;
}

const ffn_passes esmm_ffn_cuda = {
    .turned = true,
    .alike = true,
    .keeps = true,
    .compacts = 1u << ESMM_FFN_EXACT,
    .looks = looks,
    .admit = admit,
    .may_alloc = may_alloc,
    .step = ESMM_TILE,
    .alloc = alloc,
    .release = release,
    .copy_bias = copy_bias,
    .prepare = prepare,
    .take_b = take_b,
    .put_back = put_back,
    .activate = activate,
    .count = count,
    .rank = rank,
    .can_decode = esmm_cuda_ffn_can_decode,
    .decode = esmm_cuda_ffn_decode,
    .renew = esmm_cuda_ffn_renew,
    .derive = derive,
    .settle = settle,
    .gather_rows = gather_rows,
    .gather_columns = gather_columns,
    .scatter_rows = scatter_rows,
    .forget = forget,
    .sparsify = esmm_ffn_cuda_sparsify,
    .multiply_sparse = esmm_ffn_cuda_multiply_sparse,
    .forget_drops = forget_drops,
    .column_sums = column_sums,
    .report = report,
};
