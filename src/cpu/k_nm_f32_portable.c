/* k_nm_f32_portable.c: N:M weights in portable C. See nm.h. */
#include "vec_portable.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_portable) = {
    .name = "nm_f32_portable",
    .cpu = 0,
    NM_KERNEL,
};
