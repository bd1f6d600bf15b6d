/*
 * pt.c: what torch.save writes since PyTorch 1.6: a zip archive of
 *
 *     NAME/data.pkl    the pickle of a dictionary of tensors, or of dictionaries and lists of them
 *     NAME/data/KEY    the elements of one storage, for each key that the pickle has
 *     NAME/byteorder   "little" (may be missing), and other small entries that nothing here needs
 *
 * pickle.c reads the pickle without executing it. Names of tensors are the keys on the way to them, joined by dots.
 *
 * libzip reads the archive: it is maintained and fuzzed, knows zip64, and compares checksums. torch.save stores entries
 * as they are; deflated ones (a repacked archive) are read too. A storage is read when a tensor of it is loaded, and
 * its size is known from the pickle before: an entry that claims another size is refused.
 */
#include "pickle.h"

#include "format.h"

#include <stdlib.h>
#include <string.h>

#if ESMM_LIBZIP

#include <zip.h>

#define PICKLE_MAX ((zip_uint64_t)64 << 20) /* bytes of data.pkl; a large model's has a few million */
#define INFLATED_MAX ((zip_uint64_t)4 << 30)
#define DEFLATE_MOST 1032 /* deflate cannot make more bytes of one */
#define NESTING_MAX 16    /* dictionaries in dictionaries */
#define NAME_MAX_BYTES 1024

typedef struct archive {
  zip_t *zip;
  char *prefix;        /* "NAME/", with its length */
  size_t prefix_bytes; /* 0: entries have no directory */
  unsigned char *pickle_bytes;
  pickle *pickle;
  const pickle_tensor **tensors; /* [count], in the order of the list */
  size_t count, room;
} archive;

const char *io_pt_missing(void)
{
  return "";
}

/* ---- entries ---- */

/* An entry that can be read, and its description. */
static int entry_stat(zip_t *zip, zip_uint64_t index, zip_stat_t *info, const io_error *error)
{
  const zip_uint64_t needed = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD;
  zip_stat_init(info);
  if (zip_stat_index(zip, index, 0, info) != 0 || (info->valid & needed) != needed)
    return io_fail(error, "entry %llu of the zip archive says nothing about itself", (unsigned long long)index);
  if ((info->valid & ZIP_STAT_ENCRYPTION_METHOD) && info->encryption_method != ZIP_EM_NONE)
    return io_fail(error, "entry '%.200s' is encrypted", info->name);
  if (info->comp_method == ZIP_CM_STORE)
    return info->comp_size == info->size
               ? 0
               : io_fail(error, "entry '%.200s' is stored, but its two sizes differ: %llu and %llu", info->name,
                         (unsigned long long)info->comp_size, (unsigned long long)info->size);
  if (info->comp_method != ZIP_CM_DEFLATE)
    return io_fail(error, "entry '%.200s' is packed with method %d: stored and deflated ones are read", info->name,
                   (int)info->comp_method);
  if (info->size > INFLATED_MAX || info->size / DEFLATE_MOST > info->comp_size)
    return io_fail(error, "entry '%.200s' claims to become %llu bytes from %llu: refused", info->name,
                   (unsigned long long)info->size, (unsigned long long)info->comp_size);
  return 0;
}

/* All of an entry, in memory from io_alloc. */
static int entry_read(zip_t *zip, const zip_stat_t *info, unsigned char **out, const io_error *error)
{
  const size_t size = (size_t)info->size;
  unsigned char beyond;
  unsigned char *bytes = io_alloc(size);
  if (!bytes)
    return io_fail(error, "entry '%.200s': no memory for its %zu bytes", info->name, size);
  zip_file_t *file = zip_fopen_index(zip, info->index, 0);
  size_t got = 0;
  zip_int64_t step = file ? 1 : -1;
  while (step > 0 && got < size) {
    step = zip_fread(file, bytes + got, size - got);
    got += step > 0 ? (size_t)step : 0;
  }
  if (step >= 0 && got == size) /* at its end the checksum is compared; more bytes would be a lie about the size */
    step = zip_fread(file, &beyond, 1);
  int result = 0;
  if (step < 0)
    result = io_fail(error, "entry '%.200s' cannot be read: %s", info->name,
                     file ? zip_file_strerror(file) : zip_strerror(zip));
  else if (got != size || step != 0)
    result = io_fail(error, "entry '%.200s' does not have the %zu bytes that it claims", info->name, size);
  if (file)
    (void)zip_fclose(file);
  if (result != 0)
    free(bytes);
  else
    *out = bytes;
  return result;
}

