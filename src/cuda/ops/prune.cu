/*
 * prune.cu: top-N and the soft threshold on the device, to the bits that format/prune_top.c comes to.
 *
 * A cut is found byte by byte: of the keys that begin like it, how many have which next byte; then, if not all with its
 * key stay, the place of the last that does, likewise. Columns do that in shared memory, 32 of them a block. For all of
 * B the host asks pass by pass (prune.c). Then every element is settled by itself: a warp has an area, a lane a column
 * of it, so that sums are made in the order that format.h says.
 */
#include "cuda/kernels/common/device.cuh"
#include "cuda/ops/prune_params.h"

#define THREADS ESMM_TOP_THREADS
#define WARPS (THREADS / 32)
#define COLS ESMM_TOP_COLS
#define MOST_GROUP 32
#define BATCH 8 /* elements of a thread that are loaded before they are looked at */

static_assert(COLS == 32, "a lane has a column");
static_assert(THREADS == 256, "a thread has a byte's value");

/* ---- keys ---- */

/* Nonzeros come before zeros, whatever their score; NaN counts as infinite. */
static __device__ __forceinline__ uint64_t key_of(const esmm_top_keys &keys, int64_t k, float x)
{
  if (!keys.norms)
    return min(__float_as_uint(x) & 0x7fffffffu, 0x7f800000u);
  const double score = fabs(__dmul_rn((double)x, (double)((const float *)keys.norms)[k])); /* a norm may be -0.0 */
  return x == 0.0f ? 0 : (uint64_t)__double_as_longlong(isnan(score) ? (double)INFINITY : score) + 1;
}

static __device__ __forceinline__ double score_of(const esmm_top_keys &keys, uint64_t key)
{
  if (!keys.norms)
    return (double)__uint_as_float((uint32_t)key);
  return key == 0 ? 0.0 : __longlong_as_double((long long)(key - 1));
}

static __device__ __forceinline__ bool stays(const esmm_device_cut &c, uint64_t key, int64_t place)
{
  return key > c.least || (key == c.least && place <= c.last);
}

/* The rest of a cut, from the largest key of all and of those that go. */
static __device__ __forceinline__ void finish_cut(const esmm_top_keys &keys, bool soft, uint64_t largest, uint64_t gone,
                                                  esmm_device_cut &c)
{
  c.finite = isfinite(score_of(keys, largest));
  c.shrink = soft && c.finite ? score_of(keys, gone) : 0.0;
}

/* The bits above the byte at shift, which is the highest or not. */
static __device__ __forceinline__ uint64_t above(int shift, int highest)
{
  return shift == highest ? 0 : ~(uint64_t)0 << (shift + 8);
}

/* ---- cuts of columns ---- */

/* Calls f(k, column of the 32, key) for what this thread has of them: neighbouring lanes have neighbours in memory. */
template <class F>
static __device__ __forceinline__ void each_key(const esmm_top_columns_params &p, int64_t col0, const F &f)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  const int64_t first = by_rows ? warp : lane, step = by_rows ? WARPS : 32;
  const int cols = (int)min((int64_t)COLS, p.b.cols - col0);
  with_dtype(p.b.dtype, [&](auto of) {
    const auto *from = (const typename decltype(of)::element *)p.b.data;
    for (int c = by_rows ? lane : warp; c < cols; c += by_rows ? COLS : WARPS)
      for (int64_t k0 = first; k0 < p.b.rows; k0 += BATCH * step) {
        float x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          x[i] = k0 + i * step < p.b.rows ? as_float(from[element_at(p.b, k0 + i * step, col0 + c)]) : 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          if (k0 + i * step < p.b.rows)
            f(k0 + i * step, c, key_of(p.keys, k0 + i * step, x[i]));
      }
  });
}

/* What a block knows of its columns so far. */
struct columns_state {
  uint32_t bins[256 * COLS];
  uint64_t found[COLS]; /* of the least key that stays */
  uint64_t place[COLS]; /* of the last k that stays with that key */
  int64_t left[COLS];   /* how many stay of those that begin like it */
  int32_t tied[COLS];   /* not all of those with that key stay */
  unsigned long long largest[COLS], gone[COLS];
};

