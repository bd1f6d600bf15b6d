/*
 * forms.c: the forms of B that a CPU keeps: panels, rows and turned columns of a dense B (internal.h draws them),
 * oneDNN's own layout, and those of the other formats (format/). All stay in B's own dtype: kernels widen bf16 and fp16
 * while they read a panel, which is done once for many rows of A.
 */
#include "cpu/forms.h"

#include "bits.h"
#include "cpu/onednn.h"

#include <string.h>

/* ---- reading B ---- */

void esmm_read_row(const esmm_matrix *b, int64_t k, int64_t j0, int64_t cols, void *out)
{
  const size_t size = esmm_dtype_size(b->dtype);
  if (cols == 0)
    return;
  if (b->order == ESMM_ROW_MAJOR) {
    memcpy(out, (const char *)b->data + (size_t)(k * b->ld + j0) * size, (size_t)cols * size);
    return;
  }
  esmm_copy_elements(out, 1, (const char *)b->data + (size_t)(j0 * b->ld + k) * size, b->ld, cols, b->dtype);
}

void esmm_read_rows(const esmm_matrix *b, int64_t k, int64_t rows, int64_t j0, int64_t cols, void *out, size_t stride)
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

/* ---- panels ---- */

static size_t before_bytes(const esmm_weights *w)
{
  return (size_t)w->panels * (size_t)(w->words + 1) * sizeof *w->before;
}

static size_t panel_at_bytes(const esmm_weights *w)
{
  return (size_t)(w->panels + 1) * sizeof *w->panel_at;
}

static esmm_status alloc_panels(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  (void)opts;
  w->before = esmm_mem_alloc(&w->allocator, before_bytes(w));
  w->panel_at = esmm_mem_alloc(&w->allocator, panel_at_bytes(w));
  return w->before && w->panel_at ? ESMM_OK
                                  : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the weights of a %lld x %lld matrix",
                                              (long long)w->k, (long long)w->n);
}

