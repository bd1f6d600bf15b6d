/*
 * k_bsr16_joint_sm90a.cu: a 16-bit A with zeros times a B of cells, on Hopper: k's that are dead in 128 rows of A are
 * not read of a cell, cells that are not there not of A.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B         cells of 64 columns and 64 k's (ops/blocks.c)
 *   sums      fp32, in the tensor core
 *
 * Two launches. The first packs A (pack_cut): of each 128 rows by 128 k's, a cut, the alive k's, as wgmma reads them.
 * A cut's place is fixed, so that no cut waits for another's count.
 *
 * The second multiplies. What bounds it is the way from the second-level cache, where a line of A or B, 256 bytes, is
 * used for 128 x 128 products only. So a block has 128 rows by 256 columns of C, and lines of A serve both warpgroups:
 *
 *     strip of A, packed         128 | 128 columns of B
 *     [ cut 0: 70 of 128 k's ]   [ x x | . . ]     x: cells of 64 columns and 128 k's
 *     [ cut 1: not read      ]   [ . . | . . ]
 *     [ cut 2: 61            ]   [ x x | x x ]
 *
 * A stage is a cut: its lines of A, which TMA brings, and the same k's of the cells, gathered. Stages differ in length,
 * so rings give out units of 16 lines. Of the warps that load, one goes through the cuts and tells the others, units in
 * turns, what to gather: all that a warp does beside it takes as long as the gathers.
 */
#include "cuda/kernels/bsr16/units.cuh"
#include "cuda/kernels/wgmma16/lines.cuh"
#include "cuda/kernels/wgmma16/store.cuh"

#define CUT ESMM_JOINT_CUT
#define LINES ESMM_JOINT_LINES
#define A_UNITS ESMM_JOINT_A_UNITS
#define B_UNITS ESMM_JOINT_B_UNITS
#define GROUP_BYTES 2048                     /* 8 lines of A */
#define A_UNIT (LINES * CUT * 2)             /* bytes */
#define B_PANEL (LINES * ESMM_CELL_COLS * 2) /* 64 columns of a unit */
#define B_UNIT (2 * B_PANEL)                 /* of a warpgroup's columns */
#define CELL_BYTES (CELL_LINES * ESMM_CELL_COLS * 2)
#define SLOTS 8    /* stages that the rings can have at a time */
#define COLUMN 128 /* columns of a warpgroup */
#define CELL_LINES 64
#define LINE_PIECES 8 /* of 16 bytes */
#define GATHERERS 7   /* warps that gather, beside the one that tells them what */
#define BATCH 32      /* cuts that it looks at together, one a lane */

static_assert(A_UNIT == 2 * GROUP_BYTES && ESMM_JOINT_CUT_BYTES == CUT / LINES * A_UNIT, "a unit is two groups");
static_assert(CUT / LINES == 8, "a line's places are 16 bytes");
static_assert(ESMM_JOINT_COLS == 2 * COLUMN && COLUMN == 2 * ESMM_CELL_COLS, "two warpgroups, two panels each");

/* ---- packing ---- */

typedef struct pack_shared {
  alignas(8) uint64_t full;
  uint32_t bits[4][4];              /* of the rows' quarters: alive k's */
  alignas(16) uint16_t list[CUT];   /* as params.h has it */
  alignas(16) char nowhere[8][512]; /* a warp's lines that are not alive */
} pack_shared;
static_assert(2 * ESMM_JOINT_CUT_BYTES + sizeof(pack_shared) <= ESMM_JOINT_PACK_SHARED, "params.h tells another size");

/* Which of 64 k's have a nonzero in 32 rows, the quarter-th of 128. at: line_reader of their first box. */
template <bool BY_K> static __device__ __forceinline__ uint2 look(uint32_t at, int quarter, uint32_t lane)
{
  uint32_t mine = 0; /* bit g: k 8g + lane / 4 in this lane's rows */
#pragma unroll
  for (int g = 0; g < 8; g++) {
    uint32_t r[4];
    read_lines<BY_K>(at, g, quarter, r);
    mine |= ((r[0] | r[1] | r[2] | r[3]) & 0x7fff7fffu) != 0 ? 1u << g : 0;
  }
  mine |= __shfl_xor_sync(~0u, mine, 1);
  mine |= __shfl_xor_sync(~0u, mine, 2);
  mine = __shfl_sync(~0u, mine, (int)(lane % 8 * 4)) >> lane / 8;
  return make_uint2(__ballot_sync(~0u, mine & 1), __ballot_sync(~0u, mine >> 4 & 1));
}

