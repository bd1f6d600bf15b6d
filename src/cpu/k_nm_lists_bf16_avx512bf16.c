/*
 * k_nm_lists_bf16_avx512bf16.c: N:M weights of bf16 on AVX-512 BF16 of which 32 columns or more share their k's: these
 * are a list, and are joined with those of A's strips. See pairs.h. Columns that choose for themselves are multiplied
 * by k_nm_bf16_avx512bf16.c, others by nm.h.
 */
#include "vec_avx512.h"

#include "pairs.h"

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const int cols = p->w->nm.group_cols;
  if (shares_lists(p->w) && (cols >= p->n || cols % ESMM_PANEL == 0))
    return true;
  (void)snprintf(why, why_bytes, "%d columns choose together, it takes multiples of %d", cols, ESMM_PANEL);
  return false;
}

static void lists_units(const esmm_problem *p, int level, double *units)
{
  const double k = (double)p->k, panels = (double)esmm_ceil_div(p->n, ESMM_PANEL);
  const double strips = (double)esmm_ceil_div(p->m, 1 << level);
  const double kept = (double)p->w->nm.slots, joint = p->sample.strip[level] * kept / k, both = strips * panels;
  pairs_units(p, level, joint, units);
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * p->sample.strip[ESMM_CPU_HEIGHTS - 1]);
  /* Lists of both, and finding the panel's: that is done once for a block of rows. */
  units[3] = both * k / 64.0 * (0.5 + joint) + (double)esmm_ceil_div(p->m, 256) * panels * kept / 16.0;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  cheapest_strip(p, cost, lists_units, units, variant);
}

ESMM_KERNEL(nm_lists_bf16_avx512bf16) = {
    .name = "nm_lists_bf16_avx512bf16",
    .doc = "N:M weights whose columns share their k's, two at a time, less those that are zero in 8 to 32 rows of A",
    .reads = ESMM_FORM(NM),
    .can_run = can_run,
    .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "making of k-lists",
                   "starting of tiles", "starting threads"},
    PAIRS_SKIPS,
};
