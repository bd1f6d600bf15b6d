/*
 * ffn_decode.cu: the second half of a gated layer for 1 to 16 tokens, in one launch: y = (act(gate) * (x up + b1)) down
 * + b2 from a gate that is known. Of up and down it reads only the rows of features that some token's gate lets
 * through; the floor is their bytes. up lies turned, so that a feature's values are side by side:
 *
 *     up, down:  [feature][model]      gate: [token][feature], rectified      x, y: [token][model]
 *
 * One block a multiprocessor, all there at once. In turn:
 *
 *   1  alive features: where the gate is small every block scans all of it; else each scans its stretch, writes the
 *      bits, and all meet. Either way every block then has all bits, and from them two lists: its share of the alive
 *      features, for step 2, and its part of them, for step 3.
 *   2  h of the block's share. A warp has 256 of the model's values (512 in two turns) of all tokens in registers, and
 *      multiplies the same stretch of eight rows of up by them: mma m16n8k16, features x tokens. All warps' sums are
 *      added for 16 features at a time. h goes to memory, where the blocks then meet.
 *   3  y. A block has 256 columns and a part of the list; a warp half of the columns, and every eighth step of 16
 *      features: mma m16n8k16 of columns x tokens, down transposed by ldmatrix. Sums of the warps are added in shared
 *      memory, those of the blocks that share columns by the last one to come. Always in the same order, so results do
 *      not vary.
 *
 * Each warp copies its rows to its own slots, by cp.async, three slots of 4 KB ahead, 192 KB a block: no warp waits for
 * another's rows. Rows of down do not depend on h: their first copies are on their way before the blocks meet.
 *
 * Any order of k's is as good as another while both operands have the same. In step 2, lane (g, t) = (lane / 4, lane %
 * 4) takes 8 k's in a row, 16 bytes, from 32 i + 8 t on: the first four are its k's of one mma, the others of the next.
 * Chunks of 16 bytes lie swapped in a slot so that lanes do not meet in banks: of odd rows chunk c at c ^ 4 in step 2,
 * of row r at c ^ r % 8 in step 3.
 */
#include "cuda/ffn/decode_params.h"
#include "cuda/kernels/common/mma.cuh"

#define THREADS ESMM_FFN_DECODE_THREADS
#define WARPS ESMM_FFN_DECODE_WARPS
#define SLOTS ESMM_FFN_DECODE_SLOTS
#define SLOT ESMM_FFN_DECODE_SLOT
#define STEP ESMM_FFN_DECODE_STEP
#define ROUND ESMM_FFN_DECODE_ROUND
#define COLS ESMM_FFN_DECODE_COLS
#define HALF ESMM_FFN_DECODE_HALF
#define WAYS (WARPS / 2) /* warps that share columns */
#define GROUP 8          /* features of a warp's step 2 */
#define LINE (COLS + 4)  /* floats of a token's sums in shared memory */
static_assert(GROUP * ESMM_FFN_DECODE_K * 2 == SLOT && STEP * HALF * 2 == SLOT, "a step fills a slot");
static_assert(WAYS * ESMM_FFN_DECODE_TOKENS * LINE * 4 <= ESMM_FFN_DECODE_RING, "sums take the slots' place");

/* ---- blocks meet ---- */

/* All blocks have come, and what they wrote is there. word was 0; the last one to leave sets it to 0 again. */
static __device__ __forceinline__ void meet_all(uint32_t *word)
{
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t come;
    asm volatile("red.add.release.gpu.global.u32 [%0], 1;" ::"l"(word) : "memory");
    do
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(come) : "l"(word) : "memory");
    while (come < gridDim.x);
  }
  __syncthreads();
}

static __device__ __forceinline__ uint32_t take_ticket(uint32_t *word)
{
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
  return before;
}

/* One thread, after its block's last meeting. */
static __device__ __forceinline__ void leave(uint32_t *meeting)
{
  if (take_ticket(&meeting[2]) == gridDim.x - 1)
    meeting[0] = meeting[1] = meeting[2] = 0;
}

