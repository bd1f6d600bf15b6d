/* masked_portable.c: see masked.h. */
#include "cpu/vec_portable.h"
#include "masked.h"

void esmm_ffn_masked_portable(const esmm_ctx *ctx, const ffn_masked *job)
{
  masked_all(ctx, job);
}
