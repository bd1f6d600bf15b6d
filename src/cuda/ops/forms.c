/*
 * forms.c: the forms of B that a GPU keeps, in one table.
 *
 *   strips    fp32: strips of 32 columns with their bitmaps, as the skipping kernels read them
 *   columns   fp32: B transposed, for the dense kernels; where the limit of bytes allows a second form
 *   rows16    16-bit: B's rows in its own dtype, bitmaps of strips of 32 columns and of tiles of 128
 *   tight16   16-bit: the rows again without padding, for cuBLAS, which is faster with them where n is small or odd
 *   tight32   fp32: rows without padding, for cuBLAS; where the limit of bytes allows a third form
 *   cells16   16-bit, BSR: cells with a nonzero, in memory of their own (blocks.c); here lie the bitmaps, as of rows16
 *   nm16      16-bit N:M that fits 2:4: values and places in blocks. With rows16 beside them, as a dense copy, where
 *             the limit of bytes allows it; any other N:M is rows16 alone
 *
 * Kernels that read strips get them made for the call where B is 16-bit (product/launch.c). To a GPU B is A transposed:
 * the kernels that extract A's strips extract B's from a matrix [n, k] of the other order.
 */
#include "cuda/ops/forms.h"

#include "convert.h"
#include "cuda/ops/blocks.h"
#include "cuda/ops/nm.h"
#include "dtype.h"

#define ALIGN 256 /* of the parts of the one allocation */

ESMM_FATBIN(prepare);

typedef struct cuda_form {
  esmm_form_kind kind;
  bool (*wanted)(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio); /* of opts' format it is */
  size_t (*bytes)(int64_t k, int64_t n);                                             /* SIZE_MAX on overflow */
  void (*place)(esmm_cuda_weights *device, CUdeviceptr at, int64_t k, int64_t n);
  /* NULL where esmm_prepare16 makes it, with the bitmaps of a 16-bit B. */
  esmm_status (*fill)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream);
  /* NULL where another form of the same weights is read back. */
  esmm_status (*read)(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream);
} cuda_form;

int64_t esmm_cuda_tiles(int64_t n)
{
  return esmm_ceil_div(n, ESMM_TILE);
}

size_t esmm_cuda_bitmap_bytes(int64_t count, int64_t k)
{
  return (size_t)count * (size_t)(esmm_cuda_k_padded(k) / 8);
}

static size_t share_bytes(int64_t k) /* of one number for each k */
{
  return (size_t)esmm_cuda_k_padded(k) * sizeof(float);
}

esmm_matrix esmm_cuda_transposed(const esmm_matrix *m)
{
  esmm_matrix t = *m;
  t.rows = m->cols;
  t.cols = m->rows;
  t.order = m->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return t;
}

/* ---- strips ---- */

static bool strips_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  (void)opts;
  (void)ratio;
  return b->dtype == ESMM_F32;
}

static size_t strips_bytes(int64_t k, int64_t n)
{
  return esmm_cuda_strips_bytes(n, k);
}

static void place_strips(esmm_cuda_weights *device, CUdeviceptr at, int64_t k, int64_t n)
{
  device->strips = esmm_cuda_strips_at(at, n, k);
}

static esmm_status fill_strips(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream)
{
  const esmm_matrix t = esmm_cuda_transposed(b);
  return esmm_cuda_extract(ctx, &t, &esmm_cuda_of(w)->strips, true, (esmm_selector){0}, stream);
}

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
static esmm_status unpack_strips(esmm_ctx *ctx, const esmm_weights *w, void *buffer, esmm_matrix *b, CUstream stream)
{
  const esmm_strips *strips = &esmm_cuda_of(w)->strips;
  const size_t bits_bytes = (size_t)strips->k_padded / 8,
               data_bytes = (size_t)strips->k_padded * ESMM_STRIP * sizeof(float);
  float *data = buffer;
  uint32_t *bits = (uint32_t *)(void *)((char *)buffer + data_bytes);
  esmm_status status = ESMM_OK;
  for (int64_t s = 0; status == ESMM_OK && s < strips->strips; s++) {
    status = esmm_cuda_to_host(ctx, data, strips->data + (size_t)s * data_bytes, data_bytes, stream);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(ctx, bits, strips->bits + (size_t)s * bits_bytes, bits_bytes, stream);
    if (status == ESMM_OK)
      unpack_strip(w, s, bits, data, b);
  }
  return status;
}

