/*
 * bsr.c: matrices as blocks. The callers' arrays (struct esmm_bsr: by block rows, int32 or int64) are checked and read
 * here; prepared weights keep their blocks by block columns (format.h), because a kernel works down a strip of C.
 */
#include "backend.h"
#include "bits.h"
#include "threads.h"

#include <stdio.h>
#include <string.h>

/* ---- B's form ---- */

/* What of B a block covers: blocks at the edge are cut. */
typedef struct area {
  int64_t row, col, rows, cols;
} area;

static area area_of(const esmm_weights *w, int64_t level, int64_t strip)
{
  const int64_t row = level * w->bsr.block_rows, col = strip * w->bsr.block_cols;
  return (area){row, col, esmm_min(w->bsr.block_rows, w->k - row), esmm_min(w->bsr.block_cols, w->n - col)};
}

static char *block_at(const esmm_weights *w, int64_t block)
{
  return (char *)w->bsr.values +
         (size_t)block * (size_t)(w->bsr.block_rows * w->bsr.block_cols) * esmm_dtype_size(w->dtype);
}

static bool is_alive(const esmm_matrix *b, const area *a)
{
  uint32_t row[ESMM_MAX_BLOCK];
  for (int64_t r = 0; r < a->rows; r++) {
    esmm_read_row(b, a->row + r, a->col, a->cols, row);
    if (esmm_count_nonzero(row, b->dtype, a->cols) > 0)
      return true;
  }
  return false;
}

/* Strips' counts, which start[s + 1] holds, to where they start; returns how many there are in all. */
static int64_t sum_starts(esmm_bsr_form *f)
{
  int64_t all = 0;
  f->start[0] = 0;
  for (int64_t s = 0; s < f->strips; s++) {
    all += f->start[s + 1];
    f->start[s + 1] = all <= INT32_MAX ? (int32_t)all : INT32_MAX; /* the caller fails where it is more */
  }
  return all;
}

static void fill_strip(const esmm_matrix *b, esmm_weights *w, int64_t strip)
{
  const esmm_bsr_form *f = &w->bsr;
  const size_t line = (size_t)f->block_cols * esmm_dtype_size(w->dtype);
  int64_t block = f->start[strip];
  for (int64_t level = 0; level < f->levels && block < f->start[strip + 1]; level++) {
    const area a = area_of(w, level, strip);
    if (!is_alive(b, &a))
      continue;
    char *to = block_at(w, block);
    memset(to, 0, (size_t)f->block_rows * line);
    for (int64_t r = 0; r < a.rows; r++)
      esmm_read_row(b, a.row + r, a.col, a.cols, to + (size_t)r * line);
    f->at[block++] = (int32_t)level;
  }
}

typedef struct filling {
  const esmm_matrix *b;
  esmm_weights *w;
} filling;

static void count_strips(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  for (int64_t s = first; s < end; s++) {
    int32_t count = 0;
    for (int64_t level = 0; level < x->w->bsr.levels; level++) {
      const area a = area_of(x->w, level, s);
      count += is_alive(x->b, &a);
    }
    x->w->bsr.start[s + 1] = count;
  }
}

static void fill_strips(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  for (int64_t s = first; s < end; s++)
    fill_strip(x->b, x->w, s);
}

esmm_status esmm_bsr_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  esmm_bsr_form *f = &w->bsr;
  filling x = {.b = b, .w = w};
  const int64_t at_once = esmm_at_once(w->k, f->block_cols * (int64_t)esmm_dtype_size(w->dtype));
  esmm_for(ctx, ctx->threads, f->strips, at_once, count_strips, &x);
  const esmm_status status = esmm_bsr_alloc_blocks(ctx, sum_starts(f), w);
  if (status != ESMM_OK)
    return status;
  esmm_for(ctx, ctx->threads, f->strips, at_once, fill_strips, &x);
  return ESMM_OK;
}

void esmm_bsr_unpack(const esmm_weights *w, esmm_matrix *out)
{
  const esmm_bsr_form *f = &w->bsr;
  const size_t size = esmm_dtype_size(w->dtype), line = (size_t)f->block_cols * size;
  for (int64_t s = 0; s < f->strips; s++)
    for (int64_t i = f->start[s]; i < f->start[s + 1]; i++) {
      const area a = area_of(w, f->at[i], s);
      for (int64_t r = 0; r < a.rows; r++)
        memcpy((char *)out->data + (size_t)((a.row + r) * out->ld + a.col) * size, block_at(w, i) + (size_t)r * line,
               (size_t)a.cols * size);
    }
}

