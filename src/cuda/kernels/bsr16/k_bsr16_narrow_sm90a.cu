/*
 * k_bsr16_narrow_sm90a.cu: a 16-bit A times a B of cells whose blocks are narrower than a cell, on Hopper: 32 k's by 32
 * columns.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B         cells of 64 columns (ops/blocks.c), of which the blocks that have a nonzero are read
 *   sums      fp32, in the tensor core
 *
 * What bounds narrow blocks is the way from the second-level cache: a chunk of A is used for the few blocks that a tile
 * has there. So a tile has eight times 32 columns, those whose blocks lie at the same k's (ops/narrow.c puts them
 * together), and 128 rows:
 *
 *     A: 128 rows                   columns 96.., 544.., 0.., ... (eight)        C
 *     [ chunk 0           ]         [ x . . x . . . . ]
 *     [ chunk 1: not read ]    x    [ . . . . . . . . ]       =       [ columns 0 to 3: warpgroup 0 ]
 *     [ chunk 2           ]         [ . . x . . . . . ]               [ columns 4 to 7: warpgroup 1 ]
 *
 * A stage holds an entry: up to four of A's chunks, and up to eight blocks. An instruction has 64 rows and 32 columns,
 * so only what is there is multiplied; it reads A's 64 rows again for every block, which shared memory allows at two
 * thirds of its rate.
 *
 * Blocks of the GPU, pairs, units and parts are those of units.cuh.
 */
#include "cuda/kernels/bsr16/units.cuh"

#define STAGES ESMM_NARROW_STAGES
#define CHUNKS ESMM_NARROW_CHUNKS
#define SIDE ESMM_NARROW_SIDE
#define COLS ESMM_NARROW_COLS
#define A_PANEL (64 * SIDE * 2) /* 64 rows of a chunk */
#define A_CHUNK (2 * A_PANEL)
#define A_BYTES (CHUNKS * A_CHUNK) /* of a stage; its blocks are behind them */
#define BLOCK_BYTES (SIDE * SIDE * 2)
#define STAGE_BYTES (A_BYTES + ESMM_NARROW_BLOCKS * BLOCK_BYTES)
#define BOX (64 * SIDE * 2)           /* bytes: 64 rows of 32 columns of C */
#define BLOCK_SUMS 16                 /* a thread's share of 64 x 32 sums */
#define MINE (COLS / 2)               /* times 32 columns of a warpgroup, for all of a tile's rows: */
#define HALF_SUMS (MINE * BLOCK_SUMS) /* 64 rows of it, */
#define SUMS (2 * HALF_SUMS)          /* and 64 more */
#define WARPS 4                       /* that load */

/* What consumers are told of a stage: its steps, and its counts with: */
enum { TOLD_LAST = 1 << 24, TOLD_END = 1 << 25 }; /* it is its unit's last; there are no more */

typedef struct narrow_shared {
  uint64_t full[STAGES], empty[STAGES];
  bsr16_tickets tickets;
  alignas(16) uint2 told[STAGES];
  uint32_t come; /* parts of a tile that were there before this one */
  /* With a unit's last stage: its row, -, place, parts << 16 | part; where its columns are. */
  alignas(16) uint4 unit[STAGES], places[STAGES][2];
  /* Each warpgroup's own, on the way to C. */
  union {
    alignas(1024) char boxes[2][2][BOX]; /* that TMA writes, two by turns; */
    float spare[4][512];                 /* or 2 KiB for each of its warps */
  } own[2];
} narrow_shared;
static_assert(STAGES * STAGE_BYTES + sizeof(narrow_shared) <= ESMM_NARROW_SHARED,
              "params.h tells the host another size");
static_assert(COLS == 8 && CHUNKS == 4 && ESMM_NARROW_BLOCKS == 8, "two vectors of places, a word of steps");
static_assert(WARPS * 32 == FEEDERS && STAGES % WARPS == 0, "a warp has the same stages each time");

