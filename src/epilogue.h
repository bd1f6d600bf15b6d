/*
 * epilogue.h: what happens to a finished sum before it is stored. One definition for every kernel:
 *
 *     C = activation(alpha * sum + beta * C + bias)
 *
 * Kernels that can store sums as they are (esmm_is_plain) do so; the others keep fp32 sums in scratch and finish a
 * block at a time with esmm_finish. Included by kernels, so that it is compiled for their instruction set.
 */
#ifndef ESMM_EPILOGUE_H
#define ESMM_EPILOGUE_H

#include "convert.h"
#include "kernel.h"

/* Sums may be written or added straight into C: fp32, row-major, alpha 1, beta 0 or 1, nothing after the sum. */
static inline bool esmm_is_plain(const esmm_problem *p)
{
  return p->c.dtype == ESMM_F32 && p->c.order == ESMM_ROW_MAJOR && p->alpha == 1.0f &&
         (p->beta == 0.0f || p->beta == 1.0f) && !p->bias && p->activation == ESMM_ACT_NONE;
}

static inline float esmm_activate(esmm_activation activation, float x)
{
  if (activation == ESMM_ACT_NONE)
    return x;
  float positive = x < 0.0f ? 0.0f : x; /* NaN stays NaN */
  return activation == ESMM_ACT_RELU2 ? positive * positive : positive;
}

static inline float esmm_epilogue(const esmm_problem *p, int64_t row, int64_t col, float sum)
{
  float x = p->alpha * sum;
  if (p->beta != 0.0f)
    x += p->beta * esmm_matrix_get(&p->c, row, col);
  if (p->bias)
    x += p->bias[col];
  return esmm_activate(p->activation, x);
}

/* sums: [rows,cols] row-major with leading dimension ld, for C from (row0, col0) on. */
static inline void esmm_finish(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols,
                               const float *sums, int64_t ld)
{
  esmm_matrix c = p->c;
  if (c.order == ESMM_COL_MAJOR) {
    for (int64_t j = 0; j < cols; j++)
      for (int64_t i = 0; i < rows; i++)
        esmm_matrix_set(&c, row0 + i, col0 + j, esmm_epilogue(p, row0 + i, col0 + j, sums[i * ld + j]));
    return;
  }
  for (int64_t i = 0; i < rows; i++) {
    const float *sum = sums + i * ld;
    if (c.dtype == ESMM_F32 && p->beta == 0.0f) {
      float *out = (float *)c.data + (row0 + i) * c.ld + col0;
      for (int64_t j = 0; j < cols; j++)
        out[j] = esmm_activate(p->activation, p->alpha * sum[j] + (p->bias ? p->bias[col0 + j] : 0.0f));
      continue;
    }
    for (int64_t j = 0; j < cols; j++)
      esmm_matrix_set(&c, row0 + i, col0 + j, esmm_epilogue(p, row0 + i, col0 + j, sum[j]));
  }
}

#endif
