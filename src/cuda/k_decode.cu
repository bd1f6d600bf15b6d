/*
 * k_decode.cu: C [m,n] = A [m,k] x B [k,n] for m of 1 to 16, in one launch. Reads only the rows of B that some row of A
 * needs; the floor is their bytes, and at high sparsity the latencies: A from memory, then B, each once.
 *
 *                  columns of C: a tile of 64 (of 128 where m > 8, of 32 fp32) is a block's, or a cluster's
 *            +---------+---------+--
 *   k's of   | warp 0  |         |      Each warp has k's of its own, and the tile's columns of them: no block barrier
 *   rank 0   | warp 1  |         |      before the sums.
 *            | ...     |         |
 *            +---------+---------+--
 *   rank 1   | the next block of the cluster: up to 8 share k where tiles are too few to fill the GPU
 *            +---------+---------+--
 *
 * A warp copies its k's of A to shared memory, all at once, and then turns in one loop: list some more k's with a
 * nonzero in any row where the next step of 16 is not full yet; start the copies of that step's rows of B into the
 * warp's ring; multiply the step whose copies are STAGES - 1 older. What fills up the last step is zeros in both
 * operands, so that no Inf of either gets in. The list's order is a matter of lanes, always the same.
 *
 * The code is short because it is read from memory as well, on a GPU that did something else before: loops stay
 * loops.
 *
 * B of 16 bits: mma m16n8k16 computes C transposed, 16 columns of B by 8 rows of A; ldmatrix transposes B's rows. A's
 * operand is gathered from shared memory by the list.
 *
 * fp32: lane (x, y) = (lane / 8, lane % 8) takes entries x, x + 4, x + 8, x + 12 and columns 4y .. 4y+3, which it
 * copied itself, with IEEE multiply-adds; the four x are like four warps.
 *
 * Sums of a block's warps are added in shared memory, those of a cluster's blocks in the shared memory of the block
 * that finishes these columns; always in the same order, so results do not vary. Other GPUs than sm_90 have no
 * clusters.
 */
#include "device.cuh"

#define STEP ESMM_DECODE_STEP
#define EVERY_LANE 0xffffffffu

static __device__ __forceinline__ int lane_id(void)
{
  return (int)(threadIdx.x % 32);
}

/* By a shuffle, so that the compiler knows it to be one number in all lanes: loops of a warp stay together. */
static __device__ __forceinline__ int warp_id(void)
{
  return __shfl_sync(EVERY_LANE, (int)(threadIdx.x / 32), 0);
}

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
  return (uint32_t)__cvta_generic_to_shared(p);
}

/* Powers of two divide by shifts. */
static __device__ __forceinline__ int log_2(int x)
{
  return 31 - __clz(x);
}

/* ---- clusters: blocks send their sums to each other's shared memory ---- */

static __device__ __forceinline__ int cluster_ranks(void)
{
  uint32_t ranks = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks)); /* rather read again than kept in a register */
#endif
  return (int)ranks;
}

/* Says that this block has started, and that `arrived` counts what is sent to it up to `bytes`. */
static __device__ __forceinline__ void cluster_start(uint64_t *arrived, int bytes)
{
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    const uint32_t at = shared_address(arrived);
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
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(arrived)), "r"(rank));
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
                 : "r"(shared_address(arrived))
                 : "memory");
#endif
}

/* ---- memory ---- */

