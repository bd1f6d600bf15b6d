/* k_direct_f32_avx512.c: small products on AVX-512, nothing packed. See direct.h. */
#include "vec_avx512.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_avx512) = {
    .name = "direct_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    DIRECT_KERNEL,
};
