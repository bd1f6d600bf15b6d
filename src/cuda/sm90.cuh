/*
 * sm90.cuh: Hopper's own instructions under short names: mbarriers, TMA, wgmma, register reallocation.
 */
#ifndef ESMM_CUDA_SM90_CUH
#define ESMM_CUDA_SM90_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t sm90_address(const void *p)
{
  return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void sm90_barrier_init(uint64_t *b, uint32_t count)
{
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sm90_address(b)), "r"(count) : "memory");
}

/* After the inits, so that the copy engine sees them. */
static __device__ __forceinline__ void sm90_fence_init(void)
{
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

static __device__ __forceinline__ void sm90_barrier_arrive(uint64_t *b)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm90_address(b)) : "memory");
}

/* Arrives, and the phase also waits for so many bytes of copies. */
static __device__ __forceinline__ void sm90_barrier_expect(uint64_t *b, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm90_address(b)), "r"(bytes) : "memory");
}

static __device__ __forceinline__ bool sm90_barrier_test(uint64_t *b, uint32_t parity)
{
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(sm90_address(b)), "r"(parity)
               : "memory");
  return done != 0;
}

static __device__ __forceinline__ void sm90_barrier_wait(uint64_t *b, uint32_t parity)
{
  while (!sm90_barrier_test(b, parity)) {
  }
}

/* A box of a 2-D tensor map to shared memory; b learns of its bytes. */
static __device__ __forceinline__ void sm90_tma_load(void *to, const void *map, int x, int y, uint64_t *b)
{
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          sm90_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(sm90_address(b))
      : "memory");
}

/* Ordinary writes to shared memory become visible to the tensor core and the copy engine. */
static __device__ __forceinline__ void sm90_fence_async(void)
{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void sm90_ldmatrix(const void *from, uint32_t (&r)[4])
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(sm90_address(from))
               : "memory");
}

/* wgmma's view of a tile of 128-byte rows (32 fp32 k's), 128-byte swizzle, aligned to 1024 bytes; 32 bytes (a k8 step)
   further is + 2. */
static __device__ __forceinline__ uint64_t sm90_descriptor(const void *tile)
{
  return (uint64_t)((sm90_address(tile) & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

static __device__ __forceinline__ void sm90_wgmma_fence(void)
{
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void sm90_wgmma_commit(void)
{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void sm90_wgmma_wait(void)
{
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int N> static __device__ __forceinline__ void sm90_registers_up(void)
{
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void sm90_registers_down(void)
{
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
