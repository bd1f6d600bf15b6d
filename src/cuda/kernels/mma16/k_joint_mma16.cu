/*
 * k_joint_mma16.cu: the product of the k's that a strip of 128 rows of A and a tile of 128 columns of B both need, by
 * mma.sync. See mma16.cuh for the product.
 *
 * esmm_joint_mma16_extract reads A once: a bitmap for each strip and, unless A is col-major already, its alive lines
 * (128 rows at one k, 256 bytes), k-major. A block of the product takes the bitmaps of its strip and its tile, lists
 * the k's that are in both, up to 8192 k's at a time, and gathers the lines of A and B that the list names. Two blocks
 * share a multiprocessor, so that one multiplies while the other lists.
 *
 * Floor of the extraction: A read, its alive lines written. A block of it takes 128 rows by 64 k's.
 */
#include "cuda/kernels/mma16/mma16.cuh"

#define STRIP ESMM_TILE
#define X_K ESMM_MMA16_EXTRACT_K
#define X_THREADS ESMM_MMA16_EXTRACT_THREADS
#define X_WARPS (X_THREADS / 32)
#define LINES (X_K / X_WARPS) /* k's of a warp: a byte of the bitmap */

/* ---- extraction ---- */

/* Eight elements in a row, those of the first `have` that exist. */
static __device__ __forceinline__ uint4 load_8(const uint16_t *from, int have, bool vectors)
{
  if (vectors && have >= 8)
    return *(const uint4 *)from;
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    pair[i] = (2 * i < have ? from[2 * i] : 0u) | (2 * i + 1 < have ? from[2 * i + 1] : 0u) << 16;
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/*
 * A row-major: lane l of a warp gets rows 4l to 4l + 3 of its k's. Shared memory turns the block round: word j of a
 * line holds k's 2j and 2j + 1, and row 4l + i lies in line 32i + l, so that neither side meets in a bank.
 */
static __device__ __forceinline__ void lines_of_rows(const esmm_device_matrix &a, uint32_t (*tile)[X_K / 2 + 1],
                                                     int64_t row0, int64_t k0, uint2 (&line)[LINES])
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const bool vectors = a.data % 16 == 0 && a.ld % 8 == 0;
  const int64_t k = k0 + lane % 8 * 8;
  const int have = (int)max((int64_t)0, min(a.cols - k, (int64_t)8));
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t row = row0 + (warp * 4 + lane / 8) * 4 + i;
    x[i] = load_8((const uint16_t *)a.data + row * a.ld + k, row < a.rows ? have : 0, vectors);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t *to = tile[32 * i + warp * 4 + lane / 8] + lane % 8 * 4;
    to[0] = x[i].x, to[1] = x[i].y, to[2] = x[i].z, to[3] = x[i].w;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < LINES; j += 2) {
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      rows[i] = tile[32 * i + lane][(warp * LINES + j) / 2];
    line[j] = make_uint2(__byte_perm(rows[0], rows[1], 0x5410), __byte_perm(rows[2], rows[3], 0x5410));
    line[j + 1] = make_uint2(__byte_perm(rows[0], rows[1], 0x7632), __byte_perm(rows[2], rows[3], 0x7632));
  }
}

/* A col-major: as it lies. */
static __device__ __forceinline__ void lines_of_cols(const esmm_device_matrix &a, int64_t row0, int64_t k0,
                                                     uint2 (&line)[LINES])
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const bool vectors = a.data % 8 == 0 && a.ld % 4 == 0;
  const int64_t row = row0 + lane * 4;
#pragma unroll
  for (int j = 0; j < LINES; j++) {
    const int64_t k = k0 + warp * LINES + j;
    const uint16_t *from = (const uint16_t *)a.data + k * a.ld + row;
    const int have = k < a.cols ? (int)max((int64_t)0, min(a.rows - row, (int64_t)4)) : 0;
    if (vectors && have == 4)
      line[j] = *(const uint2 *)from;
    else
      line[j] = make_uint2((0 < have ? from[0] : 0u) | (1 < have ? from[1] : 0u) << 16,
                           (2 < have ? from[2] : 0u) | (3 < have ? from[3] : 0u) << 16);
  }
}

/* Blocks: chunks of X_K k's of the first strip, then of the next. */
extern "C" __global__ void __launch_bounds__(X_THREADS, 4)
    esmm_joint_mma16_extract(const __grid_constant__ esmm_mma16_extract_params p)
{
  __shared__ uint32_t tile[STRIP][X_K / 2 + 1];
  if (not_selected(p.selector))
    return;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const uint32_t chunks = (uint32_t)((p.words * 32 + X_K - 1) / X_K);
  const int64_t strip = blockIdx.x / chunks, k0 = (int64_t)(blockIdx.x % chunks) * X_K;
  uint2 line[LINES];
  if (p.a.order == ESMM_ROW_MAJOR)
    lines_of_rows(p.a, tile, strip * STRIP, k0, line);
  else
    lines_of_cols(p.a, strip * STRIP, k0, line);
  const int64_t k = k0 + warp * LINES;
  if (k >= p.words * 32)
    return;
  uint2 *to = (uint2 *)((uint16_t *)p.data + (strip * p.words * 32 + k) * STRIP) + lane;
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < LINES; j++) {
    const bool alive = __any_sync(~0u, ((line[j].x | line[j].y) & 0x7fff7fffu) != 0); /* without the signs: -0 is 0 */
    bits |= (uint32_t)alive << j;
    if (p.data && alive)
      to[j * (STRIP / 4)] = line[j];
  }
  if (lane == 0)
    ((uint8_t *)p.bits)[strip * p.words * 4 + k / 8] = (uint8_t)bits;
}

