/*
 * strips_ring.cuh: a ring of stages in shared memory, and the producer warps that fill it with the k's that a block of
 * C needs. The consumers are the includer's (strips_mma.cuh), which defines the block's shape first:
 *
 *   MMA_ROWS, MMA_COLS  strips of A and of B in a block
 *   MMA_CONSUMERS       consumer warps; the producers are the warps behind them
 *   MMA_CHUNK           entries of a stage, 32 at most
 *   MMA_MOST_STAGES     most stages of the ring, 7 at most; it has at least as many as there are producers
 *
 * Producers walk the union of the block's bitmaps, (OR of A's strips) AND (OR of B's strips), and gather MMA_CHUNK of
 * its k's at a time into a stage: only segments (one strip at one k, 128 bytes) with their own bit set are loaded. With
 * each stage go masks, one a strip, in the numbering of its entries: a consumer's joint is one AND of two masks.
 *
 * Quad q (4 rows or columns) of entry e lies at q ^ 2(e % 4) of its segment: eight lanes that read one quad pair of
 * four entries in a row then fall into different banks.
 */
#ifndef ESMM_CUDA_STRIPS_RING_CUH
#define ESMM_CUDA_STRIPS_RING_CUH

#include "cuda/kernels/common/device.cuh"

#define MMA_PRODUCERS ESMM_STRIPS_MMA_LEAST_STAGES /* see produce */
#define MMA_STRIPS (MMA_ROWS + MMA_COLS)
#define MMA_THREADS (32 * (MMA_CONSUMERS + MMA_PRODUCERS))
#define MMA_BATCH 1024 /* k's that are listed at once: a word a lane */
#define MMA_SEGMENT (ESMM_STRIP * 4)
#define MMA_STAGE (MMA_STRIPS * MMA_CHUNK * MMA_SEGMENT)
#define MMA_GROUP 8 /* block rows that are walked together, so that they share B in L2 */

typedef struct strips_ring {
  uint64_t full[MMA_MOST_STAGES];
  uint32_t masks[MMA_MOST_STAGES][MMA_STRIPS];
  uint32_t last[MMA_MOST_STAGES];           /* 1: the block of C ends with this stage */
  uint16_t alive[MMA_PRODUCERS][MMA_BATCH]; /* the k's of a batch that are in the union, counted from its start */
} strips_ring;

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

static __device__ __forceinline__ void split(float x, uint32_t &hi, uint32_t &lo)
{
  hi = __float_as_uint(x) + 0x1000u; /* rounds; the unit cuts the rest off */
  lo = __float_as_uint(x - __uint_as_float(hi & 0xffffe000u));
}

/* Which block of C comes i-th: groups of MMA_GROUP block rows, column by column. */
static __device__ __forceinline__ void block_at(int i, int rows, int cols, int &row, int &col)
{
  const int group = i / (MMA_GROUP * cols), in_group = i % (MMA_GROUP * cols);
  const int height = min(MMA_GROUP, rows - group * MMA_GROUP);
  row = group * MMA_GROUP + in_group % height;
  col = in_group / height;
}

/* ---- producers ---- */

/* Position in the ring: stage and the parity of its current round. */
typedef struct ring_position {
  int stage;
  uint32_t parity;
} ring_position;

static __device__ __forceinline__ void advance(ring_position &at, int by, int stages)
{
  for (at.stage += by; at.stage >= stages; at.stage -= stages)
    at.parity ^= 1;
}

/*
 * A stage is given back through one of the block's numbered barriers (0 is __syncthreads'): each consumer warp arrives,
 * the producer warp that fills it in the next round waits. Odd and even rounds have separate barriers, because a
 * producer may come for the round after next before the slowest has come for the next.
 */
#define MMA_RETURN_THREADS (32 * (MMA_CONSUMERS + 1))
static_assert(2 * MMA_MOST_STAGES < 16, "a block has 16 barriers");

static __device__ __forceinline__ void give_back(const ring_position &at, int stages)
{
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + at.stage + (at.parity ? stages : 0)), "n"(MMA_RETURN_THREADS) : "memory");
}

/* What was given back in the round before this position's. */
static __device__ __forceinline__ void take_back(const ring_position &at, int stages)
{
  asm volatile("bar.sync %0, %1;" ::"r"(1 + at.stage + (at.parity ? 0 : stages)), "n"(MMA_RETURN_THREADS) : "memory");
}

/* Words of the bitmaps of a block's strips, one a lane: 1024 k's from word0 on. */
template <bool DENSE>
static __device__ __forceinline__ void load_words(const esmm_strips_product_params &p, int row, int col, int word0,
                                                  uint32_t (&words)[MMA_STRIPS])
{
  const int word = word0 + (int)threadIdx.x % 32, count = (int)(p.a.k_padded / 32);
#pragma unroll
  for (int s = 0; s < MMA_STRIPS; s++) {
    const esmm_strips &operand = s < MMA_ROWS ? p.a : p.b;
    const int strip = s < MMA_ROWS ? MMA_ROWS * row + s : MMA_COLS * col + s - MMA_ROWS;
    words[s] = 0;
    if (strip < operand.strips && word < count) {
      if (DENSE)
        words[s] = (word + 1) * 32 <= (int)p.k ? ~0u : (1u << ((int)p.k - word * 32)) - 1;
      else
        words[s] = __ldg((const uint32_t *)operand.bits + (int64_t)strip * count + word);
    }
  }
}

