/*
 * store.cuh: how k_wgmma16_sm90a.cu ends: parts of split tiles are added, the epilogue applied, C written.
 *
 * A thread of a warpgroup has, of 64 rows by COLS columns, sums[4j + 2h + e]: row 16 * warp + lane / 4 + 8h, column
 * 8j + lane % 4 * 2 + e.
 */
#ifndef ESMM_CUDA_WGMMA16_STORE_CUH
#define ESMM_CUDA_WGMMA16_STORE_CUH

#include "cuda/kernels/wgmma16/finish.cuh"
#include "cuda/kernels/wgmma16/tally.cuh"

/* ---- split tiles ---- */

/*
 * Adds the parts of a tile in their order, which gives the same bits in every run. Each part's sums go to memory; when
 * all have come, each block adds up and keeps its share of the registers' places: [first, last) of all 4j + 2h + e.
 * Where there are registers for it, its own sums of that share stay in them. A tile's parts run at the same time or
 * earlier, so waiting ends. The last block to leave resets the counters. GATED: the second half of the sums belongs to
 * the same columns as the first, and a share is of both: [first, last) of the first half.
 */
template <bool GATED, int SUMS>
static __device__ __forceinline__ void add_parts(const esmm_wgmma16_params &p, const wgmma16_unit &unit,
                                                 float (&sums)[SUMS], int row0, int &first, int &last)
{
  /* As registers allow: parts that are on their way together; its own share stays with a block. */
  enum { AT_ONCE = SUMS > 64 ? 1 : 4, KEEPS = SUMS <= 64, OWN = GATED ? SUMS / 2 : SUMS };
  const int thread = thread_now() - FEEDERS;
  float4 *mine = (float4 *)p.partial + ((int64_t)unit.tile * unit.parts) * (SUMS / 4 * WORKERS) + thread;
  uint32_t *come = (uint32_t *)p.meeting + 2 + 2 * unit.tile;
  const bool any = row0 < p.m;                         /* this warp has rows of C */
  share(OWN / 16, unit.part, unit.parts, first, last); /* 32 columns at least */
  first *= 16;
  last *= 16;
  if (any) {
    float4 *to = mine + (int64_t)unit.part * (SUMS / 4 * WORKERS);
#pragma unroll
    for (int g = 0; g < SUMS; g += 16)
      if (!KEEPS || g < first || g >= last)
#pragma unroll
        for (int i = g; i < g + 16; i += 4)
          __stcg(to + i / 4 * WORKERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  meet<1, WORKERS>();
  if (thread == 0) /* for all of them: they have met, and it begins with a release */
    wait_for_all(come, (uint32_t)unit.parts);
  meet<1, WORKERS>();
  if (thread == 0)
    leave(come, (uint32_t)unit.parts);
  if (!any)
    return;
#pragma unroll
  for (int g = 0; g < SUMS; g += 16)
    if (g % OWN >= first && g % OWN < last) {
      float own[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        if (KEEPS)
          own[i] = sums[g + i];
        sums[g + i] = 0.0f;
      }
#pragma unroll 1
      for (int part = 0; part < unit.parts; part += AT_ONCE)
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          float4 x[AT_ONCE];
#pragma unroll
          for (int j = 0; j < AT_ONCE; j++) {
            const bool here = KEEPS && part + j == unit.part;
            x[j] = here ? make_float4(own[i], own[i + 1], own[i + 2], own[i + 3]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!here && part + j < unit.parts)
              x[j] = __ldcg(mine + (int64_t)(part + j) * (SUMS / 4 * WORKERS) + (g + i) / 4 * WORKERS);
          }
#pragma unroll
          for (int j = 0; j < AT_ONCE; j++) {
            sums[g + i] += x[j].x;
            sums[g + i + 1] += x[j].y;
            sums[g + i + 2] += x[j].z;
            sums[g + i + 3] += x[j].w;
          }
        }
    }
}

/* ---- lent stages (LENT in wgmma16.cuh) ---- */

/* Writes the sums to memory for the tile's next block. */
template <int SUMS>
static __device__ __forceinline__ void lend(const esmm_wgmma16_params &p, const wgmma16_unit &unit, float (&sums)[SUMS])
{
  float4 *to = lent_sums<SUMS>(p, unit) + (thread_now() - FEEDERS);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    __stcg(to + i / 4 * WORKERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  meet<1, WORKERS>();
  if (thread_now() == FEEDERS)
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(lent_counter(p, unit)), "r"(unit.part + 1) : "memory");
}

/* ---- the epilogue ---- */

/* pair_of, and what is below 0 becomes 0, in the same instruction. NaN stays NaN; a zero's sign is not kept. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ uint32_t rectified_pair_of(float x, float y)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a 16-bit C");
  uint32_t pair;
  if (DTYPE == ESMM_BF16)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  else
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

/* A warp's 16 rows by 64 columns: four times matrices of rows 0-7, 8-15 by columns 0-7, the same by 8-15. */
template <esmm_dtype DTYPE, bool RECTIFY>
static __device__ __forceinline__ void pack_lines(const float *sums, uint32_t (&pairs)[4][4])
{
#pragma unroll
  for (int i = 0; i < 16; i++)
    pairs[i / 4][i % 4] =
        RECTIFY ? rectified_pair_of<DTYPE>(sums[2 * i], sums[2 * i + 1]) : pair_of<DTYPE>(sums[2 * i], sums[2 * i + 1]);
}

/* By C's dtype, which is 16-bit. */
template <bool RECTIFY = false>
static __device__ __forceinline__ void pack_lines(int32_t dtype, const float *sums, uint32_t (&pairs)[4][4])
{
  if (dtype == ESMM_BF16)
    pack_lines<ESMM_BF16, RECTIFY>(sums, pairs);
  else /* ESMM_F16 */
    pack_lines<ESMM_F16, RECTIFY>(sums, pairs);
}

/* What of NONE, RELU and RELU2 comes before packing: x |x| for the last. pack_activated does the rest. */
template <int SUMS>
static __device__ __forceinline__ void begin_activation(const esmm_epilogue_params &e, float (&sums)[SUMS])
{
  if (e.activation == ESMM_ACT_RELU2)
#pragma unroll
    for (int i = 0; i < SUMS; i++)
      sums[i] = __fmul_rn(sums[i], fabsf(sums[i]));
}

static __device__ __forceinline__ void pack_activated(const esmm_epilogue_params &e, const float *sums,
                                                      uint32_t (&pairs)[4][4])
{
  if (e.activation == ESMM_ACT_NONE)
    pack_lines(e.c.dtype, sums, pairs);
  else
    pack_lines<true>(e.c.dtype, sums, pairs);
}

/* To shared memory, 128 bytes a row, swizzled. */
static __device__ __forceinline__ void store_lines(uint32_t to, const uint32_t (&pairs)[4][4])
{
  const uint32_t lane = (uint32_t)thread_now() % 32, line = lane % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
    sm90_stmatrix_at(to + line * 128 + ((2 * i + lane / 16) ^ line % 8) * 16, pairs[i]);
}

/* ---- counts and bits of C ---- */

/* The bitmap of the strip of C that has this row; NULL where none is noted. The host has made strip_rows fit. */
static __device__ __forceinline__ uint32_t *bitmap_of(const esmm_epilogue_params &e, int row)
{
  if (!e.bits)
    return nullptr;
  return (uint32_t *)e.bits + (int64_t)((uint32_t)row / (uint32_t)e.strip_rows) * e.words;
}

/* Bits of 32 columns from col on; by one lane. */
static __device__ __forceinline__ void add_bits(uint32_t *bitmap, int col, uint32_t word)
{
  if (word)
    atomicOr(bitmap + col / 32, word);
}

static __device__ __forceinline__ void add_count(const esmm_epilogue_params &e, int col, int count)
{
  if (e.counts && count)
    atomicAdd((int *)e.counts + col, count);
}

/* 64 columns from col on; each lane has the nonzero counts of two. */
static __device__ __forceinline__ void tally_bits(uint32_t *bitmap, int col, __half2 nonzeros)
{
  if (!bitmap)
    return;
  const uint32_t lane = (uint32_t)thread_now() % 32;
  const uint32_t low = __low2float(nonzeros) != 0.0f, high = __high2float(nonzeros) != 0.0f;
  const uint32_t two = (low | high << 1) << (lane % 16 * 2);
  const uint32_t first = __reduce_or_sync(~0u, lane < 16 ? two : 0);
  const uint32_t second = __reduce_or_sync(~0u, lane < 16 ? 0 : two);
  if (lane < 2)
    add_bits(bitmap, col + 32 * (int)lane, lane ? second : first);
}

/*
 * 16 rows by 64 columns of a 16-bit C, from col on, as store_lines has left them in shared memory at a multiple of
 * 1024. The first `rows` are C's; the others are cleared. upper, lower: the bitmaps of rows 0 to 7 and 8 to 15. mine:
 * this lane's two columns are to be noted. Both dtypes are compared as fp16: their zeros have the same bits; counts are
 * exact.
 */
static __device__ __forceinline__ void tally_lines(const esmm_epilogue_params &e, uint32_t at, int rows, int col,
                                                   uint32_t *upper, uint32_t *lower, bool mine)
{
  const uint32_t lane = (uint32_t)thread_now() % 32;
  const __half2 zero = __float2half2_rn(0.0f);
  __syncwarp();
  if (rows < 16) {
#pragma unroll 1
    for (int r = max(rows, 0); r < 16; r++)
      sm90_store(at + (uint32_t)r * 128 + lane * 4, 0);
    __syncwarp();
  }
  __half2 nonzeros[2] = {zero, zero}; /* of rows 0 to 7, 8 to 15 */
#pragma unroll
  for (uint32_t r = 0; r < 8; r++)
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const uint32_t pair = sm90_load(((at + lane * 4) ^ r * (128 + 16)) + h * 1024);
      nonzeros[h] = __hadd2(nonzeros[h], __hneu2(*(const __half2 *)&pair, zero));
    }
  if (!mine)
    nonzeros[0] = nonzeros[1] = zero;
  const __half2 all = __hadd2(nonzeros[0], nonzeros[1]);
  if (upper == lower) {
    tally_bits(upper, col, all);
  } else {
    tally_bits(upper, col, nonzeros[0]);
    tally_bits(lower, col, nonzeros[1]);
  }
  add_count(e, col + 2 * (int)lane, (int)__low2float(all));
  add_count(e, col + 2 * (int)lane + 1, (int)__high2float(all));
}

