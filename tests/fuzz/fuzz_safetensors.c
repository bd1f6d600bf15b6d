/*
 * fuzz_safetensors.c: libFuzzer target for the safetensors reader. Whatever the bytes: no crash, a clear error or
 * tensors whose elements are all there.
 *
 * A random length before the header is almost never right, so each input is read twice: as it is, and with the length
 * set to where the last brace is.
 */
#include "tensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_one(const uint8_t *data, size_t size)
{
  io_tensors *tensors;
  char error[IO_ERROR_BYTES] = "";
  const int result = io_safetensors_parse(data, size, "fuzz", &tensors, error, sizeof error);
  fuzz_check(result, tensors, error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  read_one(data, size);
  size_t length = size;
  while (length > 8 && data[length - 1] != '}')
    length--;
  if (length <= 8)
    return 0;
  uint8_t *repaired = malloc(size);
  if (!repaired)
    abort();
  memcpy(repaired, data, size);
  for (int i = 0; i < 8; i++)
    repaired[i] = (uint8_t)((uint64_t)(length - 8) >> (8 * i));
  read_one(repaired, size);
  free(repaired);
  return 0;
}