/* These k's of these rows to their lines, the first of which is `first`. */
template <bool BY_K>
static __device__ __forceinline__ void write_lines(uint32_t at, uint32_t out, uint32_t nowhere, uint2 alive,
                                                   uint32_t first, int quarter, uint32_t lane)
{
  const uint32_t q = lane % 8, piece = (uint32_t)quarter % 2 * 4 + lane / 8;
#pragma unroll
  for (int g = 0; g < 8; g++) {
    const uint32_t word = g < 4 ? alive.x : alive.y, bit = 1u << (g % 4 * 8) << q;
    if ((word >> (g % 4 * 8) & 0xffu) == 0)
      continue;
    const uint32_t line = first + (uint32_t)__popc(word & (bit - 1)) + (g < 4 ? 0 : (uint32_t)__popc(alive.x));
    const uint32_t to = out + line / 8 * GROUP_BYTES + (uint32_t)quarter / 2 * (GROUP_BYTES / 2) + line % 8 * 128 +
                        (piece ^ line % 8) * 16;
    uint32_t r[4];
    read_lines<BY_K>(at, g, quarter, r);
    sm90_stmatrix_at(word & bit ? to : nowhere + lane * 16, r);
  }
}

/* One thread: a cut of A, four boxes. */
static __device__ __forceinline__ void load_cut(const esmm_bsr16_joint_params &p, char *in, uint64_t *full, int row,
                                                int k)
{
  sm90_barrier_expect(full, ESMM_JOINT_CUT_BYTES);
#pragma unroll
  for (int i = 0; i < 4; i++) { /* 64 k's, 128 rows of them, in two boxes */
    const int at_k = k + i / 2 * 64, at_row = row + i % 2 * 64;
    sm90_tma_load(in + i * PANEL, &p.map_a, p.a_by_k ? at_row : at_k, p.a_by_k ? at_k : at_row, full);
  }
}

/* A block has a cut. Of its eight warps each has 64 of the k's by 32 of the rows. */
template <bool BY_K> static __device__ __forceinline__ void pack_cut(const esmm_bsr16_joint_params &p, char *memory)
{
  char *in = memory, *out = memory + ESMM_JOINT_CUT_BYTES;
  pack_shared *sh = (pack_shared *)(memory + 2 * ESMM_JOINT_CUT_BYTES);
  const int thread = (int)threadIdx.x, warp = thread / 32, chunk = warp / 4, quarter = warp % 4;
  const uint32_t lane = threadIdx.x % 32;
  const int64_t cut = blockIdx.x;
  if (thread < CUT / 8)
    ((uint4 *)sh->list)[thread] = make_uint4(0, 0, 0, 0);
  if (thread == 0) {
    sm90_barrier_init(&sh->full, 1);
    sm90_fence_init();
    load_cut(p, in, &sh->full, (int)(cut / p.cuts) * CUT, (int)(cut % p.cuts) * CUT);
  }
  __syncthreads();
  sm90_barrier_wait(&sh->full, 0);
  const uint32_t at = line_reader<BY_K>(sm90_address(in) + (uint32_t)(chunk * 2 * PANEL), lane);
  const uint2 mine = look<BY_K>(at, quarter, lane);
  if (lane == 0) {
    sh->bits[quarter][2 * chunk] = mine.x;
    sh->bits[quarter][2 * chunk + 1] = mine.y;
  }
  __syncthreads();
  uint32_t alive[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    alive[i] = sh->bits[0][i] | sh->bits[1][i] | sh->bits[2][i] | sh->bits[3][i];
  const uint32_t low = (uint32_t)(__popc(alive[0]) + __popc(alive[1]));
  const uint32_t count = low + (uint32_t)(__popc(alive[2]) + __popc(alive[3]));
  const uint32_t whole = (count + LINES - 1) / LINES * LINES;
  write_lines<BY_K>(at, sm90_address(out), sm90_address(sh->nowhere[warp]),
                    chunk ? make_uint2(alive[2], alive[3]) : make_uint2(alive[0], alive[1]), chunk ? low : 0, quarter,
                    lane);
  /* A group's lines are 256 bytes together, a half each. */
  for (uint32_t i = (uint32_t)thread; i < (whole - count) * 16; i += ESMM_JOINT_PACK_THREADS) {
    const uint32_t line = count + i / 16;
    sm90_store4(sm90_address(out) + line / 8 * GROUP_BYTES + i / 8 % 2 * (GROUP_BYTES / 2) + line % 8 * 128 +
                    i % 8 * 16,
                make_uint4(0, 0, 0, 0));
  }
  uint32_t line = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) /* a warp has 32 k's */
    if (i < warp)
      line += (uint32_t)__popc(alive[i]);
    else if (i == warp && alive[i] >> lane & 1) {
      line += (uint32_t)__popc(alive[i] & ((1u << lane) - 1));
      sh->list[line / LINES * LINES + line % 4 * 4 + line % LINES / 4] =
          (uint16_t)((thread + thread / 64 * 64) * LINE_PIECES);
    }
  sm90_fence_async();
  __syncthreads();
  if (thread == 0 && whole > 0) {
    sm90_bulk_store((char *)p.packed + cut * ESMM_JOINT_CUT_BYTES, out, whole * (CUT * 2));
    sm90_bulk_commit();
  }
  if (thread < CUT / 8)
    ((uint4 *)p.lists)[cut * (CUT / 8) + thread] = ((const uint4 *)sh->list)[thread];
  if (thread == 32)
    ((uint32_t *)p.counts)[cut] = count;
  if (thread == 0)
    sm90_bulk_wait_read(); /* a block that ends takes its shared memory along */
}