/* ---- loading ---- */

/* Lane i's: word i of an entry, if there is one. */
static __device__ __forceinline__ uint32_t entry_at(const esmm_bsr16_params &p, const bsr16_list &list, int at)
{
  enum { WORDS = sizeof(esmm_narrow_entry) / 4 };
  const int lane = (int)threadIdx.x % 32;
  return at < list.after && lane < WORDS ? __ldg((const uint32_t *)p.entries + ((int64_t)list.base + at) * WORDS + lane)
                                         : 0;
}

/* The same of all lanes. */
static __device__ __forceinline__ esmm_narrow_entry entry_of(uint32_t word)
{
  esmm_narrow_entry entry;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    entry.chunk[i] = __shfl_sync(~0u, word, i);
  entry.steps = __shfl_sync(~0u, word, CHUNKS);
  entry.counts = __shfl_sync(~0u, word, CHUNKS + 1);
#pragma unroll
  for (int i = 0; i < ESMM_NARROW_BLOCKS; i++)
    entry.block[i] = __shfl_sync(~0u, word, CHUNKS + 2 + i);
  return entry;
}

/* Lane i's of eight: where the i-th 32 columns of a tile are. */
static __device__ __forceinline__ uint32_t place_at(const esmm_bsr16_params &p, const bsr16_list &list)
{
  return __ldg((const uint32_t *)p.places + (int64_t)list.tile * COLS + threadIdx.x % COLS);
}

/* One thread: A's chunks and the blocks of an entry. turn: which of a pair fetches its first block. */
static __device__ __forceinline__ void load_entry(const esmm_bsr16_params &p, char *stage, uint64_t *full, int row,
                                                  const esmm_narrow_entry &entry, int rank, int turn)
{
  const int blocks = (int)(entry.counts >> 8 & 0xff), chunks = (int)(entry.counts >> 16);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    if (i >= chunks)
      break;
    const int k = (int)entry.chunk[i] * SIDE;
    if (p.a_by_k) {
      sm90_tma_load(stage + i * A_CHUNK, &p.map_a, row, k, full);
      sm90_tma_load(stage + i * A_CHUNK + A_PANEL, &p.map_a, row + 64, k, full);
    } else {
      sm90_tma_load(stage + i * A_CHUNK, &p.map_a, k, row, full);
    }
  }
#pragma unroll
  for (int i = 0; i < ESMM_NARROW_BLOCKS; i++) {
    if (i >= blocks)
      break;
    char *to = stage + A_BYTES + i * BLOCK_BYTES;
    const int x = (int)(entry.block[i] & 1) * SIDE, line = (int)(entry.block[i] >> 1);
    if (!p.pairs)
      sm90_tma_load(to, &p.map_cells, x, line, full);
    else if ((i + turn) % 2 == rank)
      sm90_tma_load_multicast(to, &p.map_cells, x, line, full, BOTH);
  }
}

static __device__ __forceinline__ uint32_t entry_bytes(uint32_t counts)
{
  return (counts >> 16) * A_CHUNK + (counts >> 8 & 0xff) * BLOCK_BYTES;
}

