/* k_nm_f32_portable.c: N:M weights in portable C. See nm.h. */
#include "vec_portable.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_portable) = {
    .name = "nm_f32_portable",
    .doc = "N:M weights: multiplies the values there are, less groups of k's that are zero in some rows of A",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(NM),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = 0,
    .terms = nm_terms,
    .term_names = NM_TERM_NAMES,
    .cost = {3e-10, 5e-10, 5e-11, 3e-10, 1e-9, 3e-6},
    .workspace = nm_workspace,
    .run = nm_run,
};
