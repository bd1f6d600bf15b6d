/*
 * safetensors.c: files of named tensors, as Hugging Face's models have them.
 *
 *     length (8 bytes, little-endian)  header (JSON, may end in spaces)  the tensors' bytes
 *
 * The header maps each name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the header's end;
 * "__metadata__" maps strings to strings. The format's own rules are all checked: sizes agree with shapes, tensors do
 * not overlap, leave no byte between them and none behind the last, no name is there twice.
 *
 * jansson parses the JSON: it refuses duplicate keys by itself, reads integers exactly or not at all, checks UTF-8,
 * limits nesting, and says where it stopped.
 */
#include "format.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LENGTH_BYTES 8
#define HEADER_MAX 100000000 /* the format's own limit */

static uint64_t read_length(const unsigned char *bytes)
{
  uint64_t length = 0;
  for (int i = LENGTH_BYTES; i > 0; i--)
    length = length << 8 | bytes[i - 1];
  return length;
}

bool io_looks_like_safetensors(const unsigned char *bytes, size_t size)
{
  return size > LENGTH_BYTES && read_length(bytes) <= HEADER_MAX && bytes[LENGTH_BYTES] == '{';
}

#if ESMM_JANSSON

#include <jansson.h>

const char *io_safetensors_missing(void)
{
  return "";
}

static int fail_tensor(const io_error *error, const char *name, const char *text)
{
  return io_fail(error, "tensor '%.200s': %s", name, text);
}

/* A whole number from 0 up. */
static bool take_integer(const json_t *value, int64_t *out)
{
  if (!json_is_integer(value) || json_integer_value(value) < 0)
    return false;
  *out = (int64_t)json_integer_value(value);
  return true;
}

static int take_shape(const char *name, const json_t *shape, io_tensor *tensor, const io_error *error)
{
  if (!json_is_array(shape))
    return fail_tensor(error, name, "field 'shape' is not there, or no list");
  if (json_array_size(shape) > IO_TENSOR_DIMS)
    return io_fail(error, "tensor '%.200s': field 'shape' has %zu dimensions, at most %d are read", name,
                   json_array_size(shape), IO_TENSOR_DIMS);
  tensor->dims = (int)json_array_size(shape);
  for (int i = 0; i < tensor->dims; i++)
    if (!take_integer(json_array_get(shape, (size_t)i), &tensor->shape[i]))
      return fail_tensor(error, name, "field 'shape' has something that is no whole number from 0 up");
  return 0;
}

/* at: from the file's start. room: bytes behind the header. */
static int take_offsets(const char *name, const json_t *offsets, size_t data_at, size_t room, io_tensor *tensor,
                        size_t *at, const io_error *error)
{
  int64_t begin, end;
  size_t elements;
  if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !take_integer(json_array_get(offsets, 0), &begin) ||
      !take_integer(json_array_get(offsets, 1), &end))
    return fail_tensor(error, name, "field 'data_offsets' is not two whole numbers from 0 up");
  if (begin > end)
    return io_fail(error, "tensor '%.200s': field 'data_offsets' runs backwards, from %lld to %lld", name,
                   (long long)begin, (long long)end);
  if ((uint64_t)end > room)
    return io_fail(error, "tensor '%.200s': its bytes end at %lld, and only %zu are there: truncated?", name,
                   (long long)end, room);
  if (!io_tensor_count(tensor, &elements, &tensor->bytes))
    return fail_tensor(error, name, "its shape is too large for this machine's memory, or not of whole bytes");
  if (tensor->bytes != (size_t)(end - begin))
    return io_fail(error, "tensor '%.200s': its shape needs %zu bytes of %s, its offsets hold %lld", name,
                   tensor->bytes, io_dtype_str(tensor->dtype), (long long)(end - begin));
  *at = data_at + (size_t)begin;
  return 0;
}

static int take_tensor(const char *name, const json_t *value, size_t data_at, size_t room, io_tensor *tensor,
                       size_t *at, const io_error *error)
{
  if (io_tensor_set_name(tensor, name, strlen(name), error) != 0)
    return -1;
  if (!json_is_object(value))
    return fail_tensor(error, name, "the header has no object for it");
  const char *dtype = json_string_value(json_object_get(value, "dtype"));
  if (!dtype)
    return fail_tensor(error, name, "field 'dtype' is not there, or no string");
  tensor->dtype = io_dtype_find(dtype);
  if (tensor->dtype == IO_DTYPES)
    return io_fail(error, "tensor '%.200s': dtype '%.40s' is not known", name, dtype);
  if (take_shape(name, json_object_get(value, "shape"), tensor, error) != 0 ||
      take_offsets(name, json_object_get(value, "data_offsets"), data_at, room, tensor, at, error) != 0)
    return -1;
  io_tensor_set_strides(tensor);
  return 0;
}

static int check_metadata(const json_t *metadata, const io_error *error)
{
  void *member = json_object_iter((json_t *)metadata);
  if (!json_is_object(metadata))
    return io_fail(error, "'__metadata__' is no object");
  for (; member; member = json_object_iter_next((json_t *)metadata, member))
    if (!json_is_string(json_object_iter_value(member)))
      return io_fail(error, "'__metadata__' has something that is no string under '%.200s'",
                     json_object_iter_key(member));
  return 0;
}

typedef struct place {
  size_t begin, end;
  io_tensor tensor;
} place;

