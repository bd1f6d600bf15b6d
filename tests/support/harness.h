/*
 * harness.h: what the test programs share, and what keeps them honest.
 *
 * Nothing here uses the library's arithmetic: elements are encoded, decoded and multiplied by code of this file, in
 * float64, so that a mistake in the library cannot hide in the yardstick. Buffers end at an inaccessible page and start
 * behind guard words, so that one element too far in either direction shows in every build, not just under a sanitizer.
 */
#ifndef ESMM_TEST_HARNESS_H
#define ESMM_TEST_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "esmm_tools.h"

/* A test of one thing among many, which the function gets as its state. */
static inline struct CMUnitTest th_test_of(const char *name, CMUnitTestFunction function, const void *of)
{
  struct CMUnitTest test = {.name = name, .test_func = function};
  memcpy(&test.initial_state, &of, sizeof of); /* cmocka's states are not const */
  return test;
}

/* ---- random numbers: splitmix64, the same on every machine ---- */
typedef struct th_rng {
  uint64_t state;
} th_rng;

uint64_t th_next(th_rng *rng);
int64_t th_below(th_rng *rng, int64_t n); /* 0 .. n-1; n > 0 */
double th_unit(th_rng *rng);              /* [0, 1) */

/* ---- elements ---- */
double th_decode(const void *data, esmm_dtype dtype, int64_t index);
void th_encode(void *data, esmm_dtype dtype, int64_t index, double value); /* through fp32, as the library rounds */
double th_round(esmm_dtype dtype, double value);                           /* what th_encode would store */
double th_roundoff(esmm_dtype dtype);                                      /* unit roundoff: 2^-24, 2^-8, 2^-11 */
size_t th_element_bytes(esmm_dtype dtype);
double th_largest(esmm_dtype dtype); /* at and beyond this, Inf */

/* ---- guarded memory ---- */
typedef struct th_arena {
  unsigned char *base; /* the mapping */
  size_t room;         /* writable bytes, before the inaccessible page */
  unsigned char *data; /* what th_place gave last */
  size_t bytes;
} th_arena;

void th_arena_create(th_arena *arena, size_t room);
void th_arena_free(th_arena *arena);
void *th_place(th_arena *arena, size_t bytes); /* ends at the inaccessible page; guard words in front */
bool th_guards_intact(const th_arena *arena);

/* A matrix in an arena. Padding between rows is poisoned with NaN; the last row has none. */
size_t th_matrix_bytes(const esmm_matrix *m);
void th_matrix_place(th_arena *arena, esmm_matrix *m, int64_t rows, int64_t cols, int64_t pad, esmm_dtype dtype,
                     esmm_order order);
int64_t th_index(const esmm_matrix *m, int64_t row, int64_t col);
double th_get(const esmm_matrix *m, int64_t row, int64_t col);
void th_set(esmm_matrix *m, int64_t row, int64_t col, double value);

/* A matrix in plain memory, tightly packed, for tests that do not care about guards. Free .data with free(). */
esmm_matrix th_matrix_alloc(int64_t rows, int64_t cols, esmm_dtype dtype);
void th_fill(esmm_matrix *m, uint64_t seed, double density, bool integers); /* uniform in [-1,1) or -4..4 */

/* ---- the oracle: sum and sum of magnitudes of A [m,k] times B [k,n], row-major float64 ---- */
void th_oracle(int64_t m, int64_t n, int64_t k, const double *a, const double *b, double *sum, double *magnitude);
/* The same sums in one fp32 chain of multiply-adds in the order of k: the measure of a GPU's kernels. */
void th_chain(int64_t m, int64_t n, int64_t k, const double *a, const double *b, float *sum);

/* ---- the device: ESMM_TEST_DEVICE ("cuda", "cuda:1"), else "cpu" ---- */
const char *th_device(void);
bool th_on_gpu(void);
int th_gpu_ordinal(void);
/* Opens the CUDA driver for the calling thread, in the device's primary context; else says why not. */
bool th_driver_open(char *why, size_t why_bytes);
void *th_driver_symbol(const char *name); /* after th_driver_open; fails the test where the driver has it not */

/* Device memory with guard words on both sides of what it holds, as far from a multiple of 256 as the host's copy. */
typedef struct th_device_arena {
  esmm_ctx *ctx;
  void *base; /* on the device */
  size_t room, at, bytes;
  unsigned char *image; /* what was put there, guard words and all */
} th_device_arena;

void th_device_arena_create(th_device_arena *arena, esmm_ctx *ctx, size_t room);
void th_device_arena_free(th_device_arena *arena);
void *th_device_put(th_device_arena *arena, const void *data, size_t bytes); /* the device's address of the copy */
bool th_device_get(th_device_arena *arena, void *data); /* waits, copies back; false: a guard word was written */

/* ---- contexts and last words ---- */
esmm_ctx *
th_ctx(int threads); /* of th_device(); no tuning cache, no forced kernel; fails the test if it can't be made */
esmm_ctx *th_ctx_on(const char *device, int threads);
/* Unsets ESMM_FORCE and ESMM_THREADS, which would change what is tested; ESMM_DEVICE becomes th_device(). */
void th_clean_environment(void);
/* For cmocka: a group of tests shares a CPU context, with three threads, in a clean environment. */
int th_cpu_set_up(void **state);
int th_cpu_tear_down(void **state);
/* Options that prepare B in a format the kernel reads: dense where it can (and where force is NULL), else blocks, else
   4:4, which any B fits. */
esmm_prepare_opts th_prepare_opts_for(esmm_ctx *ctx, const char *force);
/* esmm_matmul on this stream; the context's is the default one again afterwards. */
esmm_status th_matmul_on(esmm_ctx *ctx, void *stream, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                         const esmm_matmul_opts *opts);
esmm_pattern_info th_pattern(esmm_ctx *ctx, const esmm_pattern *pattern);
/* All bitmaps, [strips][words]; to be freed. */
uint64_t *th_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern);
void th_on_crash(const char *text); /* printed if the process dies; the text must stay where it is */

int64_t th_env_int(const char *name, int64_t otherwise);

/* Fails unless the status is the one named and the text says each of the words. */
void th_expect(const char *what, esmm_status got, esmm_status want, const char *text, const char *word1,
               const char *word2);

#endif
