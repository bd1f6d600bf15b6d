/* k_onednn_bf16_avx512bf16.c: oneDNN's dense product of bf16. See parts.h. */
#include "vec_avx512.h"

#define OUR_DENSE esmm_kernel_dense_bf16_avx512bf16
#include "parts.h"

ESMM_KERNEL(onednn_bf16_avx512bf16) = {
    .name = "onednn_bf16_avx512bf16",
    .doc = "oneDNN's dense product of bf16, where it is installed",
    .reads = ESMM_FORM(ONEDNN),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    .cost = {ESMM_CPU_COST_FMA_BF16, COST_WIDEN, 2 * ESMM_CPU_COST_READ_A, 2 * ESMM_CPU_COST_UPDATE,
             ESMM_CPU_COST_LIBRARY, ESMM_CPU_COST_START},
    PARTS_KERNEL,
};
