/*
 * ffn_two16_sm90a.cu: products of a layer where an operand has two of each four values, on Hopper: bf16 and fp16.
 * pack.cuh chooses and packs the two in one pass; here the sparse tensor core (wgmma.sp) takes the k's of B that belong
 * to them.
 *
 *                  B: 256 columns              a stage: 64 k's
 *              k  +----------------------+       B  256 columns by 64 k's, 32 KB, by TMA
 *              v  +----------------------+       A  128 lines, values and places, 9 KB, one bulk copy
 *   A    64 lines | warpgroup 0's sums   |
 *        64 lines | warpgroup 1's sums   |     a cluster: two blocks, the same columns and neighbouring lines; each
 *                 +----------------------+     loads half of B and sends it to both
 *
 * Persistent blocks, one loading warp and two multiplying warpgroups, as k_half16_sm90a.cu and k_nm16_sm90a.cu have
 * them. What differs: nothing is added to the sums but, in kernels with `others`, the product of the columns that do
 * not go sparse, as further stages with a dense A of 16 KB: one C, written once. And C lies either way: its rows are
 * the lines of A, or, turned, its columns are (the gradient of W1).
 *
 *   esmm_ffn_two16_<dtype>_<lines>[_others]   lines: of B as it lies in memory: "k" one k's columns, "n" one column's
 *                                             k's
 */
#include "cuda/ffn/pack.cuh"
#include "cuda/kernels/half16/turned.cuh"
#include "cuda/kernels/nm16/pairs.cuh"
#include "cuda/kernels/nm16/store.cuh"

#define STAGE_B (ESMM_FFN_TWO16_COLS * ESMM_NM16_K * 2)
#define DENSE_A (ESMM_NM16_COLS * ESMM_NM16_K * 2)
static_assert(ESMM_FFN_TWO16_CLUSTER == PAIR && STAGE_B == 4 * WGMMA16_PANEL && DENSE_A == 2 * WGMMA16_PANEL &&
                  ESMM_FFN_TWO16_COLS == ESMM_HALF16_COLS,
              "a tile is that of k_half16_sm90a.cu");

template <bool OTHERS> struct ring {
  enum {
    STAGES = ESMM_FFN_TWO16_STAGES(OTHERS),
    STAGE = ESMM_FFN_TWO16_STAGE(OTHERS), /* B, then A */
    STAGING = STAGES * STAGE,             /* where sums that are turned go through */
    BARRIERS = STAGING + 2 * ESMM_NM16_STAGING
  };
  static_assert(STAGE == STAGE_B + (OTHERS ? DENSE_A : ESMM_NM16_BLOCK) && STAGE % 1024 == 0 &&
                    BARRIERS + 16 * STAGES <= ESMM_FFN_TWO16_SHARED(OTHERS) && BARRIERS % 8 == 0,
                "params.h gives the host another size");
};

/* ---- loading: one thread ---- */

/* This block's two of four panels of 64 columns of B, to both blocks. */
template <bool BY_K>
static __device__ __forceinline__ void load_b(const esmm_tensor_map &map, char *stage, int col, int k, int rank,
                                              uint64_t *full)
{
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int panel = 2 * rank + j, c = col + 64 * panel;
    sm90_tma_load_multicast(stage + panel * WGMMA16_PANEL, &map, BY_K ? c : k, BY_K ? k : c, full, 3);
  }
}

template <bool BY_K, bool OTHERS>
static __device__ __forceinline__ void load_tiles(const esmm_ffn_two16_params &p, char *memory, uint64_t *full,
                                                  uint64_t *empty, int across, int rank)
{
  typedef ring<OTHERS> of;
  const int count = p.pairs * across;
  int slot = 0;
  uint32_t phase = 0;
  const auto next = [&]() {
    if (++slot == of::STAGES) {
      slot = 0;
      phase ^= 1;
    }
  };
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    const pair_tile t = tile_at(p, i, across);
    const int strip = 2 * t.pair + rank;
    const char *a = (const char *)p.half + esmm_nm16_block_at(strip, 0, p.blocks);
    for (int block = 0; block < p.blocks; block++, a += ESMM_NM16_BLOCK) {
      char *stage = memory + slot * of::STAGE;
      sm90_barrier_wait(&empty[slot], phase ^ 1);
      sm90_barrier_expect(&full[slot], STAGE_B + ESMM_NM16_BLOCK);
      sm90_bulk_load(stage + STAGE_B, a, ESMM_NM16_BLOCK, &full[slot]);
      load_b<BY_K>(p.map_b, stage, t.col, block * ESMM_NM16_K, rank, &full[slot]);
      next();
    }
    if (OTHERS)
      for (int block = 0; block < p.others; block++) {
        char *stage = memory + slot * of::STAGE;
        const int k = block * ESMM_NM16_K;
        sm90_barrier_wait(&empty[slot], phase ^ 1);
        sm90_barrier_expect(&full[slot], STAGE_B + DENSE_A);
#pragma unroll
        for (int j = 0; j < 2; j++)
          sm90_tma_load(stage + STAGE_B + j * WGMMA16_PANEL, &p.map_side, k, strip * ESMM_NM16_COLS + 64 * j,
                        &full[slot]);
        load_b<BY_K>(p.map_others, stage, t.col, k, rank, &full[slot]);
        next();
      }
  }
}

