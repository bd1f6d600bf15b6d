/*
 * context.c: contexts, their memory and their error text.
 *
 * What the library allocates passes through esmm_mem_alloc, and so through a caller's allocator; libc and the OpenMP
 * runtime have their own.
 */
#include "kernel.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE_PAGE ((size_t)2 << 20)

static void *system_alloc(void *user, size_t bytes, size_t align)
{
  (void)user;
  /* Large buffers are read at random offsets: huge pages save most of the address-translation misses. */
  if (bytes >= 2 * HUGE_PAGE && align < HUGE_PAGE)
    align = HUGE_PAGE;
  void *ptr = NULL;
  if (posix_memalign(&ptr, align, bytes) != 0)
    return NULL;
  if (bytes >= 2 * HUGE_PAGE)
    (void)madvise(ptr, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
  return ptr;
}

static void system_free(void *user, void *ptr, size_t bytes)
{
  (void)user;
  (void)bytes;
  free(ptr);
}

void *esmm_mem_alloc(const esmm_allocator *allocator, size_t bytes)
{
  if (bytes == 0)
    bytes = 64;
  return allocator->alloc(allocator->user, bytes, 64);
}

void esmm_mem_free(const esmm_allocator *allocator, void *ptr, size_t bytes)
{
  if (ptr)
    allocator->free(allocator->user, ptr, bytes == 0 ? 64 : bytes);
}

void *esmm_scratch(esmm_ctx *ctx, size_t bytes)
{
  if (ctx->scratch && bytes <= ctx->scratch_bytes)
    return ctx->scratch;
  void *grown = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!grown)
    return NULL;
  esmm_mem_free(&ctx->allocator, ctx->scratch, ctx->scratch_bytes);
  ctx->scratch = grown;
  ctx->scratch_bytes = bytes;
  return grown;
}

double esmm_now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

esmm_status esmm_fail(esmm_ctx *ctx, esmm_status status, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  (void)vsnprintf(ctx->error, sizeof ctx->error, format, args);
  va_end(args);
  return status;
}

const char *esmm_ctx_error(const esmm_ctx *ctx)
{
  return ctx ? ctx->error : "";
}

int esmm_ctx_threads(const esmm_ctx *ctx)
{
  return ctx ? ctx->threads : 0;
}

const char *esmm_ctx_device(const esmm_ctx *ctx)
{
  return ctx ? "cpu" : "";
}

const char *esmm_ctx_device_name(const esmm_ctx *ctx)
{
  return ctx ? ctx->device_name : "";
}

const char *esmm_ctx_features(const esmm_ctx *ctx)
{
  return ctx ? ctx->features : "";
}

static int usable_cpus(void)
{
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0)
    return 1;
  int count = CPU_COUNT(&set);
  return count < 1 ? 1 : count > ESMM_MAX_THREADS ? ESMM_MAX_THREADS : count;
}

static esmm_status choose_threads(esmm_ctx *ctx, int asked)
{
  if (asked < 0 || asked > ESMM_MAX_THREADS)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "threads is %d; it must be 1 to %d, or 0 for the default", asked,
                     ESMM_MAX_THREADS);
  const char *env = getenv("ESMM_THREADS");
  if (asked == 0 && env && *env) {
    char *end = NULL;
    errno = 0;
    long value = strtol(env, &end, 10);
    if (errno || *end || end == env || value < 1 || value > ESMM_MAX_THREADS)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "ESMM_THREADS is '%.40s'; it must be a whole number from 1 to %d", env,
                       ESMM_MAX_THREADS);
    asked = (int)value;
  }
  ctx->threads = asked ? asked : usable_cpus();
  return ESMM_OK;
}

static esmm_status choose_force(esmm_ctx *ctx, const char *asked)
{
  const char *source = "force";
  if (!asked) {
    asked = getenv("ESMM_FORCE");
    source = "ESMM_FORCE";
  }
  if (!asked || !*asked)
    return ESMM_OK;
  if (strcmp(asked, "auto") == 0)
    return ESMM_OK;
  if (!esmm_force_known(asked))
    return esmm_fail(ctx, ESMM_ERR_UNKNOWN_KERNEL, "%s is '%.60s', which is no kernel; `esmm list` names them", source,
                     asked);
  (void)snprintf(ctx->force, sizeof ctx->force, "%s", asked);
  return ESMM_OK;
}

static esmm_status set_up(esmm_ctx *ctx, const esmm_ctx_opts *opts)
{
  if (opts->device && strcmp(opts->device, "auto") != 0 && strcmp(opts->device, "cpu") != 0)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "device is '%.60s'; this build knows 'auto' and 'cpu'", opts->device);
  esmm_status status = choose_threads(ctx, opts->threads);
  if (status == ESMM_OK)
    status = choose_force(ctx, opts->force);
  if (status != ESMM_OK)
    return status;
  ctx->cpu = esmm_cpu_detect();
  esmm_cpu_name(ctx->device_name, sizeof ctx->device_name);
  (void)snprintf(ctx->features, sizeof ctx->features, "%s%s",
                 ctx->cpu & ESMM_CPU_AVX2 ? "avx2 fma f16c bmi2" : "portable",
                 ctx->cpu & ESMM_CPU_AVX512 ? " avx512" : "");
  esmm_tune_defaults(ctx);
  if (!opts->no_tuning_cache)
    esmm_tune_find(ctx);
  return ESMM_OK;
}

esmm_status esmm_ctx_create(esmm_ctx **out, const esmm_ctx_opts *opts)
{
  static const esmm_allocator system_allocator = {system_alloc, system_free, NULL};
  esmm_ctx_opts defaults = {.size = sizeof defaults};
  if (!out)
    return ESMM_ERR_ARGUMENT;
  *out = NULL;
  if (opts) {
    if (opts->size < sizeof(size_t) || opts->size > sizeof defaults)
      return ESMM_ERR_ARGUMENT; /* fields beyond size may not exist: not even the error buffer can be used */
    memcpy(&defaults, opts, opts->size);
  }
  const esmm_allocator *allocator = defaults.allocator ? defaults.allocator : &system_allocator;
  esmm_ctx *ctx = allocator->alloc && allocator->free ? esmm_mem_alloc(allocator, sizeof *ctx) : NULL;
  esmm_status status = allocator->alloc && allocator->free ? ESMM_ERR_MEMORY : ESMM_ERR_ARGUMENT;
  const char *text = status == ESMM_ERR_MEMORY ? "no memory for a context" : "allocator: alloc and free must be set";
  if (ctx) {
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator = *allocator;
    status = set_up(ctx, &defaults);
    text = ctx->error;
  }
  if (status != ESMM_OK) {
    if (defaults.error && defaults.error_size)
      (void)snprintf(defaults.error, defaults.error_size, "%s", text);
    esmm_ctx_free(ctx);
    return status;
  }
  *out = ctx;
  return ESMM_OK;
}

void esmm_ctx_free(esmm_ctx *ctx)
{
  if (!ctx)
    return;
  esmm_allocator allocator = ctx->allocator;
  esmm_mem_free(&allocator, ctx->scratch, ctx->scratch_bytes);
  esmm_mem_free(&allocator, ctx, sizeof *ctx);
}
