/*
 * k_fused16_sm90a.c: bf16 and fp16 with few or middling rows, on Hopper. See k_fused16_sm90a.cu.
 *
 * How C is cut: a tile has 64 rows and 256 columns. Where tiles do not fill the GPU, up to 8 blocks share a tile's k's;
 * where there are too many of them, a block does several, and scans A once for all.
 */
#include "cuda/kernels/common/host.h"

#include <math.h>
#include <stdio.h>

#define ALIGN 256       /* of the copy of A */
#define CHUNK 256       /* k's that scanning is counted in */
#define LEAST_RANGE 256 /* k's that are worth a block */
#define MOST_EACH 64    /* tiles of a block */
#define TILE_CHUNKS 3   /* chunks' time that a tile takes beside its stages */
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
  int64_t strips, tiles;
  int64_t each;   /* tiles of a block */
  int64_t groups; /* of tiles: strips * groups * ranks blocks */
  int64_t ranks, range;
} cut;

/* How many tiles a block should do: more of them scan A less often, but may leave multiprocessors without work. */
static int64_t find_each(const cut *c, int64_t k, int64_t gpu)
{
  const double scan = (double)esmm_ceil_div(k, CHUNK);
  int64_t best = 1;
  double least = INFINITY;
  for (int64_t each = 1; each <= esmm_min(c->tiles, MOST_EACH); each++) {
    const int64_t waves = esmm_ceil_div(c->strips * esmm_ceil_div(c->tiles, each), gpu);
    const double seconds = (double)waves * (scan + (double)(TILE_CHUNKS * each));
    if (seconds < least) {
      least = seconds;
      best = each;
    }
  }
  return best;
}

static cut find_cut(const esmm_problem *p)
{
  const int64_t gpu = esmm_cuda_sms(p);
  cut c = {.strips = esmm_ceil_div(p->m, ESMM_FUSED16_ROWS),
           .tiles = esmm_ceil_div(p->n, ESMM_FUSED16_COLS),
           .each = 1,
           .ranks = 1};
  const int64_t units = c.strips * c.tiles;
  while (c.ranks < ESMM_FUSED16_RANKS && 2 * c.ranks * units <= esmm_cuda_room_for(2 * c.ranks, gpu) &&
         2 * c.ranks * LEAST_RANGE <= p->k)
    c.ranks *= 2;
  if (units > gpu)
    c.each = find_each(&c, p->k, gpu);
  c.groups = esmm_ceil_div(c.tiles, c.each);
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
  return esmm_cuda_too_large(p, why, why_bytes);
}

/*
 * A chunk of k's costs its latencies, however little of it is alive; alive k's cost stages, for each tile. A line
 * cannot include a scan of A for every tile, where more k's are alive than there is room for; there, other kernels are
 * faster. In launches: blocks of a cluster send each other sums, and a C with odd lines is written element by element.
 */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p);
  const double n = (double)p->n, k = (double)p->k, rows = (double)esmm_min(p->m, ESMM_FUSED16_ROWS);
  const double gpu = (double)esmm_cuda_sms(p);
  const double waves = (double)esmm_ceil_div(c.strips * c.groups * c.ranks, esmm_cuda_sms(p)), each = (double)c.each;
  const double chunks = waves * (double)esmm_ceil_div(c.range, CHUNK);
  const double odd =
      esmm_cuda_as_it_is(&p->c) ? 0.0 : ESMM_GPU_ODD * gpu * waves * each * rows * ESMM_FUSED16_COLS / (double)c.ranks;
  units->base[0] = (double)p->m * k; /* half of A's bytes: blocks that share a strip read them together */
  units->per_strip[0] = 2.0 * k * n;
  units->base[1] = chunks + TILE_CHUNKS * waves * (each - 1.0);
  units->per_strip[1] = ESMM_GPU_AGAIN * chunks * (each - 1.0) * (double)c.range / ESMM_FUSED16_LINES;
  units->per_strip[2] = waves * each * (double)c.range / ESMM_FUSED16_STAGE_K;
  units->base[3] = esmm_cuda_c_bytes(p);
  units->base[4] = esmm_cuda_copy_units(&p->a, false);
  units->base[5] = 1.0 + (c.ranks > 1 ? ESMM_GPU_CLUSTER / ESMM_GPU_LAUNCH_LARGE : 0.0) + odd;
  *variant = ESMM_FUSED16_ROWS;
}

/* A copy of A where it needs one, then sums. */
typedef struct layout {
  size_t copy, partial, bytes;
} layout;

static bool lay_out(const esmm_problem *p, const cut *c, layout *l)
{
  *l = (layout){0};
  const size_t blocks = c->ranks > 1 ? (size_t)(c->strips * c->groups * c->ranks) : 0; /* few: they run at once */
  return esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a, false), ALIGN, &l->copy) &&
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
  esmm_status status = esmm_cuda_extract_a(ctx, p, false, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_fused16_params params = {.selector = call->selector,
                                .m = (int32_t)p->m,
                                .n = (int32_t)p->n,
                                .k = (int32_t)p->k,
                                .tiles = (int32_t)c.tiles,
                                .each = (int32_t)c.each,
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
  const esmm_launch launch = {.grid_x = (unsigned)(c.strips * c.groups * c.ranks),
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
  .term_names = {"reading", "chunks of k", "stages", "writing of c", "copying of a", "launches"},                    \
  .cost = {ESMM_GPU_CACHED, ESMM_GPU_CHUNK,       ESMM_GPU_STAGE,                                                    \
           ESMM_GPU_MOVED,  ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH_LARGE},                                            \
  .workspace = workspace, .run = run

static const esmm_cuda_kernel about = {
    .sm = 90, .exact = true, .line = line, .knee = ESMM_GPU_KNEE, .past_knee = ESMM_GPU_PAST_KNEE};

ESMM_KERNEL(fused_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(fused_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
