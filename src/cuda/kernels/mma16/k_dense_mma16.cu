/* k_dense_mma16.cu: see mma16.cuh. A and B as they lie; one block of C a block. */
#include "cuda/kernels/mma16/mma16.cuh"

template <class S, esmm_dtype DTYPE, int HOW> static __device__ __forceinline__ void dense(const esmm_mma16_params &p)
{
  extern __shared__ __align__(128) char ring[];
  typedef mma16_share_k<S, S::COLS> share_b;
  if (not_selected(p.selector))
    return;
  int64_t row0, col0;
  mma16_block_at<S>(p, row0, col0);
  const mma16_feed b = mma16_feed_k<share_b, false>(p.b, p.b_ld, col0, p.b_ld);
  float sum[S::TILES_M][S::TILES_N][4];
  mma16_clear<S>(sum);
  mma16_feed a;
  if (mma16_k_lines(HOW))
    a = mma16_feed_k<mma16_share_k<S, S::ROWS>, false>(p.a, p.a_ld, row0, p.m);
  else
    a = mma16_feed_rows<mma16_share_rows<S>>(p.a, p.a_ld, row0, p.m);
  mma16_multiply<S, DTYPE, HOW>(sum, (uint32_t)__cvta_generic_to_shared(ring), a, b, (int)p.k, NULL);
  mma16_store<S>(p.epilogue, ring, sum, row0, col0);
}

#define DENSE(shape, name, dtype, how)                                                        \
  extern "C" __global__ void __launch_bounds__(mma16_##shape::THREADS, mma16_##shape::BLOCKS) \
      esmm_dense_##name##_##shape(const __grid_constant__ esmm_mma16_params p)                \
  {                                                                                           \
    dense<mma16_##shape, dtype, how>(p);                                                      \
  }
#define DENSE_OF(name, dtype)                                \
  DENSE(256, name##_rows, dtype, M16_ROWS)                   \
  DENSE(128, name##_rows, dtype, M16_ROWS)                   \
  DENSE(64, name##_rows, dtype, M16_ROWS)                    \
  DENSE(256, name##_cols, dtype, M16_COLS)                   \
  DENSE(128, name##_cols, dtype, M16_COLS)                   \
  DENSE(64, name##_cols, dtype, M16_COLS)                    \
  DENSE(256, name##_rows_elements, dtype, M16_ROWS_ELEMENTS) \
  DENSE(64, name##_rows_elements, dtype, M16_ROWS_ELEMENTS)  \
  DENSE(256, name##_cols_elements, dtype, M16_COLS_ELEMENTS) \
  DENSE(64, name##_cols_elements, dtype, M16_COLS_ELEMENTS)

DENSE_OF(bf16, ESMM_BF16)
DENSE_OF(f16, ESMM_F16)
