/*
 * k_nm16_decode.cu: C [m,n] = A [m,k] x B for m of 1 to 16 and 2:4 weights of 16 bits, in one launch. The floor is the
 * bytes of B: their addresses depend on nothing, so they are loaded first, straight to registers, and A comes while
 * they are on their way.
 *
 *                  columns of C: a block has `groups` warps side by side, 32 columns each
 *            +-----------+-----------+--
 *   k's of   | warp 0    | warp 1    |      groups = 2: warps 0, 2, 4, 6 take the blocks 0, 1, 2, 3, 0, ... of 64 k's
 *   rank 0   | warp 2    | warp 3    |      for the same columns
 *            +-----------+-----------+--
 *   rank 1   | the next block of the cluster, where columns alone do not fill the GPU
 *            +-----------+-----------+--
 *
 * mma.sp m16n8k32 computes C transposed: 16 columns of B, 16 of 32 k's each, by 8 rows of A. It wants, of lane (g, t) =
 * (lane / 4, lane % 4), the values of groups t and t + 4 (of four k's) of columns g and g + 8. Any order of groups is
 * as good as another while values, places and A have the same. So a lane loads 16 bytes of a column's line as the form
 * nm16 has it, groups 4t to 4t + 3; its first two are groups t and t + 4 of a first instruction, the others of a second
 * one, and a warp reads 1 KiB side by side. Their places, four bits a group, lie in one word of each lane, groups 4t to
 * 4t + 3 of both columns: turned among the four lanes, lane t has group t of each of them, which is what the first
 * instruction takes from lanes 0 and 1, and the second from lanes 2 and 3. Of A, lane t takes k's 2 (t % 2) and the
 * next of groups 4 (t / 2) and 4 (t / 2) + 8 and of the three behind each.
 *
 * Sums of a block's warps are added in shared memory, those of a cluster's blocks from each other's, in a fixed order.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/few_rows.cuh"
#include "cuda/kernels/nm16/decode_params.h"
#include "cuda/ops/nm_layout.h"

#define THREADS ESMM_NM16_DECODE_THREADS
#define WARPS (THREADS / 32)
#define COLS ESMM_NM16_DECODE_COLS
#define UNITS (COLS / 16) /* of an instruction's columns */
#define BLOCK ESMM_NM16_BLOCK
#define BLOCK_K ESMM_NM16_K
#define PART 8 /* k's that are copied at once */
#define EVERY_LANE 0xffffffffu
static_assert(ESMM_NM16_LINES % COLS == 0, "a warp's columns lie in one half of a block");

/* ---- operands ---- */

/* A block of B on its way: of each 16 columns, 16 bytes of two lines, and the places. */
struct stage {
  uint4 values[UNITS][2];
  uint32_t places[UNITS];
};

/* Where a lane's part of a warp's columns begins, in their first block. */
struct place {
  const uint8_t *values, *places;
};

/* slice: which columns, counted in warps. */
static __device__ __forceinline__ place place_of(const esmm_nm16_decode_params &p, int64_t slice)
{
  const int lane = lane_id(), g = lane / 4, t = lane % 4, col = (int)(slice * COLS % ESMM_NM16_COLS);
  const uint8_t *block = (const uint8_t *)p.b + esmm_nm16_block_at(slice * COLS / ESMM_NM16_COLS, 0, p.blocks);
  const place at = {block + esmm_nm16_value_at(col + g, 8 * t), block + esmm_nm16_word_at(col + g, 4 * t)};
  return at;
}

/* 16 columns further: 16 lines, or 32 words; column g + 8: 8 lines, and the same word. */
static __device__ __forceinline__ void load_stage(stage &s, const place &at, int block)
{
  const int64_t from = (int64_t)block * BLOCK;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    s.values[u][0] = load_once(at.values + from + u * 1024);
    s.values[u][1] = load_once(at.values + from + u * 1024 + 512);
    s.places[u] = load_word_once(at.places + from + u * 128);
  }
}

