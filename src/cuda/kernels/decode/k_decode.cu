/*
 * k_decode.cu: C [m,n] = A [m,k] x B [k,n] for m of 1 to 16, in one launch. Reads only the rows of B that some row of A
 * needs; the floor is their bytes.
 *
 *                  columns of C: a block has `groups` warps side by side, 64 columns each (32 of fp32)
 *            +-----------+-----------+--
 *   k's of   | warp 0    | warp 1    |      groups = 2: warps 0, 2, 4, 6 take the steps 0, 1, 2, 3, 0, ... of 16 listed
 *   rank 0   | warp 2    | warp 3    |      k's for the same columns
 *            +-----------+-----------+--
 *   rank 1   | the next block of the cluster: up to 8 share k, and this is what fills the GPU
 *            +-----------+-----------+--
 *
 * A block copies its k's of A to shared memory (all copies at once: one latency) and lists, in ascending order, those
 * with a nonzero in any row. Then each warp streams the rows of its steps of the list from global memory to registers,
 * STAGES steps of 2 KiB ahead. Entries that fill up the last step are replaced by zeros in both operands, so that no
 * Inf of either gets in.
 *
 * 16-bit B: mma m16n8k16 computes C transposed, 16 columns of B by 8 rows of A. Any order of k's is as good as another
 * while both operands have the same, and so is any order of columns. Thus lane (g, t) = (lane / 4, lane % 4) needs
 * columns 8g .. 8g+7 of its four k's, entries 4t .. 4t+3 of the step, which are k's 2t, 2t+1, 2t+8, 2t+9 of the mma: 16
 * bytes of each row. Lane 8t + g loads them, as then 8 lanes side by side read 128 bytes of one row, and a shuffle
 * exchanges them. Columns 8g+2p and 8g+2p+1 become rows g and g+8 of mma p. A's operand is gathered from shared memory
 * by the same list.
 *
 * fp32: lane (x, y) = (lane / 8, lane % 8) takes entries 4x .. 4x+3 and columns 4y .. 4y+3, with IEEE multiply-adds;
 * the four x meet at the end. A's k's lie [k][rows] in shared memory, to be read four rows at a time.
 *
 * A gated product, C = activation(A x gate) * (A x B), is one launch too where both are 16-bit: warps side by side take
 * turns with the two weights' rows of the same columns, by the same list, and the gate's sums are m more rows of sums.
 *
 * Sums of a block's warps are added in shared memory, those of a cluster's blocks in the shared memory of the block
 * that finishes these columns; always in the same order, so results do not vary. Other GPUs than sm_90 have no
 * clusters.
 *
 * Registers bound what is in flight: 3 blocks of 8 warps at 80 registers and two stages each, 2 at 128 where m > 8.
 */
#include "cuda/kernels/common/few_rows.cuh"
#include "cuda/kernels/common/gate.cuh"
#include "cuda/kernels/common/mma.cuh"
#include "cuda/kernels/decode/decode_params.h"

#define THREADS ESMM_DECODE_THREADS
#define WARPS (THREADS / 32)
#define STEP ESMM_DECODE_STEP /* listed k's of a step */
#define PART 8                /* k's that one thread turns into list entries */
#define EVERY_LANE 0xffffffffu
#define LOG_COLS 6
#define LOG_STRIP 5
static_assert(1 << LOG_COLS == ESMM_DECODE_COLS && 1 << LOG_STRIP == ESMM_STRIP, "powers of two");

/* ---- clusters: blocks send their sums to each other's shared memory ---- */

