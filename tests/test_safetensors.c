/*
 * test_safetensors.c: files of tensors that are mapped: safetensors, and .npy and raw files through the same interface.
 *
 * The corpus is made by tests/fuzz/make_corpus.py, which has its own idea of the format.
 */
#include "corpus.h"
#include "scratch.h"

#include <fcntl.h>

static char error[IO_ERROR_BYTES];

static io_tensors *open_good(const char *path)
{
  io_tensors *tensors;
  if (io_tensors_open(path, 0, 0, &tensors, error, sizeof error) != 0)
    fail_msg("%s", error);
  return tensors;
}

/* ---- safetensors ---- */

#if ESMM_JANSSON

static const corpus_case cases[] = {
    {"good", NULL},
    {"empty", NULL},
    {"empty_tensor", NULL},
    {"scalar", NULL},
    {"dtypes", NULL},
    {"f4", NULL},
    {"unaligned", NULL},
    {"overflow_beside_zero", NULL}, /* nothing is there */
    {"many_rows_of_nothing", NULL},
    {"overlap", "tensor 'b': its bytes overlap"},
    {"gap", "4 bytes before tensor 'b' belong to none"},
    {"gap_at_start", "4 bytes before tensor 'a' belong to none"},
    {"trailing", "5 bytes behind the last tensor"},
    {"truncated_data", "tensor 'a': its bytes end at 32, and only 29 are there"},
    {"truncated_header", "truncated: the header should have"},
    {"truncated_length", "truncated: 3 bytes"},
    {"huge_length", "its header would have 1099511627776 bytes"},
    {"huge_shape", "tensor 'a': its shape is too large"},
    {"overflow_to_fit", "tensor 'a': its shape is too large"},
    {"huge_number", "too big integer"},
    {"size_differs", "its shape needs 12 bytes of F32, its offsets hold 8"},
    {"backwards", "runs backwards, from 8 to 0"},
    {"negative_shape", "'shape' has something that is no whole number from 0 up"},
    {"negative_offset", "'data_offsets' is not two whole numbers from 0 up"},
    {"fraction", "'shape' has something that is no whole number"},
    {"half_byte", "not of whole bytes"},
    {"unknown_dtype", "dtype 'F31' is not known"},
    {"wrong_dtype", "'dtype' is not there, or no string"},
    {"wrong_shape", "'shape' is not there, or no list"},
    {"wrong_offsets", "'data_offsets' is not two whole numbers"},
    {"no_offsets", "'data_offsets' is not two whole numbers"},
    {"no_object", "tensor 'a': the header has no object for it"},
    {"metadata_number", "no string under 'a'"},
    {"metadata_list", "'__metadata__' is no object"},
    {"list", "does not start with {"},
    {"many_dimensions", "has 40 dimensions"},
    {"same_name", "duplicate object key"},
    {"control_name", "byte 0x1b as its character 2"},
    {"empty_name", "empty name"},
    {"not_utf8", "unable to decode byte 0xff"},
    {"not_json", "its header is not valid"},
    {"behind_json", "end of file expected"},
    {"deep", "maximum parsing depth"},
};

static void test_corpus(void **state)
{
  (void)state;
  corpus_check("safetensors", cases, sizeof cases / sizeof *cases);
}

static void test_values(void **state)
{
  (void)state;
  static const float want[] = {1, 0, 2, 0, 0, -3};
  static const uint16_t half[] = {0x3c00, 0, 0, 0x4000};
  io_tensors *t = open_good(corpus_path("safetensors", "good.safetensors"));
  esmm_matrix m;
  assert_string_equal(t->kind, "safetensors");
  assert_int_equal(t->count, 2);
  assert_string_equal(t->list[0].name, "b"); /* as they lie in the file */
  assert_string_equal(t->list[1].name, "a");
  assert_int_equal(io_tensors_find(t, "a"), 1);
  assert_int_equal(io_tensors_find(t, "c"), -1);
  assert_null(t->list[0].data);
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_true(m.rows == 2 && m.cols == 3 && m.ld == 3 && m.dtype == ESMM_F32 && m.order == ESMM_ROW_MAJOR);
  assert_memory_equal(m.data, want, sizeof want);
  assert_int_equal(io_tensor_matrix(t, 1, &m, error, sizeof error), 0);
  assert_true(m.rows == 2 && m.cols == 2 && m.dtype == ESMM_F16);
  assert_memory_equal(m.data, half, sizeof half);
  io_tensor_unload(t, 0);
  assert_null(t->list[0].data);
  assert_memory_equal(m.data, half, sizeof half); /* its neighbour stays */
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_memory_equal(m.data, want, sizeof want); /* and it can be loaded again */
  io_tensors_close(t);
}

/* The format does not promise alignment: a copy has it. */
static void test_unaligned(void **state)
{
  (void)state;
  static const float want[] = {1, 2};
  io_tensors *t = open_good(corpus_path("safetensors", "unaligned.safetensors"));
  esmm_matrix m;
  assert_int_not_equal(t->data_at % 4, 0);
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_int_equal((uintptr_t)m.data % sizeof(float), 0);
  assert_memory_equal(m.data, want, sizeof want);
  io_tensors_close(t);
}

