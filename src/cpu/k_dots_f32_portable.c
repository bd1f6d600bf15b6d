/* k_dots_f32_portable.c: dot products in portable C. See dots.h. */
#include "vec_portable.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_portable) = {
    .name = "dots_f32_portable",
    .cpu = 0,
    .cost = {2.5e-10, 1.3e-11, 3e-10, 2e-9, 0, 5e-8},
    DOTS_KERNEL,
};
