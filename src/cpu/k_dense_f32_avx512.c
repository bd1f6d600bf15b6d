/* k_dense_f32_avx512.c: the packed dense product on AVX-512. See dense.h and gemm.h. */
#include "vec_avx512.h"

#include "dense.h"

ESMM_KERNEL(dense_f32_avx512) = {
    .name = "dense_f32_avx512",
    .doc = "packed dense product, 8 x 32 tiles",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    DENSE_KERNEL,
};
