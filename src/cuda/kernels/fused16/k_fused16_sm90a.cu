/*
 * k_fused16_sm90a.cu: products of 16-bit operands with few or middling rows on Hopper: A is scanned and multiplied by
 * one block, in its shared memory. Nothing is packed for other blocks and no block waits for all others, on which
 * k_wgmma16_sm90a.cu spends most of a small product; instead every tile of columns scans A again.
 *
 *   A [m,k]   bf16 or fp16, either order; strips of 64 rows
 *   B [k,n]   the rows form of the weights
 *   C         tiles of 64 rows by 256 columns; up to 8 blocks, a cluster, share a tile's k's, or a block does several
 *             tiles of the same rows
 *
 * TMA brings A in boxes of 64 k's. Eight warps take these in turn; a warp finds the k's with a nonzero in the 64 rows
 * (-0 is a zero), gets the count so far from the box before, and appends its own to stages of 32: elements of A, and
 * rows of B, which it gathers. Four warps multiply stages as they fill up.
 *
 * Lines of A stay where they are put, and where there is room for all of them the next tile needs B's rows only.
 * Otherwise A is scanned again.
 *
 * At the end each block of a cluster adds up its share of the tile's columns, always in the order of the ranks. The
 * last stage is filled up with zeros in both operands, so that no Inf of either gets in.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/wgmma16/lines.cuh"

#define ROWS ESMM_FUSED16_ROWS
#define COLS ESMM_FUSED16_COLS
#define BOXES ESMM_FUSED16_BOXES
#define STAGE_K ESMM_FUSED16_STAGE_K
#define STAGES ESMM_FUSED16_STAGES
#define THREADS ESMM_FUSED16_THREADS
#define FINDERS 256 /* threads that find; the others multiply */
#define FIND_WARPS (FINDERS / 32)
#define MULTIPLIERS (THREADS - FINDERS)
#define BOX_K 64
#define BOX_BYTES WGMMA16_PANEL
#define LINE 128                 /* bytes of a k: 64 rows of A, or columns of a panel of B */
#define LINES (STAGES * STAGE_K) /* of B, in all stages */
#define LINES_A ESMM_FUSED16_LINES
#define STAGE_STEP (STAGE_K * LINE >> 4) /* in a view, from stage to stage */
#define STEPS (STAGE_K / 16)
#define SUMS 128 /* of a thread that multiplies: 64 rows by 256 columns over a warpgroup */
#define LAST 8   /* in a stage's word, with its steps: the tile's last */
#define STEPS_MASK 7
static_assert(MULTIPLIERS == 128, "a warpgroup");
static_assert(BOXES % FIND_WARPS == 0, "a warp loads again where it has looked");

struct block_memory {
  alignas(1024) char b[COLS / 64][LINES][LINE]; /* what is multiplied: rows of B in panels of 64 columns, */
  char a[LINES_A][LINE];                        /* and 64 rows of A */
  char boxes[BOXES][BOX_BYTES];                 /* of A */
  uint64_t come[BOXES], heard[BOXES];           /* a box has come; the count of alive k's before it is there, */
  uint32_t before[BOXES];                       /* that count */
  uint32_t listed[LINES_A];                     /* k's of the lines of A */
  uint32_t words[STAGES];                       /* steps of 16 k's, and whether it is the last */
  uint64_t full[STAGES], empty[STAGES];
  uint64_t read; /* finders have read all boxes of a tile */
};
static_assert(sizeof(block_memory) <= ESMM_FUSED16_SHARED, "params.h gives the host another size");

extern __shared__ __align__(1024) char shared[];

static __device__ __forceinline__ block_memory *memory(void)
{
  return (block_memory *)shared;
}

/* ---- eight warps find ---- */

/* One thread: box i, which begins at k. */
template <bool BY_K>
static __device__ __forceinline__ void load_box(const esmm_fused16_params &p, uint32_t i, int row, int k)
{
  uint64_t *come = &memory()->come[i % BOXES];
  sm90_barrier_expect(come, BOX_BYTES);
  sm90_tma_load(memory()->boxes[i % BOXES], &p.map_a, BY_K ? row : k, BY_K ? k : row, come);
}

