/*
 * kernel_factors.h: what the table of test_kernels.c varies, and the levels of each factor.
 */
#ifndef ESMM_TEST_KERNEL_FACTORS_H
#define ESMM_TEST_KERNEL_FACTORS_H

#include "harness.h"

#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const int64_t CPU_M[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 18, 31, 32, 33, 61, 63, 64, 65, 97};
static const int64_t CPU_N[] = {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 97, 128, 131};
static const int64_t CPU_K[] = {0,  1,   2,   3,   7,   8,   9,   31,  32,   63,   64,
                                65, 127, 129, 191, 255, 256, 257, 509, 1023, 1024, 1025};
/* On a GPU: the edges of its tiles, warps and strips. */
static const int64_t GPU_MN[] = {0,  1,  2,  3,  5,  8,   13,  16,  17,  31,  32,  33,
                                 61, 63, 64, 65, 97, 127, 128, 129, 191, 255, 256, 257};
static const int64_t GPU_K[] = {0,  1,   2,   3,   7,   8,   9,   31,  32,  33,   63,  64,
                                65, 127, 128, 129, 255, 257, 511, 512, 513, 1025, 2049};
static const int64_t FEW_MN[] = {1, 17, 33, 64, 129}, FEW_K[] = {1, 8, 33, 64, 129, 257};
static const int64_t *SIZES_M = CPU_M, *SIZES_N = CPU_N, *SIZES_K = CPU_K;
static const int64_t PADS[] = {0, 1, 5, 16};
static const double DENSITIES[] = {0, -1, .05, .3, .5, .9, 1};           /* -1: a single entry */
static const float SCALES[] = {0, 0, 1, 0.5f};                           /* [0]: a NULL pointer, the default */
static const int64_t PATTERN_ROWS[] = {0, 1, 2, 3, 4, 6, 8, 16, 32, 64}; /* 0: none given */
/* Blocks that are read in place, in half panels, or gathered; groups that are selected from, listed, or widened. */
static const struct {
  esmm_format_kind format;
  int rows, cols; /* of a block */
  int keep, group, group_cols;
} FORMATS[] = {
    {.format = ESMM_FORMAT_DENSE},      {ESMM_FORMAT_BSR, 32, 32, 0, 0, 0}, {ESMM_FORMAT_BSR, 64, 64, 0, 0, 0},
    {ESMM_FORMAT_BSR, 16, 16, 0, 0, 0}, {ESMM_FORMAT_BSR, 7, 48, 0, 0, 0},  {ESMM_FORMAT_BSR, 100, 5, 0, 0, 0},
    {ESMM_FORMAT_BSR, 1, 1, 0, 0, 0},   {ESMM_FORMAT_NM, 0, 0, 2, 4, 0},    {ESMM_FORMAT_NM, 0, 0, 1, 3, 1},
    {ESMM_FORMAT_NM, 0, 0, 4, 8, 1},    {ESMM_FORMAT_NM, 0, 0, 5, 13, 1},   {ESMM_FORMAT_NM, 0, 0, 8, 32, 1},
    {ESMM_FORMAT_NM, 0, 0, 1, 1, 1},    {ESMM_FORMAT_NM, 0, 0, 2, 4, 32},   {ESMM_FORMAT_NM, 0, 0, 3, 7, 48},
    {ESMM_FORMAT_NM, 0, 0, 4, 16, 4}};

enum {
  F_M,
  F_N,
  F_K,
  F_KIND_A,
  F_DENSITY_A,
  F_KIND_B,
  F_DENSITY_B,
  F_ORDER_A,
  F_ORDER_B,
  F_ORDER_C,
  F_DTYPE_A,
  F_DTYPE_B,
  F_DTYPE_C,
  F_PAD_A,
  F_PAD_B,
  F_PAD_C,
  F_ALPHA,
  F_BETA,
  F_BIAS,
  F_ACTIVATION,
  F_THREADS, /* on a GPU: bit 0: A and B in device memory, bit 1: C and the bias */
  F_USE,
  F_PATTERN,
  F_STRICT, /* bit 0: weights prepared for it, bit 1: asked of the product */
  F_INTEGERS,
  F_FORMAT,
  F_PLAIN, /* C in fp32 rows, alpha 1, beta 0 or 1, nothing after the sum: kernels have a short way for it */
  FACTORS
};

static int LEVELS[FACTORS] = {[F_M] = COUNT(CPU_M),
                              [F_N] = COUNT(CPU_N),
                              [F_K] = COUNT(CPU_K),
                              [F_KIND_A] = 7,
                              [F_DENSITY_A] = COUNT(DENSITIES),
                              [F_KIND_B] = 6, /* not activations */
                              [F_DENSITY_B] = COUNT(DENSITIES),
                              [F_ORDER_A] = 2,
                              [F_ORDER_B] = 2,
                              [F_ORDER_C] = 2,
                              [F_DTYPE_A] = 3,
                              [F_DTYPE_B] = 3,
                              [F_DTYPE_C] = 3,
                              [F_PAD_A] = COUNT(PADS),
                              [F_PAD_B] = COUNT(PADS),
                              [F_PAD_C] = COUNT(PADS),
                              [F_ALPHA] = COUNT(SCALES),
                              [F_BETA] = COUNT(SCALES),
                              [F_BIAS] = 2,
                              [F_ACTIVATION] = 3,
                              [F_THREADS] = 2,
                              [F_USE] = 3,
                              [F_PATTERN] = COUNT(PATTERN_ROWS),
                              [F_STRICT] = 4,
                              [F_INTEGERS] = 2,
                              [F_FORMAT] = COUNT(FORMATS),
                              [F_PLAIN] = 2};

enum { ALL_LEVELS = 208, MAX_ENTRANTS = 97, MAX_SIZE = 257, MAX_K = 2049, KEPT_CASES = 64, REDUCED_CASES = 40 };
static int64_t most_products = 3000000; /* m*n*k of a case: the third of three large sizes is not let in */

typedef struct test_case {
  uint8_t level[FACTORS];
} test_case;

/* ---- a case as a word, a letter a factor, and the seed of its data ---- */

static inline int level(const test_case *t, int factor)
{
  return t->level[factor];
}

static inline void case_word(const test_case *t, char *out)
{
  for (int f = 0; f < FACTORS; f++)
    out[f] = (char)('a' + t->level[f]);
  out[FACTORS] = 0;
}

static inline bool case_from_word(const char *word, test_case *t)
{
  if (strlen(word) != FACTORS)
    return false;
  for (int f = 0; f < FACTORS; f++) {
    if (word[f] < 'a' || word[f] >= 'a' + LEVELS[f])
      return false;
    t->level[f] = (uint8_t)(word[f] - 'a');
  }
  return true;
}

static inline uint64_t case_seed(const test_case *t)
{
  th_rng rng = {0};
  for (int f = 0; f < FACTORS; f++) {
    rng.state ^= (uint64_t)t->level[f];
    th_next(&rng);
    rng.state = th_next(&rng);
  }
  return rng.state;
}

#endif
