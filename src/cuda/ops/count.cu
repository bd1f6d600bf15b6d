/*
 * count.cu: how many elements of a matrix are not zero: prepare's element density, without reading B back to the host.
 *
 * A pass over the matrix along its lines, a block 4096 elements of a line at a time: sixteen loads of a thread are
 * under way at once, which is enough to keep memory busy. Blocks add their sums up with one atomic each; integers, so
 * their order does not matter.
 */
#include "cuda/kernels/common/device.cuh"

#define THREADS ESMM_COUNT_THREADS
#define EACH 16 /* elements of a thread at a time */
#define PIECE (THREADS * EACH)

template <typename T> static __device__ __forceinline__ unsigned count_piece(const T *from, int64_t left)
{
  unsigned count = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + (int)threadIdx.x;
    if (at < left)
      count += as_float(from[at]) != 0.0f; /* NaN counts, -0 does not */
  }
  return count;
}

/* This thread's share of all pieces: every gridDim.x-th. */
template <typename T> static __device__ __forceinline__ unsigned long long count_lines(const esmm_device_matrix &m)
{
  const bool by_rows = m.order == ESMM_ROW_MAJOR;
  int64_t lines = by_rows ? m.rows : m.cols, width = by_rows ? m.cols : m.rows;
  if (m.ld == width) { /* no gaps: one long line, so that narrow matrices fill their blocks too */
    width *= lines;
    lines = 1;
  }
  const int64_t pieces = (width + PIECE - 1) / PIECE, all = lines * pieces;
  unsigned long long count = 0;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const int64_t line = i / pieces, at = i % pieces * PIECE;
    count += count_piece((const T *)m.data + line * m.ld + at, width - at);
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_count_nonzero(const __grid_constant__ esmm_nonzero_params p)
{
  __shared__ unsigned long long sums[THREADS / 32];
  unsigned long long count = 0;
  with_dtype(p.m.dtype, [&](auto of) { count = count_lines<typename decltype(of)::element>(p.m); });
  for (int d = 16; d > 0; d /= 2)
    count += __shfl_xor_sync(~0u, count, d);
  if (threadIdx.x % 32 == 0)
    sums[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x > 0)
    return;
  for (int i = 1; i < THREADS / 32; i++)
    count += sums[i];
  if (count > 0)
    atomicAdd((unsigned long long *)p.out, count);
}
