/*
 * turned.cuh: sums of 64 rows by 256 columns of C in a warpgroup's registers, and how they get to C from there.
 *
 * A thread has sums[16i + 4j + 2h + e]: row 16 * warp + lane / 4 + 8h, column 32i + 8j + lane % 4 * 2 + e. turn_sums
 * exchanges them among the four lanes of a row, after which the column is 32i + lane % 4 * 8 + 2j + e: a lane has eight
 * columns side by side, which are 16 bytes of a row of a 16-bit matrix. So C needs no detour through shared memory.
 */
#ifndef ESMM_CUDA_HALF16_TURNED_CUH
#define ESMM_CUDA_HALF16_TURNED_CUH

#include "cuda/kernels/common/epilogue.cuh"

#define LANE_SUMS (ESMM_HALF16_COLS / 2)
#define EIGHTS (ESMM_HALF16_COLS / 32) /* columns of a lane, in eights; of two rows */
static_assert(LANE_SUMS == EIGHTS * 16, "two rows of a lane");

typedef struct pair_tile {
  int pair, col; /* of strips of 128 rows; first column */
} pair_tile;

/* The tile that comes i-th. Tiles come in groups of pairs of strips, column by column, so that what runs at the same
   time shares both operands in the second-level cache. PARAMS has group and pairs of esmm_half16_params. */
template <class PARAMS> static __device__ __forceinline__ pair_tile tile_at(const PARAMS &p, int index, int across)
{
  const int in_group = p.group * across, group = index / in_group, place = index - group * in_group;
  const int height = min(p.group, p.pairs - group * p.group);
  const pair_tile t = {group * p.group + place % height, place / height * ESMM_HALF16_COLS};
  return t;
}

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

/* ---- C ---- */

/*
 * PARAMS has m, n (of C), epilogue and registers (the epilogue is applied in registers) as esmm_half16_params has.
 *
 * As finish_values (epilogue.cuh), of turned sums; n is a multiple of 8, or all columns lie inside.
 */
template <class PARAMS>
static __device__ __forceinline__ void finish_turned(const PARAMS &p, float (&sums)[LANE_SUMS], int col)
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
template <esmm_dtype DTYPE, class PARAMS>
static __device__ __forceinline__ void store_eights(const PARAMS &p, const float (&sums)[LANE_SUMS], int row, int col)
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
template <class PARAMS>
static __device__ __forceinline__ void store_slowly(const PARAMS &p, float (&sums)[LANE_SUMS], int row, int col)
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
template <class PARAMS>
static __device__ __forceinline__ void store_sums(const PARAMS &p, float (&sums)[LANE_SUMS], int row, int col, int lane)
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
