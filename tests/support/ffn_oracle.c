/* ffn_oracle.c: see ffn_oracle.h. */
#include "ffn_oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double pi = 3.14159265358979323846;

static double activate(esmm_activation activation, double x)
{
  switch (activation) {
  case ESMM_ACT_RELU:
    return x > 0 ? x : 0;
  case ESMM_ACT_RELU2:
    return x > 0 ? x * x : 0;
  case ESMM_ACT_GELU:
    return 0.5 * x * erfc(-x / sqrt(2));
  case ESMM_ACT_GELU_TANH:
    return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
  case ESMM_ACT_SILU:
    return x / (1 + exp(-x));
  case ESMM_ACT_NONE:
    break;
  }
  return x;
}

static double slope(esmm_activation activation, double x)
{
  double t, s;
  switch (activation) {
  case ESMM_ACT_RELU:
    return x > 0;
  case ESMM_ACT_RELU2:
    return x > 0 ? 2 * x : 0;
  case ESMM_ACT_GELU:
    return 0.5 * erfc(-x / sqrt(2)) + x * exp(-x * x / 2) / sqrt(2 * pi);
  case ESMM_ACT_GELU_TANH:
    t = tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
  case ESMM_ACT_SILU:
    s = 1 / (1 + exp(-x));
    return s + x * s * (1 - s);
  case ESMM_ACT_NONE:
    break;
  }
  return 1;
}

static double *numbers(int64_t count)
{
  double *p = calloc((size_t)count + 1, sizeof *p);
  assert_non_null(p);
  return p;
}

int64_t oracle_rows(const oracle *o, int parameter)
{
  const int64_t gate = o->gated ? 1 : 0;
  switch (parameter) {
  case P_X:
    return o->tokens;
  case P_W1:
    return o->d_model;
  case P_W1_V:
    return o->rank1;
  case P_GATE:
    return gate * o->d_model;
  case P_GATE_V:
    return gate * o->rank1;
  case P_W2:
    return o->d_hidden;
  case P_W2_V:
    return o->rank2;
  case P_B_GATE:
    return gate;
  default:
    return 1;
  }
}

int64_t oracle_cols(const oracle *o, int parameter)
{
  switch (parameter) {
  case P_X:
  case P_W2_V:
  case P_B2:
    return o->d_model;
  case P_W1:
  case P_GATE:
    return o->rank1 ? o->rank1 : o->d_hidden;
  case P_W2:
    return o->rank2 ? o->rank2 : o->d_model;
  default:
    return o->d_hidden;
  }
}

static void fill(th_rng *rng, double *p, int64_t count, double scale)
{
  for (int64_t i = 0; i < count; i++)
    p[i] = th_round(ESMM_F32, scale * (2 * th_unit(rng) - 1));
}

void oracle_create(oracle *o, uint64_t seed, double scale)
{
  th_rng rng = {seed};
  const int64_t hidden = o->tokens * o->d_hidden, model = o->tokens * o->d_model;
  for (int i = 0; i < P_COUNT; i++) {
    const int64_t count = oracle_rows(o, i) * oracle_cols(o, i);
    o->p[i] = o->d[i] = NULL;
    if (oracle_rows(o, i) == 0 && i != P_X)
      continue;
    o->p[i] = numbers(count);
    o->d[i] = numbers(count);
    fill(&rng, o->p[i], count, scale);
  }
  o->dy = numbers(model);
  fill(&rng, o->dy, model, 1);
  o->y = numbers(model);
  double **hidden_ones[] = {&o->up, &o->gate, &o->h, &o->dpre, &o->dpre_gate};
  for (size_t i = 0; i < sizeof hidden_ones / sizeof *hidden_ones; i++)
    *hidden_ones[i] = numbers(hidden);
  o->t = numbers(o->tokens * o->rank2);
  o->in_up = numbers(o->tokens * o->rank1);
  o->in_gate = numbers(o->tokens * o->rank1);
}

void oracle_free(oracle *o)
{
  for (int i = 0; i < P_COUNT; i++) {
    free(o->p[i]);
    free(o->d[i]);
  }
  double *others[] = {o->dy, o->y, o->up, o->gate, o->h, o->dpre, o->dpre_gate, o->t, o->in_up, o->in_gate};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    free(others[i]);
}

/* c [m,n] (+)= a b, with a [m,k] or stored as [k,m], b [k,n] or stored as [n,k] */
static void product(int64_t m, int64_t n, int64_t k, const double *a, bool a_turned, const double *b, bool b_turned,
                    double *c, bool add)
{
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = add ? c[i * n + j] : 0;
      for (int64_t x = 0; x < k; x++)
        sum += (a_turned ? a[x * m + i] : a[i * k + x]) * (b_turned ? b[j * k + x] : b[x * n + j]);
      c[i * n + j] = sum;
    }
}

