/*
 * half_pack.cuh: A scanned and packed in one pass, for k_half_sm90a.cu.
 *
 * Work is cut into segments: 128 rows (a strip) by segment_k k's, one block each, so that nobody waits for another's
 * counts. 128 k's at a time come through the copy engine; the eight multiplying warps hold 16 rows each in registers,
 * transposed, find the k's with a nonzero (-0 is a zero), agree on them through shared memory, and write the alive ones
 * behind each other, just as wgmma reads them: [2 panels of 64 rows][k's][128 bytes], swizzled. 64 k's at a time leave
 * through the copy engine.
 *
 *   counts [strip][segment]           alive k's
 *   lists  [strip][segment][...]      where their rows of B begin, in 16 bytes; NOTHING up to the next multiple of 64
 *   a_bits [strip][b_words]           bitmaps
 *   packed [strip][panel][segment][...]  their columns; zeros up to the next multiple of 16
 *
 * Of 32 k's the packed ones stand in the order in which a warp finds them: k = 8g + q as number 4q + g.
 *
 * Shared memory: two buffers of 32 KiB for what comes, a ring of eight blocks of 16 KiB for what leaves.
 */
#ifndef ESMM_CUDA_HALF_PACK_CUH
#define ESMM_CUDA_HALF_PACK_CUH

#include "half_feed.cuh"

#define PACK_K 128                     /* k's of a step */
#define PACK_BYTES (TILE * PACK_K * 2) /* of A */
#define PACK_BLOCKS 8                  /* of 64 k's, on their way out: five are touched between two waits */

static_assert(PACK_BUFFERS * PACK_BYTES + PACK_BLOCKS * 2 * PANEL <= RING_BYTES, "packing uses the ring");

/* Steps of a segment: none past k. */
static __device__ __forceinline__ int pack_steps(const esmm_half_params &p, int segment)
{
  return max(0, min(ceil_div(p.k - segment * p.segment_k, PACK_K), p.segment_k / PACK_K));
}

/* Thread 0: what the workers pack, in their order. */
static __device__ __forceinline__ void pack_feed(const esmm_half_params &p, char *ring, half_shared *sh)
{
  const int items = ceil_div(p.m, TILE) * p.segments;
  int slot = 0;
  uint32_t phase = 1;
  for (int item = (int)blockIdx.x; item < items; item += (int)gridDim.x) {
    const int strip = item / p.segments, segment = item % p.segments, steps = pack_steps(p, segment);
    for (int s = 0; s < steps; s++) {
      sm90_barrier_wait(&sh->pack_empty[slot], phase);
      sm90_barrier_expect(&sh->pack_full[slot], PACK_BYTES);
      char *to = ring + slot * PACK_BYTES;
#pragma unroll
      for (int i = 0; i < 4; i++) { /* 64 k's: rows 0-63, rows 64-127; the next 64 */
        const int row = strip * TILE + i % 2 * 64, k = segment * p.segment_k + s * PACK_K + i / 2 * 64;
        sm90_tma_load(to + i * PANEL, &p.map_a, p.a_by_k ? row : k, p.a_by_k ? k : row, &sh->pack_full[slot]);
      }
      if (++slot == PACK_BUFFERS) {
        slot = 0;
        phase ^= 1;
      }
    }
  }
}

/*
 * The k's of 128 with a nonzero in a warp's 16 rows, 32 a word, in packed order. x[i]: lane (q, t) = (lane / 4, lane %
 * 4) has k = 8i + q of rows 2t, 2t + 1 and, in x[i][1], of 8 rows further.
 */
static __device__ __forceinline__ void pack_alive(const uint32_t (&x)[16][2], int lane, uint32_t (&alive)[4])
{
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < 16; i++)
    mine |= ((x[i][0] | x[i][1]) & 0x7fff7fffu) != 0 ? 1u << i : 0;
  mine |= __shfl_xor_sync(~0u, mine, 1);
  mine |= __shfl_xor_sync(~0u, mine, 2);
#pragma unroll
  for (int w = 0; w < 4; w++)
    alive[w] = __ballot_sync(~0u, mine >> (4 * w + lane % 4) & 1);
}

