/*
 * handed.cuh: C packed by the product that makes it, and read as A by the next one, which then neither looks for zeros
 * nor packs nor waits until all blocks have (esmm_packed).
 *
 * The first product is dense, in tiles of 128 by 256. Who multiplies has counted a tile's nonzeros (tally.cuh), so it
 * knows which columns are alive; it writes C to the memory of the tile's last stage, as ever, and the alive columns,
 * transposed, to that of the stage before, from where one copy a warpgroup takes them to memory: a tile is a segment of
 * its strip.
 *
 *   values [strip][2 x 64 rows][segment][line][128 bytes]   swizzled as wgmma reads them, groups of 8 lines
 *   places [strip][segment][line]                           which of 256 columns each is
 *   counts [strip][segment]
 *
 * The second one fills its stages with groups, in their order, out of as many segments as it takes: sums of the
 * segments' groups, which a warp keeps in registers, say where each lies. Only a segment's last group has lines of
 * zeros, and nothing of B is read for these.
 */
#ifndef ESMM_CUDA_WGMMA16_HANDED_CUH
#define ESMM_CUDA_WGMMA16_HANDED_CUH

#include "cuda/kernels/wgmma16/feed.cuh"
#include "cuda/kernels/wgmma16/store.cuh"

static_assert(ESMM_PACKED_COLS == ESMM_WGMMA16_WIDE, "a tile is a segment");

/* ---- reading ---- */

#define SPAN 64                                           /* segments that a warp keeps the sums of, two a lane */
#define STAGE_GROUPS (ESMM_WGMMA16_K / ESMM_PACKED_GROUP) /* a warp's: two */
static_assert(STAGE_GROUPS == 2 * FEEDERS / 32, "each warp fetches two groups");

static __device__ __forceinline__ int groups_of(uint32_t count)
{
  return ((int)count + ESMM_PACKED_GROUP - 1) / ESMM_PACKED_GROUP;
}

/* Up to eight stages of a unit. What is the same in all lanes, then a lane's own four lines of stage lane / 4. */
typedef struct handed_chunk {
  int4 unit;     /* unit_told; */
  uint64_t base; /* as in wgmma16_walk */
  bool inside, whole, none;
  bool ends;        /* its last stage is the unit's */
  int stages;       /* 1 at least; 0: there are no more units */
  int groups;       /* an even number */
  int k, left;      /* of its segment: the first k; lines from its own first on */
  uint32_t columns; /* places of its lines, on their way */
  int group;        /* where theirs lies: -1 is the one of zeros */
} handed_chunk;

/* The way through a block's units. All of it is the same in all lanes but the counts and what `first` says. */
typedef struct handed_walk {
  int index;         /* of the unit; past work.count there are no more */
  wgmma16_unit unit; /* it, */
  wgmma16_unit next; /* and the one after; */
  uint2 next_counts; /* of the next one's first span, on their way */
  int span;          /* of the strip: */
  uint2 counts;      /* of segments 2 lane and 2 lane + 1, */
  int first;         /* groups of the span before these, */
  int groups;        /* and all */
  int at, stages;    /* the next chunk's first group; stages to come of the unit's part */
} handed_walk;

static __device__ __forceinline__ uint2 span_counts(const esmm_wgmma16_params &p, int lane, int row, int span)
{
  const int at = span * SPAN + 2 * lane;
  const uint32_t *counts = (const uint32_t *)p.handed.counts + (int64_t)(row / TILE) * p.handed.segments + at;
  return make_uint2(at < p.handed.segments ? __ldg(counts) : 0, at + 1 < p.handed.segments ? __ldg(counts + 1) : 0);
}

/* Groups of a span before each lane's own, and all. */
static __device__ __forceinline__ int span_sums(uint2 counts, int lane, int &first)
{
  const int own = groups_of(counts.x) + groups_of(counts.y);
  int upto = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, upto, d);
    upto += lane >= d ? other : 0;
  }
  first = upto - own;
  return __shfl_sync(~0u, upto, 31);
}

