/*
 * pack.cuh: A scanned and packed in one pass, for k_wgmma16_sm90a.cu.
 *
 * Work is cut into segments: 128 rows (a strip) by segment_k k's, one block each, so that no block waits for another's
 * counts. A step is 64 k's of the strip, 16 KiB through TMA; the eight multiplying warps take steps in turn, each a
 * whole one, so that nothing but a count goes from warp to warp:
 *
 *   look    which of the 64 k's have a nonzero (-0 is a zero)
 *   place   the count comes from the warp of the step before, and goes on to the next one
 *   write   the alive k's behind each other
 *
 * Blocks of 64 packed k's, [2 panels of 64 rows][64 k's][128 bytes], swizzled, lie in a ring; a thread of the loading
 * warpgroup sends those that are full. TMA undoes the swizzle, so that gathering warps need not.
 *
 *   counts [strip][segment]           alive k's
 *   lists  [strip][segment][...]      where their rows of B begin, in 16 bytes; NOTHING up to the next multiple of 64
 *   a_bits [strip][b_words]           bitmaps
 *   packed [strip][panel][segment][...]  their columns; zeros up to the next multiple of 16
 *
 * Shared memory: PACK_WARPS buffers for what comes, a ring of PACK_BLOCKS for what leaves.
 */
#ifndef ESMM_CUDA_WGMMA16_PACK_CUH
#define ESMM_CUDA_WGMMA16_PACK_CUH

#include "cuda/kernels/wgmma16/feed.cuh"
#include "cuda/kernels/wgmma16/lines.cuh"

#define PACK_K 64
#define PACK_BYTES (TILE * PACK_K * 2)   /* of a step, and of a block */
#define PACK_PANEL (PACK_BLOCKS * PANEL) /* the ring: all blocks' first panels, then their second ones */

static_assert((PACK_WARPS + PACK_BLOCKS) * PACK_BYTES <= RING_BYTES, "packing uses the ring");
static_assert(ESMM_WGMMA16_SEGMENT_STEP % PACK_K == 0, "a segment is whole steps");
static_assert(PACK_K == ESMM_WGMMA16_K, "a block is what a stage takes");

/* Steps of a segment. */
static __device__ __forceinline__ int pack_steps(const esmm_wgmma16_params &p, int segment)
{
  return min(ceil_div(p.k - segment * p.segment_k, PACK_K), p.segment_k / PACK_K);
}

static __device__ __forceinline__ int pack_items(const esmm_wgmma16_params &p)
{
  return ceil_div(p.m, TILE) * p.segments;
}

/* One thread: a step to the buffer of the warp that packs it, when that is free. */
static __device__ __forceinline__ void pack_load(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh, int slot,
                                                 uint32_t phase, int row, int k)
{
  char *to = ring + slot * PACK_BYTES;
  sm90_barrier_wait(&sh->pack_empty[slot], phase);
  sm90_barrier_expect(&sh->pack_full[slot], PACK_BYTES);
  sm90_tma_load(to, &p.map_a, p.a_by_k ? row : k, p.a_by_k ? k : row, &sh->pack_full[slot]);
  sm90_tma_load(to + PANEL, &p.map_a, p.a_by_k ? row + 64 : k, p.a_by_k ? k : row + 64, &sh->pack_full[slot]);
}

