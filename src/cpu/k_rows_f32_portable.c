/* k_rows_f32_portable.c: row lists in portable C. See rows.h. */
#include "vec_portable.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_portable) = {
    .name = "rows_f32_portable",
    .doc = "every row of A skips its own zeros: for unstructured activations",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = 0,
    .can_run = rows_can_run,
    .terms = rows_terms,
    .term_names = ROWS_TERM_NAMES,
    .cost = {1.75e-9, 8e-9, 1e-9, 4.8e-10, 2e-10, 6e-6},
    .workspace = rows_workspace,
    .run = rows_run,
};
