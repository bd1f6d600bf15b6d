/*
 * fake_cuda.c: libcuda.so.1 for tests. Device memory is malloc's, copies are memcpy, streams are in order because
 * everything happens at once, kernels are counted and do nothing. It is libcublas too, as far as the library calls it.
 *
 * It checks what a driver cannot forgive: a call without a current context, memory it never gave, a copy that runs over
 * its end. See fake_cuda.h for what a test can make it do.
 */
#include "fake_cuda.h"
#include "cuda/device/driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
#define ALIGN 256
#define STACK 16
#define MAX_PITCH INT32_MAX
#define MAPPED ((size_t)1 << 20) /* blocks of so many bytes are pages of their own, which take memory once written, */
#define BEHIND 4096              /* and there is so much behind them that is no block's */

enum { ERROR_INVALID_CONTEXT = 201, ERROR_INVALID_DEVICE = 101, ERROR_NOT_FOUND = 500, ERROR_UNKNOWN = 999 };

static uint64_t base_of(uint64_t address);

extern fake_cuda_state fake_cuda;
EXPORT fake_cuda_state fake_cuda = {
    .version = 12040, .devices = 1, .sm = 90, .pools = 1, .memory = (size_t)1 << 30, .base_of = base_of};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct block {
  struct block *next;
  char *data;
  size_t bytes;
} block;
static block *blocks, *pinned;

/* A primary context is the address of its device's entry. */
static struct CUctx_st {
  int ordinal;
} contexts[8];
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;
static _Thread_local int capture_mode; /* 0, as a thread starts: what is unsafe while any stream is captured fails */

/* Handles of modules, functions and events: their addresses are all that counts. */
struct CUmod_st {
  int unused;
};
struct CUfunc_st {
  char name[128];
};
struct CUevent_st {
  int recorded, captured;
  double at; /* when all before it has been done */
};
static struct CUfunc_st functions[1024];
static int function_count;

static CUresult mistake(const char *call, const char *what, CUresult result)
{
  fake_cuda.mistakes++;
  snprintf(fake_cuda.mistake, sizeof fake_cuda.mistake, "%s: %s", call, what);
  return result;
}

/* When all that was launched so far has been done. */
static double gpu_ends(void)
{
  if (!fake_cuda.takes)
    return 0.0;
  if (fake_cuda.gpu < fake_cuda.host)
    fake_cuda.gpu = fake_cuda.host;
  return fake_cuda.gpu += fake_cuda.takes();
}

/* The host waits. */
static void wait_until(double when)
{
  if (fake_cuda.host < when)
    fake_cuda.host = when;
}

/* Counts a call; the result that it must fail with, or success. */
static CUresult count(const char *call)
{
  fake_cuda.calls++;
  fake_cuda.host += fake_cuda.per_call;
  if (fake_cuda.sticky)
    return fake_cuda.sticky;
  const int now = fake_cuda.fail_at > 0 && --fake_cuda.fail_at == 0;
  if (!now && !(fake_cuda.fail_call && strcmp(fake_cuda.fail_call, call) == 0))
    return CUDA_SUCCESS;
  fake_cuda.failed = call;
  if (fake_cuda.result == CUDA_ERROR_ILLEGAL_ADDRESS)
    fake_cuda.sticky = fake_cuda.result;
  return fake_cuda.result;
}

/* The same for a call that needs a current context. */
static CUresult count_current(const char *call)
{
  const CUresult result = count(call);
  if (result == CUDA_SUCCESS && (depth == 0 || !stack[depth - 1]))
    return mistake(call, "no context is current", ERROR_INVALID_CONTEXT);
  return result;
}

/* Does a capture forbid this thread to allocate, or to query an event? */
static int capture_forbids(void)
{
  return fake_cuda.captured && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
}

