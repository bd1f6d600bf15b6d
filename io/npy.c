/*
 * npy.c: NumPy's array files.
 *
 *     \x93NUMPY  major minor  length (2 bytes, 4 from version 2 on)  header  data
 *
 * The header is the text of a Python dictionary with exactly the keys descr, fortran_order and shape. It is parsed here
 * as data, by a grammar far narrower than Python's. The file's size alone decides how much memory is allocated, and the
 * header must agree with it to the byte.
 */
#include "npy.h"

#include "format.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NPY_MAGIC "\x93NUMPY"
#define NPY_MAGIC_BYTES 6
#define NPY_HEADER_MAX 65535 /* version 1's own limit; the headers accepted here are well below 200 bytes */
#define NPY_ALIGN 64         /* NumPy starts the data at a multiple of this */

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define NATIVE_ORDER '<'
#else
#define NATIVE_ORDER '>'
#endif

typedef struct npy_header {
  size_t data_at; /* offset of the data */
  io_dtype dtype; /* of the file */
  char descr[8];  /* as the file says it: '<f4' */
  size_t item;    /* bytes of an element in the file */
  bool swapped;   /* the other byte order than this machine's */
  bool fortran;
  int dims; /* as it was written */
  int64_t extent[IO_TENSOR_DIMS];
  int64_t rows, cols;     /* of a matrix; one dimension is a row */
  size_t elements, bytes; /* of the data */
} npy_header;

/* ---- the header's dictionary ---- */

typedef struct cursor {
  const unsigned char *at, *end;
  const unsigned char *start;
  const io_error *error;
} cursor;

static void skip_space(cursor *c)
{
  while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r'))
    c->at++;
}

/* Never shows a byte of the file as it is: it may not be printable. */
static int fail_here(const cursor *c, const char *expected)
{
  if (c->at >= c->end)
    return io_fail(c->error, ".npy header ends where %s should be", expected);
  if (*c->at >= 0x20 && *c->at < 0x7f)
    return io_fail(c->error, ".npy header has '%c' at character %td, where %s should be", *c->at, c->at - c->start,
                   expected);
  return io_fail(c->error, ".npy header has byte 0x%02x at character %td, where %s should be", *c->at, c->at - c->start,
                 expected);
}

static bool take(cursor *c, char symbol)
{
  skip_space(c);
  if (c->at >= c->end || *c->at != (unsigned char)symbol)
    return false;
  c->at++;
  return true;
}

/* A quoted string without escapes, of printable characters. */
static int take_string(cursor *c, char *out, size_t out_size, const char *expected)
{
  skip_space(c);
  if (c->at >= c->end || (*c->at != '\'' && *c->at != '"'))
    return fail_here(c, expected);
  unsigned char quote = *c->at++;
  size_t n = 0;
  while (c->at < c->end && *c->at != quote) {
    if (*c->at < 0x20 || *c->at >= 0x7f || *c->at == '\\')
      return fail_here(c, "a plain character");
    if (n + 1 >= out_size)
      return io_fail(c->error, ".npy header has a string longer than %zu characters at character %td", out_size - 1,
                     c->at - c->start);
    out[n++] = (char)*c->at++;
  }
  out[n] = '\0';
  if (c->at >= c->end)
    return fail_here(c, "a closing quote");
  c->at++;
  return 0;
}

static bool take_word(cursor *c, const char *word)
{
  skip_space(c);
  size_t n = strlen(word);
  if ((size_t)(c->end - c->at) < n || memcmp(c->at, word, n) != 0)
    return false;
  c->at += n;
  return true;
}

static int fail_descr(const io_error *error, const char *descr)
{
  return io_fail(error,
                 "field 'descr' is '%s': only float32 ('<f4'), float16 ('<f2') and float64 ('<f8'), or '>' for big "
                 "endian, are read; convert it with .astype('float32')",
                 descr);
}

