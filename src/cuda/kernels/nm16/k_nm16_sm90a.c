/*
 * k_nm16_sm90a.c: bf16 and fp16 with 2:4 weights on Hopper. See k_nm16_sm90a.cu.
 *
 * Tiles of 256 rows go to persistent pairs of blocks; fewer rows, and products too small to fill the GPU with those, to
 * tiles of 16 to 128 rows with their k's split in a cluster. A is read as it is where TMA can do that, else copied
 * first; for the lower tiles that is a row-major A.
 */
#include "cuda/kernels/common/host.h"
#include "cuda/ops/nm.h"

#include <math.h>
#include <stdio.h>

#define LEAST_BLOCKS 4 /* of 64 k's that are worth a part */
#define GROUP 16       /* pairs of column tiles that come together */

ESMM_FATBIN(k_nm16_sm90a);

/* The kernels of a dtype. */
typedef struct functions {
  esmm_cuda_function tall, by_k;
  esmm_cuda_function low[4]; /* of 16, 32, 64 and 128 rows */
} functions;

#define FUNCTION(name, shared)           \
  {                                      \
    &fatbin_k_nm16_sm90a, name, (shared) \
  }
#define FUNCTIONS(id)                                                           \
  {                                                                             \
    .tall = FUNCTION("esmm_nm16_" #id, ESMM_NM16_TALL_SHARED),                  \
    .by_k = FUNCTION("esmm_nm16_" #id "_by_k", ESMM_NM16_TALL_SHARED), .low = { \
      FUNCTION("esmm_nm16_" #id "_16", ESMM_NM16_LOW_SHARED(16)),               \
      FUNCTION("esmm_nm16_" #id "_32", ESMM_NM16_LOW_SHARED(32)),               \
      FUNCTION("esmm_nm16_" #id "_64", ESMM_NM16_LOW_SHARED(64)),               \
      FUNCTION("esmm_nm16_" #id "_128", ESMM_NM16_LOW_SHARED(128))              \
    }                                                                           \
  }
static const functions bf16 = FUNCTIONS(bf16), f16 = FUNCTIONS(f16);

/* ---- how a product is cut ---- */

typedef struct cut {
  int rows;      /* of a tile: ESMM_NM16_TALL, or fewer */
  int64_t tiles; /* of C; pairs where they are tall */
  int64_t ranks; /* blocks that share a tile's k's */
  double stages; /* of 64 k's, that the busiest multiprocessor goes through, one after the other */
} cut;

static cut cut_tall(const esmm_problem *p)
{
  const int64_t pairs = esmm_ceil_div(esmm_nm16_tiles(p->n), ESMM_NM16_CLUSTER);
  const int64_t tiles = pairs * esmm_ceil_div(p->m, ESMM_NM16_TALL), workers = esmm_cuda_sms(p) / ESMM_NM16_CLUSTER;
  return (cut){.rows = ESMM_NM16_TALL,
               .tiles = tiles,
               .ranks = 1,
               .stages = (double)(esmm_ceil_div(tiles, workers) * esmm_nm16_blocks(p->k))};
}

/* Parts along k where tiles do not fill the GPU; blocks of up to 64 rows lie two on a multiprocessor. */
static cut cut_low(const esmm_problem *p, int rows)
{
  const int64_t blocks = esmm_nm16_blocks(p->k), at_once = esmm_cuda_sms(p) * (rows <= 64 ? 2 : 1);
  cut c = {.rows = rows, .tiles = esmm_nm16_tiles(p->n) * esmm_ceil_div(p->m, rows), .ranks = 1};
  while (c.ranks < ESMM_NM16_RANKS && 2 * c.ranks * c.tiles <= esmm_cuda_most_blocks(at_once, 2 * c.ranks) &&
         2 * c.ranks * LEAST_BLOCKS <= blocks)
    c.ranks *= 2;
  c.stages = (double)(esmm_ceil_div(c.tiles * c.ranks, at_once) * esmm_ceil_div(blocks, c.ranks));
  return c;
}

static cut find_cut(const esmm_problem *p)
{
  if (p->m <= 64)
    return cut_low(p, p->m <= 16 ? 16 : p->m <= 32 ? 32 : 64);
  const cut low = cut_low(p, ESMM_NM16_LOW), tall = cut_tall(p);
  return p->m <= ESMM_NM16_LOW || ESMM_GPU_STAGE_LOW * low.stages < tall.stages ? low : tall;
}

/* ---- A ---- */

/* One row is a line, however far the next would be. */
static esmm_matrix plain(const esmm_matrix *a)
{
  esmm_matrix m = *a;
  if (m.rows == 1 && (m.order == ESMM_ROW_MAJOR || m.ld == 1)) {
    m.order = ESMM_ROW_MAJOR;
    m.ld = esmm_round_up(m.cols, 8);
  }
  return m;
}

static bool by_rows(int rows)
{
  return rows != ESMM_NM16_TALL;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const int rows = find_cut(p).rows;
  const esmm_matrix a = plain(&p->a);
  return esmm_cuda_needs_copy(&a, by_rows(rows)) ? esmm_cuda_copy_bytes(&p->a, by_rows(rows)) : 0;
}

static esmm_status get_a(esmm_ctx *ctx, const esmm_problem *p, int rows, CUdeviceptr at, esmm_matrix *a)
{
  *a = plain(&p->a);
  return esmm_cuda_needs_copy(a, by_rows(rows)) ? esmm_cuda_extract_a(ctx, p, by_rows(rows), at, a) : ESMM_OK;
}

/* ---- the kernel ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m <= ESMM_NM16_MOST_SIDE && p->n <= ESMM_NM16_MOST_SIDE && p->k <= ESMM_NM16_MOST_SIDE &&
      (double)esmm_nm16_tiles(p->n) * (double)esmm_ceil_div(p->m, ESMM_NM16_LOW) < (double)(INT32_MAX / 16))
    return true;
  return esmm_cuda_too_large(p, why, why_bytes);
}

/* Arithmetic and reading work side by side: whichever takes longer is what the product takes. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const cut c = find_cut(p);
  const esmm_matrix a = plain(&p->a);
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double read = (double)(esmm_nm16_blocks(p->k) * esmm_nm16_tiles(p->n) * ESMM_NM16_BLOCK) + 2.0 * k * m;
  const int which = c.rows == ESMM_NM16_TALL ? 0 : 1;
  units->base[2] = ESMM_GPU_EXPOSED * esmm_cuda_c_bytes(p);
  if (c.rows > 64 && cost[which] * c.stages >= cost[2] * read)
    units->base[which] = c.stages;
  else
    units->base[2] += read;
  units->base[3] = c.ranks > 1 ? 1.0 : 0.0;
  units->base[4] = esmm_cuda_copy_units(&a, by_rows(c.rows));
  units->base[ESMM_COST_TERMS - 1] =
      1.0 + (esmm_cuda_in_registers(p) || c.rows != ESMM_NM16_TALL ? 0.0 : ESMM_GPU_ODD * m * n);
  *variant = c.rows;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)stats;
  const functions *of = self->own;
  const cut c = find_cut(p);
  const bool tall = c.rows == ESMM_NM16_TALL;
  esmm_matrix a;
  esmm_status status = get_a(ctx, p, c.rows, (CUdeviceptr)(uintptr_t)scratch, &a);
  if (status != ESMM_OK)
    return status;
  const bool by_k = a.order == ESMM_COL_MAJOR;
  esmm_nm16_params params = {.selector = esmm_cuda_call_of(p)->selector,
                             .b = esmm_cuda_b(p)->nm,
                             .m = (int32_t)p->m,
                             .n = (int32_t)p->n,
                             .blocks = (int32_t)esmm_nm16_blocks(p->k),
                             .group = GROUP,
                             .registers = esmm_cuda_in_registers(p),
                             .epilogue = esmm_cuda_epilogue(p)};
  status = esmm_cuda_tensor_map_boxes_16(ctx, esmm_cuda_address(&a), by_k ? p->m : p->k, by_k ? p->k : p->m, a.ld,
                                         ESMM_WGMMA16_BOX, (unsigned)esmm_min(c.rows, ESMM_WGMMA16_BOX), &params.map_a);
  if (status != ESMM_OK)
    return status;
  const int64_t workers = esmm_cuda_sms(p) / ESMM_NM16_CLUSTER;
  const int low = c.rows == 16 ? 0 : c.rows == 32 ? 1 : c.rows == 64 ? 2 : 3;
  const esmm_cuda_function *function = !tall ? &of->low[low] : by_k ? &of->by_k : &of->tall;
  const esmm_launch launch = {.grid_x =
                                  (unsigned)(tall ? ESMM_NM16_CLUSTER * esmm_min(c.tiles, workers) : c.tiles * c.ranks),
                              .threads = tall ? ESMM_NM16_TALL_THREADS : ESMM_NM16_LOW_THREADS,
                              .shared = function->shared,
                              .cluster = tall          ? ESMM_NM16_CLUSTER
                                         : c.ranks > 1 ? (unsigned)c.ranks
                                                       : 0};
  return esmm_cuda_launch(ctx, function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

#define DESCRIPTOR(id, dtype)                                                                                  \
  .name = "nm_" #id "_sm90a",                                                                                  \
  .doc = #id ": 2:4 weights, multiplies the k's that they kept, on Hopper's sparse tensor cores (wgmma.sp)",   \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(NM16),                 \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = &id, .can_run = can_run, .terms = esmm_cuda_terms, \
  .term_names = {"stages of 256 rows", "stages of 128 rows", "reading and writing",                            \
                 "adding of parts",    "copying of a",       "launches"},                                      \
  .cost = {ESMM_GPU_STAGE_HALF,  ESMM_GPU_STAGE_HALF * ESMM_GPU_STAGE_LOW,                                     \
           ESMM_GPU_READ,        ESMM_GPU_CLUSTER,                                                             \
           ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH},                                                             \
  .workspace = workspace, .run = run

ESMM_KERNEL(nm_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(nm_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
