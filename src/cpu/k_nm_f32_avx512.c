/* k_nm_f32_avx512.c: N:M weights on AVX-512. See nm.h. */
#include "vec_avx512.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx512) = {
    .name = "nm_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .cost = {3.6e-10, 2e-10, 3.6e-11, 2e-10, 8e-10, 3e-6},
    NM_KERNEL,
};
