/*
 * split.cuh: A as halves of 2:4, on every call: what k_half16_sm90a.cu multiplies.
 *
 * Of each group of four k's of a row the first half has the first two nonzeros (zeros fill up, where there are fewer),
 * the second half the other two: every element of A is in one of them. The nonzeros of the second half overflow. A
 * patch is 256 rows by 64 k's:
 *
 *   little overflow  it goes to lists, row by row, in rising k; the second half is not written
 *   much             the second half is written, and multiplied as the first is: no A takes more than twice the time
 *
 * esmm_half16_split makes halves and the overflow of each patch; esmm_half16_list puts each row's overflow
 * together, and lists the patches that have a second half. Places follow from counts, no atomics: the same bits each
 * time.
 */
#ifndef ESMM_CUDA_HALF16_SPLIT_CUH
#define ESMM_CUDA_HALF16_SPLIT_CUH

#include "cuda/kernels/common/device.cuh"
#include "cuda/ops/nm_layout.h"

/* A warp has 16 rows of a patch, a lane 16 k's of two of them, 8 apart. */
#define PATCH_ROWS ESMM_HALF16_ROWS
#define PATCH_WARPS (ESMM_HALF16_SPLIT / 32)
#define FEW ESMM_HALF16_FEW
static_assert(PATCH_WARPS * 16 == PATCH_ROWS && PATCH_ROWS == 2 * ESMM_NM16_COLS && FEW < 256,
              "what a warp has of a patch, and a byte of a row's place");

/* ---- one group of four k's: two words, the first k in the lowest half ---- */

static __device__ __forceinline__ uint32_t nonzeros_of(uint32_t low, uint32_t high)
{
  return (uint32_t)((low & 0x7fffu) != 0) | (uint32_t)((low & 0x7fff0000u) != 0) << 1 |
         (uint32_t)((high & 0x7fffu) != 0) << 2 | (uint32_t)((high & 0x7fff0000u) != 0) << 3;
}

/* The elements at two places, four bits as nm_layout.h has them. */
static __device__ __forceinline__ uint32_t elements_at(uint32_t low, uint32_t high, uint32_t places)
{
  return __byte_perm(low, high, 0x1010u + (places & 3) * 0x22u + (places >> 2) * 0x2200u);
}

/* Which two the first half gets. */
static __device__ __forceinline__ uint32_t two_of(uint32_t low, uint32_t high)
{
  return esmm_nm16_places(nonzeros_of(low, high));
}

/* The other two of four, as bits. */
static __device__ __forceinline__ uint32_t others(uint32_t places)
{
  return 15u & ~(1u << (places & 3) | 1u << (places >> 2));
}

/* ---- a lane's 16 k's of a row: eight words ---- */

/* Zeros past A's end, of which nothing is read. */
static __device__ __forceinline__ uint4 load_8(const esmm_half16_params &p, int row, int k)
{
  const uint16_t *from = (const uint16_t *)p.a + row * p.a_ld + k;
  if (row >= p.m || k >= p.k)
    return make_uint4(0, 0, 0, 0);
  if (k + 8 <= p.k)
    return __ldg((const uint4 *)from);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 7; i++)
    if (k + i < p.k)
      words[i / 2] |= (uint32_t)from[i] << 16 * (i % 2);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

static __device__ __forceinline__ void load_16(const esmm_half16_params &p, int row, int k, uint32_t (&x)[8])
{
  const uint4 first = load_8(p, row, k), second = load_8(p, row, k + 8);
  x[0] = first.x;
  x[1] = first.y;
  x[2] = first.z;
  x[3] = first.w;
  x[4] = second.x;
  x[5] = second.y;
  x[6] = second.z;
  x[7] = second.w;
}

/* Its part of a half at `to`, the line's; returns its 16 bits of places. SECOND: the other two of each four. */
template <bool SECOND> static __device__ __forceinline__ uint32_t store_half(const uint32_t (&x)[8], char *to)
{
  uint32_t places = 0, values[4];
#pragma unroll
  for (int g = 0; g < 4; g++) {
    const uint32_t first = two_of(x[2 * g], x[2 * g + 1]), mine = SECOND ? esmm_nm16_places(others(first)) : first;
    values[g] = elements_at(x[2 * g], x[2 * g + 1], mine);
    places |= mine << 4 * g;
  }
  *(uint4 *)to = make_uint4(values[0], values[1], values[2], values[3]);
  return places;
}

/* Bit i: its k i overflows. */
static __device__ __forceinline__ uint32_t overflow_of(const uint32_t (&x)[8])
{
  uint32_t overflow = 0;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    const uint32_t nonzeros = nonzeros_of(x[2 * g], x[2 * g + 1]);
    overflow |= (nonzeros & others(esmm_nm16_places(nonzeros))) << 4 * g;
  }
  return overflow;
}

