/*
 * epilogue.cuh: what happens to a finished sum before it is stored. One definition for every kernel that writes C, as
 * epilogue.h is on a CPU:
 *
 *     C = activation(alpha * sum + beta * C + bias) * factor + residual
 *
 * alpha * sum, beta * C, each addition and the factor round, nothing is contracted to a fused multiply-add: a GPU gives
 * the bits that a CPU gives for the same sum, but for the sign of a zero.
 *
 *   finish_element   a sum, any C
 *   begin_line, end_line  a few sums of a row or column, any C: all loads at once; the activation is the caller's,
 *                    between them
 *   finish_8         eight columns of a row: C is read and written in vectors
 *   finish_values    a thread's sums in registers, for kernels that store them their own way; C is not read,
 *                    and there is nothing of ESMM_EXTRA_VALUES
 *   store_plain      sums of an fp32 C that nothing follows (is_plain)
 *
 * A kernel with room for it notes C's counts and bits itself; else tally.cu does, from C.
 *
 * Registers cannot be indexed, so every step is unrolled over all of a thread's sums, and code that is not in the cache
 * costs more than its work. Hence the steps of finish_values are separate loops, each behind a test that is the same
 * for all threads: a plain product skips them all.
 */
#ifndef ESMM_CUDA_EPILOGUE_CUH
#define ESMM_CUDA_EPILOGUE_CUH

#include "cuda/kernels/common/device.cuh"

/* ---- activations ---- */

/* max(x, 0) in one instruction. NaN stays NaN; a zero's sign is not kept. */
static __device__ __forceinline__ float rectify(float x)
{
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

/*
 * NONE, RELU and RELU2. Each of the two is tested by name, without a branch: this code is unrolled over all elements.
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

/* ---- GELU, its tanh form and SiLU: in float64, as activate.h of a CPU does it ---- */

static __device__ __forceinline__ bool is_smooth(int32_t activation)
{
  return activation > ESMM_ACT_RELU2;
}

/* c[0] + c[1] x + ... + c[DEGREE] x^DEGREE */
template <int DEGREE> static __device__ __forceinline__ double polynomial(const double (&c)[DEGREE + 1], double x)
{
  double sum = c[DEGREE];
#pragma unroll
  for (int i = DEGREE - 1; i >= 0; i--)
    sum = fma(sum, x, c[i]);
  return sum;
}

/* e^x for -700 < x <= 0, to 2^-34. e^x = 2^n e^r with |r| <= log(2) / 2; the polynomial is e^r's Chebyshev fit. */
static __device__ __forceinline__ double exp_of(double x)
{
  constexpr double c[] = {0.99999999995952936721,   0.99999999999550544455,  0.50000001077938755746,
                          0.16666666786380440774,   0.041666218139710591813, 0.0083332835187681052638,
                          0.0013948590286863382483, 0.0001990758259132513265};
  const double shift = 0x1.8p52; /* added, it leaves the nearest whole number in the low bits */
  const double shifted = fma(x, 1.4426950408889634074, shift);
  const double r = fma(__dsub_rn(shift, shifted), 0.69314718055994530942, x);
  return __longlong_as_double(__double_as_longlong(polynomial<7>(c, r)) +
                              (long long)((unsigned long long)__double_as_longlong(shifted) << 52));
}

/* The upper tail of the normal distribution, erfc(t / sqrt 2) / 2, over e^(-t^2 / 2): to 2^-33 for t up to 15. */
static __device__ __forceinline__ double mills(double t)
{
  constexpr double p[] = {0.49999999995530976638,  0.508395306745190167,    0.25133751568319926738,
                          0.071633627863950939215, 0.011716735951844875138, 0.00089721355011788267803};
  constexpr double q[] = {1.0,
                          1.8146751657630647163,
                          1.4505764598126517899,
                          0.65928297064587929435,
                          0.18181320962682220405,
                          0.029369325044528575947,
                          0.0022489834420874904552};
  return polynomial<5>(p, t) / polynomial<6>(q, t);
}

/*
 * max(x, 0) - t * tail(t) with t = |x|, cut off where the result has long been x or 0. NaN stays NaN. A call: inside a
 * loop the compiler would keep all coefficients in registers, which kernels with many sums do not have.
 */
static __device__ __noinline__ float smooth(int32_t activation, float x)
{
  const float most = activation == ESMM_ACT_GELU ? 15.0f : activation == ESMM_ACT_GELU_TANH ? 12.0f : 120.0f;
  const double t = (double)(fabsf(x) > most ? most : fabsf(x));
  double lost;
  if (activation == ESMM_ACT_GELU) {
    lost = t * exp_of(t * t * -0.5) * mills(t);
  } else { /* (1 + tanh u) / 2 = 1 / (1 + e^(-2u)) */
    const double e =
        exp_of(activation == ESMM_ACT_SILU ? -t : t * fma(t * t, -0.071354816272600248776, -1.5957691216057307118));
    lost = t * e / (e + 1.0);
  }
  return (float)((double)rectify(x) - lost);
}

/* ---- any C ---- */

/* ESMM_EXTRA_VALUES, for a sum with its bias. A call: many sums end in finish_element, and few need this. */
static __device__ __noinline__ float finish_extra(const esmm_epilogue_params &e, int64_t row, int64_t col, float x)
{
  x = is_smooth(e.activation) ? smooth(e.activation, x) : activate(e.activation, x);
  if (e.factor)
    x = __fmul_rn(x, ((const float *)e.factor)[row * e.factor_ld + col]);
  if (e.residual.data)
    x = __fadd_rn(x, load_element(e.residual, element_at(e.residual, row, col)));
  return x;
}

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
  x = e.extra & ESMM_EXTRA_VALUES ? finish_extra(e, row, col, x) : activate(e.activation, x);
  store_element(e.c, at, x);
}

