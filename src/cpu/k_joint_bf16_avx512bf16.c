/* k_joint_bf16_avx512bf16.c: joint skipping of bf16 operands on AVX-512 BF16. See pairs.h, and joint.h for the idea. */
#include "vec_avx512.h"

#include "pairs.h"

static void joint_units(const esmm_problem *p, int level, double *units)
{
  const double m = (double)p->m, k = (double)p->k, columns = (double)(p->w->panels * ESMM_PANEL);
  const double height = (double)(1 << level), strips = (double)esmm_ceil_div(p->m, 1 << level);
  const double both = strips * (double)p->w->panels;
  units[0] = m * columns * k * p->sample.joint[level] / (2 * VEC);
  units[1] = m * k * (0.5 + p->sample.strip[level]);
  units[2] = (double)p->n * k * (double)sizeof(uint16_t) *
             fmin(p->w->strip_density, 2.5 * p->sample.joint[ESMM_CPU_HEIGHTS - 1]);
  /* Lists, and putting k's side by side: of B for every strip, of A where a panel has k's of its own. */
  units[3] = both * k / 64.0 * p->sample.joint[level] * (p->w->full ? 1.0 : 2.0 + height / MAX_STRIP) +
             (p->w->full ? strips : 0.5 * both) * k / 64.0;
  units[4] = both * height / MR * (p->sample.joint[level] > 0.2 ? (double)esmm_ceil_div(p->k, PAIRS_STRETCH) : 1.0) *
             (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  cheapest_strip(p, cost, joint_units, units, variant);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return pairs_workspace(p, true);
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)ctx;
  pairs_run(p, scratch, true, stats);
  return ESMM_OK;
}

ESMM_KERNEL(joint_bf16_avx512bf16) = {
    .name = "joint_bf16_avx512bf16",
    .doc = "skips k's that are zero in 8 to 32 rows of A or in 32 columns of B",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(PANELS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    .terms = terms,
    .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "pairing of k's", "starting of tiles",
                   "starting threads"},
    .cost = {2.95e-10, 1.2e-10, 3.9e-11, 3e-8, 4e-8, 3e-6},
    .workspace = workspace,
    .run = run,
};
