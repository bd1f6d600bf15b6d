/*
 * k_bsr16_joint_sm90a.c: joint_bsr_bf16_sm90a and joint_bsr_f16_sm90a: a B of blocks on Hopper, of which the k's that
 * are dead in 128 rows of A are left out. See k_bsr16_joint_sm90a.cu.
 *
 * A is packed first, into as many bytes as it has; it is read as it is where TMA can do that (16-byte lines), else
 * copied before.
 */
#include "cuda/kernels/bsr16/bsr16.h"
#include "cuda/kernels/common/aligned.h"

#include <stdio.h>

#define ALIGN 1024
#define TOGETHER 8 /* strips of A whose tiles come together */
#define PART .06   /* of 128 k's: what the last, not full unit of a cut's lines takes beside those that are alive */
#define ODD 1.2e-6 /* of a launch: each element of a C that TMA does not write */
#define MOST_CELLS (1 << 22)

ESMM_FATBIN(k_bsr16_joint_sm90a);
static const esmm_cuda_function pack = {&fatbin_k_bsr16_joint_sm90a, "esmm_bsr16_joint_pack", ESMM_JOINT_PACK_SHARED};
static const esmm_cuda_function bf16 = {&fatbin_k_bsr16_joint_sm90a, "esmm_bsr16_joint_bf16", ESMM_JOINT_SHARED};
static const esmm_cuda_function f16 = {&fatbin_k_bsr16_joint_sm90a, "esmm_bsr16_joint_f16", ESMM_JOINT_SHARED};

static int64_t strips_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_JOINT_CUT);
}

static int64_t cuts_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->k, ESMM_JOINT_CUT);
}

/* Of columns. */
static int64_t tiles_of(const esmm_problem *p)
{
  return esmm_ceil_div(p->n, ESMM_JOINT_COLS);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  if (!esmm_bsr16_fits(p, why, why_bytes))
    return false;
  if (b->cell_k == ESMM_CELL_COLS && b->cells <= MOST_CELLS && strips_of(p) * cuts_of(p) <= INT32_MAX / 2)
    return true;
  if (b->cell_k != ESMM_CELL_COLS)
    (void)snprintf(why, why_bytes, "blocks of b have %d rows: it wants a multiple of %d", p->w->bsr.block_rows,
                   ESMM_CELL_COLS);
  else
    (void)snprintf(why, why_bytes, "a is %lld x %lld, and b has %lld cells: too large for its counters",
                   (long long)p->m, (long long)p->k, (long long)b->cells);
  return false;
}

/* ---- what it costs ---- */

/* The share of (128 k's, 128 columns) that has a cell. */
static double density_of(const esmm_problem *p)
{
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const double all = (double)b->chunks * (double)esmm_ceil_div(p->n, ESMM_BSR16_COLS);
  const double density = fmin(1.0, (double)b->entry_count / all);
  return p->w->bsr.block_rows % ESMM_JOINT_CUT == 0 ? density : 1.0 - (1.0 - density) * (1.0 - density);
}

/* Lines of A and B that come to a multiprocessor, 64 k's of a cell of 128 columns a time; what packing reads and
   writes; tiles. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double m = (double)p->m, k = (double)p->k;
  const double rounds = (double)(strips_of(p) * tiles_of(p)) / (double)esmm_cuda_sms(p);
  /* Where rounds are few, the last one counts as a whole. */
  const double each = rounds <= 4.0 ? ceil(rounds) : rounds + 0.5;
  const double cells = each * 2.0 * density_of(p) * (double)cuts_of(p); /* of a multiprocessor */
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  units->per_strip[0] = 2.0 * cells;
  units->base[0] = 2.0 * PART * cells;
  units->base[1] = each;
  units->base[2] = 2.0 * m * k + 128.0 * 64.0 * (double)esmm_cuda_b(p)->blocks.cells;
  units->per_strip[2] = 2.0 * m * k;
  units->base[4] = esmm_cuda_copy_units(p);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + (esmm_cuda_writes_boxes(p, &e) && !p->gated ? 0.0 : ODD * m * (double)p->n);
  *variant = ESMM_JOINT_CUT;
}

/* ---- workspace: a copy of A, then A packed ---- */

typedef struct layout {
  size_t copy, packed, lists, counts, bytes;
} layout;

