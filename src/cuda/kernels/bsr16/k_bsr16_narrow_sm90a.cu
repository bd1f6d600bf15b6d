/*
 * k_bsr16_narrow_sm90a.cu: a 16-bit A times a B of blocks narrower than a cell, on Hopper: 32 k's by 32 columns.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B         blocks of 32 x 32 with a nonzero, in the order of lists, as wgmma reads them (ops/narrow.c)
 *   sums      fp32, in the tensor core
 *
 * The way from the second-level cache bounds narrow blocks: a chunk of A serves the few blocks that a tile has there.
 * So a tile has eight times 32 columns with blocks at the same k's (ops/narrow.c puts them together), and 128 rows:
 *
 *     A: 128 rows                   columns 96.., 544.., 0.., ... (eight)        C
 *     [ chunk 0           ]         [ x . . x . . . . ]
 *     [ chunk 1: not read ]    x    [ . . . . . . . . ]       =       [ columns 0 to 3: warpgroup 0 ]
 *     [ chunk 2           ]         [ . . x . . . . . ]               [ columns 4 to 7: warpgroup 1 ]
 *
 * A stage holds an entry: up to four of A's chunks, and up to eight blocks. C is computed transposed, as in
 * k_bsr16_sm90a.cu: an instruction has 64 columns, two times 32 that are neighbours in the tile, by 128 rows. Its view
 * of the columns says where the second 32 lie, so where one of the two has no block that half of the view is a block of
 * zeros. By instructions of 64 rows and 32 columns nothing would be multiplied in vain, but there would be four for a
 * block, each over in 24 cycles: choosing their sums takes a warp longer than that.
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
#define BOX (64 * SIDE * 2) /* bytes: 64 rows of 32 columns of C */
#define MINE (COLS / 2)     /* times 32 columns of a warpgroup, for all of a tile's rows: */
#define TWICE (MINE / 2)    /* twice as many together, */
#define SUMS 64             /* a thread's share of that */
#define ZEROS (SIDE * 32)   /* bytes: 16 k's by 32 columns, before the ring and behind everything */
#define WARPS 4             /* that load */

/* A stage's words for consumers: which blocks it has, and its counts with: */
enum { WORD_LAST = 1 << 24, WORD_END = 1 << 25 }; /* it is its unit's last; there are no more */

typedef struct narrow_shared {
  uint64_t full[STAGES], empty[STAGES];
  bsr16_tickets tickets;
  alignas(16) uint2 words[STAGES];
  uint32_t come; /* parts of a tile that were there before this one */
  /* With a unit's last stage: its row, -, place, parts << 16 | part; where its columns are. */
  alignas(16) uint4 unit[STAGES], places[STAGES][2];
  /* Each warpgroup's own, on the way to C. */
  union {
    alignas(1024) char boxes[2][2][BOX]; /* that TMA writes, two by turns; */
    float spare[4][512];                 /* or 2 KiB for each of its warps */
  } own[2];
} narrow_shared;
static_assert(STAGES * STAGE_BYTES + sizeof(narrow_shared) + 2 * ZEROS <= ESMM_NARROW_SHARED,
              "params.h gives the host another size");
static_assert(COLS == 8 && CHUNKS == 4 && ESMM_NARROW_BLOCKS == 8, "two vectors of places, a word of bits");
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
  esmm_narrow_entry entry = {};
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    entry.chunk[i] = __shfl_sync(~0u, word, i);
  entry.alive = __shfl_sync(~0u, word, CHUNKS);
  entry.counts = __shfl_sync(~0u, word, CHUNKS + 1);
  entry.block = __shfl_sync(~0u, word, CHUNKS + 2);
  return entry;
}

/* Lane i's of eight: where the i-th 32 columns of a tile are. */
static __device__ __forceinline__ uint32_t place_at(const esmm_bsr16_params &p, const bsr16_list &list)
{
  return __ldg((const uint32_t *)p.places + (int64_t)list.tile * COLS + threadIdx.x % COLS);
}

/* One thread: A's chunks and an entry's blocks; each block of a pair fetches half of these for both. turn: which of the
   two takes an odd one. */
