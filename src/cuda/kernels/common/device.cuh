/*
 * device.cuh: what kernels share on the device: the selector, elements of any dtype and order. Dtypes, orders and
 * activations are esmm.h's.
 */
#ifndef ESMM_CUDA_DEVICE_CUH
#define ESMM_CUDA_DEVICE_CUH

#include "cuda/params.h"
#include "esmm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* True where the device has chosen another kernel. */
static __device__ __forceinline__ bool not_selected(const esmm_selector &selector)
{
  return selector.address != 0 && *(const uint32_t *)selector.address != selector.value;
}

/* ---- threads ---- */

static __device__ __forceinline__ int lane_id(void)
{
  return (int)(threadIdx.x % 32);
}

static __device__ __forceinline__ int warp_id(void)
{
  return (int)(threadIdx.x / 32);
}

/* ---- dtypes ---- */

/*
 * Functions of a dtype have a case for each one, the last without a test: one more test costs registers in every
 * kernel. So the build stops where esmm.h has a dtype without a case: is_dtype<V> is whether esmm.h has a name for V,
 * which the compiler then prints instead of a number.
 */
template <esmm_dtype V> static constexpr bool is_dtype(void)
{
  const char *name = __PRETTY_FUNCTION__; /* ends in "V = ESMM_F16]" or in "V = (esmm_dtype)3]" */
  const char *value = name;
  for (; *name; name++)
    if (*name == '=')
      value = name + 1;
  return value[0] == ' ' && value[1] == 'E';
}
static_assert(is_dtype<ESMM_F32>() && is_dtype<ESMM_BF16>() && is_dtype<ESMM_F16>(), "is_dtype does not work");
static_assert(ESMM_F16 == 2 && !is_dtype<(esmm_dtype)3>(),
              "a new dtype: each function here that takes a dtype needs its case, and so does store.cuh");

/* What an element is, and the bits it has: all but the topmost, which is the sign, are zero where it is zero. */
template <esmm_dtype DTYPE> struct dtype_of;
template <> struct dtype_of<ESMM_F32> {
  typedef float element;
  typedef uint32_t bits;
};
template <> struct dtype_of<ESMM_BF16> {
  typedef __nv_bfloat16 element;
  typedef uint16_t bits;
};
template <> struct dtype_of<ESMM_F16> {
  typedef __half element;
  typedef uint16_t bits;
};

/* Calls f with the dtype_of of this dtype. */
template <class F> static __device__ __forceinline__ void with_dtype(int32_t dtype, const F &f)
{
  if (dtype == ESMM_F32)
    f(dtype_of<ESMM_F32>());
  else if (dtype == ESMM_BF16)
    f(dtype_of<ESMM_BF16>());
  else /* ESMM_F16 */
    f(dtype_of<ESMM_F16>());
}

/* The same for what looks at bits alone: dtypes of the same bits are one case. */
template <class F> static __device__ __forceinline__ void with_bits(int32_t dtype, const F &f)
{
  if (dtype == ESMM_F32)
    f(dtype_of<ESMM_F32>());
  else /* ESMM_BF16, ESMM_F16 */
    f(dtype_of<ESMM_F16>());
}

/* Bytes of an element. */
static __device__ __forceinline__ int dtype_bytes(int32_t dtype)
{
  return dtype == ESMM_F32 ? 4 : 2; /* ESMM_BF16, ESMM_F16 */
}

static __device__ __forceinline__ float as_float(float x)
{
  return x;
}
static __device__ __forceinline__ float as_float(__nv_bfloat16 x)
{
  return __bfloat162float(x);
}
static __device__ __forceinline__ float as_float(__half x)
{
  return __half2float(x);
}

/* Two of a 16-bit dtype in a word, x in the lower half. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ uint32_t pair_of(float x, float y);
template <> __device__ __forceinline__ uint32_t pair_of<ESMM_BF16>(float x, float y)
{
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *(const uint32_t *)&pair;
}
template <> __device__ __forceinline__ uint32_t pair_of<ESMM_F16>(float x, float y)
{
  const __half2 pair = __floats2half2_rn(x, y);
  return *(const uint32_t *)&pair;
}

/* The element that x is rounded to. */
static __device__ __forceinline__ float rounded(dtype_of<ESMM_F32>, float x)
{
  return x;
}
static __device__ __forceinline__ __nv_bfloat16 rounded(dtype_of<ESMM_BF16>, float x)
{
  return __float2bfloat16_rn(x);
}
static __device__ __forceinline__ __half rounded(dtype_of<ESMM_F16>, float x)
{
  return __float2half_rn(x);
}

/* Which of 32 elements, `stride` apart, are not zero; the sign does not count. All loads first, then the tests. */
template <typename T> static __device__ __forceinline__ uint32_t nonzero_bits(const T *from, int64_t stride, int count)
{
  T x[32];
#pragma unroll
  for (int j = 0; j < 32; j++)
    x[j] = j < count ? from[j * stride] : (T)0;
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 32; j++)
    bits |= (uint32_t)((T)(x[j] << 1) != 0) << j;
  return bits;
}

/* Which of eight 16-bit elements are not zero, likewise. */
static __device__ __forceinline__ uint32_t nonzero_mask(uint4 x)
{
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    mask |= (uint32_t)((word[i] & 0x7fffu) != 0) << (2 * i);
    mask |= (uint32_t)((word[i] & 0x7fff0000u) != 0) << (2 * i + 1);
  }
  return mask;
}

/* ---- reports ---- */

/* One thread: what was seen of A, to memory of the device or of the host, which may be waiting. */
static __device__ __forceinline__ void report_choice(uint64_t at, const esmm_choice_device &seen)
{
  esmm_choice_device *out = (esmm_choice_device *)at;
  *out = seen;
  __threadfence_system();
  *(volatile uint32_t *)&out->ready = 1;
}

/* ---- elements of a matrix ---- */

static __device__ __forceinline__ int64_t element_at(const esmm_device_matrix &m, int64_t row, int64_t col)
{
  return m.order == ESMM_ROW_MAJOR ? row * m.ld + col : col * m.ld + row;
}

static __device__ __forceinline__ float load_element(const esmm_device_matrix &m, int64_t at)
{
  if (m.dtype == ESMM_F32)
    return ((const float *)m.data)[at];
  if (m.dtype == ESMM_BF16)
    return as_float(((const __nv_bfloat16 *)m.data)[at]);
  return as_float(((const __half *)m.data)[at]); /* ESMM_F16 */
}

static __device__ __forceinline__ void store_element(const esmm_device_matrix &m, int64_t at, float x)
{
  if (m.dtype == ESMM_F32)
    ((float *)m.data)[at] = x;
  else if (m.dtype == ESMM_BF16)
    ((__nv_bfloat16 *)m.data)[at] = __float2bfloat16_rn(x);
  else /* ESMM_F16 */
    ((__half *)m.data)[at] = __float2half_rn(x);
}

#endif
