/*
 * k_fine16_sm90a.cu: bf16 and fp16, A very sparse (0.1 to 2 % nonzeros, anywhere), on Hopper.
 *
 * Where zeros lie anywhere, only short strips have dead k's: at 1 % nonzeros 72 % of k's are alive in 128 rows, 15 % in
 * 16, 7.7 % in 8. Strips of 8 rows are what mma.sync has in its side of 8, so C is computed transposed: 16 columns by 8
 * rows of C an instruction, 16 k's deep. B's lines are gathered from shared memory by ldmatrix, which takes any eight
 * lines; the values of A come from memory straight into registers.
 *
 * Shared memory bounds it: a k of a strip costs 128 bytes, one wavefront, for every 64 columns, whatever else is done.
 * Two things cost more wavefronts in the straightforward form of this. Eight lines that ldmatrix reads at once have to
 * lie in different banks, which is where k modulo 8 differs; and lists that end with each chunk of B's lines leave
 * steps that are not full. Sorting each chunk's list leaves 1.7 times the wavefronts at 1 % and 2 times at 0.5 %.
 *
 * So a slot of a step belongs to a class: slot i takes k's with k % 8 = i % 8, and no step ever has a conflict. And
 * steps do not end with chunks: the product keeps the lines of AHEAD chunks, 1024 k's, and a class that has run out of
 * k's in one chunk goes on in the next. A schedule (pack.cuh) makes sure that a step's lines are there. Slots left
 * empty, zeros anywhere: 39 % at 0.25 %, 25 % at 0.5 %, 14 % at 1 %, 9 % at 2 %. Empty slots read a line of zeros.
 *
 * A step is 16 slots of a strip: 256 bytes of values, in the order of mma's fragments, and 16 words that say where the
 * line is in shared memory, which of four strips it is of, and whether a chunk begins. A group is 32 rows of A, four
 * strips: what a warp multiplies, all of its steps in one list, chunk by chunk. A block has 16 groups, 512 rows, by 64
 * columns, and is persistent. B comes by TMA in six stages of 256 k's; the last warp that is done with a chunk loads
 * the next.
 *
 * Wavefronts a step and 64 columns: 16 of ldmatrix, 2 of values, a quarter of places. At (m, k, n) = (4096, 14336,
 * 4096), zeros anywhere, in thousands of cycles a multiprocessor, one wavefront a cycle; B's way into shared memory is
 * 56 of them; mma at one a cycle; issue at 24 instructions a step; bytes from the second-level cache:
 *
 *   nonzeros   steps    ldmatrix   lists   with B   mma   issue   bytes             floors, ms: shared memory, cache
 *   0.25 %     14.9 k   116        16      188      29    43      0.94 + 0.27 GB    0.11   0.14
 *   0.5 %      24.0 k   186        26      268      47    70      0.94 + 0.44 GB    0.15   0.16
 *   1 %        41.4 k   321        45      422      80    120     0.94 + 0.76 GB    0.24   0.20
 *   2 %        75.1 k   583        82      721      146   219     0.94 + 1.38 GB    0.41   0.27
 *
 * at 1.75 GHz and 8.5 TB/s. Why not strips of 16: as many wavefronts (fewer k's, but twice the values), twice the mma
 * and the bytes of values; where rows of A resemble each other they would have up to a third less. Why not 128 columns
 * and 256 rows: half the lists' wavefronts, but B's lines twice, and half as many k's at once to fill steps from.
 *
 * Registers: 64 sums, 16 of values, 4 of places, 16 of B, of the 128 that 512 threads can have.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/fine16/pack.cuh"

#include <stddef.h>

#define COLS ESMM_FINE16_COLS
#define GROUPS (ESMM_FINE16_BLOCK_ROWS / ESMM_FINE16_ROWS) /* of a block: a warp each */
#define STAGE (CHUNK * COLS * 2)
#define PREFETCHED 8 /* steps with values on their way to registers */
#define FOURS 2      /* the same of places, four steps each */
#define BODY 8       /* steps of a loop's body: registers have fixed numbers */
#define QUARTERS 4   /* of 16 columns */
#define STAGED_COLS 32
#define STAGED_LD 36 /* floats of a row: rows of four lanes lie in different banks */
#define STAGING (8 * STAGED_LD * 4)

typedef struct fine_memory {
  char lines[STAGES * STAGE]; /* [chunk % STAGES][k][64 columns], swizzled */
  char blank[CLASSES * 128];  /* lines of zeros, as the place BLANK has them */
  char staging[GROUPS][STAGING];
  uint64_t full[STAGES];
  uint32_t gone[STAGES]; /* how often a warp was done with the stage */
} fine_memory;
static_assert(sizeof(fine_memory) <= ESMM_FINE16_SHARED, "params.h gives the host another size");
static_assert(BODY % PREFETCHED == 0 && BODY % (4 * FOURS) == 0 && PREFETCHED <= ESMM_FINE16_PAST &&
                  4 * FOURS + 4 <= ESMM_FINE16_PAST,
              "what is read past a list's end has room");
