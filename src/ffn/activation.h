/*
 * activation.h: derivatives of the activations, for the CPU's passes and for a GPU's, whose compiler reads this file
 * too. Forward values are epilogue.h's.
 */
#ifndef ESMM_FFN_ACTIVATION_H
#define ESMM_FFN_ACTIVATION_H

#include "esmm.h"

#include <math.h>

#ifdef __CUDACC__
#define FFN_SLOPE static __device__ __forceinline__
#else
#define FFN_SLOPE static inline
#endif

/* Beyond this a GELU's or SiLU's derivative is 0 or 1 in fp32, and its terms would meet Inf * 0. */
#define FFN_FAR 100.0f

FFN_SLOPE float ffn_gelu_slope(float x)
{
  const float density = 0.398942280401f * expf(-0.5f * x * x);
  return 0.5f * erfcf(-0.707106781187f * x) + x * density;
}

FFN_SLOPE float ffn_gelu_tanh_slope(float x)
{
  const float inner = 0.797884560803f * (x + 0.044715f * x * x * x), t = tanhf(inner);
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.797884560803f * (1.0f + 0.134145f * x * x);
}

FFN_SLOPE float ffn_silu_slope(float x)
{
  const float s = 1.0f / (1.0f + expf(-x));
  return s * (1.0f + x * (1.0f - s));
}

/* The derivative of a GELU or of SiLU at x, the value before the activation. `activation` is an esmm_activation. */
FFN_SLOPE float ffn_smooth_slope(int activation, float x)
{
  if (fabsf(x) > FFN_FAR)
    return x > 0.0f ? 1.0f : 0.0f;
  return activation == ESMM_ACT_GELU        ? ffn_gelu_slope(x)
         : activation == ESMM_ACT_GELU_TANH ? ffn_gelu_tanh_slope(x)
                                            : ffn_silu_slope(x);
}

/* The same of a ReLU or its square. NaN stays NaN; at 0 it is 0. */
FFN_SLOPE float ffn_relu_slope(int activation, float x)
{
  if (activation == ESMM_ACT_RELU2)
    return x <= 0.0f ? 0.0f : 2.0f * x;
  return x <= 0.0f ? 0.0f : x > 0.0f ? 1.0f : x;
}

/* The same from a ReLU's result: ReLU2's slope, 2 x, is twice the root of x^2. */
FFN_SLOPE float ffn_slope_of_result(int activation, float h)
{
  if (activation == ESMM_ACT_RELU2)
    return 2.0f * sqrtf(h);
  return h <= 0.0f ? 0.0f : h > 0.0f ? 1.0f : h;
}

/* Of any of them. */
FFN_SLOPE float ffn_slope(esmm_activation activation, float x)
{
  switch (activation) {
  case ESMM_ACT_RELU:
  case ESMM_ACT_RELU2:
    return ffn_relu_slope((int)activation, x);
  case ESMM_ACT_GELU:
  case ESMM_ACT_GELU_TANH:
  case ESMM_ACT_SILU:
    return ffn_smooth_slope((int)activation, x);
  case ESMM_ACT_NONE:
    break;
  }
  return 1.0f;
}

#endif
