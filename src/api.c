/*
 * api.c: matrices, patterns, weights and kernels as callers see them. Every argument is checked here first, so code
 * behind this file trusts its input. product.c checks the arguments of products.
 */
#include "backend.h"
#include "bits.h"
#include "convert.h"
#include "source_id.h"
#include "threads.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define STRINGIFY(x) #x
#define VERSION_STRING(a, b, c) STRINGIFY(a) "." STRINGIFY(b) "." STRINGIFY(c)

int esmm_version(void)
{
  return ESMM_VERSION_MAJOR * 10000 + ESMM_VERSION_MINOR * 100 + ESMM_VERSION_PATCH;
}

const char *esmm_version_str(void)
{
  return VERSION_STRING(ESMM_VERSION_MAJOR, ESMM_VERSION_MINOR, ESMM_VERSION_PATCH);
}

const char *esmm_source_id(void)
{
  return ESMM_SOURCE_ID;
}

const char *esmm_status_str(esmm_status status)
{
  switch (status) {
  case ESMM_OK:
    return "ok";
  case ESMM_ERR_ARGUMENT:
    return "bad argument";
  case ESMM_ERR_SHAPE:
    return "shapes do not agree";
  case ESMM_ERR_LD:
    return "leading dimension too small";
  case ESMM_ERR_DTYPE:
    return "unknown dtype";
  case ESMM_ERR_OVERFLOW:
    return "size overflow";
  case ESMM_ERR_OVERLAP:
    return "operands overlap";
  case ESMM_ERR_MEMORY:
    return "out of memory";
  case ESMM_ERR_DEVICE_MEMORY:
    return "out of GPU memory";
  case ESMM_ERR_UNSUPPORTED:
    return "unsupported";
  case ESMM_ERR_UNKNOWN_KERNEL:
    return "unknown kernel";
  case ESMM_ERR_DEVICE:
    return "no such device";
  case ESMM_ERR_DRIVER:
    return "no usable NVIDIA driver";
  case ESMM_ERR_DEVICE_LOST:
    return "the GPU is lost";
  case ESMM_ERR_DRIVER_CALL:
    return "a driver call failed";
  case ESMM_ERR_IO:
    return "input or output failed";
  case ESMM_ERR_FORMAT:
    return "not a valid weights file";
  case ESMM_ERR_TRUNCATED:
    return "file is truncated";
  case ESMM_ERR_CHECKSUM:
    return "checksum mismatch";
  case ESMM_ERR_VERSION:
    return "file of another version or byte order";
  }
  return "unknown status";
}

/* ---- checks ---- */

static esmm_status check_place(esmm_ctx *ctx, const char *what, const esmm_matrix *m)
{
  if (m->place != ESMM_HOST && m->place != ESMM_DEVICE)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->place is %d, which is no esmm_place", what, (int)m->place);
  if (m->place == ESMM_HOST)
    return m->device == 0 ? ESMM_OK
                          : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->device is %d; host memory has 0", what, m->device);
  if (!ctx->backend->memory)
    return esmm_fail(ctx, ESMM_ERR_DEVICE,
                     "%s->place is ESMM_DEVICE, but this is a %s context: it takes matrices in host memory", what,
                     esmm_ctx_kind(ctx));
  if (m->device != ctx->ordinal)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "%s->device is %d, but this is a %s context: copy it there first", what,
                     m->device, esmm_ctx_kind(ctx));
  return ESMM_OK;
}

