/*
 * feed.cuh: the loading warpgroup of k_wgmma16_sm90a.cu.
 *
 *   dense     one thread starts TMA: boxes of 64 x 64; what a pair shares is fetched half by half and sent
 *             to both
 *   SKIP_A    boxes of the packed A, half by half to both blocks of a pair; the rows of B that the strip's list names
 *             are gathered, 512 bytes an instruction
 *   SKIP_AB   the bitmaps of the strip and of B's tile give the list; lines of the packed A and of B are gathered
 *
 * All four warps gather, 16 lines of a stage each: while wgmma runs, a warp gets a gather through every 39 cycles and
 * any other instruction every 8, so gathers are what counts.
 */
#ifndef ESMM_CUDA_WGMMA16_FEED_CUH
#define ESMM_CUDA_WGMMA16_FEED_CUH

#include "cuda/kernels/wgmma16/wgmma16.cuh"

#include <stddef.h>

#define NOTHING 0xffffffffu /* an entry of a list that fills up */
#define BOTH 3              /* blocks of a pair */
static_assert(BOTH == (1 << ESMM_WGMMA16_CLUSTER) - 1, "a cluster is a pair");

/* 16 bytes, or zeros. */
static __device__ __forceinline__ void gather(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Arrives when this thread's gathers have come. */
static __device__ __forceinline__ void gathered(uint32_t b)
{
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
}

/* ---- dense ---- */

/* The barrier waits for `bytes`; arrive: this thread arrives, too. */
static __device__ __forceinline__ void stage_expect(uint64_t *full, uint32_t bytes, bool arrive)
{
  if (arrive)
    sm90_barrier_expect(full, bytes);
  else
    sm90_barrier_expect_more(full, bytes);
}

/*
 * 64 x 64 boxes of one stage: what is shared is fetched half by half and sent to both blocks of the pair. low: A has 64
 * rows at most, its second panel is not read. arrive: consumers may begin when it has come. GATED: the first half of
 * B's panels are the gate's, of the same columns as the others. Straight cases, because one thread does all of this.
 */
template <int COLS, bool GATED>
static __device__ __forceinline__ void load_dense(const esmm_wgmma16_params &p, char *to, uint64_t *full, int row,
                                                  int col, int k, int rank, bool share_b, bool low, bool arrive)
{
  enum { PANELS = COLS / 64, BYTES = wgmma16_stage<COLS>::BYTES };
  char *b = to + wgmma16_stage<COLS>::A;
  const int below = p.a_by_k ? 64 : 0, further = p.a_by_k ? 0 : 64; /* the next 64 rows of A, in its map */
  const int x = p.a_by_k ? row : k, y = p.a_by_k ? k : row;
  if (share_b) {
    stage_expect(full, BYTES, arrive);
    sm90_tma_load(to, &p.map_a, x, y, full);
    sm90_tma_load(to + PANEL, &p.map_a, x + below, y + further, full);
#pragma unroll
    for (int i = 0; i < PANELS / 2; i++) {
      const int panel = rank * (PANELS / 2) + i;
      if (GATED)
        sm90_tma_load_multicast(b + panel * PANEL, rank ? &p.map_b : &p.map_gate, col + i * 64, k, full, BOTH);
      else
        sm90_tma_load_multicast(b + panel * PANEL, &p.map_b, col + panel * 64, k, full, BOTH);
    }
    return;
  }
  if (low) {
    stage_expect(full, BYTES - PANEL, arrive);
    if (rank == 0)
      sm90_tma_load_multicast(to, &p.map_a, x, y, full, BOTH);
  } else {
    stage_expect(full, BYTES, arrive);
    sm90_tma_load_multicast(to + rank * PANEL, &p.map_a, x + rank * below, y + rank * further, full, BOTH);
  }
#pragma unroll
  for (int i = 0; i < PANELS; i++)
    if (GATED)
      sm90_tma_load(b + i * PANEL, i < PANELS / 2 ? &p.map_gate : &p.map_b, col + i % (PANELS / 2) * 64, k, full);
    else
      sm90_tma_load(b + i * PANEL, &p.map_b, col + i * 64, k, full);
}

/* A tile's rows, in a stage's word. */
static __device__ __forceinline__ uint32_t stage_rows(const esmm_wgmma16_params &p, int row)
{
  return (uint32_t)max(0, min(p.m - row, TILE)) << STAGE_ROWS;
}

/* Line `at` of a panel of the packed strip of that row, among all lines of 128 bytes. */
static __device__ __forceinline__ int packed_line(const esmm_wgmma16_params &p, int row, int panel, int at)
{
  return (row / TILE * 2 + panel) * (p.segments * p.segment_k) + at;
}

/*
 * One thread: the first stages of a product, until it is known to be wanted. Consumers get two of them, which keep them
 * busy until then, never a unit's last: C must not be written before. Returns how many were loaded, the same in both
 * blocks of a pair; off: the product is not wanted, and the ring is free.
 */
template <int COLS>
static __device__ __forceinline__ int feed_unknown(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh,
                                                   const wgmma16_work &work, bool &off)
{
  typedef wgmma16_stage<COLS> stage;
  enum { SIGNALLED = 2 };
  int loaded = 0;
  if (work.first < work.count) {
    const wgmma16_unit unit = unit_at(work, work.first);
    int from, to;
    share(ceil_div(p.k, ESMM_WGMMA16_K), unit.part, unit.parts, from, to);
    loaded = max(0, min((int)stage::COUNT, to - from - 1));
#pragma unroll 1
    for (int s = 0; s < loaded; s++) {
      sh->stage[s] = stage_rows(p, unit.row) | STAGE_STEPS_ALL;
      load_dense<COLS, false>(p, ring + s * stage::BYTES, &sh->dense.full[s], unit.row, unit.col,
                              (from + s) * ESMM_WGMMA16_K, work.rank, work.u.share == ESMM_WGMMA16_SHARE_B, p.m <= 64,
                              s < SIGNALLED);
    }
  }
  sm90_barrier_wait(&sh->decided, 0);
  off = sh->mode != ESMM_WGMMA16_DENSE;
  const int signalled = min(loaded, (int)SIGNALLED);
  if (off)
    sh->stage[signalled] = STAGE_OFF;
  for (int s = signalled; s < max(loaded, off ? signalled + 1 : 0); s++)
    sm90_barrier_arrive(&sh->dense.full[s]);
  if (off) { /* the ring is used again: all copies have come, all reads are over */
    for (int s = signalled; s < loaded; s++)
      sm90_barrier_wait(&sh->dense.full[s], 0);
    sm90_barrier_wait(&sh->dense.empty[signalled], 0);
  }
  return loaded;
}

/* A unit's bias, with its last stage. */
template <int COLS, bool GATED>
static __device__ __forceinline__ void load_bias(const esmm_wgmma16_params &p, wgmma16_shared *sh, int slot,
                                                 const wgmma16_unit &unit)
{
  enum { OWN = GATED ? COLS / 2 : COLS, BYTES = OWN * (int)sizeof(float) };
  if (!bias_comes(p, unit, OWN))
    return;
  uint64_t *full = &sh->dense.full[slot];
  if (GATED && p.gate_bias) {
    sm90_barrier_expect_more(full, BYTES);
    sm90_bulk_load(sh->bias[slot], (const float *)p.gate_bias + unit.col, BYTES, full);
  }
  if (p.epilogue.bias) {
    sm90_barrier_expect_more(full, BYTES);
    sm90_bulk_load(sh->bias[slot] + (COLS - OWN), (const float *)p.epilogue.bias + unit.col, BYTES, full);
  }
}

/* One thread: other pairs' sums of the unit's tile, through the ring as its last stages. */
template <int COLS>
static __device__ __forceinline__ void feed_lent(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh,
                                                 const wgmma16_unit &unit, int &slot, uint32_t &phase)
{
  typedef wgmma16_stage<COLS> stage;
  uint32_t *counter = lent_counter(p, unit), come;
  do
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(counter) : "memory");
  while (come < (uint32_t)unit.part);
  if (unit.parts)
    *counter = 0; /* this block is the tile's last */
  sm90_fence_async_all();
  const float4 *from = lent_sums<stage::SUMS>(p, unit);
  for (int i = 0; i < stage::SUMS; i += wgmma16_lent<COLS>::SUMS) {
    const int sums = min(stage::SUMS - i, (int)wgmma16_lent<COLS>::SUMS), bytes = sums * WORKERS * (int)sizeof(float);
    sm90_barrier_wait(&sh->dense.empty[slot], phase);
    sm90_barrier_expect(&sh->dense.full[slot], (uint32_t)bytes);
    sm90_bulk_load(ring + slot * stage::BYTES, from + i / 4 * WORKERS, (uint32_t)bytes, &sh->dense.full[slot]);
    if (++slot == stage::COUNT) {
      slot = 0;
      phase ^= 1;
    }
  }
}

