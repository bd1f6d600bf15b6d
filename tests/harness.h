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

#include <cmocka.h>

#include "esmm.h"

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
double th_largest(esmm_dtype dtype);                                       /* at and beyond this, Inf */

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

/* ---- contexts and last words ---- */
esmm_ctx *th_ctx(int threads);      /* no tuning cache, no forced kernel; fails the test if it cannot be made */
void th_clean_environment(void);    /* unsets ESMM_FORCE and ESMM_THREADS, which would change what is tested */
void th_on_crash(const char *text); /* printed if the process dies; the text must stay where it is */

int64_t th_env_int(const char *name, int64_t otherwise);

#endif