static esmm_status read_strips(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream)
{
  const size_t bytes = (size_t)esmm_cuda_of(w)->strips.k_padded * (ESMM_STRIP * sizeof(float) + sizeof(uint32_t));
  void *buffer = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!buffer)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of weights", bytes);
  const esmm_status status = unpack_strips(ctx, w, buffer, b, stream);
  esmm_mem_free(&ctx->allocator, buffer, bytes);
  return status;
}

/* ---- columns ---- */

/* Without them the dense kernels read strips, so nothing becomes impossible. */
static bool columns_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  return b->dtype == ESMM_F32 && opts->use != ESMM_USE_DECODE && ratio >= 2.0;
}

/* Padding is much of a short column: those are kept as a user of the library would have them. */
static int64_t columns_ld(int64_t k)
{
  return k < 64 ? k : esmm_cuda_k_padded(k);
}

static size_t columns_bytes(int64_t k, int64_t n)
{
  size_t bytes;
  return esmm_size_mul((size_t)n * sizeof(float), (size_t)columns_ld(k), &bytes) ? bytes : SIZE_MAX;
}

static void place_columns(esmm_cuda_weights *device, CUdeviceptr at, int64_t k, int64_t n)
{
  (void)n;
  device->columns = at;
  device->columns_ld = columns_ld(k);
}

static esmm_status fill_columns(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream)
{
  const esmm_matrix t = esmm_cuda_transposed(b);
  const esmm_cuda_weights *device = esmm_cuda_of(w);
  if (device->columns_ld == device->strips.k_padded)
    return esmm_cuda_pack_rows(ctx, &t, device->columns, device->columns_ld, (esmm_selector){0}, stream);
  const esmm_matrix columns = {.data = esmm_cuda_pointer(device->columns),
                               .rows = w->n,
                               .cols = w->k,
                               .ld = device->columns_ld,
                               .dtype = ESMM_F32,
                               .place = ESMM_DEVICE};
  return esmm_cuda_convert(ctx, &t, &columns, (esmm_selector){0}, stream);
}

/* ---- 16-bit rows: bitmaps of strips, bitmaps of tiles, the tiles' shares; then the rows ---- */

static bool is_16bit(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  (void)opts;
  (void)ratio;
  return esmm_dtype_is_16bit(b->dtype);
}

/* Beside BSR and N:M weights they are a dense copy, for the products that dense and joint kernels do faster. */
static bool rows16_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  const double others = opts->format.kind == ESMM_FORMAT_NM    ? esmm_cuda_nm_ratio(&opts->format)
                        : opts->format.kind == ESMM_FORMAT_BSR ? 1.0 /* at most */
                                                               : 0.0;
  return esmm_dtype_is_16bit(b->dtype) && ratio >= 1.0 + others;
}

/* What a 16-bit B has beside its elements. */
static bool lay_out_bits(int64_t k, int64_t n, size_t at[3], size_t *bytes)
{
  *bytes = 0;
  return esmm_cuda_reserve(bytes, esmm_cuda_bitmap_bytes(esmm_ceil_div(n, ESMM_STRIP), k), ALIGN, &at[0]) &&
         esmm_cuda_reserve(bytes, esmm_cuda_bitmap_bytes(esmm_cuda_tiles(n), k), ALIGN, &at[1]) &&
         esmm_cuda_reserve(bytes, share_bytes(k), ALIGN, &at[2]);
}

static size_t bits_bytes(int64_t k, int64_t n)
{
  size_t at[3] = {0}, bytes;
  return lay_out_bits(k, n, at, &bytes) ? bytes : SIZE_MAX;
}

static void place_bits(esmm_cuda_weights *device, CUdeviceptr base, int64_t k, int64_t n)
{
  size_t at[3] = {0}, bytes;
  (void)lay_out_bits(k, n, at, &bytes); /* its size was asked for before */
  device->strips =
      (esmm_strips){.bits = base + at[0], .strips = esmm_ceil_div(n, ESMM_STRIP), .k_padded = esmm_cuda_k_padded(k)};
  device->tiles = base + at[1];
  device->tile_alive = base + at[2];
}

/* The same, unless a dense copy has them. */
static void place_cells16(esmm_cuda_weights *device, CUdeviceptr base, int64_t k, int64_t n)
{
  if (!device->strips.bits)
    place_bits(device, base, k, n);
}

static size_t rows16_bytes(int64_t k, int64_t n)
{
  const size_t bits = bits_bytes(k, n);
  size_t rows, bytes;
  return esmm_size_mul((size_t)esmm_cuda_tiles(n) * ESMM_TILE * sizeof(uint16_t), (size_t)k, &rows) &&
                 bits != SIZE_MAX && esmm_size_add(rows, bits, &bytes)
             ? bytes
             : SIZE_MAX;
}

