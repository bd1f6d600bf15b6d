/*
 * instructions.cuh: Hopper's sparse tensor core (wgmma.sp) on 16-bit operands in shared memory, fp32 sums.
 *
 * Its sparse operand has the rows, so C is made turned: a row of the instruction is a column of C, its columns are rows
 * of A. B is a half of a block of the form nm16 (nm_layout.h): 64 columns, 64 k's, of which one instruction takes 32;
 * `places` is this thread's word of the half, and SELECT says which lanes' words it means: of the first 32 k's (0) or
 * of the last (1). A lies in panels of lines of 128 bytes with 128-byte swizzle, aligned to 1024:
 *
 *   k contiguous (A row-major)   line = a row of A, 64 k's; 32 k's further is 64 bytes further
 *   m contiguous                 line = a k, 64 rows; 32 k's further is 32 lines further, 64 rows further a panel
 */
#ifndef ESMM_CUDA_NM16_INSTRUCTIONS_CUH
#define ESMM_CUDA_NM16_INSTRUCTIONS_CUH

#include "cuda/kernels/wgmma16/instructions.cuh"

/* Views of what lies at addresses of shared memory. */
static __device__ __forceinline__ uint64_t nm16_view_of_b(uint32_t half) /* groups of 8 lines lie 512 bytes apart */
{
  return (uint64_t)((half & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(512 >> 4) << 32 | (uint64_t)2 << 62;
}

template <int A_LINES_ARE_K> static __device__ __forceinline__ uint64_t nm16_view_of_a(uint32_t panel)
{
  return (uint64_t)((panel & 0x3ffffu) >> 4) | (uint64_t)(A_LINES_ARE_K ? WGMMA16_PANEL >> 4 : 1) << 16 |
         (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* 32 k's further, in units of a view. */
#define NM16_B_STEP 2
template <int A_LINES_ARE_K> struct nm16_a_step {
  enum { STEP = A_LINES_ARE_K ? 32 * 128 / 16 : 64 / 16 };
};

#define NM16_16(types)                                                     \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n16k32.f32." types " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7}, "                         \
               "%8, %9, %10, %11, 1, 1, 1, 0, %12;"                        \
               : WGMMA16_SUMS_8(0)                                         \
               : "l"(b), "l"(a), "r"(places), "n"(SELECT), "n"(A_LINES_ARE_K))

#define NM16_32(types)                                                                   \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n32k32.f32." types " {"               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, %18, %19, 1, 1, 1, 0, %20;"                                    \
               : WGMMA16_SUMS_8(0), WGMMA16_SUMS_8(8)                                    \
               : "l"(b), "l"(a), "r"(places), "n"(SELECT), "n"(A_LINES_ARE_K))

#define NM16_64(types)                                                                             \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n64k32.f32." types " {"                         \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, %34, %35, 1, 1, 1, 0, %36;"                                              \
               : WGMMA16_SUMS_8(0), WGMMA16_SUMS_8(8), WGMMA16_SUMS_8(16), WGMMA16_SUMS_8(24)      \
               : "l"(b), "l"(a), "r"(places), "n"(SELECT), "n"(A_LINES_ARE_K))

#define NM16_128(types)                                                                            \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." types " {"                        \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, %66, %67, 1, 1, 1, 0, %68;"                                              \
               : WGMMA16_SUMS_64(0)                                                                \
               : "l"(b), "l"(a), "r"(places), "n"(SELECT), "n"(A_LINES_ARE_K))

#define NM16_256(types)                                                                                            \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n256k32.f32." types " {"                                        \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
               "%128, %129, %130, %131, 1, 1, 1, 0, %132;"                                                         \
               : WGMMA16_SUMS_64(0), WGMMA16_SUMS_64(64)                                                           \
               : "l"(b), "l"(a), "r"(places), "n"(SELECT), "n"(A_LINES_ARE_K))

/* d [64 x 16] += b' [64 x 32] * a' [32 x 16] */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>
static __device__ __forceinline__ void nm16(float (&d)[8], uint64_t b, uint64_t a, uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    NM16_16("f16.f16");
  else
    NM16_16("bf16.bf16");
}

/* d [64 x 32] += b' [64 x 32] * a' [32 x 32] */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>
static __device__ __forceinline__ void nm16(float (&d)[16], uint64_t b, uint64_t a, uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    NM16_32("f16.f16");
  else
    NM16_32("bf16.bf16");
}

/* d [64 x 64] += b' [64 x 32] * a' [32 x 64] */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>
static __device__ __forceinline__ void nm16(float (&d)[32], uint64_t b, uint64_t a, uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    NM16_64("f16.f16");
  else
    NM16_64("bf16.bf16");
}

/* d [64 x 128] += b' [64 x 32] * a' [32 x 128] */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>
static __device__ __forceinline__ void nm16(float (&d)[64], uint64_t b, uint64_t a, uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    NM16_128("f16.f16");
  else
    NM16_128("bf16.bf16");
}

/* d [64 x 256] += b' [64 x 32] * a' [32 x 256] */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>
static __device__ __forceinline__ void nm16(float (&d)[128], uint64_t b, uint64_t a, uint32_t places)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");
  if (DTYPE == ESMM_F16)
    NM16_256("f16.f16");
  else
    NM16_256("bf16.bf16");
}

#endif
