/*
 * k_bsr16_sm90a.cu: a 16-bit A times a B of cells, on Hopper: reads only the chunks of k in which a tile has a cell.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B         cells of 64 columns and 32 or 64 k's (ops/blocks.c)
 *   sums      fp32, in the tensor core
 *
 * Reads of operands from shared memory bound wgmma: with 256 columns an instruction it reaches 80 % of its rate, with
 * 64 half of it. A cell has 64 columns. So C is computed transposed: a cell is the operand of 64 rows, and 256 rows of
 * A that of 256 columns.
 *
 *     cells, transposed         A, transposed: 256 rows
 *     64 columns [ x . x ] 0    [ chunk 0          ]         [ C transposed, warpgroup 0 ]
 *     64 columns [ x . . ] 1  x [ chunk 1: not read]    =    [               warpgroup 1 ]
 *                                [ chunk 2          ]
 *
 * A tile is 256 rows by 128 columns of C, two panels of cells, one for each multiplying warpgroup. Its list has an
 * entry for each chunk of k in which one of them has a cell. A stage holds an entry: A's chunk, and the cells that are
 * there; or two entries, where a cell has 32 k's.
 *
 * Persistent blocks in pairs, a cluster: rows differ, columns and so lists are the same, and each cell is fetched once
 * for both. One warp loads. Lists that are long, or too few to fill the GPU, are cut; the block that finishes a tile's
 * last part adds all parts, in order (units.cuh). Tiles of 128 rows where m is small.
 */
#include "cuda/kernels/bsr16/units.cuh"

#define STAGES ESMM_BSR16_STAGES
#define STAGE_BYTES (6 * PANEL)
#define A_BYTES (4 * PANEL) /* of a stage; its cells are behind them */

/* A stage's word for consumers: the panels of its first and second entry, whether it is its unit's last, whether there
   are no more. */
enum { WORD_SECOND = 2, WORD_LAST = 1 << 8, WORD_END = 1 << 9 };

typedef struct bsr16_shared {
  uint64_t full[STAGES], empty[STAGES];
  bsr16_tickets tickets;
  uint32_t words[STAGES];
  uint32_t come; /* parts of a tile that were there before this one */
  alignas(16) int4 unit[STAGES];
  /* Each warpgroup's own, on the way to C: one of them may be a tile ahead. */
  union {
    alignas(1024) char boxes[2][PANEL]; /* that TMA writes, by turns; */
    float spare[4][512];                /* or 2 KiB for each of its warps */
  } own[2];
} bsr16_shared;
static_assert(STAGES * STAGE_BYTES + sizeof(bsr16_shared) <= ESMM_BSR16_SHARED, "params.h gives the host another size");

/* ---- loading: one warp ---- */

static __device__ __forceinline__ uint2 entry_at(const esmm_bsr16_params &p, const bsr16_list &list, int at)
{
  return at < list.after ? __ldg((const uint2 *)p.entries + list.base + at) : make_uint2(0, 0);
}

/* One thread: A's chunk and the cells of an entry, number `number` of a stage at `stage`. turn: which of a pair fetches
   its first cell. */
template <int CELL_K>
static __device__ __forceinline__ void load_entry(const esmm_bsr16_params &p, char *stage, uint64_t *full, int row,
                                                  uint2 entry, int number, int rank, int turn)
{
  enum { A_PANEL = 64 * CELL_K * 2, CELL = CELL_K * ESMM_CELL_COLS * 2 };
  const int k = (int)(entry.x & 0xfffffff) * CELL_K;
  char *a = stage + number * (4 * A_PANEL), *b = stage + A_BYTES + number * (2 * CELL);
  if (p.a_by_k) {
#pragma unroll 1
    for (int i = 0; i < p.rows / 64; i++)
      sm90_tma_load(a + i * A_PANEL, &p.map_a, row + i * 64, k, full);
  } else {
    sm90_tma_load(a, &p.map_a, k, row, full);
  }
  int line = (int)entry.y * CELL_K;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!(entry.x >> (28 + i) & 1))
      continue;
    if (!p.pairs)
      sm90_tma_load(b + i * CELL, &p.map_cells, 0, line, full);
    else if ((i + turn) % 2 == rank)
      sm90_tma_load_multicast(b + i * CELL, &p.map_cells, 0, line, full, BOTH);
    line += CELL_K;
  }
}

