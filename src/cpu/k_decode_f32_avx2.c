/* k_decode_f32_avx2.c: decode on AVX2. See decode.h. */
#include "vec_avx2.h"

#include "decode.h"

ESMM_KERNEL(decode_f32_avx2) = {
    .name = "decode_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    .cost = {3.4e-11, 4.1e-10, 4e-10, 2e-10, 0, 2e-6},
    DECODE_KERNEL,
};
