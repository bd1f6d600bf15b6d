/*
 * k_fused16_sm90a.cu: products of 16-bit operands with few or middling rows on Hopper: A is scanned and multiplied by
 * one block, in its shared memory. Nothing is packed and no block waits for all others, which is what
 * k_wgmma16_sm90a.cu spends most of a small product on; instead every tile of columns scans A again.
 *
 *   A [m,k]   bf16 or fp16, either order; strips of 64 rows
 *   B [k,n]   the rows form of the weights
 *   C         tiles of 64 rows by 256 columns; up to 8 blocks, a cluster, share a tile's k's
 *
 * A block takes its k's in chunks of 256, and works on two of them:
 *
 *   this chunk   rows of B by the list of its alive k's are gathered into a ring, 32 k's a stage; A's elements by the
 *                same list go from the boxes to registers, and both are multiplied. Each of the two warpgroups has 128
 *                columns
 *   the next     TMA has brought its boxes, 64 k's by 64 rows; while the first rows of B are on their way a warp looks
 *                which of 32 k's have a nonzero in the 64 rows (-0 is a zero). Then it is listed
 *
 * At the end each block of a cluster adds up its share of the tile's columns, always in the order of the ranks.
 * What fills up the last stage is zeros in both operands, so that no Inf of either gets in.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/wgmma16/lines.cuh"

#define ROWS ESMM_FUSED16_ROWS
#define COLS ESMM_FUSED16_COLS
#define CHUNK ESMM_FUSED16_CHUNK
#define STAGE_K ESMM_FUSED16_STAGE_K
#define STAGES ESMM_FUSED16_STAGES
#define THREADS ESMM_FUSED16_THREADS
#define WARPS (THREADS / 32)
#define BOX_BYTES WGMMA16_PANEL
#define BOXES (CHUNK / 64)
#define LINE 128 /* bytes of a line of a box of A, and of a panel of B */
#define PANEL_BYTES (STAGE_K * LINE)
#define STAGE_BYTES (COLS / 64 * PANEL_BYTES)
#define STEPS (STAGE_K / 16)
#define SUMS 64 /* of a thread: 64 rows by 128 columns over a warpgroup */
static_assert(WARPS * 4 == STAGE_K && WARPS * 32 == CHUNK, "a warp gathers four lines of a stage, looks at 32 k's");

struct block_memory {
  alignas(1024) char ring[STAGES][STAGE_BYTES]; /* rows of B */
  char boxes[2][BOXES][BOX_BYTES];              /* of A: two chunks */
  uint16_t list[CHUNK];                         /* alive k's of this chunk */
  uint32_t words[WARPS];                        /* which k's of the next one are alive */
  uint64_t full[2];                             /* boxes have come */
};
static_assert(sizeof(block_memory) == ESMM_FUSED16_SHARED, "params.h tells the host another size");

extern __shared__ __align__(1024) char shared[];

static __device__ __forceinline__ block_memory *memory(void)
{
  return (block_memory *)shared;
}

/* ---- A ---- */

/* One thread: the chunk that begins at k and ends before `last`. */
template <bool BY_K>
static __device__ __forceinline__ void load_chunk(const esmm_fused16_params &p, int which, int row, int k, int last)
{
  const int boxes = min(BOXES, (last - k + 63) / 64);
  sm90_fence_async(); /* everybody has read what was there */
  sm90_barrier_expect(&memory()->full[which], (uint32_t)boxes * BOX_BYTES);
  for (int i = 0; i < boxes; i++, k += 64)
    sm90_tma_load(memory()->boxes[which][i], &p.map_a, BY_K ? row : k, BY_K ? k : row, &memory()->full[which]);
}