/* Says that this block has started, and that `arrived` counts what is sent to it up to `bytes`. */
static __device__ __forceinline__ void cluster_start(uint64_t *arrived, int bytes)
{
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(arrived);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/* Waits until all blocks have said so. */
static __device__ __forceinline__ void cluster_wait_started(void)
{
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* Four bytes to the same place in block `rank`. */
static __device__ __forceinline__ void cluster_send(void *place, int rank, uint32_t x, uint64_t *arrived)
{
#if __CUDA_ARCH__ >= 900
  uint32_t there, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((uint32_t)__cvta_generic_to_shared(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(barrier)
      : "r"((uint32_t)__cvta_generic_to_shared(arrived)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(x),
               "r"(barrier)
               : "memory");
#endif
}

static __device__ __forceinline__ void cluster_wait_arrived(uint64_t *arrived)
{
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"((uint32_t)__cvta_generic_to_shared(arrived))
                 : "memory");
#endif
}

static __device__ __forceinline__ void copy_4(void *to, const void *from)
{
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
}

/* ---- the list ---- */

/*
 * Bit i of mask: k + i is alive. Appends the k's of all threads, thread after thread, to the list that has `count` of
 * them, and returns how many it has then. totals [WARPS] were last read before the block's last barrier but one.
 */
static __device__ __forceinline__ int append(uint32_t mask, int k, int count, uint16_t *list, int *totals)
{
  const int lane = lane_id(), warp = warp_id();
  const uint32_t below = (1u << lane) - 1;
  int at = count, total = 0;
#pragma unroll
  for (int i = 0; i < PART; i++) {
    const uint32_t lanes = __ballot_sync(EVERY_LANE, mask >> i & 1);
    at += __popc(lanes & below);
    total += __popc(lanes);
  }
  if (lane == 0)
    totals[warp] = total;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    at += w < warp ? totals[w] : 0;
    count += totals[w];
  }
#pragma unroll
  for (int i = 0; i < PART; i++)
    if (mask >> i & 1)
      list[at++] = (uint16_t)(k + i);
  return count;
}

/* Fills the last step up with a row that there is. Everything in shared memory is there then. */
static __device__ __forceinline__ void end_list(int count, uint16_t *list)
{
  if (threadIdx.x < STEP)
    list[count + (int)threadIdx.x] = 0;
  __syncthreads();
}

/* ---- blocks and their sums ---- */

/*
 * Dynamic shared memory: A's chunk, the list, for fp32 bits [chunk / 32]; in their place at the end
 *   sums [ways][rows][cols + ESMM_DECODE_PAD]   of the warps that share a column's k's;
 * and at p.inbox
 *   sums [ranks][rows][cols / ranks]            of the columns that this block finishes, from all ranks,
 *   counts [ranks]                              of listed k's, in rank 0.
 * rows: m, or 2 m of a gated product: the gate's come second.
 */
extern __shared__ __align__(16) uint8_t shared[];

struct notes {
  int totals[2][WARPS];   /* see append */
  uint32_t listed, spent; /* k's of this block; nanoseconds of extraction, where they are reported */
  uint64_t arrived;
};

/* Powers of two divide by shifts. */
static __device__ __forceinline__ int log_2(int x)
{
  return 31 - __clz(x);
}

/* The block's first k: neighbours in a cluster have neighbouring ranges. */
static __device__ __forceinline__ int first_k(const esmm_decode_params &p, int ranks)
{
  return ((int)blockIdx.x & (ranks - 1)) * p.range;
}

/* Warps that share columns. */
static __device__ __forceinline__ int ways(const esmm_decode_params &p)
{
  return WARPS >> p.group_shift;
}

/* Which of the warps side by side this is. */
static __device__ __forceinline__ int group_of(const esmm_decode_params &p)
{
  return warp_id() & ((1 << p.group_shift) - 1);
}

/* Of a gated product: it reads the gate's weights. */
template <bool GATED> static __device__ __forceinline__ bool is_gate(const esmm_decode_params &p)
{
  return GATED && group_of(p) % 2 == 1;
}

/* Columns of a block; a warp has 1 << log_width, shared with the warp that reads the gate's. */
template <bool GATED> static __device__ __forceinline__ int log_columns(const esmm_decode_params &p, int log_width)
{
  return log_width + p.group_shift - (GATED ? 1 : 0);
}

/* Rows of sums. */
template <bool GATED> static __device__ __forceinline__ int sum_rows(const esmm_decode_params &p)
{
  return GATED ? 2 * (int)p.a.rows : (int)p.a.rows;
}

/* Which columns are this warp's, counted in warps; tiles of a block's columns first. */
template <bool GATED> static __device__ __forceinline__ int64_t slice(const esmm_decode_params &p)
{
  return ((int64_t)(blockIdx.x >> log_2(cluster_ranks())) << log_columns<GATED>(p, 0)) +
         (group_of(p) >> (GATED ? 1 : 0));
}

/* The first float of this warp's sums. A line has `line` floats, a warp 1 << log_width of them. */
template <bool GATED>
static __device__ __forceinline__ float *sums_of_warp(const esmm_decode_params &p, int log_width, int line)
{
  const int first = (warp_id() >> p.group_shift) * sum_rows<GATED>(p) + (is_gate<GATED>(p) ? (int)p.a.rows : 0);
  return (float *)shared + first * line + ((group_of(p) >> (GATED ? 1 : 0)) << log_width);
}

static __device__ __forceinline__ uint32_t nanoseconds(void)
{
  uint32_t now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
  return now;
}

static __device__ __forceinline__ bool reports(const esmm_decode_params &p)
{
  return p.report != 0 && blockIdx.x == 0 && threadIdx.x == 0;
}

/* rows, log_cols: of the block's sums. */
static __device__ __forceinline__ void start(const esmm_decode_params &p, int rows, int log_cols, notes &n)
{
  const int ranks = cluster_ranks();
  if (ranks > 1) /* rank 0 gets the counts, too */
    cluster_start(&n.arrived, 4 * ((rows << log_cols) + (first_k(p, ranks) == 0 ? ranks : 0)));
  if (threadIdx.x == 0)
    n.listed = n.spent = 0;
}

static __device__ __forceinline__ void note_list(const esmm_decode_params &p, int count, uint32_t begun, notes &n)
{
  if (threadIdx.x == 0)
    n.listed += (uint32_t)count;
  if (reports(p))
    n.spent += nanoseconds() - begun;
}

/* This block's sums to those that finish them. */
static __device__ __forceinline__ void send_sums(const esmm_decode_params &p, int ranks, int rows, int log_cols,
                                                 float *inbox, notes &n)
{
  const float *sums = (const float *)shared;
  const int cols = 1 << log_cols, line = cols + ESMM_DECODE_PAD;
  const int log_mine = log_cols - log_2(ranks), mine = 1 << log_mine, rank = (int)blockIdx.x & (ranks - 1);
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < rows * cols; e += THREADS) {
    const int row = e >> log_cols, col = e & (cols - 1);
    const float *from = sums + row * line + col;
    float sum = *from;
#pragma unroll
    for (int way = 1; way < WARPS; way++)
      if (way < ways(p))
        sum += from[way * rows * line];
    float *to = &inbox[((rank * rows + row) << log_mine) + (col & (mine - 1))];
    if (ranks > 1)
      cluster_send(to, col >> log_mine, __float_as_uint(sum), &n.arrived);
    else
      *to = sum; /* which this thread finishes itself */
  }
  uint32_t *counts = (uint32_t *)(inbox + rows * cols);
  if (threadIdx.x == 0 && ranks > 1)
    cluster_send(&counts[rank], 0, n.listed, &n.arrived);
  else if (threadIdx.x == 0)
    counts[0] = n.listed;
}

/* A sum that arrived in parts. */
static __device__ __forceinline__ float add_parts(const float *parts, int ranks, int step)
{
  float sum = *parts;
#pragma unroll
  for (int rank = 1; rank < ESMM_DECODE_RANKS; rank++)
    if (rank < ranks)
      sum += parts[rank * step];
  return sum;
}

/* From the block's sums in shared memory to C. */
template <bool GATED> static __device__ __forceinline__ void finish(const esmm_decode_params &p, int log_cols, notes &n)
{
  float *inbox = (float *)(shared + p.inbox);
  const int m = (int)p.a.rows, rows = sum_rows<GATED>(p), ranks = cluster_ranks();
  const int log_mine = log_cols - log_2(ranks), mine = 1 << log_mine;
  const int64_t col0 = (int64_t)blockIdx.x * mine; /* tile, then rank */
  if (ranks > 1)
    cluster_wait_started();
  send_sums(p, ranks, rows, log_cols, inbox, n);
  if (ranks > 1)
    cluster_wait_arrived(&n.arrived);
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < m * mine; e += THREADS) {
    const int64_t col = col0 + (e & (mine - 1));
    if (col >= p.epilogue.c.cols)
      continue;
    const float sum = add_parts(inbox + e, ranks, rows * mine);
    if constexpr (GATED)
      finish_gated_element(p.epilogue, (const float *)p.gate_bias, p.gate_activation, e >> log_mine, col,
                           add_parts(inbox + m * mine + e, ranks, rows * mine), sum);
    else
      finish_element(p.epilogue, e >> log_mine, col, sum);
  }
  if (reports(p)) {
    const uint32_t *counts = (const uint32_t *)(inbox + (rows << log_cols));
    uint32_t listed = 0;
#pragma unroll 1
    for (int rank = 0; rank < ranks; rank++)
      listed += counts[rank];
    esmm_choice_device seen = {};
    seen.chosen = 1;
    seen.strip = seen.joint = (float)listed / (float)p.a.cols;
    seen.extract_ns = max(n.spent, 1u);
    report_choice(p.report, seen);
    if (GATED && p.gate_report)
      report_choice(p.gate_report, seen);
  }
}

