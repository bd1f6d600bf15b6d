/*
 * k_ladder.cu: the kernels of the prior work, for the ablation figures. One source; each number is a set of choices:
 *
 *   number  strips   where zeros are looked for
 *   10      none     nowhere: dense
 *   17      32 cols  B's bitmap, at every k
 *   20      64 x 32  the joint, at every k; A's bitmaps in a launch of their own
 *   21       8 x 32  the same
 *   25      64 x 32  as 20, but one launch: A's bitmaps, a barrier over the grid, the product
 *   28       8 x 32  one launch, and no branch per k: a warp walks the set bits of each joint, two at a time
 *   29      32 x 32  32 k's of the block, 8 k's of the warp, then every k; joints are made once, in shared memory
 *   30       8 x 8   each group of 8 lanes walks the joint of its own 8 x 8 sums
 *
 * All are alike in the rest. A block of 8 warps has 128 x 128 sums, a warp 64 x 32, a lane 64. Chunks of 32 k's, one
 * bitmap word, go through two buffers in shared memory, while the words are copied a chunk ahead of their data:
 *
 *   iteration t    wait | copy chunk t+1 and the words of t+2 | multiply chunk t
 *
 * A's buffer is k-major, so that a lane loads its rows at once; k's four lie in rows xor 4 * (k / 4), which spreads the
 * transposing copies over all banks. Row -1 of both buffers is zero, for a walk that has run out of bits.
 * Shared memory is 67 KB and registers 128 at most: two blocks a multiprocessor.
 *
 * A [m,k] any dtype and order; B in strips of 32 columns, fp32; C any dtype and order.
 */
#include "simt.cuh"

#include <cooperative_groups.h>

#define CHUNK 32
#define BUFFER ((CHUNK + 1) * TILE) /* floats of one operand's chunk, with the zero row */
#define WORD_SLOTS 4
#define STRIPS_MOST 16                      /* of one operand in a block */
#define SLOT_WORDS (2 * STRIPS_MOST)        /* A's, then B's */
#define JOINT_WORDS 16                      /* number 29: 4 x 4 */
#define JOINTS_AT (WORD_SLOTS * SLOT_WORDS) /* words after the buffers */

static_assert(LADDER_SHARED == 4 * (4 * BUFFER + JOINTS_AT + 2 * JOINT_WORDS), "as k_ladder.c launches them");

enum Test { TEST_NOTHING, TEST_B, TEST_EACH_K, TEST_CACHED, WALK_WARP, WALK_LANE };

/* What differs from number to number. */
template <int strip_rows, int strip_cols, Test how> struct Config {
  enum {
    ROWS = strip_rows, /* 0: A has no bitmaps */
    A_STRIPS = strip_rows ? TILE / strip_rows : 0,
    B_STRIPS = TILE / strip_cols,
    TEST = how,
    FLAT = strip_rows == 8
  };
};

template <bool flat> struct ShapeOf {
  typedef Tall Type;
};
template <> struct ShapeOf<true> {
  typedef Flat Type;
};

static __device__ __forceinline__ float *buffer_a(float *shared, int chunk)
{
  return shared + chunk % 2 * 2 * BUFFER + TILE; /* row 0; the zero row is before it */
}

static __device__ __forceinline__ float *buffer_b(float *shared, int chunk)
{
  return buffer_a(shared, chunk) + BUFFER;
}

static __device__ __forceinline__ uint32_t *words_of(float *shared, int chunk)
{
  return (uint32_t *)(shared + 4 * BUFFER) + chunk % WORD_SLOTS * SLOT_WORDS;
}

static __device__ __forceinline__ uint32_t *joints_of(float *shared, int chunk)
{
  return (uint32_t *)(shared + 4 * BUFFER) + JOINTS_AT + chunk % 2 * JOINT_WORDS;
}

/* Where a block's tile lies. */
struct Place {
  int row0, col0; /* in C */
  int chunks;
};

/* ---- copies ---- */