/* A warp's 32 k's of a chunk: which are alive. Those that were not loaded are not. */
template <bool BY_K> static __device__ __forceinline__ uint32_t look(int which, int ks)
{
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t at = line_reader<BY_K>(sm90_address(memory()->boxes[which][warp / 2]), lane);
  uint32_t mine = 0; /* bit g: k 8g + lane / 4 in this lane's rows */
  if ((int)warp * 32 >= ks)
    return 0;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    uint32_t x[4], y[4];
    read_lines<BY_K>(at, 4 * (int)(warp % 2) + g, 0, x);
    read_lines<BY_K>(at, 4 * (int)(warp % 2) + g, 1, y);
    const uint32_t any = x[0] | x[1] | x[2] | x[3] | y[0] | y[1] | y[2] | y[3];
    mine |= (any & 0x7fff7fffu) != 0 ? 1u << g : 0;
  }
  mine |= __shfl_xor_sync(~0u, mine, 1);
  mine |= __shfl_xor_sync(~0u, mine, 2);
  mine = __shfl_sync(~0u, mine, (int)(lane % 8 * 4)) >> lane / 8;
  return __ballot_sync(~0u, mine & 1);
}

/* The list from the words; returns how many k's it has. */
static __device__ __forceinline__ int write_list(void)
{
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const uint4 low = *(const uint4 *)memory()->words, high = *((const uint4 *)memory()->words + 1);
  const uint32_t words[WARPS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  int count = 0, before = 0;
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    before += i < warp ? __popc(words[i]) : 0;
    count += __popc(words[i]);
    mine = i == warp ? words[i] : mine;
  }
  if (mine >> lane & 1)
    memory()->list[before + __popc(mine & ((1u << lane) - 1))] = (uint16_t)(32 * warp + lane);
  return count;
}

/* Where a lane's element of a listed k is: of row `row` in the boxes of its chunk; other_half: that of row + 8. */
template <bool BY_K> static __device__ __forceinline__ uint32_t element_at(uint32_t boxes, uint32_t row, uint32_t k)
{
  const uint32_t line = BY_K ? k % 64 : row, place = BY_K ? row : k % 64;
  return boxes + k / 64 * BOX_BYTES + line * LINE + ((place ^ line * 8) & 56) * 2 + place % 8 * 2;
}

template <bool BY_K> static __device__ __forceinline__ uint32_t other_half(uint32_t at)
{
  return BY_K ? at ^ 16 : at + 8 * LINE;
}

static __device__ __forceinline__ uint32_t load_shared_16(uint32_t at)
{
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}

/* A's operand of one step of 16 listed k's, from entry `from` on, as wgmma wants it in registers. What is not listed is
   zeros. */
template <bool BY_K> static __device__ __forceinline__ void take_step(int which, int from, int count, uint32_t (&a)[4])
{
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const uint32_t boxes = sm90_address(memory()->boxes[which]);
#pragma unroll
  for (int i = 0; i < 2; i++) { /* k's 2t and 2t + 1 of lane (g, t), then 8 on */
    const int entry = from + 8 * i + 2 * (int)(lane % 4);
    const uint32_t listed = entry < count ? *(const uint32_t *)&memory()->list[entry] : 0;
    const uint32_t x = element_at<BY_K>(boxes, row, listed & (CHUNK - 1));
    const uint32_t y = element_at<BY_K>(boxes, row, listed >> 16 & (CHUNK - 1));
    const uint32_t mask = (entry < count ? 0xffffu : 0) | (entry + 1 < count ? 0xffff0000u : 0);
    a[2 * i] = (load_shared_16(x) | load_shared_16(y) << 16) & mask;
    a[2 * i + 1] = (load_shared_16(other_half<BY_K>(x)) | load_shared_16(other_half<BY_K>(y)) << 16) & mask;
  }
}

/* ---- B ---- */