/* One thread: all stages, or, of a product that is called off, the first. LENDS: stages of a tile may be lent. */
template <int COLS, bool GATED, bool LENDS>
static __device__ __forceinline__ void feed_dense(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  typedef wgmma16_stage<COLS> stage;
  const wgmma16_work work = work_of(p, ESMM_WGMMA16_DENSE);
  const int steps = ceil_div(p.k, ESMM_WGMMA16_K);
  const bool share_b = work.u.share == ESMM_WGMMA16_SHARE_B;
  bool off = false;
  int loaded = !GATED && !LENDS && p.choose ? feed_unknown<COLS>(p, ring, sh, work, off) : 0;
  if (off)
    return;
  int slot = loaded % stage::COUNT;
  uint32_t phase = loaded == stage::COUNT ? 0 : 1;
  const int before = LENDS ? count_lent(work) : 0;
  for (int i = 0; work.first + (i - before) * work.step < work.count; i++) {
    const wgmma16_turn turn = turn_at<LENDS>(work, steps, i, before);
    const wgmma16_unit &unit = turn.unit;
    const uint32_t rows = stage_rows(p, unit.row);
    const int from = turn.from + loaded, to = turn.to;
    loaded = 0;
    for (int s = from; s < to || s == from; s++) {
      sm90_barrier_wait(&sh->dense.empty[slot], phase);
      const bool last = s + 1 >= to;
      sh->stage[slot] = rows | (s < to ? STAGE_STEPS_ALL : 0) | (last ? STAGE_LAST | turn.last : 0);
      if (last) {
        sh->unit[slot] = unit_to_words(unit);
        if (!(turn.last & STAGE_LENDS))
          load_bias<COLS, GATED>(p, sh, slot, unit);
      }
      load_dense<COLS, GATED>(p, ring + slot * stage::BYTES, &sh->dense.full[slot], unit.row, unit.col,
                              s * ESMM_WGMMA16_K, work.rank, share_b, p.m <= 64, true);
      if (++slot == stage::COUNT) {
        slot = 0;
        phase ^= 1;
      }
    }
    if (LENDS && turn.last & STAGE_RESUMES)
      feed_lent<COLS>(p, ring, sh, unit, slot, phase);
  }
  sm90_barrier_wait(&sh->dense.empty[slot], phase);
  sh->stage[slot] = STAGE_END;
  sm90_barrier_arrive(&sh->dense.full[slot]);
}

