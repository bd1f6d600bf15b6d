/* k_decode_f32_portable.c: decode in portable C. See decode.h. */
#include "vec_portable.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_portable) = {
    .name = "decode_f32_portable",
    .cpu = 0,
    .cost = {3.4e-11, 3.3e-10, 1e-9, 3e-10, 0, 2e-6},
    DECODE_KERNEL,
};
