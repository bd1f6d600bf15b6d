/* backend.c: the CPU as a backend (backend.h). Its memory is the host's, its calls are done when they return. */
#include "cpu/costs.h"
#include "cpu/cpu.h"
#include "cpu/forms.h"
#include "cpu/onednn.h"
#include "ffn/passes.h"

#include <stdio.h>
#include <string.h>

#define MEMORY_ALIGN 256 /* of esmm_memory_alloc */

/* ---- the device ---- */

static esmm_status count_devices(esmm_ctx *ctx, int *count)
{
  (void)ctx;
  *count = 1;
  return ESMM_OK;
}

static esmm_status open_device(esmm_ctx *ctx, int ordinal)
{
  (void)ordinal;
  /* Giving work to a thread that is awake takes 1 to 2 us, and longer with more threads: two are worth it where
     each has twice this, three where each has thrice. A sleeping thread comes 40 to 100 us later, but nothing waits for
     it. */
  ctx->thread_work = ESMM_CPU_COST_THREAD;
  ctx->wake_seconds = ESMM_CPU_COST_WAKE;
  (void)snprintf(ctx->device, sizeof ctx->device, "cpu");
  esmm_cpu_name(ctx->device_name, sizeof ctx->device_name);
  const char *refused = esmm_cpu_amx_refused();
  (void)snprintf(ctx->features, sizeof ctx->features, "%s%s%s%s%s",
                 ctx->cpu & ESMM_CPU_AVX2 ? "avx2 fma f16c bmi2" : "portable",
                 ctx->cpu & ESMM_CPU_AVX512 ? " avx512" : "", ctx->cpu & ESMM_CPU_AVX512BF16 ? " avx512bf16" : "",
                 ctx->cpu & ESMM_CPU_AMX ? " amx"
                 : refused               ? "; "
                                         : "",
                 refused ? refused : "");
  return ESMM_OK;
}

static void close_device(esmm_ctx *ctx)
{
  (void)ctx;
}

static esmm_status synchronize(esmm_ctx *ctx)
{
  (void)ctx;
  return ESMM_OK;
}

/* ---- memory and matrices ---- */

/* The size lies in front of the memory: the allocator's free wants it, the caller does not give it. */
static void *host_memory(esmm_ctx *ctx, size_t bytes)
{
  size_t all;
  char *block =
      esmm_size_add(bytes, MEMORY_ALIGN, &all) ? ctx->allocator.alloc(ctx->allocator.user, all, MEMORY_ALIGN) : NULL;
  if (!block)
    return NULL;
  memcpy(block, &all, sizeof all);
  return block + MEMORY_ALIGN;
}

static esmm_status memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr)
{
  *ptr = host_memory(ctx, bytes);
  return *ptr ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes", bytes);
}

static void memory_free(esmm_ctx *ctx, void *ptr)
{
  char *block = (char *)ptr - MEMORY_ALIGN;
  size_t all;
  memcpy(&all, block, sizeof all);
  ctx->allocator.free(ctx->allocator.user, block, all);
}

static esmm_status copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  esmm_copy_host(ctx, src, dst);
  return ESMM_OK;
}

/* ---- products ---- */

static unsigned features_of(const esmm_ctx *ctx)
{
  return ctx ? ctx->cpu : esmm_cpu_detect();
}

static bool has(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  if ((kernel->cpu & features_of(ctx)) == kernel->cpu)
    return true;
  const unsigned lacks = kernel->cpu & ~features_of(ctx);
  if (lacks == ESMM_CPU_AMX && esmm_cpu_amx_refused()) {
    (void)snprintf(why, why_bytes, "%s", esmm_cpu_amx_refused());
    return false;
  }
  (void)snprintf(why, why_bytes, "this CPU has no %s",
                 lacks & ESMM_CPU_AVX2         ? "AVX2"
                 : lacks & ESMM_CPU_AVX512     ? "AVX-512"
                 : lacks & ESMM_CPU_AVX512BF16 ? "AVX-512 BF16"
                                               : "AMX");
  return false;
}

