/*
 * cublas.c: cuBLAS by dlopen.
 *
 * cuBLAS works in the context that is current in the calling thread. Here that is made the device's primary context,
 * which the ESMM library works in too, so that pointers and the default stream mean the same to both. fp32 is
 * multiplied in the pedantic math mode: no TF32, no reduced precision anywhere. For 16-bit operands that mode may keep
 * the library from its fastest kernels, so they get the default one.
 *
 * Neither the driver nor cuBLAS is ever closed: both leave handlers that run in their code when the process ends.
 *
 * cuBLAS is column-major: a row-major product C = A B is the column-major product C' = B' A' on the same memory.
 */
#include "cublas.h"

#include "cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* Of cublas_api.h and library_types.h. */
enum { OP_N = 0, OP_T = 1, DEFAULT_MATH = 0, PEDANTIC_MATH = 2, COMPUTE_32F = 68, GEMM_DEFAULT = -1 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };

/* ISO C does not let a data pointer become a function pointer, POSIX does; copying the bytes pleases both. */
static bool find(void *file, const char *name, void *function)
{
  void *symbol = dlsym(file, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static bool failed(cublas_library *library, const char *call, int status)
{
  snprintf(library->error, sizeof library->error, "%s gave status %d", call, status);
  return false;
}

/* ---- the driver ---- */

/* Makes the device's primary context current in this thread. */
static bool enter_context(cublas_library *library, int ordinal)
{
  int (*init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*set_current)(void *), (*release)(int);
  library->driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library->driver) {
    snprintf(library->error, sizeof library->error, "%s", dlerror());
    return false;
  }
  bool all = find(library->driver, "cuInit", &init) && find(library->driver, "cuDeviceGet", &get) &&
             find(library->driver, "cuDevicePrimaryCtxRetain", &retain) &&
             find(library->driver, "cuDevicePrimaryCtxRelease_v2", &release) &&
             find(library->driver, "cuCtxSetCurrent", &set_current);
  if (!all) {
    library->driver = NULL;
    snprintf(library->error, sizeof library->error, "libcuda.so.1 lacks a function");
    return false;
  }
  void *context = NULL;
  int status = init(0);
  if (status == 0)
    status = get(&library->device, ordinal);
  if (status == 0)
    status = retain(&context, library->device);
  if (status == 0) {
    status = set_current(context);
    if (status != 0)
      release(library->device);
  }
  if (status == 0)
    return true;
  library->driver = NULL; /* nothing to leave */
  return failed(library, "the driver, asked for the primary context,", status);
}

static void leave_context(cublas_library *library)
{
  int (*release)(int);
  if (library->driver && find(library->driver, "cuDevicePrimaryCtxRelease_v2", &release))
    release(library->device);
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan ..." */
static void module_version(char *out, size_t bytes)
{
  char line[256] = "";
  FILE *file = fopen("/proc/driver/nvidia/version", "r");
  out[0] = '\0';
  if (!file)
    return;
  if (fgets(line, sizeof line, file))
    for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
      size_t digits = strspn(word, "0123456789");
      if (digits >= 3 && word[digits] == '.') {
        snprintf(out, bytes, "%s", word);
        break;
      }
    }
  fclose(file);
}

void cublas_driver_text(char *out, size_t bytes)
{
  int (*get_version)(int *);
  int version = 0;
  module_version(out, bytes);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver)
    return;
  if (find(driver, "cuDriverGetVersion", &get_version) && get_version(&version) == 0 && version > 0) {
    size_t used = strlen(out);
    snprintf(out + used, bytes - used, "%sCUDA %d.%d", used ? ", " : "", version / 1000, version % 1000 / 10);
  }
}

/* ---- the library ---- */

static void *open_file(cublas_library *library)
{
  static const char *const files[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                      "/usr/local/cuda/lib64/libcublas.so", NULL};
  const char *asked = getenv("ESMM_CUBLAS");
  void *file = NULL;
  if (asked && asked[0])
    file = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
  else
    for (int i = 0; files[i] && !file; i++)
      file = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
  if (!file && asked && asked[0])
    snprintf(library->error, sizeof library->error, "ESMM_CUBLAS: %s", dlerror());
  else if (!file)
    snprintf(library->error, sizeof library->error, "no libcublas.so.13, .12 or .so (ESMM_CUBLAS may name a file)");
  return file;
}

bool cublas_open(cublas_library *library)
{
  int (*get_property)(int, int *);
  int version[3] = {0};
  *library = (cublas_library){.title = "cuBLAS"};
  library->file = open_file(library);
  if (!library->file)
    return false;
  if (!find(library->file, "cublasCreate_v2", &library->create) ||
      !find(library->file, "cublasDestroy_v2", &library->destroy) ||
      !find(library->file, "cublasSetMathMode", &library->set_math_mode) ||
      !find(library->file, "cublasSgemm_v2", &library->sgemm) ||
      !find(library->file, "cublasSgemv_v2", &library->sgemv)) {
    snprintf(library->error, sizeof library->error, "the file found is no cuBLAS: %s", dlerror());
    library->file = NULL;
    return false;
  }
  (void)find(library->file, "cublasGemmEx", &library->gemm_ex); /* missed only where it is called */
  if (find(library->file, "cublasGetProperty", &get_property)) {
    bool known = true;
    for (int i = 0; i < 3; i++)
      known = known && get_property(i, &version[i]) == 0;
    if (known)
      snprintf(library->title, sizeof library->title, "cuBLAS %d.%d.%d", version[0], version[1], version[2]);
  }
  return true;
}