/* "NAME/what" */
static zip_int64_t entry_find(const archive *a, const char *what, size_t what_bytes)
{
  const size_t bytes = a->prefix_bytes + what_bytes + 1;
  char *name = malloc(bytes);
  if (!name)
    return -1;
  memcpy(name, a->prefix, a->prefix_bytes);
  memcpy(name + a->prefix_bytes, what, what_bytes);
  name[bytes - 1] = 0;
  const zip_int64_t index = strlen(name) == bytes - 1 ? zip_name_locate(a->zip, name, 0) : -1;
  free(name);
  return index;
}

static bool ends_in(const char *name, const char *ending)
{
  const size_t length = strlen(name), tail = strlen(ending);
  return length >= tail && strcmp(name + length - tail, ending) == 0;
}

/* Finds data.pkl, and with it the directory that everything lies in. Names must be there once. */
static int find_pickle(archive *a, zip_int64_t *found, const io_error *error)
{
  const zip_int64_t count = zip_get_num_entries(a->zip, 0);
  bool arrays = false;
  *found = -1;
  for (zip_int64_t i = 0; i < count; i++) {
    const char *name = zip_get_name(a->zip, (zip_uint64_t)i, ZIP_FL_ENC_RAW);
    if (!name)
      return io_fail(error, "entry %lld of the zip archive has no name", (long long)i);
    if (zip_name_locate(a->zip, name, ZIP_FL_ENC_RAW) != i)
      return io_fail(error, "two entries of the zip archive have the name '%.200s'", name);
    arrays = arrays || ends_in(name, ".npy");
    if (strcmp(name, "data.pkl") != 0 && !ends_in(name, "/data.pkl"))
      continue;
    if (*found >= 0)
      return io_fail(error, "has two entries data.pkl");
    *found = i;
    a->prefix_bytes = strlen(name) - strlen("data.pkl");
    free(a->prefix);
    a->prefix = strndup(name, a->prefix_bytes);
    if (!a->prefix)
      return io_fail(error, "no memory for a name");
  }
  if (*found >= 0)
    return 0;
  return arrays ? io_fail(error, "is a zip archive of .npy files (.npz): unzip it first")
                : io_fail(error, "is a zip archive without data.pkl: not what torch.save writes");
}

static int check_order(const archive *a, const io_error *error)
{
  const zip_int64_t index = entry_find(a, "byteorder", strlen("byteorder"));
  zip_stat_t info;
  unsigned char *text = NULL;
  if (index < 0)
    return 0;
  if (entry_stat(a->zip, (zip_uint64_t)index, &info, error) != 0)
    return -1;
  if (info.size > 16 || entry_read(a->zip, &info, &text, error) != 0)
    return io_fail(error, "its entry 'byteorder' is not readable");
  const bool little = info.size == strlen("little") && memcmp(text, "little", strlen("little")) == 0;
  free(text);
  return little ? 0 : io_fail(error, "was saved on a big-endian machine: not supported");
}

/* ---- tensors ---- */

/* The entry of a tensor's storage, whose size must be what the pickle says. */
static int find_storage(const archive *a, const pickle_tensor *t, zip_stat_t *info, const io_error *error)
{
  const pickle_value *key = t->storage->key;
  const size_t key_bytes = key->as.string.length;
  char name[80];
  if (key_bytes == 0 || key_bytes > 64)
    return io_fail(error, "a storage has a key of %zu bytes: refused", key_bytes);
  const int used = snprintf(name, sizeof name, "data/%.*s", (int)key_bytes, key->as.string.text);
  const zip_int64_t index = entry_find(a, name, (size_t)used);
  if (index < 0)
    return io_fail(error, "has no entry for the storage that its pickle calls '%.*s'", (int)key_bytes,
                   key->as.string.text);
  if (entry_stat(a->zip, (zip_uint64_t)index, info, error) != 0)
    return -1;
  const unsigned item = t->storage->dtype == IO_DTYPES ? 1 : io_dtype_bits(t->storage->dtype) / 8;
  zip_uint64_t want;
  if (__builtin_mul_overflow(t->storage->elements, item, &want) || want != info->size)
    return io_fail(error, "entry '%.200s' has %llu bytes, and the pickle says %lld elements of %u", info->name,
                   (unsigned long long)info->size, (long long)t->storage->elements, item);
  return 0;
}