/* Pass 2: the kept rows of panel q, two halves of 16 columns, zero-padded past n. */
static void fill_panel(const esmm_matrix *b, esmm_weights *w, int64_t q)
{
  const size_t size = esmm_dtype_size(w->dtype), half_bytes = ESMM_HALF_COLS * size;
  const int64_t j0 = q * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, w->n - j0);
  const uint64_t *bits = w->bits + q * w->words;
  const size_t kept = w->before[q * (w->words + 1) + w->words];
  char *first = (char *)w->panel_data + w->panel_at[q] * size, *second = first + kept * half_bytes;
  uint32_t block[ESMM_READ_ROWS][ESMM_PANEL] = {0};
  for (int64_t k = 0; k < w->k; k++) {
    const uint64_t together = (((uint64_t)1 << ESMM_READ_ROWS) - 1) << (k % 64);
    if (k % ESMM_READ_ROWS == 0 && bits[k / 64] & together)
      esmm_read_rows(b, k, esmm_min(ESMM_READ_ROWS, w->k - k), j0, cols, block, sizeof *block);
    if (!(bits[k / 64] >> (k % 64) & 1))
      continue;
    const uint32_t *row = block[k % ESMM_READ_ROWS];
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

typedef struct filling {
  const esmm_matrix *b;
  esmm_weights *w;
} filling;

static void fill_some_panels(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  for (int64_t q = first; q < end; q++)
    fill_panel(x->b, x->w, q);
}

static esmm_status fill_panels(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  lay_out_panels(w);
  w->panel_data = esmm_mem_alloc(&w->allocator, w->panel_bytes);
  if (!w->panel_data)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of panels", w->panel_bytes);
  filling x = {.b = b, .w = w};
  if (w->k > 0)
    esmm_for(ctx, ctx->threads, w->panels, esmm_panels_at_once(w), fill_some_panels, &x);
  return ESMM_OK;
}

static void free_panels(esmm_weights *w)
{
  esmm_mem_free(&w->allocator, w->panel_data, w->panel_bytes);
  esmm_mem_free(&w->allocator, w->before, before_bytes(w));
  esmm_mem_free(&w->allocator, w->panel_at, panel_at_bytes(w));
}

/* Row k of panel q from the compacted form. */
static void unpack_panel_row(const esmm_weights *w, int64_t k, int64_t q, char *out)
{
  const size_t size = esmm_dtype_size(w->dtype);
  const size_t cols = (size_t)esmm_min(ESMM_PANEL, w->n - q * ESMM_PANEL),
               first = cols < ESMM_HALF_COLS ? cols : ESMM_HALF_COLS;
  const uint64_t word = w->bits[q * w->words + k / 64], bit = (uint64_t)1 << (k % 64);
  if (!(word & bit)) {
    memset(out, 0, cols * size);
    return;
  }
  const uint32_t *before = w->before + q * (w->words + 1);
  const size_t at = before[k / 64] + (size_t)__builtin_popcountll(word & (bit - 1)), kept = before[w->words];
  const char *panel = (const char *)w->panel_data + w->panel_at[q] * size;
  memcpy(out, panel + at * ESMM_HALF_COLS * size, first * size);
  memcpy(out + first * size, panel + (kept + at) * ESMM_HALF_COLS * size, (cols - first) * size);
}

static void unpack_panels(const esmm_weights *w, esmm_matrix *out)
{
  const size_t size = esmm_dtype_size(w->dtype);
  for (int64_t k = 0; k < w->k; k++)
    for (int64_t q = 0; q < w->panels; q++)
      unpack_panel_row(w, k, q, (char *)out->data + (size_t)(k * out->ld + q * ESMM_PANEL) * size);
}

static size_t panels_bytes(const esmm_weights *w)
{
  return w->panel_bytes + before_bytes(w) + panel_at_bytes(w);
}

static size_t panels_held(const esmm_weights *w)
{
  return w->panel_bytes;
}

static void *panels_section(const esmm_weights *w, int place)
{
  return place == ESMM_FILE_BEFORE     ? (void *)w->before
         : place == ESMM_FILE_PANEL_AT ? (void *)w->panel_at
                                       : w->panel_data;
}

static bool panels_sizes(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS])
{
  (void)w;
  const size_t panels = (size_t)h->panels, words = (size_t)h->words;
  size[ESMM_FILE_PANELS] =
      (size_t)h->section[ESMM_FILE_PANELS].bytes; /* compared with the bitmaps when they are read */
  return h->section[ESMM_FILE_PANELS].bytes <= SIZE_MAX && esmm_size_mul(panels, words + 1, &size[ESMM_FILE_BEFORE]) &&
         esmm_size_mul(size[ESMM_FILE_BEFORE], sizeof(uint32_t), &size[ESMM_FILE_BEFORE]) &&
         esmm_size_mul(panels + 1, sizeof(uint64_t), &size[ESMM_FILE_PANEL_AT]);
}

/* ---- rows ---- */

static esmm_status alloc_rows(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  (void)opts;
  w->rows_ld = esmm_rows_ld(w->n, w->dtype);
  w->rows_bytes = (size_t)w->rows_ld * esmm_dtype_size(w->dtype) * (size_t)w->k;
  w->rows = esmm_mem_alloc(&w->allocator, w->rows_bytes);
  return w->rows ? ESMM_OK
                 : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the weights of a %lld x %lld matrix", (long long)w->k,
                             (long long)w->n);
}

/* first, end: in ESMM_READ_ROWS rows */
static void fill_some_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  const esmm_weights *w = x->w;
  const size_t size = esmm_dtype_size(w->dtype), ld_bytes = (size_t)w->rows_ld * size;
  for (int64_t k = first * ESMM_READ_ROWS; k < esmm_min(end * ESMM_READ_ROWS, w->k); k += ESMM_READ_ROWS) {
    const int64_t count = esmm_min(ESMM_READ_ROWS, w->k - k);
    char *row = (char *)w->rows + (size_t)k * ld_bytes;
    esmm_read_rows(x->b, k, count, 0, w->n, row, ld_bytes);
    for (int64_t r = 0; r < count; r++, row += ld_bytes)
      memset(row + (size_t)w->n * size, 0, ld_bytes - (size_t)w->n * size);
  }
}