/* ---- steps of the list ---- */

/* A step on its way: of four entries, 16 bytes of the row. */
struct stage {
  uint4 b[4];
};

/* Four entries from 4 i on. */
static __device__ __forceinline__ void read_entries(const uint16_t *entries, int i, uint32_t (&k)[4])
{
  const uint2 x = ((const uint2 *)entries)[i];
  k[0] = x.x & 0xffff;
  k[1] = x.x >> 16;
  k[2] = x.y & 0xffff;
  k[3] = x.y >> 16;
}

/* b: this lane's columns of the chunk's first row. */
static __device__ __forceinline__ void load_step(stage &s, const uint8_t *b, uint32_t b_row, const uint16_t *entries)
{
  uint32_t k[4];
  read_entries(entries, lane_id() / 8, k);
#pragma unroll
  for (int i = 0; i < 4; i++)
    s.b[i] = load_once(b + (uint64_t)k[i] * b_row);
}

/* Entries past `left` are none: zeros of B, and in k, the four from 4 i on, the place of A's zeros. */
static __device__ __forceinline__ void cut_step(stage &s, int left, int zeros, int i, uint32_t (&k)[4])
{
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (4 * (lane_id() / 8) + j >= left)
      s.b[j] = make_uint4(0, 0, 0, 0);
    if (4 * i + j >= left)
      k[j] = (uint32_t)zeros;
  }
}

