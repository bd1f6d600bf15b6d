/*
 * format.c: what the formats of B have in common: their options, memory, and what a form says about B's zeros.
 */
#include "internal.h"

#include <string.h>

const char *esmm_format_str(esmm_format format)
{
  switch (format) {
  case ESMM_FORMAT_DENSE:
    return "dense";
  case ESMM_FORMAT_BSR:
    return "bsr";
  case ESMM_FORMAT_NM:
    return "nm";
  }
  return "unknown";
}

/* ---- options ---- */

static esmm_status settle_block(esmm_ctx *ctx, const char *name, int *side, int otherwise)
{
  if (*side == 0)
    *side = otherwise;
  if (*side < 1 || *side > ESMM_MAX_BLOCK)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->%s is %d; a block has 1 to %d, or 0 for the default", name, *side,
                     ESMM_MAX_BLOCK);
  return ESMM_OK;
}

static esmm_status settle_nm(esmm_ctx *ctx, esmm_prepare_opts *o)
{
  if (o->n == 0 && o->m == 0) {
    o->n = 2;
    o->m = 4;
  }
  if (o->n < 1 || o->n > o->m || o->m > ESMM_MAX_M)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->n and opts->m are %d:%d; 1 <= n <= m <= %d, or both 0 for 2:4",
                     o->n, o->m, ESMM_MAX_M);
  if (o->nm_cols < 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->nm_cols is %d; it cannot be negative", o->nm_cols);
  o->nm_cols = o->nm_cols == 0 ? 1 : o->nm_cols;
  return ESMM_OK;
}

esmm_status esmm_format_settle(esmm_ctx *ctx, esmm_prepare_opts *o, int block_rows, int block_cols)
{
  if (o->format == ESMM_FORMAT_DENSE)
    return ESMM_OK;
  if (o->format == ESMM_FORMAT_NM)
    return settle_nm(ctx, o);
  if (o->format != ESMM_FORMAT_BSR)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->format is %d, which is no esmm_format", (int)o->format);
  const esmm_status status = settle_block(ctx, "block_rows", &o->block_rows, block_rows);
  return status == ESMM_OK ? settle_block(ctx, "block_cols", &o->block_cols, block_cols) : status;
}

esmm_status esmm_format_refuse_gpu(esmm_ctx *ctx, esmm_format format)
{
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s weights are for the CPU, and this context is of %s: use dense ones",
                   esmm_format_str(format), ctx->device);
}

/* ---- memory ---- */

esmm_form_bytes esmm_form_sizes(const esmm_weights *w)
{
  const size_t size = esmm_dtype_size(w->dtype);
  if (w->format == ESMM_FORMAT_BSR) {
    const esmm_bsr_form *f = &w->bsr;
    return (esmm_form_bytes){.start = (size_t)(f->strips + 1) * sizeof *f->start,
                             .at = (size_t)f->blocks * sizeof *f->at,
                             .values = (size_t)f->blocks * (size_t)(f->block_rows * f->block_cols) * size};
  }
  if (w->format == ESMM_FORMAT_NM) {
    const esmm_nm_form *f = &w->nm;
    const size_t vectors = (size_t)f->panels * (size_t)f->slots;
    return (esmm_form_bytes){.index = f->cols == 1 ? vectors * (ESMM_NM_PANEL / 8) * (size_t)f->bits
                                                   : (size_t)f->strips * f->list_bytes,
                             .values = vectors * ESMM_NM_PANEL * size};
  }
  return (esmm_form_bytes){0};
}

/* A part with its slack; the slack alone is set, to zeros. */
static void *alloc_part(const esmm_weights *w, size_t bytes)
{
  char *part = esmm_mem_alloc(&w->allocator, bytes + ESMM_FORM_SLACK);
  if (part)
    memset(part + bytes, 0, ESMM_FORM_SLACK);
  return part;
}

static void free_part(const esmm_weights *w, void *part, size_t bytes)
{
  esmm_mem_free(&w->allocator, part, bytes + ESMM_FORM_SLACK);
}

void esmm_form_free(esmm_weights *w)
{
  const esmm_form_bytes bytes = esmm_form_sizes(w);
  free_part(w, w->bsr.start, bytes.start);
  free_part(w, w->bsr.at, bytes.at);
  free_part(w, w->bsr.values, bytes.values);
  free_part(w, w->nm.index, bytes.index);
  free_part(w, w->nm.values, bytes.values);
}

static esmm_status no_memory(esmm_ctx *ctx, const esmm_weights *w)
{
  return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the %s form of a %lld x %lld matrix",
                   esmm_format_str(w->format), (long long)w->k, (long long)w->n);
}

static int bits_of(int m)
{
  int bits = 0;
  while (1 << bits < m)
    bits++;
  return bits;
}

static void shape_nm(const esmm_prepare_opts *opts, esmm_weights *w)
{
  esmm_nm_form *f = &w->nm;
  f->n = opts->n;
  f->m = opts->m;
  f->cols = opts->nm_cols;
  f->bits = bits_of(f->m);
  f->slots = w->k / f->m * f->n + esmm_min(f->n, w->k % f->m);
  f->panels = esmm_ceil_div(w->n, ESMM_NM_PANEL);
  if (f->cols > 1) {
    f->strips = esmm_ceil_div(w->n, f->cols);
    f->list_bytes = (size_t)esmm_ceil_div(f->slots * f->bits, 64) * 8;
  }
}

