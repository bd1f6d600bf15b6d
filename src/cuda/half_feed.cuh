/*
 * half_feed.cuh: the loading warpgroup of k_half_sm90a.cu.
 *
 *   dense     one thread starts the copy engine: boxes of 64 x 64; what a pair shares is fetched half by half and sent
 *             to both
 *   SKIP_A    packed A comes as 16 KiB blocks, half by half to both blocks of a pair; the rows of B that the strip's
 *             list names are gathered, 512 bytes an instruction
 *   SKIP_AB   the bitmaps of the strip and of B's tile give the list; lines of the packed A and of B are gathered
 *
 * One warp sees to the lists of the stages to come, the other three gather: 64 instructions a stage, next to which
 * nothing else may take time.
 */
#ifndef ESMM_CUDA_HALF_FEED_CUH
#define ESMM_CUDA_HALF_FEED_CUH

#include "half.cuh"

#include <stddef.h>

#define NOTHING 0xffffffffu /* an entry of a list that fills up */
#define BOTH 3              /* blocks of a pair */

/* 16 bytes, or zeros. */
static __device__ __forceinline__ void gather(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* The barrier learns when this thread's gathers have come. */
static __device__ __forceinline__ void gathered(uint32_t b)
{
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory");
}

/* ---- dense ---- */

/* 64 x 64 boxes of one stage: what is shared is fetched half by half and sent to both blocks of the pair. */
template <int COLS>
static __device__ __forceinline__ void load_dense(const esmm_half_params &p, char *to, uint64_t *full, int row, int col,
                                                  int k, int rank, bool share_b)
{
  enum { PANELS = COLS / 64 };
  char *b = to + half_stage<COLS>::A;
  const int below = p.a_by_k ? 64 : 0, further = p.a_by_k ? 0 : 64; /* the next 64 rows of A, in its map */
  const int x = p.a_by_k ? row : k, y = p.a_by_k ? k : row;
  sm90_barrier_expect(full, half_stage<COLS>::BYTES);
  if (share_b) {
    sm90_tma_load(to, &p.map_a, x, y, full);
    sm90_tma_load(to + PANEL, &p.map_a, x + below, y + further, full);
#pragma unroll
    for (int i = 0; i < PANELS / 2; i++) {
      const int panel = rank * (PANELS / 2) + i;
      sm90_tma_load_multicast(b + panel * PANEL, &p.map_b, col + panel * 64, k, full, BOTH);
    }
  } else {
    sm90_tma_load_multicast(to + rank * PANEL, &p.map_a, x + rank * below, y + rank * further, full, BOTH);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
      sm90_tma_load(b + i * PANEL, &p.map_b, col + i * 64, k, full);
  }
}

/*
 * One thread: all stages. Where the block chooses, it begins before the outcome is known, and asks at a certain stage,
 * the same in both blocks of a pair. False: the product is not wanted, and nobody uses the ring any more.
 */
template <int COLS>
static __device__ __forceinline__ bool feed_dense(const esmm_half_params &p, char *ring, half_shared *sh)
{
  typedef half_stage<COLS> stage;
  const half_work work = work_of(p, ESMM_HALF_DENSE);
  const int steps = ceil_div(p.k, ESMM_HALF_K);
  const bool share_b = work.u.share == ESMM_HALF_SHARE_B;
  int slot = 0, until_known = p.choose ? STAGES_UNKNOWN : -1;
  uint32_t phase = 1;
  if (p.choose && work.first >= work.count) {
    sm90_barrier_wait(&sh->decided, 0);
    return sh->mode == ESMM_HALF_DENSE;
  }
  for (int i = work.first; i < work.count; i += work.step) {
    const half_unit unit = unit_at(work, i);
    int from, to;
    share(steps, unit.part, unit.parts, from, to);
    for (int s = from; s < to || s == from; s++) {
      bool off = false;
      if (until_known >= 0 && (until_known-- == 0 || s + 1 >= to)) { /* C must not be written before */
        until_known = -1;
        sm90_barrier_wait(&sh->decided, 0);
        off = sh->mode != ESMM_HALF_DENSE;
      }
      sm90_barrier_wait(&sh->dense.empty[slot], phase);
      if (off) {
        sh->stage[slot] = STAGE_LAST | STAGE_OFF;
        sm90_barrier_arrive(&sh->dense.full[slot]);
        sm90_barrier_wait(&sh->dense.empty[slot], phase ^ 1);
        return false;
      }
      sh->stage[slot] = (s < to ? 4 : 0) | (s + 1 >= to ? STAGE_LAST : 0);
      load_dense<COLS>(p, ring + slot * stage::BYTES, &sh->dense.full[slot], unit.row, unit.col, s * ESMM_HALF_K,
                       work.rank, share_b);
      if (++slot == stage::COUNT) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
  return true;
}

/* ---- the order in which half_pack.cuh packs 32 k's ---- */

/* Bit 8g + q of a word becomes bit 4q + g, by four exchanges of two bits of the index. */
static __device__ __forceinline__ uint32_t packed_order(uint32_t x)
{
  uint32_t t = (x ^ x >> 1) & 0x22222222u;
  x ^= t ^ t << 1;
  t = (x ^ x >> 7) & 0x00aa00aau;
  x ^= t ^ t << 7;
  t = (x ^ x >> 2) & 0x0c0c0c0cu;
  x ^= t ^ t << 2;
  t = (x ^ x >> 14) & 0x0000ccccu;
  return x ^ t ^ t << 14;
}

/* And back. */
static __device__ __forceinline__ uint32_t natural_order(uint32_t x)
{
  uint32_t t = (x ^ x >> 14) & 0x0000ccccu;
  x ^= t ^ t << 14;
  t = (x ^ x >> 2) & 0x0c0c0c0cu;
  x ^= t ^ t << 2;
  t = (x ^ x >> 7) & 0x00aa00aau;
  x ^= t ^ t << 7;
  t = (x ^ x >> 1) & 0x22222222u;
  return x ^ t ^ t << 1;
}

/* ---- the warp that sees to lists ---- */

/* Waits until list `number` may be written. */
static __device__ __forceinline__ void list_await(half_shared *sh, uint32_t number)
{
  sm90_barrier_wait(&sh->list_empty[number % LISTS], (number / LISTS & 1) ^ 1);
}

/* Walks the entries of a strip, from segment to segment; the next segment's count is fetched ahead. */
typedef struct half_walk {
  const uint32_t *counts;
  int segment, segments, entry, left; /* entry: of the segment; left: of it, from there on */
  int ahead;                          /* entries of segment + 1 */
} half_walk;

static __device__ __forceinline__ int walk_count(const half_walk &w, int segment)
{
  return segment < w.segments ? (int)w.counts[segment] : 0;
}

static __device__ __forceinline__ void walk_next_segment(half_walk &w)
{
  while (w.left <= 0 && w.segment < w.segments) {
    w.segment++;
    w.entry = 0;
    w.left = w.ahead;
    w.ahead = walk_count(w, w.segment + 1);
  }
}

static __device__ __forceinline__ void walk_on(half_walk &w)
{
  w.entry += ESMM_HALF_K;
  w.left -= ESMM_HALF_K;
  walk_next_segment(w);
}

static __device__ __forceinline__ int strip_stages(const esmm_half_params &p, int strip)
{
  const uint32_t *counts = (const uint32_t *)p.counts + (int64_t)strip * p.segments;
  int stages = 0;
  for (int i = 0; i < p.segments; i++)
    stages += ceil_div((int)counts[i], ESMM_HALF_K);
  return stages;
}

/* One thread: lists lie ready in memory, 64 entries a stage. */
static __device__ __forceinline__ void list_skip_a(const esmm_half_params &p, half_shared *sh)
{
  const half_work work = work_of(p, ESMM_HALF_SKIP_A);
  uint32_t number = 0;
  for (int i = work.first; i < work.count; i += work.step) {
    const half_unit unit = unit_at(work, i);
    const int strip = unit.row / TILE;
    int from = 0, to = INT32_MAX;
    if (unit.parts > 1)
      share(strip_stages(p, strip), unit.part, unit.parts, from, to);
    half_walk w = {(const uint32_t *)p.counts + (int64_t)strip * p.segments, -1, p.segments, 0, 0, 0};
    w.ahead = walk_count(w, 0);
    walk_next_segment(w);
    for (int s = 0; s < from; s++)
      walk_on(w);
    for (bool last = false; !last; number++) { /* one stage at least, if an empty one */
      const bool none = from >= to || w.segment >= w.segments;
      const int64_t place = ((int64_t)strip * p.segments + w.segment) * p.segment_k + w.entry;
      const int entries = none ? 0 : min(w.left, ESMM_HALF_K);
      if (!none)
        walk_on(w);
      last = ++from >= to || w.segment >= w.segments;
      list_await(sh, number);
      uint64_t *full = &sh->list_full[number % LISTS];
      sh->orders[number % LISTS] = {p.packed + (uint64_t)place * (TILE * 2), unit.col,
                                    entries | (last ? ORDER_LAST : 0)};
      sm90_barrier_expect(full, none ? 0 : ESMM_HALF_K * 4);
      if (!none)
        sm90_bulk_load(sh->lists[number % LISTS], (const uint32_t *)p.lists + place, ESMM_HALF_K * 4, full);
    }
  }
  list_await(sh, number);
  sh->orders[number % LISTS] = {0, 0, ORDER_END};
  sm90_barrier_arrive(&sh->list_full[number % LISTS]);
}

/*
 * One warp: the k's of a strip that B's tile needs too come from the bitmaps, 1024 at a time, 32 a lane. Sums over the
 * lanes tell each where its own stand in the packed strip and in the list, a run of entries over all lists of the ring.
 */
static __device__ __forceinline__ void list_skip_ab(const esmm_half_params &p, half_shared *sh)
{
  const half_work work = work_of(p, ESMM_HALF_SKIP_AB);
  const int lane = (int)threadIdx.x % 32, words = p.segment_k / 32;
  const uint32_t b_line = (uint32_t)(p.b_ld / 8);
  uint32_t number = 0; /* of the list that is being filled */
  for (int i = work.first; i < work.count; i += work.step) {
    const half_unit unit = unit_at(work, i);
    const int64_t strip = unit.row / TILE;
    const uint32_t *a = (const uint32_t *)p.a_bits + strip * p.b_words;
    const uint32_t *b = (const uint32_t *)p.b_bits + unit.col / TILE * p.b_words;
    const uint64_t packed = p.packed + (uint64_t)strip * p.segments * p.segment_k * (TILE * 2);
    int entries = 0; /* in the list that is being filled */
    const bool there = lane < words && lane < p.b_words;
    uint32_t next_a = there ? a[lane] : 0, next_b = there ? b[lane] : 0;
    list_await(sh, number);
    int before = 0; /* alive k's of the segment so far */
    for (int segment = 0, word = 0; segment < p.segments;) {
      const int here = segment * words + word + lane;
      const uint32_t mine = packed_order(next_a);
      uint32_t both = packed_order(next_a & next_b);
      const int place = segment * p.segment_k + before;
      word += 32;
      const bool ends = word >= words;
      if (ends) {
        segment++;
        word = 0;
      }
      const int next = segment * words + word + lane;
      const bool inside = segment < p.segments && word + lane < words && next < p.b_words;
      next_a = inside ? a[next] : 0;
      next_b = inside ? b[next] : 0;
      const uint32_t own = (uint32_t)__popc(mine) << 16 | (uint32_t)__popc(both);
      uint32_t upto = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, upto, d);
        upto += lane >= d ? other : 0;
      }
      const uint32_t all = __shfl_sync(~0u, upto, 31);
      const int total = (int)(all & 0xffffu);
      const uint32_t filled = (uint32_t)(entries + total) / ESMM_HALF_K; /* lists that this completes */
      for (uint32_t l = 1; l <= filled; l++)
        list_await(sh, number + l);
      const int from = place + (int)((upto - own) >> 16);
      uint32_t at = (number % LISTS) * ESMM_HALF_K + (uint32_t)entries + ((upto - own) & 0xffffu);
      for (; both; both &= both - 1, at++) {
        const int bit = __ffs((int)both) - 1;
        const uint32_t x = (uint32_t)(from + __popc(mine & ((1u << bit) - 1)));
        const uint32_t k = (uint32_t)here * 32 + (uint32_t)(bit % 4 * 8 + bit / 4);
        sh->pairs[at % (LISTS * ESMM_HALF_K)] = make_uint2((x & ~63u) << 4 | x % 64 << 3 | x % 8, k * b_line);
      }
      before = ends ? 0 : before + (int)(all >> 16);
      for (uint32_t l = 0; l < filled; l++) { /* every lane has written its entries */
        if (lane == 0)
          sh->orders[(number + l) % LISTS] = {packed, unit.col, ESMM_HALF_K};
        sm90_barrier_arrive(&sh->list_full[(number + l) % LISTS]);
      }
      number += filled;
      entries = entries + total - (int)filled * ESMM_HALF_K;
    }
    /* The unit's last stage, if an empty one. */
    for (int e = entries + lane; e < ESMM_HALF_K; e += 32)
      sh->pairs[number % LISTS * ESMM_HALF_K + e] = make_uint2(NOTHING, NOTHING);
    if (lane == 0)
      sh->orders[number % LISTS] = {packed, unit.col, entries | ORDER_LAST};
    sm90_barrier_arrive(&sh->list_full[number % LISTS]);
    number++;
  }
  list_await(sh, number);
  if (lane == 0)
    sh->orders[number % LISTS] = {0, 0, ORDER_END};
  sm90_barrier_arrive(&sh->list_full[number % LISTS]);
}

/* ---- the three that gather ---- */

/*
 * Lists hold places in units of 16 bytes, ready to be added. Of a stage's lines warps 0 and 1 have 22, warp 2 has 20
 * and starts the copy of packed A.
 */
#define GATHER_LINES 22

/* A lane's 16 bytes of so many lines; with a check, those whose entry is NOTHING become zeros. */
template <int LINES, bool CHECK>
static __device__ __forceinline__ void gather_lines(const uint32_t *to, uint32_t stage, uint64_t base,
                                                    const uint32_t *list, uint32_t flip, bool inside)
{
#pragma unroll
  for (int j = 0; j < LINES; j++)
    gather(stage + to[j], (const void *)(base + (uint64_t)(list[j] ^ flip) * 16),
           CHECK ? list[j] != NOTHING && inside : true);
}

/* A stage as one who gathers it knows it. */
typedef struct half_task {
  uint4 order; /* packed, packed, col, what of half_order */
  uint32_t list[3][8];
} half_task;

/* A gatherer's own, in registers. */
typedef struct half_gather {
  uint32_t ring_at, sh_at; /* addresses of shared memory */
  uint32_t to[8];          /* where a lane's 16 bytes of eight lines go in a stage */
  uint32_t flip;
  uint32_t slot, phase;
  int lane, warp;
  bool is_b;
} half_gather;

#define AT(field, index, size) (h.sh_at + (uint32_t)offsetof(half_shared, field) + (uint32_t)(index) * (size))

template <int COLS>
static __device__ __forceinline__ void task_fetch(const half_gather &h, uint32_t number, half_task &task)
{
  const uint32_t at = number % LISTS, first = at * ESMM_HALF_K + (uint32_t)(h.warp * GATHER_LINES);
  sm90_barrier_wait_at(AT(list_full, at, 8), number / LISTS & 1);
  task.order = sm90_load4(AT(orders, at, 16));
#pragma unroll
  for (int g = 0; g < 3; g++)
#pragma unroll
    for (int j = 0; j < (g == 2 ? GATHER_LINES - 16 : 8); j += 2) {
      if (g == 2 && j >= 4 && h.warp == 2)
        break;
      if (COLS == 128) {
        task.list[g][j] = sm90_load(AT(pairs, first + 8 * g + j, 8) + h.is_b * 4);
        task.list[g][j + 1] = sm90_load(AT(pairs, first + 8 * g + j + 1, 8) + h.is_b * 4);
      } else {
        const uint2 two = sm90_load2(AT(lists, first + 8 * g + j, 4));
        task.list[g][j] = two.x;
        task.list[g][j + 1] = two.y;
      }
    }
}

/* The stage of list `number`; false where there is none. */
template <int COLS>
static __device__ __forceinline__ bool task_do(const esmm_half_params &p, char *ring, half_shared *sh, half_gather &h,
                                               uint32_t number, const half_task &task)
{
  typedef half_stage<COLS> stage;
  const bool both = COLS == 128; /* operands are gathered */
  const uint32_t what = task.order.w;
  if (what & ORDER_END)
    return false;
  const int entries = (int)(what & ORDER_ENTRIES), lines = (entries + 15) / 16 * 16;
  const uint64_t packed = (uint64_t)task.order.y << 32 | task.order.x;
  const uint32_t full = AT(skip.full, h.slot, 8), here = h.slot * stage::BYTES;
  sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
  sm90_barrier_arrive_here(AT(list_empty, number % LISTS, 8)); /* every lane has read the list */
  if (h.lane == 0 && h.warp == 2) {
    sh->stage[h.slot] = (uint32_t)lines / 16 | (what & ORDER_LAST ? STAGE_LAST : 0);
    if (both) {
      sm90_barrier_arrive_here(full);
    } else {
      const uint32_t rank = cluster_rank();
      sm90_barrier_expect(&sh->skip.full[h.slot], entries > 0 ? stage::A : 0);
      if (entries > 0)
        sm90_bulk_load_multicast(ring + here + rank * PANEL, (const char *)packed + rank * PANEL, PANEL,
                                 &sh->skip.full[h.slot], BOTH);
    }
  }
  const bool inside = both || (int64_t)task.order.z + h.lane * 8 < p.b_ld;
  uint64_t base = !h.is_b ? packed + (uint32_t)h.lane / 8 % 2 * PANEL
                          : p.b + (inside ? task.order.z * 2 + (uint32_t)(both ? h.lane % 16 : h.lane) * 16 : 0);
  asm volatile("" : "+l"(base)); /* one sum, not two for every line */
  if (entries == ESMM_HALF_K && __all_sync(~0u, inside)) {
    gather_lines<8, false>(h.to, here, base, task.list[0], h.flip, true);
    gather_lines<8, false>(h.to, here + 1024, base, task.list[1], h.flip, true);
    gather_lines<4, false>(h.to, here + 2048, base, task.list[2], h.flip, true);
    if (h.warp < 2)
      gather_lines<GATHER_LINES - 20, false>(h.to + 4, here + 2048, base, task.list[2] + 4, h.flip, true);
  } else {
    const int first = h.warp * GATHER_LINES;
#pragma unroll
    for (int g = 0; g < 2; g++)
      if (first + 8 * g < lines)
        gather_lines<8, true>(h.to, here + g * 1024, base, task.list[g], h.flip, inside);
    if (first + 16 < lines) {
      gather_lines<4, true>(h.to, here + 2048, base, task.list[2], h.flip, inside);
      if (h.warp < 2)
        gather_lines<GATHER_LINES - 20, true>(h.to + 4, here + 2048, base, task.list[2] + 4, h.flip, inside);
    }
  }
  gathered(full);
  if (++h.slot == stage::COUNT) {
    h.slot = 0;
    h.phase ^= 1;
  }
  return true;
}

#undef AT

template <int COLS>
static __device__ __forceinline__ void feed_skip(const esmm_half_params &p, char *ring, half_shared *sh)
{
  typedef half_stage<COLS> stage;
  const bool both = COLS == 128;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  /*
   * Of a line of B a lane has 16 bytes of 512: panel lane / 8, part lane % 8. Of lines of 256 bytes of both operands,
   * lanes 0-15 have A's, the others B's. A part of the packed A lies where the line's own swizzle put it: its entry
   * ends in the line's number modulo 8, and the lane's part flips that.
   */
  const bool is_b = !both || lane >= 16;
  const uint32_t panel = both ? (uint32_t)lane / 8 % 2 : (uint32_t)lane / 8, part = (uint32_t)lane % 8;
  half_gather h = {sm90_address(ring), sm90_address(sh), {}, is_b ? 0 : part, 0, 1, lane, warp, is_b};
  asm volatile("" : "+r"(h.ring_at), "+r"(h.sh_at)); /* they stay in registers */
#pragma unroll
  for (int j = 0; j < 8; j++)
    h.to[j] = h.ring_at + (is_b ? stage::A : 0) + panel * PANEL + (uint32_t)(warp * GATHER_LINES + j) * 128 +
              (part ^ (uint32_t)(warp * GATHER_LINES + j) % 8) * 16;
  for (uint32_t number = 0;; number++) {
    half_task task;
    task_fetch<COLS>(h, number, task);
    if (!task_do<COLS>(p, ring, sh, h, number, task))
      break;
  }
}

#endif
