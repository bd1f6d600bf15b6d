/*
 * strips_mma.cuh: the product of two operands in strips, on tensor cores at fp32 accuracy, by mma.sync (sm_80 and
 * later). k_joint_f32.cu skips with it; k_dense_f32_mma.cu does not.
 *
 *   A  4 strips of 32 rows      a block computes 128 x 128 of C, in 16 subtiles of 32 x 32
 *   B  4 strips of 32 columns   8 consumer warps own two subtiles each: 2 strips of A by 1 strip of B
 *                               4 producer warps feed them, two strips each
 *
 * Producers walk the union of the block's bitmaps, (OR of A's strips) AND (OR of B's strips), and gather 32 of its k's
 * at a time into a ring of stages: only the segments (one strip at one k, 128 bytes) whose own bit is set are loaded.
 * With each stage go 8 masks, one a strip, in the numbering of its 32 entries.
 * A consumer's joint is one AND of two masks. It notes the entries in a list of its own and multiplies them eight at a
 * time; what is left over waits for the next stages, so that almost no step runs half empty, and warps drift apart by
 * several stages instead of waiting for the slowest at each.
 *
 * Numbers: x = hi + lo, both TF32 (hi is x with 13 bits cut off, lo the exact rest, cut by the unit), and a product is
 * lo*hi + hi*lo + hi*hi. The unit truncates its sums, so they are kept short: every few steps they are added to fp32
 * registers that round to nearest. A sum that is not finite is made again with plain FMAs, because splitting turns an
 * infinity into a NaN.
 *
 * Fragments: mma m16n8k8 wants row g (lane / 4) and k t (lane % 4). Lane (g, t) reads rows 4g..4g+3 of an A segment
 * with one 16-byte load: rows 4g, 4g+1 are rows g, g+8 of the first m16 tile, 4g+2, 4g+3 of the second; columns
 * likewise feed four n8 tiles. Quad q of entry e lies at q ^ 2(e % 4): eight lanes that read one quad pair of four
 * entries in a row then fall into different banks.
 *
 * Budget: a stage is 32 KiB; six of them on sm_90, four on sm_80, three on sm_86 and sm_89. 168 registers a thread.
 */
#ifndef ESMM_CUDA_STRIPS_MMA_CUH
#define ESMM_CUDA_STRIPS_MMA_CUH

#include "device.cuh"

#define SM_ROWS 3 /* strips of A in a block */
#define SM_PRODUCERS 4
#define SM_COLS 4 /* strips of B */
#define SM_STRIPS (SM_ROWS + SM_COLS)
#define SM_CONSUMERS (SM_ROWS * SM_COLS)
#define SM_THREADS (32 * (SM_CONSUMERS + SM_PRODUCERS))
#define SM_SHARE ((SM_STRIPS + SM_PRODUCERS - 1) / SM_PRODUCERS) /* strips of a producer */
#define SM_CHUNK 32                                              /* entries of a stage */
#define SM_SEGMENT (ESMM_STRIP * 4)
#define SM_STAGE (SM_STRIPS * SM_CHUNK * SM_SEGMENT)
#define SM_MOST_STAGES 7
#define SM_LIST 64   /* entries a list can hold: fewer than SM_ENOUGH, and a stage */
#define SM_ENOUGH 24 /* entries that are worth starting for */
#define SM_MASKS 12  /* words of a stage's masks: 8 strips, the flag, padding */
#define SM_GROUP 8   /* block rows that are walked together, so that they share B in L2 */

typedef struct strips_shared {
  uint64_t full[SM_MOST_STAGES], empty[SM_MOST_STAGES];
  uint32_t masks[SM_MOST_STAGES][SM_MASKS];
  uint16_t lists[SM_CONSUMERS][SM_LIST]; /* where in the ring an entry lies: segment and swizzle, in 32 bytes */
} strips_shared;

static_assert(SM_ROWS * ESMM_STRIP == ESMM_STRIPS_MMA_ROWS && SM_COLS * ESMM_STRIP == ESMM_STRIPS_MMA_COLS &&
                  SM_THREADS == ESMM_STRIPS_MMA_THREADS &&
                  SM_STAGE + sizeof(strips_shared) <= ESMM_STRIPS_MMA_SHARED(1),
              "params.h tells the host another shape");

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
  return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void barrier_init(uint64_t *b, uint32_t count)
{
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(b)) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t parity)
{
  uint32_t done = 0;
  while (!done)
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
#endif
}

