/* k_direct_f32_portable.c: small products in portable C, nothing packed. See direct.h. */
#include "vec_portable.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_portable) = {
    .name = "direct_f32_portable",
    .cpu = 0,
    .cost = {2.5e-10, 3e-11, 3e-10, 1e-9, 2e-12, 5e-8},
    DIRECT_KERNEL,
};
