/*
 * prepare.c: B, once. Bitmaps of its 32-column strips, and the one or two forms that kernels read (internal.h), or the
 * one of another format (format/).
 *
 * Both forms stay in B's own dtype, so that together they hold at most twice B's bytes: kernels widen bf16 and fp16
 * while they read a panel, which is done once for many rows of A.
 */
#include "bits.h"
#include "convert.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static size_t form_bytes(const esmm_weights *w)
{
  const esmm_form_bytes form = esmm_form_sizes(w);
  return form.start + form.at + form.index + form.values;
}

static size_t count_bytes(const esmm_weights *w)
{
  size_t bytes = sizeof *w + (size_t)w->panels * (size_t)w->words * sizeof *w->bits + (size_t)w->k * sizeof *w->alive +
                 w->rows_bytes + w->panel_bytes + form_bytes(w);
  if (w->before)
    bytes += (size_t)w->panels * (size_t)(w->words + 1) * sizeof *w->before;
  if (w->panel_at)
    bytes += (size_t)(w->panels + 1) * sizeof *w->panel_at;
  return bytes;
}

void esmm_weights_count_bytes(esmm_weights *w)
{
  w->bytes = count_bytes(w);
}

void esmm_weights_free(esmm_weights *w)
{
  if (!w)
    return;
  const esmm_allocator allocator = w->allocator;
  if (w->cuda)
    esmm_cuda_weights_free(w);
  esmm_form_free(w);
  esmm_mem_free(&allocator, w->bits, (size_t)w->panels * (size_t)w->words * sizeof *w->bits);
  esmm_mem_free(&allocator, w->alive, (size_t)w->k * sizeof *w->alive);
  esmm_mem_free(&allocator, w->rows, w->rows_bytes);
  esmm_mem_free(&allocator, w->panel_data, w->panel_bytes);
  esmm_mem_free(&allocator, w->before, (size_t)w->panels * (size_t)(w->words + 1) * sizeof *w->before);
  esmm_mem_free(&allocator, w->panel_at, (size_t)(w->panels + 1) * sizeof *w->panel_at);
  esmm_mem_free(&allocator, w, sizeof *w);
}

