/*
 * sample.cuh: the cheap look at A that the choice between a dense and a skipping kernel rests on.
 *
 * A sample is a few places of A, spread over all of it and the same in every call of a shape: without a regular step,
 * so that a pattern in A does not meet them all. A place is the rows of one strip by some k's next to each other; rows
 * and k's past A's end do not count. Over all k's of all places:
 *
 *   element   share of elements that are not zero
 *   strip     share of k's with a nonzero in the strip's rows
 *   joint     the same, each k weighed with the share of B's strips that need it
 *
 * -0 is a zero, NaN is not.
 *
 *   code                      places             of                        how they are spread
 *   esmm_sample (extract.cu)  ESMM_SAMPLES       a strip's rows by 32 k's  sample_in_stretch
 *   k_wgmma16_sm90a.cu        its SAMPLES        128 rows by 8 k's         sample_by_section
 *
 * The first is a separate launch; the second is made by every block of a product, and so looks at less. Only its own
 * sample predicts what that kernel chooses: esmm_wgmma16_look.
 */
#ifndef ESMM_CUDA_SAMPLE_CUH
#define ESMM_CUDA_SAMPLE_CUH

#include "cuda/kernels/common/device.cuh"

/* Somewhere in part i of ESMM_SAMPLES of `total`; salt: another place in each. */
static __device__ __forceinline__ int64_t sample_in_stretch(int i, int64_t total, uint32_t salt)
{
  const int64_t from = i * total / ESMM_SAMPLES, to = (i + 1) * total / ESMM_SAMPLES;
  const uint32_t hash = (salt + 1) * 0x9e3779b9u;
  return from + (int64_t)(((uint64_t)hash * (uint64_t)(to - from)) >> 32);
}

/* Sample i of SAMPLES: a strip, the golden section again and again; a group of k's, one after the other. */
template <int SAMPLES>
static __device__ __forceinline__ void sample_by_section(int i, uint32_t strips, uint32_t groups, uint32_t &strip,
                                                         uint32_t &group)
{
  strip = __umulhi(((uint32_t)i + 1) * 2654435769u, strips);
  group = __umulhi((uint32_t)i * (0xffffffffu / SAMPLES) + (uint32_t)i * 0x1f3u, groups);
}

/*
 * Does skipping pay? P has the line that the host gives: what a dense kernel takes (dense), and what a skipping one
 * takes at these densities. Rounded in one way wherever it is compiled, so that the same densities choose the same.
 */
template <class P> static __device__ __forceinline__ bool skipping_pays(const P &p, float strip, float joint)
{
  return __fmaf_rn(p.per_joint, joint, __fmaf_rn(p.per_strip, strip, p.base)) < p.dense;
}

#endif
