/* registry.c: the list of kernels, made by the build from every ESMM_KERNEL(...) it finds (build/gen/registry.inc). */
#include "kernel.h"

#include <string.h>

#define X(id) extern const esmm_kernel esmm_kernel_##id;
#include "registry.inc"
#undef X

static const esmm_kernel *const kernels[] = {
#define X(id) &esmm_kernel_##id,
#include "registry.inc"
#undef X
};

_Static_assert(sizeof kernels / sizeof kernels[0] <= ESMM_MAX_KERNELS, "raise ESMM_MAX_KERNELS");

int esmm_registry_count(void)
{
  return (int)(sizeof kernels / sizeof kernels[0]);
}

const esmm_kernel *esmm_registry_at(int index)
{
  return kernels[index];
}

bool esmm_kernel_matches(const esmm_kernel *kernel, const char *name)
{
  size_t length = strlen(name);
  if (length == 0 || strncmp(kernel->name, name, length) != 0)
    return false;
  return kernel->name[length] == '\0' || (kernel->name[length] == '_' && !strchr(name, '_'));
}

bool esmm_force_known(const char *name)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    if (esmm_kernel_matches(kernels[i], name))
      return true;
  return false;
}

const esmm_kernel *esmm_kernel_superseded(const esmm_kernel *kernel, unsigned cpu)
{
  const size_t idea = strcspn(kernel->name, "_") + 1;
  const esmm_kernel *best = NULL;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *other = kernels[i];
    if (other->backend == kernel->backend && (other->cpu & cpu) == other->cpu && other->cpu > kernel->cpu &&
        strncmp(other->name, kernel->name, idea) == 0 && (!best || other->cpu > best->cpu))
      best = other;
  }
  return best;
}

bool esmm_kernel_competes(const esmm_kernel *kernel, unsigned cpu)
{
  return !(kernel->flags & ESMM_KERNEL_REFERENCE) && (kernel->cpu & cpu) == kernel->cpu &&
         !esmm_kernel_superseded(kernel, cpu);
}