static __device__ __forceinline__ void load_entry(const esmm_bsr16_params &p, char *stage, uint64_t *full, int row,
                                                  const esmm_narrow_entry &entry, int rank, int turn)
{
  const int blocks = (int)(entry.counts >> 8 & 0xff), chunks = (int)(entry.counts >> 16);
  const char *from = (const char *)p.blocks + (int64_t)entry.block * BLOCK_BYTES;
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
  if (!p.pairs) {
    if (blocks > 0)
      sm90_bulk_load(stage + A_BYTES, from, (uint32_t)blocks * BLOCK_BYTES, full);
  } else {
    const int cut = (blocks + turn % 2) / 2, first = rank == 0 ? 0 : cut, count = rank == 0 ? cut : blocks - cut;
    if (count > 0)
      sm90_bulk_load_multicast(stage + A_BYTES + first * BLOCK_BYTES, from + first * BLOCK_BYTES,
                               (uint32_t)count * BLOCK_BYTES, full, BOTH);
  }
}

static __device__ __forceinline__ uint32_t entry_bytes(uint32_t counts)
{
  return (counts >> 16) * A_CHUNK + (counts >> 8 & 0xff) * BLOCK_BYTES;
}

/* One of the loading warps; they take stages in turn, as a stage takes one thread hundreds of instructions. */
static __device__ __forceinline__ void feed(const esmm_bsr16_params &p, char *ring, narrow_shared *sh, bsr16_next &next)
{
  const bsr16_work work = work_of(p);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  int slot = warp, before = 0; /* before: stages of all units before this one, of which every WARPS-th is its own */
  uint32_t phase = 1;
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
        sh->words[slot] = make_uint2(entry.alive, entry.counts | (last ? WORD_LAST : 0));
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
    sh->words[slot] = make_uint2(0, WORD_END);
    sm90_barrier_arrive(&sh->full[slot]);
  }
  __syncwarp();
}

/* ---- multiplying ---- */

/* The changing parts of views: their lower words, a place in shared memory and the distance to the next 32 columns of
   blocks, both in 16 bytes. */
typedef struct narrow_views {
  uint32_t a, b;          /* of the first stage; b: the place alone, as are: */
  uint32_t before, after; /* zeros, before the ring and behind it */
} narrow_views;

static __device__ __forceinline__ uint32_t place_of(const void *at)
{
  return (sm90_address(at) & 0x3ffffu) >> 4;
}

static __device__ __forceinline__ narrow_views views_of(const char *ring, const char *after)
{
  const narrow_views views = {(uint32_t)view_of(ring, A_PANEL, 0, false), place_of(ring + A_BYTES),
                              place_of(ring - ZEROS), place_of(after)};
  return views;
}

/* The upper word of view_of(). */
static constexpr __device__ uint64_t upper_view(uint32_t group, bool wide)
{
  return group >> 4 | (wide ? 1u : 2u) << 30;
}

/* Sums of twice 32 columns += a chunk times their blocks. here: which of the two have one; `at`: where the first of
   these lies. */
template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply_blocks(float (&sums)[SUMS], const narrow_views &views, uint32_t here,
                                                       uint32_t a, uint32_t at)
{
  enum { A_STEP = A_BY_K ? 16 * 128 >> 4 : 32 >> 4, B_STEP = 16 * 64 >> 4 };
  constexpr uint64_t a_lines = upper_view(A_BY_K ? 1024 : 512, A_BY_K), b_lines = upper_view(512, false);
  uint32_t first[SIDE / 16], second[SIDE / 16];
#pragma unroll
  for (int s = 0; s < SIDE / 16; s++) {
    first[s] = here & 1 ? at + s * B_STEP : views.before;
    second[s] = here == 1 ? views.after : at + s * B_STEP + (here == 3 ? BLOCK_BYTES >> 4 : 0);
  }
  sm90_wgmma_fence();
#pragma unroll
  for (int s = 0; s < SIDE / 16; s++)
    wgmma16<DTYPE, 1, A_BY_K>(sums, b_lines << 32 | ((second[s] - first[s]) << 16 | first[s]),
                              a_lines << 32 | (a + s * A_STEP));
  sm90_wgmma_commit();
}

/* Stages up to a unit's last; returns its word. at: its slot. A stage's products are waited for when the next stage is
   there and its words are read. */
