/* k_joint_f32_avx512.c: joint skipping on AVX-512. See joint.h and gemm.h. */
#include "vec_avx512.h"

#include "joint.h"

ESMM_KERNEL(joint_f32_avx512) = {
    .name = "joint_f32_avx512",
    .doc = "skips k's that are zero in 8 to 32 rows of A or in 32 columns of B",
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512,
    JOINT_KERNEL,
};