/* ---- memory ---- */

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
  return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes, or zeros; `from` lies inside its matrix either way. */
static __device__ __forceinline__ void copy_16(uint32_t to, const uint16_t *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void end_step(void)
{
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The oldest of the warp's SLOTS steps is there. */
static __device__ __forceinline__ void wait_for_step(void)
{
  asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
  __syncwarp();
}

static __device__ __forceinline__ uint4 read_16(uint32_t from)
{
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/* ---- shared memory ---- */

extern __shared__ __align__(128) uint8_t shared[];

struct places {
  uint32_t ring;          /* address of this warp's slots */
  float *sums;            /* [WARPS][tokens in eights][ROUND] */
  uint16_t *share, *list; /* features of step 2, of step 3 */
  uint32_t *bits;         /* [line / 32] */
};

template <int HALVES> static __device__ __forceinline__ places find_places(const esmm_ffn_decode_params &p)
{
  places at;
  at.ring = shared_address(shared) + (uint32_t)(warp_id() * SLOTS * SLOT);
  at.sums = (float *)(shared + ESMM_FFN_DECODE_RING);
  at.share = (uint16_t *)((uint8_t *)at.sums + ESMM_FFN_DECODE_SUMS(HALVES));
  at.list = at.share + p.share;
  at.bits = (uint32_t *)(at.list + p.list);
  return at;
}

/* A block's stretch of something that all of them share. */
struct stretch {
  int first, count;
};

static __device__ __forceinline__ stretch stretch_of(int which, int of, int all)
{
  const int first = (int)((int64_t)which * all / of);
  return {first, (int)((int64_t)(which + 1) * all / of) - first};
}

/* ---- 1: alive features ---- */

/* Adds to `bits`, which are 0, those of some words of the gate. */
static __device__ __forceinline__ void scan_gate(const esmm_ffn_decode_params &p, stretch words, uint32_t *bits)
{
  enum { AT_ONCE = 8 };
  const int eights = 4 * words.count, all = eights * (int)p.x.rows;
  const uint4 *gate = (const uint4 *)p.gate + 4 * words.first;
  const int64_t row = p.line / 8;
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < all; first += AT_ONCE * THREADS) {
    uint4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int e = first + i * THREADS;
      x[i] = make_uint4(0, 0, 0, 0);
      if (e < all)
        x[i] = __ldg(gate + e / eights * row + e % eights);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int e = first + i * THREADS, eight = 4 * words.first + e % eights, left = p.features - 8 * eight;
      uint32_t mask = nonzero_mask(x[i]);
      if (left < 8)
        mask &= left > 0 ? (1u << left) - 1 : 0u;
      if (mask)
        atomicOr(&bits[eight / 4], mask << (eight % 4 * 8));
    }
  }
}

/* All bits to every block's shared memory. */
static __device__ __forceinline__ void find_alive(const esmm_ffn_decode_params &p, uint32_t *bits)
{
  const int words = p.line / 32;
  const bool alone = (int64_t)p.x.rows * p.features <= ESMM_FFN_DECODE_LISTED;
  const stretch mine = alone ? stretch{0, words} : stretch_of((int)blockIdx.x, (int)gridDim.x, words);
  for (int w = (int)threadIdx.x; w < words; w += THREADS)
    bits[w] = 0;
  __syncthreads();
  scan_gate(p, mine, bits);
  __syncthreads();
  if (alone)
    return;
  uint32_t *out = (uint32_t *)p.bits;
  for (int w = (int)threadIdx.x; w < mine.count; w += THREADS)
    __stcg(&out[mine.first + w], bits[mine.first + w]);
  meet_all((uint32_t *)p.meeting);
  for (int w = (int)threadIdx.x; w < words; w += THREADS)
    bits[w] = __ldcg(&out[w]);
  __syncthreads();
}

/* How many bits all threads before this one have, and in *all how many there are. */
static __device__ __forceinline__ int count_before(int mine, int *all)
{
  __shared__ int totals[WARPS];
  const int lane = lane_id(), warp = warp_id();
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31)
    totals[warp] = sum;
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    before += w < warp ? totals[w] : 0;
    total += totals[w];
  }
  *all = total;
  return before;
}