static void before(oracle *o, int w, int v, int bias, double *in, double *out)
{
  const double *from = o->p[P_X];
  int64_t k = o->d_model;
  if (o->rank1) {
    product(o->tokens, o->rank1, o->d_model, from, false, o->p[w], false, in, false);
    from = in;
    k = o->rank1;
  }
  product(o->tokens, o->d_hidden, k, from, false, o->p[o->rank1 ? v : w], false, out, false);
  for (int64_t i = 0; i < o->tokens * o->d_hidden; i++)
    out[i] += o->p[bias][i % o->d_hidden];
}

/* The operand as the product sees it. */
static double *operand(oracle *o, const double *m, bool along_tokens, int which)
{
  double *copy = numbers(o->tokens * o->d_hidden);
  memcpy(copy, m, (size_t)(o->tokens * o->d_hidden) * sizeof *copy);
  if (o->keep)
    o->keep(o->user, copy, along_tokens, which);
  return copy;
}

void oracle_forward(oracle *o)
{
  const int64_t d_out = o->rank2 ? o->rank2 : o->d_model;
  before(o, P_W1, P_W1_V, P_B1, o->in_up, o->up);
  if (o->gated)
    before(o, P_GATE, P_GATE_V, P_B_GATE, o->in_gate, o->gate);
  for (int64_t i = 0; i < o->tokens * o->d_hidden; i++)
    o->h[i] = o->gated ? activate(o->activation, o->gate[i]) * o->up[i] : activate(o->activation, o->up[i]);
  double *h = operand(o, o->h, false, KEEP_Y);
  product(o->tokens, d_out, o->d_hidden, h, false, o->p[P_W2], false, o->rank2 ? o->t : o->y, false);
  free(h);
  if (o->rank2)
    product(o->tokens, o->d_model, o->rank2, o->t, false, o->p[P_W2_V], false, o->y, false);
  for (int64_t i = 0; i < o->tokens * o->d_model; i++)
    o->y[i] += o->p[P_B2][i % o->d_model];
}

double oracle_loss(oracle *o)
{
  oracle_forward(o);
  double sum = 0;
  for (int64_t i = 0; i < o->tokens * o->d_model; i++)
    sum += o->y[i] * o->dy[i];
  return sum;
}

static void column_sums(int64_t rows, int64_t cols, const double *m, double *out)
{
  memset(out, 0, (size_t)cols * sizeof *out);
  for (int64_t i = 0; i < rows * cols; i++)
    out[i % cols] += m[i];
}

static void branch_backward(oracle *o, const double *dpre, int w, int v, int bias, const double *in, int keep_dx,
                            int keep_dw, bool add)
{
  const int64_t t = o->tokens;
  double *along_features = operand(o, dpre, false, keep_dx), *along_tokens = operand(o, dpre, true, keep_dw);
  column_sums(t, o->d_hidden, dpre, o->d[bias]);
  if (o->rank1) {
    double *ds = numbers(t * o->rank1);
    product(o->rank1, o->d_hidden, t, in, true, along_tokens, false, o->d[v], false);
    product(t, o->rank1, o->d_hidden, along_features, false, o->p[v], true, ds, false);
    product(o->d_model, o->rank1, t, o->p[P_X], true, ds, false, o->d[w], false);
    product(t, o->d_model, o->rank1, ds, false, o->p[w], true, o->d[P_X], add);
    free(ds);
  } else {
    product(o->d_model, o->d_hidden, t, o->p[P_X], true, along_tokens, false, o->d[w], false);
    product(t, o->d_model, o->d_hidden, along_features, false, o->p[w], true, o->d[P_X], add);
  }
  free(along_features);
  free(along_tokens);
}

void oracle_backward(oracle *o)
{
  const int64_t t = o->tokens, d_out = o->rank2 ? o->rank2 : o->d_model;
  double *dt = numbers(t * d_out), *dh = numbers(t * o->d_hidden), *h = operand(o, o->h, true, KEEP_DW2);
  column_sums(t, o->d_model, o->dy, o->d[P_B2]);
  if (o->rank2) {
    product(t, o->rank2, o->d_model, o->dy, false, o->p[P_W2_V], true, dt, false);
    product(o->rank2, o->d_model, t, o->t, true, o->dy, false, o->d[P_W2_V], false);
  } else {
    memcpy(dt, o->dy, (size_t)(t * d_out) * sizeof *dt);
  }
  product(o->d_hidden, d_out, t, h, true, dt, false, o->d[P_W2], false);
  product(t, o->d_hidden, d_out, dt, false, o->p[P_W2], true, dh, false);
  for (int64_t i = 0; i < t * o->d_hidden; i++) {
    o->dpre[i] = dh[i] * (o->gated ? activate(o->activation, o->gate[i]) : slope(o->activation, o->up[i]));
    if (o->gated)
      o->dpre_gate[i] = dh[i] * o->up[i] * slope(o->activation, o->gate[i]);
  }
  branch_backward(o, o->dpre, P_W1, P_W1_V, P_B1, o->in_up, KEEP_DX, KEEP_DW1, false);
  if (o->gated)
    branch_backward(o, o->dpre_gate, P_GATE, P_GATE_V, P_B_GATE, o->in_gate, KEEP_DX_GATE, KEEP_DGATE, true);
  free(dt);
  free(dh);
  free(h);
}
