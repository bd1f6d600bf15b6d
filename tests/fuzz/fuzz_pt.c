/*
 * fuzz_pt.c: libFuzzer target for the .pt reader. Whatever the bytes: no crash, nothing executed, a clear error or
 * tensors whose elements are all there.
 *
 * What starts like a zip archive is read as one. Anything else is taken for a pickle and put into an archive with the
 * right checksums, which random bytes would never have, beside two storages that it may refer to.
 */
#include "tensors.h"
#include "zip_make.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_one(const uint8_t *data, size_t size)
{
  io_tensors *tensors;
  char error[IO_ERROR_BYTES] = "";
  const int result = io_pt_parse(data, size, "fuzz", &tensors, error, sizeof error);
  fuzz_check(result, tensors, error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  static const unsigned char storage[24];
  const zip_entry entries[] = {
      {"model/data.pkl", data, size},
      {"model/data/0", storage, 24},
      {"model/data/1", storage, 8},
  };
  if (size >= 2 && data[0] == 'P' && data[1] == 'K') {
    read_one(data, size);
    return 0;
  }
  size_t bytes;
  unsigned char *archive = zip_make(entries, 3, &bytes);
  if (!archive)
    abort();
  read_one(archive, bytes);
  free(archive);
  return 0;
}
