/*
 * k_bsr16_sm90a.cu: a 16-bit A times a B of cells, on Hopper: only chunks of k are read that a tile has a cell of.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B         cells of 64 columns and 32 or 64 k's (ops/blocks.c)
 *   sums      fp32, in the tensor core
 *
 * A tile is 128 rows by 256 columns, four panels of cells. Its list has an entry for each chunk of k that one of them
 * has a cell of. For an entry A's chunk is brought once, and the cells that are there, close together:
 *
 *                     panels 0 1 2 3                     a stage: 48 KiB
 *   chunk 0                  x . . x    entry 0, 1001      A 128 x 64 | cell | cell |      |
 *   chunk 1                  . . . .
 *   chunk 2                  x x . .    entry 2, 0011      A 128 x 64 | cell | cell |      |
 *
 * With cells of 32 k's a stage has two entries. Where blocks have 128 columns or multiples, cells come in pairs, which
 * are one instruction of 128 columns; else they are 64 columns each.
 *
 * Persistent blocks in pairs, a cluster: rows differ, columns and so lists are the same, and each cell is fetched once
 * for both. One warp loads, two warpgroups multiply 64 rows each. Lists that are long, or too few to fill the GPU, are
 * cut; who finishes a tile's last part adds up all of them in their order.
 */
#include "cuda/kernels/wgmma16/store.cuh"

#define STAGES ESMM_BSR16_STAGES
#define STAGE_BYTES (6 * PANEL)
#define A_BYTES (2 * PANEL) /* of a stage */
#define TILE_COLS ESMM_WGMMA16_WIDE
#define BOTH 3 /* blocks of a pair */

/* What consumers are told of a stage: the panels of its first and second entry, whether it is its unit's last, whether
   there are no more; from TOLD_ROWS on, the rows that its tile has. */
enum { TOLD_SECOND = 4, TOLD_LAST = 1 << 8, TOLD_END = 1 << 9, TOLD_ROWS = 16 };

typedef struct bsr16_shared {
  uint64_t full[STAGES], empty[STAGES];
  uint32_t told[STAGES];
  uint32_t come; /* parts of a tile that were there before this one */
  alignas(16) int4 unit[STAGES];
  /* A worker warp's own, or, as panels, what of a tile of C does not fit into a stage. */
  alignas(1024) float spare[8][512];
} bsr16_shared;
static_assert(STAGES * STAGE_BYTES + sizeof(bsr16_shared) <= ESMM_BSR16_SHARED, "params.h tells the host another size");

/* ---- units of work: a tile, or a part of its list ---- */

typedef struct bsr16_work {
  int rows, rank, count, first, step;
} bsr16_work;

typedef struct bsr16_unit {
  int row, place;  /* of the tile's first row; among the columns by length */
  int part, parts; /* of its list */
} bsr16_unit;

static __device__ __forceinline__ bsr16_work work_of(const esmm_bsr16_params &p)
{
  bsr16_work w;
  w.rank = p.pairs ? (int)cluster_rank() : 0;
  w.rows = ceil_div(p.w.m, p.pairs ? 2 * TILE : TILE);
  w.count = w.rows * p.all_parts;
  w.first = p.pairs ? (int)blockIdx.x / ESMM_WGMMA16_CLUSTER : (int)blockIdx.x;
  w.step = p.pairs ? (int)gridDim.x / ESMM_WGMMA16_CLUSTER : (int)gridDim.x;
  return w;
}

/* Tiles come in groups of `group` tile rows, column by column; first parts of all lists before second ones. */
static __device__ __forceinline__ bsr16_unit unit_at(const esmm_bsr16_params &p, const bsr16_work &w, int index)
{
  bsr16_unit unit;
  const int in_group = p.group * p.all_parts, group = index / in_group, place = index % in_group;
  const int height = min(p.group, w.rows - group * p.group), i = group * p.group + place % height;
  unit.row = (p.pairs ? 2 * i + w.rank : i) * TILE;
  unit.place = place / height;
  unit.part = 0;
  while (unit.place >= p.parts[unit.part])
    unit.place -= p.parts[unit.part++];
  unit.parts = unit.part + 1;
  while (unit.parts < ESMM_BSR16_PARTS && unit.place < p.parts[unit.parts])
    unit.parts++;
  return unit;
}

/* ---- loading: one warp ---- */

/* A unit's list. */
typedef struct bsr16_list {
  const uint2 *from;
  int col;          /* of its tile */
  int first, after; /* entries */
} bsr16_list;

