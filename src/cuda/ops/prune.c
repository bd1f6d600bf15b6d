/*
 * prune.c: top-N and the soft threshold on a GPU, the host's side of prune.cu: cuts, then the factor, then zeros. Until
 * the last launch B is only read: where something fails before, it is as it was.
 */
#include "cuda/ops/prune.h"

#include "cuda/ops/prune_params.h"
#include "format/prune.h"

#define ALIGN 256

ESMM_FATBIN(prune);

_Static_assert(ESMM_TOP_COLS == ESMM_AREA_COLS, "a lane has a column of an area");
_Static_assert(sizeof(esmm_nm_tally) == sizeof(esmm_prune_tally), "the device writes what the core reads");

/* A call's scratch, and what it reads back. */
typedef struct room {
  CUdeviceptr having, norms, inverses, cuts, out;
  double *host_inverses;     /* [k]; NULL without norms */
  esmm_prune_tally *tallies; /* [areas]; fits, too */
} room;

typedef struct job {
  const esmm_matrix *b;
  const esmm_top *how;
  esmm_top_keys keys;
  int64_t rows, levels, strips, areas; /* of an area; areas along k, side by side, all */
  room m;
} job;

/* The highest byte of numbers up to most: its shift. */
static int32_t highest_byte(uint64_t most)
{
  int32_t shift = 0;
  while (shift < 56 && most >> (shift + 8) > 0)
    shift += 8;
  return shift;
}

/* Keys without norms are the bits of fp32: those of 16-bit numbers end in zeros. */
static esmm_top_keys keys_of(esmm_dtype dtype, bool norms)
{
  if (norms)
    return (esmm_top_keys){.high = 56};
  switch (dtype) {
  case ESMM_BF16:
    return (esmm_top_keys){.high = 24, .low = 16};
  case ESMM_F16:
    return (esmm_top_keys){.high = 24, .low = 8};
  case ESMM_F32:
    break;
  }
  return (esmm_top_keys){.high = 24};
}

/* Along two sides. */
static esmm_launch cut(const esmm_ctx *ctx, int64_t width, int64_t lines)
{
  enum { MOST_Y = 65535 };
  const unsigned x = esmm_cuda_blocks_for(ctx, width);
  return (esmm_launch){.grid_x = x,
                       .grid_y = (unsigned)esmm_min(esmm_cuda_blocks_for(ctx, lines * x) / x, MOST_Y),
                       .threads = ESMM_TOP_THREADS};
}

/* ---- cuts ---- */

static esmm_status cut_columns(esmm_ctx *ctx, const job *j)
{
  static const esmm_cuda_function function = {&fatbin_prune, "esmm_top_columns", 0};
  const esmm_top_columns_params params = {.b = esmm_cuda_matrix(j->b),
                                          .keys = j->keys,
                                          .keep = j->how->keep,
                                          .cuts = j->m.cuts,
                                          .place_shift = highest_byte((uint64_t)j->b->rows - 1),
                                          .soft = j->how->soft};
  return esmm_cuda_launch_blocks(ctx, &function, esmm_cuda_blocks_for(ctx, j->strips), ESMM_TOP_THREADS, ctx->stream,
                                 &params);
}

