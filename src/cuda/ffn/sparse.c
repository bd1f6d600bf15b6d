/*
 * sparse.c: a layer's operands with two of each four values, on a GPU.
 *
 * On Hopper 16-bit operands go through its sparse tensor cores: one pass chooses, packs and notes (pack.cuh), the
 * product reads what was packed (ffn_two16_sm90a.cu). Elsewhere, in fp32 and where few tokens would leave most of the
 * GPU idle, the operand is a dense matrix with zeros, and its product any.
 *
 * In split mode columns that do not go sparse are copied to a matrix beside the packed one, in the same pass. Where
 * they are summed over (along features), the product adds theirs by dense stages. Where they are rows of C (along
 * tokens), their rows are a product of their own, which is added to the zeros that the packed one has left there.
 */
#include "cuda/ffn/sparse.h"

#include "cuda/ffn/ffn.h"
#include "cuda/ffn/params.h"
#include "cuda/kernels/common/host.h"
#include "cuda/ops/nm_layout.h"
#include "ffn/ffn.h"

#define RECORDS 4096     /* blocks of a launch that leaves records, about */
#define LEAST_TOKENS 256 /* fewer are no tile */
#define MOST_OTHERS 0.5  /* of the columns: with more there is little to gain */
#define GROUP 16         /* pairs of strips that come together */

ESMM_FATBIN(ffn);
ESMM_FATBIN(ffn_two16_sm90a);

/* What every launch needs to choose. */
static esmm_ffn_sparsify_params params_of(const esmm_ffn_cache *cache, const ffn_sparsify *how, const esmm_matrix *src)
{
  const esmm_ffn_opts *o = &cache->ffn->o;
  return (esmm_ffn_sparsify_params){.src = esmm_ffn_address(src->data),
                                    .others = o->mode == ESMM_FFN_SPLIT ? esmm_ffn_buffer(cache, FFN_OTHERS) : 0,
                                    .token_order = o->permute_tokens ? esmm_ffn_buffer(cache, FFN_TOKENS) : 0,
                                    .records = esmm_ffn_buffer(cache, FFN_PARTIAL),
                                    .notes = esmm_ffn_buffer(cache, FFN_NOTES),
                                    .seed = how->seed,
                                    .tokens = src->rows,
                                    .features = src->cols,
                                    .dtype = (int32_t)src->dtype,
                                    .sparsifier = (int32_t)o->sparsifier};
}

/* Between begin and end. drop: -1 for the soft threshold's factor. */
static esmm_status collect(esmm_ctx *ctx, const esmm_ffn_sparsify_params *p, const esmm_launch *how, int32_t drop)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_collect", 0};
  const int64_t blocks = (int64_t)how->grid_x * (how->grid_y ? how->grid_y : 1);
  const esmm_ffn_collect_params params = {.records = p->records, .notes = p->notes, .count = blocks, .drop = drop};
  return esmm_cuda_launch(ctx, &function, &(esmm_launch){.threads = ESMM_FFN_THREADS}, ctx->stream, &params);
}

/* Between begin and end: a launch that chooses, before it one that measures if needed, and their records. p: a part of
   the launch's `params`. */
static esmm_status choose(esmm_ctx *ctx, const esmm_cuda_function *function, const esmm_launch *blocks,
                          esmm_ffn_sparsify_params *p, const void *params, ffn_drop drop)
{
  esmm_status status = ESMM_OK;
  if (p->sparsifier == ESMM_SPARSIFY_SOFT) {
    p->step = ESMM_FFN_MEASURES;
    status = esmm_cuda_launch(ctx, function, blocks, ctx->stream, params);
    if (status == ESMM_OK)
      status = collect(ctx, p, blocks, -1);
    p->step = ESMM_FFN_SCALES;
  }
  if (status == ESMM_OK)
    status = esmm_cuda_launch(ctx, function, blocks, ctx->stream, params);
  return status == ESMM_OK ? collect(ctx, p, blocks, (int32_t)drop) : status;
}

/* ---- a dense operand with zeros ---- */