extern "C" __global__ void __launch_bounds__(ESMM_JOINT_PACK_THREADS, 3)
    esmm_bsr16_joint_pack(const __grid_constant__ esmm_bsr16_joint_params p)
{
  extern __shared__ __align__(1024) char memory[];
  if (not_selected(p.selector))
    return;
  if (p.a_by_k)
    pack_cut<true>(p, memory);
  else
    pack_cut<false>(p, memory);
}

/* ---- what a block multiplies ---- */

/* What consumers are told of a stage: its units, where A's and B's begin, which warpgroups have cells, whether it ends
   its tile and has none, whether there are no more. */
enum { TOLD_UNITS = 15, TOLD_A = 4, TOLD_B = 9, TOLD_GROUPS = 14, TOLD_LAST = 1 << 16, TOLD_END = 1 << 17 };
enum { TOLD_LIST = 18, TOLD_TURN = 24 }; /* who gathers also: where its list is, whose turn its first unit is */

typedef struct joint_shared {
  uint64_t full[SLOTS], empty[SLOTS];
  uint64_t known[SLOTS]; /* what is to be gathered; */
  uint64_t listed[2];    /* lists of a batch are there */
  uint32_t told[SLOTS];
  alignas(8) int2 tile[SLOTS];     /* with TOLD_LAST: row, column; else -, the block's first panel */
  alignas(16) uint4 gather[SLOTS]; /* for who gathers: joint_cut, and which of the strip's cuts */
  alignas(16) uint16_t lists[2][BATCH][CUT];
  /* Each warpgroup's own, on the way to C. */
  union {
    alignas(1024) char boxes[2][PANEL]; /* that TMA writes, by turns; */
    float spare[4][512];                /* or 2 KiB for each of its warps */
  } own[2];
} joint_shared;
static_assert(A_UNITS * A_UNIT + B_UNITS * B_UNIT + sizeof(joint_shared) <= ESMM_JOINT_SHARED,
              "params.h tells another size");
static_assert(A_UNITS <= 31 && B_UNITS <= 31, "five bits");

/* The memory of all stages: A's lines, then B's. */
typedef struct joint_memory {
  char *a, *b;
  joint_shared *sh;
} joint_memory;

/* Strips come in groups, column by column. */
static __device__ __forceinline__ int2 tile_at(const esmm_bsr16_joint_params &p, int index)
{
  const int in_group = p.group * p.tiles, group = index / in_group, place = index % in_group;
  const int height = min(p.group, p.strips - group * p.group);
  return make_int2(group * p.group + place % height, place / height);
}

/* ---- rings and cuts ---- */

/*
 * The rings of A's and B's units, as the warp that tells follows them. What a stage has of one follows each other:
 * where there are too few units up to the ring's end, they are left out.
 */
typedef struct joint_ring {
  uint32_t a, a_used, b, b_used; /* the next stage's first unit; units that are not free */
  uint32_t sizes;                /* lane i's: A's and << 16 B's of slot i, with units before them that were left out */
  uint32_t begun, ended;         /* stages so far: those that were told, those whose units are free again */
  uint32_t turn;                 /* who gathers the next unit */
  uint32_t batches;              /* of cuts, so far; */
  uint32_t before_last, before;  /* stages up to the end of the last but one, and of the last */
} joint_ring;

static __device__ __forceinline__ void ring_free(joint_shared *sh, joint_ring &r)
{
  const uint32_t oldest = r.ended % SLOTS, sizes = __shfl_sync(~0u, r.sizes, (int)oldest);
  sm90_barrier_wait(&sh->empty[oldest], r.ended / SLOTS & 1);
  r.a_used -= sizes & 0xffffu;
  r.b_used -= sizes >> 16;
  r.ended++;
}