static_assert(COLS == 64 && ESMM_FINE16_THREADS == 32 * GROUPS && STAGING % 16 == 0 && 8 * COLS * 2 <= STAGING,
              "a line is 128 bytes, a group has a warp");

/* ---- instructions ---- */

/* sums += 16 columns of B by 16 slots, times 16 slots by 8 rows of A. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_add(float *sums, const uint32_t (&b)[4], uint2 a)
{
  if (DTYPE == ESMM_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(a.x), "r"(a.y));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(a.x), "r"(a.y));
}

static __device__ __forceinline__ uint2 load_listed(const uint2 *from)
{
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}

/* ---- how C is cut ---- */

typedef struct unit {
  int rows, tile; /* 512 rows of A, 64 columns of B */
} unit;

/* p.together blocks of rows come together, column by column: their steps stay in the second-level cache. */
static __device__ __forceinline__ unit unit_at(const esmm_fine16_params &p, int index)
{
  const int together = p.together * p.tiles, set = index / together, place = index - set * together;
  const int height = min(p.together, p.row_blocks - set * p.together);
  const unit u = {set * p.together + place % height, place / height};
  return u;
}

/*
 * Chunk c of every unit lies in stage c % STAGES, as its places say: a unit begins at stage 0 again. So stages are not
 * used equally often, and each has its own phase: bit i of `flips` is that of stage i when a unit begins.
 */
static __device__ __forceinline__ uint32_t flips_of_unit(int chunks)
{
  const uint32_t rest = (1u << chunks % STAGES) - 1, all = (1u << STAGES) - 1;
  return chunks / STAGES % 2 ? all & ~rest : rest;
}

/* ---- the chunks of a unit, as they come and go ---- */

/* The columns of B that a unit has, and those of the block's next one; -1: there is none. */
typedef struct columns {
  int now, next;
} columns;

/* One thread brings a chunk. */
static __device__ __forceinline__ void load_chunk(const esmm_fine16_params &p, fine_memory &s, int col, int chunk)
{
  const int stage = chunk % STAGES;
  sm90_barrier_expect(&s.full[stage], STAGE);
  sm90_tma_load(s.lines + stage * STAGE, &p.map_b, col, chunk * CHUNK, &s.full[stage]);
}

static __device__ __forceinline__ void wait_for(fine_memory &s, int chunk, uint32_t flips)
{
  const int stage = chunk % STAGES;
  sm90_barrier_wait(&s.full[stage], ((uint32_t)(chunk / STAGES) ^ flips >> stage) & 1);
}

/* A warp is done with a chunk. The last warp loads the next one into the same stage: a loading warp would take
   registers from the others. */
static __device__ __forceinline__ void let_go(const esmm_fine16_params &p, fine_memory &s, columns of, int chunk)
{
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const int stage = chunk % STAGES;
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(sm90_address(&s.gone[stage]))
                 : "memory");
    if (before % GROUPS == GROUPS - 1) {
      const bool same = chunk + STAGES < p.chunks;
      if (same || of.next >= 0)
        load_chunk(p, s, same ? of.now : of.next, same ? chunk + STAGES : stage);
    }
  }
  __syncwarp();
}

/* The steps of a chunk begin; those of the one before are over. The first AHEAD - 1 chunks of a unit were waited for.
 */
static __device__ __forceinline__ void begin_chunk(const esmm_fine16_params &p, fine_memory &s, columns of, int chunk,
                                                   uint32_t flips)
{
  if (chunk > 0)
    let_go(p, s, of, chunk - 1);
  if (chunk + AHEAD - 1 < p.chunks)
    wait_for(s, chunk + AHEAD - 1, flips);
}

/* ---- the steps of a group ---- */

/* sums[quarter][4 * strip + 2h + e]: column 16 * quarter + lane / 4 + 8h, row 8 * strip + lane % 4 * 2 + e. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_group(const esmm_fine16_params &p, fine_memory &s, columns of,
                                                      int64_t group, uint32_t flips, int lane,
                                                      float (&sums)[QUARTERS][4 * STRIPS])
{
  const int slot = lane % 8 + lane / 16 * 8;
  const int64_t base = group * p.chunks * ESMM_FINE16_STEPS;
  const uint2 *values = (const uint2 *)p.values + base * 32 + lane;
  const uint2 *places = (const uint2 *)p.places + base / 4 * SLOTS + slot; /* of four steps */
  const int steps = (int)((const uint2 *)p.counts)[group].x;
  /* This lane's line of every eight, and which 16 bytes of it: columns 0 to 7 of a quarter, or 8 to 15. */
  const uint32_t line = sm90_address(s.lines) + (uint32_t)(lane % 8 * 128 + ((lane / 8 % 2 ^ lane % 8) << 4));
  int chunk = 0;
  uint2 a[PREFETCHED], fours[FOURS]; /* values; places of four steps */
