/*
 * test_dtype.c: the table of dtypes and the public enum say the same, and what depends on a dtype agrees with the
 * harness, which shares no code with the library.
 *
 * The switch over the enumerators makes the compiler ask for a line here when one is added.
 */
#include "harness.h"

#include "bits.h"
#include "convert.h"

#include <math.h>
#include <string.h>

typedef struct row {
  esmm_dtype dtype;
  const char *name;
  size_t bytes;
  uint32_t magnitude;
} row;

#define ROW(dtype, name, bytes, magnitude) {dtype, name, bytes, magnitude},
static const row table[] = {ESMM_DTYPES(ROW)};
enum { ROWS = (int)(sizeof table / sizeof *table) };

/* What esmm.h promises to call it. */
static const char *name_of(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return "f32";
  case ESMM_BF16:
    return "bf16";
  case ESMM_F16:
    return "f16";
  }
  return "unknown";
}

static void table_and_enum_agree(void **state)
{
  (void)state;
  for (int i = 0; i < ROWS; i++) {
    const row *r = &table[i];
    assert_int_equal(r->dtype, i); /* no gap: files and options count dtypes from 0 to the first that has no size */
    assert_string_equal(r->name, name_of(r->dtype));
    assert_string_equal(esmm_dtype_str(r->dtype), r->name);
    assert_int_equal(r->bytes, th_element_bytes(r->dtype));
    assert_int_equal(esmm_dtype_size(r->dtype), r->bytes);
    assert_int_equal(esmm_dtype_bytes(r->dtype), r->bytes);
    assert_int_equal(esmm_dtype_magnitude(r->dtype), r->magnitude);
    assert_int_equal(r->magnitude, (UINT64_C(1) << (8 * r->bytes - 1)) - 1);
    assert_int_equal(esmm_dtype_is_16bit(r->dtype), r->bytes == 2);
    assert_true(ESMM_DTYPES_ALL & ESMM_DTYPE_BIT(r->dtype));
  }
  assert_int_equal(ESMM_DTYPES_ALL, (1u << ROWS) - 1);
}

static void names_are_one_dtype_each(void **state)
{
  (void)state;
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < ROWS; j++)
      assert_int_equal(strcmp(esmm_dtype_str((esmm_dtype)i), esmm_dtype_str((esmm_dtype)j)) == 0, i == j);
}

static void an_unknown_dtype_is_nothing(void **state)
{
  (void)state;
  static const int unknown[] = {ROWS, 9, -1};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    const esmm_dtype dtype = (esmm_dtype)unknown[i];
    uint32_t word = 0x3f803c00u, copy = 7;
    assert_int_equal(esmm_dtype_size(dtype), 0);
    assert_string_equal(esmm_dtype_str(dtype), "unknown");
    assert_false(esmm_dtype_is_16bit(dtype));
    assert_false(esmm_nonzero_at(&word, dtype, 0));
    assert_int_equal(esmm_count_nonzero(&word, dtype, 1), 0);
    assert_true(esmm_load_element(&word, dtype, 0) == 0.0f);
    esmm_store_element(&copy, dtype, 0, 1.0f);
    esmm_copy_element(&copy, 0, &word, 0, dtype);
    assert_int_equal(copy, 7);
  }
}

/* Lines of elements, with gaps on either side, against the harness one by one. */
static void lines_of_elements(void **state)
{
  (void)state;
  static const double values[] = {0.0, -0.0, 1.0, -2.5, 0x1p-30, -0x1p-140, 65519.0, 1e30, -INFINITY, NAN, 0.1};
  enum { COUNT = (int)(sizeof values / sizeof *values), STEP = 3 };
  for (int i = 0; i < ROWS; i++) {
    const esmm_dtype dtype = table[i].dtype;
    uint32_t data[COUNT * STEP] = {0}, again[COUNT * STEP] = {0}, moved[COUNT] = {0};
    unsigned char flags[COUNT];
    float wide[COUNT * 2];
    int64_t nonzero = 0;
    for (int64_t v = 0; v < COUNT; v++)
      th_encode(data, dtype, v * STEP, values[v]);
    esmm_load_elements(data, dtype, 0, STEP, COUNT, wide, 2);
    esmm_store_elements(again, dtype, 0, STEP, COUNT, wide, 2);
    esmm_copy_elements(moved, 1, data, STEP, COUNT, dtype);
    esmm_flag_nonzero(moved, dtype, COUNT, flags);
    for (int64_t v = 0; v < COUNT; v++) {
      const double want = th_decode(data, dtype, v * STEP);
      const bool is_nan = isnan(want);
      assert_true(is_nan ? isnan(wide[2 * v]) != 0 : (double)wide[2 * v] == want);
      assert_true(is_nan || th_decode(again, dtype, v * STEP) == want);
      assert_int_equal(!signbit(wide[2 * v]), !signbit(want));
      assert_int_equal(esmm_bits_at(moved, dtype, v), esmm_bits_at(data, dtype, v * STEP));
      assert_int_equal(esmm_nonzero_at(moved, dtype, v), want != 0.0);
      assert_int_equal(flags[v], want != 0.0);
      nonzero += want != 0.0;
    }
    assert_int_equal(esmm_count_nonzero(moved, dtype, COUNT), nonzero);
  }
}

/* From each dtype to each, as a line that is longer than what is converted at a time. */
static void lines_that_convert(void **state)
{
  (void)state;
  enum { COUNT = 150 };
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < ROWS; j++) {
      uint32_t from[2 * COUNT] = {0}, to[COUNT + 1] = {0};
      for (int64_t v = 0; v < 2 * COUNT; v++)
        th_encode(from, table[i].dtype, v, (double)v / 7 - 20);
      esmm_convert_elements(from, table[i].dtype, 1, 2, COUNT - 1, to, table[j].dtype, 1);
      assert_int_equal(esmm_bits_at(to, table[j].dtype, 0), 0);
      for (int64_t v = 1; v < COUNT; v++)
        assert_true(th_decode(to, table[j].dtype, v) ==
                    th_round(table[j].dtype, th_decode(from, table[i].dtype, 2 * v - 1)));
      assert_int_equal(esmm_bits_at(to, table[j].dtype, COUNT), 0);
    }
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(table_and_enum_agree),        cmocka_unit_test(names_are_one_dtype_each),
      cmocka_unit_test(an_unknown_dtype_is_nothing), cmocka_unit_test(lines_of_elements),
      cmocka_unit_test(lines_that_convert),
  };
  return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
