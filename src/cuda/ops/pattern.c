/*
 * pattern.c: bitmaps of a matrix on the GPU. It extracts strips of 32 rows, which the host ORs into taller ones; strips
 * of other heights come from a copy of the matrix in host memory.
 */
#include "cuda/cuda.h"

/* Its bitmaps of 32 rows, [strips][words] of 32 bits each, ORed into p's taller strips. */
static void fold_strips(const uint32_t *bits, int64_t strips, int64_t words, esmm_pattern *p)
{
  const int64_t height = p->strip_rows / ESMM_STRIP;
  const uint64_t last = p->k % 64 ? ((uint64_t)1 << (p->k % 64)) - 1 : UINT64_MAX;
  memset(p->bits, 0, (size_t)(p->strips * p->words) * sizeof *p->bits);
  for (int64_t s = 0; s < strips; s++) {
    uint64_t *to = p->bits + s / height * p->words;
    for (int64_t w = 0; w < words && w / 2 < p->words; w++)
      to[w / 2] |= (uint64_t)bits[s * words + w] << (32 * (w % 2));
  }
  for (int64_t s = 0; s < p->strips; s++) {
    uint64_t *to = p->bits + s * p->words;
    to[p->words - 1] &= last;
    for (int64_t w = 0; w < p->words; w++)
      p->set += __builtin_popcountll(to[w]);
  }
}

static esmm_status read_strips(esmm_ctx *ctx, const esmm_matrix *a, esmm_strips *strips, size_t bytes, uint32_t *bits)
{
  CUdeviceptr memory;
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_scratch(ctx, bytes, ctx->stream, &memory);
  if (status == ESMM_OK) {
    strips->bits = memory;
    status = esmm_cuda_extract(ctx, a, strips, false, (esmm_selector){0}, ctx->stream);
  }
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, bits, memory, bytes, ctx->stream);
  return esmm_cuda_end(ctx, ctx->stream, status);
}

/* p was allocated for a; fills it. */
static esmm_status extract_on_gpu(esmm_ctx *ctx, const esmm_matrix *a, esmm_pattern *p)
{
  const int64_t k_padded = esmm_cuda_k_padded(p->k), words = k_padded / 32;
  esmm_strips strips = {.strips = esmm_ceil_div(p->rows, ESMM_STRIP), .k_padded = k_padded};
  if (strips.strips == 0 || words == 0)
    return ESMM_OK;
  const size_t bytes = (size_t)strips.strips * (size_t)words * sizeof(uint32_t);
  uint32_t *bits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!bits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "out of memory: %zu bytes for bitmaps", bytes);
  const esmm_status status = read_strips(ctx, a, &strips, bytes, bits);
  if (status == ESMM_OK)
    fold_strips(bits, strips.strips, words, p);
  esmm_mem_free(&ctx->allocator, bits, bytes);
  return status;
}

esmm_status esmm_cuda_pattern(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  esmm_status status;
  if (a->place == ESMM_HOST)
    return esmm_pattern_host(ctx, a, strip_rows, pattern);
  if (strip_rows % ESMM_STRIP != 0) {
    esmm_matrix twin;
    status = esmm_host_twin_read(ctx, a, &twin);
    if (status != ESMM_OK)
      return status;
    status = esmm_pattern_host(ctx, &twin, strip_rows, pattern);
    esmm_host_twin_free(ctx, &twin);
    return status;
  }
  esmm_pattern *p = NULL;
  status = esmm_pattern_alloc(ctx, a->rows, a->cols, strip_rows, &p);
  if (status != ESMM_OK)
    return status;
  status = extract_on_gpu(ctx, a, p);
  if (status != ESMM_OK) {
    esmm_pattern_free(p);
    return status;
  }
  *pattern = p;
  return ESMM_OK;
}
