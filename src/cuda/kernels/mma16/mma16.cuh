/*
 * mma16.cuh: the product of two 16-bit operands on tensor cores, by mma.sync (sm_80 and later), fp32 sums.
 * k_dense_mma16.cu reads A as the caller has it; k_joint_mma16.cu reads the k's of a list.
 *
 *   block      warps         of C each   for
 *   128 x 256  8 (2 x 4)     64 x 64     many blocks: most work for each byte of shared memory
 *   128 x 128  4 (2 x 2)     64 x 64     fewer; two at once on a multiprocessor
 *    64 x  64  4 (2 x 2)     32 x 32     small C; four at once
 *
 * A ring of 4 stages of 32 k's is filled by cp.async, three stages ahead. Stages in shared memory are lines of 16-byte
 * chunks:
 *
 *   A row-major   [rows][4 chunks of 8 k's]    chunk c of line r at c ^ (r / 2 % 4)
 *   A col-major   [32 k's][rows / 8 chunks]    chunk c of line k at c ^ (k % 8)
 *   B             [32 k's][cols / 8 chunks]    the same
 *
 * so that the eight chunks of one ldmatrix phase (eight lines, one chunk each) fall into different banks, and those of
 * eight writing threads too. Lines along k are transposed by ldmatrix on the way to registers. Fragments of the next
 * 16 k's are loaded while those of the last are multiplied.
 *
 * What lies outside the operands is filled with zeros (cp.async of fewer bytes): k's past the end of both, rows past
 * m, and columns past the padded line of B. Rows and columns that are not C's are multiplied and not stored.
 *
 * Budget: 24, 16 and 8 KiB a stage. 128 sums and 64 registers of fragments a thread for 64 x 64, 32 and 32 for 32 x 32.
 *
 * What bounds it: a warp of 64 x 64 reads 4 KiB for 32 mma's, so the largest block takes 352 cycles of shared memory
 * for each 16 k's, the copies included; the mma's take 256 at Hopper's full rate, which mma.sync does not reach.
 */
#ifndef ESMM_CUDA_MMA16_CUH
#define ESMM_CUDA_MMA16_CUH

#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/mma.cuh"

#define M16_K ESMM_MMA16_K
#define M16_STAGES ESMM_MMA16_STAGES
#define M16_GROUP 16 /* block rows that are walked together, so that they share B in L2 */

template <int ROWS_, int COLS_, int WARP_ROWS_, int WARP_COLS_, int BLOCKS_> struct mma16_shape {
  enum {
    ROWS = ROWS_,
    COLS = COLS_,
    WARP_ROWS = WARP_ROWS_,
    WARP_COLS = WARP_COLS_,
    BLOCKS = BLOCKS_, /* at once on a multiprocessor */
    WARPS_N = COLS / WARP_COLS,
    WARPS = ROWS / WARP_ROWS * WARPS_N,
    THREADS = 32 * WARPS,
    TILES_M = WARP_ROWS / 16, /* mma tiles of a warp */
    TILES_N = WARP_COLS / 8,
    A_BYTES = ROWS * M16_K * 2,
    STAGE = (ROWS + COLS) * M16_K * 2,
    DRAWER = 32 * (WARP_COLS + 8) * 4 /* shared memory in which a warp turns 32 rows of sums round, see store */
  };
  static_assert(M16_STAGES * STAGE == ESMM_MMA16_SHARED(ROWS, COLS) && THREADS == ESMM_MMA16_THREADS(ROWS, COLS),
                "params.h gives the host another shape");
  static_assert(WARPS * DRAWER <= M16_STAGES * STAGE, "the ring has no room for the sums");
};
typedef mma16_shape<128, 256, 64, 64, 1> mma16_256;
typedef mma16_shape<128, 128, 64, 64, 2> mma16_128;
typedef mma16_shape<64, 64, 32, 32, 4> mma16_64;

/* How A comes. */
enum {
  M16_ROWS,          /* row-major, lines aligned to 16 bytes */
  M16_COLS,          /* col-major, the same */
  M16_ROWS_ELEMENTS, /* row-major, any alignment */
  M16_COLS_ELEMENTS,
  M16_LISTED /* k-major strips of 128 rows, of which a list names the k's; it holds for B too */
};