/* A [m, ks from k on] to lines of shared memory; zeros past A's last k, up to a whole block. */
static __device__ __forceinline__ void copy_chunk(const esmm_nm16_decode_params &p, int k, int ks, uint16_t *tile,
                                                  int line)
{
  const int m = (int)p.a.rows, there = (int)p.a.cols - k;
  const int64_t row_step = p.a.order == ESMM_ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ESMM_ROW_MAJOR ? 1 : p.a.ld;
  const uint16_t *a = (const uint16_t *)p.a.data;
  if (p.vector) {
#pragma unroll 1
    for (int i = PART * (int)threadIdx.x; i < ks; i += PART * THREADS)
#pragma unroll 1
      for (int row = 0; row < m; row++)
        copy_16(tile + row * line + i, i < there ? a + row * row_step + k + i : a, 2 * max(0, min(PART, there - i)));
    wait_for_copies();
    return;
  }
#pragma unroll 1
  for (int i = (int)threadIdx.x; i < ks; i += THREADS)
#pragma unroll 4
    for (int row = 0; row < m; row++)
      tile[row * line + i] = i < there ? a[row * row_step + (k + i) * k_step] : (uint16_t)0;
}

/* ---- products ---- */

#define MMA_SP(types)                                                                                                 \
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." types                                    \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"             \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
               : "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(places), \
                 "n"(SELECT))

/* SELECT: places of lanes 0 and 1 of each four, or of lanes 2 and 3. */
template <esmm_dtype DTYPE, int SELECT>
static __device__ __forceinline__ void mma_sp(float (&c)[4], const uint32_t (&b)[4], const uint32_t (&a)[4],
                                              uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without an mma.sp");
  if (DTYPE == ESMM_F16)
    MMA_SP("f16.f16");
  else
    MMA_SP("bf16.bf16");
}

/* Four bits each: from groups 4t to 4t + 3 in lane t to group t of lanes 0 to 3; both halves of a word alike. */
static __device__ __forceinline__ uint32_t turn_places(uint32_t x)
{
  const int t = lane_id() % 4;
  const uint32_t keep = t % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu, other = __shfl_xor_sync(EVERY_LANE, x, 1);
  x = (x & keep) | ((t % 2 ? other >> 4 : other << 4) & ~keep);
  return __byte_perm(x, __shfl_xor_sync(EVERY_LANE, x, 2), t / 2 ? 0x3715 : 0x6240);
}

/* lines: of A, at this lane's first k of the block, one for each 8 rows. */
template <esmm_dtype DTYPE, int HALVES>
static __device__ __forceinline__ void multiply(const stage &s, const uint16_t *const (&lines)[HALVES],
                                                float (&sums)[HALVES][UNITS][4])
{
  uint32_t a[HALVES][2][4]; /* k's of the first instruction, of the second */
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) /* groups t / 2, t / 2 + 2, and the same of those with the second values */
        a[h][i][j] = *(const uint32_t *)(lines[h] + 8 * i + j % 2 * 32 + j / 2 * 4);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const uint32_t places = turn_places(s.places[u]);
    const uint4 x = s.values[u][0], y = s.values[u][1];
    const uint32_t first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      mma_sp<DTYPE, 0>(sums[h][u], first, a[h][0], places);
      mma_sp<DTYPE, 1>(sums[h][u], second, a[h][1], places);
    }
  }
}

/* ---- sums ---- */

extern __shared__ __align__(16) uint8_t shared[];

/* Sums of a warp to its part of the block's, [ways][m][cols + PAD]. */
template <int HALVES>
static __device__ __forceinline__ void store_sums(const esmm_nm16_decode_params &p, int line,
                                                  const float (&sums)[HALVES][UNITS][4])
{
  const int g = lane_id() / 4, t = lane_id() % 4, m = (int)p.a.rows;
  const int group = warp_id() & ((1 << p.group_shift) - 1), way = warp_id() >> p.group_shift;
  float *out = (float *)shared + way * m * line + group * COLS + g;
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = 8 * h + 2 * t + i % 2;
        if (row < m)
          out[row * line + 16 * u + i / 2 * 8] = sums[h][u][i];
      }
}

