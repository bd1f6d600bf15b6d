/*
 * pairs.cuh: how persistent pairs of blocks multiply by the sparse tensor core on Hopper, as k_nm16_sm90a.cu,
 * k_half16_sm90a.cu and ffn_two16_sm90a.cu do.
 *
 * A pair is a cluster. In each of its blocks one thread loads stages, some of them for both, and two warpgroups
 * multiply. A stage is loaded again when the multiplying warps of both blocks are done with it.
 */
#ifndef ESMM_CUDA_NM16_PAIRS_CUH
#define ESMM_CUDA_NM16_PAIRS_CUH

#include "cuda/kernels/nm16/instructions.cuh"
#include "cuda/params.h"

#define PAIR 2

/* The whole kernel: one thread loads, two warpgroups multiply. map: what is read first. */
template <int STAGES, class LOAD, class MULTIPLY>
static __device__ __forceinline__ void run_pair(uint64_t *full, uint64_t *empty, const esmm_tensor_map &map,
                                                const LOAD &load, const MULTIPLY &multiply)
{
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      sm90_barrier_init(&full[i], 1);
      sm90_barrier_init(&empty[i], 8 * PAIR); /* the multiplying warps of both blocks */
    }
    sm90_fence_init();
    sm90_prefetch_map(&map);
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < 128) {
    sm90_registers_down<40>();
    if (threadIdx.x == 0)
      load();
    __syncwarp();
  } else {
    sm90_registers_up<232>();
    multiply();
  }
  cluster_sync(); /* neither leaves while the other may still write to its shared memory */
}

#endif
