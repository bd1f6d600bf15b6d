/*
 * tensors.c: opening a file of tensors, and what its readers share.
 */
#include "tensors.h"

#include "format.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- dtypes ---- */

static const struct {
  const char *name;
  unsigned bits;
} dtypes[IO_DTYPES] = {
    [IO_F32] = {"F32", 32},        [IO_BF16] = {"BF16", 16},      [IO_F16] = {"F16", 16},
    [IO_F64] = {"F64", 64},        [IO_F8_E4M3] = {"F8_E4M3", 8}, [IO_F8_E5M2] = {"F8_E5M2", 8},
    [IO_F8_E8M0] = {"F8_E8M0", 8}, [IO_F6_E2M3] = {"F6_E2M3", 6}, [IO_F6_E3M2] = {"F6_E3M2", 6},
    [IO_F4] = {"F4", 4},           [IO_I64] = {"I64", 64},        [IO_I32] = {"I32", 32},
    [IO_I16] = {"I16", 16},        [IO_I8] = {"I8", 8},           [IO_U64] = {"U64", 64},
    [IO_U32] = {"U32", 32},        [IO_U16] = {"U16", 16},        [IO_U8] = {"U8", 8},
    [IO_BOOL] = {"BOOL", 8},       [IO_C64] = {"C64", 64},        [IO_C128] = {"C128", 128},
};

const char *io_dtype_str(io_dtype dtype)
{
  return dtype < IO_DTYPES ? dtypes[dtype].name : "unknown";
}

unsigned io_dtype_bits(io_dtype dtype)
{
  return dtype < IO_DTYPES ? dtypes[dtype].bits : 0;
}

io_dtype io_dtype_find(const char *name)
{
  int i = 0;
  while (i < IO_DTYPES && strcmp(dtypes[i].name, name) != 0)
    i++;
  return (io_dtype)i;
}

bool io_dtype_esmm(io_dtype dtype, esmm_dtype *out)
{
  for (int i = 0; esmm_dtype_size((esmm_dtype)i) > 0; i++)
    if (strcasecmp(esmm_dtype_str((esmm_dtype)i), io_dtype_str(dtype)) == 0) {
      *out = (esmm_dtype)i;
      return true;
    }
  return false;
}

/* ---- building a list ---- */

io_tensors *io_tensors_new(const char *kind, const unsigned char *bytes, size_t size, size_t count,
                           const io_error *error)
{
  io_tensors *t = calloc(1, sizeof *t);
  if (t) {
    *t = (io_tensors){.kind = kind, .bytes = bytes, .size = size};
    t->path = strdup(error->name);
    t->list = calloc(count + 1, sizeof *t->list);
    t->format = calloc(1, sizeof *t->format);
  }
  if (t && t->format) {
    t->format->at = calloc(count + 1, sizeof *t->format->at);
    t->format->copies = calloc(count + 1, sizeof *t->format->copies);
  }
  if (t && t->path && t->list && t->format && t->format->at && t->format->copies) {
    t->count = count;
    return t;
  }
  io_tensors_close(t);
  (void)io_fail(error, "no memory for a list of %zu tensors", count);
  return NULL;
}

/* One character of UTF-8; 0: it is none, or a control character, which must not reach a terminal. */
static size_t character_bytes(const unsigned char *at, size_t left)
{
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const size_t length = at[0] < 0x80 ? 1 : at[0] >> 5 == 6 ? 2 : at[0] >> 4 == 14 ? 3 : at[0] >> 3 == 30 ? 4 : 0;
  if (length == 0 || length > left)
    return 0;
  uint32_t code = length == 1 ? at[0] : at[0] & (0x7fu >> length);
  for (size_t i = 1; i < length; i++) {
    if (at[i] >> 6 != 2)
      return 0;
    code = code << 6 | (at[i] & 0x3fu);
  }
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool wrong = code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000);
  return control || wrong ? 0 : length;
}

int io_tensor_set_name(io_tensor *tensor, const char *name, size_t length, const io_error *error)
{
  const unsigned char *bytes = (const unsigned char *)name;
  if (length == 0)
    return io_fail(error, "a tensor has an empty name");
  for (size_t at = 0, step; at < length; at += step) {
    step = character_bytes(bytes + at, length - at);
    if (step == 0)
      return io_fail(error, "a tensor's name has byte 0x%02x as its character %zu: a control character, or not UTF-8",
                     bytes[at], at + 1);
  }
  tensor->name = strndup(name, length);
  return tensor->name ? 0 : io_fail(error, "no memory for a name of %zu bytes", length);
}

bool io_tensor_count(const io_tensor *tensor, size_t *elements, size_t *bytes)
{
  size_t count = 1, bits = 0;
  bool fits = true;
  for (int i = 0; i < tensor->dims; i++)
    fits = fits && tensor->shape[i] >= 0 && !__builtin_mul_overflow(count, tensor->shape[i], &count);
  for (int i = 0; i < tensor->dims; i++)
    if (tensor->shape[i] == 0) { /* nothing is there, however large it is the other way */
      count = 0;
      fits = true;
    }
  fits = fits && !__builtin_mul_overflow(count, io_dtype_bits(tensor->dtype), &bits) && bits / 8 <= PTRDIFF_MAX;
  *elements = count;
  *bytes = bits / 8;
  return fits && bits % 8 == 0;
}