/* ---- gathering ---- */

/* One of the four warps, in registers. Lists hold places in units of 16 bytes, ready to be added. */
typedef struct wgmma16_gather {
  uint32_t sh_at; /* address of shared memory */
  uint32_t to; /* where the lane's 16 bytes of the warp's first line go in the first stage; the next line's: 128 on */
  uint32_t slot, phase;
  int lane, warp;
  int panel; /* of the lane's operand */
  bool is_b; /* it is B */
} wgmma16_gather;

/* Of `field` of the shared memory. */
#define AT(field, index, size) (h.sh_at + (uint32_t)offsetof(wgmma16_shared, field) + (uint32_t)(index) * (size))

/*
 * Of a line of B a lane has 16 bytes of 512: those of panel lane / 8 that the swizzle puts at place lane % 8 there. Of
 * lines of 256 bytes of both operands, lanes 0-15 have A's, the others B's.
 */
template <bool TWO> static __device__ __forceinline__ wgmma16_gather gather_of(char *ring, wgmma16_shared *sh)
{
  wgmma16_gather h;
  h.lane = (int)threadIdx.x % 32;
  h.warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0); /* uniform, for the compiler */
  h.is_b = !TWO || h.lane >= 16;
  h.panel = TWO ? h.lane / 8 % 2 : h.lane / 8;
  h.slot = 0;
  h.phase = 1;
  h.sh_at = sm90_address(sh);
  h.to = sm90_address(ring) +
         (uint32_t)((h.is_b ? 2 * PANEL : 0) + h.panel * PANEL + h.warp * (FEEDER_LINES * 128) + h.lane % 8 * 16);
  asm volatile("" : "+r"(h.to), "+r"(h.sh_at)); /* they stay in registers */
  return h;
}

