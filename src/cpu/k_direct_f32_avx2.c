/* k_direct_f32_avx2.c: small products on AVX2, nothing packed. See direct.h. */
#include "vec_avx2.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_avx2) = {
    .name = "direct_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    DIRECT_KERNEL,
};
