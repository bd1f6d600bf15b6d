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

/* Before it is initialised again. */
static __device__ __forceinline__ void sm90_barrier_end(uint64_t *b)
{
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(sm90_address(b)) : "memory");
}

/* After the inits, so that TMA sees them. */
static __device__ __forceinline__ void sm90_fence_init(void)
{
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

static __device__ __forceinline__ void sm90_barrier_arrive(uint64_t *b)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm90_address(b)) : "memory");
}

/* Arrives `times` times. */
static __device__ __forceinline__ void sm90_barrier_arrive_many(uint64_t *b, uint32_t times)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(sm90_address(b)), "r"(times) : "memory");
}

/* Arrives, and the phase also waits for `bytes` of copies. */
static __device__ __forceinline__ void sm90_barrier_expect(uint64_t *b, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm90_address(b)), "r"(bytes) : "memory");
}

/* The phase waits for `bytes` more; a thread is still to arrive. */
static __device__ __forceinline__ void sm90_barrier_expect_more(uint64_t *b, uint32_t bytes)
{
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(sm90_address(b)), "r"(bytes)
               : "memory");
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

/* The same without any waiting. */
static __device__ __forceinline__ bool sm90_barrier_look(uint64_t *b, uint32_t parity)
{
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
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

/*
 * The same by addresses of shared memory, for loops in which every instruction counts: from a pointer the compiler
 * works the address out again each time.
 */
static __device__ __forceinline__ void sm90_barrier_wait_at(uint32_t b, uint32_t parity)
{
  uint32_t done;
  do
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(b), "r"(parity)
                 : "memory");
  while (!done);
}

static __device__ __forceinline__ void sm90_barrier_arrive_here(uint32_t b)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}

static __device__ __forceinline__ uint4 sm90_load4(uint32_t from)
{
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

static __device__ __forceinline__ uint2 sm90_load2(uint32_t from)
{
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}

static __device__ __forceinline__ uint32_t sm90_load(uint32_t from)
{
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

static __device__ __forceinline__ void sm90_store(uint32_t to, uint32_t x)
{
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

static __device__ __forceinline__ void sm90_add(uint32_t to, uint32_t x)
{
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

static __device__ __forceinline__ void sm90_store4(uint32_t to, uint4 x)
{
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/* A box of a 2-D tensor map to shared memory; b counts its bytes. */
static __device__ __forceinline__ void sm90_tma_load(void *to, const void *map, int x, int y, uint64_t *b)
{
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          sm90_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(sm90_address(b))
      : "memory");
}

/* Bytes of memory to shared memory, both aligned to 16; b counts them. */
static __device__ __forceinline__ void sm90_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *b)
{
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(sm90_address(to)),
      "l"(from), "r"(bytes), "r"(sm90_address(b))
      : "memory");
}

static __device__ __forceinline__ void sm90_prefetch_map(const void *map)
{
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* The same to every block of the cluster that `blocks` has a bit of: same place, each one's own barrier. */
static __device__ __forceinline__ void sm90_tma_load_multicast(void *to, const void *map, int x, int y, uint64_t *b,
                                                               uint16_t blocks)
{
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%2, %3}], [%4], %5;" ::"r"(sm90_address(to)),
               "l"(map), "r"(x), "r"(y), "r"(sm90_address(b)), "h"(blocks)
               : "memory");
}

/* Bytes of memory, as sm90_bulk_load, to the same blocks. */
static __device__ __forceinline__ void sm90_bulk_load_multicast(void *to, const void *from, uint32_t bytes, uint64_t *b,
                                                                uint16_t blocks)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
               "[%3], %4;" ::"r"(sm90_address(to)),
               "l"(from), "r"(bytes), "r"(sm90_address(b)), "h"(blocks)
               : "memory");
}

/* A box from shared memory to memory; the thread's groups of such copies are committed and waited for. */
static __device__ __forceinline__ void sm90_tma_store(const void *map, int x, int y, const void *from)
{
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y),
               "r"(sm90_address(from))
               : "memory");
}