static __device__ __forceinline__ bsr16_list list_of(const esmm_bsr16_params &p, const bsr16_unit &unit)
{
  const uint4 column = __ldg((const uint4 *)p.columns + unit.place);
  bsr16_list list;
  list.col = (int)column.x * TILE_COLS;
  list.from = (const uint2 *)p.entries + column.y;
  share((int)column.z, unit.part, unit.parts, list.first, list.after);
  return list;
}

static __device__ __forceinline__ uint2 entry_at(const bsr16_list &list, int at)
{
  return at < list.after ? __ldg(list.from + at) : make_uint2(0, 0);
}

/* One thread: A's chunk and the cells of an entry, number `number` of a stage at `stage`. turn: which of a pair fetches
   its first cell. */
template <int CELL_K>
static __device__ __forceinline__ void load_entry(const esmm_bsr16_params &p, char *stage, uint64_t *full, int row,
                                                  uint2 entry, int number, int rank, int turn)
{
  enum { A_PANEL = 64 * CELL_K * 2, CELL = CELL_K * ESMM_CELL_COLS * 2, ENTRY = 4 * CELL };
  const int k = (int)(entry.x & 0xfffffff) * CELL_K, cells = __popc(entry.x >> 28);
  char *a = stage + number * (2 * A_PANEL), *b = stage + A_BYTES + number * ENTRY;
  if (p.w.a_by_k) {
    sm90_tma_load(a, &p.w.map_a, row, k, full);
    sm90_tma_load(a + A_PANEL, &p.w.map_a, row + 64, k, full);
  } else {
    sm90_tma_load(a, &p.w.map_a, k, row, full);
    sm90_tma_load(a + A_PANEL, &p.w.map_a, k, row + 64, full);
  }
#pragma unroll 1
  for (int i = 0; i < cells; i++) {
    const int line = ((int)entry.y + i) * CELL_K;
    if (!p.pairs)
      sm90_tma_load(b + i * CELL, &p.map_cells, 0, line, full);
    else if ((i + turn) % 2 == rank)
      sm90_tma_load_multicast(b + i * CELL, &p.map_cells, 0, line, full, BOTH);
  }
}

template <int CELL_K> static __device__ __forceinline__ uint32_t entry_bytes(uint2 entry)
{
  return 128 * CELL_K * 2 + (uint32_t)__popc(entry.x >> 28) * (CELL_K * ESMM_CELL_COLS * 2);
}