static esmm_status fill_rows(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  filling x = {.b = b, .w = w};
  const int64_t at_once = esmm_at_once(w->rows_ld, ESMM_READ_ROWS * (int64_t)esmm_dtype_size(w->dtype));
  esmm_for(ctx, ctx->threads, w->n > 0 ? esmm_ceil_div(w->k, ESMM_READ_ROWS) : 0, at_once, fill_some_rows, &x);
  return ESMM_OK;
}

static void free_rows(esmm_weights *w)
{
  esmm_mem_free(&w->allocator, w->rows, w->rows_bytes);
}

static void unpack_rows(const esmm_weights *w, esmm_matrix *out)
{
  const size_t size = esmm_dtype_size(w->dtype), line = (size_t)w->n * size;
  for (int64_t k = 0; k < w->k && line > 0; k++)
    memcpy((char *)out->data + (size_t)(k * out->ld) * size, (const char *)w->rows + (size_t)(k * w->rows_ld) * size,
           line);
}

static size_t rows_bytes(const esmm_weights *w)
{
  return w->rows_bytes;
}

static void *rows_section(const esmm_weights *w, int place)
{
  (void)place;
  return w->rows;
}

static bool rows_sizes(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS])
{
  (void)w;
  return esmm_size_mul((size_t)h->k, (size_t)h->rows_ld, &size[ESMM_FILE_ROWS]) &&
         esmm_size_mul(size[ESMM_FILE_ROWS], esmm_dtype_size((esmm_dtype)h->dtype), &size[ESMM_FILE_ROWS]);
}

/* ---- turned ---- */

static size_t turned_bytes(const esmm_weights *w)
{
  return (size_t)(w->n * w->turned_ld) * esmm_dtype_size(w->dtype);
}

static esmm_status alloc_turned(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  (void)opts;
  w->turned_ld = esmm_rows_ld(w->k, w->dtype);
  w->turned = esmm_mem_alloc(&w->allocator, turned_bytes(w));
  return w->turned ? ESMM_OK
                   : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the weights of a %lld x %lld matrix",
                               (long long)w->k, (long long)w->n);
}

static esmm_status fill_turned(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  (void)ctx;
  const size_t size = esmm_dtype_size(w->dtype);
  const int64_t across = b->order == ESMM_ROW_MAJOR ? 1 : b->ld, along = b->order == ESMM_ROW_MAJOR ? b->ld : 1;
  memset(w->turned, 0, turned_bytes(w));
  for (int64_t j = 0; j < w->n && w->k > 0; j++)
    esmm_copy_elements((char *)w->turned + (size_t)(j * w->turned_ld) * size, 1,
                       (const char *)b->data + (size_t)(j * across) * size, along, w->k, w->dtype);
  return ESMM_OK;
}

static void free_turned(esmm_weights *w)
{
  esmm_mem_free(&w->allocator, w->turned, turned_bytes(w));
}

static void unpack_turned(const esmm_weights *w, esmm_matrix *out)
{
  const size_t size = esmm_dtype_size(w->dtype);
  for (int64_t j = 0; j < w->n && w->k > 0; j++)
    esmm_copy_elements((char *)out->data + (size_t)j * size, out->ld,
                       (const char *)w->turned + (size_t)(j * w->turned_ld) * size, 1, w->k, w->dtype);
}

/* 15 columns at most: about what other forms pad so narrow a B with, which the limit does not count either. */
static size_t turned_held(const esmm_weights *w)
{
  (void)w;
  return 0;
}

static bool turned_sizes(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS])
{
  (void)h;
  (void)w;
  (void)size;
  return true;
}

/* ---- oneDNN's layout: esmm_forms_extra makes it ---- */

static size_t onednn_bytes(const esmm_weights *w)
{
  return w->onednn.bytes;
}

/* Its padding does not count for the limit. */
static size_t onednn_held(const esmm_weights *w)
{
  return (size_t)(w->k * w->n) * esmm_dtype_size(w->dtype);
}

/* ---- the other formats ---- */

static esmm_status alloc_format(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  return esmm_form_alloc(ctx, &opts->format, w);
}