typedef struct walk {
  archive *archive;
  const char **names;         /* [archive->room]: of archive->tensors */
  char trail[NAME_MAX_BYTES]; /* the keys on the way to where it is */
  size_t trail_bytes;
  const io_error *error;
} walk;

static int add_tensor(walk *w, const pickle_tensor *tensor)
{
  archive *a = w->archive;
  io_tensor named = {0};
  if (a->count == a->room) {
    const size_t room = a->room ? 2 * a->room : 64;
    const pickle_tensor **tensors = realloc(a->tensors, room * sizeof *tensors);
    a->tensors = tensors ? tensors : a->tensors;
    const char **names = tensors ? realloc(w->names, room * sizeof *names) : NULL;
    if (!names)
      return io_fail(w->error, "no memory for a list of %zu tensors", room);
    w->names = names;
    a->room = room;
  }
  if (io_tensor_set_name(&named, w->trail, w->trail_bytes, w->error) != 0)
    return -1;
  a->tensors[a->count] = tensor;
  w->names[a->count++] = named.name;
  return 0;
}

/* Adds ".key" (or "key" at the start) to the trail. */
static int step_down(walk *w, const char *key, size_t key_bytes)
{
  if (key_bytes >= sizeof w->trail - w->trail_bytes)
    return io_fail(w->error, "a tensor's name is longer than %zu bytes", sizeof w->trail - 1);
  if (w->trail_bytes > 0)
    w->trail[w->trail_bytes++] = '.';
  memcpy(w->trail + w->trail_bytes, key, key_bytes);
  w->trail_bytes += key_bytes;
  return 0;
}

static int walk_value(walk *w, pickle_value *value, int depth);

static int walk_item(walk *w, const pickle_value *key, size_t index, pickle_value *value, int depth)
{
  char number[24];
  const size_t before = w->trail_bytes;
  int result;
  if (value->kind != PICKLE_TENSOR && value->kind != PICKLE_DICT && value->kind != PICKLE_LIST &&
      value->kind != PICKLE_TUPLE)
    return 0;
  if (key && key->kind == PICKLE_STRING) {
    result = step_down(w, key->as.string.text, key->as.string.length);
  } else if (!key || key->kind == PICKLE_INT) {
    const int used = snprintf(number, sizeof number, "%lld", key ? (long long)key->as.integer : (long long)index);
    result = step_down(w, number, (size_t)used);
  } else {
    result = io_fail(w->error, "a dictionary has a tensor, or more of them, under a key that is no string or number");
  }
  if (result == 0)
    result = walk_value(w, value, depth + 1);
  w->trail_bytes = before;
  return result;
}

/* A list that is there twice would be walked through twice, and one in itself for ever: each only once. */
static int walk_value(walk *w, pickle_value *value, int depth)
{
  const pickle_items *list = &value->as.list;
  int result = 0;
  if (value->kind == PICKLE_TENSOR) {
    if (w->trail_bytes == 0 && step_down(w, "tensor", strlen("tensor")) != 0)
      return -1;
    return add_tensor(w, value->as.tensor);
  }
  if (value->kind != PICKLE_DICT && value->kind != PICKLE_LIST && value->kind != PICKLE_TUPLE)
    return 0;
  if (depth > NESTING_MAX)
    return io_fail(w->error, "its dictionaries are nested more than %d deep", NESTING_MAX);
  if (value->visited && list->count > 0)
    return io_fail(w->error, "the same dictionary or list is in it twice: refused");
  value->visited = true;
  for (size_t i = 0; i < list->count && result == 0; i++)
    if (value->kind != PICKLE_DICT)
      result = walk_item(w, NULL, i, list->items[i], depth);
    else if (i % 2)
      result = walk_item(w, list->items[i - 1], 0, list->items[i], depth);
  return result;
}

