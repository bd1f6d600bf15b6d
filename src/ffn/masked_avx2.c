/* masked_avx2.c: see masked.h. */
#include "cpu/vec_avx2.h"
#include "masked.h"

void esmm_ffn_masked_avx2(const esmm_ctx *ctx, const ffn_masked *job)
{
  masked_all(ctx, job);
}
