/*
 * test_npy.c: the readers and the writer of io/.
 *
 * Files are laid down byte by byte here, so that reader and writer cannot agree on a mistake: what the reader is given
 * never comes from the writer, and what the writer gives is compared with bytes as NumPy writes them.
 */
#include "../io/npy.h"
#include "scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char error[IO_ERROR_BYTES];

static size_t get_file(const char *path, unsigned char *bytes, size_t room)
{
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  size_t n = fread(bytes, 1, room, f);
  fclose(f);
  return n;
}

/* A .npy of the given version: magic, length, dictionary as given, data. Returns its size. */
static size_t make_npy(unsigned char *out, int major, const char *dictionary, const void *data, size_t data_bytes)
{
  size_t length = strlen(dictionary), at = 8;
  memcpy(out, "\x93NUMPY", 6);
  out[6] = (unsigned char)major;
  out[7] = 0;
  for (int i = 0; i < (major == 1 ? 2 : 4); i++)
    out[at++] = (unsigned char)(length >> (8 * i) & 0xff);
  memcpy(out + at, dictionary, length);
  at += length;
  if (data_bytes > 0)
    memcpy(out + at, data, data_bytes);
  return at + data_bytes;
}

static void assert_rejected(int result, const io_matrix *m, const char *name, const char *part)
{
  assert_int_equal(result, -1);
  assert_null(m->memory);
  assert_null(m->m.data);
  assert_true(m->m.rows == 0 && m->m.cols == 0 && m->bytes == 0);
  if (strncmp(error, name, strlen(name)) != 0 || !strstr(error, part))
    fail_msg("'%s' should start with '%s' and say '%s'", error, name, part);
}

/* 2 x 3: 1, 2, -3 / 0, 0.5, 65504 */
static const unsigned char f4_le[] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0, 0,    0x40, 0xc0,
                                      0, 0, 0,    0,    0, 0, 0, 0x3f, 0, 0xe0, 0x7f, 0x47};
static const unsigned char f4_be[] = {0x3f, 0x80, 0, 0, 0x40, 0, 0, 0, 0xc0, 0x40, 0,    0,
                                      0,    0,    0, 0, 0x3f, 0, 0, 0, 0x47, 0x7f, 0xe0, 0};
static const unsigned char f2_le[] = {0, 0x3c, 0, 0x40, 0, 0xc2, 0, 0, 0, 0x38, 0xff, 0x7b};
static const unsigned char f2_be[] = {0x3c, 0, 0x40, 0, 0xc2, 0, 0, 0, 0x38, 0, 0x7b, 0xff};
static const unsigned char f8_le[] = {0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0, 0, 0, 0, 0, 0,    0,    0x40,
                                      0, 0, 0, 0, 0, 0, 0x08, 0xc0, 0, 0, 0, 0, 0, 0,    0,    0,
                                      0, 0, 0, 0, 0, 0, 0xe0, 0x3f, 0, 0, 0, 0, 0, 0xfc, 0xef, 0x40};
static const unsigned char f8_be[] = {0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x40, 0,    0,    0, 0, 0, 0, 0,
                                      0xc0, 0x08, 0, 0, 0, 0, 0, 0, 0,    0,    0,    0, 0, 0, 0, 0,
                                      0x3f, 0xe0, 0, 0, 0, 0, 0, 0, 0x40, 0xef, 0xfc, 0, 0, 0, 0, 0};
static const float six[6] = {1, 2, -3, 0, 0.5f, 65504};
static const uint16_t six_f16[6] = {0x3c00, 0x4000, 0xc200, 0, 0x3800, 0x7bff};

#define HEAD(descr, fortran, shape) "{'descr': '" descr "', 'fortran_order': " fortran ", 'shape': " shape ", }    \n"

/* Element (row, col) of the file's 2 x 3 matrix, wherever the order put it. */
static void assert_six(const io_matrix *m, bool fortran)
{
  assert_int_equal(m->m.rows, 2);
  assert_int_equal(m->m.cols, 3);
  assert_int_equal(m->m.order, fortran ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR);
  assert_int_equal(m->m.ld, fortran ? 2 : 3);
  assert_int_equal((uintptr_t)m->m.data % 16, 0);
  if (m->m.dtype == ESMM_F16)
    assert_memory_equal(m->m.data, six_f16, sizeof six_f16);
  else
    assert_memory_equal(m->m.data, six, sizeof six);
}

