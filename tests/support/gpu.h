/*
 * gpu.h: what the programs share that test what only a GPU has: its context beside a CPU's, operands in its memory, the
 * driver's calls for streams and graphs.
 *
 * Without a GPU such a program has one test, skipped, whose name says why. ESMM_TEST_DEVICE chooses another GPU
 * ("cuda:1").
 */
#ifndef ESMM_TEST_GPU_H
#define ESMM_TEST_GPU_H

#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static esmm_ctx *gpu, *cpu;
static const char *device_name; /* "cuda:0" */
static int ordinal;

/* ---- operands ---- */

static inline void expect_ok(esmm_ctx *ctx, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", esmm_status_str(status), esmm_ctx_error(ctx));
}

/* A matrix of the same shape in device memory; with the same elements, unless host.data is NULL. */
static inline esmm_matrix to_device(const esmm_matrix *host)
{
  esmm_matrix m = *host;
  m.place = ESMM_DEVICE;
  m.device = ordinal;
  expect_ok(gpu, esmm_memory_alloc(gpu, th_matrix_bytes(&m) + 64, &m.data));
  assert_int_equal((uintptr_t)m.data % 256, 0);
  if (host->data)
    expect_ok(gpu, esmm_matrix_copy(gpu, host, &m));
  return m;
}

static inline esmm_matrix device_matrix(int64_t rows, int64_t cols)
{
  const esmm_matrix shape = {.rows = rows, .cols = cols, .ld = cols};
  return to_device(&shape);
}

static inline esmm_matrix host_matrix(int64_t rows, int64_t cols, esmm_dtype dtype)
{
  esmm_matrix m = th_matrix_alloc(rows, cols, dtype);
  m.ld = cols;
  return m;
}

/* ---- the driver, for what callers have: streams and graphs ---- */

typedef struct driver_calls {
  int (*stream_create)(void **, unsigned);
  int (*stream_destroy)(void *);
  int (*stream_synchronize)(void *);
  int (*begin_capture)(void *, int);
  int (*end_capture)(void *, void **);
  int (*instantiate)(void **, void *, unsigned long long);
  int (*launch)(void *, void *);
  int (*exec_destroy)(void *);
  int (*graph_destroy)(void *);
  int (*to_device)(unsigned long long, const void *, size_t);
  int (*to_host)(void *, unsigned long long, size_t);
} driver_calls;

static driver_calls calls;

static inline void open_calls(void)
{
  char why[256];
  if (!th_driver_open(why, sizeof why))
    fail_msg("%s", why);
  *(void **)&calls.stream_create = th_driver_symbol("cuStreamCreate");
  *(void **)&calls.stream_destroy = th_driver_symbol("cuStreamDestroy_v2");
  *(void **)&calls.stream_synchronize = th_driver_symbol("cuStreamSynchronize");
  *(void **)&calls.begin_capture = th_driver_symbol("cuStreamBeginCapture_v2");
  *(void **)&calls.end_capture = th_driver_symbol("cuStreamEndCapture");
  *(void **)&calls.instantiate = th_driver_symbol("cuGraphInstantiateWithFlags");
  *(void **)&calls.launch = th_driver_symbol("cuGraphLaunch");
  *(void **)&calls.exec_destroy = th_driver_symbol("cuGraphExecDestroy");
  *(void **)&calls.graph_destroy = th_driver_symbol("cuGraphDestroy");
  *(void **)&calls.to_device = th_driver_symbol("cuMemcpyHtoD_v2");
  *(void **)&calls.to_host = th_driver_symbol("cuMemcpyDtoH_v2");
}

static inline void *new_stream(void)
{
  void *stream = NULL;
  enum { NON_BLOCKING = 1 };
  assert_int_equal(calls.stream_create(&stream, NON_BLOCKING), 0); /* not ordered with the default stream */
  return stream;
}

/* ---- starting ---- */

static inline void no_gpu(void **state)
{
  (void)state;
  skip();
}

static inline int open_gpu(void **state)
{
  (void)state;
  open_calls();
  cpu = th_ctx_on("cpu", 0);
  return 0;
}

static inline int close_gpu(void **state)
{
  (void)state;
  esmm_ctx_free(cpu);
  return 0;
}

/* The context of the GPU; false where there is none, and then *status is what main returns. */
static inline bool use_gpu(const char *name, int *status)
{
  static char reason[400] = "a GPU: ";
  device_name = th_on_gpu() ? th_device() : "cuda:0";
  th_clean_environment();
  setenv("ESMM_REMEMBER", "0", 1); /* the same call, the same bits */
  const size_t head = strlen(reason);
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = device_name,
                              .no_tuning_cache = 1,
                              .error = reason + head,
                              .error_size = sizeof reason - head};
  if (esmm_ctx_create(&gpu, &opts) == ESMM_OK) {
    ordinal = th_gpu_ordinal();
    return true;
  }
  const struct CMUnitTest none[] = {{.name = reason, .test_func = no_gpu}};
  if (th_on_gpu()) { /* where one was asked for, its absence is a failure */
    (void)fprintf(stderr, "%s\n", reason);
    *status = 1;
  } else {
    *status = cmocka_run_group_tests_name(name, none, NULL, NULL);
  }
  return false;
}

#endif
