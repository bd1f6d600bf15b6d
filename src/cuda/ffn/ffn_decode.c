/*
 * ffn_decode.c: a gated layer's second half for few tokens on a GPU, in one launch (ffn_decode.cu). The layer has made
 * the gate (ffn/forward.c); of the other two weights only what it lets through is read.
 *
 * W1 is read feature by feature. Where it lies column-major, as nn.Linear stores it, it is read as it lies; else the
 * layer's own cache keeps a copy that is turned round, made by the first such pass and renewed whenever weights are
 * set. All memory is for the most tokens that there may be, so that graphs of passes of different sizes can live beside
 * each other.
 */
#include "cuda/ffn/ffn_decode.h"

#include "cuda/cuda.h"
#include "cuda/ffn/decode_params.h"
#include "cuda/ffn/ffn.h"
#include "ffn/ffn.h"

#define ALIGN 256

_Static_assert(ESMM_FFN_DECODE_TOKENS == FFN_DECODE_TOKENS, "what the layer asks for");

ESMM_FATBIN(ffn_decode);

/* By dtype (bf16, f16) and how many tokens and values of the model there is room for. */
typedef struct variant {
  esmm_cuda_function function[2];
  int64_t tokens, model;
  int halves;
} variant;

#define MOST_SHARED 231424 /* 226 KB: a block has some that is static */
#define FUNCTION(name)                    \
  {                                       \
    &fatbin_ffn_decode, name, MOST_SHARED \
  }
#define TURN (ESMM_FFN_DECODE_WARPS * ESMM_FFN_DECODE_K)
static const variant variants[] = {
    {{FUNCTION("esmm_ffn_decode_bf16_8"), FUNCTION("esmm_ffn_decode_f16_8")}, 8, TURN, 1},
    {{FUNCTION("esmm_ffn_decode_bf16_16"), FUNCTION("esmm_ffn_decode_f16_16")}, 16, TURN, 2},
    {{FUNCTION("esmm_ffn_decode_bf16_8_wide"), FUNCTION("esmm_ffn_decode_f16_8_wide")},
     8,
     ESMM_FFN_DECODE_SUBS *TURN,
     1}};

static const variant *find_variant(int64_t tokens, int64_t model)
{
  for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
    if (tokens <= variants[i].tokens && model <= variants[i].model)
      return &variants[i];
  return NULL;
}

/* ---- how it is cut, and where things lie ---- */

typedef struct cut {
  int64_t blocks, tiles, parts;
  int64_t line, share, list;
  size_t shared;
} cut;

/* For the layer, or for passes of a variant. */
static cut find_cut(const esmm_ctx *ctx, const esmm_ffn *ffn, const variant *v)
{
  cut c = {.blocks = esmm_cuda_get(ctx)->multiprocessors,
           .tiles = esmm_ceil_div(ffn->o.d_model, ESMM_FFN_DECODE_COLS),
           .line = esmm_round_up(ffn->o.d_hidden, 32)};
  c.parts = c.blocks / c.tiles;
  if (c.parts == 0)
    return c;
  const int64_t steps = esmm_ceil_div(ffn->o.d_hidden, ESMM_FFN_DECODE_STEP);
  c.share = esmm_round_up(esmm_ceil_div(ffn->o.d_hidden, c.blocks), 8);
  c.list = esmm_ceil_div(steps, c.parts) * ESMM_FFN_DECODE_STEP;
  c.shared = ESMM_FFN_DECODE_RING + (size_t)ESMM_FFN_DECODE_SUMS(v->halves) +
             (size_t)(c.share + c.list) * sizeof(uint16_t) + (size_t)c.line / 8;
  return c;
}

/* In FFN_DECODE; the first `meeting` bytes are zeros when it is made. */
typedef struct layout {
  size_t meeting, bits, gate, h, partial, bytes;
} layout;

static bool lay_out(const cut *c, layout *l)
{
  size_t lines, sums;
  *l = (layout){.meeting = (ESMM_FFN_DECODE_TICKETS + (size_t)c->tiles) * sizeof(uint32_t)};
  l->bytes = (l->meeting + ALIGN - 1) / ALIGN * ALIGN;
  return esmm_size_mul((size_t)c->line, ESMM_FFN_DECODE_TOKENS * sizeof(uint16_t), &lines) &&
         esmm_size_mul((size_t)(c->tiles * c->parts), ESMM_FFN_DECODE_TOKENS * ESMM_FFN_DECODE_COLS * sizeof(float),
                       &sums) &&
         esmm_cuda_reserve(&l->bytes, (size_t)c->line / 8, ALIGN, &l->bits) &&
         esmm_cuda_reserve(&l->bytes, lines, ALIGN, &l->gate) && esmm_cuda_reserve(&l->bytes, lines, ALIGN, &l->h) &&
         esmm_cuda_reserve(&l->bytes, sums, ALIGN, &l->partial);
}

/* ---- W1, feature by feature ---- */

static bool lies_turned(const esmm_matrix *w1)
{
  return w1->order == ESMM_COL_MAJOR && esmm_cuda_in_lines(w1);
}

static esmm_matrix turned_copy(const esmm_ffn *ffn, const esmm_ffn_cache *cache)
{
  esmm_matrix m = esmm_ffn_view(cache, FFN_TURNED, ffn->o.d_model, ffn->o.d_hidden, ffn->o.dtype);
  m.order = ESMM_COL_MAJOR;
  m.ld = ffn->o.d_model;
  return m;
}

static esmm_status turn(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const esmm_matrix rows = esmm_cuda_weights_rows(ffn->params.in[FFN_UP].expand.prepared);
  const esmm_matrix turned = turned_copy(ffn, cache);
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, esmm_cuda_convert(ctx, &rows, &turned, (esmm_selector){0}, ctx->stream));
  cache->turned = status == ESMM_OK ? ffn->generation : 0;
  return status;
}

