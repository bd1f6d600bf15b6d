/*
 * k_ladder.c: the kernels of the prior work, by number, for the ablation figures. See k_ladder.cu.
 *
 * Extraction is a launch of its own, timed apart, except in 25 and 28: there it lies inside their only launch. Number
 * 30 also makes B's bitmaps of 8 columns on every call, as part of extraction: prepare keeps those of 32.
 */
#include "cuda/cuda.h"
#include "ladder_params.h"

#include <stdio.h>

#define TILE LADDER_TILE
#define THREADS LADDER_THREADS
#define WARPS (THREADS / 32)

ESMM_FATBIN(k_ladder);

typedef enum { DENSE, B_ONLY, JOINT } ladder_skip;

typedef struct ladder {
  esmm_cuda_function multiply;
  int64_t strip_rows; /* 0: A is not scanned */
  int64_t strip_cols;
  ladder_skip skip;
  bool fused;
} ladder;

#define VARIANT(number, strips, skip, fused) \
  static const ladder variant_##number = {{&fatbin_k_ladder, "ladder_" #number, LADDER_SHARED}, strips, skip, fused}

VARIANT(10, LADDER_10, DENSE, false);
VARIANT(17, LADDER_17, B_ONLY, false);
VARIANT(20, LADDER_20, JOINT, false);
VARIANT(21, LADDER_21, JOINT, false);
VARIANT(25, LADDER_25, JOINT, true);
VARIANT(28, LADDER_28, JOINT, true);
VARIANT(29, LADDER_29, JOINT, false);
VARIANT(30, LADDER_30, JOINT, false);

static const esmm_cuda_function extract_8 = {&fatbin_k_ladder, "ladder_extract_8", 0};
static const esmm_cuda_function extract_32 = {&fatbin_k_ladder, "ladder_extract_32", 0};
static const esmm_cuda_function extract_64 = {&fatbin_k_ladder, "ladder_extract_64", 0};
static const esmm_cuda_function b_bits8 = {&fatbin_k_ladder, "ladder_b_bits8", 0};

static int64_t tiles(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, TILE) * esmm_ceil_div(p->n, TILE);
}

static int64_t words(const esmm_problem *p)
{
  return esmm_cuda_k_padded(p->k) / 32;
}

/* Bitmap words of A, and of B in strips of 8 columns, that this variant makes. */
static int64_t a_words(const esmm_problem *p, const ladder *l)
{
  return l->strip_rows ? esmm_ceil_div(p->m, l->strip_rows) * words(p) : 0;
}

static int64_t b_words(const esmm_problem *p, const ladder *l)
{
  return l->strip_cols == 8 ? 4 * esmm_ceil_div(p->n, ESMM_STRIP) * words(p) : 0;
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  const ladder *l = self->own;
  const esmm_cuda_properties *gpu = esmm_cuda_get(p->ctx);
  const int64_t most = INT32_MAX / 2;
  if (gpu->shared_per_block < LADDER_SHARED) {
    (void)snprintf(why, why_bytes, "a block may have %d bytes of shared memory, it needs %d", gpu->shared_per_block,
                   LADDER_SHARED);
    return false;
  }
  if (l->fused && !gpu->cooperative) {
    (void)snprintf(why, why_bytes, "this GPU has no cooperative launches");
    return false;
  }
  if (p->m > most || p->n > most || p->k > most || tiles(p) > most || a_words(p, l) > most || b_words(p, l) > most) {
    (void)snprintf(why, why_bytes, "the ladder counts tiles and bitmap words to 2^30: the matrices are too large");
    return false;
  }
  return true;
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)cost;
  const ladder *l = self->own;
  const double sums = (double)esmm_round_up(p->m, TILE) * (double)esmm_round_up(p->n, TILE), work = sums * (double)p->k;
  if (l->skip == JOINT)
    units->per_joint[0] = work;
  else
    units->base[0] = l->skip == B_ONLY ? work * p->w->strip_density : work;
  units->base[1] = work / 32;
  units->base[2] = l->strip_rows ? (double)p->m * (double)p->k * (double)esmm_dtype_size(p->a.dtype) : 0.0;
  *variant = l->strip_rows;
}

static size_t a_bytes(const esmm_problem *p, const ladder *l)
{
  return (size_t)esmm_round_up(a_words(p, l) * (int64_t)sizeof(uint32_t), 256);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  const ladder *l = self->own;
  return a_bytes(p, l) + (size_t)b_words(p, l) * sizeof(uint32_t);
}

/* A warp makes a word, then the next that nobody has: blocks enough to fill the GPU. */
static esmm_status launch_words(esmm_ctx *ctx, const esmm_cuda_function *function, int64_t count, CUstream stream,
                                const ladder_params *params)
{
  const int64_t blocks = esmm_min(esmm_ceil_div(count, WARPS), 32 * (int64_t)esmm_cuda_get(ctx)->multiprocessors);
  return esmm_cuda_launch(ctx, function, &(esmm_launch){.grid_x = (unsigned)blocks, .threads = THREADS}, stream,
                          params);
}

