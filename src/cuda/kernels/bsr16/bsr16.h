/* bsr16.h: what the kernels of a 16-bit B of blocks share. bsr16.c: for those by wgmma, how a product is cut, the
   workspace and the launch. */
#ifndef ESMM_CUDA_BSR16_H
#define ESMM_CUDA_BSR16_H

#include "cuda/cuda.h"

#include <math.h>

static inline int64_t esmm_bsr16_panels(const esmm_problem *p)
{
  return esmm_ceil_div(p->n, ESMM_CELL_COLS);
}

/* The part of B that is multiplied with all of A, for statistics. */
static inline void esmm_bsr16_note(const esmm_problem *p, esmm_stats *stats)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const double all = (double)b->chunks * (double)esmm_bsr16_panels(p);
  stats->joint_density = fmin(1.0, (double)b->cells / all);
}

/* ---- bsr16.c ---- */

/* The tiles of a kernel, and its lists of B. */
typedef struct esmm_bsr16_lists {
  const esmm_cuda_tile_column *by_length;
  int64_t tiles, entry_count;           /* of columns; all of them */
  CUdeviceptr entries, columns, places; /* as params.h has them */
  CUdeviceptr blocks;                   /* narrow: likewise; 0: cells are read */
  int32_t rows, cols;                   /* of a tile */
  int32_t k;                            /* of an entry */
  int32_t cell_cols;                    /* of what is loaded of B at a time, and of C stored */
  bool pairs;                           /* of blocks, which fetch what they need of B together */
} esmm_bsr16_lists;

/* Which columns of tiles have how many parts: parts[q] have a part q. */
typedef struct esmm_bsr16_cut {
  int64_t rows; /* of tiles, or of pairs of them */
  int32_t parts[ESMM_BSR16_PARTS], all;
  double entries; /* that the busiest blocks go through, as it is predicted */
} esmm_bsr16_cut;

/* Lists are cut so that the GPU is full and no list is much longer than a block's share. */
esmm_bsr16_cut esmm_bsr16_cut_lists(const esmm_problem *p, const esmm_bsr16_lists *lists);

/* Units of a cost line that the kernels have in common: what memory has to move once, adding of parts, copying of A,
   launches. */
void esmm_bsr16_line(const esmm_problem *p, const esmm_bsr16_cut *cut, double moved, esmm_cuda_units *units);

/* esmm_kernel.own of these kernels. */
typedef struct esmm_bsr16_own {
  esmm_cuda_function function;
  esmm_bsr16_lists (*lists)(const esmm_problem *p);
} esmm_bsr16_own;

/* As esmm_kernel has them; the sides of a product and the number of B's cells have to fit the kernels' counters. */
bool esmm_bsr16_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes);
size_t esmm_bsr16_workspace(const esmm_kernel *self, const esmm_problem *p);
esmm_status esmm_bsr16_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                           esmm_stats *stats);

#endif
