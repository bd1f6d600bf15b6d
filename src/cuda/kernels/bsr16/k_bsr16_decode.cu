/*
 * k_bsr16_decode.cu: C [m,n] = A [m,k] x B for m of 1 to 16 and a 16-bit B of cells, in one launch. Reads the cells of
 * B once; the floor is their bytes.
 *
 * A block has a panel of 64 columns, or with others of its cluster a share of the panel's k's. It lists the panel's
 * cells; its warps take steps of 16 k's in turn, 2 KiB each, from memory to registers, two or three of them ahead.
 *
 * mma m16n8k16 computes C transposed: 16 columns of B by 8 rows of A. Lane (g, t) = (lane / 4, lane % 4) needs columns
 * 8g .. 8g+7 of k's 4t .. 4t+3, which the instruction takes for its k's 2t, 2t+1, 2t+8, 2t+9: any order is as good as
 * another while A's is the same. Lane 8t + g loads them, as then eight lanes read a line of 128 bytes, and shuffles
 * exchange them. Columns 8g+2p and 8g+2p+1 are rows g and g+8 of instruction p.
 *
 * Sums of warps, then of blocks, are added in a fixed order.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/few_rows.cuh"
#include "cuda/kernels/common/mma.cuh"

#define THREADS ESMM_BSR16_DECODE_THREADS
#define WARPS (THREADS / 32)
#define COLS ESMM_CELL_COLS
#define WINDOW 1024 /* chunks of k that are listed at once */
#define PAD 4

/* ---- operands ---- */

static __device__ __forceinline__ uint32_t element_or_0(const esmm_device_matrix &a, int64_t row, int64_t k)
{
  return row < a.rows && k < a.cols ? ((const uint16_t *)a.data)[element_at(a, row, k)] : 0;
}

/* Four k's of a row of A, from k on; zeros outside. */
static __device__ __forceinline__ uint2 load_a(const esmm_bsr16_decode_params &p, int64_t row, int64_t k)
{
  if (p.vector && row < p.a.rows && k + 4 <= p.a.cols)
    return __ldg((const uint2 *)((const uint16_t *)p.a.data + row * p.a.ld + k));
  return make_uint2(element_or_0(p.a, row, k) | element_or_0(p.a, row, k + 1) << 16,
                    element_or_0(p.a, row, k + 2) | element_or_0(p.a, row, k + 3) << 16);
}

/* A step on its way: the lane's lines of B, and of A what it multiplies with. */
template <int TILES> struct bsr16_step {
  uint4 b[4];
  uint2 a[TILES];
};

typedef struct listed {
  uint32_t cell, chunk;
} listed;

template <int TILES>
static __device__ __forceinline__ void fetch(const esmm_bsr16_decode_params &p, const listed *list, int steps, int at,
                                             bsr16_step<TILES> &s)
{
  const int lane = (int)threadIdx.x % 32, each = p.cell_k / 16;
  if (at >= steps) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      s.b[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < TILES; i++)
      s.a[i] = make_uint2(0, 0);
    return;
  }
  const listed from = list[at / each];
  const int step = at % each * 16;
  const char *b =
      (const char *)p.cells + ((uint64_t)from.cell * p.cell_k + step + lane / 8 * 4) * (COLS * 2) + lane % 8 * 16;
  const int64_t k = (int64_t)from.chunk * p.cell_k + step + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
    s.b[i] = load_once(b + i * (COLS * 2));
#pragma unroll
  for (int i = 0; i < TILES; i++)
    s.a[i] = load_a(p, lane / 4 + 8 * i, k);
}

template <esmm_dtype DTYPE, int TILES>
static __device__ __forceinline__ void multiply(const bsr16_step<TILES> &s, float (&sums)[TILES][4][4])
{
  const int lane = (int)threadIdx.x % 32, from = lane % 4 * 8 + lane / 4;
  uint32_t line[4][4]; /* k, pair of columns */
#pragma unroll
  for (int i = 0; i < 4; i++) {
    line[i][0] = __shfl_sync(~0u, s.b[i].x, from);
    line[i][1] = __shfl_sync(~0u, s.b[i].y, from);
    line[i][2] = __shfl_sync(~0u, s.b[i].z, from);
    line[i][3] = __shfl_sync(~0u, s.b[i].w, from);
  }
#pragma unroll
  for (int p = 0; p < 4; p++) {
    const uint32_t columns[4] = {
        __byte_perm(line[0][p], line[1][p], 0x5410), __byte_perm(line[0][p], line[1][p], 0x7632),
        __byte_perm(line[2][p], line[3][p], 0x5410), __byte_perm(line[2][p], line[3][p], 0x7632)};
#pragma unroll
    for (int i = 0; i < TILES; i++)
      mma16_mma<DTYPE>(sums[i][p], columns, s.a[i].x, s.a[i].y);
  }
}

/* ---- a block ---- */

template <int TILES> struct bsr16_memory {
  listed list[WINDOW];
  int counts[WARPS];
  float sums[WARPS][8 * TILES][COLS + PAD]; /* of warps; then, in the first, of the block */
};

