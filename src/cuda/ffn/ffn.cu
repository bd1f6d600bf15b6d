/*
 * ffn.cu: what a layer does between its products, on a GPU. All of it reads and writes each matrix once; sums are
 * made in a fixed order, so that the same calls give the same bits.
 */
#include "cuda/ffn/choose.cuh"
#include "cuda/kernels/common/epilogue.cuh"
#include "esmm_ffn.h"
#include "ffn/activation.h"

#define THREADS ESMM_FFN_THREADS

/* ---- activations and their slopes ---- */

static __device__ __forceinline__ float activated(int32_t activation, float x)
{
  return is_smooth(activation) ? smooth(activation, x) : activate(activation, x);
}

/* A call, as smooth() is: it stands in the code once for each element. */
static __device__ __noinline__ float smooth_slope(int32_t activation, float x)
{
  return ffn_smooth_slope(activation, x);
}

/* ---- elementwise ---- */

template <class OF> static __device__ __forceinline__ float get(OF, uint64_t data, int64_t at)
{
  return as_float(((const typename OF::element *)data)[at]);
}

template <class OF> static __device__ __forceinline__ void put(OF of, uint64_t data, int64_t at, float x)
{
  ((typename OF::element *)data)[at] = rounded(of, x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_activate(const __grid_constant__ esmm_ffn_activate_params p)
{
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  const int64_t eights = p.count / 8;
  with_dtype(p.dtype, [&](auto of) {
    for (int64_t i = first; i < eights; i += step) {
      float x[8], y[8];
      read_8(of, p.gate ? p.gate : p.up, 8 * i, y);
      if (p.gate)
        read_8(of, p.up, 8 * i, x);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        y[j] = activated(p.activation, y[j]);
        y[j] = p.gate ? __fmul_rn(y[j], x[j]) : y[j];
      }
      write_8(of, p.h, 8 * i, y);
    }
    for (int64_t i = 8 * eights + first; i < p.count; i += step) {
      const float y = activated(p.activation, get(of, p.gate ? p.gate : p.up, i));
      put(of, p.h, i, p.gate ? __fmul_rn(y, get(of, p.up, i)) : y);
    }
  });
}

/* What becomes of dh in one element. */
struct derived {
  float d, d_gate;
};

/* Of a ReLU; up: its result, where that is enough. */
static __device__ __forceinline__ derived derive(const esmm_ffn_derive_params &p, float d, float up, float gate)
{
  if (p.h)
    return {d * ffn_slope_of_result(p.activation, up), 0.0f};
  if (!p.d_gate)
    return {d * ffn_relu_slope(p.activation, up), 0.0f};
  return {__fmul_rn(d, activate(p.activation, gate)), __fmul_rn(__fmul_rn(d, up), ffn_relu_slope(p.activation, gate))};
}

/* Of all features: arrays, eight at a time. */
template <class OF> static __device__ __forceinline__ void derive_all(OF of, const esmm_ffn_derive_params &p)
{
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  const int64_t count = p.rows * p.cols, eights = count / 8;
  const uint64_t from = p.h ? p.h : p.up;
  for (int64_t i = first; i < eights; i += step) {
    float d[8], up[8], gate[8];
    read_8(of, p.d, 8 * i, d);
    read_8(of, from, 8 * i, up);
    if (p.d_gate)
      read_8(of, p.gate, 8 * i, gate);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const derived made = derive(p, d[j], up[j], p.d_gate ? gate[j] : 0.0f);
      d[j] = made.d;
      gate[j] = made.d_gate;
    }
    write_8(of, p.d, 8 * i, d);
    if (p.d_gate)
      write_8(of, p.d_gate, 8 * i, gate);
  }
  for (int64_t i = 8 * eights + first; i < count; i += step) {
    const derived made = derive(p, get(of, p.d, i), get(of, from, i), p.d_gate ? get(of, p.gate, i) : 0.0f);
    put(of, p.d, i, made.d);
    if (p.d_gate)
      put(of, p.d_gate, i, made.d_gate);
  }
}