/* Waits until a stage of so many units can be loaded, at ring.a and ring.b; returns its slot. */
static __device__ __forceinline__ uint32_t ring_wait(joint_shared *sh, joint_ring &r, uint32_t a, uint32_t b)
{
  const uint32_t slot = r.begun % SLOTS;
  for (;;) {
    r.a = r.a_used ? r.a : 0; /* an empty ring begins anew, or a long stage would never fit */
    r.b = r.b_used ? r.b : 0;
    const bool a_over = r.a + a > A_UNITS, b_over = r.b + b > B_UNITS;
    const uint32_t a_size = a + (a_over ? A_UNITS - r.a : 0), b_size = b + (b_over ? B_UNITS - r.b : 0);
    if (r.a_used + a_size <= A_UNITS && r.b_used + b_size <= B_UNITS && r.begun - r.ended < SLOTS) {
      r.a = a_over ? 0 : r.a;
      r.b = b_over ? 0 : r.b;
      r.a_used += a_size;
      r.b_used += b_size;
      if (threadIdx.x == slot)
        r.sizes = a_size | b_size << 16;
      return slot;
    }
    ring_free(sh, r);
  }
}

/* Behind the stage. */
static __device__ __forceinline__ void ring_on(joint_ring &r, uint32_t a, uint32_t b)
{
  r.a += a;
  r.b += b;
  r.turn = (r.turn + b) % GATHERERS;
  r.begun++;
}

/* A lane's cut: which columns have a cell there, whether all cells of those columns are there, behind each other; how
   many k's are alive. 0: it is not needed. */
enum { CUT_COLUMNS = 3, CUT_BLOCKS = 4, CUT_COUNT = 16 };
typedef struct joint_cut {
  uint32_t what;
  uint32_t cell[2]; /* of each column the first, where it has all */
} joint_cut;

static __device__ __forceinline__ uint32_t place_of(const esmm_bsr16_joint_params &p, int panel, int chunk)
{
  return panel < p.panels && chunk < p.chunks ? __ldg((const uint32_t *)p.places + (int64_t)panel * p.chunks + chunk)
                                              : ESMM_NO_CELL;
}

/* panel: the block's first. */
static __device__ __forceinline__ joint_cut cut_at(const esmm_bsr16_joint_params &p, int strip, int panel, int cut)
{
  joint_cut c = {};
  if (cut >= p.cuts)
    return c;
  const uint32_t count = __ldcg((const uint32_t *)p.counts + (int64_t)strip * p.cuts + cut);
  bool blocks = true;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t cells = 0;
    bool all = true, any = false;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t cell = place_of(p, panel + 2 * i + j % 2, 2 * cut + j / 2);
      if (j == 0)
        c.cell[i] = cells = cell;
      any |= cell != ESMM_NO_CELL;
      all &= cell != ESMM_NO_CELL && cell == cells + (uint32_t)j;
    }
    blocks &= all | !any;
    c.what |= (uint32_t)any << i;
  }
  c.what = c.what && count > 0 ? c.what | count << CUT_COUNT | (blocks ? CUT_BLOCKS : 0) : 0;
  return c;
}

/* ---- loading: one warp that tells ---- */

/* A batch of cuts, and their lists on the way to where those of the last but one are, which ended with stage `until`.
   panel: the block's first. */
static __device__ __forceinline__ joint_cut look_at(const esmm_bsr16_joint_params &p, joint_shared *sh, joint_ring &r,
                                                    int strip, int panel, int base, uint32_t until)
{
  const int lane = (int)threadIdx.x, half = (int)(r.batches % 2);
  const joint_cut mine = cut_at(p, strip, panel, base + lane);
  const int needed = __popc(__ballot_sync(~0u, mine.what != 0));
  while ((int32_t)(until - r.ended) > 0) /* somebody may still read them */
    ring_free(sh, r);
  if (lane == 0)
    sm90_barrier_expect(&sh->listed[half], (uint32_t)(needed * (int)sizeof sh->lists[0][0]));
  __syncwarp();
  if (mine.what)
    sm90_bulk_load(sh->lists[half][lane], (const uint16_t *)p.lists + ((int64_t)strip * p.cuts + base + lane) * CUT,
                   sizeof sh->lists[0][0], &sh->listed[half]);
  return mine;
}

