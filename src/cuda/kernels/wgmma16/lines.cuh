/*
 * lines.cuh: boxes of A in shared memory, read k by k: what packing is made of (pack.cuh, k_fused16_sm90a.cu).
 *
 * A box is 64 k's by 64 rows as TMA leaves it with its 128-byte swizzle: lines of 64 k's of a row or, where A is
 * col-major (BY_K), of 64 rows of a k. A packed line is a k: 64 rows, 128 bytes, swizzled by its own number.
 */
#ifndef ESMM_CUDA_WGMMA16_LINES_CUH
#define ESMM_CUDA_WGMMA16_LINES_CUH

#include "cuda/kernels/wgmma16/instructions.cuh"

/*
 * Eight k's of a box, the g-th of 8, in 32 rows: the i-th of two of this box, or of four where the next box has the
 * next rows. Lane (q, t) = (lane / 4, lane % 4) gets k q of rows 2t and 2t + 1 of each 8. at: line_reader.
 */
template <bool BY_K> static __device__ __forceinline__ void read_lines(uint32_t at, int g, int i, uint32_t (&r)[4])
{
  if (BY_K)
    sm90_ldmatrix_at((at ^ (uint32_t)(i % 2 * 64)) + (uint32_t)(i / 2 * WGMMA16_PANEL + g * 1024), r);
  else
    sm90_ldmatrix_trans_at((at ^ (uint32_t)(g * 16)) + (uint32_t)(i * 4096), r);
}

/* A lane's place in a box, for read_lines: of a row of 64 k's or, where A is col-major, of a k of 64 rows. */
template <bool BY_K> static __device__ __forceinline__ uint32_t line_reader(uint32_t box, uint32_t lane)
{
  return BY_K ? box + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16 : box + lane * 128 + lane % 8 * 16;
}

#endif
