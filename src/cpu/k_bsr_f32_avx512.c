/* k_bsr_f32_avx512.c: blocks of weights on AVX-512. See bsr.h and gemm.h. */
#include "vec_avx512.h"

#include "bsr.h"

ESMM_KERNEL(bsr_f32_avx512) = {
    .name = "bsr_f32_avx512",
    .doc = "BSR weights: multiplies the blocks there are, less the k's that are zero in 8 to 32 rows of A",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    BSR_KERNEL,
};
