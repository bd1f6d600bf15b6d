/*
 * k_small.cu: products that take a few microseconds however they are multiplied, in one launch, without packing and
 * without padding: everything is multiplied, by fp32 multiply-adds.
 *
 *   A [m,k]   fp32, any order
 *   B [k,n]   rows, without padding
 *   C         tiles of 32 rows by 32 columns; up to 8 blocks, a cluster, share a tile's k's
 *
 * A warp has sums of a whole tile, takes chunks of 16 k's in turn with the others, and loads the next chunk before it
 * multiplies the one that has come. A chunk lies [k][row] and [k][column] in shared memory, so that a lane reads its 4
 * rows and 8 columns of a k in three vectors for 32 multiply-adds.
 *
 * Sums of a block's warps are added in shared memory, those of a cluster's blocks by the block that finishes these
 * elements, always in the same order. Other GPUs than sm_90 have no clusters. k's past the last are zeros in both
 * operands, so that no Inf of either gets in.
 */
#include "cuda/kernels/common/epilogue.cuh"

#define TILE ESMM_SMALL_TILE
#define CHUNK ESMM_SMALL_CHUNK
#define THREADS ESMM_SMALL_THREADS
#define WARPS (THREADS / 32)
#define LANE_ROWS 4
#define LANE_COLS 8
#define LOADS (CHUNK * TILE / 32) /* elements of a chunk of one operand that a lane loads */
#define LINE_A (TILE + 4)         /* of a k of A: lanes that store along k do not all meet in the same banks */
#define ELEMENTS (TILE * TILE)
static_assert(32 * LANE_ROWS * LANE_COLS == ELEMENTS, "a warp has a tile");

struct chunk {
  float a[CHUNK][LINE_A], b[CHUNK][TILE];
};

union alignas(16) block_memory {
  chunk chunks[WARPS];
  float sums[WARPS][ELEMENTS];
};

/* ---- clusters ---- */