template <typename C>
static __device__ __forceinline__ void copy_words(const ladder_params &p, const Place &place, float *shared, int chunk)
{
  const int thread = (int)threadIdx.x;
  if (thread >= SLOT_WORDS || chunk >= place.chunks)
    return;
  const bool of_b = thread >= STRIPS_MOST;
  const int i = of_b ? thread - STRIPS_MOST : thread;
  const int64_t words = p.b.k_padded / CHUNK;
  const uint32_t *bits = (const uint32_t *)p.a_bits;
  int64_t strip = 0;
  bool there = false;
  if (of_b) {
    strip = (int64_t)place.col0 / TILE * C::B_STRIPS + i;
    there = i < C::B_STRIPS && strip < p.b.strips * (C::B_STRIPS / 4);
    bits = (const uint32_t *)(C::B_STRIPS == 4 ? p.b.bits : p.b_bits8);
  } else if (C::ROWS) {
    strip = (int64_t)place.row0 / TILE * C::A_STRIPS + i;
    there = i < C::A_STRIPS && strip * C::ROWS < p.m;
  }
  copy4(words_of(shared, chunk) + thread, there ? bits + strip * words + chunk : (const uint32_t *)p.b.bits, there);
}

/* K quad q of rows r, r + 32, ...: fp32 is copied behind the warp's back, other dtypes are converted here. */
static __device__ __forceinline__ void copy_a(const ladder_params &p, const Place &place, float *to, int chunk)
{
  const int q = (int)threadIdx.x % 8, r = (int)threadIdx.x / 8;
  const int64_t k0 = (int64_t)chunk * CHUNK + 4 * q;
  const int64_t row_step = p.a.order == ESMM_ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ESMM_ROW_MAJOR ? 1 : p.a.ld;
  int64_t at = (place.row0 + r) * row_step + k0 * k_step;
  const int ks = (int)min((int64_t)4, p.k - k0);
  if (p.a.dtype == ESMM_F32) {
    const float *from = (const float *)p.a.data;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++, at += 32 * row_step)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool there = j < ks && place.row0 + r + 32 * i < p.m;
        copy4(to + (4 * q + j) * TILE + ((r + 32 * i) ^ 4 * q), from + (there ? at + j * k_step : 0), there);
      }
    return;
  }
  for (int i = 0; i < TILE / 32; i++, at += 32 * row_step)
    for (int j = 0; j < 4; j++) {
      const bool there = j < ks && place.row0 + r + 32 * i < p.m;
      to[(4 * q + j) * TILE + ((r + 32 * i) ^ 4 * q)] = there ? load_element(p.a, at + j * k_step) : 0.0f;
    }
}

/* Segments of 32 columns; those without a nonzero are not read. */
template <typename C>
static __device__ __forceinline__ void copy_b(const ladder_params &p, const Place &place, float *to, int chunk,
                                              const uint32_t *words)
{
  const int c = (int)threadIdx.x % 8, k = (int)threadIdx.x / 8;
  const int64_t strip0 = place.col0 / ESMM_STRIP;
#pragma unroll
  for (int s = 0; s < TILE / ESMM_STRIP; s++) {
    uint32_t word = words[STRIPS_MOST + s];
    if (C::B_STRIPS == 16) {
      const uint4 four = *(const uint4 *)(words + STRIPS_MOST + 4 * s);
      word = four.x | four.y | four.z | four.w;
    }
    const bool there = word >> k & 1;
    const float *from = (const float *)p.b.data;
    if (there)
      from += ((strip0 + s) * p.b.k_padded + (int64_t)chunk * CHUNK + k) * ESMM_STRIP + 4 * c;
    copy16(to + k * TILE + ESMM_STRIP * s + 4 * c, from, there);
  }
}

/* Number 29: has any pair of strips in the block a joint bit in this chunk? And the 16 joints, once for all warps. */
static __device__ __forceinline__ bool cache_joints(float *shared, int chunk)
{
  const uint32_t *words = words_of(shared, chunk);
  const uint4 a = *(const uint4 *)words, b = *(const uint4 *)(words + STRIPS_MOST);
  if (threadIdx.x < JOINT_WORDS)
    joints_of(shared, chunk)[threadIdx.x] = words[threadIdx.x / 4] & words[STRIPS_MOST + threadIdx.x % 4];
  return ((a.x | a.y | a.z | a.w) & (b.x | b.y | b.z | b.w)) != 0;
}

