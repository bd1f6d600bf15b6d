/*
 * driver.c: libcuda.so.1, opened when the first context asks for a GPU, and what its results mean to us.
 */
#include "cuda/device/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static esmm_cuda_driver driver;
static bool is_open;

/* POSIX promises that a function's address fits a void *, ISO C does not know it: hence the copy. */
static bool find(void *library, const char *symbol, void *function)
{
  void *address = dlsym(library, symbol);
  memcpy(function, &address, sizeof address);
  return address != NULL;
}

static esmm_status no_symbol(esmm_ctx *ctx, const char *symbol)
{
  return esmm_fail(ctx, ESMM_ERR_DRIVER, "libcuda.so.1 has no %s; install an NVIDIA driver for CUDA %d.%d or later",
                   symbol, ESMM_CUDA_DRIVER_LEAST / 1000, ESMM_CUDA_DRIVER_LEAST % 1000 / 10);
}

/* The version first: if a driver is too old the error says just that, not which function it lacks. */
static esmm_status initialize(esmm_ctx *ctx, void *library, esmm_cuda_driver *table)
{
  CUresult (*init)(unsigned flags) = NULL;
  CUresult (*get_version)(int *version) = NULL;
  if (!find(library, "cuInit", &init))
    return no_symbol(ctx, "cuInit");
  if (!find(library, "cuDriverGetVersion", &get_version))
    return no_symbol(ctx, "cuDriverGetVersion");
  CUresult result = get_version(&table->version);
  if (result == CUDA_SUCCESS && table->version < ESMM_CUDA_DRIVER_LEAST)
    return esmm_fail(ctx, ESMM_ERR_DRIVER, "the NVIDIA driver is for CUDA %d.%d; %d.%d or later is needed",
                     table->version / 1000, table->version % 1000 / 10, ESMM_CUDA_DRIVER_LEAST / 1000,
                     ESMM_CUDA_DRIVER_LEAST % 1000 / 10);
#define X(name, symbol, params)             \
  if (!find(library, symbol, &table->name)) \
    return no_symbol(ctx, symbol);
  ESMM_CUDA_CALLS(X)
#undef X
  const char *call = "cuDriverGetVersion", *name = NULL;
  if (result == CUDA_SUCCESS) {
    call = "cuInit";
    result = init(0);
  }
  if (result == CUDA_SUCCESS)
    return ESMM_OK;
  if (table->cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
    name = "an error that the driver has no name for";
  if (result == CUDA_ERROR_NO_DEVICE)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "%s: %s: the driver sees no GPU", call, name);
  return esmm_fail(ctx, ESMM_ERR_DRIVER, "%s: %s", call, name);
}

esmm_status esmm_cuda_driver_open(esmm_ctx *ctx)
{
  esmm_status status = ESMM_OK;
  (void)pthread_mutex_lock(&lock);
  if (!is_open) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library) {
      esmm_cuda_driver table;
      memset(&table, 0, sizeof table);
      status = initialize(ctx, library, &table);
      if (status == ESMM_OK) {
        driver = table;
        is_open = true; /* and the library stays open: its threads outlive any context of ours */
      }
    } else {
      const char *why = dlerror();
      status = esmm_fail(ctx, ESMM_ERR_DRIVER, "%s", why ? why : "libcuda.so.1 cannot be opened");
    }
  }
  (void)pthread_mutex_unlock(&lock);
  return status;
}

const esmm_cuda_driver *esmm_cuda_driver_get(void)
{
  return &driver;
}

const char *esmm_cuda_result_name(CUresult result)
{
  const char *name = NULL;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
    return "an error that the driver has no name for";
  return name;
}

esmm_status esmm_cuda_result_status(CUresult result)
{
  switch (result) {
  case CUDA_SUCCESS:
    return ESMM_OK;
  case CUDA_ERROR_OUT_OF_MEMORY:
    return ESMM_ERR_DEVICE_MEMORY;
  /* What cannot be done while a stream is captured. */
  case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
  case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
  case CUDA_ERROR_CAPTURED_EVENT:
    return ESMM_ERR_UNSUPPORTED;
  /* After these every later call in the primary context fails too. */
  case CUDA_ERROR_DEINITIALIZED:
  case CUDA_ERROR_DEVICE_UNAVAILABLE:
  case CUDA_ERROR_ECC_UNCORRECTABLE:
  case CUDA_ERROR_NVLINK_UNCORRECTABLE:
  case CUDA_ERROR_CONTAINED:
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_TIMEOUT:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED:
  case CUDA_ERROR_ASSERT:
  case CUDA_ERROR_HARDWARE_STACK_ERROR:
  case CUDA_ERROR_ILLEGAL_INSTRUCTION:
  case CUDA_ERROR_MISALIGNED_ADDRESS:
  case CUDA_ERROR_INVALID_ADDRESS_SPACE:
  case CUDA_ERROR_INVALID_PC:
  case CUDA_ERROR_LAUNCH_FAILED:
  case CUDA_ERROR_EXTERNAL_DEVICE:
    return ESMM_ERR_DEVICE_LOST;
  default:
    return ESMM_ERR_DRIVER_CALL;
  }
}
