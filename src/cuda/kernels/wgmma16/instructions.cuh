/*
 * instructions.cuh: Hopper's tensor core on 16-bit operands in shared memory, fp32 sums.
 *
 * Operands lie in shared memory with 128-byte swizzle, in panels of lines of 128 bytes, aligned to 1024 bytes:
 *
 *   k contiguous (A row-major)      line = a row of A, 64 k's; 16 k's further is 32 bytes further
 *   m or n contiguous               line = a k, 64 rows or columns; 16 k's further is 16 lines further
 */
#ifndef ESMM_CUDA_WGMMA16_INSTRUCTIONS_CUH
#define ESMM_CUDA_WGMMA16_INSTRUCTIONS_CUH

#include "cuda/kernels/common/sm90.cuh"
#include "esmm.h"

#define WGMMA16_PANEL 8192 /* bytes of 64 lines */

/* The view of an operand at `tile`; panels of 64 columns lie WGMMA16_PANEL apart, groups of 8 lines 1024 bytes. */
static __device__ __forceinline__ uint64_t wgmma16_view(const void *tile)
{
  return (uint64_t)((sm90_address(tile) & 0x3ffffu) >> 4) | (uint64_t)(WGMMA16_PANEL >> 4) << 16 |
         (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Operands with k's as lines are transposed on the way. */
#define WGMMA16_256(types, a_by_k, b_by_k)                                                                          \
  SM90_WGMMA("sync.aligned.m64n256k16", types, 128, "%128, %129, 1, 1, 1, %130, %131", "l"(a), "l"(b), "n"(a_by_k), \
             "n"(b_by_k))
#define WGMMA16_128(types, a_by_k, b_by_k)                                                                     \
  SM90_WGMMA("sync.aligned.m64n128k16", types, 64, "%64, %65, 1, 1, 1, %66, %67", "l"(a), "l"(b), "n"(a_by_k), \
             "n"(b_by_k))

/* d [64 x cols] += a [64 x 16] * b [16 x cols], `sums` of them a thread. A_LINES_ARE_K: a with m contiguous;
   B_LINES_ARE_K: b with n contiguous; else with k. */
#define WGMMA16(cols, sums)                                                               \
  template <esmm_dtype DTYPE, int A_LINES_ARE_K, int B_LINES_ARE_K = 1>                   \
  static __device__ __forceinline__ void wgmma16(float(&d)[sums], uint64_t a, uint64_t b) \
  {                                                                                       \
    static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");    \
    if (DTYPE == ESMM_F16)                                                                \
      WGMMA16_##cols("f16.f16", A_LINES_ARE_K, B_LINES_ARE_K);                            \
    else                                                                                  \
      WGMMA16_##cols("bf16.bf16", A_LINES_ARE_K, B_LINES_ARE_K);                          \
  }

WGMMA16(256, 128)
WGMMA16(128, 64)

#define WGMMA16_REGISTERS_128(types)                                                                              \
  SM90_WGMMA("sync.aligned.m64n128k16", types, 64, "{%64, %65, %66, %67}, %68, 1, 1, 1, 1", "r"(a[0]), "r"(a[1]), \
             "r"(a[2]), "r"(a[3]), "l"(b))

/* d [64 x 128] += a [64 x 16] * b [16 x 128], b with n contiguous; a in registers, as mma.m16n8k16 has it, 16 rows a
   warp. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void wgmma16_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    WGMMA16_REGISTERS_128("f16.f16");
  else
    WGMMA16_REGISTERS_128("bf16.bf16");
}

#endif
