/*
 * extract.c: launches of extract.cu and tally.cu. Shapes were checked before; what is empty is not launched.
 */
#include "cuda/cuda.h"

#define CHUNK ESMM_EXTRACT_CHUNK
#define THREADS ESMM_EXTRACT_THREADS
#define MOST_Y 32768

ESMM_FATBIN(extract);
ESMM_FATBIN(tally);

esmm_device_matrix esmm_cuda_matrix(const esmm_matrix *m)
{
  return (esmm_device_matrix){.data = (uint64_t)(uintptr_t)m->data,
                              .rows = m->rows,
                              .cols = m->cols,
                              .ld = m->ld,
                              .dtype = (int32_t)m->dtype,
                              .order = (int32_t)m->order};
}

esmm_epilogue_params esmm_cuda_epilogue(const esmm_problem *p)
{
  const bool values =
      p->activation > ESMM_ACT_RELU2 || p->factor || p->residual.data || (uintptr_t)p->bias % (2 * sizeof(float)) != 0;
  esmm_epilogue_params e = {.c = esmm_cuda_matrix(&p->c),
                            .bias = (uint64_t)(uintptr_t)p->bias,
                            .alpha = p->alpha,
                            .beta = p->beta,
                            .activation = (int32_t)p->activation,
                            .extra =
                                (values ? ESMM_EXTRA_VALUES : 0u) | (p->nonzeros || p->bitmaps ? ESMM_EXTRA_TALLY : 0u),
                            .factor = (uint64_t)(uintptr_t)p->factor,
                            .factor_ld = p->factor_ld,
                            .counts = (uint64_t)(uintptr_t)p->nonzeros};
  if (p->residual.data)
    e.residual = esmm_cuda_matrix(&p->residual);
  if (p->bitmaps) {
    e.bits = esmm_cuda_pattern_address(p->bitmaps);
    e.strip_rows = p->bitmaps->strip_rows;
    e.words = 2 * p->bitmaps->words;
  }
  return e;
}

int64_t esmm_cuda_k_padded(int64_t k)
{
  return esmm_round_up(k, 32);
}

void esmm_cuda_union(const esmm_problem *p, int rows, int cols, double work, int term, esmm_cuda_units *units)
{
  double dead = 1.0;
  for (int i = 0; i < cols; i++)
    dead *= 1.0 - p->w->strip_density;
  units->base[term] = work * (1.0 - dead) * 0.5;
  units->per_strip[term] = work * (1.0 - dead) * 0.5;
  units->at_most[term] = work * (1.0 - dead) * rows;
}

/* Bitmaps first, then segments, both at multiples of 256 bytes. */
static size_t bits_bytes(int64_t strips, int64_t k_padded)
{
  return (size_t)esmm_round_up(strips * (k_padded / 8), 256);
}

size_t esmm_cuda_strips_bytes(int64_t rows, int64_t k)
{
  const int64_t strips = esmm_ceil_div(rows, ESMM_STRIP), k_padded = esmm_cuda_k_padded(k);
  size_t segments, sum;
  if (!esmm_size_mul((size_t)strips * ESMM_STRIP * sizeof(float), (size_t)k_padded, &segments) ||
      !esmm_size_add(segments, bits_bytes(strips, k_padded), &sum) || sum > (size_t)INT64_MAX)
    return SIZE_MAX;
  return sum;
}

esmm_strips esmm_cuda_strips_at(CUdeviceptr at, int64_t rows, int64_t k)
{
  const int64_t strips = esmm_ceil_div(rows, ESMM_STRIP), k_padded = esmm_cuda_k_padded(k);
  return (esmm_strips){.data = at + bits_bytes(strips, k_padded), .bits = at, .strips = strips, .k_padded = k_padded};
}

esmm_status esmm_cuda_extract(esmm_ctx *ctx, const esmm_matrix *a, const esmm_strips *out, bool write_all,
                              esmm_selector selector, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_extract", 0};
  if (out->strips == 0 || out->k_padded == 0)
    return ESMM_OK;
  const int64_t y = esmm_min(out->strips, MOST_Y);
  const esmm_extract_params params = {
      .selector = selector, .a = esmm_cuda_matrix(a), .strips = *out, .write_all = write_all};
  return esmm_cuda_launch(ctx, &function,
                          &(esmm_launch){.grid_x = (unsigned)esmm_ceil_div(out->k_padded, CHUNK),
                                         .grid_y = (unsigned)y,
                                         .grid_z = (unsigned)esmm_ceil_div(out->strips, y),
                                         .threads = THREADS},
                          stream, &params);
}

static int64_t tiles(int64_t rows, int64_t cols)
{
  return esmm_ceil_div(rows, ESMM_COPY_TILE) * esmm_ceil_div(cols, ESMM_COPY_TILE);
}