/* ---- multiplying: two warpgroups ---- */

/* 64 packed lines of A at `a`, B at `b`; thread: of the warpgroup. Commits, does not wait. */
template <esmm_dtype DTYPE, int BY_K>
static __device__ __forceinline__ void multiply_packed(float (&sums)[LANE_SUMS], uint32_t a, uint32_t b,
                                                       uint32_t thread)
{
  const uint32_t places = sm90_load(a + ESMM_NM16_WORDS + thread * 4);
  const uint64_t view_a = nm16_view_of_b(a), view_b = nm16_view_of_a<BY_K>(b); /* there B is the sparse one */
  sm90_wgmma_fence();
  nm16<DTYPE, BY_K, 0>(sums, view_a, view_b, places);
  nm16<DTYPE, BY_K, 1>(sums, view_a + NM16_B_STEP, view_b + nm16_a_step<BY_K>::STEP, places);
  sm90_wgmma_commit();
}

/* 64 dense lines of A: 128 bytes each, 64 k's; 16 k's of such a line are 32 bytes, of lines of k's 16 lines. */
template <esmm_dtype DTYPE, int BY_K>
static __device__ __forceinline__ void multiply_dense(float (&sums)[LANE_SUMS], uint32_t a, uint32_t b)
{
  const uint64_t view_a = nm16_view_of_a<0>(a), view_b = nm16_view_of_a<BY_K>(b);
  sm90_wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; i++)
    wgmma16<DTYPE, 0, BY_K>(sums, view_a + (uint64_t)(2 * i), view_b + (uint64_t)((BY_K ? 16 * 128 / 16 : 2) * i));
  sm90_wgmma_commit();
}

/* C as store.cuh of k_nm16_sm90a.cu sees it, where A's lines are its columns. */
struct turned_c {
  const esmm_epilogue_params &epilogue;
  int m, n;
};

/* Sums of 64 lines by 256 columns. thread: of the warpgroup; line: its first. */
static __device__ __forceinline__ void store_tile(const esmm_ffn_two16_params &p, float (&sums)[LANE_SUMS], int line,
                                                  int col, int thread, char *staging, int barrier)
{
  if (p.turned) {
    const turned_c c = {p.epilogue, p.n, p.m};
    if (p.registers && line + HALF_COLS <= p.m)
      store_finished(c, sums, col, line, thread, staging, barrier);
    else if (line < p.m)
      store_any(c, sums, col, line, thread, (float *)staging, barrier);
    return;
  }
  const int lane = thread % 32, row = line + thread / 32 * 16;
  turn_sums(sums, lane);
  if (row < p.m)
    store_sums(p, sums, row + lane / 4, col, lane);
}

