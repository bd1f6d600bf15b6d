/* ffn_rig.c: see ffn_rig.h. */
#include "ffn_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const layout plain = {ESMM_F32, ESMM_ROW_MAJOR, 0};

esmm_matrix make_matrix(int64_t rows, int64_t cols, layout l)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = l.dtype, .order = l.order};
  m.ld = (l.order == ESMM_ROW_MAJOR ? cols : rows) + l.pad;
  const size_t bytes = (size_t)(m.ld * (l.order == ESMM_ROW_MAJOR ? rows : cols) + 1) * esmm_dtype_size(l.dtype);
  m.data = malloc(bytes);
  assert_non_null(m.data);
  memset(m.data, 0xff, bytes); /* NaN in every dtype */
  return m;
}

static void put(esmm_matrix *m, const double *values)
{
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++)
      th_set(m, i, j, values[i * m->cols + j]);
}

void must(esmm_ctx *ctx, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", esmm_status_str(status), esmm_ctx_error(ctx));
}

esmm_ffn_opts opts_of(const oracle *o)
{
  return (esmm_ffn_opts){.size = sizeof(esmm_ffn_opts),
                         .d_model = o->d_model,
                         .d_hidden = o->d_hidden,
                         .rank1 = o->rank1,
                         .rank2 = o->rank2,
                         .activation = o->activation,
                         .gated = o->gated};
}

static const float *bias_of(const rig *r, int parameter)
{
  return r->p[parameter].rows ? r->p[parameter].data : NULL;
}

void rig_create(rig *r, oracle *o, const esmm_ffn_opts *opts, layout l, int threads)
{
  memset(r, 0, sizeof *r);
  r->o = o;
  r->ctx = th_ctx_on("cpu", threads); /* what a GPU is compared with, whatever device the tests are told to take */
  must(r->ctx, esmm_ffn_create(r->ctx, opts, &r->ffn));
  must(r->ctx, esmm_ffn_cache_create(r->ctx, r->ffn, &r->cache));
  esmm_matrix *used[P_COUNT], *grads[P_COUNT];
  for (int i = 0; i < P_COUNT; i++) {
    const int64_t rows = oracle_rows(o, i), cols = oracle_cols(o, i);
    used[i] = grads[i] = NULL;
    if (!o->p[i])
      continue;
    r->p[i] = make_matrix(rows, cols, i >= P_B1 ? plain : l);
    r->d[i] = make_matrix(rows, cols, i >= P_B1 ? plain : l);
    put(&r->p[i], o->p[i]);
    used[i] = &r->p[i];
    grads[i] = &r->d[i];
  }
  r->y = make_matrix(o->tokens, o->d_model, l);
  r->dy = make_matrix(o->tokens, o->d_model, l);
  put(&r->dy, o->dy);
  r->weights = (esmm_ffn_weights){.size = sizeof r->weights,
                                  .w1 = used[P_W1],
                                  .w1_v = used[P_W1_V],
                                  .gate = used[P_GATE],
                                  .gate_v = used[P_GATE_V],
                                  .w2 = used[P_W2],
                                  .w2_v = used[P_W2_V],
                                  .b1 = bias_of(r, P_B1),
                                  .b_gate = bias_of(r, P_B_GATE),
                                  .b2 = bias_of(r, P_B2)};
  r->grads = (esmm_ffn_grads){.size = sizeof r->grads,
                              .x = grads[P_X],
                              .w1 = grads[P_W1],
                              .w1_v = grads[P_W1_V],
                              .gate = grads[P_GATE],
                              .gate_v = grads[P_GATE_V],
                              .w2 = grads[P_W2],
                              .w2_v = grads[P_W2_V],
                              .b1 = r->d[P_B1].data,
                              .b_gate = r->d[P_B_GATE].data,
                              .b2 = r->d[P_B2].data};
  r->report.size = sizeof r->report;
  must(r->ctx, esmm_ffn_set_weights(r->ctx, r->ffn, &r->weights, NULL));
}

void rig_run(rig *r)
{
  must(r->ctx, esmm_ffn_forward(r->ctx, r->ffn, &r->p[P_X], &r->y, r->cache, NULL));
  must(r->ctx, esmm_ffn_backward(r->ctx, r->ffn, r->cache, &r->dy, &r->grads, &r->report));
}

void rig_free(rig *r)
{
  esmm_ffn_cache_free(r->cache);
  esmm_ffn_free(r->ffn);
  esmm_ctx_free(r->ctx);
  for (int i = 0; i < P_COUNT; i++) {
    free(r->p[i].data);
    free(r->d[i].data);
  }
  free(r->y.data);
  free(r->dy.data);
}

const char *const gradient_names[P_COUNT] = {"dx", "dW1", "dW1 v", "dWg", "dWg v", "dW2", "dW2 v", "db1", "dbg", "db2"};

void check_matrix(const char *what, const char *name, const esmm_matrix *m, const double *want, double share)
{
  double largest = 0;
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      const double got = th_get(m, i, j), error = fabs(got - want[i * m->cols + j]);
      const double towards = got > 0 ? want[i * m->cols + j] : -want[i * m->cols + j];
      const bool too_large = m->dtype == ESMM_F16 && isinf(got) && towards >= (1 - share) * 65504; /* its largest */
      if (!(error <= share * largest) && !too_large)
        fail_msg("%s: %s [%lld, %lld] is %.9g, must be %.9g (largest %.3g)", what, name, (long long)i, (long long)j,
                 got, want[i * m->cols + j], largest);
    }
}

void check_all(const char *what, const rig *r, double share)
{
  check_matrix(what, "y", &r->y, r->o->y, share);
  for (int i = 0; i < P_COUNT; i++)
    if (r->o->p[i])
      check_matrix(what, gradient_names[i], &r->d[i], r->o->d[i], share);
}

void kill_features(oracle *o, double share, uint64_t seed)
{
  th_rng rng = {seed};
  double *bias = o->p[o->gated ? P_B_GATE : P_B1];
  for (int64_t f = 0; f < o->d_hidden; f++)
    if (th_unit(&rng) < share)
      bias[f] = -1000;
}

void make_integers(oracle *o, uint64_t seed, double zeros)
{
  th_rng rng = {seed};
  for (int i = 0; i < P_COUNT; i++)
    for (int64_t e = 0; o->p[i] && e < oracle_rows(o, i) * oracle_cols(o, i); e++)
      o->p[i][e] = th_unit(&rng) < zeros ? 0 : (double)(th_below(&rng, 5) - 2);
  for (int64_t e = 0; e < o->tokens * o->d_model; e++)
    o->dy[e] = (double)(th_below(&rng, 5) - 2);
}

void expect(rig *r, esmm_status got, esmm_status want, const char *word1, const char *word2)
{
  th_expect("ffn", got, want, esmm_ctx_error(r->ctx), word1, word2);
}
