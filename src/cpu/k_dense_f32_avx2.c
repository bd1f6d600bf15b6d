/* k_dense_f32_avx2.c: the packed dense product on AVX2. See dense.h and gemm.h. */
#include "vec_avx2.h"

#include "dense.h"

ESMM_KERNEL(dense_f32_avx2) = {
    .name = "dense_f32_avx2",
    .doc = "packed dense product, 6 x 16 tiles",
    .cpu = ESMM_CPU_AVX2,
    DENSE_KERNEL,
};