/* ---- 16-bit B ---- */

/* A [m, ks from k on] to lines of shared memory, zeros up to a multiple of 8 k's. */
static __device__ __forceinline__ void copy_chunk_16(const esmm_decode_params &p, int k, int ks, uint16_t *tile)
{
  const int m = (int)p.a.rows, line = p.chunk + ESMM_DECODE_SPARE;
  const uint16_t *a = (const uint16_t *)p.a.data;
  const int64_t row_step = p.a.order == ESMM_ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ESMM_ROW_MAJOR ? 1 : p.a.ld;
  a += k * k_step;
  if (p.vector) { /* each thread copies what it will look at: no barrier */
#pragma unroll 1
    for (int i = PART * (int)threadIdx.x; i < ks; i += PART * THREADS)
#pragma unroll 1
      for (int row = 0; row < m; row++)
        copy_16(tile + row * line + i, a + row * row_step + i, 2 * min(PART, ks - i));
    wait_for_copies();
    return;
  }
  for (int i = (int)threadIdx.x; i < (ks + PART - 1) / PART * PART; i += THREADS)
#pragma unroll 4
    for (int row = 0; row < m; row++)
      tile[row * line + i] = i < ks ? a[row * row_step + i * k_step] : (uint16_t)0;
  __syncthreads();
}

