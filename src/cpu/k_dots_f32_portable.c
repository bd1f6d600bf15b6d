/* k_dots_f32_portable.c: dot products in portable C. See dots.h. */
#include "vec_portable.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_portable) = {
    .name = "dots_f32_portable",
    .doc = "n of 1 to 15: dot products of A's rows and B's columns",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(TURNED),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .cpu = 0,
    .terms = dots_terms,
    .term_names = DOTS_TERM_NAMES,
    .cost = {2.5e-10, 1.3e-11, 3e-10, 2e-9, 0, 5e-8},
    .workspace = dots_workspace,
    .run = dots_run,
};