#pragma unroll
  for (int i = 0; i < PREFETCHED; i++) /* past the last step too: there is room, and it is not used */
    a[i] = load_listed(values + i * 32);
#pragma unroll
  for (int i = 0; i < FOURS; i++)
    fours[i] = load_listed(places + i * SLOTS);
#pragma unroll 1
  for (int c = 0; c < min(AHEAD - 1, p.chunks); c++)
    wait_for(s, c, flips);
#pragma unroll 1
  for (int first = 0; first < steps; first += BODY, values += BODY * 32, places += BODY / 4 * SLOTS)
#pragma unroll
    for (int i = 0; i < BODY; i++) {
      if (first + i >= steps)
        break;
      const uint2 four = fours[i / 4 % FOURS];
      const uint32_t at = (i % 4 < 2 ? four.x : four.y) >> i % 2 * 16;
      if (__any_sync(~0u, at & FIRST_BIT))
        begin_chunk(p, s, of, chunk++, flips);
      const uint32_t from = line + (at & 255u) * (CLASSES * 128);
      uint32_t b[QUARTERS][4];
#pragma unroll
      for (int q = 0; q < QUARTERS; q++)
        sm90_ldmatrix_trans_at(from ^ (uint32_t)(q * 32), b[q]);
      const bool low = __any_sync(~0u, at & 1u << STRIP_SHIFT), high = __any_sync(~0u, at & 2u << STRIP_SHIFT);
      const auto add = [&](int strip) {
#pragma unroll
        for (int q = 0; q < QUARTERS; q++)
          multiply_add<DTYPE>(&sums[q][4 * strip], b[q], a[i % PREFETCHED]);
      };
      if (high) {
        if (low)
          add(3);
        else
          add(2);
      } else {
        if (low)
          add(1);
        else
          add(0);
      }
      a[i % PREFETCHED] = load_listed(values + (i + PREFETCHED) * 32);
      if (i % 4 == 3)
        fours[i / 4 % FOURS] = load_listed(places + (i / 4 + FOURS) * SLOTS);
    }
}

/* ---- what becomes of the sums ---- */

/* 16-bit C in lines of 16 bytes, all columns inside, and nothing but finish_values: eight rows at a time are turned in
   shared memory. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void store_turned(const esmm_fine16_params &p, const float (&sums)[QUARTERS][16],
                                                    int row0, int col0, uint32_t staging, int lane)
{
  const esmm_device_matrix &c = p.epilogue.c;
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
    for (int q = 0; q < QUARTERS; q += 2) { /* matrices of 8 rows by columns 0-7, 8-15, 16-23, 24-31 */
      const float *x = &sums[q][4 * strip], *y = &sums[q + 1][4 * strip];
      const uint32_t pairs[4] = {pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[2], x[3]), pair_of<DTYPE>(y[0], y[1]),
                                 pair_of<DTYPE>(y[2], y[3])};
      sm90_stmatrix_trans_at(staging + (uint32_t)(lane % 8 * 128 + ((2 * q + lane / 8) ^ lane % 8) * 16), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = i * 4 + lane / 8, row = row0 + strip * 8 + r;
      const uint4 words = sm90_load4(staging + (uint32_t)(r * 128 + (lane % 8 ^ r) * 16));
      if (row < p.m)
        *(uint4 *)((uint16_t *)c.data + row * c.ld + col0 + lane % 8 * 8) = words;
    }
    __syncwarp();
  }
}

/* Any C and epilogue: fp32 sums of eight rows and 32 columns at a time. A call, with the sums in memory: inlined, it
   would take registers from the code above. */
static __device__ __noinline__ void store_any(const esmm_fine16_params &p, const float (&sums)[QUARTERS][16], int row0,
                                              int col0, float *staging, int lane)
{
  const bool vectors = has_vectors(p.epilogue.c);
  const int r = lane / 4;
  float *to = staging + lane % 4 * 2 * STAGED_LD + lane / 4;
  const float *from = staging + r * STAGED_LD + lane % 4 * 8;
#pragma unroll 1
  for (int piece = 0; piece < 2 * STRIPS; piece++) {
    const int strip = piece / 2, half = piece % 2;
    const int row = row0 + strip * 8 + r, col = col0 + half * STAGED_COLS + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; i++)
      to[i % 2 * STAGED_LD + i / 4 * 16 + i / 2 % 2 * 8] = sums[2 * half + i / 4][4 * strip + i % 4];
    __syncwarp();
    if (row < p.m && vectors && col + 8 <= p.n) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        x[i] = from[i];
      finish_8(p.epilogue, row, col, x);
    } else if (row < p.m) {
#pragma unroll 1
      for (int i = 0; i < 8 && col + i < p.n; i++)
        finish_element(p.epilogue, row, col + i, from[i]);
    }
    __syncwarp();
  }
}

