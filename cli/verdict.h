/*
 * verdict.h: reading esmm_explain's answer, the same way in each command that shows a predicted speedup.
 */
#ifndef ESMM_CLI_VERDICT_H
#define ESMM_CLI_VERDICT_H

#include "esmm.h"

#include <math.h>
#include <stdbool.h>

/* The cheapest estimate among kernels that skip nothing: what the others have to beat. NAN when none can run. */
static inline double verdict_dense_seconds(const esmm_verdict *verdicts, int count)
{
  double best = NAN;
  for (int i = 0; i < count; i++) {
    const esmm_verdict *v = &verdicts[i];
    bool dense = v->seconds > 0 && !(v->flags & (ESMM_KERNEL_SKIPS | ESMM_KERNEL_REFERENCE));
    if (dense && !(v->seconds >= best))
      best = v->seconds;
  }
  return best;
}

/* The one the plan takes; NULL when there is nothing to multiply. */
static inline const esmm_verdict *verdict_chosen(const esmm_verdict *verdicts, int count)
{
  for (int i = 0; i < count; i++)
    if (verdicts[i].chosen)
      return &verdicts[i];
  return NULL;
}

#endif