/* What a lane adds its entries to: a line's part depends on where in eight lines it goes. line: the operand's first. */
typedef struct wgmma16_base {
  uint64_t part[8];
} wgmma16_base;

static __device__ __forceinline__ wgmma16_base base_of(const wgmma16_gather &h, uint64_t line)
{
  wgmma16_base base;
#pragma unroll
  for (int j = 0; j < 8; j++)
    base.part[j] = line + (uint32_t)(h.lane % 8 ^ j) * 16;
  return base;
}

/*
 * A warp's lines; its entries lie at `from`, and `list` are the first four. CHECK: some entries may be NOTHING, and
 * where not inside, the lane's columns are not there.
 */
template <bool CHECK>
static __device__ __forceinline__ void gather_lines(const wgmma16_gather &h, uint32_t block, const wgmma16_base &base,
                                                    uint4 list, uint32_t from, bool inside)
{
  const uint32_t to = h.to + block;
#pragma unroll
  for (int j = 0; j < FEEDER_LINES; j += 4) {
    const uint4 next = j + 4 < FEEDER_LINES ? sm90_load4(from + (j + 4) * 4) : list;
    const uint32_t entry[4] = {list.x, list.y, list.z, list.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      gather(to + (uint32_t)(j + i) * 128, (const void *)(base.part[(j + i) % 8] + (uint64_t)entry[i] * 16),
             CHECK ? entry[i] != NOTHING && inside : true);
    list = next;
  }
}

/* One thread: the word of the stage at h.slot, for consumers. */
static __device__ __forceinline__ void announce_stage(wgmma16_shared *sh, const wgmma16_gather &h, uint32_t rows,
                                                      int entries, bool last, const int4 &unit)
{
  sh->stage[h.slot] = rows | (uint32_t)ceil_div(entries, 16) | (last ? STAGE_LAST : 0);
  if (last)
    sh->unit[h.slot] = unit;
}

template <class stage> static __device__ __forceinline__ void stage_on(wgmma16_gather &h)
{
  if (++h.slot == stage::COUNT) {
    h.slot = 0;
    h.phase ^= 1;
  }
}

/* The thread that writes that word: the warps take turns. */
static __device__ __forceinline__ bool is_announcer(const wgmma16_gather &h)
{
  return h.lane == 0 && h.slot % (FEEDERS / 32) == (uint32_t)h.warp;
}

/* There are no more. */
static __device__ __forceinline__ void feed_end(wgmma16_shared *sh, const wgmma16_gather &h)
{
  sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
  if (is_announcer(h)) {
    sh->stage[h.slot] = STAGE_END;
    sm90_barrier_arrive_here(AT(skip.full, h.slot, 8));
  }
  gathered(AT(skip.full, h.slot, 8));
}

/* ---- SKIP_A ---- */

/* The way through the stages of a block's units. Everything is the same in all lanes but base and inside. */
typedef struct wgmma16_walk {
  int index;            /* of the unit: past work.count there are no more */
  int4 unit;            /* unit_to_words of it, */
  wgmma16_unit next;    /* and the one after */
  int segment, left;    /* of the strip; its entries from this stage on */
  int at, stages;       /* the stage's first entry in the strip; stages to come of the unit's part, this one included */
  int counts;           /* lane i's: entries of segment i; */
  int next_counts;      /* the same of the next unit's strip, on their way */
  uint64_t base;        /* of B: this lane's panel; */
  bool inside;          /* it is there; */
  bool whole, none;     /* every lane's is, no lane's is: the second block of a pair may lie past B */
  int chunk_end;        /* entry of the strip from which on they are not in shared memory */
  uint4 fetched;        /* entries on their way, */
  const uint32_t *from; /* and from where */
} wgmma16_walk;

/* Entries of all segments of the strip of that row, one a lane: a load of one segment after the other would wait for
   each. */
static __device__ __forceinline__ int strip_counts(const esmm_wgmma16_params &p, const wgmma16_gather &h, int row)
{
  const uint32_t *counts = (const uint32_t *)p.counts + (int64_t)(row / TILE) * p.segments;
  static_assert(ESMM_WGMMA16_MOST_SEGMENTS == 32, "one a lane");
  return h.lane < p.segments ? (int)counts[h.lane] : 0;
}

static __device__ __forceinline__ int walk_count(const wgmma16_walk &w, int segment)
{
  const int count = __shfl_sync(~0u, w.counts, segment);
  return segment < ESMM_WGMMA16_MOST_SEGMENTS ? count : 0;
}

/* To the next segment with entries; `segments` where there is none. */
static __device__ __forceinline__ void walk_segment(const esmm_wgmma16_params &p, wgmma16_walk &w)
{
  while (w.left <= 0 && w.segment < p.segments) {
    w.segment++;
    w.at = w.segment * p.segment_k;
    w.left = walk_count(w, w.segment);
  }
  w.chunk_end = w.at;
}

static __device__ __forceinline__ int walk_entries(const esmm_wgmma16_params &p, const wgmma16_walk &w)
{
  return w.stages <= 0 || w.segment >= p.segments ? 0 : min(w.left, ESMM_WGMMA16_K);
}

static __device__ __forceinline__ int strip_stages(const wgmma16_walk &w)
{
  return __reduce_add_sync(~0u, ceil_div(w.counts, ESMM_WGMMA16_K));
}

/* Entry `at` of the strip of that row. */
static __device__ __forceinline__ const uint32_t *strip_list(const esmm_wgmma16_params &p, int row, int at)
{
  return (const uint32_t *)p.lists + (int64_t)(row / TILE) * (p.segments * p.segment_k) + at;
}

static __device__ __forceinline__ void walk_enter(const esmm_wgmma16_params &p, const wgmma16_work &work,
                                                  const wgmma16_gather &h, wgmma16_walk &w)
{
  if (w.index >= work.count)
    return;
  const wgmma16_unit unit = w.next;
  w.counts = w.next_counts;
  if (w.index + work.step < work.count) {
    w.next = unit_at(work, w.index + work.step);
    w.next_counts = strip_counts(p, h, w.next.row);
  }
  w.unit = unit_to_words(unit);
  w.inside = (int64_t)unit.col + h.panel * 64 < p.b_ld;
  w.whole = __all_sync(~0u, w.inside);
  w.none = __all_sync(~0u, !w.inside);
  w.base = p.b + (w.inside ? (uint32_t)unit.col * 2 + (uint32_t)h.panel * 128 : 0);
  w.segment = -1;
  w.left = 0;
  w.stages = INT32_MAX;
  walk_segment(p, w);
  if (unit.parts > 1) {
    int from, to;
    share(strip_stages(w), unit.part, unit.parts, from, to);
    w.stages = to - from;
    for (; from > 0; from--) {
      w.left -= ESMM_WGMMA16_K;
      w.at += ESMM_WGMMA16_K;
      walk_segment(p, w);
    }
  }
}

/* To the next stage; true where this one was its unit's last. Every unit has one at least, if an empty one. */
static __device__ __forceinline__ bool walk_on(const esmm_wgmma16_params &p, const wgmma16_work &work,
                                               const wgmma16_gather &h, wgmma16_walk &w)
{
  w.stages--;
  w.left -= ESMM_WGMMA16_K;
  w.at += ESMM_WGMMA16_K;
  if (w.left > 0 && w.stages > 0)
    return false;
  if (w.stages > 0) {
    walk_segment(p, w);
    if (w.segment < p.segments)
      return false;
  }
  w.index += work.step;
  walk_enter(p, work, h, w);
  return true;
}

/*
 * A warp's entries of eight stages from `from` on, four a lane: of stage lane / 4, lines 4 (lane % 4) and on of its own
 * 16. They may lie past the segment, never past the lists.
 */
static __device__ __forceinline__ void chunk_fetch(const wgmma16_gather &h, wgmma16_walk &w, const uint32_t *from)
{
  w.from = from;
  const uint32_t *mine = from + h.lane / 4 * ESMM_WGMMA16_K + h.warp * FEEDER_LINES + h.lane % 4 * 4;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.fetched.x), "=r"(w.fetched.y), "=r"(w.fetched.z), "=r"(w.fetched.w)
               : "l"(mine)
               : "memory");
}