/* One thread: what the workers pack, in their order. */
static __device__ __forceinline__ void pack_feed(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  const int items = pack_items(p);
  int slot = 0;
  uint32_t phase = 1;
  for (int item = (int)blockIdx.x; item < items; item += (int)gridDim.x) {
    const int row = item / p.segments * TILE, segment = item % p.segments, steps = pack_steps(p, segment);
    for (int s = 0; s < steps; s++) {
      pack_load(p, ring, sh, slot, phase, row, segment * p.segment_k + s * PACK_K);
      if (++slot == PACK_WARPS) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}

/* Another thread: sends blocks that are full, until one says that there are no more. */
static __device__ __forceinline__ void pack_send(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if ((int)blockIdx.x >= pack_items(p))
    return;
  for (uint32_t block = 0;; block++) {
    const uint32_t slot = block % PACK_BLOCKS;
    const char *from = ring + PACK_WARPS * PACK_BYTES + slot * PANEL;
    sm90_barrier_wait(&sh->block_full[slot], block / PACK_BLOCKS & 1);
    const int to = sh->block_to[slot];
    if (to < 0)
      break;
    sm90_tma_store(&p.map_packed, 0, to, from);
    sm90_tma_store(&p.map_packed, 0, to + p.segments * p.segment_k, from + PACK_PANEL);
    sm90_bulk_commit();
    sm90_bulk_wait_read();
    sm90_barrier_arrive(&sh->block_empty[slot]);
  }
  sm90_bulk_wait();
  __threadfence();
}

/* Bitmap of a step: lane i has k's i and 32 + i. */
template <bool BY_K> static __device__ __forceinline__ uint2 pack_look(uint32_t at, uint32_t lane)
{
  uint32_t mine = 0; /* bit g: k 8g + q in this lane's rows */
#pragma unroll
  for (int g = 0; g < 8; g++) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t r[4];
      read_lines<BY_K>(at, g, i, r);
      any |= r[0] | r[1] | r[2] | r[3];
    }
    mine |= (any & 0x7fff7fffu) != 0 ? 1u << g : 0;
  }
  mine |= __shfl_xor_sync(~0u, mine, 1);
  mine |= __shfl_xor_sync(~0u, mine, 2);
  mine = __shfl_sync(~0u, mine, (int)(lane % 8 * 4)) >> lane / 8;
  return make_uint2(__ballot_sync(~0u, mine & 1), __ballot_sync(~0u, mine >> 4 & 1));
}

/* Where a step's alive k's go. Lines are counted over all blocks that this block of threads sends. */
typedef struct pack_place {
  uint32_t first;    /* line of the segment's first, */
  uint32_t from, to; /* and of the step's; where it is the segment's last, up to the end of a block */
} pack_place;

/* Alive k's of a step to their lines of the ring; spare: 512 bytes for those that are not alive. */
template <bool BY_K>
static __device__ __forceinline__ void pack_write(uint32_t at, uint32_t blocks, uint32_t spare, uint2 alive,
                                                  uint32_t from, uint32_t lane)
{
  const uint32_t q = lane % 8, nowhere = spare + lane * 16;
#pragma unroll
  for (int g = 0; g < 8; g++) {
    const uint32_t word = g < 4 ? alive.x : alive.y, bit = 1u << (g % 4 * 8) << q;
    if ((word >> (g % 4 * 8) & 0xffu) == 0)
      continue;
    const uint32_t line = from + (uint32_t)__popc(word & (bit - 1)) + (g < 4 ? 0 : (uint32_t)__popc(alive.x));
    const bool there = word & bit;
    const uint32_t to = there ? blocks + (line * 128 & (PACK_PANEL - 1)) + (lane / 8 ^ line % 8) * 16 : nowhere;
    const uint32_t panel = there ? PACK_PANEL : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t r[4];
      read_lines<BY_K>(at, g, i, r);
      sm90_stmatrix_at((to ^ (uint32_t)(i % 2 * 64)) + (i < 2 ? 0 : panel), r);
    }
  }
}

/* The end of a segment of `count`: lines of zeros to a multiple of 16, NOTHING to one of 64. */
static __device__ __forceinline__ void pack_fill(uint32_t blocks, uint32_t first, uint32_t count, uint32_t *list,
                                                 uint32_t lane)
{
  const uint32_t end = (count + 15) / 16 * 16, list_end = (count + 63) / 64 * 64;
  for (uint32_t line = first + count + lane / 16; line < first + end; line += 2)
    sm90_store4(blocks + (line * 128 & (PACK_PANEL - 1)) + lane / 8 % 2 * PACK_PANEL + lane % 8 * 16,
                make_uint4(0, 0, 0, 0));
  for (uint32_t place = count + lane; place < list_end; place += 32)
    list[place] = NOTHING;
}

/* The blocks that a step has lines of may be written to. */
static __device__ __forceinline__ void blocks_wait(wgmma16_shared *sh, uint32_t from, uint32_t to)
{
  for (uint32_t b = from / PACK_K; b * PACK_K < to; b++)
    sm90_barrier_wait(&sh->block_empty[b % PACK_BLOCKS], (b / PACK_BLOCKS & 1) ^ 1);
}

/* One lane: they have these lines. out: the segment's first line where it is packed; -1: there are no more. */
static __device__ __forceinline__ void blocks_arrive(wgmma16_shared *sh, const pack_place &place, int out)
{
  for (uint32_t b = place.from / PACK_K; b * PACK_K < place.to; b++) {
    const uint32_t from = max(place.from, b * PACK_K), to = min(place.to, (b + 1) * PACK_K), slot = b % PACK_BLOCKS;
    if (from == b * PACK_K)
      sh->block_to[slot] = out < 0 ? out : out + (int)(b * PACK_K - place.first);
    sm90_barrier_arrive_many(&sh->block_full[slot], to - from);
  }
}