/* ---- sums in registers ---- */

/* How a thread's values lie: side by side in a row; as mma and wgmma leave their sums, in tiles of 8 columns, of which
   a thread has two columns in two rows; or as wgmma leaves those of C transposed: a thread has two columns, 8 apart,
   and of each two rows in turn. */
struct in_a_row {};
struct in_fragments {};
struct in_columns {};

template <int COUNT> static __device__ __forceinline__ void scale(const esmm_epilogue_params &e, float (&x)[COUNT])
{
  if (e.alpha != 1.0f)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fmul_rn(e.alpha, x[i]);
}

/* col: of the thread's first value. */
template <int COUNT>
static __device__ __forceinline__ void add_bias(in_a_row, const esmm_epilogue_params &e, float (&x)[COUNT], int64_t col)
{
  if (e.bias) {
    const float *bias = (const float *)e.bias + col;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fadd_rn(x[i], bias[i]);
  }
}

/* The same; col is even, and the bias aligned to 8 bytes, or else something of ESMM_EXTRA_VALUES. */
template <int COUNT>
static __device__ __forceinline__ void add_bias(in_fragments, const esmm_epilogue_params &e, float (&x)[COUNT],
                                                int64_t col)
{
  if (e.bias) {
    const float2 *bias = (const float2 *)((const float *)e.bias + col);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) { /* 8 columns further on */
      const float2 b = bias[i];
      x[i] = __fadd_rn(x[i], b.x);
      x[i + 1] = __fadd_rn(x[i + 1], b.y);
      x[i + 2] = __fadd_rn(x[i + 2], b.x);
      x[i + 3] = __fadd_rn(x[i + 3], b.y);
    }
  }
}

template <int COUNT>
static __device__ __forceinline__ void add_bias(in_columns, const esmm_epilogue_params &e, float (&x)[COUNT],
                                                int64_t col)
{
  if (e.bias) {
    const float first = ((const float *)e.bias)[col], second = ((const float *)e.bias)[col + 8];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fadd_rn(x[i], i / 2 % 2 ? second : first);
  }
}

/* All that follows the sums where beta is 0 and nothing is of ESMM_EXTRA_VALUES; the caller stores them. All columns
   lie inside C, rows need not. */
template <class PLACES, int COUNT>
static __device__ __forceinline__ void finish_values(const esmm_epilogue_params &e, float (&x)[COUNT], int64_t col)
{
  scale(e, x);
  add_bias(PLACES(), e, x, col);
  activate(e.activation, x);
}

/* ---- a few elements of a line ---- */

/* COUNT elements of a row or of a column, row_step or col_step apart, from (row, col) on. Some may lie outside C. */
struct line_of_c {
  int64_t row, col;
  int row_step, col_step;
};

template <int COUNT>
static __device__ __forceinline__ uint32_t inside_bits(const esmm_epilogue_params &e, const line_of_c &l)
{
  uint32_t inside = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    inside |= (uint32_t)(l.row + i * l.row_step < e.c.rows && l.col + i * l.col_step < e.c.cols) << i;
  return inside;
}

static __device__ __forceinline__ int64_t step_in(const esmm_device_matrix &m, const line_of_c &l)
{
  return m.order == ESMM_ROW_MAJOR ? l.row_step * m.ld + l.col_step : l.col_step * m.ld + l.row_step;
}

