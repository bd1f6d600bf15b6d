/* k_dense_bf16_amx.c: the dense product of bf16 operands on AMX. See tiles.h. */
#include "vec_avx512.h"

#include "tiles.h"

/* The unit's work is counted in tiles of 16 x 16 x 32, whatever they are filled with. */
static void dense_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                        int64_t *variant)
{
  (void)self;
  *variant = 0;
  const double m = (double)p->m, k = (double)p->k, steps = (double)steps_of(p->k), panels = (double)p->w->panels;
  const double strips = (double)esmm_ceil_div(p->m, TILES_STRIP);
  const bool rows = !(p->w->panel_data && p->w->full);
  units[0] = 2.0 * (double)esmm_ceil_div(p->m, AMX_ROWS) * panels * steps;
  units[1] = m * k * (double)esmm_ceil_div(p->w->panels, 16);
  units[2] = (double)p->n * k * (double)sizeof(uint16_t);
  units[3] = (double)esmm_ceil_div(p->m, 256) * panels * k * (rows ? 4.0 : 1.0);
  if (p->m <= AMX_ROWS && !rows) { /* B is read while it is multiplied: most of the lesser time does not show */
    const double multiply = units[0] * cost[0] + units[3] * cost[3];
    if (multiply < units[2] * cost[2]) {
      units[0] *= 0.25;
      units[3] *= 0.25;
    }
  }
  units[4] = strips * panels * ((double)esmm_ceil_div(p->k, 512) + (esmm_is_rounded(p) ? 1.0 : 2.0));
  units[5] = 1.0;
}

/* The constants are estimates, by instruction tables at 2.7 GHz. */
ESMM_KERNEL(dense_bf16_amx) = {
    .name = "dense_bf16_amx",
    .doc = "dense product of bf16 in AMX tiles of 16 x 16, 32 k's at a time",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(PANELS) | ESMM_FORM(ROWS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16 | ESMM_CPU_AMX,
    .can_run = dense_can_run,
    .terms = dense_terms,
    .term_names = {"tiles", "packing of a", "reading of b", "pairing of b", "updates of c", "starting threads"},
    .cost = {ESMM_CPU_COST_FMA_AMX, ESMM_CPU_COST_PACK_AMX, ESMM_CPU_COST_READ_B, 16 * ESMM_CPU_COST_PAIR,
             ESMM_CPU_COST_TILE_AMX, 2 * ESMM_CPU_COST_START},
    .workspace = tiles_workspace,
    .run = tiles_run,
};
