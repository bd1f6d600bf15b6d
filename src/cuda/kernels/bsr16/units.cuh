/*
 * units.cuh: what the wgmma kernels of a B of cells share: units of work, how a worker gets them, adding a unit's
 * parts.
 *
 * A unit is a tile of C, or a part of the list of its columns. A worker is a block, or a pair of them: a cluster with
 * neighbouring rows and the same columns. The first unit is the worker's own; near the end of each it draws the next
 * from a counter in memory, because lists differ much in length.
 */
#ifndef ESMM_CUDA_BSR16_UNITS_CUH
#define ESMM_CUDA_BSR16_UNITS_CUH

#include "cuda/kernels/wgmma16/wgmma16.cuh"

#define BOTH 3  /* blocks of a pair */
#define SENT 16 /* tickets on their way at once: more than stages */
#define AHEAD 6 /* stages of a unit that are still to be loaded when its block asks for the next */
#define ASKED (ESMM_BSR16_MOST_SPLIT - 1) /* the counter of tickets */

/* From the first block of a pair to the second, or from a block's first loading warp to the others. */
typedef struct bsr16_tickets {
  uint64_t sent[SENT];
  uint32_t ticket[SENT];
} bsr16_tickets;

typedef struct bsr16_work {
  int rows, rank, count, place, workers;
} bsr16_work;

typedef struct bsr16_unit {
  int row, place;  /* of the tile's first row; among the columns by length */
  int part, parts; /* of its list */
} bsr16_unit;

static __device__ __forceinline__ bsr16_work work_of(const esmm_bsr16_params &p)
{
  bsr16_work w;
  w.rank = p.pairs ? (int)cluster_rank() : 0;
  w.rows = ceil_div(p.m, p.pairs ? 2 * p.rows : p.rows);
  w.count = w.rows * p.all_parts;
  w.place = p.pairs ? (int)blockIdx.x / ESMM_WGMMA16_CLUSTER : (int)blockIdx.x;
  w.workers = p.pairs ? (int)gridDim.x / ESMM_WGMMA16_CLUSTER : (int)gridDim.x;
  return w;
}

/* Tiles come in groups of `group` tile rows, column by column, first parts of all lists before second ones. Columns
   come by their length: the last units are short, and so is the tail. */
static __device__ __forceinline__ bsr16_unit unit_at(const esmm_bsr16_params &p, const bsr16_work &w, int index)
{
  bsr16_unit unit;
  const int in_group = p.group * p.all_parts, group = index / in_group, place = index % in_group;
  const int height = min(p.group, w.rows - group * p.group), i = group * p.group + place % height;
  unit.row = (p.pairs ? 2 * i + w.rank : i) * p.rows;
  unit.place = place / height;
  unit.part = 0;
  while (unit.place >= p.parts[unit.part])
    unit.place -= p.parts[unit.part++];
  unit.parts = unit.part + 1;
  while (unit.parts < ESMM_BSR16_PARTS && unit.place < p.parts[unit.parts])
    unit.parts++;
  return unit;
}

/* ---- its list ---- */

static __device__ __forceinline__ uint4 column_at(const esmm_bsr16_params &p, const bsr16_unit &unit)
{
  return __ldg((const uint4 *)p.columns + unit.place);
}

typedef struct bsr16_list {
  uint32_t tile, base; /* of columns; of its entries among all */
  int first, after;    /* entries */
} bsr16_list;

/* column: as params.h has it. */
static __device__ __forceinline__ bsr16_list list_of(const bsr16_unit &unit, const uint4 &column)
{
  bsr16_list list;
  list.tile = column.x;
  list.base = column.y;
  share((int)column.z, unit.part, unit.parts, list.first, list.after);
  return list;
}

/* ---- the next unit ---- */

/* A word to another block of the cluster; barrier b there counts its 4 bytes. */
static __device__ __forceinline__ void send(uint32_t to, uint32_t x, uint32_t b)
{
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(x),
               "r"(b)
               : "memory");
}

/* The unit after this one, found step by step, a step a stage: each waits for the one before. */
typedef struct bsr16_next {
  int step;
  uint32_t ticket; /* lane 0's: how many were drawn before */
  int index;       /* from work.count on there are no more */
  bsr16_unit unit;
  uint4 column;
  bsr16_list list;
} bsr16_next;
enum { NEXT_ASK, NEXT_TELL, NEXT_COLUMN, NEXT_LIST, NEXT_KNOWN };