static bool lay_out(const esmm_problem *p, layout *l)
{
  const size_t cuts = (size_t)(strips_of(p) * cuts_of(p));
  *l = (layout){0};
  return cuts <= SIZE_MAX / ESMM_JOINT_CUT_BYTES &&
         esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a), ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, cuts * ESMM_JOINT_CUT_BYTES, ALIGN, &l->packed) &&
         esmm_cuda_reserve(&l->bytes, cuts * ESMM_JOINT_CUT * sizeof(uint16_t), ALIGN, &l->lists) &&
         esmm_cuda_reserve(&l->bytes, cuts * sizeof(uint32_t), ALIGN, &l->counts);
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  layout l;
  return lay_out(p, &l) ? l.bytes : SIZE_MAX;
}

/* ---- running ---- */

static esmm_status make_maps(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *a,
                             esmm_bsr16_joint_params *params)
{
  const bool by_k = a->order == ESMM_COL_MAJOR;
  esmm_status status =
      esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(a), by_k ? p->m : p->k, by_k ? p->k : p->m, a->ld, &params->map_a);
  if (status == ESMM_OK && params->c_boxes)
    status = esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(&p->c), p->n, p->m, p->c.ld, &params->map_c);
  return status;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const esmm_cuda_blocks *b = &esmm_cuda_b(p)->blocks;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  CUdeviceptr meeting = 0;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_meeting(ctx, ESMM_MEETING_BSR16, call->stream, &meeting);
  if (status == ESMM_OK)
    status = esmm_cuda_align_a(ctx, p, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_bsr16_joint_params params = {.selector = call->selector,
                                    .m = (int32_t)p->m,
                                    .n = (int32_t)p->n,
                                    .k = p->k,
                                    .a_by_k = a.order == ESMM_COL_MAJOR,
                                    .strips = (int32_t)strips_of(p),
                                    .cuts = (int32_t)cuts_of(p),
                                    .panels = (int32_t)esmm_ceil_div(p->n, ESMM_CELL_COLS),
                                    .chunks = (int32_t)b->chunks,
                                    .tiles = (int32_t)tiles_of(p),
                                    .group = TOGETHER,
                                    .cells = b->values,
                                    .places = b->places,
                                    .packed = at + l.packed,
                                    .lists = at + l.lists,
                                    .counts = at + l.counts,
                                    .asked = meeting,
                                    .report = call->report,
                                    .b_density = (float)density_of(p),
                                    .epilogue = esmm_cuda_epilogue(p)};
  params.c_boxes = esmm_cuda_writes_boxes(p, &params.epilogue);
  status = make_maps(ctx, p, &a, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_launch(ctx, &pack,
                              &(esmm_launch){.grid_x = (unsigned)(params.strips * params.cuts),
                                             .threads = ESMM_JOINT_PACK_THREADS,
                                             .shared = ESMM_JOINT_PACK_SHARED},
                              call->stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_mark_extracted(ctx, p);
  if (status != ESMM_OK)
    return status;
  stats->strip_rows = ESMM_JOINT_CUT;
  const esmm_launch launch = {.grid_x = (unsigned)esmm_cuda_get(ctx)->multiprocessors,
                              .threads = ESMM_JOINT_THREADS,
                              .shared = ESMM_JOINT_SHARED};
  return esmm_cuda_launch(ctx, self->own, &launch, call->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 90, .exact = true, .reports = true, .line = line};

#define JOINT(id, dtype)                                                                                              \
  .name = "joint_bsr_" #id "_sm90a",                                                                                  \
  .doc = #id ": the blocks of B that are there, without the k's that are dead in 128 rows of A (wgmma)",              \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(CELLS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .variant_strips = true, .own = &id, .can_run = can_run, .terms = esmm_cuda_terms,  \
  .run = run, .workspace = workspace, .device = &about,                                                               \
  .term_names = {"cells of 64 alive k's", "tiles", "packing of a", "", "copying of a", "launches"},                   \
  .cost = {4.2e-7, 2e-6, 2.6e-13, 0, 3.9e-6, 1.6e-5}

ESMM_KERNEL(joint_bsr_bf16_sm90a) = {JOINT(bf16, ESMM_BF16)};

ESMM_KERNEL(joint_bsr_f16_sm90a) = {JOINT(f16, ESMM_F16)};
