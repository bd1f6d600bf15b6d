/* blocks.h: B as cells (blocks.c), for forms.c and for reading weights back. */
#ifndef ESMM_CUDA_BLOCKS_H
#define ESMM_CUDA_BLOCKS_H

#include "cuda/cuda.h"

/* b lies on the GPU, is 16-bit and not empty. Finds its cells and keeps them, in memory of their own. Waits. */
esmm_status esmm_cuda_blocks_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream);
/* B again, into a tight row-major matrix in host memory. Between begin and end; waits. */
esmm_status esmm_cuda_blocks_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream);
void esmm_cuda_blocks_free(esmm_weights *w);
/* How many blocks of rows x cols have a nonzero and, where flags is not 0, which. `at`: 8 bytes of device memory for
   the count. Waits. */
esmm_status esmm_cuda_blocks_scan(esmm_ctx *ctx, const esmm_matrix *b, int rows, int cols, CUdeviceptr flags,
                                  CUdeviceptr at, int64_t *count, CUstream stream);
int esmm_cuda_longer_first(const void *x, const void *y); /* of two esmm_cuda_tile_column, for qsort */

/* narrow.c: lists of blocks of 32 x 32. cells: [panels][chunks], where each lies, as blocks.c has it. Waits. */
esmm_status esmm_cuda_narrow_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, const uint32_t *cells,
                                  CUstream stream);
void esmm_cuda_narrow_free(esmm_weights *w);
/* blocks.c, for it: the blocks themselves, out of cells. which: as params.h has it, in host memory. */
esmm_status esmm_cuda_narrow_pack(esmm_ctx *ctx, const esmm_cuda_blocks *blocks, const uint32_t *which,
                                  CUstream stream);

/* bsr.c: as backend.h says. */
esmm_status esmm_cuda_prepare_bsr(esmm_ctx *ctx, const char *what, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                  esmm_weights **out);

/* Pruning, as backend.h says. */
esmm_status esmm_cuda_weigh_blocks(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                                   esmm_block_note *notes);
esmm_status esmm_cuda_drop_blocks(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const unsigned char *keep);

/* A part of one allocation on the device, and what is copied there; NULL: nothing is. */
typedef struct esmm_cuda_part {
  CUdeviceptr *to;
  const void *from;
  size_t bytes;
} esmm_cuda_part;
/* Makes and fills the allocation; *bytes grows by its size. blocks: for the error's text. */
esmm_status esmm_cuda_place_parts(esmm_ctx *ctx, const esmm_cuda_part *parts, size_t count, int64_t blocks,
                                  CUdeviceptr *memory, size_t *bytes, CUstream stream);
/* The columns of tiles stay with the host, too: it cuts long ones. */
esmm_status esmm_cuda_keep_columns(esmm_ctx *ctx, const esmm_cuda_tile_column *columns, int64_t tiles,
                                   esmm_cuda_tile_column **out);

/* Blocks of ESMM_BLOCKS_THREADS, one for each item, or fewer that take several. */
static inline esmm_status esmm_cuda_blocks_launch(esmm_ctx *ctx, const esmm_cuda_function *function, int64_t items,
                                                  CUstream stream, const void *params)
{
  const int64_t blocks = esmm_max(1, esmm_min(items, 1 << 20));
  return esmm_cuda_launch_blocks(ctx, function, blocks, ESMM_BLOCKS_THREADS, stream, params);
}

#endif