/* Where lanes have columns of their own they meet banks of their own, too. */
static __device__ __forceinline__ uint32_t &bin_of(columns_state &s, bool by_rows, uint32_t byte, int c)
{
  return s.bins[by_rows ? byte * COLS + c : c * 256 + byte];
}

static __device__ __forceinline__ void clear_bins(columns_state &s)
{
  for (int i = (int)threadIdx.x; i < 256 * COLS; i += THREADS)
    s.bins[i] = 0;
  __syncthreads();
}

static __device__ __forceinline__ void find_keys(const esmm_top_columns_params &p, int64_t col0, columns_state &s)
{
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  for (int shift = p.keys.high; shift >= p.keys.low; shift -= 8) {
    const uint64_t known = above(shift, p.keys.high);
    clear_bins(s);
    each_key(p, col0, [&](int64_t, int c, uint64_t key) {
      if ((key & known) == s.found[c])
        atomicAdd(&bin_of(s, by_rows, (uint32_t)(key >> shift) & 255, c), 1);
    });
    __syncthreads();
    if (threadIdx.x < COLS) {
      const int c = (int)threadIdx.x;
      uint32_t byte = 255;
      int64_t left = s.left[c];
      for (; byte > 0 && left > bin_of(s, by_rows, byte, c); byte--)
        left -= bin_of(s, by_rows, byte, c);
      s.found[c] |= (uint64_t)byte << shift;
      s.left[c] = left;
      s.tied[c] = left < bin_of(s, by_rows, byte, c);
    }
    __syncthreads();
  }
}

static __device__ __forceinline__ void find_places(const esmm_top_columns_params &p, int64_t col0, columns_state &s)
{
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  for (int shift = p.place_shift; shift >= 0; shift -= 8) {
    const uint64_t known = above(shift, p.place_shift);
    clear_bins(s);
    each_key(p, col0, [&](int64_t k, int c, uint64_t key) {
      if (key == s.found[c] && ((uint64_t)k & known) == s.place[c])
        atomicAdd(&bin_of(s, by_rows, (uint32_t)(k >> shift) & 255, c), 1);
    });
    __syncthreads();
    if (threadIdx.x < COLS) {
      const int c = (int)threadIdx.x;
      uint32_t byte = 0;
      int64_t left = s.left[c];
      for (; byte < 255 && left > bin_of(s, by_rows, byte, c); byte++)
        left -= bin_of(s, by_rows, byte, c);
      s.place[c] |= (uint64_t)byte << shift;
      s.left[c] = left;
    }
    __syncthreads();
  }
}

static __device__ __forceinline__ esmm_device_cut cut_at(const columns_state &s, int c)
{
  esmm_device_cut cut;
  cut.least = s.found[c];
  cut.last = s.tied[c] ? (int64_t)s.place[c] : INT64_MAX;
  cut.shrink = 0.0;
  cut.finite = 1;
  return cut;
}