/* past: an address just behind a block is the block's, too. */
static block *find_in(block *first, CUdeviceptr at, int past)
{
  for (block *b = first; b; b = b->next) {
    const CUdeviceptr begin = (CUdeviceptr)(uintptr_t)b->data;
    if (at >= begin && at < begin + b->bytes + (past != 0))
      return b;
  }
  return NULL;
}

static block *find_block(CUdeviceptr at)
{
  return find_in(blocks, at, 0);
}

/* Without the lock: a kernel or a product by cuBLAS asks, and the driver does nothing else meanwhile. No block begins
   where another ends. */
static uint64_t base_of(uint64_t address)
{
  const block *b = find_in(blocks, address, 1), *other = b ? b : find_in(pinned, address, 1);
  return other ? (uint64_t)(uintptr_t)other->data : 0;
}

/* The host address of `bytes` bytes of device memory, or NULL where they are not all in one block. */
static char *memory_at(const char *call, CUdeviceptr at, size_t bytes)
{
  const block *b = find_block(at);
  const size_t offset = b ? (size_t)(at - (CUdeviceptr)(uintptr_t)b->data) : 0;
  if (b && bytes <= b->bytes - offset)
    return b->data + offset;
  (void)mistake(call, "memory that was never given, or beyond its end", CUDA_ERROR_INVALID_VALUE);
  return NULL;
}