/* A box in registers: lane (q, t) has k 8g + q of rows 8j + 2t and the next, for all g and j. */
struct found_lines {
  uint32_t x[8][8];
};

/* Alive k's of a box: bit 4q + g % 4 is k 8g + q, of g below 4 and from 4 on. */
struct found {
  uint32_t low, high;
};

template <bool BY_K> static __device__ __forceinline__ found look(uint32_t i, found_lines &lines)
{
  const uint32_t at = line_reader<BY_K>(sm90_address(memory()->boxes[i % BOXES]), threadIdx.x % 32);
  found alive = {0, 0};
#pragma unroll
  for (int g = 0; g < 8; g++) {
    uint32_t x[4], y[4];
    read_lines<BY_K>(at, g, 0, x);
    read_lines<BY_K>(at, g, 1, y);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      lines.x[g][j] = x[j];
      lines.x[g][4 + j] = y[j];
    }
  }
#pragma unroll
  for (int g = 0; g < 8; g++) {
    const uint32_t *x = lines.x[g], any = x[0] | x[1] | x[2] | x[3] | x[4] | x[5] | x[6] | x[7];
    uint32_t lanes = __ballot_sync(~0u, (any & 0x7fff7fffu) != 0);
    lanes |= lanes >> 1;
    lanes |= lanes >> 2;
    *(g < 4 ? &alive.low : &alive.high) |= (lanes & 0x11111111u) << g % 4;
  }
  return alive;
}

/* 16 bytes, or zeros. */
static __device__ __forceinline__ void gather(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* A warp's way through the stages. */
struct finder {
  uint32_t entered; /* stages that it may write, or has left: those before this one */
  uint32_t left;    /* stages that it has left */
  uint32_t base;    /* the tile's first stage */
};

/* Waits until stage x may be written. */
static __device__ __forceinline__ void enter(finder &f, uint32_t x)
{
#pragma unroll 1
  for (; f.entered <= x; f.entered++)
    sm90_barrier_wait(&memory()->empty[f.entered % STAGES], (f.entered / STAGES & 1) ^ 1);
}

/* The warp is done with the stages before x. word: that of the last of them; the others are full. */
static __device__ __forceinline__ void leave(finder &f, uint32_t x, uint32_t word)
{
#pragma unroll 1
  for (; f.left < x; f.left++) {
    uint64_t *full = &memory()->full[f.left % STAGES];
    enter(f, f.left);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sm90_address(full)) : "memory");
    __syncwarp();
    if (threadIdx.x == 0)
      memory()->words[f.left % STAGES] = word;
    if (threadIdx.x % 32 == 0)
      sm90_barrier_arrive(full);
  }
}

/* A lane's 16 bytes of a row of B. line: its place in the ring. */
static __device__ __forceinline__ uint32_t place_of_b(uint32_t line)
{
  const uint32_t lane = threadIdx.x % 32;
  return sm90_address(memory()->b[lane / 8]) + line * LINE + ((lane ^ line) & 7) * 16;
}

/* Four groups of eight k's of A, those of `word`, to places from `entry` on. */
static __device__ __forceinline__ void put_lines(const uint32_t (&lines)[4][8], uint32_t word, uint32_t entry)
{
  const uint32_t lane = threadIdx.x % 32, to = sm90_address(memory()->a) + lane % 4 * 4;
#pragma unroll
  for (uint32_t g = 0; g < 4; g++) {
    const uint32_t bit = 1u << ((lane & ~3u) + g), line = (entry + (uint32_t)__popc(word & (bit - 1))) % LINES_A;
    const uint32_t at = to + line * LINE + line % 8 * 16;
    if (word & bit)
#pragma unroll
      for (uint32_t j = 0; j < 8; j++)
        sm90_store(at ^ j * 16, lines[g][j]);
  }
}

/* A tile's columns of B that a lane gathers. */
struct columns {
  const char *at; /* of k 0 */
  bool inside;
};

