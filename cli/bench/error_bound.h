/*
 * error_bound.h: how far a right result may be from the exact one. `esmm bench`, `bench-weights` and `check` and the
 * tests' table of kernels all hold results to this; docs/numerics.md says where the numbers come from.
 *
 * Each element has a bound, which comes from its terms alone: their number, and the sum S of their magnitudes. It is
 * not relative to the result, which may be close to 0 where terms cancel, nor to another library's error on the same
 * data.
 */
#ifndef ESMM_CLI_ERROR_BOUND_H
#define ESMM_CLI_ERROR_BOUND_H

#include "esmm.h"

#include <math.h>
#include <stdbool.h>

#define ERROR_UNIT 0x1p-24 /* unit roundoff of fp32 */

/* How sums are made. */
typedef struct error_rule {
  esmm_dtype dtype_c;
  bool gpu;    /* a product by itself may be off by a few units: three TF32 ones for one of fp32 */
  bool halves; /* tensor cores add products of 16-bit operands there, and truncate */
  bool parts;  /* parts of a sum are rounded to dtype_c before they meet: cuBLAS, where it splits k */
} error_rule;

static inline double error_unit(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return ERROR_UNIT;
  case ESMM_BF16:
    return 0x1p-8;
  case ESMM_F16:
    return 0x1p-11;
  }
  return 0; /* no such dtype: nothing is forgiven */
}

static inline double error_largest(esmm_dtype dtype)
{
  return dtype == ESMM_BF16 ? 0x1.fep127 : dtype == ESMM_F16 ? 65504 : 0x1.fffffep127;
}

/*
 * How many units of S a sum may be off by. A term passes no more roundings than there are terms: up to there the bound
 * is strict. Beyond that chains are cut, or roundings point both ways. Cut off bits all point the same way, so
 * that a part of the errors of tensor cores grows with the number of terms.
 */
static inline double error_depth(const error_rule *rule, double terms)
{
  const double rounded = fmin(terms, 64 + 4 * sqrt(terms));
  const double cut = fmin(2 * terms, 128 + 8 * sqrt(terms) + terms / 4);
  return (rule->gpu && rule->halves ? cut : rounded) + (rule->gpu ? 20 : 4);
}

/* The same for a library that is not ours: fp32 additions in any order at all. */
static inline double error_any_depth(double terms)
{
  return 2 * terms + 20;
}

/* Of a sum of this depth whose magnitudes add up to `magnitude`, before C's dtype rounds it. */
static inline double error_of_sum(const error_rule *rule, double depth, double magnitude)
{
  const double parts = rule->parts && rule->dtype_c != ESMM_F32 ? 2 * error_unit(rule->dtype_c) : 0;
  return (depth * ERROR_UNIT + parts) * magnitude + depth * 0x1p-149;
}

/* With the one rounding to C's dtype; that to fp32 is among those of the sum. */
static inline double error_when_stored(const error_rule *rule, double error, double value)
{
  const double least = rule->dtype_c == ESMM_F16 ? 0x1p-25 : rule->dtype_c == ESMM_BF16 ? 0x1p-134 : 0;
  return rule->dtype_c == ESMM_F32 ? error : error + error_unit(rule->dtype_c) * (fabs(value) + error) + least;
}

/* The activation's error from an error in its argument, where its result is y. */
static inline double error_activated(esmm_activation activation, double error, double y)
{
  switch (activation) {
  case ESMM_ACT_NONE:
  case ESMM_ACT_RELU:
    break;
  case ESMM_ACT_RELU2: /* (x + e)^2 - x^2, x^2 = y */
    return 2 * sqrt(y) * error + error * error + 2 * ERROR_UNIT * y;
  case ESMM_ACT_GELU:
  case ESMM_ACT_GELU_TANH:
  case ESMM_ACT_SILU: /* no slope is above 1.13 */
    return 1.13 * error + 2 * ERROR_UNIT * y + 0x1p-149;
  }
  return error;
}

/* |got - want| as a share of the bound: right up to 1. Infinite where got is NaN, or Inf without a reason. */
static inline double error_share(const error_rule *rule, double got, double want, double allowed)
{
  const double error = fabs(got - want);
  if (error == 0)
    return 0;
  if (isinf(got) && (got > 0) == (want > 0) && fabs(want) + allowed >= error_largest(rule->dtype_c))
    return 0;
  return isfinite(error) && allowed > 0 ? error / allowed : INFINITY;
}

#endif
