/* masked_avx512.c: see masked.h. */
#include "cpu/vec_avx512.h"
#include "masked.h"

void esmm_ffn_masked_avx512(const esmm_ctx *ctx, const ffn_masked *job)
{
  masked_all(ctx, job);
}
