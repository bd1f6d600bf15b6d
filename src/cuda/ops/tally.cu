/*
 * tally.cu: what is noted of C, where the kernel that made it has not: the nonzeros of its columns, the bitmaps of its
 * strips. One read of C as it is stored, so it is right for every kernel, dtype and order. And how many bits bitmaps
 * have.
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
  uint64_t low = 0, tall = 0;
  int64_t left = p.fold[0];
  for (int64_t s = strip; s < end; s++) {
    const uint64_t bits = ((const uint64_t *)p.bits)[s * p.words + word];
    set[0] += __popcll(bits);
    low |= bits;
    tall |= bits;
    if (--left == 0 || s + 1 == end) {
      set[1] += __popcll(low);
      low = 0;
      left = p.fold[0];
    }
  }
  set[2] += __popcll(tall);
}

/* One thread of each block, which has added to the sums: the last one tells the host, which may be waiting. */
static __device__ __forceinline__ void tell_sums(unsigned long long *total, uint64_t out_at, uint32_t ready)
{
  __threadfence();
  if (atomicAdd((uint32_t *)(total + 3), 1u) != gridDim.x - 1)
    return;
  __threadfence();
  esmm_pattern_told *out = (esmm_pattern_told *)out_at;
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
  tell_sums(total, p.out, p.ready);
}

/* ---- C packed ---- */

/* A thread has a column of a strip. */
extern "C" __global__ void __launch_bounds__(ESMM_PACKED_COLS)
    esmm_tally_pack(const __grid_constant__ esmm_tally_pack_params p)
{
  __shared__ uint32_t alive[ESMM_PACKED_COLS / 32];
  const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row = (int64_t)blockIdx.y * ESMM_TILE, col = (int64_t)blockIdx.x * ESMM_PACKED_COLS + thread;
  const int64_t segment = (int64_t)blockIdx.y * p.to.segments + blockIdx.x;
  const uint16_t *from = (const uint16_t *)p.c.data + row * p.c.ld + col;
  const int rows = col < p.c.cols ? (int)min((int64_t)ESMM_TILE, p.c.rows - row) : 0;
  uint32_t pairs[ESMM_TILE / 2], any = 0;
#pragma unroll
  for (int i = 0; i < ESMM_TILE / 2; i++) {
    const uint32_t low = 2 * i < rows ? from[(2 * i) * p.c.ld] : 0;
    const uint32_t high = 2 * i + 1 < rows ? from[(2 * i + 1) * p.c.ld] : 0;
    pairs[i] = low | high << 16;
    any |= pairs[i];
  }
  const bool mine = (any & 0x7fff7fffu) != 0; /* -0 is a zero */
  const uint32_t word = __ballot_sync(~0u, mine);
  if (lane == 0)
    alive[warp] = word;
  __syncthreads();
  int count = 0, line = __popc(word & ((1u << lane) - 1));
#pragma unroll
  for (int i = 0; i < ESMM_PACKED_COLS / 32; i++) {
    count += __popc(alive[i]);
    line += i < warp ? __popc(alive[i]) : 0;
  }
  const int end = (count + ESMM_PACKED_GROUP - 1) / ESMM_PACKED_GROUP * ESMM_PACKED_GROUP;
  if (mine)
    ((uint8_t *)p.to.places)[segment * ESMM_PACKED_COLS + line] = (uint8_t)thread;
  else /* the first of them are zeros: they are what fills up the last group */
    line = count + thread - line;
  if (thread == 0)
    ((uint32_t *)p.to.counts)[segment] = (uint32_t)count;
  if (line >= end)
    return;
#pragma unroll
  for (int panel = 0; panel < 2; panel++) {
    const int64_t first = ((int64_t)blockIdx.y * 2 + panel) * p.to.segments + blockIdx.x;
    uint4 *to = (uint4 *)p.to.values + (first * ESMM_PACKED_COLS + line) * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t *x = &pairs[panel * 32 + i * 4];
      to[i ^ line % 8] = mine ? make_uint4(x[0], x[1], x[2], x[3]) : make_uint4(0, 0, 0, 0);
    }
  }
}

