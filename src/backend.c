/* backend.c: the list of backends. A device is added here and in its own folder, nowhere else. */
#include "backend.h"

#include <stdio.h>
#include <string.h>

#define MOST_DEVICES 256 /* ordinals are below this: more than any machine has */

extern const esmm_backend esmm_cuda_backend;

static const esmm_backend *known[ESMM_MAX_BACKENDS] = {&esmm_cuda_backend, &esmm_cpu_backend};
static int count = 2;

int esmm_backend_count(void)
{
  return count;
}

const esmm_backend *esmm_backend_at(int index)
{
  return known[index];
}

/* The number behind the colon, or -1. */
static int ordinal_of(const char *digits)
{
  int ordinal = 0;
  if (!*digits)
    return -1;
  for (; *digits; digits++) {
    if (*digits < '0' || *digits > '9')
      return -1;
    ordinal = 10 * ordinal + (*digits - '0');
    if (ordinal >= MOST_DEVICES)
      return -1;
  }
  return ordinal;
}

const esmm_backend *esmm_backend_find(const char *device, int *ordinal)
{
  *ordinal = 0;
  for (int i = 0; i < count; i++) {
    const size_t length = strlen(known[i]->name);
    if (strcmp(device, known[i]->name) == 0)
      return known[i];
    if (!known[i]->numbered || strncmp(device, known[i]->name, length) != 0 || device[length] != ':')
      continue;
    *ordinal = ordinal_of(device + length + 1);
    return *ordinal < 0 ? NULL : known[i];
  }
  return NULL;
}

bool esmm_backend_register(const esmm_backend *backend)
{
  int ordinal;
  if (count == ESMM_MAX_BACKENDS || esmm_backend_find(backend->name, &ordinal))
    return false;
  known[count] = known[count - 1];
  known[count - 1] = backend;
  count++;
  return true;
}

void esmm_backend_names(char *out, size_t bytes)
{
  size_t used = (size_t)snprintf(out, bytes, "'auto'");
  bool any = false;
  for (int i = count - 1; i >= 0 && used < bytes; i--) {
    const char *name = known[i]->name;
    any = any || known[i]->numbered;
    used += (size_t)snprintf(out + used, bytes - used, i == 0 && !known[i]->numbered ? " or '%s'" : ", '%s'", name);
    if (known[i]->numbered && used < bytes)
      used += (size_t)snprintf(out + used, bytes - used, i == 0 ? " or '%s:N'" : ", '%s:N'", name);
  }
  if (any && used < bytes)
    (void)snprintf(out + used, bytes - used, " with N from 0 to %d", MOST_DEVICES - 1);
}
