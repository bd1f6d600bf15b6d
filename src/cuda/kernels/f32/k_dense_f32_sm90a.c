/*
 * k_dense_f32_sm90a.c: dense product at fp32 accuracy by wgmma. See k_dense_f32_sm90a.cu.
 *
 * A is read as it is where TMA can do that (fp32, row-major, 16-byte lines), else packed first.
 */
#include "cuda/kernels/common/host.h"

#include <stdio.h>

#define COLS ESMM_DENSE_COLS

ESMM_FATBIN(k_dense_f32_sm90a);
static const esmm_cuda_function tall = {&fatbin_k_dense_f32_sm90a, "esmm_dense_f32_256", ESMM_DENSE_SHARED_256};
static const esmm_cuda_function low = {&fatbin_k_dense_f32_sm90a, "esmm_dense_f32_128", ESMM_DENSE_SHARED_128};

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m > INT32_MAX / 2 || p->n > INT32_MAX / 2 || p->k > INT32_MAX / 2)
    return esmm_cuda_too_large(p, why, why_bytes);
  if (esmm_cuda_b(p)->columns_ld % 4 == 0)
    return true;
  (void)snprintf(why, why_bytes,
                 "k is %lld: so short columns of B are kept without padding, and it reads 16 bytes of them",
                 (long long)p->k);
  return false;
}

static bool as_it_is(const esmm_matrix *a)
{
  return a->dtype == ESMM_F32 && a->order == ESMM_ROW_MAJOR && esmm_cuda_as_it_is(a);
}

/* Waves of blocks of `rows` rows. */
static double rounds(const esmm_problem *p, int64_t rows)
{
  const int64_t blocks = esmm_ceil_div(p->m, rows) * esmm_ceil_div(p->n, COLS);
  return (double)esmm_ceil_div(blocks, esmm_cuda_sms(p));
}

/* Blocks of 256 rows are faster for each row, those of 128 fill the GPU sooner. */
static bool is_tall(const esmm_problem *p, const double *cost)
{
  return cost[0] * rounds(p, ESMM_DENSE_TALL) <= cost[1] * rounds(p, ESMM_DENSE_LOW);
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const bool use_tall = is_tall(p, cost);
  units->base[use_tall ? 0 : 1] =
      rounds(p, use_tall ? ESMM_DENSE_TALL : ESMM_DENSE_LOW) * (double)esmm_ceil_div(p->k, ESMM_DENSE_K);
  if (!as_it_is(&p->a)) {
    units->base[2] = (double)p->m * (double)p->k * (double)(esmm_dtype_size(p->a.dtype) + sizeof(float));
    units->base[4] = 1.0;
  }
  units->base[3] = esmm_cuda_c_bytes(p);
  *variant = use_tall ? ESMM_DENSE_TALL : ESMM_DENSE_LOW;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  size_t bytes;
  if (as_it_is(&p->a))
    return 0;
  return esmm_size_mul((size_t)p->m * sizeof(float), (size_t)esmm_cuda_k_padded(p->k), &bytes) ? bytes : SIZE_MAX;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const int64_t k_padded = w->strips.k_padded, rows = p->variant;
  esmm_dense_params params = {.selector = esmm_cuda_call_of(p)->selector,
                              .m = p->m,
                              .n = p->n,
                              .k = p->k,
                              .a = esmm_cuda_address(&p->a),
                              .b = w->columns,
                              .a_ld = p->a.ld,
                              .b_ld = w->columns_ld,
                              .epilogue = esmm_cuda_epilogue(p)};
  esmm_status status = ESMM_OK;
  stats->strip_rows = 0;
  if (!as_it_is(&p->a)) {
    params.a = (CUdeviceptr)(uintptr_t)scratch;
    params.a_ld = k_padded;
    status = esmm_cuda_pack_rows(ctx, &p->a, params.a, k_padded, esmm_cuda_call_of(p)->selector,
                                 esmm_cuda_call_of(p)->stream);
    if (status == ESMM_OK)
      status = esmm_cuda_mark_extracted(ctx, p);
  }
  if (status == ESMM_OK)
    status = esmm_cuda_tensor_map(ctx, params.a, p->k, p->m, params.a_ld, ESMM_DENSE_K, ESMM_DENSE_ROWS, &params.map_a);
  if (status == ESMM_OK)
    status = esmm_cuda_tensor_map(ctx, params.b, w->columns_ld, p->n, w->columns_ld, ESMM_DENSE_K, COLS, &params.map_b);
  if (status != ESMM_OK)
    return status;
  const esmm_cuda_function *function = rows == ESMM_DENSE_TALL ? &tall : &low;
  const int64_t blocks = esmm_ceil_div(p->m, rows) * esmm_ceil_div(p->n, COLS);
  return esmm_cuda_launch_blocks(ctx, function, esmm_min(blocks, esmm_cuda_get(ctx)->multiprocessors),
                                 ESMM_DENSE_THREADS, esmm_cuda_call_of(p)->stream, &params);
}

ESMM_KERNEL(dense_f32_sm90a) = {
    .name = "dense_f32_sm90a",
    .doc = "multiplies everything, on Hopper's tensor cores (wgmma) at fp32 accuracy",
    .backend = &esmm_cuda_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .reads = ESMM_FORM(COLUMNS),
    .device = &(const esmm_cuda_kernel){.sm = 90, .exact = true, .line = line},
    .can_run = can_run,
    .terms = esmm_cuda_terms,
    .term_names = {"rounds of 256 rows", "rounds of 128 rows", "packing of a", "writing of c", "launch of packing",
                   "launches"},
    .cost = {ESMM_GPU_F32_256, ESMM_GPU_F32_128, ESMM_GPU_MOVED, ESMM_GPU_WRITTEN, ESMM_GPU_LAUNCH_NEXT,
             ESMM_GPU_LAUNCH_LARGE},
    .workspace = workspace,
    .run = run,
};
