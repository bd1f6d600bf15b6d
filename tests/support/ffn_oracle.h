/*
 * ffn_oracle.h: the feed-forward layer in float64, written from its formulas and not from the library's code: forward,
 * backward, and 2:4 by magnitude. What it multiplies may be replaced by what a 2:4 mode keeps.
 */
#ifndef ESMM_TEST_FFN_ORACLE_H
#define ESMM_TEST_FFN_ORACLE_H

#include "esmm_ffn.h"
#include "harness.h"

/* Parameters in float64, row-major; those that the layer has not are NULL. Gradients have the same shape. */
enum { P_X, P_W1, P_W1_V, P_GATE, P_GATE_V, P_W2, P_W2_V, P_B1, P_B_GATE, P_B2, P_COUNT };

typedef struct oracle {
  int64_t tokens, d_model, d_hidden, rank1, rank2;
  esmm_activation activation;
  bool gated;
  double *p[P_COUNT], *d[P_COUNT]; /* values and gradients */
  double *dy;
  double *up, *gate, *h, *t, *y, *in_up, *in_gate;
  double *dpre, *dpre_gate;
  /* What a 2:4 mode does to an operand: NULL, or called on a copy [tokens, d_hidden] before it is multiplied. */
  void (*keep)(void *user, double *m, bool along_tokens, int operand);
  void *user;
} oracle;

enum { KEEP_Y, KEEP_DX, KEEP_DX_GATE, KEEP_DW1, KEEP_DGATE, KEEP_DW2 };

void oracle_create(oracle *o, uint64_t seed, double scale); /* sizes set; fills parameters and dy, fp32 values */
void oracle_free(oracle *o);
int64_t oracle_rows(const oracle *o, int parameter); /* 0: the layer has no such parameter */
int64_t oracle_cols(const oracle *o, int parameter);
void oracle_forward(oracle *o);
double oracle_loss(oracle *o); /* sum of y * dy: its gradient in y is dy */
void oracle_backward(oracle *o);

#endif
