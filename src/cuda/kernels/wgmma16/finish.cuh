/*
 * finish.cuh: what follows the sums of a 16-bit C that lie in registers: curves, a residual, a gate. 64 columns of 16
 * rows of a warp at a time, as wgmma leaves them (store.cuh): there are no registers for more, and the code stands
 * there once.
 *
 * Curves are worked out in fp32, with the formulas of epilogue.cuh: within 2^-16 of the exact value, which C's rounding
 * hides, and values below 2^-119 may become 0. In float64 they would take longer than a tenth of the product.
 */
#ifndef ESMM_CUDA_WGMMA16_FINISH_CUH
#define ESMM_CUDA_WGMMA16_FINISH_CUH

#include "cuda/kernels/wgmma16/wgmma16.cuh"

#define PANEL_SUMS 32 /* a thread's share of 64 columns */
#define LOG2_E 1.4426950408889634074

/* ---- curves ---- */

static __device__ __forceinline__ float exp2_of(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ __forceinline__ float reciprocal(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* |x|, but not more than that; of NaN, that. */
static __device__ __forceinline__ float magnitude(float x, float most)
{
  return fminf(fabsf(x), most);
}

template <int DEGREE> static __device__ __forceinline__ float polynomial(const float (&c)[DEGREE + 1], float x)
{
  float sum = c[DEGREE];
#pragma unroll
  for (int i = DEGREE - 1; i >= 0; i--)
    sum = fmaf(sum, x, c[i]);
  return sum;
}

/* smooth() of epilogue.cuh: max(x, 0) - t * tail(t) with t = |x|. NaN stays NaN by the first term. */
static __device__ __forceinline__ float gelu(float x)
{
  constexpr float p[] = {0.49999999995530976638f,  0.508395306745190167f,    0.25133751568319926738f,
                         0.071633627863950939215f, 0.011716735951844875138f, 0.00089721355011788267803f};
  constexpr float q[] = {1.0f,
                         1.8146751657630647163f,
                         1.4505764598126517899f,
                         0.65928297064587929435f,
                         0.18181320962682220405f,
                         0.029369325044528575947f,
                         0.0022489834420874904552f};
  const float t = magnitude(x, 15.0f), e = exp2_of(t * t * (float)(-0.5 * LOG2_E));
  return rectify(x) - t * e * (polynomial<5>(p, t) * reciprocal(polynomial<6>(q, t)));
}

/*
 * The same with the tail e / (e + 1), four values at once: they share a reciprocal, that of the product of their e + 1,
 * which lie between 1 and 2. MUFU, which takes 8 cycles for a warp, then has 1.25 instructions a value instead of 2;
 * with the others they are 9.5 instead of 8. A NaN does not reach its neighbours.
 */
template <esmm_activation ACTIVATION> static __device__ __forceinline__ void logistic(float *x)
{
  static_assert(ACTIVATION == ESMM_ACT_SILU || ACTIVATION == ESMM_ACT_GELU_TANH, "another tail");
  constexpr float cube = (float)(-0.071354816272600248776 * LOG2_E), slope = (float)(-1.5957691216057307118 * LOG2_E);
  float above[4], over[4]; /* t * e, e + 1 */
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool silu = ACTIVATION == ESMM_ACT_SILU;
    const float t = magnitude(x[i], silu ? 120.0f : 12.0f);
    const float e = exp2_of(t * (silu ? (float)-LOG2_E : fmaf(t * t, cube, slope)));
    above[i] = t * e;
    over[i] = e + 1.0f;
  }
  const float front = over[0] * over[1], back = over[2] * over[3], all = reciprocal(front * back);
  const float both[2] = {all * back, all * front}; /* 1 / front, 1 / back */
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = rectify(x[i]) - above[i] * (both[i / 2] * over[i ^ 1]);
}

/* Any activation: the choice is made once, outside the loops. */
static __device__ __forceinline__ void follow(int32_t activation, float (&x)[PANEL_SUMS])
{
  switch ((esmm_activation)activation) {
  case ESMM_ACT_NONE:
  case ESMM_ACT_RELU:
  case ESMM_ACT_RELU2:
    activate(activation, x);
    return;
  case ESMM_ACT_GELU:
#pragma unroll
    for (int i = 0; i < PANEL_SUMS; i++)
      x[i] = gelu(x[i]);
    return;
  case ESMM_ACT_GELU_TANH:
#pragma unroll
    for (int i = 0; i < PANEL_SUMS; i += 4)
      logistic<ESMM_ACT_GELU_TANH>(&x[i]);
    return;
  case ESMM_ACT_SILU:
#pragma unroll
    for (int i = 0; i < PANEL_SUMS; i += 4)
      logistic<ESMM_ACT_SILU>(&x[i]);
    return;
  }
  __builtin_unreachable();
}

/* ---- bias, residual ---- */

/* bias: that of the thread's first value, aligned to 8 bytes, or NULL. */
template <int COUNT> static __device__ __forceinline__ void add_row(const float *bias, float (&x)[COUNT])
{
  if (!bias)
    return;
  const float2 *pairs = (const float2 *)bias;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) { /* 8 columns further on */
    const float2 b = pairs[i];
    x[i] = __fadd_rn(x[i], b.x);
    x[i + 1] = __fadd_rn(x[i + 1], b.y);
    x[i + 2] = __fadd_rn(x[i + 2], b.x);
    x[i + 3] = __fadd_rn(x[i + 3], b.y);
  }
}