static void test_reads_every_dtype_order_and_version(void **state)
{
  (void)state;
  static const struct {
    const char *c_order, *fortran;
    const unsigned char *data;
    size_t bytes;
    esmm_dtype dtype;
  } cases[] = {
      {HEAD("<f4", "False", "(2, 3)"), HEAD("<f4", "True", "(2, 3)"), f4_le, sizeof f4_le, ESMM_F32},
      {HEAD(">f4", "False", "(2, 3)"), HEAD(">f4", "True", "(2, 3)"), f4_be, sizeof f4_be, ESMM_F32},
      {HEAD("<f2", "False", "(2, 3)"), HEAD("<f2", "True", "(2, 3)"), f2_le, sizeof f2_le, ESMM_F16},
      {HEAD(">f2", "False", "(2, 3)"), HEAD(">f2", "True", "(2, 3)"), f2_be, sizeof f2_be, ESMM_F16},
      {HEAD("<f8", "False", "(2, 3)"), HEAD("<f8", "True", "(2, 3)"), f8_le, sizeof f8_le, ESMM_F32},
      {HEAD(">f8", "False", "(2, 3)"), HEAD(">f8", "True", "(2, 3)"), f8_be, sizeof f8_be, ESMM_F32},
  };
  unsigned char file[512];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int major = 1; major <= 3; major++)
      for (int fortran = 0; fortran < 2; fortran++) {
        io_matrix parsed, read;
        size_t size =
            make_npy(file, major, fortran ? cases[i].fortran : cases[i].c_order, cases[i].data, cases[i].bytes);
        assert_int_equal(io_npy_parse(file, size, "x", &parsed, error, sizeof error), 0);
        assert_int_equal(parsed.m.dtype, cases[i].dtype);
        assert_six(&parsed, fortran);
        put_file(in_dir("in.npy"), file, size);
        assert_int_equal(io_npy_read(in_dir("in.npy"), &read, error, sizeof error), 0);
        assert_int_equal(read.m.dtype, cases[i].dtype);
        assert_six(&read, fortran);
        io_matrix_free(&parsed);
        io_matrix_free(&read);
        assert_null(read.memory);
      }
}

static void test_one_dimension_is_a_row(void **state)
{
  (void)state;
  static const char *const heads[] = {HEAD("<f4", "False", "(6,)"), HEAD("<f4", "True", "(6,)")};
  unsigned char file[512];
  for (int i = 0; i < 2; i++) {
    io_matrix m;
    size_t size = make_npy(file, 1, heads[i], f4_le, sizeof f4_le);
    assert_int_equal(io_npy_parse(file, size, "x", &m, error, sizeof error), 0);
    assert_int_equal(m.m.rows, 1);
    assert_int_equal(m.m.cols, 6);
    assert_int_equal(m.m.order, ESMM_ROW_MAJOR);
    assert_int_equal(m.m.ld, 6);
    assert_memory_equal(m.m.data, six, sizeof six);
    io_matrix_free(&m);
  }
}

static void test_accepts_headers_that_others_write(void **state)
{
  (void)state;
  static const char *const heads[] = {
      "{\"shape\": (2, 3), \"fortran_order\": False, \"descr\": \"<f4\"}",
      "{'fortran_order':False,'descr':'<f4','shape':(2,3)}\n",
      "  { 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , } \t\r\n",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
  };
  unsigned char file[512];
  for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
    io_matrix m;
    size_t size = make_npy(file, 1, heads[i], f4_le, sizeof f4_le);
    if (io_npy_parse(file, size, "x", &m, error, sizeof error) != 0)
      fail_msg("%s refused: %s", heads[i], error);
    assert_six(&m, false);
    io_matrix_free(&m);
  }
}

static void test_empty_matrices(void **state)
{
  (void)state;
  static const struct {
    const char *head;
    int64_t rows, cols;
  } cases[] = {{HEAD("<f4", "False", "(0, 3)"), 0, 3},
               {HEAD("<f2", "True", "(4, 0)"), 4, 0},
               {HEAD("<f8", "False", "(0,)"), 1, 0},
               {HEAD("<f4", "False", "(0, 9223372036854775807)"), 0, INT64_MAX}};
  unsigned char file[512];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    io_matrix m;
    size_t size = make_npy(file, 1, cases[i].head, NULL, 0);
    assert_int_equal(io_npy_parse(file, size, "x", &m, error, sizeof error), 0);
    assert_int_equal(m.m.rows, cases[i].rows);
    assert_int_equal(m.m.cols, cases[i].cols);
    assert_non_null(m.memory);
    io_matrix_free(&m);
  }
}

