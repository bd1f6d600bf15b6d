/* k_joint_f32_portable.c: joint skipping in portable C. See joint.h and gemm.h. */
#include "vec_portable.h"

#include "joint.h"

ESMM_KERNEL(joint_f32_portable) = {
    .name = "joint_f32_portable",
    .doc = "skips k's that are zero in 4 to 32 rows of A or in 32 columns of B",
    .cpu = 0,
    JOINT_KERNEL,
};