/* A panel of 32 columns may be part of a strip, and of several. */
int64_t esmm_bsr_scan_panel(const esmm_weights *w, int64_t panel, uint64_t *bits)
{
  const esmm_bsr_form *f = &w->bsr;
  const int64_t j0 = panel * ESMM_PANEL, j1 = esmm_min(j0 + ESMM_PANEL, w->n);
  int64_t nonzero = 0;
  for (int64_t s = j0 / f->block_cols; s * f->block_cols < j1; s++) {
    const int64_t from = esmm_max(j0, s * f->block_cols), to = esmm_min(j1, (s + 1) * f->block_cols);
    for (int64_t i = f->start[s]; i < f->start[s + 1]; i++) {
      const area a = area_of(w, f->at[i], s);
      for (int64_t r = 0; r < a.rows; r++) {
        const size_t first = (size_t)(r * f->block_cols + from - a.col) * esmm_dtype_size(w->dtype);
        const int64_t set = esmm_count_nonzero(block_at(w, i) + first, w->dtype, to - from), k = a.row + r;
        nonzero += set;
        bits[k / 64] |= (uint64_t)(set != 0) << (k % 64);
      }
    }
  }
  return nonzero;
}

/* ---- a form out of a file ---- */

static bool valid_block(const esmm_weights *w, int64_t strip, int64_t i, char *why, size_t why_bytes)
{
  const esmm_bsr_form *f = &w->bsr;
  if (f->at[i] < 0 || f->at[i] >= f->levels || (i > f->start[strip] && f->at[i] <= f->at[i - 1])) {
    (void)snprintf(why, why_bytes, "at[%lld] is %d: not rising within 0 to %lld", (long long)i, f->at[i],
                   (long long)(f->levels - 1));
    return false;
  }
  const area a = area_of(w, f->at[i], strip);
  const int64_t elements = (int64_t)f->block_rows * f->block_cols;
  int64_t inside = 0;
  for (int64_t r = 0; r < a.rows; r++)
    inside +=
        esmm_count_nonzero(block_at(w, i) + (size_t)(r * f->block_cols) * esmm_dtype_size(w->dtype), w->dtype, a.cols);
  if (inside > 0 && inside == esmm_count_nonzero(block_at(w, i), w->dtype, elements))
    return true;
  (void)snprintf(why, why_bytes, "block %lld %s", (long long)i,
                 inside == 0 ? "is all zeros" : "holds nonzeros beyond the matrix");
  return false;
}

bool esmm_bsr_valid(const esmm_weights *w, char *why, size_t why_bytes)
{
  const esmm_bsr_form *f = &w->bsr;
  if (f->start[0] != 0 || f->start[f->strips] != f->blocks) {
    (void)snprintf(why, why_bytes, "start goes from %d to %d, should from 0 to %lld", f->start[0], f->start[f->strips],
                   (long long)f->blocks);
    return false;
  }
  for (int64_t s = 0; s < f->strips; s++)
    if (f->start[s + 1] < f->start[s] || f->start[s + 1] > f->blocks) {
      (void)snprintf(why, why_bytes, "start[%lld] is %d after %d", (long long)(s + 1), f->start[s + 1], f->start[s]);
      return false;
    }
  for (int64_t s = 0; s < f->strips; s++)
    for (int64_t i = f->start[s]; i < f->start[s + 1]; i++)
      if (!valid_block(w, s, i, why, why_bytes))
        return false;
  return true;
}

/* ---- the caller's arrays ---- */

static int64_t index_at(const esmm_bsr *b, const void *array, int64_t i)
{
  return b->index_bits == 32 ? ((const int32_t *)array)[i] : ((const int64_t *)array)[i];
}

int64_t esmm_bsr_lines(const esmm_bsr *b)
{
  return b->order == ESMM_ROW_MAJOR ? esmm_ceil_div(b->rows, b->block_rows) : esmm_ceil_div(b->cols, b->block_cols);
}

int64_t esmm_bsr_places(const esmm_bsr *b)
{
  return b->order == ESMM_ROW_MAJOR ? esmm_ceil_div(b->cols, b->block_cols) : esmm_ceil_div(b->rows, b->block_rows);
}

