/* sample_avx512.c: see sample.h. */
#include "cpu/vec_avx512.h"
#include "sample.h"

void esmm_sample_avx512(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  sample_a(a, w, sample);
}
