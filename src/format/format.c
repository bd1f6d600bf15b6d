/*
 * format.c: what the formats of B share: options, memory, and a form's statistics of B's zeros.
 */
#include "backend.h"
#include "threads.h"

#include <string.h>

const char *esmm_format_str(esmm_format_kind kind)
{
  switch (kind) {
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

static esmm_status settle_side(esmm_ctx *ctx, const char *what, const char *name, int *side, int otherwise)
{
  if (*side == 0)
    *side = otherwise;
  if (*side < 1 || *side > ESMM_MAX_BLOCK)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s%s is %d; a block has 1 to %d, or 0 for the default", what, name, *side,
                     ESMM_MAX_BLOCK);
  return ESMM_OK;
}

static esmm_status settle_bsr(esmm_ctx *ctx, const char *what, esmm_format *f, int block_rows, int block_cols)
{
  const esmm_status status = settle_side(ctx, what, "block_rows", &f->block_rows, block_rows);
  return status == ESMM_OK ? settle_side(ctx, what, "block_cols", &f->block_cols, block_cols) : status;
}

static esmm_status settle_nm(esmm_ctx *ctx, const char *what, esmm_format *f)
{
  if (f->keep == 0 && f->group == 0) {
    f->keep = 2;
    f->group = 4;
  }
  if (f->keep < 1 || f->keep > f->group || f->group > ESMM_MAX_GROUP)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                     "%skeep and %sgroup are %d:%d; 1 <= keep <= group <= %d, or both 0 for 2:4", what, what, f->keep,
                     f->group, ESMM_MAX_GROUP);
  if (f->group_cols < 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%sgroup_cols is %d; it cannot be negative", what, f->group_cols);
  f->group_cols = f->group_cols == 0 ? 1 : f->group_cols;
  return ESMM_OK;
}

esmm_status esmm_format_settle(esmm_ctx *ctx, const char *what, esmm_format *format, int block_rows, int block_cols)
{
  const esmm_format given = *format;
  for (int i = 0; i < 2; i++)
    if (given.reserved[i] != 0)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%sreserved[%d] is %d; it must be 0", what, i, given.reserved[i]);
  *format = (esmm_format){.kind = given.kind};
  switch (given.kind) {
  case ESMM_FORMAT_DENSE:
    return ESMM_OK;
  case ESMM_FORMAT_BSR:
    format->block_rows = given.block_rows;
    format->block_cols = given.block_cols;
    return settle_bsr(ctx, what, format, block_rows, block_cols);
  case ESMM_FORMAT_NM:
    format->keep = given.keep;
    format->group = given.group;
    format->group_cols = given.group_cols;
    return settle_nm(ctx, what, format);
  }
  return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%skind is %d, which is no esmm_format_kind", what, (int)given.kind);
}

esmm_status esmm_format_supported(esmm_ctx *ctx, esmm_format_kind kind)
{
  if (ctx->backend->formats() & 1u << kind)
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s weights are for the CPU, and this is a %s context: use dense ones",
                   esmm_format_str(kind), esmm_ctx_kind(ctx));
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
    return (esmm_form_bytes){.index = f->group_cols == 1 ? vectors * (ESMM_NM_PANEL / 8) * (size_t)f->bits
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

static int bits_of(int group)
{
  int bits = 0;
  while (1 << bits < group)
    bits++;
  return bits;
}

static void shape_nm(const esmm_format *format, esmm_weights *w)
{
  esmm_nm_form *f = &w->nm;
  f->keep = format->keep;
  f->group = format->group;
  f->group_cols = format->group_cols;
  f->bits = bits_of(f->group);
  f->slots = w->k / f->group * f->keep + esmm_min(f->keep, w->k % f->group);
  f->panels = esmm_ceil_div(w->n, ESMM_NM_PANEL);
  if (f->group_cols > 1) {
    f->strips = esmm_ceil_div(w->n, f->group_cols);
    f->list_bytes = (size_t)esmm_ceil_div(f->slots * f->bits, 64) * 8;
  }
}

void esmm_form_shape(const esmm_format *format, esmm_weights *w)
{
  if (w->format == ESMM_FORMAT_NM) {
    shape_nm(format, w);
    return;
  }
  w->bsr.block_rows = format->block_rows;
  w->bsr.block_cols = format->block_cols;
  w->bsr.strips = w->k > 0 ? esmm_ceil_div(w->n, format->block_cols) : 0;
  w->bsr.levels = esmm_ceil_div(w->k, format->block_rows);
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

esmm_status esmm_form_alloc(esmm_ctx *ctx, const esmm_format *format, esmm_weights *w)
{
  esmm_form_shape(format, w);
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

typedef struct scan {
  esmm_weights *w;
  _Atomic int64_t nonzero, set;
} scan;

static void scan_panels(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  scan *s = arg;
  const esmm_weights *w = s->w;
  int64_t nonzero = 0, set = 0;
  for (int64_t q = first; q < end; q++) {
    uint64_t *bits = w->bits + q * w->words;
    memset(bits, 0, (size_t)w->words * sizeof *bits);
    nonzero += w->format == ESMM_FORMAT_BSR ? esmm_bsr_scan_panel(w, q, bits) : esmm_nm_scan_panel(w, q, bits);
    for (int64_t i = 0; i < w->words; i++)
      set += __builtin_popcountll(bits[i]);
  }
  s->nonzero += nonzero;
  s->set += set;
}

void esmm_form_scan(esmm_ctx *ctx, esmm_weights *w)
{
  scan s = {.w = w};
  if (w->k > 0) /* without k there is nothing in a panel, however many there are */
    esmm_for(ctx, ctx->threads, w->panels, 1, scan_panels, &s);
  esmm_weights_set_densities(w, s.nonzero, s.set);
  esmm_weights_set_alive(w);
}
