/* k_dots_f32_avx2.c: dot products on AVX2. See dots.h. */
#include "vec_avx2.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_avx2) = {
    .name = "dots_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    .cost = {1.6e-10, 1.3e-11, 4e-11, 1e-9, 0, 5e-8},
    DOTS_KERNEL,
};