/* One of the loading warps; stages come to them in turns, for a stage takes one thread hundreds of instructions. */
static __device__ __forceinline__ void feed(const esmm_bsr16_params &p, char *ring, narrow_shared *sh)
{
  const bsr16_work work = work_of(p);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  int slot = warp, before = 0; /* before: stages of all units before this one, of which every WARPS-th is its own */
  uint32_t phase = 1;
  bsr16_next next = first_of(p, work);
  uint32_t then = entry_at(p, next.list, next.list.first + warp); /* its first of the next unit */
  uint32_t then_place = place_at(p, next.list);
  for (int turn = 0; next.index < work.count; turn++) {
    const bsr16_unit unit = next.unit;
    const bsr16_list list = next.list;
    const uint32_t place = then_place;
    const int count = max(list.after - list.first, 1), first = list.first + ((warp - before) & (WARPS - 1));
    uint32_t word = then;
    before += count;
    next.step = NEXT_ASK;
    for (int at = first; at < list.first + count; at += WARPS) {
      const bool last = at + 1 == list.first + count;
      const esmm_narrow_entry entry = entry_of(word);
      word = entry_at(p, list, at + WARPS);
      if (lane == 0)
        sm90_barrier_wait(&sh->empty[slot], phase);
      if (last) {
        __syncwarp();
        if (lane < COLS)
          ((uint32_t *)sh->places[slot])[lane] = place;
        __syncwarp();
      }
      if (lane == 0) {
        sh->told[slot] = make_uint2(entry.steps, entry.counts | (last ? TOLD_LAST : 0));
        if (last)
          sh->unit[slot] =
              make_uint4((uint32_t)unit.row, 0, (uint32_t)unit.place, (uint32_t)(unit.parts << 16 | unit.part));
        sm90_barrier_expect(&sh->full[slot], entry_bytes(entry.counts));
        load_entry(p, ring + slot * STAGE_BYTES, &sh->full[slot], unit.row, entry, work.rank, slot);
      }
      __syncwarp();
      slot += WARPS;
      if (slot >= STAGES) {
        slot -= STAGES;
        phase ^= 1;
      }
      if (next.step < NEXT_KNOWN && (list.first + count - at - 1) / WARPS <= AHEAD - next.step &&
          next_step<STAGES, WARPS>(p, &sh->tickets, work, turn, next)) {
        then = entry_at(p, next.list, next.list.first + ((warp - before) & (WARPS - 1)));
        then_place = place_at(p, next.list);
      }
    }
    while (next.step < NEXT_KNOWN)
      if (next_step<STAGES, WARPS>(p, &sh->tickets, work, turn, next)) {
        then = entry_at(p, next.list, next.list.first + ((warp - before) & (WARPS - 1)));
        then_place = place_at(p, next.list);
      }
  }
  if (lane == 0 && (before & (WARPS - 1)) == warp) {
    sm90_barrier_wait(&sh->empty[slot], phase);
    sh->told[slot] = make_uint2(0, TOLD_END);
    sm90_barrier_arrive(&sh->full[slot]);
  }
  __syncwarp();
}

/* ---- multiplying ---- */

/* The lower words of views of the first stage: places are all that changes of a view. */
typedef struct narrow_views {
  uint32_t a, b;
} narrow_views;

static __device__ __forceinline__ narrow_views views_of(char *ring)
{
  const narrow_views views = {(uint32_t)view_of(ring, A_PANEL, 0, false),
                              (uint32_t)view_of(ring + A_BYTES, BLOCK_BYTES, 0, false)};
  return views;
}

#define WGMMA_32(types, a_by_k)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." types " {"                  \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, 1, 1, 1, %18, 1;"                                              \
               : WGMMA16_SUMS_8(AT), WGMMA16_SUMS_8(AT + 8)                              \
               : "l"(a), "l"(b), "n"(a_by_k))

/* The upper word of view_of(). */
static constexpr __device__ uint64_t upper_view(uint32_t group, bool wide)
{
  return group >> 4 | (wide ? 1u : 2u) << 30;
}

