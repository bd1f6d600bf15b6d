/*
 * models.c: finding files of tensors, and which way round their tensors are multiplied.
 */
#include "models.h"

#include "../io/index.h"

#include <errno.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool ends_in(const char *path, const char *ending)
{
  const size_t length = strlen(path), tail = strlen(ending);
  return length > tail && strcmp(path + length - tail, ending) == 0;
}

static bool is_kind(const struct stat *info, mode_t kind)
{
  return (info->st_mode & S_IFMT) == kind;
}

bool model_is(const char *path)
{
  struct stat info;
  if (stat(path, &info) != 0)
    return false;
  return is_kind(&info, S_IFDIR) || (is_kind(&info, S_IFREG) && (io_is_index(path) || io_is_model(path)));
}

/* ---- directories ---- */

static model_files *found; /* nftw has no argument for its caller */

static bool is_tensors(const char *path)
{
  static const char *const endings[] = {".safetensors", ".pt", ".pth", ".npy"};
  int64_t rows, cols;
  for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
    if (ends_in(path, endings[i]))
      return true;
  model_raw_shape(path, &rows, &cols);
  return (ends_in(path, ".bin") && io_is_model(path)) || rows > 0;
}

/* A directory, or a link, that is not followed: the user must hear of it. */
static void skip(const char *path, const char *reason)
{
  (void)cli_failed("%s: %s", path, reason);
  found->failed++;
}

static int visit(const char *path, const struct stat *info, int type, struct FTW *level)
{
  struct stat target; /* models are often links to files that lie elsewhere */
  (void)info;
  (void)level;
  if (type == FTW_DNR)
    skip(path, "is a directory that cannot be read");
  else if (type == FTW_NS)
    skip(path, "cannot be examined");
  if (type != FTW_F && type != FTW_SL)
    return 0;
  if (stat(path, &target) != 0) {
    skip(path, strerror(errno));
    return 0;
  }
  if (is_kind(&target, S_IFDIR))
    cli_note("%s: is a link to a directory, and not followed", path);
  if (!is_kind(&target, S_IFREG) || !is_tensors(path))
    return 0;
  found->paths = cli_grow(found->paths, (size_t)found->count + 1, sizeof *found->paths);
  found->paths[found->count] = strdup(path);
  return found->paths[found->count] ? (found->count++, 0) : -1;
}

/* nftw that does not follow links does not follow its argument either. */
static int walk(const char *path, model_files *files)
{
  struct stat info;
  size_t length = strlen(path);
  while (length > 1 && path[length - 1] == '/')
    length--;
  char *word = strndup(path, length);
  const bool link = word && lstat(word, &info) == 0 && is_kind(&info, S_IFLNK);
  char *directory = link ? realpath(word, NULL) : word;
  found = files;
  const int result = directory ? nftw(directory, visit, 32, FTW_PHYS) : -1;
  const int reason = errno;
  if (directory)
    files->prefix = strlen(directory) + (directory[strlen(directory) - 1] != '/');
  if (link)
    free(word);
  free(directory);
  return result == 0 ? CLI_GO : cli_failed("%s: cannot be walked through: %s", path, strerror(reason));
}

static int compare_paths(const void *x, const void *y)
{
  return strcmp(*(char *const *)x, *(char *const *)y);
}

/* The files that an index names, each once. */
static int find_shards(const char *path, model_files *files)
{
  char error[IO_ERROR_BYTES];
  io_index index;
  const int result = io_index_read(path, &index, error, sizeof error);
  for (size_t i = 0; result == 0 && i < index.count; i++) {
    files->paths = cli_grow(files->paths, (size_t)files->count + 1, sizeof *files->paths);
    files->paths[files->count++] = index.files[i];
    index.files[i] = NULL;
  }
  io_index_free(&index);
  if (result != 0)
    return cli_failed("%s", error);
  qsort(files->paths, (size_t)files->count, sizeof *files->paths, compare_paths);
  int kept = 0;
  for (int i = 0; i < files->count; i++)
    if (kept == 0 || strcmp(files->paths[kept - 1], files->paths[i]) != 0)
      files->paths[kept++] = files->paths[i];
    else
      free(files->paths[i]);
  files->count = kept;
  files->one = true;
  const char *slash = strrchr(path, '/');
  files->prefix = slash ? (size_t)(slash - path) + 1 : 0;
  return CLI_GO;
}

