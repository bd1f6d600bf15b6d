/*
 * verdict.h: reading esmm_explain's answer, the same way in each command that shows a predicted speedup.
 */
#ifndef ESMM_CLI_VERDICT_H
#define ESMM_CLI_VERDICT_H

#include "esmm.h"

#include <math.h>
#include <stdbool.h>

/* The cheapest among kernels that skip nothing: what the others have to beat. NULL when none can run. */
static inline const esmm_verdict *verdict_dense(const esmm_verdict *verdicts, int count)
{
  const esmm_verdict *best = NULL;
  for (int i = 0; i < count; i++) {
    const esmm_verdict *v = &verdicts[i];
    const bool dense = v->seconds > 0 && !(v->flags & (ESMM_KERNEL_SKIPS | ESMM_KERNEL_REFERENCE));
    if (dense && (!best || v->seconds < best->seconds))
      best = v;
  }
  return best;
}

static inline double verdict_dense_seconds(const esmm_verdict *verdicts, int count)
{
  const esmm_verdict *dense = verdict_dense(verdicts, count);
  return dense ? dense->seconds : NAN;
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
