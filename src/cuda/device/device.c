/*
 * device.c: GPUs, their primary contexts, memory, streams' order, copies, events.
 *
 * Everything happens in the device's primary context, the one that the CUDA runtime and PyTorch use. Each function
 * makes it current for the calling thread and puts back what was current before.
 */
#include "cuda/device/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 32
#define LEAST_SM 80

static esmm_cuda_device devices[MAX_DEVICES];
static pthread_once_t devices_once = PTHREAD_ONCE_INIT;

static void init_locks(void)
{
  for (int i = 0; i < MAX_DEVICES; i++)
    (void)pthread_mutex_init(&devices[i].lock, NULL);
}

static inline const esmm_cuda_driver *cu(void)
{
  return esmm_cuda_driver_get();
}

/* ---- errors ---- */

static void remember_loss(esmm_cuda_device *device, const char *text)
{
  (void)pthread_mutex_lock(&device->lock);
  if (!atomic_load(&device->lost)) {
    (void)snprintf(device->lost_text, sizeof device->lost_text, "%.*s", (int)sizeof device->lost_text - 1, text);
    atomic_store(&device->lost, true);
  }
  (void)pthread_mutex_unlock(&device->lock);
}

esmm_status esmm_cuda_check(esmm_ctx *ctx, CUresult result, const char *format, ...)
{
  if (result == CUDA_SUCCESS)
    return ESMM_OK;
  char what[256];
  va_list args;
  va_start(args, format);
  (void)vsnprintf(what, sizeof what, format, args);
  va_end(args);
  const esmm_status status = esmm_cuda_result_status(result);
  (void)esmm_fail(ctx, status, "%s: %s", what, esmm_cuda_result_name(result));
  if (status == ESMM_ERR_DEVICE_LOST && esmm_cuda_state(ctx))
    remember_loss(esmm_cuda_state(ctx)->device, ctx->error);
  return status;
}

static esmm_status fail_lost(esmm_ctx *ctx, esmm_cuda_device *device)
{
  return esmm_fail(ctx, ESMM_ERR_DEVICE_LOST, "cuda:%d was lost earlier (%s); start the program again",
                   device->properties.ordinal, device->lost_text);
}

/* ---- the current context ---- */

static CUresult enter(const esmm_cuda_device *device, esmm_cuda_scope *scope)
{
  CUcontext current = NULL;
  scope->pushed = false;
  if (cu()->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == device->primary)
    return CUDA_SUCCESS;
  const CUresult result = cu()->cuCtxPushCurrent(device->primary);
  scope->pushed = result == CUDA_SUCCESS;
  return result;
}

esmm_status esmm_cuda_enter(esmm_ctx *ctx, esmm_cuda_scope *scope)
{
  esmm_cuda_device *device = esmm_cuda_state(ctx)->device;
  scope->pushed = false;
  if (atomic_load(&device->lost))
    return fail_lost(ctx, device);
  if (esmm_cuda_state(ctx)->inside)
    return ESMM_OK;
  return esmm_cuda_check(ctx, enter(device, scope), "cuCtxPushCurrent");
}

void esmm_cuda_leave(esmm_cuda_scope scope)
{
  CUcontext popped = NULL;
  if (scope.pushed)
    (void)cu()->cuCtxPopCurrent(&popped);
}

/* ---- devices ---- */

