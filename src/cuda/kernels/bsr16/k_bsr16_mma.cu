/*
 * k_bsr16_mma.cu: a 16-bit A times a B of cells, by mma.sync (sm_80 and later). A block has 64 rows and one panel of 64
 * columns, and goes through the panel's cells, each as a small dense product (mma16.cuh); its ring is empty between two
 * of them, which is what makes this the slower sibling of k_bsr16_sm90a.cu.
 */
#include "cuda/kernels/mma16/mma16.cuh"

typedef mma16_64 shape;
static_assert(shape::ROWS == ESMM_BSR16_MMA_ROWS && shape::COLS == ESMM_CELL_COLS, "a panel a block");

template <esmm_dtype DTYPE, int HOW> static __device__ __forceinline__ void bsr(const esmm_bsr16_mma_params &p)
{
  extern __shared__ __align__(128) char ring[];
  typedef mma16_share_k<shape, shape::COLS> share_b;
  if (not_selected(p.selector))
    return;
  const int64_t panels = (p.n + shape::COLS - 1) / shape::COLS;
  const int64_t panel = blockIdx.x % panels, row0 = blockIdx.x / panels * shape::ROWS;
  const uint32_t *places = (const uint32_t *)p.places + panel * p.chunks;
  float sum[shape::TILES_M][shape::TILES_N][4];
  mma16_clear<shape>(sum);
  for (int chunk = 0; chunk < p.chunks; chunk++) {
    const uint32_t cell = places[chunk];
    if (cell == ESMM_NO_CELL)
      continue;
    const int64_t k0 = (int64_t)chunk * p.cell_k;
    const mma16_feed b = mma16_feed_k<share_b, false>(p.cells + (uint64_t)cell * p.cell_k * (shape::COLS * 2),
                                                      shape::COLS, 0, shape::COLS);
    mma16_feed a;
    if (mma16_k_lines(HOW))
      a = mma16_feed_k<mma16_share_k<shape, shape::ROWS>, false>(p.a + k0 * p.a_ld * 2, p.a_ld, row0, p.m);
    else
      a = mma16_feed_rows<mma16_share_rows<shape>>(p.a + k0 * 2, p.a_ld, row0, p.m);
    mma16_multiply<shape, DTYPE, HOW>(sum, (uint32_t)__cvta_generic_to_shared(ring), a, b,
                                      (int)min((int64_t)p.cell_k, p.k - k0), NULL);
  }
  mma16_store<shape>(p.epilogue, ring, sum, row0, panel * shape::COLS);
}

#define BSR(name, dtype, how)                                                 \
  extern "C" __global__ void __launch_bounds__(shape::THREADS, shape::BLOCKS) \
      esmm_bsr_##name(const __grid_constant__ esmm_bsr16_mma_params p)        \
  {                                                                           \
    bsr<dtype, how>(p);                                                       \
  }
#define BSR_OF(name, dtype)                           \
  BSR(name##_rows, dtype, M16_ROWS)                   \
  BSR(name##_cols, dtype, M16_COLS)                   \
  BSR(name##_rows_elements, dtype, M16_ROWS_ELEMENTS) \
  BSR(name##_cols_elements, dtype, M16_COLS_ELEMENTS)

BSR_OF(bf16, ESMM_BF16)
BSR_OF(f16, ESMM_F16)