/* The block's part of the list, in whole steps. */
struct part {
  int tile, first, count, steps; /* of columns; entries, and steps of them */
};

static __device__ __forceinline__ part part_of(const esmm_ffn_decode_params &p, int alive)
{
  const int tile = (int)blockIdx.x % p.tiles, which = (int)blockIdx.x / p.tiles;
  if (which >= p.parts)
    return {tile, 0, 0, 0};
  const stretch steps = stretch_of(which, p.parts, (alive + STEP - 1) / STEP);
  const int first = STEP * steps.first;
  return {tile, first, min(STEP * steps.count, alive - first), steps.count};
}

/* Both lists from the bits. Returns how many features are alive. */
static __device__ __forceinline__ int list_alive(const esmm_ffn_decode_params &p, const places &at)
{
  const int words = p.line / 32, each = (words + THREADS - 1) / THREADS, first = (int)threadIdx.x * each;
  int mine = 0, alive;
  for (int w = first; w < min(first + each, words); w++)
    mine += __popc(at.bits[w]);
  int place = count_before(mine, &alive);
  const stretch share = stretch_of((int)blockIdx.x, (int)gridDim.x, alive);
  const part q = part_of(p, alive);
  for (int w = first; w < min(first + each, words); w++)
    for (uint32_t left = at.bits[w]; left; left &= left - 1, place++) {
      const uint16_t feature = (uint16_t)(32 * w + __ffs((int)left) - 1);
      if ((unsigned)(place - share.first) < (unsigned)share.count)
        at.share[place - share.first] = feature;
      if ((unsigned)(place - q.first) < (unsigned)q.count)
        at.list[place - q.first] = feature;
    }
  __syncthreads();
  return alive;
}

/* ---- copies ---- */

/* What a warp copies: `ups` steps of up, then `downs` of down, in slots one after the other. */
struct queue {
  int ups, downs, next; /* next: to be copied */
  int rows;             /* of the share */
  int listed;           /* of the list */
  const uint16_t *down; /* this lane's first columns */
};

static __device__ __forceinline__ uint32_t slot_at(const places &at, int step)
{
  return at.ring + (uint32_t)(step % SLOTS * SLOT);
}

/* The warp's k's in turn `sub`. */
static __device__ __forceinline__ int first_k(int sub)
{
  return (sub * WARPS + warp_id()) * ESMM_FFN_DECODE_K;
}

/* Eight rows of up, 512 bytes of each. Missing rows leave the slot as it is: their sums go nowhere. */
template <int SUBS>
static __device__ __forceinline__ void copy_up(const esmm_ffn_decode_params &p, const places &at, const queue &q,
                                               int step)
{
  const int group = step / SUBS, k = first_k(step % SUBS), lane = lane_id(), mine = k + 8 * lane;
  if (k >= p.model)
    return;
  const uint32_t to = slot_at(at, step);
  const bool there = mine < p.model;
#pragma unroll 4
  for (int row = 0; row < GROUP; row++)
    if (GROUP * group + row < q.rows) {
      const uint16_t *from = (const uint16_t *)p.up + at.share[GROUP * group + row] * p.up_ld;
      copy_16(to + (uint32_t)(row * 2 * ESMM_FFN_DECODE_K + (lane ^ row % 2 * 4) * 16), from + (there ? mine : 0),
              there);
    }
}

/* Sixteen rows of down, 256 bytes of each; zeros where the list has ended. */
static __device__ __forceinline__ void copy_down(const esmm_ffn_decode_params &p, const places &at, const queue &q,
                                                 int slot_step, int step)
{
  const int lane = lane_id(), entry = STEP * (warp_id() / 2 + WAYS * step);
  const uint32_t to = slot_at(at, slot_step);
#pragma unroll 4
  for (int i = 0; i < STEP / 2; i++) {
    const int row = 2 * i + lane / 16, chunk = lane % 16;
    const bool there = entry + row < q.listed;
    const int64_t feature = there ? at.list[entry + row] : 0;
    copy_16(to + (uint32_t)(row * 2 * HALF + (chunk ^ row % 8) * 16), q.down + feature * p.down_ld, there);
  }
}

