/*
 * k_cublas_f32.c: NVIDIA's dense library, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's columns [n][k_padded], writes C itself and knows no epilogue but alpha and beta.
 */
#include "cuda/kernels/cublas/cublas.h"

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
  if (!p->w->cuda->columns)
    return no(why, why_bytes, "the weights keep no columns: B is not f32, or was prepared for decode");
  return esmm_cublas_fits(p, p->w->cuda->strips.k_padded, why, why_bytes) && esmm_cublas_usable(ctx, why, why_bytes);
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

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const esmm_cublas_operand b = {p->w->cuda->columns, p->w->cuda->strips.k_padded, false};
  return esmm_cublas_multiply(ctx, p, b, scratch);
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
    .library = true,
    .missing = esmm_cublas_missing,
    .can_run = can_run,
    .start = esmm_cublas_start,
    .terms = terms,
    .term_names = {"multiply-adds", "reading and writing", "", "", "", "launches"},
    .cost = {3.75e-14, 2.5e-13, 0.0, 0.0, 0.0, 2e-5},
    .workspace = esmm_cublas_workspace,
    .run = run,
};