/* ---- C that is not written in one of the fast ways ---- */

/* Where a row's column is in a warp's spare memory: no two of what a warp writes or reads at once share a bank. */
static __device__ __forceinline__ int spare_at(int row, int col)
{
  return row * 32 + (col ^ ((row & 3) * 8 + (row >> 2 & 1)));
}

/* C's order, read where it is used, as thread_now is: what follows from it is not kept over a loop either. */
static __device__ __forceinline__ int order_now(const esmm_epilogue_params &e)
{
  int order = e.c.order;
  asm volatile("" : "+r"(order));
  return order;
}

/*
 * Any C and all that may follow a sum: 16 sums a turn, which are 16 rows by 32 columns of a warp, through shared
 * memory. They are finished along C's lines, eight at once a lane. The sums are lost. Where C's strips are noted it is
 * row-major, and they have a multiple of 8 rows.
 */
template <int SUMS>
static __device__ __forceinline__ void store_slowly(const esmm_wgmma16_params &p, float (&sums)[SUMS], int row0,
                                                    int col0, int first, int last, float *spare)
{
  const esmm_epilogue_params &e = p.epilogue;
#pragma unroll 1
  for (int g = 0; g < last; g += 16) {
    const int from = thread_now() % 32;
#pragma unroll
    for (int i = 0; i < 16; i++)
      spare[spare_at(from / 4 + i / 2 % 2 * 8, i / 4 * 8 + from % 4 * 2 + i % 2)] = sums[i];
#pragma unroll
    for (int i = 0; i + 16 < SUMS; i++)
      sums[i] = sums[i + 16];
    __syncwarp();
    int count = 0;
    if (g >= first)
#pragma unroll 1
      for (int h = 0; h < 4; h++) { /* rows 4h to 4h + 3 of a column, or every other column of a row */
        const int lane = thread_now() % 32;
        const bool by_rows = order_now(e) == ESMM_ROW_MAJOR;
        const int row = by_rows ? 4 * h : lane % 16, col = by_rows ? lane : 8 * h + lane / 16;
        const line_of_c line = {row0 + row, col0 + 2 * g + col, by_rows ? 1 : 0, by_rows ? 0 : 2};
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[i] = spare[spare_at(row + (by_rows ? i : 0), col + (by_rows ? 0 : 2 * i))];
        begin_line(e, line, x);
        if (is_smooth(e.activation))
#pragma unroll
          for (int i = 0; i < 4; i++)
            x[i] = smooth(e.activation, x[i]);
        else
          activate(e.activation, x);
        const uint32_t nonzeros = end_line(e, line, x);
        if (e.bits) {
          const uint32_t word = __ballot_sync(~0u, nonzeros != 0);
          if (lane == 0)
            add_bits(bitmap_of(e, row0 + 4 * h), col0 + 2 * g, word);
        }
        count += __popc(nonzeros);
      }
    add_count(e, col0 + 2 * g + thread_now() % 32, count);
    __syncwarp();
  }
}

