/* k_dense_f32_portable.c: the packed dense product in portable C. See dense.h and gemm.h. */
#include "vec_portable.h"

#include "dense.h"

ESMM_KERNEL(dense_f32_portable) = {
    .name = "dense_f32_portable",
    .doc = "packed dense product in portable C, 4 x 8 tiles",
    .cpu = 0,
    DENSE_KERNEL,
};