void io_tensor_set_strides(io_tensor *tensor)
{
  int64_t step = 1;
  for (int i = tensor->dims - 1; i >= 0; i--) {
    tensor->stride[i] = step;
    if (__builtin_mul_overflow(step, tensor->shape[i], &step)) /* only beside a zero: this step is never taken */
      step = 0;
  }
}

static int compare_names(const void *x, const void *y)
{
  return strcmp(*(const char *const *)x, *(const char *const *)y);
}

int io_tensors_check_names(const io_tensors *tensors, const io_error *error)
{
  const char **names = malloc((tensors->count + 1) * sizeof *names);
  int result = names ? 0 : io_fail(error, "no memory for %zu names", tensors->count);
  for (size_t i = 0; i < tensors->count && names; i++)
    names[i] = tensors->list[i].name;
  if (names)
    qsort(names, tensors->count, sizeof *names, compare_names);
  for (size_t i = 1; i < tensors->count && result == 0; i++)
    if (strcmp(names[i - 1], names[i]) == 0)
      result = io_fail(error, "two tensors have the name '%.200s'", names[i]);
  free(names);
  return result;
}

int io_check_byte_order(const io_error *error)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  (void)error;
  return 0;
#else
  return io_fail(error, "holds little-endian numbers, and this machine is big-endian: that is not supported");
#endif
}

/* ---- opening ---- */

/* The last part of a path without its ending: what a file of one matrix calls it. */
static char *name_of(const char *path)
{
  const char *slash = strrchr(path, '/'), *start = slash ? slash + 1 : path, *dot = strrchr(start, '.');
  return dot && dot > start ? strndup(start, (size_t)(dot - start)) : strdup(start);
}

static bool ends_in(const char *path, const char *ending)
{
  const size_t length = strlen(path), tail = strlen(ending);
  return length > tail && strcmp(path + length - tail, ending) == 0;
}

static bool is_zip(const unsigned char *bytes, size_t size)
{
  return size >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
}

bool io_is_model(const char *path)
{
  unsigned char head[IO_MAGIC_BYTES + 1];
  if (ends_in(path, ".safetensors") || ends_in(path, ".pt") || ends_in(path, ".pth"))
    return true;
  FILE *file = fopen(path, "rb");
  const size_t got = file ? fread(head, 1, sizeof head, file) : 0;
  if (file)
    fclose(file);
  return is_zip(head, got) || io_looks_like_safetensors(head, got);
}

static int parse(const unsigned char *bytes, size_t size, int64_t rows, int64_t cols, io_tensors **out,
                 const io_error *error)
{
  static const unsigned char old_pickle[] = {0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46};
  const bool known = rows != 0 || cols != 0;
  /* If a file is called .safetensors or .pt, the error is about that format. */
  if (io_looks_like_safetensors(bytes, size) || ends_in(error->name, ".safetensors"))
    return io_safetensors_parse(bytes, size, error->name, out, error->text, error->size);
  if (size >= sizeof old_pickle && memcmp(bytes, old_pickle, sizeof old_pickle) == 0)
    return io_fail(error, "is in the format that torch.save had before PyTorch 1.6: load it there and save it again");
  if (is_zip(bytes, size) || ends_in(error->name, ".pt") || ends_in(error->name, ".pth"))
    return io_pt_parse(bytes, size, error->name, out, error->text, error->size);
  char *name = name_of(error->name);
  if (!name)
    return io_fail(error, "no memory for its name");
  int result;
  if (size >= 6 && memcmp(bytes, "\x93NUMPY", 6) == 0)
    result = io_npy_tensors(bytes, size, name, out, error);
  else if (known)
    result = io_raw_tensors(bytes, size, rows, cols, name, out, error);
  else
    result = io_fail(error, "is no safetensors, .pt or .npy file, and raw float32 has no shape: give its "
                            "dimensions (--dims)");
  free(name);
  return result;
}

int io_tensors_open(const char *path, int64_t rows, int64_t cols, io_tensors **out, char *error, size_t error_size)
{
  const io_error e = {.name = path, .text = error, .size = error_size};
  io_source source;
  *out = NULL;
  if (io_source_open(&source, &e) != 0)
    return -1;
  if (!source.sized) {
    io_source_close(&source);
    return io_fail(&e, "is empty, or no regular file: a file of tensors is mapped, so it cannot be a pipe");
  }
  void *bytes = mmap(NULL, source.size, PROT_READ, MAP_SHARED, source.fd, 0);
  const int reason = errno;
  io_source_close(&source);
  if (bytes == MAP_FAILED)
    return io_fail(&e, "cannot be mapped: %s", strerror(reason));
  if (parse(bytes, source.size, rows, cols, out, &e) != 0) {
    (void)munmap(bytes, source.size);
    return -1;
  }
  (*out)->format->mapped = true;
  return 0;
}

