/*
 * context.c: contexts, their devices, memory, timers and error text. Its backend does a device's work.
 *
 * The library allocates through esmm_mem_alloc, and so through a caller's allocator; libc has its own.
 */
#include "backend.h"
#include "choose/recall.h"
#include "choose/saved.h"
#include "esmm_tools.h"
#include "threads.h"

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
  if (ctx)
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
  return ctx ? ctx->device : "";
}

const char *esmm_ctx_device_name(const esmm_ctx *ctx)
{
  return ctx ? ctx->device_name : "";
}

const char *esmm_ctx_features(const esmm_ctx *ctx)
{
  return ctx ? ctx->features : "";
}

const char *esmm_ctx_device_reason(const esmm_ctx *ctx)
{
  return ctx ? ctx->device_reason : "";
}

esmm_status esmm_ctx_synchronize(esmm_ctx *ctx)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  return ctx->backend->synchronize(ctx);
}

/* ---- memory of the device ---- */

esmm_status esmm_memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr)
{
  const esmm_status status = esmm_begin_handle(ctx, "ptr", ptr);
  return status == ESMM_OK ? ctx->backend->memory_alloc(ctx, bytes, ptr) : status;
}

void esmm_memory_free(esmm_ctx *ctx, void *ptr)
{
  if (ctx && ptr)
    ctx->backend->memory_free(ctx, ptr);
}

/* ---- streams ---- */

esmm_status esmm_ctx_set_stream(esmm_ctx *ctx, void *stream)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (stream && !ctx->backend->streams)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "stream is %p, but a %s context has no streams", stream,
                     ctx->backend->kind);
  ctx->stream = stream;
  return ESMM_OK;
}

void *esmm_ctx_stream(const esmm_ctx *ctx)
{
  return ctx ? ctx->stream : NULL;
}

/* ---- timers ---- */

struct esmm_timer {
  esmm_ctx *ctx;
  bool started, stopped;
  void *own; /* the backend's */
};

esmm_status esmm_timer_create(esmm_ctx *ctx, esmm_timer **timer)
{
  esmm_status status = esmm_begin_handle(ctx, "timer", timer);
  if (status != ESMM_OK)
    return status;
  esmm_timer *t = esmm_mem_alloc(&ctx->allocator, sizeof *t);
  if (!t)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a timer");
  *t = (esmm_timer){.ctx = ctx};
  status = ctx->backend->timer_create(ctx, &t->own);
  if (status != ESMM_OK) {
    esmm_mem_free(&ctx->allocator, t, sizeof *t);
    return status;
  }
  *timer = t;
  return ESMM_OK;
}

void esmm_timer_free(esmm_timer *timer)
{
  if (!timer)
    return;
  timer->ctx->backend->timer_free(timer->ctx, timer->own);
  const esmm_allocator allocator = timer->ctx->allocator;
  esmm_mem_free(&allocator, timer, sizeof *timer);
}

esmm_status esmm_timer_start(esmm_timer *timer)
{
  if (!timer)
    return ESMM_ERR_ARGUMENT;
  timer->started = timer->stopped = false;
  const esmm_status status = timer->ctx->backend->timer_start(timer->ctx, timer->own);
  timer->started = status == ESMM_OK;
  return status;
}

esmm_status esmm_timer_stop(esmm_timer *timer)
{
  if (!timer)
    return ESMM_ERR_ARGUMENT;
  if (!timer->started)
    return esmm_fail(timer->ctx, ESMM_ERR_ARGUMENT, "the timer was not started");
  const esmm_status status = timer->ctx->backend->timer_stop(timer->ctx, timer->own);
  timer->stopped = status == ESMM_OK;
  return status;
}

esmm_status esmm_timer_seconds(esmm_timer *timer, double *seconds)
{
  if (!timer)
    return ESMM_ERR_ARGUMENT;
  if (!seconds)
    return esmm_fail(timer->ctx, ESMM_ERR_ARGUMENT, "seconds is NULL");
  if (!timer->stopped)
    return esmm_fail(timer->ctx, ESMM_ERR_ARGUMENT, "the timer was not %s", timer->started ? "stopped" : "started");
  return timer->ctx->backend->timer_seconds(timer->ctx, timer->own, seconds);
}

/* ---- creation ---- */

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
  ctx->wakes = INT_MAX;
  return ESMM_OK;
}

