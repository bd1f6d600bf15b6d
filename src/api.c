/*
 * api.c: products, matrices, patterns, weights and kernels as callers see them: every argument is checked here, before
 * anything else, so that nothing behind this file has to distrust its input.
 */
#include "convert.h"
#include "cuda/cuda.h"
#include "epilogue.h"
#include "source_id.h"

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

size_t esmm_dtype_size(esmm_dtype dtype)
{
  return dtype == ESMM_F32 ? 4 : dtype == ESMM_BF16 || dtype == ESMM_F16 ? 2 : 0;
}

const char *esmm_dtype_str(esmm_dtype dtype)
{
  return dtype == ESMM_F32 ? "f32" : dtype == ESMM_BF16 ? "bf16" : dtype == ESMM_F16 ? "f16" : "unknown";
}

/* ---- checks ---- */

static esmm_status check_place(esmm_ctx *ctx, const char *what, const esmm_matrix *m)
{
  if (m->place != ESMM_HOST && m->place != ESMM_DEVICE)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->place is %d, which is no esmm_place", what, (int)m->place);
  if (m->place == ESMM_HOST)
    return m->device == 0 ? ESMM_OK
                          : esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s->device is %d; host memory has 0", what, m->device);
  if (!ctx->cuda)
    return esmm_fail(ctx, ESMM_ERR_DEVICE,
                     "%s->place is ESMM_DEVICE, but this context is of the CPU: it takes matrices in host memory",
                     what);
  if (m->device != esmm_cuda_get(ctx)->ordinal)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "%s->device is %d, but this context is of %s: copy it there first", what,
                     m->device, ctx->device);
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
  const esmm_status placed = check_place(ctx, what, m);
  if (placed != ESMM_OK)
    return placed;
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

/* Copies the fields that the caller's struct has over the defaults in *into. */
static esmm_status take_opts(esmm_ctx *ctx, const char *what, const void *opts, size_t known, void *into)
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
static bool overlap(const esmm_matrix *x, const esmm_matrix *y)
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

/* Along dst's own rows (or columns): writes stay together. */
void esmm_copy_host(const esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  const bool by_rows = dst->order == ESMM_ROW_MAJOR;
  const int64_t outer = by_rows ? dst->rows : dst->cols, inner = by_rows ? dst->cols : dst->rows;
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < inner; i++) {
      const int64_t row = by_rows ? o : i, col = by_rows ? i : o;
      esmm_matrix_set(dst, row, col, esmm_matrix_get(src, row, col));
    }
  (void)ctx; /* unused without OpenMP */
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
  if (overlap(&from, &to))
    return esmm_fail(ctx, ESMM_ERR_OVERLAP, "dst (%p) shares memory with src (%p)", to.data, from.data);
  if (from.place == ESMM_DEVICE || to.place == ESMM_DEVICE)
    return esmm_cuda_matrix_copy(ctx, &from, &to);
  esmm_copy_host(ctx, &from, &to);
  return ESMM_OK;
}

/* ---- patterns ---- */

static esmm_status extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  return a->place == ESMM_DEVICE ? esmm_cuda_pattern(ctx, a, strip_rows, pattern)
                                 : esmm_pattern_host(ctx, a, strip_rows, pattern);
}

esmm_status esmm_pattern_extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!pattern)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "pattern is NULL");
  *pattern = NULL;
  if (strip_rows < 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_rows is %lld, must be at least 1", (long long)strip_rows);
  esmm_matrix checked;
  esmm_status status = esmm_check_matrix(ctx, "a", a, &checked);
  return status == ESMM_OK ? extract(ctx, &checked, strip_rows, pattern) : status;
}

esmm_status esmm_pattern_extract_b(esmm_ctx *ctx, const esmm_matrix *b, int64_t strip_cols, esmm_pattern **pattern)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!pattern)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "pattern is NULL");
  *pattern = NULL;
  if (strip_cols < 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_cols is %lld, must be at least 1", (long long)strip_cols);
  esmm_matrix checked;
  esmm_status status = esmm_check_matrix(ctx, "b", b, &checked);
  if (status != ESMM_OK)
    return status;
  esmm_matrix transposed = checked;
  transposed.rows = checked.cols;
  transposed.cols = checked.rows;
  transposed.order = checked.order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return extract(ctx, &transposed, strip_cols, pattern);
}

