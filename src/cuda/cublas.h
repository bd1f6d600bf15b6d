/*
 * cublas.h: cuBLAS, opened with dlopen when it is first asked for, and never linked.
 */
#ifndef ESMM_CUDA_CUBLAS_H
#define ESMM_CUDA_CUBLAS_H

#include "cuda.h"

#define ESMM_CUBLAS_WORKSPACE ((size_t)32 << 20) /* bytes; what NVIDIA advises for sm_90 */

/* NULL where the library is there, else a text that says it is not. */
const char *esmm_cublas_missing(void);
/* It is there: does the context have a handle of it, or may it get one? Else says why not. */
bool esmm_cublas_usable(const esmm_ctx *ctx, char *why, size_t why_bytes);
/*
 * Gets the context its handle, once: not for every context, because it takes time and device memory. Only where the
 * library is usable, and with the primary context current. False: there is none, and from now on it is not usable.
 */
bool esmm_cublas_start(esmm_ctx *ctx);

/* An operand or the product, column-major as cuBLAS has it: op(data) is what is multiplied. */
typedef struct esmm_cublas_operand {
  CUdeviceptr data;
  int64_t ld;
  bool transposed;
} esmm_cublas_operand;

/*
 * C [m,n] = alpha * op(A) [m,k] * op(B) [k,n] + beta * C, fp32 with IEEE multiply-adds, on the stream. Sizes and lds
 * fit into an int. workspace: ESMM_CUBLAS_WORKSPACE bytes. Only after esmm_cublas_start.
 */
esmm_status esmm_cublas_sgemm(esmm_ctx *ctx, CUstream stream, CUdeviceptr workspace, int64_t m, int64_t n, int64_t k,
                              float alpha, esmm_cublas_operand a, esmm_cublas_operand b, float beta, CUdeviceptr c,
                              int64_t ldc);

#endif
