/*
 * prepare.c: B on the GPU, once, all of it in one allocation: its forms (forms.c), bitmaps of strips of 32 columns, and
 * of tiles of 128 where it is 16-bit, and for each k the share of strips and of tiles that need it: the plan on the
 * device multiplies with that.
 */
#include "cuda/ops/blocks.h"
#include "cuda/ops/forms.h"
#include "cuda/ops/nm.h"
#include "recall.h"

#include <string.h>

#define DEFAULT_RATIO 3.0 /* max_bytes_ratio, unless given */

ESMM_FATBIN(count);

/* ---- densities ---- */

/* b is not empty. `at` is device memory for the result, which nobody needs yet. */
static esmm_status count_elements(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUdeviceptr at, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_count, "esmm_count_nonzero", 0};
  const esmm_nonzero_params params = {.m = esmm_cuda_matrix(b), .out = at};
  const unsigned blocks = 8 * (unsigned)esmm_cuda_get(ctx)->multiprocessors; /* each counts what it comes to */
  uint64_t nonzero = 0;
  esmm_status status = esmm_cuda_zero(ctx, at, sizeof nonzero, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_launch(ctx, &function, &(esmm_launch){.grid_x = blocks, .threads = ESMM_COUNT_THREADS}, stream,
                              &params);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, &nonzero, at, sizeof nonzero, stream);
  w->element_density = (double)nonzero / ((double)w->k * (double)w->n);
  return status;
}

/* Bits that are set. */
static int64_t count_bits(const uint32_t *bits, int64_t words)
{
  int64_t set = 0;
  for (int64_t i = 0; i < words; i++)
    set += __builtin_popcount(bits[i]);
  return set;
}

/* Every bit of a k that exists: strict weights keep all zeros. */
static void set_all(uint32_t *bits, const esmm_weights *w, int64_t words)
{
  for (int64_t i = 0; i < w->panels * words; i++) {
    const int64_t left = w->k - 32 * (i % words);
    bits[i] = left >= 32 ? UINT32_MAX : left <= 0 ? 0 : ((uint32_t)1 << left) - 1;
  }
}

/* Tiles are their strips ORed, in place: a tile's words lie at or before those of its first strip. */
static void fold_tiles(uint32_t *bits, int64_t strips, int64_t words)
{
  const int64_t each = ESMM_TILE / ESMM_STRIP;
  for (int64_t tile = 0; tile < esmm_ceil_div(strips, each); tile++)
    for (int64_t i = 0; i < words; i++) {
      uint32_t any = 0;
      for (int64_t s = tile * each; s < esmm_min(strips, (tile + 1) * each); s++)
        any |= bits[s * words + i];
      bits[tile * words + i] = any;
    }
}

/* Densities from bits, which are those of the strips; strict's bitmaps and those of the tiles, to the device. */
static esmm_status finish_bits_in(esmm_ctx *ctx, esmm_weights *w, uint32_t *bits, CUstream stream)
{
  esmm_cuda_weights *device = w->device;
  const int64_t words = device->strips.k_padded / 32, set = count_bits(bits, w->panels * words);
  esmm_status status = ESMM_OK;
  w->strip_density = (double)set / ((double)w->k * (double)w->panels);
  w->full = w->strict || set == w->k * w->panels;
  if (w->strict) {
    set_all(bits, w, words);
    status = esmm_cuda_to_device(ctx, device->strips.bits, bits, esmm_cuda_bitmap_bytes(w->panels, w->k), stream);
  }
  if (status != ESMM_OK || !device->tiles)
    return status;
  const int64_t tiles = esmm_cuda_tiles(w->n);
  fold_tiles(bits, w->panels, words);
  device->tile_density = (double)count_bits(bits, tiles * words) / ((double)w->k * (double)tiles);
  return esmm_cuda_to_device(ctx, device->tiles, bits, esmm_cuda_bitmap_bytes(tiles, w->k), stream);
}

static esmm_status finish_bits(esmm_ctx *ctx, esmm_weights *w, CUstream stream)
{
  const size_t bytes = esmm_cuda_bitmap_bytes(w->panels, w->k);
  uint32_t *bits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!bits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of bitmaps", bytes);
  esmm_status status = esmm_cuda_to_host(ctx, bits, esmm_cuda_of(w)->strips.bits, bytes, stream);
  if (status == ESMM_OK)
    status = finish_bits_in(ctx, w, bits, stream);
  esmm_mem_free(&ctx->allocator, bits, bytes);
  return status;
}

