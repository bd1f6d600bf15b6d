/*
 * tally.cuh: what is noted of C (nonzeros of columns, bitmaps of strips) by warps that have nothing else to do: of the
 * dense product's loading warpgroup one thread loads. They read a tile back when TMA has written it, while the next one
 * is multiplied, so that it takes none of the multiplying warps' time.
 *
 * One thread of each multiplying warpgroup sends a tile off. When it sends the next one, the last has long been
 * written: it then says so. Tiles that TMA does not write are noted by who stores them (store.cuh).
 */
#ifndef ESMM_CUDA_WGMMA16_TALLY_CUH
#define ESMM_CUDA_WGMMA16_TALLY_CUH

#include "cuda/kernels/wgmma16/wgmma16.cuh"

#define TALLY_WARPS 3 /* all of the loading warpgroup but the first */

/* Does this launch note anything so? */
static __device__ __forceinline__ bool tallies_late(const esmm_wgmma16_params &p)
{
  return p.c_boxes && p.epilogue.extra & ESMM_EXTRA_TALLY;
}

/* By the thread that sends tiles off: the last one is in memory. Said once of each. */
static __device__ __forceinline__ void tally_last(wgmma16_shared *sh, int group)
{
  const uint32_t issued = sh->tally_issued[group];
  if (issued == sh->tally_said[group])
    return;
  sh->tally_said[group] = issued;
  if (issued > 1) /* who waits for a tile must not miss it: the one before is done, and its place free */
    sm90_barrier_wait(&sh->tallied, issued % 2);
  sm90_bulk_wait();
  sm90_barrier_arrive(&sh->tile_there);
}

/* All multiplying threads, before a tile that TMA does not write: the last one need not wait for it. */
static __device__ __forceinline__ void tally_before(const esmm_wgmma16_params &p, wgmma16_shared *sh, int group)
{
  if (tallies_late(p) && (thread_now() - FEEDERS) % 128 == 0)
    tally_last(sh, group);
}

/* The same thread, then: what is told of the next. row below 0: there are no more. */
static __device__ __forceinline__ void tally_next(wgmma16_shared *sh, int group, int row, int col)
{
  const uint32_t issued = sh->tally_issued[group];
  if (group == 0)
    sh->tally_tile[issued % 2] = make_int2(row, col);
  sh->tally_issued[group] = issued + 1;
}

/* All multiplying threads, when there are no more tiles: both warpgroups have said so of their last one before either
   says that it was the last. */
static __device__ __forceinline__ void tally_end(wgmma16_shared *sh, int group)
{
  const bool sends = (thread_now() - FEEDERS) % 128 == 0;
  if (sends)
    tally_last(sh, group);
  meet<1, WORKERS>();
  if (sends) {
    const uint32_t issued = sh->tally_issued[group];
    if (issued > 0)
      sm90_barrier_wait(&sh->tallied, (issued - 1) % 2);
    tally_next(sh, group, -1, 0);
    sm90_barrier_arrive(&sh->tile_there);
  }
}

/* Which of two 16-bit elements are not zero: 1 in each half. */
static __device__ __forceinline__ uint32_t nonzero_pair(uint32_t x)
{
  return ((x & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u;
}

/* Rows [first, last) of a tile, all of one strip: added to counts, of 8 columns a lane; the strip's bits. C is read
   once, and is not to drive the operands out of the cache. */
template <int COLS>
static __device__ __forceinline__ void tally_rows(const esmm_wgmma16_params &p, int first, int last, int col,
                                                  uint32_t (&counts)[4])
{
  enum { LANES = COLS / 8, ROWS = 32 / LANES, AT_ONCE = 8 };
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 - 1, step = TALLY_WARPS * ROWS;
  const int mine = col + lane % LANES * 8;
  const uint16_t *from = (const uint16_t *)e.c.data + mine;
  uint32_t before[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    before[i] = counts[i];
    counts[i] = 0;
  }
#pragma unroll 1
  for (int row = first + warp * ROWS + lane / LANES; row < last; row += AT_ONCE * step) {
    uint4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      x[i] = row + i * step < last ? __ldcs((const uint4 *)(from + (row + i * step) * e.c.ld)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      counts[0] += nonzero_pair(x[i].x);
      counts[1] += nonzero_pair(x[i].y);
      counts[2] += nonzero_pair(x[i].z);
      counts[3] += nonzero_pair(x[i].w);
    }
  }
  if (e.bits) {
    uint32_t word = 0; /* this lane's byte of 32 columns */
#pragma unroll
    for (int i = 0; i < 4; i++)
      word |= (counts[i] & 0xffffu ? 1u : 0) << (2 * i) | (counts[i] >> 16 ? 1u : 0) << (2 * i + 1);
    word <<= lane % 4 * 8;
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    if (lane % 4 == 0 && word)
      atomicOr((uint32_t *)e.bits + (int64_t)((uint32_t)first / (uint32_t)e.strip_rows) * e.words + mine / 32, word);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    counts[i] += before[i];
}

template <int COLS>
static __device__ __forceinline__ void tally_tile(const esmm_wgmma16_params &p, wgmma16_shared *sh, int row, int col)
{
  const esmm_epilogue_params &e = p.epilogue;
  const int end = min(row + TILE, p.m), strip = e.bits ? (int)e.strip_rows : TILE;
  uint32_t counts[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int first = row; first < end;) {
    const int last = e.bits ? (int)min((int64_t)end, ((int64_t)first / strip + 1) * strip) : end;
    tally_rows<COLS>(p, first, last, col, counts);
    first = last;
  }
  if (!e.counts)
    return;
  /* The warps' counts are added in shared memory: one addition in memory a column. */
  const int at = (int)threadIdx.x % 32 % (COLS / 8) * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    atomicAdd(&sh->tally_counts[at + 2 * i], (int)(counts[i] & 0xffffu));
    atomicAdd(&sh->tally_counts[at + 2 * i + 1], (int)(counts[i] >> 16));
  }
  meet<9, 32 * TALLY_WARPS>();
  for (int i = (int)threadIdx.x - 32; i < COLS; i += 32 * TALLY_WARPS) {
    const int count = sh->tally_counts[i];
    if (count)
      atomicAdd((int *)e.counts + col + i, count);
    sh->tally_counts[i] = 0;
  }
  meet<9, 32 * TALLY_WARPS>();
}

/* The warps that take the notes, until there are no more tiles. */
template <int COLS> static __device__ __forceinline__ void tally_tiles(const esmm_wgmma16_params &p, wgmma16_shared *sh)
{
  for (int i = (int)threadIdx.x - 32; i < COLS; i += 32 * TALLY_WARPS)
    sh->tally_counts[i] = 0;
  meet<9, 32 * TALLY_WARPS>();
#pragma unroll 1
  for (uint32_t i = 0;; i++) {
    sm90_barrier_wait(&sh->tile_there, i % 2);
    const int2 tile = sh->tally_tile[i % 2];
    if (tile.x < 0)
      return;
    tally_tile<COLS>(p, sh, tile.x, tile.y);
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      sm90_barrier_arrive(&sh->tallied);
  }
}

#endif