/* Blocks enough for a GPU, and few records. */
static esmm_launch grid(int64_t across, int64_t down)
{
  const int64_t x = esmm_max(1, esmm_min(esmm_ceil_div(across, ESMM_FFN_THREADS), RECORDS));
  const int64_t y = esmm_max(1, esmm_min(down, RECORDS / x));
  return (esmm_launch){.grid_x = (unsigned)x, .grid_y = (unsigned)y, .threads = ESMM_FFN_THREADS};
}

esmm_status esmm_ffn_cuda_sparsify(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparsify *how,
                                   const esmm_matrix *src, esmm_matrix *dst)
{
  static const esmm_cuda_function functions[] = {[FFN_ALONG_FEATURES] = {&fatbin_ffn, "esmm_ffn_features", 0},
                                                 [FFN_ALONG_TOKENS] = {&fatbin_ffn, "esmm_ffn_tokens", 0}};
  if (src->rows == 0 || src->cols == 0)
    return ESMM_OK;
  esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_PARTIAL, RECORDS, 1, sizeof(esmm_ffn_record));
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  esmm_ffn_sparsify_params params = params_of(cache, how, src);
  params.dst = esmm_ffn_address(dst->data);
  const esmm_launch blocks = how->axis == FFN_ALONG_FEATURES ? grid(esmm_ceil_div(src->cols, 4), src->rows)
                                                             : grid(src->cols, esmm_ceil_div(src->rows, 4));
  return esmm_cuda_end(ctx, ctx->stream, choose(ctx, &functions[how->axis], &blocks, &params, &params, how->drop));
}

/* ---- packed ---- */

/* One product: C [lines, n] = A [lines, k] B [k, n]. */
typedef struct packed {
  const ffn_sparse_product *product;
  esmm_ffn_cache *cache;
  int64_t lines, k, n;
  int64_t others; /* columns of m that do not go sparse */
  const esmm_weights *w;
  esmm_matrix b;    /* theirs, as it lies in memory: rows, or, col-major, columns */
  esmm_matrix side; /* those columns, [tokens, others] */
} packed;

static int64_t pairs_of(const packed *x)
{
  return esmm_ceil_div(x->lines, 2 * ESMM_NM16_COLS);
}

/* All that is known before B is at hand. A bias goes along C's rows: none where those are columns here. */
static bool can_pack(const esmm_ctx *ctx, const packed *x)
{
  const ffn_sparse_product *product = x->product;
  const esmm_matrix *m = product->m;
  const int64_t most = ESMM_FFN_TWO16_MOST_SIDE;
  return esmm_cuda_get(ctx)->sm == 90 && !ctx->force[0] && esmm_dtype_size(m->dtype) == 2 && m->rows >= LEAST_TOKENS &&
         m->cols > 0 && x->n > 0 && m->rows <= most && m->cols <= most && x->n <= most && !product->how->places &&
         (!product->bias || product->c->order == ESMM_ROW_MAJOR) &&
         (double)x->others <= MOST_OTHERS * (double)m->cols && 2 * pairs_of(x) * esmm_nm16_blocks(x->k) <= INT32_MAX &&
         pairs_of(x) * esmm_ceil_div(x->n, ESMM_FFN_TWO16_COLS) <= INT32_MAX / 2;
}

/* *can: B can be read through TMA. */
static esmm_status get_b(esmm_ctx *ctx, packed *x, bool *can)
{
  const ffn_sparse_product *product = x->product;
  esmm_weights *taken = NULL;
  const esmm_status status = product->prepared ? ESMM_OK
                                               : esmm_ffn_cuda.take_b(ctx, x->cache, product->which, product->b,
                                                                      product->m->dtype, false, &taken);
  if (status != ESMM_OK)
    return status;
  x->w = taken ? taken : product->prepared;
  x->b = esmm_cuda_weights_rows(x->w);
  if (!(x->w->forms & ESMM_FORM(ROWS16))) {
    x->b.data = esmm_cuda_pointer(esmm_cuda_of(x->w)->form[ESMM_FORM_TURNED16]);
    x->b.order = ESMM_COL_MAJOR;
  }
  *can = x->w->forms & (ESMM_FORM(ROWS16) | ESMM_FORM(TURNED16)) && x->w->dtype == product->m->dtype &&
         x->w->k == x->k && x->w->n == x->n && esmm_cuda_as_it_is(&x->b);
  return ESMM_OK;
}

