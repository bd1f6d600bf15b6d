/* k_decode_f32_avx2.c: decode on AVX2. See decode.h. */
#include "vec_avx2.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_avx2) = {
    .name = "decode_f32_avx2",
    .doc = "m of 1 to 16: reads only the rows of B that some row of A needs",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2,
    .can_run = decode_can_run,
    .terms = decode_terms,
    .term_names = DECODE_TERM_NAMES,
    .cost = {3.4e-11, 4.1e-10, 4e-10, 2e-10, 0, 2e-6},
    .workspace = decode_workspace,
    .run = decode_run,
};
