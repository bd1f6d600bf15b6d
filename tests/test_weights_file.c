/*
 * test_weights_file.c: prepared weights to a file and back.
 *
 * What comes back must multiply to the same bits; what was damaged, cut or forged must be refused with its own status;
 * and a save that fails for whatever reason must leave the old file as it was and nothing beside it.
 *
 * The program puts functions of its own before libc's pread, pwrite, fsync and rename, so that short transfers,
 * interruptions and a failing disk can be had on demand.
 */
#include "harness.h"

#include "format/checksum.h"
#include "format/weights_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- system calls that misbehave on demand ---- */

static struct {
  bool ragged;     /* transfers of at most 7 bytes, every other one interrupted first */
  int fail_fsync;  /* errno of the next fsync, 0: none */
  int fail_rename; /* of the next rename */
  int fail_write;  /* of the pwrite after writes_left more */
  int writes_left;
  int64_t calls; /* of pread and pwrite */
} fault;

static size_t cut_transfer(size_t bytes)
{
  fault.calls++;
  if (!fault.ragged)
    return bytes;
  if (fault.calls % 2 == 1) {
    errno = EINTR;
    return 0;
  }
  return bytes < 7 ? bytes : 7;
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset)
{
  const size_t part = cut_transfer(bytes);
  return part == 0 && bytes > 0 ? -1 : (ssize_t)syscall(SYS_pread64, fd, data, part, offset);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
  if (fault.fail_write && fault.writes_left-- == 0) {
    errno = fault.fail_write;
    return -1;
  }
  const size_t part = cut_transfer(bytes);
  return part == 0 && bytes > 0 ? -1 : (ssize_t)syscall(SYS_pwrite64, fd, data, part, offset);
}

static int take_error(int *error)
{
  errno = *error;
  *error = 0;
  return errno != 0;
}

int fsync(int fd)
{
  return take_error(&fault.fail_fsync) ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
  return take_error(&fault.fail_rename) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

/* ---- fixtures ---- */

static char directory[256];

static const char *path_to(const char *name) /* good until eight more were made */
{
  static char path[8][512];
  static unsigned next;
  char *made = path[next++ % 8];
  (void)snprintf(made, sizeof path[0], "%s/%s", directory, name);
  return made;
}

static int directory_entries(const char *path)
{
  int count = 0;
  DIR *d = opendir(path);
  assert_non_null(d);
  for (struct dirent *entry; (entry = readdir(d));)
    count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
  closedir(d);
  return count;
}

static void write_bytes(const char *path, const void *bytes, size_t size)
{
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  assert_int_equal(fwrite(bytes, 1, size, out), size);
  assert_int_equal(fclose(out), 0);
}

static unsigned char *read_bytes(const char *path, size_t *size)
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

static esmm_weights *make_weights(esmm_ctx *ctx, int64_t k, int64_t n, esmm_dtype dtype, esmm_use use, int strict,
                                  double density)
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
static unsigned char *saved_bytes(esmm_ctx *ctx, const esmm_weights *w, size_t *size)
{
  const char *path = path_to("bytes.esmm");
  assert_int_equal(esmm_weights_save(ctx, w, path), ESMM_OK);
  unsigned char *bytes = read_bytes(path, size);
  assert_int_equal(unlink(path), 0);
  return bytes;
}

/* A file of 70 x 40 weights with gaps in its bitmaps: two panels, the last ragged; two words, the last ragged. */
static unsigned char *example(esmm_ctx *ctx, esmm_use use, int strict, size_t *size)
{
  esmm_matrix b = th_matrix_alloc(70, 40, ESMM_F32);
  for (int i = 0; i < 70; i += 3)
    for (int j = i % 23; j < 40; j += 23)
      th_set(&b, i, j, i % 5 + 0.5 * j + 0.25);
  esmm_weights *w = NULL;
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = use, .strict = strict};
  if (esmm_prepare(ctx, &b, &opts, &w) != ESMM_OK)
    fail_msg("prepare: %s", esmm_ctx_error(ctx));
  unsigned char *bytes = saved_bytes(ctx, w, size);
  esmm_weights_free(w);
  free(b.data);
  return bytes;
}

static void set_checksums(unsigned char *bytes, size_t size)
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
static esmm_status parse(esmm_ctx *ctx, const unsigned char *bytes, size_t size, esmm_weights **w)
{
  unsigned char *copy = malloc(size ? size : 1);
  assert_non_null(copy);
  memcpy(copy, bytes, size);
  const esmm_status status = esmm_weights_parse(ctx, "test", copy, size, w);
  free(copy);
  return status;
}

static void expect_status(esmm_ctx *ctx, const char *what, esmm_status got, esmm_status want)
{
  if (got != want)
    fail_msg("%s: status %d (%s), expected %d; error text: %s", what, got, esmm_status_str(got), want,
             esmm_ctx_error(ctx));
}