template <int CELL_K> static __device__ __forceinline__ uint32_t entry_bytes(const esmm_bsr16_params &p, uint2 entry)
{
  return (uint32_t)(p.rows + __popc(entry.x >> 28) * ESMM_CELL_COLS) * (CELL_K * 2);
}

/* next: the first unit; then: lane i's: entry i of it. */
template <int CELL_K>
static __device__ __forceinline__ void feed(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh, bsr16_next &next,
                                            uint2 then)
{
  enum { EACH = 64 / CELL_K }; /* entries of a stage */
  const bsr16_work work = work_of(p);
  const int lane = (int)threadIdx.x;
  int slot = 0;
  uint32_t phase = 1;
  for (int turn = 0; next.index < work.count; turn++) {
    const bsr16_unit unit = next.unit;
    const bsr16_list list = next.list;
    uint2 mine = then, ahead = entry_at(p, list, list.first + 32 + lane); /* the same of this one; of those after */
    next.step = NEXT_ASK;
    for (int at = list.first, base = at; at < list.after || at == list.first; at += EACH) {
      if (at - base == 32) {
        base = at;
        mine = ahead;
        ahead = entry_at(p, list, base + 32 + lane);
      }
      const bool last = at + EACH >= list.after;
      uint2 entry[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++)
        entry[i] = make_uint2(__shfl_sync(~0u, mine.x, at - base + i), __shfl_sync(~0u, mine.y, at - base + i));
      if (lane == 0) {
        uint32_t word = last ? WORD_LAST : 0, bytes = 0;
        sm90_barrier_wait(&sh->empty[slot], phase);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          word |= entry[i].x >> 28 << (WORD_SECOND * i);
          bytes += entry[i].x >> 28 ? entry_bytes<CELL_K>(p, entry[i]) : 0;
        }
        sh->words[slot] = word;
        if (last)
          sh->unit[slot] =
              make_int4(unit.row, (int)list.tile * ESMM_BSR16_COLS, unit.place, unit.parts << 16 | unit.part);
        sm90_barrier_expect(&sh->full[slot], bytes);
#pragma unroll
        for (int i = 0; i < EACH; i++)
          if (entry[i].x >> 28)
            load_entry<CELL_K>(p, ring + slot * STAGE_BYTES, &sh->full[slot], unit.row, entry[i], i, work.rank, slot);
      }
      __syncwarp();
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
      if (next.step < NEXT_KNOWN && (list.after - at - 1) / EACH <= AHEAD - next.step &&
          next_step<STAGES, 1>(p, &sh->tickets, work, turn, next))
        then = entry_at(p, next.list, next.list.first + lane);
    }
    while (next.step < NEXT_KNOWN)
      if (next_step<STAGES, 1>(p, &sh->tickets, work, turn, next))
        then = entry_at(p, next.list, next.list.first + lane);
  }
  if (lane == 0) {
    sm90_barrier_wait(&sh->empty[slot], phase);
    sh->words[slot] = WORD_END;
    sm90_barrier_arrive(&sh->full[slot]);
  }
  __syncwarp();
}

/* ---- multiplying ---- */

/* Views of the first stage. */
typedef struct bsr16_views {
  uint64_t a, b;
} bsr16_views;

template <bool A_BY_K, int CELL_K> static __device__ __forceinline__ bsr16_views views_of(char *ring)
{
  const bool wide = A_BY_K || CELL_K == 64;
  const bsr16_views views = {view_of(ring, CELL_K * 128, wide ? 1024 : 512, wide),
                             view_of(ring + A_BYTES + group_now() * (CELL_K * ESMM_CELL_COLS * 2), PANEL, 1024, true)};
  return views;
}

/* A chunk of A with a cell. */
template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, int SUMS>
static __device__ __forceinline__ void multiply_entry(float (&sums)[SUMS], uint64_t a, uint64_t b)
{
  enum { A_STEP = A_BY_K ? 16 * 128 >> 4 : 32 >> 4, B_STEP = 16 * 128 >> 4 };
#pragma unroll
  for (int s = 0; s < CELL_K / 16; s++)
    wgmma16<DTYPE, 1, A_BY_K>(sums, b + s * B_STEP, a + s * A_STEP);
}

