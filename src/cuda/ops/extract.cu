/*
 * extract.cu: work on A in every call, and on B once: bitmaps of strips of 32, their alive segments k-major, packing,
 * the plan's sample, counts, and the epilogue of sums that no kernel of ours has made.
 *
 * Floor of esmm_extract: reads A once, writes the alive segments once. A block takes one strip by 128 k's, so a matrix
 * of any useful size has thousands of blocks and memory stays busy.
 */
#include "cuda/kernels/common/epilogue.cuh"
#include "cuda/kernels/common/sample.cuh"

#define STRIP ESMM_STRIP
#define CHUNK ESMM_EXTRACT_CHUNK
#define THREADS ESMM_EXTRACT_THREADS
#define WARPS (THREADS / 32)

/* ---- extraction ---- */

/* A warp's 16 k's of a strip, lane = row: which are alive, and those to memory. k_padded is a multiple of 16. */
static __device__ __forceinline__ void store_segments(const esmm_extract_params &p, int64_t strip, int64_t k,
                                                      const float (&x)[CHUNK / WARPS])
{
  const int lane = (int)threadIdx.x % 32;
  if (k >= p.strips.k_padded)
    return;
  float *out = (float *)p.strips.data + (strip * p.strips.k_padded + k) * STRIP + lane;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < CHUNK / WARPS; i++) {
    const bool alive = __any_sync(~0u, x[i] != 0.0f);
    bits |= (uint32_t)alive << i;
    if (p.strips.data && (alive || p.write_all))
      out[i * STRIP] = x[i];
  }
  if (lane == 0)
    ((uint16_t *)p.strips.bits)[strip * (p.strips.k_padded / 16) + k / 16] = (uint16_t)bits;
}

/*
 * Rows contiguous (column-major A, row-major B): a warp reads one k of the strip as it lies and stores it as it is.
 */
template <typename T>
static __device__ __forceinline__ void extract_contiguous(const esmm_extract_params &p, int64_t strip, int64_t k0)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int64_t row = strip * STRIP + lane;
  const int per_warp = CHUNK / WARPS;
  const int ks = (int)min(p.a.cols - k0 - warp * per_warp, (int64_t)per_warp);
  const T *from = (const T *)p.a.data + (k0 + warp * per_warp) * p.a.ld + row;
  float x[per_warp];
#pragma unroll
  for (int i = 0; i < per_warp; i++) {
    x[i] = row < p.a.rows && i < ks ? as_float(*from) : 0.0f;
    from += p.a.ld;
  }
  store_segments(p, strip, k0 + warp * per_warp, x);
}

/* K contiguous: a warp reads 128 k's of a row at a time; shared memory turns the block round. */
template <typename T>
static __device__ __forceinline__ void extract_transposing(const esmm_extract_params &p, float (*tile)[STRIP + 1],
                                                           int64_t strip, int64_t k0)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int rows_per_warp = STRIP / WARPS, steps = CHUNK / 32;
  float x[rows_per_warp][steps];
  const int row0 = warp * rows_per_warp;
  const int rows = (int)min(p.a.rows - strip * STRIP, (int64_t)STRIP), ks = (int)min(p.a.cols - k0, (int64_t)CHUNK);
  const T *from = (const T *)p.a.data + (strip * STRIP + row0) * p.a.ld + k0 + lane;
#pragma unroll
  for (int r = 0; r < rows_per_warp; r++, from += p.a.ld)
#pragma unroll
    for (int s = 0; s < steps; s++)
      x[r][s] = row0 + r < rows && s * 32 + lane < ks ? as_float(from[s * 32]) : 0.0f;
#pragma unroll
  for (int r = 0; r < rows_per_warp; r++)
#pragma unroll
    for (int s = 0; s < steps; s++)
      tile[s * 32 + lane][row0 + r] = x[r][s];
  __syncthreads();
  float value[CHUNK / WARPS];
#pragma unroll
  for (int i = 0; i < CHUNK / WARPS; i++)
    value[i] = tile[warp * (CHUNK / WARPS) + i][lane];
  store_segments(p, strip, k0 + warp * (CHUNK / WARPS), value);
}