/* What NumPy calls a dtype behind the byte order. Only floats become matrices; the others are known by their size. */
static io_dtype find_dtype(const char *descr)
{
  static const struct {
    char name[4];
    io_dtype dtype;
  } names[] = {{"f4", IO_F32}, {"f2", IO_F16},  {"f8", IO_F64}, {"i1", IO_I8},   {"i2", IO_I16},
               {"i4", IO_I32}, {"i8", IO_I64},  {"u1", IO_U8},  {"u2", IO_U16},  {"u4", IO_U32},
               {"u8", IO_U64}, {"b1", IO_BOOL}, {"c8", IO_C64}, {"c16", IO_C128}};
  const bool ordered = descr[0] == '<' || descr[0] == '>';
  for (size_t i = 0; i < sizeof names / sizeof *names && descr[0]; i++)
    if (strcmp(names[i].name, descr + 1) == 0 && (ordered || (descr[0] == '|' && io_dtype_bits(names[i].dtype) == 8)))
      return names[i].dtype;
  return IO_DTYPES;
}

static int parse_descr(cursor *c, npy_header *h)
{
  char descr[40];
  skip_space(c);
  if (c->at < c->end && *c->at == '[')
    return io_fail(c->error, "field 'descr' is a list: an array of records is not a matrix");
  if (take_string(c, descr, sizeof descr, "the dtype's string") != 0)
    return -1;
  h->dtype = find_dtype(descr);
  if (h->dtype == IO_DTYPES)
    return fail_descr(c->error, descr);
  memcpy(h->descr, descr, sizeof h->descr); /* '<c16' is the longest that is found */
  h->item = io_dtype_bits(h->dtype) / 8;
  h->swapped = descr[0] != NATIVE_ORDER && h->item > 1;
  return 0;
}

static int parse_order(cursor *c, npy_header *h)
{
  if (take_word(c, "True"))
    h->fortran = true;
  else if (take_word(c, "False"))
    h->fortran = false;
  else
    return fail_here(c, "True or False for field 'fortran_order'");
  return 0;
}

static int parse_extent(cursor *c, int64_t *extent)
{
  skip_space(c);
  if (c->at >= c->end || *c->at < '0' || *c->at > '9')
    return fail_here(c, "a number of field 'shape'");
  int64_t value = 0;
  while (c->at < c->end && *c->at >= '0' && *c->at <= '9') {
    if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *c->at - '0', &value))
      return io_fail(c->error, "field 'shape' has a number larger than %lld", (long long)INT64_MAX);
    c->at++;
  }
  if (c->at < c->end && *c->at == 'L') /* Python 2 wrote its long integers so */
    c->at++;
  *extent = value;
  return 0;
}

static int parse_shape(cursor *c, npy_header *h)
{
  int64_t ignored;
  int dims = 0;
  bool comma = true;
  if (!take(c, '('))
    return fail_here(c, "the ( of field 'shape'");
  while (!take(c, ')')) {
    if (!comma)
      return fail_here(c, "a comma or ) in field 'shape'");
    if (parse_extent(c, dims < IO_TENSOR_DIMS ? &h->extent[dims] : &ignored) != 0)
      return -1;
    dims++;
    comma = take(c, ',');
  }
  if (dims == 1 && !comma)
    return io_fail(c->error, "field 'shape' is a number in brackets, not a tuple");
  if (dims > IO_TENSOR_DIMS)
    return io_fail(c->error, "field 'shape' has %d dimensions: a matrix has 2 (or 1, a row); reshape it first", dims);
  h->dims = dims;
  h->rows = dims == 2 ? h->extent[0] : 1;
  h->cols = dims == 2 ? h->extent[1] : dims == 1 ? h->extent[0] : 0;
  return 0;
}

static int parse_dictionary(cursor *c, npy_header *h)
{
  static const char *const names[] = {"descr", "fortran_order", "shape"};
  static int (*const parsers[])(cursor *, npy_header *) = {parse_descr, parse_order, parse_shape};
  bool seen[3] = {false, false, false}, comma = true;
  if (!take(c, '{'))
    return fail_here(c, "{");
  while (!take(c, '}')) {
    char key[24];
    int field = 0;
    if (!comma)
      return fail_here(c, "a comma or }");
    if (take_string(c, key, sizeof key, "a quoted key") != 0)
      return -1;
    while (field < 3 && strcmp(key, names[field]) != 0)
      field++;
    if (field == 3)
      return io_fail(c->error, ".npy header has the unknown field '%s'", key);
    if (seen[field])
      return io_fail(c->error, "field '%s' is there twice", key);
    seen[field] = true;
    if (!take(c, ':'))
      return fail_here(c, "a colon");
    if (parsers[field](c, h) != 0)
      return -1;
    comma = take(c, ',');
  }
  for (int field = 0; field < 3; field++)
    if (!seen[field])
      return io_fail(c->error, ".npy header lacks field '%s'", names[field]);
  skip_space(c);
  return c->at == c->end ? 0 : fail_here(c, "nothing more");
}