static __device__ __forceinline__ void put_row(const esmm_fused16_params &p, const columns &b, uint32_t line,
                                               uint32_t k)
{
  gather(place_of_b(line % LINES), b.at + (uint64_t)k * (uint32_t)p.b_row, b.inside);
}

/* The k of a word's first bit, which is taken away. */
static __device__ __forceinline__ uint32_t next_k(uint32_t &word, uint32_t k0)
{
  const uint32_t bit = (uint32_t)__ffs((int)word) - 1;
  word &= word - 1;
  return k0 + bit % 4 * 8 + bit / 4;
}

/* The rows of B, and k's, of `word` of 32 k's from k0 on. */
static __device__ __forceinline__ void put_rows(const esmm_fused16_params &p, const finder &f, const columns &b,
                                                uint32_t word, uint32_t entry, uint32_t k0)
{
  enum { TOGETHER = 4 };
  const uint32_t lane = threadIdx.x % 32, line = f.base * STAGE_K;
#pragma unroll 1
  for (int left = __popc(word); left >= TOGETHER; left -= TOGETHER, entry += TOGETHER) {
    uint32_t k[TOGETHER], mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < TOGETHER; i++) {
      k[i] = next_k(word, k0);
      mine = lane == i ? k[i] : mine;
    }
#pragma unroll
    for (uint32_t i = 0; i < TOGETHER; i++)
      put_row(p, b, line + entry + i, k[i]);
    if (lane < TOGETHER)
      memory()->listed[(entry + lane) % LINES_A] = mine;
  }
#pragma unroll 1
  for (; word; entry++) {
    const uint32_t k = next_k(word, k0);
    put_row(p, b, line + entry, k);
    if (lane == 0)
      memory()->listed[entry % LINES_A] = k;
  }
}

/* One thread writes how many alive k's are before box i, */
static __device__ __forceinline__ void tell(uint32_t i, uint32_t before)
{
  memory()->before[i % BOXES] = before;
  sm90_barrier_arrive(&memory()->heard[i % BOXES]);
}

/* and one reads it. */
static __device__ __forceinline__ uint32_t hear(uint32_t i)
{
  sm90_barrier_wait(&memory()->heard[i % BOXES], i / BOXES & 1);
  return memory()->before[i % BOXES];
}

/* A warp: the alive k's before its box i, which has `count`; passes the sum on to the next box. All boxes wait for each
   other here, so nothing else comes between. */
static __device__ __forceinline__ uint32_t pass_on(uint32_t i, uint32_t count)
{
  uint32_t before = 0;
  if (threadIdx.x % 32 == 0) {
    before = hear(i);
    tell(i + 1, before + count);
  }
  return __shfl_sync(~0u, before, 0);
}

static __device__ __forceinline__ bool stays(uint32_t entries)
{
  return entries <= LINES_A;
}

static __device__ __forceinline__ uint32_t steps_of(uint32_t entries)
{
  return (entries % STAGE_K + 15) / 16;
}

/* The tile's last stage: zeros up to a whole step. */
static __device__ __forceinline__ void fill_up(finder &f, uint32_t entries)
{
  const uint32_t x = f.base + entries / STAGE_K, end = entries / STAGE_K * STAGE_K + steps_of(entries) * 16;
  leave(f, x, STEPS);
  enter(f, x);
  for (uint32_t entry = entries + threadIdx.x / 32; entry < end; entry += FIND_WARPS) {
    sm90_store(sm90_address(memory()->a[entry % LINES_A]) + threadIdx.x % 32 * 4, 0);
    sm90_store4(place_of_b((f.base * STAGE_K + entry) % LINES), make_uint4(0, 0, 0, 0));
  }
  leave(f, x + 1, steps_of(entries) | LAST);
}

/* A warp gets the count of all boxes, and fills up the tile's last stage; returns that count. */
static __device__ __forceinline__ uint32_t end_find(finder &f, int first, int last)
{
  const uint32_t boxes = (uint32_t)max(0, (last - first + BOX_K - 1) / BOX_K);
  const uint32_t entries = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? hear(boxes) : 0, 0);
  fill_up(f, entries);
  return entries;
}