static void expect_text(esmm_ctx *ctx, const char *part)
{
  if (!strstr(esmm_ctx_error(ctx), part))
    fail_msg("'%s' is not in the error text: %s", part, esmm_ctx_error(ctx));
}

/* ---- round trips ---- */

static void expect_same_product(esmm_ctx *ctx, const esmm_weights *x, const esmm_weights *y, int64_t m,
                                const char *force)
{
  esmm_matrix a = th_matrix_alloc(m, x->k, ESMM_F32), cx = th_matrix_alloc(m, x->n, ESMM_F32);
  esmm_matrix cy = th_matrix_alloc(m, x->n, ESMM_F32);
  const size_t bytes = (size_t)(m * x->n) * sizeof(float);
  th_fill(&a, 11, 0.4, false);
  memset(cx.data, 0x11, bytes);
  memset(cy.data, 0x22, bytes);
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force, .strict = x->strict};
  const esmm_status status = esmm_matmul(ctx, &a, x, &cx, &opts, NULL);
  assert_true(status == ESMM_OK || status == ESMM_ERR_UNSUPPORTED);
  assert_int_equal(esmm_matmul(ctx, &a, y, &cy, &opts, NULL), status);
  if (status == ESMM_OK)
    assert_memory_equal(cx.data, cy.data, bytes);
  if (strcmp(force, "ref") == 0)
    assert_int_equal(status, ESMM_OK);
  free(a.data);
  free(cx.data);
  free(cy.data);
}

static void expect_same_weights(const esmm_weights *x, const esmm_weights *y)
{
  assert_int_equal(x->k, y->k);
  assert_int_equal(x->n, y->n);
  assert_int_equal(x->dtype, y->dtype);
  assert_int_equal(x->use, y->use);
  assert_int_equal(x->strict, y->strict);
  assert_int_equal(x->full, y->full);
  assert_memory_equal(&x->element_density, &y->element_density, sizeof x->element_density);
  assert_memory_equal(&x->strip_density, &y->strip_density, sizeof x->strip_density);
  assert_int_equal(x->bytes, y->bytes);
  assert_int_equal(x->panel_bytes, y->panel_bytes);
  assert_int_equal(x->rows_bytes, y->rows_bytes);
  assert_int_equal(x->rows_ld, y->rows_ld);
  assert_memory_equal(x->bits, y->bits, (size_t)(x->panels * x->words) * sizeof *x->bits);
  assert_memory_equal(x->alive, y->alive, (size_t)x->k * sizeof *x->alive);
  assert_true(!x->rows == !y->rows && !x->before == !y->before && !x->panel_data == !y->panel_data);
  if (x->rows)
    assert_memory_equal(x->rows, y->rows, x->rows_bytes);
  if (x->before) {
    assert_memory_equal(x->before, y->before, (size_t)(x->panels * (x->words + 1)) * sizeof *x->before);
    assert_memory_equal(x->panel_at, y->panel_at, (size_t)(x->panels + 1) * sizeof *x->panel_at);
    assert_memory_equal(x->panel_data, y->panel_data, x->panel_bytes);
  }
}

static esmm_weights *load_same(esmm_ctx *ctx, const esmm_weights *saved, const char *path)
{
  esmm_weights *loaded = NULL;
  expect_status(ctx, "load", esmm_weights_load(ctx, path, &loaded), ESMM_OK);
  expect_same_weights(saved, loaded);
  return loaded;
}

static void test_round_trips(void **state)
{
  static const int64_t shapes[][2] = {{0, 0}, {0, 5}, {7, 0}, {1, 1}, {64, 32}, {63, 31}, {65, 33}, {130, 97}};
  static const double densities[] = {0.0, 0.03, 1.0};
  esmm_ctx *ctx = *state;
  const char *path = path_to("round.esmm");
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++)
      for (int use = ESMM_USE_ANY; use <= ESMM_USE_LARGE_M; use++)
        for (int strict = 0; strict <= 1; strict++) {
          const double density = densities[(s + (size_t)(dtype + use)) % 3];
          esmm_weights *made =
              make_weights(ctx, shapes[s][0], shapes[s][1], (esmm_dtype)dtype, (esmm_use)use, strict, density);
          expect_status(ctx, "save", esmm_weights_save(ctx, made, path), ESMM_OK);
          esmm_weights *loaded = load_same(ctx, made, path);
          for (int64_t m = 1; m <= 37; m += 36) {
            expect_same_product(ctx, made, loaded, m, "auto");
            expect_same_product(ctx, made, loaded, m, "ref");
          }
          esmm_weights_free(made);
          esmm_weights_free(loaded);
        }
  assert_int_equal(unlink(path), 0);
  assert_int_equal(directory_entries(directory), 0);
}

