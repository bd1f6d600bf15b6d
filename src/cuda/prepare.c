/*
 * prepare.c: B on the GPU, once: strips of 32 columns as the skipping kernels read them, the share of strips that need
 * each k, and, for fp32, B transposed for the dense kernels. All of it in one allocation.
 *
 * To a GPU B is A transposed: the kernels that extract A's strips extract B's from a matrix [n, k] of the other order.
 */
#include "../convert.h"
#include "cuda.h"

#include <string.h>

#define COUNT_THREADS 256 /* of a block of count.cu */

ESMM_FATBIN(count);

/* Where the parts lie in the one allocation; each starts at a multiple of 256 bytes. */
typedef struct layout {
  bool columns;
  int64_t k_padded;
  size_t alive_at, columns_at, bytes;
} layout;

static bool add_part(size_t *total, size_t bytes, size_t *at)
{
  *at = *total;
  return bytes <= SIZE_MAX - 255 && esmm_size_add(*total, (bytes + 255) / 256 * 256, total);
}

static bool lay_out(int64_t k, int64_t n, bool columns, layout *l)
{
  size_t strips = esmm_cuda_strips_bytes(n, k), strips_at, column_bytes = 0;
  *l = (layout){.columns = columns, .k_padded = esmm_cuda_k_padded(k)};
  return strips != SIZE_MAX &&
         (!columns || esmm_size_mul((size_t)n * sizeof(float), (size_t)l->k_padded, &column_bytes)) &&
         add_part(&l->bytes, strips, &strips_at) &&
         add_part(&l->bytes, (size_t)l->k_padded * sizeof(float), &l->alive_at) &&
         add_part(&l->bytes, column_bytes, &l->columns_at) && l->bytes <= (size_t)INT64_MAX;
}

static esmm_matrix transposed(const esmm_matrix *m)
{
  esmm_matrix t = *m;
  t.rows = m->cols;
  t.cols = m->rows;
  t.order = m->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return t;
}

/* ---- densities ---- */

/* b is not empty. `at` is device memory for the result, which nobody needs yet. */
static esmm_status count_elements(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUdeviceptr at, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_count, "esmm_count_nonzero", 0};
  const esmm_nonzero_params params = {.m = esmm_cuda_matrix(b), .out = at};
  const unsigned blocks = 8 * (unsigned)esmm_cuda_get(ctx)->multiprocessors; /* each counts what it comes to */
  uint64_t nonzero = 0;
  esmm_status status = esmm_cuda_zero(ctx, at, sizeof nonzero, stream);
  if (status == ESMM_OK)
    status =
        esmm_cuda_launch(ctx, &function, &(esmm_launch){.grid_x = blocks, .threads = COUNT_THREADS}, stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, &nonzero, at, sizeof nonzero, stream);
  w->element_density = (double)nonzero / ((double)w->k * (double)w->n);
  return status;
}

/* Bits that are set; in strict weights every bit of a k that exists is set afterwards. */
static int64_t count_and_set(uint32_t *bits, const esmm_weights *w, int64_t words)
{
  int64_t set = 0;
  for (int64_t i = 0; i < w->panels * words; i++) {
    set += __builtin_popcount(bits[i]);
    const int64_t left = w->k - 32 * (i % words);
    if (w->strict)
      bits[i] = left >= 32 ? UINT32_MAX : left <= 0 ? 0 : ((uint32_t)1 << left) - 1;
  }
  return set;
}

/* Strip density, and strict's bitmaps. */
static esmm_status finish_bits(esmm_ctx *ctx, esmm_weights *w, CUstream stream)
{
  const esmm_strips *strips = &w->cuda->strips;
  const int64_t words = strips->k_padded / 32;
  const size_t bytes = (size_t)w->panels * (size_t)words * sizeof(uint32_t);
  uint32_t *bits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!bits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of bitmaps", bytes);
  esmm_status status = esmm_cuda_to_host(ctx, bits, strips->bits, bytes, stream);
  if (status == ESMM_OK) {
    const int64_t set = count_and_set(bits, w, words);
    w->strip_density = (double)set / ((double)w->k * (double)w->panels);
    w->full = w->strict || set == w->k * w->panels;
    if (w->strict)
      status = esmm_cuda_to_device(ctx, strips->bits, bits, bytes, stream);
  }
  esmm_mem_free(&ctx->allocator, bits, bytes);
  return status;
}

/* ---- preparing ---- */

