/* k_joint_f32_avx2.c: joint skipping on AVX2. See joint.h and gemm.h. */
#include "vec_avx2.h"

#include "joint.h"

ESMM_KERNEL(joint_f32_avx2) = {
    .name = "joint_f32_avx2",
    .doc = "skips k's that are zero in 4 to 32 rows of A or in 32 columns of B",
    .cpu = ESMM_CPU_AVX2,
    JOINT_KERNEL,
};