/* The next step, if there is one, to a free slot. */
template <int SUBS>
static __device__ __forceinline__ void copy_next(const esmm_ffn_decode_params &p, const places &at, queue &q)
{
  const int step = q.next++;
  if (step < q.ups)
    copy_up<SUBS>(p, at, q, step);
  else if (step < q.ups + q.downs)
    copy_down(p, at, q, step, step - q.ups);
  end_step();
}

/* ---- 2: h ---- */

/* This lane's values of x: of tokens g and g + 8, eight k's in a row, from 32 i + 8 t of the turn's on. */
template <int HALVES, int SUBS> struct tokens {
  uint4 x[SUBS][ESMM_FFN_DECODE_K / 32][HALVES];
};

template <int HALVES, int SUBS>
static __device__ __forceinline__ void load_tokens(const esmm_ffn_decode_params &p, tokens<HALVES, SUBS> &to)
{
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
    for (int i = 0; i < ESMM_FFN_DECODE_K / 32; i++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int row = g + 8 * half, k = first_k(sub) + 32 * i + 8 * t;
        to.x[sub][i][half] = make_uint4(0, 0, 0, 0);
        if (row < p.x.rows && k < p.model)
          to.x[sub][i][half] = __ldg((const uint4 *)((const uint16_t *)p.x.data + row * p.x.ld + k));
      }
}

/*
 * Eight rows of up times tokens, this warp's k's of a turn. The 16 bytes that a lane reads are its four registers of
 * the mma's first operand as they come: words x and z in rows 0 to 7, the features, y and w in rows 8 to 15, the same
 * features again. One mma multiplies x and z by their k's of the tokens, and its lower rows are nonsense; the other y
 * and w, and its upper ones are.
 */
template <esmm_dtype DTYPE, int HALVES, int SUBS>
static __device__ __forceinline__ void multiply_up(uint32_t slot, const tokens<HALVES, SUBS> &x, int sub,
                                                   float (&sums)[HALVES][2][4])
{
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < ESMM_FFN_DECODE_K / 32; i++) {
    const uint4 words = read_16(slot + (uint32_t)(g * 2 * ESMM_FFN_DECODE_K + ((4 * i + t) ^ g % 2 * 4) * 16));
    const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const uint4 b = x.x[sub][i][half];
      mma16_mma<DTYPE>(sums[half][0], a, b.x, b.z);
      mma16_mma<DTYPE>(sums[half][1], a, b.y, b.w);
    }
  }
}

/* The warp's sums of a group: feature g, tokens 2t and 2t + 1 of each half. */
template <int HALVES> static __device__ __forceinline__ void store_group(float *to, const float (&sums)[HALVES][2][4])
{
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int half = 0; half < HALVES; half++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      to[(8 * half + 2 * t + i) * ROUND + g] = sums[half][0][i] + sums[half][1][2 + i];
}

