/*
 * nm.cu: N:M on the device: does a B fit, and pruning. The form nm16 is made in prepare.cu.
 *
 * A group is `group` k's of one column, or of a strip of group_cols columns that share their choice. Where a column
 * chooses for itself a thread takes a group, neighbouring threads neighbouring columns (or k's, where those are
 * contiguous); else a warp does, a lane a column or, where sums over columns have an order, a k.
 */
#include "cuda/kernels/common/device.cuh"
#include "cuda/ops/nm_layout.h"

#define THREADS ESMM_NM_THREADS
#define MOST_GROUP 32

/* ---- groups ---- */

typedef struct nm_group {
  int64_t group, strip; /* which */
  int64_t k0, j0;       /* where it begins */
  int rows;             /* k's, fewer at B's end */
  int64_t cols;
} nm_group;

static __device__ __forceinline__ nm_group group_at(const esmm_nm_params &p, int64_t group, int64_t strip)
{
  nm_group g;
  g.group = group;
  g.strip = strip;
  g.k0 = group * p.group;
  g.j0 = strip * p.group_cols;
  g.rows = (int)min((int64_t)p.group, p.b.rows - g.k0);
  g.cols = min(p.group_cols, p.b.cols - g.j0);
  return g;
}

/* Calls f with every group of this thread (TEAM 1) or warp (32). */
template <int TEAM, class F> static __device__ __forceinline__ void for_groups(const esmm_nm_params &p, const F &f)
{
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  const int64_t lines = by_rows ? p.groups : p.strips, width = by_rows ? p.strips : p.groups;
  for (int64_t line = blockIdx.y; line < lines; line += gridDim.y)
    for (int64_t at = (int64_t)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM; at < width;
         at += (int64_t)gridDim.x * (THREADS / TEAM))
      f(by_rows ? group_at(p, line, at) : group_at(p, at, line));
}

/* The k's with a nonzero in some column, as bits; the same for all of a team. */
template <int TEAM> static __device__ __forceinline__ uint32_t nonzeros(const esmm_nm_params &p, const nm_group &g)
{
  uint32_t found = 0;
  for (int64_t j = TEAM == 1 ? 0 : threadIdx.x % TEAM; j < g.cols; j += TEAM)
    for (int r = 0; r < g.rows; r++)
      found |= (uint32_t)(load_element(p.b, element_at(p.b, g.k0 + r, g.j0 + j)) != 0.0f) << r;
  return TEAM == 1 ? found : __reduce_or_sync(~0u, found);
}

/* ---- does it fit? ---- */

template <int TEAM> static __device__ __forceinline__ void check(const esmm_nm_params &p)
{
  for_groups<TEAM>(p, [&](const nm_group &g) {
    const int count = __popc(nonzeros<TEAM>(p, g));
    if (count > p.keep && (TEAM == 1 || threadIdx.x % 32 == 0))
      atomicMax((unsigned long long *)p.out, ~(unsigned long long)((g.group * p.strips + g.strip) * 64 +
                                                                   count)); /* the lowest k, there the lowest column */
  });
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_nm_check(const __grid_constant__ esmm_nm_params p)
{
  if (p.group_cols == 1)
    check<1>(p);
  else
    check<32>(p);
}

/* ---- pruning: the same choices as prune.c, by the same keys ---- */

/* Nonzeros come before zeros; NaN counts as the largest score. */
static __device__ __forceinline__ unsigned long long key_of(bool nonzero, double score)
{
  const double ordered = isnan(score) ? (double)INFINITY : score;
  return nonzero ? (unsigned long long)__double_as_longlong(ordered) + 1 : 0;
}

static __device__ __forceinline__ double weigh(const esmm_nm_params &p, int64_t k, float x)
{
  return fabs(__dmul_rn((double)x, p.norms ? (double)((const float *)p.norms)[k] : 1.0)); /* a norm may be -0.0 */
}

static __device__ __forceinline__ void settle(const esmm_nm_params &p, int64_t at, float x, bool keep, esmm_nm_tally &t)
{
  const bool nonzero = x != 0.0f;
  const double square = __dmul_rn((double)x, (double)x);
  t.squares += square;
  t.kept += nonzero && keep;
  if (keep)
    return;
  t.dropped += nonzero;
  t.squares_dropped += square;
  store_element(p.b, at, 0.0f);
}

/* Without norms a score is |b| itself: a key of 32 bits orders like those of 64. */
template <bool NORMS> struct column_key {
  typedef uint32_t type;
  static __device__ __forceinline__ type of(const esmm_nm_params &, int64_t, float x)
  {
    const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
    return bits == 0 ? 0 : min(bits, 0x7f800000u) + 1;
  }
};
template <> struct column_key<true> {
  typedef unsigned long long type;
  static __device__ __forceinline__ type of(const esmm_nm_params &p, int64_t k, float x)
  {
    return key_of(x != 0.0f, weigh(p, k, x));
  }
};

/* A column's own group of at most GROUP k's. A k stays if fewer than `keep` come before it: larger keys, and equal ones
   of lower k's. */
template <int GROUP, bool NORMS>
static __device__ __forceinline__ void prune_column(const esmm_nm_params &p, const nm_group &g, esmm_nm_tally &t)
{
  float x[GROUP];
  typename column_key<NORMS>::type keys[GROUP];
#pragma unroll
  for (int r = 0; r < GROUP; r++)
    x[r] = r < g.rows ? load_element(p.b, element_at(p.b, g.k0 + r, g.j0)) : 0.0f;
#pragma unroll
  for (int r = 0; r < GROUP; r++)
    keys[r] = r < g.rows ? column_key<NORMS>::of(p, g.k0 + r, x[r]) : 0; /* behind all others */
#pragma unroll
  for (int r = 0; r < GROUP; r++) {
    int before = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      before += i < r ? keys[i] >= keys[r] : keys[i] > keys[r];
    if (r < g.rows)
      settle(p, element_at(p.b, g.k0 + r, g.j0), x[r], before < p.keep, t);
  }
}

/* Groups of one column, which are all that prune_column takes. */
template <int GROUP> static __device__ __forceinline__ void prune_columns(const esmm_nm_params &p, esmm_nm_tally &t)
{
  if (p.norms)
    for_groups<1>(p, [&](const nm_group &g) { prune_column<GROUP, true>(p, g, t); });
  else
    for_groups<1>(p, [&](const nm_group &g) { prune_column<GROUP, false>(p, g, t); });
}

/* The same for longer groups: their k's are read repeatedly from the cache. */
static __device__ __forceinline__ void prune_long_column(const esmm_nm_params &p, const nm_group &g, esmm_nm_tally &t)
{
  unsigned long long keys[MOST_GROUP];
#pragma unroll 1
  for (int r = 0; r < g.rows; r++) {
    const float x = load_element(p.b, element_at(p.b, g.k0 + r, g.j0));
    keys[r] = key_of(x != 0.0f, weigh(p, g.k0 + r, x));
  }
#pragma unroll 1
  for (int r = 0; r < g.rows; r++) {
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < g.rows; i++)
      before += keys[i] > keys[r] || (keys[i] == keys[r] && i < r);
    const int64_t at = element_at(p.b, g.k0 + r, g.j0);
    settle(p, at, load_element(p.b, at), before < p.keep, t);
  }
}

