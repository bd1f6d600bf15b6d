/* k_rows_f32_avx512.c: row lists on AVX-512. See rows.h. */
#include "vec_avx512.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_avx512) = {
    .name = "rows_f32_avx512",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    ROWS_KERNEL,
};