/* The forms of a dense B that its use asks for. */
static bool alloc_dense(esmm_weights *w, size_t rows_bytes)
{
  bool ok = true;
  if (w->use != ESMM_USE_LARGE_M) {
    w->rows_ld = esmm_rows_ld(w->n, w->dtype);
    w->rows_bytes = rows_bytes;
    w->rows = esmm_mem_alloc(&w->allocator, rows_bytes);
    ok = w->rows;
  }
  if (w->use != ESMM_USE_DECODE) {
    w->before = esmm_mem_alloc(&w->allocator, (size_t)w->panels * (size_t)(w->words + 1) * sizeof *w->before);
    w->panel_at = esmm_mem_alloc(&w->allocator, (size_t)(w->panels + 1) * sizeof *w->panel_at);
    ok = ok && w->before && w->panel_at;
  }
  return ok;
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
  w->k = k;
  w->n = n;
  w->dtype = b->dtype;
  w->use = opts->use;
  w->format = opts->format;
  w->panels = panels;
  w->words = words;
  const bool dense = w->format == ESMM_FORMAT_DENSE;
  esmm_status status = dense ? ESMM_OK : esmm_form_alloc(ctx, opts, w);
  if (status == ESMM_OK) {
    w->bits = esmm_mem_alloc(&w->allocator, bits_bytes);
    w->alive = esmm_mem_alloc(&w->allocator, (size_t)k * sizeof *w->alive);
    if (!w->bits || !w->alive || (dense && !alloc_dense(w, rows_bytes)))
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
  for (int64_t k = 0; k < w->k; k++) {
    int64_t count = 0;
    for (int64_t q = 0; q < w->panels; q++)
      count += (int64_t)(w->bits[q * w->words + k / 64] >> (k % 64) & 1);
    w->alive[k] = w->panels ? (float)((double)count / (double)w->panels) : 0.0f;
  }
}

void esmm_read_row(const esmm_matrix *b, int64_t k, int64_t j0, int64_t cols, void *out)
{
  const size_t size = esmm_dtype_size(b->dtype);
  if (b->order == ESMM_ROW_MAJOR) {
    memcpy(out, (const char *)b->data + (size_t)(k * b->ld + j0) * size, (size_t)cols * size);
    return;
  }
  esmm_copy_elements(out, 1, (const char *)b->data + (size_t)(j0 * b->ld + k) * size, b->ld, cols, b->dtype);
}

#define READ_ROWS 16 /* rows read together: a column-major B then gives a whole cache line of each column */

/* Rows k..k+rows-1 of the columns j0..j0+cols-1, `stride` bytes from one to the next. */
static void read_rows(const esmm_matrix *b, int64_t k, int64_t rows, int64_t j0, int64_t cols, void *out, size_t stride)
{
  const size_t size = esmm_dtype_size(b->dtype);
  if (b->order == ESMM_ROW_MAJOR) {
    for (int64_t r = 0; r < rows; r++)
      esmm_read_row(b, k + r, j0, cols, (char *)out + (size_t)r * stride);
    return;
  }
  const int64_t step = (int64_t)(stride / size);
  for (int64_t j = 0; j < cols; j++) {
    const char *in = (const char *)b->data + (size_t)((j0 + j) * b->ld + k) * size;
    esmm_copy_elements((char *)out + (size_t)j * size, step, in, 1, rows, b->dtype);
  }
}

/* Pass 1 over panel q: its bitmap; returns how many elements are nonzero. */
static int64_t scan_panel(const esmm_matrix *b, esmm_weights *w, int64_t q)
{
  const int64_t j0 = q * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, w->n - j0);
  uint64_t *bits = w->bits + q * w->words;
  int64_t nonzero = 0;
  memset(bits, 0, (size_t)w->words * sizeof *bits);
  uint32_t block[READ_ROWS][ESMM_PANEL];
  for (int64_t k = 0; k < w->k; k++) {
    if (k % READ_ROWS == 0)
      read_rows(b, k, esmm_min(READ_ROWS, w->k - k), j0, cols, block, sizeof *block);
    const int64_t set = esmm_count_nonzero(block[k % READ_ROWS], w->dtype, cols);
    nonzero += set;
    bits[k / 64] |= (uint64_t)(set != 0) << (k % 64);
  }
  return nonzero;
}

/* Pass 2: the kept rows of panel q, two halves of 16 columns, zero-padded past n. */
static void fill_panel(const esmm_matrix *b, esmm_weights *w, int64_t q)
{
  const size_t size = esmm_dtype_size(w->dtype), half_bytes = ESMM_HALF * size;
  const int64_t j0 = q * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, w->n - j0);
  const uint64_t *bits = w->bits + q * w->words;
  const size_t kept = w->before[q * (w->words + 1) + w->words];
  char *first = (char *)w->panel_data + w->panel_at[q] * size, *second = first + kept * half_bytes;
  uint32_t block[READ_ROWS][ESMM_PANEL] = {0};
  for (int64_t k = 0; k < w->k; k++) {
    const uint64_t together = (((uint64_t)1 << READ_ROWS) - 1) << (k % 64);
    if (k % READ_ROWS == 0 && bits[k / 64] & together)
      read_rows(b, k, esmm_min(READ_ROWS, w->k - k), j0, cols, block, sizeof *block);
    if (!(bits[k / 64] >> (k % 64) & 1))
      continue;
    const uint32_t *row = block[k % READ_ROWS];
    memcpy(first, row, half_bytes);
    memcpy(second, (const char *)row + half_bytes, half_bytes);
    first += half_bytes;
    second += half_bytes;
  }
}

