/* tune.c: the products that a GPU's kernels are measured on, and how: whole calls, by the GPU's own clock. */
#include "cuda/cuda.h"

#include <math.h>

#define BATCH 2e-3 /* seconds of calls that are timed together, about */

#define DENSE_B               \
  {                           \
    .kind = ESMM_FORMAT_DENSE \
  }

/*
 * Waves of tiles, joint k's, extraction of A, long k, few rows and fixed costs in turn. Those with
 * one B follow each other: it is made once.
 */
const esmm_trial esmm_cuda_trials[] = {
    {256, 256, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {2048, 2048, 2048, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B, ESMM_F32},
    {1024, 16384, 1024, ESMM_GEN_BLOCKWISE, .5, 1, DENSE_B, ESMM_F32},
    {1024, 16384, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {16, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B, ESMM_F32},
    {128, 4096, 4096, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_DENSE, 1, .25, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, .25, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B, ESMM_F32},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B, ESMM_F32},
    {.m = 0},
};
_Static_assert(sizeof esmm_cuda_trials / sizeof esmm_cuda_trials[0] <= ESMM_MOST_TRIALS + 1, "raise ESMM_MOST_TRIALS");

/* Seconds of `calls` calls in a row, on the device. */
static esmm_status time_calls(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *x, esmm_timer *timer,
                              int calls, double *seconds)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = kernel->name};
  esmm_matrix c = x->c;
  esmm_status status = esmm_timer_start(timer);
  for (int i = 0; status == ESMM_OK && i < calls; i++)
    status = esmm_matmul(ctx, &x->a[0], x->w, &c, &opts, NULL);
  if (status == ESMM_OK)
    status = esmm_timer_stop(timer);
  return status == ESMM_OK ? esmm_timer_seconds(timer, seconds) : status;
}

/* The best of some batches: what a call costs in a row of its like, with the launches of the next already under way. */
esmm_status esmm_cuda_tune_measure(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *x, esmm_problem *p,
                                   double *seconds)
{
  (void)p; /* whole calls are timed */
  enum { BATCHES = 6 };
  esmm_timer *timer;
  esmm_status status = esmm_timer_create(ctx, &timer);
  if (status != ESMM_OK)
    return status;
  double took = 0.0;
  int calls = 2; /* the first batch loads the kernel and grows the scratch, the second says how many calls to take */
  for (int i = 0; status == ESMM_OK && i < BATCHES + 2; i++) {
    status = time_calls(ctx, kernel, x, timer, calls, &took);
    const double each = took / calls;
    *seconds = i <= 2 || each < *seconds ? each : *seconds;
    if (i == 1)
      calls = (int)fmin(fmax(BATCH / each, 2.0), 64.0);
  }
  esmm_timer_free(timer);
  return status;
}

esmm_status esmm_cuda_tune_sample(esmm_ctx *ctx, esmm_problem *p)
{
  esmm_choice choices[ESMM_MAX_KERNELS];
  int chosen;
  return esmm_cuda_explain(ctx, p, NULL, choices, &chosen);
}
