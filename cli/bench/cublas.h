/*
 * cublas.h: cuBLAS, the dense library that the benchmark compares with on a GPU, opened at run time and never linked.
 */
#ifndef ESMM_CLI_CUBLAS_H
#define ESMM_CLI_CUBLAS_H

#include "esmm.h"

#include <stdbool.h>

typedef struct cublas_library {
  char title[64];  /* "cuBLAS 13.1.0": for people */
  char error[256]; /* what went wrong last */
  void *file, *driver, *handle;
  int device;    /* of the driver, as it counts them */
  int math_mode; /* that the handle has now */
  int (*create)(void **);
  int (*destroy)(void *);
  int (*set_math_mode)(void *, int);
  int (*sgemm)(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *,
               float *, int);
  int (*sgemv)(void *, int, int, int, const float *, const float *, int, const float *, int, const float *, float *,
               int);
  int (*gemm_ex)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int,
                 const void *, void *, int, int, int, int);
} cublas_library;

/* Opens the library's file, ESMM_CUBLAS or the newest there is; needs no GPU. false: error says why. */
bool cublas_open(cublas_library *library);
/* A handle on device `ordinal`, in its primary context, which becomes the thread's own. */
bool cublas_start(cublas_library *library, int ordinal);
void cublas_close(cublas_library *library); /* also of one that was never opened */

/*
 * All put C [m,n] = A [m,k] x B [k,n] on the default stream and return. Row-major, tightly packed, in the device's
 * memory; B column-major where transposed. Every dimension must fit an int. fp32 is IEEE's without exception.
 */
bool cublas_sgemm(cublas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
                  bool transposed, float *c);
/* The same for m = 1, by sgemv. */
bool cublas_sgemv(cublas_library *library, int64_t k, int64_t n, const float *a, const float *b, bool transposed,
                  float *c);
/* A and B of bf16 or fp16, accumulated in fp32 with cuBLAS's default settings; C in their dtype or in fp32. */
bool cublas_gemm16(cublas_library *library, int64_t m, int64_t k, int64_t n, esmm_dtype dtype, const void *a,
                   const void *b, bool transposed, esmm_dtype dtype_c, void *c);
/* The same for m = 1, by a routine for matrix times vector: a newer cuBLAS has one. */
bool cublas_gemv16(cublas_library *library, int64_t k, int64_t n, esmm_dtype dtype, const void *a, const void *b,
                   bool transposed, esmm_dtype dtype_c, void *c);

/* "570.86.15, CUDA 12.8": the driver as far as it says; "" where there is none. */
void cublas_driver_text(char *out, size_t bytes);

#endif