/* Sums of a half's I-th 32 columns += a chunk's 64 rows times their block. */
template <esmm_dtype DTYPE, bool A_BY_K, int HALF, int I>
static __device__ __forceinline__ void multiply_block(float (&d)[SUMS], uint32_t a_view, uint32_t b_view)
{
  enum { AT = HALF * HALF_SUMS + I * BLOCK_SUMS, A_STEP = A_BY_K ? 16 * 128 >> 4 : 32 >> 4, B_STEP = 16 * 64 >> 4 };
  constexpr uint64_t a_lines = upper_view(A_BY_K ? 1024 : 512, A_BY_K), b_lines = upper_view(512, false);
#pragma unroll
  for (int s = 0; s < SIDE / 16; s++) {
    const uint64_t a = a_lines << 32 | (a_view + HALF * (A_PANEL >> 4) + s * A_STEP);
    const uint64_t b = b_lines << 32 | (b_view + s * B_STEP);
    if (DTYPE == ESMM_F16)
      WGMMA_32("f16.f16", A_BY_K);
    else
      WGMMA_32("bf16.bf16", A_BY_K);
  }
}

/* A block: which 32 of the warpgroup's columns it is for, `at` says. Sums that branches choose are under way together
   all the same, if each branch commits them by itself. */
template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply_step(float (&sums)[SUMS], uint32_t at, uint32_t a, uint32_t b)
{
#define STEP(i)                                      \
  case i:                                            \
    sm90_wgmma_fence();                              \
    multiply_block<DTYPE, A_BY_K, 0, i>(sums, a, b); \
    multiply_block<DTYPE, A_BY_K, 1, i>(sums, a, b); \
    sm90_wgmma_commit();                             \
    break
  switch (at) {
    STEP(0);
    STEP(1);
    STEP(2);
    STEP(3);
  }
#undef STEP
}

/* Stages up to a unit's last, whose slot is *at; returns what was told of it. Its products are waited for when the next
   stage is there and what was told of it is known. */
template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ uint32_t multiply_unit(bsr16_consumer &c, const narrow_views &views,
                                                         float (&sums)[SUMS], uint32_t &at)
{
  const bool second = group_now() != 0;
  uint32_t before = STAGES, what = 0;
#pragma unroll
  for (int j = 0; j < SUMS; j++)
    sums[j] = 0.0f;
  do {
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    /* Read by the lane that lets go of this block's stage, and told to the others. */
    uint2 told = make_uint2(0, 0);
    if (c.lane == c.reader)
      told = sm90_load2(c.told + c.slot * 8);
    uint32_t steps = __shfl_sync(~0u, told.x, c.reader);
    what = __shfl_sync(~0u, told.y, c.reader);
    const uint32_t lower = what & 0xff, all = what >> 8 & 0xff;
    const uint32_t first = second ? lower : 0, last = second ? all : lower;
    const uint32_t a = views.a + c.slot * (STAGE_BYTES >> 4);
    uint32_t b = views.b + c.slot * (STAGE_BYTES >> 4) + first * (BLOCK_BYTES >> 4);
    steps >>= 4 * first; /* of fewer than eight, where there are any */
    sm90_wgmma_wait<0>();
    if (before < STAGES)
      let_go(c, before);
#pragma unroll 1
    for (uint32_t i = first; i < last; i++, steps >>= 4, b += BLOCK_BYTES >> 4)
      multiply_step<DTYPE, A_BY_K>(sums, steps & 3, a + (steps >> 2 & 3) * (A_CHUNK >> 4), b);
    before = c.slot;
    if (++c.slot == STAGES) {
      c.slot = 0;
      c.phase ^= 1;
    }
  } while (!(what & (TOLD_LAST | TOLD_END)));
  sm90_wgmma_wait<0>();
  at = before;
  return what;
}

/* ---- the epilogue ---- */

/* A thread has, of twice 64 rows by four times 32 columns, sums[64h + 16i + 4j + 2r + e]: row 64h + 16 * warp + lane /
   4
   + 8r, column 8j + lane % 4 * 2 + e of the warpgroup's i-th 32. */

