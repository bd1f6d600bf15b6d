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
 * A short launch behind it lists lines and groups of each strip from end to end (esmm_tally_index). The second product
 * fills its stages with groups in that order, out of as many segments as it takes (feed.cuh). Only a segment's last
 * group has lines of zeros, and nothing of B is read for these.
 */
#ifndef ESMM_CUDA_WGMMA16_HANDED_CUH
#define ESMM_CUDA_WGMMA16_HANDED_CUH

#include "cuda/kernels/wgmma16/feed.cuh"
#include "cuda/kernels/wgmma16/store.cuh"

static_assert(ESMM_PACKED_COLS == ESMM_WGMMA16_WIDE, "a tile is a segment");

static __device__ __forceinline__ int groups_of(int lines)
{
  return (lines + ESMM_PACKED_GROUP - 1) / ESMM_PACKED_GROUP;
}

#define MOST_LINES (wgmma16_stage<ESMM_WGMMA16_WIDE>::BYTES / 2 / 128) /* that a warpgroup's half of a stage holds */
static_assert(MOST_LINES % ESMM_PACKED_GROUP == 0, "whole groups");

#define HANDED_PANELS (ESMM_WGMMA16_WIDE / 64) /* of C, a warpgroup's */
#define HANDED_WARPS 2                         /* of those that load nothing, which send and note what is handed over */

/* Where one of a tile's panels of C lies. */
static __device__ __forceinline__ char *handed_panel(char *here, char *there, int panel)
{
  enum { ROOM = wgmma16_stage<ESMM_WGMMA16_WIDE>::BYTES / PANEL };
  return panel < ROOM ? here + panel * PANEL : there + (panel - ROOM) * PANEL;
}

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

/* Where a segment's lines begin: of 64 rows, the first or the second of its strip. */
static __device__ __forceinline__ char *segment_lines(const esmm_packed &to, int row, int col, int panel)
{
  const int64_t segment = ((int64_t)(row / TILE) * 2 + panel) * to.segments + col / ESMM_PACKED_COLS;
  return (char *)to.values + segment * (ESMM_PACKED_COLS * 128);
}

/*
 * store_boxes of a tile whose C is packed, too: C at `here`, the memory of its last stage, and `there`, the packed
 * lines at `lines`, that of the stage before. Where that is too small for all of them, the first ones are sent from
 * here.
 */
static __device__ __forceinline__ void store_handed(const esmm_wgmma16_params &p, wgmma16_shared *sh,
                                                    float (&sums)[ESMM_WGMMA16_WIDE / 2], const wgmma16_unit &unit,
                                                    const float *bias, uint32_t slot, char *here, char *there,
                                                    char *lines)
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
  const int row = unit.row + group * 64, rows = p.m - row - warp * 16;
  uint32_t pairs[HANDED_PANELS][4][4];
  scale(p.epilogue, sums);
  add_row(bias_from(bias, thread % 4 * 2), sums);
  begin_activation(p.epilogue, sums);
#pragma unroll
  for (int g = 0; g < HANDED_PANELS; g++) {
    const int panel = group * HANDED_PANELS + g;
    pack_activated(p.epilogue, &sums[32 * g], pairs[g]);
    if (rows < 16)
      clear_past(pairs[g], rows);
    store_lines(sm90_address(handed_panel(here, there, panel)) + (uint32_t)warp * (PANEL / 4), pairs[g]);
    tally_pairs(sm90_address(sh->tally_bytes) + (uint32_t)g * 64, pairs[g]);
  }
  sm90_fence_async();
  meet<1, WORKERS>(); /* both warpgroups have counted */
  if (thread == 0) {
    sh->tally_tile[0] = make_int4(unit.row, unit.col, (int)slot, 0);
    sm90_barrier_arrive(&sh->c_there);
  }
  const alive_columns a = find_alive(sh->tally_bytes);
  char *mine = lines + group * (MOST_LINES * 128);
  const int end = groups_of(a.count) * ESMM_PACKED_GROUP;
  int from = 0;
  for (;;) {
    write_lines(sm90_address(mine), sm90_address(sh->nowhere[thread / 32]), a, from, pairs);
    const int fill = a.count + thread % 128 / 8; /* lines of zeros */
    if (fill < end && fill >= from && fill < from + MOST_LINES)
      sm90_store4(sm90_address(mine) + (uint32_t)(fill - from) * 128 + (uint32_t)(thread % 8) * 16,
                  make_uint4(0, 0, 0, 0));
    sm90_fence_async();
    meet_group(7 + group);
    if (end - from <= MOST_LINES)
      break;
    if (thread % 128 == 0) {
      sm90_bulk_store(segment_lines(p.handed, unit.row, unit.col, group) + from * 128, mine, MOST_LINES * 128);
      sm90_bulk_commit();
      sm90_bulk_wait_read();
    }
    meet_group(7 + group);
    from += MOST_LINES;
  }
  if (thread % 128 == 0) {
    sh->tally_tile[1 + group] = make_int4(from, end - from, 0, 0);
    sm90_barrier_arrive(&sh->tile_there[group]);
  }
}

