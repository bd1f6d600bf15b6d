/* k_rows_f32_avx2.c: row lists on AVX2. See rows.h. */
#include "vec_avx2.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_avx2) = {
    .name = "rows_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    ROWS_KERNEL,
};