/* The stages of a tile. */
static __device__ __forceinline__ void tell_tile(const esmm_bsr16_joint_params &p, const joint_memory &memory,
                                                 joint_ring &r, int strip, int panel)
{
  joint_shared *sh = memory.sh;
  const int lane = (int)threadIdx.x;
  joint_cut then = look_at(p, sh, r, strip, panel, 0, r.before_last);
  for (int base = 0; base < p.cuts; base += BATCH) {
    const joint_cut mine = then;
    const uint32_t half = r.batches % 2, parity = r.batches / 2 & 1;
    r.batches++;
    if (base + BATCH < p.cuts)
      then = look_at(p, sh, r, strip, panel, base + BATCH, r.before);
    sm90_barrier_wait(&sh->listed[half], parity);
    for (uint32_t left = __ballot_sync(~0u, mine.what != 0); left; left &= left - 1) {
      const int from = __ffs((int)left) - 1;
      const uint32_t what = __shfl_sync(~0u, mine.what, from), columns = what & CUT_COLUMNS;
      const uint32_t units = ((what >> CUT_COUNT) + LINES - 1) / LINES, b_units = units * (columns - columns / 2);
      const uint32_t slot = ring_wait(sh, r, units, b_units);
      if (lane == from) {
        uint64_t *full = &sh->full[slot];
        sh->told[slot] = units | r.a << TOLD_A | r.b << TOLD_B | columns << TOLD_GROUPS |
                         (half * BATCH + (uint32_t)from) << TOLD_LIST | r.turn << TOLD_TURN;
        sh->gather[slot] = make_uint4(what, mine.cell[0], mine.cell[1], (uint32_t)(base + from));
        sh->tile[slot].y = panel;
        sm90_barrier_arrive(&sh->known[slot]);
        sm90_barrier_expect(full, units * A_UNIT);
        sm90_bulk_load(memory.a + r.a * A_UNIT,
                       (const char *)p.packed + ((int64_t)strip * p.cuts + base + from) * ESMM_JOINT_CUT_BYTES,
                       units * A_UNIT, full);
      }
      ring_on(r, units, b_units);
    }
    r.before_last = r.before;
    r.before = r.begun;
  }
}

/* A stage without lines: what ends a tile, or all of them. */
static __device__ __forceinline__ void tell_word(joint_shared *sh, joint_ring &r, uint32_t what, int row, int col)
{
  const uint32_t slot = ring_wait(sh, r, 0, 0);
  if (threadIdx.x == 0) {
    sh->told[slot] = what;
    sh->tile[slot] = make_int2(row, col);
    sm90_barrier_arrive(&sh->known[slot]);
    sm90_barrier_arrive(&sh->full[slot]);
  }
  ring_on(r, 0, 0);
}

/* The first tile is the block's own; it asks for the next while one is loaded. Every tile that is begun asks once; who
   is the last of all leaves the counter ready for the next launch. */
static __device__ __forceinline__ void tell(const esmm_bsr16_joint_params &p, const joint_memory &memory)
{
  joint_ring ring = {};
  for (int index = (int)blockIdx.x; index < p.strips * p.tiles;) {
    const int2 tile = tile_at(p, index);
    const uint32_t ticket = threadIdx.x == 0 ? atomicAdd((uint32_t *)p.asked, 1) : 0;
    tell_tile(p, memory, ring, tile.x, tile.y * (ESMM_JOINT_COLS / ESMM_CELL_COLS));
    tell_word(memory.sh, ring, TOLD_LAST, tile.x * CUT, tile.y * ESMM_JOINT_COLS);
    if (threadIdx.x == 0 && (int)ticket == p.strips * p.tiles - 1)
      *(uint32_t *)p.asked = 0;
    index = (int)gridDim.x + (int)__shfl_sync(~0u, ticket, 0);
  }
  tell_word(memory.sh, ring, TOLD_END, 0, 0);
}

/* ---- loading: warps that gather ---- */

/* 16 bytes, or zeros. */
static __device__ __forceinline__ void gather(uint32_t to, uint64_t from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* The barrier learns when this lane's have come. */
static __device__ __forceinline__ void gathered(uint64_t *b)
{
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sm90_address(b)) : "memory");
}

/*
 * A unit of a column, by a warp: a gather is four lines of a panel. Lane i has 16 bytes of lines i / 8, 4 + i / 8 and
 * so on, whose places in a cut's four cells are `places`; those from `lines` on are zeros. from: of the first cell,
 * swizzled as the lane's first line is: 4 lines further, bit 6 is another.
 */
static __device__ __forceinline__ void gather_unit(uint32_t to, uint64_t from, uint2 places, int lines)
{
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint32_t two = j < 2 ? places.x : places.y, place = j % 2 ? two >> 16 : two & 0xffffu;
    const uint64_t at = (from ^ (uint64_t)(j % 2 * 64)) + (uint64_t)place * 16;
    gather(to + j * 512, at, 4 * j < lines);
    gather(to + j * 512 + B_PANEL, at + CELL_BYTES, 4 * j < lines);
  }
}