static esmm_status read_properties(esmm_ctx *ctx, int ordinal, esmm_cuda_device *d)
{
  esmm_cuda_properties *p = &d->properties;
  memset(p, 0, sizeof *p);
  p->ordinal = ordinal;
  int major = 0, minor = 0, pools = 0;
  const struct {
    int attribute, *value;
  } wanted[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &p->multiprocessors},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &p->shared_per_block},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &p->shared_per_sm},
      {CU_DEVICE_ATTRIBUTE_MAX_PITCH, &p->max_pitch},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, &p->cooperative},
      {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, &pools},
  };
  esmm_status status = esmm_cuda_check(ctx, cu()->cuDeviceGet(&d->handle, ordinal), "cuDeviceGet of cuda:%d", ordinal);
  for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == ESMM_OK; i++)
    status = esmm_cuda_check(ctx, cu()->cuDeviceGetAttribute(wanted[i].value, wanted[i].attribute, d->handle),
                             "cuDeviceGetAttribute %d of cuda:%d", wanted[i].attribute, ordinal);
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuDeviceGetName(d->name, (int)sizeof d->name, d->handle),
                             "cuDeviceGetName of cuda:%d", ordinal);
  if (status != ESMM_OK)
    return status;
  d->name[sizeof d->name - 1] = '\0';
  p->sm = major * 10 + minor;
  d->pools = pools != 0;
  if (p->sm < LEAST_SM)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "cuda:%d (%.80s) is sm_%d; the kernels need sm_%d or later", ordinal,
                     d->name, p->sm, LEAST_SM);
  return ESMM_OK;
}

/* The first user's part; the lock is held. */
static esmm_status start_device(esmm_ctx *ctx, int ordinal, esmm_cuda_device *d)
{
  esmm_status status = read_properties(ctx, ordinal, d);
  if (status != ESMM_OK)
    return status;
  const CUresult result = cu()->cuDevicePrimaryCtxRetain(&d->primary, d->handle);
  if (result == CUDA_ERROR_DEVICE_UNAVAILABLE)
    return esmm_fail(ctx, ESMM_ERR_DEVICE,
                     "cuDevicePrimaryCtxRetain of cuda:%d: CUDA_ERROR_DEVICE_UNAVAILABLE: another process has it for "
                     "itself, or its compute mode allows none",
                     ordinal);
  status = esmm_cuda_check(ctx, result, "cuDevicePrimaryCtxRetain of cuda:%d", ordinal);
  if (status != ESMM_OK)
    return status;
  esmm_cuda_scope scope;
  status = esmm_cuda_check(ctx, enter(d, &scope), "cuCtxPushCurrent");
  if (status == ESMM_OK) {
    status = esmm_cuda_probe(ctx, d);
    if (status != ESMM_OK)
      esmm_cuda_unload(d);
    esmm_cuda_leave(scope);
  }
  if (status != ESMM_OK)
    (void)cu()->cuDevicePrimaryCtxRelease(d->handle);
  return status;
}

static void stop_device(esmm_cuda_device *d)
{
  esmm_cuda_scope scope;
  (void)enter(d, &scope);
  esmm_cuda_unload(d);
  esmm_cuda_leave(scope);
  (void)cu()->cuDevicePrimaryCtxRelease(d->handle);
  atomic_store(&d->lost, false); /* the next open gets a new primary context, or the driver's own error */
}

static esmm_status hold_device(esmm_ctx *ctx, int ordinal, esmm_cuda_device **out)
{
  esmm_cuda_device *d = &devices[ordinal];
  esmm_status status = ESMM_OK;
  (void)pthread_mutex_lock(&d->lock);
  if (d->users == 0)
    status = start_device(ctx, ordinal, d);
  else if (atomic_load(&d->lost))
    status = fail_lost(ctx, d);
  if (status == ESMM_OK)
    d->users++;
  (void)pthread_mutex_unlock(&d->lock);
  *out = status == ESMM_OK ? d : NULL;
  return status;
}

static void drop_device(esmm_cuda_device *d)
{
  (void)pthread_mutex_lock(&d->lock);
  if (--d->users == 0)
    stop_device(d);
  (void)pthread_mutex_unlock(&d->lock);
}

esmm_status esmm_cuda_count(esmm_ctx *ctx, int *count)
{
  *count = 0;
  if (!esmm_cuda_has_kernels())
    return esmm_fail(ctx, ESMM_ERR_DEVICE,
                     "this build has no GPU kernels: it was made without nvcc (not found, too old, or CUDA=0)");
  esmm_status status = esmm_cuda_driver_open(ctx);
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuDeviceGetCount(count), "cuDeviceGetCount");
  if (status == ESMM_OK && *count <= 0)
    status = esmm_fail(ctx, ESMM_ERR_DEVICE, "cuDeviceGetCount: the driver shows no GPU");
  if (*count > MAX_DEVICES)
    *count = MAX_DEVICES;
  return status;
}

