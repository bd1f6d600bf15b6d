/* k_dots_f32_portable.c: dot products in portable C. See dots.h. */
#include "vec_portable.h"

#include "dots.h"

ESMM_KERNEL(dots_f32_portable) = {
    .name = "dots_f32_portable",
    .cpu = 0,
    DOTS_KERNEL,
};