/* k's [first, last) of 64 rows; returns how many are alive. */
template <bool BY_K>
static __device__ __forceinline__ uint32_t find(const esmm_fused16_params &p, finder &f, int row0, int first, int last,
                                                const columns &b)
{
  const uint32_t warp = threadIdx.x / 32;
  int k = first + BOX_K * (int)warp;
#pragma unroll 1
  for (uint32_t i = warp; k < last; i += FIND_WARPS, k += BOX_K * FIND_WARPS) {
    found_lines lines;
    sm90_barrier_wait(&memory()->come[i % BOXES], i / BOXES & 1);
    const found alive = look<BY_K>(i, lines);
    const uint32_t low = (uint32_t)__popc(alive.low), count = low + (uint32_t)__popc(alive.high);
    const uint32_t entry = pass_on(i, count);
    if (threadIdx.x % 32 == 0 && k + BOXES * BOX_K < last)
      load_box<BY_K>(p, i + BOXES, row0, k + BOXES * BOX_K);
    __syncwarp();
    leave(f, f.base + entry / STAGE_K, STEPS); /* or the stages that it waits for might wait for it */
    if (count == 0)
      continue;
    enter(f, f.base + (entry + count - 1) / STAGE_K);
    put_rows(p, f, b, alive.low, entry, (uint32_t)k);
    put_rows(p, f, b, alive.high, entry + low, (uint32_t)k + 32);
    put_lines(*(const uint32_t(*)[4][8])lines.x, alive.low, entry);
    put_lines(*(const uint32_t(*)[4][8]) & lines.x[4], alive.high, entry + low);
    leave(f, f.base + (entry + count) / STAGE_K, STEPS);
  }
  return end_find(f, first, last);
}

/*
 * The same entries for another tile: A's lines are there. Stages from `from` on; with 0, only those that there is room
 * for at once.
 */
static __device__ __forceinline__ void find_again(const esmm_fused16_params &p, finder &f, uint32_t entries,
                                                  const columns &b, uint32_t from)
{
  const uint32_t last = entries / STAGE_K, end = last * STAGE_K + steps_of(entries) * 16;
  const uint32_t to = from ? last : min(last, (uint32_t)STAGES - 1);
  enum { EACH = STAGE_K / FIND_WARPS };
#pragma unroll 1
  for (uint32_t x = from; x <= to; x++) {
    const uint32_t first = x * STAGE_K + threadIdx.x / 32 * EACH;
    enter(f, f.base + x);
#pragma unroll
    for (uint32_t entry = first; entry < first + EACH; entry++)
      if (entry < entries)
        put_row(p, b, f.base * STAGE_K + entry, memory()->listed[entry]);
      else if (entry < end)
        sm90_store4(place_of_b((f.base * STAGE_K + entry) % LINES), make_uint4(0, 0, 0, 0));
    leave(f, f.base + x + 1, x < last ? STEPS : steps_of(entries) | LAST);
  }
}

/* One thread: fresh barriers, and the first boxes' loads. */
template <bool BY_K>
static __device__ __forceinline__ void begin_scan(const esmm_fused16_params &p, int row0, int first, int last)
{
  for (int i = 0; i < BOXES; i++) {
    sm90_barrier_init(&memory()->come[i], 1);
    sm90_barrier_init(&memory()->heard[i], 1);
  }
  sm90_fence_init();
  for (int i = 0; i < BOXES && first + i * BOX_K < last; i++)
    load_box<BY_K>(p, (uint32_t)i, row0, first + i * BOX_K);
  tell(0, 0);
}

/* One thread: all warps have all counts. */
static __device__ __forceinline__ void end_scan(void)
{
  for (int i = 0; i < BOXES; i++) {
    sm90_barrier_end(&memory()->come[i]);
    sm90_barrier_end(&memory()->heard[i]);
  }
}

/* Finders meet. */
static __device__ __forceinline__ void find_meet(void)
{
  asm volatile("bar.sync 1, %0;" ::"n"(FINDERS) : "memory");
}

