/*
 * device.cuh: what kernels share on the device: the selector, elements of any dtype and order, the epilogue.
 */
#ifndef ESMM_CUDA_DEVICE_CUH
#define ESMM_CUDA_DEVICE_CUH

#include "cuda/params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* The values of esmm.h, which is not included here: it is a header for hosts. */
enum { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2 };
enum { ROW_MAJOR = 0, COL_MAJOR = 1 };
enum { ACTIVATION_NONE = 0, ACTIVATION_RELU = 1, ACTIVATION_RELU2 = 2 };

/* True where the device has chosen another kernel. */
static __device__ __forceinline__ bool not_selected(const esmm_selector &selector)
{
  return selector.address != 0 && *(const uint32_t *)selector.address != selector.value;
}

static __device__ __forceinline__ int64_t element_at(const esmm_device_matrix &m, int64_t row, int64_t col)
{
  return m.order == ROW_MAJOR ? row * m.ld + col : col * m.ld + row;
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

static __device__ __forceinline__ float load_element(const esmm_device_matrix &m, int64_t at)
{
  if (m.dtype == DTYPE_F32)
    return ((const float *)m.data)[at];
  if (m.dtype == DTYPE_BF16)
    return as_float(((const __nv_bfloat16 *)m.data)[at]);
  return as_float(((const __half *)m.data)[at]);
}

static __device__ __forceinline__ void store_element(const esmm_device_matrix &m, int64_t at, float x)
{
  if (m.dtype == DTYPE_F32)
    ((float *)m.data)[at] = x;
  else if (m.dtype == DTYPE_BF16)
    ((__nv_bfloat16 *)m.data)[at] = __float2bfloat16_rn(x);
  else
    ((__half *)m.data)[at] = __float2half_rn(x);
}

/* NaN stays NaN. */
static __device__ __forceinline__ float activate(int32_t activation, float x)
{
  if (activation == ACTIVATION_NONE)
    return x;
  const float positive = x < 0.0f ? 0.0f : x;
  return activation == ACTIVATION_RELU2 ? positive * positive : positive;
}

/* One element of C; row and col lie inside it. Rounded as on a CPU: no contraction to a fused multiply-add. */
static __device__ __forceinline__ void finish_element(const esmm_epilogue_params &e, int64_t row, int64_t col,
                                                      float sum)
{
  const int64_t at = element_at(e.c, row, col);
  float x = __fmul_rn(e.alpha, sum);
  if (e.beta != 0.0f)
    x = __fadd_rn(x, __fmul_rn(e.beta, load_element(e.c, at)));
  if (e.bias)
    x = __fadd_rn(x, ((const float *)e.bias)[col]);
  store_element(e.c, at, activate(e.activation, x));
}

/* Sums may be stored as they are: fp32, row-major, alpha 1, beta 0, nothing after the sum. */
static __device__ __forceinline__ bool is_plain(const esmm_epilogue_params &e)
{
  return e.c.dtype == DTYPE_F32 && e.c.order == ROW_MAJOR && e.alpha == 1.0f && e.beta == 0.0f && e.bias == 0 &&
         e.activation == ACTIVATION_NONE;
}

#endif