/* 16 bytes to shared memory; those past `bytes` are zeros. */
static __device__ __forceinline__ void copy_16(uint32_t to, const void *from, int bytes)
{
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

static __device__ __forceinline__ float4 load_shared(uint32_t from)
{
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/* All copies since the last call are a group. */
static __device__ __forceinline__ void end_group(void)
{
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all groups but the `newer` last ones. What other lanes copied is there then, too. */
static __device__ __forceinline__ void wait_for_group(int newer)
{
  if (newer == 0)
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (newer == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (newer == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  __syncwarp();
}

/* ---- a warp's shared memory ---- */

/*
 * Dynamic shared memory: for each warp, p.warp_shared bytes:
 *   ring [STAGES][STEP][COLS]         B's rows; in its place at the end sums [PARTS][ROWS][COLS] of fp32
 *   tile [m (fp32: ROWS)][chunk + 8]  A; each line has a zero behind its chunk
 *   list [chunk + 16]                 k's, counted from the chunk's first
 * and then
 *   inbox [ranks][m][COLS / ranks]    sums of the columns that this block finishes, from all ranks
 *   counts [ranks]                    of listed k's, in rank 0
 */
extern __shared__ __align__(256) uint8_t shared[];

struct notes {
  uint64_t arrived;
  int listed[ESMM_DECODE_WARPS];
};

/* What is laid down by the dtype, the rows of A that there is room for, and the columns of a tile. */
template <typename T, int ROWS, int COLS> struct shape {
  static constexpr int ROW_BYTES = COLS * (int)sizeof(T);
  static constexpr int LANES = ROW_BYTES / 16; /* that copy one row of a step */
  static constexpr int AT_ONCE = 32 / LANES;   /* rows that a warp copies by one instruction, 512 bytes */
  static constexpr int STAGE = STEP * ROW_BYTES;
  static constexpr int PIECE = 16 / (int)sizeof(T);            /* k's of 16 bytes of A */
  static constexpr int WORDS = ROWS == 16 ? 1 : 4;             /* of A's lines that a lane looks at at a time */
  static constexpr int AT_A_TIME = ROWS == 1 ? 1 : 8 / WORDS;  /* in so many rows */
  static constexpr int SCAN = WORDS * 32 * 4 / (int)sizeof(T); /* k's that these are for a warp */
  static constexpr int PARTS = sizeof(T) == 2 ? 1 : 4;         /* sums of an element of C that a warp has */
};

/*
 * Which of a row's 16-byte columns is swapped with which, so that neither copies nor ldmatrix meet in a bank. Rows of
 * 64 bytes lie two by two.
 */
static __device__ __forceinline__ int swizzle(int row, int row_bytes)
{
  return row_bytes == 64 ? row / 2 % 4 : row % 8;
}

/* Where lane l's 16 bytes of the i-th rows of a step go, counted from `first`, where they go for i = 0. */
template <typename S> static __device__ __forceinline__ uint32_t place_in_step(uint32_t first, int i)
{
  return (first ^ (uint32_t)(swizzle(i * S::AT_ONCE, S::ROW_BYTES) * 16)) + (uint32_t)(i * 512);
}

/* ---- A ---- */

/*
 * A [m, ks from k on] to the tile, zeros up to a multiple (not 0) of what is scanned at a time, in two groups: what is
 * scanned first, and the rest.
 */
template <typename T, typename S>
static __device__ __forceinline__ void copy_a(const esmm_decode_params &p, int k, int ks, T *tile, int line)
{
  constexpr int LANES = S::SCAN / S::PIECE; /* that copy a row of such a part */
  const int m = (int)p.a.rows, lane = lane_id();
  if (__builtin_expect(p.vector != 0, 1)) {
#pragma unroll 1
    for (int part = 0; part < max(ks, 1); part += S::SCAN) {
      const int i = part + lane % LANES * S::PIECE, bytes = max(min(ks - i, S::PIECE), 0) * (int)sizeof(T);
      const T *from = (const T *)p.a.data + (bytes > 0 ? k + i : 0) + lane / LANES * p.a.ld;
      uint32_t to = shared_address(tile + lane / LANES * line + i);
#pragma unroll 1
      for (int row = lane / LANES; row < m; row += 32 / LANES) {
        copy_16(to, from, bytes);
        from += 32 / LANES * p.a.ld;
        to += (uint32_t)(32 / LANES * line * (int)sizeof(T));
      }
      if (part == 0)
        end_group();
    }
    end_group();
    return;
  }
  const int64_t row_step = p.a.order == ROW_MAJOR ? p.a.ld : 1, k_step = p.a.order == ROW_MAJOR ? 1 : p.a.ld;
#pragma unroll 1
  for (int row = 0; row < m; row++)
#pragma unroll 8
    for (int i = lane; i < (max(ks, 1) + S::SCAN - 1) / S::SCAN * S::SCAN; i += 32)
      tile[row * line + i] = i < ks ? ((const T *)p.a.data)[row * row_step + (k + i) * k_step] : (T)0.0f;
  end_group();
  end_group();
}

/* Appends those of k's from .. from + SCAN - 1 that are alive to the list, which has `count` of them. */
template <typename T, typename S>
static __device__ __forceinline__ int scan_a(int m, int from, const T *tile, int line, uint16_t *list, int count)
{
  constexpr int PER = 4 / (int)sizeof(T); /* k's of a word */
  const int lane = lane_id(), first = from + PER * lane;
  const uint32_t below = (1u << lane) - 1;
  const T *words = tile + first;
  uint32_t any[S::WORDS] = {};
#pragma unroll 1
  for (int row = 0; row < m; row += S::AT_A_TIME) {
#pragma unroll
    for (int i = 0; i < S::AT_A_TIME; i++)
#pragma unroll
      for (int j = 0; j < S::WORDS; j++)
        any[j] |= *(const uint32_t *)(words + (row + i < m ? i * line : 0) + 32 * PER * j);
    words += S::AT_A_TIME * line;
  }
#pragma unroll
  for (int j = 0; j < S::WORDS; j++)
#pragma unroll
    for (int i = 0; i < PER; i++) { /* the sign does not count */
      const bool alive = (any[j] & (PER == 1 ? 0x7fffffffu : 0x7fffu << (16 * i))) != 0;
      const uint32_t lanes = __ballot_sync(EVERY_LANE, alive);
      if (alive)
        list[count + __popc(lanes & below)] = (uint16_t)(first + 32 * PER * j + i);
      count += __popc(lanes);
    }
  return count;
}

/* ---- steps ---- */

/* Starts the copies of a step's rows of B. b: this lane's columns of the chunk's first row; slot: see place_in_step. */
template <typename S>
static __device__ __forceinline__ void copy_step(uint32_t slot, const uint8_t *b, uint32_t b_row,
                                                 const uint16_t *entries, int none)
{
  uint32_t k[STEP / S::AT_ONCE];
#pragma unroll
  for (int i = 0; i < STEP / S::AT_ONCE; i++)
    k[i] = entries[lane_id() / S::LANES + i * S::AT_ONCE];
#pragma unroll
  for (int i = 0; i < STEP / S::AT_ONCE; i++)
    copy_16(place_in_step<S>(slot, i), b + (uint64_t)k[i] * b_row, k[i] == (uint32_t)none ? 0 : 16);
}

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                           const __nv_bfloat16 *)
{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                           const __half *)
{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void ldmatrix_transposed(uint32_t (&x)[4], uint32_t from)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

/* A warp's sums: [half of A's rows][16 columns][of an mma] for 16 bits, [row][column] for fp32. */
template <typename T, int ROWS, int COLS> struct sums {
  float x[ROWS / 8][COLS / 16][4];
};
template <int ROWS, int COLS> struct sums<float, ROWS, COLS> {
  float x[ROWS][4];
};

/* stage: where the step lies in shared memory. */
template <typename T, int ROWS, int COLS>
static __device__ __forceinline__ void multiply_step(uint32_t stage, const T *tile, int m, int line,
                                                     const uint16_t *entries, sums<T, ROWS, COLS> &c)
{
  using S = shape<T, ROWS, COLS>;
  const int lane = lane_id(), row = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
  const uint32_t from = stage + (uint32_t)(row * S::ROW_BYTES + (side ^ swizzle(row, S::ROW_BYTES)) * 16);
  const uint32_t k01 = *(const uint32_t *)(entries + lane % 4 * 2),
                 k89 = *(const uint32_t *)(entries + lane % 4 * 2 + 8);
  uint32_t b[ROWS / 8][2];
#pragma unroll
  for (int h = 0; h < ROWS / 8; h++) { /* rows past m repeat the last one: their sums go nowhere */
    const uint16_t *a = (const uint16_t *)tile + min(8 * h + lane / 4, m - 1) * line;
    b[h][0] = a[k01 & 0xffff] | (uint32_t)a[k01 >> 16] << 16;
    b[h][1] = a[k89 & 0xffff] | (uint32_t)a[k89 >> 16] << 16;
  }
#pragma unroll
  for (int i = 0; i < COLS / 16; i++) {
    uint32_t a[4];
    ldmatrix_transposed(a, from ^ (uint32_t)(32 * i));
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++)
      mma(c.x[h][i], a, b[h], (const T *)nullptr);
  }
}

template <int ROWS, int COLS>
static __device__ __forceinline__ void multiply_step(uint32_t stage, const float *tile, int m, int line,
                                                     const uint16_t *entries, sums<float, ROWS, COLS> &c)
{
  using S = shape<float, ROWS, COLS>;
  const int lane = lane_id(), row = lane / S::LANES;
  const uint32_t slot = stage + (uint32_t)(row * S::ROW_BYTES + (lane % S::LANES ^ swizzle(row, S::ROW_BYTES)) * 16);
  (void)m;
#pragma unroll
  for (int i = 0; i < STEP / S::AT_ONCE; i++) {
    const float *a = tile + entries[row + i * S::AT_ONCE];
    const float4 b = load_shared(place_in_step<S>(slot, i));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float x = a[r * line];
      c.x[r][0] = __fmaf_rn(x, b.x, c.x[r][0]);
      c.x[r][1] = __fmaf_rn(x, b.y, c.x[r][1]);
      c.x[r][2] = __fmaf_rn(x, b.z, c.x[r][2]);
      c.x[r][3] = __fmaf_rn(x, b.w, c.x[r][3]);
    }
  }
}

/* ---- sums ---- */

/* Where column `col` of a row of a warp's sums lies: the rows of a step's lanes do not meet in a bank. */
template <typename T> static __device__ __forceinline__ int sum_place(int row, int col)
{
  return sizeof(T) == 2 ? col ^ (row / 2 % 4 * 8) : col;
}

template <typename T, int ROWS, int COLS>
static __device__ __forceinline__ void store_sums(float *out, int m, const sums<T, ROWS, COLS> &c)
{
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 8 * h + 2 * t + i;
      if (row < m)
#pragma unroll
        for (int j = 0; j < COLS / 8; j++)
          out[row * COLS + sum_place<T>(2 * t, 8 * j) + g] = c.x[h][j / 2][j % 2 * 2 + i];
    }
}

template <int ROWS, int COLS>
static __device__ __forceinline__ void store_sums(float *out, int m, const sums<float, ROWS, COLS> &c)
{
  out += lane_id() / 8 * ROWS * COLS + lane_id() % 8 * 4;
#pragma unroll
  for (int row = 0; row < ROWS; row++)
    if (row < m)
      *(float4 *)(out + row * COLS) = make_float4(c.x[row][0], c.x[row][1], c.x[row][2], c.x[row][3]);
}

/* This block's sums to those that finish them: element e of the tile is in `inbox` of rank col / mine. */
template <typename T, int ROWS, int COLS>
static __device__ __forceinline__ void send_sums(const esmm_decode_params &p, int ranks, float *inbox, notes &n)
{
  using S = shape<T, ROWS, COLS>;
  const int m = (int)p.a.rows, warps = (int)blockDim.x / 128 * 4, log_mine = log_2(COLS) - log_2(ranks);
  const int rank = (int)blockIdx.x & (ranks - 1);
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < m * COLS; e += (int)blockDim.x) {
    const int row = e / COLS, col = e % COLS;
    const uint8_t *from = shared + 4 * (row * COLS + sum_place<T>(row, col));
    float sum = 0.0f;
#pragma unroll 1
    for (int w = 0; w < warps; w += 4, from += 4 * p.warp_shared)
#pragma unroll
      for (int i = 0; i < 4 * S::PARTS; i++)
        sum += *(const float *)(from + i / S::PARTS * p.warp_shared + i % S::PARTS * 4 * ROWS * COLS);
    const int owner = col >> log_mine;
    float *to = &inbox[((rank * m + row - owner) << log_mine) + col];
    if (ranks > 1)
      cluster_send(to, owner, __float_as_uint(sum), &n.arrived);
    else
      *to = sum; /* which this thread finishes itself */
  }
}

static __device__ __forceinline__ bool reports(const esmm_decode_params &p)
{
  return p.report != 0 && blockIdx.x == 0 && threadIdx.x == 0;
}

/* The counts of the cluster's blocks to its first, for the report. */
static __device__ __forceinline__ void send_count(int ranks, uint32_t *counts, notes &n)
{
  uint32_t listed = 0;
#pragma unroll 1
  for (int w = 0; w < (int)blockDim.x / 32; w++)
    listed += (uint32_t)n.listed[w];
  const int rank = (int)blockIdx.x & (ranks - 1);
  if (ranks > 1)
    cluster_send(&counts[rank], 0, listed, &n.arrived);
  else
    counts[0] = listed;
}

static __device__ __forceinline__ void report(const esmm_decode_params &p, int ranks, const uint32_t *counts,
                                              uint32_t spent)
{
  uint32_t listed = 0;
#pragma unroll 1
  for (int rank = 0; rank < ranks; rank++)
    listed += counts[rank];
  esmm_choice_device *out = (esmm_choice_device *)p.report;
  out->strip = out->joint = __fdividef((float)listed, (float)p.a.cols);
  out->extract_ns = max(spent, 1u);
}

/* From the block's sums in shared memory to C. */
template <typename T, int ROWS, int COLS>
static __device__ __forceinline__ void finish(const esmm_decode_params &p, uint32_t spent, notes &n)
{
  const int m = (int)p.a.rows, ranks = cluster_ranks(), log_mine = log_2(COLS) - log_2(ranks);
  float *inbox = (float *)(shared + (int)blockDim.x / 32 * p.warp_shared);
  uint32_t *counts = (uint32_t *)(inbox + m * COLS);
  if (ranks > 1)
    cluster_wait_started();
  send_sums<T, ROWS, COLS>(p, ranks, inbox, n);
  if (p.report != 0 && threadIdx.x == 0)
    send_count(ranks, counts, n);
  if (ranks > 1)
    cluster_wait_arrived(&n.arrived);
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < m << log_mine; e += (int)blockDim.x) {
    const int row = e >> log_mine;
    const int64_t col = ((int64_t)blockIdx.x - row << log_mine) + e; /* tile, then rank */
    float sum = inbox[e];
#pragma unroll 1
    for (int rank = 1; rank < ranks; rank++)
      sum += inbox[(rank * m << log_mine) + e];
    if (col < p.epilogue.c.cols)
      finish_element(p.epilogue, row, col, sum);
  }
  if (reports(p))
    report(p, ranks, counts, spent);
}

