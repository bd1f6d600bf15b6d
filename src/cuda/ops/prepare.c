/*
 * prepare.c: B on the GPU, once, all of it in one allocation: its forms (forms.c), bitmaps of strips of 32 columns, and
 * of tiles of 128 where it is 16-bit, and for each k the share of strips and of tiles that need it: the plan on the
 * device multiplies with that.
 */
#include "choose/recall.h"
#include "cuda/ops/blocks.h"
#include "cuda/ops/forms.h"
#include "cuda/ops/nm.h"

#include <stddef.h>
#include <string.h>

#define DEFAULT_RATIO 3.0 /* max_bytes_ratio, unless given */

ESMM_FATBIN(count);
ESMM_FATBIN(prepare);

/* ---- filling ---- */

/* What takes a separate pass: the nonzeros of an fp32 B, misfits of an N:M other than 2:4. */
static esmm_status look_at(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUdeviceptr found,
                           CUstream stream)
{
  static const esmm_cuda_function count = {&fatbin_count, "esmm_count_nonzero", 0};
  const esmm_nonzero_params params = {.m = esmm_cuda_matrix(b), .out = found + offsetof(esmm_prepare_found, nonzero)};
  const unsigned blocks = 8 * (unsigned)esmm_cuda_get(ctx)->multiprocessors; /* each counts what it comes to */
  const esmm_format nm = esmm_cuda_nm_format(w);
  esmm_status status = ESMM_OK;
  if (!esmm_dtype_is_16bit(b->dtype))
    status = esmm_cuda_launch_blocks(ctx, &count, blocks, ESMM_COUNT_THREADS, stream, &params);
  if (status == ESMM_OK && w->format == ESMM_FORMAT_NM && !esmm_cuda_nm_is_24(&nm))
    status = esmm_cuda_nm_check(ctx, b, &nm, found + offsetof(esmm_prepare_found, misfit), stream);
  return status;
}

/* From the bitmaps of strips: those of tiles, each k's share of them, how many bits are set. */
static esmm_status finish_bits(esmm_ctx *ctx, const esmm_weights *w, CUdeviceptr found, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_prepare, "esmm_prepare_bits", 0};
  const esmm_cuda_weights *device = esmm_cuda_of(w);
  const esmm_prepare_bits_params params = {.bits = device->strips.bits,
                                           .strips = device->strips.strips,
                                           .words = device->strips.k_padded / 32,
                                           .k = w->k,
                                           .alive = device->alive,
                                           .tiles = device->tiles,
                                           .tile_alive = device->tile_alive,
                                           .found = found,
                                           .strict = w->strict};
  return esmm_cuda_launch_blocks(ctx, &function, params.words, ESMM_PREPARE_THREADS, stream, &params);
}

static esmm_status take_found(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_found *found, esmm_weights *w)
{
  esmm_cuda_weights *device = w->device;
  const esmm_format nm = esmm_cuda_nm_format(w);
  w->element_density = (double)found->nonzero / ((double)w->k * (double)w->n);
  w->strip_density = (double)found->set / ((double)w->k * (double)w->panels);
  w->full = w->strict || (int64_t)found->set == w->k * w->panels;
  if (device->tiles)
    device->tile_density = (double)found->tile_set / ((double)w->k * (double)esmm_cuda_tiles(w->n));
  return w->format == ESMM_FORMAT_NM ? esmm_cuda_nm_fits(ctx, b, &nm, found->misfit) : ESMM_OK;
}

/* b lies on the GPU and is not empty. All work is launched before the host waits, once, for what was found. */
static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  esmm_prepare_found found = {0};
  CUdeviceptr at = 0;
  esmm_status status = esmm_cuda_scratch(ctx, sizeof found, stream, &at);
  if (status == ESMM_OK)
    status = esmm_cuda_zero(ctx, at, sizeof found, stream);
  if (status == ESMM_OK)
    status = look_at(ctx, b, w, at, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_forms_fill(ctx, b, w, at, stream);
  if (status == ESMM_OK)
    status = finish_bits(ctx, w, at, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, &found, at, sizeof found, stream);
  return status == ESMM_OK ? take_found(ctx, b, &found, w) : status;
}

/* ---- preparing ---- */

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

esmm_weights *esmm_cuda_weights_new(esmm_ctx *ctx, const esmm_matrix *b, size_t bytes)
{
  esmm_weights *w = esmm_mem_alloc(&ctx->allocator, sizeof *w);
  esmm_cuda_weights *device = w ? esmm_mem_alloc(&ctx->allocator, sizeof *device) : NULL;
  if (!device) {
    esmm_mem_free(&ctx->allocator, w, sizeof *w);
    (void)esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for weights");
    return NULL;
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
  w->full = true; /* until a strip without some k is found */
  w->panels = esmm_ceil_div(w->n, ESMM_PANEL);
  w->bytes = sizeof *w + sizeof *device + bytes;
  w->device = device;
  return w;
}

static esmm_status weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                                 const esmm_cuda_layout *l, esmm_weights **out)
{
  esmm_weights *w = esmm_cuda_weights_new(ctx, b, l->bytes);
  if (!w)
    return ESMM_ERR_MEMORY;
  esmm_cuda_weights *device = w->device;
  w->use = opts->use;
  w->format = opts->format.kind;
  w->strict = opts->strict != 0;
  w->forms = l->forms;
  w->makes = l->forms & (ESMM_FORM(STRIPS) | ESMM_FORM(ROWS16)) ? ESMM_FORM(STRIPS) : 0;
  if (w->format != ESMM_FORMAT_DENSE)
    esmm_form_shape(&opts->format, w);
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
 * them the dense kernels read the first too, so nothing becomes impossible, except for 2:4 on a GPU that is no Hopper.
 * Padding and bitmaps are not counted.
 */
static esmm_status choose_forms(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_cuda_layout *l)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : DEFAULT_RATIO;
  const double nm = opts->format.kind == ESMM_FORMAT_NM ? esmm_cuda_nm_ratio(&opts->format) : 0.0;
  const bool rows_too = nm > 0.0 && esmm_cuda_get(ctx)->sm != 90; /* 2:4 of more than 16 rows needs Hopper */
  const double least = opts->format.kind == ESMM_FORMAT_BSR ? 0.0 /* see check_blocks */
                       : nm > 0.0 && !rows_too              ? nm
                                                            : 1.0 + nm;
  if (opts->format.kind != ESMM_FORMAT_DENSE && !esmm_dtype_is_16bit(b->dtype))
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s weights of %s are for the CPU, and this is a %s context: use %s",
                     esmm_format_str(opts->format.kind), esmm_dtype_str(b->dtype), esmm_ctx_kind(ctx),
                     "bf16 or f16, or dense ones");
  if (ratio < least && b->rows > 0 && b->cols > 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "prepared weights would hold %.2f times b's bytes%s, and max_bytes_ratio allows %.2f", least,
                     opts->format.kind != ESMM_FORMAT_NM ? ""
                     : rows_too                          ? ", since this GPU needs b's rows beside 2:4"
                                                         : ", since a GPU keeps b's rows unless it fits 2:4",
                     ratio);
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
