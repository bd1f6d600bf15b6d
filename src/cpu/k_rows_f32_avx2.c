/* k_rows_f32_avx2.c: row lists on AVX2. See rows.h. */
#include "vec_avx2.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_avx2) = {
    .name = "rows_f32_avx2",
    .cpu = ESMM_CPU_AVX2,
    .cost = {1.8e-9, 3e-9, 4e-10, 4e-10, 2e-10, 6e-6},
    ROWS_KERNEL,
};