/* The same for any cells: those that are not there are zeros. from: of all cells; panel: the column's first. */
static __device__ __forceinline__ void gather_any(const esmm_bsr16_joint_params &p, uint32_t to, uint64_t from,
                                                  uint2 places, int lines, int panel, int cut)
{
#pragma unroll 1
  for (int j = 0; j < 8; j++) {
    const uint32_t two = j < 4 ? places.x : places.y, place = j / 2 % 2 ? two >> 16 : two & 0xffffu;
    const uint32_t cell = place_of(p, panel + j % 2, 2 * cut + (int)(place / (2 * CELL_LINES * LINE_PIECES)));
    const bool there = j / 2 * 4 < lines && cell != ESMM_NO_CELL;
    const uint64_t at = (from ^ (uint64_t)(j / 2 % 2 * 64)) + place % (2 * CELL_LINES * LINE_PIECES) * 16;
    gather(to + (uint32_t)(j / 2 * 512 + j % 2 * B_PANEL), there ? at + (uint64_t)cell * CELL_BYTES : from, there);
  }
}

/* warp: which of those that gather. */
static __device__ __forceinline__ void feed(const esmm_bsr16_joint_params &p, const joint_memory &memory, uint32_t warp)
{
  joint_shared *sh = memory.sh;
  const uint32_t lane = threadIdx.x % 32, line = lane / 8;
  const uint32_t lists = sm90_address(sh->lists) + line * 8;
  const uint64_t from = p.cells + (uint64_t)(lane % 8 ^ line) * 16; /* cells are aligned to more than 128 bytes */
  for (uint32_t stage = 0;; stage++) {
    const uint32_t slot = stage % SLOTS;
    sm90_barrier_wait(&sh->known[slot], stage / SLOTS & 1);
    const uint32_t told = sh->told[slot], units = told & TOLD_UNITS;
    const bool first = told >> TOLD_GROUPS & 1, both = (told >> TOLD_GROUPS & 3) == 3;
    const uint32_t all = both ? 2 * units : units, turn = told >> TOLD_TURN;
#pragma unroll 1
    for (uint32_t i = warp >= turn ? warp - turn : warp + GATHERERS - turn; i < all; i += GATHERERS) {
      const uint4 cut = sh->gather[slot];
      const bool second = both ? i >= units : !first;
      const uint32_t unit = i >= units ? i - units : i;
      const uint32_t to = sm90_address(memory.b) + ((told >> TOLD_B & 31) + i) * B_UNIT + lane * 16;
      const uint2 places = sm90_load2(lists + (told >> TOLD_LIST & 63) * (CUT * 2) + unit * (LINES * 2));
      const int lines = (int)(cut.x >> CUT_COUNT) - (int)(unit * LINES + line);
      if (cut.x & CUT_BLOCKS)
        gather_unit(to, from + (uint64_t)(second ? cut.z : cut.y) * CELL_BYTES, places, lines);
      else
        gather_any(p, to, from, places, lines, sh->tile[slot].y + 2 * second, (int)cut.w);
    }
    gathered(&sh->full[slot]);
    if (told & TOLD_END)
      break;
  }
}

/* ---- multiplying ---- */

typedef struct joint_consumer {
  uint32_t full, empty, told; /* addresses of shared memory */
  uint64_t a, b;              /* views of the first unit */
  int lane, group;
  uint32_t stage;
} joint_consumer;

static __device__ __forceinline__ joint_consumer consumer_of(const joint_memory &memory)
{
  joint_consumer c;
  const joint_shared *sh = memory.sh;
  c.lane = (int)threadIdx.x % 32;
  c.group = group_now();
  c.full = sm90_address(sh->full);
  c.told = sm90_address(sh->told);
  c.empty = sm90_address(sh->empty);
  asm volatile("" : "+r"(c.full), "+r"(c.told), "+r"(c.empty)); /* they stay in registers */
  c.a = view_of(memory.a, 0, GROUP_BYTES, true);
  c.b = view_of(memory.b, B_PANEL, 1024, true);
  c.stage = 0;
  return c;
}

/* A stage's units may be used again. */
static __device__ __forceinline__ void let_go(const joint_consumer &c, uint32_t slot)
{
  if (c.lane == 0)
    sm90_barrier_arrive_here(c.empty + slot * 8);
}

