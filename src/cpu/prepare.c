/*
 * prepare.c: B, once: bitmaps of its 32-column strips, its densities, and the forms that kernels read (forms.c), each
 * of them in B's own dtype, so that rows and panels of a dense B hold at most twice its bytes.
 */
#include "bits.h"
#include "choose/recall.h"
#include "convert.h"
#include "cpu/cpu.h"
#include "cpu/forms.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* None where there are no panels: k alone could be any number. */
static size_t alive_bytes(const esmm_weights *w)
{
  return w->panels > 0 ? (size_t)w->k * sizeof *w->alive : 0;
}

void esmm_cpu_weights_free(esmm_weights *w)
{
  esmm_forms_free(w);
  esmm_mem_free(&w->allocator, w->bits, (size_t)w->panels * (size_t)w->words * sizeof *w->bits);
  esmm_mem_free(&w->allocator, w->alive, alive_bytes(w));
}

void esmm_weights_count_bytes(esmm_weights *w)
{
  w->bytes = sizeof *w + (size_t)w->panels * (size_t)w->words * sizeof *w->bits + alive_bytes(w) + esmm_forms_bytes(w);
}

esmm_status esmm_weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                               esmm_weights **weights)
{
  const int64_t k = b->rows, n = b->cols, panels = esmm_ceil_div(n, ESMM_PANEL), words = esmm_ceil_div(k, 64);
  size_t bits_bytes, rows_bytes, panel_most, sum;
  if (k > (int64_t)UINT32_MAX - 64 || n > INT64_MAX - 64 ||
      !esmm_size_mul((size_t)panels * sizeof(uint64_t), (size_t)words, &bits_bytes) ||
      !esmm_size_mul((size_t)esmm_rows_ld(n, b->dtype) * esmm_dtype_size(b->dtype), (size_t)k, &rows_bytes) ||
      !esmm_size_mul((size_t)panels * ESMM_PANEL * esmm_dtype_size(b->dtype), (size_t)k, &panel_most) ||
      !esmm_size_add(rows_bytes, panel_most, &sum) || sum > SIZE_MAX / 4)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b is %lld x %lld: prepared weights would not fit in memory", (long long)k,
                     (long long)n);
  esmm_weights *w = esmm_mem_alloc(&ctx->allocator, sizeof *w);
  if (!w)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for weights");
  memset(w, 0, sizeof *w);
  w->allocator = ctx->allocator;
  w->serial = esmm_weights_serial();
  w->backend = &esmm_cpu_backend;
  w->k = k;
  w->n = n;
  w->dtype = b->dtype;
  w->use = opts->use;
  w->format = opts->format.kind;
  w->panels = panels;
  w->words = words;
  esmm_status status = esmm_forms_alloc(ctx, opts, w);
  if (status == ESMM_OK) {
    w->bits = esmm_mem_alloc(&w->allocator, bits_bytes);
    w->alive = esmm_mem_alloc(&w->allocator, alive_bytes(w));
    if (!w->bits || !w->alive)
      status = esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the weights of a %lld x %lld matrix", (long long)k,
                         (long long)n);
  }
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  *weights = w;
  return ESMM_OK;
}

void esmm_weights_set_densities(esmm_weights *w, int64_t nonzero, int64_t set)
{
  const double elements = (double)w->k * (double)w->n, all_bits = (double)w->k * (double)w->panels;
  w->element_density = elements > 0 ? (double)nonzero / elements : 0.0;
  w->strip_density = all_bits > 0 ? (double)set / all_bits : 0.0;
  w->full = set == w->k * w->panels;
}

void esmm_weights_set_alive(esmm_weights *w)
{
  for (int64_t k = 0; k < w->k && w->panels > 0; k++) {
    int64_t count = 0;
    for (int64_t q = 0; q < w->panels; q++)
      count += (int64_t)(w->bits[q * w->words + k / 64] >> (k % 64) & 1);
    w->alive[k] = (float)((double)count / (double)w->panels);
  }
}

/* Pass 1 over panel q: its bitmap; returns how many elements are nonzero. */
static int64_t scan_panel(const esmm_matrix *b, esmm_weights *w, int64_t q)
{
  const int64_t j0 = q * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, w->n - j0);
  uint64_t *bits = w->bits + q * w->words;
  int64_t nonzero = 0;
  memset(bits, 0, (size_t)w->words * sizeof *bits);
  uint32_t block[ESMM_READ_ROWS][ESMM_PANEL];
  for (int64_t k = 0; k < w->k; k++) {
    if (k % ESMM_READ_ROWS == 0)
      esmm_read_rows(b, k, esmm_min(ESMM_READ_ROWS, w->k - k), j0, cols, block, sizeof *block);
    const int64_t set = esmm_count_nonzero(block[k % ESMM_READ_ROWS], w->dtype, cols);
    nonzero += set;
    bits[k / 64] |= (uint64_t)(set != 0) << (k % 64);
  }
  return nonzero;
}

