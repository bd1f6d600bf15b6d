/* k_dense_f32_avx512.c: the packed dense product on AVX-512. See dense.h and gemm.h. */
#include "vec_avx512.h"

#include "dense.h"

ESMM_KERNEL(dense_f32_avx512) = {
    .name = "dense_f32_avx512",
    .doc = "packed dense product, 8 x 32 tiles",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .cost = {2.6e-10, 3e-10, 3.6e-11, 3e-10, 1.5e-10, 3e-6},
    DENSE_KERNEL,
};
