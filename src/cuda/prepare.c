/*
 * prepare.c: B on the GPU, once, all of it in one allocation.
 *
 * fp32:    strips of 32 columns as the skipping kernels read them, and B transposed for the dense kernels.
 * 16 bits: B's rows in its own dtype, bitmaps of strips of 32 columns and of tiles of 128, no more: whoever reads fp32
 *          strips gets them made for the call (matmul.c).
 *
 * Beside these, the share of strips (and of tiles) that need each k: the plan on the device multiplies with it.
 *
 * To a GPU B is A transposed: the kernels that extract A's strips extract B's from a matrix [n, k] of the other order.
 */
#include "../convert.h"
#include "cuda.h"

#include <string.h>

#define COUNT_THREADS 256 /* of a block of count.cu */

ESMM_FATBIN(count);

#define ALIGN 256 /* of the parts of the one allocation */

/* Where they lie in it. */
typedef struct layout {
  bool columns, rows;
  size_t strips_at, alive_at, columns_at, rows_at, tiles_at, tile_alive_at, bytes;
} layout;

static int64_t tiles_of(int64_t n)
{
  return esmm_ceil_div(n, ESMM_TILE);
}

/* Bitmaps of so many strips or tiles: a few hundredths of B, which is checked elsewhere, so this fits. */
static size_t bitmap_bytes(int64_t count, int64_t k)
{
  return (size_t)count * (size_t)(esmm_cuda_k_padded(k) / 8);
}

/* For fp32. */
static bool lay_out_strips(int64_t k, int64_t n, layout *l)
{
  const size_t strips = esmm_cuda_strips_bytes(n, k), k_padded = (size_t)esmm_cuda_k_padded(k);
  size_t columns = 0;
  return strips != SIZE_MAX && (!l->columns || esmm_size_mul((size_t)n * sizeof(float), k_padded, &columns)) &&
         esmm_cuda_reserve(&l->bytes, strips, ALIGN, &l->strips_at) &&
         esmm_cuda_reserve(&l->bytes, k_padded * sizeof(float), ALIGN, &l->alive_at) &&
         esmm_cuda_reserve(&l->bytes, columns, ALIGN, &l->columns_at) && l->bytes <= (size_t)INT64_MAX;
}

/* For 16 bits. */
static bool lay_out_rows(int64_t k, int64_t n, layout *l)
{
  const size_t share = (size_t)esmm_cuda_k_padded(k) * sizeof(float);
  size_t rows;
  return esmm_size_mul((size_t)tiles_of(n) * ESMM_TILE * sizeof(uint16_t), (size_t)k, &rows) &&
         esmm_cuda_reserve(&l->bytes, rows, ALIGN, &l->rows_at) &&
         esmm_cuda_reserve(&l->bytes, bitmap_bytes(esmm_ceil_div(n, ESMM_STRIP), k), ALIGN, &l->strips_at) &&
         esmm_cuda_reserve(&l->bytes, share, ALIGN, &l->alive_at) &&
         esmm_cuda_reserve(&l->bytes, bitmap_bytes(tiles_of(n), k), ALIGN, &l->tiles_at) &&
         esmm_cuda_reserve(&l->bytes, share, ALIGN, &l->tile_alive_at) && l->bytes <= (size_t)INT64_MAX;
}

static esmm_matrix transposed(const esmm_matrix *m)
{
  esmm_matrix t = *m;
  t.rows = m->cols;
  t.cols = m->rows;
  t.order = m->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return t;
}

esmm_matrix esmm_cuda_weights_rows(const esmm_weights *w)
{
  return (esmm_matrix){.data = esmm_cuda_pointer(w->cuda->rows),
                       .rows = w->k,
                       .cols = w->n,
                       .ld = w->cuda->rows_ld,
                       .dtype = w->dtype,
                       .place = ESMM_DEVICE};
}

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
    status =
        esmm_cuda_launch(ctx, &function, &(esmm_launch){.grid_x = blocks, .threads = COUNT_THREADS}, stream, &params);
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
  struct esmm_cuda_weights *device = w->cuda;
  const int64_t words = device->strips.k_padded / 32, set = count_bits(bits, w->panels * words);
  esmm_status status = ESMM_OK;
  w->strip_density = (double)set / ((double)w->k * (double)w->panels);
  w->full = w->strict || set == w->k * w->panels;
  if (w->strict) {
    set_all(bits, w, words);
    status = esmm_cuda_to_device(ctx, device->strips.bits, bits, bitmap_bytes(w->panels, w->k), stream);
  }
  if (status != ESMM_OK || !device->tiles)
    return status;
  const int64_t tiles = tiles_of(w->n);
  fold_tiles(bits, w->panels, words);
  device->tile_density = (double)count_bits(bits, tiles * words) / ((double)w->k * (double)tiles);
  return esmm_cuda_to_device(ctx, device->tiles, bits, bitmap_bytes(tiles, w->k), stream);
}