static __device__ __forceinline__ int list_chunk_16(int m, int line, int ks, const uint16_t *tile, uint16_t *list,
                                                    int (*totals)[WARPS])
{
  int count = 0;
  for (int from = 0, turn = 0; from < ks; from += PART * THREADS, turn ^= 1) {
    const int k = from + PART * (int)threadIdx.x;
    uint4 any = make_uint4(0, 0, 0, 0);
    if (k < ks)
#pragma unroll 4
      for (int row = 0; row < m; row++) {
        const uint4 x = *(const uint4 *)(tile + row * line + k);
        any = make_uint4(any.x | x.x, any.y | x.y, any.z | x.z, any.w | x.w);
      }
    count = append(nonzero_mask(any), k, count, list, totals[turn]);
  }
  return count;
}

/* Word i of x, from another lane. */
static __device__ __forceinline__ uint32_t hand_over(uint4 x, int i, int lane)
{
  return __shfl_sync(EVERY_LANE, i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w, lane);
}

/* k: four entries from 4t on; lines: of A, this lane's, one in each half. */
template <esmm_dtype DTYPE, int HALVES>
static __device__ __forceinline__ void multiply_step_16(const stage &s, const uint32_t (&k)[4],
                                                        const uint16_t *const (&lines)[HALVES],
                                                        float (&sums)[HALVES][4][4])
{
  const int from = lane_id() % 4 * 8 + lane_id() / 4;
  uint32_t b[HALVES][2];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    b[h][0] = lines[h][k[0]] | (uint32_t)lines[h][k[1]] << 16;
    b[h][1] = lines[h][k[2]] | (uint32_t)lines[h][k[3]] << 16;
  }
#pragma unroll
  for (int p = 0; p < 4; p++) {
    uint32_t word[4]; /* columns 2p and 2p + 1 of each entry */
#pragma unroll
    for (int i = 0; i < 4; i++)
      word[i] = hand_over(s.b[i], p, from);
    const uint32_t a[4] = {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                           __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)};
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      mma16_mma<DTYPE>(sums[h][p], a, b[h][0], b[h][1]);
  }
}

/* The weights that this warp reads. Rather chosen again for each chunk than kept in registers. */
template <bool GATED> static __device__ __forceinline__ uint64_t rows_of_warp(const esmm_decode_params &p)
{
  uint64_t rows = p.b;
  if (GATED)
    asm volatile("{ .reg .pred gate; setp.ne.u32 gate, %3, 0; selp.u64 %0, %1, %2, gate; }"
                 : "=l"(rows)
                 : "l"(p.gate), "l"(p.b), "r"((uint32_t)is_gate<GATED>(p)));
  return rows;
}