/*
 * A warp has a segment at a time; where its groups begin is the sum of those before, over so many segments as the block
 * has threads at once.
 */
extern "C" __global__ void __launch_bounds__(ESMM_TALLY_INDEX_THREADS)
    esmm_tally_index(const __grid_constant__ esmm_tally_index_params p)
{
  enum { WARPS = ESMM_TALLY_INDEX_THREADS / 32, STAGE = 64 / ESMM_PACKED_GROUP };
  __shared__ uint32_t first[ESMM_TALLY_INDEX_THREADS], of_warp[WARPS];
  const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, segments = p.packed.segments;
  const int64_t strip = blockIdx.x, most = (int64_t)segments * ESMM_PACKED_COLS;
  const uint32_t *counts = (const uint32_t *)p.packed.counts + strip * segments;
  const uint8_t *places = (const uint8_t *)p.packed.places + strip * most;
  uint32_t *index = (uint32_t *)p.packed.index, *columns = index + strip * most;
  uint32_t *runs = index + ESMM_PACKED_RUNS(p.packed) + strip * most / ESMM_PACKED_GROUP;
  uint32_t groups = 0, alive = 0; /* of all segments so far */
  for (int from = 0; from < segments; from += ESMM_TALLY_INDEX_THREADS) {
    const uint32_t count = from + thread < segments ? counts[from + thread] : 0;
    const uint32_t own = (count + ESMM_PACKED_GROUP - 1) / ESMM_PACKED_GROUP | count << 16; /* both sums in a word */
    uint32_t upto = own;
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, upto, d);
      upto += lane >= d ? other : 0;
    }
    if (lane == 31)
      of_warp[warp] = upto;
    __syncthreads();
    uint32_t before = 0, all = 0, all_alive = 0;
    for (int i = 0; i < WARPS; i++) {
      before += i < warp ? of_warp[i] & 0xffffu : 0;
      all += of_warp[i] & 0xffffu;
      all_alive += of_warp[i] >> 16;
    }
    first[thread] = groups + before + (upto & 0xffffu) - (own & 0xffffu);
    __syncthreads();
    for (int i = warp; i < min(segments - from, ESMM_TALLY_INDEX_THREADS); i += WARPS) {
      const uint32_t lines = counts[from + i], here = first[i], k = (uint32_t)(from + i) * ESMM_PACKED_COLS;
      const uint32_t mine = (lines + ESMM_PACKED_GROUP - 1) / ESMM_PACKED_GROUP;
#pragma unroll
      for (uint32_t line = (uint32_t)lane; line < ESMM_PACKED_COLS; line += 32)
        if (line < mine * ESMM_PACKED_GROUP)
          columns[here * ESMM_PACKED_GROUP + line] = line < lines ? k + places[k + line] : ESMM_PACKED_NONE;
      const uint32_t group = (uint32_t)lane, left = STAGE - (here + group) % STAGE;
      if (group < mine)
        runs[here + group] =
            group == 0 || left == STAGE ? (k / ESMM_PACKED_GROUP + group) | min(mine - group, left) << 24 : 0;
    }
    groups += all;
    alive += all_alive;
    __syncthreads();
  }
  const uint32_t even = groups + groups % 2, stage = (even + STAGE - 1) / STAGE * STAGE, at = groups + (uint32_t)thread;
  if (at < stage) {
    runs[at] = at < even ? ESMM_PACKED_ZEROS | 1u << 24 : 0;
    for (int i = 0; i < ESMM_PACKED_GROUP; i++)
      columns[at * ESMM_PACKED_GROUP + i] = ESMM_PACKED_NONE;
  }
  if (thread > 0)
    return;
  index[ESMM_PACKED_LINES(p.packed) + strip] = even * ESMM_PACKED_GROUP;
  index[ESMM_PACKED_ALIVE(p.packed) + strip] = alive;
  if (!p.out)
    return;
  unsigned long long *total = (unsigned long long *)p.sums;
  for (int i = 0; i < 3; i++)
    atomicAdd(&total[i], (unsigned long long)alive);
  tell_sums(total, p.out, p.ready);
}