template <int CELL_K>
static __device__ __forceinline__ void feed(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  enum { EACH = 64 / CELL_K }; /* entries of a stage */
  const bsr16_work work = work_of(p);
  const int lane = (int)threadIdx.x;
  int slot = 0;
  uint32_t phase = 1;
  bsr16_unit unit = {}, next = {};
  bsr16_list list = {}, next_list = {};
  uint2 mine = {}, ahead = {}, next_mine = {}; /* lane i's: entry i of 32; of the 32 after; of the next unit's first */
  if (work.first < work.count) {
    next = unit_at(p, work, work.first);
    next_list = list_of(p, next);
    next_mine = entry_at(next_list, next_list.first + lane);
  }
  for (int index = work.first; index < work.count; index += work.step) {
    unit = next;
    list = next_list;
    mine = next_mine;
    ahead = entry_at(list, list.first + 32 + lane);
    if (index + work.step < work.count) {
      next = unit_at(p, work, index + work.step);
      next_list = list_of(p, next);
      next_mine = entry_at(next_list, next_list.first + lane);
    }
    const uint32_t rows = (uint32_t)max(0, min(p.w.m - unit.row, TILE)) << TOLD_ROWS;
    for (int at = list.first, base = at; at < list.after || at == list.first; at += EACH) {
      if (at - base == 32) {
        base = at;
        mine = ahead;
        ahead = entry_at(list, base + 32 + lane);
      }
      const bool last = at + EACH >= list.after;
      uint2 entry[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++)
        entry[i] = make_uint2(__shfl_sync(~0u, mine.x, at - base + i), __shfl_sync(~0u, mine.y, at - base + i));
      if (lane == 0) {
        uint32_t told = rows | (last ? TOLD_LAST : 0), bytes = 0;
        sm90_barrier_wait(&sh->empty[slot], phase);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          told |= entry[i].x >> 28 << (TOLD_SECOND * i);
          bytes += entry[i].x >> 28 ? entry_bytes<CELL_K>(entry[i]) : 0;
        }
        sh->told[slot] = told;
        if (last)
          sh->unit[slot] = make_int4(unit.row, list.col, unit.place, unit.parts << 16 | unit.part);
        sm90_barrier_expect(&sh->full[slot], bytes);
#pragma unroll
        for (int i = 0; i < EACH; i++)
          if (entry[i].x >> 28)
            load_entry<CELL_K>(p, ring + slot * STAGE_BYTES, &sh->full[slot], unit.row, entry[i], i, work.rank, slot);
      }
      __syncwarp();
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
  if (lane == 0) {
    sm90_barrier_wait(&sh->empty[slot], phase);
    sh->told[slot] = TOLD_END;
    sm90_barrier_arrive(&sh->full[slot]);
  }
}

/* ---- multiplying ---- */

/* wgmma's view of an operand: panels of 64 columns `panel` bytes apart, groups of 8 lines `group` bytes; lines of 64 or
   128 bytes, swizzled as wide. */
static __device__ __forceinline__ uint64_t view_of(const void *at, uint32_t panel, uint32_t group, bool wide)
{
  return (uint64_t)((sm90_address(at) & 0x3ffffu) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(group >> 4) << 32 |
         (uint64_t)(wide ? 1 : 2) << 62;
}

/*
 * The multiplications of an entry. Panels come in pairs, 128 columns an instruction, or by themselves, 64; never both
 * in one kernel: the compiler keeps the tensor core busy only where it always gets the same registers at once.
 */
template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, bool PAIRED> struct bsr16_steps {
  enum {
    COUNT = CELL_K / 16,
    A = A_BY_K ? 16 * 128 >> 4 : 32 >> 4, /* from 16 k's to the next, in 16 bytes */
    B = 16 * 128 >> 4,
    CELL = CELL_K * 128 >> 4,
    COLS = PAIRED ? 128 : 64
  };
  /* Where panel or pair `PANEL_` is alive; b: its cell. */
  template <int PANEL_, int PANELS>
  static __device__ __forceinline__ void part(float (&sums)[128], uint64_t a, uint64_t &b)
  {
    if constexpr ((PANELS >> (PAIRED ? 2 * PANEL_ : PANEL_) & 1) != 0) {
#pragma unroll
      for (int s = 0; s < COUNT; s++)
        wgmma16_part<DTYPE, A_BY_K, COLS, PANEL_ * COLS / 2>(sums, a + s * A, b + s * B);
      b += COLS / 64 * CELL;
    }
  }
  template <int PANELS> static __device__ __forceinline__ void these(float (&sums)[128], uint64_t a, uint64_t b)
  {
    sm90_wgmma_fence();
    part<0, PANELS>(sums, a, b);
    part<1, PANELS>(sums, a, b);
    if constexpr (!PAIRED) {
      part<2, PANELS>(sums, a, b);
      part<3, PANELS>(sums, a, b);
    }
    sm90_wgmma_commit();
  }
  /* A branch for each: the instructions are under way together only where nothing stands between them. */
  static __device__ __forceinline__ void entry(float (&sums)[128], uint64_t a, uint64_t b, uint32_t panels)
  {
#define CASE(x)           \
  case x:                 \
    these<x>(sums, a, b); \
    break
    if constexpr (PAIRED)
      switch (panels) {
        CASE(3);
        CASE(12);
        CASE(15);
      }
    else
      switch (panels) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
        CASE(12);
        CASE(13);
        CASE(14);
        CASE(15);
      }
#undef CASE
  }
};

typedef struct bsr16_consumer {
  uint32_t full, empty, told; /* addresses of shared memory */
  uint64_t a_view, b_view;
  int lane, group, shares, reader;
  uint32_t slot, phase;
  uint32_t held; /* a stage from which C is being written; STAGES: none */
  bool boxes;    /* C was, at least once */
} bsr16_consumer;

template <bool A_BY_K, int CELL_K>
static __device__ __forceinline__ bsr16_consumer consumer_of(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  bsr16_consumer c;
  const bool wide = A_BY_K || CELL_K == 64;
  c.lane = (int)threadIdx.x % 32;
  c.group = ((int)threadIdx.x - FEEDERS) / 128;
  c.shares = p.pairs ? 2 : 1;
  c.reader = p.pairs ? (int)cluster_rank() : 0;
  c.full = sm90_address(sh->full);
  c.told = sm90_address(sh->told);
  c.empty = sm90_address_at(sh->empty, p.pairs ? (uint32_t)c.lane % 2 : cluster_rank());
  asm volatile("" : "+r"(c.full), "+r"(c.told), "+r"(c.empty)); /* they stay in registers */
  c.a_view = view_of(ring + c.group * (64 * CELL_K * 2), PANEL, wide ? 1024 : 512, wide);
  c.b_view = view_of(ring + A_BYTES, CELL_K * 128, 1024, true);
  c.slot = c.phase = 0;
  c.held = STAGES;
  c.boxes = false;
  return c;
}

/* A stage may be used again. */
static __device__ __forceinline__ void let_go(const bsr16_consumer &c, uint32_t at)
{
  if (c.lane < c.shares)
    sm90_barrier_arrive_cluster(c.empty + at * 8);
}

/* And so may the one from which C was written: the first warp says so for the warpgroup. */
static __device__ __forceinline__ void let_go_held(bsr16_consumer &c)
{
  if (c.held >= STAGES)
    return;
  if (threadIdx.x / 32 % 4 == 0) {
    sm90_bulk_wait_read();
    __syncwarp();
    if (c.lane < c.shares)
      sm90_barrier_arrive_cluster_many(c.empty + c.held * 8, 4);
  }
  c.held = STAGES;
}

/* Stages up to a unit's last, whose slot is *at; returns what was told of it. */
template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, bool PAIRED>
static __device__ __forceinline__ uint32_t multiply_unit(bsr16_consumer &c, float (&sums)[128], uint32_t &at)
{
  typedef bsr16_steps<DTYPE, A_BY_K, CELL_K, PAIRED> steps;
  enum { EACH = 64 / CELL_K, A_ENTRY = 128 * CELL_K * 2 >> 4, B_ENTRY = 4 * steps::CELL };
  uint32_t before = STAGES, what = 0;
#pragma unroll
  for (int j = 0; j < 128; j++)
    sums[j] = 0.0f;
  do {
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    /* Read by the lane that lets go of this block's stage, and told to the others. */
    what = __shfl_sync(~0u, c.lane == c.reader ? sm90_load(c.told + c.slot * 4) : 0, c.reader);
    const uint64_t a = c.a_view + c.slot * (STAGE_BYTES >> 4), b = c.b_view + c.slot * (STAGE_BYTES >> 4);
    if (c.group * 64 < (int)(what >> TOLD_ROWS)) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        steps::entry(sums, a + i * A_ENTRY, b + i * B_ENTRY, what >> (TOLD_SECOND * i) & 15);
    }
    if (before < STAGES) {
      sm90_wgmma_wait<1>();
      let_go(c, before);
      let_go_held(c);
    }
    before = c.slot;
    if (++c.slot == STAGES) {
      c.slot = 0;
      c.phase ^= 1;
    }
  } while (!(what & (TOLD_LAST | TOLD_END)));
  sm90_wgmma_wait<0>();
  at = before;
  return what;
}

