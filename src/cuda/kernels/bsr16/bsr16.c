/* bsr16.c: what the wgmma kernels of a B of blocks share on the host. See bsr16.h and units.cuh. */
#include "cuda/kernels/bsr16/bsr16.h"
#include "cuda/kernels/common/host.h"

#include <stdio.h>

#define ALIGN 1024
#define STAYS 60000000        /* bytes of A that stay in the second-level cache while other columns pass */
#define PART_ENTRIES 8        /* what adding the parts of a tile takes, in entries; */
#define TILE_ENTRIES 3        /* and what a tile takes beside its entries */
#define FEW_ROUNDS 4          /* of which the last one counts in full */
#define SPLIT_BYTES 270000000 /* most memory for the sums of parts */

bool esmm_bsr16_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
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

/* Tile rows, or pairs of them, that come together: two, unless they do not stay in the second-level cache. More of them
   leave less of it for the columns that pass, and were slower. */
static int32_t group_of(const esmm_problem *p, const esmm_bsr16_lists *lists)
{
  const double bytes = (lists->pairs ? 2.0 : 1.0) * lists->rows * 2.0 * (double)p->k;
  return (int32_t)fmax(1.0, fmin(2.0, STAYS / bytes));
}

/* Columns come longest first, so those with a part q are the first parts[q]. */
static void cut_at(const esmm_bsr16_lists *lists, uint32_t most, esmm_bsr16_cut *c)
{
  c->all = 0;
  for (int q = 0; q < ESMM_BSR16_PARTS; q++) {
    int32_t have = q == 0 ? (int32_t)lists->tiles : 0;
    while (q > 0 && have < c->parts[q - 1] && (uint64_t)lists->by_length[have].entries > (uint64_t)q * most)
      have++;
    c->parts[q] = have;
    c->all += have;
  }
}

static double predict(const esmm_problem *p, const esmm_bsr16_lists *lists, uint32_t most, const esmm_bsr16_cut *c)
{
  const int64_t workers = esmm_cuda_sms(p) / (lists->pairs ? ESMM_WGMMA16_CLUSTER : 1), units = c->rows * c->all;
  const double each = (double)lists->entry_count / (double)c->all + TILE_ENTRIES + (c->parts[1] > 0 ? PART_ENTRIES : 0);
  const double rounds = (double)esmm_ceil_div(units, workers);
  /* With many waves, blocks that are through early take the next unit; with few, the last wave counts. */
  const double even = fmax((double)units / (double)workers, 1.0);
  return fmax(rounds <= FEW_ROUNDS ? rounds * each : (even + 0.5) * each, (double)most);
}

esmm_bsr16_cut esmm_bsr16_cut_lists(const esmm_problem *p, const esmm_bsr16_lists *lists)
{
  const int64_t tile_rows = esmm_ceil_div(p->m, lists->rows);
  const uint32_t longest = lists->by_length[0].entries;
  esmm_bsr16_cut best = {.rows = lists->pairs ? esmm_ceil_div(tile_rows, 2) : tile_rows};
  const int64_t counted = lists->pairs ? 2 * best.rows : best.rows;
  cut_at(lists, UINT32_MAX, &best);
  best.entries = predict(p, lists, longest, &best);
  for (uint32_t n = 2; n <= ESMM_BSR16_PARTS && longest / n >= 4; n++) {
    const uint32_t most = (longest + n - 1) / n;
    esmm_bsr16_cut c = best;
    cut_at(lists, most, &c);
    c.entries = predict(p, lists, most, &c);
    if (counted * c.parts[1] < ESMM_BSR16_MOST_SPLIT && /* the last counter gives out units */
        (double)(counted * c.all) * ESMM_BSR16_PARTIAL(lists->rows, lists->cols) <= SPLIT_BYTES &&
        c.entries < best.entries)
      best = c;
  }
  return best;
}

/* ---- what it costs ---- */

void esmm_bsr16_line(const esmm_problem *p, const esmm_bsr16_cut *cut, double moved, esmm_cuda_units *units)
{
  const double m = (double)p->m;
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  units->base[2] = 2.0 * m * (double)p->k + moved + (double)esmm_dtype_size(p->c.dtype) * m * (double)p->n;
  units->base[3] = cut->parts[1] > 0 ? 1.0 : 0.0;
  units->base[4] = esmm_cuda_copy_units(&p->a, false);
  units->base[ESMM_COST_TERMS - 1] =
      1.0 + (esmm_cuda_writes_boxes(p, &e) && !p->gated ? 0.0 : ESMM_GPU_ODD * m * (double)p->n);
}

