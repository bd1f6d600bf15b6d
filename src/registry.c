/* registry.c: the list of kernels, made by the build from every ESMM_KERNEL(...) it finds (build/gen/registry.inc). */
#include "cuda/cuda.h"

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

/* Without a context: as in one of the CPU. */
static bool cpu_has(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  const unsigned cpu = ctx ? ctx->cpu : esmm_cpu_detect();
  return (kernel->cpu & cpu) == kernel->cpu;
}

static bool gpu_has(const esmm_cuda_properties *gpu, const esmm_kernel *kernel)
{
  return kernel->sm_exact ? gpu->sm == kernel->sm : gpu->sm >= kernel->sm;
}

bool esmm_kernel_available(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  const bool gpu = ctx && ctx->cuda, fits = kernel->backend == (gpu ? ESMM_CUDA : ESMM_CPU);
  const bool has = fits && (gpu ? gpu_has(esmm_cuda_get(ctx), kernel) : cpu_has(ctx, kernel));
  const char *missing = has && kernel->missing ? kernel->missing() : NULL;
  if (has && !missing)
    return true;
  if (!why)
    return false;
  if (missing)
    (void)snprintf(why, why_bytes, "%s", missing);
  else if (!fits)
    (void)snprintf(why, why_bytes, "runs on a %s; this is a %s context", gpu ? "CPU" : "GPU",
                   gpu ? ctx->device : "CPU");
  else if (!gpu)
    (void)snprintf(why, why_bytes, "this CPU has no %s", kernel->cpu & ESMM_CPU_AVX512 ? "AVX-512" : "AVX2");
  else
    (void)snprintf(why, why_bytes, "it is built for sm_%d%s; this GPU is sm_%d", kernel->sm,
                   kernel->sm_exact ? " alone" : " and later", esmm_cuda_get(ctx)->sm);
  return false;
}

const esmm_kernel *esmm_kernel_superseded(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  if (kernel->backend != ESMM_CPU)
    return NULL;
  const size_t idea = strcspn(kernel->name, "_") + 1;
  const esmm_kernel *best = NULL;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *other = kernels[i];
    if (other->backend == ESMM_CPU && cpu_has(ctx, other) && other->cpu > kernel->cpu &&
        strncmp(other->name, kernel->name, idea) == 0 && (!best || other->cpu > best->cpu))
      best = other;
  }
  return best;
}

bool esmm_kernel_competes(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  return !(kernel->flags & (ESMM_KERNEL_REFERENCE | ESMM_KERNEL_ABLATION)) &&
         esmm_kernel_available(ctx, kernel, NULL, 0) && !esmm_kernel_superseded(ctx, kernel);
}
