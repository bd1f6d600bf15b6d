/* borrow.cu: bitmaps of a B that was not scanned: every k that exists counts as alive. */
#include "cuda/kernels/common/device.cuh"

/* b_bits [b_strips][words] and, where out is not 0, the share of strips that need each k: fp32 [32 * words]. */
extern "C" __global__ void __launch_bounds__(ESMM_COUNT_THREADS)
    esmm_borrow_bits(const __grid_constant__ esmm_count_params p)
{
  const int64_t first = (int64_t)blockIdx.x * ESMM_COUNT_THREADS + threadIdx.x;
  const int64_t step = (int64_t)gridDim.x * ESMM_COUNT_THREADS;
  for (int64_t i = first; i < p.b_strips * p.words; i += step) {
    const int64_t left = p.k - 32 * (i % p.words);
    ((uint32_t *)p.b_bits)[i] = left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
  }
  for (int64_t k = first; p.out && k < 32 * p.words; k += step)
    ((float *)p.out)[k] = k < p.k ? 1.0f : 0.0f;
}