/* The share of so many strips or tiles that need each k. */
static esmm_status fill_alive(esmm_ctx *ctx, const esmm_weights *w, CUdeviceptr bits, int64_t count, CUdeviceptr out,
                              CUstream stream)
{
  const esmm_count_params params = {
      .b_bits = bits, .b_strips = count, .words = esmm_cuda_of(w)->strips.k_padded / 32, .k = w->k, .out = out};
  return esmm_cuda_alive(ctx, &params, stream);
}

/* ---- preparing ---- */

/* b lies on the GPU and is not empty. */
static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  const esmm_cuda_weights *device = w->device;
  const esmm_format nm = esmm_cuda_nm_format(w);
  esmm_status status = w->format == ESMM_FORMAT_NM ? esmm_cuda_nm_check(ctx, b, &nm, device->alive, stream) : ESMM_OK;
  if (status == ESMM_OK)
    status = esmm_cuda_forms_fill(ctx, b, w, stream);
  if (status == ESMM_OK)
    status = finish_bits(ctx, w, stream);
  if (status == ESMM_OK)
    status = count_elements(ctx, b, w, device->alive, stream);
  if (status == ESMM_OK)
    status = fill_alive(ctx, w, device->strips.bits, device->strips.strips, device->alive, stream);
  if (status == ESMM_OK && device->tiles)
    status = fill_alive(ctx, w, device->tiles, esmm_cuda_tiles(w->n), device->tile_alive, stream);
  return status;
}

static esmm_status fill_from(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  if (b->place == ESMM_DEVICE)
    return fill(ctx, b, w, stream);
  CUdeviceptr memory;
  esmm_status status = esmm_cuda_alloc(ctx, esmm_cuda_tight_bytes(b), &memory);
  if (status != ESMM_OK)
    return status;
  const esmm_matrix copy = esmm_cuda_tight(b, ESMM_DEVICE, esmm_cuda_pointer(memory));
  status = esmm_cuda_upload(ctx, b, &copy, stream);
  if (status == ESMM_OK)
    status = fill(ctx, &copy, w, stream);
  esmm_cuda_free(ctx, memory);
  return status;
}

static esmm_status weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                                 const esmm_cuda_layout *l, esmm_weights **out)
{
  esmm_weights *w = esmm_mem_alloc(&ctx->allocator, sizeof *w);
  esmm_cuda_weights *device = w ? esmm_mem_alloc(&ctx->allocator, sizeof *device) : NULL;
  if (!device) {
    esmm_mem_free(&ctx->allocator, w, sizeof *w);
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for weights");
  }
  memset(w, 0, sizeof *w);
  *device = (esmm_cuda_weights){0};
  w->allocator = ctx->allocator;
  w->serial = esmm_weights_serial();
  w->backend = ctx->backend;
  w->ordinal = ctx->ordinal;
  w->k = b->rows;
  w->n = b->cols;
  w->dtype = b->dtype;
  w->use = opts->use;
  w->format = opts->format.kind;
  w->strict = opts->strict != 0;
  w->full = true; /* until a strip without some k is found */
  w->panels = esmm_ceil_div(w->n, ESMM_PANEL);
  w->forms = l->forms;
  w->makes = l->forms & (ESMM_FORM(STRIPS) | ESMM_FORM(ROWS16)) ? ESMM_FORM(STRIPS) : 0;
  if (w->format != ESMM_FORMAT_DENSE)
    esmm_form_shape(&opts->format, w);
  w->bytes = sizeof *w + sizeof *device + l->bytes;
  w->device = device;
  const esmm_status status = l->bytes > 0 ? esmm_cuda_alloc(ctx, l->bytes, &device->memory) : ESMM_OK;
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  esmm_cuda_forms_place(l, w->k, w->n, device);
  *out = w;
  return ESMM_OK;
}

_Static_assert(ESMM_PANEL == ESMM_STRIP, "panels of a CPU and strips of a GPU are counted alike");

/*
 * What may be kept? One form of B in its own dtype; a second, and for fp32 a third, where the ratio allows it. Without
 * them the dense kernels read the first too, so nothing becomes impossible. Padding and bitmaps are not counted.
 */
