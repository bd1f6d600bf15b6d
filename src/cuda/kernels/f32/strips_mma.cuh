/*
 * strips_mma.cuh: the product of two operands in strips, on tensor cores at fp32 accuracy, by mma.sync (sm_80 and
 * later). k_joint_f32.cu skips with it; k_dense_f32_mma.cu does not.
 *
 *   A  3 strips of 32 rows      a block computes 96 x 128 of C, in 12 subtiles of 32 x 32;
 *   B  4 strips of 32 columns   12 consumer warps own one each, 4 producer warps feed them
 *
 * The producers and the ring are strips_ring.cuh's. A consumer lists the entries of its joint and multiplies them eight
 * at a time; the remainder waits for the next stages, so that almost no step runs half empty, and warps drift apart by
 * several stages instead of waiting for the slowest at each.
 *
 * Numbers: x = hi + lo, both TF32 (hi is x rounded to 11 bits, lo the exact rest, of which the unit cuts a bit), and a
 * product is lo*hi + hi*lo + hi*hi. The unit truncates its sums, so they are kept short: every few steps they are added
 * to fp32 registers that round to nearest. A sum that is not finite is made again with plain FMAs, because splitting
 * turns an infinity into a NaN.
 *
 * Fragments: mma m16n8k8 takes row g (lane / 4) and k t (lane % 4). Lane (g, t) reads rows 4g..4g+3 of an A segment
 * with one 16-byte load: rows 4g, 4g+1 are rows g, g+8 of the first m16 tile, 4g+2, 4g+3 of the second; columns
 * likewise feed four n8 tiles.
 *
 * Budget: 896 bytes an entry of a stage; seven stages of 32 on sm_90, of 24 on sm_80, four on sm_86 and sm_89. 128
 * registers a thread: 32 sums, 32 of the unit's, 32 split operands.
 *
 * What bounds it: an mma of this shape keeps a scheduler busy for 5.9 cycles, and everything else is issued beside it,
 * so that the 3 instructions that split each operand, the lists and the copies count in full (bench/SPEED.md).
 */
#ifndef ESMM_CUDA_STRIPS_MMA_CUH
#define ESMM_CUDA_STRIPS_MMA_CUH

#include "cuda/kernels/common/epilogue.cuh"

#define MMA_ROWS 3
#define MMA_COLS 4
#define MMA_CONSUMERS (MMA_ROWS * MMA_COLS)
#if __CUDA_ARCH__ == 900 /* as many entries as shared memory allows: each stage has its fixed costs */
#define MMA_CHUNK ESMM_STRIPS_MMA_CHUNK_90
#else
#define MMA_CHUNK ESMM_STRIPS_MMA_CHUNK
#endif
#define MMA_MOST_STAGES ESMM_STRIPS_MMA_STAGES
#include "cuda/kernels/f32/strips_ring.cuh"

#define MMA_LIST 64   /* entries a list can hold: fewer than MMA_ENOUGH, and a stage */
#define MMA_ENOUGH 24 /* entries that are worth starting for */

typedef struct strips_shared {
  strips_ring ring;
  uint16_t lists[MMA_CONSUMERS][MMA_LIST]; /* where in the ring an entry lies: segment and swizzle, in 32 bytes */
} strips_shared;

static_assert(MMA_ROWS * ESMM_STRIP == ESMM_STRIPS_MMA_ROWS && MMA_COLS * ESMM_STRIP == ESMM_STRIPS_MMA_COLS &&
                  MMA_THREADS == ESMM_STRIPS_MMA_THREADS &&
                  MMA_STAGE + sizeof(strips_shared) <= ESMM_STRIPS_MMA_SHARED(MMA_CHUNK, 1),
              "params.h gives the host another shape");

