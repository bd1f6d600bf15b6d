/* k_nm_f32_avx512.c: N:M weights on AVX-512. See nm.h. */
#include "vec_avx512.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx512) = {
    .name = "nm_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    NM_KERNEL,
};
