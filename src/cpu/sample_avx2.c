/* sample_avx2.c: see sample.h. */
#include "cpu/vec_avx2.h"
#include "sample.h"

void esmm_sample_avx2(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  sample_a(a, w, sample);
}