static int fill_list(const archive *a, walk *w, io_tensors *t, const io_error *error)
{
  for (size_t i = 0; i < a->count; i++) {
    const pickle_tensor *from = a->tensors[i];
    io_tensor *to = &t->list[i];
    zip_stat_t info;
    size_t elements;
    to->name = w->names[i];
    w->names[i] = NULL; /* the list frees it from here on */
    if (find_storage(a, from, &info, error) != 0)
      return -1;
    to->dtype = from->dtype;
    to->dims = from->dims;
    memcpy(to->shape, from->shape, sizeof to->shape);
    memcpy(to->stride, from->stride, sizeof to->stride);
    if (!io_tensor_count(to, &elements, &to->bytes))
      return io_fail(error, "tensor '%.200s': its shape is too large for this machine's memory", to->name);
  }
  return io_tensors_check_names(t, error);
}

static int read_tensor(io_tensors *tensors, size_t index, void **copy, const void **data, const io_error *error)
{
  const archive *a = tensors->format->state;
  const pickle_tensor *t = a->tensors[index];
  zip_stat_t info;
  unsigned char *bytes = NULL;
  if (find_storage(a, t, &info, error) != 0 || entry_read(a->zip, &info, &bytes, error) != 0)
    return -1;
  *copy = bytes;
  *data = bytes + (size_t)t->offset * (io_dtype_bits(t->dtype) / 8); /* inside: pickle.c has compared it */
  return 0;
}

/* ---- the archive ---- */

static void archive_free(void *state)
{
  archive *a = state;
  if (!a)
    return;
  if (a->zip)
    zip_discard(a->zip);
  pickle_free(a->pickle);
  free(a->pickle_bytes);
  free(a->prefix);
  free(a->tensors);
  free(a);
}

static zip_t *open_zip(const unsigned char *bytes, size_t size, const io_error *error)
{
  zip_error_t reason;
  zip_error_init(&reason);
  zip_source_t *source = zip_source_buffer_create(bytes, size, 0, &reason);
  zip_t *zip = source ? zip_open_from_source(source, ZIP_RDONLY, &reason) : NULL;
  if (!zip) {
    (void)io_fail(error, "is no whole zip archive, as torch.save writes it: %s", zip_error_strerror(&reason));
    zip_source_free(source);
  }
  zip_error_fini(&reason);
  return zip;
}

static int read_archive(archive *a, walk *w, const io_error *error)
{
  zip_int64_t index;
  zip_stat_t info;
  pickle_value *root;
  if (find_pickle(a, &index, error) != 0 || check_order(a, error) != 0 || io_check_byte_order(error) != 0 ||
      entry_stat(a->zip, (zip_uint64_t)index, &info, error) != 0)
    return -1;
  if (info.size > PICKLE_MAX)
    return io_fail(error, "entry '%.200s' has %llu bytes: more than %llu is no list of tensors", info.name,
                   (unsigned long long)info.size, (unsigned long long)PICKLE_MAX);
  if (entry_read(a->zip, &info, &a->pickle_bytes, error) != 0 ||
      pickle_read(a->pickle_bytes, (size_t)info.size, &a->pickle, &root, error) != 0)
    return -1;
  return walk_value(w, root, 0);
}

int io_pt_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                size_t error_size)
{
  const io_error e = {.name = name, .text = error, .size = error_size};
  *out = NULL;
  archive *a = calloc(1, sizeof *a);
  if (!a)
    return io_fail(&e, "no memory to open it");
  walk w = {.archive = a, .error = &e};
  a->zip = open_zip(bytes, size, &e);
  int result = a->zip ? read_archive(a, &w, &e) : -1;
  io_tensors *t = result == 0 ? io_tensors_new("pt", bytes, size, a->count, &e) : NULL;
  if (t) {
    t->format->read = read_tensor;
    t->format->free_state = archive_free;
    t->format->state = a;
    result = fill_list(a, &w, t, &e);
  }
  for (size_t i = 0; i < a->count; i++)
    free((char *)w.names[i]);
  free(w.names);
  if (!t) {
    archive_free(a);
    return -1;
  }
  if (result != 0)
    io_tensors_close(t);
  else
    *out = t;
  return result;
}

#else

const char *io_pt_missing(void)
{
  return "built without libzip, so it reads no .pt files: install libzip-dev and build again";
}

int io_pt_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                size_t error_size)
{
  const io_error e = {.name = name, .text = error, .size = error_size};
  (void)bytes;
  (void)size;
  *out = NULL;
  return io_fail(&e, "is a zip archive (.pt?), and this esmm was %s", io_pt_missing());
}

#endif