/* ---- the file ---- */

static bool is_npy(const unsigned char *bytes, size_t size)
{
  return size >= NPY_MAGIC_BYTES && memcmp(bytes, NPY_MAGIC, NPY_MAGIC_BYTES) == 0;
}

static bool is_gzip(const unsigned char *bytes, size_t size)
{
  return size >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

static bool is_zip(const unsigned char *bytes, size_t size)
{
  return size >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
}

static int fail_kind(const unsigned char *bytes, size_t size, const io_error *error)
{
  if (is_gzip(bytes, size))
    return io_fail(error, "is compressed: gunzip it first");
  if (is_zip(bytes, size))
    return io_fail(error, "is a zip archive (.npz?): unzip it first, each array in it is a .npy file");
  return io_fail(error, "is not a .npy file: it does not start with \\x93NUMPY");
}

/* Can it be a matrix? */
static int check_matrix(npy_header *h, const io_error *error)
{
  if (h->dtype != IO_F32 && h->dtype != IO_F16 && h->dtype != IO_F64)
    return fail_descr(error, h->descr);
  if (h->dims == 0 || h->dims > 2)
    return io_fail(error, "field 'shape' has %d dimensions: a matrix has 2 (or 1, a row); reshape it first", h->dims);
  if (h->dims == 1) /* both orders mean the same row */
    h->fortran = false;
  return 0;
}

/* "(2, 3)" */
static const char *shape_text(const npy_header *h, char *text, size_t size)
{
  size_t used = h->dims == 1 ? (size_t)snprintf(text, size, "(1, ") : (size_t)snprintf(text, size, "(");
  for (int i = 0; i < h->dims && used < size; i++)
    used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)h->extent[i]);
  if (used < size)
    snprintf(text + used, size - used, ")");
  return text;
}

/* The bytes in front of the header's text and those of the text; 0 where there are too few to see. */
static size_t header_bytes(const unsigned char *bytes, size_t size)
{
  const size_t prefix = size > 6 && bytes[6] == 1 ? 10 : 12;
  size_t length = 0;
  for (size_t i = prefix; i > 8 && size >= prefix; i--)
    length = length << 8 | bytes[i - 1];
  return size < prefix || length > NPY_HEADER_MAX ? 0 : prefix + length;
}

/* Everything that can be wrong with a header. */
static int header_read(const unsigned char *bytes, size_t size, bool matrix, npy_header *h, const io_error *error)
{
  memset(h, 0, sizeof *h);
  if (!is_npy(bytes, size))
    return fail_kind(bytes, size, error);
  if (size < 8)
    return io_fail(error, "truncated: %zu bytes, the .npy header is not complete", size);
  int major = bytes[6], minor = bytes[7];
  if (major < 1 || major > 3 || minor != 0)
    return io_fail(error, ".npy version %d.%d is not known: 1.0, 2.0 and 3.0 are", major, minor);
  size_t prefix = major == 1 ? 10 : 12, length = 0;
  if (size < prefix)
    return io_fail(error, "truncated: %zu bytes, the .npy header is not complete", size);
  for (size_t i = prefix; i > 8; i--)
    length = length << 8 | bytes[i - 1];
  if (length > NPY_HEADER_MAX)
    return io_fail(error, "field 'header length' is %zu: more than %d is not a matrix's", length, NPY_HEADER_MAX);
  if (length > size - prefix)
    return io_fail(error, "truncated: the .npy header should have %zu bytes, %zu are there", length, size - prefix);

  const unsigned char *text = bytes + prefix;
  cursor c = {.at = text, .end = text + length, .start = text, .error = error};
  if (parse_dictionary(&c, h) != 0 || (matrix && check_matrix(h, error) != 0))
    return -1;

  char shape[IO_TENSOR_DIMS * 22];
  io_tensor counted = {.dtype = h->dtype, .dims = h->dims};
  memcpy(counted.shape, h->extent, sizeof counted.shape);
  if (!io_tensor_count(&counted, &h->elements, &h->bytes))
    return io_fail(error, "field 'shape' is %s: too large for this machine's memory",
                   shape_text(h, shape, sizeof shape));
  h->data_at = prefix + length;
  return 0;
}