/* What later versions will need for 8-bit types. */
static esmm_status check_reserved(esmm_ctx *ctx, const char *what, const esmm_matrix *m)
{
  if (m->scales)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->scales is set, but no dtype of this version has scales", what);
  if (m->scaling != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->scaling is %d, but no dtype of this version has scales", what,
                     m->scaling);
  if (m->reserved != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->reserved is %d; it must be 0", what, m->reserved);
  return ESMM_OK;
}

esmm_status esmm_check_matrix(esmm_ctx *ctx, const char *what, const esmm_matrix *m, esmm_matrix *out)
{
  if (!m)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", what);
  if (m->rows < 0 || m->cols < 0)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "%s is %lld x %lld; dimensions cannot be negative", what, (long long)m->rows,
                     (long long)m->cols);
  const size_t size = esmm_dtype_size(m->dtype);
  if (size == 0)
    return esmm_fail(ctx, ESMM_ERR_DTYPE, "%s->dtype is %d, which is no esmm_dtype", what, (int)m->dtype);
  if (m->order != ESMM_ROW_MAJOR && m->order != ESMM_COL_MAJOR)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->order is %d, which is no esmm_order", what, (int)m->order);
  esmm_status status = check_reserved(ctx, what, m);
  if (status == ESMM_OK)
    status = check_place(ctx, what, m);
  if (status != ESMM_OK)
    return status;
  const int64_t inner = m->order == ESMM_ROW_MAJOR ? m->cols : m->rows;
  const int64_t outer = m->order == ESMM_ROW_MAJOR ? m->rows : m->cols;
  const int64_t ld = m->ld == 0 ? inner : m->ld;
  if (ld < inner)
    return esmm_fail(ctx, ESMM_ERR_LD, "%s->ld is %lld, less than the %lld %s it must span", what, (long long)ld,
                     (long long)inner, m->order == ESMM_ROW_MAJOR ? "columns" : "rows");
  size_t elements, bytes;
  if (!esmm_size_mul((size_t)ld, (size_t)outer, &elements) || !esmm_size_mul(elements, size, &bytes) ||
      bytes > (size_t)INT64_MAX)
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "%s is %lld x %lld with ld %lld: its size in bytes overflows", what,
                     (long long)m->rows, (long long)m->cols, (long long)ld);
  if (!m->data && inner > 0 && outer > 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->data is NULL", what);
  if ((uintptr_t)m->data % size != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->data is %p, not aligned to its %zu-byte elements", what, m->data,
                     size);
  *out = *m;
  out->ld = ld;
  return ESMM_OK;
}

esmm_status esmm_begin_handle(esmm_ctx *ctx, const char *what, void *handle)
{
  if (handle)
    memset(handle, 0, sizeof(void *));
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  return handle ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", what);
}

/* Copies the fields that the caller's struct has over the defaults in *into. */
esmm_status esmm_take_opts(esmm_ctx *ctx, const char *what, const void *opts, size_t known, void *into)
{
  if (!opts)
    return ESMM_OK;
  size_t size;
  memcpy(&size, opts, sizeof size);
  if (!esmm_struct_size(size, known))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->size is %zu; set it to sizeof *%s, %zu in this version", what, size,
                     what, known);
  memcpy(into, opts, size);
  return ESMM_OK;
}

/* Bytes from the first to behind the last element; 0 for an empty matrix. */
static size_t extent(const esmm_matrix *m)
{
  const bool by_rows = m->order == ESMM_ROW_MAJOR;
  const int64_t outer = by_rows ? m->rows : m->cols, inner = by_rows ? m->cols : m->rows;
  return outer == 0 || inner == 0 ? 0 : (size_t)((outer - 1) * m->ld + inner) * esmm_dtype_size(m->dtype);
}

/* Do they share an element? Host and device addresses never do. Slices side by side in one buffer, of equal leading
   dimension, lie within each other's extent and do not. */
bool esmm_overlap(const esmm_matrix *x, const esmm_matrix *y)
{
  const uintptr_t x0 = (uintptr_t)x->data, y0 = (uintptr_t)y->data;
  const size_t x_bytes = extent(x), y_bytes = extent(y);
  if (x->place != y->place || x_bytes == 0 || y_bytes == 0 || x0 >= y0 + y_bytes || y0 >= x0 + x_bytes)
    return false;
  const size_t x_size = esmm_dtype_size(x->dtype), y_size = esmm_dtype_size(y->dtype), stride = (size_t)x->ld * x_size;
  if (x->order != y->order || stride != (size_t)y->ld * y_size)
    return true;
  const size_t x_line = (size_t)(x->order == ESMM_ROW_MAJOR ? x->cols : x->rows) * x_size;
  const size_t y_line = (size_t)(y->order == ESMM_ROW_MAJOR ? y->cols : y->rows) * y_size;
  const size_t after =
      x0 <= y0 ? (y0 - x0) % stride : (stride - (x0 - y0) % stride) % stride; /* y's place in x's line */
  return after < x_line || after + y_line > stride;
}

