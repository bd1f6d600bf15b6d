/*
 * rows.c: rows of matrices gathered, scattered and summed between products.
 *
 * Weights are wanted row by row, and a caller's may lie column by column: those are moved in blocks of 16 columns, so
 * that a cache line that was read or written is used whole.
 */
#include "convert.h"
#include "ffn.h"
#include "threads.h"

#include <string.h>

#define BLOCK 16   /* columns moved at a time where rows are strided */
#define STRIDED 64 /* such rows gathered side by side: they share cache lines */
#define WIDTH 256  /* columns summed at a time */

void esmm_ffn_load_row(const esmm_matrix *m, int64_t row, const int32_t *order, int64_t count, float *out)
{
  const int64_t from = row * m->ld;
  if (!order)
    esmm_load_elements(m->data, m->dtype, from, 1, count, out, 1);
  for (int64_t i = 0; i < count && order; i++)
    out[i] = esmm_load_element(m->data, m->dtype, from + order[i]);
}

/* Rows first..last of dst, where src's elements of one column lie together. */
static void gather_strided(const esmm_matrix *src, const int32_t *order, esmm_matrix *dst, int64_t first, int64_t last)
{
  for (int64_t col = 0; col < dst->cols; col += BLOCK) {
    const int64_t end = esmm_min(col + BLOCK, dst->cols);
    for (int64_t i = first; i < last; i++) {
      const int64_t row = order ? order[i] : i;
      esmm_convert_elements(src->data, src->dtype, col * src->ld + row, src->ld, end - col, dst->data, dst->dtype,
                            i * dst->ld + col);
    }
  }
}

/* What moves where. */
typedef struct moving {
  const esmm_matrix *src;
  const int32_t *order; /* or places, or NULL */
  esmm_matrix *dst;
  bool add;
} moving;

static int64_t lines_at_once(const esmm_matrix *dst, int64_t elements)
{
  return esmm_at_once(elements, (int64_t)esmm_dtype_size(dst->dtype));
}

static void gather_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const moving *x = arg;
  const esmm_matrix *src = x->src;
  esmm_matrix *dst = x->dst;
  const size_t size = esmm_dtype_size(src->dtype);
  for (int64_t i = first; src->order == ESMM_COL_MAJOR && i < end; i += STRIDED)
    gather_strided(src, x->order, dst, i, esmm_min(i + STRIDED, end));
  for (int64_t i = first; src->order == ESMM_ROW_MAJOR && i < end; i++) {
    const int64_t row = x->order ? x->order[i] : i;
    if (dst->dtype == src->dtype)
      memcpy((char *)dst->data + (size_t)(i * dst->ld) * size, (const char *)src->data + (size_t)(row * src->ld) * size,
             (size_t)dst->cols * size);
    else
      esmm_convert_elements(src->data, src->dtype, row * src->ld, 1, dst->cols, dst->data, dst->dtype, i * dst->ld);
  }
}

esmm_status esmm_ffn_gather_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                 esmm_matrix *dst)
{
  (void)count;
  moving x = {.src = src, .order = order, .dst = dst};
  const int64_t at_once = src->order == ESMM_COL_MAJOR ? STRIDED : lines_at_once(dst, dst->cols);
  esmm_for(ctx, ctx->threads, dst->rows, at_once, gather_rows, &x);
  return ESMM_OK;
}

static void gather_columns(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const moving *x = arg;
  for (int64_t row = first; row < end; row++)
    for (int64_t i = 0; i < x->dst->cols; i++)
      esmm_store_element(x->dst->data, x->dst->dtype, row * x->dst->ld + i,
                         esmm_load_element(x->src->data, x->src->dtype, row * x->src->ld + x->order[i]));
}

esmm_status esmm_ffn_gather_columns(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                    esmm_matrix *dst)
{
  (void)count;
  moving x = {.src = src, .order = order, .dst = dst};
  esmm_for(ctx, ctx->threads, dst->rows, lines_at_once(dst, dst->cols), gather_columns, &x);
  return ESMM_OK;
}

