/*
 * store.cuh: what becomes of the sums of k_half16_sm90a.cu: their rests are added, then they are finished and written.
 *
 * A thread of a warpgroup has, of 64 rows by 256 columns of C, sums[16i + 4j + 2h + e]: row 16 * warp + lane / 4 + 8h,
 * column 32i + 8j + lane % 4 * 2 + e. turn_sums exchanges them among the four lanes of a row, after which the column is
 * 32i + lane % 4 * 8 + 2j + e: a lane has eight columns side by side, which are 16 bytes of a row of B and of a 16-bit
 * C. So rests need no detour through shared memory, nor does C.
 */
#ifndef ESMM_CUDA_HALF16_STORE_CUH
#define ESMM_CUDA_HALF16_STORE_CUH

#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/half16/split.cuh"

#define LANE_SUMS (ESMM_HALF16_COLS / 2)
#define EIGHTS (ESMM_HALF16_COLS / 32) /* columns of a lane, in eights; of two rows */
static_assert(LANE_SUMS == EIGHTS * 16, "two rows of a lane");

/* A 4 x 4 matrix of pairs of columns, of which a lane has a row, is transposed, for both rows of C. */
static __device__ __forceinline__ void turn_sums(float (&sums)[LANE_SUMS], int lane)
{
#pragma unroll
  for (int s = 1; s < 4; s *= 2) {
    const bool upper = lane & s;
#pragma unroll
    for (int i = 0; i < LANE_SUMS; i++)
      if ((i / 4 & s) == 0) { /* j without that bit, and the j with it */
        const float sent = upper ? sums[i] : sums[i + 4 * s];
        const float got = __shfl_xor_sync(~0u, sent, s);
        sums[i] = upper ? got : sums[i];
        sums[i + 4 * s] = upper ? sums[i + 4 * s] : got;
      }
  }
}

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

/* The rests of a lane's two rows, which it shares with three others: where they begin in the lists of 32 rows, how many
   the first row has and both have. */
typedef struct half16_rests {
  int at, first, all;
} half16_rests;

/* row: the first of the two. */
static __device__ __forceinline__ half16_rests find_rests(const esmm_half16_params &p, int row)
{
  const int2 *rows = (const int2 *)p.rows + row;
  const int2 first = __ldg(rows);
  const half16_rests r = {first.x, first.y, first.y + __ldg(&rows[8].y)};
  return r;
}

/* Rest e of both rows: k and value. */
static __device__ __forceinline__ uint2 rest_at(const esmm_half16_params &p, const half16_rests &r, int row, int e)
{
  const uint2 *list = (const uint2 *)p.lists + (int64_t)(row / ESMM_HALF16_LISTED) * p.blocks * FEW;
  return e < r.all ? __ldg(list + r.at + e) : make_uint2(0, 0);
}

/* What a lane needs of row k of B, from column `col` on: eight columns of each 32, those that there are. */
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

/* The two rests that come first, and the row of B of the very first: on its way while other things are done. */
typedef struct half16_begun {
  uint2 now, next;
  uint4 b[EIGHTS];
} half16_begun;

static __device__ __forceinline__ half16_begun begin_rests(const esmm_half16_params &p, const half16_rests &r, int row,
                                                           int col, int lane)
{
  const int eights = r.all > 0 ? eights_of_b(p, col) : 0;
  half16_begun g = {rest_at(p, r, row, 0), rest_at(p, r, row, 1)};
  const uint4 *from = row_of_b(p, g.now.x, col + lane % 4 * 8);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++)
    g.b[i] = load_eight(from, i, eights);
  return g;
}

