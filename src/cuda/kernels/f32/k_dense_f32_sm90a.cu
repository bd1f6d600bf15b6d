/*
 * k_dense_f32_sm90a.cu: dense product at fp32 accuracy on Hopper's tensor cores: wgmma, three TF32 products for one.
 *
 *   A [m,k]     fp32, row-major, through TMA: as the caller has it, or packed where TMA could not read that
 *   B [n,k]     fp32, the columns form of the weights (k contiguous: wgmma takes TF32 no other way), through TMA
 *
 *   a block     HALVES * 128 rows by 128 columns of C, 32 k's a stage
 *   warps 0-3   fetch and split: thread 0 starts the copies; all of them write the low part of B behind B
 *   warps 4-11  two warpgroups multiply: HALVES tiles of 64 x 128 each
 *
 * x = hi + lo. A comes through registers (ldmatrix), where splitting costs a few instructions for 1024 multiply-adds:
 * its hi is x rounded to the 11 bits of TF32, lo = x - hi. B is read from shared memory by the tensor core, so its low
 * part must lie there: one pass over 16 KiB a stage by otherwise idle warps. Its hi is x with 13 bits cut off, which
 * the unit does by itself, so that it need not be written again; lo, the rest, is rounded for the same cut. A product
 * is lo*hi + hi*lo + hi*hi. The unit truncates its sums; after the 12 wgmmas of a stage they are added to fp32
 * registers, which round to nearest. While one warpgroup adds, the other one's wgmmas keep the unit busy. A sum that is
 * not finite is made again with plain FMAs: splitting turns an infinity into a NaN.
 *
 * Floor at 4096^3: 3 * 2 * 4096^3 / 400 TFLOP/s (what TF32 sustains on an H200) = 1.03 ms. Shared memory: three
 * stages of 64 KiB with HALVES = 2, four of 48 KiB with HALVES = 1.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/sm90.cuh"

#define DENSE_K ESMM_DENSE_K
#define DENSE_N ESMM_DENSE_COLS
#define DENSE_THREADS ESMM_DENSE_THREADS
#define DENSE_GROUP 8

typedef struct dense_barriers {
  uint64_t loaded[4], split[4], empty[4];
} dense_barriers;

/* d [64 x 128] (+)= a [64 x 8] * b [8 x 128]: a in registers, b in shared memory, 128-byte swizzle. */
static __device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" SM90_NAMES_64
               "}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
               : SM90_SUMS_64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* x to the 11 bits of TF32, to nearest. */
static __device__ __forceinline__ float high(float x)
{
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}

/* What is left of x when the unit cuts 13 bits off, rounded for the same cut. */
static __device__ __forceinline__ float low(float x)
{
  const float rest = x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  return __uint_as_float(__float_as_uint(rest) + 0x1000u);
}

/* Which block of C comes i-th: groups of DENSE_GROUP block rows, column by column. */
static __device__ __forceinline__ void block_at(int64_t i, int64_t rows, int64_t cols, int64_t &row, int64_t &col)
{
  const int64_t group = i / (DENSE_GROUP * cols), in_group = i % (DENSE_GROUP * cols);
  const int64_t height = min((int64_t)DENSE_GROUP, rows - group * DENSE_GROUP);
  row = group * DENSE_GROUP + in_group % height;
  col = in_group / height;
}

/* Shared memory of a stage: A [128 * HALVES][32], B [128][32], B's low part [128][32]. */
template <int HALVES> struct dense_stage {
  enum { A = HALVES * 128 * DENSE_K * 4, B = DENSE_N * DENSE_K * 4, BYTES = A + 2 * B, COUNT = HALVES == 2 ? 3 : 4 };
};

static_assert(2 * ESMM_DENSE_ROWS == ESMM_DENSE_TALL && ESMM_DENSE_ROWS == ESMM_DENSE_LOW, "HALVES is 2 or 1");
static_assert(dense_stage<2>::BYTES * dense_stage<2>::COUNT + 1024 == ESMM_DENSE_SHARED_256 &&
                  dense_stage<1>::BYTES * dense_stage<1>::COUNT + 1024 == ESMM_DENSE_SHARED_128,
              "params.h gives the host another size");

/* ---- warps 0-3 ---- */