/*
 * Finishes all sums of a warpgroup, 64 rows from `row` on, and has TMA write them to C. They lie in shared memory as
 * panels of 64 columns, the first warpgroup's before the second's: the first `room` of the block's panels at `here`,
 * the others at `there`; counts and bits are noted from there, by each warp for its 16 rows, or late, by the tally
 * warps, or on the way there (tally.cuh). One thread of the warpgroup starts the copies; let_go_held waits until that
 * memory has been read. bias: that of the tile's first column, in any memory, or NULL. MORE: a curve or a residual may
 * follow.
 */
template <bool MORE, int SUMS>
static __device__ __forceinline__ void store_boxes(const esmm_wgmma16_params &p, wgmma16_shared *sh,
                                                   float (&sums)[SUMS], int row, int col, const float *bias, char *here,
                                                   int room, char *there, bool late, bool counted)
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
  if constexpr (MORE) {
#pragma unroll 1
    for (int g = 0; g < SUMS / 32; g++) {
      const int panel = group * (SUMS / 32) + g, lane = thread_now() % 32;
      const uint32_t to = sm90_address(panel < room ? here + panel * PANEL : there + (panel - room) * PANEL) +
                          (uint32_t)warp * (PANEL / 4);
      float x[PANEL_SUMS];
#pragma unroll
      for (int i = 0; i < PANEL_SUMS; i++)
        x[i] = sums[i];
      const int first = 64 * g + lane % 4 * 2;
      finish_panel(p.epilogue, x, row + warp * 16 + lane / 4, col + first, bias_from(bias, first));
      uint32_t pairs[4][4];
      pack_lines(p.epilogue.c.dtype, x, pairs);
      store_lines(to, pairs);
      if (counted)
        tally_pairs(sm90_address(sh->tally_bytes) + (uint32_t)g * 64, pairs);
#pragma unroll
      for (int i = 0; i + PANEL_SUMS < SUMS; i++)
        sums[i] = sums[i + PANEL_SUMS];
    }
  } else {
    scale(p.epilogue, sums);
    add_row(bias_from(bias, thread % 4 * 2), sums);
    begin_activation(p.epilogue, sums);
#pragma unroll
    for (int g = 0; g < SUMS / 32; g++) {
      const int panel = group * (SUMS / 32) + g;
      const uint32_t to = sm90_address(panel < room ? here + panel * PANEL : there + (panel - room) * PANEL) +
                          (uint32_t)warp * (PANEL / 4);
      uint32_t pairs[4][4];
      pack_activated(p.epilogue, &sums[32 * g], pairs);
      store_lines(to, pairs);
      if (counted)
        tally_pairs(sm90_address(sh->tally_bytes) + (uint32_t)g * 64, pairs);
    }
  }
  if (!late && p.epilogue.extra & ESMM_EXTRA_TALLY) {
    const int first = row + warp * 16;
    uint32_t *upper = bitmap_of(p.epilogue, first), *lower = bitmap_of(p.epilogue, first + 8);
#pragma unroll 2
    for (int g = 0; g < SUMS / 32; g++) {
      const int panel = group * (SUMS / 32) + g;
      const uint32_t at = sm90_address(panel < room ? here + panel * PANEL : there + (panel - room) * PANEL) +
                          (uint32_t)warp * (PANEL / 4);
      tally_lines(p.epilogue, at, p.m - first, col + 64 * g, upper, lower, true);
    }
  }
  sm90_fence_async();
  meet_group(7 + group);
  if (thread % 128 == 0) {
    if (late)
      tally_next(sh, group, row, col, sm90_address(here));
#pragma unroll
    for (int g = 0; g < SUMS / 32; g++) {
      const int panel = group * (SUMS / 32) + g;
      sm90_tma_store(&p.map_c, col + 64 * g, row, panel < room ? here + panel * PANEL : there + (panel - room) * PANEL);
    }
    sm90_bulk_commit();
  }
}

