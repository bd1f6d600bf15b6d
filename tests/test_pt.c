/*
 * test_pt.c: the .pt reader and its pickle machine. The corpus is made by tests/fuzz/make_corpus.py with Python's own
 * pickler; pickles that it would not write are laid down here.
 */
#include "corpus.h"
#include "zip_make.h"

#include <sys/stat.h>
#include <unistd.h>

static char error[IO_ERROR_BYTES];

#if ESMM_LIBZIP

static const corpus_case cases[] = {
    {"good", NULL},
    {"good_protocol4", NULL},
    {"good_protocol5", NULL},
    {"deflated", NULL},
    {"nested", NULL},
    {"transposed", NULL},
    {"view", NULL},
    {"skips", NULL}, /* listed; no matrix */
    {"tied", NULL},
    {"bare", NULL},
    {"list", NULL},
    {"parameter", NULL},
    {"empty", NULL},
    {"v3", NULL},
    {"bf16", NULL},
    {"no_directory", NULL},
    /* tensors that do not fit */
    {"out_of_storage", "reaches beyond the 6 elements"},
    {"offset_out_of_storage", "reaches beyond the 6 elements"},
    {"stride_overflow", "reaches beyond the 6 elements"},
    {"huge_shape", "tensor 'w': its shape is too large"},
    {"negative", "no whole number from 0 up"},
    {"strides_missing", "2 dimensions with 1 strides"},
    {"many_dimensions", "a tensor of 40 dimensions"},
    {"short_storage", "'model/data/0' has 8 bytes, and the pickle says 6 elements of 4"},
    {"long_storage", "'model/data/0' has 12 bytes, and the pickle says 2 elements of 4"},
    {"lies_about_size", "'model/data/2' has 4 bytes, and the pickle says 1 elements of 8"},
    {"quantized", "it uses torch.QUInt8Storage"},
    {"key_number", "no string or number"},
    {"control_key", "byte 0x1b as its character 2"},
    {"long_name", "longer than 1023 bytes"},
    {"same_name", "two tensors have the name '1'"},
    {"same_dictionary", "the same dictionary or list is in it twice"},
    {"loop", "the same dictionary or list is in it twice"},
    {"nested_deep", "nested more than 16 deep"},
    /* what would run something */
    {"system", "it uses posix.system, which is nothing that tensors need: refused"},
    {"system4", "it uses posix.system, which is nothing that tensors need: refused"},
    {"eval", "it uses __builtin__.eval"},
    {"control_global", "no plain Python name"},
    {"build_tensor", "attributes for something that is no dictionary"},
    {"reduce_string", "cannot be called"},
    {"dict_arguments", "collections.OrderedDict with arguments that it does not take"},
    {"newobj", "opcode 0x81 (NEWOBJ)"},
    {"inst", "opcode 0x69 (INST)"},
    {"ext", "opcode 0x82 (EXT1)"},
    {"no_opcode", "opcode 0xff (no opcode at all)"},
    {"persid", "opcode 0x50 (PERSID)"},
    {"wrong_persid", "not that of a storage"},
    /* damaged pickles */
    {"protocol9", "protocol 9"},
    {"no_stop", "ends without a STOP"},
    {"nothing", "ends without a STOP"},
    {"stop_alone", "nothing on the stack"},
    {"cut_string", "ends in the middle of an opcode"},
    {"cut_name", "ends in the middle of a name"},
    {"long_frame", "a frame that is longer"},
    {"memo_missing", "memo number 7 is not there"},
    {"memo_skips", "memo number 4294967295 after 0"},
    {"no_mark", "there is no mark"},
    {"below_mark", "nothing on the stack"},
    {"odd_items", "a key without a value"},
    {"append_to_dict", "no list"},
    {"huge_long", "a number of 9 bytes"},
    /* damaged archives */
    {"truncated", "is no whole zip archive"},
    {"truncated_half", "is no whole zip archive"},
    {"not_zip", "is no whole zip archive"},
    {"checksum", "'model/data/0' cannot be read: CRC error"},
    {"no_storage", "no entry for the storage that its pickle calls '1'"},
    {"same_entry", "two entries of the zip archive have the name 'model/data/0'"},
    {"two_pickles", "two entries data.pkl"},
    {"big_endian", "big-endian"},
    {"no_pickle", "without data.pkl"},
    {"arrays", "unzip it first"},
    {"old_format", "before PyTorch 1.6"},
    {"bomb", "'model/data/0' has 1048576 bytes, and the pickle says 2 elements of 4"},
    {"bomb_claims", "claims to become 4294967280 bytes from 6: refused"},
    {"bomb_pickle", "has 67108865 bytes: more than 67108864"},
};

