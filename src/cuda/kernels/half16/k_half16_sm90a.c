/*
 * k_half16_sm90a.c: bf16 and fp16 with few nonzeros anywhere in A, on Hopper. See k_half16_sm90a.cu.
 *
 * A is read row by row; a col-major one, or one with odd lines, is copied first. The cost depends on A's overflow,
 * which only the sample counts: where it is not known it includes the second half of all of A, and so the plan takes
 * this kernel only where earlier calls have counted it.
 */
#include "cuda/kernels/common/host.h"
#include "cuda/ops/nm_layout.h"

#include <math.h>
#include <stdio.h>

#define ALIGN 1024
#define GROUP 16 /* pairs of strips that come together */

ESMM_FATBIN(k_half16_sm90a);
static const esmm_cuda_function split = {&fatbin_k_half16_sm90a, "esmm_half16_split", 0};
static const esmm_cuda_function list = {&fatbin_k_half16_sm90a, "esmm_half16_list", 0};
static const esmm_cuda_function bf16 = {&fatbin_k_half16_sm90a, "esmm_half16_bf16", ESMM_HALF16_SHARED};
static const esmm_cuda_function f16 = {&fatbin_k_half16_sm90a, "esmm_half16_f16", ESMM_HALF16_SHARED};

/* ---- how a product is cut ---- */

static int64_t pairs_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_HALF16_ROWS);
}

static int64_t tiles_of(const esmm_problem *p)
{
  return pairs_of(p) * esmm_ceil_div(p->n, ESMM_HALF16_COLS);
}

static int64_t workers_of(const esmm_problem *p)
{
  return esmm_max(1, esmm_cuda_sms(p) / ESMM_HALF16_CLUSTER);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m <= ESMM_HALF16_MOST_SIDE && p->n <= ESMM_HALF16_MOST_SIDE && p->k <= ESMM_HALF16_MOST_SIDE &&
      pairs_of(p) * esmm_nm16_blocks(p->k) <= INT32_MAX && tiles_of(p) <= INT32_MAX - workers_of(p))
    return true;
  return esmm_cuda_too_large(p, why, why_bytes);
}

/* ---- workspace ---- */

typedef struct layout {
  size_t copy, half[2], many, overflow, at, lists, rows, again, agains, bytes;
} layout;

static bool lay_out(const esmm_problem *p, layout *l)
{
  const size_t pairs = (size_t)pairs_of(p), blocks = (size_t)esmm_nm16_blocks(p->k), patches = pairs * blocks;
  const size_t parts = ESMM_HALF16_ROWS / ESMM_HALF16_LISTED;
  const size_t copy = esmm_cuda_copy_bytes(&p->a, true);
  size_t half, lists;
  *l = (layout){0};
  return esmm_size_mul(patches, 2 * ESMM_NM16_BLOCK, &half) &&
         esmm_size_mul(patches, parts * ESMM_HALF16_FEW * 2 * sizeof(uint32_t), &lists) &&
         esmm_cuda_reserve(&l->bytes, copy, ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, half, ALIGN, &l->half[0]) &&
         esmm_cuda_reserve(&l->bytes, half, ALIGN, &l->half[1]) &&
         esmm_cuda_reserve(&l->bytes, patches, ALIGN, &l->many) &&
         esmm_cuda_reserve(&l->bytes, patches * ESMM_HALF16_FEW * sizeof(uint32_t), ALIGN, &l->overflow) &&
         esmm_cuda_reserve(&l->bytes, patches * ESMM_HALF16_ROWS * sizeof(uint16_t), ALIGN, &l->at) &&
         esmm_cuda_reserve(&l->bytes, lists, ALIGN, &l->lists) &&
         esmm_cuda_reserve(&l->bytes, pairs * ESMM_HALF16_ROWS * 2 * sizeof(int32_t), ALIGN, &l->rows) &&
         esmm_cuda_reserve(&l->bytes, patches * sizeof(uint32_t), ALIGN, &l->again) &&
         esmm_cuda_reserve(&l->bytes, pairs * sizeof(int32_t), ALIGN, &l->agains);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  layout l;
  return lay_out(p, &l) ? l.bytes : SIZE_MAX;
}