esmm_status esmm_bsr_check_pointer(esmm_ctx *ctx, const char *what, const esmm_bsr *b, int64_t i, int64_t at,
                                   int64_t before)
{
  if (i == 0 && at != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->row_pointers[0] is %lld, must be 0", what, (long long)at);
  if (at < before)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->row_pointers[%lld] is %lld, less than the %lld before it", what,
                     (long long)i, (long long)at, (long long)before);
  if (at > b->blocks)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->row_pointers[%lld] is %lld, more than the %lld blocks there are",
                     what, (long long)i, (long long)at, (long long)b->blocks);
  if (i == esmm_bsr_lines(b) && at != b->blocks)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->row_pointers[%lld] is %lld, must be the number of blocks, %lld", what,
                     (long long)i, (long long)at, (long long)b->blocks);
  return ESMM_OK;
}

esmm_status esmm_bsr_check_index(esmm_ctx *ctx, const char *what, const esmm_bsr *b, int64_t i, int64_t at,
                                 int64_t before)
{
  if (at < 0 || at >= esmm_bsr_places(b))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->column_indices[%lld] is %lld, must be 0 to %lld", what, (long long)i,
                     (long long)at, (long long)(esmm_bsr_places(b) - 1));
  if (at == before)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->column_indices[%lld] is %lld again: a duplicate", what, (long long)i,
                     (long long)at);
  if (at < before)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->column_indices[%lld] is %lld after %lld: sort them in each row", what,
                     (long long)i, (long long)at, (long long)before);
  return ESMM_OK;
}

static esmm_status check_pointers(esmm_ctx *ctx, const char *what, const esmm_bsr *b)
{
  esmm_status status = ESMM_OK;
  for (int64_t i = 0, before = 0; status == ESMM_OK && i <= esmm_bsr_lines(b); i++) {
    const int64_t at = index_at(b, b->row_pointers, i);
    status = esmm_bsr_check_pointer(ctx, what, b, i, at, before);
    before = at;
  }
  return status;
}

static esmm_status check_indices(esmm_ctx *ctx, const char *what, const esmm_bsr *b)
{
  esmm_status status = ESMM_OK;
  for (int64_t line = 0; line < esmm_bsr_lines(b); line++) {
    const int64_t end = index_at(b, b->row_pointers, line + 1);
    for (int64_t i = index_at(b, b->row_pointers, line), before = -1; status == ESMM_OK && i < end; i++) {
      const int64_t at = index_at(b, b->column_indices, i);
      status = esmm_bsr_check_index(ctx, what, b, i, at, before);
      before = at;
    }
  }
  return status;
}

static esmm_status check_fields(esmm_ctx *ctx, const char *what, const esmm_bsr *b)
{
  const int64_t most = INT64_MAX - ESMM_MAX_BLOCK; /* rounding up must not overflow */
  if (b->rows < 0 || b->cols < 0 || b->blocks < 0)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "%s is %lld x %lld with %lld blocks; none can be negative", what,
                     (long long)b->rows, (long long)b->cols, (long long)b->blocks);
  if (b->block_rows < 1 || b->block_rows > ESMM_MAX_BLOCK || b->block_cols < 1 || b->block_cols > ESMM_MAX_BLOCK)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s has blocks of %d x %d; 1 to %d each", what, b->block_rows,
                     b->block_cols, ESMM_MAX_BLOCK);
  if (b->index_bits != 32 && b->index_bits != 64)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->index_bits is %d, must be 32 or 64", what, b->index_bits);
  if (esmm_dtype_size(b->dtype) == 0)
    return esmm_fail(ctx, ESMM_ERR_DTYPE, "%s->dtype is %d, which is no esmm_dtype", what, (int)b->dtype);
  if (b->order != ESMM_ROW_MAJOR && b->order != ESMM_COL_MAJOR)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->order is %d, which is no esmm_order", what, (int)b->order);
  if (b->rows > most || b->cols > most || esmm_bsr_lines(b) > INT32_MAX || esmm_bsr_places(b) > INT32_MAX ||
      b->blocks > INT32_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW,
                     "%s is %lld x %lld with %lld blocks of %d x %d: more than int32 indices reach, use larger blocks",
                     what, (long long)b->rows, (long long)b->cols, (long long)b->blocks, b->block_rows, b->block_cols);
  if (!b->row_pointers)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->row_pointers is NULL", what);
  if (b->blocks > 0 && (!b->column_indices || !b->values))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->%s is NULL", what, b->column_indices ? "values" : "column_indices");
  const size_t index = (size_t)b->index_bits / 8, element = esmm_dtype_size(b->dtype);
  if ((uintptr_t)b->row_pointers % index != 0 || (uintptr_t)b->column_indices % index != 0 ||
      (uintptr_t)b->values % element != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                     "%s: row_pointers %p, column_indices %p or values %p is not aligned to its "
                     "elements",
                     what, b->row_pointers, b->column_indices, b->values);
  return ESMM_OK;
}