static esmm_status choose_cooperative(esmm_ctx *ctx, bool *uncooperative)
{
  const char *env = getenv("ESMM_COOPERATIVE");
  *uncooperative = env && strcmp(env, "0") == 0;
  if (env && *env && strcmp(env, "0") != 0 && strcmp(env, "1") != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "ESMM_COOPERATIVE is '%.40s'; it must be 0 or 1", env);
  return ESMM_OK;
}

esmm_status esmm_cuda_open(esmm_ctx *ctx, int ordinal)
{
  int count = 0;
  bool uncooperative = false;
  esmm_status status = choose_cooperative(ctx, &uncooperative);
  if (status == ESMM_OK)
    status = esmm_cuda_count(ctx, &count);
  if (status != ESMM_OK)
    return status;
  if (ordinal < 0 || ordinal >= count)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "device is 'cuda:%d'; the driver shows %d GPU%s, the last is cuda:%d",
                     ordinal, count, count == 1 ? "" : "s", count - 1);
  (void)pthread_once(&devices_once, init_locks);
  esmm_cuda_device *device = NULL;
  status = hold_device(ctx, ordinal, &device);
  if (status != ESMM_OK)
    return status;
  struct esmm_cuda *cuda = esmm_mem_alloc(&ctx->allocator, sizeof *cuda);
  if (!cuda) {
    drop_device(device);
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a context's GPU part, %zu bytes", sizeof *cuda);
  }
  memset(cuda, 0, sizeof *cuda);
  cuda->device = device;
  cuda->uncooperative = uncooperative;
  ctx->state = cuda;
  esmm_cuda_scope scope;
  status = esmm_cuda_enter(ctx, &scope);
  if (status == ESMM_OK) {
    status = esmm_cuda_check(ctx, cu()->cuEventCreate(&cuda->done, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    esmm_cuda_leave(scope);
  }
  if (status != ESMM_OK) {
    esmm_cuda_close(ctx);
    return status;
  }
  (void)snprintf(ctx->device, sizeof ctx->device, "cuda:%d", ordinal);
  (void)snprintf(ctx->device_name, sizeof ctx->device_name, "%s", device->name);
  (void)snprintf(ctx->features, sizeof ctx->features, "sm_%d, %d SMs", device->properties.sm,
                 device->properties.multiprocessors);
  return ESMM_OK;
}

/*
 * An event between two kernels costs the GPU about as much as an empty kernel. The default stream is always there, so
 * its event is recorded when needed; another stream may be gone by then.
 */
static CUresult record_owed(struct esmm_cuda *cuda)
{
  const CUresult result = cuda->done_owed ? cu()->cuEventRecord(cuda->done, NULL) : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS)
    cuda->done_owed = false;
  return result;
}

/*
 * Waits for what may still use the context's memory. Work of a graph is in no event of ours, and freeing memory of a
 * pool waits for nothing: if anything was captured, waits for the whole device.
 */
static void wait_before_close(const struct esmm_cuda *cuda)
{
  if (cuda->scratch_captured || cuda->retired_count > 0)
    (void)cu()->cuCtxSynchronize();
  else if (cuda->done_owed)
    (void)cu()->cuStreamSynchronize(NULL);
  else if (cuda->done_recorded)
    (void)cu()->cuEventSynchronize(cuda->done);
}