/* ---- a block ---- */

static __device__ __forceinline__ uint32_t nanoseconds(void)
{
  uint32_t now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
  return now;
}

template <typename T, int ROWS, int COLS, int STAGES>
static __device__ __forceinline__ void decode(const esmm_decode_params &p)
{
  using S = shape<T, ROWS, COLS>;
  __shared__ notes n;
  if (gate_closed(p.gate))
    return;
  const int m = (int)p.a.rows, lane = lane_id(), line = p.chunk + ESMM_DECODE_SPARE, ranks = cluster_ranks();
  const int rank = (int)blockIdx.x & (ranks - 1), warp = warp_id();
  uint8_t *const mine = shared + warp * p.warp_shared;
  T *const tile = (T *)(mine + STAGES * S::STAGE);
  uint16_t *const list = (uint16_t *)(tile + (sizeof(T) == 4 ? ROWS : m) * line);
  const int first = rank * p.range + warp * p.share;
  const int last = min(min(first + p.share, (rank + 1) * p.range), (int)p.a.cols);
  const bool timed = reports(p);
  uint32_t spent = 0, begun;
  const int row = lane / S::LANES;
  const uint32_t ring = shared_address(mine);
  const uint32_t place = (uint32_t)(row * S::ROW_BYTES + (lane % S::LANES ^ swizzle(row, S::ROW_BYTES)) * 16);
  const uint8_t *b = (const uint8_t *)p.b + (int64_t)first * p.b_row +
                     (int64_t)(blockIdx.x >> log_2(ranks)) * p.b_slice + lane % S::LANES * 16;
  sums<T, ROWS, COLS> c = {};
  int listed = 0;
#pragma unroll 1
  for (int k = first;; b += (int64_t)p.chunk * p.b_row) {
    const int ks = max(min(p.chunk, last - k), 0), ends = max(ks, 1);
    begun = timed ? nanoseconds() : 0;
    copy_a<T, S>(p, k, ks, tile, line);
    if (k == first) { /* what need not come before A's way through memory */
      if (ranks > 1)  /* rank 0 gets the counts, too */
        cluster_start(&n.arrived, 4 * (m * COLS + (p.report != 0 && rank == 0 ? ranks : 0)));
      if (lane < m)
        tile[lane * line + p.chunk] = (T)0.0f;
    }
    int count = 0, scanned = 0, steps = 1, in = 0, out = 0; /* in, out: slots of the ring */
#pragma unroll 1
    for (int step = 0;; step++) {
      if (count < STEP * (step + 1) && scanned < ends) {
        if (timed && scanned > 0)
          begun = nanoseconds();
        do {
          wait_for_group(scanned == 0 ? 1 : min(step, STAGES - 1)); /* its part of A is there */
          count = scan_a<T, S>(m, scanned, tile, line, list, count);
          scanned += S::SCAN;
        } while (count < STEP * (step + 1) && scanned < ends);
        if (scanned >= ends && lane < STEP)
          list[count + lane] = (uint16_t)p.chunk; /* fills the last step up: zeros of A, none of B */
        steps = max((count + STEP - 1) / STEP, 1);
        __syncwarp();
        if (timed)
          spent += nanoseconds() - begun;
      }
      if (step < steps)
        copy_step<S>(ring + in * S::STAGE + place, b, p.b_row, list + STEP * step, p.chunk);
      end_group();
      in = in == STAGES - 1 ? 0 : in + 1;
      const int done = step - (STAGES - 1);
      if (done < 0)
        continue;
      if (done >= steps)
        break;
      wait_for_group(STAGES - 1);
      multiply_step(ring + out * S::STAGE, tile, m, line, list + STEP * done, c);
      out = out == STAGES - 1 ? 0 : out + 1;
      __syncwarp(); /* the slot is free */
    }
    listed += count;
    k += p.chunk;
    if (k >= last)
      break;
  }
  store_sums((float *)mine, m, c);
  if (lane == 0)
    n.listed[warp] = listed;
  __syncthreads();
  finish<T, ROWS, COLS>(p, spent, n);
}

/* ---- what the host launches, by the rows of A that it has room for ---- */

#define DECODE(name, threads, blocks, ...)                                                                         \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ esmm_decode_params p) \
  {                                                                                                                \
    decode<__VA_ARGS__>(p);                                                                                        \
  }

DECODE(esmm_decode_bf16_8, 512, 1, __nv_bfloat16, 8, 64, 3)
DECODE(esmm_decode_bf16_16, 256, 2, __nv_bfloat16, 16, 128, 2)
DECODE(esmm_decode_f16_8, 512, 1, __half, 8, 64, 3)
DECODE(esmm_decode_f16_16, 256, 2, __half, 16, 128, 2)
DECODE(esmm_decode_f32_1, 512, 1, float, 1, 32, 3)
DECODE(esmm_decode_f32_4, 512, 1, float, 4, 32, 3)
DECODE(esmm_decode_f32_8, 512, 1, float, 8, 32, 3)
DECODE(esmm_decode_f32_16, 512, 1, float, 16, 32, 4)
