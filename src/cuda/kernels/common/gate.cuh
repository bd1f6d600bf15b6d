/*
 * gate.cuh: an element of a gated product, from two sums of a thread:
 *
 *     C = gate_activation(alpha * gate + gate_bias) * (alpha * sum + beta * C + bias) + residual
 *
 * Rounded as in epilogue.cuh.
 */
#ifndef ESMM_CUDA_GATE_CUH
#define ESMM_CUDA_GATE_CUH

#include "cuda/kernels/common/epilogue.cuh"

/* row and col lie inside C; true where the stored value is not zero. A call, because many end in it. */
static __device__ __noinline__ bool finish_gated_element(const esmm_epilogue_params &e, const float *gate_bias,
                                                         int32_t gate_activation, int64_t row, int64_t col, float gate,
                                                         float sum)
{
  const int64_t at = element_at(e.c, row, col);
  bool nonzero = false;
  float f = __fmul_rn(e.alpha, gate), x = __fmul_rn(e.alpha, sum);
  if (gate_bias)
    f = __fadd_rn(f, gate_bias[col]);
  f = is_smooth(gate_activation) ? smooth(gate_activation, f) : activate(gate_activation, f);
  if (e.beta != 0.0f)
    x = __fadd_rn(x, __fmul_rn(e.beta, load_element(e.c, at)));
  if (e.bias)
    x = __fadd_rn(x, ((const float *)e.bias)[col]);
  x = __fmul_rn(f, x);
  if (e.residual.data)
    x = __fadd_rn(x, load_element(e.residual, element_at(e.residual, row, col)));
  with_dtype(e.c.dtype, [&](auto of) {
    const auto value = rounded(of, x);
    nonzero = as_float(value) != 0.0f;
    ((typename decltype(of)::element *)e.c.data)[at] = value;
  });
  return nonzero;
}

#endif