template <esmm_dtype DTYPE, int HALVES, int STAGES, bool GATED>
static __device__ __forceinline__ void multiply_chunk_16(const esmm_decode_params &p, int chunk_k, int count,
                                                         const uint16_t *tile, const uint16_t *list,
                                                         float (&sums)[HALVES][4][4])
{
  const int lane = lane_id(), steps = (count + STEP - 1) / STEP;
  if (slice<GATED>(p) * ESMM_DECODE_COLS >= p.epilogue.c.cols)
    return;
  const uint8_t *b = (const uint8_t *)rows_of_warp<GATED>(p) + (int64_t)chunk_k * p.b_row +
                     slice<GATED>(p) * p.b_slice + lane % 8 * 16;
  const uint16_t *lines[HALVES]; /* rows past m repeat the last one: their sums go nowhere */
#pragma unroll
  for (int h = 0; h < HALVES; h++)
    lines[h] = tile + min(8 * h + lane / 4, (int)p.a.rows - 1) * (p.chunk + ESMM_DECODE_SPARE);
  stage stages[STAGES];
  int step = warp_id() >> p.group_shift;
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (step + i * ways(p) < steps)
      load_step(stages[i], b, p.b_row, list + STEP * (step + i * ways(p)));
  for (;;)
#pragma unroll
    for (int i = 0; i < STAGES; i++) { /* the way out keeps each load before the next wait */
      uint32_t k[4];
      if (step >= steps)
        return;
      read_entries(list + STEP * step, lane % 4, k);
      if (count - STEP * step < STEP)
        cut_step(stages[i], count - STEP * step, p.chunk, lane % 4, k);
      multiply_step_16<DTYPE>(stages[i], k, lines, sums);
      if (step + STAGES * ways(p) < steps)
        load_step(stages[i], b, p.b_row, list + STEP * (step + STAGES * ways(p)));
      step += ways(p);
    }
}

/* Sums of a warp to its part of the block's. */
template <bool GATED, int HALVES>
static __device__ __forceinline__ void store_sums_16(const esmm_decode_params &p, const float (&sums)[HALVES][4][4])
{
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int m = (int)p.a.rows, line = (1 << log_columns<GATED>(p, LOG_COLS)) + ESMM_DECODE_PAD;
  float *out = sums_of_warp<GATED>(p, LOG_COLS, line) + 8 * g;
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 8 * h + 2 * t + i;
      if (row < m) {
        const float(*c)[4] = sums[h];
        *(float4 *)(out + row * line) = make_float4(c[0][i], c[0][i + 2], c[1][i], c[1][i + 2]);
        *(float4 *)(out + row * line + 4) = make_float4(c[2][i], c[2][i + 2], c[3][i], c[3][i + 2]);
      }
    }
}

template <esmm_dtype DTYPE, int HALVES, int STAGES, bool GATED>
static __device__ __forceinline__ void decode_16(const esmm_decode_params &p)
{
  __shared__ notes n;
  if (not_selected(p.selector))
    return;
  const int m = (int)p.a.rows, line = p.chunk + ESMM_DECODE_SPARE;
  start(p, sum_rows<GATED>(p), log_columns<GATED>(p, LOG_COLS), n);
  uint16_t *tile = (uint16_t *)shared, *list = tile + m * line;
  if ((int)threadIdx.x < m) /* A's zeros, see cut_step */
    tile[(int)threadIdx.x * line + p.chunk] = 0;
  const int first = first_k(p, cluster_ranks()), last = min(first + p.range, (int)p.a.cols);
  float sums[HALVES][4][4] = {};
#pragma unroll 1
  for (int k = first; k < last; k += p.chunk) {
    const int ks = min(p.chunk, last - k);
    const uint32_t begun = reports(p) ? nanoseconds() : 0;
    if (k > first)
      __syncthreads();
    copy_chunk_16(p, k, ks, tile);
    const int count = list_chunk_16(m, line, ks, tile, list, n.totals);
    end_list(count, list);
    note_list(p, count, begun, n);
    multiply_chunk_16<DTYPE, HALVES, STAGES, GATED>(p, k, count, tile, list, sums);
  }
  __syncthreads();
  store_sums_16<GATED>(p, sums);
  __syncthreads();
  finish<GATED>(p, log_columns<GATED>(p, LOG_COLS), n);
}

/* ---- fp32 ---- */

