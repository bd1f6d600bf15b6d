/* k_nm_f32_portable.c: N:M weights in portable C. See nm.h. */
#include "vec_portable.h"

#include "nm.h"

ESMM_KERNEL(nm_f32_portable) = {
    .name = "nm_f32_portable",
    .cpu = 0,
    .cost = {3e-10, 5e-10, 5e-11, 3e-10, 1e-9, 3e-6},
    NM_KERNEL,
};