static void test_no_matrices(void **state)
{
  (void)state;
  esmm_matrix m;
  io_tensors *t = open_good(corpus_path("safetensors", "scalar.safetensors"));
  assert_int_equal(t->list[0].dims, 0);
  assert_int_equal(t->list[0].bytes, 8);
  assert_int_equal(io_tensor_load(t, 0, error, sizeof error), 0);
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), -1);
  assert_null(m.data);
  assert_non_null(strstr(error, "tensor 'step' (I64, 0 dimensions): a matrix has two dimensions"));
  io_tensors_close(t);
  const io_tensor wide = {.name = "x", .dtype = IO_F64, .dims = 2, .shape = {2, 3}, .stride = {3, 1}};
  assert_non_null(strstr(io_tensor_refusal(&wide), "only F32, BF16 and F16"));
}

static void test_dtypes(void **state)
{
  (void)state;
  for (int i = 0; i < IO_DTYPES; i++) {
    assert_int_equal(io_dtype_find(io_dtype_str((io_dtype)i)), i);
    assert_true(io_dtype_bits((io_dtype)i) >= 4);
  }
  assert_int_equal(io_dtype_find("F31"), IO_DTYPES);
  assert_int_equal(io_dtype_bits(IO_F6_E2M3), 6);
}

/* ---- copies ---- */

static size_t get_file(const char *path, unsigned char *bytes, size_t room)
{
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  size_t n = fread(bytes, 1, room, f);
  fclose(f);
  return n;
}

typedef struct swap {
  size_t index;
  const void *bytes;
  int fails; /* what the callback returns for that tensor */
  size_t calls;
} swap;

static int replace_one(void *user, size_t index, const void **bytes)
{
  swap *s = user;
  assert_int_equal(index, s->calls++);
  if (index != s->index)
    return 0;
  *bytes = s->bytes;
  return s->fails;
}

static void test_copy(void **state)
{
  (void)state;
  unsigned char before[1024], after[1024];
  const float zeros[6] = {0};
  const char *path = corpus_path("safetensors", "good.safetensors"), *copy = in_dir("copy.safetensors");
  io_tensors *t = open_good(path);
  swap s = {.index = 0, .bytes = zeros};
  assert_int_equal(io_safetensors_copy(t, copy, replace_one, &s, error, sizeof error), 0);
  assert_int_equal(s.calls, 2);
  size_t size = get_file(path, before, sizeof before);
  assert_int_equal(get_file(copy, after, sizeof after), size);
  memset(before + t->data_at, 0, sizeof zeros); /* all that may differ */
  assert_memory_equal(before, after, size);

  s = (swap){.index = 1, .bytes = zeros, .fails = 7}; /* what fails in the middle leaves the old file and no other */
  assert_int_equal(io_safetensors_copy(t, copy, replace_one, &s, error, sizeof error), 7);
  assert_int_equal(get_file(copy, before, sizeof before), size);
  assert_memory_equal(before, after, size);
  s = (swap){.index = 9};
  assert_int_equal(io_safetensors_copy(t, in_dir("nowhere/x"), replace_one, &s, error, sizeof error), -1);
  assert_non_null(strstr(error, "create its directory first"));
  assert_int_equal(s.calls, 0);
  if (access("/dev/full", W_OK) == 0) {
    assert_int_equal(io_safetensors_copy(t, "/dev/full", replace_one, &s, error, sizeof error), -1);
    assert_non_null(strstr(error, "not a regular file"));
  }
  io_tensors_close(t);
}

#else

static void test_missing(void **state)
{
  (void)state;
  io_tensors *t;
  assert_int_equal(io_tensors_open(corpus_path("safetensors", "good.safetensors"), 0, 0, &t, error, sizeof error), -1);
  assert_null(t);
  assert_non_null(strstr(error, "built without jansson"));
  assert_non_null(strstr(error, "install libjansson-dev"));
}

#endif

/* ---- the other kinds, through the same interface ---- */

static size_t make_npy(unsigned char *out, const char *dictionary, const void *data, size_t data_bytes)
{
  const size_t length = strlen(dictionary);
  memcpy(out, "\x93NUMPY\1\0", 8);
  out[8] = (unsigned char)length;
  out[9] = 0;
  memcpy(out + 10, dictionary, length);
  memcpy(out + 10 + length, data, data_bytes);
  return 10 + length + data_bytes;
}

static void check_npy(const char *dictionary, const void *data, size_t bytes, esmm_order order, const float *want)
{
  unsigned char file[512];
  const char *path = in_dir("fc1.weight.npy");
  esmm_matrix m;
  put_file(path, file, make_npy(file, dictionary, data, bytes));
  io_tensors *t = open_good(path);
  assert_string_equal(t->kind, "npy");
  assert_int_equal(t->count, 1);
  assert_string_equal(t->list[0].name, "fc1.weight");
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_true(m.rows == 2 && m.cols == 3 && m.dtype == ESMM_F32 && m.order == order);
  assert_int_equal((uintptr_t)m.data % 4, 0);
  for (int64_t i = 0; i < 2; i++)
    for (int64_t j = 0; j < 3; j++)
      assert_true(((const float *)m.data)[order == ESMM_ROW_MAJOR ? i * m.ld + j : j * m.ld + i] == want[i * 3 + j]);
  io_tensors_close(t);
}