/* ---- parts ---- */

/* The number of a unit's part among all columns' parts. */
static __device__ __forceinline__ int part_place(const esmm_bsr16_params &p, int part)
{
  int before = 0;
  for (int i = 0; i < part; i++)
    before += p.parts[i];
  return before;
}

/* Leaves a part's sums in memory. True for who comes last: it then has the sums of all of them, added in their order.
 */
static __device__ __forceinline__ bool add_parts(const esmm_bsr16_params &p, bsr16_shared *sh, int row, int row0,
                                                 int place, int part, int parts, float (&sums)[128])
{
  const int thread = thread_now() - FEEDERS, tile_row = row / TILE;
  float4 *all = (float4 *)p.w.partial + ((int64_t)tile_row * p.all_parts + place) * (32 * WORKERS) + thread;
  float4 *mine = all + (int64_t)part_place(p, part) * (32 * WORKERS);
  uint32_t *come = (uint32_t *)p.w.meeting + tile_row * p.parts[1] + place;
  if (row0 < p.w.m) {
#pragma unroll
    for (int i = 0; i < 128; i += 4)
      __stcg(mine + i / 4 * WORKERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  __threadfence();
  meet<1, WORKERS>();
  if (thread == 0) {
    const uint32_t before = atomicAdd(come, 1);
    if ((int)before == parts - 1)
      *come = 0;
    __threadfence();
    sh->come = before;
  }
  meet<1, WORKERS>();
  if ((int)sh->come != parts - 1)
    return false;
  if (row0 >= p.w.m)
    return true;
#pragma unroll
  for (int i = 0; i < 128; i++)
    sums[i] = 0.0f;
#pragma unroll 1
  for (int q = 0; q < parts; q++) {
    const float4 *from = all + (int64_t)part_place(p, q) * (32 * WORKERS);
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      const float4 x = __ldcg(from + i / 4 * WORKERS);
      sums[i] += x.x;
      sums[i + 1] += x.y;
      sums[i + 2] += x.z;
      sums[i + 3] += x.w;
    }
  }
  return true;
}

/* What becomes of the sums; as finish_unit of k_wgmma16_sm90a.cu. at: the unit's last stage. */
static __device__ __forceinline__ void finish_unit(const esmm_bsr16_params &p, const int4 &told, char *ring,
                                                   bsr16_shared *sh, bsr16_consumer &c, uint32_t at, float (&sums)[128])
{
  const int row = told.x, col = told.y, parts = told.w >> 16, part = told.w & 0xffff;
  const int warp = (thread_now() - FEEDERS) / 32, row0 = row + warp * 16;
  const bool boxes = p.w.c_boxes && parts == 1 && col + TILE_COLS <= p.w.n;
  let_go_held(c);
  if (boxes || c.boxes)
    meet<1, WORKERS>(); /* nobody multiplies from the stage any more; the last tile has left the spare memory */
  if (boxes) {
    c.boxes = true;
    store_boxes(p.w, sums, row + c.group * 64, col, ring + at * STAGE_BYTES, STAGE_BYTES / PANEL, (char *)sh->spare);
    c.held = at;
    return;
  }
  let_go(c, at);
  if (parts > 1 && !add_parts(p, sh, row, row0, told.z, part, parts, sums))
    return;
  store_sums(p.w, sums, row0, col, 0, 128, sh->spare[warp]);
}

template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, bool PAIRED>
static __device__ __forceinline__ void multiply(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  bsr16_consumer c = consumer_of<A_BY_K, CELL_K>(p, ring, sh);
  for (;;) {
    float sums[128];
    uint32_t at;
    const uint32_t what = multiply_unit<DTYPE, A_BY_K, CELL_K, PAIRED>(c, sums, at);
    int4 told = c.lane == c.reader ? sh->unit[at] : make_int4(0, 0, 0, 0);
    told.x = __shfl_sync(~0u, told.x, c.reader);
    told.y = __shfl_sync(~0u, told.y, c.reader);
    told.z = __shfl_sync(~0u, told.z, c.reader);
    told.w = __shfl_sync(~0u, told.w, c.reader);
    if (what & TOLD_END) {
      let_go_held(c);
      return;
    }
    finish_unit(p, told, ring, sh, c, at, sums);
  }
}

template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply_as(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  if (p.cell_k == 64)
    p.paired ? multiply<DTYPE, A_BY_K, 64, true>(p, ring, sh) : multiply<DTYPE, A_BY_K, 64, false>(p, ring, sh);
  else
    p.paired ? multiply<DTYPE, A_BY_K, 32, true>(p, ring, sh) : multiply<DTYPE, A_BY_K, 32, false>(p, ring, sh);
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void bsr16_main(const esmm_bsr16_params &p)
{
  extern __shared__ __align__(1024) char ring[]; /* there is no other shared memory, so it starts as it says */
  bsr16_shared *sh = (bsr16_shared *)(ring + STAGES * STAGE_BYTES);
  if (threadIdx.x == 0) {
    sm90_prefetch_map(&p.w.map_a);
    sm90_prefetch_map(&p.map_cells);
    if (p.w.c_boxes)
      sm90_prefetch_map(&p.w.map_c);
    for (int i = 0; i < STAGES; i++) { /* eight warps of each block let go of a stage */
      sm90_barrier_init(&sh->full[i], 1);
      sm90_barrier_init(&sh->empty[i], p.pairs ? 16 : 8);
    }
    sm90_fence_init();
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < FEEDERS) {
    sm90_registers_down<56>();
    if (threadIdx.x < 32) {
      if (p.cell_k == 64)
        feed<64>(p, ring, sh);
      else
        feed<32>(p, ring, sh);
    }
  } else {
    sm90_registers_up<224>();
    if (p.w.a_by_k)
      multiply_as<DTYPE, true>(p, ring, sh);
    else
      multiply_as<DTYPE, false>(p, ring, sh);
  }
  cluster_sync(); /* the other block may still send here */
}

extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)
    esmm_bsr16_bf16(const __grid_constant__ esmm_bsr16_params p)
{
  if (!not_selected(p.w.selector))
    bsr16_main<ESMM_BF16>(p);
}

extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)
    esmm_bsr16_f16(const __grid_constant__ esmm_bsr16_params p)
{
  if (!not_selected(p.w.selector))
    bsr16_main<ESMM_F16>(p);
}
