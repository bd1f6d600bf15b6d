/*
 * nm.c: N:M weights on a GPU, the host's side of nm.cu: whether a B fits, its form, and pruning.
 *
 * What fits 2:4 has the form nm16, which prepare.cu makes: blocks of values and places as Hopper's sparse tensor core
 * reads them, behind bitmaps of strips of 32 columns (forms.c). nm_layout.h draws it. Any other N:M is kept as dense
 * rows.
 */
#include "cuda/ops/nm.h"

#include "cuda/ops/forms.h"

#define ALIGN 256

ESMM_FATBIN(nm);

/* ---- launches ---- */

static esmm_nm_params params_of(const esmm_matrix *b, const esmm_format *f)
{
  return (esmm_nm_params){.b = esmm_cuda_matrix(b),
                          .keep = f->keep,
                          .group = f->group,
                          .group_cols = f->group_cols,
                          .strips = esmm_ceil_div(b->cols, f->group_cols),
                          .groups = esmm_ceil_div(b->rows, f->group)};
}

/* A limited number of blocks along two sides: each goes through what is left. */
static esmm_launch cut(const esmm_ctx *ctx, int64_t width, int64_t lines, unsigned threads)
{
  enum { EACH = 16, MOST_Y = 65535 }; /* blocks of a multiprocessor */
  const int64_t most = (int64_t)EACH * esmm_cuda_get(ctx)->multiprocessors, x = esmm_min(width, most);
  const int64_t y = esmm_max(1, esmm_min(esmm_min(lines, most / x), MOST_Y));
  return (esmm_launch){.grid_x = (unsigned)x, .grid_y = (unsigned)y, .threads = threads};
}

static esmm_launch cut_groups(const esmm_ctx *ctx, const esmm_nm_params *p)
{
  const bool by_rows = p->b.order == ESMM_ROW_MAJOR;
  const int64_t width = by_rows ? p->strips : p->groups, lines = by_rows ? p->groups : p->strips;
  return cut(ctx, esmm_ceil_div(width, p->group_cols == 1 ? ESMM_NM_THREADS : ESMM_NM_THREADS / 32), lines,
             ESMM_NM_THREADS);
}

/* ---- does it fit? ---- */

bool esmm_cuda_nm_is_24(const esmm_format *f)
{
  return f->keep == 2 && f->group == 4 && f->group_cols == 1;
}

esmm_status esmm_cuda_nm_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, CUdeviceptr misfit,
                               CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_nm, "esmm_nm_check", 0};
  esmm_nm_params params = params_of(b, f);
  const esmm_launch launch = cut_groups(ctx, &params);
  params.out = misfit;
  return esmm_cuda_launch(ctx, &function, &launch, stream, &params);
}

/* A misfit's group and strip of columns. */
static void place_of(const esmm_matrix *b, const esmm_format *f, uint64_t misfit, int64_t *group, int64_t *strip)
{
  const int64_t strips = esmm_ceil_div(b->cols, f->group_cols), place = (int64_t)(~misfit / 64);
  *group = place / strips;
  *strip = place % strips;
}

esmm_status esmm_cuda_nm_fits(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, uint64_t misfit)
{
  int64_t group, strip;
  if (misfit == 0)
    return ESMM_OK;
  place_of(b, f, misfit, &group, &strip);
  return esmm_nm_misfit(ctx, f, b->rows, b->cols, group, strip, (int)(~misfit % 64));
}

static esmm_status check_in_scratch(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, uint64_t *misfit)
{
  CUdeviceptr scratch;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "checking a format");
  if (status == ESMM_OK)
    status = esmm_cuda_scratch(ctx, sizeof *misfit, ctx->stream, &scratch);
  if (status == ESMM_OK)
    status = esmm_cuda_zero(ctx, scratch, sizeof *misfit, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_nm_check(ctx, b, f, scratch, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_to_host(ctx, misfit, scratch, sizeof *misfit, ctx->stream) : status;
}

esmm_status esmm_cuda_format_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, int64_t *group,
                                   int64_t *strip)
{
  uint64_t misfit = 0;
  *group = *strip = -1;
  if (b->rows == 0 || b->cols == 0)
    return ESMM_OK;
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, check_in_scratch(ctx, b, f, &misfit));
  if (status == ESMM_OK && misfit != 0)
    place_of(b, f, misfit, group, strip);
  return status;
}

/* ---- the form ---- */

double esmm_cuda_nm_ratio(const esmm_format *f)
{
  return esmm_cuda_fits_nm16(f) ? 0.5625 : 0.0;
}

size_t esmm_cuda_nm16_bytes(int64_t k, int64_t n)
{
  size_t bytes;
  return esmm_size_mul((size_t)esmm_nm16_tiles(n) * ESMM_NM16_BLOCK, (size_t)esmm_nm16_blocks(k), &bytes) ? bytes
                                                                                                          : SIZE_MAX;
}

/* ---- B again ---- */