/* ---- matrices ---- */

typedef struct copying {
  const esmm_matrix *src;
  esmm_matrix *dst;
  int64_t inner; /* elements of a line */
} copying;

static void copy_lines(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const copying *x = arg;
  const esmm_matrix *src = x->src;
  esmm_matrix *dst = x->dst;
  const int64_t inner = x->inner;
  const bool along = src->order == dst->order;
  const size_t size = esmm_dtype_size(src->dtype);
  for (int64_t o = first; o < end; o++) {
    const int64_t from = along ? o * src->ld : o, to = o * dst->ld, step = along ? 1 : src->ld;
    if (src->dtype == dst->dtype)
      esmm_copy_elements((char *)dst->data + (size_t)to * size, 1, (const char *)src->data + (size_t)from * size, step,
                         inner, src->dtype);
    else
      esmm_convert_elements(src->data, src->dtype, from, step, inner, dst->data, dst->dtype, to);
  }
}

/* Along dst's own rows (or columns): writes stay together. */
void esmm_copy_host(const esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  const bool by_rows = dst->order == ESMM_ROW_MAJOR;
  copying x = {.src = src, .dst = dst, .inner = by_rows ? dst->cols : dst->rows};
  if (x.inner > 0) /* without elements data may be NULL */
    esmm_for(ctx, ctx->threads, by_rows ? dst->rows : dst->cols,
             esmm_at_once(x.inner, (int64_t)esmm_dtype_size(dst->dtype)), copy_lines, &x);
}

esmm_status esmm_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_matrix from, to;
  esmm_status status = esmm_check_matrix(ctx, "src", src, &from);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "dst", dst, &to);
  if (status != ESMM_OK)
    return status;
  if (from.rows != to.rows || from.cols != to.cols)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "src is %lld x %lld, dst is %lld x %lld", (long long)from.rows,
                     (long long)from.cols, (long long)to.rows, (long long)to.cols);
  if (esmm_overlap(&from, &to))
    return esmm_fail(ctx, ESMM_ERR_OVERLAP, "dst (%p) shares memory with src (%p)", to.data, from.data);
  return ctx->backend->copy(ctx, &from, &to);
}

esmm_status esmm_host_twin(esmm_ctx *ctx, const esmm_matrix *m, esmm_matrix *twin)
{
  const size_t bytes = (size_t)m->rows * (size_t)m->cols * esmm_dtype_size(m->dtype);
  void *data = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!data)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for a copy of a %lld x %lld matrix", (long long)m->rows,
                     (long long)m->cols);
  *twin = *m;
  twin->data = data;
  twin->ld = m->order == ESMM_ROW_MAJOR ? m->cols : m->rows;
  twin->place = ESMM_HOST;
  twin->device = 0;
  return ESMM_OK;
}

void esmm_host_twin_free(esmm_ctx *ctx, esmm_matrix *twin)
{
  esmm_mem_free(&ctx->allocator, twin->data, (size_t)twin->rows * (size_t)twin->cols * esmm_dtype_size(twin->dtype));
  twin->data = NULL;
}

esmm_status esmm_host_twin_read(esmm_ctx *ctx, const esmm_matrix *m, esmm_matrix *twin)
{
  esmm_status status = esmm_host_twin(ctx, m, twin);
  if (status != ESMM_OK)
    return status;
  status = ctx->backend->copy(ctx, m, twin);
  if (status != ESMM_OK)
    esmm_host_twin_free(ctx, twin);
  return status;
}

