/*
 * simt.cuh: what the ladder's kernels share: copies into shared memory, the order of C's tiles, a warp's tile of
 * 64 x 32 sums and its way to C.
 *
 * A lane holds 64 sums, in one of two shapes:
 *   Tall  two groups of 32 rows, in each 4 rows x 8 columns: one k is 4 loads of 16 bytes for 64 multiply-adds
 *   Flat  eight groups of 8 rows, in each 2 rows x 4 columns: any 8 rows can be left out on their own
 * Bits of a lane's row and column alternate in its number, so that neighbours read the same address on either side and
 * a 16-byte load takes two passes over the banks, not four.
 */
#ifndef LADDER_SIMT_CUH
#define LADDER_SIMT_CUH

#include "cuda/kernels/common/epilogue.cuh"
#include "ladder_params.h"

#define WARP_ROWS 64
#define WARP_COLS 32
#define TILE LADDER_TILE /* rows and columns of C of a block */
#define THREADS LADDER_THREADS
#define WARPS (THREADS / 32)

/* ---- copies that run while the warp goes on; where `there` is false zeros are written and nothing is read ---- */

static __device__ __forceinline__ uint32_t shared_address(const void *at)
{
  return (uint32_t)__cvta_generic_to_shared(at);
}

static __device__ __forceinline__ void copy4(void *to, const void *from, bool there)
{
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}

static __device__ __forceinline__ void copy16(void *to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

static __device__ __forceinline__ void copies_commit(void)
{
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All but the last `pending` groups of this thread have arrived. */
template <int pending> static __device__ __forceinline__ void copies_wait(void)
{
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- the order of tiles: down eight rows of tiles, then across, so that blocks at work share both operands in L2 ----
 */

#define RASTER 8

static __device__ __forceinline__ int tiles_of(int64_t length)
{
  return (int)((length + TILE - 1) / TILE);
}

static __device__ __forceinline__ void tile_at(int index, int down, int across, int *tile_row, int *tile_col)
{
  const int band = index / (RASTER * across), inside = index - band * RASTER * across;
  const int height = min(RASTER, down - band * RASTER);
  *tile_row = band * RASTER + inside % height;
  *tile_col = inside / height;
}

/* ---- a lane's sums ---- */

struct Tall {
  enum { GROUPS = 2, ROWS = 4, COLS = 8, GROUP_ROWS = 32 };
  static __device__ __forceinline__ int lane_row(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 6); }
  static __device__ __forceinline__ int lane_col(int lane) { return (lane & 1) | (lane >> 1 & 2); }
};

struct Flat {
  enum { GROUPS = 8, ROWS = 2, COLS = 4, GROUP_ROWS = 8 };
  static __device__ __forceinline__ int lane_row(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 2); }
  static __device__ __forceinline__ int lane_col(int lane) { return (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4); }
};

/* First row of a lane in each group, first column in each half (Tall) or in the whole (Flat) of the 32 columns. */
template <typename Shape> static __device__ __forceinline__ int first_row(int lane)
{
  return Shape::ROWS * Shape::lane_row(lane);
}

template <typename Shape> static __device__ __forceinline__ int first_col(int lane)
{
  return 4 * Shape::lane_col(lane);
}

template <typename Shape> using Sums = float[Shape::GROUPS][Shape::ROWS][Shape::COLS];

template <typename Shape> static __device__ __forceinline__ void clear_sums(Sums<Shape> &sums)
{
#pragma unroll
  for (int g = 0; g < Shape::GROUPS; g++)
#pragma unroll
    for (int i = 0; i < Shape::ROWS; i++)
#pragma unroll
      for (int j = 0; j < Shape::COLS; j++)
        sums[g][i][j] = 0.0f;
}

/* at: this lane's first column of one k of B. */
template <typename Shape> static __device__ __forceinline__ void load_b(const float *at, float (&b)[Shape::COLS])
{
#pragma unroll
  for (int j = 0; j < Shape::COLS; j += 4) {
    const float4 x = *(const float4 *)(at + 4 * j);
    b[j] = x.x, b[j + 1] = x.y, b[j + 2] = x.z, b[j + 3] = x.w;
  }
}

/* at: this lane's first row of one group at one k of A. */
template <typename Shape> static __device__ __forceinline__ void load_a(const float *at, float (&a)[Shape::ROWS])
{
  if (Shape::ROWS == 4) {
    const float4 x = *(const float4 *)at;
    a[0] = x.x, a[1] = x.y, a[Shape::ROWS - 2] = x.z, a[Shape::ROWS - 1] = x.w;
  } else {
    const float2 x = *(const float2 *)at;
    a[0] = x.x, a[1] = x.y;
  }
}

template <typename Shape>
static __device__ __forceinline__ void multiply_add(float (&sums)[Shape::ROWS][Shape::COLS],
                                                    const float (&a)[Shape::ROWS], const float (&b)[Shape::COLS])
{
#pragma unroll
  for (int i = 0; i < Shape::ROWS; i++)
#pragma unroll
    for (int j = 0; j < Shape::COLS; j++)
      sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
}

/*
 * A warp's tile, whose first element is C's (row0, col0), through 8 KB of shared memory of its own, so that C is
 * written along its lines in either order. The column of a row is exchanged (xor) with its number: no bank conflicts.
 */
template <typename Shape>
static __device__ __forceinline__ void finish_sums(const esmm_epilogue_params &e, int64_t row0, int64_t col0,
                                                   const Sums<Shape> &sums, float *buffer)
{
  const int lane = (int)threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < Shape::GROUPS; g++)
#pragma unroll
    for (int i = 0; i < Shape::ROWS; i++)
#pragma unroll
      for (int j = 0; j < Shape::COLS; j++) {
        const int row = g * Shape::GROUP_ROWS + first_row<Shape>(lane) + i;
        const int col = j / 4 * 16 + first_col<Shape>(lane) + j % 4;
        buffer[row * WARP_COLS + (col ^ (row & 31))] = sums[g][i][j];
      }
  __syncwarp();
  const int rows = (int)min((int64_t)WARP_ROWS, e.c.rows - row0), cols = (int)min((int64_t)WARP_COLS, e.c.cols - col0);
  if (e.c.order == ESMM_ROW_MAJOR) {
    for (int row = 0; row < rows; row++)
      if (lane < cols)
        finish_element(e, row0 + row, col0 + lane, buffer[row * WARP_COLS + (lane ^ (row & 31))]);
    return;
  }
  for (int col = 0; col < cols; col++)
    for (int row = lane; row < rows; row += 32)
      finish_element(e, row0 + row, col0 + col, buffer[row * WARP_COLS + (col ^ (row & 31))]);
}

#endif