/* 16 rows by 32 columns to lines of 64 bytes, swizzled. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_block(uint32_t to, const float (&x)[BLOCK_SUMS])
{
  const uint32_t lane = (uint32_t)thread_now() % 32, line = lane % 16;
#pragma unroll
  for (int i = 0; i < 2; i++) { /* matrices of rows 0-7, 8-15 by columns 0-7, the same by 8-15 */
    const uint32_t pairs[4] = {pair_of<DTYPE>(x[8 * i], x[8 * i + 1]), pair_of<DTYPE>(x[8 * i + 2], x[8 * i + 3]),
                               pair_of<DTYPE>(x[8 * i + 4], x[8 * i + 5]), pair_of<DTYPE>(x[8 * i + 6], x[8 * i + 7])};
    sm90_stmatrix_at(to + line * 64 + ((2 * i + lane / 16) ^ line / 2 % 4) * 16, pairs);
  }
}

/* Finishes a warpgroup's sums and has TMA write them, 64 rows of twice 32 columns at a time. row: the tile's first. */
static __device__ __forceinline__ void store_boxes(const esmm_bsr16_params &p, float (&sums)[SUMS], int row,
                                                   const uint32_t (&places)[MINE], char (*boxes)[2][BOX])
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
#pragma unroll
  for (int g = 0; g < 2 * MINE; g += 2) {
    if (thread % 128 == 0)
      sm90_bulk_wait_read<1>(); /* what was in these boxes has left */
    meet_group(7 + group);
#pragma unroll
    for (int i = g; i < g + 2; i++) {
      const uint32_t to = sm90_address(boxes[g / 2 % 2][i % 2]) + (uint32_t)warp * (BOX / 4);
      float x[BLOCK_SUMS];
#pragma unroll
      for (int j = 0; j < BLOCK_SUMS; j++)
        x[j] = sums[BLOCK_SUMS * i + j];
      finish_values<in_fragments>(p.epilogue, x, (int)places[i % MINE] * SIDE + thread % 4 * 2);
      if (p.epilogue.c.dtype == ESMM_BF16)
        store_block<ESMM_BF16>(to, x);
      else /* ESMM_F16 */
        store_block<ESMM_F16>(to, x);
    }
    sm90_fence_async();
    meet_group(7 + group);
    if (thread % 128 == 0) {
      const int at = row + g / MINE * 64;
      sm90_tma_store(&p.map_c, (int)places[g % MINE] * SIDE, at, boxes[g / 2 % 2][0]);
      sm90_tma_store(&p.map_c, (int)places[g % MINE + 1] * SIDE, at, boxes[g / 2 % 2][1]);
      sm90_bulk_commit();
    }
  }
}

/* Any C: 16 rows by 32 columns of a warp a turn, through its own shared memory; row: its first. The sums are lost. */
static __device__ __forceinline__ void store_sums(const esmm_bsr16_params &p, float (&sums)[SUMS], int row,
                                                  uint32_t (&places)[MINE], float *spare)
{
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = thread_now() % 32;
#pragma unroll 1
  for (int g = 0; g < 2 * MINE; g++) {
    const int64_t col = (int64_t)places[0] * SIDE; /* past C: there are no such columns */
    const int first = row + g / MINE * 64;
#pragma unroll
    for (int i = 0; i < BLOCK_SUMS; i++)
      spare[(lane / 4 + i / 2 % 2 * 8) * SIDE + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
#pragma unroll
    for (int i = 0; i + BLOCK_SUMS < SUMS; i++)
      sums[i] = sums[i + BLOCK_SUMS];
    places[0] = places[1]; /* they come round again for the second half */
    places[1] = places[2];
    places[2] = places[3];
    places[3] = (uint32_t)(col / SIDE);
    __syncwarp();
    if (has_vectors(e.c) && col + SIDE <= p.n) {
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        const int r = i * 8 + lane / 4;
        const float4 *from = (const float4 *)(spare + r * SIDE + lane % 4 * 8);
        const float4 low = from[0], high = from[1];
        float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (first + r < p.m)
          finish_8(e, first + r, col + lane % 4 * 8, x);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < 16; r++)
        if (first + r < p.m && col + lane < p.n)
          finish_element(e, first + r, col + lane, spare[r * SIDE + lane]);
    }
    __syncwarp();
  }
}

