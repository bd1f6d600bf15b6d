/*
 * weights_files.h: prepared weights, the files that they are saved to, and a directory for them, for the programs that
 * test weights files.
 */
#ifndef ESMM_TEST_WEIGHTS_FILES_H
#define ESMM_TEST_WEIGHTS_FILES_H

#include "harness.h"

#include "format/checksum.h"
#include "format/weights_file.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[256];

static inline const char *path_to(const char *name) /* good until eight more were made */
{
  static char path[8][512];
  static unsigned next;
  char *made = path[next++ % 8];
  (void)snprintf(made, sizeof path[0], "%s/%s", directory, name);
  return made;
}

static inline int directory_entries(const char *path)
{
  int count = 0;
  DIR *d = opendir(path);
  assert_non_null(d);
  for (struct dirent *entry; (entry = readdir(d));)
    count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
  closedir(d);
  return count;
}

static inline void write_bytes(const char *path, const void *bytes, size_t size)
{
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  assert_int_equal(fwrite(bytes, 1, size, out), size);
  assert_int_equal(fclose(out), 0);
}

static inline unsigned char *read_bytes(const char *path, size_t *size)
{
  FILE *in = fopen(path, "rb");
  assert_non_null(in);
  assert_int_equal(fseek(in, 0, SEEK_END), 0);
  *size = (size_t)ftell(in);
  rewind(in);
  unsigned char *bytes = malloc(*size + 1);
  assert_non_null(bytes);
  assert_int_equal(fread(bytes, 1, *size, in), *size);
  fclose(in);
  return bytes;
}

static inline esmm_weights *make_weights(esmm_ctx *ctx, int64_t k, int64_t n, esmm_dtype dtype, esmm_use use,
                                         int strict, double density)
{
  esmm_matrix b = th_matrix_alloc(k, n, dtype);
  th_fill(&b, (uint64_t)(k * 1000 + n), density, false);
  esmm_weights *w = NULL;
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = use, .strict = strict, .max_bytes_ratio = 1e9};
  if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
    fail_msg("prepare: %s", esmm_ctx_error(ctx));
  free(b.data);
  return w;
}

/* The bytes of a saved file, and the file gone again. Free them. */
static inline unsigned char *saved_bytes(esmm_ctx *ctx, const esmm_weights *w, size_t *size)
{
  const char *path = path_to("bytes.esmm");
  assert_int_equal(esmm_weights_save(ctx, w, path), ESMM_OK);
  unsigned char *bytes = read_bytes(path, size);
  assert_int_equal(unlink(path), 0);
  return bytes;
}

/* Example files, by letter: Any m, Large m, Decode, Strict; BSR, N:M, and N:M with Vectors of columns. */
#define DENSE_LETTERS "ALDS"
#define FORMAT_LETTERS "BNV"

static inline esmm_prepare_opts opts_of(char letter)
{
  esmm_prepare_opts opts = {.size = sizeof opts, .max_bytes_ratio = 1e9};
  if (strchr(DENSE_LETTERS, letter)) {
    opts.use = letter == 'L' ? ESMM_USE_LARGE_M : letter == 'D' ? ESMM_USE_DECODE : ESMM_USE_ANY;
    opts.strict = letter == 'S';
  } else if (letter == 'B') {
    opts.format = (esmm_format){.kind = ESMM_FORMAT_BSR, .block_rows = 16, .block_cols = 12};
  } else {
    opts.format = (esmm_format){.kind = ESMM_FORMAT_NM, .group_cols = letter == 'V' ? 12 : 1};
  }
  return opts;
}

/* A file of 70 x 40 weights with gaps in its bitmaps: two panels, the last ragged; two words, the last ragged. Of every
   four k's at most two are alive. */
static inline unsigned char *example(esmm_ctx *ctx, char letter, size_t *size)
{
  esmm_matrix b = th_matrix_alloc(70, 40, ESMM_F32);
  for (int i = 0; i < 70; i += 3)
    for (int j = i % 23; j < 40; j += 23)
      th_set(&b, i, j, i % 5 + 0.5 * j + 0.25);
  esmm_weights *w = NULL;
  const esmm_prepare_opts opts = opts_of(letter);
  if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
    fail_msg("prepare: %s", esmm_ctx_error(ctx));
  unsigned char *bytes = saved_bytes(ctx, w, size);
  esmm_weights_free(w);
  free(b.data);
  return bytes;
}

static inline void set_checksums(unsigned char *bytes, size_t size)
{
  esmm_file_header h;
  memcpy(&h, bytes, sizeof h);
  for (int i = 0; i < ESMM_FILE_SECTIONS; i++)
    if (h.section[i].offset <= size && h.section[i].bytes <= size - h.section[i].offset)
      h.section[i].checksum = esmm_checksum_of(bytes + h.section[i].offset, h.section[i].bytes);
  h.checksum = esmm_checksum_of(&h, offsetof(esmm_file_header, checksum));
  memcpy(bytes, &h, sizeof h);
}

/* Parses from a buffer that ends where the file does, so that a sanitizer sees one byte too far. */
static inline esmm_status parse(esmm_ctx *ctx, const unsigned char *bytes, size_t size, esmm_weights **w)
{
  unsigned char *copy = malloc(size ? size : 1);
  assert_non_null(copy);
  memcpy(copy, bytes, size);
  const esmm_status status = esmm_weights_parse(ctx, "test", copy, size, w);
  free(copy);
  return status;
}

static inline void expect_status(esmm_ctx *ctx, const char *what, esmm_status got, esmm_status want)
{
  if (got != want)
    fail_msg("%s: status %d (%s), expected %d; error text: %s", what, got, esmm_status_str(got), want,
             esmm_ctx_error(ctx));
}

static inline void expect_text(esmm_ctx *ctx, const char *part)
{
  if (!strstr(esmm_ctx_error(ctx), part))
    fail_msg("'%s' is not in the error text: %s", part, esmm_ctx_error(ctx));
}
/* A B that fits: of every group of k's the first ones. */
static inline esmm_weights *make_format(esmm_ctx *ctx, int64_t k, int64_t n, esmm_dtype dtype, esmm_prepare_opts opts)
{
  esmm_matrix b = th_matrix_alloc(k, n, dtype);
  th_fill(&b, (uint64_t)(k * 100 + n), 0.4, false);
  for (int64_t i = 0; opts.format.kind == ESMM_FORMAT_NM && i < k; i++)
    for (int64_t j = 0; i % opts.format.group >= opts.format.keep && j < n; j++)
      th_set(&b, i, j, 0.0);
  esmm_weights *w = NULL;
  opts.size = sizeof opts;
  opts.max_bytes_ratio = 1e9;
  if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
    fail_msg("prepare: %s", esmm_ctx_error(ctx));
  free(b.data);
  return w;
}
static int first_fd;

static inline int lowest_free_fd(void)
{
  const int fd = dup(STDOUT_FILENO);
  close(fd);
  return fd;
}

static inline int set_up(void **state)
{
  const char *base = getenv("TMPDIR");
  th_clean_environment();
  (void)snprintf(directory, sizeof directory, "%s/esmm-weights-XXXXXX", base && *base ? base : "/tmp");
  *state = th_ctx(2);
  first_fd = lowest_free_fd();
  return mkdtemp(directory) ? chmod(directory, 0755) : -1;
}

static inline int tear_down(void **state)
{
  esmm_ctx_free(*state);
  return rmdir(directory) != 0 || lowest_free_fd() != first_fd; /* a test left a file behind, or open */
}

#endif