static int compare_places(const void *x, const void *y)
{
  const place *a = x, *b = y;
  const int order = (a->begin > b->begin) - (a->begin < b->begin);
  return order ? order : (a->end > b->end) - (a->end < b->end); /* an empty tensor before the one that starts there */
}

/* Puts the list in the order of the bytes, which must then follow one another to the end of the file. */
static int order_by_place(io_tensors *t, const io_error *error)
{
  place *places = malloc((t->count + 1) * sizeof *places);
  if (!places)
    return io_fail(error, "no memory for a list of %zu tensors", t->count);
  for (size_t i = 0; i < t->count; i++)
    places[i] = (place){t->format->at[i], t->format->at[i] + t->list[i].bytes, t->list[i]};
  qsort(places, t->count, sizeof *places, compare_places);
  size_t end = t->data_at;
  int result = 0;
  for (size_t i = 0; i < t->count; i++) {
    t->list[i] = places[i].tensor;
    t->format->at[i] = places[i].begin;
    if (result == 0 && places[i].begin < end)
      result = io_fail(error, "tensor '%.200s': its bytes overlap those of another", t->list[i].name);
    else if (result == 0 && places[i].begin > end)
      result = io_fail(error, "%zu bytes before tensor '%.200s' belong to none: the format allows no gaps",
                       places[i].begin - end, t->list[i].name);
    end = places[i].end;
  }
  if (result == 0 && end != t->size)
    result = io_fail(error, "%zu bytes behind the last tensor belong to none", t->size - end);
  free(places);
  return result;
}

static int take_header(json_t *root, io_tensors *t, const io_error *error)
{
  size_t count = 0;
  void *member = json_object_iter(root);
  for (; member; member = json_object_iter_next(root, member)) {
    const char *name = json_object_iter_key(member);
    const json_t *value = json_object_iter_value(member);
    if (strcmp(name, "__metadata__") == 0) {
      if (check_metadata(value, error) != 0)
        return -1;
      continue;
    }
    if (take_tensor(name, value, t->data_at, t->size - t->data_at, &t->list[count], &t->format->at[count], error) != 0)
      return -1;
    count++;
  }
  return 0;
}

int io_safetensors_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                         size_t error_size)
{
  const io_error e = {.name = name, .text = error, .size = error_size};
  *out = NULL;
  if (size < LENGTH_BYTES)
    return io_fail(&e, "truncated: %zu bytes, the length of the header is not complete", size);
  const uint64_t length = read_length(bytes);
  if (length > HEADER_MAX)
    return io_fail(&e, "is not safetensors: its header would have %llu bytes, and at most %d are allowed",
                   (unsigned long long)length, HEADER_MAX);
  if (length > size - LENGTH_BYTES)
    return io_fail(&e, "truncated: the header should have %llu bytes, %zu are there", (unsigned long long)length,
                   size - LENGTH_BYTES);
  if (length == 0 || bytes[LENGTH_BYTES] != '{')
    return io_fail(&e, "is not safetensors: its header does not start with {");
  if (io_check_byte_order(&e) != 0)
    return -1;
  json_error_t where;
  json_t *root = json_loadb((const char *)bytes + LENGTH_BYTES, (size_t)length, JSON_REJECT_DUPLICATES, &where);
  if (!root)
    return io_fail(&e, "its header is not valid: %s, at byte %d", where.text, where.position);
  const size_t members = json_object_size(root), others = json_object_get(root, "__metadata__") ? 1 : 0;
  io_tensors *t = io_tensors_new("safetensors", bytes, size, members - others, &e);
  int result = t ? 0 : -1;
  if (t) {
    t->data_at = LENGTH_BYTES + (size_t)length;
    result = take_header(root, t, &e);
  }
  json_decref(root);
  if (result == 0)
    result = order_by_place(t, &e);
  if (result != 0) {
    io_tensors_close(t);
    return -1;
  }
  *out = t;
  return 0;
}

#else

const char *io_safetensors_missing(void)
{
  return "built without jansson, so it reads no safetensors files: install libjansson-dev and build again";
}

int io_safetensors_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                         size_t error_size)
{
  const io_error e = {.name = name, .text = error, .size = error_size};
  (void)bytes;
  (void)size;
  *out = NULL;
  return io_fail(&e, "is a safetensors file, and this esmm was %s", io_safetensors_missing());
}

#endif

static bool write_bytes(FILE *file, const void *bytes, size_t size)
{
  return size == 0 || fwrite(bytes, 1, size, file) == size;
}

int io_safetensors_copy(const io_tensors *tensors, const char *path,
                        int (*replace)(void *user, size_t index, const void **bytes), void *user, char *error,
                        size_t error_size)
{
  const io_error e = {.name = path, .text = error, .size = error_size};
  io_sink sink;
  if (io_sink_open(&sink, &e) != 0)
    return -1;
  bool good = write_bytes(sink.file, tensors->bytes, tensors->data_at);
  int result = 0;
  for (size_t i = 0; i < tensors->count && good && result == 0; i++) {
    const void *bytes = NULL;
    result = replace(user, i, &bytes);
    if (result == 0)
      good = write_bytes(sink.file, bytes ? bytes : tensors->bytes + tensors->format->at[i], tensors->list[i].bytes);
  }
  const int reason = errno;
  if (good && result == 0)
    return io_sink_commit(&sink, &e);
  io_sink_abort(&sink);
  return good ? result : io_fail(&e, "cannot be written: %s", strerror(reason));
}