/* ---- what it costs ---- */

/* Stages of the first half; overflow, in elements times columns of C, or at most as long again: the second half. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double stages = (double)(esmm_ceil_div(tiles_of(p), workers_of(p)) * esmm_nm16_blocks(p->k));
  units->base[0] = stages;
  units->per_overflow[1] = m * n * k;
  units->most_overflow[1] = cost[1] > 0.0 ? stages * cost[0] / cost[1] : 0.0;
  units->base[2] = 2.0 * m * k + (double)(pairs_of(p) * esmm_nm16_blocks(p->k) * (2 * ESMM_NM16_BLOCK)) +
                   ESMM_GPU_EXPOSED * esmm_cuda_c_bytes(p);
  units->base[3] = esmm_cuda_copy_units(&p->a, true);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + (esmm_cuda_in_registers(p) ? 0.0 : ESMM_GPU_ODD * m * n);
  *variant = 0;
}

/* ---- running ---- */

static esmm_half16_params params_of(const esmm_problem *p, const esmm_matrix *a, CUdeviceptr at, const layout *l)
{
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  return (esmm_half16_params){.selector = esmm_cuda_call_of(p)->selector,
                              .a = esmm_cuda_address(a),
                              .a_ld = a->ld,
                              .m = (int32_t)p->m,
                              .n = (int32_t)p->n,
                              .k = (int32_t)p->k,
                              .blocks = (int32_t)esmm_nm16_blocks(p->k),
                              .pairs = (int32_t)pairs_of(p),
                              .group = GROUP,
                              .registers = esmm_cuda_in_registers(p),
                              .half = {at + l->half[0], at + l->half[1]},
                              .many = at + l->many,
                              .overflow = at + l->overflow,
                              .at = at + l->at,
                              .lists = at + l->lists,
                              .rows = at + l->rows,
                              .again = at + l->again,
                              .agains = at + l->agains,
                              .b = w->rows,
                              .b_ld = w->rows_ld,
                              .epilogue = esmm_cuda_epilogue(p)};
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const CUstream stream = esmm_cuda_call_of(p)->stream;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_align_a(ctx, p, true, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_half16_params params = params_of(p, &a, at, &l);
  status = esmm_cuda_tensor_map_16(ctx, params.b, params.b_ld, p->k, params.b_ld, &params.map_b);
  if (status != ESMM_OK)
    return status;
  const esmm_launch of_product = {
      .grid_x = (unsigned)(ESMM_HALF16_CLUSTER * esmm_min(tiles_of(p), workers_of(p))),
      .threads = ESMM_HALF16_THREADS,
      .shared = ESMM_HALF16_SHARED,
      .cluster = ESMM_HALF16_CLUSTER,
  };
  status = esmm_cuda_launch_blocks(ctx, &split, params.pairs * params.blocks, ESMM_HALF16_SPLIT, stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_launch_blocks(ctx, &list, params.pairs * (ESMM_HALF16_ROWS / ESMM_HALF16_LISTED),
                                     ESMM_HALF16_LISTING, stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  return status == ESMM_OK ? esmm_cuda_launch(ctx, self->own, &of_product, stream, &params) : status;
}

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

#define DESCRIPTOR(id, dtype)                                                                                        \
  .name = "half_" #id "_sm90a",                                                                                      \
  .doc = #id ": multiplies two of each four k's of A on Hopper's sparse tensor cores, adds what else there is",      \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(ROWS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = &id, .can_run = can_run, .terms = esmm_cuda_terms,       \
  .term_names = {"stages of 256 columns", "rests of a", "splitting of a and writing of c", "copying of a",           \
                 [ESMM_COST_TERMS - 1] = "launches"},                                                                \
  .cost = {ESMM_GPU_STAGE_HALF, ESMM_GPU_HALF_OVERFLOW, ESMM_GPU_MOVED, ESMM_GPU_LAUNCH_NEXT,                        \
           [ESMM_COST_TERMS - 1] = ESMM_GPU_LAUNCH_TWO},                                                             \
  .workspace = workspace, .run = run

ESMM_KERNEL(half_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(half_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
