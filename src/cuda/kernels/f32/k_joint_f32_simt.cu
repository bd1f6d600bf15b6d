/*
 * k_joint_f32_simt.cu: joint skipping at 32 x 32 with IEEE fp32 multiply-adds, for those who want no TF32 anywhere.
 *
 * A block of 8 warps has 128 x 128 sums: 4 strips of A by 4 of B. It lists the k's that any of its 16 pairs of strips
 * needs, (a0|a1|a2|a3) & (b0|b1|b2|b3), with a byte that says which of the 8 strips have a nonzero there, and streams
 * only those, and of those only the segments that are alive, through a ring of stages in shared memory:
 *
 *   stage    32 slots, each 4 segments of A and 4 of B: 32 KB
 *   list     of 4096 k's at a time: 16 KB
 *
 * A warp has two joints, 64 x 32 sums, and walks the slots that both need, then those of one alone: a slot is 4 loads
 * of 16 bytes for 64 multiply-adds a lane, or 3 for 32. Slots are walked in an order that depends on the bitmaps alone,
 * so the same data gives the same bits.
 *
 * A window's sums are one chain of fp32 additions; with more than one window they are added up apart (in memory, since
 * there are no registers left), which halves the error at k = 16384.
 *
 * Two blocks a multiprocessor: registers are 128 at most, and there are three stages where a multiprocessor has 226 KB
 * of shared memory (H200), else two.
 */
#include "cuda/kernels/common/simt.cuh"

#define SLOTS 32
#define STRIPS (TILE / ESMM_STRIP) /* of each operand in a block */
#define STAGE (2 * SLOTS * TILE)   /* floats: A's segments, then B's */
#define WINDOW ESMM_SIMT_WINDOW    /* k's listed at a time */
#define WINDOW_WORDS (WINDOW / 32)
#define A_BITS 16 /* of a list entry: k in the window, then a bit for each strip of A, then of B */
#define B_BITS (A_BITS + STRIPS)

static_assert(ESMM_SIMT_SHARED(3) == 4 * (3 * STAGE + WINDOW), "as k_joint_f32_simt.c launches it");

/* Where a block's tile lies, and the part of k that is listed. */
struct Place {
  int row_strip, col_strip; /* the first of four */
  int word0, count;         /* first bitmap word of the window; entries of its list */
};

/* ---- the list ---- */

/* Bitmap words of the window, [8][WINDOW_WORDS], A's strips before B's, then their union: into the ring's memory. */
static __device__ __forceinline__ void load_words(const esmm_strips_product_params &p, const Place &place,
                                                  uint32_t *words)
{
  const int i = (int)threadIdx.x;
  const int64_t all = p.a.k_padded / 32, word = place.word0 + i;
  if (i >= WINDOW_WORDS)
    return;
  uint32_t any[2] = {0, 0};
#pragma unroll
  for (int s = 0; s < 2 * STRIPS; s++) {
    const bool of_b = s >= STRIPS;
    const int64_t strip = of_b ? place.col_strip + s - STRIPS : place.row_strip + s;
    uint32_t x = 0;
    if (word < all && strip < (of_b ? p.b.strips : p.a.strips))
      x = ((const uint32_t *)(of_b ? p.b.bits : p.a.bits))[strip * all + word];
    words[s * WINDOW_WORDS + i] = x;
    any[of_b] |= x;
  }
  words[2 * STRIPS * WINDOW_WORDS + i] = any[0] & any[1];
}

/* Which strips have this k; the entry of the list. */
static __device__ __forceinline__ uint32_t entry_of(const uint32_t *words, int word, int bit)
{
  uint32_t entry = (uint32_t)(32 * word + bit);
#pragma unroll
  for (int s = 0; s < 2 * STRIPS; s++)
    entry |= (words[s * WINDOW_WORDS + word] >> bit & 1) << (A_BITS + s);
  return entry;
}

