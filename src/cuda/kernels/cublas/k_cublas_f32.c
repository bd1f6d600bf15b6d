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

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->c.dtype != ESMM_F32)
    return no(why, why_bytes, "it takes C of f32 only");
  return esmm_cublas_fits(p, esmm_cuda_b(p)->strips.k_padded, why, why_bytes) &&
         esmm_cublas_usable(p->ctx, why, why_bytes);
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  units->base[0] = m * n * k;
  units->base[1] = sizeof(float) * (m * k + k * n + m * n);
  units->base[2] = k < 2048.0 ? k : 2048.0;
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)stats;
  const esmm_cublas_operand b = {esmm_cuda_b(p)->columns, esmm_cuda_b(p)->strips.k_padded, false};
  return esmm_cublas_multiply(ctx, p, b, scratch);
}

ESMM_KERNEL(cublas_f32) = {
    .name = "cublas_f32",
    .doc = "cuBLAS, IEEE fp32: dense, where the library is there",
    .backend = &esmm_cuda_backend,
    .number = 15,
    /* No atomics (cuBLAS's default), one stream at a time, a workspace of the context's own: NVIDIA promises the same
       bits then. */
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .reads = ESMM_FORM(COLUMNS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_F32),
    .device = &(const esmm_cuda_kernel){.sm = 80, .library = true, .start = esmm_cublas_start, .line = line},
    .missing = esmm_cublas_missing,
    .can_run = can_run,
    .terms = esmm_cuda_terms,
    .term_names = {"multiply-adds", "reading and writing", "k's in a row", "", "", "launches"},
    .cost = {3.8e-14, 2.7e-13, 3.8e-9, 0.0, 0.0, 6.1e-6},
    .workspace = esmm_cublas_workspace,
    .run = run,
};
