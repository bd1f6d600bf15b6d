/* k_decode_f32_avx2.c: decode on AVX2. See decode.h. */
#include "vec_avx2.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_avx2) = {
    .name = "decode_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    DECODE_KERNEL,
};
