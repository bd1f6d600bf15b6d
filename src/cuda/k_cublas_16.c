/*
 * k_cublas_16.c: NVIDIA's dense library for bf16 and fp16, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's rows, writes C itself and knows no epilogue but alpha and beta.
 */
#include "cublas.h"

#include <stdio.h>

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, esmm_dtype dtype, char *why, size_t why_bytes)
{
  if (p->a.dtype != dtype || p->w->dtype != dtype || (p->c.dtype != dtype && p->c.dtype != ESMM_F32)) {
    const char *name = esmm_dtype_str(dtype);
    (void)snprintf(why, why_bytes, "it takes A and B of %s only, and C of %s or f32", name, name);
    return false;
  }
  return esmm_cublas_fits(p, p->w->cuda->rows_ld, why, why_bytes) && esmm_cublas_usable(ctx, why, why_bytes);
}

static bool can_run_bf16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_BF16, why, why_bytes);
}

static bool can_run_f16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_F16, why, why_bytes);
}

/* Arithmetic and memory work side by side: whichever takes longer is what the product takes. */
static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double work = m * n * k, bytes = (double)esmm_dtype_size(p->a.dtype) * k * (m + n) +
                                         (double)esmm_dtype_size(p->c.dtype) * m * n * (p->beta == 0.0f ? 1.0 : 2.0);
  if (cost[0] * work >= cost[1] * bytes)
    units[0] = work;
  else
    units[1] = bytes;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = 0;
}

static size_t workspace(const esmm_problem *p)
{
  (void)p;
  return ESMM_CUBLAS_WORKSPACE;
}

/* B's rows are the columns of its transpose, which is what cuBLAS sees in them. */
static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const esmm_cublas_operand b = {p->w->cuda->rows, p->w->cuda->rows_ld, true};
  return esmm_cublas_multiply(ctx, p, b, scratch);
}

/* Deterministic for the reasons that k_cublas_f32.c gives. */
#define DESCRIPTOR(id)                                                                                                 \
  .name = "cublas_" #id, .doc = "cuBLAS, " #id " with sums in fp32: dense, where the library is there",                \
  .backend = ESMM_CUDA, .flags = ESMM_KERNEL_DETERMINISTIC, .sm = 80, .ungated = true, .missing = esmm_cublas_missing, \
  .can_run = can_run_##id, .start = esmm_cublas_start, .terms = terms,                                                 \
  .term_names = {"multiply-adds", "reading and writing", "", "", "", "launches"},                                      \
  .cost = {2.67e-15, 3.85e-13, 0.0, 0.0, 0.0, 6e-6}, .workspace = workspace, .run = run

ESMM_KERNEL(cublas_bf16) = {DESCRIPTOR(bf16)};

ESMM_KERNEL(cublas_f16) = {DESCRIPTOR(f16)};
