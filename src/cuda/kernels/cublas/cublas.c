/* cublas.c: the few calls of cuBLAS that cublas_f32, cublas_bf16 and cublas_f16 make. */
#include "cuda/kernels/cublas/cublas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names and values of cublas_api.h. */
enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_ALLOC_FAILED = 3 };
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_GEMM_DEFAULT = -1 };
/* IEEE multiply-adds for fp32; for 16 bits, partial sums that stay fp32 until the last one is added. */
enum { CUBLAS_PEDANTIC_MATH = 2, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16 };

static struct {
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*set_math_mode)(void *handle, int mode);
  int (*set_stream)(void *handle, CUstream stream);
  int (*get_property)(int which, int *value);
  int (*set_workspace)(void *handle, void *workspace, size_t bytes);
  int (*sgemm)(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const float *a, int lda,
               const float *b, int ldb, const float *beta, float *c, int ldc);
  int (*gemm_ex)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                 int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                 int compute, int algorithm);
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
  found =
      library && find(library, "cublasCreate_v2", &cublas.create) &&
      find(library, "cublasDestroy_v2", &cublas.destroy) && find(library, "cublasSetMathMode", &cublas.set_math_mode) &&
      find(library, "cublasSetStream_v2", &cublas.set_stream) &&
      find(library, "cublasSetWorkspace_v2", &cublas.set_workspace) && find(library, "cublasSgemm_v2", &cublas.sgemm) &&
      find(library, "cublasGemmEx", &cublas.gemm_ex) && find(library, "cublasGetStatusName", &cublas.status_name);
  if (found)
    (void)find(library, "cublasGetProperty", &cublas.get_property); /* nothing but the version needs it */
}

uint32_t esmm_cublas_version(void)
{
  uint32_t version = 0;
  for (int i = 0; i < 3 && !esmm_cublas_missing(NULL); i++) {
    int number = 0;
    if (cublas.get_property && cublas.get_property(i, &number) == CUBLAS_STATUS_SUCCESS)
      version = version * 1000 + (uint32_t)number % 1000;
  }
  return version;
}

bool esmm_cublas_passes(const esmm_problem *p)
{
  return p->bias || p->activation != ESMM_ACT_NONE || p->gated || p->residual.data ||
         (p->c.dtype != ESMM_F32 && p->c.dtype != p->a.dtype);
}

double esmm_cublas_pass_bytes(const esmm_problem *p)
{
  if (!esmm_cublas_passes(p))
    return 0.0;
  const double c = (double)esmm_dtype_size(p->c.dtype);
  const double each = sizeof(float) + (p->beta == 0.0f ? c : 2.0 * c) + (p->gated ? sizeof(float) : 0.0) +
                      (p->residual.data ? (double)esmm_dtype_size(p->residual.dtype) : 0.0);
  return each * (double)p->m * (double)p->n;
}

/* The sums, in C's order, so that the pass reads both along their lines. */
static esmm_matrix sums_of(const esmm_problem *p, CUdeviceptr at)
{
  const bool by_rows = p->c.order == ESMM_ROW_MAJOR;
  return (esmm_matrix){.data = esmm_cuda_pointer(at),
                       .rows = p->m,
                       .cols = p->n,
                       .ld = esmm_round_up(by_rows ? p->n : p->m, 4),
                       .order = p->c.order,
                       .place = ESMM_DEVICE,
                       .device = p->c.device};
}

size_t esmm_cublas_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  if (!esmm_cublas_passes(p))
    return ESMM_CUBLAS_WORKSPACE;
  const esmm_matrix sums = sums_of(p, 0);
  size_t bytes;
  return esmm_size_mul((size_t)sums.ld * sizeof(float), (size_t)(sums.order == ESMM_ROW_MAJOR ? p->m : p->n), &bytes) &&
                 esmm_size_add(bytes, ESMM_CUBLAS_WORKSPACE, &bytes)
             ? bytes
             : SIZE_MAX;
}