/* Its overflow from `to` on; k: its first, within the block. The third or fourth of a group overflows. */
static __device__ __forceinline__ void store_overflow(const uint32_t (&x)[8], uint32_t overflow, uint32_t k,
                                                      uint32_t *to)
{
  if (overflow == 0)
    return;
#pragma unroll
  for (uint32_t g = 0; g < 4; g++) {
    if (overflow >> 4 * g & 4)
      *to++ = (k + 4 * g + 2) << 16 | (x[2 * g + 1] & 0xffffu);
    if (overflow >> 4 * g & 8)
      *to++ = (k + 4 * g + 3) << 16 | x[2 * g + 1] >> 16;
  }
}

/* ---- a patch ---- */

/* Two rows of a lane to a half of the patch. */
template <bool SECOND>
static __device__ __forceinline__ void store_rows(const esmm_half16_params &p, const uint32_t (&x)[2][8], int pair,
                                                  int block)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = lane % 4;
  const int line = warp % 8 * 16 + lane / 4; /* of the strip, in the place of a column */
  char *to = (char *)p.half[SECOND] + esmm_nm16_block_at(2 * pair + warp / 8, block, p.blocks);
  uint32_t word = 0;
#pragma unroll
  for (int h = 0; h < 2; h++)
    word |= store_half<SECOND>(x[h], to + esmm_nm16_value_at(line + 8 * h, 8 * part)) << 16 * h;
  *(uint32_t *)(to + esmm_nm16_word_at(line, 4 * part)) = word;
}

/* Overflow of two rows of each lane, the lower 16 bits the first's, to the patch's; before: how many the warps before
   have. Rows in their order, k's in theirs. */
static __device__ __forceinline__ void store_patch_overflow(const esmm_half16_params &p, const uint32_t (&x)[2][8],
                                                            uint32_t overflow, int64_t patch, uint32_t before)
{
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t counts = (uint32_t)__popc(overflow & 0xffffu) | (uint32_t)__popc(overflow >> 16) << 16;
  uint32_t through = counts; /* of both rows, of the lanes up to this one */
#pragma unroll
  for (uint32_t d = 1; d < 32; d *= 2) {
    const uint32_t y = __shfl_up_sync(~0u, through, d);
    through += lane >= d ? y : 0;
  }
  const uint32_t upper = __shfl_sync(~0u, through, 31) & 0xffffu; /* all of rows 0 to 7 of the warp come first */
  const uint32_t at = through - counts, quad = lane & ~3u;
  const uint32_t row_at = __shfl_sync(~0u, at, (int)quad), row_through = __shfl_sync(~0u, through, (int)quad + 3);
  const uint32_t row_count = row_through - row_at; /* halves do not borrow: each is no less than before */
  uint32_t *to = (uint32_t *)p.overflow + patch * FEW + before;
  store_overflow(x[0], overflow & 0xffffu, lane % 4 * 16, to + (at & 0xffffu));
  store_overflow(x[1], overflow >> 16, lane % 4 * 16, to + upper + (at >> 16));
  if (lane == quad) {
    uint16_t *rows = (uint16_t *)p.at + patch * PATCH_ROWS + warp * 16 + lane / 4;
    rows[0] = (uint16_t)((before + (row_at & 0xffffu)) | (row_count & 0xffffu) << 8);
    rows[8] = (uint16_t)((before + upper + (row_at >> 16)) | row_count >> 16 << 8);
  }
}

/* Blocks: a patch each, those of a pair of strips one after the other. */
extern "C" __global__ void __launch_bounds__(ESMM_HALF16_SPLIT, 2)
    esmm_half16_split(const __grid_constant__ esmm_half16_params p)
{
  __shared__ uint32_t found[PATCH_WARPS];
  if (not_selected(p.selector))
    return;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int pair = (int)blockIdx.x / p.blocks, block = (int)blockIdx.x % p.blocks;
  uint32_t x[2][8];
#pragma unroll
  for (int h = 0; h < 2; h++)
    load_16(p, pair * PATCH_ROWS + warp * 16 + lane / 4 + 8 * h, block * ESMM_NM16_K + lane % 4 * 16, x[h]);
  store_rows<false>(p, x, pair, block);
  uint32_t overflow = overflow_of(x[0]) | overflow_of(x[1]) << 16;
  const uint32_t own = __reduce_add_sync(~0u, (uint32_t)__popc(overflow));
  if (lane == 0)
    found[warp] = own;
  __syncthreads();
  const uint32_t of_lane = lane < PATCH_WARPS ? found[lane] : 0;
  const bool many = __reduce_add_sync(~0u, of_lane) > FEW;
  uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
  if (many) {
    store_rows<true>(p, x, pair, block);
    overflow = before = 0;
  }
  store_patch_overflow(p, x, overflow, blockIdx.x, before);
  if (threadIdx.x == 0)
    ((uint8_t *)p.many)[blockIdx.x] = many;
}

