/*
 * k_dense_f32_mma.c: dense product at fp32 accuracy by mma.sync, for every GPU from sm_80 on. See strips_mma.cuh.
 *
 * Takes any dtype, order and shape, because extraction makes strips of everything; that is one pass over A.
 */
#include "cuda/kernels/f32/strips_mma.h"

ESMM_FATBIN(k_dense_f32_mma);
static const esmm_cuda_function functions[3] = ESMM_STRIPS_MMA_FUNCTIONS(fatbin_k_dense_f32_mma, "esmm_dense_f32_mma");

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  units->base[0] = units->base[1] = esmm_strips_mma_work(p);
  units->base[2] = (double)p->m * (double)p->k * (double)(esmm_dtype_size(p->a.dtype) + sizeof(float));
  units->base[3] = esmm_cuda_c_bytes(p);
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)stats;
  return esmm_strips_mma_run(ctx, p, scratch, true, &functions);
}

ESMM_KERNEL(dense_f32_mma) = {
    .name = "dense_f32_mma",
    .doc = "multiplies everything, on tensor cores at fp32 accuracy; any dtype, order and shape",
    .backend = &esmm_cuda_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .reads = ESMM_FORM(STRIPS),
    .device = &(const esmm_cuda_kernel){.sm = 80, .line = line},
    .can_run = esmm_strips_mma_can_run,
    .terms = esmm_cuda_terms,
    .seconds_before = esmm_cuda_seconds_before,
    .term_names = {"multiply-adds", "loading of k's", "packing of a", "writing of c", "", "launches"},
    .cost = {ESMM_GPU_F32_TERM, ESMM_GPU_F32_LOAD, ESMM_GPU_MOVED, ESMM_GPU_WRITTEN, 0.0, ESMM_GPU_LAUNCH_TWO},
    .workspace = esmm_strips_mma_workspace,
    .run = run,
};