/* Larger than one chunk of the reader, and not a multiple of it. */
static void test_round_trip_of_chunks(void **state)
{
  esmm_ctx *ctx = *state;
  const char *path = path_to("large.esmm");
  esmm_weights *made = make_weights(ctx, 1100, 1001, ESMM_F32, ESMM_USE_ANY, 0, 0.5);
  expect_status(ctx, "save", esmm_weights_save(ctx, made, path), ESMM_OK);
  esmm_weights_free(load_same(ctx, made, path));
  esmm_weights_free(made);
  assert_int_equal(unlink(path), 0);
}

static void test_interrupted_and_short_transfers(void **state)
{
  esmm_ctx *ctx = *state;
  const char *path = path_to("ragged.esmm");
  esmm_weights *made = make_weights(ctx, 70, 40, ESMM_F16, ESMM_USE_ANY, 0, 0.1), *loaded = NULL;
  fault.ragged = true;
  fault.calls = 0;
  const esmm_status saved = esmm_weights_save(ctx, made, path);
  assert_true(fault.calls > 100);
  fault.calls = 0;
  const esmm_status read = esmm_weights_load(ctx, path, &loaded);
  assert_true(fault.calls > 100);
  fault.ragged = false;
  expect_status(ctx, "save", saved, ESMM_OK);
  expect_status(ctx, "load", read, ESMM_OK);
  expect_same_weights(made, loaded);
  esmm_weights_free(made);
  esmm_weights_free(loaded);
  assert_int_equal(unlink(path), 0);
}

/* Files outlive the library that wrote them: the same weights must give the bytes that version 1 always gave. */
static void test_format_is_pinned(void **state)
{
  unsigned char counting[100];
  for (size_t i = 0; i < sizeof counting; i++)
    counting[i] = (unsigned char)i;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  assert_int_equal(esmm_checksum_of(counting, 0), 0x436cfa14d67d464f);
  assert_int_equal(esmm_checksum_of(counting, 32), 0x542f1ce3f0f68ffd);
  assert_int_equal(esmm_checksum_of(counting, 100), 0xb544a4d424372c58);
  size_t size;
  unsigned char *bytes = example(*state, ESMM_USE_ANY, 0, &size);
  assert_int_equal(size, 18048);
  assert_int_equal(esmm_checksum_of(bytes, size), 0x1f194e0e5db876fb);
  free(bytes);
#else
  (void)state;
  skip();
#endif
}

static void test_checksum_in_parts(void **state)
{
  (void)state;
  unsigned char bytes[300];
  th_rng rng = {5};
  for (size_t i = 0; i < sizeof bytes; i++)
    bytes[i] = (unsigned char)th_next(&rng);
  for (size_t length = 0; length <= sizeof bytes; length++) {
    esmm_checksum sum;
    esmm_checksum_begin(&sum);
    const size_t first = length / 2 / ESMM_CHECKSUM_BLOCK * ESMM_CHECKSUM_BLOCK;
    esmm_checksum_add(&sum, bytes, first);
    esmm_checksum_add(&sum, bytes + first, length - first);
    assert_int_equal(esmm_checksum_end(&sum), esmm_checksum_of(bytes, length));
    if (length > 0) /* zeros at the end are not padding */
      assert_int_not_equal(esmm_checksum_of(bytes, length), esmm_checksum_of(bytes, length - 1));
  }
  memset(bytes, 0, sizeof bytes);
  assert_int_not_equal(esmm_checksum_of(bytes, 8), esmm_checksum_of(bytes, 9));
}

/* ---- damage ---- */

static void test_every_flipped_bit_is_found(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *made = make_weights(ctx, 9, 3, ESMM_BF16, ESMM_USE_ANY, 0, 0.4), *loaded = NULL;
  size_t size;
  unsigned char *bytes = saved_bytes(ctx, made, &size);
  expect_status(ctx, "undamaged", parse(ctx, bytes, size, &loaded), ESMM_OK);
  esmm_weights_free(loaded);
  loaded = NULL;
  for (size_t i = 0; i < size; i++)
    for (int bit = 0; bit < 8; bit++) {
      bytes[i] = (unsigned char)(bytes[i] ^ 1u << bit);
      const esmm_status status = parse(ctx, bytes, size, &loaded);
      bytes[i] = (unsigned char)(bytes[i] ^ 1u << bit);
      const bool identity = i < offsetof(esmm_file_header, file_bytes); /* says what kind of file it is */
      if (identity ? status != ESMM_ERR_FORMAT && status != ESMM_ERR_VERSION : status != ESMM_ERR_CHECKSUM)
        fail_msg("bit %d of byte %zu flipped: status %d", bit, i, status);
      assert_null(loaded);
    }
  free(bytes);
  esmm_weights_free(made);
}

