/*
 * bsr.cu: a caller's blocks in device memory (struct esmm_bsr): checks its arrays, and expands them.
 *
 * The checks find the first damaged place; the host then reads it and says what is wrong. esmm_bsr_expand follows
 * nothing out of bounds, whatever the arrays hold: it leaves out a block that no pointers enclose, or with an invalid
 * index.
 */
#include "cuda/kernels/common/device.cuh"

#define THREADS ESMM_BLOCKS_THREADS

static __device__ __forceinline__ int64_t index_at(const esmm_bsr_arrays_params &p, uint64_t array, int64_t i)
{
  return p.index_bits == 32 ? (int64_t)((const int32_t *)array)[i] : ((const int64_t *)array)[i];
}

/* The lowest place wins, pointers before indices. */
static __device__ __forceinline__ void note_damage(const esmm_bsr_arrays_params &p, uint64_t place)
{
  atomicMax((unsigned long long *)p.found, ~(unsigned long long)place);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_bsr_pointers(const __grid_constant__ esmm_bsr_arrays_params p)
{
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i <= p.lines; i += (int64_t)gridDim.x * THREADS) {
    const int64_t at = index_at(p, p.pointers, i), before = i > 0 ? index_at(p, p.pointers, i - 1) : 0;
    if (at < before || at > p.blocks || (i == 0 && at != 0) || (i == p.lines && at != p.blocks))
      note_damage(p, (uint64_t)i);
  }
}

/* A warp for each line. Runs after the pointers' check; returns if that found damage. */
extern "C" __global__ void __launch_bounds__(THREADS) esmm_bsr_indices(const __grid_constant__ esmm_bsr_arrays_params p)
{
  if (*(const uint64_t *)p.found != 0 && *(const uint64_t *)p.found >= ~(ESMM_BSR_INDICES - 1))
    return;
  const int64_t step = (int64_t)gridDim.x * (THREADS / 32);
  for (int64_t line = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; line < p.lines; line += step) {
    const int64_t first = index_at(p, p.pointers, line), end = index_at(p, p.pointers, line + 1);
    for (int64_t i = first + threadIdx.x % 32; i < end; i += 32) {
      const int64_t at = index_at(p, p.indices, i);
      if (at < 0 || at >= p.places || (i > first && at <= index_at(p, p.indices, i - 1)))
        note_damage(p, ESMM_BSR_INDICES + (uint64_t)i);
    }
  }
}

/* The line of block i: the last one with a pointer not behind it. -1: none encloses it. */
static __device__ __forceinline__ int64_t line_of(const esmm_bsr_arrays_params &p, int64_t i)
{
  int64_t low = 0, high = p.lines;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (index_at(p, p.pointers, middle) <= i)
      low = middle;
    else
      high = middle;
  }
  return index_at(p, p.pointers, low) <= i && i < index_at(p, p.pointers, low + 1) ? low : -1;
}

/* A warp copies a block, as it lies in values. What lies beyond the matrix is left out. */
template <typename T>
static __device__ __forceinline__ void expand(const esmm_bsr_arrays_params &p, int64_t i, int64_t line, int64_t place)
{
  const unsigned elements = (unsigned)(p.block_rows * p.block_cols),
                 inner = (unsigned)(p.by_columns ? p.block_rows : p.block_cols);
  const int64_t row0 = (p.by_columns ? place : line) * p.block_rows,
                col0 = (p.by_columns ? line : place) * p.block_cols;
  const T *from = (const T *)p.values + i * elements;
  for (unsigned at = threadIdx.x % 32; at < elements; at += 32) {
    const unsigned outer_at = at / inner, inner_at = at % inner;
    const int64_t row = row0 + (p.by_columns ? inner_at : outer_at), col = col0 + (p.by_columns ? outer_at : inner_at);
    if (row < p.to.rows && col < p.to.cols)
      ((T *)p.to.data)[row * p.to.ld + col] = from[at];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_bsr_expand(const __grid_constant__ esmm_bsr_arrays_params p)
{
  const int64_t step = (int64_t)gridDim.x * (THREADS / 32);
  for (int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < p.blocks; i += step) {
    const int64_t line = line_of(p, i), place = index_at(p, p.indices, i);
    if (line >= 0 && place >= 0 && place < p.places)
      with_bits(p.to.dtype, [&](auto of) { expand<typename decltype(of)::bits>(p, i, line, place); });
  }
}
