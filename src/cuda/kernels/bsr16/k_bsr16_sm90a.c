/*
 * k_bsr16_sm90a.c: bsr_bf16_sm90a and bsr_f16_sm90a: a B of blocks on Hopper, A as it is. See k_bsr16_sm90a.cu.
 *
 * A is read as it is where TMA can do that (16-byte lines), else copied first.
 */
#include "cuda/kernels/bsr16/bsr16.h"
#include "cuda/kernels/common/aligned.h"

#include <math.h>
#include <stdio.h>

#define ALIGN 1024
#define STAYS 6e7         /* bytes of A that stay in the second-level cache while other columns pass */
#define PART_ENTRIES 8.0  /* what adding the parts of a tile takes, in entries; */
#define TILE_ENTRIES 3.0  /* and what a tile takes beside its entries */
#define ODD 6e-7          /* of a launch: each element of a C that TMA does not write */
#define SPLIT_BYTES 2.7e8 /* most memory for the sums of parts */

ESMM_FATBIN(k_bsr16_sm90a);
static const esmm_cuda_function bf16 = {&fatbin_k_bsr16_sm90a, "esmm_bsr16_bf16", ESMM_BSR16_SHARED};
static const esmm_cuda_function f16 = {&fatbin_k_bsr16_sm90a, "esmm_bsr16_f16", ESMM_BSR16_SHARED};

/* ---- can it? ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  if (p->m <= ESMM_WGMMA16_MOST_SIDE && p->n <= ESMM_WGMMA16_MOST_SIDE && p->k <= ESMM_WGMMA16_MOST_SIDE &&
      b->cells <= INT32_MAX / b->cell_k)
    return true;
  (void)snprintf(why, why_bytes, "a is %lld x %lld, and b has %lld columns and %lld cells: too large for its counters",
                 (long long)p->m, (long long)p->k, (long long)p->n, (long long)b->cells);
  return false;
}

/* ---- how a product is cut ---- */

/* Pairs of blocks fetch each cell once, and wait for each other. That pays where cells are many beside A's chunks. */
static bool takes_pairs(const esmm_problem *p, int64_t tile_rows)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const int64_t chunks = esmm_ceil_div(p->k, b->cell_k) * esmm_ceil_div(p->n, ESMM_BSR16_COLS);
  const bool few = 2 * b->cells < 3 * b->entry_count && 2 * b->entry_count < chunks;
  return tile_rows > 1 && !few;
}

/* Which columns of tiles have how many parts: parts[q] have a part q. */
typedef struct cut {
  bool pairs;
  int32_t tile; /* rows of a tile */
  int64_t rows; /* of tiles, or of pairs of them */
  int32_t parts[ESMM_BSR16_PARTS], all;
  double entries; /* that the busiest blocks go through, as it is predicted */
} cut;

/* Tile rows, or pairs of them, that come together: two, unless they do not stay in the second-level cache. More of them
   leave less of it for the columns that pass, and were slower. */
static int32_t group_of(const esmm_problem *p, const cut *c)
{
  const double bytes = (c->pairs ? 2.0 : 1.0) * c->tile * 2.0 * (double)p->k;
  return (int32_t)fmax(1.0, fmin(2.0, STAYS / bytes));
}

/* Columns come longest first, so those with a part q are the first parts[q]. */
static void cut_at(const esmm_cuda_blocks *b, int64_t tiles, uint32_t most, cut *c)
{
  c->all = 0;
  for (int q = 0; q < ESMM_BSR16_PARTS; q++) {
    int32_t have = q == 0 ? (int32_t)tiles : 0;
    while (q > 0 && have < c->parts[q - 1] && (uint64_t)b->by_length[have].entries > (uint64_t)q * most)
      have++;
    c->parts[q] = have;
    c->all += have;
  }
}

static double predict(const esmm_problem *p, const esmm_cuda_blocks *b, uint32_t most, const cut *c)
{
  const int64_t workers = esmm_cuda_sms(p) / (c->pairs ? ESMM_WGMMA16_CLUSTER : 1), units = c->rows * c->all;
  const double each = (double)b->entry_count / (double)c->all + TILE_ENTRIES + (c->parts[1] > 0 ? PART_ENTRIES : 0.0);
  const double rounds = (double)esmm_ceil_div(units, workers);
  /* Where rounds are many, blocks that are through early take the next; where they are few, the last one counts. */
  const double even = fmax((double)units / (double)workers, 1.0);
  return fmax(rounds <= 4.0 ? rounds * each : (even + 0.5) * each, (double)most);
}

/* Lists are cut so that the GPU is full and no list is much longer than a block's share. */
static cut cut_lists(const esmm_problem *p)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const int32_t tile = p->m > ESMM_BSR16_ROWS / 2 ? ESMM_BSR16_ROWS : ESMM_BSR16_ROWS / 2;
  const int64_t tiles = esmm_ceil_div(p->n, ESMM_BSR16_COLS), tile_rows = esmm_ceil_div(p->m, tile);
  const uint32_t longest = b->by_length[0].entries;
  const bool pairs = takes_pairs(p, tile_rows);
  cut best = {.tile = tile, .pairs = pairs, .rows = pairs ? esmm_ceil_div(tile_rows, 2) : tile_rows};
  const int64_t counted = best.pairs ? 2 * best.rows : best.rows;
  cut_at(b, tiles, UINT32_MAX, &best);
  best.entries = predict(p, b, longest, &best);
  for (uint32_t n = 2; n <= ESMM_BSR16_PARTS && longest / n >= 4; n++) {
    const uint32_t most = (longest + n - 1) / n;
    cut c = best;
    cut_at(b, tiles, most, &c);
    c.entries = predict(p, b, most, &c);
    if (counted * c.parts[1] < ESMM_BSR16_MOST_SPLIT && /* the last counter gives out units */
        (double)(counted * c.all) * ESMM_BSR16_PARTIAL(tile) <= SPLIT_BYTES && c.entries < best.entries)
      best = c;
  }
  return best;
}

