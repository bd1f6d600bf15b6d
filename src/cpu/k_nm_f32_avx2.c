/* k_nm_f32_avx2.c: N:M weights on AVX2. See nm.h. */
#include "vec_avx2.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx2) = {
    .name = "nm_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    .cost = {2.2e-10, 2e-10, 3.6e-11, 1e-10, 4e-10, 3e-6},
    NM_KERNEL,
};