/* ---- the product ---- */

typedef mma16_128 shape;
#define WARP_WORDS (ESMM_MMA16_WINDOW / 32 / shape::WARPS)

typedef struct joint_list {
  uint16_t k[ESMM_MMA16_WINDOW];
  uint32_t counts[shape::WARPS];
} joint_list;
static_assert(M16_STAGES * shape::STAGE + sizeof(joint_list) <= ESMM_MMA16_JOINT_SHARED, "the list has no room");

/* Lists the bits that are set in both bitmaps of `words` words, in order; returns how many there are. */
static __device__ __forceinline__ int make_list(joint_list *list, const uint32_t *a, const uint32_t *b, int words)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const uint32_t below = (1u << lane) - 1;
  uint32_t word[WARP_WORDS / 32], before[WARP_WORDS / 32], mine = 0;
#pragma unroll
  for (int i = 0; i < WARP_WORDS / 32; i++) {
    const int at = warp * WARP_WORDS + i * 32 + lane;
    word[i] = at < words ? a[at] & b[at] : 0;
    uint32_t sum = (uint32_t)__popc(word[i]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t left = __shfl_up_sync(~0u, sum, d);
      sum += lane >= d ? left : 0;
    }
    before[i] = mine + sum - (uint32_t)__popc(word[i]);
    mine += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0)
    list->counts[warp] = mine;
  __syncthreads();
  uint32_t start = 0, count = 0;
#pragma unroll
  for (int i = 0; i < shape::WARPS; i++) {
    start += i < warp ? list->counts[i] : 0;
    count += list->counts[i];
  }
#pragma unroll
  for (int i = 0; i < WARP_WORDS / 32; i++)
    for (int j = 0; j < 32; j++) {
      const uint32_t bits = __shfl_sync(~0u, word[i], j), at = start + __shfl_sync(~0u, before[i], j);
      if (bits >> lane & 1)
        list->k[at + __popc(bits & below)] = (uint16_t)((warp * WARP_WORDS + i * 32 + j) * 32 + lane);
    }
  __syncthreads();
  return (int)count;
}

template <esmm_dtype DTYPE> static __device__ __forceinline__ void joint(const esmm_mma16_params &p)
{
  extern __shared__ __align__(128) char ring[];
  joint_list *list = (joint_list *)(ring + M16_STAGES * shape::STAGE);
  if (not_selected(p.selector))
    return;
  int64_t row0, col0;
  mma16_block_at<shape>(p, row0, col0);
  const int64_t strip = row0 / STRIP;
  const uint32_t *a_bits = (const uint32_t *)p.a_bits + strip * p.words;
  const uint32_t *b_bits = (const uint32_t *)p.b_bits + col0 / STRIP * p.words;
  mma16_feed a = mma16_feed_k<mma16_share_k<shape, shape::ROWS>, true>(p.a + (uint64_t)(strip * p.a_strip) * 2, p.a_ld,
                                                                       0, p.m - row0);
  mma16_feed b = mma16_feed_k<mma16_share_k<shape, shape::COLS>, true>(p.b, p.b_ld, col0, p.b_ld);
  float sum[shape::TILES_M][shape::TILES_N][4];
  mma16_clear<shape>(sum);
  for (int64_t word = 0; word < p.words; word += ESMM_MMA16_WINDOW / 32) {
    const int words = (int)min(p.words - word, (int64_t)(ESMM_MMA16_WINDOW / 32));
    const int count = make_list(list, a_bits + word, b_bits + word, words);
    if (count > 0)
      mma16_multiply<shape, DTYPE, M16_LISTED>(sum, (uint32_t)__cvta_generic_to_shared(ring), a, b, count, list->k);
    a.from += ESMM_MMA16_WINDOW * a.piece;
    b.from += ESMM_MMA16_WINDOW * b.piece;
  }
  mma16_store<shape>(p.epilogue, ring, sum, row0, col0);
}

#define JOINT(id, dtype)                                                      \
  extern "C" __global__ void __launch_bounds__(shape::THREADS, shape::BLOCKS) \
      esmm_joint_##id(const __grid_constant__ esmm_mma16_params p)            \
  {                                                                           \
    joint<dtype>(p);                                                          \
  }

JOINT(bf16, ESMM_BF16)
JOINT(f16, ESMM_F16)