/* Everything that can be wrong with a file but its values; afterwards data_at + elements * item == size. */
static int header_parse(const unsigned char *bytes, size_t size, bool matrix, npy_header *h, const io_error *error)
{
  char shape[IO_TENSOR_DIMS * 22];
  if (header_read(bytes, size, matrix, h, error) != 0)
    return -1;
  const size_t there = size - h->data_at;
  if (there < h->bytes)
    return io_fail(error, "truncated: shape %s needs %zu bytes of data, %zu are there",
                   shape_text(h, shape, sizeof shape), h->bytes, there);
  if (there > h->bytes)
    return io_fail(error, "%zu byte%s too many after the data of shape %s", there - h->bytes,
                   there - h->bytes == 1 ? "" : "s", shape_text(h, shape, sizeof shape));
  return 0;
}

static void swap_bytes(unsigned char *data, size_t elements, size_t item)
{
  for (size_t i = 0; i < elements; i++, data += item)
    for (size_t low = 0, high = item - 1; low < high; low++, high--) {
      unsigned char kept = data[low];
      data[low] = data[high];
      data[high] = kept;
    }
}

static int narrow_f64(unsigned char *data, const npy_header *h, const io_error *error)
{
  for (size_t i = 0; i < h->elements; i++) {
    double wide;
    memcpy(&wide, data + i * sizeof wide, sizeof wide);
    float narrow = (float)wide;
    if (isinf(narrow) && !isinf(wide))
      return io_fail(error, "element %zu is %g: too large for float32", i, wide);
    memcpy(data + i * sizeof narrow, &narrow, sizeof narrow); /* behind the element read next: never ahead of it */
  }
  return 0;
}

/* Turns data, already at the start of its buffer, into a matrix of this machine. */
static int data_convert(unsigned char *data, size_t bytes, const npy_header *h, io_matrix *out, const io_error *error)
{
  if (h->swapped)
    swap_bytes(data, h->elements, h->item);
  if (h->dtype == IO_F64 && narrow_f64(data, h, error) != 0)
    return -1;
  out->m.data = data;
  out->m.rows = h->rows;
  out->m.cols = h->cols;
  out->m.ld = h->fortran ? h->rows : h->cols;
  (void)io_dtype_esmm(h->dtype == IO_F64 ? IO_F32 : h->dtype, &out->m.dtype); /* false: a tensor, no matrix */
  out->m.order = h->fortran ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  out->m.place = ESMM_HOST;
  out->memory = data;
  out->bytes = bytes;
  return 0;
}

/* Takes over buffer, also on failure. */
static int adopt(unsigned char *buffer, size_t size, io_matrix *out, const io_error *error)
{
  npy_header h;
  int result = header_parse(buffer, size, true, &h, error);
  if (result == 0) {
    memmove(buffer, buffer + h.data_at, size - h.data_at); /* the data gets the buffer's alignment */
    result = data_convert(buffer, size, &h, out, error);
  }
  if (result != 0)
    free(buffer);
  return result;
}

int io_npy_parse(const unsigned char *bytes, size_t size, const char *name, io_matrix *out, char *error,
                 size_t error_size)
{
  io_error e = {.name = name, .text = error, .size = error_size};
  npy_header h;
  memset(out, 0, sizeof *out);
  if (header_parse(bytes, size, true, &h, &e) != 0)
    return -1;
  size_t data_bytes = size - h.data_at;
  unsigned char *data = io_alloc(data_bytes);
  if (!data)
    return io_fail(&e, "no memory for its %zu bytes", data_bytes);
  if (data_bytes > 0)
    memcpy(data, bytes + h.data_at, data_bytes);
  if (data_convert(data, data_bytes, &h, out, &e) != 0) {
    free(data);
    return -1;
  }
  return 0;
}

