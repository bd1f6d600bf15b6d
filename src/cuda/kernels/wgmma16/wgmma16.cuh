/*
 * wgmma16.cuh: what the parts of k_wgmma16_sm90a.cu share: shared memory, units of work, meeting points of blocks.
 */
#ifndef ESMM_CUDA_WGMMA16_CUH
#define ESMM_CUDA_WGMMA16_CUH

#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/sm90.cuh"
#include "cuda/kernels/wgmma16/instructions.cuh"

#define TILE ESMM_TILE
#define PANEL WGMMA16_PANEL /* 64 lines of 128 bytes: a box */
static_assert(PANEL == ESMM_WGMMA16_BOX * ESMM_WGMMA16_BOX * 2 && ESMM_WGMMA16_BOX == ESMM_WGMMA16_K, "64 by 64");
#define RING_BYTES (4 * 6 * PANEL) /* of all stages */
#define FEEDERS 128                /* threads of the first warpgroup, which loads; the other two multiply */
#define WORKERS 256
#define MAX_STAGES 6
#define PACK_WARPS (WORKERS / 32) /* of pack.cuh: each has a buffer for what comes */
#define PACK_BLOCKS 4             /* and all of them a ring for what leaves */

/* A stage: panels of A and of B, 64 k's each, for COLS columns of C a block. */
template <int COLS> struct wgmma16_stage {
  enum {
    A = 2 * PANEL,
    B = COLS / 64 * PANEL,
    BYTES = A + B,
    COUNT = RING_BYTES / BYTES,
    SUMS = COLS / 2 /* a thread's share of 64 x COLS sums */
  };
};

/*
 * threadIdx.x, read where it is used. The compiler would keep values derived from plain threadIdx.x over loops that
 * have no registers left.
 */
