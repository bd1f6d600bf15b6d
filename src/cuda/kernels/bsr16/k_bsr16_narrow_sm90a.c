/*
 * k_bsr16_narrow_sm90a.c: bsr_narrow_bf16_sm90a and bsr_narrow_f16_sm90a: a B of blocks with sides that 64 does not
 * divide, on Hopper, A as it is. See k_bsr16_narrow_sm90a.cu.
 *
 * A is read as it is where TMA can do that (16-byte lines), else copied first.
 */
#include "cuda/kernels/bsr16/bsr16.h"

#include <stdio.h>

ESMM_FATBIN(k_bsr16_narrow_sm90a);

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  if (esmm_cuda_b(p)->blocks.narrow.tiles == 0) {
    (void)snprintf(why, why_bytes, "b's blocks are of 64 k's and columns or more, and have no lists of narrower ones");
    return false;
  }
  return esmm_bsr16_can_run(self, p, why, why_bytes);
}

static esmm_bsr16_lists lists_of(const esmm_problem *p)
{
  const esmm_cuda_narrow *n = &esmm_cuda_b(p)->blocks.narrow;
  return (esmm_bsr16_lists){.by_length = n->by_length,
                            .tiles = n->tiles,
                            .entry_count = n->entry_count,
                            .entries = n->entries,
                            .columns = n->columns,
                            .places = n->places,
                            .blocks = n->values,
                            .rows = ESMM_NARROW_ROWS,
                            .cols = ESMM_NARROW_COLS * ESMM_NARROW_SIDE,
                            .k = ESMM_NARROW_SIDE,
                            .cell_cols = ESMM_NARROW_SIDE,
                            .pairs = p->m > ESMM_NARROW_ROWS};
}

/* Bytes that come to the busiest multiprocessor through the second-level cache, or its chunks and blocks, whichever
   take longer; beside them what memory has to move once. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const esmm_cuda_narrow *n = &esmm_cuda_b(p)->blocks.narrow;
  const esmm_bsr16_lists lists = lists_of(p);
  const esmm_bsr16_cut c = esmm_bsr16_cut_lists(p, &lists);
  const double block = 2.0 * ESMM_NARROW_SIDE * ESMM_NARROW_SIDE, all = fmax(1.0, (double)n->entry_count);
  const double blocks = (double)n->blocks / all, chunks = (double)n->chunks / all; /* of an entry */
  const double bytes =
      c.entries * (chunks * 2.0 * ESMM_NARROW_SIDE * ESMM_NARROW_ROWS + blocks * block / (lists.pairs ? 2.0 : 1.0));
  const double steps = c.entries * (chunks + blocks);
  if (cost[0] * bytes >= cost[1] * steps)
    units->base[0] = bytes;
  else
    units->base[1] = steps;
  esmm_bsr16_line(p, &c, block * (double)n->blocks, units);
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_status status = esmm_bsr16_run(self, ctx, p, scratch, stats);
  stats->joint_density = (double)esmm_cuda_b(p)->blocks.narrow.blocks / ((double)esmm_ceil_div(p->k, ESMM_NARROW_SIDE) *
                                                                         (double)esmm_ceil_div(p->n, ESMM_NARROW_SIDE));
  return status;
}

static const esmm_bsr16_own bf16 = {{&fatbin_k_bsr16_narrow_sm90a, "esmm_bsr16_narrow_bf16", ESMM_NARROW_SHARED},
                                    lists_of},
                            f16 = {{&fatbin_k_bsr16_narrow_sm90a, "esmm_bsr16_narrow_f16", ESMM_NARROW_SHARED},
                                   lists_of};
static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

#define NARROW(id, dtype)                                                                                             \
  .name = "bsr_narrow_" #id "_sm90a",                                                                                 \
  .doc = #id ": the same for blocks whose sides 64 does not divide, 32 by 32 (wgmma)", .backend = &esmm_cuda_backend, \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16),                                \
  .dtypes = ESMM_DTYPE_BIT(dtype), .own = &id, .can_run = can_run, .terms = esmm_cuda_terms, .run = run,              \
  .workspace = esmm_bsr16_workspace, .device = &about,                                                                \
  .term_names = {"bytes to a multiprocessor", "chunks and blocks", "reading and writing",                             \
                 "adding of parts",           "copying of a",      "launches"},                                       \
  .cost = {ESMM_GPU_SM_BYTE, ESMM_GPU_BSR_NARROW,  ESMM_GPU_CACHED,                                                   \
           ESMM_GPU_PARTS,   ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH_SKIP}

ESMM_KERNEL(bsr_narrow_bf16_sm90a) = {NARROW(bf16, ESMM_BF16)};

ESMM_KERNEL(bsr_narrow_f16_sm90a) = {NARROW(f16, ESMM_F16)};