/* ---- weights ---- */

esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **weights)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!weights)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "weights is NULL");
  *weights = NULL;
  esmm_matrix checked;
  esmm_prepare_opts o = {.size = sizeof o};
  esmm_status status = esmm_check_matrix(ctx, "b", b, &checked);
  if (status == ESMM_OK)
    status = take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status != ESMM_OK)
    return status;
  if (o.use != ESMM_USE_ANY && o.use != ESMM_USE_DECODE && o.use != ESMM_USE_LARGE_M)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->use is %d, which is no esmm_use", (int)o.use);
  if (!(o.max_bytes_ratio >= 0.0) || isinf(o.max_bytes_ratio))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->max_bytes_ratio is %g; it must be positive, or 0 for the default",
                     o.max_bytes_ratio);
  return ctx->cuda ? esmm_cuda_prepare(ctx, &checked, &o, weights) : esmm_prepare_checked(ctx, &checked, &o, weights);
}

esmm_status esmm_weights_get_info(const esmm_weights *w, esmm_weights_info *info)
{
  if (!w || !info || !esmm_struct_size(info->size, sizeof *info))
    return ESMM_ERR_ARGUMENT;
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
  };
  memcpy(info, &all, info->size);
  return ESMM_OK;
}

/* ---- product ---- */

/* Prepared weights lie where they were prepared. */
static esmm_status check_weights(esmm_ctx *ctx, const esmm_weights *w)
{
  if (!w)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "weights is NULL");
  const int mine = ctx->cuda ? esmm_cuda_get(ctx)->ordinal : -1, theirs = w->cuda ? w->cuda->ordinal : -1;
  if (mine == theirs)
    return ESMM_OK;
  char where[16] = "the CPU";
  if (theirs >= 0)
    (void)snprintf(where, sizeof where, "cuda:%d", theirs);
  return esmm_fail(ctx, ESMM_ERR_DEVICE,
                   "the weights were prepared on %s, but this context is of %s: prepare them here", where,
                   ctx->cuda ? ctx->device : "the CPU");
}

static esmm_status make_problem(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, const esmm_matrix *c,
                                const esmm_matmul_opts *opts, esmm_matmul_opts *o, esmm_problem *p)
{
  memset(p, 0, sizeof *p);
  memset(o, 0, sizeof *o);
  o->size = sizeof *o;
  esmm_status status = esmm_check_matrix(ctx, "a", a, &p->a);
  if (status == ESMM_OK)
    status = check_weights(ctx, w);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "c", c, &p->c);
  if (status == ESMM_OK)
    status = take_opts(ctx, "opts", opts, sizeof *o, o);
  if (status != ESMM_OK)
    return status;
  if (a->cols != w->k)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "a is %lld x %lld, but the weights are %lld x %lld: k does not agree",
                     (long long)a->rows, (long long)a->cols, (long long)w->k, (long long)w->n);
  if (c->rows != a->rows || c->cols != w->n)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "c is %lld x %lld; a times the weights is %lld x %lld", (long long)c->rows,
                     (long long)c->cols, (long long)a->rows, (long long)w->n);
  if (overlap(&p->a, &p->c))
    return esmm_fail(ctx, ESMM_ERR_OVERLAP, "c (%p) shares memory with a (%p)", p->c.data, p->a.data);
  esmm_matrix bias = {.rows = 1, .cols = w->n, .ld = w->n, .place = p->c.place};
  memcpy(&bias.data, &o->bias, sizeof bias.data); /* only looked at, whatever its const */
  if (o->bias && overlap(&bias, &p->c))
    return esmm_fail(ctx, ESMM_ERR_OVERLAP, "opts->bias (%p) lies in c (%p)", bias.data, p->c.data);
  if (o->activation != ESMM_ACT_NONE && o->activation != ESMM_ACT_RELU && o->activation != ESMM_ACT_RELU2)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->activation is %d, which is no esmm_activation", (int)o->activation);
  if (o->a_pattern && (o->a_pattern->rows != a->rows || o->a_pattern->k != a->cols))
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "opts->a_pattern is of a %lld x %lld matrix, a is %lld x %lld",
                     (long long)o->a_pattern->rows, (long long)o->a_pattern->k, (long long)a->rows, (long long)a->cols);
  p->m = a->rows;
  p->n = w->n;
  p->k = w->k;
  p->w = w;
  p->alpha = o->alpha ? *o->alpha : 1.0f;
  p->beta = o->beta ? *o->beta : 0.0f;
  p->bias = o->bias;
  p->activation = o->activation;
  p->strict = o->strict != 0;
  p->pattern = p->strict ? NULL : o->a_pattern;
  /* Waking a thread takes as long as some hundred thousand multiply-adds. */
  const double work = (double)p->m * (double)p->n * (double)p->k / 1e5;
  p->threads = work >= (double)ctx->threads ? ctx->threads : (int)fmax(1.0, work);
  return ESMM_OK;
}

