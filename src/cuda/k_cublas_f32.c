/*
 * k_cublas_f32.c: NVIDIA's dense library, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's columns [n][k_padded], writes C itself and knows no epilogue but alpha and beta.
 */
#include "cublas.h"

#include <stdio.h>

static bool no(char *why, size_t why_bytes, const char *text)
{
  (void)snprintf(why, why_bytes, "%s", text);
  return false;
}

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  if (p->a.dtype != ESMM_F32 || p->c.dtype != ESMM_F32)
    return no(why, why_bytes, "it takes A and C of f32 only");
  if (p->bias || p->activation != ESMM_ACT_NONE)
    return no(why, why_bytes, "it has no bias and no activation");
  if (!p->w->cuda->columns)
    return no(why, why_bytes, "the weights keep no columns: B is not f32, or was prepared for decode");
  if (p->m > INT32_MAX || p->n > INT32_MAX || p->w->cuda->strips.k_padded > INT32_MAX || p->a.ld > INT32_MAX ||
      p->c.ld > INT32_MAX)
    return no(why, why_bytes, "a side or a leading dimension is 2^31 or more");
  return esmm_cublas_usable(ctx, why, why_bytes);
}

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  units[0] = m * n * k;
  units[1] = sizeof(float) * (m * k + k * n + m * n);
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = 0;
}

static size_t workspace(const esmm_problem *p)
{
  (void)p;
  return ESMM_CUBLAS_WORKSPACE;
}

/* cuBLAS is column-major: a row-major C is its transpose there, made from the transposed operands in turned order. */
static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const bool a_rows = p->a.order == ESMM_ROW_MAJOR;
  const CUdeviceptr work = (CUdeviceptr)(uintptr_t)scratch, c = (CUdeviceptr)(uintptr_t)p->c.data;
  esmm_cublas_operand a = {(CUdeviceptr)(uintptr_t)p->a.data, p->a.ld, a_rows};
  esmm_cublas_operand b = {p->w->cuda->columns, p->w->cuda->strips.k_padded, false};
  if (p->c.order == ESMM_COL_MAJOR)
    return esmm_cublas_sgemm(ctx, p->call->stream, work, p->m, p->n, p->k, p->alpha, a, b, p->beta, c, p->c.ld);
  a.transposed = !a.transposed;
  b.transposed = !b.transposed;
  return esmm_cublas_sgemm(ctx, p->call->stream, work, p->n, p->m, p->k, p->alpha, b, a, p->beta, c, p->c.ld);
}

ESMM_KERNEL(cublas_f32) = {
    .name = "cublas_f32",
    .doc = "cuBLAS, IEEE fp32: dense, where the library is there",
    .backend = ESMM_CUDA,
    .number = 15,
    /* No atomics (cuBLAS's default), one stream at a time, a workspace of the context's own: NVIDIA promises the same
       bits then. */
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .sm = 80,
    .ungated = true,
    .missing = esmm_cublas_missing,
    .can_run = can_run,
    .start = esmm_cublas_start,
    .terms = terms,
    .term_names = {"multiply-adds", "reading and writing", "", "", "", "launches"},
    .cost = {3.75e-14, 2.5e-13, 0.0, 0.0, 0.0, 2e-5},
    .workspace = workspace,
    .run = run,
};
