/* k_dense_f32_mma.cu: see strips_mma.cuh. */
#include "cuda/kernels/f32/strips_mma.cuh"

extern "C" __global__ void __launch_bounds__(MMA_THREADS, 1)
    esmm_dense_f32_mma(const __grid_constant__ esmm_strips_product_params p)
{
  strips_mma<true>(p);
}