static __device__ __forceinline__ int thread_now(void)
{
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/* Numbered barriers: 0 is __syncthreads. */
template <int ID, int THREADS> static __device__ __forceinline__ void meet(void)
{
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

/* The same for a warpgroup. */
static __device__ __forceinline__ void meet_group(int id)
{
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

/* Barrier over `all` blocks, one thread of each. meeting: two words that are 0 before, and after all have left. */
static __device__ __forceinline__ void wait_for_all(uint32_t *meeting, uint32_t all)
{
  uint32_t come;
  asm volatile("red.add.release.gpu.global.u32 [%0], 1;" ::"l"(meeting) : "memory");
  do
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(meeting) : "memory");
  while (come < all);
}

/* The same thread, off the critical path: the atomic's answer takes a while. */
static __device__ __forceinline__ void leave(uint32_t *meeting, uint32_t all)
{
  uint32_t left;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(left) : "l"(meeting + 1) : "memory");
  if (left == all - 1) { /* the last block */
    meeting[1] = 0;
    asm volatile("st.release.gpu.global.u32 [%0], 0;" ::"l"(meeting) : "memory");
  }
}

/* ---- units of work ---- */

/* One block's part of C, and of the k's. */
typedef struct wgmma16_unit {
  int row, col;    /* of its tile; may lie past C in the second block of a pair */
  int part, parts; /* along k; parts is 0 where stages of a tile are lent to this block, see turn_at */
  int tile;        /* number of its tile among the split or lent ones, for the sums */
} wgmma16_unit;

static __device__ __forceinline__ int ceil_div(int a, int b)
{
  return (a + b - 1) / b;
}

/*
 * Units are counted over pairs of blocks (clusters) where these share something, else over blocks. Tiles come in groups
 * of `group` tile rows, column by column, so that what runs at the same time shares rows of A and columns of B in the
 * second-level cache.
 */
typedef struct wgmma16_work {
  esmm_wgmma16_units u;
  int tiles_m, tiles_n, rank;
  int count, first, step;
} wgmma16_work;

/*
 * LENT. Where the last wave has tiles for more than half of the pairs, the idle pairs begin with a part of each: u.lent
 * stages of each such tile, laid end to end and cut into equal ranges, one for each idle pair. Their sums go to memory;
 * the tile's own pair adds them in the last wave. No pair waits: lent sums are there waves before. As more pairs lend
 * than take over, a range is longer than a tile's lent stages, and one tile's lie in two ranges at most. The second
 * range is computed first by its pair; the pair with the first range reaches this tile last, and adds that result.
 *
 *   pair        0         1         2         3         4 (idle at the end)
 *   begins                                              lent stages of 0, 1, 2, 3
 *   whole tiles 0 5 10    1 6 11    2 7 12    3 8 13    4 9 14
 *   ends        15        16        17        18
 */
typedef struct wgmma16_turn {
  wgmma16_unit unit;
  int from, to;  /* stages */
  uint32_t last; /* STAGE_... of the last one */
} wgmma16_turn;

static __device__ __forceinline__ wgmma16_work work_of(const esmm_wgmma16_params &p, int mode)
{
  wgmma16_work w;
  w.u = p.units[mode];
  const bool pairs = w.u.share != ESMM_WGMMA16_ALONE;
  w.rank = pairs ? (int)cluster_rank() : 0;
  const int m = ceil_div(p.m, TILE), n = ceil_div(p.n, w.u.cols);
  w.tiles_m = w.u.share == ESMM_WGMMA16_SHARE_B ? (m + 1) / 2 : m;
  w.tiles_n = w.u.share == ESMM_WGMMA16_SHARE_A ? (n + 1) / 2 : n;
  w.count = w.u.whole + (w.tiles_m * w.tiles_n - w.u.whole) * w.u.splits;
  w.first = pairs ? (int)blockIdx.x / ESMM_WGMMA16_CLUSTER : (int)blockIdx.x;
  w.step = pairs ? (int)gridDim.x / ESMM_WGMMA16_CLUSTER : (int)gridDim.x;
  return w;
}

static __device__ __forceinline__ wgmma16_unit unit_at(const wgmma16_work &w, int index)
{
  wgmma16_unit unit;
  const int rest = index - w.u.whole;
  const int tile = rest < 0 ? index : w.u.whole + rest / w.u.splits;
  unit.part = rest < 0 ? 0 : rest % w.u.splits;
  unit.parts = rest < 0 ? 1 : w.u.splits;
  const int in_group = w.u.group * w.tiles_n, group = tile / in_group, place = tile % in_group;
  const int height = min(w.u.group, w.tiles_m - group * w.u.group);
  const int i = group * w.u.group + place % height, j = place / height;
  unit.row = (w.u.share == ESMM_WGMMA16_SHARE_B ? 2 * i + w.rank : i) * TILE;
  unit.col = (w.u.share == ESMM_WGMMA16_SHARE_A ? 2 * j + w.rank : j) * w.u.cols;
  unit.tile = w.u.share == ESMM_WGMMA16_ALONE ? tile - w.u.whole : 2 * (tile - w.u.whole) + w.rank;
  return unit;
}

/*
 * A stage's word for consumers: its steps of 16 k's; whether it is its unit's last, the product is called off, or there
 * are no more units; with a unit's last stage, whether other pairs' sums follow it, and whether its own go to another
 * pair (LENT); from STAGE_ROWS on, its tile's rows.
 */
enum {
  STAGE_STEPS = 7,
  STAGE_STEPS_ALL = 4,
  STAGE_LAST = 8,
  STAGE_OFF = 16,
  STAGE_END = 32,
  STAGE_LENDS = 64,
  STAGE_RESUMES = 128,
  STAGE_ROWS = 8
};

/* The unit, sent with its last stage: consumers need not compute it. */
static __device__ __forceinline__ int4 unit_to_words(const wgmma16_unit &unit)
{
  return make_int4(unit.row, unit.col, unit.tile, unit.parts << 16 | unit.part);
}

static __device__ __forceinline__ wgmma16_unit unit_from_words(const int4 &words)
{
  const wgmma16_unit unit = {words.x, words.y, words.w & 0xffff, words.w >> 16, words.z};
  return unit;
}

/* Part `part` of `parts` of `all`: [from, to). */
static __device__ __forceinline__ void share(int all, int part, int parts, int &from, int &to)
{
  from = (int)((int64_t)all * part / parts);
  to = (int)((int64_t)all * (part + 1) / parts);
}

/* LENT: the range of an idle pair, counted from 0. */
static __device__ __forceinline__ void lent_range(const wgmma16_work &w, int idle, int &from, int &to)
{
  const int left = w.count - w.u.whole;
  share(left * w.u.lent, idle, w.step - left, from, to);
}

/* The idle pair with that stage. */
static __device__ __forceinline__ int lent_to(const wgmma16_work &w, int stage)
{
  const int left = w.count - w.u.whole;
  return (int)(((int64_t)(stage + 1) * (w.step - left) - 1) / (left * w.u.lent));
}

/* This pair's or block's units before its first whole tile. */
static __device__ __forceinline__ int count_lent(const wgmma16_work &w)
{
  const int left = w.count - w.u.whole;
  if (!w.u.lent || w.first < left)
    return 0;
  int from, to;
  lent_range(w, w.first - left, from, to);
  return ceil_div(to, w.u.lent) - from / w.u.lent;
}

/*
 * The i-th unit of a pair or block. The first `before` are lent to it and have unit.parts 0. unit.part of a tile with
 * lent stages: the number of pairs before this one. LENDS: there may be such tiles.
 */
template <bool LENDS>
static __device__ __forceinline__ wgmma16_turn turn_at(const wgmma16_work &w, int steps, int i, int before)
{
  const int lent = w.u.lent;
  wgmma16_turn turn;
  turn.last = 0;
  if (!LENDS || i >= before) {
    const int index = w.first + (i - before) * w.step;
    turn.unit = unit_at(w, index);
    share(steps, turn.unit.part, turn.unit.parts, turn.from, turn.to);
    if (LENDS && lent && index >= w.u.whole) {
      const int at = (index - w.u.whole) * lent;
      turn.from = lent;
      turn.unit.part = 1 + lent_to(w, at + lent - 1) - lent_to(w, at);
      turn.last = STAGE_RESUMES;
    }
    return turn;
  }
  int from, to;
  lent_range(w, w.first - (w.count - w.u.whole), from, to);
  const int tile = from / lent + i, begin = max(from, tile * lent), end = min(to, (tile + 1) * lent);
  turn.unit = unit_at(w, w.u.whole + tile);
  turn.unit.parts = 0;
  turn.unit.part = end < (tile + 1) * lent; /* the next range begins with the others */
  turn.from = begin - tile * lent;
  turn.to = end - tile * lent;
  turn.last = STAGE_LENDS | (turn.unit.part ? STAGE_RESUMES : 0);
  return turn;
}

/*
 * Where lent sums lie, four of a worker's side by side. They come through the ring, as many at once as a stage takes.
 * The unit's last stage is released after they have come, so they need fewer stages than the ring has.
 */
template <int COLS> struct wgmma16_lent {
  typedef wgmma16_stage<COLS> stage;
  enum {
    SUMS = stage::BYTES / (WORKERS * (int)sizeof(float)), /* a worker's, in a stage */
    STAGES = (stage::SUMS + SUMS - 1) / SUMS
  };
  static_assert(SUMS % 4 == 0 && (int)STAGES < (int)stage::COUNT, "they come through the ring");
};

template <int SUMS>
static __device__ __forceinline__ float4 *lent_sums(const esmm_wgmma16_params &p, const wgmma16_unit &unit)
{
  return (float4 *)p.partial + (int64_t)unit.tile * (SUMS / 4 * WORKERS);
}

/* Blocks that have had the tile; its last block resets it to 0. */
static __device__ __forceinline__ uint32_t *lent_counter(const esmm_wgmma16_params &p, const wgmma16_unit &unit)
{
  return (uint32_t *)p.meeting + 2 + 2 * unit.tile;
}

#define FEEDER_LINES 16 /* of 64 that a feeding warp gathers */
#define PLACES 2048     /* SKIP_AB: a ring of entries */
#define CHUNK_STAGES 8  /* SKIP_A: a warp fetches these stages' entries at once */

#define SAMPLERS ESMM_WGMMA16_LOOK_THREADS     /* threads that look at A, two rows each */
#define SAMPLES 8                              /* places that a choice looks at: 128 rows */
#define SAMPLE_SIDE ESMM_WGMMA16_LEAST_SAMPLED /* by this many k's */
static_assert(SAMPLERS == TILE / 2 && SAMPLE_SIDE == 8, "a thread looks at 16 bytes of two lines");

/* Barriers of the stages. */
typedef struct wgmma16_ring {
  uint64_t full[MAX_STAGES], empty[MAX_STAGES];
} wgmma16_ring;

typedef struct wgmma16_shared {
  uint64_t decided;                                           /* mode is there */
  wgmma16_ring dense, skip;                                   /* stages of boxes, stages of gathered lines */
  uint64_t pack_full[PACK_WARPS], pack_empty[PACK_WARPS];     /* what comes, */
  uint64_t block_full[PACK_BLOCKS], block_empty[PACK_BLOCKS]; /* what leaves, */
  uint64_t turn_full[PACK_WARPS];                             /* which steps know their place */
  uint2 turn[PACK_WARPS];                                     /* lines: the segment's first, the next step's */
  int block_to[PACK_BLOCKS];                                  /* where what leaves goes */
  uint32_t stage[MAX_STAGES];                                 /* STAGE_... */
  uint32_t mode;
  /* Statistics of C, taken by warps that load nothing (tally.cuh): */
  uint64_t tile_there[2], tallied[2]; /* of each warpgroup: its rows of a tile are there; they have been read */
  alignas(16) int4 tally_tile[2];     /* their first row and column, where they lie; a row below 0: there are no more */
  int tally_counts[ESMM_WGMMA16_WIDE];
  alignas(16) uint8_t
      tally_bytes[ESMM_WGMMA16_WIDE]; /* of a tile with its nonzeros counted in registers; 0 between tiles */
  alignas(16) int4 unit[MAX_STAGES];  /* unit_to_words */
  uint32_t sample_bits[SAMPLES][2];
  alignas(16) uint32_t found[4]; /* SKIP_AB: k's that each feeding warp counts */
  /* A worker warp's own, or, as panels, what of a tile of C does not fit into a stage. */
  alignas(1024) float spare[8][512];
  union {
    alignas(16) uint4 sample[SAMPLES][TILE]; /* while A is sampled */
    alignas(16) uint32_t places[2][PLACES];  /* SKIP_AB: where lines of the packed strip and rows of B begin */
    alignas(16) uint32_t lists[4][CHUNK_STAGES][FEEDER_LINES]; /* SKIP_A: where rows of B begin, a warp's own lines */
    alignas(16) float bias[MAX_STAGES][ESMM_WGMMA16_WIDE];     /* dense: with a unit's last stage; a gate's in front */
  };
} wgmma16_shared;
static_assert(sizeof(wgmma16_shared) + RING_BYTES <= ESMM_WGMMA16_SHARED, "params.h gives the host another size");

/*
 * Does a dense unit's bias come with its last stage? The epilogue has no registers for a tile's bias at once, and would
 * wait for memory several times. cols: of C. Not for split tiles: a block finishes few of their columns.
 */
static __device__ __forceinline__ bool bias_comes(const esmm_wgmma16_params &p, const wgmma16_unit &unit, int cols)
{
  return p.c_boxes && ((p.epilogue.bias | p.gate_bias) & 15) == 0 && unit.parts == 1 && unit.col + cols <= p.n;
}

#endif