static __device__ __forceinline__ void span_enter(handed_walk &w, int lane, int span, uint2 counts)
{
  w.span = span;
  w.counts = counts;
  w.groups = span_sums(counts, lane, w.first);
  w.at = 0;
}

static __device__ __forceinline__ int spans_of(const esmm_wgmma16_params &p)
{
  return ceil_div(p.handed.segments, SPAN);
}

/* To the unit at w.index, whose first counts have come. */
static __device__ __forceinline__ void handed_enter(const esmm_wgmma16_params &p, const wgmma16_work &work, int lane,
                                                    handed_walk &w)
{
  if (w.index >= work.count)
    return;
  w.unit = w.next;
  span_enter(w, lane, 0, w.next_counts);
  if (w.index + work.step < work.count) {
    w.next = unit_at(work, w.index + work.step);
    w.next_counts = span_counts(p, lane, w.next.row, 0);
  }
  w.stages = INT32_MAX;
  if (w.unit.parts == 1)
    return;
  int all = ceil_div(w.groups, STAGE_GROUPS), from, to, unused;
  for (int s = 1; s < spans_of(p); s++)
    all += ceil_div(span_sums(span_counts(p, lane, w.unit.row, s), lane, unused), STAGE_GROUPS);
  share(all, w.unit.part, w.unit.parts, from, to);
  w.stages = to - from;
  for (; from > 0 && ceil_div(w.groups, STAGE_GROUPS) <= from && w.span + 1 < spans_of(p);) {
    from -= ceil_div(w.groups, STAGE_GROUPS);
    span_enter(w, lane, w.span + 1, span_counts(p, lane, w.unit.row, w.span + 1));
  }
  w.at = from * STAGE_GROUPS;
}

/* A lane's group of the chunk that begins at group w.at: where it lies, and the places of four of its lines. */
static __device__ __forceinline__ void chunk_seek(const esmm_wgmma16_params &p, const wgmma16_gather &h, int rank,
                                                  const handed_walk &w, handed_chunk &c)
{
  const int wanted = w.at + h.lane / 4 * STAGE_GROUPS + h.warp * 2 + h.lane % 4 / 2;
  int owner = 0; /* the last lane whose segments begin there or before */
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    owner += __shfl_sync(~0u, w.first, owner + step) <= wanted ? step : 0;
  const uint2 counts = make_uint2(__shfl_sync(~0u, w.counts.x, owner), __shfl_sync(~0u, w.counts.y, owner));
  int group = wanted - __shfl_sync(~0u, w.first, owner);
  const bool second = group >= groups_of(counts.x);
  group -= second ? groups_of(counts.x) : 0;
  const int segment = w.span * SPAN + 2 * owner + (second ? 1 : 0), line = group * ESMM_PACKED_GROUP + h.lane % 2 * 4;
  const int strip = w.unit.row / TILE;
  c.left = 0;
  c.group = -1;
  c.k = segment * ESMM_PACKED_COLS;
  c.columns = 0;
  if (wanted < w.groups) {
    const uint8_t *places =
        (const uint8_t *)p.handed.places + ((int64_t)strip * p.handed.segments + segment) * ESMM_PACKED_COLS;
    c.left = (int)(second ? counts.y : counts.x) - line;
    c.group = ((strip * 2 + rank) * p.handed.segments + segment) * (ESMM_PACKED_COLS / ESMM_PACKED_GROUP) + group;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(c.columns) : "l"(places + line));
  }
}