/* ---- workspace: a copy of A, then the parts' sums ---- */

typedef struct layout {
  size_t copy, partial, bytes;
} layout;

static bool lay_out(const esmm_problem *p, const esmm_bsr16_lists *lists, const esmm_bsr16_cut *c, layout *l)
{
  const int64_t rows = lists->pairs ? 2 * c->rows : c->rows;
  const size_t partial = (size_t)ESMM_BSR16_PARTIAL(lists->rows, lists->cols);
  *l = (layout){0};
  return esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a, false), ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, c->parts[1] > 0 ? (size_t)(rows * c->all) * partial : 0, ALIGN, &l->partial);
}

size_t esmm_bsr16_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  const esmm_bsr16_own *own = self->own;
  const esmm_bsr16_lists lists = own->lists(p);
  const esmm_bsr16_cut c = esmm_bsr16_cut_lists(p, &lists);
  layout l;
  return lay_out(p, &lists, &c, &l) ? l.bytes : SIZE_MAX;
}

/* ---- running ---- */

static esmm_status make_maps(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *a, const esmm_bsr16_lists *lists,
                             esmm_bsr16_params *params)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const bool by_k = a->order == ESMM_COL_MAJOR;
  const unsigned k = (unsigned)lists->k, cols = (unsigned)lists->cell_cols;
  esmm_status status =
      esmm_cuda_tensor_map_boxes_16(ctx, esmm_cuda_address(a), by_k ? p->m : p->k, by_k ? p->k : p->m, a->ld,
                                    by_k ? 64 : k, by_k ? k : (unsigned)lists->rows, &params->map_a);
  if (status == ESMM_OK && b->cells > 0 && !lists->blocks)
    status = esmm_cuda_tensor_map_boxes_16(ctx, b->values, ESMM_CELL_COLS, b->cells * b->cell_k, ESMM_CELL_COLS, cols,
                                           k, &params->map_cells);
  if (status == ESMM_OK && params->c_boxes)
    status =
        esmm_cuda_tensor_map_boxes_16(ctx, esmm_cuda_address(&p->c), p->n, p->m, p->c.ld, cols, 64, &params->map_c);
  return status;
}

esmm_status esmm_bsr16_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                           esmm_stats *stats)
{
  const esmm_bsr16_own *own = self->own;
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  const esmm_bsr16_lists lists = own->lists(p);
  const esmm_bsr16_cut c = esmm_bsr16_cut_lists(p, &lists);
  CUdeviceptr meeting = 0;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, &lists, &c, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_meeting(ctx, ESMM_MEETING_BSR16, call->stream, &meeting);
  if (status == ESMM_OK)
    status = esmm_cuda_extract_a(ctx, p, false, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_bsr16_params params = {.selector = call->selector,
                              .m = (int32_t)p->m,
                              .n = (int32_t)p->n,
                              .a_by_k = a.order == ESMM_COL_MAJOR,
                              .rows = lists.rows,
                              .cell_k = lists.k,
                              .pairs = lists.pairs,
                              .group = group_of(p, &lists),
                              .columns = lists.columns,
                              .entries = lists.entries,
                              .places = lists.places,
                              .blocks = lists.blocks,
                              .partial = at + l.partial,
                              .counters = meeting,
                              .all_parts = c.all,
                              .epilogue = esmm_cuda_epilogue(p)};
  params.c_boxes = esmm_cuda_writes_boxes(p, &params.epilogue);
  memcpy(params.parts, c.parts, sizeof params.parts);
  esmm_bsr16_note(p, stats);
  status = make_maps(ctx, p, &a, &lists, &params);
  if (status != ESMM_OK)
    return status;
  const esmm_launch launch = {
      .grid_x = (unsigned)(esmm_cuda_get(ctx)->multiprocessors / ESMM_WGMMA16_CLUSTER * ESMM_WGMMA16_CLUSTER),
      .threads = ESMM_WGMMA16_THREADS,
      .shared = own->function.shared,
      .cluster = ESMM_WGMMA16_CLUSTER};
  return esmm_cuda_launch(ctx, &own->function, &launch, call->stream, &params);
}
