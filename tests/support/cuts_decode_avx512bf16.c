/* cuts_decode_avx512bf16.c: the blocks of the bf16 decode kernel. */
#include "cuts.h"

#undef ESMM_KERNEL
#define ESMM_KERNEL(id) __attribute__((unused)) static const esmm_kernel copy_of_##id
#include "cpu/k_decode_bf16_avx512bf16.c" /* NOLINT(bugprone-suspicious-include) */

cuts cuts_decode(const esmm_kernel *kernel, const esmm_problem *p)
{
  (void)kernel;
  return (cuts){{{1}, {lay_out(p).width, CHUNK}, {PAIR_K}}};
}
