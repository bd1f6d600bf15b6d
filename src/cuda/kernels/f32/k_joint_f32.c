/*
 * k_joint_f32.c: joint skipping on tensor cores at fp32 accuracy. See strips_mma.cuh.
 *
 * Its time follows two things: the terms of the joint, and the k's that are alive anywhere in a block, which have to be
 * listed and loaded.
 */
#include "cuda/kernels/f32/strips_mma.h"

ESMM_FATBIN(k_joint_f32);
static const esmm_cuda_function functions[3] = ESMM_STRIPS_MMA_FUNCTIONS(fatbin_k_joint_f32, "esmm_joint_f32");

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double work = esmm_strips_mma_work(p), elements = (double)p->m * (double)p->k;
  units->per_joint[0] = work;
  esmm_cuda_union(p, ESMM_STRIPS_MMA_ROWS / ESMM_STRIP, ESMM_STRIPS_MMA_COLS / ESMM_STRIP, work, 1, units);
  units->base[2] = elements * (double)esmm_dtype_size(p->a.dtype);
  units->per_strip[2] = elements * sizeof(float);
  units->base[3] = esmm_cuda_c_bytes(p);
  *variant = ESMM_STRIP;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  stats->strip_rows = ESMM_STRIP;
  return esmm_strips_mma_run(ctx, p, scratch, false, &functions);
}

ESMM_KERNEL(joint_f32) = {
    .name = "joint_f32",
    .doc = "skips k's that are zero in 32 rows of A or in 32 columns of B, on tensor cores at fp32 accuracy",
    .backend = &esmm_cuda_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .reads = ESMM_FORM(STRIPS),
    .variant_strips = true,
    .device = &(const esmm_cuda_kernel){.sm = 80, .line = line},
    .can_run = esmm_strips_mma_can_run,
    .terms = esmm_cuda_terms,
    .seconds_before = esmm_cuda_seconds_before,
    .term_names = {"multiply-adds", "loading of alive k's", "scanning and packing of a", "writing of c", "",
                   "launches"},
    .cost = {ESMM_GPU_F32_TERM, ESMM_GPU_F32_LOAD, ESMM_GPU_MOVED, ESMM_GPU_WRITTEN, 0.0, ESMM_GPU_LAUNCH_SKIP},
    .workspace = esmm_strips_mma_workspace,
    .run = run,
};