/* d = a * b + c */
static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                           const float (&c)[4])
{
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* ---- consumers ---- */

/* One step's operands as they lie in shared memory: for two k's, four rows of A and four columns of B. */
typedef struct strips_raw {
  float4 a[2], b[2];
} strips_raw;

/* The entries of a list from head on: 8 of them, or `left` and zeros where FULL is false. */
template <bool FULL>
static __device__ __forceinline__ strips_raw load_step(const char *a_slot, const char *b_slot, const uint16_t *list,
                                                       uint32_t head, uint32_t left)
{
  const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  strips_raw raw;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (FULL || (uint32_t)(t + 4 * half) < left) {
      const uint32_t at = (uint32_t)list[(head + (uint32_t)(t + 4 * half)) % MMA_LIST] * 32 ^ (uint32_t)(g * 16);
      raw.a[half] = *(const float4 *)(a_slot + at);
      raw.b[half] = *(const float4 *)(b_slot + at);
    } else {
      raw.a[half] = raw.b[half] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  return raw;
}

/* Eight k's: three products for one, summed in the unit. FIRST: the sum starts here. */
template <bool FIRST> static __device__ __forceinline__ void multiply_step(float (&sum)[2][4][4], const strips_raw &raw)
{
  const float av[2][4] = {{raw.a[0].x, raw.a[0].y, raw.a[1].x, raw.a[1].y},
                          {raw.a[0].z, raw.a[0].w, raw.a[1].z, raw.a[1].w}};
  const float bv[4][2] = {
      {raw.b[0].x, raw.b[1].x}, {raw.b[0].y, raw.b[1].y}, {raw.b[0].z, raw.b[1].z}, {raw.b[0].w, raw.b[1].w}};
  const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t ah[2][4], al[2][4], bh[4][2], bl[4][2];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    split(av[i / 4][i % 4], ah[i / 4][i % 4], al[i / 4][i % 4]);
    split(bv[i / 2][i % 2], bh[i / 2][i % 2], bl[i / 2][i % 2]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (FIRST)
      mma(sum[i / 4][i % 4], al[i / 4], bh[i % 4], zero);
    else
      mma(sum[i / 4][i % 4], al[i / 4], bh[i % 4], sum[i / 4][i % 4]);
#pragma unroll
  for (int i = 0; i < 8; i++)
    mma(sum[i / 4][i % 4], ah[i / 4], bl[i % 4], sum[i / 4][i % 4]);
#pragma unroll
  for (int i = 0; i < 8; i++)
    mma(sum[i / 4][i % 4], ah[i / 4], bh[i % 4], sum[i / 4][i % 4]);
}

/* Multiplies `count` entries of a list, eight at a time, and adds the sum to acc, which rounds to nearest. */
static __device__ __forceinline__ void multiply(float (&acc)[2][4][4], const char *a_slot, const char *b_slot,
                                                const uint16_t *list, uint32_t head, uint32_t count)
{
  float sum[2][4][4];
  if (count >= 8)
    multiply_step<true>(sum, load_step<true>(a_slot, b_slot, list, head, 8));
  else
    multiply_step<true>(sum, load_step<false>(a_slot, b_slot, list, head, count));
  for (uint32_t done = 8; done < count; done += 8)
    if (done + 8 <= count)
      multiply_step<false>(sum, load_step<true>(a_slot, b_slot, list, head + done, 8));
    else
      multiply_step<false>(sum, load_step<false>(a_slot, b_slot, list, head + done, count - done));
#pragma unroll
  for (int i = 0; i < 32; i++)
    acc[i / 16][i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4];
}

/* A subtile to C. Lane (g, t) holds 8 columns from 8t on of the rows 4g to 4g + 3: stored by fours where nothing
   follows the sum, else one by one. Sums that are not finite are left out, and made again at the end. */
template <bool DENSE>
static __device__ __forceinline__ void store(const esmm_strips_product_params &p, const float (&acc)[2][4][4],
                                             int64_t row0, int64_t col0)
{
  const int lane = (int)threadIdx.x % 32;
  const esmm_epilogue_params &e = p.epilogue;
  const bool vectors = is_plain<4>(e);
  row0 += lane / 4 * 4;
  col0 += lane % 4 * 8;
  uint32_t again = 0; /* sums that are not finite, by their place in these 4 x 8 */
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int r = i / 2, c = i % 2 * 4; /* rows 2x + h */
    const int64_t row = row0 + r, col = col0 + c;
    float out[4];
    uint32_t bad = 0;
#pragma unroll
    for (int y = 0; y < 4; y++) {
      out[y] = acc[r / 2][y][2 * (r % 2) + i % 2];
      bad |= (uint32_t) !(fabsf(out[y]) <= 3.402823466e38f) << y;
    }
    if (row >= p.m)
      continue;
    again |= bad << (4 * i);
    if (vectors && col + 4 <= p.n && bad == 0) {
      store_plain(e, row, col, out);
    } else {
#pragma unroll
      for (int y = 0; y < 4; y++)
        if (col + y < p.n && !(bad >> y & 1))
          finish_element(e, row, col + y, out[y]);
    }
  }
  for (; again; again &= again - 1) {
    const int i = __ffs((int)again) - 1;
    const int64_t row = row0 + i / 8, col = col0 + i / 4 % 2 * 4 + i % 4;
    if (col < p.n)
      finish_element(e, row, col, plain_sum<DENSE>(p, row, col));
  }
}

template <bool DENSE>
static __device__ __forceinline__ void consume(const esmm_strips_product_params &p, const char *ring,
                                               strips_shared *shared, int stages, int blocks_m, int blocks_n)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, wm = warp / MMA_COLS, wn = warp % MMA_COLS;
  const char *a_slot = ring + wm * MMA_CHUNK * MMA_SEGMENT, *b_slot = ring + (MMA_ROWS + wn) * MMA_CHUNK * MMA_SEGMENT;
  const uint32_t below = (1u << lane) - 1;
  uint16_t *list = shared->lists[warp];
  const int hold = max(stages / 2, 1); /* stages a warp may keep for the sake of a few entries */
  ring_position at = {0, 0};
  uint32_t head = 0, tail = 0;
  ring_position oldest = {0, 0};
  int held = 0; /* stages from the oldest on that were not given back yet */
  for (int i = (int)blockIdx.x; i < blocks_m * blocks_n; i += (int)gridDim.x) {
    float acc[2][4][4];
#pragma unroll
    for (int j = 0; j < 32; j++)
      acc[j / 16][j / 4 % 4][j % 4] = 0.0f;
    bool last = false;
    while (!last) {
      barrier_wait(&shared->ring.full[at.stage], at.parity);
      last = shared->ring.last[at.stage] != 0;
      const uint32_t joint = shared->ring.masks[at.stage][wm] & shared->ring.masks[at.stage][MMA_ROWS + wn];
      const uint32_t added = (uint32_t)__popc(joint);
      if (joint >> lane & 1)
        list[(tail + (uint32_t)__popc(joint & below)) % MMA_LIST] =
            (uint16_t)(at.stage * (MMA_STAGE / 32) + lane * (MMA_SEGMENT / 32) + lane % 4);
      tail += added;
      held++;
      __syncwarp();
      advance(at, 1, stages);
      const uint32_t waiting = tail - head;
      if (!last && held < hold && waiting < MMA_ENOUGH)
        continue;
      /* With the ring in need, a few entries cannot wait for more. */
      const uint32_t now = last || (held >= hold && waiting < 8) ? waiting : waiting & ~7u;
      if (now > 0)
        multiply(acc, a_slot, b_slot, list, head, now);
      head += now;
      __syncwarp();
      /* The remainder keeps its stages: the newest, or all where that had too few. */
      const int keep = tail == head ? 0 : tail - head <= added ? 1 : held;
      for (; held > keep; held--) {
        give_back(oldest, stages);
        advance(oldest, 1, stages);
      }
    }
    int row, col;
    block_at(i, blocks_m, blocks_n, row, col);
    store<DENSE>(p, acc, (int64_t)(row * MMA_ROWS + wm) * ESMM_STRIP, (int64_t)(col * MMA_COLS + wn) * ESMM_STRIP);
  }
}

/* The whole kernel. Dynamic shared memory: the ring, then strips_shared; its size decides the number of stages. */
template <bool DENSE> static __device__ __forceinline__ void strips_mma(const esmm_strips_product_params &p)
{
  extern __shared__ __align__(128) char ring[];
  if (not_selected(p.selector))
    return;
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  const int stages = min((int)((bytes - sizeof(strips_shared)) / MMA_STAGE), MMA_MOST_STAGES);
  strips_shared *shared = (strips_shared *)(ring + stages * MMA_STAGE);
  const int blocks_m = (int)((p.m + MMA_ROWS * ESMM_STRIP - 1) / (MMA_ROWS * ESMM_STRIP));
  const int blocks_n = (int)((p.n + MMA_COLS * ESMM_STRIP - 1) / (MMA_COLS * ESMM_STRIP));
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      barrier_init(&shared->ring.full[s], 32 + 1);
    }
  }
  __syncthreads();
  if ((int)threadIdx.x / 32 < MMA_CONSUMERS)
    consume<DENSE>(p, ring, shared, stages, blocks_m, blocks_n);
  else
    produce<DENSE>(p, ring, &shared->ring, stages, blocks_m, blocks_n);
}

#endif