/* ---- can it be done? ---- */

static bool is_rows(const esmm_ffn *ffn, const esmm_weights *w)
{
  return w->dtype == ffn->o.dtype && w->forms & ESMM_FORM(ROWS16) && esmm_cuda_of(w)->borrowed &&
         esmm_cuda_of(w)->rows_ld % ESMM_FFN_DECODE_HALF == 0;
}

static bool fits(const esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *x)
{
  const esmm_cuda_properties *gpu = esmm_cuda_get(ctx);
  const variant *v = find_variant(x->rows, ffn->o.d_model);
  if (!v || !esmm_dtype_is_16bit(ffn->o.dtype) || ffn->o.d_model % 8 != 0 ||
      ffn->o.d_hidden > ESMM_FFN_DECODE_MOST_FEATURES || gpu->sm < 80 || !gpu->cooperative)
    return false;
  if (x->dtype != ffn->o.dtype || x->order != ESMM_ROW_MAJOR || !esmm_cuda_in_lines(x))
    return false;
  if (!is_rows(ffn, ffn->params.in[FFN_UP].expand.prepared) || !is_rows(ffn, ffn->params.contract.prepared))
    return false;
  const cut c = find_cut(ctx, ffn, v);
  return c.parts > 0 && (int64_t)c.shared <= esmm_min(MOST_SHARED, gpu->shared_per_block);
}

esmm_status esmm_cuda_ffn_can_decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                                     esmm_matrix *gate)
{
  layout l;
  gate->data = NULL;
  if (!fits(ctx, ffn, x))
    return ESMM_OK;
  const cut c = find_cut(ctx, ffn, find_variant(x->rows, ffn->o.d_model));
  if (!lay_out(&c, &l))
    return ESMM_OK;
  /* The same for all passes. */
  esmm_status status = esmm_ffn_cuda_reserve_zeros(ctx, cache, FFN_DECODE, l.bytes, l.meeting);
  if (status == ESMM_OK && !lies_turned(&ffn->params.in[FFN_UP].expand.matrix)) {
    status = esmm_ffn_reserve(ctx, cache, FFN_TURNED, ffn->o.d_hidden, ffn->o.d_model, sizeof(uint16_t));
    if (status == ESMM_OK && cache->turned != ffn->generation)
      status = turn(ctx, ffn, cache);
  }
  if (status != ESMM_OK)
    return status;
  *gate = (esmm_matrix){.data = esmm_cuda_pointer(esmm_ffn_buffer(cache, FFN_DECODE) + l.gate),
                        .rows = x->rows,
                        .cols = ffn->o.d_hidden,
                        .ld = c.line,
                        .dtype = ffn->o.dtype,
                        .place = ESMM_DEVICE,
                        .device = cache->ordinal};
  return ESMM_OK;
}

/* ---- the pass ---- */

esmm_status esmm_cuda_ffn_decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                                 const esmm_matrix *gate, esmm_matrix *h, esmm_matrix *y)
{
  const variant *v = find_variant(x->rows, ffn->o.d_model);
  const cut c = find_cut(ctx, ffn, v);
  const esmm_weights *down = ffn->params.contract.prepared;
  const esmm_matrix *w1 = &ffn->params.in[FFN_UP].expand.matrix;
  const esmm_matrix up = lies_turned(w1) ? *w1 : turned_copy(ffn, cache);
  const CUdeviceptr memory = esmm_ffn_buffer(cache, FFN_DECODE);
  layout l;
  (void)lay_out(&c, &l); /* it did before */
  h->data = NULL;
  const esmm_ffn_decode_params params = {.x = esmm_cuda_matrix(x),
                                         .y = esmm_cuda_matrix(y),
                                         .gate = esmm_cuda_address(gate),
                                         .up = esmm_cuda_address(&up),
                                         .down = esmm_cuda_of(down)->rows,
                                         .up_ld = up.ld,
                                         .down_ld = esmm_cuda_of(down)->rows_ld,
                                         .b1 = (uint64_t)(uintptr_t)ffn->params.in[FFN_UP].bias,
                                         .b2 = (uint64_t)(uintptr_t)ffn->params.b2,
                                         .h = memory + l.h,
                                         .bits = memory + l.bits,
                                         .partial = memory + l.partial,
                                         .meeting = memory,
                                         .line = (int32_t)c.line,
                                         .features = (int32_t)ffn->o.d_hidden,
                                         .model = (int32_t)ffn->o.d_model,
                                         .tiles = (int32_t)c.tiles,
                                         .parts = (int32_t)c.parts,
                                         .share = (int32_t)c.share,
                                         .list = (int32_t)c.list,
                                         .square = ffn->o.activation == ESMM_ACT_RELU2};
  const esmm_launch launch = {.grid_x = (unsigned)c.blocks,
                              .threads = ESMM_FFN_DECODE_THREADS,
                              .shared = (unsigned)c.shared,
                              .cooperative = 1}; /* blocks wait for each other */
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream,
                                           esmm_cuda_launch(ctx, &v->function[ffn->o.dtype == ESMM_F16], &launch,
                                                            ctx->stream, &params))
                           : status;
}

esmm_status esmm_cuda_ffn_renew(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const esmm_weights *up = ffn->params.in[FFN_UP].expand.prepared;
  if (!cache->buffers[FFN_TURNED].data || !is_rows(ffn, up) || lies_turned(&ffn->params.in[FFN_UP].expand.matrix))
    return ESMM_OK;
  return turn(ctx, ffn, cache);
}
