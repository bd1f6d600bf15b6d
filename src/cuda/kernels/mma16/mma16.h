/*
 * mma16.h: the host's side of mma16.cuh, for dense_bf16_mma, joint_bf16_mma and their twins of fp16.
 */
#ifndef ESMM_CUDA_MMA16_H
#define ESMM_CUDA_MMA16_H

#include "cuda/cuda.h"

#include <stdio.h>

/* One function of a fatbin, for blocks of rows x cols. */
#define ESMM_MMA16_FUNCTION(fatbin, name, rows, cols) \
  {                                                   \
    &(fatbin), (name), ESMM_MMA16_SHARED(rows, cols)  \
  }

/* B of this dtype and kept as rows, A of the same, within what the counters hold. */
static inline bool esmm_mma16_can_run(const esmm_ctx *ctx, const esmm_problem *p, esmm_dtype dtype, int shared,
                                      char *why, size_t why_bytes)
{
  const int has = esmm_cuda_get(ctx)->shared_per_block;
  if (p->w->dtype != dtype || !p->w->cuda->rows)
    (void)snprintf(why, why_bytes, "b is %s, it takes %s", esmm_dtype_str(p->w->dtype), esmm_dtype_str(dtype));
  else if (p->a.dtype != dtype)
    (void)snprintf(why, why_bytes, "a is %s, it takes %s, as b is", esmm_dtype_str(p->a.dtype), esmm_dtype_str(dtype));
  else if (has < shared)
    (void)snprintf(why, why_bytes, "a block may have %d bytes of shared memory, it needs %d", has, shared);
  else if (p->m >= 1 << 30 || p->n >= 1 << 30 || p->k >= 1 << 30 ||
           esmm_ceil_div(p->m, 64) * esmm_ceil_div(p->n, 64) > INT32_MAX)
    (void)snprintf(why, why_bytes, "a is %lld x %lld and b has %lld columns: too large for its counters",
                   (long long)p->m, (long long)p->k, (long long)p->n);
  else
    return true;
  return false;
}

/* Blocks of rows x cols that the busiest multiprocessor gets. */
static inline double esmm_mma16_rounds(const esmm_problem *p, int64_t rows, int64_t cols)
{
  const int64_t blocks = esmm_ceil_div(p->m, rows) * esmm_ceil_div(p->n, cols);
  return (double)esmm_ceil_div(blocks, p->w->cuda->multiprocessors);
}

static inline esmm_launch esmm_mma16_launch(const esmm_problem *p, int64_t rows, int64_t cols, unsigned shared)
{
  return (esmm_launch){.grid_x = (unsigned)(esmm_ceil_div(p->m, rows) * esmm_ceil_div(p->n, cols)),
                       .threads = ESMM_MMA16_THREADS(rows, cols),
                       .shared = shared};
}

/* A as the caller has it. */
static inline esmm_mma16_params esmm_mma16_params_of(const esmm_problem *p)
{
  return (esmm_mma16_params){.selector = p->call->selector,
                             .m = p->m,
                             .n = p->n,
                             .k = p->k,
                             .a = esmm_cuda_address(&p->a),
                             .b = p->w->cuda->rows,
                             .a_ld = p->a.ld,
                             .b_ld = p->w->cuda->rows_ld,
                             .epilogue = esmm_cuda_epilogue(p)};
}

#endif