/* ---- by warps that load nothing ---- */

/*
 * One thread: sends a tile's C, then its packed lines, and lets go of the stages that they lie in. So these are free
 * sooner than by who multiplies, which is busy by then.
 */
static __device__ __forceinline__ void send_tiles(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  typedef wgmma16_stage<ESMM_WGMMA16_WIDE> stage;
  const uint32_t empty[2] = {sm90_address_at(sh->dense.empty, 0), sm90_address_at(sh->dense.empty, 1)};
  for (uint32_t tile = 0;; tile++) {
    sm90_barrier_wait(&sh->c_there, tile % 2);
    const int4 told = sh->tally_tile[0];
    if (told.x < 0)
      return;
    const uint32_t slot = (uint32_t)told.z, before = slot ? slot - 1 : stage::COUNT - 1;
#pragma unroll 1
    for (int panel = 0; panel < 2 * HANDED_PANELS; panel++)
      sm90_tma_store(&p.map_c, told.y + panel % HANDED_PANELS * 64, told.x + panel / HANDED_PANELS * 64,
                     handed_panel(ring + slot * stage::BYTES, (char *)sh->spare, panel));
    sm90_bulk_commit();
#pragma unroll 1
    for (int group = 0; group < 2; group++) {
      sm90_barrier_wait(&sh->tile_there[group], tile % 2);
      const int4 lines = sh->tally_tile[1 + group];
      if (lines.y > 0)
        sm90_bulk_store(segment_lines(p.handed, told.x, told.y, group) + lines.x * 128,
                        ring + before * stage::BYTES + group * (MOST_LINES * 128), (uint32_t)lines.y * 128);
    }
    sm90_bulk_commit();
    sm90_bulk_wait_read<1>();
    for (int rank = 0; rank < 2; rank++)
      sm90_barrier_arrive_cluster_many(empty[rank] + slot * 8, PACK_WARPS);
    sm90_bulk_wait_read();
    for (int rank = 0; rank < 2; rank++)
      sm90_barrier_arrive_cluster_many(empty[rank] + before * 8, PACK_WARPS);
    for (int group = 0; group < 2; group++)
      sm90_barrier_arrive(&sh->tallied[group]);
  }
}

/* A warp: what was counted of a tile, as tally_counted, and which columns its packed lines are. */
static __device__ __forceinline__ void note_tiles(const esmm_wgmma16_params &p, wgmma16_shared *sh)
{
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = (int)threadIdx.x % 32;
  clear_notes(p, lane, 32);
  __syncwarp();
  if ((p.count_words | p.bitmap_words) && lane == 0)
    clear_wait(p);
  __syncwarp();
  for (uint32_t tile = 0;; tile++) {
    sm90_barrier_wait(&sh->c_there, tile % 2);
    const int row = sh->tally_tile[0].x, col = sh->tally_tile[0].y;
    if (row < 0)
      return;
    for (int group = 0; group < 2; group++) /* everybody has read the bytes */
      sm90_barrier_wait(&sh->tile_there[group], tile % 2);
    const int64_t segment = (int64_t)(row / TILE) * p.handed.segments + col / ESMM_PACKED_COLS;
    uint8_t *places = (uint8_t *)p.handed.places + segment * ESMM_PACKED_COLS;
    int lines = 0;
#pragma unroll 1
    for (int at = 0; at < ESMM_PACKED_COLS; at += 32) {
      uint8_t *byte = sh->tally_bytes + tally_place(at + lane);
      const int count = *byte;
      const uint32_t word = __ballot_sync(~0u, count != 0);
      *byte = 0;
      if (count) {
        if (e.counts)
          atomicAdd((int *)e.counts + col + at + lane, count);
        places[lines + __popc(word & ((1u << lane) - 1))] = (uint8_t)(at + lane);
      }
      if (word && lane == 0)
        atomicOr((uint32_t *)e.bits + (int64_t)(row / TILE) * e.words + (col + at) / 32, word);
      lines += __popc(word);
    }
    if (row < p.m && lane == 0)
      ((uint32_t *)p.handed.counts)[segment] = (uint32_t)lines;
    __syncwarp();
    if (lane < 2)
      sm90_barrier_arrive(&sh->tallied[lane]);
  }
}

#endif