/* ---- four multiply ---- */

/* Where in the ring the next stage is. */
struct multiplier {
  uint32_t slot, phase;
};

/* The stages of a tile. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ void multiply(multiplier &x, float (&sums)[SUMS])
{
  const uint64_t a = wgmma16_view(memory()->a);
  const uint64_t b = (uint64_t)((sm90_address(memory()->b) & 0x3ffffu) >> 4) | (uint64_t)(LINES * LINE >> 4) << 16 |
                     (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
  enum { STEP = 16 * LINE >> 4 };
  uint32_t before = STAGES;
#pragma unroll
  for (int j = 0; j < SUMS; j++)
    sums[j] = 0.0f;
#pragma unroll 1
  for (uint32_t stage = 0;; stage++) {
    const uint64_t at = a + stage % (LINES_A / STAGE_K) * STAGE_STEP, bt = b + x.slot * STAGE_STEP;
    sm90_barrier_wait(&memory()->full[x.slot], x.phase);
    /* Read by the lane that releases the stage. */
    const uint32_t word = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? memory()->words[x.slot] : 0, 0);
    sm90_fence_async(); /* it was not TMA that filled it */
    if ((word & STEPS_MASK) == STEPS) {
      sm90_wgmma_fence();
#pragma unroll
      for (int i = 0; i < STEPS; i++)
        wgmma16<DTYPE, 1>(sums, at + i * STEP, bt + i * STEP);
    } else if (word & STEPS_MASK) {
      sm90_wgmma_fence();
      wgmma16<DTYPE, 1>(sums, at, bt);
    }
    sm90_wgmma_commit(); /* a stage without steps, too: the wait below counts groups */
    if (before < STAGES) {
      sm90_wgmma_wait<1>();
      if (threadIdx.x % 32 == 0)
        sm90_barrier_arrive(&memory()->empty[before]);
    }
    before = x.slot;
    if (++x.slot == STAGES) {
      x.slot = 0;
      x.phase ^= 1;
    }
    if (word & LAST)
      break;
  }
  sm90_wgmma_wait<0>();
  if (threadIdx.x % 32 == 0)
    sm90_barrier_arrive(&memory()->empty[before]);
}

/* ---- C: blocks of a cluster add up their sums ---- */

/*
 * Sums in shared memory, where the boxes lay: [owner][row][its columns], for the block that finishes these columns.
 * Other blocks' columns go through memory, which is faster than from one shared memory to another:
 *   p.partial [unit][owner][sender][row][the owner's columns]
 * Groups of eight columns are swapped by row, so that the rows of a store do not meet in the same banks.
 */
static_assert(ROWS * COLS * 4 <= BOXES * BOX_BYTES, "sums lie where the boxes lay");

static __device__ __forceinline__ float *sums_at(void)
{
  return (float *)(void *)memory()->boxes;
}

/* Of each block's share of a tile's columns. */
static __device__ __forceinline__ int log_columns(const esmm_fused16_params &p)
{
  return 31 - __clz(COLS / p.ranks);
}

/* Where a row's column is, among an owner's 1 << log_mine columns. */
static __device__ __forceinline__ int swapped(int row, int col, int log_mine)
{
  return col ^ (row * 8 & ((1 << log_mine) - 1) & 56);
}

/* The warpgroup that has multiplied: its sums, where nothing is read any more. */
static __device__ __forceinline__ void store_sums(const esmm_fused16_params &p, const float (&sums)[SUMS])
{
  const int log_mine = log_columns(p);
  const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32, row = warp * 16 + lane / 4;
  const int first = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < SUMS; j += 4) {
    const int col = first + j * 2, at = swapped(row, col & ((1 << log_mine) - 1), log_mine);
    float *to = sums_at() + (((col >> log_mine) * ROWS + row) << log_mine) + at;
    *(float2 *)to = make_float2(sums[j], sums[j + 1]);
    *(float2 *)(to + (8 << log_mine)) = make_float2(sums[j + 2], sums[j + 3]);
  }
}