static esmm_status finish_bits(esmm_ctx *ctx, esmm_weights *w, CUstream stream)
{
  const size_t bytes = bitmap_bytes(w->panels, w->k);
  uint32_t *bits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!bits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of bitmaps", bytes);
  esmm_status status = esmm_cuda_to_host(ctx, bits, w->cuda->strips.bits, bytes, stream);
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
      .b_bits = bits, .b_strips = count, .words = w->cuda->strips.k_padded / 32, .k = w->k, .out = out};
  return esmm_cuda_alive(ctx, &params, stream);
}

/* ---- preparing ---- */

/* The forms that hold B's elements, and the bitmaps of its strips. */
static esmm_status fill_forms(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream)
{
  const struct esmm_cuda_weights *device = w->cuda;
  const esmm_strips *strips = &device->strips;
  const esmm_matrix t = transposed(b);
  const esmm_gate open = {0};
  esmm_status status = esmm_cuda_extract(ctx, &t, strips, true, open, stream);
  if (status == ESMM_OK && device->columns)
    status = esmm_cuda_pack_rows(ctx, &t, device->columns, strips->k_padded, open, stream);
  if (status != ESMM_OK || !device->rows)
    return status;
  esmm_matrix rows = esmm_cuda_weights_rows(w);
  rows.cols = rows.ld; /* what B does not have is written as zeros */
  return esmm_cuda_convert(ctx, b, &rows, (esmm_gate){0}, stream);
}

/* b lies on the GPU and is not empty. */
static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  const struct esmm_cuda_weights *device = w->cuda;
  esmm_status status = fill_forms(ctx, b, w, stream);
  if (status == ESMM_OK)
    status = finish_bits(ctx, w, stream);
  if (status == ESMM_OK)
    status = count_elements(ctx, b, w, device->alive, stream);
  if (status == ESMM_OK)
    status = fill_alive(ctx, w, device->strips.bits, device->strips.strips, device->alive, stream);
  if (status == ESMM_OK && device->tiles)
    status = fill_alive(ctx, w, device->tiles, tiles_of(w->n), device->tile_alive, stream);
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

/* Where in the allocation the parts lie. */
static void set_parts(struct esmm_cuda_weights *device, int64_t k, int64_t n, const layout *l)
{
  const CUdeviceptr at = device->memory;
  device->alive = at + l->alive_at;
  if (!l->rows) {
    device->strips = esmm_cuda_strips_at(at + l->strips_at, n, k);
    device->columns = l->columns ? at + l->columns_at : 0;
    return;
  }
  device->strips = (esmm_strips){
      .bits = at + l->strips_at, .strips = esmm_ceil_div(n, ESMM_STRIP), .k_padded = esmm_cuda_k_padded(k)};
  device->rows = at + l->rows_at;
  device->rows_ld = tiles_of(n) * ESMM_TILE;
  device->tiles = at + l->tiles_at;
  device->tile_alive = at + l->tile_alive_at;
}

static esmm_status weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, const layout *l,
                                 esmm_weights **out)
{
  esmm_weights *w = esmm_mem_alloc(&ctx->allocator, sizeof *w);
  struct esmm_cuda_weights *device = w ? esmm_mem_alloc(&ctx->allocator, sizeof *device) : NULL;
  if (!device) {
    esmm_mem_free(&ctx->allocator, w, sizeof *w);
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for weights");
  }
  memset(w, 0, sizeof *w);
  *device = (struct esmm_cuda_weights){.ordinal = esmm_cuda_get(ctx)->ordinal,
                                       .multiprocessors = esmm_cuda_get(ctx)->multiprocessors};
  w->allocator = ctx->allocator;
  w->k = b->rows;
  w->n = b->cols;
  w->dtype = b->dtype;
  w->use = opts->use;
  w->strict = opts->strict != 0;
  w->full = true; /* until a strip without some k is found */
  w->panels = esmm_ceil_div(w->n, ESMM_PANEL);
  w->bytes = sizeof *w + sizeof *device + l->bytes;
  w->cuda = device;
  const esmm_status status = l->bytes > 0 ? esmm_cuda_alloc(ctx, l->bytes, &device->memory) : ESMM_OK;
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  set_parts(device, w->k, w->n, l);
  *out = w;
  return ESMM_OK;
}

_Static_assert(ESMM_PANEL == ESMM_STRIP, "panels of a CPU and strips of a GPU are counted alike");

/*
 * What may be kept? One form of B in its own dtype; a second, for fp32 only, where the ratio allows it. Without it the
 * dense kernels read strips too, so nothing becomes impossible. Padding and bitmaps are not counted.
 */