/* The next eight stages' entries to shared memory, unless those of the stage at w are there; starts to load those
   after. */
static __device__ __forceinline__ void chunk_at(const esmm_wgmma16_params &p, const wgmma16_work &work,
                                                const wgmma16_gather &h, wgmma16_walk &w)
{
  enum { CHUNK = CHUNK_STAGES * ESMM_WGMMA16_K };
  static_assert(CHUNK * sizeof(uint32_t) <= ESMM_WGMMA16_LISTS_PAST, "params.h has the host leave less room");
  if (w.at < w.chunk_end)
    return;
  const uint32_t *here = strip_list(p, w.unit.x, w.at);
  if (w.from != here)
    chunk_fetch(h, w, here);
  __syncwarp(); /* all lanes have read the last ones */
  sm90_store4(AT(lists, h.warp, CHUNK_STAGES * FEEDER_LINES * 4) + (uint32_t)h.lane * 16, w.fetched);
  __syncwarp();
  w.chunk_end = w.at + CHUNK;
  if (w.left > CHUNK)
    chunk_fetch(h, w, here + CHUNK);
  else if (walk_count(w, w.segment + 1) > 0)
    chunk_fetch(h, w, strip_list(p, w.unit.x, (w.segment + 1) * p.segment_k));
  else if (w.index + work.step < work.count)
    chunk_fetch(h, w, strip_list(p, w.next.row, 0));
}

