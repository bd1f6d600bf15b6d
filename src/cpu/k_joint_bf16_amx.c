/*
 * k_joint_bf16_amx.c: skipping of bf16 operands on AMX: k's that are zero in 32 rows of A. See tiles.h, and joint.h for
 * the idea. k_joint_both_bf16_amx.c skips B's zeros beside them.
 */
#include "vec_avx512.h"

#include "tiles.h"

static void joint_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                        int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = TILES_STRIP;
  const double m = (double)p->m, k = (double)p->k, panels = (double)p->w->panels;
  const double strips = (double)esmm_ceil_div(p->m, TILES_STRIP), strip = p->sample.strip[ESMM_CPU_HEIGHTS - 1];
  const double most = fmin(4096.0, 512.0 / fmax(1.0 / 8, strip)), stretches = ceil(k / most);
  /* Steps of both, with half a step to fill up at the end of a list. */
  const double steps = strips * panels * (k * strip / TILES_STEP + 0.5 * stretches);
  units[0] = 2.0 * (p->m > AMX_ROWS ? 2.0 : 1.0) * steps;
  units[1] = m * k * (0.5 + strip) * (double)esmm_ceil_div(p->w->panels, 32);
  units[2] = (double)p->n * k * (double)sizeof(uint16_t) * p->w->strip_density;
  units[3] = steps + (double)esmm_ceil_div(p->m, 256) * panels * k / TILES_STEP * (0.5 + p->w->strip_density);
  units[4] = strips * panels * (stretches + (esmm_is_rounded(p) ? 1.0 : 2.0));
  units[5] = 1.0;
}

/* The constants are estimates, by instruction tables at 2.7 GHz. */
ESMM_KERNEL(joint_bf16_amx) = {
    .name = "joint_bf16_amx",
    .doc = "skips k's that are zero in 32 rows of A, in AMX tiles",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(PANELS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16 | ESMM_CPU_AMX,
    .terms = joint_terms,
    .term_names = {"tiles", "scanning and packing of a", "reading of b", "pairing of k's", "updates of c",
                   "starting threads"},
    .cost = {ESMM_CPU_COST_FMA_AMX, 2 * ESMM_CPU_COST_PACK_AMX, ESMM_CPU_COST_READ_B, 4 * ESMM_CPU_COST_WORD_AMX,
             ESMM_CPU_COST_TILE_AMX, 2 * ESMM_CPU_COST_START},
    .workspace = tiles_workspace,
    .run = tiles_run,
};
