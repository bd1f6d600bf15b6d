/*
 * dense.h: the dense kernels' descriptor functions, shared by the instruction sets. Included after vec_*.h.
 *
 * The floor is m * n * k multiply-adds; a full tile runs at about 95 % of the machine's peak from cache. For small m it
 * is the bytes of B instead.
 */
#include "gemm.h"

static void dense_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                        int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  const double k = (double)p->k, columns = (double)(p->w->panels * ESMM_PANEL);
  const source from = source_of(p->w, false);
  units[0] = (double)p->m * columns * k / VEC;
  units[1] = (double)p->m * k;
  units[2] = from == FROM_WIDENED ? (double)p->w->bytes : (double)p->n * k * (double)esmm_dtype_size(p->w->dtype);
  units[3] = from != FROM_PANELS || p->w->dtype != ESMM_F32 ? (double)esmm_ceil_div(p->m, 128) * columns * k : 0.0;
  units[4] = (double)p->m * columns * (esmm_is_plain(p) ? (double)esmm_ceil_div(p->k, 256) : 8.0);
  units[5] = 1.0;
}

/* The fields that kernels of all instruction sets share. */
#define DENSE_KERNEL                                                                                                \
  .cost = {COST_FMA,           2 * COST_PACK, ESMM_CPU_COST_READ_B, ESMM_CPU_COST_REPACK, ESMM_CPU_COST_UPDATE,     \
           ESMM_CPU_COST_START},                                                                                    \
  .backend = &esmm_cpu_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .can_run = dense_can_run, .terms = dense_terms, \
  .workspace = gemm_workspace, .run = gemm_run, .term_names = {"multiply-adds",  "packing of a", "reading of b",    \
                                                               "repacking of b", "updates of c", "starting threads"}
