/* ffn_speed.h: what ffn_speed.c and ffn_speed_gpu.c share: a clock, medians, numbers from a seed and from arguments. */
#ifndef FFN_SPEED_H
#define FFN_SPEED_H

#include "esmm_ffn.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define RUNS 9 /* of which the median counts */

static inline double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double unit(void) /* [0, 1), splitmix64 */
{
  static uint64_t state = 1;
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static inline float normal(double deviation)
{
  const double radius = sqrt(-2 * log(1 - unit()));
  return (float)(deviation * radius * cos(6.283185307179586 * unit()));
}

/* A matrix in host memory, not set. */
static inline esmm_matrix host_matrix(const char *program, int64_t rows, int64_t cols)
{
  const esmm_matrix m = {.data = malloc((size_t)(rows * cols) * sizeof(float)), .rows = rows, .cols = cols};
  if (!m.data) {
    fprintf(stderr, "%s: out of memory\n", program);
    exit(1);
  }
  return m;
}

static inline int by_size(const void *x, const void *y)
{
  const double a = *(const double *)x, b = *(const double *)y;
  return a < b ? -1 : a > b;
}

static inline double median(double *seconds)
{
  qsort(seconds, RUNS, sizeof *seconds, by_size);
  return seconds[RUNS / 2];
}

/* An argument, 1 to most. */
static inline int64_t whole(const char *program, const char *usage, const char *text, int64_t most)
{
  char *end;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (errno == 0 && end != text && !*end && value >= 1 && value <= most)
    return value;
  fprintf(stderr, "%s: '%s' is no number from 1 to %lld\n%s", program, text, (long long)most, usage);
  exit(2);
}

#endif
