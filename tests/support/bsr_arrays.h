/*
 * bsr_arrays.h: a matrix as the arrays of an esmm_bsr, and every way in which those can be damaged.
 */
#ifndef ESMM_TEST_BSR_ARRAYS_H
#define ESMM_TEST_BSR_ARRAYS_H

#include "harness.h"

#include <stdlib.h>
#include <string.h>

static inline bool block_alive(const esmm_matrix *b, int64_t i, int64_t j, int rows, int cols)
{
  for (int64_t r = i * rows; r < (i + 1) * rows && r < b->rows; r++)
    for (int64_t c = j * cols; c < (j + 1) * cols && c < b->cols; c++)
      if (th_get(b, r, c) != 0.0)
        return true;
  return false;
}

typedef struct arrays {
  esmm_bsr b;
  void *pointers, *indices;
  char *values;
  size_t bytes[3]; /* of the three */
} arrays;

static inline void put_index(void *array, int bits, int64_t i, int64_t value)
{
  if (bits == 32)
    ((int32_t *)array)[i] = (int32_t)value;
  else
    ((int64_t *)array)[i] = value;
}

/* All blocks of b, dead ones too where `dead`; what lies outside of the matrix is NaN. */
static inline arrays make_arrays(const esmm_matrix *b, int rows, int cols, int bits, esmm_order order, bool dead)
{
  const bool by_rows = order == ESMM_ROW_MAJOR;
  const int64_t levels = (b->rows + rows - 1) / rows, strips = (b->cols + cols - 1) / cols;
  const int64_t lines = by_rows ? levels : strips, places = by_rows ? strips : levels;
  const size_t size = th_element_bytes(b->dtype);
  arrays a = {.bytes = {(size_t)(lines + 1) * 8, (size_t)(lines * places + 1) * 8,
                        (size_t)(levels * strips) * (size_t)(rows * cols) * size + 8}};
  a.pointers = calloc(a.bytes[0], 1);
  a.indices = calloc(a.bytes[1], 1);
  a.values = malloc(a.bytes[2]);
  assert_true(a.pointers && a.indices && a.values);
  memset(a.values, 0xff, a.bytes[2]);
  int64_t block = 0;
  for (int64_t line = 0; line < lines; line++) {
    for (int64_t place = 0; place < places; place++) {
      const int64_t level = by_rows ? line : place, strip = by_rows ? place : line;
      if (!dead && !block_alive(b, level, strip, rows, cols))
        continue;
      for (int64_t r = 0; r < rows && level * rows + r < b->rows; r++)
        for (int64_t c = 0; c < cols && strip * cols + c < b->cols; c++)
          memcpy(a.values + (size_t)(block * rows * cols + (by_rows ? r * cols + c : c * rows + r)) * size,
                 (const char *)b->data + (size_t)th_index(b, level * rows + r, strip * cols + c) * size, size);
      put_index(a.indices, bits, block++, place);
    }
    put_index(a.pointers, bits, line + 1, block);
  }
  a.b = (esmm_bsr){.size = sizeof a.b,
                   .rows = b->rows,
                   .cols = b->cols,
                   .block_rows = rows,
                   .block_cols = cols,
                   .index_bits = bits,
                   .dtype = b->dtype,
                   .order = order,
                   .blocks = block,
                   .row_pointers = a.pointers,
                   .column_indices = a.indices,
                   .values = a.values};
  return a;
}

static inline void free_arrays(arrays *a)
{
  free(a->pointers);
  free(a->indices);
  free(a->values);
}

static int index_bits; /* of the arrays that are being damaged */

static inline void set_pointer(arrays *a, int64_t i, int64_t value)
{
  put_index(a->pointers, index_bits, i, value);
}

static inline void set_index(arrays *a, int64_t i, int64_t value)
{
  put_index(a->indices, index_bits, i, value);
}

/* clang-format off */
/* X(name, status, words of the error text, the change) */
#define DAMAGES(X) \
  X(first_pointer, ESMM_ERR_ARGUMENT, "row_pointers[0]", "1", set_pointer(a, 0, 1)) \
  X(negative_pointer, ESMM_ERR_ARGUMENT, "row_pointers[1]", "-1", set_pointer(a, 1, -1)) \
  X(falling_pointer, ESMM_ERR_ARGUMENT, "row_pointers[2]", "less than", set_pointer(a, 2, 2)) \
  X(large_pointer, ESMM_ERR_ARGUMENT, "row_pointers[1]", "10", set_pointer(a, 1, 10)) \
  X(last_pointer, ESMM_ERR_ARGUMENT, "row_pointers[3]", "8", set_pointer(a, 3, 8)) \
  X(negative_index, ESMM_ERR_ARGUMENT, "column_indices[4]", "-1", set_index(a, 4, -1)) \
  X(large_index, ESMM_ERR_ARGUMENT, "column_indices[8]", "3", set_index(a, 8, 3)) \
  X(duplicate, ESMM_ERR_ARGUMENT, "column_indices[5]", "duplicate", set_index(a, 5, 1)) \
  X(unsorted, ESMM_ERR_ARGUMENT, "column_indices[1]", "sort", (set_index(a, 0, 1), set_index(a, 1, 0))) \
  X(negative_blocks, ESMM_ERR_SHAPE, "-1 blocks", "", a->b.blocks = -1) \
  X(fewer_blocks, ESMM_ERR_ARGUMENT, "row_pointers[3]", "8 blocks", a->b.blocks = 8) \
  X(too_many_blocks, ESMM_ERR_OVERFLOW, "2147483648", "int32", a->b.blocks = (int64_t)INT32_MAX + 1) \
  X(negative_rows, ESMM_ERR_SHAPE, "-40", "", a->b.rows = -40) \
  X(huge_rows, ESMM_ERR_OVERFLOW, "9223372036854775807", "", a->b.rows = INT64_MAX) \
  X(block_rows, ESMM_ERR_ARGUMENT, "0 x 8", "256", a->b.block_rows = 0) \
  X(block_cols, ESMM_ERR_ARGUMENT, "16 x 257", "256", a->b.block_cols = 257) \
  X(bits_16, ESMM_ERR_ARGUMENT, "index_bits", "16", a->b.index_bits = 16) \
  X(dtype, ESMM_ERR_DTYPE, "dtype", "7", a->b.dtype = (esmm_dtype)7) \
  X(order, ESMM_ERR_ARGUMENT, "order", "2", a->b.order = (esmm_order)2) \
  X(place, ESMM_ERR_ARGUMENT, "place", "2", a->b.place = (esmm_place)2) \
  X(no_pointers, ESMM_ERR_ARGUMENT, "row_pointers is NULL", "", a->b.row_pointers = NULL) \
  X(no_indices, ESMM_ERR_ARGUMENT, "column_indices is NULL", "", a->b.column_indices = NULL) \
  X(no_values, ESMM_ERR_ARGUMENT, "values is NULL", "", a->b.values = NULL) \
  X(values_askew, ESMM_ERR_ARGUMENT, "aligned", "values", a->b.values = a->values + 1) \
  X(pointers_askew, ESMM_ERR_ARGUMENT, "aligned", "", a->b.row_pointers = (char *)a->pointers + 2) \
  X(larger_struct, ESMM_ERR_ARGUMENT, "size", "", a->b.size += 8)

#define X(name, status, word1, word2, change) static inline void damage_##name(arrays *a) { change; }
DAMAGES(X)
#undef X
/* clang-format on */

#endif