/* The sums that `sender` has for `owner`. */
static __device__ __forceinline__ float *partial_of(const esmm_fused16_params &p, int unit, int owner, int sender,
                                                    int log_mine)
{
  const int64_t part = ((int64_t)unit * p.ranks + owner) * p.ranks + sender;
  return (float *)p.partial + (part * ROWS << log_mine);
}

/* One thread for each other block of the cluster: its sums of `rows` rows, to memory. */
static __device__ __forceinline__ void send(const esmm_fused16_params &p, int unit, int rank, int rows, int log_mine)
{
  const int owner = (int)threadIdx.x;
  if (owner >= p.ranks || owner == rank)
    return;
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(partial_of(p, unit, owner, rank, log_mine)),
      "r"(sm90_address(sums_at() + (owner * ROWS << log_mine))), "r"(rows * 4 << log_mine)
      : "memory");
  sm90_bulk_commit();
  sm90_bulk_wait();
  sm90_fence_async_all();
  __threadfence();
}

/* Four sums of a row from block r, `at` on: this block's own, or from memory. */
static __device__ __forceinline__ float4 read_sums(const esmm_fused16_params &p, int unit, int rank, int r, int row,
                                                   int at, int log_mine)
{
  if (r == rank)
    return *(const float4 *)(sums_at() + ((rank * ROWS + row) << log_mine) + at);
  return __ldcg((const float4 *)(partial_of(p, unit, rank, r, log_mine) + (row << log_mine) + at));
}

/* Eight columns of a row, from `col` on: the sums of all blocks in the order of the ranks, and the epilogue. at: where
   they are in a row of sums. */
template <int RANKS>
static __device__ __forceinline__ void finish_columns(const esmm_fused16_params &p, int unit, int rank, int row0,
                                                      int row, int col, int at, int log_mine)
{
  float4 low[RANKS], high[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) { /* all loads before the first use */
    low[r] = read_sums(p, unit, rank, r, row, at, log_mine);
    high[r] = read_sums(p, unit, rank, r, row, at + 4, log_mine);
  }
  float x[8] = {low[0].x, low[0].y, low[0].z, low[0].w, high[0].x, high[0].y, high[0].z, high[0].w};
#pragma unroll
  for (int r = 1; r < RANKS; r++) {
    const float y[8] = {low[r].x, low[r].y, low[r].z, low[r].w, high[r].x, high[r].y, high[r].z, high[r].w};
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] += y[i];
  }
  if (has_vectors(p.epilogue.c) && col + 8 <= p.n) {
    finish_8(p.epilogue, row0 + row, col, x);
    return;
  }
  float *spare = sums_at() + ((rank * ROWS + row) << log_mine) + at; /* this thread's own: one by one */
  *(float4 *)spare = make_float4(x[0], x[1], x[2], x[3]);
  *(float4 *)(spare + 4) = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll 1
  for (int i = 0; i < min(8, p.n - col); i++)
    finish_element(p.epilogue, row0 + row, col + i, spare[i]);
}

template <int RANKS>
static __device__ __forceinline__ void finish_rows(const esmm_fused16_params &p, int unit, int rank, int row0, int col0,
                                                   int rows, int log_mine)
{
#pragma unroll 1
  for (int e = (int)threadIdx.x * 8; e < rows << log_mine; e += THREADS * 8) {
    const int row = e >> log_mine, mine = e & ((1 << log_mine) - 1), col = col0 + (rank << log_mine) + mine;
    if (col < p.n)
      finish_columns<RANKS>(p, unit, rank, row0, row, col, swapped(row, mine, log_mine), log_mine);
  }
}

/* Every block of a cluster finishes its share of the tile's columns. The sums are there. */
static __device__ __forceinline__ void finish(const esmm_fused16_params &p, int unit, int rank, int row0, int col0)
{
  const int log_mine = log_columns(p), rows = min(ROWS, p.m - row0);
  if (p.ranks > 1) {
    send(p, unit, rank, rows, log_mine);
    __syncwarp();
    cluster_sync();
  }
  static_assert(ESMM_FUSED16_RANKS == 8, "a case for each");
  if (p.ranks == 8)
    finish_rows<8>(p, unit, rank, row0, col0, rows, log_mine);
  else if (p.ranks == 4)
    finish_rows<4>(p, unit, rank, row0, col0, rows, log_mine);
  else if (p.ranks == 2)
    finish_rows<2>(p, unit, rank, row0, col0, rows, log_mine);
  else
    finish_rows<1>(p, unit, rank, row0, col0, rows, log_mine);
}