/* Arrays in device memory are for a device that takes them. */
static esmm_status check_place(esmm_ctx *ctx, const char *what, const esmm_bsr *b)
{
  if (b->place != ESMM_HOST && b->place != ESMM_DEVICE)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->place is %d, which is no esmm_place", what, (int)b->place);
  if (b->place == ESMM_DEVICE && !ctx->backend->prepare_bsr)
    return esmm_fail(ctx, ESMM_ERR_DEVICE,
                     "%s->place is ESMM_DEVICE, but this is a %s context: it takes arrays in host memory", what,
                     esmm_ctx_kind(ctx));
  if (b->place == ESMM_DEVICE && b->device != ctx->ordinal)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "%s->device is %d, but the context's is %d", what, b->device, ctx->ordinal);
  return ESMM_OK;
}

/* Everything that reading the arrays relies on; those in device memory are not looked into. */
static esmm_status check_bsr(esmm_ctx *ctx, const char *what, const esmm_bsr *b, esmm_bsr *out)
{
  if (!b)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", what);
  memset(out, 0, sizeof *out);
  esmm_status status = esmm_take_opts(ctx, what, b, sizeof *out, out);
  if (status == ESMM_OK)
    status = check_fields(ctx, what, out);
  if (status == ESMM_OK)
    status = check_place(ctx, what, out);
  if (status != ESMM_OK || out->place == ESMM_DEVICE)
    return status;
  status = check_pointers(ctx, what, out);
  return status == ESMM_OK ? check_indices(ctx, what, out) : status;
}

/* One block of the caller's: where it is in the matrix, how far it reaches into it, and its elements. */
typedef struct given {
  area area;
  int64_t level, place; /* its block row and block column */
  int64_t first;        /* its first element in values */
  int64_t row_step, col_step;
} given;

static given given_block(const esmm_bsr *b, int64_t line, int64_t i)
{
  const bool by_rows = b->order == ESMM_ROW_MAJOR;
  const int64_t other = index_at(b, b->column_indices, i);
  given g = {.level = by_rows ? line : other,
             .place = by_rows ? other : line,
             .first = i * b->block_rows * b->block_cols,
             .row_step = by_rows ? b->block_cols : 1,
             .col_step = by_rows ? 1 : b->block_rows};
  g.area.row = g.level * b->block_rows;
  g.area.col = g.place * b->block_cols;
  g.area.rows = esmm_min(b->block_rows, b->rows - g.area.row);
  g.area.cols = esmm_min(b->block_cols, b->cols - g.area.col);
  return g;
}

static void copy_given(const esmm_bsr *b, const given *g, void *to, int64_t ld)
{
  for (int64_t r = 0; r < g->area.rows; r++)
    for (int64_t c = 0; c < g->area.cols; c++)
      esmm_copy_element(to, r * ld + c, b->values, g->first + r * g->row_step + c * g->col_step, b->dtype);
}

static bool given_alive(const esmm_bsr *b, const given *g)
{
  for (int64_t r = 0; r < g->area.rows; r++)
    for (int64_t c = 0; c < g->area.cols; c++)
      if (esmm_nonzero_at(b->values, b->dtype, g->first + r * g->row_step + c * g->col_step))
        return true;
  return false;
}

typedef struct copying {
  const esmm_bsr *from;
  esmm_matrix *to;
} copying;

static void copy_lines(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const copying *x = arg;
  const esmm_bsr *b = x->from;
  const size_t size = esmm_dtype_size(b->dtype);
  for (int64_t line = first; line < end; line++)
    for (int64_t i = index_at(b, b->row_pointers, line); i < index_at(b, b->row_pointers, line + 1); i++) {
      const given g = given_block(b, line, i);
      copy_given(b, &g, (char *)x->to->data + (size_t)(g.area.row * b->cols + g.area.col) * size, b->cols);
    }
}

static esmm_status dense_bytes(esmm_ctx *ctx, const char *what, const esmm_bsr *b, size_t *bytes)
{
  if (!esmm_size_mul((size_t)b->rows, (size_t)b->cols, bytes) ||
      !esmm_size_mul(*bytes, esmm_dtype_size(b->dtype), bytes) || *bytes > (size_t)INT64_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "%s is %lld x %lld: too large for a dense copy", what, (long long)b->rows,
                     (long long)b->cols);
  return ESMM_OK;
}