/* Zeros: kernels that do nothing leave these behind, so that tests see the same each time. NULL: there is no memory. */
static void *zeros(size_t bytes)
{
  void *data = NULL;
  if (bytes >= MAPPED) {
    data = mmap(NULL, bytes + BEHIND, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? NULL : data;
  }
  if (posix_memalign(&data, ALIGN, bytes) != 0)
    return NULL;
  return memset(data, 0, bytes);
}

static void free_zeros(void *data, size_t bytes)
{
  if (bytes >= MAPPED)
    (void)munmap(data, bytes + BEHIND);
  else
    free(data);
}

static CUresult take(CUdeviceptr *ptr, size_t bytes)
{
  if (bytes == 0)
    return mistake("allocation", "0 bytes", CUDA_ERROR_INVALID_VALUE);
  if ((size_t)fake_cuda.bytes + bytes > fake_cuda.memory)
    return CUDA_ERROR_OUT_OF_MEMORY;
  block *b = malloc(sizeof *b);
  void *data = b ? zeros(bytes) : NULL;
  if (!data) {
    free(b);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *b = (block){.next = blocks, .data = data, .bytes = bytes};
  blocks = b;
  fake_cuda.blocks++;
  fake_cuda.bytes += (int64_t)bytes;
  fake_cuda.allocations++;
  *ptr = (CUdeviceptr)(uintptr_t)data;
  return CUDA_SUCCESS;
}

static CUresult give(const char *call, CUdeviceptr ptr)
{
  if (fake_cuda.running)
    (void)mistake(call, "work of a graph may still use this memory", CUDA_SUCCESS);
  for (block **at = &blocks; *at; at = &(*at)->next) {
    block *b = *at;
    if ((CUdeviceptr)(uintptr_t)b->data != ptr)
      continue;
    *at = b->next;
    fake_cuda.blocks--;
    fake_cuda.bytes -= (int64_t)b->bytes;
    free_zeros(b->data, b->bytes);
    free(b);
    return CUDA_SUCCESS;
  }
  return mistake(call, "memory that was never given", CUDA_ERROR_INVALID_VALUE);
}

/* Each entry point under the lock: `body` runs where the call does not fail. */
#define CALL(name, symbol, params, begin, body) \
  EXPORT CUresult symbol params;                \
  CUresult symbol params                        \
  {                                             \
    (void)pthread_mutex_lock(&lock);            \
    CUresult result = begin(name);              \
    if (result == CUDA_SUCCESS) {               \
      body                                      \
    }                                           \
    (void)pthread_mutex_unlock(&lock);          \
    return result;                              \
  }

/* What gives something back does so even where it reports a failure: in a real driver, that is of earlier work. */
#define RELEASE(name, symbol, params, body)         \
  EXPORT CUresult symbol params;                    \
  CUresult symbol params                            \
  {                                                 \
    (void)pthread_mutex_lock(&lock);                \
    CUresult result = count(name), given = 0;       \
    body(void) pthread_mutex_unlock(&lock);         \
    return result == CUDA_SUCCESS ? given : result; \
  }

EXPORT CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuGetErrorName(CUresult error, const char **name)
{
  static const struct {
    int value;
    const char *name;
  } names[] = {
      {1, "CUDA_ERROR_INVALID_VALUE"},
      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
      {100, "CUDA_ERROR_NO_DEVICE"},
      {101, "CUDA_ERROR_INVALID_DEVICE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {500, "CUDA_ERROR_NOT_FOUND"},
      {600, "CUDA_ERROR_NOT_READY"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
      {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
      {907, "CUDA_ERROR_CAPTURED_EVENT"},
      {999, "CUDA_ERROR_UNKNOWN"},
  };
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (names[i].value == error) {
      *name = names[i].name;
      return CUDA_SUCCESS;
    }
  *name = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuInit(unsigned flags);
EXPORT CUresult cuDriverGetVersion(int *version);

CUresult cuInit(unsigned flags)
{
  (void)pthread_mutex_lock(&lock);
  CUresult result = flags == 0 ? count("cuInit") : CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && fake_cuda.devices == 0)
    result = CUDA_ERROR_NO_DEVICE;
  (void)pthread_mutex_unlock(&lock);
  return result;
}

CUresult cuDriverGetVersion(int *version)
{
  *version = fake_cuda.version;
  return CUDA_SUCCESS;
}

CALL("cuDeviceGetCount", cuDeviceGetCount, (int *devices), count, { *devices = fake_cuda.devices; })

CALL("cuDeviceGet", cuDeviceGet, (CUdevice * device, int ordinal), count, {
  *device = ordinal;
  result = ordinal >= 0 && ordinal < fake_cuda.devices ? CUDA_SUCCESS : ERROR_INVALID_DEVICE;
})

CALL("cuDeviceGetName", cuDeviceGetName, (char *name, int bytes, CUdevice device), count,
     { snprintf(name, (size_t)bytes, "Fake GPU %d", device); })

/* The library does not call it: the command does, to find the same GPU in NVML. */
EXPORT CUresult cuDeviceGetPCIBusId(char *bus, int bytes, CUdevice device);
CUresult cuDeviceGetPCIBusId(char *bus, int bytes, CUdevice device)
{
  snprintf(bus, (size_t)bytes, "0000:%02X:00.0", device + 1);
  return CUDA_SUCCESS;
}

static int attribute_value(int attribute, CUdevice device)
{
  const int sm = device == 0 && fake_cuda.first_sm ? fake_cuda.first_sm : fake_cuda.sm;
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    return 132;
  case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
    return MAX_PITCH;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    return sm / 10;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    return sm % 10;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    return 228 << 10;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    return 227 << 10;
  case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    return 1;
  case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    return fake_cuda.pools;
  default:
    return 0;
  }
}

CALL("cuDeviceGetAttribute", cuDeviceGetAttribute, (int *value, int attribute, CUdevice device), count,
     { *value = attribute_value(attribute, device); })

CALL("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), count, {
  *context = &contexts[device];
  fake_cuda.retained++;
})

RELEASE("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2, (CUdevice device), {
  (void)device;
  fake_cuda.retained--;
})

CALL("cuCtxGetCurrent", cuCtxGetCurrent, (CUcontext * context), count,
     { *context = depth > 0 ? stack[depth - 1] : NULL; })

CALL("cuCtxPushCurrent", cuCtxPushCurrent_v2, (CUcontext context), count, {
  if (depth == STACK)
    result = mistake("cuCtxPushCurrent", "too deep", CUDA_ERROR_INVALID_VALUE);
  else
    stack[depth++] = context;
})

RELEASE("cuCtxPopCurrent", cuCtxPopCurrent_v2, (CUcontext * context), {
  if (depth == 0)
    given = mistake("cuCtxPopCurrent", "nothing was pushed", ERROR_INVALID_CONTEXT);
  else
    *context = stack[--depth];
})

CALL("cuCtxSynchronize", cuCtxSynchronize, (void), count_current, {
  fake_cuda.running = 0;
  wait_until(gpu_ends());
  if (fake_cuda.captured)
    result = mistake("cuCtxSynchronize", "a stream is being captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
})

CALL("cuModuleLoadData", cuModuleLoadData, (CUmodule * module, const void *image), count_current, {
  *module = image ? malloc(sizeof **module) : NULL;
  result = *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  fake_cuda.modules += *module != NULL;
})

RELEASE("cuModuleUnload", cuModuleUnload, (CUmodule module), {
  free(module);
  fake_cuda.modules--;
})

CALL("cuModuleGetFunction", cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name),
     count_current, {
       (void)module;
       *function = &functions[function_count++ % 1024];
       snprintf((*function)->name, sizeof(*function)->name, "%s", name);
     })

CALL("cuFuncSetAttribute", cuFuncSetAttribute, (CUfunction function, int attribute, int value), count_current, {
  (void)function;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 227 << 10)
    result = mistake("cuFuncSetAttribute", "an attribute or value that no GPU has", CUDA_ERROR_INVALID_VALUE);
})

CALL("cuOccupancyMaxActiveBlocksPerMultiprocessor", cuOccupancyMaxActiveBlocksPerMultiprocessor,
     (int *count_of_blocks, CUfunction function, int threads, size_t shared), count_current, {
       (void)function;
       (void)threads;
       (void)shared;
       *count_of_blocks = 1;
     })

/* Counts a launch's attributes. A grid is whole clusters, and those are of 8 blocks at most. */
static int take_attributes(const CUlaunchConfig *config)
{
  fake_cuda.launch = (fake_launch){.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                                   .threads = config->blockDimX,
                                   .shared = config->sharedMemBytes};
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config->attrs[i].value.cooperative)
      fake_cuda.cooperative += fake_cuda.launch.cooperative = 1;
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      fake_cuda.clusters++;
      const unsigned x = fake_cuda.launch.cluster = config->attrs[i].value.cluster.x;
      if (x == 0 || x > 8 || config->gridDimX % x != 0)
        return 0;
    }
  }
  return 1;
}