static esmm_status extract(esmm_ctx *ctx, const esmm_problem *p, const ladder_params *params, const ladder *l)
{
  const esmm_cuda_function *function = l->strip_rows == 8    ? &extract_8
                                       : l->strip_rows == 32 ? &extract_32
                                                             : &extract_64;
  esmm_status status = launch_words(ctx, function, a_words(p, l), esmm_cuda_call_of(p)->stream, params);
  if (status == ESMM_OK && params->b_bits8)
    status = launch_words(ctx, &b_bits8, b_words(p, l) / 4, esmm_cuda_call_of(p)->stream, params);
  return status == ESMM_OK ? esmm_cuda_mark_extracted(ctx, p) : status;
}

static esmm_status multiply(esmm_ctx *ctx, const esmm_problem *p, const ladder_params *params, const ladder *l)
{
  esmm_launch launch = {.grid_x = (unsigned)tiles(p), .threads = THREADS, .shared = LADDER_SHARED};
  if (l->fused) {
    int blocks = 0;
    const esmm_status status = esmm_cuda_occupancy(ctx, &l->multiply, THREADS, LADDER_SHARED, &blocks);
    if (status != ESMM_OK)
      return status;
    launch.grid_x = (unsigned)(blocks * esmm_cuda_get(ctx)->multiprocessors);
    launch.cooperative = 1;
  }
  return esmm_cuda_launch(ctx, &l->multiply, &launch, esmm_cuda_call_of(p)->stream, params);
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const ladder *l = self->own;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  const ladder_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                .m = p->m,
                                .n = p->n,
                                .k = p->k,
                                .a = esmm_cuda_matrix(&p->a),
                                .b = esmm_cuda_call_of(p)->b,
                                .a_bits = l->strip_rows ? at : 0,
                                .b_bits8 = l->strip_cols == 8 ? at + a_bytes(p, l) : 0,
                                .epilogue = esmm_cuda_epilogue(p)};
  stats->strip_rows = l->strip_rows;
  stats->strip_cols = ESMM_STRIP; /* also in 30: the densities of B and of the joint are counted at 32 columns */
  if (l->skip == B_ONLY)
    stats->joint_density = p->w->strip_density;
  if (l->skip == JOINT && esmm_cuda_call_of(p)->a_strips)
    *esmm_cuda_call_of(p)->a_strips = (esmm_strips){
        .bits = params.a_bits, .strips = esmm_ceil_div(p->m, l->strip_rows), .k_padded = esmm_cuda_k_padded(p->k)};
  const bool apart = l->strip_rows && !l->fused;
  const esmm_status status = apart ? extract(ctx, p, &params, l) : ESMM_OK;
  return status == ESMM_OK ? multiply(ctx, p, &params, l) : status;
}

static const esmm_cuda_kernel about = {.sm = 80, .line = line};

#define DESCRIPTOR(id, place, skips)                                                                                 \
  .name = "ladder_" #id, .backend = &esmm_cuda_backend, .reads = ESMM_FORM(STRIPS),                                  \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_REFERENCE | (skips), .variant_strips = true, .device = &about,    \
  .own = &variant_##place, .can_run = can_run, .terms = esmm_cuda_terms, .seconds_before = esmm_cuda_seconds_before, \
  .workspace = workspace, .run = run,                                                                                \
  .term_names = {"multiply-adds", "chunks of k", "scanning of a", "", "", "launches"},                               \
  .cost = {7e-14, 1e-13, 4e-13, 0.0, 0.0, 1.2e-5}

ESMM_KERNEL(ladder_10_dense) = {
    DESCRIPTOR(10_dense, 10, 0),
    .doc = "dense fp32 multiply-adds, no tensor cores",
};

ESMM_KERNEL(ladder_17_b_only) = {
    DESCRIPTOR(17_b_only, 17, ESMM_KERNEL_SKIPS),
    .doc = "skips k's that are zero in 32 columns of B; does not look at A's zeros",
};

ESMM_KERNEL(ladder_20_joint_64x32) = {
    DESCRIPTOR(20_joint_64x32, 20, ESMM_KERNEL_SKIPS),
    .doc = "skips k's that are zero in 64 rows of A or in 32 columns of B; A's bitmaps in a launch of their own",
};

ESMM_KERNEL(ladder_21_joint_8x32) = {
    DESCRIPTOR(21_joint_8x32, 21, ESMM_KERNEL_SKIPS),
    .doc = "as 20, with strips of 8 rows",
};

ESMM_KERNEL(ladder_25_fused_64x32) = {
    DESCRIPTOR(25_fused_64x32, 25, ESMM_KERNEL_SKIPS),
    .doc = "as 20, in one launch: A's bitmaps, a barrier over the grid, the product",
};

ESMM_KERNEL(ladder_28_branchless_8x32) = {
    DESCRIPTOR(28_branchless_8x32, 28, ESMM_KERNEL_SKIPS),
    .doc = "as 21, in one launch, and walks the joints' set bits: no test of every k",
};

ESMM_KERNEL(ladder_29_joint_32x32) = {
    DESCRIPTOR(29_joint_32x32, 29, ESMM_KERNEL_SKIPS),
    .doc = "strips of 32 and 32; skips 32 k's of a block, 8 of a warp, then single ones; joints in shared memory",
};

ESMM_KERNEL(ladder_30_joint_8x8) = {
    DESCRIPTOR(30_joint_8x8, 30, ESMM_KERNEL_SKIPS),
    .doc =
        "strips of 8 and 8: eight lanes walk the joint of their own tile; B's bitmaps of 8 columns count as extraction",
};