/* What fails here fails because the device is lost, and then there is nothing left to free. */
void esmm_cuda_close(esmm_ctx *ctx)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  if (!cuda)
    return;
  esmm_cuda_scope scope;
  if (enter(cuda->device, &scope) == CUDA_SUCCESS)
    wait_before_close(cuda);
  for (int i = 0; i < MAX_ATTACHED; i++)
    if (cuda->attached[i].key)
      cuda->attached[i].release(cuda->attached[i].object);
  for (int i = 0; i < cuda->retired_count; i++)
    (void)cu()->cuMemFree(cuda->retired[i]);
  if (cuda->scratch)
    (void)cu()->cuMemFree(cuda->scratch);
  if (cuda->done)
    (void)cu()->cuEventDestroy(cuda->done);
  esmm_cuda_leave(scope);
  drop_device(cuda->device);
  ctx->state = NULL;
  esmm_mem_free(&ctx->allocator, cuda, sizeof *cuda);
}

const esmm_cuda_properties *esmm_cuda_get(const esmm_ctx *ctx)
{
  return &esmm_cuda_state(ctx)->device->properties;
}

/* ---- calls and their order ---- */

static esmm_status look_for_capture(esmm_ctx *ctx, CUstream stream, bool *capturing)
{
  int capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = cu()->cuStreamIsCapturing(stream, &capture);
  *capturing = capture != CU_STREAM_CAPTURE_STATUS_NONE;
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "a stream is being captured that the default stream waits for, and this call works on the default "
                     "stream: make it before or after the capture, or capture a stream that does not block");
  return esmm_cuda_check(ctx, result, "cuStreamIsCapturing");
}

static esmm_status order_streams(esmm_ctx *ctx, CUstream stream)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  esmm_status status = look_for_capture(ctx, stream, &cuda->capturing);
  if (status != ESMM_OK)
    return status;
  /* A captured call is ordered by its graph; it could not wait for work that is not in the graph. */
  if (cuda->capturing || !cuda->done_recorded)
    return ESMM_OK;
  /* Unlike the handle, an id is never that of a stream which has been destroyed. */
  status = esmm_cuda_check(ctx, cu()->cuStreamGetId(stream, &cuda->stream_id), "cuStreamGetId");
  cuda->stream_id_known = status == ESMM_OK;
  if (status != ESMM_OK || cuda->stream_id == cuda->done_stream)
    return status;
  status = esmm_cuda_check(ctx, record_owed(cuda), "cuEventRecord");
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuStreamWaitEvent(stream, cuda->done, 0), "cuStreamWaitEvent");
  return status;
}

/* The primary context stays current until the end, so that the work between finds it so. */
esmm_status esmm_cuda_begin(esmm_ctx *ctx, CUstream stream)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  cuda->capturing = cuda->inside = cuda->stream_id_known = false;
  esmm_status status = esmm_cuda_enter(ctx, &cuda->scope);
  if (status != ESMM_OK)
    return status;
  cuda->inside = true;
  status = order_streams(ctx, stream);
  if (status != ESMM_OK) {
    cuda->capturing = cuda->inside = false;
    esmm_cuda_leave(cuda->scope);
  }
  return status;
}

static CUresult note_done(struct esmm_cuda *cuda, CUstream stream, const char **call)
{
  *call = "cuStreamGetId";
  CUresult result = cuda->stream_id_known ? CUDA_SUCCESS : cu()->cuStreamGetId(stream, &cuda->stream_id);
  if (result == CUDA_SUCCESS && stream) {
    *call = "cuEventRecord";
    result = cu()->cuEventRecord(cuda->done, stream);
  }
  if (result == CUDA_SUCCESS) {
    cuda->done_stream = cuda->stream_id;
    cuda->done_recorded = true;
    cuda->done_owed = !stream;
  } else {
    (void)cu()->cuStreamSynchronize(stream); /* nothing can wait for this work later, so it is waited for now */
  }
  return result;
}

esmm_status esmm_cuda_end(esmm_ctx *ctx, CUstream stream, esmm_status status)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  if (!cuda->capturing && !atomic_load(&cuda->device->lost)) {
    const char *call = NULL;
    const CUresult result = note_done(cuda, stream, &call);
    if (status == ESMM_OK)
      status = esmm_cuda_check(ctx, result, "%s", call);
  }
  cuda->capturing = cuda->inside = false;
  esmm_cuda_leave(cuda->scope);
  return status;
}