static __device__ __forceinline__ void sm90_bulk_commit(void)
{
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Shared memory may be written again: that of all but this thread's last LATER commits. */
template <int LATER = 0> static __device__ __forceinline__ void sm90_bulk_wait_read(void)
{
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LATER) : "memory");
}

/* Everything has been written. */
static __device__ __forceinline__ void sm90_bulk_wait(void)
{
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* A cluster: which of its blocks this is, how many there are; all of their threads meet, and what they have written is
   there for the others. */
static __device__ __forceinline__ uint32_t cluster_rank(void)
{
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

static __device__ __forceinline__ uint32_t cluster_ranks(void)
{
  uint32_t ranks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
  return ranks;
}

static __device__ __forceinline__ void cluster_sync(void)
{
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* The same place in another block of the cluster, and a barrier there. */
static __device__ __forceinline__ uint32_t sm90_address_at(const void *p, uint32_t rank)
{
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(sm90_address(p)), "r"(rank));
  return there;
}

static __device__ __forceinline__ void sm90_barrier_arrive_cluster(uint32_t b)
{
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}

/* The same `times` times. */
static __device__ __forceinline__ void sm90_barrier_arrive_cluster_many(uint32_t b, uint32_t times)
{
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(b), "r"(times) : "memory");
}

/* Ordinary writes to shared memory become visible to the tensor core and TMA. */
static __device__ __forceinline__ void sm90_fence_async(void)
{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for memory of the device too. */
static __device__ __forceinline__ void sm90_fence_async_all(void)
{
  asm volatile("fence.proxy.async;" ::: "memory");
}

/* Four 8 x 8 matrices of 16-bit elements, transposed: a lane gets two elements of column lane / 4 of each. */
static __device__ __forceinline__ void sm90_ldmatrix_trans_at(uint32_t from, uint32_t (&r)[4])
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

static __device__ __forceinline__ void sm90_ldmatrix_at(uint32_t from, uint32_t (&r)[4])
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

static __device__ __forceinline__ void sm90_ldmatrix(const void *from, uint32_t (&r)[4])
{
  sm90_ldmatrix_at(sm90_address(from), r);
}

/* Four such matrices from a warp's registers; lane i gives the place of line i. */
static __device__ __forceinline__ void sm90_stmatrix_at(uint32_t to, const uint32_t (&r)[4])
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

/* The same, each matrix transposed. */
static __device__ __forceinline__ void sm90_stmatrix_trans_at(uint32_t to, const uint32_t (&r)[4])
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

/* ---- what wgmma's instructions are made of ---- */

/* An instruction's first n registers; n of a thread's sums `d`, from the i-th on. */
#define SM90_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SM90_NAMES_16 SM90_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SM90_NAMES_32 SM90_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_NAMES_64                                                                \
  SM90_NAMES_32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_NAMES_128                                                                           \
  SM90_NAMES_64                                                                                  \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SM90_SUMS_8(i)                                                                                    \
  "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define SM90_SUMS_16(i) SM90_SUMS_8(i), SM90_SUMS_8((i) + 8)
#define SM90_SUMS_32(i) SM90_SUMS_16(i), SM90_SUMS_16((i) + 16)
#define SM90_SUMS_64(i) SM90_SUMS_32(i), SM90_SUMS_32((i) + 32)
#define SM90_SUMS_128(i) SM90_SUMS_64(i), SM90_SUMS_64((i) + 64)

/* wgmma, of `shape` and `types`: what it reads has the names `operands`, and is what comes last. */
#define SM90_WGMMA(shape, types, sums, operands, ...)                                           \
  asm volatile("wgmma.mma_async." shape ".f32." types " {" SM90_NAMES_##sums "}, " operands ";" \
               : SM90_SUMS_##sums(0)                                                            \
               : __VA_ARGS__)

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

/* Sums must not move over what waits for wgmma. */
template <int SUMS> static __device__ __forceinline__ void sm90_wgmma_hold(float (&sums)[SUMS])
{
#pragma unroll
  for (int i = 0; i < SUMS; i++)
    asm volatile("" : "+f"(sums[i])::"memory");
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