/* In strict weights every k of every panel is kept, so every bit is set. */
static void set_all_bits(esmm_weights *w)
{
  for (int64_t q = 0; q < w->panels && w->words > 0; q++)
    for (int64_t i = 0; i < w->words; i++) {
      const int64_t left = w->k - 64 * i;
      w->bits[q * w->words + i] = left >= 64 ? UINT64_MAX : ((uint64_t)1 << left) - 1;
    }
}

typedef struct scan {
  const esmm_matrix *b;
  esmm_weights *w;
  _Atomic int64_t nonzero;
} scan;

static void scan_panels(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  scan *s = arg;
  int64_t nonzero = 0;
  for (int64_t q = first; q < end; q++)
    nonzero += scan_panel(s->b, s->w, q);
  s->nonzero += nonzero;
}

static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, bool strict, esmm_weights *w)
{
  scan s = {.b = b, .w = w};
  int64_t set = 0;
  const int64_t scanned = w->k > 0 ? w->panels : 0; /* without k there is nothing in a panel, however many there are */
  esmm_for(ctx, ctx->threads, scanned, esmm_panels_at_once(w), scan_panels, &s);
  for (int64_t i = 0; i < scanned * w->words; i++)
    set += __builtin_popcountll(w->bits[i]);
  esmm_weights_set_densities(w, s.nonzero, set);
  w->strict = strict;
  w->full = w->full || strict;
  if (strict)
    set_all_bits(w);
  esmm_weights_set_alive(w);
  return esmm_forms_fill(ctx, b, w);
}

/* B's bytes, with its edges rounded up to whole blocks where it is kept in blocks. */
static double own_bytes(const esmm_weights *w)
{
  const double size = (double)esmm_dtype_size(w->dtype);
  const esmm_bsr_form *f = &w->bsr;
  if (w->format != ESMM_FORMAT_BSR)
    return (double)w->k * (double)w->n * size;
  return (double)f->levels * (double)f->block_rows * (double)f->strips * (double)f->block_cols * size;
}

/* May the forms hold as many bytes as they do? Ragged edges are padded to whole panels, cache lines and blocks: on
   small matrices padding alone may pass the ratio, so it does not count. */
static esmm_status check_ratio(esmm_ctx *ctx, const esmm_prepare_opts *opts, const esmm_weights *w)
{
  const double unless_given = ESMM_BYTES_RATIO + (w->forms & ESMM_FORM(ONEDNN) ? 1.0 : 0.0);
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : unless_given;
  const double size = (double)esmm_dtype_size(w->dtype), own = own_bytes(w);
  const double held = (double)esmm_forms_held(w);
  const double slack = 128.0 * ESMM_PANEL + 2.0 * ESMM_PANEL * (double)w->k * size;
  const char *instead = w->format == ESMM_FORMAT_BSR  ? ": take larger blocks, or dense weights"
                        : w->format == ESMM_FORMAT_NM ? ": take dense weights"
                        : w->use == ESMM_USE_ANY      ? ": prepare for decode or for large m only"
                                                      : "";
  if (held > ratio * own + slack)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "prepared weights would hold %.2f times b's bytes, and max_bytes_ratio allows %.2f%s", held / own,
                     ratio, instead);
  return ESMM_OK;
}

esmm_status esmm_prepare_finish(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_status status, esmm_weights *w,
                                esmm_weights **out)
{
  if (status == ESMM_OK)
    status = check_ratio(ctx, opts, w);
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  if (w->format != ESMM_FORMAT_DENSE)
    esmm_form_scan(ctx, w);
  esmm_weights_count_bytes(w);
  *out = w;
  return ESMM_OK;
}

esmm_status esmm_prepare_checked(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out)
{
  esmm_weights *w = NULL;
  esmm_status status = esmm_weights_alloc(ctx, b, opts, &w);
  if (status == ESMM_OK)
    status = w->format == ESMM_FORMAT_DENSE ? fill(ctx, b, opts->strict != 0, w) : esmm_forms_fill(ctx, b, w);
  if (status == ESMM_OK)
    esmm_forms_extra(ctx, b, opts->max_bytes_ratio, w);
  return esmm_prepare_finish(ctx, opts, status, w, out);
}