bool esmm_cuda_lost(const esmm_ctx *ctx)
{
  return atomic_load(&esmm_cuda_state(ctx)->device->lost);
}

bool esmm_cuda_capturing(const esmm_ctx *ctx)
{
  return esmm_cuda_state(ctx)->capturing;
}

esmm_status esmm_cuda_refuse_capture(esmm_ctx *ctx, const char *what)
{
  if (!esmm_cuda_state(ctx)->capturing)
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "the stream is being captured, and %s cannot be part of a graph", what);
}

esmm_status esmm_cuda_synchronize(esmm_ctx *ctx)
{
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  if (esmm_cuda_state(ctx)->done_recorded)
    status = esmm_cuda_check(ctx, record_owed(esmm_cuda_state(ctx)), "cuEventRecord");
  if (esmm_cuda_state(ctx)->done_recorded && status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuEventSynchronize(esmm_cuda_state(ctx)->done), "cuEventSynchronize");
  esmm_cuda_leave(scope);
  return status;
}

void *esmm_cuda_attached(const esmm_ctx *ctx, const void *key)
{
  for (int i = 0; i < MAX_ATTACHED; i++)
    if (esmm_cuda_state(ctx)->attached[i].key == key)
      return esmm_cuda_state(ctx)->attached[i].object;
  return NULL;
}

esmm_status esmm_cuda_attach(esmm_ctx *ctx, const void *key, void *object, void (*release)(void *object))
{
  for (int i = 0; i < MAX_ATTACHED; i++)
    if (!esmm_cuda_state(ctx)->attached[i].key) {
      esmm_cuda_state(ctx)->attached[i].key = key;
      esmm_cuda_state(ctx)->attached[i].object = object;
      esmm_cuda_state(ctx)->attached[i].release = release;
      return ESMM_OK;
    }
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "a context has room for %d attached objects", MAX_ATTACHED);
}

/* ---- memory ---- */

esmm_status esmm_cuda_alloc(esmm_ctx *ctx, size_t bytes, CUdeviceptr *out)
{
  *out = 0;
  esmm_cuda_device *device = NULL;
  esmm_status status = hold_device(ctx, esmm_cuda_state(ctx)->device->properties.ordinal, &device);
  if (status != ESMM_OK)
    return status;
  esmm_cuda_scope scope;
  status = esmm_cuda_enter(ctx, &scope);
  if (status == ESMM_OK) {
    status = esmm_cuda_check(ctx, cu()->cuMemAlloc(out, bytes ? bytes : 1), "cuMemAlloc of %zu bytes", bytes);
    esmm_cuda_leave(scope);
  }
  if (status != ESMM_OK) {
    *out = 0;
    drop_device(device);
  }
  return status;
}

void esmm_cuda_free_at(int ordinal, CUdeviceptr ptr)
{
  if (!ptr)
    return;
  esmm_cuda_device *device = &devices[ordinal];
  esmm_cuda_scope scope;
  if (enter(device, &scope) == CUDA_SUCCESS && !atomic_load(&device->lost))
    (void)cu()->cuCtxSynchronize(); /* cuMemFree may wait for work that uses the memory, and need not */
  (void)cu()->cuMemFree(ptr);
  esmm_cuda_leave(scope);
  drop_device(device);
}

void esmm_cuda_free(esmm_ctx *ctx, CUdeviceptr ptr)
{
  esmm_cuda_free_at(esmm_cuda_state(ctx)->device->properties.ordinal, ptr);
}

/* Between begin and end, or with the primary context current. */
bool esmm_cuda_pin(size_t bytes, void **host, CUdeviceptr *device)
{
  void *memory = NULL;
  *host = NULL;
  *device = 0;
  if (cu()->cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) != CUDA_SUCCESS)
    return false;
  if (cu()->cuMemHostGetDevicePointer(device, memory, 0) == CUDA_SUCCESS) {
    *host = memory;
    return true;
  }
  (void)cu()->cuMemFreeHost(memory);
  return false;
}