static __device__ __forceinline__ bsr16_next first_of(const esmm_bsr16_params &p, const bsr16_work &work)
{
  bsr16_next next = {};
  next.index = work.place;
  if (next.index < work.count) {
    next.unit = unit_at(p, work, next.index);
    next.list = list_of(next.unit, column_at(p, next.unit));
  }
  return next;
}

/*
 * All lanes of a loading warp. turn: this worker's units before this one. It draws a ticket in each, `count` in all;
 * the last one resets the counter for the next launch. True: there is a next unit, and its list is now known.
 *
 * WARPS of each block load, in turns. The first of the first block draws the ticket and sends it to the others. It
 * cannot overtake them: a stage is loaded when all have multiplied the one STAGES before, and a unit has a stage at
 * least.
 */
template <int STAGES, int WARPS>
static __device__ __forceinline__ bool next_step(const esmm_bsr16_params &p, bsr16_tickets *tickets,
                                                 const bsr16_work &work, int turn, bsr16_next &next)
{
  static_assert(SENT >= (WARPS > 1 ? 2 * STAGES + WARPS : STAGES + 2),
                "a ticket is written before the one there is read");
  const int lane = (int)threadIdx.x % 32, warp = WARPS > 1 ? (int)threadIdx.x / 32 : 0, at = turn % SENT;
  const bool asks = lane == 0 && warp == 0 && work.rank == 0;
  uint32_t *asked = (uint32_t *)p.counters + ASKED;
  switch (next.step++) {
  case NEXT_ASK:
    if (asks)
      next.ticket = atomicAdd(asked, 1);
    return false;
  case NEXT_TELL:
    if (asks) {
      if (next.ticket == (uint32_t)work.count - 1)
        *asked = 0;
      if (WARPS > 1)
        send(sm90_address_at(&tickets->ticket[at], cluster_rank()), next.ticket,
             sm90_address_at(&tickets->sent[at], cluster_rank()));
      if (p.pairs)
        send(sm90_address_at(&tickets->ticket[at], 1), next.ticket, sm90_address_at(&tickets->sent[at], 1));
    }
    return false;
  case NEXT_COLUMN:
    if (lane == 0 && (WARPS > 1 || work.rank == 1)) {
      if (warp == 0)
        sm90_barrier_expect(&tickets->sent[at], sizeof tickets->ticket[at]);
      sm90_barrier_wait(&tickets->sent[at], (uint32_t)(turn / SENT % 2));
      next.ticket = sm90_load(sm90_address(&tickets->ticket[at]));
    }
    next.index = work.workers + (int)__shfl_sync(~0u, next.ticket, 0);
    if (next.index < work.count) {
      next.unit = unit_at(p, work, next.index);
      next.column = column_at(p, next.unit);
    }
    return false;
  case NEXT_LIST:
    if (next.index >= work.count)
      return false;
    next.list = list_of(next.unit, next.column);
    return true;
  }
  return false;
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

/* Writes a part's sums to memory. True for the tile's last block: it then has all parts' sums, added in their order.
   shared: a word of shared memory, for the number of parts before this one. */
template <int SUMS>
static __device__ __forceinline__ bool add_parts(const esmm_bsr16_params &p, uint32_t *shared, int row, int place,
                                                 int part, int parts, float (&sums)[SUMS])
{
  enum { EACH = SUMS / 4 * WORKERS }; /* vectors of a part */
  const int thread = thread_now() - FEEDERS, tile_row = row / p.rows;
  float4 *all = (float4 *)p.partial + ((int64_t)tile_row * p.all_parts + place) * EACH + thread;
  float4 *mine = all + (int64_t)part_place(p, part) * EACH;
  uint32_t *come = (uint32_t *)p.counters + tile_row * p.parts[1] + place;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    __stcg(mine + i / 4 * WORKERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  __threadfence();
  meet<1, WORKERS>();
  if (thread == 0) {
    const uint32_t before = atomicAdd(come, 1);
    if ((int)before == parts - 1)
      *come = 0;
    __threadfence();
    *shared = before;
  }
  meet<1, WORKERS>();
  if ((int)*shared != parts - 1)
    return false;
#pragma unroll
  for (int i = 0; i < SUMS; i++)
    sums[i] = 0.0f;
#pragma unroll 1
  for (int q = 0; q < parts; q++) {
    const float4 *from = all + (int64_t)part_place(p, q) * EACH;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
      const float4 x = __ldcg(from + i / 4 * WORKERS);
      sums[i] += x.x;
      sums[i + 1] += x.y;
      sums[i + 2] += x.z;
      sums[i + 3] += x.w;
    }
  }
  return true;
}

/* ---- stages, for consumers ---- */

/* One thread of a block, before the others go on. */
template <int STAGES>
static __device__ __forceinline__ void begin_stages(const esmm_bsr16_params &p, uint64_t *full, uint64_t *empty,
                                                    bsr16_tickets *tickets)
{
  sm90_prefetch_map(&p.map_a);
  if (!p.blocks)
    sm90_prefetch_map(&p.map_cells);
  if (p.c_boxes)
    sm90_prefetch_map(&p.map_c);
  for (int i = 0; i < STAGES; i++) { /* eight warps of each block release a stage */
    sm90_barrier_init(&full[i], 1);
    sm90_barrier_init(&empty[i], p.pairs ? 16 : 8);
  }
  for (int i = 0; i < SENT; i++)
    sm90_barrier_init(&tickets->sent[i], 1);
  sm90_fence_init();
}

typedef struct bsr16_consumer {
  uint32_t full, empty, words; /* addresses of shared memory */
  int lane, shares, reader;
  uint32_t slot, phase;
} bsr16_consumer;

static __device__ __forceinline__ bsr16_consumer consumer_of(const esmm_bsr16_params &p, const uint64_t *full,
                                                             const uint64_t *empty, const void *words)
{
  bsr16_consumer c;
  c.lane = (int)threadIdx.x % 32;
  c.shares = p.pairs ? 2 : 1;
  c.reader = p.pairs ? (int)cluster_rank() : 0;
  c.full = sm90_address(full);
  c.words = sm90_address(words);
  c.empty = sm90_address_at(empty, p.pairs ? (uint32_t)c.lane % 2 : cluster_rank());
  asm volatile("" : "+r"(c.full), "+r"(c.words), "+r"(c.empty)); /* they stay in registers */
  c.slot = c.phase = 0;
  return c;
}

/* A stage may be used again. */
static __device__ __forceinline__ void let_go(const bsr16_consumer &c, uint32_t at)
{
  if (c.lane < c.shares)
    sm90_barrier_arrive_cluster(c.empty + at * 8);
}

/* ---- wgmma's view of an operand ---- */

/* Panels of 64 columns `panel` bytes apart, groups of 8 lines `group` bytes; lines of 64 or 128 bytes, swizzled as
 * wide.
 */
static __device__ __forceinline__ uint64_t view_of(const void *at, uint32_t panel, uint32_t group, bool wide)
{
  return (uint64_t)((sm90_address(at) & 0x3ffffu) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(group >> 4) << 32 |
         (uint64_t)(wide ? 1 : 2) << 62;
}

/* Which of the two multiplying warpgroups this is. */
static __device__ __forceinline__ int group_now(void)
{
  return (thread_now() - FEEDERS) / 128;
}

/* ---- C, by columns ---- */

/* A thread has, of 16 columns of C by 2 * SUMS rows, sums[4j + 2h + e]: column lane / 4 + 8h, row 8j + lane % 4 * 2 +
 * e.
 */

/* Any C: 32 rows by 16 columns a turn through the warp's own shared memory. The sums are lost. */
template <int SUMS>
static __device__ __forceinline__ void store_sums(const esmm_bsr16_params &p, float (&sums)[SUMS], int row, int col,
                                                  float *spare)
{
  enum { LINE = 16 };
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = thread_now() % 32;
  const bool vectors = has_vectors(e.c) && col + LINE <= p.n;
#pragma unroll 1
  for (int g = 0; g < SUMS; g += 16, row += 32) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      spare[(i / 4 * 8 + lane % 4 * 2 + i % 2) * LINE + lane / 4 + i / 2 % 2 * 8] = sums[i];
#pragma unroll
    for (int i = 0; i + 16 < SUMS; i++)
      sums[i] = sums[i + 16];
    __syncwarp();
    if (vectors) {
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        const int r = i * 16 + lane / 2;
        const float4 *from = (const float4 *)(spare + r * LINE + lane % 2 * 8);
        const float4 low = from[0], high = from[1];
        float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (row + r < p.m)
          finish_8(e, row + r, col + lane % 2 * 8, x);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 16; i++) {
        const int r = i * 2 + lane / 16, c = lane % 16;
        if (row + r < p.m && col + c < p.n)
          finish_element(e, row + r, col + c, spare[r * LINE + c]);
      }
    }
    __syncwarp();
  }
}

#endif