template <typename C>
static __device__ __forceinline__ void copy_chunk(const ladder_params &p, const Place &place, float *shared, int chunk)
{
  if (chunk < place.chunks) {
    bool needed = true;
    if (C::TEST == TEST_CACHED)
      needed = cache_joints(shared, chunk);
    if (needed) {
      copy_a(p, place, buffer_a(shared, chunk), chunk);
      copy_b<C>(p, place, buffer_b(shared, chunk), chunk, words_of(shared, chunk));
    }
  }
  copy_words<C>(p, place, shared, chunk + 1);
  copies_commit();
}

/* ---- one chunk of a warp ---- */

/* What a lane needs of a chunk: its corner of both buffers, and the bitmap words. */
struct View {
  const float *a, *b; /* at k = 0, the warp's first row; the lane's first column */
  int row;            /* of the lane in each group */
  const uint32_t *words, *joints;
  int warp_row, warp_col; /* of the warp in the block */
};

template <typename Shape>
static __device__ __forceinline__ void add_group(const View &v, int k, int g, const float (&b)[Shape::COLS],
                                                 float (&sums)[Shape::ROWS][Shape::COLS])
{
  float a[Shape::ROWS];
  load_a<Shape>(v.a + k * TILE + ((g * Shape::GROUP_ROWS + v.row) ^ (k & 28)), a);
  multiply_add<Shape>(sums, a, b);
}

/* Joint of A strip s of this warp with the warp's B strip. */
template <typename C> static __device__ __forceinline__ uint32_t joint_of(const View &v, int s)
{
  const int strip = v.warp_row * (C::A_STRIPS / 2) + s;
  if (C::TEST == TEST_CACHED)
    return v.joints[strip * 4 + v.warp_col];
  return v.words[strip] & v.words[STRIPS_MOST + v.warp_col];
}

/* Tests at every k: the branch is the same for all lanes. Groups of 32 rows may share a strip of 64. */
template <typename C, typename Shape>
static __device__ __forceinline__ void multiply_tested(const View &v, Sums<Shape> &sums)
{
  enum { STRIPS = C::TEST == TEST_NOTHING || C::TEST == TEST_B ? 1 : C::A_STRIPS / 2 };
  enum { UNROLL = C::TEST == TEST_NOTHING ? 4 : C::FLAT ? 1 : 2, BYTES = C::TEST == TEST_CACHED ? 4 : 1 };
  uint32_t masks[STRIPS], any = 0;
#pragma unroll
  for (int s = 0; s < STRIPS; s++) {
    masks[s] = C::TEST == TEST_NOTHING ? ~0u
               : C::TEST == TEST_B     ? v.words[STRIPS_MOST + v.warp_col]
                                       : joint_of<C>(v, s);
    any |= masks[s];
  }
  for (int byte = 0; byte < BYTES; byte++) {
    const int k0 = byte * (CHUNK / BYTES);
    if (C::TEST == TEST_CACHED && (any >> k0 & 255) == 0)
      continue;
#pragma unroll UNROLL
    for (int i = 0; i < CHUNK / BYTES; i++) {
      const int k = k0 + i;
      if (C::TEST != TEST_NOTHING && (any >> k & 1) == 0)
        continue;
      float b[Shape::COLS];
      load_b<Shape>(v.b + k * TILE, b);
#pragma unroll
      for (int g = 0; g < Shape::GROUPS; g++)
        if (STRIPS == 1 || (masks[g * STRIPS / Shape::GROUPS] >> k & 1))
          add_group<Shape>(v, k, g, b, sums[g]);
    }
  }
}

/* The lowest set bit, which is cleared; -1, the zero row, where there is none. */
static __device__ __forceinline__ int next_bit(uint32_t &bits)
{
  const int k = __ffs((int)bits) - 1;
  bits &= bits - 1;
  return k;
}