void esmm_cuda_nm16_unpack(const unsigned char *blocks, int64_t tile, esmm_matrix *b)
{
  const int64_t j0 = tile * ESMM_NM16_COLS, cols = esmm_min(ESMM_NM16_COLS, b->cols - j0);
  uint16_t *to = b->data;
  for (int64_t k = 0; k < b->rows; k++)
    memset(to + k * b->ld + j0, 0, (size_t)cols * sizeof *to);
  for (int64_t i = 0; i < esmm_nm16_blocks(b->rows); i++)
    for (int col = 0; col < cols; col++)
      for (int slot = 0; slot < ESMM_NM16_K / 2; slot++) {
        const unsigned char *block = blocks + i * ESMM_NM16_BLOCK;
        uint32_t word;
        memcpy(&word, block + esmm_nm16_word_at(col, slot / 2), sizeof word);
        const uint32_t place = word >> (esmm_nm16_shift(col, slot / 2) + slot % 2 * 2) & 3;
        const int64_t k = i * ESMM_NM16_K + slot / 2 * 4 + (int64_t)place;
        if (k < b->rows) /* what lies behind is padding */
          memcpy(to + k * b->ld + j0 + col, block + esmm_nm16_value_at(col, slot), sizeof *to);
      }
}

/* A tile at a time through a buffer. */
esmm_status esmm_cuda_nm_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream)
{
  const size_t bytes = (size_t)esmm_nm16_blocks(w->k) * ESMM_NM16_BLOCK;
  unsigned char *buffer = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!buffer)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of weights", bytes);
  esmm_status status = ESMM_OK;
  for (int64_t tile = 0; status == ESMM_OK && tile < esmm_nm16_tiles(w->n); tile++) {
    status = esmm_cuda_to_host(ctx, buffer, esmm_cuda_of(w)->nm + (size_t)tile * bytes, bytes, stream);
    if (status == ESMM_OK)
      esmm_cuda_nm16_unpack(buffer, tile, b);
  }
  esmm_mem_free(&ctx->allocator, buffer, bytes);
  return status;
}

/* ---- pruning ---- */

/* Groups of four k's of 16-bit rows go by whole vectors, where those are aligned and nothing weighs them. */
static bool by_vectors(const esmm_matrix *b, const esmm_format *f, const float *norms)
{
  return esmm_dtype_is_16bit(b->dtype) && b->order == ESMM_ROW_MAJOR && esmm_cuda_in_lines(b) && b->cols % 8 == 0 &&
         f->group == 4 && f->group_cols == 1 && !norms;
}

static esmm_launch cut_vectors(const esmm_ctx *ctx, const esmm_nm_params *p)
{
  return cut(ctx, esmm_ceil_div(p->groups * (p->b.cols / 8), ESMM_NM_THREADS), 1, ESMM_NM_THREADS);
}

/* Between begin and end. Blocks write a tally each; one more adds those up in their order, so that a call gives the
   same sums each time. Scratch: the sum, the tallies, then the norms. */
static esmm_status prune(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                         esmm_nm_tally *tally)
{
  static const esmm_cuda_function groups = {&fatbin_nm, "esmm_nm_prune", 0},
                                  vectors = {&fatbin_nm, "esmm_nm_prune_4", 0}, add = {&fatbin_nm, "esmm_nm_add", 0};
  const bool wide = by_vectors(b, f, norms);
  esmm_nm_params params = params_of(b, f);
  const esmm_launch launch = wide ? cut_vectors(ctx, &params) : cut_groups(ctx, &params);
  const size_t blocks = (size_t)launch.grid_x * launch.grid_y, norm_bytes = norms ? (size_t)b->rows * sizeof *norms : 0;
  size_t bytes = 0, sum_at, tallies_at, norms_at;
  CUdeviceptr scratch;
  if (!esmm_cuda_reserve(&bytes, sizeof *tally, ALIGN, &sum_at) ||
      !esmm_cuda_reserve(&bytes, blocks * sizeof *tally, ALIGN, &tallies_at) ||
      !esmm_cuda_reserve(&bytes, norm_bytes, ALIGN, &norms_at))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b has too many k's: %lld", (long long)b->rows);
  esmm_status status = esmm_cuda_refuse_capture(ctx, "pruning");
  if (status == ESMM_OK)
    status = esmm_cuda_scratch(ctx, bytes, ctx->stream, &scratch);
  if (status != ESMM_OK)
    return status;
  params.out = scratch + tallies_at;
  params.norms = norms ? scratch + norms_at : 0;
  const esmm_nm_add_params adding = {.from = params.out, .to = scratch + sum_at, .count = (int64_t)blocks};
  if (norms)
    status = esmm_cuda_to_device(ctx, params.norms, norms, norm_bytes, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_launch(ctx, wide ? &vectors : &groups, &launch, ctx->stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_launch_blocks(ctx, &add, 1, ESMM_NM_THREADS, ctx->stream, &adding);
  return status == ESMM_OK ? esmm_cuda_to_host(ctx, tally, adding.to, sizeof *tally, ctx->stream) : status;
}

esmm_status esmm_cuda_prune(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                            esmm_prune_tally *tally)
{
  esmm_nm_tally sum = {0};
  if (b->rows == 0 || b->cols == 0)
    return ESMM_OK;
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, prune(ctx, b, f, norms, &sum));
  tally->kept += sum.kept;
  tally->dropped += sum.dropped;
  tally->squares += sum.squares;
  tally->squares_dropped += sum.squares_dropped;
  return status;
}