static size_t format_bytes(const esmm_weights *w)
{
  const esmm_form_bytes form = esmm_form_sizes(w);
  return form.start + form.at + form.index + form.values;
}

static void *bsr_section(const esmm_weights *w, int place)
{
  return place == ESMM_FILE_START ? (void *)w->bsr.start : place == ESMM_FILE_AT ? (void *)w->bsr.at : w->bsr.values;
}

static void *nm_section(const esmm_weights *w, int place)
{
  return place == ESMM_FILE_INDEX ? (void *)w->nm.index : w->nm.values;
}

static bool bsr_sizes(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS])
{
  (void)h;
  const esmm_form_bytes form = esmm_form_sizes(w);
  size[ESMM_FILE_START] = form.start;
  size[ESMM_FILE_AT] = form.at;
  size[ESMM_FILE_VALUES] = form.values;
  return true;
}

static bool nm_sizes(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS])
{
  (void)h;
  const esmm_form_bytes form = esmm_form_sizes(w);
  size[ESMM_FILE_INDEX] = form.index;
  size[ESMM_FILE_VALUES] = form.values;
  return true;
}

/* ---- the table ---- */

const esmm_host_form esmm_host_forms[] = {
    {.kind = ESMM_FORM_ROWS,
     .not_for = ESMM_USE_LARGE_M,
     .alloc = alloc_rows,
     .fill = fill_rows,
     .free = free_rows,
     .unpack = unpack_rows,
     .bytes = rows_bytes,
     .held = rows_bytes,
     .sections = {[ESMM_FILE_ROWS] = "rows"},
     .section = rows_section,
     .section_sizes = rows_sizes},
    {.kind = ESMM_FORM_PANELS,
     .not_for = ESMM_USE_DECODE,
     .alloc = alloc_panels,
     .fill = fill_panels,
     .free = free_panels,
     .unpack = unpack_panels,
     .bytes = panels_bytes,
     .held = panels_held,
     .sections = {[ESMM_FILE_BEFORE] = "before", [ESMM_FILE_PANEL_AT] = "panel_at", [ESMM_FILE_PANELS] = "panels"},
     .section = panels_section,
     .section_sizes = panels_sizes},
    {.kind = ESMM_FORM_BSR,
     .alloc = alloc_format,
     .fill = esmm_form_fill,
     .free = esmm_form_free,
     .unpack = esmm_form_unpack,
     .bytes = format_bytes,
     .held = format_bytes,
     .sections = {[ESMM_FILE_START] = "start", [ESMM_FILE_AT] = "at", [ESMM_FILE_VALUES] = "values"},
     .section = bsr_section,
     .section_sizes = bsr_sizes},
    {.kind = ESMM_FORM_NM,
     .alloc = alloc_format,
     .fill = esmm_form_fill,
     .free = esmm_form_free,
     .unpack = esmm_form_unpack,
     .bytes = format_bytes,
     .held = format_bytes,
     .sections = {[ESMM_FILE_INDEX] = "index", [ESMM_FILE_VALUES] = "values"},
     .section = nm_section,
     .section_sizes = nm_sizes},
    {.kind = ESMM_FORM_TURNED, /* behind those that files hold: it is remade from one */
     .most_n = ESMM_TURNED_COLS,
     .alloc = alloc_turned,
     .fill = fill_turned,
     .free = free_turned,
     .unpack = unpack_turned,
     .bytes = turned_bytes,
     .held = turned_held,
     .section_sizes = turned_sizes},
    {.kind = ESMM_FORM_ONEDNN,
     .extra = true,
     .free = esmm_onednn_free,
     .bytes = onednn_bytes,
     .held = onednn_held,
     .section_sizes = turned_sizes},
};

const int esmm_host_form_count = sizeof esmm_host_forms / sizeof esmm_host_forms[0];

unsigned esmm_forms_formats(void)
{
  unsigned formats = 0;
  for (int i = 0; i < esmm_host_form_count; i++)
    formats |= 1u << esmm_form_table[esmm_host_forms[i].kind].format;
  return formats;
}

