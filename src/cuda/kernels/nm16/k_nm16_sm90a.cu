/*
 * k_nm16_sm90a.cu: bf16 and fp16 with 2:4 weights on Hopper: half of B's k's are not there, and the sparse tensor core
 * (wgmma.sp) takes the k's of A that belong to the others.
 *
 * The sparse operand of wgmma.sp is the one with the rows, so C is computed transposed, a warpgroup 64 columns of C:
 *
 *                   A: 256 rows of C            a stage: 64 k's
 *               k  +----------------------+       A  256 rows by 64 k's, 32 KB, by TMA
 *               v  +----------------------+       B  128 columns, values and places, 9 KB, one bulk copy
 *   B' 64 columns  | warpgroup 0's sums   |
 *      64 columns  | warpgroup 1's sums   |     a cluster: two blocks, the same rows and neighbouring columns; each
 *                  +----------------------+     loads half of A and sends it to both
 *
 * esmm_nm16_<dtype> (tall, by_k): persistent blocks, one loading warp and two multiplying warpgroups, five stages.
 * Shared memory limits it: an instruction of 256 rows reads 16 KB of A and 2 KB of B, 144 cycles for 128 of arithmetic;
 * without the sharing in clusters it would be the second-level cache's wires. The clock goes down, too.
 *
 * esmm_nm16_<dtype>_<rows>, for few rows of A (16, 32, 64, 128 at most in a tile): nothing is persistent, the blocks of
 * a cluster share the tile's k's, and reading B limits it, 0.5625 of its bytes. Each block writes its sums to its
 * shared memory; after a cluster barrier each finishes a share of the tile, adding the parts in the order of the k's:
 * the same bits in every run.
 */
#include "cuda/kernels/nm16/pairs.cuh"
#include "cuda/kernels/nm16/store.cuh"

#define STEPS 64 /* k's of a stage */
#define BLOCK ESMM_NM16_BLOCK
static_assert(STEPS == ESMM_NM16_K && HALF_COLS * 2 == ESMM_NM16_COLS, "a stage is a block of B");

/* ---- clusters ---- */