/* The same idea for the widest instruction set that is there, if that takes every dtype that this one does. AMX is not
   wider: it wants 32 rows, and competes with what follows fewer. */
static const esmm_kernel *superseded(const esmm_ctx *ctx, const esmm_kernel *kernel)
{
  const size_t idea = strcspn(kernel->name, "_") + 1;
  const unsigned features = features_of(ctx);
  const esmm_kernel *best = NULL;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *other = esmm_registry_at(i);
    if (other->backend == kernel->backend && (other->cpu & features) == other->cpu && other->cpu > kernel->cpu &&
        !(other->cpu & ESMM_CPU_AMX) && strncmp(other->name, kernel->name, idea) == 0 &&
        (!other->dtypes || other->dtypes == kernel->dtypes) && (!best || other->cpu > best->cpu))
      best = other;
  }
  return best;
}

/* ---- time ---- */

typedef struct stopwatch {
  double from, to;
} stopwatch;

static esmm_status timer_create(esmm_ctx *ctx, void **timer)
{
  *timer = esmm_mem_alloc(&ctx->allocator, sizeof(stopwatch));
  return *timer ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a timer");
}

static void timer_free(esmm_ctx *ctx, void *timer)
{
  esmm_mem_free(&ctx->allocator, timer, sizeof(stopwatch));
}

static esmm_status timer_start(esmm_ctx *ctx, void *timer)
{
  (void)ctx;
  ((stopwatch *)timer)->from = esmm_now();
  return ESMM_OK;
}

static esmm_status timer_stop(esmm_ctx *ctx, void *timer)
{
  (void)ctx;
  ((stopwatch *)timer)->to = esmm_now();
  return ESMM_OK;
}

static esmm_status timer_seconds(esmm_ctx *ctx, void *timer, double *seconds)
{
  (void)ctx;
  const stopwatch *s = timer;
  *seconds = s->to - s->from;
  return ESMM_OK;
}

static uint64_t versions(const esmm_weights *w)
{
  const unsigned rows = w->dtype == ESMM_F32 ? ESMM_FORM(ROWS) : 0;
  return w->forms & (ESMM_FORM(ONEDNN) | rows) ? esmm_onednn_version() : 0;
}

static void tune_suffix(const esmm_ctx *ctx, char *out, size_t bytes)
{
  (void)snprintf(out, bytes, "-%s-%d",
                 ctx->cpu & ESMM_CPU_AMX          ? "amx"
                 : ctx->cpu & ESMM_CPU_AVX512BF16 ? "avx512bf16"
                 : ctx->cpu & ESMM_CPU_AVX512     ? "avx512"
                 : ctx->cpu & ESMM_CPU_AVX2       ? "avx2"
                                                  : "portable",
                 ctx->threads);
}

const esmm_backend esmm_cpu_backend = {
    .name = "cpu",
    .kind = "CPU",
    .threads = true,
    .count = count_devices,
    .open = open_device,
    .close = close_device,
    .synchronize = synchronize,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .copy = copy,
    .pattern = esmm_pattern_host,
    .formats = esmm_forms_formats,
    .prepare = esmm_prepare_checked,
    .weights_free = esmm_cpu_weights_free,
    .multiply = esmm_cpu_multiply,
    .finish = esmm_cpu_finish,
    .explain = esmm_cpu_explain,
    .has = has,
    .superseded = superseded,
    .timer_create = timer_create,
    .timer_free = timer_free,
    .timer_start = timer_start,
    .timer_stop = timer_stop,
    .timer_seconds = timer_seconds,
    .trials = esmm_cpu_trials,
    .tune_suffix = tune_suffix,
    .versions = versions,
    .tune_sample = esmm_cpu_tune_sample,
    .tune_measure = esmm_cpu_tune_measure,
    .load = esmm_cpu_load,
    .layer = &esmm_ffn_cpu,
};