static void test_float64_keeps_inf_and_nan_and_refuses_overflow(void **state)
{
  (void)state;
  double good[4] = {INFINITY, -INFINITY, NAN, 1e-300}, bad[4] = {1, 2, -1e39, 4};
  unsigned char file[512];
  io_matrix m;
  size_t size = make_npy(file, 1, HEAD("<f8", "False", "(2, 2)"), good, sizeof good);
  assert_int_equal(io_npy_parse(file, size, "x", &m, error, sizeof error), 0);
  const float *f = m.m.data;
  assert_true(isinf(f[0]) && f[0] > 0 && isinf(f[1]) && f[1] < 0 && isnan(f[2]) && f[3] == 0);
  io_matrix_free(&m);
  size = make_npy(file, 1, HEAD("<f8", "False", "(2, 2)"), bad, sizeof bad);
  assert_rejected(io_npy_parse(file, size, "x", &m, error, sizeof error), &m, "x: ", "element 2 is -1e+39");
}

static void test_damaged_headers_are_named(void **state)
{
  (void)state;
  static const struct {
    const char *head, *says;
  } cases[] = {
      {"", "header ends where {"},
      {"[", "has '[' at character 0, where {"},
      {"\x1b[31m", "byte 0x1b"},
      {"{", "a quoted key"},
      {"{}", "lacks field 'descr'"},
      {"{'descr': '<f4', 'shape': (2, 3)}", "lacks field 'fortran_order'"},
      {"{'descr': '<f4', 'fortran_order': False}", "lacks field 'shape'"},
      {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", "'descr' is there twice"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}", "unknown field 'x'"},
      {"{'descr': '<f4' 'fortran_order': False, 'shape': (2, 3)}", "a comma or }"},
      {"{'descr': '<f4',, 'fortran_order': False, 'shape': (2, 3)}", "a quoted key"},
      {"{'descr' '<f4', 'fortran_order': False, 'shape': (2, 3)}", "a colon"},
      {"{'descr': '<f4, 'fortran_order': False, 'shape': (2, 3)}", "'descr' is '<f4, '"},
      {"{'descr': '<f4", "a closing quote"},
      {"{'descr': '<f\\x34', 'fortran_order': False, 'shape': (2, 3)}", "a plain character"},
      {"{'descr': '<f4\x07', 'fortran_order': False, 'shape': (2, 3)}", "byte 0x07"},
      {"{'a key that is much longer than any': 1}", "a string longer than 23"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} x", "nothing more"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", "ends where a comma or }"},
      {HEAD("<i4", "False", "(2, 3)"), "'descr' is '<i4'"},
      {HEAD("|b1", "False", "(2, 3)"), "'descr' is '|b1'"},
      {HEAD("<f4 ", "False", "(2, 3)"), "'descr' is '<f4 '"},
      {HEAD("f4", "False", "(2, 3)"), "'descr' is 'f4'"},
      {HEAD("<f16", "False", "(2, 3)"), "'descr' is '<f16'"},
      {HEAD("<c8", "False", "(2, 3)"), "'descr' is '<c8'"},
      {HEAD("|V2", "False", "(2, 3)"), "'descr' is '|V2'"},
      {HEAD("", "False", "(2, 3)"), "'descr' is ''"},
      {"{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (2, 3)}", "'descr' is a list"},
      {"{'descr': 4, 'fortran_order': False, 'shape': (2, 3)}", "the dtype's string"},
      {HEAD("<f4", "false", "(2, 3)"), "field 'fortran_order'"},
      {HEAD("<f4", "0", "(2, 3)"), "field 'fortran_order'"},
      {HEAD("<f4", "Falsehood", "(2, 3)"), "a comma or }"},
      {HEAD("<f4", "False", "()"), "'shape' has 0 dimensions"},
      {HEAD("<f4", "False", "(1, 2, 3)"), "'shape' has 3 dimensions"},
      {HEAD("<f4", "False", "(6)"), "not a tuple"},
      {HEAD("<f4", "False", "[2, 3]"), "the ( of field 'shape'"},
      {HEAD("<f4", "False", "(2 3)"), "a comma or )"},
      {HEAD("<f4", "False", "(-2, 3)"), "a number of field 'shape'"},
      {HEAD("<f4", "False", "(2.0, 3)"), "a comma or )"},
      {HEAD("<f4", "False", "(2, x)"), "a number of field 'shape'"},
      {HEAD("<f4", "False", "(9223372036854775808, 3)"), "a number larger than 9223372036854775807"},
      {HEAD("<f4", "False", "(99999999999999999999, 3)"), "a number larger than 9223372036854775807"},
      {HEAD("<f4", "False", "(9223372036854775807, 9223372036854775807)"), "too large"},
      {HEAD("<f4", "False", "(4611686018427387904, 4)"), "too large"}, /* 2^64 elements: 0 after wrapping */
      {HEAD("<f4", "False", "(4611686018427387904, 1)"), "too large"}, /* 2^64 bytes */
      {HEAD("<f4", "False", "(2305843009213693952, 1)"), "too large"}, /* 2^63 bytes */
      {HEAD("<f4", "False", "(1000000, 1000000)"), "needs 4000000000000 bytes of data, 24 are there"},
      {HEAD("<f4", "False", "(2, 4)"), "needs 32 bytes of data, 24 are there"},
      {HEAD("<f4", "False", "(2, 2)"), "8 bytes too many after the data of shape (2, 2)"},
      {HEAD("<f2", "False", "(2, 3)"), "12 bytes too many"},
  };
  unsigned char file[512];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    io_matrix m;
    size_t size = make_npy(file, 1, cases[i].head, f4_le, sizeof f4_le);
    assert_rejected(io_npy_parse(file, size, "bad.npy", &m, error, sizeof error), &m, "bad.npy: ", cases[i].says);
    put_file(in_dir("bad.npy"), file, size);
    assert_rejected(io_npy_read(in_dir("bad.npy"), &m, error, sizeof error), &m, in_dir("bad.npy"), cases[i].says);
  }
}