static esmm_status choose_forms(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, layout *l)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : ESMM_BYTES_RATIO;
  const bool f32 = b->dtype == ESMM_F32;
  if (ratio < 1.0 && b->rows > 0 && b->cols > 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "prepared weights would hold 1.00 times b's bytes, and max_bytes_ratio allows %.2f", ratio);
  *l = (layout){.rows = !f32, .columns = f32 && opts->use != ESMM_USE_DECODE && ratio >= 2.0};
  if (b->cols > INT64_MAX / 4 || b->rows > (int64_t)UINT32_MAX - 64 ||
      !(f32 ? lay_out_strips(b->rows, b->cols, l) : lay_out_rows(b->rows, b->cols, l)))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b is %lld x %lld: prepared weights would not fit in memory",
                     (long long)b->rows, (long long)b->cols);
  return ESMM_OK;
}

/* Between begin and end. */
static esmm_status make(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, const layout *l,
                        esmm_weights **out)
{
  esmm_weights *w = NULL;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "the preparing of weights");
  if (status == ESMM_OK)
    status = weights_alloc(ctx, b, opts, l, &w);
  if (status != ESMM_OK)
    return status;
  if (w->k > 0 && w->n > 0)
    status = fill_from(ctx, b, w, ctx->stream);
  *out = w;
  return status;
}

esmm_status esmm_cuda_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out)
{
  layout l = {0};
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
  if (w->cuda->memory)
    esmm_cuda_free_at(w->cuda->ordinal, w->cuda->memory);
  esmm_mem_free(&w->allocator, w->cuda, sizeof *w->cuda);
  w->cuda = NULL;
}

/* ---- to and from the forms of a CPU, for weights files ---- */

/* Columns of one strip into b, row-major; segments without a bit are zeros. */
static void unpack_strip(const esmm_weights *w, int64_t strip, const uint32_t *bits, const float *data, esmm_matrix *b)
{
  const int64_t j0 = strip * ESMM_STRIP, cols = esmm_min(ESMM_STRIP, w->n - j0);
  for (int64_t k = 0; k < w->k; k++) {
    const bool alive = bits[k / 32] >> (k % 32) & 1;
    for (int64_t j = 0; j < cols; j++)
      esmm_matrix_set(b, k, j0 + j, alive ? data[k * ESMM_STRIP + j] : 0.0f);
  }
}

/* A strip at a time through buffer, which holds its bitmap and its segments. */
static esmm_status unpack_strips(esmm_ctx *ctx, const esmm_weights *w, void *buffer, esmm_matrix *b)
{
  const esmm_strips *strips = &w->cuda->strips;
  const size_t bits_bytes = (size_t)strips->k_padded / 8,
               data_bytes = (size_t)strips->k_padded * ESMM_STRIP * sizeof(float);
  float *data = buffer;
  uint32_t *bits = (uint32_t *)(void *)((char *)buffer + data_bytes);
  esmm_status status = ESMM_OK;
  for (int64_t s = 0; status == ESMM_OK && s < strips->strips; s++) {
    status = esmm_cuda_to_host(ctx, data, strips->data + (size_t)s * data_bytes, data_bytes, ctx->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(ctx, bits, strips->bits + (size_t)s * bits_bytes, bits_bytes, ctx->stream);
    if (status == ESMM_OK)
      unpack_strip(w, s, bits, data, b);
  }
  return status;
}

/* Between begin and end; b is a tight row-major matrix in host memory. */
static esmm_status unpack(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b)
{
  if (w->cuda->rows) {
    const esmm_matrix rows = esmm_cuda_weights_rows(w);
    return esmm_cuda_download(ctx, &rows, b, ctx->stream);
  }
  const size_t bytes = (size_t)w->cuda->strips.k_padded * (ESMM_STRIP * sizeof(float) + sizeof(uint32_t));
  void *buffer = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!buffer)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of weights", bytes);
  const esmm_status status = unpack_strips(ctx, w, buffer, b);
  esmm_mem_free(&ctx->allocator, buffer, bytes);
  return status;
}

static esmm_matrix host_b(const esmm_weights *w)
{
  return (esmm_matrix){.rows = w->k, .cols = w->n, .ld = w->n, .dtype = w->dtype};
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
      status = esmm_cuda_end(ctx, ctx->stream, unpack(ctx, w, &b));
  }
  if (status == ESMM_OK) { /* the ratio was looked at when these were prepared */
    const esmm_prepare_opts opts = {.size = sizeof opts, .use = w->use, .strict = w->strict, .max_bytes_ratio = 1e9};
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
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = host->use, .strict = host->strict};
  status = esmm_cuda_prepare(ctx, &b, &opts, out);
  esmm_host_twin_free(ctx, &b);
  return status;
}
