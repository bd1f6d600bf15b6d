/* k_bsr_f32_avx2.c: blocks of weights on AVX2. See bsr.h and gemm.h. */
#include "vec_avx2.h"

#include "bsr.h"

ESMM_KERNEL(bsr_f32_avx2) = {
    .name = "bsr_f32_avx2",
    .doc = "BSR weights: multiplies the blocks there are, less the k's that are zero in 4 to 32 rows of A",
    .cpu = ESMM_CPU_AVX2,
    BSR_KERNEL,
};
