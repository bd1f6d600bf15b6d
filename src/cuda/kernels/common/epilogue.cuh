/*
 * epilogue.cuh: what happens to a finished sum before it is stored. One definition for every kernel that writes C, as
 * epilogue.h is on a CPU:
 *
 *     C = activation(alpha * sum + beta * C + bias)
 *
 * alpha * sum, beta * C and each addition round, nothing is contracted to a fused multiply-add: a GPU gives the bits
 * that a CPU gives for the same sum.
 *
 *   finish_element   a sum, any C
 *   finish_values    a thread's sums in registers, for kernels that store them in a way of their own; C is not read
 *   finish_8         eight columns of a row: C is read and written in vectors
 *   store_plain      sums of an fp32 C that nothing follows (is_plain)
 *
 * Registers can only be named, not counted through, so what is done to all of a thread's sums stands in the code once
 * for each, and code that is not in the cache costs more than what it does. Hence the steps of finish_values are loops
 * of their own, each behind a test that is the same for all threads: a plain product passes over all of them.
 */
#ifndef ESMM_CUDA_EPILOGUE_CUH
#define ESMM_CUDA_EPILOGUE_CUH

#include "cuda/kernels/common/device.cuh"

/* ---- activations ---- */

/* NaN stays NaN, and -0 stays -0. */
static __device__ __forceinline__ float rectify(float x)
{
  return x < 0.0f ? 0.0f : x;
}

/*
 * A GPU has NONE, RELU and RELU2; the host refuses GELU, GELU_TANH and SILU. Each of the two is asked for by its name,
 * and without a branch: this stands in the code once for each element.
 */
static __device__ __forceinline__ float activate(int32_t activation, float x)
{
  const float positive = rectify(x);
  x = activation == ESMM_ACT_RELU ? positive : x;
  return activation == ESMM_ACT_RELU2 ? positive * positive : x;
}

/* The same for all of an array: the choice is made once, outside the loops. */
template <int COUNT> static __device__ __forceinline__ void activate(int32_t activation, float (&x)[COUNT])
{
  switch ((esmm_activation)activation) {
  case ESMM_ACT_NONE:
    return;
  case ESMM_ACT_RELU:
  case ESMM_ACT_RELU2: /* the first loop is both's, and so it is there once */
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = rectify(x[i]);
    if (activation == ESMM_ACT_RELU2)
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        x[i] *= x[i];
    return;
  case ESMM_ACT_GELU:
  case ESMM_ACT_GELU_TANH:
  case ESMM_ACT_SILU:
    break;
  }
  __builtin_unreachable();
}

/* ---- any C ---- */

/* One element of C; row and col lie inside it. */
static __device__ __forceinline__ void finish_element(const esmm_epilogue_params &e, int64_t row, int64_t col,
                                                      float sum)
{
  const int64_t at = element_at(e.c, row, col);
  float x = __fmul_rn(e.alpha, sum);
  if (e.beta != 0.0f)
    x = __fadd_rn(x, __fmul_rn(e.beta, load_element(e.c, at)));
  if (e.bias)
    x = __fadd_rn(x, ((const float *)e.bias)[col]);
  x = activate(e.activation, x);
  /* Here: times the gate's factor at (row, col); then plus the residual there. */
  store_element(e.c, at, x);
  /* Here: what was stored goes to the column's count and to the bitmap of its strip of C. */
}

/* ---- sums in registers ---- */

/* In which column, counted from a thread's first, its i-th value lies. */
struct in_a_row {
  static __device__ __forceinline__ constexpr int column(int i) { return i; }
};
/* Tiles of 8 columns, of which a thread has two columns in two rows: as mma and wgmma leave their sums. */
struct in_fragments {
  static __device__ __forceinline__ constexpr int column(int i) { return i / 4 * 8 + i % 2; }
};

template <int COUNT> static __device__ __forceinline__ void scale(const esmm_epilogue_params &e, float (&x)[COUNT])
{
  if (e.alpha != 1.0f)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fmul_rn(e.alpha, x[i]);
}

/* col: of the thread's first value. */
template <class PLACES, int COUNT>
static __device__ __forceinline__ void add_bias(const esmm_epilogue_params &e, float (&x)[COUNT], int64_t col)
{
  if (e.bias) {
    const float *bias = (const float *)e.bias + col;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fadd_rn(x[i], bias[PLACES::column(i)]);
  }
}