/* As much as the header says, in three steps; of a pipe one byte more, which should not be there. */
static int read_npy_stream(io_source *source, unsigned char **buffer, size_t *size, const io_error *error)
{
  npy_header h;
  size_t all;
  *buffer = NULL;
  *size = 0;
  if (io_source_more(source, buffer, size, 12, error) != 0 ||
      io_source_more(source, buffer, size, header_bytes(*buffer, *size), error) != 0 ||
      header_read(*buffer, *size, true, &h, error) != 0)
    return -1;
  if (__builtin_add_overflow(h.data_at, h.bytes, &all) || all == SIZE_MAX)
    return io_fail(error, "is too large for this machine's memory");
  if (io_source_more(source, buffer, size, all + !source->endless, error) != 0)
    return -1;
  return *size > all ? io_fail(error, "bytes follow the %zu that its header speaks of", all) : 0;
}

static int read_npy(io_source *source, io_matrix *out, const io_error *error)
{
  unsigned char *buffer;
  size_t size;
  if (!is_npy(source->head, source->head_bytes)) /* before a large file of another kind is read for nothing */
    return fail_kind(source->head, source->head_bytes, error);
  if (source->sized)
    return io_source_read(source, &buffer, &size, error) == 0 ? adopt(buffer, size, out, error) : -1;
  if (read_npy_stream(source, &buffer, &size, error) == 0)
    return adopt(buffer, size, out, error);
  free(buffer);
  return -1;
}

static bool raw_bytes(int64_t rows, int64_t cols, size_t *bytes)
{
  return rows >= 0 && cols >= 0 && !__builtin_mul_overflow(rows, cols, bytes) &&
         !__builtin_mul_overflow(*bytes, sizeof(float), bytes) && *bytes <= (size_t)PTRDIFF_MAX;
}

/* The header that a raw file of that shape and size has not. */
static int raw_header(int64_t rows, int64_t cols, size_t size, npy_header *h, const io_error *error)
{
  size_t want;
  *h = (npy_header){.dtype = IO_F32, .item = sizeof(float), .swapped = NATIVE_ORDER != '<', .dims = 2};
  h->rows = h->extent[0] = rows;
  h->cols = h->extent[1] = cols;
  if (rows < 0 || cols < 0)
    return io_fail(error, "the shape given is %lld x %lld: dimensions are not negative", (long long)rows,
                   (long long)cols);
  if (!raw_bytes(rows, cols, &want))
    return io_fail(error, "the shape given, %lld x %lld, is too large for this machine's memory", (long long)rows,
                   (long long)cols);
  h->elements = want / sizeof(float);
  return size == want ? 0
                      : io_fail(error, "has %zu bytes, raw float32 of %lld x %lld has %zu: check the dimensions", size,
                                (long long)rows, (long long)cols, want);
}

static int read_raw(io_source *source, int64_t rows, int64_t cols, io_matrix *out, const io_error *error)
{
  npy_header h;
  unsigned char *buffer = NULL;
  size_t want = 0, size = 0;
  int failed = -1;
  if (source->sized) {
    if (raw_header(rows, cols, source->size, &h, error) != 0 || /* before it is read */
        io_source_read(source, &buffer, &size, error) != 0)
      return -1;
  } else if (!raw_bytes(rows, cols, &want) || want == SIZE_MAX) {
    return raw_header(rows, cols, 0, &h, error); /* which says why */
  } else if (io_source_more(source, &buffer, &size, want + !source->endless, error) == 0) {
    if (source->endless && want < size) /* the first bytes were read to recognise its kind */
      size = want;
    failed = size > want ? io_fail(error, "has more bytes than raw float32 of %lld x %lld, %zu: check the dimensions",
                                   (long long)rows, (long long)cols, want)
                         : 0;
  }
  if ((!source->sized && failed) || raw_header(rows, cols, size, &h, error) != 0) {
    free(buffer);
    return -1;
  }
  return data_convert(buffer, size, &h, out, error); /* only float64 has values that can fail */
}

int io_npy_read(const char *path, io_matrix *out, char *error, size_t error_size)
{
  io_error e = {.name = path, .text = error, .size = error_size};
  io_source source;
  memset(out, 0, sizeof *out);
  if (io_source_open(&source, &e) != 0)
    return -1;
  int result = read_npy(&source, out, &e);
  io_source_close(&source);
  return result;
}

int io_raw_read(const char *path, int64_t rows, int64_t cols, io_matrix *out, char *error, size_t error_size)
{
  io_error e = {.name = path, .text = error, .size = error_size};
  io_source source;
  memset(out, 0, sizeof *out);
  if (io_source_open(&source, &e) != 0)
    return -1;
  int result = read_raw(&source, rows, cols, out, &e);
  io_source_close(&source);
  return result;
}

