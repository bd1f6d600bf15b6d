/* k_decode_f32_portable.c: decode in portable C. See decode.h. */
#include "vec_portable.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_portable) = {
    .name = "decode_f32_portable",
    .cpu = 0,
    DECODE_KERNEL,
};
