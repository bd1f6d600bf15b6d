/*
 * k_cublas_f32.c: NVIDIA's dense library, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's columns [n][columns_ld] or its rows [k][n], whichever layout it is expected to multiply
 * faster, and writes C itself where nothing but alpha and beta follows the sums and C is fp32; else a pass over the
 * sums makes C of them (cublas.h).
 */
#include "cuda/kernels/cublas/cublas.h"

#include <math.h>

#define OTHER_LAYOUT 1.3 /* cost of rows where columns are faster, about */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  return esmm_cublas_fits(p, esmm_cuda_b(p)->strips.k_padded, why, why_bytes) &&
         esmm_cublas_usable(p->ctx, why, why_bytes);
}

/*
 * Which layout of B it multiplies faster: there is little of a rule in it, and up to 4 times between them. These limits
 * were fitted to 990 products on an H200; one in ten of those loses more than a twentieth by them.
 */
static bool rows_are_faster(const esmm_problem *p)
{
  const double m = (double)p->m, n = (double)p->n;
  if (p->k == 1)
    return true;
  if (p->m == 1)
    return p->k <= 16 || (p->n >= 4096 && p->k >= 1024);
  if (p->k > 64 && p->k <= 128 && p->n > 256 && p->n < 1024 && p->m <= 16)
    return true; /* or 27 us instead of 9, with some n of these */
  if (p->m <= 8)
    return p->k <= 130 ? p->n >= 8192 : p->n <= 1200 || (p->k > 1024 && p->m > 4);
  if (p->k <= 128)
    return m * n > (p->k <= 33 ? 65536.0 : 5e5);
  return p->n > 16 || m <= 3.5 * n || p->m > 2048;
}

/* What a kind of product costs beside the terms of .cost, which are those of one row or column. */
typedef struct kind {
  double work, bytes, ks, launches;
} kind;

static kind kind_of(const esmm_problem *p)
{
  if (p->m == 1 || p->n == 1)
    return (kind){0.0, p->n == 1 ? 1.0 : 1.3, 1.0, 1.0};
  if (p->m <= 8 && p->k <= 130)
    return (kind){0.0, 3.7, 3.8, 1.0};
  if (p->k > 1 && p->k <= 128 && p->m > 16 && p->m <= 2048 &&
      (p->n <= 33 || (p->n <= 128 && (p->k <= 33 || p->m <= 200))))
    return (kind){0.0, 2.5, 0.0, 1.72};
  if (p->k <= 33)
    return (kind){1.05, 1.5, 23.0, 1.0};
  if (p->k <= 128)
    return (kind){1.05, 1.0, 31.0, 0.85};
  return (kind){1.0, 1.8, 1.1, 1.8};
}

static bool takes_rows(const esmm_problem *p)
{
  const esmm_cuda_weights *b = esmm_cuda_b(p);
  return b->form[ESMM_FORM_TIGHT32] && (rows_are_faster(p) || !b->columns);
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double slower = takes_rows(p) && !rows_are_faster(p) ? OTHER_LAYOUT : 1.0;
  const kind x = kind_of(p);
  units->base[0] = slower * x.work * m * n * k;
  units->base[1] = slower * x.bytes * sizeof(float) * (m * k + k * n + m * n) + esmm_cublas_pass_bytes(p);
  units->base[2] = slower * x.ks * fmin(k, 2048.0);
  units->base[5] = slower * x.launches + (esmm_cublas_passes(p) ? ESMM_CUBLAS_PASS : 0.0);
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)stats;
  const esmm_cuda_weights *b = esmm_cuda_b(p);
  const esmm_cublas_operand columns = {b->columns, b->columns_ld, false},
                            rows = {b->form[ESMM_FORM_TIGHT32], p->n, true};
  return esmm_cublas_multiply(ctx, p, takes_rows(p) ? rows : columns, scratch);
}

ESMM_KERNEL(cublas_f32) = {
    .name = "cublas_f32",
    .doc = "cuBLAS, IEEE fp32: dense, where the library is there",
    .backend = &esmm_cuda_backend,
    /* No atomics (cuBLAS's default), one stream at a time, a workspace of the context's own: NVIDIA promises the same
       bits then. */
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .reads = ESMM_FORM(COLUMNS) | ESMM_FORM(TIGHT32),
    .dtypes = ESMM_DTYPE_BIT(ESMM_F32),
    .device = &(const esmm_cuda_kernel){.sm = 80, .library = true, .start = esmm_cublas_start, .line = line},
    .missing = esmm_cublas_missing,
    .can_run = can_run,
    .terms = esmm_cuda_terms,
    .term_names = {"multiply-adds", "reading and writing", "k's in a row", "", "", "launches"},
    .cost = {4.1e-14, 2.4e-13, 1.2e-9, 0.0, 0.0, 5e-6},
    .workspace = esmm_cublas_workspace,
    .run = run,
};
