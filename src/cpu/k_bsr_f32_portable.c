/* k_bsr_f32_portable.c: blocks of weights in portable C. See bsr.h and gemm.h. */
#include "vec_portable.h"

#include "bsr.h"

ESMM_KERNEL(bsr_f32_portable) = {
    .name = "bsr_f32_portable",
    .doc = "BSR weights: multiplies the blocks there are, less the k's that are zero in 4 to 32 rows of A",
    .cpu = 0,
    BSR_KERNEL,
};