/* A [m, ks from k on] to [ks][ROWS] in shared memory, and which k's are alive. */
template <int ROWS>
static __device__ __forceinline__ void copy_chunk_32(const esmm_decode_params &p, int k, int ks, float *tile,
                                                     uint32_t *bits)
{
  const int m = (int)p.a.rows, lane = lane_id();
  const int64_t row_step = p.a.order == ESMM_ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ESMM_ROW_MAJOR ? 1 : p.a.ld;
  const float *a = (const float *)p.a.data + k * k_step;
#pragma unroll 1
  for (int i = (int)threadIdx.x; i < ks; i += THREADS)
#pragma unroll 1
    for (int row = 0; row < m; row++)
      copy_4(tile + i * ROWS + row, a + row * row_step + i * k_step);
  wait_for_copies();
  for (int i = (int)threadIdx.x; i - lane < ks; i += THREADS) { /* what this thread copied */
    uint32_t any = 0;
    if (i < ks)
#pragma unroll 4
      for (int row = 0; row < m; row++)
        any |= __float_as_uint(tile[i * ROWS + row]) << 1; /* the sign does not count */
    const uint32_t alive = __ballot_sync(EVERY_LANE, any != 0);
    if (lane == 0)
      bits[i / 32] = alive;
  }
  __syncthreads();
}

static __device__ __forceinline__ int list_chunk_32(int ks, const uint32_t *bits, uint16_t *list, int (*totals)[WARPS])
{
  int count = 0;
  for (int from = 0, turn = 0; from < ks; from += PART * THREADS, turn ^= 1) {
    const int k = from + PART * (int)threadIdx.x;
    count = append(k < ks ? ((const uint8_t *)bits)[k / PART] : 0, k, count, list, totals[turn]);
  }
  return count;
}

template <int ROWS>
static __device__ __forceinline__ void multiply_step_32(const stage &s, const uint32_t (&k)[4], const float *tile,
                                                        float (&sums)[ROWS][4])
{
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float b[4] = {__uint_as_float(s.b[i].x), __uint_as_float(s.b[i].y), __uint_as_float(s.b[i].z),
                        __uint_as_float(s.b[i].w)};
    float a[ROWS];
    if constexpr (ROWS == 1) {
      a[0] = tile[k[i]];
    } else {
#pragma unroll
      for (int row = 0; row < ROWS; row += 4) {
        const float4 x = *(const float4 *)(tile + k[i] * ROWS + row);
        a[row] = x.x;
        a[row + 1] = x.y;
        a[row + 2] = x.z;
        a[row + 3] = x.w;
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        sums[row][c] = __fmaf_rn(a[row], b[c], sums[row][c]);
  }
}

template <int ROWS, int STAGES>
static __device__ __forceinline__ void multiply_chunk_32(const esmm_decode_params &p, int chunk_k, int count,
                                                         const float *tile, const uint16_t *list,
                                                         float (&sums)[ROWS][4])
{
  const int lane = lane_id(), steps = (count + STEP - 1) / STEP;
  if (slice<false>(p) * ESMM_STRIP >= p.epilogue.c.cols)
    return;
  const uint8_t *b = (const uint8_t *)p.b + (int64_t)chunk_k * p.b_row + slice<false>(p) * p.b_slice + lane % 8 * 16;
  stage stages[STAGES];
  int step = warp_id() >> p.group_shift;
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    if (step + i * ways(p) < steps)
      load_step(stages[i], b, p.b_row, list + STEP * (step + i * ways(p)));
  for (;;)
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      uint32_t k[4];
      if (step >= steps)
        return;
      read_entries(list + STEP * step, lane / 8, k);
      if (count - STEP * step < STEP)
        cut_step(stages[i], count - STEP * step, p.chunk, lane / 8, k);
      multiply_step_32<ROWS>(stages[i], k, tile, sums);
      if (step + STAGES * ways(p) < steps)
        load_step(stages[i], b, p.b_row, list + STEP * (step + STAGES * ways(p)));
      step += ways(p);
    }
}