/* A pass over all of B: what it leaves in `having`, of `count` numbers. */
static esmm_status pass_over(esmm_ctx *ctx, const job *j, const esmm_cuda_function *function,
                             const esmm_top_count_params *params, int64_t *having, size_t count)
{
  enum { EACH = 8 * ESMM_TOP_THREADS }; /* elements of a line that a block has at once */
  const bool by_rows = j->b->order == ESMM_ROW_MAJOR;
  const int64_t lines = by_rows ? j->b->rows : j->b->cols, length = by_rows ? j->b->cols : j->b->rows;
  const esmm_launch launch = cut(ctx, esmm_ceil_div(length, EACH), lines);
  esmm_status status = esmm_cuda_zero(ctx, j->m.having, count * sizeof *having, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_launch(ctx, function, &launch, ctx->stream, params);
  return status == ESMM_OK ? esmm_cuda_to_host(ctx, having, j->m.having, count * sizeof *having, ctx->stream) : status;
}

/* The place of the keep-th element with key params->found. */
static esmm_status find_place(esmm_ctx *ctx, const job *j, const esmm_cuda_function *function,
                              esmm_top_count_params *params, int64_t keep, int64_t *last)
{
  int64_t having[256];
  esmm_status status = ESMM_OK;
  params->places = 1;
  params->shift = highest_byte((uint64_t)j->b->rows * (uint64_t)j->b->cols - 1);
  for (; status == ESMM_OK && params->shift >= 0; params->shift -= 8) {
    status = pass_over(ctx, j, function, params, having, 256);
    if (status != ESMM_OK)
      return status;
    unsigned byte = 0;
    for (; byte < 255 && keep > having[byte]; byte++)
      keep -= having[byte];
    params->place_found |= (uint64_t)byte << params->shift;
    params->place_known |= (uint64_t)255 << params->shift;
  }
  *last = (int64_t)params->place_found;
  return status;
}

static double score_of(const job *j, uint64_t key)
{
  float score;
  const uint32_t bits = (uint32_t)key;
  if (j->how->norms)
    return esmm_prune_score(key);
  memcpy(&score, &bits, sizeof score);
  return (double)score;
}

/* One cut for all, pass by pass. */
static esmm_status find_cut(esmm_ctx *ctx, const job *j, esmm_device_cut *cut)
{
  static const esmm_cuda_function count = {&fatbin_prune, "esmm_top_count", 0},
                                  bounds = {&fatbin_prune, "esmm_top_bounds", 0};
  esmm_top_count_params params = {.b = esmm_cuda_matrix(j->b), .keys = j->keys, .having = j->m.having};
  int64_t having[256] = {0}, keep = j->how->keep;
  esmm_status status = ESMM_OK;
  *cut = (esmm_device_cut){.least = keep > 0 ? 0 : UINT64_MAX, .last = keep > 0 ? INT64_MAX : -1, .finite = 1};
  if (keep > 0 && keep < j->b->rows * j->b->cols) {
    unsigned byte = 0;
    for (params.shift = j->keys.high; params.shift >= j->keys.low; params.shift -= 8) {
      status = pass_over(ctx, j, &count, &params, having, 256);
      if (status != ESMM_OK)
        return status;
      byte = esmm_prune_next_byte(having, &keep);
      params.found |= (uint64_t)byte << params.shift;
      params.known |= (uint64_t)255 << params.shift;
    }
    cut->least = params.found;
    if (keep < having[byte]) /* else all of those stay */
      status = find_place(ctx, j, &count, &params, keep, &cut->last);
  }
  if (status != ESMM_OK || !j->how->soft)
    return status;
  params.cut = *cut;
  status = pass_over(ctx, j, &bounds, &params, having, 2);
  cut->finite = isfinite(score_of(j, (uint64_t)having[0]));
  cut->shrink = cut->finite ? score_of(j, (uint64_t)having[1]) : 0.0;
  return status;
}

static esmm_status cut_whole(esmm_ctx *ctx, const job *j)
{
  esmm_device_cut cut;
  const esmm_status status = find_cut(ctx, j, &cut);
  return status == ESMM_OK ? esmm_cuda_to_device(ctx, j->m.cuts, &cut, sizeof cut, ctx->stream) : status;
}

/* ---- areas ---- */

static esmm_status settle(esmm_ctx *ctx, const job *j, esmm_prune_tally *tally)
{
  static const esmm_cuda_function measure = {&fatbin_prune, "esmm_top_measure", 0},
                                  change = {&fatbin_prune, "esmm_top_settle", 0};
  const bool grouped = j->how->format.kind == ESMM_FORMAT_NM;
  const esmm_launch launch = cut(ctx, esmm_ceil_div(j->strips, ESMM_TOP_THREADS / 32), j->levels);
  esmm_top_areas_params params = {.b = esmm_cuda_matrix(j->b),
                                  .keys = j->keys,
                                  .cuts = grouped ? 0 : j->m.cuts,
                                  .out = j->m.out,
                                  .inverses = j->m.inverses,
                                  .levels = j->levels,
                                  .strips = j->strips,
                                  .rows = (int32_t)j->rows,
                                  .group = grouped ? j->how->format.group : (int32_t)j->rows,
                                  .keep = j->how->format.keep,
                                  .whole = j->how->whole,
                                  .soft = j->how->soft,
                                  .factor = 1.0f};
  esmm_status status = ESMM_OK;
  if (j->how->soft) {
    esmm_area_fit *fits = (void *)j->m.tallies;
    status = esmm_cuda_launch(ctx, &measure, &launch, ctx->stream, &params);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(ctx, fits, params.out, (size_t)j->areas * sizeof *fits, ctx->stream);
    if (status != ESMM_OK)
      return status;
    params.factor = esmm_top_factor(fits, j->areas);
  }
  status = esmm_cuda_launch(ctx, &change, &launch, ctx->stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, j->m.tallies, params.out, (size_t)j->areas * sizeof *j->m.tallies, ctx->stream);
  if (status == ESMM_OK)
    esmm_tally_add(tally, j->m.tallies, j->areas);
  return status;
}

/* ---- the call ---- */

static esmm_status reserve(esmm_ctx *ctx, job *j)
{
  const size_t k = (size_t)j->b->rows, cuts = j->how->whole ? 1 : (size_t)j->b->cols;
  const bool norms = j->how->norms, dense = j->how->format.kind == ESMM_FORMAT_DENSE;
  size_t bytes = 0, at[5];
  CUdeviceptr scratch;
  if (!esmm_cuda_reserve(&bytes, 256 * sizeof(uint64_t), ALIGN, &at[0]) ||
      !esmm_cuda_reserve(&bytes, norms ? k * sizeof(float) : 0, ALIGN, &at[1]) ||
      !esmm_cuda_reserve(&bytes, norms ? k * sizeof(double) : 0, ALIGN, &at[2]) ||
      !esmm_cuda_reserve(&bytes, dense ? cuts * sizeof(esmm_device_cut) : 0, ALIGN, &at[3]) ||
      !esmm_cuda_reserve(&bytes, (size_t)j->areas * sizeof(esmm_prune_tally), ALIGN, &at[4]))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b is too large to prune: %lld x %lld", (long long)j->b->rows,
                     (long long)j->b->cols);
  const esmm_status status = esmm_cuda_scratch(ctx, bytes, ctx->stream, &scratch);
  if (status != ESMM_OK)
    return status;
  j->m.having = scratch + at[0];
  j->m.norms = norms ? scratch + at[1] : 0;
  j->m.inverses = norms ? scratch + at[2] : 0;
  j->m.cuts = scratch + at[3];
  j->m.out = scratch + at[4];
  j->keys.norms = j->m.norms;
  return ESMM_OK;
}

