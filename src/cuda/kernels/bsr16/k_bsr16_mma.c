/* k_bsr16_mma.c: bsr_bf16_mma and bsr_f16_mma: a B of blocks by mma.sync, for every GPU from sm_80 on. See
 * k_bsr16_mma.cu. */
#include "cuda/kernels/bsr16/bsr16.h"
#include "cuda/kernels/mma16/mma16.h"

ESMM_FATBIN(k_bsr16_mma);
#define FUNCTION(name) ESMM_MMA16_FUNCTION(fatbin_k_bsr16_mma, name, ESMM_BSR16_MMA_ROWS, ESMM_CELL_COLS)
#define OF_DTYPE(name)                                                                                               \
  {                                                                                                                  \
    FUNCTION(name "_rows"), FUNCTION(name "_cols"), FUNCTION(name "_rows_elements"), FUNCTION(name "_cols_elements") \
  }
/* By how A is read: order, then alignment. */
static const esmm_cuda_function bf16[4] = OF_DTYPE("esmm_bsr_bf16"), f16[4] = OF_DTYPE("esmm_bsr_f16");

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  return esmm_mma16_can_run(p, ESMM_MMA16_SHARED(ESMM_BSR16_MMA_ROWS, ESMM_CELL_COLS), why, why_bytes);
}

/* Cells that the busiest multiprocessor gets. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const double rows = (double)esmm_ceil_div(p->m, ESMM_BSR16_MMA_ROWS), blocks = rows * (double)esmm_bsr16_panels(p);
  const double rounds = (double)esmm_ceil_div((int64_t)blocks, esmm_cuda_sms(p));
  const double mean = (double)b->cells / (double)esmm_bsr16_panels(p), longest = (double)b->by_length[0].entries;
  units->base[0] = fmax(rounds * mean, longest) * b->cell_k / 64.0;
  units->base[1] = esmm_cuda_c_bytes(p);
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  const esmm_cuda_function *of = self->own, *function = &of[esmm_mma16_how(&p->a)];
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const esmm_bsr16_mma_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                        .m = p->m,
                                        .n = p->n,
                                        .k = p->k,
                                        .a = esmm_cuda_address(&p->a),
                                        .a_ld = p->a.ld,
                                        .cells = b->values,
                                        .places = b->places,
                                        .chunks = (int32_t)b->chunks,
                                        .cell_k = b->cell_k,
                                        .epilogue = esmm_cuda_epilogue(p)};
  const esmm_launch launch = esmm_mma16_launch(p, ESMM_BSR16_MMA_ROWS, ESMM_CELL_COLS, function->shared);
  esmm_bsr16_note(p, stats);
  return esmm_cuda_launch(ctx, function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 80, .line = line, .stand_in = true};

#define DESCRIPTOR(id, dtype)                                                                                         \
  .name = "bsr_" #id "_mma",                                                                                          \
  .doc = #id ": reads and multiplies the blocks of B that are there (mma.sync); any order and alignment of A",        \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = id, .can_run = can_run, .terms = esmm_cuda_terms,         \
  .run = run, .term_names = {"cells of 64 k's", "writing of c", [5] = "launches"},                                    \
  .cost = {ESMM_GPU_STAGE_LISTED, ESMM_GPU_WRITTEN, [5] = ESMM_GPU_LAUNCH_LARGE}

ESMM_KERNEL(bsr_bf16_mma) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(bsr_f16_mma) = {DESCRIPTOR(f16, ESMM_F16)};
