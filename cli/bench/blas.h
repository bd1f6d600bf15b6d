/*
 * blas.h: the dense libraries that the benchmark compares with, opened at run time and never linked.
 */
#ifndef ESMM_CLI_BLAS_H
#define ESMM_CLI_BLAS_H

#include "onednn.h"

#include <stdint.h>

typedef struct blas_library {
  const char *name; /* "openblas": for records */
  char title[96];   /* "OpenBLAS 0.3.21": for people */
  void *handle;
  void (*sgemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                const int *, const float *, const int *, const float *, float *, const int *);
  void (*sgemv)(const char *, const int *, const int *, const float *, const float *, const int *, const float *,
                const int *, const float *, float *, const int *);
  void (*set_threads_int)(int);      /* one of the two is there */
  void (*set_threads_long)(int64_t); /* BLIS counts in its own integer type */
  onednn_library *onednn;            /* this library is oneDNN, and none of the above is there */
} blas_library;

enum { BLAS_LIBRARIES = 3 };

/* Opens what there is, each set to `threads`; returns how many. ESMM_OPENBLAS, ESMM_BLIS and ESMM_ONEDNN name
   other files. */
int blas_open(blas_library *libraries, int threads);

/* C [m,n] = A [m,k] x B [k,n], all row-major and tightly packed; every dimension must fit an int. */
void blas_sgemm(const blas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b, float *c);
/* The same for m = 1 or n = 1, by sgemv. */
void blas_sgemv(const blas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b, float *c);

#endif