/*
 * The residual is 16-bit and row-major, its pairs of columns aligned to 4 bytes. All are on their way at once. It may
 * be C: a thread reads what its own warpgroup writes, later. row, col: of the thread's first value; rows past C are not
 * read.
 */
static __device__ __forceinline__ void add_residual(const esmm_epilogue_params &e, float (&x)[PANEL_SUMS], int row,
                                                    int col)
{
  if (!e.residual.data)
    return;
  const uint32_t *from = (const uint32_t *)((const uint16_t *)e.residual.data + row * e.residual.ld + col);
  const int64_t below = 4 * e.residual.ld; /* 8 rows of pairs */
  const bool upper = row < e.c.rows, lower = row + 8 < e.c.rows;
  uint32_t pair[PANEL_SUMS / 2];
#pragma unroll
  for (int i = 0; i < PANEL_SUMS / 2; i += 2) {
    pair[i] = upper ? from[2 * i] : 0;
    pair[i + 1] = lower ? from[below + 2 * i] : 0;
  }
  if (e.residual.dtype == ESMM_BF16) {
#pragma unroll
    for (int i = 0; i < PANEL_SUMS / 2; i++) {
      x[2 * i] = __fadd_rn(x[2 * i], __uint_as_float(pair[i] << 16));
      x[2 * i + 1] = __fadd_rn(x[2 * i + 1], __uint_as_float(pair[i] & 0xffff0000u));
    }
  } else { /* ESMM_F16 */
#pragma unroll
    for (int i = 0; i < PANEL_SUMS / 2; i++) {
      const float2 y = __half22float2(*(const __half2 *)&pair[i]);
      x[2 * i] = __fadd_rn(x[2 * i], y.x);
      x[2 * i + 1] = __fadd_rn(x[2 * i + 1], y.y);
    }
  }
}

/* ---- all of it ---- */

/* The bias from `column` on; NULL for none. */
static __device__ __forceinline__ const float *bias_from(const float *bias, int column)
{
  return bias ? bias + column : nullptr;
}

/* All that may follow sums where c_boxes is set. row, col: of the thread's first value; bias: its, or NULL. */
static __device__ __forceinline__ void finish_panel(const esmm_epilogue_params &e, float (&x)[PANEL_SUMS], int row,
                                                    int col, const float *bias)
{
  scale(e, x);
  add_row(bias, x);
  follow(e.activation, x);
  add_residual(e, x, row, col);
}

/* The same with a gate; gate: its sums. The epilogue's own activation is none. */
static __device__ __forceinline__ void finish_gated(const esmm_wgmma16_params &p, float (&gate)[PANEL_SUMS],
                                                    float (&x)[PANEL_SUMS], int row, int col, const float *gate_bias,
                                                    const float *bias)
{
  scale(p.epilogue, gate);
  add_row(gate_bias, gate);
  follow(p.gate_activation, gate);
  scale(p.epilogue, x);
  add_row(bias, x);
#pragma unroll
  for (int i = 0; i < PANEL_SUMS; i++)
    x[i] = __fmul_rn(gate[i], x[i]);
  add_residual(p.epilogue, x, row, col);
}

#endif