/* Of some, which are before the activation elsewhere: rows by blockIdx.y, columns gathered. */
template <class OF> static __device__ __forceinline__ void derive_some(OF of, const esmm_ffn_derive_params &p)
{
  const int32_t *order = (const int32_t *)p.order;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y)
    for (int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x; col < p.cols; col += (int64_t)gridDim.x * THREADS) {
      const int64_t at = row * p.cols + col;
      derived made = {0.0f, 0.0f};
      if (col < p.count) {
        const int64_t there = row * p.all + order[col];
        made = derive(p, get(of, p.d, at), get(of, p.up, there), p.d_gate ? get(of, p.gate, there) : 0.0f);
      }
      put(of, p.d, at, made.d);
      if (p.d_gate)
        put(of, p.d_gate, at, made.d_gate);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_ffn_derive(const __grid_constant__ esmm_ffn_derive_params p)
{
  with_dtype(p.dtype, [&](auto of) {
    if (p.order && !p.h)
      derive_some(of, p);
    else
      derive_all(of, p);
  });
}

/* The other activations, of which no feature is ever dead: one element at a time, as calls leave few registers. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_derive_smooth(const __grid_constant__ esmm_ffn_derive_params p)
{
  const esmm_device_matrix m = {.data = 0, .rows = p.rows, .cols = p.cols, .ld = p.cols, .dtype = p.dtype, .order = 0};
  esmm_device_matrix d = m, d_gate = m, up = m, gate = m;
  d.data = p.d;
  d_gate.data = p.d_gate;
  up.data = p.up;
  gate.data = p.gate;
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.rows * p.cols; i += step) {
    const float x = load_element(p.d_gate ? gate : up, i), slope = smooth_slope(p.activation, x);
    const float before = load_element(d, i);
    if (p.d_gate) {
      store_element(d_gate, i, __fmul_rn(__fmul_rn(before, load_element(up, i)), slope));
      store_element(d, i, __fmul_rn(before, smooth(p.activation, x)));
    } else {
      store_element(d, i, before * slope);
    }
  }
}

/* ---- sums of columns ---- */

static __device__ __forceinline__ double counted(const esmm_ffn_sum_params &p, float x)
{
  return p.open ? (x <= 0.0f ? 0.0 : 1.0) : (double)x;
}

/*
 * A block has 256 columns and 256 rows: a warp takes every eighth row of those, a lane eight columns side by side.
 * Where eight cannot be read at once a lane has every 32nd column instead.
 */
extern "C" __global__ void __launch_bounds__(THREADS) esmm_ffn_sum(const __grid_constant__ esmm_ffn_sum_params p)
{
  enum { WARPS = THREADS / 32, COLS = ESMM_FFN_SUM_COLS };
  __shared__ double shared[WARPS][COLS];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int64_t col0 = (int64_t)blockIdx.x * COLS, row0 = (int64_t)blockIdx.y * ESMM_FFN_SUM_ROWS;
  const int64_t end = min(p.m.rows, row0 + ESMM_FFN_SUM_ROWS);
  const bool eights = has_vectors(p.m) && col0 + COLS <= p.m.cols;
  double sums[8] = {0};
  if (eights)
    with_dtype(p.m.dtype, [&](auto of) {
      for (int64_t row = row0 + warp; row < end; row += WARPS) {
        float x[8];
        read_8(of, p.m.data, row * p.m.ld + col0 + 8 * lane, x);
#pragma unroll
        for (int j = 0; j < 8; j++)
          sums[j] += counted(p, x[j]);
      }
    });
  else
    for (int64_t row = row0 + warp; row < end; row += WARPS)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int64_t col = col0 + lane + 32 * j;
        if (col < p.m.cols)
          sums[j] += counted(p, load_element(p.m, element_at(p.m, row, col)));
      }
#pragma unroll
  for (int j = 0; j < 8; j++)
    shared[warp][eights ? 8 * lane + j : lane + 32 * j] = sums[j];
  __syncthreads();
  const int64_t col = col0 + threadIdx.x;
  if (col >= p.m.cols)
    return;
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < WARPS; i++)
    sum += shared[i][threadIdx.x];
  ((double *)p.partial)[(int64_t)blockIdx.y * p.m.cols + col] = sum;
}
static_assert(THREADS == ESMM_FFN_SUM_COLS, "a thread ends with a column");