static esmm_status choose_force(esmm_ctx *ctx, const char *asked)
{
  const char *source = "force";
  if (!asked) {
    asked = getenv("ESMM_FORCE");
    source = "ESMM_FORCE";
    ctx->force_from_env = true;
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

/* An option: 1 yes, -1 no, 0 as the environment says; *yes has the default. */
static esmm_status choose_yes(esmm_ctx *ctx, const char *option, const char *variable, int asked, bool *yes)
{
  if (asked < -1 || asked > 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is %d; it must be 1, -1 for no, or 0 for the default", option, asked);
  const char *env = getenv(variable);
  if (asked == 0 && env && *env) {
    if (strcmp(env, "0") != 0 && strcmp(env, "1") != 0)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is '%.40s'; it must be 0 or 1", variable, env);
    asked = *env == '1' ? 1 : -1;
  }
  if (asked)
    *yes = asked > 0;
  return ESMM_OK;
}

/* Keeps the first of several failures: it is that of the device the caller meant. */
static void keep_reason(esmm_ctx *ctx)
{
  if (!ctx->device_reason[0])
    (void)snprintf(ctx->device_reason, sizeof ctx->device_reason, "%.*s", (int)sizeof ctx->device_reason - 1,
                   ctx->error);
  ctx->error[0] = '\0';
}

static esmm_status open_device(esmm_ctx *ctx, const esmm_backend *backend, int ordinal)
{
  ctx->backend = backend;
  ctx->ordinal = ordinal;
  const esmm_status status = backend->open(ctx, ordinal);
  if (status != ESMM_OK)
    ctx->backend = NULL; /* there is nothing to close */
  return status;
}

/* The first device that works; the last backend always does. */
static esmm_status open_first(esmm_ctx *ctx)
{
  const int last = esmm_backend_count() - 1;
  for (int i = 0; i < last; i++) {
    const esmm_backend *backend = esmm_backend_at(i);
    int count = 0;
    if (backend->count(ctx, &count) != ESMM_OK) {
      keep_reason(ctx);
      continue;
    }
    for (int d = 0; d < count; d++) {
      const esmm_status status = open_device(ctx, backend, d);
      if (status == ESMM_OK)
        ctx->device_reason[0] = '\0';
      if (status == ESMM_OK || status == ESMM_ERR_ARGUMENT) /* a mistake of the caller's: no reason for another one */
        return status;
      keep_reason(ctx);
    }
  }
  return open_device(ctx, esmm_backend_at(last), 0);
}

static esmm_status choose_device(esmm_ctx *ctx, const char *asked)
{
  const char *source = "device";
  if (!asked) {
    asked = getenv("ESMM_DEVICE");
    source = "ESMM_DEVICE";
    if (!asked || !*asked)
      asked = "auto";
  }
  if (strcmp(asked, "auto") == 0)
    return open_first(ctx);
  int ordinal;
  const esmm_backend *backend = esmm_backend_find(asked, &ordinal);
  if (backend)
    return open_device(ctx, backend, ordinal);
  char names[160];
  esmm_backend_names(names, sizeof names);
  return esmm_fail(ctx, ESMM_ERR_DEVICE, "%s is '%.60s'; it must be %s", source, asked, names);
}

static esmm_status set_up(esmm_ctx *ctx, const esmm_ctx_opts *opts)
{
  /* Contexts of any device have threads: the CPU does all work on matrices in host memory. */
  ctx->cpu = esmm_cpu_detect();
  ctx->remember = true;
  bool deterministic = false;
  esmm_status status = choose_threads(ctx, opts->threads);
  if (status == ESMM_OK)
    status = esmm_threads_open(ctx);
  if (status == ESMM_OK)
    status = choose_force(ctx, opts->force);
  if (status == ESMM_OK)
    status = choose_yes(ctx, "remember", "ESMM_REMEMBER", opts->remember, &ctx->remember);
  if (status == ESMM_OK)
    status = choose_yes(ctx, "deterministic", "ESMM_DETERMINISTIC", opts->deterministic, &deterministic);
  if (status == ESMM_OK)
    status = esmm_recall_open(ctx);
  if (status == ESMM_OK)
    status = choose_device(ctx, opts->device);
  if (status != ESMM_OK)
    return status;
  ctx->learns = ctx->remember && !deterministic;
  esmm_tune_defaults(ctx);
  if (!opts->no_tuning_cache)
    esmm_tune_find(ctx);
  if (!opts->no_tuning_cache)
    esmm_saved_open(ctx);
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
    if (!esmm_struct_size(opts->size, sizeof defaults)) {
      /* Fields beyond size may not exist, the error buffer among them; a newer program's somewhat larger struct has it.
       */
      if (opts->size > sizeof defaults && opts->size <= 4 * sizeof defaults && opts->error && opts->error_size)
        (void)snprintf(opts->error, opts->error_size, "opts->size is %zu; set it to sizeof *opts, %zu in this version",
                       opts->size, sizeof defaults);
      return ESMM_ERR_ARGUMENT;
    }
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
  if (ctx->backend)
    ctx->backend->close(ctx);
  esmm_saved_close(ctx);
  esmm_recall_close(ctx);
  esmm_threads_close(ctx);
  esmm_mem_free(&allocator, ctx->scratch, ctx->scratch_bytes);
  esmm_mem_free(&allocator, ctx, sizeof *ctx);
}
