/* k_nm_f32_avx2.c: N:M weights on AVX2. See nm.h. */
#include "vec_avx2.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_avx2) = {
    .name = "nm_f32_avx2",
    .doc = "N:M weights: multiplies the values there are, less groups of k's that are zero in some rows of A",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(NM),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2,
    .terms = nm_terms,
    .term_names = NM_TERM_NAMES,
    .cost = {2.2e-10, 2e-10, 3.6e-11, 1e-10, 4e-10, 3e-6},
    .workspace = nm_workspace,
    .run = nm_run,
};
