/* borrow.c: see borrow.h. */
#include "cuda/ops/borrow.h"

#include "cuda/kernels/cublas/cublas.h"
#include "cuda/ops/forms.h"
#include "dtype.h"

#define ALIGN 256 /* of the parts of the one allocation, and of rows that are read as they lie */

ESMM_FATBIN(borrow);

typedef enum how { AS_ROWS, AS_COLUMNS, COPIED, AS_F32 } how;

/* Where the parts lie in the one allocation. */
typedef struct layout {
  size_t strips, tiles, tile_alive, alive, rows, bytes;
} layout;

static how choose(esmm_ctx *ctx, const esmm_matrix *b, esmm_dtype a)
{
  char why[160];
  if (b->dtype == ESMM_F32)
    return AS_F32;
  if (b->order == ESMM_ROW_MAJOR)
    return b->cols % ESMM_TILE == 0 && b->ld == b->cols && esmm_cuda_address(b) % ALIGN == 0 ? AS_ROWS : COPIED;
  return a == b->dtype && !ctx->force[0] && b->ld <= INT32_MAX && !esmm_cublas_missing(NULL) &&
                 esmm_cublas_usable(ctx, why, sizeof why) && esmm_cublas_start(ctx)
             ? AS_COLUMNS
             : COPIED;
}

static bool lay_out(const esmm_matrix *b, how kind, layout *l)
{
  const int64_t k = b->rows, n = b->cols;
  const size_t shares = (size_t)esmm_cuda_k_padded(k) * sizeof(float);
  size_t rows = 0;
  *l = (layout){0};
  if (k == 0 || n == 0 || kind == AS_COLUMNS)
    return true;
  if (kind == AS_F32) {
    const size_t strips = esmm_cuda_strips_bytes(n, k);
    return strips != SIZE_MAX && esmm_size_mul((size_t)n * sizeof(float), (size_t)k, &rows) &&
           esmm_cuda_reserve(&l->bytes, strips, ALIGN, &l->strips) &&
           esmm_cuda_reserve(&l->bytes, shares, ALIGN, &l->alive) &&
           esmm_cuda_reserve(&l->bytes, rows, ALIGN, &l->rows);
  }
  return (kind == AS_ROWS ||
          esmm_size_mul((size_t)esmm_cuda_tiles(n) * ESMM_TILE * sizeof(uint16_t), (size_t)k, &rows)) &&
         esmm_cuda_reserve(&l->bytes, esmm_cuda_bitmap_bytes(esmm_ceil_div(n, ESMM_STRIP), k), ALIGN, &l->strips) &&
         esmm_cuda_reserve(&l->bytes, esmm_cuda_bitmap_bytes(esmm_cuda_tiles(n), k), ALIGN, &l->tiles) &&
         esmm_cuda_reserve(&l->bytes, shares, ALIGN, &l->tile_alive) &&
         esmm_cuda_reserve(&l->bytes, shares, ALIGN, &l->alive) && esmm_cuda_reserve(&l->bytes, rows, ALIGN, &l->rows);
}

static unsigned forms_of(how kind)
{
  return kind == AS_F32       ? ESMM_FORM(STRIPS) | ESMM_FORM(TIGHT32)
         : kind == AS_COLUMNS ? ESMM_FORM(TURNED16)
                              : ESMM_FORM(ROWS16);
}

/* Is w such a B, of this shape? Its memory then serves again. */
static bool fits(const esmm_ctx *ctx, const esmm_weights *w, const esmm_matrix *b, how kind)
{
  const esmm_cuda_weights *device = w ? w->device : NULL;
  return w && w->backend == ctx->backend && w->ordinal == ctx->ordinal && w->k == b->rows && w->n == b->cols &&
         w->dtype == b->dtype && w->forms == forms_of(kind) && device->borrowed && device->copied == (kind == COPIED);
}

/* Bits and shares of every k that exists. `count` strips or tiles; alive may be 0. */
static esmm_status fill_bits(esmm_ctx *ctx, const esmm_weights *w, CUdeviceptr bits, int64_t count, CUdeviceptr alive)
{
  static const esmm_cuda_function function = {&fatbin_borrow, "esmm_borrow_bits", 0};
  const int64_t words = esmm_cuda_k_padded(w->k) / 32;
  const esmm_count_params params = {.b_bits = bits, .b_strips = count, .words = words, .k = w->k, .out = alive};
  const int64_t blocks = esmm_min(esmm_ceil_div(esmm_max(count * words, 32 * words), ESMM_COUNT_THREADS), 1024);
  return esmm_cuda_launch_blocks(ctx, &function, esmm_max(blocks, 1), ESMM_COUNT_THREADS, ctx->stream, &params);
}