CALL("cuLaunchKernelEx", cuLaunchKernelEx,
     (const CUlaunchConfig *config, CUfunction function, void **params, void **extra), count_current, {
       (void)extra;
       fake_cuda.launches++;
       if (config->gridDimX == 0 || config->gridDimY == 0 || config->gridDimZ == 0 || config->gridDimY > 65535 ||
           config->gridDimZ > 65535 || config->blockDimX == 0 || config->blockDimX > 1024 ||
           config->sharedMemBytes > 227 << 10 || !take_attributes(config))
         result = mistake("cuLaunchKernelEx", "a grid or block that no GPU takes", CUDA_ERROR_INVALID_VALUE);
       else if (fake_cuda.kernel)
         fake_cuda.kernel(function->name, params[0]);
     })

CALL("cuMemAlloc", cuMemAlloc_v2, (CUdeviceptr * ptr, size_t bytes), count_current, {
  if (capture_forbids()) /* it would end the capture */
    result = mistake("cuMemAlloc", "a stream is being captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  else
    result = take(ptr, bytes);
})
CALL("cuMemAllocAsync", cuMemAllocAsync, (CUdeviceptr * ptr, size_t bytes, CUstream stream), count_current, {
  if (fake_cuda.captured && stream == fake_cuda.captured)
    result = mistake("cuMemAllocAsync", "the stream is being captured", CUDA_ERROR_INVALID_VALUE);
  else
    result = take(ptr, bytes);
})
RELEASE("cuMemFree", cuMemFree_v2, (CUdeviceptr ptr), { given = give("cuMemFree", ptr); })
RELEASE("cuMemFreeAsync", cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream), {
  (void)stream;
  if (result == CUDA_SUCCESS) /* this one comes back to the caller, who must try again */
    given = give("cuMemFreeAsync", ptr);
})

