/*
 * choose.cuh: which two of four values stay, and what is noted of it: for kernels that write such an operand as a dense
 * matrix with zeros (ffn.cu), or pack it for the sparse tensor cores (ffn_two16_sm90a.cu).
 */
#ifndef ESMM_CUDA_FFN_CHOOSE_CUH
#define ESMM_CUDA_FFN_CHOOSE_CUH

#include "cuda/ffn/params.h"
#include "cuda/kernels/common/device.cuh"
#include "esmm_ffn.h"

/* ---- two of four ---- */

enum { GROUP = 4, KEPT = 2 };

/* a stands before b: NaN before all, then the larger magnitude; equals keep their order. */
static __device__ __forceinline__ bool outranks(float a, float b)
{
  return isnan(a) ? !isnan(b) : !isnan(b) && fabsf(a) > fabsf(b);
}

static __device__ __forceinline__ void keep_largest(const float (&v)[GROUP], float (&out)[GROUP])
{
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    int ahead = 0;
#pragma unroll
    for (int j = 0; j < GROUP; j++)
      if (j != i)
        ahead += j < i ? !outranks(v[i], v[j]) : outranks(v[j], v[i]);
    out[i] = ahead < KEPT ? v[i] : 0.0f;
  }
}

/* Shrinks all by the third largest magnitude: two at most are left. */
static __device__ __forceinline__ void shrink(const float (&v)[GROUP], float (&out)[GROUP])
{
  const float a = fabsf(v[0]), b = fabsf(v[1]), c = fabsf(v[2]), d = fabsf(v[3]);
  const float high = fmaxf(fminf(a, b), fminf(c, d)); /* the second largest or the third, */
  const float low = fminf(fmaxf(a, b), fmaxf(c, d));  /* and this the other */
  const float third = fminf(high, low);
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    out[i] = fabsf(v[i]) > third ? copysignf(fabsf(v[i]) - third, v[i]) : 0.0f;
}

static __device__ __forceinline__ uint64_t random_of(uint64_t seed, uint64_t place)
{
  uint64_t z = (seed ^ place * 0xd1342543de82ef95u) + 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* As draw() of ffn/sparsify.c, operation by operation: a CPU draws the same. */
static __device__ __noinline__ void draw(const float (&v)[GROUP], double u, float (&out)[GROUP])
{
  double rest = 0.0, p[GROUP];
  int largest = 0;
  float most_value = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < GROUP; i++)
    if (fabsf(v[i]) > most_value) {
      largest = i;
      most_value = fabsf(v[i]);
    }
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    rest += i == largest ? 0.0 : (double)fabsf(v[i]);
  const double most = (double)most_value;
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    const double x = (double)fabsf(v[i]);
    p[i] = most <= rest ? 2.0 * x / (most + rest) : i == largest ? 1.0 : x / rest;
  }
  double from = 0.0;
  int picked = 0;
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    const double to = from + p[i];
    const bool in = (from <= u && u < to) || (from <= u + 1.0 && u + 1.0 < to);
    out[i] = in && picked < KEPT ? (float)((double)v[i] / p[i]) : 0.0f;
    picked += in;
    from = to;
  }
  if (picked >= KEPT)
    return;
  bool seen = false; /* the line came out short by rounding: the last that has a part of it */
#pragma unroll
  for (int i = GROUP - 1; i >= 0; i--) {
    if (p[i] > 0.0 && !seen && out[i] == 0.0f)
      out[i] = (float)((double)v[i] / p[i]);
    seen = seen || p[i] > 0.0;
  }
}

/* `place` identifies the group in its matrix. True: it counts for the soft threshold's scale. */
static __device__ __forceinline__ bool choose(const esmm_ffn_sparsify_params &p, const float (&v)[GROUP],
                                              uint64_t place, float (&out)[GROUP])
{
  int nonzeros = 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    nonzeros += v[i] != 0.0f;
    finite = finite && isfinite(v[i]);
  }
  if (finite && nonzeros <= KEPT) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      out[i] = v[i];
  } else if (!finite || p.sparsifier == ESMM_SPARSIFY_TOP_N) {
    keep_largest(v, out);
  } else if (p.sparsifier == ESMM_SPARSIFY_SOFT) {
    shrink(v, out);
  } else {
    draw(v, (double)(random_of(p.seed, place) >> 11) * 0x1p-53, out);
  }
  return finite;
}

static __device__ __forceinline__ void note(esmm_ffn_record &r, float x, float y)
{
  r.kept += x != 0.0f && y != 0.0f;
  r.dropped += x != 0.0f && y == 0.0f;
  r.norm += (double)x * (double)x;
  const double difference = (double)x - (double)y;
  r.difference += x == y || isnan(x) ? 0.0 : difference * difference;
}

/* Chooses from a group and notes it, or measures it; v becomes what is stored. Zeros are noted as nothing. */
template <class OF>
static __device__ __forceinline__ void do_group_here(OF of, const esmm_ffn_sparsify_params &p, float (&v)[GROUP],
                                                     uint64_t place, float factor, esmm_ffn_record &r)
{
  float out[GROUP];
  const bool finite = choose(p, v, place, out);
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    if (p.step == ESMM_FFN_MEASURES) {
      r.fit += finite ? (double)v[i] * (double)out[i] : 0.0;
      r.own += finite ? (double)out[i] * (double)out[i] : 0.0;
      continue;
    }
    const float y = as_float(rounded(of, p.step == ESMM_FFN_SCALES ? __fmul_rn(factor, out[i]) : out[i]));
    note(r, v[i], y);
    v[i] = y;
  }
}

/* ---- what is noted ---- */

static __device__ __forceinline__ void add(esmm_ffn_record &r, const esmm_ffn_record &x)
{
  r.kept += x.kept;
  r.dropped += x.dropped;
  r.norm += x.norm;
  r.difference += x.difference;
  r.fit += x.fit;
  r.own += x.own;
}

/* All THREADS threads of the block; the sum is thread 0's. */
template <int THREADS> static __device__ __forceinline__ void sum_block(esmm_ffn_record &r)
{
  __shared__ esmm_ffn_record shared[THREADS / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    esmm_ffn_record x;
    x.kept = __shfl_down_sync(~0u, r.kept, step);
    x.dropped = __shfl_down_sync(~0u, r.dropped, step);
    x.norm = __shfl_down_sync(~0u, r.norm, step);
    x.difference = __shfl_down_sync(~0u, r.difference, step);
    x.fit = __shfl_down_sync(~0u, r.fit, step);
    x.own = __shfl_down_sync(~0u, r.own, step);
    add(r, x);
  }
  if (threadIdx.x % 32 == 0)
    shared[threadIdx.x / 32] = r;
  __syncthreads();
  if (threadIdx.x != 0)
    return;
  for (int i = 1; i < THREADS / 32; i++)
    add(r, shared[i]);
}

/* The block's record to its place among all of the grid. */
template <int THREADS>
static __device__ __forceinline__ void leave_record(const esmm_ffn_sparsify_params &p, esmm_ffn_record &r)
{
  sum_block<THREADS>(r);
  if (threadIdx.x == 0)
    ((esmm_ffn_record *)p.records)[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = r;
}

static __device__ __forceinline__ float factor_of(const esmm_ffn_sparsify_params &p)
{
  return p.step == ESMM_FFN_SCALES ? ((const esmm_ffn_notes *)p.notes)->factor : 1.0f;
}

#endif