/* h of the block's share, the places from `first` on. */
template <esmm_dtype DTYPE, int HALVES, int SUBS>
static __device__ __forceinline__ void make_h(const esmm_ffn_decode_params &p, const places &at, queue &q, int first)
{
  enum { ROWS = 8 * HALVES };
  typedef typename dtype_of<DTYPE>::element element;
  const int feature = (int)threadIdx.x % ROUND, token = (int)threadIdx.x / ROUND; /* that this thread finishes */
  tokens<HALVES, SUBS> x;
  load_tokens(p, x);
  int step = 0;
#pragma unroll 1
  for (int from = 0; from < q.rows; from += ROUND) {
    const bool mine = token < p.x.rows && from + feature < q.rows;
    float gate = 0.0f, bias = 0.0f;
    if (mine) {
      const int f = at.share[from + feature];
      gate = as_float(((const element *)p.gate)[(int64_t)token * p.line + f]);
      bias = p.b1 ? ((const float *)p.b1)[f] : 0.0f;
    }
#pragma unroll 1
    for (int group = 0; group < ROUND; group += GROUP) {
      if (from + group >= q.rows)
        break;
      float sums[HALVES][2][4] = {};
#pragma unroll 1
      for (int sub = 0; sub < SUBS; sub++, step++) {
        wait_for_step();
#pragma unroll
        for (int i = 0; i < SUBS; i++) /* registers can only be named */
          if (i == sub && first_k(i) < p.model)
            multiply_up<DTYPE>(slot_at(at, step), x, i, sums);
        __syncwarp();
        copy_next<SUBS>(p, at, q);
      }
      store_group<HALVES>(at.sums + warp_id() * ROWS * ROUND + group, sums);
    }
    __syncthreads();
    if (mine) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        sum += at.sums[(w * ROWS + token) * ROUND + feature];
      const float open = p.square ? gate * gate : gate;
      const float h = gate == 0.0f ? 0.0f : __fmul_rn(open, __fadd_rn(sum, bias));
      ((element *)p.h)[(int64_t)token * p.line + first + from + feature] = rounded(dtype_of<DTYPE>(), h);
    }
    __syncthreads();
  }
}

/* ---- 3: y ---- */

/* h of a step: of token g of each half, features 2t, 2t + 1 and 2t + 8, 2t + 9. */
template <int HALVES>
static __device__ __forceinline__ void load_h(const esmm_ffn_decode_params &p, int first, int left,
                                              uint32_t (&h)[HALVES][2])
{
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int half = 0; half < HALVES; half++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = g + 8 * half, at = 2 * t + 8 * i;
      h[half][i] = 0;
      if (token < p.x.rows && at < left) {
        const uint32_t x = __ldcg((const uint32_t *)((const uint16_t *)p.h + (int64_t)token * p.line + first + at));
        h[half][i] = at + 1 < left ? x : x & 0xffffu;
      }
    }
}

template <esmm_dtype DTYPE, int HALVES>
static __device__ __forceinline__ void multiply_down(uint32_t slot, const uint32_t (&h)[HALVES][2],
                                                     float (&sums)[HALF / 16][HALVES][4])
{
  const int lane = lane_id(), row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < HALF / 16; i++) {
    uint32_t a[4];
    mma16_load_transposed(a, slot + (uint32_t)(row * 2 * HALF + ((2 * i + lane / 8 % 2) ^ row % 8) * 16));
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      mma16_mma<DTYPE>(sums[i][half], a, h[half][0], h[half][1]);
  }
}

/* The warp's sums to shared memory, in the slots' place: [WAYS][tokens in eights][LINE]. */
template <int HALVES> static __device__ __forceinline__ void store_sums(const float (&sums)[HALF / 16][HALVES][4])
{
  const int g = lane_id() / 4, t = lane_id() % 4;
  float *to = (float *)shared + warp_id() / 2 * 8 * HALVES * LINE + warp_id() % 2 * HALF + g;
#pragma unroll
  for (int i = 0; i < HALF / 16; i++)
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        to[(8 * half + 2 * t + e % 2) * LINE + 16 * i + e / 2 * 8] = sums[i][half][e];
}

static __device__ __forceinline__ void finish(const esmm_ffn_decode_params &p, int token, int col, float sum)
{
  if (col < p.model)
    store_element(p.y, element_at(p.y, token, col), p.b2 ? __fadd_rn(sum, ((const float *)p.b2)[col]) : sum);
}