static void test_corpus(void **state)
{
  (void)state;
  corpus_check("pt", cases, sizeof cases / sizeof *cases);
}

static io_tensors *open_good(const char *file)
{
  io_tensors *t;
  if (io_tensors_open(corpus_path("pt", file), 0, 0, &t, error, sizeof error) != 0)
    fail_msg("%s", error);
  assert_string_equal(t->kind, "pt");
  return t;
}

static void check_names(const io_tensors *t, const char *const *names, size_t count)
{
  assert_int_equal(t->count, count);
  for (size_t i = 0; i < count; i++)
    assert_string_equal(t->list[i].name, names[i]);
}

static void test_values(void **state)
{
  (void)state;
  static const char *const files[] = {"good.pt", "good_protocol4.pt", "good_protocol5.pt", "deflated.pt",
                                      "no_directory.pt"};
  static const char *const names[] = {"fc.weight", "fc.half", "steps"};
  static const float want[] = {1, 0, 2, 0, 0, -3};
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    io_tensors *t = open_good(files[i]);
    esmm_matrix m;
    check_names(t, names, 3);
    assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
    assert_true(m.rows == 2 && m.cols == 3 && m.ld == 3 && m.dtype == ESMM_F32 && m.order == ESMM_ROW_MAJOR);
    assert_memory_equal(m.data, want, sizeof want);
    assert_int_equal(io_tensor_matrix(t, 1, &m, error, sizeof error), 0);
    assert_int_equal(m.dtype, ESMM_F16);
    assert_int_equal(((const uint16_t *)m.data)[3], 0x4000);
    assert_int_equal(io_tensor_load(t, 2, error, sizeof error), 0);
    assert_int_equal(*(const int64_t *)t->list[2].data, 7);
    assert_int_equal(io_tensor_matrix(t, 2, &m, error, sizeof error), -1);
    io_tensor_unload(t, 0);
    assert_null(t->list[0].data);
    io_tensors_close(t);
  }
}

static void test_names(void **state)
{
  (void)state;
  static const char *const nested[] = {"model.fc.weight", "model.fc.half", "model.steps"}, *const bare[] = {"tensor"};
  static const char *const list[] = {"0", "1"}, *const tied[] = {"a", "b"};
  io_tensors *t = open_good("nested.pt");
  check_names(t, nested, 3);
  io_tensors_close(t);
  t = open_good("bare.pt");
  check_names(t, bare, 1);
  io_tensors_close(t);
  t = open_good("list.pt");
  check_names(t, list, 2);
  io_tensors_close(t);
  t = open_good("tied.pt");
  check_names(t, tied, 2);
  io_tensors_close(t);
  t = open_good("v3.pt");
  assert_int_equal(t->list[0].dtype, IO_F8_E4M3);
  io_tensors_close(t);
}

/* Views of a storage: other strides, another start. */
static void test_strides(void **state)
{
  (void)state;
  esmm_matrix m;
  io_tensors *t = open_good("transposed.pt"); /* [3,2] of the [2,3] that is stored: columns */
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_true(m.rows == 3 && m.cols == 2 && m.ld == 3 && m.order == ESMM_COL_MAJOR);
  assert_true(((const float *)m.data)[m.ld * 1 + 2] == -3); /* row 2, column 1 */
  io_tensors_close(t);
  t = open_good("view.pt"); /* the last two columns */
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), 0);
  assert_true(m.rows == 2 && m.cols == 2 && m.ld == 3 && m.order == ESMM_ROW_MAJOR);
  assert_true(((const float *)m.data)[0] == 0 && ((const float *)m.data)[1] == 2 && ((const float *)m.data)[4] == -3);
  io_tensors_close(t);
  t = open_good("skips.pt");
  assert_int_equal(io_tensor_matrix(t, 0, &m, error, sizeof error), -1);
  assert_non_null(strstr(error, "neither next to each other in rows nor in columns"));
  io_tensors_close(t);
}

