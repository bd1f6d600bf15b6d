/* k_bsr16_decode.c: decode_bsr_bf16 and decode_bsr_f16: few rows times a B of blocks. See k_bsr16_decode.cu. */
#include "cuda/kernels/bsr16/bsr16.h"
#include "cuda/kernels/decode/decode_params.h"

#include <stdio.h>

#define BLOCKS_AT_ONCE 2 /* on a multiprocessor */

ESMM_FATBIN(k_bsr16_decode);
#define FUNCTION(name, tiles)                                                        \
  {                                                                                  \
    &fatbin_k_bsr16_decode, "esmm_bsr_decode_" name, ESMM_BSR16_DECODE_SHARED(tiles) \
  }
/* For at most 8 rows, and for more. */
static const esmm_cuda_function bf16[2] = {FUNCTION("bf16_8", 1), FUNCTION("bf16_16", 2)},
                                f16[2] = {FUNCTION("f16_8", 1), FUNCTION("f16_16", 2)};

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m <= ESMM_BSR16_DECODE_ROWS && p->k < ESMM_DECODE_MOST_SIDE && p->n < ESMM_DECODE_MOST_SIDE)
    return true;
  (void)snprintf(why, why_bytes, "c is %lld x %lld and k %lld; it takes %d rows at most, and sides below %d",
                 (long long)p->m, (long long)p->n, (long long)p->k, ESMM_BSR16_DECODE_ROWS, ESMM_DECODE_MOST_SIDE);
  return false;
}

/* Cells of a panel, at most. */
static int64_t longest(const esmm_problem *p)
{
  return esmm_cuda_b(p)->blocks.by_length[0].entries;
}

/* Blocks that share a panel's cells: as many as fill the GPU, where there are cells for them. */
static unsigned ranks(const esmm_problem *p)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const int64_t steps = longest(p) * (b->cell_k / 16), room = BLOCKS_AT_ONCE * esmm_cuda_sms(p);
  unsigned n = 1;
  while (esmm_cuda_get(p->ctx)->sm >= 90 && n < ESMM_BSR16_DECODE_RANKS && esmm_bsr16_panels(p) * n * 2 <= room &&
         steps >= (int64_t)n * 32)
    n *= 2;
  return n;
}

/* Bytes of B, by the part of the GPU that reads them. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const double blocks = (double)(esmm_bsr16_panels(p) * ranks(p)), fills = (double)(BLOCKS_AT_ONCE * esmm_cuda_sms(p));
  const double cell = b->cell_k * ESMM_CELL_COLS * 2.0;
  /* All of them, or, where panels differ, the longest as one of the blocks that fill the GPU reads it. */
  units->base[0] =
      cell * fmax((double)b->cells * fmax(1.0, 0.5 * fills / blocks), 0.5 * fills * (double)longest(p) / ranks(p));
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const esmm_cuda_function *of = self->own, *function = &of[p->m > 8];
  const esmm_bsr16_decode_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                           .a = esmm_cuda_matrix(&p->a),
                                           .cells = b->values,
                                           .places = b->places,
                                           .chunks = (int32_t)b->chunks,
                                           .cell_k = b->cell_k,
                                           .vector = p->a.order == ESMM_ROW_MAJOR &&
                                                     esmm_cuda_address(&p->a) % 8 == 0 && p->a.ld % 4 == 0,
                                           .epilogue = esmm_cuda_epilogue(p)};
  const unsigned shared_by = ranks(p);
  const esmm_launch launch = {.grid_x = (unsigned)esmm_bsr16_panels(p) * shared_by,
                              .threads = ESMM_BSR16_DECODE_THREADS,
                              .shared = function->shared,
                              .cluster = shared_by > 1 ? shared_by : 0};
  esmm_bsr16_note(p, stats);
  return esmm_cuda_launch(ctx, function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 80, .line = line, .steady = true};

#define DESCRIPTOR(id, dtype)                                                                                         \
  .name = "decode_bsr_" #id, .doc = #id ": m of 1 to 16, reads the blocks of B that are there, once",                 \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = id, .can_run = can_run, .terms = esmm_cuda_terms,         \
  .run = run, .term_names = {"bytes of b", [5] = "launches"}, .cost = {ESMM_GPU_MOVED, [5] = ESMM_GPU_LAUNCH}

ESMM_KERNEL(decode_bsr_bf16) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(decode_bsr_f16) = {DESCRIPTOR(f16, ESMM_F16)};
