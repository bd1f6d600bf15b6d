/*
 * rows.c: rows of matrices gathered, scattered and summed between products.
 *
 * Weights are wanted row by row, and a caller's may lie column by column: those are moved in blocks of 16 columns, so
 * that a cache line that was read or written is used whole.
 */
#include "convert.h"
#include "ffn.h"

#include <string.h>

#define BLOCK 16  /* columns moved at a time where rows are strided */
#define WIDTH 256 /* columns summed at a time */

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

void esmm_ffn_gather_rows(const esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, esmm_matrix *dst)
{
  enum { STEP = 64 };
  const size_t size = esmm_dtype_size(src->dtype);
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
  for (int64_t first = 0; first < dst->rows; first += STEP) {
    const int64_t last = esmm_min(first + STEP, dst->rows);
    if (src->order == ESMM_COL_MAJOR) {
      gather_strided(src, order, dst, first, last);
      continue;
    }
    for (int64_t i = first; i < last; i++) {
      const int64_t row = order ? order[i] : i;
      if (dst->dtype == src->dtype)
        memcpy((char *)dst->data + (size_t)(i * dst->ld) * size,
               (const char *)src->data + (size_t)(row * src->ld) * size, (size_t)dst->cols * size);
      else
        esmm_convert_elements(src->data, src->dtype, row * src->ld, 1, dst->cols, dst->data, dst->dtype, i * dst->ld);
    }
  }
  (void)ctx; /* unused without OpenMP */
}

void esmm_ffn_gather_columns(const esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, esmm_matrix *dst)
{
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
  for (int64_t row = 0; row < dst->rows; row++)
    for (int64_t i = 0; i < dst->cols; i++)
      esmm_store_element(dst->data, dst->dtype, row * dst->ld + i,
                         esmm_load_element(src->data, src->dtype, row * src->ld + order[i]));
  (void)ctx; /* unused without OpenMP */
}

void esmm_ffn_scatter_rows(const esmm_ctx *ctx, const esmm_matrix *src, const int32_t *places, esmm_matrix *dst,
                           bool add)
{
  /* Along dst's own lines: rows of it, or blocks of its columns. */
  const bool by_rows = dst->order == ESMM_ROW_MAJOR;
  const int64_t step = by_rows ? 1 : BLOCK, outer = by_rows ? dst->rows : dst->cols;
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
  for (int64_t first = 0; first < outer; first += step) {
    const int64_t row0 = by_rows ? first : 0, row1 = by_rows ? first + 1 : dst->rows;
    const int64_t col0 = by_rows ? 0 : first, col1 = by_rows ? dst->cols : esmm_min(first + step, dst->cols);
    for (int64_t row = row0; row < row1; row++) {
      const float *from = places[row] < 0 ? NULL : (const float *)src->data + places[row] * src->ld;
      if (!from && add)
        continue;
      for (int64_t col = col0; col < col1; col++) {
        const float x = from ? from[col] : 0.0f;
        esmm_matrix_set(dst, row, col, add ? esmm_matrix_get(dst, row, col) + x : x);
      }
    }
  }
  (void)ctx; /* unused without OpenMP */
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

void esmm_ffn_column_sums(const esmm_ctx *ctx, const esmm_matrix *m, const int32_t *order, int64_t n, float *out,
                          bool add)
{
  if (order && !add) /* columns that are not there */
    memset(out, 0, (size_t)n * sizeof *out);
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
  for (int64_t from = 0; from < m->cols; from += WIDTH) {
    double sums[WIDTH];
    const int64_t width = esmm_min(WIDTH, m->cols - from);
    sum_columns(m, from, width, sums);
    for (int64_t i = 0; i < width; i++) {
      float *to = out + (order ? order[from + i] : from + i);
      *to = add ? *to + (float)sums[i] : (float)sums[i];
    }
  }
  (void)ctx; /* unused without OpenMP */
}