/* Nothing of a pickle is run: what it would do has not happened. */
static void test_executes_nothing(void **state)
{
  (void)state;
  static const char path[] = "/tmp/esmm_test_pt_was_here";
  static const char pickle[] = "\x80\x02"
                               "cposix\nsystem\n(X\x20\0\0\0touch /tmp/esmm_test_pt_was_here   tR.";
  const zip_entry entries[] = {{"model/data.pkl", pickle, sizeof pickle - 1}};
  size_t size;
  unsigned char *archive = zip_make(entries, 1, &size);
  io_tensors *t;
  assert_non_null(archive);
  (void)unlink(path);
  assert_int_equal(io_pt_parse(archive, size, "x.pt", &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "x.pt: its pickle, at byte 2: it uses posix.system"));
  assert_int_not_equal(access(path, F_OK), 0);
  free(archive);
}

/* Dictionaries that hold one another twice would unfold to 2^40 names. */
static void test_unfolds_nothing(void **state)
{
  (void)state;
  unsigned char pickle[1024], *at = pickle;
  memcpy(at, "\x80\x02}q\0", 5);
  at += 5;
  for (unsigned char i = 0; i < 12; i++) { /* {"a": last, "b": last} */
    const unsigned char level[] = {
        '}', 'q', (unsigned char)(i + 1), '(', 'X', 1, 0, 0, 0, 'a', 'h', i, 'X', 1, 0, 0, 0, 'b', 'h', i, 'u'};
    memcpy(at, level, sizeof level);
    at += sizeof level;
  }
  *at++ = '.';
  const zip_entry entries[] = {{"m/data.pkl", pickle, (size_t)(at - pickle)}};
  size_t size;
  unsigned char *archive = zip_make(entries, 1, &size);
  io_tensors *t;
  assert_non_null(archive);
  assert_int_equal(io_pt_parse(archive, size, "x.pt", &t, error, sizeof error), -1);
  assert_non_null(strstr(error, "the same dictionary or list is in it twice"));
  free(archive);
}

/* Every prefix of a good file and every file with one byte changed gives an error or tensors, and no crash. */
static void test_every_byte(void **state)
{
  (void)state;
  unsigned char bytes[4096];
  FILE *file = fopen(corpus_path("pt", "good.pt"), "rb");
  assert_non_null(file);
  const size_t size = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  assert_in_range(size, 500, sizeof bytes - 1);
  for (size_t i = 0; i < 2 * size; i++) {
    io_tensors *t;
    const bool cut = i < size;
    if (!cut)
      bytes[i - size] ^= 0x55;
    const int result = io_pt_parse(bytes, cut ? i : size, "x.pt", &t, error, sizeof error);
    assert_true(result == 0 ? t != NULL : t == NULL && strncmp(error, "x.pt: ", 6) == 0);
    for (size_t j = 0; t && j < t->count; j++)
      (void)io_tensor_load(t, j, error, sizeof error);
    io_tensors_close(t);
    if (!cut)
      bytes[i - size] ^= 0x55;
  }
}

#else

static void test_missing(void **state)
{
  (void)state;
  io_tensors *t;
  assert_int_equal(io_tensors_open(corpus_path("pt", "good.pt"), 0, 0, &t, error, sizeof error), -1);
  assert_null(t);
  assert_non_null(strstr(error, "built without libzip"));
  assert_non_null(strstr(error, "install libzip-dev"));
}

#endif

int main(void)
{
  const struct CMUnitTest tests[] = {
#if ESMM_LIBZIP
    cmocka_unit_test(test_corpus),
    cmocka_unit_test(test_values),
    cmocka_unit_test(test_names),
    cmocka_unit_test(test_strides),
    cmocka_unit_test(test_executes_nothing),
    cmocka_unit_test(test_unfolds_nothing),
    cmocka_unit_test(test_every_byte),
#else
    cmocka_unit_test(test_missing),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