template <int HALVES>
static __device__ __forceinline__ void feed(const esmm_dense_params &p, char *ring, dense_barriers *barriers,
                                            int64_t blocks_m, int64_t blocks_n)
{
  typedef dense_stage<HALVES> stage_of;
  const int64_t steps = (p.k + DENSE_K - 1) / DENSE_K;
  const int64_t mine = (blocks_m * blocks_n - blockIdx.x + gridDim.x - 1) / gridDim.x, all = mine * steps;
  int64_t asked = 0; /* stages with their copies started */
  int64_t row = 0, col = 0;
  for (int64_t done = 0; done < all; done++) {
    if (threadIdx.x == 0)
      for (; asked < all && asked < done + stage_of::COUNT; asked++) {
        const int s = (int)(asked % stage_of::COUNT);
        const uint32_t round = (uint32_t)(asked / stage_of::COUNT);
        if (asked >= stage_of::COUNT) {
          if (asked > done && !sm90_barrier_test(&barriers->empty[s], (round & 1) ^ 1))
            break; /* not free yet, and there is a stage to split meanwhile */
          sm90_barrier_wait(&barriers->empty[s], (round & 1) ^ 1);
        }
        block_at(blockIdx.x + asked / steps * gridDim.x, blocks_m, blocks_n, row, col);
        const int k = (int)(asked % steps) * DENSE_K;
        char *stage = ring + s * stage_of::BYTES;
        sm90_barrier_expect(&barriers->loaded[s], stage_of::A + stage_of::B);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          sm90_tma_load(stage + h * 128 * DENSE_K * 4, &p.map_a, k, (int)(row * HALVES + h) * 128,
                        &barriers->loaded[s]);
        sm90_tma_load(stage + stage_of::A, &p.map_b, k, (int)col * DENSE_N, &barriers->loaded[s]);
      }
    const int s = (int)(done % stage_of::COUNT);
    sm90_barrier_wait(&barriers->loaded[s], (uint32_t)(done / stage_of::COUNT) & 1);
    const float4 *from = (const float4 *)(ring + s * stage_of::BYTES + stage_of::A);
    float4 *to = (float4 *)(ring + s * stage_of::BYTES + stage_of::A + stage_of::B);
#pragma unroll
    for (int i = 0; i < stage_of::B / 16 / 128; i++) {
      const float4 x = from[i * 128 + threadIdx.x];
      to[i * 128 + threadIdx.x] = make_float4(low(x.x), low(x.y), low(x.z), low(x.w));
    }
    sm90_fence_async();
    sm90_barrier_arrive(&barriers->split[s]);
  }
}

/* ---- warps 4-11 ---- */

/* A sum with plain FMAs, from A's rows and B's columns. */
static __device__ __forceinline__ float plain_sum(const esmm_dense_params &p, int64_t row, int64_t col)
{
  const float *a = (const float *)p.a + row * p.a_ld, *b = (const float *)p.b + col * p.b_ld;
  float sum = 0.0f;
  for (int64_t k = 0; k < p.k; k++)
    sum = fmaf(a[k], b[k], sum);
  return sum;
}

/*
 * 64 x 128 of C. Lane (g, t) of a warp holds columns 8j + 2t, 8j + 2t + 1 of rows g and g + 8: stored as pairs where
 * nothing follows the sum, else one by one. Sums that are not finite are left out, and made again at the end.
 */
static __device__ __forceinline__ void store(const esmm_dense_params &p, const float (&acc)[64], int64_t row0,
                                             int64_t col0)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
  const esmm_epilogue_params &e = p.epilogue;
  const bool pairs = is_plain<2>(e);
  const int64_t first_row = row0 + warp * 16 + lane / 4, first_col = col0 + lane % 4 * 2;
  uint64_t again = 0; /* sums that are not finite, by their place in acc */
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int64_t row = first_row + h * 8;
    if (row >= p.m)
      continue;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const int64_t col = first_col + 8 * j;
      const float out[2] = {acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]};
      const bool good[2] = {fabsf(out[0]) <= 3.402823466e38f, fabsf(out[1]) <= 3.402823466e38f};
      again |= ((uint64_t)!good[0] | (uint64_t)!good[1] << 1) << (4 * j + 2 * h);
      if (pairs && col + 2 <= p.n && good[0] && good[1]) {
        store_plain(e, row, col, out);
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (col + i < p.n && good[i])
            finish_element(e, row, col + i, out[i]);
      }
    }
  }
  for (; again; again &= again - 1) {
    const int i = __ffsll((long long)again) - 1;
    const int64_t row = first_row + i / 2 % 2 * 8, col = first_col + i / 4 * 8 + i % 2;
    if (col < p.n)
      finish_element(e, row, col, plain_sum(p, row, col));
  }
}