esmm_status esmm_cuda_pack_rows(esmm_ctx *ctx, const esmm_matrix *a, CUdeviceptr out, int64_t ld,
                                esmm_selector selector, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_pack_rows", 0};
  if (a->rows == 0 || ld == 0)
    return ESMM_OK;
  const esmm_pack_params params = {.selector = selector, .a = esmm_cuda_matrix(a), .out = out, .ld = ld};
  return esmm_cuda_launch_blocks(ctx, &function, esmm_cuda_blocks_for(ctx, tiles(a->rows, ld)), THREADS, stream,
                                 &params);
}

esmm_status esmm_cuda_convert(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst, esmm_selector selector,
                              CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_convert", 0};
  if (dst->rows == 0 || dst->cols == 0)
    return ESMM_OK;
  const esmm_convert_params params = {.selector = selector, .src = esmm_cuda_matrix(src), .dst = esmm_cuda_matrix(dst)};
  return esmm_cuda_launch_blocks(ctx, &function, esmm_cuda_blocks_for(ctx, tiles(dst->rows, dst->cols)), THREADS,
                                 stream, &params);
}

esmm_status esmm_cuda_finish(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *sums, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_finish", 0};
  const esmm_finish_params params = {.epilogue = esmm_cuda_epilogue(p),
                                     .sums = sums ? esmm_cuda_matrix(sums) : (esmm_device_matrix){0}};
  const double elements = (double)p->m * (double)p->n;
  if (elements == 0)
    return ESMM_OK;
  return esmm_cuda_launch_blocks(
      ctx, &function, esmm_cuda_blocks_for(ctx, elements > 1e12 ? INT32_MAX : (int64_t)(elements / THREADS) + 1),
      THREADS, stream, &params);
}

esmm_status esmm_cuda_sample(esmm_ctx *ctx, const esmm_sample_params *params, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_sample", 0};
  esmm_sample_params mine = *params;
  CUdeviceptr notes = 0;
  const esmm_status status = esmm_cuda_meeting(ctx, ESMM_MEETING_SAMPLE, stream, &notes);
  if (status != ESMM_OK)
    return status;
  mine.notes = notes;
  return esmm_cuda_launch_blocks(ctx, &function, ESMM_SAMPLES, 32 * ESMM_SAMPLE_WARPS, stream, &mine);
}

esmm_status esmm_cuda_count_joint(esmm_ctx *ctx, const esmm_count_params *params, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_extract, "esmm_count_joint", 0};
  const esmm_status status = esmm_cuda_zero(ctx, params->out, sizeof(uint64_t), stream);
  if (status != ESMM_OK || params->words == 0)
    return status;
  return esmm_cuda_launch_blocks(ctx, &function, esmm_ceil_div(32 * params->words, THREADS), THREADS, stream, params);
}

esmm_status esmm_cuda_tally_begin(esmm_ctx *ctx, const esmm_problem *p, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_tally, "esmm_tally_begin", 0};
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  const esmm_tally_begin_params params = {.counts = e.counts,
                                          .bits = e.bits,
                                          .count_words = e.counts ? p->n : 0,
                                          .bitmap_words = e.bits ? esmm_cuda_pattern_zeros(p->bitmaps) : 0};
  const int64_t words = esmm_max(params.count_words, params.bitmap_words);
  if (words == 0)
    return ESMM_OK;
  return esmm_cuda_launch_blocks(ctx, &function, esmm_cuda_blocks_for(ctx, esmm_ceil_div(words, ESMM_TALLY_THREADS)),
                                 ESMM_TALLY_THREADS, stream, &params);
}

esmm_status esmm_cuda_tally(esmm_ctx *ctx, const esmm_problem *p, esmm_selector selector, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_tally, "esmm_tally", 0};
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  const esmm_tally_params params = {
      .selector = selector, .c = e.c, .counts = e.counts, .bits = e.bits, .strip_rows = e.strip_rows, .words = e.words};
  const int64_t warps = esmm_ceil_div(p->m, ESMM_TALLY_ROWS) * esmm_ceil_div(p->n, 32);
  if (warps == 0 || !(e.extra & ESMM_EXTRA_TALLY))
    return ESMM_OK;
  return esmm_cuda_launch_blocks(ctx, &function,
                                 esmm_cuda_blocks_for(ctx, esmm_ceil_div(warps, ESMM_TALLY_THREADS / 32)),
                                 ESMM_TALLY_THREADS, stream, &params);
}

esmm_status esmm_cuda_tally_count(esmm_ctx *ctx, const esmm_tally_count_params *params, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_tally, "esmm_tally_count", 0};
  const int64_t words = esmm_ceil_div(params->strips, params->fold[1]) * params->words;
  return esmm_cuda_launch_blocks(ctx, &function, esmm_cuda_blocks_for(ctx, esmm_ceil_div(words, ESMM_TALLY_THREADS)),
                                 ESMM_TALLY_THREADS, stream, params);
}
