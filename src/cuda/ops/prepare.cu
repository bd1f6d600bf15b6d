/*
 * prepare.cu: B once. esmm_prepare16 makes all that weights keep of a 16-bit B in one read of it: its rows, padded to
 * 128 columns, the bitmaps of its strips, the blocks of 2:4 weights (nm_layout.h), how many nonzeros there are and
 * whether it is 2:4 at all. esmm_prepare_bits makes what follows from the bitmaps, whatever B's dtype.
 *
 * Floor of esmm_prepare16: B is read once and what is kept of it written once. A block takes 64 k's by 128 columns, a
 * block of the form nm16, so a B of any useful size has thousands; a thread has four vectors of eight columns under way
 * at once. They go to shared memory, too, where the groups of four k's are read down the columns.
 */
#include "cuda/kernels/common/device.cuh"
#include "cuda/ops/nm_layout.h"

#define THREADS ESMM_PREPARE_THREADS
#define WARPS (THREADS / 32)
#define ROWS ESMM_PREPARE_K
#define COLS ESMM_TILE
#define CHUNKS (COLS / 8)          /* vectors of a row */
#define STEP (THREADS / CHUNKS)    /* rows between the vectors of a thread */
#define VECTORS (ROWS / STEP)      /* of a thread */
#define STRIPS (COLS / ESMM_STRIP) /* of a block */
#define LINE (COLS + 2)            /* elements: lines of 65 words, so that neighbouring k's lie in other banks */

static_assert(ROWS == ESMM_NM16_K && COLS == ESMM_NM16_COLS, "a block is a block of the form nm16");
static_assert(WARPS == STRIPS * ROWS / 32, "a warp writes a word of the bitmaps");

typedef union vector8 {
  uint4 all;
  uint32_t word[4];
} vector8;

/* The top bits of the halves of a word that are not zero, whatever their sign. */
static __device__ __forceinline__ uint32_t nonzero_halves(uint32_t word)
{
  return ((word & 0x7fff7fffu) + 0x7fff7fffu) & 0x80008000u;
}

/* ---- loading: into the thread's vectors, and into the tile ---- */

/* Rows as they lie. */
static __device__ __forceinline__ void load_vectors(const esmm_device_matrix &b, int64_t k0, int64_t j0,
                                                    vector8 (&v)[VECTORS], uint16_t (*tile)[LINE])
{
  const int chunk = (int)threadIdx.x % CHUNKS, row0 = (int)threadIdx.x / CHUNKS;
  const int64_t col = j0 + 8 * chunk;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int64_t k = k0 + row0 + i * STEP;
    const uint16_t *from = (const uint16_t *)b.data + k * b.ld + col;
    v[i].all = make_uint4(0, 0, 0, 0);
    if (k < b.rows && col + 8 <= b.cols)
      v[i].all = *(const uint4 *)from;
    else if (k < b.rows)
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (col + e < b.cols)
          v[i].word[e / 2] |= (uint32_t)from[e] << (16 * (e % 2));
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
#pragma unroll
    for (int w = 0; w < 4; w++)
      *(uint32_t *)&tile[row0 + i * STEP][8 * chunk + 2 * w] = v[i].word[w];
}

/* Any order and alignment: element by element, neighbours in memory by neighbouring threads. */
static __device__ __forceinline__ void load_elements(const esmm_device_matrix &b, int64_t k0, int64_t j0,
                                                     vector8 (&v)[VECTORS], uint16_t (*tile)[LINE])
{
  const bool by_rows = b.order == ESMM_ROW_MAJOR;
#pragma unroll 4
  for (int at = (int)threadIdx.x; at < ROWS * COLS; at += THREADS) {
    const int r = by_rows ? at / COLS : at % ROWS, c = by_rows ? at % COLS : at / ROWS;
    const bool there = k0 + r < b.rows && j0 + c < b.cols;
    tile[r][c] = there ? ((const uint16_t *)b.data)[element_at(b, k0 + r, j0 + c)] : (uint16_t)0;
  }
  __syncthreads();
  const int chunk = (int)threadIdx.x % CHUNKS, row0 = (int)threadIdx.x / CHUNKS;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
#pragma unroll
    for (int w = 0; w < 4; w++)
      v[i].word[w] = *(const uint32_t *)&tile[row0 + i * STEP][8 * chunk + 2 * w];
}