/* Step `turn` of all that this block of threads packs, by warp turn % PACK_WARPS: where it may write. */
static __device__ __forceinline__ pack_place pack_turn(wgmma16_shared *sh, uint32_t turn, uint32_t count, bool is_first,
                                                       bool is_last, uint32_t lane)
{
  const uint32_t warp = turn % PACK_WARPS, other = (turn + PACK_WARPS - 1) % PACK_WARPS;
  pack_place place = {0, 0, 0};
  if (turn > 0) {
    sm90_barrier_wait(&sh->turn_full[other], (turn - 1) / PACK_WARPS & 1);
    place.first = sh->turn[other].x;
    place.from = sh->turn[other].y;
  }
  if (is_first)
    place.first = place.from;
  place.to = place.from + count;
  if (is_last)
    place.to = (place.to + PACK_K - 1) / PACK_K * PACK_K;
  blocks_wait(sh, place.from, place.to); /* in turn: no warp is two rounds of the ring ahead of the barriers */
  if (lane == 0) {
    sh->turn[warp] = make_uint2(place.first, place.to);
    sm90_barrier_arrive(&sh->turn_full[warp]);
  }
  return place;
}

template <bool BY_K>
static __device__ __forceinline__ void pack(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  const uint32_t thread = threadIdx.x - FEEDERS, warp = thread / 32, lane = thread % 32;
  const uint32_t blocks = sm90_address(ring) + PACK_WARPS * PACK_BYTES, spare = sm90_address(sh->spare[warp]);
  const uint32_t at = line_reader<BY_K>(sm90_address(ring) + warp * PACK_BYTES, lane), b_line = (uint32_t)(p.b_ld / 8);
  const int items = pack_items(p);
  uint32_t turn = 0, phase = 0; /* of the segment's first step; of this warp's buffer */
  for (int item = (int)blockIdx.x; item < items; item += (int)gridDim.x) {
    const int strip = item / p.segments, segment = item % p.segments, steps = pack_steps(p, segment);
    const int out = packed_line(p, strip * TILE, 0, segment * p.segment_k);
    uint32_t *list = (uint32_t *)p.lists + (int64_t)item * p.segment_k;
    uint32_t *bits = (uint32_t *)p.a_bits + strip * p.b_words;
    int s = (int)((warp - turn) % PACK_WARPS);
#pragma unroll 1
    for (; s < steps; s += PACK_WARPS) {
      const bool last = s == steps - 1;
      const int k = segment * p.segment_k + s * PACK_K;
      sm90_barrier_wait(&sh->pack_full[warp], phase);
      const uint2 alive = pack_look<BY_K>(at, lane);
      const uint32_t low = (uint32_t)__popc(alive.x), count = low + (uint32_t)__popc(alive.y);
      const pack_place place = pack_turn(sh, turn + (uint32_t)s, count, s == 0, last, lane);
      pack_write<BY_K>(at, blocks, spare, alive, place.from, lane);
      __syncwarp(); /* all lanes have read */
      if (lane == 0)
        sm90_barrier_arrive(&sh->pack_empty[warp]);
      phase ^= 1;
      const uint32_t before = place.from - place.first, below = (1u << lane) - 1;
      if (alive.x >> lane & 1)
        list[before + (uint32_t)__popc(alive.x & below)] = (uint32_t)(k + (int)lane) * b_line;
      if (alive.y >> lane & 1)
        list[before + low + (uint32_t)__popc(alive.y & below)] = (uint32_t)(k + 32 + (int)lane) * b_line;
      if (lane < 2 && k / 32 + (int)lane < p.b_words)
        bits[k / 32 + (int)lane] = lane == 0 ? alive.x : alive.y;
      if (last) {
        pack_fill(blocks, place.first, before + count, list, lane);
        if (lane == 0)
          ((uint32_t *)p.counts)[item] = before + count;
      }
      sm90_fence_async();
      __syncwarp();
      if (lane == 0) {
        blocks_arrive(sh, place, out);
        if (last && item + (int)gridDim.x >= items) {
          const pack_place end = {place.to, place.to, place.to + PACK_K};
          blocks_wait(sh, end.from, end.to);
          blocks_arrive(sh, end, -1);
        }
      }
    }
    turn += (uint32_t)steps;
  }
}

#endif