/* The arrays as a tight row-major matrix in host memory; free it with esmm_host_twin_free. */
static esmm_status to_dense(esmm_ctx *ctx, const char *what, const esmm_bsr *b, esmm_matrix *dense)
{
  const esmm_matrix shape = {.rows = b->rows, .cols = b->cols, .dtype = b->dtype};
  const size_t size = esmm_dtype_size(b->dtype);
  size_t bytes;
  esmm_status status = dense_bytes(ctx, what, b, &bytes);
  if (status == ESMM_OK)
    status = esmm_host_twin(ctx, &shape, dense);
  if (status != ESMM_OK)
    return status;
  memset(dense->data, 0, bytes);
  copying x = {.from = b, .to = dense};
  esmm_for(ctx, ctx->threads, esmm_bsr_lines(b), esmm_at_once(b->cols, b->block_rows * (int64_t)size), copy_lines, &x);
  return ESMM_OK;
}

/* ---- prepare ---- */

/* From block rows to block columns: lines are gone through in order, so that a strip's blocks come in rising k. While
   blocks are put in their places start[s] is where strip s goes on; then it is where strip s + 1 starts. */
static esmm_status fill_from_given(esmm_ctx *ctx, const esmm_bsr *b, esmm_weights *w)
{
  esmm_bsr_form *f = &w->bsr;
  const size_t block_bytes = (size_t)(f->block_rows * f->block_cols) * esmm_dtype_size(w->dtype);
  memset(f->start, 0, (size_t)(f->strips + 1) * sizeof *f->start);
  for (int64_t line = 0; line < esmm_bsr_lines(b); line++)
    for (int64_t i = index_at(b, b->row_pointers, line); i < index_at(b, b->row_pointers, line + 1); i++) {
      const given g = given_block(b, line, i);
      f->start[g.place + 1] += given_alive(b, &g);
    }
  const esmm_status status = esmm_bsr_alloc_blocks(ctx, sum_starts(f), w);
  if (status != ESMM_OK)
    return status;
  for (int64_t line = 0; line < esmm_bsr_lines(b); line++)
    for (int64_t i = index_at(b, b->row_pointers, line); i < index_at(b, b->row_pointers, line + 1); i++) {
      const given g = given_block(b, line, i);
      if (!given_alive(b, &g))
        continue;
      const int32_t to = f->start[g.place]++;
      f->at[to] = (int32_t)g.level;
      memset(block_at(w, to), 0, block_bytes);
      copy_given(b, &g, block_at(w, to), f->block_cols);
    }
  memmove(f->start + 1, f->start, (size_t)f->strips * sizeof *f->start);
  f->start[0] = 0;
  return ESMM_OK;
}

esmm_status esmm_prepare_bsr(esmm_ctx *ctx, const esmm_bsr *b, const esmm_prepare_opts *opts, esmm_weights **weights)
{
  esmm_bsr arrays;
  esmm_prepare_opts o;
  esmm_status status = esmm_begin_handle(ctx, "weights", weights);
  if (status == ESMM_OK)
    status = check_bsr(ctx, "b", b, &arrays);
  if (status == ESMM_OK)
    status = esmm_prepare_opts_check(ctx, opts, arrays.block_rows, arrays.block_cols, &o);
  if (status != ESMM_OK)
    return status;
  if (arrays.place == ESMM_DEVICE) {
    size_t bytes;
    status = dense_bytes(ctx, "b", &arrays, &bytes);
    return status == ESMM_OK ? ctx->backend->prepare_bsr(ctx, "b", &arrays, &o, weights) : status;
  }
  if (ctx->backend->prepare == esmm_prepare_checked && o.format.kind == ESMM_FORMAT_BSR &&
      o.format.block_rows == arrays.block_rows && o.format.block_cols == arrays.block_cols) {
    const esmm_matrix shape = {.rows = arrays.rows, .cols = arrays.cols, .dtype = arrays.dtype};
    esmm_weights *w = NULL;
    status = esmm_weights_alloc(ctx, &shape, &o, &w);
    if (status == ESMM_OK)
      status = fill_from_given(ctx, &arrays, w);
    return esmm_prepare_finish(ctx, &o, status, w, weights);
  }
  esmm_matrix dense;
  status = to_dense(ctx, "b", &arrays, &dense);
  if (status != ESMM_OK)
    return status;
  status = ctx->backend->prepare(ctx, &dense, &o, weights);
  esmm_host_twin_free(ctx, &dense);
  return status;
}