/* A warp's 16 rows of 128 k's. */
static __device__ __forceinline__ void pack_read(const char *buffer, int warp, int lane, uint32_t (&x)[16][2])
{
#pragma unroll
  for (int i = 0; i < 8; i++) { /* 16 k's: matrices (k's 0-7, rows 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15) */
    const int row = warp % 4 * 16 + lane % 16, part = i % 4 * 2 + lane / 16;
    uint32_t r[4];
    sm90_ldmatrix_trans(buffer + (i / 4 * 2 + warp / 4) * PANEL + row * 128 + (part ^ (row % 8)) * 16, r);
    x[2 * i][0] = r[0];
    x[2 * i][1] = r[1];
    x[2 * i + 1][0] = r[2];
    x[2 * i + 1][1] = r[3];
  }
}

/* The same for a col-major A: 32 bytes of a k make the 16 rows, already one behind the other. */
static __device__ __forceinline__ void pack_read_by_k(const char *buffer, int warp, int lane, uint32_t (&x)[16][2])
{
  const int q = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const char *line = buffer + (i / 8 * 2 + warp / 4) * PANEL + (i % 8 * 8 + q) * 128 + t * 4;
#pragma unroll
    for (int b = 0; b < 2; b++)
      x[i][b] = *(const uint32_t *)(line + (((warp % 4 * 2 + b) ^ q) * 16));
  }
}

/* A lane's 4 bytes of the packed line at `place`, of the first 8 of the warp's rows; the other 8 are at ^ 16. blocks:
   of pack_lane. */
static __device__ __forceinline__ uint32_t pack_line(uint32_t blocks, uint32_t part, uint32_t place)
{
  return blocks + (place * 128 & (PACK_BLOCKS * PANEL - 1)) + ((place * 16 & 0x70) ^ part);
}

typedef struct pack_state {
  const char *blocks;  /* the outgoing ring: all blocks' first panels, then their second ones */
  uint32_t lane, part; /* this lane's place in it, less line and part, and its part */
  char *out;           /* the segment's packed columns in the first panel, */
  int64_t panel;       /* and bytes from there to the second */
  uint32_t *list;      /* its list */
  uint32_t *bits;      /* its bitmap, */
  int words;           /* and the words that has: none past k */
  uint32_t place;      /* alive k's so far */
  uint32_t sent;       /* blocks that have left */
} pack_state;

/* One worker thread sends blocks that are full; all other workers have met since they wrote them. */
static __device__ __forceinline__ void pack_send(pack_state &s, uint32_t blocks)
{
  for (; s.sent < blocks; s.sent++)
    for (int i = 0; i < 2; i++)
      sm90_bulk_store(s.out + (int64_t)s.sent * PANEL + i * s.panel,
                      s.blocks + (i * PACK_BLOCKS + s.sent % PACK_BLOCKS) * PANEL, PANEL);
  sm90_bulk_commit();
}

/* What is alive of 128 k's, the segment's step-th, to its places; k is the first of them. */
static __device__ __forceinline__ void pack_write(pack_state &s, int step, int k, uint32_t b_line, int warp, int lane,
                                                  const uint32_t (&x)[16][2], const uint32_t (&alive)[4])
{
  const int q = lane / 4, t = lane % 4;
  uint32_t place = s.place;
#pragma unroll
  for (int w = 0; w < 4; w++) {
#pragma unroll
    for (int g = 0; g < 4; g++) {
      const uint32_t bit = 1u << (4 * q + g);
      const uint32_t line = pack_line(s.lane, s.part, place + (uint32_t)__popc(alive[w] & (bit - 1)));
      const bool there = alive[w] & bit;
      sm90_store_if(there, line, x[4 * w + g][0]);
      sm90_store_if(there, line ^ 16, x[4 * w + g][1]);
    }
    if (warp == w) {
      if (lane == 0 && step * (PACK_K / 32) + w < s.words)
        s.bits[step * (PACK_K / 32) + w] = natural_order(alive[w]);
      if (alive[w] >> lane & 1)
        s.list[place + (uint32_t)__popc(alive[w] & ((1u << lane) - 1))] = (uint32_t)(k + 32 * w + 8 * t + q) * b_line;
    }
    place += (uint32_t)__popc(alive[w]);
  }
}

