/*
 * k_bsr16_sm90a.c: bsr_bf16_sm90a and bsr_f16_sm90a: a B of blocks on Hopper, A as it is. See k_bsr16_sm90a.cu.
 *
 * A is read as it is where TMA can do that (16-byte lines), else copied first.
 */
#include "cuda/kernels/bsr16/bsr16.h"

ESMM_FATBIN(k_bsr16_sm90a);

/* Pairs of blocks fetch each cell once, and wait for each other. That pays where cells are many beside A's chunks. */
static bool takes_pairs(const esmm_problem *p, int32_t rows)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const int64_t chunks = esmm_ceil_div(p->k, b->cell_k) * esmm_ceil_div(p->n, ESMM_BSR16_COLS);
  const bool few = 2 * b->cells < 3 * b->entry_count && 2 * b->entry_count < chunks;
  return p->m > rows && !few;
}

static esmm_bsr16_lists lists_of(const esmm_problem *p)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const int32_t rows = p->m > ESMM_BSR16_ROWS / 2 ? ESMM_BSR16_ROWS : ESMM_BSR16_ROWS / 2;
  return (esmm_bsr16_lists){.by_length = b->by_length,
                            .tiles = esmm_ceil_div(p->n, ESMM_BSR16_COLS),
                            .entry_count = b->entry_count,
                            .entries = b->entries,
                            .columns = b->columns,
                            .rows = rows,
                            .cols = ESMM_BSR16_COLS,
                            .k = b->cell_k,
                            .cell_cols = ESMM_CELL_COLS,
                            .pairs = takes_pairs(p, rows)};
}

/* Bytes that come to the busiest multiprocessor through the second-level cache, or its multiplications, whichever
   takes longer; beside them what memory has to move once. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const esmm_bsr16_lists lists = lists_of(p);
  const esmm_bsr16_cut c = esmm_bsr16_cut_lists(p, &lists);
  const double cells = b->entry_count > 0 ? (double)b->cells / (double)b->entry_count : 0.0; /* of an entry */
  const double bytes = c.entries * b->cell_k * (2.0 * lists.rows + 128.0 * cells / (lists.pairs ? 2.0 : 1.0)) *
                       (b->cell_k == 32 ? ESMM_GPU_SHORT_LINES : 1.0);
  const double columns = c.entries * b->cell_k / 64.0 * cells;
  if (cost[0] * bytes >= cost[1] * columns)
    units->base[0] = bytes;
  else
    units->base[1] = columns;
  esmm_bsr16_line(p, &c, 128.0 * b->cell_k * (double)b->cells, units);
  *variant = 0;
}

static const esmm_bsr16_own bf16 = {{&fatbin_k_bsr16_sm90a, "esmm_bsr16_bf16", ESMM_BSR16_SHARED}, lists_of},
                            f16 = {{&fatbin_k_bsr16_sm90a, "esmm_bsr16_f16", ESMM_BSR16_SHARED}, lists_of};
static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line};

#define BSR(id, dtype)                                                                                                \
  .name = "bsr_" #id "_sm90a", .doc = #id ": reads and multiplies the blocks of B that are there (wgmma)",            \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .own = &id, .can_run = esmm_bsr16_can_run, .terms = esmm_cuda_terms,               \
  .run = esmm_bsr16_run, .workspace = esmm_bsr16_workspace, .device = &about,                                         \
  .term_names = {"bytes to a multiprocessor", "cells of 64 k's", "reading and writing",                               \
                 "adding of parts",           "copying of a",    "launches"},                                         \
  .cost = {ESMM_GPU_SM_BYTE, ESMM_GPU_BSR_CELL,    ESMM_GPU_CACHED,                                                   \
           ESMM_GPU_PARTS,   ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH_LARGE}

ESMM_KERNEL(bsr_bf16_sm90a) = {BSR(bf16, ESMM_BF16)};

ESMM_KERNEL(bsr_f16_sm90a) = {BSR(f16, ESMM_F16)};