/* ---- A as blocks ---- */

/* One strip a block row, every k of a block set. */
static esmm_status pattern_of(esmm_ctx *ctx, const esmm_bsr *a, esmm_pattern **out)
{
  esmm_pattern *p = NULL;
  const esmm_status status = esmm_pattern_alloc(ctx, a->rows, a->cols, a->block_rows, &p);
  if (status != ESMM_OK)
    return status;
  memset(p->bits, 0, (size_t)(p->strips * p->words) * sizeof *p->bits);
  for (int64_t line = 0; line < esmm_bsr_lines(a); line++)
    for (int64_t i = index_at(a, a->row_pointers, line); i < index_at(a, a->row_pointers, line + 1); i++) {
      const given g = given_block(a, line, i);
      for (int64_t k = g.area.col; k < g.area.col + g.area.cols; k++)
        p->bits[g.level * p->words + k / 64] |= (uint64_t)1 << (k % 64);
      p->set += g.area.cols;
    }
  *out = p;
  return ESMM_OK;
}

/* An array as a matrix of one row, to be compared with others: only its address is looked at, whatever its const. */
static esmm_matrix row_of(const void *data, int64_t elements, esmm_dtype dtype, esmm_place place)
{
  esmm_matrix row = {.rows = 1, .cols = elements, .ld = elements, .dtype = dtype, .place = place};
  memcpy(&row.data, &data, sizeof row.data);
  return row;
}

/* No output of the product may lie in one of a's arrays. */
static esmm_status check_apart(esmm_ctx *ctx, const esmm_bsr *a, const char *written, const esmm_matrix *to)
{
  const int64_t words = a->index_bits / 32, elements = a->blocks * a->block_rows * a->block_cols;
  const struct {
    const char *name;
    esmm_matrix row;
  } arrays[] = {{"a->values", row_of(a->values, elements, a->dtype, ESMM_HOST)},
                {"a->row_pointers", row_of(a->row_pointers, (esmm_bsr_lines(a) + 1) * words, ESMM_F32, ESMM_HOST)},
                {"a->column_indices", row_of(a->column_indices, a->blocks * words, ESMM_F32, ESMM_HOST)}};
  for (size_t i = 0; to->data && i < sizeof arrays / sizeof *arrays; i++)
    if (esmm_overlap(&arrays[i].row, to))
      return esmm_fail(ctx, ESMM_ERR_OVERLAP, "%s (%p) shares memory with %s (%p)", written, to->data, arrays[i].name,
                       arrays[i].row.data);
  return ESMM_OK;
}

esmm_status esmm_matmul_bsr(esmm_ctx *ctx, const esmm_bsr *a, const esmm_weights *weights, esmm_matrix *c,
                            const esmm_matmul_opts *opts, esmm_stats *stats)
{
  esmm_bsr arrays;
  esmm_matrix dense, checked;
  esmm_matmul_opts o = {.size = sizeof o};
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK && o.c_pattern)
    *o.c_pattern = NULL; /* whatever fails from here on */
  if (status != ESMM_OK || !ctx)
    return ESMM_ERR_ARGUMENT;
  if (o.a_pattern)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->a_pattern is set, but the blocks of a are its pattern");
  status = check_bsr(ctx, "a", a, &arrays);
  if (status == ESMM_OK && arrays.place == ESMM_DEVICE)
    status = esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                       "a->place is ESMM_DEVICE: esmm_matmul_bsr takes blocks in host memory, esmm_prepare_bsr either");
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "c", c, &checked);
  if (status == ESMM_OK)
    status = check_apart(ctx, &arrays, "c", &checked);
  if (status == ESMM_OK) {
    const esmm_matrix counts = row_of(o.column_nonzeros, checked.cols, ESMM_F32, checked.place);
    status = check_apart(ctx, &arrays, "opts->column_nonzeros", &counts);
  }
  if (status != ESMM_OK)
    return status;
  status = to_dense(ctx, "a", &arrays, &dense);
  if (status != ESMM_OK)
    return status;
  esmm_pattern *pattern = NULL;
  status = pattern_of(ctx, &arrays, &pattern);
  if (status == ESMM_OK) {
    o.a_pattern = pattern;
    o.size = sizeof o;
    status = esmm_matmul(ctx, &dense, weights, c, &o, stats);
  }
  esmm_pattern_free(pattern);
  esmm_host_twin_free(ctx, &dense);
  return status;
}