static void test_wrong_magic_version_and_length(void **state)
{
  (void)state;
  unsigned char file[512];
  io_matrix m;
  size_t size = make_npy(file, 1, HEAD("<f4", "False", "(2, 3)"), f4_le, sizeof f4_le);
  static const struct {
    size_t at;
    unsigned char value;
    const char *says;
  } cases[] = {{0, 0x92, "is not a .npy file"},
               {5, 'y', "is not a .npy file"},
               {6, 0, "version 0.0"},
               {6, 4, "version 4.0"},
               {7, 1, "version 1.1"},
               {8, 0, "header ends"},
               {9, 0xff, "truncated: the .npy header should have"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    unsigned char kept = file[cases[i].at];
    file[cases[i].at] = cases[i].value;
    assert_rejected(io_npy_parse(file, size, "x", &m, error, sizeof error), &m, "x: ", cases[i].says);
    file[cases[i].at] = kept;
  }
  size = make_npy(file, 2, HEAD("<f4", "False", "(2, 3)"), f4_le, sizeof f4_le);
  file[11] = 0xff; /* a header of four gigabytes */
  assert_rejected(io_npy_parse(file, size, "x", &m, error, sizeof error), &m, "x: ", "'header length' is 42781");
}

static void test_every_truncation_and_extension_is_rejected(void **state)
{
  (void)state;
  unsigned char file[512] = {0};
  for (int major = 1; major <= 3; major++) {
    size_t size = make_npy(file, major, HEAD("<f4", "False", "(2, 3)"), f4_le, sizeof f4_le);
    for (size_t cut = 0; cut <= size + 3; cut++) {
      io_matrix m;
      unsigned char *exact = malloc(cut + 1); /* of the right size, so that a sanitizer sees a step beyond it */
      assert_non_null(exact);
      memcpy(exact, file, cut);
      exact = realloc(exact, cut ? cut : 1);
      int result = io_npy_parse(exact, cut, "x", &m, error, sizeof error);
      assert_int_equal(result, cut == size ? 0 : -1);
      io_matrix_free(&m);
      put_file(in_dir("cut.npy"), exact, cut);
      result = io_npy_read(in_dir("cut.npy"), &m, error, sizeof error);
      assert_int_equal(result, cut == size ? 0 : -1);
      io_matrix_free(&m);
      free(exact);
    }
  }
}

/* Any one byte changed: refused, or a matrix that still fits its data. */
static void test_every_changed_byte_is_survived(void **state)
{
  (void)state;
  unsigned char file[512];
  size_t size = make_npy(file, 1, HEAD("<f4", "False", "(2, 3)"), f4_le, sizeof f4_le);
  for (size_t at = 0; at < size; at++)
    for (int value = 0; value < 256; value++) {
      unsigned char kept = file[at];
      io_matrix m;
      file[at] = (unsigned char)value;
      if (io_npy_parse(file, size, "x", &m, error, sizeof error) == 0)
        assert_int_equal((size_t)(m.m.rows * m.m.cols) * (m.m.dtype == ESMM_F16 ? 2 : 4), sizeof f4_le);
      else
        assert_memory_equal(error, "x: ", 3);
      io_matrix_free(&m);
      file[at] = kept;
    }
}

static void test_error_text_is_cut_to_its_room(void **state)
{
  (void)state;
  io_matrix m;
  char small[8] = "ABCDEFG";
  assert_int_equal(io_npy_parse((const unsigned char *)"no", 2, "a long name", &m, small, 5), -1);
  assert_string_equal(small, "a lo");
  assert_int_equal(small[5], 'F');
  assert_int_equal(io_npy_parse((const unsigned char *)"no", 2, "x", &m, NULL, 0), -1);
}

static void test_files_that_cannot_be_read(void **state)
{
  (void)state;
  io_matrix m;
  const char *path = in_dir("none.npy");
  assert_rejected(io_npy_read(path, &m, error, sizeof error), &m, path, strerror(ENOENT));
  assert_rejected(io_npy_read(dir, &m, error, sizeof error), &m, dir, "is a directory");
  path = in_dir("other");
  put_file(path, "\x1f\x8b\x08 a gzip file", 16);
  assert_rejected(io_npy_read(path, &m, error, sizeof error), &m, path, "gunzip it first");
  assert_rejected(io_matrix_read(path, 0, 0, &m, error, sizeof error), &m, path, "gunzip it first");
  assert_rejected(io_matrix_read(path, 2, 3, &m, error, sizeof error), &m, path, "gunzip it first");
  put_file(path, "PK\3\4 an archive", 15);
  assert_rejected(io_npy_read(path, &m, error, sizeof error), &m, path, "unzip it first");
  put_file(path, "", 0);
  assert_rejected(io_npy_read(path, &m, error, sizeof error), &m, path, "is not a .npy file");
}

/* A child that writes bytes into a fifo at path, in small pieces. */
static pid_t feed_pipe(const char *path, const unsigned char *bytes, size_t size)
{
  assert_int_equal(mkfifo(path, 0600), 0);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child != 0)
    return child;
  int fd = open(path, O_WRONLY);
  for (size_t done = 0; done < size;) {
    ssize_t n = write(fd, bytes + done, size - done < 1000 ? size - done : 1000);
    if (n <= 0)
      _exit(1);
    done += (size_t)n;
  }
  _exit(0);
}

