/*
 * k_joint_mma16.c: skipping product of bf16 or fp16 by mma.sync, for every GPU from sm_80 on. See k_joint_mma16.cu.
 */
#include "cuda/kernels/mma16/mma16.h"

ESMM_FATBIN(k_joint_mma16);
static const esmm_cuda_function extract = {&fatbin_k_joint_mma16, "esmm_joint_mma16_extract", 0};
static const esmm_cuda_function product_bf16 = {&fatbin_k_joint_mma16, "esmm_joint_bf16", ESMM_MMA16_JOINT_SHARED};
static const esmm_cuda_function product_f16 = {&fatbin_k_joint_mma16, "esmm_joint_f16", ESMM_MMA16_JOINT_SHARED};

static int64_t strips_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_TILE);
}

static int64_t extract_blocks(const esmm_problem *p)
{
  return strips_of(p) * esmm_ceil_div(esmm_cuda_k_padded(p->k), ESMM_MMA16_EXTRACT_K);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (!esmm_mma16_can_run(p, ESMM_MMA16_JOINT_SHARED, why, why_bytes))
    return false;
  return extract_blocks(p) <= INT32_MAX || esmm_cuda_too_large(p, why, why_bytes);
}

/* The lines of a k are there already. */
static bool as_it_is(const esmm_matrix *a)
{
  return a->order == ESMM_COL_MAJOR && esmm_cuda_in_lines(a) && a->ld < (int64_t)1 << 31;
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double rounds = esmm_mma16_rounds(p, ESMM_TILE, ESMM_TILE), bytes = 2.0 * (double)p->m * (double)p->k;
  units->per_joint[0] = rounds * (double)p->k / ESMM_MMA16_K;
  units->base[1] = bytes;
  units->per_strip[2] = as_it_is(&p->a) ? 0.0 : bytes;
  units->base[3] = rounds * (double)esmm_cuda_k_padded(p->k);
  units->base[4] = esmm_cuda_c_bytes(p);
  *variant = ESMM_TILE;
}

/* The bitmaps, then, 256 bytes aligned, the lines. */
static size_t bits_bytes(const esmm_problem *p)
{
  return (size_t)esmm_round_up(strips_of(p) * (esmm_cuda_k_padded(p->k) / 8), 256);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  size_t bytes = 0;
  if (!as_it_is(&p->a) &&
      !esmm_size_mul((size_t)strips_of(p) * ESMM_TILE * sizeof(uint16_t), (size_t)esmm_cuda_k_padded(p->k), &bytes))
    return SIZE_MAX;
  return esmm_size_add(bytes, bits_bytes(p), &bytes) ? bytes : SIZE_MAX;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const CUdeviceptr bits = (CUdeviceptr)(uintptr_t)scratch;
  const int64_t k_padded = esmm_cuda_k_padded(p->k);
  esmm_mma16_params params = esmm_mma16_params_of(p);
  esmm_mma16_extract_params scan = {
      .selector = esmm_cuda_call_of(p)->selector, .a = esmm_cuda_matrix(&p->a), .bits = bits, .words = k_padded / 32};
  params.a_bits = bits;
  params.b_bits = esmm_cuda_b(p)->tiles;
  params.words = k_padded / 32;
  params.a_strip = ESMM_TILE;
  if (!as_it_is(&p->a)) {
    scan.data = params.a = bits + bits_bytes(p);
    params.a_ld = ESMM_TILE;
    params.a_strip = ESMM_TILE * k_padded;
  }
  esmm_status status = esmm_cuda_launch_blocks(ctx, &extract, extract_blocks(p), ESMM_MMA16_EXTRACT_THREADS,
                                               esmm_cuda_call_of(p)->stream, &scan);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  if (status != ESMM_OK)
    return status;
  if (esmm_cuda_call_of(p)->a_strips)
    *esmm_cuda_call_of(p)->a_strips = (esmm_strips){.bits = bits, .strips = strips_of(p), .k_padded = k_padded};
  stats->strip_rows = ESMM_TILE;
  const esmm_launch launch = esmm_mma16_launch(p, ESMM_TILE, ESMM_TILE, ESMM_MMA16_JOINT_SHARED);
  return esmm_cuda_launch(ctx, self->own, &launch, esmm_cuda_call_of(p)->stream, &params);
}

#define DESCRIPTOR(id, dtype)                                                                                          \
  .name = "joint_" #id "_mma",                                                                                         \
  .doc = "skips k's that are zero in 128 rows of A or 128 columns of B, " #id " on tensor cores (mma.sync)",           \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(ROWS16),   \
  .dtypes = ESMM_DTYPE_BIT(dtype), .variant_strips = true, .device = &about, .own = &product_##id, .can_run = can_run, \
  .terms = esmm_cuda_terms,                                                                                            \
  .term_names = {"steps of 128 x 128", "scanning of a", "packing of a", "listing of k's", "writing of c", "launches"}, \
  .cost = {ESMM_GPU_STAGE_LISTED, ESMM_GPU_MOVED,   ESMM_GPU_MOVED,                                                    \
           ESMM_GPU_LISTED,       ESMM_GPU_WRITTEN, ESMM_GPU_LAUNCH_SKIP},                                             \
  .workspace = workspace, .run = run

static const esmm_cuda_kernel about = {.sm = 80, .line = line, .stand_in = true};

ESMM_KERNEL(joint_bf16_mma) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(joint_f16_mma) = {DESCRIPTOR(f16, ESMM_F16)};
