/* k_decode_f32_avx512.c: decode on AVX-512. See decode.h. */
#include "vec_avx512.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_avx512) = {
    .name = "decode_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    DECODE_KERNEL,
};
