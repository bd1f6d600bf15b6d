/*
 * fuzz_npy.c: libFuzzer target for the .npy reader. Whatever the bytes: no crash, and what is accepted is consistent.
 */
#include "../../io/npy.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  io_matrix m;
  char error[IO_ERROR_BYTES];
  if (io_npy_parse(data, size, "fuzz", &m, error, sizeof error) != 0) {
    if (strncmp(error, "fuzz: ", 6) != 0 || m.memory)
      abort();
    return 0;
  }
  /* Every element the matrix claims must be there: a sanitizer watches the reads. */
  const unsigned char *bytes = m.m.data;
  size_t total = (size_t)m.m.rows * (size_t)m.m.cols * esmm_dtype_size(m.m.dtype);
  unsigned sum = 0;
  for (size_t i = 0; i < total; i++)
    sum += bytes[i];
  volatile unsigned sink = sum;
  (void)sink;
  if (total > size || m.m.ld != (m.m.order == ESMM_COL_MAJOR ? m.m.rows : m.m.cols))
    abort();
  io_matrix_free(&m);
  return 0;
}
