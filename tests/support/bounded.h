/*
 * bounded.h: numbers in float64 with a bound on how far fp32 may be from them, through sums, products and activations.
 */
#ifndef ESMM_TEST_BOUNDED_H
#define ESMM_TEST_BOUNDED_H

#include "harness.h"

#include <math.h>

static const double UNIT = 0x1p-24;

/* ---- the activations in float64, and the largest slope on the way from x - e to x + e ---- */

static double activate(esmm_activation activation, double x)
{
  const double positive = x < 0 ? 0 : x;
  if (activation == ESMM_ACT_RELU)
    return positive;
  if (activation == ESMM_ACT_RELU2)
    return positive * positive;
  if (activation == ESMM_ACT_GELU)
    return x / 2 * erfc(-x / sqrt(2));
  if (activation == ESMM_ACT_GELU_TANH) {
    const double u = sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    return x / (1 + exp(-2 * u));
  }
  return activation == ESMM_ACT_SILU ? x / (1 + exp(-x)) : x;
}

static double slope(esmm_activation activation, double x, double e)
{
  return activation == ESMM_ACT_RELU2 ? 2 * (fabs(x) + e) : activation >= ESMM_ACT_GELU ? 1.13 : 1;
}

/* ---- a number with a bound on its error ---- */

typedef struct number {
  double is, error;
} number;

static number rounded(number x) /* to fp32 */
{
  return (number){x.is, x.error + UNIT * (fabs(x.is) + x.error) + 0x1p-149};
}

static number plus(number x, double y)
{
  return rounded((number){x.is + y, x.error});
}

static number times(number x, number y)
{
  return rounded((number){x.is * y.is, fabs(x.is) * y.error + fabs(y.is) * x.error + x.error * y.error});
}

static number activated(esmm_activation activation, number x)
{
  if (activation == ESMM_ACT_NONE)
    return x;
  number y = {activate(activation, x.is), slope(activation, x.is, x.error) * x.error};
  y = rounded(rounded(y)); /* two ulp, whatever is promised beyond */
  return y;
}

#endif