/* Stages up to a tile's end; returns what was told of that, whose slot is *at. The rings are short of room, so a stage
   is let go of as soon as it is multiplied: meanwhile the other warpgroup has the tensor core. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ uint32_t multiply_tile(joint_consumer &c, float (&upper)[64], float (&lower)[64],
                                                         uint32_t &at)
{
#pragma unroll
  for (int j = 0; j < 64; j++)
    upper[j] = lower[j] = 0.0f;
  for (;;) {
    const uint32_t slot = c.stage % SLOTS;
    sm90_barrier_wait_at(c.full + slot * 8, c.stage / SLOTS & 1);
    const uint32_t what = __shfl_sync(~0u, sm90_load(c.told + slot * 4), 0), groups = what >> TOLD_GROUPS & 3;
    c.stage++;
    if (what & (TOLD_LAST | TOLD_END)) {
      at = slot;
      return what;
    }
    if (groups >> c.group & 1) {
      const uint32_t units = what & TOLD_UNITS;
      uint64_t a = c.a + (what >> TOLD_A & 31) * (A_UNIT >> 4);
      uint64_t b = c.b + ((what >> TOLD_B & 31) + (c.group && groups == 3 ? units : 0)) * (B_UNIT >> 4);
      sm90_fence_async(); /* B's lines were not written by TMA */
#pragma unroll 1
      for (uint32_t i = 0; i < units; i++, a += A_UNIT >> 4, b += B_UNIT >> 4) {
        sm90_wgmma_fence();
        wgmma16<DTYPE, 1>(upper, a, b);
        wgmma16<DTYPE, 1>(lower, a + (GROUP_BYTES / 2 >> 4), b);
        sm90_wgmma_commit();
      }
      sm90_wgmma_wait<0>();
    }
    let_go(c, slot);
  }
}

/* ---- the epilogue ---- */

/* A thread has, of 64 rows by 128 columns, sums[4j + 2h + e]: row 16 * warp + lane / 4 + 8h, column
   8j + lane % 4 * 2 + e. */

/* 64 rows by 64 columns; box: 0 to 3, by turns in two places. */
static __device__ __forceinline__ void store_box(const esmm_bsr16_joint_params &p, const float *sums, int row, int col,
                                                 char *to)
{
  const int thread = thread_now() - FEEDERS, group = thread / 128, warp = thread / 32 % 4;
  uint32_t pairs[4][4];
  float x[32];
#pragma unroll
  for (int i = 0; i < 32; i++)
    x[i] = sums[i];
  finish_values<in_fragments>(p.epilogue, x, col + thread % 4 * 2);
  pack_lines(p.epilogue.c.dtype, x, pairs);
  if (thread % 128 == 0)
    sm90_bulk_wait_read<1>(); /* what was in this box has left */
  meet_group(7 + group);
  store_lines(sm90_address(to) + (uint32_t)warp * 2048, pairs);
  sm90_fence_async();
  meet_group(7 + group);
  if (thread % 128 == 0) {
    sm90_tma_store(&p.map_c, col, row, to);
    sm90_bulk_commit();
  }
}

/* Any C: a warp's 16 rows, 32 columns a turn, through its own shared memory. The sums are lost. */
static __device__ __forceinline__ void store_rows(const esmm_bsr16_joint_params &p, float (&sums)[64], int row, int col,
                                                  float *spare)
{
  enum { LINE = 32 };
  const esmm_epilogue_params &e = p.epilogue;
  const int lane = thread_now() % 32;
#pragma unroll 1
  for (int g = 0; g < 64; g += 16, col += LINE) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      spare[(lane / 4 + i / 2 % 2 * 8) * LINE + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
#pragma unroll
    for (int i = 0; i + 16 < 64; i++)
      sums[i] = sums[i + 16];
    __syncwarp();
    if (has_vectors(e.c) && col + LINE <= p.n) {
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        const int r = i * 8 + lane / 4;
        const float4 *from = (const float4 *)(spare + r * LINE + lane % 4 * 8);
        const float4 low = from[0], high = from[1];
        float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (row + r < p.m)
          finish_8(e, row + r, col + lane % 4 * 8, x);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < 16; r++)
        if (row + r < p.m && col + lane < p.n)
          finish_element(e, row + r, col + lane, spare[r * LINE + lane]);
    }
    __syncwarp();
  }
}