/* Host memory that the device sees, too; NULL: there is none. */
static void *pin(size_t bytes)
{
  block *b = malloc(sizeof *b);
  void *data = b ? calloc(1, bytes) : NULL;
  if (!data) {
    free(b);
    return NULL;
  }
  *b = (block){.next = pinned, .data = data, .bytes = bytes};
  pinned = b;
  return data;
}

static void unpin(void *host)
{
  for (block **at = &pinned; *at; at = &(*at)->next)
    if ((*at)->data == host) {
      block *b = *at;
      *at = b->next;
      free(b);
      break;
    }
  free(host);
}

CALL("cuMemHostAlloc", cuMemHostAlloc, (void **host, size_t bytes, unsigned flags), count_current, {
  if (capture_forbids())
    result = mistake("cuMemHostAlloc", "a stream is being captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  else if (bytes == 0 || flags & ~3u)
    result = mistake("cuMemHostAlloc", "0 bytes, or flags that there are not", CUDA_ERROR_INVALID_VALUE);
  else
    *host = pin(bytes);
  if (result == CUDA_SUCCESS && !*host)
    result = CUDA_ERROR_OUT_OF_MEMORY;
  fake_cuda.pinned += result == CUDA_SUCCESS;
})
CALL("cuMemHostGetDevicePointer", cuMemHostGetDevicePointer_v2, (CUdeviceptr * ptr, void *host, unsigned flags),
     count_current, {
       *ptr = (CUdeviceptr)(uintptr_t)host;
       if (flags != 0)
         result = mistake("cuMemHostGetDevicePointer", "flags, which must be 0", CUDA_ERROR_INVALID_VALUE);
     })
RELEASE("cuMemFreeHost", cuMemFreeHost, (void *host), {
  unpin(host);
  fake_cuda.pinned--;
})

CALL("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream),
     count_current, {
       (void)stream;
       char *to = memory_at("cuMemcpyHtoDAsync", dst, bytes);
       if (to)
         memcpy(to, src, bytes);
       result = to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
     })

CALL("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream),
     count_current, {
       (void)stream;
       const char *from = memory_at("cuMemcpyDtoHAsync", src, bytes);
       if (from)
         memcpy(dst, from, bytes);
       result = from ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
     })

static CUresult copy_2d(const CUDA_MEMCPY2D *c)
{
  if (c->WidthInBytes > c->srcPitch || c->WidthInBytes > c->dstPitch || c->srcXInBytes || c->srcY || c->dstXInBytes ||
      c->dstY)
    return mistake("cuMemcpy2DAsync", "lines longer than their pitch, or an offset", CUDA_ERROR_INVALID_VALUE);
  if (c->srcPitch > MAX_PITCH || c->dstPitch > MAX_PITCH)
    return mistake("cuMemcpy2DAsync", "lines farther apart than a GPU's largest pitch", CUDA_ERROR_INVALID_VALUE);
  const size_t from_bytes = (c->Height - 1) * c->srcPitch + c->WidthInBytes,
               to_bytes = (c->Height - 1) * c->dstPitch + c->WidthInBytes;
  const char *from =
      c->srcMemoryType == CU_MEMORYTYPE_HOST ? c->srcHost : memory_at("cuMemcpy2DAsync", c->srcDevice, from_bytes);
  char *to = c->dstMemoryType == CU_MEMORYTYPE_HOST ? c->dstHost : memory_at("cuMemcpy2DAsync", c->dstDevice, to_bytes);
  if (!from || !to)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t row = 0; row < c->Height; row++)
    memcpy(to + row * c->dstPitch, from + row * c->srcPitch, c->WidthInBytes);
  return CUDA_SUCCESS;
}