void esmm_cuda_unpin_at(int ordinal, void *host)
{
  if (!host)
    return;
  esmm_cuda_device *device = &devices[ordinal];
  esmm_cuda_scope scope;
  if (enter(device, &scope) == CUDA_SUCCESS && !atomic_load(&device->lost))
    (void)cu()->cuCtxSynchronize(); /* a kernel may be about to write there */
  (void)cu()->cuMemFreeHost(host);
  esmm_cuda_leave(scope);
}

/* The old scratch goes first, so that the pool can give its memory again. What cannot be freed now is freed at close.
 */
static esmm_status give_scratch_back(esmm_ctx *ctx, CUstream stream)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  if (!cuda->scratch)
    return ESMM_OK;
  bool kept = cuda->scratch_captured;
  if (!kept && cuda->device->pools)
    kept = cu()->cuMemFreeAsync(cuda->scratch, stream) != CUDA_SUCCESS;
  else if (!kept)
    kept = cu()->cuStreamSynchronize(stream) != CUDA_SUCCESS;
  if (!kept && !cuda->device->pools)
    (void)cu()->cuMemFree(cuda->scratch); /* a failure that it reports is one of earlier work */
  if (kept) {
    if (cuda->retired_count == MAX_RETIRED)
      return esmm_fail(ctx, ESMM_ERR_DEVICE_MEMORY, "scratch was replaced %d times and could never be freed",
                       MAX_RETIRED);
    cuda->retired[cuda->retired_count++] = cuda->scratch;
  }
  cuda->scratch = 0;
  cuda->scratch_bytes = 0;
  cuda->scratch_captured = false;
  return ESMM_OK;
}

static CUresult get_scratch(struct esmm_cuda *cuda, size_t bytes, CUstream stream)
{
  CUdeviceptr ptr = 0;
  const CUresult result =
      cuda->device->pools ? cu()->cuMemAllocAsync(&ptr, bytes, stream) : cu()->cuMemAlloc(&ptr, bytes);
  if (result == CUDA_SUCCESS) {
    cuda->scratch = ptr;
    cuda->scratch_bytes = bytes;
  }
  return result;
}

static esmm_status grow_scratch(esmm_ctx *ctx, size_t bytes, CUstream stream)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  if (cuda->capturing)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "the stream is being captured, and this call needs %zu bytes of scratch where %zu are there: run "
                     "the same call once outside the capture",
                     bytes, cuda->scratch_bytes);
  const size_t half = cuda->scratch_bytes / 2;
  const size_t more = cuda->scratch_bytes + half > bytes ? cuda->scratch_bytes + half : bytes;
  esmm_status status = give_scratch_back(ctx, stream);
  if (status != ESMM_OK)
    return status;
  CUresult result = get_scratch(cuda, more, stream);
  if (result == CUDA_ERROR_OUT_OF_MEMORY && more > bytes)
    result = get_scratch(cuda, bytes, stream);
  return esmm_cuda_check(ctx, result, "%s of %zu bytes", cuda->device->pools ? "cuMemAllocAsync" : "cuMemAlloc", bytes);
}

esmm_status esmm_cuda_scratch(esmm_ctx *ctx, size_t bytes, CUstream stream, CUdeviceptr *out)
{
  struct esmm_cuda *cuda = esmm_cuda_state(ctx);
  esmm_status status = ESMM_OK;
  *out = 0;
  if (bytes > cuda->scratch_bytes) {
    esmm_cuda_scope scope;
    status = esmm_cuda_enter(ctx, &scope);
    if (status != ESMM_OK)
      return status;
    status = grow_scratch(ctx, bytes, stream);
    esmm_cuda_leave(scope);
  }
  if (status == ESMM_OK) {
    *out = cuda->scratch;
    cuda->scratch_captured = cuda->scratch_captured || cuda->capturing;
  }
  return status;
}

/* ---- copies ---- */