/* Lanes that share columns add up; each then has the sum, and stores every fourth row. */
template <int ROWS>
static __device__ __forceinline__ void store_sums_32(const esmm_decode_params &p, const float (&sums)[ROWS][4])
{
  const int lane = lane_id(), m = (int)p.a.rows, line = (1 << log_columns<false>(p, LOG_STRIP)) + ESMM_DECODE_PAD;
  float *out = sums_of_warp<false>(p, LOG_STRIP, line) + lane % 8 * 4;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      x[c] = sums[row][c] + __shfl_xor_sync(EVERY_LANE, sums[row][c], 8);
      x[c] += __shfl_xor_sync(EVERY_LANE, x[c], 16);
    }
    if (row < m && row % 4 == lane / 8)
      *(float4 *)(out + row * line) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <int ROWS, int STAGES> static __device__ __forceinline__ void decode_32(const esmm_decode_params &p)
{
  __shared__ notes n;
  if (not_selected(p.selector))
    return;
  start(p, (int)p.a.rows, log_columns<false>(p, LOG_STRIP), n);
  float *tile = (float *)shared;
  uint16_t *list = (uint16_t *)(tile + ROWS * (p.chunk + ESMM_DECODE_SPARE));
  uint32_t *bits = (uint32_t *)((uint8_t *)list + ESMM_DECODE_LIST(p.chunk));
  if (threadIdx.x < ROWS) /* A's zeros, see cut_step */
    tile[p.chunk * ROWS + (int)threadIdx.x] = 0.0f;
  const int first = first_k(p, cluster_ranks()), last = min(first + p.range, (int)p.a.cols);
  float sums[ROWS][4] = {};
#pragma unroll 1
  for (int k = first; k < last; k += p.chunk) {
    const int ks = min(p.chunk, last - k);
    const uint32_t begun = reports(p) ? nanoseconds() : 0;
    if (k > first)
      __syncthreads();
    copy_chunk_32<ROWS>(p, k, ks, tile, bits);
    const int count = list_chunk_32(ks, bits, list, n.totals);
    end_list(count, list);
    note_list(p, count, begun, n);
    multiply_chunk_32<ROWS, STAGES>(p, k, count, tile, list, sums);
  }
  __syncthreads();
  store_sums_32(p, sums);
  __syncthreads();
  finish<false>(p, log_columns<false>(p, LOG_STRIP), n);
}

/* ---- what the host launches, by the rows of A that it has room for ---- */

/* Without clusters there are fewer blocks, and no need for three of them at once. */
#if __CUDA_ARCH__ >= 900
#define MANY ESMM_DECODE_BLOCKS_FEW_ROWS
#else
#define MANY ESMM_DECODE_BLOCKS
#endif

#define DECODE(name, blocks, body)                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const __grid_constant__ esmm_decode_params p) \
  {                                                                                                                \
    body(p);                                                                                                       \
  }

DECODE(esmm_decode_bf16_8, MANY, (decode_16<ESMM_BF16, 1, 2, false>))
DECODE(esmm_decode_bf16_16, ESMM_DECODE_BLOCKS, (decode_16<ESMM_BF16, 2, 3, false>))
DECODE(esmm_decode_f16_8, MANY, (decode_16<ESMM_F16, 1, 2, false>))
DECODE(esmm_decode_f16_16, ESMM_DECODE_BLOCKS, (decode_16<ESMM_F16, 2, 3, false>))
DECODE(esmm_decode_f32_1, MANY, (decode_32<1, 3>))
DECODE(esmm_decode_f32_4, MANY, (decode_32<4, 2>))
DECODE(esmm_decode_f32_8, ESMM_DECODE_BLOCKS, (decode_32<8, 3>))
DECODE(esmm_decode_f32_16, ESMM_DECODE_BLOCKS, (decode_32<16, 2>))

/* Both branches of a gated product. */
DECODE(esmm_decode_gated_bf16_8, MANY, (decode_16<ESMM_BF16, 1, 2, true>))
DECODE(esmm_decode_gated_bf16_16, ESMM_DECODE_BLOCKS, (decode_16<ESMM_BF16, 2, 3, true>))
DECODE(esmm_decode_gated_f16_8, MANY, (decode_16<ESMM_F16, 1, 2, true>))
DECODE(esmm_decode_gated_f16_16, ESMM_DECODE_BLOCKS, (decode_16<ESMM_F16, 2, 3, true>))
