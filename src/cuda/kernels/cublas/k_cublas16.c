/*
 * k_cublas16.c: NVIDIA's dense library for bf16 and fp16, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's rows, writes C itself and knows no epilogue but alpha and beta.
 */
#include "cuda/kernels/cublas/cublas.h"

#include <math.h>
#include <stdio.h>

#define UNEVEN 1.08 /* what rounds that do not come out even cost at most */

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

/*
 * Arithmetic and reading work side by side: whichever takes longer is what the product takes. Where there are enough
 * tiles for all multiprocessors, the library's go in rounds, as ours do, but a last round that is far from full costs
 * it less; where not, it finds other ways to keep them busy.
 */
static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  const int64_t tiles = esmm_ceil_div(p->m, 128) * esmm_ceil_div(p->n, 256), gpu = p->w->cuda->multiprocessors;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double work = m * n * k, read = 2.0 * k * (m + n);
  const double rounds = fmin((double)esmm_ceil_div(tiles, gpu), UNEVEN * (double)tiles / (double)gpu);
  const double stages = rounds * (double)esmm_ceil_div(p->k, 64);
  units[1] = ESMM_CUDA_EXPOSED * (double)esmm_dtype_size(p->c.dtype) * m * n * (p->beta == 0.0f ? 1.0 : 2.0);
  if (tiles >= gpu * 3 / 4)
    units[2] = stages;
  else if (cost[0] * work >= cost[1] * read)
    units[0] = work;
  else
    units[1] += read;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = 0;
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
  .backend = ESMM_CUDA, .flags = ESMM_KERNEL_DETERMINISTIC, .sm = 80, .library = true, .missing = esmm_cublas_missing, \
  .can_run = can_run_##id, .start = esmm_cublas_start, .terms = terms,                                                 \
  .term_names = {"multiply-adds", "reading and writing", "stages of 256 columns", "", "", "launches"},                 \
  .cost = {2.5e-15, 2.8e-13, 6.5e-7, 0.0, 0.0, 7e-6}, .workspace = esmm_cublas_workspace, .run = run

ESMM_KERNEL(cublas_bf16) = {DESCRIPTOR(bf16)};

ESMM_KERNEL(cublas_f16) = {DESCRIPTOR(f16)};