static void test_reads_from_a_pipe(void **state)
{
  (void)state;
  const char *path = in_dir("pipe");
  size_t rows = 300, cols = 1000, bytes = rows * cols * 4; /* many times what a pipe holds */
  unsigned char *file = malloc(bytes + 512);
  float *data = malloc(bytes);
  assert_non_null(file);
  assert_non_null(data);
  for (size_t i = 0; i < rows * cols; i++)
    data[i] = (float)i;
  size_t size = make_npy(file, 1, HEAD("<f4", "False", "(300, 1000)"), data, bytes);
  io_matrix m;
  pid_t child = feed_pipe(path, file, size);
  assert_int_equal(io_matrix_read(path, 0, 0, &m, error, sizeof error), 0);
  assert_memory_equal(m.m.data, data, bytes);
  io_matrix_free(&m);
  assert_int_equal(waitpid(child, NULL, 0), child);
  unlink(path);

  child = feed_pipe(path, f4_le, sizeof f4_le);
  assert_rejected(io_raw_read(path, 2, 4, &m, error, sizeof error), &m, path,
                  "has 24 bytes, raw float32 of 2 x 4 has 32");
  assert_int_equal(waitpid(child, NULL, 0), child);
  unlink(path);
  free(file);
  free(data);
}

static void test_raw(void **state)
{
  (void)state;
  io_matrix m;
  const char *path = in_dir("raw.bin");
  put_file(path, f4_le, sizeof f4_le);
  assert_int_equal(io_raw_read(path, 2, 3, &m, error, sizeof error), 0);
  assert_int_equal(m.m.dtype, ESMM_F32);
  assert_six(&m, false);
  io_matrix_free(&m);
  assert_rejected(io_raw_read(path, 2, 4, &m, error, sizeof error), &m, path,
                  "has 24 bytes, raw float32 of 2 x 4 has 32");
  assert_rejected(io_raw_read(path, 5, 1, &m, error, sizeof error), &m, path,
                  "has 24 bytes, raw float32 of 5 x 1 has 20");
  assert_rejected(io_raw_read(path, 0, 3, &m, error, sizeof error), &m, path, "raw float32 of 0 x 3 has 0");
  assert_rejected(io_raw_read(path, -2, -3, &m, error, sizeof error), &m, path, "-2 x -3");
  assert_rejected(io_raw_read(path, INT64_MAX, 8, &m, error, sizeof error), &m, path, "too large");
  put_file(path, "", 0);
  assert_int_equal(io_raw_read(path, 0, 3, &m, error, sizeof error), 0);
  io_matrix_free(&m);
}

