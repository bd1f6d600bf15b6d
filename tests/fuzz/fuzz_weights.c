/*
 * fuzz_weights.c: libFuzzer target for the weights file reader. Whatever the bytes: no crash, no large allocation, a
 * clear error or weights that every kernel can multiply with.
 *
 * Random bytes do not get past a 64-bit checksum, so each input is read twice: as it is, and with its checksums made
 * right here. The library has no way to leave them out.
 */
#include "format/checksum.h"
#include "format/weights_file.h"

#include <stdlib.h>
#include <string.h>

#define MOST_BYTES ((size_t)1 << 24) /* that inputs of a few kilobytes may ask for at once */
#define MOST_ELEMENTS 65536          /* of weights that are multiplied */
#define ROWS 3

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void *capped_alloc(void *user, size_t bytes, size_t align)
{
  (void)user;
  return bytes <= MOST_BYTES ? aligned_alloc(align, (bytes + align - 1) / align * align) : NULL;
}

static void capped_free(void *user, void *ptr, size_t bytes)
{
  (void)user;
  (void)bytes;
  free(ptr);
}

static esmm_ctx *make_ctx(void)
{
  static const esmm_allocator allocator = {capped_alloc, capped_free, NULL};
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .threads = 1, .force = "auto", .allocator = &allocator, .no_tuning_cache = 1};
  esmm_ctx *ctx = NULL;
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    abort();
  return ctx;
}

/* Every kernel that can run must stay within what the reader accepted; a sanitizer watches. */
static void multiply(esmm_ctx *ctx, const esmm_weights *w)
{
  if (w->k > MOST_ELEMENTS || w->n > MOST_ELEMENTS || w->k * w->n > MOST_ELEMENTS)
    return;
  float *a = malloc((size_t)(ROWS * w->k + 1) * sizeof *a), *c = malloc((size_t)(ROWS * w->n + 1) * sizeof *c);
  if (!a || !c)
    abort();
  for (int64_t i = 0; i < ROWS * w->k; i++)
    a[i] = i % 3 == 0 ? 0.0f : (float)(i % 7) - 3.0f;
  const esmm_matrix ma = {.data = a, .rows = ROWS, .cols = w->k};
  for (int kernel = 0; kernel < esmm_kernel_count(); kernel++)
    for (int strict = 0; strict <= 1; strict++) {
      esmm_kernel_info info = {.size = sizeof info};
      esmm_matrix mc = {.data = c, .rows = ROWS, .cols = w->n};
      if (esmm_kernel_get(ctx, kernel, &info) != ESMM_OK)
        abort();
      const esmm_matmul_opts opts = {.size = sizeof opts, .force = info.name, .strict = strict};
      const esmm_status status = esmm_matmul(ctx, &ma, w, &mc, &opts, NULL);
      if (status != ESMM_OK && status != ESMM_ERR_UNSUPPORTED && status != ESMM_ERR_MEMORY)
        abort();
    }
  free(a);
  free(c);
}

static void read_one(esmm_ctx *ctx, const uint8_t *data, size_t size)
{
  esmm_weights *w = NULL;
  const esmm_status status = esmm_weights_parse(ctx, "fuzz", data, size, &w);
  if (status == ESMM_OK) {
    multiply(ctx, w);
    esmm_weights_free(w);
    return;
  }
  const bool expected = status == ESMM_ERR_FORMAT || status == ESMM_ERR_TRUNCATED || status == ESMM_ERR_CHECKSUM ||
                        status == ESMM_ERR_VERSION || status == ESMM_ERR_MEMORY;
  if (!expected || w || strncmp(esmm_ctx_error(ctx), "'fuzz': ", 8) != 0)
    abort();
}

static void set_checksums(uint8_t *bytes, size_t size)
{
  esmm_file_header h;
  memcpy(&h, bytes, sizeof h);
  for (int i = 0; i < ESMM_FILE_SECTIONS; i++)
    if (h.section[i].offset <= size && h.section[i].bytes <= size - h.section[i].offset)
      h.section[i].checksum = esmm_checksum_of(bytes + h.section[i].offset, h.section[i].bytes);
  h.checksum = esmm_checksum_of(&h, offsetof(esmm_file_header, checksum));
  memcpy(bytes, &h, sizeof h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  static esmm_ctx *ctx;
  if (!ctx)
    ctx = make_ctx();
  read_one(ctx, data, size);
  if (size < sizeof(esmm_file_header))
    return 0;
  uint8_t *repaired = malloc(size);
  if (!repaired)
    abort();
  memcpy(repaired, data, size);
  set_checksums(repaired, size);
  read_one(ctx, repaired, size);
  free(repaired);
  return 0;
}
