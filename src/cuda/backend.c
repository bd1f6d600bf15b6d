/* backend.c: an NVIDIA GPU as a backend (backend.h). */
#include "cuda/ffn/ffn.h"
#include "cuda/kernels/cublas/cublas.h"
#include "cuda/ops/blocks.h"
#include "cuda/ops/forms.h"
#include "cuda/ops/nm.h"
#include "cuda/ops/prune.h"

#include <stdio.h>

static bool has(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  const esmm_cuda_kernel *about = esmm_cuda_about(kernel);
  const int sm = esmm_cuda_get(ctx)->sm;
  if (about->exact ? sm == about->sm : sm >= about->sm)
    return true;
  (void)snprintf(why, why_bytes, "it is built for sm_%d%s; this GPU is sm_%d", about->sm,
                 about->exact ? " alone" : " and later", sm);
  return false;
}

/* ---- memory ---- */

static esmm_status memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr)
{
  enum { LEAST = 256 }; /* the driver refuses an allocation of 0 bytes */
  CUdeviceptr device = 0;
  const esmm_status status = esmm_cuda_alloc(ctx, bytes ? bytes : LEAST, &device);
  if (status == ESMM_OK)
    *ptr = esmm_cuda_pointer(device);
  return status;
}

static void memory_free(esmm_ctx *ctx, void *ptr)
{
  esmm_cuda_free(ctx, (CUdeviceptr)(uintptr_t)ptr);
}

/* ---- time ---- */

static esmm_status timer_create(esmm_ctx *ctx, void **timer)
{
  esmm_cuda_timer *t = esmm_mem_alloc(&ctx->allocator, sizeof *t);
  if (!t)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a timer");
  *t = (esmm_cuda_timer){0};
  const esmm_status status = esmm_cuda_timer_create(ctx, t);
  if (status != ESMM_OK) {
    esmm_mem_free(&ctx->allocator, t, sizeof *t);
    return status;
  }
  *timer = t;
  return ESMM_OK;
}

static void timer_free(esmm_ctx *ctx, void *timer)
{
  esmm_cuda_timer_free(ctx, timer);
  esmm_mem_free(&ctx->allocator, timer, sizeof(esmm_cuda_timer));
}

static esmm_status timer_start(esmm_ctx *ctx, void *timer)
{
  return esmm_cuda_timer_start(ctx, timer, ctx->stream);
}

static esmm_status timer_stop(esmm_ctx *ctx, void *timer)
{
  return esmm_cuda_timer_stop(ctx, timer, ctx->stream);
}

static esmm_status timer_seconds(esmm_ctx *ctx, void *timer, double *seconds)
{
  return esmm_cuda_timer_seconds(ctx, timer, seconds);
}

/* A driver's is some ten thousand; a library's three numbers are below a thousand each. */
static uint64_t versions(const esmm_weights *w)
{
  const unsigned dense = ESMM_FORM(COLUMNS) | ESMM_FORM(TIGHT32) | ESMM_FORM(ROWS16) | ESMM_FORM(TURNED16);
  return (uint64_t)esmm_cuda_driver_get()->version << 32 | (w->forms & dense ? esmm_cublas_version() : 0);
}

static void tune_suffix(const esmm_ctx *ctx, char *out, size_t bytes)
{
  (void)ctx;
  (void)snprintf(out, bytes, "%s", ""); /* the GPU's name says it all */
}

const esmm_backend esmm_cuda_backend = {
    .name = "cuda",
    .kind = "GPU",
    .numbered = true,
    .memory = true,
    .streams = true,
    .count = esmm_cuda_count,
    .open = esmm_cuda_open,
    .close = esmm_cuda_close,
    .synchronize = esmm_cuda_synchronize,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .copy = esmm_cuda_matrix_copy,
    .pattern = esmm_cuda_pattern,
    .pattern_bits = esmm_cuda_pattern_bits,
    .pattern_free = esmm_cuda_pattern_free,
    .formats = esmm_cuda_forms_formats,
    .prepare = esmm_cuda_prepare,
    .prepare_bsr = esmm_cuda_prepare_bsr,
    .weights_free = esmm_cuda_weights_free,
    .weights_to_host = esmm_cuda_weights_to_host,
    .weights_from_host = esmm_cuda_weights_from_host,
    .format_check = esmm_cuda_format_check,
    .prune = esmm_cuda_prune,
    .weigh_blocks = esmm_cuda_weigh_blocks,
    .drop_blocks = esmm_cuda_drop_blocks,
    .prune_top = esmm_cuda_prune_top,
    .multiply = esmm_cuda_multiply,
    .finish = esmm_cuda_multiply_nothing,
    .explain = esmm_cuda_explain,
    .settle_reports = esmm_cuda_settle_reports,
    .has = has,
    .timer_create = timer_create,
    .timer_free = timer_free,
    .timer_start = timer_start,
    .timer_stop = timer_stop,
    .timer_seconds = timer_seconds,
    .trials = esmm_cuda_trials,
    .tune_suffix = tune_suffix,
    .versions = versions,
    .tune_sample = esmm_cuda_tune_sample,
    .tune_measure = esmm_cuda_tune_measure,
    .layer = &esmm_ffn_cuda,
};