static const char *forced(const esmm_ctx *ctx, const esmm_matmul_opts *o)
{
  const char *force = o->force ? o->force : ctx->force;
  return !*force || strcmp(force, "auto") == 0 ? NULL : force;
}

static esmm_status unknown_kernel(esmm_ctx *ctx, const char *force)
{
  return esmm_fail(ctx, ESMM_ERR_UNKNOWN_KERNEL, "force is '%.60s', which is no kernel; `esmm list` names them", force);
}

/* No sum to make (k or alpha is 0): only the epilogue. */
static void run_epilogue_only(const esmm_problem *p)
{
  esmm_matrix c = p->c;
  esmm_problem without = *p;
  without.alpha = 1.0f;
#pragma omp parallel for num_threads(p->threads) schedule(static)
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++)
      esmm_matrix_set(&c, i, j, esmm_epilogue(&without, i, j, 0.0f));
}

static esmm_status run_planned(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_stats *s)
{
  esmm_choice choices[ESMM_MAX_KERNELS];
  const double start = esmm_now();
  int chosen;
  const esmm_status planned = esmm_plan(ctx, p, force, choices, &chosen);
  if (planned != ESMM_OK)
    return planned;
  const esmm_kernel *kernel = choices[chosen].kernel;
  p->strip_rows = choices[chosen].strip_rows;
  const size_t bytes = kernel->workspace(p);
  void *scratch = bytes == SIZE_MAX ? NULL : esmm_scratch(ctx, bytes);
  if (!scratch)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of scratch for %s", bytes, kernel->name);
  s->seconds_plan = esmm_now() - start;
  (void)snprintf(s->kernel, sizeof s->kernel, "%s", kernel->name);
  (void)snprintf(s->reason, sizeof s->reason, "%s", choices[chosen].text);
  s->strip_rows = p->strip_rows;
  s->density_a = p->sample.element;
  for (int i = 0; i < ESMM_SAMPLE_HEIGHTS; i++)
    if (p->strip_rows == (int64_t)1 << i)
      s->strip_density_a = p->sample.strip[i];
  const esmm_status ran = kernel->run(ctx, p, scratch, s);
  s->seconds_total = esmm_now() - start;
  s->seconds_multiply = s->seconds_total - s->seconds_plan - s->seconds_extract;
  return ran;
}

esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                        const esmm_matmul_opts *opts, esmm_stats *stats)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_problem p;
  esmm_matmul_opts o;
  esmm_stats s = {.size = sizeof s};
  if (stats && !esmm_struct_size(stats->size, sizeof s))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "stats->size is %zu; set it to sizeof *stats, %zu in this version",
                     stats->size, sizeof s);
  esmm_status status = make_problem(ctx, a, weights, c, opts, &o, &p);
  if (status != ESMM_OK)
    return status;
  const char *force = forced(ctx, &o);
  s.threads = ctx->cuda ? 0 : p.threads;
  s.strip_cols = ESMM_PANEL;
  s.strip_density_b = weights->strip_density;
  s.weights_bytes = weights->bytes;
  s.flop_dense = 2.0 * (double)p.m * (double)p.n * (double)p.k;
  if (force && !esmm_force_known(force))
    return unknown_kernel(ctx, force);
  if (p.m == 0 || p.n == 0) {
    (void)snprintf(s.kernel, sizeof s.kernel, "none");
    (void)snprintf(s.reason, sizeof s.reason, "c is empty");
  } else if (p.k == 0 || p.alpha == 0.0f) {
    (void)snprintf(s.kernel, sizeof s.kernel, "none");
    (void)snprintf(s.reason, sizeof s.reason, "%s is 0: only the epilogue", p.k == 0 ? "k" : "alpha");
    s.skipped_share = 1.0;
    if (ctx->cuda)
      status = esmm_cuda_matmul(ctx, &p, NULL, o.stream, stats != NULL, &s);
    else
      run_epilogue_only(&p);
  } else {
    status =
        ctx->cuda ? esmm_cuda_matmul(ctx, &p, force, o.stream, stats != NULL, &s) : run_planned(ctx, &p, force, &s);
    s.skipped_share = 1.0 - s.flop_useful / s.flop_dense;
  }
  if (status != ESMM_OK)
    return status;
  if (stats) {
    s.size = stats->size;
    memcpy(stats, &s, stats->size);
  }
  return ESMM_OK;
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
      .backend = kernel->backend == ESMM_CPU ? "cpu" : "cuda",
      .number = kernel->number,
      .flags = kernel->flags,
      .available = esmm_kernel_available(ctx, kernel, NULL, 0),
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

static int verdict_order(const esmm_verdict *x, const esmm_verdict *y)
{
  if (x->can_run != y->can_run)
    return y->can_run - x->can_run;
  if (x->competes != y->competes)
    return y->competes - x->competes;
  return x->seconds < y->seconds ? -1 : x->seconds > y->seconds;
}

esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, const esmm_matrix *c,
                         const esmm_matmul_opts *opts, esmm_verdict *verdicts, int *count)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!count || *count < 0 || (*count > 0 && !verdicts))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "count is %d with verdicts %s", count ? *count : -1,
                     verdicts ? "set" : "NULL");
  esmm_problem p;
  esmm_matmul_opts o;
  esmm_choice choices[ESMM_MAX_KERNELS];
  esmm_verdict all[ESMM_MAX_KERNELS];
  esmm_status status = make_problem(ctx, a, weights, c, opts, &o, &p);
  if (status != ESMM_OK)
    return status;
  const char *force = forced(ctx, &o);
  const int total = esmm_registry_count();
  const size_t stride = *count > 0 ? verdicts->size : sizeof *verdicts;
  if (stride < sizeof(size_t) || stride > sizeof *verdicts)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "verdicts->size is %zu; set it to sizeof *verdicts, %zu in this version",
                     stride, sizeof *verdicts);
  if (force && !esmm_force_known(force))
    return unknown_kernel(ctx, force);
  if (p.m == 0 || p.n == 0 || p.k == 0 || p.alpha == 0.0f) {
    *count = 0;
    return ESMM_OK;
  }
  int chosen;
  status = ctx->cuda ? esmm_cuda_plan(ctx, &p, force, o.stream, choices, &chosen)
                     : esmm_plan(ctx, &p, force, choices, &chosen);
  if (status != ESMM_OK)
    return status;
  for (int i = 0; i < total; i++) {
    esmm_verdict v = {.size = stride,
                      .kernel = choices[i].kernel->name,
                      .flags = choices[i].kernel->flags,
                      .can_run = choices[i].can_run,
                      .competes = choices[i].can_run && choices[i].competes,
                      .chosen = i == chosen,
                      .seconds = choices[i].seconds};
    (void)snprintf(v.text, sizeof v.text, "%s", choices[i].text);
    int at = i;
    for (; at > 0 && verdict_order(&v, &all[at - 1]) < 0; at--)
      all[at] = all[at - 1];
    all[at] = v;
  }
  for (int i = 0; i < total && i < *count; i++)
    memcpy((char *)verdicts + (size_t)i * stride, &all[i], stride);
  *count = total;
  return ESMM_OK;
}