template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ uint32_t multiply_unit(bsr16_consumer &c, const narrow_views &views,
                                                         float (&sums)[TWICE][SUMS], uint32_t &at)
{
  const bool second = group_now() != 0;
  uint32_t before = STAGES, what = 0;
#pragma unroll
  for (int j = 0; j < TWICE * SUMS; j++)
    sums[j / SUMS][j % SUMS] = 0.0f;
  do {
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    /* Read and broadcast by the lane that releases this block's stage. */
    uint2 words = make_uint2(0, 0);
    if (c.lane == c.reader)
      words = sm90_load2(c.words + c.slot * 8);
    const uint32_t alive = __shfl_sync(~0u, words.x, c.reader);
    what = __shfl_sync(~0u, words.y, c.reader);
    uint32_t left = second ? alive >> 16 : alive & 0xffff;
    uint32_t a = views.a + c.slot * (STAGE_BYTES >> 4);
    uint32_t b = views.b + c.slot * (STAGE_BYTES >> 4) + (second ? what & 0xff : 0) * (BLOCK_BYTES >> 4);
    sm90_wgmma_wait<0>();
    if (before < STAGES)
      let_go(c, before);
      /* Sums that branches choose are under way together all the same, if each branch commits them by itself. */
#pragma unroll 1
    for (; left != 0; left >>= 4, a += A_CHUNK >> 4) {
      if (left & 3) {
        multiply_blocks<DTYPE, A_BY_K>(sums[0], views, left & 3, a, b);
        b += (left & 3) == 3 ? 2 * BLOCK_BYTES >> 4 : BLOCK_BYTES >> 4;
      }
      if (left & 12) {
        multiply_blocks<DTYPE, A_BY_K>(sums[1], views, left >> 2 & 3, a, b);
        b += (left & 12) == 12 ? 2 * BLOCK_BYTES >> 4 : BLOCK_BYTES >> 4;
      }
    }
    before = c.slot;
    if (++c.slot == STAGES) {
      c.slot = 0;
      c.phase ^= 1;
    }
  } while (!(what & (WORD_LAST | WORD_END)));
  sm90_wgmma_wait<0>();
  at = before;
  return what;
}

/* ---- the epilogue ---- */

/* A thread has, of twice 32 columns by 128 rows, sums[4j + 2h + e]: column 16 * warp + lane / 4 + 8h, row 8j + lane % 4
 * 2 + e. So two of a warpgroup's warps have the first 32 columns, the others the second. */

/* The first of a warp's 16 columns; past C where there are none. */
static __device__ __forceinline__ int first_column(const uint32_t (&places)[MINE], int i)
{
  const int warp = thread_now() / 32 % 4;
  const uint32_t place = warp / 2 ? places[2 * i + 1] : places[2 * i];
  return place == ESMM_NO_CELL ? INT32_MAX - SIDE : (int)place * SIDE + warp % 2 * 16;
}

/* 16 rows by 16 columns to boxes of 64 rows by 32 columns, 64 bytes a row, swizzled. line: of the first row; right: the
   box's right half. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_turned(uint32_t box, int line, int right, const float *x)
{
  const int lane = thread_now() % 32, row = line + lane / 16 * 8 + lane % 8, part = right * 2 + lane / 8 % 2;
  const uint32_t pairs[4] = {pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[2], x[3]), pair_of<DTYPE>(x[4], x[5]),
                             pair_of<DTYPE>(x[6], x[7])};
  sm90_stmatrix_trans_at(box + (uint32_t)(row * 64 + (part ^ row / 2 % 4) * 16), pairs);
}

/* Finishes a warpgroup's sums and has TMA write them, 64 rows of twice 32 columns at a time. */
static __device__ __forceinline__ void store_boxes(const esmm_bsr16_params &p, float (&sums)[TWICE][SUMS], int row,
                                                   const uint32_t (&places)[MINE], char (*boxes)[2][BOX])
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
#pragma unroll
  for (int i = 0; i < TWICE; i++) {
    finish_values<in_columns>(p.epilogue, sums[i], first_column(places, i) + thread % 32 / 4);
#pragma unroll
    for (int g = 0; g < 2; g++) { /* 64 rows */
      const uint32_t to = sm90_address(boxes[g][warp / 2]);
      if (thread % 128 == 0)
        sm90_bulk_wait_read<1>(); /* what was in these boxes has left */
      meet_group(7 + group);
#pragma unroll
      for (int j = 0; j < 4; j++) /* 16 rows */
        if (p.epilogue.c.dtype == ESMM_BF16)
          store_turned<ESMM_BF16>(to, j * 16, warp % 2, &sums[i][32 * g + 8 * j]);
        else /* ESMM_F16 */
          store_turned<ESMM_F16>(to, j * 16, warp % 2, &sums[i][32 * g + 8 * j]);
      sm90_fence_async();
      meet_group(7 + group);
      if (thread % 128 == 0) {
        sm90_tma_store(&p.map_c, (int)places[2 * i] * SIDE, row + 64 * g, boxes[g][0]);
        sm90_tma_store(&p.map_c, (int)places[2 * i + 1] * SIDE, row + 64 * g, boxes[g][1]);
        sm90_bulk_commit();
      }
    }
  }
}