static esmm_status make(esmm_ctx *ctx, const esmm_matrix *b, how kind, esmm_weights **out)
{
  layout l;
  if (b->cols > INT64_MAX / 4 || b->rows > (int64_t)UINT32_MAX - 64 || !lay_out(b, kind, &l))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "a layer's operand is %lld x %lld: it would not fit in memory",
                     (long long)b->rows, (long long)b->cols);
  esmm_status status = esmm_cuda_refuse_capture(ctx, "a layer's pass of new shape");
  if (status != ESMM_OK)
    return status;
  esmm_weights *w = esmm_cuda_weights_new(ctx, b, l.bytes);
  if (!w)
    return ESMM_ERR_MEMORY;
  esmm_cuda_weights *device = w->device;
  device->borrowed = true;
  device->copied = kind == COPIED;
  device->tile_density = 1.0;
  w->strict = true; /* zeros too */
  w->element_density = w->strip_density = 1.0;
  w->forms = forms_of(kind);
  w->makes = kind == AS_COLUMNS ? 0 : ESMM_FORM(STRIPS);
  *out = w;
  status = l.bytes > 0 ? esmm_cuda_alloc(ctx, l.bytes, &device->memory) : ESMM_OK;
  if (status != ESMM_OK || l.bytes == 0)
    return status;
  device->alive = device->memory + l.alive;
  device->strips = esmm_cuda_strips_at(device->memory + l.strips, w->n, w->k);
  if (kind == AS_F32) {
    device->form[ESMM_FORM_STRIPS] = device->memory + l.strips;
    device->form[ESMM_FORM_TIGHT32] = device->memory + l.rows;
    return fill_bits(ctx, w, device->strips.bits, device->strips.strips, device->alive);
  }
  device->strips.data = 0;
  device->tiles = device->memory + l.tiles;
  device->tile_alive = device->memory + l.tile_alive;
  device->rows = device->memory + l.rows; /* where they are copied */
  device->rows_ld = esmm_cuda_tiles(w->n) * ESMM_TILE;
  device->form[ESMM_FORM_ROWS16] = device->memory;
  status = fill_bits(ctx, w, device->strips.bits, device->strips.strips, device->alive);
  return status == ESMM_OK ? fill_bits(ctx, w, device->tiles, esmm_cuda_tiles(w->n), device->tile_alive) : status;
}

/* The strips' bits say that every k is alive; what the extraction finds is written over again. */
static esmm_status fill_f32(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w)
{
  const esmm_cuda_weights *device = w->device;
  const esmm_matrix rows = {.data = esmm_cuda_pointer(device->form[ESMM_FORM_TIGHT32]),
                            .rows = w->k,
                            .cols = w->n,
                            .ld = w->n,
                            .place = ESMM_DEVICE};
  const esmm_matrix turned = esmm_cuda_transposed(b);
  esmm_status status = esmm_cuda_extract(ctx, &turned, &device->strips, true, (esmm_selector){0}, ctx->stream);
  if (status == ESMM_OK)
    status = fill_bits(ctx, w, device->strips.bits, device->strips.strips, 0);
  return status == ESMM_OK ? esmm_cuda_convert(ctx, b, &rows, (esmm_selector){0}, ctx->stream) : status;
}

/* Points w, which fits, at b. */
static esmm_status point(esmm_ctx *ctx, const esmm_matrix *b, how kind, esmm_weights *w)
{
  esmm_cuda_weights *device = w->device;
  if (w->k == 0 || w->n == 0)
    return ESMM_OK;
  if (kind == AS_F32)
    return fill_f32(ctx, b, w);
  if (kind == AS_ROWS) {
    device->rows = esmm_cuda_address(b);
    return ESMM_OK;
  }
  if (kind == AS_COLUMNS) {
    device->form[ESMM_FORM_TURNED16] = esmm_cuda_address(b);
    device->rows_ld = b->ld;
    return ESMM_OK;
  }
  esmm_matrix rows = esmm_cuda_weights_rows(w);
  rows.cols = rows.ld; /* what b does not have is written as zeros */
  return esmm_cuda_convert(ctx, b, &rows, (esmm_selector){0}, ctx->stream);
}

static esmm_status borrow(esmm_ctx *ctx, const esmm_matrix *b, esmm_dtype a, esmm_weights *old, esmm_weights **out)
{
  const how kind = choose(ctx, b, a);
  if (fits(ctx, old, b, kind))
    return point(ctx, b, kind, old);
  esmm_weights *made = NULL;
  const esmm_status status = make(ctx, b, kind, &made);
  if (status != ESMM_OK) {
    esmm_weights_free(made);
    return status;
  }
  *out = made;
  return point(ctx, b, kind, made);
}

esmm_status esmm_cuda_borrow(esmm_ctx *ctx, const esmm_matrix *b, esmm_dtype a, esmm_weights *old, esmm_weights **out)
{
  *out = old;
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, borrow(ctx, b, a, old, out)) : status;
}
