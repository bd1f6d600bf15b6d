/* k_rows_bf16_avx512bf16.c: row lists of bf16 operands on AVX-512 BF16, two entries at a time. See rows.h. */
#include "vec_avx512.h"

#define ROW_PAIRS
#include "rows.h"

ESMM_KERNEL(rows_bf16_avx512bf16) = {
    .name = "rows_bf16_avx512bf16",
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    ROWS_KERNEL,
};