static void place_rows16(esmm_cuda_weights *device, CUdeviceptr base, int64_t k, int64_t n)
{
  place_bits(device, base, k, n);
  device->rows = base + bits_bytes(k, n);
  device->rows_ld = esmm_cuda_tiles(n) * ESMM_TILE;
}

esmm_matrix esmm_cuda_weights_rows(const esmm_weights *w)
{
  return (esmm_matrix){.data = esmm_cuda_pointer(esmm_cuda_of(w)->rows),
                       .rows = w->k,
                       .cols = w->n,
                       .ld = esmm_cuda_of(w)->rows_ld,
                       .dtype = w->dtype,
                       .place = ESMM_DEVICE};
}

static esmm_status read_rows16(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream)
{
  const esmm_matrix rows = esmm_cuda_weights_rows(w);
  return esmm_cuda_download(ctx, &rows, b, stream);
}

/* ---- rows without padding: what a user of the library would have ---- */

static bool tight16_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  (void)opts;
  return esmm_dtype_is_16bit(b->dtype) && ratio >= 2.0 && (b->cols < ESMM_TILE || b->cols % 8 != 0);
}

static bool tight32_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  return b->dtype == ESMM_F32 && opts->use != ESMM_USE_DECODE && ratio >= 3.0;
}

static size_t tight_bytes(int64_t k, int64_t n, size_t element)
{
  size_t bytes;
  return esmm_size_mul((size_t)n * element, (size_t)k, &bytes) ? bytes : SIZE_MAX;
}

static size_t tight16_bytes(int64_t k, int64_t n)
{
  return tight_bytes(k, n, sizeof(uint16_t));
}

static size_t tight32_bytes(int64_t k, int64_t n)
{
  return tight_bytes(k, n, sizeof(float));
}

/* form[] has it, and that is all. */
static void place_tight(esmm_cuda_weights *device, CUdeviceptr at, int64_t k, int64_t n)
{
  (void)device;
  (void)at;
  (void)k;
  (void)n;
}

static esmm_status fill_tight(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream)
{
  const esmm_form_kind kind = w->dtype == ESMM_F32 ? ESMM_FORM_TIGHT32 : ESMM_FORM_TIGHT16;
  const esmm_matrix rows = {.data = esmm_cuda_pointer(esmm_cuda_of(w)->form[kind]),
                            .rows = w->k,
                            .cols = w->n,
                            .ld = w->n,
                            .dtype = w->dtype,
                            .place = ESMM_DEVICE};
  return esmm_cuda_convert(ctx, b, &rows, (esmm_selector){0}, stream);
}

/* ---- N:M: bitmaps of strips, then values and places (nm.c) ---- */

static bool nm16_wanted(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio)
{
  (void)ratio;
  return esmm_dtype_is_16bit(b->dtype) && esmm_cuda_fits_nm16(&opts->format);
}