/* The next chunk. Every unit has a stage at least, if an empty one. */
static __device__ __forceinline__ void chunk_next(const esmm_wgmma16_params &p, const wgmma16_work &work,
                                                  const wgmma16_gather &h, handed_walk &w, handed_chunk &c)
{
  c.stages = 0;
  if (w.index >= work.count)
    return;
  while (w.at >= w.groups && w.stages > 0 && w.span + 1 < spans_of(p))
    span_enter(w, h.lane, w.span + 1, span_counts(p, h.lane, w.unit.row, w.span + 1));
  const int left = w.stages > 0 ? max(0, w.groups - w.at) : 0;
  c.stages = max(1, min(min(ceil_div(left, STAGE_GROUPS), (int)CHUNK_STAGES), w.stages));
  c.groups = (min(left, c.stages * STAGE_GROUPS) + 1) / 2 * 2;
  c.unit = unit_told(w.unit);
  c.inside = (int64_t)w.unit.col + h.panel * 64 < p.b_ld;
  c.whole = __all_sync(~0u, c.inside);
  c.none = __all_sync(~0u, !c.inside);
  c.base = p.b + (c.inside ? (uint32_t)w.unit.col * 2 + (uint32_t)h.panel * 128 : 0);
  chunk_seek(p, h, work.rank, w, c);
  w.at += c.stages * STAGE_GROUPS;
  w.stages -= c.stages;
  c.ends = w.stages <= 0 || (w.at >= w.groups && w.span + 1 >= spans_of(p));
  if (c.ends) {
    w.index += work.step;
    handed_enter(p, work, h.lane, w);
  }
}

/* Its entries to shared memory: of each stage 16 lines of this warp, then where its two groups lie. Returns which lanes
   have a line that fills up. */
static __device__ __forceinline__ uint32_t chunk_write(const wgmma16_gather &h, const handed_chunk &c, uint32_t b_line)
{
  const uint32_t to = AT(handed, h.warp * CHUNK_STAGES + h.lane / 4, (FEEDER_LINES + 4) * 4);
  uint32_t entry[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    entry[i] = i < c.left ? ((uint32_t)c.k + (c.columns >> (8 * i) & 0xffu)) * b_line : NOTHING;
  __syncwarp(); /* everybody has read the last ones */
  sm90_store4(to + (uint32_t)h.lane % 4 * 16, make_uint4(entry[0], entry[1], entry[2], entry[3]));
  if (h.lane % 2 == 0)
    sm90_store(to + FEEDER_LINES * 4 + (uint32_t)h.lane % 4 * 2, (uint32_t)c.group);
  __syncwarp();
  return __ballot_sync(~0u, c.left < 4);
}

/* A warp's two groups of A, this block's 64 rows of them, to both blocks: by two lanes, or by one where they are
   neighbours. */
static __device__ __forceinline__ void fetch_groups(const esmm_wgmma16_params &p, const wgmma16_gather &h,
                                                    uint32_t from, uint32_t to, uint32_t full)
{
  if (h.lane >= 2)
    return;
  const uint2 group = sm90_load2(from + FEEDER_LINES * 4);
  const bool together = group.y == group.x + 1 && group.x != ~0u;
  const int mine = (int)(h.lane == 0 ? group.x : group.y);
  if (h.lane == 0 || !together)
    sm90_bulk_load_multicast(to + (uint32_t)h.lane * ESMM_PACKED_BYTES,
                             (const char *)p.handed.values + (int64_t)mine * ESMM_PACKED_BYTES,
                             together ? 2 * ESMM_PACKED_BYTES : ESMM_PACKED_BYTES, full, BOTH);
}

/* The loading warpgroup. Entries of a chunk are on their way while the one before is gathered. */
static __device__ __forceinline__ void feed_handed(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  typedef wgmma16_stage<ESMM_WGMMA16_WIDE> stage;
  wgmma16_work work = work_of(p, ESMM_WGMMA16_SKIP_A);
  wgmma16_gather h = gather_of<false>(ring, sh);
  work.rank = __shfl_sync(~0u, work.rank, 0);
  const uint32_t b_line = (uint32_t)(p.b_ld / 8);
  const uint32_t a_at =
      sm90_address(ring) + (uint32_t)work.rank * PANEL + (uint32_t)h.warp * (2 * ESMM_PACKED_BYTES); /* in a stage */
  handed_walk w;
  handed_chunk next;
  w.index = work.first;
  if (w.index < work.count) {
    w.next = unit_at(work, w.index);
    w.next_counts = span_counts(p, h.lane, w.next.row, 0);
  }
  handed_enter(p, work, h.lane, w);
  chunk_next(p, work, h, w, next);
  while (next.stages > 0) {
    const handed_chunk c = next;
    const uint32_t fills = chunk_write(h, c, b_line), rows = stage_rows(p, c.unit.x);
    const wgmma16_base base = base_of(h, c.base);
    chunk_next(p, work, h, w, next);
#pragma unroll 1
    for (int s = 0; s < c.stages; s++) {
      const int groups = min(c.groups - s * STAGE_GROUPS, (int)STAGE_GROUPS);
      const uint32_t full = AT(skip.full, h.slot, 8), here = h.slot * stage::BYTES;
      const uint32_t from = AT(handed, h.warp * CHUNK_STAGES + s, (FEEDER_LINES + 4) * 4);
      const uint4 list = sm90_load4(from);
      sm90_barrier_wait_at(AT(skip.empty, h.slot, 8), h.phase);
      if (is_teller(h)) {
        stage_tell(sh, h, rows, c.none ? 0 : groups * ESMM_PACKED_GROUP, c.ends && s == c.stages - 1, c.unit);
        sm90_barrier_expect(&sh->skip.full[h.slot], (uint32_t)groups * (2 * ESMM_PACKED_BYTES));
      }
      if (2 * h.warp < groups) {
        fetch_groups(p, h, from, a_at + here, full);
        if (c.whole && (fills >> (4 * s) & 15u) == 0)
          gather_lines<false>(h, here, base, list, from, true);
        else if (!c.none)
          gather_lines<true>(h, here, base, list, from, c.inside);
      }
      gathered(full);
      stage_on<stage>(h);
    }
  }
  feed_end(sh, h);
}

/* ---- writing ---- */

#define MOST_LINES (wgmma16_stage<ESMM_WGMMA16_WIDE>::BYTES / 2 / 128) /* that a warpgroup's half of a stage holds */
static_assert(MOST_LINES % ESMM_PACKED_GROUP == 0, "whole groups");

/* Rows past C are not C's: zeros, which are not counted. row: of the warp's first. */
static __device__ __forceinline__ void clear_past(uint32_t (&pairs)[4][4], int rows)
{
  const int row = thread_now() % 32 / 4;
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (row + i % 2 * 8 >= rows)
      pairs[i / 4][i % 4] = 0;
}

/* Which of a tile's 256 columns are alive, and how many are before each 32 of them. */
typedef struct alive_columns {
  uint32_t word[8];
  int before[8], count;
} alive_columns;

static __device__ __forceinline__ alive_columns find_alive(const uint8_t *bytes)
{
  const int lane = thread_now() % 32;
  alive_columns a;
  a.count = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) {
    a.word[w] = __ballot_sync(~0u, bytes[tally_place(32 * w + lane)] != 0);
    a.before[w] = a.count;
    a.count += __popc(a.word[w]);
  }
  return a;
}