/* b lies on the GPU and is not empty. */
static esmm_status fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  const struct esmm_cuda_weights *device = w->cuda;
  const esmm_strips *strips = &device->strips;
  const esmm_matrix t = transposed(b);
  const esmm_gate open = {0};
  esmm_status status = esmm_cuda_extract(ctx, &t, strips, true, open, stream);
  if (status == ESMM_OK && device->columns)
    status = esmm_cuda_pack_rows(ctx, &t, device->columns, strips->k_padded, open, stream);
  if (status == ESMM_OK)
    status = finish_bits(ctx, w, stream);
  if (status == ESMM_OK)
    status = count_elements(ctx, b, w, device->alive, stream);
  if (status != ESMM_OK)
    return status;
  const esmm_count_params alive = {.b_bits = strips->bits,
                                   .b_strips = strips->strips,
                                   .words = strips->k_padded / 32,
                                   .k = w->k,
                                   .out = device->alive};
  return esmm_cuda_alive(ctx, &alive, stream);
}

static esmm_status fill_from(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w, CUstream stream)
{
  if (b->place == ESMM_DEVICE)
    return fill(ctx, b, w, stream);
  CUdeviceptr memory;
  esmm_status status = esmm_cuda_alloc(ctx, esmm_cuda_tight_bytes(b), &memory);
  if (status != ESMM_OK)
    return status;
  const esmm_matrix copy = esmm_cuda_tight(b, ESMM_DEVICE, esmm_cuda_pointer(memory));
  status = esmm_cuda_upload(ctx, b, &copy, stream);
  if (status == ESMM_OK)
    status = fill(ctx, &copy, w, stream);
  esmm_cuda_free(ctx, memory);
  return status;
}

static esmm_status weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, const layout *l,
                                 esmm_weights **out)
{
  esmm_weights *w = esmm_mem_alloc(&ctx->allocator, sizeof *w);
  struct esmm_cuda_weights *device = w ? esmm_mem_alloc(&ctx->allocator, sizeof *device) : NULL;
  if (!device) {
    esmm_mem_free(&ctx->allocator, w, sizeof *w);
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for weights");
  }
  memset(w, 0, sizeof *w);
  *device = (struct esmm_cuda_weights){.ordinal = esmm_cuda_get(ctx)->ordinal,
                                       .multiprocessors = esmm_cuda_get(ctx)->multiprocessors};
  w->allocator = ctx->allocator;
  w->k = b->rows;
  w->n = b->cols;
  w->dtype = b->dtype;
  w->use = opts->use;
  w->strict = opts->strict != 0;
  w->full = true; /* until a strip without some k is found */
  w->panels = esmm_ceil_div(w->n, ESMM_PANEL);
  w->bytes = sizeof *w + sizeof *device + l->bytes;
  w->cuda = device;
  const esmm_status status = l->bytes > 0 ? esmm_cuda_alloc(ctx, l->bytes, &device->memory) : ESMM_OK;
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  device->strips = esmm_cuda_strips_at(device->memory, w->n, w->k);
  device->alive = device->memory + l->alive_at;
  device->columns = l->columns ? device->memory + l->columns_at : 0;
  *out = w;
  return ESMM_OK;
}

_Static_assert(ESMM_PANEL == ESMM_STRIP, "panels of a CPU and strips of a GPU are counted alike");

/*
 * What may be kept? Strips are fp32 whatever B is; a second form, for fp32 only, where the ratio allows it. Without it
 * the dense kernels read strips too, so nothing becomes impossible.
 */
static esmm_status choose_forms(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, bool *columns)
{
  const double ratio = opts->max_bytes_ratio > 0 ? opts->max_bytes_ratio : ESMM_BYTES_RATIO;
  const double strips = (double)sizeof(float) / (double)esmm_dtype_size(b->dtype);
  *columns = b->dtype == ESMM_F32 && opts->use != ESMM_USE_DECODE && 2.0 * strips <= ratio;
  if (strips > ratio && b->rows > 0 && b->cols > 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "prepared weights would hold %.2f times b's bytes, and max_bytes_ratio allows %.2f", strips,
                     ratio);
  return ESMM_OK;
}

/* Between begin and end. */
static esmm_status make(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, const layout *l,
                        esmm_weights **out)
{
  esmm_weights *w = NULL;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "the preparing of weights");
  if (status == ESMM_OK)
    status = weights_alloc(ctx, b, opts, l, &w);
  if (status != ESMM_OK)
    return status;
  if (w->k > 0 && w->n > 0)
    status = fill_from(ctx, b, w, opts->stream);
  *out = w;
  return status;
}