const char *esmm_cublas_missing(const esmm_kernel *self)
{
  (void)self;
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

/* What a context keeps: its handle, and the handle's settings; or the name of the status that it got instead. */
typedef struct library {
  esmm_allocator allocator;
  void *handle;
  bool set; /* the settings below hold */
  CUstream stream;
  void *workspace;
  bool f32;
} library;

static const char library_key, failure_key;

static void release(void *object)
{
  library *l = object;
  const esmm_allocator allocator = l->allocator;
  if (l->handle)
    (void)cublas.destroy(l->handle);
  esmm_mem_free(&allocator, l, sizeof *l);
}

static void forget(void *name)
{
  (void)name; /* the library's */
}

bool esmm_cublas_start(esmm_ctx *ctx)
{
  if (esmm_cuda_attached(ctx, &library_key))
    return true;
  library *l = esmm_mem_alloc(&ctx->allocator, sizeof *l);
  int status = CUBLAS_STATUS_ALLOC_FAILED;
  if (l) {
    *l = (library){.allocator = ctx->allocator};
    status = cublas.create(&l->handle);
    if (status == CUBLAS_STATUS_SUCCESS && esmm_cuda_attach(ctx, &library_key, l, release) == ESMM_OK)
      return true;
    release(l);
  }
  (void)esmm_cuda_attach(ctx, &failure_key, (void *)cublas.status_name(status), forget);
  return false;
}

bool esmm_cublas_usable(const esmm_ctx *ctx, char *why, size_t why_bytes)
{
  const char *failure = esmm_cuda_attached(ctx, &failure_key);
  if (esmm_cuda_attached(ctx, &library_key))
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

static bool no(char *why, size_t why_bytes, const char *text)
{
  (void)snprintf(why, why_bytes, "%s", text);
  return false;
}

bool esmm_cublas_fits(const esmm_problem *p, int64_t b_ld, char *why, size_t why_bytes)
{
  const int64_t most = INT32_MAX - 3; /* lines of sums are filled up to multiples of four */
  if (p->m > most || p->n > most || p->k > INT32_MAX || b_ld > INT32_MAX || p->a.ld > INT32_MAX || p->c.ld > INT32_MAX)
    return no(why, why_bytes, "a side or a leading dimension is 2^31 or more");
  return true;
}

/* A product as cuBLAS has it: C [m,n] = alpha * op(x) [m,k] * op(y) [k,n] + beta * C, all column-major. */
typedef struct gemm {
  int m, n, k;
  esmm_cublas_operand x, y;
} gemm;

/* A row-major C is its transpose to cuBLAS, made from the transposed operands in turned order. */
static gemm as_gemm(const esmm_problem *p, esmm_cublas_operand b)
{
  esmm_cublas_operand a = {esmm_cuda_address(&p->a), p->a.ld, p->a.order == ESMM_ROW_MAJOR};
  if (p->c.order == ESMM_COL_MAJOR)
    return (gemm){.m = (int)p->m, .n = (int)p->n, .k = (int)p->k, .x = a, .y = b};
  a.transposed = !a.transposed;
  b.transposed = !b.transposed;
  return (gemm){.m = (int)p->n, .n = (int)p->m, .k = (int)p->k, .x = b, .y = a};
}

static int op(esmm_cublas_operand x)
{
  return x.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

static int type(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return CUDA_R_32F;
  case ESMM_BF16:
    return CUDA_R_16BF;
  case ESMM_F16:
    return CUDA_R_16F;
  }
  return -1; /* cuBLAS refuses it */
}

/* Sets in the handle what has changed since the last call. */
static esmm_status set_up(esmm_ctx *ctx, library *l, CUstream stream, bool f32, void *workspace)
{
  const bool moved = !l->set || l->stream != stream, other = moved || l->workspace != workspace;
  esmm_status status = moved ? check(ctx, cublas.set_stream(l->handle, stream), "cublasSetStream") : ESMM_OK;
  /* After the stream, which resets it. With its own memory a handle gives the same bits in every run. */
  if (status == ESMM_OK && other)
    status = check(ctx, cublas.set_workspace(l->handle, workspace, ESMM_CUBLAS_WORKSPACE), "cublasSetWorkspace");
  if (status == ESMM_OK && (!l->set || l->f32 != f32))
    status = check(
        ctx,
        cublas.set_math_mode(l->handle, f32 ? CUBLAS_PEDANTIC_MATH : CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
        "cublasSetMathMode");
  l->set = status == ESMM_OK;
  l->stream = stream;
  l->workspace = workspace;
  l->f32 = f32;
  return status;
}

/* C = alpha * sums + beta * C. */
static esmm_status multiply(esmm_ctx *ctx, const esmm_problem *p, esmm_cublas_operand b, void *workspace)
{
  library *l = esmm_cuda_attached(ctx, &library_key);
  if (!l)
    return esmm_fail(ctx, ESMM_ERR_DRIVER_CALL, "cuBLAS did not start");
  const bool f32 = p->a.dtype == ESMM_F32;
  const gemm g = as_gemm(p, b);
  const int data = type(p->a.dtype);
  const esmm_status status = set_up(ctx, l, esmm_cuda_call_of(p)->stream, f32, workspace);
  if (status != ESMM_OK)
    return status;
  if (f32)
    return check(ctx,
                 cublas.sgemm(l->handle, op(g.x), op(g.y), g.m, g.n, g.k, &p->alpha, esmm_cuda_pointer(g.x.data),
                              (int)g.x.ld, esmm_cuda_pointer(g.y.data), (int)g.y.ld, &p->beta, p->c.data, (int)p->c.ld),
                 "cublasSgemm");
  return check(ctx,
               cublas.gemm_ex(l->handle, op(g.x), op(g.y), g.m, g.n, g.k, &p->alpha, esmm_cuda_pointer(g.x.data), data,
                              (int)g.x.ld, esmm_cuda_pointer(g.y.data), data, (int)g.y.ld, &p->beta, p->c.data,
                              type(p->c.dtype), (int)p->c.ld, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
}

esmm_status esmm_cublas_multiply(esmm_ctx *ctx, const esmm_problem *p, esmm_cublas_operand b, void *workspace)
{
  const esmm_matrix sums = sums_of(p, (CUdeviceptr)(uintptr_t)workspace + ESMM_CUBLAS_WORKSPACE);
  const bool passes = esmm_cublas_passes(p);
  esmm_problem bare = *p;
  if (passes) { /* alpha and beta are the pass's, too: each operation rounds as it does elsewhere */
    bare.c = sums;
    bare.alpha = 1.0f;
    bare.beta = 0.0f;
  }
  esmm_cuda_scope scope;
  esmm_status status = esmm_cuda_enter(ctx, &scope);
  if (status != ESMM_OK)
    return status;
  status = multiply(ctx, &bare, b, workspace);
  esmm_cuda_leave(scope);
  return status == ESMM_OK && passes ? esmm_cuda_finish(ctx, p, &sums, esmm_cuda_call_of(p)->stream) : status;
}