/* Walks joints two bits at a time, one more where their number is odd: that is the zero row. */
template <typename C> static __device__ __forceinline__ void multiply_walking(const View &v, Sums<Flat> &sums)
{
  const int lane_strip = Flat::lane_col((int)threadIdx.x % 32) / 2; /* WALK_LANE: of 8 columns, in the warp's 32 */
#pragma unroll
  for (int g = 0; g < Flat::GROUPS; g++) {
    uint32_t bits;
    int turns;
    if (C::TEST == WALK_LANE) {
      bits = v.words[v.warp_row * Flat::GROUPS + g] & v.words[STRIPS_MOST + 4 * v.warp_col + lane_strip];
      turns = (int)__reduce_max_sync(~0u, (unsigned)__popc(bits));
    } else {
      bits = joint_of<C>(v, g);
      turns = __popc(bits);
    }
    for (int i = 0; i < turns; i += 2) {
      const int k0 = next_bit(bits), k1 = next_bit(bits);
      float b0[Flat::COLS], b1[Flat::COLS];
      load_b<Flat>(v.b + k0 * TILE, b0);
      load_b<Flat>(v.b + k1 * TILE, b1);
      add_group<Flat>(v, k0, g, b0, sums[g]);
      add_group<Flat>(v, k1, g, b1, sums[g]);
    }
  }
}

/* ---- one tile of a block ---- */

template <typename C>
static __device__ __forceinline__ void multiply_tile(const ladder_params &p, const Place &place, float *shared)
{
  typedef typename ShapeOf<C::FLAT>::Type Shape;
  constexpr bool WALKS = C::TEST == WALK_WARP || C::TEST == WALK_LANE;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int warp_row = warp / 4, warp_col = warp % 4;
  Sums<Shape> sums;
  clear_sums<Shape>(sums);

  __syncthreads(); /* the tile before has left the buffers */
  if (WALKS && threadIdx.x < TILE)
    for (int i = 0; i < 4; i++)
      shared[i * BUFFER + threadIdx.x] = 0.0f;
  copy_words<C>(p, place, shared, 0);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  copy_chunk<C>(p, place, shared, 0);

  for (int t = 0; t < place.chunks; t++) {
    copies_wait<0>();
    __syncthreads();
    copy_chunk<C>(p, place, shared, t + 1);
    View v;
    v.a = buffer_a(shared, t) + warp_row * WARP_ROWS;
    v.b = buffer_b(shared, t) + warp_col * WARP_COLS + first_col<Shape>(lane);
    v.row = first_row<Shape>(lane);
    v.words = words_of(shared, t);
    v.joints = joints_of(shared, t);
    v.warp_row = warp_row;
    v.warp_col = warp_col;
    if constexpr (WALKS)
      multiply_walking<C>(v, sums);
    else
      multiply_tested<C, Shape>(v, sums);
  }
  copies_wait<0>();
  __syncthreads();
  finish_sums<Shape>(p.epilogue, place.row0 + warp_row * WARP_ROWS, place.col0 + warp_col * WARP_COLS, sums,
                     shared + warp * WARP_ROWS * WARP_COLS);
}

template <typename C> static __device__ __forceinline__ void multiply(const ladder_params &p)
{
  extern __shared__ __align__(16) float shared[];
  const int down = tiles_of(p.m), across = tiles_of(p.n), chunks = (int)(p.b.k_padded / CHUNK);
  for (unsigned tile = blockIdx.x; tile < (unsigned)down * (unsigned)across; tile += gridDim.x) {
    int tile_row, tile_col;
    tile_at((int)tile, down, across, &tile_row, &tile_col);
    const Place place = {tile_row * TILE, tile_col * TILE, chunks};
    multiply_tile<C>(p, place, shared);
  }
}

/* ---- A's bitmaps: a warp a word, its lanes are 32 k's; of the bits of an element all but the sign ---- */

template <int strip_rows, typename T>
static __device__ __forceinline__ uint32_t column_bits(const T *at, int64_t step, int rows)
{
  uint32_t any = 0;
#pragma unroll 8
  for (int r = 0; r < strip_rows; r++)
    if (r < rows)
      any |= at[r * step];
  return any << (32 - (int)(8 * sizeof(T)) + 1);
}