static void test_every_truncation_is_found(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *loaded = NULL;
  for (int use = ESMM_USE_ANY; use <= ESMM_USE_LARGE_M; use++) {
    size_t size;
    unsigned char *bytes = example(ctx, (esmm_use)use, 0, &size);
    for (size_t length = 0; length < size; length++) {
      expect_status(ctx, "cut short", parse(ctx, bytes, length, &loaded), ESMM_ERR_TRUNCATED);
      assert_null(loaded);
    }
    bytes[size] = 0; /* read_bytes left room for it */
    expect_status(ctx, "one byte more", parse(ctx, bytes, size + 1, &loaded), ESMM_ERR_FORMAT);
    free(bytes);
  }
  expect_status(ctx, "no bytes", esmm_weights_parse(ctx, "none", NULL, 0, &loaded), ESMM_ERR_TRUNCATED);
}

/* ---- forgeries: every checksum right, something else wrong ---- */

static void rotate(uint64_t *word)
{
  *word = *word << 1 | *word >> 63;
}

#define SECTION(type, which) ((type *)(void *)(bytes + h->section[which].offset))

/* clang-format off */
/* X(name, the example files it is tried on, the status it must get, the change) */
#define FORGERIES(X) \
  X(nothing, "ALDS", ESMM_OK, (void)0) \
  X(other_endian, "A", ESMM_ERR_VERSION, h->endian = ESMM_FILE_ENDIAN_OTHER) \
  X(odd_endian, "A", ESMM_ERR_FORMAT, h->endian = 0x02010403u) \
  X(newer, "A", ESMM_ERR_VERSION, h->version = ESMM_FILE_VERSION + 1) \
  X(version_0, "A", ESMM_ERR_FORMAT, h->version = 0) \
  X(header_bytes, "A", ESMM_ERR_FORMAT, h->header_bytes = 256) \
  X(header_bytes_huge, "A", ESMM_ERR_FORMAT, h->header_bytes = UINT64_MAX) \
  X(file_bytes_less, "A", ESMM_ERR_FORMAT, h->file_bytes -= 64) \
  X(file_bytes_more, "A", ESMM_ERR_FORMAT, h->file_bytes += 64) \
  X(k_negative, "A", ESMM_ERR_FORMAT, h->k = -1) \
  X(k_more, "ALD", ESMM_ERR_FORMAT, h->k++) \
  X(k_less, "ALD", ESMM_ERR_FORMAT, h->k--) \
  X(k_huge, "ALD", ESMM_ERR_FORMAT, (h->k = INT64_MAX, h->words = INT64_MAX / 64 + 1)) \
  X(k_2_40, "ALD", ESMM_ERR_FORMAT, (h->k = (int64_t)1 << 40, h->words = (int64_t)1 << 34)) \
  X(n_negative, "A", ESMM_ERR_FORMAT, h->n = -40) \
  X(n_more, "ALD", ESMM_ERR_FORMAT, h->n++) \
  X(n_less, "ALD", ESMM_ERR_FORMAT, h->n--) \
  X(n_huge, "ALD", ESMM_ERR_FORMAT, (h->n = INT64_MAX, h->panels = INT64_MAX / 32 + 1)) \
  X(n_overflows, "AD", ESMM_ERR_FORMAT, \
    (h->n = INT64_MAX - 64, h->panels = h->n / 32 + 1, h->rows_ld = h->n / 16 * 16 + 16)) \
  X(dtype_3, "A", ESMM_ERR_FORMAT, h->dtype = 3) \
  X(dtype_bf16, "AL", ESMM_ERR_FORMAT, h->dtype = ESMM_BF16) \
  X(use_3, "A", ESMM_ERR_FORMAT, h->use = 3) \
  X(use_any, "LD", ESMM_ERR_FORMAT, h->use = ESMM_USE_ANY) \
  X(use_decode, "AL", ESMM_ERR_FORMAT, h->use = ESMM_USE_DECODE) \
  X(use_large_m, "AD", ESMM_ERR_FORMAT, h->use = ESMM_USE_LARGE_M) \
  X(strict_2, "AS", ESMM_ERR_FORMAT, h->strict = 2) \
  X(strict_with_gaps, "AD", ESMM_ERR_FORMAT, h->strict = 1) \
  X(not_strict, "S", ESMM_ERR_FORMAT, h->strict = 0) \
  X(full_with_gaps, "ALD", ESMM_ERR_FORMAT, h->full = 1) \
  X(full_2, "AS", ESMM_ERR_FORMAT, h->full = 2) \
  X(not_full, "S", ESMM_ERR_FORMAT, h->full = 0) \
  X(panels_more, "A", ESMM_ERR_FORMAT, h->panels++) \
  X(panels_negative, "A", ESMM_ERR_FORMAT, h->panels = -2) \
  X(words_less, "A", ESMM_ERR_FORMAT, h->words--) \
  X(words_huge, "A", ESMM_ERR_FORMAT, h->words = INT64_MAX) \
  X(rows_ld_less, "A", ESMM_ERR_FORMAT, h->rows_ld = 16) \
  X(rows_ld_negative, "A", ESMM_ERR_FORMAT, h->rows_ld = -48) \
  X(rows_ld_tight, "A", ESMM_ERR_FORMAT, h->rows_ld = 40) \
  X(rows_ld_without_rows, "L", ESMM_ERR_FORMAT, h->rows_ld = 48) \
  X(panel_cols, "A", ESMM_ERR_FORMAT, h->panel_cols = 16) \
  X(half_cols, "A", ESMM_ERR_FORMAT, h->half_cols = 32) \
  X(section_count, "A", ESMM_ERR_FORMAT, h->section_count = 4) \
  X(zero, "A", ESMM_ERR_FORMAT, h->zero = 1) \
  X(reserved, "A", ESMM_ERR_FORMAT, h->reserved[8] = 1) \
  X(element_density_nan, "A", ESMM_ERR_FORMAT, memset(&h->element_density, 0xff, sizeof h->element_density)) \
  X(element_density, "ALDS", ESMM_ERR_FORMAT, h->element_density += 0.001) \
  X(strip_density_nan, "AS", ESMM_ERR_FORMAT, memset(&h->strip_density, 0xff, sizeof h->strip_density)) \
  X(strip_density, "ALDS", ESMM_ERR_FORMAT, h->strip_density += 0.001) \
  X(offset_moved, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].offset -= 64) \
  X(offset_huge, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].offset = UINT64_MAX - 63) \
  X(overlap, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].offset = h->section[ESMM_FILE_BITS].offset) \
  X(bits_longer, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_BITS].bytes += 8) \
  X(panels_shorter, "AL", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes -= 128) \
  X(panels_huge, "AL", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes = UINT64_MAX - 127) \
  X(panels_in_decode, "D", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes = 128) \
  X(rows_huge, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].bytes = UINT64_MAX) \
  X(bit_beyond_k, "ALDS", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[1] |= (uint64_t)1 << 6) \
  X(bits_set, "ALD", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[2] = UINT64_MAX) \
  X(bits_gone, "ALDS", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[0] = 0) \
  X(bits_moved, "AD", ESMM_ERR_FORMAT, rotate(SECTION(uint64_t, ESMM_FILE_BITS))) \
  X(before_first, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[0] = 1) \
  X(before_middle, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[4]++) \
  X(before_last, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[5]++) \
  X(before_huge, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[2] = UINT32_MAX) \
  X(panel_at_first, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[0] = 32) \
  X(panel_at_middle, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[1] += 32) \
  X(panel_at_end, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[2] += 32) \
  X(panel_at_huge, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[1] = UINT64_MAX - 31) \
  X(panel_value, "AS", ESMM_ERR_FORMAT, memset(SECTION(float, ESMM_FILE_PANELS), 0xff, 4)) \
  X(panel_padding, "ALS", ESMM_ERR_FORMAT, \
    SECTION(float, ESMM_FILE_PANELS)[h->section[ESMM_FILE_PANELS].bytes / 4 - 1] = 1.0f) \
  X(panels_all_zero, "L", ESMM_ERR_FORMAT, \
    (memset(SECTION(char, ESMM_FILE_PANELS), 0, h->section[ESMM_FILE_PANELS].bytes), h->element_density = 0.0)) \
  X(row_value, "AS", ESMM_ERR_FORMAT, SECTION(float, ESMM_FILE_ROWS)[0] += 1.0f) \
  X(row_padding, "ADS", ESMM_ERR_FORMAT, SECTION(float, ESMM_FILE_ROWS)[47] = 1.0f)

