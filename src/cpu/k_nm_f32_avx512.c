/* k_nm_f32_avx512.c: N:M weights on AVX-512. See nm.h. */
#include "vec_avx512.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx512) = {
    .name = "nm_f32_avx512",
    .doc = "N:M weights: multiplies the values there are, less groups of k's that are zero in some rows of A",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(NM),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .terms = nm_terms,
    .term_names = NM_TERM_NAMES,
    .cost = {3.6e-10, 2e-10, 3.6e-11, 2e-10, 8e-10, 3e-6},
    .workspace = nm_workspace,
    .run = nm_run,
};