static esmm_status upload_norms(esmm_ctx *ctx, const job *j)
{
  const size_t k = (size_t)j->b->rows;
  if (!j->how->norms)
    return ESMM_OK;
  for (size_t i = 0; i < k; i++)
    j->m.host_inverses[i] = 1.0 / fabs((double)j->how->norms[i]); /* of -0.0, too */
  const esmm_status status =
      esmm_cuda_to_device(ctx, j->m.norms, j->how->norms, k * sizeof *j->how->norms, ctx->stream);
  return status == ESMM_OK
             ? esmm_cuda_to_device(ctx, j->m.inverses, j->m.host_inverses, k * sizeof(double), ctx->stream)
             : status;
}

/* Between begin and end. */
static esmm_status prune(esmm_ctx *ctx, job *j, esmm_prune_tally *tally)
{
  esmm_status status = esmm_cuda_refuse_capture(ctx, "pruning");
  if (status == ESMM_OK)
    status = reserve(ctx, j);
  if (status == ESMM_OK)
    status = upload_norms(ctx, j);
  if (status == ESMM_OK && j->how->format.kind == ESMM_FORMAT_DENSE)
    status = j->how->whole ? cut_whole(ctx, j) : cut_columns(ctx, j);
  return status == ESMM_OK ? settle(ctx, j, tally) : status;
}

esmm_status esmm_cuda_prune_top(esmm_ctx *ctx, const esmm_matrix *b, const esmm_top *how, esmm_prune_tally *tally)
{
  job j = {.b = b,
           .how = how,
           .keys = keys_of(b->dtype, how->norms != NULL),
           .rows = esmm_area_rows(&how->format),
           .strips = esmm_ceil_div(b->cols, ESMM_AREA_COLS)};
  if (b->rows > (int64_t)UINT32_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b has too many k's to prune on a GPU: %lld", (long long)b->rows);
  j.levels = esmm_ceil_div(b->rows, j.rows);
  j.areas = j.levels * j.strips;
  const size_t inverses = how->norms ? (size_t)b->rows * sizeof(double) : 0,
               tallies = (size_t)j.areas * sizeof *j.m.tallies;
  void *memory = NULL;
  esmm_status status = esmm_prune_alloc(ctx, 1, tallies + inverses, &memory);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK) {
    j.m.tallies = memory;
    j.m.host_inverses = (void *)(j.m.tallies + j.areas);
    status = esmm_cuda_end(ctx, ctx->stream, prune(ctx, &j, tally));
  }
  esmm_mem_free(&ctx->allocator, memory, tallies + inverses);
  return status;
}