/* 16 bytes, or zeros. */
static __device__ __forceinline__ void gather(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Four lines of stage s, a warp's own; those that are not listed are zeros. b: the lane's columns of the chunk's first
   k. */
static __device__ __forceinline__ void gather_stage(const esmm_fused16_params &p, const char *b, bool inside, int s,
                                                    int count)
{
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, first = s * STAGE_K + 4 * warp;
  if (s * STAGE_K < count) {
    const uint32_t to = sm90_address(memory()->ring[s % STAGES]) + (uint32_t)(lane / 8 * PANEL_BYTES);
    const uint2 listed = *(const uint2 *)&memory()->list[first]; /* past the count they are anything */
    const uint32_t k[4] = {listed.x & 0xffff, listed.x >> 16, listed.y & 0xffff, listed.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int line = 4 * warp + i;
      const bool there = inside && first + i < count;
      gather(to + (uint32_t)(line * LINE + (lane % 8 ^ line % 8) * 16), there ? b + (int64_t)k[i] * p.b_row : b, there);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* A warpgroup's two panels of B in a stage: 64 columns each, STAGE_K lines. */
static __device__ __forceinline__ uint64_t view_of_b(void)
{
  const uint32_t at = sm90_address(memory()->ring) + threadIdx.x / 128 * (2 * PANEL_BYTES);
  return (uint64_t)((at & 0x3ffffu) >> 4) | (uint64_t)(PANEL_BYTES >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

/* A stage, once its rows of B have come. All threads. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_stage(uint64_t view, int s, const uint32_t (&a)[STEPS][4],
                                                      float (&sums)[SUMS])
{
  sm90_fence_async();
  __syncthreads();
  sm90_wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; i++)
    wgmma16_registers<DTYPE>(sums, a[i], view + (uint64_t)((s % STAGES * STAGE_BYTES + i * 16 * LINE) >> 4));
  sm90_wgmma_commit();
}

template <bool BY_K>
static __device__ __forceinline__ void take_stage(int which, int s, int count, uint32_t (&a)[STEPS][4])
{
#pragma unroll
  for (int i = 0; i < STEPS; i++)
    take_step<BY_K>(which, s * STAGE_K + i * 16, count, a[i]);
}

/* What is listed, times B. The first stages are on their way; a: A's operands of the first. */
template <esmm_dtype DTYPE, bool BY_K>
static __device__ __forceinline__ void multiply_chunk(const esmm_fused16_params &p, const char *b, bool inside,
                                                      int which, int count, const uint32_t (&first)[STEPS][4],
                                                      float (&sums)[SUMS])
{
  const uint64_t view = view_of_b();
  if (count > 0) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    multiply_stage<DTYPE>(view, 0, first, sums);
    gather_stage(p, b, inside, STAGES - 1, count);
  }
#pragma unroll 1
  for (int s = 1; s * STAGE_K < count; s++) {
    uint32_t a[STEPS][4];
    sm90_wgmma_wait<0>(); /* the stage before, which reads the same registers */
    take_stage<BY_K>(which, s, count, a);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    multiply_stage<DTYPE>(view, s, a, sums);
    gather_stage(p, b, inside, s + STAGES - 1, count); /* where the stage before was */
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  sm90_wgmma_wait<0>();
}

/* ---- C: blocks of a cluster add up their sums ---- */

/*
 * Sums in shared memory, where the operands lay: [owner][row][its columns], for the block that finishes these columns.
 * What is another's goes through memory, which is faster than from one shared memory to another:
 *   p.partial [unit][owner][sender][row][the owner's columns]
 * Groups of eight columns are swapped by row, so that the rows of a store do not meet in the same banks.
 */
static_assert(ROWS * COLS * 4 <= ESMM_FUSED16_SHARED, "sums lie where the operands lay");

/* Where a row's column is, among an owner's 1 << log_mine columns. */
static __device__ __forceinline__ int swapped(int row, int col, int log_mine)
{
  return col ^ (row * 8 & ((1 << log_mine) - 1) & 56);
}

static __device__ __forceinline__ void store_sums(int log_mine, const float (&sums)[SUMS])
{
  const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32, row = warp * 16 + lane / 4;
  const int first = (int)threadIdx.x / 128 * (COLS / 2) + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < SUMS; j += 4) {
    const int col = first + j * 2, at = swapped(row, col & ((1 << log_mine) - 1), log_mine);
    float *to = (float *)shared + (((col >> log_mine) * ROWS + row) << log_mine) + at;
    *(float2 *)to = make_float2(sums[j], sums[j + 1]);
    *(float2 *)(to + (8 << log_mine)) = make_float2(sums[j + 2], sums[j + 3]);
  }
}

/* The sums that `sender` has for `owner`. */
static __device__ __forceinline__ float *partial_of(const esmm_fused16_params &p, int unit, int owner, int sender,
                                                    int log_mine)
{
  const int64_t part = ((int64_t)unit * p.ranks + owner) * p.ranks + sender;
  return (float *)p.partial + (part * ROWS << log_mine);
}

/* One thread for each other block of the cluster: its sums, so many rows, to memory. */
static __device__ __forceinline__ void send(const esmm_fused16_params &p, int unit, int rank, int rows, int log_mine)
{
  const int owner = (int)threadIdx.x;
  if (owner >= p.ranks || owner == rank)
    return;
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(partial_of(p, unit, owner, rank, log_mine)),
      "r"(sm90_address((float *)shared + (owner * ROWS << log_mine))), "r"(rows * 4 << log_mine)
      : "memory");
  sm90_bulk_commit();
  sm90_bulk_wait();
  sm90_fence_async_all();
  __threadfence();
}

/* Everything that the cluster's blocks have written is there. */
static __device__ __forceinline__ void cluster_sync(void)
{
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Four sums of a row from block r, `at` on: this block's own, or from memory. */
static __device__ __forceinline__ float4 read_sums(const esmm_fused16_params &p, int unit, int rank, int r, int row,
                                                   int at, int log_mine)
{
  if (r == rank)
    return *(const float4 *)((const float *)shared + ((rank * ROWS + row) << log_mine) + at);
  return __ldcg((const float4 *)(partial_of(p, unit, rank, r, log_mine) + (row << log_mine) + at));
}

/* Eight columns of a row, from `col` on: the sums of all blocks in the order of the ranks, and what follows. at: where
   they are in a row of sums. */
template <int RANKS>
static __device__ __forceinline__ void finish_columns(const esmm_fused16_params &p, int unit, int rank, int row0,
                                                      int row, int col, int at, int log_mine)
{
  float4 low[RANKS], high[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) { /* all are asked for before the first is needed */
    low[r] = read_sums(p, unit, rank, r, row, at, log_mine);
    high[r] = read_sums(p, unit, rank, r, row, at + 4, log_mine);
  }
  float x[8] = {low[0].x, low[0].y, low[0].z, low[0].w, high[0].x, high[0].y, high[0].z, high[0].w};
#pragma unroll
  for (int r = 1; r < RANKS; r++) {
    const float y[8] = {low[r].x, low[r].y, low[r].z, low[r].w, high[r].x, high[r].y, high[r].z, high[r].w};
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] += y[i];
  }
  if (has_vectors(p.epilogue.c) && col + 8 <= p.n) {
    finish_8(p.epilogue, row0 + row, col, x);
    return;
  }
  float *spare = (float *)shared + ((rank * ROWS + row) << log_mine) + at; /* nobody else reads it: one by one */
  *(float4 *)spare = make_float4(x[0], x[1], x[2], x[3]);
  *(float4 *)(spare + 4) = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll 1
  for (int i = 0; i < min(8, p.n - col); i++)
    finish_element(p.epilogue, row0 + row, col + i, spare[i]);
}

template <int RANKS>
static __device__ __forceinline__ void finish_rows(const esmm_fused16_params &p, int unit, int rank, int row0, int col0,
                                                   int rows, int log_mine)
{
#pragma unroll 1
  for (int e = (int)threadIdx.x * 8; e < rows << log_mine; e += THREADS * 8) {
    const int row = e >> log_mine, mine = e & ((1 << log_mine) - 1), col = col0 + (rank << log_mine) + mine;
    if (col < p.n)
      finish_columns<RANKS>(p, unit, rank, row0, row, col, swapped(row, mine, log_mine), log_mine);
  }
}

/* Every block of a cluster finishes its share of the tile's columns. Nobody multiplies any more. */
static __device__ __forceinline__ void finish(const esmm_fused16_params &p, int unit, int rank, int row0, int col0,
                                              const float (&sums)[SUMS])
{
  const int log_mine = 31 - __clz(COLS / p.ranks), rows = min(ROWS, p.m - row0);
  store_sums(log_mine, sums);
  sm90_fence_async();
  __syncthreads();
  if (p.ranks > 1) {
    send(p, unit, rank, rows, log_mine);
    __syncwarp();
    cluster_sync();
  }
  static_assert(ESMM_FUSED16_RANKS == 8, "a case for each");
  if (p.ranks == 8)
    finish_rows<8>(p, unit, rank, row0, col0, rows, log_mine);
  else if (p.ranks == 4)
    finish_rows<4>(p, unit, rank, row0, col0, rows, log_mine);
  else if (p.ranks == 2)
    finish_rows<2>(p, unit, rank, row0, col0, rows, log_mine);
  else
    finish_rows<1>(p, unit, rank, row0, col0, rows, log_mine);
}

/* ---- a block ---- */

template <esmm_dtype DTYPE, bool BY_K> static __device__ __forceinline__ void fused16(const esmm_fused16_params &p)
{
  const int rank = (int)blockIdx.x % p.ranks, unit = (int)blockIdx.x / p.ranks;
  const int row0 = unit / p.tiles * ROWS, col0 = unit % p.tiles * COLS;
  const int first = rank * p.range, last = min(p.k, first + p.range);
  const int64_t b_col = (int64_t)col0 * 2 + (int)threadIdx.x % 32 * 16; /* bytes */
  const bool inside = b_col < p.b_row;
  const char *b = (const char *)p.b + (inside ? b_col : 0);
  if (threadIdx.x == 0) {
    sm90_barrier_init(&memory()->full[0], 1);
    sm90_barrier_init(&memory()->full[1], 1);
    sm90_fence_init();
    for (int i = 0; i < 2; i++)
      if (first + i * CHUNK < last)
        load_chunk<BY_K>(p, i, row0, first + i * CHUNK, last);
  }
  __syncthreads();
  float sums[SUMS];
#pragma unroll
  for (int j = 0; j < SUMS; j++)
    sums[j] = 0.0f;
  int count = 0;
#pragma unroll 1
  for (int i = -1; first + i * CHUNK < last; i++) { /* chunk i is multiplied, i + 1 looked at */
    const int k = first + i * CHUNK, which = i & 1, next = last - k - CHUNK;
    const bool early = count <= STAGE_K; /* all of A's operands are taken at once, and the boxes are free */
    const bool loads = threadIdx.x == 0 && i >= 0 && k + 2 * CHUNK < last;
    const char *rows = b + (int64_t)k * p.b_row;
    uint32_t a[STEPS][4];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
      gather_stage(p, rows, inside, s, count);
    take_stage<BY_K>(which, 0, count, a);
    if (early) {
      __syncthreads();
      if (loads)
        load_chunk<BY_K>(p, which, row0, k + 2 * CHUNK, last);
    }
    if (next > 0) {
      sm90_barrier_wait(&memory()->full[!which], (uint32_t)(i + 1) / 2 & 1);
      const uint32_t word = look<BY_K>(!which, next);
      if (threadIdx.x % 32 == 0)
        memory()->words[threadIdx.x / 32] = word;
    }
    multiply_chunk<DTYPE, BY_K>(p, rows, inside, which, count, a, sums);
    __syncthreads(); /* boxes and list are free, the words are there */
    if (!early && loads)
      load_chunk<BY_K>(p, which, row0, k + 2 * CHUNK, last);
    if (next > 0)
      count = write_list();
    __syncthreads();
  }
  finish(p, unit, rank, row0, col0, sums);
}

#define FUSED16(name, dtype, by_k)                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, ESMM_FUSED16_BLOCKS) \
      name(const __grid_constant__ esmm_fused16_params p)                    \
  {                                                                          \
    if (!not_selected(p.selector))                                           \
      fused16<dtype, by_k>(p);                                               \
  }

FUSED16(esmm_fused16_bf16, ESMM_BF16, false)
FUSED16(esmm_fused16_bf16_by_k, ESMM_BF16, true)
FUSED16(esmm_fused16_f16, ESMM_F16, false)
FUSED16(esmm_fused16_f16_by_k, ESMM_F16, true)