static void test_npy(void **state)
{
  (void)state;
  static const float rows[] = {1, 2, 3, 4, 5, 6}, columns[] = {1, 4, 2, 5, 3, 6};
  static const double wide[] = {1, 2, 3, 4, 5, 6};
  unsigned char big[24];
  for (size_t i = 0; i < sizeof big; i++)
    big[i] = ((const unsigned char *)rows)[i / 4 * 4 + 3 - i % 4];
  /* headers of several lengths: the data is aligned in some and not in others */
  check_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", rows, sizeof rows, ESMM_ROW_MAJOR, rows);
  check_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } ", rows, sizeof rows, ESMM_ROW_MAJOR, rows);
  check_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   ", rows, sizeof rows, ESMM_ROW_MAJOR, rows);
  check_npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", columns, sizeof columns, ESMM_COL_MAJOR,
            rows);
  check_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }", wide, sizeof wide, ESMM_ROW_MAJOR, rows);
  check_npy("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }", big, sizeof big, ESMM_ROW_MAJOR, rows);
}

/* What is no matrix is listed all the same. */
static void test_npy_others(void **state)
{
  (void)state;
  static const unsigned char data[48];
  static const struct {
    const char *dictionary;
    size_t bytes;
    io_dtype dtype;
    int dims;
  } others[] = {
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 24, IO_I32, 2},
      {"{'descr': '|b1', 'fortran_order': False, 'shape': (2, 3), }", 6, IO_BOOL, 2},
      {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3, 2), }", 48, IO_F32, 3},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (), }", 4, IO_F32, 0},
      {"{'descr': '<f2', 'fortran_order': True, 'shape': (5,), }", 10, IO_F16, 1},
  };
  unsigned char file[512];
  esmm_matrix m;
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    put_file(in_dir("x.npy"), file, make_npy(file, others[i].dictionary, data, others[i].bytes));
    io_tensors *t = open_good(in_dir("x.npy"));
    assert_int_equal(t->list[0].dtype, others[i].dtype);
    assert_int_equal(t->list[0].dims, others[i].dims);
    assert_int_equal(t->list[0].bytes, others[i].bytes);
    assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), -1);
    assert_int_equal(io_tensor_load(t, 0, error, sizeof error), 0);
    io_tensors_close(t);
  }
  const size_t size = make_npy(file, others[0].dictionary, data, 23);
  put_file(in_dir("x.npy"), file, size);
  io_tensors *t;
  assert_int_equal(io_tensors_open(in_dir("x.npy"), 0, 0, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "truncated: shape (2, 3) needs 24 bytes of data, 23 are there"));
}

static void test_raw(void **state)
{
  (void)state;
  static const float values[] = {1, 2, 3, 4, 5, 6};
  io_tensors *t;
  esmm_matrix m;
  put_file(in_dir("w.f32"), values, sizeof values);
  assert_int_equal(io_tensors_open(in_dir("w.f32"), 3, 2, &t, error, sizeof error), 0);
  assert_string_equal(t->kind, "raw");
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_true(m.rows == 3 && m.cols == 2);
  assert_memory_equal(m.data, values, sizeof values);
  io_tensors_close(t);
  assert_int_equal(io_tensors_open(in_dir("w.f32"), 3, 3, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "has 24 bytes, raw float32 of 3 x 3 has 36"));
  assert_int_equal(io_tensors_open(in_dir("w.f32"), 0, 0, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "give its dimensions"));
  assert_int_equal(io_tensors_open(in_dir("w.f32"), INT64_MAX, 8, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "too large"));
}

static void test_no_files(void **state)
{
  (void)state;
  io_tensors *t;
  assert_int_equal(io_tensors_open(in_dir("nowhere"), 0, 0, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "cannot be opened"));
  assert_int_equal(io_tensors_open(dir, 0, 0, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "is a directory"));
  put_file(in_dir("none"), "", 0);
  assert_int_equal(io_tensors_open(in_dir("none"), 0, 0, &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "is empty, or no regular file"));
  assert_false(io_is_model(in_dir("none")));
  assert_true(io_is_model(corpus_path("safetensors", "good.safetensors")));
  io_tensors_close(NULL);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
#if ESMM_JANSSON
    cmocka_unit_test(test_corpus),
    cmocka_unit_test(test_values),
    cmocka_unit_test(test_unaligned),
    cmocka_unit_test(test_no_matrices),
    cmocka_unit_test(test_dtypes),
    cmocka_unit_test(test_copy),
#else
    cmocka_unit_test(test_missing),
#endif
    cmocka_unit_test(test_npy),
    cmocka_unit_test(test_npy_others),
    cmocka_unit_test(test_raw),
    cmocka_unit_test(test_no_files)
  };
  return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
