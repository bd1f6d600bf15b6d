/* k_joint_f32_portable.c: joint skipping in portable C. See joint.h and gemm.h. */
#include "vec_portable.h"

#include "joint.h"

ESMM_KERNEL(joint_f32_portable) = {
    .name = "joint_f32_portable",
    .doc = "skips k's that are zero in 4 to 32 rows of A or in 32 columns of B",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(PANELS),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = 0,
    .terms = joint_terms,
    .term_names = JOINT_TERM_NAMES,
    .cost = {2.3e-10, 5e-10, 5e-11, 1e-7, 1.5e-8, 3e-6},
    .workspace = joint_workspace,
    .run = joint_run,
};