template <typename T>
static __device__ __forceinline__ void extract(const esmm_extract_params &p, float (*tile)[STRIP + 1], int64_t strip,
                                               int64_t k0)
{
  if (p.a.order == ESMM_COL_MAJOR)
    extract_contiguous<T>(p, strip, k0);
  else
    extract_transposing<T>(p, tile, strip, k0);
}

/* Blocks: chunks of k along x, strips along y and z (y * gridDim.z would pass 65535). */
extern "C" __global__ void __launch_bounds__(THREADS, 4) esmm_extract(const __grid_constant__ esmm_extract_params p)
{
  __shared__ float tile[CHUNK][STRIP + 1];
  if (not_selected(p.selector))
    return;
  const int64_t strip = (int64_t)blockIdx.z * gridDim.y + blockIdx.y, k0 = (int64_t)blockIdx.x * CHUNK;
  if (strip >= p.strips.strips)
    return;
  with_dtype(p.a.dtype, [&](auto of) { extract<typename decltype(of)::element>(p, tile, strip, k0); });
}

/* ---- packing and conversion: tiles of 32 x 32 through shared memory, so that both sides are read along their lines -
 */

static __device__ __forceinline__ void copy_tile(const esmm_device_matrix &from, const esmm_device_matrix &to,
                                                 int64_t row0, int64_t col0)
{
  __shared__ float tile[ESMM_COPY_TILE][ESMM_COPY_TILE + 1];
  const int x = (int)threadIdx.x % ESMM_COPY_TILE, y0 = (int)threadIdx.x / ESMM_COPY_TILE;
  for (int y = y0; y < ESMM_COPY_TILE; y += WARPS) {
    const int64_t row = row0 + (from.order == ESMM_ROW_MAJOR ? y : x),
                  col = col0 + (from.order == ESMM_ROW_MAJOR ? x : y);
    const float value = row < from.rows && col < from.cols ? load_element(from, element_at(from, row, col)) : 0.0f;
    tile[from.order == ESMM_ROW_MAJOR ? y : x][from.order == ESMM_ROW_MAJOR ? x : y] = value;
  }
  __syncthreads();
  for (int y = y0; y < ESMM_COPY_TILE; y += WARPS) {
    const int i = to.order == ESMM_ROW_MAJOR ? y : x, j = to.order == ESMM_ROW_MAJOR ? x : y;
    if (row0 + i < to.rows && col0 + j < to.cols)
      store_element(to, element_at(to, row0 + i, col0 + j), tile[i][j]);
  }
  __syncthreads();
}