int io_matrix_read(const char *path, int64_t rows, int64_t cols, io_matrix *out, char *error, size_t error_size)
{
  io_error e = {.name = path, .text = error, .size = error_size};
  io_source source;
  bool known = rows != 0 || cols != 0;
  size_t want;
  int result;
  memset(out, 0, sizeof *out);
  if (io_source_open(&source, &e) != 0)
    return -1;
  bool packed = is_gzip(source.head, source.head_bytes) || is_zip(source.head, source.head_bytes);
  if (is_npy(source.head, source.head_bytes)) {
    result = read_npy(&source, out, &e);
    if (result == 0 && known && (out->m.rows != rows || out->m.cols != cols)) {
      result = io_fail(&e, "is %lld x %lld, not %lld x %lld as it should be", (long long)out->m.rows,
                       (long long)out->m.cols, (long long)rows, (long long)cols);
      io_matrix_free(out);
    }
  } else if (packed && !(known && raw_bytes(rows, cols, &want) && source.sized && source.size == want)) {
    result = fail_kind(source.head, source.head_bytes, &e); /* raw numbers may start like a gzip file by chance */
  } else if (!known) {
    result = io_fail(&e, "is not a .npy file, and raw float32 has no shape: give its dimensions (--dims)");
  } else {
    result = read_raw(&source, rows, cols, out, &e);
  }
  io_source_close(&source);
  return result;
}

void io_matrix_free(io_matrix *matrix)
{
  if (!matrix)
    return;
  free(matrix->memory);
  memset(matrix, 0, sizeof *matrix);
}

/* ---- as tensors (tensors.h) ---- */

/* A copy, where data cannot stay as it is: float64, the other byte order, not aligned. */
static int read_copy(io_tensors *t, size_t index, void **copy, const void **data, const io_error *error)
{
  const unsigned char *at = t->bytes + t->format->at[index];
  const npy_header *h = t->format->state;
  const bool plain = h->dtype != IO_F64 && !h->swapped;
  const size_t align = h->item < 8 ? h->item : 8;
  io_matrix matrix = {0};
  *data = at;
  if (plain && (t->as_mapped || (uintptr_t)at % align == 0))
    return 0;
  const size_t bytes = h->elements * h->item; /* header_parse and raw_bytes have seen that it fits */
  *copy = io_alloc(bytes);
  if (!*copy)
    return io_fail(error, "no memory for its %zu bytes", bytes);
  memcpy(*copy, at, bytes);
  *data = *copy;
  return plain ? 0 : data_convert(*copy, bytes, h, &matrix, error);
}

static int one_tensor(const char *kind, const unsigned char *bytes, size_t size, const npy_header *h, const char *name,
                      io_tensors **out, const io_error *error)
{
  io_tensors *t = io_tensors_new(kind, bytes, size, 1, error);
  npy_header *kept = malloc(sizeof *kept);
  io_tensor *tensor = t ? t->list : NULL;
  if (!t || !kept || io_tensor_set_name(tensor, name, strlen(name), error) != 0) {
    if (t && !kept)
      (void)io_fail(error, "no memory for a list of tensors");
    free(kept);
    io_tensors_close(t);
    return -1;
  }
  *kept = *h;
  t->format->state = kept;
  t->format->free_state = free;
  t->format->read = read_copy;
  t->format->at[0] = h->data_at;
  tensor->dtype = h->dtype == IO_F64 ? IO_F32 : h->dtype; /* what loading makes of it */
  tensor->dims = h->dims;
  tensor->bytes = h->elements * io_dtype_bits(tensor->dtype) / 8;
  memcpy(tensor->shape, h->extent, sizeof tensor->shape);
  io_tensor_set_strides(tensor);
  if (h->fortran) { /* the strides of the shape read backwards */
    io_tensor turned = {.dims = h->dims};
    for (int i = 0; i < h->dims; i++)
      turned.shape[i] = h->extent[h->dims - 1 - i];
    io_tensor_set_strides(&turned);
    for (int i = 0; i < h->dims; i++)
      tensor->stride[i] = turned.stride[h->dims - 1 - i];
  }
  *out = t;
  return 0;
}