/* What becomes of the sums. */
static __device__ __forceinline__ void finish_unit(const esmm_bsr16_params &p, const uint4 &told,
                                                   uint32_t (&places)[MINE], narrow_shared *sh, float (&sums)[SUMS])
{
  const int row = (int)told.x, parts = (int)(told.w >> 16), part = (int)(told.w & 0xffff);
  const int group = group_now(), warp = thread_now() / 32 % 4;
  bool whole = true; /* all the warpgroup's columns lie inside C */
#pragma unroll
  for (int i = 0; i < MINE; i++)
    whole &= ((int64_t)places[i] + 1) * SIDE <= p.n;
  if (parts > 1 && !add_parts(p, &sh->come, row, (int)told.z, part, parts, sums))
    return;
  if (p.c_boxes && whole) {
    store_boxes(p, sums, row, places, sh->own[group].boxes);
    return;
  }
  if (p.c_boxes) { /* boxes of the tile before may not have left yet */
    if ((thread_now() - FEEDERS) % 128 == 0)
      sm90_bulk_wait_read();
    meet_group(7 + group);
  }
  store_sums(p, sums, row + warp * 16, places, sh->own[group].spare[warp]);
  if (p.c_boxes)
    meet_group(7 + group); /* all warps have left the spare memory before it is a box again */
}

/* What one lane has, told to the others. */
static __device__ __forceinline__ uint4 told_by(int lane, const uint4 &x)
{
  return make_uint4(__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane), __shfl_sync(~0u, x.z, lane),
                    __shfl_sync(~0u, x.w, lane));
}

template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply(const esmm_bsr16_params &p, char *ring, narrow_shared *sh)
{
  const narrow_views views = views_of(ring);
  bsr16_consumer c = consumer_of(p, sh->full, sh->empty, sh->told);
  for (;;) {
    float sums[SUMS];
    uint32_t at;
    const uint32_t what = multiply_unit<DTYPE, A_BY_K>(c, views, sums, at);
    if (what & TOLD_END) {
      if ((thread_now() - FEEDERS) % 128 == 0)
        sm90_bulk_wait_read(); /* a block that ends takes its shared memory along */
      return;
    }
    uint4 unit = {}, mine = {};
    if (c.lane == c.reader) {
      unit = sh->unit[at];
      mine = sh->places[at][group_now()];
    }
    unit = told_by(c.reader, unit);
    mine = told_by(c.reader, mine);
    let_go(c, at);
    uint32_t places[MINE] = {mine.x, mine.y, mine.z, mine.w};
    finish_unit(p, unit, places, sh, sums);
  }
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void narrow_main(const esmm_bsr16_params &p)
{
  extern __shared__ __align__(1024) char ring[]; /* there is no other shared memory, so it starts as it says */
  narrow_shared *sh = (narrow_shared *)(ring + STAGES * STAGE_BYTES);
  if (threadIdx.x == 0)
    begin_stages<STAGES>(p, sh->full, sh->empty, &sh->tickets);
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < FEEDERS) {
    sm90_registers_down<88>();
    feed(p, ring, sh);
  } else {
    sm90_registers_up<208>();
    if (p.a_by_k)
      multiply<DTYPE, true>(p, ring, sh);
    else
      multiply<DTYPE, false>(p, ring, sh);
  }
  cluster_sync(); /* the other block may still send here */
}

extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)
    esmm_bsr16_narrow_bf16(const __grid_constant__ esmm_bsr16_params p)
{
  if (!not_selected(p.selector))
    narrow_main<ESMM_BF16>(p);
}

extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)
    esmm_bsr16_narrow_f16(const __grid_constant__ esmm_bsr16_params p)
{
  if (!not_selected(p.selector))
    narrow_main<ESMM_F16>(p);
}