/*
 * The alive segments of 32 entries; a lane holds one of them: word `from`, bit `bit`. Eight lanes copy a segment.
 */
static __device__ __forceinline__ void load_entries(const esmm_strips_product_params &p, int row, int col,
                                                    const uint32_t (&words)[MMA_STRIPS], int word0, int from, int bit,
                                                    bool valid, uint32_t stage, uint32_t *masks)
{
  const int lane = (int)threadIdx.x % 32, part = lane % 8, k = (word0 + from) * 32 + bit;
  uint32_t source[8], to = stage + (uint32_t)(lane / 8 * MMA_SEGMENT + ((part ^ (lane / 8 * 2)) * 16));
#pragma unroll
  for (int i = 0; i < 8; i++)
    source[i] = (uint32_t)__shfl_sync(~0u, k, 4 * i + lane / 8) * MMA_SEGMENT + (uint32_t)part * 16;
#pragma unroll
  for (int s = 0; s < MMA_STRIPS; s++) {
    const uint32_t word = __shfl_sync(~0u, words[s], from); /* by all lanes, valid or not */
    const uint32_t mask = __ballot_sync(~0u, valid && (word >> bit & 1));
    if (lane == 0)
      masks[s] = mask;
  }
  __syncwarp();
#pragma unroll 1 /* all addresses at once would not fit the registers */
  for (int s = 0; s < MMA_STRIPS; s++, to += MMA_CHUNK * MMA_SEGMENT) {
    const int strip = s < MMA_ROWS ? MMA_ROWS * row + s : MMA_COLS * col + s - MMA_ROWS;
    const char *data = (const char *)(s < MMA_ROWS ? p.a.data : p.b.data) + strip * p.a.k_padded * MMA_SEGMENT;
    const uint32_t mine = masks[s] >> (lane / 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (mine >> (4 * i) & 1)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + (uint32_t)(4 * i * MMA_SEGMENT)),
                     "l"(data + source[i])
                     : "memory");
  }
}

/*
 * The producers take turns: each makes every fourth chunk whole, so that the latency of one hides behind the others'.
 * All of them walk the same unions, and so agree on each chunk's producer. There must be as many stages as producers:
 * with fewer, two of them could wait for the same round of a stage.
 */
template <bool DENSE>
static __device__ __forceinline__ void produce(const esmm_strips_product_params &p, char *ring, strips_ring *shared,
                                               int stages, int blocks_m, int blocks_n)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 - MMA_CONSUMERS;
  const int count = (int)(p.a.k_padded / 32);
  uint16_t *alive = shared->alive[warp];
  ring_position at = {0, 0};
  int before = 0;             /* chunks of earlier batches, modulo the producers */
  bool used = warp >= stages; /* the ring has gone round: its stages must be given back first */
  advance(at, warp, stages);
  for (int i = (int)blockIdx.x; i < blocks_m * blocks_n; i += (int)gridDim.x) {
    int row, col;
    uint32_t words[MMA_STRIPS], next[MMA_STRIPS];
    block_at(i, blocks_m, blocks_n, row, col);
    load_words<DENSE>(p, row, col, 0, next);
    for (int word0 = 0; word0 < count; word0 += 32) {
      uint32_t of_a = 0, of_b = 0;
#pragma unroll
      for (int s = 0; s < MMA_STRIPS; s++) {
        words[s] = next[s];
        of_a |= s < MMA_ROWS ? words[s] : 0;
        of_b |= s < MMA_ROWS ? 0 : words[s];
      }
      load_words<DENSE>(p, row, col, word0 + 32, next);
      uint32_t joint = of_a & of_b;
      int through = __popc(joint); /* entries up to this lane's word and in it */
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, through, d);
        if (lane >= d)
          through += other;
      }
      for (int rank = through - __popc(joint); joint; joint &= joint - 1)
        alive[rank++] = (uint16_t)(lane * 32 + __ffs((int)joint) - 1);
      __syncwarp();
      const int total = __shfl_sync(~0u, through, 31);
      const bool last_words = word0 + 32 >= count;
      const int chunks = max((total + MMA_CHUNK - 1) / MMA_CHUNK, last_words ? 1 : 0);
      for (int c = (warp - before) & (MMA_PRODUCERS - 1); c < chunks; c += MMA_PRODUCERS) {
        if (used)
          take_back(at, stages);
        const int rank = c * MMA_CHUNK + lane;
        const bool valid = rank < total && lane < MMA_CHUNK;
        const int entry = valid ? alive[rank] : 0;
        load_entries(p, row, col, words, word0, entry / 32, entry % 32, valid,
                     shared_address(ring) + (uint32_t)(at.stage * MMA_STAGE), shared->masks[at.stage]);
        if (lane == 0)
          shared->last[at.stage] = last_words && c == chunks - 1;
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&shared->full[at.stage]))
                     : "memory");
        if (lane == 0)
          barrier_arrive(&shared->full[at.stage]); /* orders the masks, which the copies' arrival does not */
        used = used || at.stage + MMA_PRODUCERS >= stages;
        advance(at, MMA_PRODUCERS, stages);
      }
      before = (before + chunks) & (MMA_PRODUCERS - 1);
      __syncwarp(); /* before the list is written again */
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
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

#endif