#define X(name, files, status, change) \
  static void forge_##name(esmm_file_header *h, unsigned char *bytes) { (void)h, (void)bytes, change; }
FORGERIES(X)
#undef X

static const struct forgery {
  const char *name, *files;
  esmm_status status;
  void (*change)(esmm_file_header *h, unsigned char *bytes);
} forgeries[] = {
#define X(name, files, status, change) {#name, files, status, forge_##name},
  FORGERIES(X)
#undef X
};
/* clang-format on */

static void test_forgeries_are_refused(void **state)
{
  esmm_ctx *ctx = *state;
  for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++)
    for (const char *letter = forgeries[i].files; *letter; letter++) {
      const esmm_use use = *letter == 'L' ? ESMM_USE_LARGE_M : *letter == 'D' ? ESMM_USE_DECODE : ESMM_USE_ANY;
      size_t size;
      unsigned char *bytes = example(ctx, use, *letter == 'S', &size);
      esmm_file_header h;
      esmm_weights *loaded = NULL;
      memcpy(&h, bytes, sizeof h);
      forgeries[i].change(&h, bytes);
      memcpy(bytes, &h, sizeof h);
      set_checksums(bytes, size);
      expect_status(ctx, forgeries[i].name, parse(ctx, bytes, size, &loaded), forgeries[i].status);
      assert_true((loaded != NULL) == (forgeries[i].status == ESMM_OK));
      esmm_weights_free(loaded);
      free(bytes);
    }
}