static __device__ __forceinline__ void cluster_meet(void)
{
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* What block `rank` of the cluster has where this one has x. */
static __device__ __forceinline__ float read_of(int rank, const float *x)
{
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((uint32_t)__cvta_generic_to_shared(x)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
#else
  (void)rank;
  return *x;
#endif
}

/* ---- a warp ---- */

/* What a lane has of the next chunk. */
struct ahead {
  float a[LOADS], b[LOADS];
};

/* The i-th element of a chunk of A that a lane loads: neighbours in memory for neighbouring lanes. */
template <bool BY_K> static __device__ __forceinline__ int row_of(int i)
{
  const int lane = (int)threadIdx.x % 32;
  return BY_K ? lane : i * (32 / CHUNK) + lane / CHUNK;
}
template <bool BY_K> static __device__ __forceinline__ int k_of(int i)
{
  return BY_K ? i : (int)threadIdx.x % CHUNK;
}

template <bool BY_K>
static __device__ __forceinline__ void load(const esmm_small_params &p, int row0, int col0, int k0, ahead &x)
{
  const float *a = (const float *)p.a.data, *b = (const float *)p.b;
  const int m = (int)p.a.rows, k = (int)p.a.cols, col = col0 + (int)threadIdx.x % 32;
  const uint32_t ld = (uint32_t)p.a.ld, n = (uint32_t)p.n;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int row = row0 + row_of<BY_K>(i), at = k0 + k_of<BY_K>(i);
    x.a[i] = row < m && at < k ? a[BY_K ? (uint32_t)at * ld + row : (uint32_t)row * ld + at] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    x.b[i] = col < p.n && k0 + i < k ? b[(uint32_t)(k0 + i) * n + (uint32_t)col] : 0.0f;
}

template <bool BY_K> static __device__ __forceinline__ void store(const ahead &x, chunk &to)
{
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    to.a[k_of<BY_K>(i)][row_of<BY_K>(i)] = x.a[i];
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    to.b[i][threadIdx.x % 32] = x.b[i];
}

/* Rows 4 (lane / 4) and the three after it; columns 4 (lane % 4) and the three after it, and those 16 further on. */
static __device__ __forceinline__ int lane_row(void)
{
  return (int)threadIdx.x % 32 / 4 * LANE_ROWS;
}
static __device__ __forceinline__ int lane_col(void)
{
  return (int)threadIdx.x % 4 * 4;
}

static __device__ __forceinline__ void multiply(const chunk &x, float (&sums)[LANE_ROWS][LANE_COLS])
{
#pragma unroll 8 /* all at once would need more registers than there are */
  for (int k = 0; k < CHUNK; k++) {
    const float4 a = *(const float4 *)&x.a[k][lane_row()];
    const float4 low = *(const float4 *)&x.b[k][lane_col()], high = *(const float4 *)&x.b[k][16 + lane_col()];
    const float rows[LANE_ROWS] = {a.x, a.y, a.z, a.w};
    const float cols[LANE_COLS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
#pragma unroll
      for (int j = 0; j < LANE_COLS; j++)
        sums[i][j] = __fmaf_rn(rows[i], cols[j], sums[i][j]);
  }
}

/* ---- a block ---- */

static __device__ __forceinline__ void put_sums(const float (&sums)[LANE_ROWS][LANE_COLS], float *to)
{
#pragma unroll
  for (int i = 0; i < LANE_ROWS; i++)
#pragma unroll
    for (int j = 0; j < LANE_COLS; j += 4)
      *(float4 *)&to[(lane_row() + i) * TILE + j * 4 + lane_col()] =
          make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
}

template <bool BY_K> static __device__ __forceinline__ void small(const esmm_small_params &p)
{
  __shared__ block_memory memory;
  const int ranks = p.ranks, rank = (int)blockIdx.x & (ranks - 1), tile = (int)(blockIdx.x / (unsigned)ranks);
  const int row0 = tile / p.tiles * TILE, col0 = tile % p.tiles * TILE, warp = (int)threadIdx.x / 32;
  const int k = (int)p.a.cols, step = ranks * WARPS * CHUNK, first = (rank * WARPS + warp) * CHUNK;
  /* Warps that have a chunk: the first ones, and always one. */
  const int warps = min(WARPS, max(1, (k - rank * WARPS * CHUNK + CHUNK - 1) / CHUNK));
  float sums[LANE_ROWS][LANE_COLS] = {};
  ahead next;
  if (first < k)
    load<BY_K>(p, row0, col0, first, next);
#pragma unroll 1
  for (int at = first; at < k; at += step) {
    store<BY_K>(next, memory.chunks[warp]);
    __syncwarp();
    if (at + step < k)
      load<BY_K>(p, row0, col0, at + step, next);
    multiply(memory.chunks[warp], sums);
    __syncwarp();
  }
  __syncthreads(); /* sums lie where chunks lay */
  if (warp < warps)
    put_sums(sums, memory.sums[warp]);
  __syncthreads();
  /* Each thread keeps the same elements: no other one touches them before the cluster meets. */
  if (warps > 1)
    for (int e = (int)threadIdx.x; e < ELEMENTS; e += THREADS) {
      float sum = memory.sums[0][e];
      for (int w = 1; w < warps; w++)
        sum += memory.sums[w][e];
      memory.sums[0][e] = sum;
    }
  __syncwarp();
  if (ranks > 1)
    cluster_meet();
  const int mine = ELEMENTS / ranks;
  for (int e = rank * mine + (int)threadIdx.x; e < (rank + 1) * mine; e += THREADS) {
    const int row = row0 + e / TILE, col = col0 + e % TILE;
    if (row >= (int)p.a.rows || col >= p.n)
      continue;
    float sum = ranks > 1 ? read_of(0, &memory.sums[0][e]) : memory.sums[0][e];
    for (int r = 1; r < ranks; r++)
      sum += read_of(r, &memory.sums[0][e]);
    finish_element(p.epilogue, row, col, sum);
  }
  __syncwarp();
  if (ranks > 1)
    cluster_meet(); /* no block leaves while its sums are read */
}

#define SMALL(name, by_k)                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, ESMM_SMALL_BLOCKS) \
      name(const __grid_constant__ esmm_small_params p)                    \
  {                                                                        \
    if (!not_selected(p.selector))                                         \
      small<by_k>(p);                                                      \
  }

SMALL(esmm_small_f32, false)
SMALL(esmm_small_f32_by_k, true)
