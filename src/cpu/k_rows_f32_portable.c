/* k_rows_f32_portable.c: row lists in portable C. See rows.h. */
#include "vec_portable.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_portable) = {
    .name = "rows_f32_portable",
    .cpu = 0,
    .cost = {1.75e-9, 8e-9, 1e-9, 4.8e-10, 2e-10, 6e-6},
    ROWS_KERNEL,
};