/* The panel's cells among WINDOW chunks from `first` on, in their order; returns how many. */
static __device__ __forceinline__ int list_cells(const esmm_bsr16_decode_params &p, int panel, int first, listed *list,
                                                 int *counts)
{
  enum { EACH = WINDOW / THREADS };
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const uint32_t *places = (const uint32_t *)p.places + (int64_t)panel * p.chunks;
  uint32_t cell[EACH];
  int at = 0, total = 0;
  __syncthreads(); /* all warps have read the last list */
#pragma unroll
  for (int i = 0; i < EACH; i++) { /* a warp has EACH * 32 chunks side by side */
    const int chunk = first + (warp * EACH + i) * 32 + lane;
    cell[i] = chunk < p.chunks ? __ldg(places + chunk) : ESMM_NO_CELL;
    total += __popc(__ballot_sync(~0u, cell[i] != ESMM_NO_CELL));
  }
  if (lane == 0)
    counts[warp] = total;
  __syncthreads();
  total = 0;
  for (int w = 0; w < WARPS; w++) {
    at += w < warp ? counts[w] : 0;
    total += counts[w];
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const uint32_t alive = __ballot_sync(~0u, cell[i] != ESMM_NO_CELL);
    if (cell[i] != ESMM_NO_CELL) {
      const listed one = {cell[i], (uint32_t)(first + (warp * EACH + i) * 32 + lane)};
      list[at + __popc(alive & ((1u << lane) - 1))] = one;
    }
    at += __popc(alive);
  }
  __syncthreads();
  return total;
}

template <esmm_dtype DTYPE, int TILES> static __device__ __forceinline__ void decode(const esmm_bsr16_decode_params &p)
{
  extern __shared__ __align__(16) char memory[];
  bsr16_memory<TILES> *sh = (bsr16_memory<TILES> *)memory;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, m = (int)p.a.rows;
  const int ranks = cluster_ranks(), rank = (int)blockIdx.x % ranks, panel = (int)blockIdx.x / ranks;
  const int step = ranks * WARPS;
  enum { STAGES = TILES == 1 ? 3 : 2 }; /* as registers allow */
  float sums[TILES][4][4] = {};
  for (int first = 0; first < p.chunks; first += WINDOW) {
    const int steps = list_cells(p, panel, first, sh->list, sh->counts) * (p.cell_k / 16);
    bsr16_step<TILES> ahead[STAGES];
    int at = rank * WARPS + warp;
#pragma unroll
    for (int i = 0; i < STAGES; i++)
      fetch(p, sh->list, steps, at + i * step, ahead[i]);
    for (; at < steps; at += STAGES * step) {
#pragma unroll
      for (int i = 0; i < STAGES; i++) {
        multiply<DTYPE, TILES>(ahead[i], sums);
        fetch(p, sh->list, steps, at + (STAGES + i) * step, ahead[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float *to = &sh->sums[warp][i * 8 + lane % 4 * 2][lane / 4 * 8 + 2 * q];
      *(float2 *)to = make_float2(sums[i][q][0], sums[i][q][2]);
      *(float2 *)(to + COLS + PAD) = make_float2(sums[i][q][1], sums[i][q][3]);
    }
  __syncthreads();
  for (int e = (int)threadIdx.x; e < m * COLS; e += THREADS) {
    float sum = sh->sums[0][e / COLS][e % COLS];
    for (int w = 1; w < WARPS; w++)
      sum += sh->sums[w][e / COLS][e % COLS];
    sh->sums[0][e / COLS][e % COLS] = sum;
  }
  if (ranks > 1)
    cluster_meet();
  else
    __syncthreads();
  const int mine = COLS / ranks;
  for (int e = (int)threadIdx.x; e < m * mine; e += THREADS) {
    const int row = e / mine, col = rank * mine + e % mine;
    float sum = load_from(&sh->sums[0][row][col], 0);
    for (int r = 1; r < ranks; r++)
      sum += load_from(&sh->sums[0][row][col], r);
    if ((int64_t)panel * COLS + col < p.epilogue.c.cols)
      finish_element(p.epilogue, row, (int64_t)panel * COLS + col, sum);
  }
  if (ranks > 1) { /* others may still read here */
    __syncwarp();
    cluster_meet();
  }
}

#define DECODE(name, dtype, tiles)                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                             \
      esmm_bsr_decode_##name(const __grid_constant__ esmm_bsr16_decode_params p)       \
  {                                                                                    \
    static_assert(sizeof(bsr16_memory<tiles>) <= ESMM_BSR16_DECODE_SHARED(tiles), ""); \
    if (!not_selected(p.selector))                                                     \
      decode<dtype, tiles>(p);                                                         \
  }

DECODE(bf16_8, ESMM_BF16, 1)
DECODE(bf16_16, ESMM_BF16, 2)
DECODE(f16_8, ESMM_F16, 1)
DECODE(f16_16, ESMM_F16, 2)
