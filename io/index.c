/*
 * index.c: the index of a model in several files, as Hugging Face's have one:
 *
 *     {"metadata": {...}, "weight_map": {"layers.0.w": "model-00001-of-00002.safetensors", ...}}
 *
 * A file of it must be a plain name: an index from somewhere else cannot make the command open what lies elsewhere.
 */
#include "index.h"

#include "file.h"
#include "tensors.h"

#include <stdlib.h>
#include <string.h>

#define INDEX_MAX 100000000 /* bytes: as much as a header of safetensors may have */

bool io_is_index(const char *path)
{
  static const char ending[] = ".index.json";
  const size_t length = strlen(path), tail = sizeof ending - 1;
  return length > tail && strcmp(path + length - tail, ending) == 0;
}

const char *io_index_find(const io_index *index, const char *name)
{
  for (size_t i = 0; i < index->count; i++)
    if (strcmp(index->names[i], name) == 0)
      return index->files[i];
  return NULL;
}

void io_index_free(io_index *index)
{
  for (size_t i = 0; i < index->count; i++) {
    free(index->names[i]);
    free(index->files[i]);
  }
  free(index->names);
  free(index->files);
  *index = (io_index){0};
}

#if ESMM_JANSSON

#include <jansson.h>

static char *beside(const char *index, const char *name)
{
  const char *slash = strrchr(index, '/');
  const size_t directory = slash ? (size_t)(slash - index) + 1 : 0, length = strlen(name);
  char *path = malloc(directory + length + 1);
  if (!path)
    return NULL;
  memcpy(path, index, directory);
  memcpy(path + directory, name, length + 1);
  return path;
}

static int take_map(json_t *map, io_index *index, const io_error *error)
{
  const char *name;
  json_t *value;
  if (!json_is_object(map) || json_object_size(map) == 0)
    return io_fail(error, "field 'weight_map' is not there, or is no map of tensors to files");
  index->names = calloc(json_object_size(map), sizeof *index->names);
  index->files = calloc(json_object_size(map), sizeof *index->files);
  if (!index->names || !index->files)
    return io_fail(error, "no memory for %zu names", json_object_size(map));
  json_object_foreach(map, name, value)
  {
    const char *file = json_string_value(value);
    if (!file || !file[0] || strchr(file, '/') || strcmp(file, ".") == 0 || strcmp(file, "..") == 0)
      return io_fail(error, "tensor '%.200s': '%.200s' is no file beside the index", name, file ? file : "");
    index->names[index->count] = strdup(name);
    index->files[index->count++] = beside(error->name, file);
    if (!index->names[index->count - 1] || !index->files[index->count - 1])
      return io_fail(error, "no memory for its names");
  }
  return 0;
}

int io_index_read(const char *path, io_index *index, char *error, size_t error_size)
{
  const io_error e = {.name = path, .text = error, .size = error_size};
  io_source source;
  json_error_t where;
  unsigned char *bytes = NULL;
  size_t size = 0;
  *index = (io_index){0};
  if (io_source_open(&source, &e) != 0)
    return -1;
  int result = !source.sized             ? io_fail(&e, "is empty, or no regular file")
               : source.size > INDEX_MAX ? io_fail(&e, "has %zu bytes: no index is that large", source.size)
                                         : io_source_read(&source, &bytes, &size, &e);
  io_source_close(&source);
  if (result != 0)
    return -1;
  json_t *root = json_loadb((const char *)bytes, size, JSON_REJECT_DUPLICATES, &where);
  free(bytes);
  result = root ? take_map(json_object_get(root, "weight_map"), index, &e)
                : io_fail(&e, "is no JSON: line %d, column %d: %s", where.line, where.column, where.text);
  json_decref(root);
  return result;
}

#else

int io_index_read(const char *path, io_index *index, char *error, size_t error_size)
{
  const io_error e = {.name = path, .text = error, .size = error_size};
  *index = (io_index){0};
  return io_fail(&e, "%s", io_safetensors_missing());
}

#endif