static __device__ constexpr bool mma16_k_lines(int how) /* does A lie along k in shared memory? */
{
  return how == M16_COLS || how == M16_COLS_ELEMENTS || how == M16_LISTED;
}
static __device__ constexpr bool mma16_by_elements(int how)
{
  return how == M16_ROWS_ELEMENTS || how == M16_COLS_ELEMENTS;
}

/* ---- instructions ---- */

/* 16 bytes to shared memory; past the first `bytes` zeros. */
static __device__ __forceinline__ void mma16_copy(uint32_t to, const char *from, int bytes)
{
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void mma16_commit(void)
{
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> static __device__ __forceinline__ void mma16_wait(void)
{
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

static __device__ __forceinline__ void mma16_put(uint32_t to, const uint4 &x)
{
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/* ---- from memory to the ring ---- */

/* Where chunk `chunk` of a line lies in its operand's part of a stage. */
template <int CHUNKS> static __device__ __forceinline__ uint32_t mma16_place(int line, int chunk)
{
  return (uint32_t)(line * CHUNKS + (chunk ^ (CHUNKS == 4 ? line / 2 % 4 : line % 8))) * 16;
}

/* How an operand's lines are shared out: a thread copies one chunk of PIECES lines that lie STEP apart. */
template <class S, int LINES, int CHUNKS_> struct mma16_share {
  enum { CHUNKS = CHUNKS_, STEP = S::THREADS / CHUNKS, PIECES = LINES / STEP };
  static_assert(STEP % 8 == 0 && LINES % STEP == 0, "a thread's chunks are swizzled alike");
};
template <class S> struct mma16_share_rows : mma16_share<S, S::ROWS, M16_K / 8> {
};
template <class S, int WIDTH> struct mma16_share_k : mma16_share<S, M16_K, WIDTH / 8> {
};
template <class S, bool K_LINES> struct mma16_share_a : mma16_share_rows<S> {
};
template <class S> struct mma16_share_a<S, true> : mma16_share_k<S, S::ROWS> {
};

/* A thread's view of one operand. */
typedef struct mma16_feed {
  const char *from;    /* its first chunk in the next tile; with a list, that of k = 0 */
  int64_t piece, tile; /* bytes to its next chunk of the same tile, and to the first of the next tile; with a list,
                          piece is a k's line */
  int line;            /* lines along k: which is its first in a tile; else how many of its lines the matrix has */
  int inner;           /* lines along k: bytes of its chunk that the matrix has; else the k's before its chunk */
} mma16_feed;

static __device__ __forceinline__ int mma16_inner_bytes(int64_t left)
{
  return (int)min(max(left, (int64_t)0), (int64_t)8) * 2;
}

/* Lines along k: chunk 8 * `chunk` of lines `width` long that start at `at` and lie ld elements apart. */
template <class SHARE, bool LISTED>
static __device__ __forceinline__ mma16_feed mma16_feed_k(uint64_t at, int64_t ld, int64_t begin, int64_t width)
{
  const int line = (int)threadIdx.x / SHARE::CHUNKS;
  const int64_t inner = begin + (int)threadIdx.x % SHARE::CHUNKS * 8;
  mma16_feed f;
  f.from = (const char *)at + (LISTED ? inner : line * ld + inner) * 2;
  f.piece = (LISTED ? 1 : SHARE::STEP) * ld * 2;
  f.tile = M16_K * ld * 2;
  f.line = line;
  f.inner = mma16_inner_bytes(width - inner);
  return f;
}

template <class SHARE>
static __device__ __forceinline__ mma16_feed mma16_feed_rows(uint64_t at, int64_t ld, int64_t row0, int64_t rows)
{
  const int line = (int)threadIdx.x / SHARE::CHUNKS, before = (int)threadIdx.x % SHARE::CHUNKS * 8;
  const int64_t left = rows - row0 - line;
  mma16_feed f;
  f.from = (const char *)at + ((row0 + line) * ld + before) * 2;
  f.piece = SHARE::STEP * ld * 2;
  f.tile = M16_K * 2;
  f.line = left <= 0 ? 0 : (int)min((left + SHARE::STEP - 1) / SHARE::STEP, (int64_t)SHARE::PIECES);
  f.inner = before;
  return f;
}

/* Bytes that exist of a thread's i-th chunk, in the tile that starts at k0. */
template <class SHARE, bool K_LINES>
static __device__ __forceinline__ int mma16_bytes(const mma16_feed &f, int i, int k0, int k_end)
{
  if (K_LINES)
    return k0 + f.line + i * SHARE::STEP < k_end ? f.inner : 0;
  return i < f.line ? min(max(k_end - k0 - f.inner, 0), 8) * 2 : 0;
}

/* Starts the copies of a tile. to: this thread's first chunk in the stage. */
template <class SHARE, bool K_LINES>
static __device__ __forceinline__ void mma16_feed_tile(mma16_feed &f, uint32_t to, int k0, int k_end)
{
#pragma unroll
  for (int i = 0; i < SHARE::PIECES; i++)
    mma16_copy(to + i * SHARE::STEP * SHARE::CHUNKS * 16, f.from + i * f.piece,
               mma16_bytes<SHARE, K_LINES>(f, i, k0, k_end));
  f.from += f.tile;
}

template <class SHARE>
static __device__ __forceinline__ void mma16_feed_listed(const mma16_feed &f, uint32_t to, int k0, int k_end,
                                                         const uint16_t *list)
{
#pragma unroll
  for (int i = 0; i < SHARE::PIECES; i++) {
    const int at = k0 + f.line + i * SHARE::STEP;
    const uint32_t k = at < k_end ? list[at] : 0;
    mma16_copy(to + i * SHARE::STEP * SHARE::CHUNKS * 16, f.from + (uint64_t)k * (uint32_t)f.piece,
               at < k_end ? f.inner : 0);
  }
}

/* The same by elements, for lines that cp.async cannot read: first to registers, then to the stage. */
template <class SHARE, bool K_LINES>
static __device__ __forceinline__ void mma16_fetch_tile(mma16_feed &f, uint4 (&held)[SHARE::PIECES], int k0, int k_end)
{
#pragma unroll
  for (int i = 0; i < SHARE::PIECES; i++) {
    const uint16_t *from = (const uint16_t *)(f.from + i * f.piece);
    const int elements = mma16_bytes<SHARE, K_LINES>(f, i, k0, k_end) / 2;
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t low = 2 * j < elements ? from[2 * j] : 0, high = 2 * j + 1 < elements ? from[2 * j + 1] : 0;
      pair[j] = low | high << 16;
    }
    held[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
  f.from += f.tile;
}

template <class SHARE>
static __device__ __forceinline__ void mma16_put_tile(uint32_t to, const uint4 (&held)[SHARE::PIECES])
{
#pragma unroll
  for (int i = 0; i < SHARE::PIECES; i++)
    mma16_put(to + i * SHARE::STEP * SHARE::CHUNKS * 16, held[i]);
}

/* ---- from the ring to registers ---- */

/* A warp's operands for 16 k's. */
template <class S> struct mma16_fragments {
  uint32_t a[S::TILES_M][4], b[S::TILES_N / 2][4];
};

/*
 * Lane l = 4g + t of an mma holds rows g, g + 8 of A and column g of B, at k's 2t, 2t + 1, 2t + 8, 2t + 9. As matrices
 * of ldmatrix: of A (rows, k's) of (low, low), (high, low), (low, high), (high, high); of B, two n8 tiles at once,
 * (k's, columns) of (low, first), (high, first), (low, second), (high, second).
 */
template <class S, bool K_LINES>
static __device__ __forceinline__ void mma16_load_fragments(mma16_fragments<S> &f, uint32_t stage, int step)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int row0 = warp / S::WARPS_N * S::WARP_ROWS, col0 = warp % S::WARPS_N * S::WARP_COLS;
#pragma unroll
  for (int i = 0; i < S::TILES_M; i++) {
    if (K_LINES)
      mma16_load_transposed(f.a[i],
                            stage + step * 16 * S::ROWS * 2 +
                                mma16_place<S::ROWS / 8>(lane % 8 + lane / 16 * 8, row0 / 8 + i * 2 + lane / 8 % 2));
    else
      mma16_load(f.a[i], stage + i * 16 * M16_K * 2 + mma16_place<M16_K / 8>(row0 + lane % 16, step * 2 + lane / 16));
  }
#pragma unroll
  for (int j = 0; j < S::TILES_N / 2; j++)
    mma16_load_transposed(f.b[j], stage + S::A_BYTES + step * 16 * S::COLS * 2 +
                                      mma16_place<S::COLS / 8>(lane % 16, col0 / 8 + j * 2 + lane / 16));
}

template <class S, esmm_dtype DTYPE>
static __device__ __forceinline__ void mma16_multiply_step(float (&sum)[S::TILES_M][S::TILES_N][4],
                                                           const mma16_fragments<S> &f)
{
#pragma unroll
  for (int i = 0; i < S::TILES_M; i++)
#pragma unroll
    for (int j = 0; j < S::TILES_N; j++)
      mma16_mma<DTYPE>(sum[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
}

/* ---- the loop over k ---- */

/* Adds the products of k's 0 .. k_end - 1 (with a list: of its entries) to sum. Leaves the ring empty. */
template <class S, esmm_dtype DTYPE, int HOW>
static __device__ __forceinline__ void mma16_multiply(float (&sum)[S::TILES_M][S::TILES_N][4], uint32_t ring,
                                                      mma16_feed a, mma16_feed b, int k_end, const uint16_t *list)
{
  constexpr bool K_LINES = mma16_k_lines(HOW);
  typedef mma16_share_a<S, K_LINES> share_a;
  typedef mma16_share_k<S, S::COLS> share_b;
  const int tid = (int)threadIdx.x, tiles = (k_end + M16_K - 1) / M16_K;
  const uint32_t a_to = ring + mma16_place<share_a::CHUNKS>(tid / share_a::CHUNKS, tid % share_a::CHUNKS);
  const uint32_t b_to = ring + S::A_BYTES + mma16_place<share_b::CHUNKS>(tid / share_b::CHUNKS, tid % share_b::CHUNKS);
  uint4 held[share_a::PIECES];
  mma16_fragments<S> low, high = {}; /* of the two steps of a tile; the first time, high adds zeros */
#pragma unroll
  for (int t = 0; t < M16_STAGES - 1; t++) {
    if (t < tiles) {
      if (HOW == M16_LISTED) {
        mma16_feed_listed<share_a>(a, a_to + t * S::STAGE, t * M16_K, k_end, list);
        mma16_feed_listed<share_b>(b, b_to + t * S::STAGE, t * M16_K, k_end, list);
      } else {
        if (mma16_by_elements(HOW)) {
          mma16_fetch_tile<share_a, K_LINES>(a, held, t * M16_K, k_end);
          mma16_put_tile<share_a>(a_to + t * S::STAGE, held);
        } else {
          mma16_feed_tile<share_a, K_LINES>(a, a_to + t * S::STAGE, t * M16_K, k_end);
        }
        mma16_feed_tile<share_b, true>(b, b_to + t * S::STAGE, t * M16_K, k_end);
      }
    }
    mma16_commit();
  }
  for (int t = 0; t < tiles; t++) {
    /* The stage that is filled here was read to its end before this barrier. */
    const int ahead = t + M16_STAGES - 1;
    const uint32_t stage = ring + t % M16_STAGES * S::STAGE, fill = ahead % M16_STAGES * S::STAGE;
    mma16_wait<M16_STAGES - 2>();
    __syncthreads();
    mma16_load_fragments<S, K_LINES>(low, stage, 0);
    if (ahead < tiles) {
      if (HOW == M16_LISTED) {
        mma16_feed_listed<share_a>(a, a_to + fill, ahead * M16_K, k_end, list);
        mma16_feed_listed<share_b>(b, b_to + fill, ahead * M16_K, k_end, list);
      } else {
        if (mma16_by_elements(HOW))
          mma16_fetch_tile<share_a, K_LINES>(a, held, ahead * M16_K, k_end);
        else
          mma16_feed_tile<share_a, K_LINES>(a, a_to + fill, ahead * M16_K, k_end);
        mma16_feed_tile<share_b, true>(b, b_to + fill, ahead * M16_K, k_end);
      }
    }
    mma16_commit();
    mma16_multiply_step<S, DTYPE>(sum, high); /* the last tile's: no barrier comes between loading and multiplying */
    mma16_load_fragments<S, K_LINES>(high, stage, 1);
    mma16_multiply_step<S, DTYPE>(sum, low);
    if (mma16_by_elements(HOW) && ahead < tiles)
      mma16_put_tile<share_a>(a_to + fill, held);
  }
  mma16_multiply_step<S, DTYPE>(sum, high);
  mma16_wait<0>();
  __syncthreads();
}

/* ---- from registers to C ---- */

/* 32 rows of a warp's sums, `stride` floats apart, to C from (row0, col0) on. */
template <int COLS>
static __device__ __forceinline__ void mma16_store_rows(const esmm_epilogue_params &e, const float *from, int stride,
                                                        int64_t row0, int64_t col0)
{
  const int lane = (int)threadIdx.x % 32;
  if (has_vectors(e.c) && col0 + COLS <= e.c.cols) {
#pragma unroll 2
    for (int i = lane; i < 32 * COLS / 8; i += 32) {
      const int row = i / (COLS / 8), col = i % (COLS / 8) * 8;
      const float4 *at = (const float4 *)(from + row * stride + col);
      const float4 low = at[0], high = at[1];
      float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      if (row0 + row < e.c.rows)
        finish_8(e, row0 + row, col0 + col, x);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < COLS; i++) { /* along C's lines: a row, or eight rows of four columns */
    const bool along_rows = e.c.order == ESMM_ROW_MAJOR;
    const int row = along_rows ? (i * 32 + lane) / COLS : i % 4 * 8 + lane % 8;
    const int col = along_rows ? (i * 32 + lane) % COLS : i / 4 * 4 + lane / 8;
    if (row0 + row < e.c.rows && col0 + col < e.c.cols)
      finish_element(e, row0 + row, col0 + col, from[row * stride + col]);
  }
}

/* A block's sums to C. Each warp turns its own round in the ring, which is empty, 32 rows at a time. */
template <class S>
static __device__ __forceinline__ void mma16_store(const esmm_epilogue_params &e, char *ring,
                                                   const float (&sum)[S::TILES_M][S::TILES_N][4], int64_t row0,
                                                   int64_t col0)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, stride = S::WARP_COLS + 8;
  float *drawer = (float *)(ring + warp * S::DRAWER);
  float *to = drawer + lane / 4 * stride + lane % 4 * 2;
  row0 += warp / S::WARPS_N * S::WARP_ROWS;
  col0 += warp % S::WARPS_N * S::WARP_COLS;
#pragma unroll
  for (int i = 0; i < S::TILES_M; i++) {
#pragma unroll
    for (int j = 0; j < S::TILES_N; j++) {
      *(float2 *)(to + i % 2 * 16 * stride + j * 8) = make_float2(sum[i][j][0], sum[i][j][1]);
      *(float2 *)(to + (i % 2 * 16 + 8) * stride + j * 8) = make_float2(sum[i][j][2], sum[i][j][3]);
    }
    if (i % 2 == 0)
      continue;
    __syncwarp();
    mma16_store_rows<S::WARP_COLS>(e, drawer, stride, row0 + i / 2 * 32, col0);
    __syncwarp();
  }
}

/* ---- a block ---- */

/* Which block of C this is: groups of M16_GROUP block rows, column by column. */
template <class S>
static __device__ __forceinline__ void mma16_block_at(const esmm_mma16_params &p, int64_t &row0, int64_t &col0)
{
  const uint32_t rows = (uint32_t)((p.m + S::ROWS - 1) / S::ROWS), cols = (uint32_t)((p.n + S::COLS - 1) / S::COLS);
  const uint32_t group = blockIdx.x / (M16_GROUP * cols), in_group = blockIdx.x % (M16_GROUP * cols);
  const uint32_t height = min((uint32_t)M16_GROUP, rows - group * M16_GROUP);
  row0 = (int64_t)(group * M16_GROUP + in_group % height) * S::ROWS;
  col0 = (int64_t)(in_group / height) * S::COLS;
}

template <class S> static __device__ __forceinline__ void mma16_clear(float (&sum)[S::TILES_M][S::TILES_N][4])
{
#pragma unroll
  for (int i = 0; i < S::TILES_M; i++)
#pragma unroll
    for (int j = 0; j < S::TILES_N; j++)
      sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0.0f;
}

#endif