bool esmm_form_wanted(const esmm_host_form *form, esmm_format_kind format, esmm_use use, int64_t k, int64_t n)
{
  if (k == 0 && form->kind == ESMM_FORM_PANELS) /* its tables would grow with n */
    return false;
  return !form->extra && esmm_form_table[form->kind].format == format &&
         (form->not_for == ESMM_USE_ANY || form->not_for != use) && (form->most_n == 0 || n <= form->most_n);
}

static bool keeps(const esmm_weights *w, const esmm_host_form *form)
{
  return w->forms & 1u << form->kind;
}

esmm_status esmm_forms_alloc(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; status == ESMM_OK && i < esmm_host_form_count; i++)
    if (esmm_form_wanted(&esmm_host_forms[i], w->format, w->use, w->k, w->n)) {
      w->forms |= 1u << esmm_host_forms[i].kind;
      status = esmm_host_forms[i].alloc(ctx, opts, w);
    }
  return status;
}

esmm_status esmm_forms_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; status == ESMM_OK && i < esmm_host_form_count; i++)
    if (keeps(w, &esmm_host_forms[i]))
      status = esmm_host_forms[i].fill(ctx, b, w);
  return status;
}

/* B as the caller had it, in memory that the caller frees; data is NULL where there is none. */
static esmm_matrix unpack(const esmm_weights *w, size_t *bytes)
{
  esmm_matrix b = {.rows = w->k, .cols = w->n, .ld = w->n, .dtype = w->dtype};
  *bytes = (size_t)(w->k * w->n) * esmm_dtype_size(w->dtype);
  b.data = esmm_mem_alloc(&w->allocator, *bytes);
  if (b.data)
    esmm_weights_unpack(w, &b);
  return b;
}

void esmm_forms_extra(const esmm_ctx *ctx, const esmm_matrix *b, double max_bytes_ratio, esmm_weights *w)
{
  if (ctx->backend != &esmm_cpu_backend || !esmm_onednn_worth(w, max_bytes_ratio))
    return; /* another device's weights pass through a CPU's forms on their way to a file */
  if (b) {
    esmm_onednn_keep(b, w);
  } else if (w->rows) {
    const esmm_matrix rows = {.data = w->rows, .rows = w->k, .cols = w->n, .ld = w->rows_ld, .dtype = w->dtype};
    esmm_onednn_keep(&rows, w);
  } else {
    size_t bytes;
    const esmm_matrix whole = unpack(w, &bytes);
    if (whole.data)
      esmm_onednn_keep(&whole, w);
    esmm_mem_free(&w->allocator, whole.data, bytes);
  }
}

esmm_status esmm_forms_remake(esmm_ctx *ctx, esmm_weights *w)
{
  esmm_forms_extra(ctx, NULL, 0.0, w);
  if (!(w->forms & ESMM_FORM(TURNED)))
    return ESMM_OK;
  size_t bytes;
  const esmm_matrix b = unpack(w, &bytes);
  const esmm_status status = b.data ? fill_turned(ctx, &b, w) : ESMM_ERR_MEMORY;
  esmm_mem_free(&w->allocator, b.data, bytes);
  return status;
}

void esmm_forms_free(esmm_weights *w)
{
  for (int i = 0; i < esmm_host_form_count; i++)
    if (keeps(w, &esmm_host_forms[i]))
      esmm_host_forms[i].free(w);
}

size_t esmm_forms_bytes(const esmm_weights *w)
{
  size_t bytes = 0;
  for (int i = 0; i < esmm_host_form_count; i++)
    bytes += keeps(w, &esmm_host_forms[i]) ? esmm_host_forms[i].bytes(w) : 0;
  return bytes;
}

size_t esmm_forms_held(const esmm_weights *w)
{
  size_t bytes = 0;
  for (int i = 0; i < esmm_host_form_count; i++)
    bytes += keeps(w, &esmm_host_forms[i]) ? esmm_host_forms[i].held(w) : 0;
  return bytes;
}

void esmm_weights_unpack(const esmm_weights *w, esmm_matrix *out)
{
  for (int i = 0; i < esmm_host_form_count; i++)
    if (keeps(w, &esmm_host_forms[i])) { /* any of them has all of B */
      esmm_host_forms[i].unpack(w, out);
      return;
    }
}