/* From the block's sums to C: with those of the other ranks, for this one's share of the columns. */
static __device__ __forceinline__ void finish(const esmm_nm16_decode_params &p, int line)
{
  float *sums = (float *)shared;
  const int m = (int)p.a.rows, ranks = cluster_ranks(), rank = (int)blockIdx.x % ranks, ways = WARPS >> p.group_shift;
  const int cols = COLS << p.group_shift, mine = cols / ranks;
  const int64_t col0 = (int64_t)(blockIdx.x / (unsigned)ranks) * cols;
  if (ranks > 1) {
    for (int e = (int)threadIdx.x; e < m * cols; e += THREADS) {
      float *to = sums + e / cols * line + e % cols;
      for (int way = 1; way < ways; way++)
        *to += to[way * m * line];
    }
    __syncwarp();
    cluster_meet();
  }
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < m * mine; e += THREADS) {
    const int row = e / mine, col = rank * mine + e % mine;
    const float *from = sums + row * line + col;
    float sum = load_from(from, 0);
    if (ranks > 1) {
#pragma unroll
      for (int r = 1; r < ESMM_NM16_DECODE_RANKS; r++)
        if (r < ranks)
          sum += load_from(from, r);
    } else {
      for (int way = 1; way < ways; way++)
        sum += from[way * m * line];
    }
    if (col0 + col < p.epilogue.c.cols)
      finish_element(p.epilogue, row, col0 + col, sum);
  }
  if (ranks > 1) { /* others may still read here */
    __syncwarp();
    cluster_meet();
  }
}

/* ---- a block ---- */

template <esmm_dtype DTYPE, int HALVES> static __device__ __forceinline__ void decode(const esmm_nm16_decode_params &p)
{
  enum { STAGES = ESMM_NM16_DECODE_STAGES(HALVES) };
  if (not_selected(p.selector))
    return;
  const int lane = lane_id(), m = (int)p.a.rows, ranks = cluster_ranks(), ways = WARPS >> p.group_shift;
  const int64_t slice =
      ((int64_t)(blockIdx.x / (unsigned)ranks) << p.group_shift) + (warp_id() & ((1 << p.group_shift) - 1));
  const int first = (int)(blockIdx.x % (unsigned)ranks) * p.range, last = min(first + p.range, p.blocks);
  const place at = place_of(p, slice);
  stage stages[STAGES];
  int block = slice * COLS < p.epilogue.c.cols ? first + (warp_id() >> p.group_shift) : last;
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (block + i * ways < last)
      load_stage(stages[i], at, block + i * ways);
  const int line = p.chunk * BLOCK_K + ESMM_NM16_DECODE_SPARE;
  uint16_t *tile = (uint16_t *)shared;
  const uint16_t *mine[HALVES]; /* rows past m repeat the last one: their sums go nowhere */
#pragma unroll
  for (int h = 0; h < HALVES; h++)
    mine[h] = tile + min(8 * h + lane / 4, m - 1) * line + lane % 4 / 2 * 16 + lane % 2 * 2;
  float sums[HALVES][UNITS][4] = {};
#pragma unroll 1
  for (int chunk = first; chunk < last; chunk += p.chunk) {
    const int end = min(chunk + p.chunk, last);
    if (chunk > first)
      __syncthreads();
    copy_chunk(p, chunk * BLOCK_K, (end - chunk) * BLOCK_K, tile, line);
    __syncthreads();
    while (block < end)
#pragma unroll
      for (int i = 0; i < STAGES; i++) /* a chunk begins with the first stage */
        if (block < end) {
          const uint16_t *lines[HALVES];
#pragma unroll
          for (int h = 0; h < HALVES; h++)
            lines[h] = mine[h] + (block - chunk) * BLOCK_K;
          multiply<DTYPE, HALVES>(stages[i], lines, sums);
          if (block + STAGES * ways < last)
            load_stage(stages[i], at, block + STAGES * ways);
          block += ways;
        }
  }
  const int sums_line = (COLS << p.group_shift) + ESMM_NM16_DECODE_PAD;
  __syncthreads();
  store_sums(p, sums_line, sums);
  __syncthreads();
  finish(p, sums_line);
}

#define DECODE(name, dtype, halves)                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                       \
      esmm_nm16_decode_##name(const __grid_constant__ esmm_nm16_decode_params p) \
  {                                                                              \
    decode<dtype, halves>(p);                                                    \
  }

DECODE(bf16_8, ESMM_BF16, 1)
DECODE(bf16_16, ESMM_BF16, 2)
DECODE(f16_8, ESMM_F16, 1)
DECODE(f16_16, ESMM_F16, 2)
