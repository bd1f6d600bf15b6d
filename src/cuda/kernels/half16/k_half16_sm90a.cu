/*
 * k_half16_sm90a.cu: bf16 and fp16 with few nonzeros anywhere in A, on Hopper: A becomes halves of 2:4 in this call
 * (split.cuh), and the sparse tensor core (wgmma.sp) takes the k's of B that belong to two of each four. What has no
 * room there, the overflow, is added to the sums in registers: C is that of all of A.
 *
 *                 B: 256 columns of C         a stage: 64 k's
 *             k  +----------------------+       B  256 columns by 64 k's, 32 KB, by TMA
 *             v  +----------------------+       A  a half's strip of 128 rows, values and places, 9 KB
 *   A    64 rows | warpgroup 0's sums   |
 *        64 rows | warpgroup 1's sums   |     a cluster: two blocks, the same columns and neighbouring
 *                +----------------------+     strips; each loads half of B and sends it to both
 *
 * Three launches: split, list, multiply. The last has persistent blocks, one loading warp and two multiplying
 * warpgroups, five stages. A tile goes through all k's of the first half, then through those of patches that have a
 * second one. Shared memory limits it, as it does k_nm16_sm90a.cu: an instruction reads 16 KB of B and 2 KB of A, 144
 * cycles for 128 of arithmetic. An overflow element costs 512 bytes of B a tile, from the second-level cache, while
 * nothing is multiplied: 96 of them in 256 rows by 64 k's take about as long as a stage, and from there on the second
 * half is faster.
 */
#include "cuda/kernels/half16/store.cuh"
#include "cuda/kernels/nm16/pairs.cuh"

#define STAGES ESMM_HALF16_STAGES
#define STAGE ESMM_HALF16_STAGE
#define STAGE_B (ESMM_HALF16_COLS * ESMM_NM16_K * 2)
static_assert(STAGE == STAGE_B + ESMM_NM16_BLOCK && STAGE % 1024 == 0 &&
                  STAGES * STAGE + 16 * STAGES <= ESMM_HALF16_SHARED && ESMM_HALF16_CLUSTER == PAIR &&
                  STAGE_B == 4 * WGMMA16_PANEL,
              "params.h gives the host another size");

/* ---- loading: one thread ---- */

