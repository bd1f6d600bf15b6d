/*
 * joint.h: the joint kernels' descriptor functions, shared by the instruction sets. Included after vec_*.h.
 *
 * The floor is m * n * k * joint density multiply-adds, plus one read of A and one write of C. A short strip follows
 * irregular zeros more closely and has more lists to make; terms() weighs the heights that the plan sampled.
 */
#include "gemm.h"

#include <math.h>

static void joint_units(const esmm_problem *p, int level, double *units)
{
  const double m = (double)p->m, k = (double)p->k, columns = (double)(p->w->panels * ESMM_PANEL);
  const double height = (double)(1 << level), strips = (double)esmm_ceil_div(p->m, 1 << level);
  const double pairs = strips * (double)p->w->panels;
  units[0] = m * columns * k * p->sample.joint[level] / VEC;
  units[1] = m * k * (0.5 + p->sample.strip[level] + (p->a.dtype == ESMM_F32 ? 0.0 : 0.5));
  /* A panel's rows are a cache line apart: skipping one in two saves no traffic, as the hardware prefetches. */
  units[2] = (double)p->n * k * (double)esmm_dtype_size(p->w->dtype) *
             fmin(p->w->strip_density, ESMM_CPU_COST_AHEAD * p->sample.joint[ESMM_CPU_HEIGHTS - 1]);
  units[3] = p->w->full ? strips * k / 64.0 : pairs * k / 64.0 * (0.5 + p->sample.joint[level]);
  units[4] = pairs * height * ESMM_PANEL / TILE_COLS / MR *
             (p->sample.joint[level] > 0.25 ? (double)esmm_ceil_div(p->k, 2048) : 1.0) * (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

static void joint_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                        int64_t *variant)
{
  (void)self;
  cheapest_strip(p, cost, joint_units, units, variant);
}

/* The fields that kernels of all instruction sets share. */
#define JOINT_KERNEL                                                                                                 \
  .cost =                                                                                                            \
      {COST_FMA * ESMM_CPU_COST_LISTED, COST_PACK, ESMM_CPU_COST_READ_B, COST_WORD, COST_TILE, ESMM_CPU_COST_START}, \
  .backend = &esmm_cpu_backend, .reads = ESMM_FORM(PANELS), .variant_strips = true,                                  \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .terms = joint_terms, .workspace = gemm_workspace,         \
  .run = gemm_run, .term_names = {"multiply-adds",     "scanning and packing of a", "reading of b",                  \
                                  "making of k-lists", "starting of tiles",         "starting threads"}