/*
 * The whole stages at w that another one follows, with their entries in shared memory: the common case, and so the
 * shortest code.
 */
static __device__ __forceinline__ void feed_run(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh, int rank,
                                                wgmma16_gather &h, wgmma16_walk &w)
{
  typedef wgmma16_stage<ESMM_WGMMA16_WIDE> stage;
  const int ready = (w.chunk_end - w.at) / ESMM_WGMMA16_K, run = min(min(w.left / ESMM_WGMMA16_K, ready), w.stages) - 1;
  if (!w.whole || run <= 0)
    return;
  const uint32_t what = stage_rows(p, w.unit.x) | STAGE_STEPS_ALL;
  const wgmma16_base base = base_of(h, w.base);
  int line = packed_line(p, w.unit.x, rank, w.at);
  uint32_t from = AT(lists, h.warp * CHUNK_STAGES + CHUNK_STAGES - ready, FEEDER_LINES * 4);
#pragma unroll 1
  for (int s = 0; s < run; s++, from += FEEDER_LINES * 4, line += ESMM_WGMMA16_K) {
    const uint32_t full = AT(skip.full, h.slot, 8), here = h.slot * stage::BYTES;
    const uint4 list = sm90_load4(from);
    sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
    if (is_announcer(h)) {
      sh->stage[h.slot] = what;
      sm90_barrier_expect(&sh->skip.full[h.slot], 2 * PANEL);
      sm90_tma_load_multicast(ring + here + (uint32_t)rank * PANEL, &p.map_packed, 0, line, &sh->skip.full[h.slot],
                              BOTH);
    }
    gather_lines<false>(h, here, base, list, from, true);
    gathered(full);
    stage_on<stage>(h);
  }
  w.at += run * ESMM_WGMMA16_K;
  w.left -= run * ESMM_WGMMA16_K;
  w.stages -= run;
}

static __device__ __forceinline__ void feed_skip_a(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  typedef wgmma16_stage<ESMM_WGMMA16_WIDE> stage;
  wgmma16_work work = work_of(p, ESMM_WGMMA16_SKIP_A);
  wgmma16_gather h = gather_of<false>(ring, sh);
  work.rank = __shfl_sync(~0u, work.rank, 0);
  wgmma16_walk w;
  w.index = work.first;
  w.from = NULL;
  if (w.index < work.count) {
    w.next = unit_at(work, w.index);
    w.next_counts = strip_counts(p, h, w.next.row);
    chunk_fetch(h, w, strip_list(p, w.next.row, 0));
  }
  walk_enter(p, work, h, w);
  while (w.index < work.count) {
    if (walk_entries(p, w) > 0) {
      chunk_at(p, work, h, w);
      feed_run(p, ring, sh, work.rank, h, w);
    }
    const int entries = walk_entries(p, w);
    const uint32_t full = AT(skip.full, h.slot, 8), here = h.slot * stage::BYTES;
    const int row = h.warp * CHUNK_STAGES + CHUNK_STAGES - (w.chunk_end - w.at) / ESMM_WGMMA16_K;
    const uint32_t from = AT(lists, row, FEEDER_LINES * 4); /* walk_on leaves it alone */
    const uint4 list = sm90_load4(from);
    const uint64_t b = w.base;
    const bool inside = w.inside, whole = w.whole, none = w.none;
    const int4 unit = w.unit;
    const int at = w.at;
    const bool last = walk_on(p, work, h, w);
    sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
    if (is_announcer(h)) {
      announce_stage(sh, h, stage_rows(p, unit.x), none ? 0 : entries, last, unit);
      sm90_barrier_expect(&sh->skip.full[h.slot], entries > 0 ? 2 * PANEL : 0);
      if (entries > 0)
        sm90_tma_load_multicast(ring + here + (uint32_t)work.rank * PANEL, &p.map_packed, 0,
                                packed_line(p, unit.x, work.rank, at), &sh->skip.full[h.slot], BOTH);
    }
    if (entries == ESMM_WGMMA16_K && whole)
      gather_lines<false>(h, here, base_of(h, b), list, from, true);
    else if (!none && h.warp * FEEDER_LINES < entries)
      gather_lines<true>(h, here, base_of(h, b), list, from, inside);
    gathered(full);
    stage_on<stage>(h);
  }
  feed_end(sh, h);
}

