/*
 * mma16.h: the host's side of mma16.cuh, for dense_bf16_mma, joint_bf16_mma and their fp16 twins.
 */
#ifndef ESMM_CUDA_MMA16_H
#define ESMM_CUDA_MMA16_H

#include "cuda/kernels/common/host.h"

/* One function of a fatbin, for blocks of rows x cols. */
#define ESMM_MMA16_FUNCTION(fatbin, name, rows, cols) \
  {                                                   \
    &(fatbin), (name), ESMM_MMA16_SHARED(rows, cols)  \
  }

/* How A is read, as functions of a dtype are ordered: order, then alignment. */
static inline int esmm_mma16_how(const esmm_matrix *a)
{
  return (a->order == ESMM_ROW_MAJOR ? 0 : 1) + (esmm_cuda_in_lines(a) ? 0 : 2);
}

/* Within what the counters hold, and the shared memory of a block. */
static inline bool esmm_mma16_can_run(const esmm_problem *p, int shared, char *why, size_t why_bytes)
{
  if (esmm_cuda_get(p->ctx)->shared_per_block < shared)
    return esmm_cuda_too_little_shared(p, shared, why, why_bytes);
  return (p->m < ESMM_MMA16_MOST_SIDE && p->n < ESMM_MMA16_MOST_SIDE && p->k < ESMM_MMA16_MOST_SIDE &&
          esmm_ceil_div(p->m, 64) * esmm_ceil_div(p->n, 64) <= INT32_MAX) ||
         esmm_cuda_too_large(p, why, why_bytes);
}

/* Blocks of rows x cols that the busiest multiprocessor gets. */
static inline double esmm_mma16_rounds(const esmm_problem *p, int64_t rows, int64_t cols)
{
  const int64_t blocks = esmm_ceil_div(p->m, rows) * esmm_ceil_div(p->n, cols);
  return (double)esmm_ceil_div(blocks, esmm_cuda_sms(p));
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
  return (esmm_mma16_params){.selector = esmm_cuda_call_of(p)->selector,
                             .m = p->m,
                             .n = p->n,
                             .k = p->k,
                             .a = esmm_cuda_address(&p->a),
                             .b = esmm_cuda_b(p)->rows,
                             .a_ld = p->a.ld,
                             .b_ld = esmm_cuda_b(p)->rows_ld,
                             .epilogue = esmm_cuda_epilogue(p)};
}

#endif