/* Lines of 16 bytes. */
static esmm_matrix lines_at(const esmm_ffn_cache *cache, int which, int64_t rows, int64_t cols, esmm_dtype dtype)
{
  esmm_matrix m = esmm_ffn_view(cache, which, rows, cols, dtype);
  m.ld = esmm_round_up(cols, 8);
  return m;
}

/* The operand, packed, in FFN_SPARSE, and what goes beside it in FFN_SIDE. */
static esmm_status pack(esmm_ctx *ctx, packed *x)
{
#define FUNCTION(name)                 \
  {                                    \
    &fatbin_ffn_two16_sm90a, (name), 0 \
  }
#define FUNCTIONS(id)                                                                   \
  {                                                                                     \
    {FUNCTION("esmm_ffn_pack_" id), FUNCTION("esmm_ffn_pack_" id "_others")},           \
    {                                                                                   \
      FUNCTION("esmm_ffn_pack_" id "_any"), FUNCTION("esmm_ffn_pack_" id "_any_others") \
    }                                                                                   \
  }
  static const esmm_cuda_function functions[2][2][2][2] = {
      [FFN_ALONG_FEATURES] = {FUNCTIONS("features_bf16"), FUNCTIONS("features_f16")},
      [FFN_ALONG_TOKENS] = {FUNCTIONS("tokens_bf16"), FUNCTIONS("tokens_f16")}};
  const ffn_sparsify *how = x->product->how;
  const esmm_matrix *m = x->product->m;
  const bool features = how->axis == FFN_ALONG_FEATURES;
  const int64_t strips = 2 * pairs_of(x), blocks = esmm_nm16_blocks(x->k);
  const int64_t patches = features ? strips / 2 * blocks : strips * blocks;
  const int64_t at_once = (features ? 2 : 4) * (int64_t)esmm_cuda_get(ctx)->multiprocessors;
  const esmm_launch launch = {.grid_x = (unsigned)esmm_min(patches, at_once),
                              .threads = features ? ESMM_FFN_PACK_FEATURES : ESMM_FFN_PACK_TOKENS};
  esmm_status status = esmm_ffn_reserve(ctx, x->cache, FFN_SPARSE, strips * blocks, ESMM_NM16_BLOCK, 1);
  if (status == ESMM_OK)
    status = esmm_ffn_reserve(ctx, x->cache, FFN_PARTIAL, launch.grid_x, 1, sizeof(esmm_ffn_record));
  if (status == ESMM_OK && x->others > 0)
    status = esmm_ffn_reserve(ctx, x->cache, FFN_SIDE, m->rows, esmm_round_up(x->others, 8), 2);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  x->side = lines_at(x->cache, FFN_SIDE, m->rows, x->others, m->dtype);
  esmm_ffn_pack_params params = {.how = params_of(x->cache, how, m),
                                 .half = esmm_ffn_buffer(x->cache, FFN_SPARSE),
                                 .side = esmm_ffn_buffer(x->cache, FFN_SIDE),
                                 .side_ld = x->side.ld,
                                 .strips = (int32_t)strips,
                                 .blocks = (int32_t)blocks};
  const esmm_cuda_function *function =
      &functions[how->axis][m->dtype == ESMM_F16][params.how.sparsifier != ESMM_SPARSIFY_TOP_N][x->others > 0];
  return esmm_cuda_end(ctx, ctx->stream, choose(ctx, function, &launch, &params.how, &params, how->drop));
}

