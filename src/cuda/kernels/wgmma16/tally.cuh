/*
 * tally.cuh: a dense product's notes of C: nonzeros of columns, bitmaps of strips. Tiles of both kinds may follow one
 * another:
 *
 *   counted    all of its rows are C's, and one strip's: the multiplying warps count nonzeros in registers, from the
 *              pairs that they store, and add them up in shared memory, a byte a column (tally_pairs)
 *   read back  others: the idle warps of the loading warpgroup, where one thread loads, read the tile where it lies in
 *              shared memory for TMA
 *
 * The same warps write both kinds' counts and bits to memory, while the next tile is multiplied. A warpgroup's 64 rows
 * are an item: one of its threads arrives at `tile_there`. `tallied` means that the item has been taken: the bytes are
 * zeros again, or the rows have been read. A tile's notes wait for those of the tile before it (await_tallied); the
 * stage that C lies in waits only for the warps that read it back (let_go_held polls after each stage). Tiles that TMA
 * does not write are noted by the warps that store them (store.cuh).
 */
#ifndef ESMM_CUDA_WGMMA16_TALLY_CUH
#define ESMM_CUDA_WGMMA16_TALLY_CUH

#include "cuda/kernels/wgmma16/wgmma16.cuh"

#define TALLY_WARPS 3 /* all of the loading warpgroup but the first */
#define TALLY_ROWS 32 /* of a panel, that a warp reads at once */

/* Do tally warps note anything in this launch? */
static __device__ __forceinline__ bool tallies_late(const esmm_wgmma16_params &p)
{
  return p.c_boxes && p.epilogue.extra & ESMM_EXTRA_TALLY;
}

/* Strips may be lower than a tile. */
static __device__ __forceinline__ bool has_fine_strips(const esmm_epilogue_params &e)
{
  return e.bits && (uint32_t)e.strip_rows % TILE != 0;
}

/* Of a launch that tallies_late: is the tile from `row` on counted in registers? Else it is read back. */
static __device__ __forceinline__ bool is_counted(const esmm_wgmma16_params &p, int row)
{
  return row + TILE <= p.m && !has_fine_strips(p.epilogue);
}

/* ---- by the warps that multiply ---- */

/* The place of a column's byte: of 16 columns that a warp packs together, 0 and 8, 1 and 9, ... lie side by side. */
static __device__ __forceinline__ int tally_place(int col)
{
  return (col & ~15) + col % 8 * 2 + col / 8 % 2;
}

/*
 * A warp: 16 rows by 64 columns, as pack_lines packs them, all of them C's. bytes: of these columns, in shared memory.
 * Two columns' counts are one fp16 number, the second times 32, and so a lane has 16 of its own columns in four words.
 * Four of the eight lanes that have the same columns add up, each then has four columns; the last two lanes add theirs
 * where they go. Exact: a lane's numbers are up to 8 + 32 * 8. Both dtypes are compared as fp16, as in tally_lines.
 */