/* Row H of the lane's two: an element of A times a row of B, in whose place its columns of the next are fetched. */
template <esmm_dtype DTYPE, int H>
static __device__ __forceinline__ void add_rest(float (&sums)[LANE_SUMS], float a, uint4 (&b)[EIGHTS],
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

/* Rests of a warp's 16 rows to turned sums; col: of the tile. It ends when the longest lists are at their end. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void add_rests(const esmm_half16_params &p, float (&sums)[LANE_SUMS],
                                                 const half16_rests &r, half16_begun &g, int row, int col, int lane)
{
  const int most = (int)__reduce_max_sync(~0u, (unsigned)r.all);
  const int eights = eights_of_b(p, col);
#pragma unroll 1
  for (int e = 0; e < most; e++) {
    const float a = one_float<DTYPE>(g.now.y);
    g.now = g.next;
    g.next = rest_at(p, r, row, e + 2);
    const uint4 *next = row_of_b(p, g.now.x, col + lane % 4 * 8);
    const int needed = e + 1 < r.all ? eights : 0;
    if (e < r.first)
      add_rest<DTYPE, 0>(sums, a, g.b, next, needed);
    else if (e < r.all)
      add_rest<DTYPE, 1>(sums, a, g.b, next, needed);
  }
  __syncwarp();
}

/* ---- C ---- */

/* As finish_values (epilogue.cuh), of turned sums; n is a multiple of 8, or all columns lie inside. */
static __device__ __forceinline__ void finish_turned(const esmm_half16_params &p, float (&sums)[LANE_SUMS], int col)
{
  const esmm_epilogue_params &e = p.epilogue;
  scale(e, sums);
  if (e.bias)
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
      if (col + 32 * i < p.n)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 bias = *(const float2 *)((const float *)e.bias + col + 32 * i + 2 * j);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float *x = &sums[16 * i + 4 * j + 2 * h];
            x[0] = __fadd_rn(x[0], bias.x);
            x[1] = __fadd_rn(x[1], bias.y);
          }
        }
  activate(e.activation, sums);
}

/* To a 16-bit C in lines of 16 bytes. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_eights(const esmm_half16_params &p, const float (&sums)[LANE_SUMS],
                                                    int row, int col)
{
  const esmm_device_matrix &c = p.epilogue.c;
  uint16_t *to = (uint16_t *)c.data + row * c.ld + col;
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (row + 8 * h < p.m)
#pragma unroll
      for (int i = 0; i < EIGHTS; i++)
        if (col + 32 * i < p.n) {
          const float *x = &sums[16 * i + 2 * h];
          *(uint4 *)(to + 8 * h * c.ld + 32 * i) = make_uint4(pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[4], x[5]),
                                                              pair_of<DTYPE>(x[8], x[9]), pair_of<DTYPE>(x[12], x[13]));
        }
}

/* Any C and all that may follow a sum, 16 sums a turn: eight columns of two rows. The sums are lost. */
static __device__ __forceinline__ void store_slowly(const esmm_half16_params &p, float (&sums)[LANE_SUMS], int row,
                                                    int col)
{
  const esmm_epilogue_params &e = p.epilogue;
  const bool vectors = has_vectors(e.c);
#pragma unroll 1
  for (int i = 0; i < EIGHTS; i++, col += 32) {
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; j++)
        x[j] = h ? sums[j / 2 * 4 + 2 + j % 2] : sums[j / 2 * 4 + j % 2];
      if (row + 8 * h >= p.m || col >= p.n)
        continue;
      if (vectors && col + 8 <= p.n) {
        finish_8(e, row + 8 * h, col, x);
        continue;
      }
#pragma unroll 1
      for (int j = 0; j < 8 && col + j < p.n; j++) {
        finish_element(e, row + 8 * h, col + j, x[0]);
#pragma unroll
        for (int next = 0; next < 7; next++)
          x[next] = x[next + 1];
      }
    }
#pragma unroll
    for (int j = 0; j + 16 < LANE_SUMS; j++)
      sums[j] = sums[j + 16];
  }
}

/* Turned sums of a lane's two rows to C; col: of the tile. */
static __device__ __forceinline__ void store_sums(const esmm_half16_params &p, float (&sums)[LANE_SUMS], int row,
                                                  int col, int lane)
{
  const int mine = col + lane % 4 * 8;
  if (!p.registers || (p.n % 8 != 0 && col + ESMM_HALF16_COLS > p.n)) {
    store_slowly(p, sums, row, mine);
    return;
  }
  finish_turned(p, sums, mine);
  if (p.epilogue.c.dtype == ESMM_BF16)
    store_eights<ESMM_BF16>(p, sums, row, mine);
  else /* ESMM_F16 */
    store_eights<ESMM_F16>(p, sums, row, mine);
}

#endif