static esmm_status choose_forms(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_cuda_layout *l)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : DEFAULT_RATIO;
  const double least = opts->format.kind == ESMM_FORMAT_NM    ? esmm_cuda_nm_ratio(&opts->format)
                       : opts->format.kind == ESMM_FORMAT_BSR ? 0.0 /* see check_blocks */
                                                              : 1.0;
  if (opts->format.kind != ESMM_FORMAT_DENSE && !esmm_dtype_is_16bit(b->dtype))
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s weights of %s are for the CPU, and this is a %s context: use %s",
                     esmm_format_str(opts->format.kind), esmm_dtype_str(b->dtype), esmm_ctx_kind(ctx),
                     "bf16 or f16, or dense ones");
  if (ratio < least && b->rows > 0 && b->cols > 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "prepared weights would hold %.2f times b's bytes, and max_bytes_ratio allows %.2f", least, ratio);
  if (b->cols > INT64_MAX / 4 || b->rows > (int64_t)UINT32_MAX - 64 || !esmm_cuda_forms_lay_out(b, opts, ratio, l))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b is %lld x %lld: prepared weights would not fit in memory",
                     (long long)b->rows, (long long)b->cols);
  return ESMM_OK;
}

/* How much blocks hold is known once they are found. */
static esmm_status check_blocks(esmm_ctx *ctx, const esmm_prepare_opts *opts, const esmm_weights *w)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : DEFAULT_RATIO;
  const esmm_cuda_blocks *b = &esmm_cuda_of(w)->blocks;
  const double held = (double)b->cells * b->cell_k * ESMM_CELL_COLS / ((double)w->k * (double)w->n);
  if (held <= ratio || ratio >= 1.0) /* at the edges cells may be padding for the most part */
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                   "prepared weights would hold %.2f times b's bytes, and max_bytes_ratio allows %.2f", held, ratio);
}

/* Between begin and end. */
static esmm_status make(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, const esmm_cuda_layout *l,
                        esmm_weights **out)
{
  esmm_weights *w = NULL;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "preparing weights");
  if (status == ESMM_OK)
    status = weights_alloc(ctx, b, opts, l, &w);
  if (status != ESMM_OK)
    return status;
  if (w->k > 0 && w->n > 0)
    status = fill_from(ctx, b, w, ctx->stream);
  w->bsr.blocks = esmm_cuda_of(w)->blocks.kept;
  w->bytes += esmm_cuda_of(w)->blocks.bytes;
  *out = w;
  return status == ESMM_OK && w->format == ESMM_FORMAT_BSR && w->k > 0 && w->n > 0 ? check_blocks(ctx, opts, w)
                                                                                   : status;
}

esmm_status esmm_cuda_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out)
{
  esmm_cuda_layout l = {0};
  esmm_weights *w = NULL;
  esmm_status status = choose_forms(ctx, b, opts, &l);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, make(ctx, b, opts, &l, &w));
  if (status == ESMM_OK)
    status = esmm_cuda_synchronize(ctx);
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  *out = w;
  return ESMM_OK;
}

void esmm_cuda_weights_free(esmm_weights *w)
{
  esmm_cuda_weights *device = w->device;
  esmm_cuda_blocks_free(w);
  if (device->memory)
    esmm_cuda_free_at(w->ordinal, device->memory);
  esmm_mem_free(&w->allocator, device, sizeof *device);
}

/* ---- to and from the forms of a CPU, for weights files ---- */

static esmm_matrix host_b(const esmm_weights *w)
{
  return (esmm_matrix){.rows = w->k, .cols = w->n, .ld = w->n, .dtype = w->dtype};
}

static esmm_format format_of(const esmm_weights *w)
{
  return w->format == ESMM_FORMAT_NM
             ? esmm_cuda_nm_format(w)
             : (esmm_format){.kind = w->format, .block_rows = w->bsr.block_rows, .block_cols = w->bsr.block_cols};
}

esmm_status esmm_cuda_weights_to_host(esmm_ctx *ctx, const esmm_weights *w, esmm_weights **out)
{
  const esmm_matrix shape = host_b(w);
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  if (w->k > 0 && w->n > 0) {
    status = esmm_cuda_begin(ctx, ctx->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_end(ctx, ctx->stream, esmm_cuda_forms_read(ctx, w, &b, ctx->stream));
  }
  if (status == ESMM_OK) { /* the ratio was looked at when these were prepared */
    const esmm_prepare_opts opts = {
        .size = sizeof opts, .use = w->use, .strict = w->strict, .max_bytes_ratio = 1e9, .format = format_of(w)};
    status = esmm_prepare_checked(ctx, &b, &opts, out);
  }
  esmm_host_twin_free(ctx, &b);
  return status;
}

esmm_status esmm_cuda_weights_from_host(esmm_ctx *ctx, const esmm_weights *host, esmm_weights **out)
{
  const esmm_matrix shape = host_b(host);
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  esmm_weights_unpack(host, &b);
  const esmm_prepare_opts opts = {
      .size = sizeof opts, .use = host->use, .strict = host->strict, .format = format_of(host)};
  status = esmm_cuda_prepare(ctx, &b, &opts, out);
  esmm_host_twin_free(ctx, &b);
  return status;
}