/* The block's sums, or those of all blocks that share its columns, to y. */
template <int HALVES> static __device__ __forceinline__ void make_y(const esmm_ffn_decode_params &p, const part &q)
{
  __shared__ bool last;
  const int all = (int)p.x.rows * COLS, width = p.tiles * COLS, which = (int)blockIdx.x / p.tiles;
  float *partial = (float *)p.partial + q.tile * COLS;
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < all; e += THREADS) {
    const int token = e / COLS, col = e % COLS;
    const float *from = (const float *)shared + token * LINE + col;
    float sum = 0.0f;
#pragma unroll
    for (int way = 0; way < WAYS; way++)
      sum += from[way * 8 * HALVES * LINE];
    if (p.parts > 1)
      __stcg(&partial[((int64_t)which * p.x.rows + token) * width + col], sum);
    else
      finish(p, token, q.tile * COLS + col, sum);
  }
  if (p.parts == 1)
    return;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t *ticket = (uint32_t *)p.meeting + ESMM_FFN_DECODE_TICKETS + q.tile;
    last = take_ticket(ticket) == (uint32_t)p.parts - 1;
    if (last)
      *ticket = 0; /* all blocks have come */
  }
  __syncthreads();
  if (!last)
    return;
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < all; e += THREADS) {
    const int token = e / COLS, col = e % COLS;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < p.parts; i++)
      sum += __ldcg(&partial[((int64_t)i * p.x.rows + token) * width + col]);
    finish(p, token, q.tile * COLS + col, sum);
  }
}

template <esmm_dtype DTYPE, int HALVES, int SUBS>
static __device__ __forceinline__ void decode(const esmm_ffn_decode_params &p)
{
  const places at = find_places<HALVES>(p);
  find_alive(p, at.bits);
  const int alive = list_alive(p, at), way = warp_id() / 2;
  const stretch share = stretch_of((int)blockIdx.x, (int)gridDim.x, alive);
  const part mine = part_of(p, alive);
  const int col = mine.tile * COLS + warp_id() % 2 * HALF; /* of this warp */
  queue q;
  q.rows = share.count;
  q.listed = mine.count;
  q.ups = (share.count + GROUP - 1) / GROUP * SUBS;
  q.downs = col < p.down_ld && mine.steps > way ? (mine.steps - way + WAYS - 1) / WAYS : 0;
  q.next = 0;
  q.down = (const uint16_t *)p.down + col + lane_id() % 16 * 8;
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
    copy_next<SUBS>(p, at, q);
  make_h<DTYPE, HALVES, SUBS>(p, at, q, share.first);
  meet_all((uint32_t *)p.meeting + 1);

  float sums[HALF / 16][HALVES][4] = {};
  uint32_t h[HALVES][2];
  if (q.downs > 0)
    load_h<HALVES>(p, mine.first + STEP * way, mine.count - STEP * way, h);
#pragma unroll 1
  for (int i = 0; i < q.downs; i++) {
    const int next = STEP * (way + WAYS * (i + 1));
    uint32_t then[HALVES][2];
    load_h<HALVES>(p, mine.first + next, mine.count - next, then);
    wait_for_step();
    multiply_down<DTYPE, HALVES>(slot_at(at, q.ups + i), h, sums);
    __syncwarp();
    copy_next<SUBS>(p, at, q);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      h[half][0] = then[half][0];
      h[half][1] = then[half][1];
    }
  }
  __syncthreads(); /* all slots have been read; copies that are still to come have none */
  store_sums<HALVES>(sums);
  __syncthreads();
  if ((int)blockIdx.x < p.tiles * p.parts)
    make_y<HALVES>(p, mine);
  if (threadIdx.x == 0)
    leave((uint32_t *)p.meeting);
}

/* ---- what the host launches: by dtype, eights of tokens, turns of the model's values ---- */

#define DECODE(name, dtype, halves, subs)                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ esmm_ffn_decode_params p) \
  {                                                                                                               \
    decode<dtype, halves, subs>(p);                                                                               \
  }

DECODE(esmm_ffn_decode_bf16_8, ESMM_BF16, 1, 1)
DECODE(esmm_ffn_decode_bf16_16, ESMM_BF16, 2, 1)
DECODE(esmm_ffn_decode_bf16_8_wide, ESMM_BF16, 1, 2)
DECODE(esmm_ffn_decode_f16_8, ESMM_F16, 1, 1)
DECODE(esmm_ffn_decode_f16_16, ESMM_F16, 2, 1)
DECODE(esmm_ffn_decode_f16_8_wide, ESMM_F16, 1, 2)
