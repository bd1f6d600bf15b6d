/* bsr16.h: what the kernels of a 16-bit B of blocks share. */
#ifndef ESMM_CUDA_BSR16_H
#define ESMM_CUDA_BSR16_H

#include "cuda/cuda.h"

#include <math.h>

/* What of B is multiplied with all of A: told in statistics. */
static inline void esmm_bsr16_note(const esmm_problem *p, esmm_stats *stats)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const double all = (double)b->chunks * (double)esmm_ceil_div(p->n, ESMM_CELL_COLS);
  stats->joint_density = fmin(1.0, (double)b->cells / all);
}

#endif