static size_t nm_bits_bytes(int64_t k, int64_t n)
{
  return (esmm_cuda_bitmap_bytes(esmm_ceil_div(n, ESMM_STRIP), k) + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t nm_bytes(int64_t k, int64_t n)
{
  const size_t held = esmm_cuda_nm16_bytes(k, n);
  size_t bytes;
  return held != SIZE_MAX && esmm_size_add(held, nm_bits_bytes(k, n), &bytes) ? bytes : SIZE_MAX;
}

/* Where a dense copy has bitmaps, those are the weights'. */
static void place_nm(esmm_cuda_weights *device, CUdeviceptr at, int64_t k, int64_t n)
{
  device->nm = at + nm_bits_bytes(k, n);
  if (!device->strips.bits)
    device->strips =
        (esmm_strips){.bits = at, .strips = esmm_ceil_div(n, ESMM_STRIP), .k_padded = esmm_cuda_k_padded(k)};
}

/* ---- the table ---- */

static const cuda_form forms[] = {
    {ESMM_FORM_STRIPS, strips_wanted, strips_bytes, place_strips, fill_strips, read_strips},
    {ESMM_FORM_COLUMNS, columns_wanted, columns_bytes, place_columns, fill_columns, NULL},
    {ESMM_FORM_ROWS16, rows16_wanted, rows16_bytes, place_rows16, NULL, read_rows16},
    {ESMM_FORM_TIGHT16, tight16_wanted, tight16_bytes, place_tight, fill_tight, NULL},
    {ESMM_FORM_TIGHT32, tight32_wanted, tight32_bytes, place_tight, fill_tight, NULL},
    {ESMM_FORM_CELLS16, is_16bit, bits_bytes, place_cells16, esmm_cuda_blocks_fill, esmm_cuda_blocks_read},
    {ESMM_FORM_NM16, nm16_wanted, nm_bytes, place_nm, NULL, esmm_cuda_nm_read},
};

enum { COUNT = sizeof forms / sizeof forms[0] };

unsigned esmm_cuda_forms_formats(void)
{
  unsigned formats = 0;
  for (int i = 0; i < COUNT; i++)
    formats |= 1u << esmm_form_table[forms[i].kind].format;
  return formats;
}

/* Of weights of this format? BSR and N:M weights may have 16-bit rows too. */
static bool is_for(esmm_form_kind kind, esmm_format_kind format)
{
  return esmm_form_table[kind].format == format || kind == ESMM_FORM_ROWS16;
}

bool esmm_cuda_forms_lay_out(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio, esmm_cuda_layout *l)
{
  const int64_t k = b->rows, n = b->cols;
  *l = (esmm_cuda_layout){0};
  for (int i = 0; i < COUNT; i++) {
    if (!is_for(forms[i].kind, opts->format.kind) || !forms[i].wanted(b, opts, ratio))
      continue;
    const size_t bytes = forms[i].bytes(k, n);
    if (bytes == SIZE_MAX || !esmm_cuda_reserve(&l->bytes, bytes, ALIGN, &l->at[forms[i].kind]))
      return false;
    l->forms |= 1u << forms[i].kind;
  }
  return esmm_cuda_reserve(&l->bytes, share_bytes(k), ALIGN, &l->alive_at) && l->bytes <= (size_t)INT64_MAX;
}

void esmm_cuda_forms_place(const esmm_cuda_layout *l, int64_t k, int64_t n, esmm_cuda_weights *device)
{
  device->alive = device->memory + l->alive_at;
  for (int i = 0; i < COUNT; i++)
    if (l->forms & 1u << forms[i].kind) {
      device->form[forms[i].kind] = device->memory + l->at[forms[i].kind];
      forms[i].place(device, device->form[forms[i].kind], k, n);
    }
}

/* All that a 16-bit B needs one read for: its rows, its bitmaps, the blocks of 2:4, counts. */
static esmm_status fill_16(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUdeviceptr found,
                           CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_prepare, "esmm_prepare16", 0};
  enum { MOST_BLOCKS = 1 << 20 }; /* each then takes one after the other */
  const esmm_cuda_weights *device = esmm_cuda_of(w);
  const esmm_format nm = esmm_cuda_nm_format(w);
  const bool blocks = w->forms & ESMM_FORM(NM16);
  const esmm_prepare16_params params = {.b = esmm_cuda_matrix(b),
                                        .rows = device->rows,
                                        .rows_ld = device->rows_ld,
                                        .bits = device->strips.bits,
                                        .strips = device->strips.strips,
                                        .words = device->strips.k_padded / 32,
                                        .nm = blocks ? device->nm : 0,
                                        .found = found,
                                        .check = blocks && esmm_cuda_nm_is_24(&nm),
                                        .vectors = b->order == ESMM_ROW_MAJOR && esmm_cuda_in_lines(b)};
  const double pieces = (double)esmm_ceil_div(b->rows, ESMM_PREPARE_K) * (double)esmm_cuda_tiles(b->cols);
  const unsigned grid = pieces < MOST_BLOCKS ? (unsigned)pieces : MOST_BLOCKS;
  return esmm_cuda_launch_blocks(ctx, &function, grid, ESMM_PREPARE_THREADS, stream, &params);
}

esmm_status esmm_cuda_forms_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUdeviceptr found,
                                 CUstream stream)
{
  esmm_status status = esmm_dtype_is_16bit(b->dtype) ? fill_16(ctx, b, w, found, stream) : ESMM_OK;
  for (int i = 0; status == ESMM_OK && i < COUNT; i++)
    if (w->forms & 1u << forms[i].kind && forms[i].fill)
      status = forms[i].fill(ctx, b, w, stream);
  return status;
}

esmm_status esmm_cuda_forms_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream)
{
  for (int i = 0; i < COUNT; i++)
    if (w->forms & 1u << forms[i].kind && forms[i].read)
      return forms[i].read(ctx, w, b, stream);
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "the weights have no form that can be read back");
}