int model_files_find(const char *path, model_files *files)
{
  struct stat info;
  *files = (model_files){0};
  if (stat(path, &info) != 0)
    return cli_failed("%s: cannot be opened: %s", path, strerror(errno));
  if (is_kind(&info, S_IFREG) && io_is_index(path))
    return find_shards(path, files);
  if (!is_kind(&info, S_IFDIR)) {
    files->paths = cli_alloc(1, sizeof *files->paths);
    files->paths[0] = strdup(path);
    files->count = files->paths[0] != NULL;
    return files->count ? CLI_GO : cli_failed("out of memory");
  }
  const int status = walk(path, files);
  if (status != CLI_GO)
    return status;
  if (files->count == 0)
    return cli_failed("%s: no .safetensors, .pt, .pth or .npy file, and no raw one with its shape in its name "
                      "(w_512x128.f32), is in this directory",
                      path);
  qsort(files->paths, (size_t)files->count, sizeof *files->paths, compare_paths);
  return CLI_GO;
}

int model_files_spared(const model_files *files, const char *what, const char *path)
{
  int status = CLI_GO;
  for (int i = 0; i < files->count && status == CLI_GO; i++)
    status = cli_output_spares(what, path, "what is read", files->paths[i]);
  return status;
}

void model_files_free(model_files *files)
{
  for (int i = 0; i < files->count; i++)
    free(files->paths[i]);
  free(files->paths);
  *files = (model_files){0};
}

/* Digits, x, digits: the last such part of the file's own name. */
void model_raw_shape(const char *path, int64_t *rows, int64_t *cols)
{
  const char *slash = strrchr(path, '/');
  *rows = *cols = 0;
  if (!ends_in(path, ".f32") && !ends_in(path, ".raw") && !ends_in(path, ".bin"))
    return;
  for (const char *at = slash ? slash + 1 : path; *at;) {
    const size_t digits = strspn(at, "0123456789");
    if (digits > 0 && digits < 10 && at[digits] == 'x') {
      const size_t more = strspn(at + digits + 1, "0123456789");
      if (more > 0 && more < 10) {
        *rows = strtoll(at, NULL, 10);
        *cols = strtoll(at + digits + 1, NULL, 10);
      }
    }
    at += digits ? digits : 1;
  }
}

int model_read(const char *what, const char *path, bool known, int64_t rows, int64_t cols, io_matrix *out)
{
  char error[IO_ERROR_BYTES];
  if (!known)
    model_raw_shape(path, &rows, &cols);
  if (io_matrix_read(path, rows, cols, out, error, sizeof error) == 0)
    return CLI_GO;
  return what ? cli_failed("%s: %s", what, error) : cli_failed("%s", error);
}

/* ---- tensors ---- */

esmm_matrix model_as_b(const io_tensors *tensors, const esmm_matrix *matrix, model_k_axis axis)
{
  const bool single = strcmp(tensors->kind, "npy") == 0 || strcmp(tensors->kind, "raw") == 0;
  esmm_matrix b = *matrix;
  if (axis == MODEL_K_FIRST || (axis == MODEL_K_AUTO && single))
    return b;
  b.rows = matrix->cols;
  b.cols = matrix->rows;
  b.order = matrix->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return b;
}

bool model_is_word(const char *word)
{
  return strstr(word, "::") || io_is_index(word) || io_is_model(word);
}

/* The tensor that a word names, or the only matrix there is. */
static int find_tensor(const char *what, const io_tensors *tensors, const char *name, size_t *index)
{
  int matrices = 0;
  for (size_t i = 0; i < tensors->count; i++) {
    const bool usable = !io_tensor_refusal(&tensors->list[i]);
    if (name ? strcmp(tensors->list[i].name, name) == 0 : usable) {
      *index = i;
      matrices++;
    }
  }
  if (matrices == 1)
    return CLI_GO;
  return name ? cli_failed("%s: %s has no tensor '%s' ('esmm inspect' lists them)", what, tensors->path, name)
              : cli_failed("%s: %s has %d matrices: name one, as in %s::NAME ('esmm inspect' lists them)", what,
                           tensors->path, matrices, tensors->path);
}

/* The file of FILE::TENSOR; names may hold "::" too, so the first one behind a file counts, else the last one. */
static char *split_word(const char *word, const char **name)
{
  struct stat info;
  bool found_file = false;
  *name = NULL;
  for (const char *at = strstr(word, "::"); at && !found_file; at = strstr(at + 1, "::")) {
    char *path = strndup(word, (size_t)(at - word));
    found_file = path && stat(path, &info) == 0 && !is_kind(&info, S_IFDIR);
    *name = at + 2;
    free(path);
  }
  return *name ? strndup(word, (size_t)(*name - 2 - word)) : strdup(word);
}

