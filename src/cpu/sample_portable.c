/* sample_portable.c: see sample.h. */
#include "cpu/vec_portable.h"
#include "sample.h"

void esmm_sample_portable(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample)
{
  sample_a(a, w, sample);
}