/* Atomics only where they change something: that soon becomes rare. */
static __device__ __forceinline__ void raise_to(unsigned long long *to, uint64_t x)
{
  if (x > *(volatile unsigned long long *)to)
    atomicMax(to, (unsigned long long)x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_top_columns(const __grid_constant__ esmm_top_columns_params p)
{
  __shared__ columns_state s;
  const int c = (int)threadIdx.x;
  for (int64_t col0 = (int64_t)blockIdx.x * COLS; col0 < p.b.cols; col0 += (int64_t)gridDim.x * COLS) {
    if (c < COLS) { /* readers wait for the bins first */
      s.found[c] = p.keep > 0 ? 0 : ~(uint64_t)0;
      s.place[c] = 0;
      s.left[c] = p.keep;
      s.tied[c] = 0;
      s.largest[c] = s.gone[c] = 0;
    }
    if (p.keep > 0 && p.keep < p.b.rows) {
      find_keys(p, col0, s);
      if (__syncthreads_or(c < COLS && s.tied[c]))
        find_places(p, col0, s);
    }
    __syncthreads();
    if (p.soft) {
      each_key(p, col0, [&](int64_t k, int of, uint64_t key) {
        raise_to(&s.largest[of], key);
        if (!stays(cut_at(s, of), key, k))
          raise_to(&s.gone[of], key);
      });
      __syncthreads();
    }
    if (c < COLS && col0 + c < p.b.cols) {
      esmm_device_cut cut = cut_at(s, c);
      if (p.soft)
        finish_cut(p.keys, true, s.largest[c], s.gone[c], cut);
      ((esmm_device_cut *)p.cuts)[col0 + c] = cut;
    }
  }
}

/* ---- the cut of all of B ---- */

/* Calls f(place, key) for this thread's elements. */
template <class F> static __device__ __forceinline__ void each_of_all(const esmm_top_count_params &p, const F &f)
{
  const bool by_rows = p.b.order == ESMM_ROW_MAJOR;
  const int64_t lines = by_rows ? p.b.rows : p.b.cols, length = by_rows ? p.b.cols : p.b.rows;
  const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  with_dtype(p.b.dtype, [&](auto of) {
    for (int64_t line = blockIdx.y; line < lines; line += gridDim.y) {
      const auto *from = (const typename decltype(of)::element *)p.b.data + line * p.b.ld;
      for (int64_t at0 = first; at0 < length; at0 += BATCH * step) {
        float x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          x[i] = at0 + i * step < length ? as_float(from[at0 + i * step]) : 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int64_t at = at0 + i * step, k = by_rows ? line : at, col = by_rows ? at : line;
          if (at < length)
            f(k * p.b.cols + col, key_of(p.keys, k, x[i]));
        }
      }
    }
  });
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_top_count(const __grid_constant__ esmm_top_count_params p)
{
  __shared__ uint32_t bins[256];
  bins[threadIdx.x] = 0;
  __syncthreads();
  each_of_all(p, [&](int64_t place, uint64_t key) {
    if ((key & p.known) != p.found)
      return;
    if (!p.places)
      atomicAdd(&bins[key >> p.shift & 255], 1);
    else if (((uint64_t)place & p.place_known) == p.place_found)
      atomicAdd(&bins[place >> p.shift & 255], 1);
  });
  __syncthreads();
  if (bins[threadIdx.x])
    atomicAdd((unsigned long long *)p.having + threadIdx.x, (unsigned long long)bins[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_top_bounds(const __grid_constant__ esmm_top_count_params p)
{
  __shared__ unsigned long long bounds[2];
  if (threadIdx.x < 2)
    bounds[threadIdx.x] = 0;
  __syncthreads();
  uint64_t largest = 0, gone = 0;
  each_of_all(p, [&](int64_t place, uint64_t key) {
    largest = max(largest, key);
    gone = stays(p.cut, key, place) ? gone : max(gone, key);
  });
  raise_to(&bounds[0], largest);
  raise_to(&bounds[1], gone);
  __syncthreads();
  if (threadIdx.x < 2)
    atomicMax((unsigned long long *)p.having + threadIdx.x, bounds[threadIdx.x]);
}

/* ---- areas ---- */

/* Of a group of N:M: the element that keep - 1 others come before. */
static __device__ __forceinline__ esmm_device_cut cut_of_group(const esmm_top_areas_params &p, int64_t k, int count,
                                                               int64_t col)
{
  uint64_t keys[MOST_GROUP];
  esmm_device_cut c;
  c.least = 0;
  c.last = INT64_MAX;
#pragma unroll 1
  for (int i = 0; i < count; i++)
    keys[i] = key_of(p.keys, k + i, load_element(p.b, element_at(p.b, k + i, col)));
  uint64_t largest = 0, gone = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    int before = 0;
#pragma unroll 1
    for (int r = 0; r < count; r++)
      before += keys[r] > keys[i] || (keys[r] == keys[i] && r < i);
    if (before == p.keep - 1) {
      c.least = keys[i];
      c.last = i;
    }
    largest = max(largest, keys[i]);
    gone = before >= p.keep ? max(gone, keys[i]) : gone;
  }
  finish_cut(p.keys, p.soft != 0, largest, gone, c);
  return c;
}

/* What is left of x, which stays. */
static __device__ __forceinline__ double shrunk(const esmm_top_areas_params &p, const esmm_device_cut &c, int64_t k,
                                                double x)
{
  if (!(c.shrink > 0.0))
    return x;
  const double less = p.inverses ? __dmul_rn(c.shrink, ((const double *)p.inverses)[k]) : c.shrink;
  const double left = __dsub_rn(fabs(x), less);
  return left > 0.0 ? copysign(left, x) : 0.0;
}

/* Of a column of an area. */
struct area_sums {
  double fit, own, squares, difference;
  uint32_t kept, dropped;
};

template <bool MEASURES>
static __device__ __forceinline__ void settle(const esmm_top_areas_params &p, int64_t k, int64_t col,
                                              const esmm_device_cut &c, int64_t place, area_sums &s)
{
  const int64_t at = element_at(p.b, k, col);
  const float value = load_element(p.b, at);
  const double x = (double)value;
  const bool stay = stays(c, key_of(p.keys, k, value), place);
  const double left = stay ? shrunk(p, c, k, x) : 0.0;
  if (MEASURES) {
    s.fit = __dadd_rn(s.fit, c.finite ? __dmul_rn(x, left) : 0.0);
    s.own = __dadd_rn(s.own, c.finite ? __dmul_rn(left, left) : 0.0);
    return;
  }
  float y = stay ? value : 0.0f;
  if (!stay || (isfinite(value) && (c.shrink > 0.0 || p.factor != 1.0f))) {
    store_element(p.b, at, stay ? __double2float_rn(__dmul_rn((double)p.factor, left)) : 0.0f);
    y = load_element(p.b, at); /* as it was rounded */
  }
  const double difference = __dsub_rn(x, (double)y);
  s.squares = __dadd_rn(s.squares, __dmul_rn(x, x));
  s.difference =
      __dadd_rn(s.difference, stay && (value == y || isnan(value)) ? 0.0 : __dmul_rn(difference, difference));
  s.kept += value != 0.0f && y != 0.0f;
  s.dropped += value != 0.0f && y == 0.0f;
}

static __device__ __forceinline__ double add_by_halves(double x)
{
  for (int d = 16; d > 0; d /= 2)
    x = __dadd_rn(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

/* One column of the area that begins at k = level. */
template <bool MEASURES>
static __device__ __forceinline__ void settle_column(const esmm_top_areas_params &p, int64_t level, int64_t col,
                                                     area_sums &s)
{
  const int64_t behind = min(level + p.rows, p.b.rows);
  for (int64_t k0 = level; k0 < behind; k0 += p.group) {
    const int count = (int)min((int64_t)p.group, behind - k0);
    const esmm_device_cut c =
        p.cuts ? ((const esmm_device_cut *)p.cuts)[p.whole ? 0 : col] : cut_of_group(p, k0, count, col);
    for (int r = 0; r < count; r++)
      settle<MEASURES>(p, k0 + r, col, c, !p.cuts ? r : p.whole ? (k0 + r) * p.b.cols + col : k0 + r, s);
  }
}

/* An area of this warp, to its place in out. */
template <bool MEASURES>
static __device__ __forceinline__ void settle_area(const esmm_top_areas_params &p, int64_t level, int64_t strip)
{
  const int lane = (int)threadIdx.x % 32;
  const int64_t col = strip * COLS + lane, i = level * p.strips + strip;
  area_sums s = {0.0, 0.0, 0.0, 0.0, 0, 0};
  if (col < p.b.cols)
    settle_column<MEASURES>(p, level * p.rows, col, s);
  __syncwarp();
  if (MEASURES) {
    const double fit = add_by_halves(s.fit), own = add_by_halves(s.own);
    if (lane == 0)
      ((double2 *)p.out)[i] = make_double2(fit, own);
    return;
  }
  esmm_nm_tally t;
  t.kept = __reduce_add_sync(~0u, s.kept);
  t.dropped = __reduce_add_sync(~0u, s.dropped);
  t.squares = add_by_halves(s.squares);
  t.squares_dropped = add_by_halves(s.difference);
  if (lane == 0)
    ((esmm_nm_tally *)p.out)[i] = t;
}

/* A warp for each area: side by side along x, levels of k's along y. */
template <bool MEASURES> static __device__ __forceinline__ void settle_areas(const esmm_top_areas_params &p)
{
  for (int64_t level = blockIdx.y; level < p.levels; level += gridDim.y)
    for (int64_t strip = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; strip < p.strips;
         strip += (int64_t)gridDim.x * WARPS)
      settle_area<MEASURES>(p, level, strip);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    esmm_top_measure(const __grid_constant__ esmm_top_areas_params p)
{
  settle_areas<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    esmm_top_settle(const __grid_constant__ esmm_top_areas_params p)
{
  settle_areas<false>(p);
}
