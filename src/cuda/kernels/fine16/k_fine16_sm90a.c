/*
 * k_fine16_sm90a.c: bf16 and fp16 on Hopper where A has few nonzeros, anywhere: fine_*_sm90a. See k_fine16_sm90a.cu.
 *
 * Two launches: A's nonzeros become lists of steps, then these are multiplied. A is read row by row, through TMA: a
 * col-major one, or one with odd lines, is copied first. Lists have room for an A without zeros, 1.125 times A's bytes,
 * so none overflows: a dense A is slow, not wrong.
 */
#include "cuda/kernels/common/host.h"

#include <stdio.h>

#define ALIGN 256         /* of the workspace's parts */
#define TOGETHER 8        /* blocks of rows that go through B at the same time */
#define MOST_STEPS 2.1e12 /* bytes of lists: more than any GPU has */

ESMM_FATBIN(k_fine16_sm90a);

static const esmm_cuda_function pack_function = {&fatbin_k_fine16_sm90a, "esmm_fine16_pack", ESMM_FINE16_PACK_SHARED};
static const esmm_cuda_function bf16 = {&fatbin_k_fine16_sm90a, "esmm_fine16_bf16", ESMM_FINE16_SHARED};
static const esmm_cuda_function f16 = {&fatbin_k_fine16_sm90a, "esmm_fine16_f16", ESMM_FINE16_SHARED};

/* ---- how a product is cut ---- */

static int64_t chunks_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->k, ESMM_FINE16_CHUNK);
}

static int64_t groups_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_FINE16_ROWS);
}

static int64_t units_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_FINE16_BLOCK_ROWS) * esmm_ceil_div(p->n, ESMM_FINE16_COLS);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const double lists = (double)groups_of(p) * (double)chunks_of(p) * ESMM_FINE16_STEPS * ESMM_FINE16_VALUES;
  if (p->m <= ESMM_FINE16_MOST_SIDE && p->n <= ESMM_FINE16_MOST_SIDE && p->k <= ESMM_FINE16_MOST_SIDE &&
      lists < MOST_STEPS && units_of(p) < INT32_MAX / 2)
    return true;
  return esmm_cuda_too_large(p, why, why_bytes);
}

/* ---- what it costs ---- */

/* A block takes units one after the other, and each is all of B's k's for 64 columns, and the steps of 512 rows. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double rounds = (double)esmm_ceil_div(units_of(p), esmm_cuda_sms(p));
  const double strips = (double)(ESMM_FINE16_BLOCK_ROWS / ESMM_FINE16_STRIP);
  units->per_strip[0] = rounds * strips * k / 16;
  units->base[1] = rounds * (double)chunks_of(p);
  units->base[2] = (double)(esmm_ceil_div(groups_of(p), esmm_cuda_sms(p)) * chunks_of(p));
  units->base[3] = ESMM_GPU_EXPOSED * esmm_cuda_c_bytes(p);
  units->base[4] = esmm_cuda_copy_units(&p->a, true);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + (esmm_cuda_in_registers(p) ? 0.0 : ESMM_GPU_ODD * m * n);
  *variant = ESMM_FINE16_STRIP;
}

/* ---- workspace ---- */

typedef struct layout {
  size_t copy, values, places, counts, bytes;
} layout;

static bool lay_out(const esmm_problem *p, layout *l)
{
  const size_t groups = (size_t)groups_of(p), past = ESMM_FINE16_PAST;
  const size_t copy = esmm_cuda_copy_bytes(&p->a, true);
  size_t steps, values, places;
  *l = (layout){0};
  return esmm_size_mul(groups, (size_t)chunks_of(p) * ESMM_FINE16_STEPS, &steps) &&
         esmm_size_add(steps, past, &steps) && esmm_size_mul(steps, ESMM_FINE16_VALUES, &values) &&
         esmm_size_mul(steps, ESMM_FINE16_PLACES, &places) && esmm_cuda_reserve(&l->bytes, copy, ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, values, ALIGN, &l->values) &&
         esmm_cuda_reserve(&l->bytes, places, ALIGN, &l->places) &&
         esmm_cuda_reserve(&l->bytes, groups * 2 * sizeof(uint32_t), ALIGN, &l->counts);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  layout l;
  return lay_out(p, &l) ? l.bytes : SIZE_MAX;
}

