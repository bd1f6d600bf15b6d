/*
 * k_fused16_sm90a.c: bf16 and fp16 with few or middling rows, on Hopper. See k_fused16_sm90a.cu.
 *
 * How C is cut: a block has 64 rows and 256 columns. Where tiles do not fill the GPU, up to 8 blocks share a tile's
 * k's.
 */
#include "cuda/kernels/common/aligned.h"

#include <stdio.h>

#define ALIGN 256       /* of the copy of A */
#define LEAST_RANGE 256 /* k's that are worth a block of their own */
#define MOST_BLOCKS 1e9 /* of a launch */

ESMM_FATBIN(k_fused16_sm90a);

/* One for each order of A. */
typedef struct functions {
  esmm_cuda_function rows, columns;
} functions;

#define FUNCTION(name)                                 \
  {                                                    \
    &fatbin_k_fused16_sm90a, name, ESMM_FUSED16_SHARED \
  }
static const functions bf16 = {FUNCTION("esmm_fused16_bf16"), FUNCTION("esmm_fused16_bf16_by_k")};
static const functions f16 = {FUNCTION("esmm_fused16_f16"), FUNCTION("esmm_fused16_f16_by_k")};

/* ---- how a product is cut ---- */

typedef struct cut {
  int64_t strips, tiles, ranks, range;
} cut;

static cut find_cut(const esmm_problem *p)
{
  const int64_t gpu = esmm_cuda_sms(p);
  cut c = {
      .strips = esmm_ceil_div(p->m, ESMM_FUSED16_ROWS), .tiles = esmm_ceil_div(p->n, ESMM_FUSED16_COLS), .ranks = 1};
  const int64_t units = c.strips * c.tiles;
  while (c.ranks < ESMM_FUSED16_RANKS && 2 * c.ranks * units <= ESMM_FUSED16_BLOCKS * gpu &&
         2 * c.ranks * LEAST_RANGE <= p->k)
    c.ranks *= 2;
  c.range = esmm_round_up(esmm_ceil_div(p->k, c.ranks), 64);
  return c;
}

/* ---- the kernel ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const double units = (double)esmm_ceil_div(p->m, ESMM_FUSED16_ROWS) * (double)esmm_ceil_div(p->n, ESMM_FUSED16_COLS);
  if (p->m < ESMM_WGMMA16_MOST_SIDE && p->n < ESMM_WGMMA16_MOST_SIDE && p->k < ESMM_WGMMA16_MOST_SIDE &&
      units * ESMM_FUSED16_RANKS < MOST_BLOCKS)
    return true;
  (void)snprintf(why, why_bytes, "a is %lld x %lld and b has %lld columns: too large for its counters", (long long)p->m,
                 (long long)p->k, (long long)p->n);
  return false;
}

/*
 * Every tile of columns reads A, every strip of A what it needs of B: from memory once, then from the second-level
 * cache. A chunk costs its latencies, however little it has.
 */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p);
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double slots = (double)esmm_cuda_sms(p) * ESMM_FUSED16_BLOCKS;
  const double waves = (double)(c.strips * c.tiles * c.ranks) / slots;
  units->per_strip[0] = 2.0 * k * n;
  units->per_strip[1] = 2.0 * k * n * (double)(c.strips - 1);
  units->base[1] = 2.0 * m * k * (double)c.tiles;
  units->base[2] = (waves < 1.0 ? 1.0 : waves) * (double)esmm_ceil_div(c.range, ESMM_FUSED16_CHUNK);
  units->base[3] = (double)esmm_dtype_size(p->c.dtype) * m * n;
  units->base[4] = esmm_cuda_copy_units(p);
  *variant = ESMM_FUSED16_ROWS;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return esmm_cuda_copy_bytes(&p->a);
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const cut c = find_cut(p);
  const bool by_k = p->a.order == ESMM_COL_MAJOR;
  esmm_matrix a;
  esmm_status status = esmm_cuda_align_a(ctx, p, (CUdeviceptr)(uintptr_t)scratch, &a);
  if (status != ESMM_OK)
    return status;
  esmm_fused16_params params = {.selector = call->selector,
                                .m = (int32_t)p->m,
                                .n = (int32_t)p->n,
                                .k = (int32_t)p->k,
                                .tiles = (int32_t)c.tiles,
                                .ranks = (int32_t)c.ranks,
                                .range = (int32_t)c.range,
                                .b = w->rows,
                                .b_row = w->rows_ld * 2,
                                .epilogue = esmm_cuda_epilogue(p)};
  status =
      esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(&a), by_k ? p->m : p->k, by_k ? p->k : p->m, a.ld, &params.map_a);
  if (status != ESMM_OK)
    return status;
  const functions *f = self->own;
  const esmm_launch launch = {.grid_x = (unsigned)(c.strips * c.tiles * c.ranks),
                              .threads = ESMM_FUSED16_THREADS,
                              .shared = ESMM_FUSED16_SHARED,
                              .cluster = c.ranks > 1 ? (unsigned)c.ranks : 0};
  stats->strip_rows = ESMM_FUSED16_ROWS;
  return esmm_cuda_launch(ctx, by_k ? &f->columns : &f->rows, &launch, call->stream, &params);
}

#define DESCRIPTOR(id, dtype)                                                                                        \
  .name = "fused_" #id "_sm90a",                                                                                     \
  .doc =                                                                                                             \
      #id ", few or middling rows: scans, packs and multiplies 64 rows of A in one block, on Hopper's tensor cores", \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(ROWS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .variant_strips = true, .device = &about, .own = &id, .can_run = can_run,         \
  .terms = esmm_cuda_terms,                                                                                          \
  .term_names = {"reading of b", "reading again", "chunks of k", "writing of c", "copying of a", "launches"},        \
  .cost = {2.6e-13, 1.2e-13, 1.5e-6, 3e-13, 4e-6, 6e-6}, .workspace = workspace, .run = run

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

ESMM_KERNEL(fused_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(fused_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