/* ---- what it costs ---- */

/* Bytes that come to the busiest multiprocessor through the second-level cache, or its multiplications, whichever
   takes longer; beside them what memory has to move once. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const cut c = cut_lists(p);
  const double cells = b->entry_count > 0 ? (double)b->cells / (double)b->entry_count : 0.0; /* of an entry */
  const double bytes = c.entries * b->cell_k * (2.0 * c.tile + 128.0 * cells / (c.pairs ? 2.0 : 1.0));
  const double columns = c.entries * b->cell_k / 64.0 * cells;
  const double m = (double)p->m, moved = 2.0 * m * (double)p->k + 128.0 * b->cell_k * (double)b->cells +
                                         (double)esmm_dtype_size(p->c.dtype) * m * (double)p->n;
  if (cost[0] * bytes >= cost[1] * columns)
    units->base[0] = bytes;
  else
    units->base[1] = columns;
  units->base[2] = moved;
  units->base[3] = c.parts[1] > 0 ? 1.0 : 0.0;
  units->base[4] = esmm_cuda_copy_units(p);
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + (esmm_cuda_writes_boxes(p, &e) && !p->gated ? 0.0 : ODD * m * (double)p->n);
  *variant = 0;
}

/* ---- workspace: a copy of A, then the parts' sums ---- */

typedef struct layout {
  size_t copy, partial, bytes;
} layout;

static bool lay_out(const esmm_problem *p, const cut *c, layout *l)
{
  const int64_t rows = c->pairs ? 2 * c->rows : c->rows;
  *l = (layout){0};
  return esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a), ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes,
                           c->parts[1] > 0 ? (size_t)(rows * c->all) * (size_t)ESMM_BSR16_PARTIAL(c->tile) : 0, ALIGN,
                           &l->partial);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const cut c = cut_lists(p);
  layout l;
  return lay_out(p, &c, &l) ? l.bytes : SIZE_MAX;
}

/* ---- running ---- */

static esmm_status make_maps(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *a, esmm_bsr16_params *params)
{
  const unsigned rows = (unsigned)params->rows;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const bool by_k = a->order == ESMM_COL_MAJOR;
  const unsigned cell_k = (unsigned)b->cell_k;
  esmm_status status = esmm_cuda_tensor_map_boxes_16(ctx, esmm_cuda_address(a), by_k ? p->m : p->k, by_k ? p->k : p->m,
                                                     a->ld, by_k ? 64 : cell_k, by_k ? cell_k : rows, &params->map_a);
  if (status == ESMM_OK && b->cells > 0)
    status = esmm_cuda_tensor_map_boxes_16(ctx, b->values, ESMM_CELL_COLS, b->cells * b->cell_k, ESMM_CELL_COLS,
                                           ESMM_CELL_COLS, cell_k, &params->map_cells);
  if (status == ESMM_OK && params->c_boxes)
    status = esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(&p->c), p->n, p->m, p->c.ld, &params->map_c);
  return status;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  const cut c = cut_lists(p);
  CUdeviceptr meeting = 0;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, &c, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_meeting(ctx, ESMM_MEETING_BSR16, call->stream, &meeting);
  if (status == ESMM_OK)
    status = esmm_cuda_align_a(ctx, p, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_bsr16_params params = {.selector = call->selector,
                              .m = (int32_t)p->m,
                              .n = (int32_t)p->n,
                              .a_by_k = a.order == ESMM_COL_MAJOR,
                              .rows = c.tile,
                              .cell_k = b->cell_k,
                              .pairs = c.pairs,
                              .group = group_of(p, &c),
                              .columns = b->columns,
                              .entries = b->entries,
                              .partial = at + l.partial,
                              .counters = meeting,
                              .all_parts = c.all,
                              .epilogue = esmm_cuda_epilogue(p)};
  params.c_boxes = esmm_cuda_writes_boxes(p, &params.epilogue);
  memcpy(params.parts, c.parts, sizeof params.parts);
  esmm_bsr16_note(p, stats);
  status = make_maps(ctx, p, &a, &params);
  if (status != ESMM_OK)
    return status;
  const esmm_launch launch = {
      .grid_x = (unsigned)(esmm_cuda_get(ctx)->multiprocessors / ESMM_WGMMA16_CLUSTER * ESMM_WGMMA16_CLUSTER),
      .threads = ESMM_WGMMA16_THREADS,
      .shared = ESMM_BSR16_SHARED,
      .cluster = ESMM_WGMMA16_CLUSTER};
  return esmm_cuda_launch(ctx, self->own, &launch, call->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

#define BSR(id, dtype)                                                                                                \
  .name = "bsr_" #id "_sm90a", .doc = #id ": reads and multiplies the blocks of B that are there (wgmma)",            \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .own = &id, .can_run = can_run, .terms = esmm_cuda_terms, .run = run,              \
  .workspace = workspace, .device = &about,                                                                           \
  .term_names = {"bytes to a multiprocessor", "cells of 64 k's", "reading and writing",                               \
                 "adding of parts",           "copying of a",    "launches"},                                         \
  .cost = {1.6e-11, 1.8e-7, 1e-13, 4e-6, 3.9e-6, 8e-6}

ESMM_KERNEL(bsr_bf16_sm90a) = {BSR(bf16, ESMM_BF16)};

ESMM_KERNEL(bsr_f16_sm90a) = {BSR(f16, ESMM_F16)};