/* A strip's group: a lane has a k. Sums of squares go through the columns in order, as the host's do. */
static __device__ __forceinline__ void prune_strip(const esmm_nm_params &p, const nm_group &g, esmm_nm_tally &t)
{
  const int r = (int)threadIdx.x % 32;
  bool nonzero = false;
  double score = 0.0;
  if (r < g.rows)
    for (int64_t j = 0; j < g.cols; j++) {
      const float x = load_element(p.b, element_at(p.b, g.k0 + r, g.j0 + j));
      const double weight = weigh(p, g.k0 + r, x);
      nonzero = nonzero || x != 0.0f;
      score = g.cols == 1 ? weight : __dadd_rn(score, __dmul_rn(weight, weight));
    }
  const unsigned long long key = key_of(nonzero, score);
  int before = 0;
  for (int i = 0; i < g.rows; i++) {
    const unsigned long long other = __shfl_sync(~0u, key, i);
    before += other > key || (other == key && i < r);
  }
  if (r < g.rows)
    for (int64_t j = 0; j < g.cols; j++) {
      const int64_t at = element_at(p.b, g.k0 + r, g.j0 + j);
      settle(p, at, load_element(p.b, at), before < p.keep, t);
    }
}

/* This block's tally, of its threads' in a fixed order. */
static __device__ __forceinline__ void add_up(esmm_nm_tally t, esmm_nm_tally *out)
{
  __shared__ esmm_nm_tally sums[THREADS / 32];
  for (int d = 16; d > 0; d /= 2) {
    t.kept += __shfl_xor_sync(~0u, t.kept, d);
    t.dropped += __shfl_xor_sync(~0u, t.dropped, d);
    t.squares += __shfl_xor_sync(~0u, t.squares, d);
    t.squares_dropped += __shfl_xor_sync(~0u, t.squares_dropped, d);
  }
  if (threadIdx.x % 32 == 0)
    sums[threadIdx.x / 32] = t;
  __syncthreads();
  if (threadIdx.x > 0)
    return;
  for (int i = 1; i < THREADS / 32; i++) {
    t.kept += sums[i].kept;
    t.dropped += sums[i].dropped;
    t.squares += sums[i].squares;
    t.squares_dropped += sums[i].squares_dropped;
  }
  *out = t;
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_nm_prune(const __grid_constant__ esmm_nm_params p)
{
  esmm_nm_tally t = {0, 0, 0.0, 0.0};
  if (p.group_cols > 1)
    for_groups<32>(p, [&](const nm_group &g) { prune_strip(p, g, t); });
  else if (p.group <= 4)
    prune_columns<4>(p, t);
  else if (p.group <= 8)
    prune_columns<8>(p, t);
  else
    for_groups<1>(p, [&](const nm_group &g) { prune_long_column(p, g, t); });
  add_up(t, (esmm_nm_tally *)p.out + blockIdx.y * gridDim.x + blockIdx.x);
}

/* ---- the same for 2:4, 1:4 and 3:4 of 16 bits: eight columns a thread, whole vectors in and out ---- */

/* Of four magnitudes as bits, which order as they do: whether each is among the `keep` that stay, a bit each. */
static __device__ __forceinline__ uint32_t best_of_4(const uint32_t (&key)[4], int keep)
{
  int before[4] = {0, 0, 0, 0};
#pragma unroll
  for (int r = 1; r < 4; r++)
#pragma unroll
    for (int i = 0; i < r; i++) {
      const int first = key[i] >= key[r]; /* of equal ones the lower k stays */
      before[r] += first;
      before[i] += 1 - first;
    }
  uint32_t kept = 0;
#pragma unroll
  for (int r = 0; r < 4; r++)
    kept |= (uint32_t)(before[r] < keep) << r;
  return kept;
}

/* What 16 bits of a dtype stand for, and those of its infinity. */
template <esmm_dtype DTYPE> struct half_of;
template <> struct half_of<ESMM_BF16> {
  static constexpr uint32_t INFINITE = 0x7f80;
  static __device__ __forceinline__ float value(uint32_t bits) { return __uint_as_float(bits << 16); }
};
template <> struct half_of<ESMM_F16> {
  static constexpr uint32_t INFINITE = 0x7c00;
  static __device__ __forceinline__ float value(uint32_t bits)
  {
    return __half2float(__ushort_as_half((unsigned short)bits));
  }
};

/* Nonzeros of one thread, which stay well below 2^32. */
typedef struct counts {
  uint32_t kept, dropped;
} counts;

/* One column, half of the four words; clears in them what does not stay. Squares of 16-bit numbers are exact. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void prune_half(uint32_t (&word)[4], int shift, int keep, counts &n, esmm_nm_tally &t)
{
  uint32_t key[4];
#pragma unroll
  for (int r = 0; r < 4; r++)
    key[r] = min(word[r] >> shift & 0x7fffu, half_of<DTYPE>::INFINITE); /* NaN counts as the largest */
  const uint32_t stays = best_of_4(key, keep);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const double x = (double)half_of<DTYPE>::value(word[r] >> shift & 0xffffu);
    const bool stay = stays >> r & 1;
    t.squares = __fma_rn(x, x, t.squares);
    n.kept += key[r] != 0 && stay;
    if (!stay) {
      n.dropped += key[r] != 0;
      t.squares_dropped = __fma_rn(x, x, t.squares_dropped);
      word[r] &= ~(0xffffu << shift);
    }
  }
}