/* The end of a segment: zeros to a multiple of 16, NOTHING to one of 64. */
static __device__ __forceinline__ void pack_fill(const pack_state &s, int warp, int lane)
{
  const uint32_t end = (s.place + 15) / 16 * 16, list_end = (s.place + 63) / 64 * 64;
  for (uint32_t place = s.place + (uint32_t)lane / 4; place < end; place += 8) {
    const uint32_t line = pack_line(s.lane, s.part, place);
    sm90_store_if(true, line, 0);
    sm90_store_if(true, line ^ 16, 0);
  }
  if (warp == 0)
    for (uint32_t place = s.place + (uint32_t)lane; place < list_end; place += 32)
      s.list[place] = NOTHING;
}

static __device__ __forceinline__ void pack(const esmm_half_params &p, char *ring, half_shared *sh)
{
  const int thread = (int)threadIdx.x - FEEDERS, warp = thread / 32, lane = thread % 32;
  const int items = ceil_div(p.m, TILE) * p.segments;
  int slot = 0;
  uint32_t phase = 0;
  for (int item = (int)blockIdx.x; item < items; item += (int)gridDim.x) {
    const int segment = item % p.segments, steps = pack_steps(p, segment);
    const int64_t first = (int64_t)item * p.segment_k, panel = (int64_t)p.segments * p.segment_k * 128;
    const char *blocks = ring + PACK_BUFFERS * PACK_BYTES;
    pack_state s = {blocks,
                    sm90_address(blocks) + (uint32_t)(warp / 4 * (PACK_BLOCKS * PANEL) + lane % 4 * 4),
                    (uint32_t)warp % 4 * 32,
                    (char *)p.packed + item / p.segments * (2 * panel) + segment * p.segment_k * 128ll,
                    panel,
                    (uint32_t *)p.lists + first,
                    (uint32_t *)p.a_bits + item / p.segments * p.b_words + segment * p.segment_k / 32,
                    (int)p.b_words - segment * p.segment_k / 32,
                    0,
                    0};
    for (int step = 0; step < steps; step++) {
      uint32_t x[16][2], alive[4];
      sm90_barrier_wait(&sh->pack_full[slot], phase);
      if (p.a_by_k)
        pack_read_by_k(ring + slot * PACK_BYTES, warp, lane, x);
      else
        pack_read(ring + slot * PACK_BYTES, warp, lane, x);
      pack_alive(x, lane, alive);
      if (lane == 0) {
        sm90_barrier_arrive(&sh->pack_empty[slot]);
        *(uint4 *)sh->masks[step % 2][warp] = make_uint4(alive[0], alive[1], alive[2], alive[3]);
      }
      sm90_fence_async(); /* for what the last step wrote */
      if (thread == 0)
        sm90_bulk_wait_read();
      meet<1, WORKERS>();
      if (thread == 0)
        pack_send(s, s.place / 64);
#pragma unroll
      for (int w = 0; w < 8; w++) {
        const uint4 other = *(const uint4 *)sh->masks[step % 2][w];
        alive[0] |= other.x;
        alive[1] |= other.y;
        alive[2] |= other.z;
        alive[3] |= other.w;
      }
      pack_write(s, step, segment * p.segment_k + step * PACK_K, (uint32_t)(p.b_ld / 8), warp, lane, x, alive);
      s.place += (uint32_t)(__popc(alive[0]) + __popc(alive[1]) + __popc(alive[2]) + __popc(alive[3]));
      if (++slot == PACK_BUFFERS) {
        slot = 0;
        phase ^= 1;
      }
    }
    pack_fill(s, warp, lane);
    sm90_fence_async();
    meet<1, WORKERS>();
    if (thread == 0) {
      ((uint32_t *)p.counts)[item] = s.place;
      pack_send(s, (s.place + 63) / 64);
      sm90_bulk_wait(); /* the next segment starts with empty blocks */
    }
    meet<1, WORKERS>();
  }
}

#endif
