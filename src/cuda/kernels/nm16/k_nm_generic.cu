/*
 * k_nm_generic.cu: bf16 and fp16 with N:M weights of any kind, on any GPU: right before fast.
 *
 * B stays as its form keeps it in memory, and what is read of it are its kept values and their places. A block takes 64
 * x 64 of C; for every 64 k's, or as many whole groups as fit into 64, it puts the kept values where they belong in a
 * tile of zeros, and multiplies with mma:
 *
 *      values, places                B in shared memory [k][64]          C
 *      slot 0   a b c d ...          k=0  a . c .                        64 x 64: a warp 16 rows by 32 columns
 *      slot 1   e f g h ...   --->   k=1  . b . d
 *                                    k=2  e . . .
 *                                    k=3  . f g h
 *
 * So it spares the reading of zeros, not their arithmetic. It serves groups that do not fit 2:4, and GPUs other than
 * Hopper; nothing is in flight while it multiplies, which is what limits it.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/ops/nm_layout.h"

#include <mma.h>

using namespace nvcuda;

#define TILE ESMM_NM_GENERIC_TILE
#define CHUNK ESMM_NM_GENERIC_K
#define THREADS ESMM_NM_GENERIC_THREADS
#define LD (CHUNK + 8)     /* elements of a line of a tile in shared memory */
#define SUMS_LD (TILE + 4) /* floats of a line of sums */
static_assert(TILE == 64 && CHUNK == 64 && THREADS == 256 && ESMM_NM16_LINES == TILE && ESMM_NM16_K == CHUNK,
              "what a warp has of a tile");

typedef union generic_shared {
  struct {
    alignas(32) uint16_t a[TILE][LD], b[CHUNK][LD]; /* [row][k], [k][column] */
  };
  alignas(32) float sums[TILE][SUMS_LD];
} generic_shared;

/* Rows of A by k's from k0 to `end`; zeros past those and past A's end. */
static __device__ __forceinline__ void load_a(const esmm_nm_generic_params &p, generic_shared &s, int64_t row0,
                                              int64_t k0, int64_t end)
{
  const bool by_rows = p.a.order == ESMM_ROW_MAJOR;
  for (int i = (int)threadIdx.x; i < TILE * CHUNK; i += THREADS) {
    const int r = by_rows ? i / CHUNK : i % TILE, c = by_rows ? i % CHUNK : i / TILE;
    const bool there = row0 + r < p.a.rows && k0 + c < end;
    s.a[r][c] = there ? ((const uint16_t *)p.a.data)[element_at(p.a, row0 + r, k0 + c)] : (uint16_t)0;
  }
}

static __device__ __forceinline__ void clear_b(generic_shared &s)
{
  for (int i = (int)threadIdx.x; i < CHUNK * LD / 2; i += THREADS)
    ((uint32_t *)s.b)[i] = 0;
}

/* Slots of the groups from k0 to end, which are whole but for B's last. */
static __device__ __forceinline__ void spread_slots(const esmm_nm_generic_params &p, generic_shared &s, int64_t col0,
                                                    int first_group, int groups)
{
  const int64_t first = (int64_t)first_group * p.keep, all = esmm_slots16_count(p.a.cols, p.keep, p.group);
  const int count = (int)min((int64_t)(groups * p.keep), all - first);
  for (int i = (int)threadIdx.x; i < count * TILE; i += THREADS) {
    const int slot = i / TILE, c = i % TILE;
    const int64_t col = col0 + c;
    if (col >= p.n)
      continue;
    const uint32_t strip = (uint32_t)col / (uint32_t)p.group_cols;
    const int place = ((const uint8_t *)p.places)[(first + slot) * p.strips + strip];
    s.b[slot / p.keep * p.group + place][c] = ((const uint16_t *)p.values)[(first + slot) * p.ld + col];
  }
}

/* A half of a block of the form nm16. */
static __device__ __forceinline__ void spread_block(const esmm_nm_generic_params &p, generic_shared &s, int64_t col0,
                                                    int block)
{
  const char *from =
      (const char *)p.values + esmm_nm16_block_at(col0 / ESMM_NM16_COLS, block, esmm_nm16_blocks(p.a.cols));
  for (int i = (int)threadIdx.x; i < TILE * CHUNK / 2; i += THREADS) {
    const int slot = i % (CHUNK / 2), c = i / (CHUNK / 2), col = (int)(col0 % ESMM_NM16_COLS) + c;
    const uint32_t word = *(const uint32_t *)(from + esmm_nm16_word_at(col, slot / 2));
    const uint32_t place = word >> (esmm_nm16_shift(col, slot / 2) + slot % 2 * 2) & 3;
    s.b[slot / 2 * 4 + place][c] = *(const uint16_t *)(from + esmm_nm16_value_at(col, slot));
  }
}

static __device__ __forceinline__ void finish(const esmm_nm_generic_params &p, generic_shared &s, int64_t row0,
                                              int64_t col0)
{
  const bool vectors = has_vectors(p.epilogue.c);
  for (int i = (int)threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
    const int64_t row = row0 + i / 8, col = col0 + i % 8 * 8;
    const float *from = &s.sums[i / 8][i % 8 * 8];
    if (row >= p.a.rows)
      continue;
    if (vectors && col + 8 <= p.n) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; j++)
        x[j] = from[j];
      finish_8(p.epilogue, row, col, x);
    } else {
#pragma unroll 1
      for (int j = 0; j < 8 && col + j < p.n; j++)
        finish_element(p.epilogue, row, col + j, from[j]);
    }
  }
}

template <typename T> static __device__ __forceinline__ void multiply(const esmm_nm_generic_params &p)
{
  __shared__ generic_shared s;
  if (not_selected(p.selector))
    return;
  const uint32_t across = (uint32_t)((p.n + TILE - 1) / TILE), warp = threadIdx.x / 32;
  const int64_t row0 = (int64_t)(blockIdx.x / across) * TILE, col0 = (int64_t)(blockIdx.x % across) * TILE;
  const int in_chunk = p.places ? CHUNK / p.group : 1, step = p.places ? in_chunk * p.group : CHUNK;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[2];
  wmma::fill_fragment(sums[0], 0.0f);
  wmma::fill_fragment(sums[1], 0.0f);
  int chunk = 0;
  for (int64_t k0 = 0; k0 < p.a.cols; k0 += step, chunk++) {
    __syncthreads();
    load_a(p, s, row0, k0, min(k0 + step, p.a.cols));
    clear_b(s);
    __syncthreads();
    if (p.places)
      spread_slots(p, s, col0, chunk * in_chunk, in_chunk);
    else
      spread_block(p, s, col0, chunk);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a;
      wmma::load_matrix_sync(a, (const T *)&s.a[warp / 2 * 16][k], LD);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> b;
        wmma::load_matrix_sync(b, (const T *)&s.b[k][warp % 2 * 32 + 16 * j], LD);
        wmma::mma_sync(sums[j], a, b, sums[j]);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; j++)
    wmma::store_matrix_sync(&s.sums[warp / 2 * 16][warp % 2 * 32 + 16 * j], sums[j], SUMS_LD, wmma::mem_row_major);
  __syncthreads();
  finish(p, s, row0, col0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_nm_generic_bf16(const __grid_constant__ esmm_nm_generic_params p)
{
  multiply<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    esmm_nm_generic_f16(const __grid_constant__ esmm_nm_generic_params p)
{
  multiply<__half>(p);
}
