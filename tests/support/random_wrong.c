/*
 * random_wrong.c: one call with one thing wrong in it. It is refused with the status of that mistake and a text, leaves
 * C as it was, and gives no handle.
 */
#include "random_calls.h"

#include <string.h>

enum {
  K_DIFFERS,
  N_DIFFERS,
  ROWS_NEGATIVE,
  LD_SHORT,
  DTYPE_UNKNOWN,
  ORDER_UNKNOWN,
  OPTS_LARGER,
  RESERVED_SET,
  ACTIVATION_UNKNOWN,
  KERNEL_UNKNOWN,
  C_IS_A,
  A_NULL,
  NO_DATA,
  BIAS_OF_NO_GATE,
  STRIPS_NEGATIVE,
  ON_A_GPU,
  TOO_LARGE,
  MISTAKES
};

static void wrong_product(world *w)
{
  static const esmm_status expected[MISTAKES] = {[K_DIFFERS] = ESMM_ERR_SHAPE,
                                                 [N_DIFFERS] = ESMM_ERR_SHAPE,
                                                 [ROWS_NEGATIVE] = ESMM_ERR_SHAPE,
                                                 [LD_SHORT] = ESMM_ERR_LD,
                                                 [DTYPE_UNKNOWN] = ESMM_ERR_DTYPE,
                                                 [ORDER_UNKNOWN] = ESMM_ERR_ARGUMENT,
                                                 [OPTS_LARGER] = ESMM_ERR_ARGUMENT,
                                                 [RESERVED_SET] = ESMM_ERR_ARGUMENT,
                                                 [ACTIVATION_UNKNOWN] = ESMM_ERR_ARGUMENT,
                                                 [KERNEL_UNKNOWN] = ESMM_ERR_UNKNOWN_KERNEL,
                                                 [C_IS_A] = ESMM_ERR_OVERLAP,
                                                 [A_NULL] = ESMM_ERR_ARGUMENT,
                                                 [NO_DATA] = ESMM_ERR_ARGUMENT,
                                                 [BIAS_OF_NO_GATE] = ESMM_ERR_ARGUMENT,
                                                 [STRIPS_NEGATIVE] = ESMM_ERR_ARGUMENT,
                                                 [ON_A_GPU] = ESMM_ERR_DEVICE,
                                                 [TOO_LARGE] = ESMM_ERR_OVERFLOW};
  const held *h = any_weights(w, 0, 0, NULL);
  const int64_t m = about(w, 1, 40), k = h->k, n = h->n;
  const int mistake = (int)below(w, MISTAKES);
  if (k < 2 || n < 2 || m < 2)
    return;
  say(w, "m=%d, mistake %d", (int)m, mistake);
  draw_values(w, w->values[FOR_A], m, k, WHOLE, true);
  draw_values(w, w->values[FOR_C], m, n, WHOLE, true);
  esmm_matrix a = place_values(w, FOR_A, m, k, any_dtype(w), w->values[FOR_A]);
  esmm_matrix c = place_values(w, FOR_C, m, n, any_dtype(w), w->values[FOR_C]);
  const esmm_matrix before = c;
  const float bias[1] = {0};
  esmm_pattern *made = NULL;
  esmm_matmul_opts opts = {.size = sizeof opts};
  if (mistake == K_DIFFERS)
    a.cols--;
  if (mistake == N_DIFFERS)
    c.cols--;
  if (mistake == ROWS_NEGATIVE)
    a.rows = c.rows = -m;
  if (mistake == LD_SHORT)
    a.ld = (a.order == ESMM_ROW_MAJOR ? k : m) - 1;
  if (mistake == DTYPE_UNKNOWN)
    a.dtype = (esmm_dtype)(3 + below(w, 9));
  if (mistake == ORDER_UNKNOWN)
    c.order = (esmm_order)(2 + below(w, 9));
  if (mistake == OPTS_LARGER)
    opts.size++;
  if (mistake == RESERVED_SET)
    opts.reserved = 1;
  if (mistake == ACTIVATION_UNKNOWN)
    opts.activation = (esmm_activation)(6 + below(w, 9));
  if (mistake == KERNEL_UNKNOWN)
    opts.force = "joint_f64_slide_rule";
  if (mistake == C_IS_A) {
    a.data = c.data;
    a.dtype = c.dtype;
  }
  if (mistake == NO_DATA)
    a.data = NULL;
  if (mistake == BIAS_OF_NO_GATE)
    opts.gate_bias = bias;
  if (mistake == STRIPS_NEGATIVE) {
    opts.c_strip_rows = -1;
    opts.c_pattern = &made;
  }
  if (mistake == ON_A_GPU)
    a.place = ESMM_DEVICE;
  if (mistake == TOO_LARGE) {
    a.rows = c.rows = INT64_MAX / 2;
    a.ld = a.order == ESMM_ROW_MAJOR ? a.ld : a.rows;
    c.ld = c.order == ESMM_ROW_MAJOR ? c.ld : c.rows;
  }
  const esmm_status status = esmm_matmul(w->ctx, mistake == A_NULL ? NULL : &a, h->weights, &c, &opts, NULL);
  must_be(w, status, expected[mistake]);
  if (!esmm_ctx_error(w->ctx)[0] || made)
    fail_msg("%s: no text, or a pattern", w->now);
  for (int64_t i = 0; i < m * n; i++)
    if (th_get(&before, i / n, i % n) != w->values[FOR_C][i])
      fail_msg("%s: a refused product changed C[%d,%d]", w->now, (int)(i / n), (int)(i % n));
}

static void wrong_weights(world *w)
{
  const int64_t k = about(w, 2, 60), n = about(w, 2, 60);
  const int mistake = (int)below(w, 6);
  static const esmm_status expected[] = {ESMM_ERR_ARGUMENT, ESMM_ERR_ARGUMENT, ESMM_ERR_ARGUMENT,
                                         ESMM_ERR_LD,       ESMM_ERR_DTYPE,    ESMM_ERR_IO};
  say(w, "weights of %d x %d, mistake %d", (int)k, (int)n, mistake);
  draw_values(w, w->values[FOR_B], k, n, WHOLE, false);
  esmm_matrix b = place_values(w, FOR_B, k, n, any_dtype(w), w->values[FOR_B]);
  esmm_prepare_opts opts = {.size = sizeof opts};
  esmm_weights *weights = (esmm_weights *)1;
  if (mistake == 0)
    opts.format = (esmm_format){.kind = ESMM_FORMAT_NM, .keep = 5, .group = 4};
  if (mistake == 1)
    opts.format = (esmm_format){.kind = ESMM_FORMAT_BSR, .block_rows = 257, .block_cols = 8};
  if (mistake == 2)
    opts.use = (esmm_use)(3 + below(w, 9));
  if (mistake == 3)
    b.ld = (b.order == ESMM_ROW_MAJOR ? n : k) - 1;
  if (mistake == 4)
    b.dtype = (esmm_dtype)(3 + below(w, 9));
  if (mistake == 5)
    must_be(w, esmm_weights_load(w->ctx, "/nowhere/to/be/found.esmm", &weights), expected[5]);
  else
    must_be(w, esmm_prepare(w->ctx, &b, &opts, &weights), expected[mistake]);
  if (weights || !esmm_ctx_error(w->ctx)[0])
    fail_msg("%s: a handle, or no text", w->now);
}

void call_wrong(world *w)
{
  if (chance(w, 0.7))
    wrong_product(w);
  else
    wrong_weights(w);
}
