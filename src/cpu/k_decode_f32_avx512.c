/* k_decode_f32_avx512.c: decode on AVX-512. See decode.h. */
#include "vec_avx512.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_avx512) = {
    .name = "decode_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    .cost = {3.4e-11, 8e-10, 4e-10, 2e-10, 0, 2e-6},
    DECODE_KERNEL,
};