/* ---- the lists ---- */

#define LISTED ESMM_HALF16_LISTED
#define LIST_WARPS (ESMM_HALF16_LISTING / 32)
#define AT_ONCE 8 /* patches that a warp looks at together: latency is all that this costs */
static_assert(LISTED == 32 && LIST_WARPS == 32, "a lane is a row, a warp some of its patches");

/* Which patches of a pair have a second half; one warp. */
static __device__ __forceinline__ void list_again(const esmm_half16_params &p, int pair)
{
  const int lane = (int)threadIdx.x % 32;
  uint32_t *to = (uint32_t *)p.again + (int64_t)pair * p.blocks;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first < p.blocks; first += 32) {
    const int block = first + lane;
    const bool many = block < p.blocks && ((const uint8_t *)p.many)[(int64_t)pair * p.blocks + block];
    const uint32_t all = __ballot_sync(~0u, many);
    if (many)
      to[count + __popc(all & ((1u << lane) - 1))] = (uint32_t)block;
    count += __popc(all);
  }
  if (lane == 0)
    ((int32_t *)p.agains)[pair] = count;
}

/* A row's places in patches [block, block + AT_ONCE), 0 from `end` on. */
static __device__ __forceinline__ void load_places(const uint16_t *at, int block, int end, uint32_t (&places)[AT_ONCE])
{
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++)
    places[i] = block + i < end ? at[(int64_t)(block + i) * PATCH_ROWS] : 0;
}

/* Blocks: 32 rows each. */
extern "C" __global__ void __launch_bounds__(ESMM_HALF16_LISTING)
    esmm_half16_list(const __grid_constant__ esmm_half16_params p)
{
  __shared__ int before[LIST_WARPS][LISTED]; /* a warp's overflow of a row; then where it goes */
  if (not_selected(p.selector))
    return;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int pair = (int)blockIdx.x / (PATCH_ROWS / LISTED), part = (int)blockIdx.x % (PATCH_ROWS / LISTED);
  const int row = lane / 16 * 16 + lane % 16 / 2 + lane % 2 * 8; /* rows 8 apart are a lane's when they are added */
  const int64_t patches = (int64_t)pair * p.blocks;
  const uint16_t *at = (const uint16_t *)p.at + patches * PATCH_ROWS + part * LISTED + row;
  const int first = (int)((int64_t)p.blocks * warp / LIST_WARPS);
  const int last = (int)((int64_t)p.blocks * (warp + 1) / LIST_WARPS);
  uint32_t places[AT_ONCE];
  int count = 0;
#pragma unroll 1
  for (int block = first; block < last; block += AT_ONCE) {
    load_places(at, block, last, places);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      count += (int)(places[i] >> 8);
  }
  before[warp][lane] = count;
  if (part == 0 && warp == LIST_WARPS - 1)
    list_again(p, pair);
  __syncthreads();
  if (warp == 0) { /* rows one after the other, of each row the warps */
    int all = 0;
#pragma unroll 1
    for (int w = 0; w < LIST_WARPS; w++)
      all += before[w][lane];
    int through = all;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(~0u, through, d);
      through += lane >= d ? y : 0;
    }
    int start = through - all;
    ((int2 *)p.rows)[(int64_t)blockIdx.x * LISTED + row] = make_int2(start, all);
#pragma unroll 1
    for (int w = 0; w < LIST_WARPS; w++) {
      const int mine = before[w][lane];
      before[w][lane] = start;
      start += mine;
    }
  }
  __syncthreads();
  uint2 *to = (uint2 *)p.lists + (int64_t)blockIdx.x * p.blocks * FEW + before[warp][lane];
  const uint32_t *overflow = (const uint32_t *)p.overflow + patches * FEW;
#pragma unroll 1
  for (int block = first; block < last; block += AT_ONCE) {
    uint32_t first_of[AT_ONCE]; /* the first of each; few have a second */
    load_places(at, block, last, places);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      first_of[i] = places[i] >> 8 ? overflow[(int64_t)(block + i) * FEW + (places[i] & 255)] : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll 1
      for (uint32_t j = 0; j < places[i] >> 8; j++) {
        const uint32_t x = j == 0 ? first_of[i] : overflow[(int64_t)(block + i) * FEW + (places[i] & 255) + j];
        *to++ = make_uint2((uint32_t)(block + i) * ESMM_NM16_K + (x >> 16), x & 0xffffu);
      }
  }
}

#endif