static void test_matrix_read_tells_the_kinds_apart(void **state)
{
  (void)state;
  io_matrix m;
  unsigned char file[512];
  const char *npy = in_dir("m.npy"), *raw = in_dir("m.raw");
  put_file(npy, file, make_npy(file, 1, HEAD("<f2", "False", "(2, 3)"), f2_le, sizeof f2_le));
  put_file(raw, f4_le, sizeof f4_le);

  assert_int_equal(io_matrix_read(npy, 0, 0, &m, error, sizeof error), 0);
  assert_six(&m, false);
  io_matrix_free(&m);
  assert_int_equal(io_matrix_read(npy, 2, 3, &m, error, sizeof error), 0);
  io_matrix_free(&m);
  assert_rejected(io_matrix_read(npy, 3, 2, &m, error, sizeof error), &m, npy, "is 2 x 3, not 3 x 2 as it should be");
  assert_rejected(io_matrix_read(npy, 0, 3, &m, error, sizeof error), &m, npy, "not 0 x 3");

  assert_int_equal(io_matrix_read(raw, 2, 3, &m, error, sizeof error), 0);
  assert_six(&m, false);
  io_matrix_free(&m);
  assert_rejected(io_matrix_read(raw, 0, 0, &m, error, sizeof error), &m, raw, "give its dimensions");
  assert_rejected(io_matrix_read(raw, 2, 2, &m, error, sizeof error), &m, raw, "has 24 bytes");

  unsigned char chance[8] = {0x1f, 0x8b, 0x80, 0x3f, 0, 0, 0, 0}; /* numbers that start like a gzip file */
  put_file(raw, chance, sizeof chance);
  assert_int_equal(io_matrix_read(raw, 1, 2, &m, error, sizeof error), 0);
  assert_memory_equal(m.m.data, chance, sizeof chance);
  io_matrix_free(&m);
}

/* What numpy.save writes for the same matrix, but for the spaces, which fill up to 128 bytes here as there. */
static size_t numpy_file(unsigned char *out, const char *dictionary, const void *data, size_t bytes)
{
  char padded[119];
  memset(padded, ' ', sizeof padded);
  memcpy(padded, dictionary, strlen(dictionary));
  padded[117] = '\n';
  padded[118] = '\0';
  return make_npy(out, 1, padded, data, bytes);
}

static void assert_written(const esmm_matrix *m, const unsigned char *want, size_t size)
{
  unsigned char got[1024];
  const char *path = in_dir("out.npy");
  if (io_npy_write(path, m, error, sizeof error) != 0)
    fail_msg("%s", error);
  assert_int_equal(get_file(path, got, sizeof got), size);
  assert_memory_equal(got, want, size);
}

