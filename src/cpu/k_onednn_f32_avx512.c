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
    .cost = {2.6e-10, 4e-11, 4e-11, 3e-10, 5e-7, 3e-6},
    PARTS_KERNEL,
};