/* Where each panel starts and how many k's it keeps before each word. */
static void lay_out_panels(esmm_weights *w)
{
  uint64_t at = 0;
  for (int64_t q = 0; q < w->panels; q++) {
    uint32_t kept = 0, *before = w->before + q * (w->words + 1);
    for (int64_t i = 0; i < w->words; i++) {
      before[i] = kept;
      kept += (uint32_t)__builtin_popcountll(w->bits[q * w->words + i]);
    }
    before[w->words] = kept;
    w->panel_at[q] = at;
    at += (uint64_t)kept * ESMM_PANEL;
  }
  w->panel_at[w->panels] = at;
  w->panel_bytes = (size_t)at * esmm_dtype_size(w->dtype);
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

static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, bool strict, esmm_weights *w)
{
  int64_t nonzero = 0, set = 0;
  const int64_t scanned = w->k > 0 ? w->panels : 0; /* without k there is nothing in a panel, however many there are */
#pragma omp parallel for num_threads(ctx->threads) schedule(static) reduction(+ : nonzero)
  for (int64_t q = 0; q < scanned; q++)
    nonzero += scan_panel(b, w, q);
  for (int64_t i = 0; i < scanned * w->words; i++)
    set += __builtin_popcountll(w->bits[i]);
  esmm_weights_set_densities(w, nonzero, set);
  w->strict = strict;
  w->full = w->full || strict;
  if (strict)
    set_all_bits(w);
  esmm_weights_set_alive(w);
  if (w->before) {
    lay_out_panels(w);
    w->panel_data = esmm_mem_alloc(&w->allocator, w->panel_bytes);
    if (!w->panel_data)
      return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of panels", w->panel_bytes);
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
    for (int64_t q = 0; q < w->panels; q++)
      fill_panel(b, w, q);
  }
  if (w->rows) {
    const size_t size = esmm_dtype_size(w->dtype), ld_bytes = (size_t)w->rows_ld * size;
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
    for (int64_t k = 0; k < w->k; k += READ_ROWS) {
      const int64_t count = esmm_min(READ_ROWS, w->k - k);
      char *row = (char *)w->rows + (size_t)k * ld_bytes;
      read_rows(b, k, count, 0, w->n, row, ld_bytes);
      for (int64_t r = 0; r < count; r++, row += ld_bytes)
        memset(row + (size_t)w->n * size, 0, ld_bytes - (size_t)w->n * size);
    }
  }
  return ESMM_OK;
}

/* Row k of panel q from the compacted form. */
static void unpack_panel_row(const esmm_weights *w, int64_t k, int64_t q, char *out)
{
  const size_t size = esmm_dtype_size(w->dtype);
  const size_t cols = (size_t)esmm_min(ESMM_PANEL, w->n - q * ESMM_PANEL), first = cols < ESMM_HALF ? cols : ESMM_HALF;
  const uint64_t word = w->bits[q * w->words + k / 64], bit = (uint64_t)1 << (k % 64);
  if (!(word & bit)) {
    memset(out, 0, cols * size);
    return;
  }
  const uint32_t *before = w->before + q * (w->words + 1);
  const size_t at = before[k / 64] + (size_t)__builtin_popcountll(word & (bit - 1)), kept = before[w->words];
  const char *panel = (const char *)w->panel_data + w->panel_at[q] * size;
  memcpy(out, panel + at * ESMM_HALF * size, first * size);
  memcpy(out + first * size, panel + (kept + at) * ESMM_HALF * size, (cols - first) * size);
}

void esmm_weights_unpack(const esmm_weights *w, esmm_matrix *out)
{
  const size_t size = esmm_dtype_size(w->dtype), line = (size_t)w->n * size;
  if (w->format != ESMM_FORMAT_DENSE) {
    esmm_form_unpack(w, out);
    return;
  }
  for (int64_t k = 0; k < w->k; k++) {
    char *row = (char *)out->data + (size_t)(k * out->ld) * size;
    if (w->rows)
      memcpy(row, (const char *)w->rows + (size_t)(k * w->rows_ld) * size, line);
    else
      for (int64_t q = 0; q < w->panels; q++)
        unpack_panel_row(w, k, q, row + (size_t)(q * ESMM_PANEL) * size);
  }
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
   small matrices that alone may pass the ratio, and it is not what the limit is for. */
static esmm_status check_ratio(esmm_ctx *ctx, const esmm_prepare_opts *opts, const esmm_weights *w)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : ESMM_BYTES_RATIO;
  const double size = (double)esmm_dtype_size(w->dtype), own = own_bytes(w);
  const double held = (double)w->rows_bytes + (double)w->panel_bytes + (double)form_bytes(w);
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
    status = w->format == ESMM_FORMAT_DENSE ? fill(ctx, b, opts->strict != 0, w) : esmm_form_fill(ctx, b, w);
  return esmm_prepare_finish(ctx, opts, status, w, out);
}
