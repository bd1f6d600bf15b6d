/*
 * few_rows.cuh: what kernels for at most 16 rows share, on sm_80 and later: one-time reads, copies to shared memory,
 * and clusters where there are any, so that several blocks share a tile's k's.
 */
#ifndef ESMM_CUDA_FEW_ROWS_CUH
#define ESMM_CUDA_FEW_ROWS_CUH

#include <stdint.h>

/* ---- memory ---- */

/* 16 bytes that this block reads once. */
static __device__ __forceinline__ uint4 load_once(const void *from)
{
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

static __device__ __forceinline__ uint32_t load_word_once(const void *from)
{
  uint32_t x;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

/* 16 bytes to shared memory; those past `bytes` are zeros. */
static __device__ __forceinline__ void copy_16(void *to, const void *from, int bytes)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void wait_for_copies(void)
{
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- clusters ---- */

static __device__ __forceinline__ int cluster_ranks(void)
{
  uint32_t ranks = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks)); /* rather read again than kept in a register */
#endif
  return (int)ranks;
}

/* All threads of a cluster's blocks meet, and see what was written before. */
static __device__ __forceinline__ void cluster_meet(void)
{
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* The same place in block `rank`. */
static __device__ __forceinline__ float load_from(const float *place, int rank)
{
  float x = *place;
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"((uint32_t)__cvta_generic_to_shared(place)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
#endif
  return x;
}

#endif
