/*
 * fake_cuda.h: the knobs and counters of fake_cuda.c, a CUDA driver whose device memory is the host's and whose kernels
 * do nothing unless a test says what, and a cuBLAS of the same kind. A test opens libcuda.so.1 and takes the variable
 * `fake_cuda` from it.
 */
#ifndef ESMM_TEST_FAKE_CUDA_H
#define ESMM_TEST_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* How a kernel is launched. */
typedef struct fake_launch {
  unsigned grid[3], threads, shared, cluster; /* cluster 0: none */
  int cooperative;
} fake_launch;

/* What the fake writes as a tensor map, in the place of what only a GPU reads: the arguments of the call. */
typedef struct fake_tensor_map {
  uint64_t address;
  int64_t cols, rows, pitch; /* pitch: bytes */
  uint32_t box_cols, box_rows;
  int32_t type, interleave, swizzle, promotion, fill;
  int32_t unused;
  uint64_t unused_too[8];
} fake_tensor_map;

/* The arguments of a product by cuBLAS, and what its handle was given before. */
typedef struct fake_gemm {
  uint64_t a, b, c, workspace;
  int32_t op_a, op_b, m, n, k, lda, ldb, ldc;
  float alpha, beta;
  int32_t a_type, b_type, c_type, compute, algorithm, math_mode;
} fake_gemm;

typedef struct fake_cuda_state {
  /* What the driver is */
  int version, devices, sm, pools;
  int first_sm;  /* that of device 0, where it is not 0: an older GPU beside the others */
  int cublas;    /* what cublasCreate returns: 0 where it works */
  size_t memory; /* bytes of the device */

  /* What goes wrong: the n-th call from now (counted down; 0: none) fails once with `result`, or every call of that
     name does. A sticky result makes every later call fail with it until `sticky` is set back to 0. */
  int64_t fail_at;
  const char *fail_call;
  int result;
  int sticky;
  const char *failed; /* which call it was; NULL while it has not happened */

  const void *captured; /* the stream that is being captured; NULL: none */
  int blocking;         /* it is one that the default stream waits for */
  int running;          /* work of a graph is under way, until the device is synchronized: memory must not be freed */

  /* NULL, or what a launched kernel does: it gets its name and its one parameter. It must not call the driver. */
  void (*kernel)(const char *name, const void *params);

  /* What is there now */
  int64_t blocks, bytes, events, modules, retained, handles, pinned;
  /* What was done so far */
  int64_t calls, allocations, launches, waits, records, sgemms, gemms;
  int64_t synchronizations; /* of a stream or an event */
  int64_t mistakes; /* calls that no correct program makes: no current context, unknown memory, beyond its end */
  char mistake[128];
  int64_t cooperative, clusters; /* launches that were so, and in clusters */

  /* What follows python/tests/fake_gpu.py does not have. */
  fake_launch launch;                                      /* of the kernel that `kernel` gets */
  void (*gemm)(const char *call, const fake_gemm *params); /* NULL, or what a product by cuBLAS does */
  /* For such functions: where the memory begins, on the device or pinned, that has this address; 0: none has. */
  uint64_t (*base_of)(uint64_t address);
  int64_t relaxed; /* threads whose capture mode is the relaxed one now */
  /* Time passes where takes is not NULL: it says what all that was launched since it was asked last takes, and is asked
     where an event is recorded or waited for. host: seconds, to which each call adds `per_call`; gpu: when what is
     queued there has been done. */
  double (*takes)(void);
  double host, gpu, per_call;
} fake_cuda_state;

#endif