extern "C" __global__ void __launch_bounds__(THREADS) esmm_ffn_sum_end(const __grid_constant__ esmm_ffn_sum_params p)
{
  for (int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x; col < p.count; col += (int64_t)gridDim.x * THREADS) {
    double sum = 0.0;
    for (int64_t i = 0; i < p.chunks; i++)
      sum += ((const double *)p.partial)[i * p.m.cols + col];
    const int64_t at = p.order ? ((const int32_t *)p.order)[col] : col;
    if (p.open)
      ((int32_t *)p.out)[at] = (int32_t)sum;
    else
      ((float *)p.out)[at] = p.add ? ((const float *)p.out)[at] + (float)sum : (float)sum;
  }
}

/* ---- two of four ---- */

/* A group of values at at[], those of `goes`; the others stay out. */
template <class OF>
static __device__ __forceinline__ void do_group(OF of, const esmm_ffn_sparsify_params &p, const int64_t (&at)[GROUP],
                                                uint32_t goes, uint64_t place, float factor, esmm_ffn_record &r)
{
  float v[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    v[i] = goes >> i & 1 ? get(of, p.src, at[i]) : 0.0f;
  do_group_here(of, p, v, place, factor, r);
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    if (goes >> i & 1 && p.step != ESMM_FFN_MEASURES)
      put(of, p.dst, at[i], v[i]);
}

/* A value that stays as it is. */
template <class OF>
static __device__ __forceinline__ void do_other(OF of, const esmm_ffn_sparsify_params &p, int64_t at,
                                                esmm_ffn_record &r)
{
  if (p.step == ESMM_FFN_MEASURES)
    return;
  const auto x = ((const typename OF::element *)p.src)[at];
  ((typename OF::element *)p.dst)[at] = x;
  note(r, as_float(x), as_float(x));
}

/* Eight values side by side may be read and written at once. */
static __device__ __forceinline__ bool by_eights(const esmm_ffn_sparsify_params &p)
{
  return p.features % 8 == 0 && ((p.src | p.dst) & 15) == 0;
}

static __device__ __forceinline__ int64_t thread_of_grid(void)
{
  return ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
}

static __device__ __forceinline__ int64_t threads_of_grid(void)
{
  return (int64_t)gridDim.x * gridDim.y * THREADS;
}

/* Where all features go sparse: two groups a thread. */
template <class OF>
static __device__ __forceinline__ void features_by_eights(OF of, const esmm_ffn_sparsify_params &p, float factor,
                                                          esmm_ffn_record &r)
{
  const int64_t across = p.features / 8, all = p.tokens * across;
  for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid()) {
    const uint64_t place = (uint64_t)(i / across) << 32 | (uint64_t)(i % across * 2);
    float x[8];
    read_8(of, p.src, 8 * i, x);
#pragma unroll
    for (int g = 0; g < 2; g++) {
      float v[GROUP] = {x[4 * g], x[4 * g + 1], x[4 * g + 2], x[4 * g + 3]};
      do_group_here(of, p, v, place + (uint64_t)g, factor, r);
#pragma unroll
      for (int j = 0; j < GROUP; j++)
        x[4 * g + j] = v[j];
    }
    if (p.step != ESMM_FFN_MEASURES)
      write_8(of, p.dst, 8 * i, x);
  }
}

