/*
 * operands.h: operands with zeros in many kinds of places, for the table of test_kernels.c.
 */
#ifndef ESMM_TEST_OPERANDS_H
#define ESMM_TEST_OPERANDS_H

#include "harness.h"

#include <string.h>

typedef enum data_kind {
  KIND_DENSE,
  KIND_RANDOM,
  KIND_STRIPS_32,
  KIND_STRIPS_6,
  KIND_PATTERN,
  KIND_BURSTS, /* some words of 64 k's full, the others empty: no word has the average */
  KIND_ACTIVATIONS
} data_kind;

/* Is k alive in the strip of 16 that line (a row of A, a column of B) is in? Decided for 64 k's at once. */
static bool burst(int64_t line, int64_t k, double density, uint64_t seed)
{
  th_rng rng = {seed ^ (uint64_t)(line / 16 * 1000 + k / 64 + 1) * 0x9e3779b97f4a7c15u};
  return th_unit(&rng) < density;
}

typedef struct operand_recipe {
  esmm_operand operand;
  data_kind kind;
  double density; /* negative: a single entry */
  bool integers;
  uint64_t seed;
} operand_recipe;

/*
 * Fills m, and dense (row-major float64) with the same values, as rounded to m's dtype; generated has room for m's
 * elements. Some of the zeros are negative.
 */
static void make_operand(esmm_ctx *ctx, const operand_recipe *of, esmm_matrix *m, float *generated, double *dense)
{
  const esmm_operand operand = of->operand;
  const data_kind kind = of->kind;
  const double density = of->density;
  const bool integers = of->integers;
  static const char *const patterns[] = {"00000000", "01000000", "00100100", "10010010", "01011010",
                                         "11010101", "11011011", "01111111", "11111111"};
  static const esmm_generator_kind kinds[] = {[KIND_DENSE] = ESMM_GEN_DENSE,
                                              [KIND_RANDOM] = ESMM_GEN_RANDOM,
                                              [KIND_STRIPS_32] = ESMM_GEN_BLOCKWISE,
                                              [KIND_STRIPS_6] = ESMM_GEN_BLOCKWISE,
                                              [KIND_PATTERN] = ESMM_GEN_PATTERN,
                                              [KIND_BURSTS] = ESMM_GEN_DENSE,
                                              [KIND_ACTIVATIONS] = ESMM_GEN_ACTIVATIONS};
  int64_t rows = m->rows, cols = m->cols, elements = rows * cols;
  th_rng rng = {of->seed};
  bool single = density < 0;
  memset(generated, 0, (size_t)elements * sizeof *generated);
  if (elements > 0 && single) {
    generated[th_below(&rng, elements)] = integers ? 3 : 0.7f;
  } else if (elements > 0 && density > 0) {
    esmm_generator generator = {.size = sizeof generator,
                                .kind = kinds[kind],
                                .operand = operand,
                                .seed = of->seed,
                                .density = density,
                                .strip = kind == KIND_STRIPS_6 ? 6 : 32,
                                .pattern = patterns[(int)(density * 8 + 0.5)],
                                .dead = kind == KIND_ACTIVATIONS ? 0.3 * (1 - density) : 0,
                                .integers = integers};
    esmm_matrix out = {.data = generated, .rows = rows, .cols = cols, .dtype = ESMM_F32, .order = ESMM_ROW_MAJOR};
    if (esmm_generate(ctx, &generator, &out) != ESMM_OK)
      fail_msg("esmm_generate: %s", esmm_ctx_error(ctx));
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      double value = (double)generated[i * cols + j];
      if (kind == KIND_BURSTS && !single &&
          !burst(operand == ESMM_OPERAND_A ? i : j, operand == ESMM_OPERAND_A ? j : i, density, of->seed))
        value = 0;
      if (value == 0 && (th_next(&rng) & 3) == 0)
        value = -0.0; /* is zero too */
      th_set(m, i, j, value);
      dense[i * cols + j] = th_round(m->dtype, value);
    }
}

#endif