static __device__ __forceinline__ void store(const esmm_fine16_params &p, float (&sums)[QUARTERS][16], int row0,
                                             int col0, char *staging, int lane)
{
  if (!p.registers || col0 + COLS > p.n) {
    float copy[QUARTERS][16]; /* else the sums themselves would lie in memory */
#pragma unroll
    for (int i = 0; i < QUARTERS * 16; i++)
      copy[i / 16][i % 16] = sums[i / 16][i % 16];
    store_any(p, copy, row0, col0, (float *)staging, lane);
    return;
  }
#pragma unroll
  for (int q = 0; q < QUARTERS; q++)
    finish_values<in_columns>(p.epilogue, sums[q], col0 + 16 * q + lane / 4);
  if (p.epilogue.c.dtype == ESMM_BF16)
    store_turned<ESMM_BF16>(p, sums, row0, col0, sm90_address(staging), lane);
  else /* ESMM_F16 */
    store_turned<ESMM_F16>(p, sums, row0, col0, sm90_address(staging), lane);
}

/* ---- the kernels ---- */

/* One warp, for the host: A's strip density, which is also the joint one, as B is full. */
static __device__ __forceinline__ void report_strips(const esmm_fine16_params &p, int lane)
{
  uint64_t alive = 0;
  for (int i = lane; i < p.groups; i += 32)
    alive += ((const uint2 *)p.counts)[i].y;
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    alive += __shfl_xor_sync(~0u, alive, d);
  esmm_choice_device seen = {};
  seen.chosen = 1;
  seen.strip = seen.joint =
      (float)((double)alive / ((double)((p.m + ESMM_FINE16_STRIP - 1) / ESMM_FINE16_STRIP) * (double)p.k));
  if (lane == 0)
    report_choice(p.report, seen);
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_units(const esmm_fine16_params &p, fine_memory &s)
{
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const uint32_t change = flips_of_unit(p.chunks);
  uint32_t flips = 0;
  for (int i = (int)blockIdx.x; i < p.row_blocks * p.tiles; i += (int)gridDim.x, flips ^= change) {
    const unit u = unit_at(p, i);
    const int group = u.rows * GROUPS + warp, next = i + (int)gridDim.x;
    const columns of = {u.tile * COLS, next < p.row_blocks * p.tiles ? unit_at(p, next).tile * COLS : -1};
    if (group >= p.groups) { /* rows past A: the chunks go by */
      for (int c = 0; c < p.chunks; c++) {
        wait_for(s, c, flips);
        let_go(p, s, of, c);
      }
      continue;
    }
    float sums[QUARTERS][4 * STRIPS];
#pragma unroll
    for (int q = 0; q < QUARTERS; q++)
#pragma unroll
      for (int j = 0; j < 4 * STRIPS; j++)
        sums[q][j] = 0.0f;
    multiply_group<DTYPE>(p, s, of, group, flips, lane, sums);
    let_go(p, s, of, p.chunks - 1);
    store(p, sums, group * ESMM_FINE16_ROWS, u.tile * COLS, s.staging[warp], lane);
  }
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void multiply(const esmm_fine16_params &p)
{
  extern __shared__ __align__(1024) char memory[];
  fine_memory &s = *(fine_memory *)memory;
  if (not_selected(p.selector))
    return;
  if (threadIdx.x < sizeof s.blank / 4)
    ((uint32_t *)s.blank)[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      sm90_barrier_init(&s.full[i], 1);
      s.gone[i] = 0;
    }
    sm90_fence_init();
    sm90_prefetch_map(&p.map_b);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int c = 0; c < min(STAGES, p.chunks); c++)
      load_chunk(p, s, unit_at(p, (int)blockIdx.x).tile * COLS, c);
  __syncwarp();
  multiply_units<DTYPE>(p, s);
  if (p.report && blockIdx.x == 0 && threadIdx.x < 32)
    report_strips(p, (int)threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(ESMM_FINE16_PACK_THREADS, 1)
    esmm_fine16_pack(const __grid_constant__ esmm_fine16_pack_params p)
{
  pack_group(p);
}

#define FINE16(id, dtype)                                              \
  extern "C" __global__ void __launch_bounds__(ESMM_FINE16_THREADS, 1) \
      esmm_fine16_##id(const __grid_constant__ esmm_fine16_params p)   \
  {                                                                    \
    multiply<dtype>(p);                                                \
  }

FINE16(bf16, ESMM_BF16)
FINE16(f16, ESMM_F16)