static bool set_math(cublas_library *library, int mode)
{
  int status = mode == library->math_mode ? 0 : library->set_math_mode(library->handle, mode);
  if (status != 0)
    return failed(library, "cublasSetMathMode", status);
  library->math_mode = mode;
  return true;
}

bool cublas_start(cublas_library *library, int ordinal)
{
  if (!enter_context(library, ordinal))
    return false;
  int status = library->create(&library->handle);
  if (status != 0) {
    library->handle = NULL;
    return failed(library, "cublasCreate", status);
  }
  library->math_mode = DEFAULT_MATH;
  return set_math(library, PEDANTIC_MATH);
}

void cublas_close(cublas_library *library)
{
  if (library->handle)
    library->destroy(library->handle);
  leave_context(library);
  *library = (cublas_library){0};
}

bool cublas_sgemm(cublas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
                  bool transposed, float *c)
{
  const float one = 1, zero = 0;
  const int rows = (int)n, cols = (int)m, depth = (int)k;
  if (!set_math(library, PEDANTIC_MATH))
    return false;
  int status = library->sgemm(library->handle, transposed ? OP_T : OP_N, OP_N, rows, cols, depth, &one, b,
                              transposed ? depth : rows, a, depth, &zero, c, rows);
  return status == 0 || failed(library, "cublasSgemm", status);
}

bool cublas_sgemv(cublas_library *library, int64_t k, int64_t n, const float *a, const float *b, bool transposed,
                  float *c)
{
  const float one = 1, zero = 0;
  const int length = (int)n, depth = (int)k;
  if (!set_math(library, PEDANTIC_MATH))
    return false;
  int status = transposed ? library->sgemv(library->handle, OP_T, depth, length, &one, b, depth, a, 1, &zero, c, 1)
                          : library->sgemv(library->handle, OP_N, length, depth, &one, b, length, a, 1, &zero, c, 1);
  return status == 0 || failed(library, "cublasSgemv", status);
}

static int type_of(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return R_32F;
  case ESMM_BF16:
    return R_16BF;
  case ESMM_F16:
    return R_16F;
  }
  return -1; /* cuBLAS refuses it */
}

bool cublas_gemm16(cublas_library *library, int64_t m, int64_t k, int64_t n, esmm_dtype dtype, const void *a,
                   const void *b, bool transposed, esmm_dtype dtype_c, void *c)
{
  const float one = 1, zero = 0;
  const int rows = (int)n, cols = (int)m, depth = (int)k, type = type_of(dtype);
  if (!library->gemm_ex) {
    snprintf(library->error, sizeof library->error, "this cuBLAS has no cublasGemmEx");
    return false;
  }
  if (!set_math(library, DEFAULT_MATH))
    return false;
  int status = library->gemm_ex(library->handle, transposed ? OP_T : OP_N, OP_N, rows, cols, depth, &one, b, type,
                                transposed ? depth : rows, a, type, depth, &zero, c, type_of(dtype_c), rows,
                                COMPUTE_32F, GEMM_DEFAULT);
  return status == 0 || failed(library, "cublasGemmEx", status);
}

/* H: fp16, T: bf16, S: fp32; of the operands, of the sums, of the result. "": there is none */
static const char *gemv_of(esmm_dtype dtype, esmm_dtype dtype_c)
{
  const bool widens = dtype_c == ESMM_F32;
  switch (dtype) {
  case ESMM_F32:
    break;
  case ESMM_BF16:
    return widens ? "cublasTSSgemvStridedBatched" : "cublasTSTgemvStridedBatched";
  case ESMM_F16:
    return widens ? "cublasHSSgemvStridedBatched" : "cublasHSHgemvStridedBatched";
  }
  return "";
}

bool cublas_gemv16(cublas_library *library, int64_t k, int64_t n, esmm_dtype dtype, const void *a, const void *b,
                   bool transposed, esmm_dtype dtype_c, void *c)
{
  const char *name = gemv_of(dtype, dtype_c);
  int (*gemv)(void *, int, int, int, const float *, const void *, int, long long, const void *, int, long long,
              const float *, void *, int, long long, int);
  const float one = 1, zero = 0;
  const int length = (int)n, depth = (int)k;
  if (!find(library->file, name, &gemv)) {
    snprintf(library->error, sizeof library->error, "this cuBLAS has no %s", name);
    return false;
  }
  if (!set_math(library, DEFAULT_MATH))
    return false;
  int status = transposed ? gemv(library->handle, OP_T, depth, length, &one, b, depth, 0, a, 1, 0, &zero, c, 1, 0, 1)
                          : gemv(library->handle, OP_N, length, depth, &one, b, length, 0, a, 1, 0, &zero, c, 1, 0, 1);
  return status == 0 || failed(library, name, status);
}
