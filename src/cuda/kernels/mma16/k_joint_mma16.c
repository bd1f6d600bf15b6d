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

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, esmm_dtype dtype, char *why, size_t why_bytes)
{
  if (!esmm_mma16_can_run(ctx, p, dtype, ESMM_MMA16_JOINT_SHARED, why, why_bytes))
    return false;
  if (extract_blocks(p) <= INT32_MAX)
    return true;
  (void)snprintf(why, why_bytes, "a is %lld x %lld: too large for its counters", (long long)p->m, (long long)p->k);
  return false;
}

static bool can_run_bf16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_BF16, why, why_bytes);
}

static bool can_run_f16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_F16, why, why_bytes);
}

/* The lines of a k are there already. */
static bool as_it_is(const esmm_matrix *a)
{
  return a->order == ESMM_COL_MAJOR && esmm_cuda_in_lines(a) && a->ld < (int64_t)1 << 31;
}

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  (void)cost;
  const double strip = p->sample.strip[ESMM_SAMPLE_HEIGHTS - 1], joint = p->sample.joint[ESMM_SAMPLE_HEIGHTS - 1];
  const double rounds = esmm_mma16_rounds(p, ESMM_TILE, ESMM_TILE), bytes = 2.0 * (double)p->m * (double)p->k;
  units[0] = rounds * (double)p->k / ESMM_MMA16_K * joint;
  units[1] = bytes;
  units[2] = as_it_is(&p->a) ? 0.0 : bytes * strip;
  units[3] = rounds * (double)esmm_cuda_k_padded(p->k);
  units[4] = (double)p->m * (double)p->n;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = ESMM_TILE;
}

/* The bitmaps, then, 256 bytes aligned, the lines. */
static size_t bits_bytes(const esmm_problem *p)
{
  return (size_t)esmm_round_up(strips_of(p) * (esmm_cuda_k_padded(p->k) / 8), 256);
}

static size_t workspace(const esmm_problem *p)
{
  size_t bytes = 0;
  if (!as_it_is(&p->a) &&
      !esmm_size_mul((size_t)strips_of(p) * ESMM_TILE * sizeof(uint16_t), (size_t)esmm_cuda_k_padded(p->k), &bytes))
    return SIZE_MAX;
  return esmm_size_add(bytes, bits_bytes(p), &bytes) ? bytes : SIZE_MAX;
}

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const CUdeviceptr bits = (CUdeviceptr)(uintptr_t)scratch;
  const int64_t k_padded = esmm_cuda_k_padded(p->k);
  esmm_mma16_params params = esmm_mma16_params_of(p);
  esmm_mma16_extract_params scan = {
      .selector = p->call->selector, .a = esmm_cuda_matrix(&p->a), .bits = bits, .words = k_padded / 32};
  params.a_bits = bits;
  params.b_bits = p->w->cuda->tiles;
  params.words = k_padded / 32;
  params.a_strip = ESMM_TILE;
  if (!as_it_is(&p->a)) {
    scan.data = params.a = bits + bits_bytes(p);
    params.a_ld = ESMM_TILE;
    params.a_strip = ESMM_TILE * k_padded;
  }
  const esmm_launch scan_launch = {.grid_x = (unsigned)extract_blocks(p), .threads = ESMM_MMA16_EXTRACT_THREADS};
  esmm_status status = esmm_cuda_launch(ctx, &extract, &scan_launch, p->call->stream, &scan);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  if (status != ESMM_OK)
    return status;
  if (p->call->a_strips)
    *p->call->a_strips = (esmm_strips){.bits = bits, .strips = strips_of(p), .k_padded = k_padded};
  stats->strip_rows = ESMM_TILE;
  const esmm_launch launch = esmm_mma16_launch(p, ESMM_TILE, ESMM_TILE, ESMM_MMA16_JOINT_SHARED);
  return esmm_cuda_launch(ctx, p->a.dtype == ESMM_BF16 ? &product_bf16 : &product_f16, &launch, p->call->stream,
                          &params);
}

#define TERMS                                                                                           \
  {                                                                                                     \
    "steps of 128 x 128", "scanning of a", "packing of a", "listing of k's", "writing of c", "launches" \
  }
#define COST                                   \
  {                                            \
    4.7e-7, 3e-13, 3e-13, 1e-10, 1e-12, 2.5e-5 \
  }

ESMM_KERNEL(joint_bf16_mma) = {
    .name = "joint_bf16_mma",
    .doc = "skips k's that are zero in 128 rows of A or 128 columns of B, bf16 on tensor cores (mma.sync)",
    .backend = ESMM_CUDA,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .sm = 80,
    .can_run = can_run_bf16,
    .terms = terms,
    .term_names = TERMS,
    .cost = COST,
    .workspace = workspace,
    .run = run,
};

ESMM_KERNEL(joint_f16_mma) = {
    .name = "joint_f16_mma",
    .doc = "skips k's that are zero in 128 rows of A or 128 columns of B, fp16 on tensor cores (mma.sync)",
    .backend = ESMM_CUDA,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .sm = 80,
    .can_run = can_run_f16,
    .terms = terms,
    .term_names = TERMS,
    .cost = COST,
    .workspace = workspace,
    .run = run,
};