/* The path of the file that has a tensor of an index, in the place of the index's own. */
static int find_shard(const char *what, char **path, const char *name)
{
  char error[IO_ERROR_BYTES];
  io_index index;
  int status = CLI_GO;
  if (!name)
    return cli_failed("%s: %s is a model's index: name a tensor, as in %s::NAME ('esmm inspect' lists them)", what,
                      *path, *path);
  if (io_index_read(*path, &index, error, sizeof error) != 0)
    status = cli_failed("%s: %s", what, error);
  const char *file = status == CLI_GO ? io_index_find(&index, name) : NULL;
  if (status == CLI_GO && !file)
    status = cli_failed("%s: %s has no tensor '%s' ('esmm inspect' lists them)", what, *path, name);
  if (file) {
    free(*path);
    *path = strdup(file);
    if (!*path)
      status = cli_failed("out of memory");
  }
  io_index_free(&index);
  return status;
}

/* A bias is one row. */
static void make_row(io_tensor *tensor)
{
  if (tensor->dims != 1)
    return;
  tensor->dims = 2;
  tensor->shape[1] = tensor->shape[0];
  tensor->stride[1] = tensor->stride[0];
  tensor->shape[0] = 1;
  tensor->stride[0] = tensor->shape[1];
}

static int load(esmm_ctx *ctx, const char *what, const char *word, bool as_b, bool as_row, model_k_axis axis,
                io_matrix *out)
{
  const char *name;
  char *path = split_word(word, &name);
  char error[IO_ERROR_BYTES];
  io_tensors *tensors = NULL;
  int64_t rows, cols;
  size_t index = 0;
  esmm_matrix matrix;
  *out = (io_matrix){0};
  if (!path)
    return cli_failed("out of memory");
  int status = io_is_index(path) ? find_shard(what, &path, name) : CLI_GO;
  if (status == CLI_GO) {
    model_raw_shape(path, &rows, &cols);
    if (io_tensors_open(path, rows, cols, &tensors, error, sizeof error) != 0)
      status = cli_failed("%s: %s", what, error);
  }
  free(path);
  if (status == CLI_GO)
    status = find_tensor(what, tensors, name, &index);
  if (status == CLI_GO && as_row)
    make_row(&tensors->list[index]);
  if (status == CLI_GO && io_tensor_matrix(tensors, index, &matrix, error, sizeof error) != 0)
    status = cli_failed("%s: %s", what, error);
  if (status == CLI_GO) {
    const esmm_matrix seen = as_b ? model_as_b(tensors, &matrix, axis) : matrix;
    status = cli_matrix_convert(ctx, what, &seen, seen.dtype, out);
  }
  io_tensors_close(tensors);
  return status;
}

int model_load(esmm_ctx *ctx, const char *what, const char *word, bool as_b, model_k_axis axis, io_matrix *out)
{
  return load(ctx, what, word, as_b, false, axis, out);
}

int model_read_word(esmm_ctx *ctx, const char *what, const char *word, bool as_b, model_k_axis axis, bool known,
                    int64_t rows, int64_t cols, io_matrix *out)
{
  struct stat info;
  const bool is_stream = stat(word, &info) == 0 && !is_kind(&info, S_IFREG);
  if (is_stream || !model_is_word(word)) /* looking into a pipe would take its first bytes away */
    return model_read(what, word, known, rows, cols, out);
  const int status = load(ctx, what, word, as_b, rows == 1, axis, out);
  if (status != CLI_GO || !known || (out->m.rows == rows && out->m.cols == cols))
    return status;
  const int64_t is_rows = out->m.rows, is_cols = out->m.cols;
  io_matrix_free(out);
  return cli_failed("%s: %s is %lld x %lld%s, not %lld x %lld as it should be", what, word, (long long)is_rows,
                    (long long)is_cols, as_b ? " as B" : "", (long long)rows, (long long)cols);
}

const char *model_shape(const io_tensor *tensor)
{
  static char ring[4][IO_TENSOR_DIMS * 22 + 4];
  static unsigned turn;
  char *text = ring[turn++ % 4];
  size_t used = 1;
  text[0] = '[';
  for (int i = 0; i < tensor->dims; i++)
    used += (size_t)snprintf(text + used, sizeof *ring - used, "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
  snprintf(text + used, sizeof *ring - used, "]");
  return text;
}