/* ---- what is made of them ---- */

/* The thread's vectors to the dense copy; which strips have which k's to alive; returns how many are not zero. */
static __device__ __forceinline__ unsigned take_vectors(const esmm_prepare16_params &p, int64_t k0, int64_t j0,
                                                        const vector8 (&v)[VECTORS], uint8_t (*alive)[ROWS])
{
  const int chunk = (int)threadIdx.x % CHUNKS, row0 = (int)threadIdx.x / CHUNKS;
  unsigned nonzero = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int row = row0 + i * STEP;
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const uint32_t found = nonzero_halves(v[i].word[w]);
      nonzero += __popc(found);
      any |= found;
    }
    any |= __shfl_xor_sync(~0u, any, 1);
    any |= __shfl_xor_sync(~0u, any, 2); /* the four vectors of a strip */
    if (chunk % 4 == 0)
      alive[chunk / 4][row] = any != 0;
    if (p.rows && k0 + row < p.b.rows)
      *(uint4 *)((uint16_t *)p.rows + (k0 + row) * p.rows_ld + j0 + 8 * chunk) = v[i].all;
  }
  return nonzero;
}

/* A word of the bitmaps by each warp. */
static __device__ __forceinline__ void store_bits(const esmm_prepare16_params &p, int64_t k0, int64_t j0,
                                                  const uint8_t (*alive)[ROWS])
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, s = warp / (ROWS / 32),
            part = warp % (ROWS / 32);
  const uint32_t bits = __ballot_sync(~0u, alive[s][32 * part + lane] != 0);
  const int64_t strip = j0 / ESMM_STRIP + s, word = k0 / 32 + part;
  if (lane == 0 && strip < p.strips && word < p.words)
    ((uint32_t *)p.bits)[strip * p.words + word] = bits;
}

/* The block of the form nm16: 128 threads a half, two columns by 16 k's each, with places in one word. */
static __device__ __forceinline__ void store_nm(const esmm_prepare16_params &p, int64_t k0, int64_t j0,
                                                const uint16_t (*tile)[LINE])
{
  const int half = (int)threadIdx.x / 128, warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32,
            segment = lane % 4;
  char *out = (char *)p.nm + esmm_nm16_block_at(j0 / ESMM_NM16_COLS, k0 / ESMM_NM16_K, esmm_nm16_blocks(p.b.rows));
  uint32_t word = 0;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int col = half * ESMM_NM16_LINES + 16 * warp + lane / 4 + 8 * h;
    uint32_t values[4];
#pragma unroll
    for (int g = 0; g < 4; g++) {
      const int k = 16 * segment + 4 * g;
      const uint32_t low = tile[k][col] | (uint32_t)tile[k + 1][col] << 16,
                     high = tile[k + 2][col] | (uint32_t)tile[k + 3][col] << 16;
      const uint32_t x = nonzero_halves(low), y = nonzero_halves(high);
      const uint32_t mask = (x >> 15 & 1) | (x >> 30 & 2) | (y >> 13 & 4) | (y >> 28 & 8);
      const uint32_t places = esmm_nm16_places(mask);
      values[g] = __byte_perm(low, high, 0x1010 + (places & 3) * 0x22 + (places >> 2) * 0x2200);
      word |= places << esmm_nm16_shift(col, 4 * segment + g);
      if (p.check && __popc(mask) > 2)
        atomicMax((unsigned long long *)&((esmm_prepare_found *)p.found)->misfit,
                  ~(unsigned long long)(((k0 + k) / 4 * p.b.cols + j0 + col) * 64 + __popc(mask)));
    }
    *(uint4 *)(out + esmm_nm16_value_at(col, 8 * segment)) = make_uint4(values[0], values[1], values[2], values[3]);
    if (h == 1)
      *(uint32_t *)(out + esmm_nm16_word_at(col, 4 * segment)) = word;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) esmm_prepare16(const __grid_constant__ esmm_prepare16_params p)
{
  __shared__ __align__(16) uint16_t tile[ROWS][LINE];
  __shared__ uint8_t alive[STRIPS][ROWS];
  const int64_t across = (p.b.cols + COLS - 1) / COLS, all = across * ((p.b.rows + ROWS - 1) / ROWS);
  unsigned long long nonzero = 0;
  for (int64_t at = blockIdx.x; at < all; at += gridDim.x) {
    const int64_t k0 = at / across * ROWS, j0 = at % across * COLS;
    vector8 v[VECTORS];
    if (p.vectors)
      load_vectors(p.b, k0, j0, v, tile);
    else
      load_elements(p.b, k0, j0, v, tile);
    nonzero += take_vectors(p, k0, j0, v, alive);
    __syncthreads();
    store_bits(p, k0, j0, alive);
    if (p.nm)
      store_nm(p, k0, j0, tile);
    __syncthreads(); /* the tile and alive are written again */
  }
  __shared__ unsigned long long sums[WARPS]; /* one addition a block: all go to one place in memory */
  for (int d = 16; d > 0; d /= 2)
    nonzero += __shfl_xor_sync(~0u, nonzero, d);
  if (threadIdx.x % 32 == 0)
    sums[threadIdx.x / 32] = nonzero;
  __syncthreads();
  if (threadIdx.x > 0)
    return;
  for (int i = 1; i < WARPS; i++)
    nonzero += sums[i];
  if (nonzero > 0)
    atomicAdd((unsigned long long *)&((esmm_prepare_found *)p.found)->nonzero, nonzero);
}

