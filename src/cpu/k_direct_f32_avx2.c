/* k_direct_f32_avx2.c: small products on AVX2, nothing packed. See direct.h. */
#include "vec_avx2.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_avx2) = {
    .name = "direct_f32_avx2",
    .doc = "small products: multiplies A and B's rows where they lie, packs nothing",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .cpu = ESMM_CPU_AVX2,
    .can_run = direct_can_run,
    .terms = direct_terms,
    .term_names = DIRECT_TERM_NAMES,
    .cost = {1.6e-10, 3e-11, 4e-11, 1e-9, 2e-12, 5e-8},
    .workspace = direct_workspace,
    .run = direct_run,
};
