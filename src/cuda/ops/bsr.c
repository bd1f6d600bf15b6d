/*
 * bsr.c: weights from a caller's blocks in device memory, which never pass through the host: bsr.cu checks the arrays,
 * unless the caller vouches for them, and expands them to a matrix that is prepared as any other.
 */
#include "cuda/ops/blocks.h"

ESMM_FATBIN(bsr);

static CUdeviceptr address_of(const void *array)
{
  return (CUdeviceptr)(uintptr_t)array;
}

static esmm_bsr_arrays_params params_of(const esmm_bsr *b, const esmm_matrix *dense, CUdeviceptr found)
{
  return (esmm_bsr_arrays_params){.pointers = address_of(b->row_pointers),
                                  .indices = address_of(b->column_indices),
                                  .values = address_of(b->values),
                                  .lines = esmm_bsr_lines(b),
                                  .places = esmm_bsr_places(b),
                                  .blocks = b->blocks,
                                  .index_bits = b->index_bits,
                                  .block_rows = b->block_rows,
                                  .block_cols = b->block_cols,
                                  .by_columns = b->order == ESMM_COL_MAJOR,
                                  .to = esmm_cuda_matrix(dense),
                                  .found = found};
}

/* ---- the check ---- */

/* Entry i of an array of indices, and the one before it, or -1 where there is none. */
static esmm_status read_two(esmm_ctx *ctx, const esmm_bsr *b, const void *array, int64_t i, int64_t value[2])
{
  const size_t size = (size_t)b->index_bits / 8;
  const int64_t first = i > 0 ? i - 1 : 0;
  int32_t narrow[2] = {0};
  int64_t wide[2] = {0};
  const esmm_status status =
      esmm_cuda_to_host(ctx, size == 4 ? (void *)narrow : (void *)wide, address_of(array) + (size_t)first * size,
                        (size_t)(i - first + 1) * size, ctx->stream);
  for (int64_t j = 0; j < 2; j++)
    value[j] = size == 4 ? narrow[j] : wide[j];
  if (i == 0) {
    value[1] = value[0];
    value[0] = -1;
  }
  return status;
}

/* What is wrong with the place that was found, in the words for arrays in host memory. */
static esmm_status describe(esmm_ctx *ctx, const char *what, const esmm_bsr *b, uint64_t place)
{
  const bool index = place >= ESMM_BSR_INDICES;
  const int64_t i = (int64_t)(index ? place - ESMM_BSR_INDICES : place);
  int64_t value[2];
  esmm_status status = read_two(ctx, b, index ? b->column_indices : b->row_pointers, i, value);
  if (status == ESMM_OK)
    status = index ? esmm_bsr_check_index(ctx, what, b, i, value[1], value[0])
                   : esmm_bsr_check_pointer(ctx, what, b, i, value[1], i > 0 ? value[0] : 0);
  if (status == ESMM_OK) /* another stream writes */
    status = esmm_fail(ctx, ESMM_ERR_ARGUMENT,
                       "%s->%s[%lld] changed while it was being checked: finish writing it before the call", what,
                       index ? "column_indices" : "row_pointers", (long long)i);
  return status;
}

/* Waits. */
static esmm_status check(esmm_ctx *ctx, const char *what, const esmm_bsr *b, const esmm_bsr_arrays_params *params)
{
  static const esmm_cuda_function pointers = {&fatbin_bsr, "esmm_bsr_pointers", 0},
                                  indices = {&fatbin_bsr, "esmm_bsr_indices", 0};
  const int64_t by_thread = esmm_ceil_div(params->lines + 1, ESMM_BLOCKS_THREADS),
                by_warp = esmm_ceil_div(params->lines, ESMM_BLOCKS_THREADS / 32);
  uint64_t found = 0;
  esmm_status status = esmm_cuda_zero(ctx, params->found, sizeof found, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_blocks_launch(ctx, &pointers, by_thread, ctx->stream, params);
  if (status == ESMM_OK)
    status = esmm_cuda_blocks_launch(ctx, &indices, by_warp, ctx->stream, params);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, &found, params->found, sizeof found, ctx->stream);
  return status == ESMM_OK && found != 0 ? describe(ctx, what, b, ~found) : status;
}

/* ---- the matrix ---- */

/* Between begin and end. *dense gets memory, which the caller frees whatever happens. */
static esmm_status expand(esmm_ctx *ctx, const char *what, const esmm_bsr *b, bool checked, CUdeviceptr *memory,
                          esmm_matrix *dense)
{
  static const esmm_cuda_function function = {&fatbin_bsr, "esmm_bsr_expand", 0};
  const esmm_matrix shape = {.rows = b->rows, .cols = b->cols, .dtype = b->dtype};
  const size_t bytes = esmm_cuda_tight_bytes(&shape);
  CUdeviceptr found = 0;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "preparing weights");
  if (status == ESMM_OK)
    status = esmm_cuda_scratch(ctx, sizeof(uint64_t), ctx->stream, &found);
  if (status == ESMM_OK)
    status = esmm_cuda_alloc(ctx, bytes, memory);
  if (status != ESMM_OK)
    return status;
  *dense = esmm_cuda_tight(&shape, ESMM_DEVICE, esmm_cuda_pointer(*memory));
  const esmm_bsr_arrays_params params = params_of(b, dense, found);
  if (checked)
    status = check(ctx, what, b, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_zero(ctx, *memory, bytes, ctx->stream);
  if (status == ESMM_OK && b->blocks > 0 && params.lines > 0 && params.places > 0)
    status = esmm_cuda_blocks_launch(ctx, &function, esmm_ceil_div(b->blocks, ESMM_BLOCKS_THREADS / 32), ctx->stream,
                                     &params);
  return status;
}

esmm_status esmm_cuda_prepare_bsr(esmm_ctx *ctx, const char *what, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                  esmm_weights **out)
{
  CUdeviceptr memory = 0;
  esmm_matrix dense = {0};
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, expand(ctx, what, b, !opts->unchecked, &memory, &dense));
  if (status == ESMM_OK)
    status = esmm_cuda_prepare(ctx, &dense, opts, out);
  esmm_cuda_free(ctx, memory);
  return status;
}
