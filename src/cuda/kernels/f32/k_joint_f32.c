/*
 * k_joint_f32.c: joint skipping on tensor cores at fp32 accuracy. See strips_mma.cuh.
 *
 * Its time follows two things: the terms of the joint, and the k's that are alive anywhere in a block, which have to be
 * listed and loaded.
 */
#include "cuda/kernels/f32/strips_mma.h"

ESMM_FATBIN(k_joint_f32);
static const esmm_cuda_function functions[3] = ESMM_STRIPS_MMA_FUNCTIONS(fatbin_k_joint_f32, "esmm_joint_f32");

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  (void)cost;
  const int level = ESMM_SAMPLE_HEIGHTS - 1;
  units[0] = esmm_strips_mma_work(p) * p->sample.joint[level];
  units[1] = esmm_strips_mma_work(p) * esmm_cuda_union(p, ESMM_STRIPS_MMA_COLS / ESMM_STRIP);
  units[2] =
      (double)p->m * (double)p->k * ((double)esmm_dtype_size(p->a.dtype) + sizeof(float) * p->sample.strip[level]);
  units[3] = (double)p->m * (double)p->n;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = ESMM_STRIP;
}

static size_t workspace(const esmm_problem *p)
{
  return esmm_cuda_strips_bytes(p->m, p->k);
}

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  stats->strip_rows = ESMM_STRIP;
  return esmm_strips_mma_run(ctx, p, scratch, false, &functions);
}

ESMM_KERNEL(joint_f32) = {
    .name = "joint_f32",
    .doc = "skips k's that are zero in 32 rows of A or in 32 columns of B, on tensor cores at fp32 accuracy",
    .backend = ESMM_CUDA,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .sm = 80,
    .reads_strips = true,
    .can_run = esmm_strips_mma_can_run,
    .terms = terms,
    .term_names = {"multiply-adds", "loading of alive k's", "scanning and packing of a", "writing of c", "",
                   "launches"},
    .cost = {2.3e-14, 1.17e-14, 3e-13, 5e-13, 0.0, 1.2e-5},
    .workspace = workspace,
    .run = run,
};