/* Four k's of eight columns. Rows past B are zeros: they come last. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void prune_vectors(const esmm_nm_params &p, int64_t k0, int64_t col, counts &n,
                                                     esmm_nm_tally &t)
{
  uint4 *at = (uint4 *)((uint16_t *)p.b.data + k0 * p.b.ld + col);
  const int64_t step = p.b.ld / 8;
  const int rows = (int)min((int64_t)4, p.b.rows - k0);
  union {
    uint4 row[4];
    uint32_t word[4][4];
  } x;
  uint32_t changed[4] = {0, 0, 0, 0};
#pragma unroll
  for (int r = 0; r < 4; r++)
    x.row[r] = r < rows ? at[r * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32_t word[4] = {x.word[0][w], x.word[1][w], x.word[2][w], x.word[3][w]};
    prune_half<DTYPE>(word, 0, p.keep, n, t);
    prune_half<DTYPE>(word, 16, p.keep, n, t);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      changed[r] |= x.word[r][w] ^ word[r];
      x.word[r][w] = word[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 4; r++)
    if (r < rows && changed[r])
      at[r * step] = x.row[r];
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void prune_4(const esmm_nm_params &p, esmm_nm_tally &t)
{
  counts n = {0, 0};
  const int64_t across = p.b.cols / 8, all = p.groups * across;
#pragma unroll 1
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * THREADS)
    prune_vectors<DTYPE>(p, i / across * 4, i % across * 8, n, t);
  t.kept = n.kept;
  t.dropped = n.dropped;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) esmm_nm_prune_4(const __grid_constant__ esmm_nm_params p)
{
  esmm_nm_tally t = {0, 0, 0.0, 0.0};
  if (p.b.dtype == ESMM_BF16)
    prune_4<ESMM_BF16>(p, t);
  else
    prune_4<ESMM_F16>(p, t);
  add_up(t, (esmm_nm_tally *)p.out + blockIdx.x);
}

/* ---- the blocks' tallies, by one block ---- */

extern "C" __global__ void __launch_bounds__(THREADS) esmm_nm_add(const __grid_constant__ esmm_nm_add_params p)
{
  esmm_nm_tally t = {0, 0, 0.0, 0.0};
  for (int64_t i = threadIdx.x; i < p.count; i += THREADS) {
    const esmm_nm_tally x = ((const esmm_nm_tally *)p.from)[i];
    t.kept += x.kept;
    t.dropped += x.dropped;
    t.squares += x.squares;
    t.squares_dropped += x.squares_dropped;
  }
  add_up(t, (esmm_nm_tally *)p.to);
}
