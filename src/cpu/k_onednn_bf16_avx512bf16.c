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
    .cost = {2.78e-10, 4e-11, 2.5e-11, 3e-10, 5e-7, 3e-6},
    PARTS_KERNEL,
};