int io_npy_tensors(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, const io_error *error)
{
  npy_header h;
  return header_parse(bytes, size, false, &h, error) == 0 ? one_tensor("npy", bytes, size, &h, name, out, error) : -1;
}

int io_raw_tensors(const unsigned char *bytes, size_t size, int64_t rows, int64_t cols, const char *name,
                   io_tensors **out, const io_error *error)
{
  npy_header h;
  return raw_header(rows, cols, size, &h, error) == 0 ? one_tensor("raw", bytes, size, &h, name, out, error) : -1;
}

/* ---- writing ---- */

esmm_dtype io_npy_dtype(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
  case ESMM_BF16:
    return ESMM_F32;
  case ESMM_F16:
    return ESMM_F16;
  }
  return dtype; /* unknown: io_npy_write has refused it */
}

static bool write_bf16_line(const uint16_t *line, int64_t count, FILE *file)
{
  float wide[1024];
  for (int64_t done = 0; done < count;) {
    int64_t step = count - done < 1024 ? count - done : 1024;
    for (int64_t i = 0; i < step; i++) {
      uint32_t bits = (uint32_t)line[done + i] << 16;
      memcpy(&wide[i], &bits, sizeof bits);
    }
    if (fwrite(wide, sizeof *wide, (size_t)step, file) != (size_t)step)
      return false;
    done += step;
  }
  return true;
}

static bool write_line(const void *line, esmm_dtype dtype, int64_t count, FILE *file)
{
  switch (dtype) {
  case ESMM_BF16:
    return write_bf16_line(line, count, file);
  case ESMM_F32:
  case ESMM_F16:
    return fwrite(line, esmm_dtype_size(dtype), (size_t)count, file) == (size_t)count;
  }
  return false;
}

static bool write_all(const esmm_matrix *m, int64_t lines, int64_t length, int64_t ld, FILE *file)
{
  char header[NPY_ALIGN * 3];
  char dictionary[NPY_ALIGN * 2];
  int used = snprintf(dictionary, sizeof dictionary, "{'descr': '%c%s', 'fortran_order': %s, 'shape': (%lld, %lld), }",
                      NATIVE_ORDER, esmm_dtype_size(io_npy_dtype(m->dtype)) == 2 ? "f2" : "f4",
                      m->order == ESMM_COL_MAJOR ? "True" : "False", (long long)m->rows, (long long)m->cols);
  size_t total = (10 + (size_t)used + 1 + NPY_ALIGN - 1) / NPY_ALIGN * NPY_ALIGN;
  memset(header, ' ', sizeof header);
  memcpy(header, NPY_MAGIC "\1\0", 8);
  header[8] = (char)((total - 10) & 0xff);
  header[9] = (char)((total - 10) >> 8);
  memcpy(header + 10, dictionary, (size_t)used);
  header[total - 1] = '\n';
  if (fwrite(header, 1, total, file) != total)
    return false;

  size_t item = esmm_dtype_size(m->dtype);
  for (int64_t line = 0; length > 0 && line < lines; line++) {
    const unsigned char *at = (const unsigned char *)m->data + (size_t)line * (size_t)ld * item;
    if (!write_line(at, m->dtype, length, file))
      return false;
  }
  return true;
}

int io_npy_write(const char *path, const esmm_matrix *m, char *error, size_t error_size)
{
  io_error e = {.name = path, .text = error, .size = error_size};
  io_sink sink;
  bool column_major = m->order == ESMM_COL_MAJOR;
  int64_t lines = column_major ? m->cols : m->rows, length = column_major ? m->rows : m->cols;
  int64_t ld = m->ld ? m->ld : length;
  if (m->rows < 0 || m->cols < 0 || ld < length || esmm_dtype_size(m->dtype) == 0 ||
      (!m->data && lines > 0 && length > 0))
    return io_fail(&e, "not written: the matrix of %lld x %lld, ld %lld, is not a valid one", (long long)m->rows,
                   (long long)m->cols, (long long)m->ld);
  if (io_sink_open(&sink, &e) != 0)
    return -1;
  if (!write_all(m, lines, length, ld, sink.file)) {
    int reason = errno;
    io_sink_abort(&sink);
    return io_fail(&e, "cannot be written: %s", strerror(reason));
  }
  return io_sink_commit(&sink, &e);
}
