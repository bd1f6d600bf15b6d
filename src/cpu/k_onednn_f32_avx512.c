/* k_onednn_f32_avx512.c: oneDNN's dense product of fp32. See parts.h. */
#include "vec_avx512.h"

#define OUR_DENSE esmm_kernel_dense_f32_avx512
#include "parts.h"

ESMM_KERNEL(onednn_f32_avx512) = {
    .name = "onednn_f32_avx512",
    .doc = "oneDNN's dense product of fp32, where it is installed",
    .reads = ESMM_FORM(ROWS) | ESMM_FORM(ONEDNN),
    .dtypes = ESMM_DTYPE_BIT(ESMM_F32),
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .cost = {COST_FMA, COST_WIDEN, ESMM_CPU_COST_READ_B, 2 * ESMM_CPU_COST_UPDATE, ESMM_CPU_COST_LIBRARY,
             ESMM_CPU_COST_START},
    PARTS_KERNEL,
};
