/* k_nm_f32_avx2.c: N:M weights on AVX2. See nm.h. */
#include "vec_avx2.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx2) = {
    .name = "nm_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    NM_KERNEL,
};