/* The panels' size is the one that the shape does not give: forge it together with the file's own. */
static void test_panels_of_wrong_size_are_refused(void **state)
{
  esmm_ctx *ctx = *state;
  for (int by = -128; by <= 128; by += 64) {
    size_t size;
    unsigned char *bytes = example(ctx, ESMM_USE_LARGE_M, 0, &size), *longer = calloc(1, size + 128);
    esmm_file_header h;
    esmm_weights *loaded = NULL;
    assert_non_null(longer);
    memcpy(longer, bytes, size);
    memcpy(&h, bytes, sizeof h);
    h.section[ESMM_FILE_PANELS].bytes += (uint64_t)by;
    h.file_bytes += (uint64_t)by;
    memcpy(longer, &h, sizeof h);
    set_checksums(longer, h.file_bytes);
    expect_status(ctx, "panels resized", parse(ctx, longer, h.file_bytes, &loaded), by ? ESMM_ERR_FORMAT : ESMM_OK);
    esmm_weights_free(loaded);
    free(bytes);
    free(longer);
  }
}

/* ---- what is no weights file at all ---- */

static void expect_load(esmm_ctx *ctx, const char *path, esmm_status status, const char *reason)
{
  esmm_weights *loaded = (esmm_weights *)(void *)&loaded; /* any value: a failed load leaves NULL */
  expect_status(ctx, path, esmm_weights_load(ctx, path, &loaded), status);
  expect_text(ctx, path);
  expect_text(ctx, reason);
  assert_null(loaded);
}

static void test_truncated_file_on_disk(void **state)
{
  const char *path = path_to("cut.esmm");
  size_t size;
  unsigned char *bytes = example(*state, ESMM_USE_ANY, 0, &size);
  const size_t lengths[] = {0, 3, 8, 100, sizeof(esmm_file_header), size / 2, size - 1};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    write_bytes(path, bytes, lengths[i]);
    expect_load(*state, path, ESMM_ERR_TRUNCATED, "");
  }
  free(bytes);
  assert_int_equal(unlink(path), 0);
}

/* Runs as somebody whom permissions bind, where the tests run as root. */
static bool become_nobody(void)
{
  return geteuid() != 0 || seteuid(65534) == 0;
}

static void become_self(void)
{
  if (getuid() == 0)
    assert_int_equal(seteuid(0), 0);
}

static void test_strange_files(void **state)
{
  esmm_ctx *ctx = *state;
  const char *path = path_to("strange");
  expect_load(ctx, path, ESMM_ERR_IO, strerror(ENOENT));
  expect_load(ctx, directory, ESMM_ERR_IO, "directory");
  expect_load(ctx, "/dev/null", ESMM_ERR_IO, "not a regular file");
  assert_int_equal(mkfifo(path, 0600), 0);
  expect_load(ctx, path, ESMM_ERR_IO, "not a regular file");
  assert_int_equal(unlink(path), 0);
  write_bytes(path, "", 0);
  expect_load(ctx, path, ESMM_ERR_TRUNCATED, "empty");
  write_bytes(path, "x", 1);
  expect_load(ctx, path, ESMM_ERR_FORMAT, "not a weights file");
  write_bytes(path, "\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", 70);
  expect_load(ctx, path, ESMM_ERR_FORMAT, "not a weights file");
  assert_int_equal(chmod(path, 0), 0);
  if (become_nobody())
    expect_load(ctx, path, ESMM_ERR_IO, strerror(EACCES));
  become_self();
  assert_int_equal(unlink(path), 0);

  char long_path[3000];
  memset(long_path, 'x', sizeof long_path);
  long_path[sizeof long_path - 1] = '\0';
  esmm_weights *loaded = NULL;
  expect_status(ctx, "long name", esmm_weights_load(ctx, long_path, &loaded), ESMM_ERR_IO);
  expect_text(ctx, strerror(ENAMETOOLONG));
}

static void test_arguments(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 3, 3, ESMM_F32, ESMM_USE_ANY, 0, 1.0), *loaded = NULL;
  assert_int_equal(esmm_weights_save(NULL, w, "x"), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_load(NULL, "x", &loaded), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_save(ctx, NULL, "x"), ESMM_ERR_ARGUMENT);
  expect_text(ctx, "weights is NULL");
  assert_int_equal(esmm_weights_save(ctx, w, NULL), ESMM_ERR_ARGUMENT);
  expect_text(ctx, "path is NULL");
  assert_int_equal(esmm_weights_load(ctx, "", &loaded), ESMM_ERR_ARGUMENT);
  expect_text(ctx, "path is empty");
  assert_int_equal(esmm_weights_save(ctx, w, ""), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_load(ctx, NULL, &loaded), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_load(ctx, "x", NULL), ESMM_ERR_ARGUMENT);
  expect_text(ctx, "weights is NULL");
  esmm_weights_free(w);
}

