/*
 * test_weights_file.c: prepared weights to a file and back.
 *
 * What comes back must multiply to the same bits; what is no such file must be refused with its own status; and a save
 * that fails for whatever reason must leave the old file as it was and nothing beside it. test_weights_damage.c damages
 * files.
 *
 * The program puts functions of its own before libc's pread, pwrite, fsync and rename, so that short transfers,
 * interruptions and a failing disk can be had on demand.
 */
#include "weights_files.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* ---- system calls that misbehave on demand ---- */

static struct {
  bool ragged;     /* transfers of at most 7 bytes, every other one interrupted first */
  int fail_fsync;  /* errno of the next fsync, 0: none */
  int fail_rename; /* of the next rename */
  int fail_write;  /* of the pwrite after writes_left more */
  int writes_left;
  bool killed;   /* there instead: the process is */
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
    if (fault.killed)
      (void)kill(getpid(), SIGKILL);
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

static void expect_same_form(const esmm_weights *x, const esmm_weights *y)
{
  const esmm_form_bytes bytes = esmm_form_sizes(x);
  assert_int_equal(x->format, y->format);
  if (x->format == ESMM_FORMAT_BSR) {
    assert_int_equal(x->bsr.block_rows, y->bsr.block_rows);
    assert_int_equal(x->bsr.block_cols, y->bsr.block_cols);
    assert_int_equal(x->bsr.blocks, y->bsr.blocks);
    assert_memory_equal(x->bsr.start, y->bsr.start, bytes.start);
    assert_memory_equal(x->bsr.at, y->bsr.at, bytes.at);
    assert_memory_equal(x->bsr.values, y->bsr.values, bytes.values);
  } else if (x->format == ESMM_FORMAT_NM) {
    assert_int_equal(x->nm.keep, y->nm.keep);
    assert_int_equal(x->nm.group, y->nm.group);
    assert_int_equal(x->nm.group_cols, y->nm.group_cols);
    assert_memory_equal(x->nm.index, y->nm.index, bytes.index);
    assert_memory_equal(x->nm.values, y->nm.values, bytes.values);
  }
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
  assert_memory_equal(x->alive, y->alive, (size_t)(x->n > 0 ? x->k : 0) * sizeof *x->alive);
  expect_same_form(x, y);
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

static void test_round_trips_of_formats(void **state)
{
  static const int64_t shapes[][2] = {{0, 0}, {0, 5}, {7, 0}, {1, 1}, {64, 32}, {63, 31}, {65, 33}, {130, 97}};
  static const esmm_prepare_opts formats[] = {
      {.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 32, .format.block_cols = 32},
      {.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 1, .format.block_cols = 1, .use = ESMM_USE_LARGE_M},
      {.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 256, .format.block_cols = 5},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 2, .format.group = 4},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 8, .format.group = 32, .use = ESMM_USE_DECODE},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 1, .format.group = 1},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 3, .format.group = 7, .format.group_cols = 20},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 4, .format.group = 8, .format.group_cols = 16},
  };
  esmm_ctx *ctx = *state;
  const char *path = path_to("formats.esmm");
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
      for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
        esmm_weights *made = make_format(ctx, shapes[s][0], shapes[s][1], (esmm_dtype)dtype, formats[i]);
        expect_status(ctx, "save", esmm_weights_save(ctx, made, path), ESMM_OK);
        esmm_weights *loaded = load_same(ctx, made, path);
        expect_same_product(ctx, made, loaded, 5, "auto");
        expect_same_product(ctx, made, loaded, 5, "ref");
        esmm_weights_free(made);
        esmm_weights_free(loaded);
      }
  assert_int_equal(unlink(path), 0);
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
  unsigned char *bytes = example(*state, 'A', &size);
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

/* Where files need no names: those of /tmp have none on all systems that this is tested on. */
static void test_killed_saves_leave_nothing(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *w = make_weights(ctx, 200, 100, ESMM_F32, ESMM_USE_ANY, 0, 0.5);
  const char *path = path_to("killed.esmm");
  const int nameless = open(directory, O_WRONLY | O_TMPFILE, 0600);
  if (nameless < 0)
    skip();
  assert_int_equal(close(nameless), 0);
  write_bytes(path, old_content, sizeof old_content);
  const int entries = directory_entries(directory);
  for (int writes = 0; writes < 6; writes++) {
    int status;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      fault.fail_write = EIO;
      fault.killed = true;
      fault.writes_left = writes;
      (void)esmm_weights_save(ctx, w, path);
      _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(directory_entries(directory), entries);
    expect_old_content(path);
  }
  assert_int_equal(unlink(path), 0);
  esmm_weights_free(w);
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

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trips),
      cmocka_unit_test(test_round_trips_of_formats),
      cmocka_unit_test(test_round_trip_of_chunks),
      cmocka_unit_test(test_interrupted_and_short_transfers),
      cmocka_unit_test(test_truncated_file_on_disk),
      cmocka_unit_test(test_strange_files),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_failed_saves_keep_the_old_file),
      cmocka_unit_test(test_killed_saves_leave_nothing),
      cmocka_unit_test(test_targets_that_are_no_files),
      cmocka_unit_test(test_modes_and_links),
      cmocka_unit_test(test_bare_file_name),
  };
  return cmocka_run_group_tests_name("weights_file", tests, set_up, tear_down);
}
