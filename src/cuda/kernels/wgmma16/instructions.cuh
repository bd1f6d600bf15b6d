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

#define WGMMA16_SUMS_8(i)                                                                                 \
  "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define WGMMA16_SUMS_64(i)                                                                        \
  WGMMA16_SUMS_8(i), WGMMA16_SUMS_8((i) + 8), WGMMA16_SUMS_8((i) + 16), WGMMA16_SUMS_8((i) + 24), \
      WGMMA16_SUMS_8((i) + 32), WGMMA16_SUMS_8((i) + 40), WGMMA16_SUMS_8((i) + 48), WGMMA16_SUMS_8((i) + 56)

/* Operands whose lines are k's are transposed on the way. */
#define WGMMA16_256(types, a_by_k, b_by_k)                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." types " {"                                           \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
               "%128, %129, 1, 1, 1, %130, %131;"                                                                  \
               : WGMMA16_SUMS_64(0), WGMMA16_SUMS_64(64)                                                           \
               : "l"(a), "l"(b), "n"(a_by_k), "n"(b_by_k))

#define WGMMA16_128(types, a_by_k, b_by_k)                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." types " {"                           \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, 1, 1, 1, %66, %67;"                                                      \
               : WGMMA16_SUMS_64(0)                                                                \
               : "l"(a), "l"(b), "n"(a_by_k), "n"(b_by_k))

/* d [64 x 256] += a [64 x 16] * b [16 x 256], b with n contiguous; A_LINES_ARE_K: a with m contiguous. */
template <esmm_dtype DTYPE, int A_LINES_ARE_K>
static __device__ __forceinline__ void wgmma16(float (&d)[128], uint64_t a, uint64_t b)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    WGMMA16_256("f16.f16", A_LINES_ARE_K, 1);
  else
    WGMMA16_256("bf16.bf16", A_LINES_ARE_K, 1);
}

/* d [64 x 128] += a [64 x 16] * b [16 x 128], b with n contiguous; A_LINES_ARE_K: a with m contiguous. */
template <esmm_dtype DTYPE, int A_LINES_ARE_K>
static __device__ __forceinline__ void wgmma16(float (&d)[64], uint64_t a, uint64_t b)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    WGMMA16_128("f16.f16", A_LINES_ARE_K, 1);
  else
    WGMMA16_128("bf16.bf16", A_LINES_ARE_K, 1);
}

/* The other way round: d [64 x 256 or 64 x 128] += a [64 x 16] * b, a with m contiguous; B_LINES_ARE_K: b with n
   contiguous, else with k. */
template <esmm_dtype DTYPE, int B_LINES_ARE_K>
static __device__ __forceinline__ void wgmma16_turned(float (&d)[128], uint64_t a, uint64_t b)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    WGMMA16_256("f16.f16", 1, B_LINES_ARE_K);
  else
    WGMMA16_256("bf16.bf16", 1, B_LINES_ARE_K);
}

template <esmm_dtype DTYPE, int B_LINES_ARE_K>
static __device__ __forceinline__ void wgmma16_turned(float (&d)[64], uint64_t a, uint64_t b)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    WGMMA16_128("f16.f16", 1, B_LINES_ARE_K);
  else
    WGMMA16_128("bf16.bf16", 1, B_LINES_ARE_K);
}

#define WGMMA16_REGISTERS_128(types)                                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." types " {"                           \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                            \
               : WGMMA16_SUMS_64(0)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

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
