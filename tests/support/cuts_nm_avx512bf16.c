/* cuts_nm_avx512bf16.c: the blocks of the bf16 kernel of N:M weights. */
#include "cuts.h"

#undef ESMM_KERNEL
#define ESMM_KERNEL(id) __attribute__((unused)) static const esmm_kernel copy_of_##id
#include "cpu/k_nm_bf16_avx512bf16.c" /* NOLINT(bugprone-suspicious-include) */

cuts cuts_nm(const esmm_kernel *kernel, const esmm_problem *p)
{
  (void)kernel;
  const layout l = lay_out(p);
  return (cuts){{{l.mc, SELECT_ROWS}, {l.nc * ESMM_HALF_COLS, HELD * ESMM_HALF_COLS}, {l.kc, l.kc * l.stretches}}};
}
