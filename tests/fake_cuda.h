/*
 * fake_cuda.h: the knobs and counters of fake_cuda.c, a CUDA driver whose device memory is the host's and whose kernels
 * do nothing. A test opens libcuda.so.1 and takes the variable `fake_cuda` from it.
 */
#ifndef ESMM_TEST_FAKE_CUDA_H
#define ESMM_TEST_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef struct fake_cuda_state {
  /* What the driver is */
  int version, devices, sm, pools;
  size_t memory; /* bytes of the device */

  /* What goes wrong: the n-th call from now (counted down; 0: none) fails once with `result`, or every call of that
     name does. A sticky result makes every later call fail with it until `sticky` is set back to 0. */
  int64_t fail_at;
  const char *fail_call;
  int result;
  int sticky;
  const char *failed; /* which call it was; NULL while it has not happened */

  const void *captured; /* the stream that is being captured; NULL: none */

  /* What is there now */
  int64_t blocks, bytes, events, modules, retained;
  /* What was done so far */
  int64_t calls, allocations, launches, waits, records;
  int64_t mistakes; /* calls that no correct program makes: no current context, unknown memory, beyond its end */
  char mistake[128];
} fake_cuda_state;

#endif