esmm_status esmm_host_twin_write(esmm_ctx *ctx, const esmm_matrix *twin, const esmm_matrix *m)
{
  esmm_matrix to = *m;
  return ctx->backend->copy(ctx, twin, &to);
}

/* ---- patterns ---- */

esmm_status esmm_pattern_extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  esmm_status status = esmm_begin_handle(ctx, "pattern", pattern);
  if (status != ESMM_OK)
    return status;
  if (strip_rows < 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_rows is %lld, must be at least 1", (long long)strip_rows);
  esmm_matrix checked;
  status = esmm_check_matrix(ctx, "a", a, &checked);
  return status == ESMM_OK ? ctx->backend->pattern(ctx, &checked, strip_rows, pattern) : status;
}

esmm_status esmm_pattern_extract_b(esmm_ctx *ctx, const esmm_matrix *b, int64_t strip_cols, esmm_pattern **pattern)
{
  esmm_status status = esmm_begin_handle(ctx, "pattern", pattern);
  if (status != ESMM_OK)
    return status;
  if (strip_cols < 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_cols is %lld, must be at least 1", (long long)strip_cols);
  esmm_matrix checked;
  status = esmm_check_matrix(ctx, "b", b, &checked);
  if (status != ESMM_OK)
    return status;
  esmm_matrix transposed = checked;
  transposed.rows = checked.cols;
  transposed.cols = checked.rows;
  transposed.order = checked.order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return ctx->backend->pattern(ctx, &transposed, strip_cols, pattern);
}

/* ---- weights ---- */

esmm_status esmm_prepare_opts_check(esmm_ctx *ctx, const esmm_prepare_opts *opts, int block_rows, int block_cols,
                                    esmm_prepare_opts *o)
{
  *o = (esmm_prepare_opts){.size = sizeof *o};
  esmm_status status = esmm_take_opts(ctx, "opts", opts, sizeof *o, o);
  if (status == ESMM_OK)
    status = esmm_format_settle(ctx, "opts->format.", &o->format, block_rows, block_cols);
  if (status != ESMM_OK)
    return status;
  if (o->use != ESMM_USE_ANY && o->use != ESMM_USE_DECODE && o->use != ESMM_USE_LARGE_M)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->use is %d, which is no esmm_use", (int)o->use);
  if (o->reserved != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->reserved is %d; it must be 0", o->reserved);
  if (!(o->max_bytes_ratio >= 0.0) || isinf(o->max_bytes_ratio))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->max_bytes_ratio is %g; it must be positive, or 0 for the default",
                     o->max_bytes_ratio);
  if (o->format.kind == ESMM_FORMAT_DENSE)
    return ESMM_OK;
  if (o->strict)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "opts->strict keeps the zeros that %s drops: prepare dense weights",
                     esmm_format_str(o->format.kind));
  return esmm_format_supported(ctx, o->format.kind);
}

esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **weights)
{
  esmm_matrix checked;
  esmm_prepare_opts o;
  esmm_status status = esmm_begin_handle(ctx, "weights", weights);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "b", b, &checked);
  if (status == ESMM_OK)
    status = esmm_prepare_opts_check(ctx, opts, ESMM_DEFAULT_BLOCK, ESMM_DEFAULT_BLOCK, &o);
  if (status != ESMM_OK)
    return status;
  return ctx->backend->prepare(ctx, &checked, &o, weights);
}

void esmm_weights_free(esmm_weights *w)
{
  if (!w)
    return;
  const esmm_allocator allocator = w->allocator;
  w->backend->weights_free(w);
  esmm_mem_free(&allocator, w, sizeof *w);
}