esmm_status esmm_cuda_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out)
{
  bool columns;
  layout l;
  esmm_status status = choose_forms(ctx, b, opts, &columns);
  if (status != ESMM_OK)
    return status;
  if (b->cols > INT64_MAX - 64 || b->rows > (int64_t)UINT32_MAX - 64 || !lay_out(b->rows, b->cols, columns, &l))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b is %lld x %lld: prepared weights would not fit in memory",
                     (long long)b->rows, (long long)b->cols);
  esmm_weights *w = NULL;
  status = esmm_cuda_begin(ctx, opts->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, opts->stream, make(ctx, b, opts, &l, &w));
  if (status == ESMM_OK)
    status = esmm_cuda_synchronize(ctx);
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  *out = w;
  return ESMM_OK;
}

void esmm_cuda_weights_free(esmm_weights *w)
{
  if (w->cuda->memory)
    esmm_cuda_free_at(w->cuda->ordinal, w->cuda->memory);
  esmm_mem_free(&w->allocator, w->cuda, sizeof *w->cuda);
  w->cuda = NULL;
}

/* ---- to and from the forms of a CPU, for weights files ---- */

/* Columns of one strip into b, row-major; segments without a bit are zeros. */
static void unpack_strip(const esmm_weights *w, int64_t strip, const uint32_t *bits, const float *data, esmm_matrix *b)
{
  const int64_t j0 = strip * ESMM_STRIP, cols = esmm_min(ESMM_STRIP, w->n - j0);
  for (int64_t k = 0; k < w->k; k++) {
    const bool alive = bits[k / 32] >> (k % 32) & 1;
    for (int64_t j = 0; j < cols; j++)
      esmm_matrix_set(b, k, j0 + j, alive ? data[k * ESMM_STRIP + j] : 0.0f);
  }
}

/* A strip at a time through buffer, which holds its bitmap and its segments. */
static esmm_status unpack(esmm_ctx *ctx, const esmm_weights *w, void *buffer, esmm_matrix *b)
{
  const esmm_strips *strips = &w->cuda->strips;
  const size_t bits_bytes = (size_t)strips->k_padded / 8,
               data_bytes = (size_t)strips->k_padded * ESMM_STRIP * sizeof(float);
  float *data = buffer;
  uint32_t *bits = (uint32_t *)(void *)((char *)buffer + data_bytes);
  esmm_status status = ESMM_OK;
  for (int64_t s = 0; status == ESMM_OK && s < strips->strips; s++) {
    status = esmm_cuda_to_host(ctx, data, strips->data + (size_t)s * data_bytes, data_bytes, NULL);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(ctx, bits, strips->bits + (size_t)s * bits_bytes, bits_bytes, NULL);
    if (status == ESMM_OK)
      unpack_strip(w, s, bits, data, b);
  }
  return status;
}

static esmm_matrix host_b(const esmm_weights *w)
{
  return (esmm_matrix){.rows = w->k, .cols = w->n, .ld = w->n, .dtype = w->dtype};
}

esmm_status esmm_cuda_weights_to_host(esmm_ctx *ctx, const esmm_weights *w, esmm_weights **out)
{
  const esmm_matrix shape = host_b(w);
  const size_t bytes = (size_t)w->cuda->strips.k_padded * (ESMM_STRIP * sizeof(float) + sizeof(uint32_t));
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  void *buffer = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!buffer)
    status = esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of weights", bytes);
  else if (w->k > 0 && w->n > 0) {
    status = esmm_cuda_begin(ctx, NULL);
    if (status == ESMM_OK)
      status = esmm_cuda_end(ctx, NULL, unpack(ctx, w, buffer, &b));
  }
  esmm_mem_free(&ctx->allocator, buffer, bytes);
  if (status == ESMM_OK) { /* the ratio was looked at when these were prepared */
    const esmm_prepare_opts opts = {.size = sizeof opts, .use = w->use, .strict = w->strict, .max_bytes_ratio = 1e9};
    status = esmm_prepare_checked(ctx, &b, &opts, out);
  }
  esmm_host_twin_free(ctx, &b);
  return status;
}

esmm_status esmm_cuda_weights_from_host(esmm_ctx *ctx, const esmm_weights *host, esmm_weights **out)
{
  const esmm_matrix shape = host_b(host);
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  esmm_weights_unpack(host, &b);
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = host->use, .strict = host->strict};
  status = esmm_cuda_prepare(ctx, &b, &opts, out);
  esmm_host_twin_free(ctx, &b);
  return status;
}