static void test_writes_what_numpy_writes(void **state)
{
  (void)state;
  unsigned char want[512];
  float padded[2 * 5] = {1, 2, -3, 99, 99, 0, 0.5f, 65504, 99, 99};
  float columns[3 * 4] = {1, 2, 99, 99, -3, 0, 99, 99, 0.5f, 65504, 99, 99};   /* the same bytes once packed */
  uint16_t halves[6], brains[6] = {0x3f80, 0x4000, 0xc040, 0, 0x3f00, 0x4780}; /* bf16: 65536 for 65504 */
  memcpy(halves, six_f16, sizeof halves);

  esmm_matrix m = {.data = padded, .rows = 2, .cols = 3, .ld = 5};
  size_t size = numpy_file(want, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", f4_le, sizeof f4_le);
  assert_written(&m, want, size);
  m = (esmm_matrix){.data = columns, .rows = 2, .cols = 3, .ld = 4, .order = ESMM_COL_MAJOR};
  size = numpy_file(want, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", f4_le, sizeof f4_le);
  assert_written(&m, want, size);
  m = (esmm_matrix){.data = halves, .rows = 2, .cols = 3, .dtype = ESMM_F16};
  size = numpy_file(want, "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }", f2_le, sizeof f2_le);
  assert_written(&m, want, size);
  m = (esmm_matrix){.data = brains, .rows = 3, .cols = 2, .dtype = ESMM_BF16};
  unsigned char wide[sizeof f4_le];
  memcpy(wide, f4_le, sizeof wide);
  memcpy(wide + 20, "\0\0\x80\x47", 4);
  size = numpy_file(want, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }", wide, sizeof wide);
  assert_written(&m, want, size);
  m = (esmm_matrix){.data = NULL, .rows = 0, .cols = 7};
  size = numpy_file(want, "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 7), }", NULL, 0);
  assert_written(&m, want, size);
}

/* Longer than the buffer through which bf16 is widened, every value. */
static void test_bf16_round_trip(void **state)
{
  (void)state;
  int64_t rows = 3, cols = 5001;
  uint16_t *brains = malloc((size_t)(rows * cols) * sizeof *brains);
  assert_non_null(brains);
  for (int64_t i = 0; i < rows * cols; i++)
    brains[i] = (uint16_t)(i * 4 + 1);
  esmm_matrix m = {.data = brains, .rows = rows, .cols = cols, .dtype = ESMM_BF16, .order = ESMM_COL_MAJOR};
  io_matrix back;
  assert_int_equal(io_npy_write(in_dir("bf16.npy"), &m, error, sizeof error), 0);
  assert_int_equal(io_npy_read(in_dir("bf16.npy"), &back, error, sizeof error), 0);
  assert_int_equal(back.m.rows, rows);
  assert_int_equal(back.m.order, ESMM_COL_MAJOR);
  const uint32_t *bits = back.m.data;
  for (int64_t i = 0; i < rows * cols; i++)
    assert_int_equal(bits[i], (uint32_t)brains[i] << 16);
  io_matrix_free(&back);
  free(brains);
}

static int files_in(const char *path)
{
  char command[600];
  int count = -1;
  snprintf(command, sizeof command, "ls -A '%s' | wc -l", path);
  FILE *pipe = popen(command, "r");
  assert_non_null(pipe);
  assert_int_equal(fscanf(pipe, "%d", &count), 1);
  pclose(pipe);
  return count;
}

static void assert_still(const char *path, const char *content)
{
  unsigned char got[64] = {0};
  assert_int_equal(get_file(path, got, sizeof got), strlen(content));
  assert_memory_equal(got, content, strlen(content));
}

static void test_a_failed_write_keeps_the_old_file(void **state)
{
  (void)state;
  float *data = calloc(1000000, sizeof *data);
  assert_non_null(data);
  esmm_matrix m = {.data = data, .rows = 1000, .cols = 1000}, bad = {.data = data, .rows = 10, .cols = 10, .ld = 9};
  char sub[128], path[160];
  snprintf(sub, sizeof sub, "%s/sub", dir);
  snprintf(path, sizeof path, "%s/old.npy", sub);
  assert_int_equal(mkdir(sub, 0755), 0);
  put_file(path, "old", 3);

  /* the disk is full: half-way, and only when the last buffer is flushed */
  static const rlim_t limits[] = {100000, 16};
  for (int i = 0; i < 2; i++) {
    struct rlimit before, now;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    now = before;
    now.rlim_cur = limits[i];
    m.rows = i == 0 ? 1000 : 1;
    m.cols = i == 0 ? 1000 : 2;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    int full = io_npy_write(path, &m, error, sizeof error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(full, -1);
    assert_non_null(strstr(error, strerror(EFBIG)));
    assert_still(path, "old");
    assert_int_equal(files_in(sub), 1);
  }

  /* a directory that may not be written: root may write everywhere, so be nobody for a moment */
  bool root = geteuid() == 0;
  assert_int_equal(chmod(sub, 0555), 0);
  assert_int_equal(root ? seteuid(65534) : 0, 0);
  int result = io_npy_write(path, &m, error, sizeof error);
  assert_int_equal(root ? seteuid(0) : 0, 0);
  assert_int_equal(chmod(sub, 0755), 0);
  assert_int_equal(result, -1);
  assert_non_null(strstr(error, strerror(EACCES)));
  assert_still(path, "old");
  assert_int_equal(files_in(sub), 1);

  /* a matrix that is not one */
  assert_int_equal(io_npy_write(path, &bad, error, sizeof error), -1);
  assert_non_null(strstr(error, "10 x 10, ld 9"));
  assert_still(path, "old");
  free(data);
}

static void test_targets_that_cannot_be_written(void **state)
{
  (void)state;
  float one = 1;
  esmm_matrix m = {.data = &one, .rows = 1, .cols = 1};
  const char *path = in_dir("no/such/dir/x.npy");
  assert_int_equal(io_npy_write(path, &m, error, sizeof error), -1);
  assert_memory_equal(error, path, strlen(path));
  assert_non_null(strstr(error, "create its directory first"));
  assert_int_equal(io_npy_write(dir, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "not a regular file"));
  struct stat info;
  path = in_dir("fifo");
  assert_int_equal(mkfifo(path, 0600), 0);
  assert_int_equal(io_npy_write(path, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "not a regular file"));
  assert_int_equal(stat(path, &info), 0);
  assert_true(S_ISFIFO(info.st_mode)); /* and was not replaced */
  assert_int_equal(io_npy_write("", &m, error, sizeof error), -1);
}

static void test_replacing_keeps_mode_and_links(void **state)
{
  (void)state;
  float one = 1;
  esmm_matrix m = {.data = &one, .rows = 1, .cols = 1};
  const char *file = in_dir("real.npy"), *link = in_dir("link.npy");
  struct stat info;
  put_file(file, "old", 3);
  assert_int_equal(chmod(file, 0640), 0);
  assert_int_equal(symlink("real.npy", link), 0);
  assert_int_equal(io_npy_write(link, &m, error, sizeof error), 0);
  assert_int_equal(lstat(link, &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  assert_int_equal(stat(file, &info), 0);
  assert_int_equal(info.st_mode & 0777, 0640);
  assert_int_equal(info.st_size, 132);

  mode_t mask = umask(027);
  assert_int_equal(io_npy_write(in_dir("fresh.npy"), &m, error, sizeof error), 0);
  umask(mask);
  assert_int_equal(stat(in_dir("fresh.npy"), &info), 0);
  assert_int_equal(info.st_mode & 0777, 0640);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_reads_every_dtype_order_and_version),
      cmocka_unit_test(test_one_dimension_is_a_row),
      cmocka_unit_test(test_accepts_headers_that_others_write),
      cmocka_unit_test(test_empty_matrices),
      cmocka_unit_test(test_float64_keeps_inf_and_nan_and_refuses_overflow),
      cmocka_unit_test(test_damaged_headers_are_named),
      cmocka_unit_test(test_wrong_magic_version_and_length),
      cmocka_unit_test(test_every_truncation_and_extension_is_rejected),
      cmocka_unit_test(test_every_changed_byte_is_survived),
      cmocka_unit_test(test_error_text_is_cut_to_its_room),
      cmocka_unit_test(test_files_that_cannot_be_read),
      cmocka_unit_test(test_reads_from_a_pipe),
      cmocka_unit_test(test_raw),
      cmocka_unit_test(test_matrix_read_tells_the_kinds_apart),
      cmocka_unit_test(test_writes_what_numpy_writes),
      cmocka_unit_test(test_bf16_round_trip),
      cmocka_unit_test(test_a_failed_write_keeps_the_old_file),
      cmocka_unit_test(test_targets_that_cannot_be_written),
      cmocka_unit_test(test_replacing_keeps_mode_and_links),
  };
  return cmocka_run_group_tests_name("npy", tests, make_dir, remove_dir);
}