void io_tensors_close(io_tensors *t)
{
  if (!t)
    return;
  for (size_t i = 0; i < t->count; i++) {
    free((char *)t->list[i].name); /* ours: only readers see it as const */
    free(t->format->copies[i]);
  }
  if (t->format) {
    if (t->format->free_state)
      t->format->free_state(t->format->state);
    if (t->format->mapped)
      (void)munmap((void *)t->bytes, t->size);
    free(t->format->at);
    free(t->format->copies);
  }
  free(t->format);
  free(t->list);
  free(t->path);
  free(t);
}

int64_t io_tensors_find(const io_tensors *tensors, const char *name)
{
  for (size_t i = 0; i < tensors->count; i++)
    if (strcmp(tensors->list[i].name, name) == 0)
      return (int64_t)i;
  return -1;
}

/* ---- loading ---- */

static size_t alignment(io_dtype dtype)
{
  const size_t bytes = io_dtype_bits(dtype) / 8;
  return bytes > 8 ? 8 : bytes > 0 ? bytes : 1;
}

static int load_mapped(io_tensors *t, size_t index, void **copy, const void **data, const io_error *error)
{
  const io_tensor *tensor = &t->list[index];
  const unsigned char *at = t->bytes + t->format->at[index];
  *data = at;
  if (t->as_mapped || (uintptr_t)at % alignment(tensor->dtype) == 0)
    return 0;
  *copy = io_alloc(tensor->bytes);
  if (!*copy)
    return io_fail(error, "tensor '%.200s': no memory for its %zu bytes", tensor->name, tensor->bytes);
  memcpy(*copy, at, tensor->bytes);
  *data = *copy;
  return 0;
}

int io_tensor_load(io_tensors *tensors, size_t index, char *error, size_t error_size)
{
  const io_error e = {.name = tensors->path, .text = error, .size = error_size};
  io_format *format = tensors->format;
  if (tensors->list[index].data)
    return 0;
  void *copy = NULL;
  const void *data = NULL;
  const int result = (format->read ? format->read : load_mapped)(tensors, index, &copy, &data, &e);
  if (result != 0) {
    free(copy);
    return result;
  }
  format->copies[index] = copy;
  tensors->list[index].data = data;
  return 0;
}

/* Only whole pages can go; a neighbour that still needs one gets it from the file again. */
static void drop_pages(const unsigned char *bytes, size_t size)
{
  const size_t before = (uintptr_t)bytes % (uintptr_t)sysconf(_SC_PAGESIZE);
  (void)madvise((unsigned char *)bytes - before, size + before, MADV_DONTNEED);
}

void io_tensor_unload(io_tensors *tensors, size_t index)
{
  io_tensor *tensor = &tensors->list[index];
  if (tensor->data && tensors->format->mapped && !tensors->format->copies[index])
    drop_pages(tensor->data, tensor->bytes);
  free(tensors->format->copies[index]);
  tensors->format->copies[index] = NULL;
  tensor->data = NULL;
}

/* Are the elements of each row (axis 0; each column: axis 1) next to each other, and the rows apart? */
static bool in_lines(const io_tensor *t, int axis)
{
  const int other = 1 - axis;
  return (t->stride[other] == 1 || t->shape[other] <= 1) && (t->stride[axis] >= t->shape[other] || t->shape[axis] <= 1);
}

const char *io_tensor_refusal(const io_tensor *tensor)
{
  if (tensor->dims != 2)
    return "a matrix has two dimensions";
  esmm_dtype dtype;
  if (!io_dtype_esmm(tensor->dtype, &dtype))
    return "only F32, BF16 and F16 can be multiplied";
  return in_lines(tensor, 0) || in_lines(tensor, 1)
             ? NULL
             : "its elements are neither next to each other in rows nor in columns";
}

int io_tensor_matrix(io_tensors *tensors, size_t index, esmm_matrix *out, char *error, size_t error_size)
{
  const io_error e = {.name = tensors->path, .text = error, .size = error_size};
  const io_tensor *t = &tensors->list[index];
  const char *refusal = io_tensor_refusal(t);
  esmm_dtype dtype = ESMM_F32;
  *out = (esmm_matrix){0};
  if (refusal)
    return io_fail(&e, "tensor '%.200s' (%s, %d dimension%s): %s", t->name, io_dtype_str(t->dtype), t->dims,
                   t->dims == 1 ? "" : "s", refusal);
  if (io_tensor_load(tensors, index, error, error_size) != 0)
    return -1;
  const int axis = in_lines(t, 0) ? 0 : 1;
  (void)io_dtype_esmm(t->dtype, &dtype); /* it is one: io_tensor_refusal has seen that */
  *out = (esmm_matrix){.data = (void *)t->data,
                       .rows = t->shape[0],
                       .cols = t->shape[1],
                       .ld = t->shape[axis] > 1 ? t->stride[axis] : t->shape[1 - axis],
                       .dtype = dtype,
                       .order = axis == 0 ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR};
  return 0;
}