/* Places and count of a segment; warp i of eight has the i-th 32 columns. */
static __device__ __forceinline__ void write_places(const esmm_packed &to, const alive_columns &a, int strip,
                                                    int segment)
{
  const int thread = thread_now() - FEEDERS, lane = thread % 32, warp = thread / 32;
  const int64_t at = (int64_t)strip * to.segments + segment;
  uint32_t mine = 0;
  int before = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) {
    mine = w == warp ? a.word[w] : mine;
    before += w < warp ? __popc(a.word[w]) : 0;
  }
  if (mine >> lane & 1)
    ((uint8_t *)to.places)[at * ESMM_PACKED_COLS + before + __popc(mine & ((1u << lane) - 1))] = (uint8_t)thread;
  if (thread == 0)
    ((uint32_t *)to.counts)[at] = (uint32_t)a.count;
}

/*
 * A warp's 16 rows of the alive columns, lines [from, from + MOST_LINES) of the segment, transposed, to its warpgroup's
 * lines in shared memory; nowhere: 512 bytes for the others.
 */
static __device__ __forceinline__ void write_lines(uint32_t lines, uint32_t nowhere, const alive_columns &a, int from,
                                                   const uint32_t (&pairs)[4][4][4])
{
  const uint32_t lane = (uint32_t)thread_now() % 32, warp = (uint32_t)thread_now() / 32 % 4;
  const uint32_t part = warp * 2 + lane / 8 % 2; /* 16 bytes of a line: 8 rows */
#pragma unroll
  for (int g = 0; g < 4; g++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t word = a.word[2 * g + i / 2], bit = 1u << (i % 2 * 16) << (lane / 16 * 8 + lane % 8);
      const uint32_t line = (uint32_t)(a.before[2 * g + i / 2] - from + __popc(word & (bit - 1)));
      const bool there = word & bit && line < MOST_LINES;
      sm90_stmatrix_trans_at(there ? lines + line * 128 + (part ^ line % 8) * 16 : nowhere + lane * 16, pairs[g][i]);
    }
}