/* Where tokens are a multiple of four: eight columns of a group a thread. */
template <class OF>
static __device__ __forceinline__ void tokens_by_eights(OF of, const esmm_ffn_sparsify_params &p, float factor,
                                                        esmm_ffn_record &r)
{
  const int64_t across = p.features / 8, all = p.tokens / GROUP * across;
  const int32_t *order = (const int32_t *)p.token_order, *others = (const int32_t *)p.others;
  for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid()) {
    const int64_t group = i / across, col = i % across * 8;
    float x[GROUP][8];
    int64_t at[GROUP];
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      const int64_t token = GROUP * group + j;
      at[j] = (order ? order[token] : token) * p.features + col;
      read_8(of, p.src, at[j], x[j]);
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
      float v[GROUP] = {x[0][c], x[1][c], x[2][c], x[3][c]};
      if (!others || others[col + c] < 0)
        do_group_here(of, p, v, (uint64_t)(col + c) << 32 | (uint64_t)group, factor, r);
      else if (p.step != ESMM_FFN_MEASURES)
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          note(r, v[j], v[j]);
#pragma unroll
      for (int j = 0; j < GROUP; j++)
        x[j][c] = v[j];
    }
    if (p.step != ESMM_FFN_MEASURES)
#pragma unroll
      for (int j = 0; j < GROUP; j++)
        write_8(of, p.dst, at[j], x[j]);
  }
}

/* Tokens by blockIdx.y; a thread has four columns at a time. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_features(const __grid_constant__ esmm_ffn_sparsify_params p)
{
  const int64_t groups = (p.features + GROUP - 1) / GROUP;
  const int32_t *others = (const int32_t *)p.others;
  const float factor = factor_of(p);
  esmm_ffn_record r = {};
  with_dtype(p.dtype, [&](auto of) {
    if (!others && by_eights(p)) {
      features_by_eights(of, p, factor, r);
      return;
    }
    for (int64_t token = blockIdx.y; token < p.tokens; token += gridDim.y)
      for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < groups; i += (int64_t)gridDim.x * THREADS) {
        int64_t at[GROUP];
        uint32_t goes = 0;
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
          const int64_t col = GROUP * i + j;
          at[j] = token * p.features + col;
          if (col < p.features && (!others || others[col] < 0))
            goes |= 1u << j;
          else if (col < p.features)
            do_other(of, p, at[j], r);
        }
        do_group(of, p, at, goes, (uint64_t)token << 32 | (uint64_t)i, factor, r);
      }
  });
  leave_record<THREADS>(p, r);
}

/* Groups of four tokens by blockIdx.y; a thread has one column of them at a time. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_tokens(const __grid_constant__ esmm_ffn_sparsify_params p)
{
  const int64_t groups = (p.tokens + GROUP - 1) / GROUP;
  const int32_t *order = (const int32_t *)p.token_order, *others = (const int32_t *)p.others;
  const float factor = factor_of(p);
  esmm_ffn_record r = {};
  with_dtype(p.dtype, [&](auto of) {
    if (p.tokens % GROUP == 0 && by_eights(p)) {
      tokens_by_eights(of, p, factor, r);
      return;
    }
    for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
      const int count = (int)min((int64_t)GROUP, p.tokens - GROUP * group);
      int64_t rows[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const int64_t token = j < count ? GROUP * group + j : 0;
        rows[j] = (order ? order[token] : token) * p.features;
      }
      for (int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x; col < p.features;
           col += (int64_t)gridDim.x * THREADS) {
        int64_t at[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          at[j] = rows[j] + col;
        if (!others || others[col] < 0) {
          do_group(of, p, at, (1u << count) - 1, (uint64_t)col << 32 | (uint64_t)group, factor, r);
          continue;
        }
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          if (j < count)
            do_other(of, p, at[j], r);
      }
    }
  });
  leave_record<THREADS>(p, r);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_collect(const __grid_constant__ esmm_ffn_collect_params p)
{
  esmm_ffn_notes *notes = (esmm_ffn_notes *)p.notes;
  esmm_ffn_record r = {};
  for (int64_t i = threadIdx.x; i < p.count; i += THREADS)
    add(r, ((const esmm_ffn_record *)p.records)[i]);
  sum_block<THREADS>(r);
  if (threadIdx.x != 0)
    return;
  if (p.drop < 0)
    notes->factor = r.own > 0.0 ? (float)(r.fit / r.own) : 1.0f;
  else
    add(notes->drops[p.drop], r);
}

/* ---- columns by their counts ---- */

