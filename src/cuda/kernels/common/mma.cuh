/*
 * mma.cuh: the tensor core on 16-bit operands in registers, fp32 sums, by mma.sync (sm_80 and later).
 */
#ifndef ESMM_CUDA_MMA_CUH
#define ESMM_CUDA_MMA_CUH

#include "cuda/kernels/common/device.cuh"

/* Four 8 x 8 matrices; lane l names line l % 8 of matrix l / 8. */
static __device__ __forceinline__ void mma16_load(uint32_t (&r)[4], uint32_t from)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
static __device__ __forceinline__ void mma16_load_transposed(uint32_t (&r)[4], uint32_t from)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void mma16_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
  static_assert(DTYPE == ESMM_BF16 || DTYPE == ESMM_F16, "a dtype without an mma");
  if (DTYPE == ESMM_BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
