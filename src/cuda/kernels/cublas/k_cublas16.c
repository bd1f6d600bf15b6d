/*
 * k_cublas16.c: NVIDIA's dense library for bf16 and fp16, where it is there: the competitor that skipping has to beat.
 *
 * It reads A as it is and B's rows, or B transposed where it lies so, and writes C itself where nothing but alpha and
 * beta follows the sums; else a pass over the sums makes C of them (cublas.h).
 */
#include "cuda/kernels/cublas/cublas.h"

#include <math.h>
#include <stdio.h>

#define UNEVEN 1.08    /* what rounds that do not come out even cost at most */
#define MUCH_WORK 1e11 /* multiply-adds, with which the GPU's clock goes down */
#define HOT 1.08

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

/*
 * Where lines are not of 16 bytes: what a byte costs beside one where they are, a multiply-add beside the term's, a k
 * of the first 1024, and the launch. Those products vary; these are what most of them take at least.
 */
typedef struct odd {
  double bytes, work, ks, launches;
} odd;

static odd odd_lines(const esmm_problem *p)
{
  const bool a_in_lines = esmm_cuda_in_lines(&p->a);
  if (p->m == 1 || p->n == 1)
    return (odd){1.5, 0.0, p->n == 1 || a_in_lines ? 2.0 : 8.0, 0.85};
  if (p->n % 2 == 0 && p->a.ld % 2 == 0 && p->c.ld % 2 == 0) /* it loads two or four elements at a time */
    return (odd){1.7, 0.55, 7.5, 1.0};
  return (odd){2.2, 0.85, a_in_lines ? 5.5 : 8.5, 1.0};
}

/* By how much the longer of two that work side by side takes longer than alone. */
static double slowed(double longer, double shorter)
{
  return longer > 0.0 ? pow(1.0 + pow(shorter / longer, 2.5), 0.4) : 1.0;
}

/*
 * Arithmetic and reading work side by side: whichever takes longer is what the product takes, and somewhat more where
 * they take about the same. Where there are enough tiles for all multiprocessors, the library's go in rounds, as ours
 * do, but a last round that is far from full costs it less; where not, it finds other ways to keep them busy. A long k
 * costs a small product time of its own.
 */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const int64_t tiles = esmm_ceil_div(p->m, 128) * esmm_ceil_div(p->n, 256), gpu = esmm_cuda_sms(p);
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double work = m * n * k, read = 2.0 * k * (m + n);
  const double rounds = fmin((double)esmm_ceil_div(tiles, gpu), UNEVEN * (double)tiles / (double)gpu);
  const double stages = rounds * (double)esmm_ceil_div(p->k, 64);
  const bool passes = esmm_cublas_passes(p);
  const double written =
      passes ? sizeof(float) * m * n : (double)esmm_dtype_size(p->c.dtype) * m * n * (p->beta == 0.0f ? 1.0 : 2.0);
  const double after = esmm_cublas_pass_bytes(p), launches = passes ? ESMM_CUBLAS_PASS : 0.0;
  *variant = 0;
  if (!in_lines(p)) {
    const odd lines = odd_lines(p);
    units->base[1] = lines.bytes * (read + written) + after;
    units->base[3] = lines.work * work;
    units->base[4] = lines.ks * fmin(k, 1024.0);
    units->base[5] = lines.launches + launches;
    return;
  }
  units->base[1] = ESMM_CUDA_EXPOSED * written + after;
  units->base[5] = 1.0 + launches;
  if (tiles >= gpu * 3 / 4) {
    units->base[2] = work >= MUCH_WORK ? HOT * stages : stages;
    return;
  }
  units->base[4] = fmin(k, 4096.0);
  const double counting = cost[0] * work, reading = cost[1] * read;
  if (counting >= reading)
    units->base[0] = work * slowed(counting, reading);
  else
    units->base[1] += read * slowed(reading, counting);
}

/* B's rows are the columns of its transpose, which is what cuBLAS sees in them. Those without padding where there are
   such: a user of cuBLAS would have them. A B that lies transposed is read as it is. */
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
  .terms = esmm_cuda_terms, .term_names = {"multiply-adds",     "reading and writing", "stages of 256 columns",        \
                                           "odd multiply-adds", "k's in a row",        "launches"},                    \
  .cost = {2.35e-15, 2.6e-13, 6.32e-7, 1.39e-14, 6.5e-10, 5.95e-6}, .workspace = esmm_cublas_workspace, .run = run

static const esmm_cuda_kernel about = {.sm = 80, .library = true, .start = esmm_cublas_start, .line = line};

ESMM_KERNEL(cublas_bf16) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(cublas_f16) = {DESCRIPTOR(f16, ESMM_F16)};
