/*
 * instructions.cuh: Hopper's sparse tensor core (wgmma.sp) on 16-bit operands in shared memory, fp32 sums.
 *
 * Its sparse operand has the rows, so C is computed transposed: a row of the instruction is a column of C, its columns
 * are rows of A. B is a half of a block of the form nm16 (nm_layout.h): 64 columns, 64 k's, of which one instruction
 * takes 32; `places` is this thread's word of the half, and SELECT says which lanes' words it means: of the first 32
 * k's (0) or of the last (1). A lies in panels of lines of 128 bytes with 128-byte swizzle, aligned to 1024:
 *
 *   k contiguous (A row-major)   line = a row of A, 64 k's; 32 k's further is 64 bytes further
 *   m contiguous                 line = a k, 64 rows; 32 k's further is 32 lines further, 64 rows further a panel
 */
#ifndef ESMM_CUDA_NM16_INSTRUCTIONS_CUH
#define ESMM_CUDA_NM16_INSTRUCTIONS_CUH

#include "cuda/kernels/wgmma16/instructions.cuh"
#include "cuda/ops/nm_layout.h"

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

#define NM16_SP(cols, sums, types, operands)                                                                      \
  SM90_WGMMA("sp.sync.aligned.m64n" #cols "k32", types, sums, operands, "l"(b), "l"(a), "r"(places), "n"(SELECT), \
             "n"(A_LINES_ARE_K))

/* d [64 x cols] += b' [64 x 32] * a' [32 x cols], for `cols` rows of A, `sums` sums of a thread; operands: the names of
   the further ones. */
#define NM16(cols, sums, operands)                                                                      \
  template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SELECT>                                            \
  static __device__ __forceinline__ void nm16(float(&d)[sums], uint64_t b, uint64_t a, uint32_t places) \
  {                                                                                                     \
    static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without a wgmma");                  \
    if (DTYPE == ESMM_F16)                                                                              \
      NM16_SP(cols, sums, "f16.f16", operands);                                                         \
    else                                                                                                \
      NM16_SP(cols, sums, "bf16.bf16", operands);                                                       \
  }

NM16(16, 8, "%8, %9, %10, %11, 1, 1, 1, 0, %12")
NM16(32, 16, "%16, %17, %18, %19, 1, 1, 1, 0, %20")
NM16(64, 32, "%32, %33, %34, %35, 1, 1, 1, 0, %36")
NM16(128, 64, "%64, %65, %66, %67, 1, 1, 1, 0, %68")
NM16(256, 128, "%128, %129, %130, %131, 1, 1, 1, 0, %132")

/* A half of a block at `b` times all 64 k's of A at `a`; thread: of the warpgroup. Commits, does not wait. */
template <esmm_dtype DTYPE, int A_LINES_ARE_K, int SUMS>
static __device__ __forceinline__ void nm16_stage(float (&sums)[SUMS], uint32_t a, uint32_t b, uint32_t thread)
{
  const uint32_t places = sm90_load(b + ESMM_NM16_WORDS + thread * 4);
  const uint64_t view_a = nm16_view_of_a<A_LINES_ARE_K>(a), view_b = nm16_view_of_b(b);
  sm90_wgmma_fence();
  nm16<DTYPE, A_LINES_ARE_K, 0>(sums, view_b, view_a, places);
  nm16<DTYPE, A_LINES_ARE_K, 1>(sums, view_b + NM16_B_STEP, view_a + nm16_a_step<A_LINES_ARE_K>::STEP, places);
  sm90_wgmma_commit();
}

#endif