/*
 * store_boxes of a tile whose C is packed, too: C at `here` and `there`, the packed lines at `lines`, a stage that is
 * held like the one at `here`. Where that is too small for all of them, they go one part after the other.
 */
static __device__ __forceinline__ void store_handed(const esmm_wgmma16_params &p, wgmma16_shared *sh,
                                                    float (&sums)[ESMM_WGMMA16_WIDE / 2], const wgmma16_unit &unit,
                                                    const float *bias, char *here, char *there, char *lines)
{
  enum { PANELS = ESMM_WGMMA16_WIDE / 64, ROOM = wgmma16_stage<ESMM_WGMMA16_WIDE>::BYTES / PANEL };
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
  const int row = unit.row + group * 64, rows = p.m - row - warp * 16;
  uint32_t pairs[PANELS][4][4];
  scale(p.epilogue, sums);
  add_row(bias_from(bias, thread % 4 * 2), sums);
  begin_activation(p.epilogue, sums);
#pragma unroll
  for (int g = 0; g < PANELS; g++) {
    const int panel = group * PANELS + g;
    const uint32_t to = sm90_address(panel < ROOM ? here + panel * PANEL : there + (panel - ROOM) * PANEL) +
                        (uint32_t)warp * (PANEL / 4);
    pack_activated(p.epilogue, &sums[32 * g], pairs[g]);
    if (rows < 16)
      clear_past(pairs[g], rows);
    store_lines(to, pairs[g]);
    tally_pairs(sm90_address(sh->tally_bytes) + (uint32_t)g * 64, pairs[g]);
  }
  meet<1, WORKERS>(); /* both warpgroups have counted */
  const alive_columns a = find_alive(sh->tally_bytes);
  const int strip = unit.row / TILE, segment = unit.col / ESMM_PACKED_COLS;
  if (unit.row < p.m)
    write_places(p.handed, a, strip, segment);
  char *mine = lines + group * (MOST_LINES * 128);
  const int end = groups_of((uint32_t)a.count) * ESMM_PACKED_GROUP;
  int from = 0;
  do {
    if (from > 0) {
      if (thread % 128 == 0)
        sm90_bulk_wait_read();
      meet_group(7 + group);
    }
    write_lines(sm90_address(mine), sm90_address(sh->nowhere[thread / 32]), a, from, pairs);
    const int fill = a.count + thread % 128 / 8; /* lines of zeros */
    if (fill < end && fill >= from && fill < from + MOST_LINES)
      sm90_store4(sm90_address(mine) + (uint32_t)(fill - from) * 128 + (uint32_t)(thread % 8) * 16,
                  make_uint4(0, 0, 0, 0));
    sm90_fence_async();
    meet_group(7 + group);
    if (thread % 128 == 0) {
      if (from == 0) {
        tally_next(sh, group, row, unit.col, sm90_address(here));
#pragma unroll
        for (int g = 0; g < PANELS; g++) {
          const int panel = group * PANELS + g;
          sm90_tma_store(&p.map_c, unit.col + 64 * g, row,
                         panel < ROOM ? here + panel * PANEL : there + (panel - ROOM) * PANEL);
        }
      }
      const int count = min(end - from, (int)MOST_LINES);
      if (count > 0)
        sm90_bulk_store((char *)p.handed.values +
                            ((((int64_t)strip * 2 + group) * p.handed.segments + segment) * ESMM_PACKED_COLS + from) *
                                128,
                        mine, (uint32_t)count * 128);
      sm90_bulk_commit();
    }
    from += MOST_LINES;
  } while (from < end);
}

#endif