/* ---- SKIP_AB ---- */

/* Sums over the lanes of all feeders: of those before this one, and of all. Two 16-bit sums in one word. */
static __device__ __forceinline__ void feeders_scan(wgmma16_shared *sh, const wgmma16_gather &h, uint32_t own,
                                                    uint32_t &before, uint32_t &all)
{
  uint32_t upto = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, upto, d);
    upto += h.lane >= d ? other : 0;
  }
  if (h.lane == 31)
    sh->found[h.warp] = upto;
  meet<5, FEEDERS>();
  const uint4 found = sm90_load4(AT(found, 0, 4));
  before = upto - own + (h.warp > 0 ? found.x : 0) + (h.warp > 1 ? found.y : 0) + (h.warp > 2 ? found.z : 0);
  all = found.x + found.y + found.z + found.w;
}

/* The word of a bitmap that a feeder looks at; 0 past the segment's end. */
typedef struct wgmma16_words {
  const uint32_t *a, *b;
  int segment, word; /* the segment's, of the first feeder */
} wgmma16_words;

static __device__ __forceinline__ void words_fetch(const esmm_wgmma16_params &p, const wgmma16_words &at, uint32_t &a,
                                                   uint32_t &b)
{
  const int word = at.word + (int)threadIdx.x, here = at.segment * (p.segment_k / 32) + word;
  const bool there = at.segment < p.segments && word < p.segment_k / 32 && here < p.b_words;
  a = there ? at.a[here] : 0;
  b = there ? at.b[here] : 0;
}

/*
 * The k's of `take`, bits of a feeder's word, to the ring from entry `at` on. mine: those that are
 * packed, the first as line `line` of the strip; k: the word's first.
 */
static __device__ __forceinline__ void places_write(const wgmma16_gather &h, uint32_t take, uint32_t mine,
                                                    uint32_t line, uint32_t k, uint32_t b_line, uint32_t at)
{
  for (; take; take &= take - 1, at++) {
    const uint32_t low = take & (0u - take), bit = 31 - (uint32_t)__clz((int)low);
    const uint32_t x = line + (uint32_t)__popc(mine & (low - 1)), y = (k + bit) * b_line;
    const uint32_t to = AT(places, at % PLACES, 4);
    sm90_store(to, x * 8);
    sm90_store(to + PLACES * 4, y);
  }
}

/*
 * Where the feeders are in the ring of entries. A round looks at a word of the bitmaps a feeder, 4096 k's, or at a
 * quarter of that where the ring could not take what it finds.
 */
typedef struct wgmma16_round {
  uint32_t head; /* the first entry that is not gathered yet, */
  int waiting;   /* and how many there are */
} wgmma16_round;

/* What all stages of a unit have in common. */
typedef struct wgmma16_task {
  wgmma16_base base;
  uint32_t rows; /* STAGE_ROWS */
  int4 unit;     /* unit_to_words */
} wgmma16_task;

