/*
 * k_cublas16.c: NVIDIA's dense library for bf16 and fp16, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's rows, or B transposed where it lies so, and writes C itself where nothing but alpha and
 * beta follows the sums; else a pass over the sums makes C of them (cublas.h).
 */
#include "cuda/kernels/cublas/cublas.h"

#include <math.h>
#include <stdio.h>

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  return esmm_cublas_fits(p, esmm_cuda_b(p)->rows_ld, why, why_bytes) && esmm_cublas_usable(p->ctx, why, why_bytes);
}

/* Lines of 16 bytes in A, B and C: without them the library takes kernels that load element by element. */
static bool in_lines(const esmm_problem *p)
{
  return esmm_cuda_in_lines(&p->a) && (esmm_cublas_passes(p) || esmm_cuda_in_lines(&p->c)) &&
         (!esmm_cuda_b(p)->form[ESMM_FORM_TIGHT16] || p->n % 8 == 0);
}

/* Arithmetic and reading work side by side: whichever takes longer is what the product takes. A small one's k's come
   one after the other. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k, stage = 128.0 * 256.0 * 64.0;
  const bool passes = esmm_cublas_passes(p);
  const double stages = m * n * k / (stage * (double)esmm_cuda_sms(p)), read = 2.0 * k * (m + n);
  const double slower = in_lines(p) ? 1.0 : ESMM_GPU_ODD_LINES;
  const double written = passes ? sizeof(float) * m * n : (double)esmm_dtype_size(p->c.dtype) * m * n;
  units->base[1] = slower * ESMM_GPU_EXPOSED * written + esmm_cublas_pass_bytes(p);
  if (cost[0] * stages >= cost[1] * read)
    units->base[0] = slower * stages;
  else
    units->base[1] += slower * read;
  units->base[2] = slower * fmin(k, 4096.0);
  units->base[5] = 1.0 + (passes ? ESMM_GPU_SUMS : 0.0);
  *variant = 0;
}

/* cuBLAS sees B's rows as the columns of its transpose. Rows without padding where there are such: a user of cuBLAS
   would have them. A B that lies transposed is read as it is. */
static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)stats;
  const CUdeviceptr tight = esmm_cuda_b(p)->form[ESMM_FORM_TIGHT16];
  const CUdeviceptr turned = esmm_cuda_b(p)->form[ESMM_FORM_TURNED16];
  const esmm_cublas_operand b = {turned  ? turned
                                 : tight ? tight
                                         : esmm_cuda_b(p)->rows,
                                 tight ? p->n : esmm_cuda_b(p)->rows_ld, !turned};
  return esmm_cublas_multiply(ctx, p, b, scratch);
}

/* Deterministic for the reasons that k_cublas_f32.c gives. */
#define DESCRIPTOR(id, dtype)                                                                                          \
  .name = "cublas_" #id, .doc = "cuBLAS, " #id " with sums in fp32: dense, where the library is there",                \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(ROWS16) | ESMM_FORM(TURNED16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .missing = esmm_cublas_missing, .can_run = can_run,               \
  .terms = esmm_cuda_terms,                                                                                            \
  .term_names = {"stages of 256 columns", "reading and writing", "k's in a row", "", "", "launches"},                  \
  .cost = {ESMM_GPU_STAGE, ESMM_GPU_READ, ESMM_GPU_K, 0.0, 0.0, ESMM_GPU_LAUNCH}, .workspace = esmm_cublas_workspace,  \
  .run = run

static const esmm_cuda_kernel about = {.sm = 80, .library = true, .start = esmm_cublas_start, .line = line};

ESMM_KERNEL(cublas_bf16) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(cublas_f16) = {DESCRIPTOR(f16, ESMM_F16)};