/* A warp writes the k's of 16 words, after those of the words before. Returns how many there are in all. */
static __device__ __forceinline__ int write_list(const uint32_t *words, uint32_t *list)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const uint32_t *unions = words + 2 * STRIPS * WINDOW_WORDS;
  const uint4 four = ((const uint4 *)unions)[lane];
  const int own = __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
  int sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(~0u, sum, d);
    sum += lane >= d ? before : 0;
  }
  const int per_warp = WINDOW_WORDS / WARPS;
  int at = __shfl_sync(~0u, sum - own, warp * per_warp / 4);
  for (int i = 0; i < per_warp; i++) {
    const int word = warp * per_warp + i;
    const uint32_t bits = unions[word];
    if (bits >> lane & 1)
      list[at + __popc(bits & ((1u << lane) - 1))] = entry_of(words, word, lane);
    at += __popc(bits);
  }
  return __shfl_sync(~0u, sum, 31);
}

/* ---- the ring ---- */

static __device__ __forceinline__ void copy_stage(const esmm_strips_product_params &p, const Place &place,
                                                  const uint32_t *list, float *to, int stage)
{
  const int c = (int)threadIdx.x % 8, slot = (int)threadIdx.x / 8;
  if (stage * SLOTS + slot >= place.count)
    return;
  const uint32_t entry = list[stage * SLOTS + slot];
  const int64_t k = (int64_t)place.word0 * 32 + (entry & (WINDOW - 1)), step = p.a.k_padded * ESMM_STRIP;
  const float *a = (const float *)p.a.data + place.row_strip * step + k * ESMM_STRIP + 4 * c;
  const float *b = (const float *)p.b.data + place.col_strip * step + k * ESMM_STRIP + 4 * c;
  to += slot * TILE + 4 * c;
#pragma unroll
  for (int s = 0; s < STRIPS; s++) {
    if (entry >> (A_BITS + s) & 1)
      copy16(to + s * ESMM_STRIP, a + s * step, true);
    if (entry >> (B_BITS + s) & 1)
      copy16(to + SLOTS * TILE + s * ESMM_STRIP, b + s * step, true);
  }
}

/* ---- one stage of a warp ---- */

template <int count>
static __device__ __forceinline__ void add_slots(const float *a, const float *b, const int (&slots)[count], bool first,
                                                 bool second, Sums<Tall> &sums)
{
#pragma unroll
  for (int i = 0; i < count; i++) {
    float x[Tall::ROWS], y[Tall::COLS];
    load_b<Tall>(b + slots[i] * TILE, y);
    if (first) {
      load_a<Tall>(a + slots[i] * TILE, x);
      multiply_add<Tall>(sums[0], x, y);
    }
    if (second) {
      load_a<Tall>(a + slots[i] * TILE + ESMM_STRIP, x);
      multiply_add<Tall>(sums[1], x, y);
    }
  }
}

static __device__ __forceinline__ int next_slot(uint32_t &bits)
{
  const int slot = __ffs((int)bits) - 1;
  bits &= bits - 1;
  return slot;
}

/* Two slots at a time, so that the loads of one hide behind the other. */
static __device__ __forceinline__ void walk(const float *a, const float *b, uint32_t bits, bool first, bool second,
                                            Sums<Tall> &sums)
{
  int left = __popc(bits);
  for (; left >= 2; left -= 2) {
    const int two[2] = {next_slot(bits), next_slot(bits)};
    add_slots<2>(a, b, two, first, second, sums);
  }
  if (left) {
    const int one[1] = {next_slot(bits)};
    add_slots<1>(a, b, one, first, second, sums);
  }
}

static __device__ __forceinline__ void multiply_stage(const Place &place, const uint32_t *list, const float *ring,
                                                      int stage, Sums<Tall> &sums)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int warp_row = warp / STRIPS, warp_col = warp % STRIPS, at = stage * SLOTS + lane;
  const uint32_t entry = at < place.count ? list[at] : 0;
  const uint32_t alive = entry >> (B_BITS + warp_col) & 1 ? entry >> (A_BITS + 2 * warp_row) : 0;
  const uint32_t first = __ballot_sync(~0u, alive & 1), second = __ballot_sync(~0u, alive & 2);
  const float *a = ring + warp_row * WARP_ROWS + first_row<Tall>(lane);
  const float *b = ring + SLOTS * TILE + warp_col * WARP_COLS + first_col<Tall>(lane);
  walk(a, b, first & second, true, true, sums);
  walk(a, b, first & ~second, true, false, sums);
  walk(a, b, second & ~first, false, true, sums);
}