/* k's index[0..count) of B, which lie as B does, in FFN_WEIGHTS. */
static esmm_status gather_k(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *b, const int32_t *index,
                            int64_t count, esmm_matrix *out)
{
  const bool rows = b->order == ESMM_ROW_MAJOR;
  const int64_t lines = rows ? count : b->cols, cols = rows ? b->cols : count;
  const esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_WEIGHTS, lines, esmm_round_up(cols, 8), 2);
  if (status != ESMM_OK)
    return status;
  *out = lines_at(cache, FFN_WEIGHTS, lines, cols, b->dtype);
  if (rows)
    return esmm_ffn_cuda.gather_rows(ctx, b, index, count, out);
  const esmm_matrix from = ffn_transposed(*b);
  const esmm_status gathered = esmm_ffn_cuda.gather_columns(ctx, &from, index, count, out);
  *out = ffn_transposed(*out);
  return gathered;
}

static esmm_status map_of(esmm_ctx *ctx, const esmm_matrix *m, esmm_tensor_map *map)
{
  const bool rows = m->order == ESMM_ROW_MAJOR;
  return esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(m), rows ? m->cols : m->rows, rows ? m->rows : m->cols, m->ld,
                                 map);
}

/* C as the kernel writes it, row-major, and what follows the sums. */
static void finish_as(const packed *x, esmm_ctx *ctx, esmm_ffn_two16_params *params)
{
  const ffn_sparse_product *product = x->product;
  const bool turned = product->c->order == ESMM_COL_MAJOR, adds = product->plus == product->c;
  esmm_problem p = {.ctx = ctx, .m = x->lines, .n = x->n, .c = *product->c, .alpha = 1.0f, .bias = product->bias};
  p.beta = adds ? 1.0f : 0.0f;
  if (product->plus && !adds)
    p.residual = *product->plus;
  if (turned) {
    p.c = ffn_transposed(p.c);
    p.residual = ffn_transposed(p.residual);
  }
  params->turned = turned;
  params->epilogue = esmm_cuda_epilogue(&p);
  params->registers = esmm_cuda_writes_boxes(&p, &params->epilogue);
}

/* Between begin and end. others: B's k's of the columns beside; NULL: there are none, or they are no k's. */
static esmm_status launch_product(esmm_ctx *ctx, const packed *x, const esmm_matrix *b, const esmm_matrix *others)
{
#define PRODUCT(id, others)                                                        \
  {                                                                                \
    &fatbin_ffn_two16_sm90a, "esmm_ffn_two16_" id, (ESMM_FFN_TWO16_SHARED(others)) \
  }
  static const esmm_cuda_function functions[2][2][2] = {
      {{PRODUCT("bf16_k", 0), PRODUCT("bf16_k_others", 1)}, {PRODUCT("bf16_n", 0), PRODUCT("bf16_n_others", 1)}},
      {{PRODUCT("f16_k", 0), PRODUCT("f16_k_others", 1)}, {PRODUCT("f16_n", 0), PRODUCT("f16_n_others", 1)}}};
  const esmm_cuda_function *function =
      &functions[x->product->m->dtype == ESMM_F16][b->order == ESMM_COL_MAJOR][others != NULL];
  const int64_t tiles = pairs_of(x) * esmm_ceil_div(x->n, ESMM_FFN_TWO16_COLS);
  const int64_t workers = esmm_max(1, esmm_cuda_get(ctx)->multiprocessors / ESMM_FFN_TWO16_CLUSTER);
  const esmm_launch launch = {.grid_x = (unsigned)(ESMM_FFN_TWO16_CLUSTER * esmm_min(tiles, workers)),
                              .threads = ESMM_FFN_TWO16_THREADS,
                              .shared = function->shared,
                              .cluster = ESMM_FFN_TWO16_CLUSTER};
  esmm_ffn_two16_params params = {.half = esmm_ffn_buffer(x->cache, FFN_SPARSE),
                                  .m = (int32_t)x->lines,
                                  .n = (int32_t)x->n,
                                  .blocks = (int32_t)esmm_nm16_blocks(x->k),
                                  .others = (int32_t)(others ? esmm_nm16_blocks(x->others) : 0),
                                  .pairs = (int32_t)pairs_of(x),
                                  .group = GROUP};
  finish_as(x, ctx, &params);
  esmm_status status = map_of(ctx, b, &params.map_b);
  if (status == ESMM_OK && others)
    status = map_of(ctx, &x->side, &params.map_side);
  if (status == ESMM_OK && others)
    status = map_of(ctx, others, &params.map_others);
  return status == ESMM_OK ? esmm_cuda_launch(ctx, function, &launch, ctx->stream, &params) : status;
}

