/*
 * tensors.h: what the fuzz targets of files of tensors hold their readers to.
 */
#ifndef ESMM_FUZZ_TENSORS_H
#define ESMM_FUZZ_TENSORS_H

#include "../../io/npy.h"
#include "../../io/tensors.h"

#include <stdlib.h>
#include <string.h>

#define FUZZ_MOST_BYTES ((size_t)1 << 22) /* of a tensor that is read */

/* Every element of the matrix must be there: a sanitizer watches the reads. */
static inline void fuzz_read_matrix(const esmm_matrix *m)
{
  const int64_t lines = m->order == ESMM_ROW_MAJOR ? m->rows : m->cols;
  const size_t line = (size_t)(m->order == ESMM_ROW_MAJOR ? m->cols : m->rows) * esmm_dtype_size(m->dtype);
  unsigned sum = 0;
  for (int64_t i = 0; line > 0 && i < lines; i++) { /* lines of nothing may be any number */
    const unsigned char *bytes = (const unsigned char *)m->data + (size_t)(i * m->ld) * esmm_dtype_size(m->dtype);
    for (size_t j = 0; j < line; j++)
      sum += bytes[j];
  }
  volatile unsigned sink = sum;
  (void)sink;
  if ((uintptr_t)m->data % esmm_dtype_size(m->dtype) != 0)
    abort();
}

/* A clear error and nothing else, or tensors that are what they say. */
static inline void fuzz_check(int result, io_tensors *tensors, const char *error)
{
  char text[IO_ERROR_BYTES];
  if (result != 0) {
    if (tensors || strncmp(error, "fuzz: ", 6) != 0)
      abort();
    return;
  }
  for (size_t i = 0; i < tensors->count; i++) {
    const io_tensor *t = &tensors->list[i];
    esmm_matrix m;
    if (!t->name || !t->name[0] || t->dtype >= IO_DTYPES || t->dims < 0 || t->dims > IO_TENSOR_DIMS)
      abort();
    if (t->bytes > FUZZ_MOST_BYTES)
      continue;
    if (!io_tensor_refusal(t) && io_tensor_matrix(tensors, i, &m, text, sizeof text) == 0)
      fuzz_read_matrix(&m);
    else if (io_tensor_load(tensors, i, text, sizeof text) != 0 && strncmp(text, "fuzz: ", 6) != 0)
      abort();
    io_tensor_unload(tensors, i);
  }
  io_tensors_close(tensors);
}

#endif