/* Those of a matrix of C's shape, all loads at once; 0 for those outside. */
template <int COUNT>
static __device__ __forceinline__ void load_line(const esmm_device_matrix &m, const line_of_c &l, uint32_t inside,
                                                 float (&y)[COUNT])
{
  const int64_t at = element_at(m, l.row, l.col), step = step_in(m, l);
  with_dtype(m.dtype, [&](auto of) {
    const auto *from = (const typename decltype(of)::element *)m.data + at;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      y[i] = inside >> i & 1 ? as_float(from[i * step]) : 0.0f;
  });
}

/* From the sums to what the activation takes. */
template <int COUNT>
static __device__ __forceinline__ void begin_line(const esmm_epilogue_params &e, const line_of_c &l, float (&x)[COUNT])
{
  const uint32_t inside = inside_bits<COUNT>(e, l);
  scale(e, x);
  if (e.beta != 0.0f) {
    float y[COUNT];
    load_line(e.c, l, inside, y);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fadd_rn(x[i], __fmul_rn(e.beta, y[i]));
  }
  if (e.bias)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (inside >> i & 1)
        x[i] = __fadd_rn(x[i], ((const float *)e.bias)[l.col + i * l.col_step]);
}

/* From the activation to C. All loads come before the first store: a residual may be C itself. Bit i of the result: the
   i-th stored value is not zero. */
template <int COUNT>
static __device__ __forceinline__ uint32_t end_line(const esmm_epilogue_params &e, const line_of_c &l,
                                                    float (&x)[COUNT])
{
  const uint32_t inside = inside_bits<COUNT>(e, l);
  float y[COUNT];
  uint32_t nonzeros = 0;
  if (e.factor) {
    const esmm_device_matrix factor = {e.factor, e.c.rows, e.c.cols, e.factor_ld, ESMM_F32, ESMM_ROW_MAJOR};
    load_line(factor, l, inside, y);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fmul_rn(x[i], y[i]);
  }
  if (e.residual.data) {
    load_line(e.residual, l, inside, y);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      x[i] = __fadd_rn(x[i], y[i]);
  }
  const int64_t at = element_at(e.c, l.row, l.col), step = step_in(e.c, l);
  with_dtype(e.c.dtype, [&](auto of) {
    auto *to = (typename decltype(of)::element *)e.c.data + at;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (inside >> i & 1) {
        const auto value = rounded(of, x[i]);
        nonzeros |= (uint32_t)(as_float(value) != 0.0f) << i;
        to[i * step] = value;
      }
  });
  return nonzeros;
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

/* ESMM_EXTRA_VALUES for those eight, with their bias. */
static __device__ __forceinline__ void finish_extra_8(const esmm_epilogue_params &e, int64_t row, int64_t col,
                                                      float (&x)[8])
{
  float y[8];
  if (is_smooth(e.activation))
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = smooth(e.activation, x[i]);
  else
    activate(e.activation, x);
  if (e.factor) {
    read_8(dtype_of<ESMM_F32>(), e.factor, row * e.factor_ld + col, y);
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = __fmul_rn(x[i], y[i]);
  }
  if (!e.residual.data)
    return;
  const int64_t at = element_at(e.residual, row, col), step = e.residual.order == ESMM_ROW_MAJOR ? 1 : e.residual.ld;
  const bool vectors = has_vectors(e.residual);
  with_dtype(e.residual.dtype, [&](auto of) {
    if (vectors) {
      read_8(of, e.residual.data, at, y);
      return;
    }
    const auto *from = (const typename decltype(of)::element *)e.residual.data + at;
#pragma unroll
    for (int i = 0; i < 8; i++)
      y[i] = as_float(from[i * step]);
  });
#pragma unroll
  for (int i = 0; i < 8; i++)
    x[i] = __fadd_rn(x[i], y[i]);
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
  add_bias(in_a_row(), e, x, col);
  if (e.extra & ESMM_EXTRA_VALUES)
    finish_extra_8(e, row, col, x);
  else
    activate(e.activation, x);
  with_dtype(e.c.dtype, [&](auto of) { write_8(of, e.c.data, at, x); });
}

/* ---- nothing follows the sum ---- */

/* Sums may be stored as they are: fp32, row-major, alpha 1, beta 0, no bias, no activation; COUNT side by side from a
   column that is a multiple of COUNT. */
template <int COUNT> static __device__ __forceinline__ bool is_plain(const esmm_epilogue_params &e)
{
  return e.c.dtype == ESMM_F32 && e.c.order == ESMM_ROW_MAJOR && e.alpha == 1.0f && e.beta == 0.0f && e.bias == 0 &&
         e.activation == ESMM_ACT_NONE && e.extra == 0 && e.c.ld % COUNT == 0 && e.c.data % (4 * COUNT) == 0;
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