static esmm_status copy_line(esmm_ctx *ctx, const CUDA_MEMCPY2D *copy, size_t line, CUstream stream)
{
  const size_t bytes = copy->WidthInBytes, from = line * copy->srcPitch, to = line * copy->dstPitch;
  if (copy->dstMemoryType == CU_MEMORYTYPE_DEVICE)
    return esmm_cuda_check(
        ctx, cu()->cuMemcpyHtoDAsync(copy->dstDevice + to, (const char *)copy->srcHost + from, bytes, stream),
        "cuMemcpyHtoDAsync of %zu bytes", bytes);
  return esmm_cuda_check(ctx,
                         cu()->cuMemcpyDtoHAsync((char *)copy->dstHost + to, copy->srcDevice + from, bytes, stream),
                         "cuMemcpyDtoHAsync of %zu bytes", bytes);
}

/* Between host and device, and waits: the caller may reuse its memory when this returns. */
static esmm_status copy_host(esmm_ctx *ctx, const CUDA_MEMCPY2D *copy, CUstream stream)
{
  if (copy->WidthInBytes == 0 || copy->Height == 0)
    return ESMM_OK;
  const size_t most = (size_t)esmm_cuda_get(ctx)->max_pitch;
  const bool far = copy->srcPitch > most || copy->dstPitch > most; /* too far apart for a 2-D copy */
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_refuse_capture(ctx, "a copy of host memory");
  if (status == ESMM_OK)
    status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  if (copy->Height > 1 && !far)
    status = esmm_cuda_check(ctx, cu()->cuMemcpy2DAsync(copy, stream), "cuMemcpy2DAsync of %zu x %zu bytes %s",
                             copy->Height, copy->WidthInBytes,
                             copy->dstMemoryType == CU_MEMORYTYPE_DEVICE ? "to the device" : "to the host");
  else
    for (size_t line = 0; line < copy->Height && status == ESMM_OK; line++)
      status = copy_line(ctx, copy, line, stream);
  const CUresult waited = cu()->cuStreamSynchronize(stream); /* after a failure too: some lines may be under way */
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, waited, "cuStreamSynchronize after a copy of %zu x %zu bytes", copy->Height,
                             copy->WidthInBytes);
  esmm_cuda_leave(scope);
  return status;
}

esmm_status esmm_cuda_to_device_2d(esmm_ctx *ctx, CUdeviceptr dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                   size_t bytes, size_t rows, CUstream stream)
{
  const CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                              .srcHost = src,
                              .srcPitch = src_pitch,
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                              .dstDevice = dst,
                              .dstPitch = dst_pitch,
                              .WidthInBytes = bytes,
                              .Height = rows};
  return copy_host(ctx, &copy, stream);
}

esmm_status esmm_cuda_to_host_2d(esmm_ctx *ctx, void *dst, size_t dst_pitch, CUdeviceptr src, size_t src_pitch,
                                 size_t bytes, size_t rows, CUstream stream)
{
  const CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = src,
                              .srcPitch = src_pitch,
                              .dstMemoryType = CU_MEMORYTYPE_HOST,
                              .dstHost = dst,
                              .dstPitch = dst_pitch,
                              .WidthInBytes = bytes,
                              .Height = rows};
  return copy_host(ctx, &copy, stream);
}

esmm_status esmm_cuda_to_device(esmm_ctx *ctx, CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
  return esmm_cuda_to_device_2d(ctx, dst, bytes, src, bytes, bytes, 1, stream);
}

esmm_status esmm_cuda_to_host(esmm_ctx *ctx, void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
  return esmm_cuda_to_host_2d(ctx, dst, bytes, src, bytes, bytes, 1, stream);
}

esmm_status esmm_cuda_zero(esmm_ctx *ctx, CUdeviceptr dst, size_t bytes, CUstream stream)
{
  esmm_cuda_scope scope;
  esmm_status status = bytes ? esmm_cuda_enter(ctx, &scope) : ESMM_OK;
  if (status != ESMM_OK || bytes == 0)
    return status;
  status = esmm_cuda_check(ctx, cu()->cuMemsetD8Async(dst, 0, bytes, stream), "cuMemsetD8Async of %zu bytes", bytes);
  esmm_cuda_leave(scope);
  return status;
}