/* ---- saves that fail ---- */

static const char old_content[] = "what was here before";

static void expect_old_content(const char *path)
{
  size_t size;
  unsigned char *bytes = read_bytes(path, &size);
  assert_int_equal(size, sizeof old_content);
  assert_memory_equal(bytes, old_content, size);
  free(bytes);
  assert_int_equal(directory_entries(directory), 1);
}

static void expect_save(esmm_ctx *ctx, const esmm_weights *w, const char *path, int error)
{
  expect_status(ctx, path, esmm_weights_save(ctx, w, path), ESMM_ERR_IO);
  expect_text(ctx, path);
  expect_text(ctx, strerror(error));
}

static void test_failed_saves_keep_the_old_file(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 200, 100, ESMM_F32, ESMM_USE_ANY, 0, 0.5);
  const char *path = path_to("kept.esmm");
  write_bytes(path, old_content, sizeof old_content);

  expect_save(ctx, w, path_to("missing/x.esmm"), ENOENT);
  expect_save(ctx, w, path_to("kept.esmm/x"), ENOTDIR);
  expect_old_content(path);

  fault.fail_fsync = EIO;
  expect_save(ctx, w, path, EIO);
  expect_old_content(path);
  fault.fail_rename = EXDEV;
  expect_save(ctx, w, path, EXDEV);
  expect_old_content(path);
  fault.fail_write = ENOSPC;
  for (int writes = 0; writes < 6; writes++) { /* five sections, then the header */
    fault.writes_left = writes;
    expect_save(ctx, w, path, ENOSPC);
    expect_old_content(path);
  }
  fault.fail_write = 0;

  struct rlimit limit, small;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
  small = limit;
  small.rlim_cur = 1000;
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
  const esmm_status status = esmm_weights_save(ctx, w, path);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  signal(SIGXFSZ, handler);
  expect_status(ctx, "file size limit", status, ESMM_ERR_IO);
  expect_text(ctx, strerror(EFBIG));
  expect_old_content(path);

  assert_int_equal(chmod(directory, 0555), 0);
  if (become_nobody())
    expect_save(ctx, w, path, EACCES);
  become_self();
  assert_int_equal(chmod(directory, 0755), 0);
  expect_old_content(path);

  expect_status(ctx, "save at last", esmm_weights_save(ctx, w, path), ESMM_OK);
  esmm_weights_free(load_same(ctx, w, path));
  assert_int_equal(directory_entries(directory), 1);
  assert_int_equal(unlink(path), 0);
  esmm_weights_free(w);
}

static void test_targets_that_are_no_files(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 3, 3, ESMM_F32, ESMM_USE_ANY, 0, 1.0);
  expect_status(ctx, "directory", esmm_weights_save(ctx, w, directory), ESMM_ERR_IO);
  expect_text(ctx, "directory");
  const char *fifo = path_to("fifo");
  assert_int_equal(mkfifo(fifo, 0600), 0);
  expect_status(ctx, "fifo", esmm_weights_save(ctx, w, fifo), ESMM_ERR_IO);
  expect_text(ctx, "not a regular file");
  struct stat st;
  assert_int_equal(stat(fifo, &st), 0);
  assert_true(S_ISFIFO(st.st_mode));
  assert_int_equal(unlink(fifo), 0);
  assert_int_equal(directory_entries(directory), 0);
  esmm_weights_free(w);
}

static mode_t mode_of(const char *path)
{
  struct stat st;
  assert_int_equal(stat(path, &st), 0);
  return st.st_mode & 0777;
}

static void test_modes_and_links(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 3, 3, ESMM_F32, ESMM_USE_ANY, 0, 1.0);
  const char *path = path_to("mode.esmm"), *link = path_to("link.esmm");
  const mode_t before = umask(027);
  expect_status(ctx, "new file", esmm_weights_save(ctx, w, path), ESMM_OK);
  (void)umask(022);
  assert_int_equal(mode_of(path), 0640);
  assert_int_equal(chmod(path, 0600), 0);
  expect_status(ctx, "private file", esmm_weights_save(ctx, w, path), ESMM_OK);
  assert_int_equal(mode_of(path), 0600);
  (void)umask(before);

  write_bytes(path, old_content, sizeof old_content);
  assert_int_equal(symlink("mode.esmm", link), 0);
  expect_status(ctx, "through a link", esmm_weights_save(ctx, w, link), ESMM_OK);
  struct stat st;
  assert_int_equal(lstat(link, &st), 0);
  assert_true(S_ISLNK(st.st_mode));
  esmm_weights_free(load_same(ctx, w, path));
  assert_int_equal(unlink(path), 0);
  expect_status(ctx, "dangling link", esmm_weights_save(ctx, w, link), ESMM_ERR_IO);
  assert_int_equal(unlink(link), 0);
  assert_int_equal(directory_entries(directory), 0);
  esmm_weights_free(w);
}

