/* cuts_pairs_avx512bf16.c: the blocks of the kernels of pairs.h. */
#include "cpu/vec_avx512.h"

#include "cpu/pairs.h"
#include "cuts.h"

cuts cuts_pairs(const esmm_kernel *kernel, const esmm_problem *p)
{
  const pairs_blocking g = pairs_plan(p, kernel->flags & ESMM_KERNEL_SKIPS);
  return (cuts){{{g.mc, g.width}, {g.nc * TILE_COLS}, {g.kc, g.skip ? PAIRS_CHAIN : PAIRS_STRAIGHT}}};
}