/* ---- running ---- */

/* A's steps into the workspace. */
static esmm_status pack(esmm_ctx *ctx, const esmm_problem *p, CUdeviceptr at, const layout *l)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  esmm_matrix a;
  esmm_status status = esmm_cuda_align_a(ctx, p, true, at + l->copy, &a);
  esmm_fine16_pack_params params = {.selector = call->selector,
                                    .chunks = (int32_t)chunks_of(p),
                                    .values = at + l->values,
                                    .places = at + l->places,
                                    .counts = at + l->counts};
  if (status == ESMM_OK)
    status = esmm_cuda_tensor_map_boxes_16(ctx, esmm_cuda_address(&a), p->k, p->m, a.ld, ESMM_WGMMA16_BOX,
                                           ESMM_FINE16_ROWS, &params.map_a);
  if (status == ESMM_OK)
    status =
        esmm_cuda_launch_blocks(ctx, &pack_function, groups_of(p), ESMM_FINE16_PACK_THREADS, call->stream, &params);
  return status == ESMM_OK ? esmm_cuda_mark_extracted(ctx, p) : status;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  layout l;
  if (!lay_out(p, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = pack(ctx, p, at, &l);
  if (status != ESMM_OK)
    return status;
  esmm_fine16_params params = {.selector = call->selector,
                               .m = (int32_t)p->m,
                               .n = (int32_t)p->n,
                               .chunks = (int32_t)chunks_of(p),
                               .groups = (int32_t)groups_of(p),
                               .row_blocks = (int32_t)esmm_ceil_div(p->m, ESMM_FINE16_BLOCK_ROWS),
                               .tiles = (int32_t)esmm_ceil_div(p->n, ESMM_FINE16_COLS),
                               .together = TOGETHER,
                               .registers = esmm_cuda_in_registers(p),
                               .values = at + l.values,
                               .places = at + l.places,
                               .counts = at + l.counts,
                               .epilogue = esmm_cuda_epilogue(p),
                               .k = p->k,
                               .report = call->report};
  status = esmm_cuda_tensor_map_boxes_16(ctx, w->rows, w->rows_ld, p->k, w->rows_ld, ESMM_FINE16_COLS,
                                         ESMM_FINE16_CHUNK, &params.map_b);
  if (status != ESMM_OK)
    return status;
  stats->strip_rows = ESMM_FINE16_STRIP;
  return esmm_cuda_launch_blocks(ctx, self->own, esmm_min(units_of(p), esmm_cuda_sms(p)), ESMM_FINE16_THREADS,
                                 call->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .line = line, .strip_rows = ESMM_FINE16_STRIP};

#define DESCRIPTOR(id, dtype)                                                                                        \
  .name = "fine_" #id "_sm90a",                                                                                      \
  .doc = #id ": skips k's without a nonzero in 8 rows of A, for A's with up to 1 % of nonzeros anywhere, on Hopper", \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(ROWS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .variant_strips = true, .device = &about, .own = &id, .can_run = can_run,         \
  .terms = esmm_cuda_terms,                                                                                          \
  .term_names = {"steps of 16 k's", "chunks of b", "scan of a", "writing of c", "copying of a", "launches"},         \
  .cost = {ESMM_GPU_FINE_STEP, ESMM_GPU_CHUNK,       ESMM_GPU_CHUNK_SCAN,                                            \
           ESMM_GPU_MOVED,     ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH_TWO},                                           \
  .workspace = workspace, .run = run

ESMM_KERNEL(fine_bf16_sm90a) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(fine_f16_sm90a) = {DESCRIPTOR(f16, ESMM_F16)};
