/*
 * k_bsr_bf16_avx512bf16.c: BSR weights of bf16 on AVX-512 BF16, two k's at a time. See pairs.h, and bsr.h for the idea.
 * Blocks of other widths than multiples of 32 are left to bsr.h.
 */
#include "vec_avx512.h"

#include "pairs.h"

#define MOST_BLOCK_COLS (1 << 16) /* offsets into a panel have 32 bits */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const int cols = p->w->bsr.block_cols;
  if (cols % ESMM_PANEL == 0 && cols <= MOST_BLOCK_COLS)
    return true;
  (void)snprintf(why, why_bytes, "blocks have %d columns, it takes multiples of %d up to %d", cols, ESMM_PANEL,
                 MOST_BLOCK_COLS);
  return false;
}

static void bsr_units(const esmm_problem *p, int level, double *units)
{
  const esmm_weights *w = p->w;
  const double height = (double)(1 << level), both = (double)(esmm_ceil_div(p->m, 1 << level) * w->panels);
  /* sample.joint counts k's with a nonzero in 32 columns; the kernel multiplies all of a block. */
  const double joint =
      fmin(1.0, p->sample.joint[level] * (w->strip_density > 0.0 ? bsr_density(w) / w->strip_density : 1.0));
  pairs_units(p, level, joint, units);
  units[2] = (double)w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * p->sample.strip[ESMM_CPU_HEIGHTS - 1]);
  units[3] = both * (double)p->k / 64.0 * (joint * (2.0 + height / MAX_STRIP) + 0.5);
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  cheapest_strip(p, cost, bsr_units, units, variant);
}

ESMM_KERNEL(bsr_bf16_avx512bf16) = {
    .name = "bsr_bf16_avx512bf16",
    .doc = "BSR weights: multiplies the blocks there are, less the k's that are zero in 8 to 32 rows of A",
    .reads = ESMM_FORM(BSR),
    .can_run = can_run,
    .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "pairing of k's", "starting of tiles",
                   "starting threads"},
    PAIRS_SKIPS,
};