/* ---- events ---- */

esmm_status esmm_cuda_event_create(esmm_ctx *ctx, CUevent *out)
{
  *out = NULL;
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_check(ctx, cu()->cuEventCreate(out, CU_EVENT_DEFAULT), "cuEventCreate");
  if (status != ESMM_OK)
    *out = NULL;
  esmm_cuda_leave(scope);
  return status;
}

void esmm_cuda_event_free_at(int ordinal, CUevent event)
{
  if (!event)
    return;
  esmm_cuda_scope scope;
  (void)enter(&devices[ordinal], &scope);
  (void)cu()->cuEventDestroy(event);
  esmm_cuda_leave(scope);
}

void esmm_cuda_event_free(esmm_ctx *ctx, CUevent event)
{
  esmm_cuda_event_free_at(esmm_cuda_state(ctx)->device->properties.ordinal, event);
}

esmm_status esmm_cuda_event_wait(esmm_ctx *ctx, CUevent event)
{
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_check(ctx, cu()->cuEventSynchronize(event), "cuEventSynchronize");
  esmm_cuda_leave(scope);
  return status;
}

esmm_status esmm_cuda_event_record(esmm_ctx *ctx, CUevent event, CUstream stream)
{
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_check(ctx, cu()->cuEventRecord(event, stream), "cuEventRecord");
  esmm_cuda_leave(scope);
  return status;
}

esmm_status esmm_cuda_event_seconds(esmm_ctx *ctx, CUevent from, CUevent to, double *seconds)
{
  *seconds = 0;
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  float milliseconds = 0;
  status = esmm_cuda_check(ctx, cu()->cuEventSynchronize(to), "cuEventSynchronize");
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuEventElapsedTime(&milliseconds, from, to), "cuEventElapsedTime");
  esmm_cuda_leave(scope);
  if (status == ESMM_OK)
    *seconds = 1e-3 * (double)milliseconds;
  return status;
}

esmm_status esmm_cuda_timer_create(esmm_ctx *ctx, esmm_cuda_timer *timer)
{
  timer->stop = NULL;
  esmm_status status = esmm_cuda_event_create(ctx, &timer->start);
  if (status == ESMM_OK)
    status = esmm_cuda_event_create(ctx, &timer->stop);
  if (status != ESMM_OK)
    esmm_cuda_timer_free(ctx, timer);
  return status;
}

void esmm_cuda_timer_free(esmm_ctx *ctx, esmm_cuda_timer *timer)
{
  esmm_cuda_event_free(ctx, timer->start);
  esmm_cuda_event_free(ctx, timer->stop);
  timer->start = timer->stop = NULL;
}

/* An event of a graph has no time that could be asked for. */
static esmm_status record_time(esmm_ctx *ctx, CUevent event, CUstream stream)
{
  bool capturing = false;
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = look_for_capture(ctx, stream, &capturing);
  if (status == ESMM_OK && capturing)
    status =
        esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "the stream is being captured, and a timer cannot be part of a graph");
  if (status == ESMM_OK)
    status = esmm_cuda_check(ctx, cu()->cuEventRecord(event, stream), "cuEventRecord");
  esmm_cuda_leave(scope);
  return status;
}

esmm_status esmm_cuda_timer_start(esmm_ctx *ctx, esmm_cuda_timer *timer, CUstream stream)
{
  return record_time(ctx, timer->start, stream);
}

esmm_status esmm_cuda_timer_stop(esmm_ctx *ctx, esmm_cuda_timer *timer, CUstream stream)
{
  return record_time(ctx, timer->stop, stream);
}

esmm_status esmm_cuda_timer_seconds(esmm_ctx *ctx, esmm_cuda_timer *timer, double *seconds)
{
  return esmm_cuda_event_seconds(ctx, timer->start, timer->stop, seconds);
}
