/* k_dots_f32_avx2.c: dot products on AVX2. See dots.h. */
#include "vec_avx2.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_avx2) = {
    .name = "dots_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    DOTS_KERNEL,
};