template <int strip_rows> static __device__ __forceinline__ void extract(const ladder_params &p)
{
  const int lane = (int)threadIdx.x % 32, words = (int)(p.b.k_padded / CHUNK);
  const int64_t row_step = p.a.order == ESMM_ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ESMM_ROW_MAJOR ? 1 : p.a.ld;
  const uint32_t all = (uint32_t)((p.m + strip_rows - 1) / strip_rows) * (uint32_t)words;
  for (uint32_t i = blockIdx.x * WARPS + threadIdx.x / 32; i < all; i += gridDim.x * WARPS) {
    const int64_t row0 = (int64_t)(i / (uint32_t)words) * strip_rows;
    const int64_t k = (int64_t)(i % (uint32_t)words) * CHUNK + lane, at = row0 * row_step + k * k_step;
    const int rows = (int)min((int64_t)strip_rows, p.m - row0);
    uint32_t any = 0;
    if (k < p.k)
      with_bits(p.a.dtype, [&](auto of) {
        any = column_bits<strip_rows>((const typename decltype(of)::bits *)p.a.data + at, row_step, rows);
      });
    const uint32_t word = __ballot_sync(~0u, any != 0);
    if (lane == 0)
      ((uint32_t *)p.a_bits)[i] = word;
  }
}

/* ---- B's bitmaps of 8 columns from those of 32: a warp a word, its lanes are 32 columns ---- */

extern "C" __global__ void __launch_bounds__(THREADS) ladder_b_bits8(const __grid_constant__ ladder_params p)
{
  if (not_selected(p.selector))
    return;
  const int lane = (int)threadIdx.x % 32, words = (int)(p.b.k_padded / CHUNK);
  const uint32_t all = (uint32_t)p.b.strips * (uint32_t)words;
  for (uint32_t i = blockIdx.x * WARPS + threadIdx.x / 32; i < all; i += gridDim.x * WARPS) {
    const float *segment = (const float *)p.b.data + (int64_t)i * CHUNK * ESMM_STRIP + lane;
    const uint32_t alive = ((const uint32_t *)p.b.bits)[i];
    uint32_t word = 0; /* lane / 8's, of the strip of this lane's column */
#pragma unroll 8
    for (int k = 0; k < CHUNK; k++) {
      const bool set = (alive >> k & 1) && segment[k * ESMM_STRIP] != 0.0f;
      const uint32_t columns = __ballot_sync(~0u, set);
      word |= (uint32_t)((columns >> (lane & 24) & 255) != 0) << k;
    }
    const int64_t strip = (int64_t)(i / (uint32_t)words) * 4 + lane / 8;
    if (lane % 8 == 0)
      ((uint32_t *)p.b_bits8)[strip * words + i % (uint32_t)words] = word;
  }
}

/* ---- entry points ---- */

#define EXTRACT(strip_rows)                                                \
  extern "C" __global__ void __launch_bounds__(THREADS)                    \
      ladder_extract_##strip_rows(const __grid_constant__ ladder_params p) \
  {                                                                        \
    if (!not_selected(p.selector))                                         \
      extract<strip_rows>(p);                                              \
  }

EXTRACT(8)
EXTRACT(32)
EXTRACT(64)

#define APART(number, ...)                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, LADDER_BLOCKS) \
      ladder_##number(const __grid_constant__ ladder_params p)         \
  {                                                                    \
    if (!not_selected(p.selector))                                     \
      multiply<Config<__VA_ARGS__>>(p);                                \
  }

/* All blocks of the grid are there at once (a cooperative launch), and the selector is the same for all. */
#define FUSED(number, ...)                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, LADDER_BLOCKS) \
      ladder_##number(const __grid_constant__ ladder_params p)         \
  {                                                                    \
    if (not_selected(p.selector))                                      \
      return;                                                          \
    extract<Config<__VA_ARGS__>::ROWS>(p);                             \
    cooperative_groups::this_grid().sync();                            \
    multiply<Config<__VA_ARGS__>>(p);                                  \
  }

APART(10, LADDER_10, TEST_NOTHING)
APART(17, LADDER_17, TEST_B)
APART(20, LADDER_20, TEST_EACH_K)
APART(21, LADDER_21, TEST_EACH_K)
FUSED(25, LADDER_25, TEST_EACH_K)
FUSED(28, LADDER_28, WALK_WARP)
APART(29, LADDER_29, TEST_CACHED)
APART(30, LADDER_30, WALK_LANE)
