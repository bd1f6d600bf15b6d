/* k_dots_f32_avx512.c: dot products on AVX-512. See dots.h. */
#include "vec_avx512.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_avx512) = {
    .name = "dots_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    DOTS_KERNEL,
};
