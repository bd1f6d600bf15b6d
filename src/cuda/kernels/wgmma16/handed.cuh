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
  sm90_fence_async();
  meet<1, WORKERS>(); /* both warpgroups have counted */
  if (thread % 128 == 0) {
#pragma unroll
    for (int g = 0; g < PANELS; g++) {
      const int panel = group * PANELS + g;
      sm90_tma_store(&p.map_c, unit.col + 64 * g, row,
                     panel < ROOM ? here + panel * PANEL : there + (panel - ROOM) * PANEL);
    }
    sm90_bulk_commit();
  }
  const alive_columns a = find_alive(sh->tally_bytes);
  const int strip = unit.row / TILE, segment = unit.col / ESMM_PACKED_COLS;
  if (unit.row < p.m)
    write_places(p.handed, a, strip, segment);
  char *mine = lines + group * (MOST_LINES * 128);
  const int end = groups_of(a.count) * ESMM_PACKED_GROUP;
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
      if (from == 0)
        tally_next(sh, group, row, unit.col, sm90_address(here));
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
