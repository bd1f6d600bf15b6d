/* k_joint_f32.cu: see strips_mma.cuh. */
#include "cuda/kernels/f32/strips_mma.cuh"

extern "C" __global__ void __launch_bounds__(MMA_THREADS, 1)
    esmm_joint_f32(const __grid_constant__ esmm_strips_product_params p)
{
  strips_mma<false>(p);
}
