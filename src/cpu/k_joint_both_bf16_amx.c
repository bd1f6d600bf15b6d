/* k_joint_both_bf16_amx.c: joint skipping of bf16 operands on AMX. See meet.h, and joint.h for the idea. */
#include "vec_avx512.h"

#include "meet.h"

static void joint_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                        int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = MEET_STRIP;
  const double k = (double)p->k, stretches = (double)esmm_ceil_div(p->k, MEET_STRETCH);
  const double both = (double)esmm_ceil_div(p->m, MEET_STRIP) * (double)p->w->panels;
  /* With half a step to fill up at the end of a list. */
  units[0] = both * (k * p->sample.joint[ESMM_CPU_HEIGHTS - 1] / MEET_STEP + 0.5 * stretches);
  units[1] = (double)p->m * k * (stretches > 1.0 ? (double)esmm_ceil_div(p->w->panels, 32) : 1.0);
  units[2] = (double)p->n * k * (double)sizeof(uint16_t) * p->w->strip_density;
  units[3] = both * k / 64.0 * (fmax(p->sample.strip[ESMM_CPU_HEIGHTS - 1], p->w->strip_density) > 0.25 ? 2.0 : 1.0);
  units[4] = both * stretches;
  units[5] = 1.0;
}

/* The constants are estimates, by instruction tables at 2.7 GHz. */
ESMM_KERNEL(joint_both_bf16_amx) = {
    .name = "joint_both_bf16_amx",
    .doc = "skips k's that are zero in 32 rows of A or in 32 columns of B, in AMX tiles",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(PANELS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16 | ESMM_CPU_AMX,
    .terms = joint_terms,
    .term_names = {"steps of both", "scanning and packing of a", "reading of b", "lists", "updates of c",
                   "starting threads"},
    .cost = {10 * ESMM_CPU_COST_FMA_AMX, 2 * ESMM_CPU_COST_PACK_AMX, ESMM_CPU_COST_READ_B, ESMM_CPU_COST_WORD_AMX,
             ESMM_CPU_COST_TILE_AMX, 2 * ESMM_CPU_COST_START},
    .workspace = meet_workspace,
    .run = meet_run,
};