/*
 * One block, with few trips to memory: a thread has `each` columns, side by side, a multiple of four, and their counts
 * in registers. Past the last column a count is NO_COLUMN.
 */
#define RANKERS ESMM_FFN_RANK_THREADS
#define HELD 32 /* of a thread's counts: those behind them are read when they are needed */
#define NO_COLUMN 0xffffffffu
static_assert(RANKERS == 32 * 32, "a warp has a lane for each warp");

static __device__ __forceinline__ uint32_t count_at(uint64_t counts, int64_t column, int64_t columns)
{
  return column < columns ? ((const uint32_t *)counts)[column] : NO_COLUMN;
}

/* column is a multiple of four. */
static __device__ __forceinline__ uint4 four_counts(uint64_t counts, int64_t column, int64_t columns)
{
  if (column + 4 <= columns && counts % 16 == 0)
    return *(const uint4 *)((const uint32_t *)counts + column);
  return make_uint4(count_at(counts, column, columns), count_at(counts, column + 1, columns),
                    count_at(counts, column + 2, columns), count_at(counts, column + 3, columns));
}

static __device__ __forceinline__ void put_four(int32_t *to, int64_t column, int64_t columns, const int32_t (&four)[4])
{
  if (column + 4 <= columns && (uint64_t)to % 16 == 0) {
    *(int4 *)(to + column) = make_int4(four[0], four[1], four[2], four[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (column + i < columns)
      to[column + i] = four[i];
}

/* A thread's columns. */
struct span {
  uint64_t counts;
  int64_t first, columns;
  int each;
  uint32_t held[HELD];
};

static __device__ __forceinline__ void read_counts(span &s, uint64_t counts)
{
  s.counts = counts;
#pragma unroll
  for (int i = 0; i < HELD; i += 4) {
    const uint4 x = i < s.each ? four_counts(counts, s.first + i, s.columns)
                               : make_uint4(NO_COLUMN, NO_COLUMN, NO_COLUMN, NO_COLUMN);
    s.held[i] = x.x, s.held[i + 1] = x.y, s.held[i + 2] = x.z, s.held[i + 3] = x.w;
  }
}

/* use(column, counts) of each four columns, in their order. */
template <class USE> static __device__ __forceinline__ void for_fours(const span &s, const USE &use)
{
#pragma unroll
  for (int i = 0; i < HELD; i += 4)
    if (i < s.each) {
      const uint32_t four[4] = {s.held[i], s.held[i + 1], s.held[i + 2], s.held[i + 3]};
      use(s.first + i, four);
    }
#pragma unroll 1
  for (int i = HELD; i < s.each; i += 4) {
    const uint4 x = four_counts(s.counts, s.first + i, s.columns);
    const uint32_t four[4] = {x.x, x.y, x.z, x.w};
    use(s.first + i, four);
  }
}

/* How many counts are such. */
template <class SUCH> static __device__ __forceinline__ int count_such(const span &s, const SUCH &such)
{
  int sum = 0;
  for_fours(s, [&](int64_t, const uint32_t(&four)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      sum += such(four[i]);
  });
  return sum;
}

/* The sum of what the threads before this one have; *all: of the block. */
static __device__ __forceinline__ int scan(int mine, int *all)
{
  __shared__ int of_warps[RANKERS / 32];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  int through = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, through, step);
    through += lane >= step ? below : 0;
  }
  if (lane == 31)
    of_warps[warp] = through;
  __syncthreads();
  const int theirs = of_warps[lane];
  const int before = __reduce_add_sync(~0u, lane < warp ? theirs : 0);
  *all = __reduce_add_sync(~0u, theirs);
  __syncthreads();
  return before + through - mine;
}

/*
 * The count c such that fewer than `sparse` columns have less and at least that many have c or less, bit by bit from
 * the top; *take: how many of those that have c itself go sparse.
 */
static __device__ __forceinline__ uint32_t find_count(const span &s, uint32_t sparse, uint32_t *take)
{
  __shared__ uint32_t of_warps[2][RANKERS / 32]; /* which take turns, so that one barrier a bit is enough */
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  uint32_t bits = 0, limit = 0, less = 0;
  (void)count_such(s, [&](uint32_t count) {
    bits |= count == NO_COLUMN ? 0 : count;
    return 0;
  });
  bits = __reduce_or_sync(~0u, bits);
  if (lane == 0)
    of_warps[0][warp] = bits;
  __syncthreads();
  bits = __reduce_or_sync(~0u, of_warps[0][lane]);
  int turn = 1;
  for (int bit = 31 - __clz((int)bits); bit >= 0; bit--, turn ^= 1) { /* bits is 0: so is every count */
    const uint32_t next = limit | 1u << bit;
    const int mine = __reduce_add_sync(~0u, count_such(s, [&](uint32_t count) { return (int)(count < next); }));
    if (lane == 0)
      of_warps[turn][warp] = (uint32_t)mine;
    __syncthreads();
    const uint32_t below = __reduce_add_sync(~0u, of_warps[turn][lane]);
    if (below < sparse) {
      limit = next;
      less = below;
    }
  }
  *take = sparse - less;
  return limit;
}

/* Whether a column goes sparse; rank: how many of its very count come before it. */
static __device__ __forceinline__ bool goes_sparse(const esmm_ffn_rank_params &p, uint32_t count, uint32_t limit,
                                                   int rank, uint32_t take)
{
  return p.sparse > 0 && (count < limit || (count == limit && (uint32_t)rank < take));
}

/* Where the thread's columns go follows from how many those before it have. */
static __device__ __forceinline__ void rank_columns(const esmm_ffn_rank_params &p, span &s)
{
  int32_t *columns = (int32_t *)p.columns, *others = (int32_t *)p.others;
  uint32_t limit = 0, take = 0;
  int all;
  read_counts(s, p.counts);
  if (p.sparse > 0)
    limit = find_count(s, (uint32_t)p.sparse, &take);
  const int level = count_such(s, [&](uint32_t count) { return (int)(count == limit); });
  const int level_before = scan(level, &all);
  const int left = (int)take - level_before; /* of that very count these go sparse, the first ones */
  const int less = count_such(s, [&](uint32_t count) { return (int)(count < limit); });
  int before = scan(p.sparse > 0 ? less + max(0, min(level, left)) : 0, &all), rank = level_before;
  for_fours(s, [&](int64_t column, const uint32_t(&four)[4]) {
    int32_t place[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t f = column + i;
      const bool goes = goes_sparse(p, four[i], limit, rank, take);
      place[i] = goes ? -1 : (int32_t)(f - before);
      if (!goes && f < p.features)
        columns[p.sparse + f - before] = (int32_t)f;
      before += goes;
      rank += four[i] == limit;
    }
    put_four(others, column, p.features, place);
  });
}

/* The alive columns; how many there are. */
static __device__ __forceinline__ int order_columns(const esmm_ffn_rank_params &p, span &s)
{
  int32_t *order = (int32_t *)p.order, *places = (int32_t *)p.places;
  int alive;
  read_counts(s, p.open);
  const auto lives = [](uint32_t count) { return (int)((int32_t)count > 0); }; /* NO_COLUMN does not */
  int before = scan(count_such(s, lives), &alive);
  for_fours(s, [&](int64_t column, const uint32_t(&four)[4]) {
    int32_t place[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool here = lives(four[i]);
      place[i] = here ? before : -1;
      if (here)
        order[before] = (int32_t)(column + i);
      before += here;
    }
    put_four(places, column, p.features, place);
  });
  return alive;
}

extern "C" __global__ void __launch_bounds__(RANKERS) esmm_ffn_rank(const __grid_constant__ esmm_ffn_rank_params p)
{
  span s;
  s.columns = p.features;
  s.each = (int)((p.features + 4 * RANKERS - 1) / (4 * RANKERS)) * 4;
  s.first = (int64_t)threadIdx.x * s.each;
  if (p.columns)
    rank_columns(p, s);
  const int alive = p.order ? order_columns(p, s) : 0;
  if (p.mailbox && threadIdx.x == 0) { /* one store: the host sees both or neither */
    __threadfence_system();
    *(volatile uint64_t *)p.mailbox = (uint64_t)p.pass << 32 | (uint32_t)alive;
  }
}

/* ---- lines and elements by an index ---- */

static __device__ __forceinline__ int64_t picked(const esmm_ffn_pick_params &p, int64_t i)
{
  return i < p.count ? ((const int32_t *)p.index)[i] : -1;
}

/* Elements of any dtype, added or not. */
static __device__ __forceinline__ void pick_each(const esmm_ffn_pick_params &p, int64_t row, int64_t first,
                                                 int64_t step)
{
  const int64_t line = p.elements ? row : picked(p, row);
  for (int64_t col = first; col < p.dst.cols; col += step) {
    const int64_t element = p.elements ? picked(p, col) : col, at = row * p.dst.ld + col;
    const bool there = line >= 0 && element >= 0;
    const float x = there ? load_element(p.src, line * p.src.ld + element) : 0.0f;
    if (!p.add)
      store_element(p.dst, at, x);
    else if (there)
      store_element(p.dst, at, load_element(p.dst, at) + x);
  }
}

/* A whole line, as bits, 16 bytes at a time where that can be. */
template <typename T>
static __device__ __forceinline__ void pick_line(const esmm_ffn_pick_params &p, int64_t row, int64_t first,
                                                 int64_t step)
{
  enum { EACH = 16 / sizeof(T) };
  T *to = (T *)p.dst.data + row * p.dst.ld;
  const int64_t line = picked(p, row);
  const T *from = (const T *)p.src.data + (line < 0 ? 0 : line) * p.src.ld;
  const int64_t wide = has_vectors(p.src) && has_vectors(p.dst) ? p.dst.cols / EACH : 0;
  for (int64_t i = first; i < wide; i += step)
    ((uint4 *)to)[i] = line < 0 ? make_uint4(0, 0, 0, 0) : ((const uint4 *)from)[i];
  for (int64_t col = EACH * wide + first; col < p.dst.cols; col += step)
    to[col] = line < 0 ? (T)0 : from[col];
}

/* Elements of ESMM_FFN_PICK_ROWS lines, as bits, all read at once. */
template <typename T>
static __device__ __forceinline__ void pick_elements(const esmm_ffn_pick_params &p, int64_t row, int64_t first,
                                                     int64_t step)
{
  const int rows = (int)min((int64_t)ESMM_FFN_PICK_ROWS, p.dst.rows - row);
  const T *from = (const T *)p.src.data + row * p.src.ld;
  T *to = (T *)p.dst.data + row * p.dst.ld;
  for (int64_t col = first; col < p.dst.cols; col += step) {
    const int64_t element = picked(p, col);
    T x[ESMM_FFN_PICK_ROWS];
#pragma unroll
    for (int i = 0; i < ESMM_FFN_PICK_ROWS; i++)
      x[i] = element >= 0 && i < rows ? from[i * p.src.ld + element] : (T)0;
#pragma unroll
    for (int i = 0; i < ESMM_FFN_PICK_ROWS; i++)
      if (i < rows)
        to[i * p.dst.ld + col] = x[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_ffn_pick(const __grid_constant__ esmm_ffn_pick_params p)
{
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  const bool alike = p.src.dtype == p.dst.dtype && !p.add, narrow = dtype_bytes(p.dst.dtype) == 2;
  if (alike && p.elements) {
    const int64_t rows = ESMM_FFN_PICK_ROWS;
    for (int64_t row = blockIdx.y * rows; row < p.dst.rows; row += gridDim.y * rows)
      if (narrow)
        pick_elements<uint16_t>(p, row, first, step);
      else
        pick_elements<uint32_t>(p, row, first, step);
    return;
  }
  for (int64_t row = blockIdx.y; row < p.dst.rows; row += gridDim.y)
    if (!alike)
      pick_each(p, row, first, step);
    else if (narrow)
      pick_line<uint16_t>(p, row, first, step);
    else
      pick_line<uint32_t>(p, row, first, step);
}

/* Lines, or elements of lines, of which there are few. Neighbours of an index lie apart: a thread has elements of
   several lines on their way at once. */
extern "C" __global__ void __launch_bounds__(THREADS) esmm_ffn_add(const __grid_constant__ esmm_ffn_add_params p)
{
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  const int64_t lines = p.elements ? p.dst.rows : p.count, cols = p.elements ? p.count : p.dst.cols;
  const int32_t *index = (const int32_t *)p.index;
  with_dtype(p.dst.dtype, [&](auto of) {
    for (int64_t line = (int64_t)blockIdx.y * ESMM_FFN_PICK_ROWS; line < lines;
         line += (int64_t)gridDim.y * ESMM_FFN_PICK_ROWS)
      for (int64_t col = first; col < cols; col += step) {
        float sums[ESMM_FFN_PICK_ROWS];
        int64_t to[ESMM_FFN_PICK_ROWS];
#pragma unroll
        for (int i = 0; i < ESMM_FFN_PICK_ROWS; i++)
          if (line + i < lines) {
            to[i] = p.elements ? (line + i) * p.dst.ld + index[col] : index[line + i] * p.dst.ld + col;
            sums[i] = ((const float *)p.src.data)[(line + i) * p.src.ld + col] + get(of, p.dst.data, to[i]);
          }
#pragma unroll
        for (int i = 0; i < ESMM_FFN_PICK_ROWS; i++)
          if (line + i < lines)
            put(of, p.dst.data, to[i], sums[i]);
      }
  });
}

/* ---- for the report ---- */

/* A thread has a column at a time, and all its strips: there are few columns. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_ffn_densities(const __grid_constant__ esmm_ffn_densities_params p)
{
  esmm_ffn_notes *notes = (esmm_ffn_notes *)p.notes;
  unsigned long long strips = 0, nonzeros = 0, columns = 0;
  with_dtype(p.dtype, [&](auto of) {
    for (int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x; col < p.features;
         col += (int64_t)gridDim.x * THREADS) {
      bool column = false;
      for (int64_t row = 0; row < p.tokens; row += p.strip_rows) {
        bool strip = false;
        for (int64_t i = row; i < min(row + p.strip_rows, p.tokens); i++) {
          const bool set = get(of, p.h, i * p.features + col) != 0.0f;
          nonzeros += set;
          strip = strip || set;
        }
        strips += strip;
        column = column || strip;
      }
      columns += column;
    }
  });
  if (nonzeros == 0)
    return;
  atomicAdd((unsigned long long *)&notes->strips, strips);
  atomicAdd((unsigned long long *)&notes->nonzeros, nonzeros);
  atomicAdd((unsigned long long *)&notes->alive_columns, columns);
}