CALL("cuMemcpy2DAsync", cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), count_current, {
  (void)stream;
  result = copy_2d(copy);
})

CALL("cuMemsetD8Async", cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream),
     count_current, {
       (void)stream;
       char *to = memory_at("cuMemsetD8Async", dst, bytes);
       if (to)
         memset(to, value, bytes);
       result = to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
     })

CALL("cuStreamSynchronize", cuStreamSynchronize, (CUstream stream), count_current, {
  fake_cuda.synchronizations++;
  wait_until(gpu_ends());
  if (fake_cuda.captured && stream == fake_cuda.captured)
    result = mistake("cuStreamSynchronize", "the stream is being captured", CUDA_ERROR_INVALID_VALUE);
})

CALL("cuStreamIsCapturing", cuStreamIsCapturing, (CUstream stream, int *status), count_current, {
  *status = fake_cuda.captured && stream == fake_cuda.captured;
  if (fake_cuda.captured && fake_cuda.blocking && !stream)
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
})

/* A thread comes out of the relaxed mode even where the call reports a failure: as with RELEASE. */
EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode);
CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
  (void)pthread_mutex_lock(&lock);
  const int was = capture_mode, next = *mode;
  CUresult result = count("cuThreadExchangeStreamCaptureMode");
  if (next < 0 || next > CU_STREAM_CAPTURE_MODE_RELAXED)
    result = mistake("cuThreadExchangeStreamCaptureMode", "a mode that there is not", CUDA_ERROR_INVALID_VALUE);
  else if (result == CUDA_SUCCESS || next != CU_STREAM_CAPTURE_MODE_RELAXED) {
    capture_mode = next;
    *mode = was;
    fake_cuda.relaxed += (next == CU_STREAM_CAPTURE_MODE_RELAXED) - (was == CU_STREAM_CAPTURE_MODE_RELAXED);
  }
  (void)pthread_mutex_unlock(&lock);
  return result;
}

CALL("cuStreamGetId", cuStreamGetId, (CUstream stream, unsigned long long *id), count_current,
     { *id = (unsigned long long)(uintptr_t)stream; })

CALL("cuStreamWaitEvent", cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), count_current, {
  (void)stream;
  (void)flags;
  fake_cuda.waits++;
  if (!event->recorded)
    result = mistake("cuStreamWaitEvent", "an event that was never recorded", CUDA_ERROR_INVALID_VALUE);
})

CALL("cuEventCreate", cuEventCreate, (CUevent * event, unsigned flags), count_current, {
  (void)flags;
  *event = calloc(1, sizeof **event);
  fake_cuda.events += *event != NULL;
})

RELEASE("cuEventDestroy", cuEventDestroy_v2, (CUevent event), {
  free(event);
  fake_cuda.events--;
})

CALL("cuEventRecord", cuEventRecord, (CUevent event, CUstream stream), count_current, {
  event->recorded = 1;
  event->captured = fake_cuda.captured && stream == fake_cuda.captured;
  event->at = event->captured ? 0.0 : gpu_ends();
  fake_cuda.records++;
})

