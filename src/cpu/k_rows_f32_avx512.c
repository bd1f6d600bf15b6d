/* k_rows_f32_avx512.c: row lists on AVX-512. See rows.h. */
#include "vec_avx512.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_avx512) = {
    .name = "rows_f32_avx512",
    .doc = "every row of A skips its own zeros: for unstructured activations",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .can_run = rows_can_run,
    .terms = rows_terms,
    .term_names = ROWS_TERM_NAMES,
    .cost = {1.7e-9, 3e-9, 2e-10, 4e-10, 2e-10, 6e-6},
    .workspace = rows_workspace,
    .run = rows_run,
};