void esmm_form_shape(const esmm_prepare_opts *opts, esmm_weights *w)
{
  if (w->format == ESMM_FORMAT_NM) {
    shape_nm(opts, w);
    return;
  }
  w->bsr.block_rows = opts->block_rows;
  w->bsr.block_cols = opts->block_cols;
  w->bsr.strips = esmm_ceil_div(w->n, opts->block_cols);
  w->bsr.levels = esmm_ceil_div(w->k, opts->block_rows);
}

static esmm_status alloc_bsr(esmm_ctx *ctx, esmm_weights *w)
{
  esmm_bsr_form *f = &w->bsr;
  if (f->strips >= INT32_MAX || f->levels > INT32_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW,
                     "%lld x %lld has %lld rows and %lld columns of %d x %d blocks, more than int32 indices reach: use "
                     "larger blocks",
                     (long long)w->k, (long long)w->n, (long long)f->levels, (long long)f->strips, f->block_rows,
                     f->block_cols);
  f->start = alloc_part(w, esmm_form_sizes(w).start);
  return f->start ? ESMM_OK : no_memory(ctx, w);
}

esmm_status esmm_bsr_alloc_blocks(esmm_ctx *ctx, int64_t blocks, esmm_weights *w)
{
  esmm_bsr_form *f = &w->bsr;
  size_t bytes;
  if (blocks > INT32_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW,
                     "%lld blocks of %d x %d are more than int32 indices reach: use larger blocks", (long long)blocks,
                     f->block_rows, f->block_cols);
  if (!esmm_size_mul((size_t)blocks, (size_t)(f->block_rows * f->block_cols) * esmm_dtype_size(w->dtype), &bytes) ||
      bytes > SIZE_MAX / 4)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "%lld blocks of %d x %d would not fit in memory", (long long)blocks,
                     f->block_rows, f->block_cols);
  f->blocks = blocks;
  const esmm_form_bytes sizes = esmm_form_sizes(w);
  f->at = alloc_part(w, sizes.at);
  f->values = f->at ? alloc_part(w, sizes.values) : NULL;
  return f->values ? ESMM_OK : no_memory(ctx, w);
}

/* No size here overflows: all are smaller than those of the dense forms, which esmm_weights_alloc has looked at. */
static esmm_status alloc_nm(esmm_ctx *ctx, esmm_weights *w)
{
  const esmm_form_bytes sizes = esmm_form_sizes(w);
  w->nm.index = alloc_part(w, sizes.index);
  w->nm.values = w->nm.index ? alloc_part(w, sizes.values) : NULL;
  return w->nm.values ? ESMM_OK : no_memory(ctx, w);
}

esmm_status esmm_form_alloc(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  esmm_form_shape(opts, w);
  return w->format == ESMM_FORMAT_BSR ? alloc_bsr(ctx, w) : alloc_nm(ctx, w);
}

/* ---- contents ---- */

esmm_status esmm_form_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  return w->format == ESMM_FORMAT_BSR ? esmm_bsr_fill(ctx, b, w) : esmm_nm_fill(ctx, b, w);
}

void esmm_form_unpack(const esmm_weights *w, esmm_matrix *out)
{
  const size_t size = esmm_dtype_size(w->dtype);
  if (w->k == 0 || w->n == 0) /* out->data may be NULL */
    return;
  for (int64_t k = 0; k < w->k; k++)
    memset((char *)out->data + (size_t)(k * out->ld) * size, 0, (size_t)w->n * size);
  if (w->format == ESMM_FORMAT_BSR)
    esmm_bsr_unpack(w, out);
  else
    esmm_nm_unpack(w, out);
}

bool esmm_form_valid(const esmm_weights *w, char *why, size_t why_bytes)
{
  return w->format == ESMM_FORMAT_BSR ? esmm_bsr_valid(w, why, why_bytes) : esmm_nm_valid(w, why, why_bytes);
}

void esmm_form_scan(esmm_ctx *ctx, esmm_weights *w)
{
  int64_t nonzero = 0, set = 0;
  const int64_t scanned = w->k > 0 ? w->panels : 0; /* without k there is nothing in a panel, however many there are */
#pragma omp parallel for num_threads(ctx->threads) schedule(static) reduction(+ : nonzero, set)
  for (int64_t q = 0; q < scanned; q++) {
    uint64_t *bits = w->bits + q * w->words;
    memset(bits, 0, (size_t)w->words * sizeof *bits);
    nonzero += w->format == ESMM_FORMAT_BSR ? esmm_bsr_scan_panel(w, q, bits) : esmm_nm_scan_panel(w, q, bits);
    for (int64_t i = 0; i < w->words; i++)
      set += __builtin_popcountll(bits[i]);
  }
  (void)ctx; /* unused without OpenMP */
  esmm_weights_set_densities(w, nonzero, set);
  esmm_weights_set_alive(w);
}