/* An event that was never recorded is over, too. */
CALL("cuEventQuery", cuEventQuery, (CUevent event), count_current, {
  if (capture_forbids())
    result = mistake("cuEventQuery", "a stream is being captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (event->captured)
    result = mistake("cuEventQuery", "an event of a graph", CUDA_ERROR_CAPTURED_EVENT);
  if (result == CUDA_SUCCESS && event->at > fake_cuda.host)
    result = CUDA_ERROR_NOT_READY;
})

CALL("cuEventSynchronize", cuEventSynchronize, (CUevent event), count_current, {
  fake_cuda.synchronizations++;
  wait_until(event->at);
  if (fake_cuda.captured)
    result = mistake("cuEventSynchronize", "a stream is being captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (event->captured)
    result = mistake("cuEventSynchronize", "an event of a graph", CUDA_ERROR_CAPTURED_EVENT);
})

CALL("cuEventElapsedTime", cuEventElapsedTime, (float *milliseconds, CUevent from, CUevent to), count_current, {
  *milliseconds = fake_cuda.takes ? (float)(1e3 * (to->at - from->at)) : 1.5F;
  if (!from->recorded || !to->recorded)
    result = mistake("cuEventElapsedTime", "an event that was never recorded", CUDA_ERROR_INVALID_VALUE);
  if (from->captured || to->captured)
    result = mistake("cuEventElapsedTime", "an event of a graph", CUDA_ERROR_CAPTURED_EVENT);
})

CALL("cuTensorMapEncodeTiled", cuTensorMapEncodeTiled,
     (void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
      const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion, int fill),
     count, {
       fake_tensor_map *to = map;
       memset(to, 0, sizeof *to);
       to->address = (uint64_t)(uintptr_t)address;
       to->cols = (int64_t)dims[0];
       to->rows = (int64_t)dims[1];
       to->pitch = (int64_t)strides[0];
       to->box_cols = box[0];
       to->box_rows = box[1];
       to->type = type;
       to->interleave = interleave;
       to->swizzle = swizzle;
       to->promotion = promotion;
       to->fill = fill;
       const uint32_t size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
       const uint32_t widest = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 / size : 256;
       if (rank != 2 || (uintptr_t)address % 16 || strides[0] % 16 || dims[0] == 0 || dims[1] == 0 || box[0] == 0 ||
           box[0] > widest || box[0] * size % 16 || box[1] == 0 || box[1] > 256 || element_strides[0] != 1 ||
           element_strides[1] != 1)
         result = mistake("cuTensorMapEncodeTiled", "a map that no GPU takes", CUDA_ERROR_INVALID_VALUE);
     })

/* ---- cuBLAS: what the library calls of it, in the same file. It needs a current context, and does nothing. ---- */

enum { CUBLAS_NOT_INITIALIZED = 1, CUBLAS_INVALID_VALUE = 7 };

EXPORT int cublasCreate_v2(void **handle);
EXPORT int cublasDestroy_v2(void *handle);
EXPORT int cublasSetMathMode(void *handle, int mode);
EXPORT int cublasSetStream_v2(void *handle, CUstream stream);
EXPORT int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes);
EXPORT int cublasSgemm_v2(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const float *a,
                          int lda, const float *b, int ldb, const float *beta, float *c, int ldc);
EXPORT int cublasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                        int a_type, int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type,
                        int ldc, int compute, int algorithm);
EXPORT const char *cublasGetStatusName(int status);

/* 0, or what is wrong with such a call. */
static int cublas_status(const char *call, const void *handle)
{
  (void)pthread_mutex_lock(&lock);
  const int bad = !handle || depth == 0;
  if (bad)
    (void)mistake(call, handle ? "no context is current" : "no handle", 0);
  (void)pthread_mutex_unlock(&lock);
  return bad ? CUBLAS_INVALID_VALUE : 0;
}

static fake_gemm handle_has; /* the workspace and the mode that a handle was given last */

static uint64_t address_of(const void *pointer)
{
  return (uint64_t)(uintptr_t)pointer;
}

static void note_gemm(const char *call, fake_gemm g)
{
  if (!fake_cuda.gemm)
    return;
  g.workspace = handle_has.workspace;
  g.math_mode = handle_has.math_mode;
  fake_cuda.gemm(call, &g);
}

static void add(int64_t *what, int by)
{
  (void)pthread_mutex_lock(&lock);
  *what += by;
  (void)pthread_mutex_unlock(&lock);
}

int cublasCreate_v2(void **handle)
{
  const int status = fake_cuda.cublas ? fake_cuda.cublas : cublas_status("cublasCreate", handle);
  *handle = status == 0 ? &fake_cuda : NULL;
  add(&fake_cuda.handles, status == 0);
  return status;
}

int cublasDestroy_v2(void *handle)
{
  add(&fake_cuda.handles, -1);
  return cublas_status("cublasDestroy", handle);
}

