/*
 * tally.cu: notes of C, if its kernel has made none: the nonzeros of its columns, the bitmaps of its strips. One read
 * of C as it is stored, so it is right for every kernel, dtype and order. And how many bits bitmaps have.
 *
 * A warp takes 128 rows by 32 columns, 32 by 32 at a time: a lane then has a column's rows as the bits of a word, from
 * which its count and, by votes, the words of the bitmaps follow.
 */
#include "cuda/kernels/common/device.cuh"

#define THREADS ESMM_TALLY_THREADS

/* Of up to 32 rows and columns from (row, col) on: bit i: row i of this lane's column is not zero. */
static __device__ __forceinline__ uint32_t column_bits(const esmm_device_matrix &c, int64_t row, int64_t col)
{
  const int lane = (int)threadIdx.x % 32;
  const int rows = (int)min((int64_t)32, c.rows - row), cols = (int)min((int64_t)32, c.cols - col);
  const bool by_rows = c.order == ESMM_ROW_MAJOR; /* lanes are columns; else they are rows */
  const int64_t at = element_at(c, row + (by_rows ? 0 : lane), col + (by_rows ? lane : 0));
  uint32_t set = 0;
  if (lane < (by_rows ? cols : rows))
    with_bits(c.dtype, [&](auto of) {
      set = nonzero_bits((const typename decltype(of)::bits *)c.data + at, c.ld, by_rows ? rows : cols);
    });
  if (by_rows)
    return set;
  uint32_t mine = 0;
  for (int j = 0; j < 32; j++) {
    const uint32_t column = __ballot_sync(~0u, set >> j & 1);
    mine = lane == j ? column : mine;
  }
  return mine;
}

/* One lane for all. */
static __device__ __forceinline__ void add_word(const esmm_tally_params &p, int64_t strip, int64_t word, uint32_t bits)
{
  if (bits && threadIdx.x % 32 == 0)
    atomicOr((uint32_t *)p.bits + strip * p.words + word, bits);
}

/* Rows [row, end) by 32 columns from col on. */
static __device__ __forceinline__ void tally(const esmm_tally_params &p, int64_t row, int64_t end, int64_t col)
{
  const int64_t word = col / 32;
  int64_t strip = p.bits ? row / p.strip_rows : 0;
  uint32_t pending = 0; /* of that strip */
  int count = 0;
  for (; row < end; row += 32) {
    const uint32_t set = column_bits(p.c, row, col);
    count += __popc(set);
    if (!p.bits)
      continue;
    for (int from = 0; from < 32;) { /* the strips that these rows are of */
      const int to = (int)min((int64_t)32, (strip + 1) * p.strip_rows - row);
      const uint32_t rows = (to == 32 ? ~0u : (1u << to) - 1) & ~0u << from;
      pending |= __ballot_sync(~0u, (set & rows) != 0);
      if ((strip + 1) * p.strip_rows <= row + 32) { /* it ends here */
        add_word(p, strip, word, pending);
        pending = 0;
        strip++;
      }
      from = to;
    }
  }
  if (pending)
    add_word(p, strip, word, pending);
  if (count && p.counts)
    atomicAdd((int *)p.counts + col + threadIdx.x % 32, count);
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_tally(const __grid_constant__ esmm_tally_params p)
{
  if (not_selected(p.selector))
    return;
  const int64_t across = (p.c.cols + 31) / 32, down = (p.c.rows + ESMM_TALLY_ROWS - 1) / ESMM_TALLY_ROWS;
  const int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
  for (int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < across * down; i += warps) {
    const int64_t row = i / across * ESMM_TALLY_ROWS;
    tally(p, row, min(row + ESMM_TALLY_ROWS, p.c.rows), i % across * 32);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_tally_begin(const __grid_constant__ esmm_tally_begin_params p)
{
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = first; p.counts && i < p.count_words; i += step)
    ((uint32_t *)p.counts)[i] = 0;
  for (int64_t i = first; p.bits && i < p.bitmap_words; i += step)
    ((uint32_t *)p.bits)[i] = 0;
}

/* ---- how many bits of a pattern are set ---- */

/* Words of fold[1] strips, one below the other, a thread's at a time. fold[0] divides fold[1]. */
static __device__ __forceinline__ void count_words(const esmm_tally_count_params &p, int64_t strip, int64_t word,
                                                   unsigned long long (&set)[3])
{
  const int64_t end = min(strip + p.fold[1], p.strips);
  uint64_t coarse = 0, coarsest = 0;
  int64_t left = p.fold[0];
  for (int64_t s = strip; s < end; s++) {
    const uint64_t bits = ((const uint64_t *)p.bits)[s * p.words + word];
    set[0] += __popcll(bits);
    coarse |= bits;
    coarsest |= bits;
    if (--left == 0 || s + 1 == end) {
      set[1] += __popcll(coarse);
      coarse = 0;
      left = p.fold[0];
    }
  }
  set[2] += __popcll(coarsest);
}

/* One thread of each block, after adding its sums: the last one reports to the host, which may wait. */
static __device__ __forceinline__ void report_sums(unsigned long long *total, uint64_t out_at, uint32_t ready)
{
  __threadfence();
  if (atomicAdd((uint32_t *)(total + 3), 1u) != gridDim.x - 1)
    return;
  __threadfence();
  esmm_pattern_bit_count *out = (esmm_pattern_bit_count *)out_at;
  out->own = __ldcg(&total[0]);
  out->folded[0] = __ldcg(&total[1]);
  out->folded[1] = __ldcg(&total[2]);
  __threadfence_system();
  *(volatile uint32_t *)&out->ready = ready;
}

/* Integers, so the order in which blocks add them does not matter. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_tally_count(const __grid_constant__ esmm_tally_count_params p)
{
  __shared__ unsigned long long sums[THREADS / 32][3];
  const int64_t all = (p.strips + p.fold[1] - 1) / p.fold[1] * p.words;
  unsigned long long set[3] = {0, 0, 0};
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * THREADS)
    count_words(p, i / p.words * p.fold[1], i % p.words, set);
#pragma unroll
  for (int j = 0; j < 3; j++) {
    for (int d = 16; d > 0; d /= 2)
      set[j] += __shfl_xor_sync(~0u, set[j], d);
    if (threadIdx.x % 32 == 0)
      sums[threadIdx.x / 32][j] = set[j];
  }
  __syncthreads();
  if (threadIdx.x > 0)
    return;
  unsigned long long *total = (unsigned long long *)p.sums;
#pragma unroll
  for (int j = 0; j < 3; j++) {
    for (int i = 1; i < THREADS / 32; i++)
      set[j] += sums[i][j];
    atomicAdd(&total[j], set[j]);
  }
  report_sums(total, p.out, p.ready);
}