/* d = a * b + c */
static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                           const float (&c)[4])
{
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

static __device__ __forceinline__ void split(float x, uint32_t &hi, uint32_t &lo)
{
  hi = __float_as_uint(x) + 0x1000u; /* rounds; the unit cuts the rest off */
  lo = __float_as_uint(x - __uint_as_float(hi & 0xffffe000u));
}

/* The r-th set bit (from 0) of a word that has it. */
static __device__ __forceinline__ int select_bit(uint32_t word, int r)
{
  int at = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const int below = __popc(word >> at & ((1u << width) - 1));
    if (r >= below) {
      r -= below;
      at += width;
    }
  }
  return at;
}

/* Which 128 x 128 block of C comes i-th: groups of SM_GROUP block rows, column by column. */
static __device__ __forceinline__ void block_at(int i, int rows, int cols, int &row, int &col)
{
  const int group = i / (SM_GROUP * cols), in_group = i % (SM_GROUP * cols);
  const int height = min(SM_GROUP, rows - group * SM_GROUP);
  row = group * SM_GROUP + in_group % height;
  col = in_group / height;
}

/* ---- producers ---- */

/* Position in the ring: stage and the parity of its current round. */
typedef struct ring_position {
  int stage;
  uint32_t parity;
} ring_position;

static __device__ __forceinline__ void advance(ring_position &at, int stages)
{
  if (++at.stage == stages) {
    at.stage = 0;
    at.parity ^= 1;
  }
}

/* Words of the bitmaps of a block's strips, one a lane: 1024 k's from word0 on. */
template <bool DENSE>
static __device__ __forceinline__ void load_words(const esmm_strips_product_params &p, int row, int col, int word0,
                                                  uint32_t (&words)[SM_STRIPS])
{
  const int word = word0 + (int)threadIdx.x % 32, count = (int)(p.a.k_padded / 32);
#pragma unroll
  for (int s = 0; s < SM_STRIPS; s++) {
    const esmm_strips &operand = s < SM_ROWS ? p.a : p.b;
    const int strip = s < SM_ROWS ? SM_ROWS * row + s : SM_COLS * col + s - SM_ROWS;
    words[s] = 0;
    if (strip < operand.strips && word < count) {
      if (DENSE)
        words[s] = (word + 1) * 32 <= (int)p.k ? ~0u : (1u << ((int)p.k - word * 32)) - 1;
      else
        words[s] = __ldg((const uint32_t *)operand.bits + (int64_t)strip * count + word);
    }
  }
}

/* The alive segments of one chunk. Each lane holds the k of one entry, and where it is in `words`. */
static __device__ __forceinline__ void load_chunk(const esmm_strips_product_params &p, int row, int col,
                                                  const uint32_t (&words)[SM_STRIPS], int from, int bit, int k,
                                                  bool valid, uint32_t stage, uint32_t *masks)
{
  const int lane = (int)threadIdx.x % 32, part = lane % 8;
  uint32_t source[SM_CHUNK / 4], to = stage + (uint32_t)(lane / 8 * SM_SEGMENT + ((part ^ (lane / 8 * 2)) * 16));
#pragma unroll
  for (int i = 0; i < SM_CHUNK / 4; i++) /* in units of 16 bytes */
    source[i] = (uint32_t)__shfl_sync(~0u, k, 4 * i + lane / 8) * (SM_SEGMENT / 16) + (uint32_t)part;
#pragma unroll
  for (int s = 0; s < SM_STRIPS; s++) {
    const uint32_t word = __shfl_sync(~0u, words[s], from); /* by all lanes, valid or not */
    const uint32_t mask = __ballot_sync(~0u, valid && (word >> bit & 1));
    if (lane == 0)
      masks[s] = mask;
  }
  __syncwarp();
#pragma unroll 1 /* all addresses at once would not fit the registers */
  for (int s = 0; s < SM_STRIPS; s++) {
    const int64_t strip = s < SM_ROWS ? SM_ROWS * row + s : SM_COLS * col + s - SM_ROWS;
    const float4 *data = (const float4 *)(s < SM_ROWS ? p.a.data : p.b.data) + strip * p.a.k_padded * (SM_SEGMENT / 16);
    const uint32_t mine = masks[s] >> (lane / 8);
#pragma unroll
    for (int i = 0; i < SM_CHUNK / 4; i++)
      if (mine >> (4 * i) & 1)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + (uint32_t)(4 * i * SM_SEGMENT)),
                     "l"(data + source[i])
                     : "memory");
    to += SM_CHUNK * SM_SEGMENT;
  }
}

