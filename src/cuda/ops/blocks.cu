/*
 * blocks.cu: a B of blocks. Which blocks have a nonzero, and the cells that are kept of them: cell_k k's by 64 columns,
 * a line of 128 bytes for each k, as TMA brings them to the tensor cores. And pruning to blocks: what each weighs, and
 * zeros where one goes.
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

/* Eight elements a thread. Lines of 64 bytes, swizzled as wide: what wgmma reads after a plain copy. */
extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_narrow_pack(const __grid_constant__ esmm_narrow_pack_params p)
{
  enum { LINE = ESMM_NARROW_SIDE / 8, BLOCK = ESMM_NARROW_SIDE * LINE }; /* in 16 bytes */
  const int64_t step = (int64_t)gridDim.x * ESMM_BLOCKS_THREADS;
  for (int64_t i = (int64_t)blockIdx.x * ESMM_BLOCKS_THREADS + threadIdx.x; i < p.count * BLOCK; i += step) {
    const uint32_t which = ((const uint32_t *)p.which)[i / BLOCK];
    const int line = (int)(i % BLOCK) / LINE, at = (int)i % LINE;
    const uint4 *from = (const uint4 *)p.cells + ((int64_t)(which >> 1) + line) * (ESMM_CELL_COLS / 8);
    ((uint4 *)p.blocks)[i / BLOCK * BLOCK + line * LINE + (at ^ line / 2 % 4)] = from[(which & 1) * LINE + at];
  }
}

/* ---- pruning ---- */

#define BATCH 16 /* elements of a lane that are loaded before they are added up */

typedef struct block_area {
  int64_t row, col;
  int rows, cols;
} block_area;

/* Block i, by block rows. */
static __device__ __forceinline__ block_area area_of(const esmm_blocks_prune_params &p, int64_t i)
{
  const int64_t strips = (p.b.cols + p.block_cols - 1) / p.block_cols;
  block_area a;
  a.row = i / strips * p.block_rows;
  a.col = i % strips * p.block_cols;
  a.rows = (int)min((int64_t)p.block_rows, p.b.rows - a.row);
  a.cols = (int)min((int64_t)p.block_cols, p.b.cols - a.col);
  return a;
}

/*
 * The order of the sums is prune.c's, so that the device keeps the same blocks as a CPU: a lane has every 32nd column
 * of the block, goes through it in rising k's, and the lanes' sums are added by halves. Zeros past the block's columns
 * change no sum.
 */
template <typename T>
static __device__ __forceinline__ esmm_device_note weigh(const esmm_blocks_prune_params &p, const block_area &a)
{
  const int lane = (int)threadIdx.x % 32, steps = (a.cols + 31) / 32, all = a.rows * steps;
  const T *from = (const T *)p.b.data;
  double score = 0.0, squares = 0.0;
  int nonzero = 0, r = 0, c = lane;
  for (int t = 0; t < all; t += BATCH) {
    float x[BATCH], norm[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const bool inside = r < a.rows && c < a.cols;
      x[i] = inside ? as_float(from[element_at(p.b, a.row + r, a.col + c)]) : 0.0f;
      norm[i] = inside && p.norms ? ((const float *)p.norms)[a.row + r] : 1.0f;
      c += 32;
      if (c - lane >= 32 * steps) {
        c = lane;
        r++;
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const double size = fabs((double)x[i]), weight = __dmul_rn(size, (double)norm[i]);
      nonzero += x[i] != 0.0f;
      squares = __dadd_rn(squares, __dmul_rn(size, size));
      score = __dadd_rn(score, __dmul_rn(weight, weight));
    }
  }
  for (int d = 16; d > 0; d /= 2) {
    nonzero += __shfl_xor_sync(~0u, nonzero, d);
    squares = __dadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    score = __dadd_rn(score, __shfl_xor_sync(~0u, score, d));
  }
  const double ordered = isnan(score) ? (double)INFINITY : score;
  esmm_device_note note;
  note.key = nonzero ? (uint64_t)__double_as_longlong(ordered) + 1 : 0;
  note.nonzero = nonzero;
  note.squares = squares;
  return note;
}

/* A warp for each block. */
extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_blocks_weigh(const __grid_constant__ esmm_blocks_prune_params p)
{
  const int64_t all = (p.b.rows + p.block_rows - 1) / p.block_rows * ((p.b.cols + p.block_cols - 1) / p.block_cols);
  const int64_t step = (int64_t)gridDim.x * (ESMM_BLOCKS_THREADS / 32);
  for (int64_t i = (int64_t)blockIdx.x * (ESMM_BLOCKS_THREADS / 32) + threadIdx.x / 32; i < all; i += step) {
    const block_area a = area_of(p, i);
    esmm_device_note note;
    with_dtype(p.b.dtype, [&](auto of) { note = weigh<typename decltype(of)::element>(p, a); });
    if (threadIdx.x % 32 == 0)
      ((esmm_device_note *)p.notes)[i] = note;
  }
}

/* A thread block for each; neighbouring threads write neighbours. */
extern "C" __global__ void __launch_bounds__(ESMM_BLOCKS_THREADS)
    esmm_blocks_drop(const __grid_constant__ esmm_blocks_prune_params p)
{
  const int64_t all = (p.b.rows + p.block_rows - 1) / p.block_rows * ((p.b.cols + p.block_cols - 1) / p.block_cols);
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    if (((const uint8_t *)p.keep)[i])
      continue;
    const block_area a = area_of(p, i);
    const int inner = by_rows ? a.cols : a.rows;
    for (int at = (int)threadIdx.x; at < a.rows * a.cols; at += ESMM_BLOCKS_THREADS) {
      const int outer_at = at / inner, inner_at = at % inner;
      store_element(
          p.b, element_at(p.b, a.row + (by_rows ? outer_at : inner_at), a.col + (by_rows ? inner_at : outer_at)), 0.0f);
    }
  }
}
