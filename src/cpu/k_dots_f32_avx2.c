/* k_dots_f32_avx2.c: dot products on AVX2. See dots.h. */
#include "vec_avx2.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_avx2) = {
    .name = "dots_f32_avx2",
    .doc = "n of 1 to 15: dot products of A's rows and B's columns",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(TURNED),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .cpu = ESMM_CPU_AVX2,
    .terms = dots_terms,
    .term_names = DOTS_TERM_NAMES,
    .cost = {1.6e-10, 1.3e-11, 4e-11, 1e-9, 0, 5e-8},
    .workspace = dots_workspace,
    .run = dots_run,
};