/* What becomes of the sums. col: of the warpgroup's first. */
static __device__ __forceinline__ void finish_tile(const esmm_bsr16_joint_params &p, joint_shared *sh, int row, int col,
                                                   float (&upper)[64], float (&lower)[64])
{
  const int group = group_now(), warp = thread_now() / 32 % 4;
  char(*boxes)[PANEL] = sh->own[group].boxes;
  if (p.c_boxes && col + COLUMN <= p.n) {
    store_box(p, upper, row, col, boxes[0]);
    store_box(p, upper + 32, row, col + 64, boxes[1]);
    store_box(p, lower, row + 64, col, boxes[0]);
    store_box(p, lower + 32, row + 64, col + 64, boxes[1]);
    return;
  }
  if (p.c_boxes) { /* boxes of the tile before may not have left yet */
    if ((thread_now() - FEEDERS) % 128 == 0)
      sm90_bulk_wait_read();
    meet_group(7 + group);
  }
  if (col < p.n) {
    store_rows(p, upper, row + warp * 16, col, sh->own[group].spare[warp]);
    store_rows(p, lower, row + 64 + warp * 16, col, sh->own[group].spare[warp]);
  }
  if (p.c_boxes)
    meet_group(7 + group); /* all warps have left the spare memory before it is a box again */
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply(const esmm_bsr16_joint_params &p, const joint_memory &memory)
{
  joint_shared *sh = memory.sh;
  joint_consumer c = consumer_of(memory);
  for (;;) {
    float upper[64], lower[64];
    uint32_t at;
    const uint32_t what = multiply_tile<DTYPE>(c, upper, lower, at);
    int2 tile = sh->tile[at];
    tile.x = __shfl_sync(~0u, tile.x, 0);
    tile.y = __shfl_sync(~0u, tile.y, 0);
    let_go(c, at);
    if (what & TOLD_END)
      break;
    finish_tile(p, sh, tile.x, tile.y + c.group * COLUMN, upper, lower);
  }
  if ((thread_now() - FEEDERS) % 128 == 0)
    sm90_bulk_wait_read(); /* a block that ends takes its shared memory along */
}

/* ---- the kernels ---- */

/* What the host is to know of A, by one warp: the density of strips; their joint with B as if both were independent. */
static __device__ __forceinline__ void report_strips(const esmm_bsr16_joint_params &p, int lane)
{
  uint64_t alive = 0;
  for (int64_t i = lane; i < (int64_t)p.strips * p.cuts; i += 32)
    alive += ((const uint32_t *)p.counts)[i];
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    alive += __shfl_xor_sync(~0u, alive, d);
  esmm_choice_device seen = {};
  seen.chosen = 1;
  seen.strip = (float)((double)alive / ((double)p.strips * (double)p.k));
  seen.joint = seen.strip * p.b_density;
  if (lane == 0)
    report_choice(p.report, seen);
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void joint_main(const esmm_bsr16_joint_params &p)
{
  extern __shared__ __align__(1024) char ring[]; /* there is no other shared memory, so it starts as it says */
  const joint_memory memory = {ring, ring + A_UNITS * A_UNIT,
                               (joint_shared *)(ring + A_UNITS * A_UNIT + B_UNITS * B_UNIT)};
  joint_shared *sh = memory.sh;
  if (threadIdx.x == 0) {
    if (p.c_boxes)
      sm90_prefetch_map(&p.map_c);
    for (int i = 0; i < SLOTS; i++) { /* who tells, and all who gather; eight warps let go of a stage */
      sm90_barrier_init(&sh->full[i], 1 + GATHERERS * 32);
      sm90_barrier_init(&sh->known[i], 1);
      sm90_barrier_init(&sh->empty[i], 8);
    }
    sm90_barrier_init(&sh->listed[0], 1);
    sm90_barrier_init(&sh->listed[1], 1);
    sm90_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < FEEDERS || threadIdx.x >= FEEDERS + WORKERS) {
    sm90_registers_down<80>();
    if (threadIdx.x < 32)
      tell(p, memory);
    else
      feed(p, memory, threadIdx.x / 32 - (threadIdx.x < FEEDERS ? 1 : 1 + WORKERS / 32));
    if (p.report && blockIdx.x == 0 && threadIdx.x < 32)
      report_strips(p, (int)threadIdx.x);
  } else {
    sm90_registers_up<176>();
    multiply<DTYPE>(p, memory);
  }
}

extern "C" __global__ void __launch_bounds__(ESMM_JOINT_THREADS, 1)
    esmm_bsr16_joint_bf16(const __grid_constant__ esmm_bsr16_joint_params p)
{
  if (!not_selected(p.selector))
    joint_main<ESMM_BF16>(p);
}

extern "C" __global__ void __launch_bounds__(ESMM_JOINT_THREADS, 1)
    esmm_bsr16_joint_f16(const __grid_constant__ esmm_bsr16_joint_params p)
{
  if (!not_selected(p.selector))
    joint_main<ESMM_F16>(p);
}
