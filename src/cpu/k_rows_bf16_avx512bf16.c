/* k_rows_bf16_avx512bf16.c: row lists of bf16 operands on AVX-512 BF16, two entries at a time. See rows.h. */
#include "vec_avx512.h"

#define ROW_PAIRS
#include "rows.h"

ESMM_KERNEL(rows_bf16_avx512bf16) = {
    .name = "rows_bf16_avx512bf16",
    .doc = "every row of A skips its own zeros: for unstructured activations",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    .can_run = rows_can_run,
    .terms = rows_terms,
    .term_names = ROWS_TERM_NAMES,
    .cost = {1.0e-9, 3e-9, 2.5e-10, 2.3e-10, 2e-10, 6e-6},
    .workspace = rows_workspace,
    .run = rows_run,
};
