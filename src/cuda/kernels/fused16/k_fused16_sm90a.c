/*
 * k_fused16_sm90a.c: bf16 and fp16 with few or middling rows, on Hopper. See k_fused16_sm90a.cu.
 *
 * How C is cut: a block has 64 rows and 256 columns. Where tiles do not fill the GPU, up to 8 blocks share a tile's
 * k's.
 */
#include "cuda/kernels/common/aligned.h"

#include <stdio.h>

#define ALIGN 256        /* of the copy of A */
#define LEAST_RANGE 256  /* k's that are worth a block of their own */
#define MOST_AT_ONCE 1.7 /* blocks a multiprocessor: clusters do not find room for two everywhere */
#define TWO_BLOCKS 1.16  /* what stages take where two blocks share a multiprocessor */
#define SENDING .26      /* of a launch: sums of 64 rows from block to block */
#define ODD 3.5e-5       /* of a launch, for each element of C that a block writes one by one */
#define MOST_BLOCKS 1e9  /* of a launch */

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
  while (c.ranks < ESMM_FUSED16_RANKS && (double)(2 * c.ranks * units) <= MOST_AT_ONCE * (double)gpu &&
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
 * A chunk costs its latencies, however little of it is alive; what is, costs stages. Two blocks of a multiprocessor
 * slow each other down a little. In launches: blocks of a cluster send each other sums, and a C whose lines are not of
 * 16 bytes is written element by element.
 */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p);
  const double n = (double)p->n, k = (double)p->k, rows = (double)esmm_min(p->m, ESMM_FUSED16_ROWS);
  const int64_t blocks = c.strips * c.tiles * c.ranks, gpu = esmm_cuda_sms(p);
  const double waves = (double)esmm_ceil_div(blocks, ESMM_FUSED16_BLOCKS * gpu);
  const double chunks = waves * (double)esmm_ceil_div(c.range, ESMM_FUSED16_CHUNK);
  const double odd = esmm_cuda_as_it_is(&p->c) ? 0.0 : ODD * waves * rows * ESMM_FUSED16_COLS / (double)c.ranks;
  units->per_strip[0] = 2.0 * k * n;
  units->base[1] = chunks;
  units->per_strip[2] = (blocks > gpu ? TWO_BLOCKS : 1.0) * chunks * (ESMM_FUSED16_CHUNK / ESMM_FUSED16_STAGE_K);
  units->base[3] = (double)esmm_dtype_size(p->c.dtype) * (double)p->m * n;
  units->base[4] = esmm_cuda_copy_units(p);
  units->base[5] = 1.0 + (c.ranks > 1 ? SENDING * rows / ESMM_FUSED16_ROWS : 0.0) + odd;
  *variant = ESMM_FUSED16_ROWS;
}

/* A copy of A where it needs one, then sums. */
typedef struct layout {
  size_t copy, partial, bytes;
} layout;

static bool lay_out(const esmm_problem *p, const cut *c, layout *l)
{
  *l = (layout){0};
  const size_t blocks = c->ranks > 1 ? (size_t)(c->strips * c->tiles * c->ranks) : 0; /* few: they run at once */
  return esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a), ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, blocks * ESMM_FUSED16_PARTIAL, ALIGN, &l->partial);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const cut c = find_cut(p);
  layout l;
  return lay_out(p, &c, &l) ? l.bytes : SIZE_MAX;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const cut c = find_cut(p);
  const bool by_k = p->a.order == ESMM_COL_MAJOR;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, &c, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_align_a(ctx, p, at + l.copy, &a);
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
                                .partial = c.ranks > 1 ? at + l.partial : 0,
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
  .term_names = {"reading of b", "chunks of k", "stages", "writing of c", "copying of a", "launches"},               \
  .cost = {9.5e-14, 1.32e-6, 7.15e-7, 3.5e-13, 3.7e-6, 9.6e-6}, .workspace = workspace, .run = run

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

ESMM_KERNEL(fused_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(fused_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
