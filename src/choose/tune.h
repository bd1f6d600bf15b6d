/* tune.h: what a backend and tune.c share: the products that a kernel is measured on. */
#ifndef ESMM_TUNE_H
#define ESMM_TUNE_H

#include "backend.h"
#include "esmm_tools.h"

#define ESMM_MOST_TRIALS 80 /* of a backend, the end mark apart */
#define ESMM_TUNE_COPIES 8  /* of A when m is small: rows of B that the last run left in cache must not look cheap */

/* One product. A list of them ends with m = 0. */
typedef struct esmm_trial {
  int64_t m, k, n;
  esmm_generator_kind kind;
  double density_a, density_b; /* BSR: the share of blocks that B keeps; NM: 1 */
  esmm_format format;
  esmm_dtype dtype; /* of A, B and C. Kernels that take any dtype are measured in fp32 only */
} esmm_trial;

/* A trial's operands. B serves the next trial too if that has the same. */
typedef struct esmm_tune_job {
  const esmm_trial *of_b;
  esmm_matrix a[ESMM_TUNE_COPIES], b, c;
  int copies; /* of A, each with its own nonzeros */
  esmm_weights *w;
} esmm_tune_job;

/* Makes every directory of path's parent; existing ones are fine. -1: errno says why not. */
int esmm_tune_make_parents(const char *path);

#endif