/* ---- sums of earlier windows ---- */

/* first: nothing is there yet. Leaves the sums zero. */
static __device__ __forceinline__ void bank_sums(float *bank, bool first, Sums<Tall> &sums)
{
  bank += (int64_t)blockIdx.x * TILE * TILE + threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tall::GROUPS * Tall::ROWS * Tall::COLS; i++) {
    float &sum = sums[i / (Tall::ROWS * Tall::COLS)][i / Tall::COLS % Tall::ROWS][i % Tall::COLS];
    bank[i * THREADS] = first ? sum : bank[i * THREADS] + sum;
    sum = 0.0f;
  }
}

static __device__ __forceinline__ void add_bank(const float *bank, Sums<Tall> &sums)
{
  bank += (int64_t)blockIdx.x * TILE * TILE + threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tall::GROUPS * Tall::ROWS * Tall::COLS; i++)
    sums[i / (Tall::ROWS * Tall::COLS)][i / Tall::COLS % Tall::ROWS][i % Tall::COLS] += bank[i * THREADS];
}

/* ---- one block ---- */

template <int stages> static __device__ __forceinline__ void multiply(const esmm_strips_product_params &p)
{
  extern __shared__ __align__(16) float ring[];
  uint32_t *words = (uint32_t *)ring, *list = (uint32_t *)(ring + stages * STAGE);
  const int warp = (int)threadIdx.x / 32;
  int tile_row, tile_col;
  tile_at((int)blockIdx.x, tiles_of(p.m), tiles_of(p.n), &tile_row, &tile_col);
  Place place = {tile_row * STRIPS, tile_col * STRIPS, 0, 0};
  Sums<Tall> sums;
  clear_sums<Tall>(sums);

  for (; place.word0 < (int)(p.a.k_padded / 32); place.word0 += WINDOW_WORDS) {
    if (place.word0 > 0)
      bank_sums((float *)p.bank, place.word0 == WINDOW_WORDS, sums);
    __syncthreads(); /* nobody reads the ring and the list of the window before */
    load_words(p, place, words);
    __syncthreads();
    place.count = write_list(words, list);
    __syncthreads();
    for (int s = 0; s < stages - 1; s++) {
      copy_stage(p, place, list, ring + s * STAGE, s);
      copies_commit();
    }
    int now = 0, next = stages - 1; /* stages in the ring: multiplied, and filled */
    for (int s = 0; s * SLOTS < place.count; s++) {
      copies_wait<stages - 2>();
      __syncthreads();
      copy_stage(p, place, list, ring + next * STAGE, s + stages - 1);
      copies_commit();
      multiply_stage(place, list, ring + now * STAGE, s, sums);
      now = now + 1 == stages ? 0 : now + 1;
      next = next + 1 == stages ? 0 : next + 1;
    }
  }
  copies_wait<0>();
  __syncthreads();
  if (p.bank)
    add_bank((const float *)p.bank, sums);
  finish_sums<Tall>(p.epilogue, (int64_t)tile_row * TILE + warp / STRIPS * WARP_ROWS,
                    (int64_t)tile_col * TILE + warp % STRIPS * WARP_COLS, sums, ring + warp * WARP_ROWS * WARP_COLS);
}

extern "C" __global__ void __launch_bounds__(THREADS, ESMM_SIMT_BLOCKS)
    joint_f32_simt(const __grid_constant__ esmm_strips_product_params p)
{
  if (!not_selected(p.selector))
    multiply<3>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, ESMM_SIMT_BLOCKS)
    joint_f32_simt_small(const __grid_constant__ esmm_strips_product_params p)
{
  if (!not_selected(p.selector))
    multiply<2>(p);
}