/*
 * The producers take turns: each makes every fourth chunk whole, so that the latency of one (the ranks, the loads)
 * hides behind the others'. All of them walk the same unions, and so agree on which chunk is whose.
 */
template <bool DENSE>
static __device__ __forceinline__ void produce(const esmm_strips_product_params &p, char *ring, strips_shared *shared,
                                               int stages, int blocks_m, int blocks_n)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 - SM_CONSUMERS;
  const int count = (int)(p.a.k_padded / 32);
  ring_position at = {0, 1}; /* the first round of waits on empty stages passes at once */
  int turn = 0;
  for (int i = (int)blockIdx.x; i < blocks_m * blocks_n; i += (int)gridDim.x) {
    int row, col;
    uint32_t words[SM_STRIPS], next[SM_STRIPS];
    block_at(i, blocks_m, blocks_n, row, col);
    load_words<DENSE>(p, row, col, 0, next);
    for (int word0 = 0; word0 < count; word0 += 32) {
      uint32_t alive[2] = {0, 0};
#pragma unroll
      for (int s = 0; s < SM_STRIPS; s++) {
        words[s] = next[s];
        alive[s >= SM_ROWS] |= words[s];
      }
      load_words<DENSE>(p, row, col, word0 + 32, next);
      const uint32_t joint = alive[0] & alive[1];
      const int ones = __popc(joint);
      int through = ones; /* entries up to this lane's word and in it */
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, through, d);
        if (lane >= d)
          through += other;
      }
      const int total = __shfl_sync(~0u, through, 31);
      const bool last_words = word0 + 32 >= count;
      const int chunks = max((total + SM_CHUNK - 1) / SM_CHUNK, last_words ? 1 : 0);
      for (int c = 0; c < chunks; c++) {
        if (turn == warp) {
          const int rank = c * SM_CHUNK + lane;
          int from = 0; /* the lane whose word holds entry `rank` */
#pragma unroll
          for (int d = 16; d > 0; d /= 2)
            if (__shfl_sync(~0u, through, from + d - 1) <= rank)
              from += d;
          const int before = __shfl_sync(~0u, through - ones, from);
          const int bit = select_bit(__shfl_sync(~0u, joint, from), rank - before) & 31;
          barrier_wait(&shared->empty[at.stage], at.parity);
          load_chunk(p, row, col, words, from, bit, (word0 + from) * 32 + bit, rank < total,
                     shared_address(ring) + (uint32_t)(at.stage * SM_STAGE), shared->masks[at.stage]);
          if (lane == 0)
            shared->masks[at.stage][SM_STRIPS] = last_words && c == chunks - 1;
          asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&shared->full[at.stage]))
                       : "memory");
          if (lane == 0)
            barrier_arrive(&shared->full[at.stage]); /* orders the masks, which the copies' arrival does not */
        }
        turn = (turn + 1) % SM_PRODUCERS;
        advance(at, stages);
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
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
      const uint32_t at = (uint32_t)list[(head + (uint32_t)(t + 4 * half)) % SM_LIST] * 32 ^ (uint32_t)(g * 16);
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

/* An element's sum with plain FMAs: what the tensor core cannot say of infinities. */
template <bool DENSE>
static __device__ __forceinline__ float plain_sum(const esmm_strips_product_params &p, int64_t row, int64_t col)
{
  const int64_t words = p.a.k_padded / 32, a_strip = row / ESMM_STRIP, b_strip = col / ESMM_STRIP;
  const float *a = (const float *)p.a.data + a_strip * p.a.k_padded * ESMM_STRIP + row % ESMM_STRIP;
  const float *b = (const float *)p.b.data + b_strip * p.b.k_padded * ESMM_STRIP + col % ESMM_STRIP;
  const uint32_t *a_bits = (const uint32_t *)p.a.bits + a_strip * words;
  const uint32_t *b_bits = (const uint32_t *)p.b.bits + b_strip * words;
  float sum = 0.0f;
  for (int64_t k = 0; k < p.k; k++)
    if (DENSE || (a_bits[k / 32] & b_bits[k / 32]) >> (k % 32) & 1)
      sum = fmaf(a[k * ESMM_STRIP], b[k * ESMM_STRIP], sum);
  return sum;
}

