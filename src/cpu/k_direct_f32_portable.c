/* k_direct_f32_portable.c: small products in portable C, nothing packed. See direct.h. */
#include "vec_portable.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_portable) = {
    .name = "direct_f32_portable",
    .doc = "small products: multiplies A and B's rows where they lie, packs nothing",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .cpu = 0,
    .can_run = direct_can_run,
    .terms = direct_terms,
    .term_names = DIRECT_TERM_NAMES,
    .cost = {2.5e-10, 3e-11, 3e-10, 1e-9, 2e-12, 5e-8},
    .workspace = direct_workspace,
    .run = direct_run,
};
