/*
 * gated.cuh: how a gated product ends, in one launch: C = activation(alpha * (A gate) + gate_bias) * (alpha * (A B) +
 * ...). A stage has 128 columns of the gate's weights and the same 128 of B, so a thread's sums are, for the same rows
 * and columns of C, the gate's (0 to 63) and B's (64 to 127), and what follows happens in its registers.
 *
 * A tile of C has 128 rows by 128 columns. A warpgroup's 64 rows of it have room in its own panel of A and in its half
 * of the spare memory. So the two wait for each other nowhere, and one finishes while the other multiplies.
 */
#ifndef ESMM_CUDA_WGMMA16_GATED_CUH
#define ESMM_CUDA_WGMMA16_GATED_CUH

#include "cuda/kernels/common/gate.cuh"
#include "cuda/kernels/wgmma16/store.cuh"

#define GATED_SUMS 64 /* a thread's, of each of the two products */

/* Eight rows, which lie in one strip of C, by four columns: each lane has one element. Notes which are not zero. */
static __device__ __forceinline__ void tally_element(const esmm_epilogue_params &e, int row, int col, bool nonzero)
{
  const int lane = thread_now() % 32;
  const uint32_t all = __ballot_sync(~0u, nonzero) & 0x11111111u << lane % 4; /* of this lane's column */
  if (lane >= 4 || !all)
    return;
  add_count(e, col, __popc(all));
  if (e.bits)
    add_bits(bitmap_of(e, row), col, 1u << col % 32);
}

/* Any C: element by element, 8 columns a turn; sums [first, last) of 16 rows from row0 on. The sums are lost. */
static __device__ __forceinline__ void store_gated_slowly(const esmm_wgmma16_params &p, float (&sums)[2 * GATED_SUMS],
                                                          int row0, int col0, int first, int last)
{
#pragma unroll 1
  for (int g = 0; g < last; g += 4) {
    const int lane = thread_now() % 32;
    if (g >= first)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + lane / 4 + i / 2 * 8, col = col0 + 2 * g + lane % 4 * 2 + i % 2;
        bool nonzero = false;
        if (row < p.m && col < p.n)
          nonzero = finish_gated_element(p.epilogue, (const float *)p.gate_bias, p.gate_activation, row, col, sums[i],
                                         sums[GATED_SUMS + i]);
        __syncwarp();
        if (p.epilogue.extra & ESMM_EXTRA_TALLY)
          tally_element(p.epilogue, row, col, nonzero);
      }
#pragma unroll
    for (int i = 0; i + 4 < GATED_SUMS; i++) {
      sums[i] = sums[i + 4];
      sums[GATED_SUMS + i] = sums[GATED_SUMS + i + 4];
    }
  }
}

/*
 * A C that TMA can write, all 128 columns inside it. boxes: it does, from `here`, the warpgroup's panel of A, and from
 * its half of the spare memory; let_go_held waits until that has been read. Else sums [first, last) are stored from
 * here. bias: both of the tile's, the gate's 128 in front; or NULL: they are where the caller has them. counted: see
 * tally.cuh.
 */
static __device__ __forceinline__ void store_gated(const esmm_wgmma16_params &p, wgmma16_shared *sh,
                                                   const wgmma16_unit &unit, float (&sums)[2 * GATED_SUMS], int first,
                                                   int last, bool boxes, bool counted, char *here, const float *bias)
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32;
  char *there = (char *)sh->spare + group * PANEL;
#pragma unroll 1
  for (int g = 0; g < GATED_SUMS; g += PANEL_SUMS) {
    const int lane = thread_now() % 32, row0 = unit.row + warp * 16, col = unit.col + 2 * g;
    if (g + PANEL_SUMS > first && g < last) {
      float gate[PANEL_SUMS], x[PANEL_SUMS];
#pragma unroll
      for (int i = 0; i < PANEL_SUMS; i++) {
        gate[i] = sums[i];
        x[i] = sums[GATED_SUMS + i];
      }
      const int at = (bias ? 0 : unit.col) + 2 * g + lane % 4 * 2;
      const float *gates = bias ? bias : (const float *)p.gate_bias;
      const float *own = bias ? bias + ESMM_WGMMA16_GATED : (const float *)p.epilogue.bias;
      finish_gated(p, gate, x, row0 + lane / 4, col + lane % 4 * 2, p.gate_bias ? gates + at : nullptr,
                   p.epilogue.bias ? own + at : nullptr);
      if (boxes) {
        uint32_t pairs[4][4];
        pack_lines(p.epilogue.c.dtype, x, pairs);
        store_lines(sm90_address(g ? there : here) + (uint32_t)(warp % 4 * (PANEL / 4)), pairs);
        if (counted)
          tally_pairs(sm90_address(sh->tally_bytes) + (uint32_t)g * 2, pairs);
      } else {
        store_rows(p.epilogue, x, row0, col, first - g, last - g, sh->spare[warp]);
      }
    }
#pragma unroll
    for (int i = 0; i < PANEL_SUMS; i++) {
      sums[i] = sums[PANEL_SUMS + i];
      sums[GATED_SUMS + i] = sums[GATED_SUMS + PANEL_SUMS + i];
    }
  }
  if (!boxes)
    return;
  sm90_fence_async();
  meet_group(7 + group);
  if (thread % 128 == 0) {
    const int row = unit.row + group * 64;
    if (tallies_late(p))
      tally_next(sh, group, row, unit.col, sm90_address(here));
    sm90_tma_store(&p.map_c, unit.col, row, here);
    sm90_tma_store(&p.map_c, unit.col + 64, row, there);
    sm90_bulk_commit();
  }
}

#endif