static void test_bare_file_name(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 5, 4, ESMM_F16, ESMM_USE_DECODE, 0, 1.0);
  char here[4096];
  assert_non_null(getcwd(here, sizeof here));
  assert_int_equal(chdir(directory), 0);
  expect_status(ctx, "save here", esmm_weights_save(ctx, w, "bare.esmm"), ESMM_OK);
  esmm_weights_free(load_same(ctx, w, "bare.esmm"));
  assert_int_equal(unlink("bare.esmm"), 0);
  assert_int_equal(chdir(here), 0);
  esmm_weights_free(w);
}

/* ---- memory ---- */

typedef struct meter {
  int64_t live, left; /* allocations not freed; those that still succeed */
  size_t largest;
} meter;

static void *meter_alloc(void *user, size_t bytes, size_t align)
{
  meter *m = user;
  if (m->left-- <= 0)
    return NULL;
  m->live++;
  if (bytes > m->largest)
    m->largest = bytes;
  return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void meter_free(void *user, void *ptr, size_t bytes)
{
  (void)bytes;
  ((meter *)user)->live--;
  free(ptr);
}

static void test_failing_allocations(void **state)
{
  (void)state;
  meter m = {.left = INT64_MAX};
  const esmm_allocator allocator = {meter_alloc, meter_free, &m};
  const esmm_ctx_opts opts = {.size = sizeof opts, .threads = 1, .no_tuning_cache = 1, .allocator = &allocator};
  esmm_ctx *ctx = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  size_t size;
  unsigned char *bytes = example(ctx, ESMM_USE_ANY, 0, &size);
  const int64_t before = m.live;
  int64_t allowed = 0;
  for (;; allowed++) {
    esmm_weights *loaded = NULL;
    m.left = allowed;
    const esmm_status status = esmm_weights_parse(ctx, "test", bytes, size, &loaded);
    if (status == ESMM_OK) {
      esmm_weights_free(loaded);
      break;
    }
    expect_status(ctx, "out of memory", status, ESMM_ERR_MEMORY);
    assert_null(loaded);
    assert_int_equal(m.live, before);
  }
  assert_true(allowed >= 6); /* the object, bits, alive, before, panel_at, panels, rows */
  assert_int_equal(m.live, before);

  /* A small file that claims to be large must not get the memory it claims. */
  m.left = INT64_MAX;
  m.largest = 0;
  esmm_file_header h;
  memcpy(&h, bytes, sizeof h);
  h.k = h.n = 1 << 20;
  h.panels = (1 << 20) / 32;
  h.words = (1 << 20) / 64;
  h.rows_ld = 1 << 20;
  memcpy(bytes, &h, sizeof h);
  set_checksums(bytes, size);
  esmm_weights *loaded = NULL;
  assert_int_equal(esmm_weights_parse(ctx, "test", bytes, size, &loaded), ESMM_ERR_FORMAT);
  assert_int_equal(m.largest, 0);
  free(bytes);
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
}

static int first_fd;

static int lowest_free_fd(void)
{
  const int fd = dup(STDOUT_FILENO);
  close(fd);
  return fd;
}

static int set_up(void **state)
{
  const char *base = getenv("TMPDIR");
  th_clean_environment();
  (void)snprintf(directory, sizeof directory, "%s/esmm-weights-XXXXXX", base && *base ? base : "/tmp");
  *state = th_ctx(2);
  first_fd = lowest_free_fd();
  return mkdtemp(directory) ? chmod(directory, 0755) : -1;
}

static int tear_down(void **state)
{
  esmm_ctx_free(*state);
  return rmdir(directory) != 0 || lowest_free_fd() != first_fd; /* a test left a file behind, or open */
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trips),
      cmocka_unit_test(test_round_trip_of_chunks),
      cmocka_unit_test(test_interrupted_and_short_transfers),
      cmocka_unit_test(test_format_is_pinned),
      cmocka_unit_test(test_checksum_in_parts),
      cmocka_unit_test(test_every_flipped_bit_is_found),
      cmocka_unit_test(test_every_truncation_is_found),
      cmocka_unit_test(test_truncated_file_on_disk),
      cmocka_unit_test(test_forgeries_are_refused),
      cmocka_unit_test(test_panels_of_wrong_size_are_refused),
      cmocka_unit_test(test_strange_files),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_failed_saves_keep_the_old_file),
      cmocka_unit_test(test_targets_that_are_no_files),
      cmocka_unit_test(test_modes_and_links),
      cmocka_unit_test(test_bare_file_name),
      cmocka_unit_test(test_failing_allocations),
  };
  return cmocka_run_group_tests_name("weights_file", tests, set_up, tear_down);
}
