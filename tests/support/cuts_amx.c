/* cuts_amx.c: the blocks of the kernels of tiles.h and meet.h. */
#include "cpu/vec_avx512.h"

#include "cpu/meet.h"
#include "cpu/tiles.h"
#include "cuts.h"

cuts cuts_amx(const esmm_kernel *kernel, const esmm_problem *p)
{
  if (cuts_idea(kernel, "joint_both")) {
    const meet_blocking g = meet_plan(p);
    return (cuts){{{g.mc, MEET_STRIP}, {g.nc * ESMM_PANEL}, {g.kc, MEET_STEP}}};
  }
  const tiles_blocking g = tiles_plan(p, kernel->flags & ESMM_KERNEL_SKIPS);
  return (cuts){{{g.mc, TILES_STRIP}, {g.nc * ESMM_PANEL}, {g.kc, TILES_STEP}}};
}
