/* k_direct_f32_portable.c: small products in portable C, nothing packed. See direct.h. */
#include "vec_portable.h"

#include "direct.h"

ESMM_KERNEL(direct_f32_portable) = {
    .name = "direct_f32_portable",
    .cpu = 0,
    DIRECT_KERNEL,
};