/*
 * 16 rows by 64 columns of a 16-bit C that has_vectors, finished: those of sums [first, last), and their counts and
 * bits. They go through shared memory, 128 bytes a row, swizzled; a store then writes whole lines.
 */
static __device__ __forceinline__ void store_rows(const esmm_epilogue_params &e, const float *sums, int row0, int col,
                                                  int first, int last, float *spare)
{
  const int lane = thread_now() % 32, rows = (int)e.c.rows - row0;
  const bool mine = lane % 8 * 4 >= first && lane % 8 * 4 < last;
  const uint32_t here = sm90_address(spare);
  uint16_t *to = (uint16_t *)e.c.data + (row0 + lane / 8) * e.c.ld + col + lane % 8 * 8;
  uint32_t pairs[4][4];
  pack_lines(e.c.dtype, sums, pairs);
  store_lines(here, pairs);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = i * 4 + lane / 8;
    const uint4 words = *(const uint4 *)((const char *)spare + r * 128 + (lane % 8 ^ r % 8) * 16);
    if (mine && r < rows)
      *(uint4 *)(to + i * 4 * e.c.ld) = words;
  }
  __syncwarp();
  if (e.extra & ESMM_EXTRA_TALLY) {
    tally_lines(e, here, rows, col, bitmap_of(e, row0), bitmap_of(e, row0 + 8),
                lane / 4 * 4 >= first && lane / 4 * 4 < last);
    __syncwarp();
  }
}