static __device__ __forceinline__ void tally_pairs(uint32_t bytes, const uint32_t (&pairs)[4][4])
{
  const uint32_t lane = (uint32_t)thread_now() % 32;
  const __half2 zero = __float2half2_rn(0.0f);
  const bool high = lane & 16, second = lane & 8;
  __half2 nonzeros[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __half2 *x = (const __half2 *)pairs[i]; /* eight columns of both rows, the next eight */
    nonzeros[i] = __hfma2(__hadd2(__hneu2(x[2], zero), __hneu2(x[3], zero)), __float2half2_rn(32.0f),
                          __hadd2(__hneu2(x[0], zero), __hneu2(x[1], zero)));
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
    nonzeros[j] =
        __hadd2(high ? nonzeros[j + 2] : nonzeros[j], __shfl_xor_sync(~0u, high ? nonzeros[j] : nonzeros[j + 2], 16));
  nonzeros[0] =
      __hadd2(second ? nonzeros[1] : nonzeros[0], __shfl_xor_sync(~0u, second ? nonzeros[0] : nonzeros[1], 8));
  const __half2 whole = __hadd2(nonzeros[0], __float2half2_rn(1024.0f)); /* the number is in the low bits */
  const uint32_t bits = *(const uint32_t *)&whole;
  sm90_add(bytes + (lane / 8 * 4 + lane % 4) * 4, (bits & 0x001f001fu) | (bits << 3 & 0x1f001f00u));
}

/* One thread of a warpgroup: 64 rows of C from `row` on have their first panel there. row below 0: there are no more.
 */
static __device__ __forceinline__ void tally_next(wgmma16_shared *sh, int group, int row, int col, uint32_t panel)
{
  sh->tally_tile[group] = make_int4(row, col, (int)panel, 0);
  sm90_barrier_arrive(&sh->tile_there[group]);
}

/* ---- by the warps that take the notes ---- */

/*
 * `threads` threads of every block, this one number `thread`: clear counts and bits, where no launch has before. All
 * blocks have when clear_wait returns; one thread of a block calls that, the others meet it at a barrier. The product
 * is multiplied meanwhile.
 */
static __device__ __forceinline__ void clear_notes(const esmm_wgmma16_params &p, int thread, int threads)
{
  const int64_t first = (int64_t)blockIdx.x * threads + thread, step = (int64_t)gridDim.x * threads;
  for (int64_t i = first; i < p.count_words; i += step)
    ((uint32_t *)p.epilogue.counts)[i] = 0;
  for (int64_t i = first; i < p.bitmap_words; i += step)
    ((uint32_t *)p.epilogue.bits)[i] = 0;
}

static __device__ __forceinline__ void clear_wait(const esmm_wgmma16_params &p)
{
  uint32_t *meeting = (uint32_t *)p.meeting + ESMM_WGMMA16_CLEARED;
  wait_for_all(meeting, gridDim.x);
  leave(meeting, gridDim.x);
}

/* One thread of each of `warps` warps of every block, when it has noted all of its `bits`. The last one reports. */
static __device__ __forceinline__ void report_bits(const esmm_wgmma16_params &p, uint32_t bits, uint32_t warps)
{
  unsigned long long *sum = (unsigned long long *)p.bitmap_sums;
  atomicAdd(sum, (unsigned long long)bits);
  __threadfence();
  if (atomicAdd((uint32_t *)(sum + 3), 1u) != warps * gridDim.x - 1)
    return;
  __threadfence();
  esmm_pattern_bit_count *count = (esmm_pattern_bit_count *)p.bit_count;
  count->own = count->folded[0] = count->folded[1] = __ldcg(sum);
  __threadfence_system();
  *(volatile uint32_t *)&count->ready = p.count_ready;
}

/* Where a warpgroup's panel g lies; first: where its own or, GATED being false, the block's first panel does. */
template <int COLS, bool GATED>
static __device__ __forceinline__ uint32_t tally_panel(wgmma16_shared *sh, uint32_t first, int group, int g)
{
  enum { ROOM = wgmma16_stage<COLS>::BYTES / PANEL };
  const uint32_t spare = sm90_address(sh->spare);
  if (GATED)
    return g ? spare + (uint32_t)group * PANEL : first;
  const int panel = group * (COLS / 64) + g;
  return panel < ROOM ? first + (uint32_t)panel * PANEL : spare + (uint32_t)(panel - ROOM) * PANEL;
}

/* Bits of 64 columns from col on, of rows of one strip. A lane has the nonzero counts of 8 columns, the same ones as
   the lanes 8, 16 and 24 on. */
static __device__ __forceinline__ void tally_strip(const esmm_epilogue_params &e, int row, int col,
                                                   const __half2 (&nonzeros)[4])
{
  const uint32_t lane = threadIdx.x % 32;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    bits |= (__low2float(nonzeros[i]) != 0.0f ? 1u : 0) << (2 * i) | (__high2float(nonzeros[i]) != 0.0f ? 1u : 0)
                                                                         << (2 * i + 1);
  bits <<= lane % 4 * 8;
  const uint32_t first = __reduce_or_sync(~0u, lane % 8 < 4 ? bits : 0);
  const uint32_t second = __reduce_or_sync(~0u, lane % 8 < 4 ? 0 : bits);
  const uint32_t word = lane ? second : first;
  if (lane < 2 && word)
    atomicOr((uint32_t *)e.bits + (int64_t)((uint32_t)row / (uint32_t)e.strip_rows) * e.words + col / 32 + lane, word);
}

/*
 * A warp: TALLY_ROWS rows of 64 columns, 128 bytes a row, swizzled, from `from` on, which are C's from (row, col) on.
 * counts: of the 64 columns. fine: bits are noted here, because strips may be lower than a tile.
 */
static __device__ __forceinline__ void tally_lines_of(const esmm_wgmma16_params &p, uint32_t from, int row, int col,
                                                      bool fine, int *counts)
{
  enum { LOADS = TALLY_ROWS / 4 }; /* four rows of 128 bytes a load */
  const esmm_epilogue_params &e = p.epilogue;
  const uint32_t lane = threadIdx.x % 32, r = lane / 8;
  const __half2 zero = __float2half2_rn(0.0f);
  const uint32_t at = from + r * 128 + (lane % 8 ^ r) * 16; /* r is below 4: rows 4 on are at ^ 64 of it */
  uint4 x[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    x[i] = sm90_load4((at ^ (i % 2 ? 64u : 0)) + (uint32_t)i * 512);
  if (row + TALLY_ROWS > p.m)
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      if (row + 4 * i + (int)r >= p.m)
        x[i] = make_uint4(0, 0, 0, 0);
  __half2 all[4] = {zero, zero, zero, zero};
#pragma unroll
  for (int i = 0; i < LOADS; i += 2) { /* eight rows, which have one strip. Both dtypes are compared as fp16, as in
                                          tally_lines */
    __half2 nonzeros[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t upper = j == 0 ? x[i].x : j == 1 ? x[i].y : j == 2 ? x[i].z : x[i].w;
      const uint32_t lower = j == 0 ? x[i + 1].x : j == 1 ? x[i + 1].y : j == 2 ? x[i + 1].z : x[i + 1].w;
      nonzeros[j] = __hadd2(__hneu2(*(const __half2 *)&upper, zero), __hneu2(*(const __half2 *)&lower, zero));
      all[j] = __hadd2(all[j], nonzeros[j]);
    }
    if (fine)
      tally_strip(e, row + 4 * i, col, nonzeros);
  }
  /* Four lanes with the same columns add up; each keeps two columns. */
  const bool high = lane & 16, second = lane & 8;
#pragma unroll
  for (int j = 0; j < 2; j++)
    all[j] = __hadd2(high ? all[j + 2] : all[j], __shfl_xor_sync(~0u, high ? all[j] : all[j + 2], 16));
  all[0] = __hadd2(second ? all[1] : all[0], __shfl_xor_sync(~0u, second ? all[0] : all[1], 8));
  const uint32_t mine = lane % 8 * 8 + (high ? 4 : 0) + (second ? 2 : 0);
  const int low_count = (int)__low2float(all[0]), high_count = (int)__high2float(all[0]);
  if (low_count)
    atomicAdd(&counts[mine], low_count);
  if (high_count)
    atomicAdd(&counts[mine + 1], high_count);
}

/* Adds a tile's counts to memory, one addition a column, and the strip's bits. Returns how many bits this warp has
   noted. */
template <int COLS>
static __device__ __forceinline__ uint32_t tally_flush(const esmm_epilogue_params &e, int *counts, int row, int col,
                                                       bool fine)
{
  const int lane = (int)threadIdx.x % 32;
  uint32_t bits = 0;
  meet<9, 32 * TALLY_WARPS>();
#pragma unroll 1
  for (int at = (int)threadIdx.x / 32 * 32 - 32; at < COLS; at += 32 * TALLY_WARPS) {
    const int count = counts[at + lane];
    counts[at + lane] = 0;
    if (e.counts && count)
      atomicAdd((int *)e.counts + col + at + lane, count);
    const uint32_t word = __ballot_sync(~0u, count != 0);
    bits += (uint32_t)__popc(word);
    if (e.bits && !fine && word && lane == 0)
      atomicOr((uint32_t *)e.bits + (int64_t)((uint32_t)row / (uint32_t)e.strip_rows) * e.words + (col + at) / 32,
               word);
  }
  meet<9, 32 * TALLY_WARPS>();
  return bits;
}

/* The same for a tile that was counted: a lane has a column. */
template <int COLS>
static __device__ __forceinline__ uint32_t tally_counted(const esmm_epilogue_params &e, uint8_t *bytes, int row,
                                                         int col)
{
  const int lane = (int)threadIdx.x % 32;
  uint32_t bits = 0;
#pragma unroll 1
  for (int at = (int)threadIdx.x / 32 * 32 - 32; at < COLS; at += 32 * TALLY_WARPS) {
    uint8_t *byte = bytes + tally_place(at + lane);
    const int count = *byte;
    *byte = 0;
    if (e.counts && count)
      atomicAdd((int *)e.counts + col + at + lane, count);
    const uint32_t word = __ballot_sync(~0u, count != 0);
    bits += (uint32_t)__popc(word);
    if (e.bits && word && lane == 0)
      atomicOr((uint32_t *)e.bits + (int64_t)((uint32_t)row / (uint32_t)e.strip_rows) * e.words + (col + at) / 32,
               word);
  }
  return bits;
}

/* The warps that take the notes, until there are no more tiles. COLS: of a stage; a GATED one has half of it of C. */
template <int COLS, bool GATED>
static __device__ __forceinline__ void tally_tiles(const esmm_wgmma16_params &p, wgmma16_shared *sh)
{
  enum { OF_C = GATED ? COLS / 2 : COLS, ITEMS = OF_C / 64 * (64 / TALLY_ROWS) };
  const int warp = (int)threadIdx.x / 32 - 1;
  const bool fine = has_fine_strips(p.epilogue);
  uint32_t bits = 0;
  for (int i = (int)threadIdx.x - 32; i < OF_C; i += 32 * TALLY_WARPS)
    sh->tally_counts[i] = 0;
  clear_notes(p, (int)threadIdx.x - 32, 32 * TALLY_WARPS);
  meet<9, 32 * TALLY_WARPS>();
  if (p.count_words | p.bitmap_words) {
    if (threadIdx.x == 32)
      clear_wait(p);
    meet<9, 32 * TALLY_WARPS>();
  }
#pragma unroll 1
  for (uint32_t tile = 0;; tile++) {
    sm90_barrier_wait(&sh->tile_there[0], tile % 2);
    const int row = sh->tally_tile[0].x, col = sh->tally_tile[0].y;
    if (row < 0) {
      if (p.bit_count && threadIdx.x % 32 == 0)
        report_bits(p, bits, TALLY_WARPS);
      return;
    }
    if (is_counted(p, row)) {
      sm90_barrier_wait(&sh->tile_there[1], tile % 2);
      bits += tally_counted<OF_C>(p.epilogue, sh->tally_bytes, row, col);
      __syncwarp();
      if (threadIdx.x % 32 < 2)
        sm90_barrier_arrive(&sh->tallied[threadIdx.x % 32]);
      continue;
    }
#pragma unroll 1
    for (int group = 0; group < 2; group++) {
      sm90_barrier_wait(&sh->tile_there[group], tile % 2);
      const int4 place = sh->tally_tile[group];
#pragma unroll 1
      for (int item = (warp + 2 * group * ITEMS) % TALLY_WARPS; item < ITEMS; item += TALLY_WARPS) {
        const int g = item / (64 / TALLY_ROWS), part = item % (64 / TALLY_ROWS), first = place.x + part * TALLY_ROWS;
        if (first < p.m)
          tally_lines_of(
              p, tally_panel<COLS, GATED>(sh, (uint32_t)place.z, group, g) + (uint32_t)part * (TALLY_ROWS * 128), first,
              col + 64 * g, fine, sh->tally_counts + 64 * g);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        sm90_barrier_arrive(&sh->tallied[group]);
    }
    bits += tally_flush<OF_C>(p.epilogue, sh->tally_counts, row, col, fine);
  }
}

#endif
