/* masked_avx512.c: see masked.h. */
#include "cpu/vec_avx512.h"
#include "masked.h"

void esmm_ffn_masked_avx512(int threads, const ffn_masked *job)
{
  masked_all(threads, job);
}
