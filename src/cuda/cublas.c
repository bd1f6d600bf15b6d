/* cublas.c: the few calls of cuBLAS that cublas_f32 makes. */
#include "cublas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names and values of cublas_api.h. */
enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_ALLOC_FAILED = 3 };
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum { CUBLAS_PEDANTIC_MATH = 2 };

static struct {
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*set_math_mode)(void *handle, int mode);
  int (*set_stream)(void *handle, CUstream stream);
  int (*set_workspace)(void *handle, void *workspace, size_t bytes);
  int (*sgemm)(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const float *a, int lda,
               const float *b, int ldb, const float *beta, float *c, int ldc);
  const char *(*status_name)(int status);
} cublas;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool found;

/* ISO C has no conversion from an object's address to a function's; POSIX promises that it works. */
static bool find(void *library, const char *symbol, void *function)
{
  void *address = dlsym(library, symbol);
  memcpy(function, &address, sizeof address);
  return address != NULL;
}

/* A device address as cuBLAS's interface has it. */
static void *pointer(CUdeviceptr address)
{
  void *out;
  _Static_assert(sizeof out == sizeof address, "GPUs are for 64 bits");
  memcpy(&out, &address, sizeof out);
  return out;
}

/* It stays open: handles and their threads live as long as their contexts. */
static void open_library(void)
{
  static const char *const files[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                      "/usr/local/cuda/lib64/libcublas.so"};
  const char *asked = getenv("ESMM_CUBLAS");
  void *library = NULL;
  if (asked && asked[0])
    library = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
  else
    for (size_t i = 0; i < sizeof files / sizeof files[0] && !library; i++)
      library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
  found = library && find(library, "cublasCreate_v2", &cublas.create) &&
          find(library, "cublasDestroy_v2", &cublas.destroy) &&
          find(library, "cublasSetMathMode", &cublas.set_math_mode) &&
          find(library, "cublasSetStream_v2", &cublas.set_stream) &&
          find(library, "cublasSetWorkspace_v2", &cublas.set_workspace) &&
          find(library, "cublasSgemm_v2", &cublas.sgemm) && find(library, "cublasGetStatusName", &cublas.status_name);
}

const char *esmm_cublas_missing(void)
{
  const bool there = pthread_once(&once, open_library) == 0 && found;
  return there ? NULL : "libcublas was not found (ESMM_CUBLAS may name a file)";
}

static esmm_status check(esmm_ctx *ctx, int status, const char *call)
{
  if (status == CUBLAS_STATUS_SUCCESS)
    return ESMM_OK;
  return esmm_fail(ctx, status == CUBLAS_STATUS_ALLOC_FAILED ? ESMM_ERR_DEVICE_MEMORY : ESMM_ERR_DRIVER_CALL, "%s: %s",
                   call, cublas.status_name(status));
}

/* What a context keeps: its handle, or the name of the status that it got instead of one. */
static const char handle_key, failure_key;

static void release(void *handle)
{
  (void)cublas.destroy(handle);
}

static void forget(void *name)
{
  (void)name; /* the library's */
}

bool esmm_cublas_start(esmm_ctx *ctx)
{
  void *handle = NULL;
  if (esmm_cuda_attached(ctx, &handle_key))
    return true;
  int status = cublas.create(&handle);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublas.set_math_mode(handle, CUBLAS_PEDANTIC_MATH);
    if (status == CUBLAS_STATUS_SUCCESS && esmm_cuda_attach(ctx, &handle_key, handle, release) == ESMM_OK)
      return true;
    release(handle);
  }
  (void)esmm_cuda_attach(ctx, &failure_key, (void *)cublas.status_name(status), forget);
  return false;
}

bool esmm_cublas_usable(const esmm_ctx *ctx, char *why, size_t why_bytes)
{
  const char *failure = esmm_cuda_attached(ctx, &failure_key);
  if (esmm_cuda_attached(ctx, &handle_key))
    return true;
  if (failure)
    (void)snprintf(why, why_bytes, "cuBLAS did not start: cublasCreate gave %s", failure);
  else if (esmm_cuda_capturing(ctx))
    (void)snprintf(why, why_bytes,
                   "cuBLAS cannot be started while a graph is captured: run this product once before the capture");
  else
    return true;
  return false;
}

static esmm_status multiply(esmm_ctx *ctx, CUstream stream, CUdeviceptr workspace, int64_t m, int64_t n, int64_t k,
                            float alpha, esmm_cublas_operand a, esmm_cublas_operand b, float beta, CUdeviceptr c,
                            int64_t ldc)
{
  void *handle = esmm_cuda_attached(ctx, &handle_key);
  esmm_status status = check(ctx, cublas.set_stream(handle, stream), "cublasSetStream");
  /* After the stream, which resets it. With memory of its own a handle gives the same bits in every run. */
  if (status == ESMM_OK)
    status = check(ctx, cublas.set_workspace(handle, pointer(workspace), ESMM_CUBLAS_WORKSPACE), "cublasSetWorkspace");
  if (status == ESMM_OK)
    status = check(ctx,
                   cublas.sgemm(handle, a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, (int)m, (int)n, (int)k, &alpha,
                                pointer(a.data), (int)a.ld, pointer(b.data), (int)b.ld, &beta, pointer(c), (int)ldc),
                   "cublasSgemm");
  return status;
}

esmm_status esmm_cublas_sgemm(esmm_ctx *ctx, CUstream stream, CUdeviceptr workspace, int64_t m, int64_t n, int64_t k,
                              float alpha, esmm_cublas_operand a, esmm_cublas_operand b, float beta, CUdeviceptr c,
                              int64_t ldc)
{
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = multiply(ctx, stream, workspace, m, n, k, alpha, a, b, beta, c, ldc);
  esmm_cuda_leave(scope);
  return status;
}
