/* k_joint_bf16_avx512bf16.c: joint skipping of bf16 operands on AVX-512 BF16. See pairs.h, and joint.h for the idea. */
#include "vec_avx512.h"

#include "pairs.h"

static void joint_units(const esmm_problem *p, int level, double *units)
{
  const double k = (double)p->k, height = (double)(1 << level);
  const double strips = (double)esmm_ceil_div(p->m, 1 << level), both = strips * (double)p->w->panels;
  pairs_units(p, level, p->sample.joint[level], units);
  units[2] = (double)p->n * k * (double)sizeof(uint16_t) *
             fmin(p->w->strip_density, ESMM_CPU_COST_AHEAD * p->sample.joint[ESMM_CPU_HEIGHTS - 1]);
  /* Lists, and putting k's side by side: of B for every strip, of A where a panel has its own k's. */
  units[3] = both * k / 64.0 * p->sample.joint[level] * (p->w->full ? 1.0 : 2.0 + height / MAX_STRIP) +
             (p->w->full ? strips : 0.5 * both) * k / 64.0;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  cheapest_strip(p, cost, joint_units, units, variant);
}

ESMM_KERNEL(joint_bf16_avx512bf16) = {
    .name = "joint_bf16_avx512bf16",
    .doc = "skips k's that are zero in 8 to 32 rows of A or in 32 columns of B",
    .reads = ESMM_FORM(PANELS),
    .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "pairing of k's", "starting of tiles",
                   "starting threads"},
    PAIRS_SKIPS,
};