static __device__ __forceinline__ void round_feed(wgmma16_shared *sh, wgmma16_gather &h, wgmma16_round &r,
                                                  const wgmma16_task &task, bool ends)
{
  typedef wgmma16_stage<ESMM_WGMMA16_NARROW> stage;
  const int stages = ends ? max(1, ceil_div(r.waiting, ESMM_WGMMA16_K)) : r.waiting / ESMM_WGMMA16_K;
  if (ends && (int)threadIdx.x < stages * ESMM_WGMMA16_K - r.waiting) {
    const uint32_t to = AT(places, (r.head + (uint32_t)r.waiting + threadIdx.x) % PLACES, 4);
    sm90_store(to, NOTHING);
    sm90_store(to + PLACES * 4, NOTHING);
  }
  meet<6, FEEDERS>(); /* all entries are there */
  for (int s = 0; s < stages; s++) {
    const uint32_t full = AT(skip.full, h.slot, 8), here = h.slot * stage::BYTES;
    const int entries = min(r.waiting, ESMM_WGMMA16_K);
    const uint32_t from = AT(places, (r.head + (uint32_t)(h.warp * FEEDER_LINES)) % PLACES, 4) + h.is_b * PLACES * 4;
    const uint4 list = sm90_load4(from);
    sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
    if (is_announcer(h)) {
      announce_stage(sh, h, task.rows, entries, ends && s == stages - 1, task.unit);
      sm90_barrier_arrive_here(full);
    }
    if (entries == ESMM_WGMMA16_K)
      gather_lines<false>(h, here, task.base, list, from, true);
    else if (h.warp * FEEDER_LINES < entries)
      gather_lines<true>(h, here, task.base, list, from, true);
    gathered(full);
    stage_on<stage>(h);
    r.head += ESMM_WGMMA16_K;
    r.waiting -= entries;
  }
}

static __device__ __forceinline__ void feed_skip_ab(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  const wgmma16_work work = work_of(p, ESMM_WGMMA16_SKIP_AB);
  const int words = p.segment_k / 32;
  const uint32_t b_line = (uint32_t)(p.b_ld / 8);
  wgmma16_gather h = gather_of<true>(ring, sh);
  wgmma16_round r = {0, 0};
  wgmma16_task task;
  for (int i = work.first; i < work.count; i += work.step) {
    const wgmma16_unit unit = unit_at(work, i);
    const int64_t strip = unit.row / TILE;
    wgmma16_words at = {(const uint32_t *)p.a_bits + strip * p.b_words,
                        (const uint32_t *)p.b_bits + unit.col / TILE * p.b_words, 0, 0};
    task.base = base_of(h, h.is_b ? p.b + (uint32_t)unit.col * 2 + (uint32_t)h.panel * 128
                                  : p.packed + (uint64_t)packed_line(p, unit.row, h.panel, 0) * 128);
    task.rows = stage_rows(p, unit.row);
    task.unit = unit_to_words(unit);
    uint32_t next_a, next_b;
    words_fetch(p, at, next_a, next_b);
    uint32_t packed = 0; /* k's of the segment so far */
    while (at.segment < p.segments) {
      const uint32_t mine = next_a, both = next_a & next_b;
      const uint32_t k = (uint32_t)(at.segment * words + at.word + (int)threadIdx.x) * 32;
      uint32_t line = (uint32_t)(at.segment * p.segment_k) + packed, before, all;
      at.word += FEEDERS;
      const bool ends = at.word >= words;
      if (ends) {
        at.segment++;
        at.word = 0;
      }
      words_fetch(p, at, next_a, next_b);
      feeders_scan(sh, h, (uint32_t)__popc(mine) << 16 | (uint32_t)__popc(both), before, all);
      line += before >> 16;
      packed = ends ? 0 : packed + (all >> 16);
      const bool done = at.segment >= p.segments;
      const int parts = (all & 0xffffu) <= PLACES - ESMM_WGMMA16_K ? 1 : 4;
      for (int part = 0; part < parts; part++) {
        uint32_t take = both;
        if (parts > 1) {
          take &= 0xffu << 8 * part;
          meet<6, FEEDERS>(); /* all feeders have read the sums */
          feeders_scan(sh, h, (uint32_t)__popc(take), before, all);
        }
        places_write(h, take, mine, line, k, b_line, r.head + (uint32_t)r.waiting + (before & 0xffffu));
        r.waiting += (int)(all & 0xffffu);
        round_feed(sh, h, r, task, done && part == parts - 1);
      }
    }
  }
  feed_end(sh, h);
}

#endif
