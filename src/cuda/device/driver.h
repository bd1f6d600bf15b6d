/*
 * driver.h: the CUDA driver, through dlopen("libcuda.so.1"). The types and the few constants we need are declared here,
 * so that the library builds without a CUDA toolkit and runs without a driver.
 */
#ifndef ESMM_CUDA_DRIVER_H
#define ESMM_CUDA_DRIVER_H

#include "internal.h"

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

/* Results that mean something to us; the driver knows the names of all. */
enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_ECC_UNCORRECTABLE = 214,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
  CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_CONTAINED = 226,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_ASSERT = 710,
  CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
  CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
  CUDA_ERROR_MISALIGNED_ADDRESS = 716,
  CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
  CUDA_ERROR_INVALID_PC = 718,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_EXTERNAL_DEVICE = 911
};

enum {
  CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115
};

enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum { CU_EVENT_DEFAULT = 0, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4 };
enum {
  CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
  CU_TENSOR_MAP_SWIZZLE_64B = 2,
  CU_TENSOR_MAP_SWIZZLE_128B = 3,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};

typedef struct CUDA_MEMCPY2D {
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray;
  size_t srcPitch;
  size_t dstXInBytes, dstY;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray;
  size_t dstPitch;
  size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "as in cuda.h");

typedef struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int cooperative;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
} CUlaunchAttribute;
_Static_assert(sizeof(CUlaunchAttribute) == 72, "as in cuda.h");

typedef struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute *attrs;
  unsigned numAttrs;
} CUlaunchConfig;
_Static_assert(sizeof(CUlaunchConfig) == 56, "as in cuda.h");

/*
 * Every driver function we call: our name, the library's symbol, its parameters. The symbols with a suffix are the
 * current versions of functions that once had 32-bit sizes; cuda.h renames them so.
 */
#define ESMM_CUDA_CALLS(X)                                                                                      \
  X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char **name))                                      \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                         \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                               \
  X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, CUdevice device))                               \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                 \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))               \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                               \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                                  \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                               \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                               \
  X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                               \
  X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))                               \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                                                        \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char *name))     \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                  \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                 \
    (int *blocks, CUfunction function, int threads, size_t shared))                                             \
  X(cuLaunchKernelEx, "cuLaunchKernelEx",                                                                       \
    (const CUlaunchConfig *config, CUfunction function, void **params, void **extra))                           \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * ptr, size_t bytes))                                             \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr ptr))                                                               \
  X(cuMemAllocAsync, "cuMemAllocAsync", (CUdeviceptr * ptr, size_t bytes, CUstream stream))                     \
  X(cuMemFreeAsync, "cuMemFreeAsync", (CUdeviceptr ptr, CUstream stream))                                       \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void **host, size_t bytes, unsigned flags))                              \
  X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (CUdeviceptr * ptr, void *host, unsigned flags)) \
  X(cuMemFreeHost, "cuMemFreeHost", (void *host))                                                               \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr dst, const void *src, size_t bytes, CUstream s))    \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *dst, CUdeviceptr src, size_t bytes, CUstream s))          \
  X(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", (const CUDA_MEMCPY2D *copy, CUstream stream))                        \
  X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream))  \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                              \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream stream, int *status))                                 \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))                        \
  X(cuStreamGetId, "cuStreamGetId", (CUstream stream, unsigned long long *id))                                  \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))                   \
  X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                                          \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                                       \
  X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                           \
  X(cuEventQuery, "cuEventQuery", (CUevent event))                                                              \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                                  \
  X(cuEventElapsedTime, "cuEventElapsedTime", (float *milliseconds, CUevent from, CUevent to))                  \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                           \
    (void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,          \
     const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion, int fill))

typedef struct esmm_cuda_driver {
  int version; /* 13000 for CUDA 13.0 */
#define X(name, symbol, params) CUresult(*name) params;
  ESMM_CUDA_CALLS(X)
#undef X
} esmm_cuda_driver;

#define ESMM_CUDA_DRIVER_LEAST 12000

/*
 * Opens the driver, once in a process; a failure may be tried again. Where there is none, or one that is too old, it
 * says so in the context's error text.
 */
esmm_status esmm_cuda_driver_open(esmm_ctx *ctx);
/* The open driver. Only after esmm_cuda_driver_open has succeeded once. */
const esmm_cuda_driver *esmm_cuda_driver_get(void);

/* "CUDA_ERROR_OUT_OF_MEMORY"; never NULL. */
const char *esmm_cuda_result_name(CUresult result);
/* Which status of ours a failed call means. */
esmm_status esmm_cuda_result_status(CUresult result);

#endif
