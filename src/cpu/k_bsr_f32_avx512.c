/* k_bsr_f32_avx512.c: blocks of weights on AVX-512. See bsr.h and gemm.h. */
#include "vec_avx512.h"

#include "bsr.h"

ESMM_KERNEL(bsr_f32_avx512) = {
    .name = "bsr_f32_avx512",
    .doc = "BSR weights: multiplies the blocks there are, less the k's that are zero in 8 to 32 rows of A",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .cost = {2.75e-10, 1.5e-10, 3.9e-11, 2e-8, 4e-8, 3e-6},
    BSR_KERNEL,
};
