/*
 * cublas.h: cuBLAS, opened with dlopen when it is first asked for, and never linked.
 */
#ifndef ESMM_CUDA_CUBLAS_H
#define ESMM_CUDA_CUBLAS_H

#include "cuda/cuda.h"

#define ESMM_CUBLAS_WORKSPACE ((size_t)32 << 20) /* bytes; what NVIDIA advises for sm_90 */

/* That, and room for sums where the library cannot write C itself; SIZE_MAX on overflow. */
size_t esmm_cublas_workspace(const esmm_kernel *self, const esmm_problem *p);

/* NULL where the library is there, else a text that says it is not. */
const char *esmm_cublas_missing(const esmm_kernel *self);
/* As one number; 0: it is not there, or does not say. */
uint32_t esmm_cublas_version(void);
/* It is there: does the context have a handle of it, or may it get one? Else says why not. */
bool esmm_cublas_usable(const esmm_ctx *ctx, char *why, size_t why_bytes);
/*
 * Gets the context its handle, once: not for every context, because it takes time and device memory. Only where the
 * library is usable, and with the primary context current. False: there is none, and from now on it is not usable.
 */
bool esmm_cublas_start(esmm_ctx *ctx);

/* What every cuBLAS kernel refuses: sizes that are no int. b_ld: as below. */
bool esmm_cublas_fits(const esmm_problem *p, int64_t b_ld, char *why, size_t why_bytes);
/* The library writes fp32 sums to the workspace, and a pass behind it makes C of them: where the epilogue has more than
   alpha and beta, or C is of a dtype that is neither fp32 nor A's. */
bool esmm_cublas_passes(const esmm_problem *p);
/* Bytes that the pass reads and writes; 0 where there is none. Beside them it takes ESMM_GPU_SUMS. */
double esmm_cublas_pass_bytes(const esmm_problem *p);

/*
 * p's product on its stream. b: the prepared B, op(b) is [k,n], column-major as in cuBLAS. A and B of fp32: IEEE
 * multiply-adds. 16-bit: both of one dtype; sums in fp32. workspace: as asked for. Only after esmm_cublas_start.
 */
typedef struct esmm_cublas_operand {
  CUdeviceptr data;
  int64_t ld;
  bool transposed;
} esmm_cublas_operand;
esmm_status esmm_cublas_multiply(esmm_ctx *ctx, const esmm_problem *p, esmm_cublas_operand b, void *workspace);

#endif
