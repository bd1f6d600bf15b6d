/*
 * k_joint_f32_simt.c: joint skipping with IEEE fp32 multiply-adds. See k_joint_f32_simt.cu.
 *
 * The floor is m * n * k * joint density multiply-adds, plus one read of A and one write of its alive segments.
 */
#include "cuda/cuda.h"

#include <stdio.h>

#define TILE ESMM_SIMT_TILE

ESMM_FATBIN(k_joint_f32_simt);
static const esmm_cuda_function three_stages = {&fatbin_k_joint_f32_simt, "joint_f32_simt", ESMM_SIMT_SHARED(3)};
static const esmm_cuda_function two_stages = {&fatbin_k_joint_f32_simt, "joint_f32_simt_small", ESMM_SIMT_SHARED(2)};

static int64_t blocks(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, TILE) * esmm_ceil_div(p->n, TILE);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const int shared = esmm_cuda_get(p->ctx)->shared_per_block;
  if (shared < ESMM_SIMT_SHARED(2)) {
    (void)snprintf(why, why_bytes, "a block may have %d bytes of shared memory, it needs %d", shared,
                   ESMM_SIMT_SHARED(2));
    return false;
  }
  if (p->m > INT32_MAX / 2 || p->n > INT32_MAX / 2 || p->k > INT32_MAX / 2 || blocks(p) > INT32_MAX) {
    (void)snprintf(why, why_bytes, "C has more tiles than a grid has blocks, or a side of 2^30 and more");
    return false;
  }
  return true;
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  /* Whole rounds of blocks. */
  const double work = (double)esmm_round_up(blocks(p), ESMM_SIMT_BLOCKS * (int64_t)esmm_cuda_sms(p)) * TILE * TILE * k;
  units->per_joint[0] = work;
  esmm_cuda_union(p, TILE / ESMM_STRIP, TILE / ESMM_STRIP, work, 1, units);
  units->base[2] = m * k * (double)esmm_dtype_size(p->a.dtype);
  units->per_strip[2] = m * k * sizeof(float);
  units->base[3] = m * n;
  *variant = ESMM_STRIP;
}

/* A's strips; behind them the sums of earlier windows of k, where there is more than one. */
static size_t bank_at(const esmm_problem *p)
{
  const size_t strips = esmm_cuda_strips_bytes(p->m, p->k);
  return strips > SIZE_MAX - 256 ? SIZE_MAX : (strips + 255) / 256 * 256;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const size_t at = bank_at(p);
  size_t sum;
  if (p->k <= ESMM_SIMT_WINDOW || at == SIZE_MAX)
    return at;
  return esmm_size_add(at, (size_t)blocks(p) * TILE * TILE * sizeof(float), &sum) ? sum : SIZE_MAX;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  /* Two blocks a multiprocessor come first; a block takes 1 KB more than it asks for. */
  const bool roomy = esmm_cuda_get(ctx)->shared_per_sm >= 2 * (ESMM_SIMT_SHARED(3) + 1024);
  const esmm_cuda_function *function = roomy ? &three_stages : &two_stages;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  const esmm_strips a = esmm_cuda_strips_at(at, p->m, p->k);
  esmm_status status =
      esmm_cuda_extract(ctx, &p->a, &a, false, esmm_cuda_call_of(p)->selector, esmm_cuda_call_of(p)->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  if (status != ESMM_OK)
    return status;
  if (esmm_cuda_call_of(p)->a_strips)
    *esmm_cuda_call_of(p)->a_strips = a;
  stats->strip_rows = ESMM_STRIP;
  const esmm_strips_product_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                             .m = p->m,
                                             .n = p->n,
                                             .k = p->k,
                                             .a = a,
                                             .b = esmm_cuda_call_of(p)->b,
                                             .epilogue = esmm_cuda_epilogue(p),
                                             .bank = p->k > ESMM_SIMT_WINDOW ? at + bank_at(p) : 0};
  const esmm_launch launch = {.grid_x = (unsigned)blocks(p), .threads = ESMM_SIMT_THREADS, .shared = function->shared};
  return esmm_cuda_launch(ctx, function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

ESMM_KERNEL(joint_f32_simt) = {
    .name = "joint_f32_simt",
    .doc = "skips k's that are zero in 32 rows of A or in 32 columns of B; IEEE fp32 multiply-adds, no tensor cores",
    .backend = &esmm_cuda_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .reads = ESMM_FORM(STRIPS),
    .variant_strips = true,
    .device = &(const esmm_cuda_kernel){.sm = 80, .line = line},
    .can_run = can_run,
    .terms = esmm_cuda_terms,
    .seconds_before = esmm_cuda_seconds_before,
    .term_names = {"multiply-adds", "loading of alive k's", "scanning and packing of a", "writing of c", "",
                   "launches"},
    .cost = {4.35e-14, 8.5e-15, 3e-13, 2.5e-12, 0.0, 1.4e-5},
    .workspace = workspace,
    .run = run,
};