/* A subtile to C. Lane (g, t) holds 8 columns from 8t on of the rows 4g to 4g + 3. */
template <bool DENSE>
static __device__ __forceinline__ void store(const esmm_strips_product_params &p, const float (&acc)[2][4][4],
                                             int64_t row0, int64_t col0)
{
  const int lane = (int)threadIdx.x % 32;
  const esmm_epilogue_params &e = p.epilogue;
  const bool vectors = is_plain(e) && e.c.ld % 4 == 0 && e.c.data % 16 == 0;
  row0 += lane / 4 * 4;
  col0 += lane % 4 * 8;
  uint32_t again = 0; /* elements whose sum is not finite, by their place in these 4 x 8 */
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
      *(float4 *)((float *)e.c.data + row * e.c.ld + col) = make_float4(out[0], out[1], out[2], out[3]);
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
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, wm = warp / SM_COLS, wn = warp % SM_COLS;
  const char *a_slot = ring + wm * SM_CHUNK * SM_SEGMENT, *b_slot = ring + (SM_ROWS + wn) * SM_CHUNK * SM_SEGMENT;
  const uint32_t below = (1u << lane) - 1;
  uint16_t *list = shared->lists[warp];
  const int hold = max(stages / 2, 1); /* stages a warp may keep for the sake of a few entries */
  ring_position at = {0, 0};
  uint32_t head = 0, tail = 0;
  int held = 0, oldest = 0; /* stages that are not released yet */
  for (int i = (int)blockIdx.x; i < blocks_m * blocks_n; i += (int)gridDim.x) {
    float acc[2][4][4];
#pragma unroll
    for (int j = 0; j < 32; j++)
      acc[j / 16][j / 4 % 4][j % 4] = 0.0f;
    bool last = false;
    while (!last) {
      barrier_wait(&shared->full[at.stage], at.parity);
      const uint32_t *masks = shared->masks[at.stage];
      const uint32_t joint = masks[wm] & masks[SM_ROWS + wn], added = (uint32_t)__popc(joint);
      last = masks[SM_STRIPS] != 0;
      if (joint >> lane & 1)
        list[(tail + (uint32_t)__popc(joint & below)) % SM_LIST] =
            (uint16_t)(at.stage * (SM_STAGE / 32) + lane * (SM_SEGMENT / 32) + lane % 4);
      tail += added;
      held++;
      __syncwarp();
      advance(at, stages);
      const uint32_t waiting = tail - head;
      if (!last && held < hold && waiting < SM_ENOUGH)
        continue;
      /* With the ring in need, a few entries cannot wait for more. */
      const uint32_t now = last || (held >= hold && waiting < 8) ? waiting : waiting & ~7u;
      if (now > 0)
        multiply(acc, a_slot, b_slot, list, head, now);
      head += now;
      __syncwarp();
      /* What is left over keeps its stages: the newest, or all where that had too few. */
      const int keep = tail == head ? 0 : tail - head <= added ? 1 : held;
      for (; held > keep; held--) {
        if (lane == 0)
          barrier_arrive(&shared->empty[oldest]);
        oldest = oldest + 1 == stages ? 0 : oldest + 1;
      }
    }
    int row, col;
    block_at(i, blocks_m, blocks_n, row, col);
    store<DENSE>(p, acc, (int64_t)(row * SM_ROWS + wm) * ESMM_STRIP, (int64_t)(col * SM_COLS + wn) * ESMM_STRIP);
  }
}

/* The whole kernel. Dynamic shared memory: the ring, then strips_shared; its size decides the number of stages. */
template <bool DENSE> static __device__ __forceinline__ void strips_mma(const esmm_strips_product_params &p)
{
  extern __shared__ __align__(128) char ring[];
  if (gate_closed(p.gate))
    return;
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  const int stages = min((int)((bytes - sizeof(strips_shared)) / SM_STAGE), SM_MOST_STAGES);
  strips_shared *shared = (strips_shared *)(ring + stages * SM_STAGE);
  const int blocks_m = (int)((p.m + SM_ROWS * ESMM_STRIP - 1) / (SM_ROWS * ESMM_STRIP));
  const int blocks_n = (int)((p.n + SM_COLS * ESMM_STRIP - 1) / (SM_COLS * ESMM_STRIP));
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      barrier_init(&shared->full[s], 32 + 1);
      barrier_init(&shared->empty[s], SM_CONSUMERS);
    }
  }
  __syncthreads();
  if ((int)threadIdx.x / 32 < SM_CONSUMERS)
    consume<DENSE>(p, ring, shared, stages, blocks_m, blocks_n);
  else
    produce<DENSE>(p, ring, shared, stages, blocks_m, blocks_n);
}

#endif