/* Tiles, one after the other: a grid of any size. */
static __device__ __forceinline__ void copy_matrix(const esmm_device_matrix &from, const esmm_device_matrix &to)
{
  const int64_t across = (to.cols + ESMM_COPY_TILE - 1) / ESMM_COPY_TILE;
  const int64_t tiles = across * ((to.rows + ESMM_COPY_TILE - 1) / ESMM_COPY_TILE);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    copy_tile(from, to, tile / across * ESMM_COPY_TILE, tile % across * ESMM_COPY_TILE);
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_pack_rows(const __grid_constant__ esmm_pack_params p)
{
  if (not_selected(p.selector))
    return;
  const esmm_device_matrix out = {p.out, p.a.rows, p.ld, p.ld, ESMM_F32, ESMM_ROW_MAJOR};
  copy_matrix(p.a, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_convert(const __grid_constant__ esmm_convert_params p)
{
  if (!not_selected(p.selector))
    copy_matrix(p.src, p.dst);
}

/* ---- the epilogue of sums that are in memory, or of none ---- */

/* Eight columns at a time where C's lines, and those of the sums, begin at multiples of 16 bytes. */
static __device__ __forceinline__ bool by_eights(const esmm_finish_params &p)
{
  return has_vectors(p.epilogue.c) && (p.sums.data == 0 || has_vectors(p.sums));
}

/* Its columns from `first` on, in the order in which they lie. */
static __device__ __forceinline__ void finish_columns(const esmm_finish_params &p, int64_t first)
{
  const esmm_device_matrix &c = p.epilogue.c;
  const bool by_rows = c.order == ESMM_ROW_MAJOR;
  const int64_t cols = c.cols - first, all = c.rows * cols, inner = by_rows ? cols : c.rows;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * THREADS) {
    const int64_t outer_at = i / inner, inner_at = i % inner;
    const int64_t row = by_rows ? outer_at : inner_at, col = first + (by_rows ? inner_at : outer_at);
    const float sum = p.sums.data ? ((const float *)p.sums.data)[element_at(p.sums, row, col)] : 0.0f;
    finish_element(p.epilogue, row, col, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_finish(const __grid_constant__ esmm_finish_params p)
{
  const esmm_device_matrix &c = p.epilogue.c;
  if (!by_eights(p)) {
    finish_columns(p, 0);
    return;
  }
  const int64_t across = c.cols / 8, all = c.rows * across;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * THREADS) {
    const int64_t row = i / across, col = i % across * 8;
    float x[8] = {};
    if (p.sums.data)
      read_8(dtype_of<ESMM_F32>(), p.sums.data, row * p.sums.ld + col, x);
    finish_8(p.epilogue, row, col, x);
  }
  if (across * 8 < c.cols)
    finish_columns(p, across * 8);
}

/*
 * ---- the plan's sample ----
 * ESMM_SAMPLES places (sample.cuh) of a strip's rows by 32 k's, and the choice that follows. Each lies in another part
 * of memory: a warp takes one, and few warps share a multiprocessor, because latency is all it costs. The block that
 * ends last adds up what all have written, always in the same order.
 */

/* Bits of four words, of which each lane of four has one, or the same four bits of one word apart: how many are the
   third or fourth that is set. both, any: of the first two and of the last two. */
static __device__ __forceinline__ int count_overflow(uint32_t both, uint32_t any, uint32_t both_next, uint32_t any_next)
{
  return __popc((both & any_next) | (both_next & any)) + __popc(both & both_next);
}

/* Nonzeros of the lane's k, of 32 k's from k0 on, in up to 32 rows from row on. overflow: this lane's share of all
   elements there that are the third or fourth nonzero of four k's. */
static __device__ __forceinline__ int count_sample(const esmm_device_matrix &a, int64_t row, int64_t k0, int &overflow)
{
  const int lane = (int)threadIdx.x % 32;
  const int rows = (int)min((int64_t)32, a.rows - row), ks = (int)min((int64_t)32, a.cols - k0);
  /* K contiguous: lanes are k's, j is a row. Rows contiguous: lanes are rows, j is a k. */
  const bool by_rows = a.order == ESMM_ROW_MAJOR;
  const int64_t at = element_at(a, row + (by_rows ? 0 : lane), k0 + (by_rows ? lane : 0));
  const int across = by_rows ? ks : rows, along = by_rows ? rows : ks;
  uint32_t set = 0; /* bit j: element j of this lane's line is not zero */
  if (lane < across)
    with_bits(a.dtype,
              [&](auto of) { set = nonzero_bits((const typename decltype(of)::bits *)a.data + at, a.ld, along); });
  if (by_rows) {
    const uint32_t next = __shfl_xor_sync(~0u, set, 1), both = set & next, any = set | next;
    const uint32_t both_next = __shfl_xor_sync(~0u, both, 2), any_next = __shfl_xor_sync(~0u, any, 2);
    overflow = lane % 4 == 0 ? count_overflow(both, any, both_next, any_next) : 0;
    return __popc(set);
  }
  const uint32_t both = set & set >> 1, any = set | set >> 1, first = 0x11111111;
  overflow = count_overflow(both & first, any & first, both >> 2 & first, any >> 2 & first);
  int nonzeros = 0;
  for (int j = 0; j < 32; j++) {
    const uint32_t column = __ballot_sync(~0u, set >> j & 1);
    nonzeros = lane == j ? __popc(column) : nonzeros;
  }
  return nonzeros;
}

extern "C" __global__ void __launch_bounds__(32 * ESMM_SAMPLE_WARPS)
    esmm_sample(const __grid_constant__ esmm_sample_params p)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, i = (int)blockIdx.x;
  const int64_t strips = (p.a.rows + p.height - 1) / p.height, words = (p.a.cols + 31) / 32;
  const int64_t row0 = p.height * sample_in_stretch(i, strips, (uint32_t)i);
  const int64_t k0 = 32 * sample_in_stretch((i * 37) % ESMM_SAMPLES, words, (uint32_t)(100 + i));
  const int rows = (int)min((int64_t)p.height, p.a.rows - row0), ks = (int)min((int64_t)32, p.a.cols - k0);
  const float alive = warp == 0 ? ((const float *)p.alive)[k0 + lane] : 0.0f; /* padded to a multiple of 32 */
  __shared__ int found[ESMM_SAMPLE_WARPS][32];                                /* by k, in the 32 rows of each warp */
  __shared__ int overflow_found[ESMM_SAMPLE_WARPS];
  int overflow = 0;
  found[warp][lane] = 32 * warp < rows ? count_sample(p.a, row0 + 32 * warp, k0, overflow) : 0;
  overflow = (int)__reduce_add_sync(~0u, (uint32_t)overflow);
  if (lane == 0)
    overflow_found[warp] = overflow;
  __syncthreads();
  if (warp > 0)
    return;
  int nonzeros = 0; /* of this lane's k */
#pragma unroll
  for (int w = 0; w < ESMM_SAMPLE_WARPS; w++)
    nonzeros += found[w][lane];
  float values[4] = {(float)nonzeros / (float)rows, nonzeros > 0 ? 1.0f : 0.0f, nonzeros > 0 ? alive : 0.0f,
                     lane < ks ? 1.0f : 0.0f};
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
#pragma unroll
    for (int v = 0; v < 4; v++)
      values[v] += __shfl_xor_sync(~0u, values[v], d);
  float4 *all = (float4 *)(p.notes + 16);
  float *all_overflow = (float *)(all + ESMM_SAMPLES);
  bool last = false;
  if (lane == 0) { /* counts to the last block and starts again */
    all[i] = make_float4(values[0], values[1], values[2], values[3]);
    int sum = 0;
#pragma unroll
    for (int w = 0; w < ESMM_SAMPLE_WARPS; w++)
      sum += overflow_found[w];
    all_overflow[i] = (float)sum / (float)rows;
    __threadfence();
    last = atomicInc((uint32_t *)p.notes, gridDim.x - 1) == gridDim.x - 1;
  }
  if (!__any_sync(~0u, last))
    return;
  __threadfence();
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float total_overflow = 0.0f;
#pragma unroll
  for (int j = 0; j < ESMM_SAMPLES / 32; j++) {
    const float4 x = __ldcg(&all[32 * j + lane]);
    total_overflow += __ldcg(&all_overflow[32 * j + lane]);
    total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    total = make_float4(total.x + __shfl_xor_sync(~0u, total.x, d), total.y + __shfl_xor_sync(~0u, total.y, d),
                        total.z + __shfl_xor_sync(~0u, total.z, d), total.w + __shfl_xor_sync(~0u, total.w, d));
    total_overflow += __shfl_xor_sync(~0u, total_overflow, d);
  }
  if (lane != 0)
    return;
  esmm_choice_device out = {};
  out.element = total.x / total.w;
  out.strip = total.y / total.w;
  out.joint = total.z / total.w;
  out.overflow = total_overflow / total.w;
  out.counted = 1;
  out.chosen = skipping_pays(p, out.strip, out.joint);
  report_choice(p.out, out);
}

/* ---- counts ---- */

/* Strips of one operand that have k. */
static __device__ __forceinline__ uint32_t strips_with(uint64_t bits, int64_t strips, int64_t words, int64_t k)
{
  uint32_t count = 0;
  for (int64_t s = 0; s < strips; s++)
    count += ((const uint32_t *)bits)[s * words + k / 32] >> (k % 32) & 1;
  return count;
}

extern "C" __global__ void __launch_bounds__(THREADS) esmm_count_joint(const __grid_constant__ esmm_count_params p)
{
  const int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  unsigned long long pairs = 0;
  if (k < p.k)
    pairs = (unsigned long long)strips_with(p.a_bits, p.a_strips, p.words, k) *
            strips_with(p.b_bits, p.b_strips, p.words, k);
  for (int d = 16; d > 0; d /= 2)
    pairs += __shfl_xor_sync(~0u, pairs, d);
  if (threadIdx.x % 32 == 0 && pairs > 0)
    atomicAdd((unsigned long long *)p.out, pairs);
}
