/*
 * store.cuh: how k_nm16_sm90a.cu ends: sums are turned in shared memory, finished and written to C.
 *
 * A thread of a warpgroup has, of 64 columns of C by 2 * SUMS rows, sums[4j + 2h + e]: column 16 * warp + lane / 4 +
 * 8h, row 8j + lane % 4 * 2 + e.
 */
#ifndef ESMM_CUDA_NM16_STORE_CUH
#define ESMM_CUDA_NM16_STORE_CUH

#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/nm16/instructions.cuh"
#include "cuda/ops/nm_layout.h"

#define HALF_COLS ESMM_NM16_LINES /* columns of a warpgroup */

/* A numbered barrier of `threads` threads; 0 is __syncthreads. */
static __device__ __forceinline__ void meet(int id, int threads)
{
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Eight columns of a row from fp32 sums side by side in shared memory, which are aligned to 16 bytes; row is inside C,
   of the columns those below n are. */
static __device__ __forceinline__ void finish_row_of_8(const esmm_epilogue_params &e, int row, int col, int n,
                                                       bool vectors, const float (&x)[8], const float *from)
{
  if (vectors && col + 8 <= n) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      y[i] = x[i];
    finish_8(e, row, col, y);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 8 && col + i < n; i++)
    finish_element(e, row, col + i, from[i]);
}

/* ---- all that follows the sums is done in registers: 16-bit C, lines of 16 bytes, all columns inside ---- */

/* 64 rows of this warp's 16 columns to lines of 64 columns, 128 bytes, swizzled. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_turned(uint32_t to, const float *sums, uint32_t warp, uint32_t lane)
{
  const uint32_t line = lane / 16 * 8 + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
#pragma unroll
  for (int i = 0; i < 4; i++) { /* 16 rows: matrices of 8 rows by columns 0-7, by 8-15, and the next 8 rows */
    const float *x = &sums[8 * i];
    const uint32_t pairs[4] = {pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[2], x[3]), pair_of<DTYPE>(x[4], x[5]),
                               pair_of<DTYPE>(x[6], x[7])};
    sm90_stmatrix_trans_at(to + (uint32_t)(i * 16 + (int)line) * 128 + chunk * 16, pairs);
  }
}

/* PARAMS has m, n and the epilogue of esmm_nm16_params. thread: of the warpgroup; staging: its 8 KiB; barrier: its
   number. */
template <class PARAMS, int SUMS>
static __device__ __forceinline__ void store_finished(const PARAMS &p, float (&sums)[SUMS], int row0, int col0,
                                                      int thread, char *staging, int barrier)
{
  const esmm_device_matrix &c = p.epilogue.c;
  const uint32_t warp = (uint32_t)thread / 32, lane = (uint32_t)thread % 32, at = sm90_address(staging);
  finish_values<in_columns>(p.epilogue, sums, col0 + (int)(16 * warp + lane / 4));
#pragma unroll
  for (int g = 0; g < SUMS / 32; g++) { /* 64 rows */
    if (row0 + 64 * g >= p.m)
      break;
    if (c.dtype == ESMM_BF16)
      store_turned<ESMM_BF16>(at, &sums[32 * g], warp, lane);
    else /* ESMM_F16 */
      store_turned<ESMM_F16>(at, &sums[32 * g], warp, lane);
    meet(barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i * 16 + thread / 8, row = row0 + 64 * g + r;
      const uint4 words = sm90_load4(at + (uint32_t)(r * 128 + (thread % 8 ^ r % 8) * 16));
      if (row < p.m)
        *(uint4 *)((uint16_t *)c.data + row * c.ld + col0 + thread % 8 * 8) = words;
    }
    meet(barrier, 128);
  }
}

/* ---- any C ---- */

#define STAGED_ROWS 32
#define STAGED_LD 68 /* floats of a row: rows of four lanes next to each other lie in different banks */
static_assert(STAGED_ROWS * STAGED_LD * 4 <= ESMM_NM16_STAGING && 64 * 128 <= ESMM_NM16_STAGING,
              "staging is too small");

/* The same for any C and epilogue, 32 rows a turn. The sums are lost. */
template <class PARAMS, int SUMS>
static __device__ __forceinline__ void store_any(const PARAMS &p, float (&sums)[SUMS], int row0, int col0, int thread,
                                                 float *staging, int barrier)
{
  const int warp = thread / 32, lane = thread % 32;
  const bool vectors = has_vectors(p.epilogue.c);
  float *to = staging + lane % 4 * 2 * STAGED_LD + warp * 16 + lane / 4;
#pragma unroll 1
  for (int g = 0; g < SUMS / 16 && row0 + STAGED_ROWS * g < p.m; g++) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      to[(i / 4 * 8 + i % 2) * STAGED_LD + i / 2 % 2 * 8] = sums[i];
#pragma unroll
    for (int i = 0; i + 16 < SUMS; i++)
      sums[i] = sums[i + 16];
    meet(barrier, 128);
#pragma unroll 1
    for (int i = thread; i < STAGED_ROWS * 8; i += 128) {
      const int row = row0 + STAGED_ROWS * g + i / 8;
      const float *from = staging + i / 8 * STAGED_LD + i % 8 * 8;
      const float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
      const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      if (row < p.m)
        finish_row_of_8(p.epilogue, row, col0 + i % 8 * 8, p.n, vectors, x, from);
    }
    meet(barrier, 128);
  }
}

#endif