/* Four floats at an address of the cluster's shared memory. */
static __device__ __forceinline__ float4 cluster_load4(uint32_t from)
{
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/* ---- many rows: persistent pairs of blocks ---- */

#define TALL ESMM_NM16_TALL
#define TALL_A (TALL * STEPS * 2)
#define TALL_STAGE (TALL_A + BLOCK)
#define TALL_STAGES ESMM_NM16_TALL_STAGES
static_assert(TALL_STAGES * TALL_STAGE + 2 * ESMM_NM16_STAGING + 16 * TALL_STAGES <= ESMM_NM16_TALL_SHARED &&
                  TALL_STAGE % 1024 == 0 && ESMM_NM16_CLUSTER == PAIR,
              "params.h gives the host another size");

typedef struct tall_tile {
  int row, tile; /* first row of C; tile of 128 columns */
} tall_tile;

/* Tiles come in groups of pairs of columns, row by row, so that what runs at the same time shares both operands in the
   second-level cache. */
static __device__ __forceinline__ tall_tile tall_at(const esmm_nm16_params &p, int index, int pairs, int rows, int rank)
{
  const int in_group = p.group * rows, group = index / in_group, place = index - group * in_group;
  const int width = min(p.group, pairs - group * p.group);
  const tall_tile t = {place / width * TALL, (group * p.group + place % width) * PAIR + rank};
  return t;
}

template <bool BY_K>
static __device__ __forceinline__ void load_tall(const esmm_nm16_params &p, char *memory, uint64_t *full,
                                                 uint64_t *empty, int tiles, int pairs, int rows, int rank)
{
  const int count = pairs * rows;
  int slot = 0;
  uint32_t phase = 0;
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    const tall_tile t = tall_at(p, i, pairs, rows, rank);
    const char *b = (const char *)p.b + esmm_nm16_block_at(min(t.tile, tiles - 1), 0, p.blocks);
    for (int block = 0; block < p.blocks; block++, b += BLOCK) {
      char *stage = memory + slot * TALL_STAGE;
      sm90_barrier_wait(&empty[slot], phase ^ 1);
      sm90_barrier_expect(&full[slot], TALL_STAGE);
      sm90_bulk_load(stage + TALL_A, b, BLOCK, &full[slot]);
#pragma unroll
      for (int j = 0; j < 2; j++) { /* this block's two of four panels of 64 rows */
        const int panel = 2 * rank + j, row = t.row + 64 * panel, k = block * STEPS;
        sm90_tma_load_multicast(stage + panel * WGMMA16_PANEL, &p.map_a, BY_K ? row : k, BY_K ? k : row, &full[slot],
                                3);
      }
      if (++slot == TALL_STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}

template <esmm_dtype DTYPE, bool BY_K>
static __device__ __forceinline__ void multiply_tall(const esmm_nm16_params &p, char *memory, uint64_t *full,
                                                     uint64_t *empty, int pairs, int rows, int rank)
{
  const int count = pairs * rows, thread = (int)threadIdx.x - 128, group = thread / 128, lane = thread % 32;
  const uint32_t stages = sm90_address(memory), full_at = sm90_address(full);
  char *staging = memory + TALL_STAGES * TALL_STAGE + group * ESMM_NM16_STAGING;
  int slot = 0, before = 0;
  uint32_t phase = 0;
  /* A warp releases a stage in both blocks: both load the next one. */
  const auto let_go = [&](int which) {
    if (lane < PAIR)
      sm90_barrier_arrive_cluster(sm90_address_at(&empty[which], (uint32_t)lane));
  };
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    float sums[TALL / 2];
#pragma unroll
    for (int j = 0; j < TALL / 2; j++)
      sums[j] = 0.0f;
    const auto step = [&](int block) {
      const uint32_t stage = stages + (uint32_t)(slot * TALL_STAGE);
      sm90_barrier_wait_at(full_at + (uint32_t)slot * 8, phase);
      nm16_stage<DTYPE, BY_K>(sums, stage, stage + TALL_A + (uint32_t)(group * ESMM_NM16_HALF), (uint32_t)thread % 128);
      if (block > 0) {
        sm90_wgmma_wait<1>();
        let_go(before);
      }
      before = slot;
      if (++slot == TALL_STAGES) {
        slot = 0;
        phase ^= 1;
      }
    };
#pragma unroll 1
    for (int block = 0; block < p.blocks; block += 2) {
      step(block);
      if (block + 1 < p.blocks)
        step(block + 1);
    }
    sm90_wgmma_wait<0>();
    sm90_wgmma_hold(sums);
    let_go(before);
    const tall_tile t = tall_at(p, i, pairs, rows, rank);
    const int col = t.tile * ESMM_NM16_COLS + group * HALF_COLS;
    if (p.registers && col + HALF_COLS <= p.n)
      store_finished(p, sums, t.row, col, thread % 128, staging, 1 + group);
    else if (col < p.n)
      store_any(p, sums, t.row, col, thread % 128, (float *)staging, 1 + group);
  }
}

template <esmm_dtype DTYPE, bool BY_K> static __device__ __forceinline__ void tall(const esmm_nm16_params &p)
{
  extern __shared__ __align__(1024) char memory[];
  uint64_t *full = (uint64_t *)(memory + TALL_STAGES * TALL_STAGE + 2 * ESMM_NM16_STAGING), *empty = full + TALL_STAGES;
  if (not_selected(p.selector))
    return;
  const int rank = (int)cluster_rank(), tiles = (int)esmm_nm16_tiles(p.n);
  const int pairs = (tiles + PAIR - 1) / PAIR, rows = (p.m + TALL - 1) / TALL;
  run_pair<TALL_STAGES>(
      full, empty, p.map_a, [&]() { load_tall<BY_K>(p, memory, full, empty, tiles, pairs, rows, rank); },
      [&]() { multiply_tall<DTYPE, BY_K>(p, memory, full, empty, pairs, rows, rank); });
}

/* ---- few rows: the blocks of a cluster share k ---- */

#define LOADER 256  /* the first thread of the loading warp */
#define SUMS_LD 132 /* floats of a row of sums in shared memory: rows of four lanes lie in different banks */

template <int ROWS> struct low_stage {
  enum {
    A = ROWS * STEPS * 2, /* boxes of 64 rows, or of all of them */
    BOXES = ROWS > 64 ? ROWS / 64 : 1,
    BYTES = A + BLOCK,
    COUNT = ESMM_NM16_LOW_STAGES(ROWS)
  };
  static_assert(COUNT * BYTES + 16 * COUNT <= ESMM_NM16_LOW_SHARED(ROWS) && BYTES % 1024 == 0 &&
                    ROWS * SUMS_LD * 4 <= COUNT * BYTES,
                "params.h gives the host another size");
};

/* The tile's rows that this block finishes, every ranks-th: sums of all parts, in the order of the ranks. */
template <int ROWS>
static __device__ __forceinline__ void finish_low(const esmm_nm16_params &p, float *sums, int row0, int col0)
{
  enum { AT_ONCE = 4 }; /* parts that are on their way together */
  const int rank = (int)cluster_rank(), ranks = (int)cluster_ranks(), col = col0 + (int)threadIdx.x % 16 * 8;
  const bool vectors = has_vectors(p.epilogue.c);
#pragma unroll 1
  for (int r = (int)threadIdx.x / 16 * ranks + rank; r < ROWS; r += LOADER / 16 * ranks) {
    if (row0 + r >= p.m || col >= p.n)
      continue;
    float *mine = sums + r * SUMS_LD + threadIdx.x % 16 * 8;
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int part = 0; part < ranks; part += AT_ONCE) {
      float4 y[AT_ONCE][2];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const uint32_t from = sm90_address_at(mine, (uint32_t)min(part + j, ranks - 1));
        y[j][0] = cluster_load4(from);
        y[j][1] = cluster_load4(from + 16);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
        if (part + j < ranks) {
          const float z[8] = {y[j][0].x, y[j][0].y, y[j][0].z, y[j][0].w, y[j][1].x, y[j][1].y, y[j][1].z, y[j][1].w};
#pragma unroll
          for (int i = 0; i < 8; i++)
            x[i] += z[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) /* only this thread reads them */
      mine[i] = x[i];
    finish_row_of_8(p.epilogue, row0 + r, col, p.n, vectors, x, mine);
  }
}

template <esmm_dtype DTYPE, int ROWS> static __device__ __forceinline__ void low(const esmm_nm16_params &p)
{
  typedef low_stage<ROWS> stage_of;
  extern __shared__ __align__(1024) char memory[];
  uint64_t *full = (uint64_t *)(memory + stage_of::COUNT * stage_of::BYTES), *empty = full + stage_of::COUNT;
  if (not_selected(p.selector))
    return;
  const int ranks = (int)cluster_ranks(), rank = (int)cluster_rank(), unit = (int)blockIdx.x / ranks;
  const int rows = (p.m + ROWS - 1) / ROWS, row0 = unit % rows * ROWS, tile = unit / rows;
  const int first = (int)((int64_t)p.blocks * rank / ranks), last = (int)((int64_t)p.blocks * (rank + 1) / ranks);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stage_of::COUNT; i++) {
      sm90_barrier_init(&full[i], 1);
      sm90_barrier_init(&empty[i], 8);
    }
    sm90_fence_init();
  }
  __syncthreads();
  int slot = 0, before = 0;
  uint32_t phase = 0;
  const auto next = [&]() {
    before = slot;
    if (++slot == stage_of::COUNT) {
      slot = 0;
      phase ^= 1;
    }
  };
  if (threadIdx.x == LOADER) {
    const char *b = (const char *)p.b + esmm_nm16_block_at(tile, first, p.blocks);
    for (int block = first; block < last; block++, b += BLOCK) {
      char *stage = memory + slot * stage_of::BYTES;
      sm90_barrier_wait(&empty[slot], phase ^ 1);
      sm90_barrier_expect(&full[slot], stage_of::BYTES);
      sm90_bulk_load(stage + stage_of::A, b, BLOCK, &full[slot]);
#pragma unroll
      for (int j = 0; j < stage_of::BOXES; j++)
        sm90_tma_load(stage + j * WGMMA16_PANEL, &p.map_a, block * STEPS, row0 + 64 * j, &full[slot]);
      next();
    }
  }
  float *const all = (float *)memory;
  if (threadIdx.x < LOADER) {
    const int group = (int)threadIdx.x / 128, thread = (int)threadIdx.x % 128, lane = thread % 32;
    float sums[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
      sums[i] = 0.0f;
    const auto step = [&](bool waits) {
      const uint32_t stage = sm90_address(memory) + (uint32_t)(slot * stage_of::BYTES);
      sm90_barrier_wait(&full[slot], phase);
      nm16_stage<DTYPE, 0>(sums, stage, stage + stage_of::A + (uint32_t)(group * ESMM_NM16_HALF), (uint32_t)thread);
      if (waits) {
        sm90_wgmma_wait<1>();
        if (lane == 0)
          sm90_barrier_arrive(&empty[before]);
      }
      next();
    };
#pragma unroll 1
    for (int block = first; block < last; block += 2) {
      step(block > first);
      if (block + 1 < last)
        step(true);
    }
    sm90_wgmma_wait<0>();
    sm90_wgmma_hold(sums);
    meet(1, LOADER); /* no stage is read any more */
    float *to = all + thread % 4 * 2 * SUMS_LD + group * HALF_COLS + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
      to[(i / 4 * 8 + i % 2) * SUMS_LD + i / 2 % 2 * 8] = sums[i];
  }
  __syncwarp();
  cluster_sync(); /* all parts are there */
  if (threadIdx.x < LOADER)
    finish_low<ROWS>(p, all, row0, tile * ESMM_NM16_COLS);
  __syncwarp();
  cluster_sync(); /* and have been read */
}

/* ---- the kernels ---- */

#define TALL_KERNELS(id, dtype)                                           \
  extern "C" __global__ void __launch_bounds__(ESMM_NM16_TALL_THREADS, 1) \
      esmm_nm16_##id(const __grid_constant__ esmm_nm16_params p)          \
  {                                                                       \
    tall<dtype, false>(p);                                                \
  }                                                                       \
  extern "C" __global__ void __launch_bounds__(ESMM_NM16_TALL_THREADS, 1) \
      esmm_nm16_##id##_by_k(const __grid_constant__ esmm_nm16_params p)   \
  {                                                                       \
    tall<dtype, true>(p);                                                 \
  }

#define LOW_KERNEL(id, dtype, rows, blocks)                                   \
  extern "C" __global__ void __launch_bounds__(ESMM_NM16_LOW_THREADS, blocks) \
      esmm_nm16_##id##_##rows(const __grid_constant__ esmm_nm16_params p)     \
  {                                                                           \
    low<dtype, rows>(p);                                                      \
  }

TALL_KERNELS(bf16, ESMM_BF16)
TALL_KERNELS(f16, ESMM_F16)
LOW_KERNEL(bf16, ESMM_BF16, 16, 2)
LOW_KERNEL(bf16, ESMM_BF16, 32, 2)
LOW_KERNEL(bf16, ESMM_BF16, 64, 2)
LOW_KERNEL(bf16, ESMM_BF16, 128, 1)
LOW_KERNEL(f16, ESMM_F16, 16, 2)
LOW_KERNEL(f16, ESMM_F16, 32, 2)
LOW_KERNEL(f16, ESMM_F16, 64, 2)
LOW_KERNEL(f16, ESMM_F16, 128, 1)