static void scatter_part(const moving *x, int64_t row0, int64_t row1, int64_t col0, int64_t col1)
{
  for (int64_t row = row0; row < row1; row++) {
    const int32_t place = x->order[row];
    const float *from = place < 0 ? NULL : (const float *)x->src->data + place * x->src->ld;
    if (!from && x->add)
      continue;
    for (int64_t col = col0; col < col1; col++) {
      const float value = from ? from[col] : 0.0f;
      esmm_matrix_set(x->dst, row, col, x->add ? esmm_matrix_get(x->dst, row, col) + value : value);
    }
  }
}

/* Along dst's own lines: rows of it, or blocks of its columns. */
static void scatter_lines(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const moving *x = arg;
  if (x->dst->order == ESMM_ROW_MAJOR) {
    scatter_part(x, first, end, 0, x->dst->cols);
    return;
  }
  for (int64_t col = first; col < end; col += BLOCK)
    scatter_part(x, 0, x->dst->rows, col, esmm_min(col + BLOCK, end));
}

esmm_status esmm_ffn_scatter_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *places, esmm_matrix *dst,
                                  bool add)
{
  moving x = {.src = src, .order = places, .dst = dst, .add = add};
  if (dst->order == ESMM_ROW_MAJOR)
    esmm_for(ctx, ctx->threads, dst->rows, lines_at_once(dst, dst->cols), scatter_lines, &x);
  else
    esmm_for(ctx, ctx->threads, dst->cols, esmm_round_up(lines_at_once(dst, dst->rows), BLOCK), scatter_lines, &x);
  return ESMM_OK;
}

static void sum_columns(const esmm_matrix *m, int64_t from, int64_t width, double *sums)
{
  memset(sums, 0, (size_t)width * sizeof *sums);
  float line[WIDTH];
  if (m->order == ESMM_ROW_MAJOR)
    for (int64_t row = 0; row < m->rows; row++) {
      esmm_load_elements(m->data, m->dtype, row * m->ld + from, 1, width, line, 1);
      for (int64_t i = 0; i < width; i++)
        sums[i] += (double)line[i];
    }
  else
    for (int64_t i = 0; i < width; i++)
      for (int64_t row = 0; row < m->rows; row += WIDTH) {
        const int64_t rows = esmm_min(WIDTH, m->rows - row);
        esmm_load_elements(m->data, m->dtype, (from + i) * m->ld + row, 1, rows, line, 1);
        for (int64_t r = 0; r < rows; r++)
          sums[i] += (double)line[r];
      }
}

typedef struct summing {
  const esmm_matrix *m;
  const int32_t *order;
  float *out;
  bool add;
} summing;

/* first, end: in stretches of WIDTH columns */
static void sum_stretches(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const summing *x = arg;
  for (int64_t from = first * WIDTH; from < esmm_min(end * WIDTH, x->m->cols); from += WIDTH) {
    double sums[WIDTH];
    const int64_t width = esmm_min(WIDTH, x->m->cols - from);
    sum_columns(x->m, from, width, sums);
    for (int64_t i = 0; i < width; i++) {
      float *to = x->out + (x->order ? x->order[from + i] : from + i);
      *to = x->add ? *to + (float)sums[i] : (float)sums[i];
    }
  }
}

esmm_status esmm_ffn_column_sums(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *m, const int32_t *order,
                                 int64_t count, int64_t n, float *out, bool add)
{
  (void)cache;
  (void)count;
  if (order && !add) /* columns that are not there */
    memset(out, 0, (size_t)n * sizeof *out);
  summing x = {.m = m, .order = order, .out = out, .add = add};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(m->cols, WIDTH), esmm_at_once(m->rows, WIDTH * (int64_t)sizeof(float)),
           sum_stretches, &x);
  return ESMM_OK;
}
