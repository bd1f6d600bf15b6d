/* registry.c: the list of kernels, made by the build from every ESMM_KERNEL(...) it finds (build/gen/registry.inc). */
#include "backend.h"

#include <stdio.h>
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

static const esmm_backend *backend_of(const esmm_ctx *ctx)
{
  return ctx ? ctx->backend : esmm_backend_at(esmm_backend_count() - 1);
}

bool esmm_kernel_available(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  const esmm_backend *here = backend_of(ctx);
  char unused[160];
  if (!why) {
    why = unused;
    why_bytes = sizeof unused;
  }
  if (kernel->backend != here) {
    (void)snprintf(why, why_bytes, "runs on a %s; this is a %s context", kernel->backend->kind, here->kind);
    return false;
  }
  if (!here->has(ctx, kernel, why, why_bytes))
    return false;
  const char *missing = kernel->missing ? kernel->missing(kernel) : NULL;
  if (missing)
    (void)snprintf(why, why_bytes, "%s", missing);
  return !missing;
}

const esmm_kernel *esmm_kernel_superseded(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  return kernel->backend->superseded ? kernel->backend->superseded(ctx, kernel) : NULL;
}

unsigned esmm_kernel_formats(const esmm_kernel *kernel)
{
  unsigned formats = 0;
  for (int i = 0; i < ESMM_FORM_KINDS; i++)
    if (!kernel->reads || kernel->reads & 1u << i)
      formats |= 1u << esmm_form_table[i].format;
  return formats;
}

bool esmm_kernel_competes(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  return !(kernel->flags & ESMM_KERNEL_REFERENCE) && esmm_kernel_available(ctx, kernel, NULL, 0) &&
         !esmm_kernel_superseded(ctx, kernel);
}