/* Between begin and end: rows of C that belong to the other columns, which a list has. */
static esmm_status launch_add(esmm_ctx *ctx, const packed *x, const esmm_matrix *rows)
{
  static const esmm_cuda_function function = {&fatbin_ffn, "esmm_ffn_add", 0};
  const esmm_matrix *c = x->product->c;
  const bool elements = c->order == ESMM_COL_MAJOR; /* C's rows are elements of its lines */
  const esmm_matrix from = elements ? ffn_transposed(*rows) : *rows, to = elements ? ffn_transposed(*c) : *c;
  const esmm_ffn_add_params params = {.src = esmm_cuda_matrix(&from),
                                      .dst = esmm_cuda_matrix(&to),
                                      .index = esmm_ffn_address(ffn_numbers(x->cache, FFN_COLUMNS) + x->cache->sparse),
                                      .count = x->others,
                                      .elements = elements};
  const int64_t lines = elements ? to.rows : x->others, cols = elements ? x->others : to.cols;
  const esmm_launch launch = {.grid_x = (unsigned)esmm_min(esmm_ceil_div(cols, ESMM_FFN_THREADS), RECORDS),
                              .grid_y = (unsigned)esmm_min(esmm_ceil_div(lines, ESMM_FFN_PICK_ROWS), RECORDS),
                              .threads = ESMM_FFN_THREADS};
  return esmm_cuda_launch(ctx, &function, &launch, ctx->stream, &params);
}

/* Rows of C for columns of m that do not go sparse: so far zero, or what they are added to. */
static esmm_status add_rows(esmm_ctx *ctx, const packed *x)
{
  const esmm_matmul_opts opts = {.size = sizeof opts};
  const bool by_rows = x->product->c->order == ESMM_ROW_MAJOR;
  const esmm_matrix a = ffn_transposed(x->side);
  esmm_matrix rows;
  esmm_status status = esmm_ffn_matrix(ctx, x->cache, FFN_GRADIENT, by_rows ? x->others : x->n,
                                       by_rows ? x->n : x->others, ESMM_F32, &rows);
  if (!by_rows)
    rows = ffn_transposed(rows);
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &a, x->w, &rows, &opts, NULL);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, launch_add(ctx, x, &rows)) : status;
}

esmm_status esmm_ffn_cuda_multiply_sparse(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparse_product *product,
                                          bool *done)
{
  const esmm_matrix *m = product->m;
  const bool features = product->how->axis == FFN_ALONG_FEATURES;
  packed x = {.product = product,
              .cache = cache,
              .lines = features ? m->rows : m->cols,
              .k = features ? m->cols : m->rows,
              .n = product->c->cols,
              .others = m->cols - cache->sparse};
  if (!can_pack(ctx, &x))
    return ESMM_OK;
  esmm_status status = get_b(ctx, &x, done);
  if (status != ESMM_OK || !*done)
    return status;
  const bool beside = features && x.others > 0;
  esmm_matrix b = x.b, others;
  status = pack(ctx, &x);
  if (status == ESMM_OK && !features && cache->ffn->o.permute_tokens)
    status = gather_k(ctx, cache, &x.b, ffn_numbers(cache, FFN_TOKENS), x.k, &b);
  if (status == ESMM_OK && beside)
    status = gather_k(ctx, cache, &x.b, ffn_numbers(cache, FFN_COLUMNS) + cache->sparse, x.others, &others);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_end(ctx, ctx->stream, launch_product(ctx, &x, &b, beside ? &others : NULL));
  return status == ESMM_OK && !features && x.others > 0 ? add_rows(ctx, &x) : status;
}