esmm_status esmm_weights_get_info(const esmm_weights *w, esmm_weights_info *info)
{
  if (!w || !info || !esmm_struct_size(info->size, sizeof *info))
    return ESMM_ERR_ARGUMENT;
  const double all_blocks = (double)w->bsr.levels * (double)w->bsr.strips;
  const esmm_weights_info all = {
      .size = info->size,
      .rows = w->k,
      .cols = w->n,
      .dtype = w->dtype,
      .use = w->use,
      .strict = w->strict,
      .strip_cols = ESMM_PANEL,
      .element_density = w->element_density,
      .strip_density = w->strip_density,
      .bytes = w->bytes,
      .format = {.kind = w->format,
                 .block_rows = w->bsr.block_rows,
                 .block_cols = w->bsr.block_cols,
                 .keep = w->nm.keep,
                 .group = w->nm.group,
                 .group_cols = w->nm.group_cols},
      .blocks = w->bsr.blocks,
      .block_density = all_blocks > 0 ? (double)w->bsr.blocks / all_blocks : 0.0,
  };
  memcpy(info, &all, info->size);
  return ESMM_OK;
}

/* Converts through a row-major copy: the weights themselves write no other order and no other dtype. */
static esmm_status unpack_converted(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *out)
{
  const esmm_matrix shape = {.rows = w->k, .cols = w->n, .dtype = w->dtype};
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  esmm_weights_unpack(w, &b);
  status = ctx->backend->copy(ctx, &b, out);
  esmm_host_twin_free(ctx, &b);
  return status;
}

esmm_status esmm_check_weights(esmm_ctx *ctx, const char *what, const esmm_weights *w)
{
  if (!w)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", what);
  if (w->backend == ctx->backend && w->ordinal == ctx->ordinal)
    return ESMM_OK;
  char where[32];
  if (w->backend->numbered)
    (void)snprintf(where, sizeof where, "%s:%d", w->backend->name, w->ordinal);
  else
    (void)snprintf(where, sizeof where, "the %s", w->backend->kind);
  return esmm_fail(ctx, ESMM_ERR_DEVICE,
                   "the weights in %s were prepared on %s, but this is a %s context: prepare them here", what, where,
                   esmm_ctx_kind(ctx));
}

esmm_status esmm_weights_to_dense(esmm_ctx *ctx, const esmm_weights *weights, esmm_matrix *out)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_matrix to;
  esmm_status status = esmm_check_weights(ctx, "weights", weights);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "out", out, &to);
  if (status != ESMM_OK)
    return status;
  if (to.rows != weights->k || to.cols != weights->n)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "out is %lld x %lld, the weights are %lld x %lld", (long long)to.rows,
                     (long long)to.cols, (long long)weights->k, (long long)weights->n);
  esmm_weights *host = NULL;
  if (ctx->backend->weights_to_host) {
    status = ctx->backend->weights_to_host(ctx, weights, &host);
    if (status != ESMM_OK)
      return status;
  }
  const esmm_weights *w = host ? host : weights;
  if (to.place == ESMM_HOST && to.dtype == w->dtype && to.order == ESMM_ROW_MAJOR)
    esmm_weights_unpack(w, &to);
  else
    status = unpack_converted(ctx, w, &to);
  esmm_weights_free(host);
  return status;
}

/* ---- kernels ---- */

int esmm_kernel_count(void)
{
  return esmm_registry_count();
}

static esmm_kernel_info describe(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  return (esmm_kernel_info){
      .size = sizeof(esmm_kernel_info),
      .name = kernel->name,
      .doc = kernel->doc,
      .backend = kernel->backend->name,
      .flags = kernel->flags,
      .available = esmm_kernel_available(ctx, kernel, NULL, 0),
      .formats = esmm_kernel_formats(kernel),
  };
}

esmm_status esmm_kernel_get(const esmm_ctx *ctx, int index, esmm_kernel_info *info)
{
  if (!info || !esmm_struct_size(info->size, sizeof *info) || index < 0 || index >= esmm_registry_count())
    return ESMM_ERR_ARGUMENT;
  esmm_kernel_info all = describe(ctx, esmm_registry_at(index));
  all.size = info->size;
  memcpy(info, &all, info->size);
  return ESMM_OK;
}
