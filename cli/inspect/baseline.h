/*
 * baseline.h: the time of this device's dense library for a product, with which predictions are compared.
 */
#ifndef ESMM_CLI_BASELINE_H
#define ESMM_CLI_BASELINE_H

#include "cli.h"

typedef struct dense_baseline {
  char name[192];      /* for people: the library, and where its speed was measured */
  double flops, bytes; /* a second, of products and of weights; 0: the plan's own estimate of a dense kernel stands */
} dense_baseline;

/* Measures where the plan's constants are of this machine too: both must be of one machine to be compared. */
void dense_baseline_find(const esmm_ctx *ctx, dense_baseline *out);
/* The time of C [m,n] = A [m,k] x B [k,n]; verdicts: the plan's answer for the same shape. NAN: not known. */
double dense_baseline_seconds(const dense_baseline *baseline, int64_t m, int64_t k, int64_t n,
                              const esmm_verdict *verdicts, int count);

#endif