/* Sums [first, last) of 16 rows from row0 on by 2 * SUMS columns; spare: the warp's 2 KiB of shared memory. */
template <int SUMS>
static __device__ __forceinline__ void store_sums(const esmm_wgmma16_params &p, float (&sums)[SUMS], int row0, int col0,
                                                  int first, int last, float *spare)
{
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = thread_now() % 32, t = lane % 4, row = row0 + lane / 4;
  if (row0 >= p.m || col0 >= p.n)
    return;
  if (!has_vectors(e.c) || e.beta != 0.0f || col0 + 2 * SUMS > p.n || e.extra & ESMM_EXTRA_VALUES ||
      (e.extra & ESMM_EXTRA_TALLY && e.c.dtype == ESMM_F32)) {
    store_slowly(p, sums, row0, col0, first, last, spare);
    return;
  }
  finish_values<in_fragments>(e, sums, col0 + 2 * t);
  if (e.c.dtype == ESMM_F32) {
    float *to = (float *)e.c.data + row * e.c.ld + col0 + 2 * t;
    const int64_t below = 8 * e.c.ld;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) /* 8 columns */
      if (i >= first && i < last) {
        if (row < p.m)
          *(float2 *)(to + 2 * i) = make_float2(sums[i], sums[i + 1]);
        if (row + 8 < p.m)
          *(float2 *)(to + below + 2 * i) = make_float2(sums[i + 2], sums[i + 3]);
      }
  } else {
#pragma unroll
    for (int g = 0; g < SUMS; g += 32)
      if (g + 32 > first && g < last)
        store_rows(e, &sums[g], row0, col0 + 2 * g, first - g, last - g, spare);
  }
}

#endif
