/* masked.c: picks the widest masked product that the machine has. See masked.h. */
#include "ffn.h"

void esmm_ffn_masked_run(const esmm_ctx *ctx, const ffn_masked *job)
{
#if !defined(ESMM_PORTABLE) /* such a build has left the others out */
  if (ctx->cpu & ESMM_CPU_AVX512)
    esmm_ffn_masked_avx512(ctx, job);
  else if (ctx->cpu & ESMM_CPU_AVX2)
    esmm_ffn_masked_avx2(ctx, job);
  else
#endif
    esmm_ffn_masked_portable(ctx, job);
}