/* Stages up to a unit's last; returns its word. at: its slot. */
template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, int SUMS>
static __device__ __forceinline__ uint32_t multiply_unit(bsr16_consumer &c, const bsr16_views &views,
                                                         float (&sums)[SUMS], uint32_t &at)
{
  enum {
    EACH = 64 / CELL_K,
    A_ENTRY = 256 * CELL_K * 2 >> 4, /* in 16 bytes, as views count */
    B_ENTRY = 2 * CELL_K * ESMM_CELL_COLS * 2 >> 4
  };
  uint32_t before = STAGES, what = 0;
#pragma unroll
  for (int j = 0; j < SUMS; j++)
    sums[j] = 0.0f;
  do {
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    /* Read and broadcast by the lane that releases this block's stage. */
    what = __shfl_sync(~0u, c.lane == c.reader ? sm90_load(c.words + c.slot * 4) : 0, c.reader);
    const uint64_t a = views.a + c.slot * (STAGE_BYTES >> 4), b = views.b + c.slot * (STAGE_BYTES >> 4);
    const uint32_t mine = what >> group_now() & (EACH == 2 ? 5 : 1); /* of the panels of its entries */
    /* Each branch by itself: instructions are under way together only where nothing stands between them. */
    if (mine == 5) {
      sm90_wgmma_fence();
      multiply_entry<DTYPE, A_BY_K, CELL_K>(sums, a, b);
      multiply_entry<DTYPE, A_BY_K, CELL_K>(sums, a + A_ENTRY, b + B_ENTRY);
      sm90_wgmma_commit();
    } else if (mine) {
      sm90_wgmma_fence();
      multiply_entry<DTYPE, A_BY_K, CELL_K>(sums, a + (mine == 4 ? A_ENTRY : 0), b + (mine == 4 ? B_ENTRY : 0));
      sm90_wgmma_commit();
    } else {
      sm90_wgmma_wait<0>();
    }
    if (before < STAGES) {
      sm90_wgmma_wait<1>();
      let_go(c, before);
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

/* A thread has, of 64 columns of C by 2 * SUMS rows, sums[4j + 2h + e]: column 16 * warp + lane / 4 + 8h, row
   8j + lane % 4 * 2 + e. */

/* 16 rows by 16 columns to panels of 64 rows by 64 columns, 128 bytes a row, swizzled. line: of the first row. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_turned(uint32_t panel, int line, int warp, const float *x)
{
  const int lane = thread_now() % 32, row = line + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  const uint32_t pairs[4] = {pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[2], x[3]), pair_of<DTYPE>(x[4], x[5]),
                             pair_of<DTYPE>(x[6], x[7])};
  sm90_stmatrix_trans_at(panel + (uint32_t)(row * 128 + (chunk ^ row % 8) * 16), pairs);
}

/*
 * Finishes a warpgroup's sums and has TMA write them, 64 rows at a time. The warpgroups do this each for itself: while
 * one of them stores, the other has the tensor core alone.
 */
template <int SUMS>
static __device__ __forceinline__ void store_boxes(const esmm_bsr16_params &p, float (&sums)[SUMS], int row, int col,
                                                   char (*boxes)[PANEL])
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
  finish_values<in_columns>(p.epilogue, sums, col + warp * 16 + thread % 32 / 4);
#pragma unroll
  for (int g = 0; g < SUMS / 32; g++) {
    const uint32_t to = sm90_address(boxes[g % 2]);
    if (thread % 128 == 0)
      sm90_bulk_wait_read<1>(); /* what was in this box has left */
    meet_group(7 + group);
#pragma unroll
    for (int i = 0; i < 4; i++) /* 16 rows */
      if (p.epilogue.c.dtype == ESMM_BF16)
        store_turned<ESMM_BF16>(to, i * 16, warp, &sums[32 * g + 8 * i]);
      else /* ESMM_F16 */
        store_turned<ESMM_F16>(to, i * 16, warp, &sums[32 * g + 8 * i]);
    sm90_fence_async();
    meet_group(7 + group);
    if (thread % 128 == 0) {
      sm90_tma_store(&p.map_c, col, row + 64 * g, boxes[g % 2]);
      sm90_bulk_commit();
    }
  }
}

/* A unit's epilogue. */
template <int SUMS>
static __device__ __forceinline__ void finish_unit(const esmm_bsr16_params &p, const int4 &unit, bsr16_shared *sh,
                                                   float (&sums)[SUMS])
{
  const int row = unit.x, col = unit.y, parts = unit.w >> 16, part = unit.w & 0xffff;
  const int group = group_now(), warp = thread_now() / 32 % 4;
  if (p.c_boxes && parts == 1 && col + ESMM_BSR16_COLS <= p.n) {
    store_boxes(p, sums, row, col + group * ESMM_CELL_COLS, sh->own[group].boxes);
    return;
  }
  if (parts > 1 && !add_parts(p, &sh->come, row, unit.z, part, parts, sums))
    return;
  if (p.c_boxes) { /* boxes of the tile before may not have left yet */
    if ((thread_now() - FEEDERS) % 128 == 0)
      sm90_bulk_wait_read();
    meet_group(7 + group);
  }
  store_sums(p, sums, row, col + group * ESMM_CELL_COLS + warp * 16, sh->own[group].spare[warp]);
  if (p.c_boxes)
    meet_group(7 + group); /* all warps have left the spare memory before it is a box again */
}

template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K, int SUMS>
static __device__ __forceinline__ void multiply(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  const bsr16_views views = views_of<A_BY_K, CELL_K>(ring);
  bsr16_consumer c = consumer_of(p, sh->full, sh->empty, sh->words);
  for (;;) {
    float sums[SUMS];
    uint32_t at;
    const uint32_t what = multiply_unit<DTYPE, A_BY_K, CELL_K>(c, views, sums, at);
    int4 unit = c.lane == c.reader ? sh->unit[at] : make_int4(0, 0, 0, 0);
    unit.x = __shfl_sync(~0u, unit.x, c.reader);
    unit.y = __shfl_sync(~0u, unit.y, c.reader);
    unit.z = __shfl_sync(~0u, unit.z, c.reader);
    unit.w = __shfl_sync(~0u, unit.w, c.reader);
    if (what & WORD_END) {
      if ((thread_now() - FEEDERS) % 128 == 0)
        sm90_bulk_wait_read(); /* a block that ends takes its shared memory along */
      return;
    }
    let_go(c, at);
    finish_unit(p, unit, sh, sums);
  }
}

template <esmm_dtype DTYPE, bool A_BY_K, int CELL_K>
static __device__ __forceinline__ void multiply_of(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  if (p.rows == ESMM_BSR16_ROWS)
    multiply<DTYPE, A_BY_K, CELL_K, 128>(p, ring, sh);
  else
    multiply<DTYPE, A_BY_K, CELL_K, 64>(p, ring, sh);
}

template <esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ void multiply_as(const esmm_bsr16_params &p, char *ring, bsr16_shared *sh)
{
  if (p.cell_k == 64)
    multiply_of<DTYPE, A_BY_K, 64>(p, ring, sh);
  else
    multiply_of<DTYPE, A_BY_K, 32>(p, ring, sh);
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void bsr16_main(const esmm_bsr16_params &p)
{
  extern __shared__ __align__(1024) char ring[]; /* the only shared memory, so aligned as declared */
  bsr16_shared *sh = (bsr16_shared *)(ring + STAGES * STAGE_BYTES);
  bsr16_next next = {};
  uint2 then = make_uint2(0, 0);
  if (threadIdx.x < 32) { /* the first list is on its way while the blocks meet */
    next = first_of(p, work_of(p));
    then = entry_at(p, next.list, next.list.first + (int)threadIdx.x);
  } else if (threadIdx.x == 32) {
    begin_stages<STAGES>(p, sh->full, sh->empty, &sh->tickets);
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < FEEDERS) {
    sm90_registers_down<72>();
    if (threadIdx.x < 32) {
      if (p.cell_k == 64)
        feed<64>(p, ring, sh, next, then);
      else
        feed<32>(p, ring, sh, next, then);
    }
  } else {
    sm90_registers_up<216>();
    if (p.a_by_k)
      multiply_as<DTYPE, true>(p, ring, sh);
    else
      multiply_as<DTYPE, false>(p, ring, sh);
  }
  cluster_sync(); /* the other block may still send here */
}

#define BSR16(id, dtype)                                                \
  extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1) \
      esmm_bsr16_##id(const __grid_constant__ esmm_bsr16_params p)      \
  {                                                                     \
    if (!not_selected(p.selector))                                      \
      bsr16_main<dtype>(p);                                             \
  }

BSR16(bf16, ESMM_BF16)
BSR16(f16, ESMM_F16)
