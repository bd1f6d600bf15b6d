/*
 * sample.c: the sample of A that the plan chooses by: densities at several strip heights, from a few blocks of 32
 * rows by 64 k's spread over the matrix. Reading them costs a percent or so of a product that is worth planning; where
 * that would cost more than it can save, the plan skips it (esmm_plan_outright). sample.h reads them.
 */
#include "cpu/costs.h"
#include "cpu/cpu.h"

#define GROUP ESMM_SAMPLE_ROWS

/* How many strips are looked at, and in how many places each. */
void esmm_sample_extent(const esmm_matrix *a, int64_t *groups, int64_t *spread)
{
  const int64_t strips = esmm_ceil_div(a->rows, GROUP), words = esmm_ceil_div(a->cols, 64);
  *groups = esmm_min(strips, esmm_max(4, esmm_min(12, strips / 4)));
  *spread = strips == 1 ? esmm_min(words, 64) : esmm_max(esmm_min(words, 2), esmm_min(5, words / 4));
}

double esmm_sample_seconds(const esmm_matrix *a)
{
  int64_t groups, spread;
  esmm_sample_extent(a, &groups, &spread);
  const double places = (double)(groups * spread);
  return places * (ESMM_CPU_COST_SAMPLE_PLACE + ESMM_CPU_COST_SAMPLE_ROW * (double)esmm_min(GROUP, a->rows));
}

void esmm_sample_a(const esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
#if !defined(ESMM_PORTABLE)
  if (ctx->cpu & ESMM_CPU_AVX512) {
    esmm_sample_avx512(a, w, sample);
    return;
  }
  if (ctx->cpu & ESMM_CPU_AVX2) {
    esmm_sample_avx2(a, w, sample);
    return;
  }
#else
  (void)ctx;
#endif
  esmm_sample_portable(a, w, sample);
}