/* A unit's epilogue. */
static __device__ __forceinline__ void finish_unit(const esmm_bsr16_params &p, const uint4 &unit,
                                                   const uint32_t (&places)[MINE], narrow_shared *sh,
                                                   float (&sums)[TWICE][SUMS])
{
  const int row = (int)unit.x, parts = (int)(unit.w >> 16), part = (int)(unit.w & 0xffff);
  const int group = group_now(), warp = thread_now() / 32 % 4;
  bool whole = true; /* all the warpgroup's columns lie inside C */
#pragma unroll
  for (int i = 0; i < MINE; i++)
    whole &= ((int64_t)places[i] + 1) * SIDE <= p.n;
  if (parts > 1 && !add_parts(p, &sh->come, row, (int)unit.z, part, parts, (float(&)[TWICE * SUMS]) sums))
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
#pragma unroll
  for (int i = 0; i < TWICE; i++)
    store_sums(p, sums[i], row, first_column(places, i), sh->own[group].spare[warp]);
  if (p.c_boxes)
    meet_group(7 + group); /* all warps have left the spare memory before it is a box again */
}

/* One lane's value, broadcast. */
static __device__ __forceinline__ uint4 broadcast(int lane, const uint4 &x)
{
  return make_uint4(__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane), __shfl_sync(~0u, x.z, lane),
                    __shfl_sync(~0u, x.w, lane));
}

template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply(const esmm_bsr16_params &p, char *ring, narrow_shared *sh)
{
  const narrow_views views = views_of(ring, (const char *)(sh + 1));
  bsr16_consumer c = consumer_of(p, sh->full, sh->empty, sh->words);
  for (;;) {
    float sums[TWICE][SUMS];
    uint32_t at;
    const uint32_t what = multiply_unit<DTYPE, A_BY_K>(c, views, sums, at);
    if (what & WORD_END) {
      if ((thread_now() - FEEDERS) % 128 == 0)
        sm90_bulk_wait_read(); /* a block that ends takes its shared memory along */
      return;
    }
    uint4 unit = {}, mine = {};
    if (c.lane == c.reader) {
      unit = sh->unit[at];
      mine = sh->places[at][group_now()];
    }
    unit = broadcast(c.reader, unit);
    mine = broadcast(c.reader, mine);
    let_go(c, at);
    uint32_t places[MINE] = {mine.x, mine.y, mine.z, mine.w};
    finish_unit(p, unit, places, sh, sums);
  }
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void narrow_main(const esmm_bsr16_params &p)
{
  extern __shared__ __align__(1024) char zeros[]; /* the only shared memory, so aligned as declared */
  char *ring = zeros + ZEROS;
  narrow_shared *sh = (narrow_shared *)(ring + STAGES * STAGE_BYTES);
  bsr16_next next = {};
  if (threadIdx.x < FEEDERS) /* the first list is looked up while the blocks meet */
    next = first_of(p, work_of(p));
  else if (threadIdx.x == FEEDERS)
    begin_stages<STAGES>(p, sh->full, sh->empty, &sh->tickets);
  for (int i = (int)threadIdx.x; i < ZEROS / 4; i += ESMM_WGMMA16_THREADS)
    ((uint32_t *)zeros)[i] = ((uint32_t *)(sh + 1))[i] = 0;
  sm90_fence_async();
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < FEEDERS) {
    sm90_registers_down<88>();
    feed(p, ring, sh, next);
  } else {
    sm90_registers_up<208>();
    if (p.a_by_k)
      multiply<DTYPE, true>(p, ring, sh);
    else
      multiply<DTYPE, false>(p, ring, sh);
  }
  cluster_sync(); /* the other block may still send here */
}

#define NARROW(id, dtype)                                                 \
  extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)   \
      esmm_bsr16_narrow_##id(const __grid_constant__ esmm_bsr16_params p) \
  {                                                                       \
    if (!not_selected(p.selector))                                        \
      narrow_main<dtype>(p);                                              \
  }

NARROW(bf16, ESMM_BF16)
NARROW(f16, ESMM_F16)
