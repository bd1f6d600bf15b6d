/*
 * given.cuh: bitmaps of A that a call was given (esmm_given_bits), read by kernels that then need not look at A itself
 * to find its zeros. A step is 64 k's of one of the kernel's own strips. Bits past A's last k never count.
 */
#ifndef ESMM_CUDA_GIVEN_CUH
#define ESMM_CUDA_GIVEN_CUH

#include "cuda/params.h"

/* Word `word` of given strip `from`; 0 where there is none. */
static __device__ __forceinline__ uint32_t given_word(const esmm_given_bits &g, int from, int word)
{
  return from < g.strips && word < g.words ? __ldg((const uint32_t *)g.bits + (int64_t)from * g.words + word) : 0;
}

/* Which of 32 k's are among the first `left`. */
static __device__ __forceinline__ uint32_t given_mask(int left)
{
  return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
}

/* A lane's part of the step that begins at k: word lane % 2 of the lane / 2-th of the strips that make one. */
static __device__ __forceinline__ uint32_t given_fetch(const esmm_given_bits &g, int strip, int k, uint32_t lane)
{
  static_assert(ESMM_MOST_FOLD == 16, "a lane for each word");
  const int part = (int)(lane / 2);
  return part < g.fold ? given_word(g, strip * g.fold + part, k / 32 + (int)(lane % 2)) : 0;
}

/* All lanes: the step's bitmap from what each of them fetched, of the first `left` k's. */
static __device__ __forceinline__ uint2 given_step(uint32_t fetched, int left, uint32_t lane)
{
  return make_uint2(__reduce_or_sync(~0u, lane % 2 == 0 ? fetched : 0) & given_mask(left),
                    __reduce_or_sync(~0u, lane % 2 == 1 ? fetched : 0) & given_mask(left - 32));
}

/* Word `word` of a strip of the kernel's own, by one thread. */
static __device__ __forceinline__ uint32_t given_strip_word(const esmm_given_bits &g, int strip, int word, int ks)
{
  uint32_t any = 0;
#pragma unroll 4
  for (int i = 0; i < g.fold; i++)
    any |= given_word(g, strip * g.fold + i, word);
  return any & given_mask(ks - 32 * word);
}

#endif
