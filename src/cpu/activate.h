/*
 * activate.h: the activations, on a vector of fp32; included after a vec_*.h.
 *
 * GELU and SiLU are worked out in float64 and rounded once. With t = |x| all three are
 *
 *     max(x, 0) - t * tail(t),      tail(t) <= 1/2 and falling: the share of x that is lost
 *
 * which needs no case for the sign and keeps all digits where x is negative and the result is small. t is cut off where
 * the result has long been x or 0 in fp32, so that exponents stay in range and -Inf gives 0.
 */
#ifndef ESMM_ACTIVATE_H
#define ESMM_ACTIVATE_H

#include "esmm.h"

typedef int64_t esmm_bits64 __attribute__((vector_size(sizeof(vec64))));

/* c[0] + c[1] x + ... + c[degree] x^degree */
static inline __attribute__((always_inline)) vec64 esmm_polynomial(const double *c, const int degree, vec64 x)
{
  vec64 sum = vec64_all(c[degree]);
#pragma GCC unroll 8
  for (int i = degree - 1; i >= 0; i--)
    sum = vec64_fma(sum, x, vec64_all(c[i]));
  return sum;
}

/* e^x for -700 < x <= 0, to 2^-34. e^x = 2^n e^r with |r| <= log(2) / 2; the polynomial is e^r's Chebyshev fit. */
static inline vec64 esmm_exp64(vec64 x)
{
  static const double c[] = {0.99999999995952936721,   0.99999999999550544455,  0.50000001077938755746,
                             0.16666666786380440774,   0.041666218139710591813, 0.0083332835187681052638,
                             0.0013948590286863382483, 0.0001990758259132513265};
  const vec64 shift = vec64_all(0x1.8p52); /* added, it leaves the nearest whole number in the low bits */
  const vec64 shifted = vec64_fma(x, vec64_all(1.4426950408889634074), shift);
  const vec64 r = vec64_fma(shift - shifted, vec64_all(0.69314718055994530942), x);
  return (vec64)((esmm_bits64)esmm_polynomial(c, 7, r) + ((esmm_bits64)shifted << 52)); /* adds n to the exponent */
}

/* The upper tail of the normal distribution, erfc(t / sqrt 2) / 2, over e^(-t^2 / 2): to 2^-33 for t up to 15. All
   coefficients are positive: nothing cancels. */
static inline vec64 esmm_mills64(vec64 t)
{
  static const double p[] = {0.49999999995530976638,  0.508395306745190167,    0.25133751568319926738,
                             0.071633627863950939215, 0.011716735951844875138, 0.00089721355011788267803};
  static const double q[] = {1.0,
                             1.8146751657630647163,
                             1.4505764598126517899,
                             0.65928297064587929435,
                             0.18181320962682220405,
                             0.029369325044528575947,
                             0.0022489834420874904552};
  return esmm_polynomial(p, 5, t) / esmm_polynomial(q, 6, t);
}

/* t * tail(t) */
static inline __attribute__((always_inline)) vec64 esmm_lost64(const esmm_activation activation, vec64 t)
{
  if (activation == ESMM_ACT_GELU)
    return t * esmm_exp64(t * t * vec64_all(-0.5)) * esmm_mills64(t);
  /* tanh's form is a logistic function too: (1 + tanh u) / 2 = 1 / (1 + e^(-2u)) */
  const vec64 minus_u2 = activation == ESMM_ACT_SILU ? vec64_all(0.0) - t
                                                     : t * vec64_fma(t * t, vec64_all(-0.071354816272600248776),
                                                                     vec64_all(-1.5957691216057307118));
  const vec64 e = esmm_exp64(minus_u2);
  return t * e / (e + vec64_all(1.0));
}

static inline __attribute__((always_inline)) vec esmm_smooth(const esmm_activation activation, vec x, float most)
{
  const vec t = vec_at_most(vec_abs(x), most), positive = vec_at_least(x, 0.0f);
  return vec_from_halves(vec64_low(positive) - esmm_lost64(activation, vec64_low(t)),
                         vec64_high(positive) - esmm_lost64(activation, vec64_high(t)));
}

/* Apart from the others, so that loops over those stay small. */
static __attribute__((noinline, unused)) vec esmm_activate_smooth(esmm_activation activation, vec x)
{
  return activation == ESMM_ACT_GELU        ? esmm_smooth(ESMM_ACT_GELU, x, 15.0f)
         : activation == ESMM_ACT_GELU_TANH ? esmm_smooth(ESMM_ACT_GELU_TANH, x, 12.0f)
                                            : esmm_smooth(ESMM_ACT_SILU, x, 120.0f);
}

static inline __attribute__((always_inline)) vec esmm_activate_vec(esmm_activation activation, vec x)
{
  if (activation == ESMM_ACT_NONE)
    return x;
  if (activation > ESMM_ACT_RELU2)
    return esmm_activate_smooth(activation, x);
  x = vec_at_least(x, 0.0f);
  return activation == ESMM_ACT_RELU2 ? vec_mul(x, x) : x;
}

#endif
