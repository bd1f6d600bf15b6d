/*
 * blocks.cu: a B of blocks. Which blocks have a nonzero, and the cells that are kept of them: cell_k k's by 64 columns,
 * a line of 128 bytes for each k, as TMA brings them to the tensor cores.
 */
#include "cuda/kernels/common/device.cuh"

/* The sign apart, is the element at (row, col), which lies inside, not zero? */
static __device__ __forceinline__ bool is_nonzero(const esmm_device_matrix &m, int64_t row, int64_t col)
{
  bool found = false;
  with_bits(m.dtype, [&](auto of) {
    typedef typename decltype(of)::bits bits;
    found = (bits)(((const bits *)m.data)[element_at(m, row, col)] << 1) != 0;
  });
  return found;
}

/* A warp for each block. */
extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_blocks_scan(const __grid_constant__ esmm_blocks_scan_params p)
{
  const int lane = (int)threadIdx.x % 32;
  const int64_t levels = (p.b.rows + p.block_rows - 1) / p.block_rows;
  const int64_t all = levels * ((p.b.cols + p.block_cols - 1) / p.block_cols);
  const int64_t step = (int64_t)gridDim.x * (ESMM_BLOCKS_THREADS / 32);
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  unsigned long long count = 0;
  for (int64_t i = (int64_t)blockIdx.x * (ESMM_BLOCKS_THREADS / 32) + threadIdx.x / 32; i < all; i += step) {
    const int64_t row0 = i % levels * p.block_rows, col0 = i / levels * p.block_cols;
    const int rows = (int)min((int64_t)p.block_rows, p.b.rows - row0),
              cols = (int)min((int64_t)p.block_cols, p.b.cols - col0);
    const int inner = by_rows ? cols : rows;
    bool found = false;
    for (int at = lane; at < rows * cols && !found; at += 32)
      found = is_nonzero(p.b, row0 + (by_rows ? at / inner : at % inner), col0 + (by_rows ? at % inner : at / inner));
    found = __any_sync(~0u, found);
    if (lane == 0 && p.flags)
      ((uint8_t *)p.flags)[i] = found;
    count += found;
  }
  if (lane == 0 && count)
    atomicAdd((unsigned long long *)p.count, count);
}

/* f(place in the cell, row, column) for every element of block blockIdx.x's cells that lies inside B; else
 * outside(place). */
template <class F, class G>
static __device__ __forceinline__ void each_element(const esmm_blocks_copy_params &p, const F &f, const G &outside)
{
  const int elements = p.cell_k * ESMM_CELL_COLS;
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  for (int64_t cell = blockIdx.x; cell < p.count; cell += gridDim.x) {
    const uint2 which = ((const uint2 *)p.which)[cell];
    for (int i = (int)threadIdx.x; i < elements; i += ESMM_BLOCKS_THREADS) {
      const int line = by_rows ? i / ESMM_CELL_COLS : i % p.cell_k, at = by_rows ? i % ESMM_CELL_COLS : i / p.cell_k;
      const int64_t row = (int64_t)which.x * p.cell_k + line, col = (int64_t)which.y * ESMM_CELL_COLS + at;
      const int64_t place = cell * elements + line * ESMM_CELL_COLS + at;
      if (row < p.b.rows && col < p.b.cols)
        f(place, row, col);
      else
        outside(place);
    }
  }
}

extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_blocks_pack(const __grid_constant__ esmm_blocks_copy_params p)
{
  each_element(
      p,
      [&](int64_t place, int64_t row, int64_t col) {
        ((uint16_t *)p.cells)[place] = ((const uint16_t *)p.b.data)[element_at(p.b, row, col)];
      },
      [&](int64_t place) { ((uint16_t *)p.cells)[place] = 0; });
}

extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_blocks_unpack(const __grid_constant__ esmm_blocks_copy_params p)
{
  each_element(
      p,
      [&](int64_t place, int64_t row, int64_t col) {
        ((uint16_t *)p.b.data)[element_at(p.b, row, col)] = ((const uint16_t *)p.cells)[place];
      },
      [](int64_t) {});
}
