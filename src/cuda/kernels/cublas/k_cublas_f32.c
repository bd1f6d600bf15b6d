/*
 * k_cublas_f32.c: NVIDIA's dense library, where it is there: the competitor that skipping has to beat.
 *
 * cublas_f32 reads B's columns [n][columns_ld], cublas_f32_rows its rows [k][n]. Which of the two is faster, by up to 4
 * times, follows no clear rule: so they are two kernels, and calls are measured. Both read A as it is, and write C
 * themselves where nothing but alpha and beta follows the sums and C is fp32; else a pass over the sums makes C of them
 * (cublas.h).
 */
#include "cuda/kernels/cublas/cublas.h"

#include <math.h>

#define FEW_ROWS 8 /* of A, for which columns are faster in most products; for more, rows are */

static bool takes_rows(const esmm_kernel *self)
{
  return self->reads == ESMM_FORM(TIGHT32);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  return esmm_cublas_fits(p, takes_rows(self) ? p->n : esmm_cuda_b(p)->columns_ld, why, why_bytes) &&
         esmm_cublas_usable(p->ctx, why, why_bytes);
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double slower = takes_rows(self) == (p->m > FEW_ROWS) ? 1.0 : ESMM_GPU_OTHER_LAYOUT;
  units->base[0] = slower * m * n * k;
  units->base[1] = slower * sizeof(float) * (m * k + k * n + m * n) + esmm_cublas_pass_bytes(p);
  units->base[2] = slower * fmin(k, 2048.0);
  units->base[5] = slower + (esmm_cublas_passes(p) ? ESMM_GPU_SUMS : 0.0);
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const esmm_cuda_weights *b = esmm_cuda_b(p);
  const esmm_cublas_operand columns = {b->columns, b->columns_ld, false},
                            rows = {b->form[ESMM_FORM_TIGHT32], p->n, true};
  return esmm_cublas_multiply(ctx, p, takes_rows(self) ? rows : columns, scratch);
}

static const esmm_cuda_kernel about = {.sm = 80, .library = true, .start = esmm_cublas_start, .line = line};

/* Deterministic: no atomics (cuBLAS's default), one stream at a time, a workspace of the context's own. NVIDIA promises
   the same bits then. */
#define DESCRIPTOR(text, form)                                                                                        \
  .doc = "cuBLAS, IEEE fp32, on B's " text ": dense, where the library is there", .backend = &esmm_cuda_backend,      \
  .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(form), .dtypes = ESMM_DTYPE_BIT(ESMM_F32), .device = &about, \
  .missing = esmm_cublas_missing, .can_run = can_run, .terms = esmm_cuda_terms,                                       \
  .term_names = {"multiply-adds", "reading and writing", "k's in a row", "", "", "launches"},                         \
  .cost = {ESMM_GPU_F32, ESMM_GPU_READ, ESMM_GPU_K, 0.0, 0.0, ESMM_GPU_LAUNCH}, .workspace = esmm_cublas_workspace,   \
  .run = run

ESMM_KERNEL(cublas_f32) = {.name = "cublas_f32", DESCRIPTOR("columns", COLUMNS)};

ESMM_KERNEL(cublas_f32_rows) = {.name = "cublas_f32_rows", DESCRIPTOR("rows", TIGHT32)};