template <esmm_dtype DTYPE, bool BY_K, bool OTHERS>
static __device__ __forceinline__ void multiply_tiles(const esmm_ffn_two16_params &p, char *memory, uint64_t *full,
                                                      uint64_t *empty, int across, int rank)
{
  typedef ring<OTHERS> of;
  const int count = p.pairs * across, thread = (int)threadIdx.x - 128, group = thread / 128, lane = thread % 32;
  const uint32_t stages = sm90_address(memory), full_at = sm90_address(full);
  char *staging = memory + of::STAGING + group * ESMM_NM16_STAGING;
  int slot = 0, before = 0;
  uint32_t phase = 0;
  /* A warp signals to both blocks that it is done with a stage: both load the next. */
  const auto let_go = [&](int which) {
    if (lane < PAIR)
      sm90_barrier_arrive_cluster(sm90_address_at(&empty[which], (uint32_t)lane));
  };
  const auto next = [&]() {
    before = slot;
    if (++slot == of::STAGES) {
      slot = 0;
      phase ^= 1;
    }
  };
  for (int i = (int)blockIdx.x / PAIR; i < count; i += (int)gridDim.x / PAIR) {
    float sums[LANE_SUMS];
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
      sums[j] = 0.0f;
    const auto step = [&](int block) {
      const uint32_t stage = stages + (uint32_t)(slot * of::STAGE);
      sm90_barrier_wait_at(full_at + (uint32_t)slot * 8, phase);
      multiply_packed<DTYPE, BY_K>(sums, stage + STAGE_B + (uint32_t)(group * ESMM_NM16_HALF), stage,
                                   (uint32_t)thread % 128);
      if (block > 0) {
        sm90_wgmma_wait<1>();
        let_go(before);
      }
      next();
    };
#pragma unroll 1
    for (int block = 0; block < p.blocks; block += 2) {
      step(block);
      if (block + 1 < p.blocks)
        step(block + 1);
    }
    if (OTHERS) {
      sm90_wgmma_wait<0>(); /* sums that are on their way from one loop to the other would make all wgmma's wait */
      sm90_wgmma_hold(sums);
      let_go(before);
#pragma unroll 1
      for (int block = 0; block < p.others; block++) {
        const uint32_t stage = stages + (uint32_t)(slot * of::STAGE);
        sm90_barrier_wait_at(full_at + (uint32_t)slot * 8, phase);
        multiply_dense<DTYPE, BY_K>(sums, stage + STAGE_B + (uint32_t)(group * WGMMA16_PANEL), stage);
        if (block > 0) {
          sm90_wgmma_wait<1>();
          let_go(before);
        }
        next();
      }
    }
    sm90_wgmma_wait<0>();
    sm90_wgmma_hold(sums);
    let_go(before);
    const pair_tile t = tile_at(p, i, across);
    store_tile(p, sums, (2 * t.pair + rank) * ESMM_NM16_COLS + group * ESMM_NM16_LINES, t.col, thread % 128, staging,
               1 + group);
  }
}

template <esmm_dtype DTYPE, bool BY_K, bool OTHERS>
static __device__ __forceinline__ void multiply(const esmm_ffn_two16_params &p)
{
  typedef ring<OTHERS> of;
  extern __shared__ __align__(1024) char memory[];
  uint64_t *full = (uint64_t *)(memory + of::BARRIERS), *empty = full + of::STAGES;
  const int rank = (int)cluster_rank(), across = (p.n + ESMM_FFN_TWO16_COLS - 1) / ESMM_FFN_TWO16_COLS;
  run_pair<of::STAGES>(
      full, empty, p.map_b, [&]() { load_tiles<BY_K, OTHERS>(p, memory, full, empty, across, rank); },
      [&]() { multiply_tiles<DTYPE, BY_K, OTHERS>(p, memory, full, empty, across, rank); });
}

/* ---- the kernels ---- */

#define TWO16(id, dtype, by_k, others)                                     \
  extern "C" __global__ void __launch_bounds__(ESMM_FFN_TWO16_THREADS, 1)  \
      esmm_ffn_two16_##id(const __grid_constant__ esmm_ffn_two16_params p) \
  {                                                                        \
    multiply<dtype, by_k, others>(p);                                      \
  }

#define PACK(id, dtype, largest, others)                                                \
  extern "C" __global__ void __launch_bounds__(ESMM_FFN_PACK_FEATURES, largest ? 2 : 1) \
      esmm_ffn_pack_features_##id(const __grid_constant__ esmm_ffn_pack_params p)       \
  {                                                                                     \
    pack_features<dtype, largest, others>(p);                                           \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(ESMM_FFN_PACK_TOKENS, largest ? 4 : 2)   \
      esmm_ffn_pack_tokens_##id(const __grid_constant__ esmm_ffn_pack_params p)         \
  {                                                                                     \
    pack_tokens<dtype, largest, others>(p);                                             \
  }

TWO16(bf16_k, ESMM_BF16, true, false)
TWO16(bf16_n, ESMM_BF16, false, false)
TWO16(bf16_k_others, ESMM_BF16, true, true)
TWO16(bf16_n_others, ESMM_BF16, false, true)
TWO16(f16_k, ESMM_F16, true, false)
TWO16(f16_n, ESMM_F16, false, false)
TWO16(f16_k_others, ESMM_F16, true, true)
TWO16(f16_n_others, ESMM_F16, false, true)
PACK(bf16, ESMM_BF16, true, false)
PACK(bf16_others, ESMM_BF16, true, true)
PACK(bf16_any, ESMM_BF16, false, false)
PACK(bf16_any_others, ESMM_BF16, false, true)
PACK(f16, ESMM_F16, true, false)
PACK(f16_others, ESMM_F16, true, true)
PACK(f16_any, ESMM_F16, false, false)
PACK(f16_any_others, ESMM_F16, false, true)