/* ---- a block ---- */

/* A tile's columns of B. */
static __device__ __forceinline__ columns columns_of(const esmm_fused16_params &p, int tile)
{
  const int64_t col = (int64_t)tile * (COLS * 2) + (int)threadIdx.x % 32 * 16; /* bytes */
  return {(const char *)p.b + (col < p.b_row ? col : 0), col < p.b_row};
}

/* A finder's part of tile t, and of the next one where A's lines stay: as many stages as there are. */
template <bool BY_K>
static __device__ __forceinline__ void find_tile(const esmm_fused16_params &p, finder &f, uint32_t &entries, int row0,
                                                 int first, int last, int tile, bool again, bool more)
{
  if (again && stays(entries)) {
    find_again(p, f, entries, columns_of(p, tile), STAGES);
  } else {
    if (again) {
      if (threadIdx.x == 0) {
        end_scan();
        begin_scan<BY_K>(p, row0, first, last);
      }
      find_meet();
    }
    entries = find<BY_K>(p, f, row0, first, last, columns_of(p, tile));
  }
  f.base = f.left;
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    sm90_barrier_arrive(&memory()->read);
  if (more && stays(entries)) {
    find_meet(); /* all k's are listed */
    find_again(p, f, entries, columns_of(p, tile + 1), 0);
  }
}

template <esmm_dtype DTYPE, bool BY_K> static __device__ __forceinline__ void fused16(const esmm_fused16_params &p)
{
  const int rank = (int)blockIdx.x % p.ranks, unit = (int)blockIdx.x / p.ranks,
            groups = (p.tiles + p.each - 1) / p.each;
  const int row0 = unit / groups * ROWS, tile0 = unit % groups * p.each, tiles = min(p.each, p.tiles - tile0);
  const int first = rank * p.range, last = min(p.k, first + p.range);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      sm90_barrier_init(&memory()->full[i], FINDERS + FIND_WARPS);
      sm90_barrier_init(&memory()->empty[i], MULTIPLIERS / 32);
    }
    sm90_barrier_init(&memory()->read, FIND_WARPS);
    begin_scan<BY_K>(p, row0, first, last);
  }
  __syncthreads();
  finder f = {0, 0, 0};
  multiplier x = {0, 0};
  uint32_t entries = 0;
#pragma unroll 1
  for (int t = 0;; t++) {
    if (threadIdx.x < FINDERS) {
      find_tile<BY_K>(p, f, entries, row0, first, last, tile0 + t, t > 0, t + 1 < tiles);
    } else {
      float sums[SUMS];
      multiply<DTYPE>(x, sums);
      sm90_barrier_wait(&memory()->read, (uint32_t)t & 1);
      store_sums(p, sums); /* where boxes were */
      sm90_fence_async();
    }
    __syncthreads();
    finish(p, unit, rank, row0, (tile0 + t) * COLS);
    if (t + 1 == tiles)
      break;
    sm90_fence_async(); /* boxes may come again */
    __syncthreads();
  }
}

#define FUSED16(name, dtype, by_k)                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, ESMM_FUSED16_BLOCKS) \
      name(const __grid_constant__ esmm_fused16_params p)                    \
  {                                                                          \
    if (!not_selected(p.selector))                                           \
      fused16<dtype, by_k>(p);                                               \
  }

FUSED16(esmm_fused16_bf16, ESMM_BF16, false)
FUSED16(esmm_fused16_bf16_by_k, ESMM_BF16, true)
FUSED16(esmm_fused16_f16, ESMM_F16, false)
FUSED16(esmm_fused16_f16_by_k, ESMM_F16, true)
