/* k_decode_f32_portable.c: decode in portable C. See decode.h. */
#include "vec_portable.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_portable) = {
    .name = "decode_f32_portable",
    .doc = "m of 1 to 16: reads only the rows of B that some row of A needs",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = 0,
    .can_run = decode_can_run,
    .terms = decode_terms,
    .term_names = DECODE_TERM_NAMES,
    .cost = {3.4e-11, 3.3e-10, 1e-9, 3e-10, 0, 2e-6},
    .workspace = decode_workspace,
    .run = decode_run,
};