/* ---- what follows from the bitmaps ---- */

/* For each lane: how many of the warp's words have its bit. */
static __device__ __forceinline__ uint32_t count_columns(uint32_t word)
{
  const int lane = (int)threadIdx.x % 32;
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const uint32_t having = __popc(__ballot_sync(~0u, word >> i & 1));
    mine = lane == i ? having : mine;
  }
  return mine;
}

/* A block for each word: 32 k's, all strips, 32 of them a warp's at a time. */
extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_prepare_bits(const __grid_constant__ esmm_prepare_bits_params p)
{
  __shared__ uint32_t sums[2][WARPS][32]; /* strips, tiles that have the k */
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  for (int64_t w = blockIdx.x; w < p.words; w += gridDim.x) {
    const int64_t left = p.k - 32 * w;
    const uint32_t full = left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
    uint32_t strips_with = 0, tiles_with = 0, set = 0, tile_set = 0;
    for (int64_t first = 32 * warp; first < p.strips; first += 32 * WARPS) {
      const int64_t s = first + lane;
      const bool there = s < p.strips;
      uint32_t *at = (uint32_t *)p.bits + s * p.words + w;
      uint32_t word = there ? *at : 0;
      set += __popc(word);
      if (p.strict && there)
        *at = word = full;
      strips_with += count_columns(word);
      if (!p.tiles)
        continue;
      word |= __shfl_xor_sync(~0u, word, 1);
      word |= __shfl_xor_sync(~0u, word, 2);
      const bool head = there && lane % STRIPS == 0; /* of a tile: `first` is a multiple of 32 */
      if (head)
        ((uint32_t *)p.tiles)[s / STRIPS * p.words + w] = word;
      tile_set += head ? __popc(word) : 0;
      tiles_with += count_columns(head ? word : 0);
    }
    sums[0][warp][lane] = strips_with;
    sums[1][warp][lane] = tiles_with;
    set = __reduce_add_sync(~0u, set);
    tile_set = __reduce_add_sync(~0u, tile_set);
    esmm_prepare_found *found = (esmm_prepare_found *)p.found;
    if (lane == 0 && set > 0)
      atomicAdd((unsigned long long *)&found->set, (unsigned long long)set);
    if (lane == 0 && tile_set > 0)
      atomicAdd((unsigned long long *)&found->tile_set, (unsigned long long)tile_set);
    __syncthreads();
    if (warp < 2 && (warp == 0 || p.tiles)) {
      uint32_t having = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++)
        having += sums[warp][i][lane];
      const int64_t count = warp == 0 ? p.strips : (p.strips + STRIPS - 1) / STRIPS;
      ((float *)(warp == 0 ? p.alive : p.tile_alive))[32 * w + lane] = (float)having / (float)count;
    }
    __syncthreads();
  }
}