/* All that follows the sums where beta is 0; the caller stores them. All columns lie inside C, rows need not. */
template <class PLACES, int COUNT>
static __device__ __forceinline__ void finish_values(const esmm_epilogue_params &e, float (&x)[COUNT], int64_t col)
{
  scale(e, x);
  add_bias<PLACES>(e, x, col);
  activate(e.activation, x);
  /* Here: times the gate's factors, then plus the residual. Both need the row, and the caller's rows may lie past C. */
  /* Column counts and bitmaps are of what is stored: the caller's dtype is not applied yet. */
}

/* ---- eight columns of a row ---- */

/* Lines of C begin at multiples of 16 bytes, so that eight elements are one or two vectors. */
static __device__ __forceinline__ bool has_vectors(const esmm_device_matrix &c)
{
  return c.order == ESMM_ROW_MAJOR && c.data % 16 == 0 && c.ld * dtype_bytes(c.dtype) % 16 == 0;
}

template <class OF> static __device__ __forceinline__ void read_8(OF, uint64_t data, int64_t at, float (&x)[8])
{
  enum { VECTORS = 8 * sizeof(typename OF::element) / 16 };
  const uint4 *from = (const uint4 *)((const typename OF::element *)data + at);
  uint4 vectors[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    vectors[i] = from[i];
#pragma unroll
  for (int i = 0; i < 8; i++)
    x[i] = as_float(((const typename OF::element *)vectors)[i]);
}

static __device__ __forceinline__ void write_8(dtype_of<ESMM_F32>, uint64_t data, int64_t at, const float (&x)[8])
{
  float4 *to = (float4 *)((float *)data + at);
  to[0] = make_float4(x[0], x[1], x[2], x[3]);
  to[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void write_8(dtype_of<DTYPE>, uint64_t data, int64_t at, const float (&x)[8])
{
  *(uint4 *)((uint16_t *)data + at) = make_uint4(pair_of<DTYPE>(x[0], x[1]), pair_of<DTYPE>(x[2], x[3]),
                                                 pair_of<DTYPE>(x[4], x[5]), pair_of<DTYPE>(x[6], x[7]));
}

/* Columns col to col + 7 of a row, all inside C, which has_vectors; col is a multiple of 8. */
static __device__ __forceinline__ void finish_8(const esmm_epilogue_params &e, int64_t row, int64_t col, float (&x)[8])
{
  const int64_t at = row * e.c.ld + col;
  scale(e, x);
  if (e.beta != 0.0f) {
    float before[8];
    with_dtype(e.c.dtype, [&](auto of) { read_8(of, e.c.data, at, before); });
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = __fadd_rn(x[i], __fmul_rn(e.beta, before[i]));
  }
  add_bias<in_a_row>(e, x, col);
  activate(e.activation, x);
  /* Here: times the gate's factors of these columns; then plus the residual. */
  with_dtype(e.c.dtype, [&](auto of) { write_8(of, e.c.data, at, x); });
  /* Here: what was stored goes to the columns' counts and to the bitmap of its strip of C. */
}

/* ---- nothing follows the sum ---- */

/* Sums may be stored as they are: fp32, row-major, alpha 1, beta 0, no bias, no activation; COUNT side by side from a
   column that is a multiple of COUNT. Here: and no gate, no residual, nothing to note of C. */
template <int COUNT> static __device__ __forceinline__ bool is_plain(const esmm_epilogue_params &e)
{
  return e.c.dtype == ESMM_F32 && e.c.order == ESMM_ROW_MAJOR && e.alpha == 1.0f && e.beta == 0.0f && e.bias == 0 &&
         e.activation == ESMM_ACT_NONE && e.c.ld % COUNT == 0 && e.c.data % (4 * COUNT) == 0;
}

static __device__ __forceinline__ void store_plain(const esmm_epilogue_params &e, int64_t row, int64_t col,
                                                   const float (&x)[2])
{
  *(float2 *)((float *)e.c.data + row * e.c.ld + col) = make_float2(x[0], x[1]);
}

static __device__ __forceinline__ void store_plain(const esmm_epilogue_params &e, int64_t row, int64_t col,
                                                   const float (&x)[4])
{
  *(float4 *)((float *)e.c.data + row * e.c.ld + col) = make_float4(x[0], x[1], x[2], x[3]);
}

#endif
