/*
 * copy.c: matrices between host and GPU. What has the same dtype and order on both sides is copied as it lies; anything
 * else is converted by the CPU, in a tight copy in host memory, by the code that converts host matrices. These copies
 * wait. From device to device a kernel copies and converts, in the order of the context's stream, without a wait.
 */
#include "cuda/cuda.h"

/* A matrix as lines of bytes: its rows, or its columns where those are contiguous. */
typedef struct lines {
  size_t bytes, stride, count;
} lines;

static lines lines_of(const esmm_matrix *m)
{
  const bool by_rows = m->order == ESMM_ROW_MAJOR;
  const size_t size = esmm_dtype_size(m->dtype);
  return (lines){.bytes = (size_t)(by_rows ? m->cols : m->rows) * size,
                 .stride = (size_t)m->ld * size,
                 .count = (size_t)(by_rows ? m->rows : m->cols)};
}

CUdeviceptr esmm_cuda_address(const esmm_matrix *m)
{
  return (CUdeviceptr)(uintptr_t)m->data;
}

size_t esmm_cuda_tight_bytes(const esmm_matrix *m)
{
  return (size_t)m->rows * (size_t)m->cols * esmm_dtype_size(m->dtype);
}

/* Padding between the lines is not the matrix's: it is neither read nor written. */
esmm_status esmm_cuda_upload(esmm_ctx *ctx, const esmm_matrix *host, const esmm_matrix *device, CUstream stream)
{
  const lines from = lines_of(host), to = lines_of(device);
  if (from.bytes == 0 || from.count == 0)
    return ESMM_OK;
  if (from.count == 1 || (from.stride == from.bytes && to.stride == to.bytes))
    return esmm_cuda_to_device(ctx, esmm_cuda_address(device), host->data, from.bytes * from.count, stream);
  return esmm_cuda_to_device_2d(ctx, esmm_cuda_address(device), to.stride, host->data, from.stride, from.bytes,
                                from.count, stream);
}

esmm_status esmm_cuda_download(esmm_ctx *ctx, const esmm_matrix *device, const esmm_matrix *host, CUstream stream)
{
  const lines from = lines_of(device), to = lines_of(host);
  if (from.bytes == 0 || from.count == 0)
    return ESMM_OK;
  if (from.count == 1 || (from.stride == from.bytes && to.stride == to.bytes))
    return esmm_cuda_to_host(ctx, host->data, esmm_cuda_address(device), from.bytes * from.count, stream);
  return esmm_cuda_to_host_2d(ctx, host->data, to.stride, esmm_cuda_address(device), from.stride, from.bytes,
                              from.count, stream);
}

esmm_matrix esmm_cuda_tight(const esmm_matrix *m, esmm_place place, void *data)
{
  esmm_matrix out = *m;
  out.data = data;
  out.ld = m->order == ESMM_ROW_MAJOR ? m->cols : m->rows;
  out.place = place;
  return out;
}

static esmm_status upload_alone(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, esmm_cuda_upload(ctx, src, dst, ctx->stream)) : status;
}

static esmm_status download_alone(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, esmm_cuda_download(ctx, src, dst, ctx->stream)) : status;
}

static esmm_status convert_on_gpu(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst)
{
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, esmm_cuda_convert(ctx, src, dst, (esmm_selector){0}, ctx->stream));
  return status;
}

static esmm_status copy_to_gpu(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst)
{
  if (src->dtype == dst->dtype && src->order == dst->order)
    return upload_alone(ctx, src, dst);
  esmm_matrix twin;
  esmm_status status = esmm_host_twin(ctx, dst, &twin);
  if (status != ESMM_OK)
    return status;
  esmm_copy_host(ctx, src, &twin);
  status = upload_alone(ctx, &twin, dst);
  esmm_host_twin_free(ctx, &twin);
  return status;
}

static esmm_status copy_to_host(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  if (src->dtype == dst->dtype && src->order == dst->order)
    return download_alone(ctx, src, dst);
  esmm_matrix twin;
  const esmm_status status = esmm_host_twin_read(ctx, src, &twin);
  if (status != ESMM_OK)
    return status;
  esmm_copy_host(ctx, &twin, dst);
  esmm_host_twin_free(ctx, &twin);
  return ESMM_OK;
}

esmm_status esmm_cuda_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  if (src->rows == 0 || src->cols == 0)
    return ESMM_OK;
  if (src->place == ESMM_HOST && dst->place == ESMM_HOST) {
    esmm_copy_host(ctx, src, dst);
    return ESMM_OK;
  }
  if (src->place == dst->place)
    return convert_on_gpu(ctx, src, dst);
  return dst->place == ESMM_DEVICE ? copy_to_gpu(ctx, src, dst) : copy_to_host(ctx, src, dst);
}