static __device__ __forceinline__ void load_tiles(const esmm_half16_params &p, char *memory, uint64_t *full,
                                                  uint64_t *empty, int across, int rank)
{
  const int count = p.pairs * across;
  int slot = 0;
  uint32_t phase = 0;
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    const pair_tile t = tile_at(p, i, across);
    const uint32_t *again = (const uint32_t *)p.again + (int64_t)t.pair * p.blocks;
    const int agains = __ldg((const int32_t *)p.agains + t.pair);
    const int64_t strip = esmm_nm16_block_at(2 * t.pair + rank, 0, p.blocks);
    for (int s = 0; s < p.blocks + agains; s++) {
      const bool second = s >= p.blocks;
      const int block = second ? (int)__ldg(again + (s - p.blocks)) : s;
      char *stage = memory + slot * STAGE;
      sm90_barrier_wait(&empty[slot], phase ^ 1);
      sm90_barrier_expect(&full[slot], STAGE);
      sm90_bulk_load(stage + STAGE_B, (const char *)p.half[second] + strip + (int64_t)block * ESMM_NM16_BLOCK,
                     ESMM_NM16_BLOCK, &full[slot]);
#pragma unroll
      for (int j = 0; j < 2; j++) { /* this block's two of four panels of 64 columns */
        const int panel = 2 * rank + j;
        sm90_tma_load_multicast(stage + panel * WGMMA16_PANEL, &p.map_b, t.col + 64 * panel, block * ESMM_NM16_K,
                                &full[slot], 3);
      }
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}

/* ---- multiplying: two warpgroups ---- */

/* A multiplying thread's place in tile i: the first of its two rows, the tile's first column. */
typedef struct half16_place {
  int row, col, lane;
} half16_place;

/* Computed where it is used: the compiler would keep it over loops that have no registers left. */
static __device__ __forceinline__ half16_place place_now(const esmm_half16_params &p, int i, int across, int rank)
{
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  asm volatile("" : "+r"(i));
  const pair_tile t = tile_at(p, i, across);
  const int lane = thread % 32, row0 = (2 * t.pair + rank) * (PATCH_ROWS / 2) + (thread - 128) / 32 * 16;
  const half16_place place = {row0 + lane / 4, t.col, lane};
  return place;
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_tiles(const esmm_half16_params &p, char *memory, uint64_t *full,
                                                      uint64_t *empty, int across, int rank)
{
  const int count = p.pairs * across, thread = (int)threadIdx.x - 128, group = thread / 128, lane = thread % 32;
  const uint32_t stages = sm90_address(memory), full_at = sm90_address(full);
  int slot = 0, before = 0;
  uint32_t phase = 0;
  /* A warp releases a stage in both blocks: both load the next one. */
  const auto let_go = [&](int which) {
    if (lane < PAIR)
      sm90_barrier_arrive_cluster(sm90_address_at(&empty[which], (uint32_t)lane));
  };
  /* Count of k blocks that tile i goes through again; loaded a tile ahead, so that no warp waits for it. */
  const auto agains_of = [&](int i) {
    return i < count ? __ldg((const int32_t *)p.agains + tile_at(p, i, across).pair) : 0;
  };
  int agains = agains_of((int)blockIdx.x / PAIR);
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    const half16_place at = place_now(p, i, across, rank);
    const int steps = p.blocks + agains;
    agains = agains_of(i + (int)gridDim.x / PAIR);
    const half16_overflow overflow = find_overflow(p, at.row); /* looked at when the sums are there */
    float sums[LANE_SUMS];
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
      sums[j] = 0.0f;
    const auto step = [&](int s) {
      const uint32_t stage = stages + (uint32_t)(slot * STAGE);
      sm90_barrier_wait_at(full_at + (uint32_t)slot * 8, phase);
      /* A is the sparse one, in the place of B. */
      nm16_stage<DTYPE, 1>(sums, stage, stage + STAGE_B + (uint32_t)(group * ESMM_NM16_HALF), (uint32_t)thread % 128);
      if (s > 0) {
        sm90_wgmma_wait<1>();
        let_go(before);
      }
      before = slot;
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    };
#pragma unroll 1
    for (int s = 0; s < steps; s += 2) {
      step(s);
      if (s + 1 < steps)
        step(s + 1);
    }
    half16_begun begun = begin_overflow(p, overflow, at.row, at.col, at.lane);
    sm90_wgmma_wait<0>();
    sm90_wgmma_hold(sums);
    let_go(before);
    const half16_place now = place_now(p, i, across, rank);
    turn_sums(sums, now.lane);
    if (now.row - now.lane / 4 < p.m) {
      add_overflow<DTYPE>(p, sums, overflow, begun, now.row, now.col, now.lane);
      store_sums(p, sums, now.row, now.col, now.lane);
    }
  }
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void multiply(const esmm_half16_params &p)
{
  extern __shared__ __align__(1024) char memory[];
  uint64_t *full = (uint64_t *)(memory + STAGES * STAGE), *empty = full + STAGES;
  if (not_selected(p.selector))
    return;
  const int rank = (int)cluster_rank(), across = (p.n + ESMM_HALF16_COLS - 1) / ESMM_HALF16_COLS;
  run_pair<STAGES>(
      full, empty, p.map_b, [&]() { load_tiles(p, memory, full, empty, across, rank); },
      [&]() { multiply_tiles<DTYPE>(p, memory, full, empty, across, rank); });
}

#define HALF16(id, dtype)                                              \
  extern "C" __global__ void __launch_bounds__(ESMM_HALF16_THREADS, 1) \
      esmm_half16_##id(const __grid_constant__ esmm_half16_params p)   \
  {                                                                    \
    multiply<dtype>(p);                                                \
  }

HALF16(bf16, ESMM_BF16)
HALF16(f16, ESMM_F16)
