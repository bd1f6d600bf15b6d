/*
 * strips_mma.h: the host's side of strips_mma.cuh, for joint_f32 and dense_f32_mma.
 */
#ifndef ESMM_CUDA_STRIPS_MMA_H
#define ESMM_CUDA_STRIPS_MMA_H

#include "cuda/kernels/common/host.h"

/* The same function with rings of several depths: seven stages of 32 on sm_90; else of 24, or four where a
   block has less shared memory (sm_86, sm_89). Four is the least, see strips_mma.cuh. */
#define ESMM_STRIPS_MMA_LEAST ESMM_STRIPS_MMA_SHARED(ESMM_STRIPS_MMA_CHUNK, ESMM_STRIPS_MMA_LEAST_STAGES)
#define ESMM_STRIPS_MMA_FUNCTIONS(fatbin, name)                                                     \
  {                                                                                                 \
    {&(fatbin), (name), ESMM_STRIPS_MMA_SHARED(ESMM_STRIPS_MMA_CHUNK_90, ESMM_STRIPS_MMA_STAGES)},  \
        {&(fatbin), (name), ESMM_STRIPS_MMA_SHARED(ESMM_STRIPS_MMA_CHUNK, ESMM_STRIPS_MMA_STAGES)}, \
        {&(fatbin), (name), ESMM_STRIPS_MMA_LEAST},                                                 \
  }

/* Blocks of C. */
static inline int64_t esmm_strips_mma_blocks(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_STRIPS_MMA_ROWS) * esmm_ceil_div(p->n, ESMM_STRIPS_MMA_COLS);
}

static inline bool esmm_strips_mma_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (esmm_cuda_get(p->ctx)->shared_per_block < ESMM_STRIPS_MMA_LEAST)
    return esmm_cuda_too_little_shared(p, ESMM_STRIPS_MMA_LEAST, why, why_bytes);
  return (p->m <= INT32_MAX / 4 && p->n <= INT32_MAX / 4 && p->k <= 1 << 24 &&
          esmm_strips_mma_blocks(p) <= INT32_MAX / 2) ||
         esmm_cuda_too_large(p, why, why_bytes);
}

static inline size_t esmm_strips_mma_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return esmm_cuda_strips_bytes(p->m, p->k);
}

/* Extraction (all segments where nothing is skipped), then the product. */
static inline esmm_status esmm_strips_mma_run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, bool write_all,
                                              const esmm_cuda_function (*functions)[3])
{
  const esmm_cuda_properties *gpu = esmm_cuda_get(ctx);
  const esmm_strips a = esmm_cuda_strips_at((CUdeviceptr)(uintptr_t)scratch, p->m, p->k);
  esmm_status status =
      esmm_cuda_extract(ctx, &p->a, &a, write_all, esmm_cuda_call_of(p)->selector, esmm_cuda_call_of(p)->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  if (status != ESMM_OK)
    return status;
  if (esmm_cuda_call_of(p)->a_strips)
    *esmm_cuda_call_of(p)->a_strips = a;
  const esmm_strips_product_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                             .m = p->m,
                                             .n = p->n,
                                             .k = p->k,
                                             .a = a,
                                             .b = esmm_cuda_call_of(p)->b,
                                             .epilogue = esmm_cuda_epilogue(p)};
  const esmm_cuda_function *function = *functions + (gpu->sm == 90 ? 0 : 1);
  if ((int)function->shared > gpu->shared_per_block)
    function = *functions + 2;
  return esmm_cuda_launch_blocks(ctx, function, esmm_min(esmm_strips_mma_blocks(p), gpu->multiprocessors),
                                 ESMM_STRIPS_MMA_THREADS, esmm_cuda_call_of(p)->stream, &params);
}

/* Multiply-adds in whole waves of blocks, tails and idle multiprocessors included. */
static inline double esmm_strips_mma_work(const esmm_problem *p)
{
  return (double)esmm_round_up(esmm_strips_mma_blocks(p), esmm_cuda_sms(p)) * ESMM_STRIPS_MMA_ROWS *
         ESMM_STRIPS_MMA_COLS * (double)p->k;
}

#endif