int cublasSetMathMode(void *handle, int mode)
{
  (void)pthread_mutex_lock(&lock);
  handle_has.math_mode = mode;
  (void)pthread_mutex_unlock(&lock);
  return cublas_status("cublasSetMathMode", handle);
}

int cublasSetStream_v2(void *handle, CUstream stream)
{
  (void)stream;
  return cublas_status("cublasSetStream", handle);
}

int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes)
{
  (void)pthread_mutex_lock(&lock);
  (void)memory_at("cublasSetWorkspace", (CUdeviceptr)(uintptr_t)workspace, bytes);
  handle_has.workspace = address_of(workspace);
  (void)pthread_mutex_unlock(&lock);
  return cublas_status("cublasSetWorkspace", handle);
}

int cublasSgemm_v2(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const float *a, int lda,
                   const float *b, int ldb, const float *beta, float *c, int ldc)
{
  add(&fake_cuda.sgemms, 1);
  if (!alpha || !beta || !a || !b || !c || lda < (op_a ? k : m) || ldb < (op_b ? n : k) || ldc < m)
    return CUBLAS_INVALID_VALUE;
  note_gemm("cublasSgemm", (fake_gemm){.a = address_of(a),
                                       .b = address_of(b),
                                       .c = address_of(c),
                                       .op_a = op_a,
                                       .op_b = op_b,
                                       .m = m,
                                       .n = n,
                                       .k = k,
                                       .lda = lda,
                                       .ldb = ldb,
                                       .ldc = ldc,
                                       .alpha = *alpha,
                                       .beta = *beta});
  return cublas_status("cublasSgemm", handle);
}

/* Where op(x) is 16-bit [rows, cols]: its first and last element lie in device memory. */
static int operand_16(const void *x, int op, int rows, int cols, int ld)
{
  const size_t lines = (size_t)(op ? rows : cols), width = (size_t)(op ? cols : rows);
  if (!x || ld < (int)width)
    return 0;
  (void)pthread_mutex_lock(&lock);
  const char *there =
      memory_at("cublasGemmEx", (CUdeviceptr)(uintptr_t)x, sizeof(uint16_t) * ((lines - 1) * (size_t)ld + width));
  (void)pthread_mutex_unlock(&lock);
  return there != NULL;
}

int cublasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                 int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                 int compute, int algorithm)
{
  enum { F32 = 0, F16 = 2, BF16 = 14, COMPUTE_32F = 68, DEFAULT = -1 };
  add(&fake_cuda.gemms, 1);
  if (!alpha || !beta || !operand_16(a, op_a, m, k, lda) || !operand_16(b, op_b, k, n, ldb) ||
      !operand_16(c, 0, m, n, ldc) || (a_type != F16 && a_type != BF16) || b_type != a_type ||
      (c_type != a_type && c_type != F32) || compute != COMPUTE_32F || algorithm != DEFAULT)
    return CUBLAS_INVALID_VALUE;
  fake_gemm g = {.a = address_of(a),
                 .b = address_of(b),
                 .c = address_of(c),
                 .op_a = op_a,
                 .op_b = op_b,
                 .m = m,
                 .n = n,
                 .k = k,
                 .lda = lda,
                 .ldb = ldb,
                 .ldc = ldc,
                 .a_type = a_type,
                 .b_type = b_type,
                 .c_type = c_type,
                 .compute = compute,
                 .algorithm = algorithm};
  memcpy(&g.alpha, alpha, sizeof g.alpha); /* fp32, as the sums are */
  memcpy(&g.beta, beta, sizeof g.beta);
  note_gemm("cublasGemmEx", g);
  return cublas_status("cublasGemmEx", handle);
}

const char *cublasGetStatusName(int status)
{
  return status == 0                        ? "CUBLAS_STATUS_SUCCESS"
         : status == CUBLAS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
                                            : "CUBLAS_STATUS_INVALID_VALUE";
}