/* Rows and k's of A for one warp: fragments of two k8 steps, from step `first` of the stage on, split. */
static __device__ __forceinline__ void load_a(const char *a, int first, uint32_t (&hi)[2][4], uint32_t (&lo)[2][4])
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int s = 0; s < 2; s++) {
    const int part = 2 * (first + s) + lane / 16; /* 16 bytes: 4 k's */
    sm90_ldmatrix(a + row * 128 + ((part ^ (row % 8)) * 16), hi[s]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = __uint_as_float(hi[i / 4][i % 4]);
    hi[i / 4][i % 4] = __float_as_uint(high(x));
    lo[i / 4][i % 4] = __float_as_uint(x - high(x));
  }
}

template <int HALVES>
static __device__ __forceinline__ void multiply(const esmm_dense_params &p, char *ring, dense_barriers *barriers,
                                                int64_t blocks_m, int64_t blocks_n)
{
  typedef dense_stage<HALVES> stage_of;
  const int group = (int)threadIdx.x / 128 - 1;
  const int64_t steps = (p.k + DENSE_K - 1) / DENSE_K;
  int s = 0;
  uint32_t parity = 0;
  for (int64_t i = blockIdx.x; i < blocks_m * blocks_n; i += gridDim.x) {
    float acc[HALVES][64];
#pragma unroll
    for (int j = 0; j < HALVES * 64; j++)
      acc[j / 64][j % 64] = 0.0f;
    for (int64_t step = 0; step < steps; step++) {
      const char *stage = ring + s * stage_of::BYTES;
      const uint64_t b_hi = sm90_descriptor(stage + stage_of::A),
                     b_lo = sm90_descriptor(stage + stage_of::A + stage_of::B);
      sm90_barrier_wait(&barriers->loaded[s], parity);
      sm90_barrier_wait(&barriers->split[s], parity);
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        float sum[64];
        /* Two steps at a time: fragments of all four would not fit beside the sums. */
#pragma unroll
        for (int first = 0; first < 4; first += 2) {
          uint32_t hi[2][4], lo[2][4];
          load_a(stage + (group * HALVES + h) * 64 * 128, first, hi, lo);
          sm90_wgmma_fence();
#pragma unroll
          for (int k8 = 0; k8 < 2; k8++) {
            wgmma(sum, lo[k8], b_hi + 2 * (first + k8), first + k8 > 0);
            wgmma(sum, hi[k8], b_lo + 2 * (first + k8), 1);
            wgmma(sum, hi[k8], b_hi + 2 * (first + k8), 1);
          }
          sm90_wgmma_commit();
          sm90_wgmma_wait<0>();
        }
#pragma unroll
        for (int j = 0; j < 64; j++)
          acc[h][j] += sum[j];
      }
      if (threadIdx.x % 32 == 0)
        sm90_barrier_arrive(&barriers->empty[s]);
      if (++s == stage_of::COUNT) {
        s = 0;
        parity ^= 1;
      }
    }
    int64_t row, col;
    block_at(i, blocks_m, blocks_n, row, col);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      store(p, acc[h], (row * 2 + group) * HALVES * 64 + h * 64, col * DENSE_N);
  }
}

template <int HALVES> static __device__ __forceinline__ void dense(const esmm_dense_params &p)
{
  extern __shared__ __align__(1024) char ring[];
  if (not_selected(p.selector))
    return;
  dense_barriers *barriers = (dense_barriers *)(ring + dense_stage<HALVES>::COUNT * dense_stage<HALVES>::BYTES);
  const int64_t blocks_m = (p.m + HALVES * 128 - 1) / (HALVES * 128), blocks_n = (p.n + DENSE_N - 1) / DENSE_N;
  if (threadIdx.x == 0) {
    for (int s = 0; s < dense_stage<HALVES>::COUNT; s++) {
      sm90_barrier_init(&barriers->loaded[s], 1);
      sm90_barrier_init(&barriers->split[s], 128);
      sm90_barrier_init(&barriers->empty[s], 8);
    }
    sm90_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    sm90_registers_down<56>();
    feed<HALVES>(p, ring, barriers, blocks_m, blocks_n);
  } else {
    sm90_registers_up<224>();
    multiply<HALVES>(p, ring, barriers, blocks_m, blocks_n);
  }
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS, 1)
    esmm_dense_f32_256(const __grid_constant__ esmm_dense_params p)
{
  dense<2>(p);
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS, 1)
    esmm_dense_f32_128(const __grid_constant__ esmm_dense_params p)
{
  dense<1>(p);
}
