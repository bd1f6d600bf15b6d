/*
 * store.cuh: how k_half16_sm90a.cu ends: sums are turned (turned.cuh), their overflow is added, then they are finished
 * and written. Turned, eight columns of a lane are 16 bytes of a row of B: overflow needs no detour through shared
 * memory.
 */
#ifndef ESMM_CUDA_HALF16_STORE_CUH
#define ESMM_CUDA_HALF16_STORE_CUH

#include "cuda/kernels/half16/split.cuh"
#include "cuda/kernels/half16/turned.cuh"

/* Two elements of a word as fp32. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ float2 two_floats(uint32_t word)
{
  if (DTYPE == ESMM_F16)
    return __half22float2(*(const __half2 *)&word);
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)); /* ESMM_BF16 */
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ float one_float(uint32_t bits)
{
  return two_floats<DTYPE>(bits).x;
}

/* The overflow of a lane's two rows, shared with three other lanes: where it begins in the lists of 32 rows, how many
   the first row has and both have. */
typedef struct half16_overflow {
  int at, first, all;
} half16_overflow;

/* row: the first of the two. */
static __device__ __forceinline__ half16_overflow find_overflow(const esmm_half16_params &p, int row)
{
  const int2 *rows = (const int2 *)p.rows + row;
  const int2 first = __ldg(rows);
  const half16_overflow r = {first.x, first.y, first.y + __ldg(&rows[8].y)};
  return r;
}

/* Overflow element e of both rows: k and value. */
static __device__ __forceinline__ uint2 overflow_at(const esmm_half16_params &p, const half16_overflow &r, int row,
                                                    int e)
{
  const uint2 *list = (const uint2 *)p.lists + (int64_t)(row / ESMM_HALF16_LISTED) * p.blocks * FEW;
  return e < r.all ? __ldg(list + r.at + e) : make_uint2(0, 0);
}

/* What a lane needs of row k of B, from column `col` on: eight columns of each 32, as far as B goes. */
static __device__ __forceinline__ const uint4 *row_of_b(const esmm_half16_params &p, uint32_t k, int col)
{
  return (const uint4 *)((const uint16_t *)p.b + (int64_t)k * p.b_ld + col);
}

static __device__ __forceinline__ uint4 load_eight(const uint4 *from, int i, int eights)
{
  return i < eights ? __ldg(from + 4 * i) : make_uint4(0, 0, 0, 0);
}

/* How many of them lie inside; `col` is the tile's. */
static __device__ __forceinline__ int eights_of_b(const esmm_half16_params &p, int col)
{
  return min(EIGHTS, (int)((p.b_ld - col) / 32));
}

/* The two overflow elements that come first, and the row of B of the very first: loaded ahead. */
typedef struct half16_begun {
  uint2 now, next;
  uint4 b[EIGHTS];
} half16_begun;

static __device__ __forceinline__ half16_begun begin_overflow(const esmm_half16_params &p, const half16_overflow &r,
                                                              int row, int col, int lane)
{
  const int eights = r.all > 0 ? eights_of_b(p, col) : 0;
  half16_begun g = {overflow_at(p, r, row, 0), overflow_at(p, r, row, 1)};
  const uint4 *from = row_of_b(p, g.now.x, col + lane % 4 * 8);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++)
    g.b[i] = load_eight(from, i, eights);
  return g;
}

/* Row H of the lane's two: an element of A times a row of B; the next row's columns are loaded in its place. */
template <esmm_dtype DTYPE, int H>
static __device__ __forceinline__ void add_element(float (&sums)[LANE_SUMS], float a, uint4 (&b)[EIGHTS],
                                                   const uint4 *next, int eights)
{
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    const uint32_t words[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = two_floats<DTYPE>(words[j]);
      float *to = &sums[16 * i + 4 * j + 2 * H];
      to[0] = fmaf(a, x.x, to[0]);
      to[1] = fmaf(a, x.y, to[1]);
    }
    b[i] = load_eight(next, i, eights);
  }
}

/* Overflow of a warp's 16 rows to turned sums; col: of the tile. It ends when the longest lists are at their end. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void add_overflow(const esmm_half16_params &p, float (&sums)[LANE_SUMS],
                                                    const half16_overflow &r, half16_begun &g, int row, int col,
                                                    int lane)
{
  const int most = (int)__reduce_max_sync(~0u, (unsigned)r.all);
  const int eights = eights_of_b(p, col);
#pragma unroll 1
  for (int e = 0; e < most; e++) {
    const float a = one_float<DTYPE>(g.now.y);
    g.now = g.next;
    g.next = overflow_at(p, r, row, e + 2);
    const uint4 *next = row_of_b(p, g.now.x, col + lane % 4 * 8);
    const int needed = e + 1 < r.all ? eights : 0;
    if (e < r.first)
      add_element<DTYPE, 0>(sums, a, g.b, next, needed);
    else if (e < r.all)
      add_element<DTYPE, 1>(sums, a, g.b, next, needed);
  }
  __syncwarp();
}

#endif
