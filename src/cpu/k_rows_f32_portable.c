/* k_rows_f32_portable.c: row lists in portable C. See rows.h. */
#include "vec_portable.h"

#include "rows.h"

ESMM_KERNEL(rows_f32_portable) = {
    .name = "rows_f32_portable",
    .cpu = 0,
    ROWS_KERNEL,
};
