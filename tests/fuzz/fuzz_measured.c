/*
 * fuzz_measured.c: libFuzzer target for the file of what calls took. Whatever the bytes: no crash, and what is believed
 * prints as lines that can be read again.
 *
 * Random bytes do not hit the kernel sources' hash of the first line, so each input is read as it is, and behind a
 * first line that is right.
 */
#include "choose/measured.h"
#include "choose/saved.h"
#include "esmm_tools.h"
#include "kernel.h"

#include <stdlib.h>
#include <string.h>

#define HOME 1

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_behind(const char *first, const uint8_t *data, size_t size)
{
  const size_t length = strlen(first);
  char *bytes = malloc(length + size + 1);
  if (!bytes)
    abort();
  memcpy(bytes, first, length);
  if (size)
    memcpy(bytes + length, data, size);
  FILE *f = fmemopen(bytes, length + size + 1, "r"); /* never empty: fmemopen may refuse that */
  if (!f)
    abort();
  bytes[length + size] = '\0';
  esmm_saved_read(f, HOME);
  (void)fclose(f);
  free(bytes);
}

static const char *name_of(int kernel)
{
  return esmm_registry_at(kernel)->name;
}

static int kernel_of(const char *name)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(name_of(i), name) == 0)
      return i;
  return -1;
}

static void read_again(void)
{
  char *text = NULL;
  size_t bytes = 0;
  FILE *f = open_memstream(&text, &bytes);
  if (!f || !esmm_measured_print(f, HOME, 1L << 20, name_of))
    abort();
  (void)fclose(f);
  esmm_measured_clear();
  for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
    const char after = end[1];
    end[1] = '\0';
    if (!esmm_measured_parse(line, HOME, kernel_of))
      abort();
    end[1] = after;
  }
  free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  char first[128];
  (void)snprintf(first, sizeof first, "esmm-measured 1 %s\n", esmm_source_id());
  esmm_measured_clear();
  read_behind("", data, size);
  read_behind(first, data, size);
  read_again();
  return 0;
}
