/* k_dense_f32_portable.c: the packed dense product in portable C. See dense.h and gemm.h. */
#include "vec_portable.h"

#include "dense.h"

ESMM_KERNEL(dense_f32_portable) = {
    .name = "dense_f32_portable",
    .doc = "packed dense product in portable C, 4 x 8 tiles",
    .cpu = 0,
    .cost = {2.17e-10, 5e-10, 4.9e-11, 3e-10, 2e-10, 3e-6},
    DENSE_KERNEL,
};
